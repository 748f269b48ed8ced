"""Metrics of a run as lines of a file and of the console, progress of long phases, and output redirection."""

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
from megatron_rl.metrics import is_measurable, number_text, read_lines
from megatron_rl.trainer.trackers import Trackers

MAX_SPANS = 8
"""Ranges of missing steps that a warning lists."""
PLAIN_SECONDS = 10.0
"""Minimum time between two progress lines on a console that is not a terminal."""
_LONGEST_CLOCK = 1e15
"""Duration from which `clock` prints the number of seconds instead of hours and minutes."""

WIDTH = 100
"""Columns of the console that a step's line has at most."""

COLUMNS = (
    ("reward", "reward/mean", ".3f"),
    ("loss", "sft/loss", ".4f"),
    ("length", "response/length", ".0f"),
    ("kl", "kl/ref", ".4f"),
    ("tokens/s", "throughput/tokens_per_second", ".0f"),
    ("entropy", "policy/entropy", ".2f"),
    ("mismatch", "mismatch/abs_diff", ".0e"),
)
"""Metrics of a step's console line, in order: label, metric and format. Metrics that a step does not have are
omitted, and so are the last ones where the line has no room for them; metrics.jsonl has every metric."""

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
"""Phases of a step whose seconds the console line may show."""

_RULE_WIDTH = 16
"""Columns of a health rule's name, which may be the user's, in a step's line."""

_SHOWN_PHASES = 2
"""Phases of a step that the console line shows: the longest ones."""


def accuracies(names: Iterable[str]) -> list[str]:
    """Return the metric names among ``names`` that are accuracies of evaluation sets."""
    return [name for name in names if name.startswith("eval/") and name.endswith("/accuracy")]


def _health_texts(values: Mapping[str, float]) -> list[str]:
    """Return the first health rule that fires in a step, and the number of the others; empty if none does."""
    prefix = "health/"
    firing = [name.removeprefix(prefix) for name in values if name.startswith(prefix) and values[name]]
    if not firing:
        return []
    text = f"unhealthy {firing[0][:_RULE_WIDTH]}"
    if len(firing) > 1:
        text += f" and {len(firing) - 1} more"
    return [text]


def _phases_text(values: Mapping[str, float]) -> str:
    """Return the seconds of the longest phases of a step, in the order in which they run."""
    seconds = {name: values[f"time/{name}"] for name in PHASES if f"time/{name}" in values}
    # An evaluation is in the line of a step, but its time is not part of the step.
    if "time/step" in values:
        seconds.pop("evaluate", None)
    longest = sorted(seconds, key=lambda name: -seconds[name])[:_SHOWN_PHASES]
    text = ", ".join(f"{name} {_seconds_text(seconds[name])}" for name in seconds if name in longest)
    if not text:
        return ""
    return f"({text})"


def _seconds_text(seconds: float) -> str:
    """Return seconds with three digits, and without an exponent."""
    if abs(seconds) < 1000:
        return number_text(seconds, ".3g")
    return number_text(seconds, ".0f")


def _wrapped(line: str, results: Sequence[str]) -> list[str]:
    """Return a line followed by results, on further lines where they do not fit in `WIDTH`."""
    lines = [line]
    for result in results:
        if len(lines[-1]) + len(result) + 2 <= WIDTH:
            lines[-1] += f"  {result}"
        else:
            lines.append(result)
    return lines


