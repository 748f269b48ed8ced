"""Rules on the sources of rewards: functions and servers, evaluation, and the limits of sandboxed code.

The source of a user's function is first parsed, without importing it: the file must exist, be valid Python
and define the function, and the parameters must match the call.

Then each function that computes rewards is loaded as in a run, in a sandboxed process: a module that raises,
exits or never returns on import becomes one error of the report. Parsing comes first because it needs no
process, and its errors have the function's line.

The same rules apply to evaluators, parsers, templates and model providers.
"""

from __future__ import annotations

import ast
import http.client
import os
import re
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.check.files import FileFindings
from megatron_rl.check.values import name_errors
from megatron_rl.config.derive import longest_response
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.bounds import LimitsConfig
from megatron_rl.config.sections.evaluation import EvaluationSetConfig
from megatron_rl.config.sections.filters import FILTER_KEY
from megatron_rl.config.sections.rewards import (
    SENDABLE_PARTS,
    JudgeConfig,
    RewardConfig,
    RewardServerConfig,
    ServerConfig,
)
from megatron_rl.config.sections.teacher_server import TeacherServerConfig
from megatron_rl.contained.process import LoadFailed, unenforced_protections
from megatron_rl.errors import UserError, nearest, range_error, requirement_error, unknown_choice_error
from megatron_rl.redaction import HIDDEN, contains_hidden, is_secret
from megatron_rl.rewards.judgement import JUDGEMENT, is_function_path
from megatron_rl.rewards.worker import ARGUMENTS, GROUP, TOKENS, TURNS, loading_errors, parameter_hints
from megatron_rl.user_code import find_module, missing_python_file_error

RESERVED_ARGUMENTS = (*ARGUMENTS, TURNS, TOKENS, GROUP)
"""Names that `reward.arguments` cannot contain: the arguments that a run passes itself."""

_EXPECTED_SPEC = "module:function, or path/to/file.py:function"

_MAX_PROCESSES = 8
"""Largest number of concurrent sandboxed processes; few configurations name more functions."""

_AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


class FunctionRef(NamedTuple):
    """Function that a configuration names, and the arguments that it will be called with.

    Example:
        >>> FunctionRef("rewards.py:score", "reward.function", extra_arguments=("bonus",)).noun
        'reward function'
    """

    spec: str
    """``module:function`` or ``path/to/file.py:function``."""
    key: str
    """The key that names the function."""
    extra_arguments: tuple[str, ...] = ()
    """Further arguments of each call: from `reward.arguments`, or specific to the key."""
    accepts_group: bool = True
    """Whether the function may take `GROUP`, all responses to a prompt, in place of ``response``."""
    arguments: tuple[str, ...] = ARGUMENTS
    """Names of the arguments that a run passes in every call."""
    optional_arguments: tuple[str, ...] = (TURNS, TOKENS)
    """Arguments that are passed only if the function has a parameter of that name."""
    passes_all: bool = False
    """Whether all ``arguments`` are passed; by default only those that the function has a parameter for."""

    @property
    def noun(self) -> str:
        """Noun for the function in error texts: "reward function", or the key of any other function."""
        if self.key == "reward.function":
            return "reward function"
        return self.key


def check_reward(config: RunConfig) -> list[UserError]:
    """Return the errors for the reward functions, and for the parser and template of an LLM judge."""
    reward = config.reward
    functions = config.reward_functions
    errors: list[UserError] = []
    if functions:
        errors += _argument_errors(reward)
    if not errors:
        for key, spec in functions.items():
            errors += check_function(FunctionRef(spec, key, extra_arguments=tuple(reward.arguments)))

    # An LLM judge: the parser of its responses, and the function that writes its prompts.
    if reward.judge is not None:
        parser = FunctionRef(
            reward.judge.parser, "reward.judge.parser", extra_arguments=(JUDGEMENT,), accepts_group=False
        )
        errors += check_function(parser)

        # A template is either a text or a function.
        if is_function_path(reward.judge.template):
            template = FunctionRef(reward.judge.template, "reward.judge.template", accepts_group=False)
            errors += check_function(template)
    return errors


