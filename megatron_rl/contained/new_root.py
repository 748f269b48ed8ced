"""Root directory of contained code: a file system in memory with mounts of only the visible paths.

The order matters, because mounting the new root covers existing paths. First the mounts at all visible paths
are copied. Each copy is a tree of mounts that is not attached yet. Then the new root is mounted, and each
tree is attached at its path in the new root. The old root is unmounted last.
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
_STAGE = "/tmp"
"""Mount point of the new root during its assembly. The mounts that it covers are copied before."""
_SCRATCH = "/.scratch"
"""Folder of the temporary file system in the new root."""
_EMPTY = "/.nothing"
"""Empty folder of the new root, which is mounted over hidden folders."""
_READ_ONLY_ATTRIBUTES = kernel.READ_ONLY | kernel.NO_SETUID | kernel.NO_DEVICES
_PASSWD = "root:x:0:0::/:/bin/sh\nuser:x:{user}:{group}::{home}:/bin/sh\n"
_GROUP = "root:x:0:\nuser:x:{group}:\n"


class UnreadablePath(Exception):
    """Error for a visible path that the user of contained code cannot access as required."""


@dataclass(frozen=True)
class Owner:
    """User and group that contained code runs as.

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
class _Tree:
    """Copy of the mounts at one visible path, to be attached in the new root."""

    path: str
    """Path without symbolic links."""
    descriptor: int
    """Descriptor of the copied mounts."""
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
    scratch: int,
    owner: Owner,
    kernel_limits: Mapping[str, str],
    *,
    network: bool,
) -> str | None:
    """Create the new root and move this process into it. No other process may be in the mount namespace.

    ``scratch`` is the file system for temporary files, from `create_scratch`. ``kernel_limits`` maps files in
    /proc to their new values, which are written before /proc becomes read-only. ``network``: whether the
    settings of name resolution and TLS are visible.

    Returns the reason why /proc shows the processes of the machine, or None if it shows only
    processes of the namespace. Raises `UnreadablePath` before any change, and OSError if the kernel refuses a
    step.
    """
    folder = os.getcwd()

    # Copy the trees of all visible paths. Only the user's own folders can be writable.
    links: dict[str, str] = {}
    settings = (*SETTINGS, *NETWORK_SETTINGS) if network else SETTINGS
    system_trees = _copy_trees(
        [*SYSTEM, *(f"/etc/{name}" for name in settings)], links, _READ_ONLY_ATTRIBUTES
    )
    device_trees = _copy_trees([f"/dev/{name}" for name in DEVICES], links, kernel.NO_SETUID)
    user_attributes = _READ_ONLY_ATTRIBUTES
    if visible.writable:
        user_attributes &= ~kernel.READ_ONLY
    user_trees = _copy_trees(visible.read, links, user_attributes, owner)
    user_trees += _copy_trees(visible.folders, links, user_attributes, owner, hides_entries=True)
    user_trees += _copy_trees(visible.packages, links, _READ_ONLY_ATTRIBUTES, owner)
    kernel.make_mounts_private()

    # Assemble the new root, then enter it. If a step fails, the process remains in the old root.
    root = kernel.create_file_system("tmpfs", kernel.NO_SETUID | kernel.NO_DEVICES, mode="0755")
    kernel.attach_mounts(root, _STAGE)
    try:
        os.mkdir(_STAGE + _EMPTY, 0o555)
        proc_reason = _mount_proc(kernel_limits)
        _attach_scratch(scratch, owner)
        _write_users(owner)
        _attach_trees([*system_trees, *device_trees], user_trees)
        _create_links(links)
        _create_terminals()
        # Create the current folder, unless it is below a visible folder, which may be read-only.
        with contextlib.suppress(OSError):
            os.makedirs(_STAGE + folder, exist_ok=True)
        kernel.set_mount_attributes(_STAGE, kernel.READ_ONLY, recursive=False)
        os.chdir(_STAGE)
        kernel.system_call("pivot_root", b".", b".")
    except OSError:
        os.chdir("/")
        kernel.unmount(_STAGE)
        os.chdir(folder)
        raise

    # pivot_root of a folder onto itself mounts the old root on top of the new root.
    kernel.unmount(".")
    os.chdir("/")
    with contextlib.suppress(OSError):
        os.chdir(folder)
    return proc_reason


