"""Comparison of several runs: results, settings that differ, and charts with the curves of all runs.

A comparison shows the settings that users have set. Derived values and defaults follow from these settings,
or from the version of this package, so they are only shown on request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.source import read_tree
from megatron_rl.contained.process import escape_unprintable
from megatron_rl.metrics import number_text
from megatron_rl.trainer import page
from megatron_rl.trainer.curves import (
    STAGE_METRICS,
    WINDOW,
    RunMetrics,
    make_overlay_charts,
    measured_accuracy_names,
    metric_series,
    running_mean,
)
from megatron_rl.trainer.report import format_pairs, format_revisions, run_metrics
from megatron_rl.trainer.starts import Start, read_starts

RUN_SPECIFIC_KEYS = ("seed", "run_dir", "prepare", "checkpoint.resume")
"""Settings that may differ between the runs of one group."""
FOLDER_SPECIFIC_KEYS = ("run_dir", "prepare")
"""Settings that differ between any two runs because they have different folders; never compared."""
ALWAYS_EXPLICIT = ("world_size",)
"""Settings that count as set by the user, because the launcher's command line determines them."""
LAST_MEANS = (
    ("kl/ref", "KL to the reference", ".4f"),
    ("policy/entropy", "entropy", ".3f"),
    ("response/length", "response length", ".1f"),
    ("mismatch/abs_diff", "mismatch", ".1e"),
    ("reward/invalid", "invalid rewards", ".3f"),
)
"""Metrics whose mean over the last steps is a result in the table: metric, label, format."""
_MIN_SECONDS = 1e-9
"""Lower bound of the seconds in a throughput, to avoid a division by zero."""

RESULTS_NOTE = (
    f"Accuracies are the last and the best measurement, other final values means of the last {WINDOW} steps. "
    f"The best reward is the highest mean over a step and the {WINDOW // 2} before and after it. "
    "± is the standard deviation over the runs of a column."
)

_PROVENANCE_TEXTS: Mapping[str, Callable[[Start], str]] = {
    "revision": format_revisions,
    "versions": lambda start: format_pairs(start.versions),
    "hardware": lambda start: format_pairs(start.hardware),
}
"""Properties of a run's last launch that are compared like settings: name -> function that formats it."""

Result = tuple[float, str]
"""Value of a result, and its format specification."""


@dataclass(frozen=True)
class ComparedRun:
    """Settings, metrics and last start of one of the compared runs, read from its run folder."""

    name: str
    """Name of the run folder, or its path if two folders have the same name."""
    settings: Mapping[str, Any]
    """Configuration key -> value."""
    metrics: RunMetrics
    """Metrics of the run's steps and stages."""
    start: Start | None = None
    """Last start of the run, or None if no start is recorded."""

    @property
    def explicit_keys(self) -> frozenset[str]:
        """Return the configuration keys that the user has set, or all keys if they were not recorded."""
        if self.start is None or not self.start.explicit:
            return frozenset(self.settings)
        return frozenset((*self.start.explicit, *ALWAYS_EXPLICIT))


@dataclass(frozen=True)
class Comparison:
    """Groups of runs that differ only in their seeds, and the tables that compare the groups.

    Example: two seeds of one configuration and one run of another have the ``groups``
    ``{"a and 1 more": [a, b], "c": [c]}``, and a row of ``settings`` is
    ``["algorithm.name", '"grpo"', '"dapo"']``.
    """

    groups: Mapping[str, Sequence[ComparedRun]]
    """Name of a group -> its runs."""
    settings: Sequence[Sequence[str]]
    """Rows of the explicit settings that differ, and of revision, versions and hardware: key, and a value for
    each group."""
    results: Sequence[Sequence[str]]
    """Table of the results; each row has a label, then a value per group."""
    notes: Sequence[str] = ()
    """Notes on folders that are copies of other runs."""
    derived: Sequence[Sequence[str]] = ()
    """Rows of the other settings that differ: derived values, and defaults."""


