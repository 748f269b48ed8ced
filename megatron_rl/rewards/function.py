"""Rewards from a Python function, run in worker processes with a time limit per sample."""

from __future__ import annotations

import selectors
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.config.sections.rewards import CodeConfig, RewardConfig
from megatron_rl.contained.confinement import limit_of
from megatron_rl.contained.process import kill_all
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics
from megatron_rl.rewards import calls
from megatron_rl.rewards.calls import Call, Worker
from megatron_rl.rewards.worker import CRASHED, GROUP, TIMEOUT, TOKENS, TURNS, Answer
from megatron_rl.user_code import require_file

LIMIT, DISORDER = "limit", "disorder"
CHUNK = 64
Sample = Mapping[str, Any]
"""The arguments ``prompt``, ``response``, ``ground_truth`` and ``metadata`` of a call, with those that the
function asks for; ``group`` is the number of the sample's group."""


NO_METRICS = Metrics()


class Failure(NamedTuple):
    """Say why the reward of ``row`` is invalid; ``reason`` is one word, such as ``timeout``."""

    row: int
    reason: str
    message: str


def ending(message: str, most: int) -> str:
    """Return the last whole lines of a message that ``most`` characters hold, or the end of its last one."""
    text = message.strip()
    end = text[-most:]
    return end if len(text) <= most else end.partition("\n")[2] or end


