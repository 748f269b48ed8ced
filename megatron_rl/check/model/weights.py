"""Rules on a checkpoint's weights, read from the headers of its safetensors files.

A header lists name, dtype, shape and offsets of every tensor: enough to detect truncated files, and tensors
that do not belong to the model, without reading the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.check.files import FileFindings
from megatron_rl.errors import UserError, join_names
from megatron_rl.interop.megatron_lm.checkpoint import POINTER
from megatron_rl.shapes.fused_experts import BLOCKS, SCALES, locate_tensors
from megatron_rl.shapes.layer_weights import EMBEDDING, OUTPUT, SCALAR
from megatron_rl.shapes.multimodal import language_model_names
from megatron_rl.shapes.pretrained import (
    INDEX,
    PretrainedModel,
    parse_json_object,
    read_index,
    separate_head_error,
    weight_files,
)
from megatron_rl.shapes.quantized import (
    BYTES,
    FP8,
    Quantization,
    has_mxfp4_scales,
    has_one_element,
    is_activation_scale,
    mxfp4_error,
    nvfp4_error,
    scale_shape_error,
    scales_by_weight,
    tensor_scales_by_weight,
)

_FLOATS = ("F64", "F32", "F16", "BF16")

_MAX_HEADER_BYTES = 100_000_000
"""Largest valid header of a file in bytes; safetensors itself refuses longer ones."""

_LENGTH_BYTES = 8
"""Number of bytes at the start of a file with the length of its header, a little-endian integer."""

_POINTER_BYTES = 1024
"""Size in bytes below which a file may be a Git LFS pointer, in place of a file that was not downloaded."""

_COMPARED_BYTES = 2**24
"""Chunk size in bytes for comparing two tensors, since two large embeddings may not fit in memory."""

_MAX_NAMES_LISTED = 4
"""Maximum number of tensor names that an error lists."""

_CONVERT = (
    'python -c "import sys; from transformers import AutoModelForCausalLM as Model; '
    "Model.from_pretrained(sys.argv[1], dtype='auto').save_pretrained(sys.argv[1])\""
)
"""Command that converts the pickled weights in a folder, its last argument, to safetensors in the folder."""

_MALFORMED_HEADER = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""Exceptions that reading a header raises if it is damaged or has an unexpected JSON structure."""


@dataclass(frozen=True)
class StoredTensor:
    """Tensor in a safetensors file, from the file's header: shape, dtype and position of its bytes.

    Example: ``StoredTensor((8, 64), "BF16", Path("model.safetensors"), begin=2048, size=1024)``.
    """

    shape: tuple[int, ...]
    """Shape of the tensor."""
    dtype: str
    """Dtype of the tensor in safetensors' spelling, such as ``BF16``."""
    file: Path
    """File that contains the tensor."""
    begin: int = 0
    """Offset of the tensor's first byte in the file."""
    size: int = 0
    """Number of bytes of the tensor."""


