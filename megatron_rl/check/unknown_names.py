"""Errors for unknown configuration names, with a suggested key: our name for the setting, or the nearest key.

Every suggestion is tested first: the configuration is parsed and checked with the suggestion in place of the
unknown name. A guess by spelling is dropped if it causes a new error. A name of another project is always
translated; if the value must be translated too, the fix contains the new value.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_rl.algorithms.algorithm import KINDS
from megatron_rl.check.engine.arguments import ENGINE_ARGUMENTS, check_engine_arguments
from megatron_rl.check.installed_source import class_fields
from megatron_rl.check.model.megatron_settings import (
    DDP_CONFIG,
    OPTIMIZER_CONFIG,
    TRANSFORMER_CONFIG,
    check_model_settings,
    check_optimizer,
)
from megatron_rl.check.values import check_algorithm, check_values
from megatron_rl.config.field_types import value_paths
from megatron_rl.config.load import parse_tree
from megatron_rl.config.other_names import (
    FOREIGN_SECTIONS,
    OtherName,
    UnknownName,
    counterpart_in_section,
    find_counterpart,
)
from megatron_rl.config.roles import MODEL_ROLES
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.setting import REMOVED, is_setting
from megatron_rl.config.source import DEFAULT, Leaf, Section, one_line, set_node
from megatron_rl.errors import UserError, nearest

REFERENCE = "docs/configuration.md lists every name"

_ROLE_SECTIONS = (*(spec.section for spec in MODEL_ROLES if not spec.named), "sft", "preference")
"""Sections of roles, which have settings of the same names: for such a name, the actor's key is suggested."""

_FOREIGN_ROLES: Mapping[str, str] = {
    "ref": "reference",
    "reference": "reference",
    "critic": "critic",
    "value": "critic",
}
"""Section of a role in another project's configuration -> the role's section here."""

_GENERIC_NAMES = frozenset({
    "batch_size", "clip", "coef", "data", "enable", "enabled", "every", "gpus", "id", "level", "limit",
    "limits", "method", "mode", "model", "name", "order", "path", "paths", "patience", "samples", "scale",
    "settings", "size", "strategy", "target", "threshold", "timeout", "type", "url", "urls", "weight",
    "weights", "workers",
})  # fmt: skip
"""Names that many sections have with different meanings, so that the name does not identify a section."""

_MIN_MISSPELLED_LETTERS = 6
"""Shortest name, in letters, for which a similar name is searched in other sections."""

_MAX_LISTED = 8
"""Maximum number of names in an unknown section that an error lists."""

_MAX_VALUE_CHARACTERS = 40

_PASS_THROUGH_SECTIONS = (
    ("rollout.vllm", ("rollout", "vllm", "engine", "generation"), (ENGINE_ARGUMENTS,)),
    ("actor.megatron", ("", "actor", "model", "megatron", "policy"), TRANSFORMER_CONFIG),
    ("actor.ddp", ("", "actor", "ddp", "megatron", "policy"), DDP_CONFIG),
    ("actor.optimizer.megatron", ("actor", "optimizer", "optim", "megatron"), OPTIMIZER_CONFIG),
)
"""(key of a pass-through section, sections in which users may write its fields, classes with the fields)."""


def with_suggestions(errors: Iterable[UserError], tree: Section) -> list[UserError]:
    """Replace each `UnknownName` error of the configuration ``tree`` by errors that suggest a known name."""
    new_errors: list[UserError] = []
    for error in errors:
        if isinstance(error, UnknownName):
            new_errors.extend(_suggestion_errors(error, tree))
        else:
            new_errors.append(error)
    return new_errors


