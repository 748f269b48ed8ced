"""Write a distributed model as a Hugging Face checkpoint, in pieces that fit any memory."""

from __future__ import annotations

import copy
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron_rl.config.errors import UserError
from megatron_rl.parallel import device
from megatron_rl.parallel.boxes import BoxGroup, BoxIndex, Region, regions
from megatron_rl.parallel.hf.files import SafetensorsWriter, copy_tokenizer, shard_files, write_index
from megatron_rl.parallel.hf.names import checkpoint_shapes
from megatron_rl.parallel.hf.weights import live_parameters, source_boxes, view_of
from megatron_rl.parallel.transfer import Exchange, gather_layout, gather_objects
from megatron_rl.types import TensorBox

FILE_BYTES = 5 * 2**30
PIECE_BYTES = 64 * 2**20
_PIECE = "piece"


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor that a writer appends to a file in one step."""

    file: str
    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]


def export(
    model: Any,
    path: str | Path,
    tokenizer_source: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Write a `ParallelModel` as safetensors, config.json, index and tokenizer files.

    ``dtype`` None keeps the parameters'. Files are written at the same time by different ranks, each in
    pieces of at most ``piece_bytes`` (or one row), so no rank ever holds more than a few pieces. ``path``
    must be new or empty and lie on a file system that all ranks share. Raises UserError on all ranks when
    it cannot be written. Collective over the model's ranks.
    """
    path = Path(path)
    group, ranks = model.groups.all, model.groups.layout.ranks
    parameters = live_parameters(model)
    own_dtype = next(iter(parameters.values())).dtype
    dtype = dtype or own_dtype
    shapes = checkpoint_shapes(model.hf_config)
    files = shard_files(shapes, dtype, file_bytes)
    steps = _steps(files, shapes, ranks, dtype.itemsize, piece_bytes)
    target = path.with_name(path.name + ".incomplete")
    error = _prepare(path, target) if device.rank() == ranks[0] else None
    _raise_together(error, path, group)
    boxes = source_boxes(model)
    sources = gather_layout(boxes, {name: value.dtype for name, value in parameters.items()}, group)
    error = _write(steps, files, shapes, sources, BoxIndex(boxes), parameters, dtype, target, group)
    _raise_together(error, path, group)
    if device.rank() == ranks[0]:
        error = _finish(model.hf_config, files, shapes, dtype, target, path, tokenizer_source)
    _raise_together(error, path, group)


