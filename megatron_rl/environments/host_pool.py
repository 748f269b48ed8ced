"""The trainer's side of environments: their processes, time limits, and validation of their messages.

An environment is user code. It may raise, hang, exhaust its process or send anything, and in every case only
its own episode may fail. `EnvironmentPool` therefore validates every message before use (`_event`), gives
every turn a deadline, and replaces a process that is lost. The other episodes of a lost process start again.
"""

from __future__ import annotations

import selectors
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from megatron_rl.config.sections.rollout import EnvironmentConfig
from megatron_rl.contained.confinement import exceeded_limit
from megatron_rl.contained.process import (
    INVALID_TEXT,
    INVALID_TEXT_MESSAGE,
    ContainedProcess,
    LoadFailed,
    kill_all,
)
from megatron_rl.environments import host as protocol
from megatron_rl.environments.environment import KEYS, LARGEST_OBSERVATION, ROLES, Opening
from megatron_rl.errors import UserError, UserErrors, single_errors
from megatron_rl.rewards import calls
from megatron_rl.rewards.worker import CRASHED, TIMEOUT, WRONG_TYPE, read_answer

GRACE_SECONDS = 2.0
"""Time that a cancelled environment has to end, and a process to respond to a ping; then the process is
replaced."""

MOST_EPISODES = 2**14
"""Episodes of a process whose own files are added to ``limits.files``."""

MOST_PROGRAMS = 2**10
"""Episodes of a process whose own processes are added to ``limits.processes``; fewer, since the kernel bounds
processes, too."""


class TurnRequest(NamedTuple):
    """Request of an environment for a turn of the policy.

    Example:
        >>> TurnRequest(3, [{"role": "user", "content": "Try again."}], limit=16).limit
        16
    """

    number: int
    """Number of the episode."""

    messages: list[dict[str, str]]
    """Messages that the environment observed since the last turn."""

    limit: int | None
    """Most tokens of the turn, None if unlimited."""

    opening: Opening | None = None
    """Messages in place of the record's prompt, with the first request alone."""


class EpisodeEnd(NamedTuple):
    """End of an episode, with a reward or a failure.

    Example:
        >>> EpisodeEnd(3, reward=1.0).truncated
        False
    """

    number: int
    """Number of the episode."""

    reward: float | None = None
    """Reward of the environment, None if it leaves the reward to others, or has failed."""

    components: Mapping[str, float] = {}
    """Named components, in addition to the reward."""

    truncated: bool = False
    """Whether the environment was refused a turn."""

    failure: str | None = None
    """Kind of the failure, None if there is none."""

    message: str = ""
    """Text of the failure."""


class EpisodeRestart(NamedTuple):
    """Restart of an episode whose process was lost: its new environment asks for the first turn again."""

    number: int
    """Number of the episode."""


Event = TurnRequest | EpisodeEnd | EpisodeRestart


@dataclass
class _OpenEpisode:
    """An episode that has not ended, in a process or waiting for one."""

    number: int

    values: dict[str, Any]
    """Arguments of `Episode`."""

    busy_since: float | None = None
    """Time since which its environment works, None while it awaits a turn."""

    runs_alone: bool = False
    """Whether it may have ended a process. It then gets a process without others, so that the next loss is
    certainly its own."""


@dataclass
class _Host:
    """A process of environments, with its episodes."""

    process: ContainedProcess

    episodes: dict[int, _OpenEpisode] = field(default_factory=dict)
    """Open episodes by number."""

    closing: dict[int, float] = field(default_factory=dict)
    """Deadline of each cancelled episode to release its thread."""

    pinged: float | None = None
    """Time of an open ping, None if there is none. Sent when an environment is late, to distinguish a late
    environment from a process that is blocked as a whole."""


