"""The pickles of a Megatron checkpoint, read without running them: arguments, tensors, optimizer states.

The format is torch's distributed checkpoint: a directory of tensors (``.metadata``) lists the files, offsets
and boxes of every tensor, and one more pickle has the values that all ranks have in common.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.errors import UserError
from megatron_rl.interop.megatron_lm.inert_pickle import Inert, read_pickle

COMMON = "common.pt"
"""File of the values that all ranks have in common."""
DIRECTORY = ".metadata"
"""File that lists the tensors."""
_COMMON_VALUE = "common_state/shard_0_1"
"""Name of the common values beside the tensors, as Megatron-Core 0.19 stores them."""
_MODEL = ("embedding.", "decoder.", "output_layer.", "mtp.", "encoder.")
"""Prefixes of a model's tensors; others belong to the optimizer and to random generators."""
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
"""Optimizer state in the shape of a model's tensor: state, tensor."""
_GROUP = r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)"
_FLAT = re.compile(_GROUP + r"\.gbuf_idx_(\d+)\.dtype_.+\.bucket_idx_(\d+)\.([^.]+)")
"""Optimizer state of a bucket as it is in memory: part, group, buffer, bucket, state."""
_SETTINGS = re.compile(_GROUP + r"\.optimizer/shard_0_1")
"""The optimizer's settings beside its buckets, with the number of its steps."""
MASTERS = ("param", "fp32_param")
"""Names of the state that is the master weights."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of Adam's moments."""


@dataclass(frozen=True)
class Chunk:
    """Box of a tensor in a range of bytes of a file."""

    start: tuple[int, ...]
    """First index of the box in each dimension."""
    size: tuple[int, ...]
    """Extent of the box in each dimension."""
    file: str
    """Name of the file in the checkpoint's folder."""
    offset: int
    """First byte in the file."""
    length: int
    """Number of bytes."""


@dataclass(frozen=True)
class StoredTensor:
    """Tensor of a checkpoint."""

    shape: tuple[int, ...]
    """Complete shape."""
    dtype: str
    """Name of the dtype, as ``torch.bfloat16``."""
    chunks: tuple[Chunk, ...]
    """Boxes that make up the tensor."""


class Bucket(NamedTuple):
    """Name of a bucket in a buffer of the distributed optimizer."""

    part: int
    """Number of the chained optimizer: 1 for experts with an optimizer of their own."""
    group: int
    """Index of the data-parallel group: the ranks with the same parameters."""
    buffer: int
    """Index of the buffer."""
    number: int
    """Index of the bucket in its buffer."""

    def words(self) -> str:
        """Return the checkpoint's name of the buffer."""
        return f"chained_{self.part} dp_group_idx_{self.group} gbuf_idx_{self.buffer}"


class Stored(NamedTuple):
    """Tensors in a checkpoint's files: the model's and its optimizer's."""

    tensors: Mapping[str, StoredTensor]
    """The model's tensors by name."""
    states: Mapping[str, Mapping[str, StoredTensor]]
    """Optimizer states in the shape of the model's tensors: state -> tensor."""
    buffers: Mapping[str, Mapping[Bucket, StoredTensor]]
    """Optimizer states as they are in the ranks' memory: state -> bucket."""
    steps: int | None
    """Steps of the optimizer, if they are stored beside its buffers."""


class Common(NamedTuple):
    """Values that all ranks have in common."""

    names: tuple[str, ...]
    """All keys."""
    arguments: dict[str, Any] | None
    """Plain values among Megatron-LM's arguments; None for a checkpoint without arguments."""
    iteration: int | None
    """Number of the iteration."""
    steps: int | None
    """Steps of the optimizer."""
    sharding: str | None
    """Format in which the distributed optimizer stored its states, as ``dp_reshardable``."""


