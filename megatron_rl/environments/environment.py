"""Base classes of a user's environments; importable without torch.

An environment is the policy's counterpart in one episode: the policy generates turns, the environment sends
observations and the reward. Each episode gets a new instance of the class in ``rollout.environment.name``,
constructed from the settings next to that name. It runs in a sandboxed process and never in the trainer.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

ROLES = ("user", "tool", "system")
"""Roles of a message that an environment may send."""

KEYS = {"role", "content", "tool_call_id", "name"}
"""Keys of a message that an environment may send; ``role`` and ``content`` are required."""

LARGEST_OBSERVATION = 2**20
"""Largest valid number of characters in a message: far more than fits into a context."""


class Truncated(Exception):
    """Signal that the policy has no tokens or turns left. It ends the episode without a failure."""


class WrongUse(Exception):
    """Error for an invalid call of an `Episode` method; the episode fails."""


class Message(str):
    """One turn of the policy: the text without special tokens, with the turn's tokens as attributes.

    Example:
        >>> message = Message("4", tokens=(19, 2), log_probs=(-0.1, -0.2), context=12)
        >>> message + "!", message.tokens, message.cut
        ('4!', (19, 2), False)
    """

    tokens: tuple[int, ...]
    """Token ids of the turn, including its stop token."""

    cut: bool
    """Whether a length limit ended the turn, and not a stop token."""

    log_probs: tuple[float, ...]
    """The engine's log-prob of each token."""

    context: int
    """Number of tokens before the turn, including the prompt."""

    tool_calls: tuple[dict[str, Any], ...]
    """Tool calls in the format of OpenAI's API, if the episode was opened with tools and
    `rollout.environment.tool_parser` is set; the text then excludes the calls."""

    def __new__(
        cls,
        text: str,
        tokens: Sequence[int] = (),
        cut: bool = False,
        log_probs: Sequence[float] = (),
        context: int = 0,
        tool_calls: Sequence[dict[str, Any]] = (),
    ) -> Message:
        """Make a message; the arguments are the attributes of the class.

        ``cut`` is true if a length limit ended the turn. ``context`` is the number of tokens before the turn.
        """
        # Override __new__, because the text of a str cannot be set in __init__.
        message = super().__new__(cls, text)

        message.tokens = tuple(tokens)
        message.cut = cut
        message.log_probs = tuple(log_probs)
        message.context = context
        message.tool_calls = tuple(tool_calls)
        return message


class Opening(NamedTuple):
    """Messages that replace the record's prompt at the start of an episode.

    Example:
        >>> Opening([{"role": "user", "content": "1+2="}]).messages[0]["content"]
        '1+2='
    """

    messages: list[dict[str, Any]]
    """Messages for the tokenizer's chat template."""

    tools: list[dict[str, Any]] | None = None
    """Functions that the policy may call, in the JSON format of OpenAI's API, or None."""


class TurnSource(Protocol):
    """Function that sends observed messages to the policy and awaits its next turn."""

    async def __call__(
        self,
        observed: list[dict[str, str]],
        limit: int | None,
        opening: Opening | None,
    ) -> Message:
        """Return the policy's next turn, of at most ``limit`` tokens; None means the policy's own limits.

        ``observed`` are the environment's messages since the last turn. ``opening`` replaces the record's
        prompt, and is used only for the first turn.
        """
        ...


