"""Lock of a run folder, which one job at a time can hold."""

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

HEARTBEAT_SECONDS = 5.0
"""Interval in which the holder updates the lock file's modification time."""
STALE_SECONDS = 30.0
"""Time without a heartbeat after which a holder on another host counts as dead: six heartbeats."""

_LOCKED = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks, where only the heartbeat protects."""


@contextlib.contextmanager
def only_job_in(run_dir: Path, console: Any = None) -> Iterator[None]:
    """Lock the folder inside the block, on the one rank that writes there.

    If another process holds the operating system's lock, another job is running. Not every file system
    carries locks from host to host: there the holder's heartbeat counts, and a lock without one for
    `STALE_SECONDS` is taken over, after waiting that long for a heartbeat. Raises UserError if another job
    holds the lock.
    """
    # Never unlinked: two jobs could otherwise lock two files of one name.
    path = run_dir / "run.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    stop_heartbeat = threading.Event()
    try:
        if not _acquire(descriptor):
            raise _locked_error(path, _holder(path))
        _wait_until_stale(path, console)

        # Shown in the error of another job that finds the folder locked.
        content = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": time.strftime("%F %T"),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(content).encode(), 0)
        heartbeat = threading.Thread(
            target=_heartbeat,
            args=(descriptor, stop_heartbeat),
            name="run_lock",
            daemon=True,
        )
        heartbeat.start()
        try:
            yield
        finally:
            stop_heartbeat.set()
            heartbeat.join()
            # For jobs on other hosts, an empty file means that the lock is free.
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int) -> bool:
    """Acquire the operating system's lock; return False if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCKED:
            return False
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _wait_until_stale(path: Path, console: Any) -> None:
    """Return once the holder in the lock file counts as dead; raise UserError at its next heartbeat."""
    holder = _holder(path)
    # The operating system has released the lock of a dead holder on this host, or we had not acquired it.
    if not holder or holder.get("host") == socket.gethostname():
        return

    # Compare times of one clock: that of this host may differ from the file server's.
    last_heartbeat = path.stat().st_mtime
    remaining = STALE_SECONDS - (_file_system_time(path.parent) - last_heartbeat)
    if remaining > 0 and console is not None:
        host = holder.get("host")
        print(
            f"{path} was held on {host} just now: waiting {remaining:.0f} s",
            file=console,
            flush=True,
        )
    while remaining > 0:
        time.sleep(min(remaining, 1.0))
        if path.stat().st_mtime != last_heartbeat:
            raise _locked_error(path, holder)
        remaining -= 1.0


def _file_system_time(folder: Path) -> float:
    """Return the current time by the clock of the file system of ``folder``: the mtime of a new file."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".run.lock.") as probe:
        return os.stat(probe.name).st_mtime


def _holder(path: Path) -> dict[str, Any]:
    """Return the host, process and start of the lock's holder, empty if the file names none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _locked_error(path: Path, holder: dict[str, Any]) -> UserError:
    values = {"process": "?", "host": "?", "since": "?"} | holder
    return UserError(
        "another job trains in this run folder",
        where=str(path.parent),
        expected="a folder that no job is writing to",
        got="process {process} on {host}, since {since}".format_map(values),
        fix="wait for that job, end it, or set another run_dir",
    )


def _heartbeat(descriptor: int, stop: threading.Event) -> None:
    """Update the lock file's modification time until stopped."""
    while not stop.wait(HEARTBEAT_SECONDS):
        # A file system that is temporarily unavailable must not end the run.
        with contextlib.suppress(OSError):
            os.utime(descriptor)
