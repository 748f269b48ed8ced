"""Rewards of responses: from functions and servers outside the training process, and from reward models.

Each rank computes the rewards of a part of the rows and returns them as a `RowShard`, like a role with a
model. The step gathers the shards of all scorers and computes the weighted sum.

The result of a scorer or filter for one row is an `Answer`: a reward, or the reason of a failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl.config.sections.filters import FiltersConfig
from megatron_rl.config.sections.rewards import FUNCTION, RewardConfig
from megatron_rl.data.chat_format import VisibleText
from megatron_rl.distributed.exchange import ReplicaGroup, RowShard
from megatron_rl.metrics import Metrics
from megatron_rl.rewards.by_source import SOURCE, SourceRewards
from megatron_rl.rewards.filters import FILTERED, FILTERS, NOTHING_FILTERED, FilteredRows, ResponseFilters
from megatron_rl.rewards.function import (
    Failure,
    FunctionReward,
    RewardResult,
    Sample,
    last_lines,
    make_code_reward,
)
from megatron_rl.rewards.servers import HttpReward, JudgeReward
from megatron_rl.rewards.worker import GROUP, TOKENS, TURNS, Answer
from megatron_rl.roles.model_role import ModelRole
from megatron_rl.rollout.collate import to_rollouts
from megatron_rl.rollout.types import SequenceGroup
from megatron_rl.types import (
    FINISH_FAILED,
    Outcome,
    PromptBatch,
    Rollouts,
    row_counts,
    split_rows,
)

COMPONENT = "component/"
"""Prefix of reward components in ``RowShard.values``, so that a component may have the name ``rewards``."""
NO_REWARD = "no_reward"
"""Reason of an invalid row: the run has no scorers, and no environment has rewarded the row."""
MAX_REASON_CHARACTERS = 600
"""Maximum length of the message of a failed reward, which is stored with its sample."""
_NO_SCORER = "the environment returned no reward, and no other scorer is configured"
"""Message of a row with the reason `NO_REWARD`."""

EarlyRewards = Mapping[str, Mapping[int, Answer]]
"""Rewards computed while other groups were still being sampled: name of the scorer -> row -> its answer, a
reward or the reason of a failure."""
_EarlyAnswers = tuple[str, dict[int, Answer]]
"""Early rewards of one group: name of the scorer, or `FILTERS`, and its answers by row."""


FunctionScorer = FunctionReward | SourceRewards
"""Scorer that runs in this rank's worker processes."""


class Scorer(Protocol):
    """Source of rewards outside the training process: a function in worker processes, or a server.

    ``optional_fields``: optional fields of `Sample` that the scorer needs, such as `TURNS` or `SOURCE`.
    ``unenforced_limits``: descriptions of the limits of the scorer's processes that this machine cannot
        enforce.
    """

    optional_fields: frozenset[str]
    unenforced_limits: tuple[str, ...]

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Return the rewards of the samples, in the order of ``samples``."""
        ...

    def close(self) -> None:
        """End the scorer's worker processes, or close its connections."""
        ...


class NullScorer:
    """Placeholder for a run without configured scorers: it returns the same `Answer` for every sample."""

    optional_fields: frozenset[str] = frozenset()
    unenforced_limits: tuple[str, ...] = ()

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Return the stored answer for every sample."""
        return RewardResult([self._answer] * len(samples))

    def close(self) -> None:
        """Do nothing: this scorer has no processes."""


@dataclass(frozen=True)
class ScorerResult:
    """Rewards from one scorer for this rank's rows, about 1 / (number of ranks) of the batch.

    Example: a rank rewards rows 0 and 2. The scorer's function returns ``{"reward": 1.0, "format": 0.5}`` for
    row 0 and raises an exception for row 2. Then ``shard.values`` is ``{"rewards": [1.0, nan],
    "component/format": [0.5, nan]}`` and ``reasons`` is ``{2: "exception: ..."}``.
    """

    name: str
    """Name of the scorer: ``function``, ``code``, ``http`` or ``judge``."""
    weight: float
    """Weight of the scorer's rewards in the sum over scorers."""
    shard: RowShard
    """``rewards`` and components of this rank's rows, each [b] float32; NaN for failed rows."""
    metrics: Metrics
    """Metrics of the scorer's work on this rank."""
    failures: tuple[Failure, ...]
    """Calls of the scorer that failed on this rank."""
    reasons: Mapping[int, str]
    """Row -> reason of its failure, for failed rows of all ranks."""


