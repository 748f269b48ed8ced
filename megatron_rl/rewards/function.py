"""Rewards from a Python function, run in worker processes with a time limit per sample."""

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
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics
from megatron_rl.rewards import worker as protocol
from megatron_rl.rewards.confinement import TOO_MANY_PROCESSES, TOO_MUCH_MEMORY, quiet_environment

TIMEOUT, CRASHED, LIMIT, DISORDER = "timeout", "crashed", "limit", "disorder"
REASONS = (protocol.EXCEPTION, protocol.NOT_FINITE, protocol.WRONG_TYPE, TIMEOUT, CRASHED, LIMIT, DISORDER)
LOAD_SECONDS = 120.0
KILL_SECONDS = 5.0
"""Time that a worker's supervisor has to end all that the worker started."""
CHUNK = 64
LARGEST_FRAME = 2**24
"""Bytes of an answer above which the worker is taken for broken."""
LARGEST_NAME, MOST_COMPONENTS = 100, 64

_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from megatron_rl.rewards.worker import main; main()"
)
_PACKAGES = str(Path(__file__).resolve().parents[2])


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
    ``config.timeout`` seconds, goes over one of ``config.limits`` or ends its process is invalid; its reward
    never becomes a number. A worker that overran its time or died is killed with everything it started, and
    replaced. The constructor loads the function in every worker and raises a UserError when that fails;
    ``missing`` then says in words what of the limits this machine's kernel does not enforce.
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
            missing = [worker.await_ready() for worker in self._workers]
        except BaseException:
            self.close()
            raise
        self.missing: tuple[str, ...] = tuple(missing[0])

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
        outcomes: list[Answer | None] = [None] * len(items)
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
        self, items: list[dict[str, Any]], waiting: deque[deque[int]], outcomes: list[Answer | None]
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
        outcomes: list[Answer | None],
        reason: str,
    ) -> None:
        selector.unregister(worker.replies)
        status = worker.kill()
        if worker.rows:
            outcomes[worker.rows.popleft()] = Answer(*self._why(worker, reason, status))
            if worker.rows:
                waiting.appendleft(worker.rows)
        place = self._workers.index(worker)
        self._workers[place] = fresh = _Worker(self.config)
        fresh.await_ready()
        selector.register(fresh.replies, selectors.EVENT_READ, fresh)

    def _why(self, worker: _Worker, reason: str, status: int) -> tuple[str, str]:
        """Return the reason and the message of a sample on which a worker had to be replaced."""
        limits = self.config.limits
        if reason == TIMEOUT:
            return TIMEOUT, f"ran longer than {self.config.timeout:g} s"
        if worker.disorder is not None:
            return DISORDER, worker.disorder
        if status == TOO_MANY_PROCESSES:
            return LIMIT, f"started more than {limits.processes} processes (reward.limits.processes)"
        if status == TOO_MUCH_MEMORY:
            return LIMIT, f"held more than {limits.memory_gib:g} GiB in all (reward.limits.memory_gib)"
        if status == 128 + signal.SIGXCPU:
            return LIMIT, f"used more than {limits.cpu_seconds:g} s of processor (reward.limits.cpu_seconds)"
        return CRASHED, f"the worker process ended with status {status}"

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


class Answer(NamedTuple):
    """Hold what is known of one sample: a reward with components, or the reason why there is none."""

    reason: str | None
    message: str = ""
    reward: float = math.nan
    components: Mapping[str, float] = {}


class _Worker:
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


def _kill_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.kill()


def _result(outcomes: Sequence[Answer | None]) -> RewardResult:
    rewards = torch.full((len(outcomes),), float("nan"))
    valid = torch.zeros(len(outcomes), dtype=torch.bool)
    components: dict[str, Tensor] = {}
    failures: list[Failure] = []
    for row, answer in enumerate(outcomes):
        assert answer is not None
        if answer.reason is not None:
            failures.append(Failure(row, answer.reason, answer.message))
            continue
        rewards[row], valid[row] = answer.reward, True
        for name, value in answer.components.items():
            components.setdefault(name, torch.full((len(outcomes),), float("nan")))[row] = value
    return RewardResult(rewards, valid, components, tuple(failures))
