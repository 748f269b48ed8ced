"""The process in which environments run, and the messages between it and the trainer.

Each episode has a thread with an event loop of its own. So an environment may block, in async code or not,
without delaying another one.
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

# Requests of the trainer, each followed by the number of an episode: start it, send it a turn of the policy,
# refuse it a further turn, cancel it; and a check that the process responds, for no episode.
START = "start"
TURN = "turn"
END = "end"
CANCEL = "cancel"
PING = "ping"

# Replies: an episode asks for a turn, has ended, has released its thread; and the response to a ping.
ASKS = "asks"
ENDED = "ended"
CLOSED = "closed"
LIVES = "lives"

WHERE = "rollout.environment"
"""Key of the configuration that errors of this room name."""

LOOP_FILES = 3
"""Files that an episode's event loop has open, in addition to its environment's."""

MOST_OWN = 32
"""Own files, and own processes, of one episode that the fixed limits of a process already include."""

LARGEST_OWN = 4096
"""Most own files, or processes, that an environment's class may claim."""

_THREAD_STACK = 2**20
"""Bytes of an episode's stack, instead of the usual 8 MiB: a process may have thousands of episodes."""


def serve(requests: Requests, limits: Mapping[str, Any], unenforced: list[str]) -> None:
    """Load the environment's class, report it, and run every episode that the trainer starts.

    ``unenforced`` are the limits that this machine's kernel does not enforce; the trainer reports them.
    """
    paths, class_path, settings, max_turns = requests.read()
    set_module_sources(paths)
    threading.stack_size(_THREAD_STACK)
    try:
        make_environment = factory(class_path, settings)
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

    # Episodes reply from their threads.
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
            reply({"kind": LIVES})
        elif kind == START:
            running[number] = _RunningEpisode(number, make_environment, max_turns, loops, reply, *values)
        elif kind == CANCEL:
            running.pop(number).cancel()
        elif kind == TURN:
            running[number].answer(Message(*values))
        else:
            running[number].answer(Truncated("no room is left"))


def factory(class_path: str, settings: Mapping[str, Any]) -> partial[Environment]:
    """Return a function that makes an environment of a class with ``settings``; raises UserError."""
    cls = _environment_class(class_path)

    values = dict(settings)
    if is_dataclass(cls):
        parsed = parse_settings(cls, settings, WHERE)
        if errors := value_errors(parsed, WHERE):
            raise UserErrors(errors)
        # Only the given settings: the class fills in its own defaults for each object.
        values = {name: getattr(parsed, name) for name in settings}

    # Construct one now, so that wrong settings are an error before the first episode.
    try:
        cls(**values)
    except TypeError as error:
        raise UserError(
            f"{class_path} cannot be made of its settings",
            where=WHERE,
            expected=f"settings for {cls.__name__}{inspect.signature(cls)}",
            got=str(error),
            fix="correct the settings or the class",
        ) from None
    return partial(cls, **values)


def _environment_class(class_path: str) -> type[Environment]:
    """Load a class of environments; raises UserError for anything else."""
    cls = load_callable(class_path)
    if not (isinstance(cls, type) and issubclass(cls, Environment)):
        raise UserError(
            f"{class_path} is no environment",
            where=f"{WHERE}.name",
            expected="a class derived from megatron_rl.Environment or megatron_rl.StepEnvironment",
            got=f"{type(cls).__name__} {getattr(cls, '__name__', '')}".strip(),
            fix="derive the class from one of them",
        )

    # A plain function would block its thread, and `generate` can only be awaited.
    if not inspect.iscoroutinefunction(cls.run):
        raise UserError(
            f"{class_path}.run is not async",
            where=f"{WHERE}.name",
            expected="async def run(self, episode)",
            got="def run",
            fix="write async def, and await episode.generate()",
        )

    for name in ("own_files", "own_processes"):
        count = getattr(cls, name)
        if not (isinstance(count, int) and 0 <= count <= LARGEST_OWN):
            raise UserError(
                f"{class_path}.{name} is not a valid count",
                where=f"{WHERE}.name",
                expected=f"{name}: ClassVar[int], 0 to {LARGEST_OWN}",
                got=f"{count!r:.80}",
                fix="correct the class",
            )
    return cls


class _EventLoops:
    """Event loops of all episodes, with the limits that follow from their number.

    Each episode adds its ``own_files`` and ``own_processes`` to the limits; ``files`` is the limit of open
    files without episodes.
    """

    def __init__(self, files: int, own_files: int, own_processes: int) -> None:
        self._files = files
        self._own_files = own_files
        self._own_processes = own_processes
        self._num_open = 0
        self._lock = threading.Lock()

    def open(self) -> asyncio.AbstractEventLoop:
        """Return a new loop, after its limits are raised."""
        self._change_limits(1)
        return asyncio.new_event_loop()

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close a loop, then lower the limits by its share."""
        loop.close()
        self._change_limits(-1)

    def _change_limits(self, num_loops: int) -> None:
        with self._lock:
            self._num_open += num_loops
            allow_files(self._files + self._num_open * self._own_files)
            allow_processes(self._num_open * self._own_processes)


class _RunningEpisode:
    """One episode: its thread, its event loop, and the turn that it awaits.

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
        # The turn that was requested last: pending, received, or cancelled. None before the first.
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
        """Cancel the environment at its next await; its thread replies that it is closed."""
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
        """Send the observed messages to the trainer and return the turn that follows; see `TurnSource`."""
        self._require_order(observed, limit)
        if self._turns_left == 0:
            raise Truncated("the episode has used all its turns")
        self._turns_left -= 1

        frame: dict[str, Any] = {"kind": ASKS, "messages": observed, "limit": limit}
        if self._awaited is None and opening is not None:
            frame["opening"] = opening._asdict()
        # Made before the request is sent, since the turn arrives on another thread.
        self._awaited = self._loop.create_future()
        self._send(frame)
        return await self._awaited

    def _require_order(self, observed: list[dict[str, str]], limit: int | None) -> None:
        """Raise WrongUse unless the environment may ask for a turn now."""
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
        """Run the environment and send the trainer its reward or failure; a cancelled one sends nothing."""
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
            # BaseException: an environment that calls sys.exit must not end the process of the others.
            answer = failure_frame(EXCEPTION, format_error(error))

        # "kind" is the frame's own key in this protocol.
        answer["result"] = answer.pop("kind")
        self._send({"kind": ENDED, "truncated": self._episode.truncated, **answer})

    async def _reward(self) -> Any:
        """Run the environment; return its reward, None for a truncated episode."""
        try:
            return await self._make_environment().run(self._episode)
        except Truncated:
            return None
