"""Configuration text as a tree of plain values that remember where they were written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.errors import UserError


@dataclass(frozen=True)
class Origin:
    """Say where a value comes from: ``kind`` is default, file, override or derived."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.kind == "derived" else (self.detail or self.kind)


DEFAULT = Origin("default")


@dataclass
class Leaf:
    """Hold a value that is not a mapping; ``unsets`` marks a null that is written over another value."""

    value: Any
    origin: Origin
    unsets: bool = False


@dataclass
class Section:
    """Hold named children."""

    children: dict[str, Leaf | Section] = field(default_factory=dict)
    origin: Origin = DEFAULT

    def plain(self) -> dict[str, Any]:
        """Return the values without their origins."""
        return {
            key: node.plain() if isinstance(node, Section) else node.value
            for key, node in self.children.items()
        }

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
        """Yield every leaf below with its dotted path."""
        for key, node in self.children.items():
            path = f"{prefix}.{key}" if prefix else key
            if isinstance(node, Section):
                yield from node.leaves(path)
            else:
                yield path, node


LARGEST_TEXT, MOST_VALUES, DEEPEST = 1 << 18, 100_000, 1000
"""Characters of a configuration, its values after aliases are written out, and brackets open in it."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML has it, but ``1e-6`` is a number and a date stays text."""

    def get_single_node(self) -> yaml.Node | None:
        """Return the root of the text; raises ValueError where aliases would grow it beyond measure."""
        node = super().get_single_node()
        if node is not None and _values(node, {}) > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values, with those that *aliases repeat")
        return node


def _deepest(text: str) -> int:
    """Return how many brackets are open at most, those in texts and comments, too."""
    steps = (1 if bracket in "[{" else -1 for bracket in re.findall(r"[][{}]", text))
    return max(accumulate(steps, initial=0))


def _values(node: yaml.Node, counted: dict[int, int]) -> int:
    """Count the values below a node as often as they stand there; ``counted`` holds those of known nodes."""
    if id(node) not in counted:
        counted[id(node)] = MOST_VALUES  # of a node that holds itself
        items = node.value if isinstance(node.value, list) else []
        below = (child for item in items for child in (item if isinstance(item, tuple) else (item,)))
        counted[id(node)] = 1 + sum(_values(child, counted) for child in below)
    return counted[id(node)]


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


