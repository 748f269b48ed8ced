"""Time the phases of a step and remember which one runs, for the failure report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.metrics import Metrics
from megatron_rl.parallel import device


class Phases:
    """Collect seconds per phase on this rank; ``current`` names where the process is."""

    def __init__(self) -> None:
        self.current = "start"
        self.step = 0
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as ``time/<name>``; after an exception ``current`` still names it."""
        outer, self.current = self.current, name
        device.synchronize()
        begun = time.perf_counter()
        yield
        device.synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begun
        self.current = outer

    def metrics(self) -> Metrics:
        """Return the seconds since the last call, the slowest rank's when gathered, and start anew."""
        result = Metrics({}, {f"time/{name}": seconds for name, seconds in self._seconds.items()})
        self._seconds.clear()
        return result
