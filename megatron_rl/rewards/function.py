"""Rewards from a Python function, run in worker processes with a time limit per sample."""

from __future__ import annotations

import selectors
import signal
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.contained.confinement import TOO_MANY_PROCESSES, TOO_MUCH_MEMORY
from megatron_rl.contained.process import ContainedProcess, LoadFailed, kill_all
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics
from megatron_rl.rewards.worker import CRASHED, TIMEOUT, Answer, answer_of

LIMIT, DISORDER = "limit", "disorder"
CHUNK = 64


class Failure(NamedTuple):
    """Say why the reward of ``row`` is invalid; ``reason`` is one word, such as ``timeout``."""

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
        for reason, count in counts.items():
            result += Metrics.mean(f"reward/invalid_{reason}", float(count), total)
        return result


class Worker:
    """One worker process, the rows it still has to answer and when it began the first of them.

    Samples are numbered over the worker's life, and answers must come in that order.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.rows: deque[int] = deque()
        self.started = time.monotonic()
        self._asked = self._answered = 0
        self.process = ContainedProcess("megatron_rl.rewards.worker:serve", asdict(config.limits))
        self.replies = self.process.replies

    def await_ready(self) -> list[str]:
        """Wait until the function is loaded, and return what is not enforced; raise UserError if it fails."""
        try:
            ready = self.process.load(self.config.function or "", dict(self.config.arguments))
        except LoadFailed as error:
            raise error.as_error(
                f"the reward function {self.config.function}",
                "reward.function",
                "module:function or path/to/file.py:function that can be imported and called",
            ) from None
        self.started = time.monotonic()
        return [str(item) for item in ready.get("missing", ())]

    def send(self, rows: deque[int], items: list[dict[str, Any]]) -> None:
        """Give the worker the samples ``rows`` and start its clock."""
        self.rows = rows
        self.process.ask([(self._asked + place, items[row]) for place, row in enumerate(rows)])
        self._asked += len(rows)
        self.started = time.monotonic()

    def receive(self, outcomes: list[Answer | None]) -> bool:
        """Store the replies that have arrived; return False when the process has ended or is in disorder."""
        frames, open_ = self.process.frames()
        for frame in frames:
            answer = answer_of(frame) if self.rows and frame.get("sample") == self._answered else None
            if answer is None:
                self.process.disorder = f"the worker sent what is no answer to its sample: {frame!r:.200}"
                break
            outcomes[self.rows.popleft()] = answer
            self._answered += 1
            self.started = time.monotonic()
        return open_ and self.process.disorder is None


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
        self._workers: list[Worker] = []
        self._finalizer = weakref.finalize(self, kill_all, self._workers)
        try:
            for _ in range(config.workers):
                self._workers.append(Worker(config))
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
        known: Mapping[int, Answer] | None = None,
    ) -> RewardResult:
        """Return rewards, validity, components and failures of B samples, in their order.

        The function is not asked about samples whose answer is ``known``.
        """
        if not self._finalizer.alive:
            raise RuntimeError("the reward workers are closed")
        items = [
            {"prompt": prompt, "response": response, "ground_truth": truth, "metadata": dict(extra)}
            for prompt, response, truth, extra in zip(
                prompts, responses, ground_truths, metadata, strict=True
            )
        ]
        outcomes: list[Answer | None] = [(known or {}).get(row) for row in range(len(items))]
        asked = [row for row, answer in enumerate(outcomes) if answer is None]
        size = max(1, min(CHUNK, -(-len(asked) // (2 * len(self._workers)))))
        waiting = deque(deque(asked[start : start + size]) for start in range(0, len(asked), size))
        try:
            self._serve(items, waiting, outcomes)
        except BaseException:  # an interrupted worker may still hold half a chunk
            self.close()
            raise
        return result_of(outcomes)

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
                    if (
                        worker.rows
                        and now >= worker.started + self.config.timeout
                        and not worker.process.wait(0)
                    ):
                        self._replace(selector, worker, waiting, outcomes, TIMEOUT)

    def _replace(
        self,
        selector: selectors.BaseSelector,
        worker: Worker,
        waiting: deque[deque[int]],
        outcomes: list[Answer | None],
        reason: str,
    ) -> None:
        selector.unregister(worker.replies)
        status = worker.process.kill()
        if worker.rows:
            outcomes[worker.rows.popleft()] = Answer(*self._why(worker, reason, status))
            if worker.rows:
                waiting.appendleft(worker.rows)
        place = self._workers.index(worker)
        self._workers[place] = fresh = Worker(self.config)
        fresh.await_ready()
        selector.register(fresh.replies, selectors.EVENT_READ, fresh)

    def _why(self, worker: Worker, reason: str, status: int) -> tuple[str, str]:
        """Return the reason and the message of a sample on which a worker had to be replaced."""
        limits = self.config.limits
        if reason == TIMEOUT:
            return TIMEOUT, f"ran longer than {self.config.timeout:g} s"
        if worker.process.disorder is not None:
            return DISORDER, worker.process.disorder
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


def result_of(outcomes: Sequence[Answer | None]) -> RewardResult:
    """Return the answers to B samples, none of them None, as tensors."""
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
