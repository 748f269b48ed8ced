"""Recurring forms of `UserError`: one function for each kind of mistake that many rules find.

A rule passes the key and the values; the form writes the message and the ``expected`` and ``got`` lines, so
that the same mistake reads the same wherever it is found. A mistake that only one rule can find builds its
`UserError` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError, first_line, nearest, neighbours


def unknown_choice(
    path: str, value: Any, choices: Sequence[str], *, otherwise: str = "choose one of them, or remove it"
) -> UserError:
    """Return the error for a key whose value is not one of its choices, with the nearest one suggested.

    ``otherwise`` is the fix if no choice is close.

    Example:
        >>> print(unknown_choice("rollout.engine", "vlm", ["vllm", "torch"]))
        `rollout.engine` is 'vlm', which is not a choice; did you mean 'vllm'?
          where:    rollout.engine
          expected: one of vllm, torch
          got:      'vlm'
          fix:      write vllm
    """
    message = f"`{path}` is {value!r}, which is not a choice"
    fix = otherwise
    suggestion = nearest(str(value), choices) or nearest(str(value).lower(), choices)
    if suggestion is not None:
        message += f"; did you mean {suggestion!r}?"
        fix = f"write {suggestion}"
    expected = "one of " + ", ".join(choices)
    return UserError(message, where=path, expected=expected, got=repr(value), fix=fix)


def out_of_range(path: str, value: Any, expected: str, *, fix: str | None = None) -> UserError:
    """Return the error for a key whose value has the right type but is out of bounds."""
    return UserError(f"`{path}` is out of range", where=path, expected=expected, got=repr(value), fix=fix)


def requires(path: str, value: Any, condition: str, *, got: str, fix: str) -> UserError:
    """Return the error for a value that has an effect only under a condition that is not met.

    Example:
        >>> print(requires("actor.lora.dropout", 0.1, "lora.rank of 1 or more", got="0", fix="set lora.rank"))
        `actor.lora.dropout: 0.1` requires lora.rank of 1 or more
          where:    actor.lora.dropout
          expected: lora.rank of 1 or more
          got:      0
          fix:      set lora.rank
    """
    message = f"`{path}: {value}` requires {condition}"
    return UserError(message, where=path, expected=condition, got=got, fix=fix)


def exclusive(path: str, second_path: str, reason: str, *, fix: str | None = None) -> UserError:
    """Return the error for two keys that are both set although only one of them can take effect."""
    return UserError(
        f"`{path}` and `{second_path}` exclude each other: {reason}",
        where=path,
        expected=f"`{path}` or `{second_path}`",
        got="both",
        fix=fix or f"remove one of `{path}` and `{second_path}`",
    )


def does_not_divide(path: str, size: int, total: int, noun: str, *, fix: str | None = None) -> UserError:
    """Return the error for a ``size`` that does not divide a ``total`` of ``noun``.

    Example:
        >>> print(does_not_divide("actor.layout.tensor", 3, 32, "attention heads"))
        3 does not divide the 32 attention heads
          where:    actor.layout.tensor
          expected: a divisor of 32
          got:      3
    """
    message = f"{size} does not divide the {total} {noun}"
    return UserError(message, where=path, expected=f"a divisor of {total}", got=str(size), fix=fix)


def not_installed(package: str, path: str, *, purpose: str, fix: str) -> UserError:
    """Return the error for a setting that needs a package which cannot be imported here."""
    return UserError(
        f"{package} is not installed",
        where=path,
        expected=f"{package}, for {purpose}",
        got="not installed",
        fix=fix,
    )


def missing_file(file: Path, *, where: str, expected: str, fix: str | None = None) -> UserError:
    """Return the error for a missing file or folder; ``got`` names a similar file in its folder, if any."""
    return UserError(
        f"{file.name} does not exist", where=where, expected=expected, got=neighbours(file), fix=fix
    )


def unreadable_file(
    noun: str, file: Path, error: BaseException, *, expected: str, fix: str | None = None
) -> UserError:
    """Return the error for a file that exists and cannot be opened, decoded or parsed.

    ``noun`` names the file with its article ("the model's config.json"); ``expected`` is its format.
    """
    return UserError(
        f"{noun} cannot be read", where=str(file), expected=expected, got=first_line(error), fix=fix
    )
