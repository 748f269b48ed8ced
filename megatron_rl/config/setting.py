"""Description of one key of a configuration: meaning, unit, bounds, choices, and names in other projects.

A configuration field is declared with `setting`, or with `required` for a key without a default::

    prompts_per_step: int = setting(
        64,
        "Number of prompts of a training step.",
        unit="prompts",
        **MANY,
        also_called={"verl": "train_batch_size", "slime": "rollout_batch_size"},
    )

Units and bounds of common kinds of numbers have names in `sections.bounds`.

The field is the only description of a key. Parsing, validation (`value_errors`), the documentation and the
suggestions for names from other projects all read the field. A section is a field whose type is a dataclass
with such fields; sections of one type have the same keys.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron_rl.errors import UserError, nearest, range_error

S = TypeVar("S")

# Metadata of a dataclass field that is not a configuration key.
NO_SETTING: Mapping[str, Any] = {"setting": None}

# Our value for a value of another project that needs no setting here: the user removes the line.
REMOVED = "(no line)"


@dataclass(frozen=True)
class ForeignName:
    """Name of a key in another project.

    Example: TRL's ``loss_type`` is our key ``algorithm.aggregation``, with ``values={"bnpo": "token-mean",
    ...}``.
    """

    project: str
    """Project that has the name; ``common`` for several."""
    name: str
    """Name in that project, with as many enclosing sections as make it unique."""
    conversion: str = ""
    """How the other project's values differ from ours; empty if they are the same."""
    values: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    """Other project's value -> our value, `REMOVED` for a value that needs no setting here."""
    piece: str = ""
    """Piece (component) of an algorithm that has the setting, such as one policy loss. Empty if the default
    piece has the setting."""

    def difference_text(self) -> str:
        """Describe how the other project's values differ from this package's; empty if they do not.

        The documentation prints the text. If the user must remove the setting instead of translating a value,
        the text for this value is "no line". If only one piece (component) of the algorithm, such as
        one policy loss, has the setting, the text ends with the setting that selects this piece.
        """
        clauses = []
        if self.conversion:
            clauses.append(self.conversion)
        for their_value, our_value in self.values.items():
            our_text = f"`{_value_text(our_value)}`"
            if our_value == REMOVED:
                our_text = "no line"
            clauses.append(f"{_value_text(their_value)} is {our_text}")
        if self.piece:
            clauses.append(f"with `name: {self.piece}`")
        return "; ".join(clauses)