def read_common(folder: Path) -> Common:
    """Read the values that all ranks have in common; raises UserError for a damaged or missing file.

    They are a file of their own, or, as Megatron-Core 0.19 writes them, a list of one value beside the
    tensors.
    """
    path = folder / COMMON
    try:
        if path.is_file():
            file: Path | io.BytesIO = path
        else:
            file = _read_value(folder, _directory(folder)["storage_data"], re.compile(_COMMON_VALUE))

        with zipfile.ZipFile(file) as archive:
            content, prefix = _content(archive)
            optimizer = content.get("optimizer")
            args = content.get("args")
            iteration = content.get("iteration")
            shardings = _values_under(optimizer, "param_state_sharding_type")
            return Common(
                names=tuple(map(str, content)),
                arguments=dict(_plain(vars(args.state))) if isinstance(args, Inert) else None,
                iteration=None if iteration is None else int(iteration),
                steps=_steps(optimizer, archive, prefix),
                sharding=next(map(str, shardings), None),
            )
    except Exception as error:  # a damaged pickle can raise anything
        raise _damaged(path, error) from error


def _directory(folder: Path) -> dict[str, Any]:
    """Return the attributes of the directory of tensors."""
    return vars(read_pickle((folder / DIRECTORY).read_bytes()).state)


def _read_value(folder: Path, storage: Mapping[Any, Any], name: re.Pattern[str]) -> io.BytesIO:
    """Return the bytes of the first value with a matching name in the files of tensors.

    ``storage`` is the directory's map from names to files and offsets.
    """
    for index, location in storage.items():
        if name.fullmatch(vars(index.state)["fqn"]):
            fields = vars(location.state)
            # Only the file's name counts: a path cannot lead out of the folder.
            with open(folder / Path(fields["relative_path"]).name, "rb") as file:
                file.seek(fields["offset"])
                return io.BytesIO(file.read(fields["length"]))
    raise FileNotFoundError(folder / COMMON)


