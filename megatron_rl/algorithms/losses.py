"""Policy losses, and the critic's loss.

A loss is neither summed nor averaged here: aggregation, mismatch correction and masking follow in
`policy_objective`. All tensors are [N]; ``log_probs`` carries the gradient. The losses form three groups:

- The loss of a token depends on this token only: PPO, CISPO, SAPO, DPPO and plain policy gradient. The ratio
  of new to old policy is ``r = exp(clamp(log_probs - old_log_probs, +-20))``.
- The loss of a token depends on the ratio of its response: GSPO, GMPO, TOPR, VESPO and off-policy sequence
  masking. Their tensors are ragged [N] with ``lengths`` [B] and ``mask`` [N]; rows must be complete. Rows
  with empty mask have ratio 1 and no loss.
- The loss of a token depends on its mini-batch: clip-cov and kl-cov preserve entropy with a different loss on
  the few tokens that reduce entropy most. These tokens are selected once per mini-batch, from the old
  policy's log-probs, and stored in `TrainBatch.selected`. Losses thus stay exact under any split into
  micro-batches. The paper selects by the current policy instead, which differs only after the first
  mini-batch of a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from megatron_rl.algorithms.piece import MAX_LOG_RATIO, Piece, ragged, torch, wrong_result_error
from megatron_rl.config.setting import NO_SETTING, setting

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from megatron_rl.types import TrainBatch


# Result that `token_loss` must return, for error texts.
_EXPECTED = "TokenLoss(loss, indicators) of tensors with one value per token [N], neither summed nor averaged"


class TokenLoss(NamedTuple):
    """Loss per token, and indicators per token whose means are logged.

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
    gradient. A loss that needs such statistics computes them in `select`, from the complete mini-batch.
    """

    entropy_coef: float = setting(0.0, "Weight of the entropy bonus that is subtracted from the loss.")
    opsm_delta: float | None = setting(
        None,
        "Off-policy sequence masking: responses with A < 0 do not count if the policy has drifted from them "
        "by more than this many nats per token since they were sampled.",
        unset="off",
    )

    top_entropy: float | None = setting(
        None,
        "Share of the batch's response tokens that have a policy loss: those at which the old policy has the "
        "highest entropy. The mean still counts the others (0.2 in arXiv 2506.01939).",
        unset="all tokens",
        more_than=0,
        at_most=1,
    )
    log_ratio_coef: float = setting(
        0.0,
        "Weight of the squared log ratio of new to old policy, which is added to the loss.",
        at_least=0,
    )
    log_ratio_of: str = setting(
        "response",
        "Unit of the squared log ratio: each response, by the sum over its tokens (Kimi k1.5, arXiv "
        "2501.12599, equation 3, with tau twice this weight), or each token.",
        choices=("response", "token"),
    )

    weighs_by_ratio: ClassVar[bool] = True
    """Whether the loss includes the ratio of new to old policy. If not, bypass mode adds it as a weight."""
    follows_rollout: ClassVar[bool] = False
    """Whether the loss includes the ratio to the sampling policy, which a correction weight would repeat."""

    @property
    def needs_scoring_pass(self) -> bool:
        """Whether the loss selects tokens before the update, by the old policy's log-probs or entropy."""
        return type(self).select is not PolicyLoss.select or self.top_entropy is not None

    @abstractmethod
    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Compute the loss of every token [N] of a micro-batch; ``log_probs`` [N] carries the gradient."""

    def select(self, minibatch: TrainBatch, generator: torch.Generator) -> Tensor | None:
        """Select the tokens of a mini-batch that `token_loss` treats specially: [N] bool, or None for none.

        Clip-Cov, for example, sets the loss of the selected tokens to 0. This default returns
        ``minibatch.selected`` unchanged. ``generator``: generator of random selections.
        """
        return minibatch.selected


@dataclass(frozen=True)
class FunctionLoss(PolicyLoss):
    """Policy loss made from a user's function ``(micro-batch, log_probs) -> TokenLoss``, without settings."""

    function: Callable[..., TokenLoss] | None = field(default=None, metadata=NO_SETTING)

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Compute the loss of every token [N] with the user's function."""
        assert self.function is not None
        return self.function(micro, log_probs)


