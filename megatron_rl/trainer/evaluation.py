"""Evaluation on held-out sets: the current policy's responses (answers), their rewards and statistics."""

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
from megatron_rl.rewards.math_answer import find_marked_answer
from megatron_rl.roles.build import Roles
from megatron_rl.roles.reward import COMPONENT, RewardRole
from megatron_rl.trainer.rewards import (
    compute_row_rewards,
    distinct_failures,
)
from megatron_rl.trainer.sample import (
    PendingRound,
    gather_complete_round,
    start_complete_round,
)
from megatron_rl.types import PromptBatch, Rollouts, row_counts

CORRECT_REWARD = 1.0
"""Smallest reward at which a response counts as correct."""

RESAMPLES = 1000
"""Bootstrap resamples of an interval: enough for two digits of a 95% interval."""
SUBSETS = 200
"""Number of random subsets of k answers over which majority@k is averaged, for more than k answers."""
_TAIL_PERCENT = 2.5
"""Percentage of resamples below a 95% interval, which is also the percentage above it."""
_MAX_MESSAGE_CHARACTERS = 300
"""Number of characters of a failure's message that a console warning shows."""


@dataclass(frozen=True)
class EvaluationSet:
    """Prompts of one held-out set, with the functions that reward and evaluate the answers.

    Example: ``evaluation.sets.gsm8k`` with ``samples: 4`` has ``name="gsm8k"``, each prompt once in
    ``prompts``, and ``reward=None``.
    """

    name: str
    """Name of the set; its metrics are named ``eval/NAME/...``."""
    settings: EvaluationSetConfig
    """Configuration of the set, for example how many answers are sampled per prompt."""
    prompts: PromptBatch
    """The P prompts of the set, with the sampling parameters of the set."""
    reward: RewardRole | None
    """Reward function of the set, or None if answers are rewarded like the run's training samples."""
    evaluators: Mapping[str, RewardRole]
    """Name -> additional function, whose results are only metrics."""

    def close(self) -> None:
        """End the worker processes of the set's reward function and evaluators."""
        for role in (self.reward, *self.evaluators.values()):
            if role is not None:
                role.close()


@dataclass(frozen=True)
class EvaluationResult:
    """Answers to one set with their rewards, equal on all ranks except for ``failures``."""

    name: str
    """Name of the set."""
    metrics: Metrics
    """Metrics of the set, named ``eval/NAME/...``."""
    prompts: PromptBatch
    """Prompt of each answer."""
    rollouts: Rollouts
    """The answers; answers to the same prompt are consecutive."""
    rewards: Tensor
    """Reward of each answer, [B] float32, NaN if it failed."""
    reasons: tuple[str | None, ...]
    """Reason of each failed reward, or None for valid rewards: B entries."""
    failures: tuple[tuple[str, Failure], ...]
    """Examples of failures on this rank: (name of the reward or evaluator that failed, failure)."""


def make_evaluation_sets(
    config: RunConfig, sources: Mapping[str, PromptSource], tokenizer: Any
) -> tuple[EvaluationSet, ...]:
    """Create the configured evaluation sets; raise UserError if one of their functions cannot be loaded.

    ``sources``: name of a set -> its prompts.
    """
    sets: list[EvaluationSet] = []
    for name, source in sources.items():
        settings = config.evaluation.sets[name]
        set_key = f"evaluation.sets.{name}"

        # A set without a reward function uses the rewards of the training samples.
        reward = None
        if settings.reward is not None:
            reward = _make_function_role(config, settings.reward, f"{set_key}.reward", tokenizer)
        evaluators = {
            key: _make_function_role(config, function, f"{set_key}.evaluators.{key}", tokenizer)
            for key, function in settings.evaluators.items()
        }

        prompts = source.batch_in_file_order(settings.max_prompts, settings.temperature, settings.top_p)
        sets.append(EvaluationSet(name, settings, prompts, reward, evaluators))
    return tuple(sets)


def _make_function_role(
    config: RunConfig,
    function: str,
    key: str,
    tokenizer: Any,
) -> RewardRole:
    """Create a role that only calls ``function``, with the time and resource limits of the run's rewards.

    ``key``: configuration key of the function, for errors.
    """
    return RewardRole(config.reward.with_function(function), tokenizer, key)


