"""Sampling of sequences that are conversations with environments.

An environment has always received a prefix of the sequence's tokens. So it can be restarted in a different
process or in a later step, by a *replay*: the existing turns are sent to the new environment, which must
return the observations that the sequence already has.

A conversation alternates between two states. Either its environment is computing, or the environment waits
for a turn of the policy. Then the engine samples, possibly over several requests and steps, until the turn is
complete. In a *token round*, the engine samples at most a given number of tokens for each sequence.

Only the first rank of a replica schedules, because only this rank exchanges messages with the environments.
"""

from __future__ import annotations

from array import array
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.data.chat_format import ChatFormats
from megatron_rl.environments.environment import Opening
from megatron_rl.environments.host import EnvironmentPool, EpisodeEnd, EpisodeRestart, TurnRequest
from megatron_rl.errors import UserError
from megatron_rl.rewards.worker import WRONG_TYPE
from megatron_rl.rollout.engines.base import Generator, ToolParser
from megatron_rl.rollout.scheduler import (
    ReplicaQueue,
    ReplicaScheduler,
    SchedulerOutput,
    compute_response_room,
)
from megatron_rl.rollout.stopping import StopTextFinder
from megatron_rl.rollout.types import OBSERVED, Completion, Sequence
from megatron_rl.types import FINISH_FAILED, FINISH_LENGTH, FINISH_STOP, Outcome

DIVERGED = "diverged"
"""Failure reason of an episode: in a replay, the environment returned a different observation or prompt than
before, or it ended earlier."""

ENGINE = "engine"
"""Failure reason of an episode: the engine could not sample a turn of the policy."""

PROMPT = "prompt"
"""Failure reason of an episode: the prompt cannot be tokenised, or leaves no room for a response."""

IDLE_SECONDS = 1.0
"""Maximum wait for environments while the engine is idle. After this time the first rank broadcasts an empty
schedule, so that the broadcast on the replica's other ranks does not time out."""


@dataclass
class _Conversation:
    """A sequence and the state of its environment."""

    sequence: Sequence
    """The replica's copy of the sequence."""

    number: int
    """Index in `ReplicaScheduler.admitted`, which is also the number of the sequence's requests."""

    episode: int
    """Number of the episode in `EnvironmentPool`."""

    max_model_len: int | None
    """The engine's maximum number of prompt and response tokens, or None for no limit."""

    stop_finder: StopTextFinder
    """Finder of stop texts in the policy's turns."""

    num_seen_by_environment: int = 0
    """Number of response tokens that the environment has seen: it has received them as part of a turn of the
    policy, or sent them as part of an observation. The next turn or observation starts at this index."""

    has_replaced_prompt: bool = False
    """Whether the environment has replaced the record's prompt by its own messages."""

    environment_awaits_turn: bool = False
    """Whether the environment waits for a turn of the policy."""

    in_engine: bool = False
    """Whether the sequence has an open request."""

    round_tokens_left: int | None = None
    """Maximum number of tokens that the engine may still sample in this token round, or None for no limit."""

    turn_tokens_left: int | None = None
    """Maximum number of tokens that the engine may still sample for this turn, or None for no limit."""

    template_kwargs: abc.Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments with which the chat template renders the conversation."""

    tools: list[dict[str, Any]] | None = None
    """Tools that the environment offers, in OpenAI's format; None without tools."""

    tool_calls: list[list[dict[str, Any]]] = field(default_factory=list)
    """Tool calls of each turn that the environment has received."""

    dropped_tokens: int = 0
    """Number of tokens of an observation that exceeded the sequence's remaining room and was dropped."""

    @property
    def is_full(self) -> bool:
        """Return whether the response has reached its maximum length."""
        return len(self.sequence.tokens) >= compute_response_room(self.sequence, self.max_model_len)

    @property
    def is_idle(self) -> bool:
        """Return whether the sequence has nothing to do until the next token round.

        In a token round, at most a given number of tokens are sampled for each sequence. A finished sequence
        is idle. An unfinished sequence is idle if its environment waits for a turn of the policy and
        `schedule` has made no request for the turn, because the token limit of the round is reached.
        """
        return self.sequence.is_finished or (self.environment_awaits_turn and not self.in_engine)

    @property
    def needs_request(self) -> bool:
        """Return whether `schedule` must make a request to the engine for this sequence.

        A request is needed if the environment waits for a turn of the policy, and the engine has no request
        for the turn yet. If the sequence has reached the token limit of the token round (a call of
        `run_token_round`), the request is made in the next token round instead.
        """
        if self.sequence.is_finished or self.in_engine or not self.environment_awaits_turn:
            return False
        return self.round_tokens_left != 0

    def is_turn_complete(self, end: int) -> bool:
        """Return whether the current turn of the policy is complete.

        The turn consists of the response tokens that the environment has not seen, up to ``end - 1``.
        """
        # If an observation follows in the sequence, the turn was already complete when it was sampled. It is
        # now sent again, to a restarted environment (a replay).
        is_replayed = end < len(self.sequence.tokens)
        if is_replayed or self.is_full or self.turn_tokens_left == 0:
            return True
        return self.ends_with_stop(end)

    def ends_with_stop(self, end: int) -> bool:
        """Return whether the current turn of the policy ends with a stop token or a stop text.

        The turn consists of the response tokens that the environment has not seen, up to ``end - 1``.
        """
        tokens = self.sequence.prompt + self.sequence.tokens[:end]
        return self.stop_finder.is_turn_ended(
            self.sequence.sampling, tokens, end - self.num_seen_by_environment
        )


