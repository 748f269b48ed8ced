"""A reward of your own: a number and named components, which become metrics."""

from __future__ import annotations

from typing import Any


def score(
    *,
    response: str,
    ground_truth: str,
    brevity: float = 0.05,
    **_: Any,
) -> dict[str, float]:
    """Return 1 for the right sum, half for one digit of two, less ``brevity`` per character too many.

    It names the arguments that it reads; ``prompt`` and ``metadata`` are in ``_``.
    """
    digits = response.strip()
    exact = float(digits == ground_truth)
    equal_digits = sum(map(str.__eq__, digits, ground_truth))
    near = 0.5 * (len(digits) == len(ground_truth) and equal_digits == 1)

    # Each component is a metric of its own.
    excess = max(0, len(response) - len(ground_truth))
    reward = max(exact, near) - brevity * excess
    return {"reward": reward, "right": exact, "near": near}
