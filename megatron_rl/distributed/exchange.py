"""Make the answers that roles computed for their own rows the same value on every rank.

Only four things cross ranks here: rows, metrics, small objects, and the question whether all is well.
They cross all ranks of the job, or those of a group that the caller names.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.distributed.groups import communicator
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics
from megatron_rl.metrics import merge as merge_metrics
from megatron_rl.types import token_index

_SHORT, _LENGTH = 1024, 8
"""Bytes of the first message of `share`, and how many of them say the length."""


@dataclass(frozen=True)
class RowShard:
    """Hold one rank's answers for the rows it worked on.

    ``rows`` [b] int64 are positions in the whole batch, ``lengths`` [b] the tokens of each row;
    ``tokens`` maps names to ragged [n, ...] tensors, ``values`` names to [b, ...] tensors. ``items`` maps the
    name of a token field that counts to what it counts, token after token. Every rank names the same fields
    with the same dtypes, in the same order; a rank without rows has empty ones.
    """

    rows: Tensor
    lengths: Tensor
    tokens: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    items: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class GatherStats:
    """Cost of gathering rows on this rank: bytes received, and seconds, which include waiting for others."""

    bytes: int = 0
    seconds: float = 0.0


class ReplicaGroup:
    """Ranks that hold a replicated batch. Results computed per shard are gathered onto all of them.

    ``ranks`` None is the whole job. The communicator of other ranks must exist: `communicator` makes it, on
    all ranks of the job. ``gather_stats`` counts what `gather_rows` moves.
    """

    def __init__(self, ranks: tuple[int, ...] | None = None, gather_stats: GatherStats | None = None) -> None:
        self.group = None if ranks is None else communicator(ranks)
        self.ranks = tuple(range(dist.get_world_size())) if ranks is None else ranks
        self.rank = dist.get_rank()
        self._gather_stats = GatherStats() if gather_stats is None else gather_stats

    def gather_rows(self, shard: RowShard) -> RowShard:
        """Return the rows of all members in the order of ``rows``, equal on every member.

        Each row must come from exactly one rank. Every rank receives each byte once: rows travel as one
        broadcast from each rank that has some, unpadded. Collective over the members.
        """
        begun = time.perf_counter()
        sizes = self._sizes(shard)
        received = [
            self._broadcast(shard, rank, counts)
            for rank, counts in zip(self.ranks, sizes, strict=True)
            if counts[0]
        ]
        gathered = _in_order(received) if received else shard
        self._gather_stats.seconds += time.perf_counter() - begun
        return gathered

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every member's small picklable ``value``, by rank. Collective over the members."""
        return gather_objects(value, self.group)

    def _sizes(self, shard: RowShard) -> list[list[int]]:
        """Return each member's numbers of rows, of tokens, and of each field's items."""
        counts = [len(shard.rows), int(shard.lengths.sum()), *map(len, shard.items.values())]
        # On the host: whoever is done first waits here, and waiting costs an accelerator all of its time.
        lengths = torch.tensor(counts, dtype=torch.int64)
        sizes = torch.empty((len(self.ranks), len(counts)), dtype=torch.int64)
        dist.all_gather_into_tensor(sizes.view(-1), lengths, group=self.group)
        return sizes.tolist()

    def _broadcast(self, shard: RowShard, source: int, counts: list[int]) -> RowShard:
        fields = _fields(shard)
        sizes = [
            counts[kind] * math.prod(tensor.shape[1:]) * tensor.element_size() for _, tensor, kind in fields
        ]
        if self.rank == source:
            buffer = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor, _ in fields])
            buffer = buffer.to(device.device())
        else:
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device.device())
            self._gather_stats.bytes += sum(sizes)
        dist.broadcast(buffer, source, group=self.group)
        received: list[Tensor] = []
        for (_, tensor, kind), raw in zip(fields, buffer.cpu().split(sizes), strict=True):
            # A copy starts at an aligned address; a slice of the buffer may not.
            shape = (counts[kind], *tensor.shape[1:])
            received.append(raw.clone().view(tensor.dtype).view(shape))
        rest = iter(received[2:])
        return RowShard(
            received[0],
            received[1],
            {name: next(rest) for name in shard.tokens},
            {name: next(rest) for name in shard.values},
            {name: next(rest) for name in shard.items},
        )


def _fields(shard: RowShard) -> list[tuple[str, Tensor, int]]:
    """List (name, tensor, which of `_sizes` is its length) of everything that travels."""
    fixed = [("rows", shard.rows, 0), ("lengths", shard.lengths, 0)]
    ragged = [(name, tensor, 1) for name, tensor in shard.tokens.items()]
    values = [(name, tensor, 0) for name, tensor in shard.values.items()]
    items = [(name, tensor, kind) for kind, (name, tensor) in enumerate(shard.items.items(), 2)]
    return [*fixed, *ragged, *values, *items]


