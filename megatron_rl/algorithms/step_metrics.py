"""What a step says about its rewards, responses, groups and advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.advantages.advantage import AdvantageInputs
from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.algorithms.groups import dense_groups, group_statistics
from megatron_rl.metrics import Metrics
from megatron_rl.types import FINISH_LENGTH, Rollouts, Scores, TrainBatch


def step_metrics(
    rollouts: Rollouts,
    scores: Scores,
    inputs: AdvantageInputs,
    batch: TrainBatch,
    algorithm: Algorithm,
    kl_coef: float,
) -> Metrics:
    """Return a step's metrics: ``reward/*``, ``response/*``, ``group/*``, ``advantage/*``, ``kl/*``.

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
        if scores.ref_log_probs is not None and batch.old_log_probs is not None:
            kl = algorithm.kl.estimate(batch.old_log_probs, scores.ref_log_probs)
            metrics += Metrics.mean("kl/ref", float(kl[mask].double().sum()), int(mask.sum()))
            metrics += Metrics.of({"kl/coef": kl_coef})
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
