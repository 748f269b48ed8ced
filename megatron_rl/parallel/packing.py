"""Share rows out over data-parallel ranks and pack them into micro-batches: pure and ragged.

Every rank computes the same partition from the same lengths, so nobody has to be told.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

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

    The number is the smallest, rounded up to ``multiple``, at which balanced micro-batches stay within
    ``tokens_per_microbatch`` (a single longer row makes a micro-batch of its own). Micro-batches may be
    empty where there are fewer rows than places.
    """
    shares = balance(row_work(lengths, tokens_per_quadratic), data_parallel)
    counts = [_smallest_count([lengths[row] for row in share], tokens_per_microbatch) for share in shares]
    count = -(-max(counts) // multiple) * multiple
    result = []
    for share in shares:
        parts = balance([float(lengths[row]) for row in share], count)
        result.append([[share[index] for index in part] for part in parts])
    return result


def _smallest_count(lengths: Sequence[int], budget: int) -> int:
    count = max(1, -(-sum(lengths) // budget))
    while count < len(lengths):
        parts = balance([float(length) for length in lengths], count)
        if all(len(part) <= 1 or sum(lengths[item] for item in part) <= budget for part in parts):
            break
        count += 1
    return count


@dataclass
class PackedRows(PackedSeqParams):
    """Carry the row boundaries of one packed sequence to attention and rotary embedding.

    ``positions`` [T] counts from 0 in each row. ``buckets`` hold rows of similar length:
    (``index`` [rows, longest] into the sequence); ``restore`` [T] finds each token in the buckets'
    flattened outputs. Used with attention that is our own; the format name keeps Megatron's own
    treatment of packed sequences away.
    """

    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    buckets: tuple[Tensor, ...] = ()
    restore: Tensor = field(default_factory=lambda: torch.empty(0))


def pack_rows(lengths: Sequence[int], target: torch.device) -> PackedRows:
    """Prepare block-diagonal causal attention over rows that lie one after another.

    Rows are gathered by length into buckets (powers of two), so that attention pads a row to less
    than twice its length and nothing else pads at all.
    """
    by_size: dict[int, list[int]] = {}
    starts = [0]
    for row, length in enumerate(lengths):
        by_size.setdefault(max(8, 1 << (length - 1).bit_length()), []).append(row)
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
    positions = torch.cat([torch.arange(length) for length in lengths])
    return PackedRows(
        qkv_format="rows", positions=positions.to(target), buckets=tuple(buckets), restore=restore.to(target)
    )


def pack_for_transformer_engine(lengths: Sequence[int], target: torch.device) -> PackedSeqParams:
    """Return the row boundaries in the form of Transformer Engine's variable-length attention."""
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(target)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
