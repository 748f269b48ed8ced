"""Errors for names that the configuration does not have: other projects' names, and slips."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from megatron_rl.config.other_names import FOREIGN_SECTIONS, RENAMED, OtherName, other_name
from megatron_rl.config.source import Leaf, Section
from megatron_rl.errors import nearest


class Notes(Protocol):
    """Take errors about a configuration path."""

    def note(self, path: str, node: Leaf | Section | None, message: str, **fields: str | None) -> None:
        """Record one."""
        ...


def note_unknown(
    key: str, node: Leaf | Section, path: str, below: list[str], everywhere: list[str], notes: Notes
) -> None:
    """Record an unknown name: what it is called here, or the nearest known name.

    ``below`` are the paths of the section's own values, without its ``path``.
    """
    full = f"{path}.{key}" if path else key
    siblings = list(dict.fromkeys(known.partition(".")[0] for known in below))
    ours = _in_section(other_name(full), path, below)
    former = any(name.startswith(f"{full}.") for name in RENAMED)
    if former and isinstance(node, Section) and not node.children:
        return  # run folders hold it, and it says nothing
    if ours is not None:
        _note_other_name(full, key, node, ours, notes)
        return
    if isinstance(node, Section):
        _note_unknown_section(full, node, siblings, everywhere, notes)
        return
    guess = _guess(key, full, siblings, path, everywhere)
    notes.note(
        full,
        node,
        f"`{full}` is not a known name" + (f"; did you mean `{guess}`?" if guess else ""),
        expected=f"one of {', '.join(siblings)}" if path else "a name of the configuration",
        got=f"`{key}`",
        fix=f"write `{guess}`, or remove the line" if guess else "remove the line; `check` lists every name",
    )


def _in_section(ours: OtherName | None, path: str, below: list[str]) -> OtherName | None:
    """Return what a name is called in the section where it stands, if that has what it means."""
    if ours is None or not path:
        return ours
    words = ours.ours.split(".")
    ends = (".".join(words[start:]) for start in range(len(words)))
    return next((replace(ours, ours=f"{path}.{end}") for end in ends if end in below), ours)


def _note_other_name(full: str, shown: str, node: Leaf | Section, ours: OtherName, notes: Notes) -> None:
    value = node.plain() if isinstance(node, Section) else node.value
    notes.note(
        full,
        node,
        f"`{full}` is called `{ours.ours}` here",
        expected=f"`{ours.ours}`",
        got=f"`{shown}: {_short(value)}`{ours.source}",
        fix=f"write `{ours.ours}`" + (f" ({ours.conversion})" if ours.conversion else ""),
    )


def _note_unknown_section(
    full: str, node: Section, siblings: list[str], everywhere: list[str], notes: Notes
) -> None:
    rest = []
    for path, leaf in node.leaves(full):
        ours = other_name(path)
        if ours is None:
            rest.append(path)
        else:
            _note_other_name(path, path, leaf, ours, notes)
    if not rest and list(node.leaves()):
        return
    section = FOREIGN_SECTIONS.get(full)
    above, _, key = full.rpartition(".")
    guess = None if section else _guess(key, full, siblings, above, everywhere)
    hint = f"; did you mean `{guess}`?" if guess else ""
    if section:
        hint = f"; {section.project} has it, here it is {section.name}"
    notes.note(
        full,
        node,
        f"`{full}` is not a known section{hint}",
        expected=f"one of {', '.join(siblings)}" if above else "a section of the configuration",
        got=", ".join(f"`{path}`" for path in rest[:8]) + (" ..." if len(rest) > 8 else "")
        or "an empty section",
        fix=f"write `{guess}`" if guess else "remove it; `check` lists every name",
    )


def _guess(key: str, full: str, siblings: list[str], path: str, everywhere: list[str]) -> str | None:
    near = nearest(key, siblings)
    if near:
        return f"{path}.{near}" if path else near
    by_name = {known.rpartition(".")[2]: known for known in reversed(everywhere)}
    close = nearest(key, by_name)
    return by_name[close] if close else nearest(full, everywhere)


def _short(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
