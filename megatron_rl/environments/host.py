"""Run environments in sandboxed processes: `EnvironmentPool` in the trainer, `serve_episodes` in a process.

An environment is user code. It may raise, hang, exhaust its process or send malformed messages, and in every
case only its own episode may fail. `EnvironmentPool` therefore validates every message before use
(`_parse_event`), sets a deadline for every turn, and replaces a lost process. The other episodes of a lost
process are restarted.

In a process, each episode has a separate thread and event loop. So an environment may block, in async code or
not, without delaying another environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import selectors
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from megatron_rl.config.parse import parse_settings
from megatron_rl.config.sections.rollout import EnvironmentConfig
from megatron_rl.config.setting import value_errors
from megatron_rl.contained.confinement import allow_files, allow_processes, describe_exceeded_limit
from megatron_rl.contained.process import (
    INVALID_TEXT,
    INVALID_TEXT_MESSAGE,
    READY,
    ContainedProcess,
    LoadFailed,
    Requests,
    escape_unprintable,
    format_error,
    kill_processes,
    load_callable,
    malformed_reply_error,
    read_list,
    set_module_sources,
)
from megatron_rl.environments.environment import (
    KEYS,
    LARGEST_OBSERVATION,
    ROLES,
    Environment,
    Episode,
    Message,
    Opening,
    Truncated,
    WrongUse,
)
from megatron_rl.errors import UserError, UserErrors, single_errors
from megatron_rl.rewards import worker as worker_process
from megatron_rl.rewards.worker import (
    CRASHED,
    EXCEPTION,
    SCORED,
    TIMEOUT,
    WRONG_TYPE,
    failure_frame,
    read_answer,
    reward_frame,
)

# Kinds of requests from the trainer. Every request except PING names an episode.
START = "start"  # start the episode
TURN = "turn"  # deliver a turn of the policy
END = "end"  # reject the episode's request for a turn
CANCEL = "cancel"  # cancel the episode
PING = "ping"  # test whether the process responds

# Kinds of messages from the process.
TURN_REQUESTED = "turn requested"  # the environment requests a turn of the policy
ENDED = "ended"  # the environment has returned or failed
CLOSED = "closed"  # the episode has released its thread
ALIVE = "alive"  # response to PING

CONFIG_KEY = "rollout.environment"
"""Configuration key of environments, for errors."""

LOOP_DESCRIPTORS = 3
"""Number of file descriptors that an episode's event loop opens, in addition to those of its environment."""

RESERVED_PER_EPISODE = 32
"""Number of open files, and of processes, per episode for which a worker process has hard limits. A process
cannot raise its hard limits, so they suffice for more episodes than it will run."""

MAX_OWN_PER_EPISODE = 4096
"""Largest valid value of ``own_files`` and ``own_processes`` in an environment's class."""

_THREAD_STACK = 2**20
"""Stack size of an episode's thread in bytes; the default of 8 MiB is too large for thousands of episodes."""

GRACE_SECONDS = 2.0
"""Seconds within which a cancelled environment must end, and a process must respond to a ping. Otherwise the
process is replaced."""

EPISODES_FOR_FILE_LIMIT = 2**14
"""Number of episodes per process for which the hard limit of open files is computed."""

EPISODES_FOR_PROCESS_LIMIT = 2**10
"""Number of episodes per process for which the hard limit of processes is computed. It is smaller than
`EPISODES_FOR_FILE_LIMIT`, since the kernel also limits processes itself."""


# In the trainer


class TurnRequest(NamedTuple):
    """Request of an environment for a turn of the policy.

    Example:
        >>> TurnRequest(3, [{"role": "user", "content": "Try again."}], limit=16).limit
        16
    """

    number: int
    """Number of the episode."""

    messages: list[dict[str, str]]
    """Messages from the environment to the policy since the last turn."""

    limit: int | None
    """Largest number of tokens of the turn, or None for no limit."""

    opening: Opening | None = None
    """Messages and tools that replace the record's prompt, only in the first request of an episode."""


