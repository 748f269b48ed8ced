"""What a run writes down: its metrics, its samples and what a person sees on the console."""

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
from megatron_rl.durable import replace_file, write_text
from megatron_rl.metrics import is_measurable, number_text, read_lines
from megatron_rl.trainer.trackers import Trackers

_SHOWN_SPANS = 8
PLAIN_SECONDS = 10.0
"""Shortest time between two progress lines where the console is no terminal."""

COLUMNS = (
    ("reward", "reward/mean", ".3f"),
    ("loss", "sft/loss", ".4f"),
    ("length", "response/length", ".1f"),
    ("entropy", "policy/entropy", ".3f"),
    ("kl", "kl/ref", ".4f"),
    ("clipped", "policy/clip_fraction", ".3f"),
    ("gradient", "policy/grad_norm", ".2f"),
    ("mismatch", "mismatch/abs_diff", ".1e"),
    ("invalid", "reward/invalid", ".3f"),
    ("tokens/s", "throughput/tokens_per_second", ".0f"),
    ("s/step", "time/step", ".2f"),
)
"""What the console line of a step shows, in order: label, metric, format; absent metrics are left out. The
accuracies of evaluation sets and the seconds of the phases stand behind."""
PHASES = ("generate", "reward", "score", "estimate", "learn", "evaluate", "idle_learn", "idle_rollout")


def accuracies(names: Iterable[str]) -> list[str]:
    """Return the names among ``names`` of the accuracies of evaluation sets."""
    return [name for name in names if name.startswith("eval/") and name.endswith("/accuracy")]


def write_rollouts(
    folder: RunFolder,
    step: int,
    columns: Mapping[str, Sequence[Any]],
    limit: int | None = None,
    kind: str = "step",
) -> Path:
    """Store the first ``limit`` rows of equally long columns as ``rollouts/<kind>_<step>.parquet``.

    A column of values that Parquet has no common type for is stored as JSON text.
    """
    import pyarrow
    import pyarrow.parquet

    lengths = {len(values) for values in columns.values()}
    if len(lengths) != 1:
        raise ValueError(f"columns of different lengths: { {k: len(v) for k, v in columns.items()} }")
    count = len(range(lengths.pop())[:limit])
    arrays: dict[str, Any] = {"step": pyarrow.array([step] * count, pyarrow.int64())}
    for name, values in columns.items():
        rows = list(values[:limit])
        try:
            array = pyarrow.array(rows)
            # Nothing but None, such as failures where none failed: text, as in files of other steps.
            arrays[name] = array.cast(pyarrow.string()) if pyarrow.types.is_null(array.type) else array
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
            arrays[name] = pyarrow.array([json.dumps(row, default=str) for row in rows])
    table = pyarrow.table(arrays)
    target = folder.rollouts / f"{kind}_{step}.parquet"
    replace_file(target, lambda path: pyarrow.parquet.write_table(table, path))
    return target


