"""Kinds of numbers that settings are: unit and bounds together.

A value above an upper bound is a slip, and would overflow in torch, in vLLM or in the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_WORLD = 1 << 16
LONGEST_NAME = 64
"""Characters of a name of the user's that becomes part of a file's and a metric's name."""
MOST_ROWS = 1 << 24
MOST_TOKENS = 1 << 30
MOST_STEPS = 10**9
LARGE = 1e6
"""Of numbers that weigh or scale something in float32."""
_MOST_SECONDS = 30 * 24 * 3600

Kind = Mapping[str, Any]
"""What `setting` is told of a number."""
MANY: Kind = {"at_least": 1, "at_most": MOST_ROWS}
"""Of things that a step, or a set, has in memory."""
ENDLESS: Kind = {"at_least": 1, "at_most": MOST_STEPS}
"""Of things that come one after another."""
STEPS: Kind = {"unit": "steps", **ENDLESS}
TOKENS: Kind = {"unit": "tokens", "at_least": 1, "at_most": MOST_TOKENS}
RANKS: Kind = {"unit": "ranks", "at_least": 1, "at_most": MAX_WORLD}
PROCESSES: Kind = {"unit": "processes", "at_least": 1, "at_most": 1024}
SECONDS: Kind = {"unit": "seconds", "more_than": 0, "at_most": _MOST_SECONDS}
WAIT: Kind = {"unit": "seconds", "at_least": 0, "at_most": _MOST_SECONDS}
POSITIVE: Kind = {"more_than": 0, "at_most": LARGE}
WEIGHT: Kind = {"at_least": -LARGE, "at_most": LARGE}
SHARE: Kind = {"at_least": 0, "at_most": 1}