class EnvironmentPool:
    """Environments in ``config.workers`` processes.

    An environment that raises, exceeds ``config.turn_timeout`` or ends its process ends its own episode.
    Other episodes of the same process are restarted, see `EpisodeRestart`. The constructor loads the class in
    every process and raises UserError if that fails. ``missing`` describes the limits that this machine's
    kernel does not enforce.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config
        self._next_number = 0
        # Reason why no process could be started, empty if one could.
        self._start_failure = ""

        # Episodes without a process, first in first out.
        self._waiting: list[_OpenEpisode] = []
        self._hosts: list[_Host] = []
        # Processes must not outlive this object, even if it is not closed.
        self._finalizer = weakref.finalize(self, kill_all, self._hosts)

        try:
            unenforced = [self._start_process() for _ in range(config.workers)]
        except BaseException:
            self.close()
            raise
        # Equal for all processes of a machine.
        self.missing: tuple[str, ...] = tuple(unenforced[0])

    def _start_process(self) -> list[str]:
        """Start a process and load the class in it; return the limits that it does not enforce."""
        limits = {
            **asdict(self.config.limits),
            # An agent connects to its endpoint on the loopback interface.
            "loopback": True,
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
        """Return the first of ``count`` consecutive episode numbers that were never used."""
        first = self._next_number
        self._next_number += count
        return first

    def start(self, number: int, values: Mapping[str, Any]) -> None:
        """Start the environment of an episode; ``values`` are the arguments of its `Episode`."""
        self._waiting.append(_OpenEpisode(number, dict(values)))

    def turn(self, number: int, text: str, *attributes: Any) -> None:
        """Send a turn of the policy to the environment that awaits it; ``attributes`` as in `Message`."""
        self._send(number, protocol.TURN, text, *attributes)

    def end(self, number: int) -> None:
        """Refuse the environment a turn for which its sequence has no room."""
        self._send(number, protocol.END)

    def forget(self, number: int) -> None:
        """Cancel an episode, also one that waits for a process."""
        self._waiting = [episode for episode in self._waiting if episode.number != number]
        for host in self._hosts:
            if host.episodes.pop(number, None) is not None:
                host.process.send_request((protocol.CANCEL, number))
                host.closing[number] = time.monotonic() + GRACE_SECONDS

    def _send(self, number: int, kind: str, *values: Any) -> None:
        """Send a request to an episode's process; its environment works from now on."""
        for host in self._hosts:
            if number in host.episodes:
                host.process.send_request((kind, number, *values))
                host.episodes[number].busy_since = time.monotonic()

    def poll(self, seconds: float) -> list[Event]:
        """Return the events of environments, waiting up to ``seconds`` for the first."""
        events: list[Event] = []

        # Try again to replace lost processes, as long as episodes wait for one.
        while self._waiting and len(self._hosts) < self.config.workers:
            num_hosts = len(self._hosts)
            self._restart_process()
            if len(self._hosts) == num_hosts:
                break
        if not self._hosts:
            self._give_up(events)
            return events
        self._dispatch()

        # Wait for messages, at most until the next deadline.
        now = time.monotonic()
        waits = [seconds]
        for host in self._hosts:
            waits += [deadline - now for deadline in self._deadlines(host)]
        wait_seconds = max(0.0, min(waits))
        with selectors.DefaultSelector() as selector:
            for host in self._hosts:
                selector.register(host.process.replies, selectors.EVENT_READ, host)
            ready = [key.data for key, _ in selector.select(wait_seconds)]

        for host in ready:
            self._receive(host, events)
        # A message that has arrived is in time, so only the other processes can be late.
        for host in list(self._hosts):
            if host not in ready:
                self._check_deadlines(host, events)
        return events

    def _dispatch(self) -> None:
        """Assign waiting episodes to the processes with the fewest.

        An episode that runs alone waits until a process is empty, and keeps others away from it.
        """
        for episode in list(self._waiting):
            available = [
                host
                for host in self._hosts
                if not any(resident.runs_alone for resident in host.episodes.values())
            ]
            host = min(available, key=lambda host: len(host.episodes), default=None)
            # Later episodes are not held up by one that waits for an empty process.
            if host is None or (episode.runs_alone and host.episodes):
                continue

            self._waiting.remove(episode)
            host.episodes[episode.number] = episode
            host.process.send_request((protocol.START, episode.number, episode.values))
            episode.busy_since = time.monotonic()

    def _deadlines(self, host: _Host) -> list[float]:
        """Return the times at which a process has to be checked for lateness."""
        if host.pinged is not None:
            return [host.pinged + GRACE_SECONDS]
        deadlines = list(host.closing.values())
        for episode in host.episodes.values():
            if episode.busy_since is not None:
                deadlines.append(episode.busy_since + self.config.turn_timeout)
        return deadlines

    def _receive(self, host: _Host, events: list[Event]) -> None:
        """Process the messages that have arrived from a process; replace it if it has ended."""
        frames, is_open = host.process.frames()
        for frame in frames:
            number = frame.get("episode")
            kind = frame.get("kind")
            if kind == protocol.CLOSED and isinstance(number, int):
                host.closing.pop(number, None)
                continue
            if kind == protocol.LIVES and host.pinged is not None:
                self._fail_late(host, events)
                continue
            # Drop a message that was sent before the environment was cancelled.
            if number in host.closing:
                continue

            event = _event(frame, host.episodes)
            if event is None:
                host.process.protocol_error = f"its process sent a malformed message: {frame!r:.200}"
                break
            if isinstance(event, TurnRequest):
                host.episodes[event.number].busy_since = None
            else:
                # The process keeps the thread of an episode until the episode is cancelled.
                host.process.send_request((protocol.CANCEL, event.number))
                del host.episodes[event.number]
            events.append(event)

        if not is_open or host.process.protocol_error is not None:
            self._lose(host, events, CRASHED)

    def _check_deadlines(self, host: _Host, events: list[Event]) -> None:
        """Ping a process with a late environment; replace a process that does not respond.

        The ping comes first: if the whole process is blocked, it is not known which environment blocks it.
        """
        now = time.monotonic()
        if host.pinged is not None:
            if now >= host.pinged + GRACE_SECONDS:
                self._lose(host, events, TIMEOUT)
        elif self._late(host):
            host.pinged = now
            host.process.send_request((protocol.PING, -1))
        elif any(now >= deadline for deadline in host.closing.values()):
            self._replace(host, events)

    def _late(self, host: _Host) -> list[_OpenEpisode]:
        """Return the episodes whose environments have exceeded their time for a turn."""
        latest_start = time.monotonic() - self.config.turn_timeout
        return [
            episode
            for episode in host.episodes.values()
            if episode.busy_since is not None and episode.busy_since <= latest_start
        ]

    def _fail_late(self, host: _Host, events: list[Event]) -> None:
        """Fail the late episodes of a process that has responded to a ping."""
        host.pinged = None
        for episode in self._late(host):
            self.forget(episode.number)
            events.append(EpisodeEnd(episode.number, failure=TIMEOUT, message=self._timeout_message()))

    def _timeout_message(self) -> str:
        seconds = f"{self.config.turn_timeout:g} s"
        return f"did not answer a turn within {seconds} (rollout.environment.turn_timeout)"

    def _lose(self, host: _Host, events: list[Event], reason: str) -> None:
        """Replace a lost process and fail the episode that is responsible.

        That is the only busy episode, or the one that runs alone. With several busy episodes it is not known:
        each of them is restarted alone.
        """
        suspects = [episode for episode in host.episodes.values() if episode.busy_since is not None]
        status = self._replace(host, events)

        message = f"its process ended with status {status}"
        limit = exceeded_limit(status, asdict(self.config.limits), f"{protocol.WHERE}.limits")
        if reason == TIMEOUT:
            message = self._timeout_message()
        elif host.process.protocol_error:
            message = host.process.protocol_error
        elif limit:
            message = limit

        for episode in suspects:
            if episode.runs_alone or len(suspects) == 1:
                # `_replace` has restarted it.
                self._waiting.remove(episode)
                events.remove(EpisodeRestart(episode.number))
                events.append(EpisodeEnd(episode.number, failure=reason, message=message))
            episode.runs_alone = True

    def _replace(self, host: _Host, events: list[Event]) -> int:
        """Kill a process, start another and restart its episodes; return its exit status."""
        status = host.process.kill()
        self._hosts.remove(host)
        self._restart_process()

        # Also the episodes that were awaiting a turn: their environments are gone.
        for episode in host.episodes.values():
            episode.busy_since = None
            self._waiting.append(episode)
            events.append(EpisodeRestart(episode.number))
        return status

    def _restart_process(self) -> None:
        """Start a process in place of a lost one, with several attempts.

        The class was loaded before, so a failure has a passing cause: the process was killed, or the machine
        is out of memory.
        """
        started = time.monotonic()
        # None: no wait after the last attempt.
        for wait_seconds in (*calls.RESTART_DELAYS, None):
            try:
                self._start_process()
                return
            except UserError as error:
                self._start_failure = "; ".join(str(detail.got) for detail in single_errors(error))

            is_late = time.monotonic() - started > calls.RESTART_SECONDS
            if wait_seconds is None or is_late:
                return
            time.sleep(wait_seconds)

    def _give_up(self, events: list[Event]) -> None:
        """Fail the waiting episodes, for which no process could be started."""
        message = f"no process of {self.config.name} could be started again: {self._start_failure}"
        for episode in self._waiting:
            events.append(EpisodeEnd(episode.number, failure=CRASHED, message=message))
        self._waiting.clear()

    def close(self) -> None:
        """Kill the processes."""
        self._finalizer()


