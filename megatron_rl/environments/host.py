"""The process in which environments run: each episode in a thread with an event loop of its own.

So an environment may wait, in async code or not, without keeping another one from its work.
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
from megatron_rl.contained.process import READY, Requests, load, search, told
from megatron_rl.environments.environment import Environment, Episode, Message, Opening, Truncated, WrongUse
from megatron_rl.errors import UserError, UserErrors, each
from megatron_rl.rewards.worker import EXCEPTION, SCORED, WRONG_TYPE, failed, scored

START, TURN, END, CANCEL, PING = "start", "turn", "end", "cancel", "ping"
ASKS, ENDED, CLOSED, LIVES = "asks", "ended", "closed", "lives"
WHERE = "rollout.environment"
LOOP_FILES = 3
"""Files that the event loop of an episode has open, beside those that its environment opens."""
MOST_OWN = 32
"""Files, or processes, of an episode's own that limits leave room for, times the most episodes."""
LARGEST_OWN = 4096
"""Files, or processes, of its own that an environment may say it has."""
_THREAD_STACK = 2**20


def serve(requests: Requests, limits: Mapping[str, Any], missing: list[str]) -> None:
    """Load the class, say so, and run an environment for every episode that the trainer starts."""
    place, spec, settings, max_turns = requests.read()
    search(place)
    threading.stack_size(_THREAD_STACK)
    try:
        make = factory(spec, settings)
    except UserError as error:
        requests.reply({"kind": READY, "errors": [one.to_json() for one in each(error)]})
        return
    except BaseException as error:
        requests.refuse(error)
        return
    requests.reply({"kind": READY, "missing": missing})
    running: dict[int, _Running] = {}
    environment: Any = make.func
    loops = _Loops(limits["files"], LOOP_FILES + environment.own_files, environment.own_processes)
    lock = threading.Lock()

    def reply(frame: Mapping[str, Any]) -> None:
        with lock:
            requests.reply(frame)

    while True:
        try:
            kind, number, *more = requests.read()
        except EOFError:
            return
        if kind == PING:
            reply({"kind": LIVES})
        elif kind == START:
            running[number] = _Running(number, make, max_turns, loops, reply, *more)
        elif kind == CANCEL:
            running.pop(number).cancel()
        else:
            running[number].answer(Message(*more) if kind == TURN else Truncated("no room is left"))


def factory(spec: str, settings: Mapping[str, Any]) -> partial[Environment]:
    """Return what makes an environment of the class ``spec`` with ``settings``; raises UserError."""
    cls = load(spec)
    if not (isinstance(cls, type) and issubclass(cls, Environment)):
        raise UserError(
            f"{spec} is no environment",
            where=f"{WHERE}.name",
            expected="a class derived from megatron_rl.Environment or megatron_rl.StepEnvironment",
            got=f"{type(cls).__name__} {getattr(cls, '__name__', '')}".strip(),
            fix="derive the class from one of them",
        )
    if not inspect.iscoroutinefunction(cls.run):
        raise UserError(
            f"{spec}.run is not async",
            where=f"{WHERE}.name",
            expected="async def run(self, episode)",
            got="def run",
            fix="write async def, and await episode.generate()",
        )
    for name in ("own_files", "own_processes"):
        count = getattr(cls, name)
        if not (isinstance(count, int) and 0 <= count <= LARGEST_OWN):
            raise UserError(
                f"{spec}.{name} is no number of what an episode has",
                where=f"{WHERE}.name",
                expected=f"{name}: ClassVar[int], 0 to {LARGEST_OWN}",
                got=f"{count!r:.80}",
                fix="correct the class",
            )
    values = dict(settings)
    if is_dataclass(cls):
        made = parse_settings(cls, settings, WHERE)
        if errors := value_errors(made, WHERE):
            raise UserErrors(errors)
        values = {name: getattr(made, name) for name in settings}
    try:
        cls(**values)
    except TypeError as error:
        raise UserError(
            f"{spec} cannot be made of its settings",
            where=WHERE,
            expected=f"settings for {cls.__name__}{inspect.signature(cls)}",
            got=str(error),
            fix="correct the settings or the class",
        ) from None
    return partial(cls, **values)


