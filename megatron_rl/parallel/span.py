"""A process group over processes of several worlds: trainers and the workers of a server."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_rl.parallel import device


def join(address: str, port: int, rank: int, count: int, timeout: float = 600.0) -> Any:
    """Return the group of ``count`` processes that meet at ``address:port``, whatever worlds they are in.

    Rank 0 opens the port. Inside the group a rank is its own global rank. Works with and without a default
    group. ``timeout`` in seconds bounds the meeting and every collective. Collective over the ``count``.
    """
    patience = timedelta(seconds=timeout)
    store = dist.TCPStore(address, port, count, is_master=rank == 0, timeout=patience)
    name: Any = f"span {address}:{port}"
    backends = c10d.Backend(device.backends())
    group, _ = c10d._new_process_group_helper(count, rank, [], backends, store, name, timeout=patience)
    # torch looks up global ranks for every collective; a span has none but its own.
    c10d._world.pg_group_ranks[group] = {position: position for position in range(count)}  # pyright: ignore[reportArgumentType]
    return group


def leave(group: Any) -> None:
    """End a span on this rank."""
    dist.destroy_process_group(group)
