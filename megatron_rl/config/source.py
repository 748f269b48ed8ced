"""Parsing of YAML and command-line overrides into a tree of plain values, each with its origin.

Every value keeps its origin: its file and line, or its override. So any later error can name the origin.
`_parse_yaml` alone rejects oversized input: texts longer than `MAX_TEXT`, trees with more than `MAX_VALUES`
values or `MAX_DEPTH` levels, integers of more than 64 bits, and characters that file systems and JSON cannot
represent. Later code needs no such checks.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.setting import key_path
from megatron_rl.errors import UserError, missing_file_error, unreadable_file_error

# Key with which a configuration file names its base files. Merging removes the key.
BASE_KEY = "base"


@dataclass(frozen=True)
class Origin:
    """Origin of a configuration value.

    Example:
        >>> str(Origin("file", "run.yaml:3")), str(Origin("derived", "model.path")), str(Origin("default"))
        ('run.yaml:3', 'derived: model.path', 'default')
    """

    kind: str
    """default, file, override or derived."""
    detail: str = ""
    """File and line, the text of the override, or the reason of a derived value."""

    def __str__(self) -> str:
        if self.kind == "derived":
            return f"derived: {self.detail}"
        return self.detail or self.kind


DEFAULT = Origin("default")


@dataclass
class Leaf:
    """Value that is not a mapping.

    Example: the line ``steps: 200`` of run.yaml is ``Leaf(200, Origin("file", "run.yaml:1"))``.
    """

    value: Any
    """Plain value as YAML reads it."""
    origin: Origin
    """File and line, or override, that set the value."""
    unsets: bool = False
    """Whether the value is a null that replaces another value, and so restores the default."""

    def plain(self) -> Any:
        """Return the value without its origin."""
        return self.value


@dataclass
class Section:
    """Mapping of names to leaves and further sections.

    Example: ``actor: {recompute: full}`` is ``Section({"actor": Section({"recompute": Leaf("full",
    ...)})})``.
    """

    children: dict[str, Leaf | Section] = field(default_factory=dict)
    """Name -> node, in the order of the text."""
    origin: Origin = DEFAULT
    """File and line, or override, with the name of the section."""

    def plain(self) -> dict[str, Any]:
        """Return the values without their origins."""
        return {key: node.plain() for key, node in self.children.items()}

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
        """Yield every leaf of the section with its dotted path; ``prefix`` is the path of the section."""
        for key, node in self.children.items():
            path = key_path(prefix, key)
            if isinstance(node, Section):
                yield from node.leaves(path)
            else:
                yield path, node


# Size limits. A configuration with every key has about 3,000 characters, so a larger text is the wrong file,
# or has nested aliases.

# Number of characters of a text.
MAX_TEXT = 1 << 18

# Number of values after the expansion of aliases: 40 lines of aliases can expand to 2^40 values.
MAX_VALUES = 100_000

# Nesting depth of sections and lists. PyYAML recurses about 3 Python frames per level, of 1,000 by default.
MAX_DEPTH = 64

_DEPTH_LIMIT = f"at most {MAX_DEPTH} sections and lists inside one another"

# End of the range of integers, -2^63 to 2^63 - 1: no larger number fits a tensor.
INTEGER_END = 1 << 63

# A null character, or half of a surrogate pair: YAML's escapes can write both.
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")


class _LimitError(yaml.MarkedYAMLError):
    """Error for a YAML node that exceeds a limit.

    ``context`` describes the limit, and ``problem`` describes the node.
    """


class _Loader(yaml.SafeLoader):
    """YAML 1.1 loader that enforces the size limits and differs from PyYAML's loader in three points.

    - ``1e-6`` is a number. PyYAML requires ``1.0e-6``.
    - A date is text.
    - `duplicates` collects duplicate names of a mapping. PyYAML silently uses the last value.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        # Pairs of the node with a duplicate name and the node with its first occurrence.
        self.duplicates: list[tuple[yaml.ScalarNode, yaml.ScalarNode]] = []
        # Id of a node -> (number of values, number of levels) after the expansion of aliases; None while the
        # node is being measured.
        self._sizes: dict[int, tuple[int, int] | None] = {}

    def read_root(self) -> yaml.Node | None:
        """Return the root node, or None for an empty text; raise `_LimitError` if a limit is exceeded."""
        try:
            node = self.get_single_node()
        except RecursionError:
            raise _LimitError(_DEPTH_LIMIT, None, f"more than {MAX_DEPTH}", self.get_mark()) from None
        if node is not None:
            self._measure_node(node)
        return node

    def _measure_node(self, node: yaml.Node) -> tuple[int, int]:
        """Return the number of values and the number of levels of a node, with aliases expanded.

        Raises `_LimitError` if either number exceeds its limit.
        """
        mark = node.start_mark
        if id(node) in self._sizes:
            size = self._sizes[id(node)]
            # The alias refers to a node that contains it, so its expansion would be infinite.
            if size is None:
                raise _LimitError(
                    "an *alias of a complete value", None, "an *alias inside its own &anchor", mark
                )
            return size

        self._sizes[id(node)] = None
        count = 1
        levels = 1
        for child in self._children(node):
            child_count, child_levels = self._measure_node(child)
            count += child_count
            levels = max(levels, child_levels + 1)

        if levels > MAX_DEPTH:
            raise _LimitError(_DEPTH_LIMIT, None, f"more than {MAX_DEPTH}", mark)
        if count > MAX_VALUES:
            excess = f"more than {MAX_VALUES:,} values, with those that each *alias repeats"
            raise _LimitError(f"at most {MAX_VALUES:,} values", None, excess, mark)
        self._sizes[id(node)] = (count, levels)
        return count, levels

    def _children(self, node: yaml.Node) -> list[yaml.Node]:
        """Return the items of a list node, or the names and values of a mapping node.

        Raises `_LimitError` for a name that is not text, and for text with characters that JSON and file
        systems cannot represent. Collects duplicate names.
        """
        if isinstance(node, yaml.SequenceNode):
            return node.value
        if isinstance(node, yaml.MappingNode):
            self._collect_duplicates(node)
            children: list[yaml.Node] = []
            for key_node, value_node in node.value:
                children += [key_node, value_node]
            return children
        if _NOT_TEXT.search(node.value):
            limit = "text without null characters and halves of surrogate pairs"
            raise _LimitError(limit, None, ascii(node.value)[:80], node.start_mark)
        return []

    def _collect_duplicates(self, node: yaml.MappingNode) -> None:
        """Add duplicate names of a mapping to `duplicates`; raise `_LimitError` unless all names are text.

        Call this before PyYAML expands merge keys (``<<``), since a mapping may override a merged name.
        """
        first_nodes: dict[str, yaml.ScalarNode] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _LimitError("text before the colon", None, "a list or a section", key.start_mark)
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in first_nodes:
                self.duplicates.append((key, first_nodes[key.value]))
            else:
                first_nodes[key.value] = key

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Convert a node to an integer; raise `_LimitError` if it has more than 64 bits."""
        value = super().construct_yaml_int(node)
        if -INTEGER_END <= value < INTEGER_END:
            return value
        raise _LimitError("an integer from -2**63 to 2**63 - 1", None, node.value[:80], node.start_mark)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)

# Dates stay text: `name: 2026-01-31` is a name, and JSON cannot write a timestamp.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

# YAML 1.1 reads `1e-6`, the usual form of a learning rate, as text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes text which `_Loader` would read as a number, and leaves dates unquoted."""