@dataclass(frozen=True)
class _UnknownSetting:
    """Setting or section with an unknown name, or a setting in an unknown section.

    Attributes:
        error: Error for the name, from parsing the configuration.
        tree: The complete configuration.
        names: Path of the setting from the root of ``tree``, as a sequence of names.
        path: The same path, joined with dots.
        value: The configured value; a dict for a section.
    """

    error: UnknownName
    tree: Section
    names: tuple[str, ...]
    path: str
    value: Any

    @property
    def location(self) -> str:
        """Return the path of the setting, with the file and line or the override that wrote it."""
        node = _find_node(self.tree, self.names)
        if node is None or node.origin.kind == "default":
            return self.path
        return f"{self.path} ({node.origin})"

    @property
    def kind(self) -> str:
        """Return "section" for a section and "name" for a setting, for error texts."""
        return "section" if isinstance(self.value, dict) else "name"

    def as_error(self, message: str, expected: str, fix: str, got_suffix: str = "") -> UserError:
        """Return an error about this setting.

        ``got_suffix`` is appended to the error's field ``got``, for example ", a name of verl" if the project
        verl uses the unknown name.
        """
        name = self.path
        if name == self.error.path:
            name = self.error.key
        got = f"`{name}: {_format_short_value(self.value)}`{got_suffix}"
        return UserError(message, where=self.location, expected=expected, got=got, fix=fix)


@dataclass(frozen=True)
class _Replacement:
    """Result of testing a suggestion in place of an unknown name.

    Attributes:
        line: The line that the user would write.
        problems: Errors that the suggestion causes.
    """

    line: str
    problems: Sequence[UserError]


def _suggestion_errors(error: UnknownName, tree: Section) -> list[UserError]:
    """Return the errors that replace one `UnknownName` error; they suggest a valid name if there is one."""
    section_names = _split_section_path(tree, error.section)
    setting = _UnknownSetting(error, tree, (*section_names, error.key), error.path, error.value)
    if isinstance(error.value, dict):
        return _unknown_section_errors(setting)
    return [_unknown_setting_error(setting)]


def _unknown_setting_error(setting: _UnknownSetting) -> UserError:
    """Return the error for a setting with an unknown name; suggest a valid name if there is one."""
    if "." in setting.error.key and setting.path in value_paths(RunConfig):
        *sections, name = setting.path.split(".")
        parent_lines = " ".join(f"{section}:" for section in sections)
        return setting.as_error(
            f"`{setting.path}` is written with dots, which join names only on the command line",
            "nested names",
            f"write `{name}: {_format_short_value(setting.value)}` below `{parent_lines}`",
        )

    counterpart = _find_counterpart(setting)
    if counterpart is None:
        similar_name_error = _similar_name_error(setting)
        if similar_name_error is not None:
            return similar_name_error
        return _no_suggestion_error(setting)
    if counterpart.ours is None:
        return _no_suggestion_error(setting, counterpart.reason)
    return _renamed_error(setting, counterpart, counterpart.ours)


def _unknown_section_errors(setting: _UnknownSetting) -> list[UserError]:
    """Return the errors for an unknown section: one for the section, or one for each setting in it."""
    error = setting.error

    # The name of the section may be another project's name for one of our sections (`counterpart.ours`).
    counterpart = _find_counterpart(setting)
    if counterpart is not None:
        if counterpart.ours is None:
            return [_no_suggestion_error(setting, counterpart.reason)]
        if not _try_replacement(setting, counterpart.ours, setting.value).problems:
            return [_renamed_error(setting, counterpart, counterpart.ours)]

    # The name of the section may also be a misspelling.
    similar_name_error = _similar_name_error(setting)
    if similar_name_error is not None:
        return [similar_name_error]

    # Otherwise look at each setting in the section: if a valid key has the same name, suggest this key.
    errors: list[UserError] = []
    unmatched_paths: list[str] = []
    for names, value in _iterate_leaves(setting.value, ()):
        path = ".".join((error.path, *names))
        nested_setting = replace(setting, names=(*setting.names, *names), path=path, value=value)
        nested_error = _nested_error(nested_setting)
        if nested_error is None:
            unmatched_paths.append(path)
        else:
            errors.append(nested_error)
    if errors and not unmatched_paths:
        return errors

    # Report the remaining settings of the section as one error.
    message = f"`{error.path}` is not a known section"
    foreign_section = FOREIGN_SECTIONS.get(error.path)
    if foreign_section is not None:
        message += f"; {foreign_section.project} has it, here it is {foreign_section.name}"
    elif counterpart is not None:
        message += f"; it is called `{counterpart.ours}` here, with other names below it"
    got = ", ".join(f"`{path}`" for path in unmatched_paths[:_MAX_LISTED]) or "an empty section"
    if len(unmatched_paths) > _MAX_LISTED:
        got += " ..."
    errors.append(
        UserError(
            message,
            where=error.where,
            expected=error.expected if error.section else "a section of the configuration",
            got=got,
            fix=f"remove the section; {REFERENCE}",
        )
    )
    return errors


