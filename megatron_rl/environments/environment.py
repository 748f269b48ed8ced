"""What a user derives an environment from; importable without torch.

An environment is one side of one episode: the policy writes, the environment observes and judges. An object
is made for every episode, of the class that ``rollout.environment`` names and with the settings beside that
name; it runs in a process of its own kind, never in the trainer's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

ROLES = ("user", "tool", "system")
"""The roles of what an environment may say."""
LARGEST_OBSERVATION = 2**20
"""Characters of one observation; more is a mistake."""


class Truncated(Exception):
    """There is no room, or no turn, left for the policy: the episode ends as it is."""


class WrongUse(Exception):
    """An environment did what no environment may."""


class Message(str):
    """What the policy wrote in one turn: text without special tokens, and the ``tokens`` themselves.

    ``cut`` says that a limit ended it and not the policy.
    """

    tokens: tuple[int, ...]
    cut: bool

    def __new__(cls, text: str, tokens: Sequence[int] = (), cut: bool = False) -> Message:
        message = super().__new__(cls, text)
        message.tokens, message.cut = tuple(tokens), cut
        return message


class Turns(Protocol):
    """Ask the policy for a turn that follows what was observed."""

    async def __call__(self, observed: list[dict[str, str]], limit: int | None) -> Message: ...


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

    async def generate(self, limit: int | None = None) -> Message:
        """Return the policy's next turn, of at most ``limit`` tokens.

        Raises Truncated where the row has no room left, or the episode had its ``max_turns``.
        """
        try:
            message = await self._turns(self._observed, limit)
        except Truncated:
            self.truncated = True
            raise
        self._observed = []
        self.messages.append({"role": "assistant", "content": str(message)})
        return message

    def observe(self, *messages: str | Mapping[str, str]) -> None:
        """Say something to the policy: text as the user, or messages with ``role`` and ``content``."""
        for message in messages:
            if isinstance(message, str):
                message = {"role": "user", "content": message}
            if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
                raise WrongUse(f"expected text, or a message of role and content, got {message!r:.80}")
            role, content = message["role"], message["content"]
            if role not in ROLES or not isinstance(content, str) or len(content) > LARGEST_OBSERVATION:
                raise WrongUse(
                    f"expected a role of {', '.join(ROLES)} and at most {LARGEST_OBSERVATION} characters, "
                    f"got {role!r:.20} and {type(content).__name__} of {len(str(content))}"
                )
            self._observed.append({"role": role, "content": content})
            self.messages.append({"role": role, "content": content})


class Environment:
    """Hold the policy's counterpart in one episode. Derive from it and define `run`."""

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