class RewardRole:
    """Role that computes rewards with every configured scorer, outside the training process.

    Rows are divided among the ranks, and each rank runs functions and code tests in its worker processes.
    Only the first rank sends requests to servers: the whole job shares its request limits, its cache of
    answers and its record of each server's health.

    ``evaluator_key``: configuration key of the function if the role computes rewards for an evaluation, empty
        otherwise. An evaluator's rewards replace the rewards from environments.
    ``source_functions``: source in `data.sources` -> function that rewards its rows in place of
        `reward.function`.
    ``filters``: filters of training samples, see `run_filters`; None for no filters.
    ``learns_from_rewards``: whether the algorithm needs rewards. If it does and no scorer is configured, rows
        without a reward from an environment are invalid.
    """

    def __init__(
        self,
        config: RewardConfig,
        tokenizer: Any,
        evaluator_key: str = "",
        source_functions: Mapping[str, str] = MappingProxyType({}),
        filters: FiltersConfig | None = None,
        learns_from_rewards: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._visible_text = VisibleText(tokenizer)
        self._ignores_environments = bool(evaluator_key)
        self._scorers: dict[str, tuple[float, Scorer]] = {}
        # Name of a function -> executor with one thread, since the function's processes handle one list of
        # samples at a time. With separate threads, groups do not wait for the function of another source.
        self._executors: dict[str, ThreadPoolExecutor] = {}
        self._early_futures: list[Future[_EarlyAnswers]] = []
        self._filters: ResponseFilters | None = None

        try:
            if filters is not None and filters.names:
                self._filters = ResponseFilters(filters, config)
            if source_functions:
                # The functions of all sources form one scorer, since each row has one source.
                self._scorers[FUNCTION] = (config.weight, SourceRewards(config, source_functions))
            for name, weight in config.scorer_weights.items():
                if name not in self._scorers:
                    self._scorers[name] = (weight, _make_scorer(name, config, evaluator_key))
        except BaseException:
            # End the processes of scorers that were created before the error.
            self.close()
            raise

        if not self._scorers:
            # Without any scorer, rows have no reward. With reward models, or if no rewards are needed, the
            # scorer adds 0 to each row's reward instead.
            answer = Answer(NO_REWARD, _NO_SCORER)
            if config.models or not learns_from_rewards:
                answer = Answer(reason=None, reward=0.0)
            self._scorers[FUNCTION] = (config.weight, NullScorer(answer))

    @property
    def first_scorer(self) -> str:
        """Return the name of the first scorer, whose rewards the accuracy metrics use."""
        return next(iter(self._scorers))

    @property
    def scorer_count(self) -> int:
        """Return the number of scorers, at least 1."""
        return len(self._scorers)

    @property
    def has_local_scorers(self) -> bool:
        """Return whether a scorer runs in worker processes of this rank, and not on a server.

        Scorers in worker processes can reward finished groups while other groups are still sampled.
        """
        return bool(self._functions)

    @property
    def _functions(self) -> dict[str, FunctionScorer]:
        """Return the scorers that run in this rank's worker processes, by name."""
        functions: dict[str, FunctionScorer] = {}
        for name, (_, scorer) in self._scorers.items():
            if isinstance(scorer, FunctionScorer):
                functions[name] = scorer
        return functions

    @property
    def unenforced_limits(self) -> tuple[str, ...]:
        """Describe the limits of the scorers' processes that this machine cannot enforce."""
        descriptions: list[str] = []
        for _, scorer in self._scorers.values():
            descriptions += scorer.unenforced_limits
        if self._filters is not None:
            descriptions += self._filters.unenforced_limits
        # Drop repeated descriptions.
        return tuple(dict.fromkeys(descriptions))

    def start_early_rewards(self, group_index: int, group: SequenceGroup) -> None:
        """Start to compute a finished group's rewards in threads, while other groups are still sampled.

        `gather_early_rewards` returns the rewards. ``group_index``: index of the group in its round.
        """
        # Skip rows on which the engine or the environment failed, and rows that the environment rewarded.
        rollouts = to_rollouts([group])
        prompts = group.prompt.repeat(len(rollouts))
        rewarded_rows = environment_results(rollouts)
        failed_rows = _failed_rows(rollouts)
        rows = [row for row in range(len(rollouts)) if row not in rewarded_rows and row not in failed_rows]
        if not rows:
            return

        # Row indices in the round, whose groups all have the same number of rows.
        round_rows = [group_index * len(rollouts) + row for row in rows]
        filter_future = None
        if self._filters is not None:
            samples = self._make_samples(prompts, rollouts, rows, self._filters.optional_fields)
            response_ids = self._response_ids(rollouts.rows(rows))
            filter_future = self._submit(
                FILTERS, _filter_rows, self._filters, round_rows, samples, response_ids
            )

        for name, scorer in self._functions.items():
            samples = self._make_samples(prompts, rollouts, rows, scorer.optional_fields)
            thread_name = name
            if isinstance(scorer, SourceRewards):
                # All rows of a group are of one source.
                thread_name = scorer.function_name(samples[0]) or name
            sample_by_row = dict(zip(round_rows, samples, strict=True))
            self._submit(thread_name, _score_rows, name, scorer, sample_by_row, filter_future)

    def _submit(
        self, thread_name: str, compute: Callable[..., _EarlyAnswers], *arguments: Any
    ) -> Future[_EarlyAnswers]:
        """Queue a call of ``compute`` in the thread ``thread_name``; return its future.

        Each name has one thread, which executes its calls in order.
        """
        if thread_name not in self._executors:
            self._executors[thread_name] = ThreadPoolExecutor(1, thread_name_prefix=f"rewards {thread_name}")
        future = self._executors[thread_name].submit(compute, *arguments)
        self._early_futures.append(future)
        return future

    def gather_early_rewards(self, replica_group: ReplicaGroup) -> EarlyRewards:
        """Gather the rewards from all calls of `start_early_rewards` on all ranks since the last gather.

        Returns nested dictionaries: scorer name -> row in the round -> reward. Waits until all of these
        rewards are computed. Collective over the replica group.
        """
        rewards: dict[str, dict[int, Answer]] = {name: {} for name in self._functions}
        if not rewards:
            return rewards
        if self._filters is not None:
            rewards[FILTERS] = {}

        futures = self._early_futures
        self._early_futures = []
        local_results = [future.result() for future in futures]
        for rank_results in replica_group.gather_objects(local_results):
            for name, answers in rank_results:
                rewards[name].update(answers)
        return rewards

    def run_filters(
        self,
        prompts: PromptBatch,
        rollouts: Rollouts,
        replica_group: ReplicaGroup,
        early_rewards: EarlyRewards | None = None,
    ) -> FilteredRows:
        """Run the configured filters on all rows; return the removed rows, equal on every rank.

        Rows on which the engine or the environment failed are not passed to the filters. Rows in
        ``early_rewards[FILTERS]`` are not passed either: they were filtered while other rows were sampled.
        ``prompts``: prompt of each row. Collective over the replica group.
        """
        filters = self._filters
        if filters is None:
            return NOTHING_FILTERED

        # Filter this rank's rows, without rows that were filtered during sampling.
        early_results = (early_rewards or {}).get(FILTERS, {})
        failed_rows = _failed_rows(rollouts)
        rank_rows = _rows_of_rank(rollouts, replica_group, filters)
        rows = [row for row in rank_rows if row not in early_results and row not in failed_rows]
        samples = self._make_samples(prompts, rollouts, rows, filters.optional_fields)
        new_results = filters.compute_answers(samples, self._response_ids(rollouts.rows(rows)))

        filter_results = dict(early_results)
        for rank_results in replica_group.gather_objects(dict(zip(rows, new_results, strict=True))):
            filter_results |= rank_results

        # A filter's result has the reason `FILTERED` and the filter's name as message if the filter removes
        # the row, and another reason if the filter raised an exception. In the second case the row counts as
        # failed, not as removed.
        filter_names: dict[int, str] = {}
        failures: dict[int, Answer] = {}
        for row, result in filter_results.items():
            if result.reason == FILTERED:
                filter_names[row] = result.message
            elif result.reason is not None:
                failures[row] = result

        # Every rank has the results of all ranks, so these are counts over the whole batch.
        counts = Counter(filter_names.values())
        metrics = Metrics()
        for name in filters.config.names:
            metrics += Metrics.mean(f"filtered/{name}", float(counts[name]), float(len(rollouts)))
        return FilteredRows(filter_names, failures, filters.config.reward, metrics)

    def infer(
        self,
        prompts: PromptBatch,
        rollouts: Rollouts,
        replica_group: ReplicaGroup,
        early_rewards: EarlyRewards | None = None,
        filtered: FilteredRows = NOTHING_FILTERED,
    ) -> list[ScorerResult]:
        """Compute the rewards of this rank's rows with each scorer. Collective over the replica group.

        A row is not passed to a scorer if
        - an environment rewarded the row, or a filter removed it and `on_filtered` is `reward`: the first
          scorer's result contains this reward, and the rewards of the other scorers are 0;
        - a filter removed the row, and `on_filtered` is `drop`;
        - the engine, the environment, a filter or an earlier scorer failed on the row;
        - ``early_rewards`` has the scorer's reward of the row, which the result contains.

        Arguments:
            prompts: prompt of each row.
            rollouts: rows of the whole batch.
            replica_group: ranks that hold the batch.
            early_rewards: rewards from `gather_early_rewards`, or None.
            filtered: rows that filters removed, from `run_filters`.
        """
        # Collect the rewards and failures from environments. An evaluator computes the rewards itself, so
        # drop the environments' rewards, but not their failures.
        existing_results = environment_results(rollouts)
        if self._ignores_environments:
            environment_failures: dict[int, Answer] = {}
            for row, row_result in existing_results.items():
                if row_result.reason is not None:
                    environment_failures[row] = row_result
            existing_results = environment_failures

        # Add the fixed rewards of rows that filters removed, and the failures of filters.
        existing_results |= filtered.answers
        failed_rows = _failed_rows(rollouts)
        skipped_rows = failed_rows | filtered.dropped_rows

        # Run the scorers in the same order on every rank: `_run_scorer` is collective.
        results: list[ScorerResult] = []
        for name, (weight, scorer) in self._scorers.items():
            rows = _rows_of_rank(rollouts, replica_group, scorer)
            all_results = dict((early_rewards or {}).get(name, {}))
            all_results |= existing_results
            available_results = {
                row: row_result for row, row_result in all_results.items() if row not in skipped_rows
            }
            fields = scorer.optional_fields
            make_samples = partial(self._make_samples, prompts, rollouts, optional_fields=fields)
            result = _run_scorer(
                name,
                weight,
                scorer,
                make_samples,
                rows,
                available_results,
                skipped_rows,
                replica_group,
            )

            # The scorer has less work because of filters and of failures of earlier scorers. Rows on which
            # the engine or the environment failed do not count.
            avoided_rows = (skipped_rows - failed_rows) | filtered.filter_by_row.keys()
            results.append(self._add_avoided_calls_metric(result, rows, avoided_rows))
            skipped_rows = skipped_rows | set(result.reasons)

            # The first scorer's result contains the rewards of environments: the other scorers add 0.
            for row, row_result in existing_results.items():
                if row_result.reason is None:
                    existing_results[row] = Answer(reason=None, reward=0.0)
        return results

    def _add_avoided_calls_metric(
        self, result: ScorerResult, rows: Sequence[int], avoided_rows: Set[int]
    ) -> ScorerResult:
        """Add the fraction of rows that did not need a call of the scorer to the scorer's metrics.

        The metric is ``reward/saved/SCORER``. ``rows`` are this rank's rows. The scorer was not called for
        ``avoided_rows``, because a filter removed the row or an earlier scorer failed on it. Without filters
        the first scorer has no such rows, and the metric is not added.
        """
        is_first = result.name == self.first_scorer
        if self._filters is None and is_first:
            return result
        avoided_count = len(avoided_rows & set(rows))
        avoided_share = Metrics.mean(f"reward/saved/{result.name}", float(avoided_count), float(len(rows)))
        return replace(result, metrics=result.metrics + avoided_share)

    def _make_samples(
        self,
        prompts: PromptBatch,
        rollouts: Rollouts,
        rows: list[int],
        optional_fields: frozenset[str],
    ) -> list[Sample]:
        """Return one sample per row, with the ``optional_fields`` of `Sample` that a scorer needs."""
        # Every scorer gets these fields. Turns and tokens are slow to build, so only some scorers get them.
        selected_rollouts = rollouts.rows(rows)
        fields: dict[str, Sequence[Any]] = {
            "prompt": [prompts.prompts[row] for row in rows],
            "response": self.responses(selected_rollouts),
            "ground_truth": [prompts.ground_truths[row] for row in rows],
            "metadata": [dict(prompts.metadata[row]) for row in rows],
        }

        # Omit the first turn: the prompt is a separate field.
        if TURNS in optional_fields:
            fields[TURNS] = [turns[1:] for turns in self.conversations(selected_rollouts)]
        if TOKENS in optional_fields:
            fields[TOKENS] = collect_token_fields(selected_rollouts)
        if GROUP in optional_fields:
            fields[GROUP] = selected_rollouts.group.tolist()
        if SOURCE in optional_fields:
            sources = prompts.sources or (None,) * len(prompts)
            fields[SOURCE] = [sources[row] for row in rows]

        # Transpose: from a list per field to a mapping per sample.
        return [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]

    def responses(self, rollouts: Rollouts) -> list[str]:
        """Decode each row's response, without special tokens that `VisibleText` hides."""
        return self._visible_text.decode_all(self._response_ids(rollouts))

    @staticmethod
    def _response_ids(rollouts: Rollouts) -> list[list[int]]:
        """Return, for each row, the ids of the tokens that the policy sampled."""
        # Convert the sampled tokens of all rows at once, then cut the list at the end of each row.
        tokens = rollouts.tokens[rollouts.response_mask].tolist()
        counts = row_counts(rollouts.response_mask, rollouts.lengths)
        ends = counts.cumsum(0).tolist()
        return [tokens[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]

    def conversations(self, rollouts: Rollouts) -> list[list[dict[str, Any]]]:
        """Return the turns of each row: first ``prompt``, then alternately ``policy`` and ``environment``.

        A turn is a mapping with ``role``, ``content`` and ``tokens``. ``content`` is the text, including
        special tokens, and ``tokens`` is the number of tokens in the turn. A turn of the policy also has
        ``tool_calls``, if any were parsed from it.
        """
        rows = zip(
            split_rows(rollouts.tokens, rollouts.lengths),
            split_rows(rollouts.response_mask, rollouts.lengths),
            rollouts.outcomes or (None,) * len(rollouts),
            strict=True,
        )
        return [
            self._split_into_turns(tokens.tolist(), mask.tolist(), outcome) for tokens, mask, outcome in rows
        ]

    def _split_into_turns(
        self, tokens: list[int], mask: list[bool], outcome: Outcome | None
    ) -> list[dict[str, Any]]:
        """Return the turns of one row: each run of consecutive tokens with equal ``mask`` is a turn."""
        # The environment's outcome has the parsed tool calls of each turn of the policy, in order.
        calls_by_turn: Sequence[Any] = ()
        if outcome:
            calls_by_turn = outcome.calls
        remaining_calls = iter(calls_by_turn)
        turns: list[dict[str, Any]] = []
        for is_policy, turn_tokens in groupby(zip(tokens, mask, strict=True), key=itemgetter(1)):
            token_ids = [token for token, _ in turn_tokens]
            if is_policy:
                role = "policy"
            elif turns:
                role = "environment"
            else:
                role = "prompt"

            turn = {
                "role": role,
                "content": self._tokenizer.decode(token_ids),
                "tokens": len(token_ids),
            }
            if is_policy:
                turn_calls = next(remaining_calls, ())
                if turn_calls:
                    turn["tool_calls"] = list(turn_calls)
            turns.append(turn)

        return turns

    def close(self) -> None:
        """Shut down the threads of `start_early_rewards`, and the processes of scorers and filters.

        These threads compute the rewards of finished groups while other groups are still sampled.
        """
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
        for _, scorer in self._scorers.values():
            scorer.close()
        if self._filters is not None:
            self._filters.close()


class _MakeSamples(Protocol):
    """Type of a function that returns a sample per row, with the fields that a scorer needs."""

    def __call__(self, rows: list[int]) -> list[Sample]: ...


def _run_scorer(
    name: str,
    weight: float,
    scorer: Scorer,
    make_samples: _MakeSamples,
    rows: list[int],
    available_results: Mapping[int, Answer],
    skipped_rows: Set[int],
    replica_group: ReplicaGroup,
) -> ScorerResult:
    """Compute the rewards of ``rows``, this rank's rows, with one scorer. Collective over the replica group.

    Rows in ``available_results`` already have a reward or a failure: they are not passed to the scorer, and
    the returned result contains the available rewards and failures. Rows in ``skipped_rows`` are not passed
    to the scorer, either; their reward is NaN.
    """
    # Run the scorer on the rows without an available result.
    new_rows = [row for row in rows if row not in available_results and row not in skipped_rows]
    new_result = scorer.score(make_samples(new_rows))
    result_by_row = dict(zip(new_rows, new_result.answers, strict=True))
    result_by_row |= {row: available_results[row] for row in rows if row in available_results}

    # Skipped rows have no result: their rewards stay NaN.
    rows_with_result = sorted(result_by_row)
    result = RewardResult([result_by_row[row] for row in rows_with_result], new_result.extra_metrics)
    index_by_row = {row: index for index, row in enumerate(rows)}
    indices = torch.tensor([index_by_row[row] for row in rows_with_result], dtype=torch.long)
    values = {"rewards": scatter_values(result.rewards, indices, len(rows))}

    # `failure.row` is an index of ``rows_with_result``: convert it to a row of the batch.
    failures: dict[int, tuple[str, str]] = {}
    for failure in result.failures:
        message = last_lines(failure.message, MAX_REASON_CHARACTERS)
        failures[rows_with_result[failure.row]] = (failure.reason, message)

    # All ranks must return the same columns, although a function may return different components per sample.
    rank_results = replica_group.gather_objects((set(result.components), failures))
    component_names: set[str] = set()
    all_failures: dict[int, tuple[str, str]] = {}
    for rank_components, rank_failures in rank_results:
        component_names |= rank_components
        all_failures |= rank_failures
    for component in sorted(component_names):
        component_values = result.components.get(component)
        values[COMPONENT + component] = scatter_values(component_values, indices, len(rows))

    no_tokens = torch.zeros(len(rows), dtype=torch.long)
    return ScorerResult(
        name,
        weight,
        RowShard(torch.tensor(rows, dtype=torch.long), no_tokens, {}, values),
        result.metrics({reason for reason, _ in all_failures.values()}),
        result.failures,
        {row: f"{reason}: {message}" for row, (reason, message) in all_failures.items()},
    )


def scatter_values(values: Tensor | None, indices: Tensor, count: int) -> Tensor:
    """Return a tensor [count] float32 with ``values`` at ``indices`` and NaN elsewhere.

    Without ``values``, all elements are NaN.
    """
    result = torch.full((count,), float("nan"))
    if values is not None:
        result[indices] = values
    return result


def _make_scorer(name: str, config: RewardConfig, evaluator_key: str) -> Scorer:
    """Create the scorer that the section `reward.NAME` configures.

    Errors about the user's function print its configuration key: ``evaluator_key``, or `reward.function` if
    ``evaluator_key`` is empty.
    """
    if name == FUNCTION:
        return FunctionReward(config, key=evaluator_key)

    make_scorer_by_name = {"code": make_code_reward, "http": HttpReward, "judge": JudgeReward}
    section = getattr(config, name)
    return make_scorer_by_name[name](section)


def _filter_rows(
    filters: ResponseFilters,
    rows: Sequence[int],
    samples: Sequence[Sample],
    response_ids: Sequence[Sequence[int]],
) -> _EarlyAnswers:
    """Run the filters on the samples of ``rows``; return (`FILTERS`, results).

    The results map each row to an `Answer`: the row passes, a filter removes it, or a filter fails on it. For
    the rewards of a scorer, `_score_rows` returns the scorer's name in place of the constant `FILTERS`.
    ``response_ids``: token ids of the responses.
    """
    filter_results = filters.compute_answers(samples, response_ids)
    return FILTERS, dict(zip(rows, filter_results, strict=True))


def _score_rows(
    name: str,
    scorer: FunctionScorer,
    sample_by_row: Mapping[int, Sample],
    filter_future: Future[_EarlyAnswers] | None,
) -> _EarlyAnswers:
    """Run a scorer on the samples that pass the filters; return (name of the scorer, results).

    The results map each row to an `Answer`: a reward, or the reason of a failure. ``filter_future`` is the
    future of the call of `_filter_rows` for these samples, or None without filters.
    """
    if filter_future is not None:
        _, filter_results = filter_future.result()
        passed_rows = [row for row in sample_by_row if filter_results[row].reason is None]
        sample_by_row = {row: sample_by_row[row] for row in passed_rows}
    scorer_results = scorer.compute_answers(list(sample_by_row.values()))
    return name, dict(zip(sample_by_row, scorer_results, strict=True))


def _failed_rows(rollouts: Rollouts) -> frozenset[int]:
    """Return the indices of the rows on which the engine or the environment failed."""
    return frozenset((rollouts.finish_reason == FINISH_FAILED).nonzero().flatten().tolist())


def _rows_of_rank(
    rollouts: Rollouts, replica_group: ReplicaGroup, scorer: Scorer | ResponseFilters
) -> list[int]:
    """Return the rows for which this rank runs a scorer or filter.

    Rows are assigned to ranks round robin, or group by group if the scorer needs groups. A server's rows are
    all assigned to the first rank.
    """
    rank_in_group = replica_group.ranks.index(replica_group.rank)
    rank_count = len(replica_group.ranks)

    if isinstance(scorer, HttpReward | JudgeReward):
        if rank_in_group == 0:
            return list(range(len(rollouts)))
        return []
    if GROUP not in scorer.optional_fields:
        return list(range(rank_in_group, len(rollouts), rank_count))
    groups = rollouts.group.tolist()
    return [row for row, group in enumerate(groups) if group % rank_count == rank_in_group]


def collect_token_fields(rollouts: Rollouts) -> list[dict[str, list]]:
    """Return the token ids of each row's ``prompt`` and ``response``, with ``mask`` and ``log_probs``.

    The response begins with the policy's first token. ``mask`` is true for tokens of the policy.
    ``log_probs`` are the engine's log-probs of these tokens, and 0 for other tokens.
    """
    rows = zip(
        split_rows(rollouts.tokens, rollouts.lengths),
        split_rows(rollouts.response_mask, rollouts.lengths),
        split_rows(rollouts.rollout_log_probs, rollouts.lengths),
        strict=True,
    )

    token_fields: list[dict[str, list]] = []
    for token_ids, mask, log_probs in rows:
        # If the engine failed, a row can consist of the prompt only.
        response_start = len(token_ids)
        if mask.any():
            response_start = int(mask.int().argmax())
        token_fields.append({
            "prompt": token_ids[:response_start].tolist(),
            "response": token_ids[response_start:].tolist(),
            "mask": mask[response_start:].tolist(),
            "log_probs": log_probs[response_start:].tolist(),
        })  # fmt: skip
    return token_fields


def environment_results(rollouts: Rollouts) -> dict[int, Answer]:
    """Return the rewards and failures from environments, by row.

    Rows without a reward or failure from an environment are absent.
    """
    results: dict[int, Answer] = {}
    for row, outcome in enumerate(rollouts.outcomes or ()):
        if outcome is None:
            continue
        if outcome.failure is not None:
            results[row] = Answer(outcome.failure, outcome.message)
        elif outcome.reward is not None:
            results[row] = Answer(reason=None, reward=outcome.reward, components=outcome.components)
    return results


class RewardModel:
    """Frozen model with a scalar head, whose output at a row's last token is the row's reward.

    This is the convention of transformers' ``*ForSequenceClassification`` classes for causal models.

    ``name``: name of the model's section in `reward.models` and of its reward component.
    ``weight``: weight of the model's rewards in the sum over scorers and reward models.
    ``role``: role that runs the model.
    """

    def __init__(self, name: str, weight: float, role: ModelRole) -> None:
        self.name = name
        self.weight = weight
        self.role = role

    def infer(self, batch: Any) -> RowShard:
        """Return the rewards of this rank's rows as ``values[name]`` of a shard, [b] float32.

        A reward is NaN if the model's output is not finite. ``batch`` has the fields that `ModelRole.infer`
        needs. Collective over the role's ranks.
        """
        # Use the output at a row's last token, unlike log-probs, which use the output at the previous token.
        output_mask = torch.zeros(len(batch.tokens), dtype=torch.bool)
        output_mask[last_token_indices(batch.lengths)] = True
        micro_outputs = self.role.forward(batch, output_mask, from_previous_token=False)

        row_indices: list[int] = []
        for micro in micro_outputs:
            row_indices.extend(micro.rows)
        rows = torch.tensor(row_indices, dtype=torch.long)
        rewards = torch.zeros(0)
        if micro_outputs:
            # One value per token, which is 0 at all tokens except the last token of each row.
            values = torch.cat([micro.outputs[0] for micro in micro_outputs]).float().cpu()
            rewards = values[last_token_indices(batch.lengths[rows])]
        rewards = torch.where(rewards.isfinite(), rewards, float("nan"))
        return RowShard(rows, torch.zeros_like(rows), {}, {self.name: rewards})


def last_token_indices(lengths: Tensor) -> Tensor:
    """Return the index of each row's last token in the ragged batch: [B] int64."""
    return lengths.cumsum(0) - 1