class MetricsLog:
    """Metrics file with one line per step, which are also printed and sent to the trackers.

    ``resumed_step`` is the last step of the restored checkpoint: the lines of later steps are removed, so
    that every step appears once. If lines are missing or damaged, or of steps beyond ``total_steps``, which
    will not run again, a copy of the file is made and a warning printed. None starts from the beginning, and
    an existing file is renamed. Only one rank may construct it.
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
            self._cut_after(resumed_step)

        self._file = self.path.open("a")
        self._trackers = trackers
        if trackers is not None:
            trackers.begin(phase, resumed_step)

        # For the estimate of the remaining time.
        self._start = time.monotonic()
        self._first_step = resumed_step or 0

    def write(
        self,
        step: int,
        values: Mapping[str, float],
        to_console: bool = True,
    ) -> None:
        """Write the metrics of ``step``; a value that is not `is_measurable` is stored as null."""
        stored = {name: float(value) if is_measurable(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **stored}, allow_nan=False) + "\n")
        self._file.flush()

        # A checkpoint that survives a crash of the machine needs the lines before it.
        os.fsync(self._file.fileno())

        if self._trackers is not None:
            measurable = {name: value for name, value in stored.items() if value is not None}
            self._trackers.write(self.phase, step, measurable)
        if to_console:
            self.console.write(self.line(step, values) + "\n")
            self.console.flush()

    def line(self, step: int, values: Mapping[str, float]) -> str:
        """Return the console line of a step, of at most `WIDTH` columns, and lines of evaluation sets."""
        width = len(str(self.total_steps))
        columns = [f"{self.phase} {step:>{width}}/{self.total_steps}"]
        end: list[str] = []
        # Failed rewards are rare, and matter when there are any.
        if values.get("reward/invalid"):
            end.append(f"invalid {number_text(values['reward/invalid'], '.3f')}")
        end += _health_texts(values)
        if "time/step" in values:
            end.append(f"{_seconds_text(values['time/step'])} s")

        # From the mean time of the steps of this process.
        steps_taken = step - self._first_step
        if steps_taken > 0 and step < self.total_steps:
            seconds_per_step = (time.monotonic() - self._start) / steps_taken
            end.append(f"eta {clock(seconds_per_step * (self.total_steps - step))}")

        # Further texts in order of importance, while there is room: phases before throughput.
        phases = _phases_text(values)
        metrics = [
            f"{label} {number_text(values[name], form)}" for label, name, form in COLUMNS if name in values
        ]
        # The first metric, such as the reward, takes precedence over the phases.
        if len("  ".join([*columns, *metrics[:1], *end, phases])) > WIDTH:
            phases = ""
        reserved = len("  ".join(filter(None, [*end, phases])))
        for metric in metrics:
            if len("  ".join([*columns, metric])) + 2 + reserved <= WIDTH:
                columns.append(metric)
        if phases and len("  ".join([*columns, *end, phases])) <= WIDTH:
            # The remaining time comes last.
            is_eta_last = bool(end) and end[-1].startswith("eta")
            end.insert(len(end) - is_eta_last, phases)
        line = "  ".join([*columns, *end])
        results = [f"{name} {values[name]:.3f}" for name in accuracies(values)]
        return "\n    ".join(_wrapped(line, results))

    def _cut_after(self, step: int) -> None:
        """Remove the lines of later steps; copy the file first if a removed line will not be replaced."""
        lines, damaged = read_lines(self.path)
        # A step that was taken twice has two lines, of which the later one counts.
        line_of = {line["step"]: json.dumps(line) + "\n" for line in lines}
        retained = [text for number, text in sorted(line_of.items()) if number <= step]
        lost = [number for number in range(1, step + 1) if number not in line_of]
        beyond_end = [number for number in line_of if number > self.total_steps]

        if lost or beyond_end:
            if lost:
                reason = f"has no line of steps {spans(lost)}"
            else:
                reason = f"has lines up to step {max(beyond_end)}"
            warning = f"warning: {self.path.name} {reason}, and this run resumes after step {step}"
            if beyond_end or damaged:
                copy = set_aside(self.path)
                if copy is not None:
                    warning += f"; a copy of the file is {copy.name}"
            self.console.write(warning + "\n")
            self.console.flush()
        write_text(self.path, "".join(retained))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Progress:
    """Progress of a long phase: a bar on a terminal, else occasional lines; a context manager.

    ``title``: name of the phase.
    ``total``: units of the whole phase, None if unknown.
    ``enabled``: False prints nothing, as on all ranks but one.
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
        self._start = 0.0
        self._last_line = 0.0

    def __enter__(self) -> Progress:
        self._start = time.monotonic()
        self._last_line = self._start
        if self.enabled and self.console.isatty():
            self._bar = self._start_bar()
        elif self.enabled:
            self._print(f"{self.title} …")
        return self

    def _start_bar(self) -> Any:
        """Return a running progress bar, or a spinner if the total is unknown."""
        # Imported here, since only a terminal needs it.
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
        """Add ``count`` units; ``note`` is a short text about the phase's state, such as its loss."""
        self._count += count
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=count, note=note)
            return

        # Plain lines stay in a log file: one every few seconds is enough.
        now = time.monotonic()
        if self.enabled and now - self._last_line >= PLAIN_SECONDS:
            self._last_line = now
            line = f"{self.title} {self._count}"
            if self.total is not None:
                line += f"/{self.total}"
            if note:
                line += f"  {note}"
            self._print(line)

    def begin(self, name: str) -> None:
        """Show the ``name`` of the current part of the phase, such as a model to be built."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], note=name)
        elif self.enabled:
            self._print(f"{self.title}: {name} …")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        *_: TracebackType | BaseException | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self.enabled:
            outcome = "done" if kind is None else "stopped"
            self._print(f"{self.title}: {outcome} after {clock(time.monotonic() - self._start)}")

    def _print(self, text: str) -> None:
        self.console.write(text + "\n")
        self.console.flush()


@contextlib.contextmanager
def output_to(path: Path, main: bool) -> Iterator[TextIO]:
    """Redirect the output of this process to ``path`` inside the block; yield the console.

    Duplicating the descriptors also redirects what C libraries print. The console is the original standard
    output on the ``main`` rank and the log file on others. When the block ends, also by an exception, the
    output is restored, so that the error reaches the user.
    """
    # Text that Python has buffered belongs to the old target.
    sys.stdout.flush()
    sys.stderr.flush()
    saved = (os.dup(1), os.dup(2))
    with path.open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

    # Line-buffered, so that each line is visible at once.
    console = os.fdopen(os.dup(saved[0] if main else 1), "w", buffering=1)

    try:
        yield console
    finally:
        # Flush into the log before the descriptors point to the original targets again.
        console.close()
        sys.stdout.flush()
        sys.stderr.flush()
        for target, descriptor in zip((1, 2), saved, strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)


def clock(seconds: float) -> str:
    """Return seconds as ``0:07``, ``12:34`` or ``1:02:03``."""
    # Negated, so that NaN is printed as a number, too.
    if not abs(seconds) < _LONGEST_CLOCK:
        return f"{seconds:.3g} s"

    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"


def spans(steps: Sequence[int]) -> str:
    """Return ascending numbers as ranges such as ``1-3, 7``, at most `MAX_SPANS` of them."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and spans[-1][1] == step - 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])

    texts = [f"{first}-{last}" if last > first else str(first) for first, last in spans]
    text = ", ".join(texts[:MAX_SPANS])
    return f"{text} and more" if len(texts) > MAX_SPANS else text
