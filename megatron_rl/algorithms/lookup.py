"""Finding an algorithm by name and overriding its settings; importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from importlib import import_module
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from megatron_rl.algorithms.names import ALGORITHMS
from megatron_rl.algorithms.settings import Algorithm
from megatron_rl.config.errors import UserError, nearest


def get_algorithm(name: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
    """Return the algorithm called ``name`` with ``settings`` overriding its fields.

    ``name`` is in `names.ALGORITHMS`, or ``module:object`` naming an `Algorithm` of the user's own.
    Raises UserError for an unknown name or field (with the nearest known one) and for a wrong type.

    Example:
        >>> get_algorithm("grpo", {"clip_ratio_high": 0.28}).clip_ratio_high
        0.28
    """
    algorithm = _named(name)
    hints = setting_types()
    changes: dict[str, Any] = {}
    for key, value in (settings or {}).items():
        if key not in hints:
            close = nearest(key, hints)
            raise UserError(
                f"unknown setting {key!r} of algorithm {name!r}",
                where=f"algorithm.settings.{key}",
                expected=f"one of {', '.join(sorted(hints))}",
                fix=f"did you mean {close!r}?" if close else None,
            )
        changes[key] = _coerced(key, value, hints[key])
    return replace(algorithm, **changes)


def setting_types() -> dict[str, Any]:
    """Return the type of every setting that can be overridden, by field name."""
    hints = get_type_hints(Algorithm)
    return {f.name: hints[f.name] for f in fields(Algorithm) if f.name not in ("name", "summary")}


def _named(name: str) -> Algorithm:
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    module, _, attribute = name.partition(":")
    if attribute:
        found = getattr(import_module(module), attribute)
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


def _coerced(key: str, value: Any, kind: Any) -> Any:
    """Return ``value`` as the field's type: whole numbers become floats, lists become tuples."""
    if get_origin(kind) in (Union, UnionType):
        options = get_args(kind)
        for option in options:
            if _matches(value, option):
                return _coerced(key, value, option)
    elif _matches(value, kind):
        if kind is float:
            return float(value)
        if get_origin(kind) is tuple:
            return tuple(float(item) for item in value)
        return value
    raise UserError(
        f"setting {key!r} has the wrong type",
        where=f"algorithm.settings.{key}",
        expected=_described(kind),
        got=f"{value!r} ({type(value).__name__})",
    )


def _matches(value: Any, kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if kind is type(None):
        return value is None
    if kind is Any:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is tuple:
        return isinstance(value, list | tuple) and len(value) == len(get_args(kind))
    if not isinstance(origin, type):
        return callable(value)
    return isinstance(value, origin)


def _described(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_described(option) for option in get_args(kind))
    return "null" if kind is type(None) else getattr(kind, "__name__", str(kind))
