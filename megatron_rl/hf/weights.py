"""Import of Hugging Face checkpoints into Megatron models.

A box is a slice of a Hugging Face tensor with its location in a rank's parameter. `source_boxes` computes the
boxes of a model, and loading copies the values of each box.

Each parameter is read by one of the ranks with the same shard, and broadcast to the other ranks. A
data-parallel group therefore reads each byte once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import broadcast_tensor, run_on_all_ranks_or_raise
from megatron_rl.errors import UserError, join_names
from megatron_rl.hf.files import CheckpointFiles
from megatron_rl.hf.megatron_source import MegatronFiles
from megatron_rl.interop.megatron_lm.checkpoint import POINTER
from megatron_rl.megatron.model import ChunkedModel, ParallelModel, is_expert_parameter, live_parameters
from megatron_rl.megatron.model_spec import describe_model, read_hf_config
from megatron_rl.megatron.parameter_mapping import global_name, shard_of, trace_import, vocabulary_names
from megatron_rl.progress import count_progress
from megatron_rl.shapes.layer_weights import EMBEDDING, OUTPUT, SCALAR
from megatron_rl.shapes.pretrained import separate_head_error
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import view_of

MAX_SAMPLED_TENSORS = 64
"""Largest number of tensors that `compute_fingerprint` samples, so that it takes only seconds."""
_COMPARED_ROWS = 8192
"""Number of vocabulary rows to compare at a time, so that no complete embedding is in memory."""
_MAX_NAMES_LISTED = 8
"""Largest number of tensor names in an error: a checkpoint of a wrong model would have hundreds."""

Checkpoint = CheckpointFiles | MegatronFiles
"""Source of slices of a model's tensors, by their Hugging Face names."""


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the tensors of a model's folder: safetensors, or the Megatron checkpoint to which it points."""
    if (Path(path) / POINTER).is_file():
        return MegatronFiles(path)
    return CheckpointFiles(path)


def source_boxes(model: ChunkedModel) -> list[TensorBox]:
    """Return the slices of Hugging Face tensors that this rank's parameters contain, with their locations.

    A box is one slice with its location in a parameter. ``TensorBox.storage`` is the parameter's name in
    `live_parameters`.

    Raises CoverageError unless the boxes fill every element exactly once, except for the padding of the
    vocabulary. Raises UserError if two parameters have the same name, or a name is unknown.
    """
    parameters = live_parameters(model)

    # Megatron's name of a parameter -> storage name.
    storage_by_name: dict[str, str] = {}
    for storage in parameters:
        first_storage = storage_by_name.setdefault(global_name(model, storage), storage)
        if first_storage != storage:
            raise UserError(
                f"two parameters of the model are called {global_name(model, storage)}",
                where="model.weights",
                expected="a different name for each parameter in Megatron's model",
                got=f"{first_storage} and {storage}",
                fix="correct the names, or the layers that the model provider builds for a stage",
            )

    # Run the weight import on meta tensors: it reads no values, and the box of each copy is recorded.
    meta_tensors: dict[str, Tensor] = {}
    for name, storage in storage_by_name.items():
        meta_tensors[name] = torch.empty_like(parameters[storage], device="meta")
    return trace_import(
        meta_tensors,
        describe_model(model.hf_config),
        shard_of(model),
        device.rank(),
        storage_by_name,
    )


def load_weights(model: ChunkedModel, path: str | Path) -> None:
    """Fill the model from a checkpoint directory.

    Values are converted to the parameters' dtype; rows that pad the vocabulary become zero. If the checkpoint
    has no scalar head, for example the checkpoint of a policy, a scalar head of the model retains its initial
    values. A simulated rank reads no file. Raises UserError on all ranks if tensors are missing, unexpected
    or have a different shape. Collective over the model's ranks.
    """
    if device.is_simulated():
        return

    def open_and_check() -> Checkpoint:
        files = open_checkpoint(path)
        check_tensors(files, model)
        return files

    fill_parameters(live_parameters(model), model, open_and_check)


