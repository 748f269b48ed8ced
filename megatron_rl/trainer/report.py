"""Report of a run: a table on the console, a picture of the learning curves, and a detailed HTML page."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TextIO

from markupsafe import Markup

from megatron_rl.algorithms.lookup import piece_text
from megatron_rl.config.health import LOWEST_EVALUATION, HealthRule
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.schema import TRAIN
from megatron_rl.config.source import read_tree
from megatron_rl.contained.process import escape_unprintable
from megatron_rl.durable import require_regular_file
from megatron_rl.errors import UserError, first_line
from megatron_rl.metrics import number_text, read_metrics
from megatron_rl.trainer import page
from megatron_rl.trainer.curves import (
    STAGE_METRICS,
    WINDOW,
    Lines,
    RunMetrics,
    draw_figure,
    make_charts,
    measured_accuracy_names,
    metric_series,
)
from megatron_rl.trainer.health import PAGE, PREFIX, find_rule, firing_steps, select_samples
from megatron_rl.trainer.logging import format_clock, format_step_ranges
from megatron_rl.trainer.starts import Start, read_starts

if TYPE_CHECKING:
    from pyarrow import Table

HEALTH_SAMPLES = 4
"""Maximum number of samples that are shown for a health rule."""
HEALTH_SAMPLES_READ = 10_000
"""Maximum number of a step's samples that are searched for samples to show for a health rule."""
HEALTH_COLUMNS = ("prompt", "response", "reward", "tokens", "end")
"""Headings of the table of samples for a health rule."""
PICTURE_DPI = 130
"""Resolution of ``learning_curve.png`` in dots per inch."""

OUTSIDE_STEPS = ("evaluate", "checkpoint", "checkpoint_write")
"""Phases that run between steps or concurrently with them, so their time is not part of the steps' time."""
PART_OF = {
    "reshard": "generate",
    "reshard_verify": "generate",
    "rows": "all phases that gather rows",
    "offload": "all phases with a model",
}
"""Phase -> larger phase that contains it: the time of ``generate``, for example, includes ``reshard``."""
BETWEEN_STEPS = "between steps"
"""Cell of the column ``part of`` for the phases in `OUTSIDE_STEPS`."""

PHASE_HEADINGS = ("phase", "total", "per step", "share", "part of")
PHASES_NOTE = (
    "Each time is the time of the slowest rank. The time of a phase includes the phases that are part of it. "
    "If roles have separate ranks, their phases run at the same time."
)

_NAMED_COMPONENTS = ("advantage", "policy_loss", "aggregation", "kl")
"""Components of the algorithm that the console names; the page has all of them, with their settings."""

SAMPLES = 2000
"""Maximum number of samples on a page, unless `MIN_SAMPLES_OF_A_STEP` samples of each file are more."""
SAMPLES_OF_A_STEP = 32
"""Maximum number of samples that are shown of one file."""
MIN_SAMPLES_OF_A_STEP = 4
"""Minimum number of samples that are shown of one file: one for each of `MARKS`."""
MARKS = ("worst", "best", "longest", "invalid")
"""Marks of samples that are shown of every step: lowest reward, highest reward, most tokens, no reward."""
MAX_TEXT_CHARACTERS = 4000
"""Maximum characters of a sample's text; the rest is cut off."""
_MIN_TEXT_CHARACTERS = 200
"""Lower bound of the maximum characters of a text: the maximum decreases with the number of files."""
_PAGE_CHARACTERS = 24_000_000
"""Maximum characters of all sample texts on a page; determines the maximum of one text."""
_COMPONENT_PREFIX = "component/"
"""Prefix of the columns in a samples file that contain the components of a reward."""
TRAINING_SET = "training"
"""Set name of the samples of training steps on the page; evaluation sets have their own names."""

FINISH_REASONS = ("stop", "length", "failed")
"""Names of `FINISH_STOP`, `FINISH_LENGTH` and `FINISH_FAILED` of `megatron_rl.types`."""