class Episode:
    """One conversation between the policy and an environment.

    ``prompt`` is the text of the prompt; ``ground_truth`` and ``metadata`` come from the record. The
    environment must derive all its random numbers from ``seed``: an episode is repeated when a process is
    lost or a run is resumed, and the repetition must behave identically. ``messages`` are all messages after
    the prompt.
    """

    def __init__(
        self,
        prompt: str,
        ground_truth: Any,
        metadata: Mapping[str, Any],
        seed: int,
        turns: TurnSource,
    ) -> None:
        self.prompt = prompt
        self.ground_truth = ground_truth
        self.metadata = metadata
        self.seed = seed
        self.messages: list[dict[str, str]] = []
        self.truncated = False

        self._turns = turns
        # Messages of `observe` since the last turn, which are sent with the request for the next turn.
        self._observed: list[dict[str, str]] = []
        # Messages of `open`, which replace the prompt before the first turn; None for the record's prompt.
        self._opening: Opening | None = None

    def open(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> None:
        """Start the conversation with ``messages`` instead of the prompt of the data set's record.

        ``tools`` are definitions of functions that the policy may call, in the JSON format of OpenAI's API.
        The tokenizer's chat template renders both. Must be called before the policy's first turn.
        """
        if self.messages:
            raise WrongUse("an episode was opened after its first turn")
        self._opening = Opening([dict(message) for message in messages], tools)

    async def generate(self, limit: int | None = None) -> Message:
        """Return the policy's next turn, of at most ``limit`` tokens.

        Raises Truncated if the sequence has no tokens left, or if the episode has used its ``max_turns``.
        """
        try:
            message = await self._turns(self._observed, limit, self._opening)
        except Truncated:
            self.truncated = True
            raise
        self._observed = []
        self.messages.append({"role": "assistant", "content": str(message)})
        return message

    def observe(self, *messages: str | Mapping[str, str]) -> None:
        """Send messages to the policy: text of the user, or mappings with ``role`` and ``content``.

        A tool's result may also have ``tool_call_id`` and ``name``.
        """
        for message in messages:
            if isinstance(message, str):
                message = {"role": "user", "content": message}
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message) <= KEYS:
                raise WrongUse(f"expected text, or a message of role and content, got {message!r:.80}")

            role = message["role"]
            content = message["content"]
            if role not in ROLES or not isinstance(content, str) or len(content) > LARGEST_OBSERVATION:
                raise WrongUse(
                    f"expected a role of {', '.join(ROLES)} and at most {LARGEST_OBSERVATION} characters, "
                    f"got {role!r:.20} and {type(content).__name__} of {len(str(content))}"
                )
            self._observed.append(dict(message))
            self.messages.append(dict(message))


class Environment:
    """Counterpart of the policy in one episode. Derive from it and define `run`.

    ``own_files`` and ``own_processes`` are the numbers of open files and of processes that each episode
    needs. They are added to `rollout.environment.limits`, which apply to a process with many episodes.
    """

    own_files: ClassVar[int] = 0
    own_processes: ClassVar[int] = 0

    async def run(self, episode: Episode) -> float | Mapping[str, float] | None:
        """Run the episode and return its reward, or a mapping of named numbers that includes ``reward``.

        Return None to leave the reward to `reward.function` and `reward.models`. Every exception except
        Truncated makes the episode invalid, so that it has no reward.
        """
        raise NotImplementedError


class StepEnvironment(Environment):
    """Environment with Gym's interface: define `reset` and `step`, async or not."""

    def reset(self, episode: Episode) -> Any:
        """Prepare for an episode before the policy's first turn. The result is ignored."""

    def step(self, response: Message) -> Any:
        """Process a turn of the policy; return (observation, reward, done).

        The observation is an argument of `Episode.observe`, or a list of such arguments; it is ignored if
        ``done``. Gym's (observation, reward, terminated, truncated, info) is also accepted.
        """
        raise NotImplementedError

    async def run(self, episode: Episode) -> float | Mapping[str, float] | None:
        """Alternate turns of the policy and calls of `step` until the end; return the sum of the rewards."""
        # `reset` and `step` may be coroutine functions.
        reset_result = self.reset(episode)
        if inspect.isawaitable(reset_result):
            await reset_result

        reward_sum = 0.0
        while True:
            try:
                response = await episode.generate()
            except Truncated:
                # A truncated episode gets the sum of its rewards so far.
                return reward_sum

            result = self.step(response)
            if inspect.isawaitable(result):
                result = await result
            if not isinstance(result, tuple) or len(result) not in (3, 5):
                raise WrongUse(f"expected (observation, reward, done) from step, got {result!r:.80}")

            # `done`, or Gym's `terminated` or `truncated`, ends the episode; Gym's `info` is ignored.
            observation, reward = result[:2]
            is_done = any(result[2:4])
            reward_sum += reward
            if is_done:
                return reward_sum

            observations = observation if isinstance(observation, list) else [observation]
            episode.observe(*observations)
