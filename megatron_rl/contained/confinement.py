"""Confine a process: a separate user, root and namespaces, limits, and a filter of system calls.

Like `megatron_rl.contained.process` this module imports only the standard library. If the kernel does not
allow a protection, the protection is reported by name and a weaker protection replaces it:

- Landlock replaces a new root directory.
- A filter of system calls replaces a network namespace.
- Measurements by the supervisor replace a control group.

bubblewrap, nsjail and Firejail confine programs with the same namespaces, and are not used here. They fail if
the kernel refuses namespaces, as in most containers. They are not installed on most nodes, and do not count
the total memory of several processes. This module would still be needed for these cases.
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
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rl.contained import filters, kernel
from megatron_rl.contained.control_group import GROUP_MARGIN, ControlGroup
from megatron_rl.contained.new_root import Owner, UnreadablePath, change_root, create_scratch
from megatron_rl.contained.visible import DEVICES, NETWORK_SETTINGS, SETTINGS, SYSTEM, VisiblePaths

GIB = 2**30
SCRATCH = "/dev/shm"
"""Mount point of the file system in memory for temporary files, for a process without its own root."""
TOO_MANY_PROCESSES = 97
"""Exit code of a supervisor that ended its worker because of too many processes or threads."""
TOO_MUCH_MEMORY = 98
"""Exit code of a supervisor that ended its worker because of too much memory."""
CHECK_SECONDS = 0.1
"""Seconds between two measurements of a worker and its descendants."""
SHARED_MEMORY_INTERVAL = 5
"""Number of measurements of which only one includes shared mappings, since that takes longer."""
OTHER_TASKS = 1024
"""The kernel's limit of threads and processes is this number plus the limit of processes."""
_extra_processes = mmap.mmap(-1, 8)
"""Memory that a worker shares with its supervisor; it contains the ``count`` of `allow_processes`."""
_PID_MAX_PER_NAMESPACE_SINCE = (6, 14)
"""First version of Linux in which ``pid_max`` belongs to a namespace and not to the machine."""
_TASKS_PER_NAMESPACE_SINCE = (5, 14)
"""First version of Linux that counts a user's tasks (RLIMIT_NPROC) in each user namespace separately."""
_FILE_DESCRIPTORS = 64
"""Number of descriptors that the first process of a namespace closes, which is more than it inherits."""

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
"""User numbers that no distribution assigns (systemd.io/UIDS-GIDS); each sandboxed process has its own."""
_LARGE_MAPPING = 1000
"""A user namespace with at least this number of mapped users, such as a container's, has unused users."""

# Request and flag to bring up an interface, from linux/sockios.h and linux/if.h.
_SET_INTERFACE_FLAGS = 0x8914
_INTERFACE_UP = 1


@dataclass
class Isolation:
    """Namespaces, limits and folders that `isolate_process` prepares for `confine_worker`."""

    visible: VisiblePaths
    owner: Owner
    """User and group that sandboxed code will run as."""
    has_namespaces: bool = False
    """Whether the process will be the first process of new namespaces."""
    scratch_fd: int | None = None
    """Descriptor of the file system in memory for temporary files, or None if the kernel refuses it."""
    folder: str | None = None
    """Folder for temporary files if there is no file system in memory."""
    group: ControlGroup | None = None
    """Control group with the limits of memory and tasks."""
    unenforced: list[str] = field(default_factory=list)
    """Protections that the kernel does not allow, for warnings."""


# --- Limits of one process


