"""The trainer's side of a worker process: what it is asked, and what of its answers is believed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.errors import UserError
from megatron_rl.rewards import worker as protocol
from megatron_rl.rewards.confinement import quiet_environment

LOAD_SECONDS = 120.0
KILL_SECONDS = 5.0
"""Time that a worker's supervisor has to end all that the worker started."""
LARGEST_FRAME = 2**24
"""Bytes of an answer above which the worker is taken for broken."""
LARGEST_NAME, MOST_COMPONENTS = 100, 64

_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from megatron_rl.rewards.worker import main; main()"
)
_PACKAGES = str(Path(__file__).resolve().parents[2])


class Answer(NamedTuple):
    """Hold what is known of one sample: a reward with components, or the reason why there is none."""

    reason: str | None
    message: str = ""
    reward: float = math.nan
    components: Mapping[str, float] = {}


class WorkerProcess:
    """One worker process, the rows it still has to answer and when it began the first of them.

    Samples are numbered over the worker's life, and answers must come in that order: whatever else arrives
    is `disorder`, and the worker is not to be believed any more.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.rows: deque[int] = deque()
        self.started = time.monotonic()
        self.disorder: str | None = None
        self._asked = self._answered = 0
        self._buffer = bytearray()
        limits = json.dumps(asdict(config.limits))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, _PACKAGES, limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=quiet_environment(os.environ),
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.requests = self.process.stdin
        self.replies = self.process.stdout.fileno()
        os.set_blocking(self.replies, False)
        path = [entry or os.getcwd() for entry in sys.path]
        path.extend(entry for entry in (os.getcwd(),) if entry not in path)
        self._ask((path, config.function, dict(config.arguments)))

    def _ask(self, request: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # its end is noticed, and named, when its reply is read
            protocol.write_request(self.requests, request)

    def await_ready(self) -> list[str]:
        """Wait until the function is loaded, and return what is not enforced; raise UserError if it fails."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.replies, selectors.EVENT_READ)
            deadline = time.monotonic() + LOAD_SECONDS
            frames: list[dict[str, Any]] = []
            while not frames:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._refuse(f"still loading after {LOAD_SECONDS:g} s", "")
                frames, open_ = self._frames()
                if not open_ and not frames:
                    self._refuse(f"its process ended with status {self.kill()} while loading it", "")
        if frames[0].get("kind") != protocol.READY:
            self._refuse(str(frames[0].get("error")), str(frames[0].get("details", "")))
        self.started = time.monotonic()
        return [str(item) for item in frames[0].get("missing", ())]

    def _refuse(self, got: str, details: str) -> NoReturn:
        self.kill()
        raise UserError(
            f"the reward function {self.config.function} cannot be loaded"
            + (f"\n{readable(details)}" if details else ""),
            where="reward.function",
            expected="module:function or path/to/file.py:function that can be imported and called",
            got=readable(got),
            fix="correct the name, or the error in the module",
        )

    def send(self, rows: deque[int], items: list[dict[str, Any]]) -> None:
        """Give the worker the samples ``rows`` and start its clock."""
        self.rows = rows
        self._ask([(self._asked + place, items[row]) for place, row in enumerate(rows)])
        self._asked += len(rows)
        self.started = time.monotonic()

    def receive(self, outcomes: list[Answer | None]) -> bool:
        """Store the replies that have arrived; return False when the process has ended or is in disorder."""
        frames, open_ = self._frames()
        for frame in frames:
            answer = _answer(frame) if self.rows and frame.get("sample") == self._answered else None
            if answer is None:
                self.disorder = f"the worker sent what is no answer to its sample: {frame!r:.200}"
                break
            outcomes[self.rows.popleft()] = answer
            self._answered += 1
            self.started = time.monotonic()
        return open_ and self.disorder is None

    def has_reply(self) -> bool:
        """Return whether a reply came in meanwhile: then the clock is not the sample's."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.replies, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _frames(self) -> tuple[list[dict[str, Any]], bool]:
        open_ = True
        while True:
            try:
                data = os.read(self.replies, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                open_ = False
                break
            self._buffer.extend(data)
        frames: list[dict[str, Any]] = []
        while len(self._buffer) >= protocol.HEADER.size:
            (size,) = protocol.HEADER.unpack_from(self._buffer)
            if size > LARGEST_FRAME:
                self.disorder = f"the worker announced an answer of {size} bytes"
                break
            end = protocol.HEADER.size + size
            if len(self._buffer) < end:
                break
            try:
                frame = json.loads(self._buffer[protocol.HEADER.size : end])
            except (ValueError, RecursionError):
                frame = None
            del self._buffer[:end]
            frames.append(frame if isinstance(frame, dict) else {})
        return frames, open_

    def kill(self) -> int:
        """End the process and all it started; return its exit status."""
        if self.process.poll() is None:
            self.process.terminate()  # the supervisor knows the worker's descendants, whatever their session
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(KILL_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        return status


def _answer(frame: Mapping[str, Any]) -> Answer | None:
    """Return what a worker says of a sample, None where it is not in the worker's language."""
    if frame.get("kind") == protocol.FAILED:
        reason = frame.get("reason")
        if reason not in (protocol.EXCEPTION, protocol.NOT_FINITE, protocol.WRONG_TYPE):
            return None
        return Answer(reason, readable(str(frame.get("message", ""))))
    components, reward = frame.get("components"), frame.get("reward")
    if frame.get("kind") != protocol.SCORED or not isinstance(components, dict) or "reward" in components:
        return None
    numbers = {"reward": reward, **components}
    if not all(isinstance(number, int | float) for number in numbers.values()):
        return None
    for name, number in numbers.items():
        if not abs(number) <= torch.finfo(torch.float32).max:
            return Answer(protocol.NOT_FINITE, f"{readable(name)} is {number}, beyond what float32 holds")
    if len(components) > MOST_COMPONENTS or any(len(name) > LARGEST_NAME for name in components):
        words = f"more than {MOST_COMPONENTS} components, or a name of more than {LARGEST_NAME} characters"
        return Answer(protocol.WRONG_TYPE, words)
    named = {readable(name): float(number) for name, number in components.items()}
    return Answer(None, "", float(numbers["reward"]), named)


def readable(text: str) -> str:
    """Return ``text`` with what no file or terminal takes replaced: half a surrogate pair is no character."""
    return text.encode("utf-8", "replace").decode("utf-8")
