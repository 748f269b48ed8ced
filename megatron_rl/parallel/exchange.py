"""Make the answers that roles computed for their own rows the same value on every rank.

Only four things cross ranks here: rows, metrics, small objects, and the question whether all is well.
They cross all ranks of the job, or inside `among` the ranks it names.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.metrics import Metrics
from megatron_rl.metrics import merge as merge_metrics
from megatron_rl.parallel import device
from megatron_rl.parallel.groups import communicator
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import token_index


@dataclass(frozen=True)
class RowShard:
    """Hold one rank's answers for the rows it worked on.

    ``rows`` [b] int64 are positions in the whole batch, ``lengths`` [b] the tokens of each row;
    ``tokens`` maps names to ragged [n, ...] tensors, ``values`` names to [b, ...] tensors. Every rank
    names the same fields with the same dtypes, in the same order; a rank without rows has empty ones.
    """

    rows: Tensor
    lengths: Tensor
    tokens: Mapping[str, Tensor]
    values: Mapping[str, Tensor]


_scopes: list[tuple[int, ...]] = []


@contextmanager
def among(ranks: tuple[int, ...]) -> Iterator[None]:
    """Let the gathers of the block be over ``ranks`` alone; other ranks do not enter the block.

    The communicator must exist: `communicator` makes it, on all ranks of the job.
    """
    _scopes.append(ranks)
    try:
        yield
    finally:
        _scopes.pop()


def members() -> tuple[int, ...]:
    """Return the ranks that gathers are over."""
    return _scopes[-1] if _scopes else tuple(range(dist.get_world_size()))


def _group() -> Any:
    return communicator(_scopes[-1]) if _scopes else None


_traffic = {"bytes": 0, "seconds": 0.0}


def traffic_metrics() -> Metrics:
    """Return bytes received and seconds spent in `gather_rows` on this rank since the last call.

    The seconds hold the wait for the slowest rank.
    """
    found = Metrics(
        {}, {"rows/bytes_received_max": float(_traffic["bytes"]), "time/rows": _traffic["seconds"]}
    )
    _traffic.update(bytes=0, seconds=0.0)
    return found


def gather_rows(shard: RowShard) -> RowShard:
    """Return the rows of all ranks in the order of ``rows``, equal on every rank.

    Each row must come from exactly one rank. Every rank receives each byte once: rows travel as one
    broadcast from each rank that has some, unpadded. Collective over `members`.
    """
    begun = time.perf_counter()
    gathered = _gather_rows(shard)
    _traffic["seconds"] += time.perf_counter() - begun
    return gathered


def _gather_rows(shard: RowShard) -> RowShard:
    mine = torch.tensor(
        [len(shard.rows), int(shard.lengths.sum())], dtype=torch.int64, device=device.device()
    )
    ranks = members()
    sizes = torch.empty((len(ranks), 2), dtype=torch.int64, device=device.device())
    dist.all_gather_into_tensor(sizes.view(-1), mine, group=_group())
    parts = []
    for rank, (rows, tokens) in zip(ranks, sizes.tolist(), strict=True):
        if rows:
            parts.append(_broadcast(shard, rank, rows, tokens))
    if not parts:
        return shard
    order = torch.cat([part.rows for part in parts])
    if not torch.equal(order.sort().values, torch.arange(len(order))):
        raise RuntimeError(f"rows were answered twice or not at all: {order.sort().values.tolist()[:20]}")
    return _reorder(parts, order.argsort())


def _fields(shard: RowShard) -> list[tuple[str, Tensor, bool]]:
    """List (name, tensor, per token) of everything that travels."""
    fixed = [("rows", shard.rows, False), ("lengths", shard.lengths, False)]
    ragged = [(name, tensor, True) for name, tensor in shard.tokens.items()]
    return [*fixed, *ragged, *((name, tensor, False) for name, tensor in shard.values.items())]


def _broadcast(shard: RowShard, source: int, rows: int, tokens: int) -> RowShard:
    fields = _fields(shard)
    sizes = [
        (tokens if per_token else rows) * _item(tensor) * tensor.element_size()
        for _, tensor, per_token in fields
    ]
    if device.rank() == source:
        buffer = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor, _ in fields])
        buffer = buffer.to(device.device())
    else:
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device.device())
        _traffic["bytes"] += sum(sizes)
    dist.broadcast(buffer, source, group=_group())
    found: dict[str, Tensor] = {}
    for (name, tensor, per_token), part in zip(fields, buffer.cpu().split(sizes), strict=True):
        # A copy starts at an aligned address; a slice of the buffer may not.
        found[name] = part.clone().view(tensor.dtype).view(tokens if per_token else rows, *tensor.shape[1:])
    return RowShard(
        found["rows"],
        found["lengths"],
        {name: found[name] for name in shard.tokens},
        {name: found[name] for name in shard.values},
    )


def _item(tensor: Tensor) -> int:
    """Return the number of elements per row or token."""
    count = 1
    for size in tensor.shape[1:]:
        count *= size
    return count


def _reorder(parts: Sequence[RowShard], order: Tensor) -> RowShard:
    lengths = torch.cat([part.lengths for part in parts])
    index = token_index(lengths, order)
    return RowShard(
        torch.cat([part.rows for part in parts])[order],
        lengths[order],
        {name: torch.cat([part.tokens[name] for part in parts])[index] for name in parts[0].tokens},
        {name: torch.cat([part.values[name] for part in parts])[order] for name in parts[0].values},
    )


def gather_metrics(metrics: Metrics) -> Metrics:
    """Return the sum of all ranks' metrics, equal on every rank. Collective over `members`."""
    return merge_metrics(gather_objects(metrics))


def sum_over_outputs(metrics: Metrics, layout: ParallelLayout) -> Metrics:
    """Keep a role's metrics on the one rank per data-parallel replica that speaks for it."""
    return metrics if device.rank() in layout.outputs() else Metrics()


def gather_objects(value: Any) -> list[Any]:
    """Return every rank's small picklable ``value``, by rank. Collective over `members`."""
    values: list[Any] = [None] * len(members())
    dist.all_gather_object(values, value, group=_group())
    return values


def broadcast_object(value: Any, source: int = 0) -> Any:
    """Return the ``source`` rank's small picklable ``value`` on every rank. Collective over the world."""
    box = [value]
    dist.broadcast_object_list(box, source)
    return box[0]


def barrier() -> None:
    """Wait for every rank. Collective over the world."""
    dist.barrier()


def leave() -> None:
    """Leave the job in an orderly way. Collective over the world."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