def set_limits(limits: Mapping[str, Any]) -> None:
    """Limit memory, open files and file sizes of this process and of all processes that it starts.

    The limit of open files is ``limits["files"]``. `allow_files` may later raise it by up to
    ``limits["own_files"]``, the number of files that an environment declares to need.
    """
    files = int(limits["files"])
    max_files = files + limits.get("own_files", 0)
    # Limit private writable memory and not address space, which programs need to map large files.
    memory = int(limits["memory_gib"] * GIB)
    file_size = int(limits["file_gib"] * GIB)

    for resource_kind, soft_limit, hard_limit in (
        (resource.RLIMIT_DATA, memory, memory),
        (resource.RLIMIT_NOFILE, files, max_files),
        (resource.RLIMIT_FSIZE, file_size, file_size),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        # A process may not raise a hard limit.
        _, current_hard_limit = resource.getrlimit(resource_kind)
        new_soft_limit = _cap_at_hard_limit(soft_limit, current_hard_limit)
        new_hard_limit = _cap_at_hard_limit(hard_limit, current_hard_limit)
        resource.setrlimit(resource_kind, (new_soft_limit, new_hard_limit))


def allow_files(count: int) -> None:
    """Raise this process's limit of open files to ``count``, as far as `set_limits` permits."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_cap_at_hard_limit(count, hard_limit), hard_limit))


def allow_processes(count: int) -> None:
    """Raise the limit of sandboxed processes by ``count``, at most by ``limits["own_processes"]``."""
    struct.pack_into("q", _extra_processes, 0, count)


def allow_processor_seconds(seconds: float) -> None:
    """Allow this process ``seconds`` more seconds of CPU time, after which the kernel ends it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    soft_limit = int(usage.ru_utime + usage.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft_limit, hard_limit))


def _cap_at_hard_limit(value: int, hard_limit: int) -> int:
    """Return ``value``, or the hard limit if that is lower; RLIM_INFINITY means no limit."""
    if hard_limit == resource.RLIM_INFINITY:
        return value
    return min(value, hard_limit)


def describe_exceeded_limit(
    status: int,
    limits: Mapping[str, Any],
    key: str,
) -> str | None:
    """Describe the limit that a process exceeded, according to its exit ``status``.

    ``key`` is the configuration key of the section of ``limits``. Returns None for other exit statuses.
    """
    if status == TOO_MANY_PROCESSES:
        return f"started more than {limits['processes']} processes ({key}.processes)"
    if status == TOO_MUCH_MEMORY:
        return f"held more than {limits['memory_gib']:g} GiB in total ({key}.memory_gib)"
    if status == 128 + signal.SIGXCPU and "cpu_seconds" in limits:
        return f"used more than {limits['cpu_seconds']:g} s of processor time ({key}.cpu_seconds)"
    return None


# --- Namespaces, before the worker is forked


def isolate_process(limits: Mapping[str, Any], visible: VisiblePaths) -> Isolation:
    """Move this process into new namespaces, before it forks the worker for the user's code.

    The first child of this process becomes the init process (PID 1) of the new PID namespace. The namespaces
    have no network unless ``limits`` allow it. With ``loopback`` in ``limits``, processes in the network
    namespace may connect to each other.
    """
    isolation = Isolation(visible, Owner(os.getuid(), os.getgid()))
    memory = int(limits["memory_gib"] * GIB)
    isolation.group = ControlGroup(memory + GROUP_MARGIN, _task_limit(limits))

    namespace_flags = kernel.NEW_PROCESSES | kernel.NEW_IPC | kernel.NEW_HOST_NAME
    if not limits["network"]:
        namespace_flags |= kernel.NEW_NETWORK
    try:
        isolation.owner = _create_namespaces(namespace_flags)
        isolation.has_namespaces = True
    except OSError as error:
        # Without a PID namespace, the kernel does not end all descendants of the worker with it. The
        # supervisor must search for them.
        isolation.unenforced.append(f"{CHILDREN_SEARCHED} (namespaces: {error.strerror})")
        isolation.folder = _create_temporary_folder()
        return isolation

    if limits.get("loopback") and not limits["network"]:
        _bring_up_loopback()

    # Ignore errors here: `confine_worker` reports the protections that need a mount namespace.
    with contextlib.suppress(OSError):
        kernel.unshare(kernel.NEW_MOUNTS)
        kernel.make_mounts_private()
        isolation.scratch_fd = create_scratch(memory)
    if isolation.scratch_fd is None:
        isolation.folder = _create_temporary_folder()
    return isolation


