"""Answer the evaluation sets with checkpoints and Hugging Face models."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.cli.common import add_config_arguments, checked
from megatron_rl.config.checkpoint_meta import META, checkpoints, is_checkpoint
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.schema import TRAIN
from megatron_rl.errors import UserError
from megatron_rl.launcher import launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``eval``."""
    add_config_arguments(parser)
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        nargs="+",
        action="extend",
        required=True,
        help="Hugging Face directories and runs' checkpoints/step_N, in any number",
    )
    parser.add_argument(
        "--trust", action="store_true", help="load the checkpoint even if that may run code which it holds"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check the configuration and the directories, then evaluate."""
    # A setting may follow the directories.
    overrides = [word for word in arguments.checkpoint if "=" in word and not Path(word).exists()]
    # Nothing is resumed: what the run's newest checkpoint would not do for training does not matter.
    arguments.overrides = [*arguments.overrides, *overrides, "checkpoint.resume=never"]
    report = checked(arguments, launch(joins=True).world_size, job=TRAIN, training=True)
    config = report.valid()
    paths = [Path(word) for word in arguments.checkpoint if word not in overrides]
    for path in paths:
        require_checkpoint(path)
    if not config.evaluation.sets:
        raise UserError(
            "there is nothing to evaluate",
            where="evaluation.sets",
            expected="an evaluation set",
            got="none",
            fix="set evaluation.sets.held_out=path/to/eval.jsonl",
        )
    from megatron_rl.trainer.offline import evaluate_checkpoints

    evaluate_checkpoints(config, paths, trusted=arguments.trust)
    return 0


def require_checkpoint(path: Path) -> None:
    """Raise a UserError unless the path is a directory that has what one kind of checkpoint has."""
    require_directory(path, "--checkpoint")
    if is_checkpoint(path) or (path / "config.json").is_file():
        return
    run = RunFolder(path)
    inside = checkpoints(run.checkpoints) or checkpoints(path)
    inside += [run.model] if (run.model / "config.json").is_file() else []
    raise UserError(
        "this is no checkpoint",
        where=str(path),
        expected=f"a Hugging Face directory with config.json, or a run's checkpoints/step_N with {META}",
        got="neither file",
        fix=f"checkpoints in it: {', '.join(map(str, inside[-4:]))}" if inside else "correct the path",
    )


def require_directory(path: Path, where: str) -> None:
    """Raise a UserError unless the path is a directory."""
    if path.is_dir():
        return
    near = (
        sorted(item.name for item in path.parent.iterdir() if item.is_dir()) if path.parent.is_dir() else []
    )
    raise UserError(
        f"there is no directory {path}",
        where=where,
        expected="an existing directory",
        got="a file" if path.exists() else "nothing there",
        fix=f"directories beside it: {', '.join(near[:8])}" if near else "correct the path",
    )
