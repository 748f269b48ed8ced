"""Rank and world size of a process, as its launcher sets them, and the report of errors to the launcher.

torchrun passes all values in environment variables. A process without these variables is a single-process
job.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.errors import UserError, numbered_lines, raise_errors, single_errors

# Interval in seconds at which a rank checks that its launcher is alive.
_CHECK_SECONDS = 1.0

# Seconds that other ranks wait for rank 0 to print its errors before they print their own errors.
REPORT_SECONDS = 8.0

# Seconds per local rank that a rank waits before it prints an error which rank 0 does not have.
_TURN_SECONDS = 2.0

_FIX = "start with torchrun --nproc-per-node N, which sets it, or remove it for a single process"

CONSOLE_SCRIPT = "megatron-rl"
"""Name of the installed program that runs the commands, see setup.py."""

LOOPBACK = "127.0.0.1"
_NO_PROXY = ("NO_PROXY", "no_proxy")

# Environment variable with the number of processes, not read by torch.distributed -> launcher that sets it.
_OTHER_LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
}


@dataclass(frozen=True)
class Launch:
    """Position of a process in its job.

    Example: the last process of 2 nodes with 8 GPUs is ``Launch(15, 16, 7, alone=False)``.
    """

    rank: int = 0
    """Rank in the job."""
    world_size: int = 1
    """Number of processes of the job."""
    local_rank: int = 0
    """Rank among the processes of the machine, which chooses the GPU."""
    alone: bool = True
    """Whether no launcher started the process."""


def read_launch(environment: Mapping[str, str], *, joins_group: bool = False) -> Launch:
    """Read the launcher's environment variables; raise UserErrors for invalid values.

    ``joins_group`` is true if the process will join the job's process group. Then the rendezvous address is
    required, too.
    """
    errors: list[UserError] = []
    if not environment.get("RANK") and not environment.get("WORLD_SIZE"):
        for name, launcher in _OTHER_LAUNCHERS.items():
            if environment.get(name, "1") not in ("", "1"):
                errors.append(_unknown_launcher_error(name, launcher, environment[name]))

        raise_errors(errors)
        return Launch()

    world_size = _read_integer(environment, "WORLD_SIZE", 1, None, errors)
    rank = _read_integer(environment, "RANK", 0, world_size, errors)
    local_rank = _read_integer(environment, "LOCAL_RANK", 0, None, errors, default=0)
    if joins_group and world_size is not None and world_size > 1:
        _read_integer(environment, "MASTER_PORT", 1, 1 << 16, errors)
        if not environment.get("MASTER_ADDR"):
            address = environment.get("MASTER_ADDR")
            errors.append(_variable_error("MASTER_ADDR", "the host of rank 0", address))

    raise_errors(errors)
    assert world_size is not None and rank is not None and local_rank is not None
    return Launch(rank, world_size, local_rank, alone=False)


def current_launch(*, joins_group: bool = False) -> Launch:
    """Return the position of this process in its job; see `read_launch`."""
    return read_launch(os.environ, joins_group=joins_group)


def process_rank() -> int:
    """Return this process's rank for messages, 0 without a launcher; never raises."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def watch_launcher() -> None:
    """Start a thread that exits this process if its launcher dies.

    A killed launcher cannot signal its ranks. They would occupy devices and ports, and write into a folder
    that the next job uses. The thread is started only under torchrun: other launchers end their ranks
    themselves, and a process that a shell started may outlive the shell. Call this before anything slow,
    since the death of a launcher before the call is not detected.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return

    launcher = os.getppid()

    def watch() -> None:
        """Wait until the launcher dies, then exit this process."""
        # When the launcher dies, the kernel assigns another parent process.
        while os.getppid() == launcher:
            time.sleep(_CHECK_SECONDS)

        message = f"\nrank {process_rank()}: the launcher, process {launcher}, has died: exiting\n"
        with contextlib.suppress(OSError):
            os.write(2, message.encode())
        # Not sys.exit: the main thread may be in a collective that never returns.
        os._exit(1)

    threading.Thread(target=watch, name="watch_launcher", daemon=True).start()


def _read_integer(
    environment: Mapping[str, str],
    name: str,
    minimum: int,
    end: int | None,
    errors: list[UserError],
    default: int | None = None,
) -> int | None:
    """Parse an environment variable as an integer from ``minimum`` up to, but not including, ``end``.

    For any other value an error is appended to ``errors`` and None is returned. A ``default`` replaces an
    unset variable.
    """
    value_text = environment.get(name, "").strip()
    if not value_text and default is not None:
        return default

    try:
        value = int(value_text)
    except ValueError:
        value = None

    if value is not None and value >= minimum and (end is None or value < end):
        return value

    expected = f"a number of {minimum} or more"
    if end is not None:
        expected = f"a number from {minimum} to {end - 1}"
    errors.append(_variable_error(name, expected, environment.get(name)))
    return None


def _variable_error(name: str, expected: str, got: str | None) -> UserError:
    """Return the error for an invalid environment variable; ``got`` is its value, None if unset."""
    return UserError(
        f"the launcher's variable {name} has an invalid value",
        where=f"environment: {name}",
        expected=expected,
        got="nothing" if got is None else repr(got),
        fix=_FIX,
    )


def _unknown_launcher_error(name: str, launcher: str, process_count: str) -> UserError:
    """Return the error for a launcher that starts several processes without setting torchrun's variables.

    ``name`` is the launcher's environment variable whose value is ``process_count``.
    """
    return UserError(
        f"{launcher} started {process_count} processes, each of which would run as a separate job",
        where=f"environment: {name}={process_count}",
        expected="torchrun inside each task, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        got="none of them",
        fix=f"use launch/slurm.sbatch as an example, or unset {name} for a single process",
    )


def no_proxy_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return NO_PROXY variables that let clients reach this machine's servers without a proxy.

    Hosts that ``environment`` already excludes are retained. Programs read different spellings of the name,
    so both are returned.

    Example:
        >>> no_proxy_variables({"no_proxy": ".corp.example"})["NO_PROXY"]
        '.corp.example,127.0.0.1,localhost'
    """
    hosts: list[str] = []
    for name in _NO_PROXY:
        for host in environment.get(name, "").split(","):
            if host.strip():
                hosts.append(host.strip())

    unique_hosts = dict.fromkeys([*hosts, LOOPBACK, "localhost"])
    return dict.fromkeys(_NO_PROXY, ",".join(unique_hosts))


