"""Conversion of a tree of plain values to typed, frozen dataclasses.

The one idea: a mistake never stops the conversion. An invalid value is recorded with its origin and replaced
by its default, so that one pass finds every mistake of a configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.field_types import (
    accepts_mapping,
    accepts_none,
    convert_value,
    entry_class,
    field_hints,
    section_class,
    type_fix,
    type_text,
    union_members,
    value_paths,
)
from megatron_rl.config.other_names import record_unknown_name
from megatron_rl.config.schema import TRAIN
from megatron_rl.config.setting import is_setting, key_path, setting_of
from megatron_rl.config.source import (
    DEFAULT,
    Leaf,
    Origin,
    Section,
    describe_value,
    expand_short_form,
    one_line,
)
from megatron_rl.errors import UserError, UserErrors


@dataclass
class ParseState:
    """State of the conversion of one configuration: its mistakes, and the origin of each value."""

    job: str = TRAIN
    """Job of the configuration, which decides the keys that are required."""
    errors: list[UserError] = field(default_factory=list)
    """Mistakes in the order in which they were found."""
    origins: dict[str, Origin] = field(default_factory=dict)
    """Dotted path of each value -> its origin."""
    broken: set[str] = field(default_factory=set)
    """Paths whose value is a placeholder or a default because of a mistake."""

    def record_broken_value(
        self, path: str, node: Leaf | Section | None, message: str, **fields: str | None
    ) -> None:
        """Record a mistake, and mark the value at ``path`` as broken: it is replaced by a default."""
        self.record_error(path, node, message, **fields)
        self.broken.add(path)

    def record_error(
        self, path: str, node: Leaf | Section | None, message: str, **fields: str | None
    ) -> None:
        """Record an error about a node whose value is kept; ``fields`` are those of `UserError`."""
        self.errors.append(UserError(message, where=self.location_text(path, node), **fields))

    def location_text(self, path: str, node: Leaf | Section | None) -> str:
        """Return the path followed by the file or override that set it, for an error's ``where``."""
        if node is None or node.origin.kind == "default":
            return path
        return f"{path} ({node.origin})"


def parse_section(
    cls: type, section: Section, state: ParseState, path: str = "", defaults: Any = None
) -> Any:
    """Return an instance of ``cls`` made from the section at ``path``; invalid values get their default.

    Mistakes, and the origin of each value, are recorded in ``state``.

    ``defaults`` is the default of the enclosing section's field, which may differ from the class's defaults:
    its values are used for the keys that ``section`` does not have.
    """
    settings = {item.name: item for item in dataclasses.fields(cls) if is_setting(item)}

    # Report unknown names first: a misspelled name explains a missing key.
    section = _collect_rest(settings, section)
    for key, node in section.children.items():
        if key not in settings:
            known_paths = [name for name in value_paths(cls) if name.partition(".")[0] in settings]
            record_unknown_name(key, node, path, known_paths, state)

    # Fields that no configuration can set are copied from the defaults.
    values: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        if not is_setting(item):
            values[item.name] = _field_default(item, defaults)
    for name, item in settings.items():
        key = key_path(path, name)
        hint = field_hints(cls)[name]
        default = _field_default(item, defaults)
        node = section.children.get(name)

        # `null` in place of a value restores the default, unless None is a valid value of the key.
        if default is not dataclasses.MISSING and not accepts_none(hint) and _restores_default(node):
            node = None

        is_required = default is dataclasses.MISSING or bool(setting_of(item).jobs)
        if node is None and is_required and setting_of(item).instead not in section.children:
            node = _record_missing_key(item, hint, key, path, state)
        values[name] = _typed_value(hint, node, default, key, state, setting_of(item).number_means)
    return cls(**values)