# Use the loader's resolvers, so that every written text is read back unchanged.
_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def one_line(value: Any) -> str:
    """Format a value as one line of YAML that `read_tree` parses to the same value."""
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        default_flow_style=True,
        width=float("inf"),
        allow_unicode=True,
        sort_keys=False,
    )
    # PyYAML writes the document end `...` after a scalar.
    text = text.removesuffix("\n").removesuffix("\n...").strip()

    # YAML would write a line break as several lines; JSON escapes it, and JSON strings are valid YAML.
    if "\n" in text:
        return json.dumps(value)
    return text


# Function that maps a line number, counted from 1, to the origin of a value on that line.
OriginOf = Callable[[int], Origin]


def _parse_yaml(
    text: str, noun: str, origin_of: OriginOf, errors: list[UserError], *, fix: str
) -> Leaf | Section | None:
    """Parse YAML text to a tree; for invalid or oversized text, append an error and return None.

    ``noun`` names the text in the error, and ``fix`` is the error's fix for invalid YAML. Empty text is null.
    """
    try:
        if len(text) > MAX_TEXT:
            raise _LimitError(f"at most {MAX_TEXT:,} characters", None, f"{len(text):,} characters")
        loader = _Loader(text)
        node = loader.read_root()
        if node is None:
            return Leaf(None, origin_of(1))
        _append_duplicate_errors(loader, origin_of, errors)
        return _to_node(loader, node, origin_of)

    except _LimitError as error:
        line = 1 if error.problem_mark is None else error.problem_mark.line + 1
        errors.append(
            UserError(
                "the configuration has a value that no setting can have",
                where=str(origin_of(line)),
                expected=error.context,
                got=error.problem,
                fix="correct the value there, or remove it",
            )
        )

    # A scalar that does not match its tag, such as `!!int many`, raises a ValueError or an ArithmeticError.
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:
        mark = getattr(error, "problem_mark", None)
        line = 1
        got = getattr(error, "problem", None) or str(error)
        if mark is not None:
            line = mark.line + 1
            got = f"{got}\n{mark.get_snippet(indent=0) or ''}".rstrip()
        location = str(origin_of(line))
        errors.append(
            UserError(f"{noun} is not valid YAML", where=location, expected="valid YAML", got=got, fix=fix)
        )
    return None


