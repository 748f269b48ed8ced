"""Restrict this process irreversibly: its system calls with seccomp, its paths with Landlock.

Refused system calls change or inspect the machine (mounts, namespaces, modules, other processes), expose
large parts of the kernel's code (io_uring, bpf, userfaultfd, keys), or allocate memory that no limit of a
process covers (memfd, System V). System calls that Linux added after this list was written fail with ENOSYS.

Landlock also restricts paths on kernels and in containers that do not allow namespaces.
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
"""Name of a refused system call -> its numbers on x86_64 and aarch64, None on a machine without the call."""
_NEWEST = 462
"""Number of the newest system call in Linux 6.10, for which the list was written (mseal)."""
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machines with their numbers for seccomp, in the order of the columns above; from linux/audit.h."""

# System calls that are refused depending on their arguments; like the table, on x86_64 and aarch64.
_CLONE = (56, 220)
_CLONE3 = 435
_IOCTL = (16, 29)
_SOCKET = (41, 198)
_ALL_NAMESPACES = (
    kernel.NEW_MOUNTS
    | kernel.NEW_HOST_NAME
    | kernel.NEW_IPC
    | kernel.NEW_USER
    | kernel.NEW_PROCESSES
    | kernel.NEW_NETWORK
    | kernel.NEW_CONTROL_GROUPS
)
_TYPE_INTO_TERMINAL = 0x5412
"""TIOCSTI, which types into the terminal from which the trainer was started."""
_TERMINAL_SELECTION = 0x541C
"""TIOCLINUX, which can paste into a console."""

# Instructions and actions of a filter, from linux/bpf_common.h and linux/seccomp.h.
_SET_MODE_FILTER = 1
_ALLOW = 0x7FFF0000
_ERROR = 0x50000
_LOAD = 0x20
_EQUAL = 0x15
_GREATER = 0x25
_ANY_BIT = 0x45
_RETURN = 0x06

# Offsets of a call's fields in struct seccomp_data; for 64-bit arguments, of the lower half.
_NUMBER = 0
_MACHINE = 4
_FIRST_ARGUMENT = 16
_SECOND_ARGUMENT = 24

# Rights to a path, from linux/landlock.h. Each version of Landlock supports the first N rights.
_EXECUTE = 1
_WRITE_FILE = 2
_READ_FILE = 4
_READ_FOLDER = 8
_TRUNCATE = 1 << 14
_USE_DEVICE = 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _USE_DEVICE
"""Rights that apply to files; the others apply only to folders."""
_RIGHTS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15}
_NEWEST_RIGHTS = 16
_VERSION_FLAG = 1
"""Flag with which landlock_create_ruleset returns the version."""
SCOPES_SINCE = 6
"""The first version of Landlock that can refuse abstract sockets and signals."""
_SCOPE_ABSTRACT_SOCKETS = 1
_SCOPE_SIGNALS = 2
_PATH_RULE = 1


def filter_system_calls(socket_families: Sequence[int], socket_error: int = errno.EAFNOSUPPORT) -> None:
    """Refuse dangerous system calls of this process, and sockets outside of ``socket_families``.

    Opening a refused socket fails with the error number ``socket_error``. Raises OSError if the kernel has no
    seccomp filters, or if `_REFUSED` lacks the system call numbers of this CPU architecture.
    """
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    machine_column = list(_MACHINES).index(machine)

    # Refuse calls of other architectures, such as 32-bit calls, whose numbers have other meanings. Refuse
    # calls that are newer than this list.
    program = [
        _encode_instruction(_LOAD, _MACHINE),
        _encode_instruction(_EQUAL, _MACHINES[machine], 1, 0),
        _encode_refusal(errno.ENOSYS),
        _encode_instruction(_LOAD, _NUMBER),
        _encode_instruction(_GREATER, _NEWEST, 0, 1),
        _encode_refusal(errno.ENOSYS),
        # The flags of clone3 are in memory, which a filter cannot read; programs fall back to clone.
        *_encode_if_equal(_CLONE3, [_encode_refusal(errno.ENOSYS)]),
    ]

    # Refuse the listed calls.
    for numbers in _REFUSED.values():
        number = numbers[machine_column]
        if number is not None:
            program += _encode_if_equal(number, [_encode_refusal(errno.EPERM)])

    # Allow clone to start processes and threads, but not to create namespaces.
    clone_block = [
        _encode_instruction(_LOAD, _FIRST_ARGUMENT),
        _encode_instruction(_ANY_BIT, _ALL_NAMESPACES, 0, 1),
        _encode_refusal(errno.EPERM),
        _encode_allowance(),
    ]
    program += _encode_if_equal(_CLONE[machine_column], clone_block)

    # Refuse requests that write input into a terminal.
    terminal_block = [_encode_instruction(_LOAD, _SECOND_ARGUMENT)]
    for request in (_TYPE_INTO_TERMINAL, _TERMINAL_SELECTION):
        terminal_block += _encode_if_equal(request, [_encode_refusal(errno.EPERM)])
    program += _encode_if_equal(_IOCTL[machine_column], [*terminal_block, _encode_allowance()])

    # Refuse sockets of all families but the given ones. Then allow every call that has not been refused.
    socket_block = [_encode_instruction(_LOAD, _FIRST_ARGUMENT)]
    for socket_family in socket_families:
        socket_block += _encode_if_equal(socket_family, [_encode_allowance()])
    program += _encode_if_equal(_SOCKET[machine_column], [*socket_block, _encode_refusal(socket_error)])
    program.append(_encode_allowance())

    # struct sock_fprog: number and address of the instructions, which must exist until the call returns.
    instructions = ctypes.create_string_buffer(b"".join(program))
    program_header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(instructions))
    kernel.system_call("seccomp", _SET_MODE_FILTER, 0, program_header)


