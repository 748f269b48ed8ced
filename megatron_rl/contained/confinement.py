"""Confine a process to what its work needs: limits, namespaces, a quiet environment.

Like the process that it serves it needs the standard library alone. The system calls are those of
Linux; what a kernel does not allow is reported, not assumed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import resource
import signal
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rl.redaction import is_secret

GIB = 2**30
TOO_MANY_PROCESSES, TOO_MUCH_MEMORY = 97, 98
"""Exit codes of a supervisor that ended its worker for going over a limit."""
LOOKS_SECONDS = 0.1
OTHER_TASKS = 1024
"""Threads and processes beyond the limit of processes at which the kernel itself refuses a further one."""
_more_processes = mmap.mmap(-1, 8)
"""What `allow_processes` was told last: a worker writes it, and its supervisor reads it."""
_OF_A_NAMESPACE = (6, 14)
"""The first Linux whose ``pid_max`` is a namespace's own; before it the number is that of the machine."""
SCRATCH = "/dev/shm"
"""Where a worker may write: a file system of its own, in memory, that goes with it."""

# From linux/sched.h, linux/mount.h and linux/prctl.h.
_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = (
    0x20000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_MS_NOSUID, _MS_NODEV, _MS_RECURSIVE, _MS_PRIVATE = 2, 4, 0x4000, 1 << 18
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_SET_INTERFACE_FLAGS, _INTERFACE_UP = 0x8914, 1  # linux/sockios.h, linux/if.h
_CAPSET_SYSCALL = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522


def quiet_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environment`` whose names do not look like secrets."""
    return {name: value for name, value in environment.items() if not is_secret(name)}


def set_limits(limits: Mapping[str, Any]) -> None:
    """Limit memory, open files and file sizes of this process and of all that it starts.

    ``limits`` may hold ``own_files``: by how many more than ``files`` `allow_files` may raise their limit.
    """
    for kind, value, more in (
        # Private writable memory: the address space alone says little of programs that map large files.
        (resource.RLIMIT_DATA, int(limits["memory_gib"] * GIB), 0),
        (resource.RLIMIT_NOFILE, int(limits["files"]), limits.get("own_files", 0)),
        (resource.RLIMIT_FSIZE, int(limits["file_gib"] * GIB), 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        _, hard = resource.getrlimit(kind)
        bounds = (value, value + more)
        if hard != resource.RLIM_INFINITY:
            bounds = (min(value, hard), min(value + more, hard))
        resource.setrlimit(kind, bounds)


def allow_files(count: int) -> None:
    """Let this process have ``count`` files open, as far as `set_limits` lets it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    bound = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (bound, hard))


def allow_processes(count: int) -> None:
    """Let this process have ``count`` processes more than limits allow, up to their ``own_processes``."""
    struct.pack_into("q", _more_processes, 0, count)


def allow_processor_seconds(seconds: float) -> None:
    """Let this process use ``seconds`` more of processor time; the kernel ends it after that."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(usage.ru_utime + usage.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def isolate(limits: Mapping[str, Any]) -> list[str]:
    """Move this process, and its next child as first process, into namespaces of their own.

    Returns what the kernel does not allow, in words; nothing is changed there. The file system is read-only
    but for `SCRATCH`, which holds as much as ``limits`` allow of memory, and there is no network, unless they
    grant ``write`` and ``network``; with ``loopback`` the processes may connect to each other.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = _NEW_PROCESSES | _NEW_IPC | (0 if limits["network"] else _NEW_NETWORK)
    spaces |= 0 if limits["write"] else _NEW_MOUNTS
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_USER | spaces) == 0:
        with contextlib.suppress(OSError):
            Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    elif libc.unshare(spaces) != 0:
        reason = os.strerror(ctypes.get_errno())
        wanted = ["children that leave their session are found by a search"]
        wanted += [] if limits["network"] else ["the network is reachable"]
        wanted += [] if limits["write"] else ["files can be written"]
        return [f"{what} (namespaces: {reason})" for what in wanted]
    if limits.get("loopback") and not limits["network"]:
        _raise_loopback()
    return [] if limits["write"] else _make_read_only(libc, limits)


