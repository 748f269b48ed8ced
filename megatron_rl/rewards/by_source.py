"""Rewards of data sources that name their own reward functions.

The one idea: a sample has the name of its source, which selects the function; everything else of a function's
reward, such as its processes and their limits, is that of `FunctionReward`.
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
    """Reward of each sample from the function of its source, in the processes of that function.

    ``functions`` maps sources to functions, each with the settings of ``config``. Samples of other sources,
    and samples without a source, are rewarded by ``config.function``. Each function has ``config.workers``
    processes, also if several sources name it.
    """

    def __init__(self, config: RewardConfig, functions: Mapping[str, str]) -> None:
        self._function_names = dict(functions)
        self._default_name = config.function
        self._functions: dict[str, FunctionReward] = {}

        # Configuration key of each function for errors: the first one that names it.
        self._keys: dict[str, str] = {}
        if config.function is not None:
            self._keys[config.function] = "reward.function"
        for source, name in functions.items():
            self._keys.setdefault(name, f"data.sources.{source}.reward")

        try:
            for name, key in self._keys.items():
                self._functions[name] = FunctionReward(replace(config, function=name), key=key)
        except BaseException:
            # Functions that were loaded before the error have started processes.
            self.close()
            raise

        # All functions have the same limits, so the same ones are not enforced.
        first_function = next(iter(self._functions.values()))
        self.missing: tuple[str, ...] = first_function.missing
        self.takes: frozenset[str] = frozenset({SOURCE})
        for function in self._functions.values():
            self.takes |= function.takes

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Return rewards, validity, components and failures of B samples, in the order of ``samples``."""
        return RewardResult(self.compute_answers(samples))

    def function_name(self, sample: Sample) -> str | None:
        """Return the name of the function that rewards a sample, or None if no function does."""
        return self._function_names.get(sample[SOURCE], self._default_name)

    def compute_answers(self, samples: Sequence[Sample]) -> list[Answer]:
        """Return the answers of the samples' functions, in the order of ``samples``."""
        # `check` refuses a configuration with such samples. Samples without a source are of evaluation sets.
        no_answer = Answer(NO_FUNCTION, "neither the sample's source nor reward.function names a function")
        answers = [no_answer] * len(samples)
        rows_by_name: dict[str, list[int]] = {}
        for row, sample in enumerate(samples):
            name = self.function_name(sample)
            if name is not None:
                rows_by_name.setdefault(name, []).append(row)
        if not rows_by_name:
            return answers

        # One thread per function, so that the samples of one do not wait for a slow other one.
        with ThreadPoolExecutor(len(rows_by_name)) as pool:
            futures: dict[str, Future[list[Answer]]] = {}
            for name, rows in rows_by_name.items():
                function = self._functions[name]
                selected = [_without_unread_fields(samples[row], function) for row in rows]
                futures[name] = pool.submit(function.compute_answers, selected)

        for name, rows in rows_by_name.items():
            for row, answer in zip(rows, futures[name].result(), strict=True):
                if answer.reason is not None:
                    # At the end, since only the last lines of a long message are kept.
                    answer = answer._replace(message=f"{answer.message} ({self._keys[name]})")
                answers[row] = answer
        return answers

    def close(self) -> None:
        """Kill the processes of all functions; `score` raises RuntimeError from then on."""
        for function in self._functions.values():
            function.close()


def _without_unread_fields(sample: Sample, function: FunctionReward) -> dict[str, Any]:
    """Return a sample without the optional fields that only other functions read."""
    unread_fields = {SOURCE, TURNS, TOKENS, GROUP} - function.takes
    return {name: value for name, value in sample.items() if name not in unread_fields}
