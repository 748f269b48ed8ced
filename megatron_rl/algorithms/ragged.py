"""Sums, means and scans over the rows of ragged batches, and statistics over the samples of one prompt.

Differentiable and without padding. Samples without a valid reward take no part in a group's statistics.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.types import row_index


def row_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum a ragged [N] tensor over each row: [B]; an empty row gives 0.

    Example:
        >>> row_sums(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0, 1])).tolist()
        [3.0, 0.0, 3.0]
    """
    if not len(lengths):
        return values[:0]  # keeps the graph, which a pipeline's backward pass runs on empty micro-batches too
    # Deterministic on every device, which a scatter-add is not.
    return torch.segment_reduce(values, "sum", lengths=lengths, initial=0)


def row_maxima(values: Tensor, lengths: Tensor) -> Tensor:
    """Take the largest value of each row of a ragged [N] tensor: [B]; an empty row gives 0.

    Example:
        >>> row_maxima(torch.tensor([-1.0, -2.0, 3.0]), torch.tensor([2, 0, 1])).tolist()
        [-1.0, 0.0, 3.0]
    """
    largest = values.new_zeros(len(lengths))
    return largest.scatter_reduce(0, row_index(lengths), values, "amax", include_self=False)


def broadcast_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """Repeat one value per row [B] over the row's tokens: [N]."""
    return torch.repeat_interleave(values, lengths)


def masked_row_means(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Average a ragged [N] tensor over the masked-in tokens of each row: [B]; an empty mask gives 0.

    Example:
        >>> values, mask = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False])
        >>> masked_row_means(values, mask, torch.tensor([2, 1])).tolist()
        [1.5, 0.0]
    """
    counts = row_sums(mask.to(values.dtype), lengths)
    return row_sums(torch.where(mask, values, 0), lengths) / counts.clamp(min=1)


def last_masked_token(mask: Tensor, lengths: Tensor) -> Tensor:
    """Return the position in [N] of each row's last masked-in token: [B] int64, -1 where there is none.

    Example:
        >>> last_masked_token(torch.tensor([False, True, False, False]), torch.tensor([3, 1])).tolist()
        [1, -1]
    """
    last = torch.full((len(lengths),), -1, dtype=torch.long, device=mask.device)
    positions = torch.nonzero(mask).squeeze(-1)
    return last.scatter_reduce(0, row_index(lengths)[positions], positions, "amax")


def discounted_sums(values: Tensor, lengths: Tensor, discount: Tensor | float) -> Tensor:
    """Sum what follows each token of its row, discounted: ``y_t = x_t + c * y_(t+1)``.

    ``values`` [N]; ``discount`` c is a number or one per row [B]. Works in log2(longest row) vectorised
    passes: after pass k each position holds the sum over the 2^k tokens from it on.

    Example:
        >>> discounted_sums(torch.tensor([1.0, 1.0, 1.0, 5.0]), torch.tensor([3, 1]), 0.5).tolist()
        [1.75, 1.5, 1.0, 5.0]
    """
    rows = row_index(lengths)
    count = values.shape[0]
    remaining = torch.cumsum(lengths, 0)[rows] - torch.arange(count, device=values.device)
    factor = torch.as_tensor(discount, dtype=values.dtype, device=values.device).expand(len(lengths))[rows]
    reach, longest = 1, int(lengths.max()) if len(lengths) else 0
    while reach < longest:
        ahead = torch.cat([values[reach:], values.new_zeros(reach)])
        values = values + torch.where(remaining > reach, factor * ahead, 0)
        factor, reach = factor * factor, 2 * reach
    return values


class GroupStatistics(NamedTuple):
    """Hold each row's view of its group, [B] each.

    ``size`` is the number of valid samples, ``mean`` and ``std`` are of their rewards; ``std`` is unbiased
    (n-1) and 0 where fewer than two samples are valid.
    """

    size: Tensor
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
    mean is that reward and the standard deviation 0, exactly, whatever the rounding.

    Example:
        >>> r, g = torch.tensor([1.0, 3.0, float("nan"), 7.0]), torch.tensor([0, 0, 0, 1])
        >>> s = group_statistics(r, g, torch.tensor([True, True, False, True]))
        >>> s.size.tolist(), s.mean.tolist(), [round(x, 4) for x in s.std.tolist()]
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


def leave_one_out_statistics(rewards: Tensor, group: Tensor, valid: Tensor) -> GroupStatistics:
    """Return the statistics of the *other* valid rows of each valid row's group: [B] each.

    ``size`` is how many others there are, ``mean`` is 0 where there is none, and ``std`` (unbiased over the
    others) is exactly 0 where they are all equal or fewer than two. What invalid rows get means nothing.

    Example:
        >>> r, g = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0, 0, 0])
        >>> leave_one_out_statistics(r, g, torch.ones(3, dtype=torch.bool)).mean.tolist()
        [1.0, 1.5, 0.5]
    """
    count, mean, _ = group_statistics(rewards, group, valid)
    others = count - 1
    centred = torch.where(valid, rewards - mean, 0)
    # The others' mean and squares follow from the group's: their centred sum is minus the row's own.
    other_mean = torch.where(others > 0, mean - centred / others.clamp(min=1), 0)
    squares = group_sums(centred**2, group) - centred**2 * count / others.clamp(min=1)
    std = (squares / (others - 1).clamp(min=1)).clamp(min=0).sqrt()
    largest, second = group_top2(rewards, group, valid)
    smallest, second_smallest = (-value for value in group_top2(-rewards, group, valid))
    highest = torch.where(rewards == largest, second, largest)
    lowest = torch.where(rewards == smallest, second_smallest, smallest)
    constant = (highest == lowest) | (others < 2)
    other_mean = torch.where((highest == lowest) & (others > 0), lowest, other_mean)
    return GroupStatistics(others, other_mean, torch.where(constant, 0, std))


def group_range(rewards: Tensor, group: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest valid reward of each row's group: [B] each, 0 where none is valid."""
    dense, count = dense_groups(group)
    index, values = dense[valid], rewards[valid]
    low = rewards.new_zeros(count).scatter_reduce(0, index, values, "amin", include_self=False)
    high = rewards.new_zeros(count).scatter_reduce(0, index, values, "amax", include_self=False)
    return low[dense], high[dense]


def group_top2(rewards: Tensor, group: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest and second largest valid reward of each row's group, ties counted: [B] each.

    The second is -inf where fewer than two rows are valid.

    Example:
        >>> largest, second = group_top2(torch.tensor([1.0, 3.0, 3.0]), torch.zeros(3), torch.ones(3) > 0)
        >>> largest.tolist(), second.tolist()
        ([3.0, 3.0, 3.0], [3.0, 3.0, 3.0])
    """
    best = first_best(rewards, group, valid)
    _, largest = group_range(rewards, group, valid)
    dense, count = dense_groups(group)
    rest = valid & ~best
    second = rewards.new_full((count,), -torch.inf)
    return largest, second.scatter_reduce(0, dense[rest], rewards[rest], "amax")[dense]


def first_best(rewards: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Mark in each group the first valid row with the largest reward: [B] bool."""
    dense, count = dense_groups(group)
    _, largest = group_range(rewards, group, valid)
    rows = torch.arange(len(group), device=group.device)
    hits = rows[valid & (rewards == largest)]
    none = len(group)
    first = torch.full((count,), none, device=group.device).scatter_reduce(0, dense[hits], hits, "amin")
    return rows == first[dense]
