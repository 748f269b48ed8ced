"""Errors that a user can act on: what was expected, what was found, where, and how to fix it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

EXIT_BAD_INPUT = 2


@dataclass(eq=False)
class UserError(Exception):
    """Report one mistake in what the user gave: configuration, data, environment or checkpoint.

    ``message`` is one sentence; ``where`` names a config path, ``file:line`` or command; ``expected``,
    ``got`` and ``fix`` may be left out where they would only repeat it. ``str()`` prints them as lines.
    """

    message: str
    where: str | None = None
    expected: str | None = None
    got: str | None = None
    fix: str | None = None

    def __post_init__(self) -> None:
        # Exception.args must hold what __init__ takes: pickling across processes rebuilds from it.
        super().__init__(self.message, self.where, self.expected, self.got, self.fix)

    def lines(self) -> list[str]:
        """Return the message and one line for each field that is set."""
        fields = (("where", self.where), ("expected", self.expected), ("got", self.got), ("fix", self.fix))
        result = [self.message]
        for name, value in fields:
            if value is not None:
                first, *rest = str(value).splitlines() or [""]
                result.append(f"  {name + ':':<10}{first}")
                result.extend(" " * 12 + line for line in rest)
        return result

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> dict[str, str | None]:
        """Return the fields as a plain mapping."""
        return {
            "message": self.message,
            "where": self.where,
            "expected": self.expected,
            "got": self.got,
            "fix": self.fix,
        }


class UserErrors(UserError):
    """Carry every mistake that was found, so that the user sees all of them at once."""

    def __init__(self, errors: Iterable[UserError]) -> None:
        self.errors: tuple[UserError, ...] = tuple(errors)
        if not self.errors:
            raise ValueError("UserErrors needs at least one error")
        count = len(self.errors)
        super().__init__(self.errors[0].message if count == 1 else f"{count} errors")

    def __reduce__(self) -> tuple[type[UserErrors], tuple[tuple[UserError, ...]]]:
        return type(self), (self.errors,)

    def __str__(self) -> str:
        return "\n".join(numbered(self.errors, "error"))


def each(error: UserError) -> tuple[UserError, ...]:
    """Return the single errors that an error carries: itself, or those of a `UserErrors`."""
    return error.errors if isinstance(error, UserErrors) else (error,)


def require_none(errors: Sequence[UserError]) -> None:
    """Raise what was found, if anything: the one error, or several together."""
    if errors:
        raise errors[0] if len(errors) == 1 else UserErrors(errors)


def numbered(errors: Iterable[UserError], kind: str) -> list[str]:
    """Return the errors as blocks of lines, numbered ``error 1: …`` where there are several."""
    listed = tuple(errors)
    result: list[str] = []
    for index, error in enumerate(listed, start=1):
        first, *rest = error.lines()
        label = f"{kind} {index}" if len(listed) > 1 else kind
        result.extend([f"{label}: {first}", *rest])
        if index < len(listed):
            result.append("")
    return result


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` is a slip of, or None where no single one is that close.

    A slip is a letter or two in a word, the words in another order, or other signs between them. Words of
    one or two letters, and digits, carry the meaning of a name (`top_p` and `top_k`, `h100` and `h200`): a
    name that differs in them is another one. No suggestion is better than a wrong one.

    Example:
        >>> nearest("clip_hihg", ["clip_low", "clip_high"]), nearest("top_n", ["top_p", "top_k"])
        ('clip_high', None)
    """
    close: dict[str, tuple[int, int]] = {}
    for candidate in known:
        distance = _slip(name, candidate)
        if distance is not None:
            close[candidate] = (distance, _edits(name, candidate))
    if not close:
        return None

    least = min(close.values())
    best = [candidate for candidate, distance in close.items() if distance == least]
    return best[0] if len(best) == 1 else None


_MOST_EDITS = 3
"""Letters in all words of a name together that a slip may change."""


def _slip(name: str, candidate: str) -> int | None:
    """Return how many letters a slip changed to make ``name`` of ``candidate``, None where it is no slip."""
    words = _words_of(name)
    others = _words_of(candidate)
    if sorted(words) == sorted(others):
        return 0 if words == others else 1
    if re.findall(r"\d+", name) != re.findall(r"\d+", candidate):
        return None

    if len(words) != len(others):  # a sign between words was left out or put in
        words, others = ["".join(words)], ["".join(others)]
    total = 0
    for word, other in zip(words, others, strict=True):
        edits = _edits(word, other)
        length = max(len(word), len(other))
        allowed = 0 if length <= 2 else 1 if length < 8 else 2
        if edits > allowed:
            return None
        total += edits
    return total if total <= _MOST_EDITS else None


def _words_of(name: str) -> list[str]:
    return [word for word in re.split(r"[\W_]+", name.lower()) if word]


def _edits(word: str, other: str) -> int:
    """Return the letters to put in, leave out, replace or exchange with their neighbour to get ``other``.

    The optimal string alignment distance.
    """
    before: list[int] = []
    above = list(range(len(other) + 1))
    for row, letter in enumerate(word, start=1):
        current = [row]
        for column, target in enumerate(other, start=1):
            replaced = above[column - 1] + (letter != target)
            best = min(above[column] + 1, current[column - 1] + 1, replaced)
            exchanged = row > 1 and column > 1 and letter == other[column - 2] and word[row - 2] == target
            if exchanged:
                best = min(best, before[column - 2] + 1)
            current.append(best)
        before, above = above, current
    return above[-1]


def neighbours(path: Path) -> str:
    """Return what there is in the place of a missing file: the folder that is not there, or a near name."""
    parent = path.parent
    if path.is_symlink() and not path.exists():
        return f"{path} is a link that leads to nothing"
    if path.exists():
        return f"{path} is a {'folder' if path.is_dir() else 'pipe, a socket or a device'}"
    if not parent.is_dir():
        while parent.parent != parent and not parent.parent.is_dir():
            parent = parent.parent
        return f"no directory {parent}"
    close = nearest(path.name, [item.name for item in parent.iterdir()])
    return f"no {path.name} in {parent}" + (f"; there is {close}" if close else "")


def some_of(names: Sequence[str], most: int) -> str:
    """Return the first of many names in words, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def first_line(error: BaseException, longest: int = 300) -> str:
    """Return the type and the first line of an exception: some libraries put a traceback into the text."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = next((line for line in lines if line and not line.startswith("Traceback (")), "")
    return f"{type(error).__name__}: {text}".removesuffix(": ")[:longest]
