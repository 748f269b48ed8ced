"""Trace of a weight loader: record where it copies every element, without moving any data.

The loader runs on meta tensors that represent the checkpoint. A view keeps the storage of its base, so
offset, size and stride of both arguments of a ``copy_`` identify the source region and the destination
region; no list of supported view operations is needed.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.types import TensorBox


class TraceError(RuntimeError):
    """Error for a loader whose copies cannot be expressed as boxes of its source tensors."""


@dataclass(frozen=True)
class _SourceBox:
    """Box of a source tensor, with the positions of its elements in a storage.

    The element with index i_d in each dimension d of the box is at position offset + sum_d i_d * stride[d].
    """

    name: str
    """Name of the source tensor."""
    start: tuple[int, ...]
    """First coordinates of the box in the source tensor."""
    size: tuple[int, ...]
    """Elements of the box in each dimension."""
    offset: int
    """Position of the box's first element in the storage, in elements."""
    stride: tuple[int, ...]
    """Distance in the storage between neighbouring elements of each dimension, in elements."""


class _Axis(NamedTuple):
    """One dimension of a copy: ``length`` elements along dimension ``dim`` of the source tensor."""

    dim: int | None
    """Dimension of the source tensor; None for a broadcast dimension."""
    step: int
    """Distance between neighbouring elements in the source tensor, in coordinates of ``dim``."""
    length: int
    """Number of elements."""
    destination_stride: int
    """Distance between neighbouring elements in the destination's storage, in elements."""


_COPYING_OPS = {
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.contiguous.default,
}
"""Operations whose result has the same elements as the argument, in a new storage."""