class MultiTurnScheduler(ReplicaScheduler):
    """Scheduler of one replica whose sequences are conversations; see `ReplicaScheduler`.

    It runs on the replica's first rank, which broadcasts its schedule: the schedule depends on when the
    environments respond.

    Additional arguments:
        environments: pool of the processes that run the environments.
        chat: chat formats that render the environments' messages.
        parse_tool_calls: function that parses the tool calls in a turn, or None without tools.
    """

    def __init__(
        self,
        engine: Generator,
        queue: ReplicaQueue,
        environments: EnvironmentPool,
        chat: ChatFormats,
        parse_tool_calls: ToolParser | None = None,
        *,
        stop_when: Callable[[], bool] | None = None,
        ranks: tuple[int, ...] = (0,),
    ) -> None:
        super().__init__(
            engine,
            queue,
            stop_when=stop_when,
            ranks=ranks,
            # Only the replica's first rank exchanges messages with the environments, so only it can schedule.
            only_leader_schedules=True,
        )

        self._environments = environments
        self._chat = chat
        self._stop_finder = StopTextFinder(lambda: chat.tokenizer)
        self._parse_tool_calls = parse_tool_calls

        # Conversations of the admitted sequences, in the order of `ReplicaScheduler.admitted`, and by the
        # number of their episode in the pool of environments.
        self._conversations: list[_Conversation] = []
        self._conversation_by_episode: dict[int, _Conversation] = {}
        # Numbers of open requests whose sequences have finished, to abort in the next engine step.
        self._aborts: list[int] = []

    def start_token_round(self, tokens: int | None) -> None:
        """Start a token round, in which at most ``tokens`` tokens are sampled for each conversation.

        None means no limit; see `ReplicaScheduler.start_token_round`.
        """
        super().start_token_round(tokens)
        for conversation in self._conversations:
            conversation.round_tokens_left = tokens

    def schedule(self) -> SchedulerOutput | None:
        """Return requests for the turns that environments wait for, or None if all conversations are idle."""
        requests = []
        for conversation in self._conversations:
            if conversation.needs_request:
                optional_limits = (conversation.round_tokens_left, conversation.turn_tokens_left)
                # If both limits are None, the request is for all tokens that the response has room for.
                limits = [limit for limit in optional_limits if limit is not None]
                limit = min(limits, default=None)
                requests.append(
                    self.make_request(conversation.number, limit, conversation.num_seen_by_environment)
                )
                conversation.in_engine = True

        # Start environments after making requests: a new sequence needs no request until its environment has
        # responded.
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
        self.admit_sequences(num_busy)

        # Create a conversation for each new sequence, even if it has failed because its prompt is too long.
        for admitted_index in range(len(self._conversations), len(self.admitted)):
            admitted = self.admitted[admitted_index]
            # A group's prompt is a `PromptBatch` of one prompt, so its fields are indexed with 0.
            prompt = self.queue.round.groups[admitted.group].prompt
            template_kwargs: abc.Mapping[str, Any] = {}
            if prompt.template_kwargs is not None:
                template_kwargs = prompt.template_kwargs[0] or {}
            conversation = _Conversation(
                admitted.sequence,
                number=admitted_index,
                episode=self._environments.reserve_numbers(1),
                max_model_len=self.engine.max_model_len,
                stop_finder=self._stop_finder,
                # No token of a new sequence has been sampled in this token round, so the full limit remains.
                round_tokens_left=self._max_round_tokens,
                template_kwargs=template_kwargs,
            )
            self._conversations.append(conversation)
            self._conversation_by_episode[conversation.episode] = conversation

            if not admitted.sequence.is_finished:
                episode_values = self._make_episode_values(admitted_index)
                self._environments.start_episode(conversation.episode, episode_values)

    def _make_episode_values(self, admitted_index: int) -> dict[str, Any]:
        """Make the `Episode` fields that the environment of ``admitted[admitted_index]`` receives."""
        admitted = self.admitted[admitted_index]
        prompt = self.queue.round.groups[admitted.group].prompt
        return {
            "prompt": prompt.prompts[0],
            "ground_truth": prompt.ground_truths[0],
            "metadata": dict(prompt.metadata[0]),
            "seed": admitted.sequence.seed,
        }

    def process_completions(self, completions: abc.Sequence[Completion]) -> None:
        """Append the engine's completions to their sequences, then process the events of environments."""
        for completion in completions:
            self._append_completion(self._conversations[completion.number], completion)

        # Wait for environments only if the engine has no requests.
        is_engine_idle = not any(conversation.in_engine for conversation in self._conversations)
        wait_seconds = IDLE_SECONDS if is_engine_idle else 0.0

        for event in self._environments.poll_events(wait_seconds):
            conversation = self._conversation_by_episode[event.number]
            if isinstance(event, TurnRequest):
                self._process_turn_request(conversation, event)
            elif isinstance(event, EpisodeRestart):
                # The restarted environment has seen no tokens yet. It requests all turns again, from the
                # first turn on, and `_process_turn_request` sends it the existing turns (a replay).
                conversation.num_seen_by_environment = 0
                conversation.environment_awaits_turn = False
                conversation.tool_calls = []
            else:
                self._process_episode_end(conversation, event)

    def close(self) -> None:
        """End the environments of unfinished sequences.

        A later step starts a new environment for each of these sequences, and replays the sequence to it.
        """
        for conversation in self._conversations:
            if not conversation.sequence.is_finished:
                self._environments.cancel_episode(conversation.episode)

    def collect_replaced_prompts(self) -> dict[int, list[int]]:
        """See `ReplicaScheduler.collect_replaced_prompts`."""
        replaced_prompts = {}
        for conversation in self._conversations:
            admitted = self.admitted[conversation.number]
            # A continued sequence has already reported its prompt in an earlier step.
            if conversation.has_replaced_prompt and admitted.start == 0:
                replaced_prompts[admitted.position] = admitted.sequence.prompt.tolist()
        return replaced_prompts

    def _append_completion(
        self,
        conversation: _Conversation,
        completion: Completion,
    ) -> None:
        """Append a completion to its sequence; if the turn is then complete, send it to the environment."""
        conversation.in_engine = False
        if completion.finish_reason == FINISH_FAILED:
            self._fail_episode(conversation, ENGINE, "the engine could not sample")
            return

        sequence = conversation.sequence
        sequence.append_sampled(completion, self._version)
        num_tokens = len(completion.tokens)
        if conversation.round_tokens_left is not None:
            conversation.round_tokens_left -= num_tokens
        if conversation.turn_tokens_left is not None:
            conversation.turn_tokens_left -= num_tokens
        if conversation.environment_awaits_turn and conversation.is_turn_complete(len(sequence.tokens)):
            self._send_turn(conversation, len(sequence.tokens))

    def _send_turn(self, conversation: _Conversation, end: int) -> None:
        """Send a turn of the policy to the environment.

        The turn consists of the response tokens that the environment has not seen, up to ``end - 1``.
        """
        sequence = conversation.sequence
        start = conversation.num_seen_by_environment
        turn = sequence.tokens[start:end].tolist()
        is_cut = not conversation.ends_with_stop(end)
        num_context_tokens = len(sequence.prompt) + start
        text = self._chat.plain_text.decode(turn)

        calls: list[dict[str, Any]] = []
        if self._parse_tool_calls is not None and conversation.tools:
            # Parsers need special tokens to recognize calls. The stop token is not part of the turn's text.
            parsed_tokens = turn
            if turn and turn[-1] in sequence.sampling.stop_token_ids:
                parsed_tokens = turn[:-1]
            full_text = self._chat.plain_text.decode(parsed_tokens, with_special_tokens=True)
            content, parsed_calls = self._parse_tool_calls(full_text, conversation.tools)
            if parsed_calls:
                # Deterministic ids, not random ones: a replay must send the same turn.
                calls = [
                    {"id": f"call_{num_context_tokens}_{index}", "type": "function", "function": call}
                    for index, call in enumerate(parsed_calls)
                ]
                text = content

        conversation.num_seen_by_environment = end
        conversation.environment_awaits_turn = False
        conversation.tool_calls.append(calls)
        log_probs = tuple(sequence.log_probs[start:end])
        self._environments.send_turn(
            conversation.episode,
            text,
            tuple(turn),
            is_cut,
            log_probs,
            num_context_tokens,
            calls,
        )

    def _process_turn_request(
        self,
        conversation: _Conversation,
        event: TurnRequest,
    ) -> None:
        """Process an environment's request for a turn of the policy.

        The request may contain an observation, which is appended to the sequence. If the sequence already has
        all tokens of the requested turn, the turn is sent to the environment. Otherwise
        ``environment_awaits_turn`` is set, so that `schedule` makes a request for the missing tokens.

        A sequence already has tokens of the requested turn in two cases: a restarted environment requests the
        existing turns again (a replay), or an earlier step ended within the turn.
        """
        # Before the first turn, the environment may only replace the prompt. Later it may send observations.
        if conversation.num_seen_by_environment:
            if not self._append_observed(conversation, event):
                return
        elif event.messages:
            message = "the environment sent an observation before the policy's first turn"
            self._fail_episode(conversation, WRONG_TYPE, message)
            return
        elif event.opening is not None and not self._replace_prompt(conversation, event.opening):
            return

        # Find the end of the turn's tokens that have already been sampled.
        sequence = conversation.sequence
        end = conversation.num_seen_by_environment
        while end < len(sequence.tokens) and sequence.is_sampled(end):
            end += 1

        # The limit of the turn includes the tokens that have already been sampled.
        conversation.turn_tokens_left = None
        if event.limit is not None:
            num_sampled = end - conversation.num_seen_by_environment
            conversation.turn_tokens_left = max(0, event.limit - num_sampled)
        if conversation.is_turn_complete(end):
            self._send_turn(conversation, end)
        else:
            conversation.environment_awaits_turn = True

    def _process_episode_end(
        self,
        conversation: _Conversation,
        event: EpisodeEnd,
    ) -> None:
        """Finish a sequence whose environment has ended.

        In a replay, the episode fails if the environment ends before it has returned all observations in the
        sequence.
        """
        remaining_versions = conversation.sequence.versions[conversation.num_seen_by_environment :]
        if event.failure is None and OBSERVED in remaining_versions:
            message = "the replayed environment ended before an observation"
            self._fail_episode(conversation, DIVERGED, message)
        else:
            self._finish_sequence(conversation, event)

    def _append_observed(
        self,
        conversation: _Conversation,
        event: TurnRequest,
    ) -> bool:
        """Append the environment's messages, or in a replay compare them with the existing tokens.

        Returns false if the episode has failed, or if the sequence has no room for another turn.
        """
        sequence = conversation.sequence
        start = conversation.num_seen_by_environment

        # Tokenise the messages as a continuation of the turn, whose last token may be a stop token.
        stop_token = None
        if sequence.tokens[start - 1] in sequence.sampling.stop_token_ids:
            stop_token = sequence.tokens[start - 1]
        get_format = self._chat.prompt_format
        if conversation.has_replaced_prompt:
            get_format = self._chat.environment_format
        try:
            chat = get_format(conversation.template_kwargs)
        except UserError as error:
            # Fail only this episode: the template arguments come from its record.
            self._fail_episode(conversation, PROMPT, str(error))
            return False
        observed_tokens = chat.encode_between_turns(stop_token, event.messages)
        if not observed_tokens:
            self._fail_episode(conversation, WRONG_TYPE, "the observation has no tokens")
            return False

        end = start + len(observed_tokens)
        if start < len(sequence.tokens):
            # In a replay, the observation must equal the existing observed tokens. They end before the first
            # token that was sampled.
            next_turn_start = start
            while next_turn_start < len(sequence.tokens) and not sequence.is_sampled(next_turn_start):
                next_turn_start += 1
            if sequence.tokens[start:next_turn_start].tolist() != observed_tokens:
                self._fail_episode(conversation, DIVERGED, "the replayed environment observed something else")
                return False
        elif end >= compute_response_room(sequence, self.engine.max_model_len):
            # The response has no room for the observation and one more token: end the episode before the
            # observation.
            conversation.dropped_tokens = len(observed_tokens)
            self._environments.reject_turn(conversation.episode)
            return False
        else:
            sequence.append_observed(observed_tokens)
        conversation.num_seen_by_environment = end
        return True

    def _replace_prompt(
        self,
        conversation: _Conversation,
        opening: Opening,
    ) -> bool:
        """Replace the prompt by the environment's opening messages; return False if the episode fails."""
        sequence = conversation.sequence
        try:
            chat = self._chat.environment_format(conversation.template_kwargs)
            tokens = chat.encode_prompt(*opening)
        except UserError as error:
            self._fail_episode(conversation, PROMPT, str(error))
            return False

        # Compute the room for a response after the new prompt.
        prompt = array("q", tokens)
        room = sequence.sampling.max_response_tokens
        if self.engine.max_model_len is not None:
            room = min(room, self.engine.max_model_len - len(prompt))

        if sequence.tokens and sequence.prompt != prompt:
            self._fail_episode(conversation, DIVERGED, "the replayed environment opened with another prompt")
        elif not prompt or room < 1:
            reason = f"a prompt of {len(prompt)} tokens leaves no room for a response"
            self._fail_episode(conversation, PROMPT, reason)
        else:
            sequence.prompt = prompt
            conversation.has_replaced_prompt = True
            conversation.tools = opening.tools
        return conversation.has_replaced_prompt

    def _fail_episode(
        self,
        conversation: _Conversation,
        reason: str,
        message: str,
    ) -> None:
        """End the environment, and finish the sequence as failed for ``reason``, such as `DIVERGED`."""
        self._environments.cancel_episode(conversation.episode)
        event = EpisodeEnd(conversation.episode, failure=reason, message=message)
        self._finish_sequence(conversation, event)

    def _finish_sequence(
        self,
        conversation: _Conversation,
        event: EpisodeEnd,
    ) -> None:
        """Finish the sequence with the reward or failure of its environment."""
        # The environment may end or fail while the engine samples a turn: abort the request.
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