def allowed_socket_families(*, network: bool, local: bool) -> list[int]:
    """Return the socket families to allow: network families if ``network``, local sockets if ``local``."""
    socket_families: list[int] = []
    if network:
        # Name resolution and libraries that list network interfaces use netlink.
        socket_families += [socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK]
    if local:
        socket_families.append(socket.AF_UNIX)
    return socket_families


def landlock_version() -> int:
    """Return the Landlock ABI version of the kernel, or 0 for a kernel without Landlock."""
    try:
        return kernel.system_call(kernel.LANDLOCK_CREATE_RULESET, 0, 0, _VERSION_FLAG)
    except OSError:
        return 0


def restrict_sockets_and_signals() -> bool:
    """Use Landlock to deny signals to other processes, and connections to their abstract sockets.

    Returns whether this kernel's version of Landlock supports these restrictions.
    """
    if landlock_version() < SCOPES_SINCE:
        return False
    _apply_landlock_rules(0, _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS, {})
    return True


def restrict_paths(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Deny access to all files except at and below the ``readable`` and ``writable`` paths, with Landlock.

    Since version `SCOPES_SINCE` of Landlock, signals to other processes and connections to their abstract
    sockets are also denied. Raises OSError if the kernel has no Landlock.
    """
    version = landlock_version()
    if not version:
        raise OSError(errno.ENOSYS, "no Landlock")

    all_rights = (1 << _RIGHTS_BY_VERSION.get(version, _NEWEST_RIGHTS)) - 1
    read_rights = (_EXECUTE | _READ_FILE | _READ_FOLDER) & all_rights
    rights_by_path = dict.fromkeys(readable, read_rights) | dict.fromkeys(writable, all_rights)
    scopes = 0
    if version >= SCOPES_SINCE:
        scopes = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS
    _apply_landlock_rules(all_rights, scopes, rights_by_path)


def _apply_landlock_rules(
    handled_rights: int,
    refused_scopes: int,
    rights_by_path: dict[str, int],
) -> None:
    """Deny the ``handled_rights`` for all paths, except for the rights in ``rights_by_path``.

    ``refused_scopes`` are the Landlock flags that deny abstract sockets and signals, or 0 to allow both.
    """
    # struct landlock_ruleset_attr. Without scopes, pass only its first field, as older kernels require.
    attributes = struct.pack("QQQ", handled_rights, 0, refused_scopes)
    attributes_size = len(attributes) if refused_scopes else 8
    ruleset = kernel.system_call(kernel.LANDLOCK_CREATE_RULESET, attributes, attributes_size, 0)

    try:
        for path, path_rights in rights_by_path.items():
            # Skip a path that does not exist.
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    allowed_rights = path_rights
                    if not os.path.isdir(path):
                        allowed_rights = path_rights & _FILE_RIGHTS & handled_rights
                    rule = struct.pack("=Qi", allowed_rights, descriptor)
                    kernel.system_call(kernel.LANDLOCK_ADD_RULE, ruleset, _PATH_RULE, rule, 0)
                finally:
                    os.close(descriptor)

        kernel.system_call(kernel.LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _encode_instruction(
    code: int,
    value: int,
    skip_if_true: int = 0,
    skip_if_false: int = 0,
) -> bytes:
    """Encode one instruction of a BPF filter.

    A comparison instruction skips ``skip_if_true`` instructions if the comparison is true, and else
    ``skip_if_false`` instructions.
    """
    return struct.pack("HBBI", code, skip_if_true, skip_if_false, value)


def _encode_if_equal(value: int, block: list[bytes]) -> list[bytes]:
    """Encode instructions that skip ``block`` unless the loaded word is ``value``."""
    return [_encode_instruction(_EQUAL, value, 0, len(block)), *block]


def _encode_refusal(error_number: int) -> bytes:
    """Encode the instruction that makes the system call fail with an error number."""
    return _encode_instruction(_RETURN, _ERROR | error_number)


def _encode_allowance() -> bytes:
    """Encode the instruction that allows the system call."""
    return _encode_instruction(_RETURN, _ALLOW)