def compare(folders: Sequence[Path]) -> Comparison:
    """Compare the runs in ``folders``; raise UserError for a folder without metrics."""
    # Name each run after its folder, or by its path if two folders have the same name.
    run_names = [folder.resolve().name for folder in folders]
    if len(set(run_names)) < len(run_names):
        run_names = [str(folder) for folder in folders]
    runs = [_read_run(folder, name) for folder, name in zip(folders, run_names, strict=True)]
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))

    groups, notes = _group_runs(runs, keys)
    explicit_keys: set[str] = set()
    explicit_mappings: set[str] = set()
    for run in runs:
        explicit_keys |= run.explicit_keys
        # The settings have values of the innermost keys only, such as `reward.arguments.scale`. A user's key
        # that is not in the settings, such as `reward.arguments`, is therefore a mapping.
        explicit_mappings |= {key for key in run.explicit_keys if key not in run.settings}

    rows = _settings_rows(groups, keys)
    settings = [row for row in rows if _is_explicit(row[0], explicit_keys, explicit_mappings)]
    derived = [row for row in rows if row not in settings]
    return Comparison(groups, settings + _provenance_rows(groups), _result_rows(groups), notes, derived)


def _is_explicit(key: str, explicit_keys: Collection[str], explicit_mappings: Collection[str]) -> bool:
    """Return whether a user has set a configuration key, or a mapping that contains it.

    ``explicit_keys``: keys that users have set, such as ``reward.function``. ``explicit_mappings``: mappings
    that users have set, such as ``reward.arguments``.
    """
    if key in explicit_keys:
        return True
    key_parts = key.split(".")
    parent_keys = [".".join(key_parts[:length]) for length in range(1, len(key_parts))]
    return any(parent_key in explicit_mappings for parent_key in parent_keys)


def _provenance_rows(groups: Mapping[str, Sequence[ComparedRun]]) -> list[list[str]]:
    """Return the table rows of code revision, library versions and hardware, if the groups differ in them.

    A row has a name, such as "revision", then a value for each group. The values are from
    `ComparedRun.start`, the record of a run's last launch.
    """
    rows: list[list[str]] = []
    for name, format_provenance in _PROVENANCE_TEXTS.items():
        cells: list[str] = []
        for group in groups.values():
            provenance_texts = [format_provenance(run.start) for run in group if run.start is not None]
            cells.append("; ".join(dict.fromkeys(provenance_texts)) or "-")
        if len(set(cells)) > 1:
            rows.append([name, *cells])
    return rows


def _group_runs(
    runs: Sequence[ComparedRun], keys: Sequence[str]
) -> tuple[dict[str, list[ComparedRun]], list[str]]:
    """Group runs with equal settings; return the groups by name, and messages about omitted copies.

    ``keys``: all configuration keys of the runs. If several runs are copies of one run, `_remove_copies`
    selects the copy to compare.
    """
    # Compare settings as JSON text, since values such as lists cannot be keys of a dictionary.
    common_keys = [key for key in keys if key not in RUN_SPECIFIC_KEYS]
    runs_by_settings: dict[str, list[ComparedRun]] = {}
    for run in runs:
        settings = json.dumps([run.settings.get(key) for key in common_keys], default=str)
        runs_by_settings.setdefault(settings, []).append(run)

    # Omit copies: a copy of a run would be counted as a second seed.
    notes: list[str] = []
    for group in runs_by_settings.values():
        notes += _remove_copies(group)

    # Groups are named after their first run. If two names are equal, all names get a number.
    groups = {_group_name(group): group for group in runs_by_settings.values()}
    if len(groups) < len(runs_by_settings):
        numbered_groups = enumerate(runs_by_settings.values(), 1)
        groups = {f"[{number}] {_group_name(group)}": group for number, group in numbered_groups}
    return groups, notes


def _settings_rows(groups: Mapping[str, Sequence[ComparedRun]], keys: Sequence[str]) -> list[list[str]]:
    """Return a table row for each setting that differs between groups: its key, then a value per group."""
    rows: list[list[str]] = []
    for key in keys:
        if key in FOLDER_SPECIFIC_KEYS:
            continue
        # A cell has all distinct values of a group, since its runs may have different seeds.
        cells: list[str] = []
        for group in groups.values():
            distinct_values = dict.fromkeys(_format_setting(run, key) for run in group)
            cells.append(", ".join(distinct_values))
        if len(set(cells)) > 1:
            rows.append([key, *cells])
    return rows


def _result_rows(
    groups: Mapping[str, Sequence[ComparedRun]],
) -> list[list[str]]:
    """Return a table row for each result: label, then the mean over the runs of each group."""
    # A row for every result that any run has, with "-" for groups without it.
    rows = [["runs", *(str(len(group)) for group in groups.values())]]
    results_by_group = [[_run_results(run.metrics) for run in group] for group in groups.values()]
    labels: dict[str, None] = {}
    for group_results in results_by_group:
        for run_results in group_results:
            labels |= dict.fromkeys(run_results)

    for label in labels:
        cells: list[str] = []
        for group_results in results_by_group:
            results = [run_results[label] for run_results in group_results if label in run_results]
            cells.append(_format_mean_and_deviation(results))
        rows.append([label, *cells])
    return rows


