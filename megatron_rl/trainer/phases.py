"""Measure the phases of a step on one rank, and remember which one runs, for the failure report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.metrics import Metrics
from megatron_rl.parallel import device
from megatron_rl.parallel.exchange import RowTraffic


class Phases:
    """Collect seconds per phase on this rank; ``current`` names where the process is.

    ``rows`` counts what gathering rows moves, for those who gather with it.
    """

    def __init__(self) -> None:
        self.current = "start"
        self.step = 0
        self.rows = RowTraffic()
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as ``time/<name>`` and take its ``memory/<name>_peak_bytes``.

        After an exception ``current`` still names it.
        """
        outer, self.current = self.current, name
        device.synchronize()
        begun = time.perf_counter()
        yield
        device.synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begun
        self._peaks[name] = max(self._peaks.get(name, 0), device.peak_memory(reset=True))
        self.current = outer

    def metrics(self) -> Metrics:
        """Return what was measured since the last call, the busiest rank's when gathered, and start anew."""
        largest = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        largest |= {f"memory/{name}_peak_bytes": float(peak) for name, peak in self._peaks.items()}
        if self._peaks:
            largest["memory/peak_bytes"] = float(max(self._peaks.values()))
        if self.rows.seconds:
            largest |= {"rows/bytes_received_max": float(self.rows.bytes), "time/rows": self.rows.seconds}
        self._seconds.clear()
        self._peaks.clear()
        self.rows = RowTraffic()
        return Metrics({}, largest)
