"""The form of an advantage estimator: what it is given, what it returns, and what is done to all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from megatron_rl.algorithms.lazy import ragged, torch
from megatron_rl.algorithms.piece import Piece, wrong_result
from megatron_rl.config.setting import NO_SETTING, setting

if TYPE_CHECKING:
    from torch import Tensor

_EXPECTED = "Advantages(advantages, returns) of tensors with one value per token [N]"
"""``outcome`` makes one of a value per row."""


@dataclass(frozen=True)
class AdvantageInputs:
    """Hold one step's rewards and values as advantage estimators see them (float64).

    ``rewards`` [B] are shaped, with the KL penalty taken off where it is in the reward; ``token_rewards``
    [N] are the same spread over tokens: the score on a row's last response token, the penalty where it
    arises. ``mask`` [N] marks response tokens of valid rows; ``lengths``, ``group`` and ``valid`` are [B];
    rewards of invalid rows are 0. ``values`` [N] of the critic, ``baseline_rewards`` [B] of greedy
    responses, shaped as ``rewards`` are, and ``components`` name -> [B] as the judges gave them are there
    where something computed them.
    """

    rewards: Tensor
    token_rewards: Tensor
    mask: Tensor
    lengths: Tensor
    group: Tensor
    valid: Tensor
    values: Tensor | None
    baseline_rewards: Tensor | None
    components: Mapping[str, Tensor]

    @property
    def response_lengths(self) -> Tensor:
        """Return the number of response tokens of each row: [B] float64."""
        return ragged.row_sums(self.mask.to(torch.float64), self.lengths)


class Advantages(NamedTuple):
    """Hold per-token ``advantages`` [N] and ``returns`` [N], the critic's targets; 0 outside the mask."""

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class Advantage(Piece, ABC):
    """Estimate how much better a response, or a token, is than expected.

    A subclass defines `estimate` and says by class attributes what it needs: a critic's values, a greedy
    response to each prompt, several samples of a prompt to compare. ``reads_rewards`` is false for an
    estimator that reads the reward's components instead, which nothing shapes and no penalty is taken off.
    """

    whiten: bool = setting(False, "Whether advantages are brought to mean 0 and variance 1 over the batch.")
    clip: float | None = setting(
        None, "Largest size of an advantage, after whitening.", unset="no bound", more_than=0
    )

    needs_critic: ClassVar[bool] = False
    needs_greedy_baseline: ClassVar[bool] = False
    compares_samples: ClassVar[bool] = False
    reads_rewards: ClassVar[bool] = True

    @abstractmethod
    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Return advantages and returns of every token."""

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        """Return what `estimate` does, whitened and clipped as set, and 0 outside the mask."""
        estimated = self.estimate(inputs)
        if not isinstance(estimated, tuple) or len(estimated) != 2:
            raise wrong_result(self, "estimate", _EXPECTED, estimated)
        for values in estimated:
            if getattr(values, "shape", None) != inputs.mask.shape:
                raise wrong_result(self, "estimate", _EXPECTED, values)
        advantages, returns = estimated
        if self.whiten:
            advantages = whiten(advantages, inputs.mask)
        if self.clip is not None:
            advantages = advantages.clamp(-self.clip, self.clip)
        return Advantages(torch.where(inputs.mask, advantages, 0), torch.where(inputs.mask, returns, 0))


@dataclass(frozen=True)
class FunctionAdvantage(Advantage):
    """Be a function ``(AdvantageInputs) -> Advantages`` of the user's own, without settings."""

    function: Callable[[AdvantageInputs], Advantages] | None = field(default=None, metadata=NO_SETTING)

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Return what the function does."""
        assert self.function is not None
        return self.function(inputs)


def outcome(inputs: AdvantageInputs, advantages: Tensor) -> Advantages:
    """Give every response token its row's advantage [B]; such estimators train no critic."""
    tokens = ragged.broadcast_rows(advantages, inputs.lengths) * inputs.mask
    return Advantages(tokens, tokens)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale masked-in values to mean 0 and variance 1 over the whole batch: [N].

    ``(x - mean) / sqrt(var + 1e-8)`` with the unbiased variance; 0 outside the mask. Fewer than two
    values cannot be whitened and are returned as they are.

    Source: verl torch_functional.masked_whiten.

    Example:
        >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])).tolist()[2]
        0.0
    """
    kept = values[mask]
    if len(kept) < 2:
        return torch.where(mask, values, 0)
    whitened = (values - kept.mean()) * torch.rsqrt(kept.var(correction=1) + 1e-8)
    return torch.where(mask, whitened, 0)
