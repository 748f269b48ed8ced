"""Exchange between ranks: gather the results per row of a batch, sum metrics, broadcast small objects.

A row is one sequence of a batch; each rank computes a shard of the rows. Apart from Megatron and weight
transfers, ranks exchange only four things, over the world or a given group: results of rows, metrics, small
objects, and whether an action failed on any rank.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.distributed.groups import communicator
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics, merge_metrics
from megatron_rl.types import token_index

_FIRST_MESSAGE_BYTES = 1024
"""Size of the first message of `broadcast_object`: most commands to the ranks of an engine fit into it."""
_LENGTH_BYTES = 8
"""Bytes at the start of the first message that contain the length of the pickled object."""
_HEAD_BYTES = _FIRST_MESSAGE_BYTES - _LENGTH_BYTES
"""Bytes of the pickled object in the first message."""

# Indices into the counts that ranks exchange before they exchange rows.
_NUM_ROWS = 0
_NUM_TOKENS = 1
_FIRST_NUM_ITEMS = 2


@dataclass(frozen=True)
class RowShard:
    """Results of one rank for its shard of a batch's rows (sequences).

    Every rank has the same fields with the same dtypes, in the same order; the fields of a rank without rows
    are empty.

    Example: rows 0 and 2 of a batch, of 3 and 1 tokens, with log-probs and a reward each::

        RowShard(
            rows=tensor([0, 2]),
            lengths=tensor([3, 1]),
            tokens={"log_probs": tensor([-0.1, -0.7, -0.2, -1.3])},
            values={"rewards": tensor([1.0, 0.0])},
        )
    """

    rows: Tensor
    """Indices of the rows in the complete batch, [b] int64."""
    lengths: Tensor
    """Tokens of each row, [b] int64."""
    tokens: Mapping[str, Tensor]
    """Name -> ragged values of the tokens of all rows in order, [n, ...]."""
    values: Mapping[str, Tensor]
    """Name -> one value per row, [b, ...]."""
    items: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> items of all tokens in order, with a variable number of items per token, [items, ...].

    ``tokens`` of the same name contains the number of items per token, [n].
    """


@dataclass
class GatherStats:
    """Cost of `ReplicaGroup.gather_rows` on this rank, summed over its calls.

    Example: ``GatherStats(bytes=1_048_576, seconds=0.12)``.
    """

    bytes: int = 0
    """Bytes received from other ranks."""
    seconds: float = 0.0
    """Time in the gather, including the wait for slower ranks."""


class _Field(NamedTuple):
    """Tensor of a `RowShard`, with the count that determines its size in a message."""

    tensor: Tensor
    """This rank's tensor, [length, ...]; on other ranks only the length differs."""
    count_index: int
    """Index of the tensor's length in a rank's counts, see `ReplicaGroup._gather_counts`."""