def evaluate(
    roles: Roles, sets: Sequence[EvaluationSet], seed: int
) -> tuple[list[EvaluationResult], Metrics]:
    """Sample and reward answers to each set; return the results and the metrics of the weight sync.

    ``eval/NAME/accuracy`` is the fraction of answers whose reward is at least `CORRECT_REWARD`; with several
    scorers, only the first scorer's reward is used. An answer whose reward failed is not correct.
    ``eval/NAME/reward`` is the mean over valid answers. `EvaluationSetConfig` describes the other metrics.
    Collective over the world.
    """
    world = ReplicaGroup()
    # Evaluate the newest weights, even if training responses are sampled from older weights.
    with roles.hybrid_engine.generation_mode(newest=True) as sync_metrics:
        pending = start_evaluation(roles, sets, seed)
        answers = [gather_complete_round(roles.rollout, pending_set, world) for pending_set in pending]

    # Drop the sync's sums, which are seconds of a step: here time/evaluate already includes them.
    return reward_answers(roles, sets, answers), Metrics({}, sync_metrics.maxima)


def start_evaluation(roles: Roles, sets: Sequence[EvaluationSet], seed: int) -> list[PendingRound]:
    """Start to sample answers to each set with the engine's weights; return a pending round per set.

    Returns immediately on ranks outside the rollout. Collective over the rollout's ranks.
    """
    version = roles.hybrid_engine.version
    return [
        start_complete_round(
            roles.rollout,
            evaluation_set.prompts,
            evaluation_set.settings.samples,
            seed,
            version,
        )
        for evaluation_set in sets
    ]


def reward_answers(
    roles: Roles, sets: Sequence[EvaluationSet], answers: Sequence[Rollouts]
) -> list[EvaluationResult]:
    """Compute rewards and metrics of the answers to each set, see `evaluate`. Collective over the world."""
    world = ReplicaGroup()
    return [
        _compute_set_result(roles, evaluation_set, rollouts, world)
        for evaluation_set, rollouts in zip(sets, answers, strict=True)
    ]


def _compute_set_result(
    roles: Roles,
    evaluation_set: EvaluationSet,
    rollouts: Rollouts,
    world: ReplicaGroup,
) -> EvaluationResult:
    """Compute the rewards and metrics of the answers (``rollouts``) to one set. Collective over the world."""
    prefix = f"eval/{evaluation_set.name}"
    # The set's own function replaces all rewards of the run.
    if evaluation_set.reward is not None:
        roles = replace(roles, reward=evaluation_set.reward, reward_models=())

    prompts = evaluation_set.prompts.repeat(evaluation_set.settings.samples)
    result = compute_row_rewards(roles, prompts, rollouts, world)
    rewards = result.scores.rewards
    valid = result.scores.valid

    # With several scorers, the first scorer's reward determines whether an answer is correct, not the sum.
    deciding_rewards = rewards
    if not roles.has_single_scorer:
        deciding_rewards = result.scores.components[roles.reward.first_scorer]
    correct = valid & (deciding_rewards >= CORRECT_REWARD)

    # Means over all answers, except for the reward: the mean over answers whose reward is valid.
    metrics = Metrics.mean(f"{prefix}/accuracy", float(correct.sum()), len(prompts))
    metrics += Metrics.mean(f"{prefix}/reward", float(rewards[valid].sum()), float(valid.sum()))
    metrics += Metrics.mean(
        f"{prefix}/response_length",
        float(rollouts.response_mask.sum()),
        len(prompts),
    )
    metrics += Metrics.mean(f"{prefix}/invalid", float((~valid).sum()), len(prompts))

    # Statistics over several answers per prompt, which every rank computes with the same result.
    answer_texts = roles.reward.responses(rollouts)
    statistics = _answer_statistics(evaluation_set, rollouts, correct, answer_texts)
    metrics += Metrics.of({f"{prefix}/{key}": value for key, value in statistics.items()})

    # Run the evaluators on the same answers, and report their failures together with failed rewards.
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
    answer_texts: Sequence[str],
) -> dict[str, float]:
    """Compute pass@k, majority@k, 95% intervals and diversity of the answers to a set: name -> value.

    ``correct``: [B] bool. ``answer_texts``: the B answers, decoded.
    """
    samples_per_prompt = evaluation_set.settings.samples
    correct_by_prompt = correct.view(-1, samples_per_prompt).numpy().astype(float)

    # A response votes for its marked answer, or for its complete text if it marks no answer.
    votes = [find_marked_answer(text) or text.strip() for text in answer_texts]
    first_votes = range(0, len(votes), samples_per_prompt)
    votes_by_prompt = [votes[first : first + samples_per_prompt] for first in first_votes]

    # Estimates for each prompt ([P] per statistic), since the bootstrap resamples prompts.
    estimates = {"accuracy": correct_by_prompt.mean(axis=1)}
    for draw_count in evaluation_set.settings.sample_counts():
        estimates[f"pass_at_{draw_count}"] = pass_at_k(correct_by_prompt, draw_count)
        estimates[f"majority_at_{draw_count}"] = majority_at_k(correct_by_prompt, votes_by_prompt, draw_count)

    statistics = {key: float(values.mean()) for key, values in estimates.items() if key != "accuracy"}
    for key, (low, high) in bootstrap_intervals(estimates).items():
        statistics[f"{key}_low"] = low
        statistics[f"{key}_high"] = high

    # Split the response tokens by answer.
    response_ends = row_counts(rollouts.response_mask, rollouts.lengths).cumsum(0)[:-1].numpy()
    responses = numpy.split(rollouts.tokens[rollouts.response_mask].numpy(), response_ends)
    return statistics | diversity_statistics(responses, samples_per_prompt)


