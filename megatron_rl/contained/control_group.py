"""Control group (cgroup) for sandboxed code, on kernels that allow it.

The kernel enforces the limits of a cgroup immediately, whereas the supervisor measures at intervals. A cgroup
also counts memory that no limit of a process covers: files in memory and kernel memory. The cgroup is created
below the trainer's own cgroup, so that its memory counts as memory of the job.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

GROUP_MARGIN = 2**27
"""Bytes by which the memory limit of the cgroup exceeds the memory limit of a process.

At the limit of a process, an allocation fails with an error that the process can report. At the limit of the
cgroup, the kernel kills a process.
"""
_ROOT = Path("/sys/fs/cgroup")
_NAME_PREFIX = "megatron_rl_"
_REMOVAL_SECONDS = 2.0
"""Seconds in which to retry the removal of a cgroup, while the kernel releases its ended processes."""
_RETRY_SECONDS = 0.01
_OOM_COUNTERS = ("memory.events", "memory.oom_control")
"""Files with the number of processes that were killed for memory, in cgroup v2 and v1."""
_FAILURE_COUNTER = "memory.failcnt"
"""File of cgroup v1 with the number of allocations that the cgroup's limit refused; in cgroup v2 this number
is in `memory.events`."""


class ControlGroup:
    """Control group (cgroup) with limits on memory and tasks.

    ``memory`` is the limit in bytes, and ``tasks`` the limit on the number of processes and threads. In
    cgroup v1 there is a folder per controller, in cgroup v2 one folder for all controllers. If the kernel
    does not allow the cgroup, there is no folder, and the methods have no effect.
    """

    def __init__(self, memory: int, tasks: int) -> None:
        # Limits of both cgroup versions; only the files of the machine's version exist. Swap is 0, since it
        # would add to the memory limit.
        name = f"{_NAME_PREFIX}{os.getpid()}_{time.monotonic_ns()}"
        limits_by_controller = {
            "memory": {"memory.max": memory, "memory.swap.max": 0, "memory.limit_in_bytes": memory},
            "pids": {"pids.max": tasks},
        }

        self._folders: dict[str, Path] = {}
        for controller, limits in limits_by_controller.items():
            parent = _find_own_cgroup(controller)
            if parent is None:
                continue

            _remove_abandoned_cgroups(parent)
            if _create_cgroup(parent / name, limits):
                self._folders[controller] = parent / name

    def enter(self) -> None:
        """Move this process, with all processes that it will start, into the cgroup."""
        for controller, folder in list(self._folders.items()):
            try:
                (folder / "cgroup.procs").write_text("0")
            except OSError:
                del self._folders[controller]

    def has_exceeded_memory(self) -> bool:
        """Return whether the kernel has killed a process because the cgroup's memory was used up."""
        if "memory" not in self._folders:
            return False

        # Read the counters of both cgroup versions; only the files of the machine's version exist.
        counters: dict[str, int] = {}
        for counter_file in _OOM_COUNTERS:
            with contextlib.suppress(OSError, ValueError):
                for line in (self._folders["memory"] / counter_file).read_text().splitlines():
                    name, _, count = line.partition(" ")
                    counters[name] = int(count)
        with contextlib.suppress(OSError, ValueError):
            counters["oom"] = int((self._folders["memory"] / _FAILURE_COUNTER).read_text())

        # `oom_kill` also counts processes that were killed because the machine had no free memory. The cause
        # is the cgroup's own limit only if an allocation reached it (`oom`).
        return counters.get("oom_kill", 0) > 0 and counters.get("oom", 0) > 0

    def remove(self) -> None:
        """Remove the cgroup after its processes have ended; retry while the kernel releases the processes."""
        deadline = time.monotonic() + _REMOVAL_SECONDS
        for folder in set(self._folders.values()):
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(_RETRY_SECONDS)


def _remove_abandoned_cgroups(parent: Path) -> None:
    """Remove the cgroups in ``parent`` whose supervisor was killed before it could remove its cgroup.

    The name of a cgroup contains the process id of its supervisor.
    """
    for folder in parent.glob(f"{_NAME_PREFIX}*"):
        supervisor = folder.name.removeprefix(_NAME_PREFIX).split("_")[0]
        if not os.path.exists(f"/proc/{supervisor}"):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _create_cgroup(folder: Path, limits: Mapping[str, int]) -> bool:
    """Create a cgroup and set its limits; return whether the kernel accepts at least one of the limits.

    ``folder`` is the folder of the new cgroup in /sys/fs/cgroup. ``limits`` maps the name of a file in this
    folder, such as ``memory.max``, to the limit to write to it.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return False

    # The kernel creates the files of a cgroup. A file is absent if it belongs to the other cgroup version, or
    # if its controller is not enabled.
    num_limits = 0
    for limit_file, limit in limits.items():
        with contextlib.suppress(OSError), open(folder / limit_file, "r+") as stream:
            stream.write(str(limit))
            num_limits += 1

    if not num_limits:
        with contextlib.suppress(OSError):
            folder.rmdir()
    return num_limits > 0


def _find_own_cgroup(controller: str) -> Path | None:
    """Return the folder of this process's own cgroup in the hierarchy of a controller, such as memory.

    Returns None without this controller, and for a folder that this process cannot write to.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None

    # A line is hierarchy:controllers:path. cgroup v2 has a single hierarchy, whose line has no controllers.
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            # On machines with both versions, cgroup v2 is mounted in the folder `unified`.
            for root in (_ROOT, _ROOT / "unified"):
                folder = root / path.lstrip("/")
                if _enable_controller(folder, controller):
                    return folder if os.access(folder, os.W_OK) else None
        elif controller in controllers.split(","):
            folder = _ROOT / controller / path.lstrip("/")
            return folder if folder.is_dir() and os.access(folder, os.W_OK) else None
    return None


def _enable_controller(folder: Path, controller: str) -> bool:
    """Enable a controller, such as memory, for the children of a cgroup (only in cgroup v2).

    Returns whether the controller is available in the cgroup itself.
    """
    try:
        controllers = (folder / "cgroup.controllers").read_text().split()
    except OSError:
        return False
    if controller not in controllers:
        return False

    # The kernel refuses this if the cgroup contains processes itself.
    with contextlib.suppress(OSError):
        (folder / "cgroup.subtree_control").write_text(f"+{controller}")
    return True