def check_weights(path: Path, key: str, files: FileFindings, model: PretrainedModel | None) -> None:
    """Check that every weight file is complete, and that its tensors match ``model`` if that is available.

    ``path`` is the checkpoint's folder, and ``key`` the key that names it. Errors are added to ``files``.
    """
    if (path / POINTER).is_file():
        return  # a Megatron-LM checkpoint, which `check.model.megatron_lm` checks

    # The list of files: an index, or the safetensors files in the folder.
    findings_before = _count_findings(files)
    shards = weight_files(path)
    weight_map: dict[str, str] = {}
    if shards is None:
        # The checkpoint has an index.
        stored_index = _read_index(path, files)
        if stored_index is None:
            return
        weight_map = stored_index
        shards = sorted({path / name for name in weight_map.values()})
    if not shards:
        _report_no_weights(path, key, files)

    # The headers of all files together list the stored tensors.
    stored_tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        if shard.is_file():
            stored_tensors |= _read_shard(shard, files)
            continue

        expected = f"a file {shard.name}"
        if weight_map:
            expected = f"every file that {INDEX} names"
        message = f"a weight file is missing: {shard.name}"
        files.record_missing(shard, message, key, expected, "download the checkpoint again")

    # Stop after a missing or broken file: its tensors would be reported a second time.
    if _count_findings(files) != findings_before:
        return

    # Compare with the index first: a tensor in a different file than listed has its own error.
    misplaced_names: list[str] = []
    for name, file in sorted(weight_map.items()):
        if name not in stored_tensors or stored_tensors[name].file != path / file:
            misplaced_names.append(name)
    if misplaced_names:
        files.errors.append(_misplaced_error(path, weight_map, misplaced_names))
    elif model is not None:
        files.errors.extend(_tensor_errors(path, stored_tensors, model))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file: name -> tensor; raise ValueError for a damaged file."""
    size = path.stat().st_size

    with path.open("rb") as stream:
        header_length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _POINTER_BYTES and b"git-lfs" in path.read_bytes():
            raise ValueError("a Git LFS pointer instead of the weights")
        if size < _LENGTH_BYTES or header_length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise ValueError(f"{size} bytes, which do not contain a valid header")
        header = parse_json_object(stream.read(header_length))

    # Offsets count from the end of the header.
    data_start = _LENGTH_BYTES + header_length
    data_end = 0
    tensors: dict[str, StoredTensor] = {}
    for name, attributes in header.items():
        if name == "__metadata__":
            continue

        begin, end = attributes["data_offsets"]
        tensors[name] = StoredTensor(
            shape=tuple(attributes["shape"]),
            dtype=str(attributes["dtype"]),
            file=path,
            begin=data_start + begin,
            size=end - begin,
        )
        data_end = max(data_end, begin, end)

    # A download that was cut short has fewer bytes than its header lists.
    if data_start + data_end != size:
        raise ValueError(f"{size} bytes, but the header of the file lists {data_start + data_end} bytes")
    return tensors


def _count_findings(files: FileFindings) -> tuple[int, int, int]:
    """Count the errors, the missing files and the directories that do not exist yet.

    The caller compares the counts before and after a check to detect new findings.
    """
    return len(files.errors), len(files.missing), len(files.to_be_made)


def _read_index(path: Path, files: FileFindings) -> dict[str, str] | None:
    """Return tensor name -> file name from the checkpoint's index; report a broken index and return None."""
    try:
        return read_index(path)
    except UserError as error:
        files.errors.append(error)
        return None


def _report_no_weights(path: Path, key: str, files: FileFindings) -> None:
    """Record in ``files`` that the checkpoint at ``path`` has no safetensors file."""
    fix = "copy the weight files into the directory"

    # Pickled weights are not read, since unpickling can run code.
    if any(path.glob("*.bin")):
        fix = f"convert the .bin files: {_CONVERT} {path}"
    file = path / "model.safetensors"
    files.record_missing(file, "the model has no weights", key, "one or more .safetensors files", fix)


def _read_shard(path: Path, files: FileFindings) -> dict[str, StoredTensor]:
    """Return the tensors of a weight file by name; report a broken file and return an empty dict."""
    try:
        return read_header(path)
    except _MALFORMED_HEADER as error:
        # A ValueError of `read_header` has a complete message. For other exceptions, add the type.
        got = str(error)
        if type(error) is not ValueError:
            got = f"{type(error).__name__}: {error}"

        files.errors.append(
            UserError(
                "a weight file is broken",
                where=str(path),
                expected="a complete safetensors file",
                got=got,
                fix="download or copy the file again",
            )
        )
        return {}


def _misplaced_error(path: Path, weight_map: Mapping[str, str], misplaced_names: list[str]) -> UserError:
    """Return the error for tensors that are not in the file that the index lists for them.

    ``weight_map`` is the index: tensor name -> file name. ``path`` is the folder with the index.
    """
    listed_tensors = [f"{name} in {weight_map[name]}" for name in misplaced_names]
    return UserError(
        "the model's list of weight files names tensors that the files do not contain",
        where=str(path / INDEX),
        expected=join_names(listed_tensors, _MAX_NAMES_LISTED),
        got=f"{len(misplaced_names)} of {len(weight_map)} tensors that are not in the listed file",
        fix="download the checkpoint again, index and weight files together",
    )


