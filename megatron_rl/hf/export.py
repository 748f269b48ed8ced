"""Export of a distributed model as a Hugging Face checkpoint, in slices that fit into memory.

One rank writes each file. In every step each writing rank receives one slice, some rows of a tensor, from the
ranks that hold these rows, and appends the slice to its file.
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
from megatron_rl.shapes.pretrained import SINGLE_FILE, PretrainedModel, read_json
from megatron_rl.shapes.quantized import remove_quantization
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import (
    BoxGroup,
    BoxIndex,
    Coordinates,
    Region,
    compute_regions,
    split_expert_boxes,
    view_of,
)
from megatron_rl.weights.transfer import Exchange, create_communicator, gather_box_groups

FILE_BYTES = 5 * 2**30
"""Largest size of a checkpoint file, as in many published checkpoints."""
SLICE_BYTES = 64 * 2**20
"""Largest size of a slice. A rank has only a few slices in memory at a time."""
COPIED_TENSORS_FILE = "further-tensors.safetensors"
"""File of the tensors that are copied from the source and not trained: layers for multi-token prediction, and
the modules of a multimodal model outside its language model."""
FLOAT32_NAMES = ("e_score_correction_bias",)
"""Name endings of tensors that are exported as float32: the biases that balance the load of experts."""


@dataclass(frozen=True)
class _RowSlice:
    """Slice of complete rows of a tensor, which a rank appends to a file in one step."""

    file: str
    """Name of the file."""
    name: str
    """Name of the tensor."""
    start: Coordinates
    """Coordinates of the slice's first element in the tensor."""
    size: Coordinates
    """Size of the slice in each dimension."""
    dtype: torch.dtype
    """Dtype in the file."""
    fused_experts: FusedExperts | None = None
    """Format of tensors with all experts of a layer; None if the checkpoint has a tensor per expert."""

    def boxes(self, writer: int) -> list[TensorBox]:
        """Divide the slice into boxes of the model's tensors, in the memory of the rank ``writer``.

        A box is a slice of one tensor with its location in a rank's memory, here in the row-major buffer from
        which ``writer`` writes the slice. If the tensor in the file has all experts of a layer, each expert
        in the slice has its own boxes. Otherwise the result is one box.
        """
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
        return split_expert_boxes([box], self.fused_experts)


