"""End what a vLLM server has started once it is gone: vLLM's engines would wait for its requests for ever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress

import psutil

_ENGINE = "EngineCore"
"""How vLLM calls the processes that a server starts with an engine in each."""
_SECONDS = 1.0


def end_with_server() -> None:
    """Watch the server from here on, in one of its engine processes or a worker of one; nowhere else.

    When it is gone, whatever ended it, its engines, their workers and the coordinator of several engines
    are killed.
    """
    process, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    if parent is None:
        return
    if process.name.startswith(_ENGINE):
        pids = (os.getpid(), parent.pid)
    elif parent.name.startswith(_ENGINE):
        pids = (parent.pid, None)
    else:
        return
    threading.Thread(target=_watch, args=pids, name="end_with_server", daemon=True).start()


def _watch(engine_pid: int | None, server: int | None) -> None:
    """End this process, the engine and its siblings once the engine has lost its server, else its parent now.

    The kernel's signal for a parent's death would not do: it reaches children alone, but workers are an
    engine's and the coordinator runs nothing of this package.
    """
    with suppress(psutil.NoSuchProcess):  # the engine has ended first, which the server sees itself
        engine = psutil.Process(engine_pid)
        server, others = server or engine.ppid(), [engine]
        # A server that was gone before this began has left its engine to a process of another session.
        serving = engine.ppid() == server and _session(server) == _session(engine.pid)
        if serving:
            with suppress(psutil.NoSuchProcess):
                others = psutil.Process(server).children()
        while serving and engine.ppid() == server:
            time.sleep(_SECONDS)
        for process in others:  # psutil knows a process by its start, too: no number is taken for another's
            with suppress(psutil.NoSuchProcess):
                if process.pid != os.getpid():
                    process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def _session(pid: int) -> int | None:
    """Return the session of a process, None where there is none any more."""
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return None
