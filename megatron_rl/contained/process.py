"""A process for code that is not trusted with the trainer: how it is started, what is sent, how it ends.

Both ends are here, and need the standard library alone, so a new process is ready in some ten milliseconds
and has none of the trainer's threads and devices. What it is asked arrives on standard input, as pickles of
the trainer's own making; what it answers is JSON, since nothing that the code can write there may ever be
executed. Frames have an 8-byte length.

Two processes share the work. The first watches over limits and the trainer's life, the second, in namespaces
of its own where the kernel allows that, serves.
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
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import IO, Any, Protocol

from megatron_rl.contained.code_copy import kept_copies
from megatron_rl.contained.confinement import enter, isolate, supervise
from megatron_rl.contained.said import relay
from megatron_rl.contained.visible import Visible, allowed_environment, visible_paths
from megatron_rl.errors import UserError
from megatron_rl.user_code import load_module, use_copies

HEADER = struct.Struct("<Q")
LOAD_FAILED, READY = "load_failed", "ready"
LOAD_SECONDS = 120.0
KILL_SECONDS = 5.0
"""Time that a process's supervisor has to end all that it started."""
STATUS_SECONDS = 2.0
"""Time that it has to say with what status a process ended that has closed its pipe."""
LARGEST_FRAME = 2**24
"""Bytes of an answer above which the process is taken for broken."""
NO_TEXT = "no_text"
"""Key of a mapping that holds half a surrogate pair; see `mark_halves`."""
NO_TEXT_MESSAGE = "sent text that holds half a surrogate pair (U+D800 to U+DFFF), which is no character"
LARGEST_MESSAGE = 4000
"""Characters of an exception's text that are told."""

_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from megatron_rl.contained.process import main; main()"
)
_PACKAGES = str(Path(__file__).resolve().parents[2])
_OURS = str(Path(__file__).resolve().parents[1])
_NOT_VISIBLE = "contained code sees Python's files, those of its own folder, and what limits.read names"
_WITHHELD = {
    errno.EROFS: "limits.write is false, or the folder is not one that it makes writable",
    errno.ENETUNREACH: "limits.network is false",
    errno.ENOENT: _NOT_VISIBLE,
    errno.EACCES: _NOT_VISIBLE,
}


