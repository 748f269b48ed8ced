"""Trainer's side of environments: their processes, time limits, and the validation of their messages.

An environment is user code. It may raise, hang, exhaust its process or send malformed messages, and in every
case only its own episode may fail. `EnvironmentPool` therefore validates every message before use
(`_event_of`), gives every turn a deadline, and replaces a lost process. The other episodes of a lost process
are restarted.
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
from megatron_rl.rewards import worker as worker_process
from megatron_rl.rewards.worker import CRASHED, TIMEOUT, WRONG_TYPE, read_answer

GRACE_SECONDS = 2.0
"""Time within which a cancelled environment must end, and a process must respond to a ping; then the process
is replaced."""

MAX_EPISODES = 2**14
"""Number of episodes per process for whose files the hard limit of open files allows."""

MAX_PROGRAMS = 2**10
"""Number of episodes per process for whose child processes the hard limit of processes allows; it is lower,
since the kernel bounds processes, too."""


class TurnRequest(NamedTuple):
    """Request of an environment for a turn of the policy.

    Example:
        >>> TurnRequest(3, [{"role": "user", "content": "Try again."}], limit=16).limit
        16
    """

    number: int
    """Number of the episode."""

    messages: list[dict[str, str]]
    """Messages that the environment sends to the policy, all since the last turn."""

    limit: int | None
    """Largest number of tokens of the turn, or None if unlimited."""

    opening: Opening | None = None
    """Messages in place of the record's prompt; only the first request of an episode may have them."""


class EpisodeEnd(NamedTuple):
    """End of an episode, with a reward or a failure.

    Example:
        >>> EpisodeEnd(3, reward=1.0).truncated
        False
    """

    number: int
    """Number of the episode."""

    reward: float | None = None
    """Reward of the environment, or None if it failed or leaves the reward to a reward function or model."""

    components: Mapping[str, float] = {}
    """Named components, in addition to the reward."""

    truncated: bool = False
    """Whether the episode ended because no tokens or turns were left."""

    failure: str | None = None
    """Failure reason, or None for a valid episode."""

    message: str = ""
    """Details of the failure."""


class EpisodeRestart(NamedTuple):
    """Restart of an episode whose process was lost: a new environment requests the first turn again."""

    number: int
    """Number of the episode."""


Event = TurnRequest | EpisodeEnd | EpisodeRestart


@dataclass
class _OpenEpisode:
    """Episode that has not ended: it runs in a process, or waits for one."""

    number: int

    values: dict[str, Any]
    """Arguments of `Episode`."""

    busy_since: float | None = None
    """Time (monotonic) since which the environment has been running, or None while it awaits a turn."""

    runs_alone: bool = False
    """Whether the episode may have caused the loss of a process. It then runs in a process without other
    episodes, so that it is certainly the cause if that process is lost, too."""


@dataclass
class _Host:
    """Process of environments, with its episodes."""

    process: ContainedProcess

    episodes: dict[int, _OpenEpisode] = field(default_factory=dict)
    """Open episodes by number."""

    closing: dict[int, float] = field(default_factory=dict)
    """Number of each cancelled episode -> time (monotonic) by which it must release its thread."""

    pinged: float | None = None
    """Time (monotonic) of a ping without response, or None. A ping is sent if an environment is late, to
    distinguish a late environment from a process that is blocked as a whole."""


