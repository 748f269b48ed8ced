"""Write a distributed model as a Hugging Face checkpoint, in pieces that fit any memory."""

from __future__ import annotations

import copy
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import run_on_all_ranks_or_raise
from megatron_rl.durable import seal, sync_folder
from megatron_rl.errors import UserError
from megatron_rl.hf.files import (
    SafetensorsWriter,
    copy_tensors,
    copy_tokenizer,
    shard_files,
    write_index,
)
from megatron_rl.hf.peft import peft_boxes
from megatron_rl.hf.weights import open_checkpoint, source_boxes
from megatron_rl.megatron.lora import adapter_parameters, policy_weights
from megatron_rl.megatron.model_spec import pretrained
from megatron_rl.shapes.lora import PEFT_CONFIG, PEFT_PREFIX, PEFT_WEIGHTS
from megatron_rl.shapes.pretrained import PretrainedModel
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import BoxGroup, BoxIndex, Region, regions, view_of
from megatron_rl.weights.transfer import Exchange, connect, gather_layout

FILE_BYTES = 5 * 2**30
PIECE_BYTES = 64 * 2**20
FURTHER = "further-layers.safetensors"
FLOAT32_NAMES = ("e_score_correction_bias",)


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor that a writer appends to a file in one step."""

    file: str
    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype


def export(
    model: Any,
    path: str | Path,
    source: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Write a `ParallelModel` as safetensors, config.json, index and tokenizer files, adapters added in.

    ``source`` is the checkpoint that the model was made from: its tokenizer files, and its layers that
    predict further tokens, are copied as they are. ``dtype`` None keeps the parameters'; biases that balance
    experts stay float32. Files are written at the same time by different ranks, each in pieces of at most
    ``piece_bytes`` (or one row), so no rank ever holds more than a few pieces. ``path`` must be new or empty
    and lie on a file system that all ranks share. Raises UserError on all ranks when it cannot be written.
    Collective over the model's ranks.
    """
    parameters, described = policy_weights(model), pretrained(model.hf_config)
    dtype = dtype or next(iter(parameters.values())).dtype
    shapes = described.tensor_shapes()
    dtypes = {name: torch.float32 if name.endswith(FLOAT32_NAMES) else dtype for name in shapes}
    files = shard_files(shapes, dtypes, file_bytes)
    further = _further_layers(described, source)
    content = _Content(files, shapes, dtypes, parameters, source_boxes(model))
    finish = partial(_finish, model.hf_config, content, dtype, source, further)
    _write(model, Path(path), content, piece_bytes, finish)


