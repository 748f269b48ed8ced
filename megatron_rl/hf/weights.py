"""Load a Hugging Face checkpoint into Megatron chunks, and say where each of its tensors lies there."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import broadcast_tensor, run_on_all_ranks_or_raise
from megatron_rl.errors import UserError, some_of
from megatron_rl.hf.files import CheckpointFiles
from megatron_rl.hf.megatron_source import MegatronFiles
from megatron_rl.interop.megatron_lm.checkpoint import POINTER
from megatron_rl.megatron.model import Chunked, ParallelModel, live_parameters, of_experts
from megatron_rl.megatron.model_spec import pretrained, read_hf_config
from megatron_rl.megatron.parameter_mapping import global_name, shard_of, trace_import, vocabulary_names
from megatron_rl.progress import advance
from megatron_rl.shapes.layer_weights import EMBEDDING, OUTPUT, SCALAR
from megatron_rl.shapes.pretrained import separate_head_error
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import view_of

SAMPLED = 64
_COMPARED_ROWS = 8192
"""Rows of the vocabulary that are compared at a time, so that no whole copy of an embedding is made."""
_SHOWN = 8
Checkpoint = CheckpointFiles | MegatronFiles
"""What gives slices of a model's tensors by their Hugging Face names."""


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Return the tensors of a model's folder, which has them itself or points to a Megatron checkpoint."""
    return MegatronFiles(path) if (Path(path) / POINTER).is_file() else CheckpointFiles(path)


def source_boxes(model: Chunked) -> list[TensorBox]:
    """Return where each part of the checkpoint's tensors lies in this rank's parameters.

    Storage names are those of `live_parameters`. Raises CoverageError unless every element except the
    padding of the vocabulary is filled exactly once, and UserError for parameters that nothing names.
    """
    parameters = live_parameters(model)
    canonical: dict[str, str] = {}
    for storage in parameters:
        other = canonical.setdefault(global_name(model, storage), storage)
        if other != storage:
            raise UserError(
                f"two parameters of the model are called {global_name(model, storage)}",
                where="model.weights",
                expected="one name of Megatron's for each parameter",
                got=f"{other} and {storage}",
                fix="correct the names, or the layers that the model provider builds for a stage",
            )
    stand_ins = {storage: torch.empty_like(value, device="meta") for storage, value in parameters.items()}
    shard = shard_of(model)
    return trace_import(
        {name: stand_ins[storage] for name, storage in canonical.items()},
        pretrained(model.hf_config),
        shard,
        device.rank(),
        canonical,
    )


def load_weights(model: Chunked, path: str | Path) -> None:
    """Fill the model from a checkpoint directory; each rank reads a share of the slices it holds.

    Values are converted to the parameters' dtype; rows that pad the vocabulary become zero. A head of one
    number stays as it was built where the checkpoint is of a policy, which has none. Raises
    UserError, on all ranks, when tensors are missing, unexpected or of another shape. A simulation reads
    nothing. Collective over the model's ranks, as `fill` is.
    """
    if device.simulated():
        return

    def checked() -> Checkpoint:
        files = open_checkpoint(path)
        check_tensors(files, model)
        return files

    fill(live_parameters(model), model, checked)


def fill(parameters: Mapping[str, Tensor], model: Chunked, opened: Callable[[], Checkpoint]) -> None:
    """Fill tensors of the shapes of a model's `live_parameters`, by the same names, from a checkpoint.

    Of the ranks that hold the same parameter one reads it from the files that ``opened`` returns, all ranks
    at once, and then hands it to the others, in place: a data-parallel group reads each byte once, and
    nothing but one slice lies beside the parameters. What fails on one rank fails on all, before anything is
    handed on. A model without this package's groups reads everything on each rank. Collective over the
    model's ranks.
    """
    groups = getattr(model, "groups", None)
    if groups is None:
        _read(parameters, parameters.keys(), model, opened())
        return
    sources = _sources(parameters, groups)
    share = _share(sources)
    run_on_all_ranks_or_raise(
        lambda: _read(parameters, share, model, opened()), "read the model's weights", groups.all
    )
    with torch.no_grad():
        for storage, (group, source) in sources.items():
            broadcast_tensor(parameters[storage], source, group)


def own_share(parameters: Mapping[str, Tensor], model: ParallelModel) -> set[str]:
    """Return the names of a model's parameters that this rank reads for all ranks that hold them alike."""
    return _share(_sources(parameters, model.groups))


def _share(sources: Mapping[str, tuple[Any, int]]) -> set[str]:
    return {name for name, (group, source) in sources.items() if group.rank() == source}


