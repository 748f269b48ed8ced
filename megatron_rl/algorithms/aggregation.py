"""Loss aggregation by one weight per token, so that any split into micro-batches gives the same loss.

`minibatches` splits a step's batch into mini-batches and computes the values that depend on a complete
mini-batch: the loss weights with their global denominators, and the tokens that clip-cov and kl-cov select.
Both are stored as tensors per token, so a mini-batch can be split into micro-batches of complete rows in any
way.
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
    """Denominators of a mini-batch, float64.

    Example: rows of 2, 0 and 3 response tokens have
    ``Counts(per_row=tensor([2, 0, 3]), tokens=tensor(5), rows=tensor(2))``.
    """

    per_row: Tensor
    """[B], response tokens of each row (n_i)."""
    tokens: Tensor
    """Scalar, response tokens of all rows (N), at least 1."""
    rows: Tensor
    """Scalar, rows with a response token (B), at least 1."""


@dataclass(frozen=True)
class Aggregation(Piece, ABC):
    """Reduction of a mini-batch's token losses to a scalar; a subclass defines `weights`.

    Notation: n_i are the participating tokens of row i, N is their sum and B the number of rows with n_i > 0.
    """

    denominator: str = setting(
        "participating",
        "Whether tokens and rows that were masked out (rejected, cut off) still count in N, n_i and B.",
        choices=("participating", "all"),
    )

    @property
    def counts_all(self) -> bool:
        """Whether the denominators include tokens and rows that were masked out."""
        return self.denominator == "all"

    @abstractmethod
    def weights(self, mask: Tensor, lengths: Tensor, counts: Counts) -> Tensor:
        """Compute the weight of every token [N]; ``mask`` [N] float64 is 1 on participating tokens."""

    def loss_weights(
        self,
        mask: Tensor,
        lengths: Tensor,
        row_token_counts: Tensor | None = None,
    ) -> Tensor:
        """Compute w [N] float32 so that the aggregated loss is ``sum_t w_t l_t``; 0 outside ``mask`` [N].

        ``row_token_counts`` [B]: number of response tokens of each row, including tokens that are not in
        ``mask``. The denominators are computed from it if ``denominator`` is "all", and otherwise from
        ``mask``. An empty mask gives zeros.
        """
        mask = mask.to(torch.float64)
        if row_token_counts is None or not self.counts_all:
            row_token_counts = ragged.row_sums(mask, lengths)
        row_token_counts = row_token_counts.to(torch.float64)

        # The clamp only matters for an empty mask: its weights are then 0 / 1.
        denominators = Counts(
            per_row=row_token_counts,
            tokens=row_token_counts.sum().clamp(min=1),
            rows=(row_token_counts > 0).sum().clamp(min=1),
        )
        # Divide in float64 and round once, at the end.
        return self.weights(mask, lengths, denominators).to(torch.float32)


@dataclass(frozen=True)
class TokenMean(Aggregation):
    """Mean over all tokens of the mini-batch: token weight 1 / N.

    Source: DAPO, arXiv:2503.14476, equation 12.

    Example:
        >>> mask, lengths = torch.tensor([True, True, True, False]), torch.tensor([1, 3])
        >>> [round(w, 4) for w in TokenMean().loss_weights(mask, lengths).tolist()]
        [0.3333, 0.3333, 0.3333, 0.0]
    """

    def weights(self, mask: Tensor, lengths: Tensor, counts: Counts) -> Tensor:
        """Compute the weight of every token [N]: 1 / N within the mask."""
        return mask / counts.tokens


@dataclass(frozen=True)
class TokenSum(Aggregation):
    """Sum over all tokens of the mini-batch: token weight 1.

    Example:
        >>> TokenSum().loss_weights(torch.tensor([True, False]), torch.tensor([2])).tolist()
        [1.0, 0.0]
    """

    def weights(self, mask: Tensor, lengths: Tensor, counts: Counts) -> Tensor:
        """Compute the weight of every token [N]: 1 within the mask."""
        return mask


@dataclass(frozen=True)
class SeqMeanTokenSum(Aggregation):
    """Mean over responses of the sum over their tokens: token weight 1 / B.

    Example:
        >>> SeqMeanTokenSum().loss_weights(torch.ones(3) > 0, torch.tensor([1, 2])).tolist()
        [0.5, 0.5, 0.5]
    """

    def weights(self, mask: Tensor, lengths: Tensor, counts: Counts) -> Tensor:
        """Compute the weight of every token [N]: 1 / B within the mask."""
        return mask / counts.rows


@dataclass(frozen=True)
class SeqMeanTokenSumNorm(Aggregation):
    """Mean over responses of their token sum, divided by a constant: token weight 1 / (B scale_factor).

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

    def with_response_limit(self, max_response_tokens: int) -> Self:
        """Return a copy with an unset ``scale_factor`` replaced by ``max_response_tokens``."""
        if self.scale_factor is not None:
            return self
        return replace(self, scale_factor=max_response_tokens)

    def weights(self, mask: Tensor, lengths: Tensor, counts: Counts) -> Tensor:
        """Compute the weight of every token [N]: 1 / (B scale_factor) within the mask.

        Raises UserError if ``scale_factor`` is unset.
        """
        if self.scale_factor is None:
            raise UserError(
                "seq-mean-token-sum-norm needs a constant to divide by",
                where="algorithm.aggregation.scale_factor",
                expected="a number of tokens",
                got="nothing",
                fix="set scale_factor, or give the algorithm max_response_tokens",
            )
        return mask / (counts.rows * self.scale_factor)


