"""Processes that are forked where others are executed: torchrun and its ranks then start at once.

A rank costs a dozen seconds of processor time for its imports alone. Here torchrun is the real one, with its
agent, restarts and signals, and so are its ranks; only the creation of the processes is another one.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from tests import rank_server


def preload() -> None:
    """Import what torchrun and ranks need, before the first `Forked` process of this one."""
    rank_server.preload()
    importlib.import_module("torch.distributed.run")


class Forked(subprocess.Popen):
    """Be what Popen is, for a Python command, without executing Python anew. Use it in one thread.

    Of Popen's arguments it takes the command, ``env``, ``stdout`` and ``stderr``; the process has a session
    of its own, and torchrun's own processes are forked, too.
    """

    def _execute_child(self, args: Sequence[str], *values: Any) -> None:
        environment = values[5]
        output = values[12]
        errors = values[14]
        sys.stdout.flush()
        sys.stderr.flush()

        self.pid = os.fork()
        self._child_created = True
        if self.pid:
            return

        try:
            code = _begin_anew([*args], environment, {1: output, 2: errors})
        except BaseException:
            traceback.print_exc()
            code = 1
        os._exit(code)


def _begin_anew(command: list[str], environment: Mapping[str, str], streams: Mapping[int, int]) -> int:
    """Make this process one that has just started, run the command, and return the exit code."""
    os.setsid()
    for number, descriptor in streams.items():
        if descriptor not in (-1, number):
            os.dup2(descriptor, number)

    os.closerange(3, 2**16)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR may be another one
    subprocess_handler.Popen = Forked  # type: ignore[misc]

    words = [word for word in command[1:] if word != "-u"]
    module = words[0] == "-m"
    try:
        rank_server.become(words[1:] if module else words, module=module)
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)

    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code
