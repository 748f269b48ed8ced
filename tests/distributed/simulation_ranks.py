"""Measure the phases of one rank's step: ``real``, ``simulated``, or of the ``shipped`` configuration."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.algorithms import policy_objective
from megatron_rl.algorithms.lookup import get_algorithm
from megatron_rl.check.configuration import check_config
from megatron_rl.config.load import load
from megatron_rl.config.placement import process_group_counts
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.megatron import layers
from megatron_rl.megatron.model import build_model
from megatron_rl.megatron.optimizer import Optimizer, wrap
from megatron_rl.megatron.schedule import forward_backward, forward_only
from megatron_rl.planning.simulation.device import Simulation
from megatron_rl.planning.simulation.ranks import Simulated, simulation_plan
from megatron_rl.planning.simulation.step import simulate
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import TrainBatch
from tests.hf_models import config_of

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}


def phases(simulated: bool) -> dict[str, Any]:
    """Return begin and peak bytes of each phase, with real memory or in a simulation."""
    if simulated:
        device.simulate()

    # The host's attention takes grouped key-value heads; the simulated accelerator repeats them.
    setattr(layers, "_takes_grouped_keys", lambda query: False)
    device.initialize()
    simulation = Simulation()
    rows = batch(rows=8, length=256)

    groups = ParallelGroups(ParallelLayout((0,)))
    with simulation.measured():
        with simulation.phase("build"):
            model = build_model(config_of("qwen2", **SIZES), groups, dtype=torch.float32, attention="torch")
            wrap(model, True, {"overlap_grad_reduce": False})
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


def shipped() -> dict[str, Any]:
    """Simulate the first rank of the shipped 7B configuration; return its differences from the prediction."""
    loaded = load(CONFIGS / "qwen2.5-7b-8gpu.yaml")
    report = check_config(
        loaded,
        8,
        without_files=True,
        shipped_models=CONFIGS / "models",
        patience=0,
    )
    # Without files: the shipped configurations contain only the model's config.json.
    config, estimate = simulation_plan(report, 0)
    assert report.batch is not None
    rank = Simulated(simulate(config, report.models, report.batch, 0, 8), estimate)
    differences = {phase: rank.difference(phase) for phase in ("generate", "score", "learn")}
    assert report.layouts is not None
    return {
        "differences": differences, "groups": rank.rank.groups, "connections": rank.rank.connections,
        "expected_groups": process_group_counts(report.layouts, 8).per_rank,
        "sync": asdict(rank.rank.sync) if rank.rank.sync is not None else None,
    }  # fmt: skip


if __name__ == "__main__":
    mode = sys.argv[1]
    print("measured:", json.dumps(shipped() if mode == "shipped" else phases(mode == "simulated")))
    dist.destroy_process_group()
