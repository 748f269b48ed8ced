"""Metrics of a run in a file and on the console, progress of long phases, and redirection of output."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from megatron_rl.config.run_folder import RunFolder, set_aside
from megatron_rl.durable import write_text
from megatron_rl.metrics import is_valid_metric, number_text, read_metric_lines
from megatron_rl.trainer.trackers import Trackers

MAX_STEP_RANGES = 8
"""Maximum number of ranges that `format_step_ranges` lists."""
PROGRESS_LINE_SECONDS = 10.0
"""Minimum seconds between two progress lines on a console that is not a terminal."""
_MAX_CLOCK_SECONDS = 1e15
"""From this number of seconds on, `format_clock` prints seconds instead of hours and minutes."""

WIDTH = 100
"""Maximum number of columns of a step's console line."""

COLUMNS = (
    ("reward", "reward/mean", ".3f"),
    ("loss", "sft/loss", ".4f"),
    ("length", "response/length", ".0f"),
    ("kl", "kl/ref", ".4f"),
    ("tokens/s", "throughput/tokens_per_second", ".0f"),
    ("entropy", "policy/entropy", ".2f"),
    ("mismatch", "mismatch/abs_diff", ".0e"),
)
"""Metrics of a step's console line, in order: label, metric and format. Metrics that the step does not have,
or that do not fit into the line, are omitted; metrics.jsonl has every metric."""

PHASES = (
    "generate",
    "reward",
    "score",
    "estimate",
    "learn",
    "evaluate",
    "idle_learn",
    "idle_rollout",
)
"""Phases of a step whose seconds the console line can show, in the order in which they run."""

_RULE_WIDTH = 16
"""Maximum number of characters of a health rule's name in a step's line: users can define long names."""

_SHOWN_PHASES = 2
"""Number of phases that a step's console line shows: the longest phases of the step."""


def accuracy_names(names: Iterable[str]) -> list[str]:
    """Return the metrics among ``names`` that are accuracies of evaluation sets."""
    return [name for name in names if name.startswith("eval/") and name.endswith("/accuracy")]


def _format_health(values: Mapping[str, float]) -> list[str]:
    """Return the column about firing health rules in a step's console line; an empty list if no rule fires.

    The column has the name of the first firing rule and the number of further ones. ``values``: metrics of
    the step.

    Example: ``["unhealthy entropy and 2 more"]``.
    """
    prefix = "health/"
    firing_rules = [name.removeprefix(prefix) for name in values if name.startswith(prefix) and values[name]]
    if not firing_rules:
        return []
    column = f"unhealthy {firing_rules[0][:_RULE_WIDTH]}"
    if len(firing_rules) > 1:
        column += f" and {len(firing_rules) - 1} more"
    return [column]


def _format_phases(values: Mapping[str, float]) -> str:
    """Return the seconds of a step's longest phases as text, in the order in which they run.

    ``values``: metrics of the step.
    """
    seconds_by_phase = {name: values[f"time/{name}"] for name in PHASES if f"time/{name}" in values}
    # The time of an evaluation is in the metrics of a step, but is not part of the step.
    if "time/step" in values:
        seconds_by_phase.pop("evaluate", None)
    if not seconds_by_phase:
        return ""

    longest_first = sorted(seconds_by_phase, key=lambda name: -seconds_by_phase[name])
    shown_phases = longest_first[:_SHOWN_PHASES]
    phase_texts = [
        f"{name} {_format_seconds(seconds)}"
        for name, seconds in seconds_by_phase.items()
        if name in shown_phases
    ]
    return f"({', '.join(phase_texts)})"


def _format_seconds(seconds: float) -> str:
    """Format seconds with three significant digits and without an exponent."""
    if abs(seconds) < 1000:
        return number_text(seconds, ".3g")
    return number_text(seconds, ".0f")


def _wrap_results(line: str, results: Sequence[str]) -> list[str]:
    """Append results to a line; start a new line when a result does not fit into `WIDTH` columns."""
    lines = [line]
    for result in results:
        if len(lines[-1]) + len(result) + 2 <= WIDTH:
            lines[-1] += f"  {result}"
        else:
            lines.append(result)
    return lines


