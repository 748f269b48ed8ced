"""Report of a run: a table on the console, a picture of the learning curves, and a detailed HTML page."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from markupsafe import Markup

from megatron_rl.algorithms.lookup import piece_text
from megatron_rl.config.health import LOWEST_EVALUATION, HealthRule
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.schema import TRAIN
from megatron_rl.config.source import read_tree
from megatron_rl.contained.process import escape_unprintable
from megatron_rl.durable import require_file
from megatron_rl.errors import UserError, first_line
from megatron_rl.metrics import number_text, read_metrics
from megatron_rl.trainer import page
from megatron_rl.trainer.curves import (
    STAGE_METRICS,
    WINDOW,
    Lines,
    RunMetrics,
    draw,
    measured_accuracies,
    pictures,
    series,
)
from megatron_rl.trainer.health import PAGE, PREFIX, firing_steps, rule_named, select_samples
from megatron_rl.trainer.logging import clock, spans

SAMPLES = 2000
"""Maximum number of samples on a page."""
SAMPLES_OF_A_STEP = 32
"""Maximum number of samples from one file."""
MAX_TEXT_CHARACTERS = 4000
"""Maximum length of a sample's text, to which it is cut."""
HEALTH_SAMPLES = 4
"""Maximum number of samples that are shown for a health rule."""
HEALTH_SAMPLES_READ = 10_000
"""Maximum number of samples of a step from which those for a health rule are selected."""
HEALTH_COLUMNS = ("prompt", "response", "reward", "tokens", "end")
PICTURE_DPI = 130

OUTSIDE_STEPS = ("evaluate", "checkpoint", "checkpoint_write")
"""Phases that run between steps or concurrently with them, and are not part of the steps' time."""
FINISH_REASONS = ("stop", "length", "failed")
"""Names of `FINISH_STOP`, `FINISH_LENGTH` and `FINISH_FAILED` of `megatron_rl.types`."""

_NAMED_PIECES = ("advantage", "policy_loss", "aggregation", "kl")
"""Components of the algorithm that the console names; the page has all of them, with their settings."""

SummaryRow = tuple[str, str, str]
"""Row of the final table: name, value, remark."""


@dataclass(frozen=True)
class PhaseTime:
    """Time of one phase over a run.

    Example: a phase of 2 s in each of 10 steps of 5 s has ``total=20.0``, ``per_step=2.0``, ``share=0.4``.
    """

    name: str
    """Name of the phase."""
    total: float
    """Seconds in the whole run."""
    per_step: float
    """Mean seconds per step, over the steps that have the phase."""
    share: float | None
    """Fraction of the time of all steps; None for a phase that is not part of steps."""


def run_metrics(folder: RunFolder) -> RunMetrics:
    """Return the metrics of a run and of its stages; raise UserError for a folder without metrics."""
    lines = _readable_lines(folder.metrics)
    stages: dict[str, Lines] = {}
    for name in folder.measured_stages():
        stage_lines = _readable_lines(folder.stage_metrics(name))
        if stage_lines:
            stages[escape_unprintable(name)] = stage_lines

    # A run that ended before its first step has a folder without metrics.
    if not lines and not stages:
        raise UserError(
            f"{folder.path} has no metrics",
            where=str(folder.metrics),
            expected="the folder of a run that has finished at least one step, of training or of a stage",
            got="no such file, and none of a stage" if not folder.metrics.exists() else "an empty file",
            fix="name the run folder, such as runs/quickstart",
        )
    return RunMetrics(lines, stages)