class EpisodeEnd(NamedTuple):
    """End of an episode, with a reward or a failure.

    Example: episode 3 ended with the reward 1, within the limits of tokens and turns.

        >>> EpisodeEnd(number=3, reward=1.0).truncated
        False
    """

    number: int
    """Number of the episode."""

    reward: float | None = None
    """Reward of the environment, or None if it failed or leaves the reward to a reward function or model."""

    components: Mapping[str, float] = {}
    """Named components, in addition to the reward."""

    truncated: bool = False
    """Whether the limit of tokens or turns ended the episode."""

    failure: str | None = None
    """Failure reason, or None for a valid episode."""

    message: str = ""
    """Details of the failure."""


class EpisodeRestart(NamedTuple):
    """Restart of an episode whose process was lost; its new environment requests the first turn again."""

    number: int
    """Number of the episode."""


Event = TurnRequest | EpisodeEnd | EpisodeRestart


@dataclass
class _OpenEpisode:
    """Episode that has not ended: it runs in a process, or waits for a process.

    Example: ``_OpenEpisode(3, {"prompt": "1+2=", "ground_truth": 3, "metadata": {}, "seed": 7})`` is waiting.
    """

    number: int
    """Number of the episode in the pool."""

    values: dict[str, Any]
    """Arguments of the environment's `Episode`: prompt, ground truth, metadata and seed."""

    busy_since: float | None = None
    """Time (monotonic) since which the environment has been running, or None while it awaits a turn."""

    runs_alone: bool = False
    """Whether the episode may have caused the loss of a process. It then runs in a process without other
    episodes: if that process is also lost, the episode must be the cause."""


@dataclass
class _Worker:
    """Sandboxed process that runs environments, with its episodes."""

    process: ContainedProcess

    episodes: dict[int, _OpenEpisode] = field(default_factory=dict)
    """Episodes in the process that have not ended, by number."""

    closing_deadlines: dict[int, float] = field(default_factory=dict)
    """Number of a cancelled episode -> time (monotonic) by which it must release its thread."""

    ping_time: float | None = None
    """Time (monotonic) of a ping without a response yet, or None. The ping tests whether an environment is
    late because it is slow itself, or because another environment blocks the process."""


