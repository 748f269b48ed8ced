"""Passes that run out of memory are repeated on all ranks or reported, and budgets follow measured peaks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.readme_metrics import unwritten

sys.path.insert(0, str(Path(__file__).parent))
from models import write_model
from test_roles import COMPARED, OPTIMIZER, metrics
from test_step import grpo

WORKERS = Path(__file__).parent / "workers"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "qwen3-moe"):
        write_model(folder, family)
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_repeated_pass_is_one_with_small_microbatches_from_the_start(fork, models, ranks):
    result = fork(WORKERS / "memory_worker.py", ranks, models)
    assert result.stdout.count("memory: all passes agree") == ranks


TARGET = 0.9
GIB = 8
MEASURED = {"MEASURED": str(TARGET * GIB * 2**30)}


def run_of(folder: Path, material: Path, **changes: Any) -> Path:
    batch = {"prompts_per_step": 8, "samples_per_prompt": 2, "optimizer_steps": 1, **changes.pop("batch", {})}
    settings = {"steps": 4, "batch": batch, "checkpoint": {"every": 2, "export": False}, **changes}
    return grpo(folder, material, "torch", **settings)


def numbers(line: dict[str, float]) -> dict[str, float]:
    """Return the metrics of a step that depend on its rows and micro-batches, and not on the machine."""
    groups = (
        "policy/",
        "reward/",
        "kl/",
        "mismatch/",
        "response/",
        "padding/",
        "memory/pass",
        "memory/tokens",
    )
    return {name: value for name, value in line.items() if name.startswith(groups)}


def test_budgets_follow_the_peaks_of_all_ranks_also_after_a_resume(fork, material, tmp_path):
    target = {"batch": {"memory_target": TARGET}, "gpu_memory_gib": GIB}
    whole = run_of(tmp_path / "whole", material, **target)
    console = fork(WORKERS / "scarce_train.py", 2, "train", whole, env=MEASURED).stdout
    lines = metrics(tmp_path / "whole")
    assert unwritten("a run with a memory target", lines) == []

    # 8 rows of up to 14 tokens on each rank fit by the estimate; then each step measures too much.
    tokens = [line["memory/tokens_per_microbatch"] for line in lines]
    assert tokens[0] == 112 and tokens[1] < tokens[0] and tokens[-1] >= 14, tokens
    assert "batch.memory_target: micro-batches of up to 112 tokens, as `check` estimates" in console
    assert f"the next micro-batches have up to {int(tokens[1])} tokens, 112 before: 7.2 GiB" in console

    # A resumed run packs as the uninterrupted one, to the last bit of each metric.
    resumed = run_of(tmp_path / "resumed", material, **target)
    start = f"checkpoint.resume={tmp_path / 'whole/run/checkpoints/step_2'}"
    fork(WORKERS / "scarce_train.py", 2, "train", resumed, start, env=MEASURED)
    again = metrics(tmp_path / "resumed")
    assert [numbers(line) for line in again] == [numbers(line) for line in lines[2:]]

    # Other micro-batches give the numbers of fixed ones.
    fork("megatron_rl", 2, "train", run_of(tmp_path / "fixed", material), module=True)
    for line, truth in zip(lines, metrics(tmp_path / "fixed"), strict=True):
        for name in COMPARED:
            if name in truth:
                assert line[name] == pytest.approx(truth[name], rel=1e-3, abs=1e-5), name


def test_a_run_that_is_short_of_memory_once_goes_on_with_smaller_microbatches(fork, material, tmp_path):
    config = run_of(tmp_path / "short", material, steps=2)
    env = {"SCARCE": "1:2:40"}
    console = fork(WORKERS / "scarce_train.py", 2, "train", config, env=env).stdout
    first, second = metrics(tmp_path / "short")
    assert not any("split" in name for name in first)
    assert second["memory/split_passes"] == 1 and 14 <= second["memory/split_tokens"] <= 56
    assert unwritten("a run that is short of memory", [second]) == []
    assert "step 2: 1 pass of a role ran out of memory and succeeded in micro-batches of up to" in console
    assert console.count("lower batch.tokens_per_microbatch") == 1


@pytest.mark.parametrize("layout", [{"pipeline": 2}, {"data": 2}])
def test_a_pass_that_cannot_be_repeated_ends_in_a_report(fork, material, tmp_path, layout):
    actor = {"optimizer": OPTIMIZER, "layout": {"pipeline": layout.get("pipeline", 1)}}
    config = run_of(tmp_path / "report", material, actor=actor)
    result = fork(WORKERS / "scarce_train.py", 2, "train", config, env={"SCARCE": "1:1:1"}, check=False)
    assert result.returncode != 0
    for text in (
        "actor on rank 1 ran out of memory in the phase learn of step 1",
        "GiB in the phase learn, as `check` estimates: ",
        "exchange tensors inside a pass (pipeline 2)" if "pipeline" in layout else "repeated once already",
        "largest tensors, without those saved for the backward pass: all ",
        "lower batch.tokens_per_microbatch (now ",
    ):
        assert text in result.output, result.output
