"""Root directory of sandboxed code: a file system in memory with mounts of only the visible paths.

The order matters, because mounting the new root covers existing paths. First the mounts at all visible paths
are cloned. A clone is not visible anywhere until it is mounted. Then the new root is mounted, and each clone
is mounted at its path in the new root. The old root is unmounted last.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_rl.contained import kernel
from megatron_rl.contained.visible import (
    DEVICES,
    NETWORK_SETTINGS,
    SETTINGS,
    SYSTEM,
    VisiblePaths,
    resolve_links,
)

MAX_SCRATCH_FILES = 2**18
"""Largest number of files in the temporary folders: even an empty file takes memory of the kernel."""
_NEW_ROOT = "/tmp"
"""Mount point of the new root during its assembly. The mounts that it covers are cloned before."""
_SCRATCH = "/.scratch"
"""Folder of the temporary file system in the new root."""
_EMPTY = "/.nothing"
"""Empty folder of the new root, which is mounted over hidden folders."""
_READ_ONLY_ATTRIBUTES = kernel.READ_ONLY | kernel.NO_SETUID | kernel.NO_DEVICES
_PASSWD = "root:x:0:0::/:/bin/sh\nuser:x:{user}:{group}::{home}:/bin/sh\n"
_GROUP = "root:x:0:\nuser:x:{group}:\n"


class UnreadablePath(Exception):
    """Error for a visible path that the user of sandboxed code cannot access as required."""


@dataclass(frozen=True)
class Owner:
    """User and group that sandboxed code runs as.

    Example: ``Owner(0x70000123, 0x70000123, 5)`` is a user of only one process. The user namespace at
    descriptor 5 maps the trainer's files to this user.
    """

    user: int
    """Number of the user."""
    group: int
    """Number of the group."""
    namespace: int | None = None
    """Descriptor of a user namespace that maps the trainer's user to this user, or None.

    In mounts with this mapping, files of the trainer's user appear as files of this user.
    """


@dataclass(frozen=True)
class _ClonedMount:
    """Clone of the mounts at and below one visible path, to be mounted at this path in the new root."""

    path: str
    """Path without symbolic links."""
    descriptor: int
    """Descriptor of the clone, from `kernel.clone_mounts`."""
    is_folder: bool
    """Whether the path is a folder and not a file."""
    hides_entries: bool = False
    """Whether files and folders in the folder are hidden if their names begin with a dot."""


def create_scratch(size: int) -> int:
    """Create a file system in memory for up to ``size`` bytes of temporary files; return its descriptor."""
    attributes = kernel.NO_SETUID | kernel.NO_DEVICES
    return kernel.create_file_system("tmpfs", attributes, size=str(size), nr_inodes=str(MAX_SCRATCH_FILES))


def change_root(
    visible: VisiblePaths,
    scratch_fd: int,
    owner: Owner,
    kernel_limits: Mapping[str, str],
    *,
    network: bool,
) -> str | None:
    """Create the new root and move this process into it. No other process may be in the mount namespace.

    ``scratch_fd`` is the descriptor of the file system for temporary files, from `create_scratch`.
    ``kernel_limits`` maps files in /proc to their new values, which are written before /proc becomes
    read-only. ``network``: whether the settings of name resolution and TLS are visible.

    Returns the reason why /proc shows the processes of the machine, or None if it shows only
    processes of the namespace. Raises `UnreadablePath` before any change, and OSError if the kernel refuses a
    step.
    """
    folder = os.getcwd()

    # Clone the mounts at all visible paths. Only the user's own folders can be writable.
    links: dict[str, str] = {}
    settings = (*SETTINGS, *NETWORK_SETTINGS) if network else SETTINGS
    system_mounts = _clone_visible_paths(
        [*SYSTEM, *(f"/etc/{name}" for name in settings)], links, _READ_ONLY_ATTRIBUTES
    )
    device_mounts = _clone_visible_paths([f"/dev/{name}" for name in DEVICES], links, kernel.NO_SETUID)
    user_attributes = _READ_ONLY_ATTRIBUTES
    if visible.writable:
        user_attributes &= ~kernel.READ_ONLY
    user_mounts = _clone_visible_paths(visible.read, links, user_attributes, owner)
    user_mounts += _clone_visible_paths(visible.folders, links, user_attributes, owner, hides_entries=True)
    user_mounts += _clone_visible_paths(visible.packages, links, _READ_ONLY_ATTRIBUTES, owner)
    kernel.make_mounts_private()

    # Assemble the new root, then enter it. If a step fails, the process remains in the old root.
    root = kernel.create_file_system("tmpfs", kernel.NO_SETUID | kernel.NO_DEVICES, mode="0755")
    kernel.attach_mounts(root, _NEW_ROOT)
    try:
        os.mkdir(_NEW_ROOT + _EMPTY, 0o555)
        proc_reason = _mount_proc(kernel_limits)
        _attach_scratch(scratch_fd, owner)
        _write_users(owner)
        _mount_visible_paths([*system_mounts, *device_mounts], user_mounts)
        _create_links(links)
        _create_terminals()
        # Create the current folder, unless it is below a visible folder, which may be read-only.
        with contextlib.suppress(OSError):
            os.makedirs(_NEW_ROOT + folder, exist_ok=True)
        kernel.set_mount_attributes(_NEW_ROOT, kernel.READ_ONLY, recursive=False)
        os.chdir(_NEW_ROOT)
        kernel.system_call("pivot_root", b".", b".")
    except OSError:
        os.chdir("/")
        kernel.unmount(_NEW_ROOT)
        os.chdir(folder)
        raise

    # pivot_root of a folder onto itself mounts the old root on top of the new root.
    kernel.unmount(".")
    os.chdir("/")
    with contextlib.suppress(OSError):
        os.chdir(folder)
    return proc_reason


def _clone_visible_paths(
    paths: Iterable[str],
    links: dict[str, str],
    attributes: int,
    owner: Owner | None = None,
    *,
    hides_entries: bool = False,
) -> list[_ClonedMount]:
    """Clone the mounts at ``paths`` and set their attributes, such as read-only; return the clones.

    Symbolic links in the paths are added to ``links`` with their targets. ``owner`` is the user that must
    have access to the paths, or None for paths of the system. ``hides_entries``: whether files and folders
    whose names begin with a dot are hidden in a folder.
    """
    mount_by_path: dict[str, _ClonedMount] = {}
    for path in paths:
        path_links, real_path = resolve_links(path)
        links.update(path_links)
        if real_path == "/":
            raise OSError(errno.EINVAL, "all of / cannot be a part of another root")
        if real_path in mount_by_path or not os.path.exists(real_path):
            continue

        is_folder = os.path.isdir(real_path)
        descriptor = kernel.clone_mounts(real_path)
        # A device in `limits.read` must be usable, so it does not get NO_DEVICES.
        is_device = owner is not None and not is_folder and not os.path.isfile(real_path)
        mount_attributes = kernel.NO_SETUID if is_device else attributes
        _restrict_mount(descriptor, real_path, mount_attributes, owner)
        mount_by_path[real_path] = _ClonedMount(real_path, descriptor, is_folder, hides_entries and is_folder)
    return list(mount_by_path.values())


def _restrict_mount(
    descriptor: int,
    path: str,
    attributes: int,
    owner: Owner | None,
) -> None:
    """Set the attributes of a cloned mount, such as read-only, and map the owners of its files.

    ``descriptor`` is the file descriptor of the cloned mount of ``path``. If the file system supports it,
    files of the trainer's user appear as files of ``owner``. Raises `UnreadablePath` if ``owner`` cannot
    access the path.
    """
    is_mapped = False
    if owner is not None and owner.namespace is not None:
        with contextlib.suppress(OSError):
            kernel.set_mount_attributes(descriptor, attributes | kernel.MAP_OWNERS, owner.namespace)
            is_mapped = True

    if not is_mapped:
        kernel.set_mount_attributes(descriptor, attributes)

    # Without a mapping, the files may belong to a different user: test the permissions.
    if owner is not None and owner.user != os.getuid() and not _can_access(descriptor, owner, attributes):
        raise UnreadablePath(path)


def _can_access(descriptor: int, owner: Owner, attributes: int) -> bool:
    """Return whether the file permissions allow ``owner`` to access a cloned mount.

    ``descriptor`` is the descriptor of the clone, and ``attributes`` are its mount attributes. Unless they
    contain `kernel.READ_ONLY`, write permission is required too.
    """
    status = os.fstat(descriptor)
    permissions = 0o5 if stat.S_ISDIR(status.st_mode) else 0o4
    if not attributes & kernel.READ_ONLY:
        permissions |= 0o2
    return status.st_uid == owner.user or status.st_mode & permissions == permissions


def _mount_proc(kernel_limits: Mapping[str, str]) -> str | None:
    """Mount the /proc of this process's PID namespace in the new root, and write ``kernel_limits``.

    If the kernel refuses, mount the machine's /proc and return the reason.
    """
    proc_folder = f"{_NEW_ROOT}/proc"
    os.mkdir(proc_folder)
    refusal_reason = None
    try:
        kernel.mount("proc", proc_folder, kernel.NO_SETUID | kernel.NO_DEVICES | kernel.NO_EXEC)
    except OSError as error:
        # The kernel refuses a new /proc in a container in which parts of /proc are hidden.
        refusal_reason = str(error.strerror)
        kernel.attach_mounts(kernel.clone_mounts("/proc"), proc_folder)
    else:
        for path, value in kernel_limits.items():
            with contextlib.suppress(OSError), open(_NEW_ROOT + path, "w") as file:
                file.write(value)

    kernel.set_mount_attributes(proc_folder, _READ_ONLY_ATTRIBUTES)
    return refusal_reason


def _attach_scratch(scratch_fd: int, owner: Owner) -> None:
    """Mount /tmp, /dev/shm and the home folder in the new root, all from one file system in memory.

    ``scratch_fd`` is the descriptor of this file system, whose size is a limit for all three together.
    """
    os.mkdir(_NEW_ROOT + _SCRATCH)
    kernel.attach_mounts(os.dup(scratch_fd), _NEW_ROOT + _SCRATCH)

    home = os.path.abspath(os.path.expanduser("~"))
    for name, mount_point in (("tmp", "/tmp"), ("shm", "/dev/shm"), ("home", home)):
        if mount_point == "/":
            continue
        scratch_folder = f"{_NEW_ROOT}{_SCRATCH}/{name}"
        os.mkdir(scratch_folder)
        os.chmod(scratch_folder, 0o1777)
        os.chown(scratch_folder, owner.user, owner.group)
        os.makedirs(_NEW_ROOT + mount_point, exist_ok=True)
        # Mount the folder a second time, at its path in the new root, like a bind mount.
        kernel.attach_mounts(kernel.clone_mounts(scratch_folder), _NEW_ROOT + mount_point)

    os.chmod(_NEW_ROOT + _SCRATCH, 0o700)
    os.mkdir(f"{_NEW_ROOT}/var")
    os.symlink("../tmp", f"{_NEW_ROOT}/var/tmp")
    os.mkdir(f"{_NEW_ROOT}/run")


def _write_users(owner: Owner) -> None:
    """Write /etc/passwd and /etc/group of the new root, with only root and the owner."""
    os.mkdir(f"{_NEW_ROOT}/etc")
    values = {"user": owner.user, "group": owner.group, "home": os.path.expanduser("~")}
    for name, template in (("passwd", _PASSWD), ("group", _GROUP)):
        with open(f"{_NEW_ROOT}/etc/{name}", "w") as file:
            file.write(template.format(**values))


def _mount_visible_paths(system_mounts: list[_ClonedMount], user_mounts: list[_ClonedMount]) -> None:
    """Mount the cloned mounts at their paths in the new root, a parent folder before its subfolders.

    If a parent folder is mounted, its subfolders are usually visible without a mount of their own, and their
    clones are dropped. A subfolder is mounted only if its parent hides it (`_ClonedMount.hides_entries`).
    """
    attached_mounts: list[_ClonedMount] = []
    user_paths = [mount.path for mount in user_mounts]
    for mount in [*system_mounts, *sorted(user_mounts, key=lambda mount: mount.path)]:
        # Find the innermost mounted folder that contains the path: it determines whether the path is hidden.
        outer_mounts: list[_ClonedMount] = []
        for attached_mount in attached_mounts:
            if f"{mount.path}/".startswith(f"{attached_mount.path}/"):
                outer_mounts.append(attached_mount)
        innermost_mount = max(outer_mounts, key=lambda outer_mount: len(outer_mount.path), default=None)

        if innermost_mount is None or _is_hidden(mount.path, innermost_mount):
            _mount_clone(mount)
            attached_mounts.append(mount)
            if mount.hides_entries:
                _hide_entries(mount.path, user_paths)
        else:
            os.close(mount.descriptor)


def _is_hidden(path: str, outer_mount: _ClonedMount) -> bool:
    """Return whether the mounted folder ``outer_mount`` hides a path in the folder.

    With ``hides_entries``, the folder hides its files and subfolders whose names begin with a dot.
    """
    return outer_mount.hides_entries and path[len(outer_mount.path) :].startswith("/.")


def _mount_clone(mount: _ClonedMount) -> None:
    """Mount a cloned mount at its path in the new root; create an empty file or folder as mount point."""
    target = _NEW_ROOT + mount.path
    if mount.is_folder:
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.lexists(target):
            open(target, "x").close()
    kernel.attach_mounts(mount.descriptor, target)


def _hide_entries(folder: str, visible_paths: Iterable[str]) -> None:
    """Hide the files and folders of ``folder`` whose names begin with a dot, by mounts on top of them.

    A path in ``visible_paths`` is not hidden. A hidden folder that contains such a path gets an empty file
    system, in which the path is mounted later.
    """
    for entry in list(os.scandir(_NEW_ROOT + folder)):
        path = f"{folder}/{entry.name}"
        if not entry.name.startswith(".") or entry.is_symlink() or path in visible_paths:
            continue

        if not entry.is_dir():
            empty_file = f"{_NEW_ROOT}{_EMPTY}.file"
            if not os.path.exists(empty_file):
                open(empty_file, "x").close()
            kernel.attach_mounts(kernel.clone_mounts(empty_file), _NEW_ROOT + path)
        elif any(visible_path.startswith(f"{path}/") for visible_path in visible_paths):
            kernel.attach_mounts(kernel.create_file_system("tmpfs", 0, mode="0755"), _NEW_ROOT + path)
        else:
            kernel.attach_mounts(kernel.clone_mounts(_NEW_ROOT + _EMPTY), _NEW_ROOT + path)


def _create_links(links: Mapping[str, str]) -> None:
    """Create symbolic links in the new root; ``links`` maps the path of a link to its target."""
    for link, link_target in links.items():
        # A link inside a visible folder exists already.
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(_NEW_ROOT + link), exist_ok=True)
            os.symlink(link_target, _NEW_ROOT + link)


def _create_terminals() -> None:
    """Create /dev/stdin and similar links and, if the kernel allows it, terminals in /dev/pts."""
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{_NEW_ROOT}/dev/{name}")
    os.mkdir(f"{_NEW_ROOT}/dev/pts")
    with contextlib.suppress(OSError):
        options = "newinstance,ptmxmode=0666,mode=0620"
        kernel.mount("devpts", f"{_NEW_ROOT}/dev/pts", kernel.NO_SETUID | kernel.NO_EXEC, options)
        os.symlink("pts/ptmx", f"{_NEW_ROOT}/dev/ptmx")
