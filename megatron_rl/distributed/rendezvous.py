"""Let the ranks of a job find each other: none of an earlier attempt, and no other host's on one host."""

from __future__ import annotations

import os
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron_rl.errors import UserError
from megatron_rl.launcher import launch

_LOOKS = timedelta(seconds=0.5)
"""Time between two looks at whether the job has begun anew while its ranks met."""


def open_store(timeout: timedelta) -> dist.Store:
    """Return where the ranks find each other, empty but for what they write. Collective over the world.

    One process meets nobody: an address that a cluster's templates export for other jobs is not looked at.
    """
    if launch().world_size == 1:
        return dist.HashStore()
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shared and os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        return store_of_one_host(int(os.environ["MASTER_PORT"]), timeout)
    store, number, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    if shared:
        return dist.PrefixStore(meet(store, number, size, timeout), store)
    return store


def store_of_one_host(port: int, timeout: timedelta) -> dist.Store:
    """Return a store that other hosts cannot reach; torch's own listens on every interface."""
    address, first = "127.0.0.1", launch().rank == 0
    try:
        listener = socket.create_server((address, port)).detach() if first else None
    except OSError as error:
        raise dist.DistNetworkError(f"port {port}: {error.strerror}") from error
    return dist.TCPStore(address, port, launch().world_size, first, timeout, master_listen_fd=listener)


def meet(store: dist.Store, number: int, size: int, timeout: timedelta) -> str:
    """Agree on a name that the ranks of no earlier attempt have had; return it on each of ``size`` ranks.

    torchrun keeps its store when it restarts the ranks, and in it the addresses of those that are gone; who
    reads before its peers have written would wait for the dead. How often ranks were restarted does not tell
    attempts apart: hosts may count it differently. So the first rank begins an attempt, answers what each
    other one calls itself, and only that answer says that the attempt is not an earlier one. Raises
    DistStoreError after ``timeout``. Collective over the world.
    """
    if number == 0:
        attempt = store.add("attempt", 1)
        for other in range(1, size):
            store.set(f"{attempt} {store.get(f'{attempt} {other}').decode()}", "")
        return f"attempt {attempt}"
    me, limit = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    while True:
        attempt = store.get("attempt").decode()
        store.set(f"{attempt} {number}", me)
        try:
            store.wait([f"{attempt} {me}"], _LOOKS)
            return f"attempt {attempt}"
        except dist.DistStoreError:  # no answer yet, or from a rank that is gone
            if time.monotonic() > limit:
                raise


def no_meeting(error: Exception, timeout: float) -> UserError:
    """Return what to tell the user where the ranks did not meet within ``timeout`` seconds."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return UserError(
        "the ranks of the job do not meet",
        where="environment: MASTER_ADDR, MASTER_PORT",
        expected=f"all {launch().world_size} ranks at {place} within {timeout:g} s",
        got=str(error).splitlines()[0],
        fix="name the host of rank 0 and a port that is free there, and start every rank",
    )
