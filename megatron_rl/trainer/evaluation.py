"""Evaluation on held-out sets: answers of the current policy, their rewards and statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
from numpy import ndarray
from torch import Tensor

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.evaluation import EvaluationSetConfig
from megatron_rl.data.sources import PromptSource
from megatron_rl.distributed.exchange import ReplicaGroup
from megatron_rl.metrics import Metrics
from megatron_rl.rewards.function import Failure
from megatron_rl.rewards.math_answer import marked_answer
from megatron_rl.roles.build import Roles
from megatron_rl.roles.reward import COMPONENT, RewardRole
from megatron_rl.trainer.rewards import (
    compute_row_rewards,
    distinct_failures,
)
from megatron_rl.trainer.sample import (
    Pending,
    gather_complete,
    start_complete,
)
from megatron_rl.types import PromptBatch, Rollouts, row_counts

CORRECT_REWARD = 1.0
"""Smallest reward at which a response counts as correct."""

RESAMPLES = 1000
"""Bootstrap resamples of an interval: enough for two digits of a 95% interval."""
SUBSETS = 200
"""Random subsets of a prompt's answers over which majority@k is a mean, if k is not all of them."""
_TAIL_PERCENT = 2.5
"""Percentage of the resamples below a 95% interval, and of those above it."""


@dataclass(frozen=True)
class EvaluationSet:
    """Prompts of one held-out set, with the functions that reward the answers.

    Example: ``evaluation.sets.gsm8k`` with ``samples: 4`` has ``name="gsm8k"``, its prompts once each, and no
    ``reward`` of its own.
    """

    name: str
    """Name of the set; its metrics are ``eval/NAME/...``."""
    settings: EvaluationSetConfig
    """Section of the set, such as its number of samples per prompt."""
    prompts: PromptBatch
    """[P] prompts with the set's sampling parameters."""
    reward: RewardRole | None
    """Reward function of the set, None if the run's own rewards are used."""
    evaluators: Mapping[str, RewardRole]
    """Further functions by name, whose results are metrics and no rewards."""

    def close(self) -> None:
        """End the processes of the set's functions."""
        for role in (self.reward, *self.evaluators.values()):
            if role is not None:
                role.close()


@dataclass(frozen=True)
class EvaluationResult:
    """Rewarded answers to one set, the same value on every rank except for ``failures``."""

    name: str
    """Name of the set."""
    metrics: Metrics
    """Metrics of the set, named ``eval/NAME/...``."""
    prompts: PromptBatch
    """One entry per answer."""
    rollouts: Rollouts
    """The answers, those to one prompt consecutive."""
    rewards: Tensor
    """[B] float32, NaN if the reward failed."""
    reasons: tuple[str | None, ...]
    """[B], why an answer has no reward; None if it has one."""
    failures: tuple[tuple[str, Failure], ...]
    """Examples of failures on this rank, each with the name of the reward or evaluator that failed."""


def evaluation_sets(
    config: RunConfig, sources: Mapping[str, PromptSource], tokenizer: Any
) -> tuple[EvaluationSet, ...]:
    """Return the configured sets with their functions loaded; raise UserError if a function cannot be loaded.

    ``sources``: prompts by name of the set.
    """
    sets: list[EvaluationSet] = []
    for name, source in sources.items():
        settings = config.evaluation.sets[name]
        path = f"evaluation.sets.{name}"

        # A set without a function of its own is rewarded as the training samples are.
        reward = None
        if settings.reward is not None:
            reward = _function_role(config, settings.reward, f"{path}.reward", tokenizer)
        evaluators = {
            key: _function_role(config, function, f"{path}.evaluators.{key}", tokenizer)
            for key, function in settings.evaluators.items()
        }

        prompts = source.in_file_order(settings.max_prompts, settings.temperature, settings.top_p)
        sets.append(EvaluationSet(name, settings, prompts, reward, evaluators))
    return tuple(sets)


def _function_role(
    config: RunConfig,
    function: str,
    path: str,
    tokenizer: Any,
) -> RewardRole:
    """Return a role that calls one function, with the time and resource limits of the run's rewards."""
    return RewardRole(config.reward.of_function(function), tokenizer, path)


