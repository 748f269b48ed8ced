"""Policy losses per token, on the token's own probability ratio, and the critic's loss.

PPO, CISPO, SAPO, DPPO and plain policy gradient. All tensors are [N]; ``log_probs`` carries the gradient.
``r = exp(clamp(log_probs - old_log_probs, +-20))``. A loss is neither summed nor averaged here: aggregation,
mismatch correction and masking follow in `policy_objective`.
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
    """Loss per token, with indicators for the log.

    Example: ``TokenLoss(-advantages * ratio, {"clip_fraction": ratio > 1.2})``.
    """

    loss: Tensor
    """[N], with gradient."""
    indicators: Mapping[str, Tensor]
    """Name -> [N]; the mean over response tokens is logged as ``policy/NAME`` or ``critic/NAME``."""


@dataclass(frozen=True)
class PolicyLoss(Piece, ABC):
    """Policy loss per token; a subclass defines `token_loss`.

    A micro-batch contains complete rows, so a sum over a row is exact in `token_loss`. Statistics over
    several rows are not: they would depend on the split into micro-batches, which must not change the
    gradient. A loss that needs such statistics takes them in `select`, from the complete mini-batch.
    """

    entropy_coef: float = setting(0.0, "Weight of the entropy bonus that is subtracted from the loss.")
    opsm_delta: float | None = setting(
        None,
        "Off-policy sequence masking: responses with A < 0 do not count if the policy has drifted from them "
        "by more nats per token since they were sampled.",
        unset="off",
    )

    weighs_by_ratio: ClassVar[bool] = True
    """Whether the loss includes the ratio of new to old policy. If not, bypass mode weights the loss."""
    follows_rollout: ClassVar[bool] = False
    """Whether that ratio is to the sampling policy, so that a correction weight would apply it twice."""

    @property
    def needs_scoring_pass(self) -> bool:
        """Whether `select` picks tokens by statistics of the mini-batch, which read the old log-probs."""
        return type(self).select is not PolicyLoss.select

    @abstractmethod
    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Compute the loss of every token [N] of a micro-batch; ``log_probs`` [N] carries the gradient."""

    def select(self, minibatch: TrainBatch, generator: torch.Generator) -> Tensor | None:
        """Return the tokens [N] bool of a mini-batch that get a different loss; None means no token."""
        return minibatch.selected


@dataclass(frozen=True)
class FunctionLoss(PolicyLoss):
    """Policy loss made from a user's function ``(micro-batch, log_probs) -> TokenLoss``, without settings."""

    function: Callable[..., TokenLoss] | None = field(default=None, metadata=NO_SETTING)

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Call the user's function."""
        assert self.function is not None
        return self.function(micro, log_probs)


def checked_loss(piece: Piece, loss: Any, tokens: Tensor) -> TokenLoss:
    """Validate the result of a piece's ``token_loss``; raise UserError unless it is a `TokenLoss` [N].

    ``tokens`` [N] is any tensor with one value per token; only its shape is read.
    """
    # A user's function may return a plain pair.
    if isinstance(loss, tuple) and len(loss) == 2:
        loss = TokenLoss(*loss)
    if not isinstance(loss, TokenLoss) or not isinstance(loss.indicators, Mapping):
        raise wrong_result(piece, "token_loss", _EXPECTED, loss)

    # A scalar or [B] loss would broadcast in the weighted sum and give a wrong gradient without an error.
    for value in (loss.loss, *loss.indicators.values()):
        if getattr(value, "shape", None) != tokens.shape:
            raise wrong_result(piece, "token_loss", _EXPECTED, value)

    return loss


def fields_of(batch: TrainBatch, *names: str) -> list[Tensor]:
    """Return the named fields of a batch; raise ValueError for absent ones."""
    absent_names = [name for name in names if getattr(batch, name) is None]
    if absent_names:
        raise ValueError(f"the batch has no {' and no '.join(absent_names)}")
    return [getattr(batch, name) for name in names]


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Compute log(new / old) per token [N], clamped to +-20 so that its exponential stays finite."""
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


LOW_MEANING = "The ratio is clipped below 1 - clip_low."
HIGH_MEANING = "The ratio is clipped above 1 + clip_high."
_THRESHOLDS = "0.2 for tv, 0.05 for kl"


@dataclass(frozen=True)
class PolicyGradient(PolicyLoss):
    """REINFORCE loss per token, ``-A log_prob``, without importance weight for an older policy.

    Source: Williams (1992); GPG, arXiv:2504.02546.

    Example:
        >>> PolicyGradient().token_loss(micro_batch([0.5]), torch.tensor([-2.0])).loss.tolist()
        [1.0]
    """

    weighs_by_ratio: ClassVar[bool] = False

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Compute the loss of every token [N]."""
        (advantages,) = fields_of(micro, "advantages")
        return TokenLoss(-advantages * log_probs, {})