def filter_errors(config: RunConfig) -> list[UserError]:
    """Return the errors for the settings in `rollout.filters`.

    There are errors for an invalid filter function, for ``min_tokens`` above the longest response, and for
    settings that cannot be combined with ``refill`` (which samples removed responses again).
    """
    filters = config.rollout.filters
    errors: list[UserError] = []
    if filters.function is not None:
        errors += check_function(FunctionRef(filters.function, FILTER_KEY, accepts_group=False))

    # A minimum above every limit would remove all responses.
    max_response = longest_response(config)
    if filters.min_tokens > max_response:
        fix = "lower it, or raise rollout.max_response_tokens"
        expected = f"at most {max_response}, the longest response"
        errors.append(range_error("rollout.filters.min_tokens", filters.min_tokens, expected, fix=fix))
    if filters.refill:
        errors += _refill_errors(config)
    return errors


def _refill_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the error for ``rollout.filters.refill`` without the settings that it requires.

    With ``refill``, a step samples new responses in place of the responses that the filters removed.
    """
    # A batch that is sampled ahead or over-sampled is complete before its responses are filtered.
    requirements = {
        "a filter in rollout.filters": bool(config.rollout.filters.names),
        "rollout.oversample=0": config.rollout.oversample == 0,
        "asynchrony.steps_ahead=0": config.asynchrony.steps_ahead == 0,
    }
    unmet_requirements = [name for name, is_met in requirements.items() if not is_met]
    if unmet_requirements:
        yield UserError(
            "removed responses cannot be sampled again",
            where="rollout.filters.refill",
            expected=f"with refill: {', '.join(requirements)}",
            got=f"{config.rollout.filters.refill} without {', '.join(unmet_requirements)}",
            fix=f"set {' and '.join(unmet_requirements)}, or rollout.filters.refill=0",
        )


def _argument_errors(reward: RewardConfig) -> list[UserError]:
    """Return the errors for ``reward.arguments``: reserved names, or placeholders of redacted secrets.

    A run replaces secrets by a placeholder in the configuration that it stores in its folder.
    """
    # A reserved name would replace an argument of the call.
    reserved_names = [name for name in reward.arguments if name in RESERVED_ARGUMENTS]
    if not reserved_names:
        return check_not_redacted("reward.arguments", reward.arguments)
    return [
        UserError(
            f"reserved argument name: the run passes {name} itself",
            where=f"reward.arguments.{name}",
            expected=f"names other than {', '.join(RESERVED_ARGUMENTS)}",
            got=repr(name),
            fix="give it another name, in the function too",
        )
        for name in reserved_names
    ]


def check_not_redacted(key: str, value: Any) -> list[UserError]:
    """Return the error for a redacted secret, which was copied from the configuration in a run folder."""
    if not contains_hidden(value):
        return []
    return [
        UserError(
            f"`{key}` contains {HIDDEN}, which replaces possible secrets in the files of a run folder",
            where=key,
            expected="the value itself",
            got=HIDDEN,
            fix="write the value in your own configuration file, or on the command line",
        )
    ]


def check_function(function: FunctionRef) -> list[UserError]:
    """Return the errors for a function's name, file and parameters, from parsing its source."""
    location, colon, name = function.spec.rpartition(":")
    if not colon or not location or not name.isidentifier():
        return [_spec_error(function)]

    # Find the file, or the file of the module, without importing it.
    if location.endswith(".py") or "/" in location:
        path = Path(location)
        if not path.exists():
            return [missing_python_file_error(location, function.key, f"file of the {function.noun}")]
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
    """Return the error for a function in a folder, or in a file that does not end in .py."""
    file_type = f"a file {path.suffix or 'without a suffix'}"
    if path.is_dir():
        file_type = "a folder"
    return UserError(
        f"the file of the {function.noun} is not a Python file: {path}",
        where=function.key,
        expected=_EXPECTED_SPEC,
        got=f"{path} is {file_type}",
        fix="name the file that defines the function, which ends in .py",
    )