def _nested_error(setting: _UnknownSetting) -> UserError | None:
    """Return the error for a setting in an unknown section; None if no known key has its name.

    The section may be another project's, so names with a similar spelling are not suggested.
    """
    counterpart = _find_counterpart(setting)
    if counterpart is not None:
        if counterpart.ours is None:
            return _no_suggestion_error(setting, counterpart.reason)
        return _renamed_error(setting, counterpart, counterpart.ours)
    candidates = (
        *_pass_through_keys(setting),
        *_find_keys_in_other_sections(setting, include_misspellings=False),
    )
    replacements = _valid_replacements(setting, candidates)
    if not replacements:
        return None
    return _did_you_mean_error(setting, replacements)


def _renamed_error(setting: _UnknownSetting, counterpart: OtherName, our_key: str) -> UserError:
    """Return the error for a setting with another project's name, or with a former name of ours.

    ``our_key`` is the valid key. Its value may have to be converted (`OtherName.conversion`). If the key is a
    setting of an algorithm's component, such as a loss, ``counterpart.piece`` is the name of the component.
    """
    message = f"`{setting.path}` is called `{our_key}` here"
    expected = f"`{our_key}`"
    value = _translate_value(counterpart, setting.value)
    if value == REMOVED:
        message += f", and {_format_short_value(setting.value)} has no effect"
        return setting.as_error(message, "no line", "remove the line", counterpart.origin_suffix)

    replacement = _try_replacement(setting, our_key, value, counterpart.piece)

    # A file may contain both the unknown name and our key. Find the value of our key, since a second line
    # with the key would contradict it. If the unknown name is in an override on the command line, there is no
    # contradiction: an override replaces the value in the file.
    current_value = None
    if not setting.error.overrides:
        current_value = _find_written_value(setting, our_key)

    # The fix is a line to write, or the reason why no line is needed.
    if counterpart.conversion and value is setting.value:
        fix = f"write `{our_key}` ({counterpart.conversion})"
    elif current_value is not None and current_value == value:
        fix = f"remove the line: `{our_key}` is {_format_short_value(current_value)} already"
    elif current_value is not None:
        line = f"{our_key}: {_format_short_value(value)}"
        fix = f"write `{line}` instead of {_format_short_value(current_value)}, or remove the line"
    elif replacement.problems:
        problem = replacement.problems[0]
        fix = f"write `{our_key}`, and correct it: {problem.message}, expected {problem.expected}"
    else:
        fix = f"write `{replacement.line}`"
    return setting.as_error(message, expected, fix, counterpart.origin_suffix)


def _similar_name_error(setting: _UnknownSetting) -> UserError | None:
    """Return the error for a misspelled name or a name in the wrong section.

    Returns None if no valid key has a similar name.
    """
    # Search the same section first, then other sections, then the fields of vLLM and Megatron.
    for find_candidates in (_similar_keys_in_section, _find_keys_in_other_sections, _pass_through_keys):
        replacements = _valid_replacements(setting, find_candidates(setting))
        if replacements:
            return _did_you_mean_error(setting, replacements)

    # The loop above suggests every field of vLLM or Megatron that a user can set. If vLLM or Megatron has a
    # field of this name that the loop did not suggest, the field is refused. Validate the field again to get
    # the reason for the error message.
    for key in _pass_through_keys(setting):
        first_problem = _try_replacement(setting, key, setting.value).problems[0]
        return _no_suggestion_error(setting, first_problem.message)
    return None