def _create_temporary_folder() -> str:
    """Create a folder on disk for temporary files, and return its path."""
    # Import it here, since it is seldom needed and takes a third of this module's import time.
    import tempfile

    return tempfile.mkdtemp(prefix="megatron_rl_")


def _task_limit(limits: Mapping[str, Any]) -> int:
    """Return the limit of the total number of threads and processes of sandboxed code."""
    return int(OTHER_TASKS + limits["processes"] + limits.get("own_processes", 0))


def _create_namespaces(namespace_flags: int) -> Owner:
    """Create namespaces; return the user and group (`Owner`) that sandboxed code will run as.

    ``namespace_flags`` are flags of `kernel.unshare`. Without root's privileges the namespaces are created in
    a new user namespace.
    """
    user = os.getuid()
    group = os.getgid()
    if user == 0:
        # Root needs no user namespace. `_find_unprivileged_owner` forks a helper process, so call it before
        # `unshare`: the first process that is forked after `unshare` becomes the init process of the new PID
        # namespace, and the namespace ends when its init process exits.
        unprivileged_owner = _find_unprivileged_owner()
        with contextlib.suppress(PermissionError):
            kernel.unshare(namespace_flags)
            return unprivileged_owner or Owner(user, group)

        if unprivileged_owner is not None:
            _close_user_namespace(unprivileged_owner)

    kernel.unshare(kernel.NEW_USER | namespace_flags)
    # Without privileges, a process must disable setgroups before it may map a group.
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return Owner(user, group)


def _find_unprivileged_owner() -> Owner | None:
    """Return the `Owner` of sandboxed processes: a user and a group that no other process uses.

    If the kernel supports it, the `Owner` also contains a user namespace. In this namespace, files of the
    trainer's user belong to the returned user. Returns None if every user or group may be in use.
    """
    user = _find_unused_number(Path("/proc/self/uid_map"))
    group = _find_unused_number(Path("/proc/self/gid_map"))
    if user is None or group is None:
        return None
    with contextlib.suppress(OSError):
        return Owner(user, group, _open_mapped_namespace(user, group))
    return Owner(user, group)


