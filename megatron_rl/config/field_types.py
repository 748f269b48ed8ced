"""What the type of a field takes: conversion from plain values, and the type in words."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from typing import Any

from megatron_rl.config.ranges import parse_ranges


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """Return the evaluated types of a dataclass's fields."""
    evaluated = typing.get_type_hints(cls)
    return {item.name: evaluated[item.name] for item in dataclasses.fields(cls)}


def options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type alone."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)


def optional(hint: Any) -> bool:
    """Return whether a type takes None."""
    return type(None) in options(hint)


def section_class(hint: Any) -> type | None:
    """Return the dataclass of a type, or of its optional form, or None where it is a plain value."""
    for option in options(hint):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return option
    return None


def entry_class(hint: Any) -> type | None:
    """Return the dataclass of the values of a ``dict[str, dataclass]``, or None where it is another type."""
    if typing.get_origin(hint) is dict:
        return section_class(typing.get_args(hint)[1])
    return None


def is_mapping(hint: Any) -> bool:
    """Return whether a type takes a mapping of free names."""
    return any(typing.get_origin(option) is dict for option in options(hint))


def known_paths(cls: type, prefix: str = "") -> list[str]:
    """Return the dotted path of every plain value below a dataclass."""
    paths = []
    for name, hint in hints(cls).items():
        section = section_class(hint)
        paths.extend(known_paths(section, f"{prefix}{name}.") if section else [f"{prefix}{name}"])
    return paths


def convert(hint: Any, raw: Any) -> tuple[bool, Any]:
    """Return whether a plain value is of a type, and the typed value."""
    for option in options(hint):
        accepted, value = _convert(option, raw)
        if accepted:
            return True, value
    return False, raw


def _convert(option: Any, raw: Any) -> tuple[bool, Any]:
    if option is Any:
        return _is_plain(raw), raw
    if option is type(None):
        return raw is None, None
    if option is bool:
        return isinstance(raw, bool), raw
    if option is int:
        if isinstance(raw, float) and math.isfinite(raw) and raw.is_integer() and abs(raw) < 2**53:
            return True, int(raw)
        # Larger numbers fit no tensor; refusing them here keeps the arithmetic below free of surprises.
        return isinstance(raw, int) and not isinstance(raw, bool) and abs(raw) < 2**63, raw
    if option is float:
        number = isinstance(raw, int | float) and not isinstance(raw, bool)
        if number and isinstance(raw, int) and abs(raw) >= 2**63:
            return False, raw
        return number and math.isfinite(raw), float(raw) if number else raw
    if option is str:
        return isinstance(raw, str) and _is_utf8(raw), raw
    origin, arguments = typing.get_origin(option), typing.get_args(option)
    if origin is tuple:
        return _convert_tuple(arguments[0], raw)
    if origin is dict and section_class(arguments[1]) is not None:
        return raw == {}, {}
    if origin is dict:
        return _convert_mapping(arguments[1], raw)
    return False, raw


def _is_plain(raw: Any) -> bool:
    """Return whether a free value is made of what JSON can write, as the run folder's copy needs."""
    if isinstance(raw, dict):
        return all(isinstance(key, str) and _is_plain(value) for key, value in raw.items())
    if isinstance(raw, list):
        return all(_is_plain(value) for value in raw)
    return raw is None or (_is_utf8(raw) if isinstance(raw, str) else isinstance(raw, bool | int | float))


def _is_utf8(text: str) -> bool:
    """Return whether files and terminals can take a text: YAML's escapes also make halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _convert_tuple(item: Any, raw: Any) -> tuple[bool, Any]:
    if item is int and isinstance(raw, str):
        ranks = parse_ranges(raw)
        return ranks is not None, ranks
    if not isinstance(raw, list | tuple):
        return False, raw
    converted = [convert(item, value) for value in raw]
    return all(accepted for accepted, _ in converted), tuple(value for _, value in converted)


def _convert_mapping(item: Any, raw: Any) -> tuple[bool, Any]:
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        return False, raw
    converted = {key: convert(item, value) for key, value in raw.items()}
    return all(accepted for accepted, _ in converted.values()), {
        key: value for key, (_, value) in converted.items()
    }


def type_words(hint: Any) -> str:
    """Return in words what a type takes."""
    return " or ".join(_words(option) for option in options(hint))


def _words(option: Any) -> str:
    simple = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if option in simple:
        return simple[option]
    origin, arguments = typing.get_origin(option), typing.get_args(option)
    if origin is tuple and arguments[0] is int:
        return 'a list of integers ([0, 1, 2]) or ranges ("0-3,8")'
    if origin is tuple:
        return "a list of texts"
    if origin is dict and arguments[1] is str:
        return "a section of names and texts"
    if origin is dict and (typing.get_origin(arguments[1]) is dict or section_class(arguments[1])):
        return "a section of named sections"
    return "a section of names and values" if origin is dict else "a value"


def type_fix(hint: Any, raw: Any, path: str) -> str:
    """Return what to write instead of a value of the wrong type."""
    name = path.rpartition(".")[2]
    taken = options(hint)
    if str in taken and is_mapping(hint) and not isinstance(raw, str):
        return f"write a name, or names and values below `{name}:`"
    if str in taken and isinstance(raw, bool | int | float):
        return f'put it in quotes: {name}: "{raw}"'
    if isinstance(raw, str) and raw.strip().lower() in ("true", "false") and bool in taken:
        return f"write it without quotes: {name}: {raw.strip().lower()}"
    if isinstance(raw, str) and (int in taken or float in taken) and _reads_as_number(raw):
        return f"write it without quotes: {name}: {raw}"
    if isinstance(raw, str) and not _is_utf8(raw):
        return "write whole characters: an escape from \\ud800 to \\udfff is half of one"
    if isinstance(raw, int) and (int in taken or float in taken) and abs(raw) >= 2**63:
        return "write a number nearer to 0 than 2**63"
    if raw is None:
        return f"give a value, or remove the line to have the default of `{path}`"
    if any(typing.get_origin(option) is tuple for option in taken) and not isinstance(raw, list):
        return f"write a list: {name}: [{raw}]"
    return f"write {name}: followed by {type_words(hint)}"


def _reads_as_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
