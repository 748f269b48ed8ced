"""The end of a run for people: a table, a picture of the learning curves and a page to look closer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from megatron_rl.config.run_folder import RunFolder
from megatron_rl.contained.process import readable
from megatron_rl.durable import require_file
from megatron_rl.errors import UserError, first_line
from megatron_rl.metrics import number_text, read_metrics
from megatron_rl.trainer import page
from megatron_rl.trainer.curves import (
    STAGE_METRICS,
    WINDOW,
    Measured,
    draw,
    measured_accuracies,
    pictures,
    series,
)
from megatron_rl.trainer.logging import clock

SAMPLES, SAMPLES_OF_A_STEP, TEXT = 2000, 32, 4000
"""Most samples of a page and of one file of samples, and most characters of a text."""
OUTSIDE = ("evaluate", "checkpoint", "checkpoint_write")
"""Phases between steps, or beside them."""
FINISH = ("stop", "length", "failed")
"""Words for `FINISH_STOP` and the others of `megatron_rl.types`."""


def measured(folder: RunFolder) -> Measured:
    """Return the metrics of a run and of its stages; a folder without any raises a UserError."""
    lines = _readable_lines(folder.metrics)
    stages = {name: _readable_lines(folder.stage_metrics(name)) for name in folder.stages_measured()}
    stages = {readable(name): measured for name, measured in stages.items() if measured}
    if not lines and not stages:
        raise UserError(
            f"{folder.path} holds no metrics",
            where=str(folder.metrics),
            expected="the folder of a run that has finished at least one step, of training or of a stage",
            got="no such file, and none of a stage" if not folder.metrics.exists() else "an empty file",
            fix="name the run folder, such as runs/quickstart",
        )
    return Measured(lines, stages)


def _readable_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; what no terminal and no file takes in a name is escaped."""
    return [{readable(name): value for name, value in line.items()} for line in read_metrics(path)]


def write(run_dir: str | Path, console: TextIO | None = None) -> Path:
    """Write ``learning_curve.png`` and ``report.html`` of a run, print its final table, return the page.

    It reads metrics.jsonl, the metrics of stages, config.yaml and the stored samples, as far as they exist. A
    folder without metrics raises a UserError.
    """
    folder = RunFolder(run_dir)
    run = measured(folder)
    lines, stages = run.lines, run.stages
    rows = summary(lines, stages)
    phases = phase_times(lines or [line for measured in stages.values() for line in measured])
    _print(folder, rows, phases, console)  # first: it may be all that can be had of another one's run
    draw(lines, stages).savefig(folder.curve, format="png", dpi=130)
    parts = [page.table(("", "value", ""), rows, numeric=(1,)), page.heading("Learning curves")]
    parts += [page.pictures(pictures(lines, stages))]
    if phases:
        headings = ("phase", "total", "per step", "share")
        parts += [page.heading("Time by phase")]
        parts += [page.table(headings, _phase_rows(phases), numeric=(1, 2, 3))]
    samples, unreadable = stored_samples(folder)
    if samples or unreadable:
        parts += [page.heading("Samples"), *map(page.paragraph, unreadable)]
    if samples:
        parts += [page.sample_browser(samples)]
    if folder.config.is_file():
        text = folder.config.read_text(encoding="utf-8", errors="replace")
        parts += [page.heading("Configuration"), page.text(text)]
    page.write(folder.report, folder.path.resolve().name, parts)
    for line in unreadable:
        print(f"warning: {line}", file=console)
    print(f"learning curves: {folder.curve}\nreport:          {folder.report}", file=console)
    return folder.report


