"""The report of a run: its table, its pages and its files."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from html_pages import Page, scripted
from PIL import Image

from megatron_rl.cli.main import main as command
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.metrics import read_metrics
from megatron_rl.trainer import curves, report
from megatron_rl.trainer.compare import compare
from megatron_rl.trainer.logging import MetricsLog
from megatron_rl.trainer.report import PhaseTime
from megatron_rl.trainer.sample_log import write_rollouts
from megatron_rl.trainer.starts import Start, format_command, write_start
from tests.browser import Browser, executable


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


@pytest.mark.slow
def test_the_table_and_the_files(tmp_path: Path) -> None:
    folder = run(tmp_path / "addition")
    folder.write_config("seed: 1 # <&>\n")
    console = io.StringIO()
    text = report.write_report(folder.path, console).read_text()
    page, shown = Page(text), console.getvalue()
    for words in ("0.500 → 0.900", "+0.400; best 0.900 at step 30", "learn", "0:45", "75%", "10.00%"):
        assert words in shown and any(words in cell for row in page.rows for cell in row), words
    rows = [list(row) for row in report.summary_rows(read_metrics(folder.metrics), {})]
    assert [row for row in page.rows if row in rows] == rows, "the numbers of the metrics"
    assert "seed: 1 # &lt;&amp;&gt;" in text and 'name="viewport"' in text
    assert {"eval/held_out/accuracy", "response length (tokens)"} <= {*page.charts}
    (accuracy,) = page.charts["eval/held_out/accuracy"]["curves"]
    assert (accuracy["steps"], accuracy["values"][-1]) == ([0, 10, 20, 30], 0.9)
    flat = [title for title, chart in page.charts.items() if chart["flat"]]
    assert flat == ["response length (tokens)", "invalid rewards (share)", "seconds of a step"]
    (times,) = [chart for chart in page.charts.values() if chart["stacked"]]
    assert [curve["label"] for curve in times["curves"]] == ["generate", "learn"]
    assert not re.search(r"""(src|href)=["']|@import|url\(""", text), "self-contained"
    with Image.open(folder.curve) as picture:
        assert picture.width > 1200 and len(picture.convert("RGB").getcolors(1 << 24) or []) > 20


