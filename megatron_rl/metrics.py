"""Metrics that stay exact when merged: every value is a sum and a weight, divided once at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


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