SummaryRow = tuple[str, str, str]
"""Row of the report's final table: name, value, remark."""


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
    """Fraction of the time of all steps; None for a phase outside of steps."""
    part_of: str = ""
    """Phase that includes this one's time, empty for a phase that is not part of another."""


@dataclass(frozen=True)
class StoredSamples:
    """Samples that a report shows: a selection from each stored training step and evaluation.

    Example: a run with one step of 512 samples has 32 ``rows`` and the ``counts``
    ``[{"set": "training", "step": 1, "stored": 512, "shown": 32}]``.
    """

    rows: list[dict[str, Any]]
    """Samples in the format of `page.sample_browser`, by set and step."""
    counts: list[dict[str, Any]]
    """Numbers of stored and shown samples of each set and step."""
    warnings: list[str]
    """A warning for each file that cannot be read, for example a file truncated by a crash of the machine."""


def run_metrics(folder: RunFolder) -> RunMetrics:
    """Return the metrics of a run and of its stages; raise UserError for a folder without metrics."""
    lines = _readable_lines(folder.metrics)
    stages: dict[str, Lines] = {}
    for name in folder.stages_with_metrics():
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
    """Read the lines of a metrics file, and escape unprintable characters in the metrics' names."""
    return [{escape_unprintable(name): value for name, value in line.items()} for line in read_metrics(path)]


def write_report(run_dir: str | Path, console: TextIO | None = None) -> Path:
    """Write ``learning_curve.png`` and ``report.html`` of a run, and print its final table.

    Reads metrics.jsonl, the metrics of stages, config.yaml and the stored samples, if they exist. Returns the
    path of the page. Raises UserError for a folder without metrics.
    """
    folder = RunFolder(run_dir)
    run = run_metrics(folder)
    rows = summary_rows(run.lines, run.stages)
    timed_lines = list(run.lines)
    if not timed_lines:
        for stage_lines in run.stages.values():
            timed_lines += stage_lines
    phases = phase_times(timed_lines)
    components = algorithm_rows(folder)

    # Print the table before files are written: the folder of another user's run may not be writable.
    _print_tables(folder, rows, components, phases, console)
    draw_figure(run.lines, run.stages).savefig(folder.curve, format="png", dpi=PICTURE_DPI)
    samples = read_stored_samples(folder)
    sections = _page_sections(folder, run, rows, components, phases, samples)
    page.write_page(folder.report, folder.path.resolve().name, sections)

    for line in samples.warnings:
        print(f"warning: {line}", file=console)
    files = [("learning curves:", folder.curve), ("report:", folder.report)]
    # The folder has no model while the run is in progress, or if the run exports no model.
    has_model = folder.model.is_dir()
    if has_model:
        files.append(("trained model:", folder.model))
    for label, path in files:
        print(f"{label:<16} {path}", file=console)
    if has_model:
        print(f"{'next:':<16} megatron-rl serve {folder.path}", file=console)
        print(f"{'':<16} megatron-rl compare {folder.path} OTHER_RUN", file=console)
    return folder.report


def _page_sections(
    folder: RunFolder,
    run: RunMetrics,
    rows: Sequence[SummaryRow],
    components: Sequence[tuple[str, str]],
    phases: Sequence[PhaseTime],
    samples: StoredSamples,
) -> list[Markup]:
    """Return the sections of the report page in their order, from the run's start to its configuration."""
    sections = [
        page.name_value_table(run_info_rows(folder, run)),
        page.heading("Result"),
        page.table(("", "value", ""), rows, numeric_columns=(1,)),
        page.heading("Learning curves"),
        page.chart_grid(make_charts(run.lines, run.stages)),
    ]

    sections += _health_sections(folder, run.lines)
    if components:
        sections += [page.heading("Algorithm"), page.table(("", "settings"), components)]
    if phases:
        sections.append(page.heading("Time by phase"))
        sections.append(page.table(PHASE_HEADINGS, _phase_rows(phases), numeric_columns=(1, 2, 3)))
        sections.append(page.paragraph(PHASES_NOTE))

    # Show the warnings about unreadable files even if there is no sample to show.
    if samples.rows or samples.warnings:
        sections += [
            page.heading("Samples"),
            *map(page.paragraph, samples.warnings),
        ]
    if samples.rows:
        sections.append(page.sample_browser(samples.rows, samples.counts))

    if folder.config.is_file():
        text = folder.config.read_text(encoding="utf-8", errors="replace")
        sections += [page.heading("Configuration"), page.preformatted_text(text)]
    return sections


