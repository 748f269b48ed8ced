"""What the launcher tells a process of its job, and how the process tells the launcher of mistakes."""

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

from megatron_rl.errors import UserError, each, numbered, require_none

_LOOKS_SECONDS = 1.0
"""Time between two looks at whether the launcher is still there."""
PATIENCE = 8.0
"""Seconds that other ranks leave rank 0 to print before they speak for themselves."""
_FIX = "start with torchrun --nproc-per-node N, which sets it, or remove it for a single process"
LOOPBACK = "127.0.0.1"
_NO_PROXY = ("NO_PROXY", "no_proxy")
_OTHER_LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
}
"""Variable -> launcher that states the number of processes in words that torch.distributed does not read."""


@dataclass(frozen=True)
class Launch:
    """Hold a process's place in its job; ``alone`` where no launcher spoke."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    alone: bool = True


def read_launch(environment: Mapping[str, str], *, joins: bool = False) -> Launch:
    """Return what the launcher's variables say; raise UserErrors for what they cannot mean.

    A process that ``joins`` the others of its job also needs to be told where they meet.
    """
    errors: list[UserError] = []
    stated = [name for name in ("RANK", "WORLD_SIZE") if environment.get(name)]
    if not stated:
        for name, launcher in _OTHER_LAUNCHERS.items():
            if environment.get(name, "1") not in ("", "1"):
                errors.append(_unknown_launcher(name, launcher, environment[name]))
        require_none(errors)
        return Launch()
    world = _integer(environment, "WORLD_SIZE", 1, None, errors)
    rank = _integer(environment, "RANK", 0, world, errors)
    local = _integer(environment, "LOCAL_RANK", 0, None, errors, default=0)
    if joins and world is not None and world > 1:
        _integer(environment, "MASTER_PORT", 1, 1 << 16, errors)
        if not environment.get("MASTER_ADDR"):
            errors.append(_error("MASTER_ADDR", "the host of rank 0", environment.get("MASTER_ADDR")))
    require_none(errors)
    assert world is not None and rank is not None and local is not None
    return Launch(rank, world, local, alone=False)


def launch(*, joins: bool = False) -> Launch:
    """Return this process's place in its job; see `read_launch`."""
    return read_launch(os.environ, joins=joins)


def process_rank() -> int:
    """Return this process's rank, 0 where the launcher states none; for messages, so it never raises."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def leave_with_launcher() -> None:
    """End this process soon after the launcher that started it is gone, killed without a word to its ranks.

    Ranks that went on would hold devices and ports and write into a folder that the next job takes for its
    own. Only torchrun's own ranks are watched: other launchers see to that themselves, and a process that a
    shell started may outlive it. Call it before anything that takes time: a launcher that is gone by then is
    not known.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_LOOKS_SECONDS)
        words = f"\nrank {process_rank()}: the launcher, process {launcher}, is gone: leaving\n"
        with contextlib.suppress(OSError):
            os.write(2, words.encode())
        os._exit(1)

    threading.Thread(target=watch, name="leave_with_launcher", daemon=True).start()


def _integer(
    environment: Mapping[str, str],
    name: str,
    least: int,
    bound: int | None,
    errors: list[UserError],
    default: int | None = None,
) -> int | None:
    """Return the variable as a number of at least ``least`` and below ``bound``; None with an error."""
    text = environment.get(name, "").strip()
    if not text and default is not None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is not None and value >= least and (bound is None or value < bound):
        return value
    words = f"a number of {least} or more" if bound is None else f"a number from {least} to {bound - 1}"
    errors.append(_error(name, words, environment.get(name)))
    return None


def _error(name: str, expected: str, got: str | None) -> UserError:
    return UserError(
        f"the launcher's variable {name} makes no sense",
        where=f"environment: {name}",
        expected=expected,
        got="nothing" if got is None else repr(got),
        fix=_FIX,
    )


def _unknown_launcher(name: str, launcher: str, size: str) -> UserError:
    return UserError(
        f"{launcher} started {size} processes, each of which would run as a job of its own",
        where=f"environment: {name}={size}",
        expected="torchrun inside each task, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        got="none of them",
        fix=f"use launch/slurm.sbatch as an example, or unset {name} for a single process",
    )


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which no client asks for a server on this machine through a proxy.

    Programs read the name in one case or the other, and some the first that is set; the entries that are
    there already hold in both.

    Example:
        >>> without_proxy({"no_proxy": ".corp.example"})["NO_PROXY"]
        '.corp.example,127.0.0.1,localhost'
    """
    texts = [environment.get(name, "") for name in _NO_PROXY]
    entries = [entry.strip() for text in texts for entry in text.split(",") if entry.strip()]
    return dict.fromkeys(_NO_PROXY, ",".join(dict.fromkeys([*entries, LOOPBACK, "localhost"])))


def report_errors(error: UserError) -> None:
    """Print the errors on one rank, in the same text under every launcher.

    Every rank finds the same errors in the same input, so rank 0 speaks and the launcher ends the others
    while they wait. A rank that is still alive after `PATIENCE` has an error that rank 0 does not have,
    such as a file missing on its machine alone, and prints it itself. No rank waits for another's message.

    The errors are printed before this process ends, and so before the traceback that torchrun prints of
    itself. Its summary, the last lines of its output, gets the first error once more.
    """
    rank = process_rank()
    if rank != 0:
        # A launcher that ends this rank has heard of another's failure: this one adds nothing to it.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(PATIENCE)
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        print(f"rank {rank} on {socket.gethostname()}:", file=sys.stderr)
    print("\n".join(numbered(each(error), "error")), file=sys.stderr, flush=True)
    if rank == 0:
        _write_summary(error)


def _write_summary(error: UserError) -> None:
    """Leave the first error where torchrun looks for the reason of a failure, if torchrun started this."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return

    first, *others = each(error)
    shown = f"bad input, no crash\n\nerror: {first}\n"
    if others:
        shown += f"\n{len(others)} more, printed above torchrun's own traceback\n"
    message = {"message": shown, "extraInfo": {"py_callstack": shown, "timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
