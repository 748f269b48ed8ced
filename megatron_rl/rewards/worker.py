"""The process in which a reward function runs, started by `megatron_rl.rewards.function`.

It needs the standard library alone, so a new worker is ready in some ten milliseconds and has none of the
trainer's threads and devices. What it is asked arrives on standard input, as pickles of the trainer's own
making; what it answers is JSON, since the reward function, and programs of the policy's that it may run, are
not trusted with the trainer: nothing they can write there is ever executed. Frames have an 8-byte length.

Two processes share the work. The first watches over limits and the trainer's life, the second, in namespaces
of its own where the kernel allows that, loads the function and calls it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any

from megatron_rl.rewards.confinement import allow_processor_seconds, enter, isolate, supervise
from megatron_rl.user_code import load_module

HEADER = struct.Struct("<Q")

LOAD_FAILED, READY, SCORED, FAILED = "load_failed", "ready", "scored", "failed"
EXCEPTION, NOT_FINITE, WRONG_TYPE = "exception", "not_finite", "wrong_type"
LARGEST_MESSAGE = 4000
"""Characters of an exception's text that are told."""

_WITHHELD = {
    errno.EROFS: "reward.limits.write is false",
    errno.ENETUNREACH: "reward.limits.network is false",
}


def write_request(stream: IO[bytes], value: Any) -> None:
    """Write what the trainer asks as a frame and flush it."""
    _write(stream, pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def _write(stream: IO[bytes], payload: bytes) -> None:
    stream.write(HEADER.pack(len(payload)) + payload)
    stream.flush()


def read_request(stream: IO[bytes]) -> Any:
    """Read what the trainer asks; raise EOFError when it has closed."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    return pickle.loads(stream.read(HEADER.unpack(header)[0]))


def load_function(spec: str) -> Callable[..., Any]:
    """Import what ``module:function`` or ``file.py:function`` names; errors tell which part is wrong."""
    place, _, name = spec.rpartition(":")
    function: Any = load_module(place)
    for attribute in name.split("."):
        function = getattr(function, attribute)
    if not callable(function):
        raise TypeError(f"{name} is not callable but {type(function).__name__}")
    return function


def judge(
    function: Callable[..., Any], item: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Call ``function`` on one sample; return reward and components, or the reason why there are none."""
    try:
        value = function(**item, **arguments)
        components = dict(value) if isinstance(value, Mapping) else {"reward": value}
        if "reward" not in components:
            return _failed(WRONG_TYPE, f"a mapping without 'reward': {sorted(map(str, components))}")
        numbers = {str(name): _number(component) for name, component in components.items()}
    except WrongType as error:
        return _failed(WRONG_TYPE, str(error))
    except BaseException as error:  # a reward function that calls sys.exit must not end the worker
        return _failed(EXCEPTION, _told(error))
    for name, number in numbers.items():
        if not math.isfinite(number):
            return _failed(NOT_FINITE, f"{name} is {number}")
    return {"kind": SCORED, "reward": numbers.pop("reward"), "components": numbers}


def _failed(reason: str, message: str) -> dict[str, Any]:
    return {"kind": FAILED, "reason": reason, "message": message[-LARGEST_MESSAGE:]}


def _told(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error, limit=-3)).strip()
    number = error.errno if isinstance(error, OSError) else None
    return f"{text}\n({_WITHHELD[number]})" if number in _WITHHELD else text


class WrongType(Exception):
    """A reward function returned something that is not a number."""


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


def serve(requests: IO[bytes], replies: IO[bytes], limits: Mapping[str, Any], missing: list[str]) -> None:
    """Load the function, say so, and answer samples until the trainer closes the requests.

    ``missing`` is what the kernel did not allow. Each answer bears the number of its sample.
    """

    def reply(value: Mapping[str, Any]) -> None:
        _write(replies, json.dumps(value).encode())

    path, spec, arguments = read_request(requests)
    sys.path[:] = path
    process = os.getpid()
    try:
        function = load_function(spec)
    except BaseException as error:
        details = "".join(traceback.format_exception(error, limit=-2)).strip()
        reply({"kind": LOAD_FAILED, "error": f"{type(error).__name__}: {error}", "details": details})
        return
    reply({"kind": READY, "missing": missing})
    while True:
        try:
            samples = read_request(requests)
        except EOFError:
            return
        for number, item in samples:
            allow_processor_seconds(limits["cpu_seconds"])
            answer = judge(function, item, arguments)
            if os.getpid() != process:
                os._exit(0)  # a child that the function forked and that came back
            reply({"sample": number, **answer})


def main() -> None:
    """Become the supervisor of a worker that serves standard input; arguments: limits as JSON."""
    limits, trainer = json.loads(sys.argv[1]), os.getppid()
    missing = isolate(limits)
    worker = os.fork()
    if worker:
        # Only the worker's ends tell the trainer of its end.
        os.close(0)
        os.close(1)
        os._exit(supervise(worker, trainer, limits))
    enter(limits)
    # Descriptors of our own, which programs that the function starts do not inherit; what the function
    # prints goes where errors go.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    serve(requests, replies, limits, missing)
    sys.stdout.flush()
    os._exit(0)  # threads that a reward function left running must not keep the process
