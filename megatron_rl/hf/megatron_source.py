"""Readers of weights and optimizer states in Megatron checkpoints, as slices of Hugging Face tensors.

`megatron_rl.interop.megatron_lm` locates the tensors. This module reads their values by torch with
``weights_only``, so that a damaged or forged file cannot run code.
"""

from __future__ import annotations

import io
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.interop.megatron_lm.checkpoint import (
    Location,
    MegatronCheckpoint,
    read_checkpoint,
    read_pointer,
)
from megatron_rl.interop.megatron_lm.optimizer_buffers import FlatParameter, writer_layout
from megatron_rl.interop.megatron_lm.pickles import MASTERS, Bucket, Chunk, StoredTensor
from megatron_rl.megatron.parameter_mapping import Shard, trace_import
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import Box, intersect

_CACHED_CHUNKS = 16
"""Number of chunks in the cache: consecutive reads are mostly slices of the same chunk."""


def read_pointed_checkpoint(path: str | Path) -> MegatronCheckpoint:
    """Read the metadata of the Megatron checkpoint to which a model's folder points."""
    pointer = read_pointer(path)
    assert pointer is not None, "the folder does not point to a Megatron checkpoint"
    return read_checkpoint(pointer["checkpoint"], str(path))


class ChunkReader:
    """Reader of a checkpoint's chunks, with a cache of the most recently used chunks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cache: OrderedDict[Chunk, Tensor] = OrderedDict()

    def load(self, chunk: Chunk) -> Tensor:
        """Return the values of a chunk, from the cache or from its file.

        A full cache drops the least recently used chunk.
        """
        if chunk not in self._cache:
            with (self.path / chunk.file).open("rb") as file:
                file.seek(chunk.offset)
                content = file.read(chunk.length)
            self._cache[chunk] = _load_tensor(content, chunk, self.path)
            if len(self._cache) > _CACHED_CHUNKS:
                self._cache.popitem(last=False)

        # The most recently used chunk is last.
        self._cache.move_to_end(chunk)
        return self._cache[chunk]


class BucketReader(ChunkReader):
    """Reader of ranges of elements in a distributed optimizer's flat buffers.

    ``buffers`` maps the name of an optimizer state, such as "exp_avg", to the stored tensors by bucket.
    """

    def __init__(
        self,
        path: Path,
        buffers: Mapping[str, Mapping[Bucket, StoredTensor]],
    ) -> None:
        super().__init__(path)
        self._chunks: dict[tuple[str, Bucket], list[Chunk]] = {}
        for state, buckets in buffers.items():
            for bucket, tensor in buckets.items():
                self._chunks[state, bucket] = sorted(tensor.chunks, key=lambda chunk: chunk.start)

    def read(
        self,
        state: str,
        bucket: Bucket,
        begin: int,
        count: int,
    ) -> Tensor:
        """Read ``count`` elements of a bucket from element ``begin`` on, and join them from its chunks."""
        # Start at the last chunk that begins at or before ``begin``.
        chunks = self._chunks[state, bucket]
        chunk_index = bisect_right(chunks, begin, key=lambda chunk: chunk.start[0]) - 1
        position = begin
        end = begin + count
        slices = []
        while position < end:
            chunk = chunks[chunk_index]
            slice_start = position - chunk.start[0]
            slice_end = end - chunk.start[0]
            values = self.load(chunk)[slice_start:slice_end]
            slices.append(values)
            position += len(values)
            chunk_index += 1

        if len(slices) == 1:
            return slices[0]
        return torch.cat(slices)


class MegatronFiles:
    """Hugging Face tensors of a model whose folder points to a Megatron checkpoint, read a slice at a time.

    The stored tensors are complete, like the parameters of a model on one rank. A stored tensor can contain
    several Hugging Face tensors, such as the three projections of QKV. A box is the location of a slice of
    one Hugging Face tensor in a stored tensor.

    ``checkpoint`` is the metadata of the tensors to read: model weights or an optimizer state. The default is
    the weights to which the folder's megatron.json points. Raises UserErrors if tensors do not match the
    model, or files are missing.
    """

    def __init__(
        self,
        path: str | Path,
        checkpoint: MegatronCheckpoint | None = None,
    ) -> None:
        model = read_pretrained(Path(path) / "config.json")
        if checkpoint is None:
            checkpoint = read_pointed_checkpoint(path)
        self.checkpoint = checkpoint
        self.path = self.checkpoint.path
        self._locations, errors = self.checkpoint.locate_parameters(model.shape)
        errors += self.checkpoint.file_errors()
        if errors:
            raise UserErrors(errors)

        # Find the locations of the Hugging Face tensors in the stored tensors: run the weight import into a
        # model on one rank, with tensors without memory, and record what each copy reads and writes.
        self._shapes = model.tensor_shapes()
        meta_tensors: dict[str, Tensor] = {}
        for name, location in self._locations.items():
            meta_tensors[name] = torch.empty(self._parameter_shape(location), device="meta")
        boxes = trace_import(meta_tensors, model, Shard(), 0)
        self._boxes: dict[str, list[TensorBox]] = {}
        for box in boxes:
            self._boxes.setdefault(box.name, []).append(box)

        # Index the chunks by tensor and, in tensors that stack layers, by layer.
        self._chunks: dict[tuple[str, int | None], list[Chunk]] = {}
        stacked_keys: set[str] = set()
        for location in self._locations.values():
            if location.index:
                stacked_keys.add(location.key)

        for key, tensor in self.checkpoint.tensors.items():
            for chunk in tensor.chunks:
                # Chunks with several layers are indexed under None, and considered for every layer.
                layer = None
                if key in stacked_keys and chunk.size[0] == 1:
                    layer = chunk.start[0]
                self._chunks.setdefault((key, layer), []).append(chunk)
        self._reader = ChunkReader(self.path)

    def _parameter_shape(self, location: Location) -> tuple[int, ...]:
        """Return the shape of a parameter, without the dimensions that stack layers or experts."""
        return self.checkpoint.tensors[location.key].shape[len(location.index) :]

    def names(self) -> set[str]:
        """Return the Hugging Face names of all tensors."""
        return set(self._boxes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._shapes[name]

    def read(
        self,
        name: str,
        start: Sequence[int],
        size: Sequence[int],
    ) -> Tensor:
        """Read the box of a tensor that begins at ``start`` and has ``size``, in its stored dtype."""
        requested_box = (tuple(start), tuple(size))
        values: Tensor | None = None
        for box in self._boxes[name]:
            overlap = intersect(requested_box, (box.start, box.size))
            if overlap is None:
                continue

            # Compute the coordinates of the overlap relative to the start of the box.
            overlap_start, overlap_size = overlap
            start_in_box = []
            for coordinate, box_start in zip(overlap_start, box.start, strict=True):
                start_in_box.append(coordinate - box_start)
            stored_values = self._read_stored(box, start_in_box, overlap_size)

            # The first box determines the dtype.
            if values is None:
                values = torch.empty(tuple(size), dtype=stored_values.dtype)
            _view_of_box(values, start, overlap).copy_(stored_values)

        assert values is not None, name
        return values

    def _read_stored(
        self,
        box: TensorBox,
        start: Sequence[int],
        size: Sequence[int],
    ) -> Tensor:
        """Read a slice of ``box``, a part of one Hugging Face tensor, from the tensor that stores the box.

        ``start`` is relative to the start of the box.
        """
        location = self._locations[box.storage]

        # Convert the box's offset to coordinates in the parameter, and add ``start``.
        remaining_offset = box.offset
        start_in_parameter = []
        parameter_strides = row_major_strides(self._parameter_shape(location))
        for stride, start_in_box in zip(parameter_strides, start, strict=True):
            coordinate, remaining_offset = divmod(remaining_offset, stride)
            start_in_parameter.append(coordinate + start_in_box)

        # The stored tensor may stack parameters over leading dimensions: add the parameter's indices.
        stored_start = (*location.index, *start_in_parameter)
        stored_size = (1,) * len(location.index) + tuple(size)

        # Copy the intersection with each chunk.
        values: Tensor | None = None
        for chunk in self._chunks_at(location.key, stored_start[0]):
            overlap = intersect((stored_start, stored_size), (chunk.start, chunk.size))
            if overlap is None:
                continue
            chunk_values = self._reader.load(chunk)
            if values is None:
                values = torch.empty(stored_size, dtype=chunk_values.dtype)
            target_view = _view_of_box(values, stored_start, overlap)
            target_view.copy_(_view_of_box(chunk_values, chunk.start, overlap))

        assert values is not None, location
        return values.view(tuple(size))

    def _chunks_at(self, key: str, index: int) -> list[Chunk]:
        """Return the chunks of a stored tensor that may contain row ``index`` of its first dimension."""
        single_layer_chunks = self._chunks.get((key, index), [])
        multi_layer_chunks = self._chunks.get((key, None), [])
        return single_layer_chunks + multi_layer_chunks


class BufferFiles(MegatronFiles):
    """Hugging Face tensors of one optimizer state, read a slice at a time from flat buffers.

    By default the optimizer state is the float32 master weights; `with_state` returns readers of the moments.
    ``parameters`` are the locations of the parameters in the flat buffers. The optimizer does not update some
    tensors, such as the biases that balance the load of experts: they are read from the model's weights.

    A box is the location of a slice of one Hugging Face tensor in a parameter.
    """

    def __init__(
        self,
        path: str | Path,
        checkpoint: MegatronCheckpoint,
        parameters: Sequence[FlatParameter],
    ) -> None:
        super().__init__(path, checkpoint)
        # Megatron's name of the optimizer state to read, here of the master weights.
        self._state = MASTERS[0]
        self._buckets = BucketReader(self.path, checkpoint.buffers)

        # A flat buffer contains the parameter shards of one rank of the layout that wrote the checkpoint.
        self._flat_parameters: dict[str, FlatParameter] = {}
        parameters_by_ranks: dict[tuple[int, int, int], dict[str, FlatParameter]] = {}
        for parameter in parameters:
            ranks = (parameter.tensor_rank, parameter.expert_rank, parameter.expert_tensor_rank)
            parameters_by_ranks.setdefault(ranks, {})[parameter.name] = parameter

        # Find the locations of the Hugging Face tensors in the parameters of each shard: run the weight
        # import into the shard, with tensors without memory, and record what each copy reads and writes.
        model = read_pretrained(Path(path) / "config.json")
        layout = writer_layout(checkpoint.arguments)
        boxes: list[TensorBox] = []
        for ranks, shard_parameters in parameters_by_ranks.items():
            tensor_rank, expert_rank, expert_tensor_rank = ranks
            shard = Shard(
                tensor=tensor_rank,
                tensor_size=layout.tensor,
                expert=expert_rank,
                expert_size=layout.expert,
                expert_tensor=expert_tensor_rank,
                expert_tensor_size=layout.expert_tensor,
            )

            # A parameter has the same name in every shard, so the storage name contains the shard's ranks.
            storages: dict[str, str] = {}
            meta_tensors: dict[str, Tensor] = {}
            for name, parameter in shard_parameters.items():
                storages[name] = f"{ranks}{name}"
                self._flat_parameters[storages[name]] = parameter
                meta_tensors[name] = torch.empty(parameter.shape, device="meta")
            boxes += trace_import(
                meta_tensors,
                model,
                shard,
                0,
                storages,
                self._shapes,
            )

        # The base class has located all tensors in the model's weights. Tensors with optimizer state are read
        # from the buffers instead, so replace their locations.
        for name in {box.name for box in boxes}:
            self._boxes[name] = []
        for box in boxes:
            self._boxes[box.name].append(box)

    def with_state(self, state: str) -> BufferFiles:
        """Return a reader of the optimizer state named ``state``, such as "exp_avg".

        Each state is stored in separate buffers, in which the parameters have the same positions.
        """
        reader = copy(self)
        reader._state = state
        return reader

    def _read_stored(
        self,
        box: TensorBox,
        start: Sequence[int],
        size: Sequence[int],
    ) -> Tensor:
        """Read a slice of ``box``, a part of one Hugging Face tensor, from the flat buffers.

        ``start`` is relative to the start of the box. If the tensor has no optimizer state, the slice is read
        from the model's weights.
        """
        parameter = self._flat_parameters.get(box.storage)
        if parameter is None:
            return super()._read_stored(box, start, size)

        # Convert the box's offset to coordinates in the parameter, and add ``start``.
        parameter_strides = row_major_strides(parameter.shape)
        remaining_offset = box.offset
        start_in_parameter = []
        for stride, start_in_box in zip(parameter_strides, start, strict=True):
            coordinate, remaining_offset = divmod(remaining_offset, stride)
            start_in_parameter.append(coordinate + start_in_box)

        # Rows are contiguous in the buffer: read them, then narrow the other dimensions.
        row_elements = parameter_strides[0]
        first_element = parameter.start + start_in_parameter[0] * row_elements
        rows = self._buckets.read(
            self._state,
            parameter.bucket,
            first_element,
            size[0] * row_elements,
        )
        values = rows.view(size[0], *parameter.shape[1:])
        for dim in range(1, len(size)):
            values = values.narrow(dim, start_in_parameter[dim], size[dim])
        return values


def _view_of_box(
    values: Tensor,
    start: Sequence[int],
    box: Box,
) -> Tensor:
    """Return a view of the elements of ``values`` in ``box``.

    ``start`` are the coordinates of the first element of ``values``.
    """
    box_start, box_size = box
    for dim, count in enumerate(box_size):
        offset = box_start[dim] - start[dim]
        values = values.narrow(dim, offset, count)
    return values


def _load_tensor(
    content: bytes,
    chunk: Chunk,
    path: Path,
) -> Tensor:
    """Deserialize the bytes of a chunk; raise UserError unless they are a tensor of the chunk's size.

    ``path`` is the checkpoint's folder, for the error.
    """
    try:
        # With weights_only forged bytes cannot run code.
        loaded = torch.load(io.BytesIO(content), map_location=device.host(), weights_only=True)
        if isinstance(loaded, Tensor) and loaded.numel() == math.prod(chunk.size):
            return loaded.detach().view(chunk.size)
        shape = getattr(loaded, "shape", "unknown shape")
        problem = f"{type(loaded).__name__} of {shape}"
    except Exception as error:  # damaged bytes may raise any exception
        problem = f"{type(error).__name__}: {error}".splitlines()[0]

    raise UserError(
        "a chunk of the Megatron checkpoint cannot be read",
        where=str(path / chunk.file),
        expected=f"a tensor of {list(chunk.size)} at byte {chunk.offset}",
        got=problem[:300],
        fix="copy the file again, or use another iteration",
    )


def row_major_strides(shape: Sequence[int]) -> list[int]:
    """Return the row-major strides of a shape, in elements."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
