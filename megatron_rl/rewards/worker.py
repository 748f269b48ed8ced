"""The process in which a reward function runs, started by `megatron_rl.rewards.function`, and its answers."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_rl.contained.confinement import allow_processor_seconds
from megatron_rl.contained.process import (
    LARGEST_MESSAGE,
    NO_TEXT,
    NO_TEXT_MESSAGE,
    READY,
    Requests,
    load,
    readable,
    search,
    told,
)

SCORED, FAILED, WRITTEN = "scored", "failed", "written"
EXCEPTION, NOT_FINITE, WRONG_TYPE = "exception", "not_finite", "wrong_type"
TIMEOUT, CRASHED = "timeout", "crashed"
"""What the trainer says of a process that does not answer; the first also a worker of a coroutine."""
LARGEST = (2 - 2**-23) * 2.0**127
"""The largest number that float32 holds."""
LARGEST_NAME, MOST_COMPONENTS = 100, 64
ARGUMENTS = ("prompt", "response", "ground_truth", "metadata")
"""What every call has, but that a group takes the place of the response."""
TURNS, TOKENS, GROUP = "turns", "tokens", "group"
"""What a function is given beside the rest if it has a parameter of that name."""


class Answer(NamedTuple):
    """Hold what is known of one sample: a reward with components, or the reason why there is none.

    ``text`` is what a function that writes has written: text, or a list of messages.
    """

    reason: str | None
    message: str = ""
    reward: float = math.nan
    components: Mapping[str, float] = {}
    text: Any = None


class Traits(NamedTuple):
    """How a function wants to be called.

    ``takes`` are the names of its parameters, ``requires`` those without a default; with ``takes_all`` it
    takes every other name, too. ``concurrent`` is whether it is a coroutine function, of which many calls may
    be open at once.
    """

    takes: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    takes_all: bool = True
    concurrent: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Traits:
        """Return the traits of a function; one without a signature takes everything."""
        concurrent = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004
        )
        try:
            parameters = inspect.signature(function).parameters.values()
        except (ValueError, TypeError):
            return cls(concurrent=concurrent)
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = [one for one in parameters if one.kind not in variadic]
        return cls(
            frozenset(one.name for one in named),
            frozenset(one.name for one in named if one.default is one.empty),
            any(one.kind == one.VAR_KEYWORD for one in parameters),
            concurrent,
        )

    def write(self) -> dict[str, Any]:
        """Return the traits as `read` takes them."""
        return {**self._asdict(), "takes": sorted(self.takes), "requires": sorted(self.requires)}

    @classmethod
    def read(cls, frame: Mapping[str, Any]) -> Traits:
        """Return the traits in what a process says of its function."""
        return cls(
            frozenset(map(str, frame.get("takes", ()))),
            frozenset(readable(str(name)) for name in frame.get("requires", ())),
            frame.get("takes_all") is True,
            frame.get("concurrent") is True,
        )

    def chosen(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the values that the function takes."""
        return {name: value for name, value in values.items() if self.takes_all or name in self.takes}


def called_by_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with its parameters that are taken by position alone taken by name, too."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return function
    positional = [one for one in parameters if one.kind == one.POSITIONAL_ONLY]
    if not positional:
        return function

    def call(**values: Any) -> Any:
        by_position = [values.pop(one.name, one.default) for one in positional]
        return function(*by_position, **values)

    return call


def require_returns(function: Callable[..., Any]) -> None:
    """Raise TypeError for a generator function: a call of it makes a generator, whatever it yields."""
    for called in (function, getattr(function, "__call__", None)):  # noqa: B004
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise TypeError(
                f"{getattr(function, '__name__', type(function).__name__)} yields its values; "
                "a function that is called for a sample returns one"
            )


def answers_of(frame: Mapping[str, Any], count: int) -> list[Answer] | None:
    """Return what a worker says of the ``count`` samples of a call, None where it is not in its language."""
    frames = frame.get("answers")
    if not isinstance(frames, list) or len(frames) != count:
        return None
    answers = [answer_of(one) if isinstance(one, dict) else None for one in frames]
    known = [answer for answer in answers if answer is not None]
    return known if len(known) == count else None


