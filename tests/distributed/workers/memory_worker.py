"""Check that passes which run out of memory on one rank are repeated on all: ``memory_worker.py FOLDER``."""

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
LARGE_BUDGET = 1000
"""Tokens per micro-batch that all rows of a batch fit in."""
ROW_BYTES = 23 * 32 * 4
"""Bytes of the hidden states of a batch's longest row: tokens x hidden size x bytes of float32."""
NO_LIMIT = 1e9


def build_role(folder: Path, family: str, **case: Any) -> tuple[ModelRole, Any]:
    """Return an actor over all ranks, with the batch to train on."""
    is_watched = family.endswith("moe")
    model = training.build(folder / family, {**case, "watched": is_watched})
    optimizer = training.build_optimizer(model, case.get("ddp"))
    role = ModelRole(
        "actor",
        model.groups.layout,
        model,
        tokens_per_microbatch=LARGE_BUDGET,
        outputs=OUTPUTS,
        optimizer=optimizer,
        measures_memory=True,
    )
    batch = torch.load(folder / family / "batch.pt", weights_only=False)
    return role, with_loss_weights(batch, training.ALGORITHM)


def train_pass(role: ModelRole, batch: Any) -> list[torch.Tensor]:
    """Return the metrics and gradients of a forward and backward pass."""
    objective = partial(policy_objective, training.ALGORITHM)
    _, metrics = role.accumulate(batch, objective)

    # Padding depends on the micro-batches, so it is not compared.
    value_by_name = gather_metrics(metrics).values()
    names = sorted(name for name in value_by_name if not name.startswith("padding/"))
    results = [torch.tensor([value_by_name[name] for name in names])]

    wrapped_chunks: Any = role.model and role.model.wrapped
    for chunk in wrapped_chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            results.append(buffer.grad_data.clone())
    return results


def log_prob_pass(role: ModelRole, batch: Any) -> list[torch.Tensor]:
    """Return the indices, log-probs and entropies of this rank's rows."""
    shard = role.infer(batch)
    return [shard.rows, *shard.tokens.values()]


def eval_pass(role: ModelRole, batch: Any) -> list[torch.Tensor]:
    """Return the metrics of a pass without gradients."""
    objective = partial(policy_objective, training.ALGORITHM)
    metrics = gather_metrics(role.eval_step(batch, objective))
    return [torch.tensor(list(metrics.values().values()))]


def check_repeated(
    role: ModelRole,
    batch: Any,
    run_pass: Callable[..., list[torch.Tensor]],
    direction: str,
    scarce_rank: int,
) -> None:
    """Check that a pass which fails on one rank is repeated with smaller micro-batches on all ranks."""
    assert role.model is not None
    # Reading the metrics clears them.
    role.tokens_per_microbatch = LARGE_BUDGET
    role.pass_metrics()

    max_bytes = NO_LIMIT
    if device.rank() == scarce_rank:
        max_bytes = 3 * ROW_BYTES
    with scarce(role.model, max_bytes, direction):
        repeated = run_pass(role, batch)
    split_metrics = role.pass_metrics().values()
    assert split_metrics[SPLIT_PASSES] == 1, split_metrics

    # The reference has micro-batches of the same size from the start.
    role.tokens_per_microbatch = int(split_metrics[SPLIT_TOKENS])
    expected = run_pass(role, batch)
    assert SPLIT_PASSES not in role.pass_metrics().values()
    for actual, truth in zip(repeated, expected, strict=True):
        assert torch.equal(actual, truth), (run_pass.__name__, direction)

    # The results are also those of one large micro-batch, up to rounding. With several ranks only the
    # metrics are compared: each rank's gradients are complete in its own shard alone.
    role.tokens_per_microbatch = LARGE_BUDGET
    num_compared = len(repeated)
    if dist.get_world_size() > 1:
        num_compared = 1
    unsplit = run_pass(role, batch)
    if run_pass is not log_prob_pass:
        for actual, truth in zip(repeated[:num_compared], unsplit, strict=False):
            torch.testing.assert_close(actual, truth, rtol=1e-3, atol=1e-4)


