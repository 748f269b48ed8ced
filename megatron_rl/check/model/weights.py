"""Rules on a checkpoint's weights, read from the headers of its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.check.files import Files
from megatron_rl.errors import UserError, some_of
from megatron_rl.interop.megatron_lm.checkpoint import POINTER
from megatron_rl.shapes.layer_weights import EMBEDDING, OUTPUT, SCALAR
from megatron_rl.shapes.pretrained import INDEX, PretrainedModel, separate_head_error, weight_files

_FLOATS = ("F64", "F32", "F16", "BF16")
_LARGEST_HEADER = 100_000_000
"""Bytes; safetensors refuses longer ones."""
_COMPARED_BYTES = 2**24
"""Bytes of two tensors that are compared at a time."""
_SHOWN = 4


@dataclass(frozen=True)
class StoredTensor:
    """Header entry of a tensor, whose ``size`` bytes lie at the offset ``begin`` of its ``file``."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    begin: int = 0
    size: int = 0


def check_weights(path: Path, where: str, files: Files, model: PretrainedModel | None) -> None:
    """Check that every weight file is whole and that the tensors are those of ``model``, if it is known."""
    if (path / POINTER).is_file():
        return  # what it points to was checked when it was written
    errors = len(files.errors), len(files.missing), len(files.to_be_made)
    shards, place = weight_files(path), {}
    if shards is None:
        place = _index(path, files)
        if place is None:
            return
        shards = sorted({path / name for name in place.values()})
    if not shards:
        _no_weights(path, where, files)
    stored: dict[str, StoredTensor] = {}
    for shard in shards:
        if shard.is_file():
            stored |= _stored(shard, files)
        else:
            files.miss(
                shard,
                f"a weight file is missing: {shard.name}",
                where,
                f"every file that {INDEX} names" if place else f"a file {shard.name}",
                "download the checkpoint again",
            )
    if errors != (len(files.errors), len(files.missing), len(files.to_be_made)):
        return
    misplaced = sorted(
        name for name, file in place.items() if name not in stored or stored[name].file != path / file
    )
    if misplaced:
        files.errors.append(_misplaced(path, place, misplaced))
    elif model is not None:
        files.errors.extend(_tensor_errors(path, stored, model))


def _index(path: Path, files: Files) -> dict[str, str] | None:
    """Return the file of each tensor as the index says, None for a broken one."""
    index = path / INDEX
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {Path(name).name == name for name in weight_map.values()}
        problem = None if names == {True} else "weight_map names no files of this directory"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        weight_map, problem = None, f"{type(error).__name__}: {error}"
    if problem is None:
        return weight_map
    files.errors.append(
        UserError(
            "the model's list of weight files cannot be read",
            where=str(index),
            expected='a JSON object with "weight_map": tensor -> file name',
            got=problem,
            fix="copy the file again from the checkpoint",
        )
    )
    return None


def _no_weights(path: Path, where: str, files: Files) -> None:
    files.miss(
        path / "model.safetensors",
        "the model has no weights",
        where,
        "one or more .safetensors files",
        "convert the .bin files: load with transformers and save_pretrained(safe_serialization=True)"
        if any(path.glob("*.bin"))
        else "copy the weight files into the directory",
    )