def run_info_rows(folder: RunFolder, run: RunMetrics) -> list[tuple[str, str]]:
    """Return a run's folder, start, command, versions, hardware and duration as (name, value) pairs.

    Without recorded starts, returns only the folder and the duration of the steps.
    """
    rows = [("folder", str(folder.path.resolve()))]
    starts = read_starts(folder)
    if starts:
        # Each start may have had another command, version or machine: show them for the last start.
        first_start = starts[0]
        last_start = starts[-1]
        start_text = first_start.time.replace("T", " ")
        if len(starts) > 1:
            start_text += f"; {len(starts)} starts, the last {last_start.time.replace('T', ' ')}"
        rows += [("started", start_text), ("command", last_start.command)]
        rows += [("revision", format_revisions(last_start)), ("versions", format_pairs(last_start.versions))]
        rows.append(("hardware", format_pairs(last_start.hardware)))

    durations: list[str] = []
    if starts and starts[0].start_time is not None and folder.metrics.is_file():
        seconds = folder.metrics.stat().st_mtime - starts[0].start_time.timestamp()
        durations.append(f"{format_clock(max(0.0, seconds))} from the start to the last step")
    _, step_seconds = metric_series(run.lines, "time/step")
    if step_seconds:
        durations.append(f"{format_clock(sum(step_seconds))} in {len(step_seconds)} steps")
    if durations:
        rows.append(("duration", "; ".join(durations)))
    return [(name, escape_unprintable(value)) for name, value in rows]


def format_revisions(start: Start) -> str:
    """Format the git revisions of the package and of the folder in which a run was started."""
    package_revision = start.revision or "installed from a package"
    if start.working_revision in (None, start.revision):
        return package_revision
    return f"{package_revision}; {start.working_revision} of the folder in which it was started"


