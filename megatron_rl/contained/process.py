"""Run untrusted code in sandboxed processes: start them, exchange messages with them, and end them.

This module contains both ends of the connection. It imports only the standard library, so that a new process
is ready in some ten milliseconds, without the trainer's threads and devices.

The trainer sends requests as pickles to the standard input of the process. Replies are JSON on its standard
output, since the trainer must not execute anything that sandboxed code writes. Each message is a frame: its
length in 8 bytes, then its bytes.

A sandboxed process consists of two processes. The supervisor enforces limits and ends with the trainer. The
worker handles the requests, in separate namespaces if the kernel allows them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import queue
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import IO, Any, Protocol

from megatron_rl.contained.confinement import confine_worker, isolate_process, supervise_worker
from megatron_rl.contained.visible import VisiblePaths, allowed_environment, find_visible_paths
from megatron_rl.errors import UserError
from megatron_rl.user_code import active_copies, execute_copies, load_module

HEADER = struct.Struct("<Q")
"""First 8 bytes of a frame: the number of bytes of its message."""
LOAD_FAILED = "load_failed"
"""Kind of the first reply of a process whose code could not be loaded."""
READY = "ready"
"""Kind of the first reply of a process whose code is loaded."""
LOAD_SECONDS = 120.0
"""Seconds within which a process must have started and imported the code."""
KILL_SECONDS = 5.0
"""Seconds within which a supervisor must have ended all processes that the code started."""
STATUS_SECONDS = 2.0
"""Seconds within which a supervisor must exit with the worker's status after the worker closed its output."""
LARGEST_FRAME = 2**24
"""Largest valid reply in bytes; a longer frame is a protocol error."""
INVALID_TEXT = "no_text"
"""Key that marks a mapping with an unpaired surrogate; see `mark_unpaired_surrogates`."""
INVALID_TEXT_MESSAGE = "sent text with half a surrogate pair (U+D800 to U+DFFF), which is not a character"
LARGEST_MESSAGE = 4000
"""Maximum number of characters that are reported of an exception's text."""
LONGEST_LINE = 4096
"""Number of bytes after which an unfinished line of output is written to the log."""

_START_CODE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from megatron_rl.contained.process import main; main()"
)
_PACKAGE = str(Path(__file__).resolve().parents[1])
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_NOT_VISIBLE = "contained code can read only Python's files, its own folder and the paths in limits.read"
_LIMIT_BY_ERRNO = {
    errno.EROFS: "limits.write is false, or the folder is not one that it makes writable",
    errno.ENETUNREACH: "limits.network is false",
    errno.ENOENT: _NOT_VISIBLE,
    errno.EACCES: _NOT_VISIBLE,
}
"""errno of an OSError in sandboxed code -> the limit that probably caused it."""


