"""Sums, means and scans over the rows of ragged batches, and statistics over the samples of one prompt.

All functions are differentiable and need no padding. Group statistics exclude samples without a valid reward.
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
    # An empty slice keeps the autograd graph: a pipeline runs backward passes of empty micro-batches too.
    if not len(lengths):
        return values[:0]

    # Deterministic on every device, unlike a scatter-add. `unsafe` skips a check of the lengths that would
    # wait for the device.
    return torch.segment_reduce(values, "sum", lengths=lengths, initial=0, unsafe=not values.is_cpu)


def row_maxima(values: Tensor, lengths: Tensor) -> Tensor:
    """Compute the maximum of each row of a ragged [N] tensor: [B]; an empty row gives 0.

    Example:
        >>> row_maxima(torch.tensor([-1.0, -2.0, 3.0]), torch.tensor([2, 0, 1])).tolist()
        [-1.0, 0.0, 3.0]
    """
    # include_self=False: the initial 0 must not enter the maximum of a row with tokens.
    maxima = values.new_zeros(len(lengths))
    rows = row_index(lengths, len(values))
    return maxima.scatter_reduce(0, rows, values, "amax", include_self=False)


def broadcast_rows(values: Tensor, lengths: Tensor, token_count: int | None = None) -> Tensor:
    """Repeat one value per row [B] over the row's tokens: [N].

    ``token_count`` is N. With None, it is the sum of ``lengths``, for which the host waits for the
    device.
    """
    return torch.repeat_interleave(values, lengths, output_size=token_count)


def masked_row_means(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Average a ragged [N] tensor over the masked-in tokens of each row: [B]; an empty mask gives 0.

    Example:
        >>> values, mask = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False])
        >>> masked_row_means(values, mask, torch.tensor([2, 1])).tolist()
        [1.5, 0.0]
    """
    # where, not a product: values outside the mask may be NaN or infinite.
    counts = row_sums(mask.to(values.dtype), lengths)
    sums = row_sums(torch.where(mask, values, 0), lengths)
    return sums / counts.clamp(min=1)


def last_token_in_mask(mask: Tensor, lengths: Tensor) -> Tensor:
    """Return the position in [N] of each row's last token with mask True: [B] int64, or -1.

    A row without such a token has the position -1.

    Example:
        >>> last_token_in_mask(torch.tensor([False, True, False, False]), torch.tensor([3, 1])).tolist()
        [1, -1]
    """
    # -1 is below every position: tokens outside the mask never win against tokens inside it.
    no_token = torch.full((len(lengths),), -1, dtype=torch.long, device=mask.device)
    positions = torch.arange(len(mask), device=mask.device)
    positions_in_mask = torch.where(mask, positions, -1)
    return no_token.scatter_reduce(0, row_index(lengths, len(mask)), positions_in_mask, "amax")


def discounted_sums(values: Tensor, lengths: Tensor, discount: Tensor | float) -> Tensor:
    """Sum each token's value and the discounted values after it in its row: ``y_t = x_t + c * y_(t+1)``.

    ``values`` is [N]; ``discount`` c is a number, or [B] with one number per row. The function makes
    log2(longest row) vectorised passes: after pass k, position t has the sum over the 2^k tokens from t on.

    Example:
        >>> discounted_sums(torch.tensor([1.0, 1.0, 1.0, 5.0]), torch.tensor([3, 1]), 0.5).tolist()
        [1.75, 1.5, 1.0, 5.0]
    """
    rows = row_index(lengths)
    token_count = values.shape[0]
    # Tokens from each position to the end of its row, itself included.
    row_ends = torch.cumsum(lengths, 0)[rows]
    remaining_tokens = row_ends - torch.arange(token_count, device=values.device)

    row_factor = torch.as_tensor(discount, dtype=values.dtype, device=values.device).expand(len(lengths))
    factor = row_factor[rows]
    max_length = 0
    if len(lengths):
        max_length = int(lengths.max())

    # Doubling: each pass adds the partial sum that starts `offset` tokens later, if it is in the same row.
    offset = 1
    while offset < max_length:
        shifted = torch.cat([values[offset:], values.new_zeros(offset)])
        values = values + torch.where(remaining_tokens > offset, factor * shifted, 0)
        factor = factor * factor
        offset = 2 * offset
    return values


class GroupStatistics(NamedTuple):
    """Statistics of the groups: one value per row, equal for all rows of a group.

    Example: rewards 1 and 3 of one group give
    ``GroupStatistics(size=tensor([2, 2]), mean=tensor([2, 2]), std=tensor([1.41, 1.41]))``.
    """

    size: Tensor
    """[B], number of valid samples in the row's group."""
    mean: Tensor
    """[B], mean reward of the row's group."""
    std: Tensor
    """[B], unbiased (n-1) standard deviation of the group's rewards; 0 for fewer than two valid samples."""


def renumber_groups(group: Tensor) -> tuple[Tensor, int]:
    """Renumber the groups as 0..K-1; return the new number of each row's group [B] int64, and K."""
    unique_groups, group_index = torch.unique(group, return_inverse=True)
    return group_index, len(unique_groups)


def group_sums(values: Tensor, group: Tensor) -> Tensor:
    """Sum [B] values over each group and return each row's group sum: [B]."""
    group_index, group_count = renumber_groups(group)
    return values.new_zeros(group_count).index_add(0, group_index, values)[group_index]


