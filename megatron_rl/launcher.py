"""Rank and world size of a process, as its launcher sets them, and the report of errors to the launcher.

The one idea: torchrun passes everything in environment variables. A process without them is a single-process
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

# Seconds for which other ranks wait for rank 0 to print its errors, before they print their own.
PATIENCE = 8.0

# Seconds between the turns of a machine's ranks to print an error that rank 0 does not have.
_TURN_SECONDS = 2.0

_FIX = "start with torchrun --nproc-per-node N, which sets it, or remove it for a single process"

CONSOLE_SCRIPT = "megatron-rl"
"""Name of the installed program that runs the commands, see setup.py."""

LOOPBACK = "127.0.0.1"
_NO_PROXY = ("NO_PROXY", "no_proxy")

# Environment variable with a number of processes that torch.distributed does not read -> its launcher.
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

    With ``joins_group`` the process will join the process group of its job, so the rendezvous address is
    required too.
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

    A launcher that is killed cannot signal its ranks, which would keep devices and ports, and write into a
    folder that the next job uses. Only ranks of torchrun are watched: other launchers end their ranks
    themselves, and a process that a shell started may outlive the shell. Call this before anything slow,
    since the death of a launcher before the call is not detected.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return

    launcher = os.getppid()

    def watch() -> None:
        # The kernel gives an orphan another parent process.
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
    text = environment.get(name, "").strip()
    if not text and default is not None:
        return default

    try:
        value = int(text)
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
    """Return the error for a launcher that starts several processes without the variables of torchrun.

    ``name`` is the environment variable with the number of its processes, ``process_count``.
    """
    return UserError(
        f"{launcher} started {process_count} processes, each of which would run as a separate job",
        where=f"environment: {name}={process_count}",
        expected="torchrun inside each task, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        got="none of them",
        fix=f"use launch/slurm.sbatch as an example, or unset {name} for a single process",
    )


def no_proxy_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return NO_PROXY variables that exclude this machine's servers from the proxy of ``environment``.

    Existing entries are retained. Both spellings are returned, since programs differ in which one they read.

    Example:
        >>> no_proxy_variables({"no_proxy": ".corp.example"})["NO_PROXY"]
        '.corp.example,127.0.0.1,localhost'
    """
    entries: list[str] = []
    for name in _NO_PROXY:
        for entry in environment.get(name, "").split(","):
            if entry.strip():
                entries.append(entry.strip())

    unique_entries = dict.fromkeys([*entries, LOOPBACK, "localhost"])
    return dict.fromkeys(_NO_PROXY, ",".join(unique_entries))


def report_errors(error: UserError) -> None:
    """Print the errors of a command, on one rank for all ranks that have them.

    Every rank finds the same errors in the same input, so rank 0 prints them and exits, and the launcher ends
    the others while they wait. A rank that is still alive after `PATIENCE` has an error that rank 0 does not
    have, such as a file that is missing on its machine only, and prints it itself. No communication between
    ranks is needed.

    The errors are printed before this process ends, and so before the traceback that torchrun prints. Its
    summary, the last lines of its output, repeats the first error.
    """
    rank = process_rank()
    if rank != 0:
        # SIGTERM means that another rank has failed and reported its errors: exit without a second report.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(PATIENCE)

        # The first rank of a machine prints for all its ranks that have the error. The launcher ends them
        # while they wait for their turn, unless the ranks before them do not have it.
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
