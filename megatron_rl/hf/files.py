"""Hugging Face checkpoints in safetensors files, read and written a slice at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rl.durable import RunningDigest, require_regular_file
from megatron_rl.errors import UserError, unreadable_file_error
from megatron_rl.hf.quantized import dequantize, dequantize_blocks, unpack_numbers
from megatron_rl.interop.megatron_lm.checkpoint import POINTER
from megatron_rl.shapes.families import BY_MODEL_TYPE
from megatron_rl.shapes.fused_experts import BLOCKS, SCALES, FusedExperts, TensorLocation, locate_tensors
from megatron_rl.shapes.multimodal import language_config, language_model_names, multimodal_of
from megatron_rl.shapes.pretrained import (
    INDEX,
    SINGLE_FILE,
    read_config,
    read_index,
    read_pretrained,
    tokenizer_files,
    weight_files,
)
from megatron_rl.shapes.quantized import (
    MXFP4_BLOCK,
    Quantization,
    has_mxfp4_scales,
    has_one_element,
    is_activation_scale,
    mxfp4_error,
    nvfp4_error,
    read_quantization,
    scale_shape_error,
    scales_by_weight,
    tensor_scales_by_weight,
)

Shape = tuple[int, ...]
"""Size of a tensor in each dimension."""

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Names of dtypes in the header of a safetensors file."""