def _find_unused_number(mapping_file: Path) -> int | None:
    """Return a user or group number that is mapped in this user namespace and used by no other process.

    ``mapping_file`` is uid_map or gid_map of this process. Returns None if all mapped numbers may be in use.
    """
    # A line is: first number in this namespace, first number outside of it, count.
    mapped_ranges = []
    for line in mapping_file.read_text().splitlines():
        first, _, count = map(int, line.split())
        mapped_ranges.append(range(first, first + count))

    # Choose by the process id, so that each process gets a different number.
    preferred_number = _UNUSED_USERS[os.getpid() % len(_UNUSED_USERS)]
    if any(preferred_number in mapped_range for mapped_range in mapped_ranges):
        return preferred_number

    # A container's mapping usually has 65536 numbers, of which the upper half is rarely in use.
    largest_range = max(mapped_ranges, key=len)
    if len(largest_range) < _LARGE_MAPPING:
        return None
    upper_half = largest_range[len(largest_range) // 2 :]
    return upper_half[os.getpid() % len(upper_half)]


def _open_mapped_namespace(user: int, group: int) -> int:
    """Create a user namespace that maps this process's user and group to ``user`` and ``group``.

    Returns a descriptor of the namespace. A helper process creates the namespace. This process writes the
    mappings and opens the namespace, which exists as long as the descriptor is open.
    """
    ready_read, ready_write = os.pipe()
    done_read, done_write = os.pipe()

    # The helper remains in its namespace until this process closes the pipe `done`.
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


def _close_user_namespace(owner: Owner) -> None:
    """Close the descriptor of an owner's user namespace, since sandboxed code must not have it."""
    if owner.namespace is not None:
        os.close(owner.namespace)


def _bring_up_loopback() -> None:
    """Bring up the loopback interface of a new network namespace, in which all interfaces are down."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SET_INTERFACE_FLAGS, struct.pack("16sh", b"lo", _INTERFACE_UP))


# --- The worker


def confine_worker(limits: Mapping[str, Any], isolation: Isolation) -> list[str]:
    """Confine the worker for the user's code; return the protections that the kernel does not allow.

    The first child of the process that called `isolate_process` calls this function. Without namespaces, this
    child is the worker. In a new PID namespace, the child is the init process: it forks the worker, waits
    until the worker ends, and exits, which ends all processes of the namespace. Only the worker returns.
    """
    kernel.process_control(kernel.SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    # If the machine runs out of memory, the kernel should kill this process and not a rank.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if isolation.group is not None:
        isolation.group.enter()

    has_root = _enter_root(limits, isolation)
    if isolation.has_namespaces:
        worker = os.fork()
        if worker:
            os.closerange(0, _FILE_DESCRIPTORS)
            _switch_user(isolation.owner)
            os._exit(_wait_for_worker(worker))

    # Set limits before the worker drops the privileges that this needs.
    set_limits(limits)
    _limit_tasks(limits, isolation)
    if isolation.scratch_fd is not None:
        os.close(isolation.scratch_fd)
    _close_user_namespace(isolation.owner)
    _switch_user(isolation.owner)
    # The kernel resets these options when the user changes, so set them afterwards.
    kernel.process_control(kernel.SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    kernel.process_control(kernel.SET_DUMPABLE, 1)
    if os.getuid() == 0:
        isolation.unenforced.append(SAME_USER.format(name="root"))

    # Filter system calls last: the other steps need calls that the filter refuses.
    os.environ["TMPDIR"] = "/tmp" if has_root else isolation.folder or "/tmp"
    has_landlock_scope = _restrict_with_landlock(limits, isolation, has_root)
    _filter_system_calls(limits, isolation, has_root, has_landlock_scope)
    return isolation.unenforced


def _enter_root(limits: Mapping[str, Any], isolation: Isolation) -> bool:
    """Create a root directory with only the visible paths and move this process into it.

    Returns whether the kernel allowed the new root.
    """
    scratch_fd = isolation.scratch_fd
    if scratch_fd is None:
        return False
    kernel_limits = {}
    if _linux_version() >= _PID_MAX_PER_NAMESPACE_SINCE:
        kernel_limits["/proc/sys/kernel/pid_max"] = str(_task_limit(limits))
    network = bool(limits["network"])

    try:
        # Use a separate mount namespace, since the supervisor must still find all processes in its /proc.
        kernel.unshare(kernel.NEW_MOUNTS)
        change_root_as = partial(
            change_root, isolation.visible, scratch_fd, kernel_limits=kernel_limits, network=network
        )
        try:
            proc_reason = change_root_as(isolation.owner)
        except UnreadablePath as unreadable:
            _run_as_own_user(isolation)
            same_user = SAME_USER.format(name="root")
            isolation.unenforced.append(f"{same_user}, since only root may use {unreadable}")
            proc_reason = change_root_as(isolation.owner)
    except OSError as error:
        # Without a new root, a separate user may lack permissions for files that the code needs.
        _run_as_own_user(isolation)
        isolation.unenforced.append(f"{NO_ROOT} (mount: {error.strerror})")
        with contextlib.suppress(OSError):
            kernel.attach_mounts(os.dup(scratch_fd), SCRATCH)
            isolation.folder = SCRATCH
        return False

    if proc_reason is not None:
        isolation.unenforced.append(f"{PROCESSES_VISIBLE} (proc: {proc_reason})")
    return True


def _run_as_own_user(isolation: Isolation) -> None:
    """Change ``isolation`` so that sandboxed code runs as the user of this process, not as another user."""
    _close_user_namespace(isolation.owner)
    isolation.owner = Owner(os.getuid(), os.getgid())


def _switch_user(owner: Owner) -> None:
    """Switch this process irreversibly to the owner's user and group, without capabilities."""
    kernel.drop_bounding_set()
    if owner.user != os.getuid():
        os.setgroups([])
        os.setresgid(owner.group, owner.group, owner.group)
        os.setresuid(owner.user, owner.user, owner.user)
    kernel.drop_capabilities()


def _limit_tasks(limits: Mapping[str, Any], isolation: Isolation) -> None:
    """Limit the number of threads and processes of the worker's user (RLIMIT_NPROC).

    The kernel counts all processes of a user. If the worker shares a count with the trainer's user, no limit
    is set, since the limit would also count the trainer's processes.
    """
    # The worker has a separate count if it runs as another user. Since Linux 5.14, it also has a separate
    # count if it runs as the same user in another user namespace.
    is_other_user = isolation.owner.user != os.getuid()
    if is_other_user or (isolation.has_namespaces and _linux_version() >= _TASKS_PER_NAMESPACE_SINCE):
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NPROC)
        limit = _cap_at_hard_limit(_task_limit(limits), hard_limit)
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))


