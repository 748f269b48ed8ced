"""Trainer's side of a worker process: it sends calls of a reward function and receives the answers.

The one idea: calls have numbers, and each ends in one of three ways. It is answered, it fails with the
process, or it is sent again to a process without other calls. The module can be imported without torch, so
that `check` starts the same processes as a run.
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
"""Time after the first attempt from which no further one begins."""
GRACE_SECONDS = 2.0
"""Time in which a coroutine must end after it was cancelled at its limit; then its process is replaced."""


@dataclass
class Call:
    """One call of the function, for a sample or for all samples of a group."""

    arguments: dict[str, Any]
    """Name -> value."""
    rows: tuple[int, ...]
    """Indices of the samples."""
    alone: bool = False
    """Whether no other call may be open in its process: it was open when one ended, and may be the cause."""
    start_time: float = 0.0
    """Time (monotonic, seconds) from which its time limit counts."""


class Worker:
    """Worker process, with the calls that it has not answered yet.

    Calls are numbered over the worker's life. A plain function answers them in that order, and the time limit
    of a call counts from the end of the previous one. A coroutine function runs its calls concurrently. A
    function with ``returns_text`` returns text or messages for a sample, and no reward.
    """

    def __init__(
        self,
        config: RewardConfig,
        key: str,
        returns_text: bool = False,
        extra_arguments: Sequence[str] = (),
    ) -> None:
        self.config = config
        self._key = key
        self._returns_text = returns_text
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
        """Wait until the function is loaded; return descriptions of limits that the kernel does not enforce.

        Raises UserError for a function that cannot be loaded or called.
        """
        config = self.config
        function = config.function or ""
        try:
            ready = self.process.load(
                function,
                dict(config.arguments),
                self._returns_text,
                config.timeout,
            )
        except LoadFailed as error:
            raise error.as_error(
                f"the reward function {config.function}",
                self._key,
                "module:function or path/to/file.py:function that can be imported and called",
            ) from None

        self.traits = Traits.from_frame(ready)
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

    def send_calls(self, queue: deque[Call], max_calls: int) -> None:
        """Move calls from the queue to the worker, as many as it has room for.

        ``max_calls``: largest number of calls for a plain function; a coroutine function gets as many as
        ``concurrency`` allows. A call with ``alone`` is sent only to a worker without open calls.
        """
        room = max_calls
        if self.traits.concurrent:
            room = self.config.concurrency - len(self.calls)

        # A plain function gets no calls in advance: another worker may be free earlier.
        if not queue or (self.calls and (queue[0].alone or not self.traits.concurrent)):
            return
        if any(call.alone for call in self.calls.values()):
            return

        # Collect the calls of one message. A call with `alone` is the only one of its message.
        requests: list[tuple[int, dict[str, Any]]] = []
        while queue and len(requests) < room and not (queue[0].alone and requests):
            call = queue.popleft()
            call.start_time = time.monotonic()
            self.calls[self._next_number] = call
            requests.append((self._next_number, call.arguments))
            self._next_number += 1
            if call.alone:
                break
        if requests:
            self.process.send_request(requests)

    @property
    def deadline(self) -> float:
        """Return the time (monotonic, seconds) by which the oldest open call must have been answered."""
        if not self.traits.concurrent:
            return next(iter(self.calls.values())).start_time + self.config.timeout

        # A worker whose event loop runs cancels a call itself at its limit, within the grace period.
        return min(call.start_time for call in self.calls.values()) + self.config.timeout + GRACE_SECONDS

    def receive(self, outcomes: list[Answer | None]) -> bool:
        """Store the replies that have arrived; return False if the process ended or violated the protocol."""
        frames, is_open = self.process.frames()
        for frame in frames:
            # User code may have written the frame: its number must be that of an open call and, for a plain
            # function, of the first open call.
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

            # The time limit of the next call of a plain function counts from now.
            if not self.traits.concurrent and self.calls:
                next(iter(self.calls.values())).start_time = time.monotonic()
        return is_open and self.process.protocol_error is None

    def lost_calls(self) -> tuple[list[Call], list[Call]]:
        """Return the open calls of a process that ended: those that fail, and those to send again.

        The call that a plain function was running fails, and so does a single open call. Any of several
        concurrent calls may be the cause, so each is sent again in a message of its own.
        """
        calls = list(self.calls.values())
        if not self.traits.concurrent or len(calls) == 1:
            return calls[:1], calls[1:]
        return [], [replace(call, alone=True) for call in calls]


def loading_errors(
    config: RewardConfig,
    key: str,
    returns_text: bool,
    extra_arguments: Sequence[str],
) -> list[UserError]:
    """Load the configured function in a worker process, as a run does; return the error if it fails."""
    worker = Worker(config, key, returns_text, extra_arguments)
    try:
        worker.await_ready()
    except UserError as error:
        return [error]
    finally:
        worker.process.kill()
    return []