def summary(
    lines: Sequence[Mapping[str, Any]], stages: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[tuple[str, str, str]]:
    """Return the rows of the final table: name, value, remark. What was not measured has no row."""
    rows: list[tuple[str, str, str]] = []
    for name in measured_accuracies(lines):
        steps, accuracy = series(lines, name)
        best = max(range(len(accuracy)), key=accuracy.__getitem__)
        change = f"{number_text(accuracy[-1] - accuracy[0], '+.3f')}; best {_three(accuracy[best])}"
        rows.append((name, _change(accuracy[0], accuracy[-1]), f"{change} at step {steps[best]}"))
    for name, label, form in (
        ("reward/mean", "mean reward", ".3f"),
        ("response/length", "response length", ".1f"),
        ("policy/entropy", "policy entropy", ".3f"),
    ):
        _, values = series(lines, name)
        if values:
            steps = max(1, min(WINDOW, len(values) // 2))  # those of a short run would be the same ones
            remark = f"means of the first and last {steps} steps"
            rows.append((label, _change(fmean(values[:steps]), fmean(values[-steps:]), form), remark))
    trained, _ = series([line for line in lines if line["step"] > 0], "step")
    if lines:
        rows.append(("steps", str(len(trained)), ""))
    for name, measured in stages.items():
        curves = [(words, series(measured, f"{name}/{metric}")[1]) for metric, words in STAGE_METRICS]
        steps, _ = series(measured, f"{name}/loss")
        changes = [f"{words} {_change(curve[0], curve[-1])}" for words, curve in curves if curve]
        rows.append((name, f"{len(steps)} steps", "; ".join(changes)))
    _, speed = series(lines, "throughput/tokens_per_second")
    if speed:
        best = f"best step {number_text(max(speed), ',.0f')}"
        rows.append(("tokens per second", number_text(fmean(speed), ",.0f"), best))
    _, mismatch = series(lines, "mismatch/abs_diff")
    if mismatch:
        rows.append(("log-prob mismatch", f"{fmean(mismatch):.1e}", f"largest step mean {max(mismatch):.1e}"))
    _, invalid = series(lines, "reward/invalid")
    if invalid:
        worst = f"worst step {number_text(max(invalid), '.2%')}"
        rows.append(("invalid rewards", number_text(fmean(invalid), ".2%"), worst))
    return rows


def _three(value: float) -> str:
    return number_text(value, ".3f")


def _change(first: float, last: float, form: str = ".3f") -> str:
    return f"{number_text(first, form)} → {number_text(last, form)}"


def phase_times(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float, float | None]]:
    """Return per phase its name, total seconds, seconds per step and share of ``time/step``; largest first.

    Phases may lie inside one another (a reshard inside generate), so shares need not add up to one; those
    `OUTSIDE` of steps have none.
    """
    names = sorted({name for line in lines for name in line if name.startswith("time/")})
    totals = {name.removeprefix("time/"): series(lines, name)[1] for name in names}
    whole = sum(totals.pop("step", []))
    phases = [
        (name, sum(values), fmean(values), sum(values) / whole if whole and name not in OUTSIDE else None)
        for name, values in totals.items()
        if values
    ]
    if whole:
        phases.append(("whole steps", whole, fmean(series(lines, "time/step")[1]), 1.0))
    return sorted(phases, key=lambda phase: -phase[1])


def _print(
    folder: RunFolder,
    rows: Sequence[tuple[str, str, str]],
    phases: Sequence[tuple[str, float, float, float | None]],
    out: TextIO | None,
) -> None:
    from rich.console import Console
    from rich.table import Table

    # Names of sets and folders are a user's: what looks like markup or an emoji in them is neither.
    console = Console(file=out, highlight=False, soft_wrap=True, markup=False, emoji=False)
    table = Table(title=f"{folder.path.name}: result", title_justify="left")
    for heading, justify in (("", "left"), ("value", "right"), ("", "left")):
        table.add_column(heading, justify=justify)  # pyright: ignore[reportArgumentType]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if phases:
        times = Table(title="time by phase", title_justify="left")
        times.add_column("phase")
        for heading in ("total", "per step", "share"):
            times.add_column(heading, justify="right")
        for row in _phase_rows(phases):
            times.add_row(*row)
        console.print(times)


def _phase_rows(phases: Sequence[tuple[str, float, float, float | None]]) -> list[tuple[str, str, str, str]]:
    return [
        (name, clock(total), f"{_three(per_step)} s", "" if share is None else number_text(share, ".0%"))
        for name, total, per_step, share in phases
    ]


def stored_samples(folder: RunFolder) -> tuple[list[dict[str, Any]], list[str]]:
    """Return stored samples for the page, `SAMPLES` at most, spread over steps; long texts are cut.

    Of an evaluation set the same prompts of every step, of training samples some of each step. Also return a
    line for each file that cannot be read, such as one that a crash of the machine has torn.
    """
    files = [(*path.stem.rpartition("_")[::2], path) for path in folder.rollouts.glob("*.parquet")]
    files = sorted((kind, int(step), path) for kind, step, path in files if step.isdecimal())
    stride = max(1, -(-len(files) * SAMPLES_OF_A_STEP // SAMPLES))
    kinds = dict.fromkeys(kind for kind, _, _ in files)
    taken = [
        entry
        for kind in kinds
        # The last step of each is always there.
        for entry in [file for file in files if file[0] == kind][::-stride][::-1]
    ]

    samples: list[dict[str, Any]] = []
    unreadable: list[str] = []
    for kind, step, path in taken:
        try:
            samples += _rows(kind, step, path)
        except Exception as error:  # whatever pyarrow, or a row of another form, leads to
            unreadable.append(f"{path.name} is left out, since it cannot be read: {first_line(error)}")
    return samples, unreadable


def _rows(kind: str, step: int, path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    require_file(path)
    rows = pyarrow.parquet.read_table(path).to_pylist()
    spread = max(1, -(-len(rows) // SAMPLES_OF_A_STEP)) if kind == "step" else 1
    result = []
    for row in rows[::spread][:SAMPLES_OF_A_STEP]:
        reward, finish = row.get("reward"), row.get("finish_reason")
        truth = row.get("ground_truth")
        result.append({
            "set": "training" if kind == "step" else kind.removeprefix("eval_"),
            "step": step,
            "prompt": _cut(row.get("prompt")),
            "response": _cut(row.get("response")),
            "truth": None if truth is None else _cut(truth),
            "reward": None if reward is None or not math.isfinite(reward) else round(reward, 6),
            "length": row.get("length"),
            "finish": None if finish is None else FINISH[finish],
            "turns": _turns(row.get("conversation")),
            "failure": None if row.get("failure") is None else _cut(row["failure"]),
        })  # fmt: skip
    return result


def _turns(conversation: Any) -> list[dict[str, Any]] | None:
    """Return the turns of a stored conversation; None where there is none."""
    if conversation is None:
        return None
    # Columns that have no type of Parquet's are JSON.
    turns = json.loads(conversation) if isinstance(conversation, str) else conversation
    return [
        {
            "role": turn["role"],
            "content": _cut(turn["content"]),
            "tokens": turn["tokens"],
            "calls": [
                _cut(f"{call['function']['name']} {call['function']['arguments']}")
                for call in turn.get("tool_calls") or ()
            ],
        }
        for turn in turns
    ]


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= TEXT else f"{text[:TEXT]} … ({len(text) - TEXT} more characters)"
