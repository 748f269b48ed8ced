"""Boxes of named tensors: intersect the boxes that ranks hold with the boxes that ranks need.

Pure integer arithmetic. Ranks with equal boxes are one group, so that a job of many replicas costs no more
than a job of one.
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

Coordinates = tuple[int, ...]
"""An index per dimension of a tensor, or a size per dimension."""
Span = tuple[Coordinates, Coordinates]
"""Start and size of a box, without its tensor."""
Ranks = tuple[int, ...]
"""Global ranks, sorted."""


class CoverageError(RuntimeError):
    """Error for parameters with elements that are not written exactly once."""


class UncoveredError(RuntimeError):
    """Error for a needed part of a tensor that no rank holds."""


@dataclass(frozen=True)
class BoxGroup:
    """Boxes that several ranks have in common, as holders or as receivers.

    Example: rows 0 to 3 of a weight [8, 16] on tensor-parallel rank 0 of two replicas::

        BoxGroup(
            ranks=(0, 2),
            boxes=(TensorBox("w", (0, 0), (4, 16), -1, "linear.weight", 0, (16, 1)),),
            dtypes={"linear.weight": torch.bfloat16},
        )
    """

    ranks: Ranks
    """Global ranks."""
    boxes: tuple[TensorBox, ...]
    """Boxes of each of these ranks; their ``rank`` field is not meaningful."""
    dtypes: Mapping[str, torch.dtype]
    """Dtype by name of storage."""


class Region(NamedTuple):
    """One box of a tensor that every receiver needs and every holder holds completely."""

    name: str
    """The tensor."""
    start: Coordinates
    """First coordinates of the box, in elements."""
    size: Coordinates
    """Size of the box, in elements."""
    holders: Ranks
    """Global ranks, sorted."""
    receivers: Ranks
    """Global ranks, sorted; a rank may be a holder too."""
    dtype: torch.dtype
    """Dtype of the receivers' storage."""
    bytes: int
    """Bytes of the box in this dtype."""


def regions(sources: Sequence[BoxGroup], destinations: Sequence[BoxGroup]) -> list[Region]:
    """Return the regions that cover every destination box exactly once.

    Tensors are in the order of the destinations, regions of a tensor by start. Equal holders, and equal
    receivers, are one object. Raises UncoveredError if no source holds an element of a destination box.
    """
    ranks = _RankSets()
    held_boxes, _ = _boxes_by_tensor(sources, ranks)
    needed_boxes, dtypes = _boxes_by_tensor(destinations, ranks)

    # Layers and experts with equal boxes are intersected once.
    cache: dict[object, list[tuple[Span, Ranks, Ranks]]] = {}
    result: list[Region] = []
    for name, target_spans in needed_boxes.items():
        source_spans = held_boxes.get(name, {})
        key = (_signature(source_spans), _signature(target_spans))
        if key not in cache:
            cache[key] = _intersect_boxes(name, source_spans, target_spans, ranks)

        itemsize = dtypes[name].itemsize
        for (start, size), holders, receivers in cache[key]:
            num_bytes = math.prod(size) * itemsize
            result.append(Region(name, start, size, holders, receivers, dtypes[name], num_bytes))
    return result


def needed_bytes(destinations: Sequence[BoxGroup]) -> dict[int, int]:
    """Return by rank the bytes of the distinct tensor elements that it needs."""
    ranks = _RankSets()
    needed_boxes, dtypes = _boxes_by_tensor(destinations, ranks)

    # Add up per set of ranks first: there are few sets, and many ranks in each.
    by_ranks: dict[Ranks, int] = {}
    for name, target_spans in needed_boxes.items():
        for (_, size), receivers in disjoint(target_spans, ranks).items():
            num_bytes = math.prod(size) * dtypes[name].itemsize
            by_ranks[receivers] = by_ranks.get(receivers, 0) + num_bytes

    result: dict[int, int] = {}
    for receivers, count in by_ranks.items():
        for rank in receivers:
            result[rank] = result.get(rank, 0) + count
    return result


class _RankSets:
    """Interned sorted tuples of ranks: equal sets are the same object, and compare by identity."""

    def __init__(self) -> None:
        self._interned: dict[Ranks, Ranks] = {}
        self._unions: dict[Ranks, Ranks] = {}

    def intern(self, ranks: Iterable[int]) -> Ranks:
        """Return the one tuple of these ranks."""
        ordered = tuple(sorted(set(ranks)))
        return self._interned.setdefault(ordered, ordered)

    def union(self, rank_sets: Sequence[Ranks]) -> Ranks:
        """Return the one tuple of all ranks of interned tuples."""
        if len(rank_sets) == 1:
            return rank_sets[0]
        key = tuple(id(ranks) for ranks in rank_sets)
        if key not in self._unions:
            self._unions[key] = self.intern(rank for ranks in rank_sets for rank in ranks)
        return self._unions[key]