def _in_order(shards: Sequence[RowShard]) -> RowShard:
    """Return the rows of all shards sorted by their numbers, which must be 0, 1, 2 …"""
    rows = torch.cat([shard.rows for shard in shards])
    if not torch.equal(rows.sort().values, torch.arange(len(rows))):
        raise RuntimeError(f"rows were answered twice or not at all: {rows.sort().values.tolist()[:20]}")
    order = rows.argsort()
    lengths = torch.cat([shard.lengths for shard in shards])
    index = token_index(lengths, order)
    tokens = {name: torch.cat([shard.tokens[name] for shard in shards]) for name in shards[0].tokens}
    items = {name: torch.cat([shard.items[name] for shard in shards]) for name in shards[0].items}
    return RowShard(
        rows[order],
        lengths[order],
        {name: values[index] for name, values in tokens.items()},
        {name: torch.cat([shard.values[name] for shard in shards])[order] for name in shards[0].values},
        {name: values[token_index(tokens[name], index)] for name, values in items.items()},
    )


def gather_metrics(metrics: Metrics) -> Metrics:
    """Return the sum of all ranks' metrics, equal on every rank. Collective over the world."""
    return merge_metrics(gather_objects(metrics))


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Return every rank's small picklable ``value``, in the order of ``group``, None being the world.

    Collective over the group.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def together(action: Callable[[], Any], words: str, group: Any = None) -> list[Any]:
    """Return what ``action`` returns on every rank, by rank; where it fails on one rank, fail on all.

    The answers are small and picklable; ``words`` say what could not be done. Raises the UserError of the
    first rank that has one, else a RuntimeError that names the ranks. Collective over the group.
    """
    answer: Any = None
    failure: Exception | str | None = None
    try:
        answer = action()
    except UserError as error:
        failure = error
    except Exception as error:
        failure = f"rank {device.rank()}: {error!r}"
    answers = gather_objects((answer, failure), group)
    failures = [told for _, told in answers if told is not None]
    for told in failures:
        if isinstance(told, UserError):
            raise told
    if failures:
        raise RuntimeError(f"could not {words}: " + "; ".join(failures))
    return [value for value, _ in answers]


def hand_on(value: Tensor, source: int, group: Any) -> None:
    """Overwrite a contiguous tensor, in place and bit for bit, with that of one member of the group.

    ``source`` is the member's position in the group. Collective over the group.
    """
    if dist.get_world_size(group) > 1:
        dist.broadcast(value.view(-1).view(torch.uint8), dist.get_global_rank(group, source), group=group)


def share(value: Any, ranks: tuple[int, ...]) -> Any:
    """Return the small picklable ``value`` of the first of ``ranks``, on all of them.

    Their communicator must exist. Collective over the ranks.
    """
    if len(ranks) == 1:
        return value
    group, first = communicator(ranks), dist.get_rank() == ranks[0]
    said = pickle.dumps(value) if first else b""
    # One message where it is short, as between most engine steps: a second one costs as much again.
    short = torch.zeros(_SHORT, dtype=torch.uint8, device=device.host())
    if first:
        words = len(said).to_bytes(_LENGTH, "little") + said[: _SHORT - _LENGTH]
        short[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    dist.broadcast(short, ranks[0], group=group)
    if first:
        rest = said[_SHORT - _LENGTH :]
    else:
        head = short.numpy().tobytes()
        size = int.from_bytes(head[:_LENGTH], "little")
        said = head[_LENGTH : _LENGTH + size]
        rest = bytes(size - len(said))
    if rest:
        long = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
        dist.broadcast(long, ranks[0], group=group)
        said = said if first else said + long.numpy().tobytes()
    return value if first else pickle.loads(said)


def ticket(name: str) -> int:
    """Return how many tickets of this ``name`` were drawn before, by all ranks of the job."""
    return _add(name, 1) - 1


def drawn(name: str) -> int:
    """Return how many tickets of this ``name`` all ranks of the job have drawn so far."""
    return _add(name, 0)


def _add(name: str, count: int) -> int:
    store: Any = dist.distributed_c10d._get_default_store()
    return store.add(f"ticket {name}", count)


def sum_over_ranks(values: Tensor, group: Any = None) -> Tensor:
    """Return the element-wise sum of tensors over the group, in place; integers wrap.

    Collective over the group.
    """
    dist.all_reduce(values, group=group)
    return values


def rank_in(group: Any = None) -> int:
    """Return this process's global rank, by which the members of ``group`` know it."""
    return dist.get_rank() if group is None else dist.get_global_rank(group, group.rank())


def barrier() -> None:
    """Wait for every rank. Collective over the world."""
    dist.barrier()