class ReplicaGroup:
    """Ranks that hold a replicated batch. Results computed per shard are gathered onto all of them.

    By default ``ranks`` are all ranks of the job. The communicator of a smaller group must already exist,
    because its creation is collective over the job (see `communicator`). ``gather_stats`` accumulates the
    cost of `gather_rows`.
    """

    def __init__(
        self,
        ranks: tuple[int, ...] | None = None,
        gather_stats: GatherStats | None = None,
    ) -> None:
        if ranks is None:
            self.group = None
            self.ranks = tuple(range(dist.get_world_size()))
        else:
            self.group = communicator(ranks)
            self.ranks = ranks

        self.rank = dist.get_rank()
        self._gather_stats = gather_stats or GatherStats()

    def gather_rows(self, shard: RowShard) -> RowShard:
        """Gather the results of all ranks, in ascending order of rows, onto every rank of the group.

        Each row must come from exactly one rank. Each rank with rows broadcasts them in one unpadded message,
        so every rank receives each byte once. Collective over the group.
        """
        start = time.perf_counter()
        counts_by_rank = self._gather_counts(shard)
        received_shards = []
        for rank, counts in zip(self.ranks, counts_by_rank, strict=True):
            if counts[_NUM_ROWS]:
                received_shards.append(self._broadcast_shard(shard, rank, counts))

        gathered = shard
        if received_shards:
            gathered = _merge_in_row_order(received_shards)
        self._gather_stats.seconds += time.perf_counter() - start
        return gathered

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the small picklable ``value`` of every rank, by rank. Collective over the group."""
        return gather_objects(value, self.group)

    def _gather_counts(self, shard: RowShard) -> list[list[int]]:
        """Gather the sizes of all ranks' shards: numbers of rows, of tokens, and of items of each name.

        Returns one list per rank. The names are the keys of ``shard.items``. Collective over the group.
        """
        num_tokens = int(shard.lengths.sum())
        item_counts = [len(items) for items in shard.items.values()]
        counts = [len(shard.rows), num_tokens, *item_counts]

        # Exchange CPU tensors, by gloo. With NCCL, ranks that arrive early would keep their GPU busy while
        # they wait for slower ranks.
        local_counts = torch.tensor(counts, dtype=torch.int64)
        all_counts = torch.empty((len(self.ranks), len(counts)), dtype=torch.int64)
        dist.all_gather_into_tensor(all_counts.view(-1), local_counts, group=self.group)
        return all_counts.tolist()

    def _broadcast_shard(
        self,
        shard: RowShard,
        source: int,
        counts: list[int],
    ) -> RowShard:
        """Broadcast the shard of rank ``source``; return it as CPU tensors. Collective over the group.

        ``shard`` is this rank's own shard. ``counts`` are the numbers of rows, of tokens, and of items of
        each name in the shard of ``source``, from `_gather_counts`.
        """
        # Receivers compute the size of each field from their own dtype and shape and the source's counts.
        fields = _list_fields(shard)
        field_bytes = []
        for tensor, count_index in fields:
            bytes_per_index = math.prod(tensor.shape[1:]) * tensor.element_size()
            field_bytes.append(counts[count_index] * bytes_per_index)

        # Pack all fields into one message of bytes.
        if self.rank == source:
            segments = [tensor.contiguous().view(-1).view(torch.uint8) for tensor, _ in fields]
            buffer = torch.cat(segments).to(device.device())
        else:
            buffer = torch.empty(sum(field_bytes), dtype=torch.uint8, device=device.device())
            self._gather_stats.bytes += sum(field_bytes)
        dist.broadcast(buffer, source, group=self.group)

        # Unpack on the CPU. Copy each slice, since a slice may start at an address that is not aligned.
        received_tensors: list[Tensor] = []
        for (tensor, count_index), segment in zip(fields, buffer.cpu().split(field_bytes), strict=True):
            shape = (counts[count_index], *tensor.shape[1:])
            received_tensors.append(segment.clone().view(tensor.dtype).view(shape))

        # The order of the tensors is the order of `_list_fields`: rows, lengths, tokens, values, items.
        first_value = 2 + len(shard.tokens)
        first_item = first_value + len(shard.values)
        return RowShard(
            rows=received_tensors[0],
            lengths=received_tensors[1],
            tokens=dict(zip(shard.tokens, received_tensors[2:first_value], strict=True)),
            values=dict(zip(shard.values, received_tensors[first_value:first_item], strict=True)),
            items=dict(zip(shard.items, received_tensors[first_item:], strict=True)),
        )


def _list_fields(shard: RowShard) -> list[_Field]:
    """Return the tensors of a shard, in their order in a message."""
    fields = [_Field(shard.rows, _NUM_ROWS), _Field(shard.lengths, _NUM_ROWS)]
    fields += [_Field(tensor, _NUM_TOKENS) for tensor in shard.tokens.values()]
    fields += [_Field(tensor, _NUM_ROWS) for tensor in shard.values.values()]
    for index, tensor in enumerate(shard.items.values()):
        fields.append(_Field(tensor, _FIRST_NUM_ITEMS + index))
    return fields


def _merge_in_row_order(shards: Sequence[RowShard]) -> RowShard:
    """Merge shards into one with all rows in ascending order; the indices of rows must be 0, 1, 2 …"""
    rows = torch.cat([shard.rows for shard in shards])
    sorted_rows = rows.sort().values
    if not torch.equal(sorted_rows, torch.arange(len(rows))):
        raise RuntimeError(f"rows were computed twice or not at all: {sorted_rows.tolist()[:20]}")

    tokens = _concatenate([shard.tokens for shard in shards])
    values = _concatenate([shard.values for shard in shards])
    items = _concatenate([shard.items for shard in shards])

    # Sort the rows, then the tokens by their rows. `lengths` has the number of tokens of each row.
    row_order = rows.argsort()
    lengths = torch.cat([shard.lengths for shard in shards])
    token_order = token_index(lengths, row_order)

    # Sort the items by their tokens. `tokens[name]` has the number of items of each token.
    sorted_items: dict[str, Tensor] = {}
    for name, tensor in items.items():
        items_per_token = tokens[name]
        sorted_items[name] = tensor[token_index(items_per_token, token_order)]

    return RowShard(
        rows=rows[row_order],
        lengths=lengths[row_order],
        tokens={name: tensor[token_order] for name, tensor in tokens.items()},
        values={name: tensor[row_order] for name, tensor in values.items()},
        items=sorted_items,
    )


def _concatenate(tensors_by_shard: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the tensors of each name, in the order of the shards."""
    concatenated: dict[str, Tensor] = {}
    for name in tensors_by_shard[0]:
        concatenated[name] = torch.cat([tensors[name] for tensors in tensors_by_shard])
    return concatenated


