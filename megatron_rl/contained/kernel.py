"""Linux system calls without a function in Python. Each function raises OSError if the kernel refuses it."""

from __future__ import annotations

import ctypes
import os
import struct

# Namespaces of `unshare`, from linux/sched.h.
NEW_MOUNTS = 0x20000
NEW_CONTROL_GROUPS = 0x2000000
NEW_HOST_NAME = 0x4000000
NEW_IPC = 0x8000000
NEW_USER = 0x10000000
NEW_PROCESSES = 0x20000000
NEW_NETWORK = 0x40000000

# Attributes of a mount, from linux/mount.h.
READ_ONLY = 1
NO_SETUID = 2
NO_DEVICES = 4
NO_EXEC = 8
MAP_OWNERS = 0x100000

# Options of `process_control`, from linux/prctl.h.
SET_PARENT_DEATH_SIGNAL = 1
SET_DUMPABLE = 4
DROP_FROM_BOUNDING_SET = 24
SET_CHILD_SUBREAPER = 36
SET_NO_NEW_PRIVILEGES = 38

# System calls since Linux 4.20, which have one number on every machine.
OPEN_TREE = 428
MOVE_MOUNT = 429
OPEN_FILE_SYSTEM = 430
CONFIGURE_FILE_SYSTEM = 431
MOUNT_FILE_SYSTEM = 432
SET_MOUNT_ATTRIBUTES = 442
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446

# Older system calls, whose numbers depend on the machine.
_BY_MACHINE = {
    "x86_64": {"pivot_root": 155, "capset": 126, "seccomp": 317},
    "aarch64": {"pivot_root": 41, "capset": 91, "seccomp": 277},
}

# Flags of the calls below, from linux/fcntl.h, linux/mount.h and linux/capability.h.
_CURRENT_FOLDER = -100
_EMPTY_PATH = 0x1000
_RECURSIVE = 0x8000
_CLONE_TREE = 1
_FROM_DESCRIPTOR = 4
_SET_STRING = 1
_CREATE = 6
_CLOSE_ON_EXEC = 1
_PRIVATE = 1 << 18
_MS_RECURSIVE = 0x4000
_DETACH = 2
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITY_COUNT = 64
"""Number of capabilities in the kernel's interface; numbers without a capability are ignored."""

_libc = ctypes.CDLL(None, use_errno=True)


def system_call(number: int | str, *arguments: int | bytes | ctypes.Array) -> int:
    """Make a system call by its number, or by a name in `_BY_MACHINE`; raises OSError if it fails.

    A call by name also fails on a machine without an entry in `_BY_MACHINE`.
    """
    if isinstance(number, str):
        number = _BY_MACHINE.get(os.uname().machine, {}).get(number, -1)
    c_arguments = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _raise_if_failed(_libc.syscall(ctypes.c_long(number), *c_arguments))


def process_control(option: int, value: int) -> int:
    """Set an option of this process with prctl."""
    return _raise_if_failed(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def unshare(namespace_flags: int) -> None:
    """Move this process into new namespaces; only its later children enter a new PID namespace.

    ``namespace_flags`` are constants such as `NEW_MOUNTS`, joined by ``|``.
    """
    _raise_if_failed(_libc.unshare(namespace_flags))


def make_mounts_private() -> None:
    """Stop mounts in this namespace from appearing in other namespaces."""
    _raise_if_failed(_libc.mount(None, b"/", None, ctypes.c_ulong(_MS_RECURSIVE | _PRIVATE), None))


def mount(
    file_system_type: str,
    target: str,
    mount_flags: int,
    options: str = "",
) -> None:
    """Mount a new file system of a type, such as tmpfs, at the path ``target``.

    ``mount_flags``: MS_* constants of mount(2). ``options``: options of the type, such as ``size=1m``.
    """
    encoded_type = file_system_type.encode()
    flags = ctypes.c_ulong(mount_flags)
    _raise_if_failed(_libc.mount(encoded_type, os.fsencode(target), encoded_type, flags, options.encode()))


def create_file_system(file_system_type: str, attributes: int, **options: str) -> int:
    """Create a file system with fsopen and fsmount; return its descriptor for `attach_mounts`.

    ``attributes`` are attributes of the mount. ``options`` are options of the type, such as ``size="1m"``.
    """
    context = system_call(OPEN_FILE_SYSTEM, file_system_type.encode(), _CLOSE_ON_EXEC)
    try:
        for name, value in options.items():
            system_call(CONFIGURE_FILE_SYSTEM, context, _SET_STRING, name.encode(), value.encode(), 0)
        system_call(CONFIGURE_FILE_SYSTEM, context, _CREATE, 0, 0, 0)
        return system_call(MOUNT_FILE_SYSTEM, context, _CLOSE_ON_EXEC, attributes)
    finally:
        os.close(context)


def clone_mounts(path: str) -> int:
    """Clone the mounts at and below ``path`` with open_tree; return a descriptor for `attach_mounts`."""
    flags = os.O_CLOEXEC | _CLONE_TREE | _RECURSIVE
    return system_call(OPEN_TREE, _CURRENT_FOLDER, os.fsencode(path), flags)


def set_mount_attributes(
    target: int | str,
    attributes: int,
    owner_namespace: int = 0,
    *,
    recursive: bool = True,
) -> None:
    """Set attributes of the mount at a descriptor or a path and, if ``recursive``, of all mounts below it.

    With `MAP_OWNERS`, ``owner_namespace`` is the descriptor of a user namespace, which maps the owners of the
    files.
    """
    # struct mount_attr: attributes to set, attributes to clear, propagation, user namespace.
    packed_attributes = struct.pack("QQQQ", attributes, 0, 0, owner_namespace)
    flags = _EMPTY_PATH
    if recursive:
        flags |= _RECURSIVE

    # mount_setattr takes the descriptor of a folder, and a path relative to the folder. An empty path means
    # the folder itself.
    folder = _CURRENT_FOLDER
    path = b""
    if isinstance(target, int):
        folder = target
    else:
        path = os.fsencode(target)
    system_call(SET_MOUNT_ATTRIBUTES, folder, path, flags, packed_attributes, len(packed_attributes))


def attach_mounts(descriptor: int, target: str) -> None:
    """Mount a file system at the path ``target``, and close its descriptor.

    ``descriptor`` is the result of `create_file_system` or `clone_mounts`. ``target`` must exist: a folder to
    mount a folder, or a file to mount a file.
    """
    try:
        system_call(MOVE_MOUNT, descriptor, b"", _CURRENT_FOLDER, os.fsencode(target), _FROM_DESCRIPTOR)
    finally:
        # Sandboxed code must not inherit the descriptor, and has a low limit of open files.
        os.close(descriptor)


def unmount(path: str) -> None:
    """Unmount a file system and all mounts below it; open files remain usable."""
    _raise_if_failed(_libc.umount2(os.fsencode(path), _DETACH))


def drop_bounding_set() -> None:
    """Drop the capability bounding set, so that a started program cannot gain capabilities.

    Has no effect in a process without CAP_SETPCAP.
    """
    for capability in range(_CAPABILITY_COUNT):
        _libc.prctl(DROP_FROM_BOUNDING_SET, ctypes.c_ulong(capability), 0, 0, 0)


def drop_capabilities() -> None:
    """Drop every capability of this process and of its future children."""
    process_control(SET_NO_NEW_PRIVILEGES, 1)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    system_call("capset", header, bytes(24))


def _raise_if_failed(status: int) -> int:
    """Return the result of a system call; raise OSError with errno if it is -1."""
    if status == -1:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))
    return int(status)
