"""Learn where a weight loader puts every element by watching its copies, without moving any data.

A loader runs on meta tensors that stand for the checkpoint. Views keep the storage they look into, so
each ``copy_`` names the source region and the destination region by offset, size and stride alone; no
list of allowed view operations is needed.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.types import TensorBox


class TraceError(RuntimeError):
    """Report a loader whose copies cannot be expressed as boxes of its source tensors."""


@dataclass(frozen=True)
class _Frame:
    """Say how a storage holds one box of a source tensor: position = offset + sum_d i_d * stride[d]."""

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]


class _Axis(NamedTuple):
    """One dimension of a copy: ``length`` steps of ``step`` along source dimension ``dim``."""

    dim: int | None
    step: int
    length: int
    destination_stride: int


_ALIASING = {
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.contiguous.default,
}


class CopyRecorder(TorchDispatchMode):
    """Record copies from views of named sources into views of named destinations.

    A recorded copy is not executed. Copies and conversions of a source are followed. A copy of anything
    else into a destination raises TraceError, because its origin would stay unknown.
    """

    def __init__(
        self,
        sources: Mapping[str, Tensor],
        destinations: Mapping[str, Tensor],
        rank: int,
    ) -> None:
        super().__init__()
        self._rank = rank
        self._alive: list[Tensor] = list(destinations.values())
        self._frames: dict[int, _Frame] = {}
        for name, tensor in sources.items():
            self.add_source(name, tensor)
        self._destinations: dict[int, list[tuple[int, int, str]]] = {}
        for name, tensor in destinations.items():
            entries = self._destinations.setdefault(_storage(tensor), [])
            begin = int(tensor.storage_offset())
            if all(entry[:2] != (begin, begin + _extent(tensor)) for entry in entries):
                entries.append((begin, begin + _extent(tensor), name))
        for entries in self._destinations.values():
            entries.sort()
        self.boxes: list[TensorBox] = []

    def add_source(self, name: str, tensor: Tensor) -> None:
        """Follow one more source from now on."""
        self._alive.append(tensor)
        self._frames[_storage(tensor)] = _frame_of(name, tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            return self._copy(args[0], args[1], lambda: func(*args, **kwargs))
        result = func(*args, **kwargs)
        if func in _ALIASING and isinstance(result, Tensor) and _storage(args[0]) in self._frames:
            self._follow(result, args[0])
        return result

    def _copy(self, target: Tensor, source: Tensor, execute: Callable[[], Any]) -> Any:
        known_source = _storage(source) in self._frames
        parameter = self._parameter_at(target)
        if parameter is None:
            result = execute()
            if known_source:
                self._follow(target, source)
            return result
        name, begin = parameter
        if not known_source:
            raise TraceError(f"{name!r} is filled with values that do not come from a source tensor")
        if target.numel():
            self.boxes += self._boxes(target, source.expand(target.shape), name, begin)
        return target

    def _parameter_at(self, tensor: Tensor) -> tuple[str, int] | None:
        entries = self._destinations.get(_storage(tensor))
        if entries is None:
            return None
        index = bisect_right(entries, (tensor.storage_offset(), float("inf"), "")) - 1
        begin, end, name = entries[index] if index >= 0 else (0, 0, "")
        if tensor.storage_offset() + _extent(tensor) > end:
            return None
        return name, begin

    def _boxes(self, target: Tensor, source: Tensor, name: str, begin: int) -> list[TensorBox]:
        frame = self._frames[_storage(source)]
        first, axes = _resolve(frame, source, target.stride())
        offset = int(target.storage_offset()) - begin
        return [
            replace(box, storage=name, rank=self._rank)
            for box in _peel(frame.name, first, axes, offset, len(frame.start))
        ]

    def _follow(self, copy: Tensor, source: Tensor) -> None:
        """Remember that ``copy`` now holds what ``source`` shows."""
        frame = self._frames[_storage(source)]
        first, axes = _resolve(frame, source.expand(copy.shape), copy.stride())
        boxes = list(_peel(frame.name, first, axes, int(copy.storage_offset()), len(frame.start)))
        if len(boxes) != 1:
            raise TraceError(f"a rearranged copy of {frame.name!r} cannot be followed")
        (box,) = boxes
        self._alive.append(copy)
        self._frames[_storage(copy)] = _Frame(frame.name, box.start, box.size, box.offset, box.stride)


def trace_copies(
    load: Callable[[Mapping[str, Tensor]], Any],
    sources: Mapping[str, Tensor],
    destinations: Mapping[str, Tensor],
    rank: int,
) -> list[TensorBox]:
    """Run ``load(sources)`` and return where each source box lands in this rank's destinations.

    ``sources`` are meta tensors by canonical name, one storage each; ``destinations`` are parameters by
    name, meta or live; their contents are not touched by recorded copies. A box's offset counts from its
    parameter's first element, its strides are those of the parameter's storage. Boxes are merged and
    sorted. Raises TraceError for a copy that cannot be expressed as boxes.
    """
    recorder = CopyRecorder(sources, destinations, rank)
    with torch.no_grad(), recorder:
        load(sources)
    return merge_boxes(recorder.boxes)


def meta_sources(shapes: Mapping[str, Iterable[int]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return meta tensors of the given shapes, to stand for a checkpoint."""
    return {name: torch.empty(tuple(shape), dtype=dtype, device="meta") for name, shape in shapes.items()}


