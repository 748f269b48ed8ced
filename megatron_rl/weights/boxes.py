"""Boxes of named tensors: intersection of the boxes that ranks hold with the boxes that ranks need.

A box is a rectangular slice of a tensor, with its location in a parameter of a rank. Pure integer arithmetic.
Ranks with equal boxes form one group, so that planning for many replicas takes no longer than for one.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from megatron_rl.shapes.fused_experts import FusedExperts, TensorLocation, expert_tensors
from megatron_rl.types import TensorBox

Coordinates = tuple[int, ...]
"""An index per dimension of a tensor, or a size per dimension."""
Box = tuple[Coordinates, Coordinates]
"""Box of a tensor: its first coordinates, and its size in each dimension."""
Ranks = tuple[int, ...]
"""Global ranks, sorted."""


class CoverageError(RuntimeError):
    """Error for parameters with elements that are not written exactly once."""


class UncoveredError(RuntimeError):
    """Error for tensor elements that a rank needs and no rank holds."""


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
    """Global ranks that have the boxes, sorted."""
    boxes: tuple[TensorBox, ...]
    """Boxes of each of these ranks; their ``rank`` field is not meaningful."""
    dtypes: Mapping[str, torch.dtype]
    """Dtype by name of parameter."""


class Region(NamedTuple):
    """One box of a tensor that every receiver needs and every holder holds completely.

    Example: the first 2 rows of a bfloat16 weight [8, 16], which ranks 0 and 2 hold and rank 4 needs::

        Region("linear.weight", (0, 0), (2, 16), (0, 2), (4,), torch.bfloat16, bytes=64)
    """

    name: str
    """Name of the tensor."""
    start: Coordinates
    """First coordinates of the box, in elements."""
    size: Coordinates
    """Size of the box, in elements."""
    holders: Ranks
    """Global ranks that hold the box, sorted."""
    receivers: Ranks
    """Global ranks that need the box, sorted; a rank may be a holder too."""
    dtype: torch.dtype
    """Dtype of the receivers' parameters."""
    bytes: int
    """Bytes of the box in ``dtype``."""


class _Overlap(NamedTuple):
    """Intersection of a source box and a destination box of one tensor."""

    start: Coordinates
    """First coordinates of the intersection, in elements."""
    size: Coordinates
    """Size of the intersection, in elements."""
    holders: Ranks
    """Ranks that hold the source box."""
    receivers: Ranks
    """Ranks that need the destination box."""


def compute_regions(
    sources: Sequence[BoxGroup],
    destinations: Sequence[BoxGroup],
) -> list[Region]:
    """Compute the regions that cover every destination box exactly once.

    ``sources`` are the boxes that ranks hold, ``destinations`` the boxes that ranks need. Tensors keep the
    order of the destinations; the regions of a tensor are sorted by start. Regions with equal holders share
    one tuple object, and so do regions with equal receivers. Raises UncoveredError if no source contains an
    element of a destination box.
    """
    rank_sets = _RankSets()
    sources_by_tensor = _boxes_by_tensor(sources, rank_sets)
    destinations_by_tensor = _boxes_by_tensor(destinations, rank_sets)
    dtypes = _dtypes_by_tensor(destinations)

    # Layers and experts with equal boxes are intersected once: a model has few distinct layers.
    cached_overlaps: dict[object, list[_Overlap]] = {}
    regions: list[Region] = []
    for name, destination_boxes in destinations_by_tensor.items():
        source_boxes = sources_by_tensor.get(name, {})
        key = (_cache_key(source_boxes), _cache_key(destination_boxes))
        if key not in cached_overlaps:
            cached_overlaps[key] = _intersect_boxes(
                name,
                source_boxes,
                destination_boxes,
                rank_sets,
            )

        # Traffic is counted in the receivers' dtype: a sender converts while it packs.
        dtype = dtypes[name]
        for overlap in cached_overlaps[key]:
            num_bytes = math.prod(overlap.size) * dtype.itemsize
            region = Region(
                name,
                overlap.start,
                overlap.size,
                overlap.holders,
                overlap.receivers,
                dtype,
                num_bytes,
            )
            regions.append(region)
    return regions