def _stored(path: Path, files: Files) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, after comparing its size with what its header says."""
    try:
        return read_header(path)
    except ValueError as error:
        problem = str(error)
    except (OSError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    files.errors.append(
        UserError(
            "a weight file is broken",
            where=str(path),
            expected="a complete safetensors file",
            got=problem,
            fix="download or copy the file again",
        )
    )
    return {}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name; raises OSError, or ValueError where it is damaged."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 1024 and b"git-lfs" in path.read_bytes():
            raise ValueError("a Git LFS pointer instead of the weights")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise ValueError(f"{size} bytes, which do not hold its header")
        header: Mapping[str, Any] = json.loads(stream.read(length))
    stored, end = {}, 0
    for name, entry in header.items():
        if name != "__metadata__":
            begin, stop = entry["data_offsets"]
            stored[name] = StoredTensor(
                shape=tuple(entry["shape"]),
                dtype=str(entry["dtype"]),
                file=path,
                begin=8 + length + begin,
                size=stop - begin,
            )
            end = max(end, begin, stop)
    if 8 + length + end != size:
        raise ValueError(f"{size} bytes where its header says {8 + length + end}")
    return stored


def _misplaced(path: Path, place: Mapping[str, str], names: list[str]) -> UserError:
    return UserError(
        "the model's list of weight files names tensors that the files do not hold",
        where=str(path / INDEX),
        expected=some_of([f"{name} in {place[name]}" for name in names], _SHOWN),
        got=f"{len(names)} of {len(place)} tensors that are not where it says",
        fix="download the checkpoint again, index and weight files together",
    )


def _tensor_errors(path: Path, stored: Mapping[str, StoredTensor], model: PretrainedModel) -> list[UserError]:
    """Return how the stored tensors differ from those of the model in its config.json."""
    quantised = [name for name, tensor in stored.items() if tensor.dtype not in _FLOATS]
    if quantised:
        return [_quantised(path, quantised, stored[quantised[0]].dtype)]
    expected = model.tensor_shapes()
    missing = [name for name in expected if name not in stored]
    unexpected = [name for name in stored if name not in expected and not model.is_ignorable(name)]
    if missing or unexpected:
        return [_other_tensors(path, missing, unexpected)]
    if model.has_separate_head(stored) and not _equal_values(stored[OUTPUT], stored[EMBEDDING]):
        shapes = {name: stored[name].shape for name in (OUTPUT, EMBEDDING)}
        return [separate_head_error(path, shapes, "other values")]
    return [
        UserError(
            f"the tensor {name} has another shape than config.json says",
            where=str(stored[name].file),
            expected=f"{list(shape)}, by the sizes in {path / 'config.json'}",
            got=str(list(stored[name].shape)),
            fix="use the config.json that belongs to these weights",
        )
        for name, shape in expected.items()
        if stored[name].shape != shape
    ][:1]


def _equal_values(first: StoredTensor, second: StoredTensor) -> bool:
    """Say whether two tensors are stored as the same bytes, read piece by piece."""
    if (first.shape, first.dtype, first.size) != (second.shape, second.dtype, second.size):
        return False
    with first.file.open("rb") as one, second.file.open("rb") as other:
        one.seek(first.begin)
        other.seek(second.begin)
        for done in range(0, first.size, _COMPARED_BYTES):
            count = min(_COMPARED_BYTES, first.size - done)
            if one.read(count) != other.read(count):
                return False
    return True


def _quantised(path: Path, names: list[str], dtype: str) -> UserError:
    return UserError(
        "the weights are quantised, which cannot be trained",
        where=str(path),
        expected=f"tensors in one of {', '.join(_FLOATS)}",
        got=f"{some_of(names, _SHOWN)} in {dtype}",
        fix="use the checkpoint that was quantised, in bfloat16 or float32",
    )


def _other_tensors(path: Path, missing: list[str], unexpected: list[str]) -> UserError:
    fix = "use a checkpoint saved from this architecture and number of layers"
    if missing == [OUTPUT]:
        fix = "set tie_word_embeddings to true in config.json if the output layer shares the embedding"
    elif missing == [SCALAR]:
        fix = "name a checkpoint of a reward model, or correct `architectures` in config.json"
    return UserError(
        "the weights are not those of the model in its config.json",
        where=str(path),
        expected=some_of(missing, _SHOWN) if missing else "no tensors but the model's",
        got="; ".join(
            words
            for words in (
                f"missing {len(missing)}" if missing else "",
                f"unexpected {some_of(unexpected, _SHOWN)}" if unexpected else "",
            )
            if words
        ),
        fix=fix,
    )
