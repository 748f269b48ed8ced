"""Sums, means and scans over the rows and groups of ragged batches, differentiable and without padding."""

from __future__ import annotations

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
