"""Confine a process to what is allowed: a user, a root, namespaces, limits and system calls of its own.

Like the process that it serves it needs the standard library alone. What a kernel does not allow is reported
by name, never assumed, and the next best takes its place: Landlock for a root of its own, a filter of system
calls for a network of its own, a supervisor that looks for a control group.

bubblewrap, nsjail and Firejail build such roots too, from the same namespaces. They are not used: each needs
what is needed here (they are refused where namespaces are, in most containers), none is on a node that nobody
prepared, none counts memory over processes, and a second way to the same end would be tested half as well.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import resource
import signal
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rl.contained import filters, kernel
from megatron_rl.contained.control_group import ROOM, ControlGroup
from megatron_rl.contained.new_root import Owner, Unreadable, change_root, new_scratch
from megatron_rl.contained.visible import DEVICES, NETWORK_SETTINGS, SETTINGS, SYSTEM, Visible

GIB = 2**30
SCRATCH = "/dev/shm"
"""Where temporary files in memory are mounted without a root of its own."""
TOO_MANY_PROCESSES, TOO_MUCH_MEMORY = 97, 98
"""Exit codes of a supervisor that ended its worker for going over a limit."""
LOOKS_SECONDS = 0.1
SHARED_LOOKS = 5
"""Looks from one at what a family maps and shares, which takes longer, to the next."""
OTHER_TASKS = 1024
"""Threads and processes beyond the limit of processes at which the kernel itself refuses a further one."""
_more_processes = mmap.mmap(-1, 8)
"""What `allow_processes` was told last: a worker writes it, and its supervisor reads it."""
_OF_A_NAMESPACE = (6, 14)
"""The first Linux whose ``pid_max`` is a namespace's own; before it the number is that of the machine."""
_TASKS_OF_A_NAMESPACE = (5, 14)
"""The first Linux that counts the tasks of a user (RLIMIT_NPROC) in each user namespace by itself."""

# What may not hold on a kernel, in the words of the warnings of `check` and `train`; docs/limits.md has a
# table of them.
CHILDREN_SEARCHED = "children that leave their session are found by a search"
NETWORK_REACHABLE = "the network is reachable"
NO_ROOT = "it has no root of its own"
FILES_READABLE = "all files of its user can be read"
FILES_WRITABLE = "files can be written"
HIDDEN_READABLE = "hidden files in the folders of its code can be read"
NAMES_VISIBLE = "names and sizes of files, and processes, can be seen"
TEMPORARY_UNBOUNDED = "temporary files are bounded one by one, not in all"
PROCESSES_VISIBLE = "processes of the machine can be seen"
PROCESSES_SIGNALLED = "other processes of its user can be signalled"
SAME_USER = "it runs as the user of the run, {name}"
CALLS_UNFILTERED = "system calls are not filtered, and some memory is not counted"

_UNUSED_USERS = range(0x70000000, 0x70100000)
"""Numbers that no distribution gives to a user (systemd.io/UIDS-GIDS): of these each process has its own."""
_SET_INTERFACE_FLAGS, _INTERFACE_UP = 0x8914, 1  # linux/sockios.h, linux/if.h


@dataclass
class Isolation:
    """What `isolate` has prepared for the process that `enter` confines.

    ``namespaces`` says whether the process is the first of its own, ``owner`` who it will be, ``scratch`` is
    the descriptor of its temporary files in memory, ``folder`` stands in for them on disk, and ``missing`` is
    what the kernel does not allow, in words.
    """

    visible: Visible
    owner: Owner
    namespaces: bool = False
    scratch: int | None = None
    folder: str | None = None
    group: ControlGroup | None = None
    missing: list[str] = field(default_factory=list)


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
        (resource.RLIMIT_MSGQUEUE, 0, 0),
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