def validate_token_loss(piece: Piece, result: Any, token_values: Tensor) -> TokenLoss:
    """Validate the result of a loss's ``token_loss`` method; raise UserError for a wrong type or shape.

    ``piece``: the policy or value loss. ``result``: a `TokenLoss` [N], or a pair that is converted to one.
    ``token_values`` [N]: any tensor with one value per token; only its shape is read.
    """
    # A user's function may return a plain pair.
    if isinstance(result, tuple) and len(result) == 2:
        result = TokenLoss(*result)
    if not isinstance(result, TokenLoss) or not isinstance(result.indicators, Mapping):
        raise wrong_result_error(piece, "token_loss", _EXPECTED, result)

    # A scalar or [B] loss would broadcast in the weighted sum and give a wrong gradient without an error.
    for value in (result.loss, *result.indicators.values()):
        if getattr(value, "shape", None) != token_values.shape:
            raise wrong_result_error(piece, "token_loss", _EXPECTED, value)

    return result


def fields_of(batch: TrainBatch, *names: str) -> list[Tensor]:
    """Return the named fields of a batch; raise ValueError if a field is unset."""
    absent_names = [name for name in names if getattr(batch, name) is None]
    if absent_names:
        raise ValueError(f"the batch has no {' and no '.join(absent_names)}")
    return [getattr(batch, name) for name in names]


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Compute log(new / old) per token [N], clamped to +-20 so that its exponential stays finite."""
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def squared_log_ratio(policy_loss: PolicyLoss, micro: TrainBatch, log_probs: Tensor) -> Tensor:
    """Compute the squared log ratio of new to old policy at each token: [N], 0 outside the mask.

    With ``log_ratio_of="token"`` the log ratio of each token is squared. With ``log_ratio_of="response"`` the
    log ratios of a response are summed, the sum is squared, and each token gets an equal share of the square.
    ``log_probs`` [N] carries the gradient.

    Source: Kimi k1.5, arXiv:2501.12599, equation 3.

    Example:
        >>> micro = micro_batch([1.0, 1.0], old_log_probs=[0.0, 0.0])
        >>> [round(x, 3) for x in squared_log_ratio(PpoClip(), micro, torch.tensor([0.1, 0.2])).tolist()]
        [0.045, 0.045]
    """
    mask = micro.response_mask
    (old_log_probs,) = fields_of(micro, "old_log_probs")
    log_ratios = torch.where(mask, log_ratio(log_probs, old_log_probs), 0)
    if policy_loss.log_ratio_of == "token":
        return log_ratios.square()

    token_counts = ragged.row_sums(mask.to(log_ratios.dtype), micro.lengths).clamp(min=1)
    row_values = ragged.row_sums(log_ratios, micro.lengths).square() / token_counts
    return torch.where(mask, ragged.broadcast_rows(row_values, micro.lengths, len(mask)), 0)


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
        """Compute the REINFORCE loss of every token: [N]."""
        (advantages,) = fields_of(micro, "advantages")
        return TokenLoss(-advantages * log_probs, {})


@dataclass(frozen=True)
class PpoClip(PolicyLoss):
    """PPO's pessimistic clipped loss per token.

    ``l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``. For A < 0 dual clip bounds the loss:
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
    # 3 is the value of the paper on dual clip.
    dual_clip: float | None = setting(
        3.0,
        "Bound of the loss for a negative advantage, in units of the advantage.",
        unset="no bound",
        more_than=1,
    )

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Compute the clipped loss of every token [N], with the indicators of clipped tokens."""
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
    """Compute the larger of clipped and unclipped loss from token or sequence ratios [N]; see `PpoClip`."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(torch.maximum(unclipped, clipped), {"clip_fraction": clipped > unclipped})


@dataclass(frozen=True)
class Cispo(PolicyLoss):
    """Policy gradient with a clipped importance weight, which keeps every token's gradient.

    ``l = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log_prob``, where sg stops the gradient. Unlike with
    PPO's clip, a token beyond the bound still has a gradient, with bounded weight. ``clip_low >= 1``, the
    paper's choice, means no lower bound.

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
        """Compute the policy gradient loss of every token with its clipped weight: [N]."""
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
        """Compute the gated loss of every token: [N]."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        ratio = log_ratio(log_probs, old_log_probs).exp()

        # By default, the gate is steeper for a negative advantage (a larger tau). The loss of such a token
        # raises the logits of all other tokens, which makes training less stable (SAPO, arXiv:2511.20347).
        tau_positive = ratio.new_tensor(self.temperature_positive)
        tau_negative = ratio.new_tensor(self.temperature_negative)
        tau = torch.where(advantages > 0, tau_positive, tau_negative)
        gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
        return TokenLoss(-advantages * gate, {})


