"""Worker process of a reward function, and the class `Worker` that controls it from the trainer.

The main function of the process is `serve`. It sends *frames* to the trainer: a frame is a JSON object with
the result of one call, or of one sample of a call. User code may write malformed frames. So the trainer
validates every frame (`read_answers`), and kills the process if a frame is malformed.

Calls are numbered. A call ends in one of three ways: the process answers it, the call fails because the
process ended, or the call is sent again to another process. The module can be imported without torch, so that
`check` starts the same processes as a run.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_rl.contained.confinement import allow_processor_seconds
from megatron_rl.contained.process import (
    INVALID_TEXT,
    INVALID_TEXT_MESSAGE,
    LARGEST_MESSAGE,
    READY,
    ContainedProcess,
    LoadFailed,
    Requests,
    escape_unprintable,
    format_error,
    load_callable,
    read_list,
    set_module_sources,
)
from megatron_rl.errors import UserError
from megatron_rl.progress import count_progress

if TYPE_CHECKING:
    # Not for the worker process: the configuration would lengthen its start by half.
    from megatron_rl.config.sections.rewards import RewardConfig

SCORED = "scored"
"""Kind of a frame: a reward with components."""
FAILED = "failed"
"""Kind of a frame: the reason why there is no reward."""
WRITTEN = "written"
"""Kind of a frame: text or messages that a function returned, such as the prompt from a judge's template."""
EXCEPTION = "exception"
"""Failure reason of a sample: the function raised."""
NOT_FINITE = "not_finite"
"""Failure reason of a sample: the reward or a component is NaN, infinite, or too large for float32."""
WRONG_TYPE = "wrong_type"
"""Failure reason of a sample: the function returned something other than a reward."""
TIMEOUT = "timeout"
"""Failure reason of a sample: the call exceeded its time limit."""
CRASHED = "crashed"
"""Failure reason of a sample: the process ended."""

LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
"""Largest finite number in float32."""
LARGEST_NAME = 100
"""Maximum length of a component's name in characters; it becomes part of a metric's name."""
MAX_COMPONENTS = 64
"""Maximum number of components of a reward; each becomes a metric."""
ARGUMENTS = ("prompt", "response", "ground_truth", "metadata")
"""Arguments of every call; in a call for a group, `GROUP` replaces the response."""
TURNS = "turns"
"""Argument for functions with a parameter of this name: the turns of a conversation."""
TOKENS = "tokens"
"""Argument for functions with a parameter of this name: the tokens of the response."""
GROUP = "group"
"""Argument for functions with a parameter of this name: the responses of a group."""

RESTART_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between the attempts to start a process again: a shortage of memory is often temporary."""
RESTART_SECONDS = 60.0
"""Maximum time in seconds from the first to the last attempt to start a process again."""
GRACE_SECONDS = 2.0
"""Seconds that a coroutine has to end after it was cancelled at its limit, before its process is replaced."""

_RESPONSE_OR_GROUP = "`response`, one text, or `group`, the texts of all responses to a prompt"
_EQUIVALENT_PARAMETERS = {
    # verl's custom_reward_function, for one sample and for a batch.
    "data_source": '`metadata["data_source"]`',
    "solution_str": "`response`",
    "extra_info": '`metadata["extra_info"]`',
    "data_sources": '`metadata["data_source"]`',
    "solution_strs": _RESPONSE_OR_GROUP,
    "ground_truths": "`ground_truth`, of one prompt",
    "extra_infos": '`metadata["extra_info"]`',
    # TRL's reward_funcs, which get the columns of the data set as further parameters.
    "prompts": "`prompt`",
    "completions": _RESPONSE_OR_GROUP,
    "completion": "`response`",
    "completion_ids": "`tokens`",
    # OpenRLHF's reward_func.
    "queries": "`prompt` and `response`",
    "labels": "`ground_truth`, of one prompt",
    # Names of the ground truth in data sets.
    "label": "`ground_truth`",
    "answer": "`ground_truth`",
    "solution": "`ground_truth`",
}
"""Parameter of a reward function in another project -> equivalent parameter here."""


# Answers


class Answer(NamedTuple):
    """Result of a function for one sample: a reward with components, or a failure with its reason.

    Example:
        >>> Answer(None, reward=1.0, components={"length": 0.5}).components
        {'length': 0.5}
    """

    reason: str | None
    """One of the failure reasons above, or None for success."""
    message: str = ""
    """Details of a failure."""
    reward: float = math.nan
    """Finite reward, NaN for a failure."""
    components: Mapping[str, float] = {}
    """Parts of the reward by name, for metrics."""
    text: Any = None
    """Text or list of messages that a function returned, such as the prompt from a judge's template."""


