"""Partition of rows (sequences) over data-parallel ranks, and their packing into micro-batches.

All functions are pure and depend only on the rows' lengths. Every rank computes the same partition, without
communication.
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
"""Largest number of rows for which a tighter packing is searched. With more rows, an unnecessary micro-batch
costs only a small fraction of the work."""
LENGTH_MULTIPLE = 8
"""Multiple to which the length of the longest row is rounded up for attention kernels."""
MAX_PLACEMENTS = 20_000
"""Largest number of placements that a search tries, which takes a few hundredths of a second."""


def balance_work(work: Sequence[float], bins: int) -> list[list[int]]:
    """Distribute items over ``bins`` bins with similar sums of work; return the items of each bin.

    Longest-processing-time rule (Graham 1969): the largest remaining item goes to the least loaded bin. The
    largest sum is at most 4/3 of the optimum. The result is deterministic; items keep their order inside a
    bin.
    """
    # Ties are broken by the index of bin and item, so that every rank computes the same result.
    loads = [(0.0, index) for index in range(bins)]
    heapq.heapify(loads)

    assignment: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(work)), key=lambda item: (-work[item], item)):
        load, index = heapq.heappop(loads)
        assignment[index].append(item)
        heapq.heappush(loads, (load + work[item], index))
    return [sorted(items) for items in assignment]


def compute_row_work(lengths: Sequence[int], attention_crossover_length: float) -> list[float]:
    """Compute each row's work, linear layers plus causal attention, in units of one token's linear layers.

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
    """Assign rows to data-parallel ranks and micro-batches: return row indices by rank, then by micro-batch.

    All ranks have the same number of micro-batches: the smallest multiple of ``multiple`` with which no
    micro-batch exceeds ``tokens_per_microbatch``. A row over this limit is alone in its micro-batch, and with
    few rows some micro-batches are empty. ``attention_crossover_length`` is the row length at which attention
    costs as much as the linear layers.

    Rows are first distributed over ranks by `compute_row_work`. If the rows of a rank then need too many
    micro-batches, all rows are packed together, and complete micro-batches are distributed over ranks.
    """
    # Packing all rows together gives a lower bound for the number of micro-batches per rank.
    min_count = -(-len(pack_into_bins(lengths, tokens_per_microbatch)) // data_parallel)
    microbatches_per_rank = -(-max(1, min_count) // multiple) * multiple

    # Balance rows over ranks, then pack the rows of each rank separately.
    rows_by_rank = balance_work(compute_row_work(lengths, attention_crossover_length), data_parallel)
    microbatches_by_rank = []
    for rank_rows in rows_by_rank:
        rank_lengths = [lengths[row] for row in rank_rows]
        bins = _fit_into_bins(rank_lengths, tokens_per_microbatch, microbatches_per_rank)
        if bins is None:
            return _pack_all_rows(
                lengths,
                data_parallel,
                tokens_per_microbatch,
                microbatches_per_rank,
                attention_crossover_length,
            )

        # Bins contain indices into ``rank_rows``: replace them by row indices.
        microbatches = []
        for bin_items in bins:
            microbatches.append([rank_rows[index] for index in bin_items])
        microbatches_by_rank.append(microbatches)
    return microbatches_by_rank


def _pack_all_rows(
    lengths: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    microbatches_per_rank: int,
    attention_crossover_length: float,
) -> list[list[list[int]]]:
    """Pack all rows into micro-batches of at most ``max_tokens``, and balance the work of the ranks.

    Returns row indices by rank, then by micro-batch.
    """
    microbatches = _fit_into_bins(lengths, max_tokens, num_ranks * microbatches_per_rank)
    assert microbatches is not None, "the number of micro-batches was computed so that all rows fit"

    row_work = compute_row_work(lengths, attention_crossover_length)
    microbatch_work = [sum(row_work[row] for row in rows) for rows in microbatches]
    microbatches_by_rank: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    rank_work = [0.0] * num_ranks

    # Assign the heaviest micro-batch first, to the least loaded rank that still needs micro-batches.
    heaviest_first = sorted(range(len(microbatches)), key=lambda index: (-microbatch_work[index], index))
    for index in heaviest_first:
        open_ranks = [
            rank for rank in range(num_ranks) if len(microbatches_by_rank[rank]) < microbatches_per_rank
        ]
        rank = min(open_ranks, key=lambda rank: rank_work[rank])
        microbatches_by_rank[rank].append(microbatches[index])
        rank_work[rank] += microbatch_work[index]
    return microbatches_by_rank


def _fit_into_bins(
    lengths: Sequence[int],
    budget: int,
    num_bins: int,
) -> list[list[int]] | None:
    """Distribute rows over ``num_bins`` bins of ``budget`` tokens, balanced if possible, otherwise packed.

    Returns None if the rows do not fit. A row over the budget fits if it is alone in its bin.
    """
    # Prefer balanced bins: with micro-batches of equal size, pipeline stages do not wait for each other.
    balanced_bins = balance_work([float(length) for length in lengths], num_bins)
    bins_fit = True
    for rows in balanced_bins:
        if len(rows) > 1 and sum(lengths[row] for row in rows) > budget:
            bins_fit = False
    if bins_fit:
        return balanced_bins

    bins = pack_into_bins(lengths, budget)
    if len(bins) > num_bins:
        return None
    empty_bins: list[list[int]] = [[] for _ in range(num_bins - len(bins))]
    return bins + empty_bins


def pack_into_bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Pack items into as few bins of ``budget`` tokens as possible; an item over the budget has its own bin.

    Best fit decreasing (Johnson 1974) needs at most 11/9 of the minimum number of bins, plus 1. If the result
    exceeds the lower bound of `min_bins_bound`, and there are at most `MAX_SEARCHED_ROWS` items, a tighter
    packing is searched with at most `MAX_PLACEMENTS` placements. The result is deterministic; items keep
    their order inside a bin.
    """
    largest_first = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    bins: list[list[int]] = []
    # Sorted pairs (free tokens, index of the bin).
    free_tokens: list[tuple[int, int]] = []

    # Put each item into the fullest bin that still has enough free tokens.
    for item in largest_first:
        position = bisect.bisect_left(free_tokens, (lengths[item], 0))
        if position == len(free_tokens):
            bins.append([item])
            bisect.insort(free_tokens, (max(budget - lengths[item], 0), len(bins) - 1))
        else:
            bin_free_tokens, bin_index = free_tokens.pop(position)
            bins[bin_index].append(item)
            bisect.insort(free_tokens, (bin_free_tokens - lengths[item], bin_index))

    # Search for a packing with one bin less, until the lower bound is reached or the search fails.
    if len(largest_first) <= MAX_SEARCHED_ROWS:
        lower_bound = min_bins_bound(lengths, budget)
        items = [(item, min(lengths[item], budget)) for item in largest_first]
        while len(bins) > lower_bound:
            tighter_bins = _search_packing(items, budget, len(bins) - 1)
            if tighter_bins is None:
                break
            bins = tighter_bins
    return [sorted(bin_items) for bin_items in bins]


def min_bins_bound(lengths: Sequence[int], budget: int) -> int:
    """Compute a lower bound on the number of bins (Martello & Toth 1990, bound L2).

    The bound is the largest of several bounds, one for each size k of at most half a bin. Large items (over
    ``budget - k``) need one bin each, and leave no room for items of k or more. Medium items (over half a
    bin) need one bin each, too. Small items (from k to half a bin) need further bins if they do not fit
    beside the medium items.
    """
    # The simplest bound is the sum of all sizes divided by the budget.
    sizes = sorted(min(length, budget) for length in lengths)
    bound = -(-sum(sizes) // budget)

    half_or_less = [size for size in sizes if 2 * size <= budget]
    for min_size in {0, *half_or_less}:
        large_items = [size for size in sizes if size > budget - min_size]
        medium_items = [size for size in sizes if budget - min_size >= size and 2 * size > budget]
        small_tokens = sum(size for size in half_or_less if size >= min_size)
        free_tokens = len(medium_items) * budget - sum(medium_items)
        further_bins = max(0, -(-(small_tokens - free_tokens) // budget))
        bound = max(bound, len(large_items) + len(medium_items) + further_bins)
    return bound


def _search_packing(
    items: list[tuple[int, int]],
    budget: int,
    num_bins: int,
) -> list[list[int]] | None:
    """Search for a packing of (item, size) pairs, largest first, into ``num_bins`` bins of ``budget`` tokens.

    Returns the items of each bin, or None if no packing was found within `MAX_PLACEMENTS` placements.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    free_tokens = [budget] * num_bins
    num_placements = 0

    def place_items_from(position: int) -> bool:
        nonlocal num_placements
        if position == len(items):
            return True
        item, size = items[position]

        # Bins with the same number of free tokens are interchangeable: try only one of them.
        bin_by_free_tokens = {free: index for index, free in enumerate(free_tokens) if free >= size}
        for bin_index in bin_by_free_tokens.values():
            num_placements += 1
            if num_placements > MAX_PLACEMENTS:
                return False

            # Undo the placement if the remaining items do not fit.
            bins[bin_index].append(item)
            free_tokens[bin_index] -= size
            if place_items_from(position + 1):
                return True
            free_tokens[bin_index] += size
            bins[bin_index].pop()
        return False

    if not place_items_from(0):
        return None
    return bins


@dataclass
class PackedRows(PackedSeqParams):
    """Row boundaries of one packed sequence of T tokens, for attention and rotary embedding.

    Variable-length kernels read ``boundaries``. Layers without such a kernel process buckets: batches of rows
    of similar length, padded to the longest row. They gather the rows by the indices ``buckets``, and restore
    the packed order by the index ``restore``. The ``qkv_format`` "rows"
    is unknown to Megatron, which therefore skips its own handling of packed sequences ("thd").

    Example: rows of 2 and 1 tokens have ``positions`` [0, 1, 0], one bucket [[0, 1], [2, 2]] and ``restore``
    [0, 1, 2].
    """

    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    """[T / context] positions of this context-parallel rank's tokens, counted from 0 in each row."""
    buckets: tuple[Tensor, ...] = ()
    """Buckets of rows of similar length, each [rows, longest]: indices of tokens in the whole sequence."""
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

        A bucket is a batch of rows of similar length, padded to the longest row. The backward pass does not
        read the gradients of padding, which must be zero: no real token may attend to padding, and
        `join_buckets` drops the outputs of padding.
        """
        return _FillBuckets.apply(tokens, self)

    def join_buckets(self, buckets: Sequence[Tensor]) -> Tensor:
        """Gather the tokens [T, ...] of buckets [rows * longest, ...], without their padding."""
        return _JoinBuckets.apply(self, *buckets)


class _FillBuckets(torch.autograd.Function):
    """Gather of tokens into buckets, with a backward pass that gathers too.

    Autograd's backward pass would scatter-add the gradients, which is slow. Padding repeats tokens, but has
    no gradient, so each token has exactly one gradient to gather.
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
        bucket_gradients = _concatenate([gradient.flatten(0, 1) for gradient in gradients])
        return bucket_gradients.index_select(0, ctx.restore), None


class _JoinBuckets(torch.autograd.Function):
    """Gather of the T tokens of a packed sequence from its buckets, without their padding.

    This is the inverse of `_FillBuckets`. In the backward pass the gradients of padding are zero.
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
        packed_rows = ctx.packed
        bucket_gradients = gradient.new_zeros(packed_rows.bucket_tokens, *gradient.shape[1:])
        bucket_gradients.index_copy_(0, packed_rows.restore, gradient)
        return None, *bucket_gradients.split([index.numel() for index in packed_rows.buckets])


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
    """Build the `PackedRows` of a packed sequence with buckets of rows of similar length, as CPU tensors.

    Attention pads each row to the longest row of its bucket, which lengthens a row of more than 8 tokens by
    less than a quarter. Other layers need no padding. This rank has shard ``context_rank`` of ``context``
    equal shards of the sequence.
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
        first_tokens = torch.tensor([starts[row] for row in rows])
        last_tokens = torch.tensor([starts[row + 1] - 1 for row in rows])
        columns = torch.arange(row_length)

        # Pad a row by repeating its last token: under causal attention no real token attends to the padding.
        unclamped_index = first_tokens[:, None] + columns
        token_index = torch.minimum(unclamped_index, last_tokens[:, None])
        is_real = unclamped_index <= last_tokens[:, None]
        bucket_index = torch.arange(token_index.numel()).view_as(token_index) + offset
        restore[token_index[is_real]] = bucket_index[is_real]

        buckets.append(token_index)
        offset += token_index.numel()

    return PackedRows(
        qkv_format="rows",
        positions=_token_positions(lengths, context_rank, context),
        buckets=tuple(buckets),
        restore=restore,
    )


def _bucket_size(length: int) -> int:
    """Return the maximum row length of the bucket that rows of ``length`` tokens belong to.

    The maxima are 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, …, with four steps from each power of two to the
    next.
    """
    next_power_of_two = 1 << (length - 1).bit_length()
    step = max(2, next_power_of_two // 8)
    return max(8, -(-length // step) * step)


def make_varlen_rows(
    lengths: Sequence[int],
    context_rank: int = 0,
    context: int = 1,
) -> PackedRows:
    """Build the `PackedRows` of a packed sequence for variable-length kernels, as CPU tensors.

    The result has ``cu_seqlens`` and no buckets (padded batches of rows), so no row is padded. This rank has
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
    context_size: int,
) -> Tensor:
    """Return the position of each token of one context-parallel shard, counted from 0 in its row."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    return positions.chunk(context_size)[context_rank]


def make_row_boundaries(lengths: Sequence[int]) -> PackedSeqParams:
    """Build Megatron's `PackedSeqParams` of consecutive rows for variable-length attention (THD), on the CPU.

    ``cu_seqlens`` [rows + 1] int32 are the cumulative lengths of the rows, ``max_seqlen`` is an upper bound
    of the length of a row. Padding at the end of the sequence must be a separate row in ``lengths``. Rows
    have no gaps, so ``cu_seqlens_*_padded`` are not needed, and every backend is supported.
    """
    # If `max_seqlen` is missing, Transformer Engine reads the largest length from the device. If no fused
    # attention kernel is available, Transformer Engine uses a softmax kernel that needs a multiple of 8.
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    max_length = -(-max(lengths) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max_length,
        max_seqlen_kv=max_length,
    )
