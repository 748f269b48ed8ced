"""What the ranks of test_examples.py run: a step of each example, one after another."""

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


def train(folder: Path, name: str, data: Path, *words: str, warm_up: bool = True) -> None:
    """Take a step of an example on the data and the model at ``data``; the exit code must be 0."""
    given = [
        f"run_dir={folder / name}", f"data.train={data / 'train.jsonl'}",
        f"evaluation.sets.held_out.data={data / 'eval.jsonl'}", *SHORT,
    ]  # fmt: skip

    if warm_up:
        given += [f"sft.data={data / 'sft.jsonl'}", "sft.held_out=null", *SHORT_WARM_UP]

    code = main(["train", str(EXAMPLES / name / "run.yaml"), *given, *words])
    assert code == 0, f"{name}: exit code {code}"
    if device.rank() == 0:
        print("example", name, "ok", flush=True)


if __name__ == "__main__":
    # The runs share one process here: its communicators stay for the next.
    setattr(dist, "destroy_process_group", lambda *_: None)
    made = Path(sys.argv[1])
    runs = Path(sys.argv[2])
    model = f"model.path={made / 'quickstart/model'}"
    saved = runs / "saved"
    train(runs, "own_reward", made / "quickstart", model, f"checkpoint.megatron={saved}")
    train(runs, "own_loss", made / "quickstart", model)
    train(runs, "moe", made / "quickstart", f"model.path={made / 'moe'}")
    train(runs, "own_data", made / "own_data", model)
    train(runs, "tools", made / "tools", model)
    places = {
        "path": runs / "model",
        "megatron": saved,
        "hf_path": made / "quickstart/model",
    }
    words = [f"model.{name}={place}" for name, place in places.items()]
    words.append(f"checkpoint.megatron={runs / 'out'}")
    train(runs, "megatron_lm", made / "quickstart", *words, warm_up=False)