def report_errors(error: UserError) -> None:
    """Print a command's errors once, although every rank finds them.

    All ranks read the same input, so rank 0 prints the errors and exits, and the launcher terminates the
    other ranks while they wait. A rank that is still alive after `REPORT_SECONDS` has an error that rank 0
    does not have, such as a file that is missing on its machine only, and prints it itself. No communication
    between ranks is needed.

    The first error is also written to the file from which torchrun prints its summary.
    """
    rank = process_rank()
    if rank != 0:
        # SIGTERM means that another rank has failed and reported its errors: exit without a second report.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(REPORT_SECONDS)

        # The lowest local rank with the error prints it and exits, and the launcher terminates the ranks of
        # the machine that still wait.
        local_rank = os.environ.get("LOCAL_RANK", "0")
        if local_rank.isdecimal():
            time.sleep(_TURN_SECONDS * int(local_rank))
        print(f"rank {rank} on {socket.gethostname()}:", file=sys.stderr)

    print("\n".join(numbered_lines(single_errors(error), "error")), file=sys.stderr, flush=True)
    _write_summary(error)


def _write_summary(error: UserError) -> None:
    """Write the first error to the file of torchrun's summary, if torchrun started this process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return

    first, *further_errors = single_errors(error)
    text = f"bad input, no crash\n\nerror: {first}\n"
    if further_errors:
        text += f"\n{len(further_errors)} more, printed above torchrun's own traceback\n"

    # The keys that torch.distributed.elastic's error handler reads.
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