def read_tree(text: str, name: str, errors: list[UserError]) -> Section:
    """Parse the YAML text of a configuration file; return an empty section if the text is invalid.

    Errors are appended to ``errors``. ``name`` is the file name in the origins of values and errors.
    """

    def origin_of(line: int) -> Origin:
        """Return the origin of a value on line ``line``."""
        return Origin("file", f"{name}:{line}")

    fix = "check indentation (spaces, no tabs), colons and quotes around that line"
    tree = _parse_yaml(text, "the configuration file", origin_of, errors, fix=fix)
    if isinstance(tree, Section):
        return tree
    if tree is not None and tree.value is not None:
        errors.append(
            UserError(
                "a configuration is a mapping of names to values",
                where=name,
                expected="lines such as `steps: 200`",
                got=describe_value(tree.value),
                fix="write `name: value` lines, without a dash before them",
            )
        )
    return Section(origin=Origin("file", name))


def read_file(path: Path, errors: list[UserError], location: str | None = None) -> Section:
    """Read and parse a configuration file; return an empty section if that fails.

    Errors are appended to ``errors``. The error for an unreadable file is reported at ``location``, the file
    and line that name it. Without ``location``, the error is reported at ``path``.
    """
    location = location or str(path)
    try:
        # The path may be a pipe or an endless device: read no more than the largest valid text, which has up
        # to 4 bytes per character in UTF-8.
        with path.open("rb") as file:
            text = file.read(4 * MAX_TEXT + 1).decode("utf-8")
    except FileNotFoundError:
        fix = _suggest_yaml_files(path)
        errors.append(missing_file_error(path, where=location, expected="a YAML file", fix=fix))
    except (OSError, UnicodeDecodeError) as error:
        fix = "name a file that ends in .yaml, saved as UTF-8"
        noun = "the configuration file"
        errors.append(unreadable_file_error(noun, path, error, expected="a YAML file in UTF-8", fix=fix))
    else:
        return read_tree(text, str(path), errors)
    return Section()


