"""The root of contained code: a file system in memory in which what is visible is mounted, and nothing else.

Everything is opened before anything is mounted over it: first the trees of what is visible, as copies that
are mounted nowhere, then the new root, then each tree at its path. The old root is unmounted at the end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_rl.contained import kernel
from megatron_rl.contained.visible import DEVICES, NETWORK_SETTINGS, SETTINGS, SYSTEM, Visible, links_to

MOST_SCRATCH_FILES = 2**18
"""Files in the temporary folders: each takes memory of the kernel, even an empty one."""
_STAGE = "/tmp"
"""Where the new root is put together; what was there has been opened by then."""
_SCRATCH, _NOTHING = "/.scratch", "/.nothing"
_FIXED = kernel.READ_ONLY | kernel.NO_SETUID | kernel.NO_DEVICES
_USERS = "root:x:0:0::/:/bin/sh\nuser:x:{user}:{group}::{home}:/bin/sh\n"
_GROUPS = "root:x:0:\nuser:x:{group}:\n"


class Unreadable(Exception):
    """A path that is visible may not be read, or written, by the user that contained code would be."""


@dataclass(frozen=True)
class Owner:
    """The user that contained code is.

    ``namespace`` is the descriptor of a user namespace in which this user stands for the trainer's: what is
    mounted with it belongs to the one as on disk to the other.
    """

    user: int
    group: int
    namespace: int | None = None


@dataclass(frozen=True)
class _Tree:
    """A copy of the mounts at a path without links; ``hides`` leaves out the hidden entries of a folder."""

    path: str
    descriptor: int
    is_folder: bool
    hides: bool = False


def new_scratch(size: int) -> int:
    """Return the descriptor of a file system in memory for temporary files, of at most ``size`` bytes."""
    attributes = kernel.NO_SETUID | kernel.NO_DEVICES
    return kernel.new_file_system("tmpfs", attributes, size=str(size), nr_inodes=str(MOST_SCRATCH_FILES))


def change_root(
    visible: Visible, scratch: int, owner: Owner, kernel_limits: Mapping[str, str], *, network: bool
) -> str | None:
    """Move this process, alone in its mount namespace, into the new root.

    ``kernel_limits`` is written to files of /proc, which nobody can write to afterwards: some of them are
    settings of the machine. Returns why /proc shows processes of the whole machine, None where it does not.
    Raises `Unreadable` before anything has changed, OSError where the kernel does not allow it.
    """
    folder = os.getcwd()
    links: dict[str, str] = {}
    names = (*SETTINGS, *NETWORK_SETTINGS) if network else SETTINGS
    system = _trees([*SYSTEM, *(f"/etc/{name}" for name in names)], links, _FIXED)
    devices = _trees([f"/dev/{name}" for name in DEVICES], links, kernel.NO_SETUID)
    own = _FIXED & ~kernel.READ_ONLY if visible.writable else _FIXED
    user = _trees(visible.read, links, own, owner)
    user += _trees(visible.folders, links, own, owner, hides=True)
    user += _trees(visible.packages, links, _FIXED, owner)
    kernel.make_mounts_private()

    root = kernel.new_file_system("tmpfs", kernel.NO_SETUID | kernel.NO_DEVICES, mode="0755")
    kernel.attach(root, _STAGE)
    try:
        os.mkdir(_STAGE + _NOTHING, 0o555)
        reason = _mount_proc(kernel_limits)
        _attach_scratch(scratch, owner)
        _write_users(owner)
        _attach_all([*system, *devices], user)
        _make_links(links)
        _make_terminals()
        with contextlib.suppress(OSError):  # below a folder that is visible it exists
            os.makedirs(_STAGE + folder, exist_ok=True)
        kernel.set_mount_attributes(_STAGE, kernel.READ_ONLY, recursive=False)
        os.chdir(_STAGE)
        kernel.system_call("pivot_root", b".", b".")
    except OSError:
        os.chdir("/")
        kernel.unmount(_STAGE)
        os.chdir(folder)
        raise

    kernel.unmount(".")
    os.chdir("/")
    with contextlib.suppress(OSError):
        os.chdir(folder)
    return reason


def _trees(
    paths: Iterable[str],
    links: dict[str, str],
    attributes: int,
    owner: Owner | None = None,
    *,
    hides: bool = False,
) -> list[_Tree]:
    """Return copies of the mounts at ``paths``, with the attributes; ``links`` gets the links on the way."""
    trees: dict[str, _Tree] = {}
    for path in paths:
        on_the_way, real = links_to(path)
        links.update(on_the_way)
        if real == "/":
            raise OSError(errno.EINVAL, "all of / cannot be a part of another root")
        if real in trees or not os.path.exists(real):
            continue
        is_folder = os.path.isdir(real)
        tree = kernel.copy_of_tree(real)
        # A device that the user names is for use.
        is_device = owner is not None and not (is_folder or os.path.isfile(real))
        _restrict(tree, real, kernel.NO_SETUID if is_device else attributes, owner)
        trees[real] = _Tree(real, tree, is_folder, hides and is_folder)
    return list(trees.values())


def _restrict(tree: int, path: str, attributes: int, owner: Owner | None) -> None:
    """Set the attributes of a copy, and have it belong to ``owner`` where its file system can do that."""
    mapped = False
    if owner is not None and owner.namespace is not None:
        with contextlib.suppress(OSError):
            kernel.set_mount_attributes(tree, attributes | kernel.MAP_OWNERS, owner.namespace)
            mapped = True
    if not mapped:
        kernel.set_mount_attributes(tree, attributes)
    if owner is not None and owner.user != os.getuid() and not _allows(tree, owner, attributes):
        raise Unreadable(path)


def _allows(tree: int, owner: Owner, attributes: int) -> bool:
    """Return whether the permissions of a tree's first entry let ``owner`` use it as the attributes do."""
    status = os.fstat(tree)
    wanted = 0o5 if stat.S_ISDIR(status.st_mode) else 0o4
    if not attributes & kernel.READ_ONLY:
        wanted |= 0o2
    return status.st_uid == owner.user or status.st_mode & wanted == wanted


