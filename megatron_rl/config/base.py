"""``base: other.yaml`` in a configuration file: the other file's values, with this file's over them."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_rl.config.source import (
    Leaf,
    Section,
    describe,
    lay_over,
    named_section,
    read_file,
    yaml_files_beside,
)
from megatron_rl.errors import UserError

KEY = "base"


def read_with_base(path: Path, errors: list[UserError]) -> tuple[Section | None, tuple[Path, ...]]:
    """Read a configuration file over the file that its ``base`` names, and that one over its own base.

    ``base`` is relative to the folder of the file that says it. Sections are merged name by name; any other
    value, also a list, replaces the base's, and null leaves the key as if the base did not have it. Returns
    the tree, in which every value keeps the place where it is written, and the files, ``path`` first. The
    tree is None where a file cannot be read;
    mistakes are added to ``errors``.
    """
    files, trees = [path], [read_file(path, errors)]
    while (node := trees[-1].children.pop(KEY, None)) is not None:
        base = _base_file(node, files, errors)
        if base is None:
            return None, tuple(files)
        files.append(base)
        before = len(errors)
        trees.append(read_file(base, errors))
        if len(errors) > before and not trees[-1].children:
            return None, tuple(files)
    if errors and len(trees) == 1 and not trees[0].children:
        return None, tuple(files)
    tree = trees.pop()
    while trees:
        _merge(tree, trees.pop())
    return tree, tuple(files)


def refuse_base(tree: Section, errors: list[UserError]) -> None:
    """Take ``base`` out of a tree that did not come from a file alone, with an error."""
    node = tree.children.pop(KEY, None)
    if node is not None:
        errors.append(
            UserError(
                f"`{KEY}` can only be written in a configuration file",
                where=str(node.origin),
                expected=f"`{KEY}: other.yaml` in a file",
                got=f"`{KEY}` in an override or a text",
                fix=f"write it into a file, or load the file that `{KEY}` names",
            )
        )


def _base_file(node: Leaf | Section, files: list[Path], errors: list[UserError]) -> Path | None:
    """Return the file that ``base`` names, or None with an error."""
    folder = files[-1].parent
    expected = f"a YAML file, relative to {folder}"
    value = node.plain() if isinstance(node, Section) else node.value
    if not isinstance(value, str) or not value:
        errors.append(
            UserError(
                f"`{KEY}` is not the name of one file",
                where=str(node.origin),
                expected=expected,
                got=describe(value),
                fix=f"write {KEY}: followed by one name, such as ../quickstart.yaml",
            )
        )
        return None
    base = Path(os.path.normpath(folder / value))
    if not base.is_file():
        errors.append(
            UserError(
                f"the file that `{KEY}` names does not exist",
                where=str(node.origin),
                expected=expected,
                got=f"{base}: {'a directory' if base.is_dir() else 'no such file'}",
                fix=yaml_files_beside(base),
            )
        )
        return None
    if base.resolve() in [file.resolve() for file in files]:
        errors.append(
            UserError(
                f"`{KEY}` leads back to a file that was already read",
                where=str(node.origin),
                expected="a chain of files that ends",
                got=" -> ".join(str(file) for file in [*files, base]),
                fix=f"remove `{KEY}` from one of them",
            )
        )
        return None
    return base


def _merge(tree: Section, over: Section, path: tuple[str, ...] = ()) -> None:
    """Put the values of ``over`` into ``tree``."""
    for key, node in over.children.items():
        below = tree.children.get(key)
        if isinstance(node, Section) and not isinstance(below, Section):
            below = tree.children[key] = named_section(below, [*path, key]) or Section(origin=node.origin)
        if isinstance(node, Section) and isinstance(below, Section):
            _merge(below, node, (*path, key))
        else:
            lay_over(tree, key, node)
