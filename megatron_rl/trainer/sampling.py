"""Sample the rows of a step and grade them: once, or until enough groups teach something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.algorithms import Algorithm
from megatron_rl.algorithms.filters import count_groups, informative_groups, prompts_to_sample, take_groups
from megatron_rl.config.schema import RunConfig
from megatron_rl.metrics import Metrics
from megatron_rl.parallel.exchange import RowShard, gather_rows
from megatron_rl.roles.build import Roles
from megatron_rl.roles.rollout import join
from megatron_rl.trainer.grading import grade
from megatron_rl.trainer.phases import Phases
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
    draw: Callable[[int], PromptBatch],
    roles: Roles,
    algorithm: Algorithm,
    config: RunConfig,
    seed: int,
    phase: Phases,
) -> tuple[Graded, Metrics]:
    """Sample and grade the rows of one step.

    ``draw(n)`` gives the next n prompts. With ``algorithm.dynamic_sampling`` groups whose rewards are all
    equal are replaced by new ones, in at most ``dynamic_sampling_max_rounds`` further rounds; a step that
    still lacks groups then goes on with those it has, or with the first round's where none teaches
    anything. Groups kept beyond the wanted number are dropped and counted. Collective over the world.
    """
    wanted = config.batch.prompts_per_step
    graded, metrics = sample_and_grade(draw(wanted), roles, algorithm, config, seed, phase)
    if not algorithm.dynamic_sampling:
        return graded, metrics
    everything, sampled, rounds = graded, wanted, 0
    while rounds < algorithm.dynamic_sampling_max_rounds:
        keep, kept = _informative(everything)
        more = prompts_to_sample(wanted, kept, sampled, ceiling=ROUND_CEILING * wanted)
        if not more:
            break
        rounds += 1
        extra, also = sample_and_grade(draw(more), roles, algorithm, config, seed + rounds, phase)
        everything, metrics = _joined(everything, extra), metrics + also
        sampled += more
    keep, kept = _informative(everything)
    taken = take_groups(keep, everything.rollouts.group, wanted)
    metrics += Metrics.of({
        "sampling/rounds": 1.0 + rounds,
        "sampling/prompts": float(sampled),
        "sampling/informative_fraction": kept / sampled,
        "sampling/dropped_groups": float(max(kept - wanted, 0)),
    })  # fmt: skip
    return (everything.rows(taken) if taken else graded), metrics


def sample_and_grade(
    prompts: PromptBatch, roles: Roles, algorithm: Algorithm, config: RunConfig, seed: int, phase: Phases
) -> tuple[Graded, Metrics]:
    """Sample every prompt ``samples_per_prompt`` times and grade the responses. Collective over the world."""
    with phase("generate"), roles.hybrid_engine.generation_mode():
        sampled = finish_sampling(start_sampling(prompts, roles, algorithm, config, seed), config)
    metrics = roles.hybrid_engine.sync_metrics
    graded, also = grade_sampled(sampled, roles, config, phase)
    return graded, metrics + also


@dataclass(frozen=True)
class Sampled:
    """Hold the responses to ``prompts``, the same value on every rank; ``greedy`` has one row per prompt."""

    prompts: PromptBatch
    rollouts: Rollouts
    greedy: Rollouts | None


@dataclass(frozen=True)
class Sampling:
    """Hold what this rank's engine has sampled, before it is gathered."""

    prompts: PromptBatch
    shard: RowShard
    greedy: RowShard | None


def start_sampling(
    prompts: PromptBatch, roles: Roles, algorithm: Algorithm, config: RunConfig, seed: int
) -> Sampling:
    """Sample on the ranks of the rollout; others return at once. Collective over the rollout's ranks."""
    shard = roles.rollout.infer(prompts, config.batch.samples_per_prompt, seed=seed)
    greedy = None
    if algorithm.needs_greedy_baseline:
        greedy = roles.rollout.infer(_greedy(prompts), seed=seed)
    return Sampling(prompts, shard, greedy)


def finish_sampling(sampling: Sampling, config: RunConfig) -> Sampled:
    """Gather what was sampled. Collective over the world."""
    rollouts = join(gather_rows(sampling.shard), config.batch.samples_per_prompt)
    greedy = None if sampling.greedy is None else join(gather_rows(sampling.greedy), 1)
    return Sampled(sampling.prompts, rollouts, greedy)


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


def _greedy(prompts: PromptBatch) -> PromptBatch:
    """Return the prompts with greedy decoding."""
    sampling = tuple(one._replace(temperature=0.0, top_p=1.0, top_k=0) for one in prompts.sampling)
    return replace(prompts, sampling=sampling)


def _informative(graded: Graded) -> tuple[Tensor, int]:
    keep = informative_groups(graded.rewards, graded.rollouts.group, graded.valid)
    return keep, count_groups(keep, graded.rollouts.group)


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
