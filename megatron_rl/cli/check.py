"""The ``check`` command: check a configuration and show what follows from it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from megatron_rl.algorithms.lookup import scoring_reason
from megatron_rl.check.configuration import CheckReport
from megatron_rl.cli.check_picture import picture
from megatron_rl.cli.check_text import report_text
from megatron_rl.cli.common import add_config_arguments, load_and_check
from megatron_rl.config.budget import PHASES
from megatron_rl.config.load import flatten, to_plain
from megatron_rl.config.schema import JOBS
from megatron_rl.errors import EXIT_BAD_INPUT, UserError, UserErrors
from megatron_rl.launcher import launch, process_rank
from megatron_rl.planning.simulation.ranks import simulate_ranks, simulation_json


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
        report = load_and_check(
            arguments, world_size, job=arguments.job, without_files=arguments.without_files
        )
    except UserErrors as errors:
        if not arguments.json:
            raise
        record = {"valid": False, "errors": [error.to_json() for error in errors.errors], "warnings": []}
        print(json.dumps(record, indent=2))
        return EXIT_BAD_INPUT

    # Under torchrun every rank checks, and one prints.
    if process_rank() == 0:
        _print_report(arguments, report)
    return EXIT_BAD_INPUT if report.errors else 0


def _print_report(arguments: argparse.Namespace, report: CheckReport) -> None:
    """Print a report in the form that the arguments ask for, after the picture and the simulation."""
    if arguments.picture is not None and report.layouts is not None:
        _write_picture(arguments.picture, picture(report, arguments.config))

    simulated = None
    if arguments.simulate and not report.errors:
        simulated = simulate_ranks(report)

    if arguments.json:
        record = report_json(report)
        if simulated is not None:
            record["simulation"] = simulation_json(simulated)
        print(json.dumps(record, indent=2))
        return
    print(report_text(report, arguments.config, simulated), flush=True)
    if report.errors:
        print(f"\n{len(report.errors)} error(s)", file=sys.stderr)


def report_json(report: CheckReport) -> dict[str, Any]:
    """Return the report as plain values; sizes are in bytes, lengths in tokens."""
    config = {}
    for path, value in flatten(report.config).items():
        origin = report.origins[path]
        config[path] = {"value": to_plain(value), "origin": origin.kind, "detail": origin.detail}

    roles = {
        role: {**dataclasses.asdict(layout), "data": layout.data}
        for role, layout in (report.layouts or {}).items()
    }
    memory = [
        {
            "rank": rank_memory.rank,
            "total": {phase: rank_memory.total(phase) for phase in PHASES},
            "items": [dataclasses.asdict(item) for item in rank_memory.items],
        }
        for rank_memory in report.memory
    ]

    # Null where the check did not get that far.
    model = None
    if report.shape is not None:
        model = {**dataclasses.asdict(report.shape), "parameters": report.shape.parameters}
    weight_sync = None
    if report.sync is not None:
        weight_sync = {**dataclasses.asdict(report.sync), "received_most": report.sync.received_most}

    return {
        "valid": not report.errors,
        "untried": report.untried,
        "world_size": report.world_size,
        "errors": [error.to_json() for error in report.errors],
        "warnings": [warning.to_json() for warning in report.warnings],
        "config": config,
        "batch": dataclasses.asdict(report.batch) if report.batch else None,
        "scoring_pass": scoring_reason(report.config, report.algorithm) if report.algorithm else None,
        "roles": roles,
        "model": model,
        "memory": memory,
        "weight_sync": weight_sync,
        "training_records": report.records,
        "data": [dataclasses.asdict(stats) for stats in report.looked],
    }


def _write_picture(path: Path, svg: str) -> None:
    """Write the picture; raises UserError where its folder does not exist or cannot be written to."""
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise UserError(
            "the picture cannot be written",
            where="--picture",
            expected="a file in a folder that is there and can be written to",
            got=f"{path}: {error.strerror}",
            fix="name another file",
        ) from error
