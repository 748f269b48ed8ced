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
from megatron_rl.shapes.inert_pickle import Inert, read_pickle

COMMON, DIRECTORY = "common.pt", ".metadata"
_COMMON_VALUE = "common_state/shard_0_1"
_MODEL = ("embedding.", "decoder.", "output_layer.", "mtp.", "encoder.")
"""How the names of a model's tensors begin; others are of the optimizer and of random generators."""
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
"""What the optimizer keeps of a model's tensor, where it is stored as that tensor is."""
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
        with zipfile.ZipFile(path if path.is_file() else _beside_tensors(folder)) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
            content, inside = read_pickle(archive.read(name)), name.removesuffix("data.pkl")
            content = content[0] if isinstance(content, list) else content
            if not isinstance(content, dict):
                raise TypeError(type(content).__name__)
            stated, args, iteration = (content.get(key) for key in ("optimizer", "args", "iteration"))
            values = [*_under(stated, "step"), *_under(stated, "common_step")]
            steps = {_count(value, archive, inside) for value in values} - {None}
            arguments = dict(_plain(vars(args.state))) if isinstance(args, Inert) else None
            return Common(
                tuple(map(str, content)),
                arguments,
                None if iteration is None else int(iteration),
                steps.pop() if len(steps) == 1 else None,
                next(map(str, _under(stated, "param_state_sharding_type")), None),
            )
    except Exception as error:  # whatever a damaged pickle leads to
        raise _damaged(path, error) from error


def _beside_tensors(folder: Path) -> io.BytesIO:
    """Return the bytes of the common values that lie in a file with tensors."""
    directory = vars(read_pickle((folder / DIRECTORY).read_bytes()).state)
    for index, place in directory["storage_data"].items():
        if vars(index.state)["fqn"] == _COMMON_VALUE:
            place = vars(place.state)
            with open(folder / Path(place["relative_path"]).name, "rb") as file:
                file.seek(place["offset"])
                return io.BytesIO(file.read(place["length"]))
    raise FileNotFoundError(folder / COMMON)


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


def read_tensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, dict[str, StoredTensor]]]:
    """Return the model's tensors, and the optimizer's states of them; raises UserError as `read_common`."""
    try:
        return _tensors(path)
    except Exception as error:  # whatever a damaged pickle leads to
        raise _damaged(path, error) from error


def _tensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, dict[str, StoredTensor]]]:
    directory = vars(read_pickle(path.read_bytes()).state)
    stored: dict[str, dict[tuple[int, ...], Any]] = {}
    for index, place in directory["storage_data"].items():
        entry, place = vars(index.state), vars(place.state)
        stored.setdefault(entry["fqn"], {})[tuple(entry.get("offset") or ())] = place
    tensors, states = {}, {}
    for name, entry in directory["state_dict_metadata"].items():
        entry, state = vars(entry.state), _STATE.fullmatch(name)
        if state is not None and state[1] not in (*MOMENTS, *MASTERS):
            continue
        key = state[2] if state else name
        if "chunks" not in entry or not key.startswith(_MODEL) or "_extra_state" in key:
            continue
        kind = states.setdefault(state[1], {}) if state else tensors
        chunks = []
        for chunk in entry["chunks"]:
            chunk = vars(chunk.state)
            start, size = tuple(chunk["offsets"]), tuple(chunk["sizes"])
            place = stored.get(name, {}).get(start)
            if place is not None:
                chunks.append(
                    Chunk(
                        start, size, str(place["relative_path"]), int(place["offset"]), int(place["length"])
                    )
                )
        dtype = entry["properties"].given[0]
        if any(Path(chunk.file).name != chunk.file for chunk in chunks):
            raise ValueError("it names files outside of its folder")
        kind[key] = StoredTensor(tuple(entry["size"]), str(getattr(dtype, "name", dtype)), tuple(chunks))
    return tensors, states


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
