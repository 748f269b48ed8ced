"""Keeping entropy up by treating the few tokens apart that destroy most of it: clip-cov and kl-cov.

Which tokens these are depends on the whole mini-batch, so they are chosen once when it is made, from
the old policy's log-probs, and marked in `TrainBatch.selected`. That keeps losses exact under any split
into micro-batches; at the first mini-batch of a step it is the published choice, at later ones the
published choice would use the slightly newer policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.policy_losses.clipped import ppo_clip
from megatron_rl.algorithms.policy_losses.token_loss import TokenLoss, log_ratio


def token_covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return each token's share of Cov(log_prob, A): ``(log_prob - mean) (A - mean)``, [N], 0 outside mask.

    Means are over the masked-in tokens. The entropy of the policy falls at the rate of this covariance.

    Source: The Entropy Mechanism, arXiv:2505.22617.

    Example:
        >>> lp, a = torch.tensor([-1.0, -3.0]), torch.tensor([2.0, 0.0])
        >>> token_covariance(lp, a, torch.ones(2) > 0).tolist()
        [1.0, 1.0]
    """
    if not mask.any():
        return torch.zeros_like(log_probs)
    covariance = (log_probs - log_probs[mask].mean()) * (advantages - advantages[mask].mean())
    return torch.where(mask, covariance, 0)


def select_clip_cov(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    generator: torch.Generator,
    *,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Tensor:
    """Choose at random max(floor(fraction * tokens), 1) tokens with ``low < covariance < high``: [N] bool.

    Where fewer qualify, all of them are chosen; an empty mask chooses none.

    Source: arXiv:2505.22617, Clip-Cov.

    Example:
        >>> lp, a = torch.tensor([-1.0, -5.0, -3.0]), torch.tensor([1.0, -1.0, 0.0])
        >>> select_clip_cov(lp, a, torch.ones(3) > 0, torch.Generator()).sum().item()
        1
    """
    covariance = token_covariance(log_probs.double(), advantages.double(), mask)
    candidates = torch.nonzero(mask & (covariance > low) & (covariance < high)).squeeze(-1)
    count = max(int(fraction * int(mask.sum())), 1)
    chosen = candidates[torch.randperm(len(candidates), generator=generator)[:count]]
    selected = torch.zeros_like(mask)
    selected[chosen] = True
    return selected


def select_kl_cov(log_probs: Tensor, advantages: Tensor, mask: Tensor, *, fraction: float = 2e-4) -> Tensor:
    """Choose the max(floor(fraction * tokens), 1) tokens of largest covariance: [N] bool.

    Equal covariances are taken in order of position; an empty mask chooses none.

    Source: arXiv:2505.22617, KL-Cov.

    Example:
        >>> lp, a = torch.tensor([-1.0, -5.0, -3.0]), torch.tensor([1.0, 0.0, 0.0])
        >>> select_kl_cov(lp, a, torch.ones(3) > 0).tolist()
        [True, False, False]
    """
    covariance = token_covariance(log_probs.double(), advantages.double(), mask)
    tokens = int(mask.sum())
    selected = torch.zeros_like(mask)
    if tokens:
        ranked = torch.where(mask, covariance, -torch.inf).sort(descending=True, stable=True).indices
        selected[ranked[: max(int(fraction * tokens), 1)]] = True
    return selected


def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    selected: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """Take PPO's clipped loss without dual clip, and none at all on the selected tokens.

    Source: arXiv:2505.22617, Clip-Cov.

    Example:
        >>> chosen = torch.tensor([True, False])
        >>> clip_cov(torch.zeros(2), torch.zeros(2), torch.ones(2), chosen).loss.tolist()
        [0.0, -1.0]
    """
    loss, indicators = ppo_clip(
        log_probs, old_log_probs, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=None
    )
    return TokenLoss(torch.where(selected, 0, loss), {**indicators, "selected_fraction": selected})


def kl_cov(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, selected: Tensor, *, coef: float = 1.0
) -> TokenLoss:
    """Take the unclipped loss ``-A r``, with ``coef |log_probs - old_log_probs|`` added on selected tokens.

    Source: arXiv:2505.22617, KL-Cov.

    Example:
        >>> new, chosen = torch.tensor([0.5, 0.0]), torch.tensor([True, True])
        >>> [round(x, 3) for x in kl_cov(new, torch.zeros(2), torch.ones(2), chosen).loss.tolist()]
        [-1.149, -1.0]
    """
    difference = log_ratio(log_probs, old_log_probs)
    penalty = torch.where(selected, coef * difference.abs(), 0)
    return TokenLoss(-advantages * difference.exp() + penalty, {"selected_fraction": selected})