def _run_evaluator(
    prefix: str,
    role: RewardRole,
    prompts: PromptBatch,
    rollouts: Rollouts,
    world: ReplicaGroup,
) -> tuple[Metrics, tuple[Failure, ...]]:
    """Run one evaluator on the answers; return its metrics, and its failures on this rank.

    A metric is the mean over the answers on which the evaluator succeeded. ``prefix``: prefix of the metrics'
    names. Collective over the world.
    """
    # An evaluator's role has a single function, which gives a single result.
    (result,) = role.infer(prompts, rollouts, world)
    metrics = Metrics()
    for key, values in world.gather_rows(result.shard).values.items():
        is_finite = values.isfinite()
        is_reward = key == "rewards"
        metric = prefix if is_reward else f"{prefix}/{key.removeprefix(COMPONENT)}"
        metrics += Metrics.mean(metric, float(values[is_finite].sum()), float(is_finite.sum()))
        if is_reward:
            metrics += Metrics.mean(f"{prefix}_failed", float((~is_finite).sum()), len(values))
    return metrics, result.failures


def failure_lines(results: Sequence[EvaluationResult], step: int) -> Iterator[str]:
    """Yield a console warning for each example of a failed reward or evaluator in ``results``."""
    for result in results:
        for source, failure in result.failures:
            last_line = failure.message.strip().rpartition("\n")[2][-_MAX_MESSAGE_CHARACTERS:]
            yield f"step {step}: warning: {source} of {result.name} failed ({failure.reason}): {last_line}"


# Estimators over several answers to the same prompt.


def pass_at_k(correct: ndarray, count: int) -> ndarray:
    """Estimate pass@k: the probability that at least one of ``count`` answers to a prompt is correct, [P].

    ``correct``: [P, n], 1 for a correct answer. With c correct answers of n, the unbiased estimate is
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374).

    Example:
        >>> pass_at_k(numpy.array([[1, 0, 0, 0]]), 2)
        array([0.5])
    """
    num_answers = correct.shape[1]
    num_incorrect = num_answers - correct.sum(axis=1)

    # Compute the probability that every draw is incorrect as a product: binomials of large n overflow.
    all_incorrect = numpy.ones(len(correct))
    for draw in range(count):
        all_incorrect *= numpy.clip(num_incorrect - draw, 0, None) / (num_answers - draw)
    return 1.0 - all_incorrect


