"""What reads the fields of a record behind its prompt: rewards, evaluators, environments.

A ground truth is required where something may read it. No code is imported for that: a file that nowhere
has the word ``ground_truth`` does not read one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rewards import JudgeConfig
from megatron_rl.data.forms import Consumers
from megatron_rl.user_code import find_module

_GROUND_TRUTH, _METADATA = "ground_truth", "metadata"
_OWN_PARSER = JudgeConfig.__dataclass_fields__["parser"].default
"""The parser of verdicts without one of the user's, which reads the judge's answer alone."""


def prompt_consumers(config: RunConfig, evaluation_set: str | None = None) -> Consumers:
    """Return what reads the records of ``data.train``, or of the evaluation set of a name."""
    readers = dict(_readers(config, evaluation_set))
    return Consumers(readers.get(_GROUND_TRUTH), readers.get(_METADATA))


def _readers(config: RunConfig, evaluation_set: str | None) -> Iterator[tuple[str, str]]:
    """Yield what is read, ground truth or metadata, with the setting that reads it."""
    described = config.evaluation.sets.get(evaluation_set or "")
    if described is not None:
        for name, function in described.functions().items():
            yield from _of_code(function, f"evaluation.sets.{evaluation_set}.{name}")
    if described is None or described.reward is None:
        yield from _of_rewards(config)
    if config.rollout.environment is not None:
        yield from _of_code(config.rollout.environment.name, "rollout.environment.name")


def _of_rewards(config: RunConfig) -> Iterator[tuple[str, str]]:
    reward = config.reward
    if reward.function is not None:
        yield from _of_code(reward.function, "reward.function")
    if reward.code is not None:
        yield _GROUND_TRUTH, "reward.code"
    if reward.http is not None:
        for name in {_GROUND_TRUTH, _METADATA}.intersection(reward.http.sends):
            yield name, "reward.http.sends"
    if reward.judge is not None:
        yield from _of_judge(reward.judge)


def _of_judge(judge: JudgeConfig) -> Iterator[tuple[str, str]]:
    setting = "reward.judge.template"
    if "{" not in judge.template:
        yield from _of_code(judge.template, setting)
    elif "{ground_truth}" in judge.template:
        yield _GROUND_TRUTH, setting
    if judge.parser != _OWN_PARSER:
        yield from _of_code(judge.parser, "reward.judge.parser")


def _of_code(spec: str, setting: str) -> Iterator[tuple[str, str]]:
    """Yield what a function or class of the user's reads: all, unless its file cannot ask for it."""
    yield _METADATA, setting
    place, _, name = spec.rpartition(":")
    try:
        file = Path(place) if place.endswith(".py") else find_module(place)[0]
        source = "" if file is None else file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        source = ""
    # A name that the file only imports is defined in a file that is not looked at.
    defined = re.search(rf"\b(def|class)\s+{re.escape(name)}\b", source)
    if defined is None or _GROUND_TRUTH in source:
        yield _GROUND_TRUTH, setting
