"""Errors for names that the configuration does not have: other projects' names, and slips."""

from __future__ import annotations

from typing import Any, Protocol

from megatron_rl.config.foreign import FOREIGN_SECTIONS, foreign_name
from megatron_rl.config.source import Leaf, Section
from megatron_rl.errors import nearest


class Notes(Protocol):
    """Take errors about a configuration path."""

    def note(self, path: str, node: Leaf | Section | None, message: str, **fields: str | None) -> None:
        """Record one."""
        ...


def note_unknown(
    key: str, node: Leaf | Section, path: str, siblings: list[str], everywhere: list[str], found: Notes
) -> None:
    """Record an unknown name: what it is called here, or the nearest known name."""
    full = f"{path}.{key}" if path else key
    if isinstance(node, Section) and foreign_name(full) is None:
        _unknown_section(full, node, siblings, everywhere, found)
        return
    ours = foreign_name(full)
    if ours is not None:
        shown = node.plain() if isinstance(node, Section) else node.value
        fix = f"write `{ours.ours}`" + (f" ({ours.note})" if ours.note else "")
        message = f"`{full}` is called `{ours.ours}` here"
        source = "" if ours.project == "a common spelling" else f", a name of {ours.project}"
        found.note(
            full, node, message, expected=f"`{ours.ours}`", got=f"`{key}: {_short(shown)}`{source}", fix=fix
        )
        return
    guess = _guess(key, full, siblings, path, everywhere)
    found.note(
        full,
        node,
        f"`{full}` is not a known name" + (f"; did you mean `{guess}`?" if guess else ""),
        expected=f"one of {', '.join(siblings)}" if path else "a name of the configuration",
        got=f"`{key}`",
        fix=f"write `{guess}`, or remove the line" if guess else "remove the line; `check` lists every name",
    )


def _unknown_section(
    full: str, node: Section, siblings: list[str], everywhere: list[str], found: Notes
) -> None:
    section = FOREIGN_SECTIONS.get(full)
    rest = []
    for path, leaf in node.leaves(full):
        ours = foreign_name(path)
        if ours is None:
            rest.append(path)
        else:
            found.note(
                path,
                leaf,
                f"`{path}` is called `{ours.ours}` here",
                expected=f"`{ours.ours}`",
                got=f"`{path}: {_short(leaf.value)}`, a name of {ours.project}",
                fix=f"write `{ours.ours}`" + (f" ({ours.note})" if ours.note else ""),
            )
    if not rest and list(node.leaves()):
        return
    guess = (
        None
        if section
        else _guess(full.rpartition(".")[2], full, siblings, full.rpartition(".")[0], everywhere)
    )
    hint = f"; did you mean `{guess}`?" if guess else ""
    if section:
        hint = f"; {section.project} has it, here it is {section.ours}"
    found.note(
        full,
        node,
        f"`{full}` is not a known section{hint}",
        expected=f"one of {', '.join(siblings)}" if "." in full else "a section of the configuration",
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
