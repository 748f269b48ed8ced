"""Loss aggregation as one weight per token, so that a loss is a plain weighted sum under any split.

A step's batch is cut into mini-batches here, which fixes what depends on a whole one: the loss weights with
their global denominators, and the tokens clip-cov and kl-cov treat apart. Once they are tensors, a mini-batch
can be cut into micro-batches of whole rows in any way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from megatron_rl.algorithms.piece import Piece, ragged, torch
from megatron_rl.config.setting import setting
from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.algorithms.algorithm import Algorithm
    from megatron_rl.types import TrainBatch


class Counts(NamedTuple):
    """Hold what is divided by: tokens of each row [B], all tokens, and rows with a token (float64)."""

    per_row: Tensor
    tokens: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Aggregation(Piece, ABC):
    """Say how the losses of a mini-batch's tokens become one number; a subclass defines `weights`.

    With n_i the tokens of row i that take part, N their sum and B the number of rows with n_i > 0.
    """

    denominator: str = setting(
        "participating",
        "Whether tokens and rows that were masked out (rejected, cut off) still count in N, n_i and B.",
        choices=("participating", "all"),
    )

    @property
    def counts_all(self) -> bool:
        """Say whether tokens and rows that were masked out count in the denominators."""
        return self.denominator == "all"

    @abstractmethod
    def weights(self, present: Tensor, lengths: Tensor, counts: Counts) -> Tensor:
        """Return the weight of every token; ``present`` [N] float64 is 1 on tokens that take part."""

    def loss_weights(self, mask: Tensor, lengths: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return w [N] float32 so that the aggregated loss is ``sum_t w_t l_t``; 0 outside ``mask`` [N].

        ``counts`` [B] are the rows' tokens before any were masked out, read where these count too. An empty
        mask gives all zeros.
        """
        present = mask.to(torch.float64)
        if counts is None or not self.counts_all:
            counts = ragged.row_sums(present, lengths)
        counts = counts.to(torch.float64)
        total = Counts(counts, counts.sum().clamp(min=1), (counts > 0).sum().clamp(min=1))
        return self.weights(present, lengths, total).to(torch.float32)


@dataclass(frozen=True)
class TokenMean(Aggregation):
    """Weigh every token of the mini-batch alike: 1 / N.

    Source: DAPO, arXiv:2503.14476, equation 12.

    Example:
        >>> mask, lengths = torch.tensor([True, True, True, False]), torch.tensor([1, 3])
        >>> [round(w, 4) for w in TokenMean().loss_weights(mask, lengths).tolist()]
        [0.3333, 0.3333, 0.3333, 0.0]
    """

    def weights(self, present: Tensor, lengths: Tensor, counts: Counts) -> Tensor:
        """Return the weight of every token [N]."""
        return present / counts.tokens


@dataclass(frozen=True)
class TokenSum(Aggregation):
    """Add the tokens' losses up: 1.

    Example:
        >>> TokenSum().loss_weights(torch.tensor([True, False]), torch.tensor([2])).tolist()
        [1.0, 0.0]
    """

    def weights(self, present: Tensor, lengths: Tensor, counts: Counts) -> Tensor:
        """Return the weight of every token [N]."""
        return present


@dataclass(frozen=True)
class SeqMeanTokenSum(Aggregation):
    """Average the responses' sums: 1 / B.

    Example:
        >>> SeqMeanTokenSum().loss_weights(torch.ones(3) > 0, torch.tensor([1, 2])).tolist()
        [0.5, 0.5, 0.5]
    """

    def weights(self, present: Tensor, lengths: Tensor, counts: Counts) -> Tensor:
        """Return the weight of every token [N]."""
        return present / counts.rows


@dataclass(frozen=True)
class SeqMeanTokenSumNorm(Aggregation):
    """Average the responses' sums and divide by a constant: 1 / (B scale_factor).

    Source: Dr.GRPO, arXiv:2503.20783, with the longest possible response as the constant.

    Example:
        >>> aggregation = SeqMeanTokenSumNorm(scale_factor=4.0)
        >>> aggregation.loss_weights(torch.ones(3) > 0, torch.tensor([1, 2])).tolist()
        [0.125, 0.125, 0.125]
    """

    scale_factor: float | None = setting(
        None,
        "The constant, in tokens.",
        unit="tokens",
        unset="rollout.max_response_tokens",
        more_than=0,
    )

    def within(self, max_response_tokens: int) -> Self:
        """Return the aggregation with its constant filled in."""
        return self if self.scale_factor is not None else replace(self, scale_factor=max_response_tokens)

    def weights(self, present: Tensor, lengths: Tensor, counts: Counts) -> Tensor:
        """Return the weight of every token [N]."""
        if self.scale_factor is None:
            raise UserError(
                "seq-mean-token-sum-norm needs a constant to divide by",
                where="algorithm.aggregation.scale_factor",
                expected="a number of tokens",
                got="nothing",
                fix="set scale_factor, or give the algorithm max_response_tokens",
            )
        return present / (counts.rows * self.scale_factor)


@dataclass(frozen=True)
class SeqMeanTokenMean(Aggregation):
    """Average the responses' averages: 1 / (B n_i).

    Source: GRPO, arXiv:2402.03300, equation 3.

    Example:
        >>> mask, lengths = torch.tensor([True, True, True, False]), torch.tensor([1, 3])
        >>> [round(w, 4) for w in SeqMeanTokenMean().loss_weights(mask, lengths).tolist()]
        [0.5, 0.25, 0.25, 0.0]
    """

    def weights(self, present: Tensor, lengths: Tensor, counts: Counts) -> Tensor:
        """Return the weight of every token [N]."""
        return present / ragged.broadcast_rows(counts.per_row.clamp(min=1) * counts.rows, lengths)


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
    present = ragged.row_sums(batch.response_mask.double(), batch.lengths) > 0
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
    dense = ragged.dense_groups(batch.group)[0].tolist()
    rows_of_unit: dict[int, list[int]] = {}
    for row in rows:
        rows_of_unit.setdefault(dense[row], []).append(row)
    return list(rows_of_unit.values())
