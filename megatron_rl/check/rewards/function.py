"""Rules on the reward function: found without importing it, and callable as it will be called."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.errors import UserError, nearest
from megatron_rl.redaction import HIDDEN, is_hidden
from megatron_rl.rewards.judgement import JUDGEMENT, is_function
from megatron_rl.rewards.worker import ARGUMENTS, GROUP, TOKENS, TURNS, parameter_hints
from megatron_rl.user_code import find_module, missing_file

ASKED_FOR = (TURNS, TOKENS, GROUP)
_EXPECTED = "module:function, or path/to/file.py:function"


class Called(NamedTuple):
    """Say which function a configuration names at ``where``, and what it is called with.

    ``further`` are arguments that the configuration gives, or that only this function has; ``grouped`` says
    whether it may judge a group, ``chooses`` whether it is called with those arguments alone that it names.
    """

    spec: str
    where: str
    further: tuple[str, ...] = ()
    grouped: bool = True
    arguments: tuple[str, ...] = ARGUMENTS
    optional: tuple[str, ...] = (TURNS, TOKENS)
    chooses: bool = True

    @property
    def what(self) -> str:
        """Return what the function is, in words."""
        return "reward function" if self.where == "reward.function" else self.where


def check_reward(reward: RewardConfig) -> list[UserError]:
    """Return what is wrong with the names, places and parameters of the functions that judge, if any."""
    errors: list[UserError] = []
    if reward.function is not None:
        errors += _check_arguments(reward)
        if not errors:
            errors += check_function(Called(reward.function, "reward.function", tuple(reward.arguments)))
    if reward.judge is not None:
        where = "reward.judge"
        errors += check_function(Called(reward.judge.parser, f"{where}.parser", (JUDGEMENT,), False))
        if is_function(reward.judge.template):
            errors += check_function(Called(reward.judge.template, f"{where}.template", (), False))
    return errors


def _check_arguments(reward: RewardConfig) -> list[UserError]:
    taken = [name for name in reward.arguments if name in (*ARGUMENTS, *ASKED_FOR)]
    if taken:
        return [
            UserError(
                "an argument of the reward function is one that every call already has",
                where=f"reward.arguments.{name}",
                expected=f"names other than {', '.join((*ARGUMENTS, *ASKED_FOR))}",
                got=repr(name),
                fix="give it another name, in the function too",
            )
            for name in taken
        ]
    return check_not_hidden("reward.arguments", reward.arguments)


def check_not_hidden(where: str, value: Any) -> list[UserError]:
    """Return the error of settings that come from the configuration that a run has written down."""
    if not is_hidden(value):
        return []
    return [
        UserError(
            f"a value in `{where}` is hidden, as a run writes secrets down",
            where=where,
            expected="the value itself",
            got=HIDDEN,
            fix="give it again, in a file of your own or on the command line",
        )
    ]


def check_function(called: Called) -> list[UserError]:
    """Return what is wrong with the name, the place and the parameters of a function, if any."""
    place, colon, name = called.spec.rpartition(":")
    if not colon or not place or not name.isidentifier():
        return [_name_error(called)]
    if place.endswith(".py") or "/" in place:
        path = Path(place)
        if not path.is_file() or path.suffix != ".py":
            if not path.exists():
                return [missing_file(place, called.where, f"file of the {called.what}")]
            return [
                UserError(
                    f"the file of the {called.what} is no Python file: {place}",
                    where=called.where,
                    expected=_EXPECTED,
                    got=f"{place} is {_kind(path)}",
                    fix="name the file that defines the function, which ends in .py",
                )
            ]
    else:
        path, missing = find_module(place)
        if missing is not None:
            return [
                UserError(
                    f"the module of the {called.what} does not exist: {missing}",
                    where=called.where,
                    expected=_EXPECTED,
                    got=f"no module {missing!r} in the current directory or among installed packages",
                    fix="correct the name, or name the file: path/to/file.py:function",
                )
            ]
    return _check_source(path, name, called) if path is not None and path.suffix == ".py" else []


def _kind(path: Path) -> str:
    return "a folder" if path.is_dir() else f"a file {path.suffix or 'without a suffix'}"


def _name_error(called: Called) -> UserError:
    function = called.spec
    fix = "for example megatron_rl.rewards.arithmetic:exact_match"
    if ":" not in function and "." in function and not function.endswith(".py"):
        module, _, name = function.rpartition(".")
        fix = f"write {module}:{name}"
    elif function.endswith(".py"):
        fix = f"add the function's name: {function}:NAME"
    return UserError(
        f"the {called.what} is not named as module:function",
        where=called.where,
        expected=_EXPECTED,
        got=repr(function),
        fix=fix,
    )


def _check_source(path: Path, name: str, called: Called) -> list[UserError]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (SyntaxError, ValueError, OSError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        return [
            UserError(
                f"the file of the {called.what} is not valid Python",
                where=f"{path}{line}",
                expected="a Python file",
                got=getattr(error, "msg", None) or str(error),
                fix="save it as UTF-8" if isinstance(error, UnicodeDecodeError) else "correct the file",
            )
        ]
    functions = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    if name not in functions:
        if name in _other_names(tree):
            return []
        close = nearest(name, functions)
        return [
            UserError(
                f"the {called.what} {name} is not in {path.name}",
                where=called.where,
                expected=f"one of the functions of {path}: {', '.join(functions) or '(none)'}",
                got=name,
                fix=f"did you mean {close}?"
                if close
                else f"define {name} in the file, or name another function",
            )
        ]
    return _check_signature(functions[name], path, called)


def _other_names(tree: ast.Module) -> set[str]:
    """Return names that the module binds in other ways: imports, assignments, classes, branches."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
            if any(alias.name == "*" for alias in node.names):
                return _Everything()
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
    return names


