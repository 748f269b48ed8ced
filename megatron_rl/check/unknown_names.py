"""What a name that the configuration does not have is called here, or that nothing here is like it.

Every suggestion is tried before it is made: the configuration with the suggestion in place of the unknown
name is parsed and checked, and a guess from the spelling that makes a new error is dropped. A name of another
project keeps its meaning even where the value has to change; then the fix says what the value must be.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_rl.algorithms.algorithm import KINDS
from megatron_rl.check.algorithm import check_algorithm
from megatron_rl.check.engine.arguments import ENGINE_ARGUMENTS, check_engine_arguments
from megatron_rl.check.installed_source import class_fields
from megatron_rl.check.model.megatron_settings import (
    DDP_CONFIG,
    OPTIMIZER_CONFIG,
    TRANSFORMER_CONFIG,
    check_model_settings,
    check_optimizer,
)
from megatron_rl.check.values import check_values
from megatron_rl.config.field_types import known_paths
from megatron_rl.config.load import parse_tree
from megatron_rl.config.other_names import (
    FOREIGN_SECTIONS,
    OtherName,
    UnknownName,
    name_in_section,
    other_name,
)
from megatron_rl.config.roles import MODEL_ROLES
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.setting import REMOVED, is_setting
from megatron_rl.config.source import DEFAULT, Leaf, Section, one_line, put
from megatron_rl.errors import UserError, nearest

REFERENCE = "docs/configuration.md lists every name"
_ROLES = (*(spec.section for spec in MODEL_ROLES if not spec.named), "sft", "preference")
"""Sections that have settings of one name, of which the actor's is meant where none is named."""
_ROLE_NAMES: Mapping[str, str] = {
    "ref": "reference",
    "reference": "reference",
    "critic": "critic",
    "value": "critic",
}
"""A section of another project's configuration -> our role."""
_GENERAL = frozenset({
    "batch_size", "clip", "coef", "data", "enable", "enabled", "every", "gpus", "id", "level", "limit",
    "limits", "method", "mode", "model", "name", "order", "path", "paths", "patience", "samples", "scale",
    "settings", "size", "strategy", "target", "threshold", "timeout", "type", "url", "urls", "weight",
    "weights", "workers",
})  # fmt: skip
"""Names that mean something else in each section: one in another section is no sign of what was meant."""
_SHORTEST = 6
"""Letters of a name from which a slip of it is looked for in other sections."""


def answered(errors: Iterable[UserError], tree: Section) -> list[UserError]:
    """Return the errors of the configuration ``tree``, with an answer to each unknown name."""
    result: list[UserError] = []
    for error in errors:
        if isinstance(error, UnknownName):
            result.extend(_answers(error, tree))
        else:
            result.append(error)
    return result


@dataclass(frozen=True)
class _Unknown:
    """One unknown name that is to be answered: the leaf itself, or one below an unknown section.

    ``error`` is what parsing said, ``names`` the way to the name from the root of ``tree``, and ``value`` its
    value there. ``path`` is the dotted path.
    """

    error: UnknownName
    tree: Section
    names: tuple[str, ...]
    path: str
    value: Any

    @property
    def where(self) -> str:
        """Return the path with the file or override that wrote it."""
        node = _node(self.tree, self.names)
        if node is None or node.origin.kind == "default":
            return self.path
        return f"{self.path} ({node.origin})"

    def answer(self, message: str, expected: str, fix: str, source: str = "") -> UserError:
        """Return the error that answers this name."""
        shown = self.path if self.path != self.error.path else self.error.key
        return UserError(
            message,
            where=self.where,
            expected=expected,
            got=f"`{shown}: {_short(self.value)}`{source}",
            fix=fix,
        )


@dataclass(frozen=True)
class _Applied:
    """The configuration with a suggestion in place of an unknown name.

    ``written`` is the line that the suggestion asks for, and ``problems`` what it newly breaks.
    """

    written: str
    problems: Sequence[UserError]


def _answers(error: UnknownName, tree: Section) -> list[UserError]:
    section = tuple(_names_of(tree, error.section))
    unknown = _Unknown(error, tree, (*section, error.key), error.path, error.value)
    if not isinstance(error.value, dict):
        return [_answer(unknown)]
    return _section_answers(unknown)


