"""Every policy loss in one form: ``(TrainBatch, log_probs, Algorithm) -> TokenLoss``.

A micro-batch holds whole rows, so sums over a row are exact; statistics over more than a row must not be
taken here, because a micro-batch's make-up is no part of the mathematics (see `minibatch`).
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.policy_losses import clipped
from megatron_rl.algorithms.policy_losses.token_loss import TokenLoss
from megatron_rl.algorithms.settings import Algorithm
from megatron_rl.types import TrainBatch


def ppo_clip(micro: TrainBatch, log_probs: Tensor, algorithm: Algorithm) -> TokenLoss:
    """Apply `clipped.ppo_clip`."""
    return clipped.ppo_clip(
        log_probs,
        micro.old_log_probs,
        micro.advantages,
        clip_low=algorithm.clip_ratio_low,
        clip_high=algorithm.clip_ratio_high,
        dual_clip=algorithm.dual_clip,
    )