class CopyRecorder(TorchDispatchMode):
    """Dispatch mode that records copies from views of named sources into views of named destinations.

    A recorded copy is not executed. Intermediate copies and dtype conversions of a source count as that
    source. A copy of anything else into a destination raises TraceError, since its origin is unknown.
    """

    def __init__(
        self,
        sources: Mapping[str, Tensor],
        destinations: Mapping[str, Tensor],
        rank: int,
    ) -> None:
        super().__init__()
        self._rank = rank

        # Source boxes and destinations are keyed by the address of a storage, so no storage may be freed.
        self._alive: list[Tensor] = list(destinations.values())

        self._source_boxes: dict[int, _SourceBox] = {}
        for name, tensor in sources.items():
            self.add_source(name, tensor)

        # Sorted (first element, end, name) of the destinations in each storage; tied parameters count once.
        self._destinations: dict[int, list[tuple[int, int, str]]] = {}
        for name, tensor in destinations.items():
            intervals = self._destinations.setdefault(_storage_address(tensor), [])
            begin = int(tensor.storage_offset())
            end = begin + _num_spanned_elements(tensor)
            is_tied = any(interval[:2] == (begin, end) for interval in intervals)
            if not is_tied:
                intervals.append((begin, end, name))
        for intervals in self._destinations.values():
            intervals.sort()

        self.boxes: list[TensorBox] = []
        """Slices of source tensors that were copied so far, with their locations in the destinations."""
        self.zeroed: set[str] = set()
        """Names of destinations that the loader fills with a source tensor that it has set to zero before."""
        self._zeroed_storages: set[int] = set()
        """Storages of the source tensors that the loader has set to zero."""

    def add_source(self, name: str, tensor: Tensor) -> None:
        """Add a source tensor, which must not share its storage with another source."""
        self._alive.append(tensor)
        self._source_boxes[_storage_address(tensor)] = _complete_source_box(name, tensor)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Record or execute one operator call of the loader."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            return self._record_or_execute_copy(args[0], args[1], lambda: func(*args, **kwargs))
        if func is torch.ops.aten.zero_.default and _storage_address(args[0]) in self._source_boxes:
            return self._record_zeroing(args[0])

        # Views need no registration: they share the storage by which their source is looked up.
        result = func(*args, **kwargs)
        if func in _COPYING_OPS and isinstance(result, Tensor):
            source = args[0]
            if _storage_address(source) in self._source_boxes:
                self._add_intermediate_copy(result, source)
        return result

    def _record_zeroing(self, source: Tensor) -> Tensor:
        """Record that the loader sets a complete source tensor to zero.

        vLLM zeroes biases that only one tensor-parallel rank adds. Raises TraceError if the loader zeroes
        only some of the elements.
        """
        source_box = self._source_boxes[_storage_address(source)]
        if source.numel() != math.prod(source_box.size):
            raise TraceError(f"a part of {source_box.name!r} is set to zero")
        self._zeroed_storages.add(_storage_address(source))
        return source

    def _record_or_execute_copy(
        self,
        target: Tensor,
        source: Tensor,
        execute: Callable[[], Any],
    ) -> Any:
        """Record a copy into a destination, or execute any other copy; return the result of ``copy_``."""
        is_source = _storage_address(source) in self._source_boxes
        destination = self._find_destination(target)

        # A copy between intermediate tensors of the loader is executed.
        if destination is None:
            result = execute()
            if is_source:
                self._add_intermediate_copy(target, source)
            return result

        name, destination_begin = destination
        if not is_source:
            raise TraceError(f"{name!r} is filled with values that do not come from a source tensor")
        if _storage_address(source) in self._zeroed_storages:
            self.zeroed.add(name)
        elif target.numel():
            # `copy_` broadcasts its source.
            source = source.expand(target.shape)
            self.boxes += self._boxes_of_copy(target, source, name, destination_begin)
        return target

    def _find_destination(self, tensor: Tensor) -> tuple[str, int] | None:
        """Find the destination that ``tensor`` is a view of.

        A destination is a parameter that the loader fills. Returns the destination's name and the position of
        its first element in the storage, or None if ``tensor`` is not a view of a destination.
        """
        intervals = self._destinations.get(_storage_address(tensor))
        if intervals is None:
            return None

        # Select the last destination that begins at or before the first element of the view.
        view_begin = int(tensor.storage_offset())
        index = bisect_right(intervals, view_begin, key=lambda interval: interval[0]) - 1
        # If no destination begins there, use an empty interval. Only an empty view fits into this interval,
        # and a copy to an empty view writes nothing.
        interval = (0, 0, "")
        if index >= 0:
            interval = intervals[index]

        begin, end, name = interval
        if view_begin + _num_spanned_elements(tensor) > end:
            return None
        return name, begin

    def _boxes_of_copy(
        self,
        target: Tensor,
        source: Tensor,
        name: str,
        destination_begin: int,
    ) -> list[TensorBox]:
        """Return the boxes of one copy from the view ``source`` into ``target``, a view of a destination.

        ``name`` is the destination's name, ``destination_begin`` the position of its first element in the
        storage.
        """
        source_box = self._source_boxes[_storage_address(source)]
        first_coordinates, axes = _find_axes(source_box, source, target.stride())

        # The offset of a box counts from the first element of its parameter.
        offset = int(target.storage_offset()) - destination_begin
        boxes = _split_into_boxes(
            source_box.name,
            first_coordinates,
            axes,
            offset,
            len(source_box.start),
        )
        return [replace(box, storage=name, rank=self._rank) for box in boxes]

    def _add_intermediate_copy(
        self,
        copy: Tensor,
        source: Tensor,
    ) -> None:
        """Register the tensor ``copy``, which the loader has made of ``source``, a view of a source tensor.

        If the loader later copies from ``copy`` into a destination, the elements are found in the source
        tensor. Raises TraceError if ``copy`` has the elements in an order that no single slice describes.
        """
        source_box = self._source_boxes[_storage_address(source)]
        expanded_source = source.expand(copy.shape)
        first_coordinates, axes = _find_axes(source_box, expanded_source, copy.stride())
        boxes = list(
            _split_into_boxes(
                source_box.name,
                first_coordinates,
                axes,
                int(copy.storage_offset()),
                len(source_box.start),
            )
        )

        # A storage is registered as one box, a slice of the source tensor. A copy that rearranges elements
        # would need several boxes.
        if len(boxes) != 1:
            raise TraceError(f"a rearranged copy of {source_box.name!r} cannot be followed")
        (box,) = boxes

        self._alive.append(copy)
        self._source_boxes[_storage_address(copy)] = _SourceBox(
            source_box.name,
            box.start,
            box.size,
            box.offset,
            box.stride,
        )


def trace_copies(
    load: Callable[[Mapping[str, Tensor]], Any],
    sources: Mapping[str, Tensor],
    destinations: Mapping[str, Tensor],
    rank: int,
) -> list[TensorBox]:
    """Run ``load(sources)`` and return the boxes of its copies into this rank's destinations.

    ``sources`` maps canonical names to meta tensors, one storage each. ``destinations`` maps names to
    parameters, meta or live, whose contents do not change. Offset and strides of a box count elements of the
    parameter's storage, from the first element of the parameter. Raises TraceError for a copy that cannot be
    expressed as boxes.
    """
    recorder = CopyRecorder(sources, destinations, rank)
    with torch.no_grad(), recorder:
        load(sources)
    return merge_boxes(recorder.boxes)


