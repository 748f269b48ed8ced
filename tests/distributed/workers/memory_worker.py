"""Passes that run out of memory on one rank, and are repeated on all. ``memory_worker.py FOLDER``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.algorithms.aggregation import with_loss_weights
from megatron_rl.algorithms.objectives import policy_objective
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import gather_metrics
from megatron_rl.megatron.passes import (
    BYTES_PER_TOKEN,
    RESIDENT_BYTES,
    SPLIT_PASSES,
    SPLIT_TOKENS,
    OutOfMemory,
)
from megatron_rl.roles.model_role import ModelRole

sys.path.insert(0, str(Path(__file__).parent))
import training
from scarce import BACKWARD, FORWARD, scarce

OUTPUTS = ("old_log_probs", "old_entropy")
WIDE = 1000
ROW_BYTES = 23 * 32 * 4
"""Activations of the longest row of a batch in one layer."""


def role_of(folder: Path, family: str, **case: Any) -> tuple[ModelRole, Any]:
    """Return an actor over all ranks, with the batch to train on."""
    model = training.build(folder / family, {**case, "watched": family.endswith("moe")})
    optimizer = training.optimizer_of(model, case.get("ddp"))
    role = ModelRole(
        "actor",
        model.groups.layout,
        model,
        tokens_per_microbatch=WIDE,
        outputs=OUTPUTS,
        optimizer=optimizer,
        measures_memory=True,
    )
    batch = torch.load(folder / family / "batch.pt", weights_only=False)
    return role, with_loss_weights(batch, training.ALGORITHM)


def learn(role: ModelRole, batch: Any) -> list[torch.Tensor]:
    """Return the gradients and metrics of a training pass."""
    objective = partial(policy_objective, training.ALGORITHM)
    _, metrics = role.accumulate(batch, objective)
    values = gather_metrics(metrics).values()
    wrapped: Any = role.model and role.model.wrapped
    gradients = [
        buffer.grad_data.clone()
        for chunk in wrapped
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
    ]
    # Padding depends on the micro-batches.
    names = sorted(name for name in values if not name.startswith("padding/"))
    return [torch.tensor([values[name] for name in names]), *gradients]


def infer(role: ModelRole, batch: Any) -> list[torch.Tensor]:
    """Return the log-probs and entropies of this rank's rows."""
    shard = role.infer(batch)
    return [shard.rows, *shard.tokens.values()]


def evaluate(role: ModelRole, batch: Any) -> list[torch.Tensor]:
    """Return the metrics of a pass without gradients."""
    metrics = gather_metrics(role.eval_step(batch, partial(policy_objective, training.ALGORITHM)))
    return [torch.tensor(list(metrics.values().values()))]


def check_repeated(
    role: ModelRole,
    batch: Any,
    run: Callable[..., list[torch.Tensor]],
    where: str,
    rank: int,
) -> None:
    """Compare a pass that fails on one rank with one whose micro-batches are as small from the start."""
    assert role.model is not None
    role.tokens_per_microbatch = WIDE
    role.pass_metrics()
    most = 1e9
    if device.rank() == rank:
        most = 3 * ROW_BYTES
    with scarce(role.model, most, where):
        found = run(role, batch)
    split = role.pass_metrics().values()
    assert split[SPLIT_PASSES] == 1, split

    role.tokens_per_microbatch = int(split[SPLIT_TOKENS])
    expected = run(role, batch)
    assert SPLIT_PASSES not in role.pass_metrics().values()
    for value, truth in zip(found, expected, strict=True):
        assert torch.equal(value, truth), (run.__name__, where)

    # As close to the pass that has all rows at once as rounding allows.
    # Gradients of several ranks are complete in the shard of each rank alone.
    role.tokens_per_microbatch = WIDE
    compared = len(found)
    if dist.get_world_size() > 1:
        compared = 1
    for value, truth in zip(found[:compared], run(role, batch), strict=False):
        if run is not infer:
            torch.testing.assert_close(value, truth, rtol=1e-3, atol=1e-4)


def check_report(role: ModelRole, batch: Any, rank: int) -> None:
    """Check that all ranks raise one report if the pass fails again, and if rows cannot be split."""
    assert role.model is not None
    role.tokens_per_microbatch = WIDE
    most = 1e9
    if device.rank() == rank:
        most = ROW_BYTES / 2
    reasons = []
    for budget in (WIDE, 23):
        role.tokens_per_microbatch = budget
        with scarce(role.model, most):
            try:
                learn(role, batch)
            except OutOfMemory as error:
                shortage = error.shortage
                reasons.append(shortage.reason)
                assert (shortage.role, shortage.rank) == ("actor", rank)
                assert any("all gradients" in line for line in shortage.tensors), shortage.tensors
    assert len(reasons) == 2 and "repeated once already" in reasons[0], reasons
    assert "one row already" in reasons[1], reasons


def check_measured(role: ModelRole, batch: Any) -> None:
    """Check the measurements of a pass, from the readings of a device."""
    readings = [
        device.MemoryReading(allocated=1000, peak=1000, others=200, total=9000),
        device.MemoryReading(allocated=1500, peak=5000, others=200, total=9000),
    ]
    role.tokens_per_microbatch = 100
    original = device.read_memory
    device.read_memory = lambda restart=False: readings[not restart]
    try:
        role.pass_metrics()
        learn(role, batch)
    finally:
        device.read_memory = original
    values = role.pass_metrics().values()
    assert values[RESIDENT_BYTES] == 1200, values
    assert 40 <= values[BYTES_PER_TOKEN] <= 80, values


def main(folder: Path) -> None:
    device.initialize(timeout=60)
    ranks = dist.get_world_size()
    last = ranks - 1
    if ranks == 1:
        # Buckets that are reduced during the backward pass have no peers on one rank.
        for ddp in ({}, {"overlap_grad_reduce": True}):
            role, batch = role_of(folder, "qwen3", ddp=ddp)
            for where in (FORWARD, BACKWARD, BACKWARD):
                check_repeated(role, batch, learn, where, 0)
            role.step()
        check_measured(role, batch)
    else:
        role, batch = role_of(folder, "qwen3")
        for run in (learn, infer, evaluate):
            check_repeated(role, batch, run, FORWARD, last)
        check_repeated(role, batch, learn, BACKWARD, 0)
        check_report(role, batch, last)

        # Weights are the same on all ranks after a step, and routers count each token once.
        role.step()
        role, batch = role_of(folder, "qwen3-moe", recompute="full")
        check_repeated(role, batch, learn, BACKWARD, last)
        check_repeated(role, batch, infer, FORWARD, 0)
    print("memory: all passes agree", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