def check_report(role: ModelRole, batch: Any, scarce_rank: int) -> None:
    """Check that all ranks raise the same error if a repeated pass fails, and if rows cannot be split."""
    assert role.model is not None
    role.tokens_per_microbatch = LARGE_BUDGET
    max_bytes = NO_LIMIT
    if device.rank() == scarce_rank:
        max_bytes = ROW_BYTES / 2

    # 23 tokens are the longest row, so a micro-batch of the second budget has one row already.
    reasons = []
    for budget in (LARGE_BUDGET, 23):
        role.tokens_per_microbatch = budget
        with scarce(role.model, max_bytes):
            try:
                train_pass(role, batch)
            except OutOfMemory as error:
                shortage = error.shortage
                reasons.append(shortage.reason)
                assert (shortage.role, shortage.rank) == ("actor", scarce_rank)
                assert any("all gradients" in line for line in shortage.tensors), shortage.tensors

    assert len(reasons) == 2, reasons
    assert "repeated once already" in reasons[0], reasons
    assert "one row already" in reasons[1], reasons


def check_measured(role: ModelRole, batch: Any) -> None:
    """Check the memory metrics of a pass against simulated readings of a device."""
    begin = device.MemoryReading(
        allocated=1000,
        peak=1000,
        other_bytes=200,
        total=9000,
    )
    end = device.MemoryReading(
        allocated=1500,
        peak=5000,
        other_bytes=200,
        total=9000,
    )

    def read_memory(reset_peak: bool = False) -> device.MemoryReading:
        # A pass restarts the measurement of the peak when it begins.
        if reset_peak:
            return begin
        return end

    role.tokens_per_microbatch = 100
    original = device.read_memory
    device.read_memory = read_memory
    try:
        role.pass_metrics()
        train_pass(role, batch)
    finally:
        device.read_memory = original

    # Resident are the pass's first bytes and the bytes of other processes.
    metrics = role.pass_metrics().values()
    assert metrics[RESIDENT_BYTES] == 1200, metrics
    assert 40 <= metrics[BYTES_PER_TOKEN] <= 80, metrics


def check_one_rank(folder: Path) -> None:
    """Check passes on one rank, with and without overlapped reduction of gradients."""
    # Buckets that are reduced during the backward pass have no peers on one rank.
    for ddp in ({}, {"overlap_grad_reduce": True}):
        role, batch = build_role(folder, "qwen3", ddp=ddp)
        # The second failure in a row shows that a repeated pass leaves no state behind.
        for direction in (FORWARD, BACKWARD, BACKWARD):
            check_repeated(role, batch, train_pass, direction, 0)
        role.step()

    check_measured(role, batch)


def check_several_ranks(folder: Path) -> None:
    """Check passes in which one rank runs out of memory. Collective over all ranks."""
    last_rank = dist.get_world_size() - 1
    role, batch = build_role(folder, "qwen3")
    for run_pass in (train_pass, log_prob_pass, eval_pass):
        check_repeated(role, batch, run_pass, FORWARD, last_rank)
    check_repeated(role, batch, train_pass, BACKWARD, 0)
    check_report(role, batch, last_rank)

    # Weights are the same on all ranks after a step, and routers count each token once.
    role.step()
    role, batch = build_role(folder, "qwen3-moe", recompute="full")
    check_repeated(role, batch, train_pass, BACKWARD, last_rank)
    check_repeated(role, batch, log_prob_pass, FORWARD, 0)


def main(folder: Path) -> None:
    device.initialize(timeout=60)
    if dist.get_world_size() == 1:
        check_one_rank(folder)
    else:
        check_several_ranks(folder)

    print("memory: all passes agree", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
