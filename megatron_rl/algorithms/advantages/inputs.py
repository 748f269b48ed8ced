"""What an advantage function is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megatron_rl.algorithms.ragged import broadcast_rows
from megatron_rl.algorithms.settings import Algorithm


@dataclass(frozen=True)
class AdvantageInputs:
    """Hold one step's rewards and values as advantage functions see them (float64).

    ``rewards`` [B] are shaped, with the KL penalty taken off where ``kl_in`` is ``reward``;
    ``token_rewards`` [N] are the same spread over tokens: the score on a row's last response token, the
    penalty where it arises. ``mask`` [N] marks response tokens of valid rows; ``lengths``, ``group`` and
    ``valid`` are [B]; rewards of invalid rows are 0. ``values`` [N] of the critic, ``baseline_rewards``
    [B] of greedy responses, and ``components`` name -> [B] are there where something computed them.
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


class Advantages(NamedTuple):
    """Hold per-token ``advantages`` [N] and ``returns`` [N], the critic's targets; 0 outside the mask."""

    advantages: Tensor
    returns: Tensor


AdvantageFunction = Callable[[AdvantageInputs, Algorithm], Advantages]


def outcome(inputs: AdvantageInputs, advantages: Tensor) -> Advantages:
    """Give every response token its row's advantage [B]; such estimators train no critic."""
    tokens = broadcast_rows(advantages, inputs.lengths) * inputs.mask
    return Advantages(tokens, tokens)