@dataclass(frozen=True)
class PpoClip(PolicyLoss):
    """PPO's pessimistic clipped loss per token.

    ``l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``; for A < 0 dual clip bounds it:
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
        "Bound of the loss for a negative advantage, in units of the advantage.",
        unset="no bound",
        more_than=1,
    )

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Compute the loss of every token [N]."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        ratio = log_ratio(log_probs, old_log_probs).exp()
        loss, indicators = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)
        if self.dual_clip is None:
            return TokenLoss(loss, indicators)

        # Without dual clip the loss of a token with A < 0 is unbounded in its ratio.
        bound = -advantages * self.dual_clip
        exceeds_bound = (advantages < 0) & (loss > bound)
        loss = torch.where(exceeds_bound, bound, loss)
        return TokenLoss(loss, {**indicators, "dual_clip_fraction": exceeds_bound})


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Compute the larger of clipped and unclipped loss for a token or sequence ratio [N]; see `PpoClip`."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(torch.maximum(unclipped, clipped), {"clip_fraction": clipped > unclipped})


@dataclass(frozen=True)
class Cispo(PolicyLoss):
    """Policy gradient with a clipped importance weight, which keeps every token's gradient.

    ``l = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log_prob``: unlike under PPO's clip, a token beyond the
    bound still has a gradient, with bounded weight. ``clip_low >= 1``, the paper's choice, means no lower
    bound.

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
        """Compute the loss of every token [N]."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        # The weight is a constant of the gradient (sg): only log_prob is differentiated.
        ratio = log_ratio(log_probs, old_log_probs).exp().detach()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return TokenLoss(-weight * advantages * log_probs, {"clip_fraction": weight != ratio})


@dataclass(frozen=True)
class Sapo(PolicyLoss):
    """Policy loss with a smooth gate on the ratio in place of PPO's clip.

    ``l = -f(r) A`` with ``f(r) = sigmoid(tau (r - 1)) 4 / tau``; tau is ``temperature_positive`` for A > 0
    and ``temperature_negative`` otherwise. At r = 1 the gradient of f is 1, as for the plain ratio.

    Source: SAPO, arXiv:2511.20347.

    Example:
        >>> Sapo().token_loss(micro_batch([1.0], old_log_probs=[0.0]), torch.zeros(1)).loss.tolist()
        [-2.0]
    """

    temperature_positive: float = setting(1.0, "Steepness of the gate for A > 0.", more_than=0)
    temperature_negative: float = setting(1.05, "Steepness of the gate for A <= 0.", more_than=0)

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Compute the loss of every token [N]."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        ratio = log_ratio(log_probs, old_log_probs).exp()

        positive = ratio.new_tensor(self.temperature_positive)
        negative = ratio.new_tensor(self.temperature_negative)
        tau = torch.where(advantages > 0, positive, negative)
        gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
        return TokenLoss(-advantages * gate, {})


@dataclass(frozen=True)
class Dppo(PolicyLoss):
    """Policy gradient with a trust region in *probability*: no loss for a token that moved too far.

    ``l = -sg[min(r, ratio_cap)] A log_prob`` for a token inside the trust region, else 0. With p and q the
    token's new and old probability, it is outside for A > 0, p > q and D > ``clip_high``, or for A <= 0,
    p < q and D > ``clip_low``. D is ``|p - q|`` (``tv``) or the divergence of the binary distributions "this
    token or another", ``q log(q/p) + (1-q) log((1-q)/(1-p))`` (``kl``). Thresholds are of D; their defaults
    are the paper's: 0.2 for tv (it uses 0.15 to 0.2) and 0.05 for kl.

    Source: DPPO, arXiv:2602.04879 (binary approximations).

    Example:
        A rare token may grow tenfold, a common one may not grow by 0.3.

        >>> old = torch.tensor([0.001, 0.5]).log().tolist()
        >>> micro, new = micro_batch([1.0, 1.0], old_log_probs=old), torch.tensor([0.01, 0.8]).log()
        >>> Dppo().token_loss(micro, new).indicators["clip_fraction"].tolist()
        [False, True]
    """

    divergence: str = setting("tv", "Divergence between old and new probability.", choices=("tv", "kl"))
    clip_low: float | None = setting(
        None,
        "Largest divergence of a token that becomes less likely.",
        unset=_THRESHOLDS,
        at_least=0,
    )
    clip_high: float | None = setting(
        None,
        "Largest divergence of a token that becomes more likely.",
        unset=_THRESHOLDS,
        at_least=0,
    )
    ratio_cap: float = setting(20.0, "Largest weight of a token.", more_than=0)

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Compute the loss of every token [N]."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        ratio = log_ratio(log_probs, old_log_probs).exp().detach()

        # Divergence between old and new probability, in float64: p - q cancels digits of close policies.
        new = log_probs.detach().double()
        old = old_log_probs.double()
        p = new.exp()
        q = old.exp()
        default_threshold = 0.2
        distance = (p - q).abs()
        if self.divergence == "kl":
            default_threshold = 0.05
            complement_p = _complement(new)
            complement_q = _complement(old)
            distance = q * (old - new) + complement_q * (complement_q.log() - complement_p.log())

        # Only a step away from the trust region is cut: a token that moves back keeps its gradient.
        low = default_threshold if self.clip_low is None else self.clip_low
        high = default_threshold if self.clip_high is None else self.clip_high
        too_likely = (p > q) & (distance > high)
        too_unlikely = (p < q) & (distance > low)
        clipped = torch.where(advantages > 0, too_likely, too_unlikely)

        weight = torch.where(clipped, 0, ratio.clamp(max=self.ratio_cap))
        return TokenLoss(-weight * advantages * log_probs, {"clip_fraction": clipped})


def _complement(log_probs: Tensor) -> Tensor:
    """Compute the probability of any other token, 1 - p [N], at least 1e-8.

    expm1 keeps the digits of 1 - p for p near 1; the floor keeps the logarithm of the result finite.
    """
    return -torch.expm1(log_probs.clamp(max=0)).clamp(max=-1e-8)


@dataclass(frozen=True)
class ValueLoss(Piece, ABC):
    """Critic's loss per token; a subclass defines `token_loss`."""

    @abstractmethod
    def token_loss(self, values: Tensor, old_values: Tensor, returns: Tensor) -> TokenLoss:
        """Compute the loss of every token [N]; ``values`` [N] carries the gradient."""


