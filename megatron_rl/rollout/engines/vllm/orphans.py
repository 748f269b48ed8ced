"""Watchdog that kills the processes of a vLLM server after the server has ended.

Without it, vLLM's engine processes would wait forever for requests of a killed server, and occupy memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress

import psutil

_ENGINE_NAME = "EngineCore"
"""Prefix of the name of a server's engine processes in vLLM."""

_POLL_SECONDS = 1.0
"""Interval at which the watchdog checks whether the server exists."""


def start_watchdog() -> None:
    """Start the watchdog in a server's engine process, or in a worker of an engine; do nothing elsewhere.

    After the server has ended, for any reason, the watchdogs kill its engines, their workers and the
    coordinator of several engines.
    """
    process = multiprocessing.current_process()
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    if process.name.startswith(_ENGINE_NAME):
        process_ids = (os.getpid(), parent.pid)
    elif parent.name.startswith(_ENGINE_NAME):
        process_ids = (parent.pid, None)
    else:
        return
    watchdog = threading.Thread(target=_kill_orphans, args=process_ids, name="watchdog", daemon=True)
    watchdog.start()


def _kill_orphans(engine_pid: int | None, server_pid: int | None) -> None:
    """Wait until an engine's server has ended; then kill the engine, its siblings and this process.

    ``server_pid`` defaults to the engine's parent process.
    """
    # The kernel can send a signal to a process when its parent ends, but this does not suffice. Workers are
    # children of the engine and not of the server. The coordinator runs no code of this package, so it cannot
    # request the signal.

    # NoSuchProcess means that the engine ended first, which the server detects by itself.
    with suppress(psutil.NoSuchProcess):
        engine = psutil.Process(engine_pid)
        server_pid = server_pid or engine.ppid()
        processes = [engine]

        # If the server died before the watchdog started, the engine's parent is now a process of another
        # session, whose children must not be killed.
        engine_session = _get_session_id(engine.pid)
        is_parent = engine.ppid() == server_pid
        is_serving = is_parent and _get_session_id(server_pid) == engine_session
        if is_serving:
            with suppress(psutil.NoSuchProcess):
                processes = psutil.Process(server_pid).children()
        while is_serving and engine.ppid() == server_pid:
            time.sleep(_POLL_SECONDS)

        # psutil also compares start times, so it does not kill a new process with a reused process id.
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                if process.pid != os.getpid():
                    process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def _get_session_id(pid: int) -> int | None:
    """Return the session id of a process, or None if the process has ended."""
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return None