def read_with_base(path: Path, errors: list[UserError]) -> tuple[Section | None, tuple[Path, ...]]:
    """Read a configuration file and merge it over its base files, recursively.

    ``base`` is a file name or a list of file names, relative to the folder of the file that contains it. In a
    list, later files are merged over earlier files. If files of the list have a common base, this base is
    merged only once, before the first of them. Sections are merged name by name. A single value or a list
    replaces the value of the base, and null restores the default. Every value keeps its origin.

    Returns the tree, and the files that were read, ``path`` first. If a file cannot be read, the function
    returns None in place of the tree. Errors are appended to ``errors``.
    """
    files: list[Path] = []
    tree = _read_over_bases([path], None, files, errors)
    return tree, tuple(files)


def _read_over_bases(
    chain: list[Path], location: str | None, files: list[Path], errors: list[UserError]
) -> Section | None:
    """Read the last file of ``chain`` and merge it over its bases; return None if a file cannot be read.

    Every file of ``chain`` is a base of the file before it. ``location`` is the file and line that name the
    last file, None for the first file. All files that are read are appended to ``files``.
    """
    files.append(chain[-1])
    error_count = len(errors)
    tree = read_file(chain[-1], errors, location)
    # An empty tree with an error means that the file could not be read.
    if len(errors) > error_count and not tree.children:
        return None

    node = tree.children.pop(BASE_KEY, None)
    if node is None:
        return tree
    bases = _find_base_files(node, chain, errors)
    if not bases:
        return None

    # Merge in order: each base replaces values of earlier bases, and the file itself replaces all of them.
    merged = Section()
    for base in bases:
        # Skip a file that is also a base of an earlier base. If it were merged again, its values would
        # replace the values of the earlier base.
        if any(_is_same_configuration(base, file) for file in files):
            continue
        base_tree = _read_over_bases([*chain, base], str(node.origin), files, errors)
        if base_tree is None:
            return None
        _merge_into_base(merged, base_tree)
    _merge_into_base(merged, tree)
    return merged


def refuse_base(tree: Section, errors: list[UserError]) -> None:
    """Remove ``base`` from a tree that was not read from a file, and append an error for it."""
    node = tree.children.pop(BASE_KEY, None)
    if node is None:
        return
    errors.append(
        UserError(
            f"`{BASE_KEY}` can only be written in a configuration file",
            where=str(node.origin),
            expected=f"`{BASE_KEY}: other.yaml` in a file",
            got=f"`{BASE_KEY}` in an override, or in YAML text that is not a file",
            fix=f"write it into a file, or load the file that `{BASE_KEY}` names",
        )
    )


def _find_base_files(node: Leaf | Section, chain: list[Path], errors: list[UserError]) -> list[Path]:
    """Return the base files of the last file in ``chain``; ``node`` is the value of its key ``base``.

    For an invalid value, or a file that is already in ``chain``, append an error and return an empty list.
    """
    folder = chain[-1].parent
    origin = str(node.origin)
    value = node.plain()
    values: list[Any] = [value]
    if isinstance(value, list):
        values = value
    names = [name for name in values if isinstance(name, str) and name]
    if not names or len(names) < len(values):
        errors.append(
            UserError(
                f"`{BASE_KEY}` is not the name of a file, or a list of names",
                where=origin,
                expected=f"YAML files, relative to {folder}",
                got=describe_value(value),
                fix=f"write {BASE_KEY}: followed by one name, such as ../quickstart.yaml, or [ONE, OTHER]",
            )
        )
        return []

    bases: list[Path] = []
    for name in names:
        base = Path(os.path.normpath(folder / name))
        bases.append(base)
        # Compare resolved paths, so that a link or `../` cannot hide a cycle.
        if any(_is_same_file(base, file) for file in chain):
            errors.append(
                UserError(
                    f"`{BASE_KEY}` leads back to a file that was already read",
                    where=origin,
                    expected="a chain of files that ends",
                    got=" -> ".join(str(file) for file in [*chain, base]),
                    fix=f"remove `{BASE_KEY}` from one of them",
                )
            )
            return []
    return bases


