"""Break one rule of NCCL that gloo does not have, or count connections. The argument names the function."""

from __future__ import annotations

import os
import sys

import psutil
import torch
import torch.distributed as dist

from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import barrier
from megatron_rl.distributed.watch import leave_job


def first_call_of_some() -> None:
    """Make the first call of a group on two of its three members only."""
    group = dist.new_group([0, 1, 2])
    rank = dist.get_rank()
    value = torch.ones(4)
    if rank < 2:
        kind = dist.irecv if rank else dist.isend
        for work in dist.batch_isend_irecv([dist.P2POp(kind, value, 1 - rank, group)]):
            work.wait()

    barrier()
    # For the third rank this is the first call of the group, for the others the second.
    dist.all_reduce(value, group=group)


def crossed_groups() -> None:
    """Start the calls of two groups in opposite orders on different ranks."""
    groups = [dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])]
    # Asynchronous calls return before they complete, so gloo finishes both in any order.
    order = groups if dist.get_rank() else groups[::-1]
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in order]
    for work in works:
        assert work is not None
        work.wait()


def another_order() -> None:
    """Exchange two messages in a pair of ranks, each rank starting with its send."""
    rank = dist.get_rank()
    peer = 1 - dist.get_rank()
    if rank < 2:
        works = [
            dist.isend(torch.ones(4), peer),
            dist.irecv(torch.ones(4), peer),
        ]
        for work in works:
            assert work is not None
            work.wait()


def wrong_tensors() -> None:
    """Use an element type and a memory layout that NCCL rejects."""
    rank = dist.get_rank()
    value = torch.ones(4, dtype=torch.int16)
    operations = [dist.P2POp(dist.irecv, torch.ones_like(value), (rank - 1) % 3)]
    for work in dist.batch_isend_irecv([*operations, dist.P2POp(dist.isend, value, (rank + 1) % 3)]):
        work.wait()
    dist.broadcast(torch.ones(4, 4).t()[:, :2], 0)


def connections_when_used() -> None:
    """Create groups, and check that members connect only when a group is used."""

    # Connections to the store do not count: ranks open them at times of their own.
    store = int(os.environ["MASTER_PORT"])

    def count() -> int:
        return sum(
            connection.status == "ESTABLISHED" and store not in (connection.laddr.port, connection.raddr.port)
            for connection in psutil.Process().net_connections("tcp")
        )

    barrier()
    before = count()
    groups = [dist.new_group([0, 1, 2]) for _ in range(4)]
    assert count() == before, (count(), before)

    barrier()  # the first rank to use the group connects to the others
    dist.all_reduce(torch.ones(4), group=groups[0])
    assert count() == before + 2, (count(), before)


if __name__ == "__main__":
    device.initialize(60.0)
    {name: value for name, value in globals().items() if callable(value)}[sys.argv[1]]()
    leave_job()
