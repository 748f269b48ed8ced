"""Ranks of test_dataflow.py: runs of `train` and of the example scripts, one after another."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch.distributed as dist

from megatron_rl.cli.main import main

SCRIPTS = Path("launch/examples/dataflow")


def script(name: str, *settings: str) -> None:
    """Run an example script with these settings."""
    sys.argv = [name, *settings]
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")


if __name__ == "__main__":
    # All runs share this process, so the process group of the first has to survive for the next ones.
    setattr(dist, "destroy_process_group", lambda *_: None)

    folder = Path(sys.argv[1])
    common = [
        f"model.path={folder / 'data/model'}", f"data.train={folder / 'data/train.jsonl'}",
        f"evaluation.sets.held_out={folder / 'data/eval.jsonl'}", "evaluation.every=2", "sft=null",
        "prepare={}", "batch.prompts_per_step=8", "batch.optimizer_steps=2",
        # Without a decay, which depends on the number of steps: one run has two, then three.
        "actor.optimizer.decay=constant", "actor.optimizer.warmup_steps=0",
        "actor.optimizer.minimum_learning_rate=0",
    ]  # fmt: skip
    ppo = [
        "algorithm={name: ppo}", "actor.layout={ranks: [0], tensor: 1}",
        "critic={layout: {ranks: [1]}, optimizer: {learning_rate: 1e-3}}",
    ]  # fmt: skip

    def run_dir(name: str) -> str:
        return f"run_dir={folder / name}"

    config = str(SCRIPTS / "run.yaml")
    assert main(["train", config, *common, run_dir("train"), "steps=3"]) == 0
    script("grpo", *common, run_dir("grpo"), "steps=2")
    script("grpo", *common, run_dir("grpo"), "steps=3")
    assert (
        main(
            [
                "train",
                config,
                *common,
                *ppo,
                run_dir("train_ppo"),
                "steps=2",
            ]
        )
        == 0
    )
    script("ppo", *common, run_dir("ppo"), "steps=2")
    # An untrained model has no correct response, but responses of different lengths.
    lengths = f"reward.function={folder / 'reward.py'}:score"
    script("online_dpo", *common, lengths, run_dir("online_dpo"), "steps=2")
    script("best_of_n", *common, lengths, run_dir("best_of_n"), "steps=2")
