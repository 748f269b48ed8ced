"""Losses on each token's own ratio: PPO, CISPO, SAPO, DPPO, and plain policy gradient.

All tensors are [N]; ``log_probs`` carries the gradient. ``r = exp(clamp(log_probs - old_log_probs, +-20))``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.policy_losses.token_loss import TokenLoss, log_ratio


def policy_gradient(log_probs: Tensor, advantages: Tensor) -> TokenLoss:
    """Take the REINFORCE loss ``-A log_prob`` per token, without any correction for an older policy.

    Source: Williams (1992); GPG, arXiv:2504.02546.

    Example:
        >>> policy_gradient(torch.tensor([-2.0]), torch.tensor([0.5])).loss.tolist()
        [1.0]
    """
    return TokenLoss(-advantages * log_probs, {})


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> TokenLoss:
    """Take PPO's pessimistic clipped loss per token.

    ``l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``; where A < 0, dual clip bounds it:
    ``l = min(l, -A c)`` with ``c = dual_clip > 1``. ``clip_high > clip_low`` is DAPO's clip-higher.

    Source: PPO, arXiv:1707.06347, equation 7; dual clip, arXiv:1912.09729; DAPO,
    arXiv:2503.14476, equation 10.

    Example:
        >>> new, old = torch.tensor([1.5, 0.5, 9.0]).log(), torch.zeros(3)
        >>> [round(x, 4) for x in ppo_clip(new, old, torch.tensor([1.0, -1.0, -1.0])).loss.tolist()]
        [-1.2, 0.8, 3.0]
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be greater than 1, got {dual_clip}")
    ratio = log_ratio(log_probs, old_log_probs).exp()
    return clipped_surrogate(ratio, advantages, clip_low, clip_high, dual_clip)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    """Take the larger of the clipped and the unclipped loss for a ratio of any kind [N]; see `ppo_clip`."""
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


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> TokenLoss:
    """Clip the importance weight and keep every token's gradient.

    ``l = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log_prob``: unlike PPO's clip, a token beyond the bound
    still learns, with bounded weight. ``clip_low >= 1`` is no lower bound, the paper's choice.

    Source: MiniMax-M1, arXiv:2506.13585, section 3; an upper bound of 5 as in ScaleRL, arXiv:2510.13786.

    Example:
        >>> new = torch.tensor([0.0], requires_grad=True)
        >>> cispo(new, torch.tensor([-9.0]), torch.tensor([2.0])).loss.sum().backward()
        >>> new.grad.tolist()
        [-10.0]
    """
    ratio = log_ratio(log_probs, old_log_probs).exp().detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-weight * advantages * log_probs, {"clip_fraction": weight != ratio})


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> TokenLoss:
    """Fade a token out smoothly as its ratio leaves 1, instead of clipping it.

    ``l = -f(r) A`` with ``f(r) = sigmoid(tau (r - 1)) 4 / tau``; tau is ``temperature_positive`` where A > 0
    and ``temperature_negative`` elsewhere. At r = 1 the gradient of f is 1, as for the plain ratio.

    Source: SAPO, arXiv:2511.20347.

    Example:
        >>> sapo(torch.zeros(1), torch.zeros(1), torch.ones(1)).loss.tolist()
        [-2.0]
    """
    ratio = log_ratio(log_probs, old_log_probs).exp()
    positive, negative = ratio.new_tensor(temperature_positive), ratio.new_tensor(temperature_negative)
    tau = torch.where(advantages > 0, positive, negative)
    return TokenLoss(-advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, {})


def dppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    divergence: str = "tv",
    low: float = 0.2,
    high: float = 0.2,
    ratio_cap: float = 20.0,
) -> TokenLoss:
    """Stop a token once the policy has moved too far in *probability*, not in ratio.

    ``l = -sg[min(r, ratio_cap)] A log_prob`` while the token is inside the trust region, else 0. With p and q
    the token's new and old probability, it is outside where A > 0, p > q and D > ``high``, or A <= 0, p < q
    and D > ``low``. D is ``|p - q|`` (``tv``) or the divergence of the coin flips "this token or another",
    ``q log(q/p) + (1-q) log((1-q)/(1-p))`` (``kl``). Thresholds are of D: the paper uses 0.15 to 0.2 for tv
    and 0.05 for kl.

    Source: DPPO, arXiv:2602.04879 (binary approximations).

    Example:
        A rare token may grow tenfold, a common one may not grow by 0.3.

        >>> new, old = torch.tensor([0.01, 0.8]).log(), torch.tensor([0.001, 0.5]).log()
        >>> dppo(new, old, torch.ones(2)).indicators["clip_fraction"].tolist()
        [False, True]
    """
    ratio = log_ratio(log_probs, old_log_probs).exp().detach()
    new, old = log_probs.detach().double(), old_log_probs.double()
    p, q = new.exp(), old.exp()
    if divergence == "tv":
        distance = (p - q).abs()
    elif divergence == "kl":
        # 1 - p loses its digits where p is near 1; a floor keeps the logarithms finite.
        rest_p, rest_q = (-torch.expm1(x.clamp(max=0)).clamp(max=-1e-8) for x in (new, old))
        distance = q * (old - new) + rest_q * (rest_q.log() - rest_p.log())
    else:
        raise ValueError(f"unknown divergence {divergence!r}; known: tv, kl")
    outside = torch.where(advantages > 0, (p > q) & (distance > high), (p < q) & (distance > low))
    weight = torch.where(outside, 0, ratio.clamp(max=ratio_cap))
    return TokenLoss(-weight * advantages * log_probs, {"clip_fraction": outside})
