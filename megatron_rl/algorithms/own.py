"""The user's own algorithms and pieces, by path; importable without torch."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from megatron_rl.algorithms.piece import Piece
from megatron_rl.algorithms.table import Kind
from megatron_rl.errors import UserError, nearest
from megatron_rl.user_code import load_module


def load_path(path: str, where: str) -> Any:
    """Return what ``file.py:Name`` or ``module:Name`` names; raises UserError, also where the code fails.

    A file is relative to the directory that the run is started in.
    """
    place, _, name = path.rpartition(":")
    if place.endswith(".py") and not Path(place).is_file():
        raise UserError(
            f"the file {place} does not exist",
            where=where,
            expected="an existing Python file",
            got=f"no such file, seen from {Path.cwd()}",
            fix="correct the path; it is relative to the directory the run is started in",
        )
    try:
        module = load_module(place)
    except (Exception, SystemExit) as error:  # the user's own module may fail in any way, or be a script
        absent = isinstance(error, ModuleNotFoundError) and error.name == place.partition(".")[0]
        raise UserError(
            f"cannot import {place}",
            where=where,
            expected="file.py:Name or module:Name that can be imported",
            got=f"{type(error).__name__}: {error}",
            fix="check the spelling, or add the module's folder to PYTHONPATH"
            if absent
            else "correct the module; python -c 'import ...' shows the same error",
        ) from error
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        close = nearest(name, public)
        raise UserError(
            f"{place} has no {name!r}",
            where=where,
            expected="a name that it defines",
            got=path,
            fix=f"did you mean {close!r}?" if close else f"define {name} there",
        )
    return getattr(module, name)


def own_piece(value: Any, kind: Kind, path: str, where: str) -> Piece | type[Piece]:
    """Return a piece, or a class of pieces, of what the user wrote; raises UserError for the wrong form."""
    if isinstance(value, kind.base):
        return value
    if isinstance(value, type):
        _check_class(value, kind, path, where)
        return value
    if not callable(value) or kind.of_function is None:
        function = "" if kind.of_function is None else f" or a function({', '.join(kind.arguments)})"
        raise UserError(
            f"{path} cannot be used here",
            where=where,
            expected=f"a class derived from {_name(kind)}{function}",
            got=f"{path}, of type {type(value).__name__}",
            fix=f"derive a class from {_name(kind)} with a method {_call(kind)}",
        )
    _check_call(value, kind.arguments, f"{path}({', '.join(kind.arguments)})", where)
    return kind.of_function(value)


def _check_class(value: type, kind: Kind, path: str, where: str) -> None:
    """Raise UserError unless a class derives from the kind's, is a dataclass, and defines its method."""
    missing = sorted(getattr(value, "__abstractmethods__", ()))
    if not issubclass(value, kind.base) or missing:
        raise UserError(
            f"{path} does not define {', '.join(missing)}" if missing else f"{path} is of another kind",
            where=where,
            expected=f"a class derived from {_name(kind)} with a method {_call(kind)}",
            got=f"class {value.__name__}({', '.join(base.__name__ for base in value.__bases__)})",
            fix=f"define {_call(kind)}" if missing else f"derive it from {_name(kind)}",
        )
    written = {
        name for name, hint in vars(value).get("__annotations__", {}).items() if "ClassVar" not in str(hint)
    }
    if not is_dataclass(value) or written - {item.name for item in fields(value)}:
        raise UserError(
            f"{path} is not a dataclass, so its settings have no effect",
            where=where,
            expected="@dataclass(frozen=True) above the class",
            got=f"class {value.__name__}",
            fix=f"write @dataclass(frozen=True) above class {value.__name__}",
        )
    method = inspect.getattr_static(value, kind.method)
    if not isinstance(method, property):
        _check_call(getattr(value, kind.method), ("self", *kind.arguments), f"{path}.{_call(kind)}", where)


def _check_call(function: Any, arguments: tuple[str, ...], call: str, where: str) -> None:
    """Raise UserError unless a function can be called with so many arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-in functions do not say
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UserError(
            "a piece of the algorithm takes other arguments than it is given",
            where=where,
            expected=call,
            got=f"{signature}: {error}",
            fix=f"let it take {', '.join(name for name in arguments)}",
        ) from error


def _call(kind: Kind) -> str:
    return f"{kind.method}({', '.join(kind.arguments)})"


def _name(kind: Kind) -> str:
    return f"megatron_rl.algorithms.{kind.base.__name__}"