def test_the_report_names_the_pieces_of_the_algorithm(tmp_path: Path) -> None:
    folder = run(tmp_path / "addition", steps=3)
    folder.write_config(
        "algorithm:\n  name: grpo\n  policy_loss: {name: ppo_clip, clip_low: 0.2, dual_clip: null}\n"
        "  kl: none\n  value_loss: null\n"
    )
    console = io.StringIO()
    page = Page(report.write_report(folder.path, console).read_text())
    assert "algorithm: grpo, policy_loss ppo_clip, kl none\n" in console.getvalue()
    assert ["policy_loss", "ppo_clip: clip_low 0.2, dual_clip null"] in page.rows and [
        "kl",
        "none",
    ] in page.rows
    # A job of one stage has no algorithm.
    folder.write_config("job: sft\nalgorithm: {name: grpo}\n")
    assert report.algorithm_rows(folder) == []


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Return a run with samples of three steps and of an evaluation set, reported."""
    folder = run(tmp_path_factory.mktemp("runs") / "addition")
    folder.write_config(f"seed: 1 # {HOSTILE}\n")
    for step, reward in ((1, 0.0), (2, math.nan), (30, 1.0)):
        columns = {"prompt": ["1+1=", "2+2="], "response": [HOSTILE, "x" * 5000], "ground_truth": ["2", "4"]}
        columns |= {"reward": [reward, 0.5], "length": [step, 9], "finish_reason": [0, 1]}
        write_rollouts(folder, step, columns)
    write_rollouts(folder, 30, {"prompt": ["1+1="], "response": ["2"], "reward": [1.0]}, kind="eval_held_out")
    report.write_report(folder.path, io.StringIO())
    return folder


@pytest.mark.slow
def test_samples_are_found_by_their_facts_and_stay_text(sampled: RunFolder) -> None:
    page = Page(sampled.report.read_text())
    assert len(page.scripts) == 4 and page.tags.count("script") == 4, "no text ends a script or begins one"
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
        results.address = location.hash;
        elements.list.children[0].children.at(-1).listeners.click();
        results.one = texts('prompt'); results.words = elements.count.textContent;
        elements.all.listeners.click(); results.again = texts('prompt').length;
        set('text', ''); results.newest = texts('facts').map(facts => facts.split(' · ')[0]);
        set('sort', 'best'); results.best = texts('facts')[0]; results.worst = texts('facts').at(-1);
        location.hash = '#step=2&mark=invalid'; listeners.hashchange();
        results.invalid = texts('facts'); results.kept = elements.kept.textContent;
        results.chosen = elements.step.value + elements.sort.value;
        """,
    )
    assert told["all"] == "7 of 7 samples" and told["sets"] == ["held_out", "training"]
    assert told["steps"] == ["1", "2", "30"] and told["texts"] == [HOSTILE]
    failed = "step 2 · training · reward failed · 2 tokens · stop · invalid"
    assert told["stopped"][1] == failed
    assert told["good"] == [
        "step 30 · held_out · reward 1 · worst · best",
        "step 30 · training · reward 1 · 30 tokens · stop · best · longest",
    ]
    assert told["short"] == [failed]
    assert told["long"] == ["x" * 4000 + " … (1000 more characters)"] * 3
    assert told["one"] == ["2+2="] * 3 and told["words"] == "3 of 7 samples (one prompt over steps)"
    assert told["again"] == 3
    assert told["address"] == "#text=xxx", "the filters"
    assert told["newest"] == ["step 30"] * 3 + ["step 2"] * 2 + ["step 1"] * 2
    assert told["best"].startswith("step 30 · held_out · reward 1") and told["worst"] == failed
    assert told["invalid"] == [failed] and told["chosen"] == "2"
    assert told["kept"] == "This page has 2 of 2 samples of step 2."


