"""One step of a run: how much of the package it goes through, and that no failed reward is lost."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest
import yaml
from test_roles import metrics, ppo

TRACED = Path(__file__).parent / "workers/traced_train.py"
MOST_FILES = {"torch": 47, "vllm": 51}
"""A newcomer reads a plain GRPO step in so many files."""
REWARD = """
def score(*, prompt, **_):
    if int(prompt[-2 if prompt.endswith("=") else -1]) % 2:
        raise ValueError("an odd problem")
    return 1.0
"""


def grpo(folder: Path, material: Path, engine: str, **changes) -> Path:
    return ppo(
        folder,
        material,
        steps=2,
        reward={"function": "megatron_rl.rewards.arithmetic:exact_match", "models": {}},
        critic=None,
        rollout={"engine": engine, "max_response_tokens": 6},
        **{"algorithm": {"name": "grpo", "kl": "none"}, **changes},
    )


@pytest.mark.parametrize("engine", MOST_FILES)
def test_a_plain_step_goes_through_few_files(fork, material, tmp_path, engine):
    files = tmp_path / "files"
    fork(TRACED, 1, "train", grpo(tmp_path / "run", material, engine), env={"TRACED_FILES": str(files)})
    executed = files.read_text().splitlines()
    assert {"trainer/loop.py", "trainer/sample.py"} <= set(executed)
    assert len(executed) <= MOST_FILES[engine], executed


def test_every_failed_reward_of_every_call_is_counted(fork, material, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/reward.py").write_text(REWARD)
    file = grpo(tmp_path / "run", material, "torch", algorithm={"name": "remax"})
    config = yaml.safe_load(file.read_text())
    config["reward"]["function"] = f"{tmp_path / 'run/reward.py'}:score"
    file.write_text(yaml.safe_dump(config))
    output = fork("megatron_rl", 2, "train", file, module=True).output
    for step, line in zip((1, 2), metrics(tmp_path / "run"), strict=True):
        rows = pandas.read_parquet(tmp_path / f"run/run/rollouts/step_{step}.parquet")
        sampled = int((~rows["valid"]).sum())
        assert 0 < sampled < len(rows)
        greedy = sampled // 2  # two samples of each prompt, and its one greedy response
        assert f"step {step}: {sampled + greedy} rewards failed in all" in output
        assert output.count(f"step {step}: a reward failed (exception): ") == 4
        assert line["reward/invalid"] == pytest.approx((sampled + greedy) / (len(rows) * 1.5))