class EnvironmentPool:
    """Pool of ``config.workers`` processes that run environments.

    If an environment raises, exceeds ``config.turn_timeout`` or ends its process, only its own episode fails.
    Other episodes of a lost process are restarted, see `EpisodeRestart`. The constructor loads the class in
    every process and raises UserError if that fails. ``missing`` are descriptions of the limits that this
    machine's kernel does not enforce.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config
        self._next_number = 0
        # Reason why the last attempt to start a process failed.
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
        # The limits are the same for all processes of a machine.
        self.missing: tuple[str, ...] = tuple(unenforced[0])

    def _start_process(self) -> list[str]:
        """Start a process and load the class in it; return descriptions of unenforced limits."""
        limits = {
            **asdict(self.config.limits),
            # An agent connects to its endpoint on the loopback interface.
            "loopback": True,
            "own_files": protocol.MAX_OWN_PER_EPISODE * MAX_EPISODES,
            "own_processes": protocol.MAX_OWN_PER_EPISODE * MAX_PROGRAMS,
        }
        process = ContainedProcess("megatron_rl.environments.host:serve", limits, self.config.name)
        try:
            ready = process.load(self.config.name, dict(self.config.settings), self.config.max_turns)
        except LoadFailed as error:
            raise error.as_error(
                f"the environment {self.config.name}",
                f"{protocol.CONFIG_KEY}.name",
                "module:Class or path/to/file.py:Class that can be imported",
            ) from None

        if ready.get("errors"):
            process.kill()
            raise UserErrors(UserError(**error) for error in ready["errors"])
        self._hosts.append(_Host(process))
        return [str(item) for item in ready.get("missing", ())]

    def reserve(self, count: int) -> int:
        """Reserve ``count`` consecutive new episode numbers and return the first."""
        first = self._next_number
        self._next_number += count
        return first

    def start(self, number: int, values: Mapping[str, Any]) -> None:
        """Start the environment of an episode; ``values`` are the arguments of its `Episode`."""
        self._waiting.append(_OpenEpisode(number, dict(values)))

    def turn(self, number: int, text: str, *attributes: Any) -> None:
        """Send a turn of the policy to the environment that awaits it.

        ``text`` and ``attributes`` are the arguments of `Message`.
        """
        self._send(number, protocol.TURN, text, *attributes)

    def end(self, number: int) -> None:
        """Reject the environment's request for a turn, because its sequence has no room."""
        self._send(number, protocol.END)

    def forget(self, number: int) -> None:
        """Cancel an episode, which may be running or waiting for a process."""
        self._waiting = [episode for episode in self._waiting if episode.number != number]
        for host in self._hosts:
            if host.episodes.pop(number, None) is not None:
                host.process.send_request((protocol.CANCEL, number))
                host.closing[number] = time.monotonic() + GRACE_SECONDS

    def _send(self, number: int, kind: str, *values: Any) -> None:
        """Send a request to an episode's process; its environment is running from now on."""
        for host in self._hosts:
            if number in host.episodes:
                host.process.send_request((kind, number, *values))
                host.episodes[number].busy_since = time.monotonic()

    def poll(self, seconds: float) -> list[Event]:
        """Return the events of all environments, after a wait of at most ``seconds`` for the first event."""
        events: list[Event] = []

        # Retry to replace lost processes while episodes wait for a process.
        while self._waiting and len(self._hosts) < self.config.workers:
            num_hosts = len(self._hosts)
            self._restart_process()
            if len(self._hosts) == num_hosts:
                break
        if not self._hosts:
            self._give_up(events)
            return events
        self._dispatch()

        # Wait for messages until the next deadline at most.
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
        # A process with a message is responsive, so check only the deadlines of the other processes.
        for host in list(self._hosts):
            if host not in ready:
                self._check_deadlines(host, events)
        return events

    def _dispatch(self) -> None:
        """Assign each waiting episode to the process with the fewest episodes.

        An episode with ``runs_alone`` waits until a process has no episodes, and that process gets no others.
        """
        for episode in list(self._waiting):
            available = [
                host
                for host in self._hosts
                if not any(resident.runs_alone for resident in host.episodes.values())
            ]
            host = min(available, key=lambda host: len(host.episodes), default=None)
            # An episode that waits for an empty process does not delay the episodes behind it.
            if host is None or (episode.runs_alone and host.episodes):
                continue

            self._waiting.remove(episode)
            host.episodes[episode.number] = episode
            host.process.send_request((protocol.START, episode.number, episode.values))
            episode.busy_since = time.monotonic()

    def _deadlines(self, host: _Host) -> list[float]:
        """Return the times (monotonic) of a process's deadlines."""
        if host.pinged is not None:
            return [host.pinged + GRACE_SECONDS]
        deadlines = list(host.closing.values())
        for episode in host.episodes.values():
            if episode.busy_since is not None:
                deadlines.append(episode.busy_since + self.config.turn_timeout)
        return deadlines

    def _receive(self, host: _Host, events: list[Event]) -> None:
        """Handle the messages of a process; replace it if it has ended or sent a malformed message."""
        frames, is_open = host.process.frames()
        for frame in frames:
            number = frame.get("episode")
            kind = frame.get("kind")
            if kind == protocol.CLOSED and isinstance(number, int):
                host.closing.pop(number, None)
                continue
            if kind == protocol.ALIVE and host.pinged is not None:
                self._fail_late(host, events)
                continue
            # Drop a message that was sent before the environment was cancelled.
            if number in host.closing:
                continue

            event = _event_of(frame, host.episodes)
            if event is None:
                host.process.protocol_error = f"its process sent a malformed message: {frame!r:.200}"
                break
            if isinstance(event, TurnRequest):
                host.episodes[event.number].busy_since = None
            else:
                # An episode's thread in the process ends only when the episode is cancelled.
                host.process.send_request((protocol.CANCEL, event.number))
                del host.episodes[event.number]
            events.append(event)

        if not is_open or host.process.protocol_error is not None:
            self._lose(host, events, CRASHED)

    def _check_deadlines(self, host: _Host, events: list[Event]) -> None:
        """Ping a process with a late environment; replace a process that does not respond.

        The ping comes first, because a late environment may be the victim of another that blocks the process.
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
        """Return the episodes whose environments have exceeded ``turn_timeout``."""
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
        """Return the failure message of a late episode."""
        seconds = f"{self.config.turn_timeout:g} s"
        return f"did not answer a turn within {seconds} (rollout.environment.turn_timeout)"

    def _lose(self, host: _Host, events: list[Event], reason: str) -> None:
        """Replace a lost process and fail the episode that caused the loss.

        The cause is the only busy episode, or the episode with ``runs_alone``. If several episodes are busy,
        the cause is unknown, and each of them is restarted with ``runs_alone``.
        """
        suspects = [episode for episode in host.episodes.values() if episode.busy_since is not None]
        status = self._replace(host, events)

        message = f"its process ended with status {status}"
        limit = exceeded_limit(status, asdict(self.config.limits), f"{protocol.CONFIG_KEY}.limits")
        if reason == TIMEOUT:
            message = self._timeout_message()
        elif host.process.protocol_error:
            message = host.process.protocol_error
        elif limit:
            message = limit

        for episode in suspects:
            if episode.runs_alone or len(suspects) == 1:
                # Undo the restart by `_replace`.
                self._waiting.remove(episode)
                events.remove(EpisodeRestart(episode.number))
                events.append(EpisodeEnd(episode.number, failure=reason, message=message))
            episode.runs_alone = True

    def _replace(self, host: _Host, events: list[Event]) -> int:
        """Kill a process, start a replacement and restart the episodes; return the exit status."""
        status = host.process.kill()
        self._hosts.remove(host)
        self._restart_process()

        # Episodes that were awaiting a turn are restarted, too, since their environments are lost.
        for episode in host.episodes.values():
            episode.busy_since = None
            self._waiting.append(episode)
            events.append(EpisodeRestart(episode.number))
        return status

    def _restart_process(self) -> None:
        """Start a process in place of a lost one, with several attempts.

        The class was loaded before, so a failure is temporary: the process was killed, or the machine is out
        of memory.
        """
        start_time = time.monotonic()
        # None stands for no wait after the last attempt.
        for wait_seconds in (*worker_process.RESTART_DELAYS, None):
            try:
                self._start_process()
                return
            except UserError as error:
                self._start_failure = "; ".join(str(detail.got) for detail in single_errors(error))

            is_late = time.monotonic() - start_time > worker_process.RESTART_SECONDS
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
    """Load an environment's class and settings in a contained process, and return the errors."""
    try:
        EnvironmentPool(replace(config, workers=1)).close()
    except UserError as error:
        return list(single_errors(error))
    return []


