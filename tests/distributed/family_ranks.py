"""What the ranks of test_family_commands.py run: the user's commands on each family, one after another."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
from test_layout_invariance import sparse

from megatron_rl.cli.main import main
from megatron_rl.distributed import device


def command(*words: str | Path) -> None:
    """Run a command as one process of the job; its exit code must be 0."""
    code = main([str(word) for word in words])
    assert code == 0, f"{' '.join(map(str, words))}: exit code {code}"


def journey(folder: Path, experts: bool, adapters: bool) -> None:
    """Check, train with vLLM, resume on another layout, export, and check the export.

    Mixtures repeat the engine's experts, and then those of their own scoring pass. Adapters go to vLLM's slot
    for them, and then into the weights; they are exported by themselves too, and a run starts from them.
    """
    config = folder / "config.yaml"
    out = folder / "out"
    before = "expert" if experts else "tensor"

    after = "tensor" if experts else "pipeline"
    if adapters:
        before, after = after, before  # so that adapters have a way to go

    first = f"actor.layout.{before}=2"
    second = f"actor.layout.{after}=2"
    command("check", config, first, "--world-size", "2")
    replays = [f"actor.routing_replay={name}" for name in ("rollout", "update") if experts]
    apart = ["actor.lora.sync=adapter"] if adapters and not experts else []
    command("train", config, first, *replays[:1], *apart)

    command("train", config, second, "steps=3", *replays[1:])
    command("export", folder / "run/checkpoints/step_3", "--out", out)
    command("check", config, second, f"model.path={out}", f"run_dir={folder / 'again'}", "--world-size", "2")

    if adapters:
        command("export", folder / "run/checkpoints/step_3", "--out", folder / "peft", "--format", "peft")
        base = f"model.path={folder / 'run/stages/sft/hf'}"
        words = (base, f"actor.lora.path={folder / 'peft'}", f"run_dir={folder / 'next'}", "sft=null")
        command("train", config, first, *words, *apart, "steps=1")


if __name__ == "__main__":
    # The commands share one process here: its communicators stay for the next.
    setattr(dist, "destroy_process_group", lambda *_: None)
    for family in sys.argv[2:]:
        adapters = family.endswith("-lora")
        journey(Path(sys.argv[1]) / family, sparse(family.removesuffix("-lora")), adapters)
        if device.rank() == 0:
            print("family", family, "ok", flush=True)
