"""Sampling profiles by name, from the configuration or registered by Python code.

The name of a profile is replaced by the profile's settings before the configuration is parsed. So all other
code reads plain values, and a saved configuration does not depend on the user's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.config.sections.rollout import profile_fields
from megatron_rl.config.source import Leaf, Origin, Section
from megatron_rl.errors import UserError, UserErrors, nearest
from megatron_rl.user_code import import_user_module

_KEY = "rollout.sampling_profile"

_registered_profiles: dict[str, dict[str, Any]] = {}
"""Name -> settings of each profile that was registered in this process."""


def sampling_profile(name: str, **settings: Any) -> dict[str, Any]:
    """Register a sampling profile under a name, and return its settings.

    ``settings`` are the same as for a profile in `rollout.sampling_profiles`. Configurations that are loaded
    afterwards can name the profile in `rollout.sampling_profile`, in `rollout.sampling_profiles`, as the
    `profile` of a source in `data.sources`, and as the task of a record. A profile of the same name in the
    configuration has precedence. Raises UserErrors for unknown settings.

    Example:
        >>> sampling_profile("careful", temperature=0.7, top_p=0.95)
        {'temperature': 0.7, 'top_p': 0.95}
    """
    setting_names = list(profile_fields())
    errors = []
    for setting in settings:
        if setting not in setting_names:
            suggestion = nearest(setting, setting_names)
            errors.append(
                UserError(
                    f"a sampling profile has no setting {setting!r}",
                    where=f"megatron_rl.sampling_profile({name!r})",
                    expected=f"one of {', '.join(setting_names)}",
                    got=setting,
                    fix=f"write {suggestion}" if suggestion else "remove it",
                )
            )
    if errors:
        raise UserErrors(errors)

    _registered_profiles[name] = dict(settings)
    return dict(settings)


def resolve_profile_names(tree: Section, errors: list[UserError]) -> None:
    """Replace the names of sampling profiles in a configuration's rollout section by the profiles' settings.

    The settings of the profile that `rollout.sampling_profile` names replace values of the rollout section,
    except for command-line overrides. A name as a value in `rollout.sampling_profiles`, such as
    ``math: careful``, is replaced by the profile's settings. Registered profiles are added to
    `rollout.sampling_profiles`.

    Names in `data.sources.NAME.profile` are validated and not replaced. If such a name is written as
    ``file.py:NAME``, it is shortened to ``NAME``. Errors are appended to ``errors``.
    """
    source_profiles = _source_profiles(tree)
    if _registered_profiles or source_profiles:
        # Add a missing rollout section, since the profiles are stored in it.
        node = tree.children.get("rollout")
        if node is None or (isinstance(node, Leaf) and node.value is None):
            tree.children["rollout"] = Section()
    rollout = tree.children.get("rollout")
    leaves_by_key = _profile_name_leaves(rollout) | source_profiles
    if not isinstance(rollout, Section) or (not leaves_by_key and not _registered_profiles):
        return

    # A name may be written as `file.py:NAME`. Import the file first: its code registers the profile.
    for key, leaf in leaves_by_key.items():
        user_file, _, _ = leaf.value.rpartition(":")
        if user_file:
            try:
                import_user_module(user_file, key)
            except UserErrors as raised:
                errors += raised.errors
            except UserError as error:
                errors.append(error)

    profiles = _add_registered_profiles(rollout)
    run_profile = rollout.children.pop("sampling_profile", None)
    profile_sections = {name: node for name, node in profiles.children.items() if isinstance(node, Section)}
    for name, node in profiles.children.items():
        key = f"rollout.sampling_profiles.{name}"
        if key in leaves_by_key:
            assert isinstance(node, Leaf)
            profiles.children[name] = _find_profile(node, key, profile_sections, errors)

    # Validate the names in `data.sources`. They are not replaced, since several sources may name one profile.
    resolved_profiles = {name: node for name, node in profiles.children.items() if isinstance(node, Section)}
    for key, leaf in source_profiles.items():
        _find_profile(leaf, key, resolved_profiles, errors)
        _, _, leaf.value = leaf.value.rpartition(":")

    if isinstance(run_profile, Leaf) and _KEY in leaves_by_key:
        profile = _find_profile(run_profile, _KEY, profile_sections, errors)
        for setting, node in profile.children.items():
            # A command-line override has precedence over the profile.
            existing_node = rollout.children.get(setting)
            if existing_node is None or not _is_override(existing_node):
                rollout.children[setting] = node
    elif run_profile is not None:
        rollout.children["sampling_profile"] = run_profile


def _profile_name_leaves(rollout: Any) -> dict[str, Leaf]:
    """Map the key of each rollout setting that names a sampling profile to its leaf."""
    if not isinstance(rollout, Section):
        return {}

    nodes = {_KEY: rollout.children.get("sampling_profile")}
    profiles = rollout.children.get("sampling_profiles")
    if isinstance(profiles, Section):
        for name, node in profiles.children.items():
            nodes[f"rollout.sampling_profiles.{name}"] = node

    return {
        key: node for key, node in nodes.items() if isinstance(node, Leaf) and isinstance(node.value, str)
    }


def _source_profiles(tree: Section) -> dict[str, Leaf]:
    """Map the key of each `profile` in `data.sources` to its leaf."""
    data = tree.children.get("data")
    sources = data.children.get("sources") if isinstance(data, Section) else None
    if not isinstance(sources, Section):
        return {}

    leaves: dict[str, Leaf] = {}
    for name, source in sources.children.items():
        leaf = source.children.get("profile") if isinstance(source, Section) else None
        # Another rule reports an empty name.
        if isinstance(leaf, Leaf) and isinstance(leaf.value, str) and leaf.value:
            leaves[f"data.sources.{name}.profile"] = leaf
    return leaves


def _add_registered_profiles(rollout: Section) -> Section:
    """Add the registered profiles to `rollout.sampling_profiles`, and return that section."""
    profiles = rollout.children.get("sampling_profiles")
    if not isinstance(profiles, Section):
        profiles = Section()

    for name, settings in _registered_profiles.items():
        origin = Origin("derived", "registered by megatron_rl.sampling_profile")
        profiles.children.setdefault(name, _to_node(settings, origin))
    if profiles.children:
        rollout.children["sampling_profiles"] = profiles
    return profiles


def _find_profile(
    leaf: Leaf,
    key: str,
    available_profiles: Mapping[str, Section],
    errors: list[UserError],
) -> Section:
    """Return the profile that a leaf names; append an error and return an empty section if it is unknown."""
    user_file, _, name = leaf.value.rpartition(":")
    if name in available_profiles:
        return available_profiles[name]

    # If the file of the profile could not be imported, this key already has an error.
    if not any(error.where == key for error in errors):
        similar_name = nearest(name, list(available_profiles))
        fix = "write file.py:NAME for a profile that megatron_rl.sampling_profile registers in file.py"
        if user_file:
            fix = f"call megatron_rl.sampling_profile({name!r}, ...) in {user_file}"
        if similar_name:
            fix = f"did you mean {similar_name!r}?"
        names = ", ".join(available_profiles) or "rollout.sampling_profiles, which has none"
        errors.append(
            UserError(
                f"there is no sampling profile {name!r}",
                where=key,
                expected=f"one of {names}",
                got=leaf.value,
                fix=fix,
            )
        )
    return Section(origin=leaf.origin)


def _is_override(node: Leaf | Section) -> bool:
    """Return whether a command-line override set a node or a value below it."""
    if isinstance(node, Leaf):
        return node.origin.kind == "override"
    return any(leaf.origin.kind == "override" for _, leaf in node.leaves())


def _to_node(value: Any, origin: Origin) -> Leaf | Section:
    """Convert a plain value to a node of the configuration's tree."""
    if isinstance(value, Mapping):
        return Section({str(key): _to_node(inner, origin) for key, inner in value.items()}, origin)
    # A YAML file has lists but no tuples, so the tree contains lists, too.
    if isinstance(value, tuple):
        value = list(value)
    return Leaf(value, origin)
