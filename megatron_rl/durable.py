"""Atomic writes of files and folders, and digests that detect later damage.

Every file and folder is first written under a temporary name, then flushed to the disk (fsync), and then
renamed. A crash of the process or the machine leaves the old content or the new content, never a mixture. A
sealed folder contains `DIGESTS`, the digest of each of its files, to verify them later.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_rl.errors import UserError, first_line
from megatron_rl.progress import count_progress

DIGESTS = "checksums.json"

# Suffix of a complete folder while `publish_folder` replaces it.
REPLACED = ".old"

# Suffix of a folder that is being deleted, and so may be incomplete.
DOOMED = ".removed"

# Bytes that are read and hashed at a time, and number of files that are hashed in parallel.
_READ_BYTES = 2**24
_READERS = 2

# Required free space per byte to be written: file systems round sizes up and store metadata.
_HEADROOM = 1.05

# Longest path that an error shows in full, in characters.
_PATH_CHARACTERS = 200

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_FIXES = {
    errno.EACCES: "ask its owner for permission, or choose a folder of your own",
    errno.EPERM: "ask its owner for permission, or choose a folder of your own",
    errno.EROFS: "choose a folder that can be written",
    errno.ENOENT: "create the folder first, or correct the path",
    errno.ENOTDIR: "correct the path: one of its parents is not a folder",
    errno.EISDIR: "name a file: this is a folder",
    errno.EINVAL: "name a regular file",
    errno.EEXIST: "remove the existing file or folder, or choose another name",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "correct the link, which leads back to itself",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EIO: "check the disk, or the connection to the file system",
    errno.ESTALE: "check the disk, or the connection to the file system",
}
"""errno of a file-system error that a user can correct -> the fix."""

# Texts of the RuntimeErrors of PyTorch's allocator and of Python's threads when memory is exhausted.
_OUT_OF_MEMORY = (
    "can't start new thread",
    "not enough memory",
    "can't allocate memory",
    "Cannot allocate memory",
)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: after a crash it has the complete old or the complete new content."""
    replace_file(path, lambda temporary_path: temporary_path.write_text(text, encoding="utf-8"))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary path, flush the file to the disk and rename it to ``path``."""
    temporary_path = path.with_name(path.name + ".part")
    write(temporary_path)

    # Flush before the rename: some file systems write the new name to the disk before the content.
    with open(temporary_path, "rb") as file:
        os.fsync(file.fileno())

    os.replace(temporary_path, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that new and renamed files survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # EINVAL: the file system does not support fsync of folders.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def files_below(folder: Path) -> list[str]:
    """Return the sorted relative paths of all files below a folder, except the file of digests itself."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    relative_paths = [file.relative_to(folder).as_posix() for file in files]
    return sorted(path for path in relative_paths if path != DIGESTS)


def compute_digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Flush the files ``names`` of a folder to the disk and compute their digests.

    Returns a mapping from name to ``size:sha256``. `_READERS` files are read in parallel. Raises OSError.
    """
    paths = {name: folder / name for name in names}
    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(paths, pool.map(_compute_digest, paths.values()), strict=True))


class RunningDigest:
    """Digest of a file whose content arrives in blocks; ``str(digest)`` is ``size:sha256``."""

    def __init__(self) -> None:
        self._state = hashlib.sha256()
        self._size = 0

    def update(self, content: bytes | memoryview) -> None:
        """Add the next block of the file's content."""
        self._state.update(content)
        self._size += memoryview(content).nbytes

    def __str__(self) -> str:
        return f"{self._size}:{self._state.hexdigest()}"


def _compute_digest(path: Path) -> str:
    """Flush a file to the disk, and return its digest ``size:sha256``."""
    digest = RunningDigest()
    require_regular_file(path)

    with open(path, "rb") as file:
        os.fsync(file.fileno())
        while block := file.read(_READ_BYTES):
            digest.update(block)
            # A large checkpoint takes longer than the hang detector allows without progress.
            count_progress("blocks of files")
    return str(digest)


def require_regular_file(path: Path) -> int:
    """Return the size of a regular file in bytes; raise OSError for a pipe or device, which may never end."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return status.st_size


def write_digests(folder: Path, file_digests: Mapping[str, str]) -> None:
    """Write the digests of a folder's files, and flush the folder's entries to the disk."""
    write_text(folder / DIGESTS, json.dumps(dict(sorted(file_digests.items())), indent=0))

    subfolders = [path for path in folder.rglob("*") if path.is_dir()]
    for directory in (folder, *subfolders):
        sync_folder(directory)


def seal_folder(folder: Path, computed_digests: Mapping[str, str] | None = None) -> None:
    """Write the digests of all files of a finished folder, which marks the folder as complete (`is_sealed`).

    ``computed_digests`` maps file names to digests that need not be computed again.
    """
    all_digests = dict(computed_digests or {})
    remaining_names = [name for name in files_below(folder) if name not in all_digests]
    all_digests |= compute_digests(folder, remaining_names)
    write_digests(folder, all_digests)


def is_sealed(folder: Path) -> bool:
    """Return whether a folder has a file of digests, readable or not."""
    return os.path.lexists(folder / DIGESTS)


def read_digests(folder: Path) -> dict[str, str] | None:
    """Return the digests of a folder's files; None if the file of digests is absent or damaged."""
    try:
        require_regular_file(folder / DIGESTS)
        content = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None

    # With an empty mapping, a damaged folder would pass verification.
    if not isinstance(content, dict) or not content:
        return None
    if not all(isinstance(value, str) for value in content.values()):
        return None
    return content