class EnvironmentPool:
    """Pool of ``config.workers`` processes that run environments.

    If an environment raises, exceeds ``config.turn_timeout`` or ends its process, only its own episode fails.
    The other episodes of a lost process are restarted, see `EpisodeRestart`. The constructor loads the class
    in every process and raises UserError if that fails. ``unenforced_limits`` describes the limits that this
    machine's kernel does not enforce.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config
        self._next_number = 0
        # Reason why the last attempt to start a process failed.
        self._start_failure = ""

        # Episodes without a process, in their order of arrival.
        self._waiting: list[_OpenEpisode] = []
        self._workers: list[_Worker] = []
        # Kill the processes when this object is garbage-collected, even if `close` was never called.
        self._finalizer = weakref.finalize(self, kill_processes, self._workers)

        try:
            unenforced_limits = [self._start_process() for _ in range(config.workers)]
        except BaseException:
            self.close()
            raise
        # The limits are the same for all processes of a machine.
        self.unenforced_limits: tuple[str, ...] = tuple(unenforced_limits[0])

    def _start_process(self) -> list[str]:
        """Start a process and load the environment's class in it.

        Returns descriptions of the limits that this machine's kernel does not enforce.
        """
        limits = {
            **asdict(self.config.limits),
            # An agent connects to its endpoint on the loopback interface.
            "loopback": True,
            # The process raises its soft limits of open files and processes for each episode that it starts,
            # see `_EventLoops`. These are the largest total increases, which its hard limits must permit.
            "own_files": RESERVED_PER_EPISODE * EPISODES_FOR_FILE_LIMIT,
            "own_processes": RESERVED_PER_EPISODE * EPISODES_FOR_PROCESS_LIMIT,
        }
        process = ContainedProcess("megatron_rl.environments.host:serve_episodes", limits, self.config.name)
        try:
            load_reply = process.load(self.config.name, dict(self.config.settings), self.config.max_turns)
            errors = _parse_load_errors(load_reply)
            # Under "missing" the process reports the limits that are not enforced.
            unenforced_limits = [str(description) for description in read_list(load_reply, "missing")]
        except LoadFailed as error:
            process.kill()
            raise error.as_error(
                f"the environment {self.config.name}",
                f"{CONFIG_KEY}.name",
                "module:Class or path/to/file.py:Class that can be imported",
            ) from None

        if errors:
            process.kill()
            raise UserErrors(errors)
        self._workers.append(_Worker(process))
        return unenforced_limits

    def reserve_numbers(self, count: int) -> int:
        """Reserve ``count`` consecutive new episode numbers and return the first number."""
        first_number = self._next_number
        self._next_number += count
        return first_number

    def start_episode(self, number: int, values: Mapping[str, Any]) -> None:
        """Queue episode ``number`` for a process; ``values`` are the arguments of its `Episode`."""
        self._waiting.append(_OpenEpisode(number, dict(values)))

    def send_turn(self, number: int, text: str, *attributes: Any) -> None:
        """Send the requested turn of the policy to the environment of episode ``number``.

        ``text`` and ``attributes`` are the arguments of `Message`.
        """
        self._send(number, TURN, text, *attributes)

    def reject_turn(self, number: int) -> None:
        """Reject the requested turn of episode ``number``, whose sequence has reached a length limit."""
        self._send(number, END)

    def cancel_episode(self, number: int) -> None:
        """Cancel episode ``number``, which may be running or waiting for a process."""
        self._waiting = [episode for episode in self._waiting if episode.number != number]
        for worker in self._workers:
            if worker.episodes.pop(number, None) is not None:
                worker.process.send_request((CANCEL, number))
                worker.closing_deadlines[number] = time.monotonic() + GRACE_SECONDS

    def _send(self, number: int, kind: str, *values: Any) -> None:
        """Send a request, such as `TURN`, to the process of an episode, and start its ``turn_timeout``."""
        for worker in self._workers:
            if number in worker.episodes:
                worker.process.send_request((kind, number, *values))
                worker.episodes[number].busy_since = time.monotonic()

    def poll_events(self, seconds: float) -> list[Event]:
        """Return the events of all environments; wait at most ``seconds`` for the first event."""
        events: list[Event] = []

        # If episodes wait, try again to replace lost processes.
        while self._waiting and len(self._workers) < self.config.workers:
            num_workers = len(self._workers)
            self._restart_process()
            if len(self._workers) == num_workers:
                break
        if not self._workers:
            self._fail_waiting_episodes(events)
            return events
        self._assign_episodes()

        # Wait for messages, at most until the next deadline.
        now = time.monotonic()
        remaining_seconds = [seconds]
        for worker in self._workers:
            remaining_seconds += [deadline - now for deadline in self._list_deadlines(worker)]
        wait_seconds = max(0.0, min(remaining_seconds))
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.process.reply_fd, selectors.EVENT_READ, worker)
            readable_workers = [key.data for key, _ in selector.select(wait_seconds)]

        for worker in readable_workers:
            self._receive_messages(worker, events)
        # Check the deadlines of the other processes: a process that has sent a message is responsive.
        for worker in list(self._workers):
            if worker not in readable_workers:
                self._check_deadlines(worker, events)
        return events

    def _assign_episodes(self) -> None:
        """Start each waiting episode in the process with the fewest episodes.

        An episode with ``runs_alone`` waits for a process without episodes, and does not share it. Meanwhile
        the episodes behind it are started.
        """
        for episode in list(self._waiting):
            shareable_workers: list[_Worker] = []
            for candidate in self._workers:
                if not any(running.runs_alone for running in candidate.episodes.values()):
                    shareable_workers.append(candidate)
            worker = min(shareable_workers, key=lambda worker: len(worker.episodes), default=None)
            if worker is None or (episode.runs_alone and worker.episodes):
                continue

            self._waiting.remove(episode)
            worker.episodes[episode.number] = episode
            worker.process.send_request((START, episode.number, episode.values))
            episode.busy_since = time.monotonic()

    def _list_deadlines(self, worker: _Worker) -> list[float]:
        """Return the deadlines of a process, as times of the monotonic clock."""
        # After a ping, only the deadline of its response counts: a process that does not respond is replaced.
        if worker.ping_time is not None:
            return [worker.ping_time + GRACE_SECONDS]

        # Cancelled episodes must release their threads, and environments must respond to a turn.
        deadlines = list(worker.closing_deadlines.values())
        for episode in worker.episodes.values():
            if episode.busy_since is not None:
                deadlines.append(episode.busy_since + self.config.turn_timeout)
        return deadlines

    def _receive_messages(self, worker: _Worker, events: list[Event]) -> None:
        """Read the messages of a process and append their events to ``events``.

        Replace the process if it has ended or sent a malformed message.
        """
        frames, is_open = worker.process.read_replies()
        for frame in frames:
            number = frame.get("episode")
            kind = frame.get("kind")
            if kind == CLOSED and isinstance(number, int):
                worker.closing_deadlines.pop(number, None)
                continue
            if kind == ALIVE and worker.ping_time is not None:
                self._fail_late_episodes(worker, events)
                continue
            # Ignore a message that the episode sent before it was cancelled. The number can be any JSON
            # value, such as an unhashable list, since the environment may have written the frame itself.
            if isinstance(number, int) and number in worker.closing_deadlines:
                continue

            event = _parse_event(frame, worker.episodes)
            if event is None:
                worker.process.protocol_error = f"its process sent a malformed message: {frame!r:.200}"
                break
            if isinstance(event, TurnRequest):
                worker.episodes[event.number].busy_since = None
            else:
                # An episode's thread in the process ends only when the episode is cancelled.
                worker.process.send_request((CANCEL, event.number))
                del worker.episodes[event.number]
            events.append(event)

        if not is_open or worker.process.protocol_error is not None:
            self._handle_lost_process(worker, events, CRASHED)

    def _check_deadlines(self, worker: _Worker, events: list[Event]) -> None:
        """Ping a process in which an episode has exceeded ``turn_timeout``.

        The ping distinguishes a slow environment from a process that an environment blocks. A process that
        does not respond is replaced, and the events of its episodes are appended to ``events``.
        """
        now = time.monotonic()
        if worker.ping_time is not None:
            if now >= worker.ping_time + GRACE_SECONDS:
                self._handle_lost_process(worker, events, TIMEOUT)
        elif self._find_late_episodes(worker):
            worker.ping_time = now
            worker.process.send_request((PING, -1))
        elif any(now >= deadline for deadline in worker.closing_deadlines.values()):
            self._replace_process(worker, events)

    def _find_late_episodes(self, worker: _Worker) -> list[_OpenEpisode]:
        """Return the episodes of a process whose environments have exceeded ``turn_timeout``."""
        latest_start = time.monotonic() - self.config.turn_timeout
        return [
            episode
            for episode in worker.episodes.values()
            if episode.busy_since is not None and episode.busy_since <= latest_start
        ]

    def _fail_late_episodes(self, worker: _Worker, events: list[Event]) -> None:
        """Fail the episodes that exceeded ``turn_timeout``, after the process has responded to a ping.

        The ends of the episodes are appended to ``events``.
        """
        worker.ping_time = None
        for episode in self._find_late_episodes(worker):
            self.cancel_episode(episode.number)
            events.append(EpisodeEnd(episode.number, failure=TIMEOUT, message=self._make_timeout_message()))

    def _make_timeout_message(self) -> str:
        """Make the failure message of an episode whose environment exceeded ``turn_timeout``."""
        seconds = f"{self.config.turn_timeout:g} s"
        return f"did not answer a turn within {seconds} (rollout.environment.turn_timeout)"

    def _handle_lost_process(self, worker: _Worker, events: list[Event], reason: str) -> None:
        """Replace a process that has ended or hangs. The episode that is to blame fails with ``reason``.

        If only one episode is busy, or if an episode has ``runs_alone``, this episode is to blame. If several
        episodes are busy, it is unknown which of them is to blame. Then each of them is restarted with
        ``runs_alone``, in a process without other episodes.
        """
        busy_episodes = [episode for episode in worker.episodes.values() if episode.busy_since is not None]
        status = self._replace_process(worker, events)

        message = f"its process ended with status {status}"
        limit_message = describe_exceeded_limit(status, asdict(self.config.limits), f"{CONFIG_KEY}.limits")
        if reason == TIMEOUT:
            message = self._make_timeout_message()
        elif worker.process.protocol_error:
            message = worker.process.protocol_error
        elif limit_message:
            message = limit_message

        for episode in busy_episodes:
            if episode.runs_alone or len(busy_episodes) == 1:
                # Undo the restart by `_replace_process`.
                self._waiting.remove(episode)
                events.remove(EpisodeRestart(episode.number))
                events.append(EpisodeEnd(episode.number, failure=reason, message=message))
            episode.runs_alone = True

    def _replace_process(self, worker: _Worker, events: list[Event]) -> int:
        """Kill a process, start a new process and restart the episodes.

        Returns the exit status of the killed process.
        """
        status = worker.process.kill()
        self._workers.remove(worker)
        self._restart_process()

        # Restart all episodes, also those that await a turn, since their environments are lost.
        for episode in worker.episodes.values():
            episode.busy_since = None
            self._waiting.append(episode)
            events.append(EpisodeRestart(episode.number))
        return status

    def _restart_process(self) -> None:
        """Start a process in place of a lost process; give up after several failed attempts.

        The class was loaded successfully before, so a failed attempt may have a temporary reason, such as too
        little memory, and is repeated.
        """
        start_time = time.monotonic()
        # After the last attempt there is no wait (None).
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

    def _fail_waiting_episodes(self, events: list[Event]) -> None:
        """Fail all waiting episodes, because no process could be started; append their ends to ``events``."""
        message = f"no process of {self.config.name} could be started again: {self._start_failure}"
        for episode in self._waiting:
            events.append(EpisodeEnd(episode.number, failure=CRASHED, message=message))
        self._waiting.clear()

    def close(self) -> None:
        """Kill the processes of the pool with all their episodes."""
        self._finalizer()


def environment_errors(config: EnvironmentConfig) -> list[UserError]:
    """Load the configured environment class in a sandboxed process, as a run does; return the errors."""
    try:
        EnvironmentPool(replace(config, workers=1)).close()
    except UserError as error:
        return list(single_errors(error))
    return []


def _parse_load_errors(reply: Mapping[str, Any]) -> list[UserError]:
    """Parse the errors in the first reply of a process; raises LoadFailed for a malformed reply."""
    errors: list[UserError] = []
    for values in read_list(reply, "errors"):
        if not isinstance(values, dict) or not isinstance(values.get("message"), str):
            raise malformed_reply_error(reply)

        texts: dict[str, str] = {}
        for error_field in fields(UserError):
            value = values.get(error_field.name)
            if value is not None:
                texts[error_field.name] = escape_unprintable(str(value))
        errors.append(UserError(**texts))
    return errors


def _parse_event(
    frame: Mapping[str, Any], episodes: Mapping[int, _OpenEpisode]
) -> TurnRequest | EpisodeEnd | None:
    """Parse a message of a process; return its event, or None if it is malformed or out of order."""
    number = frame.get("episode")
    if not isinstance(number, int) or number not in episodes:
        return None

    # An environment must not request a turn while it awaits one.
    if frame.get("kind") == TURN_REQUESTED and episodes[number].busy_since is not None:
        return _parse_turn_request(number, frame)
    if frame.get("kind") == ENDED:
        return _parse_episode_end(number, frame)
    return None


def _parse_turn_request(number: int, frame: Mapping[str, Any]) -> TurnRequest | EpisodeEnd | None:
    """Parse an environment's request for a turn; return None for a malformed request.

    A request whose text is not valid Unicode ends the episode with a failure.
    """
    if INVALID_TEXT in frame:
        return EpisodeEnd(number, failure=WRONG_TYPE, message=f"the environment {INVALID_TEXT_MESSAGE}")

    # Messages and opening must be valid, since they become part of the policy's sequence.
    messages = frame.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        return None

    opening = None
    opening_values = frame.get("opening")
    if opening_values is not None:
        if not _is_opening(opening_values):
            return None
        opening = Opening(opening_values["messages"], opening_values["tools"])

    # An invalid limit is no limit: the policy's own limits still apply.
    limit = frame.get("limit")
    if not isinstance(limit, int) or limit <= 0:
        limit = None
    return TurnRequest(number, messages, limit, opening)


def _parse_episode_end(number: int, frame: Mapping[str, Any]) -> EpisodeEnd | None:
    """Parse the message about the end of an episode; return None for a malformed message."""
    truncated = frame.get("truncated") is True
    # The environment has returned no reward. Either the episode was truncated, or `reward.function` or
    # `reward.models` will compute its reward.
    if frame.get("result") == SCORED and frame.get("reward") is None:
        return EpisodeEnd(number, truncated=truncated)

    # `read_answer` reads the kind of a result (a reward or a failure) under "kind". In this message, "kind"
    # is `ENDED`, and the kind of the result is under "result".
    answer = read_answer({**frame, "kind": frame.get("result")})
    if answer is None:
        return None
    reward = answer.reward
    if answer.reason:
        reward = None
    return EpisodeEnd(number, reward, answer.components, truncated, answer.reason, answer.message)


def _is_opening(value: Any) -> bool:
    """Return whether a value has the form of an `Opening`."""
    if not isinstance(value, dict) or set(value) != {"messages", "tools"}:
        return False
    messages = value["messages"]
    tools = value["tools"]
    if tools is None:
        tools = []
    if not isinstance(messages, list) or not isinstance(tools, list):
        return False
    return all(isinstance(item, dict) for item in [*messages, *tools])


def _is_message(value: Any) -> bool:
    """Return whether a value has the form of a message that an environment may send."""
    if not isinstance(value, dict) or not {"role", "content"} <= set(value) <= KEYS:
        return False
    for text in value.values():
        if not isinstance(text, str) or len(text) > LARGEST_OBSERVATION:
            return False
    return value["role"] in ROLES


# In the sandboxed process


def serve_episodes(requests: Requests, limits: Mapping[str, Any], unenforced_limits: list[str]) -> None:
    """Load the environment's class, then run the episodes that the trainer requests.

    This is the main function of the sandboxed process. ``requests`` is the connection to the trainer, and
    ``limits`` are the limits of the process. ``unenforced_limits`` describes the limits that this machine's
    kernel does not enforce; the descriptions are sent to the trainer.
    """
    search_path, class_path, settings, max_turns = requests.read()
    set_module_sources(search_path)
    threading.stack_size(_THREAD_STACK)
    try:
        make_environment = make_environment_factory(class_path, settings)
    except UserError as error:
        requests.reply({"kind": READY, "errors": [detail.to_json() for detail in single_errors(error)]})
        return
    except BaseException as error:
        requests.refuse(error)
        return
    requests.reply({"kind": READY, "missing": unenforced_limits})

    environment_class: Any = make_environment.func
    descriptors_per_episode = LOOP_DESCRIPTORS + environment_class.own_files
    loops = _EventLoops(limits["files"], descriptors_per_episode, environment_class.own_processes)

    # Lock replies, since each episode replies from its own thread.
    reply_lock = threading.Lock()

    def reply(frame: Mapping[str, Any]) -> None:
        with reply_lock:
            requests.reply(frame)

    episodes: dict[int, _RunningEpisode] = {}
    while True:
        try:
            kind, number, *values = requests.read()
        except EOFError:
            return
        if kind == PING:
            reply({"kind": ALIVE})
        elif kind == START:
            episodes[number] = _RunningEpisode(number, make_environment, max_turns, loops, reply, *values)
        elif kind == CANCEL:
            episodes.pop(number).cancel()
        elif kind == TURN:
            episodes[number].deliver_turn(Message(*values))
        else:
            episodes[number].deliver_turn(Truncated("no room is left"))


def make_environment_factory(class_path: str, settings: Mapping[str, Any]) -> partial[Environment]:
    """Return a function that constructs an environment of the class at ``class_path`` from ``settings``.

    Raises UserError for an invalid class or invalid settings.
    """
    environment_class = _load_environment_class(class_path)

    values = dict(settings)
    if is_dataclass(environment_class):
        parsed_settings = parse_settings(environment_class, settings, CONFIG_KEY)
        errors = value_errors(parsed_settings, CONFIG_KEY)
        if errors:
            raise UserErrors(errors)
        # Pass only the explicit settings, so that the class itself determines its defaults.
        values = {name: getattr(parsed_settings, name) for name in settings}

    # Construct one environment now, so that invalid settings are an error before the first episode.
    try:
        environment_class(**values)
    except TypeError as error:
        raise UserError(
            f"{class_path} cannot be constructed from its settings",
            where=CONFIG_KEY,
            expected=f"settings for {environment_class.__name__}{inspect.signature(environment_class)}",
            got=str(error),
            fix="correct the settings or the class",
        ) from None
    return partial(environment_class, **values)


def _load_environment_class(class_path: str) -> type[Environment]:
    """Load the class at ``class_path``; raises UserError unless it is a valid environment class."""
    loaded_class = load_callable(class_path)
    if not (isinstance(loaded_class, type) and issubclass(loaded_class, Environment)):
        raise UserError(
            f"{class_path} is not an environment",
            where=f"{CONFIG_KEY}.name",
            expected="a class derived from megatron_rl.Environment or megatron_rl.StepEnvironment",
            got=f"{type(loaded_class).__name__} {getattr(loaded_class, '__name__', '')}".strip(),
            fix="derive the class from one of them",
        )

    # `run` must be a coroutine function, since it can only get a turn with `await`.
    if not inspect.iscoroutinefunction(loaded_class.run):
        raise UserError(
            f"{class_path}.run is not async",
            where=f"{CONFIG_KEY}.name",
            expected="async def run(self, episode)",
            got="def run",
            fix="write async def, and await episode.generate()",
        )

    for name in ("own_files", "own_processes"):
        count = getattr(loaded_class, name)
        if not (isinstance(count, int) and 0 <= count <= MAX_OWN_PER_EPISODE):
            raise UserError(
                f"{class_path}.{name} is not a valid count",
                where=f"{CONFIG_KEY}.name",
                expected=f"{name}: ClassVar[int], 0 to {MAX_OWN_PER_EPISODE}",
                got=f"{count!r:.80}",
                fix="correct the class",
            )
    return loaded_class


class _EventLoops:
    """Factory of the episodes' event loops. It adapts the limits of the process to the number of open loops.

    ``base_descriptors`` is the limit of open file descriptors while no loop is open. Each open loop adds
    ``descriptors_per_loop`` to the limit of file descriptors, and ``processes_per_loop`` to the limit of
    processes.
    """

    def __init__(self, base_descriptors: int, descriptors_per_loop: int, processes_per_loop: int) -> None:
        self._base_descriptors = base_descriptors
        self._descriptors_per_loop = descriptors_per_loop
        self._processes_per_loop = processes_per_loop
        self._num_open = 0
        self._lock = threading.Lock()

    def open_loop(self) -> asyncio.AbstractEventLoop:
        """Raise the limits for one more episode, and return a new event loop for it."""
        self._change_limits(1)
        return asyncio.new_event_loop()

    def close_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the event loop of an episode, then lower the limits again."""
        loop.close()
        self._change_limits(-1)

    def _change_limits(self, loop_change: int) -> None:
        """Set the limits of open files and processes for a new number of event loops.

        ``loop_change`` is 1 for an opened loop and -1 for a closed loop.
        """
        with self._lock:
            self._num_open += loop_change
            allow_files(self._base_descriptors + self._num_open * self._descriptors_per_loop)
            allow_processes(self._num_open * self._processes_per_loop)


