"""What `check` says of distillations that cannot run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from config_workspace import write_workspace

from megatron_rl.check.configuration import check_config
from megatron_rl.config.load import load
from megatron_rl.config.roles import teacher_of_task
from tests.hf_models import save_model

pytestmark = pytest.mark.usefixtures("functions_load_once")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def errors(*overrides: str) -> list[str]:
    return [str(error) for error in check_config(load("config.yaml", overrides), 4, patience=0).errors]


def test_a_distillation_needs_a_teacher_and_no_reward(workspace: Path) -> None:
    (error,) = errors("algorithm.name=distillation")
    assert "teacher.path" in error
    assert errors("algorithm.name=distillation", "teacher.path=model", "reward={}") == []
    (error,) = errors("reward={}")
    assert "no reward is configured" in error


def test_a_teacher_has_the_actors_tokens(workspace: Path) -> None:
    """Its embedding may have more rows, as models of one family pad them to different sizes."""
    rows = json.loads((workspace / "model/config.json").read_text())["vocab_size"]
    overrides = ("algorithm.distillation=reverse_kl", "teacher.path=other")
    for more in (0, 64):
        save_model("qwen2", workspace / "other", vocab_size=rows + more)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(workspace / "model" / name, workspace / "other")
        assert errors(*overrides) == []

    file = workspace / "other/tokenizer.json"
    text = json.loads(file.read_text())
    vocabulary = text["model"]["vocab"]
    first, second, *_ = vocabulary
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(text))
    (error,) = errors(*overrides)
    assert "the teacher and the model have different tokenizers" in error and "2 that differ" in error

    save_model("qwen2", workspace / "other", vocab_size=rows - 1)
    assert any("teacher and the model have different vocabularies" in error for error in errors(*overrides))


def test_no_more_tokens_are_distinguished_than_the_model_has(workspace: Path) -> None:
    rows = json.loads((workspace / "model/config.json").read_text())["vocab_size"]
    loss = ("algorithm.name=distillation", "teacher.path=model")
    assert errors(*loss, f"algorithm.distillation={{name: top_k, k: {rows}}}") == []
    (error,) = errors(*loss, f"algorithm.distillation={{name: top_k, k: {rows + 1}}}")
    assert "algorithm.distillation.k" in error and f"at most {rows}" in error
    (error,) = errors(*loss, "algorithm.distillation={name: top_k, divergence: kl}")
    assert "forward_kl, reverse_kl, jsd" in error
    (error,) = errors("algorithm.distillation={name: top_k, k: 4}")
    assert "teacher.path" in error


def test_each_task_has_one_teacher_with_a_model(workspace: Path) -> None:
    alone = (
        "algorithm.name=distillation",
        "teachers={math: {path: model}, code: {path: model, tasks: [c, d]}}",
    )
    assert errors(*alone) == []
    assert errors(*alone, "teacher.path=model") == []
    (error,) = errors(*alone, "teachers.code.tasks=[c, math]")
    assert "the task 'math' has several teachers" in error and "teachers.code.tasks" in error
    (error,) = errors("algorithm.name=distillation", "teachers={math: {layout: {tensor: 1}}}")
    assert "`teachers.math` has no model" in error and "set teachers.math.path" in error
    shutil.copytree(workspace / "model", workspace / "other")
    text = json.loads((workspace / "other/tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    first, second, *_ = vocabulary
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (workspace / "other/tokenizer.json").write_text(json.dumps(text))
    (error,) = errors(*alone, "teachers.code.path=other")
    assert "different tokenizers" in error and "teachers.code.path" in error


def test_tasks_have_the_teacher_that_names_them(workspace: Path) -> None:
    config = load(
        "config.yaml", ("teachers={math: {path: model}, code: {path: model, tasks: [c, d]}}",)
    ).valid()
    assert teacher_of_task(config) == {"math": "teachers.math", "c": "teachers.code", "d": "teachers.code"}


def test_a_server_that_gets_no_requests_is_said(workspace: Path) -> None:
    section = "teacher_server={url: 'http://127.0.0.1:9/v1', model: big}"
    report = check_config(load("config.yaml", (section,)), 4, patience=0)
    assert not report.errors
    assert any("the teacher's server gets no requests" in str(item) for item in report.warnings)


def test_a_teacher_that_nothing_reads_is_said(workspace: Path) -> None:
    report = check_config(load("config.yaml", ("teacher.path=model",)), 4, patience=0)
    assert not report.errors
    assert any(
        "the teacher is loaded but the algorithm does not use it" in str(item) for item in report.warnings
    )