def _copy_trees(
    paths: Iterable[str],
    links: dict[str, str],
    attributes: int,
    owner: Owner | None = None,
    *,
    hides_entries: bool = False,
) -> list[_Tree]:
    """Copy the mounts at ``paths`` and set their attributes; return the copies.

    Symbolic links in the paths are added to ``links`` with their targets. ``owner`` is the user that must
    have access to the paths, or None for paths of the system. ``hides_entries``: whether files and folders
    whose names begin with a dot are hidden in a folder.
    """
    tree_by_path: dict[str, _Tree] = {}
    for path in paths:
        path_links, real_path = resolve_links(path)
        links.update(path_links)
        if real_path == "/":
            raise OSError(errno.EINVAL, "all of / cannot be a part of another root")
        if real_path in tree_by_path or not os.path.exists(real_path):
            continue

        is_folder = os.path.isdir(real_path)
        descriptor = kernel.clone_mounts(real_path)
        # A device in `limits.read` must be usable, so it does not get NO_DEVICES.
        is_device = owner is not None and not is_folder and not os.path.isfile(real_path)
        tree_attributes = kernel.NO_SETUID if is_device else attributes
        _set_tree_attributes(descriptor, real_path, tree_attributes, owner)
        tree_by_path[real_path] = _Tree(real_path, descriptor, is_folder, hides_entries and is_folder)
    return list(tree_by_path.values())


def _set_tree_attributes(
    descriptor: int,
    path: str,
    attributes: int,
    owner: Owner | None,
) -> None:
    """Set the attributes of a tree's mounts, and map its files to ``owner`` if the file system supports it.

    Raises `UnreadablePath` if the owner cannot access the root of the tree.
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
    """Return whether the file permissions allow ``owner`` to access the root of a tree.

    ``descriptor`` is the file descriptor of the tree. Write permission is required unless ``attributes`` are
    read-only.
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
    proc_folder = f"{_STAGE}/proc"
    os.mkdir(proc_folder)
    refusal_reason = None
    try:
        kernel.mount("proc", proc_folder, kernel.NO_SETUID | kernel.NO_DEVICES | kernel.NO_PROGRAMS)
    except OSError as error:
        # The kernel refuses a new /proc in a container in which parts of /proc are hidden.
        refusal_reason = str(error.strerror)
        kernel.attach_mounts(kernel.clone_mounts("/proc"), proc_folder)
    else:
        for path, value in kernel_limits.items():
            with contextlib.suppress(OSError), open(_STAGE + path, "w") as file:
                file.write(value)

    kernel.set_mount_attributes(proc_folder, _READ_ONLY_ATTRIBUTES)
    return refusal_reason


def _attach_scratch(scratch: int, owner: Owner) -> None:
    """Mount /tmp, /dev/shm and the home folder in the new root, all from the file system ``scratch``.

    The three folders share the size of this file system.
    """
    os.mkdir(_STAGE + _SCRATCH)
    kernel.attach_mounts(os.dup(scratch), _STAGE + _SCRATCH)

    home = os.path.abspath(os.path.expanduser("~"))
    for name, mount_point in (("tmp", "/tmp"), ("shm", "/dev/shm"), ("home", home)):
        if mount_point == "/":
            continue
        scratch_folder = f"{_STAGE}{_SCRATCH}/{name}"
        os.mkdir(scratch_folder)
        os.chmod(scratch_folder, 0o1777)
        os.chown(scratch_folder, owner.user, owner.group)
        os.makedirs(_STAGE + mount_point, exist_ok=True)
        # Mount a copy of the folder's mount, which has the same file system.
        kernel.attach_mounts(kernel.clone_mounts(scratch_folder), _STAGE + mount_point)

    os.chmod(_STAGE + _SCRATCH, 0o700)
    os.mkdir(f"{_STAGE}/var")
    os.symlink("../tmp", f"{_STAGE}/var/tmp")
    os.mkdir(f"{_STAGE}/run")