def _spec_error(function: FunctionRef) -> UserError:
    """Return the error for a spec that is not ``module:function``; the fix suggests a corrected spec."""
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
    """Return the errors for the Python file that should define the function ``name``."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (SyntaxError, ValueError, OSError, RecursionError) as error:
        file_location = str(path)
        # The syntax error for a NUL byte has no line number.
        if isinstance(error, SyntaxError) and error.lineno is not None:
            file_location = f"{path}:{error.lineno}"
        fix = "correct the file"
        if isinstance(error, UnicodeDecodeError):
            fix = "save it as UTF-8"
        return [
            UserError(
                f"the file of the {function.noun} is not valid Python",
                where=file_location,
                expected="a Python file",
                got=getattr(error, "msg", None) or str(error),
                fix=fix,
            )
        ]

    definitions = {node.name: node for node in tree.body if isinstance(node, _AnyFunction)}

    if name in definitions:
        return _signature_errors(definitions[name], path, function)
    if _may_bind(tree, name):  # not a plain function: its signature is only available after an import
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


def _may_bind(tree: ast.Module, name: str) -> bool:
    """Return whether any statement of a module may define ``name``, such as an import or an assignment."""
    # Permissive on purpose: the later import of the module tests whether the name is really defined.
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


def _signature_errors(definition: _AnyFunction, path: Path, function: FunctionRef) -> list[UserError]:
    """Return the error for a function whose parameters do not match the arguments of its call."""
    parameters = definition.args

    # Parameters that accept an argument by name.
    accepted_names = {parameter.arg for parameter in (*parameters.args, *parameters.kwonlyargs)}

    # Parameters without a default.
    positional_without_default = parameters.args[: len(parameters.args) - len(parameters.defaults)]
    required_names = {parameter.arg for parameter in (*parameters.posonlyargs, *positional_without_default)}
    for parameter, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
        if default is None:
            required_names.add(parameter.arg)

    # Arguments of the call: a function with a parameter for the group gets it in place of one response.
    takes_group = function.accepts_group and GROUP in accepted_names
    arguments = list(function.arguments)
    if takes_group and "response" in arguments:
        arguments[arguments.index("response")] = GROUP
    arguments += function.extra_arguments

    # Arguments that every call passes need a parameter: the extra arguments, or all if `passes_all` is set.
    refused_names: list[str] = []
    if parameters.kwarg is None:
        passed_names = function.extra_arguments
        if function.passes_all:
            passed_names = tuple(arguments)
        refused_names = [name for name in passed_names if name not in accepted_names]
    unsupplied_names = sorted(required_names - {*arguments, *function.optional_arguments})
    if not refused_names and not unsupplied_names:
        return []

    problems: list[str] = []
    if refused_names:
        problems.append(f"it does not take {', '.join(refused_names)}")

    if unsupplied_names:
        problems.append(f"it requires {', '.join(unsupplied_names)}")

    expected = f"parameters among {', '.join((*arguments, *function.optional_arguments))}"
    if function.passes_all:
        expected = f"parameters for the call {definition.name}({', '.join(f'{name}=' for name in arguments)})"
    return [
        UserError(
            f"the {function.noun} {definition.name} does not fit the arguments of its call",
            where=f"{path}:{definition.lineno}",
            expected=expected,
            got=" and ".join(problems),
            fix=_signature_fix(function, bool(refused_names), unsupplied_names),
        )
    ]


def _signature_fix(function: FunctionRef, refuses_arguments: bool, unsupplied_names: Sequence[str]) -> str:
    """Return the fix for a function whose parameters do not match the arguments of its call.

    ``refuses_arguments`` is whether the function lacks parameters for some arguments. ``unsupplied_names``
    are its required parameters that get no argument.
    """
    if refuses_arguments and unsupplied_names:
        return "wrap it in a function with the expected parameters, or rename its parameters and add **kwargs"
    if refuses_arguments:
        return "add **kwargs for the arguments that it does not use"

    # The error lists the parameters without an argument in `got`, so the fix does not repeat their names.
    fixes = ["give them a default"]
    if function.key == "reward.function" or function.key.startswith("data.sources."):
        fixes.insert(0, "set them in reward.arguments")
    if not function.passes_all:
        hints = parameter_hints(unsupplied_names)
        fixes.insert(0, hints or "rename them to arguments of the call")
    return ", or ".join(fixes)


class _SandboxedFunction(NamedTuple):
    """User function that runs in a sandboxed process: a reward function, a filter, or part of a judge."""

    config: RewardConfig
    """The function as ``config.function`` with its arguments, and ``config.limits`` of the process.

    A filter or a part of a judge has this form too, though it computes no rewards.
    """
    key: str
    """The key that names the function."""
    returns_text: bool = False
    """Whether the function is the template of an LLM judge and returns the prompt as text."""
    extra_arguments: Sequence[str] = ()
    """Arguments of the call that other reward functions do not have."""
    accepts_group: bool = True
    """Whether the function may be called once for all responses to a prompt, see `FunctionRef`."""

    def try_loading(self) -> list[UserError]:
        """Load the function in a sandboxed process as in a run, and return the errors."""
        return loading_errors(self.config, self.key, self.returns_text, self.extra_arguments)

    def source_errors(self) -> list[UserError]:
        """Return the errors of `check_function` for the source of this function."""
        extra_arguments = (*self.config.arguments, *self.extra_arguments)
        function = FunctionRef(self.config.function or "", self.key, extra_arguments, self.accepts_group)
        return check_function(function)


def function_loading_errors(config: RunConfig) -> list[UserError]:
    """Load reward and evaluation functions in sandboxed processes, and return the errors.

    A function whose source has errors is not loaded.
    """
    # Other rules, such as `check_reward`, report the errors of a function's source. The functions of this
    # package are not loaded here, since its tests cover their import.
    functions: list[_SandboxedFunction] = []
    for function in _sandboxed_functions(config):
        is_own_function = (function.config.function or "").startswith("megatron_rl.")
        if not is_own_function and not function.source_errors():
            functions.append(function)

    if not functions:
        return []

    # Load each function in a separate process, since an import may have side effects on later imports.
    errors: list[UserError] = []
    with ThreadPoolExecutor(_MAX_PROCESSES) as pool:
        for function_errors in pool.map(_SandboxedFunction.try_loading, functions):
            errors.extend(function_errors)
    return errors


def _sandboxed_functions(config: RunConfig) -> Iterator[_SandboxedFunction]:
    """Yield the user's functions that run in sandboxed processes.

    They are reward functions, the response filter, functions of evaluation sets, and the parser and template
    of an LLM judge.
    """
    # One process is enough to load a function.
    reward = replace(config.reward, workers=1)
    for key, function in config.reward_functions.items():
        yield _SandboxedFunction(replace(reward, function=function), key)

    filters = config.rollout.filters
    if filters.function is not None:
        yield _SandboxedFunction(reward.with_function(filters.function), FILTER_KEY, accepts_group=False)
    for name, evaluation_set in config.evaluation.sets.items():
        for key, function in evaluation_set.user_functions().items():
            yield _SandboxedFunction(reward.with_function(function), f"evaluation.sets.{name}.{key}")
    if reward.judge is None:
        return

    # The judge's functions have the judge's limits.
    limits = reward.judge.limits
    parser = RewardConfig(reward.judge.parser, limits=limits)
    yield _SandboxedFunction(parser, "reward.judge.parser", extra_arguments=(JUDGEMENT,), accepts_group=False)
    if is_function_path(reward.judge.template):
        template = RewardConfig(reward.judge.template, limits=limits)
        yield _SandboxedFunction(template, "reward.judge.template", returns_text=True, accepts_group=False)


RESPONSE_SECONDS = 2.0
"""Timeout for the responses of all servers together, in seconds: `check` should take less than five."""

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
"""Pattern of an HTTP header name: a token of RFC 9110, section 5.6.2."""

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_SET_BY_JUDGE = ("model", "messages", "stream", "n")
"""Parameters of a request to an LLM judge that the run sets itself."""


def _reward_servers(reward: RewardConfig) -> Iterator[tuple[str, RewardServerConfig]]:
    """Yield the key and the settings of every reward server: ``reward.http`` and ``reward.judge``."""
    for name, config in (("http", reward.http), ("judge", reward.judge)):
        if config is not None:
            yield f"reward.{name}", config


def check_servers(reward: RewardConfig) -> Iterator[UserError]:
    """Yield the errors for the settings of reward servers, without sending a request."""
    for section, config in _reward_servers(reward):
        yield from check_server(section, config)

    if reward.http is not None:
        yield from _sent_field_errors(reward.http.sends)
    if reward.judge is not None:
        yield from _judge_errors(reward.judge)


def check_teacher_server(config: TeacherServerConfig) -> Iterator[UserError]:
    """Yield the errors for the settings of a teacher's server, without sending a request."""
    yield from check_server("teacher_server", config)
    if config.key_from is not None:
        yield from _secret_variable_errors("teacher_server.key_from", config.key_from)


