"""Rendezvous of the ranks of a job: the store through which they exchange their addresses.

Ranks of an earlier attempt cannot join by mistake and, in a job on one host, other hosts cannot connect.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron_rl.errors import UserError, first_line
from megatron_rl.launcher import current_launch

_POLL_INTERVAL = timedelta(seconds=0.5)
"""Time to wait for rank 0's acknowledgement before checking for a newer attempt."""


def open_store(timeout: timedelta) -> dist.Store:
    """Open the store of this attempt, which has no keys of earlier attempts. Collective over the world.

    A single process uses a local store and ignores MASTER_ADDR, which a cluster's templates may export for
    other jobs.
    """
    if current_launch().world_size == 1:
        return dist.HashStore()

    # With an agent store torchrun itself listens on MASTER_PORT.
    has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_single_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if is_single_host and not has_agent_store:
        return open_single_host_store(int(os.environ["MASTER_PORT"]), timeout)

    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    if not has_agent_store:
        return store

    # torchrun's agent store survives a restart of the ranks: each attempt uses a separate prefix.
    prefix = agree_on_attempt(store, rank, world_size, timeout)
    return dist.PrefixStore(prefix, store)


def open_single_host_store(port: int, timeout: timedelta) -> dist.Store:
    """Open a store for the ranks of one host, which other hosts cannot reach.

    By default torch's TCPStore listens on every network interface; this store listens only on the loopback
    interface. Raises DistNetworkError if the port cannot be opened.
    """
    address = "127.0.0.1"
    is_first = current_launch().rank == 0

    # Pass a socket to TCPStore that already listens, only on the loopback interface.
    listener = None
    if is_first:
        try:
            listener = socket.create_server((address, port)).detach()
        except OSError as error:
            raise dist.DistNetworkError(f"port {port}: {error.strerror}") from error

    return dist.TCPStore(
        address,
        port,
        current_launch().world_size,
        is_first,
        timeout,
        master_listen_fd=listener,
    )


def agree_on_attempt(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
) -> str:
    """Choose a name for this attempt that no earlier attempt had, and return it on all ranks.

    torchrun's store survives a restart of the ranks, with the addresses of the previous ranks: a rank that
    reads before its peers have written would wait for dead processes. The restart count does not identify an
    attempt, since hosts may count differently. Rank 0 therefore opens an attempt and acknowledges the random
    identifier of each other rank; only the acknowledgement proves that the attempt is the current one.

    Raises DistStoreError after ``timeout``. Collective over the world.
    """
    # The counter starts at 1 and survives restarts, so no two attempts have the same number.
    if rank == 0:
        attempt = store.add("attempt", 1)
        for peer in range(1, world_size):
            identifier = store.get(f"{attempt} {peer}").decode()
            store.set(f"{attempt} {identifier}", "")
        return f"attempt {attempt}"

    identifier = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        # Until rank 0 has opened its attempt, this may be the number of an earlier attempt.
        attempt = store.get("attempt").decode()
        store.set(f"{attempt} {rank}", identifier)
        try:
            store.wait([f"{attempt} {identifier}"], _POLL_INTERVAL)
            return f"attempt {attempt}"
        except dist.DistStoreError:
            # Not acknowledged yet, or the attempt belongs to a rank 0 that has exited.
            if time.monotonic() > deadline:
                raise


def rendezvous_error(error: Exception, timeout: float) -> UserError:
    """Return the error for a rendezvous that failed within ``timeout`` seconds."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return UserError(
        "the ranks of the job did not rendezvous",
        where="environment: MASTER_ADDR, MASTER_PORT",
        expected=f"all {current_launch().world_size} ranks at {address} within {timeout:g} s",
        got=first_line(error),
        fix="name the host of rank 0 and a port that is free there, and start every rank",
    )
