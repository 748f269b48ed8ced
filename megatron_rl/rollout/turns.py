"""Whose turn it is: what the engine is asked for the rows of one replica, and what they become.

With an environment an episode is a conversation. The first tensor-parallel rank of a replica leads it: it
alone speaks with the environments, and tells the others what to ask of the engine. What an environment has
seen is always a part of the row's tokens, so one that is made anew, in another process or step, is given the
same turns again and must observe the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_rl.distributed.exchange import broadcast_object
from megatron_rl.progress import advance
from megatron_rl.rollout.engine import Completion, Request, Sampler
from megatron_rl.types import (
    FINISH_LENGTH,
    UNFINISHED,
    Outcome,
    PromptBatch,
    SamplingParameters,
)


@dataclass
class Row:
    """Hold one episode while a replica samples it.

    ``group`` is the place of its prompt among the sweep's. ``tokens``, ``mask`` (sampled by the policy),
    ``log_probs`` and ``support`` (see `Completion`) are of what follows the prompt, of which ``before`` were
    there when the sweep began; there is ``room`` for so many in all. ``experts`` are those of the row's last
    `Completion`, from its first token on. ``opened`` says that the prompt is the environment's own.
    """

    prompt: list[int]
    sampling: SamplingParameters
    seed: int
    group: int
    room: int
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    support: list[Sequence[int]] = field(default_factory=list)
    before: int = 0
    finish_reason: int = UNFINISHED
    outcome: Outcome | None = None
    opened: bool = False
    experts: Tensor | None = None

    @property
    def full(self) -> bool:
        """Say whether there is no room left."""
        return len(self.tokens) >= self.room

    def request(self, number: int, limit: int | None) -> Request:
        """Ask for what comes next, at most ``limit`` tokens."""
        done = len(self.tokens)
        left = self.room - done if limit is None else min(self.room - done, limit)
        return Request(number, [*self.prompt, *self.tokens], self.sampling, left, self.seed, done)

    def sampled(self, completion: Completion) -> None:
        """Append what the policy said."""
        count = len(completion.tokens)
        self.tokens.extend(completion.tokens)
        self.log_probs.extend(completion.log_probs)
        self.support.extend(completion.support or [()] * count)
        self.mask.extend([True] * count)
        if completion.experts is not None:
            self.experts = completion.experts

    def observed(self, tokens: Sequence[int]) -> None:
        """Append what an environment said."""
        self.tokens.extend(tokens)
        self.log_probs.extend([0.0] * len(tokens))
        self.support.extend([()] * len(tokens))
        self.mask.extend([False] * len(tokens))


class Commands(NamedTuple):
    """Say what to ask of the engine next."""

    requests: tuple[Request, ...] = ()
    aborts: tuple[int, ...] = ()


class Groups(Protocol):
    """Deal rows out to a replica, group after group; a request's number is its row's place in ``rows``."""

    prompts: PromptBatch
    rows: list[Row]

    def more(self, busy: int) -> list[int]:
        """Begin further rows while there is room beside ``busy`` ones; return their places."""
        ...


class Turns(Protocol):
    """Decide what the engine is asked for the rows of one replica; see `Groups` for their numbers.

    Collective over the tensor-parallel ranks of the replica, on all of which the answers are equal.
    """

    def begin(self, limit: int | None) -> Commands | None:
        """Begin a round in which every row that goes on, and every new one, gets up to ``limit`` tokens."""
        ...

    def next(self, completions: Sequence[Completion]) -> Commands | None:
        """Take what the engine answered; return what to ask now, None at the end of the round."""
        ...

    def interrupted(self, completions: Sequence[Completion]) -> None:
        """Take what was sampled of answers that were open when the round ended; see `Sampler.interrupt`."""
        ...

    def close(self) -> None:
        """Let go of rows that go on in another step."""
        ...


class SingleTurns:
    """Ask once a round for each row: an episode is one response. The same on all ranks; see `Turns`."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._limit: int | None = None
        self._waiting = 0

    def begin(self, limit: int | None) -> Commands | None:
        """See `Turns.begin`."""
        self._limit = limit
        return self._requests(range(len(self._groups.rows)))

    def next(self, completions: Sequence[Completion]) -> Commands | None:
        """See `Turns.next`."""
        self._waiting -= len(completions)
        for completion in completions:
            row = self._groups.rows[completion.number]
            row.sampled(completion)
            if completion.finish_reason != FINISH_LENGTH or row.full:
                row.finish_reason = completion.finish_reason
        return self._requests(()) if completions else Commands()

    def _requests(self, places: Iterable[int]) -> Commands | None:
        """Ask for the rows at ``places`` that go on, and for those that there is room for beside them."""
        rows = self._groups.rows
        going = [place for place in places if rows[place].finish_reason == UNFINISHED]
        new = self._groups.more(self._waiting + len(going))
        going += [place for place in new if rows[place].finish_reason == UNFINISHED]
        self._waiting += len(going)
        if not self._waiting:
            return None
        return Commands(tuple(rows[place].request(place, self._limit) for place in going))

    def interrupted(self, completions: Sequence[Completion]) -> None:
        """See `Turns.interrupted`."""
        take_unfinished(self._groups.rows, completions)

    def close(self) -> None:
        """See `Turns.close`."""


def drive(engine: Sampler, turns: Turns, limit: int | None, then: Callable[[], None] = lambda: None) -> None:
    """Run one round, and call ``then`` behind each engine step; collective as `Turns` are."""
    with engine.sampling():
        commands = turns.begin(limit)
        while commands is not None:
            for number in commands.aborts:
                engine.abort(number)
            for request in commands.requests:
                engine.submit(request)
            commands = turns.next(engine.step())
            advance("engine steps")
            then()
        turns.interrupted(engine.interrupt())


def take_unfinished(rows: Sequence[Row], completions: Sequence[Completion]) -> None:
    """Append what was sampled of open answers to the rows that go on; a request's number is a row's place."""
    for completion in completions:
        if rows[completion.number].finish_reason == UNFINISHED:
            rows[completion.number].sampled(completion)


class Until:
    """Lead ``turns`` until they rest or a round is ``over``; see `Turns`."""

    def __init__(self, turns: Turns, over: Callable[[], bool]) -> None:
        self._turns, self._over = turns, over
        self.interrupted, self.close = turns.interrupted, turns.close

    def begin(self, limit: int | None) -> Commands | None:
        """See `Turns.begin`."""
        return None if self._over() else self._turns.begin(limit)

    def next(self, completions: Sequence[Completion]) -> Commands | None:
        """See `Turns.next`."""
        commands = self._turns.next(completions)
        return None if self._over() else commands


class Led:
    """Have all tensor-parallel ``ranks`` of a replica ask the engine for the same; see `Turns`.

    ``leader`` is None on all but the first of them. Its calls are collective over the ranks.
    """

    def __init__(self, leader: Turns | None, ranks: tuple[int, ...]) -> None:
        self._leader, self._ranks = leader, ranks

    def begin(self, limit: int | None) -> Commands | None:
        """See `Turns.begin`."""
        return broadcast_object(self._leader.begin(limit) if self._leader else None, self._ranks)

    def next(self, completions: Sequence[Completion]) -> Commands | None:
        """See `Turns.next`."""
        return broadcast_object(self._leader.next(completions) if self._leader else None, self._ranks)

    def interrupted(self, completions: Sequence[Completion]) -> None:
        """See `Turns.interrupted`."""
        if self._leader:
            self._leader.interrupted(completions)

    def close(self) -> None:
        """See `Turns.close`."""
        if self._leader:
            self._leader.close()
