"""The roles that judge responses: with a Python function, or a model that gives one score per row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import groupby
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_rl.config.sections.rewards import FUNCTION, RewardConfig
from megatron_rl.data.chat_format import VisibleText
from megatron_rl.distributed.exchange import ReplicaGroup, RowShard
from megatron_rl.metrics import Metrics
from megatron_rl.rewards.function import (
    Failure,
    FunctionReward,
    RewardResult,
    Sample,
    code_reward,
    ending,
)
from megatron_rl.rewards.servers import HttpReward, JudgeReward
from megatron_rl.rewards.worker import GROUP, TOKENS, TURNS, Answer
from megatron_rl.roles.model_role import ModelRole
from megatron_rl.rollout.collate import to_rollouts
from megatron_rl.rollout.types import SequenceGroup
from megatron_rl.types import FINISH_FAILED, PromptBatch, Rollouts, row_counts, split_rows

COMPONENT = "component/"
NO_REWARD = "no_reward"
LONGEST_REASON = 600
"""Characters of a failure's message that are stored beside its sample."""
_SILENT = "the environment returned no reward, and nothing else judges"


class Scorer(Protocol):
    """What judges samples outside the training process.

    ``takes`` are the names of what its samples hold beside the usual, see `Sample`; ``missing`` says in words
    what of its limits this machine does not enforce.
    """

    takes: frozenset[str]
    missing: tuple[str, ...]

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Return what it says of samples, in their order."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


class Silent:
    """Say of every sample the same: of those that no other scorer judges."""

    takes: frozenset[str] = frozenset()
    missing: tuple[str, ...] = ()

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """See `Scorer.score`."""
        return RewardResult([self._answer] * len(samples))

    def close(self) -> None:
        """See `Scorer.close`."""


class Beside:
    """Have one job after the other done in a thread, beside what the process does."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future, Callable[[], Any]]] = SimpleQueue()
        self._given: list[Future] = []
        self._thread: threading.Thread | None = None

    def do(self, job: Callable[[], Any]) -> None:
        """Do ``job`` after those before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
            self._thread.start()
        self._given.append(Future())
        self._jobs.put((self._given[-1], job))

    def results(self) -> list[Any]:
        """Wait for the jobs given since the last call and return what they returned; raise what they did."""
        given, self._given = self._given, []
        return [future.result() for future in given]

    def _run(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)


EarlyAnswers = Mapping[str, Mapping[int, Answer]]
"""What scorers said of rows while others were sampled, by the scorer's name and the row."""


class Judgement(NamedTuple):
    """Hold what the scorer ``name`` says of this rank's share of the rows, and ``weight`` of its rewards.

    ``reasons`` say of each row that failed on any rank why.
    """

    name: str
    weight: float
    shard: RowShard
    metrics: Metrics
    failures: tuple[Failure, ...]
    reasons: Mapping[int, str]


