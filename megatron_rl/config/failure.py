"""Telling the user of errors once, from a launch of any number of processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from megatron_rl.errors import UserError, each, numbered

PATIENCE = 8.0
"""Seconds that other ranks leave rank 0 to print before they speak for themselves."""


def process_rank() -> int:
    """Return this process's rank as its launcher states it, 0 without one."""
    return int(os.environ.get("RANK", "0") or 0)


def launched_world() -> int | None:
    """Return the number of processes as the launcher states it, None without one."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdigit() else None


def report_errors(error: UserError) -> None:
    """Print the errors on one rank.

    Every rank finds the same errors in the same input, so rank 0 speaks and the launcher ends the others
    while they wait. A rank that is still alive after `PATIENCE` has an error that rank 0 does not have,
    such as a file missing on its machine alone, and prints it itself. No rank waits for another's message.
    """
    rank = process_rank()
    if rank != 0:
        # A launcher that ends this rank has heard of another's failure: this one adds nothing to it.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(PATIENCE)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"rank {rank} on {socket.gethostname()}:", file=sys.stderr)
            print(_text(error), file=sys.stderr, flush=True)
        return
    text = _text(error)
    if not _tell_launcher(text):
        print(text, file=sys.stderr, flush=True)


def _text(error: UserError) -> str:
    return "\n".join(numbered(each(error), "error"))


def _tell_launcher(text: str) -> bool:
    """Leave the text where torchrun looks for it; return whether torchrun will print it.

    Its summary is the last thing that torchrun prints, below everything it says about processes.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    shown = "bad input\n\n" + text + "\n"
    message = {"message": shown, "extraInfo": {"py_callstack": shown, "timestamp": str(int(time.time()))}}
    try:
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    except OSError:
        return False
    return True
