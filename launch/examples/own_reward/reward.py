"""A reward of your own: a number and named components, which become metrics."""

from __future__ import annotations

from typing import Any


def score(*, response: str, ground_truth: str, brevity: float = 0.05, **_: Any) -> dict[str, float]:
    """Return 1 for the right sum, half for one digit of two, less ``brevity`` per character too many.

    It names what it reads; ``prompt`` and ``metadata`` are in the rest.
    """
    digits = response.strip()
    right = float(digits == ground_truth)
    near = 0.5 * (len(digits) == len(ground_truth) and sum(map(str.__eq__, digits, ground_truth)) == 1)
    long = max(0, len(response) - len(ground_truth))
    return {"reward": max(right, near) - brevity * long, "right": right, "near": near}