def evaluate(
    roles: Roles, sets: Sequence[EvaluationSet], seed: int
) -> tuple[list[EvaluationResult], Metrics]:
    """Sample and reward responses to each set; return the results and the metrics of the weight sync.

    ``eval/NAME/accuracy`` is the fraction of answers with a reward of at least `CORRECT_REWARD` among all
    answers; with several scorers, the rewards of the first one count. An answer whose reward failed is not
    correct. ``eval/NAME/reward`` is the mean over valid answers. `EvaluationSetConfig` describes the other
    metrics. Collective over the world.
    """
    world = ReplicaGroup()
    # The weights to evaluate are the newest, also where responses are sampled from older ones.
    with roles.hybrid_engine.generation_mode(newest=True) as sync_metrics:
        pending = start_evaluation(roles, sets, seed)
        answers = [gather_complete(roles.rollout, item, world) for item in pending]

    # The sync's sums are seconds of a step; here they are part of time/evaluate already.
    return reward_answers(roles, sets, answers), Metrics({}, sync_metrics.maxima)


def start_evaluation(roles: Roles, sets: Sequence[EvaluationSet], seed: int) -> list[Pending]:
    """Sample responses to each set on the rollout's ranks, with the engine's weights; others return at once.

    Collective over the rollout's ranks.
    """
    version = roles.hybrid_engine.version
    return [
        start_complete(roles.rollout, item.prompts, item.settings.samples, seed, version) for item in sets
    ]


def reward_answers(
    roles: Roles, sets: Sequence[EvaluationSet], answers: Sequence[Rollouts]
) -> list[EvaluationResult]:
    """Compute rewards and metrics of the answers to each set, see `evaluate`. Collective over the world."""
    world = ReplicaGroup()
    return [
        _reward_set(roles, evaluation_set, rollouts, world)
        for evaluation_set, rollouts in zip(sets, answers, strict=True)
    ]


def _reward_set(
    roles: Roles,
    evaluation_set: EvaluationSet,
    rollouts: Rollouts,
    world: ReplicaGroup,
) -> EvaluationResult:
    """Compute the rewards and metrics of the answers to one set. Collective over the world."""
    prefix = f"eval/{evaluation_set.name}"
    # The set's own function replaces all rewards of the run.
    if evaluation_set.reward is not None:
        roles = replace(roles, reward=evaluation_set.reward, reward_models=())

    prompts = evaluation_set.prompts.repeat(evaluation_set.settings.samples)
    result = compute_row_rewards(roles, prompts, rollouts, world)
    rewards = result.scores.rewards
    valid = result.scores.valid

    # With several scorers the first one decides whether an answer is correct, not the weighted sum.
    marks = rewards
    if not roles.has_single_scorer:
        marks = result.scores.components[roles.reward.first_scorer]
    correct = valid & (marks >= CORRECT_REWARD)

    # Means over all answers, except for the reward, which failed answers do not have.
    metrics = Metrics.mean(f"{prefix}/accuracy", float(correct.sum()), len(prompts))
    metrics += Metrics.mean(f"{prefix}/reward", float(rewards[valid].sum()), float(valid.sum()))
    metrics += Metrics.mean(
        f"{prefix}/response_length",
        float(rollouts.response_mask.sum()),
        len(prompts),
    )
    metrics += Metrics.mean(f"{prefix}/invalid", float((~valid).sum()), len(prompts))

    # Statistics of several answers per prompt, with the same result on every rank.
    texts = roles.reward.responses(rollouts)
    statistics = _answer_statistics(evaluation_set, rollouts, correct, texts)
    metrics += Metrics.of({f"{prefix}/{key}": value for key, value in statistics.items()})

    # Evaluators get the same answers; their failures are reported with those of the reward.
    failures = [("the reward", failure) for failure in distinct_failures(result.failures)]
    for key, role in evaluation_set.evaluators.items():
        evaluator_metrics, evaluator_failures = _run_evaluator(
            f"{prefix}/{key}", role, prompts, rollouts, world
        )
        metrics += evaluator_metrics
        failures += [(f"evaluator {key}", failure) for failure in distinct_failures(evaluator_failures)]

    return EvaluationResult(
        evaluation_set.name,
        metrics,
        prompts,
        rollouts,
        rewards,
        result.reasons,
        tuple(failures),
    )