def _valid_replacements(setting: _UnknownSetting, candidates: Iterable[str]) -> dict[str, _Replacement]:
    """Return the ``candidates`` for an unknown name that cause no new error: key -> replacement."""
    replacements: dict[str, _Replacement] = {}
    for key in candidates:
        replacement = _try_replacement(setting, key, setting.value)
        if not replacement.problems:
            replacements[key] = replacement
    return replacements


def _did_you_mean_error(setting: _UnknownSetting, replacements: Mapping[str, _Replacement]) -> UserError:
    """Return the error that suggests valid keys for an unknown name.

    ``replacements`` maps each suggested key to a `_Replacement`, which contains the line to write.
    """
    suggestions = " or ".join(f"`{key}`" for key in replacements)
    fix = f"write {suggestions}, whichever is intended"
    if len(replacements) == 1:
        (replacement,) = replacements.values()
        fix = f"write `{replacement.line}`, or remove the line"

    # In a known section, the parsing error (`setting.error`) lists the valid keys of the section.
    expected = f"a {setting.kind} of the configuration"
    if setting.error.section:
        expected = setting.error.expected or ""
    message = f"`{setting.path}` is not a known {setting.kind}; did you mean {suggestions}?"
    return setting.as_error(message, expected, fix)


def _no_suggestion_error(setting: _UnknownSetting, reason: str = "") -> UserError:
    """Return the error for an unknown name for which no valid name can be suggested.

    ``reason`` explains why this project has no such setting. It is empty if the reason is not known.
    """
    # Without a reason, a key for the same purpose may still exist: point to the list of all keys.
    message = f"`{setting.path}` is not a known {setting.kind}"
    fix = f"remove the line; {REFERENCE}"
    if reason:
        message += f": there is no setting for it; {reason}"
        fix = "remove the line"

    expected = "a name of the configuration"
    if setting.error.section and setting.error.expected:
        expected = setting.error.expected
    return setting.as_error(message, expected, fix)


def _find_counterpart(setting: _UnknownSetting) -> OtherName | None:
    """Return our key for a name of another project, or None if no project is known to use the name.

    Several keys may correspond to one name. A key in the section in which the user wrote the name is
    preferred, then a key of the role that the name belongs to in the other project.
    """
    counterpart = find_counterpart(setting.path) or _find_key_at_end(setting.path)
    if counterpart is None or counterpart.ours is None:
        return counterpart

    # Prefer the counterpart in our section that contains the unknown name.
    section_counterpart = counterpart_in_section(
        setting.path, setting.error.section, setting.error.section_keys
    )
    if section_counterpart is not None:
        return section_counterpart

    # The path may contain another project's name of a role, such as ``ref`` for the reference model. Then
    # prefer the key of that role to the actor's key.
    section, _, our_setting = counterpart.ours.partition(".")
    for name in setting.path.split("."):
        key = f"{_FOREIGN_ROLES.get(name)}.{our_setting}"
        if section == "actor" and key in value_paths(RunConfig):
            return replace(counterpart, ours=key)
    return counterpart


def _find_key_at_end(path: str) -> OtherName | None:
    """Find the longest valid key at the end of a path, such as `rollout.top_k` for `x.rollout.top_k`.

    Returns the key as an `OtherName`, the record that maps an unknown name to a key of this package. The
    record's project is "common", since the name belongs to no particular project. Returns None if no valid
    key is at the end of the path.
    """
    keys = set(value_paths(RunConfig))
    names = path.split(".")
    for start in range(1, len(names) - 1):
        suffix = ".".join(names[start:])
        if suffix in keys:
            return OtherName("common", suffix)
    return None


def _similar_keys_in_section(setting: _UnknownSetting) -> list[str]:
    """Return the valid key that is most similar to the unknown name.

    Only keys in the section of the unknown name are compared. The result is a list with one key, or an empty
    list if no key is similar.
    """
    # `section_keys` are the valid keys of the section, such as ``layout.tensor`` in the section ``actor``.
    section = setting.error.section
    names_in_section = {key.partition(".")[0] for key in setting.error.section_keys}
    nearest_name = nearest(setting.error.key, names_in_section)
    if nearest_name is None:
        return []
    if section:
        return [f"{section}.{nearest_name}"]
    return [nearest_name]


