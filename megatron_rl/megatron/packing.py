"""Partition of rows (sequences) over data-parallel ranks, and their packing into micro-batches.

Pure functions of the rows' lengths: every rank computes the same partition, so that it need not be sent.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

MAX_SEARCHED_ROWS = 64
"""Largest number of rows for which a tighter packing is searched. With more rows, one micro-batch too many is
a small fraction of the work."""
LENGTH_MULTIPLE = 8
"""Attention kernels get the length of the longest row, rounded up to a multiple of this."""
MAX_PLACEMENTS = 20_000
"""Largest number of placements that a search tries, which takes a few hundredths of a second."""


def balance_work(work: Sequence[float], bins: int) -> list[list[int]]:
    """Distribute items over ``bins`` so that the sums of work are close; return the items of each bin.

    Longest-processing-time rule (Graham 1969): the largest remaining item goes to the least loaded bin. The
    largest sum is at most 4/3 of the best possible. Equal inputs give equal outputs; items keep their order
    inside a bin.
    """
    # Ties are broken by the index of bin and item, so that every rank gets the same result.
    loads = [(0.0, index) for index in range(bins)]
    heapq.heapify(loads)

    assignment: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(work)), key=lambda item: (-work[item], item)):
        load, index = heapq.heappop(loads)
        assignment[index].append(item)
        heapq.heappush(loads, (load + work[item], index))
    return [sorted(items) for items in assignment]


def compute_row_work(lengths: Sequence[int], attention_crossover_length: float) -> list[float]:
    """Return each row's work, linear layers plus causal attention, in units of one token's linear layers.

    ``attention_crossover_length`` is the row length at which attention costs as much as the linear layers.
    """
    return [length * (1.0 + length / attention_crossover_length) for length in lengths]


def partition_rows(
    lengths: Sequence[int],
    data_parallel: int,
    tokens_per_microbatch: int,
    multiple: int = 1,
    attention_crossover_length: float = 1e9,
) -> list[list[list[int]]]:
    """Return the indices of rows by data-parallel rank, then by micro-batch.

    Every rank gets equally many micro-batches. Rows are first distributed over ranks by `compute_row_work`.
    The number of micro-batches per rank is the smallest multiple of ``multiple`` with which no micro-batch
    exceeds ``tokens_per_microbatch``; a longer row is alone in its micro-batch. If the ranks' shares need
    more micro-batches than all rows packed together, the packed micro-batches are distributed instead. With
    few rows some micro-batches are empty. ``attention_crossover_length`` is the row length at which attention
    costs as much as the linear layers.
    """
    # A lower bound for every rank: the micro-batches of all rows packed together.
    min_count = -(-len(pack_into_bins(lengths, tokens_per_microbatch)) // data_parallel)
    count = -(-max(1, min_count) // multiple) * multiple

    # Balance rows over ranks, then pack each rank's share separately.
    shares = balance_work(compute_row_work(lengths, attention_crossover_length), data_parallel)
    microbatches = []
    for share in shares:
        bins = _fit_into_bins([lengths[row] for row in share], tokens_per_microbatch, count)
        if bins is None:
            return _pack_all_rows(
                lengths,
                data_parallel,
                tokens_per_microbatch,
                count,
                attention_crossover_length,
            )

        # The bins have indices into the share: replace them by the indices of rows.
        rows_of_bins = [[share[index] for index in bin_items] for bin_items in bins]
        microbatches.append(rows_of_bins)
    return microbatches


def _pack_all_rows(
    lengths: Sequence[int],
    rank_count: int,
    budget: int,
    count: int,
    attention_crossover_length: float,
) -> list[list[list[int]]]:
    """Pack all rows into micro-batches, ``count`` per rank, and balance the work of the ranks.

    ``budget`` is the largest number of tokens of a micro-batch.
    """
    bins = _fit_into_bins(lengths, budget, rank_count * count)
    assert bins is not None, "the number of micro-batches was computed so that all rows fit"

    work = compute_row_work(lengths, attention_crossover_length)
    loads = [sum(work[row] for row in rows) for rows in bins]
    shares: list[list[list[int]]] = [[] for _ in range(rank_count)]
    totals = [0.0] * rank_count

    # The heaviest bin first, to the least loaded rank with fewer than ``count`` bins.
    for index in sorted(range(len(bins)), key=lambda index: (-loads[index], index)):
        open_ranks = [rank for rank in range(rank_count) if len(shares[rank]) < count]
        rank = min(open_ranks, key=lambda rank: totals[rank])
        shares[rank].append(bins[index])
        totals[rank] += loads[index]
    return shares


def _fit_into_bins(
    lengths: Sequence[int],
    budget: int,
    count: int,
) -> list[list[int]] | None:
    """Distribute rows over ``count`` bins of ``budget`` tokens: balanced if that fits, otherwise packed.

    Returns None if neither fits. A row over the budget fits if it is alone in its bin.
    """
    # Prefer balanced bins: with micro-batches of equal size no pipeline stage waits for another.
    balanced_bins = balance_work([float(length) for length in lengths], count)
    if all(len(items) <= 1 or sum(lengths[item] for item in items) <= budget for items in balanced_bins):
        return balanced_bins

    bins = pack_into_bins(lengths, budget)
    if len(bins) > count:
        return None
    empty_bins: list[list[int]] = [[] for _ in range(count - len(bins))]
    return bins + empty_bins


def pack_into_bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Pack items into few bins of ``budget``; an item over the budget gets its own bin.

    Best fit decreasing (Johnson 1974) needs at most 11/9 of the fewest bins, plus 1. If that is more than the
    lower bound of `min_bins_bound`, a tighter packing is searched for at most `MAX_SEARCHED_ROWS` items, with
    at most `MAX_PLACEMENTS` placements. Equal inputs give equal outputs; items keep their order inside a bin.
    """
    largest_first = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, index of the bin), sorted

    # Each item goes into the fullest bin that has room for it.
    for item in largest_first:
        position = bisect.bisect_left(room, (lengths[item], 0))
        if position == len(room):
            bins.append([item])
            bisect.insort(room, (max(budget - lengths[item], 0), len(bins) - 1))
        else:
            free, index = room.pop(position)
            bins[index].append(item)
            bisect.insort(room, (free - lengths[item], index))

    # Search for a packing with one bin less, until the lower bound is reached or the search fails.
    if len(largest_first) <= MAX_SEARCHED_ROWS:
        lower_bound = min_bins_bound(lengths, budget)
        items = [(item, min(lengths[item], budget)) for item in largest_first]
        while len(bins) > lower_bound:
            tighter = _search_packing(items, budget, len(bins) - 1)
            if tighter is None:
                break
            bins = tighter
    return [sorted(items_of_bin) for items_of_bin in bins]


