"""Filters of responses: responses that get no reward and are not trained on, or get a fixed reward.

The one idea: a removed response is an answer like a reward. It has a reason, `FILTERED`, and the name of the
filter as message, so that it travels and is saved as rewards are. A user's filter runs as a reward function
does, contained and with its limits; a filter that fails makes its sample invalid.
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
"""Name of the filters among scorers with early answers."""
FILTERED = "filtered"
"""Reason of an answer for a response that a filter removes; the message is the filter's name."""

_KEPT = Answer(None, reward=1.0)


@dataclass(frozen=True)
class FilteredRows:
    """Rows that filters removed, the same value on every rank.

    Example: ``FilteredRows({3: "empty"}, reward=-1.0)`` gives row 3 the reward -1 without any call.
    """

    names: Mapping[int, str] = field(default_factory=dict)
    """Row -> name of the filter that removed it."""
    failures: Mapping[int, Answer] = field(default_factory=dict)
    """Row -> failure of the user's filter on it."""
    reward: float | None = None
    """Reward of removed rows; None if they are dropped."""
    metrics: Metrics = NO_METRICS
    """The share of rows that each filter removed."""

    @property
    def dropped(self) -> frozenset[int]:
        """Return the rows without a reward, which are not trained on."""
        if self.reward is not None:
            return frozenset()
        return frozenset(self.names)

    @property
    def answers(self) -> dict[int, Answer]:
        """Return the answers that need no call of a scorer: failed filters, and rewards of removed rows."""
        answers = dict(self.failures)
        if self.reward is not None:
            answers |= dict.fromkeys(self.names, Answer(None, "", self.reward))
        return answers

    def verdicts(self, rows: Iterable[int]) -> dict[int, Answer]:
        """Return the filters' answer for each of ``rows``, to be passed to a later call."""
        answers = dict.fromkeys(rows, _KEPT)
        answers |= {row: Answer(FILTERED, name) for row, name in self.names.items()}
        return {**answers, **self.failures}


NOTHING_FILTERED = FilteredRows()


class ResponseFilters:
    """The filters of a run, applied in order: the first one that applies removes the response.

    ``takes``: optional fields of `Sample` that the user's function reads.
    """

    def __init__(self, config: FiltersConfig, reward: RewardConfig) -> None:
        self.config = config
        self._function: FunctionReward | None = None
        self.takes: frozenset[str] = frozenset()
        self.missing: tuple[str, ...] = ()
        if config.function is not None:
            self._function = FunctionReward(reward.of_function(config.function), key=FILTER_KEY)
            self.takes = self._function.takes - {GROUP}
            self.missing = self._function.missing

    def answers(self, samples: Sequence[Sample], tokens: Sequence[Sequence[int]]) -> list[Answer]:
        """Return an answer per sample; ``tokens`` are the ids that the policy sampled for it."""
        answers = [self._built_in(sample, ids) for sample, ids in zip(samples, tokens, strict=True)]
        if self._function is None:
            return answers

        # The user's function is called for responses that the other filters keep.
        remaining_rows = [index for index, answer in enumerate(answers) if answer.reason is None]
        results = self._function.answers([samples[index] for index in remaining_rows])
        for index, result in zip(remaining_rows, results, strict=True):
            answers[index] = _verdict(result)
        return answers

    def _built_in(self, sample: Sample, ids: Sequence[int]) -> Answer:
        """Return the answer of the built-in filters."""
        config = self.config
        response = str(sample["response"])
        applies = {
            "empty": config.empty and not response.strip(),
            "min_tokens": len(ids) < config.min_tokens,
            "max_repetition": config.max_repetition < 1
            and repeated_share(ids, config.ngram) > config.max_repetition,
            "banned": any(text in response for text in config.banned),
        }

        for name, removes in applies.items():
            if removes:
                return Answer(FILTERED, name)
        return _KEPT

    def close(self) -> None:
        """End the function's processes."""
        if self._function is not None:
            self._function.close()


def _verdict(answer: Answer) -> Answer:
    """Return the answer of the user's function as kept, removed or failed."""
    if answer.reason is not None:
        return answer
    if answer.reward not in (0.0, 1.0):
        return Answer(WRONG_TYPE, f"{FILTER_KEY} returned {answer.reward:g}; expected: True (keep) or False")
    if answer.reward:
        return _KEPT
    return Answer(FILTERED, "function")


def repeated_share(ids: Sequence[int], length: int) -> float:
    """Return the share of the n-grams of ``length`` tokens that have occurred before in a response.

    0 for a response without an n-gram.

    Example:
        >>> repeated_share([5, 6, 5, 6, 5], 2)
        0.5
    """
    count = len(ids) - length + 1
    if count < 1:
        return 0.0
    distinct = {tuple(ids[begin : begin + length]) for begin in range(count)}
    return 1 - len(distinct) / count
