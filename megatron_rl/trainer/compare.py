"""Several runs beside each other: what differs in their settings, what they reached, and their curves."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.source import read_tree
from megatron_rl.contained.process import readable
from megatron_rl.metrics import number_text
from megatron_rl.trainer import page
from megatron_rl.trainer.curves import (
    STAGE_METRICS,
    WINDOW,
    Measured,
    measured_accuracies,
    overlaid,
    running_mean,
    series,
)
from megatron_rl.trainer.report import measured

OF_ONE_RUN = ("seed", "run_dir", "prepare", "checkpoint.resume")
"""Settings that may differ between runs of one group."""
LAST_MEANS = (
    ("kl/ref", "KL to the reference", ".4f"),
    ("policy/entropy", "entropy", ".3f"),
    ("response/length", "response length", ".1f"),
    ("mismatch/abs_diff", "mismatch", ".1e"),
    ("reward/invalid", "invalid rewards", ".3f"),
)
"""Metrics whose mean over the last steps is shown: metric, words, format."""

MEANING = (
    f"Accuracies are the last and the best measurement, other final values means of the last {WINDOW} steps. "
    f"The best reward is the highest mean over a step and the {WINDOW // 2} before and after it. "
    "± is the standard deviation over the runs of a column."
)


@dataclass(frozen=True)
class ComparedRun:
    """Hold a run's metrics and its settings by dotted name."""

    name: str
    settings: Mapping[str, Any]
    measured: Measured


