"""What a checkpoint could run when it is loaded, found without running it.

Megatron's distributed format keeps its directory, and small values beside the tensors, as pickles, and a
pickle calls whatever it names. Here pickles are read with every name replaced by something inert, and the
names are compared with those that Megatron and torch write themselves.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_rl.errors import UserError
from megatron_rl.interop.megatron_lm.inert_pickle import names_in

_DTYPES = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool"
_STORAGES = (
    "DoubleStorage FloatStorage HalfStorage BFloat16Storage LongStorage IntStorage ByteStorage BoolStorage"
)
_METADATA = (
    "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
    "TensorStorageMetadata _MEM_FORMAT_ENCODING"
)
_PLANNER = "SavePlan TensorWriteData WriteItem WriteItemType BytesIOWriteData"
HARMLESS = frozenset(
    {
        *(("torch", name) for name in f"Size {_DTYPES} {_STORAGES}".split()),
        *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA.split()),
        *(("torch.distributed.checkpoint.planner", name) for name in _PLANNER.split()),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.storage", "UntypedStorage"),
        ("collections", "OrderedDict"),
        ("_codecs", "encode"),
        ("_io", "BytesIO"),
        ("io", "BytesIO"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
    }
)
"""Names in the pickles of Megatron's format that build values and do nothing else."""
_ARCHIVE = b"PK\x03\x04"


def refuse_code(folder: Path, *, trusted: bool) -> None:
    """Raise a UserError if loading the distributed checkpoint ``folder`` would run more than its format does.

    A ``trusted`` checkpoint is not looked at.
    """
    if trusted:
        return
    for place, names in _pickled_names(folder):
        strange = sorted(f"{module}.{name}" for module, name in names - HARMLESS)
        if strange:
            raise UserError(
                "the checkpoint could run code when it is loaded",
                where=str(place),
                expected="names of data types and containers, as Megatron's distributed format writes them",
                got=f"it names {', '.join(strange[:8])}",
                fix="take it from where it was made; checkpoint.trust=true (--trust) if you know its origin",
            )


def _pickled_names(folder: Path) -> Iterator[tuple[Path, set[tuple[str, str]]]]:
    """Yield each file with pickles and the names in them: the directory first, then what it leads to."""
    directory = folder / ".metadata"
    try:
        content = directory.read_bytes()
        names = names_in(content)
    except Exception as error:  # whatever a damaged pickle leads to
        raise _unreadable(directory, error) from error
    yield directory, names
    # Its names are harmless, or the caller has stopped here; now it may be read for what it says.
    try:
        values = list(_stored_values(folder, pickle.loads(content)))
    except Exception as error:
        raise _unreadable(directory, error) from error
    for path, offset, length in values:
        yield path, _names_in_archive(path, offset, length)
    for path in sorted({folder / "common.pt", *folder.glob("*.pt")}):
        yield path, _names_in_archive(path, 0, -1)


def _stored_values(folder: Path, directory: Any) -> Iterator[tuple[Path, int, int]]:
    """Yield file, offset and length of what is stored as a pickle; tensors are read as tensors alone."""
    entries = directory.state_dict_metadata.items()
    values = {name for name, entry in entries if not isinstance(entry, TensorStorageMetadata)}
    for index, info in (directory.storage_data or {}).items():
        if index.fqn in values:
            yield folder / info.relative_path, info.offset, info.length


def _names_in_archive(path: Path, offset: int, length: int) -> set[tuple[str, str]]:
    """Return the names in what `torch.save` wrote at a place, which `torch.load` is to read."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            content = file.read(length)
        if not content.startswith(_ARCHIVE):  # torch would take it for its older format, a bare pickle
            raise ValueError("no archive begins there")
        # torch's own reader: of entries of one name, and of two tables of entries, others may take another.
        reader = torch._C.PyTorchFileReader(io.BytesIO(content))
        if "constants.pkl" in reader.get_all_records():
            raise ValueError("it is a program of TorchScript")
        return names_in(reader.get_record("data.pkl"))
    except Exception as error:  # whatever damaged bytes lead to
        raise _unreadable(path, error) from error


def _unreadable(place: Path, error: Exception) -> UserError:
    return UserError(
        "the checkpoint holds a value that cannot be read",
        where=str(place),
        expected="what torch.save writes",
        got=f"{type(error).__name__}: {error}",
        fix="use another checkpoint: this one is damaged",
    )