def _mount_proc(kernel_limits: Mapping[str, str]) -> str | None:
    """Mount /proc of this process's own namespace in the new root, or of the machine, which is the reason."""
    target = f"{_STAGE}/proc"
    os.mkdir(target)
    reason = None
    try:
        kernel.mount("proc", target, kernel.NO_SETUID | kernel.NO_DEVICES | kernel.NO_PROGRAMS)
    except OSError as error:
        # In a container whose own /proc is covered in part.
        reason = str(error.strerror)
        kernel.attach(kernel.copy_of_tree("/proc"), target)
    else:
        for path, value in kernel_limits.items():
            with contextlib.suppress(OSError), open(_STAGE + path, "w") as file:
                file.write(value)
    kernel.set_mount_attributes(target, _FIXED)
    return reason


def _attach_scratch(scratch: int, owner: Owner) -> None:
    """Make /tmp, /dev/shm and the home folders of one file system, whose size bounds them together."""
    os.mkdir(_STAGE + _SCRATCH)
    kernel.attach(scratch, _STAGE + _SCRATCH)
    home = os.path.abspath(os.path.expanduser("~"))
    for name, target in (("tmp", "/tmp"), ("shm", "/dev/shm"), ("home", home)):
        if target == "/":
            continue
        part = f"{_STAGE}{_SCRATCH}/{name}"
        os.mkdir(part)
        os.chmod(part, 0o1777)
        os.chown(part, owner.user, owner.group)
        os.makedirs(_STAGE + target, exist_ok=True)
        kernel.attach(kernel.copy_of_tree(part), _STAGE + target)
    os.chmod(_STAGE + _SCRATCH, 0o700)
    os.mkdir(f"{_STAGE}/var")
    os.symlink("../tmp", f"{_STAGE}/var/tmp")
    os.mkdir(f"{_STAGE}/run")


def _write_users(owner: Owner) -> None:
    """Name the owner, as which programs look themselves up, and nobody else."""
    os.mkdir(f"{_STAGE}/etc")
    names = {"user": owner.user, "group": owner.group, "home": os.path.expanduser("~")}
    for name, text in (("passwd", _USERS), ("group", _GROUPS)):
        with open(f"{_STAGE}/etc/{name}", "w") as file:
            file.write(text.format(**names))


def _attach_all(system: list[_Tree], user: list[_Tree]) -> None:
    """Mount the trees at their paths; one inside another needs that only where it is hidden there."""
    attached: list[_Tree] = []
    paths = [tree.path for tree in user]
    for tree in [*system, *sorted(user, key=lambda tree: tree.path)]:
        outer = [other for other in attached if f"{tree.path}/".startswith(f"{other.path}/")]
        around = max(outer, key=lambda other: len(other.path), default=None)
        if around is None or _is_hidden(tree.path, around):
            _attach(tree)
            attached.append(tree)
            if tree.hides:
                _hide_entries(tree.path, paths)
        os.close(tree.descriptor)


def _is_hidden(path: str, around: _Tree) -> bool:
    return around.hides and path[len(around.path) :].startswith("/.")


def _attach(tree: _Tree) -> None:
    target = _STAGE + tree.path
    if tree.is_folder:
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.lexists(target):
            open(target, "x").close()
    kernel.attach(tree.descriptor, target)


def _hide_entries(folder: str, visible: Iterable[str]) -> None:
    """Cover the hidden entries of an attached folder, but for those with something visible below."""
    for entry in list(os.scandir(_STAGE + folder)):
        path = f"{folder}/{entry.name}"
        if not entry.name.startswith(".") or entry.is_symlink() or path in visible:
            continue
        if not entry.is_dir():
            empty = f"{_STAGE}{_NOTHING}.file"
            if not os.path.exists(empty):
                open(empty, "x").close()
            kernel.attach(kernel.copy_of_tree(empty), _STAGE + path)
        elif any(other.startswith(f"{path}/") for other in visible):
            kernel.attach(kernel.new_file_system("tmpfs", 0, mode="0755"), _STAGE + path)
        else:
            kernel.attach(kernel.copy_of_tree(_STAGE + _NOTHING), _STAGE + path)


def _make_links(links: Mapping[str, str]) -> None:
    for link, text in links.items():
        with contextlib.suppress(OSError):  # in a folder that is visible it exists
            os.makedirs(os.path.dirname(_STAGE + link), exist_ok=True)
            os.symlink(text, _STAGE + link)


def _make_terminals() -> None:
    """Make standard streams' names, and terminals of this root's own where the kernel allows any."""
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{_STAGE}/dev/{name}")
    os.mkdir(f"{_STAGE}/dev/pts")
    with contextlib.suppress(OSError):
        options = "newinstance,ptmxmode=0666,mode=0620"
        kernel.mount("devpts", f"{_STAGE}/dev/pts", kernel.NO_SETUID | kernel.NO_PROGRAMS, options)
        os.symlink("pts/ptmx", f"{_STAGE}/dev/ptmx")
