"""From rollouts and their scores to a training batch: rewards, advantages, corrections, metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.advantages.advantage import AdvantageInputs
from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.algorithms.mismatch import mismatch_metrics
from megatron_rl.algorithms.ragged import broadcast_rows, last_masked_token, row_sums
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
    ``response_mask`` and enter no statistic; rejected tokens and, with ``overlong.filter``, rows cut off by
    the length limit leave the mask after advantages were computed. ``loss_weights`` are zero until
    `minibatches` sets them. ``state`` None is the state before the first step. Pure: every rank computes the
    same from the same input. Raises ValueError where something the algorithm needs was not scored.
    """
    state = initial_state(algorithm) if state is None else state
    valid = valid_rows(rollouts, scores, algorithm)
    answered = rollouts.response_mask & broadcast_rows(valid, rollouts.lengths)
    old_log_probs = rollouts.rollout_log_probs if algorithm.correction.bypass else scores.old_log_probs
    if old_log_probs is None:
        raise ValueError("Scores.old_log_probs is missing, and the algorithm does not bypass them")
    inputs = _inputs(rollouts, scores, algorithm, state, answered, valid, old_log_probs)
    advantages, returns = algorithm.advantage(inputs)
    correction, mask, metrics = _correct(rollouts, scores, algorithm, answered)
    if algorithm.overlong.filter:
        mask = mask & broadcast_rows(rollouts.finish_reason != FINISH_LENGTH, rollouts.lengths)
    batch = TrainBatch(
        tokens=rollouts.tokens,
        lengths=rollouts.lengths,
        response_mask=mask,
        loss_weights=torch.zeros(len(rollouts.tokens)),
        temperature=rollouts.temperature,
        advantages=advantages.float(),
        returns=returns.float(),
        old_log_probs=old_log_probs,
        rollout_log_probs=rollouts.rollout_log_probs,
        correction=correction,
        ref_log_probs=scores.ref_log_probs,
        old_values=scores.values,
        nll_weights=algorithm.imitation.marks(scores.rewards, valid, mask, rollouts.lengths),
        group=rollouts.group,
        response_counts=row_sums(answered.double(), rollouts.lengths).long(),
        support_sizes=rollouts.support_sizes,
        support=rollouts.support,
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
    lengths, shaping = rollouts.lengths, algorithm.reward_shaping
    moments = shaping.moments_after(state.moments, scores.rewards, valid)

    def shaped(values: Tensor, response_lengths: Tensor) -> Tensor:
        values = shaping.shape(values, scores.rewards, valid, moments)
        return algorithm.overlong.punish(values, valid, response_lengths)

    rewards = shaped(scores.rewards, row_sums(mask.double(), lengths))
    token_rewards = torch.zeros(len(mask), dtype=torch.float64)
    last = last_masked_token(mask, lengths)
    token_rewards[last[last >= 0]] = rewards[last >= 0]
    if algorithm.kl.in_reward:
        if scores.ref_log_probs is None:
            raise ValueError("the KL penalty in the reward needs Scores.ref_log_probs, which is missing")
        kl = algorithm.kl.estimate(old_log_probs.double(), scores.ref_log_probs.double())
        penalty = torch.where(mask, state.kl_coef * kl, 0)
        token_rewards = token_rewards - penalty
        rewards = rewards - row_sums(penalty, lengths)
    baseline, baseline_lengths = scores.baseline_rewards, scores.baseline_lengths
    if baseline is not None:
        if baseline_lengths is None:
            raise ValueError("Scores.baseline_rewards without their baseline_lengths")
        baseline = shaped(baseline, baseline_lengths)
    return AdvantageInputs(
        rewards=rewards,
        token_rewards=token_rewards,
        mask=mask,
        lengths=lengths,
        group=rollouts.group,
        valid=valid,
        values=None if scores.values is None else scores.values.double(),
        baseline_rewards=baseline,
        components={name: value.double() for name, value in scores.components.items()},
    )


def _correct(
    rollouts: Rollouts, scores: Scores, algorithm: Algorithm, mask: Tensor
) -> tuple[Tensor | None, Tensor, Metrics]:
    """Measure the mismatch wherever both log-probs are known, and correct for it outside bypass mode."""
    if scores.old_log_probs is None:
        return None, mask, Metrics()
    log_probs, rollout, lengths = scores.old_log_probs, rollouts.rollout_log_probs, rollouts.lengths
    metrics = mismatch_metrics(log_probs, rollout, mask, lengths)
    if algorithm.correction.bypass or not algorithm.correction.active:
        return None, mask, metrics
    weights, keep, more = algorithm.correction.correct(log_probs, rollout, mask, lengths)
    return weights, keep, metrics + more