class RewardRole:
    """Score rows outside the training process, by every scorer that the configuration has.

    Functions and tests judge each rank's share of the rows, in processes of the rank. Servers are asked by
    the first rank alone: so limits of requests, what is kept of answers and what is known of a server's
    health hold for the whole job. ``leading`` is the name of the first of ``scorers`` scorers. ``key`` names
    the function to the user where it is another than the run's, which judges what environments rewarded too.
    """

    def __init__(self, config: RewardConfig, tokenizer: Any, key: str = "") -> None:
        self._tokenizer = tokenizer
        self._visible = VisibleText(tokenizer)
        self._own = bool(key)
        self._beside = Beside()
        self._scorers: dict[str, tuple[float, Scorer]] = {}
        try:
            for name, weight in config.scorers.items():
                self._scorers[name] = weight, _scorer(name, config, key)
        except BaseException:
            self.close()
            raise
        if not self._scorers:
            otherwise = Answer(None, "", 0.0) if config.models else Answer(NO_REWARD, _SILENT)
            self._scorers[FUNCTION] = config.weight, Silent(otherwise)
        self.leading, self.scorers = next(iter(self._scorers)), len(self._scorers)

    def begin(self, index: int, group: SequenceGroup) -> None:
        """Compute a finished group's rewards while others are sampled; see `early`.

        ``index`` is that of the group in its round.
        """
        rollouts = to_rollouts([group])
        prompts, known = group.prompt.repeat(len(rollouts)), environments_answers(rollouts)
        failed = (rollouts.finish_reason == FINISH_FAILED).tolist()
        rows = [row for row in range(len(rollouts)) if row not in known and not failed[row]]
        numbers = [index * len(rollouts) + row for row in rows]
        for name, scorer in self._functions.items() if rows else ():
            samples = self._samples(prompts, rollouts, rows, scorer.takes)
            self._beside.do(partial(_answers, name, scorer, numbers, samples))

    def early(self, members: ReplicaGroup) -> EarlyAnswers:
        """Return what was said of the groups begun since the last call. Collective over the members."""
        result: dict[str, dict[int, Answer]] = {name: {} for name in self._functions}
        if not result:
            return result
        for answered in members.gather_objects(self._beside.results()):
            for name, answers in answered:
                result[name].update(answers)
        return result

    def infer(
        self,
        prompts: PromptBatch,
        rollouts: Rollouts,
        members: ReplicaGroup,
        early: EarlyAnswers | None = None,
    ) -> list[Judgement]:
        """Return what each scorer says of its share of the rows on this rank: ``rewards``, NaN where failed.

        A named component stands beside them as ``component/NAME``, NaN where a row has none, so that no name
        that a function chooses is taken for another field. ``prompts`` has one entry per row. What an
        environment rewarded, no scorer is asked about: it counts as the first one's, and for nothing with
        the others. Rows that engine or environment failed on are invalid without being scored; those of
        which the ranks know ``early`` are not judged again. Collective over the members.
        """
        known = environments_answers(rollouts)
        if self._own:
            known = {row: answer for row, answer in known.items() if answer.reason is not None}
        judgements = []
        for name, (weight, scorer) in self._scorers.items():
            rows, told = _share(rollouts, members, scorer), {**(early or {}).get(name, {}), **known}
            judgements.append(
                Judgement(name, weight, *self._judged(prompts, rollouts, rows, scorer, told, members))
            )
            known = {
                row: Answer(None, "", 0.0) if answer.reason is None else answer
                for row, answer in known.items()
            }
        return judgements

    def _judged(
        self,
        prompts: PromptBatch,
        rollouts: Rollouts,
        rows: list[int],
        scorer: Scorer,
        known: Mapping[int, Answer],
        members: ReplicaGroup,
    ) -> tuple[RowShard, Metrics, tuple[Failure, ...], dict[int, str]]:
        failed = (rollouts.finish_reason == FINISH_FAILED).tolist()
        asked = [row for row in rows if row not in known and not failed[row]]
        new = scorer.score(self._samples(prompts, rollouts, asked, scorer.takes))
        answers = dict(zip(asked, new.answers, strict=True)) | {
            row: known[row] for row in rows if row in known
        }
        judged = sorted(answers)
        result = RewardResult([answers[row] for row in judged], new.measured)
        places = {row: place for place, row in enumerate(rows)}
        index = torch.tensor([places[row] for row in judged], dtype=torch.long)
        rewards = torch.full((len(rows),), float("nan"))
        rewards[index] = result.rewards
        values = {"rewards": rewards}
        failures = {
            judged[failure.row]: (failure.reason, ending(failure.message, LONGEST_REASON))
            for failure in result.failures
        }
        # Every rank must name the same fields, whatever its own samples returned.
        names, others = zip(*members.gather_objects((set(result.components), failures)), strict=True)
        for name in sorted(set().union(*names)):
            component = torch.full((len(rows),), float("nan"))
            if name in result.components:
                component[index] = result.components[name]
            values[COMPONENT + name] = component
        no_tokens = torch.zeros(len(rows), dtype=torch.long)
        shard = RowShard(torch.tensor(rows, dtype=torch.long), no_tokens, {}, values)
        reasons = {row: words for failures in others for row, words in failures.items()}
        metrics = result.metrics({kind for kind, _ in reasons.values()})
        return shard, metrics, result.failures, {row: ": ".join(words) for row, words in reasons.items()}

    def _samples(
        self, prompts: PromptBatch, rollouts: Rollouts, rows: list[int], takes: frozenset[str]
    ) -> list[Sample]:
        chosen = rollouts.rows(rows)
        fields: dict[str, Sequence[Any]] = {
            "prompt": [prompts.prompts[row] for row in rows],
            "response": self.responses(chosen),
            "ground_truth": [prompts.ground_truths[row] for row in rows],
            "metadata": [dict(prompts.metadata[row]) for row in rows],
        }
        if TURNS in takes:
            fields[TURNS] = [turns[1:] for turns in self.conversations(chosen)]
        if TOKENS in takes:
            fields[TOKENS] = tokens_of(chosen)
        if GROUP in takes:
            fields[GROUP] = chosen.group.tolist()
        return [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]

    def responses(self, rollouts: Rollouts) -> list[str]:
        """Return the responses as text, see `VisibleText`."""
        tokens = rollouts.tokens[rollouts.response_mask].tolist()
        counts = row_counts(rollouts.response_mask, rollouts.lengths)
        ends = counts.cumsum(0).tolist()
        ids = [tokens[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]
        return self._visible.texts(ids)

    def conversations(self, rollouts: Rollouts) -> list[list[dict[str, Any]]]:
        """Return who said what in each row: the ``prompt``, then ``policy`` and ``environment`` in turn.

        Each turn has its ``role``, ``content`` with special tokens, and number of ``tokens``; one of the
        policy has the ``tool_calls`` that were found in it.
        """
        result = []
        for tokens, mask, outcome in zip(
            split_rows(rollouts.tokens, rollouts.lengths),
            split_rows(rollouts.response_mask, rollouts.lengths),
            rollouts.outcomes or (None,) * len(rollouts),
            strict=True,
        ):
            runs = groupby(zip(tokens.tolist(), mask.tolist(), strict=True), key=itemgetter(1))
            calls = iter(outcome.calls if outcome else ())
            turns: list[dict[str, Any]] = []
            for policy, run in runs:
                ids = [token for token, _ in run]
                role = "policy" if policy else "environment" if turns else "prompt"
                turns.append({"role": role, "content": self._tokenizer.decode(ids), "tokens": len(ids)})
                if policy and (called := next(calls, ())):
                    turns[-1]["tool_calls"] = list(called)
            result.append(turns)
        return result

    @property
    def judges_early(self) -> bool:
        """Return whether something judges a group before the others are complete, see `begin`."""
        return bool(self._functions)

    @property
    def _functions(self) -> dict[str, FunctionReward]:
        return {
            name: scorer for name, (_, scorer) in self._scorers.items() if isinstance(scorer, FunctionReward)
        }

    @property
    def not_enforced(self) -> tuple[str, ...]:
        """Return in words what of the scorers' limits this machine does not enforce."""
        return tuple(dict.fromkeys(words for _, scorer in self._scorers.values() for words in scorer.missing))

    def close(self) -> None:
        """End the worker processes."""
        for _, scorer in self._scorers.values():
            scorer.close()


def _scorer(name: str, config: RewardConfig, key: str) -> Scorer:
    """Start what judges by the setting ``name``; ``key`` names the function to the user."""
    if name == FUNCTION:
        return FunctionReward(config, key=key)
    section = getattr(config, name)
    return {"code": code_reward, "http": HttpReward, "judge": JudgeReward}[name](section)


def _answers(
    name: str, scorer: FunctionReward, numbers: Sequence[int], samples: Sequence[Sample]
) -> tuple[str, dict[int, Answer]]:
    return name, dict(zip(numbers, scorer.answers(samples), strict=True))


def _share(rollouts: Rollouts, members: ReplicaGroup, scorer: Scorer) -> list[int]:
    """Return the rows that this rank judges: whole groups where they are judged together."""
    place, count = members.ranks.index(members.rank), len(members.ranks)
    if isinstance(scorer, HttpReward | JudgeReward):
        return [] if place else list(range(len(rollouts)))
    if GROUP not in scorer.takes:
        return list(range(place, len(rollouts), count))
    return [row for row, group in enumerate(rollouts.group.tolist()) if group % count == place]


def tokens_of(rollouts: Rollouts) -> list[dict[str, list]]:
    """Return of each row the ids of ``prompt`` and of what follows, its ``mask`` and its ``log_probs``.

    ``mask`` is true on what the policy sampled, and ``log_probs`` are the engine's, 0 where it is false.
    """
    result = []
    for ids, mask, log_probs in zip(
        *(
            split_rows(values, rollouts.lengths)
            for values in (rollouts.tokens, rollouts.response_mask, rollouts.rollout_log_probs)
        ),
        strict=True,
    ):
        start = int(mask.int().argmax()) if mask.any() else len(ids)
        result.append({
            "prompt": ids[:start].tolist(),
            "response": ids[start:].tolist(),
            "mask": mask[start:].tolist(),
            "log_probs": log_probs[start:].tolist(),
        })  # fmt: skip
    return result


def environments_answers(rollouts: Rollouts) -> dict[int, Answer]:
    """Return what environments say of rows, those left out that they leave to others."""
    answers = {}
    for row, outcome in enumerate(rollouts.outcomes or ()):
        if outcome is not None and outcome.failure is not None:
            answers[row] = Answer(outcome.failure, outcome.message)
        elif outcome is not None and outcome.reward is not None:
            answers[row] = Answer(None, "", outcome.reward, outcome.components)
    return answers


class RewardModel:
    """Score rows with a frozen model, which ``role`` holds.

    A score is the head's value at the row's last token, as transformers' ``*ForSequenceClassification``
    classes take it.
    """

    def __init__(self, name: str, weight: float, role: ModelRole) -> None:
        self.name = name
        self.weight = weight
        self.role = role

    def infer(self, batch: Any) -> RowShard:
        """Return the score of this rank's rows under the model's name, [b] float32, NaN where not finite.

        ``batch`` as for `ModelRole.infer`. Collective over the role's ranks.
        """
        select = torch.zeros(len(batch.tokens), dtype=torch.bool)
        select[last_tokens(batch.lengths)] = True
        scored = self.role.score(batch, select, before=False)
        rows = torch.tensor([row for micro in scored for row in micro.rows], dtype=torch.long)
        scores = torch.zeros(0)
        if scored:
            # Every other token of a row is 0 here.
            values = torch.cat([micro.outputs[0] for micro in scored]).float().cpu()
            scores = values[last_tokens(batch.lengths[rows])]
        scores = torch.where(scores.isfinite(), scores, float("nan"))
        return RowShard(rows, torch.zeros_like(rows), {}, {self.name: scores})


def last_tokens(lengths: Tensor) -> Tensor:
    """Return the position of each row's last token: [B] int64."""
    return lengths.cumsum(0) - 1
