"""What the pickles of a Megatron checkpoint say, read without running them: arguments, tensors, states."""

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

COMMON, DIRECTORY = "common.pt", ".metadata"
_COMMON_VALUE = "common_state/shard_0_1"
_MODEL = ("embedding.", "decoder.", "output_layer.", "mtp.", "encoder.")
"""How the names of a model's tensors begin; others are of the optimizer and of random generators."""
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
"""What the optimizer keeps of a model's tensor, where it is stored as that tensor is."""
_GROUP = r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)"
_FLAT = re.compile(_GROUP + r"\.gbuf_idx_(\d+)\.dtype_.+\.bucket_idx_(\d+)\.([^.]+)")
"""What it keeps of a bucket, where buckets are stored as they lie in memory."""
_SETTINGS = re.compile(_GROUP + r"\.optimizer/shard_0_1")
"""Its settings then, with the number of its steps."""
MASTERS = ("param", "fp32_param")
"""Names of the state that is the weights themselves, as the optimizer steps them."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Chunk:
    """Say which box of a tensor lies in which bytes of a file."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """Hold the shape of a tensor, its dtype by name, and its pieces."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


class Bucket(NamedTuple):
    """Name a bucket of a buffer of the distributed optimizer.

    ``part`` is 1 where experts have an optimizer of their own, and this is theirs. Ranks that hold the same
    parameters are a ``group``.
    """

    part: int
    group: int
    buffer: int
    number: int

    def words(self) -> str:
        """Return what the checkpoint calls the buffer."""
        return f"chained_{self.part} dp_group_idx_{self.group} gbuf_idx_{self.buffer}"


class Stored(NamedTuple):
    """Hold what lies in a checkpoint's files: the model's tensors, and what its optimizer keeps, by kind.

    ``states`` are stored as the tensors are, ``buffers`` as they lie in the memory of ranks. ``steps`` are
    the optimizer's, where they lie beside its buffers.
    """

    tensors: Mapping[str, StoredTensor]
    states: Mapping[str, Mapping[str, StoredTensor]]
    buffers: Mapping[str, Mapping[Bucket, StoredTensor]]
    steps: int | None


class Common(NamedTuple):
    """Hold what all ranks have in common: the keys' names, and plain values.

    ``arguments`` is None where there are none; ``steps`` are the optimizer's, ``sharding`` is how a
    distributed one says that it stored its state.
    """

    names: tuple[str, ...]
    arguments: dict[str, Any] | None
    iteration: int | None
    steps: int | None
    sharding: str | None


def read_common(folder: Path) -> Common:
    """Read what all ranks have in common; raises UserError for what cannot be read.

    It is a file of its own, or, as Megatron-Core 0.19 writes it, a list of one value beside the tensors.
    """
    path = folder / COMMON
    try:
        directory = {} if path.is_file() else _directory(folder)["storage_data"]
        file = path if path.is_file() else _bytes_of(folder, directory, re.compile(_COMMON_VALUE))
        with zipfile.ZipFile(file) as archive:
            content, inside = _content(archive)
            stated, args, iteration = (content.get(key) for key in ("optimizer", "args", "iteration"))
            arguments = dict(_plain(vars(args.state))) if isinstance(args, Inert) else None
            return Common(
                tuple(map(str, content)),
                arguments,
                None if iteration is None else int(iteration),
                _steps(stated, archive, inside),
                next(map(str, _under(stated, "param_state_sharding_type")), None),
            )
    except Exception as error:  # whatever a damaged pickle leads to
        raise _damaged(path, error) from error


def _directory(folder: Path) -> dict[str, Any]:
    return vars(read_pickle((folder / DIRECTORY).read_bytes()).state)


def _bytes_of(folder: Path, places: Mapping[Any, Any], name: re.Pattern[str]) -> io.BytesIO:
    """Return the bytes of a value, the first of this name, that lies in a file with tensors."""
    for index, place in places.items():
        if name.fullmatch(vars(index.state)["fqn"]):
            place = vars(place.state)
            with open(folder / Path(place["relative_path"]).name, "rb") as file:
                file.seek(place["offset"])
                return io.BytesIO(file.read(place["length"]))
    raise FileNotFoundError(folder / COMMON)