def _find_keys_in_other_sections(setting: _UnknownSetting, *, include_misspellings: bool = True) -> list[str]:
    """Return the keys in other sections that have the name of a setting.

    If several roles have the setting, only the actor's key is returned. With ``include_misspellings``, keys
    with a similar name are returned if no key has the exact name.
    """
    name = setting.names[-1]
    if name.lower() in _GENERIC_NAMES or isinstance(setting.value, dict):
        return []

    # Exact names take precedence over misspellings.
    keys_by_name: dict[str, list[str]] = {}
    for path in (*value_paths(RunConfig), *algorithm_piece_keys()):
        keys_by_name.setdefault(path.rpartition(".")[2], []).append(path)
    matching_name = None
    if name in keys_by_name:
        matching_name = name
    elif include_misspellings and len(name) >= _MIN_MISSPELLED_LETTERS:
        matching_name = nearest(name, keys_by_name)
    if matching_name is None or matching_name in _GENERIC_NAMES:
        return []

    # For a key of several roles, suggest the actor's; otherwise the key nearest to the root.
    keys = keys_by_name[matching_name]
    if all(key.partition(".")[0] in _ROLE_SECTIONS for key in keys):
        actor_keys = [key for key in keys if key.startswith("actor.")]
        return actor_keys[:1] or keys[:1]
    min_depth = min(key.count(".") for key in keys)
    return [key for key in keys if key.count(".") == min_depth]


def algorithm_piece_keys() -> list[str]:
    """Return the key of every setting of an algorithm's named pieces (its loss and other components)."""
    keys: list[str] = []
    for section, kind in KINDS.items():
        for piece_class in kind.named.values():
            for piece_field in fields(piece_class):
                if is_setting(piece_field):
                    keys.append(f"algorithm.{section}.{piece_field.name}")

    # Several named pieces may have the same class: drop repeated keys.
    return list(dict.fromkeys(keys))


def _pass_through_keys(setting: _UnknownSetting) -> Iterator[str]:
    """Yield the key that passes the setting to vLLM or Megatron, such as ``rollout.vllm.NAME``.

    Yields nothing if the installed version of vLLM or Megatron has no field with the setting's name.
    """
    # A name of one word, such as `model`, is too common to identify a field.
    name = setting.names[-1]
    if "_" not in name:
        return

    sections = set(setting.path.split(".")[:-1]) or {""}
    for key, likely_sections, classes in _PASS_THROUGH_SECTIONS:
        if sections & set(likely_sections) and name in (class_fields(*classes) or {}):
            yield f"{key}.{name}"
            return


def _translate_value(counterpart: OtherName, value: Any) -> Any:
    """Translate another project's value to ours; return a value without a translation unchanged."""
    for their_value, our_value in counterpart.values.items():
        if isinstance(their_value, bool) == isinstance(value, bool) and their_value == value:  # True == 1
            return our_value
    return value