@dataclass(frozen=True)
class Comparison:
    """Hold groups of runs that differ in their seeds alone, by name, with the tables of the page.

    ``settings`` and ``results`` are rows of texts: what is shown, and a value for each group. ``notes`` are
    sentences on folders that are no runs of their own.
    """

    groups: Mapping[str, Sequence[ComparedRun]]
    settings: Sequence[Sequence[str]]
    results: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def compare(folders: Sequence[Path]) -> Comparison:
    """Compare runs by their folders; one without metrics raises a UserError."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    runs = [_read(folder, name) for folder, name in zip(folders, names, strict=True)]
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    same = [key for key in keys if key not in OF_ONE_RUN]
    sorted_: dict[str, list[ComparedRun]] = {}
    for run in runs:
        sorted_.setdefault(json.dumps([run.settings.get(key) for key in same], default=str), []).append(run)
    notes = [note for members in sorted_.values() for note in _leave_out_copies(members)]
    groups = {_name(members): members for members in sorted_.values()}
    if len(groups) < len(sorted_):
        groups = {f"[{place}] {_name(members)}": members for place, members in enumerate(sorted_.values(), 1)}
    settings = []
    for key in keys:
        values = [list(dict.fromkeys(_text(run, key) for run in members)) for members in groups.values()]
        if any(value != values[0] for value in values) and key not in ("run_dir", "prepare"):
            settings.append([key, *(", ".join(value) for value in values)])
    results = [["runs", *(str(len(members)) for members in groups.values())]]
    reached = [[_reached(run.measured) for run in members] for members in groups.values()]
    for key in dict.fromkeys(name for members in reached for values in members for name in values):
        cells = [_spread([values[key] for values in members if key in values]) for members in reached]
        results.append([key, *cells])
    return Comparison(groups, settings, results, notes)


def _leave_out_copies(members: list[ComparedRun]) -> list[str]:
    """Take copies of a run's folder out of a group, but the one that went on longest; return what to say.

    A first step that took the same seconds to the last digit is one step that two folders hold.
    """
    by_begin: dict[str, list[ComparedRun]] = {}
    for run in members:
        begin = _first_timed_step(run.measured)
        key = run.name if begin is None else json.dumps([run.settings.get("seed"), begin], sort_keys=True)
        by_begin.setdefault(key, []).append(run)
    notes = []
    for same in by_begin.values():
        kept = max(same, key=lambda run: len(run.measured.lines))
        for run in same:
            if run is not kept:
                members.remove(run)
                notes.append(
                    f"{run.name} begins with the very steps of {kept.name}: it is a copy, and left out."
                )
    return notes


def _first_timed_step(run: Measured) -> Mapping[str, Any] | None:
    """Return the metrics of the first step that took time, of a stage in a run of stages alone.

    An evaluation before the first step has a line without a time, which equal runs share.
    """
    lines = run.lines or [line for stage in run.stages.values() for line in stage]
    return next((line for line in lines if "time/step" in line), None)


def write(folders: Sequence[Path], out: Path) -> str:
    """Write ``compare.html`` and ``compare.md`` into a folder; return the Markdown."""
    compared = compare(folders)
    names = list(compared.groups)
    tables = (("Results", compared.results), ("Settings that differ", compared.settings))
    said = (*compared.notes, MEANING)
    parts = [page.paragraph(note) for note in said]
    for (title, rows), numeric in zip(tables, (range(1, len(names) + 1), ()), strict=True):
        shown = page.table(("", *names), rows, numeric=numeric) if rows else page.paragraph("none")
        parts += [page.heading(title), shown]
    curves = overlaid({name: [run.measured for run in runs] for name, runs in compared.groups.items()})
    parts += [page.heading("Curves"), page.pictures(curves)]
    markdown = "\n".join(f"## {title}\n\n{_markdown(names, rows)}\n" for title, rows in tables)
    markdown = "".join(f"{_escaped(note)}\n\n" for note in said) + markdown
    out.mkdir(parents=True, exist_ok=True)
    page.write(out / "compare.html", "Comparison of runs", parts)
    (out / "compare.md").write_text(f"# Comparison of runs\n\n{markdown}", "utf-8", "replace")
    return markdown


def _read(path: Path, name: str) -> ComparedRun:
    folder = RunFolder(path)
    text = ""
    if folder.config.is_file():
        text = folder.config.read_text(encoding="utf-8", errors="replace")
    settings = read_tree(text, str(folder.config), []).leaves()
    return ComparedRun(name, {key: leaf.value for key, leaf in settings}, measured(folder))


def _name(members: Sequence[ComparedRun]) -> str:
    more = f" and {len(members) - 1} more" if len(members) > 1 else ""
    return members[0].name + more


def _text(run: ComparedRun, key: str) -> str:
    return json.dumps(run.settings[key], ensure_ascii=False, default=str) if key in run.settings else "-"


def _reached(run: Measured) -> dict[str, tuple[float, str]]:
    """Return what a run reached: words -> number and format."""
    lines, reached = run.lines, {}
    for name, stage in run.stages.items():
        for metric, words in STAGE_METRICS:
            if values := series(stage, f"{name}/{metric}")[1]:
                reached[f"{name}: final {words}"] = values[-1], ".3f"
    for name in measured_accuracies(lines):
        values = series(lines, name)[1]
        label = name.removeprefix("eval/").removesuffix("/accuracy")
        reached |= {f"{label}: final accuracy": (values[-1], ".3f")}
        reached |= {f"{label}: best accuracy": (max(values), ".3f")}
    rewards = series(lines, "reward/mean")[1]
    if rewards:
        reached["final reward"] = fmean(rewards[-WINDOW:]), ".3f"
        reached["best reward"] = max(running_mean(rewards)), ".3f"
    for name, words, form in LAST_MEANS:
        values = series(lines, name)[1]
        if values:
            reached[words] = fmean(values[-WINDOW:]), form
    steps, seconds = series(lines, "time/step")
    speeds = dict(zip(*series(lines, "throughput/tokens_per_second"), strict=True))
    if lines:
        reached["steps"] = float(max(int(line["step"]) for line in lines)), ".0f"
    if speeds:
        tokens = sum(speeds.get(step, 0.0) * taken for step, taken in zip(steps, seconds, strict=True))
        reached["tokens"] = tokens, ",.0f"
        reached["tokens per second"] = tokens / max(sum(seconds), 1e-9), ",.0f"
    if seconds:
        reached["seconds of all steps"] = sum(seconds), ",.1f"
        reached["seconds per step"] = fmean(seconds), ".2f"
    return reached


def _spread(values: Sequence[tuple[float, str]]) -> str:
    """Return the mean over runs, with the standard deviation where there are several."""
    if not values:
        return "-"
    numbers, form = [number for number, _ in values], values[0][1]
    spread = stdev(numbers) if len(numbers) > 1 else None
    words = "" if spread is None else f" ± {number_text(spread, form)}"
    return number_text(fmean(numbers), form) + words


def _markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "none"
    cells = [["", *names], ["---", *["---:"] * len(names)], *rows]
    escaped = [[cell if row is cells[1] else _escaped(cell) for cell in row] for row in cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped)


def _escaped(text: str) -> str:
    """Return text as Markdown that shows it in one line, and makes neither HTML, a link nor a cell of it."""
    one_line = readable(" ".join(text.split()))
    marked = re.sub(r"([\\`*\[\]|~])", r"\\\1", one_line)
    return escape(marked, quote=False)
