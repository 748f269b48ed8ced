"""Process in which environments run, and the messages between it and the trainer.

Each episode has a separate thread and event loop. So an environment may block, in async code or not, without
delaying another environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any

from megatron_rl.config.parse import parse_settings
from megatron_rl.config.setting import value_errors
from megatron_rl.contained.confinement import allow_files, allow_processes
from megatron_rl.contained.process import READY, Requests, format_error, load_callable, set_module_sources
from megatron_rl.environments.environment import Environment, Episode, Message, Opening, Truncated, WrongUse
from megatron_rl.errors import UserError, UserErrors, single_errors
from megatron_rl.rewards.worker import EXCEPTION, SCORED, WRONG_TYPE, failure_frame, reward_frame

# Requests of the trainer, each followed by the number of an episode: start it, send a turn of the policy,
# reject its request for a turn, cancel it. A ping checks that the process responds; it has no episode.
START = "start"
TURN = "turn"
END = "end"
CANCEL = "cancel"
PING = "ping"

# Replies: an episode requests a turn, has ended, has released its thread; and the response to a ping.
TURN_REQUESTED = "turn requested"
ENDED = "ended"
CLOSED = "closed"
ALIVE = "alive"

CONFIG_KEY = "rollout.environment"
"""Configuration key of environments, for errors."""

LOOP_FILES = 3
"""Open files of an episode's event loop, in addition to those of its environment."""

MAX_OWN_PER_EPISODE = 32
"""Number of files, and of processes, per episode that the hard limits of a process allow for."""

LARGEST_OWN = 4096
"""Largest valid ``own_files`` and ``own_processes`` of an environment's class."""

_THREAD_STACK = 2**20
"""Stack of an episode's thread in bytes; the usual 8 MiB are too many for thousands of episodes."""


def serve(requests: Requests, limits: Mapping[str, Any], unenforced: list[str]) -> None:
    """Load the environment's class, report that it is ready, and run every episode that the trainer starts.

    ``unenforced`` are descriptions of limits that this machine's kernel does not enforce, for the trainer.
    """
    paths, class_path, settings, max_turns = requests.read()
    set_module_sources(paths)
    threading.stack_size(_THREAD_STACK)
    try:
        make_environment = make_factory(class_path, settings)
    except UserError as error:
        requests.reply({"kind": READY, "errors": [detail.to_json() for detail in single_errors(error)]})
        return
    except BaseException as error:
        requests.refuse(error)
        return
    requests.reply({"kind": READY, "missing": unenforced})

    environment_class: Any = make_environment.func
    own_files = LOOP_FILES + environment_class.own_files
    loops = _EventLoops(limits["files"], own_files, environment_class.own_processes)

    # Episodes reply from their threads, so the replies need a lock.
    reply_lock = threading.Lock()

    def reply(frame: Mapping[str, Any]) -> None:
        with reply_lock:
            requests.reply(frame)

    running: dict[int, _RunningEpisode] = {}
    while True:
        try:
            kind, number, *values = requests.read()
        except EOFError:
            return
        if kind == PING:
            reply({"kind": ALIVE})
        elif kind == START:
            running[number] = _RunningEpisode(number, make_environment, max_turns, loops, reply, *values)
        elif kind == CANCEL:
            running.pop(number).cancel()
        elif kind == TURN:
            running[number].answer(Message(*values))
        else:
            running[number].answer(Truncated("no room is left"))


def make_factory(class_path: str, settings: Mapping[str, Any]) -> partial[Environment]:
    """Return a function that constructs an environment of a class from ``settings``.

    Raises UserError for a wrong class or wrong settings.
    """
    cls = _environment_class(class_path)

    values = dict(settings)
    if is_dataclass(cls):
        parsed = parse_settings(cls, settings, CONFIG_KEY)
        if errors := value_errors(parsed, CONFIG_KEY):
            raise UserErrors(errors)
        # Pass only the explicit settings, so that each object gets the defaults of its class.
        values = {name: getattr(parsed, name) for name in settings}

    # Construct one environment now, so that wrong settings are an error before the first episode.
    try:
        cls(**values)
    except TypeError as error:
        raise UserError(
            f"{class_path} cannot be constructed from its settings",
            where=CONFIG_KEY,
            expected=f"settings for {cls.__name__}{inspect.signature(cls)}",
            got=str(error),
            fix="correct the settings or the class",
        ) from None
    return partial(cls, **values)


def _environment_class(class_path: str) -> type[Environment]:
    """Load a class of environments; raises UserError for any other object and for an invalid class."""
    cls = load_callable(class_path)
    if not (isinstance(cls, type) and issubclass(cls, Environment)):
        raise UserError(
            f"{class_path} is not an environment",
            where=f"{CONFIG_KEY}.name",
            expected="a class derived from megatron_rl.Environment or megatron_rl.StepEnvironment",
            got=f"{type(cls).__name__} {getattr(cls, '__name__', '')}".strip(),
            fix="derive the class from one of them",
        )

    # A plain function would block its thread, and `generate` can only be awaited.
    if not inspect.iscoroutinefunction(cls.run):
        raise UserError(
            f"{class_path}.run is not async",
            where=f"{CONFIG_KEY}.name",
            expected="async def run(self, episode)",
            got="def run",
            fix="write async def, and await episode.generate()",
        )

    for name in ("own_files", "own_processes"):
        count = getattr(cls, name)
        if not (isinstance(count, int) and 0 <= count <= LARGEST_OWN):
            raise UserError(
                f"{class_path}.{name} is not a valid count",
                where=f"{CONFIG_KEY}.name",
                expected=f"{name}: ClassVar[int], 0 to {LARGEST_OWN}",
                got=f"{count!r:.80}",
                fix="correct the class",
            )
    return cls