@dataclass(frozen=True)
class Dppo(PolicyLoss):
    """Policy gradient with a trust region in *probability*: no loss for a token that moved too far.

    ``l = -sg[min(r, ratio_cap)] A log_prob`` for a token inside the trust region, else 0. Let p and q be the
    token's new and old probability. The token is outside if A > 0, p > q and D > ``clip_high``, or if A <= 0,
    p < q and D > ``clip_low``.

    The distance D is ``|p - q|`` for ``tv``. For ``kl`` it is the divergence of the binary distributions
    (q, 1 - q) and (p, 1 - p): ``q log(q/p) + (1-q) log((1-q)/(1-p))``. The default thresholds are in the
    paper's range: 0.2 for tv and 0.05 for kl.

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
        """Compute the loss of every token: [N], 0 for tokens that would move out of the trust region."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        # The weight is a constant of the gradient (sg), as in CISPO.
        ratio = log_ratio(log_probs, old_log_probs).exp().detach()

        # Divergence between old and new probability, in float64: p - q loses digits for close policies.
        log_p = log_probs.detach().double()
        log_q = old_log_probs.double()
        p = log_p.exp()
        q = log_q.exp()
        default_threshold = 0.2
        distance = (p - q).abs()
        if self.divergence == "kl":
            default_threshold = 0.05
            other_p = _other_tokens_prob(log_p)
            other_q = _other_tokens_prob(log_q)
            distance = q * (log_q - log_p) + other_q * (other_q.log() - other_p.log())

        # Only a step away from the trust region is cut: a token that moves back keeps its gradient.
        low_threshold = default_threshold if self.clip_low is None else self.clip_low
        high_threshold = default_threshold if self.clip_high is None else self.clip_high
        too_likely = (p > q) & (distance > high_threshold)
        too_unlikely = (p < q) & (distance > low_threshold)
        is_clipped = torch.where(advantages > 0, too_likely, too_unlikely)

        weight = torch.where(is_clipped, 0, ratio.clamp(max=self.ratio_cap))
        return TokenLoss(-weight * advantages * log_probs, {"clip_fraction": is_clipped})


def _other_tokens_prob(log_probs: Tensor) -> Tensor:
    """Compute the probability of all other tokens together, 1 - p [N], at least 1e-8.

    expm1 keeps the digits of 1 - p for p near 1; the floor keeps the logarithm of the result finite.
    """
    return -torch.expm1(log_probs.clamp(max=0)).clamp(max=-1e-8)


@dataclass(frozen=True)
class ValueLoss(Piece, ABC):
    """Loss of the critic's value per token; a subclass defines `token_loss`."""

    @abstractmethod
    def token_loss(self, values: Tensor, old_values: Tensor, returns: Tensor) -> TokenLoss:
        """Compute the loss of every token [N]; ``values`` [N] carries the gradient."""