def _steps(
    files: Mapping[str, Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    ranks: Sequence[int],
    itemsize: int,
    piece_bytes: int,
) -> list[dict[int, _Piece]]:
    """Return for each step which piece each writer handles; file i is written by the i-th rank, in turn."""
    queues: dict[int, list[_Piece]] = {}
    for index, (file, names) in enumerate(files.items()):
        queue = queues.setdefault(ranks[index % len(ranks)], [])
        for name in names:
            queue += _pieces(file, name, shapes[name], itemsize, piece_bytes)
    count = max(len(queue) for queue in queues.values())
    return [
        {rank: queue[step] for rank, queue in queues.items() if step < len(queue)} for step in range(count)
    ]


def _pieces(
    file: str, name: str, shape: tuple[int, ...], itemsize: int, piece_bytes: int
) -> Iterator[_Piece]:
    row = torch.Size(shape[1:]).numel() * itemsize
    rows = max(1, piece_bytes // max(row, 1))
    for begin in range(0, shape[0], rows):
        count = min(rows, shape[0] - begin)
        yield _Piece(file, name, (begin, *(0 for _ in shape[1:])), (count, *shape[1:]))


def _write(
    steps: Sequence[Mapping[int, _Piece]],
    files: Mapping[str, Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    sources: Sequence[BoxGroup],
    own: BoxIndex,
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
    target: Path,
    group: Any,
) -> OSError | None:
    """Collect and write all pieces; after an error keep collecting, so that no rank is left waiting."""
    rank = device.rank()
    flows = _flows(steps, sources, dtype)
    largest = max(torch.Size(piece.size).numel() for step in steps for piece in step.values())
    writers: dict[str, SafetensorsWriter] = {}
    error: OSError | None = None
    buffer = None
    for step, flow in zip(steps, flows, strict=True):
        mine = step.get(rank)
        if mine is not None:
            buffer = torch.empty(mine.size, dtype=dtype, device=device.device())
        sends: dict[int, list[Any]] = {}
        receives: dict[int, list[Any]] = {}
        for region, writer, sender in flow:
            held = None
            if sender == rank:
                (box, *_) = own.containing(region)
                held = view_of(parameters[box.storage], box)
            if writer == rank:
                assert mine is not None and buffer is not None
                begin = region.start[0] - mine.start[0]
                part = buffer[begin : begin + region.size[0]]
                if len(region.size) > 1:
                    part = part[:, region.start[1] : region.start[1] + region.size[1]]
                if held is not None:
                    part.copy_(held)
                else:
                    receives.setdefault(sender, []).append(((part,), dtype))
            elif held is not None:
                sends.setdefault(writer, []).append((held, dtype))
        Exchange(sends, receives, 2 * largest * dtype.itemsize + 4096, group).run()
        if mine is not None and buffer is not None and error is None:
            try:
                if mine.file not in writers:
                    named = {name: shapes[name] for name in files[mine.file]}
                    writers[mine.file] = SafetensorsWriter(target / mine.file, named, dtype)
                writers[mine.file].write(buffer)
            except OSError as caught:
                error = caught
    for writer in writers.values():
        writer.close(complete=error is None)
    return error


def _flows(
    steps: Sequence[Mapping[int, _Piece]], sources: Sequence[BoxGroup], dtype: torch.dtype
) -> list[list[tuple[Region, int, int]]]:
    """Return for each step the regions that travel, with writer and sender; senders take turns."""
    pieces: dict[int, list[TensorBox]] = {}
    place: dict[str, list[tuple[int, int]]] = {}
    for number, step in enumerate(steps):
        for writer, piece in step.items():
            box = TensorBox(piece.name, piece.start, piece.size, writer, _PIECE, 0, (0,) * len(piece.size))
            pieces.setdefault(writer, []).append(box)
            place.setdefault(piece.name, []).append((piece.start[0], number))
    wanted = [BoxGroup((writer,), tuple(boxes), {_PIECE: dtype}) for writer, boxes in pieces.items()]
    flows: list[list[tuple[Region, int, int]]] = [[] for _ in steps]
    for number, region in enumerate(regions(sources, wanted)):
        (writer,) = region.receivers
        starts = place[region.name]
        step = starts[bisect_right(starts, (region.start[0], len(steps))) - 1][1]
        holders = region.holders
        sender = writer if writer in holders else holders[number % len(holders)]
        flows[step].append((region, writer, sender))
    return flows


def _prepare(path: Path, target: Path) -> OSError | None:
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            return FileExistsError("it exists and is not an empty directory")
        target.mkdir(parents=True, exist_ok=True)
        for leftover in target.iterdir():
            leftover.unlink()
    except OSError as error:
        return error
    return None


def _finish(
    hf_config: Any,
    files: Mapping[str, Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    target: Path,
    path: Path,
    tokenizer_source: str | Path | None,
) -> OSError | None:
    config = copy.deepcopy(hf_config)
    config.dtype = dtype
    if not config.architectures:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    try:
        config.save_pretrained(target)
        if len(files) > 1:
            total = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
            write_index(target, files, total)
        if tokenizer_source is not None:
            copy_tokenizer(tokenizer_source, target)
        if path.is_dir():
            path.rmdir()
        os.replace(target, path)
    except OSError as error:
        return error
    return None


def _raise_together(error: OSError | None, path: Path, group: Any) -> None:
    """Raise on every rank what happened on one of them."""
    told = [text for text in gather_objects(str(error) if error else None, group) if text]
    if told:
        raise UserError(
            "The checkpoint cannot be written.",
            where=str(path),
            expected="a new or empty directory on a writable file system that all ranks share",
            got=told[0],
        )
