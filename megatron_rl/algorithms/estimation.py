"""From rollouts and their scores to a training batch: rewards, advantages, corrections, metrics.

A failed sample is left out everywhere, never scored 0. What an algorithm carries from step to step is here
too: the KL coefficient and the running reward moments.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl.algorithms.advantages import AdvantageInputs
from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.algorithms.correction import mismatch_metrics
from megatron_rl.algorithms.ragged import (
    broadcast_rows,
    dense_groups,
    group_statistics,
    last_masked_token,
    masked_row_means,
    row_sums,
)
from megatron_rl.algorithms.rewards import RunningMoments
from megatron_rl.metrics import Metrics
from megatron_rl.types import FINISH_FAILED, FINISH_LENGTH, Rollouts, Scores, TrainBatch, limited_counts


def estimate(
    rollouts: Rollouts, scores: Scores, algorithm: Algorithm, state: AlgorithmState | None = None
) -> tuple[TrainBatch, Metrics]:
    """Turn one step's rollouts and scores into a training batch and the step's metrics.

    Row order is kept. Rows that failed (engine failure, invalid or non-finite reward) have an empty
    ``response_mask`` and enter no statistic; rejected tokens and, with ``overlong.filter``, rows cut off by
    the length limit leave the mask after advantages were computed. ``loss_weights`` are zero until
    `minibatches` sets them. ``state`` None is the state before the first step. Pure: every rank computes the
    same from the same input. Raises ValueError where something the algorithm needs was not scored.
    `Scores.old_log_probs` may come with the learn pass instead where no piece ``needs_scoring_pass``: then
    the metrics of `old_policy_metrics` are not among these.
    """
    state = initial_state(algorithm) if state is None else state
    valid = valid_rows(rollouts, scores, algorithm)
    answered = rollouts.response_mask & broadcast_rows(valid, rollouts.lengths)
    old_log_probs = old_policy_log_probs(rollouts, scores, algorithm)
    if old_log_probs is None and algorithm.needs_scoring_pass:
        keys = ", ".join(f"algorithm.{name}" for name in algorithm.needs_scoring_pass)
        raise ValueError(f"Scores.old_log_probs is missing, which {keys} must know before the loss")
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
        experts=scores.experts if rollouts.experts is None else rollouts.experts,
        position=torch.arange(len(rollouts)),
    )
    if scores.old_log_probs is not None:
        metrics += old_policy_metrics(rollouts, scores, algorithm, state)
    return batch, metrics + step_metrics(rollouts, scores, inputs, batch)


def old_policy_log_probs(rollouts: Rollouts, scores: Scores, algorithm: Algorithm) -> Tensor | None:
    """Return the log-probs [N] that stand for the old policy in ratios, KL penalty, metric and controller.

    With `Correction.bypass` these are the engine's own; else the trainer's, None where no pass computed them.
    """
    return rollouts.rollout_log_probs if algorithm.correction.bypass else scores.old_log_probs


def old_policy_metrics(
    rollouts: Rollouts, scores: Scores, algorithm: Algorithm, state: AlgorithmState
) -> Metrics:
    """Return ``mismatch/*`` and, where a reference scored the rows, ``kl/ref`` and ``kl/coef``.

    They compare `Scores.old_log_probs`, or what takes their place, with the rollout's and the reference's.
    """
    valid = valid_rows(rollouts, scores, algorithm)
    mask = rollouts.response_mask & broadcast_rows(valid, rollouts.lengths)
    count = int(mask.sum())
    if scores.old_log_probs is None or not count:
        return Metrics()
    rollout, log_probs = rollouts.rollout_log_probs, scores.old_log_probs
    metrics = mismatch_metrics(log_probs, rollout, mask, rollouts.lengths)
    if scores.ref_log_probs is not None:
        policy = old_policy_log_probs(rollouts, scores, algorithm)
        assert policy is not None
        kl = algorithm.kl.estimate(policy, scores.ref_log_probs)
        metrics += Metrics.mean("kl/ref", float(kl[mask].double().sum()), count)
        metrics += Metrics.of({"kl/coef": state.kl_coef})
    return metrics


def _inputs(
    rollouts: Rollouts,
    scores: Scores,
    algorithm: Algorithm,
    state: AlgorithmState,
    mask: Tensor,
    valid: Tensor,
    old_log_probs: Tensor | None,
) -> AdvantageInputs:
    """Shape the rewards and lay them on tokens."""
    lengths, shaping = rollouts.lengths, algorithm.reward_shaping
    moments = shaping.moments_after(state.moments, scores.rewards, valid)
    limits = _response_limits(rollouts, algorithm)

    def shaped(values: Tensor, response_lengths: Tensor) -> Tensor:
        values = shaping.shape(values, scores.rewards, valid, moments)
        return algorithm.overlong.punish(values, valid, response_lengths, limits)

    # The penalty is of what the limit counts: tokens of tools stop a conversation as the policy's own do.
    rewards = shaped(scores.rewards, limited_counts(rollouts))
    token_rewards = torch.zeros(len(mask), dtype=torch.float64)
    last = last_masked_token(mask, lengths)
    token_rewards[last[last >= 0]] = rewards[last >= 0]
    if algorithm.kl.in_reward:
        if scores.ref_log_probs is None:
            raise ValueError("the KL penalty in the reward needs Scores.ref_log_probs, which is missing")
        assert old_log_probs is not None
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


def _response_limits(rollouts: Rollouts, algorithm: Algorithm) -> Tensor:
    """Return the longest response that each row may have: [B] int64.

    A sampling profile gives a task's rows a limit of their own. Rows that carry none, as those that a
    program made by hand, have the algorithm's.
    """
    if rollouts.max_response_tokens is not None:
        return rollouts.max_response_tokens

    longest = algorithm.overlong.limit or algorithm.max_response_tokens
    if longest is not None:
        return torch.full((len(rollouts),), longest)
    if algorithm.overlong.buffer is not None:
        raise ValueError("the overlong penalty needs a limit: Rollouts.max_response_tokens")
    return torch.full((len(rollouts),), torch.iinfo(torch.long).max)


def _correct(
    rollouts: Rollouts, scores: Scores, algorithm: Algorithm, mask: Tensor
) -> tuple[Tensor | None, Tensor, Metrics]:
    """Correct for the mismatch of the two log-probs, outside bypass mode."""
    log_probs = scores.old_log_probs
    if log_probs is None or algorithm.correction.bypass or not algorithm.correction.active:
        return None, mask, Metrics()
    return algorithm.correction.correct(log_probs, rollouts.rollout_log_probs, mask, rollouts.lengths)


@dataclass(frozen=True)
class AlgorithmState:
    """Hold the current KL coefficient and the moments of all rewards so far."""

    kl_coef: float
    moments: RunningMoments = field(default_factory=RunningMoments)

    def state_dict(self) -> dict[str, float | list[float]]:
        """Return the state as plain numbers."""
        return {"kl_coef": self.kl_coef, "moments": list(self.moments)}

    @classmethod
    def from_state_dict(cls, saved: dict) -> AlgorithmState:
        """Restore what `state_dict` returned."""
        return cls(float(saved["kl_coef"]), RunningMoments(*saved["moments"]))


def initial_state(algorithm: Algorithm) -> AlgorithmState:
    """Return the state before the first step."""
    return AlgorithmState(algorithm.kl.first_coef)


def next_state(
    algorithm: Algorithm, state: AlgorithmState, rollouts: Rollouts, scores: Scores
) -> AlgorithmState:
    """Return the state after a step, from what the step sampled and how it was scored.

    Call it once per step, after `estimate` with the old state. The adaptive coefficient follows the KL of
    `old_policy_log_probs` to the reference by the algorithm's estimator, averaged per response and then over
    responses.
    """
    valid = valid_rows(rollouts, scores, algorithm)
    moments = algorithm.reward_shaping.moments_after(state.moments, scores.rewards, valid)
    coef = state.kl_coef
    if algorithm.kl.adapts:
        log_probs = old_policy_log_probs(rollouts, scores, algorithm)
        if scores.ref_log_probs is None:
            raise ValueError("the adaptive KL coefficient needs ref_log_probs")
        if log_probs is None:
            log_probs = rollouts.rollout_log_probs
        mask = rollouts.response_mask & broadcast_rows(valid, rollouts.lengths)
        kl = algorithm.kl.estimate(log_probs.double(), scores.ref_log_probs.double())
        answered = row_sums(mask.double(), rollouts.lengths) > 0
        rows = int(answered.sum())
        if rows:
            mean = float(masked_row_means(kl, mask, rollouts.lengths)[answered].mean())
            coef = algorithm.kl.next_coef(coef, mean, rows)
    return AlgorithmState(coef, moments)


def valid_rows(rollouts: Rollouts, scores: Scores, algorithm: Algorithm) -> Tensor:
    """Mark the rows that were generated and have a finite reward: [B] bool.

    Where the algorithm compares with a greedy response, that one's reward must be finite too.
    """
    valid = scores.valid & (rollouts.finish_reason != FINISH_FAILED) & scores.rewards.isfinite()
    if algorithm.needs_greedy_baseline:
        if scores.baseline_rewards is None:
            raise ValueError("the algorithm needs Scores.baseline_rewards, rewards of greedy responses")
        valid = valid & scores.baseline_rewards.isfinite()
    return valid


def step_metrics(rollouts: Rollouts, scores: Scores, inputs: AdvantageInputs, batch: TrainBatch) -> Metrics:
    """Return a step's metrics: ``reward/*``, ``response/*``, ``group/*``, ``advantage/*``, ``critic/*``.

    ``reward/mean`` is of raw rewards, ``reward/shaped_mean`` after shaping and KL penalty. ``group/*`` is
    over prompts: the share whose raw rewards are all equal, and with a failed sample. The same on every rank.
    """
    valid, rows = inputs.valid, len(rollouts)
    kept = int(valid.sum())
    metrics = Metrics.mean("reward/valid_fraction", kept, rows)
    if not kept:
        return metrics
    metrics += _reward_metrics(scores, inputs, kept)
    metrics += _group_metrics(scores, inputs)
    metrics += _response_metrics(rollouts, batch, valid, kept)
    mask = inputs.mask
    if bool(mask.any()) and batch.advantages is not None and batch.returns is not None:
        metrics += _spread("advantage", batch.advantages[mask])
        if inputs.values is not None:
            metrics += _critic_metrics(batch.returns[mask].double(), inputs.values[mask])
    return metrics


def _reward_metrics(scores: Scores, inputs: AdvantageInputs, kept: int) -> Metrics:
    valid = inputs.valid
    raw = scores.rewards[valid].double()
    metrics = Metrics.mean("reward/mean", float(raw.sum()), kept)
    metrics += Metrics.of({"reward/std": float(raw.std(correction=0)), "reward/min": float(raw.min())})
    metrics += Metrics.maximum("reward/max", float(raw.max()))
    metrics += Metrics.mean("reward/shaped_mean", float(inputs.rewards[valid].sum()), kept)
    for name, value in inputs.components.items():
        known = value[valid & value.isfinite()]
        metrics += Metrics.mean(f"reward/component/{name}", float(known.sum()), len(known))
    return metrics


def _group_metrics(scores: Scores, inputs: AdvantageInputs) -> Metrics:
    dense, count = dense_groups(inputs.group)
    first = torch.zeros(count, dtype=torch.long)
    first[dense.flip(0)] = torch.arange(len(dense)).flip(0)
    statistics = group_statistics(scores.rewards.double(), inputs.group, inputs.valid)
    compared = (statistics.size > 1)[first]
    equal = compared & (statistics.std == 0)[first]
    sizes = torch.bincount(dense, minlength=count)
    failed = statistics.size[first] < sizes
    return (
        Metrics.mean("group/zero_std_fraction", int(equal.sum()), int(compared.sum()))
        + Metrics.mean("group/reward_std", float(statistics.std[first][compared].sum()), int(compared.sum()))
        + Metrics.mean("group/failed_sample_fraction", int(failed.sum()), count)
    )


def _response_metrics(rollouts: Rollouts, batch: TrainBatch, valid: Tensor, kept: int) -> Metrics:
    if batch.response_counts is None:
        return Metrics()
    lengths = batch.response_counts[valid].double()
    truncated = (rollouts.finish_reason == FINISH_LENGTH)[valid]
    tokens, trained = int(batch.response_counts.sum()), int(batch.response_mask.sum())
    return (
        Metrics.mean("response/length", float(lengths.sum()), kept)
        + Metrics.maximum("response/length_max", float(lengths.max()))
        + Metrics.mean("response/truncated_fraction", int(truncated.sum()), kept)
        + Metrics.mean("response/trained_fraction", trained, tokens)
    )


def _spread(name: str, values: Tensor) -> Metrics:
    values = values.double()
    return (
        Metrics.mean(f"{name}/mean", float(values.sum()), len(values))
        + Metrics.of({f"{name}/std": float(values.std(correction=0))})
        + Metrics.maximum(f"{name}/abs_max", float(values.abs().max()))
    )


def _critic_metrics(returns: Tensor, values: Tensor) -> Metrics:
    """Explained variance: 1 is a perfect critic, 0 one that knows only the mean."""
    variance = float(returns.var(correction=0))
    metrics = Metrics.mean("critic/return", float(returns.sum()), len(returns))
    if variance > 0:
        explained = 1 - float((returns - values).var(correction=0)) / variance
        metrics += Metrics.of({"critic/explained_variance": explained})
    return metrics
