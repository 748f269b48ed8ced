"""Packages that are needed only for what some configurations name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.logging import TRACKERS
from megatron_rl.errors import UserError, nearest

GRADERS = {
    "megatron_rl.rewards.math_answer": ("math_verify", "math"),
    "megatron_rl.rewards.reasoning_gym": ("reasoning_gym", "reasoning-gym"),
    "megatron_rl.environments.reasoning_gym": ("reasoning_gym", "reasoning-gym"),
}
"""Module of what judges -> the module it needs, and the extra of this package that brings it."""


def logging_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield what is wrong with the names and the address of trackers."""
    logging = config.logging
    for name in logging.trackers:
        if name not in TRACKERS:
            close = nearest(name.lower(), TRACKERS)
            yield UserError(
                f"there is no tracker {name!r}",
                where="logging.trackers",
                expected=f"some of {', '.join(TRACKERS)}",
                got=repr(name),
                fix=f"did you mean {close}?" if close else "remove it",
            )
    host, _, port = (logging.prometheus or "localhost:1").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        yield UserError(
            "the address for Prometheus is not host:port",
            where="logging.prometheus",
            expected="a host or 0.0.0.0, a colon and a port from 1 to 65535",
            got=repr(logging.prometheus),
            fix="for example 0.0.0.0:9400",
        )


def missing_packages(config: RunConfig) -> Iterator[UserError]:
    """Yield an error for each optional package that the configuration needs and this machine lacks."""
    needed = [
        ("logging.trackers", name, TRACKERS[name], name)
        for name in config.logging.trackers
        if name in TRACKERS
    ]
    functions = {"reward.function": config.reward.function}
    if config.rollout.environment is not None:
        functions["rollout.environment.name"] = config.rollout.environment.name
    for key, described in config.evaluation.sets.items():
        functions |= {f"evaluation.sets.{key}.{name}": path for name, path in described.functions().items()}
    for where, function in functions.items():
        module, extra = GRADERS.get((function or "").partition(":")[0], (None, None))
        if module is not None and extra is not None:
            needed.append((where, str(function), module, extra))
    for where, named, module, extra in needed:
        if find_spec(module) is None:
            yield UserError(
                f"the package {module} is not installed on this machine",
                where=where,
                expected=f"the package {module} where the run is started",
                got=named,
                fix=f"pip install megatron_rl[{extra}], or name another",
            )