def _answer_statistics(
    evaluation_set: EvaluationSet,
    rollouts: Rollouts,
    correct: Tensor,
    texts: Sequence[str],
) -> dict[str, float]:
    """Return pass@k, majority@k, their intervals and the diversity of the answers to a set."""
    samples = evaluation_set.settings.samples
    marks = correct.view(-1, samples).numpy().astype(float)

    # A vote is the marked answer of a response, or the whole response without a marked one.
    votes = [marked_answer(text) or text.strip() for text in texts]
    votes_by_prompt = [votes[start : start + samples] for start in range(0, len(votes), samples)]

    # Per prompt, [P] each: the bootstrap resamples prompts.
    estimates = {"accuracy": marks.mean(axis=1)}
    for count in evaluation_set.settings.draws():
        estimates[f"pass_at_{count}"] = pass_at(marks, count)
        estimates[f"majority_at_{count}"] = majority_at(marks, votes_by_prompt, count)

    statistics = {key: float(values.mean()) for key, values in estimates.items() if key != "accuracy"}
    for key, (low, high) in intervals(estimates).items():
        statistics[f"{key}_low"] = low
        statistics[f"{key}_high"] = high

    # The response tokens of each answer.
    ends = row_counts(rollouts.response_mask, rollouts.lengths).cumsum(0)[:-1].numpy()
    responses = numpy.split(rollouts.tokens[rollouts.response_mask].numpy(), ends)
    return statistics | diversity(responses, samples)


def _run_evaluator(
    name: str,
    role: RewardRole,
    prompts: PromptBatch,
    rollouts: Rollouts,
    world: ReplicaGroup,
) -> tuple[Metrics, tuple[Failure, ...]]:
    """Return the means of one evaluator's results over the answers on which it succeeded.

    Collective over the world.
    """
    (result,) = role.infer(prompts, rollouts, world)
    metrics = Metrics()
    for key, values in world.gather_rows(result.shard).values.items():
        finite = values.isfinite()
        is_reward = key == "rewards"
        metric = name if is_reward else f"{name}/{key.removeprefix(COMPONENT)}"
        metrics += Metrics.mean(metric, float(values[finite].sum()), float(finite.sum()))
        if is_reward:
            metrics += Metrics.mean(f"{name}_failed", float((~finite).sum()), len(values))
    return metrics, result.failures


def failure_lines(results: Sequence[EvaluationResult], step: int) -> Iterator[str]:
    """Yield a console line for each kind of failed reward or evaluator on this rank."""
    for result in results:
        for key, failure in result.failures:
            last_line = failure.message.strip().rpartition("\n")[2][-300:]
            yield f"step {step}: warning: {key} of {result.name} failed ({failure.reason}): {last_line}"


# Estimators over several answers to the same prompt.


def pass_at(correct: ndarray, count: int) -> ndarray:
    """Return for each prompt the probability that at least one of ``count`` answers is correct: [P].

    ``correct``: [P, n], 1 for a correct answer. With c correct answers of n, the unbiased estimate is
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374).

    Example:
        >>> pass_at(numpy.array([[1, 0, 0, 0]]), 2)
        array([0.5])
    """
    samples = correct.shape[1]
    incorrect = samples - correct.sum(axis=1)

    # The probability that every draw is incorrect, as a product: binomials of large n overflow.
    all_incorrect = numpy.ones(len(correct))
    for draw in range(count):
        all_incorrect *= numpy.clip(incorrect - draw, 0, None) / (samples - draw)
    return 1.0 - all_incorrect