class MetricsLog:
    """Metrics file with one line per step; the metrics are also printed and sent to the trackers.

    Only one rank may construct it.

    Arguments:
        folder: run folder.
        total_steps: number of steps of the run or stage.
        resumed_step: last step of the restored checkpoint. Lines of later steps are removed, so that every
            step has one line; see `_remove_lines_after`. None starts a new file and renames an existing file.
        phase: "train", or the name of a stage.
        console: stream for the lines, or None for the standard output.
        trackers: experiment trackers, or None.
    """

    def __init__(
        self,
        folder: RunFolder,
        total_steps: int,
        *,
        resumed_step: int | None = None,
        phase: str = "train",
        console: TextIO | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        self.total_steps = total_steps
        self.phase = phase
        self.console = console if console is not None else sys.stdout
        self.path = folder.metrics if phase == "train" else folder.stage_metrics(phase)

        # A resumed run retains the lines up to its step.
        if resumed_step is None:
            set_aside(self.path)
        else:
            self._remove_lines_after(resumed_step)

        self._file = self.path.open("a")
        self._trackers = trackers
        if trackers is not None:
            trackers.begin_phase(phase, resumed_step)

        # Needed to estimate the remaining time.
        self._start_time = time.monotonic()
        self._first_step = resumed_step or 0

    def write(
        self,
        step: int,
        values: Mapping[str, float],
        to_console: bool = True,
    ) -> None:
        """Write the metrics of ``step``; values that are not finite are stored as null."""
        stored_values = {
            name: float(value) if is_valid_metric(value) else None for name, value in values.items()
        }
        self._file.write(json.dumps({"step": step, **stored_values}, allow_nan=False) + "\n")
        self._file.flush()

        # Flush to the disk: a checkpoint that survives a crash of the machine needs the lines up to its step.
        os.fsync(self._file.fileno())

        if self._trackers is not None:
            finite_values = {name: value for name, value in stored_values.items() if value is not None}
            self._trackers.write(self.phase, step, finite_values)
        if to_console:
            self.console.write(self.format_line(step, values) + "\n")
            self.console.flush()

    def format_line(self, step: int, values: Mapping[str, float]) -> str:
        """Return the console text of a step: a line of at most `WIDTH` columns, with evaluation results.

        ``values``: metrics of the step.
        """
        step_width = len(str(self.total_steps))
        columns = [f"{self.phase} {step:>{step_width}}/{self.total_steps}"]
        last_columns: list[str] = []
        # Show failed rewards only if there are any.
        if values.get("reward/invalid"):
            last_columns.append(f"invalid {number_text(values['reward/invalid'], '.3f')}")
        last_columns += _format_health(values)
        if "time/step" in values:
            last_columns.append(f"{_format_seconds(values['time/step'])} s")

        # Estimate the remaining time from the mean time of this process's steps.
        steps_taken = step - self._first_step
        if steps_taken > 0 and step < self.total_steps:
            seconds_per_step = (time.monotonic() - self._start_time) / steps_taken
            last_columns.append(f"eta {format_clock(seconds_per_step * (self.total_steps - step))}")

        # Add further texts in order of importance while they fit: phases before most metrics.
        phases = _format_phases(values)
        metrics = [
            f"{label} {number_text(values[name], number_format)}"
            for label, name, number_format in COLUMNS
            if name in values
        ]
        # The first metric, such as the reward, takes precedence over the phases.
        if len("  ".join([*columns, *metrics[:1], *last_columns, phases])) > WIDTH:
            phases = ""
        reserved_width = len("  ".join(filter(None, [*last_columns, phases])))
        for metric in metrics:
            if len("  ".join([*columns, metric])) + 2 + reserved_width <= WIDTH:
                columns.append(metric)
        if phases and len("  ".join([*columns, *last_columns, phases])) <= WIDTH:
            # The remaining time comes last.
            phases_position = len(last_columns)
            if last_columns and last_columns[-1].startswith("eta"):
                phases_position -= 1
            last_columns.insert(phases_position, phases)
        line = "  ".join([*columns, *last_columns])
        results = [f"{name} {values[name]:.3f}" for name in accuracy_names(values)]
        return "\n    ".join(_wrap_results(line, results))

    def _remove_lines_after(self, step: int) -> None:
        """Remove the lines of steps after ``step`` from the metrics file of a run that resumes there.

        Prints a warning if earlier lines are missing, or if the file has lines of steps after the run's last
        step. Such steps do not run again, so the file is copied before their lines are removed. It is also
        copied if lines are missing because the file is damaged.
        """
        lines, damaged = read_metric_lines(self.path)
        # A step that ran twice has two lines: retain the later one.
        line_by_step = {line["step"]: json.dumps(line) + "\n" for line in lines}
        retained_lines = [text for line_step, text in sorted(line_by_step.items()) if line_step <= step]
        missing_steps = [line_step for line_step in range(1, step + 1) if line_step not in line_by_step]
        steps_beyond_end = [line_step for line_step in line_by_step if line_step > self.total_steps]

        if missing_steps or steps_beyond_end:
            if missing_steps:
                reason = f"has no line of steps {format_step_ranges(missing_steps)}"
            else:
                reason = f"has lines up to step {max(steps_beyond_end)}"
            warning = f"warning: {self.path.name} {reason}, and this run resumes after step {step}"
            if steps_beyond_end or damaged:
                copy_path = set_aside(self.path)
                if copy_path is not None:
                    warning += f"; a copy of the file is {copy_path.name}"
            self.console.write(warning + "\n")
            self.console.flush()
        write_text(self.path, "".join(retained_lines))

    def close(self) -> None:
        """Close the metrics file; the console and the trackers stay open."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Progress:
    """Context manager that shows the progress of a long phase: a bar on a terminal, otherwise lines of text.

    ``title``: name of the phase.
    ``total``: number of units of the phase, such as steps, or None if unknown.
    ``enabled``: False to print nothing, as on all ranks except the main one.
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        *,
        enabled: bool = True,
        console: TextIO | None = None,
    ) -> None:
        self.title = title
        self.total = total
        self.enabled = enabled
        self.console = console if console is not None else sys.stdout
        self._count = 0
        self._bar: Any = None
        self._start_time = 0.0
        self._last_line_time = 0.0

    def __enter__(self) -> Progress:
        self._start_time = time.monotonic()
        self._last_line_time = self._start_time
        if self.enabled and self.console.isatty():
            self._bar = self._start_bar()
        elif self.enabled:
            self._print(f"{self.title} …")
        return self

    def _start_bar(self) -> Any:
        """Start a progress bar and return it; it is a spinner if the total number of units is unknown."""
        # Import rich only if the console is a terminal.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )
        from rich.progress import Progress as Bar

        columns = [SpinnerColumn(), TextColumn("{task.description}")]
        if self.total is not None:
            columns += [BarColumn(), MofNCompleteColumn()]
        columns += [TimeElapsedColumn(), TextColumn("{task.fields[note]}")]

        bar = Bar(*columns, console=Console(file=self.console), transient=True)
        bar.start()
        bar.add_task(self.title, total=self.total, note="")
        return bar

    def advance(self, count: int = 1, note: str = "") -> None:
        """Add ``count`` completed units; ``note`` is a short text to show, such as the loss."""
        self._count += count
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=count, note=note)
            return

        # Lines of text accumulate in a log file, so print a line only every few seconds.
        now = time.monotonic()
        if self.enabled and now - self._last_line_time >= PROGRESS_LINE_SECONDS:
            self._last_line_time = now
            line = f"{self.title} {self._count}"
            if self.total is not None:
                line += f"/{self.total}"
            if note:
                line += f"  {note}"
            self._print(line)

    def show_part(self, name: str) -> None:
        """Show which part of the phase starts now, for example the name of the model that is built."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], note=name)
        elif self.enabled:
            self._print(f"{self.title}: {name} …")

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        *_: TracebackType | BaseException | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self.enabled:
            outcome = "done" if error_type is None else "stopped"
            self._print(f"{self.title}: {outcome} after {format_clock(time.monotonic() - self._start_time)}")

    def _print(self, text: str) -> None:
        """Print a line on the console."""
        self.console.write(text + "\n")
        self.console.flush()


@contextlib.contextmanager
def redirect_output(path: Path, is_main: bool) -> Iterator[TextIO]:
    """Redirect the output of this process to ``path`` inside the block; yield the console.

    File descriptors are redirected, which includes the output of C libraries. The console is the original
    standard output if ``is_main``, and the log file otherwise. When the block ends, even by an exception, the
    output is restored, so that errors are shown to the user.
    """
    # Write buffered text to the original target first.
    sys.stdout.flush()
    sys.stderr.flush()
    saved_descriptors = (os.dup(1), os.dup(2))
    with path.open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

    # Line-buffered, so that each line is visible immediately.
    console = os.fdopen(os.dup(saved_descriptors[0] if is_main else 1), "w", buffering=1)

    try:
        yield console
    finally:
        # Flush into the log before the original descriptors are restored.
        console.close()
        sys.stdout.flush()
        sys.stderr.flush()
        for standard_descriptor, descriptor in zip((1, 2), saved_descriptors, strict=True):
            os.dup2(descriptor, standard_descriptor)
            os.close(descriptor)


def format_clock(seconds: float) -> str:
    """Format seconds as a clock shows them: ``0:07``, ``12:34`` or ``1:02:03``."""
    # `not <` instead of `>=`, so that this branch handles NaN, too.
    if not abs(seconds) < _MAX_CLOCK_SECONDS:
        return f"{seconds:.3g} s"

    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"


def format_step_ranges(steps: Sequence[int]) -> str:
    """Format ascending steps as ranges such as ``1-3, 7``, at most `MAX_STEP_RANGES` of them."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and ranges[-1][1] == step - 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])

    range_texts = [f"{first}-{last}" if last > first else str(first) for first, last in ranges]
    shown_ranges = ", ".join(range_texts[:MAX_STEP_RANGES])
    if len(range_texts) > MAX_STEP_RANGES:
        return f"{shown_ranges} and more"
    return shown_ranges
