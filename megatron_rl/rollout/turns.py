"""Whose turn it is: what the engine is asked for the rows of one replica, and what they become.

With an environment an episode is a conversation. The first tensor-parallel rank of a replica leads it: it
alone speaks with the environments, and tells the others what to ask of the engine. What an environment has
seen is always a part of the row's tokens, so one that is made anew, in another process or step, is given the
same turns again and must observe the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_rl.data.chat_format import ChatFormat
from megatron_rl.environments.hosts import Asks, Ended, Hosts, Restarted
from megatron_rl.parallel.exchange import share
from megatron_rl.progress import advance
from megatron_rl.rewards.worker import WRONG_TYPE
from megatron_rl.rollout.engine import Completion, Request, Sampler
from megatron_rl.types import (
    FINISH_FAILED,
    FINISH_LENGTH,
    FINISH_STOP,
    UNFINISHED,
    Outcome,
    PromptBatch,
    SamplingParameters,
)

DIVERGED, ENGINE = "diverged", "engine"
IDLE_SECONDS = 1.0
"""Time after which a leader whose episodes are all with their environments speaks to the others again."""


@dataclass
class Row:
    """Hold one episode while a replica samples it.

    ``group`` is the place of its prompt among the sweep's. ``tokens``, ``mask`` (sampled by the policy),
    ``log_probs`` and ``support`` (see `Completion`) are of what follows the prompt, of which ``before`` were
    there when the sweep began; there is ``room`` for so many in all. ``experts`` are those of the row's last
    `Completion`, from its first token on.
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
    """Deal rows out to a replica, group by group; a request's number is its row's place in ``rows``."""

    prompts: PromptBatch
    rows: list[Row]

    def more(self, busy: int) -> list[int]:
        """Begin further groups while there is room beside ``busy`` rows; return the places of their rows."""
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

    def close(self) -> None:
        """See `Turns.close`."""


def drive(engine: Sampler, turns: Turns, limit: int | None) -> None:
    """Run one round; collective as `Turns` are."""
    with engine.sampling():
        commands = turns.begin(limit)
        while commands is not None:
            for number in commands.aborts:
                engine.abort(number)
            for request in commands.requests:
                engine.submit(request)
            commands = turns.next(engine.step())
            advance("engine steps")


@dataclass
class _Conversation:
    """One row, and what its environment knows of it: the first ``known`` tokens.

    ``asking`` says that the environment waits for a turn; ``turn_over`` that the last turn among the tokens
    has ended. ``granted`` tokens may still be sampled in this round, and ``turn_left`` in this turn.
    """

    row: Row
    number: int
    known: int = 0
    asking: bool = False
    turn_over: bool = False
    in_engine: bool = False
    granted: int | None = None
    turn_left: int | None = None

    @property
    def rests(self) -> bool:
        """Say whether nothing more happens to the row in this round."""
        return self.row.finish_reason != UNFINISHED or (self.asking and not self.in_engine)


