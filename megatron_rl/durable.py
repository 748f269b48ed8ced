"""Files that are whole or absent, and stay what they were written as.

What is written goes aside first, to the disk (fsync of files and folders) and then to its name, so that a
crash at any moment, of the process or of the machine, leaves the old state or the new one. A folder keeps a
digest of each of its files; who reads it later can tell every damage from what was written.
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

from megatron_rl.errors import UserError
from megatron_rl.progress import advance

DIGESTS = "checksums.json"
REPLACED = ".old"
"""Suffix of a complete folder while another takes its place."""
DOOMED = ".removed"
"""Suffix of a folder that is being deleted, and so may be incomplete."""
_READ_BYTES = 2**24
_READERS = 2
_HEADROOM = 1.05
"""Space asked for per byte to be written: file systems round up and keep books."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FIXES = {
    errno.EACCES: "have its owner allow it, or name a place of your own",
    errno.EPERM: "have its owner allow it, or name a place of your own",
    errno.EROFS: "name a place that can be written",
    errno.ENOENT: "create the folder first, or correct the path",
    errno.ENOTDIR: "correct the path: something on it is no folder",
    errno.EISDIR: "name a file: this is a folder",
    errno.EINVAL: "name a file with content of its own",
    errno.EEXIST: "remove what has the name, or choose another",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "correct the link, which leads back to itself",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EIO: "check the disk, or the connection to the file system",
    errno.ESTALE: "check the disk, or the connection to the file system",
}
"""What to do about each error of a file system that a user can mend."""
_NO_MEMORY = (
    "can't start new thread",
    "not enough memory",
    "can't allocate memory",
    "Cannot allocate memory",
)
"""What errors of PyTorch and of Python's threads say where memory has run out."""
_SHOWN = 200
"""Characters of a path that are shown."""


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or as it was before after any crash."""
    replace_file(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file under another name, and give it its own once it is on the disk."""
    aside = path.with_name(path.name + ".part")
    write(aside)
    with open(aside, "rb") as file:
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that keeps no books of folders
            raise
    finally:
        os.close(descriptor)


def files_below(folder: Path) -> list[str]:
    """Return the files of a folder whose digests it keeps, relative to it and in order."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != DIGESTS)


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return ``size:sha256`` of files as they stand on the disk, which they reach here; raises OSError.

    Two files are read at once.
    """
    listed = list(names)
    with ThreadPoolExecutor(_READERS) as readers:
        return dict(zip(listed, readers.map(lambda name: _digest(folder / name), listed), strict=True))


class RunningDigest:
    """Digest of a file whose content comes in pieces; its text is ``size:sha256``."""

    def __init__(self) -> None:
        self._state = hashlib.sha256()
        self._size = 0

    def update(self, content: bytes | memoryview) -> None:
        """Append content."""
        self._state.update(content)
        self._size += memoryview(content).nbytes

    def __str__(self) -> str:
        return f"{self._size}:{self._state.hexdigest()}"


