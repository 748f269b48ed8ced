"""Errors that a user can act on: a message, the key or file, the expected and the actual value, and the fix.

A mistake of the user is never a traceback. Every mistake in a configuration, a data set or an environment is
a `UserError`, and as many as possible are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Exit status of a command with invalid input, the same as argparse's for invalid options.
EXIT_BAD_INPUT = 2


@dataclass(eq=False)
class UserError(Exception):
    """One mistake in a user's configuration, data, environment or checkpoint.

    Example:
        >>> print(UserError("`steps` is out of range", where="steps", expected="1 or more", got="0"))
        `steps` is out of range
          where:    steps
          expected: 1 or more
          got:      0
    """

    message: str
    """One sentence whose subject is the key or the object."""
    where: str | None = None
    """Configuration path, ``file:line`` or command."""
    expected: str | None = None
    """Valid values, as text; None if the text would only repeat the message."""
    got: str | None = None
    """Actual value, as text."""
    fix: str | None = None
    """Step that corrects the mistake."""

    def __post_init__(self) -> None:
        # pickle rebuilds an exception in another process from its args, which __init__ must accept.
        super().__init__(self.message, self.where, self.expected, self.got, self.fix)

    def lines(self) -> list[str]:
        """Return the message and one line for each field that is set; further lines are indented."""
        fields = (("where", self.where), ("expected", self.expected), ("got", self.got), ("fix", self.fix))
        lines = [self.message]
        for name, value in fields:
            if value is None:
                continue

            first, *continuation = str(value).splitlines() or [""]
            lines.append(f"  {name + ':':<10}{first}")
            lines.extend(" " * 12 + line for line in continuation)
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> dict[str, str | None]:
        """Return the error's fields as a mapping of JSON values."""
        return {
            "message": self.message,
            "where": self.where,
            "expected": self.expected,
            "got": self.got,
            "fix": self.fix,
        }


class UserErrors(UserError):
    """Several mistakes that are reported together.

    Example: ``UserErrors([first, second]).errors == (first, second)``.
    """

    def __init__(self, errors: Iterable[UserError]) -> None:
        self.errors: tuple[UserError, ...] = tuple(errors)
        if not self.errors:
            raise ValueError("UserErrors needs at least one error")

        count = len(self.errors)
        super().__init__(self.errors[0].message if count == 1 else f"{count} errors")

    def __reduce__(self) -> tuple[type[UserErrors], tuple[tuple[UserError, ...]]]:
        return type(self), (self.errors,)

    def __str__(self) -> str:
        return "\n".join(numbered_lines(self.errors, "error"))


def single_errors(error: UserError) -> tuple[UserError, ...]:
    """Return all errors of a `UserErrors`; for a single error, return a tuple of that error."""
    if isinstance(error, UserErrors):
        return error.errors
    return (error,)


def raise_errors(errors: Sequence[UserError]) -> None:
    """Raise a single error, or several errors as `UserErrors`; do nothing for an empty sequence."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise UserErrors(errors)


def numbered_lines(errors: Iterable[UserError], noun: str) -> list[str]:
    """Format errors as lines of text, numbered ``error 1: …`` if there are several.

    An empty line separates two errors. ``noun`` is ``error`` or ``warning``.
    """
    all_errors = tuple(errors)
    lines: list[str] = []
    for index, error in enumerate(all_errors, start=1):
        if lines:
            lines.append("")

        label = f"{noun} {index}" if len(all_errors) > 1 else noun
        message, *field_lines = error.lines()
        lines.extend([f"{label}: {message}", *field_lines])
    return lines


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate closest to the misspelled ``name``; None unless exactly one is close.

    A misspelling changes one or two letters of a word, the order of the words, or the separators between
    them. Names that differ in digits or in words of one or two letters are distinct names, not misspellings
    (`top_p` and `top_k`, `h100` and `h200`). A wrong suggestion would be worse than none.

    Example:
        >>> nearest("clip_hihg", ["clip_low", "clip_high"]), nearest("top_n", ["top_p", "top_k"])
        ('clip_high', None)
    """
    # Distances word by word, then of the complete names.
    distances: dict[str, tuple[int, int]] = {}
    for candidate in candidates:
        word_distance = _misspelling_distance(name, candidate)
        if word_distance is not None:
            distances[candidate] = (word_distance, _edit_distance(name, candidate))
    if not distances:
        return None

    smallest = min(distances.values())
    closest = [candidate for candidate, distance in distances.items() if distance == smallest]
    return closest[0] if len(closest) == 1 else None