def merge_boxes(boxes: Iterable[TensorBox]) -> list[TensorBox]:
    """Join boxes that are neighbours both in their tensor and in their storage; sort them.

    Equal boxes are kept once. Rank, storage and tensor of joined boxes are the same.
    """
    current = sorted(set(boxes), key=_order)
    dims = max((len(box.start) for box in current), default=0)
    for dim in reversed(range(dims)):
        current = _merge_along(current, dim)
    return sorted(current, key=_order)


def _merge_along(boxes: list[TensorBox], dim: int) -> list[TensorBox]:
    groups: dict[Any, list[TensorBox]] = {}
    result: list[TensorBox] = []
    for box in boxes:
        if dim >= len(box.start):
            result.append(box)
            continue
        rest = (
            _without(box.start, dim),
            _without(box.size, dim),
            _without(box.stride, dim),
        )
        groups.setdefault((box.name, box.rank, box.storage, rest), []).append(box)
    for group in groups.values():
        group.sort(key=lambda box: (box.start[dim], box.offset))
        joined = [group[0]]
        for box in group[1:]:
            both = _join(joined[-1], box, dim)
            if both is None:
                joined.append(box)
            else:
                joined[-1] = both
        result += joined
    return result


def _join(first: TensorBox, second: TensorBox, dim: int) -> TensorBox | None:
    if first.start[dim] + first.size[dim] != second.start[dim]:
        return None
    distance = second.offset - first.offset
    stride, remainder = divmod(distance, first.size[dim])
    if remainder or stride <= 0:
        return None
    for box in (first, second):
        if box.size[dim] > 1 and box.stride[dim] != stride:
            return None
    size, strides = list(first.size), list(first.stride)
    size[dim], strides[dim] = first.size[dim] + second.size[dim], stride
    return replace(first, size=tuple(size), stride=tuple(strides))


def _resolve(frame: _Frame, source: Tensor, target_stride: tuple[int, ...]) -> tuple[list[int], list[_Axis]]:
    """Express a view of a frame in source coordinates: its first element and one axis per dimension."""
    first = _coordinates(frame, int(source.storage_offset()) - frame.offset)
    axes: list[_Axis] = []
    for count, stride, written in zip(source.shape, source.stride(), target_stride, strict=True):
        if count == 1:
            continue
        if stride == 0:
            axes.append(_Axis(None, 0, count, written))
            continue
        axes += _split_axis(frame, first, count, stride, written)
    reached = list(first)
    for axis in axes:
        if axis.dim is not None:
            reached[axis.dim] += axis.step * (axis.length - 1)
    if any(position >= size for position, size in zip(reached, frame.size, strict=True)):
        raise TraceError(f"a view of {frame.name!r} crosses the edges of its dimensions")
    return [start + value for start, value in zip(frame.start, first, strict=True)], axes


