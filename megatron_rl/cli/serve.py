"""The ``serve`` command: a trained model behind vLLM's own OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from megatron_rl.cli.common import require_directory
from megatron_rl.cli.eval import require_checkpoint
from megatron_rl.config.checkpoint_meta import is_checkpoint, latest_checkpoint
from megatron_rl.config.load import load_config
from megatron_rl.config.run_folder import RunFolder, folder_of_checkpoint
from megatron_rl.config.sections.schedules import token_schedule
from megatron_rl.imports import import_libraries

HOST_MEMORY = "0.25"
"""Fraction of the host's memory that a server without a GPU may use; other programs need the rest."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments of ``serve`` to its parser."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a run folder, one of its checkpoints/step_N, or a Hugging Face model",
    )

    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (%(default)s)")
    parser.add_argument("--name", help="name of the model in requests (default: name of the run folder)")

    parser.add_argument(
        "--vllm",
        default="",
        metavar="ARGUMENTS",
        help="vLLM's own arguments, such as '--tensor-parallel-size 2 --max-model-len 4096'",
    )
    parser.add_argument(
        "--trust", action="store_true", help="load a checkpoint even if loading may run code that it contains"
    )


def run(arguments: argparse.Namespace) -> int:
    """Export a checkpoint if necessary, then replace this process by vLLM's server."""
    source = Path(arguments.source)
    require_directory(source, "SOURCE")
    model = find_or_export_model(source, trusted=arguments.trust)

    # The model of a run has the run's sampling parameters as defaults, and the run's name.
    folder = folder_of_checkpoint(model)
    defaults: dict[str, Any] = {}
    named_folder = model
    if folder is not None:
        defaults = sampling_defaults(folder)
        named_folder = folder.path
    name = arguments.name or named_folder.resolve().name

    command = server_command(model, name, arguments.host, arguments.port, defaults)
    command += shlex.split(arguments.vllm)
    address = f"http://{arguments.host}:{arguments.port}"
    print(f"serving {model} as {name} at {address}/v1, sampling by default: {defaults or 'as vLLM does'}")
    print(f"next: megatron-rl bench-serve {address}")
    print(f"vLLM: {shlex.join(command)}", flush=True)

    # Replace this process by the server, so that signals reach it.
    os.execv(sys.executable, command)


def find_or_export_model(source: Path, *, trusted: bool = False) -> Path:
    """Return the folder of the Hugging Face model to serve; export a training checkpoint first if necessary.

    ``source`` is a Hugging Face model, a training checkpoint or a run folder. A run folder is served with the
    model that the run wrote at its end, or else with its newest checkpoint. With ``trusted``, a checkpoint is
    loaded even if loading may run code.
    """
    if (source / "config.json").is_file():
        return source

    checkpoint = source
    if not is_checkpoint(source):
        run_folder = RunFolder(source)
        if (run_folder.model / "config.json").is_file():
            return run_folder.model
        checkpoint = latest_checkpoint(run_folder.checkpoints) or source
    require_checkpoint(checkpoint)

    # Export next to the checkpoints, not into one: a run deletes its old checkpoints.
    out = checkpoint.parent.parent / "exports" / checkpoint.name
    if not (out / "config.json").is_file():
        with import_libraries():
            from megatron_rl.trainer.offline import export_checkpoint

        print(f"exporting {checkpoint} to {out}", flush=True)
        export_checkpoint(checkpoint, out, trusted=trusted)
    return out


def sampling_defaults(folder: RunFolder) -> dict[str, Any]:
    """Return the sampling parameters of a run with their names in generation_config.json."""
    rollout = load_config(folder.config).rollout

    # A server supports only constant values: use the last value of a schedule over steps or tokens.
    top_p = token_schedule(rollout.top_p).end

    # Omit filters that are off, since they are also off by default in vLLM.
    defaults: dict[str, Any] = {
        "temperature": token_schedule(rollout.temperature).end,
        "max_new_tokens": rollout.response_limit,
    }
    if top_p < 1:
        defaults["top_p"] = top_p
    if rollout.top_k > 0:
        defaults["top_k"] = rollout.top_k
    if rollout.min_p > 0:
        defaults["min_p"] = rollout.min_p
    if rollout.repetition_penalty != 1:
        defaults["repetition_penalty"] = rollout.repetition_penalty
    return defaults


def server_command(model: Path, name: str, host: str, port: int, defaults: dict[str, Any]) -> list[str]:
    """Return the command line of vLLM's server (0.32 and 0.33).

    ``name`` is the model's name in requests. ``defaults`` are sampling parameters for requests that do not
    set them. The command runs the server's module, since the ``vllm`` script of vLLM's CPU package (0.32)
    does not start.
    """
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", name, "--host", host, "--port", str(port),
    ]  # fmt: skip
    if defaults:
        command += ["--override-generation-config", json.dumps(defaults)]

    # By default vLLM reserves 0.92 of the memory, which a host without GPU shares with other programs.
    if shutil.which("nvidia-smi") is None:
        command += ["--gpu-memory-utilization", HOST_MEMORY]
    return command