def read_answers(frame: Mapping[str, Any], count: int) -> list[Answer] | None:
    """Parse a worker's frame with the answers for ``count`` samples; return None for a malformed frame."""
    sample_frames = frame.get("answers")
    if not isinstance(sample_frames, list) or len(sample_frames) != count:
        return None

    answers = []
    for sample_frame in sample_frames:
        answer = read_answer(sample_frame) if isinstance(sample_frame, dict) else None
        if answer is None:
            return None
        answers.append(answer)
    return answers


def read_answer(frame: Mapping[str, Any]) -> Answer | None:
    """Parse a frame, which is a worker's JSON object with the result for one sample.

    Returns None for a malformed frame. Every value is checked, because user code may have written the frame.
    """
    # A failure.
    if frame.get("kind") == FAILED:
        reason = frame.get("reason")
        if reason not in (EXCEPTION, NOT_FINITE, WRONG_TYPE, TIMEOUT):
            return None
        return Answer(reason, escape_unprintable(str(frame.get("message", ""))))

    # The transport has marked a frame whose text is not valid Unicode.
    if INVALID_TEXT in frame:
        return Answer(WRONG_TYPE, INVALID_TEXT_MESSAGE)

    # Text or messages instead of a reward: a function that is a judge's template returns the judge's prompt.
    if frame.get("kind") == WRITTEN:
        text = frame.get("text")
        if not is_text_or_messages(text):
            return None
        return Answer(None, text=text)

    # A reward with its components.
    components = frame.get("components")
    reward = frame.get("reward")
    if frame.get("kind") != SCORED or not isinstance(components, dict) or "reward" in components:
        return None
    return _reward_answer({"reward": reward, **components})


def _reward_answer(numbers: dict[str, Any]) -> Answer | None:
    """Convert the reward and its components, by name, to an answer; return None if one is not a number."""
    if not all(isinstance(number, int | float) for number in numbers.values()):
        return None

    for name, number in numbers.items():
        if not abs(number) <= LARGEST_FLOAT32:  # true for NaN, too
            return Answer(NOT_FINITE, f"{escape_unprintable(name)} is {number}, beyond what float32 holds")

    reward = float(numbers.pop("reward"))
    if len(numbers) > MAX_COMPONENTS or any(len(name) > LARGEST_NAME for name in numbers):
        message = f"more than {MAX_COMPONENTS} components, or a name of more than {LARGEST_NAME} characters"
        return Answer(WRONG_TYPE, message)
    return Answer(
        None,
        "",
        reward,
        {escape_unprintable(name): float(number) for name, number in numbers.items()},
    )


def is_text_or_messages(value: Any) -> bool:
    """Return whether a value is text, or a list of messages with ``role`` and ``content``."""
    if isinstance(value, str):
        return True
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    """Return whether a value is a message: a mapping of ``role`` and ``content`` to text."""
    return (
        isinstance(value, dict)
        and set(value) == {"role", "content"}
        and all(isinstance(text, str) for text in value.values())
    )


# Parameters