class _RunningEpisode:
    """Episode that runs in this process, with a separate thread and event loop.

    The environment runs in the thread of the loop. `deliver_turn` and `cancel` are called in the main thread.
    ``values`` are the arguments of the environment's `Episode`, and ``reply`` sends a message to the trainer.
    """

    def __init__(
        self,
        number: int,
        make_environment: Callable[[], Environment],
        max_turns: int,
        loops: _EventLoops,
        reply: Callable[[Mapping[str, Any]], None],
        values: Mapping[str, Any],
    ) -> None:
        self._number = number
        self._make_environment = make_environment
        self._turns_left = max_turns
        self._reply = reply
        self._episode = Episode(**values, turns=self._request_turn)

        self._loops = loops
        self._loop = loops.open_loop()
        self._task: asyncio.Task | None = None
        # The last requested turn, which may be pending, received or cancelled. None before the first request.
        self._awaited_turn: asyncio.Future | None = None
        self._started = threading.Event()
        threading.Thread(target=self._run_thread, daemon=True).start()

    def deliver_turn(self, turn: Message | Truncated) -> None:
        """Deliver the requested turn to the environment; if ``turn`` is Truncated, raise it there."""

        def set_turn() -> None:
            awaited_turn = self._awaited_turn
            if awaited_turn is None or awaited_turn.done():
                return
            if isinstance(turn, Truncated):
                awaited_turn.set_exception(turn)
            else:
                awaited_turn.set_result(turn)

        self._call_on_loop(set_turn)

    def cancel(self) -> None:
        """Cancel the environment at its next await; its thread then sends `CLOSED`."""
        self._started.wait()
        task = self._task
        assert task is not None
        self._call_on_loop(task.cancel)

    def _call_on_loop(self, function: Callable[[], Any]) -> None:
        """Call a function in the thread of the episode's event loop, unless the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    async def _request_turn(
        self,
        observed: list[dict[str, str]],
        limit: int | None,
        opening: Opening | None,
    ) -> Message:
        """Request the policy's next turn from the trainer, and wait for it; see `TurnSource`.

        ``observed`` are the environment's messages since the last turn, ``limit`` is the maximum number of
        tokens of the turn, and ``opening`` replaces the record's prompt before the first turn.
        """
        self._require_turn_allowed(observed, limit)
        if self._turns_left == 0:
            raise Truncated("the episode has used all its turns")
        self._turns_left -= 1

        frame: dict[str, Any] = {"kind": TURN_REQUESTED, "messages": observed, "limit": limit}
        is_first_turn = self._awaited_turn is None
        if is_first_turn and opening is not None:
            frame["opening"] = opening._asdict()
        # Create the future before the request is sent, since the turn arrives in another thread.
        self._awaited_turn = self._loop.create_future()
        self._send(frame)
        return await self._awaited_turn

    def _require_turn_allowed(self, observed: list[dict[str, str]], limit: int | None) -> None:
        """Raise WrongUse unless the environment may request a turn now."""
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise WrongUse(f"expected a limit of one token or more, got {limit!r:.40}")
        if self._awaited_turn is None:
            if observed:
                raise WrongUse("a message was sent before the policy's first turn: the prompt comes first")
            return

        if not self._awaited_turn.done():
            raise WrongUse("generate() was called while another turn of the episode is awaited")
        if self._awaited_turn.cancelled():
            raise WrongUse("generate() was called after a turn that was cancelled")
        if not observed:
            raise WrongUse("generate() was called twice with nothing observed in between")

    def _send(self, frame: Mapping[str, Any]) -> None:
        """Send a message of this episode to the trainer."""
        self._reply({"episode": self._number, **frame})

    def _run_thread(self) -> None:
        """Run the episode on its event loop, then report that it is closed. Main function of the thread."""
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run_episode())
        finally:
            self._send({"kind": CLOSED})
            self._loops.close_loop(self._loop)

    async def _run_episode(self) -> None:
        """Run the environment and send its reward or failure to the trainer, unless it is cancelled."""
        self._task = asyncio.current_task()
        self._started.set()
        try:
            reward = await self._compute_reward()
            result_frame = {"kind": SCORED, "reward": None, "components": {}}
            if reward is not None:
                result_frame = reward_frame(reward)
        except asyncio.CancelledError:
            return
        except WrongUse as error:
            result_frame = failure_frame(WRONG_TYPE, str(error))
        except BaseException as error:
            # Also catch SystemExit: an environment that calls sys.exit must not end the other episodes.
            result_frame = failure_frame(EXCEPTION, format_error(error))

        # "kind" is the kind of the message, so move the kind of the result to the key "result".
        result_frame["result"] = result_frame.pop("kind")
        self._send({"kind": ENDED, "truncated": self._episode.truncated, **result_frame})

    async def _compute_reward(self) -> Any:
        """Run the environment; return its reward, or None for a truncated episode."""
        try:
            return await self._make_environment().run(self._episode)
        except Truncated:
            return None
