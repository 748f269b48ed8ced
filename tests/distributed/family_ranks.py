"""Ranks of test_family_commands.py: the user's commands on each family, one after another."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
import yaml
from test_layout_invariance import sparse

from megatron_rl.cli.main import main
from megatron_rl.distributed import device


def command(*arguments: str | Path) -> None:
    """Run a command as one process of the job; raise unless its exit code is 0."""
    code = main([str(argument) for argument in arguments])
    assert code == 0, f"{' '.join(map(str, arguments))}: exit code {code}"


def journey(folder: Path, experts: bool, adapters: bool) -> None:
    """Run check, train, resume on another layout, export, check of the export, and a run from it."""
    config = folder / "config.yaml"
    out = folder / "out"
    first_axis = "expert" if experts else "tensor"
    second_axis = "tensor" if experts else "pipeline"
    if adapters:
        # A pipeline-parallel actor sends its adapters to engine ranks that do not hold the same layers.
        first_axis, second_axis = second_axis, first_axis

    first = f"actor.layout.{first_axis}=2"
    second = f"actor.layout.{second_axis}=2"
    command("check", config, first, "--world-size", "2")

    # One routing replay each for the first run and for the one that resumes; the plain engine reports none.
    engine = yaml.safe_load(config.read_text())["rollout"].get("engine", "vllm")
    first_replay = "rollout" if engine == "vllm" else "update"
    replays = [f"actor.routing_replay={name}" for name in (first_replay, "update") if experts]
    separate_sync = ["actor.lora.sync=adapter"] if adapters and not experts else []

    command("train", config, first, *replays[:1], *separate_sync)
    command("train", config, second, "steps=3", *replays[1:])
    command("export", folder / "run/checkpoints/step_3", "--out", out)
    next_run = (f"model.path={out}", f"run_dir={folder / 'again'}")
    command("check", config, second, *next_run, "--world-size", "2")
    if not adapters:
        command("train", config, second, *next_run, "steps=1")

    if adapters:
        command(
            "export",
            folder / "run/checkpoints/step_3",
            "--out",
            folder / "peft",
            "--format",
            "peft",
        )
        # Another run starts from the exported adapters, on the base that they were trained on.
        base = f"model.path={folder / 'run/stages/sft/hf'}"
        overrides = (
            base,
            f"actor.lora.path={folder / 'peft'}",
            f"run_dir={folder / 'next'}",
            "sft=null",
        )
        command("train", config, first, *overrides, *separate_sync, "steps=1")


if __name__ == "__main__":
    # All commands share this process, so the process group of the first has to survive for the next ones.
    setattr(dist, "destroy_process_group", lambda *_: None)
    for family in sys.argv[2:]:
        adapters = family.endswith("-lora")
        journey(
            Path(sys.argv[1]) / family,
            sparse(family.removesuffix("-lora")),
            adapters,
        )
        if device.rank() == 0:
            print("family", family, "ok", flush=True)