class LoadFailed(Exception):
    """Error of a sandboxed process that could not load its code; ``details`` is a traceback or ""."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.reason = escape_unprintable(reason)
        self.details = escape_unprintable(details)

    def as_error(
        self,
        description: str,
        key: str,
        expected: str,
    ) -> UserError:
        """Return the UserError for user code that failed to load.

        ``description`` names the code, such as "the environment game:Game". ``key`` is the setting that
        contains the path of the code, and ``expected`` describes a valid value of this setting.
        """
        details = f"\n{self.details}" if self.details else ""
        return UserError(
            f"{description} cannot be loaded{details}",
            where=key,
            expected=expected,
            got=self.reason,
            fix="correct the name, or the error in the module",
        )


class ContainedProcess:
    """Trainer's handle of a sandboxed process.

    Arguments:
        serving_function: ``module:function`` that handles the requests in the process.
        limits: a section of limits (`megatron_rl.config.sections.bounds.LimitsConfig`) as a mapping.
        code_path: ``module:name`` or ``file.py:name`` of the user's code, whose folder the process can read.

    `reply_fd` is the file descriptor from which replies are read. `protocol_error` describes a violation of
    the protocol by the process, or has the value None without a violation. Replies after a violation must not
    be used.
    """

    def __init__(
        self,
        serving_function: str,
        limits: Mapping[str, Any],
        code_path: str = "",
    ) -> None:
        self.protocol_error: str | None = None
        self._buffer = bytearray()
        self._output_closed = False

        network = limits["network"]
        write = limits["write"]
        visible_paths = find_visible_paths(code_path, limits["read"], network=network, writable=write)
        arguments = [json.dumps(limits), json.dumps(asdict(visible_paths))]
        environment = allowed_environment(os.environ, limits["environment"], network=network)
        # The process calls `main`, which imports and calls the serving function.
        self.process = start_process([serving_function, *arguments], environment)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None

        _relay_output(self.process.stderr, self.process.pid)

        # Write requests in a thread: a process that hangs does not read, and must not block the trainer.
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(
            target=self._write_requests,
            args=(self.process.stdin,),
            daemon=True,
        )
        self._writer.start()
        self.reply_fd = self.process.stdout.fileno()
        os.set_blocking(self.reply_fd, False)

    def _write_requests(self, stream: IO[bytes]) -> None:
        """Write queued requests to ``stream`` until the queue contains None; runs in the writer's thread.

        If a request cannot be written, end the process: otherwise the trainer would wait for a reply to a
        request that was never sent.
        """
        try:
            with contextlib.suppress(BrokenPipeError):
                while (payload := self._requests.get()) is not None:
                    _write_frame(stream, payload)
        except (MemoryError, OSError) as error:
            self.protocol_error = f"a request could not be written to the process: {error!r}"
            self.process.terminate()

    def send_request(self, request: Any) -> None:
        """Queue a request for the process. If the process has ended, `read_replies` reports it."""
        self._requests.put(pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL))

    def load(self, object_path: str, *arguments: Any) -> dict[str, Any]:
        """Load the object at ``object_path`` in the process; return the first reply of the process.

        ``arguments`` are sent to the serving function with ``object_path``. Raises LoadFailed.
        """
        # The process imports modules by the trainer's search path, in which "" is the current folder.
        search_path = [folder or os.getcwd() for folder in sys.path]
        if os.getcwd() not in search_path:
            search_path.append(os.getcwd())
        self.send_request(((search_path, active_copies()), object_path, *arguments))

        deadline = time.monotonic() + LOAD_SECONDS
        replies: list[dict[str, Any]] = []
        try:
            while not replies:
                if not self.wait_for_output(max(0.0, deadline - time.monotonic())):
                    raise LoadFailed(f"still loading after {LOAD_SECONDS:g} s")
                replies, is_open = self.read_replies()
                if not is_open and not replies:
                    raise LoadFailed(f"its process ended with status {self.kill()} while loading it")

            if replies[0].get("kind") != READY:
                details = replies[0].get("details", "")
                raise LoadFailed(str(replies[0].get("error")), str(details))
        except LoadFailed:
            self.kill()
            raise
        return replies[0]

    def wait_for_output(self, time_limit: float) -> bool:
        """Wait up to ``time_limit`` seconds; return whether output has arrived or the process has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.reply_fd, selectors.EVENT_READ)
            return bool(selector.select(time_limit))

    def read_replies(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the complete replies that have arrived, and whether the process's output is still open."""
        # Read all bytes in the pipe without blocking; an empty read means that the pipe was closed.
        while True:
            try:
                received_bytes = os.read(self.reply_fd, 1 << 16)
            except BlockingIOError:
                break
            if not received_bytes:
                self._output_closed = True
                break
            self._buffer.extend(received_bytes)

        # Decode the complete frames. A reply that is not a mapping becomes an empty mapping.
        replies: list[dict[str, Any]] = []
        while len(self._buffer) >= HEADER.size:
            (payload_bytes,) = HEADER.unpack_from(self._buffer)
            if payload_bytes > LARGEST_FRAME:
                self.protocol_error = f"the process announced an answer of {payload_bytes} bytes"
                break

            end = HEADER.size + payload_bytes
            if len(self._buffer) < end:
                break
            try:
                reply = json.loads(self._buffer[HEADER.size : end])
                # Mark text that is not valid Unicode. This raises RecursionError for a deeply nested reply,
                # even if json.loads accepts the reply.
                mark_unpaired_surrogates(reply)
            except (ValueError, RecursionError):
                reply = None
            del self._buffer[:end]
            replies.append(reply if isinstance(reply, dict) else {})
        return replies, not self._output_closed

    def kill(self) -> int:
        """End the process and all processes that it started; return its exit status."""
        if self._output_closed:
            # Wait for the supervisor to exit with the worker's status; after SIGTERM it would exit with 0.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STATUS_SECONDS)
        if self.process.poll() is None:
            # On SIGTERM the supervisor also ends descendants in other sessions.
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(KILL_SECONDS)

        # Kill the processes that remain in the session if the supervisor itself was killed.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()

        self._requests.put(None)
        self._writer.join(KILL_SECONDS)

        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        return status


def read_list(reply: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list under ``key`` in the first reply of a process, or [] without the key.

    Raises LoadFailed for a value that is not a list: the loaded code may have written the reply itself.
    """
    values = reply.get(key, [])
    if not isinstance(values, list):
        raise malformed_reply_error(reply)
    return values


def malformed_reply_error(reply: Mapping[str, Any]) -> LoadFailed:
    """Return the error for a process whose first reply has unexpected content."""
    return LoadFailed(f"its process sent a malformed message: {reply!r:.200}")


def start_process(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that calls `main` with ``arguments``, with pipes for its standard streams.

    The process leads its own session, so that a signal to the trainer's process group does not reach it.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _START_CODE, _PACKAGE_PARENT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )


def unenforced_protections(limits: Mapping[str, Any]) -> list[str]:
    """Return the protections of a sandboxed process with ``limits`` that this kernel does not enforce.

    Starts such a process to test the protections; raises LoadFailed if it does not start. The result is
    cached, since the kernel does not change.
    """
    return list(_unenforced_protections(json.dumps(limits, sort_keys=True)))


@cache
def _unenforced_protections(limits_json: str) -> tuple[str, ...]:
    """Return the protections that this kernel does not enforce for the limits in ``limits_json``."""
    process = ContainedProcess("megatron_rl.contained.process:serve_protection_test", json.loads(limits_json))
    try:
        return tuple(str(protection) for protection in process.load("").get("missing", ()))
    finally:
        process.kill()


def serve_protection_test(
    requests: Requests,
    limits: Mapping[str, Any],
    unenforced: list[str],
) -> None:
    """Reply to one request with the unenforced protections.

    This is the serving function of a process that only tests protections and loads no code. ``unenforced``
    are the protections that the kernel does not enforce. ``limits`` are not used here.
    """
    requests.read()
    requests.reply({"kind": READY, "missing": unenforced})


class ProcessHolder(Protocol):
    """Object with a sandboxed process, such as a reward worker."""

    process: ContainedProcess


def kill_processes(holders: Iterable[ProcessHolder]) -> None:
    """End the sandboxed process of each holder, with all processes that it started."""
    # Copy first: another thread may remove a holder whose process has ended.
    for holder in list(holders):
        holder.process.kill()


def _relay_output(stream: IO[bytes], process: int) -> None:
    """Start a thread that copies a process's output to this process's standard error, line by line.

    Each line is prefixed with the id of the process, and characters that control a terminal are escaped:
    otherwise sandboxed code could forge lines of the run's log. The thread ends with the stream.
    """

    def copy_lines() -> None:
        prefix = f"[process {process}] ".encode()
        with stream:
            while line := stream.readline(LONGEST_LINE):
                text = line.rstrip(b"\r\n").decode("utf-8", "replace")
                # Continue to read if the disk is full, since the process would block on its output.
                with contextlib.suppress(OSError):
                    os.write(2, prefix + _escape(text, "\t").encode() + b"\n")

    threading.Thread(target=copy_lines, name="contained output", daemon=True).start()


def mark_unpaired_surrogates(value: Any) -> bool:
    """Mark the mappings with an unpaired surrogate in a JSON value; return whether ``value`` has one.

    A mapping is marked with the key `INVALID_TEXT`. A reply has a mapping for each sample, and only the
    marked samples are refused.
    """
    if isinstance(value, str):
        return not value.isascii() and replace_surrogates(value) != value
    if not isinstance(value, list | dict):
        return False

    # Visit every item, even after a surrogate was found: all mappings inside must be marked.
    items = value
    if isinstance(value, dict):
        items = [*value.keys(), *value.values()]
    has_surrogate = False
    for item in items:
        if mark_unpaired_surrogates(item):
            has_surrogate = True
    if has_surrogate and isinstance(value, dict):
        value[INVALID_TEXT] = True
    return has_surrogate


def replace_surrogates(text: str) -> str:
    """Replace each unpaired surrogate in ``text`` by a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def escape_unprintable(text: str) -> str:
    """Escape the characters of ``text`` that control a terminal or that UTF-8 cannot encode."""
    return _escape(replace_surrogates(text), "\n\t")


def _escape(text: str, allowed_characters: str) -> str:
    """Escape the unprintable characters of ``text``, except ``allowed_characters``."""
    if text.isprintable():
        return text

    escaped_text = []
    for character in text:
        if not character.isprintable() and character not in allowed_characters:
            character = ascii(character)[1:-1]
        escaped_text.append(character)
    return "".join(escaped_text)


def _write_frame(stream: IO[bytes], payload: bytes) -> None:
    """Write one message to the stream: its length as header, then its bytes."""
    # Write twice, since joining header and payload would copy a large payload.
    stream.write(HEADER.pack(len(payload)))
    stream.write(payload)
    stream.flush()


class Requests:
    """Connection of a sandboxed process to the trainer: reads requests and writes replies."""

    def __init__(self, requests: IO[bytes], replies: IO[bytes]) -> None:
        self._requests = requests
        self._replies = replies

    def read(self) -> Any:
        """Wait for the next request of the trainer; raises EOFError if the trainer has closed the pipe."""
        header = self._requests.read(HEADER.size)
        if len(header) < HEADER.size:
            raise EOFError
        (payload_bytes,) = HEADER.unpack(header)
        return pickle.loads(self._requests.read(payload_bytes))

    def reply(self, value: Mapping[str, Any]) -> None:
        """Send a reply to the trainer as JSON."""
        _write_frame(self._replies, json.dumps(value).encode())

    def refuse(self, error: BaseException) -> None:
        """Reply that the code could not be loaded, with the last stack frames outside of this package."""
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith((_PACKAGE, "<frozen importlib"))
        ]

        # An error without such frames, for example for a wrong name, needs no details. A syntax error has no
        # frames, but its details contain the position.
        details = ""
        if frames or isinstance(error, SyntaxError):
            lines = [*traceback.format_list(frames[-2:]), *traceback.format_exception_only(error)]
            details = "".join(lines).strip()
        self.reply({"kind": LOAD_FAILED, "error": f"{type(error).__name__}: {error}", "details": details})


def set_module_sources(sources: tuple[list[str], Mapping[str, bytes]]) -> None:
    """Make this process import modules from the same files as the trainer.

    ``sources`` has two items. The first is the trainer's search path. The second maps the paths of the user's
    files to the copies of their content in the run folder. A copy is executed in place of its file.
    """
    search_path, copies = sources
    sys.path[:] = search_path
    execute_copies(copies)


def load_callable(object_path: str) -> Any:
    """Import the callable at ``module:name`` or ``file.py:name``; raises the exceptions of the import.

    ``name`` may have dots, such as ``Class.method``. Raises TypeError for an object that is not callable.
    """
    module, _, name = object_path.rpartition(":")
    loaded_object: Any = load_module(module)
    for attribute in name.split("."):
        loaded_object = getattr(loaded_object, attribute)
    if not callable(loaded_object):
        raise TypeError(f"{name} is not callable but {type(loaded_object).__name__}")
    return loaded_object


def format_error(error: BaseException) -> str:
    """Format an exception with its last stack frames, and name the limit that probably caused it."""
    formatted_lines = "".join(traceback.format_exception(error, limit=-3)).strip().split("\n")
    # Remove the lines of `^` and `~` that Python prints below code.
    text = "\n".join(line for line in formatted_lines if not line or line.strip(" ^~"))
    error_number = error.errno if isinstance(error, OSError) else None
    if error_number not in _LIMIT_BY_ERRNO:
        return text
    return f"{text}\n({_LIMIT_BY_ERRNO[error_number]})"


def main() -> None:
    """Fork a worker that runs the user's code for the requests on standard input, and supervise it.

    Never returns. The arguments of the command are the path of the serving function (``module:function``)
    and, as JSON, the limits and the visible paths.
    """
    trainer = os.getppid()
    limits = json.loads(sys.argv[2])
    visible_paths = VisiblePaths(**json.loads(sys.argv[3]))
    isolation = isolate_process(limits, visible_paths)
    worker = os.fork()
    if worker:
        # Close the pipes: while they are open here, the trainer would not notice that the worker has ended.
        os.close(0)
        os.close(1)
        os._exit(supervise_worker(worker, trainer, limits, isolation))
    unenforced = confine_worker(limits, isolation)

    # Move requests and replies to duplicated descriptors. If the user's code starts a program, the program
    # does not inherit these descriptors. Then redirect the standard output of the user's code to standard
    # error, and let its standard input be empty.
    request_stream = os.fdopen(os.dup(0), "rb")
    reply_stream = os.fdopen(os.dup(1), "wb")
    requests = Requests(request_stream, reply_stream)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    serving_function = load_callable(sys.argv[1])
    serving_function(requests, limits, unenforced)
    sys.stdout.flush()
    # Do not wait for threads that the user's code has left running.
    os._exit(0)
