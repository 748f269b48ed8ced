"""Dynamic sampling: groups whose rewards are all equal teach nothing, and others are sampled instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_rl.algorithms import Algorithm
from megatron_rl.algorithms.rewards import count_groups, informative_groups, prompts_to_sample, take_groups
from megatron_rl.config.schema import RunConfig
from megatron_rl.metrics import Metrics, merge
from megatron_rl.trainer.sample import ScoredBatch
from megatron_rl.types import PromptBatch, Rollouts, Scores

ROUND_CEILING = 4
"""One round of dynamic sampling draws at most this many times the prompts of a step."""


def prompts_wanted(rounds: Sequence[ScoredBatch], algorithm: Algorithm, config: RunConfig) -> int:
    """Return how many prompts to sample in the next round of a step, 0 when there are enough.

    With dynamic sampling groups whose rewards are all equal are replaced by new ones, in at most
    ``further_rounds`` rounds.
    """
    wanted = config.batch.prompts_per_step
    if not rounds:
        return wanted
    if len(rounds) > algorithm.dynamic_sampling.further_rounds:
        return 0
    kept, sampled = map(sum, zip(*(informative(batch) for batch in rounds), strict=True))
    return prompts_to_sample(wanted, kept, sampled, ceiling=ROUND_CEILING * wanted)


def choose_groups(rounds: Sequence[ScoredBatch], algorithm: Algorithm, config: RunConfig) -> ScoredBatch:
    """Return what a step learns from, with what all its rounds measured.

    Where dynamic sampling still lacks groups the step goes on with those that teach something, or with the
    first round's where none does; groups beyond the wanted number are dropped and counted.
    """
    if not algorithm.dynamic_sampling.further_rounds:
        return rounds[0]
    metrics = Metrics.of({"sampling/rounds": float(len(rounds))})
    taken = take_informative(_joined(rounds), config.batch.prompts_per_step, instead=rounds[0])
    return replace(taken, metrics=taken.metrics + metrics)


def informative(batch: ScoredBatch) -> tuple[int, int]:
    """Return the number of groups whose rewards differ, and of all groups."""
    group = batch.rollouts.group
    keep = informative_groups(batch.scores.rewards, group, batch.scores.valid)
    return count_groups(keep, group), len(torch.unique(group))


def take_informative(batch: ScoredBatch, wanted: int, *, instead: ScoredBatch) -> ScoredBatch:
    """Return the first ``wanted`` groups whose rewards differ, or as many as there are.

    Where there are none the rows are those of ``instead``; metrics and failures stay the batch's.
    """
    kept, sampled = informative(batch)
    group = batch.rollouts.group
    taken = take_groups(informative_groups(batch.scores.rewards, group, batch.scores.valid), group, wanted)
    metrics = Metrics.of({
        "sampling/prompts": float(sampled),
        "sampling/informative_fraction": kept / sampled,
        "sampling/dropped_groups": float(max(kept - wanted, 0)),
        "sampling/missing_groups": float(max(wanted - kept, 0)),
    })  # fmt: skip
    chosen = batch.rows(taken) if taken else instead
    return replace(chosen, metrics=batch.metrics + metrics, failures=batch.failures)


def _joined(rounds: Sequence[ScoredBatch]) -> ScoredBatch:
    """Return the rows of all rounds; each round's groups are numbered after those before.

    A component that a round lacks is NaN there.
    """
    if len(rounds) == 1:
        return rounds[0]
    names = sorted({name for batch in rounds for name in batch.scores.components})
    shifted: list[Rollouts] = []
    groups = 0
    for batch in rounds:
        shifted.append(replace(batch.rollouts, group=batch.rollouts.group + groups))
        groups = int(shifted[-1].group.max()) + 1
    absent = [torch.full_like(batch.scores.rewards, float("nan")) for batch in rounds]
    scores = Scores(
        rewards=torch.cat([batch.scores.rewards for batch in rounds]),
        valid=torch.cat([batch.scores.valid for batch in rounds]),
        components={
            name: torch.cat(
                [b.scores.components.get(name, nan) for b, nan in zip(rounds, absent, strict=True)]
            )
            for name in names
        },
        baseline_rewards=_joined_baselines(rounds, "baseline_rewards"),
        baseline_lengths=_joined_baselines(rounds, "baseline_lengths"),
    )
    return ScoredBatch(
        PromptBatch.concatenate([batch.prompts for batch in rounds]),
        Rollouts.concatenate(shifted),
        scores,
        tuple(reason for batch in rounds for reason in batch.reasons),
        merge(batch.metrics for batch in rounds),
        tuple(failure for batch in rounds for failure in batch.failures),
    )


def _joined_baselines(rounds: Sequence[ScoredBatch], field: str) -> torch.Tensor | None:
    baselines = [getattr(batch.scores, field) for batch in rounds]
    known = [baseline for baseline in baselines if baseline is not None]
    return torch.cat(known) if len(known) == len(baselines) else None