def _signature(spans: Mapping[Span, Ranks]) -> tuple[tuple[Span, int], ...]:
    """Return a hashable key of boxes with their interned ranks."""
    return tuple((span, id(ranks)) for span, ranks in spans.items())


def _boxes_by_tensor(
    groups: Sequence[BoxGroup], ranks: _RankSets
) -> tuple[dict[str, dict[Span, Ranks]], dict[str, torch.dtype]]:
    """Return for each tensor its distinct boxes with all ranks that have them, and its dtype."""
    rank_sets_by_tensor: dict[str, dict[Span, list[Ranks]]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for group in groups:
        group_ranks = ranks.intern(group.ranks)
        for box in group.boxes:
            tensor_spans = rank_sets_by_tensor.setdefault(box.name, {})
            rank_sets = tensor_spans.setdefault((box.start, box.size), [])
            # A group may have a box twice, in two storages.
            if not rank_sets or rank_sets[-1] is not group_ranks:
                rank_sets.append(group_ranks)
            dtypes[box.name] = group.dtypes[box.storage]

    ordered = {
        name: {span: ranks.union(spans[span]) for span in sorted(spans)}
        for name, spans in rank_sets_by_tensor.items()
    }
    return ordered, dtypes


def _intersect_boxes(
    name: str,
    source_spans: Mapping[Span, Ranks],
    target_spans: Mapping[Span, Ranks],
    ranks: _RankSets,
) -> list[tuple[Span, Ranks, Ranks]]:
    """Return (span, holders, receivers) of every intersection of source and target boxes of one tensor."""
    # Disjoint boxes: every element is sent and received once.
    sources = disjoint(source_spans, ranks)
    targets = disjoint(target_spans, ranks)

    result = []
    for target, receivers in targets.items():
        covered = 0
        for source, holders in sources.items():
            span = intersect(source, target)
            if span is not None:
                covered += math.prod(span[1])
                result.append((span, holders, receivers))

        # Disjoint sources cover the target exactly if the sizes of the intersections add up to its size.
        count = math.prod(target[1])
        if covered != count:
            start, size = target
            raise UncoveredError(
                f"{name}: no rank holds {count - covered} of the {count} elements in the box at "
                f"{list(start)} of size {list(size)}, which ranks {list(receivers)} need"
            )
    return result


def intersect(first: Span, second: Span) -> Span | None:
    """Return the intersection of two boxes, None if it is empty."""
    start = []
    size = []
    for first_start, first_size, second_start, second_size in zip(
        first[0],
        first[1],
        second[0],
        second[1],
        strict=True,
    ):
        low = max(first_start, second_start)
        high = min(first_start + first_size, second_start + second_size)
        if low >= high:
            return None
        start.append(low)
        size.append(high - low)
    return tuple(start), tuple(size)


def disjoint(spans: Mapping[Span, Ranks], ranks: _RankSets | None = None) -> Mapping[Span, Ranks]:
    """Cut overlapping boxes at each other's edges; each part has the ranks of all boxes that contain it."""
    boxes = list(spans)
    if not any(intersect(first, second) for first, second in _candidate_pairs(boxes)):
        return spans

    # The edges of all boxes form a grid in each dimension.
    dims = len(boxes[0][0])
    edges = [_edges(boxes, dim) for dim in range(dims)]

    # Each box becomes the cells of the grid inside it.
    cells: dict[Span, set[int]] = {}
    for (start, size), box_ranks in spans.items():
        intervals_by_dim = []
        for dim in range(dims):
            end = start[dim] + size[dim]
            inner_edges = [edge for edge in edges[dim] if start[dim] <= edge <= end]
            intervals_by_dim.append(itertools.pairwise(inner_edges))

        for intervals in itertools.product(*intervals_by_dim):
            cell_start = tuple(low for low, _ in intervals)
            cell_size = tuple(high - low for low, high in intervals)
            cells.setdefault((cell_start, cell_size), set()).update(box_ranks)

    intern = (ranks or _RankSets()).intern
    return {cell: intern(cells[cell]) for cell in sorted(cells)}


def _edges(boxes: list[Span], dim: int) -> list[int]:
    """Return the distinct starts and ends of boxes in one dimension, in ascending order."""
    edges: set[int] = set()
    for start, size in boxes:
        edges.add(start[dim])
        edges.add(start[dim] + size[dim])
    return sorted(edges)


def _candidate_pairs(boxes: list[Span]) -> Iterable[tuple[Span, Span]]:
    """Yield the pairs of sorted boxes whose ranges in the first dimension overlap."""
    for index, first in enumerate(boxes):
        # A scalar has no dimensions.
        if not first[0]:
            yield from ((first, second) for second in boxes[index + 1 :])
            continue

        end = first[0][0] + first[1][0]
        for second in boxes[index + 1 :]:
            if second[0][0] >= end:
                break
            yield first, second


class BoxIndex:
    """Index of the boxes of one rank, to look up the boxes that contain a region."""

    def __init__(self, boxes: Iterable[TensorBox]) -> None:
        self._by_name: dict[str, list[TensorBox]] = {}
        for box in boxes:
            self._by_name.setdefault(box.name, []).append(box)

    def containing(self, region: Region) -> list[TensorBox]:
        """Return, for each box that contains the region, the box of the region in the same storage."""
        span = (region.start, region.size)
        result = []
        for box in self._by_name.get(region.name, ()):
            if intersect((box.start, box.size), span) == span:
                offset = box.offset
                for inner, outer, stride in zip(region.start, box.start, box.stride, strict=True):
                    offset += (inner - outer) * stride
                result.append(replace(box, start=region.start, size=region.size, offset=offset))
        return result


def view_of(parameter: Tensor, box: TensorBox) -> Tensor:
    """Return the view of a parameter that a box describes, [*box.size]."""
    return parameter.as_strided(box.size, box.stride, parameter.storage_offset() + box.offset)


def check_coverage(
    boxes: Sequence[TensorBox],
    parameters: Mapping[str, Tensor],
    padding: Mapping[str, int],
) -> dict[str, tuple[tuple[int, int], ...]]:
    """Check that each parameter's elements are written exactly once; return the gaps in padding by parameter.

    ``padding`` maps a parameter to the element of its flattened storage from which gaps are allowed. A gap is
    (first element, end). Raises CoverageError that names every parameter with another gap or a double write.
    """
    boxes_by_storage: dict[str, list[TensorBox]] = {}
    for box in boxes:
        boxes_by_storage.setdefault(box.storage, []).append(box)

    errors: list[str] = []
    padding_gaps: dict[str, tuple[tuple[int, int], ...]] = {}
    for name, parameter in parameters.items():
        gaps, doubles = _find_gaps(boxes_by_storage.get(name, []), parameter.numel())
        data_end = padding.get(name, parameter.numel())
        data_gaps = [gap for gap in gaps if gap[0] < data_end]
        if doubles:
            errors.append(f"{name}: {doubles} elements are written more than once")
        if data_gaps:
            count = sum(end - start for start, end in data_gaps)
            errors.append(f"{name}: {count} of {parameter.numel()} elements are never written")
        if gaps and not data_gaps:
            padding_gaps[name] = tuple(gaps)

    if errors:
        raise CoverageError("the loader does not fill each parameter exactly once:\n  " + "\n  ".join(errors))
    return padding_gaps


def _find_gaps(boxes: Sequence[TensorBox], count: int) -> tuple[list[tuple[int, int]], int]:
    """Return the gaps of [0, count) between all boxes, and the number of elements in several boxes."""
    runs = [_contiguous_runs(box) for box in boxes]

    # An empty run at the end makes a gap after the last box visible.
    end_run = numpy.array([count])
    starts = numpy.concatenate([*(start for start, _ in runs), end_run])
    ends = numpy.concatenate([*(start + length for start, length in runs), end_run])
    order = numpy.argsort(starts, kind="stable")
    starts = starts[order]
    ends = ends[order]

    # Compare each run with the end of everything before it.
    previous_ends = numpy.concatenate([[0], numpy.maximum.accumulate(ends)[:-1]])
    distance = starts - previous_ends
    is_gap = distance > 0
    gaps = list(zip(previous_ends[is_gap].tolist(), starts[is_gap].tolist(), strict=True))
    return gaps, int(-distance[distance < 0].sum())


def _contiguous_runs(box: TensorBox) -> tuple[numpy.ndarray, int]:
    """Return the first elements of a box's contiguous runs in its storage, and their common length."""
    dims = zip(box.stride, box.size, strict=True)
    axes = sorted((stride, size) for stride, size in dims if size > 1)

    # The innermost dimensions are one run as long as they are dense.
    length = 1
    while axes and axes[0][0] == length:
        length *= axes.pop(0)[1]

    starts = numpy.array([box.offset], dtype=numpy.int64)
    for stride, size in axes:
        starts = (starts[:, None] + numpy.arange(size) * stride).ravel()
    return starts, length
