"""Rewards for arithmetic problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def exact_match(*, prompt: str, response: str, ground_truth: Any, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 when the response is the ground truth, apart from white space around it, else 0.0."""
    return float(response.strip() == str(ground_truth).strip())