def make_meta_sources(
    shapes: Mapping[str, Iterable[int]],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Create a meta tensor for each name and shape of a checkpoint."""
    sources: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        sources[name] = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return sources


def merge_boxes(boxes: Iterable[TensorBox]) -> list[TensorBox]:
    """Join boxes that are adjacent both in their tensor and in their storage; return them sorted.

    Duplicates are removed. Only boxes of the same rank, storage and tensor are joined.
    """
    # From the innermost dimension outwards: rows become matrices, matrices become blocks.
    merged_boxes = sorted(set(boxes), key=_sort_key)
    dims = max((len(box.start) for box in merged_boxes), default=0)
    for dim in reversed(range(dims)):
        merged_boxes = _merge_along(merged_boxes, dim)
    return sorted(merged_boxes, key=_sort_key)


def _merge_along(boxes: list[TensorBox], dim: int) -> list[TensorBox]:
    """Join boxes that are adjacent along one dimension and equal in all other dimensions."""
    # Group the boxes that are equal in all other dimensions.
    groups: dict[Any, list[TensorBox]] = {}
    merged_boxes: list[TensorBox] = []
    for box in boxes:
        if dim >= len(box.start):
            merged_boxes.append(box)
            continue
        other_dims = (
            _drop_dim(box.start, dim),
            _drop_dim(box.size, dim),
            _drop_dim(box.stride, dim),
        )
        key = (box.name, box.rank, box.storage, other_dims)
        groups.setdefault(key, []).append(box)

    for group in groups.values():
        # Sorted along the dimension, adjacent boxes follow each other.
        group.sort(key=lambda box: (box.start[dim], box.offset))
        unions = [group[0]]
        for box in group[1:]:
            union = _join_boxes(unions[-1], box, dim)
            if union is None:
                unions.append(box)
            else:
                unions[-1] = union
        merged_boxes += unions
    return merged_boxes


def _join_boxes(
    first: TensorBox,
    second: TensorBox,
    dim: int,
) -> TensorBox | None:
    """Return the union of two boxes along ``dim``, or None if they are not adjacent in tensor and storage."""
    if first.start[dim] + first.size[dim] != second.start[dim]:
        return None

    # The elements of both boxes must have one common stride.
    distance = second.offset - first.offset
    stride, remainder = divmod(distance, first.size[dim])
    if remainder or stride <= 0:
        return None
    for box in (first, second):
        if box.size[dim] > 1 and box.stride[dim] != stride:
            return None

    # The stride of a dimension of size 1 has no meaning, so the common stride may replace it.
    size = list(first.size)
    size[dim] += second.size[dim]
    strides = list(first.stride)
    strides[dim] = stride
    return replace(first, size=tuple(size), stride=tuple(strides))


def _find_axes(
    source_box: _SourceBox,
    source: Tensor,
    target_stride: tuple[int, ...],
) -> tuple[list[int], list[_Axis]]:
    """Describe a `copy_` from ``source``, a view of a source tensor, by axes.

    An axis is a number of elements at a fixed distance along one dimension of the source tensor. A flattened
    dimension of the view has several axes. ``target_stride`` has the strides of the tensor to which the
    elements are copied. Returns the coordinates of the first copied element in the source tensor, and the
    axes.
    """
    position = int(source.storage_offset()) - source_box.offset
    first_coordinates = _coordinates(source_box, position)
    axes: list[_Axis] = []
    dims = zip(source.shape, source.stride(), target_stride, strict=True)
    for length, stride, destination_stride in dims:
        if length == 1:
            continue
        if stride == 0:
            axes.append(_Axis(None, 0, length, destination_stride))
            continue
        axes += _split_axis(
            source_box,
            first_coordinates,
            length,
            stride,
            destination_stride,
        )

    # The last element must be inside the box. It is outside if a strided view continues in the next row.
    last_coordinates = list(first_coordinates)
    for axis in axes:
        if axis.dim is not None:
            last_coordinates[axis.dim] += axis.step * (axis.length - 1)
    for coordinate, size in zip(last_coordinates, source_box.size, strict=True):
        if coordinate >= size:
            raise TraceError(f"a view of {source_box.name!r} crosses the edges of its dimensions")

    # Convert from coordinates in the box to coordinates in the source tensor.
    origin = [start + value for start, value in zip(source_box.start, first_coordinates, strict=True)]
    return origin, axes


def _split_axis(
    source_box: _SourceBox,
    first_coordinates: list[int],
    length: int,
    stride: int,
    destination_stride: int,
) -> list[_Axis]:
    """Split one dimension of a flattened view into the source dimensions that it covers."""
    axes: list[_Axis] = []
    while True:
        # A step of the view must move along exactly one source dimension.
        step_coordinates = _coordinates(source_box, stride)
        stepped_dims = [dim for dim, step in enumerate(step_coordinates) if step]
        if len(stepped_dims) != 1:
            raise TraceError(f"a diagonal view of {source_box.name!r} cannot be expressed as boxes")
        (dim,) = stepped_dims
        step = step_coordinates[dim]
        remaining_size = source_box.size[dim] - first_coordinates[dim]
        if first_coordinates[dim] + step * (length - 1) < source_box.size[dim]:
            return [*axes, _Axis(dim, step, length, destination_stride)]

        # The view fills this dimension and continues in the next outer one.
        inner_length, remainder = divmod(remaining_size, step)
        if remainder or first_coordinates[dim] or length % inner_length:
            raise TraceError(f"a flattened view of {source_box.name!r} does not consist of complete rows")
        axes.append(_Axis(dim, step, inner_length, destination_stride))
        length //= inner_length
        stride *= inner_length
        destination_stride *= inner_length


def _coordinates(source_box: _SourceBox, position: int) -> list[int]:
    """Convert a storage offset, counted from the first element of a box, to coordinates in the box."""
    coordinates = [0] * len(source_box.size)

    # Largest stride first, as digits of a number.
    dims_by_stride = sorted(
        (dim for dim, size in enumerate(source_box.size) if size > 1),
        key=lambda dim: -source_box.stride[dim],
    )
    for dim in dims_by_stride:
        coordinates[dim], position = divmod(position, source_box.stride[dim])

    if position:
        raise TraceError(f"a view of {source_box.name!r} is not aligned with its elements")
    return coordinates


def _split_into_boxes(
    name: str,
    first_coordinates: list[int],
    axes: list[_Axis],
    offset: int,
    num_dims: int,
) -> Iterable[TensorBox]:
    """Yield the boxes of a copy with the given axes; the caller sets their rank and storage.

    ``first_coordinates`` are the source coordinates of the copy's first element, ``offset`` its position in
    the destination. A box spans one axis of step 1 per source dimension. For the other axes, such as
    interleaved or broadcast dimensions, each combination of their indices is a separate box.
    """
    spanned_axes: dict[int, _Axis] = {}
    enumerated_axes: list[_Axis] = []
    for dim in range(num_dims):
        for axis in _merge_axes([axis for axis in axes if axis.dim == dim]):
            if axis.step == 1 and dim not in spanned_axes:
                spanned_axes[dim] = axis
            else:
                enumerated_axes.append(axis)
    enumerated_axes += [axis for axis in axes if axis.dim is None]

    # Every box has the size and strides of the spanned axes.
    size = [1] * num_dims
    stride = [0] * num_dims
    for dim, axis in spanned_axes.items():
        size[dim] = axis.length
        stride[dim] = axis.destination_stride

    ranges = [range(axis.length) for axis in enumerated_axes]
    for indices in itertools.product(*ranges):
        start = list(first_coordinates)
        box_offset = offset
        for index, axis in zip(indices, enumerated_axes, strict=True):
            box_offset += index * axis.destination_stride
            # A broadcast axis reads the same source element again.
            if axis.dim is not None:
                start[axis.dim] += index * axis.step

        yield TensorBox(
            name,
            tuple(start),
            tuple(size),
            rank=0,
            storage="",
            offset=box_offset,
            stride=tuple(stride),
        )


def _merge_axes(axes: list[_Axis]) -> list[_Axis]:
    """Join axes of one source dimension that are contiguous both in the source and in the destination."""
    merged_axes: list[_Axis] = []
    for axis in sorted(axes, key=lambda axis: axis.step):
        if merged_axes:
            inner = merged_axes[-1]
            is_contiguous = axis.step == inner.step * inner.length
            destination_end = inner.destination_stride * inner.length
            if is_contiguous and axis.destination_stride == destination_end:
                merged_axes[-1] = inner._replace(length=inner.length * axis.length)
                continue
        merged_axes.append(axis)
    return merged_axes


def _complete_source_box(name: str, tensor: Tensor) -> _SourceBox:
    """Return the box that covers a complete source tensor."""
    shape = tuple(tensor.shape)
    return _SourceBox(
        name,
        (0,) * len(shape),
        shape,
        int(tensor.storage_offset()),
        tuple(tensor.stride()),
    )


def _storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage object, which all views of the storage have in common."""
    return tensor.untyped_storage()._cdata


def _num_spanned_elements(tensor: Tensor) -> int:
    """Return the number of storage elements from a tensor's first to its last element, inclusive."""
    if not tensor.numel():
        return 0

    num_elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        num_elements += (size - 1) * stride
    return num_elements


def _drop_dim(
    values: tuple[int, ...],
    dim: int,
) -> tuple[int, ...]:
    """Return ``values`` without the value of dimension ``dim``."""
    return values[:dim] + values[dim + 1 :]


def _sort_key(box: TensorBox) -> Any:
    """Return the key by which boxes are sorted: by tensor, storage and rank, then by coordinates."""
    return (
        box.name,
        box.storage,
        box.rank,
        box.start,
        box.size,
        box.offset,
    )
