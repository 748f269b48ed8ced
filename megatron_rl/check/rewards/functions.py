"""Rules on the user's functions: rewards, evaluators, parsers, templates and model providers.

A function's source is first parsed, not imported: the file must exist, parse and define the function, whose
parameters must fit the call. Then functions that compute rewards are loaded as a run loads them, each in a
contained process, all in parallel: whatever a module does on import (raise, exit, never return) becomes one
error of the report. Parsing comes first because its errors name the function's line, and need no process.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.errors import UserError, nearest
from megatron_rl.redaction import HIDDEN, is_hidden
from megatron_rl.rewards.calls import loading_errors
from megatron_rl.rewards.judgement import JUDGEMENT, is_function
from megatron_rl.rewards.worker import ARGUMENTS, GROUP, TOKENS, TURNS, parameter_hints
from megatron_rl.user_code import find_module, missing_file

RESERVED_ARGUMENTS = (*ARGUMENTS, TURNS, TOKENS, GROUP)
"""Names that `reward.arguments` cannot use: the arguments that a run passes itself."""

_EXPECTED_SPEC = "module:function, or path/to/file.py:function"

_MAX_PROCESSES = 8
"""Contained processes at a time; a configuration rarely names more functions."""

_AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


class FunctionRef(NamedTuple):
    """Function that a configuration names, and the arguments that it will be called with.

    Example:
        >>> FunctionRef("rewards.py:score", "reward.function", extra=("bonus",)).noun
        'reward function'
    """

    spec: str
    """``module:function`` or ``path/to/file.py:function``."""
    key: str
    """The key that names the function."""
    extra: tuple[str, ...] = ()
    """Further arguments: those that the configuration gives, and those of this function's calls alone."""
    accepts_group: bool = True
    """Whether it may take `GROUP`, all samples of a prompt at once, in place of ``response``."""
    arguments: tuple[str, ...] = ARGUMENTS
    """Arguments of every call."""
    optional: tuple[str, ...] = (TURNS, TOKENS)
    """Arguments that are passed only where the function has a parameter of that name."""
    passes_all: bool = False
    """Whether all ``arguments`` are passed; by default only those that the function has a parameter for."""

    @property
    def noun(self) -> str:
        """Return the kind of function as a noun for error texts."""
        return "reward function" if self.key == "reward.function" else self.key


def check_reward(reward: RewardConfig) -> list[UserError]:
    """Return the errors of the reward function, and of the parser and template of an LLM judge."""
    errors: list[UserError] = []
    if reward.function is not None:
        errors += _argument_errors(reward)
        if not errors:
            function = FunctionRef(reward.function, "reward.function", extra=tuple(reward.arguments))
            errors += check_function(function)

    # An LLM judge: the parser of its answers, and the function that writes its prompts.
    if reward.judge is not None:
        parser = FunctionRef(
            reward.judge.parser, "reward.judge.parser", extra=(JUDGEMENT,), accepts_group=False
        )
        errors += check_function(parser)

        # The template is a text or a function.
        if is_function(reward.judge.template):
            template = FunctionRef(reward.judge.template, "reward.judge.template", accepts_group=False)
            errors += check_function(template)
    return errors


def _argument_errors(reward: RewardConfig) -> list[UserError]:
    """Return the errors of ``reward.arguments``: reserved names, and values hidden by a run folder."""
    # A reserved name would replace an argument of the call.
    reserved = [name for name in reward.arguments if name in RESERVED_ARGUMENTS]
    if not reserved:
        return check_not_hidden("reward.arguments", reward.arguments)
    return [
        UserError(
            f"reserved argument name: the run passes {name} itself",
            where=f"reward.arguments.{name}",
            expected=f"names other than {', '.join(RESERVED_ARGUMENTS)}",
            got=repr(name),
            fix="give it another name, in the function too",
        )
        for name in reserved
    ]


def check_not_hidden(key: str, value: Any) -> list[UserError]:
    """Return the error of a value that was copied from a run folder, which hides secrets."""
    if not is_hidden(value):
        return []
    return [
        UserError(
            f"`{key}` contains a value that a run folder hides, since it may be a secret",
            where=key,
            expected="the value itself",
            got=HIDDEN,
            fix="give it again, in a file of your own or on the command line",
        )
    ]


