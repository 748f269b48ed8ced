"""`plan CONFIG`: a run's own layout beside the layouts that the search finds for it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron_rl.cli.main import main
from megatron_rl.planning.predict.batch import StepBatch, response_lengths
from megatron_rl.planning.predict.learn import TrainChoice, network_bytes
from megatron_rl.shapes.hardware import load_constants
from megatron_rl.shapes.layout import ParallelLayout, default_stage_layers
from megatron_rl.shapes.memory import (
    LayerImplementation,
    OptimizerChoice,
    find_representative_stages,
    training_memory,
)
from megatron_rl.shapes.published import load_shape

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/qwen2.5-7b-8gpu.yaml"


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_every_layout_is_what_check_predicts_of_its_overrides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plans.json"
    assert main(["plan", CONFIG, "world_size=16", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    given, *found = json.loads(out.read_text())
    assert not given["overrides"] and 2 <= len(found) <= 3
    totals = [plan["seconds"]["total"] for plan in found]
    assert totals == sorted(totals)

    for plan in (given, *found):
        words = ["gpu=h100", "world_size=16", *plan["overrides"], "--without-files", "--json"]
        assert main(["check", CONFIG, *words]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["prediction"]["seconds"] == pytest.approx(plan["seconds"])
        peak = max(max(rank["total"].values()) for rank in record["memory"])
        assert peak == plan["memory"]
        assert f"{plan['seconds']['total']:.1f} s a step" in shown
        # What is printed can be pasted behind a command.
        printed = shlex.split(shown.replace("\n", " "))
        assert set(plan["overrides"]) <= set(printed)
        if "weight sync" in plan["network"]:
            assert plan["network"]["weight sync"] == record["weight_sync"]["received_most"]
    assert shown.startswith(f"{CONFIG}: Qwen2.5-7B-Instruct, 7.62 B parameters, grpo on 16 x h100 ")
    compared = r"1\. colocated: .*(as fast as|er than) the given layout"
    assert re.search(compared, shown)


@pytest.mark.parametrize("limits", ["{512: 256, more: 1024}", "auto"])
def test_a_configuration_with_limits_of_responses_is_planned(
    limits: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", CONFIG, f"rollout.max_response_tokens={limits}"]) == 0
    shown = capsys.readouterr().out
    assert "on 8 x h100 (assumed)" in shown and "1024 at most" in shown and "1. colocated: " in shown


def test_a_critic_is_planned_with_its_roles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plans.json"
    words = ["world_size=16", "algorithm.name=ppo", "algorithm.kl=loss", "--gpu", "h200", "--json", str(out)]
    assert main(["plan", CONFIG, *words]) == 0
    shown = capsys.readouterr().out
    assert "16 x h200" in shown and all(f"     {role} " in shown for role in ("critic", "reference"))
    _, best, *_ = json.loads(out.read_text())
    assert any(text.startswith("critic.layout=") for text in best["overrides"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((CONFIG, "--prompts", "64"), "--prompts describes the job of a plain model"),
        ((CONFIG, "--algorithm", "ppo"), "--algorithm describes the job of a plain model"),
        ((CONFIG, "--gpus", "0"), "`--gpus` is out of range"),
        ((CONFIG, "steps=0"), "`steps` is out of range"),
        ((CONFIG, "--gpu", "h300"), "'h300', which is not a choice"),
        (("qwen2-7b", "steps=3", "--gpus", "8"), "overrides apply to a configuration"),
        (("gone.yaml",), "gone.yaml"),
        (("configs/quickstart.yaml",), "this configuration cannot be planned"),
        (("configs/recipes/distillation.yaml",), "this configuration cannot be planned"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    refused = capsys.readouterr().err
    assert message in refused and "expected:" in refused and "got:" in refused


def test_bytes_across_nodes_are_those_of_groups_across_nodes() -> None:
    shape = load_shape("qwen2.5-7b")
    batch = StepBatch(64, 8, 2, 512.0, response_lengths(512.0, 512.0, "fixed"), 1024.0)
    tokens = 64 * 8 * 1024
    one_node = load_constants().cluster("h100", 8)
    two_nodes = load_constants().cluster("h100", 16)
    ranks = tuple(range(16))

    inside = TrainChoice(shape, ParallelLayout(ranks[:8], tensor=2))
    assert network_bytes(inside, batch, one_node) == {}

    # Gradients of 4 bytes are reduced and parameters of 2 gathered, in both optimizer steps.
    copies = TrainChoice(shape, ParallelLayout(ranks))
    sent = network_bytes(copies, batch, two_nodes)
    assert sent == {"gradients": pytest.approx(2 * 6 * shape.parameters * 15 / 16)}

    # Two stages of 8 ranks, one on each node: only activations and their gradients cross.
    stages = TrainChoice(shape, ParallelLayout(ranks, tensor=2, pipeline=2, sequence_parallel=True))
    sent = network_bytes(stages, batch, two_nodes)
    assert sent == {"activations": pytest.approx(2 * 2 * shape.hidden * tokens / 4 / 2)}


@pytest.mark.parametrize("model", ["GLM-4.7", "DeepSeek-V3", "Qwen3.5-27B", "Llama-3.1-70B-Instruct"])
@pytest.mark.parametrize("pipeline", [4, 8, 16, 32])
def test_the_fullest_stage_is_one_of_those_that_are_estimated(model: str, pipeline: int) -> None:
    """A stage of dense layers alone comes before the stages with experts, which have other sizes."""
    shape = load_shape(str(ROOT / "configs/models" / model))
    layout = ParallelLayout(tuple(range(2 * pipeline)), tensor=2, pipeline=pipeline)
    stages = default_stage_layers(shape.layers, pipeline)

    def memory(stage: int) -> float:
        optimizer = OptimizerChoice()
        return training_memory(
            shape, layout, stages, stage, optimizer, LayerImplementation(2, True, "none"), 4096, 8
        ).total

    estimated = find_representative_stages(shape, stages)
    assert max(map(memory, estimated)) == max(map(memory, range(pipeline)))
    assert len(estimated) < pipeline or pipeline == 4


# `plan deepseek-v3` of test_planner_command.py has dense first layers, and no file.
@pytest.mark.campaign
def test_a_model_with_dense_layers_at_its_start_has_layouts_that_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plans.json"
    assert main(["plan", "configs/bench/glm-4.7-256gpu.yaml", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert len(json.loads(out.read_text())) > 1, shown
