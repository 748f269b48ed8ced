"""The ``check`` command: check a configuration, and print errors, warnings and the plan of the run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from megatron_rl.algorithms.lookup import scoring_pass_reason
from megatron_rl.check.configuration import CheckReport
from megatron_rl.cli.check_picture import draw_svg
from megatron_rl.cli.check_text import report_text
from megatron_rl.cli.common import add_config_arguments, load_and_check
from megatron_rl.config.budget import PHASES
from megatron_rl.config.load import flatten, to_plain
from megatron_rl.config.placement import process_group_counts
from megatron_rl.config.schema import JOBS
from megatron_rl.errors import EXIT_BAD_INPUT, UserError, UserErrors, unknown_choice_error
from megatron_rl.launcher import current_launch, process_rank
from megatron_rl.planning.predict.step import predict_checked_step
from megatron_rl.planning.simulation.ranks import simulate_ranks, simulation_json
from megatron_rl.shapes.hardware import load_constants


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments of ``check`` to its parser."""
    add_config_arguments(parser)
    parser.add_argument("--world-size", metavar="N", type=int, help="number of processes (GPUs) of the job")
    parser.add_argument(
        "--for",
        dest="job",
        metavar="COMMAND",
        choices=JOBS,
        help=f"command that will run it: {', '.join(JOBS)}",
    )

    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also print every value, the ranks, and memory by item"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    parser.add_argument(
        "--on", metavar="GPU", help="check for a cluster with this GPU, such as h100, not for this machine"
    )
    parser.add_argument(
        "--without-files", action="store_true", help="report missing model and data files as warnings"
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="simulate a step on the ranks with the most memory, without GPUs, and compare the estimate",
    )
    parser.add_argument(
        "--picture",
        metavar="FILE",
        type=Path,
        help="also write an SVG of nodes, roles, weights and groups",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check the configuration and print the report; return exit code 2 if it has errors."""
    # The option has precedence over torchrun's world size, and torchrun's over the configuration's.
    launch = current_launch()
    world_size = arguments.world_size
    if world_size is None and not launch.alone:
        world_size = launch.world_size

    if arguments.on is not None:
        _require_gpu(arguments.on)
    # If the file cannot be read as a configuration, there is no report: the errors are raised.
    try:
        report = load_and_check(
            arguments,
            world_size,
            job=arguments.job,
            without_files=arguments.without_files,
            gpu=arguments.on,
        )
    except UserErrors as errors:
        if not arguments.json:
            raise
        record = {"valid": False, "errors": [error.to_json() for error in errors.errors], "warnings": []}
        print(json.dumps(record, indent=2))
        return EXIT_BAD_INPUT

    # Under torchrun every rank checks, and only the first one prints.
    if process_rank() == 0:
        _print_report(arguments, report)
    if report.errors:
        return EXIT_BAD_INPUT
    return 0


def _require_gpu(name: str) -> None:
    """Raise UserError for a GPU name that is not in the planner's constants.json."""
    constants = load_constants()
    if name not in constants.gpus and name.lower() not in constants.aliases:
        raise unknown_choice_error("--on", name, sorted(constants.aliases), fallback_fix="choose one of them")


def _print_report(arguments: argparse.Namespace, report: CheckReport) -> None:
    """Print the report as text or JSON; before that, write the picture and simulate ranks if requested."""
    # The picture needs layouts, which a configuration with errors may not have.
    if arguments.picture is not None and report.layouts is not None:
        _write_picture(arguments.picture, draw_svg(report, arguments.config))

    # Simulation builds the models, which needs a configuration without errors.
    simulated_ranks = None
    if arguments.simulate and not report.errors:
        simulated_ranks = simulate_ranks(report)

    # Print only JSON, so that a program can parse the output.
    if arguments.json:
        record = report_json(report)
        if simulated_ranks is not None:
            record["simulation"] = simulation_json(simulated_ranks)
        print(json.dumps(record, indent=2))
        return

    text = report_text(report, arguments.config, simulated_ranks, verbose=arguments.verbose)
    print(text, flush=True)
    if report.errors:
        print(f"\n{len(report.errors)} error(s)", file=sys.stderr)


def report_json(report: CheckReport) -> dict[str, Any]:
    """Return the report of a check as plain values for JSON; sizes are in bytes, lengths in tokens."""
    config = {}
    for path, value in flatten(report.config).items():
        origin = report.origins[path]
        config[path] = {"value": to_plain(value), "origin": origin.kind, "detail": origin.detail}

    # The data-parallel size is derived, so it is not a field of a layout.
    layouts = report.layouts or {}
    roles = {}
    for role, layout in layouts.items():
        roles[role] = dataclasses.asdict(layout) | {"data": layout.data}
    memory = [
        {
            "rank": rank_memory.rank,
            "total": {phase: rank_memory.phase_peak(phase) for phase in PHASES},
            "items": [dataclasses.asdict(item) for item in rank_memory.items],
        }
        for rank_memory in report.memory
    ]

    # These values are null if errors prevented their computation.
    batch = None
    if report.batch is not None:
        batch = dataclasses.asdict(report.batch)
    scoring_pass = None
    if report.algorithm is not None:
        scoring_pass = scoring_pass_reason(report.config, report.algorithm)
    model = None
    if report.shape is not None:
        model = {**dataclasses.asdict(report.shape), "parameters": report.shape.parameters}
    weight_sync = None
    if report.sync is not None:
        weight_sync = {
            **dataclasses.asdict(report.sync),
            "received_most": report.sync.received_most,
            "inside_nodes": report.sync.inside_nodes,
            "across_nodes": report.sync.across_nodes,
        }

    return {
        "valid": not report.errors,
        "untried": report.untried,
        "accelerator": [
            {
                "roles": list(default.roles),
                "section": default.row.section,
                "key": default.row.key,
                "value": default.row.value,
                "reason": default.row.reason,
            }
            for default in report.accelerator
        ],
        "world_size": report.world_size,
        "errors": [error.to_json() for error in report.errors],
        "warnings": [warning.to_json() for warning in report.warnings],
        "config": config,
        "batch": batch,
        "scoring_pass": scoring_pass,
        "roles": roles,
        "process_groups": process_group_counts(layouts, report.world_size)._asdict(),
        "model": model,
        "memory": memory,
        "weight_sync": weight_sync,
        "prediction": _prediction_json(report),
        "training_records": report.records,
        "data": [dataclasses.asdict(stats) for stats in report.data_stats],
    }


def _prediction_json(report: CheckReport) -> dict[str, Any]:
    """Return the predicted seconds of a step by phase, or the reason why a step cannot be predicted."""
    prediction = predict_checked_step(report)
    if prediction.step is None:
        return {"reason": prediction.reason}
    return {
        "gpu": prediction.gpu,
        "assumed_gpu": prediction.is_gpu_assumed,
        "response_tokens": prediction.response_tokens,
        "seconds": {**prediction.step.seconds, "total": prediction.step.total},
    }


def _write_picture(path: Path, svg: str) -> None:
    """Write the SVG picture to a file; raises UserError if the file cannot be written."""
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise UserError(
            "the picture cannot be written",
            where="--picture",
            expected="a file in an existing folder that can be written to",
            got=f"{path}: {error.strerror}",
            fix="name another file",
        ) from error
