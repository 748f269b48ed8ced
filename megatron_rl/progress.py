"""Count what this process has done, so that others can tell whether it gets on."""

from collections import Counter

_done: Counter[str] = Counter()


def advance(unit: str) -> None:
    """Say that one more ``unit`` of work is done, such as a micro-batch."""
    _done[unit] += 1


def done() -> str:
    """Return what has been done so far in words."""
    return ", ".join(f"{count} {unit}" for unit, count in sorted(_done.copy().items()))