def _answer(unknown: _Unknown) -> UserError:
    """Return the answer to a name with a single value."""
    if "." in unknown.error.key and unknown.path in known_paths(RunConfig):
        *above, name = unknown.path.split(".")
        return unknown.answer(
            f"`{unknown.path}` is written with dots, which join names on the command line alone",
            "names below one another",
            f"write `{name}: {_short(unknown.value)}` below `{' '.join(f'{word}:' for word in above)}`",
        )
    other = _other_name(unknown)
    if other is not None and other.ours is None:
        return _absent(unknown, other.reason)
    if other is not None:
        return _called(unknown, other)
    return _guessed(unknown) or _absent(unknown)


def _section_answers(unknown: _Unknown) -> list[UserError]:
    """Return the answers to an unknown section: to it as a whole, or to each name below it."""
    error = unknown.error
    whole = _other_name(unknown)
    if whole is not None:
        if whole.ours is None:
            return [_absent(unknown, whole.reason)]
        if not _apply(unknown, whole.ours, unknown.value).problems:
            return [_called(unknown, whole)]

    guess = _guessed(unknown)
    if guess is not None:
        return [guess]

    answers = []
    rest = []
    for names, leaf in _leaves(unknown.value, ()):
        path = ".".join((error.path, *names))
        below = replace(unknown, names=(*unknown.names, *names), path=path, value=leaf)
        answer = _answer_below(below)
        if answer is None:
            rest.append(path)
        else:
            answers.append(answer)
    if answers and not rest:
        return answers

    foreign = FOREIGN_SECTIONS.get(error.path)
    if foreign is not None:
        hint = f"; {foreign.project} has it, here it is {foreign.name}"
    elif whole is not None:
        hint = f"; it is called `{whole.ours}` here, with other names below it"
    else:
        hint = ""
    answers.append(
        UserError(
            f"`{error.path}` is not a known section{hint}",
            where=error.where,
            expected=error.expected if error.section else "a section of the configuration",
            got=", ".join(f"`{path}`" for path in rest[:8]) + (" ..." if len(rest) > 8 else "")
            or "an empty section",
            fix=f"remove the section; {REFERENCE}",
        )
    )
    return answers


def _answer_below(unknown: _Unknown) -> UserError | None:
    """Return the answer to a name below an unknown section; None where nothing here is like it.

    Its spelling is no sign of a slip, since the section is another project's.
    """
    other = _other_name(unknown)
    if other is not None and other.ours is None:
        return _absent(unknown, other.reason)
    if other is not None:
        return _called(unknown, other)
    valid = _valid(unknown, (*_passed_through(unknown), *_elsewhere(unknown, slips=False)))
    return _suggested(unknown, valid) if valid else None


def _called(unknown: _Unknown, other: OtherName) -> UserError:
    """Return the error of a name that another project, or an older configuration of ours, has."""
    assert other.ours is not None
    message = f"`{unknown.path}` is called `{other.ours}` here"
    expected = f"`{other.ours}`"
    mapped = _mapped(other, unknown.value)
    if mapped == REMOVED:
        return unknown.answer(
            f"{message}, and {_short(unknown.value)} asks for nothing",
            "no line",
            "remove the line",
            other.source,
        )

    applied = _apply(unknown, other.ours, mapped, other.piece)
    stated = None if unknown.error.overrides else _stated(unknown, other.ours)
    if other.conversion and mapped is unknown.value:
        fix = f"write `{other.ours}` ({other.conversion})"
    elif stated is not None and stated == mapped:
        fix = f"remove the line: `{other.ours}` is {_short(stated)} already"
    elif stated is not None:
        fix = f"write `{other.ours}: {_short(mapped)}` instead of {_short(stated)}, or remove the line"
    elif applied.problems:
        problem = applied.problems[0]
        fix = f"write `{other.ours}`, and correct it: {problem.message}, expected {problem.expected}"
    else:
        fix = f"write `{applied.written}`"
    return unknown.answer(message, expected, fix, other.source)


def _guessed(unknown: _Unknown) -> UserError | None:
    """Return the answer to a slip, or to a name in the wrong section; None where nothing is that close."""
    for candidates in (_siblings(unknown), _elsewhere(unknown), _passed_through(unknown)):
        valid = _valid(unknown, candidates)
        if valid:
            return _suggested(unknown, valid)

    # A field of vLLM's or Megatron's that the run refuses, or sets itself: its own check says why.
    for target in _passed_through(unknown):
        (problem, *_) = _apply(unknown, target, unknown.value).problems
        return _absent(unknown, problem.message)
    return None


