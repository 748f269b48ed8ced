"""Sampling of sequences that are conversations with environments.

The first rank of a replica schedules alone: only it speaks with the environments. What an environment has
seen is always a prefix of the sequence's tokens. So one that is made anew, in another process or step, is
given the same turns again, and must observe the same.
"""

from __future__ import annotations

from array import array
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.data.chat_format import ChatFormats
from megatron_rl.environments.environment import Opening
from megatron_rl.environments.hosts import Asks, Ended, Hosts, Restarted
from megatron_rl.errors import UserError
from megatron_rl.rewards.worker import WRONG_TYPE
from megatron_rl.rollout.engines.base import Generator, ToolParser
from megatron_rl.rollout.scheduler import ReplicaQueue, ReplicaScheduler, SchedulerOutput, response_room
from megatron_rl.rollout.types import Completion, Sequence
from megatron_rl.types import FINISH_FAILED, FINISH_LENGTH, FINISH_STOP, Outcome

DIVERGED, ENGINE, PROMPT = "diverged", "engine", "prompt"
IDLE_SECONDS = 1.0
"""Longest wait for environments while the engine has nothing to do: then the other ranks get an empty
message, so that their wait for one does not time out."""


@dataclass
class _Conversation:
    """A sequence and its environment, which has seen the first ``seen`` tokens after the prompt."""

    sequence: Sequence
    number: int
    """Position in `ReplicaScheduler.admitted`, and number of its requests."""

    episode: int
    """Number of the episode at the environments' hosts."""

    max_model_len: int | None
    seen: int = 0
    has_own_prompt: bool = False
    """The environment opened with messages of its own, in place of the record's prompt."""

    awaits_turn: bool = False
    """The environment waits for a turn of the policy."""

    in_engine: bool = False
    round_tokens_left: int | None = None
    """Tokens that may still be sampled in this token round, None without a bound."""

    turn_tokens_left: int | None = None
    """Tokens that may still be sampled in this turn, None without a bound."""

    tools: list[dict[str, Any]] | None = None
    tool_calls: list[list[dict[str, Any]]] = field(default_factory=list)
    """Calls of tools in each turn that the environment was given."""

    dropped_tokens: int = 0
    """Tokens of an observation that was too long for the sequence's remaining room."""

    @property
    def is_full(self) -> bool:
        """Return whether there is no room for a further token."""
        return len(self.sequence.tokens) >= response_room(self.sequence, self.max_model_len)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing more happens to the sequence in this token round."""
        return self.sequence.is_finished or (self.awaits_turn and not self.in_engine)

    @property
    def wants_tokens(self) -> bool:
        """Return whether a request is to be submitted now."""
        waits = self.awaits_turn and not self.in_engine and not self.sequence.is_finished
        return waits and self.round_tokens_left != 0

    def is_turn_complete(self, end: int) -> bool:
        """Return whether the turn between what the environment has seen and the token ``end`` is complete."""
        tokens = self.sequence.tokens
        stopped = end > self.seen and tokens[end - 1] in self.sequence.sampling.stop_token_ids
        return stopped or self.is_full or end < len(tokens) or self.turn_tokens_left == 0


class MultiTurnScheduler(ReplicaScheduler):
    """The schedule of one replica whose sequences are conversations; see `ReplicaScheduler`.

    ``parse`` finds the calls of tools in a turn. A replica of several ranks must be led.
    """

    def __init__(
        self,
        engine: Generator,
        queue: ReplicaQueue,
        hosts: Hosts,
        chat: ChatFormats,
        parse: ToolParser | None = None,
        *,
        stop_when: Callable[[], bool] | None = None,
        ranks: tuple[int, ...] = (0,),
    ) -> None:
        super().__init__(engine, queue, stop_when=stop_when, ranks=ranks, is_led=True)
        self._hosts, self._chat, self._parse = hosts, chat, parse
        self._conversations: list[_Conversation] = []
        self._by_episode: dict[int, _Conversation] = {}
        self._aborts: list[int] = []

    def start_token_round(self, tokens: int | None) -> None:
        """See `ReplicaScheduler.start_token_round`."""
        super().start_token_round(tokens)
        for conversation in self._conversations:
            conversation.round_tokens_left = tokens

    def schedule(self) -> SchedulerOutput | None:
        """Return the requests of turns that environments wait for; None once all conversations are idle."""
        requests = []
        for conversation in self._conversations:
            if conversation.wants_tokens:
                bounds = (conversation.round_tokens_left, conversation.turn_tokens_left)
                limit = min((bound for bound in bounds if bound is not None), default=None)
                requests.append(self.request(conversation.number, limit))
                conversation.in_engine = True

        self._start_environments()
        aborts, self._aborts = self._aborts, []
        if not requests and not aborts and all(one.is_idle for one in self._conversations):
            return None
        return SchedulerOutput(tuple(requests), tuple(aborts))

    def _start_environments(self) -> None:
        """Admit sequences while there is room beside the busy ones, and start their environments."""
        busy = sum(not conversation.is_idle for conversation in self._conversations)
        self.admit(busy)
        for number in range(len(self._conversations), len(self.admitted)):
            admitted = self.admitted[number]
            conversation = _Conversation(
                admitted.sequence,
                number,
                self._hosts.reserve(1),
                self.engine.max_model_len,
                round_tokens_left=self._token_round,
            )
            self._conversations.append(conversation)
            self._by_episode[conversation.episode] = conversation
            if not admitted.sequence.is_finished:
                self._hosts.start(conversation.episode, self._episode_values(number))

    def _episode_values(self, number: int) -> dict[str, Any]:
        """Return what an environment's `Episode` is made of."""
        admitted = self.admitted[number]
        prompt = self.queue.round.groups[admitted.group].prompt
        return {
            "prompt": prompt.prompts[0],
            "ground_truth": prompt.ground_truths[0],
            "metadata": dict(prompt.metadata[0]),
            "seed": admitted.sequence.seed,
        }

    def update(self, completions: abc.Sequence[Completion]) -> None:
        """Append what the engine sampled, and take in what environments said meanwhile."""
        for completion in completions:
            self._append(self._conversations[completion.number], completion)

        is_engine_idle = not any(conversation.in_engine for conversation in self._conversations)
        for event in self._hosts.poll(IDLE_SECONDS if is_engine_idle else 0.0):
            conversation = self._by_episode[event.number]
            if isinstance(event, Asks):
                self._turn_requested(conversation, event)
            elif isinstance(event, Restarted):
                conversation.seen, conversation.awaits_turn, conversation.tool_calls = 0, False, []
            else:
                self._finish(conversation, event)

    def close(self) -> None:
        """End the environments of sequences that go on in another step."""
        for conversation in self._conversations:
            if not conversation.sequence.is_finished:
                self._hosts.forget(conversation.episode)

    def new_prompts(self) -> dict[int, list[int]]:
        """See `ReplicaScheduler.new_prompts`."""
        opened = {one.number for one in self._conversations if one.has_own_prompt}
        return {
            admitted.position: admitted.sequence.prompt.tolist()
            for number, admitted in enumerate(self.admitted)
            if number in opened and not admitted.start
        }

    def _append(self, conversation: _Conversation, completion: Completion) -> None:
        conversation.in_engine = False
        if completion.finish_reason == FINISH_FAILED:
            self._fail(conversation, ENGINE, "the engine could not sample")
            return

        sequence, count = conversation.sequence, len(completion.tokens)
        sequence.append_sampled(completion, self._version)
        if conversation.round_tokens_left is not None:
            conversation.round_tokens_left -= count
        if conversation.turn_tokens_left is not None:
            conversation.turn_tokens_left -= count
        if conversation.awaits_turn and conversation.is_turn_complete(len(sequence.tokens)):
            self._hand_over(conversation, len(sequence.tokens))

    def _hand_over(self, conversation: _Conversation, end: int) -> None:
        """Give the environment the turn from what it has seen up to the token ``end``."""
        sequence, start = conversation.sequence, conversation.seen
        turn = sequence.tokens[start:end].tolist()
        is_cut = not turn or turn[-1] not in sequence.sampling.stop_token_ids
        context = len(sequence.prompt) + start
        text = self._chat.prompts.text(turn)

        calls: list[dict[str, Any]] = []
        if self._parse is not None and conversation.tools:
            with_special = self._chat.prompts.text(turn if is_cut else turn[:-1], special=True)
            content, parsed = self._parse(with_special, conversation.tools)
            if parsed:
                # Numbered, not named at random: an environment that is made anew is told the same.
                calls = [
                    {"id": f"call_{context}_{index}", "type": "function", "function": call}
                    for index, call in enumerate(parsed)
                ]
                text = content

        conversation.seen, conversation.awaits_turn = end, False
        conversation.tool_calls.append(calls)
        log_probs = tuple(sequence.log_probs[start:end])
        self._hosts.turn(conversation.episode, text, tuple(turn), is_cut, log_probs, context, calls)

    def _turn_requested(self, conversation: _Conversation, event: Asks) -> None:
        """Take in what an environment observed before the turn that it now waits for."""
        if conversation.seen:
            if not self._append_observed(conversation, event):
                return
        elif event.messages:
            self._fail(conversation, WRONG_TYPE, "something was observed before the policy's first turn")
            return
        elif event.opening is not None and not self._open(conversation, event.opening):
            return

        # Tokens of this turn may be there already, of an interrupted turn or an environment made anew.
        sequence, end = conversation.sequence, conversation.seen
        while end < len(sequence.tokens) and sequence.is_sampled(end):
            end += 1
        sampled = end - conversation.seen
        conversation.turn_tokens_left = None if event.limit is None else max(0, event.limit - sampled)
        if conversation.is_turn_complete(end):
            self._hand_over(conversation, end)
        else:
            conversation.awaits_turn = True

    def _append_observed(self, conversation: _Conversation, event: Asks) -> bool:
        """Append the observed messages, or compare them with earlier ones; return whether a turn follows."""
        sequence, seen = conversation.sequence, conversation.seen
        last = sequence.tokens[seen - 1]
        stopped = last if last in sequence.sampling.stop_token_ids else None
        chat = self._chat.opened if conversation.has_own_prompt else self._chat.prompts
        observed = chat.extend(stopped, event.messages)
        if not observed:
            self._fail(conversation, WRONG_TYPE, "nothing was observed that has a token")
            return False

        end = seen + len(observed)
        if seen < len(sequence.tokens):
            before = sequence.tokens[seen:end].tolist()
            if before != observed or any(map(sequence.is_sampled, range(seen, end))):
                self._fail(conversation, DIVERGED, "made anew, the environment observed something else")
                return False
        elif end >= response_room(sequence, self.engine.max_model_len):
            conversation.dropped_tokens = len(observed)
            self._hosts.end(conversation.episode)
            return False
        else:
            sequence.append_observed(observed)
        conversation.seen = end
        return True

    def _open(self, conversation: _Conversation, opening: Opening) -> bool:
        """Make an environment's own messages the sequence's prompt; return whether they can be."""
        sequence = conversation.sequence
        try:
            tokens = self._chat.opened.start(*opening)
        except UserError as error:
            self._fail(conversation, PROMPT, str(error))
            return False

        prompt = array("q", tokens)
        room = sequence.sampling.max_response_tokens
        if self.engine.max_model_len is not None:
            room = min(room, self.engine.max_model_len - len(prompt))
        if sequence.tokens and sequence.prompt != prompt:
            self._fail(conversation, DIVERGED, "made anew, the environment began with another prompt")
        elif not prompt or room < 1:
            reason = f"a prompt of {len(prompt)} tokens leaves no room for a response"
            self._fail(conversation, PROMPT, reason)
        else:
            sequence.prompt = prompt
            conversation.has_own_prompt = True
            conversation.tools = opening.tools
        return conversation.has_own_prompt

    def _fail(self, conversation: _Conversation, reason: str, message: str) -> None:
        self._hosts.forget(conversation.episode)
        self._finish(conversation, Ended(conversation.episode, failure=reason, message=message))

    def _finish(self, conversation: _Conversation, event: Ended) -> None:
        if conversation.in_engine:
            self._aborts.append(conversation.number)
            conversation.in_engine = False
        calls = tuple(conversation.tool_calls) if any(conversation.tool_calls) else ()
        sequence = conversation.sequence
        sequence.outcome = Outcome(
            reward=event.reward,
            components=dict(event.components),
            failure=event.failure,
            message=event.message,
            calls=calls,
            dropped_tokens=conversation.dropped_tokens,
        )
        if event.failure is not None:
            sequence.finish_reason = FINISH_FAILED
        elif event.truncated or conversation.is_full:
            sequence.finish_reason = FINISH_LENGTH
        else:
            sequence.finish_reason = FINISH_STOP
