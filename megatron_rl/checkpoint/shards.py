"""Read an optimizer that was saved in the shards of one layout (`SAME`) on any other, without a gather.

Megatron writes each rank's part of its flat optimizer buffers as it is in memory, and these buffers have no
names. The one idea: each group of ranks with equal parameters also writes an index of them, which says where
in a buffer each part of each global tensor is. A rank of another layout then reads the ranges of its own
parameters, one parameter and one state at a time, and copies them bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor

from megatron_rl.checkpoint.tensors import (
    initialise_states,
    load_tensors,
    megatron_scope,
    restore_steps,
    sharded_state,
    step_count,
)
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import run_on_all_ranks_or_raise
from megatron_rl.errors import UserError
from megatron_rl.hf.megatron_source import BucketReader
from megatron_rl.interop.megatron_lm.pickles import Bucket, read_tensors
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.megatron.optimizer import HostOptimizer, Optimizer, set_states
from megatron_rl.progress import count_progress
from megatron_rl.weights.boxes import intersect

_INDEX = "parameters_*.json"
"""Files with the index, one of each group of ranks with equal parameters."""


@dataclass(frozen=True)
class Part:
    """Box of a global tensor in the flattened parameter of a rank.

    Example: the second of two tensor-parallel ranks holds rows 4 to 7 of an [8, 2] tensor:
    ``Part("w", start=(4, 0), size=(4, 2), first=0, strides=(2, 1))``.
    """

    key: str
    """Name of the global tensor."""
    start: tuple[int, ...]
    """First index of the box in each dimension of the tensor."""
    size: tuple[int, ...]
    """Extent of the box in each dimension."""
    first: int
    """Element of the flattened parameter with the box's first value."""
    strides: tuple[int, ...]
    """Elements of the parameter between neighbours in each dimension."""

    def offset(self, start: tuple[int, ...]) -> int:
        """Return the element of the flattened parameter at an index of the global tensor."""
        steps = zip(start, self.start, self.strides, strict=True)
        return self.first + sum((index - origin) * stride for index, origin, stride in steps)

    def within(self, begin: int, end: int) -> Part:
        """Return the slices of the box along one dimension that reach into a range of elements."""
        dims = [dim for dim, extent in enumerate(self.size) if extent > 1]
        if not dims:
            return self
        # The elements of a slice are within one stride, because this dimension has the largest one.
        dim = max(dims, key=lambda index: self.strides[index])
        stride = self.strides[dim]
        low = min(max((begin - self.first) // stride, 0), self.size[dim])
        high = max(min(-(-(end - self.first) // stride), self.size[dim]), low)
        start = (*self.start[:dim], self.start[dim] + low, *self.start[dim + 1 :])
        size = (*self.size[:dim], high - low, *self.size[dim + 1 :])
        return replace(self, start=start, size=size, first=self.first + low * stride)


@dataclass(frozen=True)
class _Stored:
    """Part of a saved parameter, and the location of the parameter in the buffers."""

    part: Part
    bucket: Bucket
    """Bucket that contains the parameter."""
    begin: int
    """First element of the parameter in the bucket."""


# --- Saving


def write_index(folder: Path, model: ParallelModel | None, optimizer: Optimizer | None) -> list[Path]:
    """Write the index of the buffers in which this rank is the first of its data-parallel group.

    Returns the written file, if there is one.
    """
    if model is None or optimizer is None:
        return []
    with megatron_scope(model):
        state, _ = sharded_state(model, None, is_loading=False)
    sharded = _sharded_parameters(state)
    entries: list[dict[str, Any]] = []
    for number, sub_optimizer in enumerate(optimizer.parts):
        if not hasattr(sub_optimizer, "gbuf_ranges") or sub_optimizer.data_parallel_group.rank() != 0:
            continue
        group = sub_optimizer.data_parallel_group_idx
        for buffer_index, buffer in enumerate(sub_optimizer.buffers):
            for parameter, (start, _, bucket) in buffer.param_index_map.items():
                name = Bucket(number, group, buffer_index, bucket)
                begin = start - buffer.buckets[bucket].offset
                for part in _parts(sharded[parameter]):
                    entries.append({"bucket": list(name), "begin": begin, **asdict(part)})
    if not entries:
        return []

    path = folder / _INDEX.replace("*", str(device.rank()))
    path.write_text(json.dumps({"steps": step_count(optimizer), "parts": entries}), encoding="utf-8")
    return [path]


def _sharded_parameters(state: Mapping[str, Any]) -> dict[Any, Any]:
    """Return parameter -> Megatron's description of its place in the global tensors."""
    sharded, _ = extract_sharded_tensors_and_factories(dict(state))
    return {item.data: item for item in nested_values(sharded) if item.data is not None}


def _parts(sharded: Any) -> list[Part]:
    """Return the boxes of global tensors in a parameter; none if they are not views of it."""
    # On the meta device a view has an offset and strides, but no values.
    parameter = torch.empty(sharded.data.shape, dtype=sharded.data.dtype, device="meta")
    tensors: list[Any] = [replace(sharded, data=parameter)]
    if isinstance(sharded, ShardedTensorFactory):
        tensors = list(nested_values(tensors[0].build()))

    parts = []
    for tensor in tensors:
        # A factory may copy, so that the copy's strides are not those of the parameter.
        if tensor.data.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
            return []
        leading = tensor.prepend_axis_num
        parts.append(
            Part(
                tensor.key,
                tuple(tensor.global_offset),
                (1,) * leading + tuple(tensor.local_shape),
                tensor.data.storage_offset(),
                (0,) * leading + tuple(tensor.data.stride()),
            )
        )
    return parts


# --- Loading


def load_shards(folder: Path, model: ParallelModel | None, optimizer: Optimizer | None) -> None:
    """Restore a model and its optimizer on any layout, from the optimizer's shards of another one.

    Raises UserError, on all ranks, if a part of a parameter is not in the checkpoint. Collective over the
    world.
    """
    # Before the weights: an optimizer in host memory writes its copies of them, which are older.
    if model is not None and optimizer is not None:
        with megatron_scope(model):
            initialise_states(optimizer)
    load_tensors(folder, model, None)

    state: dict[str, Any] = {}
    if model is not None:
        with megatron_scope(model):
            state, _ = sharded_state(model, None, is_loading=True)

    def read() -> None:
        if optimizer is not None:
            _read(folder, optimizer, _sharded_parameters(state))

    run_on_all_ranks_or_raise(read, f"read the optimizer of {folder.name}")


@torch.no_grad()
def _read(folder: Path, optimizer: Optimizer, sharded: Mapping[Any, Any]) -> None:
    """Read this rank's shards of all optimizer states."""
    parts = {parameter: _parts(item) for parameter, item in sharded.items()}
    needed = {part.key for boxes in parts.values() for part in boxes}
    stored, steps = _read_index(folder, needed)
    files = BucketReader(folder, read_tensors(folder).buffers)

    for sub_optimizer in optimizer.parts:
        for parameter in sub_optimizer.model_param_gbuf_map:
            shard = sub_optimizer._get_model_param_range_map(parameter)["param"]
            states = sub_optimizer._get_main_param_and_optimizer_states(parameter).keys() - {"step"}
            padded = getattr(sharded[parameter], "allow_shape_mismatch", False)
            for name in sorted(states):
                values = torch.zeros(parameter.numel(), device=device.host())
                for part in parts[parameter]:
                    missing = _fill(values, part.within(shard.start, shard.end), name, stored, files)
                    # Only rows that pad the vocabulary of this layout may be absent.
                    if missing and not padded:
                        raise _absent(folder, part, name)
                if not parts[parameter]:
                    raise _absent(folder, None, name)
                set_states(sub_optimizer, parameter, {name: values[shard.start : shard.end]})
            count_progress("tensors read")

    restore_steps(optimizer, steps)
    for sub_optimizer in optimizer.parts:
        if isinstance(sub_optimizer.optimizer, HostOptimizer):
            sub_optimizer.optimizer.settle()


def _fill(
    values: Tensor,
    part: Part,
    state: str,
    stored: Mapping[str, list[_Stored]],
    files: BucketReader,
) -> int:
    """Copy the values of one part of a flattened parameter; return how many the checkpoint lacks."""
    copied = 0
    for source in stored.get(part.key, ()):
        overlap = intersect((part.start, part.size), (source.part.start, source.part.size))
        if overlap is None:
            continue
        start, size = overlap

        # The range of elements between the first and the last one of the box.
        strides = source.part.strides
        reach = sum((extent - 1) * stride for extent, stride in zip(size, strides, strict=True)) + 1
        begin = source.begin + source.part.offset(start)
        elements = files.read(state, source.bucket, begin, reach)
        target = values.as_strided(size, part.strides, part.offset(start))
        target.copy_(elements.as_strided(size, strides, elements.storage_offset()))
        copied += math.prod(size)
    return math.prod(part.size) - copied


def _read_index(folder: Path, needed: set[str]) -> tuple[dict[str, list[_Stored]], int]:
    """Return the stored parts of the ``needed`` global tensors, each box once, and the number of steps."""
    stored: dict[str, list[_Stored]] = {}
    boxes: set[tuple[Any, ...]] = set()
    steps = 0
    for path in sorted(folder.glob(_INDEX)):
        index = json.loads(path.read_text(encoding="utf-8"))
        steps = max(steps, int(index["steps"]))
        for part, bucket, begin in _entries(index["parts"]):
            # Ranks hold equal copies of parameters that are not sharded.
            box = (part.key, part.start, part.size)
            if part.key in needed and box not in boxes:
                boxes.add(box)
                stored.setdefault(part.key, []).append(_Stored(part, bucket, begin))
    return stored, steps


def _entries(entries: list[dict[str, Any]]) -> Iterator[tuple[Part, Bucket, int]]:
    """Yield the parts of an index with bucket and first element of their parameters."""
    for entry in entries:
        part = Part(
            entry["key"],
            tuple(entry["start"]),
            tuple(entry["size"]),
            entry["first"],
            tuple(entry["strides"]),
        )
        yield part, Bucket(*entry["bucket"]), entry["begin"]


def _absent(folder: Path, part: Part | None, state: str) -> UserError:
    """Return the error of a part of a parameter that the checkpoint has no location of."""
    text = "a parameter whose shards Megatron copies"
    if part is not None:
        text = f"{part.key} from {list(part.start)}"
    return UserError(
        "the checkpoint's optimizer shards cannot be read on this layout",
        where=str(folder),
        expected=f"{state} of {text}",
        got="no location of it in the index of the shards",
        fix="resume on the layout that saved it with checkpoint.optimizer_layout=any, which writes the "
        "checkpoint for any layout",
    )
