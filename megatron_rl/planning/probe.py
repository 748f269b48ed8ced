"""Short measurements of a rank's device and of the links between ranks, for checking an environment."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import barrier, gather_objects
from megatron_rl.megatron.log_probs import kernel_errors, kernel_works

REPEATS = 5
WITHIN, ACROSS = "within a machine", "across machines"


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


def probe_links(host: str, mebibytes: int = 16) -> LinkProbe:
    """Time all-reduces over the whole world and compare clocks. Collective over the world."""
    elements = mebibytes * 2**20 // 4
    total = device.world_size() * (device.world_size() + 1) / 2
    times, correct = [], True
    for _ in range(REPEATS + 1):
        values = torch.full((elements,), float(device.rank() + 1), device=device.device())
        barrier()
        times.append(_seconds(lambda values=values: dist.all_reduce(values)))
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


def neighbours(hosts: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    """Return pairs of ranks that talk at once: those ``within a machine``, and those ``across machines``.

    Within a machine its ranks are paired in their order, and across, ranks of the same place on two machines;
    who has no partner is left out.
    """
    machines: defaultdict[str, list[int]] = defaultdict(list)
    for rank, host in enumerate(hosts):
        machines[host].append(rank)
    ranks = list(machines.values())
    within = [pair for machine in ranks for pair in zip(machine[::2], machine[1::2], strict=False)]
    across = [
        pair
        for left, right in zip(ranks[::2], ranks[1::2], strict=False)
        for pair in zip(left, right, strict=False)
    ]
    return {name: pairs for name, pairs in ((WITHIN, within), (ACROSS, across)) if pairs}


@dataclass(frozen=True)
class PairProbe:
    """Hold bytes per second in one direction of the ``slowest`` pair, while all pairs send."""

    rate: float
    slowest: tuple[int, int]
    correct: bool


def probe_pairs(pairs: Sequence[tuple[int, int]], mebibytes: int = 16) -> PairProbe:
    """Let the ranks of each pair send to one another at once. Collective over the world.

    The world's communicator must have been used before, as `probe_links` does.
    """
    elements, rank = mebibytes * 2**20 // 4, device.rank()
    other = next((sum(pair) - rank for pair in pairs if rank in pair), None)
    times, correct = [], True
    sent = torch.full((elements,), float(rank), device=device.device())
    received = torch.empty_like(sent)

    def exchange(other: int) -> None:
        calls = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
        for request in dist.batch_isend_irecv(calls):
            request.wait()

    for _ in range(REPEATS + 1):
        barrier()
        if other is not None:
            times.append(_seconds(lambda: exchange(other)))
            correct = correct and bool((received == other).all())
    answers = gather_objects((statistics.median(times[1:]) if times else 0.0, correct))
    slowest = max(pairs, key=lambda pair: max(answers[rank][0] for rank in pair))
    seconds = max(answers[rank][0] for rank in slowest)
    return PairProbe(elements * 4 / seconds, slowest, all(right for _, right in answers))


@dataclass(frozen=True)
class DeviceProbe:
    """Hold one rank's rates: bfloat16 FLOP/s of a large product, bytes/s of its memory and to its host.

    ``host`` is None where the device is the host; ``name`` is the device's own.
    """

    name: str
    flops: float
    memory: float
    host: float | None


def probe_devices() -> list[DeviceProbe]:
    """Return the rates of all devices, measured while all work. Collective over the world."""
    size, place = (512 if device.on_host() else 8192), device.device()
    # Drawn at random: zeros and ones take less power, and the clock is then higher than in training.
    left, right = (torch.randn(size, size, device=place).to(torch.bfloat16) for _ in range(2))
    block = torch.zeros((32 if device.on_host() else 1024) * 2**20, dtype=torch.uint8, device=place)
    copy = torch.empty_like(block)
    barrier()
    flops = 2 * size**3 / _median(lambda: left @ right)
    memory = 2 * len(block) / _median(lambda: copy.copy_(block))
    host = None
    if not device.on_host():
        buffer = device.host_buffer(len(block) // 4)
        host = len(buffer) / _median(lambda: buffer.copy_(block[: len(buffer)], non_blocking=True))
    return gather_objects(DeviceProbe(device.name(), flops, memory, host))


def probe_kernel() -> tuple[bool, str]:
    """Say whether the kernel of log-probs is right on this rank's device, and how far off it is."""
    if device.on_host():
        return True, "no accelerator: log-probs are computed by torch"
    values, gradients = kernel_errors(torch.bfloat16)
    worst = ", ".join(f"{kind} tokens {error:.2%}" for kind, error in gradients.items())
    return kernel_works(torch.bfloat16), f"log-probs within {values:.2g} of float64; gradients: {worst}"


def _median(call: Callable[[], object]) -> float:
    return statistics.median([_seconds(call) for _ in range(REPEATS + 1)][1:])


def _seconds(call: Callable[[], object]) -> float:
    device.synchronize()
    start = time.perf_counter()
    call()
    device.synchronize()
    return time.perf_counter() - start