def _record_missing_key(
    item: dataclasses.Field, hint: Any, key: str, path: str, state: ParseState
) -> Section | None:
    """Record the error for a required key that is missing; return the node to parse in its place.

    The node is an empty section for the key of a section, else None. ``item`` is the field of the key,
    ``hint`` its type, and ``path`` the path of the section around it.
    """
    if section_class(hint) is not None and key not in state.broken:
        # An empty section makes the errors name each of its required keys.
        return Section()

    # In an invalid section, a missing key would be a second error for one mistake.
    jobs = setting_of(item).jobs
    if path not in state.broken and (not jobs or state.job in jobs):
        state.record_broken_value(
            key,
            None,
            f"`{key}` is missing",
            expected=type_text(hint),
            got="nothing",
            fix=f"add it to the file, or on the command line {key}={setting_of(item).example}",
        )
    return None


def parse_settings(cls: type, settings: Mapping[str, Any], path: str, defaults: Any = None) -> Any:
    """Return an instance of a user's own class made from ``settings`` at ``path``; see `parse_section`.

    Raises UserErrors. Any other exception of the class itself passes through.
    """
    # The settings have no origins here, so errors name the key of their section.
    state = ParseState()
    section = Section({name: Leaf(value, DEFAULT) for name, value in settings.items()})
    instance = parse_section(cls, section, state, path, defaults)
    if state.errors:
        raise UserErrors(state.errors)
    return instance


def _collect_rest(settings: dict[str, dataclasses.Field], section: Section) -> Section:
    """Move names that are not keys of a section into the key that collects them; return the new section.

    ``settings`` maps the keys of the section to their fields. ``environment: {name: my_env.py:Calculator,
    digits: 3}`` thus gives ``digits`` to the user's class.
    """
    rest_key = next((name for name, item in settings.items() if setting_of(item).takes_rest), None)
    rest = {key: node for key, node in section.children.items() if key not in settings}
    if rest_key is None or not rest:
        return section

    # The configuration may also write the key itself.
    explicit_section = section.children.get(rest_key)
    explicit: dict[str, Leaf | Section] = {}
    if isinstance(explicit_section, Section):
        explicit = explicit_section.children
    children = {key: node for key, node in section.children.items() if key in settings}
    children[rest_key] = Section(explicit | rest, section.origin)
    return Section(children, section.origin)


def _restores_default(node: Leaf | Section | None) -> bool:
    """Return whether a node is a null that replaces a value of the base or of the file."""
    return isinstance(node, Leaf) and node.unsets


def _typed_value(
    hint: Any, node: Leaf | Section | None, default: Any, path: str, state: ParseState, number_means: str = ""
) -> Any:
    """Return the value of type ``hint`` of the key at ``path``: a mapping of sections, a section or a value.

    ``node`` is None for a key that is not written. ``default`` is dataclasses.MISSING for a key without one.
    ``number_means`` is that of the key's `Setting`, for the fix of a bare number.
    """
    entry = entry_class(hint)
    if entry is not None and isinstance(node, Section) and node.children:
        entries = {}
        for name, child in node.children.items():
            # `NAME: null` removes an entry of the base.
            if not _restores_default(child):
                entries[name] = _typed_value(entry, child, dataclasses.MISSING, f"{path}.{name}", state)
        return entries

    section = section_class(hint)
    if section is None:
        return _plain_value(hint, node, default, path, state, number_means)
    if node is None:
        _record_default_origins(default, path, state)
        return default

    # Expand a section that is written as text, such as `policy_loss: gspo`.
    node = expand_short_form(node, path.split(".")) or node
    if isinstance(node, Leaf):
        is_null = node.value is None or node.value == "None"
        if is_null and accepts_none(hint):
            state.origins[path] = node.origin
            return None
        if is_null:
            node = Section(origin=node.origin)
        else:
            # Use the defaults, so that later rules have a complete configuration.
            _record_single_value(section, node, path, state)
            node = Section()
    defaults = None if default is dataclasses.MISSING else default
    return parse_section(section, node, state, path, defaults)