# Largest number of changed letters in a misspelled name, over all its words.
_MAX_EDITS = 3


def _misspelling_distance(name: str, candidate: str) -> int | None:
    """Return the edit distance of the words if ``name`` may be a misspelling of ``candidate``, else None."""
    words = _split_name(name)
    candidate_words = _split_name(candidate)
    # The same words in another order count as one edit.
    if sorted(words) == sorted(candidate_words):
        return 0 if words == candidate_words else 1
    if re.findall(r"\d+", name) != re.findall(r"\d+", candidate):
        return None

    # With another number of words, a separator was omitted or inserted: compare the names without separators.
    if len(words) != len(candidate_words):
        words = ["".join(words)]
        candidate_words = ["".join(candidate_words)]

    total_edits = 0
    for word, candidate_word in zip(words, candidate_words, strict=True):
        edits = _edit_distance(word, candidate_word)
        if edits > _allowed_edits(max(len(word), len(candidate_word))):
            return None
        total_edits += edits

    if total_edits > _MAX_EDITS:
        return None
    return total_edits


def _allowed_edits(length: int) -> int:
    """Return the largest number of changed letters in a misspelled word of ``length`` letters."""
    if length <= 2:
        return 0
    if length < 8:
        return 1
    return 2


def _split_name(name: str) -> list[str]:
    """Split a name into lower-case words at every character that is neither a letter nor a digit."""
    return re.findall(r"[^\W_]+", name.lower())


def _edit_distance(source: str, target: str) -> int:
    """Return the optimal string alignment distance of two words.

    This is the smallest number of insertions, deletions, replacements and swaps of adjacent letters.
    """
    # Dynamic programming: row i, column j of the table is the distance of source[:i] and target[:j].
    row_before_previous: list[int] = []
    previous_row = list(range(len(target) + 1))
    for i, source_letter in enumerate(source, start=1):
        row = [i]
        for j, target_letter in enumerate(target, start=1):
            replacement = previous_row[j - 1] + (source_letter != target_letter)
            distance = min(previous_row[j] + 1, row[j - 1] + 1, replacement)
            if i > 1 and j > 1 and source_letter == target[j - 2] and source[i - 2] == target_letter:
                distance = min(distance, row_before_previous[j - 2] + 1)
            row.append(distance)

        row_before_previous = previous_row
        previous_row = row
    return previous_row[-1]


def describe_missing_path(path: Path) -> str:
    """Describe why there is no regular file at a path, for the ``got`` line of an error.

    For a missing file, the text names the topmost missing folder, or a file with a similar name.
    """
    parent = path.parent
    if path.is_symlink() and not path.exists():
        return f"{path} is a link that leads to nothing"
    if path.is_dir():
        return f"{path} is a folder"
    if path.exists():
        return f"{path} is a pipe, a socket or a device"

    if not parent.is_dir():
        # Report the topmost missing folder, which most likely contains the mistake.
        while parent.parent != parent and not parent.parent.is_dir():
            parent = parent.parent
        return f"no directory {parent}"

    similar_name = nearest(path.name, [child.name for child in parent.iterdir()])
    if similar_name is None:
        return f"no {path.name} in {parent}"
    return f"no {path.name} in {parent}; there is {similar_name}"


def join_names(names: Sequence[str], count: int) -> str:
    """Join the first ``count`` names to a text that ends with the number of the remaining names.

    Example:
        >>> join_names(["a", "b", "c"], 2)
        'a, b and 1 more'
    """
    text = ", ".join(names[:count])
    if len(names) <= count:
        return text
    return f"{text} and {len(names) - count} more"


def first_line(error: BaseException, length: int = 300) -> str:
    """Format the type and the first line of an exception with at most ``length`` characters."""
    # Some libraries put the traceback of another process into the message.
    lines = [line.strip() for line in str(error).splitlines()]
    text = next((line for line in lines if line and not line.startswith("Traceback (")), "")
    return f"{type(error).__name__}: {text}".removesuffix(": ")[:length]


