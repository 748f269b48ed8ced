"""Sampling of sequences that are conversations with environments.

An environment has always seen a prefix of the sequence's tokens. So it can be replaced, in another process or
in a later step: the new environment is replayed the same turns, and must observe the same.

A conversation alternates between two states. Either its environment works, or it awaits a turn: then the
engine samples, possibly over several requests and steps, until the turn is complete.

The first rank of a replica schedules alone: only it exchanges messages with the environments.
"""

from __future__ import annotations

from array import array
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.data.chat_format import ChatFormats
from megatron_rl.environments.environment import Opening
from megatron_rl.environments.host_pool import EnvironmentPool, EpisodeEnd, EpisodeRestart, TurnRequest
from megatron_rl.errors import UserError
from megatron_rl.rewards.worker import WRONG_TYPE
from megatron_rl.rollout.engines.base import Generator, ToolParser
from megatron_rl.rollout.scheduler import ReplicaQueue, ReplicaScheduler, SchedulerOutput, response_room
from megatron_rl.rollout.stopping import StopTexts
from megatron_rl.rollout.types import Completion, Sequence
from megatron_rl.types import FINISH_FAILED, FINISH_LENGTH, FINISH_STOP, Outcome

DIVERGED = "diverged"
"""Failure of an environment that observed something else when it was replayed."""

ENGINE = "engine"
"""Failure of an episode for which the engine could not sample."""

PROMPT = "prompt"
"""Failure of an environment whose own prompt cannot be tokenised, or leaves no room for a response."""

IDLE_SECONDS = 1.0
"""Longest wait for environments while the engine is idle. Then the leader broadcasts an empty schedule, so
that the other ranks' wait for one does not time out."""


@dataclass
class _Conversation:
    """A sequence and the state of its environment."""

    sequence: Sequence

    number: int
    """Index in `ReplicaScheduler.admitted`, which is also the number of the sequence's requests."""

    episode: int
    """Number of the episode in `EnvironmentPool`."""

    max_model_len: int | None
    """The engine's bound of prompt and response together, None if there is none."""

    stops: StopTexts
    """Searches for stop texts in its turns."""

    seen: int = 0
    """Tokens of the response that the environment has seen: its turns and its own observations."""

    has_own_prompt: bool = False
    """Whether the environment opened with messages of its own, in place of the record's prompt."""

    awaits_turn: bool = False
    """Whether the environment waits for a turn of the policy."""

    in_engine: bool = False
    """Whether the sequence has an open request."""

    round_tokens_left: int | None = None
    """Tokens that may still be sampled in this token round, None if unbounded."""

    turn_tokens_left: int | None = None
    """Tokens that may still be sampled in this turn, None if unbounded."""

    tools: list[dict[str, Any]] | None = None
    """Tools that the environment opened with, in OpenAI's form."""

    tool_calls: list[list[dict[str, Any]]] = field(default_factory=list)
    """Tool calls of each turn that the environment has received."""

    dropped_tokens: int = 0
    """Tokens of an observation that was too long for the sequence's remaining room."""

    @property
    def is_full(self) -> bool:
        """Return whether the response has no room for a further token."""
        return len(self.sequence.tokens) >= response_room(self.sequence, self.max_model_len)

    @property
    def is_idle(self) -> bool:
        """Return whether the sequence is finished, or waits for the next token round.

        A sequence that awaits a turn without an open request has used up its tokens of this round: `schedule`
        submits a request for every other one.
        """
        return self.sequence.is_finished or (self.awaits_turn and not self.in_engine)

    @property
    def wants_tokens(self) -> bool:
        """Return whether the sequence needs a request now."""
        if self.sequence.is_finished or self.in_engine or not self.awaits_turn:
            return False
        return self.round_tokens_left != 0

    def is_turn_complete(self, end: int) -> bool:
        """Return whether the turn of tokens from ``seen`` to ``end`` is complete."""
        # A turn that is replayed to a new environment ends where an observation follows it.
        is_replayed = end < len(self.sequence.tokens)
        if is_replayed or self.is_full or self.turn_tokens_left == 0:
            return True
        return self.is_stopped(end)

    def is_stopped(self, end: int) -> bool:
        """Return whether the turn of tokens from ``seen`` to ``end`` ends with a stop token or stop text."""
        tokens = self.sequence.prompt + self.sequence.tokens[:end]
        return self.stops.is_stopped(self.sequence.sampling, tokens, end - self.seen)


