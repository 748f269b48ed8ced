"""Reader of the arguments, tensors and optimizer states in a Megatron checkpoint's pickles.

The format is torch's distributed checkpoint: an index of tensors (``.metadata``) lists the files, offsets and
boxes of every tensor, and another pickle contains the values that are common to all ranks.

A pickle is a program: it calls the functions that it names. This reader resolves every name to an inert
value, so that no checkpoint can run code.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.errors import UserError, missing_file_error, unreadable_file_error

COMMON = "common.pt"
"""File of the values that are common to all ranks."""
TENSOR_INDEX = ".metadata"
"""File that lists the tensors."""
_COMMON_VALUE = "common_state/shard_0_1"
"""Name of the common values in checkpoints of Megatron-Core 0.19, which stores them next to the tensors."""
_MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.", "mtp.", "encoder.")
"""Prefixes of a model's tensors; other tensors belong to the optimizer and to random generators."""
_STATE_NAME = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
"""Name of an optimizer state in the shape of a model's tensor; match groups: state, tensor."""
_GROUP_PREFIX = r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)"
"""Prefix of the name of an optimizer's buffer; match groups: optimizer, group (see `Bucket`)."""
_BUCKET_NAME = re.compile(_GROUP_PREFIX + r"\.gbuf_idx_(\d+)\.dtype_.+\.bucket_idx_(\d+)\.([^.]+)")
"""Name of an optimizer state of a bucket; match groups: optimizer, group, buffer, bucket, state."""
_SETTINGS_NAME = re.compile(_GROUP_PREFIX + r"\.optimizer/shard_0_1")
"""Name of the optimizer's settings and number of steps, stored next to its buckets."""
MASTERS = ("param", "fp32_param")
"""Names under which the master weights are stored as an optimizer state."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of Adam's moments."""
_PLAIN_TYPES = (bool, int, float, str)
"""Types of the elements of a list that `_plain_values` yields."""
_ADAM_STATES = (*MOMENTS, *MASTERS)
"""Names of the optimizer states that are read."""
_SCALAR_FORMATS = {"torch.FloatStorage": "<f", "torch.IntStorage": "<i"}
"""Type of a storage -> format of an element in the struct module; both have 4 bytes."""


@dataclass(frozen=True)
class Chunk:
    """Box of a tensor's elements that is stored as a range of bytes of one file.

    Example: rows 4 to 7 of a bfloat16 [8, 2] tensor, ``Chunk((4, 0), (4, 2), "__1_0.distcp", 512, 16)``.
    """

    start: tuple[int, ...]
    """First index of the box in each dimension."""
    size: tuple[int, ...]
    """Size of the box in each dimension."""
    file: str
    """Name of the file in the checkpoint's folder."""
    offset: int
    """First byte in the file."""
    length: int
    """Number of bytes."""


@dataclass(frozen=True)
class StoredTensor:
    """Tensor of a checkpoint: its shape, its dtype, and the chunks of files that contain it.

    Example: ``StoredTensor((8, 2), "torch.bfloat16", (Chunk((0, 0), (8, 2), "__0_0.distcp", 0, 32),))``.
    """

    shape: tuple[int, ...]
    """Complete shape."""
    dtype: str
    """Name of the dtype, such as ``torch.bfloat16``."""
    chunks: tuple[Chunk, ...]
    """Boxes that make up the tensor."""


class Bucket(NamedTuple):
    """Name of a bucket in a buffer of the distributed optimizer.

    Example: ``Bucket(optimizer=0, group=1, buffer=0, number=2)``.
    """

    optimizer: int
    """Index of the chained optimizer: 1 for experts with a separate optimizer, otherwise 0."""
    group: int
    """Index of the data-parallel group: the ranks with the same parameters."""
    buffer: int
    """Index of the buffer."""
    number: int
    """Index of the bucket in its buffer."""

    def buffer_name(self) -> str:
        """Return the name of the buffer, from the parts of the checkpoint's tensor names."""
        return f"chained_{self.optimizer} dp_group_idx_{self.group} gbuf_idx_{self.buffer}"


class CheckpointTensors(NamedTuple):
    """Tensors of a model and of its optimizer in a checkpoint's files."""

    tensors: Mapping[str, StoredTensor]
    """The model's tensors by name."""
    states: Mapping[str, Mapping[str, StoredTensor]]
    """Optimizer states in the shape of the model's tensors: state -> name of the tensor -> tensor."""
    buffers: Mapping[str, Mapping[Bucket, StoredTensor]]
    """Optimizer states in the flat buffers of the ranks: state -> bucket -> tensor."""
    steps: int | None
    """Number of steps of the optimizer, or None if it is not stored next to its buffers."""