def group_statistics(rewards: Tensor, group: Tensor, valid: Tensor) -> GroupStatistics:
    """Compute size, mean and unbiased standard deviation of each row's group, over valid rows: [B] each.

    Rewards of invalid rows are not read and may be NaN. If all valid rewards of a group are equal, the mean
    is exactly that reward and the standard deviation exactly 0.

    Example:
        >>> r, g = torch.tensor([1.0, 3.0, float("nan"), 7.0]), torch.tensor([0, 0, 0, 1])
        >>> s = group_statistics(r, g, torch.tensor([True, True, False, True]))
        >>> s.size.tolist(), s.mean.tolist(), [round(x, 4) for x in s.std.tolist()]
        ([2.0, 2.0, 2.0, 1.0], [2.0, 2.0, 2.0, 7.0], [1.4142, 1.4142, 1.4142, 0.0])
    """
    is_valid = valid.to(rewards.dtype)
    rewards = torch.where(valid, rewards, 0)

    size = group_sums(is_valid, group)
    mean = group_sums(rewards, group) / size.clamp(min=1)
    squares = group_sums(is_valid * (rewards - mean) ** 2, group)
    std = (squares / (size - 1).clamp(min=1)).sqrt()

    # The mean of equal rewards may differ from them by rounding. Division by a tiny standard deviation would
    # turn that difference into an advantage.
    low, high = group_range(rewards, group, valid)
    equal = low == high
    return GroupStatistics(
        size=size,
        mean=torch.where(equal, low, mean),
        std=torch.where(equal, 0, std),
    )


def leave_one_out_statistics(
    rewards: Tensor,
    group: Tensor,
    valid: Tensor,
) -> GroupStatistics:
    """Compute the statistics of the *other* valid rows of each valid row's group: [B] each.

    ``size`` is the number of other rows. ``mean`` is 0 without other rows. ``std`` is unbiased, and exactly 0
    for equal rewards and for fewer than two other rows. The values of invalid rows are undefined.

    Example:
        >>> r, g = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0, 0, 0])
        >>> leave_one_out_statistics(r, g, torch.ones(3, dtype=torch.bool)).mean.tolist()
        [1.0, 1.5, 0.5]
    """
    size, mean, _ = group_statistics(rewards, group, valid)
    other_count = size - 1
    centred = torch.where(valid, rewards - mean, 0)

    # Derive the statistics of the other rows from the group's. The centred rewards of a group sum to 0, so
    # the centred rewards of the other rows sum to minus this row's.
    other_mean = mean - centred / other_count.clamp(min=1)
    other_mean = torch.where(other_count > 0, other_mean, 0)
    squares = group_sums(centred**2, group) - centred**2 * size / other_count.clamp(min=1)
    std = (squares / (other_count - 1).clamp(min=1)).clamp(min=0).sqrt()

    # Largest (smallest) reward of the other rows: the group's second largest (smallest) if this row has the
    # largest (smallest).
    group_max, second_max = group_top2(rewards, group, valid)
    negated_min, negated_second_min = group_top2(-rewards, group, valid)
    group_min = -negated_min
    second_min = -negated_second_min
    other_max = torch.where(rewards == group_max, second_max, group_max)
    other_min = torch.where(rewards == group_min, second_min, group_min)

    # If the other rewards are equal, set their mean and standard deviation exactly: remove rounding errors.
    equal = other_max == other_min
    other_mean = torch.where(equal & (other_count > 0), other_min, other_mean)
    std = torch.where(equal | (other_count < 2), 0, std)
    return GroupStatistics(size=other_count, mean=other_mean, std=std)


def group_range(rewards: Tensor, group: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the smallest and largest valid reward of each row's group: [B] each, 0 without a valid row."""
    group_index, group_count = renumber_groups(group)
    valid_group_index = group_index[valid]
    valid_rewards = rewards[valid]

    zeros = rewards.new_zeros(group_count)
    low = zeros.scatter_reduce(0, valid_group_index, valid_rewards, "amin", include_self=False)
    high = zeros.scatter_reduce(0, valid_group_index, valid_rewards, "amax", include_self=False)
    return low[group_index], high[group_index]


def group_top2(rewards: Tensor, group: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the largest and second largest valid reward of each row's group: [B] each.

    They are equal if two rows have the largest reward. The second is -inf for fewer than two valid rows.

    Example:
        >>> best, second = group_top2(torch.tensor([1.0, 3.0, 3.0]), torch.zeros(3), torch.ones(3) > 0)
        >>> best.tolist(), second.tolist()
        ([3.0, 3.0, 3.0], [3.0, 3.0, 3.0])
    """
    _, maxima = group_range(rewards, group, valid)

    # The second largest is the maximum without one row of the largest reward.
    runners_up = valid & ~mark_first_best(rewards, group, valid)
    group_index, group_count = renumber_groups(group)
    second = rewards.new_full((group_count,), -torch.inf)
    second = second.scatter_reduce(0, group_index[runners_up], rewards[runners_up], "amax")
    return maxima, second[group_index]


def mark_first_best(rewards: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Mark in each group the first valid row with the largest reward: [B] bool."""
    group_index, group_count = renumber_groups(group)
    _, maxima = group_range(rewards, group, valid)

    # Smallest index among the best rows; len(group) marks a group without a valid row.
    rows = torch.arange(len(group), device=group.device)
    best_rows = rows[valid & (rewards == maxima)]
    first_rows = torch.full((group_count,), len(group), device=group.device)
    first_rows = first_rows.scatter_reduce(0, group_index[best_rows], best_rows, "amin")
    return rows == first_rows[group_index]
