"""Rewards from a Python function, run in worker processes with a time limit per sample.

A failed call makes its sample *invalid*, with a reason, and never becomes a number. A worker that exceeds the
time limit, dies or sends a malformed reply is killed with all processes that it started, and a new worker
replaces it. The call that caused the failure is not repeated; the other open calls are sent again.
"""

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
from megatron_rl.contained.confinement import describe_exceeded_limit
from megatron_rl.contained.process import kill_processes
from megatron_rl.errors import UserError, range_error
from megatron_rl.metrics import Metrics
from megatron_rl.rewards import worker as worker_process
from megatron_rl.rewards.worker import CRASHED, GROUP, TIMEOUT, TOKENS, TURNS, Answer, Call, Worker
from megatron_rl.user_code import require_python_file

LIMIT = "limit"
"""Failure reason of a sample: the worker exceeded one of its limits."""
PROTOCOL_ERROR = "disorder"
"""Failure reason of a sample: the worker sent a malformed reply."""
MAX_CALLS_PER_MESSAGE = 64
"""Maximum number of calls in one message to a plain function; several calls hide the pipe's latency."""
Sample = Mapping[str, Any]
"""Sample to reward: ``prompt``, ``response``, ``ground_truth``, ``metadata``, and the optional fields that
the function reads. ``group`` is the number of the sample's group."""
NO_METRICS = Metrics()
_CLOSED = "the reward workers are closed"


# Results


class Failure(NamedTuple):
    """Reason why a sample has no reward.

    Example:
        >>> Failure(3, "timeout", "ran longer than 10 s").reason
        'timeout'
    """

    row: int
    """Index of the sample."""
    reason: str
    """Kind of failure in one word; metrics count failures by reason."""
    message: str
    """Details of the failure, such as the function's traceback."""


def last_lines(message: str, limit: int) -> str:
    """Return the last complete lines of a message that fit into ``limit`` characters.

    If the last line is longer than the limit, return its last ``limit`` characters.
    """
    text = message.strip()
    if len(text) <= limit:
        return text
    end = text[-limit:]
    return end.partition("\n")[2] or end


