"""The trainer's side of environments: their processes, their time limits, and what of them is believed."""

from __future__ import annotations

import selectors
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from megatron_rl.config.sections.rollout import EnvironmentConfig
from megatron_rl.contained.confinement import limit_of
from megatron_rl.contained.process import NO_TEXT, NO_TEXT_MESSAGE, ContainedProcess, LoadFailed, kill_all
from megatron_rl.environments import host as protocol
from megatron_rl.environments.environment import KEYS, LARGEST_OBSERVATION, ROLES, Opening
from megatron_rl.errors import UserError, UserErrors, each
from megatron_rl.rewards import calls
from megatron_rl.rewards.worker import CRASHED, TIMEOUT, WRONG_TYPE, answer_of

GRACE_SECONDS = 2.0
"""Time that an environment has to end once it is cancelled; then its process is replaced."""

MOST_EPISODES = 2**14
"""Episodes of a process whose event loops do not count among the files that ``limits`` allow."""
MOST_PROGRAMS = 2**10
"""Episodes of a process whose own programs do not count among the processes, which the kernel bounds too."""


class Asks(NamedTuple):
    """Say that an environment wants a turn of the policy after ``messages``, of at most ``limit`` tokens.

    ``opening`` are the prompt's messages, where they are the environment's own.
    """

    number: int
    messages: list[dict[str, str]]
    limit: int | None
    opening: Opening | None = None


class Ended(NamedTuple):
    """Say how an episode ended: with a reward, None where others judge, or with a failure's reason."""

    number: int
    reward: float | None = None
    components: Mapping[str, float] = {}
    truncated: bool = False
    failure: str | None = None
    message: str = ""


class Restarted(NamedTuple):
    """Say that an environment is being made anew, since its process was lost: it asks from the start."""

    number: int


@dataclass
class _Open:
    """One open episode: since when its environment has been at work (None while the policy is)."""

    number: int
    values: dict[str, Any]
    since: float | None = None
    alone: bool = False
    """It may have ended a process: it gets one of its own until it is known."""


@dataclass
class _Host:
    process: ContainedProcess
    episodes: dict[int, _Open] = field(default_factory=dict)
    leaving: dict[int, float] = field(default_factory=dict)
    """Cancelled episodes, and when their environments must have ended."""
    pinged: float | None = None
    """When the process was asked whether it lives, since an environment is late."""