def isolate(limits: Mapping[str, Any], visible: Visible) -> Isolation:
    """Move this process, and its next child as first process, into namespaces of their own.

    There is no network unless ``limits`` grant it; with ``loopback`` the processes may connect to each other.
    """
    isolation = Isolation(visible, Owner(os.getuid(), os.getgid()))
    tasks = _most_tasks(limits)
    isolation.group = ControlGroup(int(limits["memory_gib"] * GIB) + ROOM, tasks)
    spaces = kernel.NEW_PROCESSES | kernel.NEW_IPC | kernel.NEW_HOST_NAME
    spaces |= 0 if limits["network"] else kernel.NEW_NETWORK
    try:
        isolation.owner = _unshare(spaces)
        isolation.namespaces = True
    except OSError as error:
        isolation.missing.append(f"{CHILDREN_SEARCHED} (namespaces: {error.strerror})")
        isolation.folder = _temporary_folder()
        return isolation
    if limits.get("loopback") and not limits["network"]:
        _raise_loopback()
    with contextlib.suppress(OSError):  # `enter` says what is missing without
        kernel.unshare(kernel.NEW_MOUNTS)
        kernel.make_mounts_private()
        isolation.scratch = new_scratch(int(limits["memory_gib"] * GIB))
    if isolation.scratch is None:
        isolation.folder = _temporary_folder()
    return isolation


def _temporary_folder() -> str:
    """Return a new folder on disk for temporary files."""
    import tempfile  # a third of the time that this module takes to be imported, and seldom needed

    return tempfile.mkdtemp(prefix="megatron_rl_")


def _most_tasks(limits: Mapping[str, Any]) -> int:
    return int(OTHER_TASKS + limits["processes"] + limits.get("own_processes", 0))


def _unshare(spaces: int) -> Owner:
    """Leave the namespaces, by a user namespace where need be; return who contained code is to be."""
    user, group = os.getuid(), os.getgid()
    if user == 0:
        # A process that is forked later is the first of the new namespace, which ends with it.
        unprivileged = _unprivileged()
        with contextlib.suppress(PermissionError):
            kernel.unshare(spaces)
            return unprivileged or Owner(user, group)
        if unprivileged is not None:
            _close_namespace(unprivileged)
    kernel.unshare(kernel.NEW_USER | spaces)
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return Owner(user, group)


def _unprivileged() -> Owner | None:
    """Return a user that nobody else is, None where this user namespace has none."""
    user = _unused(Path("/proc/self/uid_map"))
    group = _unused(Path("/proc/self/gid_map"))
    if user is None or group is None:
        return None
    with contextlib.suppress(OSError):
        return Owner(user, group, _namespace_of(user, group))
    return Owner(user, group)