@dataclass(frozen=True)
class RewardResult:
    """Rewards of B samples, with the reasons of failures.

    Example:
        >>> RewardResult([Answer(None, reward=1.0), Answer("timeout")]).valid.tolist()
        [True, False]
    """

    answers: Sequence[Answer]
    """One answer per sample, B in total."""
    extra_metrics: Metrics = NO_METRICS
    """Further metrics, such as the number of requests to a server."""

    @property
    def valid(self) -> Tensor:
        """Return a mask of the samples that have a reward: [B] bool."""
        return torch.tensor([answer.reason is None for answer in self.answers], dtype=torch.bool)

    @property
    def rewards(self) -> Tensor:
        """Return the rewards, [B] float32, NaN for invalid samples."""
        nan = float("nan")
        return torch.tensor([nan if answer.reason else answer.reward for answer in self.answers])

    @property
    def components(self) -> dict[str, Tensor]:
        """Return the values of each named component, [B] float32, NaN for a sample without it."""
        values_by_name: dict[str, Tensor] = {}
        for row, answer in enumerate(self.answers):
            for name, value in answer.components.items():
                if name not in values_by_name:
                    values_by_name[name] = torch.full((len(self.answers),), float("nan"))
                values_by_name[name][row] = value
        return values_by_name

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Return the failures of the invalid samples, in the order of the samples."""
        return tuple(
            Failure(row, answer.reason, answer.message)
            for row, answer in enumerate(self.answers)
            if answer.reason is not None
        )

    def metrics(self, reasons: Iterable[str] = ()) -> Metrics:
        """Return ``extra_metrics`` and, for each failure reason, the share of this rank's samples.

        The shares are named ``reward/invalid_REASON``. ``reasons`` are the failure reasons of other ranks:
        they are included with a share of 0, since all ranks must have the same metrics.
        """
        failure_counts = Counter(failure.reason for failure in self.failures)
        num_samples = float(len(self.answers))
        metrics = self.extra_metrics

        for reason in sorted({*failure_counts, *reasons}):
            metrics += Metrics.mean(
                f"reward/invalid_{reason}",
                float(failure_counts[reason]),
                num_samples,
            )

        return metrics


# The function and its workers


class FunctionReward:
    """Reward from the user's function ``config.function``, which runs in ``config.workers`` processes.

    A sample is invalid if its call raises, returns something other than finite numbers, runs longer than
    ``config.timeout`` seconds, exceeds one of ``config.limits`` or ends its process. The constructor loads
    the function in every worker, raises UserError if that fails, and sets two attributes:

    - ``unenforced_limits``: descriptions of the limits that this machine's kernel does not enforce
    - ``optional_fields``: the optional fields of a sample that the function reads: `TURNS`, `TOKENS` and
      `GROUP`; a function that reads `GROUP` is called once per group

    ``section`` and ``name`` are the configuration section and the name of the function's key. ``key`` is the
    complete key, if it is not in the section of the function's limits. A function with ``returns_text``
    returns text or a list of messages instead of a reward. ``extra_arguments`` are the names of further
    fields of the samples.
    """

    def __init__(
        self,
        config: RewardConfig,
        section: str = "reward",
        name: str = "function",
        *,
        key: str = "",
        returns_text: bool = False,
        extra_arguments: Sequence[str] = (),
    ) -> None:
        self.config = config
        self._section = section
        self._key = key or f"{section}.{name}"
        self._returns_text = returns_text
        self._extra_arguments = extra_arguments

        check_spec(config.function or "", self._key)
        if config.timeout <= 0:
            raise range_error(
                f"{section}.timeout",
                config.timeout,
                "a time limit above 0 s",
            )
        if config.workers < 1:
            raise range_error(
                f"{section}.workers",
                config.workers,
                "at least one worker",
            )

        self._workers: list[Worker] = []
        self._start_failure = ""
        """Reason why the last attempt to replace a worker failed."""
        self._finalizer = weakref.finalize(self, kill_processes, self._workers)

        try:
            # Start all processes before waiting for the first, so that they import concurrently.
            for _ in range(config.workers):
                self._workers.append(self._make_worker())
            unenforced_limits = [worker.await_ready() for worker in self._workers]
        except BaseException:
            self.close()
            raise

        self.unenforced_limits: tuple[str, ...] = tuple(unenforced_limits[0])
        self.optional_fields = self._workers[0].signature.takes & {TURNS, TOKENS, GROUP}

    def _make_worker(self) -> Worker:
        """Start a worker process, without waiting until its function is loaded."""
        return Worker(self.config, self._key, self._returns_text, self._extra_arguments)

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Compute the rewards of B samples, in the order of ``samples``."""
        return RewardResult(self.compute_answers(samples))

    def compute_answers(self, samples: Sequence[Sample]) -> list[Answer]:
        """Call the function for B samples; return one `Answer`, a reward or a failure, per sample."""
        if not self._finalizer.alive:
            raise RuntimeError(_CLOSED)

        outcomes: list[Answer | None] = [None] * len(samples)
        queue = deque(self._make_calls(samples))
        try:
            # Start workers that could not be replaced in an earlier round.
            while samples and len(self._workers) < self.config.workers:
                if self._start_replacement() is None:
                    break
            self._run_calls(queue, outcomes)
        except BaseException:  # a worker may still have open calls, or half of a message
            self.close()
            raise
        return [answer for answer in outcomes if answer is not None]

    def _make_calls(self, samples: Sequence[Sample]) -> list[Call]:
        """Return the calls for the samples: one per sample, or one per group."""
        if GROUP in self.optional_fields:
            group_calls: list[Call] = []
            for rows in rows_by_group(samples):
                group_samples = [samples[row] for row in rows]
                group_calls.append(Call(_group_arguments(group_samples), tuple(rows)))
            return group_calls

        calls: list[Call] = []
        for row, sample in enumerate(samples):
            arguments = {name: value for name, value in sample.items() if name != GROUP}
            calls.append(Call(arguments, (row,)))
        return calls

    def _run_calls(
        self,
        queue: deque[Call],
        outcomes: list[Answer | None],
    ) -> None:
        """Send queued calls to the workers and store their outcomes, until every call has ended.

        ``outcomes`` has one item per sample: the sample's answer, or None before the end of its call.
        """
        # A message has at most half of a worker's share of the calls, so that few calls wait behind a slow
        # call.
        num_workers = max(1, len(self._workers))
        half_share = -(-len(queue) // (2 * num_workers))  # rounded up
        max_calls = max(1, min(MAX_CALLS_PER_MESSAGE, half_share))
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.reply_fd, selectors.EVENT_READ, worker)

            while True:
                # Send calls to all workers. If no worker is busy afterwards, either all calls have ended, or
                # the calls that remain must fail, since no worker could be started.
                for worker in self._workers:
                    worker.send_calls(queue, max_calls)
                busy_workers = [worker for worker in self._workers if worker.calls]
                if not busy_workers:
                    if queue and not self._workers:
                        self._fail_queue(queue, outcomes)
                    return

                # Receive answers until the earliest deadline; replace workers that ended.
                deadline = min(worker.deadline for worker in busy_workers)
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    if not key.data.receive(outcomes):
                        self._replace_worker(selector, key.data, queue, outcomes, CRASHED)

                # Replace workers whose call runs too long. A worker with pending output may just have ended:
                # that is a crash and not a timeout, and the next `select` reports it.
                now = time.monotonic()
                for worker in list(self._workers):
                    if worker.calls and now >= worker.deadline and not worker.process.wait_for_output(0):
                        self._replace_worker(selector, worker, queue, outcomes, TIMEOUT)

    def _fail_queue(
        self,
        queue: deque[Call],
        outcomes: list[Answer | None],
    ) -> None:
        """Make the samples of all queued calls invalid, because no worker process could be started."""
        message = f"no process of {self._key} could be started again: {self._start_failure}"
        for call in queue:
            for row in call.rows:
                outcomes[row] = Answer(CRASHED, message)

    def _replace_worker(
        self,
        selector: selectors.BaseSelector,
        worker: Worker,
        queue: deque[Call],
        outcomes: list[Answer | None],
        reason: str,
    ) -> None:
        """Kill a failed worker, fail or re-queue its open calls, and start a replacement.

        ``reason`` is `CRASHED` or `TIMEOUT`.
        """
        selector.unregister(worker.reply_fd)
        status = worker.process.kill()

        # The call that caused the failure fails; the other calls return to the front of the queue.
        failed_calls, retried_calls = worker.split_open_calls()
        for call in failed_calls:
            for row in call.rows:
                outcomes[row] = Answer(*self._describe_failure(worker, reason, status))
        queue.extendleft(reversed(retried_calls))

        self._workers.remove(worker)
        replacement = self._start_replacement()
        if replacement is not None:
            selector.register(replacement.reply_fd, selectors.EVENT_READ, replacement)

    def _start_replacement(self) -> Worker | None:
        """Start a worker in place of a lost worker; return None if every attempt fails.

        The function was loaded successfully before, so a failed attempt may have a temporary reason, such as
        too little memory, and is repeated.
        """
        start_time = time.monotonic()
        for delay in (*worker_process.RESTART_DELAYS, None):
            # Append the worker before the wait, so that a `close` in another thread also ends its process. If
            # `close` was called earlier, end the process here.
            worker = self._make_worker()
            self._workers.append(worker)
            if not self._finalizer.alive:
                worker.process.kill()
                raise RuntimeError(_CLOSED)

            try:
                worker.await_ready()
            except UserError as error:
                self._workers.remove(worker)
                worker.process.kill()
                self._start_failure = str(error.got)
            else:
                return worker

            if delay is None or time.monotonic() - start_time > worker_process.RESTART_SECONDS:
                break
            time.sleep(delay)
        return None

    def _describe_failure(
        self,
        worker: Worker,
        reason: str,
        status: int,
    ) -> tuple[str, str]:
        """Return the failure reason and the message for a call that ended its worker process.

        ``status`` is the exit status of the worker process.
        """
        if reason == TIMEOUT:
            return TIMEOUT, f"ran longer than {self.config.timeout:g} s"
        if worker.process.protocol_error is not None:
            return PROTOCOL_ERROR, worker.process.protocol_error

        limits = asdict(self.config.limits)
        exceeded_limit = describe_exceeded_limit(status, limits, f"{self._section}.limits")
        if exceeded_limit:
            return LIMIT, exceeded_limit
        return CRASHED, f"the worker process ended with status {status}"

    def close(self) -> None:
        """Kill the workers.

        Later calls of `score` raise RuntimeError, and so does a call that is running in another thread.
        """
        self._finalizer()

    def __enter__(self) -> FunctionReward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rows_by_group(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the rows of each group of samples; a sample without a group is a separate group."""
    rows_by_number: dict[Any, list[int]] = {}
    for row, sample in enumerate(samples):
        group_number = sample.get(GROUP, row)
        rows_by_number.setdefault(group_number, []).append(row)
    return list(rows_by_number.values())


def _group_arguments(samples: Sequence[Sample]) -> dict[str, Any]:
    """Combine the samples of a group into the arguments of one call.

    Prompt, ground truth and metadata come from the first sample, since all samples of a group share them. The
    other arguments are lists with one item per sample.
    """
    arguments = {name: value for name, value in samples[0].items() if name != "response"}
    for name in (TURNS, TOKENS):
        if name in samples[0]:
            arguments[name] = [sample[name] for sample in samples]
    arguments[GROUP] = [sample["response"] for sample in samples]
    return arguments


def make_code_reward(config: CodeConfig) -> FunctionReward:
    """Return the reward that runs the program in a response against the tests of the record.

    The workers call `megatron_rl.rewards.code.run_tests`.
    """
    arguments = {name: getattr(config, name) for name in ("scoring", "test_timeout", "timeout")}
    settings = RewardConfig(
        "megatron_rl.rewards.code:run_tests",
        arguments,
        # Longer than the function's own deadline, so that the function returns before its worker is replaced.
        timeout=config.timeout + config.test_timeout,
        workers=config.workers,
        limits=config.limits,
    )

    return FunctionReward(settings, "reward.code")


def check_spec(spec: str, key: str = "reward.function") -> None:
    """Raise UserError unless ``spec`` is ``module:function``, or ``file.py:function`` of an existing file."""
    module, separator, name = spec.rpartition(":")
    if not separator or not module or not name:
        raise UserError(
            "the reward function's name is incomplete",
            where=key,
            expected="module:function or path/to/file.py:function",
            got=repr(spec),
            fix="add ':' and the function's name",
        )

    require_python_file(module, key, "reward file")
