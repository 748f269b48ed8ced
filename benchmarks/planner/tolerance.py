"""Compare predictions with published measurements: ratios, bands, orderings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isclose, isfinite
from typing import Any

from megatron_rl.errors import UserError


def ratio(predicted: Any, measured: Any) -> float | None:
    """Return predicted / measured; for a band, 1 inside it and else against its nearer end."""
    if isinstance(predicted, bool) or not isinstance(predicted, int | float) or not isfinite(predicted):
        return None
    if isinstance(measured, Sequence) and not isinstance(measured, str) and len(measured) == 2:
        low, high = measured
        edge = low if predicted < low else high if predicted > high else predicted
        return predicted / edge if edge else None
    if isinstance(measured, bool) or not isinstance(measured, int | float) or measured == 0:
        return None
    return predicted / measured


def _same(predicted: Any, measured: Any) -> bool:
    if isinstance(predicted, bool) or isinstance(measured, bool):
        return predicted is measured
    if isinstance(predicted, int | float) and isinstance(measured, int | float):
        return isclose(predicted, measured, rel_tol=1e-3, abs_tol=1e-9)
    if isinstance(predicted, Mapping) and isinstance(measured, Mapping):
        return all(name in predicted and _same(predicted[name], value) for name, value in measured.items())
    return predicted == measured


def _numeric(predicted: Any, measured: Any, below: float, above: float) -> bool:
    if isinstance(measured, Mapping):
        return isinstance(predicted, Mapping) and all(
            name in predicted and _numeric(predicted[name], value, below, above)
            for name, value in measured.items()
        )
    if not isinstance(predicted, int | float) or isinstance(predicted, bool):
        return _same(predicted, measured)
    if isinstance(measured, list | tuple):
        low, high = min(measured), max(measured)
    else:
        low = high = measured
    return low * below <= predicted <= high * above


def inside(predicted: Any, measured: Any, tolerance: Any, choices: Sequence[Any] | None = None) -> bool:
    """Say whether a prediction is inside its tolerance (the forms of SCENARIOS: number, factor, exact,
    at_least, at_most, ordering, report). ``choices`` is the candidate order for ``ordering``.
    """
    if predicted is None:
        return isinstance(tolerance, Mapping) and bool(tolerance.get("report"))
    if tolerance is None:
        tolerance = {"exact": True}
    if isinstance(tolerance, int | float) and not isinstance(tolerance, bool):
        return _numeric(predicted, measured, 1 - tolerance, 1 + tolerance)
    if isinstance(tolerance, Mapping):
        if tolerance.get("report"):
            return True
        if tolerance.get("exact"):
            return _same(predicted, measured)
        if "factor" in tolerance:
            return _numeric(predicted, measured, 1 / tolerance["factor"], tolerance["factor"])
        if "at_least" in tolerance or "at_most" in tolerance:
            floor, ceiling = tolerance.get("at_least", float("-inf")), tolerance.get("at_most", float("inf"))
            return isinstance(predicted, int | float) and floor <= predicted <= ceiling
        if "ordering" in tolerance:
            steps = int(tolerance["ordering"].get("within_steps", 0))
            order = list(choices or [])
            if predicted in order and measured in order:
                return abs(order.index(predicted) - order.index(measured)) <= steps
            return predicted == measured
    raise UserError(
        f"unknown tolerance {tolerance!r}",
        where="tolerance",
        expected="a number, factor, exact, at_least, at_most, ordering or report",
        got=str(tolerance),
    )


def compared(value: float, other: float, rule: Mapping[str, Any]) -> tuple[float, bool]:
    """Return (ratio or difference, inside) of a scenario's value against another's."""
    if "ratio" in rule:
        relation, (low, high) = value / other, rule["ratio"]
    else:
        relation, (low, high) = value - other, rule["difference"]
    return relation, low <= relation <= high
