"""Rewards for arithmetic problems, such as the quickstart's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def exact_match(
    *,
    prompt: str,
    response: str,
    ground_truth: Any,
    metadata: Mapping[str, Any],
) -> float:
    """Return 1.0 if the response equals the ground truth, apart from outer whitespace, else 0.0."""
    return float(response.strip() == str(ground_truth).strip())


def match_and_length(
    *, prompt: str, response: str, ground_truth: Any, metadata: Mapping[str, Any]
) -> dict[str, float]:
    """Return the reward of `exact_match`, with the components ``match`` and ``length``.

    ``length`` is 1.0 for a response with as many characters as the ground truth.
    """
    match = exact_match(
        prompt=prompt,
        response=response,
        ground_truth=ground_truth,
        metadata=metadata,
    )
    length = float(len(response.strip()) == len(str(ground_truth).strip()))
    return {"reward": match, "match": match, "length": length}
