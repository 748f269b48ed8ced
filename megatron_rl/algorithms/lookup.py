"""Finding an algorithm by name and overriding its settings; importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from megatron_rl.algorithms.names import ALGORITHMS
from megatron_rl.algorithms.pieces import load
from megatron_rl.algorithms.problems import problems
from megatron_rl.algorithms.settings import Algorithm
from megatron_rl.errors import UserError, UserErrors, nearest


def get_algorithm(name: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
    """Return the algorithm called ``name`` with ``settings`` overriding its fields.

    ``name`` is in `names.ALGORITHMS`, or ``module:object`` naming an `Algorithm` of the user's own. Raises
    UserError (UserErrors for several) for an unknown name or setting, with the nearest known one, a wrong
    type, a value out of range, and settings that contradict each other.

    Example:
        >>> get_algorithm("grpo", {"clip_ratio_high": 0.28}).clip_ratio_high
        0.28
    """
    algorithm, mistakes = _named(name), []
    types, changes = setting_types(), {}
    for key, value in (settings or {}).items():
        if key not in types:
            mistakes.append(_unknown(key, name, types))
        elif not accepts(types[key], value):
            mistakes.append(_wrong_type(key, value, types[key]))
        else:
            changes[key] = _converted(types[key], value)
    algorithm = replace(algorithm, **changes)
    mistakes.extend(problems(algorithm))
    if mistakes:
        raise mistakes[0] if len(mistakes) == 1 else UserErrors(mistakes)
    return algorithm


def setting_types() -> dict[str, Any]:
    """Return the type of every setting that can be overridden, by field name."""
    hints = get_type_hints(Algorithm)
    return {f.name: hints[f.name] for f in fields(Algorithm) if f.name not in ("name", "summary")}


def accepts(kind: Any, value: Any) -> bool:
    """Say whether ``value`` fits a setting of type ``kind``; a whole number may stand for a float."""
    origin = get_origin(kind) or kind
    if origin in (Union, UnionType):
        return any(accepts(option, value) for option in get_args(kind))
    if kind is type(None):
        return value is None
    if kind is bool:
        return isinstance(value, bool)
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if origin is tuple:
        return (
            isinstance(value, list | tuple)
            and len(value) == len(get_args(kind))
            and all(accepts(item, part) for item, part in zip(get_args(kind), value, strict=True))
        )
    if origin is Mapping or origin is get_origin(Mapping[str, Any]):
        return isinstance(value, Mapping) and all(
            isinstance(key, str) and accepts(get_args(kind)[1], item) for key, item in value.items()
        )
    if kind is str:
        return isinstance(value, str)
    return callable(value) if kind is not Any else True


def _converted(kind: Any, value: Any) -> Any:
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if float in options and value is not None:
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def _named(name: str) -> Algorithm:
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if ":" in name:
        found = load(name, "algorithm.name")
        if isinstance(found, Algorithm):
            return found
        raise UserError(
            f"{name} is not an Algorithm",
            where="algorithm.name",
            expected="an instance of megatron_rl.algorithms.Algorithm",
            got=type(found).__name__,
        )
    close = nearest(name, ALGORITHMS)
    raise UserError(
        f"unknown algorithm {name!r}",
        where="algorithm.name",
        expected=f"one of {', '.join(sorted(ALGORITHMS))}, or module:object",
        fix=f"did you mean {close!r}?" if close else None,
    )


def _unknown(key: str, name: str, known: Mapping[str, Any]) -> UserError:
    close = nearest(key, known)
    return UserError(
        f"unknown setting {key!r} of algorithm {name!r}",
        where=f"algorithm.settings.{key}",
        expected=None if close else f"one of {', '.join(sorted(known))}",
        fix=f"did you mean {close!r}?" if close else None,
    )


def _wrong_type(key: str, value: Any, kind: Any) -> UserError:
    return UserError(
        f"setting {key!r} has the wrong type",
        where=f"algorithm.settings.{key}",
        expected=_described(kind),
        got=f"{value!r} ({type(value).__name__})",
    )


def _described(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_described(option) for option in get_args(kind))
    words = {
        type(None): "null",
        float: "a number",
        int: "a whole number",
        str: "a string",
        bool: "true or false",
    }
    if kind in words:
        return words[kind]
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers"
    return (
        "a mapping"
        if get_origin(kind) is not None and len(get_args(kind)) == 2 and get_args(kind)[0] is str
        else "a function"
    )
