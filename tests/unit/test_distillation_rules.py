"""What `check` says of distillations that cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_workspace import write_workspace

from megatron_rl.check.configuration import check_config
from megatron_rl.config.load import load
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


def test_a_teacher_of_another_vocabulary_is_refused(workspace: Path) -> None:
    save_model("qwen2", workspace / "other", vocab_size=777)
    messages = errors("algorithm.distillation=reverse_kl", "teacher.path=other")
    assert any("the teacher has another vocabulary than the model" in message for message in messages)


def test_a_teacher_that_nothing_reads_is_said(workspace: Path) -> None:
    report = check_config(load("config.yaml", ("teacher.path=model",)), 4, patience=0)
    assert not report.errors
    assert any(
        "the teacher is loaded but the algorithm does not use it" in str(item) for item in report.warnings
    )