def _remove_copies(group: list[ComparedRun]) -> list[str]:
    """Remove copies of the same run from a group; return a message for each removed copy.

    Of several copies, the longest remains. Two folders whose first steps took exactly the same time are
    copies of one run.
    """
    # Runs with the same first step are copies of each other. A run without a step is not a copy.
    runs_by_first_step: dict[str, list[ComparedRun]] = {}
    for run in group:
        first_step = _first_timed_step(run.metrics)
        first_step_key = run.name
        if first_step is not None:
            first_step_key = json.dumps([run.settings.get("seed"), first_step], sort_keys=True)
        runs_by_first_step.setdefault(first_step_key, []).append(run)

    notes: list[str] = []
    for copies in runs_by_first_step.values():
        # Retain the folder with the most steps, which is the original or a copy that was resumed.
        original = max(copies, key=lambda run: len(run.metrics.lines))
        for run in copies:
            if run is not original:
                group.remove(run)
                notes.append(
                    f"{run.name} begins with the same steps as {original.name}: it is a copy, and omitted."
                )
    return notes


def _first_timed_step(run: RunMetrics) -> Mapping[str, Any] | None:
    """Return the metrics of the first step of a run, or None if the run has no step.

    If the run has only stages before RL, such as SFT, the first step of the stages is returned. The caller
    identifies a run by the returned metrics, since two runs never measure exactly the same ``time/step``. An
    evaluation before the first step has no ``time/step``, and is skipped.
    """
    lines = list(run.lines)
    if not lines:
        for stage_lines in run.stages.values():
            lines += stage_lines
    for line in lines:
        if "time/step" in line:
            return line
    return None


def write_comparison(folders: Sequence[Path], out: Path) -> str:
    """Write ``compare.html`` and ``compare.md`` into the folder ``out``; return the Markdown text."""
    comparison = compare(folders)
    group_names = list(comparison.groups)
    notes = [*comparison.notes, RESULTS_NOTE]

    # Write a page for browsers, and Markdown with the same tables.
    result_columns = range(1, len(group_names) + 1)
    sections = [
        page.heading("Results"),
        page.table(("", *group_names), comparison.results, numeric_columns=result_columns),
        *map(page.paragraph, notes),
        page.heading("Settings that differ"),
    ]
    if comparison.settings:
        sections.append(page.table(("", *group_names), comparison.settings))
    else:
        sections.append(page.paragraph("none"))
    if comparison.derived:
        title = f"{len(comparison.derived)} derived values and defaults that differ"
        derived_table = page.table(("", *group_names), comparison.derived)
        sections.append(page.collapsible_section(title, derived_table))

    # One chart per metric, with a curve for each group.
    runs_by_group = {name: [run.metrics for run in group] for name, group in comparison.groups.items()}
    sections += [
        page.heading("Curves"),
        page.chart_grid(make_overlay_charts(runs_by_group)),
    ]

    markdown = f"## Results\n\n{_markdown_table(group_names, comparison.results)}\n\n"
    markdown += f"## Settings that differ\n\n{_markdown_table(group_names, comparison.settings)}\n\n"
    if comparison.derived:
        num_derived = len(comparison.derived)
        markdown += f"{num_derived} derived values and defaults differ, too: compare.html has them.\n\n"
    markdown += "\n\n".join(map(_escape_cell, notes)) + "\n"

    out.mkdir(parents=True, exist_ok=True)
    page.write_page(out / "compare.html", "Comparison of runs", sections)
    (out / "compare.md").write_text(f"# Comparison of runs\n\n{markdown}", "utf-8", "replace")
    return markdown


def _read_run(path: Path, name: str) -> ComparedRun:
    """Read the settings, metrics and last start of a run from its folder ``path``.

    ``name``: name of the run in the comparison.
    """
    folder = RunFolder(path)
    config_text = ""
    if folder.config.is_file():
        config_text = folder.config.read_text(encoding="utf-8", errors="replace")
    setting_leaves = read_tree(config_text, str(folder.config), []).leaves()
    settings = {key: leaf.value for key, leaf in setting_leaves}
    starts = read_starts(folder)
    start = None
    if starts:
        start = starts[-1]
    return ComparedRun(name, settings, run_metrics(folder), start)


