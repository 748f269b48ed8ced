"""Load an optimizer that was saved in the shards of one layout (`SAME`) on another layout, without a gather.

For `SAME`, Megatron writes each rank's range of the flat optimizer buffers unchanged, without parameter
names. The idea: each data-parallel group also writes an index of its buffers, which maps each box (a slice in
all dimensions) of a global tensor to its elements in a buffer. On another layout, each rank reads the
elements of its own parameters, one parameter and one state at a time, and copies them bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

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

_INDEX_PATTERN = "parameters_*.json"
"""Pattern of the index files, which the first rank of each data-parallel group writes."""


@dataclass(frozen=True)
class ParameterBox:
    """Location of one box of a global tensor in a rank's flattened parameter.

    Example: the second of two tensor-parallel ranks holds rows 4 to 7 of an [8, 2] tensor:
    ``ParameterBox("w", start=(4, 0), size=(4, 2), first=0, strides=(2, 1))``.
    """

    key: str
    """Name of the global tensor."""
    start: tuple[int, ...]
    """First index of the box in each dimension of the tensor."""
    size: tuple[int, ...]
    """Number of elements of the box in each dimension."""
    first: int
    """Offset of the box's first value in the flattened parameter, in elements."""
    strides: tuple[int, ...]
    """Strides of the box in the flattened parameter, in elements, one per dimension."""

    def offset_of(self, start: tuple[int, ...]) -> int:
        """Return the offset of one element in the flattened parameter.

        ``start`` is the element's index in each dimension of the global tensor.
        """
        offset = self.first
        for index, box_start, stride in zip(start, self.start, self.strides, strict=True):
            offset += (index - box_start) * stride
        return offset

    def narrow_to_range(self, begin: int, end: int) -> ParameterBox:
        """Return the part of the box in a range of the flattened parameter.

        ``begin`` and ``end`` are the offsets of the range in elements. The box is narrowed only along its
        dimension of largest stride, so the part may also contain elements outside the range.
        """
        dims = [dim for dim, count in enumerate(self.size) if count > 1]
        if not dims:
            return self

        # The elements of a slice are within one stride, because this dimension has the largest stride.
        dim = max(dims, key=lambda dim: self.strides[dim])
        stride = self.strides[dim]
        num_slices = self.size[dim]

        # Round the first slice down, so that it contains ``begin``, and the end slice up.
        first_slice = (begin - self.first) // stride
        first_slice = min(max(first_slice, 0), num_slices)
        end_slice = -(-(end - self.first) // stride)
        end_slice = max(min(end_slice, num_slices), first_slice)

        start = list(self.start)
        start[dim] += first_slice
        size = list(self.size)
        size[dim] = end_slice - first_slice
        first = self.first + first_slice * stride
        return replace(self, start=tuple(start), size=tuple(size), first=first)


@dataclass(frozen=True)
class _StoredBox:
    """Box of a saved parameter, and the location of the parameter in the saved optimizer buffers."""

    box: ParameterBox
    """Location of the box in the flattened parameter of the rank that saved it."""
    bucket: Bucket
    """Bucket that contains the parameter."""
    begin: int
    """Offset of the parameter's first element in the bucket."""


# --- Saving


def write_shard_index(folder: Path, model: ParallelModel | None, optimizer: Optimizer | None) -> list[Path]:
    """Write the index of the optimizer buffers, if this rank is the first of a data-parallel group.

    Returns the paths of the written files: one path, or an empty list.
    """
    if model is None or optimizer is None:
        return []

    with megatron_scope(model):
        state, _ = sharded_state(model, None, is_loading=False)
    sharded_parameters = _sharded_parameters(state)

    box_records: list[dict[str, Any]] = []
    for optimizer_index, sub_optimizer in enumerate(optimizer.sub_optimizers):
        # All ranks of a data-parallel group have equal buffers, so the first rank writes the index.
        is_distributed = hasattr(sub_optimizer, "gbuf_ranges")
        if not is_distributed or sub_optimizer.data_parallel_group.rank() != 0:
            continue

        group_index = sub_optimizer.data_parallel_group_idx
        for buffer_index, buffer in enumerate(sub_optimizer.buffers):
            for parameter, (start, _, bucket_index) in buffer.param_index_map.items():
                bucket = Bucket(optimizer_index, group_index, buffer_index, bucket_index)
                # Megatron's offset is relative to the buffer; the checkpoint has a separate tensor per
                # bucket.
                begin = start - buffer.buckets[bucket_index].offset
                for box in _parameter_boxes(sharded_parameters[parameter]):
                    box_record = {"bucket": list(bucket), "begin": begin}
                    box_record.update(asdict(box))
                    box_records.append(box_record)
    if not box_records:
        return []

    path = folder / _INDEX_PATTERN.replace("*", str(device.rank()))
    index = {"steps": step_count(optimizer), "parts": box_records}
    path.write_text(json.dumps(index), encoding="utf-8")
    return [path]


def _sharded_parameters(state: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the ShardedTensor or ShardedTensorFactory of each parameter in Megatron's sharded ``state``."""
    sharded, _ = extract_sharded_tensors_and_factories(dict(state))
    sharded_parameters = {}
    for sharded_parameter in nested_values(sharded):
        if sharded_parameter.data is not None:
            sharded_parameters[sharded_parameter.data] = sharded_parameter
    return sharded_parameters


def _parameter_boxes(sharded: Any) -> list[ParameterBox]:
    """Return the slices of global tensors that a parameter contains, with their locations in the parameter.

    Some parameters, such as fused gate and up projections, contain slices of several global tensors.
    ``sharded`` is the parameter's ShardedTensor or ShardedTensorFactory. If the factory copies the
    parameter's values, the copies have no location in the parameter, and the result is an empty list.
    """
    # On the meta device a view has an offset and strides, but no values.
    parameter = torch.empty(sharded.data.shape, dtype=sharded.data.dtype, device="meta")
    tensors: list[Any] = [replace(sharded, data=parameter)]
    if isinstance(sharded, ShardedTensorFactory):
        tensors = list(nested_values(tensors[0].build()))

    boxes = []
    for tensor in tensors:
        # If a factory copies, the strides belong to the copy, not to the parameter.
        if tensor.data.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
            return []

        # A global tensor may stack the parameters of all layers: the parameter lacks the leading dimensions.
        num_stacked_dims = tensor.prepend_axis_num
        box = ParameterBox(
            tensor.key,
            start=tuple(tensor.global_offset),
            size=(1,) * num_stacked_dims + tuple(tensor.local_shape),
            first=tensor.data.storage_offset(),
            strides=(0,) * num_stacked_dims + tuple(tensor.data.stride()),
        )
        boxes.append(box)
    return boxes


# --- Loading


def load_shards(folder: Path, model: ParallelModel | None, optimizer: Optimizer | None) -> None:
    """Restore a model and its optimizer from a checkpoint whose optimizer was sharded for another layout.

    ``folder`` is the role's folder in the checkpoint. Raises UserError, on all ranks, if values of a
    parameter are not in the checkpoint. Collective over the world.
    """
    # Initialise states before the weights are loaded: with an optimizer in host memory, this overwrites the
    # model's weights with the optimizer's copies.
    if model is not None and optimizer is not None:
        with megatron_scope(model):
            initialise_states(optimizer)
    load_tensors(folder, model, None)

    state: dict[str, Any] = {}
    if model is not None:
        with megatron_scope(model):
            state, _ = sharded_state(model, None, is_loading=True)

    def read_optimizer_states() -> None:
        if optimizer is not None:
            _read_states(folder, optimizer, _sharded_parameters(state))

    run_on_all_ranks_or_raise(read_optimizer_states, f"read the optimizer of {folder.name}")


@torch.no_grad()
def _read_states(folder: Path, optimizer: Optimizer, sharded_parameters: Mapping[Any, Any]) -> None:
    """Read this rank's data-parallel shards of all optimizer states from the checkpoint's buffers.

    ``sharded_parameters`` maps each parameter to its ShardedTensor or ShardedTensorFactory.
    """
    boxes_by_parameter: dict[Any, list[ParameterBox]] = {}
    for parameter, sharded_parameter in sharded_parameters.items():
        boxes_by_parameter[parameter] = _parameter_boxes(sharded_parameter)
    tensor_names: set[str] = set()
    for boxes in boxes_by_parameter.values():
        tensor_names.update(box.key for box in boxes)

    saved_index = _read_index(folder, tensor_names)
    bucket_reader = BucketReader(folder, read_tensors(folder).buffers)

    # Read one parameter and one state at a time, so that host memory has a single unsharded parameter.
    for sub_optimizer in optimizer.sub_optimizers:
        for parameter in sub_optimizer.model_param_gbuf_map:
            boxes = boxes_by_parameter[parameter]
            # Only rows that pad the vocabulary may be absent from the checkpoint.
            may_be_absent = getattr(sharded_parameters[parameter], "allow_shape_mismatch", False)
            shard = sub_optimizer._get_model_param_range_map(parameter)["param"]
            current_states = sub_optimizer._get_main_param_and_optimizer_states(parameter)

            for state_name in sorted(current_states.keys() - {"step"}):
                if not boxes:
                    raise _missing_state_error(folder, None, state_name)

                values = torch.zeros(parameter.numel(), device=device.host())
                for box in boxes:
                    shard_box = box.narrow_to_range(shard.start, shard.end)
                    num_absent = _copy_box(values, shard_box, state_name, saved_index.boxes, bucket_reader)
                    if num_absent and not may_be_absent:
                        raise _missing_state_error(folder, box, state_name)

                shard_values = values[shard.start : shard.end]
                set_states(sub_optimizer, parameter, {state_name: shard_values})
            count_progress("tensors read")

    restore_steps(optimizer, saved_index.steps)
    for sub_optimizer in optimizer.sub_optimizers:
        if isinstance(sub_optimizer.optimizer, HostOptimizer):
            sub_optimizer.optimizer.copy_restored_state()


def _copy_box(
    values: Tensor,
    box: ParameterBox,
    state_name: str,
    stored_boxes: Mapping[str, list[_StoredBox]],
    bucket_reader: BucketReader,
) -> int:
    """Copy one box of an optimizer state from the checkpoint into ``values``, a flattened parameter.

    Returns the number of elements of the box that the checkpoint does not have.
    """
    num_copied = 0
    for stored_box in stored_boxes.get(box.key, ()):
        source = stored_box.box
        overlap = intersect((box.start, box.size), (source.start, source.size))
        if overlap is None:
            continue

        # Read the contiguous range from the first to the last element of the overlap.
        start, size = overlap
        num_elements = 1
        for count, stride in zip(size, source.strides, strict=True):
            num_elements += (count - 1) * stride
        begin = stored_box.begin + source.offset_of(start)
        elements = bucket_reader.read(state_name, stored_box.bucket, begin, num_elements)

        # View the overlap with the strides of the saved and of the current parameter.
        source_view = elements.as_strided(size, source.strides, elements.storage_offset())
        target_view = values.as_strided(size, box.strides, box.offset_of(start))
        target_view.copy_(source_view)
        num_copied += math.prod(size)

    return math.prod(box.size) - num_copied


class _ShardIndex(NamedTuple):
    """Index of a checkpoint's optimizer shards, merged from all index files."""

    boxes: dict[str, list[_StoredBox]]
    """Name of a global tensor -> its saved boxes, without duplicates."""
    steps: int
    """Number of optimizer steps before the save."""


def _read_index(folder: Path, tensor_names: set[str]) -> _ShardIndex:
    """Read the index files of a role's folder; return the boxes of the named global tensors."""
    stored_boxes: dict[str, list[_StoredBox]] = {}
    unique_boxes: set[tuple[Any, ...]] = set()
    steps = 0
    for path in sorted(folder.glob(_INDEX_PATTERN)):
        index = json.loads(path.read_text(encoding="utf-8"))
        steps = max(steps, int(index["steps"]))

        for box_record in index["parts"]:
            stored_box = _parse_stored_box(box_record)
            box = stored_box.box
            if box.key not in tensor_names:
                continue
            # Tensor-parallel ranks save equal copies of parameters that are not sharded.
            box_key = (box.key, box.start, box.size)
            if box_key in unique_boxes:
                continue
            unique_boxes.add(box_key)
            stored_boxes.setdefault(box.key, []).append(stored_box)

    return _ShardIndex(stored_boxes, steps)


def _parse_stored_box(box_record: Mapping[str, Any]) -> _StoredBox:
    """Parse one box in the JSON of an index file, which stores tuples as lists."""
    box = ParameterBox(
        box_record["key"],
        tuple(box_record["start"]),
        tuple(box_record["size"]),
        box_record["first"],
        tuple(box_record["strides"]),
    )
    return _StoredBox(box, Bucket(*box_record["bucket"]), box_record["begin"])


def _missing_state_error(folder: Path, box: ParameterBox | None, state_name: str) -> UserError:
    """Return the error for optimizer state that the checkpoint's index of shards does not contain.

    ``box`` is the slice of a global tensor whose state is missing. If Megatron's ShardedTensorFactory copies
    the parameter's values, the index of shards cannot contain the parameter. Pass None in this case.
    """
    location = "a parameter whose shards Megatron copies"
    if box is not None:
        location = f"{box.key} from {list(box.start)}"
    return UserError(
        "the checkpoint's optimizer shards cannot be read on this layout",
        where=str(folder),
        expected=f"{state_name} of {location}",
        got="the index of the shards does not contain it",
        fix="resume on the layout that saved it with checkpoint.optimizer_layout=any, which writes the "
        "checkpoint for any layout",
    )