def environment_errors(config: EnvironmentConfig) -> list[UserError]:
    """Return the errors of an environment's class and settings, which a contained process loads."""
    try:
        EnvironmentPool(replace(config, workers=1)).close()
    except UserError as error:
        return list(single_errors(error))
    return []


def _event(frame: Mapping[str, Any], episodes: Mapping[int, _OpenEpisode]) -> TurnRequest | EpisodeEnd | None:
    """Validate a message of a process and return its event, None if it is malformed or out of turn."""
    number = frame.get("episode")
    if not isinstance(number, int) or number not in episodes:
        return None

    # An environment may only ask while it works, not while it awaits a turn.
    if frame.get("kind") == protocol.ASKS and episodes[number].busy_since is not None:
        return _asks(number, frame)
    if frame.get("kind") == protocol.ENDED:
        return _ended(number, frame)
    return None


def _asks(number: int, frame: Mapping[str, Any]) -> TurnRequest | EpisodeEnd | None:
    """Validate an environment's request for a turn."""
    if INVALID_TEXT in frame:
        return EpisodeEnd(number, failure=WRONG_TYPE, message=f"the environment {INVALID_TEXT_MESSAGE}")

    messages = frame.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        return None

    opening = None
    values = frame.get("opening")
    if values is not None:
        if not _is_opening(values):
            return None
        opening = Opening(values["messages"], values["tools"])

    limit = frame.get("limit")
    if not isinstance(limit, int) or limit <= 0:
        limit = None
    return TurnRequest(number, messages, limit, opening)