def _digest(path: Path) -> str:
    digest = RunningDigest()
    require_file(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        while block := file.read(_READ_BYTES):
            digest.update(block)
            advance("blocks of files")  # a large checkpoint takes longer than a rank may stand still
    return str(digest)


def require_file(path: Path) -> int:
    """Return the size of a file; raise OSError for what is none, which could be opened and never end."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return status.st_size


def write_digests(folder: Path, known: Mapping[str, str]) -> None:
    """Keep the digests of a folder's files with it, and have all names in it survive a crash."""
    write_text(folder / DIGESTS, json.dumps(dict(sorted(known.items())), indent=0))
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(inner)


def seal(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Keep the digests of all files of a finished folder with it; ``known`` are those computed already."""
    digests_of = dict(known or {})
    digests_of |= digests(folder, [name for name in files_below(folder) if name not in digests_of])
    write_digests(folder, digests_of)


def is_sealed(folder: Path) -> bool:
    """Return whether a folder has a file of digests, readable or not."""
    return os.path.lexists(folder / DIGESTS)


def read_digests(folder: Path) -> dict[str, str] | None:
    """Return the digests that a folder keeps, None where they are missing or damaged themselves."""
    try:
        require_file(folder / DIGESTS)
        known = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    plain = isinstance(known, dict) and all(isinstance(value, str) for value in known.values())
    return known if plain and known else None


def damages(folder: Path, known: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Return what is wrong with the files ``names`` of a folder, one line each that names the file."""
    return [f"{name} {words}" for name in names if (words := _damage(folder / name, known[name]))]


def _damage(path: Path, digest: str) -> str | None:
    try:
        size, written = require_file(path), digest.partition(":")[0]
        if str(size) != written:
            return f"has {size} bytes instead of {written}"
        return None if _digest(path) == digest else "has other content than was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"is unreadable: {error.strerror}"


def remove(path: Path) -> None:
    """Delete a folder with all in it, or whatever else has the name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def publish(aside: Path, final: Path) -> None:
    """Rename a finished folder to its final name; a folder that had the name is removed afterwards.

    Where a kill falls between the two renames, the old folder still exists under `replaced_name`, and
    `recover_replaced` gives it back its name at the next start.
    """
    old = replaced_name(final)
    if os.path.lexists(final):
        # What an earlier kill left beside a complete folder. Without one it is the only complete copy.
        remove(old)
        final.rename(old)
        sync_folder(final.parent)
    aside.rename(final)
    sync_folder(final.parent)
    remove(old)


def replaced_name(path: Path) -> Path:
    """Return the name that a folder has while `publish` replaces it."""
    return path.with_name(path.name + REPLACED)


def without_final_name(folder: Path) -> list[Path]:
    """Return the folders that a killed `publish` has renamed and not yet replaced, by name."""
    if not folder.is_dir():
        return []
    candidates = (path for path in folder.iterdir() if path.suffix == REPLACED and path.is_dir())
    return sorted(path for path in candidates if not os.path.lexists(path.with_suffix("")))


def recover_replaced(folder: Path) -> list[Path]:
    """Give back their names to what a killed `publish` left without; return the paths."""
    recovered = [path.rename(path.with_suffix("")) for path in without_final_name(folder)]
    if recovered:
        sync_folder(folder)
    return recovered


def require_space(folder: Path, needed: float, what: str) -> None:
    """Raise a UserError unless the disk below an existing ``folder`` has room for ``needed`` more bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed * _HEADROOM:
        raise no_space(folder, what, f"{free / 2**30:.2f} GiB are free", needed)


def file_error(error: OSError, folder: Path | None = None) -> UserError | None:
    """Return what to tell the user of an error with a file below ``folder``; None where it is no such."""
    place = error.filename if folder is None or error.filename is not None else str(folder)
    if error.errno in _FULL:
        return no_space(folder or Path(str(place)), "what is written", str(error))
    if error.errno not in _FIXES or place is None:
        return None
    shown = str(place)
    return UserError(
        "a file or folder cannot be used",
        where=shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}… ({len(shown)} characters)",
        expected="a path that can be read or written",
        got=error.strerror,
        fix=_FIXES[error.errno],
    )


def memory_error(error: BaseException, what: str) -> UserError | None:
    """Return what to tell the user of memory that ran out in ``what``; None where the error is no such.

    PyTorch's allocator and the start of a thread have errors of their own for it.
    """
    text = str(error)
    told = isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)
    exhausted = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (isinstance(error, MemoryError) or told or exhausted):
        return None
    first_line = text.splitlines()[0] if text else ""
    return UserError(
        f"the host's memory ran out while {what}",
        where="the machine of this rank",
        expected="memory for copies of what is written",
        got=f"{type(error).__name__}: {first_line}".removesuffix(": "),
        fix="use fewer ranks on the machine, or raise its limit (ulimit -v, the container's, Slurm's --mem); "
        "checkpoint.asynchronous=false spares a copy of the weights",
    )


def no_space(folder: Path, what: str, got: str, needed: float | None = None) -> UserError:
    """Return the error that says which disk is full."""
    return UserError(
        f"the disk is too full for {what}",
        where=str(folder),
        expected="room for it" if needed is None else f"{needed * _HEADROOM / 2**30:.2f} GiB of free space",
        got=got,
        fix="free some space or set another run_dir; checkpoint.keep says how many checkpoints stay",
    )
