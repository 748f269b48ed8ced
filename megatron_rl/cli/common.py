"""Command-line arguments and checks that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.check.configuration import CheckReport, check_file
from megatron_rl.errors import UserError, range_error


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of commands that read a configuration: its path (CONFIG) and the overrides."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, such as configs/quickstart.yaml")
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        default=[],
        help="values that replace the file's, such as actor.layout.tensor=2",
    )


def require_counts(arguments: argparse.Namespace, *names: str, at_most: int | None = None) -> None:
    """Raise UserError if one of the arguments ``names`` is below 1 or above ``at_most``.

    Omitted arguments are valid. Without ``at_most``, there is no upper limit.
    """
    for name in names:
        value = getattr(arguments, name)
        if value is None or (value >= 1 and (at_most is None or value <= at_most)):
            continue

        expected = "1 or more"
        if at_most is not None:
            expected = f"1 to {at_most:,}"
        option = "--" + name.replace("_", "-")
        raise range_error(option, value, expected, fix=f"set {option} to {expected}")


def require_directory(path: Path, argument: str) -> None:
    """Raise UserError unless ``path``, the value of a command's ``argument``, is a directory."""
    if path.is_dir():
        return

    # The mistake is most likely in the last component of the path, so list the directories next to it.
    siblings = []
    if path.parent.is_dir():
        siblings = sorted(child.name for child in path.parent.iterdir() if child.is_dir())
    fix = "correct the path"
    if siblings:
        fix = f"other directories there: {', '.join(siblings[:8])}"

    got = "no such path"
    if path.exists():
        got = "a file"
    raise UserError(
        f"there is no directory {path}",
        where=argument,
        expected="an existing directory",
        got=got,
        fix=fix,
    )


def load_and_check(
    arguments: argparse.Namespace,
    world_size: int | None,
    *,
    job: str | None = None,
    training: bool = False,
    without_files: bool = False,
    gpu: str | None = None,
) -> CheckReport:
    """Load and check the configuration of a command; raise UserErrors if the file cannot be read.

    Args:
        arguments: The command's arguments, with those added by `add_config_arguments`.
        world_size: Number of ranks, in place of the configured value; None keeps the configured value.
        job: Job, such as ``sft``, in place of the configured value; None keeps the configured value.
        training: Whether the run starts after this check.
        without_files: Whether missing files are warnings instead of errors.
        gpu: Type of GPU to check for, such as ``h100``; None for the devices of this machine.
    """
    # Append to the user's overrides, since the last override of a key takes effect.
    overrides = list(arguments.overrides)
    if job is not None:
        overrides.append(f"job={job}")

    if gpu is not None:
        # Reset the memory in the file, which belongs to another GPU.
        overrides += [f"gpu={gpu}", "gpu_memory_gib=null"]

    return check_file(
        arguments.config,
        overrides,
        world_size,
        training=training,
        without_files=without_files,
        on_other_machines=gpu is not None,
    )