@dataclass(frozen=True)
class ClippedValueLoss(ValueLoss):
    """Clipped squared error, ``coef max((v - G)^2, (clip(v, v_old - clip, v_old + clip) - G)^2)`` per token.

    With ``clip`` None the loss is only the first term. ``coef`` 0.5 makes it half the squared error.

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
        """Compute the loss of every token: [N].

        The indicator ``clip_fraction`` marks the tokens whose clipped error is larger than the unclipped one.
        """
        unclipped_error = (values - returns) ** 2
        if self.clip is None:
            no_token = torch.zeros_like(values, dtype=torch.bool)
            return TokenLoss(self.coef * unclipped_error, {"clip_fraction": no_token})

        clipped_values = torch.maximum(
            torch.minimum(values, old_values + self.clip),
            old_values - self.clip,
        )
        clipped_error = (clipped_values - returns) ** 2

        # Take the larger error: the clip removes the gradient of large changes, and never hides an error.
        loss = self.coef * torch.maximum(unclipped_error, clipped_error)
        return TokenLoss(loss, {"clip_fraction": clipped_error > unclipped_error})


# Bound of GSPO's log ratio from above: exp(10) = 2.2e4.
MAX_LOG_SEQUENCE_RATIO = 10.0


@dataclass(frozen=True)
class Gspo(PolicyLoss):
    """PPO's clipped loss on the response's length-normalised ratio, the same for all its tokens.

    The response's ratio is ``s_i = exp(mean_t(log_probs - old_log_probs))``. Each token has PPO's loss
    without dual clip on ``sg[s_i] pi_t / sg[pi_t]``, which equals s_i in value. With ``seq-mean-token-mean``
    the gradient equals the gradient of the sequence loss ``max(-A s_i, -A clip(s_i))``. log s_i is clamped to
    at most 10. Clip ranges are the paper's, far smaller than PPO's.

    Source: GSPO, arXiv:2507.18071, equations 5 to 7, in the variant GSPO-token.

    Example:
        >>> micro = micro_batch([1.0, 1.0], old_log_probs=[0.0, 0.0])
        >>> loss = Gspo(clip_high=0.2).token_loss(micro, torch.tensor([0.2, 0.0])).loss
        >>> [round(x, 4) for x in loss.tolist()]
        [-1.1052, -1.1052]
    """

    clip_low: float = setting(3e-4, "The response's ratio is clipped below 1 - clip_low.", at_least=0)
    clip_high: float = setting(4e-4, "The response's ratio is clipped above 1 + clip_high.", at_least=0)

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Compute PPO's clipped loss of every token [N], with the importance ratio of the whole response."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        log_ratios = log_probs.detach() - old_log_probs
        row_means = ragged.masked_row_means(log_ratios, micro.response_mask, micro.lengths)

        # Straight-through: the value is the mean log ratio of the response, the gradient is the token's.
        token_means = ragged.broadcast_rows(row_means, micro.lengths, len(log_probs))
        log_sequence_ratio = token_means + log_probs - log_probs.detach()
        ratio = log_sequence_ratio.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
        return clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)


@dataclass(frozen=True)
class Gmpo(PolicyLoss):
    """Loss on the geometric mean of a response's token ratios, each clipped in log space.

    With ``s = sign A`` and ``d_t = log_probs - old_log_probs``:
    ``d'_t = s min(s d_t, s clip(d_t, -clip_low, clip_high))`` and ``l = -mean(A) exp(mean_t d'_t)`` on every
    token of the row. Under ``seq-mean-token-mean`` this is the mean over responses of the paper's loss. A
    token with A = 0 counts as d' = 0.

    Source: GMPO, arXiv:2507.20673; clip range (e^-0.4, e^0.4).

    Example:
        >>> micro = micro_batch([1.0, 1.0], old_log_probs=[0.0, 0.0])
        >>> [round(x, 4) for x in Gmpo().token_loss(micro, torch.tensor([1.0, 0.2])).loss.tolist()]
        [-1.3499, -1.3499]
    """

    clip_low: float = setting(0.4, "A token's log ratio is clipped below -clip_low.", at_least=0)
    clip_high: float = setting(0.4, "A token's log ratio is clipped above clip_high.", at_least=0)

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Compute the loss of every token [N], which is the same for all tokens of a response."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        mask = micro.response_mask
        lengths = micro.lengths

        # Take the more pessimistic of the clipped and the unclipped log ratio, as PPO does. PPO takes the
        # maximum of two losses; with the sign of A this is a minimum of two log ratios.
        sign = advantages.sign()
        log_ratios = log_probs - old_log_probs
        clipped_log_ratios = log_ratios.clamp(-self.clip_low, self.clip_high)
        pessimistic_log_ratios = sign * torch.minimum(sign * log_ratios, sign * clipped_log_ratios)
        is_clipped = sign * log_ratios > sign * clipped_log_ratios

        # The mean in log space is the geometric mean: one extreme token changes it less than the product.
        row_ratios = ragged.masked_row_means(pessimistic_log_ratios, mask, lengths).exp()
        row_advantages = ragged.masked_row_means(advantages, mask, lengths)
        loss = ragged.broadcast_rows(-row_advantages * row_ratios, lengths, len(log_probs))
        return TokenLoss(loss, {"clip_fraction": is_clipped})


@dataclass(frozen=True)
class Topr(PolicyLoss):
    """Tapered off-policy REINFORCE: plain for good responses, weighted by the capped ratio for bad ones.

    Tokens with A > 0: ``l = -A log_prob``. Others: ``l = -sg[min(R_i, 1)] A log_prob`` with the full
    importance ratio of the response to the policy that sampled it, which may be several updates old:
    ``R_i = exp(clamp(sum_t (log_probs - rollout_log_probs), +-20))``. The loss is stable off policy without a
    KL term; on policy it is REINFORCE. The paper sums over tokens: ``seq-mean-token-sum``.

    Source: TOPR, arXiv:2503.14286 (canonical tapers a+ = b+ = 1, a- = 0, b- = 1).

    Example:
        >>> micro = micro_batch([-1.0, -1.0], rollout_log_probs=[-1.0, -1.0])
        >>> [round(x, 3) for x in Topr().token_loss(micro, torch.tensor([-1.5, -1.0])).loss.tolist()]
        [-0.91, -0.607]
    """

    follows_rollout: ClassVar[bool] = True

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Compute the loss of every token [N], weighted by the response's capped ratio for A <= 0."""
        (advantages,) = fields_of(micro, "advantages")
        # A response with a negative advantage has a weight near 0 if it has become unlikely under the policy.
        # No gradient flows through the ratio: `_log_ratio_to_rollout` detaches it.
        capped_ratio = _log_ratio_to_rollout(micro, log_probs).exp().clamp(max=1)
        weight = torch.where(advantages > 0, 1, capped_ratio)
        return TokenLoss(-weight * advantages * log_probs, {"taper": weight})


