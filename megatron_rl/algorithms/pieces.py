"""From the name of a piece to its function; importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from megatron_rl.algorithms.settings import Piece
from megatron_rl.errors import UserError, nearest


def resolve(piece: Piece, table: Mapping[str, str], setting: str) -> Any:
    """Return the function that ``piece`` stands for: a name in ``table``, ``module:function``, or itself.

    Raises UserError naming ``algorithm.settings.<setting>`` where there is no such name, module or function.
    """
    if not isinstance(piece, str):
        return piece
    return load(target(piece, table, setting), f"algorithm.settings.{setting}")


def target(piece: str, table: Mapping[str, str], setting: str) -> str:
    """Return the ``module:function`` a name stands for; raises UserError for an unknown name."""
    found = table.get(piece, piece)
    if ":" in found:
        return found
    close = nearest(piece, table)
    raise UserError(
        f"unknown {setting} {piece!r}",
        where=f"algorithm.settings.{setting}",
        expected=f"one of {', '.join(sorted(table))}, or module:function",
        fix=f"did you mean {close!r}?" if close else None,
    )


def load(path: str, where: str) -> Any:
    """Import ``module:name`` and return what it names; raises UserError where that fails."""
    module_name, _, name = path.partition(":")
    try:
        return getattr(import_module(module_name), name)
    except ImportError as error:
        raise UserError(
            f"cannot import module {module_name!r}",
            where=where,
            expected="an importable module:function",
            got=str(error),
            fix="check the spelling, or add the module's folder to PYTHONPATH",
        ) from error
    except AttributeError as error:
        public = [key for key in vars(import_module(module_name)) if not key.startswith("_")]
        close = nearest(name, public)
        raise UserError(
            f"module {module_name!r} has no {name!r}",
            where=where,
            fix=f"did you mean {close!r}?" if close else None,
        ) from error
