"""A control group for contained code, below that of the trainer, where the kernel lets one be made.

It counts what no limit of a process does (memory files, kernel memory), and refuses where others only look.
It is made nowhere but below the trainer's own group: elsewhere its memory would not count as the job's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_REMOVAL_SECONDS = 2.0
ROOM = 2**27
"""Bytes beyond the limit: the limit of a process answers with an error, before the group kills."""


class ControlGroup:
    """Folders of one group, by controller: one of version 2, or two of version 1."""

    def __init__(self, memory: int, tasks: int) -> None:
        name = f"megatron_rl_{os.getpid()}_{time.monotonic_ns()}"
        wanted = {
            # Of the two versions of control groups; swap is no further memory.
            "memory": {"memory.max": memory, "memory.swap.max": 0, "memory.limit_in_bytes": memory},
            "pids": {"pids.max": tasks},
        }
        self._folders: dict[str, Path] = {}
        for controller, limits in wanted.items():
            parent = _own_group(controller)
            if parent is None:
                continue
            _remove_left_over(parent)
            if _make(parent / name, limits):
                self._folders[controller] = parent / name

    def enter(self) -> None:
        """Move this process, and all that it will start, into the group."""
        for controller, folder in list(self._folders.items()):
            try:
                (folder / "cgroup.procs").write_text("0")
            except OSError:
                del self._folders[controller]

    def went_over_memory(self) -> bool:
        """Return whether the kernel ended a process since the group's memory was used up."""
        if "memory" not in self._folders:
            return False
        for file in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                for line in (self._folders["memory"] / file).read_text().splitlines():
                    name, _, count = line.partition(" ")
                    if name == "oom_kill" and int(count):
                        return True
        return False

    def remove(self) -> None:
        """Remove the group, whose processes have ended; the kernel may still be at it."""
        ends = time.monotonic() + _REMOVAL_SECONDS
        for folder in set(self._folders.values()):
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > ends:
                        break
                    time.sleep(0.01)


def _remove_left_over(parent: Path) -> None:
    """Remove groups whose supervisors were killed before they could."""
    for folder in parent.glob("megatron_rl_*"):
        if not os.path.exists(f"/proc/{folder.name.split('_')[2]}"):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _make(folder: Path, limits: Mapping[str, int]) -> bool:
    """Make a group with the limits that its controller has; return whether it has any."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return False
    count = 0
    for file, limit in limits.items():
        # The kernel makes the files: one that is not there is of another version, or of no controller here.
        with contextlib.suppress(OSError), open(folder / file, "r+") as opened:
            opened.write(str(limit))
            count += 1
    if not count:
        with contextlib.suppress(OSError):
            folder.rmdir()
    return count > 0


def _own_group(controller: str) -> Path | None:
    """Return the folder of this process's group that has a controller, None where it cannot be written."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, names, path = line.split(":", 2)
        if names == "":  # version 2
            for root in (_ROOT, _ROOT / "unified"):
                folder = root / path.lstrip("/")
                with contextlib.suppress(OSError):
                    if controller in (folder / "cgroup.controllers").read_text().split():
                        # Groups below have it where their parent says so, which one with processes may not.
                        with contextlib.suppress(OSError):
                            (folder / "cgroup.subtree_control").write_text(f"+{controller}")
                        return folder if os.access(folder, os.W_OK) else None
        elif controller in names.split(","):
            folder = _ROOT / controller / path.lstrip("/")
            return folder if folder.is_dir() and os.access(folder, os.W_OK) else None
    return None