def check_function(function: FunctionRef) -> list[UserError]:
    """Return the errors of a function's name, file and parameters, read from its source."""
    location, colon, name = function.spec.rpartition(":")
    if not colon or not location or not name.isidentifier():
        return [_spec_error(function)]

    # Find the file, or the file of the module, without importing it.
    if location.endswith(".py") or "/" in location:
        path = Path(location)
        if not path.exists():
            return [missing_file(location, function.key, f"file of the {function.noun}")]
        if not path.is_file() or path.suffix != ".py":
            return [_not_python_error(function, path)]
    else:
        path, missing_module = find_module(location)
        if missing_module is not None:
            return [
                UserError(
                    f"the module of the {function.noun} does not exist: {missing_module}",
                    where=function.key,
                    expected=_EXPECTED_SPEC,
                    got=f"no module {missing_module!r} in the current directory or among installed packages",
                    fix="correct the name, or name the file: path/to/file.py:function",
                )
            ]

    if path is None or path.suffix != ".py":  # a compiled module has no source to read
        return []
    return _source_errors(path, name, function)


def _not_python_error(function: FunctionRef, path: Path) -> UserError:
    kind = f"a file {path.suffix or 'without a suffix'}"
    if path.is_dir():
        kind = "a folder"
    return UserError(
        f"the file of the {function.noun} is not a Python file: {path}",
        where=function.key,
        expected=_EXPECTED_SPEC,
        got=f"{path} is {kind}",
        fix="name the file that defines the function, which ends in .py",
    )


def _spec_error(function: FunctionRef) -> UserError:
    """Return the error of a spec that is not ``module:function``, with the right spec if it is clear."""
    spec = function.spec
    fix = "for example megatron_rl.rewards.arithmetic:exact_match"
    if spec.endswith(".py"):
        fix = f"add the function's name: {spec}:NAME"
    elif ":" not in spec and "." in spec:
        module, _, name = spec.rpartition(".")
        fix = f"write {module}:{name}"
    return UserError(
        f"the {function.noun} is not named as module:function",
        where=function.key,
        expected=_EXPECTED_SPEC,
        got=repr(spec),
        fix=fix,
    )


def _source_errors(path: Path, name: str, function: FunctionRef) -> list[UserError]:
    """Return the errors of the Python file that should define the function ``name``."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (SyntaxError, ValueError, OSError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        fix = "correct the file"
        if isinstance(error, UnicodeDecodeError):
            fix = "save it as UTF-8"
        return [
            UserError(
                f"the file of the {function.noun} is not valid Python",
                where=f"{path}{line}",
                expected="a Python file",
                got=getattr(error, "msg", None) or str(error),
                fix=fix,
            )
        ]

    definitions = {node.name: node for node in tree.body if isinstance(node, _AnyFunction)}

    if name in definitions:
        return _signature_errors(definitions[name], path, function)
    if _binds(tree, name):  # not a plain function: its signature is only available after an import
        return []

    suggestion = nearest(name, definitions)
    fix = f"define {name} in the file, or name another function"
    if suggestion is not None:
        fix = f"did you mean {suggestion}?"
    return [
        UserError(
            f"the {function.noun} {name} is not in {path.name}",
            where=function.key,
            expected=f"one of the functions of {path}: {', '.join(definitions) or '(none)'}",
            got=name,
            fix=fix,
        )
    ]


def _binds(tree: ast.Module, name: str) -> bool:
    """Return whether a module may bind a name by an import, an assignment, a class or inside a branch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*" or (alias.asname or alias.name).split(".")[0] == name:
                    return True
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id == name:
                return True
        elif isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return True
    return False


