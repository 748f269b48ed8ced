"""Conversion of a tree of plain values to typed, frozen dataclasses.

A mistake never stops the conversion. An invalid value is recorded with its origin and replaced by its
default, so that one pass finds every mistake of a configuration.
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
        """Record an error, and mark the value at ``path`` as broken: it is replaced by a default."""
        self.record_error(path, node, message, **fields)
        self.broken.add(path)

    def record_error(
        self, path: str, node: Leaf | Section | None, message: str, **fields: str | None
    ) -> None:
        """Record an error about a node without replacing its value.

        ``fields`` are ``expected``, ``got`` and ``fix`` of the `UserError`.
        """
        self.errors.append(UserError(message, where=self.location_text(path, node), **fields))

    def location_text(self, path: str, node: Leaf | Section | None) -> str:
        """Return the path followed by the file or override that set it, for an error's ``where``."""
        if node is None or node.origin.kind == "default":
            return path
        return f"{path} ({node.origin})"


def parse_section(
    cls: type, section: Section, state: ParseState, path: str = "", defaults: Any = None
) -> Any:
    """Convert the section at ``path`` to an instance of ``cls``; invalid values are replaced by defaults.

    Errors and the origin of each value are recorded in ``state``. Missing keys get their values from
    ``defaults``, an instance of ``cls``. Without ``defaults``, they get the defaults of the class.
    """
    settings = {item.name: item for item in dataclasses.fields(cls) if is_setting(item)}

    # Report unknown names first: a misspelled name explains a missing key.
    section = _collect_unknown_names(settings, section)
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
        if node is None and is_required and setting_of(item).alternative_key not in section.children:
            node = _record_missing_key(item, hint, key, path, state)
        # The section that the error suggests if the user wrote a bare number instead of a section.
        section_for_number = setting_of(item).section_for_number
        values[name] = _typed_value(hint, node, default, key, state, section_for_number)
    return cls(**values)


def _record_missing_key(
    item: dataclasses.Field, hint: Any, key: str, path: str, state: ParseState
) -> Section | None:
    """Record the error for a missing required key, and return the node to parse in place of its value.

    The node is an empty section if the key is a section, else None. ``item`` is the field of the key,
    ``hint`` its type, and ``path`` the path of the section that lacks the key.
    """
    if section_class(hint) is not None and key not in state.broken:
        # Parsing an empty section reports each of its required keys.
        return Section()

    # Do not report a missing key in an invalid section, which already has an error.
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
    """Convert ``settings``, the section at ``path``, to an instance of a user's dataclass.

    See `parse_section`. Raises UserErrors; exceptions of the class itself are not caught.
    """
    # The settings have no origins here, so errors name the key of their section.
    state = ParseState()
    section = Section({name: Leaf(value, DEFAULT) for name, value in settings.items()})
    instance = parse_section(cls, section, state, path, defaults)
    if state.errors:
        raise UserErrors(state.errors)
    return instance


def _collect_unknown_names(settings: dict[str, dataclasses.Field], section: Section) -> Section:
    """Return a section with its unknown names moved into the key that collects them, if it has such a key.

    ``settings`` maps the keys of the section to their fields; `Setting.collects_unknown_names` is true for
    the collecting key. Example: ``environment: {name: my_env.py:Calculator, digits: 3}`` becomes
    ``environment: {name: my_env.py:Calculator, settings: {digits: 3}}``.
    """
    collecting_keys = [name for name, item in settings.items() if setting_of(item).collects_unknown_names]
    unknown_children = {key: node for key, node in section.children.items() if key not in settings}
    if not collecting_keys or not unknown_children:
        return section

    # The configuration may also write the collecting key itself.
    collecting_key = collecting_keys[0]
    explicit_section = section.children.get(collecting_key)
    explicit_children: dict[str, Leaf | Section] = {}
    if isinstance(explicit_section, Section):
        explicit_children = explicit_section.children

    children = {key: node for key, node in section.children.items() if key in settings}
    children[collecting_key] = Section(explicit_children | unknown_children, section.origin)
    return Section(children, section.origin)


def _restores_default(node: Leaf | Section | None) -> bool:
    """Return whether a node is a null that replaces an earlier value, and so restores the default."""
    return isinstance(node, Leaf) and node.unsets


