"""Scalar losses of a micro-batch: exact sums, which add up to the mini-batch's loss for any split."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.algorithms.correction import mismatch_metrics
from megatron_rl.algorithms.estimation import AlgorithmState
from megatron_rl.algorithms.kl import TopKDivergence
from megatron_rl.algorithms.losses import (
    TokenLoss,
    fields_of,
    log_ratio,
    off_policy_sequence_mask,
    squared_log_ratio,
    validate_token_loss,
)
from megatron_rl.algorithms.piece import MAX_LOG_RATIO
from megatron_rl.metrics import Metrics
from megatron_rl.types import TrainBatch


def policy_objective(
    algorithm: Algorithm,
    micro: TrainBatch,
    log_probs: Tensor,
    entropy: Tensor,
    state: AlgorithmState | None = None,
    top_log_probs: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute the policy loss of a micro-batch of complete rows, and its metrics.

    ``log_probs`` and ``entropy`` [N] are the current policy's, with gradient, aligned with ``micro.tokens``;
    their values outside ``response_mask`` are not read and get no gradient.

    The loss is ``sum_t w_t (c_t l_t + kl_coef kl_t - entropy_coef H_t) - sum_t u_t log_prob_t`` with global
    weights w and (for imitation) u, and the mismatch correction c. For any split of a mini-batch, the losses
    and gradients of its micro-batches therefore add up to the loss and gradient of the mini-batch.

    ``state`` holds an adaptive KL coefficient. If ``micro`` has no old log-probs, this is the first update
    from the batch, and the old log-probs equal ``log_probs``.

    ``top_log_probs`` [N, k + 1], with gradient, are the log-probs of the teacher's k most likely tokens
    and of all other tokens together, for a distillation loss.

    The metrics ``policy/loss`` and ``policy/kl_loss`` are divided by the sum of w (1 over a mini-batch for
    token-mean and seq-mean-token-mean). ``policy/kl`` is the mean of old minus new log-probs.
    """
    micro = micro.to(log_probs.device)
    mask = micro.response_mask
    weights = micro.loss_weights
    log_probs = mask_tokens(log_probs, mask)
    entropy = mask_tokens(entropy, mask)
    if micro.old_log_probs is None:
        micro = replace(micro, old_log_probs=log_probs.detach())

    # Policy loss. A loss may be NaN or infinite outside the mask, where a weight of 0 would not remove it.
    token_loss, metrics = _corrected_loss(algorithm, micro, log_probs)
    total_loss = (weights * torch.where(mask, token_loss.loss, 0)).sum()

    token_count = mask.sum()
    weight_sum = weights.sum()
    sums = {
        "policy/loss": (total_loss, weight_sum),
        "policy/entropy": (entropy.sum(), token_count),
    }
    for name, indicator in token_loss.indicators.items():
        sums[f"policy/{name}"] = (torch.where(mask, indicator, 0).double().sum(), token_count)

    # KL penalty to the reference policy.
    if algorithm.kl.in_loss:
        (ref_log_probs,) = fields_of(micro, "ref_log_probs")
        kl = algorithm.kl.estimate(log_probs, torch.where(mask, ref_log_probs, 0))
        if algorithm.kl.weighs_by_ratio:
            (old_log_probs,) = fields_of(micro, "old_log_probs")
            kl = kl * log_ratio(log_probs, torch.where(mask, old_log_probs, 0)).exp()
        kl_loss = (weights * torch.where(mask, kl, 0)).sum()
        kl_coef = algorithm.kl.initial_coef if state is None else state.kl_coef
        total_loss = total_loss + kl_coef * kl_loss
        sums["policy/kl_loss"] = (kl_loss, weight_sum)

    # Divergence from the teacher over its most likely tokens.
    distillation = algorithm.distillation
    if isinstance(distillation, TopKDivergence):
        divergence, teacher_sums = _teacher_divergence(distillation, micro, top_log_probs)
        total_loss = total_loss + distillation.coef * divergence
        sums |= teacher_sums

    # Penalty on the distance from the old policy.
    if algorithm.policy_loss.log_ratio_coef:
        penalty = squared_log_ratio(algorithm.policy_loss, micro, log_probs)
        distance = (weights * penalty).sum()
        total_loss = total_loss + algorithm.policy_loss.log_ratio_coef * distance
        sums["policy/squared_log_ratio"] = (distance, weight_sum)

    # Entropy bonus.
    if algorithm.policy_loss.entropy_coef:
        total_loss = total_loss - algorithm.policy_loss.entropy_coef * (weights * entropy).sum()

    # Imitation of good responses, with its own token weights.
    if micro.nll_weights is not None:
        nll = -(micro.nll_weights * log_probs).sum()
        total_loss = total_loss + nll
        sums["policy/nll"] = (nll, micro.nll_weights.sum())

    metrics += _policy_shift_metrics(micro, log_probs.detach(), token_count)
    return total_loss, metrics + Metrics.of_tensors(sums)


