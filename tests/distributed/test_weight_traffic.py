"""`check`, `plan-reshard` and the metrics of a run agree on the bytes of a weight sync."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from megatron_rl.cli.main import main
from megatron_rl.config.load import load_config
from tests.hf_models import save_model

# actor, engine, model, and whether another order of ranks than theirs moves less
CASES = [
    ("tp2pp2", "tp4", "dense", True),
    ("tp2dp2", "tp4", "dense", True),
    ("tp2pp2ep2", "tp2", "mixture", False),
]
SIZES = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}


def mixture(dense: Path, target: Path) -> Path:
    """Write a tiny mixture of experts with the tokenizer of the dense model."""
    shape = json.loads((dense / "config.json").read_text())
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    save_model("qwen3-moe", target, dtype="float32", **{name: shape[name] for name in names})
    for file in dense.glob("*token*"):
        shutil.copy(file, target)
    return target


def configuration(path: Path, material: Path, model: Path, actor: str, engine: str) -> Path:
    sizes = dict(re.findall(r"([a-z]+)(\d+)", actor))
    config = {
        "run_dir": str(path / "run"),
        "steps": 1,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(material / "train.jsonl"), "max_prompt_tokens": 8},
        "reward": {"function": "megatron_rl.rewards.arithmetic:exact_match"},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4},
        "actor": {
            "layout": {SIZES[name]: int(size) for name, size in sizes.items() if name in SIZES},
            "optimizer": {"learning_rate": 1e-3},
        },
        "rollout": {"tensor": int(engine.removeprefix("tp")), "max_response_tokens": 6},
        "checkpoint": {"export": False},
        "algorithm": {"name": "grpo"},
    }
    file = path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("actor", "engine", "kind", "reordered"),
    [CASES[0], pytest.param(*CASES[1], marks=pytest.mark.campaign), CASES[2]],
)
def test_check_plan_and_run_name_the_same_bytes(
    fork, capsys, material, tmp_path, actor, engine, kind, reordered
):
    model = material / "model" if kind == "dense" else mixture(material / "model", tmp_path / "model")
    config = configuration(tmp_path, material, model, actor, engine)
    check = ["check", config, "--world-size", 4]
    plan = ["plan-reshard", model, "--from", actor, "--to", engine, "--dtype", "float32"]
    checked = json.loads(printed(capsys, *check, "--json"))
    planned = json.loads(printed(capsys, *plan, "--json"))
    received = planned["received_most"]
    assert checked["weight_sync"]["received_most"] == received
    assert checked["weight_sync"]["model_bytes"] == planned["model_bytes"]
    words = re.search(r"received per rank .* most (.+)", printed(capsys, *plan))
    text = printed(capsys, *check, "--verbose")
    assert words and re.search(rf"received by the busiest rank +{words[1]}\n", text)
    assert f"per weight sync: {words[1]}" in re.sub(r"\s+", " ", text), "the reason for the order of ranks"

    fork("megatron_rl", 4, "train", config, module=True)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {line.get("reshard/bytes_received_max", received) for line in lines} == {received}
    assert any("reshard/bytes_received_max" in line for line in lines)
    assert max(line.get("mismatch/abs_diff", 0.0) for line in lines) < 1e-4
    ranks = checked["config"]["rollout.ranks"]["value"]
    assert (ranks != sorted(ranks)) == reordered
    assert load_config(tmp_path / "run/config.yaml").rollout.ranks == tuple(ranks)