def majority_at_k(correct: ndarray, votes: Sequence[Sequence[str]], count: int) -> ndarray:
    """Estimate majority@k: the probability that the most frequent of k answers to a prompt is correct, [P].

    ``correct``: [P, n], 1 for a correct answer. ``votes``: the n answers to each prompt as text. ``count``:
    k. For k < n the estimate is a mean over random subsets, which are the same in every call. If several
    answers are the most frequent, each wins with equal probability (Wang et al. 2022, arXiv 2203.11171).
    """
    generator = numpy.random.default_rng(0)
    num_answers = correct.shape[1]
    probabilities = numpy.zeros(len(correct))
    for prompt_index, prompt_votes in enumerate(votes):
        # Number the distinct texts of this prompt.
        _, text_ids = numpy.unique(numpy.asarray(prompt_votes, dtype=object), return_inverse=True)
        distinct_count = int(text_ids.max()) + 1
        frequency = numpy.bincount(text_ids, minlength=distinct_count)
        # Rewards of equal texts may differ: the credit of a text is the fraction of its answers that is
        # correct.
        credit = numpy.bincount(text_ids, correct[prompt_index], distinct_count) / frequency

        # One subset with all answers, or random subsets.
        if count == num_answers:
            subsets = text_ids[None, :]
        else:
            permutations = generator.random((SUBSETS, num_answers)).argsort(axis=1)
            subsets = text_ids[permutations[:, :count]]

        # Count the votes for each distinct text in each subset; equally frequent texts share the win.
        counts = (subsets[:, :, None] == numpy.arange(distinct_count)).sum(axis=1)
        winners = counts == counts.max(axis=1, keepdims=True)
        subset_probabilities = (winners * credit).sum(axis=1) / winners.sum(axis=1)
        probabilities[prompt_index] = subset_probabilities.mean()
    return probabilities


def bootstrap_intervals(
    values: Mapping[str, ndarray],
) -> dict[str, tuple[float, float]]:
    """Compute the 95% bootstrap interval of the mean of each statistic: name -> (low, high).

    ``values``: name of a statistic -> [P], its value for each prompt. Prompts are drawn with replacement. All
    statistics and all calls use the same draws.
    """
    # Stack to [P, statistics], so that all statistics use the same resamples of prompts.
    stacked = numpy.stack(list(values.values()), axis=1)
    prompt_count = len(stacked)
    generator = numpy.random.default_rng(0)
    means: list[ndarray] = []
    for _ in range(RESAMPLES):
        drawn_prompts = generator.integers(0, prompt_count, prompt_count)
        means.append(stacked[drawn_prompts].mean(axis=0))
    low, high = numpy.percentile(means, (_TAIL_PERCENT, 100 - _TAIL_PERCENT), axis=0)
    return {name: (float(low[index]), float(high[index])) for index, name in enumerate(values)}


def diversity_statistics(responses: Sequence[ndarray], samples_per_prompt: int) -> dict[str, float]:
    """Compute statistics of the diversity of responses: name -> value.

    ``responses``: token ids of each response; ``samples_per_prompt`` consecutive responses have the same
    prompt. The statistics are:

    ``distinct_1``, ``distinct_2``: distinct n-grams as a fraction of all n-grams in the responses to a
        prompt, mean over prompts (Li et al. 2016, arXiv 1510.03055).
    ``ngram_entropy``: entropy of the 2-grams of all responses, in nats.
    ``repetition``: fraction of a response's 4-grams that already occurred in the response, mean over
        responses.
    """
    group_starts = range(0, len(responses), samples_per_prompt)
    groups = [responses[start : start + samples_per_prompt] for start in group_starts]
    unrepeated_fractions = [_distinct_fraction(_ngrams([response], 4)) for response in responses]
    _, bigram_counts = numpy.unique(_ngrams(responses, 2), axis=0, return_counts=True)
    frequencies = bigram_counts / max(bigram_counts.sum(), 1)
    return {
        "distinct_1": _mean_or_nan([_distinct_fraction(_ngrams(group, 1)) for group in groups]),
        "distinct_2": _mean_or_nan([_distinct_fraction(_ngrams(group, 2)) for group in groups]),
        "ngram_entropy": float(-(frequencies * numpy.log(frequencies)).sum()),
        "repetition": 1.0 - _mean_or_nan(unrepeated_fractions),
    }


def _ngrams(responses: Sequence[ndarray], length: int) -> ndarray:
    """Return the n-grams of ``length`` tokens in every response, concatenated: [count, length] int64."""
    windows = [
        numpy.lib.stride_tricks.sliding_window_view(response, length)
        for response in responses
        if len(response) >= length
    ]
    if not windows:
        return numpy.zeros((0, length), numpy.int64)
    return numpy.concatenate(windows)


def _distinct_fraction(ngrams: ndarray) -> float:
    """Return the number of distinct n-grams as a fraction of all n-grams, or 1 if there are none."""
    if not len(ngrams):
        return 1.0
    return len(numpy.unique(ngrams, axis=0)) / len(ngrams)


def _mean_or_nan(values: Sequence[float]) -> float:
    """Return the mean of the values, or NaN if there are none."""
    if not values:
        return math.nan
    return math.fsum(values) / len(values)
