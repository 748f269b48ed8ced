"""Export of a distributed model as a Hugging Face checkpoint, in pieces that fit any memory.

Each file has one rank as its writer. In every step each writer receives one piece, rows of a tensor, from the
ranks that hold it, and appends it to its file.
"""

from __future__ import annotations

import copy
import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import run_on_all_ranks_or_raise
from megatron_rl.durable import seal_folder, sync_folder
from megatron_rl.errors import UserError
from megatron_rl.hf.files import (
    CheckpointFiles,
    SafetensorsWriter,
    Shape,
    copy_tensors,
    copy_tokenizer,
    divide_into_files,
    tensor_bytes,
    write_index,
)
from megatron_rl.hf.peft import peft_boxes
from megatron_rl.hf.weights import Checkpoint, open_checkpoint, source_boxes
from megatron_rl.megatron.lora import adapter_parameters, policy_weights
from megatron_rl.megatron.model_spec import describe_model
from megatron_rl.shapes.fused_experts import FusedExperts, stored_shapes
from megatron_rl.shapes.lora import PEFT_CONFIG, PEFT_PREFIX, PEFT_WEIGHTS
from megatron_rl.shapes.pretrained import SINGLE, PretrainedModel, read_json
from megatron_rl.shapes.quantized import without_quantization
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import (
    BoxGroup,
    BoxIndex,
    Coordinates,
    Region,
    boxes_of_experts,
    compute_regions,
    view_of,
)
from megatron_rl.weights.transfer import Exchange, create_communicator, gather_layout

FILE_BYTES = 5 * 2**30
"""Largest size of a file of the checkpoint, a usual size among published checkpoints."""
PIECE_BYTES = 64 * 2**20
"""Largest size of a piece. A rank has only a few pieces in memory at a time."""
FURTHER_FILE = "further-tensors.safetensors"
"""File of tensors that are not trained but copied: layers for multi-token prediction, and the other parts of
a multimodal model."""
FLOAT32_NAMES = ("e_score_correction_bias",)
"""Name endings of tensors that are exported as float32: the biases that balance the load of experts."""


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor that a writer appends to a file in one step."""

    file: str
    """Name of the file."""
    name: str
    """Name of the tensor."""
    start: Coordinates
    """First coordinates of the box in the tensor."""
    size: Coordinates
    """Size of the box."""
    dtype: torch.dtype
    """Dtype in the file."""
    fused_experts: FusedExperts | None = None
    """Form of a tensor with all experts of a layer; None if the checkpoint has a tensor per expert."""

    def boxes(self, writer: int) -> list[TensorBox]:
        """Return the boxes of the model's tensors in the piece; ``writer`` is the rank that writes it."""
        strides = tuple(math.prod(self.size[dim + 1 :]) for dim in range(len(self.size)))
        box = TensorBox(
            self.name,
            self.start,
            self.size,
            rank=writer,
            storage=self.name,
            offset=0,
            stride=strides,
        )
        return boxes_of_experts([box], self.fused_experts)


