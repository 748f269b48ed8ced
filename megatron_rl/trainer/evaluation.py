"""Answer the evaluation sets with the current policy, grade the answers and measure them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.evaluation import EvaluationSetConfig
from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.data.prompts import PromptSource
from megatron_rl.distributed.exchange import ReplicaGroup
from megatron_rl.metrics import Metrics
from megatron_rl.rewards.function import Failure
from megatron_rl.rewards.math_answer import marked_answer
from megatron_rl.roles.build import Roles
from megatron_rl.roles.reward import COMPONENT, RewardRole
from megatron_rl.trainer.answers import diversity, intervals, majority_at, pass_at
from megatron_rl.trainer.reward_failures import of_each_kind
from megatron_rl.trainer.sample import Pending, gathered, judge, whole
from megatron_rl.types import PromptBatch, Rollouts, row_counts

FULL_MARKS = 1.0
"""A response counts as right when its reward is at least this."""


@dataclass(frozen=True)
class EvaluationSet:
    """Hold what is asked and what judges: ``reward`` is None where the run's own judges do."""

    name: str
    settings: EvaluationSetConfig
    prompts: PromptBatch
    reward: RewardRole | None
    evaluators: Mapping[str, RewardRole]

    def close(self) -> None:
        """End the processes of what judges."""
        for role in (self.reward, *self.evaluators.values()):
            if role is not None:
                role.close()


@dataclass(frozen=True)
class EvaluationResult:
    """Hold graded answers, the same value on every rank; ``prompts`` has one entry per answer.

    ``reasons`` as of a `ScoredBatch`. ``failures`` are examples of what rewards and evaluators failed on,
    each with its name; of this rank.
    """

    name: str
    metrics: Metrics
    prompts: PromptBatch
    rollouts: Rollouts
    rewards: torch.Tensor
    reasons: tuple[str | None, ...]
    failures: tuple[tuple[str, Failure], ...]


def evaluation_sets(
    config: RunConfig, sources: Mapping[str, PromptSource], tokenizer: Any
) -> tuple[EvaluationSet, ...]:
    """Return the sets with their judges loaded; raises UserError where a function cannot be."""
    sets: list[EvaluationSet] = []
    for name, source in sources.items():
        settings, where = config.evaluation.sets[name], f"evaluation.sets.{name}"

        def role(function: str, where: str) -> RewardRole:
            judging = config.reward
            described = RewardConfig(
                function,
                timeout=judging.timeout,
                workers=judging.workers,
                concurrency=judging.concurrency,
                limits=judging.limits,
            )
            return RewardRole(described, tokenizer, where)

        prompts = source.everything(settings.max_prompts, settings.temperature, settings.top_p)
        reward = None if settings.reward is None else role(settings.reward, f"{where}.reward")
        evaluators = {
            key: role(function, f"{where}.evaluators.{key}") for key, function in settings.evaluators.items()
        }
        sets.append(EvaluationSet(name, settings, prompts, reward, evaluators))
    return tuple(sets)


def evaluate(
    roles: Roles, sets: Sequence[EvaluationSet], seed: int
) -> tuple[list[EvaluationResult], Metrics]:
    """Answer each set and grade the answers; return the results and what bringing the weights took.

    ``eval/NAME/accuracy`` is the share of answers with a reward of 1 or more among all answers: the first
    scorer's own where several judge; an answer whose reward failed is not right. ``eval/NAME/reward`` is the
    mean over valid answers. See `EvaluationSetConfig` for the others. Collective over the world.
    """
    world = ReplicaGroup()
    with roles.hybrid_engine.generation_mode() as synced:
        answered = [gathered(roles.rollout, pending, world) for pending in ask(roles, sets, seed)]
    # Its seconds are part of time/evaluate, not of a step.
    return graded(roles, sets, answered), Metrics({}, synced.maxima)


def ask(roles: Roles, sets: Sequence[EvaluationSet], seed: int) -> list[Pending]:
    """Answer each set on the ranks of the rollout, with its weights; other ranks return at once.

    Collective over the rollout's ranks.
    """
    rounds = [whole(one.prompts, one.settings.samples, seed, roles.hybrid_engine.version) for one in sets]
    return [Pending(one, roles.rollout.infer(one)) for one in rounds]


