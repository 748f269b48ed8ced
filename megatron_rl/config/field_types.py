"""Types of configuration fields: conversion of plain values, and the type as text.

A field's annotation is the only definition of its type. Parsing, error texts and the generated reference all
read the annotation through the functions of this module.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Sequence
from typing import Any

from megatron_rl.config.sections.bounds import MAX_WORLD


@functools.cache
def field_hints(cls: type) -> dict[str, Any]:
    """Return the evaluated type of each field of a dataclass."""
    # Annotations are strings under `from __future__ import annotations`.
    evaluated = typing.get_type_hints(cls)
    return {item.name: evaluated[item.name] for item in dataclasses.fields(cls)}


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the types in a union; for any other type, a tuple of this type alone.

    Example:
        >>> union_members(int | None), union_members(str)
        ((<class 'int'>, <class 'NoneType'>), (<class 'str'>,))
    """
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)


def accepts_none(hint: Any) -> bool:
    """Return whether a type accepts None."""
    return type(None) in union_members(hint)


def section_class(hint: Any) -> type | None:
    """Return the dataclass in a type such as ``CriticConfig | None``; None for the type of a plain value."""
    for option in union_members(hint):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return option
    return None


def entry_class(hint: Any) -> type | None:
    """Return the dataclass of the values of a ``dict[str, dataclass]``, or None for any other type."""
    if typing.get_origin(hint) is dict:
        return section_class(typing.get_args(hint)[1])
    return None


def accepts_mapping(hint: Any) -> bool:
    """Return whether a type accepts a mapping with arbitrary names."""
    return any(typing.get_origin(option) is dict for option in union_members(hint))


def value_paths(cls: type, prefix: str = "") -> list[str]:
    """Return the dotted paths of all plain values in a dataclass and its sections.

    Each path begins with ``prefix``.
    """
    paths = []
    for name, hint in field_hints(cls).items():
        section = section_class(hint)
        if section is None:
            paths.append(f"{prefix}{name}")
        else:
            paths.extend(value_paths(section, f"{prefix}{name}."))
    return paths


def convert_value(hint: Any, raw: Any) -> tuple[bool, Any]:
    """Convert a plain value to a type; return (whether the type accepts the value, typed value).

    Example:
        >>> convert_value(int | None, 1e3), convert_value(int, "64")
        ((True, 1000), (False, '64'))
    """
    # Try the members in the order of the union: `str | tuple[str, ...]` takes a string as one path.
    for option in union_members(hint):
        accepted, value = _convert_to(option, raw)
        if accepted:
            return True, value
    return False, raw


def _convert_to(option: Any, raw: Any) -> tuple[bool, Any]:
    """Convert a plain value to one member of a union; return (whether it is accepted, typed value)."""
    origin = typing.get_origin(option)
    arguments = typing.get_args(option)
    # bool is a subclass of int, so `steps: true` would otherwise be 1 step.
    is_number = isinstance(raw, int | float) and not isinstance(raw, bool)

    if option is Any:
        return _is_plain(raw), raw
    if option is type(None):
        return raw is None, None
    if option is bool:
        return isinstance(raw, bool), raw
    if option is int:
        # Accept `1e6` as an integer, below the size up to which floats represent every integer.
        if isinstance(raw, float) and raw.is_integer() and abs(raw) < 2**53:
            return True, int(raw)
        return is_number and isinstance(raw, int), raw
    if option is float:
        if not is_number or not math.isfinite(raw):
            return False, raw
        return True, float(raw)
    if option is str:
        return isinstance(raw, str), raw
    if origin is tuple:
        return _convert_tuple(arguments[0], raw)
    if origin is dict and section_class(arguments[1]) is not None:
        # Mappings with sections are converted by `parse`.
        return raw == {}, {}
    if origin is dict:
        return _convert_mapping(arguments[1], raw)
    return False, raw


def _is_plain(raw: Any) -> bool:
    """Return whether a value can be written as JSON, as the saved configuration requires."""
    if isinstance(raw, dict):
        return all(isinstance(key, str) and _is_plain(value) for key, value in raw.items())
    if isinstance(raw, list):
        return all(_is_plain(value) for value in raw)
    return raw is None or isinstance(raw, str | bool | int | float)


