"""The rewards of the golden runs: they differ within groups also where a model knows little."""

from __future__ import annotations

from typing import Any


def score(*, response: str, ground_truth: Any, **_: Any) -> dict[str, float]:
    """Return the share of right digits less a little for each character too many or too few."""
    truth = str(ground_truth)
    digits = sum(mine == right for mine, right in zip(response, truth, strict=False)) / len(truth)
    length = abs(len(response) - len(truth))
    return {
        "reward": digits - 0.05 * length,
        "digits": digits,
        "length": float(length),
    }


def thirds(*, response: str, **_: Any) -> float:
    """Return 1.0 for a third of all lengths, so that some groups are all equal, whatever the model knows."""
    return float(len(response) % 3 == 0)