def _record_single_value(cls: type, node: Leaf, path: str, state: ParseState) -> None:
    """Record the mistake of a single value in place of a section, whose class is ``cls``."""
    names = ", ".join(item.name for item in dataclasses.fields(cls) if is_setting(item))
    state.record_broken_value(
        path,
        node,
        f"`{path}` is a section, not a single value",
        expected=f"a section with {names}",
        got=describe_value(node.value),
        fix=_section_fix(cls, node.value, path),
    )


def _section_fix(cls: type, value: Any, path: str) -> str:
    """Return the fix for a single value in place of a section: the value below the section's usual key.

    ``reward: my.py:f`` should be ``reward: {function: my.py:f}``, where the usual key of the class ``cls``
    accepts the value.
    """
    key = getattr(cls, "VALUE_KEY", None)
    if key is not None:
        accepted, typed = convert_value(field_hints(cls)[key], value)
        item = next(item for item in dataclasses.fields(cls) if item.name == key)
        if accepted and setting_of(item).value_error(f"{path}.{key}", typed) is None:
            return f"write `{path}: {one_line({key: value})}`"

    name = path.rpartition(".")[2]
    return f"write names below `{name}:`, or {path}.NAME=VALUE"


def _plain_value(
    hint: Any, node: Leaf | Section | None, default: Any, path: str, state: ParseState, number_means: str
) -> Any:
    """Return the typed value of a key that is not a section; the arguments are those of `_typed_value`."""
    fallback = _placeholder(hint) if default is dataclasses.MISSING else default
    if node is None:
        state.origins[path] = DEFAULT
        return fallback

    # Record the origin of an invalid value too: `check` prints the line that wrote it.
    state.origins[path] = node.origin
    raw = node.plain()
    # Accept Python's None for YAML's null.
    if raw == "None" and accepts_none(hint):
        return None
    accepted, value = convert_value(hint, raw)
    if accepted:
        return value

    if isinstance(node, Section) and not accepts_mapping(hint):
        name = path.rpartition(".")[2]
        inner_names = ", ".join(f"`{path}.{key}`" for key in list(node.children)[:5])
        state.record_broken_value(
            path,
            node,
            f"`{path}` is a single value, not a section",
            expected=type_text(hint),
            got=f"names below it: {inner_names}" if inner_names else "an empty section",
            fix=f"write `{name}: VALUE` on one line",
        )
    else:
        state.record_broken_value(
            path,
            node,
            f"`{path}` has a value of the wrong type",
            expected=type_text(hint),
            got=describe_value(raw),
            fix=_number_fix(raw, path, number_means) or type_fix(hint, raw, path),
        )
    return fallback


def _number_fix(raw: Any, path: str, number_means: str) -> str | None:
    """Return the fix for a bare number in place of a section, or None for any other value.

    ``number_means`` is the section to write instead, see `Setting.number_means`.
    """
    if not number_means or isinstance(raw, bool) or not isinstance(raw, int | float):
        return None
    section = number_means.replace("VALUE", one_line(raw))
    return f"write `{path}: {section}`"


def _field_default(item: dataclasses.Field, defaults: Any) -> Any:
    """Return the default of a field: its value in ``defaults`` if given, else that of its class."""
    if defaults is not None:
        return getattr(defaults, item.name)
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def _record_default_origins(value: Any, path: str, state: ParseState) -> None:
    """Record the origin of every value of a section that is not written at all."""
    if not dataclasses.is_dataclass(value):
        state.origins[path] = DEFAULT
        return
    for item in dataclasses.fields(value):
        _record_default_origins(getattr(value, item.name), f"{path}.{item.name}", state)


def _placeholder(hint: Any) -> Any:
    """Return a placeholder of the right type for a missing required key, so that later rules can read it."""
    if accepts_none(hint):
        return None
    first_type = union_members(hint)[0]
    return {str: "", int: 1, float: 1.0, bool: False}.get(first_type)
