"""A script that carries out the steps of a run: the numbers of `train`, a resume, errors of one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests import small_data

RANKS = Path(__file__).with_name("dataflow_ranks.py")
MEASURED = ("time/", "memory/", "throughput/", "rows/")
REWARD = "def score(*, response, **_):\n    return float(len(response) % 3)\n"
LEAVING = """
import sys
import torch.distributed as dist
from megatron_rl import Run

numbers = []
with Run(sys.argv[1], sys.argv[2:]) as run:
    rank = dist.get_rank()
    for step in run.steps():
        numbers.append(step.number)
        if len(numbers) == 2:
            break
        rollouts = run.generate(step.prompts)
        scores = run.score(rollouts, run.rewards(step.prompts, rollouts))
        run.actor.update(run.estimate(rollouts, scores))
print(f"steps of rank {rank}: {numbers}", flush=True)
"""
FAILING = """
import sys
import torch.distributed as dist
from megatron_rl import Run

with Run(sys.argv[1], sys.argv[2:]) as run:
    for step in run.steps():
        rollouts = run.generate(step.prompts)
        if dist.get_rank() == 1:
            raise ValueError("of the script")
        run.rewards(step.prompts, rollouts)
"""


def lines(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of a run by step, without what the machine's speed decides."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in read]


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "hf/model.safetensors")


def test_scripts_give_the_numbers_of_train(fork: Any, tmp_path: Path) -> None:
    small_data.make(tmp_path / "data")
    (tmp_path / "reward.py").write_text(REWARD)
    fork(RANKS, 2, tmp_path, timeout=400)

    # GRPO after a resume, and PPO with a critic on a rank of its own.
    for ours, theirs in (("grpo", "train"), ("ppo", "train_ppo")):
        assert lines(tmp_path / ours) == lines(tmp_path / theirs)
        expected = weights(tmp_path / theirs)
        found = weights(tmp_path / ours)
        assert all(bool((found[name] == expected[name]).all()) for name in expected)

    # The first loss of DPO is near that of equal policies, -log(1/2); the second one is lower or higher.
    dpo = lines(tmp_path / "online_dpo")[1:]
    assert all(line["dpo/pairs"] > 0 for line in dpo)
    assert 0.5 < dpo[1]["dpo/loss"] < 0.9 and dpo[0]["policy/grad_norm"] > 0
    best = lines(tmp_path / "best_of_n")[1:]
    assert all(0 < line["best/fraction"] <= 1 and line["sft/loss"] > 0 for line in best)
    assert (tmp_path / "best_of_n/report.html").is_file()
    assert (tmp_path / "best_of_n/rollouts/step_2.parquet").is_file()


def test_a_script_that_leaves_its_loop_ends_and_goes_on_later(fork: Any, tmp_path: Path) -> None:
    small_data.make(tmp_path / "data")
    (tmp_path / "script.py").write_text(LEAVING)
    settings = [
        f"model.path={tmp_path / 'data/model'}", f"data.train={tmp_path / 'data/train.jsonl'}", "steps=3",
        "evaluation.sets={}", "sft=null", "prepare={}", f"run_dir={tmp_path / 'run'}", "checkpoint.every=1",
        "batch.prompts_per_step=4",
    ]  # fmt: skip
    config = Path("launch/examples/dataflow/run.yaml").resolve()
    for numbers in ([1, 2], [2, 3], [3]):
        told = fork(tmp_path / "script.py", 2, config, *settings, timeout=200).stdout
        assert f"steps of rank 0: {numbers}" in told
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3]
    assert (tmp_path / "run/hf").is_dir()


def test_an_error_of_one_rank_ends_all(fork: Any, tmp_path: Path) -> None:
    small_data.make(tmp_path / "data")
    (tmp_path / "script.py").write_text(FAILING)
    settings = [
        f"model.path={tmp_path / 'data/model'}", f"data.train={tmp_path / 'data/train.jsonl'}",
        "evaluation.sets={}", "sft=null", "prepare={}", f"run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    config = Path("launch/examples/dataflow/run.yaml").resolve()
    ended = fork(tmp_path / "script.py", 2, config, *settings, timeout=200, check=False)
    assert ended.returncode != 0
    assert "rank 1 (actor: tensor 1" in ended.output and "ValueError: of the script" in ended.output