def tensor_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the size of a tensor in bytes."""
    return torch.Size(shape).numel() * dtype.itemsize


class CheckpointFiles:
    """Tensors of a checkpoint directory, readable a slice at a time.

    All files of `weight_files` are read, or only ``file`` if it is given. A multimodal checkpoint is read as
    the tensors of its language model, under the names of a text-only checkpoint (see `shapes.multimodal`).
    Quantised weights are read as float32, and their scales are not listed (see `shapes.quantized`).

    Raises UserError if the directory has no safetensors, its index names missing files, or its config.json
    has a quantisation that cannot be read.
    """

    def __init__(self, path: str | Path, file: str | None = None) -> None:
        self.path = Path(path)
        self._open_files: dict[Path, Any] = {}

        # Files that contain the tensors; None if the directory has an index.
        files: list[Path] | None
        if file is None:
            files = weight_files(self.path)
        else:
            files = [self.path / file]

        # Stored name -> file.
        self._files: dict[str, Path] = {}
        for name, file_name in self._read_file_names(files).items():
            self._files[name] = self.path / file_name

        # A single file, such as adapters, is read without the folder's config.json.
        config: Mapping[str, Any] = {}
        config_file = self.path / "config.json"
        if file is None and config_file.is_file():
            config = read_config(config_file)
        model_config = language_config(config)

        # Name of a tensor in a text-only checkpoint -> its stored name.
        self._stored_names: dict[str, str] = {name: name for name in self._files}
        multimodal = multimodal_of(config)
        self.is_multimodal = multimodal is not None
        if multimodal is not None:
            self._stored_names = language_model_names(self._files)

        # Format in which the checkpoint's tensors contain all experts of a layer; None if each expert has
        # its own tensors.
        fused_experts: FusedExperts | None = None
        family = BY_MODEL_TYPE.get(str(model_config.get("model_type")))
        if family is not None:
            fused_experts = family.fused_experts

        # Format of the same tensors in an export of the model.
        self.export_fused_experts = fused_experts
        if multimodal is not None:
            self.export_fused_experts = multimodal.fused_experts

        # Name -> location in the stored tensors.
        hidden_size = model_config.get("hidden_size")
        self._locations: dict[str, TensorLocation] = {}
        if isinstance(hidden_size, int):
            self._locations = locate_tensors(
                self._stored_names,
                self._read_stored_shape,
                fused_experts,
                hidden_size,
            )
        else:
            for name, stored_name in self._stored_names.items():
                self._locations[name] = TensorLocation(stored_name)

        # Name of a weight -> name of its scales, and name of an additional scale for the whole tensor.
        self._scales: dict[str, str] = {}
        self._tensor_scales: dict[str, str] = {}
        self._quantization: Quantization | None = read_quantization(model_config, str(config_file))
        if self._quantization is not None:
            self._scales = scales_by_weight(self._locations)
            if self._quantization.has_tensor_scales:
                self._tensor_scales = tensor_scales_by_weight(self._locations)

    def _read_file_names(self, files: list[Path] | None) -> Mapping[str, str]:
        """Return the file name of each tensor.

        The names are read from the headers of ``files``, or for None from the directory's index.
        """
        if files is None:
            weight_map = read_index(self.path)
            absent_files: list[str] = []
            for file_name in sorted(set(weight_map.values())):
                if not (self.path / file_name).is_file():
                    absent_files.append(file_name)
            if absent_files:
                raise UserError(
                    "The checkpoint's index names files that do not exist.",
                    where=str(self.path / INDEX),
                    expected="every file of the index",
                    got="missing " + ", ".join(absent_files),
                    fix="download the checkpoint again, with all its files",
                )
            return weight_map

        if not files:
            got = "no *.safetensors file"
            if not self.path.is_dir():
                got = "no such directory"
            raise UserError(
                "The checkpoint has no safetensors.",
                where=str(self.path),
                expected=f"{SINGLE_FILE} or {INDEX}",
                got=got,
                fix="give the path of a directory that `save_pretrained` wrote",
            )

        # Read the names of the tensors from the headers of the files.
        file_names: dict[str, str] = {}
        for file in files:
            tensor_names = self._open_file(file).keys()
            file_names |= dict.fromkeys(tensor_names, file.name)
        return file_names

    def _open_file(self, file: Path) -> Any:
        """Open a safetensors file, or return it if it is open; raise UserError if it cannot be read."""
        if file in self._open_files:
            return self._open_files[file]

        try:
            require_regular_file(file)
            self._open_files[file] = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise unreadable_file_error(
                "a file of the checkpoint",
                file,
                error,
                expected="a complete safetensors file",
                fix="download the file again",
            ) from error
        return self._open_files[file]

    def names(self) -> set[str]:
        """Return the names of the model's tensors, without the scales of quantised tensors."""
        names = set(self._locations)
        if self._quantization is None:
            return names
        names -= {*self._scales.values(), *self._tensor_scales.values()}
        return {name for name in names if not is_activation_scale(name)}

    def names_outside_language_model(self) -> list[str]:
        """Return the stored names of a multimodal checkpoint's tensors outside its language model."""
        names_in_language_model = {location.name for location in self._locations.values()}
        return sorted(set(self._files) - names_in_language_model)

    def export_name(self, name: str) -> str:
        """Return the name of a tensor in an export of this model.

        Usually this is the name in the stored files. If a checkpoint stores all experts of a layer in one
        tensor, the tensor of a single expert has no stored name. Its export name is then built from two
        names: the part of the stored name before ``experts.``, and the part of ``name`` after it.
        """
        location = self._locations.get(name)
        if location is None:
            # ``name`` is a tensor with all experts of a layer. The export stores them in one tensor, too.
            return self._stored_names.get(name, name)
        if location.expert is None:
            return location.name

        # The stored name may have a prefix that ``name`` lacks, for example in a multimodal checkpoint.
        prefix = location.name.rpartition("experts.")[0]
        suffix = name.rpartition("experts.")[2]
        return f"{prefix}experts.{suffix}"

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the model's tensors by name."""
        names = self.names()
        return {name: self.shape(name) for name in self._locations if name in names}

    def shape(self, name: str) -> Shape:
        """Return a tensor's shape."""
        location = self._locate(name)
        shape = location.shape(self._read_stored_shape(location.name))
        if self._is_packed(name):
            # Each stored byte contains two numbers.
            return (*shape[:-1], 2 * shape[-1])
        return shape

    def _is_packed(self, name: str) -> bool:
        """Return whether a tensor is stored as bytes with two numbers in each (NVFP4)."""
        has_tensor_scales = self._quantization is not None and self._quantization.has_tensor_scales
        return has_tensor_scales and name in self._scales

    def _locate(self, name: str) -> TensorLocation:
        """Return the location of a tensor in the stored tensors.

        ``name`` may also be the stored name of a tensor outside the language model.
        """
        if name in self._locations:
            return self._locations[name]
        return TensorLocation(name)

    def _read_stored_shape(self, stored_name: str) -> Shape:
        """Return the shape of a tensor by its stored name."""
        return tuple(self._open_slice(stored_name).get_shape())

    def read(
        self,
        name: str,
        start: Sequence[int],
        size: Sequence[int],
    ) -> Tensor:
        """Read the box of a tensor that begins at ``start`` and has ``size``.

        The result has the stored dtype, or float32 for a quantised tensor.
        """
        location = self._locate(name)
        if location.blocks:
            return self._read_mxfp4(location, start, size)

        if self._is_packed(name):
            packed_values = self._read_packed(location.name, start, size)
            return self._dequantize(name, packed_values, start)

        slices = _stored_slices(location, start, size)
        values = self._open_slice(location.name)[slices]
        if location.transposed:
            values = values.transpose(0, 1)
        # Apply the step here: safetensors has no slices with a step.
        values = values[:: location.step]
        if name not in self._scales:
            return values
        return self._dequantize(name, values, start)

    def _read_mxfp4(
        self,
        location: TensorLocation,
        start: Sequence[int],
        size: Sequence[int],
    ) -> Tensor:
        """Read a box of a matrix in mxfp4, and dequantise it to float32."""
        scales_name = location.name.removesuffix(BLOCKS) + SCALES
        blocks_shape = self._read_stored_shape(location.name)
        scales_shape = None
        if scales_name in self._files:
            scales_shape = self._read_stored_shape(scales_name)
        if not has_mxfp4_scales(blocks_shape, scales_shape):
            raise mxfp4_error(
                str(self._files[location.name]),
                location.name,
                blocks_shape,
                scales_shape,
            )

        # Read the complete blocks that contain the columns: each block has one scale.
        first_row, first_column = start
        num_rows, num_columns = size
        first_block = first_column // MXFP4_BLOCK
        end_block = -(-(first_column + num_columns) // MXFP4_BLOCK)
        slices = _stored_slices(
            location,
            (first_row, first_block),
            (num_rows, end_block - first_block),
        )
        blocks = self._open_slice(location.name)[slices]
        scales = self._open_slice(scales_name)[slices]

        # Apply the step here: safetensors has no slices with a step.
        return dequantize_blocks(
            blocks[:: location.step],
            scales[:: location.step],
            first_column - first_block * MXFP4_BLOCK,
            num_columns,
        )

    def _read_packed(
        self,
        stored_name: str,
        start: Sequence[int],
        size: Sequence[int],
    ) -> Tensor:
        """Read a box of a tensor that stores two numbers per byte; return the numbers without scales."""
        first_column = start[-1]
        num_columns = size[-1]
        slices: list[slice] = []
        for begin, count in zip(start[:-1], size[:-1], strict=True):
            slices.append(slice(begin, begin + count))

        # Read the complete bytes that contain the columns.
        end_byte = -(-(first_column + num_columns) // 2)
        slices.append(slice(first_column // 2, end_byte))

        numbers = unpack_numbers(self._open_slice(stored_name)[tuple(slices)])
        return numbers.narrow(-1, first_column % 2, num_columns)

    def _dequantize(
        self,
        name: str,
        values: Tensor,
        start: Sequence[int],
    ) -> Tensor:
        """Dequantise the stored ``values`` of a box, which begins at ``start``, to float32."""
        # Read all scales: they are small compared with the box, and a per-tensor scale cannot be sliced.
        scales_name = self._locate(self._scales[name]).name
        scales = self._open_file(self._files[scales_name]).get_tensor(scales_name)
        if self._is_packed(name):
            scales = scales.float() * self._read_tensor_scale(name)

        assert self._quantization is not None
        shape = self.shape(name)
        scales_shape = tuple(scales.shape)
        block = self._quantization.scale_block(shape, scales_shape)
        if block is None:
            file = str(self._files[scales_name])
            raise scale_shape_error(file, scales_name, scales_shape, shape)
        return dequantize(values, scales, start, block)

    def _read_tensor_scale(self, name: str) -> Tensor:
        """Return the per-tensor scale of an NVFP4 weight, a float32 scalar.

        The scales of the weight's blocks are stored separately.
        """
        location = self._locate(name)
        if name not in self._tensor_scales:
            raise nvfp4_error(str(self._files[location.name]), name, self.shape(name), None)

        scale_name = self._locate(self._tensor_scales[name]).name
        scale = self._open_file(self._files[scale_name]).get_tensor(scale_name)
        if not has_one_element(tuple(scale.shape)):
            raise nvfp4_error(
                str(self._files[scale_name]),
                name,
                self.shape(name),
                tuple(scale.shape),
            )
        return scale.float().reshape(())

    def is_quantized(self, name: str) -> bool:
        """Return whether a tensor is stored as numbers of 8 or 4 bits with scales."""
        return name in self._scales or self._locate(name).blocks

    def _open_slice(self, stored_name: str) -> Any:
        """Return safetensors' lazy view of a stored tensor."""
        return self._open_file(self._files[stored_name]).get_slice(stored_name)


def _stored_slices(
    location: TensorLocation,
    start: Sequence[int],
    size: Sequence[int],
) -> tuple[int | slice, ...]:
    """Return the slices of a stored tensor that contain a box of the tensor at ``location``.

    ``start`` and ``size`` are the first index and the number of elements of the box in each dimension.
    """
    slices: list[slice] = []
    for begin, count in zip(start, size, strict=True):
        slices.append(slice(begin, begin + count))
    if location.expert is None:
        return tuple(slices)

    # Select one expert by an index, and all rows from the first to the last row of the box by a slice. The
    # caller applies the step.
    first_row = location.begin + start[0] * location.step
    end_row = first_row
    if size[0] > 0:
        end_row = first_row + (size[0] - 1) * location.step + 1
    slices[0] = slice(first_row, end_row)
    if location.transposed:
        slices.reverse()
    return (location.expert, *slices)


class SafetensorsWriter:
    """Writer of one safetensors file from front to back; no tensor has to be complete in memory.

    The digest of the file is computed during writing, since reading a large file again takes long.
    """

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, Shape],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        # The header comes first, so the shapes of all tensors are needed before any values.
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape in shapes.items():
            end_offset = offset + tensor_bytes(shape, dtypes[name])
            header[name] = {
                "dtype": _DTYPE_NAMES[dtypes[name]],
                "shape": list(shape),
                "data_offsets": [offset, end_offset],
            }
            offset = end_offset

        # The format aligns the data to 8 bytes.
        header_bytes = json.dumps(header).encode()
        header_bytes += b" " * (-len(header_bytes) % 8)

        # Number of bytes that are not yet written.
        self._remaining = offset
        self._digest = RunningDigest()
        self._file: BinaryIO = path.open("wb")
        self._append(len(header_bytes).to_bytes(8, "little") + header_bytes)

    def write(self, values: Tensor) -> None:
        """Append the next elements of the file, in the tensor's dtype and row-major order."""
        host_values = values.detach().cpu().contiguous()
        data = host_values.reshape(-1).view(torch.uint8).numpy()
        self._remaining -= data.nbytes
        self._append(data.data)

    def _append(self, content: bytes | memoryview) -> None:
        """Write bytes and add them to the digest."""
        self._file.write(content)
        self._digest.update(content)

    def close(self, require_complete: bool = True) -> str:
        """Flush the file to the disk, close it and return its digest.

        With ``require_complete``, raises RuntimeError if any elements were not written.
        """
        with self._file:
            self._file.flush()
            # An incomplete file is not published, and need not reach the disk.
            if require_complete:
                os.fsync(self._file.fileno())
        if require_complete and self._remaining:
            raise RuntimeError(f"{self._remaining} bytes of {self._file.name} were not written")
        return str(self._digest)


def divide_into_files(
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, torch.dtype],
    max_bytes: int,
) -> dict[str, list[str]]:
    """Divide tensors, in order, into files of at most ``max_bytes``; a larger tensor is alone in its file.

    Returns the tensor names by file name.
    """
    name_groups: list[list[str]] = [[]]
    group_bytes = 0
    for name, shape in shapes.items():
        size = tensor_bytes(shape, dtypes[name])
        # A group has at least one tensor, even a tensor that exceeds the limit.
        if name_groups[-1] and group_bytes + size > max_bytes:
            name_groups.append([])
            group_bytes = 0
        name_groups[-1].append(name)
        group_bytes += size

    if len(name_groups) == 1:
        return {SINGLE_FILE: name_groups[0]}

    # Use the same file names as transformers' save_pretrained.
    files: dict[str, list[str]] = {}
    for index, names in enumerate(name_groups, 1):
        file = f"model-{index:05d}-of-{len(name_groups):05d}.safetensors"
        files[file] = names
    return files


def write_index(
    path: Path,
    files: Mapping[str, Sequence[str]],
    total_bytes: int,
) -> None:
    """Write the index of a checkpoint into the folder ``path``.

    ``files`` are the tensor names by file name, ``total_bytes`` is the size of all tensors.
    """
    # In the format of transformers, the index maps each tensor to its file.
    weight_map: dict[str, str] = {}
    for file, names in files.items():
        weight_map |= dict.fromkeys(names, file)

    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": weight_map,
    }
    (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def read_checkpoint_shapes(path: str | Path) -> dict[str, Shape]:
    """Read the shapes of a model's tensors, by Hugging Face name.

    ``path`` is the model's folder, which contains the tensors or a pointer to a Megatron checkpoint.
    """
    if (Path(path) / POINTER).is_file():
        return dict(read_pretrained(Path(path) / "config.json").tensor_shapes())
    return CheckpointFiles(path).shapes()


def copy_tensors(
    source: str | Path,
    path: Path,
    names: Sequence[str],
    dtype: torch.dtype,
) -> int:
    """Copy tensors of the checkpoint directory ``source`` into the file ``path``; return their size in bytes.

    Tensors keep their stored dtypes, except for quantised tensors, which are written in ``dtype``.
    """
    files = CheckpointFiles(source)
    shapes = {name: files.shape(name) for name in names}

    # Read an empty slice of each tensor to get its stored dtype.
    dtypes: dict[str, torch.dtype] = {}
    for name, shape in shapes.items():
        origin = (0,) * len(shape)
        dtypes[name] = files.read(name, origin, origin).dtype
        if files.is_quantized(name):
            dtypes[name] = dtype

    # Copy one tensor after another, so that only one is in memory.
    writer = SafetensorsWriter(path, shapes, dtypes)
    for name, shape in shapes.items():
        origin = (0,) * len(shape)
        values = files.read(name, origin, shape)
        writer.write(values.to(dtypes[name]))
    writer.close()
    return sum(tensor_bytes(shape, dtypes[name]) for name, shape in shapes.items())


def copy_tokenizer(source: str | Path, path: Path) -> None:
    """Copy tokenizer, chat templates and generation settings from the folder ``source`` to ``path``."""
    for name in tokenizer_files(Path(source)):
        # Chat templates may be in a subfolder.
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(source) / name, path / name)
