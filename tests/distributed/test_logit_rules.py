"""Complete runs whose logits are changed by rules: trainer and engine compute the same log-probs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet
import yaml

from megatron_rl.metrics import read_metrics

RULES: dict[str, Any] = {
    "banned_tokens": ["7"],
    "logit_bias": {"1": 1.5, "token_id:5": -0.75},
    "min_response_tokens": 3,
    "no_repeat_ngram_size": 3,
    # Another rule for one task, and filters after the rules.
    "sampling_profiles": {
        "other": {
            "banned_tokens": ["8"],
            "top_p": 0.95,
            "min_response_tokens": 0,
            "no_repeat_ngram_size": 2,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.4,
            "frequency_penalty": -0.2,
        }
    },
}


PAGE = Path(__file__).parents[2] / "docs/run.md"


def _example(start: str) -> dict[str, Any]:
    """Return the rollout section of the page's example that begins with ``start``."""
    pattern = rf"^```yaml\n(rollout:\n  {re.escape(start)}.*?)^```$"
    (block,) = re.findall(pattern, PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return yaml.safe_load(block)["rollout"]


def _config(folder: Path, material: Path, **changes: dict[str, Any]) -> Path:
    config: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "steps": 2,
        "model": {"path": str(material / "model"), "dtype": "float32"},
        "data": {"train": str(material / "train.jsonl"), "max_prompt_tokens": 8},
        "reward": {"function": "megatron_rl.rewards.arithmetic:exact_match"},
        "batch": {"prompts_per_step": 8, "samples_per_prompt": 4, "optimizer_steps": 2},
        "actor": {"optimizer": {"learning_rate": 1e-3}},
        "rollout": {"max_response_tokens": 8},
        "checkpoint": {"export": False},
        "algorithm": {"name": "grpo", "kl": {"name": "loss", "coef": 0.1}},
    }
    for name, value in changes.items():
        config[name] = {**config.get(name, {}), **value}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def _task(prompt: str) -> str:
    """Return the task of a problem: that of its first digit."""
    return "other" if int(prompt[0]) % 2 else "addition"


def _two_tasks(source: Path, target: Path) -> Path:
    """Write the records with the tasks of their prompts."""
    records = [json.loads(line) for line in source.read_text().splitlines()]
    target.write_text("\n".join(json.dumps(record | {"task": _task(record["prompt"])}) for record in records))
    return target


def _samples(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the samples of a run by task."""
    samples: dict[str, list[dict[str, Any]]] = {"addition": [], "other": []}
    for file in sorted((run / "rollouts").glob("*.parquet")):
        for row in pyarrow.parquet.read_table(file).to_pylist():
            samples[_task(row["prompt"])].append(row)
    return samples


def _repeats(row: dict[str, Any], size: int) -> bool:
    """Return whether a run of characters, which are tokens, is in a row twice and ends in its response."""
    # Special tokens are not part of the text; one inside it separates tokens that look adjacent.
    if len(row["response"]) < row["length"] - (row["finish_reason"] == 0):
        return False
    text = row["prompt"] + row["response"]
    runs = [text[start : start + size] for start in range(len(text) - size + 1)]
    first = len(row["prompt"]) - size + 1
    return any(run in runs[:start] for start, run in enumerate(runs) if start >= first)


def _log_probs_agree(run: Path) -> None:
    lines = read_metrics(run / "metrics.jsonl")
    differences = [line["mismatch/abs_diff"] for line in lines if "mismatch/abs_diff" in line]
    assert len(differences) == 2 and max(differences) < 1e-5


def _train_two_tasks(launch, material: Path, folder: Path, rollout: dict[str, Any]) -> None:
    """Train on both tasks with an actor and an engine on two tensor-parallel ranks; both sides must agree."""
    file = _config(
        folder,
        material,
        data={"train": str(_two_tasks(material / "train.jsonl", folder / "train.jsonl"))},
        actor={"layout": {"tensor": 2}, "optimizer": {"learning_rate": 1e-3}},
        reference={"layout": {"pipeline": 2}},
        rollout={"tensor": 2, **rollout},
    )
    launch("megatron_rl", 2, "train", file, module=True)
    _log_probs_agree(folder / "run")


def test_rules_reach_both_sides(torchrun, material, tmp_path):
    """Also without forked ranks: processes as a user starts them, which compile Megatron's functions."""
    _train_two_tasks(torchrun, material, tmp_path, {"max_response_tokens": 8, **RULES})

    # The reference has the actor's weights, in another layout.
    assert abs(read_metrics(tmp_path / "run/metrics.jsonl")[-2]["kl/ref"]) < 1e-6

    samples = _samples(tmp_path / "run")
    ruled = "".join(row["response"] for row in samples["addition"])
    other = "".join(row["response"] for row in samples["other"])
    assert "7" not in ruled and "8" in ruled
    assert "8" not in other and "7" in other
    assert not any(_repeats(row, 3) for row in samples["addition"])
    assert not any(_repeats(row, 2) for row in samples["other"])
    # An end token is at the earliest the fourth.
    lengths = {task: min(row["length"] for row in rows) for task, rows in samples.items()}
    assert lengths["addition"] >= 4 > lengths["other"]


def test_schedules_over_tokens_reach_both_sides(fork, material, tmp_path):
    """The page's example, with a minimum length and penalties beside it."""
    rollout = _example("temperature: {start: 1.2")
    profiles = rollout.pop("sampling_profiles")
    rollout |= {
        "max_response_tokens": 12,
        "min_response_tokens": 3,
        "sampling_profiles": {"other": profiles["proof"] | {"repetition_penalty": 1.2}},
    }
    _train_two_tasks(fork, material, tmp_path, rollout)
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    assert abs(lines[-2]["kl/ref"]) < 1e-6
    assert all("rollout/temperature" in line for line in lines if "mismatch/abs_diff" in line)
    assert min(row["length"] for rows in _samples(tmp_path / "run").values() for row in rows) >= 4
