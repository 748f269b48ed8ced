"""Episodes that are conversations with an environment, as the first rank of a replica leads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.data.chat_format import ChatFormats
from megatron_rl.environments.environment import Opening
from megatron_rl.environments.hosts import Asks, Ended, Hosts, Restarted
from megatron_rl.errors import UserError
from megatron_rl.rewards.worker import WRONG_TYPE
from megatron_rl.rollout.engines.base import ToolParser
from megatron_rl.rollout.turns import Commands, Groups, Row, take_unfinished
from megatron_rl.rollout.types import Completion, GenerationRequest
from megatron_rl.types import FINISH_FAILED, FINISH_LENGTH, FINISH_STOP, UNFINISHED, Outcome

DIVERGED, ENGINE, PROMPT = "diverged", "engine", "prompt"
IDLE_SECONDS = 1.0
"""Time after which a leader whose episodes are all with their environments speaks to the others again."""


@dataclass
class _Conversation:
    """One row, and what its environment knows of it: the first ``known`` tokens.

    ``asking`` says that the environment waits for a turn. ``granted`` tokens may still be sampled in this
    round, and ``turn_left`` in this turn. ``calls`` are those of tools in each turn that was handed over.
    """

    row: Row
    number: int
    known: int = 0
    asking: bool = False
    in_engine: bool = False
    granted: int | None = None
    turn_left: int | None = None
    tools: list[dict[str, Any]] | None = None
    calls: list[list[dict[str, Any]]] = field(default_factory=list)

    @property
    def rests(self) -> bool:
        """Say whether nothing more happens to the row in this round."""
        return self.row.finish_reason != UNFINISHED or (self.asking and not self.in_engine)

    def turn_over(self, end: int) -> bool:
        """Say whether the turn behind what the environment knows, up to the token ``end``, is complete."""
        stopped = end > self.known and self.row.tokens[end - 1] in self.row.sampling.stop_token_ids
        return stopped or self.row.full or end < len(self.row.tokens) or self.turn_left == 0


class Conversations:
    """Lead the episodes of one replica; see `Turns`.

    ``parse`` finds the calls of tools in a turn. A row has at most ``max_model_len`` tokens.
    """

    def __init__(
        self,
        hosts: Hosts,
        chat: ChatFormats,
        groups: Groups,
        parse: ToolParser | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self._hosts, self._chat, self._groups = hosts, chat, groups
        self._parse, self._max_model_len = parse, max_model_len
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
                talk.known, talk.asking, talk.calls = 0, False, []
            else:
                self._ended(talk, event)
        return self._commands()

    def interrupted(self, completions: Sequence[Completion]) -> None:
        """See `Turns.interrupted`."""
        take_unfinished([talk.row for talk in self._all], completions)

    def close(self) -> None:
        """End the environments of rows that go on in another step."""
        for talk in self._all:
            if talk.row.finish_reason == UNFINISHED:
                self._hosts.forget(talk.number)

    def _commands(self) -> Commands | None:
        requests: list[GenerationRequest] = []
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
        if talk.asking and talk.turn_over(len(row.tokens)):
            self._hand_over(talk, len(row.tokens))

    def _hand_over(self, talk: _Conversation, end: int) -> None:
        """Give the environment the turn that follows what it knows, up to the token ``end``."""
        turn = talk.row.tokens[talk.known : end]
        cut = not turn or turn[-1] not in talk.row.sampling.stop_token_ids
        log_probs, context = talk.row.log_probs[talk.known : end], len(talk.row.prompt) + talk.known
        text, calls = self._chat.prompts.text(turn), []
        if self._parse is not None and talk.tools:
            said = self._chat.prompts.text(turn if cut else turn[:-1], special=True)
            content, parsed = self._parse(said, talk.tools)
            if parsed:
                # Numbered, not named at random: an environment made anew is told the same.
                calls = [
                    {"id": f"call_{context}_{place}", "type": "function", "function": call}
                    for place, call in enumerate(parsed)
                ]
                text = content
        talk.known, talk.asking = end, False
        talk.calls.append(calls)
        self._hosts.turn(talk.number, text, tuple(turn), cut, tuple(log_probs), context, calls)

    def _asked(self, talk: _Conversation, event: Asks) -> None:
        row = talk.row
        if talk.known:
            last = row.tokens[talk.known - 1]
            stopped = last if last in row.sampling.stop_token_ids else None
            chat = self._chat.opened if row.opened else self._chat.prompts
            tail = chat.extend(stopped, event.messages)
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
            talk.known += len(tail)
        elif event.messages:
            self._fail(talk, WRONG_TYPE, "something was observed before the policy's first turn")
            return
        elif event.opening is not None and not self._opened(talk, event.opening):
            return
        end = talk.known
        while end < len(row.tokens) and row.mask[end]:
            end += 1
        talk.turn_left = None if event.limit is None else max(0, event.limit - (end - talk.known))
        if talk.turn_over(end):
            self._hand_over(talk, end)
        else:
            talk.asking = True

    def _opened(self, talk: _Conversation, opening: Opening) -> bool:
        """Make an environment's own messages the row's prompt; return whether they can be."""
        row, most = talk.row, self._max_model_len
        try:
            tokens = self._chat.opened.start(*opening)
        except UserError as error:
            self._fail(talk, PROMPT, str(error))
            return False
        room = row.sampling.max_response_tokens
        room = room if most is None else min(room, most - len(tokens))
        if row.tokens and row.prompt != tokens:
            self._fail(talk, DIVERGED, "made anew, the environment began with another prompt")
        elif not tokens or room < 1:
            self._fail(talk, PROMPT, f"a prompt of {len(tokens)} tokens leaves no room for a response")
        else:
            row.prompt, row.room, row.opened = tokens, room, True
            talk.tools = opening.tools
        return row.opened

    def _fail(self, talk: _Conversation, reason: str, message: str) -> None:
        self._hosts.forget(talk.number)
        self._ended(talk, Ended(talk.number, failure=reason, message=message))

    def _ended(self, talk: _Conversation, event: Ended) -> None:
        row = talk.row
        if talk.in_engine:
            self._aborts.append(self._all.index(talk))
            talk.in_engine = False
        calls = tuple(talk.calls) if any(talk.calls) else ()
        row.outcome = Outcome(event.reward, dict(event.components), event.failure, event.message, calls)
        if event.failure is not None:
            row.finish_reason = FINISH_FAILED
        else:
            row.finish_reason = FINISH_LENGTH if event.truncated or row.full else FINISH_STOP
