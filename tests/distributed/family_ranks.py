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


def journey(folder: Path, has_experts: bool, has_adapters: bool) -> None:
    """Run the commands of a user: check, train, resume on another layout, export, and train the export."""
    config = folder / "config.yaml"
    out = folder / "out"
    axes = ["tensor", "pipeline"]
    if has_experts:
        axes = ["expert", "tensor"]
    # A pipeline-parallel actor sends its adapters to engine ranks that do not hold the same layers.
    if has_adapters:
        axes.reverse()

    first = f"actor.layout.{axes[0]}=2"
    second = f"actor.layout.{axes[1]}=2"
    command("check", config, first, "--world-size", "2")

    # The first run and the resumed one replay routing in different ways. The plain engine records none.
    replays = []
    if has_experts:
        rollout = yaml.safe_load(config.read_text())["rollout"]
        is_vllm = rollout.get("engine", "vllm") == "vllm"
        replay_names = ("rollout", "update") if is_vllm else ("update", "update")
        replays = [f"actor.routing_replay={name}" for name in replay_names]

    # Both ways to sync adapters are covered: separately on dense models, merged on models with experts.
    separate_sync = []
    if has_adapters and not has_experts:
        separate_sync = ["actor.lora.sync=adapter"]

    command("train", config, first, *replays[:1], *separate_sync)
    command("train", config, second, "steps=3", *replays[1:])
    command("export", folder / "run/checkpoints/step_3", "--out", out)
    next_run = (f"model.path={out}", f"run_dir={folder / 'again'}")
    command("check", config, second, *next_run, "--world-size", "2")
    if not has_adapters:
        command("train", config, second, *next_run, "steps=1")

    if has_adapters:
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
        command(
            "train",
            config,
            first,
            *overrides,
            *separate_sync,
            "steps=1",
        )


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