class _Everything(set[str]):
    def __contains__(self, name: object) -> bool:
        return True


def _check_signature(
    node: ast.FunctionDef | ast.AsyncFunctionDef, path: Path, called: Called
) -> list[UserError]:
    spec = node.args
    accepted = {item.arg for item in (*spec.args, *spec.kwonlyargs)}
    grouped = called.grouped and GROUP in accepted
    basic = [GROUP if name == "response" and grouped else name for name in called.arguments]
    passed = [*basic, *called.further]
    given = {*passed, *called.optional}
    defaults = len(spec.defaults)
    positional = spec.args[: len(spec.args) - defaults]
    required = {item.arg for item in (*spec.posonlyargs, *positional)}
    pairs = zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    required |= {item.arg for item, default in pairs if default is None}
    # A provider of models is called with all of its arguments, a function that judges with those it names.
    named = called.further if called.chooses else passed
    refused = [] if spec.kwarg is not None else [name for name in named if name not in accepted]
    lacking = sorted(required - given)
    if not refused and not lacking:
        return []
    problem = [f"it does not take {', '.join(refused)}"] if refused else []
    problem += [f"it requires {', '.join(lacking)}"] if lacking else []
    fix = f"give them {'in reward.arguments, or ' * (called.where == 'reward.function')}a default"
    if called.chooses:
        fix = f"{parameter_hints(lacking) or 'rename them to names that every call has'}, or {fix}"
    if refused:
        fix = "add **kwargs for what it has no use for"
        fix = f"call it from a function of these parameters, or rename its own and {fix}" if lacking else fix
    return [
        UserError(
            f"the {called.what} {node.name} cannot be called as it will be",
            where=f"{path}:{node.lineno}",
            expected=f"parameters among {', '.join((*passed, *called.optional))}"
            if called.chooses
            else f"parameters for the call {node.name}({', '.join(f'{name}=' for name in passed)})",
            got=" and ".join(problem),
            fix=fix,
        )
    ]
