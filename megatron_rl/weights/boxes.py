"""Boxes of named tensors: who holds what, who needs what, and the regions where the two meet.

Pure integer arithmetic. Ranks with equal boxes are described once, so that a job of many replicas
costs no more than one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from megatron_rl.types import TensorBox

Span = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and size of a box, without its tensor."""


class CoverageError(RuntimeError):
    """Report parameters whose elements are not each written exactly once."""


class UncoveredError(RuntimeError):
    """Report a part of a tensor that is needed and that no rank holds."""


@dataclass(frozen=True)
class BoxGroup:
    """Hold the boxes that each of ``ranks`` has, alike in all but their ``rank`` field.

    ``dtypes`` are those of the storages, by name.
    """

    ranks: tuple[int, ...]
    boxes: tuple[TensorBox, ...]
    dtypes: Mapping[str, torch.dtype]


class Region(NamedTuple):
    """One box of a tensor that every receiver needs and every holder has whole.

    ``dtype`` is the receivers'; ``bytes`` is the box's size in it.
    """

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    holders: tuple[int, ...]
    receivers: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


def regions(sources: Sequence[BoxGroup], destinations: Sequence[BoxGroup]) -> list[Region]:
    """Return the regions that cover every destination box exactly once.

    Sorted as the destinations first name their tensors, then by start. Equal holders, and equal receivers,
    are one object. Raises UncoveredError where a destination box has elements that no source holds.
    """
    ranks = _RankSets()
    held, _ = _by_tensor(sources, ranks)
    needed, dtypes = _by_tensor(destinations, ranks)
    cache: dict[object, list[tuple[Span, tuple[int, ...], tuple[int, ...]]]] = {}
    result: list[Region] = []
    for name, wanted in needed.items():
        have = held.get(name, {})
        # Layers and experts that lie alike are worked out once.
        key = (_signature(have), _signature(wanted))
        if key not in cache:
            cache[key] = _meet(name, have, wanted, ranks)
        itemsize = dtypes[name].itemsize
        for (start, size), holders, receivers in cache[key]:
            bytes_ = math.prod(size) * itemsize
            result.append(Region(name, start, size, holders, receivers, dtypes[name], bytes_))
    return result


def needed_bytes(destinations: Sequence[BoxGroup]) -> dict[int, int]:
    """Return by rank the bytes of the distinct tensor elements it needs."""
    ranks = _RankSets()
    needed, dtypes = _by_tensor(destinations, ranks)
    by_ranks: dict[tuple[int, ...], int] = {}
    for name, wanted in needed.items():
        for (_, size), receivers in disjoint(wanted, ranks).items():
            by_ranks[receivers] = by_ranks.get(receivers, 0) + math.prod(size) * dtypes[name].itemsize
    result: dict[int, int] = {}
    for receivers, count in by_ranks.items():
        for rank in receivers:
            result[rank] = result.get(rank, 0) + count
    return result


