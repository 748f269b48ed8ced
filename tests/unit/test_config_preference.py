"""The section `preference`: derived values and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_workspace import write_workspace

from megatron_rl.check.configuration import CheckReport, check_config
from megatron_rl.config.load import load


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    write_workspace(root)
    pair = json.dumps({"prompt": "1+1=", "ground_truth": "2", "chosen": "2", "rejected": "3"})
    (root / "pairs.jsonl").write_text(pair + "\n")
    return root


def check(workspace: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> CheckReport:
    monkeypatch.chdir(workspace)
    return check_config(load("config.yaml", overrides), None)


GOOD = "preference={data: pairs.jsonl, steps: 5}"


def test_other_roles_start_from_the_trained_policy(workspace, monkeypatch):
    report = check(workspace, monkeypatch, GOOD, "algorithm.kl=loss")
    assert report.errors == ()
    config = report.config
    assert config.reference.path.endswith("/stages/dpo/hf")
    assert config.preference.optimizer.minimum_learning_rate == config.preference.optimizer.learning_rate
    assert (config.preference.loss, config.preference.beta) == ("sigmoid", 0.1)
    assert "preferences" in report.origins["reference.path"].detail


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("preference={data: pairs.jsonl}", "preference.steps"),
        ("preference={data: train.jsonl, steps: 5}", "preference.chosen_field"),
        ("preference={data: nothing.jsonl, steps: 5}", "preference.data"),
        ("preference={data: pairs.jsonl, steps: 5, loss: sigmod}", "preference.loss"),
        ("preference={data: pairs.jsonl, steps: 5, loss: 'nothing.py:mine'}", "preference.loss"),
        ("preference={data: pairs.jsonl, steps: 5, beta: 0}", "preference.beta"),
        ("preference={data: pairs.jsonl, steps: 5, label_smoothing: 0.5}", "preference.label_smoothing"),
        ("preference={data: pairs.jsonl, steps: 0}", "preference.steps"),
    ],
)
def test_mistakes_say_where_they_are(workspace, monkeypatch, override, where):
    errors = check(workspace, monkeypatch, override).errors
    assert any(where in str(error) for error in errors), [str(error) for error in errors]


def test_a_warm_up_longer_than_the_stage_is_a_warning(workspace, monkeypatch):
    section = "preference={data: pairs.jsonl, steps: 5, optimizer: {warmup_steps: 9}}"
    report = check(workspace, monkeypatch, section)
    assert not report.errors
    assert any("preference.optimizer.warmup_steps" in str(warning) for warning in report.warnings)
