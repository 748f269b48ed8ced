"""Rules on optional packages, which must be installed on this machine if the configuration needs them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

from megatron_rl.config.derive import has_transformer_engine
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.logging import TRACKERS
from megatron_rl.errors import UserError, not_installed_error, unknown_choice_error

PACKAGE_BY_MODULE = {
    "megatron_rl.rewards.math_answer": ("math_verify", "math"),
    "megatron_rl.rewards.reasoning_gym": ("reasoning_gym", "reasoning-gym"),
    "megatron_rl.environments.reasoning_gym": ("reasoning_gym", "reasoning-gym"),
}
"""Module of a reward function or environment -> (optional package, extra of this project)."""


_UNIMPORTED = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
"""Start of the exception's text when user code imports a package that is not installed."""


class _Requirement(NamedTuple):
    """Optional package that a configured value needs: key, value, package, and the extra that installs it."""

    key: str
    value: str
    package: str
    extra: str


def logging_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors for unknown trackers and for a malformed Prometheus address."""
    logging = config.logging

    for name in logging.trackers:
        if name not in TRACKERS:
            yield unknown_choice_error("logging.trackers", name, list(TRACKERS))

    if logging.prometheus is None:
        return

    # Split at the last colon, since an IPv6 host contains colons.
    host, _, port = logging.prometheus.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        yield UserError(
            "the address for Prometheus is not host:port",
            where="logging.prometheus",
            expected="a host or 0.0.0.0, a colon and a port from 1 to 65535",
            got=repr(logging.prometheus),
            fix="for example 0.0.0.0:9400",
        )


def check_attention(config: RunConfig) -> Iterator[UserError]:
    """Yield the error for ``model.attention: transformer_engine`` without an installed Transformer Engine."""
    if config.model.attention == "transformer_engine" and not has_transformer_engine():
        yield UserError(
            "Transformer Engine is not installed on this machine, or lacks its PyTorch extension",
            where="model.attention",
            expected="Transformer Engine with its extension, where the run is started",
            got="transformer_engine",
            fix="launch/setup.sh --gpu, which compiles it for the installed torch; or model.attention=torch, "
            "whose activations take more memory",
        )


def missing_package_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield an error for each optional package that the configuration needs and this machine lacks."""
    for requirement in _required_packages(config):
        if find_spec(requirement.package) is None:
            yield not_installed_error(
                f"the package {requirement.package}",
                requirement.key,
                purpose=requirement.value,
                fix=f"pip install megatron_rl[{requirement.extra}], or choose another",
            )


def split_import_errors(errors: Iterable[UserError]) -> tuple[list[UserError], list[UserError]]:
    """Split errors into (import errors, other errors); an import error is due to a missing package.

    Only imports inside the user's code count: a package that this machine lacks may be installed on the
    machines of the run.
    """
    import_errors: list[UserError] = []
    other_errors: list[UserError] = []
    for error in errors:
        match = _UNIMPORTED.match(error.got or "")
        # A module that the configuration itself names is probably misspelled.
        if match is None or error.message == f"cannot import {match[1]}":
            other_errors.append(error)
        else:
            fix = f"install {match[1].partition('.')[0]} on this machine too, to have the code tested"
            import_errors.append(replace(error, fix=fix))
    return import_errors, other_errors


def _required_packages(config: RunConfig) -> Iterator[_Requirement]:
    """Yield the optional packages that trackers, reward functions, evaluators and the environment need."""
    for tracker in config.logging.trackers:
        if tracker in TRACKERS:
            yield _Requirement("logging.trackers", tracker, TRACKERS[tracker], tracker)

    # This project's own functions and environments that import an optional package.
    functions: dict[str, str | None] = dict(config.reward_functions)
    if config.rollout.environment is not None:
        functions["rollout.environment.name"] = config.rollout.environment.name
    for set_name, evaluation_set in config.evaluation.sets.items():
        for evaluator_key, function in evaluation_set.user_functions().items():
            functions[f"evaluation.sets.{set_name}.{evaluator_key}"] = function

    for key, function in functions.items():
        module = (function or "").partition(":")[0]
        if module in PACKAGE_BY_MODULE:
            package, extra = PACKAGE_BY_MODULE[module]
            yield _Requirement(key, str(function), package, extra)
