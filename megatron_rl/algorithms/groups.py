"""Statistics over the samples of one prompt, in which samples without a valid reward take no part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class GroupStatistics(NamedTuple):
    """Hold each row's view of its group, [B] each: ``count`` of valid samples, ``mean`` and ``std``.

    ``std`` is unbiased (n-1); it is 0 where fewer than two samples are valid.
    """

    count: Tensor
    mean: Tensor
    std: Tensor


def dense_groups(group: Tensor) -> tuple[Tensor, int]:
    """Renumber groups as 0..K-1: ([B] int64, K)."""
    unique, dense = torch.unique(group, return_inverse=True)
    return dense, len(unique)


def group_sums(values: Tensor, group: Tensor) -> Tensor:
    """Sum [B] values over each group and hand every row its group's sum: [B]."""
    dense, count = dense_groups(group)
    return values.new_zeros(count).index_add(0, dense, values)[dense]


def group_statistics(rewards: Tensor, group: Tensor, valid: Tensor) -> GroupStatistics:
    """Return count, mean and unbiased standard deviation of each row's group, over valid rows: [B] each.

    Rewards of invalid rows are not read and may be NaN. Where all valid rewards of a group are equal the
    standard deviation is exactly 0, whatever the rounding.

    Example:
        >>> r, g = torch.tensor([1.0, 3.0, float("nan"), 7.0]), torch.tensor([0, 0, 0, 1])
        >>> s = group_statistics(r, g, torch.tensor([True, True, False, True]))
        >>> s.count.tolist(), s.mean.tolist(), [round(x, 4) for x in s.std.tolist()]
        ([2.0, 2.0, 2.0, 1.0], [2.0, 2.0, 2.0, 7.0], [1.4142, 1.4142, 1.4142, 0.0])
    """
    weight = valid.to(rewards.dtype)
    rewards = torch.where(valid, rewards, 0)
    count = group_sums(weight, group)
    mean = group_sums(rewards, group) / count.clamp(min=1)
    squares = group_sums(weight * (rewards - mean) ** 2, group)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    low, high = group_range(rewards, group, valid)
    return GroupStatistics(count, torch.where(low == high, low, mean), torch.where(low == high, 0, std))


def group_range(rewards: Tensor, group: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest valid reward of each row's group: [B] each, 0 where none is valid."""
    dense, count = dense_groups(group)
    index, values = dense[valid], rewards[valid]
    low = rewards.new_zeros(count).scatter_reduce(0, index, values, "amin", include_self=False)
    high = rewards.new_zeros(count).scatter_reduce(0, index, values, "amax", include_self=False)
    return low[dense], high[dense]
