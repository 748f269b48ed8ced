"""The ``eval`` command: evaluate checkpoints and Hugging Face models on the evaluation sets."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.cli.common import add_config_arguments, load_and_check, require_directory
from megatron_rl.config.checkpoint_meta import META, complete_checkpoints, is_checkpoint
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.schema import TRAIN
from megatron_rl.errors import UserError
from megatron_rl.imports import import_libraries
from megatron_rl.launcher import current_launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments of ``eval`` to its parser."""
    add_config_arguments(parser)

    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        nargs="+",
        action="extend",
        required=True,
        help="one or more Hugging Face directories and checkpoints/step_N of runs",
    )
    parser.add_argument(
        "--trust", action="store_true", help="load a checkpoint even if loading may run code that it contains"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check the configuration and the checkpoints, evaluate the checkpoints, and return the exit code."""
    # argparse assigns all arguments after --checkpoint to it, also the overrides, which contain `=`.
    values = arguments.checkpoint
    overrides = [value for value in values if "=" in value and not Path(value).exists()]
    checkpoint_paths = [Path(value) for value in values if value not in overrides]

    # Nothing is resumed here, so a checkpoint that training could not resume from is not an error.
    arguments.overrides = [*arguments.overrides, *overrides, "checkpoint.resume=never"]

    report = load_and_check(arguments, current_launch(joins_group=True).world_size, job=TRAIN, training=True)
    config = report.valid()
    for path in checkpoint_paths:
        require_checkpoint(path)

    # A training run may have no evaluation sets, but this command needs at least one.
    if not config.evaluation.sets:
        raise UserError(
            "there is nothing to evaluate",
            where="evaluation.sets",
            expected="an evaluation set",
            got="none",
            fix="set evaluation.sets.held_out=path/to/eval.jsonl",
        )

    # Import only after the check: the module imports torch, Megatron-Core and the engine.
    with import_libraries():
        from megatron_rl.trainer.offline import evaluate_checkpoints

    evaluate_checkpoints(config, checkpoint_paths, trusted=arguments.trust)
    return 0


def require_checkpoint(path: Path) -> None:
    """Raise UserError unless ``path`` is a complete training checkpoint or a Hugging Face model."""
    require_directory(path, "--checkpoint")
    if is_checkpoint(path) or (path / "config.json").is_file():
        return

    # The path may be a run folder or a folder of checkpoints: suggest the newest checkpoints in it.
    run_folder = RunFolder(path)
    candidates = complete_checkpoints(run_folder.checkpoints) or complete_checkpoints(path)
    if (run_folder.model / "config.json").is_file():
        candidates.append(run_folder.model)
    fix = "correct the path"
    if candidates:
        fix = f"checkpoints in it: {', '.join(map(str, candidates[-4:]))}"
    raise UserError(
        f"{path} is not a checkpoint",
        where=str(path),
        expected=f"a Hugging Face directory with config.json, or a run's checkpoints/step_N with {META}",
        got="neither file",
        fix=fix,
    )
