"""From a tree of values to typed, frozen dataclasses, collecting every mistake on the way."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.source import DEFAULT, Leaf, Origin, Section, describe
from megatron_rl.config.unknown import note_unknown
from megatron_rl.errors import UserError

_MAX_RANKS = 1 << 20


@dataclass
class Build:
    """Collect what building finds: mistakes, the origin of each value, and the paths left broken."""

    errors: list[UserError] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def fail(self, path: str, node: Leaf | Section | None, message: str, **fields: str | None) -> None:
        """Record a mistake in the value of a configuration path."""
        self.note(path, node, message, **fields)
        self.broken.add(path)

    def note(self, path: str, node: Leaf | Section | None, message: str, **fields: str | None) -> None:
        """Record a mistake that leaves every known value as it is."""
        origin = node.origin if node is not None else None
        where = f"{path} ({origin})" if origin is not None and origin.kind != "default" else path
        self.errors.append(UserError(message, where=where, **fields))


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """Return the evaluated field types of a dataclass."""
    return typing.get_type_hints(cls)


def section_class(hint: Any) -> type | None:
    """Return the dataclass of a type, or of its optional form, or None where it is a plain value."""
    for option in _options(hint):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return option
    return None


def entry_class(hint: Any) -> type | None:
    """Return the dataclass of the values of a ``dict[str, dataclass]``, or None where it is another type."""
    if typing.get_origin(hint) is dict:
        return section_class(typing.get_args(hint)[1])
    return None


def known_paths(cls: type, prefix: str = "") -> list[str]:
    """Return the dotted path of every plain value below a dataclass."""
    result = []
    for item in dataclasses.fields(cls):
        path = f"{prefix}{item.name}"
        below = section_class(hints(cls)[item.name])
        result.extend(known_paths(below, path + ".") if below else [path])
    return result


def build(cls: type, section: Section, found: Build, path: str = "", defaults: Any = None) -> Any:
    """Return an instance of ``cls`` made from the section; broken values keep their default.

    ``defaults`` is an instance whose values stand where the section has none: the outer default of a
    nested section may differ from the default of its class.
    """
    known = {item.name: item for item in dataclasses.fields(cls)}
    for key, node in section.children.items():
        if key not in known:
            note_unknown(key, node, path, list(known), known_paths(RunConfig), found)
    values = {}
    for name, item in known.items():
        full = f"{path}.{name}" if path else name
        default = _default(item, defaults)
        node = section.children.get(name)
        if node is None and default is dataclasses.MISSING:
            below = section_class(hints(cls)[name])
            if below is not None and not found.broken & {full}:
                node = Section()
            else:
                found.fail(full, None, f"`{full}` is missing", **_missing(full, hints(cls)[name]))
        values[name] = _value(hints(cls)[name], node, default, full, found)
    return cls(**values)


def _value(hint: Any, node: Leaf | Section | None, default: Any, path: str, found: Build) -> Any:
    entry = entry_class(hint)
    if entry is not None and isinstance(node, Section) and node.children:
        missing = dataclasses.MISSING
        return {
            name: _value(entry, child, missing, f"{path}.{name}", found)
            for name, child in node.children.items()
        }
    below = section_class(hint)
    optional = type(None) in _options(hint)
    if below is None:
        return _plain(hint, node, default, path, found)
    if node is None:
        _note_defaults(default, path, found)
        return default
    if isinstance(node, Leaf):
        if node.value is None or node.value == "None":
            if optional:
                found.origins[path] = node.origin
                return None
            node = Section(origin=node.origin)
        else:
            names = ", ".join(item.name for item in dataclasses.fields(below))
            found.fail(
                path,
                node,
                f"`{path}` is a section, not a single value",
                expected=f"a section with {names}",
                got=describe(node.value),
                fix=f"write names below `{path.rpartition('.')[2]}:`, or {path}.NAME=VALUE",
            )
            node = Section()
    return build(below, node, found, path, None if default is dataclasses.MISSING else default)


def _plain(hint: Any, node: Leaf | Section | None, default: Any, path: str, found: Build) -> Any:
    fallback = _placeholder(hint) if default is dataclasses.MISSING else default
    if node is None:
        found.origins[path] = DEFAULT
        return fallback
    found.origins[path] = node.origin
    raw = node.plain() if isinstance(node, Section) else node.value
    if raw == "None" and type(None) in _options(hint):
        return None
    for option in _options(hint):
        ok, value = _convert(option, raw)
        if ok:
            return value
    if isinstance(node, Section) and not _is_mapping(hint):
        inner = ", ".join(f"`{path}.{key}`" for key in list(node.children)[:5])
        found.fail(
            path,
            node,
            f"`{path}` is a single value, not a section",
            expected=expected(hint),
            got=f"names below it: {inner}" if inner else "an empty section",
            fix=f"write `{path.rpartition('.')[2]}: VALUE` on one line",
        )
    else:
        found.fail(
            path,
            node,
            f"`{path}` has a value of the wrong type",
            expected=expected(hint),
            got=describe(raw),
            fix=_type_fix(hint, raw, path),
        )
    return fallback


def _convert(option: Any, raw: Any) -> tuple[bool, Any]:
    """Return whether ``raw`` is of the type ``option``, and the typed value."""
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
        ok = isinstance(raw, int | float) and not isinstance(raw, bool)
        if ok and isinstance(raw, int) and abs(raw) >= 2**63:
            return False, raw
        return ok and math.isfinite(raw), float(raw) if ok else raw
    if option is str:
        return isinstance(raw, str), raw
    origin, arguments = typing.get_origin(option), typing.get_args(option)
    if origin is tuple:
        return _tuple(arguments[0], raw)
    if origin is dict and section_class(arguments[1]) is not None:
        return raw == {}, {}
    if origin is dict:
        return _mapping(arguments[1], raw)
    return False, raw


def _is_plain(raw: Any) -> bool:
    """Return whether a free value is made of what JSON can write, as the run folder's copy needs."""
    if isinstance(raw, dict):
        return all(isinstance(key, str) and _is_plain(value) for key, value in raw.items())
    if isinstance(raw, list):
        return all(_is_plain(value) for value in raw)
    return raw is None or isinstance(raw, str | bool | int | float)


