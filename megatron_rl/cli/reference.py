"""The configuration reference, docs/configuration.md, made from the fields: what stands on them.

``python -m megatron_rl.cli.reference > docs/configuration.md`` writes it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from megatron_rl.algorithms.algorithm import KINDS, Kind
from megatron_rl.algorithms.piece import Piece
from megatron_rl.config.field_types import entry_class, hints, options, section_class, type_words
from megatron_rl.config.load import to_plain
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.setting import ForeignName, Setting, is_setting, setting_of
from megatron_rl.config.source import one_line

_HEAD = """\
# Configuration reference

Every key of a run's configuration. A key is written in YAML below its sections, or on the command line with
dots between: `actor.layout.tensor=2`. A default in *italics* says in words what a run takes where the
configuration gives nothing. `check` prints every key of a run with its value and where the value comes from.

This page is made from the fields of the configuration: `python -m megatron_rl.cli.reference`.
"""
_COLUMNS = ("Key", "Type", "Default", "Allowed", "Meaning", "Elsewhere called")


def reference() -> str:
    """Return the page: one table for each kind of section, in the order of the configuration."""
    places: dict[type, list[str]] = {}
    for path, section in _sections(RunConfig, ""):
        places.setdefault(section, []).append(path)
    sections = [_table(section, paths) for section, paths in places.items()]
    return "\n".join([_HEAD, *sections, *(_pieces(key, kind) for key, kind in KINDS.items())])


def _sections(section: type, path: str) -> Iterator[tuple[str, type]]:
    """Yield the path and the class of a section and of all below it; an entry of a mapping is NAME."""
    yield path, section
    for name, hint in hints(section).items():
        below = f"{path}.{name}" if path else name
        inner, entry = section_class(hint), entry_class(hint)
        if inner is not None:
            yield from _sections(inner, below)
        if entry is not None:
            yield from _sections(entry, f"{below}.NAME")


def _table(section: type, paths: list[str]) -> str:
    title = ", ".join(f"`{path}`" for path in paths) if paths[0] else "Top level"
    rows = [_row(item, hints(section)[item.name], paths[0]) for item in dataclasses.fields(section)]
    lines = [f"| {' | '.join(row)} |" for row in (_COLUMNS, ["---"] * len(_COLUMNS), *rows)]
    return "\n".join([f"## {title}", "", _meaning(section), "", *lines, ""])


def _pieces(key: str, kind: Kind) -> str:
    """Return the named pieces of one kind, with the settings of each and their bounds."""
    rows = []
    for name, piece in kind.named.items():
        first, *others = [item for item in dataclasses.fields(piece) if is_setting(item)] or [None]
        summary = inspect.cleandoc(type(piece).__doc__ or "").partition("\n")[0].replace("``", "`")
        rows.append([f"`{name}`", summary, *_piece_row(piece, first)])
        rows.extend(["", "", *_piece_row(piece, item)] for item in others)
    header = ("Name", "What it does", "Setting", "Default", "Allowed", "Meaning")
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join([f"## Pieces: `algorithm.{key}`", "", *lines, ""])


def _piece_row(piece: Piece, item: dataclasses.Field | None) -> list[str]:
    if item is None:
        return ["", "", "", ""]
    said, value = setting_of(item), getattr(piece, item.name)
    default = f"*{said.unset or 'none'}*" if value is None else f"`{one_line(to_plain(value))}`"
    return [cell.replace("|", "\\|") for cell in (f"`{item.name}`", default, _allowed(said), said.meaning)]


def _meaning(section: type) -> str:
    return inspect.cleandoc(section.__doc__ or "").replace("``", "`")


def _row(item: dataclasses.Field, hint: Any, path: str) -> list[str]:
    said = setting_of(item)
    kinds = [option for option in options(hint) if option is not type(None)]
    words = " or ".join(type_words(option).removeprefix("an ").removeprefix("a ") for option in kinds)
    kind = "section" if section_class(hint) else ", ".join(filter(None, [words, said.unit]))
    cells = [
        f"`{item.name}`",
        kind,
        _default(item, said),
        _allowed(said),
        said.meaning,
        _names(said.foreign_names),
    ]
    for key in dict.fromkeys(key for key, _ in said.foreign_names_below):
        names = _names([name for below, name in said.foreign_names_below if below == key])
        cells[-1] = "; ".join(filter(None, [cells[-1], f"`{key}`: {names}"]))
    return [cell.replace("|", "\\|") for cell in cells]


def _default(item: dataclasses.Field, said: Setting) -> str:
    if item.default_factory is not dataclasses.MISSING:
        value = item.default_factory()
        if dataclasses.is_dataclass(value):
            return _differences(value)
        return f"`{one_line(to_plain(value))}`"
    if item.default is dataclasses.MISSING:
        return "required"
    if item.default is None:
        return f"*{said.unset}*"
    return f"`{one_line(to_plain(item.default))}`"


def _differences(section: Any) -> str:
    """Return the values that a section's default has and its class has not."""
    values = [
        f"`{item.name}: {one_line(getattr(section, item.name))}`"
        for item in dataclasses.fields(section)
        if item.default is not dataclasses.MISSING and getattr(section, item.name) != item.default
    ]
    return ", ".join(values)


def _allowed(said: Setting) -> str:
    if said.choices:
        return ", ".join(f"`{choice}`" for choice in said.choices)
    return said.bounds()


def _names(names: tuple[ForeignName, ...] | list[ForeignName]) -> str:
    projects: dict[str, list[str]] = {}
    for name in names:
        projects.setdefault(name.project, []).append(f"`{name.name}`")
    return ", ".join(
        f"{', '.join(called)}" + ("" if project == "common" else f" ({project})")
        for project, called in projects.items()
    )


if __name__ == "__main__":
    print(reference(), end="")
