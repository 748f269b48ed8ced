"""One key of a configuration: its meaning, unit, bounds and choices, and what other projects call it.

A field of a configuration's dataclass is written with `setting`, or with `required` where it has no
default::

    prompts_per_step: int = setting(
        64,
        "Prompts that a training step takes.",
        unit="prompts",
        **MANY,
        also_called={"verl": "train_batch_size", "slime": "rollout_batch_size"},
    )

Unit and bounds of a common kind of number have a name in `sections.bounds`.

Everything that is said about the key is made from this: parsing and its errors, the check of the value
(`value_errors`), the reference in the documentation, and the answer to a name of another project. A
section is a field whose type is such a dataclass: what its fields say holds wherever it stands.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron_rl.errors import UserError, nearest

S = TypeVar("S")
NO_SETTING: Mapping[str, Any] = {"setting": None}
"""Metadata of a dataclass field that no configuration sets."""


@dataclass(frozen=True)
class ForeignName:
    """Another project's name of a key.

    ``conversion`` says how the value differs from ours, if it does. ``values`` maps single values of theirs
    to ours, `REMOVED` for one that asks for nothing here. ``piece`` is the piece of an algorithm that has the
    setting where the algorithm's own piece has not.
    """

    project: str
    name: str
    conversion: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    piece: str = ""

    def difference(self) -> str:
        """Return in one sentence how the value differs, empty where it does not."""
        mapped = [
            f"{_shown(theirs)} is {'no line' if ours == REMOVED else f'`{_shown(ours)}`'}"
            for theirs, ours in self.values.items()
        ]
        named = [f"with `name: {self.piece}`"] if self.piece else []
        return "; ".join(filter(None, [self.conversion, *mapped, *named]))


REMOVED = "(no line)"
"""Our value of a setting of another project that asks for nothing here: the line is left out."""


@dataclass(frozen=True)
class Setting:
    """Hold what is said about one key.

    ``meaning`` is one sentence, ``unset`` says what None stands for, ``advice`` what to do about a value out
    of bounds. ``at_least`` and ``at_most`` are allowed values, ``more_than`` and ``less_than`` are not.
    ``spelled`` maps other spellings of a choice to it; ``refused`` says of values why they are no choice.
    ``number_means`` is the section that a bare number given to a section most likely stands for, with
    ``VALUE`` in its place. ``per_task`` marks what a sampling profile may set for one task; a key with
    ``jobs`` is required for these alone; ``takes_rest`` marks the key of a section that every name not
    otherwise known there belongs to.
    """

    meaning: str
    unit: str = ""
    unset: str = ""
    at_least: float | None = None
    at_most: float | None = None
    more_than: float | None = None
    less_than: float | None = None
    choices: tuple[str, ...] = ()
    or_path: bool = False
    spelled: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    advice: str = ""
    example: str = ""
    number_means: str = ""
    per_task: bool = False
    takes_rest: bool = False
    jobs: tuple[str, ...] = ()
    foreign_names: tuple[ForeignName, ...] = ()
    foreign_names_below: tuple[tuple[str, ForeignName], ...] = ()

    def bounds(self) -> str:
        """Return the bounds of a number in words, empty where there are none."""
        low = high = ""
        if self.at_least is not None:
            low = f"{_number(self.at_least)} or more"
        elif self.more_than is not None:
            low = f"more than {_number(self.more_than)}"
        if self.at_most is not None:
            high = f"at most {_number(self.at_most)}"
        elif self.less_than is not None:
            high = f"less than {_number(self.less_than)}"
        return " and ".join(filter(None, [low, high]))

    def contains(self, value: float) -> bool:
        """Return whether a number lies within the bounds."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.more_than is None or value > self.more_than)
            and (self.at_most is None or value <= self.at_most)
            and (self.less_than is None or value < self.less_than)
        )

    def error(self, path: str, value: Any) -> UserError | None:
        """Return the error of a typed value, None for a good one."""
        if self.choices and isinstance(value, str):
            taken = value in self.choices or (self.or_path and ":" in value)
            return None if taken else self._choice_error(path, value)
        if isinstance(value, str) and not value.strip():
            return UserError(f"`{path}` is empty", where=path, expected="text", got="''", fix="give a value")
        if isinstance(value, int | float) and not isinstance(value, bool) and not self.contains(value):
            return UserError(
                f"`{path}` is out of range",
                where=path,
                expected=self.bounds(),
                got=f"{value}",
                fix=self.advice or f"give a value that is {self.bounds()}",
            )
        return None

    def _choice_error(self, path: str, value: str) -> UserError:
        close = self.spelled.get(value.lower()) or nearest(value.lower(), self.choices)
        reason = self.refused.get(value)
        return UserError(
            f"`{path}` is {value!r}, which is not a choice" + (f"; did you mean {close!r}?" if close else ""),
            where=path,
            expected=f"one of {', '.join(self.choices)}" + (", or file.py:Name" if self.or_path else ""),
            got=f"{value!r} (text)",
            fix=(f"write {path}={close}" if close else f"choose {' or '.join(self.choices)}")
            + (f"; {value} is not offered: {reason}" if reason else ""),
        )


