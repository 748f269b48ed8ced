"""Sampling settings that change linearly over the steps of a run or over the tokens of a turn.

A setting is a number, a schedule over steps, or a schedule over tokens whose start and end are numbers or
schedules over steps. At a given step, each of them is a `LinearSchedule` over tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.field_types import convert_value
from megatron_rl.config.sections.bounds import MAX_STEPS, MAX_TOKENS
from megatron_rl.config.setting import Setting
from megatron_rl.errors import UserError, range_error

LOWEST_TEMPERATURE = 1e-2
"""Smallest positive temperature. A lower one is replaced by it, as in vLLM: logits would overflow."""

ScheduledValue = float | Mapping[str, Any]
"""A number, `{start, end, steps}`, or `{start, end, over}`."""

_STEPS = "steps"
_TOKENS = "over"
# Key with the length of a schedule -> its unit, and its largest value.
_UNITS: Mapping[str, tuple[str, int]] = {_STEPS: ("steps", MAX_STEPS), _TOKENS: ("tokens", MAX_TOKENS)}


@dataclass(frozen=True)
class LinearSchedule:
    """Value that changes linearly from ``start`` to ``end`` within ``length`` steps or tokens.

    Example:
        >>> schedule = LinearSchedule(1.0, 0.6, 200)
        >>> schedule.value_at(0), schedule.value_at(100), schedule.value_at(500)
        (1.0, 0.8, 0.6)
    """

    start: float
    """Value of the first step or token."""
    end: float
    """Value after ``length`` steps or tokens."""
    length: int
    """Number of steps or tokens over which the value changes, 0 for a constant value."""

    def value_at(self, index: int) -> float:
        """Return the value at a step or token; ``index`` counts from 0."""
        if index >= self.length:
            return self.end
        return self.start + (self.end - self.start) * index / self.length


def changes_over_steps(value: ScheduledValue) -> bool:
    """Return whether a valid value changes over the steps of a run."""
    if not isinstance(value, Mapping):
        return False
    return _STEPS in value or any(changes_over_steps(value[name]) for name in ("start", "end"))


def changes_over_tokens(value: ScheduledValue) -> bool:
    """Return whether a value changes over the tokens of a turn."""
    return isinstance(value, Mapping) and _TOKENS in value


def token_schedule(value: ScheduledValue, step: int | None = None) -> LinearSchedule:
    """Return how a setting changes over the tokens of a turn at training step ``step``.

    The start and end of this change may be schedules over training steps: the result has their values at
    ``step``. Steps count from 1; None means a step after the last change. ``value`` must be valid.

    Example:
        >>> token_schedule({"start": {"start": 1.4, "end": 1.0, "steps": 4}, "end": 0.6, "over": 64}, step=3)
        LinearSchedule(start=1.2, end=0.6, length=64)
    """
    if isinstance(value, Mapping) and _TOKENS in value:
        start = _value_at(value["start"], step)
        return LinearSchedule(start, _value_at(value["end"], step), int(value[_TOKENS]))
    constant = _value_at(value, step)
    return LinearSchedule(constant, constant, 0)


def smallest_value(value: ScheduledValue) -> float:
    """Return the smallest value at any step and token; infinity for an invalid setting."""
    if isinstance(value, Mapping):
        endpoints = [value[name] for name in ("start", "end") if name in value]
        return min(map(smallest_value, endpoints), default=float("inf"))

    is_number, _ = convert_value(float, value)
    return value if is_number else float("inf")


def schedule_errors(
    path: str, value: Mapping[str, Any], description: Setting, lowest_number: float = 0.0
) -> Iterator[UserError]:
    """Yield the errors of the schedule ``value`` at ``path``.

    ``description`` contains the bounds of the key. ``lowest_number`` is the smallest valid start or end of a
    schedule over tokens.
    """
    if not changes_over_tokens(value):
        yield from _step_errors(path, value, description)
        return

    if set(value) != {"start", "end", _TOKENS}:
        yield _keys_error(path, value)
        return

    # The start and end of a schedule over tokens may be schedules over steps.
    for name in ("start", "end"):
        endpoint = value[name]
        if isinstance(endpoint, Mapping):
            yield from _step_errors(f"{path}.{name}", endpoint, description, lowest_number)
        else:
            yield from _number_errors(f"{path}.{name}", endpoint, description, lowest_number)
    yield from _length_errors(path, value, _TOKENS)


def _value_at(value: ScheduledValue, step: int | None) -> float:
    """Return the value of a constant or of a schedule over steps at ``step``.

    For a ``step`` of None, return the last value of the schedule.
    """
    if not isinstance(value, Mapping):
        return float(value)

    schedule = LinearSchedule(float(value["start"]), float(value["end"]), int(value[_STEPS]))
    if step is None:
        return schedule.end
    return schedule.value_at(step - 1)


def _step_errors(
    path: str, value: Mapping[str, Any], description: Setting, lowest_number: float = 0.0
) -> Iterator[UserError]:
    """Yield the errors of a schedule over steps, see `schedule_errors`."""
    if set(value) != {"start", "end", _STEPS}:
        yield _keys_error(path, value)
        return

    for name in ("start", "end"):
        yield from _number_errors(f"{path}.{name}", value[name], description, lowest_number)
    yield from _length_errors(path, value, _STEPS)


def _keys_error(path: str, value: Mapping[str, Any]) -> UserError:
    """Return the error for a section ``value`` whose keys are not the keys of a schedule.

    A schedule over training steps has the key ``steps``; a schedule over the tokens of a turn has ``over``.
    """
    fix = f"write {path}: {{start: 1.0, end: 0.6, steps: 200}}, or over: 64 for a change over tokens"
    # If both `steps` and `over` are set, the user probably wants a change over steps and over tokens.
    if _STEPS in value and _TOKENS in value:
        fix = (
            "put the change over steps into start or end: "
            f"{path}: {{start: {{start: 1.0, end: 0.9, steps: 200}}, end: 0.6, over: 64}}"
        )
    return UserError(
        f"`{path}` is not a schedule",
        where=path,
        expected="a number, {start, end, steps} for a schedule over training steps, or {start, end, over} "
        "for a schedule over tokens",
        got=f"a section of {', '.join(value) or 'nothing'}",
        fix=fix,
    )


def _number_errors(path: str, value: Any, description: Setting, lowest_number: float) -> Iterator[UserError]:
    """Yield an error if the start or end of a schedule is not a valid number for the key."""
    accepted, number = convert_value(float, value)
    if not accepted:
        yield range_error(path, value, f"a number, {description.bounds_text()}", fix="give a number")
        return

    # A number within the bounds of the key may still be too small for a change over tokens.
    error = description.value_error(path, number)
    if error is not None:
        yield error
    elif number < lowest_number:
        expected = f"{lowest_number:g} or more for a change over tokens"
        yield range_error(path, value, expected, fix=f"raise it to {lowest_number:g} or more")


def _length_errors(path: str, value: Mapping[str, Any], length_key: str) -> Iterator[UserError]:
    """Yield an error if the length ``value[length_key]`` of a schedule is invalid."""
    unit, max_length = _UNITS[length_key]
    accepted, length = convert_value(int, value[length_key])
    if not accepted or not 1 <= length <= max_length:
        expected = f"an integer from 1 to {max_length}"
        yield range_error(f"{path}.{length_key}", value[length_key], expected, fix=f"give a number of {unit}")
