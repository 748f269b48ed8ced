"""vLLM's API servers as engine of a run."""

from __future__ import annotations

import time
from pathlib import Path

import yaml

from megatron_rl.metrics import read_metrics
from tests.conftest import free_port
from tests.readme_metrics import unwritten

RANKS = Path(__file__).with_name("server_ranks.py")


def test_a_server_that_is_killed_costs_its_requests_and_comes_back_with_weights(fork, material, tmp_path):
    config = {
        "run_dir": str(tmp_path / "run"),
        "steps": 100_000,  # it is ended before
        "model": {"path": str(material / "model"), "dtype": "float32"},
        "data": {"train": str(material / "train.jsonl"), "max_prompt_tokens": 8},
        "reward": {"function": f"{tmp_path}/reward.py:score", "timeout": 300},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "optimizer_steps": 2},
        "actor": {"optimizer": {"learning_rate": 1e-2, "minimum_learning_rate": 1e-3, "decay": "linear"}},
        "rollout": {
            "engine": "server",
            "server": {"urls": [f"http://127.0.0.1:{free_port()}" for _ in range(2)], "update_timeout": 60},
            "max_response_tokens": 64,
        },
        # Weights of one update before differ by more.
        "mismatch": {"stop": 1e-4},
        "algorithm": {"name": "grpo"},
    }
    reward = "def score(prompt, response, ground_truth, metadata):\n    return len(response) % 3\n"
    (tmp_path / "reward.py").write_text(reward)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    ended = fork(RANKS, 1, file, check=False, timeout=560)
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    there = [line["rollout/servers"] for line in lines]
    assert there, ended.output
    assert (there[0], min(there), there[-1]) == (2, 1, 2), ended.output
    lost = config["rollout"]["server"]["urls"][1]
    assert f"warning: server {lost} is unavailable: ServerError: {lost}/weight_info" in ended.output
    assert f"server {lost} is back, with the newest weights" in ended.output
    assert (tmp_path / "run/holder").read_text().startswith(f"the run in {tmp_path / 'run'} (process ")
    # Written by a process that no launcher waits for.
    holders, until = tmp_path / "run/holders_after", time.monotonic() + 60
    while not holders.exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert holders.read_text() == "[None, None]", "a run that is stopped gives back"
    assert unwritten("a run with servers", lines) == []
    assert sum(line["rollout/sampled_again"] for line in lines) > 0
    assert min(line["reward/valid_fraction"] for line in lines) == 1, "the other server has sampled them"
    assert all(line["mismatch/abs_diff"] < 1e-4 for line in lines)
    assert min(line["policy/grad_norm"] for line in lines[:3]) > 0, "weights that are not new would do"
