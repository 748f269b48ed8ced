"""Check a configuration and show what follows from it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megatron_rl.cli.check_json import report_json
from megatron_rl.cli.check_picture import picture
from megatron_rl.cli.check_text import report_text
from megatron_rl.cli.common import add_config_arguments, checked
from megatron_rl.config.schema import JOBS
from megatron_rl.errors import EXIT_BAD_INPUT, UserError, UserErrors
from megatron_rl.launcher import launch, process_rank
from megatron_rl.planning.simulation.ranks import simulation, simulation_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``check``."""
    add_config_arguments(parser)
    parser.add_argument("--world-size", metavar="N", type=int, help="number of processes (GPUs) of the job")
    parser.add_argument(
        "--for", dest="job", metavar="COMMAND", choices=JOBS, help=f"what it is to run: {', '.join(JOBS)}"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for machines")
    parser.add_argument(
        "--without-files", action="store_true", help="missing model and data files are warnings"
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="run a step of the fullest ranks without machines, and compare",
    )
    parser.add_argument(
        "--picture", metavar="FILE", type=Path, help="write an SVG of ranks, roles and weights as well"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the check; the exit code is 2 where there are errors."""
    job = launch()
    world_size = None if job.alone else job.world_size
    if arguments.world_size is not None:
        world_size = arguments.world_size
    try:
        report = checked(arguments, world_size, job=arguments.job, without_files=arguments.without_files)
    except UserErrors as errors:
        if not arguments.json:
            raise
        failed = {"valid": False, "errors": [error.to_json() for error in errors.errors], "warnings": []}
        print(json.dumps(failed, indent=2))
        return EXIT_BAD_INPUT
    if process_rank() == 0:
        if arguments.picture is not None and report.layouts is not None:
            _write_picture(arguments.picture, picture(report, arguments.config))
        simulated = None if report.errors or not arguments.simulate else simulation(report)
        if arguments.json:
            more = {} if simulated is None else {"simulation": simulation_json(simulated)}
            print(json.dumps(report_json(report) | more, indent=2))
        else:
            print(report_text(report, arguments.config, simulated), flush=True)
            if report.errors:
                print(f"\n{len(report.errors)} error(s)", file=sys.stderr)
    return EXIT_BAD_INPUT if report.errors else 0


def _write_picture(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            "the picture cannot be written",
            where="--picture",
            expected="a file in a folder that is there and can be written to",
            got=f"{path}: {error.strerror}",
            fix="name another file",
        ) from error