class MultiTurnScheduler(ReplicaScheduler):
    """Scheduler of one replica whose sequences are conversations; see `ReplicaScheduler`.

    ``parse`` parses the tool calls of a turn. The replica is led by its first rank, which alone has
    ``hosts``: the schedule depends on the time at which environments answer.
    """

    def __init__(
        self,
        engine: Generator,
        queue: ReplicaQueue,
        hosts: EnvironmentPool,
        chat: ChatFormats,
        parse: ToolParser | None = None,
        *,
        stop_when: Callable[[], bool] | None = None,
        ranks: tuple[int, ...] = (0,),
    ) -> None:
        super().__init__(
            engine,
            queue,
            stop_when=stop_when,
            ranks=ranks,
            is_led=True,
        )

        self._hosts = hosts
        self._chat = chat
        self._stops = StopTexts(lambda: chat.tokenizer)
        self._parse = parse

        # Conversations in the order of `admitted`, and by the number of their episode.
        self._conversations: list[_Conversation] = []
        self._by_episode: dict[int, _Conversation] = {}
        # Requests of sequences that finished while they were in the engine.
        self._aborts: list[int] = []

    def start_token_round(self, tokens: int | None) -> None:
        """See `ReplicaScheduler.start_token_round`."""
        super().start_token_round(tokens)
        for conversation in self._conversations:
            conversation.round_tokens_left = tokens

    def schedule(self) -> SchedulerOutput | None:
        """Return the requests for awaited turns; None once all conversations are idle."""
        requests = []
        for conversation in self._conversations:
            if conversation.wants_tokens:
                bounds = (conversation.round_tokens_left, conversation.turn_tokens_left)
                # None: only the room of the response bounds the request.
                limits = [bound for bound in bounds if bound is not None]
                limit = min(limits, default=None)
                requests.append(self.request(conversation.number, limit, conversation.seen))
                conversation.in_engine = True

        # After the requests: a new environment works first, and its sequence gets a request later.
        self._start_environments()

        aborts = self._aborts
        self._aborts = []
        all_idle = all(conversation.is_idle for conversation in self._conversations)
        if not requests and not aborts and all_idle:
            return None
        return SchedulerOutput(tuple(requests), tuple(aborts))

    def _start_environments(self) -> None:
        """Admit sequences up to the in-flight limit, and start their environments."""
        num_busy = sum(not conversation.is_idle for conversation in self._conversations)
        self.admit(num_busy)

        # A conversation for each sequence that was admitted, also for one that failed at once.
        for number in range(len(self._conversations), len(self.admitted)):
            admitted = self.admitted[number]
            conversation = _Conversation(
                admitted.sequence,
                number,
                self._hosts.reserve(1),
                self.engine.max_model_len,
                self._stops,
                round_tokens_left=self._token_round,
            )
            self._conversations.append(conversation)
            self._by_episode[conversation.episode] = conversation

            if not admitted.sequence.is_finished:
                self._hosts.start(conversation.episode, self._episode_values(number))

    def _episode_values(self, number: int) -> dict[str, Any]:
        """Return the arguments of the environment's `Episode`."""
        admitted = self.admitted[number]
        prompt = self.queue.round.groups[admitted.group].prompt
        return {
            "prompt": prompt.prompts[0],
            "ground_truth": prompt.ground_truths[0],
            "metadata": dict(prompt.metadata[0]),
            "seed": admitted.sequence.seed,
        }

    def update(self, completions: abc.Sequence[Completion]) -> None:
        """Append the engine's completions, and process the events of environments."""
        for completion in completions:
            self._append(self._conversations[completion.number], completion)

        # While the engine has requests, the next step must not wait for environments.
        is_engine_idle = not any(conversation.in_engine for conversation in self._conversations)
        wait_seconds = IDLE_SECONDS if is_engine_idle else 0.0

        for event in self._hosts.poll(wait_seconds):
            conversation = self._by_episode[event.number]
            if isinstance(event, TurnRequest):
                self._turn_requested(conversation, event)
            elif isinstance(event, EpisodeRestart):
                # The new environment has seen nothing: the existing tokens are replayed to it.
                conversation.seen = 0
                conversation.awaits_turn = False
                conversation.tool_calls = []
            else:
                self._finish(conversation, event)

    def close(self) -> None:
        """End the environments of sequences that continue in another step; new ones will be replayed."""
        for conversation in self._conversations:
            if not conversation.sequence.is_finished:
                self._hosts.forget(conversation.episode)

    def new_prompts(self) -> dict[int, list[int]]:
        """See `ReplicaScheduler.new_prompts`."""
        prompts = {}
        for conversation in self._conversations:
            admitted = self.admitted[conversation.number]
            # A sequence that was continued has reported its prompt in an earlier step.
            if conversation.has_own_prompt and admitted.start == 0:
                prompts[admitted.position] = admitted.sequence.prompt.tolist()
        return prompts

    def _append(
        self,
        conversation: _Conversation,
        completion: Completion,
    ) -> None:
        """Append a completion to its sequence, and send the turn to the environment if it is complete."""
        conversation.in_engine = False
        if completion.finish_reason == FINISH_FAILED:
            self._fail(conversation, ENGINE, "the engine could not sample")
            return

        sequence = conversation.sequence
        sequence.append_sampled(completion, self._version)
        count = len(completion.tokens)
        if conversation.round_tokens_left is not None:
            conversation.round_tokens_left -= count
        if conversation.turn_tokens_left is not None:
            conversation.turn_tokens_left -= count
        if conversation.awaits_turn and conversation.is_turn_complete(len(sequence.tokens)):
            self._hand_over(conversation, len(sequence.tokens))

    def _hand_over(self, conversation: _Conversation, end: int) -> None:
        """Send the environment the turn of tokens from ``seen`` to ``end``."""
        sequence = conversation.sequence
        start = conversation.seen
        turn = sequence.tokens[start:end].tolist()
        is_cut = not conversation.is_stopped(end)
        context = len(sequence.prompt) + start
        text = self._chat.prompts.text(turn)

        calls: list[dict[str, Any]] = []
        if self._parse is not None and conversation.tools:
            # Parsers find calls by special tokens. The stop token is not part of the turn's text.
            parsed_tokens = turn
            if turn and turn[-1] in sequence.sampling.stop_token_ids:
                parsed_tokens = turn[:-1]
            with_special = self._chat.prompts.text(parsed_tokens, special=True)
            content, parsed = self._parse(with_special, conversation.tools)
            if parsed:
                # Ids are numbered, not random: a replayed environment must receive the same turn.
                calls = [
                    {"id": f"call_{context}_{index}", "type": "function", "function": call}
                    for index, call in enumerate(parsed)
                ]
                text = content

        conversation.seen = end
        conversation.awaits_turn = False
        conversation.tool_calls.append(calls)
        log_probs = tuple(sequence.log_probs[start:end])
        self._hosts.turn(
            conversation.episode,
            text,
            tuple(turn),
            is_cut,
            log_probs,
            context,
            calls,
        )

    def _turn_requested(
        self,
        conversation: _Conversation,
        event: TurnRequest,
    ) -> None:
        """Append the observation of an environment, which now awaits a turn.

        The sequence may already have tokens of this turn: of an interrupted turn, or of a turn that is
        replayed to a new environment.
        """
        if conversation.seen:
            if not self._append_observed(conversation, event):
                return
        elif event.messages:
            self._fail(conversation, WRONG_TYPE, "the environment observed before the policy's first turn")
            return
        elif event.opening is not None and not self._open(conversation, event.opening):
            return

        # Skip the tokens of this turn that were already sampled.
        sequence = conversation.sequence
        end = conversation.seen
        while end < len(sequence.tokens) and sequence.is_sampled(end):
            end += 1

        # The limit of a turn counts them, too.
        conversation.turn_tokens_left = None
        if event.limit is not None:
            num_sampled = end - conversation.seen
            conversation.turn_tokens_left = max(0, event.limit - num_sampled)
        if conversation.is_turn_complete(end):
            self._hand_over(conversation, end)
        else:
            conversation.awaits_turn = True

    def _append_observed(
        self,
        conversation: _Conversation,
        event: TurnRequest,
    ) -> bool:
        """Append the observed messages, or compare replayed ones; return whether a turn follows."""
        sequence = conversation.sequence
        start = conversation.seen

        # Tokenise the messages as a continuation of the turn, which may have ended with its stop token.
        stop_token = None
        if sequence.tokens[start - 1] in sequence.sampling.stop_token_ids:
            stop_token = sequence.tokens[start - 1]
        chat = self._chat.opened if conversation.has_own_prompt else self._chat.prompts
        observed = chat.extend(stop_token, event.messages)
        if not observed:
            self._fail(conversation, WRONG_TYPE, "the observation has no tokens")
            return False

        end = start + len(observed)
        if start < len(sequence.tokens):
            # Replayed: the observation must be the tokens that follow, none of them sampled.
            earlier = sequence.tokens[start:end].tolist()
            is_same = earlier == observed and not any(map(sequence.is_sampled, range(start, end)))
            if not is_same:
                self._fail(conversation, DIVERGED, "the replayed environment observed something else")
                return False
        elif end >= response_room(sequence, self.engine.max_model_len):
            # No room for the observation and a token after it: the episode is truncated before it.
            conversation.dropped_tokens = len(observed)
            self._hosts.end(conversation.episode)
            return False
        else:
            sequence.append_observed(observed)
        conversation.seen = end
        return True

    def _open(
        self,
        conversation: _Conversation,
        opening: Opening,
    ) -> bool:
        """Replace the prompt by an environment's own messages; return False if the episode has failed."""
        sequence = conversation.sequence
        try:
            tokens = self._chat.opened.start(*opening)
        except UserError as error:
            self._fail(conversation, PROMPT, str(error))
            return False

        # The room for the response depends on the length of the prompt.
        prompt = array("q", tokens)
        room = sequence.sampling.max_response_tokens
        if self.engine.max_model_len is not None:
            room = min(room, self.engine.max_model_len - len(prompt))

        if sequence.tokens and sequence.prompt != prompt:
            self._fail(conversation, DIVERGED, "the replayed environment opened with another prompt")
        elif not prompt or room < 1:
            reason = f"a prompt of {len(prompt)} tokens leaves no room for a response"
            self._fail(conversation, PROMPT, reason)
        else:
            sequence.prompt = prompt
            conversation.has_own_prompt = True
            conversation.tools = opening.tools
        return conversation.has_own_prompt

    def _fail(
        self,
        conversation: _Conversation,
        reason: str,
        message: str,
    ) -> None:
        """End an episode as failed, and its environment."""
        self._hosts.forget(conversation.episode)
        event = EpisodeEnd(conversation.episode, failure=reason, message=message)
        self._finish(conversation, event)

    def _finish(
        self,
        conversation: _Conversation,
        event: EpisodeEnd,
    ) -> None:
        """Finish a sequence with the outcome of its environment."""
        # The environment may end, or fail, while a turn is being sampled.
        if conversation.in_engine:
            self._aborts.append(conversation.number)
            conversation.in_engine = False

        calls: tuple[list[dict[str, Any]], ...] = ()
        if any(conversation.tool_calls):
            calls = tuple(conversation.tool_calls)
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
