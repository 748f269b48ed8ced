"""Losses on each token's own ratio: PPO, CISPO, SAPO, DPPO, and plain policy gradient.

All tensors are [N]; ``log_probs`` carries the gradient. ``r = exp(clamp(log_probs - old_log_probs, +-20))``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_rl.algorithms.lazy import torch
from megatron_rl.algorithms.policy_losses.policy_loss import PolicyLoss, TokenLoss, fields_of, log_ratio
from megatron_rl.config.setting import setting

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.types import TrainBatch

LOW_MEANING = "The ratio is clipped below 1 - clip_low."
HIGH_MEANING = "The ratio is clipped above 1 + clip_high."
_THRESHOLDS = "0.2 for tv, 0.05 for kl"


@dataclass(frozen=True)
class PolicyGradient(PolicyLoss):
    """Take the REINFORCE loss ``-A log_prob`` per token, without any correction for an older policy.

    Source: Williams (1992); GPG, arXiv:2504.02546.

    Example:
        >>> PolicyGradient().token_loss(micro_batch([0.5]), torch.tensor([-2.0])).loss.tolist()
        [1.0]
    """

    weighs_by_ratio: ClassVar[bool] = False

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Return the loss of every token [N]."""
        (advantages,) = fields_of(micro, "advantages")
        return TokenLoss(-advantages * log_probs, {})


