"""The process in which a reward function runs, started by `megatron_rl.rewards.function`, and its answers."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_rl.contained.confinement import allow_processor_seconds
from megatron_rl.contained.process import LARGEST_MESSAGE, READY, Requests, load, readable, told

SCORED, FAILED = "scored", "failed"
EXCEPTION, NOT_FINITE, WRONG_TYPE = "exception", "not_finite", "wrong_type"
TIMEOUT, CRASHED = "timeout", "crashed"
"""What the trainer says of a process that does not answer."""
LARGEST = (2 - 2**-23) * 2.0**127
"""The largest number that float32 holds."""
LARGEST_NAME, MOST_COMPONENTS = 100, 64


class Answer(NamedTuple):
    """Hold what is known of one sample: a reward with components, or the reason why there is none."""

    reason: str | None
    message: str = ""
    reward: float = math.nan
    components: Mapping[str, float] = {}


def answer_of(frame: Mapping[str, Any]) -> Answer | None:
    """Return what a worker says of a sample, None where it is not in the worker's language."""
    if frame.get("kind") == FAILED:
        reason = frame.get("reason")
        if reason not in (EXCEPTION, NOT_FINITE, WRONG_TYPE):
            return None
        return Answer(reason, readable(str(frame.get("message", ""))))
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


def judge(
    function: Callable[..., Any], item: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Call ``function`` on one sample; return reward and components, or the reason why there are none."""
    try:
        return scored(function(**item, **arguments))
    except BaseException as error:  # a reward function that calls sys.exit must not end the worker
        return failed(EXCEPTION, told(error))


def scored(value: Any) -> dict[str, Any]:
    """Return reward and components of what user code returned, or the reason why there are none."""
    components = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in components:
        return failed(WRONG_TYPE, f"a mapping without 'reward': {sorted(map(str, components))}")
    try:
        numbers = {str(name): _number(component) for name, component in components.items()}
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
    """Load the function, say so, and answer samples until the trainer closes the requests.

    ``missing`` is what the kernel did not allow. Each answer bears the number of its sample.
    """
    path, spec, arguments = requests.read()
    sys.path[:] = path
    process = os.getpid()
    try:
        function = load(spec)
    except BaseException as error:
        requests.refuse(error)
        return
    requests.reply({"kind": READY, "missing": missing})
    while True:
        try:
            samples = requests.read()
        except EOFError:
            return
        for number, item in samples:
            allow_processor_seconds(limits["cpu_seconds"])
            answer = judge(function, item, arguments)
            if os.getpid() != process:
                os._exit(0)  # a child that the function forked and that came back
            requests.reply({"sample": number, **answer})