def unresponsive_teacher_warnings(config: TeacherServerConfig) -> Iterator[UserError]:
    """Yield a warning if the teacher's server does not respond now."""
    (problem,) = _send_requests([(config.url, None)])
    if problem is not None:
        yield UserError(
            "the teacher's server does not answer now",
            where="teacher_server.url",
            expected="an answer of any kind",
            got=problem,
            fix="start it before the run, or correct the address",
        )


def check_server(section: str, config: ServerConfig) -> Iterator[UserError]:
    """Yield the errors for the address and the headers of a server, without sending a request."""
    yield from _url_errors(f"{section}.url", config.url)
    for header, variable in config.headers.items():
        yield from _header_errors(f"{section}.headers", header)
        yield from _secret_variable_errors(f"{section}.headers", variable)


def _url_errors(key: str, url: str) -> Iterator[UserError]:
    """Yield the error for a URL that is invalid or contains a secret.

    The error does not print the URL if it contains a secret.
    """
    # urlsplit accepts almost any text, so check each component.
    try:
        split_url = urllib.parse.urlsplit(url)
        parameters = [name for name, _ in urllib.parse.parse_qsl(split_url.query)]
        has_spaces = re.search(r"[\s\x00-\x1f]", url) is not None
        is_valid = split_url.scheme in ("http", "https") and split_url.hostname and not has_spaces
        has_login = split_url.username is not None or split_url.password is not None

        # Do not print a URL with a secret in the report.
        if is_valid and (has_login or any(map(is_secret, parameters))):
            yield UserError(
                "the server URL contains a secret, and a run writes its settings to files",
                where=key,
                expected="a URL without user, password or key",
                got=f"a URL of {split_url.hostname} with a user, password or key",
                fix="put the secret into an environment variable, and name the variable in headers: "
                "Authorization: SERVER_TOKEN",
            )
            return

        # urlsplit accepts port 0, on which no server listens.
        problem = None
        if not is_valid or split_url.port == 0:
            problem = repr(url)
    except ValueError as error:  # urlsplit refuses unbalanced brackets and invalid ports
        problem = f"{url!r}: {error}"
    if problem is not None:
        yield UserError(
            "invalid server URL",
            where=key,
            expected="http://HOST:PORT/PATH or https://HOST/PATH",
            got=problem,
            fix="correct it",
        )


