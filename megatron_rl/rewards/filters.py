"""Filters of responses: a removed response is dropped from training, or gets a fixed reward.

The verdict of a filter is an `Answer` (the type of a reward function's result for one sample), so it is sent
between ranks and saved like a reward. The verdict on a removed response has the reason `FILTERED`, and the
name of the filter as message. A user's filter runs in sandboxed processes with limits, as a reward function
does. If the filter fails, the sample is invalid.
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
"""Key of the filters' verdicts in `SequenceGroup.early_rewards`; the other keys are names of scorers."""
FILTERED = "filtered"
"""Reason in the verdict on a removed response; the message is the name of the filter."""

_KEPT = Answer(None, reward=1.0)
"""Verdict on a response that all filters keep."""


@dataclass(frozen=True)
class FilteredRows:
    """Rows of a batch that the filters removed; every rank has the same value.

    Example: with ``FilteredRows({3: "empty"}, reward=-1.0)`` row 3 has the reward -1, and no reward function
    is called for it.
    """

    filter_by_row: Mapping[int, str] = field(default_factory=dict)
    """Row -> name of the filter that removed it."""
    failures: Mapping[int, Answer] = field(default_factory=dict)
    """Row -> failure of the user's filter function for that row."""
    reward: float | None = None
    """Reward of removed rows, or None if they are dropped from training."""
    metrics: Metrics = NO_METRICS
    """Share of rows that each filter removed."""

    @property
    def dropped_rows(self) -> frozenset[int]:
        """Return the rows that are excluded from training, because a filter has removed their responses.

        The set is empty if removed responses get a fixed reward instead, and are trained on.
        """
        if self.reward is not None:
            return frozenset()
        return frozenset(self.filter_by_row)

    @property
    def answers(self) -> dict[int, Answer]:
        """Return the reward or failure (`Answer`) of each row on which no reward function is called, by row.

        A removed row has the fixed reward, if there is one. A row on which the user's filter function has
        failed has this failure.
        """
        answers = dict(self.failures)
        if self.reward is not None:
            answers |= dict.fromkeys(self.filter_by_row, Answer(None, "", self.reward))
        return answers

    def verdicts(self, rows: Iterable[int]) -> dict[int, Answer]:
        """Return the verdict of the filters on each row in ``rows``: kept, `FILTERED` or failed.

        The caller stores the verdicts, so that carried-over rows are not filtered again.
        """
        answers = dict.fromkeys(rows, _KEPT)
        for row, name in self.filter_by_row.items():
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
        """Apply the filters to each sample; return one verdict per sample.

        A verdict is an `Answer`, the type of a reward function's result. If all filters keep the response,
        the verdict is `_KEPT`. If a filter removes the response, the verdict has the reason `FILTERED`. If
        the user's filter function fails for the sample, the verdict is this failure. ``tokens`` are the token
        ids of each response.
        """
        verdicts: list[Answer] = []
        for sample, ids in zip(samples, tokens, strict=True):
            verdicts.append(self._apply_built_in_filters(sample, ids))
        if self._function is None:
            return verdicts

        # Call the user's function only for responses that the built-in filters keep.
        kept_indices = [index for index, verdict in enumerate(verdicts) if verdict.reason is None]
        results = self._function.compute_answers([samples[index] for index in kept_indices])
        for index, result in zip(kept_indices, results, strict=True):
            verdicts[index] = _to_verdict(result)
        return verdicts

    def _apply_built_in_filters(self, sample: Sample, ids: Sequence[int]) -> Answer:
        """Return the verdict of the first built-in filter that removes a response, or `_KEPT`.

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


def _to_verdict(result: Answer) -> Answer:
    """Convert the result of the user's filter function for one response to a verdict.

    The function is called like a reward function. It returns True to keep the response, so that the result
    has the reward 1, and False to remove the response. A failed call is returned unchanged.
    """
    if result.reason is not None:
        return result
    if result.reward not in (0.0, 1.0):
        return Answer(WRONG_TYPE, f"{FILTER_KEY} returned {result.reward:g}; expected: True (keep) or False")
    if result.reward:
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
