"""Rewards from a Python function, run in worker processes with a time limit per sample."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics
from megatron_rl.rewards import worker as protocol

TIMEOUT, CRASHED = "timeout", "crashed"
REASONS = (protocol.EXCEPTION, protocol.NOT_FINITE, protocol.WRONG_TYPE, TIMEOUT, CRASHED)
LOAD_SECONDS = 120.0
CHUNK = 64


class Failure(NamedTuple):
    """Say why the reward of ``row`` is invalid; ``reason`` is one of ``REASONS``."""

    row: int
    reason: str
    message: str


class RewardResult(NamedTuple):
    """Hold the rewards of B samples.

    ``rewards`` [B] float32 is NaN and ``valid`` [B] bool is false where the reward failed; ``components``
    maps a name to [B] float32, NaN where a sample has no such component; ``failures`` has one entry per
    invalid row.
    """

    rewards: Tensor
    valid: Tensor
    components: Mapping[str, Tensor]
    failures: tuple[Failure, ...]

    def metrics(self) -> Metrics:
        """Return ``reward/invalid`` and ``reward/invalid_<reason>``: fractions of all samples."""
        counts = Counter(failure.reason for failure in self.failures)
        total = float(len(self.valid))
        result = Metrics.mean("reward/invalid", float(len(self.failures)), total)
        for reason in REASONS:
            if counts[reason]:
                result = result + Metrics.mean(f"reward/invalid_{reason}", float(counts[reason]), total)
        return result


class FunctionReward:
    """Score responses with the function that ``config.function`` names, in ``config.workers`` processes.

    A sample whose call raises, returns something other than finite numbers, runs longer than
    ``config.timeout`` seconds or ends its process is invalid; its reward never becomes a number. A worker
    that overran its time or died is killed with everything it started, and replaced. The constructor
    loads the function in every worker and raises a UserError when that fails.
    """

    def __init__(self, config: RewardConfig) -> None:
        check_spec(config.function or "")
        if config.timeout <= 0 or config.workers < 1:
            raise UserError(
                "the reward settings are out of range",
                where="reward.timeout" if config.timeout <= 0 else "reward.workers",
                expected="a time limit above 0 s and at least one worker",
                got=f"timeout {config.timeout}, workers {config.workers}",
            )
        self.config = config
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)
        try:
            for _ in range(config.workers):
                self._workers.append(_Worker(config))
            for worker in self._workers:
                worker.await_ready()
        except BaseException:
            self.close()
            raise

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        ground_truths: Sequence[Any],
        metadata: Sequence[Mapping[str, Any]],
    ) -> RewardResult:
        """Return rewards, validity, components and failures of B samples, in their order."""
        if not self._finalizer.alive:
            raise RuntimeError("the reward workers are closed")
        items = [
            {"prompt": prompt, "response": response, "ground_truth": truth, "metadata": dict(extra)}
            for prompt, response, truth, extra in zip(
                prompts, responses, ground_truths, metadata, strict=True
            )
        ]
        outcomes: list[tuple[Any, ...] | None] = [None] * len(items)
        size = max(1, min(CHUNK, -(-len(items) // (2 * len(self._workers)))))
        waiting = deque(
            deque(range(start, min(start + size, len(items)))) for start in range(0, len(items), size)
        )
        try:
            self._serve(items, waiting, outcomes)
        except BaseException:  # an interrupted worker may still hold half a chunk
            self.close()
            raise
        return _result(outcomes)

    def _serve(
        self, items: list[dict[str, Any]], waiting: deque[deque[int]], outcomes: list[tuple[Any, ...] | None]
    ) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            while True:
                for worker in self._workers:
                    if waiting and not worker.rows:
                        worker.send(waiting.popleft(), items)
                busy = [worker for worker in self._workers if worker.rows]
                if not busy:
                    return
                soonest = min(worker.started + self.config.timeout for worker in busy)
                for key, _ in selector.select(max(0.0, soonest - time.monotonic())):
                    if not key.data.receive(outcomes):
                        self._replace(selector, key.data, waiting, outcomes, CRASHED)
                now = time.monotonic()
                for worker in self._workers:
                    if worker.rows and now >= worker.started + self.config.timeout and not worker.has_reply():
                        self._replace(selector, worker, waiting, outcomes, TIMEOUT)

    def _replace(
        self,
        selector: selectors.BaseSelector,
        worker: _Worker,
        waiting: deque[deque[int]],
        outcomes: list[tuple[Any, ...] | None],
        reason: str,
    ) -> None:
        selector.unregister(worker.replies)
        status = worker.kill()
        if worker.rows:
            message = (
                f"ran longer than {self.config.timeout:g} s"
                if reason == TIMEOUT
                else f"the worker process ended with status {status}"
            )
            outcomes[worker.rows.popleft()] = (protocol.FAILED, reason, message)
            if worker.rows:
                waiting.appendleft(worker.rows)
        place = self._workers.index(worker)
        self._workers[place] = fresh = _Worker(self.config)
        fresh.await_ready()
        selector.register(fresh.replies, selectors.EVENT_READ, fresh)

    def close(self) -> None:
        """Kill the workers; scoring afterwards raises RuntimeError."""
        self._finalizer()

    def __enter__(self) -> FunctionReward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_spec(spec: str) -> None:
    """Raise a UserError unless ``spec`` has the form ``module:function`` or names an existing file."""
    place, separator, name = spec.rpartition(":")
    if not separator or not place or not name:
        raise UserError(
            "the reward function's name is incomplete",
            where="reward.function",
            expected="module:function or path/to/file.py:function",
            got=repr(spec),
            fix="add ':' and the function's name",
        )
    if place.endswith(".py") and not Path(place).is_file():
        raise UserError(
            f"the reward file {place} does not exist",
            where="reward.function",
            expected="an existing Python file",
            got=f"no such file, seen from {Path.cwd()}",
            fix="correct the path; it is relative to the directory the run is started in",
        )


class _Worker:
    """One worker process, the rows it still has to answer and when it began the first of them."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.rows: deque[int] = deque()
        self.started = time.monotonic()
        self._buffer = bytearray()
        requests_out, requests_in = os.pipe()
        replies_out, replies_in = os.pipe()
        command = [
            sys.executable,
            "-P",
            protocol.__file__,
            str(requests_out),
            str(replies_in),
            str(os.getpid()),
        ]
        try:
            self.process = subprocess.Popen(
                command, pass_fds=(requests_out, replies_in), stdin=subprocess.DEVNULL, start_new_session=True
            )
        finally:
            os.close(requests_out)
            os.close(replies_in)
        self.requests = os.fdopen(requests_in, "wb")
        self.replies = replies_out
        os.set_blocking(self.replies, False)
        path = [entry or os.getcwd() for entry in sys.path]
        path.extend(entry for entry in (os.getcwd(),) if entry not in path)
        self._write((path, config.function, dict(config.arguments)))

    def _write(self, frame: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # its end is noticed, and named, when its reply is read
            protocol.write_frame(self.requests, frame)

    def await_ready(self) -> None:
        """Wait until the function is loaded; raise a UserError when it cannot be."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.replies, selectors.EVENT_READ)
            deadline = time.monotonic() + LOAD_SECONDS
            frames: list[Any] = []
            while not frames:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._refuse(f"still loading after {LOAD_SECONDS:g} s", "")
                frames, open_ = self._frames()
                if not open_ and not frames:
                    self._refuse(f"its process ended with status {self.kill()} while loading it", "")
        if frames[0][0] == protocol.LOAD_FAILED:
            self._refuse(frames[0][1], frames[0][2])
        self.started = time.monotonic()

    def _refuse(self, got: str, details: str) -> None:
        self.kill()
        raise UserError(
            f"the reward function {self.config.function} cannot be loaded"
            + (f"\n{details}" if details else ""),
            where="reward.function",
            expected="module:function or path/to/file.py:function that can be imported and called",
            got=got,
            fix="correct the name, or the error in the module",
        )

    def send(self, rows: deque[int], items: list[dict[str, Any]]) -> None:
        """Give the worker the samples ``rows`` and start its clock."""
        self.rows = rows
        self._write([items[row] for row in rows])
        self.started = time.monotonic()

    def receive(self, outcomes: list[tuple[Any, ...] | None]) -> bool:
        """Store the replies that have arrived; return False when the process has ended."""
        frames, open_ = self._frames()
        for frame in frames:
            outcomes[self.rows.popleft()] = frame
            self.started = time.monotonic()
        return open_

    def has_reply(self) -> bool:
        """Return whether a reply came in meanwhile: then the clock is not the sample's."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.replies, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _frames(self) -> tuple[list[Any], bool]:
        open_ = True
        while True:
            try:
                part = os.read(self.replies, 1 << 16)
            except BlockingIOError:
                break
            if not part:
                open_ = False
                break
            self._buffer.extend(part)
        frames: list[Any] = []
        while len(self._buffer) >= protocol.HEADER.size:
            (size,) = protocol.HEADER.unpack_from(self._buffer)
            end = protocol.HEADER.size + size
            if len(self._buffer) < end:
                break
            frames.append(pickle.loads(self._buffer[protocol.HEADER.size : end]))
            del self._buffer[:end]
        return frames, open_

    def kill(self) -> int:
        """Kill the process and all it started; return its exit status."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.requests.close()
        with contextlib.suppress(OSError):
            os.close(self.replies)
        return status


def _kill_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.kill()


def _result(outcomes: Sequence[tuple[Any, ...] | None]) -> RewardResult:
    rewards = torch.full((len(outcomes),), float("nan"))
    valid = torch.zeros(len(outcomes), dtype=torch.bool)
    components: dict[str, Tensor] = {}
    failures: list[Failure] = []
    for row, outcome in enumerate(outcomes):
        assert outcome is not None
        if outcome[0] == protocol.FAILED:
            failures.append(Failure(row, outcome[1], outcome[2]))
            continue
        rewards[row], valid[row] = outcome[1], True
        for name, value in outcome[2].items():
            components.setdefault(name, torch.full((len(outcomes),), float("nan")))[row] = value
    return RewardResult(rewards, valid, components, tuple(failures))