def _raise_loopback() -> None:
    """Let the processes of a network of their own, which begins with nothing, speak with each other."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SET_INTERFACE_FLAGS, struct.pack("16sh", b"lo", _INTERFACE_UP))


def _make_read_only(libc: Any, limits: Mapping[str, Any]) -> list[str]:
    libc.mount(None, b"/", None, _MS_RECURSIVE | _MS_PRIVATE, None)
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    status = libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))
    )
    if status != 0:
        return [f"files can be written (mount_setattr: {os.strerror(ctypes.get_errno())})"]
    if os.path.isdir(SCRATCH):
        size = f"size={int(limits['memory_gib'] * GIB)}".encode()
        libc.mount(b"tmpfs", SCRATCH.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, size)
    return []


def enter(limits: Mapping[str, Any]) -> None:
    """Settle the child of an isolated process: its own /proc, its limits, and no capability to undo them.

    The first process of a namespace stays behind to wait for the others and ends them all with itself; it
    does not return. Signals that end any other process do not reach it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getpid() == 1:
        if libc.unshare(_NEW_MOUNTS) == 0:  # the supervisor goes on to see all processes
            libc.mount(None, b"/", None, _MS_RECURSIVE | _MS_PRIVATE, None)
            libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV, None)
            if _linux() >= _OF_A_NAMESPACE:
                with contextlib.suppress(OSError):
                    most = OTHER_TASKS + limits["processes"] + limits.get("own_processes", 0)
                    Path("/proc/sys/kernel/pid_max").write_text(str(most))
        worker = os.fork()
        if worker:
            os.closerange(0, 2)
            os._exit(_reap_until(worker))
    with contextlib.suppress(OSError):  # a machine without memory ends what is confined, and no rank
        Path("/proc/self/oom_score_adj").write_text("1000")
    set_limits(limits)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    number = _CAPSET_SYSCALL.get(os.uname().machine)
    if number is not None:
        header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
        libc.syscall(number, header, bytes(24))
    if not limits["write"] and os.access(SCRATCH, os.W_OK):
        os.environ["TMPDIR"] = SCRATCH


def _linux() -> tuple[int, ...]:
    """Return the first two numbers of the kernel's version."""
    return tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])


def limit_of(status: int, limits: Mapping[str, Any], where: str) -> str | None:
    """Return which of the ``limits``, set at ``where``, a process that ended with ``status`` went over."""
    if status == TOO_MANY_PROCESSES:
        return f"started more than {limits['processes']} processes ({where}.processes)"
    if status == TOO_MUCH_MEMORY:
        return f"held more than {limits['memory_gib']:g} GiB in all ({where}.memory_gib)"
    if status == 128 + signal.SIGXCPU and "cpu_seconds" in limits:
        return f"used more than {limits['cpu_seconds']:g} s of processor ({where}.cpu_seconds)"
    return None


def _reap_until(worker: int) -> int:
    """Wait for children until ``worker`` ends; return an exit code that says how it did."""
    while True:
        process, status = os.wait()
        if process == worker:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def supervise(worker: int, trainer: int, limits: Mapping[str, Any]) -> int:
    """Wait for ``worker``, end it and its descendants when it is time, and return the exit code for that.

    It is time when the process ``trainer`` is gone, when this process is asked to end, and when the
    descendants are more, or hold more memory, than ``limits`` allow.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with contextlib.suppress(OSError):  # it must get to look, however many processes want the processor
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    code: int | None = None
    while code is None:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == worker:
            code = os.waitstatus_to_exitcode(status)
        elif asked or os.getppid() != trainer:
            code = 0
        elif ended == 0:
            code = _over_limit(worker, limits)
            if code is None:
                time.sleep(LOOKS_SECONDS)
    _end(worker)
    return code if code >= 0 else 128 - code


def _over_limit(worker: int, limits: Mapping[str, Any]) -> int | None:
    (more,) = struct.unpack_from("q", _more_processes)
    most = limits["processes"] + min(more, limits.get("own_processes", 0)) + 2  # two are ours
    # Processes may come faster than they can be listed.
    family = [worker, *islice(_descendants(worker), most)]
    if len(family) > most:
        return TOO_MANY_PROCESSES
    if len(family) > 2:  # the limit of one process is the kernel's to keep
        resident = sum(_resident_bytes(process) for process in family)
        if resident > limits["memory_gib"] * GIB:
            return TOO_MUCH_MEMORY
    return None


def _end(worker: int) -> None:
    """Kill the worker and every descendant, also those that left its session."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)  # as first process of a namespace it takes all others along
    end_descendants()


def end_descendants() -> None:
    """Kill what this process started and all that came of it; it must be a subreaper for the last of them."""
    while True:
        for process in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def end_started_with(entry: str) -> None:
    """Kill each process that began with the ``entry``, as NAME=value, in its environment."""
    ended: set[int] = set()
    while living := set(_started_with(entry.encode())) - ended:  # they may have started others meanwhile
        for process in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        ended |= living


def _started_with(entry: bytes) -> Iterator[int]:
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if entry in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                yield int(process)


def _descendants(process: int) -> Iterator[int]:
    """Yield the descendants of a process; those whose parents ended are its own children by then."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            for child in Path(f"/proc/{process}/task/{task}/children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _resident_bytes(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0
