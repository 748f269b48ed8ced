"""Errors for names that the configuration does not have.

What such a name may have been meant for is `check`'s to say (`check.unknown_names`), which can try whether a
run would take it. Here are the facts: the name, its value, and the names that its section has. A class of the
user's own, and a piece of an algorithm, have no other sections: there a slip is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.config.other_names import RENAMED, name_in_section
from megatron_rl.config.source import Leaf, Section
from megatron_rl.errors import UserError, nearest


@dataclass(eq=False)
class UnknownName(UserError):
    """A name that its section does not have.

    ``key`` is the name itself and ``section`` the path of the section that it was written in, empty at the
    top; ``value`` is what it was given, a mapping for a section; ``overrides`` says whether on the command
    line. ``below`` are the paths of the section's own values, relative to the section.
    """

    key: str = ""
    section: str = ""
    value: Any = None
    overrides: bool = False
    below: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Return the dotted path of the name."""
        return f"{self.section}.{self.key}" if self.section else self.key


class Notes(Protocol):
    """A collector of errors about configuration paths."""

    def note(self, path: str, node: Leaf | Section | None, message: str, **fields: str | None) -> None:
        """Record one error."""
        ...

    def located(self, path: str, node: Leaf | Section | None) -> str:
        """Return a path with the file or override that wrote it."""
        ...

    errors: list[UserError]


def note_unknown(key: str, node: Leaf | Section, path: str, below: list[str], notes: Notes) -> None:
    """Record an unknown name of the section at ``path``; ``below`` are the paths of that section's values."""
    full = f"{path}.{key}" if path else key
    former_section = any(name.startswith(f"{full}.") for name in RENAMED)
    if former_section and isinstance(node, Section) and not node.children:
        return  # configurations of older runs have it, with nothing in it

    siblings = list(dict.fromkeys(name.partition(".")[0] for name in below))
    kind = "section" if isinstance(node, Section) else "name"
    message = f"`{full}` is not a known {kind}"
    fix = "remove the line"
    other = name_in_section(full, path, below)
    close = nearest(key, siblings)
    if other is not None:
        message = f"`{full}` is called `{other.ours}` here"
        fix = f"write `{other.ours}`"
    elif close is not None:
        guess = f"{path}.{close}" if path else close
        message += f"; did you mean `{guess}`?"
        fix = f"write `{guess}`, or remove the line"
    notes.errors.append(
        UnknownName(
            message,
            where=notes.located(full, node),
            expected=f"one of {', '.join(siblings)}" if siblings else "no names: it has no settings",
            got=_shown(key, node),
            fix=fix,
            key=key,
            section=path,
            value=node.plain() if isinstance(node, Section) else node.value,
            overrides=node.origin.kind == "override",
            below=tuple(below),
        )
    )


def _shown(key: str, node: Leaf | Section) -> str:
    if isinstance(node, Leaf):
        return f"`{key}`"

    paths = [path for path, _ in node.leaves(key)]
    if not paths:
        return "an empty section"
    return ", ".join(f"`{path}`" for path in paths[:8]) + (" ..." if len(paths) > 8 else "")