class Hosts:
    """Run environments in ``config.workers`` processes.

    An environment that raises, overruns ``config.turn_timeout`` or ends its process ends its own episode, and
    no other: those that were in the same process are made anew and asked from the start again, see
    `Restarted`. The constructor loads the class in every process and raises a UserError when that fails;
    ``missing`` then says in words what of the limits this machine's kernel does not enforce.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config
        self._reserved = 0
        self._no_host = ""
        self._waiting: list[_Open] = []
        self._hosts: list[_Host] = []
        self._finalizer = weakref.finalize(self, kill_all, self._hosts)
        try:
            loaded = [self._begin() for _ in range(config.workers)]
        except BaseException:
            self.close()
            raise
        self.missing: tuple[str, ...] = tuple(loaded[0])

    def _begin(self) -> list[str]:
        """Start a process; return what it does not enforce."""
        limits = {
            **asdict(self.config.limits),
            "loopback": True,  # an agent speaks with its endpoint
            "own_files": protocol.MOST_OWN * MOST_EPISODES,
            "own_processes": protocol.MOST_OWN * MOST_PROGRAMS,
        }
        process = ContainedProcess("megatron_rl.environments.host:serve", limits, self.config.name)
        try:
            ready = process.load(self.config.name, dict(self.config.settings), self.config.max_turns)
        except LoadFailed as error:
            raise error.as_error(
                f"the environment {self.config.name}",
                f"{protocol.WHERE}.name",
                "module:Class or path/to/file.py:Class that can be imported",
            ) from None
        if ready.get("errors"):
            process.kill()
            raise UserErrors(UserError(**error) for error in ready["errors"])
        self._hosts.append(_Host(process))
        return [str(item) for item in ready.get("missing", ())]

    def reserve(self, count: int) -> int:
        """Return the first of ``count`` numbers that no episode has had."""
        first, self._reserved = self._reserved, self._reserved + count
        return first

    def start(self, number: int, values: Mapping[str, Any]) -> None:
        """Begin the environment of an episode; ``values`` are what `Episode` is made of."""
        self._waiting.append(_Open(number, dict(values)))

    def turn(self, number: int, text: str, *more: Any) -> None:
        """Hand a turn of the policy to an environment that asked for it; ``more`` as `Message` takes it."""
        self._tell(number, protocol.TURN, text, *more)

    def end(self, number: int) -> None:
        """Tell an environment that asked for a turn that there is no room for one."""
        self._tell(number, protocol.END)

    def forget(self, number: int) -> None:
        """End an episode's environment, wherever it is."""
        self._waiting = [episode for episode in self._waiting if episode.number != number]
        for host in self._hosts:
            if host.episodes.pop(number, None) is not None:
                host.process.ask((protocol.CANCEL, number))
                host.leaving[number] = time.monotonic() + GRACE_SECONDS

    def _tell(self, number: int, kind: str, *more: Any) -> None:
        for host in self._hosts:
            if number in host.episodes:
                host.process.ask((kind, number, *more))
                host.episodes[number].since = time.monotonic()

    def poll(self, seconds: float) -> list[Asks | Ended | Restarted]:
        """Return what environments said, waiting up to ``seconds`` for the first of it."""
        events: list[Asks | Ended | Restarted] = []
        while self._waiting and len(self._hosts) < self.config.workers:
            count = len(self._hosts)  # one could not be started when it was to be replaced
            self._begin_again()
            if len(self._hosts) == count:
                break
        if not self._hosts:
            self._give_up(events)
            return events
        self._dispatch()
        moments = [moment for host in self._hosts for moment in self._deadlines(host)]
        wait = max(0.0, min([seconds, *(moment - time.monotonic() for moment in moments)]))
        with selectors.DefaultSelector() as selector:
            for host in self._hosts:
                selector.register(host.process.replies, selectors.EVENT_READ, host)
            ready = [key.data for key, _ in selector.select(wait)]
        for host in ready:
            self._receive(host, events)
        for host in list(self._hosts):
            if host not in ready:  # what came meanwhile is in time
                self._overdue(host, events)
        return events

    def _dispatch(self) -> None:
        """Give waiting episodes to the processes with the fewest; one that is to be alone waits for that."""
        for episode in list(self._waiting):
            free = [host for host in self._hosts if not any(other.alone for other in host.episodes.values())]
            host = min(free, key=lambda host: len(host.episodes), default=None)
            if host is None or (episode.alone and host.episodes):
                continue
            self._waiting.remove(episode)
            host.episodes[episode.number] = episode
            host.process.ask((protocol.START, episode.number, episode.values))
            episode.since = time.monotonic()

    def _deadlines(self, host: _Host) -> list[float]:
        if host.pinged is not None:
            return [host.pinged + GRACE_SECONDS]
        working = [episode.since for episode in host.episodes.values() if episode.since is not None]
        return [*(since + self.config.turn_timeout for since in working), *host.leaving.values()]

    def _receive(self, host: _Host, events: list[Asks | Ended | Restarted]) -> None:
        frames, open_ = host.process.frames()
        for frame in frames:
            number = frame.get("episode")
            if frame.get("kind") == protocol.CLOSED and isinstance(number, int):
                host.leaving.pop(number, None)
                continue
            if frame.get("kind") == protocol.LIVES and host.pinged is not None:
                self._fail_late(host, events)
                continue
            if number in host.leaving:
                continue
            event = _event(frame, host.episodes)
            if event is None:
                host.process.disorder = f"its process sent what is no answer: {frame!r:.200}"
                break
            if isinstance(event, Asks):
                host.episodes[event.number].since = None
            else:
                host.process.ask((protocol.CANCEL, event.number))
                del host.episodes[event.number]
            events.append(event)
        if not open_ or host.process.disorder is not None:
            self._lost(host, events, CRASHED)

    def _overdue(self, host: _Host, events: list[Asks | Ended | Restarted]) -> None:
        """Look for environments that are late, and first of all whether their whole process stands still."""
        now = time.monotonic()
        if host.pinged is not None:
            if now >= host.pinged + GRACE_SECONDS:
                self._lost(host, events, TIMEOUT)
        elif self._late(host):
            host.pinged = now
            host.process.ask((protocol.PING, -1))
        elif any(now >= moment for moment in host.leaving.values()):
            self._replace(host, events)

    def _late(self, host: _Host) -> list[_Open]:
        begun = time.monotonic() - self.config.turn_timeout
        working = [episode for episode in host.episodes.values() if episode.since is not None]
        return [episode for episode in working if episode.since is not None and episode.since <= begun]

    def _fail_late(self, host: _Host, events: list[Asks | Ended | Restarted]) -> None:
        host.pinged = None
        for episode in self._late(host):
            self.forget(episode.number)
            events.append(Ended(episode.number, failure=TIMEOUT, message=self._late_words()))

    def _late_words(self) -> str:
        return (
            f"did not answer a turn within {self.config.turn_timeout:g} s (rollout.environment.turn_timeout)"
        )

    def _lost(self, host: _Host, events: list[Asks | Ended | Restarted], reason: str) -> None:
        """Find the episode that ended or stopped a process: the one at work, else each is tried alone."""
        suspects = [episode for episode in host.episodes.values() if episode.since is not None]
        status = self._replace(host, events)
        over = limit_of(status, asdict(self.config.limits), f"{protocol.WHERE}.limits")
        words = host.process.disorder or over or f"its process ended with status {status}"
        words = self._late_words() if reason == TIMEOUT else words
        for episode in suspects:
            if episode.alone or len(suspects) == 1:
                self._waiting.remove(episode)
                events.remove(Restarted(episode.number))
                events.append(Ended(episode.number, failure=reason, message=words))
            episode.alone = True

    def _replace(self, host: _Host, events: list[Asks | Ended | Restarted]) -> int:
        status = host.process.kill()
        self._hosts.remove(host)
        self._begin_again()
        for episode in host.episodes.values():
            episode.since = None
            self._waiting.append(episode)
            events.append(Restarted(episode.number))
        return status

    def _begin_again(self) -> None:
        """Start a process in the place of one that is gone, with some tries.

        The class loaded before, so a failure is that of the moment: the process was killed, or the machine is
        out of memory.
        """
        begun = time.monotonic()
        for wait in (*calls.RESTART_WAITS, None):
            try:
                self._begin()
                return
            except UserError as error:
                self._no_host = "; ".join(str(one.got) for one in each(error))
            if wait is None or time.monotonic() - begun > calls.RESTART_SECONDS:
                return
            time.sleep(wait)

    def _give_up(self, events: list[Asks | Ended | Restarted]) -> None:
        """End the waiting episodes, for which no process could be started."""
        message = f"no process of {self.config.name} could be started again: {self._no_host}"
        events += [Ended(episode.number, failure=CRASHED, message=message) for episode in self._waiting]
        self._waiting.clear()

    def close(self) -> None:
        """Kill the processes."""
        self._finalizer()