class CallSignature(NamedTuple):
    """Parameters of a user's function, which determine the arguments of its calls."""

    takes: frozenset[str] = frozenset()
    """Names of the function's parameters."""
    requires: frozenset[str] = frozenset()
    """Names of the parameters without a default."""
    takes_all: bool = True
    """Whether the function also accepts any other name (``**kwargs``)."""
    concurrent: bool = False
    """Whether the function is a coroutine function, whose calls run concurrently."""

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> CallSignature:
        """Inspect the signature of a function.

        If Python cannot read the signature, the function is assumed to accept every argument.
        """
        # An object with an `async def __call__` is called like a coroutine function.
        call_method = getattr(function, "__call__", None)  # noqa: B004
        concurrent = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method)
        try:
            parameters = inspect.signature(function).parameters.values()
        except (ValueError, TypeError):
            return cls(concurrent=concurrent)

        variadic_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        takes = set()
        requires = set()
        takes_all = False
        for parameter in parameters:
            if parameter.kind == parameter.VAR_KEYWORD:
                takes_all = True
            if parameter.kind in variadic_kinds:
                continue
            takes.add(parameter.name)
            if parameter.default is parameter.empty:
                requires.add(parameter.name)
        return cls(frozenset(takes), frozenset(requires), takes_all, concurrent)

    def to_frame(self) -> dict[str, Any]:
        """Return the signature as a JSON object, which is part of the worker's first reply."""
        return {
            "takes": sorted(self.takes),
            "requires": sorted(self.requires),
            "takes_all": self.takes_all,
            "concurrent": self.concurrent,
        }

    @classmethod
    def from_frame(cls, frame: Mapping[str, Any]) -> CallSignature:
        """Parse the signature in a worker's first reply; the inverse of `to_frame`. Raises LoadFailed."""
        return cls(
            takes=frozenset(map(str, read_list(frame, "takes"))),
            requires=frozenset(escape_unprintable(str(name)) for name in read_list(frame, "requires")),
            takes_all=frame.get("takes_all") is True,
            concurrent=frame.get("concurrent") is True,
        )

    def accepted_arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the items of ``values`` for which the function has a parameter."""
        return {name: value for name, value in values.items() if self.takes_all or name in self.takes}


def parameter_hints(names: Iterable[str]) -> str:
    """Return a hint that translates parameter names of other projects' reward functions, or "".

    Example:
        >>> parameter_hints(["solution_str", "style"])
        'replace them: `solution_str` is `response` here'
    """
    foreign_names = [name for name in names if name in _EQUIVALENT_PARAMETERS]
    hints = [f"`{name}` is {_EQUIVALENT_PARAMETERS[name]} here" for name in foreign_names]
    if not hints:
        return ""
    return f"replace them: {'; '.join(hints)}"


def accept_keywords(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that arguments of positional-only parameters can be passed by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return function

    # A worker passes every argument by name.
    positional_only = [parameter for parameter in parameters if parameter.kind == parameter.POSITIONAL_ONLY]
    if not positional_only:
        return function

    def call_by_name(**arguments: Any) -> Any:
        positional_arguments = []
        for parameter in positional_only:
            positional_arguments.append(arguments.pop(parameter.name, parameter.default))
        return function(*positional_arguments, **arguments)

    return call_by_name


def reject_generator(function: Callable[..., Any]) -> None:
    """Raise TypeError for a generator function, whose call returns a generator and not a reward."""
    # The function may be an object whose `__call__` is a generator function.
    for candidate in (function, getattr(function, "__call__", None)):  # noqa: B004
        if inspect.isgeneratorfunction(candidate) or inspect.isasyncgenfunction(candidate):
            function_name = getattr(function, "__name__", type(function).__name__)
            raise TypeError(
                f"{function_name} yields its values; expected a function that returns one value per call"
            )


# Frames for the values that user code returns


def reward_frames(value: Any, count: int | None) -> list[dict[str, Any]]:
    """Convert the return value of a reward function to one frame (JSON object) per sample.

    ``count`` is the number of samples in a call for a group, or None in a call for one sample.
    """
    if count is None:
        return [reward_frame(value)]

    if hasattr(value, "tolist"):  # NumPy and torch arrays
        value = value.tolist()
    if not isinstance(value, list | tuple) or len(value) != count:
        got = f"{type(value).__name__}: {value!r:.80}"
        if isinstance(value, list | tuple):
            got = f"{type(value).__name__} of {len(value)}"
        message = f"expected a reward for each of {count} responses, got {got}"
        return [failure_frame(WRONG_TYPE, message)] * count

    # A function for a group may return an exception in place of a single sample's reward.
    frames = []
    for sample_value in value:
        if isinstance(sample_value, BaseException):
            frames.append(failure_frame(EXCEPTION, format_error(sample_value)))
        else:
            frames.append(reward_frame(sample_value))
    return frames


def text_frames(value: Any, _: int | None) -> list[dict[str, Any]]:
    """Convert the return value of a function that returns text or messages, such as a judge's template.

    Returns a list with one frame: the JSON object that the worker sends to the trainer for one sample. The
    second argument is the number of samples in a call for a group, as in `reward_frames`. It is unused, since
    a function that returns text is called for one sample at a time.
    """
    if is_text_or_messages(value):
        return [{"kind": WRITTEN, "text": value}]
    message = f"expected text, or messages of role and content, got {type(value).__name__}: {value!r:.80}"
    return [failure_frame(WRONG_TYPE, message)]


def reward_frame(value: Any) -> dict[str, Any]:
    """Convert a reward (a number, or a mapping with components) to a frame, which is a JSON object.

    Any other value, and a number that is not finite, becomes a failure frame.

    Example:
        >>> reward_frame({"reward": 1, "length": 0.5})
        {'kind': 'scored', 'reward': 1.0, 'components': {'length': 0.5}}
    """
    # A bare number is a reward without components.
    components = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in components:
        return failure_frame(WRONG_TYPE, f"a mapping without 'reward': {sorted(map(str, components))}")

    try:
        numbers = {str(name): _to_float(component) for name, component in components.items()}
    except WrongType as error:
        return failure_frame(WRONG_TYPE, str(error))
    if len(numbers) < len(components):  # 1 and "1" are different keys of the mapping, but the same name
        return failure_frame(WRONG_TYPE, f"two components of one name: {sorted(map(repr, components))}")

    for name, number in numbers.items():
        if not math.isfinite(number):
            return failure_frame(NOT_FINITE, f"{name} is {number}")
    return {"kind": SCORED, "reward": numbers.pop("reward"), "components": numbers}


def failure_frame(reason: str, message: str) -> dict[str, Any]:
    """Return the frame (JSON object) of a failure; a message over the length limit is cut at its start."""
    return {"kind": FAILED, "reason": reason, "message": message[-LARGEST_MESSAGE:]}


class WrongType(Exception):
    """Error of user code that returned something other than a number."""


def _to_float(value: Any) -> float:
    """Return a number as a float; raises WrongType for anything else."""
    if hasattr(value, "item"):  # NumPy and torch scalars
        value = value.item()
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:  # an integer beyond every float
            return math.inf if value > 0 else -math.inf

    raise WrongType(
        f"expected a number or a mapping with 'reward', got {type(value).__name__}: {value!r:.80}"
    )


# In the trainer


@dataclass
class Call:
    """One call of the function, for a sample or for all samples of a group."""

    arguments: dict[str, Any]
    """Arguments of the call: name -> value."""
    rows: tuple[int, ...]
    """Indices in the batch of the samples of the call."""
    runs_alone: bool = False
    """Whether its process must have no other open call.

    True for a call that was open when a process ended: it may be the cause.
    """
    start_time: float = 0.0
    """Time (monotonic, seconds) at which its time limit starts."""


class Worker:
    """Trainer's handle of a worker process and of its open calls (calls without an answer yet).

    Calls are numbered from the start of the worker. A plain function answers them in that order, and the time
    limit of a call starts at the end of the previous call. A coroutine function runs its calls concurrently.
    A function with ``returns_text`` returns text or messages instead of a reward. ``key`` is the
    configuration key of the function, and ``extra_arguments`` names further arguments of its calls.
    """

    def __init__(
        self,
        config: RewardConfig,
        key: str,
        returns_text: bool = False,
        extra_arguments: Sequence[str] = (),
    ) -> None:
        self.config = config
        self._key = key
        self._returns_text = returns_text
        self._extra_arguments = extra_arguments

        self.calls: dict[int, Call] = {}
        """Open calls by number, in the order in which they were sent."""
        self.signature = CallSignature()
        self._next_number = 0

        self.process = ContainedProcess(
            "megatron_rl.rewards.worker:serve", asdict(config.limits), config.function or ""
        )
        self.reply_fd = self.process.reply_fd

    def await_ready(self) -> list[str]:
        """Wait until the function is loaded; return descriptions of limits that the kernel does not enforce.

        Raises UserError for a function that cannot be loaded or called.
        """
        config = self.config
        function = config.function or ""
        try:
            load_reply = self.process.load(
                function,
                dict(config.arguments),
                self._returns_text,
                config.timeout,
            )
            signature = CallSignature.from_frame(load_reply)
            unenforced_limits = [str(description) for description in read_list(load_reply, "missing")]
        except LoadFailed as error:
            self.process.kill()
            raise error.as_error(
                f"the reward function {config.function}",
                self._key,
                "module:function or path/to/file.py:function that can be imported and called",
            ) from None

        self.signature = signature
        self._require_parameters()
        return unenforced_limits

    def _require_parameters(self) -> None:
        """Raise UserError unless the parameters of the function match the arguments of its calls."""
        available = {*ARGUMENTS, TURNS, TOKENS, GROUP, *self._extra_arguments}
        if GROUP in self.signature.takes:
            available.discard("response")

        # A parameter without a default needs an argument of the call or of `reward.arguments`. A configured
        # argument without a parameter would silently have no effect.
        configured = set(self.config.arguments)
        unavailable = sorted(self.signature.requires - available - configured)
        unused = [] if self.signature.takes_all else sorted(configured - self.signature.takes)
        if not unavailable and not unused:
            return

        self.process.kill()
        problems = []
        fix = "add parameters of these names, or remove the arguments"
        if unused:
            problems.append(f"it does not take {', '.join(unused)}, which reward.arguments contains")
        if unavailable:
            problems.insert(0, f"it requires {', '.join(unavailable)}")
            fix = parameter_hints(unavailable) or "rename its parameters, or give them a default"
        raise UserError(
            f"the function {self.config.function} does not fit the arguments of its call",
            where=self._key,
            expected=f"parameters among {', '.join(sorted(available))}, and the names of reward.arguments",
            got=" and ".join(problems),
            fix=fix,
        )

    def send_calls(self, queue: deque[Call], max_calls: int) -> None:
        """Send as many calls from the queue as the worker can accept, in one message.

        A plain function gets up to ``max_calls`` calls when it has no open call. A coroutine function gets as
        many as ``config.concurrency`` allows. A call with ``runs_alone`` is sent only to a worker without
        open calls.
        """
        # A plain function gets no calls in advance: another worker may be free earlier.
        if not queue or (self.calls and (queue[0].runs_alone or not self.signature.concurrent)):
            return
        if any(call.runs_alone for call in self.calls.values()):
            return

        free_slots = max_calls
        if self.signature.concurrent:
            free_slots = self.config.concurrency - len(self.calls)

        # Collect the calls of the message. A call with `runs_alone` gets a separate message.
        requests: list[tuple[int, dict[str, Any]]] = []
        while queue and len(requests) < free_slots:
            if queue[0].runs_alone and requests:
                break
            call = queue.popleft()
            call.start_time = time.monotonic()
            self.calls[self._next_number] = call
            requests.append((self._next_number, call.arguments))
            self._next_number += 1
            if call.runs_alone:
                break
        if requests:
            self.process.send_request(requests)

    @property
    def deadline(self) -> float:
        """Return the deadline of the oldest open call, in seconds of the monotonic clock."""
        if not self.signature.concurrent:
            first_number = min(self.calls)
            return self.calls[first_number].start_time + self.config.timeout

        # The worker cancels a coroutine itself at its limit, unless the function blocks the event loop.
        earliest_start = min(call.start_time for call in self.calls.values())
        return earliest_start + self.config.timeout + GRACE_SECONDS

    def receive(self, outcomes: list[Answer | None]) -> bool:
        """Store the answers that have arrived in ``outcomes``, which has one item per sample of the batch.

        Returns False if the process has ended or violated the protocol.
        """
        frames, is_open = self.process.read_replies()
        for frame in frames:
            number = self._find_open_call(frame)
            answers = None
            if number is not None:
                answers = read_answers(frame, len(self.calls[number].rows))
            if number is None or answers is None:
                self.process.protocol_error = f"the worker sent a malformed answer: {frame!r:.200}"
                break

            call = self.calls.pop(number)
            for row, answer in zip(call.rows, answers, strict=True):
                outcomes[row] = answer
                count_progress("rewards")

            # The time limit of the next call of a plain function starts now.
            if not self.signature.concurrent and self.calls:
                next_number = min(self.calls)
                self.calls[next_number].start_time = time.monotonic()
        return is_open and self.process.protocol_error is None

    def _find_open_call(self, frame: Mapping[str, Any]) -> int | None:
        """Return the number of the open call that a frame answers, or None for an invalid number.

        User code may have written the frame. A plain function answers its calls in order, so that only the
        first open call is valid.
        """
        number = frame.get("call")
        if not isinstance(number, int) or number not in self.calls:
            return None
        if not self.signature.concurrent and number != min(self.calls):
            return None
        return number

    def split_open_calls(self) -> tuple[list[Call], list[Call]]:
        """Split the open calls after the process has ended: calls that have failed, and calls to send again.

        A plain function runs one call at a time, so the first open call has ended the process and has failed.
        A coroutine function runs all open calls concurrently. If only one was open, it has failed. If several
        were open, it is unknown which of them has ended the process. Then each is sent again, to a process
        without other calls.
        """
        calls = list(self.calls.values())
        if not self.signature.concurrent or len(calls) == 1:
            return calls[:1], calls[1:]
        return [], [replace(call, runs_alone=True) for call in calls]


def loading_errors(
    config: RewardConfig,
    key: str,
    returns_text: bool,
    extra_arguments: Sequence[str],
) -> list[UserError]:
    """Load the configured function in a worker process, as a run does; return a list with the error, if any.

    See `Worker` for the arguments.
    """
    worker = Worker(config, key, returns_text, extra_arguments)
    try:
        worker.await_ready()
    except UserError as error:
        return [error]
    finally:
        worker.process.kill()
    return []


# In the worker process


def serve(
    requests: Requests,
    limits: Mapping[str, Any],
    unenforced_limits: list[str],
) -> None:
    """Load the function, report its signature, and answer calls until the trainer closes the connection.

    ``unenforced_limits`` are descriptions of limits that the kernel does not enforce. Each reply has the
    number of its call.
    """
    search_path, spec, arguments, returns_text, timeout = requests.read()

    # Let the user's module import other modules of its folder.
    set_module_sources(search_path)
    try:
        function = load_callable(spec)
        reject_generator(function)
    except BaseException as error:  # the import of the user's module may even exit
        requests.refuse(error)
        return

    signature = CallSignature.from_function(function)
    function = accept_keywords(function)
    convert_value = text_frames if returns_text else reward_frames
    call_loop = _CallLoop(requests, limits, function, signature, arguments, convert_value, timeout)
    requests.reply({"kind": READY, "missing": unenforced_limits, **signature.to_frame()})
    if signature.concurrent:
        asyncio.run(call_loop.serve_concurrently())
    else:
        call_loop.serve()


class _CallLoop:
    """Loop that calls one function for each request, one after another or concurrently.

    ``arguments`` are the configured arguments of every call. ``convert_value`` is `reward_frames`, or
    `text_frames` for a function that returns text: it converts the return value of a call to one frame per
    sample. ``timeout`` is the time in seconds after which a call of a coroutine function is cancelled.
    """

    def __init__(
        self,
        requests: Requests,
        limits: Mapping[str, Any],
        function: Callable[..., Any],
        signature: CallSignature,
        arguments: Mapping[str, Any],
        convert_value: Callable[[Any, int | None], list[dict[str, Any]]],
        timeout: float,
    ) -> None:
        self._requests = requests
        self._limits = limits
        self._function = function
        self._signature = signature
        self._arguments = arguments
        self._convert_value = convert_value
        self._timeout = timeout
        self._process_id = os.getpid()

    def serve(self) -> None:
        """Call the function for each request in turn, until the trainer closes the connection."""
        while True:
            try:
                calls = self._requests.read()
            except EOFError:
                return

            # Renew the limit of processor time for each call.
            for number, call_values in calls:
                allow_processor_seconds(self._limits["cpu_seconds"])
                try:
                    value = self._function(**self._select_arguments(call_values))
                    frames = self._convert_value(value, _group_size(call_values))
                except BaseException as error:  # sys.exit in a reward function must not end the worker
                    frames = _failure_frames(call_values, EXCEPTION, format_error(error))
                self._reply(number, frames)

    async def serve_concurrently(self) -> None:
        """Start a call for each request as it arrives; the trainer limits the number of open calls."""
        loop = asyncio.get_running_loop()
        call_queue = asyncio.Queue()
        threading.Thread(target=self._read_calls, args=(loop, call_queue), daemon=True).start()

        # Keep a reference to each task: the event loop has only weak references.
        open_calls: set[asyncio.Task] = set()
        while (call := await call_queue.get()) is not None:
            task = asyncio.create_task(self._make_call(*call))
            open_calls.add(task)
            task.add_done_callback(open_calls.discard)
        os._exit(0)  # the trainer no longer reads answers, so open calls are abandoned

    def _read_calls(
        self,
        loop: asyncio.AbstractEventLoop,
        call_queue: asyncio.Queue,
    ) -> None:
        """Put every call into the queue, and None at the end; runs in a thread, since reading blocks."""
        while True:
            try:
                calls = self._requests.read()
            except EOFError:
                loop.call_soon_threadsafe(call_queue.put_nowait, None)
                return

            for call in calls:
                loop.call_soon_threadsafe(call_queue.put_nowait, call)

    async def _make_call(self, number: int, call_values: Mapping[str, Any]) -> None:
        """Call the coroutine function with a time limit, and send the result to the trainer.

        ``number`` is the number of the call. ``call_values`` are its arguments by name, from the trainer. The
        result has one frame (JSON object) per sample of the call.
        """
        allow_processor_seconds(self._limits["cpu_seconds"])
        try:
            frames = await asyncio.wait_for(self._await_frames(call_values), self._timeout)
        except TimeoutError:
            frames = _failure_frames(call_values, TIMEOUT, f"ran longer than {self._timeout:g} s")
        except asyncio.CancelledError:  # only the function itself can have cancelled this task
            frames = _failure_frames(call_values, EXCEPTION, "the function cancelled itself")
        self._reply(number, frames)

    async def _await_frames(self, call_values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Call the coroutine function; return the frames (JSON objects) for its return value or exception."""
        try:
            value = await self._function(**self._select_arguments(call_values))
            return self._convert_value(value, _group_size(call_values))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # sys.exit would end the event loop and all other calls
            return _failure_frames(call_values, EXCEPTION, format_error(error))

    def _select_arguments(self, call_values: Mapping[str, Any]) -> dict[str, Any]:
        """Select the arguments that the function accepts.

        ``call_values`` are the trainer's arguments of a call. The configured arguments are added to them, and
        override arguments of the same name.
        """
        return self._signature.accepted_arguments({**call_values, **self._arguments})

    def _reply(self, number: int, frames: list[dict[str, Any]]) -> None:
        """Send the answer to call ``number`` to the trainer; ``frames`` has one frame per sample."""
        # The function may have forked a child that also returned into this loop: end the child.
        if os.getpid() != self._process_id:
            os._exit(0)
        self._requests.reply({"call": number, "answers": frames})


def _group_size(call_values: Mapping[str, Any]) -> int | None:
    """Return the number of responses that a call rates: the group's size, or None for a single response.

    ``call_values`` are the arguments of the call. A function with a parameter ``group`` is called once for
    all responses to a prompt.
    """
    if GROUP not in call_values:
        return None
    return len(call_values[GROUP])


def _failure_frames(
    call_values: Mapping[str, Any],
    reason: str,
    message: str,
) -> list[dict[str, Any]]:
    """Make the frames of a failed call: one JSON object with this reason and message per sample.

    ``call_values`` are the arguments of the call.
    """
    return [failure_frame(reason, message)] * (_group_size(call_values) or 1)
