"""Serving what was trained: which model, which sampling, and the tables of a load test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import bench_serve, serve
from megatron_rl.cli.main import main
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.errors import UserError


def result(rate: float) -> dict[str, float]:
    """Return a result of vLLM's load test."""
    times = {
        f"p{point}_{name}_ms": point * 10.0
        for point in bench_serve.PERCENTILES
        for name in ("ttft", "tpot", "e2el")
    }
    return {"request_throughput": rate, "output_throughput": 8 * rate, "completed": 4, **times}


def test_a_run_is_served_with_the_model_of_its_end(tmp_path: Path) -> None:
    model = RunFolder(tmp_path).model
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert serve.find_or_export_model(tmp_path) == serve.find_or_export_model(model) == model


def test_what_holds_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path)]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err


def defaults_of(folder: Path, rollout: str) -> dict[str, Any]:
    """Return the server's sampling defaults for a run with this section ``rollout``."""
    (folder / "config.yaml").write_text(
        "model: {path: m}\ndata: {train: t.jsonl}\nreward: {function: r.py:f}\nsteps: 1\nrun_dir: r\n"
        f"rollout: {rollout}\n"
    )
    return serve.sampling_defaults(RunFolder(folder))


def test_the_sampling_of_the_run_is_the_servers_default(tmp_path: Path) -> None:
    defaults = defaults_of(tmp_path, "{temperature: 0.7, top_p: 0.9, max_response_tokens: 64}")
    assert defaults == {"temperature": 0.7, "max_new_tokens": 64, "top_p": 0.9}
    command = serve.server_command(Path("m"), "name", "0.0.0.0", 80, defaults)
    assert json.loads(command[command.index("--override-generation-config") + 1]) == defaults


def test_a_server_has_the_last_values_of_schedules(tmp_path: Path) -> None:
    schedules = "{temperature: {start: 1.0, end: 0.6, over: 8}, top_p: {start: 1.0, end: 0.9, steps: 5}}"
    defaults = defaults_of(tmp_path, schedules)
    assert defaults == {"temperature": 0.6, "max_new_tokens": 256, "top_p": 0.9}


def test_tables_show_rates_percentiles_and_headroom() -> None:
    text = bench_serve.result_tables({1: result(2.0), 20: result(10.0)})
    assert "| 20 | 10.00 | 80 | 500 / 950 / 990 | 500.0 / 950.0 / 990.0 | 0.50 / 0.95 / 0.99 |" in text
    assert "| 20 | 8.00 | 691,200 |" in text


@pytest.mark.parametrize("users", ["", "0", "a,2"])
def test_numbers_of_users_that_cannot_be_read(users: str) -> None:
    with pytest.raises(UserError, match="numbers of users"):
        bench_serve._parse_user_counts(users)
