"""The run folder, metrics files, console lines and progress."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pty
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl.config.load import load_config
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.sections.logging import LoggingConfig
from megatron_rl.errors import UserError
from megatron_rl.metrics import read_metrics
from megatron_rl.trainer import logging
from megatron_rl.trainer.job import Job, report_failure
from megatron_rl.trainer.logging import WIDTH, MetricsLog, Progress, format_clock, redirect_output
from megatron_rl.trainer.loop import Phases
from megatron_rl.trainer.sample_log import write_rollouts
from megatron_rl.trainer.trackers import Trackers
from tests.conftest import run_forked

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create()


def trackers(folder: RunFolder) -> Trackers:
    return Trackers(LoggingConfig(), folder, {}, resumed=False, print_line=print)


def log_steps(
    folder: RunFolder, first: int, last: int, resumed: int | None = None, scale: float = 1.0
) -> str:
    console = io.StringIO()
    with (
        trackers(folder) as told,
        MetricsLog(folder, 10, resumed_step=resumed, console=console, trackers=told) as log,
    ):
        for step in range(first, last + 1):
            log.write(step, {"reward/mean": scale * step, "policy/loss": 0.5})
    return console.getvalue()


def scalars(folder: RunFolder, name: str, phase: str = "train") -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder.tensorboard / phase))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_a_line_per_step_in_file_console_and_tensorboard(folder: RunFolder) -> None:
    text = log_steps(folder, 0, 3)
    assert [line["step"] for line in read_metrics(folder.metrics)] == [0, 1, 2, 3]
    assert read_metrics(folder.metrics)[2] == {"step": 2, "reward/mean": 2.0, "policy/loss": 0.5}
    lines = text.splitlines()
    assert len(lines) == 4 and lines[3].startswith("train  3/10  reward 3.000") and "eta 0:0" in lines[3]
    assert scalars(folder, "reward/mean") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]


STEP = {
    "reward/mean": 0.51234, "response/length": 1365.4, "policy/entropy": 0.3123, "kl/ref": 0.00123,
    "policy/clip_fraction": 0.012, "policy/grad_norm": 0.81, "mismatch/abs_diff": 0.03, "reward/invalid": 0.0,
    "throughput/tokens_per_second": 123456.0, "time/step": 561.21, "time/generate": 136.4, "time/reward": 0.1,
    "time/score": 88.4, "time/learn": 334.2, "time/evaluate": 700.0,
}  # fmt: skip
"""Metrics of a step of a 70B model."""


def test_the_line_of_a_step_has_at_most_100_columns(folder: RunFolder) -> None:
    console = io.StringIO()
    with MetricsLog(folder, 1000, console=console) as log:
        log.write(998, STEP)
        log.write(999, {**STEP, "reward/invalid": 0.125, "time/step": 12345.6, "kl/ref": -0.1})
        log.write(1000, {**STEP, "eval/held_out/accuracy": 0.5, "eval/a_long_name_of_a_set/accuracy": 0.25})
    lines = console.getvalue().splitlines()
    assert max(map(len, lines)) <= WIDTH and len(lines) == 4
    head = "train  998/1000  reward 0.512  length 1365  kl 0.0012"
    assert lines[0].startswith(head) and "561 s  (generate 136, learn 334)  eta 0:0" in lines[0]
    assert "invalid" not in lines[0] and "invalid 0.125  12346 s" in lines[1]
    # Results of evaluation sets are never left out.
    results = " ".join(lines[2:])
    assert "eval/held_out/accuracy 0.500" in results and "a_long_name_of_a_set/accuracy 0.250" in results
    assert lines[3].startswith("    eval/")


def test_the_line_of_a_step_names_a_health_rule_that_fires(folder: RunFolder) -> None:
    with MetricsLog(folder, 1000, console=io.StringIO()) as log:
        assert "unhealthy" not in log.format_line(998, {**STEP, "health/kl": 0.0})
        line = log.format_line(998, {**STEP, "health/kl": 0.0, "health/entropy": 1.0})
        assert "unhealthy entropy  561 s" in line
        # Names of a user's own rules may be long, and the line has its width.
        firing = {f"health/{'own_rule' * 12}": 1.0, "health/kl": 1.0, "health/entropy": 1.0}
        line = log.format_line(998, {**STEP, "reward/invalid": 0.125, **firing})
        assert len(line) <= WIDTH and " and 2 more  561 s" in line and "reward 0.512" in line


def test_the_parts_of_a_phase_are_named() -> None:
    console = io.StringIO()
    with Progress("build", console=console) as progress:
        progress.show_part("engine")
    assert console.getvalue().splitlines() == ["build …", "build: engine …", "build: done after 0:00"]
    silent = io.StringIO()
    with Progress("build", enabled=False, console=silent) as progress:
        progress.show_part("engine")
    assert not silent.getvalue()


def test_resuming_cuts_later_lines_so_that_steps_appear_once(folder: RunFolder) -> None:
    log_steps(folder, 0, 6)
    log_steps(folder, 5, 8, resumed=4, scale=10.0)
    lines = read_metrics(folder.metrics)
    assert [line["step"] for line in lines] == list(range(9))
    assert [line["reward/mean"] for line in lines] == [0, 1, 2, 3, 4, 50, 60, 70, 80]
    assert [step for step, _ in scalars(folder, "reward/mean")] == list(range(9))


def test_a_line_cut_off_by_a_kill_is_left_out(folder: RunFolder) -> None:
    log_steps(folder, 0, 2)
    with folder.metrics.open("a") as file:
        file.write('{"step": 3, "rew')
    assert len(read_metrics(folder.metrics)) == 3
    log_steps(folder, 3, 4, resumed=2)
    assert [line["step"] for line in read_metrics(folder.metrics)] == [0, 1, 2, 3, 4]


def test_lost_and_later_lines_are_said_and_what_is_there_is_kept(folder: RunFolder) -> None:
    log_steps(folder, 0, 9)
    assert log_steps(folder, 8, 9, resumed=7).startswith("train  8")
    whole = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join([*whole[:3], whole[3][:9] + "\n", "\0\0\n", "[1]\n", *whole[6:]]))
    damaged = folder.metrics.read_text()
    told = log_steps(folder, 9, 10, resumed=8).splitlines()[0]
    assert "metrics.jsonl has no line of steps 3-5, and this run resumes after step 8" in told
    assert "a copy of the file is metrics.1.jsonl" in told
    assert (folder.path / "metrics.1.jsonl").read_text() == damaged
    assert [line["step"] for line in read_metrics(folder.metrics)] == [0, 1, 2, 6, 7, 8, 9, 10]
    folder.metrics.unlink()
    assert "has no line of steps 1-9," in log_steps(folder, 10, 10, resumed=9)
    # Fewer steps than the file has: those that do not come again are not lost.
    log_steps(folder, 1, 16, resumed=0)
    told = log_steps(folder, 9, 10, resumed=8).splitlines()[0]
    assert (
        "has lines up to step 16, and this run resumes after step 8; a copy of the file is metrics.2.jsonl"
        in told
    )
    assert (
        len(read_metrics(folder.path / "metrics.2.jsonl")) == 16 and len(read_metrics(folder.metrics)) == 10
    )


def test_tensorboard_keeps_the_order_when_the_clock_goes_back(folder: RunFolder, monkeypatch) -> None:
    now = time.time()
    for start, (clock_now, first) in enumerate([(now, 1), (now - 3600, 4), (now - 7200, 6), (now - 7200, 8)]):
        monkeypatch.setattr(time, "time", lambda value=clock_now: value)
        log_steps(folder, first, 10, resumed=first - 1 if start else None, scale=10.0**start)
    values = [1, 2, 3, 40, 50, 600, 700, 8000, 9000, 10000]
    assert scalars(folder, "reward/mean") == [(step, float(v)) for step, v in enumerate(values, start=1)]


def test_starting_over_sets_the_old_files_aside(folder: RunFolder) -> None:
    log_steps(folder, 0, 3)
    log_steps(folder, 0, 1)
    assert len(read_metrics(folder.metrics)) == 2
    assert len(read_metrics(folder.path / "metrics.1.jsonl")) == 4
    assert scalars(folder, "reward/mean") == [(0, 0.0), (1, 1.0)]


def test_values_that_are_not_finite_are_null(folder: RunFolder) -> None:
    with MetricsLog(folder, 1, console=io.StringIO()) as log:
        log.write(1, {"policy/loss": float("nan"), "kl/ref": float("inf"), "reward/mean": 1.0})
    text = folder.metrics.read_text()
    assert "NaN" not in text and json.loads(text) == {
        "step": 1,
        "policy/loss": None,
        "kl/ref": None,
        "reward/mean": 1.0,
    }


def test_the_warm_up_has_a_file_of_its_own(folder: RunFolder) -> None:
    with (
        trackers(folder) as told,
        MetricsLog(folder, 5, phase="sft", console=io.StringIO(), trackers=told) as log,
    ):
        log.write(1, {"sft/loss": 2.0}, to_console=False)
    assert read_metrics(folder.stage_metrics("sft")) == [{"step": 1, "sft/loss": 2.0}]
    assert not folder.metrics.exists()
    assert scalars(folder, "sft/loss", "sft") == [(1, 2.0)]


def test_rollouts_are_parquet_and_odd_columns_become_json(folder: RunFolder) -> None:
    columns = {"prompt": ["1+1=", "2+2="], "reward": [1.0, float("nan")], "truth": [{"a": 1}, "4"]}
    columns["failure"] = [None, None]
    path = write_rollouts(folder, 7, columns)
    table = pyarrow.parquet.read_table(path).to_pylist()
    assert [row["prompt"] for row in table] == ["1+1=", "2+2="] and table[0]["step"] == 7
    assert [json.loads(row["truth"]) for row in table] == [{"a": 1}, "4"]
    assert pyarrow.parquet.read_schema(path).field("failure").type == pyarrow.string()
    assert len(pyarrow.parquet.read_table(write_rollouts(folder, 8, columns, limit=1))) == 1
    assert [file.name for file in sorted(folder.rollouts.iterdir())] == ["step_7.parquet", "step_8.parquet"]
    with pytest.raises(ValueError, match="different lengths"):
        write_rollouts(folder, 9, {"a": [1], "b": []})


def test_config_is_replaced_whole(folder: RunFolder) -> None:
    folder.write_config("seed: 1\n")
    folder.write_config("seed: 2\n")
    assert folder.config.read_text() == "seed: 2\n"
    assert not list(folder.path.glob("*.part"))


def test_progress_prints_plain_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "PROGRESS_LINE_SECONDS", 0.0)
    console = io.StringIO()
    with Progress("loading", 3, console=console) as progress:
        progress.advance(note="layer 0")
        progress.advance(2)
    lines = console.getvalue().splitlines()
    assert lines[:3] == ["loading …", "loading 1/3  layer 0", "loading 3/3"]
    assert lines[3].startswith("loading: done after 0:0")
    silent = io.StringIO()
    with Progress("loading", 3, enabled=False, console=silent) as progress:
        progress.advance()
    assert silent.getvalue() == ""
    with pytest.raises(RuntimeError), Progress("loading", console=console):
        raise RuntimeError
    assert "stopped after" in console.getvalue()


def test_progress_draws_a_bar_on_a_terminal() -> None:
    main, terminal = pty.openpty()
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: the other end has been closed
            while part := os.read(main, 1 << 16):
                shown.extend(part)

    reader = threading.Thread(target=read)
    reader.start()  # a terminal holds few bytes: a slow machine draws more frames than fit
    with os.fdopen(terminal, "w") as console, Progress("evaluating", 4, console=console) as progress:
        progress.advance(4)
    reader.join(timeout=30)
    os.close(main)
    text = shown.decode()
    assert "evaluating" in text and "4/4" in text and "\x1b" in text


def test_output_goes_to_the_rank_log_and_the_console_stays_clean(tmp_path: Path) -> None:
    program = """
