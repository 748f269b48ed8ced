"""The user's callbacks: classes whose methods are called in each step on the first rank.

A callback defines at least one of `METHODS`, whose arguments are copies. The first exception disables the
callback with a warning, and the run continues. Methods run synchronously: a slow callback should start a
thread. This module does not import torch, so `check` can load callbacks, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megatron_rl.errors import UserError, first_line, nearest, single_errors
from megatron_rl.user_code import load_object

METHODS = ("on_step_begin", "on_samples", "on_step_end")
"""The methods are ``on_step_begin(step)``, ``on_samples(step, samples)`` and ``on_step_end(step, metrics)``.

``samples`` maps the column names of the step's sample table to values. ``metrics`` maps names to numbers, as
in the step's line of metrics.jsonl."""

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
        """Call ``method`` of each callback that defines it, with copies of ``values``."""
        for path, callback in list(self._callbacks.items()):
            function = getattr(callback, method, None)
            if function is None:
                continue
            try:
                function(*copy.deepcopy(values))
            except Exception as error:  # the user's code may raise anything
                del self._callbacks[path]
                warning = f"warning: {path} failed in {method} and is not called any more"
                self._print_line(f"{warning}: {first_line(error)}")


def callback_errors(paths: Iterable[str]) -> Iterator[UserError]:
    """Yield the error for each callback that cannot be loaded or defines none of `METHODS`.

    ``paths`` are import paths of callback classes.
    """
    for path in paths:
        try:
            load_callback(path)
        except UserError as error:
            yield from single_errors(error)


def load_callback(path: str) -> type:
    """Load a callback class from ``file.py:Class`` or ``module:Class``.

    Raises UserError if it is not a class, defines none of `METHODS`, or defines an unknown method ``on_...``.
    """
    callback_class = load_object(path, _KEY)

    # Reject unknown hooks: the run would never call a misspelled method.
    hooks = [name for name in dir(callback_class) if name.startswith("on_")]
    unknown_hooks = [name for name in hooks if name not in METHODS]
    if isinstance(callback_class, type) and hooks and not unknown_hooks:
        return callback_class

    got = f"{type(callback_class).__name__} without any of them"
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
