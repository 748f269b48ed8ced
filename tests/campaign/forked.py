"""Start torchrun and its ranks by forking this process, which saves the imports of a new interpreter.

A rank needs a dozen seconds of processor time for its imports alone. torchrun is the real one, with its
agent, restarts and signals, and so are its ranks; only their processes are created in another way.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    subprocess_handler,
)
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from tests import rank_server


def preload() -> None:
    """Import the libraries of torchrun and ranks; call it before the first `Forked` process."""
    rank_server.preload()
    importlib.import_module("torch.distributed.run")
    # torchrun looks up a caller's name for its log among all modules, a tenth of a second each time.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


class Forked(subprocess.Popen):
    """Popen for Python commands that forks this process instead of executing Python.

    Supports the arguments command, ``env``, ``stdout`` and ``stderr``. The process leads a session of its
    own, and processes that torchrun starts are forked too. Use it in a process with one thread.
    """

    def _execute_child(self, args: Sequence[str], *values: Any) -> None:
        """Fork, and run the command in the child; overrides the method of Popen that executes a program."""
        # Positions of env, stdout and stderr among the arguments of CPython 3.11 and 3.12.
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
            _begin_anew([*args], environment, {1: output, 2: errors})
        except BaseException:
            traceback.print_exc()
        os._exit(1)


def _begin_anew(
    command: list[str],
    environment: Mapping[str, str],
    streams: Mapping[int, int],
) -> NoReturn:
    """Reset this forked process to the state of a new one, run the command, and exit with its code."""
    os.setsid()
    for number, descriptor in streams.items():
        if descriptor not in (-1, number):
            os.dup2(descriptor, number)

    # A new process would not inherit descriptors, signal handlers or the environment.
    os.closerange(3, 2**16)
    signal.set_wakeup_fd(-1)
    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it was computed from the parent's TMPDIR
    subprocess_handler.Popen = Forked  # type: ignore[misc]

    arguments = [argument for argument in command[1:] if argument != "-u"]
    module = arguments[0] == "-m"
    rank_server.become(arguments[1:] if module else arguments, module=module)