class Conversations:
    """Lead the episodes of one replica; see `Turns`."""

    def __init__(self, hosts: Hosts, chat: ChatFormat, groups: Groups) -> None:
        self._hosts, self._chat, self._groups = hosts, chat, groups
        self._aborts: list[int] = []
        self._limit: int | None = None
        self._all: list[_Conversation] = []
        self._by_number: dict[int, _Conversation] = {}

    def begin(self, limit: int | None) -> Commands | None:
        """Let every row that goes on have ``limit`` more tokens."""
        self._limit = limit
        for talk in self._all:
            talk.granted = limit
        return self._commands()

    def _begin_more(self) -> None:
        """Start the environments of the rows that there is room for beside those that do not rest."""
        prompts = self._groups.prompts
        busy = sum(not talk.rests for talk in self._all)
        for place in self._groups.more(busy):
            row = self._groups.rows[place]
            talk = _Conversation(row, self._hosts.reserve(1), granted=self._limit)
            self._all.append(talk)
            self._by_number[talk.number] = talk
            if row.finish_reason == UNFINISHED:
                values = {
                    "prompt": prompts.prompts[row.group],
                    "ground_truth": prompts.ground_truths[row.group],
                    "metadata": dict(prompts.metadata[row.group]),
                    "seed": row.seed,
                }
                self._hosts.start(talk.number, values)

    def next(self, completions: Sequence[Completion]) -> Commands | None:
        """Take what the engine answered, and what environments said meanwhile; see `Turns.next`."""
        for completion in completions:
            self._completed(self._all[completion.number], completion)
        idle = not any(talk.in_engine for talk in self._all)
        for event in self._hosts.poll(IDLE_SECONDS if idle else 0.0):
            talk = self._by_number[event.number]
            if isinstance(event, Asks):
                self._asked(talk, event)
            elif isinstance(event, Restarted):
                talk.known, talk.asking = 0, False
            else:
                self._ended(talk, event)
        return self._commands()

    def close(self) -> None:
        """End the environments of rows that go on in another step."""
        for talk in self._all:
            if talk.row.finish_reason == UNFINISHED:
                self._hosts.forget(talk.number)

    def _commands(self) -> Commands | None:
        requests: list[Request] = []
        for place, talk in enumerate(self._all):
            if (
                talk.row.finish_reason == UNFINISHED
                and talk.asking
                and not talk.in_engine
                and talk.granted != 0
            ):
                limits = [limit for limit in (talk.granted, talk.turn_left) if limit is not None]
                requests.append(talk.row.request(place, min(limits, default=None)))
                talk.in_engine = True
        self._begin_more()
        aborts, self._aborts = self._aborts, []
        if not requests and not aborts and all(talk.rests for talk in self._all):
            return None
        return Commands(tuple(requests), tuple(aborts))

    def _completed(self, talk: _Conversation, completion: Completion) -> None:
        talk.in_engine = False
        if completion.finish_reason == FINISH_FAILED:
            self._hosts.forget(talk.number)
            self._ended(talk, Ended(talk.number, failure=ENGINE, message="the engine could not sample"))
            return
        row, count = talk.row, len(completion.tokens)
        row.sampled(completion)
        talk.granted = None if talk.granted is None else talk.granted - count
        talk.turn_left = None if talk.turn_left is None else talk.turn_left - count
        talk.turn_over = completion.finish_reason == FINISH_STOP or row.full or talk.turn_left == 0
        if talk.turn_over and talk.asking:
            self._hand_over(talk, len(row.tokens))

    def _hand_over(self, talk: _Conversation, end: int) -> None:
        """Give the environment the turn that follows what it knows, up to the token ``end``."""
        turn = talk.row.tokens[talk.known : end]
        cut = not turn or turn[-1] not in talk.row.sampling.stop_token_ids
        talk.known, talk.asking = end, False
        self._hosts.turn(talk.number, self._chat.text(turn), turn, cut)

    def _asked(self, talk: _Conversation, event: Asks) -> None:
        row = talk.row
        if talk.known:
            last = row.tokens[talk.known - 1]
            stopped = last if last in row.sampling.stop_token_ids else None
            tail = self._chat.extend(stopped, event.messages)
            if not tail:
                self._fail(talk, WRONG_TYPE, "nothing was observed that has a token")
                return
            if talk.known < len(row.tokens):
                end = talk.known + len(tail)
                if row.tokens[talk.known : end] != tail or any(row.mask[talk.known : end]):
                    self._fail(talk, DIVERGED, "made anew, the environment observed something else")
                    return
            elif len(row.tokens) + len(tail) >= row.room:
                self._hosts.end(talk.number)
                return
            else:
                row.observed(tail)
                talk.turn_over = False
            talk.known += len(tail)
        elif event.messages:
            self._fail(talk, WRONG_TYPE, "something was observed before the policy's first turn")
            return
        end = talk.known
        while end < len(row.tokens) and row.mask[end]:
            end += 1
        if end < len(row.tokens) or talk.turn_over:
            self._hand_over(talk, end)
        else:
            talk.asking = True
            talk.turn_left = None if event.limit is None else event.limit - (end - talk.known)

    def _fail(self, talk: _Conversation, reason: str, message: str) -> None:
        self._hosts.forget(talk.number)
        self._ended(talk, Ended(talk.number, failure=reason, message=message))

    def _ended(self, talk: _Conversation, event: Ended) -> None:
        row = talk.row
        if talk.in_engine:
            self._aborts.append(self._all.index(talk))
            talk.in_engine = False
        row.outcome = Outcome(event.reward, dict(event.components), event.failure, event.message)
        if event.failure is not None:
            row.finish_reason = FINISH_FAILED
        else:
            row.finish_reason = FINISH_LENGTH if event.truncated or row.full else FINISH_STOP


class Led:
    """Have all tensor-parallel ``ranks`` of a replica ask the engine for the same; see `Turns`.

    ``leader`` is None on all but the first of them. Its calls are collective over the ranks.
    """

    def __init__(self, leader: Conversations | None, ranks: tuple[int, ...]) -> None:
        self._leader, self._ranks = leader, ranks

    def begin(self, limit: int | None) -> Commands | None:
        """See `Turns.begin`."""
        return share(self._leader.begin(limit) if self._leader else None, self._ranks)

    def next(self, completions: Sequence[Completion]) -> Commands | None:
        """See `Turns.next`."""
        return share(self._leader.next(completions) if self._leader else None, self._ranks)

    def close(self) -> None:
        """See `Turns.close`."""
        if self._leader:
            self._leader.close()
