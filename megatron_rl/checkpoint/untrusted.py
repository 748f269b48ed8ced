"""Detection of code that loading a checkpoint would run, without running it.

Megatron's distributed format stores its index (.metadata), and small values other than tensors, as pickles.
Loading a pickle calls the functions that it names. This module parses pickles with an inert placeholder for
every name, and compares the names with the list of names that Megatron and torch write.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_rl.errors import UserError, unreadable_file_error
from megatron_rl.interop.megatron_lm.pickles import COMMON, TENSOR_INDEX, read_global_names

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
"""Names (module, global) in the pickles of Megatron's format that are safe to call: they create values."""
_MAX_NAMES_LISTED = 8
"""Maximum number of names in an error."""
_ARCHIVE_MAGIC = b"PK\x03\x04"
"""First bytes of a zip archive, which torch.save writes."""


def refuse_code(folder: Path, *, trusted: bool) -> None:
    """Raise UserError if loading the distributed checkpoint ``folder`` could run code from it.

    A ``trusted`` checkpoint is not inspected.
    """
    if trusted:
        return

    # Inspect one file at a time: the index must be harmless before it is unpickled to find the other files.
    for path, global_names in _imported_globals(folder):
        dangerous_names = sorted(f"{module}.{name}" for module, name in global_names - HARMLESS)
        if dangerous_names:
            raise UserError(
                "the checkpoint could run code when it is loaded",
                where=str(path),
                expected="names of data types and containers, as Megatron's distributed format writes them",
                got=f"it names {', '.join(dangerous_names[:_MAX_NAMES_LISTED])}",
                fix="copy it again from its origin; if you trust that, set checkpoint.trust=true (--trust)",
            )


def _imported_globals(folder: Path) -> Iterator[tuple[Path, set[tuple[str, str]]]]:
    """Yield (path, globals) for each file with pickles: the path and the globals that its pickles import.

    A global is a pair (module, name). The order of the files is: the index, the files that the index lists,
    and the files with values equal on all ranks. The index is unpickled after the first yield, so the caller
    must stop if the index imports a dangerous global.
    """
    index_path = folder / TENSOR_INDEX
    # Damaged pickles raise errors of any type.
    try:
        content = index_path.read_bytes()
        names = read_global_names(content)
    except Exception as error:
        raise _unreadable_error(index_path, error) from error
    yield index_path, names

    # The caller has not stopped, so the index imports nothing dangerous.
    try:
        locations = list(_locate_pickled_values(folder, pickle.loads(content)))
    except Exception as error:
        raise _unreadable_error(index_path, error) from error
    for path, offset, length in locations:
        yield path, _globals_in_archive(path, offset, length)

    # Files next to the tensors, with values that are equal on all ranks.
    for path in sorted({folder / COMMON, *folder.glob("*.pt")}):
        yield path, _globals_in_archive(path, 0, -1)


def _locate_pickled_values(folder: Path, metadata: Any) -> Iterator[tuple[Path, int, int]]:
    """Yield (file, offset, length in bytes) of each pickled value in the index. Tensors are not pickled.

    ``metadata`` is the unpickled index, a ``Metadata`` of torch.
    """
    pickled_names: set[str] = set()
    for name, value_metadata in metadata.state_dict_metadata.items():
        if not isinstance(value_metadata, TensorStorageMetadata):
            pickled_names.add(name)

    locations = metadata.storage_data or {}
    for index, location in locations.items():
        if index.fqn in pickled_names:
            path = folder / location.relative_path
            yield path, location.offset, location.length


def _globals_in_archive(
    path: Path,
    offset: int,
    length: int,
) -> set[tuple[str, str]]:
    """Return the (module, name) of each global that the pickle in a torch.save archive imports.

    The archive is ``length`` bytes of the file ``path``, from ``offset`` on. With a ``length`` of -1 it ends
    at the end of the file.
    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            content = file.read(length)
        if not content.startswith(_ARCHIVE_MAGIC):
            # torch.load would read these bytes in its older format, a pickle without an archive.
            raise ValueError("no archive begins there")

        # Read the archive with torch's reader, as torch.load does. A forged archive may have two records of
        # one name, or two tables of records, and another reader could select a different one than torch.load.
        archive_reader = torch._C.PyTorchFileReader(io.BytesIO(content))
        if "constants.pkl" in archive_reader.get_all_records():
            raise ValueError("it is a program of TorchScript")
        return read_global_names(archive_reader.get_record("data.pkl"))
    except Exception as error:  # damaged bytes raise errors of any type
        raise _unreadable_error(path, error) from error


def _unreadable_error(path: Path, error: Exception) -> UserError:
    """Return the error for a checkpoint file whose pickles cannot be parsed, with ``error`` as the reason."""
    return unreadable_file_error(
        "a value of the checkpoint",
        path,
        error,
        expected="an archive that torch.save wrote",
        fix="use another checkpoint: this one is damaged",
    )