def gather_metrics(metrics: Metrics) -> Metrics:
    """Merge the metrics of all ranks, and return the result on every rank. Collective over the world."""
    return merge_metrics(gather_objects(host_metrics(metrics)))


def host_metrics(metrics: Metrics) -> Metrics:
    """Convert the device scalars of metrics to floats, which are copied to the host in one transfer."""
    scalars = [*chain.from_iterable(metrics.sums.values()), *metrics.maxima.values()]
    device_scalars = [scalar for scalar in scalars if isinstance(scalar, Tensor)]
    if not device_scalars:
        return metrics

    floats = torch.stack(device_scalars).tolist()
    float_by_id = {id(scalar): value for scalar, value in zip(device_scalars, floats, strict=True)}

    def to_float(scalar: Any) -> Any:
        return float_by_id.get(id(scalar), scalar)

    return Metrics(
        {name: (to_float(total), to_float(count)) for name, (total, count) in metrics.sums.items()},
        {name: to_float(maximum) for name, maximum in metrics.maxima.items()},
    )


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Gather the small picklable ``value`` of every rank in ``group``, by default the world.

    Returns the values in the order of ranks. Collective over the group.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def run_on_all_ranks_or_raise(
    action: Callable[[], Any],
    purpose: str,
    group: Any = None,
) -> list[Any]:
    """Run ``action`` on every rank and return the results by rank; if it fails on one rank, raise on all.

    If only the failed rank raised, all other ranks would wait for it in their next collective. Results must
    be small and picklable. ``purpose`` completes the message "could not …". Raises the UserError of the
    lowest rank that has one, or else a RuntimeError with the errors of all failed ranks. Collective over the
    group.
    """
    result: Any = None
    failure: Exception | str | None = None
    try:
        result = action()
    except UserError as error:
        failure = error
    except Exception as error:
        failure = f"rank {device.rank()}: {error!r}"

    outcomes = gather_objects((result, failure), group)
    failures = [rank_failure for _, rank_failure in outcomes if rank_failure is not None]

    # Prefer a UserError, which describes what the user must change.
    for rank_failure in failures:
        if isinstance(rank_failure, UserError):
            raise rank_failure
    if failures:
        raise RuntimeError(f"could not {purpose}: " + "; ".join(failures))
    return [rank_result for rank_result, _ in outcomes]