@dataclass(frozen=True)
class ClippedValueLoss(ValueLoss):
    """Clipped squared error, ``coef max((v - G)^2, (clip(v, v_old - clip, v_old + clip) - G)^2)`` per token.

    With ``clip`` None only the first term is left. ``coef`` 0.5 makes it half the squared error.

    Source: OpenAI baselines' PPO2; defaults of verl.

    Example:
        >>> v, old, g = torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([2.0])
        >>> ClippedValueLoss().token_loss(v, old, g).loss.tolist()
        [1.125]
    """

    clip: float | None = setting(
        0.5,
        "Largest distance of a value from the old one.",
        unset="any distance",
        more_than=0,
    )
    coef: float = setting(0.5, "Weight of the squared error.", more_than=0)

    def token_loss(self, values: Tensor, old_values: Tensor, returns: Tensor) -> TokenLoss:
        """Compute the loss of every token [N]; the indicator marks a larger loss of the clipped value."""
        unclipped_error = (values - returns) ** 2
        if self.clip is None:
            no_token = torch.zeros_like(values, dtype=torch.bool)
            return TokenLoss(self.coef * unclipped_error, {"clip_fraction": no_token})

        clipped_values = torch.maximum(
            torch.minimum(values, old_values + self.clip),
            old_values - self.clip,
        )
        clipped_error = (clipped_values - returns) ** 2
        loss = self.coef * torch.maximum(unclipped_error, clipped_error)
        return TokenLoss(loss, {"clip_fraction": clipped_error > unclipped_error})
