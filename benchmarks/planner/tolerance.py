"""Comparison of predictions with published measurements: ratios, bands, orderings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isclose, isfinite
from typing import Any

from megatron_rl.errors import UserError

_FORMS = "a number, factor, exact, at_least, at_most, ordering or report"


def _is_number(value: Any) -> bool:
    """Return whether a value is a number; Python counts booleans as integers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def ratio(predicted: Any, measured: Any) -> float | None:
    """Return predicted / measured; for a band, 1 inside it and else against its nearer end."""
    if not _is_number(predicted) or not isfinite(predicted):
        return None
    if isinstance(measured, Sequence) and not isinstance(measured, str) and len(measured) == 2:
        low, high = measured
        edge = min(max(predicted, low), high)
        return predicted / edge if edge else None
    if not _is_number(measured) or measured == 0:
        return None
    return predicted / measured


def _same(predicted: Any, measured: Any) -> bool:
    """Return whether two values are equal, numbers up to rounding."""
    if isinstance(predicted, bool) or isinstance(measured, bool):
        return predicted is measured
    if isinstance(predicted, int | float) and isinstance(measured, int | float):
        return isclose(predicted, measured, rel_tol=1e-3, abs_tol=1e-9)
    if isinstance(predicted, Mapping) and isinstance(measured, Mapping):
        return all(name in predicted and _same(predicted[name], value) for name, value in measured.items())
    return predicted == measured


def _within(predicted: Any, measured: Any, low_factor: float, high_factor: float) -> bool:
    """Return whether a number, or each of a mapping, is within these factors of the measured one or band."""
    if isinstance(measured, Mapping):
        return isinstance(predicted, Mapping) and all(
            name in predicted and _within(predicted[name], value, low_factor, high_factor)
            for name, value in measured.items()
        )
    if not _is_number(predicted):
        return _same(predicted, measured)
    band = measured if isinstance(measured, list | tuple) else [measured]
    return min(band) * low_factor <= predicted <= max(band) * high_factor


def inside(predicted: Any, measured: Any, tolerance: Any, choices: Sequence[Any] | None = None) -> bool:
    """Return whether a prediction is inside its tolerance, which README.md describes.

    ``choices`` is the order of the candidates for ``ordering``. Raises UserError for an unknown form.
    """
    if predicted is None:
        return isinstance(tolerance, Mapping) and bool(tolerance.get("report"))
    if tolerance is None:
        tolerance = {"exact": True}
    if _is_number(tolerance):
        return _within(predicted, measured, 1 - tolerance, 1 + tolerance)

    if isinstance(tolerance, Mapping):
        # Reported without a verdict.
        if tolerance.get("report"):
            return True
        if tolerance.get("exact"):
            return _same(predicted, measured)
        if "factor" in tolerance:
            return _within(predicted, measured, 1 / tolerance["factor"], tolerance["factor"])
        if "at_least" in tolerance or "at_most" in tolerance:
            low = tolerance.get("at_least", float("-inf"))
            high = tolerance.get("at_most", float("inf"))
            return isinstance(predicted, int | float) and low <= predicted <= high
        if "ordering" in tolerance:
            return _near_in_order(predicted, measured, tolerance["ordering"], list(choices or []))
    raise UserError(
        f"unknown tolerance {tolerance!r}", where="tolerance", expected=_FORMS, got=str(tolerance)
    )


def _near_in_order(predicted: Any, measured: Any, rule: Mapping[str, Any], order: list[Any]) -> bool:
    """Return whether two candidates are at most ``within_steps`` apart in their order."""
    steps = int(rule.get("within_steps", 0))
    if predicted in order and measured in order:
        return abs(order.index(predicted) - order.index(measured)) <= steps
    return predicted == measured


def compared(value: float, other: float, rule: Mapping[str, Any]) -> tuple[float, bool]:
    """Return (ratio or difference, inside) of a scenario's value against another's."""
    if "ratio" in rule:
        relation = value / other
        low, high = rule["ratio"]
    else:
        relation = value - other
        low, high = rule["difference"]
    return relation, low <= relation <= high