class CommonValues(NamedTuple):
    """Values that a checkpoint stores once for all ranks, as in common.pt."""

    names: tuple[str, ...]
    """Names of all stored values."""
    arguments: dict[str, Any] | None
    """Plain values among Megatron-LM's arguments, or None if the checkpoint has no arguments."""
    iteration: int | None
    """Number of the iteration, or None if it is not stored."""
    steps: int | None
    """Number of steps of the optimizer, or None if it is not stored here."""
    sharding: str | None
    """Format in which the distributed optimizer stored its states, such as ``dp_reshardable``, or None."""


# --- Unpickling without running code


class AttributeContainer:
    """Container of the attributes that a pickle sets on an `Inert` object."""


class Inert:
    """Inert replacement of an object that a pickle constructs.

    It accepts any arguments and state, and returns itself when it is called. The classes and functions of a
    pickle are resolved to subclasses of `Inert`.
    """

    name = ""
    """Module and name of the class or function, such as ``torch.FloatStorage``."""
    args: tuple[Any, ...]
    """Positional arguments with which the object is constructed."""
    state: AttributeContainer
    """Attributes that the pickle sets."""

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        instance = super().__new__(cls)
        instance.args = args
        instance.state = AttributeContainer()
        return instance

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        # A state that is not a dictionary replaces the arguments.
        if isinstance(state, dict):
            vars(self.state).update(state)
        elif isinstance(state, tuple):
            self.args = state
        else:
            self.args = (state,)

    def __call__(self, *_: Any, **__: Any) -> Inert:
        return self

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        """Ignore an element that the pickle appends to the object."""

    def extend(self, _: Any) -> None:
        """Ignore elements that the pickle appends to the object."""


class _InertUnpickler(pickle.Unpickler):
    """Unpickler that resolves every name to a subclass of `Inert`, and records the names."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.names: set[tuple[str, str]] = set()

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        self.names.add((module_name, global_name))
        # Shapes are compared as plain tuples.
        if (module_name, global_name) == ("torch", "Size"):
            return tuple
        return type(global_name, (Inert,), {"name": f"{module_name}.{global_name}"})

    def persistent_load(self, pid: Any, /) -> Any:
        # The id refers to a tensor's storage, which torch.save writes next to the pickle.
        if not isinstance(pid, tuple):
            return Inert()
        return Inert(*pid)


def read_pickle(content: bytes) -> Any:
    """Unpickle without running code: return plain values unchanged, and all other objects as `Inert`.

    Raises exceptions of any type for damaged bytes.
    """
    return _InertUnpickler(io.BytesIO(content)).load()


def read_global_names(content: bytes) -> set[tuple[str, str]]:
    """Return (module, name) of every global that a pickle would import; raise errors like `read_pickle`."""
    unpickler = _InertUnpickler(io.BytesIO(content))
    unpickler.load()
    return unpickler.names


# --- Files of a checkpoint


def read_common(folder: Path) -> CommonValues:
    """Read the values that are common to all ranks; raise UserError for a damaged or missing file.

    The values are in common.pt. Megatron-Core 0.19 stores them next to the tensors instead, in a list with
    one element.
    """
    path = folder / COMMON
    try:
        if path.is_file():
            source: Path | io.BytesIO = path
        else:
            source = _read_value(
                folder, _read_tensor_index(folder)["storage_data"], re.compile(_COMMON_VALUE)
            )

        with zipfile.ZipFile(source) as archive:
            content, prefix = _load_content(archive)
            optimizer = content.get("optimizer")
            steps = _read_step_count(optimizer, archive, prefix)

        stored_arguments = content.get("args")
        arguments = None
        if isinstance(stored_arguments, Inert):
            arguments = dict(_plain_values(vars(stored_arguments.state)))

        iteration = content.get("iteration")
        if iteration is not None:
            iteration = int(iteration)

        # All optimizers of a chain have the same format.
        sharding = None
        for sharding_type in _iterate_values(optimizer, "param_state_sharding_type"):
            sharding = str(sharding_type)
            break
        return CommonValues(
            names=tuple(map(str, content)),
            arguments=arguments,
            iteration=iteration,
            steps=steps,
            sharding=sharding,
        )
    except Exception as error:  # a damaged pickle can raise anything
        raise _damaged_file_error(path, error) from error


def _read_tensor_index(folder: Path) -> dict[str, Any]:
    """Read the attributes of the index of tensors, an object of torch's class ``Metadata``, by name."""
    return vars(read_pickle((folder / TENSOR_INDEX).read_bytes()).state)


