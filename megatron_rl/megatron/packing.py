"""Share rows out over data-parallel ranks and pack them into micro-batches: pure and ragged.

Every rank computes the same partition from the same lengths, so nobody has to be told.
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


def balance(work: Sequence[float], parts: int) -> list[list[int]]:
    """Share items out so that the parts' sums of work are close: largest first, to the least loaded.

    Equal inputs give equal outputs; items keep their order inside a part. Longest-processing-time rule
    (Graham 1969): the largest sum is at most 4/3 of the best possible.
    """
    loads = [(0.0, part) for part in range(parts)]
    heapq.heapify(loads)
    result: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(work)), key=lambda item: (-work[item], item)):
        load, part = heapq.heappop(loads)
        result[part].append(item)
        heapq.heappush(loads, (load + work[item], part))
    return [sorted(part) for part in result]


def row_work(lengths: Sequence[int], tokens_per_quadratic: float) -> list[float]:
    """Return each row's work in token units: linear layers plus causal attention.

    ``tokens_per_quadratic`` is the length at which attention costs as much as everything else.
    """
    return [length * (1.0 + length / tokens_per_quadratic) for length in lengths]


def partition(
    lengths: Sequence[int],
    data_parallel: int,
    tokens_per_microbatch: int,
    multiple: int = 1,
    tokens_per_quadratic: float = 1e9,
) -> list[list[list[int]]]:
    """Return rows per data-parallel rank per micro-batch; every rank gets the same number of micro-batches.

    Rows are first shared out by `row_work`. The number of micro-batches is the smallest, rounded up to
    ``multiple``, at which the rank that needs most stays within ``tokens_per_microbatch`` (a single longer
    row makes a micro-batch of its own). Where packing all rows together takes fewer, the ranks get those
    micro-batches instead, each the same number of them. Micro-batches may be empty where there are fewer
    rows than places.
    """
    places = -(-len(bin_packing(lengths, tokens_per_microbatch)) // data_parallel)
    fewest = -(-max(1, places) // multiple) * multiple
    shares = balance(row_work(lengths, tokens_per_quadratic), data_parallel)
    result = []
    for share in shares:
        parts = _fit([lengths[row] for row in share], tokens_per_microbatch, fewest)
        if parts is None:
            return _deal(lengths, data_parallel, tokens_per_microbatch, fewest, tokens_per_quadratic)
        result.append([[share[index] for index in part] for part in parts])
    return result


def _deal(
    lengths: Sequence[int], ranks: int, budget: int, count: int, tokens_per_quadratic: float
) -> list[list[list[int]]]:
    """Pack all rows into ``ranks * count`` micro-batches and share these out by work, ``count`` to a rank."""
    parts = _fit(lengths, budget, ranks * count)
    assert parts is not None, "the rows fit into so many micro-batches"
    work = row_work(lengths, tokens_per_quadratic)
    loads = [sum(work[row] for row in part) for part in parts]
    result: list[list[list[int]]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for part in sorted(range(len(parts)), key=lambda part: (-loads[part], part)):
        rank = min((r for r in range(ranks) if len(result[r]) < count), key=lambda r: totals[r])
        result[rank].append(parts[part])
        totals[rank] += loads[part]
    return result


def _fit(lengths: Sequence[int], budget: int, count: int) -> list[list[int]] | None:
    """Put rows into ``count`` parts within the budget: balanced ones where that works, else packed tight."""
    parts = balance([float(length) for length in lengths], count)
    if all(len(part) <= 1 or sum(lengths[item] for item in part) <= budget for part in parts):
        return parts
    parts = bin_packing(lengths, budget)
    return parts + [[] for _ in range(count - len(parts))] if len(parts) <= count else None


def bin_packing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Put items into as few bins of ``budget`` as can be found; an item over the budget gets its own bin.

    Best fit decreasing (Johnson 1974: at most 11/9 of the fewest, plus 1). Where that misses the lower bound
    of `fewest_bins` and the items are no more than `SEARCHED`, fewer are searched for, exhaustively up to
    `STEPS` placements. Equal inputs give equal outputs; items keep their order inside a bin.
    """
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left in each bin, sorted
    for item in order:
        place = bisect.bisect_left(room, (lengths[item], 0))
        if place == len(room):
            bins.append([item])
            bisect.insort(room, (max(budget - lengths[item], 0), len(bins) - 1))
        else:
            left, chosen = room.pop(place)
            bins[chosen].append(item)
            bisect.insort(room, (left - lengths[item], chosen))
    if len(order) <= SEARCHED:
        fewest = fewest_bins(lengths, budget)
        while len(bins) > fewest:
            better = _search([(item, min(lengths[item], budget)) for item in order], budget, len(bins) - 1)
            if better is None:
                break
            bins = better
    return [sorted(part) for part in bins]


SEARCHED = 64
"""So many rows can be searched for a tighter packing; of more, the last micro-batch is a small part."""
STEPS = 20_000
"""So many placements are tried, a few hundredths of a second."""


