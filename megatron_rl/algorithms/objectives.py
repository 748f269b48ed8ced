"""The scalar losses of a micro-batch: exact sums, so gradients of any split of a mini-batch add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.algorithms.correction import mismatch_metrics
from megatron_rl.algorithms.estimation import AlgorithmState
from megatron_rl.algorithms.losses import TokenLoss, checked_loss, fields_of
from megatron_rl.algorithms.sequence_losses import off_policy_sequence_mask
from megatron_rl.metrics import Metrics
from megatron_rl.types import TrainBatch


def policy_objective(
    algorithm: Algorithm,
    micro: TrainBatch,
    log_probs: Tensor,
    entropy: Tensor,
    state: AlgorithmState | None = None,
) -> tuple[Tensor, Metrics]:
    """Return the policy loss of a micro-batch of whole rows, and its metrics.

    ``log_probs`` and ``entropy`` [N] are the current policy's, with gradient, aligned with
    ``micro.tokens``; what they hold outside ``response_mask`` is not read and gets no gradient. The loss is
    ``sum_t w_t (c_t l_t + kl_coef kl_t - entropy_coef H_t) - sum_t u_t log_prob_t`` with global weights w and
    (for imitation) u, and the mismatch correction c, so losses and gradients of the micro-batches of a
    mini-batch add up to the mini-batch's, however it was split. ``state`` holds an adaptive KL coefficient.
    Where ``micro`` has no old log-probs this is the first update from its batch, and they are ``log_probs``.

    The metrics ``policy/loss`` and ``policy/kl_loss`` are divided by the sum of w (1 over a mini-batch for
    token-mean and seq-mean-token-mean). ``policy/kl`` is the mean of old minus new log-probs.
    """
    micro = micro.to(log_probs.device)
    mask, weights = micro.response_mask, micro.loss_weights
    log_probs, entropy = masked(log_probs, mask), masked(entropy, mask)
    if micro.old_log_probs is None:
        micro = replace(micro, old_log_probs=log_probs.detach())
    token_loss, metrics = _corrected_loss(algorithm, micro, log_probs)
    total = (weights * torch.where(mask, token_loss.loss, 0)).sum()
    count, weight = mask.sum(), weights.sum()
    sums = {"policy/loss": (total, weight), "policy/entropy": (entropy.sum(), count)}
    for name, indicator in token_loss.indicators.items():
        sums[f"policy/{name}"] = (torch.where(mask, indicator, 0).double().sum(), count)
    if algorithm.kl.in_loss:
        (ref_log_probs,) = fields_of(micro, "ref_log_probs")
        kl = algorithm.kl.estimate(log_probs, torch.where(mask, ref_log_probs, 0))
        kl_total = (weights * torch.where(mask, kl, 0)).sum()
        total = total + (algorithm.kl.first_coef if state is None else state.kl_coef) * kl_total
        sums["policy/kl_loss"] = (kl_total, weight)
    if algorithm.policy_loss.entropy_coef:
        total = total - algorithm.policy_loss.entropy_coef * (weights * entropy).sum()
    if micro.nll_weights is not None:
        imitation = -(micro.nll_weights * log_probs).sum()
        total = total + imitation
        sums["policy/nll"] = (imitation, micro.nll_weights.sum())
    return total, metrics + _movement(micro, log_probs.detach(), count) + means(sums)


def value_objective(algorithm: Algorithm, micro: TrainBatch, values: Tensor) -> tuple[Tensor, Metrics]:
    """Return the critic's loss of a micro-batch, and its metrics; ``values`` [N] with gradient.

    The loss is the algorithm's `ValueLoss` weighted by ``value_weights``, exact under any split like
    `policy_objective`.
    """
    micro = micro.to(values.device)
    mask = micro.response_mask
    weights, returns, old_values = fields_of(micro, "value_weights", "returns", "old_values")
    values = masked(values, mask)
    old_values, returns = torch.where(mask, old_values, 0), torch.where(mask, returns, 0)
    piece = algorithm.value_loss
    loss, indicators = checked_loss(piece, piece.token_loss(values, old_values, returns), values)
    total = (weights * loss).sum()
    count = mask.sum()
    sums = {"critic/loss": (total, weights.sum()), "critic/value": (values.sum(), count)}
    for name, indicator in indicators.items():
        sums[f"critic/{name}"] = (torch.where(mask, indicator, 0).double().sum(), count)
    return total, means(sums)


def sft_objective(micro: TrainBatch, log_probs: Tensor) -> tuple[Tensor, Metrics]:
    """Return the supervised loss ``-sum_t w_t log_probs_t`` of a micro-batch, and its metrics.

    ``sft/loss`` is divided by the sum of weights: with ``token-mean`` the mean negative log-likelihood.
    """
    micro = micro.to(log_probs.device)
    log_probs = masked(log_probs, micro.response_mask)
    total = -(micro.loss_weights * log_probs).sum()
    return total, means({"sft/loss": (total, micro.loss_weights.sum())})


def _corrected_loss(algorithm: Algorithm, micro: TrainBatch, log_probs: Tensor) -> tuple[TokenLoss, Metrics]:
    """Take the policy loss per token, with the mismatch correction and sequence masking applied."""
    piece = algorithm.policy_loss
    loss, indicators = checked_loss(piece, piece.token_loss(micro, log_probs), log_probs)
    metrics = Metrics()
    if algorithm.correction.bypass:
        weights, metrics = _bypass_correction(algorithm, micro, log_probs.detach())
        loss = loss if weights is None else loss * weights
    elif micro.correction is not None:
        loss = loss * micro.correction
    delta = algorithm.policy_loss.opsm_delta
    if delta is not None:
        rollout_log_probs, advantages = fields_of(micro, "rollout_log_probs", "advantages")
        rows = (micro.response_mask, micro.lengths)
        keep = off_policy_sequence_mask(log_probs, rollout_log_probs, advantages, *rows, delta=delta)
        loss = torch.where(keep, loss, 0)
        indicators = {**indicators, "opsm_fraction": ~keep}
    return TokenLoss(loss, indicators), metrics


def _bypass_correction(
    algorithm: Algorithm, micro: TrainBatch, log_probs: Tensor
) -> tuple[Tensor | None, Metrics]:
    """Correct against the rollout with the policy being trained, where no old policy was recomputed.

    A loss with a ratio already holds the importance weight (old is the rollout), so weights go only to a
    loss without one; rejection goes to every loss, as weight 0.
    """
    (rollout_log_probs,) = fields_of(micro, "rollout_log_probs")
    mask, lengths = micro.response_mask, micro.lengths
    metrics = mismatch_metrics(log_probs, rollout_log_probs, mask, lengths)
    correction = algorithm.correction
    if algorithm.policy_loss.weighs_by_ratio:
        correction = correction.without_weights()
    if not correction.active:
        return None, metrics
    weights, keep, more = correction.correct(log_probs, rollout_log_probs, mask, lengths)
    kept = keep.to(log_probs.dtype)
    return kept if weights is None else weights * kept, metrics + more


def _movement(micro: TrainBatch, log_probs: Tensor, count: Tensor) -> Metrics:
    """Say how far the policy has moved from the one the advantages belong to."""
    if micro.old_log_probs is None or not len(log_probs):
        return Metrics()
    moved = torch.where(micro.response_mask, log_probs - micro.old_log_probs, 0).double()
    largest = float(moved.max().clamp(max=20).exp())
    return means({"policy/kl": (-moved.sum(), count)}) + Metrics.maximum("policy/ratio_max", largest)


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return values [N] in at least float32, 0 outside the mask, so that nothing there is ever read.

    bfloat16 has three digits, too few for differences of log-probs.
    """
    return torch.where(mask, values.float() if values.itemsize < 4 else values, 0)


def means(sums: Mapping[str, tuple[Tensor, Tensor]]) -> Metrics:
    """Return scalar (sum, weight) tensors as metrics, fetched from their device in one piece.

    Fetching them one by one would make the host wait for the device as often.
    """
    if not sums:
        return Metrics()
    pairs = torch.stack([torch.stack([part.detach().double() for part in pair]) for pair in sums.values()])
    return Metrics(
        {name: (total, weight) for name, (total, weight) in zip(sums, pairs.tolist(), strict=True)}
    )
