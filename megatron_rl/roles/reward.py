"""Rewards of responses: by Python functions and servers outside the training process, and by reward models.

The one idea: each rank rewards its share of the rows and returns them as a `RowShard`, as a role with a model
does; the step gathers the shards of all scorers and sums them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl.config.sections.filters import FiltersConfig
from megatron_rl.config.sections.rewards import FUNCTION, RewardConfig
from megatron_rl.data.chat_format import VisibleText
from megatron_rl.distributed.exchange import ReplicaGroup, RowShard
from megatron_rl.metrics import Metrics
from megatron_rl.rewards.filters import FILTERED, FILTERS, NOTHING_FILTERED, FilteredRows, ResponseFilters
from megatron_rl.rewards.function import (
    Failure,
    FunctionReward,
    RewardResult,
    Sample,
    code_reward,
    last_lines,
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
"""Prefix of reward components among a shard's values, so that none is mistaken for ``rewards``."""
NO_REWARD = "no_reward"
"""Reason of a row that no scorer rewards."""
MAX_REASON_CHARACTERS = 600
"""Length to which the message of a failed reward is cut before it is stored with its sample."""
_NO_SCORER = "the environment returned no reward, and no other scorer is configured"

EarlyRewards = Mapping[str, Mapping[int, Answer]]
"""Rewards computed while other groups were still sampled: name of the scorer -> row -> answer."""


class Scorer(Protocol):
    """Source of rewards outside the training process: a function's worker processes, or a server.

    ``takes``: optional fields of `Sample` that it reads, such as `TURNS`.
    ``missing``: descriptions of the limits of its processes that this machine does not enforce.
    """

    takes: frozenset[str]
    missing: tuple[str, ...]

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Return the rewards of the samples, in the order of ``samples``."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


class NullScorer:
    """Scorer with the same answer for every sample, for a run without any other scorer."""

    takes: frozenset[str] = frozenset()
    missing: tuple[str, ...] = ()

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """See `Scorer.score`."""
        return RewardResult([self._answer] * len(samples))

    def close(self) -> None:
        """See `Scorer.close`."""


@dataclass(frozen=True)
class ScorerResult:
    """Rewards by one scorer of this rank's share of the rows.

    Example: on a rank that rewards rows 0 and 2, a function that returned ``{"reward": 1.0, "format": 0.5}``
    and then raised has ``shard.values`` ``{"rewards": [1.0, nan], "component/format": [0.5, nan]}`` and
    ``reasons={2: "exception: ..."}``.
    """

    name: str
    """Name of the scorer: ``function``, ``code``, ``http`` or ``judge``."""
    weight: float
    """Factor of its rewards in the sum over scorers."""
    shard: RowShard
    """``rewards`` [b] float32 and components of this rank's rows, NaN if they failed."""
    metrics: Metrics
    """Metrics of the scorer on this rank."""
    failures: tuple[Failure, ...]
    """Rewards that failed on this rank."""
    reasons: Mapping[int, str]
    """Reason of each row that failed on any rank."""


