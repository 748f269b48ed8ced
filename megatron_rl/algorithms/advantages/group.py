"""Advantages from comparing the samples of one prompt: GRPO, its variants, RLOO, OPO, GPG, GDPO.

All functions take ``rewards`` [B], ``group`` [B] (equal for samples of one prompt) and ``valid`` [B],
and return one advantage per row [B]. An invalid row neither counts in a statistic nor gets an advantage
(0). Rewards of invalid rows are not read and may be NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.groups import group_statistics


def grpo(
    rewards: Tensor, group: Tensor, valid: Tensor, *, epsilon: float = 1e-6, scale_by_std: bool = True
) -> Tensor:
    """Compare each reward with its group's mean, in units of the group's standard deviation.

    ``A_i = (R_i - mean_g) / (std_g + epsilon)`` with the unbiased (n-1) standard deviation. A group with
    one valid sample has mean 0 and standard deviation 1 by convention: ``A = R / (1 + epsilon)``. Equal
    rewards give exactly 0. ``scale_by_std=False`` leaves the division out (Dr.GRPO, arXiv:2503.20783,
    section 3.2).

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2; singleton rule from verl.

    Example:
        >>> r, g = torch.tensor([1.0, 0.0, 0.0, 0.5]), torch.tensor([0, 0, 0, 1])
        >>> valid = torch.tensor([True, True, True, True])
        >>> [round(a, 3) for a in grpo(r, g, valid).tolist()]
        [1.155, -0.577, -0.577, 0.5]
        >>> [round(a, 3) for a in grpo(r, g, valid, scale_by_std=False).tolist()]
        [0.667, -0.333, -0.333, 0.5]
    """
    count, mean, std = group_statistics(rewards, group, valid)
    mean = torch.where(count > 1, mean, 0)
    advantages = rewards - mean
    if scale_by_std:
        advantages = advantages / (torch.where(count > 1, std, 1) + epsilon)
    return torch.where(valid, advantages, 0)
