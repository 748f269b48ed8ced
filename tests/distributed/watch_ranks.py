"""Sum over ranks in which the third rank, or the only one, is late: it works, hangs, or is stopped."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.distributed import watch
from megatron_rl.progress import count_progress

LIMIT = 4.0
"""Seconds without progress after which the hang detector ends the job."""


def works() -> None:
    """Report progress for three times the limit, waiting in the same line between reports."""
    end = time.monotonic() + 3 * LIMIT
    while time.monotonic() < end:
        wait(LIMIT / 16)
        count_progress("engine steps")


def hangs() -> None:
    """Wait without progress, in another call than the other ranks."""
    wait(100 * LIMIT)


def is_stopped() -> None:
    """Stop the process with all its threads, so that its hang detector does not run either."""
    os.kill(os.getpid(), signal.SIGSTOP)


def wait(seconds: float) -> None:
    """Sleep, in a function of its own, so that the hang detector's stack shows where the rank waits."""
    time.sleep(seconds)


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    # A dictionary, since the description below is evaluated when the detector reports.
    state = {"phase": "build"}
    records = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    watch.join_job(
        LIMIT,
        lambda: f"rank {rank} (none) in phase '{state['phase']}'",
        records_folder=records,
    )
    # All ranks have to be connected before one of them is late.
    dist.all_reduce(torch.ones(1))
    state["phase"] = "generate"
    if rank == min(2, dist.get_world_size() - 1):
        {"works": works, "hangs": hangs, "is_stopped": is_stopped}[sys.argv[1]]()

    # The other ranks wait here for the late one.
    values = torch.ones(1)
    dist.all_reduce(values)
    print(f"sum {values.item():.0f}", flush=True)
    watch.leave_job()