def _is_same_file(first: Path, second: Path) -> bool:
    """Return whether two paths lead to the same file, also through links."""
    # Unlike `Path.resolve`, this raises no error for a link that leads to itself.
    return os.path.realpath(first) == os.path.realpath(second)


def _is_same_configuration(first: Path, second: Path) -> bool:
    """Return whether two configuration paths lead to the same file and to the same base files.

    A configuration names its base files relative to its folder. If a link in another folder leads to the same
    file, the relative names lead to other base files.
    """
    if not _is_same_file(first, second):
        return False
    return _is_same_file(first.parent, second.parent) or BASE_KEY not in read_file(first, []).children


def _merge_into_base(base: Section, section: Section, path: tuple[str, ...] = ()) -> None:
    """Merge ``section`` of a configuration file into ``base``, the same section of its base file.

    A base file is a file that the configuration names as ``base:`` and inherits values from. If both sections
    have a value for a key, the value of ``section`` replaces the value of ``base``. ``base`` is changed in
    place. ``path`` is the path of the section in the configuration.
    """
    for key, node in section.children.items():
        base_node = base.children.get(key)
        if not isinstance(node, Section):
            override_node(base, key, node)
            continue

        if not isinstance(base_node, Section):
            base_node = expand_short_form(base_node, [*path, key]) or Section(origin=node.origin)
            base.children[key] = base_node
        _merge_into_base(base_node, node, (*path, key))


def apply_overrides(tree: Section, overrides: Iterable[str], errors: list[UserError]) -> None:
    """Set the value of each override ``key.path=value`` in the tree; append errors to ``errors``."""
    for override in overrides:
        key, equals, value = override.partition("=")
        names = [name.strip() for name in key.split(".")]
        detail = override if len(override) <= 60 else f"{override[:57]}..."
        origin = Origin("override", f"override {detail}")

        if not equals or not all(names) or len(names) > MAX_DEPTH:
            errors.append(
                UserError(
                    "an override is not of the form key=value",
                    where="command line",
                    expected="a dotted name, an equals sign and a YAML value",
                    got=repr(override[:200]),
                    fix="for example actor.layout.tensor=2",
                )
            )
            continue

        node = _override_value(value, origin, errors)
        if node is not None:
            set_node(tree, names, node)


def _override_value(value: str, origin: Origin, errors: list[UserError]) -> Leaf | Section | None:
    """Parse the value of an override to a node; for invalid YAML, append an error and return None."""
    fix = "put text with special characters in quotes: key='\"...\"'"
    return _parse_yaml(value, "the value of an override", lambda line: origin, errors, fix=fix)


def set_node(tree: Section, names: Sequence[str], node: Leaf | Section) -> None:
    """Set the node at a path of the tree; ``names`` are the components of the dotted path."""
    for depth, name in enumerate(names[:-1]):
        child = tree.children.get(name)
        if not isinstance(child, Section):
            child = expand_short_form(child, names[: depth + 1]) or Section(origin=node.origin)
            tree.children[name] = child
        tree = child
    override_node(tree, names[-1], node)


def override_node(tree: Section, name: str, node: Leaf | Section) -> None:
    """Set the node of a name in a section. A null that replaces an earlier node gets ``unsets=True``."""
    is_null = isinstance(node, Leaf) and node.value is None
    if is_null and name in tree.children:
        node = Leaf(None, node.origin, unsets=True)
    tree.children[name] = node