def answer_of(frame: Mapping[str, Any]) -> Answer | None:
    """Return what user code says of a sample, None where it is not in a worker's language."""
    if frame.get("kind") == FAILED:
        reason = frame.get("reason")
        if reason not in (EXCEPTION, NOT_FINITE, WRONG_TYPE, TIMEOUT):
            return None
        return Answer(reason, readable(str(frame.get("message", ""))))
    if NO_TEXT in frame:
        return Answer(WRONG_TYPE, NO_TEXT_MESSAGE)
    if frame.get("kind") == WRITTEN:
        text = frame.get("text")
        return Answer(None, text=text) if is_writing(text) else None
    components, reward = frame.get("components"), frame.get("reward")
    if frame.get("kind") != SCORED or not isinstance(components, dict) or "reward" in components:
        return None
    numbers = {"reward": reward, **components}
    if not all(isinstance(number, int | float) for number in numbers.values()):
        return None
    for name, number in numbers.items():
        if not abs(number) <= LARGEST:
            return Answer(NOT_FINITE, f"{readable(name)} is {number}, beyond what float32 holds")
    if len(components) > MOST_COMPONENTS or any(len(name) > LARGEST_NAME for name in components):
        words = f"more than {MOST_COMPONENTS} components, or a name of more than {LARGEST_NAME} characters"
        return Answer(WRONG_TYPE, words)
    named = {readable(name): float(number) for name, number in components.items()}
    return Answer(None, "", float(numbers["reward"]), named)


def is_writing(value: Any) -> bool:
    """Say whether a value is text, or a list of messages with ``role`` and ``content``."""
    if isinstance(value, str):
        return True
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"role", "content"}
        and all(isinstance(text, str) for text in value.values())
    )


def answered(value: Any, count: int | None) -> list[dict[str, Any]]:
    """Return what a function returned for a sample, or for each of the ``count`` samples of a group."""
    if count is None:
        return [scored(value)]
    if hasattr(value, "tolist"):  # numpy and torch arrays
        value = value.tolist()
    if not isinstance(value, list | tuple) or len(value) != count:
        size = f" of {len(value)}" if isinstance(value, list | tuple) else f": {value!r:.80}"
        message = f"expected a reward for each of {count} responses, got {type(value).__name__}{size}"
        return [failed(WRONG_TYPE, message)] * count
    return [failed(EXCEPTION, told(one)) if isinstance(one, BaseException) else scored(one) for one in value]


def written(value: Any, _: int | None) -> list[dict[str, Any]]:
    """Return what a function wrote of a sample."""
    if is_writing(value):
        return [{"kind": WRITTEN, "text": value}]
    words = f"expected text, or messages of role and content, got {type(value).__name__}: {value!r:.80}"
    return [failed(WRONG_TYPE, words)]


def scored(value: Any) -> dict[str, Any]:
    """Return reward and components of what user code returned, or the reason why there are none."""
    components = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in components:
        return failed(WRONG_TYPE, f"a mapping without 'reward': {sorted(map(str, components))}")
    try:
        numbers = {str(name): _number(component) for name, component in components.items()}
        if len(numbers) < len(components):
            return failed(WRONG_TYPE, f"two components of one name: {sorted(map(repr, components))}")
    except WrongType as error:
        return failed(WRONG_TYPE, str(error))
    for name, number in numbers.items():
        if not math.isfinite(number):
            return failed(NOT_FINITE, f"{name} is {number}")
    return {"kind": SCORED, "reward": numbers.pop("reward"), "components": numbers}


def failed(reason: str, message: str) -> dict[str, Any]:
    """Return the answer that there is no reward."""
    return {"kind": FAILED, "reason": reason, "message": message[-LARGEST_MESSAGE:]}


class WrongType(Exception):
    """User code returned something that is not a number."""


def _number(value: Any) -> float:
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:  # an integer beyond every float
            return math.inf if value > 0 else -math.inf
    raise WrongType(
        f"expected a number or a mapping with 'reward', got {type(value).__name__}: {value!r:.80}"
    )


