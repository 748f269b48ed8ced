"""Processes that run a function of the user's: what they are asked, and what it may be called with.

Importable without torch, so that `check` starts the same processes as a run.
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
from megatron_rl.progress import advance
from megatron_rl.rewards.worker import ARGUMENTS, GROUP, TOKENS, TURNS, Answer, Traits, answers_of

RESTART_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between the tries to start a process again."""
RESTART_SECONDS = 60.0
"""Time after which no further try begins."""
GRACE_SECONDS = 2.0
"""Time beyond its limit that a coroutine has to end where it is cancelled; then its process is replaced."""


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

    def __init__(
        self, config: RewardConfig, where: str, writes: bool = False, further: Sequence[str] = ()
    ) -> None:
        self.config, self._where, self._writes, self._further = config, where, writes, further
        self.calls: dict[int, Call] = {}
        self.traits = Traits()
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
        self.traits = Traits.read(ready)
        self._refuse_parameters()
        return [str(item) for item in ready.get("missing", ())]

    def _refuse_parameters(self) -> None:
        """Raise UserError where the function needs what no call has, or does not take what is set for it."""
        given = {*ARGUMENTS, TURNS, TOKENS, GROUP, *self._further}
        if GROUP in self.traits.takes:
            given.discard("response")
        needed = sorted(self.traits.requires - given - set(self.config.arguments))
        idle = [] if self.traits.takes_all else sorted(set(self.config.arguments) - self.traits.takes)
        if not needed and not idle:
            return
        self.process.kill()
        problems = [f"it requires {', '.join(needed)}"] if needed else []
        problems += [f"it does not take {', '.join(idle)}, of reward.arguments"] if idle else []
        raise UserError(
            f"the function {self.config.function} cannot be called as it will be",
            where=self._where,
            expected=f"parameters among {', '.join(sorted(given))}, and the names of reward.arguments",
            got=" and ".join(problems),
            fix="rename its parameters, or give them a default"
            if needed
            else "add parameters of these names, or remove the arguments",
        )

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


def loading_errors(config: RewardConfig, where: str, writes: bool, further: Sequence[str]) -> list[UserError]:
    """Return why the function of a configuration cannot be loaded and called, by a process like a run's."""
    worker = Worker(config, where, writes, further)
    try:
        worker.await_ready()
    except UserError as error:
        return [error]
    finally:
        worker.process.kill()
    return []