# Errors that several rules report, one function for each. They write the message and the `expected` and `got`
# lines, so the same mistake has the same text everywhere. A rule with a unique error builds its `UserError`
# itself.


def unknown_choice_error(
    path: str, value: Any, choices: Sequence[str], *, fallback_fix: str = "choose one of them, or remove it"
) -> UserError:
    """Return the error for a key whose value is not one of its choices; suggest the nearest choice.

    ``fallback_fix`` is the fix if no choice is close.

    Example:
        >>> print(unknown_choice_error("rollout.engine", "vlm", ["vllm", "torch"]))
        `rollout.engine` is 'vlm', which is not a choice; did you mean 'vllm'?
          where:    rollout.engine
          expected: one of vllm, torch
          got:      'vlm'
          fix:      write vllm
    """
    message = f"`{path}` is {value!r}, which is not a choice"
    fix = fallback_fix
    suggestion = nearest(str(value), choices) or nearest(str(value).lower(), choices)
    if suggestion is not None:
        message += f"; did you mean {suggestion!r}?"
        fix = f"write {suggestion}"
    expected = "one of " + ", ".join(choices)
    return UserError(message, where=path, expected=expected, got=repr(value), fix=fix)


def range_error(path: str, value: Any, expected: str, *, fix: str | None = None) -> UserError:
    """Return the error for a key whose value has the right type but is out of bounds.

    ``expected`` describes the bounds, such as ``1 or more``.
    """
    return UserError(f"`{path}` is out of range", where=path, expected=expected, got=repr(value), fix=fix)


def requirement_error(path: str, value: Any, condition: str, *, got: str, fix: str) -> UserError:
    """Return the error for a value that requires a condition which is not met.

    Example:
        >>> condition = "lora.rank of 1 or more"
        >>> print(requirement_error("actor.lora.dropout", 0.1, condition, got="0", fix="set lora.rank"))
        `actor.lora.dropout: 0.1` requires lora.rank of 1 or more
          where:    actor.lora.dropout
          expected: lora.rank of 1 or more
          got:      0
          fix:      set lora.rank
    """
    message = f"`{path}: {value}` requires {condition}"
    return UserError(message, where=path, expected=condition, got=got, fix=fix)


def exclusive_error(path: str, second_path: str, reason: str, *, fix: str | None = None) -> UserError:
    """Return the error for two keys that are both set although only one of them can take effect."""
    return UserError(
        f"`{path}` and `{second_path}` exclude each other: {reason}",
        where=path,
        expected=f"`{path}` or `{second_path}`",
        got="both",
        fix=fix or f"remove one of `{path}` and `{second_path}`",
    )


def divisor_error(path: str, size: int, total: int, noun: str, *, fix: str | None = None) -> UserError:
    """Return the error for a ``size`` that does not divide ``total``, the number of ``noun``.

    Example:
        >>> print(divisor_error("actor.layout.tensor", 3, 32, "attention heads"))
        3 does not divide the 32 attention heads
          where:    actor.layout.tensor
          expected: a divisor of 32
          got:      3
    """
    message = f"{size} does not divide the {total} {noun}"
    return UserError(message, where=path, expected=f"a divisor of {total}", got=str(size), fix=fix)


def not_installed_error(package: str, path: str, *, purpose: str, fix: str) -> UserError:
    """Return the error for a setting that needs a package which cannot be imported here."""
    return UserError(
        f"{package} is not installed",
        where=path,
        expected=f"{package}, for {purpose}",
        got="not installed",
        fix=fix,
    )


def missing_file_error(file: Path, *, where: str, expected: str, fix: str | None = None) -> UserError:
    """Return the error for a missing file or folder; ``got`` names a similar file in its folder, if any."""
    return UserError(
        f"{file.name} does not exist",
        where=where,
        expected=expected,
        got=describe_missing_path(file),
        fix=fix,
    )


def unreadable_file_error(
    noun: str, file: Path, error: BaseException, *, expected: str, fix: str | None = None
) -> UserError:
    """Return the error for a file that exists and cannot be opened, decoded or parsed.

    ``noun`` names the file with its article ("the model's config.json"); ``expected`` is its format.
    """
    return UserError(
        f"{noun} cannot be read", where=str(file), expected=expected, got=first_line(error), fix=fix
    )
