"""Read what Megatron's distributed optimizer keeps, from its flat buffers, as Hugging Face tensors."""

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
    """Give slices of one kind of the optimizer's states, which lie at ``parameters`` in its buffers.

    The kind is the weights in float32, and that of `of` another. What no optimizer steps, the biases that
    balance experts, is given as the checkpoint's weights have it.
    """

    def __init__(
        self, path: str | Path, checkpoint: MegatronCheckpoint, parameters: Sequence[FlatParameter]
    ) -> None:
        super().__init__(path, checkpoint)
        self._state = MASTERS[0]
        self._pieces = {
            (state, bucket): sorted(tensor.chunks, key=lambda chunk: chunk.start)
            for state, buckets in checkpoint.buffers.items()
            for bucket, tensor in buckets.items()
        }
        self._flat: dict[str, FlatParameter] = {}
        of_rank: dict[tuple[int, int, int], dict[str, FlatParameter]] = {}
        for parameter in parameters:
            places = parameter.tensor, parameter.expert, parameter.expert_tensor
            of_rank.setdefault(places, {})[parameter.name] = parameter
        model, layout = read_pretrained(Path(path) / "config.json"), writer_layout(checkpoint.arguments)
        boxes: list[TensorBox] = []
        for places, held in of_rank.items():
            tensor, expert, expert_tensor = places
            shard = Shard(tensor, layout.tensor, expert, layout.expert, expert_tensor, layout.expert_tensor)
            storages = {name: f"{places}{name}" for name in held}
            meta = {name: torch.empty(part.shape, device="meta") for name, part in held.items()}
            boxes += trace_import(meta, model, shard, 0, storages, self._shapes)
            self._flat |= {storages[name]: part for name, part in held.items()}
        for name in {box.name for box in boxes}:
            self._boxes[name] = []
        for box in boxes:
            self._boxes[box.name].append(box)

    def of(self, state: str) -> BufferFiles:
        """Return what gives another kind of the states, from the same places."""
        other = copy(self)
        other._state = state
        return other

    def _stored(self, box: TensorBox, start: Sequence[int], size: Sequence[int]) -> Tensor:
        parameter = self._flat.get(box.storage)
        if parameter is None:
            return super()._stored(box, start, size)
        extents, offset, begin = strides(parameter.shape), box.offset, []
        for extent, first in zip(extents, start, strict=True):
            position, offset = divmod(offset, extent)
            begin.append(position + first)
        # Whole rows lie together.
        rows = self._range(parameter.bucket, parameter.start + begin[0] * extents[0], size[0] * extents[0])
        values = rows.view(size[0], *parameter.shape[1:])
        for dim in range(1, len(size)):
            values = values.narrow(dim, begin[dim], size[dim])
        return values

    def _range(self, bucket: Bucket, begin: int, count: int) -> Tensor:
        """Return ``count`` elements of a bucket from ``begin``, from the pieces that ranks saved."""
        chunks, position, parts = self._pieces[self._state, bucket], begin, []
        index = bisect_right(chunks, begin, key=lambda chunk: chunk.start[0]) - 1
        while position < begin + count:
            chunk = chunks[index]
            first = position - chunk.start[0]
            part = self._load(chunk)[first : first + begin + count - position]
            parts.append(part)
            position, index = position + len(part), index + 1
        return parts[0] if len(parts) == 1 else torch.cat(parts)
