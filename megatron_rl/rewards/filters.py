"""Filters of responses: a removed response is dropped from training, or gets a fixed reward.

The result of a filter is an `Answer`, so it is sent between ranks and saved like a reward. The answer for a
removed response has the reason `FILTERED`, and the name of the filter as message. A user's filter runs in
contained processes with limits, as a reward function does. If the filter fails, the sample is invalid.
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
"""Key of the filters' answers in `SequenceGroup.early_rewards`; the other keys are names of scorers."""
FILTERED = "filtered"
"""Reason in the answer for a removed response; the message is the name of the filter."""

_KEPT = Answer(None, reward=1.0)


@dataclass(frozen=True)
class FilteredRows:
    """Rows of a batch that the filters removed; every rank has the same value.

    Example: with ``FilteredRows({3: "empty"}, reward=-1.0)`` row 3 has the reward -1, and no reward function
    is called for it.
    """

    names: Mapping[int, str] = field(default_factory=dict)
    """Row -> name of the filter that removed it."""
    failures: Mapping[int, Answer] = field(default_factory=dict)
    """Row -> failed answer of the user's filter for that row."""
    reward: float | None = None
    """Reward of removed rows, or None if they are dropped from training."""
    metrics: Metrics = NO_METRICS
    """Share of rows that each filter removed."""

    @property
    def dropped_rows(self) -> frozenset[int]:
        """Return the removed rows that are dropped from training; empty if they get a fixed reward."""
        if self.reward is not None:
            return frozenset()
        return frozenset(self.names)

    @property
    def answers(self) -> dict[int, Answer]:
        """Return the answers for rows on which no reward function is called, by row.

        These are the removed rows that get a fixed reward, and the rows on which the user's filter failed.
        """
        answers = dict(self.failures)
        if self.reward is not None:
            answers |= dict.fromkeys(self.names, Answer(None, "", self.reward))
        return answers

    def verdicts(self, rows: Iterable[int]) -> dict[int, Answer]:
        """Return the result of the filters for each row in ``rows``: kept, `FILTERED` or failed.

        The caller stores these answers, so that carried-over rows are not filtered again.
        """
        answers = dict.fromkeys(rows, _KEPT)
        for row, name in self.names.items():
            answers[row] = Answer(FILTERED, name)
        answers.update(self.failures)
        return answers


NOTHING_FILTERED = FilteredRows()


class ResponseFilters:
    """Response filters of a run: the built-in filters, then the user's function.

    ``optional_fields`` are the optional fields of `Sample` that the function reads. ``unenforced_limits``
    describes the limits of the function that the kernel does not enforce.
    """

    def __init__(self, config: FiltersConfig, reward: RewardConfig) -> None:
        self.config = config
        self._function: FunctionReward | None = None
        self.optional_fields: frozenset[str] = frozenset()
        self.unenforced_limits: tuple[str, ...] = ()
        if config.function is not None:
            self._function = FunctionReward(reward.with_function(config.function), key=FILTER_KEY)
            self.optional_fields = self._function.optional_fields - {GROUP}
            self.unenforced_limits = self._function.unenforced_limits

    def compute_answers(self, samples: Sequence[Sample], tokens: Sequence[Sequence[int]]) -> list[Answer]:
        """Apply the filters to each sample; return one `Answer` per sample.

        The answer is `_KEPT`, or has the reason `FILTERED`, or is the failure of the user's function.
        ``tokens`` are the token ids of each response.
        """
        answers: list[Answer] = []
        for sample, ids in zip(samples, tokens, strict=True):
            answers.append(self._apply_built_in_filters(sample, ids))
        if self._function is None:
            return answers

        # Call the user's function only for responses that the built-in filters keep.
        remaining_rows = [index for index, answer in enumerate(answers) if answer.reason is None]
        results = self._function.compute_answers([samples[index] for index in remaining_rows])
        for index, result in zip(remaining_rows, results, strict=True):
            answers[index] = _to_filter_answer(result)
        return answers

    def _apply_built_in_filters(self, sample: Sample, ids: Sequence[int]) -> Answer:
        """Return the answer of the first built-in filter that removes a response, else the answer `_KEPT`.

        ``ids`` are the token ids of the response.
        """
        config = self.config
        response = str(sample["response"])
        if config.empty and not response.strip():
            return Answer(FILTERED, "empty")
        if len(ids) < config.min_tokens:
            return Answer(FILTERED, "min_tokens")
        # A limit of 1 allows any repetition, so the share need not be computed.
        if config.max_repetition < 1 and repeated_share(ids, config.ngram) > config.max_repetition:
            return Answer(FILTERED, "max_repetition")
        if any(text in response for text in config.banned):
            return Answer(FILTERED, "banned")
        return _KEPT

    def close(self) -> None:
        """End the worker processes of the user's filter function."""
        if self._function is not None:
            self._function.close()


def _to_filter_answer(answer: Answer) -> Answer:
    """Convert the reward of the user's filter, 1 (keep) or 0 (remove), to the answer of a filter."""
    if answer.reason is not None:
        return answer
    if answer.reward not in (0.0, 1.0):
        return Answer(WRONG_TYPE, f"{FILTER_KEY} returned {answer.reward:g}; expected: True (keep) or False")
    if answer.reward:
        return _KEPT
    return Answer(FILTERED, "function")


def repeated_share(ids: Sequence[int], ngram_length: int) -> float:
    """Return the share of token n-grams of a response that already occurred earlier in the response.

    ``ids`` are the token ids. The share is 0 for a response of fewer than ``ngram_length`` tokens.

    Example:
        >>> repeated_share([5, 6, 5, 6, 5], 2)
        0.5
    """
    num_ngrams = len(ids) - ngram_length + 1
    if num_ngrams < 1:
        return 0.0
    distinct_ngrams = {tuple(ids[start : start + ngram_length]) for start in range(num_ngrams)}
    return 1 - len(distinct_ngrams) / num_ngrams
