"""Policy losses that look beyond a token: at its whole response, or at the mini-batch.

GSPO, GMPO, TOPR and off-policy sequence masking are on the ratio of a response. Per-token tensors are ragged
[N] with ``lengths`` [B] and ``mask`` [N]; rows must be whole. A row with an empty mask has ratio 1 and takes
no part.

Clip-cov and kl-cov keep entropy up by treating the few tokens apart that destroy most of it. Which tokens
these are depends on the whole mini-batch, so they are chosen once when it is made, from the old policy's
log-probs, and marked in `TrainBatch.selected`. That keeps losses exact under any split into micro-batches; at
the first mini-batch of a step it is the published choice, at later ones the published choice would use the
slightly newer policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_rl.algorithms.losses import (
    HIGH_MEANING,
    LOW_MEANING,
    PolicyLoss,
    PpoClip,
    TokenLoss,
    clipped_surrogate,
    fields_of,
    log_ratio,
)
from megatron_rl.algorithms.piece import MAX_LOG_RATIO, ragged, torch
from megatron_rl.config.setting import setting

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from megatron_rl.types import TrainBatch

MAX_LOG_SEQUENCE_RATIO = 10.0


@dataclass(frozen=True)
class Gspo(PolicyLoss):
    """Clip by the response's length-normalised ratio, one for all its tokens.

    ``s_i = exp(mean_t(log_probs - old_log_probs))``; each token uses ``sg[s_i] pi_t / sg[pi_t]``, equal to
    s_i in value, in PPO's loss without dual clip. With ``seq-mean-token-mean`` its gradient is that of the
    sequence loss ``max(-A s_i, -A clip(s_i))``. log s_i is kept below 10. Clip ranges are the paper's, far
    smaller than PPO's.

    Source: GSPO, arXiv:2507.18071, equations 5 to 7, in the form of its GSPO-token.

    Example:
        >>> micro = micro_batch([1.0, 1.0], old_log_probs=[0.0, 0.0])
        >>> loss = Gspo(clip_high=0.2).token_loss(micro, torch.tensor([0.2, 0.0])).loss
        >>> [round(x, 4) for x in loss.tolist()]
        [-1.1052, -1.1052]
    """

    clip_low: float = setting(3e-4, "The response's ratio is clipped below 1 - clip_low.", at_least=0)
    clip_high: float = setting(4e-4, "The response's ratio is clipped above 1 + clip_high.", at_least=0)

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Return the loss of every token [N]."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        mask, lengths = micro.response_mask, micro.lengths
        mean = ragged.masked_row_means(log_probs.detach() - old_log_probs, mask, lengths)
        log_ratio = ragged.broadcast_rows(mean, lengths) + log_probs - log_probs.detach()
        ratio = log_ratio.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
        return clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)


@dataclass(frozen=True)
class Gmpo(PolicyLoss):
    """Maximise the geometric mean of the response's ratios, clipped token by token in log space.

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
        """Return the loss of every token [N]."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        mask, lengths = micro.response_mask, micro.lengths
        sign = advantages.sign()
        difference = log_probs - old_log_probs
        clipped = difference.clamp(-self.clip_low, self.clip_high)
        bounded = sign * torch.minimum(sign * difference, sign * clipped)
        ratio = ragged.masked_row_means(bounded, mask, lengths).exp()
        advantage = ragged.masked_row_means(advantages, mask, lengths)
        outside = sign * difference > sign * clipped
        return TokenLoss(ragged.broadcast_rows(-advantage * ratio, lengths), {"clip_fraction": outside})


@dataclass(frozen=True)
class Topr(PolicyLoss):
    """Imitate good responses as they are, push away bad ones only as far as they are still likely.

    Tokens with A > 0: ``l = -A log_prob``. Others: ``l = -sg[min(R_i, 1)] A log_prob`` with the response's
    full ratio to the policy that sampled it, however old that is:
    ``R_i = exp(clamp(sum_t (log_probs - rollout_log_probs), +-20))``. Stable off policy without a KL term; on
    policy it is REINFORCE. The paper sums over tokens: ``seq-mean-token-sum``.

    Source: TOPR, arXiv:2503.14286 (canonical tapers a+ = b+ = 1, a- = 0, b- = 1).

    Example:
        >>> micro = micro_batch([-1.0, -1.0], rollout_log_probs=[-1.0, -1.0])
        >>> [round(x, 3) for x in Topr().token_loss(micro, torch.tensor([-1.5, -1.0])).loss.tolist()]
        [-0.91, -0.607]
    """

    follows_rollout: ClassVar[bool] = True

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Return the loss of every token [N]."""
        rollout_log_probs, advantages = fields_of(micro, "rollout_log_probs", "advantages")
        difference = torch.where(micro.response_mask, log_probs.detach() - rollout_log_probs, 0)
        log_ratio = ragged.row_sums(difference, micro.lengths).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        tapered = ragged.broadcast_rows(log_ratio.exp().clamp(max=1), micro.lengths)
        weight = torch.where(advantages > 0, 1, tapered)
        return TokenLoss(-weight * advantages * log_probs, {"taper": weight})