def _unused(file: Path) -> int | None:
    """Return a number of a user or group that a mapping holds, another one for each process."""
    ranges = []
    for line in file.read_text().splitlines():
        first, _, count = map(int, line.split())
        ranges.append(range(first, first + count))
    number = _UNUSED_USERS[os.getpid() % len(_UNUSED_USERS)]
    if any(number in numbers for numbers in ranges):
        return number
    # A container's mapping, usually of 65536 numbers: those of its upper half are rarely in use.
    largest = max(ranges, key=len)
    upper = largest[len(largest) // 2 :]
    return upper[os.getpid() % len(upper)] if len(largest) >= 1000 else None


def _namespace_of(user: int, group: int) -> int:
    """Return the descriptor of a user namespace in which a user stands for the one of this process."""
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            kernel.unshare(kernel.NEW_USER)
        os.write(ready[1], b".")
        os.close(done[1])
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        Path(f"/proc/{child}/uid_map").write_text(f"{os.getuid()} {user} 1")
        Path(f"/proc/{child}/gid_map").write_text(f"{os.getgid()} {group} 1")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for descriptor in (*ready, *done):
            os.close(descriptor)
        os.waitpid(child, 0)


def _close_namespace(owner: Owner) -> None:
    """Close the descriptor of an owner's user namespace: no contained code may have it."""
    if owner.namespace is not None:
        os.close(owner.namespace)


def _raise_loopback() -> None:
    """Let the processes of a network of their own, which begins with nothing, speak with each other."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SET_INTERFACE_FLAGS, struct.pack("16sh", b"lo", _INTERFACE_UP))


def enter(limits: Mapping[str, Any], isolation: Isolation) -> list[str]:
    """Confine the child of an isolated process; return what the kernel does not allow, in words.

    The first process of a namespace stays behind to wait for the others and ends them all with itself; it
    does not return. Signals that end any other process do not reach it.
    """
    kernel.process_control(kernel.SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    with contextlib.suppress(OSError):  # a machine without memory ends what is confined, and no rank
        Path("/proc/self/oom_score_adj").write_text("1000")
    if isolation.group is not None:
        isolation.group.enter()

    has_root = _enter_root(limits, isolation)
    if isolation.namespaces:
        worker = os.fork()
        if worker:
            os.closerange(0, 64)
            _become(isolation.owner)
            os._exit(_reap_until(worker))

    set_limits(limits)
    _limit_tasks(limits, isolation)
    if isolation.scratch is not None:
        os.close(isolation.scratch)
    _close_namespace(isolation.owner)
    _become(isolation.owner)
    # Both are lost with a change of the user.
    kernel.process_control(kernel.SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    kernel.process_control(kernel.SET_DUMPABLE, 1)
    if os.getuid() == 0:
        isolation.missing.append(SAME_USER.format(name="root"))

    os.environ["TMPDIR"] = "/tmp" if has_root else isolation.folder or "/tmp"
    scoped = _restrict(limits, isolation, has_root)
    _filter(limits, isolation, has_root, scoped)
    return isolation.missing


def _enter_root(limits: Mapping[str, Any], isolation: Isolation) -> bool:
    """Change the root; return whether that could be."""
    if isolation.scratch is None:
        return False
    kernel_limits = {}
    if _linux() >= _OF_A_NAMESPACE:
        kernel_limits["/proc/sys/kernel/pid_max"] = str(_most_tasks(limits))
    arguments = isolation.visible, isolation.scratch
    network = bool(limits["network"])
    try:
        kernel.unshare(kernel.NEW_MOUNTS)  # the supervisor goes on to see all processes
        try:
            reason = change_root(*arguments, isolation.owner, kernel_limits, network=network)
        except Unreadable as unreadable:
            _stay(isolation)
            isolation.missing.append(f"{SAME_USER.format(name='root')}, who alone may use {unreadable}")
            reason = change_root(*arguments, isolation.owner, kernel_limits, network=network)
    except OSError as error:
        # Nothing of the user's may be in reach of another user without a root of its own.
        _stay(isolation)
        isolation.missing.append(f"{NO_ROOT} (mount: {error.strerror})")
        with contextlib.suppress(OSError):
            kernel.attach(isolation.scratch, SCRATCH)
            isolation.folder = SCRATCH
        return False
    if reason is not None:
        isolation.missing.append(f"{PROCESSES_VISIBLE} (proc: {reason})")
    return True


def _stay(isolation: Isolation) -> None:
    """Have contained code be the user of this process."""
    _close_namespace(isolation.owner)
    isolation.owner = Owner(os.getuid(), os.getgid())


def _become(owner: Owner) -> None:
    """Be the owner for good, without a capability."""
    kernel.drop_bounding_set()
    if owner.user != os.getuid():
        os.setgroups([])
        os.setresgid(owner.group, owner.group, owner.group)
        os.setresuid(owner.user, owner.user, owner.user)
    kernel.drop_capabilities()


def _limit_tasks(limits: Mapping[str, Any], isolation: Isolation) -> None:
    """Have the kernel refuse further tasks, where it counts those of this process's user separately."""
    alone = isolation.owner.user != os.getuid()
    if alone or (isolation.namespaces and _linux() >= _TASKS_OF_A_NAMESPACE):
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        most = _most_tasks(limits)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (bound, bound))


def _restrict(limits: Mapping[str, Any], isolation: Isolation, has_root: bool) -> bool:
    """Restrict paths where there is no root, signals and abstract sockets; return whether the latter are."""
    if has_root:
        return filters.restrict_scope()
    visible = isolation.visible
    names = (*SETTINGS, *NETWORK_SETTINGS) if limits["network"] else SETTINGS
    own = (*visible.folders, *visible.read)
    settings = (f"/etc/{name}" for name in (*names, "passwd", "group"))
    readable = ["/proc", *SYSTEM, *settings, *visible.packages, *own]
    writable = [f"/dev/{name}" for name in DEVICES]
    writable += [isolation.folder] if isolation.folder else []
    writable += own if visible.writable else ()
    try:
        filters.restrict_paths(readable, writable)
    except OSError as error:
        reason = f"(no root of its own; Landlock: {error.strerror})"
        isolation.missing += [f"{FILES_READABLE} {reason}"]
        isolation.missing += [] if limits["write"] else [f"{FILES_WRITABLE} {reason}"]
        isolation.missing += [] if isolation.namespaces else [f"{PROCESSES_SIGNALLED} {reason}"]
        return False
    unbounded = () if isolation.folder == SCRATCH else (TEMPORARY_UNBOUNDED,)
    for words in (HIDDEN_READABLE, NAMES_VISIBLE, *unbounded):
        isolation.missing.append(f"{words} (Landlock in place of a root)")
    scoped = filters.landlock_version() >= filters.SCOPES_SINCE
    if not scoped and not isolation.namespaces:
        isolation.missing.append(f"{PROCESSES_SIGNALLED} (no namespaces; Landlock before its version 6)")
    return scoped


