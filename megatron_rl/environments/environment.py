"""What a user derives an environment from; importable without torch.

An environment is one side of one episode: the policy writes, the environment observes and judges. An object
is made for every episode, of the class that ``rollout.environment`` names and with the settings beside that
name; it runs in a process of its own kind, never in the trainer's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

ROLES = ("user", "tool", "system")
"""The roles of what an environment may say."""
KEYS = {"role", "content", "tool_call_id", "name"}
LARGEST_OBSERVATION = 2**20
"""Characters of one observation; more is a mistake."""


class Truncated(Exception):
    """There is no room, or no turn, left for the policy: the episode ends as it is."""


class WrongUse(Exception):
    """An environment did what no environment may."""


class Message(str):
    """What the policy wrote in one turn: text without special tokens, and the ``tokens`` themselves.

    ``cut`` says that a limit ended it and not the policy. ``log_probs`` are those of the tokens, ``context``
    counts the tokens before them. ``tool_calls`` are in OpenAI's form, where the episode was opened with
    tools and `rollout.environment.tool_parser` is set; the text is then what stands beside them.
    """

    tokens: tuple[int, ...]
    cut: bool
    log_probs: tuple[float, ...]
    context: int
    tool_calls: tuple[dict[str, Any], ...]

    def __new__(
        cls,
        text: str,
        tokens: Sequence[int] = (),
        cut: bool = False,
        log_probs: Sequence[float] = (),
        context: int = 0,
        tool_calls: Sequence[dict[str, Any]] = (),
    ) -> Message:
        message = super().__new__(cls, text)
        message.tokens, message.cut, message.context = tuple(tokens), cut, context
        message.log_probs, message.tool_calls = tuple(log_probs), tuple(tool_calls)
        return message


class Opening(NamedTuple):
    """Hold the messages that an episode begins with in place of the record's prompt, and its tools."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class Turns(Protocol):
    """Ask the policy for a turn that follows what was observed."""

    async def __call__(
        self, observed: list[dict[str, str]], limit: int | None, opening: Opening | None
    ) -> Message: ...


class Episode:
    """One conversation between the policy and an environment.

    ``prompt`` is the text of the prompt, ``ground_truth`` and ``metadata`` are the record's. ``seed`` is the
    episode's own, for all that is random in the environment: with it an episode can be repeated, as happens
    where a process is lost or a run is resumed. ``messages`` holds what was said after the prompt.
    """

    def __init__(
        self, prompt: str, ground_truth: Any, metadata: Mapping[str, Any], seed: int, turns: Turns
    ) -> None:
        self.prompt, self.ground_truth, self.metadata, self.seed = prompt, ground_truth, metadata, seed
        self.messages: list[dict[str, str]] = []
        self.truncated = False
        self._turns = turns
        self._observed: list[dict[str, str]] = []
        self._opening: Opening | None = None

    def open(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> None:
        """Begin with messages of one's own, and tools in OpenAI's form, in place of the record's prompt.

        They go through the tokenizer's chat template. Only before the policy's first turn.
        """
        if self.messages:
            raise WrongUse("an episode was opened after it had begun")
        self._opening = Opening([dict(message) for message in messages], tools)

    async def generate(self, limit: int | None = None) -> Message:
        """Return the policy's next turn, of at most ``limit`` tokens.

        Raises Truncated where the row has no room left, or the episode had its ``max_turns``.
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
        """Say something to the policy: text as the user, or messages with ``role`` and ``content``.

        The answer to a tool's call may have its ``tool_call_id`` and the tool's ``name``.
        """
        for message in messages:
            if isinstance(message, str):
                message = {"role": "user", "content": message}
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message) <= KEYS:
                raise WrongUse(f"expected text, or a message of role and content, got {message!r:.80}")
            role, content = message["role"], message["content"]
            if role not in ROLES or not isinstance(content, str) or len(content) > LARGEST_OBSERVATION:
                raise WrongUse(
                    f"expected a role of {', '.join(ROLES)} and at most {LARGEST_OBSERVATION} characters, "
                    f"got {role!r:.20} and {type(content).__name__} of {len(str(content))}"
                )
            self._observed.append(dict(message))
            self.messages.append(dict(message))


class Environment:
    """Hold the policy's counterpart in one episode. Derive from it and define `run`.

    ``own_files`` and ``own_processes`` are what each episode of the class has open and running by its nature:
    they do not count among those that `rollout.environment.limits` allow a process of episodes.
    """

    own_files: ClassVar[int] = 0
    own_processes: ClassVar[int] = 0

    async def run(self, episode: Episode) -> float | Mapping[str, float] | None:
        """Lead the episode to its end and return its reward, or named numbers that hold ``reward``.

        None leaves the judgement to `reward.function` and `reward.models`. Every exception but Truncated
        makes the episode invalid: its reward is never a number then.
        """
        raise NotImplementedError


class StepEnvironment(Environment):
    """An environment in the form of Gym: define `reset` and `step`, either of them async if need be."""

    def reset(self, episode: Episode) -> Any:
        """Get ready for an episode, whose prompt the policy answers first. Returns nothing."""

    def step(self, response: Message) -> Any:
        """Take a turn of the policy; return (observation, reward, done).

        The observation is what `Episode.observe` takes, or a list of it; its value is not read when done.
        Gym's (observation, reward, terminated, truncated, info) will do too.
        """
        raise NotImplementedError

    async def run(self, episode: Episode) -> float | Mapping[str, float] | None:
        """Take turns until `step` is done; the reward is the sum of its rewards."""
        reset = self.reset(episode)
        if inspect.isawaitable(reset):
            await reset
        total = 0.0
        while True:
            try:
                response = await episode.generate()
            except Truncated:
                return total
            answer = self.step(response)
            if inspect.isawaitable(answer):
                answer = await answer
            if not isinstance(answer, tuple) or len(answer) not in (3, 5):
                raise WrongUse(f"expected (observation, reward, done) of step, got {answer!r:.80}")
            observation, reward, *ends = answer
            total += reward
            if any(ends[:2]):
                return total
            episode.observe(*(observation if isinstance(observation, list) else [observation]))
