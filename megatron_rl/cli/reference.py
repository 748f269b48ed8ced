"""The pages of the documentation that are made from the code.

``python -m megatron_rl.cli.reference > docs/configuration.md`` writes the configuration reference, and
``python -m megatron_rl.cli.reference PAGE > docs/PAGE.md`` each of the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from megatron_rl import PUBLIC
from megatron_rl.algorithms.algorithm import ALGORITHMS, KINDS, Algorithm, Kind
from megatron_rl.algorithms.piece import Piece
from megatron_rl.cli.main import COMMANDS
from megatron_rl.config.field_types import entry_class, hints, options, section_class, type_words
from megatron_rl.config.load import to_plain
from megatron_rl.config.other_names import FOREIGN_SECTIONS, NO_COUNTERPART, stated_names
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
_MADE = "This page is made from the code: `python -m megatron_rl.cli.reference {}`.\n"
_ALGORITHMS_HEAD = f"""\
# Algorithms

An algorithm is composed of pieces; `algorithm.name` chooses one of those below, and a key of `algorithm`
replaces a piece or sets it otherwise, see [configuration](configuration.md). A piece that is not named is
GRPO's. Each has a recipe in `configs/recipes/`.

{_MADE.format("algorithms")}"""
_COMMANDS_HEAD = f"""\
# Commands

`python -m megatron_rl COMMAND`; under `torchrun … -m megatron_rl COMMAND` for more than one process. Exit
codes: 0, 2 for bad input, 1 for any other failure.

{_MADE.format("commands")}"""
_PYTHON_HEAD = f"""\
# Python

`from megatron_rl import NAME` imports the module of that name on first use.

{_MADE.format("python")}"""
_NAMES_HEAD = f"""\
# Names of other projects

What other projects call our keys. A configuration with one of these names is refused with our name and how
the value differs, so a recipe is translated by running `check` until it is silent.

{_MADE.format("other_names")}"""
_COLUMNS = ("Key", "Type", "Default", "Allowed", "Meaning", "Elsewhere called")


def configuration() -> str:
    """Return the configuration reference: a table for each kind of section, in their order."""
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
        return ", ".join(f"`{choice}`" for choice in said.choices) + (
            ", or `file.py:Name`" if said.or_path else ""
        )
    return said.bounds()


def _names(names: tuple[ForeignName, ...] | list[ForeignName]) -> str:
    projects: dict[str, list[str]] = {}
    for name in names:
        projects.setdefault(name.project, []).append(f"`{name.name}`")
    return ", ".join(
        f"{', '.join(called)}" + ("" if project == "common" else f" ({project})")
        for project, called in projects.items()
    )


def algorithms() -> str:
    """Return every named algorithm with its pieces, and every piece with its equation and source."""
    parts = [_ALGORITHMS_HEAD]
    defaults = Algorithm("").pieces()
    for name, algorithm in ALGORITHMS.items():
        pieces = [
            f"`{key}`: [{type(piece).__name__}](#{key}-{type(piece).__name__.lower()})"
            + _changed(piece, type(piece)())
            for key, piece in algorithm.pieces().items()
            if piece != defaults[key] or key in ("advantage", "policy_loss")
        ]
        parts.append(f"## `{name}`\n\n{algorithm.summary}\n\n{', '.join(pieces)}.\n")
    shown: dict[type, str] = {}
    for key, kind in KINDS.items():
        for piece in kind.named.values():
            shown.setdefault(type(piece), key)
    for key, kind in KINDS.items():
        parts.append(f"## Pieces of `{key}`\n")
        elsewhere = dict.fromkeys(shown[type(piece)] for piece in kind.named.values())
        parts += [f"Those of `{home}`.\n" for home in elsewhere if home != key]
        parts += [
            f"### {key}: {piece.__name__}\n\n{_doc(piece)}\n" for piece, home in shown.items() if home == key
        ]
    return "\n".join(parts)


def _changed(piece: Piece, default: Piece) -> str:
    """Return the settings of a piece that are not its class's own."""
    values = {item.name: getattr(piece, item.name) for item in dataclasses.fields(piece)}
    changed = [
        f"`{name}: {one_line(to_plain(value))}`"
        for name, value in values.items()
        if value != getattr(default, name)
    ]
    return f" ({', '.join(changed)})" if changed else ""