def _content(archive: zipfile.ZipFile) -> tuple[dict[Any, Any], str]:
    """Return the values of a file of torch, and the folder inside of it that holds tensors."""
    (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
    content = read_pickle(archive.read(name))
    content = content[0] if isinstance(content, list) else content
    if not isinstance(content, dict):
        raise TypeError(type(content).__name__)
    return content, name.removesuffix("data.pkl")


def _steps(stated: Any, archive: zipfile.ZipFile, folder: str) -> int | None:
    """Return the one number of steps that an optimizer's settings state; None for another count of them."""
    values = [*_under(stated, "step"), *_under(stated, "common_step")]
    steps = {_count(value, archive, folder) for value in values} - {None}
    return steps.pop() if len(steps) == 1 else None


def _under(value: Any, name: str) -> Iterator[Any]:
    """Yield what stands under a name in nested dictionaries and lists."""
    if isinstance(value, dict):
        yield from (value[key] for key in value if key == name)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _under(item, name)


def _count(value: Any, archive: zipfile.ZipFile, folder: str) -> int | None:
    """Return a number that may be a tensor, as the steps of torch's own Adam are; None for other values."""
    if isinstance(value, Inert) and len(value.given) > 1 and len(value.given[0].given) > 2:
        (_, kind, key, *_), offset = value.given[0].given, value.given[1]
        form = {"torch.FloatStorage": "<f", "torch.IntStorage": "<i"}.get(kind.name)
        if form is not None:
            (value,) = struct.unpack_from(form, archive.read(f"{folder}data/{key}"), 4 * offset)
    return int(value) if isinstance(value, int | float) else None


def read_tensors(folder: Path) -> Stored:
    """Return what lies in the files of a checkpoint; raises UserError as `read_common`."""
    try:
        return _tensors(folder)
    except Exception as error:  # whatever a damaged pickle leads to
        raise _damaged(folder / DIRECTORY, error) from error


def _tensors(folder: Path) -> Stored:
    directory = _directory(folder)
    places: dict[str, dict[tuple[int, ...], Any]] = {}
    for index, place in directory["storage_data"].items():
        entry, place = vars(index.state), vars(place.state)
        places.setdefault(entry["fqn"], {})[tuple(entry.get("offset") or ())] = place
    tensors: dict[str, StoredTensor] = {}
    states: dict[str, dict[str, StoredTensor]] = {}
    buffers: dict[str, dict[Bucket, StoredTensor]] = {}
    for name, entry in directory["state_dict_metadata"].items():
        entry, state, flat = vars(entry.state), _STATE.fullmatch(name), _FLAT.fullmatch(name)
        kind = state[1] if state else flat[5] if flat else None
        if "chunks" not in entry or (kind is not None and kind not in (*MOMENTS, *MASTERS)):
            continue
        key = state[2] if state else name
        if flat:
            bucket = Bucket(*(int(number or 0) for number in flat.groups()[:4]))
            buffers.setdefault(flat[5], {})[bucket] = _stored(entry, places.get(name, {}))
        elif key.startswith(_MODEL) and "_extra_state" not in key:
            target = states.setdefault(state[1], {}) if state else tensors
            target[key] = _stored(entry, places.get(name, {}))
    steps = None
    if buffers:
        with zipfile.ZipFile(_bytes_of(folder, directory["storage_data"], _SETTINGS)) as archive:
            content, inside = _content(archive)
            steps = _steps(content, archive, inside)
    return Stored(tensors, states, buffers, steps)


def _stored(entry: Mapping[str, Any], places: Mapping[tuple[int, ...], Any]) -> StoredTensor:
    """Return a tensor of the directory, with the pieces of it that have a place in a file."""
    chunks = []
    for chunk in entry["chunks"]:
        chunk = vars(chunk.state)
        start, size = tuple(chunk["offsets"]), tuple(chunk["sizes"])
        place = places.get(start)
        if place is not None:
            file = str(place["relative_path"])
            chunks.append(Chunk(start, size, file, int(place["offset"]), int(place["length"])))
    if any(Path(chunk.file).name != chunk.file for chunk in chunks):
        raise ValueError("it names files outside of its folder")
    dtype = entry["properties"].given[0]
    return StoredTensor(tuple(entry["size"]), str(getattr(dtype, "name", dtype)), tuple(chunks))


def _plain(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values that JSON has, and types by name; others are of no model."""
    for name, value in values.items():
        if isinstance(value, type) and issubclass(value, Inert):
            yield name, value.name
        elif value is None or isinstance(value, bool | int | float | str):
            yield name, value
        elif isinstance(value, list | tuple) and all(type(item) in (bool, int, float, str) for item in value):
            yield name, list(value)


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(
        "a file of the Megatron checkpoint cannot be read",
        where=str(path),
        expected="what Megatron-LM writes with --ckpt-format torch_dist",
        got="no such file"
        if isinstance(error, FileNotFoundError)
        else f"{type(error).__name__}: {error}"[:300],
        fix="copy the whole folder again, or name another iteration",
    )