def _filter(limits: Mapping[str, Any], isolation: Isolation, has_root: bool, scoped: bool) -> None:
    """Filter system calls, and sockets of families by which others could be reached."""
    own_network = isolation.namespaces and not limits["network"]
    network = bool(limits["network"] or limits.get("loopback") or own_network)
    # Sockets with a name of no file belong to a network; those of files to a root.
    local = has_root and (own_network or scoped)
    refusal = errno.EAFNOSUPPORT if limits["network"] or own_network else errno.ENETUNREACH
    try:
        filters.filter_system_calls(filters.families_of(network=network, local=local), refusal)
    except OSError as error:
        isolation.missing.append(f"{CALLS_UNFILTERED} (seccomp: {error.strerror})")
        network = True
    if network and not (limits["network"] or own_network):
        isolation.missing.append(f"{NETWORK_REACHABLE} (no namespaces)")


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


def supervise(worker: int, trainer: int, limits: Mapping[str, Any], isolation: Isolation) -> int:
    """Wait for ``worker``, end it and its descendants when it is time, and return the exit code for that.

    It is time when the process ``trainer`` is gone, when this process is asked to end, and when the
    descendants are more, or hold more memory, than ``limits`` allow.
    """
    kernel.process_control(kernel.SET_CHILD_SUBREAPER, 1)
    with contextlib.suppress(OSError):  # it must get to look, however many processes want the processor
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    looks = 0
    code: int | None = None
    while code is None:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == worker:
            code = os.waitstatus_to_exitcode(status)
        elif asked or os.getppid() != trainer:
            code = 0
        elif ended == 0:
            looks += 1
            code = _over_limit(worker, limits, isolation.scratch, looks % SHARED_LOOKS == 0)
            if code is None:
                time.sleep(LOOKS_SECONDS)
    _end(worker)
    if isolation.folder is not None:
        import shutil

        shutil.rmtree(isolation.folder, ignore_errors=True)
    if isolation.group is not None:
        if code and isolation.group.went_over_memory():
            code = TOO_MUCH_MEMORY
        isolation.group.remove()
    return code if code >= 0 else 128 - code


def _over_limit(worker: int, limits: Mapping[str, Any], scratch: int | None, thorough: bool) -> int | None:
    """Return the exit code of the limit that a family is over; ``thorough`` counts shared mappings, too."""
    (more,) = struct.unpack_from("q", _more_processes)
    most = limits["processes"] + min(more, limits.get("own_processes", 0)) + 2  # two are ours
    # Processes may come faster than they can be listed.
    family = [worker, *islice(_descendants(worker), most)]
    if len(family) > most or sum(map(_tasks, family)) > _most_tasks(limits):
        return TOO_MANY_PROCESSES
    shared = _bytes_in_files(scratch) + (_shared_bytes(family) if thorough else 0)
    if len(family) > 2 or shared:  # the kernel limits the private memory of one process
        private = sum(_private_bytes(process) for process in family)
        if private + shared > limits["memory_gib"] * GIB:
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


def _tasks(process: int) -> int:
    """Return the number of threads of a process."""
    try:
        return os.stat(f"/proc/{process}/task").st_nlink - 2
    except OSError:
        return 0


def _private_bytes(process: int) -> int:
    """Return the resident memory of a process that it shares with no file and no other process."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
    except (OSError, ValueError):
        return 0
    return (resident - shared) * resource.getpagesize()


def _bytes_in_files(scratch: int | None) -> int:
    """Return the memory of temporary files, also of those without a name."""
    if scratch is None:
        return 0
    size = os.fstatvfs(scratch)
    return (size.f_blocks - size.f_bfree) * size.f_frsize


def _shared_bytes(family: Iterable[int]) -> int:
    """Return the size of what processes map and share without a file: what they touched of it is not told."""
    ends: dict[str, int] = {}
    for process in family:
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps") as maps:
            for line in maps:
                if "/dev/zero (deleted)" in line:
                    addresses, _, offset, _, inode, *_ = line.split()
                    first, last = (int(address, 16) for address in addresses.split("-"))
                    ends[inode] = max(ends.get(inode, 0), int(offset, 16) + last - first)
    return sum(ends.values())
