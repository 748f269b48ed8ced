"""From rollouts and their scores to a training batch: rewards, advantages, corrections, metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from megatron_rl.algorithms.groups import group_statistics
from megatron_rl.algorithms.mismatch import mismatch_metrics
from megatron_rl.algorithms.names import ADVANTAGES, resolve
from megatron_rl.algorithms.ragged import broadcast_rows, last_masked_token, row_sums
from megatron_rl.algorithms.settings import Algorithm
from megatron_rl.metrics import Metrics
from megatron_rl.types import FINISH_FAILED, FINISH_LENGTH, Rollouts, Scores, TrainBatch


def estimate(rollouts: Rollouts, scores: Scores, algorithm: Algorithm) -> tuple[TrainBatch, Metrics]:
    """Turn one step's rollouts and scores into a training batch and the step's metrics.

    Row order is kept. Rows that failed (engine failure, invalid or non-finite reward) have an empty
    ``response_mask`` and enter no group statistic. ``loss_weights`` are zero until `minibatches` sets
    them. Pure: every rank computes the same from the same input.
    """
    valid = scores.valid & (rollouts.finish_reason != FINISH_FAILED) & scores.rewards.isfinite()
    mask = rollouts.response_mask & broadcast_rows(valid, rollouts.lengths)
    old_log_probs = rollouts.rollout_log_probs if algorithm.bypass else scores.old_log_probs
    if old_log_probs is None:
        raise ValueError("scores.old_log_probs is missing and the algorithm does not bypass them")
    inputs = _inputs(rollouts, scores, mask, valid)
    found: Advantages = resolve(algorithm.advantage, ADVANTAGES)(inputs, algorithm)
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
        ref_log_probs=scores.ref_log_probs,
        old_values=scores.values,
        group=rollouts.group,
        response_counts=row_sums(mask.double(), rollouts.lengths).long(),
    )
    return batch, _metrics(rollouts, scores, inputs, batch)


def _inputs(rollouts: Rollouts, scores: Scores, mask: Tensor, valid: Tensor) -> AdvantageInputs:
    rewards = torch.where(valid, scores.rewards.double(), 0)
    token_rewards = torch.zeros(len(mask), dtype=torch.float64)
    last = last_masked_token(mask, rollouts.lengths)
    token_rewards[last[last >= 0]] = rewards[last >= 0]
    return AdvantageInputs(
        rewards=rewards,
        token_rewards=token_rewards,
        mask=mask,
        lengths=rollouts.lengths,
        group=rollouts.group,
        valid=valid,
        values=None if scores.values is None else scores.values.double(),
        baseline_rewards=scores.baseline_rewards,
        components={name: value.double() for name, value in scores.components.items()},
    )


def _metrics(rollouts: Rollouts, scores: Scores, inputs: AdvantageInputs, batch: TrainBatch) -> Metrics:
    valid, rows = inputs.valid, len(rollouts)
    kept = int(valid.sum())
    metrics = Metrics.mean("reward/valid_fraction", kept, rows)
    if kept:
        raw = scores.rewards[valid].double()
        std = group_statistics(inputs.rewards, inputs.group, valid).std[valid]
        lengths = batch.response_counts[valid].double()  # pyright: ignore[reportOptionalSubscript]
        truncated = (rollouts.finish_reason == FINISH_LENGTH)[valid]
        metrics += Metrics.mean("reward/mean", float(raw.sum()), kept)
        metrics += Metrics.of({"reward/std": float(raw.std(correction=0))})
        metrics += Metrics.mean("group/zero_std_fraction", int((std == 0).sum()), kept)
        metrics += Metrics.mean("response/length", float(lengths.sum()), kept)
        metrics += Metrics.maximum("response/length_max", float(lengths.max()))
        metrics += Metrics.mean("response/truncated_fraction", int(truncated.sum()), kept)
        for name, value in scores.components.items():
            metrics += Metrics.mean(f"reward/component/{name}", float(value[valid].double().sum()), kept)
    if scores.old_log_probs is not None:
        metrics += mismatch_metrics(
            scores.old_log_probs, rollouts.rollout_log_probs, batch.response_mask, rollouts.lengths
        )
    return metrics
