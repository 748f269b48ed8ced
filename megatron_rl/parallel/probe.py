"""Short measurements of the links between ranks, for checking an environment."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.parallel import device
from megatron_rl.parallel.exchange import barrier, gather_objects


@dataclass(frozen=True)
class LinkProbe:
    """Hold what a probe of the world measured.

    ``seconds`` is the median time of one all-reduce of ``bytes``; ``correct`` says that its sum was right
    on every rank; ``clock_spread`` is the largest difference of the ranks' wall clocks in seconds, up to
    the time of a barrier; ``hosts`` are the machines' names by rank.
    """

    bytes: int
    seconds: float
    correct: bool
    clock_spread: float
    hosts: tuple[str, ...]

    @property
    def bus_bandwidth(self) -> float:
        """Return bytes per second per rank in both directions of a ring: 2 (n - 1) / n of the data."""
        ranks = len(self.hosts)
        return 2 * (ranks - 1) / ranks * self.bytes / self.seconds


def probe_links(host: str, mebibytes: int = 16, repeats: int = 5) -> LinkProbe:
    """Time all-reduces over the whole world and compare clocks. Collective over the world."""
    elements = mebibytes * 2**20 // 4
    times, correct = [], True
    for _ in range(repeats + 1):
        values = torch.full((elements,), float(device.rank() + 1), device=device.device())
        barrier()
        start = time.perf_counter()
        dist.all_reduce(values)
        device.synchronize()
        times.append(time.perf_counter() - start)
        total = device.world_size() * (device.world_size() + 1) / 2
        correct = correct and bool((values == total).all())
    barrier()
    clocks = gather_objects((time.time(), host, correct, statistics.median(times[1:])))
    wall = [clock for clock, _, _, _ in clocks]
    return LinkProbe(
        bytes=elements * 4,
        seconds=max(seconds for _, _, _, seconds in clocks),
        correct=all(right for _, _, right, _ in clocks),
        clock_spread=max(wall) - min(wall),
        hosts=tuple(name for _, name, _, _ in clocks),
    )