class _Loops:
    """The event loops of all episodes.

    The ``own_files`` and ``own_processes`` of each episode do not count among what limits allow, which is
    ``files`` of the first.
    """

    def __init__(self, files: int, own_files: int, own_processes: int) -> None:
        self._files, self._own_files, self._own_processes = files, own_files, own_processes
        self._open, self._lock = 0, threading.Lock()

    def open(self) -> asyncio.AbstractEventLoop:
        """Return a further loop."""
        self._allow(1)
        return asyncio.new_event_loop()

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close a loop."""
        loop.close()
        self._allow(-1)

    def _allow(self, loops: int) -> None:
        with self._lock:
            self._open += loops
            allow_files(self._files + self._open * self._own_files)
            allow_processes(self._open * self._own_processes)


class _Running:
    """One episode: its thread, and where its turns come from."""

    def __init__(
        self,
        number: int,
        make: Callable[[], Environment],
        max_turns: int,
        loops: _Loops,
        reply: Callable[[Mapping[str, Any]], None],
        values: Mapping[str, Any],
    ) -> None:
        self._number, self._make, self._left, self._reply = number, make, max_turns, reply
        self._episode = Episode(**values, turns=self._turn)
        self._loops = loops
        self._loop = loops.open()
        self._task: asyncio.Task | None = None
        self._waiting: asyncio.Future | None = None
        self._started = threading.Event()
        threading.Thread(target=self._live, daemon=True).start()

    def answer(self, value: Message | Truncated) -> None:
        """Hand over the turn that the environment waits for, or that there is none."""

        def hand_over() -> None:
            waiting = self._waiting
            if waiting is not None and not waiting.done():
                if isinstance(value, Truncated):
                    waiting.set_exception(value)
                else:
                    waiting.set_result(value)

        self._call(hand_over)

    def cancel(self) -> None:
        """End the environment where it waits; its thread answers that it is closed."""
        self._started.wait()
        task = self._task
        assert task is not None
        self._call(task.cancel)

    def _call(self, function: Callable[[], Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(function)

    async def _turn(
        self, observed: list[dict[str, str]], limit: int | None, opening: Opening | None
    ) -> Message:
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise WrongUse(f"expected a limit of one token or more, got {limit!r:.40}")
        if self._waiting is not None and not self._waiting.done():
            raise WrongUse("generate() was called while another turn of the episode is awaited")
        if self._waiting is not None and self._waiting.cancelled():
            raise WrongUse("generate() was called after a turn that was given up")
        if self._waiting is not None and not observed:
            raise WrongUse("generate() was called twice with nothing observed in between")
        if self._waiting is None and observed:
            raise WrongUse("something was observed before the policy's first turn: the prompt comes first")
        if not self._left:
            raise Truncated("the episode had all its turns")
        self._left -= 1
        first = {} if self._waiting is not None or opening is None else {"opening": opening._asdict()}
        self._waiting = self._loop.create_future()
        self._send({"kind": ASKS, "messages": observed, "limit": limit, **first})
        return await self._waiting

    def _send(self, frame: Mapping[str, Any]) -> None:
        self._reply({"episode": self._number, **frame})

    def _live(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run())
        finally:
            self._send({"kind": CLOSED})
            self._loops.close(self._loop)

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        self._started.set()
        try:
            try:
                reward = await self._make().run(self._episode)
            except Truncated:
                reward = None
            answer = (
                scored(reward) if reward is not None else {"kind": SCORED, "reward": None, "components": {}}
            )
        except asyncio.CancelledError:
            return
        except WrongUse as error:
            answer = failed(WRONG_TYPE, str(error))
        except BaseException as error:  # an environment that calls sys.exit must not end the others
            answer = failed(EXCEPTION, told(error))
        answer["result"] = answer.pop("kind")
        self._send({"kind": ENDED, "truncated": self._episode.truncated, **answer})
