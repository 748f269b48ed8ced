"""Rewards for arithmetic problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def exact_match(*, prompt: str, response: str, ground_truth: Any, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 when the response is the ground truth, apart from white space around it, else 0.0."""
    return float(response.strip() == str(ground_truth).strip())


def match_and_length(
    *, prompt: str, response: str, ground_truth: Any, metadata: Mapping[str, Any]
) -> dict[str, float]:
    """Return `exact_match` as the reward, and as components ``match`` and ``length``: as many characters."""
    match = exact_match(prompt=prompt, response=response, ground_truth=ground_truth, metadata=metadata)
    length = float(len(response.strip()) == len(str(ground_truth).strip()))
    return {"reward": match, "match": match, "length": length}