def _read_value(
    folder: Path,
    location_by_index: Mapping[Any, Any],
    name_pattern: re.Pattern[str],
) -> io.BytesIO:
    """Read the bytes of the first value with a matching name from the checkpoint's files.

    ``location_by_index`` maps the tensors and values in the index to files and offsets.
    """
    for index, location in location_by_index.items():
        value_name = vars(index.state)["fqn"]
        if not name_pattern.fullmatch(value_name):
            continue

        # Use only the name of the file, so that a forged path cannot point outside of the folder.
        fields = vars(location.state)
        file_name = Path(fields["relative_path"]).name
        with open(folder / file_name, "rb") as file:
            file.seek(fields["offset"])
            content = file.read(fields["length"])
        return io.BytesIO(content)
    raise FileNotFoundError(folder / COMMON)


def _load_content(archive: zipfile.ZipFile) -> tuple[dict[Any, Any], str]:
    """Read the dictionary in an archive of torch.save; return it with the prefix of the record names."""
    (pickle_name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
    content = read_pickle(archive.read(pickle_name))
    # Megatron-Core 0.19 stores a list with one element.
    if isinstance(content, list):
        content = content[0]
    if not isinstance(content, dict):
        raise TypeError(type(content).__name__)
    return content, pickle_name.removesuffix("data.pkl")


def _read_step_count(settings: Any, archive: zipfile.ZipFile, prefix: str) -> int | None:
    """Return the number of steps in an optimizer's settings, or None if it is absent or not unique.

    ``archive`` is the file with the settings, and ``prefix`` is the prefix of its record names.
    """
    step_values = [*_iterate_values(settings, "step"), *_iterate_values(settings, "common_step")]
    steps = {_to_integer(value, archive, prefix) for value in step_values}
    steps.discard(None)
    if len(steps) != 1:
        return None
    return steps.pop()


def _iterate_values(nested: Any, key: str) -> Iterator[Any]:
    """Yield the values with the key ``key`` in nested dictionaries and lists, at any depth."""
    children: list[Any] = []
    if isinstance(nested, dict):
        if key in nested:
            yield nested[key]
        children = list(nested.values())
    elif isinstance(nested, list):
        children = nested

    for child in children:
        yield from _iterate_values(child, key)


def _to_integer(value: Any, archive: zipfile.ZipFile, prefix: str) -> int | None:
    """Convert a number, or the element of a scalar tensor, to an integer; return None for other values.

    torch's Adam stores its number of steps in a tensor. ``prefix`` is the prefix of the archive's record
    names.
    """
    # A pickled tensor is a call of _rebuild_tensor with the tensor's storage and offset. The storage is a
    # persistent id: "storage", type, key, ...
    if isinstance(value, Inert) and len(value.args) > 1:
        storage, offset = value.args[:2]
        if len(storage.args) > 2:
            _, storage_type, key, *_ = storage.args
            format_code = _SCALAR_FORMATS.get(storage_type.name)
            if format_code is not None:
                content = archive.read(f"{prefix}data/{key}")
                (value,) = struct.unpack_from(format_code, content, 4 * offset)

    if not isinstance(value, int | float):
        return None
    return int(value)


def read_tensors(folder: Path) -> CheckpointTensors:
    """Read the index of a checkpoint's tensors; raise UserError for a damaged or missing file."""
    try:
        return _read_indexed_tensors(folder)
    except Exception as error:  # a damaged pickle can raise anything
        raise _damaged_file_error(folder / TENSOR_INDEX, error) from error


def _read_indexed_tensors(folder: Path) -> CheckpointTensors:
    """Return the tensors in the index, separated into weights and optimizer states."""
    tensor_index = _read_tensor_index(folder)

    # Name of a tensor -> first index of a box -> attributes of the box's location, such as file and offset.
    locations_by_name: dict[str, dict[tuple[int, ...], Any]] = {}
    for index, location in tensor_index["storage_data"].items():
        index_fields = vars(index.state)
        start = tuple(index_fields.get("offset") or ())
        locations_by_name.setdefault(index_fields["fqn"], {})[start] = vars(location.state)

    tensors: dict[str, StoredTensor] = {}
    states: dict[str, dict[str, StoredTensor]] = {}
    buffers: dict[str, dict[Bucket, StoredTensor]] = {}
    for name, metadata in tensor_index["state_dict_metadata"].items():
        tensor_fields = vars(metadata.state)
        # Values without chunks are not tensors.
        if "chunks" not in tensor_fields:
            continue
        location_by_start = locations_by_name.get(name, {})

        # Buckets of an optimizer's buffer. States of optimizers other than Adam are skipped.
        bucket_match = _BUCKET_NAME.fullmatch(name)
        if bucket_match:
            *bucket_numbers, state = bucket_match.groups()
            if state in _ADAM_STATES:
                bucket = Bucket(*(int(number or 0) for number in bucket_numbers))
                stored_tensor = _build_stored_tensor(tensor_fields, location_by_start)
                buffers.setdefault(state, {})[bucket] = stored_tensor
            continue

        # States in the shape of a model's tensor, and tensors of the model.
        state_match = _STATE_NAME.fullmatch(name)
        if state_match:
            state, tensor_name = state_match.groups()
            if state in _ADAM_STATES and _is_weight(tensor_name):
                stored_tensor = _build_stored_tensor(tensor_fields, location_by_start)
                states.setdefault(state, {})[tensor_name] = stored_tensor
        elif _is_weight(name):
            tensors[name] = _build_stored_tensor(tensor_fields, location_by_start)

    # The settings of an optimizer with flat buffers are stored next to the buffers, not in the common values.
    steps = None
    if buffers:
        with zipfile.ZipFile(_read_value(folder, tensor_index["storage_data"], _SETTINGS_NAME)) as archive:
            content, prefix = _load_content(archive)
            steps = _read_step_count(content, archive, prefix)
    return CheckpointTensors(tensors, states, buffers, steps)


def _is_weight(name: str) -> bool:
    """Return whether a tensor is a weight of the model, and not the extra state of a module."""
    return name.startswith(_MODEL_PREFIXES) and "_extra_state" not in name


def _build_stored_tensor(
    tensor_fields: Mapping[str, Any],
    location_by_start: Mapping[tuple[int, ...], Any],
) -> StoredTensor:
    """Build the description of a tensor, with the chunks that are stored in a file.

    ``tensor_fields`` are the attributes of the tensor's metadata. ``location_by_start`` maps the first index
    of a chunk to the attributes of its location.
    """
    chunks = []
    for metadata in tensor_fields["chunks"]:
        chunk_fields = vars(metadata.state)
        start = tuple(chunk_fields["offsets"])
        location = location_by_start.get(start)
        # After an interrupted save some chunks have no file: `file_errors` reports the gaps.
        if location is None:
            continue

        chunk = Chunk(
            start,
            tuple(chunk_fields["sizes"]),
            str(location["relative_path"]),
            int(location["offset"]),
            int(location["length"]),
        )
        if Path(chunk.file).name != chunk.file:
            raise ValueError("it names files outside of its folder")
        chunks.append(chunk)

    dtype = tensor_fields["properties"].args[0]
    dtype_name = str(getattr(dtype, "name", dtype))
    return StoredTensor(tuple(tensor_fields["size"]), dtype_name, tuple(chunks))


def _plain_values(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the arguments that JSON can represent, with classes replaced by their names.

    Arguments with other values, such as functions, are skipped, since they do not describe the model.
    """
    for name, value in arguments.items():
        if isinstance(value, type) and issubclass(value, Inert):
            yield name, value.name
        elif value is None or isinstance(value, bool | int | float | str):
            yield name, value
        elif isinstance(value, list | tuple) and all(type(element) in _PLAIN_TYPES for element in value):
            yield name, list(value)


def _damaged_file_error(path: Path, error: Exception) -> UserError:
    """Return the error for a file that does not exist or cannot be unpickled."""
    expected = "what Megatron-LM writes with --ckpt-format torch_dist"
    fix = "copy the whole folder again, or name another iteration"
    if isinstance(error, FileNotFoundError) and not path.exists():
        return missing_file_error(path, where=str(path), expected=expected, fix=fix)
    return unreadable_file_error("a file of the Megatron checkpoint", path, error, expected=expected, fix=fix)
