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


def ratio(predicted: Any, reference: Any) -> float | None:
    """Return predicted / reference; for a band, 1 inside it and else against its nearer end."""
    if not _is_number(predicted) or not isfinite(predicted):
        return None
    if isinstance(reference, Sequence) and not isinstance(reference, str) and len(reference) == 2:
        low, high = reference
        # The nearest value of the band, which may be the prediction itself.
        edge = min(max(predicted, low), high)
        return predicted / edge if edge else None

    if not _is_number(reference) or reference == 0:
        return None
    return predicted / reference


def _same(predicted: Any, reference: Any) -> bool:
    """Return whether two values are equal, numbers up to rounding."""
    if isinstance(predicted, bool) or isinstance(reference, bool):
        return predicted is reference
    if isinstance(predicted, int | float) and isinstance(reference, int | float):
        # Published values have three or four digits.
        return isclose(predicted, reference, rel_tol=1e-3, abs_tol=1e-9)
    if isinstance(predicted, Mapping) and isinstance(reference, Mapping):
        return all(name in predicted and _same(predicted[name], value) for name, value in reference.items())
    return predicted == reference


def _within(predicted: Any, reference: Any, low_factor: float, high_factor: float) -> bool:
    """Return whether a number, or each of a mapping, is within these factors of the reference."""
    if isinstance(reference, Mapping):
        return isinstance(predicted, Mapping) and all(
            name in predicted and _within(predicted[name], value, low_factor, high_factor)
            for name, value in reference.items()
        )

    if not _is_number(predicted):
        return _same(predicted, reference)

    # A number is a band of one.
    band = reference if isinstance(reference, list | tuple) else [reference]
    return min(band) * low_factor <= predicted <= max(band) * high_factor


def inside(
    predicted: Any,
    reference: Any,
    tolerance: Any,
    choices: Sequence[Any] | None = None,
) -> bool:
    """Return whether a prediction is inside its tolerance, which README.md describes.

    ``choices`` is the order of the candidates for ``ordering``. Raises UserError for an unknown form.
    """
    # Nothing was predicted: only a report can accept that.
    if predicted is None:
        return isinstance(tolerance, Mapping) and bool(tolerance.get("report"))
    # Without a tolerance the values must be equal.
    if tolerance is None:
        tolerance = {"exact": True}
    if _is_number(tolerance):
        return _within(predicted, reference, 1 - tolerance, 1 + tolerance)

    if isinstance(tolerance, Mapping):
        # Reported without a verdict.
        if tolerance.get("report"):
            return True
        if tolerance.get("exact"):
            return _same(predicted, reference)
        if "factor" in tolerance:
            return _within(predicted, reference, 1 / tolerance["factor"], tolerance["factor"])
        if "at_least" in tolerance or "at_most" in tolerance:
            low = tolerance.get("at_least", float("-inf"))
            high = tolerance.get("at_most", float("inf"))
            return isinstance(predicted, int | float) and low <= predicted <= high

        if "ordering" in tolerance:
            return _near_in_order(predicted, reference, tolerance["ordering"], list(choices or []))

    raise UserError(
        f"unknown tolerance {tolerance!r}",
        where="tolerance",
        expected=_FORMS,
        got=str(tolerance),
    )


def _near_in_order(
    predicted: Any,
    reference: Any,
    rule: Mapping[str, Any],
    order: list[Any],
) -> bool:
    """Return whether two candidates are at most ``within_steps`` apart in their order."""
    steps = int(rule.get("within_steps", 0))
    if predicted in order and reference in order:
        return abs(order.index(predicted) - order.index(reference)) <= steps
    return predicted == reference


def compared(value: float, reference: float, rule: Mapping[str, Any]) -> tuple[float, bool]:
    """Return (ratio or difference, inside) of a scenario's value against another's."""
    if "ratio" in rule:
        relation = value / reference
        low, high = rule["ratio"]
    else:
        relation = value - reference
        low, high = rule["difference"]
    return relation, low <= relation <= high
