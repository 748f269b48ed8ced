"""The user's callbacks: classes whose methods are called in each step on the first rank.

A callback has at least one of `METHODS`, which receive copies of the values. The first exception disables the
callback with a warning, and the run continues. Methods run synchronously: a callback with long work should
use a thread. The module can be imported without torch, so that `check` loads callbacks as a run does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megatron_rl.errors import UserError, first_line, nearest, single_errors
from megatron_rl.user_code import load_object

METHODS = ("on_step_begin", "on_samples", "on_step_end")
"""``on_step_begin(step)``; ``on_samples(step, samples)``, the columns of the step's table of samples by name;
``on_step_end(step, metrics)``, the numbers of the step's line in metrics.jsonl by name."""

_KEY = "callbacks"


class Callbacks:
    """Callbacks of a run, created and called only on the first rank.

    ``paths``: import paths of the classes, such as ``my_code.py:Watch``.
    ``print_line``: function that prints a line on the console.
    """

    def __init__(self, paths: Sequence[str], print_line: Callable[[str], None]) -> None:
        self._print_line = print_line
        self._callbacks: dict[str, Any] = {path: load_callback(path)() for path in paths}

    def call_method(self, method: str, *values: Any) -> None:
        """Call a method of each callback that has it, with copies of the values."""
        for path, callback in list(self._callbacks.items()):
            function = getattr(callback, method, None)
            if function is None:
                continue
            try:
                function(*copy.deepcopy(values))
            except Exception as error:  # the user's code may raise anything
                del self._callbacks[path]
                text = f"warning: {path} failed in {method} and is not called any more"
                self._print_line(f"{text}: {first_line(error)}")


def callback_errors(paths: Iterable[str]) -> Iterator[UserError]:
    """Yield the errors for callbacks that cannot be loaded or have none of `METHODS`.

    ``paths`` are the import paths of their classes.
    """
    for path in paths:
        try:
            load_callback(path)
        except UserError as error:
            yield from single_errors(error)


def load_callback(path: str) -> type:
    """Load the class of a callback from ``file.py:Class`` or ``module:Class``.

    Raises UserError unless it is a class with at least one of `METHODS`, and for a class with another method
    ``on_...``, which the run would never call.
    """
    callback = load_object(path, _KEY)

    # A misspelled method would silently do nothing.
    hooks = [name for name in dir(callback) if name.startswith("on_")]
    unknown_hooks = [name for name in hooks if name not in METHODS]
    if isinstance(callback, type) and hooks and not unknown_hooks:
        return callback

    got = f"{type(callback).__name__} without any of them"
    fix = "define at least one of these methods in a class without arguments"
    if unknown_hooks:
        got = ", ".join(unknown_hooks)
        fix = f"rename {unknown_hooks[0]}"
        suggestion = nearest(unknown_hooks[0], METHODS)
        if suggestion:
            fix += f" to {suggestion}"
    raise UserError(
        f"{path} is not a callback",
        where=_KEY,
        expected=f"a class with methods among {', '.join(METHODS)}",
        got=got,
        fix=fix,
    )