def fewest_bins(lengths: Sequence[int], budget: int) -> int:
    """Return a number of bins that no packing is below (Martello & Toth 1990, their bound L2).

    Items over ``budget - k`` need bins of their own with no room for those of k or more; items over half a
    bin need bins of their own; what does not fit into their room needs more.
    """
    sizes = sorted(min(length, budget) for length in lengths)
    best = -(-sum(sizes) // budget)
    for smallest in {0, *(size for size in sizes if 2 * size <= budget)}:
        large = [size for size in sizes if size > budget - smallest]
        middle = [size for size in sizes if budget - smallest >= size and 2 * size > budget]
        small = sum(size for size in sizes if 2 * size <= budget and size >= smallest)
        rest = small - (len(middle) * budget - sum(middle))
        best = max(best, len(large) + len(middle) + max(0, -(-rest // budget)))
    return best


def _search(items: list[tuple[int, int]], budget: int, count: int) -> list[list[int]] | None:
    """Try to place items (number, size), the largest first, into ``count`` bins; None where that fails."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [budget] * count
    steps = 0

    def place(depth: int) -> bool:
        nonlocal steps
        if depth == len(items):
            return True
        item, size = items[depth]
        for index in {left: index for index, left in enumerate(room) if left >= size}.values():
            steps += 1
            if steps > STEPS:
                return False
            bins[index].append(item)
            room[index] -= size
            if place(depth + 1):
                return True
            room[index] += size
            bins[index].pop()
        return False

    return bins if place(0) else None


@dataclass
class PackedRows(PackedSeqParams):
    """Carry the row boundaries of one packed sequence to attention and rotary embedding.

    ``positions`` count from 0 in each row, for the tokens of this context-parallel rank. ``buckets`` hold
    rows of similar length: (``index`` [rows, longest] into the whole sequence); ``restore`` [T] finds each
    token in the buckets' flattened outputs. Attention of Transformer Engine's has ``whole`` instead, the
    boundaries of all rows. The format name keeps Megatron's own treatment of packed sequences away.
    """

    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    buckets: tuple[Tensor, ...] = ()
    restore: Tensor = field(default_factory=lambda: torch.empty(0))
    whole: PackedSeqParams | None = None

    @property
    def places(self) -> int:
        """Return how many tokens attention works on, the padding inside buckets counted."""
        return sum(bucket.numel() for bucket in self.buckets)

    def fill(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return the buckets [rows, longest, …] of ``tokens`` [T, …]; nothing may be learned from padding."""
        return _Fill.apply(tokens, self)

    def join(self, buckets: Sequence[Tensor]) -> Tensor:
        """Return [T, …], the tokens of buckets [rows * longest, …] without their padding."""
        return _Join.apply(self, *buckets)


class _Fill(torch.autograd.Function):
    """Gather both ways: no gradient reaches padding, so none need be summed, which is slow."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, packed: PackedRows) -> tuple[Tensor, ...]:
        ctx.restore = packed.restore
        return tuple(
            tokens.index_select(0, index.flatten()).view(*index.shape, *tokens.shape[1:])
            for index in packed.buckets
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _concatenated([value.flatten(0, 1) for value in gradients]).index_select(0, ctx.restore), None


class _Join(torch.autograd.Function):
    """Gather, and put gradients back where each token was."""

    @staticmethod
    def forward(ctx: Any, packed: PackedRows, *buckets: Tensor) -> Tensor:
        ctx.packed = packed
        return _concatenated(buckets).index_select(0, packed.restore)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        packed = ctx.packed
        whole = gradient.new_zeros(packed.places, *gradient.shape[1:])
        whole.index_copy_(0, packed.restore, gradient)
        return None, *whole.split([index.numel() for index in packed.buckets])


def _concatenated(buckets: Sequence[Tensor]) -> Tensor:
    return buckets[0] if len(buckets) == 1 else torch.cat(list(buckets))


def pack_rows(lengths: Sequence[int], target: torch.device, part: int = 0, parts: int = 1) -> PackedRows:
    """Prepare block-diagonal causal attention over rows that lie one after another.

    Rows are gathered by length into buckets, so that attention pads a row of more than 8 tokens by less than
    a quarter and nothing else pads at all. This rank holds the tokens of one ``part`` of ``parts`` equal
    ones.
    """
    by_size: dict[int, list[int]] = {}
    starts = [0]
    for row, length in enumerate(lengths):
        by_size.setdefault(_bucket_size(length), []).append(row)
        starts.append(starts[-1] + length)
    buckets = []
    restore = torch.empty(starts[-1], dtype=torch.long)
    offset = 0
    for size in sorted(by_size):
        rows = by_size[size]
        longest = max(lengths[row] for row in rows)
        first = torch.tensor([starts[row] for row in rows])
        last = torch.tensor([starts[row + 1] - 1 for row in rows])
        columns = torch.arange(longest)
        # Past its end a row repeats its last token: causal attention never looks there.
        index = torch.minimum(first[:, None] + columns, last[:, None])
        real = first[:, None] + columns <= last[:, None]
        restore[index[real]] = (torch.arange(index.numel()).view_as(index) + offset)[real]
        buckets.append(index.to(target))
        offset += index.numel()
    return PackedRows(
        qkv_format="rows",
        positions=_positions(lengths, part, parts).to(target),
        buckets=tuple(buckets),
        restore=restore.to(target),
    )


def _bucket_size(length: int) -> int:
    """Return 8, or the next of four sizes in each power of two."""
    step = max(2, 1 << (length - 1).bit_length() >> 3)
    return max(8, -(-length // step) * step)


def pack_whole_rows(
    lengths: Sequence[int], target: torch.device, part: int = 0, parts: int = 1
) -> PackedRows:
    """Prepare the same for kernels that know rows by their boundaries, and pad nothing."""
    positions = _positions(lengths, part, parts).to(target)
    whole = pack_for_transformer_engine(lengths, target)
    return PackedRows(qkv_format="rows", positions=positions, whole=whole)


def _positions(lengths: Sequence[int], part: int, parts: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths]).chunk(parts)[part]


def pack_for_transformer_engine(lengths: Sequence[int], target: torch.device) -> PackedSeqParams:
    """Return the row boundaries in the form of Transformer Engine's variable-length attention (THD).

    Its ``DotProductAttention`` takes boundaries [rows + 1] int32 of rows that lie one after another, and the
    longest row so that it need not ask the device. Padding at the end is a row of its own: with nothing
    between the rows the padded boundaries stay away, which every backend of it supports.
    """
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(target)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