def _valid(unknown: _Unknown, candidates: Iterable[str]) -> dict[str, _Applied]:
    """Return those of some settings that take the value of the unknown name, each tried."""
    tried = {target: _apply(unknown, target, unknown.value) for target in candidates}
    return {target: applied for target, applied in tried.items() if not applied.problems}


def _suggested(unknown: _Unknown, valid: Mapping[str, _Applied]) -> UserError:
    kind = "section" if isinstance(unknown.value, dict) else "name"
    named = " or ".join(f"`{target}`" for target in valid)
    siblings = unknown.error.expected or ""
    if len(valid) == 1:
        (applied,) = valid.values()
        fix = f"write `{applied.written}`, or remove the line"
    else:
        fix = f"write {named}, whichever is meant"
    return unknown.answer(
        f"`{unknown.path}` is not a known {kind}; did you mean {named}?",
        siblings if unknown.error.section else f"a {kind} of the configuration",
        fix,
    )


def _absent(unknown: _Unknown, reason: str = "") -> UserError:
    """Return the error of a name that has no counterpart."""
    kind = "section" if isinstance(unknown.value, dict) else "name"
    message = f"`{unknown.path}` is not a known {kind}: there is no setting for it"
    siblings = unknown.error.expected if unknown.error.section else None
    return unknown.answer(
        f"{message}; {reason}" if reason else message,
        siblings or "a name of the configuration",
        "remove the line" if reason else f"remove the line; {REFERENCE}",
    )


def _other_name(unknown: _Unknown) -> OtherName | None:
    """Return our name of what another project has, in the section or the role where it was written."""
    other = other_name(unknown.path) or _own_path(unknown.path)
    if other is None or other.ours is None:
        return other

    # In a section of ours that has the same setting, that one is meant.
    in_section = name_in_section(unknown.path, unknown.error.section, unknown.error.below)
    if in_section is not None:
        return in_section

    # Another project's section of a role means the setting of that role here.
    head, _, rest = other.ours.partition(".")
    for word in unknown.path.split("."):
        target = f"{_ROLE_NAMES.get(word)}.{rest}"
        if head == "actor" and target in known_paths(RunConfig):
            return replace(other, ours=target)
    return other


def _own_path(path: str) -> OtherName | None:
    """Return the setting of ours that a name ends with, such as that of `x.rollout.temperature`."""
    paths = set(known_paths(RunConfig))
    words = path.split(".")
    ends = [".".join(words[start:]) for start in range(1, len(words) - 1)]
    return next((OtherName("common", end) for end in ends if end in paths), None)


def _siblings(unknown: _Unknown) -> list[str]:
    section = unknown.error.section
    close = nearest(unknown.error.key, {name.partition(".")[0] for name in unknown.error.below})
    if close is None:
        return []
    return [f"{section}.{close}" if section else close]


def _elsewhere(unknown: _Unknown, *, slips: bool = True) -> list[str]:
    """Return the settings of other sections that have the name, those of the actor for all roles.

    With ``slips`` also those of which the name is a slip.
    """
    key = unknown.names[-1]
    if key.lower() in _GENERAL or isinstance(unknown.value, dict):
        return []

    by_name: dict[str, list[str]] = {}
    for path in (*known_paths(RunConfig), *piece_paths()):
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    close = key if key in by_name else None
    if close is None and slips and len(key) >= _SHORTEST:
        close = nearest(key, by_name)
    if close is None or close in _GENERAL:
        return []

    paths = by_name[close]
    roles = [path for path in paths if path.partition(".")[0] in _ROLES]
    if len(roles) == len(paths):
        return [next((path for path in paths if path.startswith("actor.")), paths[0])]
    shallowest = min(path.count(".") for path in paths)
    return [path for path in paths if path.count(".") == shallowest]


def piece_paths() -> list[str]:
    """Return the path of every setting of the named pieces of algorithms."""
    paths = [
        f"algorithm.{key}.{item.name}"
        for key, kind in KINDS.items()
        for piece in kind.named.values()
        for item in fields(piece)
        if is_setting(item)
    ]
    return list(dict.fromkeys(paths))


_PASSED_THROUGH = (
    ("rollout.vllm", ("rollout", "vllm", "engine", "generation"), (ENGINE_ARGUMENTS,)),
    ("actor.megatron", ("", "actor", "model", "megatron", "policy"), TRANSFORMER_CONFIG),
    ("actor.ddp", ("", "actor", "ddp", "megatron", "policy"), DDP_CONFIG),
    ("actor.optimizer.megatron", ("actor", "optimizer", "optim", "megatron"), OPTIMIZER_CONFIG),
)
"""Our key of fields of vLLM or Megatron, the sections in which people write them, and the classes."""