class LoadFailed(Exception):
    """Say why a process could not load the code that it is to run; ``details`` may be empty."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.reason, self.details = readable(reason), readable(details)

    def as_error(self, what: str, where: str, expected: str) -> UserError:
        """Return what to tell the user of code, ``what``, that a configuration names at ``where``."""
        return UserError(
            f"{what} cannot be loaded" + (f"\n{self.details}" if self.details else ""),
            where=where,
            expected=expected,
            got=self.reason,
            fix="correct the name, or the error in the module",
        )


class ContainedProcess:
    """The trainer's end of a process that runs ``serve``, as ``module:function``, within ``limits``.

    ``code`` names what it will load, as ``module:name`` or ``file.py:name``: the process sees its folder.
    ``replies`` is the descriptor to wait for. `disorder` says in words that what arrived is no answer: the
    process is not to be believed any more.
    """

    def __init__(self, serve: str, limits: Mapping[str, Any], code: str = "") -> None:
        self.disorder: str | None = None
        self._buffer = bytearray()
        self._silent = False
        network, write = limits["network"], limits["write"]
        visible = visible_paths(code, limits["read"], network=network, write=write)
        arguments = [json.dumps(limits), json.dumps(asdict(visible))]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, _PACKAGES, serve, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=allowed_environment(os.environ, limits["environment"], network=network),
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        assert self.process.stderr is not None
        relay(self.process.stderr, self.process.pid)
        # A process that does not read, since the code in it stands still, must not hold up the trainer.
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_requests, args=(self.process.stdin,), daemon=True)
        self._writer.start()
        self.replies = self.process.stdout.fileno()
        os.set_blocking(self.replies, False)

    def _write_requests(self, stream: IO[bytes]) -> None:
        """Write requests in their order, on the writer's thread; end the process where one cannot be written.

        Without an end, the trainer would wait for the reply to a request that was never sent.
        """
        try:
            with contextlib.suppress(BrokenPipeError):
                while (payload := self._requests.get()) is not None:
                    _write(stream, payload)
        except (MemoryError, OSError) as error:
            self.disorder = f"a request could not be written to the process: {error!r}"
            self.process.terminate()

    def ask(self, request: Any) -> None:
        """Send a request; a process that has ended is noticed, and named, when its reply is read."""
        self._requests.put(pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL))

    def load(self, spec: str, *more: Any) -> dict[str, Any]:
        """Have the process load ``spec`` with ``more``, and return what it says then; raises LoadFailed."""
        path = [entry or os.getcwd() for entry in sys.path]
        path.extend(entry for entry in (os.getcwd(),) if entry not in path)
        self.ask(((path, kept_copies()), spec, *more))
        deadline = time.monotonic() + LOAD_SECONDS
        frames: list[dict[str, Any]] = []
        try:
            while not frames:
                if not self.wait(max(0.0, deadline - time.monotonic())):
                    raise LoadFailed(f"still loading after {LOAD_SECONDS:g} s")
                frames, open_ = self.frames()
                if not open_ and not frames:
                    raise LoadFailed(f"its process ended with status {self.kill()} while loading it")
            if frames[0].get("kind") != READY:
                raise LoadFailed(str(frames[0].get("error")), str(frames[0].get("details", "")))
        except LoadFailed:
            self.kill()
            raise
        return frames[0]

    def wait(self, seconds: float) -> bool:
        """Return whether something arrives, or the process ends, within ``seconds``."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.replies, selectors.EVENT_READ)
            return bool(selector.select(seconds))

    def frames(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the answers that have arrived, and whether the process still lives."""
        while True:
            try:
                data = os.read(self.replies, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                self._silent = True
                break
            self._buffer.extend(data)
        frames: list[dict[str, Any]] = []
        while len(self._buffer) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer)
            if size > LARGEST_FRAME:
                self.disorder = f"the process announced an answer of {size} bytes"
                break
            end = HEADER.size + size
            if len(self._buffer) < end:
                break
            try:
                frame = json.loads(self._buffer[HEADER.size : end])
            except (ValueError, RecursionError):
                frame = None
            del self._buffer[:end]
            # This is the one place where what contained code sends is read.
            mark_halves(frame)
            frames.append(frame if isinstance(frame, dict) else {})
        return frames, not self._silent

    def kill(self) -> int:
        """End the process and all it started; return its exit status."""
        if self._silent:  # it ends by itself: asked to end, the supervisor would say 0 in place of the reason
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STATUS_SECONDS)
        if self.process.poll() is None:
            self.process.terminate()  # the supervisor knows the descendants, whatever their session
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(KILL_SECONDS)
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


def not_enforced(limits: Mapping[str, Any]) -> list[str]:
    """Return what of ``limits``, and of containment, this kernel does not enforce; raises LoadFailed.

    A process is started to find it out, once for equal limits: a kernel does not change.
    """
    return list(_not_enforced(json.dumps(limits, sort_keys=True)))


@cache
def _not_enforced(limits_text: str) -> tuple[str, ...]:
    process = ContainedProcess("megatron_rl.contained.process:serve_nothing", json.loads(limits_text))
    try:
        return tuple(str(words) for words in process.load("").get("missing", ()))
    finally:
        process.kill()


def serve_nothing(requests: Requests, limits: Mapping[str, Any], missing: list[str]) -> None:
    """Answer the first request with what is not enforced, and end."""
    requests.read()
    requests.reply({"kind": READY, "missing": missing})


class Holder(Protocol):
    """What has a process."""

    process: ContainedProcess


def kill_all(holders: Iterable[Holder]) -> None:
    """End the process of each holder."""
    for holder in holders:
        holder.process.kill()


def mark_halves(value: Any) -> bool:
    """Return whether a value read from JSON holds half a surrogate pair, which no tokenizer or file takes.

    Each mapping around one gets `NO_TEXT`, so that it can be refused alone.
    """
    if isinstance(value, str):
        return not value.isascii() and encodable(value) != value
    if isinstance(value, list):
        return any([mark_halves(item) for item in value])
    if not isinstance(value, dict):
        return False
    marked = any([mark_halves(item) for pair in value.items() for item in pair])
    if marked:
        value[NO_TEXT] = True
    return marked


def encodable(text: str) -> str:
    """Return ``text`` with what no file takes replaced: half a surrogate pair is no character."""
    return text.encode("utf-8", "replace").decode("utf-8")


def readable(text: str) -> str:
    """Return ``text`` for people, with escapes for what commands a terminal or makes a log no text."""
    characters = encodable(text)
    if characters.isprintable():
        return characters
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in characters)


def _write(stream: IO[bytes], payload: bytes) -> None:
    stream.write(HEADER.pack(len(payload)))
    stream.write(payload)  # apart: together they would be a second copy of a large payload
    stream.flush()


class Requests:
    """The process's own end: requests to read and replies to write."""

    def __init__(self, requests: IO[bytes], replies: IO[bytes]) -> None:
        self._requests, self._replies = requests, replies

    def read(self) -> Any:
        """Return what the trainer asks next; raise EOFError when it has closed."""
        header = self._requests.read(HEADER.size)
        if len(header) < HEADER.size:
            raise EOFError
        return pickle.loads(self._requests.read(HEADER.unpack(header)[0]))

    def reply(self, value: Mapping[str, Any]) -> None:
        """Write an answer."""
        _write(self._replies, json.dumps(value).encode())

    def refuse(self, error: BaseException) -> None:
        """Say that the code could not be loaded."""
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith((_OURS, "<frozen importlib"))
        ]
        lines = [*traceback.format_list(frames[-2:]), *traceback.format_exception_only(error)]
        details = "".join(lines).strip() if frames or isinstance(error, SyntaxError) else ""
        self.reply({"kind": LOAD_FAILED, "error": f"{type(error).__name__}: {error}", "details": details})


