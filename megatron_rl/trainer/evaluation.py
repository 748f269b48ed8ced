"""Evaluation on held-out sets: the current policy's responses, their rewards and statistics."""

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

NUM_RESAMPLES = 1000
"""Number of bootstrap resamples per interval: enough for two digits of a 95% interval."""
NUM_SUBSETS = 200
"""Number of random subsets of k responses over which majority@k is averaged."""
_TAIL_PERCENT = 2.5
"""Percentage of resamples below a 95% interval, which is also the percentage above it."""
_MAX_MESSAGE_CHARACTERS = 300
"""Number of characters of a failure's message that a console warning shows."""


@dataclass(frozen=True)
class EvaluationSet:
    """Prompts of one held-out set, with the functions that reward and evaluate the responses.

    Example: ``evaluation.sets.gsm8k`` with ``samples: 4`` has ``name="gsm8k"``, each prompt once in
    ``prompts``, and ``reward=None``.
    """

    name: str
    """Name of the set; its metrics are named ``eval/NAME/...``."""
    settings: EvaluationSetConfig
    """Configuration of the set, for example how many responses are sampled per prompt."""
    prompts: PromptBatch
    """The P prompts of the set, with the sampling parameters of the set."""
    reward: RewardRole | None
    """Reward function of the set, or None if responses are rewarded like the run's training samples."""
    evaluators: Mapping[str, RewardRole]
    """Name -> additional function, whose results are only metrics."""

    def close(self) -> None:
        """End the worker processes of the set's reward function and evaluators."""
        for role in (self.reward, *self.evaluators.values()):
            if role is not None:
                role.close()


@dataclass(frozen=True)
class EvaluationResult:
    """Responses to one set with their rewards, equal on all ranks except for ``failures``."""

    name: str
    """Name of the set."""
    metrics: Metrics
    """Metrics of the set, named ``eval/NAME/...``."""
    prompts: PromptBatch
    """Prompt of each response."""
    rollouts: Rollouts
    """The responses; responses to the same prompt are consecutive."""
    rewards: Tensor
    """Reward of each response, [B] float32, NaN if it failed."""
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
    """Sample and reward responses to each set; return the results and the metrics of the weight sync.

    ``eval/NAME/accuracy`` is the fraction of responses whose reward is at least `CORRECT_REWARD`; with
    several scorers, only the first scorer's reward is used. A response whose reward failed is not correct.
    ``eval/NAME/reward`` is the mean over responses with a valid reward. `EvaluationSetConfig` describes the
    other metrics. Collective over the world.
    """
    world = ReplicaGroup()
    # Evaluate the newest weights, even if training responses are sampled from older weights.
    with roles.hybrid_engine.generation_mode(newest=True) as sync_metrics:
        pending = start_evaluation(roles, sets, seed)
        responses = [gather_complete_round(roles.rollout, pending_set, world) for pending_set in pending]

    # Return only the maxima of the sync metrics. Their sums are parts of a step's time, but time/evaluate
    # already includes the time of this sync.
    return reward_responses(roles, sets, responses), Metrics({}, sync_metrics.maxima)


