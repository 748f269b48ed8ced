"""Upper bounds of counts, times and weights.

A larger value is a slip, and would overflow in torch, in vLLM or in the clock.
"""

from __future__ import annotations

MAX_WORLD = 1 << 16
MOST_ROWS = 1 << 24
MOST_TOKENS = 1 << 30
MOST_STEPS = 10**9
MOST_SECONDS = 30 * 24 * 3600
LARGE = 1e6
"""Of numbers that weigh or scale something in float32."""