def _header_errors(key: str, header: str) -> Iterator[UserError]:
    """Yield the error for an invalid name of an HTTP header."""
    if not _HEADER_NAME.fullmatch(header):
        yield UserError(
            "invalid name of an HTTP header",
            where=key,
            expected="letters, digits and -",
            got=repr(header),
            fix="correct the name",
        )


def _secret_variable_errors(key: str, name: str) -> Iterator[UserError]:
    """Yield the error for a secret whose environment variable has an invalid name or no valid value.

    The name must look like the name of a secret (`is_secret`), such as ``SERVER_TOKEN``, since variables with
    such names are hidden from user code. An invalid name may be the secret itself, so it is not printed.
    """
    if not _VARIABLE_NAME.fullmatch(name) or not is_secret(name):
        yield UserError(
            "a secret has to be named by an environment variable with the name of a secret, such as "
            "SERVER_TOKEN, which is hidden from user code",
            where=key,
            expected="the name of an environment variable that looks like a secret's, such as SERVER_TOKEN "
            "or MY_API_KEY",
            got=f"{len(name)} characters, which are not the name of such a variable",
            fix="put the secret into such a variable, and write the name of the variable here",
        )
        return

    # The run reads the variable on this machine.
    secret = os.environ.get(name, "")
    if secret.strip() and secret.isprintable() and secret.isascii():
        return

    got = "nothing"
    if secret.strip():
        got = "text that is invalid in a header"
    yield UserError(
        f"the environment variable {name} has no valid secret",
        where=key,
        expected="one line of printable characters",
        got=got,
        fix=f"export {name}=... where the run is started",
    )


