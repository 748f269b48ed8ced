"""Losses on the token ratio with a trust region by clipping: PPO."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.policy_losses.token_loss import TokenLoss, log_ratio


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> TokenLoss:
    """Take PPO's pessimistic clipped loss per token: all tensors [N].

    With ``r = exp(clamp(log_probs - old_log_probs, +-20))``:
    ``l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``; where A < 0, dual clip bounds it:
    ``l = min(l, -A c)`` with ``c = dual_clip > 1``. ``clip_high > clip_low`` is DAPO's clip-higher.

    Source: PPO, arXiv:1707.06347, equation 7; dual clip, arXiv:1912.09729, equation 5; DAPO,
    arXiv:2503.14476, equation 10.

    Example:
        >>> new, old = torch.tensor([1.5, 0.5, 9.0]).log(), torch.zeros(3)
        >>> [round(x, 4) for x in ppo_clip(new, old, torch.tensor([1.0, -1.0, -1.0])).loss.tolist()]
        [-1.2, 0.8, 3.0]
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be greater than 1, got {dual_clip}")
    ratio = log_ratio(log_probs, old_log_probs).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    indicators = {"clip_fraction": clipped > unclipped}
    if dual_clip is not None:
        bound = -advantages * dual_clip
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        indicators["dual_clip_fraction"] = bounded
    return TokenLoss(loss, indicators)