class _Dumper(yaml.SafeDumper):
    """Put text in quotes where the loader above would read something else."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def one_line(value: Any) -> str:
    """Return a value as YAML on one line that `read_tree` reads back."""
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False
    )
    text = text.removesuffix("\n").removesuffix("\n...").strip()
    # YAML would fold a line break over several lines; JSON escapes it and is read the same.
    return json.dumps(value) if "\n" in text else text


@contextmanager
def _reading(text: str) -> Iterator[tuple[_Loader, yaml.Node | None]]:
    """Give the reader of a YAML text and its root; raises what the reader does, RecursionError at once."""
    if _deepest(text) > DEEPEST:  # the reader takes longer and longer with each
        raise RecursionError(f"more than {DEEPEST:,} brackets are open in one place")
    loader = _Loader(text)
    try:
        yield loader, loader.get_single_node()
    finally:
        loader.dispose()


def read_tree(text: str, name: str, errors: list[UserError]) -> Section:
    """Parse YAML text into a tree; mistakes are added to ``errors`` and their values left out."""
    try:
        if len(text) > LARGEST_TEXT:
            raise UserError(
                "the configuration is too long to be one",
                where=name,
                expected=f"at most {LARGEST_TEXT:,} characters",
                got=f"{len(text):,} characters",
                fix="remove what is no configuration, such as long comments",
            )
        with _reading(text) as (loader, node):
            if node is None:
                return Section(origin=Origin("file", name))
            if not isinstance(node, yaml.MappingNode):
                raise UserError(
                    "a configuration is a mapping of names to values",
                    where=name,
                    expected="lines such as `steps: 200`",
                    got=_kind(node),
                    fix="write `name: value` lines, without a dash before them",
                )
            tree = _convert(loader, node, lambda line: Origin("file", f"{name}:{line}"), errors)
            assert isinstance(tree, Section)
            return tree
    except UserError as error:
        errors.append(error)
    except yaml.YAMLError as error:
        errors.append(_syntax_error(error, name))
    except (RecursionError, ValueError, ArithmeticError) as error:
        errors.append(
            UserError(
                "the YAML text has a value that cannot be read",
                where=name,
                expected="numbers, texts, lists and sections that are not deeply nested",
                got=f"{type(error).__name__}: {error}",
                fix="check the longest and the most deeply nested values",
            )
        )
    return Section(origin=Origin("file", name))


def read_file(path: Path, errors: list[UserError]) -> Section:
    """Read a configuration file; what cannot be read is added to ``errors``."""
    try:
        with path.open("rb") as file:  # a pipe of the shell, too; a device may have no end
            text = file.read(4 * LARGEST_TEXT + 1).decode("utf-8")
    except FileNotFoundError:
        errors.append(
            UserError(
                "the configuration file does not exist",
                where=str(path),
                expected="a YAML file",
                got="no such file" if path.parent.is_dir() else f"no directory {path.parent}",
                fix=yaml_files_beside(path),
            )
        )
        return Section()
    except (OSError, UnicodeDecodeError) as error:
        errors.append(
            UserError(
                "the configuration file cannot be read",
                where=str(path),
                expected="a YAML file in UTF-8",
                got="a directory" if path.is_dir() else str(error),
                fix="save it as UTF-8"
                if isinstance(error, UnicodeDecodeError)
                else "name a file that ends in .yaml",
            )
        )
        return Section()
    return read_tree(text, str(path), errors)


def apply_overrides(tree: Section, overrides: Iterable[str], errors: list[UserError]) -> None:
    """Set ``key.path=value`` pairs in the tree; a value replaces whatever stood at its key."""
    for text in overrides:
        key, equals, value = text.partition("=")
        names = [name.strip() for name in key.split(".")]
        origin = Origin("override", f"override {text}" if len(text) <= 60 else f"override {text[:57]}...")
        if not equals or not all(names):
            errors.append(
                UserError(
                    "an override is not of the form key=value",
                    where="command line",
                    expected="a dotted name, an equals sign and a YAML value",
                    got=repr(text),
                    fix="for example actor.layout.tensor=2",
                )
            )
            continue
        node = _override_value(value, origin, errors)
        if node is not None:
            put(tree, names, node)


def _override_value(value: str, origin: Origin, errors: list[UserError]) -> Leaf | Section | None:
    try:
        with _reading(value) as (loader, node):
            return Leaf(None, origin) if node is None else _convert(loader, node, lambda line: origin, errors)
    except (yaml.YAMLError, RecursionError, ValueError, ArithmeticError) as error:
        problem = getattr(error, "problem", None) or str(error)
        errors.append(
            UserError(
                "the value of an override is not valid YAML",
                where=origin.detail,
                expected="a YAML value such as 2, 1e-6, true, null, text or [0, 1]",
                got=f"{value!r}: {problem}",
                fix="put text with special characters in quotes: key='\"...\"'",
            )
        )
        return None


def put(tree: Section, names: Sequence[str], node: Leaf | Section) -> None:
    """Set the value of a dotted name, given as its parts, in a tree."""
    for depth, name in enumerate(names[:-1]):
        child = tree.children.get(name)
        if not isinstance(child, Section):
            child = named_section(child, names[: depth + 1]) or Section(origin=node.origin)
            tree.children[name] = child
        tree = child
    lay_over(tree, names[-1], node)


def lay_over(tree: Section, name: str, node: Leaf | Section) -> None:
    """Put a node in place of what stands at a name; null in place of something unsets it."""
    null = isinstance(node, Leaf) and node.value is None
    tree.children[name] = Leaf(None, node.origin, unsets=True) if null and name in tree.children else node


def named_section(node: Leaf | Section | None, path: Sequence[str]) -> Section | None:
    """Return the section that text stands for as a piece of the algorithm, environment or set, else None.

    ``policy_loss: gspo`` is short for ``policy_loss: {name: gspo}``, also where a setting is laid over it; of
    an evaluation set the text is its data.
    """
    path = list(path)
    path = list(path)
    named = (len(path) == 2 and path[0] == "algorithm") or path == ["rollout", "environment"]
    evaluated = len(path) == 3 and path[:2] == ["evaluation", "sets"]
    text = isinstance(node, Leaf) and isinstance(node.value, str) and node.value != "None"
    if node is None or not text or not (named or evaluated):
        return None
    return Section({"name" if named else "data": node}, node.origin)


def _convert(loader: _Loader, node: yaml.Node, origin_of: Any, errors: list[UserError]) -> Leaf | Section:
    origin = origin_of(node.start_mark.line + 1)
    if not isinstance(node, yaml.MappingNode):
        return Leaf(loader.construct_object(node, deep=True), origin)
    loader.flatten_mapping(node)
    section = Section(origin=origin)
    for key_node, value_node in node.value:
        line = origin_of(key_node.start_mark.line + 1)
        if not isinstance(key_node, yaml.ScalarNode):
            errors.append(
                UserError(
                    "a name in the configuration is not text",
                    where=str(line),
                    expected="text before the colon",
                    got=_kind(key_node),
                    fix="write a name there",
                )
            )
            continue
        key = key_node.value
        if key in section.children:
            errors.append(
                UserError(
                    f"`{key}` is written twice in one section",
                    where=str(line),
                    expected="each name once",
                    got=f"also at {section.children[key].origin}",
                    fix="remove one of the two",
                )
            )
            continue
        child = _convert(loader, value_node, origin_of, errors)
        child.origin = line
        section.children[key] = child
    return section


def _syntax_error(error: yaml.YAMLError, name: str) -> UserError:
    mark = getattr(error, "problem_mark", None)
    where = f"{name}:{mark.line + 1}, column {mark.column + 1}" if mark else name
    snippet = mark.get_snippet(indent=0) if mark else None
    return UserError(
        "the configuration file is not valid YAML",
        where=where,
        expected="valid YAML",
        got="\n".join(filter(None, [getattr(error, "problem", None) or str(error), snippet])),
        fix="check indentation (spaces, no tabs), colons and quotes around that line",
    )


def _kind(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"


def yaml_files_beside(path: Path) -> str:
    """Return what to try where a file is not there: the YAML files beside it, or the spelling."""
    try:
        names = sorted(entry.name for entry in path.parent.glob("*.yaml"))[:8]
    except OSError:
        names = []
    return f"files beside it: {', '.join(names)}" if names else "check the spelling and the current directory"


def describe(value: Any) -> str:
    """Return a value as a user wrote it, with the name of its kind."""
    if value is None:
        return "null (nothing)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (true/false; YAML also reads yes, no, on, off so)"
    if isinstance(value, int):
        return f"{value} (integer)" if value.bit_length() < 256 else "an integer of over 256 bits"
    if isinstance(value, float):
        return f"{value!r} (number)" if math.isfinite(value) else f"{value!r} (not a finite number)"
    if isinstance(value, str):
        return f"{value!r} (text)" if len(value) <= 80 else f"{value[:77]!r}... (text)"
    if isinstance(value, dict):
        return "a section with " + (", ".join(map(str, list(value)[:6])) or "nothing in it")
    if isinstance(value, list | tuple):
        shown = ", ".join(repr(item) for item in value[:6]) + (", ..." if len(value) > 6 else "")
        return f"[{shown}] (list)"
    return f"{value!r} ({type(value).__name__})"
