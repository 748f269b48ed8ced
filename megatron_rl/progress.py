"""Progress counters of this process for the hang detector: completed units of work of any role."""

from collections import Counter

_counts: Counter[str] = Counter()


def count_progress(unit: str) -> None:
    """Count one more completed ``unit`` of work, such as a micro-batch."""
    _counts[unit] += 1


def progress_count(unit: str) -> int:
    """Return how often this process has completed a ``unit`` of work."""
    return _counts[unit]


def progress_text() -> str:
    """Format the counts of completed units as text.

    Example: ``"3 blocks of files, 12 micro-batches"``.
    """
    # Iterate over a copy, since other threads update the counters.
    return ", ".join(f"{count} {unit}" for unit, count in sorted(_counts.copy().items()))
