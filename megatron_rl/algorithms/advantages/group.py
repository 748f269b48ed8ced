"""Advantages from comparing the samples of one prompt: GRPO and its variants, RLOO, OPO, GPG, GDPO.

All functions take ``rewards`` [B], ``group`` [B] (equal for samples of one prompt) and ``valid`` [B],
and return one advantage per row [B]. An invalid row neither counts in a statistic nor gets an advantage
(0). Rewards of invalid rows are not read and may be NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_rl.algorithms.groups import (
    first_best,
    group_statistics,
    group_sums,
    group_top2,
    leave_one_out_statistics,
)


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
    advantages = rewards - torch.where(count > 1, mean, 0)
    if scale_by_std:
        advantages = advantages / (torch.where(count > 1, std, 1) + epsilon)
    return torch.where(valid, advantages, 0)


def grpo_leave_one_out(
    rewards: Tensor, group: Tensor, valid: Tensor, *, epsilon: float = 1e-6, scale_by_std: bool = True
) -> Tensor:
    """Compare each reward with mean and standard deviation of its group's *other* samples.

    ``A_i = (R_i - mean_others) / (std_others + epsilon)``, divided only where the others differ (their
    unbiased standard deviation is > 0, which takes three samples). A row without valid others gets 0. The
    baseline does not depend on the row's own reward, so the policy gradient stays unbiased (before scaling).

    Source: Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!" (2019); the scaling is
    NeMo-RL's default GRPO.

    Example:
        >>> r, g = torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3)
        >>> [round(a, 3) for a in grpo_leave_one_out(r, g, torch.ones(3) > 0).tolist()]
        [1.0, -0.707, -0.707]
    """
    others, mean, std = leave_one_out_statistics(rewards, group, valid)
    advantages = rewards - mean
    if scale_by_std:
        advantages = torch.where(std > 0, advantages / (std + epsilon), advantages)
    return torch.where(valid & (others > 0), advantages, 0)


def grpo_pass_at_k(rewards: Tensor, group: Tensor, valid: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """Reward only a group's best sample, by its lead over the second: the gradient of pass@k, k = n.

    The first sample with the largest reward gets ``(R_max - R_second) / (std_g + epsilon)``, all others 0.
    A tie at the top gives 0 everywhere, and so does a group with fewer than two valid samples.

    Source: arXiv:2503.19595; form of verl.

    Example:
        >>> r, g = torch.tensor([2.0, 1.0, 0.0]), torch.zeros(3)
        >>> [round(a, 3) for a in grpo_pass_at_k(r, g, torch.ones(3) > 0).tolist()]
        [1.0, 0.0, 0.0]
    """
    count, _, std = group_statistics(rewards, group, valid)
    largest, second = group_top2(rewards, group, valid)
    lead = torch.where(count > 1, largest - second, 0) / (std + epsilon)
    return torch.where(first_best(rewards, group, valid), lead, 0)


def rloo(rewards: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Subtract the mean of the group's other samples.

    ``A_i = R_i - mean_(j != i) R_j = n / (n - 1) (R_i - mean_g)``. A group with one valid sample has no
    baseline: ``A = R``.

    Source: Back to Basics, arXiv:2402.14740, section 3; singleton rule from verl.

    Example:
        >>> rloo(torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3), torch.ones(3) > 0).tolist()
        [0.75, -0.75, 0.0]
    """
    mean = leave_one_out_statistics(rewards, group, valid).mean
    return torch.where(valid, rewards - mean, 0)


def opo(rewards: Tensor, group: Tensor, valid: Tensor, response_lengths: Tensor) -> Tensor:
    """Subtract the group's length-weighted mean, the baseline of least gradient variance.

    ``A_i = R_i - sum_j l_j R_j / sum_j l_j`` with response lengths l [B] in tokens, under the assumption
    that a gradient's squared norm grows with its length. A singleton has no baseline: ``A = R``; so does a
    group whose valid responses are all empty.

    Source: OPO, arXiv:2505.23585; singleton rule from verl.

    Example:
        >>> r, lengths = torch.tensor([1.0, 0.0]), torch.tensor([1, 3])
        >>> opo(r, torch.zeros(2), torch.ones(2) > 0, lengths).tolist()
        [0.75, -0.25]
    """
    count, mean, std = group_statistics(rewards, group, valid)
    weights = torch.where(valid, response_lengths.to(rewards.dtype), 0)
    total = group_sums(weights, group)
    weighted = group_sums(weights * torch.where(valid, rewards, 0), group) / total.clamp(min=1)
    baseline = torch.where(std == 0, mean, weighted)
    baseline = torch.where((count > 1) & (total > 0), baseline, 0)
    return torch.where(valid, rewards - baseline, 0)


def gpg(rewards: Tensor, group: Tensor, valid: Tensor, *, normalizer: float = 1.0) -> Tensor:
    """Centre on the group's mean and make up for the rows whose reward is zero.

    ``A_i = alpha (R_i - mean_g) / normalizer`` with ``alpha = B / max(#{R != 0}, 1)`` over the valid rows of
    the whole batch. A singleton has mean 0: ``A = alpha R``.

    Source: GPG, arXiv:2504.02546, with verl's reading of alpha.

    Example:
        >>> gpg(torch.tensor([1.0, 0.0]), torch.zeros(2), torch.ones(2) > 0).tolist()
        [1.0, -1.0]
    """
    count, mean, _ = group_statistics(rewards, group, valid)
    alpha = valid.sum().to(rewards.dtype) / (valid & (rewards != 0)).sum().clamp(min=1)
    return torch.where(valid, alpha * (rewards - torch.where(count > 1, mean, 0)) / normalizer, 0)


def gdpo(
    components: Mapping[str, Tensor],
    group: Tensor,
    valid: Tensor,
    *,
    weights: Mapping[str, float] | None = None,
    epsilon: float = 1e-6,
) -> Tensor:
    """Normalise each reward component within the group, then add the components up.

    ``A_i = sum_k w_k GRPO(r_k)_i``; GDPO then whitens over the batch (`whiten`). Normalising the sum
    instead lets different mixes of components collapse into equal advantages. ``weights`` names the
    components that take part; None takes all with weight 1. A row whose component is NaN counts as failed
    in that component.

    Source: GDPO, arXiv:2601.05242; the example is the paper's.

    Example:
        Rewards (0, 1) in one component and (0, 2) in two are the same to GRPO, not to GDPO.

        >>> one = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([0.0, 0.0])}
        >>> two = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([0.0, 1.0])}
        >>> group, valid = torch.zeros(2), torch.ones(2) > 0
        >>> [round(a, 3) for a in gdpo(one, group, valid).tolist()]
        [-0.707, 0.707]
        >>> [round(a, 3) for a in gdpo(two, group, valid).tolist()]
        [-1.414, 1.414]
    """
    chosen = dict.fromkeys(components, 1.0) if not weights else dict(weights)
    missing = sorted(set(chosen) - set(components))
    if missing or not chosen:
        raise ValueError(f"reward components {missing or 'none'} missing; there are {sorted(components)}")
    total = torch.zeros(len(group), dtype=next(iter(components.values())).dtype, device=group.device)
    for name, weight in chosen.items():
        total = total + weight * grpo(
            components[name], group, valid & components[name].isfinite(), epsilon=epsilon
        )
    return total