def describe_damaged_files(folder: Path, file_digests: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Verify files of a folder; return one line for each damaged file, such as ``a.pt is missing``.

    ``names`` are the files to verify. ``file_digests`` is the result of `read_digests`.
    """
    lines = []
    for name in names:
        damage = _describe_damage(folder / name, file_digests[name])
        if damage is not None:
            lines.append(f"{name} {damage}")
    return lines


def _describe_damage(path: Path, expected_digest: str) -> str | None:
    """Describe the damage of a file, such as ``is missing``; return None if it matches the digest."""
    try:
        # Compare the size first, which does not need to read the file.
        size = require_regular_file(path)
        expected_size = expected_digest.partition(":")[0]
        if str(size) != expected_size:
            return f"has {size} bytes instead of {expected_size}"

        if _compute_digest(path) != expected_digest:
            return "has different content than when it was written"
        return None
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"is unreadable: {error.strerror}"


def remove_path(path: Path) -> None:
    """Delete a folder with its content, or a file or link; do nothing if the path does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def publish_folder(finished_folder: Path, final_path: Path) -> None:
    """Rename a finished folder to its final path, and delete the folder that had this path before.

    If the process is killed between the two renames, the old folder still exists as `replaced_path`, and
    `recover_replaced` restores its name at the next start.
    """
    old_folder = replaced_path(final_path)
    if os.path.lexists(final_path):
        # An existing `old_folder` is left over from a killed process, and redundant: `final_path` exists.
        remove_path(old_folder)
        final_path.rename(old_folder)
        sync_folder(final_path.parent)

    finished_folder.rename(final_path)
    sync_folder(final_path.parent)
    remove_path(old_folder)


def replaced_path(path: Path) -> Path:
    """Return ``NAME.old``, the path to which `publish_folder` renames an existing folder ``NAME``."""
    return path.with_name(path.name + REPLACED)


def recoverable_folders(folder: Path) -> list[Path]:
    """Return the sorted folders ``NAME.old`` for which no ``NAME`` exists.

    They are left by processes that were killed in `publish_folder`.
    """
    if not folder.is_dir():
        return []
    old_folders = (path for path in folder.iterdir() if path.suffix == REPLACED and path.is_dir())
    return sorted(path for path in old_folders if not os.path.lexists(path.with_suffix("")))


def recover_replaced(folder: Path) -> list[Path]:
    """Rename each folder of `recoverable_folders` from ``NAME.old`` to ``NAME``; return the new paths."""
    recovered = [path.rename(path.with_suffix("")) for path in recoverable_folders(folder)]
    if recovered:
        sync_folder(folder)
    return recovered


def require_space(folder: Path, byte_count: float, content: str) -> None:
    """Raise a UserError unless the disk of an existing ``folder`` has room for ``byte_count`` more bytes.

    ``content`` describes the new data for the error message, such as "a checkpoint".
    """
    free = shutil.disk_usage(folder).free
    if free < byte_count * _HEADROOM:
        raise full_disk_error(folder, content, f"{free / 2**30:.2f} GiB are free", byte_count)


def file_error(error: OSError, folder: Path | None = None) -> UserError | None:
    """Convert an OSError of a file operation below ``folder`` to a UserError.

    Return None for an error that the user cannot correct.
    """
    path = error.filename
    if path is None and folder is not None:
        path = str(folder)

    if error.errno in _FULL_DISK:
        return full_disk_error(folder or Path(str(path)), "the written files", str(error))
    if error.errno not in _FIXES or path is None:
        return None

    path_text = str(path)
    if len(path_text) > _PATH_CHARACTERS:
        path_text = f"{path_text[:_PATH_CHARACTERS]}… ({len(path_text)} characters)"
    return UserError(
        "a file or folder cannot be used",
        where=path_text,
        expected="a path that can be read or written",
        got=error.strerror,
        fix=_FIXES[error.errno],
    )


def memory_error(error: BaseException, activity: str) -> UserError | None:
    """Convert an exception about exhausted host memory to a UserError; return None for any other exception.

    ``activity`` is a clause such as "a checkpoint was written".

    PyTorch's allocator and the start of a thread raise a RuntimeError in this case, not a MemoryError.
    """
    text = str(error)
    is_runtime_error = isinstance(error, RuntimeError) and any(phrase in text for phrase in _OUT_OF_MEMORY)
    is_system_error = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (isinstance(error, MemoryError) or is_runtime_error or is_system_error):
        return None

    return UserError(
        f"the host's memory ran out while {activity}",
        where="the machine of this rank",
        expected="memory for copies of the written data",
        got=first_line(error),
        fix="use fewer ranks on the machine, or raise its limit (ulimit -v, the container's, Slurm's --mem); "
        "checkpoint.asynchronous=false spares a copy of the weights",
    )


def full_disk_error(folder: Path, content: str, got: str, byte_count: float | None = None) -> UserError:
    """Return the error for a disk without enough free space for ``content``, such as "a checkpoint".

    ``got`` describes the free space or the failed write; ``byte_count`` is the size of the data, None if
    unknown.
    """
    expected = "room for it"
    if byte_count is not None:
        expected = f"{byte_count * _HEADROOM / 2**30:.2f} GiB of free space"

    return UserError(
        f"the disk is too full for {content}",
        where=str(folder),
        expected=expected,
        got=got,
        fix="free some space or set another run_dir; checkpoint.keep is the number of retained checkpoints",
    )
