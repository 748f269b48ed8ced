"""Health rules in whole runs: a real fault fires its rule and no other; warnings, stops and resumes."""

from __future__ import annotations

import json
import shutil
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
    "clipping": {
        "steps": 3,
        "actor": {"optimizer": {"learning_rate": 3e-3}},
        "batch": HEALTHY["batch"] | {"epochs": 8},
        "algorithm": {"name": "grpo", "kl": "none"},
    },
}
"""Rule -> what is wrong with a run that fires it."""
SUITE_FAULTS = ("", "equal_groups", "invalid", "mismatch", "kl")
CAMPAIGN_FAULTS = tuple(name for name in FAULTS if name not in SUITE_FAULTS)


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


def health(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of the rules in each step."""
    return [
        {name: value for name, value in line.items() if name.startswith("health/")} for line in lines(folder)
    ]


def fired(folder: Path) -> dict[str, list[int]]:
    """Return the steps in which each rule fires."""
    steps: dict[str, list[int]] = {}
    for line in lines(folder):
        for name, value in line.items():
            if name.startswith("health/") and value:
                steps.setdefault(name.removeprefix("health/"), []).append(int(line["step"]))
    return steps


@pytest.mark.parametrize("names", [SUITE_FAULTS, pytest.param(CAMPAIGN_FAULTS, marks=pytest.mark.campaign)])
def test_a_fault_of_a_run_fires_its_rule_and_no_other(
    in_turn: Any, material: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    files = [run(tmp_path / f"run_{name}", material, FAULTS[name]) for name in names]
    outputs = in_turn(1, *(("train", file) for file in files))
    for name, output in zip(names, outputs, strict=True):
        steps = fired(tmp_path / f"run_{name}")
        assert [*steps] == ([name] if name else []), name
        assert output.count("warning: health rule") == len(steps), name
        if name:
            assert f"step {steps[name][0]}: warning: health rule {name}: " in output


AHEAD = {"placement": "standalone", "steps": 6, "asynchrony": {"steps_ahead": 1}}


@pytest.mark.campaign
def test_a_resumed_run_warns_as_an_uninterrupted_one_does(fork: Any, material: Path, tmp_path: Path) -> None:
    """Rules count across a checkpoint, also in steps whose evaluation comes beside the next one."""
    answered = {"data": str(material / "eval.jsonl"), "max_prompts": 8}
    changes = {
        "evaluation": {"every": 1, "sets": {"held_out": answered}},
        "checkpoint": {"every": 3, "keep": 9},
        # Times differ between runs.
        "health": {"rules": {"staleness": {"above": 0.5, "steps": 3}, "idle": False}},
    }
    file = run(tmp_path / "ahead", material, AHEAD | FAULTS["equal_groups"] | changes)

    def warnings(output: str) -> list[str]:
        return [line for line in output.splitlines() if ": health rule" in line]

    first = fork("megatron_rl", 2, "train", file, module=True).output
    assert fired(tmp_path / "ahead") == {"staleness": [4, 5, 6], "equal_groups": [5, 6]}
    assert len(warnings(first)) == 2
    expected = health(tmp_path / "ahead")
    assert "health/overfitting" in expected[0]

    # As if the run had been killed after step 3, whose evaluation comes beside step 4.
    shutil.rmtree(tmp_path / "ahead/run/checkpoints/step_6")
    again = fork("megatron_rl", 2, "train", file, module=True).output
    assert "at step 3" in again and warnings(again) == warnings(first)
    assert health(tmp_path / "ahead") == expected


def test_a_rule_that_stops_saves_on_every_rank_and_names_what_to_do(
    fork: Any, material: Path, tmp_path: Path
) -> None:
    rules = {"staleness": {"above": 0.5, "steps": 2}, "idle": False}
    file = run(tmp_path / "ahead", material, AHEAD | {"health": {"act": "stop", "rules": rules}})
    stopped = fork("megatron_rl", 2, "train", file, module=True, check=False)
    assert stopped.returncode == 2
    assert "stopped by the error below after step 3: saved" in stopped.output
    assert "exit code 2" in stopped.output
    error = stopped.output.partition("error: a health rule has ended the run: ")[2]
    assert "tokens are old when they are trained on" in error
    for text in (
        "where:    health.rules.staleness (step 3)",
        "expected: 0.5 or less (staleness/mean)",
        "got:      staleness/mean 1, 1 at steps 2-3",
        "fix:      look at the samples (the longest), change asynchrony.steps_ahead, ",
    ):
        assert text in error, error
    assert (tmp_path / "ahead/run/checkpoints/step_3").is_dir()
    assert fired(tmp_path / "ahead") == {"staleness": [3]}

    # Started again as it is, the run has as many steps to get better; without the rule it completes.
    again = fork("megatron_rl", 2, "train", file, module=True, check=False)
    assert again.returncode == 2 and "stopped by the error below after step 5" in again.output
    fork("megatron_rl", 2, "train", file, "health.rules.staleness=off", module=True)
    assert [line["step"] for line in lines(tmp_path / "ahead")] == [1, 2, 3, 4, 5, 6]