def _tuple(item: Any, raw: Any) -> tuple[bool, Any]:
    if item is int and isinstance(raw, str):
        ranks = parse_ranges(raw)
        return ranks is not None, ranks
    if not isinstance(raw, list | tuple):
        return False, raw
    parts = [_convert(item, part) for part in raw]
    return all(ok for ok, _ in parts), tuple(value for _, value in parts)


def _mapping(item: Any, raw: Any) -> tuple[bool, Any]:
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        return False, raw
    parts = {key: _convert(item, value) for key, value in raw.items()}
    return all(ok for ok, _ in parts.values()), {key: value for key, (_, value) in parts.items()}


def parse_ranges(text: str) -> tuple[int, ...] | None:
    """Return the integers of a text such as ``0-3,8``, or None where it is not of that form."""
    result: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first > _MAX_RANKS:
            return None
        result.extend(range(first, last + 1))
    return tuple(result)


def format_ranges(values: tuple[int, ...]) -> str:
    """Return integers as a text such as ``0-3,8``; the inverse of `parse_ranges`."""
    parts: list[list[int]] = []
    for value in values:
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _options(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)


def _is_mapping(hint: Any) -> bool:
    return any(typing.get_origin(option) is dict for option in _options(hint))


def _default(item: dataclasses.Field, defaults: Any) -> Any:
    if defaults is not None:
        return getattr(defaults, item.name)
    if item.default is not dataclasses.MISSING:
        return item.default
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return dataclasses.MISSING


def _note_defaults(value: Any, path: str, found: Build) -> None:
    if not dataclasses.is_dataclass(value):
        found.origins[path] = DEFAULT
        return
    for item in dataclasses.fields(value):
        _note_defaults(getattr(value, item.name), f"{path}.{item.name}", found)


def _placeholder(hint: Any) -> Any:
    return {str: "", int: 1, float: 1.0, bool: False}.get(_options(hint)[0])


_EXAMPLES = {
    "model.path": "models/Qwen2.5-7B-Instruct",
    "data.train": "data/train.jsonl",
    "run_dir": "runs/first",
    "steps": "200",
    "sft.data": "data/sft.jsonl",
    "sft.steps": "200",
    "preference.data": "data/preferences.jsonl",
    "preference.steps": "200",
}


def _missing(path: str, hint: Any) -> dict[str, str | None]:
    example = _EXAMPLES.get(path, "VALUE")
    return {
        "expected": expected(hint),
        "got": "nothing",
        "fix": f"add it to the file, or on the command line {path}={example}",
    }


def expected(hint: Any) -> str:
    """Return in words what a type takes."""
    words = [_words(option) for option in _options(hint)]
    return " or ".join(words)


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


def _type_fix(hint: Any, raw: Any, path: str) -> str:
    name = path.rpartition(".")[2]
    options = _options(hint)
    if str in options and isinstance(raw, bool | int | float):
        return f'put it in quotes: {name}: "{raw}"'
    if isinstance(raw, str) and raw.strip().lower() in ("true", "false") and bool in options:
        return f"write it without quotes: {name}: {raw.strip().lower()}"
    if isinstance(raw, str) and (int in options or float in options) and _number(raw):
        return f"write it without quotes: {name}: {raw}"
    if raw is None:
        return f"give a value, or remove the line to have the default of `{path}`"
    if any(typing.get_origin(option) is tuple for option in options) and not isinstance(raw, list):
        return f"write a list: {name}: [{raw}]"
    return f"write {name}: followed by {expected(hint)}"


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