@dataclass(frozen=True)
class SeqMeanTokenMean(Aggregation):
    """Mean over responses of the mean over their tokens: token weight 1 / (B n_i).

    Source: GRPO, arXiv:2402.03300, equation 3.

    Example:
        >>> mask, lengths = torch.tensor([True, True, True, False]), torch.tensor([1, 3])
        >>> [round(w, 4) for w in SeqMeanTokenMean().loss_weights(mask, lengths).tolist()]
        [0.5, 0.25, 0.25, 0.0]
    """

    def weights(self, mask: Tensor, lengths: Tensor, counts: Counts) -> Tensor:
        """Compute the weight of every token [N]: 1 / (B n_i) within the mask."""
        denominators = counts.per_row.clamp(min=1) * counts.rows
        return mask / ragged.broadcast_rows(denominators, lengths)


def minibatches(
    batch: TrainBatch,
    algorithm: Algorithm,
    optimizer_steps: int,
    epochs: int,
    seed: int,
) -> Iterator[TrainBatch]:
    """Yield ``optimizer_steps`` mini-batches per epoch, each with its loss weights set.

    All samples of a prompt are in one mini-batch. Mini-batches differ by at most one prompt. With several
    mini-batches, each epoch shuffles the prompts; the order depends only on ``seed``.

    Rows without a token in ``response_mask`` have no gradient and are dropped. With ``denominator: all``, a
    row whose tokens were all masked out still counts in the denominators of its mini-batch. A mini-batch
    without rows is not yielded, so an epoch may have fewer than ``optimizer_steps`` mini-batches.
    """
    generator = torch.Generator().manual_seed(seed)
    has_gradient = ragged.row_sums(batch.response_mask.double(), batch.lengths) > 0

    # Rows that enter the denominators, which with `denominator: all` includes rows without gradient.
    in_denominator = has_gradient
    counts_all = algorithm.aggregation.counts_all or algorithm.value_aggregation.counts_all
    if counts_all and batch.response_counts is not None:
        in_denominator = batch.response_counts > 0

    prompt_rows = _group_by_prompt(batch, torch.nonzero(in_denominator).squeeze(-1).tolist())
    for _ in range(epochs):
        # A single mini-batch keeps the order: the gradient is the same, and no random number is drawn.
        prompt_order = list(range(len(prompt_rows)))
        if optimizer_steps > 1:
            prompt_order = torch.randperm(len(prompt_rows), generator=generator).tolist()

        for step in range(optimizer_steps):
            # Split the prompts as evenly as possible: mini-batches differ by at most one prompt.
            begin = step * len(prompt_rows) // optimizer_steps
            end = (step + 1) * len(prompt_rows) // optimizer_steps
            rows = [row for prompt in prompt_order[begin:end] for row in prompt_rows[prompt]]

            # Weights first, with all rows in the denominators; then drop the rows without gradient.
            trained_indices = [index for index, row in enumerate(rows) if has_gradient[row]]
            if not trained_indices:
                continue
            minibatch = with_loss_weights(batch.rows(rows), algorithm, generator)
            if len(trained_indices) < len(rows):
                minibatch = minibatch.rows(trained_indices)
            yield minibatch


def with_loss_weights(
    minibatch: TrainBatch,
    algorithm: Algorithm,
    generator: torch.Generator | None = None,
) -> TrainBatch:
    """Return a copy of a mini-batch with the loss weight of each token, and with the field ``selected``.

    ``selected`` marks the tokens whose loss clip-cov or kl-cov changes. ``generator`` draws the random tokens
    of clip-cov; None uses a new generator with seed 0.
    """
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    row_tensors = (minibatch.response_mask, minibatch.lengths, minibatch.response_counts)

    # Supervised and preference batches have no returns, and no critic.
    value_weights = None
    if minibatch.returns is not None:
        value_weights = algorithm.value_aggregation.loss_weights(*row_tensors)

    # `build_train_batch` sets nll_weights to 1 on the tokens to imitate and to 0 elsewhere. Convert them to
    # loss weights here, since the number of these tokens in the mini-batch is only known now.
    nll_weights = minibatch.nll_weights
    if nll_weights is not None:
        nll_weights = algorithm.imitation.token_weights(nll_weights, minibatch.response_mask)

    return replace(
        minibatch,
        loss_weights=algorithm.aggregation.loss_weights(*row_tensors),
        value_weights=value_weights,
        selected=algorithm.policy_loss.select(minibatch, generator),
        nll_weights=nll_weights,
    )


def _group_by_prompt(batch: TrainBatch, rows: list[int]) -> list[list[int]]:
    """Group row numbers by prompt: one list per prompt, in order of first appearance."""
    if batch.group is None:
        return [[row] for row in rows]

    prompt_index = ragged.renumber_groups(batch.group)[0].tolist()
    rows_by_prompt: dict[int, list[int]] = {}
    for row in rows:
        rows_by_prompt.setdefault(prompt_index[row], []).append(row)
    return list(rows_by_prompt.values())