def _tensor_errors(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    model: PretrainedModel,
) -> list[UserError]:
    """Return the error for stored tensors that do not match the model in config.json.

    Only the first error is returned. The order of the checks is: quantised tensors, missing and unexpected
    names, an untied output layer, shapes.
    """
    errors = _mxfp4_errors(tensors, model.quantization)
    if errors:
        return errors
    tensors = _model_tensors(tensors, model)

    # Merge quantised weights with their scales, which are not tensors of the model.
    if model.quantization is not None:
        tensors, errors = _dequantised_tensors(tensors, model.quantization)
        if errors:
            return errors

    # Remaining tensors of integers or 8-bit numbers have no scales, and cannot be read.
    quantised_names = [name for name, tensor in tensors.items() if tensor.dtype not in _FLOATS]
    if quantised_names:
        return [_quantised_error(path, quantised_names, tensors[quantised_names[0]].dtype)]

    shapes = model.tensor_shapes()
    missing_names = [name for name in shapes if name not in tensors]
    unexpected_names = [name for name in tensors if name not in shapes and not model.is_ignorable(name)]
    if missing_names or unexpected_names:
        return [_mismatched_tensors_error(path, missing_names, unexpected_names)]

    # A model with tied embeddings may store its output layer as well, but only with equal values.
    if model.has_separate_head(tensors) and not _have_equal_values(tensors[OUTPUT], tensors[EMBEDDING]):
        stored_shapes = {name: tensors[name].shape for name in (OUTPUT, EMBEDDING)}
        return [separate_head_error(path, stored_shapes, "other values")]

    # One wrong size in config.json changes many shapes, so report only the first.
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            return [
                UserError(
                    f"the shape of the tensor {name} does not match config.json",
                    where=str(tensor.file),
                    expected=f"{list(shape)}, by the sizes in {path / 'config.json'}",
                    got=str(list(tensor.shape)),
                    fix="use the config.json that belongs to these weights",
                )
            ]
    return []


def _model_tensors(
    stored_tensors: Mapping[str, StoredTensor],
    model: PretrainedModel,
) -> dict[str, StoredTensor]:
    """Convert stored tensors to the tensors of the model: name -> tensor.

    The returned tensors are named as in a text-only checkpoint with one tensor per expert. The dtype of an
    mxfp4 tensor is float32, since the run dequantises it to float32.
    """
    stored_names = {name: name for name in stored_tensors}
    if model.is_multimodal:
        stored_names = language_model_names(stored_tensors)
    locations = locate_tensors(
        stored_names,
        lambda stored_name: stored_tensors[stored_name].shape,
        model.family.fused_experts,
        model.shape.hidden,
    )

    model_tensors: dict[str, StoredTensor] = {}
    for name, location in locations.items():
        # Keep the offsets of the stored tensor, even if the model's tensor is a slice of it: only the values
        # of embedding and output layer are read, and these are complete stored tensors.
        tensor = stored_tensors[location.name]
        dtype = "F32" if location.blocks else tensor.dtype
        model_tensors[name] = replace(tensor, shape=location.shape(tensor.shape), dtype=dtype)
    return model_tensors


def _mxfp4_errors(
    stored_tensors: Mapping[str, StoredTensor],
    quantization: Quantization | None,
) -> list[UserError]:
    """Return the error for the first mxfp4 matrix whose blocks and scales do not match, if any."""
    for name, tensor in stored_tensors.items():
        if not name.endswith(BLOCKS):
            continue
        scales = stored_tensors.get(name.removesuffix(BLOCKS) + SCALES)
        are_bytes = tensor.dtype == BYTES and (scales is None or scales.dtype == BYTES)
        if quantization is None or not are_bytes:
            return [_quantised_error(tensor.file.parent, [name], tensor.dtype)]
        scales_shape = scales.shape if scales else None
        if not has_mxfp4_scales(tensor.shape, scales_shape):
            return [mxfp4_error(str(tensor.file), name, tensor.shape, scales_shape)]
    return []


