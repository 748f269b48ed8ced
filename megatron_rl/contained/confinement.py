"""Confinement of a process: its own user, root and namespaces, limits, and a filter of system calls.

Like `megatron_rl.contained.process` this module imports only the standard library. A protection that the
kernel does not allow is reported by name, and replaced by the next best one: a new root by Landlock, a
network namespace by a filter of system calls, a control group by the measurements of the supervisor.

bubblewrap, nsjail and Firejail build such roots from the same namespaces. They are not used: each needs the
same permissions as this module (they fail if namespaces are refused, as in most containers), none is
installed on an unprepared node, none counts memory over processes, and two implementations would each be
tested half as well.
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
from megatron_rl.contained.control_group import GROUP_MARGIN, ControlGroup
from megatron_rl.contained.new_root import Owner, Unreadable, change_root, new_scratch
from megatron_rl.contained.visible import DEVICES, NETWORK_SETTINGS, SETTINGS, SYSTEM, Visible

GIB = 2**30
SCRATCH = "/dev/shm"
"""Mount point of the file system in memory for temporary files, for a process without its own root."""
TOO_MANY_PROCESSES = 97
"""Exit code of a supervisor that ended its worker for having too many processes or threads."""
TOO_MUCH_MEMORY = 98
"""Exit code of a supervisor that ended its worker for using too much memory."""
CHECK_SECONDS = 0.1
"""Seconds between two measurements of a worker and its descendants."""
SHARED_MEMORY_CHECKS = 5
"""One of this many measurements includes shared mappings, which takes longer."""
OTHER_TASKS = 1024
"""Number of threads and processes, in addition to the limit of processes, that the kernel allows."""
_extra_processes = mmap.mmap(-1, 8)
"""The count of `allow_processes`, in memory that is shared by a worker and its supervisor."""
_PID_MAX_OF_NAMESPACE = (6, 14)
"""The first version of Linux in which ``pid_max`` belongs to a namespace, not to the machine."""
_TASKS_OF_NAMESPACE = (5, 14)
"""The first version of Linux that counts a user's tasks (RLIMIT_NPROC) in each user namespace separately."""
_FILE_DESCRIPTORS = 64
"""Number of descriptors that the first process of a namespace closes, more than it inherits."""

# Protections that a kernel may not enforce, as in warnings of `check` and `train`; docs/limits.md lists them.
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
"""User numbers that no distribution assigns (systemd.io/UIDS-GIDS); each contained process has its own."""
_LARGE_MAPPING = 1000
"""Smallest size of a user namespace whose mapping has unused user numbers, such as a container's."""

# Setting an interface up, from linux/sockios.h and linux/if.h.
_SET_INTERFACE_FLAGS = 0x8914
_INTERFACE_UP = 1


@dataclass
class Isolation:
    """Namespaces, limits and folders that `isolate` prepares for the process that `enter` confines."""

    visible: Visible
    owner: Owner
    """User and group that contained code will run as."""
    namespaces: bool = False
    """Whether the process will be the first process of new namespaces."""
    scratch: int | None = None
    """Descriptor of the file system in memory for temporary files, or None if there is none."""
    folder: str | None = None
    """Folder for temporary files if there is no ``scratch``."""
    group: ControlGroup | None = None
    """Control group with the limits of memory and tasks."""
    unenforced: list[str] = field(default_factory=list)
    """Protections that the kernel does not allow, for warnings."""


# --- Limits of one process


def set_limits(limits: Mapping[str, Any]) -> None:
    """Limit memory, open files and file sizes of this process and of all processes that it starts.

    With ``own_files`` in ``limits``, `allow_files` may later exceed ``files`` by that many files.
    """
    files = int(limits["files"])
    max_files = files + limits.get("own_files", 0)
    # Limit private writable memory, not address space: programs that map large files need more of the latter.
    memory = int(limits["memory_gib"] * GIB)
    file_size = int(limits["file_gib"] * GIB)

    for kind, soft, hard in (
        (resource.RLIMIT_DATA, memory, memory),
        (resource.RLIMIT_NOFILE, files, max_files),
        (resource.RLIMIT_FSIZE, file_size, file_size),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        _, present_hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (_at_most(soft, present_hard), _at_most(hard, present_hard)))


