"""From a tree of values to typed, frozen dataclasses, collecting every mistake on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.field_types import (
    convert,
    entry_class,
    hints,
    is_mapping,
    known_paths,
    optional,
    options,
    section_class,
    type_fix,
    type_words,
)
from megatron_rl.config.schema import TRAIN
from megatron_rl.config.setting import is_setting, setting_of
from megatron_rl.config.source import DEFAULT, Leaf, Origin, Section, describe, named_section, one_line
from megatron_rl.config.unknown import note_unknown
from megatron_rl.errors import UserError, UserErrors


@dataclass
class Parse:
    """Collect what parsing finds: mistakes, the origin of each value, and the paths left broken.

    ``job`` says which of the required keys are needed.
    """

    job: str = TRAIN
    errors: list[UserError] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def fail(self, path: str, node: Leaf | Section | None, message: str, **fields: str | None) -> None:
        """Record a mistake in the value of a configuration path."""
        self.note(path, node, message, **fields)
        self.broken.add(path)

    def note(self, path: str, node: Leaf | Section | None, message: str, **fields: str | None) -> None:
        """Record a mistake that leaves every known value as it is."""
        self.errors.append(UserError(message, where=self.located(path, node), **fields))

    def located(self, path: str, node: Leaf | Section | None) -> str:
        """Return a path with the file or override that wrote it."""
        origin = node.origin if node is not None else None
        return f"{path} ({origin})" if origin is not None and origin.kind != "default" else path


def parse_section(cls: type, section: Section, parse: Parse, path: str = "", defaults: Any = None) -> Any:
    """Return an instance of ``cls`` made from a section; broken values keep their default.

    ``defaults`` is an instance whose values stand where the section has none: the outer default of a
    nested section may differ from the default of its class.
    """
    known = {item.name: item for item in dataclasses.fields(cls) if is_setting(item)}
    section = _with_rest(known, section)
    for key, node in section.children.items():
        if key not in known:
            below = [name for name in known_paths(cls) if name.partition(".")[0] in known]
            note_unknown(key, node, path, below, parse)
    # A new value holds what is no setting, too, as the defaults have it.
    values = {item.name: _default(item, defaults) for item in dataclasses.fields(cls) if not is_setting(item)}
    for name, item in known.items():
        full = f"{path}.{name}" if path else name
        default = _default(item, defaults)
        node = section.children.get(name)
        if default is not dataclasses.MISSING and not optional(hints(cls)[name]) and _unsets(node):
            node = None
        jobs = setting_of(item).jobs
        if node is None and (default is dataclasses.MISSING or jobs):
            if section_class(hints(cls)[name]) is not None and full not in parse.broken:
                node = Section()
            elif path not in parse.broken and (not jobs or parse.job in jobs):
                parse.fail(
                    full,
                    None,
                    f"`{full}` is missing",
                    expected=type_words(hints(cls)[name]),
                    got="nothing",
                    fix=f"add it to the file, or on the command line {full}={setting_of(item).example}",
                )
        number_means = setting_of(item).number_means
        values[name] = _value(hints(cls)[name], node, default, full, parse, number_means)
    return cls(**values)


def parse_settings(cls: type, settings: Mapping[str, Any], where: str, defaults: Any = None) -> Any:
    """Return an instance of a user's own class with ``settings``; see `parse_section`.

    Raises UserErrors; whatever else the class itself raises passes.
    """
    parse = Parse()
    section = Section({name: Leaf(value, DEFAULT) for name, value in settings.items()})
    made = parse_section(cls, section, parse, where, defaults)
    if parse.errors:
        raise UserErrors(parse.errors)
    return made


def _with_rest(known: dict[str, dataclasses.Field], section: Section) -> Section:
    """Return a section whose unknown names stand below the key that takes the rest, if one does."""
    rest = next((name for name, item in known.items() if setting_of(item).takes_rest), None)
    unknown = {key: node for key, node in section.children.items() if key not in known}
    if rest is None or not unknown:
        return section
    stated = section.children.get(rest)
    stated = stated.children if isinstance(stated, Section) else {}
    children = {key: node for key, node in section.children.items() if key in known}
    return Section(children | {rest: Section(stated | unknown, section.origin)}, section.origin)


def _unsets(node: Leaf | Section | None) -> bool:
    """Say whether a node is a null that takes away what an earlier file or the file says."""
    return isinstance(node, Leaf) and node.unsets


def _value(
    hint: Any, node: Leaf | Section | None, default: Any, path: str, parse: Parse, number_means: str = ""
) -> Any:
    entry = entry_class(hint)
    if entry is not None and isinstance(node, Section) and node.children:
        missing = dataclasses.MISSING
        return {
            name: _value(entry, child, missing, f"{path}.{name}", parse)
            for name, child in node.children.items()
            if not _unsets(child)
        }
    section = section_class(hint)
    if section is None:
        return _plain(hint, node, default, path, parse, number_means)
    if node is None:
        _note_defaults(default, path, parse)
        return default
    node = named_section(node, path.split(".")) or node
    if isinstance(node, Leaf):
        if node.value is not None and node.value != "None":
            names = ", ".join(item.name for item in dataclasses.fields(section) if is_setting(item))
            parse.fail(
                path,
                node,
                f"`{path}` is a section, not a single value",
                expected=f"a section with {names}",
                got=describe(node.value),
                fix=_section_fix(section, node.value, path),
            )
            node = Section()
        elif optional(hint):
            parse.origins[path] = node.origin
            return None
        else:
            node = Section(origin=node.origin)
    return parse_section(section, node, parse, path, None if default is dataclasses.MISSING else default)


def _section_fix(section: type, value: Any, path: str) -> str:
    """Return how to write a section that was given a single value: below its usual key, if that takes it."""
    key = getattr(section, "VALUE_KEY", None)
    if key is not None:
        accepted, typed = convert(hints(section)[key], value)
        item = next(item for item in dataclasses.fields(section) if item.name == key)
        if accepted and setting_of(item).error(f"{path}.{key}", typed) is None:
            return f"write `{path}: {one_line({key: value})}`"
    return f"write names below `{path.rpartition('.')[2]}:`, or {path}.NAME=VALUE"


def _plain(
    hint: Any, node: Leaf | Section | None, default: Any, path: str, parse: Parse, number_means: str
) -> Any:
    fallback = _placeholder(hint) if default is dataclasses.MISSING else default
    if node is None:
        parse.origins[path] = DEFAULT
        return fallback
    parse.origins[path] = node.origin
    raw = node.plain() if isinstance(node, Section) else node.value
    if raw == "None" and optional(hint):
        return None
    accepted, value = convert(hint, raw)
    if accepted:
        return value
    if isinstance(node, Section) and not is_mapping(hint):
        inner = ", ".join(f"`{path}.{key}`" for key in list(node.children)[:5])
        parse.fail(
            path,
            node,
            f"`{path}` is a single value, not a section",
            expected=type_words(hint),
            got=f"names below it: {inner}" if inner else "an empty section",
            fix=f"write `{path.rpartition('.')[2]}: VALUE` on one line",
        )
    else:
        parse.fail(
            path,
            node,
            f"`{path}` has a value of the wrong type",
            expected=type_words(hint),
            got=describe(raw),
            fix=_number_fix(raw, path, number_means) or type_fix(hint, raw, path),
        )
    return fallback


def _number_fix(raw: Any, path: str, number_means: str) -> str | None:
    """Return how to write a section that was given a bare number, None where it stands for nothing."""
    if not number_means or isinstance(raw, bool) or not isinstance(raw, int | float):
        return None
    return f"write `{path}: {number_means.replace('VALUE', one_line(raw))}`"


def _default(item: dataclasses.Field, defaults: Any) -> Any:
    if defaults is not None:
        return getattr(defaults, item.name)
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def _note_defaults(value: Any, path: str, parse: Parse) -> None:
    if not dataclasses.is_dataclass(value):
        parse.origins[path] = DEFAULT
        return
    for item in dataclasses.fields(value):
        _note_defaults(getattr(value, item.name), f"{path}.{item.name}", parse)


def _placeholder(hint: Any) -> Any:
    return None if optional(hint) else {str: "", int: 1, float: 1.0, bool: False}.get(options(hint)[0])
