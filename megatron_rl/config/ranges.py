"""Lists of ranks as text: ``0-3,8``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_rl.config.sections.bounds import MAX_WORLD


def parse_ranges(text: str) -> tuple[int, ...] | None:
    """Return the integers of a text such as ``0-3,8``, or None where it is not of that form."""
    ranks: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", item)
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= MAX_WORLD:
            return None
        ranks.extend(range(first, last + 1))
    return tuple(ranks)


def format_ranges(values: Sequence[int]) -> str:
    """Return integers as a text such as ``0-3,8``; the inverse of `parse_ranges`."""
    ranges: list[list[int]] = []
    for value in values:
        if ranges and value == ranges[-1][1] + 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