def commands() -> str:
    """Return every command with its arguments."""
    parts = [_COMMANDS_HEAD]
    for name, (module, meaning) in COMMANDS.items():
        parser = argparse.ArgumentParser()
        import_module(module).add_arguments(parser)
        rows = [
            f"| `{_argument(action)}` | {_cell(_help(action))} |"
            for action in parser._actions
            if action.dest != "help"
        ]
        first = meaning[0].upper() + meaning[1:]
        parts += [f"## {name}\n\n{first}.\n", "| Argument | Meaning |", "|---|---|", *rows, ""]
    return "\n".join(parts)


def _argument(action: argparse.Action) -> str:
    name = action.metavar or action.dest.upper()
    if not action.option_strings:
        return f"[{name} ...]" if action.nargs == "*" else f"[{name}]" if action.nargs == "?" else str(name)
    return action.option_strings[-1] + ("" if action.nargs == 0 else f" {name}")


def _help(action: argparse.Action) -> str:
    words = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    choices = ", ".join(f"`{choice}`" for choice in action.choices or ())
    return "; ".join(filter(None, [words, choices and f"one of {choices}"]))


def python() -> str:
    """Return the public names with what their docstrings say."""
    parts = [_PYTHON_HEAD]
    for name, home in PUBLIC.items():
        value = getattr(import_module(home), name)
        call = f"class {name}" if inspect.isclass(value) else f"def {name}{_signature(value)}"
        parts.append(f"## {name}\n\n`{home}`\n\n```python\n{call}: ...\n```\n\n{_doc(value)}\n")
        methods = vars(value).items() if inspect.isclass(value) else ()
        rows = [
            f"| `{method}{_cell(_signature(item))}` | {_cell(_doc(item).partition(chr(10))[0])} |"
            for method, item in methods
            if not method.startswith("_")
            and (inspect.isfunction(item) or isinstance(item, property | classmethod))
        ]
        if rows:
            parts += ["| Member | Meaning |", "|---|---|", *rows, ""]
    return "\n".join(parts)


def _signature(item: Any) -> str:
    """Return the arguments and the result of a function or method in words; a property has none."""
    if isinstance(item, property):
        return ""
    words = str(inspect.signature(item.__func__ if isinstance(item, classmethod) else item))
    return re.sub(r"\((self|cls)(, )?", "(", words).replace("'", "")


def other_names() -> str:
    """Return what other projects call the keys, a table per project."""
    projects: dict[str, list[str]] = {}
    for path, name in stated_names():
        row = f"| `{name.name}` | `{path}` | {_cell(name.difference())} |"
        projects.setdefault(name.project, []).append(row)
    for section, name in FOREIGN_SECTIONS.items():
        row = f"| `{section}` | {_cell(name.name)} | a section |"
        projects[name.project].append(row)
    parts = [_NAMES_HEAD]
    for project in sorted(projects, key=str.lower):
        title = "Short names" if project == "common" else project
        parts += [
            f"## {title}\n",
            "| There | Here | How the value differs |",
            "|---|---|---|",
            *projects[project],
            "",
        ]
    parts += ["## Without a counterpart\n", "| There | Why, or what there is instead |", "|---|---|"]
    by_reason: dict[str, list[str]] = {}
    for name, reason in NO_COUNTERPART.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    parts += [f"| {', '.join(names)} | {_cell(reason)} |" for reason, names in by_reason.items()]
    return "\n".join([*parts, ""])


def _doc(value: Any) -> str:
    """Return a docstring as Markdown, with a link for each paper; no docstring is empty."""
    words = re.sub(r"`{2}([^`]*)`{2}", r"`\1`", inspect.cleandoc(value.__doc__ or ""))
    words = re.sub(r"^(Example|Examples|Raises|Source):$", r"\1:\n", words, flags=re.MULTILINE)
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", words)


def _cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")


PAGES = {
    "configuration": configuration,
    "algorithms": algorithms,
    "commands": commands,
    "python": python,
    "other_names": other_names,
}
"""Page below docs/ -> what makes it."""

if __name__ == "__main__":
    print(PAGES[sys.argv[1] if len(sys.argv) > 1 else "configuration"](), end="")
