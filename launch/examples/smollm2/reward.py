"""Reward of the example: 1 for a response whose last number is correct."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def score(
    *,
    prompt: Any,
    response: str,
    ground_truth: Any,
    metadata: Mapping[str, Any],
) -> float:
    """Return 1 for an answer whose last number is ``ground_truth``, else 0."""
    # Chat models explain before they answer, so the last number counts.
    numbers = re.findall(r"\d+", response)
    return float(bool(numbers) and numbers[-1] == str(ground_truth))