def _event_of(
    frame: Mapping[str, Any], episodes: Mapping[int, _OpenEpisode]
) -> TurnRequest | EpisodeEnd | None:
    """Validate a message of a process; return its event, or None if it is malformed or out of order."""
    number = frame.get("episode")
    if not isinstance(number, int) or number not in episodes:
        return None

    # An environment must not request a turn while it awaits one.
    if frame.get("kind") == protocol.TURN_REQUESTED and episodes[number].busy_since is not None:
        return _turn_request(number, frame)
    if frame.get("kind") == protocol.ENDED:
        return _episode_end(number, frame)
    return None


def _turn_request(number: int, frame: Mapping[str, Any]) -> TurnRequest | EpisodeEnd | None:
    """Validate an environment's request for a turn; return None if it is malformed.

    A request whose text is not valid Unicode ends the episode.
    """
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


def _episode_end(number: int, frame: Mapping[str, Any]) -> EpisodeEnd | None:
    """Validate the message about the end of an episode; return None if it is malformed."""
    truncated = frame.get("truncated") is True
    # Without a reward the episode was truncated, or a reward function or model computes the reward.
    if frame.get("result") == protocol.SCORED and frame.get("reward") is None:
        return EpisodeEnd(number, truncated=truncated)

    # The reward protocol has the key "kind" in place of "result".
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