import os, sys
from pathlib import Path
from megatron_rl.trainer.logging import redirect_output
with redirect_output(Path(sys.argv[1]), is_main=sys.argv[2] == "main") as console:
    print("python noise")
    os.system("echo noise of a child")
    console.write("step 1\\n")
print("after")
raise RuntimeError("seen")
"""
    for rank, printed in (("main", "step 1\nafter\n"), ("other", "after\n")):
        log = tmp_path / f"{rank}.log"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        }
        done = subprocess.run(
            [sys.executable, "-c", program, str(log), rank], capture_output=True, text=True, env=environment
        )
        assert done.stdout == printed and "RuntimeError: seen" in done.stderr
        assert "python noise" in log.read_text() and "noise of a child" in log.read_text()
        assert ("step 1" in log.read_text()) == (rank == "other")


def test_output_comes_back_after_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), redirect_output(tmp_path / "log", is_main=True):
        raise ValueError
    print("back")
    assert capfd.readouterr().out == "back\n"


def test_clock() -> None:
    assert [format_clock(seconds) for seconds in (6.6, 754, 3723)] == ["0:07", "12:34", "1:02:03"]


def test_a_run_folder_that_is_removed_in_mid_run_is_named(tmp_path: Path) -> None:
    def leave_a_run() -> None:
        folder = RunFolder(tmp_path / "run").create()
        config: Any = SimpleNamespace(run_dir=str(tmp_path / "run"))
        with report_failure(config, Phases()):
            shutil.rmtree(folder.rollouts)
            (folder.rollouts / "step_3.parquet").write_text("samples")

    ended = run_forked(leave_a_run)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "the run folder was removed, or moved, while the run wrote to it" in ended.stderr
    assert f"no directory {tmp_path / 'run/rollouts'}" in ended.stderr


@pytest.mark.parametrize(
    ("error", "code", "report"),
    [
        (UserError("the data ended", where="data.train", fix="add records"), 2, "the data ended"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "space"),
        (torch.OutOfMemoryError("out of memory: tried to allocate 2 GiB"), 2, "memory"),
        (FileNotFoundError("gone"), 1, "FileNotFoundError: gone"),
        (RuntimeError("seen"), 1, "RuntimeError: seen"),
    ],
)
def test_a_failure_has_a_traceback_only_if_it_is_a_bug(
    tmp_path: Path, error: Exception, code: int, report: str
) -> None:
    config = load_config(ROOT / "configs/qwen2.5-7b-8gpu.yaml", [f"run_dir={tmp_path / 'run'}"])
    RunFolder(config.run_dir).create()

    def fail() -> None:
        with report_failure(config, Phases()):
            raise error

    ended = run_forked(fail)
    assert ended.returncode == code and report in ended.stderr, ended.stderr
    assert ("Traceback" in ended.stderr) == (code == 1)


def test_further_lines_of_a_text_are_no_lines_of_the_console() -> None:
    console = io.StringIO()
    job = Job(None, None, console, None, True, None)  # type: ignore[arg-type]
    job.print("step 3: a reward failed: bad\n\x1b[31mresumed from nowhere")
    assert console.getvalue() == "step 3: a reward failed: bad\n    \\x1b[31mresumed from nowhere\n"