def _group_name(group: Sequence[ComparedRun]) -> str:
    """Name a group of runs after its first run, with the number of further runs: ``a and 2 more``."""
    if len(group) == 1:
        return group[0].name
    return f"{group[0].name} and {len(group) - 1} more"


def _format_setting(run: ComparedRun, key: str) -> str:
    """Format the value of a setting as JSON; "-" if the run does not have it."""
    if key not in run.settings:
        return "-"
    return json.dumps(run.settings[key], ensure_ascii=False, default=str)


def _run_results(run: RunMetrics) -> dict[str, Result]:
    """Compute the results of a run: label -> (number, format), in the order of the table."""
    results: dict[str, Result] = {}
    for stage_name, stage_lines in run.stages.items():
        for metric, label in STAGE_METRICS:
            _, values = metric_series(stage_lines, f"{stage_name}/{metric}")
            if values:
                results[f"{stage_name}: final {label}"] = (values[-1], ".3f")

    # Accuracies are single measurements. Metrics of steps are noisy, so their results are means over steps.
    for metric in measured_accuracy_names(run.lines):
        _, values = metric_series(run.lines, metric)
        set_name = metric.removeprefix("eval/").removesuffix("/accuracy")
        results[f"{set_name}: final accuracy"] = (values[-1], ".3f")
        results[f"{set_name}: best accuracy"] = (max(values), ".3f")

    _, rewards = metric_series(run.lines, "reward/mean")
    if rewards:
        results["final reward"] = (fmean(rewards[-WINDOW:]), ".3f")
        results["best reward"] = (max(running_mean(rewards)), ".3f")
    for metric, label, number_format in LAST_MEANS:
        _, values = metric_series(run.lines, metric)
        if values:
            results[label] = (fmean(values[-WINDOW:]), number_format)
    return results | _time_results(run)


def _time_results(run: RunMetrics) -> dict[str, Result]:
    """Compute the numbers of steps, tokens and seconds of a run: label -> (number, format)."""
    results: dict[str, Result] = {}
    if run.lines:
        results["steps"] = (
            float(max(int(line["step"]) for line in run.lines)),
            ".0f",
        )

    # Throughput times the seconds of a step gives the tokens of the step.
    steps, seconds = metric_series(run.lines, "time/step")
    throughput_steps, throughputs = metric_series(run.lines, "throughput/tokens_per_second")
    throughput_by_step = dict(zip(throughput_steps, throughputs, strict=True))
    if throughput_by_step:
        num_tokens = 0.0
        for step, step_seconds in zip(steps, seconds, strict=True):
            num_tokens += throughput_by_step.get(step, 0.0) * step_seconds
        results["tokens"] = (num_tokens, ",.0f")
        results["tokens per second"] = (
            num_tokens / max(sum(seconds), _MIN_SECONDS),
            ",.0f",
        )
    if seconds:
        results["seconds of all steps"] = (sum(seconds), ",.1f")
        results["seconds per step"] = (fmean(seconds), ".2f")
    return results


def _format_mean_and_deviation(results: Sequence[Result]) -> str:
    """Format the mean of a result over runs, with the standard deviation if there are several runs."""
    if not results:
        return "-"
    numbers = [number for number, _ in results]
    number_format = results[0][1]
    text = number_text(fmean(numbers), number_format)
    if len(numbers) > 1:
        text += f" ± {number_text(stdev(numbers), number_format)}"
    return text


def _markdown_table(group_names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown, with a column of labels and a column per group."""
    if not rows:
        return "none"
    # Align the labels to the left, and the values of the groups to the right.
    alignment = ["---", *["---:"] * len(group_names)]
    lines = [_markdown_row(["", *group_names]), f"| {' | '.join(alignment)} |"]
    return "\n".join([*lines, *(_markdown_row(row) for row in rows)])


def _markdown_row(cells: Sequence[str]) -> str:
    """Return the cells as one row of a Markdown table."""
    return f"| {' | '.join(_escape_cell(cell) for cell in cells)} |"


def _escape_cell(text: str) -> str:
    """Escape text for a cell of a Markdown table, so that it is shown verbatim on one line."""
    one_line = escape_unprintable(" ".join(text.split()))
    escaped = re.sub(r"([\\`*\[\]|~])", r"\\\1", one_line)
    return escape(escaped, quote=False)
