"""Model families whose layers cover all families, for tests that cannot run every family each time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.hf_models import FAMILIES

LAYERS: Mapping[str, str] = {
    "qwen2": "grouped-query attention and gated MLP, the layers of most families",
    "gemma3": "sliding windows, two rotary bases, norms behind each block",
    "phi3": "fused projections",
    "qwen3-5": "gated delta nets, gated attention",
    "qwen3-moe": "experts",
    "deepseek-v3": "latent attention, groups of experts, shared experts, dense first layers",
    "qwen3-next": "delta nets beside experts, a gated shared expert",
    "gpt-oss": "attention sinks, experts with biases",
    "gemma4": "heads of two sizes, keys that are values, buffers",
    "minimax-m2": "norms over the heads of all tensor-parallel ranks",
}
"""Family -> its layers that no family above it has."""


def represented() -> list[Any]:
    """Return the parameters of a test of every family; families outside `LAYERS` are campaign tests."""
    parameters: list[Any] = list(LAYERS)
    for family in FAMILIES:
        if family not in LAYERS:
            # The campaign runs all families; the suite would take minutes longer with them.
            parameters.append(pytest.param(family, marks=pytest.mark.campaign))
    return parameters