def serve(requests: Requests, limits: Mapping[str, Any], missing: list[str]) -> None:
    """Load the function, say so, and answer calls until the trainer closes the requests.

    ``missing`` is what the kernel did not allow. Each answer bears the number of its call.
    """
    place, spec, arguments, writes, timeout = requests.read()
    search(place)
    try:
        function = load(spec)
        require_returns(function)
    except BaseException as error:
        requests.refuse(error)
        return
    traits = Traits.of(function)
    function = called_by_name(function)
    ready = {"kind": READY, "missing": missing, **traits.write()}
    calls = _Calls(requests, limits, function, traits, arguments, written if writes else answered, timeout)
    requests.reply(ready)
    if traits.concurrent:
        asyncio.run(calls.serve_together())
    else:
        calls.serve()


class _Calls:
    """The calls of one function, one after another or many at a time."""

    def __init__(
        self,
        requests: Requests,
        limits: Mapping[str, Any],
        function: Callable[..., Any],
        traits: Traits,
        arguments: Mapping[str, Any],
        say: Callable[[Any, int | None], list[dict[str, Any]]],
        timeout: float,
    ) -> None:
        self._requests, self._limits, self._say, self._timeout = requests, limits, say, timeout
        self._function, self._traits, self._arguments = function, traits, arguments
        self._process = os.getpid()

    def serve(self) -> None:
        """Make one call after another."""
        while True:
            try:
                calls = self._requests.read()
            except EOFError:
                return
            for number, item in calls:
                allow_processor_seconds(self._limits["cpu_seconds"])
                try:
                    answers = self._say(self._function(**self._named(item)), _size(item))
                except (
                    BaseException
                ) as error:  # a reward function that calls sys.exit must not end the worker
                    answers = _all_failed(item, EXCEPTION, told(error))
                self._reply(number, answers)

    async def serve_together(self) -> None:
        """Make every call as soon as it arrives: the trainer bounds how many are open."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue()
        threading.Thread(target=self._listen, args=(loop, arrived), daemon=True).start()
        open_calls: set[asyncio.Task] = set()
        while (call := await arrived.get()) is not None:
            task = asyncio.create_task(self._call(*call))
            open_calls.add(task)
            task.add_done_callback(open_calls.discard)
        os._exit(0)  # calls that are open are of no use any more

    def _listen(self, loop: asyncio.AbstractEventLoop, arrived: asyncio.Queue) -> None:
        while True:
            try:
                calls = self._requests.read()
            except EOFError:
                calls = [None]
            for call in calls:
                loop.call_soon_threadsafe(arrived.put_nowait, call)
            if calls == [None]:
                return

    async def _call(self, number: int, item: Mapping[str, Any]) -> None:
        allow_processor_seconds(self._limits["cpu_seconds"])
        try:
            answers = await asyncio.wait_for(self._answers(item), self._timeout)
        except TimeoutError:
            answers = _all_failed(item, TIMEOUT, f"ran longer than {self._timeout:g} s")
        except asyncio.CancelledError:  # nobody but the function itself cancels it
            answers = _all_failed(item, EXCEPTION, "the function cancelled itself")
        self._reply(number, answers)

    async def _answers(self, item: Mapping[str, Any]) -> list[dict[str, Any]]:
        try:
            return self._say(await self._function(**self._named(item)), _size(item))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # sys.exit would end the loop, and every call with it
            return _all_failed(item, EXCEPTION, told(error))

    def _named(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the function is called with: of what a call has, the names that it takes."""
        return self._traits.chosen({**item, **self._arguments})

    def _reply(self, number: int, answers: list[dict[str, Any]]) -> None:
        if os.getpid() != self._process:
            os._exit(0)  # a child that the function forked and that came back
        self._requests.reply({"call": number, "answers": answers})


def _size(item: Mapping[str, Any]) -> int | None:
    """Return how many responses a call is about, None where it is about one that is no group."""
    return len(item[GROUP]) if GROUP in item else None


def _all_failed(item: Mapping[str, Any], reason: str, message: str) -> list[dict[str, Any]]:
    return [failed(reason, message)] * (_size(item) or 1)