def min_bins_bound(lengths: Sequence[int], budget: int) -> int:
    """Return a lower bound on the bins that a packing needs (Martello & Toth 1990, their bound L2).

    For each k up to half a bin: every item over ``budget - k`` needs one bin, without room for items of k or
    more. Every other item over half a bin needs one bin too. The remaining items of k or more need further
    bins if they do not fit into the free room of the second kind of bins.
    """
    # The sum of all items is the simplest bound.
    sizes = sorted(min(length, budget) for length in lengths)
    bound = -(-sum(sizes) // budget)

    half_or_less = [size for size in sizes if 2 * size <= budget]
    for smallest in {0, *half_or_less}:
        large = [size for size in sizes if size > budget - smallest]
        medium = [size for size in sizes if budget - smallest >= size and 2 * size > budget]
        small_tokens = sum(size for size in half_or_less if size >= smallest)
        overflow = small_tokens - (len(medium) * budget - sum(medium))
        bound = max(bound, len(large) + len(medium) + max(0, -(-overflow // budget)))
    return bound


def _search_packing(
    items: list[tuple[int, int]],
    budget: int,
    count: int,
) -> list[list[int]] | None:
    """Pack (item, size) pairs, largest first, into ``count`` bins; return None if no packing is found."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [budget] * count
    steps = 0

    def place_from(depth: int) -> bool:
        nonlocal steps
        if depth == len(items):
            return True
        item, size = items[depth]

        # Bins with equal room are interchangeable: try one of each.
        bin_by_room = {free: index for index, free in enumerate(room) if free >= size}
        for index in bin_by_room.values():
            steps += 1
            if steps > MAX_PLACEMENTS:
                return False

            # Undo the placement if the remaining items do not fit.
            bins[index].append(item)
            room[index] -= size
            if place_from(depth + 1):
                return True
            room[index] += size
            bins[index].pop()
        return False

    return bins if place_from(0) else None


@dataclass
class PackedRows(PackedSeqParams):
    """Row boundaries of one packed sequence of T tokens, for attention and rotary embedding.

    Kernels of accelerators use ``boundaries``. Layers without such a kernel gather rows of similar length
    into padded ``buckets`` of token positions, and return to the packed order by the index ``restore``. The
    ``qkv_format`` "rows" is unknown to Megatron, which therefore skips its own treatment of packed
    sequences ("thd").

    Example: rows of 2 and 1 tokens have ``positions`` [0, 1, 0], one bucket [[0, 1], [2, 2]] and ``restore``
    [0, 1, 2].
    """

    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    """[T / context] positions of this context-parallel rank's tokens, counted from 0 in each row."""
    buckets: tuple[Tensor, ...] = ()
    """Rows of similar length: each [rows, longest] indices into the whole sequence."""
    restore: Tensor = field(default_factory=lambda: torch.empty(0))
    """[T] index of each token in the concatenated, flattened buckets."""
    boundaries: PackedSeqParams | None = None
    """Boundaries of all rows of the sequence (THD)."""

    @property
    def bucket_tokens(self) -> int:
        """Return the number of tokens in the buckets, padding included."""
        return sum(bucket.numel() for bucket in self.buckets)

    def fill_buckets(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Gather ``tokens`` [T, ...] into buckets [rows, longest, ...].

        The gradients of padding must be zero.
        """
        return _FillBuckets.apply(tokens, self)

    def join_buckets(self, buckets: Sequence[Tensor]) -> Tensor:
        """Gather the tokens [T, ...] of buckets [rows * longest, ...], without their padding."""
        return _JoinBuckets.apply(self, *buckets)


class _FillBuckets(torch.autograd.Function):
    """Gather of tokens into buckets, whose backward pass is a gather too.

    Autograd would scatter-add the gradients, which is slow. Padding repeats tokens, but has no gradient, so
    each token has exactly one gradient to gather.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        packed: PackedRows,
    ) -> tuple[Tensor, ...]:
        ctx.restore = packed.restore
        features = tokens.shape[1:]
        buckets = []
        for index in packed.buckets:
            bucket = tokens.index_select(0, index.flatten())
            buckets.append(bucket.view(*index.shape, *features))
        return tuple(buckets)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        flat = _concatenate([gradient.flatten(0, 1) for gradient in gradients])
        return flat.index_select(0, ctx.restore), None


class _JoinBuckets(torch.autograd.Function):
    """Gather of the T tokens of a packed sequence from its buckets, without their padding.

    It reverses `_FillBuckets`. In the backward pass padding gets zero gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        packed: PackedRows,
        *buckets: Tensor,
    ) -> Tensor:
        ctx.packed = packed
        return _concatenate(buckets).index_select(0, packed.restore)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        packed = ctx.packed
        flat = gradient.new_zeros(packed.bucket_tokens, *gradient.shape[1:])
        flat.index_copy_(0, packed.restore, gradient)
        return None, *flat.split([index.numel() for index in packed.buckets])


def _concatenate(buckets: Sequence[Tensor]) -> Tensor:
    """Concatenate buckets; a single bucket is returned without a copy."""
    if len(buckets) == 1:
        return buckets[0]
    return torch.cat(list(buckets))


def make_bucketed_rows(
    lengths: Sequence[int],
    context_rank: int = 0,
    context: int = 1,
) -> PackedRows:
    """Return the `PackedRows` of a packed sequence with buckets of rows of similar length, in host memory.

    Rows are gathered by length into buckets, so that attention pads a row of more than 8 tokens by less than
    a quarter. Other layers need no padding. This rank has shard ``context_rank`` of ``context`` equal shards
    of the sequence.
    """
    # Rows of each bucket, and the position of each row's first token.
    starts = [0]
    rows_by_size: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        rows_by_size.setdefault(_bucket_size(length), []).append(row)
        starts.append(starts[-1] + length)

    buckets = []
    restore = torch.empty(starts[-1], dtype=torch.long)
    offset = 0
    for size in sorted(rows_by_size):
        rows = rows_by_size[size]
        row_length = max(lengths[row] for row in rows)
        first = torch.tensor([starts[row] for row in rows])
        last = torch.tensor([starts[row + 1] - 1 for row in rows])
        columns = torch.arange(row_length)

        # Pad a row by repeating its last token: under causal attention no real token attends to the padding.
        unclamped = first[:, None] + columns
        index = torch.minimum(unclamped, last[:, None])
        real = unclamped <= last[:, None]
        bucket_index = torch.arange(index.numel()).view_as(index) + offset
        restore[index[real]] = bucket_index[real]

        buckets.append(index)
        offset += index.numel()

    return PackedRows(
        qkv_format="rows",
        positions=_token_positions(lengths, context_rank, context),
        buckets=tuple(buckets),
        restore=restore,
    )


def _bucket_size(length: int) -> int:
    """Return the largest length of a row that shares a bucket with rows of ``length`` tokens.

    The largest lengths are 8, then four between two powers of two: 10, 12, 14, 16, 20, 24, 28, 32, 40, …
    """
    next_power_of_two = 1 << (length - 1).bit_length()
    step = max(2, next_power_of_two // 8)
    return max(8, -(-length // step) * step)


def make_bounded_rows(
    lengths: Sequence[int],
    context_rank: int = 0,
    context: int = 1,
) -> PackedRows:
    """Return the `PackedRows` of a packed sequence with boundaries instead of buckets, in host memory.

    The rows are consecutive, and attention is computed inside each of them. No row is padded. This rank has
    shard ``context_rank`` of ``context`` equal shards of the sequence.
    """
    return PackedRows(
        qkv_format="rows",
        positions=_token_positions(lengths, context_rank, context),
        boundaries=make_row_boundaries(lengths),
    )


def _token_positions(
    lengths: Sequence[int],
    context_rank: int,
    context: int,
) -> Tensor:
    """Return the position of each token of one context-parallel shard, counted from 0 in its row."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    return positions.chunk(context)[context_rank]


def make_row_boundaries(lengths: Sequence[int]) -> PackedSeqParams:
    """Return the row boundaries in the form of variable-length attention (THD), in host memory.

    Kernels take cumulative lengths [rows + 1] int32 of consecutive rows, and an upper bound of the longest
    row, which Transformer Engine would otherwise read from the device. The bound is a multiple of 8, because
    otherwise Transformer Engine's unfused attention cannot even use its fused softmax. Padding at the end is
    a separate row. Since rows have no gaps, no padded boundaries (``cu_seqlens_*_padded``) are needed, and
    every backend can be used.
    """
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    max_length = -(-max(lengths) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max_length,
        max_seqlen_kv=max_length,
    )
