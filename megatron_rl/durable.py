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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_rl.errors import UserError

DIGESTS = "checksums.json"
_READ_BYTES = 2**24
_HEADROOM = 1.05
"""Space asked for per byte to be written: file systems round up and keep books."""


def write_text(path: Path, text: str) -> None:
    """Write a file that is whole or absent after any crash, replacing what has the name."""
    aside = path.with_name(path.name + ".part")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
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
    """Return ``size:sha256`` of files as they stand on the disk, which they reach here.

    A file that cannot be read has the reason in place of a digest.
    """
    result = {}
    for name in names:
        try:
            result[name] = _digest(folder / name)
        except OSError as error:
            result[name] = f"unreadable: {error.strerror}"
    return result


def _digest(path: Path) -> str:
    state, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        while block := file.read(_READ_BYTES):
            state.update(block)
            size += len(block)
    return f"{size}:{state.hexdigest()}"


def write_digests(folder: Path, known: Mapping[str, str]) -> None:
    """Keep the digests of a folder's files with it, and have all names in it survive a crash."""
    write_text(folder / DIGESTS, json.dumps(dict(sorted(known.items())), indent=0))
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(inner)


def read_digests(folder: Path) -> dict[str, str] | None:
    """Return the digests that a folder keeps, None where they are missing or damaged themselves."""
    try:
        known = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    plain = isinstance(known, dict) and all(isinstance(value, str) for value in known.values())
    return known if plain and known else None


def damages(folder: Path, known: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Return what is wrong with the files ``names`` of a folder, one line each that names the file."""
    result = []
    for name, now in digests(folder, names).items():
        before = known[name]
        if now == before:
            continue
        if now.startswith("unreadable"):
            result.append(f"{name} {'is missing' if not (folder / name).exists() else 'is ' + now}")
        elif now.split(":")[0] != before.split(":")[0]:
            result.append(f"{name} has {now.split(':')[0]} bytes instead of {before.split(':')[0]}")
        else:
            result.append(f"{name} has other content than was written")
    return result


def publish(aside: Path, final: Path) -> None:
    """Give a finished folder its name in place of what has it; the old folder goes after that."""
    old = final.with_name(final.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    aside.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def require_space(folder: Path, needed: float, what: str) -> None:
    """Raise a UserError unless the disk below an existing ``folder`` has room for ``needed`` more bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed * _HEADROOM:
        raise no_space(folder, what, f"{free / 2**30:.2f} GiB are free", needed)


def no_space(folder: Path, what: str, got: str, needed: float | None = None) -> UserError:
    """Return the error that says which disk is full."""
    return UserError(
        f"the disk is too full for {what}",
        where=str(folder),
        expected="room for it" if needed is None else f"{needed * _HEADROOM / 2**30:.2f} GiB of free space",
        got=got,
        fix="free some space or set another run_dir; checkpoint.keep says how many checkpoints stay",
    )
