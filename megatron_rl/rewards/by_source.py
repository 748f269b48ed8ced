"""Rewards of data sources with their own reward functions.

The source of a sample selects the reward function. Each function has a `FunctionReward`, which calls it in
processes with limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.rewards.function import FunctionReward, RewardResult, Sample
from megatron_rl.rewards.worker import GROUP, TOKENS, TURNS, Answer

SOURCE = "source"
"""Key of a sample: the name of its source in `data.sources`, or None."""
NO_FUNCTION = "no_function"
"""Failure reason of a sample whose source has no function."""


class SourceRewards:
    """Reward that calls the function of each sample's source.

    ``functions`` maps a source to the path of its function. ``config.function`` rewards samples without a
    source, and samples of sources without an entry. All functions have the settings of ``config``. Each
    function has ``config.workers`` processes in total, even if several sources use it.
    """

    def __init__(self, config: RewardConfig, functions: Mapping[str, str]) -> None:
        self._function_names = dict(functions)
        self._default_name = config.function
        self._functions: dict[str, FunctionReward] = {}

        # Function -> the first configuration key that names it, for errors.
        self._keys: dict[str, str] = {}
        if config.function is not None:
            self._keys[config.function] = "reward.function"
        for source, name in functions.items():
            self._keys.setdefault(name, f"data.sources.{source}.reward")

        try:
            for name, key in self._keys.items():
                self._functions[name] = FunctionReward(replace(config, function=name), key=key)
        except BaseException:
            # End the processes of the functions that were loaded before the error.
            self.close()
            raise

        # All functions have the same limits, so `unenforced_limits` is equal for all of them.
        self.unenforced_limits: tuple[str, ...] = ()
        self.optional_fields: frozenset[str] = frozenset({SOURCE})
        for function in self._functions.values():
            self.unenforced_limits = function.unenforced_limits
            self.optional_fields |= function.optional_fields

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Compute the rewards of B samples, in the order of ``samples``."""
        return RewardResult(self.compute_answers(samples))

    def function_name(self, sample: Sample) -> str | None:
        """Return the name of the function that rewards a sample, or None if no function does."""
        return self._function_names.get(sample[SOURCE], self._default_name)

    def compute_answers(self, samples: Sequence[Sample]) -> list[Answer]:
        """Call the function of each sample's source; return one `Answer` per sample, in their order."""
        # Failure of a sample for which no function is configured; `check` rejects such a configuration.
        no_function = Answer(NO_FUNCTION, "neither the sample's source nor reward.function names a function")
        answers = [no_function] * len(samples)
        rows_by_name: dict[str, list[int]] = {}
        for row, sample in enumerate(samples):
            name = self.function_name(sample)
            if name is not None:
                rows_by_name.setdefault(name, []).append(row)
        if not rows_by_name:
            return answers

        # Call each function in its own thread, so that a slow function does not delay the others.
        with ThreadPoolExecutor(len(rows_by_name)) as pool:
            futures: dict[str, Future[list[Answer]]] = {}
            for name, rows in rows_by_name.items():
                function = self._functions[name]
                function_samples = [_without_unread_fields(samples[row], function) for row in rows]
                futures[name] = pool.submit(function.compute_answers, function_samples)

        # Add the configuration key at the end of failure messages: long messages are cut at their beginning.
        for name, rows in rows_by_name.items():
            for row, answer in zip(rows, futures[name].result(), strict=True):
                if answer.reason is not None:
                    answer = answer._replace(message=f"{answer.message} ({self._keys[name]})")
                answers[row] = answer
        return answers

    def close(self) -> None:
        """Kill the processes of all functions; later calls of `score` raise RuntimeError."""
        for function in self._functions.values():
            function.close()


def _without_unread_fields(sample: Sample, function: FunctionReward) -> dict[str, Any]:
    """Return a sample without the optional fields that ``function`` does not read."""
    unread_fields = {SOURCE, TURNS, TOKENS, GROUP} - function.optional_fields
    return {name: value for name, value in sample.items() if name not in unread_fields}