def broadcast_tensor(tensor: Tensor, source: int, group: Any) -> None:
    """Broadcast a contiguous tensor in place, bit for bit, from the rank ``source`` within the group.

    Collective over the group.
    """
    if dist.get_world_size(group) == 1:
        return

    # Broadcast bytes, since a backend may not support the dtype.
    tensor_bytes = tensor.view(-1).view(torch.uint8)
    source_rank = dist.get_global_rank(group, source)
    dist.broadcast(tensor_bytes, source_rank, group=group)


def broadcast_object(value: Any, ranks: tuple[int, ...]) -> Any:
    """Broadcast the small picklable ``value`` of the first rank in ``ranks`` to all ``ranks``; return it.

    The communicator of ``ranks`` must exist. Collective over ``ranks``.
    """
    if len(ranks) == 1:
        return value

    group = communicator(ranks)
    if dist.get_rank() == ranks[0]:
        _send_object(value, ranks[0], group)
        return value
    return _receive_object(ranks[0], group)


def _send_object(value: Any, source: int, group: Any) -> None:
    """Broadcast a pickled object, preceded by its length in bytes; other ranks call `_receive_object`."""
    pickled = pickle.dumps(value)
    length = len(pickled).to_bytes(_LENGTH_BYTES, "little")
    head = pickled[:_HEAD_BYTES]
    tail = pickled[_HEAD_BYTES:]

    # Send a short object in one message: a second message would double the latency between engine steps.
    first_message = torch.zeros(_FIRST_MESSAGE_BYTES, dtype=torch.uint8, device=device.host())
    content = torch.frombuffer(bytearray(length + head), dtype=torch.uint8)
    first_message[: len(content)] = content
    dist.broadcast(first_message, source, group=group)

    if tail:
        second_message = torch.frombuffer(bytearray(tail), dtype=torch.uint8)
        dist.broadcast(second_message, source, group=group)


def _receive_object(source: int, group: Any) -> Any:
    """Return the object that `_send_object` broadcasts."""
    first_message = torch.zeros(_FIRST_MESSAGE_BYTES, dtype=torch.uint8, device=device.host())
    dist.broadcast(first_message, source, group=group)

    content = first_message.numpy().tobytes()
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    pickled = content[_LENGTH_BYTES : _LENGTH_BYTES + length]
    if len(pickled) < length:
        tail = torch.empty(length - len(pickled), dtype=torch.uint8, device=device.host())
        dist.broadcast(tail, source, group=group)
        pickled += tail.numpy().tobytes()
    return pickle.loads(pickled)


def store_increment(name: str) -> int:
    """Add 1 to the counter ``name`` in the job's store and return its previous value, initially 0.

    The increment is atomic: no two ranks receive the same value.
    """
    return _add_to_counter(name, 1) - 1


def store_value(name: str) -> int:
    """Return the counter ``name`` in the job's store: the number of `store_increment` calls of all ranks."""
    return _add_to_counter(name, 0)


def _add_to_counter(name: str, increment: int) -> int:
    """Add to a counter in the job's store and return its new value."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.add(f"counter {name}", increment)


def sum_over_ranks(values: Tensor, group: Any = None) -> Tensor:
    """Sum a tensor element-wise over the group, in place, and return it.

    Integer sums wrap around on overflow. Collective over the group.
    """
    dist.all_reduce(values, group=group)
    return values


def max_over_ranks(values: Tensor, group: Any = None) -> Tensor:
    """Compute the element-wise maximum of a tensor over the group, in place, and return it.

    Collective over the group.
    """
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def global_rank(group: Any = None) -> int:
    """Return this process's global rank, which torch's collectives over ``group`` expect as source or target.

    Without ``group``, and for a group of ranks of this job, it is the rank in the job. In a group across jobs
    (`join_cross_job_group`) torch treats the rank in the group as the global rank.
    """
    if group is None:
        return dist.get_rank()
    return dist.get_global_rank(group, group.rank())


def barrier() -> None:
    """Wait for every rank. Collective over the world."""
    dist.barrier()
