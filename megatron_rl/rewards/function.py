"""Rewards from a Python function, run in worker processes with a time limit per sample."""

from __future__ import annotations

import selectors
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.config.sections.rewards import CodeConfig, RewardConfig
from megatron_rl.contained.confinement import limit_of
from megatron_rl.contained.process import ContainedProcess, LoadFailed, kill_all
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics
from megatron_rl.progress import advance
from megatron_rl.rewards.worker import CRASHED, GROUP, TIMEOUT, TOKENS, TURNS, Answer, Traits, answers_of
from megatron_rl.user_code import require_file

LIMIT, DISORDER = "limit", "disorder"
CHUNK = 64
GRACE_SECONDS = 2.0
"""Time beyond its limit that a coroutine has to end where it is cancelled; then its process is replaced."""
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


@dataclass
class Call:
    """One call of the function: of a sample, or of all samples of a group; ``rows`` says which they are."""

    item: dict[str, Any]
    rows: tuple[int, ...]
    alone: bool = False
    """It may have ended a process: it gets one for itself until it is known."""
    since: float = 0.0


class Worker:
    """One worker process, and the calls that it still has to answer.

    Calls are numbered over the worker's life. A plain function answers them in that order, and the clock of
    one starts when the one before it has ended; the calls of a coroutine function are open together.
    """

    def __init__(self, config: RewardConfig, where: str, writes: bool) -> None:
        self.config, self._where, self._writes = config, where, writes
        self.calls: dict[int, Call] = {}
        self.traits = Traits(frozenset(), False)
        self._asked = 0
        self.process = ContainedProcess(
            "megatron_rl.rewards.worker:serve", asdict(config.limits), config.function or ""
        )
        self.replies = self.process.replies

    def await_ready(self) -> list[str]:
        """Wait until the function is loaded, and return what is not enforced; raise UserError if it fails."""
        config = self.config
        try:
            ready = self.process.load(
                config.function or "", dict(config.arguments), self._writes, config.timeout
            )
        except LoadFailed as error:
            raise error.as_error(
                f"the reward function {config.function}",
                self._where,
                "module:function or path/to/file.py:function that can be imported and called",
            ) from None
        self.traits = Traits(frozenset(map(str, ready.get("takes", ()))), ready.get("concurrent") is True)
        return [str(item) for item in ready.get("missing", ())]

    def take(self, waiting: deque[Call], share: int) -> None:
        """Ask for as many of the waiting calls as the worker has room for."""
        room = self.config.concurrency - len(self.calls) if self.traits.concurrent else share
        if not waiting or (self.calls and (waiting[0].alone or not self.traits.concurrent)):
            return
        if any(call.alone for call in self.calls.values()):
            return
        asked: list[tuple[int, dict[str, Any]]] = []
        while waiting and len(asked) < room and not (waiting[0].alone and asked):
            call = waiting.popleft()
            call.since = time.monotonic()
            self.calls[self._asked] = call
            asked.append((self._asked, call.item))
            self._asked += 1
            if call.alone:
                break
        if asked:
            self.process.ask(asked)

    @property
    def deadline(self) -> float:
        """Return when the first of the open calls must have been answered."""
        if not self.traits.concurrent:
            return next(iter(self.calls.values())).since + self.config.timeout
        # The worker itself ends a call that waits too long, if its event loop runs.
        return min(call.since for call in self.calls.values()) + self.config.timeout + GRACE_SECONDS

    def receive(self, outcomes: list[Answer | None]) -> bool:
        """Store the replies that have arrived; return False when the process has ended or is in disorder."""
        frames, open_ = self.process.frames()
        for frame in frames:
            number = frame.get("call")
            expected = self.traits.concurrent or number == next(iter(self.calls), None)
            call = self.calls.get(number) if isinstance(number, int) and expected else None
            answers = None if call is None else answers_of(frame, len(call.rows))
            if not isinstance(number, int) or call is None or answers is None:
                self.process.disorder = f"the worker sent what is no answer to its sample: {frame!r:.200}"
                break
            for row, answer in zip(call.rows, answers, strict=True):
                outcomes[row] = answer
                advance("rewards")
            del self.calls[number]
            if not self.traits.concurrent and self.calls:
                next(iter(self.calls.values())).since = time.monotonic()
        return open_ and self.process.disorder is None

    def lost(self) -> tuple[list[Call], list[Call]]:
        """Return the calls that ended the process, and those to be asked again, some of them alone.

        Which of several open calls it was, is not known: then each is tried alone.
        """
        calls = list(self.calls.values())
        if not self.traits.concurrent or len(calls) == 1:
            return calls[:1], calls[1:]
        return [], [replace(call, alone=True) for call in calls]


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
    reward.
    """

    def __init__(
        self,
        config: RewardConfig,
        where: str = "reward",
        name: str = "function",
        *,
        key: str = "",
        writes: bool = False,
    ) -> None:
        self.config, self._where, self._name, self._writes = config, where, key or f"{where}.{name}", writes
        check_spec(config.function or "", self._name)
        if config.timeout <= 0 or config.workers < 1:
            raise UserError(
                "the reward settings are out of range",
                where=f"{where}.timeout" if config.timeout <= 0 else f"{where}.workers",
                expected="a time limit above 0 s and at least one worker",
                got=f"timeout {config.timeout}, workers {config.workers}",
            )
        self._workers: list[Worker] = []
        self._finalizer = weakref.finalize(self, kill_all, self._workers)
        try:
            for _ in range(config.workers):
                self._workers.append(self._begin())
            missing = [worker.await_ready() for worker in self._workers]
        except BaseException:
            self.close()
            raise
        self.missing: tuple[str, ...] = tuple(missing[0])
        self.takes = self._workers[0].traits.takes

    def _begin(self) -> Worker:
        return Worker(self.config, self._name, self._writes)

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
                if not busy:
                    return
                soonest = min(worker.deadline for worker in busy)
                for key, _ in selector.select(max(0.0, soonest - time.monotonic())):
                    if not key.data.receive(outcomes):
                        self._replace(selector, key.data, waiting, outcomes, CRASHED)
                now = time.monotonic()
                for worker in self._workers:
                    if worker.calls and now >= worker.deadline and not worker.process.wait(0):
                        self._replace(selector, worker, waiting, outcomes, TIMEOUT)

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
        place = self._workers.index(worker)
        self._workers[place] = fresh = self._begin()
        fresh.await_ready()
        selector.register(fresh.replies, selectors.EVENT_READ, fresh)

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
