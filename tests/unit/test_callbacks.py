"""Callbacks: a user's classes that watch a run and break nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_workspace import write_workspace

from megatron_rl.callbacks import Callbacks
from megatron_rl.check.configuration import check_config
from megatron_rl.config.load import load

pytestmark = pytest.mark.usefixtures("functions_load_once")

CODE = """
class Watch:
    seen = []

    def on_step_begin(self, step):
        Watch.seen.append(step)

    def on_step_end(self, step, metrics):
        metrics.clear()
        if step == 2:
            raise ValueError("two")

class Typo:
    def on_step_ends(self, step, metrics):
        pass

class Nothing:
    pass

function = len
"""


def test_a_callback_gets_copies_and_its_exception_ends_its_calls(tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(CODE)
    lines: list[str] = []
    callbacks = Callbacks((f"{tmp_path}/watch.py:Watch",), lines.append)
    metrics = {"reward/mean": 1.0}
    for step in (1, 2, 3):
        callbacks.call_method("on_step_begin", step)
        callbacks.call_method("on_samples", step, {"prompt": ["a"]})
        callbacks.call_method("on_step_end", step, metrics)
    assert metrics == {"reward/mean": 1.0}
    (line,) = lines
    assert "watch.py:Watch failed in on_step_end" in line and "ValueError: two" in line
    from megatron_rl.user_code import load_object

    assert load_object(f"{tmp_path}/watch.py:Watch", "callbacks").seen == [1, 2]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_workspace(tmp_path)
    (tmp_path / "watch.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Typo", "rename on_step_ends to on_step_end"),
        ("Nothing", "type without any of them"),
        ("function", "is not a callback"),
        ("Missing", "Missing"),
    ],
)
def test_check_refuses_what_is_never_called(name: str, said: str, workspace: Path) -> None:
    report = check_config(load("config.yaml", (f"callbacks=[watch.py:{name}]",)), 4, patience=0)
    (error,) = report.errors
    assert error.where.startswith("callbacks") and said in str(error)
    assert not check_config(load("config.yaml", ("callbacks=[watch.py:Watch]",)), 4, patience=0).errors