def export_model(
    model: Any,
    path: str | Path,
    source: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Write a `ParallelModel` as safetensors, config.json, index and tokenizer files, with adapters merged.

    ``source`` is the checkpoint from which the model was loaded. Its tokenizer files, its layers for
    multi-token prediction and its indexers of sparse attention are copied; quantised tensors among these are
    written in ``dtype``. If ``source`` is multimodal, the export is too: it has the config.json of
    ``source``, and the other parts of the model keep their dtypes. A model with a scalar head, or without
    ``source``, is written as a text-only model. If ``dtype`` is None, tensors have the dtype of the
    parameters. Biases that balance the load of experts are always float32.

    Ranks write different files in parallel, in pieces of at most ``piece_bytes`` (or one row), so that a rank
    has only a few pieces in memory. ``path`` must be new or empty, on a file system that all ranks share.
    Raises UserError on all ranks if it cannot be written. Collective over the model's ranks.
    """
    parameters = policy_weights(model)
    hf_model = describe_model(model.hf_config)
    if dtype is None:
        first_parameter = next(iter(parameters.values()))
        dtype = first_parameter.dtype

    # Shape and dtype of each tensor in the files.
    fused_experts = hf_model.family.fused_experts
    source_files = None if source is None else open_checkpoint(source)
    multimodal_source = _select_multimodal(hf_model, source_files)
    if multimodal_source is not None:
        fused_experts = multimodal_source.export_fused_experts
    shapes = stored_shapes(hf_model.tensor_shapes(), fused_experts)
    dtypes = dict.fromkeys(shapes, dtype)
    for name in shapes:
        if name.endswith(FLOAT32_NAMES):
            dtypes[name] = torch.float32

    # Tensors that are copied from the source rather than sent by ranks.
    files = divide_into_files(shapes, dtypes, file_bytes)
    names_to_copy = _list_tensors_to_copy(hf_model, source_files)
    stored_names: dict[str, str] = {}
    if multimodal_source is not None:
        names_to_copy += multimodal_source.names_outside_language_model()
        stored_names = {name: multimodal_source.export_name(name) for name in shapes}
    if names_to_copy and SINGLE in files:
        # If `model.safetensors` exists, readers ignore the index, and thus the file of copied tensors.
        files = {"model-00001-of-00001.safetensors": files[SINGLE]}

    content = _Content(
        files,
        shapes,
        dtypes,
        parameters,
        boxes=source_boxes(model),
        stored_names=stored_names,
        fused_experts=fused_experts,
    )
    write_other_files = partial(_write_other_files, model.hf_config, content, dtype, source, names_to_copy)
    _write_checkpoint_folder(model, Path(path), content, piece_bytes, write_other_files)


def export_adapters(
    model: Any,
    path: str | Path,
    source: str | Path,
    *,
    dropout: float = 0.0,
) -> None:
    """Write the adapters of a `ParallelModel` in PEFT's format, for the base model at ``source``.

    ``dropout`` is the adapters' dropout in training. Raises UserError as `export_model` does. Collective over
    the model's ranks.
    """
    parameters = adapter_parameters(model)
    shapes: dict[str, Shape] = {}
    for name, shape in model.adapters.tensor_shapes().items():
        shapes[PEFT_PREFIX + name] = shape

    # All adapters have the dtype of the first one, and are small enough for one file.
    first_parameter = next(iter(parameters.values()))
    dtypes = dict.fromkeys(shapes, first_parameter.dtype)
    files = {PEFT_WEIGHTS: list(shapes)}
    content = _Content(files, shapes, dtypes, parameters, boxes=peft_boxes(model))

    config = {
        **model.adapters.peft_config(),
        "base_model_name_or_path": str(source),
        "lora_dropout": dropout,
    }

    def write_config(folder: Path) -> None:
        (folder / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    _write_checkpoint_folder(model, Path(path), content, PIECE_BYTES, write_config)


@dataclass(frozen=True)
class _Content:
    """Tensors of a checkpoint to write, with this rank's parts of them."""

    files: Mapping[str, Sequence[str]]
    """File -> names of its tensors."""
    shapes: Mapping[str, Shape]
    """Complete shape of each tensor in the files."""
    dtypes: Mapping[str, torch.dtype]
    """Dtype of each tensor in the files."""
    parameters: Mapping[str, Tensor]
    """This rank's storages by name."""
    boxes: Sequence[TensorBox]
    """Boxes of the tensors in this rank's storages."""
    stored_names: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor -> its name in the files; empty unless the checkpoint is multimodal."""
    fused_experts: FusedExperts | None = None
    """Form of tensors with all experts of a layer; None if the checkpoint has a tensor per expert."""

    def stored_name(self, name: str) -> str:
        """Return the name that the tensor ``name`` has in the files."""
        return self.stored_names.get(name, name)


def _write_checkpoint_folder(
    model: Any,
    path: Path,
    content: _Content,
    piece_bytes: int,
    write_other_files: Callable[[Path], None],
) -> None:
    """Write tensors into a temporary folder, add the other files, and rename the folder to ``path``.

    ``write_other_files`` is called with the temporary folder, on the first rank, after all ranks have written
    their tensors. Raises UserError on all ranks if the folder cannot be written. Collective over the model's
    ranks.
    """
    group = model.groups.all
    ranks = model.groups.layout.ranks
    steps = _schedule_pieces(content, ranks, piece_bytes)

    # Only the first rank creates and renames the folder; the others wait and raise its errors.
    temporary_folder = path.with_name(path.name + ".incomplete")
    is_first = device.rank() == ranks[0]

    def create_folder() -> None:
        if is_first:
            _create_temporary_folder(path, temporary_folder)

    _run_on_all_ranks(create_folder, path, group)

    # Send every piece to its writer. All ranks create the communicator, even if they have no messages in the
    # first step.
    parameter_dtypes = {name: value.dtype for name, value in content.parameters.items()}
    sources = gather_layout(content.boxes, parameter_dtypes, group)
    writer = _PieceWriter(content, temporary_folder)
    create_communicator(group)
    _collect_pieces(
        steps,
        sources,
        BoxIndex(content.boxes),
        content.parameters,
        writer,
        group,
    )

    # Rename the folder only after the files of all ranks are on the disk.
    digests: dict[str, str] = {}
    for rank_digests in _run_on_all_ranks(writer.close, path, group):
        digests |= rank_digests

    def publish_folder() -> None:
        if is_first:
            _publish_folder(temporary_folder, path, write_other_files, digests)

    _run_on_all_ranks(publish_folder, path, group)


def _list_tensors_to_copy(hf_model: PretrainedModel, source: Checkpoint | None) -> list[str]:
    """Return the names of the tensors that are not trained, but copied from ``source``."""
    if source is None:
        return []
    return sorted(name for name in source.names() if hf_model.is_copied(name))


def _select_multimodal(hf_model: PretrainedModel, source: Checkpoint | None) -> CheckpointFiles | None:
    """Return ``source`` if it is multimodal and the export is to be multimodal; otherwise return None."""
    if hf_model.shape.scalar_head:
        return None
    if isinstance(source, CheckpointFiles) and source.is_multimodal:
        return source
    return None


def _schedule_pieces(
    content: _Content,
    ranks: Sequence[int],
    piece_bytes: int,
) -> list[dict[int, _Piece]]:
    """Assign the files to ranks in turn; return for each step the piece that each rank writes, by rank."""
    queues: dict[int, list[_Piece]] = {}
    for index, (file, names) in enumerate(content.files.items()):
        writer = ranks[index % len(ranks)]
        queue = queues.setdefault(writer, [])
        for name in names:
            queue += _split_tensor(content, file, name, piece_bytes)

    # Writers with fewer pieces have no piece in the last steps.
    step_count = max(len(queue) for queue in queues.values())
    steps: list[dict[int, _Piece]] = [{} for _ in range(step_count)]
    for writer, queue in queues.items():
        for step, piece in zip(steps, queue, strict=False):
            step[writer] = piece
    return steps


def _split_tensor(
    content: _Content,
    file: str,
    name: str,
    piece_bytes: int,
) -> Iterator[_Piece]:
    """Yield a tensor as pieces of complete rows, of at most ``piece_bytes`` or one row."""
    shape = content.shapes[name]
    dtype = content.dtypes[name]

    # A tensor is cut between rows, so that each piece is contiguous in the file.
    row_shape = shape[1:]
    row_bytes = tensor_bytes(row_shape, dtype)
    rows_per_piece = max(1, piece_bytes // max(row_bytes, 1))

    row_origin = (0,) * len(row_shape)
    for first_row in range(0, shape[0], rows_per_piece):
        row_count = min(rows_per_piece, shape[0] - first_row)
        yield _Piece(
            file,
            name,
            start=(first_row, *row_origin),
            size=(row_count, *row_shape),
            dtype=dtype,
            fused_experts=content.fused_experts,
        )


class _PieceWriter:
    """Writer of the tensor files that are assigned to this rank, in ``folder``.

    A write error is raised only by `close`: until then other ranks send pieces, and would wait forever for a
    writer that has left the loop.
    """

    def __init__(self, content: _Content, folder: Path) -> None:
        self._content = content
        self._folder = folder
        self._open_files: dict[str, SafetensorsWriter] = {}
        self._error: OSError | None = None

    def write(self, piece: _Piece, values: Tensor) -> None:
        """Append the ``values`` of a piece to its file; after an error do nothing."""
        if self._error is not None:
            return

        # A file is opened for its first piece; its header needs the shapes of all its tensors.
        try:
            if piece.file not in self._open_files:
                content = self._content
                shapes: dict[str, Shape] = {}
                dtypes: dict[str, torch.dtype] = {}
                for name in content.files[piece.file]:
                    stored_name = content.stored_name(name)
                    shapes[stored_name] = content.shapes[name]
                    dtypes[stored_name] = content.dtypes[name]
                path = self._folder / piece.file
                self._open_files[piece.file] = SafetensorsWriter(path, shapes, dtypes)
            self._open_files[piece.file].write(values)
        except OSError as error:
            self._error = error

    def close(self) -> dict[str, str]:
        """Close the files and return their digests by name; raise the first error of all writes."""
        is_complete = self._error is None
        digests: dict[str, str] = {}
        for name, file in self._open_files.items():
            digests[name] = file.close(is_complete)
        if self._error is not None:
            raise self._error
        return digests


def _collect_pieces(
    steps: Sequence[Mapping[int, _Piece]],
    sources: Sequence[BoxGroup],
    local_boxes: BoxIndex,
    parameters: Mapping[str, Tensor],
    piece_writer: _PieceWriter,
    group: Any,
) -> None:
    """Send the regions of each piece to its writer, step by step, and write this rank's pieces.

    ``sources`` are the boxes of all ranks, ``local_boxes`` those in this rank's ``parameters``. Collective
    over the group.
    """
    # All ranks compute the same slot size, so that it need not be sent.
    rank = device.rank()
    max_piece_bytes = 0
    for step in steps:
        for piece in step.values():
            piece_bytes = tensor_bytes(piece.size, piece.dtype)
            max_piece_bytes = max(max_piece_bytes, piece_bytes)

    for step, transfers in zip(steps, _schedule_transfers(steps, sources), strict=True):
        piece = step.get(rank)
        piece_values = None
        piece_boxes = BoxIndex(())
        if piece is not None:
            piece_boxes = BoxIndex(piece.boxes(rank))
            piece_values = torch.empty(
                piece.size,
                dtype=piece.dtype,
                device=device.device(),
            )

        # Views to send from and to receive into, by peer. Regions that this rank has and writes are copied.
        sends: dict[int, list[Any]] = {}
        receives: dict[int, list[Any]] = {}
        for region, writer, sender in transfers:
            source_view = None
            if sender == rank:
                box = local_boxes.containing(region)[0]
                source_view = view_of(parameters[box.storage], box)

            if writer == rank:
                assert piece_values is not None
                (piece_box,) = piece_boxes.containing(region)
                piece_view = view_of(piece_values, piece_box)
                if source_view is not None:
                    piece_view.copy_(source_view)
                else:
                    receives.setdefault(sender, []).append(((piece_view,), region.dtype))
            elif source_view is not None:
                sends.setdefault(writer, []).append((source_view, region.dtype))

        # A slot has room for a piece in one message, and for the alignment of its regions.
        slot_bytes = 2 * max_piece_bytes + 4096
        exchange = Exchange(sends, receives, slot_bytes, group)
        exchange.run()
        if piece is not None and piece_values is not None:
            piece_writer.write(piece, piece_values)


def _schedule_transfers(
    steps: Sequence[Mapping[int, _Piece]],
    sources: Sequence[BoxGroup],
) -> list[list[tuple[Region, int, int]]]:
    """Return the transfers of each export step, each as (region, writing rank, sending rank).

    ``steps`` map each writing rank to the piece that it writes. The ranks that hold a region take turns as
    its sender.
    """
    # Boxes that each writer needs, and (first row, step) of every piece by tensor name.
    boxes: dict[int, list[TensorBox]] = {}
    dtypes: dict[str, torch.dtype] = {}
    piece_starts: dict[str, list[tuple[int, int]]] = {}
    for step_index, step in enumerate(steps):
        for writer, piece in step.items():
            dtypes[piece.name] = piece.dtype
            for box in piece.boxes(writer):
                boxes.setdefault(writer, []).append(box)
                piece_starts.setdefault(box.name, []).append((box.start[0], step_index))

    destinations = []
    for writer, writer_boxes in boxes.items():
        destinations.append(BoxGroup((writer,), tuple(writer_boxes), dtypes))

    transfers: list[list[tuple[Region, int, int]]] = [[] for _ in steps]
    for region_index, region in enumerate(compute_regions(sources, destinations)):
        # The piece of a region is the last one that begins at or before its first row. `len(steps)` is above
        # every step, so that a piece that begins at this row is included.
        (writer,) = region.receivers
        starts = piece_starts[region.name]
        last_start = (region.start[0], len(steps))
        piece_index = bisect_right(starts, last_start) - 1
        _, step_index = starts[piece_index]

        # A writer that has the region itself sends no message.
        holders = region.holders
        sender = holders[region_index % len(holders)]
        if writer in holders:
            sender = writer
        transfers[step_index].append((region, writer, sender))
    return transfers


def _create_temporary_folder(path: Path, temporary_folder: Path) -> None:
    """Create an empty ``temporary_folder``; raise FileExistsError unless ``path`` is new or empty."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError("it exists and is not an empty directory")

    # Remove files of an export that was interrupted.
    temporary_folder.mkdir(parents=True, exist_ok=True)
    for file in temporary_folder.iterdir():
        file.unlink()


def _publish_folder(
    temporary_folder: Path,
    path: Path,
    write_other_files: Callable[[Path], None],
    digests: Mapping[str, str],
) -> None:
    """Call ``write_other_files`` on the temporary folder, seal the folder, and rename it to ``path``.

    ``digests`` are those of the tensor files, by file name.
    """
    write_other_files(temporary_folder)
    seal_folder(temporary_folder, digests)

    # The folder is empty, since `_create_temporary_folder` refuses any other folder.
    if path.is_dir():
        path.rmdir()
    os.replace(temporary_folder, path)
    # Sync the parent folder too: otherwise a power failure could undo the renaming.
    sync_folder(path.parent)


def _write_other_files(
    hf_config: Any,
    content: _Content,
    dtype: torch.dtype,
    source: str | Path | None,
    names_to_copy: Sequence[str],
    folder: Path,
) -> None:
    """Write all files of a checkpoint but those of trained tensors: config.json, index, tokenizer files.

    The tensors with the stored names ``names_to_copy`` are copied from ``source``.
    """
    files: dict[str, Sequence[str]] = {}
    for file, names in content.files.items():
        files[file] = [content.stored_name(name) for name in names]

    if content.stored_names:
        assert source is not None
        _write_multimodal_config(Path(source), dtype, folder)
    else:
        _write_config(hf_config, dtype, folder)

    # Size of all tensors, for the index.
    total_bytes = 0
    for name, shape in content.shapes.items():
        total_bytes += tensor_bytes(shape, content.dtypes[name])
    if source is not None and names_to_copy:
        total_bytes += copy_tensors(source, folder / FURTHER_FILE, names_to_copy, dtype)
        files = {**files, FURTHER_FILE: names_to_copy}

    # More than one file needs an index.
    if len(files) > 1:
        write_index(folder, files, total_bytes)
    if source is not None:
        copy_tokenizer(source, folder)


def _write_config(
    hf_config: Any,
    dtype: torch.dtype,
    folder: Path,
) -> None:
    """Write the config.json of a text-only model into ``folder``, as transformers and engines read it."""
    config = copy.deepcopy(hf_config)
    config.dtype = dtype
    model = describe_model(config)
    if not config.architectures:
        config.architectures = [model.family.architecture]

    # Without these keys an engine would interpret the weights as another model's.
    for key, value in model.engine_keys.items():
        setattr(config, key, value)
    config.save_pretrained(folder)


def _write_multimodal_config(
    source: Path,
    dtype: torch.dtype,
    folder: Path,
) -> None:
    """Write the config.json of a multimodal ``source`` into ``folder``, without quantisation.

    Its dtype becomes ``dtype``.
    """
    config = without_quantization(read_json(source / "config.json"))

    # transformers 5 writes dtype; earlier versions wrote torch_dtype, which must not contradict it.
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        text_config.pop("torch_dtype", None)
        text_config["dtype"] = config["dtype"]

    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _run_on_all_ranks(
    action: Callable[[], Any],
    path: Path,
    group: Any,
) -> list[Any]:
    """Run an action on every rank and return the results by rank.

    Raises UserError on all ranks if one of them cannot write to ``path``. Collective over the group.
    """

    def run_action() -> Any:
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

    return run_on_all_ranks_or_raise(run_action, f"write {path}", group)
