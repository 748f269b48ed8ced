"""What the kernel refuses a process for the rest of its life: system calls (seccomp) and paths (Landlock).

System calls are refused that change or look into the machine (mounts, namespaces, modules, other processes),
that much of the kernel's own code is behind (io_uring, bpf, userfaultfd, keys), or that hold memory which
no limit of a process counts (memfd, System V). Those that are newer than this list do not exist.

Landlock allows paths, without a namespace, where namespaces are not to be had.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterable, Sequence

from megatron_rl.contained import kernel

# Numbers of refused system calls on x86_64 and aarch64; None where the machine has none of the name.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "_sysctl": (156, None),
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "uselib": (134, None),
    "vhangup": (153, 58),
}
_NEWEST = 462
"""The last system call that this list was written with (mseal, Linux 6.10)."""
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # from linux/audit.h
_CLONE, _CLONE3, _IOCTL, _SOCKET = (56, 220), 435, (16, 29), (41, 198)
_ALL_SPACES = (
    kernel.NEW_MOUNTS
    | kernel.NEW_HOST_NAME
    | kernel.NEW_IPC
    | kernel.NEW_USER
    | kernel.NEW_PROCESSES
    | kernel.NEW_NETWORK
    | kernel.NEW_CONTROL_GROUPS
)
_TYPE_INTO_TERMINAL, _TERMINAL_SELECTION = 0x5412, 0x541C

# From linux/seccomp.h and linux/bpf_common.h.
_SET_MODE_FILTER, _ALLOW, _ERROR = 1, 0x7FFF0000, 0x50000
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24

# From linux/landlock.h: rights of a path that only read, and their whole number by version.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER, _TRUNCATE, _USE_DEVICE = 1, 2, 4, 8, 1 << 14, 1 << 15
_RIGHTS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15}
_NEWEST_RIGHTS = 16
SCOPES_SINCE = 6
"""The version of Landlock that keeps from abstract sockets and from signals."""
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
_PATH_RULE = 1


def filter_system_calls(families: Sequence[int], refusal: int = errno.EAFNOSUPPORT) -> None:
    """Refuse dangerous system calls from here on, and sockets of other families with the error ``refusal``.

    Raises OSError where the kernel, or this kind of machine, has no filters.
    """
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    column = list(_MACHINES).index(machine)
    program = [
        _instruction(_LOAD, _MACHINE),
        _instruction(_EQUAL, _MACHINES[machine], 1, 0),
        _refuse(errno.ENOSYS),
        _instruction(_LOAD, _NUMBER),
        _instruction(_GREATER, _NEWEST, 0, 1),
        _refuse(errno.ENOSYS),
        # The flags of this one are in memory, out of a filter's reach; programs take `clone` in its place.
        *_where(_CLONE3, [_refuse(errno.ENOSYS)]),
    ]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            program += _where(number, [_refuse(errno.EPERM)])

    spaces = [
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_ANY_BIT, _ALL_SPACES, 0, 1),
        _refuse(errno.EPERM),
        _allow(),
    ]
    program += _where(_CLONE[column], spaces)

    typing = [_instruction(_LOAD, _SECOND_ARGUMENT)]
    for request in (_TYPE_INTO_TERMINAL, _TERMINAL_SELECTION):
        typing += _where(request, [_refuse(errno.EPERM)])
    program += _where(_IOCTL[column], [*typing, _allow()])

    sockets = [_instruction(_LOAD, _FIRST_ARGUMENT)]
    for family in families:
        sockets += _where(family, [_allow()])
    program += _where(_SOCKET[column], [*sockets, _refuse(refusal)])
    program.append(_allow())

    instructions = b"".join(program)
    held = ctypes.create_string_buffer(instructions)
    packed = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(held))
    kernel.system_call("seccomp", _SET_MODE_FILTER, 0, packed)


def families_of(*, network: bool, local: bool) -> list[int]:
    """Return the families of sockets that code may have: those of the ``network``, and ``local`` ones."""
    # Name resolution and libraries that list interfaces ask the kernel by netlink.
    families: list[int] = []
    if network:
        families += [socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK]
    if local:
        families.append(socket.AF_UNIX)
    return families


def landlock_version() -> int:
    """Return the version of the kernel's Landlock, 0 where it has none."""
    try:
        return kernel.system_call(kernel.LANDLOCK_CREATE_RULESET, 0, 0, 1)
    except OSError:
        return 0


def restrict_scope() -> bool:
    """Keep this process from abstract sockets of others and from signalling them; return whether it is."""
    if landlock_version() < SCOPES_SINCE:
        return False
    _restrict(0, _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS, {})
    return True


def restrict_paths(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Keep this process from all files but those at or below the paths; raises OSError where it cannot be."""
    version = landlock_version()
    if not version:
        raise OSError(errno.ENOSYS, "no Landlock")
    everything = (1 << _RIGHTS_BY_VERSION.get(version, _NEWEST_RIGHTS)) - 1
    only_reading = (_EXECUTE | _READ_FILE | _READ_FOLDER) & everything
    rights = dict.fromkeys(readable, only_reading) | dict.fromkeys(writable, everything)
    scopes = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= SCOPES_SINCE else 0
    _restrict(everything, scopes, rights)


def _restrict(handled: int, scopes: int, rights: dict[str, int]) -> None:
    attributes = struct.pack("QQQ", handled, 0, scopes)
    size = len(attributes) if scopes else 8
    rules = kernel.system_call(kernel.LANDLOCK_CREATE_RULESET, attributes, size, 0)
    try:
        for path, allowed in rights.items():
            with contextlib.suppress(FileNotFoundError):
                entry = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    of_a_file = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _USE_DEVICE
                    bits = allowed if os.path.isdir(path) else allowed & of_a_file & handled
                    rule = struct.pack("=Qi", bits, entry)
                    kernel.system_call(kernel.LANDLOCK_ADD_RULE, rules, _PATH_RULE, rule, 0)
                finally:
                    os.close(entry)
        kernel.system_call(kernel.LANDLOCK_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _instruction(code: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, when_true, when_false, value)


def _where(value: int, then: list[bytes]) -> list[bytes]:
    """Return a block that runs only where the loaded word is ``value``."""
    return [_instruction(_EQUAL, value, 0, len(then)), *then]


def _refuse(error: int) -> bytes:
    return _instruction(_RETURN, _ERROR | error)


def _allow() -> bytes:
    return _instruction(_RETURN, _ALLOW)
