"""A policy loss of your own with settings, which `check` constructs and bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl import PolicyLoss, TokenLoss, fields_of, log_ratio, setting


@dataclass(frozen=True)
class SoftClip(PolicyLoss):
    """Policy loss with a penalty in place of a clip: ``l = -A r + penalty (log r)^2``."""

    penalty: float = setting(1.0, "Weight of the squared log ratio.", at_least=0, at_most=100)

    def token_loss(self, micro, log_probs: torch.Tensor) -> TokenLoss:
        """Return the loss of every token [N]; the mean of an indicator is a metric of its name."""
        old_log_probs, advantages = fields_of(micro, "old_log_probs", "advantages")
        log_r = log_ratio(log_probs, old_log_probs)
        # The penalty grows smoothly, where a clip would cut the gradient off.
        loss = -advantages * log_r.exp() + self.penalty * log_r.square()
        return TokenLoss(loss, {"far_fraction": log_r.abs() > 0.2})