def _ended(number: int, frame: Mapping[str, Any]) -> EpisodeEnd | None:
    """Validate the end of an episode."""
    truncated = frame.get("truncated") is True
    # Without a reward the episode was truncated, or scorers reward it.
    if frame.get("result") == protocol.SCORED and frame.get("reward") is None:
        return EpisodeEnd(number, truncated=truncated)

    # The rewards' own protocol has the key "kind" where this one has "result".
    answer = read_answer({**frame, "kind": frame.get("result")})
    if answer is None:
        return None
    reward = None if answer.reason else answer.reward
    return EpisodeEnd(number, reward, answer.components, truncated, answer.reason, answer.message)


def _is_opening(value: Any) -> bool:
    """Return whether a value has the form of an `Opening`."""
    if not isinstance(value, dict) or set(value) != {"messages", "tools"}:
        return False
    messages = value["messages"]
    tools = [] if value["tools"] is None else value["tools"]
    if not isinstance(messages, list) or not isinstance(tools, list):
        return False
    return all(isinstance(entry, dict) for entry in [*messages, *tools])


def _is_message(value: Any) -> bool:
    """Return whether a value has the form of a message that an environment may send."""
    if not isinstance(value, dict) or not {"role", "content"} <= set(value) <= KEYS:
        return False
    for text in value.values():
        if not isinstance(text, str) or len(text) > LARGEST_OBSERVATION:
            return False
    return value["role"] in ROLES
