"""Cutting a step's batch into mini-batches and fixing what depends on a whole mini-batch.

That is: the loss weights with their global denominators, and the tokens clip-cov and kl-cov treat apart.
Once they are tensors, a mini-batch can be cut into micro-batches of whole rows in any way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.algorithms.groups import dense_groups
from megatron_rl.algorithms.ragged import row_sums
from megatron_rl.types import TrainBatch


def minibatches(
    batch: TrainBatch, algorithm: Algorithm, optimizer_steps: int, epochs: int, seed: int
) -> Iterator[TrainBatch]:
    """Yield ``optimizer_steps`` mini-batches per epoch, each with its loss weights set.

    Samples of one prompt stay together; prompts are dealt in a new random order in each epoch (in their own
    order where there is only one mini-batch), as evenly as their number allows. Rows without a token in
    ``response_mask`` are left out: they have no gradient. With ``denominator: all`` those that had tokens
    before some were taken out are dealt and counted with the others first. A mini-batch without rows is not
    yielded, so fewer may come than asked for. Deterministic in ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    present = row_sums(batch.response_mask.double(), batch.lengths) > 0
    counted = present
    counts_all = algorithm.aggregation.counts_all or algorithm.value_aggregation.counts_all
    if counts_all and batch.response_counts is not None:
        counted = batch.response_counts > 0
    units = _units(batch, torch.nonzero(counted).squeeze(-1).tolist())
    for _ in range(epochs):
        if optimizer_steps > 1:
            order = torch.randperm(len(units), generator=generator).tolist()
        else:
            order = list(range(len(units)))
        for step in range(optimizer_steps):
            first, last = step * len(units) // optimizer_steps, (step + 1) * len(units) // optimizer_steps
            rows = [row for unit in order[first:last] for row in units[unit]]
            kept = [index for index, row in enumerate(rows) if present[row]]
            if kept:
                minibatch = weighted(batch.rows(rows), algorithm, generator)
                yield minibatch if len(kept) == len(rows) else minibatch.rows(kept)


def weighted(
    minibatch: TrainBatch, algorithm: Algorithm, generator: torch.Generator | None = None
) -> TrainBatch:
    """Return the mini-batch with its loss weights and, where the policy loss needs them, selected tokens.

    ``generator`` draws clip-cov's random tokens; None seeds one with 0.
    """
    rows = (minibatch.response_mask, minibatch.lengths, minibatch.response_counts)
    value_weights = None
    if minibatch.returns is not None:
        value_weights = algorithm.value_aggregation.loss_weights(*rows)
    nll_weights = minibatch.nll_weights
    if nll_weights is not None:
        nll_weights = algorithm.imitation.weights(nll_weights, minibatch.response_mask)
    return replace(
        minibatch,
        loss_weights=algorithm.aggregation.loss_weights(*rows),
        value_weights=value_weights,
        selected=algorithm.policy_loss.select(minibatch, generator or torch.Generator().manual_seed(0)),
        nll_weights=nll_weights,
    )


def _units(batch: TrainBatch, rows: list[int]) -> list[list[int]]:
    """Collect the rows of one prompt, prompts in order of first appearance."""
    if batch.group is None:
        return [[row] for row in rows]
    dense = dense_groups(batch.group)[0].tolist()
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(dense[row], []).append(row)
    return list(found.values())
