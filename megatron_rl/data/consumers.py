"""What reads the fields of a record behind its prompt: rewards, evaluators, environments.

A ground truth is required where something may read it. The user's own files are not imported for that: one
that nowhere writes the words ``ground_truth`` does not read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rewards import JudgeConfig
from megatron_rl.data.forms import Consumers

_GROUND_TRUTH, _METADATA = "ground_truth", "metadata"


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
    where = "reward.judge.template"
    if "{ground_truth}" in judge.template:
        yield _GROUND_TRUTH, where
    for setting, text in ((where, judge.template), ("reward.judge.parser", judge.parser)):
        if text.partition(":")[0].endswith(".py"):
            yield from _of_code(text, setting)


def _of_code(spec: str, setting: str) -> Iterator[tuple[str, str]]:
    """Yield what a function or class of the user's reads: all, unless its file cannot ask for it."""
    yield _METADATA, setting
    file = Path(spec.rpartition(":")[0])
    name = spec.rpartition(":")[2]
    try:
        source = file.read_text(encoding="utf-8") if file.suffix == ".py" else None
    except (OSError, ValueError):
        source = None
    defines = source is not None and any(f"{word} {name}" in source for word in ("def", "class"))
    if source is None or not defines or _GROUND_TRUTH in source:
        yield _GROUND_TRUTH, setting
