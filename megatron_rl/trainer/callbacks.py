"""Callbacks of the user: classes whose methods are called in each step on the first rank.

A callback has at least one of the methods in `check.callbacks.METHODS`, which receive copies of the values.
The first exception disables the callback with a warning, and the run continues. Methods run synchronously: a
callback with long work should use a thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.check.callbacks import load_callback
from megatron_rl.errors import first_line


class Callbacks:
    """The callbacks of a run, created and called only on the first rank.

    ``paths``: import paths of the classes. ``say``: prints a line on the console.
    """

    def __init__(self, paths: Sequence[str], say: Callable[[str], None]) -> None:
        self._say = say
        self._callbacks: dict[str, Any] = {path: load_callback(path)() for path in paths}

    def call(self, method: str, *values: Any) -> None:
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
                self._say(f"{text}: {first_line(error)}")