def _try_replacement(setting: _UnknownSetting, key: str, value: Any, piece: str = "") -> _Replacement:
    """Check the configuration with ``key: value`` in place of the unknown name.

    If the configured piece of the algorithm (such as its loss) lacks the setting, the replacement also
    selects the ``piece`` that has it.
    """
    # Errors that the configuration has without the unknown name do not count against the suggestion.
    tree_without_name = copy.deepcopy(setting.tree)
    _remove_name(tree_without_name, setting.names)
    errors_before = {str(error) for error in _configuration_errors(tree_without_name, key)}

    parent, _, _ = key.rpartition(".")
    parent_names = parent.split(".")

    # `policy_loss: gspo` is short for a section. With a setting below it, suggest the expanded section.
    shows_section = bool(parent) and isinstance(_find_node(tree_without_name, parent_names), Leaf)
    new_tree = copy.deepcopy(tree_without_name)
    set_node(new_tree, key.split("."), _to_node(value))
    problems = [error for error in _configuration_errors(new_tree, key) if str(error) not in errors_before]
    if problems and piece:
        set_node(new_tree, parent_names, Section({"name": Leaf(piece, DEFAULT)}))
        set_node(new_tree, key.split("."), _to_node(value))
        problems = [
            error for error in _configuration_errors(new_tree, key) if str(error) not in errors_before
        ]
        shows_section = True

    # If the value stays the same, suggest only the key.
    line = key
    if value is not setting.value:
        line = f"{key}: {one_line(value)}"
    section = _find_node(new_tree, parent_names)
    if shows_section and isinstance(section, Section):
        line = f"{parent}: {one_line(section.plain())}"
    return _Replacement(line, problems)


def _configuration_errors(tree: Section, key: str) -> list[UserError]:
    """Return the errors of parsing a configuration, and of the rules on ``key`` that need no files."""
    errors: list[UserError] = []
    config, _ = parse_tree(tree, errors)
    errors.extend(check_values(config))

    # Also apply the rules on the section of the key, which may refuse its value.
    if key.startswith("algorithm"):
        errors.extend(check_algorithm(config)[1])
    if key.startswith("rollout.vllm"):
        errors.extend(check_engine_arguments(config.rollout.vllm))
    if key.startswith("actor.megatron"):
        errors.extend(check_model_settings(config.actor.megatron))
    if key.startswith(("actor.optimizer", "actor.ddp")):
        errors.extend(check_optimizer(config.actor.optimizer, "actor.optimizer", config.actor.ddp))
    return errors


def _find_written_value(setting: _UnknownSetting, key: str) -> Any:
    """Return the value that the user configured for a key, or None for an unset key or a section."""
    node = _find_node(setting.tree, key.split("."))
    if isinstance(node, Leaf):
        return node.value
    return None


def _find_node(tree: Section, names: Sequence[str]) -> Leaf | Section | None:
    """Return the node of the configuration at the path ``names``, or None if the path does not exist."""
    node: Leaf | Section | None = tree
    for name in names:
        if not isinstance(node, Section):
            return None
        node = node.children.get(name)
    return node


def _remove_name(tree: Section, names: Sequence[str]) -> None:
    """Remove the node at the path ``names`` from a configuration, and parent sections that become empty."""
    section = _find_node(tree, names[:-1])
    if isinstance(section, Section):
        section.children.pop(names[-1], None)
        if not section.children and len(names) > 1:
            _remove_name(tree, names[:-1])


def _split_section_path(tree: Section, path: str) -> list[str]:
    """Split the path of a section into names; a name that the user chose may itself contain dots."""
    if not path:
        return []
    for name, node in tree.children.items():
        if path == name:
            return [name]
        if path.startswith(f"{name}.") and isinstance(node, Section):
            return [name, *_split_section_path(node, path.removeprefix(f"{name}."))]
    return path.split(".")


def _iterate_leaves(
    section: Mapping[str, Any],
    parent_names: tuple[str, ...],
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path (a tuple of names) and the value of each leaf of nested mappings."""
    for name, value in section.items():
        names = (*parent_names, name)
        if isinstance(value, dict):
            yield from _iterate_leaves(value, names)
        else:
            yield names, value


def _to_node(value: Any) -> Leaf | Section:
    """Convert a plain value to a node of the configuration's tree: mappings to sections, others to leaves."""
    if isinstance(value, dict):
        return Section({name: _to_node(nested_value) for name, nested_value in value.items()})
    return Leaf(value, DEFAULT)


def _format_short_value(value: Any) -> str:
    """Format a value as YAML on one line, cut after `_MAX_VALUE_CHARACTERS`."""
    text = "null"
    if value is not None:
        text = one_line(value)
    if len(text) <= _MAX_VALUE_CHARACTERS:
        return text
    return text[: _MAX_VALUE_CHARACTERS - 3] + "..."
