"""From rollouts and their scores to a training batch: rewards, advantages, corrections, metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from megatron_rl.algorithms.advantages.returns import whiten
from megatron_rl.algorithms.correction import correct
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.algorithms.mismatch import mismatch_metrics
from megatron_rl.algorithms.names import ADVANTAGES, resolved_correction
from megatron_rl.algorithms.pieces import resolve
from megatron_rl.algorithms.ragged import broadcast_rows, last_masked_token, row_sums
from megatron_rl.algorithms.rewards import scaled, shape_rewards, update_moments
from megatron_rl.algorithms.settings import Algorithm
from megatron_rl.algorithms.state import AlgorithmState, initial_state
from megatron_rl.algorithms.step_metrics import step_metrics
from megatron_rl.algorithms.validity import valid_rows
from megatron_rl.metrics import Metrics
from megatron_rl.types import FINISH_LENGTH, Rollouts, Scores, TrainBatch


def estimate(
    rollouts: Rollouts, scores: Scores, algorithm: Algorithm, state: AlgorithmState | None = None
) -> tuple[TrainBatch, Metrics]:
    """Turn one step's rollouts and scores into a training batch and the step's metrics.

    Row order is kept. Rows that failed (engine failure, invalid or non-finite reward) have an empty
    ``response_mask`` and enter no statistic; rejected tokens and, with ``overlong_filter``, rows cut off by
    the length limit leave the mask after advantages were computed. ``loss_weights`` are zero until
    `minibatches` sets them. ``state`` None is the state before the first step. Pure: every rank computes the
    same from the same input. Raises ValueError where something the algorithm needs was not scored.
    """
    state = initial_state(algorithm) if state is None else state
    valid = valid_rows(rollouts, scores, algorithm)
    answered = rollouts.response_mask & broadcast_rows(valid, rollouts.lengths)
    old_log_probs = rollouts.rollout_log_probs if algorithm.bypass else scores.old_log_probs
    if old_log_probs is None:
        raise ValueError("Scores.old_log_probs is missing, and the algorithm does not bypass them")
    inputs = _inputs(rollouts, scores, algorithm, state, answered, valid, old_log_probs)
    found = _advantages(inputs, algorithm)
    correction, mask, metrics = _correct(rollouts, scores, algorithm, answered)
    if algorithm.overlong_filter:
        mask = mask & broadcast_rows(rollouts.finish_reason != FINISH_LENGTH, rollouts.lengths)
    batch = TrainBatch(
        tokens=rollouts.tokens,
        lengths=rollouts.lengths,
        response_mask=mask,
        loss_weights=torch.zeros(len(rollouts.tokens)),
        temperature=rollouts.temperature,
        advantages=found.advantages.float(),
        returns=found.returns.float(),
        old_log_probs=old_log_probs,
        rollout_log_probs=rollouts.rollout_log_probs,
        correction=correction,
        ref_log_probs=scores.ref_log_probs,
        old_values=scores.values,
        nll_weights=_good_responses(scores, algorithm, mask, rollouts.lengths, valid),
        group=rollouts.group,
        response_counts=row_sums(answered.double(), rollouts.lengths).long(),
    )
    return batch, metrics + step_metrics(rollouts, scores, inputs, batch, algorithm, state.kl_coef)


def _inputs(
    rollouts: Rollouts,
    scores: Scores,
    algorithm: Algorithm,
    state: AlgorithmState,
    mask: Tensor,
    valid: Tensor,
    old_log_probs: Tensor,
) -> AdvantageInputs:
    """Shape the rewards and lay them on tokens."""
    lengths = rollouts.lengths
    moments = update_moments(
        state.moments, scaled(scores.rewards, valid, algorithm), valid, decay=algorithm.reward_ema_decay
    )
    counts = row_sums(mask.double(), lengths)
    rewards = shape_rewards(scores.rewards, valid, counts, algorithm, moments)
    token_rewards = torch.zeros(len(mask), dtype=torch.float64)
    last = last_masked_token(mask, lengths)
    token_rewards[last[last >= 0]] = rewards[last >= 0]
    if algorithm.kl_in == "reward":
        if scores.ref_log_probs is None:
            raise ValueError("kl_in is 'reward' but Scores.ref_log_probs is missing")
        kl = kl_estimate(old_log_probs.double(), scores.ref_log_probs.double(), algorithm.estimator)
        penalty = torch.where(mask, state.kl_coef * kl, 0)
        token_rewards = token_rewards - penalty
        rewards = rewards - row_sums(penalty, lengths)
    baseline = scores.baseline_rewards
    return AdvantageInputs(
        rewards=rewards,
        token_rewards=token_rewards,
        mask=mask,
        lengths=lengths,
        group=rollouts.group,
        valid=valid,
        values=None if scores.values is None else scores.values.double(),
        baseline_rewards=None if baseline is None else _like_rewards(baseline, valid, algorithm),
        components={name: value.double() for name, value in scores.components.items()},
    )


def _like_rewards(baseline: Tensor, valid: Tensor, algorithm: Algorithm) -> Tensor:
    """Scale a greedy response's reward as the samples' rewards are; normalising is not for single rewards."""
    return scaled(baseline, valid, algorithm)


def _advantages(inputs: AdvantageInputs, algorithm: Algorithm) -> Advantages:
    advantages, returns = resolve(algorithm.advantage, ADVANTAGES, "advantage")(inputs, algorithm)
    if algorithm.whiten:
        advantages = whiten(advantages, inputs.mask)
    if algorithm.advantage_clip is not None:
        advantages = advantages.clamp(-algorithm.advantage_clip, algorithm.advantage_clip)
    return Advantages(torch.where(inputs.mask, advantages, 0), torch.where(inputs.mask, returns, 0))


def _correct(
    rollouts: Rollouts, scores: Scores, algorithm: Algorithm, mask: Tensor
) -> tuple[Tensor | None, Tensor, Metrics]:
    """Measure the mismatch wherever both log-probs are known, and correct for it outside bypass mode."""
    if scores.old_log_probs is None:
        return None, mask, Metrics()
    log_probs, rollout, lengths = scores.old_log_probs, rollouts.rollout_log_probs, rollouts.lengths
    metrics = mismatch_metrics(log_probs, rollout, mask, lengths)
    correction = resolved_correction(algorithm)
    if algorithm.bypass or not correction.active:
        return None, mask, metrics
    weights, keep, more = correct(log_probs, rollout, mask, lengths, correction)
    return weights, keep, metrics + more


def _good_responses(
    scores: Scores, algorithm: Algorithm, mask: Tensor, lengths: Tensor, valid: Tensor
) -> Tensor | None:
    """Mark the tokens to imitate with 1; `minibatches` turns the marks into weights."""
    if not algorithm.positive_nll_coef:
        return None
    good = valid & (scores.rewards > algorithm.positive_nll_threshold)
    return (mask & broadcast_rows(good, lengths)).float()
