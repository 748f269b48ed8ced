"""A control group for contained code, below the trainer's own group, on kernels that allow it.

A group also counts memory to which no limit of a process applies (files in memory, kernel memory), and the
kernel enforces its limits immediately, whereas the supervisor measures at intervals. The group is created
only below the trainer's own group, so that its memory counts as the job's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

GROUP_MARGIN = 2**27
"""Bytes by which the memory limit of the group exceeds that of a process.

At its own limit a process gets an error that it can report; at the group's limit the kernel kills it.
"""
_ROOT = Path("/sys/fs/cgroup")
_NAME_PREFIX = "megatron_rl_"
_REMOVAL_SECONDS = 2.0
"""Seconds for which the removal of a group is retried, while the kernel releases its ended processes."""
_RETRY_SECONDS = 0.01
_OOM_COUNTERS = ("memory.events", "memory.oom_control")
"""Files with the number of processes that were killed for memory, in version 2 and 1 of control groups."""
_FAILURE_COUNTER = "memory.failcnt"
"""File with the number of allocations that the group's limit refused, in version 1; version 2 has it in
`memory.events`."""


class ControlGroup:
    """Control group with limits of memory and tasks.

    ``memory`` is the limit in bytes, ``tasks`` that of processes and threads. In version 1 of control groups
    each controller has a separate folder of the group, in version 2 all have the same one. On a kernel that
    allows no group there are no folders, and the methods have no effect.
    """

    def __init__(self, memory: int, tasks: int) -> None:
        name = f"{_NAME_PREFIX}{os.getpid()}_{time.monotonic_ns()}"
        # Files of cgroup v2 and v1; only the files of the group's version exist. Swap is 0, since it would
        # add to the limit.
        limits_by_controller = {
            "memory": {"memory.max": memory, "memory.swap.max": 0, "memory.limit_in_bytes": memory},
            "pids": {"pids.max": tasks},
        }

        self._folders: dict[str, Path] = {}
        for controller, limits in limits_by_controller.items():
            parent = _find_own_group(controller)
            if parent is None:
                continue

            _remove_abandoned_groups(parent)
            if _create_group(parent / name, limits):
                self._folders[controller] = parent / name

    def enter(self) -> None:
        """Move this process, with all processes that it will start, into the group."""
        for controller, folder in list(self._folders.items()):
            try:
                (folder / "cgroup.procs").write_text("0")
            except OSError:
                del self._folders[controller]

    def has_exceeded_memory(self) -> bool:
        """Return whether the kernel has killed a process because the group's memory was used up."""
        if "memory" not in self._folders:
            return False
        counters: dict[str, int] = {}
        for counter_file in _OOM_COUNTERS:
            with contextlib.suppress(OSError, ValueError):
                for line in (self._folders["memory"] / counter_file).read_text().splitlines():
                    name, _, count = line.partition(" ")
                    counters[name] = int(count)
        with contextlib.suppress(OSError, ValueError):
            counters["oom"] = int((self._folders["memory"] / _FAILURE_COUNTER).read_text())

        # A machine without free memory kills contained code first, and `oom_kill` counts that, too. It is the
        # group's own limit only if an allocation reached that.
        return counters.get("oom_kill", 0) > 0 and counters.get("oom", 0) > 0

    def remove(self) -> None:
        """Remove the group after its processes have ended; retry while the kernel still releases them."""
        deadline = time.monotonic() + _REMOVAL_SECONDS
        for folder in set(self._folders.values()):
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(_RETRY_SECONDS)


def _remove_abandoned_groups(parent: Path) -> None:
    """Remove groups whose supervisor, the process in their name, was killed before it removed them."""
    for folder in parent.glob(f"{_NAME_PREFIX}*"):
        supervisor = folder.name.removeprefix(_NAME_PREFIX).split("_")[0]
        if not os.path.exists(f"/proc/{supervisor}"):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _create_group(folder: Path, limits: Mapping[str, int]) -> bool:
    """Create a group and set the limits that its controller supports; return whether any was set.

    ``limits``: name of a file of the group -> the limit to write to it.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return False

    # The kernel creates the files of a group. A file is absent if it belongs to the other version, or if its
    # controller is not enabled.
    set_count = 0
    for limit_file, limit in limits.items():
        with contextlib.suppress(OSError), open(folder / limit_file, "r+") as stream:
            stream.write(str(limit))
            set_count += 1

    if not set_count:
        with contextlib.suppress(OSError):
            folder.rmdir()
    return set_count > 0


def _find_own_group(controller: str) -> Path | None:
    """Return the folder of this process's group with a controller, or None if it cannot be written."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None

    # A line is hierarchy:controllers:path; version 2 has one hierarchy, and its line names no controllers.
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            # On machines with both versions, version 2 is mounted in the folder `unified`.
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