def _sent_field_errors(sent_fields: tuple[str, ...]) -> Iterator[UserError]:
    """Yield the errors for ``reward.http.sends``, the fields of a sample that a request contains."""
    if not sent_fields:
        yield UserError(
            "`reward.http.sends` is empty: a request would have no sample",
            where="reward.http.sends",
            expected=f"some of {', '.join(SENDABLE_PARTS)}",
            got="nothing",
            fix="remove the setting",
        )
    for name in sent_fields:
        if name not in SENDABLE_PARTS:
            yield unknown_choice_error("reward.http.sends", name, list(SENDABLE_PARTS))


def _judge_errors(judge: JudgeConfig) -> Iterator[UserError]:
    """Yield the errors for an LLM judge: its API key, its template and the parameters of its requests."""
    if judge.key_from is not None:
        yield from _secret_variable_errors("reward.judge.key_from", judge.key_from)
    if not is_function_path(judge.template) and "{response}" not in judge.template:
        yield UserError(
            "the judge's template does not contain the response",
            where="reward.judge.template",
            expected="text with {response}, or path/to/file.py:function",
            got=f"{judge.template!r:.80}",
            fix="write {response} at the position of the response",
        )

    # The run sets these parameters itself: the parser of responses depends on them.
    for name in _SET_BY_JUDGE:
        if name in judge.parameters:
            fix = "remove it"
            if name == "model":
                fix = "set reward.judge.model"
            yield UserError(
                f"`reward.judge.parameters.{name}` is set by the run itself",
                where=f"reward.judge.parameters.{name}",
                expected=f"parameters other than {', '.join(_SET_BY_JUDGE)}",
                got=repr(name),
                fix=fix,
            )


def unresponsive_server_warnings(
    reward: RewardConfig, rollout_urls: Sequence[str] = (), health_path: str | None = None
) -> Iterator[UserError]:
    """Yield warnings about servers that do not respond now; they may be up when the run starts.

    ``rollout_urls`` are the URLs of the rollout engine's servers. These servers must respond with status 200
    at ``health_path``, or with any status for an engine without a health path.
    """
    # Any response of a reward server counts; the engine's servers have a health endpoint.
    reward_urls = {section: config.url for section, config in _reward_servers(reward)}

    requests: list[tuple[str, str | None]] = [(url, None) for url in reward_urls.values()]
    requests += [(url, health_path) for url in rollout_urls]

    # In parallel: each unreachable server needs the complete timeout.
    problems = _send_requests(requests)

    reward_problems = problems[: len(reward_urls)]
    for section, problem in zip(reward_urls, reward_problems, strict=True):
        if problem is not None:
            yield UserError(
                "the reward server does not answer now",
                where=f"{section}.url",
                expected="an answer of any kind",
                got=problem,
                fix="start it before the run, or correct the address",
            )

    rollout_problems = problems[len(reward_urls) :]
    problem_lines = [
        f"{url}: {problem}"
        for url, problem in zip(rollout_urls, rollout_problems, strict=True)
        if problem is not None
    ]
    if problem_lines:
        yield UserError(
            f"{len(problem_lines)} of {len(rollout_urls)} servers of the rollout engine do not answer now",
            where="rollout.server.urls",
            expected="a server of rollout.engine at each address, started as SERVERS shows",
            got="\n".join(problem_lines),
            fix="start them before the run, or correct the addresses",
        )


