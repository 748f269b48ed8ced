"""What a token costs: the form of a policy loss, losses on the token's own ratio, and the critic's loss.

PPO, CISPO, SAPO, DPPO and plain policy gradient. All tensors are [N]; ``log_probs`` carries the gradient.
``r = exp(clamp(log_probs - old_log_probs, +-20))``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from megatron_rl.algorithms.piece import MAX_LOG_RATIO, Piece, torch, wrong_result
from megatron_rl.config.setting import NO_SETTING, setting

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.types import TrainBatch

_EXPECTED = "TokenLoss(loss, indicators) of tensors with one value per token [N], neither summed nor averaged"


class TokenLoss(NamedTuple):
    """Hold a loss per token [N] (with gradient) and named indicators [N] that become mean metrics."""

    loss: Tensor
    indicators: Mapping[str, Tensor]


@dataclass(frozen=True)
class PolicyLoss(Piece, ABC):
    """Say what each token of a response costs the policy.

    A subclass defines `token_loss`. A micro-batch holds whole rows, so sums over a row are exact there;
    statistics over more than a row must not be taken, because a micro-batch's make-up is no part of the
    mathematics. A loss that needs such statistics takes them in `select`, of a whole mini-batch.
    """

    entropy_coef: float = setting(0.0, "Weight of the entropy bonus that is taken off the loss.")
    opsm_delta: float | None = setting(
        None,
        "Off-policy sequence masking: responses with A < 0 that the policy has drifted from by more nats per "
        "token since they were sampled do not count.",
        unset="off",
    )

    weighs_by_ratio: ClassVar[bool] = True
    """Whether the loss holds the ratio of new to old policy. One without is weighted in bypass mode."""
    follows_rollout: ClassVar[bool] = False
    """Whether that ratio is to the policy that sampled, which weights of a correction would count again."""

    @property
    def needs_scoring_pass(self) -> bool:
        """Say whether the loss chooses tokens by statistics of a whole mini-batch."""
        return type(self).select is not PolicyLoss.select

    @abstractmethod
    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Return the loss of every token [N] of a micro-batch; ``log_probs`` [N] carry the gradient."""

    def select(self, minibatch: TrainBatch, generator: torch.Generator) -> Tensor | None:
        """Return the tokens [N] bool of a mini-batch that the loss treats apart, where there are any."""
        return minibatch.selected


@dataclass(frozen=True)
class FunctionLoss(PolicyLoss):
    """Be a function ``(micro-batch, log_probs) -> TokenLoss`` of the user's own, without settings."""

    function: Callable[..., TokenLoss] | None = field(default=None, metadata=NO_SETTING)

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Return what the function does."""
        assert self.function is not None
        return self.function(micro, log_probs)


def checked_loss(piece: Piece, loss: Any, tokens: Tensor) -> TokenLoss:
    """Return what a piece's loss function has returned; raises UserError unless it is a `TokenLoss` [N].

    ``tokens`` [N] is any tensor with a value per token.
    """
    if isinstance(loss, tuple) and len(loss) == 2:
        loss = TokenLoss(*loss)
    if not isinstance(loss, TokenLoss) or not isinstance(loss.indicators, Mapping):
        raise wrong_result(piece, "token_loss", _EXPECTED, loss)
    for value in (loss.loss, *loss.indicators.values()):
        if getattr(value, "shape", None) != tokens.shape:
            raise wrong_result(piece, "token_loss", _EXPECTED, value)
    return loss


def fields_of(batch: TrainBatch, *names: str) -> list[Tensor]:
    """Return fields of a batch; raises ValueError for one that it does not have."""
    missing = [name for name in names if getattr(batch, name) is None]
    if missing:
        raise ValueError(f"the batch has no {' and no '.join(missing)}")
    return [getattr(batch, name) for name in names]


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return log(new / old) per token [N], clamped to +-20 so that its exponential stays finite."""
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


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


@dataclass(frozen=True)
class ValueLoss(Piece, ABC):
    """Say what each token costs the critic; a subclass defines `token_loss`."""

    @abstractmethod
    def token_loss(self, values: Tensor, old_values: Tensor, returns: Tensor) -> TokenLoss:
        """Return the loss of every token [N]; ``values`` [N] carry the gradient."""


@dataclass(frozen=True)
class ClippedValueLoss(ValueLoss):
    """Take ``coef max((v - G)^2, (clip(v, v_old - clip, v_old + clip) - G)^2)`` per token.

    ``clip`` None leaves only the first term. ``coef`` 0.5 makes it half the squared error.

    Source: OpenAI baselines' PPO2; defaults of verl.

    Example:
        >>> v, old, g = torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([2.0])
        >>> ClippedValueLoss().token_loss(v, old, g).loss.tolist()
        [1.125]
    """

    clip: float | None = setting(
        0.5, "How far a value may move from the old one.", unset="any distance", more_than=0
    )
    coef: float = setting(0.5, "Weight of the squared error.", more_than=0)

    def token_loss(self, values: Tensor, old_values: Tensor, returns: Tensor) -> TokenLoss:
        """Return the loss of every token [N], and where the clipped value made it larger."""
        squared = (values - returns) ** 2
        if self.clip is None:
            clipped = torch.zeros_like(values, dtype=torch.bool)
            return TokenLoss(self.coef * squared, {"clip_fraction": clipped})
        bounded = torch.maximum(torch.minimum(values, old_values + self.clip), old_values - self.clip)
        other = (bounded - returns) ** 2
        return TokenLoss(self.coef * torch.maximum(squared, other), {"clip_fraction": other > squared})