def _restrict_with_landlock(
    limits: Mapping[str, Any],
    isolation: Isolation,
    has_root: bool,
) -> bool:
    """Use Landlock to restrict signals, abstract sockets and, without a new root, access to files.

    ``has_root``: whether the process has its own root directory. Returns whether signals and abstract sockets
    are restricted.
    """
    if has_root:
        return filters.restrict_sockets_and_signals()

    # Allow the same paths that a new root would contain.
    visible = isolation.visible
    setting_names = (*SETTINGS, *NETWORK_SETTINGS) if limits["network"] else SETTINGS
    setting_paths = (f"/etc/{name}" for name in (*setting_names, "passwd", "group"))
    user_paths = (*visible.folders, *visible.read)
    readable_paths = ["/proc", *SYSTEM, *setting_paths, *visible.packages, *user_paths]
    writable_paths = [f"/dev/{name}" for name in DEVICES]
    if isolation.folder:
        writable_paths.append(isolation.folder)
    if visible.writable:
        writable_paths += user_paths

    unenforced = isolation.unenforced
    try:
        filters.restrict_paths(readable_paths, writable_paths)
    except OSError as error:
        reason = f"(no root of its own; Landlock: {error.strerror})"
        unenforced.append(f"{FILES_READABLE} {reason}")
        if not limits["write"]:
            unenforced.append(f"{FILES_WRITABLE} {reason}")
        if not isolation.has_namespaces:
            unenforced.append(f"{PROCESSES_SIGNALLED} {reason}")
        return False

    # Landlock grants access to complete folders, and does not hide names.
    unenforced.append(f"{HIDDEN_READABLE} (Landlock in place of a root)")
    unenforced.append(f"{NAMES_VISIBLE} (Landlock in place of a root)")
    if isolation.folder != SCRATCH:
        unenforced.append(f"{TEMPORARY_UNBOUNDED} (Landlock in place of a root)")
    has_landlock_scope = filters.landlock_version() >= filters.SCOPES_SINCE
    if not has_landlock_scope and not isolation.has_namespaces:
        unenforced.append(f"{PROCESSES_SIGNALLED} (no namespaces; Landlock before its version 6)")
    return has_landlock_scope


