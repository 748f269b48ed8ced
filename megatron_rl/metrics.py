"""Metrics that stay exact when merged: every value is a sum and a weight, divided once at the end.

A run writes them as one line of JSON a step, which is read here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.durable import require_file

# Written metrics stay below it in size, so that whoever reads them can add and square without overflow. A
# gradient norm in float32 that exceeds it has diverged.
LARGEST = 1e30
LAST_STEP = 2**53
"""Largest number of a step that a float holds exactly, as pictures of curves need it."""


@dataclass(frozen=True)
class Metrics:
    """Hold named means as (sum, weight) pairs and named extremes as plain maxima.

    Merging with ``+`` adds sums and weights and keeps the larger maximum, so the mean over
    micro-batches, data-parallel ranks or optimizer steps is the mean over all their elements,
    never a mean of means. Names are ``group/name``.

    Example: ``Metrics.mean("reward/mean", 6.0, 4) + Metrics.mean("reward/mean", 2.0, 4)``
    has ``values() == {"reward/mean": 1.0}``.
    """

    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    maxima: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def mean(cls, name: str, total: float, weight: float = 1.0) -> Metrics:
        """Record ``total / weight`` under ``name``."""
        return cls({name: (float(total), float(weight))})

    @classmethod
    def maximum(cls, name: str, value: float) -> Metrics:
        """Record the largest value seen under ``name``."""
        return cls({}, {name: float(value)})

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Metrics:
        """Record plain values with weight one each."""
        return cls({name: (float(value), 1.0) for name, value in values.items()})

    def __add__(self, other: Metrics) -> Metrics:
        sums = dict(self.sums)
        for name, (total, weight) in other.sums.items():
            old_total, old_weight = sums.get(name, (0.0, 0.0))
            sums[name] = (old_total + total, old_weight + weight)
        maxima = dict(self.maxima)
        for name, value in other.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
        return Metrics(sums, maxima)

    def values(self) -> dict[str, float]:
        """Divide every sum by its weight; a name whose weights sum to zero is left out."""
        means = {name: total / weight for name, (total, weight) in self.sums.items() if weight}
        return {**means, **self.maxima}


def merge(parts: Iterable[Metrics]) -> Metrics:
    """Add up metrics from several sources, in the order given."""
    merged = Metrics()
    for part in parts:
        merged = merged + part
    return merged


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the numbers of a metrics file line by line, without lines that are cut off or damaged.

    Values that are not `is_measurable` are left out.
    """
    lines, _ = read_lines(Path(path))
    return [{name: value for name, value in line.items() if is_measurable(value)} for line in lines]


def is_measurable(value: Any) -> bool:
    """Return whether a value is a number that can be summed, squared and drawn: at most `LARGEST` in size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def number_text(value: float, form: str) -> str:
    """Return a number in ``form``, such as ``.3f``, or in a short form where that would be endless."""
    return format(value, form if abs(value) < 1e15 else ".3g")


def _is_step(value: Any) -> bool:
    """Return whether a value of JSON is the number of a step: true and numbers beyond any run are not."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LAST_STEP


def read_lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the lines of a metrics file, and whether others than the last are damaged; raises OSError."""
    lines: list[dict[str, Any]] = []
    texts: list[str] = []
    if path.exists():
        require_file(path)
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # the process was killed while it wrote this line
            continue
        if isinstance(line, dict) and _is_step(line.get("step")):
            lines.append(line)
    return lines, len(lines) < len(texts) - 1