def off_policy_sequence_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    delta: float,
) -> Tensor:
    """Mark tokens to keep: [N] bool, false where A < 0 and the response has drifted by more than ``delta``.

    Drift is ``mean_t(rollout_log_probs - log_probs)`` over the response, an estimate of KL(rollout || new):
    what was learned since the response was sampled, and the difference of the two engines. Bad responses the
    policy has already left teach nothing and destabilise.

    Source: DeepSeek-V3.2, arXiv:2512.02556 (off-policy sequence masking, with the log-probs that inference
    returned); slime --use-opsm, with 1e-4.

    Example:
        >>> new, old = torch.tensor([-2.0, -2.0]), torch.tensor([-1.0, -1.0])
        >>> a, mask = torch.tensor([-1.0, 1.0]), torch.ones(2) > 0
        >>> off_policy_sequence_mask(new, old, a, mask, torch.tensor([2]), delta=1e-4).tolist()
        [False, True]
    """
    drift = ragged.masked_row_means(rollout_log_probs - log_probs.detach(), mask, lengths)
    return ~((advantages < 0) & ragged.broadcast_rows(drift > delta, lengths))


FRACTION_MEANING = "Share of the mini-batch's tokens that is treated apart, at least one token."


@dataclass(frozen=True)
class ClipCov(PolicyLoss):
    """Take PPO's clipped loss without dual clip, and none at all on the selected tokens.

    Selected are max(floor(fraction * tokens), 1) tokens, drawn at random of those with
    ``covariance_low < covariance < covariance_high``; where fewer qualify, all of them.

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
        """Return the loss of every token [N]."""
        clipped = PpoClip(clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=None)
        loss, indicators = clipped.token_loss(micro, log_probs)
        selected = _selected(micro)
        return TokenLoss(torch.where(selected, 0, loss), {**indicators, "selected_fraction": selected})

    def select(self, minibatch: TrainBatch, generator: Generator) -> Tensor:
        """Return the tokens without a loss: [N] bool; an empty mask gives none."""
        covariance, mask = _covariance_of(minibatch), minibatch.response_mask
        between = (covariance > self.covariance_low) & (covariance < self.covariance_high)
        candidates = torch.nonzero(mask & between).squeeze(-1)
        count = max(int(self.fraction * int(mask.sum())), 1)
        chosen = candidates[torch.randperm(len(candidates), generator=generator)[:count]]
        selected = torch.zeros_like(mask)
        selected[chosen] = True
        return selected


@dataclass(frozen=True)
class KlCov(PolicyLoss):
    """Take the unclipped loss ``-A r``, with ``coef |log_probs - old_log_probs|`` added on selected tokens.

    Selected are the max(floor(fraction * tokens), 1) tokens of largest covariance, equal ones in order of
    position. The paper has ``coef`` 1, verl's configuration 0.1.

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
        """Return the loss of every token [N]."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        selected = _selected(micro)
        difference = log_ratio(log_probs, old_log_probs)
        penalty = torch.where(selected, self.coef * difference.abs(), 0)
        return TokenLoss(-advantages * difference.exp() + penalty, {"selected_fraction": selected})

    def select(self, minibatch: TrainBatch, generator: Generator) -> Tensor:
        """Return the tokens with a penalty: [N] bool; an empty mask gives none."""
        covariance, mask = _covariance_of(minibatch), minibatch.response_mask
        tokens = int(mask.sum())
        selected = torch.zeros_like(mask)
        if tokens:
            ranked = torch.where(mask, covariance, -torch.inf).sort(descending=True, stable=True).indices
            selected[ranked[: max(int(self.fraction * tokens), 1)]] = True
        return selected


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


def _covariance_of(minibatch: TrainBatch) -> Tensor:
    """Return the covariance of the old policy's log-probs with the advantages: [N] float64."""
    old_log_probs, advantages = fields_of(minibatch, "old_log_probs", "advantages")
    return token_covariance(old_log_probs.double(), advantages.double(), minibatch.response_mask)


def _selected(micro: TrainBatch) -> Tensor:
    if micro.selected is None:
        raise ValueError("the batch has no selected tokens; take mini-batches from `minibatches`")
    return micro.selected
