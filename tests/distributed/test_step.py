"""One step of a run: how much of the package it goes through, and that no failed reward is lost."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest
import yaml
from test_roles import metrics, ppo

from megatron_rl.config.run_folder import RunFolder
from megatron_rl.trainer.starts import read_starts

TRACED, SCORED = (Path(__file__).parent / f"workers/{name}_train.py" for name in ("traced", "scored"))
MAX_FILES = {"torch": 53, "vllm": 55}
"""A newcomer reads a plain GRPO step in so many files."""
REWARD = """
def score(*, prompt, **_):
    if int(prompt[-2 if prompt.endswith("=") else -1]) % 2:
        raise ValueError("an odd problem")
    return 1.0
"""


def grpo(folder: Path, material: Path, engine: str, **changes) -> Path:
    settings = {
        "steps": 2,
        "reward": {"function": "megatron_rl.rewards.arithmetic:exact_match", "models": {}},
        "critic": None,
        "rollout": {"engine": engine, "max_response_tokens": 6},
        "algorithm": {"name": "grpo", "kl": "none"},
    }
    return ppo(folder, material, **settings | changes)


@pytest.mark.parametrize("engine", MAX_FILES)
def test_a_plain_step_goes_through_few_files(fork, material, tmp_path, engine):
    files = tmp_path / "files"
    fork(TRACED, 1, "train", grpo(tmp_path / "run", material, engine), env={"TRACED_FILES": str(files)})
    executed = files.read_text().splitlines()
    assert {"trainer/loop.py", "trainer/sample.py"} <= set(executed)
    assert len(executed) <= MAX_FILES[engine], executed


def test_one_update_per_batch_needs_no_scoring_pass(fork, material, tmp_path):
    """Without the scoring pass every number of the run stays the same, including the KL."""
    lines = []
    kl = {"name": "loss", "coef": 0.05, "controller": "adaptive", "horizon": 100.0}
    changes = {
        "steps": 3,
        "actor": {"layout": {"pipeline": 2}},
        "batch": {"optimizer_steps": 1},
        "algorithm": {"name": "grpo", "kl": kl},
    }
    for name in ("0", "1"):
        file = grpo(tmp_path / name, material, "torch", **changes)
        run = fork(SCORED, 2, "train", file, env={"SCORING_PASS": name})
        assert run.stdout.count("metrics exchanged 3 times") == 2, run.stdout
        lines.append(metrics(tmp_path / name))
    for learned, scored in zip(*lines, strict=True):
        same = [name for name in learned if not name.startswith(("time/", "throughput/", "memory/"))]
        assert {name: learned[name] for name in same} == {name: scored[name] for name in same}
        assert learned.keys() == scored.keys()
        assert {"mismatch/abs_diff", "kl/ref", "kl/coef", "policy/kl"} <= set(same)


@pytest.mark.parametrize("optimizer_steps", [1, 2])
def test_a_mismatch_stops_a_run_before_the_weights_move(fork, material, tmp_path, optimizer_steps):
    batch = {"optimizer_steps": optimizer_steps}
    file = grpo(tmp_path / "run", material, "torch", batch=batch, mismatch={"warn": 1e-30, "stop": 1e-29})
    result = fork(SCORED, 1, "train", file, check=False)
    assert "MismatchError: log-probs of trainer and rollout engine differ by" in result.output
    assert "changed weights: []" in (tmp_path / "run/run/rank_logs/rank_0.log").read_text()


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
        assert (rows["failure"].notna() == ~rows["valid"]).all()
        assert (rows["advantage"].notna() == rows["valid"]).all()
        assert rows["failure"].dropna().str.fullmatch(r"exception: (.*\n)*ValueError: an odd problem").all()
        greedy = sampled // 2  # two samples of each prompt, and its one greedy response
        assert f"step {step}: {sampled + greedy} rewards failed in all" in output
        assert output.count(f"step {step}: a reward failed (exception): ") == 1
        assert line["reward/invalid"] == pytest.approx((sampled + greedy) / (len(rows) * 1.5))

    # The record of the start has the command, and the keys of the file alone.
    (start,) = read_starts(RunFolder(tmp_path / "run/run"))
    assert "-m megatron_rl train" in start.command and start.hardware["ranks"] == 2
    assert "reward.function" in start.explicit and "reward.timeout" not in start.explicit
