"""A control group for contained code, below the trainer's own group, on kernels that allow one there.

A group counts memory that no limit of a process counts (files in memory, kernel memory), and its limits
refuse at once, where the supervisor can only look from time to time. It is created below the trainer's own
group and nowhere else: elsewhere its memory would not count as the job's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

ROOM = 2**27
"""Bytes between the memory limit of a process and the larger one of the group.

At its limit a process gets an error that it can report; at the group's limit the kernel kills it.
"""
_ROOT = Path("/sys/fs/cgroup")
_NAME_PREFIX = "megatron_rl_"
_REMOVAL_SECONDS = 2.0
"""Time in which the removal of a group is repeated: the kernel still releases its ended processes."""
_RETRY_SECONDS = 0.01
_OOM_COUNTERS = ("memory.events", "memory.oom_control")
"""Files with the number of processes that were killed for memory, in version 2 and 1 of control groups."""


class ControlGroup:
    """The folders of one group, by controller: the same one in version 2, one for each in version 1.

    ``memory`` is its limit in bytes, ``tasks`` that of processes and threads. A kernel that allows no group
    leaves it without folders, and its methods without effect.
    """

    def __init__(self, memory: int, tasks: int) -> None:
        name = f"{_NAME_PREFIX}{os.getpid()}_{time.monotonic_ns()}"
        # Files of cgroup v2 and v1; only those of the group's version exist. Swap would add to the limit.
        limits_by_controller = {
            "memory": {"memory.max": memory, "memory.swap.max": 0, "memory.limit_in_bytes": memory},
            "pids": {"pids.max": tasks},
        }

        self._folders: dict[str, Path] = {}
        for controller, limits in limits_by_controller.items():
            parent = _own_group(controller)
            if parent is None:
                continue

            _remove_abandoned(parent)
            if _create(parent / name, limits):
                self._folders[controller] = parent / name

    def enter(self) -> None:
        """Move this process, and all that it will start, into the group."""
        for controller, folder in list(self._folders.items()):
            try:
                (folder / "cgroup.procs").write_text("0")
            except OSError:
                del self._folders[controller]

    def went_over_memory(self) -> bool:
        """Return whether the kernel killed a process because the group's memory was used up."""
        if "memory" not in self._folders:
            return False
        for file in _OOM_COUNTERS:
            with contextlib.suppress(OSError, ValueError):
                for line in (self._folders["memory"] / file).read_text().splitlines():
                    name, _, count = line.partition(" ")
                    if name == "oom_kill" and int(count):
                        return True

        return False

    def remove(self) -> None:
        """Remove the group after its processes have ended, which the kernel may still be working on."""
        deadline = time.monotonic() + _REMOVAL_SECONDS
        for folder in set(self._folders.values()):
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(_RETRY_SECONDS)


def _remove_abandoned(parent: Path) -> None:
    """Remove groups whose supervisor, the process in their name, was killed before it could."""
    for folder in parent.glob(f"{_NAME_PREFIX}*"):
        supervisor = folder.name.removeprefix(_NAME_PREFIX).split("_")[0]
        if not os.path.exists(f"/proc/{supervisor}"):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _create(folder: Path, limits: Mapping[str, int]) -> bool:
    """Create a group with those limits that its controller has; return whether it has any."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return False

    # The kernel creates the files of a group. A file that is absent is of the other version, or its
    # controller is not enabled here.
    count = 0
    for file, limit in limits.items():
        with contextlib.suppress(OSError), open(folder / file, "r+") as opened:
            opened.write(str(limit))
            count += 1

    if not count:
        with contextlib.suppress(OSError):
            folder.rmdir()
    return count > 0


def _own_group(controller: str) -> Path | None:
    """Return the folder of this process's group with a controller; None if it cannot be written."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None

    # A line is hierarchy:controllers:path; version 2 has one hierarchy, and its line names no controllers.
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for root in (_ROOT, _ROOT / "unified"):
                folder = root / path.lstrip("/")
                with contextlib.suppress(OSError):
                    if controller in (folder / "cgroup.controllers").read_text().split():
                        # The parent enables controllers for its children; the kernel refuses that if the
                        # parent contains processes itself.
                        with contextlib.suppress(OSError):
                            (folder / "cgroup.subtree_control").write_text(f"+{controller}")
                        return folder if os.access(folder, os.W_OK) else None
        elif controller in controllers.split(","):
            folder = _ROOT / controller / path.lstrip("/")
            return folder if folder.is_dir() and os.access(folder, os.W_OK) else None
    return None
