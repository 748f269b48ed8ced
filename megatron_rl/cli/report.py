"""The ``report`` command: write the table, the learning curve and the report of a run from its metrics."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.cli.common import require_directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments of ``report`` to its parser."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run folder with metrics.jsonl")


def run(arguments: argparse.Namespace) -> int:
    """Write the report of a run from its metrics, print its table, and return the exit code."""
    run_dir = Path(arguments.run_dir)
    require_directory(run_dir, "RUN_DIR")

    from megatron_rl.trainer import report

    report.write_report(run_dir)
    return 0
