"""Health rules in whole runs: a real fault fires its rule and no other, warns or stops, and survives a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_roles import grpo

CODE = """
def score(*, prompt, response, **_):
    return float(len(response) % 3 == 0)

def of_the_prompt(*, prompt, **_):
    return float(sum(map(ord, prompt)) % 3)

def nearly_equal(*, response, **_):
    return 1 + 1e-4 * (len(response) % 3)

def fails(*, response, **_):
    if len(response) % 3 == 1:
        raise ValueError("no answer")
    return float(len(response) % 2)

def keep(*, response, **_):
    return sum(map(ord, response)) % 3 == 0
"""
HEALTHY: dict[str, Any] = {
    "placement": "colocate",
    "steps": 5,
    "batch": {"prompts_per_step": 8, "samples_per_prompt": 4, "optimizer_steps": 2},
    "actor": {"optimizer": {"learning_rate": 1e-5}},
    "rollout": {"engine": "torch", "max_response_tokens": 32},
    "algorithm": {"name": "grpo", "kl": {"name": "loss", "coef": 0.01}},
}
LARGE_STEPS = {"optimizer": {"learning_rate": 3e-2}}
FAULTS: dict[str, dict[str, Any]] = {
    "": {},
    "equal_groups": {"reward": {"function": "code.py:of_the_prompt"}},
    "reward_spread": {"reward": {"function": "code.py:nearly_equal"}},
    "truncation": {"rollout": {"engine": "torch", "max_response_tokens": 5}},
    "invalid": {"reward": {"function": "code.py:fails"}},
    "filtered": {"rollout": HEALTHY["rollout"] | {"filters": {"function": "code.py:keep"}}},
    "mismatch": {"mismatch": {"warn": 1e-30, "stop": 1.0}},
    "kl": {"actor": LARGE_STEPS, "batch": HEALTHY["batch"] | {"optimizer_steps": 1}},
    "clipping": {"actor": LARGE_STEPS, "health": {"rules": {"kl": False}}},
}
"""Rule -> what is wrong with a run that fires it."""


def run(folder: Path, material: Path, changes: dict[str, Any]) -> Path:
    """Write a run with a reward that a small random model earns now and then."""
    folder.mkdir(parents=True)
    (folder / "code.py").write_text(CODE)
    file = grpo(folder, material)
    config = yaml.safe_load(file.read_text()) | HEALTHY
    config["reward"]["function"] = "code.py:score"
    for name, value in changes.items():
        config[name] = {**config.get(name, {}), **value} if isinstance(value, dict) else value
    text = yaml.safe_dump(config).replace("code.py:", f"{folder / 'code.py'}:")
    file.write_text(text)
    return file


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def fired(folder: Path) -> dict[str, list[int]]:
    """Return the steps in which each rule fires."""
    steps: dict[str, list[int]] = {}
    for line in lines(folder):
        for name, value in line.items():
            if name.startswith("health/") and value:
                steps.setdefault(name.removeprefix("health/"), []).append(int(line["step"]))
    return steps


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_run_fires_its_rule_and_no_other(
    fork: Any, material: Path, tmp_path: Path, name: str
) -> None:
    file = run(tmp_path / "faulty", material, FAULTS[name])
    launch = fork("megatron_rl", 1, "train", file, module=True)
    steps = fired(tmp_path / "faulty")
    assert [*steps] == ([name] if name else [])
    assert launch.output.count("warning: health rule") == len(steps)
    if name:
        assert f"step {steps[name][0]}: warning: health rule {name}: " in launch.output