def _write_users(owner: Owner) -> None:
    """Write /etc/passwd and /etc/group of the new root, with only root and the owner."""
    os.mkdir(f"{_STAGE}/etc")
    values = {"user": owner.user, "group": owner.group, "home": os.path.expanduser("~")}
    for name, template in (("passwd", _PASSWD), ("group", _GROUP)):
        with open(f"{_STAGE}/etc/{name}", "w") as file:
            file.write(template.format(**values))


def _attach_trees(system_trees: list[_Tree], user_trees: list[_Tree]) -> None:
    """Attach the trees at their paths in the new root, outer trees before inner trees.

    An inner tree is already visible through its outer tree. It is attached only if the outer tree hides it.
    """
    attached_trees: list[_Tree] = []
    user_paths = [tree.path for tree in user_trees]
    for tree in [*system_trees, *sorted(user_trees, key=lambda tree: tree.path)]:
        # Of several outer trees, the tree with the longest path determines whether this path is hidden.
        outer_trees: list[_Tree] = []
        for attached_tree in attached_trees:
            if f"{tree.path}/".startswith(f"{attached_tree.path}/"):
                outer_trees.append(attached_tree)
        innermost_tree = max(outer_trees, key=lambda outer_tree: len(outer_tree.path), default=None)

        if innermost_tree is None or _is_hidden(tree.path, innermost_tree):
            _attach_tree(tree)
            attached_trees.append(tree)
            if tree.hides_entries:
                _hide_entries(tree.path, user_paths)
        else:
            os.close(tree.descriptor)


def _is_hidden(path: str, outer_tree: _Tree) -> bool:
    """Return whether ``outer_tree`` hides a path below its root.

    A tree with ``hides_entries`` hides the files and folders in its root whose names begin with a dot.
    """
    return outer_tree.hides_entries and path[len(outer_tree.path) :].startswith("/.")


def _attach_tree(tree: _Tree) -> None:
    """Attach a tree at its path in the new root; create an empty file or folder as mount point."""
    target = _STAGE + tree.path
    if tree.is_folder:
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.lexists(target):
            open(target, "x").close()
    kernel.attach_mounts(tree.descriptor, target)


def _hide_entries(folder: str, visible_paths: Iterable[str]) -> None:
    """Hide the files and folders of ``folder`` whose names begin with a dot, by mounts on top of them.

    A path in ``visible_paths`` is not hidden. A hidden folder that contains such a path gets an empty file
    system, in which the path is mounted later.
    """
    for entry in list(os.scandir(_STAGE + folder)):
        path = f"{folder}/{entry.name}"
        if not entry.name.startswith(".") or entry.is_symlink() or path in visible_paths:
            continue

        if not entry.is_dir():
            empty_file = f"{_STAGE}{_EMPTY}.file"
            if not os.path.exists(empty_file):
                open(empty_file, "x").close()
            kernel.attach_mounts(kernel.clone_mounts(empty_file), _STAGE + path)
        elif any(visible_path.startswith(f"{path}/") for visible_path in visible_paths):
            kernel.attach_mounts(kernel.create_file_system("tmpfs", 0, mode="0755"), _STAGE + path)
        else:
            kernel.attach_mounts(kernel.clone_mounts(_STAGE + _EMPTY), _STAGE + path)


def _create_links(links: Mapping[str, str]) -> None:
    """Create symbolic links in the new root; ``links`` maps the path of a link to its target."""
    for link, link_target in links.items():
        # A link inside a visible folder exists already.
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(_STAGE + link), exist_ok=True)
            os.symlink(link_target, _STAGE + link)


def _create_terminals() -> None:
    """Create /dev/stdin and similar links and, if the kernel allows it, terminals in /dev/pts."""
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{_STAGE}/dev/{name}")
    os.mkdir(f"{_STAGE}/dev/pts")
    with contextlib.suppress(OSError):
        options = "newinstance,ptmxmode=0666,mode=0620"
        kernel.mount("devpts", f"{_STAGE}/dev/pts", kernel.NO_SETUID | kernel.NO_PROGRAMS, options)
        os.symlink("pts/ptmx", f"{_STAGE}/dev/ptmx")
