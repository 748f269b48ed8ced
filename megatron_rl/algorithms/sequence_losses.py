"""Policy losses that depend on more than one token: on the response, or on the mini-batch.

GSPO, GMPO, TOPR and off-policy sequence masking use the ratio of a response. Per-token tensors are ragged [N]
with ``lengths`` [B] and ``mask`` [N]; rows must be complete. Rows with empty mask have ratio 1 and no loss.

Clip-cov and kl-cov preserve entropy by a different loss on the few tokens that reduce it most. The selection
depends on the complete mini-batch, so it is made once per mini-batch, from the old policy's log-probs, and
stored in `TrainBatch.selected`. Losses thus stay exact under any split into micro-batches. In the first
mini-batch of a step this is the published selection; in later ones that would use the slightly newer policy.
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

# Bound of GSPO's log ratio from above: exp(10) = 2.2e4.
MAX_LOG_SEQUENCE_RATIO = 10.0


@dataclass(frozen=True)
class Gspo(PolicyLoss):
    """PPO's clipped loss on the response's length-normalised ratio, the same for all its tokens.

    ``s_i = exp(mean_t(log_probs - old_log_probs))``; each token uses ``sg[s_i] pi_t / sg[pi_t]``, equal to
    s_i in value, in PPO's loss without dual clip. With ``seq-mean-token-mean`` its gradient is that of the
    sequence loss ``max(-A s_i, -A clip(s_i))``. log s_i is clamped to at most 10. Clip ranges are the
    paper's, far smaller than PPO's.

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
        """Compute the loss of every token [N]."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        difference = log_probs.detach() - old_log_probs
        row_mean = ragged.masked_row_means(difference, micro.response_mask, micro.lengths)

        # Value of the sequence ratio, gradient of the token's own log-prob.
        log_sequence_ratio = ragged.broadcast_rows(row_mean, micro.lengths) + log_probs - log_probs.detach()
        ratio = log_sequence_ratio.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
        return clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)


@dataclass(frozen=True)
class Gmpo(PolicyLoss):
    """Geometric mean of the response's ratios, each clipped in log space.

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
        """Compute the loss of every token [N]."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        rows = (micro.response_mask, micro.lengths)

        # The pessimistic one of clipped and unclipped log ratio, as in PPO; the sign turns max into min.
        sign = advantages.sign()
        difference = log_probs - old_log_probs
        clamped = difference.clamp(-self.clip_low, self.clip_high)
        pessimistic = sign * torch.minimum(sign * difference, sign * clamped)
        is_clipped = sign * difference > sign * clamped

        ratio = ragged.masked_row_means(pessimistic, *rows).exp()
        advantage = ragged.masked_row_means(advantages, *rows)
        loss = ragged.broadcast_rows(-advantage * ratio, micro.lengths)
        return TokenLoss(loss, {"clip_fraction": is_clipped})


@dataclass(frozen=True)
class Topr(PolicyLoss):
    """Tapered off-policy REINFORCE: plain for good responses, weighted by the capped ratio for bad ones.

    Tokens with A > 0: ``l = -A log_prob``. Others: ``l = -sg[min(R_i, 1)] A log_prob`` with the response's
    full ratio to its sampling policy, of any age:
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
        """Compute the loss of every token [N]."""
        rollout_log_probs, advantages = fields_of(micro, "rollout_log_probs", "advantages")
        difference = torch.where(micro.response_mask, log_probs.detach() - rollout_log_probs, 0)
        row_log_ratio = ragged.row_sums(difference, micro.lengths).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

        # A bad response that the policy has become unlikely to produce has a weight near 0.
        capped_ratio = ragged.broadcast_rows(row_log_ratio.exp().clamp(max=1), micro.lengths)
        weight = torch.where(advantages > 0, 1, capped_ratio)
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
    """Mask out the tokens with A < 0 of responses that drifted by more than ``delta``: [N] bool.

    Drift is ``mean_t(rollout_log_probs - log_probs)`` over the response, an estimate of KL(rollout || new):
    the updates since the response was sampled plus the difference between the two engines. Bad responses that
    the policy no longer produces have no useful gradient and destabilise training.

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


FRACTION_MEANING = "Share of the mini-batch's tokens that is selected, at least one token."


@dataclass(frozen=True)
class ClipCov(PolicyLoss):
    """PPO's clipped loss without dual clip, and no loss on the selected tokens.

    Selected are max(floor(fraction * tokens), 1) tokens, drawn at random of those with
    ``covariance_low < covariance < covariance_high``; if fewer qualify, all of them.

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
        """Compute the loss of every token [N]."""
        ppo_clip = PpoClip(
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=None,
        )
        loss, indicators = ppo_clip.token_loss(micro, log_probs)
        selected = _selected_tokens(micro)
        return TokenLoss(torch.where(selected, 0, loss), {**indicators, "selected_fraction": selected})

    def select(self, minibatch: TrainBatch, generator: Generator) -> Tensor:
        """Select the tokens without a loss: [N] bool, no token for an empty mask."""
        mask = minibatch.response_mask
        covariance = _log_prob_covariance(minibatch)
        in_range = (covariance > self.covariance_low) & (covariance < self.covariance_high)
        candidates = torch.nonzero(mask & in_range).squeeze(-1)

        # Draw without replacement among the candidates.
        count = max(int(self.fraction * int(mask.sum())), 1)
        drawn_order = torch.randperm(len(candidates), generator=generator)
        selected = torch.zeros_like(mask)
        selected[candidates[drawn_order[:count]]] = True
        return selected


@dataclass(frozen=True)
class KlCov(PolicyLoss):
    """Unclipped loss ``-A r``, with ``coef |log_probs - old_log_probs|`` added on selected tokens.

    Selected are the max(floor(fraction * tokens), 1) tokens of largest covariance, ties in order of position.
    The paper has ``coef`` 1, verl's configuration 0.1.

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
        """Compute the loss of every token [N]."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        selected = _selected_tokens(micro)
        difference = log_ratio(log_probs, old_log_probs)
        penalty = torch.where(selected, self.coef * difference.abs(), 0)
        return TokenLoss(-advantages * difference.exp() + penalty, {"selected_fraction": selected})

    def select(self, minibatch: TrainBatch, generator: Generator) -> Tensor:
        """Select the tokens with a penalty: [N] bool, no token for an empty mask."""
        mask = minibatch.response_mask
        covariance = _log_prob_covariance(minibatch)
        token_count = int(mask.sum())
        selected = torch.zeros_like(mask)
        if not token_count:
            return selected

        # Stable, so that every rank selects the same of several tokens with equal covariance.
        ranked = torch.where(mask, covariance, -torch.inf).sort(descending=True, stable=True).indices
        count = max(int(self.fraction * token_count), 1)
        selected[ranked[:count]] = True
        return selected


def token_covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Compute each token's term of Cov(log_prob, A): ``(log_prob - mean) (A - mean)``, [N], 0 outside mask.

    Means are over the masked-in tokens. The entropy of the policy falls at the rate of this covariance.

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
    """Return the selected tokens [N] bool; raise ValueError for a batch without selection."""
    if micro.selected is None:
        raise ValueError("the batch has no selected tokens; take mini-batches from `minibatches`")
    return micro.selected