def _signature_errors(node: _AnyFunction, path: Path, function: FunctionRef) -> list[UserError]:
    """Return the error of a signature that refuses arguments of the call, or needs further ones."""
    parameters = node.args

    # Parameters that an argument can be passed to by name.
    accepted = {item.arg for item in (*parameters.args, *parameters.kwonlyargs)}

    # Parameters without a default.
    positional = parameters.args[: len(parameters.args) - len(parameters.defaults)]
    required = {item.arg for item in (*parameters.posonlyargs, *positional)}
    for item, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
        if default is None:
            required.add(item.arg)

    # Arguments of the call: a function with a parameter for the group gets it in place of one response.
    judges_group = function.accepts_group and GROUP in accepted
    arguments = list(function.arguments)
    if judges_group and "response" in arguments:
        arguments[arguments.index("response")] = GROUP
    arguments += function.extra

    # Every passed argument needs a parameter. Without `passes_all` only the extra ones are always passed.
    refused: list[str] = []
    if parameters.kwarg is None:
        passed = function.extra
        if function.passes_all:
            passed = tuple(arguments)
        refused = [name for name in passed if name not in accepted]
    unfilled = sorted(required - {*arguments, *function.optional})
    if not refused and not unfilled:
        return []

    problems: list[str] = []
    if refused:
        problems.append(f"it does not take {', '.join(refused)}")

    if unfilled:
        problems.append(f"it requires {', '.join(unfilled)}")

    expected = f"parameters among {', '.join((*arguments, *function.optional))}"
    if function.passes_all:
        expected = f"parameters for the call {node.name}({', '.join(f'{name}=' for name in arguments)})"
    return [
        UserError(
            f"the {function.noun} {node.name} does not fit the arguments of its call",
            where=f"{path}:{node.lineno}",
            expected=expected,
            got=" and ".join(problems),
            fix=_signature_fix(function, bool(refused), unfilled),
        )
    ]


def _signature_fix(function: FunctionRef, refused: bool, unfilled: Sequence[str]) -> str:
    """Return the fix of a function that refuses arguments, has unfilled parameters, or both."""
    if refused and unfilled:
        return "call it from a function with the expected parameters, or rename them and add **kwargs"
    if refused:
        return "add **kwargs for the arguments that it does not use"
    fixes = ["give them a default"]
    if function.key == "reward.function":
        fixes.insert(0, "set them in reward.arguments")
    if not function.passes_all:
        hints = parameter_hints(unfilled)
        fixes.insert(0, hints or "rename them to arguments of the call")
    return ", or ".join(fixes)


class _Loading(NamedTuple):
    """A function to load in a contained process, with the settings of that process."""

    config: RewardConfig
    """Settings with the function as ``config.function``, and with the limits and arguments of the process."""
    key: str
    """The key that names the function."""
    writes: bool = False
    """Whether the function is the template of an LLM judge and returns the prompt as text."""
    extra: Sequence[str] = ()
    accepts_group: bool = True

    def errors(self) -> list[UserError]:
        """Load the function as a run does; return why that fails."""
        return loading_errors(self.config, self.key, self.writes, self.extra)

    def source_errors(self) -> list[UserError]:
        """Return the errors of the function's source, which other rules report."""
        extra = (*self.config.arguments, *self.extra)
        function = FunctionRef(self.config.function or "", self.key, extra, self.accepts_group)
        return check_function(function)


def function_errors(config: RunConfig) -> list[UserError]:
    """Load reward and evaluation functions in contained processes; return the errors of loading them.

    Functions whose source has errors are skipped, so that one mistake is one error.
    """
    # A process for each function: importing one must not affect another.
    loadings = [
        loading
        for loading in _loadings(config)
        # Skip the package's own functions, whose import is known to work.
        if not (loading.config.function or "").startswith("megatron_rl.") and not loading.source_errors()
    ]

    if not loadings:
        return []

    errors: list[UserError] = []
    with ThreadPoolExecutor(_MAX_PROCESSES) as pool:
        for loading_failures in pool.map(_Loading.errors, loadings):
            errors.extend(loading_failures)
    return errors


def _loadings(config: RunConfig) -> Iterator[_Loading]:
    """Yield the functions of rewards, evaluation sets and the LLM judge."""
    reward = replace(config.reward, workers=1)
    if reward.function is not None:
        yield _Loading(reward, "reward.function")
    for name, evaluation_set in config.evaluation.sets.items():
        for key, function in evaluation_set.functions().items():
            settings = replace(reward, function=function, arguments={})
            yield _Loading(settings, f"evaluation.sets.{name}.{key}")
    if reward.judge is None:
        return

    # The judge's functions have the judge's limits.
    limits = reward.judge.limits
    parser = RewardConfig(reward.judge.parser, limits=limits)
    yield _Loading(parser, "reward.judge.parser", extra=(JUDGEMENT,), accepts_group=False)
    if is_function(reward.judge.template):
        template = RewardConfig(reward.judge.template, limits=limits)
        yield _Loading(template, "reward.judge.template", writes=True, accepts_group=False)