def graded(
    roles: Roles, sets: Sequence[EvaluationSet], answered: Sequence[Rollouts]
) -> list[EvaluationResult]:
    """Grade the answers to each set; see `evaluate`. Collective over the world."""
    world = ReplicaGroup()
    return [_graded(roles, one, rollouts, world) for one, rollouts in zip(sets, answered, strict=True)]


def _graded(roles: Roles, asked: EvaluationSet, rollouts: Rollouts, world: ReplicaGroup) -> EvaluationResult:
    name, samples = f"eval/{asked.name}", asked.settings.samples
    if asked.reward is not None:
        roles = replace(roles, reward=asked.reward, reward_models=())
    rows = asked.prompts.repeat(samples)
    scores, reasons, _, failed_rewards = judge(roles, rows, rollouts, world)
    rewards, valid = scores.rewards, scores.valid
    marks = rewards if roles.one_judge else scores.components[roles.reward.leading]
    right = valid & (marks >= FULL_MARKS)
    metrics = Metrics.mean(f"{name}/accuracy", float(right.sum()), len(rows))
    metrics += Metrics.mean(f"{name}/reward", float(rewards[valid].sum()), float(valid.sum()))
    metrics += Metrics.mean(f"{name}/response_length", float(rollouts.response_mask.sum()), len(rows))
    metrics += Metrics.mean(f"{name}/invalid", float((~valid).sum()), len(rows))
    texts = roles.reward.responses(rollouts)
    metrics += Metrics.of(
        {f"{name}/{key}": value for key, value in _measured(asked, rollouts, right, texts).items()}
    )
    failures = [("the reward", failure) for failure in of_each_kind(failed_rewards)]
    for key, role in asked.evaluators.items():
        said, failed = _evaluated(f"{name}/{key}", role, rows, rollouts, world)
        metrics += said
        failures += [(f"evaluator {key}", failure) for failure in of_each_kind(failed)]
    return EvaluationResult(asked.name, metrics, rows, rollouts, rewards, reasons, tuple(failures))


def _measured(
    asked: EvaluationSet, rollouts: Rollouts, right: torch.Tensor, texts: Sequence[str]
) -> dict[str, float]:
    """Return pass@k, majority@k, intervals and diversity of a set's answers."""
    samples = asked.settings.samples
    marks = right.view(-1, samples).numpy().astype(float)
    votes = [marked_answer(text) or text.strip() for text in texts]
    grouped = [votes[start : start + samples] for start in range(0, len(votes), samples)]
    estimates = {"accuracy": marks.mean(axis=1)}
    for count in asked.settings.draws():
        estimates[f"pass_at_{count}"] = pass_at(marks, count)
        estimates[f"majority_at_{count}"] = majority_at(marks, grouped, count)
    result = {key: float(values.mean()) for key, values in estimates.items() if key != "accuracy"}
    for key, (low, high) in intervals(estimates).items():
        result |= {f"{key}_low": low, f"{key}_high": high}
    ends = row_counts(rollouts.response_mask, rollouts.lengths).cumsum(0)[:-1].numpy()
    sampled = numpy.split(rollouts.tokens[rollouts.response_mask].numpy(), ends)
    return result | diversity(sampled, samples)


def _evaluated(
    name: str, role: RewardRole, rows: PromptBatch, rollouts: Rollouts, world: ReplicaGroup
) -> tuple[Metrics, tuple[Failure, ...]]:
    """Return what one evaluator says of the answers; what it fails on counts for nothing else."""
    (judgement,) = role.infer(rows, rollouts, world)
    metrics = Metrics()
    for key, values in world.gather_rows(judgement.shard).values.items():
        known = values.isfinite()
        full = name if key == "rewards" else f"{name}/{key.removeprefix(COMPONENT)}"
        metrics += Metrics.mean(full, float(values[known].sum()), float(known.sum()))
        if key == "rewards":
            metrics += Metrics.mean(f"{name}_failed", float((~known).sum()), len(values))
    return metrics, judgement.failures


def failure_lines(results: Sequence[EvaluationResult], step: int) -> Iterator[str]:
    """Yield a line for each kind of failure of a reward or an evaluator on this rank."""
    for result in results:
        for key, failure in result.failures:
            message = failure.message.strip().rpartition("\n")[2][-300:]
            words = f"{key} of {result.name} failed ({failure.reason}): {message}"
            yield f"step {step}: warning: {words}"