class MetricsLog:
    """Write one line per step to a metrics file and to the console, and tell trackers.

    ``resumed_step`` is the last step that the restored checkpoint has seen: later lines of the file are cut
    off, so that every step appears once. The file is kept under another name, and that is said, where lines
    are missing or damaged, or are of steps beyond ``total_steps``, which do not come again. None starts over:
    an existing file is renamed, not lost. Make it on one rank only.
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
        self.total_steps, self.phase = total_steps, phase
        self.console = console if console is not None else sys.stdout
        self.path = folder.metrics if phase == "train" else folder.stage_metrics(phase)
        if resumed_step is None:
            set_aside(self.path)
        else:
            self._cut_after(resumed_step)
        self._file = self.path.open("a")
        self._trackers = trackers
        if trackers is not None:
            trackers.begin(phase, resumed_step)
        self._begun, self._first = time.monotonic(), resumed_step or 0

    def write(self, step: int, values: Mapping[str, float], shown: bool = True) -> None:
        """Record the metrics of ``step``; a value that is not `is_measurable` is stored as null."""
        finite = {name: float(value) if is_measurable(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # a checkpoint that survives a crash has the lines before it
        if self._trackers is not None:
            present = {name: value for name, value in finite.items() if value is not None}
            self._trackers.write(self.phase, step, present)
        if shown:
            self.console.write(self.line(step, values) + "\n")
            self.console.flush()

    def line(self, step: int, values: Mapping[str, float]) -> str:
        """Return the console line of a step."""
        width = len(str(self.total_steps))
        parts = [f"{self.phase} {step:>{width}}/{self.total_steps}"]
        parts += [
            f"{label} {number_text(values[name], form)}" for label, name, form in COLUMNS if name in values
        ]
        phases = [f"{name} {values[f'time/{name}']:.2f}" for name in PHASES if f"time/{name}" in values]
        parts += [f"({', '.join(phases)})"] if phases else []
        parts += [f"{name} {values[name]:.3f}" for name in accuracies(values)]
        done = step - self._first
        if done > 0 and step < self.total_steps:
            remaining = (time.monotonic() - self._begun) / done * (self.total_steps - step)
            parts.append(f"eta {clock(remaining)}")
        return "  ".join(parts)

    def _cut_after(self, step: int) -> None:
        """Leave one line for each step up to ``step``, and keep the file as it is where that loses any."""
        lines, damaged = read_lines(self.path)
        lines = {line["step"]: json.dumps(line) + "\n" for line in lines}
        kept = [text for number, text in sorted(lines.items()) if number <= step]
        missing = [number for number in range(1, step + 1) if number not in lines]
        later = [number for number in lines if number > self.total_steps]
        if missing or later:
            reason = f"has no line of steps {_spans(missing)}" if missing else f"goes on to step {max(later)}"
            words = f"warning: {self.path.name} {reason}, and this run goes on after step {step}"
            if later or damaged:
                aside = set_aside(self.path)
                words += f"; the file is kept as {aside.name}" if aside is not None else ""
            self.console.write(words + "\n")
            self.console.flush()
        write_text(self.path, "".join(kept))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Progress:
    """Show how far a long phase is: a bar on a terminal, else a plain line now and then; a context manager.

    ``shown`` false shows nothing: the other ranks. ``total`` None shows only that the phase runs.
    """

    def __init__(
        self, title: str, total: int | None = None, *, shown: bool = True, console: TextIO | None = None
    ) -> None:
        self.title, self.total, self.shown = title, total, shown
        self.console = console if console is not None else sys.stdout
        self.done = 0
        self._bar: Any = None
        self._begun = self._printed = 0.0

    def __enter__(self) -> Progress:
        self._begun = self._printed = time.monotonic()
        if not self.shown:
            return self
        if self.console.isatty():
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
            columns += [] if self.total is None else [BarColumn(), MofNCompleteColumn()]
            columns += [TimeElapsedColumn(), TextColumn("{task.fields[note]}")]
            self._bar = Bar(*columns, console=Console(file=self.console), transient=True)
            self._bar.start()
            self._bar.add_task(self.title, total=self.total, note="")
        else:
            self._say(f"{self.title} …")
        return self

    def advance(self, count: int = 1, note: str = "") -> None:
        """Say that ``count`` more units are done; ``note`` is a few words on the state."""
        self.done += count
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=count, note=note)
            return
        now = time.monotonic()
        if self.shown and now - self._printed >= PLAIN_SECONDS:
            self._printed = now
            of = "" if self.total is None else f"/{self.total}"
            self._say(f"{self.title} {self.done}{of}" + (f"  {note}" if note else ""))

    def __exit__(self, kind: type[BaseException] | None, *_: TracebackType | BaseException | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self.shown:
            end = "done" if kind is None else "stopped"
            self._say(f"{self.title}: {end} after {clock(time.monotonic() - self._begun)}")

    def _say(self, text: str) -> None:
        self.console.write(text + "\n")
        self.console.flush()


@contextlib.contextmanager
def output_to(path: Path, main: bool) -> Iterator[TextIO]:
    """Send what this process prints, libraries in C included, to ``path``; yield the console.

    The console is the standard output from before on the ``main`` rank and the same log file on others. On an
    exception the output goes back first, so that the error is seen.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with path.open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    console = os.fdopen(os.dup(saved[0] if main else 1), "w", buffering=1)
    try:
        yield console
    finally:
        console.close()
        sys.stdout.flush()
        sys.stderr.flush()
        for target, descriptor in zip((1, 2), saved, strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)


def clock(seconds: float) -> str:
    """Return seconds as ``0:07``, ``12:34`` or ``1:02:03``."""
    if not abs(seconds) < 1e15:
        return f"{seconds:.3g} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _spans(steps: Sequence[int]) -> str:
    """Return ascending numbers as ``1-3, 7``, not more than a few of them."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and spans[-1][1] == step - 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    words = [f"{first}-{last}" if last > first else str(first) for first, last in spans]
    return ", ".join(words[:_SHOWN_SPANS]) + (" and more" if len(words) > _SHOWN_SPANS else "")