def expand_short_form(node: Leaf | Section | None, path: Sequence[str]) -> Section | None:
    """Expand the short form of a section at ``path``; return None if the path or value has no short form.

    The short forms and their sections are:

    - ``algorithm.KEY: NAME`` is ``algorithm.KEY: {name: NAME}``, such as ``policy_loss: gspo``;
    - ``rollout.environment: NAME`` is ``rollout.environment: {name: NAME}``;
    - ``evaluation.sets.math: FILE`` is ``evaluation.sets.math: {data: FILE}``;
    - ``health.rules.RULE: off`` is ``health.rules.RULE: {on: false}``.
    """
    match list(path):
        case ["algorithm", _] | ["rollout", "environment"]:
            key = "name"
        case ["evaluation", "sets", _]:
            key = "data"
        case ["health", "rules", _]:
            # YAML reads `off` as false.
            if isinstance(node, Leaf) and isinstance(node.value, bool):
                return Section({"on": node}, node.origin)
            return None
        case _:
            return None

    if isinstance(node, Leaf) and isinstance(node.value, str) and node.value != "None":
        return Section({key: node}, node.origin)
    return None


def _append_duplicate_errors(loader: _Loader, origin_of: OriginOf, errors: list[UserError]) -> None:
    """Append an error for each name that is written twice in one mapping."""
    for key, first_key in loader.duplicates:
        errors.append(
            UserError(
                f"`{key.value}` is written twice in one section",
                where=str(origin_of(key.start_mark.line + 1)),
                expected="each name once",
                got=f"also at {origin_of(first_key.start_mark.line + 1)}",
                fix="remove one of the two",
            )
        )


def _to_node(loader: _Loader, node: yaml.Node, origin_of: OriginOf) -> Leaf | Section:
    """Convert a YAML node to a leaf, or to a section with the origin of every name below it."""
    origin = origin_of(node.start_mark.line + 1)
    if not isinstance(node, yaml.MappingNode):
        return Leaf(loader.construct_object(node, deep=True), origin)

    # flatten_mapping inserts the keys that are merged by `<<` before the mapping's own keys. Later keys win,
    # so the mapping's own keys override the merged keys.
    loader.flatten_mapping(node)
    section = Section(origin=origin)
    for key_node, value_node in node.value:
        # Use the line of the name: the value of a section begins on a later line.
        child = _to_node(loader, value_node, origin_of)
        child.origin = origin_of(key_node.start_mark.line + 1)
        section.children[key_node.value] = child
    return section


def _suggest_yaml_files(path: Path) -> str:
    """Return the fix for a missing file, which lists the YAML files in the same folder."""
    try:
        names = sorted(file.name for file in path.parent.glob("*.yaml"))[:8]
    except OSError:  # no permission to list the folder
        names = []
    if not names:
        return "check the spelling and the current directory"
    return f"other files in its folder: {', '.join(names)}"


def describe_value(value: Any) -> str:
    """Format a value with its YAML type, as in ``3 (integer)``, shortened for an error message.

    Example:
        >>> describe_value(3), describe_value([1, 2])
        ('3 (integer)', '[1, 2] (list)')
    """
    # Match bool before int, since bool is a subclass of int.
    match value:
        case None:
            return "null (nothing)"
        case bool():
            return f"{str(value).lower()} (true/false; YAML reads yes, no, on and off as these)"
        case int():
            return f"{value} (integer)"
        case float():
            kind = "number" if math.isfinite(value) else "not a finite number"
            return f"{value!r} ({kind})"

        case str():
            return f"{value!r} (text)" if len(value) <= 80 else f"{value[:77]!r}... (text)"

        case dict():
            names = ", ".join(str(name) for name in list(value)[:6])
            return f"a section with {names or 'nothing in it'}"
        case list() | tuple():
            items = [repr(item) for item in value[:6]]
            if len(value) > 6:
                items.append("...")
            return f"[{', '.join(items)}] (list)"
        case _:
            return f"{value!r} ({type(value).__name__})"