def _filter_system_calls(
    limits: Mapping[str, Any],
    isolation: Isolation,
    has_root: bool,
    has_landlock_scope: bool,
) -> None:
    """Forbid system calls and sockets with which the process could reach programs outside of its confinement.

    ``has_root``: whether the process has its own root directory. ``has_landlock_scope``: whether Landlock
    restricts abstract sockets. Protections that the kernel does not allow are added to
    ``isolation.unenforced``.
    """
    has_own_network = isolation.has_namespaces and not limits["network"]
    allows_network = bool(limits["network"] or limits.get("loopback") or has_own_network)
    # A local (Unix) socket has a path or an abstract name. Allow local sockets only if both are restricted:
    # paths by a new root, abstract names by a network namespace or by Landlock.
    allows_local_sockets = has_root and (has_own_network or has_landlock_scope)

    # Choose the error of a refused socket: without network, it should name the network as the reason.
    socket_error = errno.EAFNOSUPPORT if limits["network"] or has_own_network else errno.ENETUNREACH
    socket_families = filters.allowed_socket_families(network=allows_network, local=allows_local_sockets)
    try:
        filters.filter_system_calls(socket_families, socket_error)
    except OSError as error:
        isolation.unenforced.append(f"{CALLS_UNFILTERED} (seccomp: {error.strerror})")
        allows_network = True
    if allows_network and not limits["network"] and not has_own_network:
        isolation.unenforced.append(f"{NETWORK_REACHABLE} (no namespaces)")


def _linux_version() -> tuple[int, ...]:
    """Return major and minor version of the kernel, such as (6, 8)."""
    numbers = re.findall(r"\d+", os.uname().release)
    return tuple(int(number) for number in numbers[:2])


def _wait_for_worker(worker: int) -> int:
    """Wait for children until ``worker`` ends; return its exit code, or 128 + N if signal N ended it."""
    while True:
        process, status = os.wait()
        if process == worker:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


# --- The supervisor


def supervise_worker(
    worker: int,
    trainer: int,
    limits: Mapping[str, Any],
    isolation: Isolation,
) -> int:
    """Wait for ``worker`` and kill its remaining descendants; return the exit code.

    ``worker`` and ``trainer`` are process ids; this process is the supervisor. It kills the worker when the
    trainer ends, when the supervisor receives SIGTERM, or when the worker and its descendants exceed the
    ``limits`` of processes or memory.
    """
    kernel.process_control(kernel.SET_CHILD_SUBREAPER, 1)
    # Raise the priority: the supervisor must run even if many processes compete for the processors.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    termination_signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: termination_signals.append(number))

    # Wait until the worker ends, must be killed, or exceeds a limit. `waitpid` also reaps other children,
    # which are orphaned descendants; the loop ignores them.
    num_checks = 0
    exit_code: int | None = None
    while exit_code is None:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == worker:
            exit_code = os.waitstatus_to_exitcode(status)
        elif termination_signals or os.getppid() != trainer:
            exit_code = 0
        elif process == 0:
            num_checks += 1
            includes_shared_memory = num_checks % SHARED_MEMORY_INTERVAL == 0
            exit_code = _find_exceeded_limit(worker, limits, isolation.scratch_fd, includes_shared_memory)
            if exit_code is None:
                time.sleep(CHECK_SECONDS)

    # End all processes, and remove the temporary folder and the control group.
    _kill_worker(worker)
    if isolation.folder is not None:
        import shutil

        shutil.rmtree(isolation.folder, ignore_errors=True)
    if isolation.group is not None:
        # The kernel may have killed the worker because the memory of the group was used up.
        if exit_code and isolation.group.has_exceeded_memory():
            exit_code = TOO_MUCH_MEMORY
        isolation.group.remove()
    return exit_code if exit_code >= 0 else 128 - exit_code