def environment_errors(config: EnvironmentConfig) -> list[UserError]:
    """Return what is wrong with an environment's class and settings; its module is imported elsewhere."""
    try:
        Hosts(replace(config, workers=1)).close()
    except UserError as error:
        return list(each(error))
    return []


def _event(frame: Mapping[str, Any], episodes: Mapping[int, _Open]) -> Asks | Ended | None:
    """Return what an environment says, None where it is not in its language or not its turn."""
    number, kind = frame.get("episode"), frame.get("kind")
    if not isinstance(number, int) or number not in episodes:
        return None
    if kind == protocol.ASKS and episodes[number].since is not None:
        if NO_TEXT in frame:
            return Ended(number, failure=WRONG_TYPE, message=f"the environment {NO_TEXT_MESSAGE}")
        messages, limit = frame.get("messages"), frame.get("limit")
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            return None
        opening = frame.get("opening")
        if opening is not None and not _is_opening(opening):
            return None
        limit = limit if isinstance(limit, int) and limit > 0 else None
        return Asks(number, messages, limit, opening and Opening(opening["messages"], opening["tools"]))
    if kind == protocol.ENDED:
        truncated = frame.get("truncated") is True
        if frame.get("result") == protocol.SCORED and frame.get("reward") is None:
            return Ended(number, truncated=truncated)
        answer = answer_of({**frame, "kind": frame.get("result")})
        if answer is None:
            return None
        reward = None if answer.reason else answer.reward
        return Ended(number, reward, answer.components, truncated, answer.reason, answer.message)
    return None


def _is_opening(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"messages", "tools"}:
        return False
    messages, tools = value["messages"], value["tools"]
    lists = isinstance(messages, list) and (tools is None or isinstance(tools, list))
    return lists and all(isinstance(entry, dict) for entry in [*messages, *(tools or ())])


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not {"role", "content"} <= set(value) <= KEYS:
        return False
    texts = all(isinstance(text, str) and len(text) <= LARGEST_OBSERVATION for text in value.values())
    return texts and value["role"] in ROLES
