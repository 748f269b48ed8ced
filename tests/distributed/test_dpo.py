"""Training on preferences (DPO) with the actor's machinery learns, with the same numbers in every layout."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

OPTIMIZER = {"learning_rate": 2e-3, "epsilon": 1e-3}
"""With Adam's usual epsilon the first updates are the signs of gradients, and rounding decides near zero."""


def write(folder: Path, material: Path, **changes) -> Path:
    """Write a run that learns from 8 steps of preferences and takes two of reinforcement learning."""
    folder.mkdir(parents=True)
    records = [json.loads(line) for line in (material / "train.jsonl").read_text().splitlines()][:200]
    pairs = folder / "pairs.jsonl"
    with pairs.open("w") as file:
        for record in records:
            right = str(record["ground_truth"])
            # Of another length, so that pairs are cut into micro-batches and padded unevenly.
            file.write(
                json.dumps({"prompt": record["prompt"], "chosen": right, "rejected": right[::-1] + "7"})
            )
            file.write("\n")
    config = {
        "run_dir": str(folder / "run"),
        "steps": 2,
        "model": {"path": str(material / "model"), "dtype": "float32"},
        "data": {"train": str(material / "train.jsonl"), "max_prompt_tokens": 8},
        "reward": {"function": "megatron_rl.rewards.arithmetic:exact_match"},
        "preference": {
            "data": str(pairs), "steps": 8, "pairs_per_step": 6, "beta": 0.5, "sft_coef": 0.1,
            "optimizer": OPTIMIZER,
        },
        "algorithm": {"name": "grpo", "kl": "loss"},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "tokens_per_microbatch": 40},
        "actor": {"optimizer": OPTIMIZER},
        "rollout": {"engine": "torch", "max_response_tokens": 6},
        "evaluation": {"at_start": False, "every": 100},
        "checkpoint": {"every": 100, "export": False},
        **changes,
    }  # fmt: skip
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def lines(folder: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / f"run/{name}.jsonl").read_text().splitlines()]


def test_a_users_own_loss_gives_the_numbers_of_the_loss_that_it_is(fork, material, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from torch.nn.functional import logsigmoid\n\n\n"
        "def mine(pairs):\n"
        "    difference = pairs.chosen - pairs.ref_chosen - pairs.rejected + pairs.ref_rejected\n"
        "    return -logsigmoid(pairs.beta * difference)\n"
    )
    for name, loss in (("named", "sigmoid"), ("own", f"{own}:mine")):
        file = write(tmp_path / name, material)
        fork("megatron_rl", 2, "train", file, f"preference.loss={loss}", "steps=1", module=True)
    first, second = (
        [line["dpo/loss"] for line in lines(tmp_path / name, "dpo")] for name in ("named", "own")
    )
    assert len(first) == 8 and first == pytest.approx(second, rel=1e-5)


def test_dpo_learns_the_same_in_every_layout(fork, material, tmp_path):
    fork("megatron_rl", 1, "train", write(tmp_path / "alone", material), module=True)
    host = {**OPTIMIZER, "offload": True}
    spread = write(tmp_path / "spread", material, actor={"optimizer": host, "layout": {"tensor": 2}})
    fork("megatron_rl", 4, "train", spread, module=True)
    expected, found = lines(tmp_path / "alone", "dpo"), lines(tmp_path / "spread", "dpo")
    assert len(expected) == len(found) == 8
    for mine, truth in zip(found, expected, strict=True):
        # At the first step the policy is the reference, and rounding decides which is preferred.
        names = ("loss", "margin", "chosen", "rejected", "grad_norm", "accuracy")
        for name in names[: None if truth is not expected[0] else -1]:
            assert mine[f"dpo/{name}"] == pytest.approx(truth[f"dpo/{name}"], rel=1e-3, abs=1e-4), name
    first, last = expected[0], expected[-1]
    assert first["dpo/margin"] == pytest.approx(0, abs=1e-5)
    assert first["dpo/loss"] > math.log(2), "with the imitation term on top"
    assert last["dpo/loss"] < first["dpo/loss"] - 0.2
    assert last["dpo/accuracy"] > 0.8 and last["dpo/margin"] > 0.3
    # Reinforcement learning starts from the trained policy, and so does its reference.
    for folder in ("alone", "spread"):
        steps = lines(tmp_path / folder, "metrics")
        assert abs(steps[0]["kl/ref"]) < 1e-5
        assert 0 < steps[1]["kl/ref"] < 1e-2, "a step away from it, whatever held the weights before"
        assert (tmp_path / folder / "run/stages/dpo/hf/config.json").is_file()
