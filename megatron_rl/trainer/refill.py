"""Resampling of the responses that filters remove: `rollout.filters.refill`.

The one idea: a filter decides about each row independently, so a new response to the same prompt can replace
a removed row before rewards are computed. The new response's seed depends only on the row and the number of
the attempt, not on which other rows were removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.distributed.exchange import ReplicaGroup
from megatron_rl.metrics import Metrics
from megatron_rl.rewards.filters import FILTERS
from megatron_rl.rollout.collate import start_groups, waiting_groups
from megatron_rl.rollout.sampling import row_seeds
from megatron_rl.rollout.scheduler import GenerationRound
from megatron_rl.trainer.sample import Pending, RolloutSource, SampledBatch, gather_complete
from megatron_rl.types import PromptBatch, Rollouts


def refill(
    source: RolloutSource,
    sampled: SampledBatch,
    seed: int,
    members: ReplicaGroup,
) -> SampledBatch:
    """Sample new responses for the rows that filters remove, up to `rollout.filters.refill` times.

    Returns the batch with the new responses. ``seed``: seed of the round that sampled the batch. The engine
    must be awake. Collective over the replica group, which must be all ranks.
    """
    max_attempts = source.config.rollout.filters.refill
    if not max_attempts:
        return sampled

    rollouts = sampled.rollouts
    count = len(rollouts)
    prompts = sampled.prompts.repeat(count // max(len(sampled.prompts), 1))
    early = dict(sampled.early)
    num_refilled = 0
    for attempt in range(1, max_attempts + 1):
        filtered = source.roles.reward.filter(prompts, rollouts, members, early)
        removed = sorted(filtered.names)
        if not removed:
            break

        seeds = row_seeds(seed, [attempt * count + row for row in removed])
        responses = _sample(source, prompts.rows(removed), seeds, seed, members)
        rollouts = _with_rows(rollouts, removed, responses)
        num_refilled += len(removed)

        # Retain the verdicts of the other rows and drop those of the replaced ones.
        early[FILTERS] = filtered.verdicts(range(count))
        early = {
            scorer: {row: answer for row, answer in answers.items() if row not in filtered.names}
            for scorer, answers in early.items()
        }

    metrics = sampled.metrics + Metrics.mean("filtered/refilled", float(num_refilled), float(count))
    return replace(sampled, rollouts=rollouts, early=early, metrics=metrics)


def _sample(
    source: RolloutSource,
    prompts: PromptBatch,
    seeds: Sequence[int],
    seed: int,
    members: ReplicaGroup,
) -> Rollouts:
    """Sample a complete response to each prompt, with its seed of ``seeds``.

    Collective over the replica group.
    """
    rollout = source.roles.rollout
    version = source.roles.hybrid_engine.rollout_version
    groups = tuple(start_groups(waiting_groups(prompts), 1, seed, version))
    for group, row_seed in zip(groups, seeds, strict=True):
        group.sequences[0].seed = row_seed

    generation_round = GenerationRound(groups, (True,) * len(groups), len(groups), version)
    pending = Pending(generation_round, rollout.infer(generation_round))
    responses = gather_complete(rollout, pending, members)
    source.limits.observe(prompts, responses)
    return responses


def _with_rows(rollouts: Rollouts, rows: Sequence[int], responses: Rollouts) -> Rollouts:
    """Return the batch with the rows of indices ``rows`` replaced by ``responses``, in order."""
    order = list(range(len(rollouts)))
    for index, row in enumerate(rows):
        order[row] = len(rollouts) + index
    combined = Rollouts.concatenate([rollouts, responses]).rows(order)
    return replace(combined, group=rollouts.group)
