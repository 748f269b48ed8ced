"""The user's callbacks: classes whose methods a run calls at each step; importable without torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import UserError, nearest, single_errors
from megatron_rl.user_code import load_path

METHODS = ("on_step_begin", "on_samples", "on_step_end")
"""``on_step_begin(step)``; ``on_samples(step, samples)``, the columns of the step's table of samples by name;
``on_step_end(step, metrics)``, the numbers of the step's line in metrics.jsonl by name."""

_KEY = "callbacks"


def callback_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors for callbacks that cannot be loaded or lack the methods of `METHODS`."""
    for path in config.callbacks:
        try:
            load_callback(path)
        except UserError as error:
            yield from single_errors(error)


def load_callback(path: str) -> type:
    """Load the class of a callback from ``file.py:Class`` or ``module:Class``.

    Raises UserError for any object but a class with at least one of `METHODS`, and for a class with another
    method ``on_...``, which the run would never call.
    """
    callback = load_path(path, _KEY)

    # A misspelled method would silently do nothing.
    names = [name for name in dir(callback) if name.startswith("on_")]
    uncalled = [name for name in names if name not in METHODS]
    if isinstance(callback, type) and names and not uncalled:
        return callback

    got = f"{type(callback).__name__} without any of them"
    fix = "define at least one of these methods in a class without arguments"
    if uncalled:
        got = ", ".join(uncalled)
        fix = f"rename {uncalled[0]}"
        close = nearest(uncalled[0], METHODS)
        if close:
            fix += f" to {close}"
    raise UserError(
        f"{path} is not a callback",
        where=_KEY,
        expected=f"a class with methods among {', '.join(METHODS)}",
        got=got,
        fix=fix,
    )