def export_model(
    model: Any,
    path: str | Path,
    source: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    slice_bytes: int = SLICE_BYTES,
) -> None:
    """Write a `ParallelModel` as safetensors, config.json, index and tokenizer files, with adapters merged.

    ``source`` is the checkpoint from which the model was loaded. Its tokenizer files are copied. Its layers
    for multi-token prediction and its indexers of sparse attention are not trained, so their tensors are
    copied as well. A copied tensor that is quantised is written in ``dtype``.

    If ``source`` is multimodal, the export is multimodal, too: config.json and all modules outside the
    language model are copied from ``source``. A model with a scalar head, or without ``source``, is written
    as a text-only model.

    ``dtype`` is by default the dtype of the parameters. Biases that balance the load of experts are always
    float32.

    Ranks write different files in parallel, in slices of at most ``slice_bytes`` (or one row), so that a rank
    has only a few slices in memory. ``path`` must be new or empty, on a file system that all ranks share.
    Raises UserError on all ranks if ``path`` cannot be written. Collective over the model's ranks.
    """
    parameters = policy_weights(model)
    hf_model = describe_model(model.hf_config)
    if dtype is None:
        first_parameter = next(iter(parameters.values()))
        dtype = first_parameter.dtype

    # Determine the shape and dtype of each tensor in the files.
    fused_experts = hf_model.family.fused_experts
    source_files = None
    if source is not None:
        source_files = open_checkpoint(source)
    multimodal_source = _select_multimodal(hf_model, source_files)
    if multimodal_source is not None:
        fused_experts = multimodal_source.export_fused_experts
    shapes = stored_shapes(hf_model.tensor_shapes(), fused_experts)
    dtypes = dict.fromkeys(shapes, dtype)
    for name in shapes:
        if name.endswith(FLOAT32_NAMES):
            dtypes[name] = torch.float32

    # Divide the trained tensors into files, and list the tensors to copy from the source.
    files = divide_into_files(shapes, dtypes, file_bytes)
    names_to_copy = _list_tensors_to_copy(hf_model, source_files)
    stored_names: dict[str, str] = {}
    if multimodal_source is not None:
        names_to_copy += multimodal_source.names_outside_language_model()
        stored_names = {name: multimodal_source.export_name(name) for name in shapes}
    if names_to_copy and SINGLE_FILE in files:
        # If `model.safetensors` exists, readers ignore the index, and therefore the file of copied tensors.
        files = {"model-00001-of-00001.safetensors": files[SINGLE_FILE]}

    content = _CheckpointContent(
        files,
        shapes,
        dtypes,
        parameters,
        boxes=source_boxes(model),
        stored_names=stored_names,
        fused_experts=fused_experts,
    )
    write_other_files = partial(
        _write_other_files,
        model.hf_config,
        content,
        dtype,
        source,
        names_to_copy,
    )
    _write_checkpoint_folder(model, Path(path), content, slice_bytes, write_other_files)


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

    # All adapters have the same dtype, and are small enough for one file.
    first_parameter = next(iter(parameters.values()))
    dtypes = dict.fromkeys(shapes, first_parameter.dtype)
    files = {PEFT_WEIGHTS: list(shapes)}
    content = _CheckpointContent(files, shapes, dtypes, parameters, boxes=peft_boxes(model))

    config = dict(model.adapters.peft_config())
    config["base_model_name_or_path"] = str(source)
    config["lora_dropout"] = dropout

    def write_config(folder: Path) -> None:
        (folder / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    _write_checkpoint_folder(model, Path(path), content, SLICE_BYTES, write_config)


@dataclass(frozen=True)
class _CheckpointContent:
    """Tensors of a checkpoint to write, and their boxes on this rank."""

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
    """Format of tensors with all experts of a layer; None if the checkpoint has a tensor per expert."""

    def stored_name(self, name: str) -> str:
        """Return the name that the tensor ``name`` has in the files."""
        return self.stored_names.get(name, name)


def _write_checkpoint_folder(
    model: Any,
    path: Path,
    content: _CheckpointContent,
    slice_bytes: int,
    write_other_files: Callable[[Path], None],
) -> None:
    """Write tensors into a temporary folder, add the other files, and rename the folder to ``path``.

    ``write_other_files`` is called with the temporary folder, on the first rank, after all ranks have written
    their tensors. Raises UserError on all ranks if the folder cannot be written. Collective over the model's
    ranks.
    """
    group = model.groups.all
    ranks = model.groups.layout.ranks
    steps = _schedule_slices(content, ranks, slice_bytes)

    # Only the first rank creates and renames the folder; all other ranks wait, and raise its errors.
    temporary_folder = path.with_name(path.name + ".incomplete")
    is_first = device.rank() == ranks[0]

    def create_folder() -> None:
        if is_first:
            _create_temporary_folder(path, temporary_folder)

    _run_on_all_ranks(create_folder, path, group)

    # Send every slice to its writer. All ranks create the communicator, even if they have no messages in the
    # first step.
    parameter_dtypes = {name: value.dtype for name, value in content.parameters.items()}
    sources = gather_box_groups(content.boxes, parameter_dtypes, group)
    writer = _SliceWriter(content, temporary_folder)
    create_communicator(group)
    _collect_slices(
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
    """Return ``source`` if the export must be multimodal like ``source``; otherwise return None."""
    if hf_model.shape.scalar_head:
        return None
    if isinstance(source, CheckpointFiles) and source.is_multimodal:
        return source
    return None


def _schedule_slices(
    content: _CheckpointContent,
    ranks: Sequence[int],
    slice_bytes: int,
) -> list[dict[int, _RowSlice]]:
    """Assign the files to ranks in turn; return a mapping from writing rank to slice for each step."""
    slices_by_writer: dict[int, list[_RowSlice]] = {}
    for index, (file, names) in enumerate(content.files.items()):
        writer = ranks[index % len(ranks)]
        writer_slices = slices_by_writer.setdefault(writer, [])
        for name in names:
            writer_slices += _split_tensor(content, file, name, slice_bytes)

    # Writers with fewer slices write nothing in the last steps.
    num_steps = max(len(writer_slices) for writer_slices in slices_by_writer.values())
    steps: list[dict[int, _RowSlice]] = [{} for _ in range(num_steps)]
    for writer, writer_slices in slices_by_writer.items():
        for step, row_slice in zip(steps, writer_slices, strict=False):
            step[writer] = row_slice
    return steps


def _split_tensor(
    content: _CheckpointContent,
    file: str,
    name: str,
    slice_bytes: int,
) -> Iterator[_RowSlice]:
    """Yield slices of complete rows of a tensor: each has at most ``slice_bytes``, or a single row."""
    shape = content.shapes[name]
    dtype = content.dtypes[name]

    # Split the tensor between rows, so that each slice is contiguous in the file.
    row_shape = shape[1:]
    row_bytes = tensor_bytes(row_shape, dtype)
    rows_per_slice = max(1, slice_bytes // max(row_bytes, 1))

    row_origin = (0,) * len(row_shape)
    for first_row in range(0, shape[0], rows_per_slice):
        num_rows = min(rows_per_slice, shape[0] - first_row)
        yield _RowSlice(
            file,
            name,
            start=(first_row, *row_origin),
            size=(num_rows, *row_shape),
            dtype=dtype,
            fused_experts=content.fused_experts,
        )


class _SliceWriter:
    """Writer of the tensor files that are assigned to this rank, in ``folder``.

    Only `close` raises write errors: until then other ranks send slices, and would wait forever for a writer
    that has left the loop.
    """

    def __init__(self, content: _CheckpointContent, folder: Path) -> None:
        self._content = content
        self._folder = folder
        self._open_files: dict[str, SafetensorsWriter] = {}
        self._error: OSError | None = None

    def write(self, row_slice: _RowSlice, values: Tensor) -> None:
        """Append the ``values`` of a slice to the slice's file; after an error do nothing."""
        if self._error is not None:
            return

        # Open the file for its first slice. The header needs the shapes of all tensors in the file.
        try:
            if row_slice.file not in self._open_files:
                content = self._content
                shapes: dict[str, Shape] = {}
                dtypes: dict[str, torch.dtype] = {}
                for name in content.files[row_slice.file]:
                    stored_name = content.stored_name(name)
                    shapes[stored_name] = content.shapes[name]
                    dtypes[stored_name] = content.dtypes[name]
                path = self._folder / row_slice.file
                self._open_files[row_slice.file] = SafetensorsWriter(path, shapes, dtypes)
            self._open_files[row_slice.file].write(values)
        except OSError as error:
            self._error = error

    def close(self) -> dict[str, str]:
        """Close the files and return their digests by name; raise the first write error."""
        is_complete = self._error is None
        digests: dict[str, str] = {}
        for name, file in self._open_files.items():
            digests[name] = file.close(is_complete)
        if self._error is not None:
            raise self._error
        return digests


def _collect_slices(
    steps: Sequence[Mapping[int, _RowSlice]],
    sources: Sequence[BoxGroup],
    local_boxes: BoxIndex,
    parameters: Mapping[str, Tensor],
    slice_writer: _SliceWriter,
    group: Any,
) -> None:
    """Send the regions of each slice to the writing rank, step by step, and write this rank's slices.

    ``sources`` are the boxes of all ranks, ``local_boxes`` the boxes in this rank's ``parameters``.
    Collective over the group.
    """
    # Every rank computes the size of the largest slice from the schedule, so no rank has to send it.
    rank = device.rank()
    max_slice_bytes = 0
    for step in steps:
        for row_slice in step.values():
            slice_bytes = tensor_bytes(row_slice.size, row_slice.dtype)
            max_slice_bytes = max(max_slice_bytes, slice_bytes)

    for step, transfers in zip(steps, _schedule_transfers(steps, sources), strict=True):
        row_slice = step.get(rank)
        slice_values = None
        slice_boxes = BoxIndex(())
        if row_slice is not None:
            slice_boxes = BoxIndex(row_slice.boxes(rank))
            slice_values = torch.empty(
                row_slice.size,
                dtype=row_slice.dtype,
                device=device.device(),
            )

        # List the views to send from and to receive into by peer. A region that this rank both holds and
        # writes is copied without a message.
        sends: dict[int, list[Any]] = {}
        receives: dict[int, list[Any]] = {}
        for region, writer, sender in transfers:
            source_view = None
            if sender == rank:
                box = local_boxes.boxes_containing(region)[0]
                source_view = view_of(parameters[box.storage], box)

            if writer == rank:
                assert slice_values is not None
                (slice_box,) = slice_boxes.boxes_containing(region)
                slice_view = view_of(slice_values, slice_box)
                if source_view is not None:
                    slice_view.copy_(source_view)
                else:
                    receives.setdefault(sender, []).append(((slice_view,), region.dtype))
            elif source_view is not None:
                sends.setdefault(writer, []).append((source_view, region.dtype))

        # A message must hold a complete slice, and the padding that aligns its regions.
        max_message_bytes = 2 * max_slice_bytes + 4096
        exchange = Exchange(sends, receives, max_message_bytes, group)
        exchange.run()
        if row_slice is not None and slice_values is not None:
            slice_writer.write(row_slice, slice_values)


def _schedule_transfers(
    steps: Sequence[Mapping[int, _RowSlice]],
    sources: Sequence[BoxGroup],
) -> list[list[tuple[Region, int, int]]]:
    """Return the transfers of each export step, each as (region, writing rank, sending rank).

    Each of ``steps`` maps writing ranks to their slices, and ``sources`` are the boxes of all ranks. If
    several ranks hold a region, they alternate as the sender.
    """
    # List the boxes that each writer needs, and (first row, step) of every slice by tensor name.
    boxes_by_writer: dict[int, list[TensorBox]] = {}
    dtypes: dict[str, torch.dtype] = {}
    slice_starts: dict[str, list[tuple[int, int]]] = {}
    for step_index, step in enumerate(steps):
        for writer, row_slice in step.items():
            dtypes[row_slice.name] = row_slice.dtype
            for box in row_slice.boxes(writer):
                boxes_by_writer.setdefault(writer, []).append(box)
                slice_starts.setdefault(box.name, []).append((box.start[0], step_index))

    destinations = []
    for writer, writer_boxes in boxes_by_writer.items():
        destinations.append(BoxGroup((writer,), tuple(writer_boxes), dtypes))

    transfers: list[list[tuple[Region, int, int]]] = [[] for _ in steps]
    for region_index, region in enumerate(compute_regions(sources, destinations)):
        # Find the slice with the region: the last slice that begins at or before the region's first row. A
        # slice that begins at exactly this row is found, too, since every step index is less than
        # `len(steps)`.
        (writer,) = region.receivers
        starts = slice_starts[region.name]
        last_start = (region.start[0], len(steps))
        slice_index = bisect_right(starts, last_start) - 1
        _, step_index = starts[slice_index]

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

    # Remove the files of an interrupted export.
    temporary_folder.mkdir(parents=True, exist_ok=True)
    for file in temporary_folder.iterdir():
        file.unlink()


def _publish_folder(
    temporary_folder: Path,
    path: Path,
    write_other_files: Callable[[Path], None],
    digests: Mapping[str, str],
) -> None:
    """Write the remaining files and all digests into the temporary folder, and rename it to ``path``.

    ``write_other_files`` is called with the temporary folder. ``digests`` are the digests of the tensor
    files, by file name.
    """
    write_other_files(temporary_folder)
    seal_folder(temporary_folder, digests)

    # If ``path`` exists, it is an empty folder: the export has checked this before it created the temporary
    # folder.
    if path.is_dir():
        path.rmdir()
    os.replace(temporary_folder, path)
    # Sync the parent folder too: otherwise a power failure could undo the renaming.
    sync_folder(path.parent)


def _write_other_files(
    hf_config: Any,
    content: _CheckpointContent,
    dtype: torch.dtype,
    source: str | Path | None,
    names_to_copy: Sequence[str],
    folder: Path,
) -> None:
    """Write config.json, the tokenizer files, the copied tensors and the index of all tensors.

    ``names_to_copy`` are the stored names of the tensors that are copied from ``source``.
    """
    files: dict[str, Sequence[str]] = {}
    for file, names in content.files.items():
        files[file] = [content.stored_name(name) for name in names]

    if content.stored_names:
        assert source is not None
        _write_multimodal_config(Path(source), dtype, folder)
    else:
        _write_config(hf_config, dtype, folder)

    # The index contains the total size of all tensors.
    total_bytes = 0
    for name, shape in content.shapes.items():
        total_bytes += tensor_bytes(shape, content.dtypes[name])
    if source is not None and names_to_copy:
        total_bytes += copy_tensors(source, folder / COPIED_TENSORS_FILE, names_to_copy, dtype)
        files[COPIED_TENSORS_FILE] = names_to_copy

    # Several files need an index.
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

    # Without these keys an engine would interpret the weights as a different model.
    for key, value in model.engine_keys.items():
        setattr(config, key, value)
    config.save_pretrained(folder)


def _write_multimodal_config(
    source: Path,
    dtype: torch.dtype,
    folder: Path,
) -> None:
    """Copy the config.json of a multimodal ``source`` into ``folder``, without its quantisation settings.

    Its dtype is replaced by ``dtype``.
    """
    config = remove_quantization(read_json(source / "config.json"))

    # transformers 5 writes dtype; earlier versions wrote torch_dtype, which must not contradict it.
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        text_config.pop("torch_dtype", None)
        text_config["dtype"] = config["dtype"]

    config_text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(config_text, encoding="utf-8")


def _run_on_all_ranks(
    action: Callable[[], Any],
    path: Path,
    group: Any,
) -> list[Any]:
    """Run an action on every rank and return the results by rank.

    Raises UserError on all ranks if a rank cannot write to ``path``. Collective over the group.
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