def _find_exceeded_limit(
    worker: int,
    limits: Mapping[str, Any],
    scratch_fd: int | None,
    includes_shared_memory: bool,
) -> int | None:
    """Return the exit code for a limit that the worker's processes exceed, or None within the limits.

    ``scratch_fd`` is the descriptor of the file system in memory for temporary files, or None. Shared memory
    mappings count as memory of the processes only with ``includes_shared_memory``.
    """
    # `limits["processes"]` is the user's limit. An environment may need further processes for its episodes
    # (`allow_processes`), at most `limits["own_processes"]`. Add 2, since the worker and the init process of
    # the namespace do not count.
    (extra_processes,) = struct.unpack_from("q", _extra_processes)
    max_processes = limits["processes"] + min(extra_processes, limits.get("own_processes", 0)) + 2
    # List no more processes than needed: user code may start processes faster than they can be listed.
    processes = [worker, *islice(_descendants(worker), max_processes)]
    if len(processes) > max_processes or sum(map(_task_count, processes)) > _task_limit(limits):
        return TOO_MANY_PROCESSES

    # The kernel itself enforces the limit on the private memory of a single process.
    shared_bytes = _scratch_bytes(scratch_fd)
    if includes_shared_memory:
        shared_bytes += _shared_bytes(processes)
    if len(processes) > 2 or shared_bytes:
        private_bytes = sum(_private_bytes(process) for process in processes)
        if private_bytes + shared_bytes > limits["memory_gib"] * GIB:
            return TOO_MUCH_MEMORY
    return None


def _kill_worker(worker: int) -> None:
    """Kill the worker and all its descendants, including descendants in other sessions."""
    # When the first process of a PID namespace ends, the kernel kills all other processes of the namespace.
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    kill_descendants()


def kill_descendants() -> None:
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


def kill_processes_started_with(variable: str) -> None:
    """Kill each process that was started with the environment ``variable``, given as NAME=value."""
    killed_processes: set[int] = set()
    # Until a process is killed, it may start another process. So repeat until no new process is found.
    while True:
        new_processes = set(_processes_started_with(variable.encode())) - killed_processes
        if not new_processes:
            return
        for process in new_processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        killed_processes |= new_processes


def _processes_started_with(variable: bytes) -> Iterator[int]:
    """Yield the ids of the processes that were started with an environment variable, given as NAME=value."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if variable in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                yield int(process)


def _descendants(process: int) -> Iterator[int]:
    """Yield the ids of all descendants of a process, including orphans if the process is a subreaper."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            for child in Path(f"/proc/{process}/task/{task}/children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _task_count(process: int) -> int:
    """Return the number of threads of a process, or 0 if the process has ended."""
    try:
        # The link count of a folder is 2 (its name and `.`) plus one per subfolder, here per thread.
        return os.stat(f"/proc/{process}/task").st_nlink - 2
    except OSError:
        return 0


def _private_bytes(process: int) -> int:
    """Return the resident bytes of a process, without file-backed and shared pages; 0 if it has ended."""
    try:
        _, resident_pages, shared_pages, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
    except (OSError, ValueError):
        return 0
    return (resident_pages - shared_pages) * resource.getpagesize()


def _scratch_bytes(scratch_fd: int | None) -> int:
    """Return the bytes of temporary files in memory, including deleted files that are still open.

    ``scratch_fd`` is the descriptor of their file system, or None.
    """
    if scratch_fd is None:
        return 0
    file_system = os.fstatvfs(scratch_fd)
    return (file_system.f_blocks - file_system.f_bfree) * file_system.f_frsize


def _shared_bytes(processes: Iterable[int]) -> int:
    """Return the total size in bytes of the anonymous shared mappings of processes.

    The kernel does not report the number of resident pages of a shared mapping, so its full size is counted.
    """
    # Several processes may map the same shared memory: count it once, up to the largest end of its mappings.
    end_by_inode: dict[str, int] = {}
    for process in processes:
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps") as maps:
            for line in maps:
                if "/dev/zero (deleted)" in line:
                    addresses, _, offset, _, inode, *_ = line.split()
                    first_address, end_address = (int(address, 16) for address in addresses.split("-"))
                    end_offset = int(offset, 16) + end_address - first_address
                    end_by_inode[inode] = max(end_by_inode.get(inode, 0), end_offset)

    return sum(end_by_inode.values())