def _passed_through(unknown: _Unknown) -> Iterator[str]:
    """Yield where a field of the installed vLLM or Megatron belongs."""
    key = unknown.names[-1]
    sections = set(unknown.path.split(".")[:-1]) or {""}
    for target, written_in, classes in _PASSED_THROUGH:
        if "_" in key and sections & set(written_in) and key in (class_fields(*classes) or {}):
            yield f"{target}.{key}"
            return


def _mapped(other: OtherName, value: Any) -> Any:
    """Return our value of another project's, the value itself where nothing is said of it."""
    for theirs, ours in other.values.items():
        if isinstance(theirs, bool) == isinstance(value, bool) and theirs == value:
            return ours
    return value


def _apply(unknown: _Unknown, target: str, value: Any, piece: str = "") -> _Applied:
    """Try a configuration with ``target: value`` in place of the unknown name.

    ``piece`` is named too where the algorithm's own piece has no such setting.
    """
    without = copy.deepcopy(unknown.tree)
    _remove(without, unknown.names)
    before = {str(error) for error in _errors(without, target)}

    parent, _, _ = target.rpartition(".")
    text_above = isinstance(_node(without, parent.split(".")), Leaf) if parent else False
    applied = copy.deepcopy(without)
    put(applied, target.split("."), _tree(value))
    problems = [error for error in _errors(applied, target) if str(error) not in before]
    written = target if value is unknown.value else f"{target}: {one_line(value)}"
    if problems and piece:
        put(applied, parent.split("."), Section({"name": Leaf(piece, DEFAULT)}))
        put(applied, target.split("."), _tree(value))
        problems = [error for error in _errors(applied, target) if str(error) not in before]
        text_above = True
    if text_above:
        section = _node(applied, parent.split("."))
        if isinstance(section, Section):
            written = f"{parent}: {one_line(section.plain())}"
    return _Applied(written, problems)


def _errors(tree: Section, target: str) -> list[UserError]:
    """Return what is wrong with a whole configuration, as far as it needs no files and no other process."""
    errors: list[UserError] = []
    config, _ = parse_tree(tree, errors)
    errors.extend(check_values(config))
    if target.startswith("algorithm"):
        errors.extend(check_algorithm(config)[1])
    if target.startswith("rollout.vllm"):
        errors.extend(check_engine_arguments(config.rollout.vllm))
    if target.startswith("actor.megatron"):
        errors.extend(check_model_settings(config.actor.megatron))
    if target.startswith(("actor.optimizer", "actor.ddp")):
        errors.extend(check_optimizer(config.actor.optimizer, "actor.optimizer", config.actor.ddp))
    return errors


def _stated(unknown: _Unknown, target: str) -> Any:
    """Return the value that the configuration itself gives a setting, None where it gives none."""
    node = _node(unknown.tree, target.split("."))
    return node.value if isinstance(node, Leaf) else None


def _node(tree: Section, names: Sequence[str]) -> Leaf | Section | None:
    node: Leaf | Section | None = tree
    for name in names:
        if not isinstance(node, Section):
            return None
        node = node.children.get(name)
    return node


def _remove(tree: Section, names: Sequence[str]) -> None:
    """Take a name out of a tree, and the sections above it that are empty then."""
    section = _node(tree, names[:-1])
    if isinstance(section, Section):
        section.children.pop(names[-1], None)
        if not section.children and len(names) > 1:
            _remove(tree, names[:-1])


def _names_of(tree: Section, path: str) -> list[str]:
    """Return the names that lead to a section; a name of the user's own may have dots in it."""
    if not path:
        return []
    for name, child in tree.children.items():
        if path == name:
            return [name]
        if path.startswith(f"{name}.") and isinstance(child, Section):
            return [name, *_names_of(child, path.removeprefix(f"{name}."))]
    return path.split(".")


def _leaves(value: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _leaves(inner, (*names, name))
        else:
            yield (*names, name), inner


def _tree(value: Any) -> Leaf | Section:
    if isinstance(value, dict):
        return Section({name: _tree(inner) for name, inner in value.items()})
    return Leaf(value, DEFAULT)


def _short(value: Any) -> str:
    text = "null" if value is None else one_line(value)
    return text if len(text) <= 40 else text[:37] + "..."
