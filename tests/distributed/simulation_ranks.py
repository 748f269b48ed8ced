"""Measure the memory of a rank's step, real or simulated: ``simulation_ranks.py MODE``.

``real`` and ``simulated`` measure the phases of a tiny model, ``shipped`` simulates a shipped configuration,
and ``waits`` counts how often the host waits for the accelerator.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.algorithms import policy_objective
from megatron_rl.algorithms.correction import Correction
from megatron_rl.algorithms.lookup import get_algorithm
from megatron_rl.algorithms.losses import Gmpo, Gspo, Topr
from megatron_rl.check.configuration import check_config
from megatron_rl.config.load import load
from megatron_rl.config.placement import process_group_counts
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.megatron import layers
from megatron_rl.megatron.model import build_model
from megatron_rl.megatron.optimizer import Optimizer, wrap_in_ddp
from megatron_rl.megatron.schedule import forward_backward, forward_only
from megatron_rl.planning.simulation.device import Simulation
from megatron_rl.planning.simulation.ranks import (
    RankSimulation,
    plan_simulation,
)
from megatron_rl.planning.simulation.step import simulate_step
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import TrainBatch
from tests.hf_models import config_of

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
}


def phases(simulated: bool) -> dict[str, Any]:
    """Return the bytes at the begin of each phase and at its peak, with real memory or in a simulation."""
    if simulated:
        device.become_simulated_rank()

    # The host's attention takes grouped key-value heads; the simulated accelerator repeats them.
    setattr(layers, "_supports_grouped_keys", lambda query: False)
    device.initialize()
    simulation = Simulation()
    rows = batch(rows=8, length=256)

    groups = ParallelGroups(ParallelLayout((0,)))
    with simulation.measure():
        # The first optimizer step allocates the moments.
        with simulation.phase("build"):
            model = build_model(
                config_of("qwen2", **SIZES),
                groups,
                dtype=torch.float32,
                attention="torch",
            )
            wrap_in_ddp(model, True, {"overlap_grad_reduce": False})
            optimizer = Optimizer(model, OptimizerConfig(minimum_learning_rate=0.0), 10)
            optimizer.step()

        with simulation.phase("score"):
            forward_only(model, rows, 512, rows.response_mask)

        with simulation.phase("learn"):
            objective = partial(policy_objective, get_algorithm("grpo"))
            forward_backward(model, rows, 512, rows.response_mask, objective)
    return {name: [usage.begin, usage.peak] for name, usage in simulation.phases.items()}


def batch(rows: int, length: int) -> TrainBatch:
    """Return a batch of equal rows; the values do not influence memory."""
    values = torch.ones(rows * length)
    return TrainBatch(
        tokens=values.long(),
        lengths=torch.full((rows,), length),
        response_mask=values.bool(),
        loss_weights=values,
        temperature=torch.ones(rows),
        advantages=values,
        old_log_probs=values,
        rollout_log_probs=values,
        ref_log_probs=values,
    )


def waits() -> dict[str, Any]:
    """Count the host's waits for the device in two micro-batches of each loss, with truncated sampling."""
    device.become_simulated_rank()
    device.initialize()
    plain = get_algorithm("grpo")
    correction = Correction(
        level="sequence",
        rejection={"token_k2": 1.0, "seq_max_k3": 9.0},
        bypass=True,
    )
    algorithms = {
        "ppo": plain,
        "opsm": replace(
            plain,
            policy_loss=replace(plain.policy_loss, opsm_delta=0.1),
        ),
        "gspo": replace(plain, policy_loss=Gspo()),
        "gmpo": replace(plain, policy_loss=Gmpo()),
        "topr": replace(plain, policy_loss=Topr()),
        "bypass": replace(plain, correction=correction),
    }
    rows = batch(rows=4, length=256)
    sizes = torch.full((len(rows.tokens),), 3, dtype=torch.int32)
    rows = replace(
        rows,
        support_sizes=sizes,
        support=torch.arange(3, dtype=torch.int32).repeat(len(sizes)),
    )
    # The losses share a model, since only the work after its forward pass differs.
    simulation = Simulation()
    with simulation.measure():
        groups = ParallelGroups(ParallelLayout((0,)))
        model = build_model(
            config_of("qwen2", **SIZES),
            groups,
            dtype=torch.bfloat16,
            attention="torch",
        )
        wrap_in_ddp(model, True, {"overlap_grad_reduce": False})
        for name, algorithm in algorithms.items():
            with simulation.phase(name):
                objective = partial(policy_objective, algorithm)
                _, metrics = forward_backward(model, rows, 512, rows.response_mask, objective)
                assert "policy/loss" in metrics.sums
    return {name: simulation.phases[name].waits for name in algorithms}


def shipped() -> dict[str, Any]:
    """Simulate the first rank of the shipped 7B configuration, with truncated sampling."""
    loaded = load(CONFIGS / "qwen2.5-7b-8gpu.yaml", ["rollout.top_p=0.9"])
    report = check_config(
        loaded,
        8,
        without_files=True,
        shipped_models=CONFIGS / "models",
        patience=0,
    )
    # Without files: the shipped configurations contain only the model's config.json.
    config, estimate = plan_simulation(report, 0)
    assert report.batch is not None
    rank = RankSimulation(
        simulate_step(config, report.models, report.batch, 0, 8),
        estimate,
    )
    differences = {phase: rank.relative_error(phase) for phase in ("generate", "score", "learn")}
    assert report.layouts is not None
    phases = {name: rank.rank.phases[name] for name in ("score", "learn")}
    return {
        "differences": differences,
        "groups": rank.rank.groups,
        "connections": rank.rank.connections,
        "expected_groups": process_group_counts(report.layouts, 8).per_rank,
        "sync": asdict(rank.rank.sync) if rank.rank.sync is not None else None,
        "waits": {name: [phase.microbatches, phase.waits] for name, phase in phases.items()},
    }


if __name__ == "__main__":
    mode = sys.argv[1]
    modes = {"shipped": shipped, "waits": waits}
    measured = modes[mode]() if mode in modes else phases(mode == "simulated")
    print("measured:", json.dumps(measured))
    dist.destroy_process_group()