def _send_requests(requests: Sequence[tuple[str, str | None]]) -> list[str | None]:
    """Send a request to each (URL, health path) in parallel.

    Returns for each request an error message, or None if the server is healthy (`_send_request`).
    """
    problems: list[str | None] = [f"no answer within {RESPONSE_SECONDS:g} s"] * len(requests)

    def send(index: int) -> None:
        problems[index] = _send_request(*requests[index])

    # Use daemon threads instead of a pool: a DNS lookup can block longer than `check` waits, and a pool would
    # wait for the lookup at exit.
    threads = [threading.Thread(target=send, args=(index,), daemon=True) for index in range(len(requests))]
    deadline = time.monotonic() + RESPONSE_SECONDS
    for thread in threads:
        thread.start()

    # All threads share one deadline.
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(problems)  # a copy, since late threads still write to it


def _send_request(url: str, health_path: str | None) -> str | None:
    """Send one request to ``url``; return an error message, or None if the server is healthy.

    A server is healthy if it responds with status 200 at ``health_path``. Without a ``health_path``, a
    response with any status is enough.
    """
    split_url = urllib.parse.urlsplit(url)
    address = split_url.netloc
    connection: http.client.HTTPConnection
    try:
        if split_url.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(address, timeout=RESPONSE_SECONDS, context=context)
        else:
            connection = http.client.HTTPConnection(address, timeout=RESPONSE_SECONDS)

        # A HEAD request starts no computation on a reward server, and any response shows that it is up.
        if health_path is not None:
            connection.request("GET", health_path)
        else:
            connection.request("HEAD", split_url.path or "/")

        status = connection.getresponse().status
        connection.close()
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"

    if health_path is not None and status != 200:
        return f"HTTP status {status} at {health_path}"
    return None


def evaluation_set_errors(name: str, evaluation_set: EvaluationSetConfig) -> Iterator[UserError]:
    """Yield the errors for an evaluation set's name, its evaluators' names and its functions."""
    set_key = f"evaluation.sets.{name}"
    yield from name_errors(set_key, name)

    # An evaluator's metrics have its name, which must differ from the names of the set's own metrics.
    failure_metrics = [f"{evaluator}_failed" for evaluator in evaluation_set.evaluators]
    reserved_names = [*evaluation_set.metric_names(), *failure_metrics]

    for evaluator in evaluation_set.evaluators:
        yield from name_errors(f"{set_key}.evaluators", evaluator, reserved_names)

    for key, function in evaluation_set.user_functions().items():
        yield from check_function(FunctionRef(function, f"{set_key}.{key}"))


