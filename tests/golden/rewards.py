"""Rewards of the golden runs, which differ within groups even if the model is untrained."""

from __future__ import annotations

from typing import Any


def score(*, response: str, ground_truth: Any, **_: Any) -> dict[str, float]:
    """Return the fraction of correct digits, less 0.05 for each missing or superfluous character."""
    truth = str(ground_truth)
    pairs = zip(response, truth, strict=False)
    num_correct = sum(character == expected for character, expected in pairs)
    digits = num_correct / len(truth)

    # The length matters too, so that responses without a correct digit still differ.
    length = abs(len(response) - len(truth))
    return {
        "reward": digits - 0.05 * length,
        "digits": digits,
        "length": float(length),
    }


def thirds(*, response: str, **_: Any) -> float:
    """Return 1.0 for a third of all lengths, so that some groups have equal rewards with any model."""
    return float(len(response) % 3 == 0)