def allow_files(count: int) -> None:
    """Raise this process's limit of open files to ``count``, as far as `set_limits` permits."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_at_most(count, hard), hard))


def allow_processes(count: int) -> None:
    """Set by how many processes contained code may exceed its limit: ``count``, at most ``own_processes``."""
    struct.pack_into("q", _extra_processes, 0, count)


def allow_processor_seconds(seconds: float) -> None:
    """Allow this process ``seconds`` more seconds of CPU time, after which the kernel ends it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(usage.ru_utime + usage.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _at_most(value: int, hard: int) -> int:
    """Return ``value``, or the hard limit if that is lower; RLIM_INFINITY means no limit."""
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def exceeded_limit(
    status: int,
    limits: Mapping[str, Any],
    key: str,
) -> str | None:
    """Return the limit below ``key`` that a process with the exit ``status`` exceeded, or None."""
    if status == TOO_MANY_PROCESSES:
        return f"started more than {limits['processes']} processes ({key}.processes)"
    if status == TOO_MUCH_MEMORY:
        return f"held more than {limits['memory_gib']:g} GiB in all ({key}.memory_gib)"
    if status == 128 + signal.SIGXCPU and "cpu_seconds" in limits:
        return f"used more than {limits['cpu_seconds']:g} s of processor ({key}.cpu_seconds)"
    return None


# --- Namespaces, before the worker is forked


def isolate(limits: Mapping[str, Any], visible: Visible) -> Isolation:
    """Move this process into new namespaces; its next child will be their first process.

    The namespaces have no network unless ``limits`` allow it. With ``loopback`` in ``limits``, processes
    inside may connect to each other.
    """
    isolation = Isolation(visible, Owner(os.getuid(), os.getgid()))
    memory = int(limits["memory_gib"] * GIB)
    isolation.group = ControlGroup(memory + GROUP_MARGIN, _task_limit(limits))

    spaces = kernel.NEW_PROCESSES | kernel.NEW_IPC | kernel.NEW_HOST_NAME
    if not limits["network"]:
        spaces |= kernel.NEW_NETWORK
    try:
        isolation.owner = _unshare(spaces)
        isolation.namespaces = True
    except OSError as error:
        isolation.unenforced.append(f"{CHILDREN_SEARCHED} (namespaces: {error.strerror})")
        isolation.folder = _temporary_folder()
        return isolation

    if limits.get("loopback") and not limits["network"]:
        _raise_loopback()
    # `enter` reports the protections that need a mount namespace.
    with contextlib.suppress(OSError):
        kernel.unshare(kernel.NEW_MOUNTS)
        kernel.make_mounts_private()
        isolation.scratch = new_scratch(memory)
    if isolation.scratch is None:
        isolation.folder = _temporary_folder()
    return isolation


def _temporary_folder() -> str:
    """Create a folder on disk for temporary files, and return its path."""
    # Imported here because it takes a third of this module's import time and is seldom needed.
    import tempfile

    return tempfile.mkdtemp(prefix="megatron_rl_")


def _task_limit(limits: Mapping[str, Any]) -> int:
    """Return the limit of the number of threads and processes of contained code together."""
    return int(OTHER_TASKS + limits["processes"] + limits.get("own_processes", 0))


def _unshare(spaces: int) -> Owner:
    """Create the namespaces, in a user namespace if that is needed; return the owner of contained code."""
    user = os.getuid()
    group = os.getgid()
    if user == 0:
        # Root needs no user namespace. The helper process of `_mapped_namespace` must be forked before: the
        # next process that is forked afterwards is the first of the new namespace, which ends with it.
        unprivileged = _unprivileged_owner()
        with contextlib.suppress(PermissionError):
            kernel.unshare(spaces)
            return unprivileged or Owner(user, group)

        if unprivileged is not None:
            _close_namespace(unprivileged)

    kernel.unshare(kernel.NEW_USER | spaces)
    # Without privileges a process must give up setgroups before it may map a group.
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return Owner(user, group)


def _unprivileged_owner() -> Owner | None:
    """Return an owner that no other process has, or None if this user namespace has no unused numbers."""
    user = _unused_number(Path("/proc/self/uid_map"))
    group = _unused_number(Path("/proc/self/gid_map"))
    if user is None or group is None:
        return None
    with contextlib.suppress(OSError):
        return Owner(user, group, _mapped_namespace(user, group))
    return Owner(user, group)


def _unused_number(file: Path) -> int | None:
    """Return an unused number of a user or group in the mapping of ``file``, or None if all may be in use.

    Each process gets a different number.
    """
    ranges = []
    for line in file.read_text().splitlines():
        first, _, count = map(int, line.split())
        ranges.append(range(first, first + count))
    number = _UNUSED_USERS[os.getpid() % len(_UNUSED_USERS)]
    if any(number in numbers for numbers in ranges):
        return number

    # A container's mapping usually has 65536 numbers, of which the upper half is rarely in use.
    numbers = max(ranges, key=len)
    if len(numbers) < _LARGE_MAPPING:
        return None
    upper_half = numbers[len(numbers) // 2 :]
    return upper_half[os.getpid() % len(upper_half)]


def _mapped_namespace(user: int, group: int) -> int:
    """Return the descriptor of a user namespace that maps this process's user to ``user``.

    A namespace exists while a process is in it or a descriptor refers to it: a helper process creates it, and
    this process opens it.
    """
    ready_read, ready_write = os.pipe()
    done_read, done_write = os.pipe()

    helper = os.fork()
    if helper == 0:
        with contextlib.suppress(OSError):
            kernel.unshare(kernel.NEW_USER)
        os.write(ready_write, b".")
        os.close(done_write)
        os.read(done_read, 1)
        os._exit(0)

    try:
        os.read(ready_read, 1)
        Path(f"/proc/{helper}/uid_map").write_text(f"{os.getuid()} {user} 1")
        Path(f"/proc/{helper}/gid_map").write_text(f"{os.getgid()} {group} 1")
        return os.open(f"/proc/{helper}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for descriptor in (ready_read, ready_write, done_read, done_write):
            os.close(descriptor)
        os.waitpid(helper, 0)


def _close_namespace(owner: Owner) -> None:
    """Close the descriptor of an owner's user namespace, which contained code must not have."""
    if owner.namespace is not None:
        os.close(owner.namespace)


def _raise_loopback() -> None:
    """Bring up the loopback interface: all interfaces of a new network namespace are down."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SET_INTERFACE_FLAGS, struct.pack("16sh", b"lo", _INTERFACE_UP))


# --- The worker


def enter(limits: Mapping[str, Any], isolation: Isolation) -> list[str]:
    """Confine the child of an isolated process; return the protections that the kernel does not allow.

    The first process of a namespace forks the worker and does not return: it waits for the other processes,
    and its exit ends all of them. It is not ended by signals that end other processes.
    """
    kernel.process_control(kernel.SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    # A machine that runs out of memory should end this process, not a rank.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if isolation.group is not None:
        isolation.group.enter()

    has_root = _enter_root(limits, isolation)
    if isolation.namespaces:
        worker = os.fork()
        if worker:
            os.closerange(0, _FILE_DESCRIPTORS)
            _switch_user(isolation.owner)
            os._exit(_reap_until(worker))

    # Set limits first: this needs the privileges that the worker drops next.
    set_limits(limits)
    _limit_tasks(limits, isolation)
    if isolation.scratch is not None:
        os.close(isolation.scratch)
    _close_namespace(isolation.owner)
    _switch_user(isolation.owner)
    # Set these two again, since a change of the user resets them.
    kernel.process_control(kernel.SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    kernel.process_control(kernel.SET_DUMPABLE, 1)
    if os.getuid() == 0:
        isolation.unenforced.append(SAME_USER.format(name="root"))

    # The filter of system calls comes last: the steps before it need calls that it refuses.
    os.environ["TMPDIR"] = "/tmp" if has_root else isolation.folder or "/tmp"
    is_scoped = _restrict(limits, isolation, has_root)
    _filter_system_calls(limits, isolation, has_root, is_scoped)
    return isolation.unenforced


def _enter_root(limits: Mapping[str, Any], isolation: Isolation) -> bool:
    """Change the root to one with only the visible paths; return whether the kernel allowed it."""
    scratch = isolation.scratch
    if scratch is None:
        return False
    kernel_limits = {}
    if _linux_version() >= _PID_MAX_OF_NAMESPACE:
        kernel_limits["/proc/sys/kernel/pid_max"] = str(_task_limit(limits))
    network = bool(limits["network"])

    try:
        # Use another mount namespace, since the supervisor must still find all processes in its /proc.
        kernel.unshare(kernel.NEW_MOUNTS)
        try:
            reason = change_root(isolation.visible, scratch, isolation.owner, kernel_limits, network=network)
        except Unreadable as unreadable:
            _run_as_own_user(isolation)
            same_user = SAME_USER.format(name="root")
            isolation.unenforced.append(f"{same_user}, since only root may use {unreadable}")
            reason = change_root(isolation.visible, scratch, isolation.owner, kernel_limits, network=network)
    except OSError as error:
        # Without a new root, another user could lack permission for files that the code needs.
        _run_as_own_user(isolation)
        isolation.unenforced.append(f"{NO_ROOT} (mount: {error.strerror})")
        with contextlib.suppress(OSError):
            kernel.attach(os.dup(scratch), SCRATCH)
            isolation.folder = SCRATCH
        return False

    if reason is not None:
        isolation.unenforced.append(f"{PROCESSES_VISIBLE} (proc: {reason})")
    return True


def _run_as_own_user(isolation: Isolation) -> None:
    """Record that contained code will run as this process's own user, instead of as a separate one."""
    _close_namespace(isolation.owner)
    isolation.owner = Owner(os.getuid(), os.getgid())


def _switch_user(owner: Owner) -> None:
    """Switch this process irreversibly to the owner's user, without capabilities."""
    kernel.drop_bounding_set()
    if owner.user != os.getuid():
        os.setgroups([])
        os.setresgid(owner.group, owner.group, owner.group)
        os.setresuid(owner.user, owner.user, owner.user)
    kernel.drop_capabilities()


def _limit_tasks(limits: Mapping[str, Any], isolation: Isolation) -> None:
    """Limit threads and processes, if the kernel counts the tasks of contained code separately.

    Otherwise the limit would apply to all tasks of the trainer's user.
    """
    is_other_user = isolation.owner.user != os.getuid()
    if is_other_user or (isolation.namespaces and _linux_version() >= _TASKS_OF_NAMESPACE):
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        bound = _at_most(_task_limit(limits), hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (bound, bound))


def _restrict(
    limits: Mapping[str, Any],
    isolation: Isolation,
    has_root: bool,
) -> bool:
    """Restrict signals, abstract sockets and, without a root directory of its own, files with Landlock.

    Returns whether abstract sockets and signals are restricted.
    """
    if has_root:
        return filters.restrict_scope()

    # Allow the same paths that a new root would contain.
    visible = isolation.visible
    names = (*SETTINGS, *NETWORK_SETTINGS) if limits["network"] else SETTINGS
    settings = (f"/etc/{name}" for name in (*names, "passwd", "group"))
    user_paths = (*visible.folders, *visible.read)
    readable = ["/proc", *SYSTEM, *settings, *visible.packages, *user_paths]
    writable = [f"/dev/{name}" for name in DEVICES]
    if isolation.folder:
        writable.append(isolation.folder)
    if visible.writable:
        writable += user_paths

    unenforced = isolation.unenforced
    try:
        filters.restrict_paths(readable, writable)
    except OSError as error:
        reason = f"(no root of its own; Landlock: {error.strerror})"
        unenforced.append(f"{FILES_READABLE} {reason}")
        if not limits["write"]:
            unenforced.append(f"{FILES_WRITABLE} {reason}")
        if not isolation.namespaces:
            unenforced.append(f"{PROCESSES_SIGNALLED} {reason}")
        return False

    # Landlock grants access to complete folders, and does not hide names.
    unenforced.append(f"{HIDDEN_READABLE} (Landlock in place of a root)")
    unenforced.append(f"{NAMES_VISIBLE} (Landlock in place of a root)")
    if isolation.folder != SCRATCH:
        unenforced.append(f"{TEMPORARY_UNBOUNDED} (Landlock in place of a root)")
    is_scoped = filters.landlock_version() >= filters.SCOPES_SINCE
    if not is_scoped and not isolation.namespaces:
        unenforced.append(f"{PROCESSES_SIGNALLED} (no namespaces; Landlock before its version 6)")
    return is_scoped


def _filter_system_calls(
    limits: Mapping[str, Any],
    isolation: Isolation,
    has_root: bool,
    is_scoped: bool,
) -> None:
    """Forbid system calls and sockets with which the process could reach programs outside of its confinement.

    ``has_root``: whether the process has its own root directory. ``is_scoped``: whether Landlock restricts
    abstract sockets. Protections that the kernel does not allow are added to ``isolation.unenforced``.
    """
    own_network = isolation.namespaces and not limits["network"]
    allow_network = bool(limits["network"] or limits.get("loopback") or own_network)
    # A local (Unix) socket is named by a file or by an abstract name. Local sockets are allowed only if both
    # are restricted: files by a root of its own, abstract names by a network namespace or by Landlock.
    allow_local = has_root and (own_network or is_scoped)

    # Without network, opening a socket fails with an error that names the reason.
    refusal = errno.EAFNOSUPPORT if limits["network"] or own_network else errno.ENETUNREACH
    families = filters.families_of(network=allow_network, local=allow_local)
    try:
        filters.filter_system_calls(families, refusal)
    except OSError as error:
        isolation.unenforced.append(f"{CALLS_UNFILTERED} (seccomp: {error.strerror})")
        allow_network = True
    if allow_network and not limits["network"] and not own_network:
        isolation.unenforced.append(f"{NETWORK_REACHABLE} (no namespaces)")


def _linux_version() -> tuple[int, ...]:
    """Return the first two numbers of the kernel's version, such as (6, 8)."""
    numbers = re.findall(r"\d+", os.uname().release)
    return tuple(int(number) for number in numbers[:2])


def _reap_until(worker: int) -> int:
    """Wait for children until ``worker`` ends; return its exit code, 128 + N after signal N."""
    while True:
        process, status = os.wait()
        if process == worker:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


# --- The supervisor


def supervise(
    worker: int,
    trainer: int,
    limits: Mapping[str, Any],
    isolation: Isolation,
) -> int:
    """Wait until ``worker`` ends or must be ended, then end it with its descendants; return the exit code.

    The worker must be ended if the process ``trainer`` has ended, if this process receives SIGTERM, and if
    its descendants are more, or use more memory, than ``limits`` allow.
    """
    kernel.process_control(kernel.SET_CHILD_SUBREAPER, 1)
    # The supervisor must be scheduled, however many processes compete for the processors.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    termination_signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: termination_signals.append(number))

    check_count = 0
    code: int | None = None
    while code is None:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == worker:
            code = os.waitstatus_to_exitcode(status)
        elif termination_signals or os.getppid() != trainer:
            code = 0
        elif process == 0:
            check_count += 1
            count_shared = check_count % SHARED_MEMORY_CHECKS == 0
            code = _exceeded_limit(worker, limits, isolation.scratch, count_shared)
            if code is None:
                time.sleep(CHECK_SECONDS)

    _end(worker)
    if isolation.folder is not None:
        import shutil

        shutil.rmtree(isolation.folder, ignore_errors=True)
    if isolation.group is not None:
        # The kernel kills a process if the group's memory is used up.
        if code and isolation.group.went_over_memory():
            code = TOO_MUCH_MEMORY
        isolation.group.remove()
    return code if code >= 0 else 128 - code


def _exceeded_limit(
    worker: int,
    limits: Mapping[str, Any],
    scratch: int | None,
    count_shared: bool,
) -> int | None:
    """Return the exit code for a limit that the worker's processes exceed, or None if they exceed none.

    ``count_shared`` includes shared mappings in the memory.
    """
    (extra,) = struct.unpack_from("q", _extra_processes)
    # Two processes do not count: the worker and the first process of the namespace.
    max_processes = limits["processes"] + min(extra, limits.get("own_processes", 0)) + 2
    # Code may start processes faster than they can be listed: stop beyond the limit.
    family = [worker, *islice(_descendants(worker), max_processes)]
    if len(family) > max_processes or sum(map(_task_count, family)) > _task_limit(limits):
        return TOO_MANY_PROCESSES

    shared_bytes = _scratch_bytes(scratch)
    if count_shared:
        shared_bytes += _shared_bytes(family)
    # The kernel enforces the limit for the private memory of a single process.
    if len(family) > 2 or shared_bytes:
        private_bytes = sum(_private_bytes(process) for process in family)
        if private_bytes + shared_bytes > limits["memory_gib"] * GIB:
            return TOO_MUCH_MEMORY
    return None


def _end(worker: int) -> None:
    """Kill the worker and every descendant, including those in other sessions."""
    # In a PID namespace the kernel kills all other processes when the first one ends.
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    end_descendants()


def end_descendants() -> None:
    """Kill all descendants of this process.

    This process must be a subreaper, so that descendants whose parents end become its children.
    """
    while True:
        for process in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def end_started_with(entry: str) -> None:
    """Kill each process that was started with the ``entry`` NAME=value in its environment."""
    killed: set[int] = set()
    # Repeat: processes may start others until they are killed.
    while running := set(_processes_started_with(entry.encode())) - killed:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        killed |= running


def _processes_started_with(entry: bytes) -> Iterator[int]:
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if entry in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                yield int(process)


def _descendants(process: int) -> Iterator[int]:
    """Yield the descendants of a process, including orphans if the process is a subreaper."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            for child in Path(f"/proc/{process}/task/{task}/children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _task_count(process: int) -> int:
    """Return the number of threads of a process; 0 if it has ended."""
    try:
        # The link count of a folder is 2 (its name and `.`) plus one per subfolder, here per thread.
        return os.stat(f"/proc/{process}/task").st_nlink - 2
    except OSError:
        return 0


def _private_bytes(process: int) -> int:
    """Return the resident bytes of a process, without file-backed and shared pages."""
    try:
        _, resident_pages, shared_pages, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
    except (OSError, ValueError):
        return 0
    return (resident_pages - shared_pages) * resource.getpagesize()


def _scratch_bytes(scratch: int | None) -> int:
    """Return the bytes of temporary files in memory, including deleted files that are still open."""
    if scratch is None:
        return 0
    size = os.fstatvfs(scratch)
    return (size.f_blocks - size.f_bfree) * size.f_frsize


def _shared_bytes(family: Iterable[int]) -> int:
    """Return the size of shared mappings without a file, since the number of their used pages is unknown."""
    # The largest end of the mappings of each shared memory, over all processes.
    ends: dict[str, int] = {}
    for process in family:
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps") as maps:
            for line in maps:
                if "/dev/zero (deleted)" in line:
                    addresses, _, offset, _, inode, *_ = line.split()
                    first, last = (int(address, 16) for address in addresses.split("-"))
                    ends[inode] = max(ends.get(inode, 0), int(offset, 16) + last - first)

    return sum(ends.values())
