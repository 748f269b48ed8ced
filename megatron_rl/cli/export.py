"""The ``export`` command: write a training checkpoint as a Hugging Face model, or for Megatron-LM."""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

from megatron_rl.cli.common import require_directory
from megatron_rl.cli.eval import require_checkpoint
from megatron_rl.config.checkpoint_meta import META, is_checkpoint
from megatron_rl.errors import UserError
from megatron_rl.imports import import_libraries


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments of ``export`` to its parser."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run's checkpoints/step_N")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="load the checkpoint even if loading may run code that it contains",
    )

    parser.add_argument("--out", metavar="DIR", required=True, help="new folder for the exported model")
    parser.add_argument(
        "--format",
        choices=("hf", "megatron", "peft"),
        default="hf",
        help="hf (default): safetensors with config.json and tokenizer; megatron: a checkpoint for --load of "
        "Megatron-LM's pretrain_gpt.py; peft: only the adapters",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check the input and output directories, export the checkpoint, and return the exit code."""
    checkpoint = Path(arguments.checkpoint)
    out = Path(arguments.out)
    require_directory(checkpoint, "CHECKPOINT")

    # A checkpoint consists of many files, which must not be mixed with existing ones.
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        obstacle = "a file"
        if out.is_dir():
            obstacle = "not empty"
        raise UserError(
            "the export would overwrite existing files",
            where="--out",
            expected="a directory that does not exist yet, or an empty one",
            got=f"{out} is {obstacle}",
            fix="choose another directory, or remove it",
        )

    require_checkpoint(checkpoint)

    # `require_checkpoint` also accepts a Hugging Face model, which need not be exported.
    if not is_checkpoint(checkpoint):
        raise UserError(
            f"{checkpoint} is a Hugging Face model, not a training checkpoint",
            where=str(checkpoint),
            expected=f"a run's checkpoints/step_N with {META}",
            got="config.json",
            fix="use it as it is; for Megatron-LM let the training job write it: checkpoint.megatron=FOLDER",
        )

    # Import only after the checks: the module imports torch and Megatron-Core.
    with import_libraries():
        from megatron_rl.trainer.offline import export_checkpoint

    # Hide deprecation warnings of torch and Megatron-Core, about which the user can do nothing.
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_checkpoint(checkpoint, out, checkpoint_format=arguments.format, trusted=arguments.trust)
    return 0