def _dequantised_tensors(
    stored_tensors: Mapping[str, StoredTensor],
    quantization: Quantization,
) -> tuple[dict[str, StoredTensor], list[UserError]]:
    """Return the tensors of a quantised checkpoint after dequantisation, and the errors for their scales.

    A weight of 8 or 4 bits with scales becomes a float32 tensor, and the scales are left out. Only entries of
    the files' headers are converted: no data is read.
    """
    scales_name_by_weight = scales_by_weight(stored_tensors)
    tensor_scale_by_weight: dict[str, str] = {}
    if quantization.has_tensor_scales:
        tensor_scale_by_weight = tensor_scales_by_weight(stored_tensors)
    all_scale_names = {*scales_name_by_weight.values(), *tensor_scale_by_weight.values()}
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored_tensors.items():
        if name in all_scale_names or is_activation_scale(name):
            continue

        scales = stored_tensors.get(scales_name_by_weight.get(name, ""))
        if scales is None:
            tensors[name] = tensor
            continue
        if not quantization.supports_dtypes(tensor.dtype, scales.dtype):
            # The weight is not stored in a quantised format, such as a float32 weight with scales. Keep the
            # scales: the comparison with the model then reports them as unexpected tensors.
            tensors[name] = tensor
            tensors[scales_name_by_weight[name]] = scales
            continue

        shape = tensor.shape
        if quantization.has_tensor_scales:
            # A byte contains two 4-bit numbers.
            shape = (*shape[:-1], 2 * shape[-1])
            tensor_scale = stored_tensors.get(tensor_scale_by_weight.get(name, ""))
            scale_shape = None
            if tensor_scale is not None:
                scale_shape = tensor_scale.shape
            if not has_one_element(scale_shape):
                return tensors, [nvfp4_error(str(tensor.file), name, shape, scale_shape)]

        if quantization.scale_block(shape, scales.shape) is None:
            error = scale_shape_error(str(scales.file), scales_name_by_weight[name], scales.shape, shape)
            return tensors, [error]
        tensors[name] = replace(tensor, shape=shape, dtype="F32")
    return tensors, []


def _have_equal_values(first: StoredTensor, second: StoredTensor) -> bool:
    """Return whether two tensors have the same stored bytes, compared in chunks."""
    if (first.shape, first.dtype, first.size) != (second.shape, second.dtype, second.size):
        return False

    with first.file.open("rb") as first_stream, second.file.open("rb") as second_stream:
        first_stream.seek(first.begin)
        second_stream.seek(second.begin)

        for offset in range(0, first.size, _COMPARED_BYTES):
            chunk_size = min(_COMPARED_BYTES, first.size - offset)
            if first_stream.read(chunk_size) != second_stream.read(chunk_size):
                return False
    return True


def _quantised_error(path: Path, tensor_names: list[str], dtype: str) -> UserError:
    """Return the error for tensors in a ``dtype`` that is neither a float nor an 8-bit type with scales."""
    return UserError(
        "the weights are quantised in a way that cannot be read",
        where=str(path),
        expected=f"tensors in one of {', '.join(_FLOATS)}, or {FP8} with scales and a quantization_config",
        got=f"{join_names(tensor_names, _MAX_NAMES_LISTED)} in {dtype}",
        fix="use the original checkpoint in bfloat16 or float32, from which this one was quantised",
    )


def _mismatched_tensors_error(path: Path, missing_names: list[str], unexpected_names: list[str]) -> UserError:
    """Return the error for a checkpoint that lacks tensors of its model, or has unexpected tensors."""
    # A single missing head usually has another cause than a wrong checkpoint.
    fix = "use a checkpoint saved from this architecture and number of layers"
    if missing_names == [OUTPUT]:
        fix = "set tie_word_embeddings to true in config.json if the output layer shares the embedding"
    elif missing_names == [SCALAR]:
        fix = "name a checkpoint of a reward model, or correct `architectures` in config.json"

    differences: list[str] = []
    if missing_names:
        differences.append(f"missing {len(missing_names)}")
    if unexpected_names:
        differences.append(f"unexpected {join_names(unexpected_names, _MAX_NAMES_LISTED)}")
    expected = "no tensors but the model's"
    if missing_names:
        expected = join_names(missing_names, _MAX_NAMES_LISTED)
    return UserError(
        "the weights do not belong to the model in its config.json",
        where=str(path),
        expected=expected,
        got="; ".join(differences),
        fix=fix,
    )
