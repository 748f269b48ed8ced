"""Sample the rows of a step and grade them: once, or until enough groups teach something."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.algorithms import Algorithm
from megatron_rl.algorithms.filters import count_groups, informative_groups, prompts_to_sample, take_groups
from megatron_rl.config.schema import RunConfig
from megatron_rl.metrics import Metrics
from megatron_rl.roles.build import Roles
from megatron_rl.trainer.grading import grade
from megatron_rl.trainer.phases import Phases
from megatron_rl.trainer.sampler import Sampled, Sampler
from megatron_rl.trainer.staleness import staleness
from megatron_rl.types import PromptBatch, Rollouts

ROUND_CEILING = 4
"""One round of dynamic sampling draws at most this many times the prompts of a step."""


@dataclass(frozen=True)
class Graded:
    """Hold graded rows, the same value on every rank; ``prompts`` has one entry per row.

    ``rewards`` [B] is NaN where ``valid`` [B] is false; ``components`` maps names to [B];
    ``baseline_rewards`` [B] is the reward of a greedy response to the row's prompt, where one was sampled.
    """

    prompts: PromptBatch
    rollouts: Rollouts
    rewards: Tensor
    valid: Tensor
    components: dict[str, Tensor]
    baseline_rewards: Tensor | None = None

    def rows(self, ids: list[int]) -> Graded:
        """Return the rows ``ids``, in that order."""
        index = torch.tensor(ids, dtype=torch.long)
        baseline = self.baseline_rewards
        return Graded(
            self.prompts.rows(ids),
            self.rollouts.rows(ids),
            self.rewards[index],
            self.valid[index],
            {name: values[index] for name, values in self.components.items()},
            None if baseline is None else baseline[index],
        )


def sample_step(
    sampler: Sampler, roles: Roles, algorithm: Algorithm, config: RunConfig, seed: int, phase: Phases
) -> tuple[Graded, Metrics]:
    """Sample and grade the rows of one step.

    With ``algorithm.dynamic_sampling`` groups whose rewards are all equal are replaced by new ones, in at
    most ``dynamic_sampling_max_rounds`` further rounds; a step that still lacks groups then goes on with
    those it has, or with the first round's where none teaches anything. Groups kept beyond the wanted
    number are dropped and counted. Collective over the world.
    """
    wanted = config.batch.prompts_per_step
    everything, metrics = sample_and_grade(sampler, wanted, roles, config, seed, phase)
    if not algorithm.dynamic_sampling:
        return everything, metrics
    first, rounds = everything, 0
    while rounds < algorithm.dynamic_sampling_max_rounds:
        kept, sampled = informative(everything)
        more = prompts_to_sample(wanted, kept, sampled, ceiling=ROUND_CEILING * wanted)
        if not more:
            break
        rounds += 1
        extra, also = sample_and_grade(sampler, more, roles, config, seed + rounds, phase)
        everything, metrics = _joined(everything, extra), metrics + also
    metrics += Metrics.of({"sampling/rounds": 1.0 + rounds})
    taken, also = take_informative(everything, wanted)
    return taken or first, metrics + also


def sample_and_grade(
    sampler: Sampler, wanted: int, roles: Roles, config: RunConfig, seed: int, phase: Phases
) -> tuple[Graded, Metrics]:
    """Sample ``wanted`` prompts and grade their responses. Collective over the world."""
    with phase("generate"), roles.hybrid_engine.generation_mode():
        sampled = sampler.finish(sampler.start(wanted, seed))
    metrics = roles.hybrid_engine.sync_metrics + sampled.metrics
    if config.rollout.partial:
        assert config.asynchrony.max_staleness is not None
        version = roles.hybrid_engine.version
        metrics += staleness(version, sampled.rollouts, config.asynchrony.max_staleness)
    graded, also = grade_sampled(sampled, roles, config, phase)
    return graded, metrics + also


def grade_sampled(sampled: Sampled, roles: Roles, config: RunConfig, phase: Phases) -> tuple[Graded, Metrics]:
    """Grade responses. Collective over `members`."""
    samples = config.batch.samples_per_prompt
    with phase("reward"):
        rows = sampled.prompts.repeat(samples)
        grades = grade(roles, rows, sampled.rollouts)
        metrics = roles.reward.metrics
        baseline = None
        if sampled.greedy is not None:
            baseline = grade(roles, sampled.prompts, sampled.greedy).rewards.repeat_interleave(samples)
    return Graded(rows, sampled.rollouts, *grades, baseline), metrics


def informative(graded: Graded) -> tuple[int, int]:
    """Return the number of groups whose rewards differ, and of all groups."""
    group = graded.rollouts.group
    keep = informative_groups(graded.rewards, group, graded.valid)
    return count_groups(keep, group), len(torch.unique(group))


def take_informative(graded: Graded, wanted: int) -> tuple[Graded | None, Metrics]:
    """Return the first ``wanted`` groups whose rewards differ, or those there are; None without any."""
    kept, sampled = informative(graded)
    group = graded.rollouts.group
    taken = take_groups(informative_groups(graded.rewards, group, graded.valid), group, wanted)
    metrics = Metrics.of({
        "sampling/prompts": float(sampled),
        "sampling/informative_fraction": kept / sampled,
        "sampling/dropped_groups": float(max(kept - wanted, 0)),
        "sampling/missing_groups": float(max(wanted - kept, 0)),
    })  # fmt: skip
    return (graded.rows(taken) if taken else None), metrics


def _joined(first: Graded, second: Graded) -> Graded:
    """Return the rows of both; the second's groups are numbered after the first's."""
    offset = int(first.rollouts.group.max()) + 1
    shifted = replace(second.rollouts, group=second.rollouts.group + offset)
    nothing = torch.full_like(first.rewards, float("nan")), torch.full_like(second.rewards, float("nan"))
    names = sorted({*first.components, *second.components})
    baseline = None
    if first.baseline_rewards is not None and second.baseline_rewards is not None:
        baseline = torch.cat((first.baseline_rewards, second.baseline_rewards))
    return Graded(
        PromptBatch.concatenate([first.prompts, second.prompts]),
        Rollouts.concatenate([first.rollouts, shifted]),
        torch.cat((first.rewards, second.rewards)),
        torch.cat((first.valid, second.valid)),
        {
            name: torch.cat((first.components.get(name, nothing[0]), second.components.get(name, nothing[1])))
            for name in names
        },
        baseline,
    )
