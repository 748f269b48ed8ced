"""Sampling of single tasks, ``rollout.sampling_profiles``: what a profile may set, and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from megatron_rl.config.field_types import convert, hints, type_words
from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.config.setting import Setting, setting_of
from megatron_rl.config.source import describe
from megatron_rl.errors import UserError, nearest


def profile_fields() -> dict[str, Setting]:
    """Return what a profile may set, and what is said about it."""
    return {item.name: setting_of(item) for item in fields(RolloutConfig) if setting_of(item).per_task}


def profile_errors(rollout: RolloutConfig) -> list[UserError]:
    """Return the errors of the profiles, whose values have the types and bounds of the rollout's own."""
    known, errors = profile_fields(), []
    for task, profile in rollout.sampling_profiles.items():
        for name, value in profile.items():
            path = f"rollout.sampling_profiles.{task}.{name}"
            if name not in known:
                errors.append(_name_error(path, name, list(known)))
                continue
            hint, said = hints(RolloutConfig)[name], known[name]
            accepted, typed = convert(hint, value)
            if not accepted or said.error(path, typed) is not None:
                expected = ", ".join(filter(None, [type_words(hint), said.bounds()]))
                errors.append(_value_error(path, expected, value))
    return errors


def stop_strings(rollout: RolloutConfig) -> dict[str, Sequence[str]]:
    """Return the stop strings of the rollout and of each profile that has its own, by their setting."""
    stops: dict[str, Sequence[str]] = {"rollout.stop": rollout.stop}
    for task, profile in rollout.sampling_profiles.items():
        if "stop" in profile:
            stops[f"rollout.sampling_profiles.{task}.stop"] = profile["stop"]
    return stops


def stop_error(setting: str, text: str, tokens: Sequence[str]) -> UserError:
    """Return the error of a stop string that the tokenizer does not turn into one token that it knows."""
    return UserError(
        f"the stop string {text!r} is not one token of this model",
        where=setting,
        expected="stop strings that the tokenizer turns into exactly one known token",
        got=f"{len(tokens)} tokens: {list(tokens)}",
        fix="choose a stop string that is one token, or add it to the tokenizer as a special token",
    )


def _name_error(path: str, name: str, known: list[str]) -> UserError:
    close = nearest(name, known)
    return UserError(
        f"`{path}` is not a sampling setting" + (f"; did you mean `{close}`?" if close else ""),
        where=path,
        expected=f"one of {', '.join(known)}",
        got=f"`{name}`",
        fix=f"write `{close}`" if close else "remove it",
    )


def _value_error(path: str, expected: str, value: Any) -> UserError:
    return UserError(
        f"`{path}` is out of range",
        where=path,
        expected=expected,
        got=describe(value),
        fix="correct it, or remove it to have the value of the rollout section",
    )
