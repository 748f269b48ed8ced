"""Fork contained processes from one process that has imported what they import.

A contained process takes a fifth of a second of processor time until its code is loaded, most of it to start
Python and to import its modules. A test of a run or of `check` starts several. `forked` starts them as forks
of this server; each is confined as if it had been started, and it ends with the process that asked for it.
Tests of the confinement itself start Python, see ``starts_contained`` in conftest.py.

``python contained_server.py SOCKET`` serves until its standard input is closed. A request is the arguments,
environment and folder of one process as JSON, with the descriptors of its three streams. The replies are the
number of the process and, when it has ended, its exit code.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = ("megatron_rl.rewards.worker", "megatron_rl.environments.host", "megatron_rl.check.rehearsal")
"""Modules with the functions that serve a contained process."""
CHUNK = 2**16
"""Bytes of one read from a socket."""


# The server


@dataclass
class Child:
    """A contained process that was forked here."""

    process: int
    end: int
    """Descriptor that becomes readable when the process ends."""
    requester: socket.socket | None
    """Connection to the process that requested it, or None when that one has ended."""


def serve(path: str) -> None:
    """Import the modules, then fork a process for each request until standard input is closed."""
    for name in IMPORTED:
        importlib.import_module(name)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)

        children: list[Child] = []
        while True:
            poll = select.poll()
            # Standard input becomes readable when the fixture closes it.
            poll.register(sys.stdin, select.POLLIN)
            poll.register(listener, select.POLLIN)
            for child in children:
                poll.register(child.end, select.POLLIN)
                if child.requester is not None:
                    # Without events: it is reported only when the other side has closed the connection.
                    poll.register(child.requester, 0)

            events = {descriptor for descriptor, _ in poll.poll()}
            if sys.stdin.fileno() in events:
                return
            children = [child for child in children if not has_ended(child, events)]
            if listener.fileno() in events:
                children.append(start(listener.accept()[0]))


def has_ended(child: Child, events: set[int]) -> bool:
    """Handle the end of a contained process, or of its requester; return whether the process has ended."""
    if child.end in events:
        _, status = os.waitpid(child.process, 0)
        os.close(child.end)
        if child.requester is not None:
            with contextlib.suppress(OSError), child.requester:
                child.requester.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        return True

    if child.requester is not None and child.requester.fileno() in events:
        child.requester.close()
        child.requester = None
        # The process would end itself if the requester were its parent.
        os.kill(child.process, signal.SIGTERM)
    return False


def start(connection: socket.socket) -> Child:
    """Fork the process of the request on a connection, and reply with its number."""
    data, streams, _, _ = socket.recv_fds(connection, CHUNK, 3)
    while chunk := connection.recv(CHUNK):
        data += chunk

    process = os.fork()
    if process == 0:
        become_contained(json.loads(data), streams)
    # Readers of the pipes would otherwise not notice that the process has ended.
    for stream in streams:
        os.close(stream)
    connection.sendall(f"{process}\n".encode())
    return Child(process, os.pidfd_open(process), connection)


def become_contained(request: Mapping[str, Any], streams: Sequence[int]) -> NoReturn:
    """Become the contained process of a request, in the state of a process that was just started."""
    from megatron_rl.contained import confinement, process

    os.setsid()
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["-c", *request["arguments"]]
    # Each contained process shares this memory with its own supervisor alone.
    confinement._extra_processes = mmap.mmap(-1, 8)
    try:
        process.main()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


# The requesting process


class ForkedProcess:
    """A process of the server, with the attributes and methods of `subprocess.Popen` that are in use."""

    def __init__(self, path: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": os.getcwd(),
        }
        data = json.dumps(request).encode()
        pipes = [os.pipe() for _ in range(3)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]

        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(path)
        sent = socket.send_fds(self._connection, [data], theirs)
        self._connection.sendall(data[sent:])
        # The end of the request, up to which the server reads.
        self._connection.shutdown(socket.SHUT_WR)
        for descriptor in theirs:
            os.close(descriptor)

        self.stdin = os.fdopen(pipes[0][1], "wb")
        self.stdout = os.fdopen(pipes[1][0], "rb")
        self.stderr = os.fdopen(pipes[2][0], "rb")
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._replies = self._connection.makefile("rb")
        self.pid = int(self._replies.readline())

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise TimeoutExpired if the process runs longer than ``timeout`` seconds."""
        # As with `subprocess.Popen`, several threads may wait for a process: only one reads the exit code.
        with self._lock:
            if self.returncode is None:
                if not select.select([self._connection], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a forked contained process", timeout or 0.0)
                self.returncode = int(self._replies.readline())
                self._connection.close()
            return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM to a running process."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


def forking(path: str) -> Callable[[Sequence[str], Mapping[str, str]], ForkedProcess]:
    """Return what replaces `megatron_rl.contained.process.start_process`: it asks the server at ``path``."""
    return partial(ForkedProcess, path)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    serve(sys.argv[1])