def search(place: tuple[list[str], Mapping[str, bytes]]) -> None:
    """Have this process find modules where the trainer does: by its search path, and in the run's copies."""
    path, copies = place
    sys.path[:] = path
    use_copies(copies)


def load(spec: str) -> Any:
    """Import what ``module:name`` or ``file.py:name`` names; errors tell which part is wrong."""
    place, _, name = spec.rpartition(":")
    value: Any = load_module(place)
    for attribute in name.split("."):
        value = getattr(value, attribute)
    if not callable(value):
        raise TypeError(f"{name} is not callable but {type(value).__name__}")
    return value


def told(error: BaseException) -> str:
    """Return an exception's text with its last frames, and what it was not allowed."""
    lines = "".join(traceback.format_exception(error, limit=-3)).strip().split("\n")
    text = "\n".join(line for line in lines if not line or line.strip(" ^~"))  # without marks below code
    number = error.errno if isinstance(error, OSError) else None
    return f"{text}\n({_WITHHELD[number]})" if number in _WITHHELD else text


def main() -> None:
    """Become the supervisor of a process that serves standard input.

    Arguments: serve, the limits and what is visible, both as JSON.
    """
    limits, trainer = json.loads(sys.argv[2]), os.getppid()
    isolation = isolate(limits, Visible(**json.loads(sys.argv[3])))
    worker = os.fork()
    if worker:
        # Only the worker's ends tell the trainer of its end.
        os.close(0)
        os.close(1)
        os._exit(supervise(worker, trainer, limits, isolation))
    missing = enter(limits, isolation)
    # Descriptors of our own, which programs that the code starts do not inherit; what the code prints goes
    # where errors go.
    requests = Requests(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    load(sys.argv[1])(requests, limits, missing)
    sys.stdout.flush()
    os._exit(0)  # threads that the code left running must not keep the process