@dataclass(frozen=True)
class Vespo(PolicyLoss):
    """Policy gradient with a smooth weight of the response's full importance ratio, without a clip.

    ``l = -sg[phi(W)] A log_prob`` with ``phi(W) = W^power exp(decay (1 - W))`` and the full importance ratio
    of the response to the policy that sampled it, which may be several updates old:
    ``W = exp(clamp(sum_t (log_probs - rollout_log_probs), +-20))``.

    On policy the weight is 1. It is largest at ``W = power / decay`` and falls to 0 for responses that have
    become far less or far more likely. ``power`` and ``decay`` are ``*_positive`` for A >= 0 and
    ``*_negative`` otherwise.

    Source: VESPO, arXiv:2602.10693; its published code and TRL use these weights.

    Example:
        >>> micro = micro_batch([1.0, 1.0], rollout_log_probs=[-1.0, -1.0])
        >>> [round(x, 3) for x in Vespo().token_loss(micro, torch.tensor([-1.5, -1.0])).loss.tolist()]
        [1.797, 1.198]
    """

    power_positive: float = setting(2.0, "Power of the ratio for A >= 0.", at_least=0)
    decay_positive: float = setting(3.0, "Exponential decay in the ratio for A >= 0.", at_least=0)
    power_negative: float = setting(3.0, "Power of the ratio for A < 0.", at_least=0)
    decay_negative: float = setting(2.0, "Exponential decay in the ratio for A < 0.", at_least=0)

    follows_rollout: ClassVar[bool] = True

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Compute the loss of every token [N], weighted by a smooth function of the response's ratio."""
        (advantages,) = fields_of(micro, "advantages")
        log_ratios = _log_ratio_to_rollout(micro, log_probs)
        is_positive = advantages >= 0
        power = torch.where(is_positive, self.power_positive, self.power_negative)
        decay = torch.where(is_positive, self.decay_positive, self.decay_negative)

        # W is the importance ratio of the response. Add the logarithms of the factors W^power and
        # exp(decay (1 - W)) before the exponential: W^power alone can overflow although the product is 0.
        weight = (power * log_ratios + decay * (1 - log_ratios.exp())).exp()
        return TokenLoss(-weight * advantages * log_probs, {"weight": weight})


def _log_ratio_to_rollout(micro: TrainBatch, log_probs: Tensor) -> Tensor:
    """Compute each response's log ratio to its sampling policy, repeated on its tokens: [N], detached.

    It is the sum over the response's tokens, clamped to +-20.
    """
    (rollout_log_probs,) = fields_of(micro, "rollout_log_probs")
    # Prompts must not enter the sum.
    difference = torch.where(micro.response_mask, log_probs.detach() - rollout_log_probs, 0)
    row_log_ratios = ragged.row_sums(difference, micro.lengths).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return ragged.broadcast_rows(row_log_ratios, micro.lengths, len(log_probs))


