"""Ranks of test_examples.py: one step of each example, one after another."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from megatron_rl.cli.main import main
from megatron_rl.distributed import device

EXAMPLES = Path("launch/examples")
SHORT = (
    "steps=1", "prepare={}", "batch.prompts_per_step=8", "actor.optimizer.warmup_steps=0",
    "evaluation.at_start=false",
)  # fmt: skip
SHORT_WARM_UP = (
    "sft.steps=2", "sft.until_loss=null", "sft.rows_per_step=16", "sft.evaluate_every=null",
    "sft.optimizer.warmup_steps=0",
)  # fmt: skip


def train(
    folder: Path,
    name: str,
    data: Path,
    *extra_settings: str,
    warm_up: bool = True,
) -> None:
    """Train one step of an example with the model and data in ``data``; raise unless the exit code is 0."""
    # The data of the example, and as few steps as exercise every stage.
    settings = [
        f"run_dir={folder / name}", f"data.train={data / 'train.jsonl'}",
        f"evaluation.sets.held_out.data={data / 'eval.jsonl'}", *SHORT,
    ]  # fmt: skip

    if warm_up:
        settings += [
            f"sft.data={data / 'sft.jsonl'}",
            "sft.held_out=null",
            *SHORT_WARM_UP,
        ]

    code = main(
        [
            "train",
            str(EXAMPLES / name / "run.yaml"),
            *settings,
            *extra_settings,
        ]
    )
    assert code == 0, f"{name}: exit code {code}"
    if device.rank() == 0:
        print("example", name, "ok", flush=True)


if __name__ == "__main__":
    # All runs share this process, so the process group of the first has to survive for the next ones.
    setattr(dist, "destroy_process_group", lambda *_: None)

    prepared = Path(sys.argv[1])
    runs = Path(sys.argv[2])
    model = f"model.path={prepared / 'quickstart/model'}"
    saved = runs / "saved"
    train(
        runs,
        "own_reward",
        prepared / "quickstart",
        model,
        f"checkpoint.megatron={saved}",
    )
    train(runs, "own_loss", prepared / "quickstart", model)
    train(
        runs,
        "moe",
        prepared / "quickstart",
        f"model.path={prepared / 'moe'}",
    )
    train(runs, "own_data", prepared / "own_data", model)
    train(runs, "tools", prepared / "tools", model)
    # This example starts from the Megatron checkpoint that the first one has saved.
    settings = {
        "path": runs / "model",
        "megatron": saved,
        "hf_path": prepared / "quickstart/model",
    }
    overrides = [f"model.{name}={value}" for name, value in settings.items()]
    overrides.append(f"checkpoint.megatron={runs / 'out'}")
    train(
        runs,
        "megatron_lm",
        prepared / "quickstart",
        *overrides,
        warm_up=False,
    )