def majority_at(correct: ndarray, votes: Sequence[Sequence[str]], count: int) -> ndarray:
    """Return for each prompt the probability that the most frequent of ``count`` answers is correct: [P].

    ``votes``: the n answers to each prompt. For k < n answers it is a mean over random subsets, which are the
    same in every call; equally frequent answers share the vote (Wang et al. 2022, arXiv 2203.11171).
    """
    generator = numpy.random.default_rng(0)
    samples = correct.shape[1]
    probabilities = numpy.zeros(len(correct))
    for prompt, texts in enumerate(votes):
        # Number the distinct texts of this prompt.
        _, answers = numpy.unique(numpy.asarray(texts, dtype=object), return_inverse=True)
        distinct_count = int(answers.max()) + 1
        frequency = numpy.bincount(answers, minlength=distinct_count)
        # Equal texts can be marked differently: the fraction that is correct counts.
        credit = numpy.bincount(answers, correct[prompt], distinct_count) / frequency

        # Subsets of the answers: all of them, or random ones.
        if count == samples:
            subsets = answers[None, :]
        else:
            subsets = answers[generator.random((SUBSETS, samples)).argsort(axis=1)[:, :count]]

        # Votes per distinct text in each subset; equally frequent texts share the win.
        counts = (subsets[:, :, None] == numpy.arange(distinct_count)).sum(axis=1)
        winners = counts == counts.max(axis=1, keepdims=True)
        probabilities[prompt] = ((winners * credit).sum(axis=1) / winners.sum(axis=1)).mean()
    return probabilities


def intervals(
    values: Mapping[str, ndarray],
) -> dict[str, tuple[float, float]]:
    """Return the 95% bootstrap interval of the mean over prompts of each [P] array.

    Prompts are drawn with replacement; the draws are the same for all arrays and in every call.
    """
    # [P, estimates]: one resample of prompts serves all estimates.
    stacked = numpy.stack(list(values.values()), axis=1)
    generator = numpy.random.default_rng(0)
    means = [
        stacked[generator.integers(0, len(stacked), len(stacked))].mean(axis=0) for _ in range(RESAMPLES)
    ]
    low, high = numpy.percentile(means, (_TAIL_PERCENT, 100 - _TAIL_PERCENT), axis=0)
    return {name: (float(low[index]), float(high[index])) for index, name in enumerate(values)}


def diversity(responses: Sequence[ndarray], samples: int) -> dict[str, float]:
    """Return the diversity of responses, given as token ids, ``samples`` consecutive ones per prompt.

    ``distinct_n``: distinct n-grams as a fraction of all n-grams in the answers to a prompt, mean over
    prompts (Li et al. 2016, arXiv 1510.03055).
    ``ngram_entropy``: entropy of the 2-grams of all responses, in nats.
    ``repetition``: fraction of a response's 4-grams that occur earlier in it, mean over responses.
    """
    groups = [responses[start : start + samples] for start in range(0, len(responses), samples)]
    _, counts = numpy.unique(_ngrams(responses, 2), axis=0, return_counts=True)
    frequencies = counts / max(counts.sum(), 1)
    return {
        "distinct_1": _mean([_distinct_fraction(_ngrams(group, 1)) for group in groups]),
        "distinct_2": _mean([_distinct_fraction(_ngrams(group, 2)) for group in groups]),
        "ngram_entropy": float(-(frequencies * numpy.log(frequencies)).sum()),
        "repetition": 1.0 - _mean([_distinct_fraction(_ngrams([response], 4)) for response in responses]),
    }


def _ngrams(responses: Sequence[ndarray], length: int) -> ndarray:
    """Return the n-grams of all responses, without n-grams across two responses: [count, length] int64."""
    windows = [
        numpy.lib.stride_tricks.sliding_window_view(response, length)
        for response in responses
        if len(response) >= length
    ]
    if not windows:
        return numpy.zeros((0, length), numpy.int64)
    return numpy.concatenate(windows)


def _distinct_fraction(ngrams: ndarray) -> float:
    """Return the number of distinct n-grams as a fraction of all n-grams, 1 without any."""
    if not len(ngrams):
        return 1.0
    return len(numpy.unique(ngrams, axis=0)) / len(ngrams)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
