"""Keeping entropy up by treating the few tokens apart that destroy most of it: clip-cov and kl-cov.

Which tokens these are depends on the whole mini-batch, so they are chosen once when it is made, from
the old policy's log-probs, and marked in `TrainBatch.selected`. That keeps losses exact under any split
into micro-batches; at the first mini-batch of a step it is the published choice, at later ones the
published choice would use the slightly newer policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.algorithms.lazy import torch
from megatron_rl.algorithms.policy_losses.clipped import HIGH_MEANING, LOW_MEANING, PpoClip
from megatron_rl.algorithms.policy_losses.policy_loss import PolicyLoss, TokenLoss, fields_of, log_ratio
from megatron_rl.config.setting import setting

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from megatron_rl.types import TrainBatch

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