@dataclass(frozen=True)
class Setting:
    """Description of one key of the configuration: its meaning, valid values, and names in other projects.

    Example: ``Setting("Training steps.", unit="steps", at_least=1)`` does not accept 0.
    """

    meaning: str
    """Meaning of the key, one sentence of the reference."""
    unit: str = ""
    """Unit of a number."""
    unset: str = ""
    """Meaning of None, as text for the documentation."""
    at_least: float | None = None
    """Smallest allowed number."""
    at_most: float | None = None
    """Largest allowed number."""
    more_than: float | None = None
    """Exclusive lower bound of a number."""
    less_than: float | None = None
    """Exclusive upper bound of a number."""
    choices: tuple[str, ...] = ()
    """Allowed texts; empty if any text is allowed."""
    allows_path: bool = False
    """Whether ``file.py:Name`` is allowed in addition to the choices."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Alternative spelling in lower case -> the choice."""
    refusal_reasons: Mapping[str, str] = field(default_factory=dict)
    """Value that users may expect to be a choice -> reason why it is not."""
    advice: str = ""
    """Fix for a value out of bounds."""
    example: str = ""
    """Value in the fix of a missing key."""
    section_for_number: str = ""
    """Section to suggest if a user writes a bare number instead of the section.

    For example ``{name: loss, coef: VALUE}``, in which ``VALUE`` is replaced by the number. Empty without a
    suggestion."""
    per_task: bool = False
    """Whether a sampling profile can set the key for one task."""
    collects_unknown_names: bool = False
    """Whether the key collects all names of its section that are not fields."""
    jobs: tuple[str, ...] = ()
    """Jobs that require the key; if empty, a key without a default is required by every job."""
    alternative_key: str | None = None
    """Key of the same section that can be set in place of this one, if a job requires this one."""
    foreign_names: tuple[ForeignName, ...] = ()
    """Names of the key in other projects."""
    foreign_names_below: tuple[tuple[str, ForeignName], ...] = ()
    """Pairs of a key below this section and a name of that key in another project."""

    def bounds_text(self) -> str:
        """Describe the bounds of a number in words; return an empty text without bounds.

        Example:
            >>> Setting("", at_least=0, less_than=1).bounds_text()
            '0 or more and less than 1'
        """
        bounds = []
        if self.at_least is not None:
            bounds.append(f"{_number_text(self.at_least)} or more")
        elif self.more_than is not None:
            bounds.append(f"more than {_number_text(self.more_than)}")

        if self.at_most is not None:
            bounds.append(f"at most {_number_text(self.at_most)}")
        elif self.less_than is not None:
            bounds.append(f"less than {_number_text(self.less_than)}")
        return " and ".join(bounds)

    def is_within_bounds(self, value: float) -> bool:
        """Return whether a number is within the bounds."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.more_than is None or value > self.more_than)
            and (self.at_most is None or value <= self.at_most)
            and (self.less_than is None or value < self.less_than)
        )

    def value_error(self, path: str, value: Any) -> UserError | None:
        """Return the error for an invalid value of the key at ``path``, or None for a valid value.

        ``value`` must have the type of the key. Its bounds and choices are validated.
        """
        if isinstance(value, str):
            if self.choices:
                # Check only the form of an import path, `file.py:Name`: `check` later imports the class.
                is_import_path = self.allows_path and ":" in value
                if value in self.choices or is_import_path:
                    return None
                return self._choice_error(path, value)
            if not value.strip():
                return UserError(
                    f"`{path}` is empty", where=path, expected="text", got="''", fix="give a value"
                )
            return None

        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not self.is_within_bounds(value):
            fix = self.advice or f"give a value that is {self.bounds_text()}"
            return range_error(path, value, self.bounds_text(), fix=fix)
        return None

    def _choice_error(self, path: str, value: str) -> UserError:
        """Return the error for an invalid choice, with the nearest choice as a suggestion."""
        # Alternative spellings first: the edit distance from `fp32` to `float32` is large.
        suggestion = self.spellings.get(value.lower()) or nearest(value.lower(), self.choices)
        reason = self.refusal_reasons.get(value)

        message = f"`{path}` is {value!r}, which is not a choice"
        fix = f"choose {' or '.join(self.choices)}"
        if suggestion:
            message += f"; did you mean {suggestion!r}?"
            fix = f"write {path}={suggestion}"
        if reason:
            fix += f"; {value} is not offered: {reason}"

        expected = f"one of {', '.join(self.choices)}"
        if self.allows_path:
            expected += ", or file.py:Name"
        return UserError(message, where=path, expected=expected, got=f"{value!r} (text)", fix=fix)


def setting(
    default: Any,
    meaning: str,
    *,
    also_called: Mapping[str, str] | None = None,
    also_called_below: Mapping[str, Mapping[str, str]] | None = None,
    conversion: str | Mapping[str, str] = "",
    their_values: Mapping[str, Mapping[Any, Any]] | None = None,
    **attributes: Any,
) -> Any:
    """Return a dataclass field with a default; ``attributes`` are further fields of `Setting`.

    The other arguments describe the setting's names in other projects, such as verl. ``also_called`` maps a
    project to its names of the setting, separated by commas. ``conversion`` describes how the other project's
    values differ from this package's values. It is a text for all names, or a mapping from a name to its
    text. ``their_values`` maps a name to a mapping from the other project's value to this package's value.

    If the field is a section, ``also_called_below`` maps each key inside the section to a mapping like
    ``also_called``. Some keys exist only in one piece (component) of an algorithm, such as one policy loss.
    Such a key is written as ``PIECE: KEY``. For example, ``loss: coef`` is the key ``coef`` of the piece
    ``loss``.
    """
    # Parse the names, which fields write as text for brevity.
    values = their_values or {}
    names = tuple(_foreign_names(also_called or {}, conversion, values))
    names_below = []
    for key, names_by_project in (also_called_below or {}).items():
        piece, _, key_below = key.rpartition(": ")
        for name in _foreign_names(names_by_project, conversion, values, piece):
            names_below.append((key_below, name))

    description = Setting(meaning, foreign_names=names, foreign_names_below=tuple(names_below), **attributes)
    metadata = {"setting": description}
    if default is dataclasses.MISSING:
        return field(metadata=metadata)

    # Copy mutable defaults for every configuration.
    if isinstance(default, dict) or dataclasses.is_dataclass(default):
        return field(default_factory=functools.partial(copy.deepcopy, default), metadata=metadata)
    return field(default=default, metadata=metadata)


def required(meaning: str, **attributes: Any) -> Any:
    """Return a dataclass field without a default; ``attributes`` are further fields of `Setting`."""
    return setting(dataclasses.MISSING, meaning, **attributes)


def setting_of(item: dataclasses.Field) -> Setting:
    """Return the `Setting` of a dataclass field, an empty one if it was not declared with `setting`."""
    return item.metadata.get("setting") or Setting("")


def is_setting(item: dataclasses.Field) -> bool:
    """Return whether a configuration can set a dataclass field."""
    return item.metadata.get("setting", True) is not None


def iter_settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Setting, Any]]:
    """Yield (path, description, value) for every key at any depth; ``prefix`` is the path of ``section``."""
    for path, item, value in _fields_of(section, prefix):
        if not is_section(value):
            yield path, setting_of(item), value
        elif isinstance(value, dict):
            for name, named_section in value.items():
                yield from iter_settings(named_section, f"{path}.{name}")
        else:
            yield from iter_settings(value, path)


def with_value(section: Any, path: str, value: Any) -> Any:
    """Return a copy of a section with a new value of the key at a dotted path.

    Example: ``with_value(config, "actor.layout.tensor", 2)``.
    """
    if isinstance(section, dict):
        values_by_name = section
    else:
        values_by_name = {item.name: getattr(section, item.name) for item in dataclasses.fields(section)}

    # A key that the user chose, such as the name of a data set, may contain dots: choose the longest key at
    # the start of the path.
    matching_names = [name for name in values_by_name if f"{path}.".startswith(f"{name}.")]
    name = max(matching_names, key=len)

    # The remaining path is inside the named section.
    if name != path:
        value = with_value(values_by_name[name], path.removeprefix(f"{name}."), value)

    if isinstance(section, dict):
        return {**section, name: value}
    return dataclasses.replace(section, **{name: value})


def sections_of(section: Any, cls: type[S], prefix: str = "") -> Iterator[tuple[str, S]]:
    """Yield (path, section) for every section of class ``cls``; ``prefix`` is the path of ``section``."""
    if isinstance(section, cls):
        yield prefix, section
    for path, _, value in _fields_of(section, prefix):
        if isinstance(value, dict) and is_section(value):
            for name, named_section in value.items():
                yield from sections_of(named_section, cls, f"{path}.{name}")
        elif dataclasses.is_dataclass(value):
            yield from sections_of(value, cls, path)


def is_section(value: Any) -> bool:
    """Return whether a value is a section: a dataclass, or a non-empty mapping of names to dataclasses."""
    if isinstance(value, dict):
        return bool(value) and all(dataclasses.is_dataclass(inner) for inner in value.values())
    return dataclasses.is_dataclass(value)


def key_path(section: str, name: str) -> str:
    """Join the path of a section, empty for the top level, and a name in it to a dotted path.

    Example:
        >>> key_path("", "actor"), key_path("actor", "layout")
        ('actor', 'actor.layout')
    """
    return f"{section}.{name}" if section else name


def _fields_of(section: Any, prefix: str) -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yield (path, dataclass field, value) for every field; ``prefix`` is the path of ``section``."""
    for item in dataclasses.fields(section):
        yield key_path(prefix, item.name), item, getattr(section, item.name)


