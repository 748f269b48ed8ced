"""DAPO's dynamic sampling as pure decisions: which groups teach something, and how many more to sample.

The loop that generates is the trainer's: it calls `informative_groups` on the raw rewards of what it has,
`prompts_to_sample` for the next round, and `take_groups` when there are enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.algorithms.lazy import groups, torch
from megatron_rl.algorithms.piece import Piece
from megatron_rl.config.setting import setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DynamicSampling(Piece):
    """Say whether groups of responses that teach nothing are replaced, and for how long that is tried."""

    @property
    def further_rounds(self) -> int:
        """Return how often a step may sample again; 0 takes every group as it comes."""
        return 0


@dataclass(frozen=True)
class KeepEveryGroup(DynamicSampling):
    """Learn from every group as it was sampled."""


@dataclass(frozen=True)
class RefillGroups(DynamicSampling):
    """Replace groups whose raw rewards are all equal by newly sampled ones.

    Source: DAPO, arXiv:2503.14476, equation 11.
    """

    max_rounds: int = setting(10, "How often a step samples again at most.", unit="rounds", at_least=1)

    @property
    def further_rounds(self) -> int:
        """Return how often a step may sample again."""
        return self.max_rounds


def informative_groups(rewards: Tensor, group: Tensor, valid: Tensor, *, tolerance: float = 1e-6) -> Tensor:
    """Mark the rows of groups whose raw rewards differ: [B] bool.

    A group is kept when the standard deviation of its valid rewards is above ``tolerance``. Groups with
    fewer than two valid rewards are not kept. Give it raw rewards: a length penalty would make every group
    differ.

    Source: DAPO, arXiv:2503.14476, equation 11 (dynamic sampling).

    Example:
        >>> rewards, group = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
        >>> informative_groups(rewards, group, torch.ones(4) > 0).tolist()
        [True, True, False, False]
    """
    statistics = groups.group_statistics(rewards.double(), group, valid)
    return (statistics.size > 1) & (statistics.std > tolerance)


def count_groups(rows: Tensor, group: Tensor) -> int:
    """Count the groups that have at least one of the marked ``rows`` [B] bool."""
    return len(torch.unique(group[rows]))


def take_groups(keep: Tensor, group: Tensor, wanted: int) -> list[int]:
    """Return the rows of the first ``wanted`` kept groups, in order of first appearance.

    Fewer come back where fewer groups are kept. ``keep`` [B] bool is constant over a group.

    Example:
        >>> take_groups(torch.tensor([True, False, True, True]), torch.tensor([5, 6, 7, 5]), 1)
        [0, 3]
    """
    dense, _ = groups.dense_groups(group)
    found: dict[int, list[int]] = {}
    for row, (kept, number) in enumerate(zip(keep.tolist(), dense.tolist(), strict=True)):
        if kept:
            found.setdefault(number, []).append(row)
    return sorted(row for rows in list(found.values())[:wanted] for row in rows)


def prompts_to_sample(wanted: int, kept: int, sampled: int, *, ceiling: int) -> int:
    """Return how many more prompts to sample so that ``wanted`` groups are likely kept: 0 when done.

    The missing groups are divided by the share kept so far (as if half a group more had been kept, so that
    none kept so far is no division by zero) and rounded up; ``ceiling`` bounds one round.

    Example:
        >>> prompts_to_sample(64, 64, 100, ceiling=256)
        0
        >>> prompts_to_sample(64, 32, 64, ceiling=256)
        64
    """
    missing = wanted - kept
    if missing <= 0:
        return 0
    if not sampled:
        return min(missing, ceiling)
    share = min((kept + 0.5) / (sampled + 0.5), 1.0)
    return min(math.ceil(missing / share), ceiling)