def top_entropy_tokens(entropy: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """Mark the ``max(floor(fraction * tokens), 1)`` tokens of highest entropy within the mask: [N] bool.

    Among tokens of equal entropy, earlier positions come first. ``entropy`` is [N], ``mask`` [N] bool.

    Source: Beyond the 80/20 Rule, arXiv:2506.01939, equation 4.

    Example:
        >>> top_entropy_tokens(torch.tensor([9.0, 0.1, 2.0, 1.0]), torch.arange(4) > 0, 0.7).tolist()
        [False, False, True, True]
    """
    candidates = torch.nonzero(mask).squeeze(-1)
    selected_count = max(int(fraction * len(candidates)), 1)

    # A stable sort, so that every rank selects the same tokens among equal entropies.
    entropy_order = torch.argsort(entropy[candidates], descending=True, stable=True)
    selected = torch.zeros_like(mask)
    selected[candidates[entropy_order[:selected_count]]] = True
    return selected


def off_policy_sequence_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    delta: float,
) -> Tensor:
    """Mark the tokens that get a loss under off-policy sequence masking: [N] bool.

    A token gets no loss if its A is below 0 and its response has drifted by more than ``delta``. Drift is
    ``mean_t(rollout_log_probs - log_probs)`` over the response, an estimate of KL(rollout || new). Its causes
    are the updates since the response was sampled, and the numerical difference between inference and
    training. Bad responses that the policy no longer produces have no useful gradient and destabilise
    training.

    Source: DeepSeek-V3.2, arXiv:2512.02556 (off-policy sequence masking, with the log-probs that inference
    returned); slime --use-opsm, with 1e-4.

    Example:
        >>> new, old = torch.tensor([-2.0, -2.0]), torch.tensor([-1.0, -1.0])
        >>> a, mask = torch.tensor([-1.0, 1.0]), torch.ones(2) > 0
        >>> off_policy_sequence_mask(new, old, a, mask, torch.tensor([2]), delta=1e-4).tolist()
        [False, True]
    """
    # Detached: the mask selects tokens and must not contribute to the gradient.
    drift = ragged.masked_row_means(rollout_log_probs - log_probs.detach(), mask, lengths)
    has_drifted = ragged.broadcast_rows(drift > delta, lengths, len(mask))
    return ~((advantages < 0) & has_drifted)


FRACTION_MEANING = "Share of the mini-batch's tokens that is selected, at least one token."


