"""Filters of responses: a removed response is dropped from training, or gets a fixed reward.

The one idea: the result of a filter is an `Answer`, like a reward, so that it is sent between ranks and saved
like a reward. For a removed response its reason is `FILTERED`, and its message is the name of the filter. A
user's filter runs as a reward function does, contained and with its limits; a filter that fails makes its
sample invalid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.config.sections.filters import FILTER_KEY, FiltersConfig
from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.metrics import Metrics
from megatron_rl.rewards.function import NO_METRICS, FunctionReward, Sample
from megatron_rl.rewards.worker import GROUP, WRONG_TYPE, Answer

FILTERS = "filters"
"""Key of the filters' answers beside those of the scorers, in rewards computed while others are sampled."""
FILTERED = "filtered"
"""Reason in the answer for a response that a filter removes; the message is the filter's name."""

_KEPT = Answer(None, reward=1.0)


@dataclass(frozen=True)
class FilteredRows:
    """Rows that filters removed, the same value on every rank.

    Example: ``FilteredRows({3: "empty"}, reward=-1.0)`` gives row 3 the reward -1 without any call.
    """

    names: Mapping[int, str] = field(default_factory=dict)
    """Row -> name of the filter that removed it."""
    failures: Mapping[int, Answer] = field(default_factory=dict)
    """Row -> failure of the user's filter on that row."""
    reward: float | None = None
    """Reward of removed rows, or None if they are dropped from training."""
    metrics: Metrics = NO_METRICS
    """Share of rows that each filter removed."""

    @property
    def dropped_rows(self) -> frozenset[int]:
        """Return the indices of the removed rows that get no reward and are not trained on."""
        if self.reward is not None:
            return frozenset()
        return frozenset(self.names)

    @property
    def answers(self) -> dict[int, Answer]:
        """Return the answers, by row, for rows that no scorer rewards: failed filters, and removed rows."""
        answers = dict(self.failures)
        if self.reward is not None:
            answers |= dict.fromkeys(self.names, Answer(None, "", self.reward))
        return answers

    def verdicts(self, rows: Iterable[int]) -> dict[int, Answer]:
        """Return the filters' answer for each of ``rows``, by row, so that they need not be filtered again.

        Rows that no filter removed have the answer to keep the response.
        """
        answers = dict.fromkeys(rows, _KEPT)
        answers |= {row: Answer(FILTERED, name) for row, name in self.names.items()}
        return {**answers, **self.failures}


NOTHING_FILTERED = FilteredRows()


class ResponseFilters:
    """Filters of a run, applied in order: the first one that applies removes the response.

    ``takes``: optional fields of `Sample` that the user's function reads.
    ``missing``: descriptions of the function's limits that the kernel does not enforce.
    """

    def __init__(self, config: FiltersConfig, reward: RewardConfig) -> None:
        self.config = config
        self._function: FunctionReward | None = None
        self.takes: frozenset[str] = frozenset()
        self.missing: tuple[str, ...] = ()
        if config.function is not None:
            self._function = FunctionReward(reward.with_function(config.function), key=FILTER_KEY)
            self.takes = self._function.takes - {GROUP}
            self.missing = self._function.missing

    def compute_answers(self, samples: Sequence[Sample], tokens: Sequence[Sequence[int]]) -> list[Answer]:
        """Return the filters' answer for each sample; ``tokens`` are the ids of each sampled response."""
        answers: list[Answer] = []
        for sample, ids in zip(samples, tokens, strict=True):
            answers.append(self._apply_built_in_filters(sample, ids))
        if self._function is None:
            return answers

        # The user's function is called only for responses that the built-in filters keep.
        remaining_rows = [index for index, answer in enumerate(answers) if answer.reason is None]
        results = self._function.compute_answers([samples[index] for index in remaining_rows])
        for index, result in zip(remaining_rows, results, strict=True):
            answers[index] = _to_filter_answer(result)
        return answers

    def _apply_built_in_filters(self, sample: Sample, ids: Sequence[int]) -> Answer:
        """Return the answer of the first built-in filter that removes the response, or the answer to keep it.

        ``ids`` are the response's tokens.
        """
        config = self.config
        response = str(sample["response"])
        limits_repetition = config.max_repetition < 1
        removes_by_name = {
            "empty": config.empty and not response.strip(),
            "min_tokens": len(ids) < config.min_tokens,
            "max_repetition": limits_repetition and repeated_share(ids, config.ngram) > config.max_repetition,
            "banned": any(text in response for text in config.banned),
        }

        for name, removes in removes_by_name.items():
            if removes:
                return Answer(FILTERED, name)
        return _KEPT

    def close(self) -> None:
        """End the worker processes of the user's filter function, if there is one."""
        if self._function is not None:
            self._function.close()


def _to_filter_answer(answer: Answer) -> Answer:
    """Convert the answer of the user's filter, 1 (keep) or 0 (remove), to that of a built-in filter."""
    if answer.reason is not None:
        return answer
    if answer.reward not in (0.0, 1.0):
        return Answer(WRONG_TYPE, f"{FILTER_KEY} returned {answer.reward:g}; expected: True (keep) or False")
    if answer.reward:
        return _KEPT
    return Answer(FILTERED, "function")


def repeated_share(ids: Sequence[int], ngram_length: int) -> float:
    """Return the share of a response's n-grams of tokens that occurred earlier in the response.

    ``ids`` are the response's tokens. The share is 0 for a response of fewer than ``ngram_length`` tokens.

    Example:
        >>> repeated_share([5, 6, 5, 6, 5], 2)
        0.5
    """
    ngram_count = len(ids) - ngram_length + 1
    if ngram_count < 1:
        return 0.0
    distinct_ngrams = {tuple(ids[begin : begin + ngram_length]) for begin in range(ngram_count)}
    return 1 - len(distinct_ngrams) / ngram_count
