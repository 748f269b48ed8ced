"""What contained code prints, in the log of its rank: marked, so that no line passes for one of ours."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import IO

LONGEST_LINE = 4096
"""Bytes of a line that has not ended after which it is written as one."""


def relay(stream: IO[bytes], process: int) -> None:
    """Write what a process prints to this process's standard error, line by line, from a thread.

    Each line has a mark with the number of the process before it, and escapes in place of what commands a
    terminal: without both, code could forge the lines of a run. The thread ends with the stream.
    """

    def write_lines() -> None:
        mark = f"[process {process}] ".encode()
        with stream:
            while line := stream.readline(LONGEST_LINE):
                text = line.rstrip(b"\r\n").decode("utf-8", "replace")
                shown = "".join(one if one.isprintable() or one == "\t" else ascii(one)[1:-1] for one in text)
                with contextlib.suppress(OSError):  # a full disk: what is printed must still be taken
                    os.write(2, mark + shown.encode() + b"\n")

    threading.Thread(target=write_lines, name="said", daemon=True).start()