def _readable_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, with unprintable characters in names escaped."""
    return [{escape_unprintable(name): value for name, value in line.items()} for line in read_metrics(path)]


def write(run_dir: str | Path, console: TextIO | None = None) -> Path:
    """Write ``learning_curve.png`` and ``report.html`` of a run, and print its final table.

    Reads metrics.jsonl, the metrics of stages, config.yaml and the stored samples, if they exist. Returns the
    path of the page. Raises UserError for a folder without metrics.
    """
    folder = RunFolder(run_dir)
    run = run_metrics(folder)
    rows = summary(run.lines, run.stages)
    phases = phase_times(run.lines or [line for lines in run.stages.values() for line in lines])

    # Print the table before files are written: the folder of another user's run may not be writable.
    _print_tables(folder, rows, phases, console)
    draw(run.lines, run.stages).savefig(folder.curve, format="png", dpi=PICTURE_DPI)
    samples, unreadable = stored_samples(folder)
    sections = _page_sections(folder, run, rows, phases, samples, unreadable)
    page.write(folder.report, folder.path.resolve().name, sections)

    for line in unreadable:
        print(f"warning: {line}", file=console)
    print(
        f"learning curves: {folder.curve}\nreport:          {folder.report}",
        file=console,
    )
    return folder.report


def _page_sections(
    folder: RunFolder,
    run: RunMetrics,
    rows: Sequence[SummaryRow],
    phases: Sequence[PhaseTime],
    samples: Sequence[Mapping[str, Any]],
    unreadable: Sequence[str],
) -> list[Markup]:
    """Return all sections of the page, from the final table to the configuration."""
    sections = [page.table(("", "value", ""), rows, numeric=(1,))]
    sections += [
        page.heading("Learning curves"),
        page.pictures(pictures(run.lines, run.stages)),
    ]

    sections += _health_sections(folder, run.lines)
    pieces = algorithm_rows(folder)
    if pieces:
        sections += [page.heading("Algorithm"), page.table(("", "settings"), pieces)]
    if phases:
        headings = ("phase", "total", "per step", "share")
        sections.append(page.heading("Time by phase"))
        sections.append(page.table(headings, _phase_rows(phases), numeric=(1, 2, 3)))

    # List unreadable files even if there is no sample to show.
    if samples or unreadable:
        sections += [
            page.heading("Samples"),
            *map(page.paragraph, unreadable),
        ]
    if samples:
        sections.append(page.sample_browser(samples))

    if folder.config.is_file():
        text = folder.config.read_text(encoding="utf-8", errors="replace")
        sections += [page.heading("Configuration"), page.text(text)]
    return sections


def _health_sections(folder: RunFolder, lines: Lines) -> list[Markup]:
    """Return the section of the health rules that fired, with samples of the step in which each began.

    Returns no section for a run without health metrics.
    """
    fired = firing_steps(lines)
    if not any(name.startswith(PREFIX) for line in lines for name in line):
        return []
    sections = [page.heading("Health")]
    if not fired:
        return [*sections, page.paragraph("No rule has fired.")]

    headings = ("rule", "steps", "meaning", "likely causes", "change")
    rules = {name: rule_named(name) for name in fired}
    rows = [
        (name, spans(steps), rules[name].meaning, rules[name].causes, rules[name].change.replace("`", ""))
        for name, steps in fired.items()
    ]
    sections.append(page.table(headings, rows))

    for name, steps in fired.items():
        samples = _health_samples(folder, rules[name], steps[0])
        if samples:
            text = f"{name}, step {steps[0]}: samples, {rules[name].samples}"
            sections += [page.paragraph(text), page.table(HEALTH_COLUMNS, samples, numeric=(2, 3))]
    return sections


def _health_samples(folder: RunFolder, rule: HealthRule, step: int) -> list[tuple[str, ...]]:
    """Return table rows of a step's samples that show a rule's problem; empty without stored samples."""
    file_pattern = "eval_*" if rule.samples == LOWEST_EVALUATION else "step"
    samples: list[dict[str, Any]] = []
    for path in sorted(folder.rollouts.glob(f"{file_pattern}_{step}.parquet")):
        kind = path.stem.removesuffix(f"_{step}")
        # The page lists unreadable files in the section of samples.
        with contextlib.suppress(Exception):
            samples += _read_samples(kind, step, path, HEALTH_SAMPLES_READ)

    return [
        (
            sample["prompt"],
            sample["response"],
            "failed" if sample["reward"] is None else _three_digits(sample["reward"]),
            str(sample["length"]),
            sample["failure"] or sample["finish"] or "",
        )
        for sample in select_samples(rule, samples, HEALTH_SAMPLES)
    ]


def algorithm_rows(folder: RunFolder) -> list[tuple[str, str]]:
    """Return table rows with a run's algorithm and its components with their settings, from config.yaml.

    Empty for a job without an algorithm, and for a folder without a readable configuration.
    """
    if not folder.config.is_file():
        return []
    text = folder.config.read_text(encoding="utf-8", errors="replace")
    values = {key: leaf.value for key, leaf in read_tree(text, str(folder.config), []).leaves()}
    if values.get("job", TRAIN) != TRAIN or "algorithm.name" not in values:
        return []

    # Collect the settings of each component: `algorithm.COMPONENT`, or `algorithm.COMPONENT.SETTING`.
    pieces: dict[str, Any] = {}
    for path, value in values.items():
        section, _, subpath = path.partition(".")
        key, _, setting = subpath.partition(".")
        if section != "algorithm" or (value is None and not setting):
            continue
        if setting:
            pieces.setdefault(key, {})[setting] = value
        else:
            pieces[key] = value
    return [(key, escape_unprintable(piece_text(value))) for key, value in pieces.items()]


def summary(lines: Lines, stages: Mapping[str, Lines]) -> list[SummaryRow]:
    """Return the rows of the final table; a metric that was not measured has no row."""
    rows = [_accuracy_row(lines, name) for name in measured_accuracies(lines)]
    rows += _trend_rows(lines)
    if lines:
        # Line 0 is an evaluation before the first step.
        steps, _ = series([line for line in lines if line["step"] > 0], "step")
        rows.append(("steps", str(len(steps)), ""))
    rows += [_stage_row(name, stage_lines) for name, stage_lines in stages.items()]

    # Indicators of a run's health: mean over the steps, with the worst or best step.
    _, speed = series(lines, "throughput/tokens_per_second")
    if speed:
        remark = f"best step {number_text(max(speed), ',.0f')}"
        rows.append(("tokens per second", number_text(fmean(speed), ",.0f"), remark))
    _, mismatch = series(lines, "mismatch/abs_diff")
    if mismatch:
        remark = f"largest step mean {max(mismatch):.1e}"
        rows.append(("log-prob mismatch", f"{fmean(mismatch):.1e}", remark))
    _, invalid = series(lines, "reward/invalid")
    if invalid:
        remark = f"worst step {number_text(max(invalid), '.2%')}"
        rows.append(("invalid rewards", number_text(fmean(invalid), ".2%"), remark))
    for name, steps_fired in firing_steps(lines).items():
        rows.append((f"health: {name}", f"{len(steps_fired)} steps", f"{spans(steps_fired)}; see {PAGE}"))
    return rows


def _accuracy_row(lines: Lines, name: str) -> SummaryRow:
    """Return the row with the first, last and best value of an evaluation set's accuracy."""
    steps, accuracy = series(lines, name)
    best = max(range(len(accuracy)), key=accuracy.__getitem__)
    difference = number_text(accuracy[-1] - accuracy[0], "+.3f")
    remark = f"{difference}; best {_three_digits(accuracy[best])} at step {steps[best]}"
    return name, _change(accuracy[0], accuracy[-1]), remark