def format_pairs(values: Mapping[str, Any]) -> str:
    """Format names and values as one line, such as ``torch 2.9, vllm 0.12``."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _health_sections(folder: RunFolder, lines: Lines) -> list[Markup]:
    """Return the page's section about health rules: a table of the rules that fired, and samples.

    The samples of a rule are from the first step in which it fired. Returns an empty list for a run without
    health metrics.
    """
    steps_by_rule = firing_steps(lines)
    if not any(name.startswith(PREFIX) for line in lines for name in line):
        return []
    sections = [page.heading("Health")]
    if not steps_by_rule:
        return [*sections, page.paragraph("No rule has fired.")]

    headings = ("rule", "steps", "meaning", "likely causes", "change")
    rules = {name: find_rule(name) for name in steps_by_rule}
    rows: list[tuple[str, ...]] = []
    for name, steps in steps_by_rule.items():
        rule = rules[name]
        settings_to_change = rule.change.replace("`", "")
        rows.append((name, format_step_ranges(steps), rule.meaning, rule.causes, settings_to_change))
    sections.append(page.table(headings, rows))

    for name, steps in steps_by_rule.items():
        samples = _health_samples(folder, rules[name], steps[0])
        if samples:
            caption = f"{name}, step {steps[0]}: samples, {rules[name].samples}"
            sections.append(page.paragraph(caption))
            sections.append(page.table(HEALTH_COLUMNS, samples, numeric_columns=(2, 3)))
    return sections


def _health_samples(folder: RunFolder, rule: HealthRule, step: int) -> list[tuple[str, ...]]:
    """Return table rows of a step's stored samples that show the problem which a rule detects.

    Returns no rows if no samples of the step are stored.
    """
    file_pattern = "eval_*" if rule.samples == LOWEST_EVALUATION else "step"
    samples: list[dict[str, Any]] = []
    for path in sorted(folder.rollouts.glob(f"{file_pattern}_{step}.parquet")):
        kind = path.stem.removesuffix(f"_{step}")
        # Skip unreadable files here: `read_stored_samples` warns of them on the same page.
        with contextlib.suppress(Exception):
            samples += read_samples(kind, step, path, HEALTH_SAMPLES_READ)[0]

    rows: list[tuple[str, ...]] = []
    for sample in select_samples(rule, samples, HEALTH_SAMPLES):
        reward_text = "failed"
        if sample["reward"] is not None:
            reward_text = _format_three_decimals(sample["reward"])
        end_text = sample["failure"] or sample["finish"] or ""
        rows.append((sample["prompt"], sample["response"], reward_text, str(sample["length"]), end_text))
    return rows


def algorithm_rows(folder: RunFolder) -> list[tuple[str, str]]:
    """Read a run's algorithm from config.yaml; return a table row for its name and for each component.

    A component's row contains its settings. Returns no rows if config.yaml is missing or has no algorithm.
    """
    if not folder.config.is_file():
        return []
    text = folder.config.read_text(encoding="utf-8", errors="replace")
    values = {key: leaf.value for key, leaf in read_tree(text, str(folder.config), []).leaves()}
    if values.get("job", TRAIN) != TRAIN or "algorithm.name" not in values:
        return []

    # Collect the settings of each component: `algorithm.COMPONENT`, or `algorithm.COMPONENT.SETTING`.
    components: dict[str, Any] = {}
    for path, value in values.items():
        section, _, subpath = path.partition(".")
        key, _, setting = subpath.partition(".")
        if section != "algorithm" or (value is None and not setting):
            continue
        if setting:
            components.setdefault(key, {})[setting] = value
        else:
            components[key] = value
    return [(key, escape_unprintable(piece_text(value))) for key, value in components.items()]


def summary_rows(lines: Lines, stages: Mapping[str, Lines]) -> list[SummaryRow]:
    """Return the rows of the report's final table; a metric that was not measured has no row."""
    rows = [_accuracy_row(lines, name) for name in measured_accuracy_names(lines)]
    rows += _trend_rows(lines)
    if lines:
        # Line 0 is an evaluation before the first step.
        steps, _ = metric_series([line for line in lines if line["step"] > 0], "step")
        rows.append(("steps", str(len(steps)), ""))
    rows += [_stage_row(name, stage_lines) for name, stage_lines in stages.items()]

    # Throughput, log-prob mismatch and invalid rewards: mean over the steps, and the worst or best step.
    _, throughputs = metric_series(lines, "throughput/tokens_per_second")
    if throughputs:
        remark = f"best step {number_text(max(throughputs), ',.0f')}"
        rows.append(("tokens per second", number_text(fmean(throughputs), ",.0f"), remark))
    _, mismatches = metric_series(lines, "mismatch/abs_diff")
    if mismatches:
        remark = f"largest step mean {max(mismatches):.1e}"
        rows.append(("log-prob mismatch", f"{fmean(mismatches):.1e}", remark))
    _, invalid_fractions = metric_series(lines, "reward/invalid")
    if invalid_fractions:
        remark = f"worst step {number_text(max(invalid_fractions), '.2%')}"
        rows.append(("invalid rewards", number_text(fmean(invalid_fractions), ".2%"), remark))
    for name, steps_fired in firing_steps(lines).items():
        remark = f"{format_step_ranges(steps_fired)}; see {PAGE}"
        rows.append((f"health: {name}", f"{len(steps_fired)} steps", remark))
    return rows


def _accuracy_row(lines: Lines, name: str) -> SummaryRow:
    """Return the table row of an evaluation set's accuracy: its first, last and best value."""
    steps, accuracies = metric_series(lines, name)
    best_index = max(range(len(accuracies)), key=accuracies.__getitem__)
    difference = number_text(accuracies[-1] - accuracies[0], "+.3f")
    remark = (
        f"{difference}; best {_format_three_decimals(accuracies[best_index])} at step {steps[best_index]}"
    )
    return name, _format_change(accuracies[0], accuracies[-1]), remark