def fill_parameters(
    parameters: Mapping[str, Tensor],
    model: ChunkedModel,
    open_files: Callable[[], Checkpoint],
) -> None:
    """Fill ``parameters``, which have the names and shapes of a model's `live_parameters`, from a checkpoint.

    ``open_files`` opens the checkpoint. All ranks read in parallel: each rank reads the parameters that are
    assigned to it, then broadcasts them in place to the ranks with the same parameters. A rank needs
    additional memory for only one slice. If reading fails on one rank, all ranks raise before the first
    broadcast. For a model without `ParallelGroups` each rank reads all parameters. Collective over the
    model's ranks.
    """
    groups = getattr(model, "groups", None)
    if groups is None:
        _read_parameters(parameters, parameters.keys(), model, open_files())
        return

    # If one rank cannot read its parameters, raise on all ranks before the first broadcast. The other ranks
    # would otherwise hang in a broadcast.
    sources = _assign_sources(parameters, groups)
    assigned_names = _parameters_of_this_rank(sources)

    def read_assigned() -> None:
        _read_parameters(parameters, assigned_names, model, open_files())

    run_on_all_ranks_or_raise(read_assigned, "read the model's weights", groups.all)

    # The order of broadcasts is the same on all ranks, because `_assign_sources` is deterministic.
    with torch.no_grad():
        for storage, (group, source) in sources.items():
            broadcast_tensor(parameters[storage], source, group)


def assigned_parameters(parameters: Mapping[str, Tensor], model: ParallelModel) -> set[str]:
    """Return the names of the parameters that this rank reads for all ranks with the same parameters."""
    return _parameters_of_this_rank(_assign_sources(parameters, model.groups))


def _parameters_of_this_rank(sources: Mapping[str, tuple[Any, int]]) -> set[str]:
    """Return the names of the parameters that this rank reads; ``sources`` come from `_assign_sources`."""
    return {name for name, (group, source) in sources.items() if group.rank() == source}


def _assign_sources(
    parameters: Mapping[str, Tensor],
    groups: Any,
) -> dict[str, tuple[Any, int]]:
    """Assign each parameter to one rank of the group that replicates it: return (group, rank in the group).

    A parameter is assigned to the rank with the fewest bytes so far. All ranks compute the same assignment.
    """
    sources: dict[str, tuple[Any, int]] = {}
    dense_bytes = [0] * groups.data_context.size()
    expert_bytes = [0] * groups.expert_data.size()
    for name, parameter in parameters.items():
        # Experts are replicated over a different group than dense parameters.
        if is_expert_parameter(name):
            group = groups.expert_data
            bytes_by_rank = expert_bytes
        else:
            group = groups.data_context
            bytes_by_rank = dense_bytes

        # Select the least loaded rank, and the lowest of several such ranks, so that all ranks agree.
        source = bytes_by_rank.index(min(bytes_by_rank))
        bytes_by_rank[source] += parameter.nbytes
        sources[name] = (group, source)
    return sources


def _read_parameters(
    parameters: Mapping[str, Tensor],
    selected_names: Container[str],
    model: ChunkedModel,
    files: Checkpoint,
) -> None:
    """Load the parameters whose names are in ``selected_names`` from a checkpoint's files, slice by slice."""
    boxes = source_boxes(model)
    padded_names = vocabulary_names(describe_model(model.hf_config).shape)
    with torch.no_grad():
        for storage, parameter in parameters.items():
            # Zero the rows that pad the vocabulary, which no box fills.
            if storage in selected_names and global_name(model, storage) in padded_names:
                parameter.zero_()

        for box in boxes:
            if box.storage not in selected_names:
                continue
            # A policy's checkpoint has no scalar head: the critic's head retains its initial values.
            if box.name == SCALAR and SCALAR not in files.names():
                continue

            values = files.read(box.name, box.start, box.size)
            require_finite(values, box.name, files)
            view_of(parameters[box.storage], box).copy_(values)
            count_progress("tensors read")


