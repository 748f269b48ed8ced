"""Metrics that merge exactly: every mean is kept as a sum and a weight, and divided once at the end.

A run writes one JSON line per step to its metrics file; `read_metrics` reads that file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from megatron_rl.durable import require_regular_file

# Largest absolute value of a metric: values up to it can be added and squared without overflow. A larger
# gradient norm in float32 has diverged.
LARGEST = 1e30

# Largest step number: floats, which plots use, represent every integer up to it exactly.
LAST_STEP = 2**53

Scalar: TypeAlias = Any
"""A float, or a tensor [] float64 on the device, whose value the host has not read."""

# Above this value, fixed-point notation would print more digits than a float has.
_LARGEST_FIXED_POINT = 1e15


@dataclass(frozen=True)
class Metrics:
    """Named means and maxima that can be merged.

    ``+`` adds sums and weights and keeps the larger maximum. The mean over micro-batches, data-parallel ranks
    or optimizer steps is thus the mean over all their elements, never a mean of means. Names are
    ``group/name``.

    Losses add metrics as scalars on the device, so that the host does not wait for the device after each
    micro-batch. The scalars are merged on the device, and `exchange.host_metrics` copies all of them
    together.

    Example: ``Metrics.mean("reward/mean", 6.0, 4) + Metrics.mean("reward/mean", 2.0, 4)``
    has ``values() == {"reward/mean": 1.0}``.
    """

    sums: Mapping[str, tuple[Scalar, Scalar]] = field(default_factory=dict)
    """Name -> (sum, weight) of a mean."""
    maxima: Mapping[str, Scalar] = field(default_factory=dict)
    """Name -> maximum."""

    @classmethod
    def mean(cls, name: str, total: float, weight: float = 1.0) -> Metrics:
        """Return the metric ``name`` with mean ``total / weight``."""
        return cls({name: (float(total), float(weight))})

    @classmethod
    def maximum(cls, name: str, value: float) -> Metrics:
        """Return the metric ``name`` with ``value``; merging keeps the largest value."""
        return cls({}, {name: float(value)})

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Metrics:
        """Return metrics with the given means, each of weight 1."""
        return cls({name: (float(value), 1.0) for name, value in values.items()})

    @classmethod
    def of_tensors(
        cls, sums: Mapping[str, tuple[Any, Any]], maxima: Mapping[str, Any] = MappingProxyType({})
    ) -> Metrics:
        """Return metrics of scalar tensors in float64, which stay on their device.

        A copy to the host would wait for every kernel launched before.
        """
        return cls(
            {name: (_to_float64(total), _to_float64(weight)) for name, (total, weight) in sums.items()},
            {name: _to_float64(value) for name, value in maxima.items()},
        )

    def __add__(self, other: Metrics) -> Metrics:
        sums = dict(self.sums)
        for name, (total, weight) in other.sums.items():
            old_total, old_weight = sums.get(name, (0.0, 0.0))
            sums[name] = (old_total + total, old_weight + weight)

        maxima = dict(self.maxima)
        for name, value in other.maxima.items():
            maxima[name] = _larger(maxima.get(name, value), value)

        return Metrics(sums, maxima)

    def values(self) -> dict[str, float]:
        """Map each name to its mean or maximum; omit means whose weights sum to zero.

        Copies each device scalar to the host separately; `exchange.host_metrics` copies all of them together.
        """
        means = {
            name: float(total) / float(weight) for name, (total, weight) in self.sums.items() if float(weight)
        }
        return means | {name: float(value) for name, value in self.maxima.items()}


def _to_float64(value: Any) -> Scalar:
    """Convert a scalar tensor to a float if it is on the host, else to a float64 tensor on its device."""
    value = value.detach().double()
    if value.is_cpu:
        return value.item()
    return value


def _larger(first: Scalar, second: Scalar) -> Scalar:
    """Return the larger of two scalars, as a device tensor if either is a device tensor."""
    if not isinstance(second, int | float):
        return second.clamp(min=first)
    if not isinstance(first, int | float):
        return first.clamp(min=second)
    return max(first, second)


def merge_metrics(sources: Iterable[Metrics]) -> Metrics:
    """Merge metrics from several sources, in the given order."""
    merged = Metrics()
    for metrics in sources:
        merged = merged + metrics
    return merged


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a metrics file and return one mapping from name to number per line.

    Damaged lines, and values for which `is_valid_metric` is false, are skipped.
    """
    lines, _ = read_metric_lines(Path(path))
    metrics_by_line = []
    for line in lines:
        metrics_by_line.append({name: value for name, value in line.items() if is_valid_metric(value)})
    return metrics_by_line


def is_valid_metric(value: Any) -> bool:
    """Return whether a value is a number, not NaN, with an absolute value of at most `LARGEST`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def number_text(value: float, number_format: str) -> str:
    """Format a number with ``number_format``, such as ``.3f``, or with 3 significant digits from 1e15 on."""
    if abs(value) < _LARGEST_FIXED_POINT:
        return format(value, number_format)
    return format(value, ".3g")


def _is_step(value: Any) -> bool:
    """Return whether a JSON value is a valid step number: an integer from 0 to `LAST_STEP`, not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LAST_STEP


def read_metric_lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the valid lines of a metrics file as mappings, and whether more than one line is damaged.

    One damaged line is expected: the last one of a process that was killed while writing. Raises OSError.
    """
    valid_lines: list[dict[str, Any]] = []
    all_lines: list[str] = []
    if path.exists():
        require_regular_file(path)
        all_lines = path.read_text(encoding="utf-8", errors="replace").splitlines()

    for line in all_lines:
        try:
            metrics = json.loads(line)
        except (ValueError, RecursionError):  # an incomplete or damaged line
            continue
        if isinstance(metrics, dict) and _is_step(metrics.get("step")):
            valid_lines.append(metrics)

    return valid_lines, len(valid_lines) < len(all_lines) - 1