class _RankSets:
    """Keep one sorted tuple per set of ranks, so that equal sets are the same object."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._unions: dict[tuple[int, ...], tuple[int, ...]] = {}

    def keep(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the tuple that stands for these ranks."""
        ordered = tuple(sorted(set(ranks)))
        return self._known.setdefault(ordered, ordered)

    def union(self, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the tuple that stands for all ranks of kept tuples."""
        if len(parts) == 1:
            return parts[0]
        key = tuple(id(part) for part in parts)
        if key not in self._unions:
            self._unions[key] = self.keep(rank for part in parts for rank in part)
        return self._unions[key]


def _signature(spans: Mapping[Span, tuple[int, ...]]) -> tuple[tuple[Span, int], ...]:
    return tuple((span, id(ranks)) for span, ranks in spans.items())


def _by_tensor(
    groups: Sequence[BoxGroup], ranks: _RankSets
) -> tuple[dict[str, dict[Span, tuple[int, ...]]], dict[str, torch.dtype]]:
    """Return for each tensor its distinct boxes with all ranks that have them, and its dtype."""
    owners_of: dict[str, dict[Span, list[tuple[int, ...]]]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for group in groups:
        members = ranks.keep(group.ranks)
        for box in group.boxes:
            owners = owners_of.setdefault(box.name, {}).setdefault((box.start, box.size), [])
            if not owners or owners[-1] is not members:
                owners.append(members)
            dtypes[box.name] = group.dtypes[box.storage]
    ordered = {
        name: {span: ranks.union(spans[span]) for span in sorted(spans)} for name, spans in owners_of.items()
    }
    return ordered, dtypes


def _meet(
    name: str,
    have: Mapping[Span, tuple[int, ...]],
    wanted: Mapping[Span, tuple[int, ...]],
    ranks: _RankSets,
) -> list[tuple[Span, tuple[int, ...], tuple[int, ...]]]:
    sources, targets = disjoint(have, ranks), disjoint(wanted, ranks)
    result = []
    for target, receivers in targets.items():
        covered = 0
        for source, holders in sources.items():
            span = intersect(source, target)
            if span is not None:
                covered += math.prod(span[1])
                result.append((span, holders, receivers))
        if covered != math.prod(target[1]):
            raise UncoveredError(
                f"{name}: the box at {list(target[0])} of size {list(target[1])}, needed by ranks "
                f"{list(receivers)}, is held by no rank in {math.prod(target[1]) - covered} elements"
            )
    return result


def intersect(first: Span, second: Span) -> Span | None:
    """Return the part that two boxes share, or None."""
    start, size = [], []
    for begin, count, other, length in zip(first[0], first[1], second[0], second[1], strict=True):
        low, high = max(begin, other), min(begin + count, other + length)
        if low >= high:
            return None
        start.append(low)
        size.append(high - low)
    return tuple(start), tuple(size)


def disjoint(
    spans: Mapping[Span, tuple[int, ...]], ranks: _RankSets | None = None
) -> Mapping[Span, tuple[int, ...]]:
    """Cut overlapping boxes along each other's edges until they are disjoint; ranks of equal parts join."""
    boxes = list(spans)
    if not any(intersect(a, b) for a, b in _near(boxes)):
        return spans
    edges = [
        sorted({edge for start, size in boxes for edge in (start[dim], start[dim] + size[dim])})
        for dim in range(len(boxes[0][0]))
    ]
    cells: dict[Span, set[int]] = {}
    for box, members in spans.items():
        ticks = [
            [edge for edge in edges[dim] if box[0][dim] <= edge <= box[0][dim] + box[1][dim]]
            for dim in range(len(edges))
        ]
        for pairs in itertools.product(*(itertools.pairwise(tick) for tick in ticks)):
            cell = tuple(low for low, _ in pairs), tuple(high - low for low, high in pairs)
            cells.setdefault(cell, set()).update(members)
    keep = (ranks or _RankSets()).keep
    return {cell: keep(cells[cell]) for cell in sorted(cells)}


def _near(boxes: list[Span]) -> Iterable[tuple[Span, Span]]:
    """Return the pairs of sorted boxes whose ranges in the first dimension overlap."""
    for index, first in enumerate(boxes):
        if not first[0]:
            yield from ((first, other) for other in boxes[index + 1 :])
            continue
        end = first[0][0] + first[1][0]
        for other in boxes[index + 1 :]:
            if other[0][0] >= end:
                break
            yield first, other


class BoxIndex:
    """Find the boxes of one rank that contain a region."""

    def __init__(self, boxes: Iterable[TensorBox]) -> None:
        self._by_name: dict[str, list[TensorBox]] = {}
        for box in boxes:
            self._by_name.setdefault(box.name, []).append(box)

    def containing(self, region: Region) -> list[TensorBox]:
        """Return the part of each box that is the region: same start and size, offset in its storage."""
        pieces = []
        for box in self._by_name.get(region.name, ()):
            if intersect((box.start, box.size), (region.start, region.size)) == (region.start, region.size):
                shift = zip(region.start, box.start, box.stride, strict=True)
                offset = box.offset + sum((inner - outer) * stride for inner, outer, stride in shift)
                pieces.append(replace(box, start=region.start, size=region.size, offset=offset))
        return pieces


def view_of(parameter: Tensor, box: TensorBox) -> Tensor:
    """Return the view of a parameter that holds a box."""
    return parameter.as_strided(box.size, box.stride, parameter.storage_offset() + box.offset)


def check_coverage(
    boxes: Sequence[TensorBox], parameters: Mapping[str, Tensor], padding: Mapping[str, int]
) -> dict[str, tuple[tuple[int, int], ...]]:
    """Check that each parameter's elements are written exactly once; return the gaps of padding.

    ``padding`` name -> element of the flattened parameter from which gaps are allowed. Raises
    CoverageError that names every parameter with another gap or a double write.
    """
    by_storage: dict[str, list[TensorBox]] = {}
    for box in boxes:
        by_storage.setdefault(box.storage, []).append(box)
    faults: list[str] = []
    allowed: dict[str, tuple[tuple[int, int], ...]] = {}
    for name, parameter in parameters.items():
        gaps, doubles = _gaps(by_storage.get(name, []), parameter.numel())
        wrong = [gap for gap in gaps if gap[0] < padding.get(name, parameter.numel())]
        if doubles:
            faults.append(f"{name}: {doubles} elements are written more than once")
        if wrong:
            missing = sum(last - first for first, last in wrong)
            faults.append(f"{name}: {missing} of {parameter.numel()} elements are never written")
        if gaps and not wrong:
            allowed[name] = tuple(gaps)
    if faults:
        raise CoverageError("the loader does not fill each parameter exactly once:\n  " + "\n  ".join(faults))
    return allowed


def _gaps(boxes: Sequence[TensorBox], count: int) -> tuple[list[tuple[int, int]], int]:
    """Return the runs of [0, count) outside all boxes, and how many elements lie in several."""
    runs = [_runs(box) for box in boxes]
    first = numpy.concatenate([start for start, _ in runs] + [numpy.array([count])])
    last = numpy.concatenate([start + length for start, length in runs] + [numpy.array([count])])
    order = numpy.argsort(first, kind="stable")
    first, last = first[order], last[order]
    before = numpy.concatenate([[0], numpy.maximum.accumulate(last)[:-1]])
    distance = first - before
    gaps = [(int(before[i]), int(first[i])) for i in numpy.flatnonzero(distance > 0)]
    return gaps, int(-distance[distance < 0].sum())


def _runs(box: TensorBox) -> tuple[numpy.ndarray, int]:
    """Return the first elements of a box's contiguous runs in its storage, and their common length."""
    axes = sorted((stride, size) for stride, size in zip(box.stride, box.size, strict=True) if size > 1)
    length = 1
    while axes and axes[0][0] == length:
        length *= axes.pop(0)[1]
    starts = numpy.array([box.offset], dtype=numpy.int64)
    for stride, size in axes:
        starts = (starts[:, None] + numpy.arange(size) * stride).ravel()
    return starts, length