def compute_fingerprint(path: str | Path, dtype: torch.dtype) -> str:
    """Compute a checksum of the first rows of up to `MAX_SAMPLED_TENSORS` tensors, converted to ``dtype``.

    The checksum does not depend on the checkpoint's format or its division into files.
    """
    files = open_checkpoint(path)
    model = describe_model(read_hf_config(path))
    names = sorted(files.names() & model.tensor_shapes().keys())

    # Sample every n-th tensor in the order of names, which does not depend on the format.
    interval = -(-len(names) // MAX_SAMPLED_TENSORS)

    checksum = 0
    for name in names[::interval]:
        shape = files.shape(name)
        # Read the first row: size 1 in every dimension but the last.
        origin = [0] * len(shape)
        row_size = [1] * (len(shape) - 1) + list(shape[-1:])
        row = files.read(name, origin, row_size)
        row = row.to(dtype).contiguous()
        content = row.view(torch.uint8).numpy().tobytes()
        checksum = zlib.crc32(content, checksum)
    return f"{checksum:08x}"


def require_finite(
    values: Tensor,
    name: str,
    files: Checkpoint,
) -> None:
    """Raise UserError if any of the ``values`` of a checkpoint's tensor ``name`` is NaN or infinite."""
    if values.numel() == 0:
        return

    # aminmax propagates NaN, so it finds NaN and infinities in one pass, without a copy.
    minimum, maximum = values.aminmax()
    if bool(minimum.isfinite()) and bool(maximum.isfinite()):
        return

    nan_count = int(values.isnan().sum())
    infinite_count = int(values.isinf().sum())
    raise UserError(
        f"the checkpoint's tensor {name} has values that are not numbers",
        where=str(files.path),
        expected="finite weights",
        got=f"{nan_count} NaN and {infinite_count} infinite of {values.numel()}",
        fix="download the checkpoint again, or use one that was saved before training diverged",
    )


def check_tensors(files: Checkpoint, model: ChunkedModel) -> None:
    """Raise UserError unless a checkpoint has exactly the model's tensors, with the model's shapes."""
    hf_model = describe_model(model.hf_config)
    expected_shapes = hf_model.tensor_shapes()
    stored_names = files.names()

    # A critic may start from a policy's checkpoint, with a new head.
    if SCALAR not in stored_names:
        expected_shapes.pop(SCALAR, None)

    missing_names = sorted(set(expected_shapes) - stored_names)
    extra_names = stored_names - set(expected_shapes)
    unexpected_names = sorted(name for name in extra_names if not hf_model.is_ignorable(name))
    if missing_names or unexpected_names:
        expected_line = None
        if missing_names:
            expected_line = f"missing: {join_names(missing_names, _MAX_NAMES_LISTED)}"
        got_line = None
        if unexpected_names:
            got_line = f"unexpected: {join_names(unexpected_names, _MAX_NAMES_LISTED)}"
        fix = "use a checkpoint saved from this architecture and number of layers"
        if missing_names == [OUTPUT]:
            fix = "set tie_word_embeddings in config.json if the output layer shares the embedding"
        raise UserError(
            "The checkpoint's tensors do not match the model in its config.json.",
            where=str(files.path),
            expected=expected_line,
            got=got_line,
            fix=fix,
        )

    if hf_model.has_separate_head(stored_names):
        _require_equal_head(files)

    # All tensors exist: compare their shapes.
    for name, shape in expected_shapes.items():
        if files.shape(name) != shape:
            raise UserError(
                f"The shape of the checkpoint's tensor {name} does not match its config.json.",
                where=str(files.path),
                expected=str(list(shape)),
                got=str(list(files.shape(name))),
                fix="use the config.json that belongs to these weights",
            )


def _require_equal_head(files: Checkpoint) -> None:
    """Raise UserError if a stored output layer differs from the embedding, to which config.json ties it."""
    shapes = {
        OUTPUT: files.shape(OUTPUT),
        EMBEDDING: files.shape(EMBEDDING),
    }
    is_equal = shapes[OUTPUT] == shapes[EMBEDDING]

    # Compare blocks of rows up to the first difference.
    num_rows, width = shapes[EMBEDDING]
    first_row = 0
    while is_equal and first_row < num_rows:
        start = (first_row, 0)
        size = (min(_COMPARED_ROWS, num_rows - first_row), width)
        head_rows = files.read(OUTPUT, start, size)
        embedding_rows = files.read(EMBEDDING, start, size)
        is_equal = torch.equal(head_rows, embedding_rows)
        first_row += _COMPARED_ROWS

    if not is_equal:
        raise separate_head_error(files.path, shapes, "other values")