def _convert_tuple(item_type: Any, raw: Any) -> tuple[bool, Any]:
    """Convert a list to a tuple of ``item_type``; return (whether it is accepted, typed value).

    A tuple of integers can also be written as text with ranges, such as ``0-3,8``.
    """
    if item_type is int and isinstance(raw, str):
        integers = parse_ranges(raw)
        return integers is not None, integers
    if not isinstance(raw, list | tuple):
        return False, raw

    conversions = [convert_value(item_type, value) for value in raw]
    all_accepted = all(accepted for accepted, _ in conversions)
    return all_accepted, tuple(value for _, value in conversions)


def _convert_mapping(value_type: Any, raw: Any) -> tuple[bool, Any]:
    """Convert the values of a mapping to ``value_type``; return (whether it is accepted, typed mapping)."""
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        return False, raw

    values = {}
    for key, value in raw.items():
        accepted, values[key] = convert_value(value_type, value)
        if not accepted:
            return False, raw
    return True, values


def type_text(hint: Any) -> str:
    """Describe a type in words, for the ``expected`` line of an error.

    Example:
        >>> type_text(int | None)
        'an integer or null'
    """
    return " or ".join(_option_text(option) for option in union_members(hint))


def _option_text(option: Any) -> str:
    """Describe one member of a union in the words of the configuration reference.

    The reference calls a string a text, and a mapping a section.
    """
    simple_texts = {
        int: "an integer",
        float: "a number",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    if option in simple_texts:
        return simple_texts[option]

    origin = typing.get_origin(option)
    arguments = typing.get_args(option)
    if origin is tuple and arguments[0] is int:
        return 'a list of integers ([0, 1, 2]) or ranges ("0-3,8")'
    if origin is tuple:
        return "a list of texts"
    if origin is not dict:
        return "a value"
    if arguments[1] is str:
        return "a section of names and texts"
    if typing.get_origin(arguments[1]) is dict or section_class(arguments[1]):
        return "a section of named sections"
    return "a section of names and values"


def type_fix(hint: Any, raw: Any, path: str) -> str:
    """Return the fix for a value of the wrong type: a similar value that the key at ``path`` accepts."""
    name = path.rpartition(".")[2]
    accepted_types = union_members(hint)
    accepts_number = int in accepted_types or float in accepted_types

    # Check the most likely mistake first.
    if str in accepted_types and accepts_mapping(hint) and not isinstance(raw, str):
        return f"write a name, or names and values below `{name}:`"
    if str in accepted_types and isinstance(raw, bool | int | float):
        return f'put it in quotes: {name}: "{raw}"'
    if isinstance(raw, str) and raw.strip().lower() in ("true", "false") and bool in accepted_types:
        return f"write it without quotes: {name}: {raw.strip().lower()}"
    if isinstance(raw, str) and accepts_number and _is_finite_number(raw):
        return f"write it without quotes: {name}: {raw}"
    if raw is None:
        return f"give a value, or remove the line to have the default of `{path}`"
    accepts_list = any(typing.get_origin(option) is tuple for option in accepted_types)
    if accepts_list and not isinstance(raw, list):
        return f"write a list: {name}: [{raw}]"
    return f"write {name}: followed by {type_text(hint)}"


def _is_finite_number(text: str) -> bool:
    """Return whether Python's ``float`` parses a string, and the number is finite."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def parse_ranges(text: str) -> tuple[int, ...] | None:
    """Parse integers from a text such as ``0-3,8``; return None for invalid text.

    Example:
        >>> parse_ranges("0-3,8")
        (0, 1, 2, 3, 8)
    """
    integers: list[int] = []
    for range_text in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", range_text)
        if match is None:
            return None

        # Check the bounds before the range is expanded: 0-999999999 would fill the memory.
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first or last >= MAX_WORLD:
            return None
        integers.extend(range(first, last + 1))
    return tuple(integers)


def format_ranges(values: Sequence[int]) -> str:
    """Format integers as a text such as ``0-3,8``, the inverse of `parse_ranges`.

    Example:
        >>> format_ranges([0, 1, 2, 3, 8])
        '0-3,8'
    """
    # First and last integer of each range.
    ranges: list[tuple[int, int]] = []
    for value in values:
        first = value
        if ranges and value == ranges[-1][1] + 1:
            first, _ = ranges.pop()
        ranges.append((first, value))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