def _split_axis(frame: _Frame, first: list[int], count: int, stride: int, written: int) -> list[_Axis]:
    """Split one view dimension that runs over several source dimensions (a flattened view)."""
    axes: list[_Axis] = []
    while True:
        delta = _coordinates(frame, stride)
        moved = [dim for dim, step in enumerate(delta) if step]
        if len(moved) != 1:
            raise TraceError(f"a diagonal view of {frame.name!r} cannot be expressed as boxes")
        (dim,) = moved
        step, room = delta[dim], frame.size[dim] - first[dim]
        if first[dim] + step * (count - 1) < frame.size[dim]:
            return [*axes, _Axis(dim, step, count, written)]
        inner, remainder = divmod(room, step)
        if remainder or first[dim] or count % inner:
            raise TraceError(f"a flattened view of {frame.name!r} does not end with its rows")
        axes.append(_Axis(dim, step, inner, written))
        count, stride, written = count // inner, stride * inner, written * inner


def _coordinates(frame: _Frame, position: int) -> list[int]:
    """Return the coordinates of a storage position (counted from the frame's first element)."""
    result = [0] * len(frame.size)
    order = sorted(
        (dim for dim, size in enumerate(frame.size) if size > 1),
        key=lambda dim: -frame.stride[dim],
    )
    for dim in order:
        result[dim], position = divmod(position, frame.stride[dim])
    if position:
        raise TraceError(f"a view of {frame.name!r} is not aligned with its elements")
    return result


def _peel(name: str, first: list[int], axes: list[_Axis], offset: int, dims: int) -> Iterable[TensorBox]:
    """Turn axes into boxes: one axis of step 1 per source dimension stays, the others are enumerated."""
    kept: dict[int, _Axis] = {}
    peeled: list[_Axis] = []
    for dim in range(dims):
        for axis in _merge_axes([axis for axis in axes if axis.dim == dim]):
            if axis.step == 1 and dim not in kept:
                kept[dim] = axis
            else:
                peeled.append(axis)
    peeled += [axis for axis in axes if axis.dim is None]
    size = tuple(kept[dim].length if dim in kept else 1 for dim in range(dims))
    stride = tuple(kept[dim].destination_stride if dim in kept else 0 for dim in range(dims))
    for index in itertools.product(*(range(axis.length) for axis in peeled)):
        start, begin = list(first), offset
        for position, axis in zip(index, peeled, strict=True):
            if axis.dim is not None:
                start[axis.dim] += position * axis.step
            begin += position * axis.destination_stride
        yield TensorBox(name, tuple(start), size, 0, "", begin, stride)


def _merge_axes(axes: list[_Axis]) -> list[_Axis]:
    """Join axes of one source dimension that are contiguous on both sides."""
    result: list[_Axis] = []
    for axis in sorted(axes, key=lambda axis: axis.step):
        if result:
            inner = result[-1]
            follows = axis.step == inner.step * inner.length
            if follows and axis.destination_stride == inner.destination_stride * inner.length:
                result[-1] = inner._replace(length=inner.length * axis.length)
                continue
        result.append(axis)
    return result


def _frame_of(name: str, tensor: Tensor) -> _Frame:
    shape = tuple(tensor.shape)
    return _Frame(name, (0,) * len(shape), shape, int(tensor.storage_offset()), tuple(tensor.stride()))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _extent(tensor: Tensor) -> int:
    """Return the number of storage elements from a tensor's first to its last, inclusive."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _without(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return values[:dim] + values[dim + 1 :]


def _order(box: TensorBox) -> Any:
    return (box.name, box.storage, box.rank, box.start, box.size, box.offset)
