"""Cutting a step's batch into mini-batches and fixing their global loss weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from megatron_rl.algorithms.aggregation import loss_weights
from megatron_rl.algorithms.groups import dense_groups
from megatron_rl.algorithms.settings import Algorithm
from megatron_rl.types import TrainBatch


def minibatches(
    batch: TrainBatch, algorithm: Algorithm, optimizer_steps: int, epochs: int, seed: int
) -> Iterator[TrainBatch]:
    """Yield ``optimizer_steps`` mini-batches per epoch, each with its loss weights set.

    Samples of one prompt stay together; prompts are dealt in a new random order in each epoch (in their own
    order where there is only one mini-batch), as evenly as their number allows. Rows without a token in
    ``response_mask`` are left out: they have no gradient. A mini-batch without rows is not yielded, so
    fewer may come than asked for. Deterministic in ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    taking_part = [row for row, part in enumerate(torch.split(batch.response_mask, batch.lengths.tolist()))
                   if bool(part.any())]  # fmt: skip
    units = _units(batch, taking_part)
    for _ in range(epochs):
        if optimizer_steps > 1:
            order = torch.randperm(len(units), generator=generator).tolist()
        else:
            order = list(range(len(units)))
        for step in range(optimizer_steps):
            first, last = step * len(units) // optimizer_steps, (step + 1) * len(units) // optimizer_steps
            rows = [row for unit in order[first:last] for row in units[unit]]
            if rows:
                yield weighted(batch.rows(rows), algorithm)


def weighted(minibatch: TrainBatch, algorithm: Algorithm) -> TrainBatch:
    """Return the mini-batch with ``loss_weights`` and ``value_weights`` over its own global counts."""
    scale = algorithm.loss_scale_factor or algorithm.max_response_tokens
    counts = minibatch.response_counts if algorithm.denominator == "all" else None
    mask, lengths = minibatch.response_mask, minibatch.lengths

    def weights(mode: str):
        return loss_weights(mask, lengths, mode, counts=counts, scale_factor=scale)

    value_weights = weights(algorithm.value_aggregation) if minibatch.returns is not None else None
    return replace(minibatch, loss_weights=weights(algorithm.aggregation), value_weights=value_weights)


def _units(batch: TrainBatch, rows: list[int]) -> list[list[int]]:
    """Collect the rows of one prompt, prompts in order of first appearance."""
    if batch.group is None:
        return [[row] for row in rows]
    dense, _ = dense_groups(batch.group)
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(int(dense[row]), []).append(row)
    return list(found.values())