class _EventLoops:
    """Factory of the episodes' event loops, which adapts the process's limits to their number.

    ``files``: limit of open files without episodes.
    ``own_files``, ``own_processes``: numbers that each episode adds to the limits.
    """

    def __init__(self, files: int, own_files: int, own_processes: int) -> None:
        self._files = files
        self._own_files = own_files
        self._own_processes = own_processes
        self._num_open = 0
        self._lock = threading.Lock()

    def open(self) -> asyncio.AbstractEventLoop:
        """Raise the limits for one more episode, and return its new event loop."""
        self._change_limits(1)
        return asyncio.new_event_loop()

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the event loop of an episode, then lower the limits by its share."""
        loop.close()
        self._change_limits(-1)

    def _change_limits(self, num_loops: int) -> None:
        """Change the number of open loops by ``num_loops``, and set the limits for the new number."""
        with self._lock:
            self._num_open += num_loops
            allow_files(self._files + self._num_open * self._own_files)
            allow_processes(self._num_open * self._own_processes)


class _RunningEpisode:
    """Running episode: its thread, its event loop, and the turn that it awaits.

    The environment runs on the loop's thread. `answer` and `cancel` are called on the process's main thread.
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
        self._episode = Episode(**values, turns=self._turn)

        self._loops = loops
        self._loop = loops.open()
        self._task: asyncio.Task | None = None
        # Last requested turn: pending, received, or cancelled. None before the first request.
        self._awaited: asyncio.Future | None = None
        self._started = threading.Event()
        threading.Thread(target=self._run_thread, daemon=True).start()

    def answer(self, value: Message | Truncated) -> None:
        """Deliver the awaited turn to the environment, or raise Truncated there."""

        def deliver() -> None:
            awaited = self._awaited
            if awaited is None or awaited.done():
                return
            if isinstance(value, Truncated):
                awaited.set_exception(value)
            else:
                awaited.set_result(value)

        self._call(deliver)

    def cancel(self) -> None:
        """Cancel the environment at its next await; its thread then sends `CLOSED`."""
        self._started.wait()
        task = self._task
        assert task is not None
        self._call(task.cancel)

    def _call(self, function: Callable[[], Any]) -> None:
        """Call a function on the loop's thread; do nothing if the episode has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    async def _turn(
        self,
        observed: list[dict[str, str]],
        limit: int | None,
        opening: Opening | None,
    ) -> Message:
        """Send the observed messages to the trainer and return the policy's next turn; see `TurnSource`."""
        self._require_order(observed, limit)
        if self._turns_left == 0:
            raise Truncated("the episode has used all its turns")
        self._turns_left -= 1

        frame: dict[str, Any] = {"kind": TURN_REQUESTED, "messages": observed, "limit": limit}
        if self._awaited is None and opening is not None:
            frame["opening"] = opening._asdict()
        # Create the future before the request is sent, since the turn arrives on another thread.
        self._awaited = self._loop.create_future()
        self._send(frame)
        return await self._awaited

    def _require_order(self, observed: list[dict[str, str]], limit: int | None) -> None:
        """Raise WrongUse unless the environment may request a turn now."""
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise WrongUse(f"expected a limit of one token or more, got {limit!r:.40}")
        if self._awaited is None:
            if observed:
                raise WrongUse("a message was sent before the policy's first turn: the prompt comes first")
            return

        if not self._awaited.done():
            raise WrongUse("generate() was called while another turn of the episode is awaited")
        if self._awaited.cancelled():
            raise WrongUse("generate() was called after a turn that was cancelled")
        if not observed:
            raise WrongUse("generate() was called twice with nothing observed in between")

    def _send(self, frame: Mapping[str, Any]) -> None:
        """Send a message of this episode to the trainer."""
        self._reply({"episode": self._number, **frame})

    def _run_thread(self) -> None:
        """Run the episode on its event loop: the main function of its thread."""
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run())
        finally:
            self._send({"kind": CLOSED})
            self._loops.close(self._loop)

    async def _run(self) -> None:
        """Run the environment and send its reward or failure to the trainer; nothing if it is cancelled."""
        self._task = asyncio.current_task()
        self._started.set()
        try:
            reward = await self._reward()
            answer = {"kind": SCORED, "reward": None, "components": {}}
            if reward is not None:
                answer = reward_frame(reward)
        except asyncio.CancelledError:
            return
        except WrongUse as error:
            answer = failure_frame(WRONG_TYPE, str(error))
        except BaseException as error:
            # BaseException: an environment that calls sys.exit must not end the process of other episodes.
            answer = failure_frame(EXCEPTION, format_error(error))

        # In this protocol "kind" is the kind of the message, so the kind of the answer is under "result".
        answer["result"] = answer.pop("kind")
        self._send({"kind": ENDED, "truncated": self._episode.truncated, **answer})

    async def _reward(self) -> Any:
        """Run the environment; return its reward, or None for a truncated episode."""
        try:
            return await self._make_environment().run(self._episode)
        except Truncated:
            return None