def _typed_value(
    hint: Any,
    node: Leaf | Section | None,
    default: Any,
    path: str,
    state: ParseState,
    section_for_number: str = "",
) -> Any:
    """Convert ``node``, the value of the key at ``path``, to type ``hint``.

    The value may be a section, a mapping of names to sections, or any other value, such as a number. If the
    configuration omits the key, pass None as ``node``: the function returns ``default``, which is
    dataclasses.MISSING for a required key. If the user writes a bare number in place of a section, the error
    suggests ``section_for_number``, such as ``{name: loss, coef: VALUE}``; it is empty for most keys.
    """
    named_section_cls = entry_class(hint)
    if named_section_cls is not None and isinstance(node, Section) and node.children:
        named_sections = {}
        for name, child in node.children.items():
            # `NAME: null` removes a section of the base file.
            if not _restores_default(child):
                named_sections[name] = _typed_value(
                    named_section_cls, child, dataclasses.MISSING, f"{path}.{name}", state
                )
        return named_sections

    section_cls = section_class(hint)
    if section_cls is None:
        return _plain_value(hint, node, default, path, state, section_for_number)
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
            # Continue with the defaults, so that later rules can read a complete configuration.
            _record_single_value(section_cls, node, path, state)
            node = Section()
    defaults = None if default is dataclasses.MISSING else default
    return parse_section(section_cls, node, state, path, defaults)


def _record_single_value(cls: type, node: Leaf, path: str, state: ParseState) -> None:
    """Record the error for a single value where a section of class ``cls`` is expected."""
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
    """Return the fix for a single value where a section of class ``cls`` is expected.

    If the class has a ``VALUE_KEY`` that accepts the value, the fix writes the value under that key, such as
    ``reward: {function: my.py:f}`` for ``reward: my.py:f``.
    """
    key = getattr(cls, "VALUE_KEY", None)
    if key is not None:
        accepted, typed_value = convert_value(field_hints(cls)[key], value)
        fields_by_name = {item.name: item for item in dataclasses.fields(cls)}
        if accepted and setting_of(fields_by_name[key]).value_error(f"{path}.{key}", typed_value) is None:
            return f"write `{path}: {one_line({key: value})}`"

    name = path.rpartition(".")[2]
    return f"write names below `{name}:`, or {path}.NAME=VALUE"


def _plain_value(
    hint: Any,
    node: Leaf | Section | None,
    default: Any,
    path: str,
    state: ParseState,
    section_for_number: str,
) -> Any:
    """Convert ``node``, the value of a key that has no section class, to type ``hint``.

    If the configuration omits the key, pass None as ``node``: the function returns ``default``. If the key is
    required, ``default`` is dataclasses.MISSING and the function returns a placeholder. If the value has the
    wrong type, the function records an error in ``state`` and returns the default or the placeholder.

    If the user writes a bare number in place of a mapping, the error suggests ``section_for_number``, such as
    ``{name: loss, coef: VALUE}``; it is empty for most keys.
    """
    fallback = _placeholder(hint) if default is dataclasses.MISSING else default
    if node is None:
        state.origins[path] = DEFAULT
        return fallback

    # Record the origin of an invalid value, too: `check` prints the line that contains it.
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
            fix=_number_fix(raw, path, section_for_number) or type_fix(hint, raw, path),
        )
    return fallback


def _number_fix(raw: Any, path: str, section_for_number: str) -> str | None:
    """Return the fix for a bare number where a section is expected, or None if the value is not a number.

    ``section_for_number`` is the key's `Setting.section_for_number`: the section to suggest, with ``VALUE``
    in place of the number.
    """
    if not section_for_number or isinstance(raw, bool) or not isinstance(raw, int | float):
        return None
    section = section_for_number.replace("VALUE", one_line(raw))
    return f"write `{path}: {section}`"


def _field_default(item: dataclasses.Field, defaults: Any) -> Any:
    """Return the default of a field: its value in ``defaults`` if given, else the default in the class."""
    if defaults is not None:
        return getattr(defaults, item.name)
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def _record_default_origins(value: Any, path: str, state: ParseState) -> None:
    """Record that ``value``, the value of the key at ``path``, is a default: the configuration omits the key.

    If ``value`` is a section, record the same for every key below it.
    """
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
