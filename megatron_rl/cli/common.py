"""What the commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.check.configuration import CheckReport, check_config
from megatron_rl.check.model.megatron_settings import LONG_PATIENCE, PATIENCE
from megatron_rl.config.load import load
from megatron_rl.errors import UserError
from megatron_rl.launcher import process_rank


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG and the overrides."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, such as configs/quickstart.yaml")
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        default=[],
        help="values that replace the file's, such as actor.layout.tensor=2",
    )


def require_counts(arguments: argparse.Namespace, *names: str) -> None:
    """Raise UserError for the first of the named arguments that is given and below 1."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            option = "--" + name.replace("_", "-")
            raise UserError(
                f"{option} must be 1 or more",
                where=option,
                expected="1 or more",
                got=str(value),
                fix=f"set {option} to 1 or more",
            )


def require_at_most(arguments: argparse.Namespace, name: str, most: int) -> None:
    """Raise UserError where the named argument is above ``most``."""
    value = getattr(arguments, name)
    if value is not None and value > most:
        option = "--" + name.replace("_", "-")
        raise UserError(
            f"{option} is more than can be planned for",
            where=option,
            expected=f"at most {most:,}",
            got=f"{value:,}",
            fix=f"set {option} to {most} or less",
        )


def checked(
    arguments: argparse.Namespace,
    world_size: int | None,
    *,
    job: str | None = None,
    training: bool = False,
    without_files: bool = False,
) -> CheckReport:
    """Load and check the configuration of a command; raises UserErrors where it cannot be read at all.

    ``job`` None takes the configuration's own.
    """
    overrides = arguments.overrides if job is None else [*arguments.overrides, f"job={job}"]
    loaded = load(Path(arguments.config), overrides)
    patience = LONG_PATIENCE if training else PATIENCE
    folders = [above / "models" for file in loaded.files for above in (file.parent, file.parent.parent)]
    return check_config(
        loaded,
        world_size,
        training=training,
        without_files=without_files,
        shipped_models=next((folder for folder in folders if folder.is_dir()), None),
        patience=patience if process_rank() == 0 else 0,  # one rank of a job asks for all
    )