def best_metric_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the error for a metric in ``checkpoint.best`` that no evaluation computes.

    ``evaluation.patience`` without ``checkpoint.best`` is an error, too.
    """
    # Patience counts evaluations in which the metric of `checkpoint.best` has not improved.
    best = config.checkpoint.best
    if best is None:
        if config.evaluation.patience is not None:
            fix = "set checkpoint.best=eval/NAME/accuracy, or remove evaluation.patience"
            patience = config.evaluation.patience
            yield requirement_error(
                "evaluation.patience", patience, "checkpoint.best", got="no value", fix=fix
            )
        return

    # An evaluator that returns several numbers has a metric for each number, named EVALUATOR/NUMBER.
    metrics: list[str] = []
    evaluators: list[str] = []
    for name, evaluation_set in config.evaluation.sets.items():
        metrics += [f"eval/{name}/{metric}" for metric in evaluation_set.metric_names()]
        evaluators += [f"eval/{name}/{evaluator}" for evaluator in evaluation_set.evaluators]
    metrics += evaluators
    if best in metrics or any(best.startswith(f"{evaluator}/") for evaluator in evaluators):
        return

    if not metrics:
        fix = "add a set to evaluation.sets, or remove checkpoint.best"
        condition = "an evaluation set that measures it"
        yield requirement_error("checkpoint.best", best, condition, got="none", fix=fix)
        return
    yield unknown_choice_error(
        "checkpoint.best", best, metrics, fallback_fix="name a metric of a set in evaluation.sets"
    )


_FORBIDDEN_FOLDERS = ("/", "/proc", "/dev", "/sys")
"""Folders that sandboxed code may never read as a whole: they expose other processes and every device."""


def sandbox_limits(config: RunConfig) -> dict[str, LimitsConfig]:
    """Return the resource limits of user code in sandboxed processes: configuration key -> limits."""
    if config.job != TRAIN:
        return {}

    # Functions of evaluation sets run under the limits of the reward function.
    reward = config.reward
    limits_by_key: dict[str, LimitsConfig] = {}
    runs_functions = config.reward_functions or config.evaluation.sets
    if runs_functions or config.rollout.filters.function is not None:
        limits_by_key["reward.limits"] = reward.limits
    if reward.code is not None:
        limits_by_key["reward.code.limits"] = reward.code.limits
    if reward.judge is not None:
        limits_by_key["reward.judge.limits"] = reward.judge.limits
    if config.rollout.environment is not None:
        limits_by_key["rollout.environment.limits"] = config.rollout.environment.limits
    return limits_by_key


def check_limits(section: str, limits: LimitsConfig, files: FileFindings) -> Iterator[UserError]:
    """Yield the errors for paths and environment variables in the limits of sandboxed code.

    ``section`` is the key of the limits. Paths that do not exist are added to ``files``.
    """
    for readable_path in limits.read:
        # Compare the real path, since a link may lead to a forbidden folder.
        path = Path(os.path.expanduser(readable_path))
        if os.path.realpath(path) in _FORBIDDEN_FOLDERS:
            yield UserError(
                f"sandboxed code must not read all of {readable_path}",
                where=f"{section}.read",
                expected="the path of each file, folder or device that the code reads",
                got=readable_path,
                fix=f"name the paths below {readable_path} that the code reads",
            )
        elif not path.exists():
            message = f"a path that sandboxed code may read does not exist: {readable_path}"
            files.record_missing(path, message, f"{section}.read", "existing files and folders")

    for name in limits.environment:
        if not name or "=" in name:
            yield UserError(
                "invalid name of an environment variable",
                where=f"{section}.environment",
                expected="names of variables, without values",
                got=repr(name),
                fix="name the variable, and set it where the run is started",
            )


def check_enforcement(limits_by_key: Mapping[str, LimitsConfig]) -> Iterator[UserError]:
    """Yield warnings about limits that this machine's kernel does not enforce.

    ``limits_by_key`` maps a configuration key, such as ``reward.limits``, to its limits. For each key, a
    sandboxed process is started with the limits, and reports the limits that the kernel does not enforce. If
    two keys have the same report, only the first key gets a warning.
    """
    reports: set[str] = set()
    for key, limits in limits_by_key.items():
        # Environments connect to the engine over the loopback interface.
        settings = asdict(limits) | {"loopback": key.startswith("rollout.environment")}
        try:
            unenforced = unenforced_protections(settings)
        except LoadFailed as error:
            unenforced = [f"no sandboxed process can be started ({error.reason})"]

        report = "\n".join(unenforced)
        if not report or report in reports:
            continue

        reports.add(report)
        yield UserError(
            "this machine cannot enforce all limits on the user's code",
            where=key,
            expected="a kernel that gives a process namespaces, Landlock and seccomp",
            got=report,
            fix="see the table of containment in docs/limits.md; in a container, allow namespaces "
            "(docker run --security-opt seccomp=unconfined --security-opt systempaths=unconfined)",
        )