def export_adapters(model: Any, path: str | Path, source: str | Path, *, dropout: float = 0.0) -> None:
    """Write the adapters of a `ParallelModel` as PEFT does, for the model at ``source``.

    ``dropout`` is what they were trained with. As `export` otherwise. Collective over the model's ranks.
    """
    parameters = adapter_parameters(model)
    shapes = {PEFT_PREFIX + name: shape for name, shape in model.adapters.tensor_shapes().items()}
    dtypes = dict.fromkeys(shapes, next(iter(parameters.values())).dtype)
    content = _Content({PEFT_WEIGHTS: list(shapes)}, shapes, dtypes, parameters, peft_boxes(model))
    config = model.adapters.peft_config() | {"base_model_name_or_path": str(source), "lora_dropout": dropout}

    def finish(target: Path) -> None:
        (target / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    _write(model, Path(path), content, PIECE_BYTES, finish)


@dataclass(frozen=True)
class _Content:
    """Hold what files are to be written of a model, and where this rank has its part of it."""

    files: Mapping[str, Sequence[str]]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    parameters: Mapping[str, Tensor]
    boxes: Sequence[TensorBox]


def _write(
    model: Any, path: Path, content: _Content, piece_bytes: int, finish: Callable[[Path], None]
) -> None:
    """Write tensors into a folder that gets its name when ``finish`` has completed it."""
    group, ranks = model.groups.all, model.groups.layout.ranks
    shapes, dtypes, parameters = content.shapes, content.dtypes, content.parameters
    steps = _steps(content.files, shapes, ranks, dtypes, piece_bytes)
    target = path.with_name(path.name + ".incomplete")
    first = device.rank() == ranks[0]
    _together(lambda: _prepare(path, target) if first else None, path, group)
    sources = gather_layout(content.boxes, {name: value.dtype for name, value in parameters.items()}, group)
    writer = _Writer(content.files, shapes, dtypes, target)
    connect(group)
    _collect(steps, sources, BoxIndex(content.boxes), parameters, writer, group)
    written = _together(writer.close, path, group)
    digests = {name: digest for by_name in written for name, digest in by_name.items()}
    _together(lambda: _publish(target, path, finish, digests) if first else None, path, group)


def _further_layers(described: PretrainedModel, source: str | Path | None) -> list[str]:
    """Return the tensors of ``source`` in layers that predict further tokens, behind the model's own."""
    if source is None or not described.config.get("num_nextn_predict_layers"):
        return []
    return sorted(name for name in open_checkpoint(source).names() if described.is_further(name))


def _steps(
    files: Mapping[str, Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    ranks: Sequence[int],
    dtypes: Mapping[str, torch.dtype],
    piece_bytes: int,
) -> list[dict[int, _Piece]]:
    """Return for each step which piece each writer handles; file i is written by the i-th rank, in turn."""
    queues: dict[int, list[_Piece]] = {}
    for index, (file, names) in enumerate(files.items()):
        queue = queues.setdefault(ranks[index % len(ranks)], [])
        for name in names:
            queue += _pieces(file, name, shapes[name], dtypes[name], piece_bytes)
    count = max(len(queue) for queue in queues.values())
    return [
        {rank: queue[step] for rank, queue in queues.items() if step < len(queue)} for step in range(count)
    ]


def _pieces(
    file: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, piece_bytes: int
) -> Iterator[_Piece]:
    row = torch.Size(shape[1:]).numel() * dtype.itemsize
    rows = max(1, piece_bytes // max(row, 1))
    for begin in range(0, shape[0], rows):
        count = min(rows, shape[0] - begin)
        yield _Piece(file, name, (begin, *(0 for _ in shape[1:])), (count, *shape[1:]), dtype)


class _Writer:
    """Write the pieces of this rank's files; after an error keep quiet until `close` raises it."""

    def __init__(
        self,
        files: Mapping[str, Sequence[str]],
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        target: Path,
    ) -> None:
        self._files, self._shapes, self._dtypes, self._target = files, shapes, dtypes, target
        self._open: dict[str, SafetensorsWriter] = {}
        self._error: OSError | None = None

    def write(self, piece: _Piece, values: Tensor) -> None:
        """Append a piece to its file."""
        if self._error is not None:
            return
        try:
            if piece.file not in self._open:
                named = {name: self._shapes[name] for name in self._files[piece.file]}
                self._open[piece.file] = SafetensorsWriter(self._target / piece.file, named, self._dtypes)
            self._open[piece.file].write(values)
        except OSError as error:
            self._error = error

    def close(self) -> dict[str, str]:
        """Close the files and return the digest of each by name; raise what went wrong."""
        complete = self._error is None
        digests = {name: file.close(complete) for name, file in self._open.items()}
        if self._error is not None:
            raise self._error
        return digests


def _collect(
    steps: Sequence[Mapping[int, _Piece]],
    sources: Sequence[BoxGroup],
    held_boxes: BoxIndex,
    parameters: Mapping[str, Tensor],
    writer: _Writer,
    group: Any,
) -> None:
    """Bring the parts of each piece to its writer, step by step."""
    rank = device.rank()
    largest = max(
        torch.Size(piece.size).numel() * piece.dtype.itemsize for step in steps for piece in step.values()
    )
    for step, flow in zip(steps, _flows(steps, sources), strict=True):
        target = step.get(rank)
        values = torch.empty(target.size, dtype=target.dtype, device=device.device()) if target else None
        sends: dict[int, list[Any]] = {}
        receives: dict[int, list[Any]] = {}
        for region, receiver, sender in flow:
            held = None
            if sender == rank:
                box = held_boxes.containing(region)[0]
                held = view_of(parameters[box.storage], box)
            if receiver == rank:
                assert target is not None and values is not None
                part = _part(values, target, region)
                if held is not None:
                    part.copy_(held)
                else:
                    receives.setdefault(sender, []).append(((part,), region.dtype))
            elif held is not None:
                sends.setdefault(receiver, []).append((held, region.dtype))
        Exchange(sends, receives, 2 * largest + 4096, group).run()
        if target is not None and values is not None:
            writer.write(target, values)


def _part(values: Tensor, piece: _Piece, region: Region) -> Tensor:
    """Return the part of a piece's values that a region fills."""
    for dim, (begin, count) in enumerate(zip(region.start, region.size, strict=True)):
        values = values.narrow(dim, begin - piece.start[dim], count)
    return values


def _flows(
    steps: Sequence[Mapping[int, _Piece]], sources: Sequence[BoxGroup]
) -> list[list[tuple[Region, int, int]]]:
    """Return for each step the regions that travel, with receiver and sender; senders take turns."""
    boxes: dict[int, list[TensorBox]] = {}
    dtypes: dict[str, torch.dtype] = {}
    place: dict[str, list[tuple[int, int]]] = {}
    for number, step in enumerate(steps):
        for writer, piece in step.items():
            box = TensorBox(
                piece.name, piece.start, piece.size, writer, piece.name, 0, (0,) * len(piece.size)
            )
            boxes.setdefault(writer, []).append(box)
            dtypes[piece.name] = piece.dtype
            place.setdefault(piece.name, []).append((piece.start[0], number))
    wanted = [BoxGroup((writer,), tuple(pieces), dtypes) for writer, pieces in boxes.items()]
    flows: list[list[tuple[Region, int, int]]] = [[] for _ in steps]
    for number, region in enumerate(regions(sources, wanted)):
        (writer,) = region.receivers
        starts = place[region.name]
        step = starts[bisect_right(starts, (region.start[0], len(steps))) - 1][1]
        holders = region.holders
        sender = writer if writer in holders else holders[number % len(holders)]
        flows[step].append((region, writer, sender))
    return flows


def _prepare(path: Path, target: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError("it exists and is not an empty directory")
    target.mkdir(parents=True, exist_ok=True)
    for leftover in target.iterdir():
        leftover.unlink()


def _publish(target: Path, path: Path, finish: Callable[[Path], None], digests: Mapping[str, str]) -> None:
    finish(target)
    seal(target, digests)
    if path.is_dir():
        path.rmdir()
    os.replace(target, path)
    sync_folder(path.parent)


def _finish(
    hf_config: Any,
    content: _Content,
    dtype: torch.dtype,
    source: str | Path | None,
    further: Sequence[str],
    target: Path,
) -> None:
    """Write everything of a Hugging Face checkpoint but its weights."""
    config, files = copy.deepcopy(hf_config), content.files
    config.dtype = dtype
    family = pretrained(config).family
    if not config.architectures:
        config.architectures = [family.architecture]
    for key, value in family.engine_keys.items():
        setattr(config, key, value)
    config.save_pretrained(target)
    sizes = content.shapes.items()
    total_bytes = sum(torch.Size(shape).numel() * content.dtypes[name].itemsize for name, shape in sizes)
    if source is not None and further:
        total_bytes += copy_tensors(source, target / FURTHER, further)
        files = {**files, FURTHER: further}
    if len(files) > 1:
        write_index(target, files, total_bytes)
    if source is not None:
        copy_tokenizer(source, target)


def _together(action: Callable[[], Any], path: Path, group: Any) -> list[Any]:
    """Return what an action returns on every rank, by rank; raise on all of them what happened on one."""

    def told() -> Any:
        try:
            return action()
        except OSError as error:
            raise UserError(
                "The checkpoint cannot be written.",
                where=str(path),
                expected="a new or empty directory on a writable file system that all ranks share",
                got=str(error),
                fix="name another directory, or free space and allow writing there",
            ) from error

    return run_on_all_ranks_or_raise(told, f"write {path}", group)
