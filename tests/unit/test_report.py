"""The report of a run: what the table says, and files that can be opened."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import pytest
from PIL import Image

from megatron_rl.cli.main import main as command
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.errors import UserError
from megatron_rl.metrics import read_metrics
from megatron_rl.trainer import report
from megatron_rl.trainer.logging import MetricsLog, write_rollouts


def run(path: Path, steps: int = 30, optional: bool = True) -> RunFolder:
    folder = RunFolder(path).create()
    with MetricsLog(folder, steps, console=io.StringIO()) as log:
        log.write(0, {"eval/accuracy": 0.5})
        for step in range(1, steps + 1):
            values = {"reward/mean": step / steps, "time/step": 2.0}
            if optional:
                values |= {
                    "mismatch/abs_diff": 2e-7 * step,
                    "policy/entropy": 1 / step,
                    "response/length": 3.0,
                }
                values |= {"reward/invalid": 0.1, "throughput/tokens_per_second": 1000.0 + step}
                values |= {"time/generate": 0.5, "time/learn": 1.5}
                if step % 10 == 0:
                    values["eval/accuracy"] = 0.5 + 0.4 * step / steps
            log.write(step, values)
    return folder


def test_the_table_and_the_files(tmp_path: Path) -> None:
    folder = run(tmp_path / "addition")
    folder.write_config("seed: 1 # <&>\n")
    write_rollouts(folder, 3, {"prompt": ["old"], "response": ["old"], "reward": [0.0]})
    write_rollouts(folder, 30, {"prompt": ["1+1="], "response": ["<b>2</b>"], "reward": [1.0]})
    console = io.StringIO()
    page = report.write(folder.path, console).read_text()
    shown = console.getvalue()
    for text in ("0.500 → 0.900", "+0.400; best 0.900 at step 30", "learn", "0:45", "75%", "10.00%"):
        assert text in shown and text in page, text
    assert "&lt;b&gt;2&lt;/b&gt;" in page and "<b>2</b>" not in page and "seed: 1 # &lt;&amp;&gt;" in page
    assert "Samples of step 30" in page
    embedded = re.search(r"data:image/png;base64,([^']+)", page)
    assert embedded is not None and base64.b64decode(embedded[1]) == folder.curve.read_bytes()
    assert not re.search(r"(src|href)='(?!data:)", page), "self-contained"
    with Image.open(folder.curve) as picture:
        assert picture.width > 1200 and len(picture.convert("RGB").getcolors(1 << 24) or []) > 20


def test_the_summary_is_of_the_metrics(tmp_path: Path) -> None:
    rows = {
        name: (value, remark)
        for name, value, remark in report.summary(read_metrics(run(tmp_path).metrics), {})
    }
    assert rows["steps"][0] == "30"
    assert rows["mean reward"][0] == "0.183 → 0.850"
    assert rows["tokens per second"] == ("1,016", "best step 1,030")
    assert rows["log-prob mismatch"] == ("3.1e-06", "largest step mean 6.0e-06")


def test_times_by_phase(tmp_path: Path) -> None:
    phases = report.phase_times(read_metrics(run(tmp_path).metrics))
    assert phases == [
        ("whole steps", 60.0, 2.0, 1.0),
        ("learn", 45.0, 1.5, 0.75),
        ("generate", 15.0, 0.5, 0.25),
    ]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_short_and_sparse_runs_have_a_report(tmp_path: Path, steps: int) -> None:
    folder = run(tmp_path, steps=steps, optional=False)
    page = report.write(folder.path, io.StringIO()).read_text()
    assert "held-out accuracy" in page and folder.curve.stat().st_size > 5000
    assert "mismatch" not in page


def test_the_warm_up_is_in_the_table(tmp_path: Path) -> None:
    folder = run(tmp_path, steps=2)
    with MetricsLog(folder, 2, phase="sft", console=io.StringIO()) as log:
        log.write(1, {"sft/loss": 2.0})
        log.write(2, {"sft/loss": 0.5})
    console = io.StringIO()
    report.write(folder.path, console)
    assert "2.000 → 0.500" in console.getvalue()


def test_a_folder_of_stages_alone_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / "alone").create()
    for name in ("reward_judge", "sft"):
        with MetricsLog(folder, 3, phase=name, console=io.StringIO()) as log:
            log.write(0, {f"{name}/held_out_loss": 3.0})
            for step in (1, 2, 3):
                log.write(step, {f"{name}/loss": 4.0 - step, f"time/{name}": 0.5})
            log.write(3, {f"{name}/held_out_loss": 1.5})
    assert command(["report", str(folder.path)]) == 0
    shown = capsys.readouterr().out
    for text in (
        "sft",
        "reward_judge",
        "3 steps",
        "loss 3.000 → 1.000; held-out loss 3.000 → 1.500",
        "1.500",
    ):
        assert text in shown and text in folder.report.read_text(), text
    assert shown.index("sft") < shown.index("reward_judge") and folder.curve.is_file()


def test_the_running_mean_is_centred() -> None:
    assert report.running_mean([0.0, 1.0, 2.0, 3.0, 4.0], 2) == [0.5, 1.0, 2.0, 3.0, 3.5]
    assert report.running_mean([]) == []


def test_a_folder_without_metrics_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no metrics"):
        report.write(tmp_path)
