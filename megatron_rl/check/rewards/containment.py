"""Rules on the limits of contained code: the paths that they name, and enforcement by this kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from megatron_rl.check.files import Files
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.bounds import LimitsConfig
from megatron_rl.contained.process import LoadFailed, unenforced_protections
from megatron_rl.errors import UserError

_FORBIDDEN_FOLDERS = ("/", "/proc", "/dev", "/sys")
"""Folders that contained code may never read as a whole: they expose other processes and every device."""


def contained_sections(config: RunConfig) -> dict[str, LimitsConfig]:
    """Return the limits of the code that a run contains, by the key of their section."""
    if config.job != TRAIN:
        return {}

    # Functions of evaluation sets run under the limits of the reward function.
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


def check_limits(section: str, limits: LimitsConfig, files: Files) -> Iterator[UserError]:
    """Yield the errors of the paths and variables that a section's limits name.

    Paths that do not exist are added to ``files``.
    """
    for entry in limits.read:
        # Compare the real path, since a link may lead to a forbidden folder.
        path = Path(os.path.expanduser(entry))
        if os.path.realpath(path) in _FORBIDDEN_FOLDERS:
            yield UserError(
                f"contained code cannot read all of {entry}",
                where=f"{section}.read",
                expected="files and folders that it reads, or devices by name",
                got=entry,
                fix="name the files in it that the code reads",
            )
        elif not path.exists():
            message = f"a path for contained code does not exist: {entry}"
            files.miss(path, message, f"{section}.read", "existing files and folders")

    for name in limits.environment:
        if not name or "=" in name:
            yield UserError(
                "invalid name of an environment variable",
                where=f"{section}.environment",
                expected="names of variables, without values",
                got=repr(name),
                fix="name the variable, and set it where the run is started",
            )


def check_enforced(sections: Mapping[str, LimitsConfig]) -> Iterator[UserError]:
    """Yield warnings of limits that this machine's kernel does not enforce.

    A contained process is started with the limits of each section and reports which of them are not in force;
    sections with the same report get one warning.
    """
    reports: set[str] = set()
    for section, limits in sections.items():
        # Environments connect to the engine over the loopback interface.
        settings = asdict(limits) | {"loopback": section.startswith("rollout.environment")}
        try:
            unenforced = unenforced_protections(settings)
        except LoadFailed as error:
            unenforced = [f"no contained process can be started ({error.reason})"]

        # One warning for sections with the same report.
        report = "\n".join(unenforced)
        if not report or report in reports:
            continue

        reports.add(report)
        yield UserError(
            "the code of the run is not contained in full on this machine",
            where=section,
            expected="a kernel that gives a process namespaces, Landlock and seccomp",
            got=report,
            fix="see the table of containment in docs/limits.md; in a container, allow namespaces "
            "(docker run --security-opt seccomp=unconfined --security-opt systempaths=unconfined)",
        )
