"""System calls of Linux that Python has no function for, each of which raises OSError where it fails."""

from __future__ import annotations

import ctypes
import os
import struct

# From linux/sched.h: what `unshare` gives a process of its own.
NEW_MOUNTS, NEW_HOST_NAME, NEW_IPC = 0x20000, 0x4000000, 0x8000000
NEW_USER, NEW_PROCESSES, NEW_NETWORK, NEW_CONTROL_GROUPS = 0x10000000, 0x20000000, 0x40000000, 0x2000000

# From linux/mount.h: attributes of a mount.
READ_ONLY, NO_SETUID, NO_DEVICES, NO_PROGRAMS, MAP_OWNERS = 1, 2, 4, 8, 0x100000

# From linux/prctl.h.
SET_PARENT_DEATH_SIGNAL, SET_DUMPABLE, DROP_FROM_BOUNDING_SET = 1, 4, 24
SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVILEGES = 36, 38

# Numbers of system calls: those since Linux 4.20 are the same on every machine.
OPEN_TREE, MOVE_MOUNT, OPEN_FILE_SYSTEM, CONFIGURE_FILE_SYSTEM, MOUNT_FILE_SYSTEM = 428, 429, 430, 431, 432
SET_MOUNT_ATTRIBUTES = 442
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
_BY_MACHINE = {
    "x86_64": {"pivot_root": 155, "capset": 126, "seccomp": 317},
    "aarch64": {"pivot_root": 41, "capset": 91, "seccomp": 277},
}

_CURRENT_FOLDER = -100
_EMPTY_PATH, _RECURSIVE = 0x1000, 0x8000
_CLONE_TREE, _FROM_DESCRIPTOR = 1, 4
_SET_STRING, _CREATE = 1, 6
_CLOSE_ON_EXEC = 1
_PRIVATE, _MS_RECURSIVE = 1 << 18, 0x4000
_DETACH = 2
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def system_call(number: int | str, *arguments: int | bytes | ctypes.Array) -> int:
    """Make a system call, by number or by a name of `_BY_MACHINE`, which fails on other machines."""
    if isinstance(number, str):
        number = _BY_MACHINE.get(os.uname().machine, {}).get(number, -1)
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *converted))


def process_control(option: int, value: int) -> int:
    """Call prctl with one value."""
    return _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def unshare(spaces: int) -> None:
    """Move this process, and its next child where that is meant, into namespaces of their own."""
    _checked(_libc.unshare(spaces))


def make_mounts_private() -> None:
    """Keep what is mounted in this namespace from every other one."""
    _checked(_libc.mount(None, b"/", None, ctypes.c_ulong(_MS_RECURSIVE | _PRIVATE), None))


def mount(kind: str, target: str, attributes: int, options: str = "") -> None:
    """Mount a new file system of ``kind``."""
    name = kind.encode()
    _checked(_libc.mount(name, os.fsencode(target), name, ctypes.c_ulong(attributes), options.encode()))


def new_file_system(kind: str, attributes: int, **options: str) -> int:
    """Return the descriptor of a new file system that is mounted nowhere yet."""
    context = system_call(OPEN_FILE_SYSTEM, kind.encode(), _CLOSE_ON_EXEC)
    try:
        for name, value in options.items():
            system_call(CONFIGURE_FILE_SYSTEM, context, _SET_STRING, name.encode(), value.encode(), 0)
        system_call(CONFIGURE_FILE_SYSTEM, context, _CREATE, 0, 0, 0)
        return system_call(MOUNT_FILE_SYSTEM, context, _CLOSE_ON_EXEC, attributes)
    finally:
        os.close(context)


def copy_of_tree(path: str) -> int:
    """Return the descriptor of a copy of the mounts at and below ``path``, mounted nowhere yet."""
    flags = os.O_CLOEXEC | _CLONE_TREE | _RECURSIVE
    return system_call(OPEN_TREE, _CURRENT_FOLDER, os.fsencode(path), flags)


def set_mount_attributes(
    mounted: int | str, attributes: int, owners: int = 0, *, recursive: bool = True
) -> None:
    """Set attributes of the mount at a descriptor or a path, and of all below it.

    With `MAP_OWNERS`, ``owners`` is the descriptor of the user namespace whose mapping files have.
    """
    packed = struct.pack("QQQQ", attributes, 0, 0, owners)
    folder, path = (mounted, b"") if isinstance(mounted, int) else (_CURRENT_FOLDER, os.fsencode(mounted))
    flags = _EMPTY_PATH | (_RECURSIVE if recursive else 0)
    system_call(SET_MOUNT_ATTRIBUTES, folder, path, flags, packed, len(packed))


def attach(tree: int, target: str) -> None:
    """Mount the tree of a descriptor at ``target``, an existing file or folder of its kind."""
    system_call(MOVE_MOUNT, tree, b"", _CURRENT_FOLDER, os.fsencode(target), _FROM_DESCRIPTOR)


def unmount(path: str) -> None:
    """Take a file system, and what is mounted below it, out of the tree."""
    _checked(_libc.umount2(os.fsencode(path), _DETACH))


def drop_bounding_set() -> None:
    """Keep programs that this process starts from every capability; needs one, where it has any."""
    for capability in range(64):
        _libc.prctl(DROP_FROM_BOUNDING_SET, ctypes.c_ulong(capability), 0, 0, 0)


def drop_capabilities() -> None:
    """Give up every capability of this process and of all that it will start."""
    process_control(SET_NO_NEW_PRIVILEGES, 1)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    system_call("capset", header, bytes(24))


def _checked(status: int) -> int:
    if status == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(status)