def write_groups(folder: RunFolder, step: int, groups: int = 64, size: int = 8) -> None:
    """Write a step whose rewards, lengths and components differ from sample to sample."""
    count = groups * size
    rewards = [(row * 7 % 11) / 10 for row in range(count)]
    rewards[300 % count] = math.nan
    write_rollouts(
        folder,
        step,
        {
            "prompt": [f"{row // size}+{step}=" for row in range(count)],
            "response": [f"answer {row}" for row in range(count)],
            "ground_truth": [str(row // size + step) for row in range(count)],
            "length": [1 + row * 13 % 97 for row in range(count)],
            "finish_reason": [0] * count,
            "group": [row // size for row in range(count)],
            "component/right": [row % 2 for row in range(count)],
            "component/near": [0.25] * count,
            "advantage": [None if math.isnan(reward) else reward - 0.5 for reward in rewards],
            "reward": rewards,
        },
    )


def test_every_step_keeps_its_worst_best_longest_and_invalid_samples_with_their_groups(
    tmp_path: Path,
) -> None:
    folder = run(tmp_path, steps=3, optional=False)
    for step in (1, 2, 3):
        write_groups(folder, step)
    samples = report.read_stored_samples(folder)
    assert samples.counts[0] == {"set": "training", "step": 1, "stored": 512, "shown": 32}
    for step in (1, 2, 3):
        rows = [row for row in samples.rows if row["step"] == step]
        marked = {mark: [row for row in rows if mark in row["marks"]] for mark in report.MARKS}
        assert len(rows) == 32 and all(marked.values()), marked
        assert {row["reward"] for row in marked["worst"]} == {0.0}
        assert {row["reward"] for row in marked["best"]} == {1.0}
        assert [row["length"] for row in marked["longest"]] == [97, 97]
        assert [(row["reward"], row["advantage"]) for row in marked["invalid"]] == [(None, None)]
        groups = Counter(row["group"] for row in rows)
        assert sum(count == 8 for count in groups.values()) >= 3, "complete groups"
        assert {row["group_size"] for row in rows} == {8}

    # A run with more steps than the page has samples still has some of each.
    select = report.select_rows
    assert select([0.0, 1.0, None, 1.0], [3, 9, 5, 4], [0, 0, 1, 1], 4, spread=True) == {
        0: ["worst"], 1: ["best", "longest"], 2: ["invalid"], 3: [],
    }  # fmt: skip


def test_the_samples_of_a_prompt_are_shown_side_by_side(tmp_path: Path) -> None:
    folder = run(tmp_path, steps=2, optional=False)
    write_groups(folder, 2)
    told = scripted(
        Page(report.write_report(folder.path, io.StringIO()).read_text()),
        """
        results.kept = elements.kept.textContent;
        set('mark', 'best');
        elements.list.children[0].children.find(child => child.className === 'beside').listeners.click();
        const [group] = elements.list.children;
        const columns = group.children.find(child => child.className === 'columns').children;
        results.head = group.children.slice(0, 3).map(child => child.textContent);
        results.columns = columns.map(sample => sample.children.map(child => child.textContent));
        results.groups = elements.list.children.length; results.address = location.hash;
        elements.all.listeners.click(); set('mark', ''); set('view', 'groups');
        results.all = elements.list.children.length;
        """,
    )
    assert told["kept"] == "This page has 32 of 512 samples of all steps."
    facts, prompt, truth = told["head"]
    assert facts == "step 2 · training · 8 of 8 samples of the prompt · reward 0 to 1, mean 0.525"
    assert prompt == "0+2=" and truth == "ground truth: 2" and len(told["columns"]) == 8
    best = next(column for column in told["columns"] if "best" in column[0])
    assert best == ["reward 1 · right 1 · near 0.25 · advantage 0.5 · 40 tokens · stop · best", "answer 3"]
    assert told["groups"] == 1 and "group=" in told["address"] and told["all"] > 3


def test_the_page_begins_with_the_facts_of_the_run(tmp_path: Path) -> None:
    folder = run(tmp_path / "mine", steps=3)
    first = Start("2026-08-01T10:00:00+00:00", "python -m megatron_rl train run.yaml", "1f3a5b7c9d11")
    second = replace(
        first,
        time="2026-08-02T10:00:00+00:00",
        command="torchrun --nproc-per-node 4 -m megatron_rl train run.yaml",
        working_revision="abc-dirty",
        versions={"python": "3.12.1", "torch": "2.13.0"},
        hardware={"host": "node7", "device": "host", "ranks": 4},
    )
    for start, resumed in ((first, False), (first, False), (second, True)):
        write_start(folder, start, resumed=resumed)
    page = Page(report.write_report(folder.path, io.StringIO()).read_text())
    rows = dict(row for row in page.rows if len(row) == 2)
    assert rows["started"] == "2026-08-01 10:00:00+00:00; 2 starts, the last 2026-08-02 10:00:00+00:00"
    assert rows["command"] == second.command and rows["versions"] == "python 3.12.1, torch 2.13.0"
    assert rows["revision"] == "1f3a5b7c9d11; abc-dirty of the folder in which it was started"
    assert rows["hardware"] == "host node7, device host, ranks 4"
    assert rows["duration"].endswith(" from the start to the last step; 0:06 in 3 steps")

    # Neither a damaged record nor none stops a report.
    folder.starts.write_text('[{"time": 1')
    page = Page(report.write_report(folder.path, io.StringIO()).read_text())
    assert ["duration", "0:06 in 3 steps"] in page.rows and not any("command" in row for row in page.rows)


def test_the_recorded_command_has_no_secret() -> None:
    words = ["/x/megatron_rl/__main__.py", "train", "a b.yaml", "reward.arguments.api_key=k1", "steps=2"]
    words += ["reward.arguments={auth: {token: k2}}", "data.max_prompt_tokens=8"]
    environment = {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}
    text = format_command(words, environment)
    assert text == (
        "torchrun --nproc-per-node 8 --nnodes 2 -m megatron_rl train 'a b.yaml' "
        "reward.arguments.api_key=(hidden) steps=2 reward.arguments=(hidden) data.max_prompt_tokens=8"
    )


@pytest.mark.slow
@pytest.mark.browser
def test_a_browser_shows_the_pages_and_runs_nothing_but_their_script(
    sampled: RunFolder, tmp_path: Path
) -> None:
    other = run(tmp_path / "<img src=x onerror='alert(1)'>$", steps=20)
    other.write_config("seed: 2\nmodel: {path: '</td><script>alert(2)</script>'}\n")
    runs = [str(folder.path) for folder in (sampled, other)]
    assert command(["compare", *runs, "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in sampled.metrics.read_text().splitlines()]
    path = executable()
    assert path is not None
    with Browser(path, 1280) as browser:
        browser.open(sampled.report)
        cells = [row.split("\t") for row in browser.texts("tr")]
        assert [*map(list, report.summary_rows(lines, {}))] == [row for row in cells if len(row) == 3][1:]
        charts_are_drawn(browser)
        filters = (
            (("#step", 3), "3"),
            (("#finish", 1), "1"),
            (("#step", 0), "3"),
            (("#finish", 0), "7"),
            (("#low", "0.6"), "2"),
            (("#low", ""), "7"),
            (("#short", "2"), "5"),
            (("#long", "8"), "1"),
            (("#short", ""), "2"),
            (("#long", ""), "7"),
            (("#text", "xxx"), "3"),
        )
        for (field, value), count in filters:
            if isinstance(value, int):
                browser.choose(field, value)
            else:
                browser.fill(field, value)
            assert browser.texts("#count") == [f"{count} of 7 samples"], (field, value)
        # The address has the filters, and opens the same samples.
        assert browser.value("location.hash") == "#text=xxx"
        browser.open(sampled.report, "step=2&sort=best")
        assert browser.texts("#count") == ["2 of 7 samples"] and "reward 0.5" in browser.texts(".facts")[2]
        browser.value("document.querySelector('.over').scrollIntoView()")
        browser.click(".over")
        browser.choose("#sort", 0)
        assert browser.texts("#count") == ["3 of 7 samples (one prompt over steps)"]
        assert browser.texts(".prompt") == ["2+2="] * 3
        browser.click("#all")
        browser.choose("#step", 0)
        browser.fill("#text", "alert")
        assert browser.texts(".response") == [HOSTILE] * 3, "text stays text"
        looked_at(browser)
        browser.open(tmp_path / "compare.html")
        cells = {row.split("\t")[0]: row.split("\t")[1:] for row in browser.texts("tr")}
        assert cells[""] == ["addition", other.path.name] and cells["steps"] == ["30", "20"]
        rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
        assert cells["final reward"][0] == f"{sum(rewards[-10:]) / 10:.3f}" == "0.850"
        assert cells["model.path"] == ["-", '"</td><script>alert(2)</script>"']
        looked_at(browser)


def charts_are_drawn(browser: Browser) -> None:
    """Require values below the pointer, a range of steps that is zoomed in, and flat curves folded away."""
    reward = browser.value(
        "[...document.querySelectorAll('#curves figure')].findIndex(figure =>"
        " figure.querySelector('figcaption').innerText === 'mean reward of the samples')"
    )
    legend = f"#curves figure:nth-child({reward + 1}) .legend"
    chart = f"#curves figure:nth-child({reward + 1}) > svg"
    assert browser.texts(legend) == ["step 30: 1, mean 0.95"]
    browser.drag(chart, 0.5, 0.5)
    (text,) = browser.texts(legend)
    assert re.match(r"step 1[3-5]: 0\.4\d+, mean 0\.\d+", text), text
    assert browser.texts("#flat summary")[0].startswith("3 flat curves: response length (tokens) 3; ")
    assert not browser.value("document.querySelector('#flat figure').checkVisibility()")

    # A drag zooms all charts; the button shows all steps again.
    ticks = f"[...document.querySelectorAll('{chart} > text')].map(text => Number(text.textContent))"
    assert browser.value(ticks)[-1] == 30 and not browser.value("whole.checkVisibility()")
    browser.drag(chart, 0.4, 0.6)
    assert 14 <= browser.value(ticks)[-1] <= 18 and browser.value("whole.checkVisibility()")
    browser.click("#whole")
    assert browser.value(ticks)[-1] == 30
    browser.value(f"document.querySelector('{chart}').focus()")
    browser.press("ArrowRight")
    assert browser.texts(legend)[0].startswith("step 1: 0.03333")


def looked_at(browser: Browser) -> None:
    """Require curves that are there, no script but the page's, and no more than the width of a phone."""
    paths = "[...document.querySelectorAll('.curves figure path')].map(path => path.getAttribute('d'))"
    curves = browser.value(paths)
    assert len(curves) > 5 and all(len(path) > 20 and "NaN" not in path for path in curves)
    for width in (1280, 390):
        browser.resize(width)
        assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.problems == []


def test_conversations_are_shown_turn_by_turn(tmp_path: Path) -> None:
    folder = run(tmp_path, steps=1, optional=False)
    call = {"id": "call_7_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [
        {"role": "prompt", "content": "<user>1+2=", "tokens": 7},
        {"role": "policy", "content": HOSTILE, "tokens": 5, "tool_calls": [call]},
        {"role": "environment", "content": "<tool>3", "tokens": 2},
        {"role": "policy", "content": "3", "tokens": 1},
    ]
    columns = {"prompt": ["1+2="] * 2, "response": ["3", "4"], "length": [6, 5], "finish_reason": [0, 2]}
    columns |= {
        "reward": [1.0, math.nan],
        "conversation": [talk, talk[:2]],
        "failure": [None, "timeout: 5 s"],
    }
    write_rollouts(folder, 1, columns)
    turns = report.read_stored_samples(folder).rows[0]["turns"]
    assert turns[1] == {"role": "policy", "content": HOSTILE, "tokens": 5, "calls": ['add {"a": 1}']}
    told = scripted(
        Page(report.write_report(folder.path, io.StringIO()).read_text()),
        """
        const [good, failed] = elements.list.children;
        const boxes = sample => sample.children.filter(child => child.className.startsWith('turn '));
        results.turns = boxes(good).map(turn => turn.children.map(child => child.textContent));
        results.kinds = boxes(good).map(turn => turn.className);
        results.failed = failed.children[1].textContent;
        results.not = boxes(failed)[1].children[0].textContent;
        set('text', '<tool>'); results.tool = elements.count.textContent;
        """,
    )
    assert told["kinds"] == ["turn prompt", "turn policy", "turn environment", "turn policy"]
    assert told["turns"][:3] == [
        ["prompt · 7 tokens · not learned from", "<user>1+2="],
        ["policy · 5 tokens · learned from", HOSTILE, 'tool call: add {"a": 1}'],
        ["environment · 2 tokens · not learned from", "<tool>3"],
    ]
    assert told["failed"] == "failed: timeout: 5 s"
    assert told["not"] == "policy · 5 tokens · not learned from" and told["tool"] == "1 of 2 samples"


def test_a_page_holds_no_more_samples_than_it_may(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path).create()
    for step in range(1, 101):
        columns = {"prompt": [str(row) for row in range(64)], "response": ["x"] * 64, "reward": [1.0] * 64}
        write_rollouts(folder, step, columns)
    samples = report.read_stored_samples(folder)
    assert not samples.warnings and len(samples.rows) == report.SAMPLES
    assert {count["step"] for count in samples.counts} == {*range(1, 101)}
    assert {(count["shown"], count["stored"]) for count in samples.counts} == {(20, 64)}


def test_the_summary_is_of_the_metrics(tmp_path: Path) -> None:
    rows = {
        name: (value, remark)
        for name, value, remark in report.summary_rows(read_metrics(run(tmp_path).metrics), {})
    }
    assert rows["steps"][0] == "30"
    assert rows["mean reward"][0] == "0.183 → 0.850"
    assert rows["tokens per second"] == ("1,016", "best step 1,030")
    assert rows["log-prob mismatch"] == ("3.1e-06", "largest step mean 6.0e-06")


def test_times_by_phase(tmp_path: Path) -> None:
    phases = report.phase_times(read_metrics(run(tmp_path).metrics))
    assert phases == [
        PhaseTime("whole steps", 60.0, 2.0, 1.0),
        PhaseTime("learn", 45.0, 1.5, 0.75),
        PhaseTime("generate", 15.0, 0.5, 0.25),
    ]
    line = {"step": 1, "time/step": 2.0, "time/generate": 1.0, "time/reshard": 0.5, "time/checkpoint": 3.0}
    nested = {phase.name: (phase.share, phase.part_of) for phase in report.phase_times([line])}
    assert nested["reshard"] == (0.25, "generate") and nested["generate"] == (0.5, "")
    assert nested["checkpoint"] == (None, "between steps")


@pytest.mark.slow
def test_numbers_beyond_all_measure_have_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("reward/mean", "kl/ref", "mismatch/abs_diff", "time/step", "time/learn", "eval/a/accuracy")
    for run_name, values in (("a", (1e30, -1e30, 1e31, 5e-324)), ("b", (1e30, 1e30, 0.5, 1e308))):
        folder = RunFolder(tmp_path / run_name).create()
        folder.write_config(f"seed: {ord(run_name)}\nrun_dir: {run_name}\n")
        with MetricsLog(folder, 4, console=io.StringIO()) as log:
            for step, value in enumerate(values, 1):
                log.write(step, dict.fromkeys(names, value) | {"policy/loss": math.nan})
        with folder.metrics.open("a") as lines:
            lines.write(f'{{"step": 5, "reward/mean": NaN, "kl/ref": -Infinity, "time/step": {10**400}}}\n')
        assert command(["report", str(folder.path)]) == 0
    written = [json.loads(line) for line in RunFolder(tmp_path / "a").metrics.read_text().splitlines()[:4]]
    assert [line["kl/ref"] for line in written] == [1e30, -1e30, None, 5e-324], "refused where it is written"
    assert "1e+30" in capsys.readouterr().out
    assert command(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path)]) == 0
    table = {row[0]: row[1:] for row in Page((tmp_path / "compare.html").read_text()).rows}
    assert table["final reward"] == ["3.33e+29 ± 4.71e+29"] and table["a: best accuracy"] == ["1e+30 ± 0.000"]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_short_and_sparse_runs_have_a_report(tmp_path: Path, steps: int) -> None:
    folder = run(tmp_path, steps=steps, optional=False)
    page = report.write_report(folder.path, io.StringIO()).read_text()
    assert "eval/held_out/accuracy" in page and folder.curve.stat().st_size > 5000
    assert "mismatch" not in page
    rewards = [line["reward/mean"] for line in read_metrics(folder.metrics) if "reward/mean" in line]
    rows = report.summary_rows(read_metrics(folder.metrics), {})
    shown = [row[1] for row in rows if row[0] == "mean reward"]
    ends = [f"{rewards[0]:.3f} → {rewards[-1]:.3f}"] if rewards else []
    assert shown == ends, "the first and the last steps are not the same ones"


def test_a_run_that_cannot_be_written_to_has_its_table(tmp_path: Path) -> None:
    folder, console = run(tmp_path, steps=2), io.StringIO()
    folder.curve.mkdir()
    with pytest.raises(OSError):
        report.write_report(folder.path, console)
    assert "mean reward" in console.getvalue()


@pytest.mark.slow
def test_the_warm_up_is_in_the_table(tmp_path: Path) -> None:
    folder = run(tmp_path, steps=2)
    with MetricsLog(folder, 2, phase="sft", console=io.StringIO()) as log:
        log.write(1, {"sft/loss": 2.0})
        log.write(2, {"sft/loss": 0.5})
    console = io.StringIO()
    report.write_report(folder.path, console)
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
    assert command(["compare", str(folder.path), "--out", str(tmp_path)]) == 0
    page = Page((tmp_path / "compare.html").read_text())
    assert ["sft: final held-out loss", "1.500"] in page.rows and page.charts["sft: loss"]["axis"] == "sft"


ODD_SET = "a$b_{ [/red] \ud800"


def test_one_bad_file_or_name_stops_neither_report_nor_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("<b>[x](javascript:y)", "plain")
    for name in names:
        folder = RunFolder(tmp_path / name).create()
        folder.config.write_bytes(b"seed: 1\nrun_dir: \xff\xfe\n")
        with MetricsLog(folder, 3, console=io.StringIO()) as log:
            for step in (1, 2, 3):
                log.write(step, {"reward/mean": 0.5, f"eval/{ODD_SET}/accuracy": 0.1 * step})
        with folder.metrics.open("a") as lines:
            for step in ("true", "1" + "0" * 400, "-1", "1e3", '"4"'):
                lines.write(f'{{"step": {step}, "reward/mean": 7.0}}\n')
        for step in (1, 2, 3):
            columns = {"prompt": ["1+1="], "response": ["2"], "reward": [1.0], "finish_reason": [0]}
            write_rollouts(folder, step, columns)
        torn = folder.rollouts / "step_1.parquet"
        torn.write_bytes(torn.read_bytes()[:200])
        (folder.rollouts / "step_2.parquet").unlink()
        os.mkfifo(folder.rollouts / "step_2.parquet")
        assert command(["report", str(folder.path)]) == 0
        said = capsys.readouterr().out
        assert "step_1.parquet is omitted" in said and "step_2.parquet is omitted" in said
        content = folder.report.read_text()
        assert "step_1.parquet is omitted" in content and '"step": 3' in content and "7.0" not in content
    words = [str(tmp_path / name) for name in names]
    assert command(["compare", *words, "--out", str(tmp_path / "out")]) == 0
    markdown = (tmp_path / "out/compare.md").read_text()
    assert "&lt;b&gt;\\[x\\](javascript:y)" in markdown and "<b>" not in markdown


def test_the_running_mean_is_centred() -> None:
    assert curves.running_mean([0.0, 1.0, 2.0, 3.0, 4.0], 2) == [0.5, 1.0, 2.0, 3.0, 3.5]
    assert curves.running_mean([]) == []


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
    assert {"eval/held_out/accuracy", "KL to the reference (nats per token)"} <= {*page.charts}
    markdown = (tmp_path / "out/compare.md").read_text()
    assert "The best reward is the highest mean over a step and the 5 before and after it" in markdown
    assert "| final reward | 0.825 ± 0.071 | 0.775 |" in markdown and "c\\|d" in markdown and "seed" in shown

    shutil.copytree(tmp_path / "b", tmp_path / "copy")
    with MetricsLog(RunFolder(tmp_path / "copy"), 21, resumed_step=20, console=io.StringIO()) as log:
        log.write(21, {"reward/mean": 0.5, "time/step": 2.0})
    compared = compare([tmp_path / name for name in ("a", "b", "copy")])
    assert compared.results[0] == ["runs", "2"] and ["steps", "20 ± 1"] in compared.results
    assert compared.notes == ["b begins with the same steps as copy: it is a copy, and omitted."]

    # Runs that are evaluated before their first step begin with a line that all of them may share.
    for name, seconds in (("first", 2.0), ("second", 3.0)):
        folder = RunFolder(tmp_path / "begun" / name).create()
        folder.write_config("seed: 1\n")
        with MetricsLog(folder, 1, console=io.StringIO()) as log:
            log.write(0, {"eval/held_out/accuracy": 0.5})
            log.write(1, {"reward/mean": 0.5, "time/step": seconds})
    shutil.copytree(tmp_path / "begun/first", tmp_path / "begun/third")
    compared = compare([tmp_path / "begun" / name for name in ("first", "second", "third")])
    assert compared.results[0] == ["runs", "2"]
    assert compared.notes == ["third begins with the same steps as first: it is a copy, and omitted."]

    empty = tmp_path / "empty"
    empty.mkdir()
    refusals = []
    for words in (["compare", str(tmp_path / "a"), str(empty)], ["report", str(empty)]):
        assert command(words) == 2
        refusals.append(capsys.readouterr().err)
    assert "has no metrics" in refusals[0] and refusals[0] == refusals[1]
    assert command(["compare", str(tmp_path / "gone")]) == 2


def test_rules_that_fired_are_shown_with_causes_and_the_samples_that_show_them(tmp_path: Path) -> None:
    folder = run(tmp_path / "healthy", steps=4)
    assert "<h2>Health</h2>" not in report.write_report(folder.path, io.StringIO()).read_text()

    folder = RunFolder(tmp_path / "run").create()
    with MetricsLog(folder, 9, console=io.StringIO()) as log:
        for step in range(1, 10):
            fires = {
                "health/kl": 0.0,
                "health/truncation": float(step in (4, 5, 8)),
                "health/mine": float(step == 9),
            }
            log.write(step, {"reward/mean": 1.0} | fires)
    columns = {"prompt": ["1+1=", "2+2=", HOSTILE], "response": ["2", "no end" * 400, "y"]}
    write_rollouts(folder, 4, columns | {"reward": [1.0, 0.0, math.nan], "finish_reason": [0, 1, 0]})
    console = io.StringIO()
    page = Page(report.write_report(folder.path, console).read_text())
    assert "health: truncation" in console.getvalue() and "4-5, 8; see docs/health.md" in console.getvalue()
    assert "health: kl" not in console.getvalue()
    (row,) = [row for row in page.rows if row and row[0] == "truncation"]
    assert row[1:3] == ["4-5, 8", "many responses are cut off"] and "rollout.max_response_tokens" in row[4]
    assert [row[:3] for row in page.rows if row and row[0] == "mine"] == [["mine", "9", "a rule of your own"]]
    (sample,) = [row for row in page.rows if row and row[0] == "2+2="]
    assert sample[2] == "0.000" and sample[4] == "length"


def test_a_comparison_begins_with_results_and_has_the_settings_that_were_set(tmp_path: Path) -> None:
    for name, rate, device in (("a", 1e-4, "host"), ("b", 5e-5, "host"), ("old", 1e-4, None)):
        folder = run(tmp_path / name, steps=4)
        tokens = int(rate * 1e8)
        folder.write_config(
            f"seed: 1\nrun_dir: {name}\nactor: {{optimizer: {{learning_rate: {rate}}}}}\n"
            f"batch: {{tokens_per_microbatch: {tokens}}}\nreward: {{arguments: {{scale: {rate}}}}}\n"
        )
        if device is not None:
            keys = ("actor.optimizer.learning_rate", "reward.arguments")
            start = Start("", "", revision=name, hardware={"device": device}, explicit=keys)
            write_start(folder, start, resumed=False)

    runs = [tmp_path / name for name in ("a", "b")]
    compared = compare(runs)
    assert [row[0] for row in compared.settings] == [
        "actor.optimizer.learning_rate", "reward.arguments.scale", "revision",
    ]  # fmt: skip
    assert compared.derived == [["batch.tokens_per_microbatch", "10000", "5000"]]
    assert command(["compare", *map(str, runs), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "compare.html").read_text()
    order = [text.index(words) for words in ("<h2>Results", "±", "<h2>Settings that differ", "<h2>Curves")]
    assert order == sorted(order)
    assert "<details><summary>1 derived values and defaults that differ" in text
    markdown = (tmp_path / "compare.md").read_text()
    assert markdown.startswith("# Comparison of runs\n\n## Results") and "10000" not in markdown

    # A section that one run removes makes no default of the other one's section a setting that was set.
    for name, section, key in (("with", "{data: x, turns: every}", "sft.data"), ("without", "null", "sft")):
        folder = run(tmp_path / name, steps=4)
        folder.write_config(f"seed: 1\nrun_dir: {name}\nsft: {section}\n")
        write_start(folder, Start("", "", explicit=(key,)), resumed=False)
    compared = compare([tmp_path / "with", tmp_path / "without"])
    assert [row[0] for row in compared.settings] == ["sft.data", "sft"]
    assert [row[0] for row in compared.derived] == ["sft.turns"]

    # Of a run without a record of its start every setting counts as set.
    assert [row[0] for row in compare([tmp_path / "b", tmp_path / "old"]).settings][:2] == [
        "actor.optimizer.learning_rate", "batch.tokens_per_microbatch",
    ]  # fmt: skip