def setting(
    default: Any,
    meaning: str,
    *,
    also_called: Mapping[str, str] | None = None,
    also_called_below: Mapping[str, Mapping[str, str]] | None = None,
    conversion: str | Mapping[str, str] = "",
    their_values: Mapping[str, Mapping[Any, Any]] | None = None,
    **says: Any,
) -> Any:
    """Return a dataclass field with a default; ``says`` are further fields of `Setting`.

    ``also_called`` maps a project to its names of the key, separated by commas; ``conversion`` says how the
    value differs, for all of them or by name, and ``their_values`` maps a name's values to ours.
    ``also_called_below`` does the same for keys of a section that other projects name by the section: our key
    below it -> project -> names. It is written ``PIECE: KEY`` where that piece of an algorithm has it.
    """
    values = their_values or {}
    names = tuple(_foreign_names(also_called or {}, conversion, values))
    below = []
    for key, projects in (also_called_below or {}).items():
        piece, _, name_below = key.rpartition(": ")
        for name in _foreign_names(projects, conversion, values, piece):
            below.append((name_below, name))
    says |= {"foreign_names": names, "foreign_names_below": tuple(below)}
    metadata = {"setting": Setting(meaning, **says)}
    if default is dataclasses.MISSING:
        return field(metadata=metadata)
    if isinstance(default, dict) or dataclasses.is_dataclass(default):
        return field(default_factory=functools.partial(copy.deepcopy, default), metadata=metadata)
    return field(default=default, metadata=metadata)


def required(meaning: str, **says: Any) -> Any:
    """Return a dataclass field without a default; ``says`` as in `setting`."""
    return setting(dataclasses.MISSING, meaning, **says)


def setting_of(item: dataclasses.Field) -> Setting:
    """Return what is said about a dataclass field; nothing for one not written with `setting`."""
    return item.metadata.get("setting") or Setting("")


def is_setting(item: dataclasses.Field) -> bool:
    """Say whether a configuration may set a dataclass field."""
    return item.metadata.get("setting", True) is not None


def settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Setting, Any]]:
    """Yield the path, what is said about it and the value of every key below a section that is present."""
    for path, item, value in _members(section, prefix):
        if not is_section(value):
            yield path, setting_of(item), value
        elif isinstance(value, dict):
            for name, entry in value.items():
                yield from settings(entry, f"{path}.{name}")
        else:
            yield from settings(value, path)


def with_value(section: Any, path: str, value: Any) -> Any:
    """Return a section with another value of the key at a dotted path, which is there."""
    names = section if isinstance(section, dict) else [item.name for item in dataclasses.fields(section)]
    name = max((name for name in names if f"{path}.".startswith(f"{name}.")), key=len)
    if name != path:
        inner = section[name] if isinstance(section, dict) else getattr(section, name)
        value = with_value(inner, path.removeprefix(f"{name}."), value)
    return (
        {**section, name: value}
        if isinstance(section, dict)
        else dataclasses.replace(section, **{name: value})
    )


def sections_of(section: Any, cls: type[S], prefix: str = "") -> Iterator[tuple[str, S]]:
    """Yield the path and the value of every section of a class that is present below a section."""
    if isinstance(section, cls):
        yield prefix, section
    for path, _, value in _members(section, prefix):
        entries = value if isinstance(value, dict) and is_section(value) else {}
        for name, entry in entries.items():
            yield from sections_of(entry, cls, f"{path}.{name}")
        if dataclasses.is_dataclass(value):
            yield from sections_of(value, cls, path)


def is_section(value: Any) -> bool:
    """Say whether a value has named values below it: a dataclass, or a mapping of names to dataclasses."""
    if isinstance(value, dict):
        return bool(value) and all(dataclasses.is_dataclass(entry) for entry in value.values())
    return dataclasses.is_dataclass(value)


def _members(section: Any, prefix: str) -> Iterator[tuple[str, dataclasses.Field, Any]]:
    for item in dataclasses.fields(section):
        yield f"{prefix}.{item.name}" if prefix else item.name, item, getattr(section, item.name)


def value_errors(section: Any, prefix: str = "") -> list[UserError]:
    """Return the errors of single values anywhere below a section."""
    errors = (said.error(path, value) for path, said, value in settings(section, prefix))
    return [error for error in errors if error is not None]


def _foreign_names(
    projects: Mapping[str, str],
    conversion: str | Mapping[str, str],
    values: Mapping[str, Mapping[Any, Any]],
    piece: str = "",
) -> Iterator[ForeignName]:
    for project, names in projects.items():
        for name in names.split(", "):
            difference = conversion if isinstance(conversion, str) else conversion.get(name, "")
            yield ForeignName(project, name, difference, values.get(name, {}), piece)


def _shown(value: Any) -> str:
    """Return a value as a configuration writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:g}"
