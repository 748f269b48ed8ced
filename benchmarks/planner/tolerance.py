"""Comparison of predictions with published measurements: ratios, intervals, orders of candidates."""

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
    """Return predicted / reference, or None if the ratio is undefined.

    A reference of two numbers is an interval. A prediction inside the interval has the ratio 1; other
    predictions are divided by the nearer end.
    """
    if not _is_number(predicted) or not isfinite(predicted):
        return None
    if isinstance(reference, Sequence) and not isinstance(reference, str) and len(reference) == 2:
        low, high = reference
        # The value of the interval that is nearest to the prediction.
        nearest = min(max(predicted, low), high)
        return predicted / nearest if nearest else None

    if not _is_number(reference) or reference == 0:
        return None
    return predicted / reference


def _are_equal(predicted: Any, reference: Any) -> bool:
    """Return whether two values are equal; numbers may differ by rounding."""
    if isinstance(predicted, bool) or isinstance(reference, bool):
        return predicted is reference
    if isinstance(predicted, int | float) and isinstance(reference, int | float):
        # Published values have three or four digits.
        return isclose(predicted, reference, rel_tol=1e-3, abs_tol=1e-9)
    if isinstance(predicted, Mapping) and isinstance(reference, Mapping):
        return all(
            name in predicted and _are_equal(predicted[name], value) for name, value in reference.items()
        )
    return predicted == reference


def _is_within_factors(predicted: Any, reference: Any, low_factor: float, high_factor: float) -> bool:
    """Return whether a number is within the factors of its reference, or all numbers of a mapping are."""
    if isinstance(reference, Mapping):
        return isinstance(predicted, Mapping) and all(
            name in predicted and _is_within_factors(predicted[name], value, low_factor, high_factor)
            for name, value in reference.items()
        )

    if not _is_number(predicted):
        return _are_equal(predicted, reference)

    # A single number is an interval of one value.
    interval = reference if isinstance(reference, list | tuple) else [reference]
    return min(interval) * low_factor <= predicted <= max(interval) * high_factor


def is_inside(
    predicted: Any,
    reference: Any,
    tolerance: Any,
    choices: Sequence[Any] | None = None,
) -> bool:
    """Return whether a prediction is inside its tolerance, in one of the forms that README.md describes.

    ``choices`` are the candidates in the order for the form ``ordering``. Raises UserError for an unknown
    form.
    """
    # A missing prediction is accepted only by the form `report`.
    if predicted is None:
        return isinstance(tolerance, Mapping) and bool(tolerance.get("report"))
    # Without a tolerance the values must be equal.
    if tolerance is None:
        tolerance = {"exact": True}
    if _is_number(tolerance):
        return _is_within_factors(predicted, reference, 1 - tolerance, 1 + tolerance)

    if isinstance(tolerance, Mapping):
        # The form `report` accepts every prediction.
        if tolerance.get("report"):
            return True
        if tolerance.get("exact"):
            return _are_equal(predicted, reference)
        if "factor" in tolerance:
            return _is_within_factors(predicted, reference, 1 / tolerance["factor"], tolerance["factor"])
        if "at_least" in tolerance or "at_most" in tolerance:
            low = tolerance.get("at_least", float("-inf"))
            high = tolerance.get("at_most", float("inf"))
            return isinstance(predicted, int | float) and low <= predicted <= high

        if "ordering" in tolerance:
            return _is_near_in_order(predicted, reference, tolerance["ordering"], list(choices or []))

    raise UserError(
        f"unknown tolerance {tolerance!r}",
        where="tolerance",
        expected=_FORMS,
        got=str(tolerance),
    )


def _is_near_in_order(
    predicted: Any,
    reference: Any,
    rule: Mapping[str, Any],
    order: list[Any],
) -> bool:
    """Return whether two candidates are at most ``rule["within_steps"]`` apart in ``order``."""
    steps = int(rule.get("within_steps", 0))
    if predicted in order and reference in order:
        return abs(order.index(predicted) - order.index(reference)) <= steps
    return predicted == reference


def compare_scenario_values(value: float, reference: float, rule: Mapping[str, Any]) -> tuple[float, bool]:
    """Compare the values of two scenarios by a rule between them.

    Returns their ratio or difference, and whether it is in the range of the rule.
    """
    if "ratio" in rule:
        relation = value / reference
        low, high = rule["ratio"]
    else:
        relation = value - reference
        low, high = rule["difference"]
    return relation, low <= relation <= high
