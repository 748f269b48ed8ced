"""List of a run's starts: time, command, code revision, versions and hardware of each job of the run.

Each job appends its start to ``starts.json`` of the run folder. The report shows command, hardware and
versions from this file, and a comparison of runs shows the settings that the users have set.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_rl.config.run_folder import RunFolder, set_aside
from megatron_rl.durable import write_text
from megatron_rl.launcher import CONSOLE_SCRIPT
from megatron_rl.redaction import HIDDEN, is_secret

PACKAGE = Path(__file__).resolve().parents[1]
"""Folder of this package; it has a git revision if the package runs from a git checkout."""
_GIT_SECONDS = 10.0
"""Time limit of a git command in seconds: git reads every changed file, which can take long."""


@dataclass(frozen=True)
class Start:
    """Record of one launch of a run: time, command line, code revisions, library versions and hardware.

    Example: ``Start("2026-08-01T10:00:00+00:00", "torchrun --nproc-per-node 4 -m megatron_rl train run.yaml",
    explicit=("model.path", "steps"))``.
    """

    time: str
    """Time of the start in ISO format, with the offset to UTC."""
    command: str
    """Command line, with the values of secrets replaced by ``(hidden)``."""
    revision: str | None = None
    """Git revision of this package, ``-dirty`` with changes; None if it is not a checkout."""
    working_revision: str | None = None
    """Git revision of the checkout in which the command was called, or None outside of a checkout."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Versions of Python and of the distributions on which numbers depend."""
    hardware: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Host, processor, cores, device and ranks."""
    explicit: tuple[str, ...] = ()
    """Configuration keys that the user has set, in the file or on the command line."""

    @property
    def start_time(self) -> datetime | None:
        """Return the time of the start as a datetime, or None if the stored text is not a valid time."""
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(self.time)
        return None


def describe_current_start(
    versions: Mapping[str, str],
    hardware: Mapping[str, Any],
    explicit_keys: Sequence[str],
) -> Start:
    """Return the record of this launch, with the current time, the command line and the code revisions.

    ``versions``: versions of Python and of libraries. ``hardware``: host, processor, cores, device and ranks.
    ``explicit_keys``: configuration keys that the user has set.
    """
    return Start(
        time=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=format_command(sys.argv, os.environ),
        revision=git_revision(PACKAGE),
        working_revision=git_revision(Path.cwd()),
        versions=versions,
        hardware=hardware,
        explicit=tuple(explicit_keys),
    )


def write_start(folder: RunFolder, start: Start, *, resumed: bool) -> None:
    """Append the record of a launch to the run folder's ``starts.json``.

    If ``resumed`` is False, an existing file is from an earlier run. It is renamed, and a new file begins.
    """
    if not resumed:
        set_aside(folder.starts)
    starts = [*read_starts(folder), start]
    plain_starts = [asdict(recorded_start) for recorded_start in starts]
    write_text(folder.starts, json.dumps(plain_starts, indent=1, default=str) + "\n")


def read_starts(folder: RunFolder) -> list[Start]:
    """Return the records of a run's launches, oldest first, up to the first damaged record of the file."""
    # The records are only shown to the user: a missing or damaged file must not stop a run or its report.
    starts: list[Start] = []
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        for values in json.loads(folder.starts.read_text(encoding="utf-8")):
            starts.append(Start(**values | {"explicit": tuple(values["explicit"])}))
    return starts


def format_command(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a command line that starts the same job on this machine, without the values of secrets.

    Example:
        >>> format_command(["/megatron_rl/__main__.py", "train", "a.yaml", "reward.arguments.api_key=k"], {})
        'python -m megatron_rl train a.yaml reward.arguments.api_key=(hidden)'
        >>> format_command(["/x/bin/megatron-rl", "check", "a.yaml"], {})
        'megatron-rl check a.yaml'
        >>> format_command(["train.py", "--api-key", "k", "a.yaml"], {})
        'python train.py --api-key (hidden) a.yaml'
    """
    program = Path(arguments[0])
    if program.name == "__main__.py":
        program_arguments = ["-m", program.parent.name]
    else:
        program_arguments = [str(program)]

    launcher = ["python"]
    # The installed program is on PATH.
    if program.name == CONSOLE_SCRIPT:
        launcher = []
        program_arguments = [program.name]

    # Reconstruct torchrun's arguments from the environment variables that it sets in its processes.
    if "TORCHELASTIC_RUN_ID" in environment:
        process_count = environment.get("LOCAL_WORLD_SIZE", "1")
        launcher = ["torchrun", "--nproc-per-node", process_count]
        node_count = environment.get("GROUP_WORLD_SIZE", "1")
        if node_count != "1":
            launcher += ["--nnodes", node_count]

    quoted_arguments: list[str] = []
    is_next_secret = False
    for argument in arguments[1:]:
        # A script's own option can have its secret in the next argument: `--api-key k`.
        is_option = argument.startswith("-")
        if is_next_secret and not is_option:
            quoted_arguments.append(HIDDEN)
        else:
            quoted_arguments.append(_quote_argument(argument))
        is_next_secret = is_option and "=" not in argument and is_secret(argument)
    return " ".join([*launcher, *map(shlex.quote, program_arguments), *quoted_arguments])


def _quote_argument(argument: str) -> str:
    """Quote a command-line argument for a shell; hide the value of an override that sets a secret."""
    key, separator, value = argument.partition("=")
    # A value can be a mapping with secrets in it: `reward.arguments={api_key: k}`.
    key_names = [*key.split("."), *re.findall(r"[\w-]+(?=\W*:)", value)]
    if separator and value and any(map(is_secret, key_names)):
        return f"{shlex.quote(key)}={HIDDEN}"
    return shlex.quote(argument)


def git_revision(folder: Path) -> str | None:
    """Return the git revision of a folder, or None if the folder is not in a git checkout.

    The revision ends with ``-dirty`` if the checkout has uncommitted changes.
    """
    # Without any tag (`--exclude=*`), the result is the commit's hash.
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