def _trend_rows(lines: Lines) -> list[SummaryRow]:
    """Return the table rows of reward, response length and entropy.

    Each row has the mean over the first steps and the mean over the last steps.
    """
    rows: list[SummaryRow] = []
    for name, label, number_format in (
        ("reward/mean", "mean reward", ".3f"),
        ("response/length", "response length", ".1f"),
        ("policy/entropy", "policy entropy", ".3f"),
    ):
        _, values = metric_series(lines, name)
        if values:
            # At most half of the steps, so that first and last steps do not overlap in a short run.
            step_count = max(1, min(WINDOW, len(values) // 2))
            remark = f"means of the first and last {step_count} steps"
            first_mean = fmean(values[:step_count])
            last_mean = fmean(values[-step_count:])
            rows.append((label, _format_change(first_mean, last_mean, number_format), remark))

    return rows


def _stage_row(name: str, lines: Lines) -> SummaryRow:
    """Return the table row of a stage: its number of steps, and the first and last values of its metrics."""
    changes: list[str] = []
    for metric, label in STAGE_METRICS:
        _, values = metric_series(lines, f"{name}/{metric}")
        if values:
            changes.append(f"{label} {_format_change(values[0], values[-1])}")
    steps, _ = metric_series(lines, f"{name}/loss")
    return name, f"{len(steps)} steps", "; ".join(changes)


def _format_three_decimals(value: float) -> str:
    """Format a number with three decimals."""
    return number_text(value, ".3f")


def _format_change(first: float, last: float, number_format: str = ".3f") -> str:
    """Format a metric's first and last value as ``FIRST → LAST``, both in ``number_format``."""
    return f"{number_text(first, number_format)} → {number_text(last, number_format)}"


def phase_times(lines: Lines) -> list[PhaseTime]:
    """Return the total and mean time of each phase over all steps, longest total first.

    Phases that are part of another phase come last: the time of ``generate``, for example, includes the time
    of ``reshard``.
    """
    time_metrics: set[str] = set()
    for line in lines:
        time_metrics.update(name for name in line if name.startswith("time/"))
    seconds_by_phase: dict[str, list[float]] = {}
    for metric in sorted(time_metrics):
        _, seconds = metric_series(lines, metric)
        seconds_by_phase[metric.removeprefix("time/")] = seconds
    step_seconds = seconds_by_phase.pop("step", [])
    step_total = sum(step_seconds)

    # `PhaseTime.share` is a fraction of the time of all steps. Metrics of training before RL, such as SFT, do
    # not contain ``time/step``: the share is then None.
    phases: list[PhaseTime] = []
    for name, seconds in seconds_by_phase.items():
        if seconds:
            has_share = bool(step_total) and name not in OUTSIDE_STEPS
            share = sum(seconds) / step_total if has_share else None
            part_of = PART_OF.get(name, "")
            if name in OUTSIDE_STEPS:
                part_of = BETWEEN_STEPS
            phases.append(PhaseTime(name, sum(seconds), fmean(seconds), share, part_of))
    if step_total:
        phases.append(PhaseTime("whole steps", step_total, fmean(step_seconds), 1.0))
    return sorted(phases, key=lambda phase: (bool(phase.part_of), -phase.total))


def _print_tables(
    folder: RunFolder,
    rows: Sequence[SummaryRow],
    components: Sequence[tuple[str, str]],
    phases: Sequence[PhaseTime],
    out: TextIO | None,
) -> None:
    """Print the report's final table, the algorithm and the times of the phases to ``out``.

    None is standard output.
    """
    from rich.console import Console
    from rich.table import Table

    # Names of sets and folders come from users, so markup and emoji in them must not be interpreted.
    console = Console(file=out, highlight=False, soft_wrap=True, markup=False, emoji=False)
    result_table = Table(title=f"{folder.path.name}: result", title_justify="left")
    for heading, justify in (
        ("", "left"),
        ("value", "right"),
        ("", "left"),
    ):
        result_table.add_column(heading, justify=justify)  # pyright: ignore[reportArgumentType]
    for row in rows:
        result_table.add_row(*row)
    console.print(result_table)
    if components:
        algorithm_texts = [components[0][1]]
        for key, component_text in components:
            if key in _NAMED_COMPONENTS:
                component_name = component_text.partition(": ")[0]
                algorithm_texts.append(f"{key} {component_name}")
        console.print(f"algorithm: {', '.join(algorithm_texts)}")

    if phases:
        phase_table = Table(title="time by phase", title_justify="left")
        phase_table.add_column(PHASE_HEADINGS[0])
        for heading in PHASE_HEADINGS[1:-1]:
            phase_table.add_column(heading, justify="right")
        phase_table.add_column(PHASE_HEADINGS[-1])
        for row in _phase_rows(phases):
            phase_table.add_row(*row)
        console.print(phase_table)


def _phase_rows(
    phases: Sequence[PhaseTime],
) -> list[tuple[str, ...]]:
    """Return the rows of the table of phases, whose columns are `PHASE_HEADINGS`."""
    rows: list[tuple[str, ...]] = []
    for phase in phases:
        share_text = ""
        if phase.share is not None:
            share_text = number_text(phase.share, ".0%")

        total_text = format_clock(phase.total)
        per_step_text = f"{_format_three_decimals(phase.per_step)} s"
        rows.append((phase.name, total_text, per_step_text, share_text, phase.part_of))
    return rows


# Samples. The page of a long run shows a selection of each step's samples, and the number of stored samples:
# the worst, best, longest and invalid samples, then the other samples of their groups, then others.


def read_stored_samples(folder: RunFolder) -> StoredSamples:
    """Return samples of every step and evaluation of a run, with long texts cut."""
    files: list[tuple[str, int, Path]] = []
    for path in folder.rollouts.glob("*.parquet"):
        kind, _, step = path.stem.rpartition("_")
        if step.isdecimal():
            files.append((kind, int(step), path))
    files.sort()

    # At least `MIN_SAMPLES_OF_A_STEP` samples of a file are shown. If this is too much for the page, select
    # every stride-th file of a kind, counted from the last step, so that the last step is always shown.
    stride = max(1, math.ceil(len(files) * MIN_SAMPLES_OF_A_STEP / SAMPLES))
    selected_files: list[tuple[str, int, Path]] = []
    for kind in dict.fromkeys(kind for kind, _, _ in files):
        newest_first = [file for file in reversed(files) if file[0] == kind]
        selected_files += reversed(newest_first[::stride])
    files = selected_files

    # With more files, show fewer samples of each file, and shorter prompts and responses.
    samples_per_file = min(SAMPLES_OF_A_STEP, max(MIN_SAMPLES_OF_A_STEP, SAMPLES // max(1, len(files))))
    text_count = 2 * samples_per_file * len(files)
    max_characters = _PAGE_CHARACTERS // max(1, text_count)
    max_characters = min(MAX_TEXT_CHARACTERS, max(_MIN_TEXT_CHARACTERS, max_characters))

    samples = StoredSamples([], [], [])
    for kind, step, path in files:
        try:
            rows, num_stored = read_samples(kind, step, path, samples_per_file, max_characters)
        except Exception as error:  # anything that pyarrow, or a row with an unexpected structure, raises
            reason = first_line(error)
            samples.warnings.append(f"{path.name} is omitted, since it cannot be read: {reason}")
            continue
        samples.rows.extend(rows)
        samples.counts.append({
            "set": _data_set_of(kind),
            "step": step,
            "stored": num_stored,
            "shown": len(rows),
        })  # fmt: skip
    return samples


def read_samples(
    kind: str, step: int, path: Path, limit: int, max_characters: int = MAX_TEXT_CHARACTERS
) -> tuple[list[dict[str, Any]], int]:
    """Return at most ``limit`` samples of a samples file, and the number of samples in the file.

    `select_rows` selects the samples, and marks some of them, for example as the best or the longest one.

    ``kind``: "step" for a file of training samples, "eval_NAME" for the responses to an evaluation set.
    ``step``: step of the samples. ``max_characters``: maximum length of a text; longer texts are cut.
    """
    import pyarrow.parquet

    require_regular_file(path)
    table = pyarrow.parquet.read_table(path)

    # Select the rows. `marks_by_row` maps the index of a selected row to its marks, such as ["best"].
    rewards_with_valid = zip(_column_values(table, "reward"), _column_values(table, "valid"), strict=True)
    rewards = [_trained_reward(reward, is_valid) for reward, is_valid in rewards_with_valid]
    lengths = _column_numbers(table, "length")
    groups = _column_values(table, "group")
    marks_by_row = select_rows(rewards, lengths, groups, limit, spread=kind == "step")
    # A file without rewards gets no marks: otherwise rows without a reward would be marked as invalid.
    if "reward" not in table.column_names:
        marks_by_row = {row: [] for row in marks_by_row}

    # Count the samples of each group over all rows of the file: only some rows of a group may be selected.
    group_sizes = Counter(groups)

    # Convert only the selected rows to Python objects, because texts are long.
    rows = table.take(list(marks_by_row)).to_pylist()
    samples = [
        _format_sample(row, _data_set_of(kind), step, row_marks, max_characters)
        for row, row_marks in zip(rows, marks_by_row.values(), strict=True)
    ]
    for sample in samples:
        sample["group_size"] = group_sizes[sample["group"]]
    return samples, table.num_rows


def select_rows(
    rewards: Sequence[float | None],
    lengths: Sequence[float | None],
    groups: Sequence[Any],
    limit: int,
    *,
    spread: bool,
) -> dict[int, list[str]]:
    """Select at most ``limit`` rows of a samples file; return a dictionary of row index -> marks, ascending.

    Each selected row has a list of `MARKS`, which may be empty. Rows with a mark, such as the row with the
    best reward, are selected first, then the other rows of their groups. Further rows are added up to
    ``limit``.

    ``spread``: whether the further rows are every n-th row of the file, otherwise they are the first rows.
        In the files of an evaluation set, the first rows have the same prompts in every step.

    Example:
        >>> select_rows([0.0, 1.0, None, 1.0], [3, 9, 5, 4], [0, 0, 1, 1], 3, spread=True)
        {0: ['worst'], 1: ['best', 'longest'], 2: ['invalid']}
    """
    row_count = len(rewards)
    rows_with_reward = [row for row in range(row_count) if rewards[row] is not None]
    rows_with_length = [row for row in range(row_count) if lengths[row] is not None]
    # Sorting is stable: of several rows with equal values, the first rows are selected.
    candidates_by_mark = {
        "worst": sorted(rows_with_reward, key=lambda row: rewards[row] or 0.0),
        "best": sorted(rows_with_reward, key=lambda row: -(rewards[row] or 0.0)),
        "longest": sorted(rows_with_length, key=lambda row: -(lengths[row] or 0.0)),
        "invalid": [row for row in range(row_count) if rewards[row] is None],
    }

    # Mark two rows per mark if the limit also leaves room for other rows of their groups.
    rows_per_mark = 1
    if min(limit, row_count) >= 4 * len(MARKS):
        rows_per_mark = 2
    marks_by_row: dict[int, list[str]] = {}
    for index in range(rows_per_mark):
        for mark in MARKS:
            if index < len(candidates_by_mark[mark]):
                row = candidates_by_mark[mark][index]
                marks_by_row.setdefault(row, []).append(mark)

    # All candidates in order of importance; a dict drops repeated rows and keeps the order.
    marked_groups = list(dict.fromkeys(groups[row] for row in marks_by_row if groups[row] is not None))
    group_rows: list[int] = []
    for group in marked_groups:
        group_rows += [row for row in range(row_count) if groups[row] == group]
    stride = 1
    if spread:
        stride = max(1, math.ceil(row_count / limit))
    candidates = [*marks_by_row, *group_rows, *range(0, row_count, stride), *range(row_count)]
    selected = sorted(list(dict.fromkeys(candidates))[:limit])
    return {row: marks_by_row.get(row, []) for row in selected}


def _column_values(table: Table, name: str) -> list[Any]:
    """Return the values of a column of a samples file, or a None per row for a missing column."""
    if name not in table.column_names:
        return [None] * table.num_rows
    return table.column(name).to_pylist()


def _column_numbers(table: Table, name: str) -> list[float | None]:
    """Return the numbers of a column of a samples file; NaN (a failed reward) and infinity become None."""
    return [_round_finite(value) for value in _column_values(table, name)]


def _trained_reward(reward: float | None, is_valid: bool | None) -> float | None:
    """Return the reward of a row, or None if the row is invalid or the reward is not finite.

    An invalid row can have a reward, for example if a teacher's server returned no log-probs for it.
    ``is_valid``: value of the column ``valid``, or None in files without this column.
    """
    if is_valid is False:
        return None
    return _round_finite(reward)


def _round_finite(value: float | None) -> float | None:
    """Round a number to six decimals; return None for NaN and infinity, which JSON cannot represent."""
    if value is None or not math.isfinite(value):
        return None
    return round(value, 6)


def _data_set_of(kind: str) -> str:
    """Return the data set of the samples in a file: `TRAINING_SET`, or the name of an evaluation set.

    ``kind``: "step" for a file of training samples, "eval_NAME" for the responses to an evaluation set.
    """
    if kind == "step":
        return TRAINING_SET
    return kind.removeprefix("eval_")


def _format_sample(
    row: dict[str, Any], set_name: str, step: int, marks: Sequence[str], max_characters: int
) -> dict[str, Any]:
    """Convert a row of a samples file to a sample for the report page, see `page.sample_browser`.

    ``marks``: labels of the row in its file (see `MARKS`), such as "best" for the row with the best reward.
    Texts are cut to ``max_characters``.
    """
    finish = row.get("finish_reason")
    if finish is not None:
        finish = FINISH_REASONS[finish]
    components = {
        name.removeprefix(_COMPONENT_PREFIX): _round_finite(value)
        for name, value in row.items()
        if name.startswith(_COMPONENT_PREFIX)
    }

    return {
        "set": set_name,
        "step": step,
        "prompt": _cut_text(row.get("prompt"), max_characters),
        "response": _cut_text(row.get("response"), max_characters),
        "truth": _cut_optional_text(row.get("ground_truth"), max_characters),
        "reward": _trained_reward(row.get("reward"), row.get("valid")),
        "components": components,
        "advantage": _round_finite(row.get("advantage")),
        "length": row.get("length"),
        "finish": finish,
        "turns": _format_turns(row.get("conversation"), max_characters),
        "failure": _cut_optional_text(row.get("failure"), max_characters),
        "group": row.get("group"),
        "marks": list(marks),
    }


def _format_turns(conversation: Any, max_characters: int) -> list[dict[str, Any]] | None:
    """Return the turns of a stored conversation, or None for a single response."""
    if conversation is None:
        return None

    # A column whose values have no common Parquet type is stored as JSON.
    turns = conversation
    if isinstance(conversation, str):
        turns = json.loads(conversation)

    formatted_turns: list[dict[str, Any]] = []
    for turn in turns:
        calls: list[str] = []
        for tool_call in turn.get("tool_calls") or ():
            function = tool_call["function"]
            calls.append(_cut_text(f"{function['name']} {function['arguments']}", max_characters))
        formatted_turns.append({
            "role": turn["role"],
            "content": _cut_text(turn["content"], max_characters),
            "tokens": turn["tokens"],
            "calls": calls,
        })  # fmt: skip
    return formatted_turns


def _cut_text(value: Any, max_characters: int) -> str:
    """Cut a value's text to ``max_characters``, and append the number of characters that were cut off."""
    text = str(value)
    cut_off_count = len(text) - max_characters
    if cut_off_count <= 0:
        return text
    return f"{text[:max_characters]} … ({cut_off_count} more characters)"


def _cut_optional_text(value: Any, max_characters: int) -> str | None:
    """Cut the text of an optional value with `_cut_text`; return None for None."""
    return None if value is None else _cut_text(value, max_characters)
