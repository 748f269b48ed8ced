"""Read a Megatron checkpoint as Hugging Face tensors, a slice at a time."""

from __future__ import annotations

import io
import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.interop.megatron_lm.checkpoint import MegatronCheckpoint, Place, pointer, read_checkpoint
from megatron_rl.interop.megatron_lm.pickles import Chunk
from megatron_rl.megatron.parameter_mapping import Shard, trace_import
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import Span, intersect

_CACHED_CHUNKS = 16
"""Chunks of the checkpoint in memory: the next slice is mostly in one of them."""


def read_pointed(path: str | Path) -> MegatronCheckpoint:
    """Return the metadata of the Megatron checkpoint that a model's folder points to."""
    target = pointer(path)
    assert target is not None, "the folder has weights of its own"
    return read_checkpoint(target["checkpoint"], str(path))


class MegatronFiles:
    """Hugging Face tensors of a model whose folder points to a Megatron checkpoint, read a slice at a time.

    Stored tensors are unsharded, as on a layout of one rank: tracing the import on one rank gives the boxes
    of the Hugging Face tensors in them. ``checkpoint`` is the metadata from `read_pointed`, read here if it
    is None, or that of an optimizer state, such as a moment of each weight. Raises UserErrors if the tensors
    are not the model's, or files are missing.
    """

    def __init__(self, path: str | Path, checkpoint: MegatronCheckpoint | None = None) -> None:
        model = read_pretrained(Path(path) / "config.json")
        self.checkpoint = read_pointed(path) if checkpoint is None else checkpoint
        self.path = self.checkpoint.path
        self._places, errors = self.checkpoint.parameters(model.shape)
        errors += self.checkpoint.file_errors()
        if errors:
            raise UserErrors(errors)

        self._shapes = model.tensor_shapes()
        shapes = {name: self._shape(place) for name, place in self._places.items()}
        boxes = trace_import(
            {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, model, Shard(), 0
        )
        self._boxes: dict[str, list[TensorBox]] = {}
        for box in boxes:
            self._boxes.setdefault(box.name, []).append(box)

        # Index the chunks by tensor and, in tensors that stack layers, by layer.
        self._chunks: dict[tuple[str, int | None], list[Chunk]] = {}
        stacked = {place.key for place in self._places.values() if place.index}
        for key, tensor in self.checkpoint.tensors.items():
            for chunk in tensor.chunks:
                entry = chunk.start[0] if key in stacked and chunk.size[0] == 1 else None
                self._chunks.setdefault((key, entry), []).append(chunk)
        self._cache: OrderedDict[Chunk, Tensor] = OrderedDict()

    def _shape(self, place: Place) -> tuple[int, ...]:
        return self.checkpoint.tensors[place.key].shape[len(place.index) :]

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._boxes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._shapes[name]

    def read(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """Return the box of a tensor that begins at ``start`` and has ``size``, in its stored dtype."""
        values: Tensor | None = None
        for box in self._boxes[name]:
            shared = intersect((tuple(start), tuple(size)), (box.start, box.size))
            if shared is None:
                continue
            inside = [low - first for low, first in zip(shared[0], box.start, strict=True)]
            stored = self._stored(box, inside, shared[1])
            values = torch.empty(tuple(size), dtype=stored.dtype) if values is None else values
            _within(values, start, shared).copy_(stored)
        assert values is not None, name
        return values

    def _stored(self, box: TensorBox, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read a part of a box from its stored tensor; ``start`` counts from the start of the box."""
        place = self._places[box.storage]

        # Coordinates of the box in the stored tensor.
        offset = box.offset
        origin = []
        for stride in strides(self._shape(place)):
            position, offset = divmod(offset, stride)
            origin.append(position)
        begin = (*place.index, *(low + first for low, first in zip(origin, start, strict=True)))
        counts = (1,) * len(place.index) + tuple(size)

        # Copy the intersection with each chunk.
        result: Tensor | None = None
        for chunk in self._chunks_of(place.key, begin[0]):
            shared = intersect((begin, counts), (chunk.start, chunk.size))
            if shared is None:
                continue
            values = self._load(chunk)
            result = torch.empty(counts, dtype=values.dtype) if result is None else result
            _within(result, begin, shared).copy_(_within(values, chunk.start, shared))
        assert result is not None, place
        return result.view(tuple(size))

    def _chunks_of(self, key: str, entry: int) -> list[Chunk]:
        """Return the chunks of a stored tensor that may contain index ``entry`` of its first dimension."""
        return self._chunks.get((key, entry), []) + self._chunks.get((key, None), [])

    def _load(self, chunk: Chunk) -> Tensor:
        """Return a chunk from the cache, or read it; the least recently used one is dropped."""
        if chunk not in self._cache:
            with (self.path / chunk.file).open("rb") as file:
                file.seek(chunk.offset)
                content = file.read(chunk.length)
            self._cache[chunk] = _load_tensor(content, chunk, self.path)
            if len(self._cache) > _CACHED_CHUNKS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(chunk)
        return self._cache[chunk]


def _within(values: Tensor, start: Sequence[int], box: Span) -> Tensor:
    """Return the view of a ``box`` in values that begin at the coordinates ``start``."""
    for dim, (low, first, count) in enumerate(zip(box[0], start, box[1], strict=True)):
        values = values.narrow(dim, low - first, count)
    return values


def _load_tensor(content: bytes, chunk: Chunk, path: Path) -> Tensor:
    """Return a chunk as it was saved; raise UserError for anything but a tensor of its size."""
    problem = None
    try:
        value = torch.load(io.BytesIO(content), map_location=device.host(), weights_only=True)
        if isinstance(value, Tensor) and value.numel() == math.prod(chunk.size):
            return value.detach().view(chunk.size)
        problem = f"{type(value).__name__} of {getattr(value, 'shape', 'another size')}"
    except Exception as error:  # whatever damaged bytes lead to
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    raise UserError(
        "a piece of the Megatron checkpoint cannot be read",
        where=str(path / chunk.file),
        expected=f"a tensor of {list(chunk.size)} at byte {chunk.offset}",
        got=problem[:300],
        fix="copy the file again, or use another iteration",
    )


def strides(shape: Sequence[int]) -> list[int]:
    """Return the row-major strides of a shape, in elements."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
