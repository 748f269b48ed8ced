"""Rules on the limits of contained code: what they name is there, and what this kernel does not enforce."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from megatron_rl.check.files import Files
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.bounds import LimitsConfig
from megatron_rl.contained.process import LoadFailed, not_enforced
from megatron_rl.errors import UserError

_NEVER = ("/", "/proc", "/dev", "/sys")


def contained_sections(config: RunConfig) -> dict[str, LimitsConfig]:
    """Return the limits of the code that a run contains, by the path of their section."""
    if config.job != TRAIN:
        return {}
    reward = config.reward
    sections: dict[str, LimitsConfig] = {}
    if reward.function is not None or config.evaluation.sets:
        sections["reward.limits"] = reward.limits
    if reward.code is not None:
        sections["reward.code.limits"] = reward.code.limits
    if reward.judge is not None:
        sections["reward.judge.limits"] = reward.judge.limits
    if config.rollout.environment is not None:
        sections["rollout.environment.limits"] = config.rollout.environment.limits
    return sections


def check_limits(where: str, limits: LimitsConfig, files: Files) -> Iterator[UserError]:
    """Yield what is wrong with paths and variables that limits name; ``files`` collects what is missing."""
    for entry in limits.read:
        path = Path(os.path.expanduser(entry))
        if os.path.realpath(path) in _NEVER:
            yield UserError(
                f"contained code cannot have all of {entry}",
                where=f"{where}.read",
                expected="files and folders that it reads, or devices by name",
                got=entry,
                fix="name what it reads there",
            )
        elif not path.exists():
            message = f"what contained code is to see does not exist: {entry}"
            files.miss(path, message, f"{where}.read", "existing files and folders")
    for name in limits.environment:
        if not name or "=" in name:
            yield UserError(
                "the name of an environment variable cannot be one",
                where=f"{where}.environment",
                expected="names of variables, without values",
                got=repr(name),
                fix="name the variable, and set it where the run is started",
            )


def check_enforced(sections: Mapping[str, LimitsConfig]) -> Iterator[UserError]:
    """Yield warnings of what this machine's kernel does not enforce.

    A contained process is started for each section, and reports it; the same report is made once.
    """
    reports: set[str] = set()
    for where, limits in sections.items():
        try:
            missing = not_enforced(asdict(limits) | {"loopback": where.startswith("rollout.environment")})
        except LoadFailed as error:
            missing = [f"no contained process can be started ({error.reason})"]
        report = "\n".join(missing)
        if report and report not in reports:
            reports.add(report)
            yield UserError(
                "the code of the run is not contained in full on this machine",
                where=where,
                expected="a kernel that gives a process namespaces, Landlock and seccomp",
                got=report,
                fix="see the table of containment in docs/limits.md; in a container, allow namespaces "
                "(docker run --security-opt seccomp=unconfined --security-opt systempaths=unconfined)",
            )
