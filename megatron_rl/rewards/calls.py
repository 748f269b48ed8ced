"""The trainer's side of a worker process: calls of a reward function, sent and answered.

The one idea: a worker has numbered calls, and each of them is answered, lost with the process, or tried
alone. Importable without torch, so that `check` starts the same processes as a run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.contained.process import ContainedProcess, LoadFailed
from megatron_rl.errors import UserError
from megatron_rl.progress import count_progress
from megatron_rl.rewards.worker import (
    ARGUMENTS,
    GROUP,
    TOKENS,
    TURNS,
    Answer,
    Traits,
    answers_of,
    parameter_hints,
)

RESTART_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between the attempts to start a process again: a shortage of memory is often temporary."""
RESTART_SECONDS = 60.0
"""Time after which no further try begins."""
GRACE_SECONDS = 2.0
"""Time that a coroutine has to end after it was cancelled at its limit; then its process is replaced."""


@dataclass
class Call:
    """One call of the function, for a sample or for all samples of a group."""

    item: dict[str, Any]
    """Arguments by name."""
    rows: tuple[int, ...]
    """Indices of the samples."""
    alone: bool = False
    """Whether it needs a process for itself: it was open when a process ended, and may be the cause."""
    since: float = 0.0
    """Time (monotonic) at which its clock started."""


class Worker:
    """Worker process, with the calls that it has not answered yet.

    Calls are numbered over the worker's life. A plain function answers them in that order, and the clock of
    one starts when the previous one has ended. The calls of a coroutine function are open at the same time.
    """

    def __init__(
        self,
        config: RewardConfig,
        key: str,
        writes: bool = False,
        extra_arguments: Sequence[str] = (),
    ) -> None:
        self.config = config
        self._key = key
        self._writes = writes
        self._extra_arguments = extra_arguments

        self.calls: dict[int, Call] = {}
        """Open calls by number, in the order in which they were sent."""
        self.traits = Traits()
        self._next_number = 0

        self.process = ContainedProcess(
            "megatron_rl.rewards.worker:serve", asdict(config.limits), config.function or ""
        )
        self.replies = self.process.replies

    def await_ready(self) -> list[str]:
        """Wait until the function is loaded and return the limits that are not enforced, as texts.

        Raises UserError for a function that cannot be loaded or called.
        """
        config = self.config
        function = config.function or ""
        try:
            ready = self.process.load(
                function,
                dict(config.arguments),
                self._writes,
                config.timeout,
            )
        except LoadFailed as error:
            raise error.as_error(
                f"the reward function {config.function}",
                self._key,
                "module:function or path/to/file.py:function that can be imported and called",
            ) from None

        self.traits = Traits.read(ready)
        self._require_parameters()
        return [str(item) for item in ready.get("missing", ())]

    def _require_parameters(self) -> None:
        """Raise UserError for parameters without an argument, and for arguments without a parameter."""
        available = {*ARGUMENTS, TURNS, TOKENS, GROUP, *self._extra_arguments}
        if GROUP in self.traits.takes:
            available.discard("response")

        # A parameter without a default must come from a call or from `reward.arguments`; an argument that the
        # function does not take would silently have no effect.
        arguments = set(self.config.arguments)
        unavailable = sorted(self.traits.requires - available - arguments)
        unused = [] if self.traits.takes_all else sorted(arguments - self.traits.takes)
        if not unavailable and not unused:
            return

        self.process.kill()
        problems = []
        fix = "add parameters of these names, or remove the arguments"
        if unused:
            problems.append(f"it does not take {', '.join(unused)}, of reward.arguments")
        if unavailable:
            problems.insert(0, f"it requires {', '.join(unavailable)}")
            fix = parameter_hints(unavailable) or "rename its parameters, or give them a default"
        raise UserError(
            f"the function {self.config.function} does not fit the arguments of its call",
            where=self._key,
            expected=f"parameters among {', '.join(sorted(available))}, and the names of reward.arguments",
            got=" and ".join(problems),
            fix=fix,
        )

    def take(self, waiting: deque[Call], share: int) -> None:
        """Send as many of the waiting calls as the worker has room for.

        ``share``: maximum number of calls for a plain function. A call that needs a process for itself is
        sent alone.
        """
        room = share
        if self.traits.concurrent:
            room = self.config.concurrency - len(self.calls)

        # A plain function gets no calls in advance: another worker may be free earlier.
        if not waiting or (self.calls and (waiting[0].alone or not self.traits.concurrent)):
            return
        if any(call.alone for call in self.calls.values()):
            return

        # Collect the calls of one message. A call that needs the process for itself gets its own message.
        requests: list[tuple[int, dict[str, Any]]] = []
        while waiting and len(requests) < room and not (waiting[0].alone and requests):
            call = waiting.popleft()
            call.since = time.monotonic()
            self.calls[self._next_number] = call
            requests.append((self._next_number, call.item))
            self._next_number += 1
            if call.alone:
                break
        if requests:
            self.process.send_request(requests)

    @property
    def deadline(self) -> float:
        """Return the time (monotonic) by which the first of the open calls must have been answered."""
        if not self.traits.concurrent:
            return next(iter(self.calls.values())).since + self.config.timeout
        # The worker itself cancels a call at its limit, if its event loop runs.
        return min(call.since for call in self.calls.values()) + self.config.timeout + GRACE_SECONDS

    def receive(self, outcomes: list[Answer | None]) -> bool:
        """Store the replies that have arrived; return False if the process ended or violated the protocol."""
        frames, is_open = self.process.frames()
        for frame in frames:
            # User code may have written the frame: its number must be an open call's; for a plain function
            # the first one's.
            number = frame.get("call")
            call = None
            if isinstance(number, int) and (self.traits.concurrent or number == next(iter(self.calls), None)):
                call = self.calls.get(number)
            answers = None
            if call is not None:
                answers = answers_of(frame, len(call.rows))
            if not isinstance(number, int) or call is None or answers is None:
                self.process.protocol_error = f"the worker sent a malformed answer: {frame!r:.200}"
                break

            for row, answer in zip(call.rows, answers, strict=True):
                outcomes[row] = answer
                count_progress("rewards")
            del self.calls[number]

            # The clock of the next call of a plain function starts now.
            if not self.traits.concurrent and self.calls:
                next(iter(self.calls.values())).since = time.monotonic()
        return is_open and self.process.protocol_error is None

    def lost(self) -> tuple[list[Call], list[Call]]:
        """Return the calls that ended the process, and the calls to send again.

        Any of several open calls may be the cause: then each is tried alone.
        """
        calls = list(self.calls.values())
        if not self.traits.concurrent or len(calls) == 1:
            return calls[:1], calls[1:]
        return [], [replace(call, alone=True) for call in calls]


def loading_errors(
    config: RewardConfig,
    key: str,
    writes: bool,
    extra_arguments: Sequence[str],
) -> list[UserError]:
    """Load the configured function in a worker process, as a run does; return the error if it fails."""
    worker = Worker(config, key, writes, extra_arguments)
    try:
        worker.await_ready()
    except UserError as error:
        return [error]
    finally:
        worker.process.kill()
    return []