def value_errors(section: Any, prefix: str = "") -> list[UserError]:
    """Return the errors of all values in a section, at any depth; ``prefix`` is the section's path."""
    errors = []
    for path, description, value in iter_settings(section, prefix):
        error = description.value_error(path, value)
        if error is not None:
            errors.append(error)
    return errors


def _foreign_names(
    also_called: Mapping[str, str],
    conversion: str | Mapping[str, str],
    their_values: Mapping[str, Mapping[Any, Any]],
    piece: str = "",
) -> Iterator[ForeignName]:
    """Yield a `ForeignName` for each name that other projects have for a setting.

    ``also_called`` maps a project to the project's names. ``conversion`` describes how the projects' values
    differ, as text or by name. ``their_values`` maps a project's name to a mapping from the project's value
    to the value of this package. If only one piece of the algorithm (such as a policy loss) has the setting,
    ``piece`` is the piece's name.
    """
    for project, names in also_called.items():
        for name in names.split(", "):
            difference = conversion if isinstance(conversion, str) else conversion.get(name, "")
            yield ForeignName(project, name, difference, their_values.get(name, {}), piece)


def _value_text(value: Any) -> str:
    """Format a plain value as YAML writes it: ``null``, ``true``, ``false``, or its text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _number_text(value: float) -> str:
    """Format a bound as text, without a decimal point if it is an integer."""
    # From 1e15 on, scientific notation is easier to read.
    if float(value).is_integer() and abs(value) < 1e15:
        return str(int(value))
    return f"{value:g}"
