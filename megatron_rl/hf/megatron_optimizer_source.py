"""Read the state of Megatron's distributed optimizer from its flat buffers, as Hugging Face tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.hf.megatron_source import MegatronFiles, strides
from megatron_rl.interop.megatron_lm.checkpoint import MegatronCheckpoint
from megatron_rl.interop.megatron_lm.optimizer_buffers import FlatParameter, writer_layout
from megatron_rl.interop.megatron_lm.pickles import MASTERS, Bucket
from megatron_rl.megatron.parameter_mapping import Shard, trace_import
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.types import TensorBox


class BufferFiles(MegatronFiles):
    """Tensors of one optimizer state, such as the master weights or a moment, read a slice at a time.

    The state is the master weights in float32; `with_state` gives the others. ``parameters`` are the ranges
    of the parameters in the flat buffers. Tensors that the optimizer does not update, as the biases that
    balance experts, are read from the model's weights.
    """

    def __init__(
        self, path: str | Path, checkpoint: MegatronCheckpoint, parameters: Sequence[FlatParameter]
    ) -> None:
        super().__init__(path, checkpoint)
        self._state = MASTERS[0]
        self._chunks_by_bucket = {
            (state, bucket): sorted(tensor.chunks, key=lambda chunk: chunk.start)
            for state, buckets in checkpoint.buffers.items()
            for bucket, tensor in buckets.items()
        }

        # A flat buffer holds parameters as one rank of the writer sharded them.
        self._flat: dict[str, FlatParameter] = {}
        by_shard: dict[tuple[int, int, int], dict[str, FlatParameter]] = {}
        for parameter in parameters:
            ranks = (parameter.tensor, parameter.expert, parameter.expert_tensor)
            by_shard.setdefault(ranks, {})[parameter.name] = parameter

        # Trace the import of each shard to find the Hugging Face tensors in its parameters.
        model = read_pretrained(Path(path) / "config.json")
        layout = writer_layout(checkpoint.arguments)
        boxes: list[TensorBox] = []
        for ranks, shard_parameters in by_shard.items():
            tensor, expert, expert_tensor = ranks
            shard = Shard(tensor, layout.tensor, expert, layout.expert, expert_tensor, layout.expert_tensor)
            storages = {name: f"{ranks}{name}" for name in shard_parameters}
            meta_tensors = {
                name: torch.empty(parameter.shape, device="meta")
                for name, parameter in shard_parameters.items()
            }
            boxes += trace_import(meta_tensors, model, shard, 0, storages, self._shapes)
            self._flat |= {storages[name]: parameter for name, parameter in shard_parameters.items()}

        # These boxes replace the ones in the model's weights.
        for name in {box.name for box in boxes}:
            self._boxes[name] = []
        for box in boxes:
            self._boxes[box.name].append(box)

    def with_state(self, state: str) -> BufferFiles:
        """Return a source of another optimizer state, from the same ranges of its own buffers."""
        source = copy(self)
        source._state = state
        return source

    def _stored(self, box: TensorBox, start: Sequence[int], size: Sequence[int]) -> Tensor:
        parameter = self._flat.get(box.storage)
        if parameter is None:
            return super()._stored(box, start, size)

        # Coordinates of the first element in the parameter.
        parameter_strides = strides(parameter.shape)
        offset = box.offset
        begin = []
        for stride, first in zip(parameter_strides, start, strict=True):
            position, offset = divmod(offset, stride)
            begin.append(position + first)

        # Rows are contiguous in the buffer: read them, then narrow the other dimensions.
        row_elements = parameter_strides[0]
        first_element = parameter.start + begin[0] * row_elements
        rows = self._read_range(parameter.bucket, first_element, size[0] * row_elements)
        values = rows.view(size[0], *parameter.shape[1:])
        for dim in range(1, len(size)):
            values = values.narrow(dim, begin[dim], size[dim])
        return values

    def _read_range(self, bucket: Bucket, begin: int, count: int) -> Tensor:
        """Return ``count`` elements of a bucket from element ``begin``, joined from the saved chunks."""
        chunks = self._chunks_by_bucket[self._state, bucket]
        index = bisect_right(chunks, begin, key=lambda chunk: chunk.start[0]) - 1
        position = begin
        slices = []
        while position < begin + count:
            chunk = chunks[index]
            first = position - chunk.start[0]
            values = self._load(chunk)[first : first + begin + count - position]
            slices.append(values)
            position += len(values)
            index += 1

        if len(slices) == 1:
            return slices[0]
        return torch.cat(slices)
