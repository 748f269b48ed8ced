"""Every policy loss in one form: ``(TrainBatch, log_probs, Algorithm) -> TokenLoss``.

A micro-batch holds whole rows, so sums over a row are exact; statistics over more than a row must not be
taken here, because a micro-batch's make-up is no part of the mathematics (see `minibatch`).
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.policy_losses import clipped, covariance, sequence
from megatron_rl.algorithms.policy_losses.token_loss import TokenLoss
from megatron_rl.algorithms.settings import Algorithm
from megatron_rl.types import TrainBatch


def policy_gradient(micro: TrainBatch, log_probs: Tensor, algorithm: Algorithm) -> TokenLoss:
    """Apply `clipped.policy_gradient`."""
    return clipped.policy_gradient(log_probs, _advantages(micro))


def ppo_clip(micro: TrainBatch, log_probs: Tensor, algorithm: Algorithm) -> TokenLoss:
    """Apply `clipped.ppo_clip`."""
    return clipped.ppo_clip(
        log_probs,
        _old(micro),
        _advantages(micro),
        clip_low=algorithm.clip_ratio_low,
        clip_high=algorithm.clip_ratio_high,
        dual_clip=algorithm.dual_clip,
    )


def cispo(micro: TrainBatch, log_probs: Tensor, algorithm: Algorithm) -> TokenLoss:
    """Apply `clipped.cispo`."""
    return clipped.cispo(
        log_probs,
        _old(micro),
        _advantages(micro),
        clip_low=algorithm.clip_ratio_low,
        clip_high=algorithm.clip_ratio_high,
    )


def sapo(micro: TrainBatch, log_probs: Tensor, algorithm: Algorithm) -> TokenLoss:
    """Apply `clipped.sapo`."""
    return clipped.sapo(
        log_probs,
        _old(micro),
        _advantages(micro),
        temperature_positive=algorithm.sapo_temperature_positive,
        temperature_negative=algorithm.sapo_temperature_negative,
    )


def dppo(micro: TrainBatch, log_probs: Tensor, algorithm: Algorithm) -> TokenLoss:
    """Apply `clipped.dppo`."""
    return clipped.dppo(
        log_probs,
        _old(micro),
        _advantages(micro),
        divergence=algorithm.dppo_divergence,
        low=algorithm.clip_ratio_low,
        high=algorithm.clip_ratio_high,
        ratio_cap=algorithm.dppo_ratio_cap,
    )


def gspo(micro: TrainBatch, log_probs: Tensor, algorithm: Algorithm) -> TokenLoss:
    """Apply `sequence.gspo`."""
    return sequence.gspo(
        log_probs,
        _old(micro),
        _advantages(micro),
        micro.response_mask,
        micro.lengths,
        clip_low=algorithm.clip_ratio_low,
        clip_high=algorithm.clip_ratio_high,
    )


def gmpo(micro: TrainBatch, log_probs: Tensor, algorithm: Algorithm) -> TokenLoss:
    """Apply `sequence.gmpo`."""
    return sequence.gmpo(
        log_probs,
        _old(micro),
        _advantages(micro),
        micro.response_mask,
        micro.lengths,
        clip_low=algorithm.clip_ratio_low,
        clip_high=algorithm.clip_ratio_high,
    )


def topr(micro: TrainBatch, log_probs: Tensor, algorithm: Algorithm) -> TokenLoss:
    """Apply `sequence.topr`."""
    return sequence.topr(log_probs, _old(micro), _advantages(micro), micro.response_mask, micro.lengths)


def clip_cov(micro: TrainBatch, log_probs: Tensor, algorithm: Algorithm) -> TokenLoss:
    """Apply `covariance.clip_cov`."""
    return covariance.clip_cov(
        log_probs,
        _old(micro),
        _advantages(micro),
        _selected(micro),
        clip_low=algorithm.clip_ratio_low,
        clip_high=algorithm.clip_ratio_high,
    )


def kl_cov(micro: TrainBatch, log_probs: Tensor, algorithm: Algorithm) -> TokenLoss:
    """Apply `covariance.kl_cov`."""
    return covariance.kl_cov(
        log_probs, _old(micro), _advantages(micro), _selected(micro), coef=algorithm.kl_cov_coef
    )


def _old(micro: TrainBatch) -> Tensor:
    if micro.old_log_probs is None:
        raise ValueError("the batch has no old_log_probs")
    return micro.old_log_probs


def _advantages(micro: TrainBatch) -> Tensor:
    if micro.advantages is None:
        raise ValueError("the batch has no advantages")
    return micro.advantages


def _selected(micro: TrainBatch) -> Tensor:
    if micro.selected is None:
        raise ValueError("the batch has no selected tokens; take mini-batches from `minibatches`")
    return micro.selected