@dataclass(frozen=True)
class PpoClip(PolicyLoss):
    """Take PPO's pessimistic clipped loss per token.

    ``l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``; where A < 0, dual clip bounds it:
    ``l = min(l, -A c)`` with ``c = dual_clip > 1``. ``clip_high > clip_low`` is DAPO's clip-higher.

    Source: PPO, arXiv:1707.06347, equation 7; dual clip, arXiv:1912.09729; DAPO,
    arXiv:2503.14476, equation 10.

    Example:
        >>> micro = micro_batch([1.0, -1.0, -1.0], old_log_probs=[0.0, 0.0, 0.0])
        >>> new = torch.tensor([1.5, 0.5, 9.0]).log()
        >>> [round(x, 4) for x in PpoClip().token_loss(micro, new).loss.tolist()]
        [-1.2, 0.8, 3.0]
    """

    clip_low: float = setting(0.2, LOW_MEANING, at_least=0)
    clip_high: float = setting(0.2, HIGH_MEANING, at_least=0)
    dual_clip: float | None = setting(
        3.0,
        "Bound of the loss where the advantage is negative, in advantages.",
        unset="no bound",
        more_than=1,
    )

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Return the loss of every token [N]."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        ratio = log_ratio(log_probs, old_log_probs).exp()
        loss, indicators = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)
        if self.dual_clip is None:
            return TokenLoss(loss, indicators)
        bound = -advantages * self.dual_clip
        bounded = (advantages < 0) & (loss > bound)
        return TokenLoss(torch.where(bounded, bound, loss), {**indicators, "dual_clip_fraction": bounded})


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """Take the larger of the clipped and the unclipped loss for a ratio of any kind [N]; see `PpoClip`."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(torch.maximum(unclipped, clipped), {"clip_fraction": clipped > unclipped})


@dataclass(frozen=True)
class Cispo(PolicyLoss):
    """Clip the importance weight and keep every token's gradient.

    ``l = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log_prob``: unlike PPO's clip, a token beyond the bound
    still learns, with bounded weight. ``clip_low >= 1`` is no lower bound, the paper's choice.

    Source: MiniMax-M1, arXiv:2506.13585, section 3; an upper bound of 5 as in ScaleRL, arXiv:2510.13786.

    Example:
        >>> new = torch.tensor([0.0], requires_grad=True)
        >>> Cispo().token_loss(micro_batch([2.0], old_log_probs=[-9.0]), new).loss.sum().backward()
        >>> new.grad.tolist()
        [-10.0]
    """

    clip_low: float = setting(1.0, LOW_MEANING, at_least=0)
    clip_high: float = setting(4.0, HIGH_MEANING, at_least=0)

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Return the loss of every token [N]."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        ratio = log_ratio(log_probs, old_log_probs).exp().detach()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return TokenLoss(-weight * advantages * log_probs, {"clip_fraction": weight != ratio})


@dataclass(frozen=True)
class Sapo(PolicyLoss):
    """Fade a token out smoothly as its ratio leaves 1, instead of clipping it.

    ``l = -f(r) A`` with ``f(r) = sigmoid(tau (r - 1)) 4 / tau``; tau is ``temperature_positive`` where A > 0
    and ``temperature_negative`` elsewhere. At r = 1 the gradient of f is 1, as for the plain ratio.

    Source: SAPO, arXiv:2511.20347.

    Example:
        >>> Sapo().token_loss(micro_batch([1.0], old_log_probs=[0.0]), torch.zeros(1)).loss.tolist()
        [-2.0]
    """

    temperature_positive: float = setting(1.0, "Steepness of the gate where A > 0.", more_than=0)
    temperature_negative: float = setting(1.05, "Steepness of the gate elsewhere.", more_than=0)

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Return the loss of every token [N]."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        ratio = log_ratio(log_probs, old_log_probs).exp()
        positive = ratio.new_tensor(self.temperature_positive)
        tau = torch.where(advantages > 0, positive, ratio.new_tensor(self.temperature_negative))
        return TokenLoss(-advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, {})


@dataclass(frozen=True)
class Dppo(PolicyLoss):
    """Stop a token once the policy has moved too far in *probability*, not in ratio.

    ``l = -sg[min(r, ratio_cap)] A log_prob`` while the token is inside the trust region, else 0. With p and q
    the token's new and old probability, it is outside where A > 0, p > q and D > ``clip_high``, or A <= 0,
    p < q and D > ``clip_low``. D is ``|p - q|`` (``tv``) or the divergence of the coin flips "this token or
    another", ``q log(q/p) + (1-q) log((1-q)/(1-p))`` (``kl``). Thresholds are of D; their defaults are the
    paper's: 0.2 for tv (it uses 0.15 to 0.2) and 0.05 for kl.

    Source: DPPO, arXiv:2602.04879 (binary approximations).

    Example:
        A rare token may grow tenfold, a common one may not grow by 0.3.

        >>> old = torch.tensor([0.001, 0.5]).log().tolist()
        >>> micro, new = micro_batch([1.0, 1.0], old_log_probs=old), torch.tensor([0.01, 0.8]).log()
        >>> Dppo().token_loss(micro, new).indicators["clip_fraction"].tolist()
        [False, True]
    """

    divergence: str = setting("tv", "How far a token's probability has moved.", choices=("tv", "kl"))
    clip_low: float | None = setting(
        None, "Largest divergence of a token that becomes less likely.", unset=_THRESHOLDS, at_least=0
    )
    clip_high: float | None = setting(
        None, "Largest divergence of a token that becomes more likely.", unset=_THRESHOLDS, at_least=0
    )
    ratio_cap: float = setting(20.0, "Largest weight of a token.", more_than=0)

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Return the loss of every token [N]."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        ratio = log_ratio(log_probs, old_log_probs).exp().detach()
        new, old = log_probs.detach().double(), old_log_probs.double()
        p, q = new.exp(), old.exp()
        if self.divergence == "tv":
            distance = (p - q).abs()
        else:
            # 1 - p loses its digits where p is near 1; a floor keeps the logarithms finite.
            rest_p, rest_q = (-torch.expm1(x.clamp(max=0)).clamp(max=-1e-8) for x in (new, old))
            distance = q * (old - new) + rest_q * (rest_q.log() - rest_p.log())
        usual = 0.2 if self.divergence == "tv" else 0.05
        low = usual if self.clip_low is None else self.clip_low
        high = usual if self.clip_high is None else self.clip_high
        outside = torch.where(advantages > 0, (p > q) & (distance > high), (p < q) & (distance > low))
        weight = torch.where(outside, 0, ratio.clamp(max=self.ratio_cap))
        return TokenLoss(-weight * advantages * log_probs, {"clip_fraction": outside})
