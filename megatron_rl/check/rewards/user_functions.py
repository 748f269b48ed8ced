"""Load the user's functions as a run does: each in a contained process, all at the same time.

What a function's module does when it is imported (fail, end its process, never end) it does there, and is
one error of the check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from megatron_rl.check.rewards.function import Called, check_function
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.errors import UserError
from megatron_rl.rewards.calls import loading_errors
from megatron_rl.rewards.judgement import JUDGEMENT, is_function

_MOST_AT_ONCE = 8


class _Function(NamedTuple):
    """A function to load: its settings, the key that names it, and what it is called with."""

    config: RewardConfig
    key: str
    writes: bool = False
    further: Sequence[str] = ()
    grouped: bool = True

    def errors(self) -> list[UserError]:
        return loading_errors(self.config, self.key, self.writes, self.further)


def function_errors(config: RunConfig) -> list[UserError]:
    """Return why the functions that judge cannot be loaded, of those without an error already."""
    functions = [
        function
        for function in _functions(config)
        # The package's own functions can be imported: a process for each would only take time.
        if not (function.config.function or "").startswith("megatron_rl.") and not _has_errors(function)
    ]
    if not functions:
        return []
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        found = list(pool.map(_Function.errors, functions))
    return [error for errors in found for error in errors]


def _functions(config: RunConfig) -> Iterator[_Function]:
    reward = replace(config.reward, workers=1)
    if reward.function is not None:
        yield _Function(reward, "reward.function")
    for name, described in config.evaluation.sets.items():
        for key, function in described.functions().items():
            settings = replace(reward, function=function, arguments={})
            yield _Function(settings, f"evaluation.sets.{name}.{key}")
    if reward.judge is not None:
        where, limits = "reward.judge", reward.judge.limits
        parser = RewardConfig(reward.judge.parser, limits=limits)
        yield _Function(parser, f"{where}.parser", further=(JUDGEMENT,), grouped=False)
        if is_function(reward.judge.template):
            template = RewardConfig(reward.judge.template, limits=limits)
            yield _Function(template, f"{where}.template", writes=True, grouped=False)


def _has_errors(function: _Function) -> bool:
    further = (*function.config.arguments, *function.further)
    called = Called(function.config.function or "", function.key, further, function.grouped)
    return bool(check_function(called))