@dataclass(frozen=True)
class RewardResult:
    """Hold what is said of B samples, as ``answers`` and as tensors; ``measured`` is what judging took."""

    answers: Sequence[Answer]
    measured: Metrics = NO_METRICS

    @property
    def valid(self) -> Tensor:
        """Return which samples have a reward: [B] bool."""
        return torch.tensor([answer.reason is None for answer in self.answers], dtype=torch.bool)

    @property
    def rewards(self) -> Tensor:
        """Return the rewards, [B] float32, NaN where the reward failed."""
        nan = float("nan")
        return torch.tensor([nan if answer.reason else answer.reward for answer in self.answers])

    @property
    def components(self) -> dict[str, Tensor]:
        """Return the values of each named component, [B] float32, NaN where a sample has none."""
        values: dict[str, Tensor] = {}
        for row, answer in enumerate(self.answers):
            for name, value in answer.components.items():
                values.setdefault(name, torch.full((len(self.answers),), float("nan")))[row] = value
        return values

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Return why samples have no reward, one entry for each that has none."""
        return tuple(
            Failure(row, answer.reason, answer.message)
            for row, answer in enumerate(self.answers)
            if answer.reason is not None
        )

    def metrics(self, reasons: Iterable[str] = ()) -> Metrics:
        """Return what judging took, and ``reward/invalid_<reason>``: the shares of samples that failed so.

        ``reasons`` are those that other ranks know, whose samples count too.
        """
        counts = Counter(failure.reason for failure in self.failures)
        total = float(len(self.answers))
        result = self.measured
        for reason in sorted({*counts, *reasons}):
            result += Metrics.mean(f"reward/invalid_{reason}", float(counts[reason]), total)
        return result


class FunctionReward:
    """Score responses with the function that ``config.function`` names, in ``config.workers`` processes.

    A sample whose call raises, returns something other than finite numbers, runs longer than
    ``config.timeout`` seconds, goes over one of ``config.limits`` or ends its process is invalid; its reward
    never becomes a number. A worker that overran its time or died is killed with everything it started, and
    replaced. The constructor loads the function in every worker and raises a UserError when that fails;
    ``missing`` then says in words what of the limits this machine's kernel does not enforce, and ``takes``
    what samples must have beside the usual: `TURNS`, `TOKENS`, and whether they come by `GROUP`.

    ``where`` and ``name`` are the section and the key that name the function to the user; ``key`` is where it
    stands apart from its limits. One that ``writes`` returns text for a sample, or a list of messages, and no
    reward. Samples have the ``further`` names beside the usual ones.
    """

    def __init__(
        self,
        config: RewardConfig,
        where: str = "reward",
        name: str = "function",
        *,
        key: str = "",
        writes: bool = False,
        further: Sequence[str] = (),
    ) -> None:
        self.config, self._where, self._name, self._writes = config, where, key or f"{where}.{name}", writes
        self._further = further
        check_spec(config.function or "", self._name)
        if config.timeout <= 0 or config.workers < 1:
            raise UserError(
                "the reward settings are out of range",
                where=f"{where}.timeout" if config.timeout <= 0 else f"{where}.workers",
                expected="a time limit above 0 s and at least one worker",
                got=f"timeout {config.timeout}, workers {config.workers}",
            )
        self._workers: list[Worker] = []
        self._no_worker = ""
        self._finalizer = weakref.finalize(self, kill_all, self._workers)
        try:
            for _ in range(config.workers):
                self._workers.append(self._begin())
            missing = [worker.await_ready() for worker in self._workers]
        except BaseException:
            self.close()
            raise
        self.missing: tuple[str, ...] = tuple(missing[0])
        self.takes = self._workers[0].traits.takes & {TURNS, TOKENS, GROUP}

    def _begin(self) -> Worker:
        return Worker(self.config, self._name, self._writes, self._further)

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Return rewards, validity, components and failures of B samples, in their order."""
        return RewardResult(self.answers(samples))

    def answers(self, samples: Sequence[Sample]) -> list[Answer]:
        """Return what the function says of B samples, in their order."""
        if not self._finalizer.alive:
            raise RuntimeError("the reward workers are closed")
        outcomes: list[Answer | None] = [None] * len(samples)
        waiting = deque(self._calls(samples))
        try:
            while samples and len(self._workers) < self.config.workers and self._begin_again() is not None:
                pass  # one could not be started when it was to be replaced
            self._serve(waiting, outcomes)
        except BaseException:  # an interrupted worker may still hold half its calls
            self.close()
            raise
        return [answer for answer in outcomes if answer is not None]

    def _calls(self, samples: Sequence[Sample]) -> list[Call]:
        if GROUP not in self.takes:
            alone = [{name: value for name, value in one.items() if name != GROUP} for one in samples]
            return [Call(item, (row,)) for row, item in enumerate(alone)]
        groups = rows_by_group(samples)
        return [Call(_of_group([samples[row] for row in rows]), tuple(rows)) for rows in groups]

    def _serve(self, waiting: deque[Call], outcomes: list[Answer | None]) -> None:
        share = max(1, min(CHUNK, -(-len(waiting) // (2 * len(self._workers)))))
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            while True:
                for worker in self._workers:
                    worker.take(waiting, share)
                busy = [worker for worker in self._workers if worker.calls]
                if not busy and waiting and not self._workers:
                    self._give_up(waiting, outcomes)
                if not busy:
                    return
                soonest = min(worker.deadline for worker in busy)
                for key, _ in selector.select(max(0.0, soonest - time.monotonic())):
                    if not key.data.receive(outcomes):
                        self._replace(selector, key.data, waiting, outcomes, CRASHED)
                now = time.monotonic()
                for worker in list(self._workers):
                    if worker.calls and now >= worker.deadline and not worker.process.wait(0):
                        self._replace(selector, worker, waiting, outcomes, TIMEOUT)

    def _give_up(self, waiting: deque[Call], outcomes: list[Answer | None]) -> None:
        """Make the samples invalid for which no process could be started."""
        message = f"no process of {self._name} could be started again: {self._no_worker}"
        for row in (row for call in waiting for row in call.rows):
            outcomes[row] = Answer(CRASHED, message)

    def _replace(
        self,
        selector: selectors.BaseSelector,
        worker: Worker,
        waiting: deque[Call],
        outcomes: list[Answer | None],
        reason: str,
    ) -> None:
        selector.unregister(worker.replies)
        status = worker.process.kill()
        guilty, again = worker.lost()
        for row in (row for call in guilty for row in call.rows):
            outcomes[row] = Answer(*self._why(worker, reason, status))
        waiting.extendleft(reversed(again))
        self._workers.remove(worker)
        fresh = self._begin_again()
        if fresh is not None:
            selector.register(fresh.replies, selectors.EVENT_READ, fresh)

    def _begin_again(self) -> Worker | None:
        """Start a worker in the place of one that is gone, with some tries; None where all of them fail.

        The function loaded before, so a failure is that of the moment: the process was killed, or the
        machine is out of memory.
        """
        begun = time.monotonic()
        for wait in (*calls.RESTART_WAITS, None):
            worker = self._begin()
            self._workers.append(worker)  # so that a closed reward ends it, too
            try:
                worker.await_ready()
            except UserError as error:
                self._workers.remove(worker)
                worker.process.kill()
                self._no_worker = str(error.got)
            else:
                return worker
            if wait is None or time.monotonic() - begun > calls.RESTART_SECONDS:
                break
            time.sleep(wait)
        return None

    def _why(self, worker: Worker, reason: str, status: int) -> tuple[str, str]:
        """Return the reason and the message of a sample on which a worker had to be replaced."""
        if reason == TIMEOUT:
            return TIMEOUT, f"ran longer than {self.config.timeout:g} s"
        if worker.process.disorder is not None:
            return DISORDER, worker.process.disorder
        if words := limit_of(status, asdict(self.config.limits), f"{self._where}.limits"):
            return LIMIT, words
        return CRASHED, f"the worker process ended with status {status}"

    def close(self) -> None:
        """Kill the workers; scoring afterwards raises RuntimeError."""
        self._finalizer()

    def __enter__(self) -> FunctionReward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rows_by_group(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the rows of each group of samples; one that names no group is a group of its own."""
    groups: dict[Any, list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.get(GROUP, row), []).append(row)
    return list(groups.values())


def _of_group(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the arguments of a call for a group: what its samples share, and lists of what they do not."""
    lists = {name: [sample[name] for sample in samples] for name in (TURNS, TOKENS) if name in samples[0]}
    group = {GROUP: [sample["response"] for sample in samples]}
    return {name: value for name, value in samples[0].items() if name != "response"} | lists | group


def code_reward(config: CodeConfig) -> FunctionReward:
    """Return what judges programs by tests, see `run_tests`."""
    arguments = {name: getattr(config, name) for name in ("scoring", "test_timeout", "timeout")}
    settings = RewardConfig(
        "megatron_rl.rewards.code:run_tests",
        arguments,
        timeout=config.timeout + config.test_timeout,
        workers=config.workers,
        limits=config.limits,
    )
    return FunctionReward(settings, "reward.code")


def check_spec(spec: str, where: str = "reward.function") -> None:
    """Raise a UserError unless ``spec`` has the form ``module:function`` or names an existing file."""
    place, separator, name = spec.rpartition(":")
    if not separator or not place or not name:
        raise UserError(
            "the reward function's name is incomplete",
            where=where,
            expected="module:function or path/to/file.py:function",
            got=repr(spec),
            fix="add ':' and the function's name",
        )
    require_file(place, where, "reward file")
