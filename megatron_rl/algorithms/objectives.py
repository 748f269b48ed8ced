"""The scalar losses of a micro-batch: exact sums, so gradients of any split of a mini-batch add up."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.algorithms.names import POLICY_LOSSES, resolve
from megatron_rl.algorithms.policy_losses.token_loss import TokenLoss
from megatron_rl.algorithms.settings import Algorithm
from megatron_rl.metrics import Metrics
from megatron_rl.types import TrainBatch


def policy_objective(
    algorithm: Algorithm, micro: TrainBatch, log_probs: Tensor, entropy: Tensor
) -> tuple[Tensor, Metrics]:
    """Return the policy loss of a micro-batch of whole rows, and its metrics.

    ``log_probs`` and ``entropy`` [N] are the current policy's, with gradient, aligned with
    ``micro.tokens``; what they hold outside ``response_mask`` is not read. The loss is
    ``sum_t w_t (correction_t l_t + kl_coef kl_t - entropy_coef H_t)`` with global weights w, so losses and
    gradients of the micro-batches of a mini-batch add up to the mini-batch's, however it was split.
    The metric ``policy/loss`` is divided by the sum of weights (1 over a mini-batch for the means).
    """
    micro = on_device(micro, log_probs.device)
    mask, weights = micro.response_mask, micro.loss_weights
    log_probs = torch.where(mask, log_probs.float() if log_probs.itemsize < 4 else log_probs, 0)
    entropy = torch.where(mask, entropy, 0)
    token_loss: TokenLoss = resolve(algorithm.policy_loss, POLICY_LOSSES)(micro, log_probs, algorithm)
    loss = token_loss.loss
    if micro.correction is not None:
        loss = loss * micro.correction
    total = (weights * torch.where(mask, loss, 0)).sum()
    count, weight = int(mask.sum()), float(weights.sum())
    metrics = Metrics.mean("policy/loss", float(total.detach()), weight)
    metrics += Metrics.mean("policy/entropy", float(entropy.detach().sum()), count)
    if micro.old_log_probs is not None:
        moved = torch.where(mask, micro.old_log_probs - log_probs.detach(), 0)
        metrics += Metrics.mean("policy/kl", float(moved.sum()), count)
    for name, indicator in token_loss.indicators.items():
        value = torch.where(mask, indicator.detach().to(loss.dtype), 0)
        metrics += Metrics.mean(f"policy/{name}", float(value.sum()), count)
    if algorithm.kl_in == "loss":
        if micro.ref_log_probs is None:
            raise ValueError("kl_in is 'loss' but the batch has no ref_log_probs")
        kl = kl_estimate(log_probs, torch.where(mask, micro.ref_log_probs, 0), algorithm.kl_estimator)
        total = total + algorithm.kl_coef * (weights * kl).sum()
        metrics += Metrics.mean("kl/ref", float(kl.detach().sum()), count)
    if algorithm.entropy_coef:
        total = total - algorithm.entropy_coef * (weights * entropy).sum()
    return total, metrics


def value_objective(algorithm: Algorithm, micro: TrainBatch, values: Tensor) -> tuple[Tensor, Metrics]:
    """Return the critic's loss of a micro-batch, and its metrics; ``values`` [N] with gradient.

    ``l_t = coef max((v - G)^2, (clip(v, v_old +- value_clip) - G)^2)``, weighted by ``value_weights``.
    """
    micro = on_device(micro, values.device)
    mask, weights = micro.response_mask, micro.value_weights
    if weights is None or micro.returns is None or micro.old_values is None:
        raise ValueError("the batch lacks value_weights, returns or old_values")
    values = torch.where(mask, values.float() if values.itemsize < 4 else values, 0)
    squared = (values - micro.returns) ** 2
    clipped = torch.zeros_like(mask)
    if algorithm.value_clip is not None:
        bound = values.clamp(micro.old_values - algorithm.value_clip, micro.old_values + algorithm.value_clip)
        other = (bound - micro.returns) ** 2
        clipped = other > squared
        squared = torch.maximum(squared, other)
    total = (weights * algorithm.value_loss_coef * torch.where(mask, squared, 0)).sum()
    count = int(mask.sum())
    metrics = Metrics.mean("critic/loss", float(total.detach()), float(weights.sum()))
    metrics += Metrics.mean("critic/value", float(values.detach().sum()), count)
    metrics += Metrics.mean("critic/clip_fraction", int((clipped & mask).sum()), count)
    return total, metrics


def sft_objective(micro: TrainBatch, log_probs: Tensor) -> tuple[Tensor, Metrics]:
    """Return the supervised loss ``-sum_t w_t log_probs_t`` of a micro-batch, and its metrics."""
    micro = on_device(micro, log_probs.device)
    mask = micro.response_mask
    log_probs = torch.where(mask, log_probs.float() if log_probs.itemsize < 4 else log_probs, 0)
    total = -(micro.loss_weights * log_probs).sum()
    metrics = Metrics.mean("sft/loss", float(total.detach()), float(micro.loss_weights.sum()))
    return total, metrics


def on_device(batch: TrainBatch, device: torch.device) -> TrainBatch:
    """Return the batch with every tensor on ``device``."""
    names = (*TrainBatch.TOKEN_FIELDS, *TrainBatch.ROW_FIELDS)
    tensors = {name: getattr(batch, name) for name in names}
    return replace(batch, **{name: t.to(device) for name, t in tensors.items() if t is not None})
