"""The ``train`` command and the commands of the stages: check a configuration, then start the trainer."""

from __future__ import annotations

import argparse
import sys

from megatron_rl.cli.check_text import summary_lines
from megatron_rl.cli.common import add_config_arguments, load_and_check
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.errors import numbered_lines
from megatron_rl.imports import import_libraries
from megatron_rl.launcher import current_launch, process_rank, watch_launcher
from megatron_rl.trainer.logging import redirect_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments that ``train`` and the commands of the stages have in common."""
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check the configuration, train, and return the exit code.

    Every rank checks the same input before the first collective, so all ranks exit with the same errors and
    no rank hangs.
    """
    watch_launcher()
    world_size = current_launch(joins_group=True).world_size
    report = load_and_check(arguments, world_size, job=arguments.command, training=True)
    if report.warnings and process_rank() == 0:
        print("\n".join(numbered_lines(report.warnings, "warning")), file=sys.stderr, flush=True)

    # Raise the errors only after printing the warnings, which may explain them.
    config = report.valid()
    if process_rank() == 0:
        lines = [*summary_lines(report, arguments.config), "import torch, Megatron-Core and the engine …"]
        print("\n".join(lines), flush=True)

    # Import only after the check, since the import is slow. The libraries' output goes to the rank's log.
    log = RunFolder(config.run_dir).create().rank_log(process_rank())
    with redirect_output(log, is_main=False), import_libraries():
        from megatron_rl.trainer import run as trainer

    trainer.run(config, report.explicit_keys())
    return 0