def _teacher_divergence(
    distillation: TopKDivergence,
    micro: TrainBatch,
    top_log_probs: Tensor | None,
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Compute the divergence from the teacher, summed over tokens with the loss weights, and its metrics.

    ``top_log_probs`` [N, k + 1] are the actor's log-probs of the teacher's k most likely tokens and of all
    other tokens together. Each metric is a pair of a sum and the denominator of the sum.
    """
    (teacher_log_probs,) = fields_of(micro, "teacher_top_log_probs")
    if top_log_probs is None:
        raise ValueError("the distillation needs the actor's log-probs of the teacher's most likely tokens")

    mask = micro.response_mask
    token_loss = distillation.compute_checked_loss(top_log_probs, teacher_log_probs)
    divergence = (micro.loss_weights * torch.where(mask, token_loss, 0)).sum()

    # Probability of all tokens except the teacher's k most likely tokens.
    token_count = mask.sum()
    teacher_rest = torch.where(mask, teacher_log_probs[:, -1].exp(), 0).double().sum()
    actor_rest = torch.where(mask, top_log_probs.detach()[:, -1].exp(), 0).double().sum()
    return divergence, {
        "distillation/loss": (divergence, micro.loss_weights.sum()),
        "distillation/teacher_rest": (teacher_rest, token_count),
        "distillation/actor_rest": (actor_rest, token_count),
    }


def value_objective(
    algorithm: Algorithm,
    micro: TrainBatch,
    values: Tensor,
) -> tuple[Tensor, Metrics]:
    """Compute the critic's loss of a micro-batch, and its metrics; ``values`` [N] carries the gradient.

    The loss is the algorithm's `ValueLoss` weighted by ``value_weights``. Like `policy_objective`, it is
    exact under any split into micro-batches.
    """
    micro = micro.to(values.device)
    mask = micro.response_mask
    weights, returns, old_values = fields_of(micro, "value_weights", "returns", "old_values")

    # Set prompt tokens to 0: the critic is not trained on them.
    values = mask_tokens(values, mask)
    old_values = torch.where(mask, old_values, 0)
    returns = torch.where(mask, returns, 0)

    value_loss = algorithm.value_loss
    token_loss = value_loss.token_loss(values, old_values, returns)
    loss, indicators = validate_token_loss(value_loss, token_loss, values)
    total_loss = (weights * loss).sum()

    token_count = mask.sum()
    sums = {
        "critic/loss": (total_loss, weights.sum()),
        "critic/value": (values.sum(), token_count),
    }
    for name, indicator in indicators.items():
        sums[f"critic/{name}"] = (torch.where(mask, indicator, 0).double().sum(), token_count)
    return total_loss, Metrics.of_tensors(sums)


def sft_objective(micro: TrainBatch, log_probs: Tensor) -> tuple[Tensor, Metrics]:
    """Compute the supervised loss ``-sum_t w_t log_probs_t`` of a micro-batch, and its metrics.

    The metric ``sft/loss`` is the loss divided by the sum of weights. With ``token-mean`` weights it is the
    mean negative log-likelihood.
    """
    micro = micro.to(log_probs.device)
    log_probs = mask_tokens(log_probs, micro.response_mask)
    total_loss = -(micro.loss_weights * log_probs).sum()
    return total_loss, Metrics.of_tensors({"sft/loss": (total_loss, micro.loss_weights.sum())})


def _corrected_loss(
    algorithm: Algorithm,
    micro: TrainBatch,
    log_probs: Tensor,
) -> tuple[TokenLoss, Metrics]:
    """Compute the policy loss per token, with mismatch correction and sequence masking, and its metrics."""
    policy_loss = algorithm.policy_loss
    token_loss = policy_loss.token_loss(micro, log_probs)
    loss, indicators = validate_token_loss(policy_loss, token_loss, log_probs)

    # Outside bypass mode `build_train_batch` has computed the correction for the complete step.
    metrics = Metrics()
    if algorithm.correction.bypass:
        weights, metrics = _bypass_correction(algorithm, micro, log_probs.detach())
        if weights is not None:
            loss = loss * weights
    elif micro.correction is not None:
        loss = loss * micro.correction

    # Off-policy sequence masking: no loss on bad responses that the policy no longer produces.
    delta = policy_loss.opsm_delta
    if delta is not None:
        rollout_log_probs, advantages = fields_of(micro, "rollout_log_probs", "advantages")
        on_policy = off_policy_sequence_mask(
            log_probs,
            rollout_log_probs,
            advantages,
            micro.response_mask,
            micro.lengths,
            delta=delta,
        )
        loss = torch.where(on_policy, loss, 0)
        indicators = {**indicators, "opsm_fraction": ~on_policy}

    # With `PolicyLoss.top_entropy`, `policy_mask` contains only the tokens at which the old policy has the
    # highest entropy. Set the loss of all other tokens to 0.
    if micro.policy_mask is not None:
        loss = torch.where(micro.policy_mask, loss, 0)
    return TokenLoss(loss, indicators), metrics


def _bypass_correction(
    algorithm: Algorithm,
    micro: TrainBatch,
    log_probs: Tensor,
) -> tuple[Tensor | None, Metrics]:
    """Compute the bypass mode's correction: loss weights [N], and mismatch metrics.

    Bypass mode has no recomputed old policy: the rollout's log-probs are the old log-probs. A loss with a
    ratio already includes the importance weight, so only a loss without a ratio gets importance weights.
    Rejected tokens get weight 0 in every loss. The weights are None if no correction is configured.
    """
    (rollout_log_probs,) = fields_of(micro, "rollout_log_probs")
    mask = micro.response_mask
    metrics = mismatch_metrics(log_probs, rollout_log_probs, mask, micro.lengths)

    correction = algorithm.correction
    if algorithm.policy_loss.weighs_by_ratio:
        correction = correction.without_weights()
    if not correction.is_active:
        return None, metrics

    # A rejected token stays in the denominators, which were fixed for the complete mini-batch.
    weights, accepted, correction_metrics = correction.correct(
        log_probs,
        rollout_log_probs,
        mask,
        micro.lengths,
    )
    loss_weights = accepted.to(log_probs.dtype)
    if weights is not None:
        loss_weights = weights * loss_weights
    return loss_weights, metrics + correction_metrics


def _policy_shift_metrics(
    micro: TrainBatch,
    log_probs: Tensor,
    token_count: Tensor,
) -> Metrics:
    """Compute the metrics of the policy's distance from the old policy: mean KL and largest ratio."""
    if micro.old_log_probs is None or not len(log_probs):
        return Metrics()

    # The ratio is clamped as in the losses, so that its metric stays finite.
    log_ratios = torch.where(micro.response_mask, log_probs - micro.old_log_probs, 0).double()
    max_ratio = log_ratios.max().clamp(max=MAX_LOG_RATIO).exp()
    sums = {"policy/kl": (-log_ratios.sum(), token_count)}
    return Metrics.of_tensors(sums, {"policy/ratio_max": max_ratio})


def mask_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """Convert values [N] to at least float32, and set them to 0 outside the mask.

    bfloat16 has about three significant digits, too few for differences of log-probs.
    """
    if values.itemsize < 4:
        values = values.float()
    return torch.where(mask, values, 0)