def start_evaluation(roles: Roles, sets: Sequence[EvaluationSet], seed: int) -> list[PendingRound]:
    """Start to sample responses to each set with the engine's weights; return a pending round per set.

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


def reward_responses(
    roles: Roles, sets: Sequence[EvaluationSet], responses: Sequence[Rollouts]
) -> list[EvaluationResult]:
    """Compute rewards and metrics of the responses to each set, see `evaluate`. Collective over the world."""
    world = ReplicaGroup()
    return [
        _compute_set_result(roles, evaluation_set, rollouts, world)
        for evaluation_set, rollouts in zip(sets, responses, strict=True)
    ]


def _compute_set_result(
    roles: Roles,
    evaluation_set: EvaluationSet,
    rollouts: Rollouts,
    world: ReplicaGroup,
) -> EvaluationResult:
    """Compute the rewards and metrics of the responses (``rollouts``) to a set. Collective over the world."""
    prefix = f"eval/{evaluation_set.name}"
    # The set's own function replaces all rewards of the run.
    if evaluation_set.reward is not None:
        roles = replace(roles, reward=evaluation_set.reward, reward_models=())

    prompts = evaluation_set.prompts.repeat(evaluation_set.settings.samples)
    result = compute_row_rewards(roles, prompts, rollouts, world)
    rewards = result.scores.rewards
    valid = result.scores.valid

    # With several scorers, the first scorer's reward determines whether a response is correct, not the sum.
    deciding_rewards = rewards
    if not roles.has_single_scorer:
        deciding_rewards = result.scores.components[roles.reward.first_scorer]
    correct = valid & (deciding_rewards >= CORRECT_REWARD)

    # The mean reward is over responses with a valid reward; all other means are over all responses.
    metrics = Metrics.mean(f"{prefix}/accuracy", float(correct.sum()), len(prompts))
    metrics += Metrics.mean(f"{prefix}/reward", float(rewards[valid].sum()), float(valid.sum()))
    metrics += Metrics.mean(
        f"{prefix}/response_length",
        float(rollouts.response_mask.sum()),
        len(prompts),
    )
    metrics += Metrics.mean(f"{prefix}/invalid", float((~valid).sum()), len(prompts))

    # Statistics over several responses per prompt, which every rank computes with the same result.
    response_texts = roles.reward.responses(rollouts)
    statistics = _response_statistics(evaluation_set, rollouts, correct, response_texts)
    metrics += Metrics.of({f"{prefix}/{key}": value for key, value in statistics.items()})

    # Run the evaluators on the same responses, and report their failures together with failed rewards.
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


def _response_statistics(
    evaluation_set: EvaluationSet,
    rollouts: Rollouts,
    correct: Tensor,
    response_texts: Sequence[str],
) -> dict[str, float]:
    """Compute pass@k, majority@k, 95% intervals and diversity of the responses to a set: name -> value.

    ``correct``: [B] bool. ``response_texts``: the B responses, decoded.
    """
    samples_per_prompt = evaluation_set.settings.samples
    correct_by_prompt = correct.view(-1, samples_per_prompt).numpy().astype(float)

    # A response votes for its marked answer, such as a boxed number. If it has no marked answer, it votes for
    # its complete text.
    votes = [find_marked_answer(text) or text.strip() for text in response_texts]
    prompt_starts = range(0, len(votes), samples_per_prompt)
    votes_by_prompt = [votes[start : start + samples_per_prompt] for start in prompt_starts]

    # Estimates for each prompt ([P] per statistic), since the bootstrap resamples prompts.
    estimates = {"accuracy": correct_by_prompt.mean(axis=1)}
    for k in evaluation_set.settings.sample_counts():
        estimates[f"pass_at_{k}"] = pass_at_k(correct_by_prompt, k)
        estimates[f"majority_at_{k}"] = majority_at_k(correct_by_prompt, votes_by_prompt, k)

    statistics = {key: float(values.mean()) for key, values in estimates.items() if key != "accuracy"}
    for key, (low, high) in bootstrap_intervals(estimates).items():
        statistics[f"{key}_low"] = low
        statistics[f"{key}_high"] = high

    # Split the response tokens by response.
    response_ends = row_counts(rollouts.response_mask, rollouts.lengths).cumsum(0)[:-1].numpy()
    response_tokens = numpy.split(rollouts.tokens[rollouts.response_mask].numpy(), response_ends)
    return statistics | diversity_statistics(response_tokens, samples_per_prompt)


def _run_evaluator(
    prefix: str,
    role: RewardRole,
    prompts: PromptBatch,
    rollouts: Rollouts,
    world: ReplicaGroup,
) -> tuple[Metrics, tuple[Failure, ...]]:
    """Run one evaluator on the responses; return its metrics, and its failures on this rank.

    A metric is the mean over the responses on which the evaluator succeeded. ``prefix``: prefix of the
    metrics' names. Collective over the world.
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


# Estimators over several responses to the same prompt.


def pass_at_k(correct: ndarray, k: int) -> ndarray:
    """Estimate pass@k: the probability that at least one of k responses to a prompt is correct, [P].

    ``correct``: [P, n], 1 for a correct response. With c correct responses of n, the unbiased estimate is
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374).

    Example:
        >>> pass_at_k(numpy.array([[1, 0, 0, 0]]), 2)
        array([0.5])
    """
    num_responses = correct.shape[1]
    num_incorrect = num_responses - correct.sum(axis=1)

    # Compute the probability that every draw is incorrect as a product: binomials of large n overflow.
    all_incorrect = numpy.ones(len(correct))
    for draw in range(k):
        all_incorrect *= numpy.clip(num_incorrect - draw, 0, None) / (num_responses - draw)
    return 1.0 - all_incorrect


def majority_at_k(correct: ndarray, votes: Sequence[Sequence[str]], k: int) -> ndarray:
    """Estimate majority@k: the probability that the most frequent of k answers to a prompt is correct, [P].

    ``correct``: [P, n], 1 for a correct response. ``votes``: answer of each of the n responses to a prompt,
    as text. For k < n the estimate is a mean over random subsets of k responses, which are the same in every
    call. If several answers are the most frequent, each of them wins with equal probability (Wang et al.
    2022, arXiv 2203.11171).
    """
    generator = numpy.random.default_rng(0)
    num_responses = correct.shape[1]
    probabilities = numpy.zeros(len(correct))
    for prompt_index, prompt_votes in enumerate(votes):
        # Number the distinct answers to this prompt.
        _, answer_ids = numpy.unique(numpy.asarray(prompt_votes, dtype=object), return_inverse=True)
        distinct_count = int(answer_ids.max()) + 1
        frequency = numpy.bincount(answer_ids, minlength=distinct_count)
        # Responses with the same answer can have different rewards: use the fraction of correct responses.
        correct_fraction = numpy.bincount(answer_ids, correct[prompt_index], distinct_count) / frequency

        # One subset with all responses, or random subsets.
        if k == num_responses:
            subsets = answer_ids[None, :]
        else:
            permutations = generator.random((NUM_SUBSETS, num_responses)).argsort(axis=1)
            subsets = answer_ids[permutations[:, :k]]

        # Count the votes for each distinct answer in each subset; equally frequent answers share the win.
        counts = (subsets[:, :, None] == numpy.arange(distinct_count)).sum(axis=1)
        is_winner = counts == counts.max(axis=1, keepdims=True)
        subset_probabilities = (is_winner * correct_fraction).sum(axis=1) / is_winner.sum(axis=1)
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
    for _ in range(NUM_RESAMPLES):
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
