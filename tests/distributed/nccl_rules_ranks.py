"""Break one rule of NCCL that gloo does not have, or count connections: ``nccl_rules_ranks.py FUNCTION``."""

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
    """Call a group for the first time on two of its three ranks only."""
    group = dist.new_group([0, 1, 2])
    rank = dist.get_rank()
    value = torch.ones(4)
    if rank < 2:
        operation = dist.isend
        if rank == 1:
            operation = dist.irecv
        message = dist.P2POp(operation, value, 1 - rank, group)
        for work in dist.batch_isend_irecv([message]):
            work.wait()

    barrier()
    # This is the first call of the group on the third rank, and the second call on the other ranks.
    dist.all_reduce(value, group=group)


def crossed_groups() -> None:
    """Start the calls of two groups in opposite orders on different ranks."""
    groups = [dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])]
    if dist.get_rank() == 0:
        groups.reverse()

    # Asynchronous calls return before they complete, so gloo finishes both in any order.
    works = []
    for group in groups:
        works.append(dist.all_reduce(torch.ones(4), group=group, async_op=True))
    for work in works:
        assert work is not None
        work.wait()


def another_order() -> None:
    """Exchange two messages in a pair of ranks, each rank starting with its send."""
    rank = dist.get_rank()
    peer = 1 - rank
    if rank < 2:
        # NCCL waits for the peer's receive here, which starts only after the peer's send.
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
    received = torch.ones_like(value)
    # NCCL has no 16-bit integers.
    messages = [
        dist.P2POp(dist.irecv, received, (rank - 1) % 3),
        dist.P2POp(dist.isend, value, (rank + 1) % 3),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()

    # NCCL requires contiguous tensors.
    strided = torch.ones(4, 4).t()[:, :2]
    dist.broadcast(strided, 0)


def connections_when_used() -> None:
    """Create groups, and check that ranks connect only when a group is used."""
    # Connections to the store do not count, since ranks open them at any time.
    store_port = int(os.environ["MASTER_PORT"])

    def count_connections() -> int:
        num_connections = 0
        for connection in psutil.Process().net_connections("tcp"):
            # A listening socket has no remote address.
            if connection.status != "ESTABLISHED":
                continue
            if store_port not in (
                connection.laddr.port,
                connection.raddr.port,
            ):
                num_connections += 1
        return num_connections

    barrier()
    num_before = count_connections()
    groups = [dist.new_group([0, 1, 2]) for _ in range(4)]
    num_after_creation = count_connections()
    assert num_after_creation == num_before, (
        num_after_creation,
        num_before,
    )

    # The first rank to use the group connects to the other two.
    barrier()
    dist.all_reduce(torch.ones(4), group=groups[0])
    num_after_use = count_connections()
    assert num_after_use == num_before + 2, (num_after_use, num_before)


FUNCTIONS = {
    function.__name__: function
    for function in (
        first_call_of_some,
        crossed_groups,
        another_order,
        wrong_tensors,
        connections_when_used,
    )
}


if __name__ == "__main__":
    device.initialize(60.0)
    FUNCTIONS[sys.argv[1]]()
    leave_job()