def _content(archive: zipfile.ZipFile) -> tuple[dict[Any, Any], str]:
    """Return the values of a file of torch.save, and the prefix of its entries."""
    (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
    content = read_pickle(archive.read(name))
    content = content[0] if isinstance(content, list) else content
    if not isinstance(content, dict):
        raise TypeError(type(content).__name__)
    return content, name.removesuffix("data.pkl")


def _steps(settings: Any, archive: zipfile.ZipFile, prefix: str) -> int | None:
    """Return the number of steps in an optimizer's settings; None unless they contain exactly one number."""
    values = [*_values_under(settings, "step"), *_values_under(settings, "common_step")]
    steps = {_count(value, archive, prefix) for value in values} - {None}
    return steps.pop() if len(steps) == 1 else None


def _values_under(value: Any, name: str) -> Iterator[Any]:
    """Yield the values of a key in nested dictionaries and lists."""
    if isinstance(value, dict):
        yield from (value[key] for key in value if key == name)
        children = list(value.values())
    else:
        children = value if isinstance(value, list) else []

    for child in children:
        yield from _values_under(child, name)


def _count(value: Any, archive: zipfile.ZipFile, prefix: str) -> int | None:
    """Return a number, or the element of a scalar tensor; None for other values.

    torch's own Adam has its steps in a tensor.
    """
    # A pickled tensor is a call of _rebuild_tensor with its storage and offset; the storage is a persistent
    # id: "storage", type, key, ...
    if isinstance(value, Inert) and len(value.args) > 1 and len(value.args[0].args) > 2:
        _, storage_type, key, *_ = value.args[0].args
        offset = value.args[1]
        format_code = {"torch.FloatStorage": "<f", "torch.IntStorage": "<i"}.get(storage_type.name)
        if format_code is not None:
            content = archive.read(f"{prefix}data/{key}")
            (value,) = struct.unpack_from(format_code, content, 4 * offset)
    return int(value) if isinstance(value, int | float) else None


def read_tensors(folder: Path) -> Stored:
    """Return the tensors in the files of a checkpoint; raises UserError as `read_common`."""
    try:
        return _tensors(folder)
    except Exception as error:  # a damaged pickle can raise anything
        raise _damaged(folder / DIRECTORY, error) from error


def _tensors(folder: Path) -> Stored:
    """Return the tensors of the directory, sorted into the model's and the optimizer's."""
    directory = _directory(folder)

    # File and offset of each box, by tensor and first index.
    locations: dict[str, dict[tuple[int, ...], Any]] = {}
    for index, location in directory["storage_data"].items():
        entry = vars(index.state)
        start = tuple(entry.get("offset") or ())
        locations.setdefault(entry["fqn"], {})[start] = vars(location.state)

    tensors: dict[str, StoredTensor] = {}
    states: dict[str, dict[str, StoredTensor]] = {}
    buffers: dict[str, dict[Bucket, StoredTensor]] = {}
    for name, metadata in directory["state_dict_metadata"].items():
        entry = vars(metadata.state)
        state = _STATE.fullmatch(name)
        flat = _FLAT.fullmatch(name)

        # Values without chunks are no tensors; optimizers other than Adam have other states.
        optimizer_state = None
        if state:
            optimizer_state = state[1]
        elif flat:
            optimizer_state = flat[5]
        if "chunks" not in entry or optimizer_state not in (None, *MOMENTS, *MASTERS):
            continue

        key = state[2] if state else name
        if flat:
            bucket = Bucket(*(int(number or 0) for number in flat.groups()[:4]))
            buffers.setdefault(flat[5], {})[bucket] = _stored(entry, locations.get(name, {}))
        elif key.startswith(_MODEL) and "_extra_state" not in key:
            target = states.setdefault(state[1], {}) if state else tensors
            target[key] = _stored(entry, locations.get(name, {}))

    # With buffers the optimizer's settings are stored beside them, not in the common values.
    steps = None
    if buffers:
        with zipfile.ZipFile(_read_value(folder, directory["storage_data"], _SETTINGS)) as archive:
            content, prefix = _content(archive)
            steps = _steps(content, archive, prefix)
    return Stored(tensors, states, buffers, steps)


def _stored(entry: Mapping[str, Any], locations: Mapping[tuple[int, ...], Any]) -> StoredTensor:
    """Return a tensor of the directory, with those of its boxes that have a location in a file."""
    chunks = []
    for metadata in entry["chunks"]:
        fields = vars(metadata.state)
        start = tuple(fields["offsets"])
        location = locations.get(start)
        if location is not None:
            file = str(location["relative_path"])
            size = tuple(fields["sizes"])
            chunks.append(Chunk(start, size, file, int(location["offset"]), int(location["length"])))

    if any(Path(chunk.file).name != chunk.file for chunk in chunks):
        raise ValueError("it names files outside of its folder")
    dtype = entry["properties"].args[0]
    return StoredTensor(tuple(entry["size"]), str(getattr(dtype, "name", dtype)), tuple(chunks))


def _plain(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values that JSON can represent, and classes by name; no other argument describes a model."""
    for name, value in values.items():
        if isinstance(value, type) and issubclass(value, Inert):
            yield name, value.name
        elif value is None or isinstance(value, bool | int | float | str):
            yield name, value
        elif isinstance(value, list | tuple) and all(type(item) in (bool, int, float, str) for item in value):
            yield name, list(value)


def _damaged(path: Path, error: Exception) -> UserError:
    """Return the error of a file that cannot be unpickled."""
    got = f"{type(error).__name__}: {error}"[:300]
    if isinstance(error, FileNotFoundError):
        got = "no such file"
    return UserError(
        "a file of the Megatron checkpoint cannot be read",
        where=str(path),
        expected="what Megatron-LM writes with --ckpt-format torch_dist",
        got=got,
        fix="copy the whole folder again, or name another iteration",
    )