def needed_bytes(destinations: Sequence[BoxGroup]) -> dict[int, int]:
    """Return the bytes that each rank needs, by rank.

    A rank may need a tensor element in several of its parameters. Such an element counts once.
    """
    rank_sets = _RankSets()
    dtypes = _dtypes_by_tensor(destinations)

    # Add up by set of ranks first: there are few sets, and many ranks in each.
    bytes_by_ranks: Counter[Ranks] = Counter()
    for name, destination_boxes in _boxes_by_tensor(destinations, rank_sets).items():
        itemsize = dtypes[name].itemsize
        for (_, size), receivers in cut_overlaps(destination_boxes, rank_sets).items():
            bytes_by_ranks[receivers] += math.prod(size) * itemsize

    bytes_by_rank: Counter[int] = Counter()
    for receivers, num_bytes in bytes_by_ranks.items():
        for rank in receivers:
            bytes_by_rank[rank] += num_bytes
    return dict(bytes_by_rank)


class _RankSets:
    """Interned sorted tuples of ranks: equal sets are the same object, and compare by identity."""

    def __init__(self) -> None:
        self._interned: dict[Ranks, Ranks] = {}
        self._unions: dict[Ranks, Ranks] = {}

    def intern(self, ranks: Iterable[int]) -> Ranks:
        """Return the interned tuple of these ranks, sorted and without duplicates."""
        unique_ranks = tuple(sorted(set(ranks)))
        return self._interned.setdefault(unique_ranks, unique_ranks)

    def union(self, sets: Sequence[Ranks]) -> Ranks:
        """Return the interned tuple of all ranks in the given interned tuples."""
        if len(sets) == 1:
            return sets[0]

        # Interned sets live as long as this object, so their ids identify them.
        key = tuple(id(ranks) for ranks in sets)
        if key not in self._unions:
            members = itertools.chain.from_iterable(sets)
            self._unions[key] = self.intern(members)
        return self._unions[key]


def _cache_key(box_ranks: Mapping[Box, Ranks]) -> tuple[tuple[Box, int], ...]:
    """Return a hashable key of boxes with their interned ranks."""
    return tuple((box, id(ranks)) for box, ranks in box_ranks.items())


def _boxes_by_tensor(
    groups: Sequence[BoxGroup],
    rank_sets: _RankSets,
) -> dict[str, dict[Box, Ranks]]:
    """Return the distinct boxes of each tensor, sorted, with the ranks that have each box."""
    rank_sets_by_tensor: dict[str, dict[Box, list[Ranks]]] = {}
    for group in groups:
        group_ranks = rank_sets.intern(group.ranks)
        for box in group.boxes:
            tensor_boxes = rank_sets_by_tensor.setdefault(box.name, {})
            box_ranks = tensor_boxes.setdefault((box.start, box.size), [])
            # A group may have a box twice, in two parameters.
            if not box_ranks or box_ranks[-1] is not group_ranks:
                box_ranks.append(group_ranks)

    boxes_by_tensor: dict[str, dict[Box, Ranks]] = {}
    for name, tensor_boxes in rank_sets_by_tensor.items():
        # `_candidate_pairs` relies on the order.
        boxes_by_tensor[name] = {box: rank_sets.union(tensor_boxes[box]) for box in sorted(tensor_boxes)}
    return boxes_by_tensor