class RewardRole:
    """Rewards of rows by every configured scorer, computed outside the training process.

    Functions and tests reward each rank's share of the rows, in worker processes of the rank. Only the first
    rank sends requests to servers, so that request limits, cached answers and a server's health count for the
    whole job.

    ``key``: configuration key of a function that is not the run's own, such as an evaluator's. Such a
    function also rewards rows that an environment has rewarded.
    ``filters``: filters of training samples, see `filter`.
    ``learns_from_rewards``: whether the algorithm needs rewards; if so, and without any scorer, rows are
        invalid.
    """

    def __init__(
        self,
        config: RewardConfig,
        tokenizer: Any,
        key: str = "",
        filters: FiltersConfig | None = None,
        learns_from_rewards: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._visible = VisibleText(tokenizer)
        self._ignores_environments = bool(key)
        self._scorers: dict[str, tuple[float, Scorer]] = {}
        # One worker: a function's processes handle one list of samples at a time.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rewards")
        self._early: list[Future[tuple[str, dict[int, Answer]]]] = []
        self._filters: ResponseFilters | None = None

        try:
            if filters is not None and filters.names:
                self._filters = ResponseFilters(filters, config)
            for name, weight in config.scorers.items():
                self._scorers[name] = (
                    weight,
                    _make_scorer(name, config, key),
                )
        except BaseException:
            # The scorers before the one that failed have started processes.
            self.close()
            raise

        if not self._scorers:
            # With reward models a row without another reward is valid, and this scorer adds nothing.
            answer = Answer(NO_REWARD, _NO_SCORER)
            if config.models or not learns_from_rewards:
                answer = Answer(None, "", 0.0)
            self._scorers[FUNCTION] = (config.weight, NullScorer(answer))

    @property
    def first_scorer(self) -> str:
        """Return the name of the first scorer, whose rewards count for accuracies."""
        return next(iter(self._scorers))

    @property
    def scorer_count(self) -> int:
        """Return the number of scorers, at least 1."""
        return len(self._scorers)

    @property
    def has_functions(self) -> bool:
        """Return whether a scorer can reward a group before the others are finished, see `start_early`."""
        return bool(self._functions)

    @property
    def _functions(self) -> dict[str, FunctionReward]:
        """Return the scorers that run on this rank, by name: servers are only called for whole batches."""
        functions: dict[str, FunctionReward] = {}
        for name, (_, scorer) in self._scorers.items():
            if isinstance(scorer, FunctionReward):
                functions[name] = scorer
        return functions

    @property
    def not_enforced(self) -> tuple[str, ...]:
        """Describe the limits of the scorers' processes that this machine does not enforce."""
        sources: list[Scorer | ResponseFilters] = [scorer for _, scorer in self._scorers.values()]
        if self._filters is not None:
            sources.append(self._filters)
        return tuple(dict.fromkeys(text for source in sources for text in source.missing))

    def start_early(self, index: int, group: SequenceGroup) -> None:
        """Start to reward a finished group in a thread, while other groups are sampled; see `gather_early`.

        ``index``: the group's index in its round.
        """
        # Rows on which engine or environment failed, or that the environment rewarded, need no call.
        rollouts = to_rollouts([group])
        prompts = group.prompt.repeat(len(rollouts))
        answers = environment_answers(rollouts)
        failed = _failed_rows(rollouts)
        rows = [row for row in range(len(rollouts)) if row not in answers and row not in failed]
        if not rows:
            return

        # All groups of a round have as many rows.
        round_rows = [index * len(rollouts) + row for row in rows]
        verdicts = None
        if self._filters is not None:
            samples = self._samples(prompts, rollouts, rows, self._filters.takes)
            ids = self._response_ids(rollouts.rows(rows))
            verdicts = self._executor.submit(_filter_rows, self._filters, round_rows, samples, ids)
            self._early.append(verdicts)

        # After the filters in the same thread, so that a scorer can wait for their verdicts.
        for name, scorer in self._functions.items():
            samples = self._samples(prompts, rollouts, rows, scorer.takes)
            by_row = dict(zip(round_rows, samples, strict=True))
            self._early.append(self._executor.submit(_score_rows, name, scorer, by_row, verdicts))

    def gather_early(self, members: ReplicaGroup) -> EarlyRewards:
        """Return the rewards of the groups started since the last call, by row of the round.

        Collective over the members.
        """
        rewards: dict[str, dict[int, Answer]] = {name: {} for name in self._functions}
        if not rewards:
            return rewards
        if self._filters is not None:
            rewards[FILTERS] = {}

        # Waits for the rewards that are still being computed.
        futures = self._early
        self._early = []
        for results in members.gather_objects([future.result() for future in futures]):
            for name, answers in results:
                rewards[name].update(answers)
        return rewards

    def filter(
        self,
        prompts: PromptBatch,
        rollouts: Rollouts,
        members: ReplicaGroup,
        early: EarlyRewards | None = None,
    ) -> FilteredRows:
        """Return the rows that the run's filters remove, the same value on every rank.

        ``prompts`` has one entry per row; ``early`` has the verdicts on rows that were filtered while others
        were sampled. Rows on which the engine or the environment failed reach no filter. Collective over the
        members.
        """
        filters = self._filters
        if filters is None:
            return NOTHING_FILTERED

        # Each rank filters its share of the rows.
        available = (early or {}).get(FILTERS, {})
        failed = _failed_rows(rollouts)
        share = _rows_of_rank(rollouts, members, filters)
        rows = [row for row in share if row not in available and row not in failed]
        samples = self._samples(prompts, rollouts, rows, filters.takes)
        verdicts = filters.answers(samples, self._response_ids(rollouts.rows(rows)))

        answers = dict(available)
        for by_row in members.gather_objects(dict(zip(rows, verdicts, strict=True))):
            answers |= by_row

        # A filter that raises has failed on the row: it is reported, not removed by that filter.
        names = {row: answer.message for row, answer in answers.items() if answer.reason == FILTERED}
        failures = {row: answer for row, answer in answers.items() if answer.reason not in (None, FILTERED)}

        # Every rank has all answers, so the counts are of the whole batch.
        counts = Counter(names.values())
        metrics = Metrics()
        for name in filters.config.names:
            metrics += Metrics.mean(f"filtered/{name}", float(counts[name]), float(len(rollouts)))
        return FilteredRows(names, failures, filters.config.reward, metrics)

    def infer(
        self,
        prompts: PromptBatch,
        rollouts: Rollouts,
        members: ReplicaGroup,
        early: EarlyRewards | None = None,
        filtered: FilteredRows = NOTHING_FILTERED,
    ) -> list[ScorerResult]:
        """Return the rewards of each scorer for this rank's share of the rows.

        ``prompts`` has one entry per row. A row that an environment rewarded reaches no scorer: its reward
        counts as the first scorer's, and the other scorers' rewards are 0. The same holds for a row that is
        ``filtered`` with a reward. Rows that are dropped, on which the engine or the environment failed, or
        that an earlier scorer found invalid are not sent on, and rows with ``early`` rewards are not rewarded
        again. Collective over the members.
        """
        answers = environment_answers(rollouts)
        if self._ignores_environments:
            answers = {row: answer for row, answer in answers.items() if answer.reason is not None}
        answers |= filtered.answers
        failed = _failed_rows(rollouts)
        skipped = failed | filtered.dropped

        # In the same order on every rank, since each scorer gathers.
        results: list[ScorerResult] = []
        for name, (weight, scorer) in self._scorers.items():
            rows = _rows_of_rank(rollouts, members, scorer)
            available = {**(early or {}).get(name, {}), **answers}
            available = {row: answer for row, answer in available.items() if row not in skipped}
            make_samples = partial(self._samples, prompts, rollouts, takes=scorer.takes)
            result = _run_scorer(
                name,
                weight,
                scorer,
                make_samples,
                rows,
                available,
                skipped,
                members,
            )
            saved = (skipped - failed) | filtered.names.keys()
            results.append(self._with_saved_calls(result, rows, saved))
            skipped = skipped | set(result.reasons)

            # The environment's reward counts once, as the first scorer's: later scorers add 0.
            for row, answer in answers.items():
                if answer.reason is None:
                    answers[row] = Answer(None, "", 0.0)
        return results

    def _with_saved_calls(
        self, result: ScorerResult, rows: Sequence[int], saved_rows: Set[int]
    ) -> ScorerResult:
        """Add to a scorer's metrics the share of its rows that filters or earlier scorers settled before."""
        is_first = result.name == self.first_scorer
        if self._filters is None and is_first:
            return result
        saved = len(saved_rows & set(rows))
        share = Metrics.mean(f"reward/saved/{result.name}", float(saved), float(len(rows)))
        return replace(result, metrics=result.metrics + share)

    def _samples(
        self,
        prompts: PromptBatch,
        rollouts: Rollouts,
        rows: list[int],
        takes: frozenset[str],
    ) -> list[Sample]:
        """Return the arguments of a scorer's calls for the rows, with the optional fields that it takes."""
        # Every scorer gets these; texts of turns and tokens are made only for scorers that read them.
        selected = rollouts.rows(rows)
        fields: dict[str, Sequence[Any]] = {
            "prompt": [prompts.prompts[row] for row in rows],
            "response": self.responses(selected),
            "ground_truth": [prompts.ground_truths[row] for row in rows],
            "metadata": [dict(prompts.metadata[row]) for row in rows],
        }

        # Without the prompt, which is a field of its own.
        if TURNS in takes:
            fields[TURNS] = [turns[1:] for turns in self.conversations(selected)]
        if TOKENS in takes:
            fields[TOKENS] = tokens_of(selected)
        if GROUP in takes:
            fields[GROUP] = selected.group.tolist()

        # From columns to one mapping per sample.
        return [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]

    def responses(self, rollouts: Rollouts) -> list[str]:
        """Return the response of each row as text, see `VisibleText`."""
        return self._visible.texts(self._response_ids(rollouts))

    @staticmethod
    def _response_ids(rollouts: Rollouts) -> list[list[int]]:
        """Return the ids of the policy's tokens in each row."""
        # The policy's tokens of all rows are consecutive: cut them at the ends of the rows.
        tokens = rollouts.tokens[rollouts.response_mask].tolist()
        counts = row_counts(rollouts.response_mask, rollouts.lengths)
        ends = counts.cumsum(0).tolist()
        return [tokens[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]

    def conversations(self, rollouts: Rollouts) -> list[list[dict[str, Any]]]:
        """Return the turns of each row: the ``prompt``, then ``policy`` and ``environment`` alternately.

        A turn has its ``role``, its ``content`` with special tokens and its number of ``tokens``; a turn of
        the policy has the ``tool_calls`` that were parsed from it.
        """
        rows = zip(
            split_rows(rollouts.tokens, rollouts.lengths),
            split_rows(rollouts.response_mask, rollouts.lengths),
            rollouts.outcomes or (None,) * len(rollouts),
            strict=True,
        )
        return [self._turns(tokens.tolist(), mask.tolist(), outcome) for tokens, mask, outcome in rows]

    def _turns(self, tokens: list[int], mask: list[bool], outcome: Outcome | None) -> list[dict[str, Any]]:
        """Return the turns of one row: each run of equal ``mask`` is a turn."""
        # The environment reports the parsed calls of each turn of the policy, in order.
        calls: Sequence[Any] = ()
        if outcome:
            calls = outcome.calls
        calls_by_turn = iter(calls)
        turns: list[dict[str, Any]] = []
        for is_policy, run in groupby(zip(tokens, mask, strict=True), key=itemgetter(1)):
            ids = [token for token, _ in run]
            if is_policy:
                role = "policy"
            elif turns:
                role = "environment"
            else:
                role = "prompt"

            turn = {
                "role": role,
                "content": self._tokenizer.decode(ids),
                "tokens": len(ids),
            }
            if is_policy:
                turn_calls = next(calls_by_turn, ())
                if turn_calls:
                    turn["tool_calls"] = list(turn_calls)
            turns.append(turn)

        return turns

    def close(self) -> None:
        """End the thread and the scorers' processes."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for _, scorer in self._scorers.values():
            scorer.close()
        if self._filters is not None:
            self._filters.close()


class _MakeSamples(Protocol):
    """Function that returns the arguments of a scorer's calls for the rows."""

    def __call__(self, rows: list[int]) -> list[Sample]: ...


def _run_scorer(
    name: str,
    weight: float,
    scorer: Scorer,
    make_samples: _MakeSamples,
    rows: list[int],
    available: Mapping[int, Answer],
    skipped: Set[int],
    members: ReplicaGroup,
) -> ScorerResult:
    """Compute the rewards of ``rows`` by one scorer, and return them with its ``available`` answers.

    ``skipped`` rows, and rows with an available answer, do not reach the scorer. Collective over the members.
    """
    # Compute the missing rewards.
    new_rows = [row for row in rows if row not in available and row not in skipped]
    new = scorer.score(make_samples(new_rows))
    answers = dict(zip(new_rows, new.answers, strict=True))
    answers |= {row: available[row] for row in rows if row in available}

    # Skipped rows have no answer: their rewards stay NaN.
    answered_rows = sorted(answers)
    result = RewardResult([answers[row] for row in answered_rows], new.extra_metrics)
    index_of = {row: index for index, row in enumerate(rows)}
    indices = torch.tensor([index_of[row] for row in answered_rows], dtype=torch.long)
    values = {"rewards": scatter_values(result.rewards, indices, len(rows))}

    # `failure.row` is an index into the answers: convert it to the row of the batch.
    failures: dict[int, tuple[str, str]] = {}
    for failure in result.failures:
        message = last_lines(failure.message, MAX_REASON_CHARACTERS)
        failures[answered_rows[failure.row]] = (failure.reason, message)

    # Every rank must return the same columns, even if the function returned other components for its samples.
    gathered = members.gather_objects((set(result.components), failures))
    component_names = set().union(*(names for names, _ in gathered))
    for component in sorted(component_names):
        component_values = result.components.get(component)
        values[COMPONENT + component] = scatter_values(component_values, indices, len(rows))

    all_failures: dict[int, tuple[str, str]] = {}
    for _, rank_failures in gathered:
        all_failures |= rank_failures

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
    """Return ``values`` at ``indices`` of ``count`` numbers, NaN elsewhere: [count] float32."""
    result = torch.full((count,), float("nan"))
    if values is not None:
        result[indices] = values
    return result


def _make_scorer(name: str, config: RewardConfig, key: str) -> Scorer:
    """Start the scorer of the setting ``name``; ``key`` is the function's configuration key in errors."""
    if name == FUNCTION:
        return FunctionReward(config, key=key)

    section = getattr(config, name)
    return {"code": code_reward, "http": HttpReward, "judge": JudgeReward}[name](section)


def _filter_rows(
    filters: ResponseFilters,
    rows: Sequence[int],
    samples: Sequence[Sample],
    ids: Sequence[Sequence[int]],
) -> tuple[str, dict[int, Answer]]:
    """Run the filters on the samples of ``rows``; return their name and their answers by row."""
    return FILTERS, dict(zip(rows, filters.answers(samples, ids), strict=True))


def _score_rows(
    name: str,
    scorer: FunctionReward,
    samples: Mapping[int, Sample],
    verdicts: Future[tuple[str, dict[int, Answer]]] | None,
) -> tuple[str, dict[int, Answer]]:
    """Run a scorer on the samples that pass the filters; return its name and its answers by row.

    ``samples`` are keyed by row. ``verdicts`` are the filters' answers, from an earlier task of this thread.
    """
    if verdicts is not None:
        _, answers = verdicts.result()
        samples = {row: sample for row, sample in samples.items() if answers[row].reason is None}
    return name, dict(zip(samples, scorer.answers(list(samples.values())), strict=True))


def _failed_rows(rollouts: Rollouts) -> frozenset[int]:
    """Return the rows on which the engine failed."""
    return frozenset((rollouts.finish_reason == FINISH_FAILED).nonzero().flatten().tolist())


def _rows_of_rank(rollouts: Rollouts, members: ReplicaGroup, scorer: Scorer | ResponseFilters) -> list[int]:
    """Return the rows that this rank rewards: whole groups if the scorer reads the group."""
    # Round robin over the ranks, by row or by group.
    rank = members.ranks.index(members.rank)
    rank_count = len(members.ranks)

    if isinstance(scorer, HttpReward | JudgeReward):
        if rank == 0:
            return list(range(len(rollouts)))
        return []
    if GROUP not in scorer.takes:
        return list(range(rank, len(rollouts), rank_count))
    return [row for row, group in enumerate(rollouts.group.tolist()) if group % rank_count == rank]


def tokens_of(rollouts: Rollouts) -> list[dict[str, list]]:
    """Return the token ids of each row's ``prompt`` and ``response``, with ``mask`` and ``log_probs``.

    The response begins with the policy's first token. ``mask`` is true for tokens of the policy;
    ``log_probs`` are the engine's, 0 for other tokens.
    """
    rows = zip(
        split_rows(rollouts.tokens, rollouts.lengths),
        split_rows(rollouts.response_mask, rollouts.lengths),
        split_rows(rollouts.rollout_log_probs, rollouts.lengths),
        strict=True,
    )

    result: list[dict[str, list]] = []
    for ids, mask, log_probs in rows:
        # A row that the engine failed on can be a prompt alone.
        start = len(ids)
        if mask.any():
            start = int(mask.int().argmax())
        result.append({
            "prompt": ids[:start].tolist(),
            "response": ids[start:].tolist(),
            "mask": mask[start:].tolist(),
            "log_probs": log_probs[start:].tolist(),
        })  # fmt: skip
    return result


def environment_answers(rollouts: Rollouts) -> dict[int, Answer]:
    """Return the rewards and failures of environments by row, without rows that they leave to scorers."""
    answers: dict[int, Answer] = {}
    for row, outcome in enumerate(rollouts.outcomes or ()):
        if outcome is None:
            continue
        if outcome.failure is not None:
            answers[row] = Answer(outcome.failure, outcome.message)
        elif outcome.reward is not None:
            answers[row] = Answer(None, "", outcome.reward, outcome.components)
    return answers


class RewardModel:
    """Frozen model whose head's value at a row's last token is the row's reward.

    That is how transformers' ``*ForSequenceClassification`` classes read a causal model.

    ``name``: name of its section in `reward.models`, and of its component.
    ``weight``: factor of its rewards in the sum over scorers and reward models.
    ``role``: role that runs the model.
    """

    def __init__(self, name: str, weight: float, role: ModelRole) -> None:
        self.name = name
        self.weight = weight
        self.role = role

    def infer(self, batch: Any) -> RowShard:
        """Return the rewards of this rank's rows under the model's name: [b] float32, NaN if not finite.

        ``batch`` as for `ModelRole.infer`. Collective over the role's ranks.
        """
        # ``before=False``: the output at a token itself, not at the token before it that predicts it.
        select = torch.zeros(len(batch.tokens), dtype=torch.bool)
        select[last_tokens(batch.lengths)] = True
        micro_outputs = self.role.forward(batch, select, before=False)

        rows = torch.tensor(
            [row for micro in micro_outputs for row in micro.rows],
            dtype=torch.long,
        )
        rewards = torch.zeros(0)
        if micro_outputs:
            # One value per token of the rows, 0 at all tokens but the last one of each row.
            values = torch.cat([micro.outputs[0] for micro in micro_outputs]).float().cpu()
            rewards = values[last_tokens(batch.lengths[rows])]
        rewards = torch.where(rewards.isfinite(), rewards, float("nan"))
        return RowShard(rows, torch.zeros_like(rows), {}, {self.name: rewards})


def last_tokens(lengths: Tensor) -> Tensor:
    """Return the position of each row's last token: [B] int64."""
    return lengths.cumsum(0) - 1