def _trend_rows(lines: Lines) -> list[SummaryRow]:
    """Return rows with the means over the first and over the last steps, for metrics that show a trend."""
    rows: list[SummaryRow] = []
    for name, label, form in (
        ("reward/mean", "mean reward", ".3f"),
        ("response/length", "response length", ".1f"),
        ("policy/entropy", "policy entropy", ".3f"),
    ):
        _, values = series(lines, name)
        if values:
            # At most half of the steps, so that first and last steps do not overlap in a short run.
            steps = max(1, min(WINDOW, len(values) // 2))
            remark = f"means of the first and last {steps} steps"
            change = _change(fmean(values[:steps]), fmean(values[-steps:]), form)
            rows.append((label, change, remark))

    return rows


def _stage_row(name: str, lines: Lines) -> SummaryRow:
    """Return the row with the number of steps of a stage, and the first and last values of its metrics."""
    changes: list[str] = []
    for metric, label in STAGE_METRICS:
        _, values = series(lines, f"{name}/{metric}")
        if values:
            changes.append(f"{label} {_change(values[0], values[-1])}")
    steps, _ = series(lines, f"{name}/loss")
    return name, f"{len(steps)} steps", "; ".join(changes)


def _three_digits(value: float) -> str:
    """Return a number with three digits after the decimal point."""
    return number_text(value, ".3f")


def _change(first: float, last: float, form: str = ".3f") -> str:
    """Return the text "FIRST → LAST"."""
    return f"{number_text(first, form)} → {number_text(last, form)}"


def phase_times(lines: Lines) -> list[PhaseTime]:
    """Return the time of each phase, the longest first.

    Phases can be nested, such as a reshard inside generate, so their shares need not add up to one.
    """
    names = sorted({name for line in lines for name in line if name.startswith("time/")})
    seconds = {name.removeprefix("time/"): series(lines, name)[1] for name in names}
    step_seconds = seconds.pop("step", [])
    step_total = sum(step_seconds)

    # Shares are fractions of the time of all steps, which stages do not measure.
    phases: list[PhaseTime] = []
    for name, values in seconds.items():
        if values:
            has_share = bool(step_total) and name not in OUTSIDE_STEPS
            share = sum(values) / step_total if has_share else None
            phases.append(PhaseTime(name, sum(values), fmean(values), share))
    if step_total:
        phases.append(PhaseTime("whole steps", step_total, fmean(step_seconds), 1.0))
    return sorted(phases, key=lambda phase: -phase.total)


def _print_tables(
    folder: RunFolder,
    rows: Sequence[SummaryRow],
    phases: Sequence[PhaseTime],
    out: TextIO | None,
) -> None:
    """Print the final table and the times of the phases."""
    from rich.console import Console
    from rich.table import Table

    # Names of sets and folders come from users, so markup and emoji in them must not be interpreted.
    console = Console(file=out, highlight=False, soft_wrap=True, markup=False, emoji=False)
    table = Table(title=f"{folder.path.name}: result", title_justify="left")
    for heading, justify in (
        ("", "left"),
        ("value", "right"),
        ("", "left"),
    ):
        table.add_column(heading, justify=justify)  # pyright: ignore[reportArgumentType]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    pieces = algorithm_rows(folder)
    if pieces:
        names = [f"{key} {text.partition(': ')[0]}" for key, text in pieces if key in _NAMED_PIECES]
        console.print(f"algorithm: {', '.join([pieces[0][1], *names])}")

    if phases:
        times = Table(title="time by phase", title_justify="left")
        times.add_column("phase")
        for heading in ("total", "per step", "share"):
            times.add_column(heading, justify="right")
        for row in _phase_rows(phases):
            times.add_row(*row)
        console.print(times)


def _phase_rows(
    phases: Sequence[PhaseTime],
) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table of phases: name, total, per step, share."""
    rows: list[tuple[str, str, str, str]] = []
    for phase in phases:
        share = ""
        if phase.share is not None:
            share = number_text(phase.share, ".0%")

        total = clock(phase.total)
        per_step = f"{_three_digits(phase.per_step)} s"
        rows.append((phase.name, total, per_step, share))
    return rows


def stored_samples(
    folder: RunFolder,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return stored samples for the page, and a line for each unreadable file.

    At most `SAMPLES` samples are selected, evenly over the steps; long texts are cut. For evaluation sets,
    the samples of every step have the same prompts. Training samples are selected evenly over the rows of a
    step. A file may be unreadable because the machine crashed during a write.
    """
    files: list[tuple[str, int, Path]] = []
    for path in folder.rollouts.glob("*.parquet"):
        kind, _, step = path.stem.rpartition("_")
        if step.isdecimal():
            files.append((kind, int(step), path))
    files.sort()

    # Select every stride-th file, so that the page has at most `SAMPLES` samples.
    stride = max(1, -(-len(files) * SAMPLES_OF_A_STEP // SAMPLES))
    samples: list[dict[str, Any]] = []
    unreadable: list[str] = []
    for kind in dict.fromkeys(kind for kind, _, _ in files):
        files_of_kind = [file for file in files if file[0] == kind]
        # Select backwards, so that the last step of each kind is always included.
        selected = files_of_kind[::-stride][::-1]
        for _, step, path in selected:
            try:
                samples += _read_samples(kind, step, path)
            except Exception as error:  # pyarrow and malformed rows raise errors of many types
                unreadable.append(f"{path.name} is omitted, since it cannot be read: {first_line(error)}")
    return samples, unreadable


def _read_samples(
    kind: str,
    step: int,
    path: Path,
    limit: int = SAMPLES_OF_A_STEP,
) -> list[dict[str, Any]]:
    """Read at most ``limit`` samples of a file, with the keys of `page.sample_browser`.

    ``kind``: "step" for training samples, or "eval_NAME".
    """
    import pyarrow.parquet

    require_file(path)
    rows = pyarrow.parquet.read_table(path).to_pylist()
    # For an evaluation, select the first rows, so that every step shows the same prompts.
    stride = 1
    if kind == "step":
        stride = max(1, -(-len(rows) // limit))
    samples: list[dict[str, Any]] = []
    for row in rows[::stride][:limit]:
        # A failed reward is NaN, which JSON does not have: store None.
        reward = row.get("reward")
        if reward is not None:
            reward = round(reward, 6) if math.isfinite(reward) else None
        finish = row.get("finish_reason")
        if finish is not None:
            finish = FINISH_REASONS[finish]
        samples.append({
            "set": "training" if kind == "step" else kind.removeprefix("eval_"),
            "step": step,
            "prompt": _cut(row.get("prompt")),
            "response": _cut(row.get("response")),
            "truth": _cut_optional(row.get("ground_truth")),
            "reward": reward,
            "length": row.get("length"),
            "finish": finish,
            "turns": _turns(row.get("conversation")),
            "failure": _cut_optional(row.get("failure")),
        })  # fmt: skip
    return samples


def _turns(conversation: Any) -> list[dict[str, Any]] | None:
    """Return the turns of a stored conversation for `page.sample_browser`, or None for a single response."""
    if conversation is None:
        return None

    # `write_rollouts` stores a column whose values have no common Parquet type as JSON.
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
    """Return a value as text, cut to `MAX_TEXT_CHARACTERS`, with the number of omitted characters."""
    text = str(value)
    surplus = len(text) - MAX_TEXT_CHARACTERS
    return text if surplus <= 0 else f"{text[:MAX_TEXT_CHARACTERS]} … ({surplus} more characters)"


def _cut_optional(value: Any) -> str | None:
    """Return a value as text as `_cut` does, or None for None."""
    return None if value is None else _cut(value)