def _dtypes_by_tensor(groups: Sequence[BoxGroup]) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor; the last group that contains the tensor determines it."""
    dtypes: dict[str, torch.dtype] = {}
    for group in groups:
        for box in group.boxes:
            dtypes[box.name] = group.dtypes[box.storage]
    return dtypes


def _intersect_boxes(
    tensor_name: str,
    source_boxes: Mapping[Box, Ranks],
    destination_boxes: Mapping[Box, Ranks],
    rank_sets: _RankSets,
) -> list[_Overlap]:
    """Compute all intersections of the source boxes of one tensor with its destination boxes.

    ``source_boxes`` maps each source box to the ranks that hold it; ``destination_boxes`` maps each
    destination box to the ranks that need it. The rank tuples must come from ``rank_sets``. Raises
    UncoveredError if the sources do not cover a destination box completely.
    """
    # Disjoint boxes: every element is sent and received once.
    sources = cut_overlaps(source_boxes, rank_sets)
    destinations = cut_overlaps(destination_boxes, rank_sets)

    overlaps: list[_Overlap] = []
    for destination, receivers in destinations.items():
        num_covered = 0
        for source, holders in sources.items():
            intersection = intersect(source, destination)
            if intersection is None:
                continue
            start, size = intersection
            num_covered += math.prod(size)
            overlaps.append(_Overlap(start, size, holders, receivers))

        # The sources are disjoint. They cover the destination box exactly if the intersections together have
        # as many elements as the box.
        box_start, box_size = destination
        num_elements = math.prod(box_size)
        if num_covered != num_elements:
            num_missing = num_elements - num_covered
            raise UncoveredError(
                f"{tensor_name}: no rank holds {num_missing} of the {num_elements} elements in the "
                f"box at {list(box_start)} of size {list(box_size)}, which ranks {list(receivers)} need"
            )
    return overlaps


def intersect(first: Box, second: Box) -> Box | None:
    """Return the intersection of two boxes of one tensor, or None if it is empty."""
    start = []
    size = []

    # Boxes overlap if their intervals overlap in every dimension.
    dims = zip(*first, *second, strict=True)
    for first_begin, first_length, second_begin, second_length in dims:
        low = max(first_begin, second_begin)
        high = min(first_begin + first_length, second_begin + second_length)
        if low >= high:
            return None
        start.append(low)
        size.append(high - low)

    return tuple(start), tuple(size)


def cut_overlaps(
    box_ranks: Mapping[Box, Ranks],
    rank_sets: _RankSets | None = None,
) -> Mapping[Box, Ranks]:
    """Cut overlapping boxes of one tensor at each other's edges, into disjoint boxes.

    ``box_ranks`` maps each box to the ranks that hold it. Each box of the result has the ranks of all boxes
    that contain it. ``rank_sets`` interns these sets of ranks.
    """
    boxes = list(box_ranks)
    if not any(intersect(first, second) for first, second in _candidate_pairs(boxes)):
        return box_ranks

    # The edges of all boxes form a grid in each dimension.
    dims = len(boxes[0][0])
    edges = [_edges_along(boxes, dim) for dim in range(dims)]

    # Each box becomes the cells of the grid inside it.
    ranks_by_cell: dict[Box, set[int]] = {}
    for box, ranks in box_ranks.items():
        for cell in _grid_cells(box, edges):
            ranks_by_cell.setdefault(cell, set()).update(ranks)

    if rank_sets is None:
        rank_sets = _RankSets()
    return {cell: rank_sets.intern(ranks_by_cell[cell]) for cell in sorted(ranks_by_cell)}


def _grid_cells(box: Box, edges: Sequence[Sequence[int]]) -> Iterable[Box]:
    """Yield the cells of a grid inside a box.

    ``edges``: the grid's coordinates by dimension, sorted; they include the edges of the box.
    """
    start, size = box
    intervals_by_dim = []
    for dim, dim_edges in enumerate(edges):
        end = start[dim] + size[dim]
        inner_edges = [edge for edge in dim_edges if start[dim] <= edge <= end]
        intervals_by_dim.append(itertools.pairwise(inner_edges))

    for intervals in itertools.product(*intervals_by_dim):
        cell_start = tuple(low for low, _ in intervals)
        cell_size = tuple(high - low for low, high in intervals)
        yield cell_start, cell_size


def _edges_along(boxes: list[Box], dim: int) -> list[int]:
    """Return the distinct starts and ends of boxes in one dimension, in ascending order."""
    edges: set[int] = set()
    for start, size in boxes:
        edges.add(start[dim])
        edges.add(start[dim] + size[dim])
    return sorted(edges)


def _candidate_pairs(boxes: list[Box]) -> Iterable[tuple[Box, Box]]:
    """Yield the pairs of boxes that overlap in the first dimension; ``boxes`` must be sorted."""
    for index, first in enumerate(boxes):
        later_boxes = boxes[index + 1 :]
        first_start, first_size = first
        # A scalar has no dimensions.
        if not first_start:
            yield from ((first, second) for second in later_boxes)
            continue

        # Boxes are sorted by start: after the first box beyond the end, no box overlaps.
        end = first_start[0] + first_size[0]
        for second in later_boxes:
            second_start, _ = second
            if second_start[0] >= end:
                break
            yield first, second


class BoxIndex:
    """Index of the boxes of one rank, to find a region of a tensor in the rank's parameters.

    A box describes which elements of a tensor a parameter holds, with their offset and strides there.
    """

    def __init__(self, boxes: Iterable[TensorBox]) -> None:
        self._by_name: dict[str, list[TensorBox]] = {}
        for box in boxes:
            self._by_name.setdefault(box.name, []).append(box)

    def boxes_containing(self, region: Region) -> list[TensorBox]:
        """Locate a region in each of the rank's parameters that contains the complete region.

        The result has one box for each such parameter. The box has the start and the size of the region, and
        the offset of the region in the parameter.
        """
        region_box = (region.start, region.size)
        inner_boxes = []
        for box in self._by_name.get(region.name, ()):
            if intersect((box.start, box.size), region_box) != region_box:
                continue

            # The region has the strides of the box; only its first element differs.
            offset = box.offset
            dims = zip(region.start, box.start, box.stride, strict=True)
            for inner, outer, stride in dims:
                offset += (inner - outer) * stride
            inner_box = replace(
                box,
                start=region.start,
                size=region.size,
                offset=offset,
            )
            inner_boxes.append(inner_box)
        return inner_boxes


def split_expert_boxes(
    boxes: Iterable[TensorBox],
    expert_storage: FusedExperts | None,
) -> list[TensorBox]:
    """Replace the boxes of fused expert tensors by boxes of one tensor per expert; keep all other boxes.

    ``expert_storage`` describes the fused tensors; None for a model with one tensor per expert. A box must
    contain all output features of the gate and up projections, unless gate and up are interleaved.
    """
    split_boxes: list[TensorBox] = []
    for box in boxes:
        if expert_storage is None:
            split_boxes.append(box)
            continue

        dims = zip(box.start, box.size, strict=True)
        ends = tuple(begin + count for begin, count in dims)
        for name, location in expert_tensors(box.name, ends, expert_storage).items():
            if location.expert is None:
                split_boxes.append(box)
            elif location.expert >= box.start[0]:
                split_boxes += _expert_box(box, name, location)
    return split_boxes


def _expert_box(
    box: TensorBox,
    name: str,
    location: TensorLocation,
) -> Iterator[TensorBox]:
    """Yield the part of a fused tensor's box that belongs to the tensor ``name`` of one expert.

    ``box`` is a box of the fused tensor [experts, ...]. ``location`` describes where the fused tensor has the
    expert's tensor. Yields nothing if the box has no element of the expert's tensor.
    """
    # The output features are the first dimension of the expert's tensor. In a transposed fused tensor, they
    # are the last dimension.
    dims = list(range(1, len(box.start)))
    if location.transposed:
        dims.reverse()
    output_dim, *inner_dims = dims
    box_begin = box.start[output_dim]
    box_end = box_begin + box.size[output_dim]
    output_stride = box.stride[output_dim]

    # Index in the fused tensor of each output feature of the expert, up to the end of the box.
    features = range(location.begin, box_end, location.step)
    if location.step == 1:
        features = range(location.begin, location.end)

    # The first output feature that is inside the box: round the distance to the start of the box up.
    first_feature = max(0, -(-(box_begin - location.begin) // location.step))
    num_features = len(features) - first_feature
    if num_features <= 0:
        return

    assert location.expert is not None
    expert_offset = (location.expert - box.start[0]) * box.stride[0]
    feature_offset = (features[first_feature] - box_begin) * output_stride
    inner_start = [box.start[dim] for dim in inner_dims]
    inner_size = [box.size[dim] for dim in inner_dims]
    inner_stride = [box.stride[dim] for dim in inner_dims]
    yield TensorBox(
        name,
        start=(first_feature, *inner_start),
        size=(num_features, *inner_size),
        rank=box.rank,
        storage=box.storage,
        offset=box.offset + expert_offset + feature_offset,
        stride=(output_stride * location.step, *inner_stride),
    )


def view_of(parameter: Tensor, box: TensorBox) -> Tensor:
    """Return the view of a parameter that contains the elements of a box, [*box.size]."""
    # `as_strided` counts from the storage's first element, a box from the parameter's.
    offset = parameter.storage_offset() + box.offset
    return parameter.as_strided(box.size, box.stride, offset)


def check_coverage(
    boxes: Sequence[TensorBox],
    parameters: Mapping[str, Tensor],
    padding: Mapping[str, int],
) -> dict[str, tuple[tuple[int, int], ...]]:
    """Check that each parameter's elements are written exactly once; return the gaps in padding by parameter.

    ``padding`` maps a parameter to the first element of its flattened storage that is padding. A gap is
    (first element, end). Raises CoverageError with every parameter that has a gap before its padding, or
    elements that are written twice.
    """
    boxes_by_storage: dict[str, list[TensorBox]] = {}
    for box in boxes:
        boxes_by_storage.setdefault(box.storage, []).append(box)

    errors: list[str] = []
    padding_gaps: dict[str, tuple[tuple[int, int], ...]] = {}
    for name, parameter in parameters.items():
        numel = parameter.numel()
        gaps, num_overlaps = _find_gaps(boxes_by_storage.get(name, []), numel)
        if num_overlaps:
            errors.append(f"{name}: {num_overlaps} elements are written more than once")

        # Gaps in padding are valid: no checkpoint has values for it.
        data_end = padding.get(name, numel)
        data_gaps = [gap for gap in gaps if gap[0] < data_end]
        if data_gaps:
            num_missing = sum(end - start for start, end in data_gaps)
            errors.append(f"{name}: {num_missing} of {numel} elements are never written")
        elif gaps:
            padding_gaps[name] = tuple(gaps)

    if errors:
        lines = "\n  ".join(errors)
        raise CoverageError(f"the loader does not fill each parameter exactly once:\n  {lines}")
    return padding_gaps


def _find_gaps(
    boxes: Sequence[TensorBox],
    num_elements: int,
) -> tuple[list[tuple[int, int]], int]:
    """Return the gaps of [0, num_elements) that no box covers, and the number of repeated writes."""
    starts_by_box: list[numpy.ndarray] = []
    ends_by_box: list[numpy.ndarray] = []
    for box in boxes:
        box_starts, length = _contiguous_runs(box)
        starts_by_box.append(box_starts)
        ends_by_box.append(box_starts + length)

    # Append an empty run of elements at the end, so that a gap after the last box is also found.
    end_run = numpy.array([num_elements])
    starts = numpy.concatenate([*starts_by_box, end_run])
    ends = numpy.concatenate([*ends_by_box, end_run])
    order = numpy.argsort(starts, kind="stable")
    starts = starts[order]
    ends = ends[order]

    # Compare the start of each run with the latest end of all runs before it.
    latest_ends = numpy.maximum.accumulate(ends)
    previous_ends = numpy.concatenate([[0], latest_ends[:-1]])
    distances = starts - previous_ends
    num_overlaps = -distances[distances < 0].sum()

    is_gap = distances > 0
    gap_starts = previous_ends[is_gap].tolist()
    gap_ends = starts[is_gap].tolist()
    gaps = list(zip(gap_starts, gap_ends, strict=True))
    return gaps, int(num_overlaps)


def _contiguous_runs(box: TensorBox) -> tuple[numpy.ndarray, int]:
    """Return the first elements of a box's contiguous runs in its parameter, and their common length."""
    dims = zip(box.stride, box.size, strict=True)
    axes = sorted((stride, size) for stride, size in dims if size > 1)

    # The innermost dimensions are one run as long as they are dense.
    length = 1
    while axes and axes[0][0] == length:
        _, size = axes.pop(0)
        length *= size

    # Every combination of indices of the outer dimensions begins a run.
    starts = numpy.array([box.offset], dtype=numpy.int64)
    for stride, size in axes:
        offsets = numpy.arange(size) * stride
        starts = (starts[:, None] + offsets).ravel()
    return starts, length