def _sources(parameters: Mapping[str, Tensor], groups: Any) -> dict[str, tuple[Any, int]]:
    """Return the group that holds each parameter alike, and the position in it of who reads it.

    Each parameter goes to the member that has fewest bytes so far; all members find the same.
    """
    sources: dict[str, tuple[Any, int]] = {}
    dense, expert = [0] * groups.data_context.size(), [0] * groups.expert_data.size()
    for storage, parameter in parameters.items():
        inside = of_experts(storage)
        bytes_of = expert if inside else dense
        source = bytes_of.index(min(bytes_of))
        bytes_of[source] += parameter.nbytes
        sources[storage] = (groups.expert_data if inside else groups.data_context, source)
    return sources


def _read(
    parameters: Mapping[str, Tensor], chosen: Container[str], model: Chunked, files: Checkpoint
) -> None:
    """Fill the ``chosen`` ones of a model's parameters from files."""
    boxes = source_boxes(model)
    padded = vocabulary_names(pretrained(model.hf_config).shape)
    with torch.no_grad():
        for storage, parameter in parameters.items():
            if storage in chosen and global_name(model, storage) in padded:
                parameter.zero_()
        for box in boxes:
            if box.storage not in chosen:
                continue
            if box.name == SCALAR and SCALAR not in files.names():
                continue  # a policy's checkpoint: the head keeps the values it was built with
            values = files.read(box.name, box.start, box.size)
            require_finite(values, box.name, files)
            view_of(parameters[box.storage], box).copy_(values)
            advance("tensors read")


def fingerprint(path: str | Path, dtype: torch.dtype) -> str:
    """Return a checksum of a model's weights in ``dtype``: of a row of each of up to `SAMPLED` tensors.

    It is the same in whatever files, and of whatever kind, the weights are stored.
    """
    files = open_checkpoint(path)
    names = sorted(files.names() & pretrained(read_hf_config(path)).tensor_shapes().keys())
    checksum = 0
    for name in names[:: -(-len(names) // SAMPLED)]:
        shape = files.shape(name)
        row = files.read(name, [0] * len(shape), [*(1 for _ in shape[1:]), *shape[-1:]]).to(dtype)
        checksum = zlib.crc32(row.contiguous().view(torch.uint8).numpy().tobytes(), checksum)
    return f"{checksum:08x}"


def require_finite(values: Tensor, name: str, files: Checkpoint) -> None:
    """Raise UserError for weights that are not numbers; one pass, and no copy."""
    if values.numel() == 0 or all(bool(end.isfinite()) for end in values.aminmax()):
        return
    raise UserError(
        f"the checkpoint's tensor {name} has values that are not numbers",
        where=str(files.path),
        expected="finite weights",
        got=f"{int(values.isnan().sum())} NaN and {int(values.isinf().sum())} infinite of {values.numel()}",
        fix="download the checkpoint again, or use one that was saved before training diverged",
    )


def check_tensors(files: Checkpoint, model: Chunked) -> None:
    """Compare a checkpoint's tensors with what the model asks for; raise UserError on a difference."""
    described = pretrained(model.hf_config)
    expected = described.tensor_shapes()
    stored = files.names()
    if SCALAR not in stored:
        expected.pop(SCALAR, None)
    missing = sorted(set(expected) - stored)
    extra = stored - set(expected)
    unexpected = sorted(name for name in extra if not described.is_ignorable(name))
    if missing or unexpected:
        hint = None
        if missing == [OUTPUT]:
            hint = "set tie_word_embeddings in config.json if the output layer shares the embedding"
        raise UserError(
            "The checkpoint's tensors are not those of the model in its config.json.",
            where=str(files.path),
            expected=f"missing: {some_of(missing, _SHOWN)}" if missing else None,
            got=f"unexpected: {some_of(unexpected, _SHOWN)}" if unexpected else None,
            fix=hint or "use a checkpoint saved from this architecture and number of layers",
        )
    if described.has_separate_head(stored):
        _require_equal_head(files)
    for name, shape in expected.items():
        if files.shape(name) != shape:
            raise UserError(
                f"The checkpoint's tensor {name} has another shape than its config.json says.",
                where=str(files.path),
                expected=str(list(shape)),
                got=str(list(files.shape(name))),
                fix="use the config.json that belongs to these weights",
            )


def _require_equal_head(files: Checkpoint) -> None:
    """Raise UserError unless an output layer that config.json ties has the values of the embedding."""
    shapes = {name: files.shape(name) for name in (OUTPUT, EMBEDDING)}
    rows, width = shapes[EMBEDDING]
    equal = shapes[OUTPUT] == shapes[EMBEDDING]
    for first in range(0, rows if equal else 0, _COMPARED_ROWS):
        box = (first, 0), (min(_COMPARED_ROWS, rows - first), width)
        equal = equal and torch.equal(files.read(OUTPUT, *box), files.read(EMBEDDING, *box))
    if not equal:
        raise separate_head_error(files.path, shapes, "other values")
