"""Keep a run folder to one job at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError

BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0
"""A holder on another host that has not touched the file for so long is dead."""


@contextlib.contextmanager
def only_job_in(run_dir: Path, console: Any = None) -> Iterator[None]:
    """Hold the folder's lock inside the block, on the one rank that writes there.

    A lock that the operating system still holds is another job's. File systems that do not carry locks from
    host to host leave the holder's sign of life, the file's modification time: a lock without one for
    `STALE_SECONDS` is a dead host's and is taken over, after waiting for a sign that long. Raises UserError
    where another job holds the lock.
    """
    path = run_dir / "run.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    ended = threading.Event()
    try:
        if not _locked(descriptor):
            raise _taken(path, _holder(path))
        _outwait(path, console)
        content = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%F %T")}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(content).encode(), 0)
        beat = threading.Thread(target=_beat, args=(descriptor, ended), name="run_lock", daemon=True)
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Take the operating system's lock; False where another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without locks
            raise
    return True


def _outwait(path: Path, console: Any) -> None:
    """Return when the holder that the file names is known to be dead; raise UserError when it lives."""
    holder = _holder(path)
    if not holder or holder.get("host") == socket.gethostname():
        return  # released in order, or by the end of its process
    seen = path.stat().st_mtime
    waiting = STALE_SECONDS - (_file_system_time(path.parent) - seen)
    if waiting > 0 and console is not None:
        host = holder.get("host")
        print(f"{path} was held on {host} just now: waiting {waiting:.0f} s", file=console, flush=True)
    while waiting > 0:
        time.sleep(min(waiting, 1.0))
        if path.stat().st_mtime != seen:
            raise _taken(path, holder)
        waiting -= 1.0


def _file_system_time(folder: Path) -> float:
    """Return the present by the clock that gives files in ``folder`` their times."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".run.lock.") as probe:
        return os.stat(probe.name).st_mtime


def _holder(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _taken(path: Path, holder: dict[str, Any]) -> UserError:
    who = "process {process} on {host}, since {since}".format_map(
        {"process": "?", "host": "?", "since": "?"} | holder
    )
    return UserError(
        "another job trains in this run folder",
        where=str(path.parent),
        expected="a folder that no job is writing to",
        got=who,
        fix="wait for that job, end it, or set another run_dir",
    )


def _beat(descriptor: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(descriptor)