@dataclass(frozen=True)
class ClipCov(PolicyLoss):
    """PPO's clipped loss without dual clip, and no loss on the selected tokens.

    `select` draws max(floor(fraction * tokens), 1) tokens at random from those with
    ``covariance_low < covariance < covariance_high``; if fewer qualify, it selects all of them.

    Source: arXiv:2505.22617, Clip-Cov.

    Example:
        >>> chosen = torch.tensor([True, False])
        >>> micro = micro_batch([1.0, 1.0], old_log_probs=[0.0, 0.0], selected=chosen)
        >>> ClipCov().token_loss(micro, torch.zeros(2)).loss.tolist()
        [0.0, -1.0]
        >>> micro = micro_batch([1.0, -1.0, 0.0], old_log_probs=[-1.0, -5.0, -3.0])
        >>> ClipCov().select(micro, torch.Generator()).sum().item()
        1
    """

    clip_low: float = setting(0.2, LOW_MEANING, at_least=0)
    clip_high: float = setting(0.2, HIGH_MEANING, at_least=0)
    fraction: float = setting(2e-4, FRACTION_MEANING, more_than=0, at_most=1)
    covariance_low: float = setting(1.0, "Tokens of lower covariance are not selected.")
    covariance_high: float = setting(5.0, "Tokens of higher covariance are not selected.")

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Compute PPO's clipped loss of every token [N], with the selected tokens' loss set to 0.

        `select` has chosen the selected tokens from the complete mini-batch. The metric ``selected_fraction``
        is the share of tokens whose loss is set to 0.
        """
        # Clip-Cov (arXiv:2505.22617) is PPO without dual clip, except for the tokens without a loss.
        ppo_clip = PpoClip(
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=None,
        )
        loss, indicators = ppo_clip.token_loss(micro, log_probs)
        selected = _selected_tokens(micro)
        return TokenLoss(torch.where(selected, 0, loss), {**indicators, "selected_fraction": selected})

    def select(self, minibatch: TrainBatch, generator: Generator) -> Tensor:
        """Select the tokens that get no loss: [N] bool, all False for an empty mask."""
        mask = minibatch.response_mask
        covariance = _log_prob_covariance(minibatch)
        in_range = (covariance > self.covariance_low) & (covariance < self.covariance_high)
        candidates = torch.nonzero(mask & in_range).squeeze(-1)

        # Draw without replacement among the candidates.
        max_count = max(int(self.fraction * int(mask.sum())), 1)
        random_order = torch.randperm(len(candidates), generator=generator)
        selected = torch.zeros_like(mask)
        selected[candidates[random_order[:max_count]]] = True
        return selected


@dataclass(frozen=True)
class KlCov(PolicyLoss):
    """Unclipped loss ``-A r``, with ``coef |log_probs - old_log_probs|`` added on selected tokens.

    `select` marks the max(floor(fraction * tokens), 1) tokens of largest covariance; among tokens of equal
    covariance, earlier positions come first. The paper has ``coef`` 1, verl's configuration 0.1.

    Source: arXiv:2505.22617, KL-Cov.

    Example:
        >>> chosen, new = torch.tensor([True, True]), torch.tensor([0.5, 0.0])
        >>> micro = micro_batch([1.0, 1.0], old_log_probs=[0.0, 0.0], selected=chosen)
        >>> [round(x, 3) for x in KlCov(coef=1.0).token_loss(micro, new).loss.tolist()]
        [-1.149, -1.0]
        >>> micro = micro_batch([1.0, 0.0, 0.0], old_log_probs=[-1.0, -5.0, -3.0])
        >>> KlCov().select(micro, torch.Generator()).tolist()
        [True, False, False]
    """

    fraction: float = setting(2e-4, FRACTION_MEANING, more_than=0, at_most=1)
    coef: float = setting(0.1, "Weight of the penalty on selected tokens.", at_least=0)

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Compute the unclipped loss of every token [N], with a penalty on the selected tokens.

        `select` has chosen the selected tokens from the complete mini-batch. The metric ``selected_fraction``
        is the share of tokens with a penalty.
        """
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        selected = _selected_tokens(micro)
        log_ratios = log_ratio(log_probs, old_log_probs)
        penalty = torch.where(selected, self.coef * log_ratios.abs(), 0)
        return TokenLoss(-advantages * log_ratios.exp() + penalty, {"selected_fraction": selected})

    def select(self, minibatch: TrainBatch, generator: Generator) -> Tensor:
        """Select the tokens that get the penalty: [N] bool, all False for an empty mask."""
        mask = minibatch.response_mask
        covariance = _log_prob_covariance(minibatch)
        token_count = int(mask.sum())
        selected = torch.zeros_like(mask)
        if not token_count:
            return selected

        # A stable sort, so that every rank selects the same tokens among equal covariances.
        ranking = torch.where(mask, covariance, -torch.inf).sort(descending=True, stable=True).indices
        selected_count = max(int(self.fraction * token_count), 1)
        selected[ranking[:selected_count]] = True
        return selected


def token_covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Compute each token's term of Cov(log_prob, A), ``(log_prob - mean) (A - mean)``: [N].

    It is 0 outside ``mask``, and means are over the masked-in tokens. The entropy of the policy falls at the
    rate of this covariance.

    Source: The Entropy Mechanism, arXiv:2505.22617.

    Example:
        >>> lp, a = torch.tensor([-1.0, -3.0]), torch.tensor([2.0, 0.0])
        >>> token_covariance(lp, a, torch.ones(2) > 0).tolist()
        [1.0, 1.0]
    """
    if not mask.any():
        return torch.zeros_like(log_probs)

    centred_log_probs = log_probs - log_probs[mask].mean()
    centred_advantages = advantages - advantages[mask].mean()
    covariance = centred_log_probs * centred_advantages
    return torch.where(mask, covariance, 0)


def _log_prob_covariance(minibatch: TrainBatch) -> Tensor:
    """Compute the covariance of the old policy's log-probs with the advantages: [N] float64."""
    old_log_probs, advantages = fields_of(minibatch, "old_log_probs", "advantages")
    return token_covariance(old_log_probs.double(), advantages.double(), minibatch.response_mask)


def _selected_tokens(micro: TrainBatch) -> Tensor:
    """Return the tokens [N] bool that `PolicyLoss.select` has selected from the mini-batch of ``micro``.

    Raises ValueError if no tokens have been selected.
    """
    if micro.selected is None:
        raise ValueError("the batch has no selected tokens; take mini-batches from `minibatches`")
    return micro.selected
