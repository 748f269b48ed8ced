"""Rules that need only the configuration: single values, pairs of values and the pieces of the algorithm.

No model, file or world size is read here, so these rules also run on every suggestion for an unknown name
(see `check.unknown_names`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from megatron_rl.algorithms.algorithm import ALGORITHMS, Algorithm
from megatron_rl.algorithms.lookup import algorithm_of
from megatron_rl.check.stages import check_stages
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.data import fields_of
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.config.sections.rewards import FUNCTION
from megatron_rl.config.sections.rollout import profile_errors
from megatron_rl.config.setting import sections_of, value_errors
from megatron_rl.errors import UserError, single_errors


def check_values(config: RunConfig) -> list[UserError]:
    """Return the errors of single values and of pairs of values."""
    return [
        *value_errors(config),
        *profile_errors(config.rollout),
        *_reward_model_errors(config),
        *_no_reward_errors(config),
        *check_stages(config),
        *_learning_rate_errors(config),
        *_pair_errors(config),
        *_field_errors(config),
    ]


def check_algorithm(config: RunConfig) -> tuple[Algorithm | None, list[UserError]]:
    """Construct the run's algorithm; return it with every error in its name, pieces and settings.

    With errors, the returned algorithm is the named one with its default pieces, None for an unknown name.
    """
    try:
        algorithm = algorithm_of(config)
    except UserError as error:
        return ALGORITHMS.get(config.algorithm.name), list(single_errors(error))
    return algorithm, _overlong_errors(config, algorithm)


def _overlong_errors(config: RunConfig, algorithm: Algorithm) -> list[UserError]:
    """Return the errors of an overlong buffer that exceeds the response limit of a sampling profile."""
    if algorithm.overlong.limit is not None:
        return []

    # A buffer without an explicit limit is relative to the response limit of each sampling profile.
    limits = {
        f"rollout.sampling_profiles.{task}.max_response_tokens": profile["max_response_tokens"]
        for task, profile in config.rollout.sampling_profiles.items()
        if isinstance(profile.get("max_response_tokens"), int)
    }
    return list(algorithm.overlong.buffer_errors("algorithm.overlong", limits))


def name_errors(
    path: str, name: str, reserved: Sequence[str] = (), *, identifier: bool = False
) -> Iterator[UserError]:
    """Yield the error of a name that metrics and files cannot contain, or that is ``reserved``."""
    form = r"[\w.-]{1,64}"
    expected = "1 to 64 letters, digits, underscores, dots and hyphens"
    if identifier:
        form = r"[^\W\d]\w{0,63}"
        expected = "a letter, then up to 63 letters, digits and underscores"
    if re.fullmatch(form, name, re.ASCII) and name not in reserved:
        return

    if reserved:
        expected += f"; none of {', '.join(reserved)}"
    message = f"`{path}` has a name that cannot be part of a metric's name, or is one already"
    yield UserError(message, where=path, expected=expected, got=repr(name[:80]), fix="give it another name")


def _reward_model_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors of reward models: an invalid name, or neither weights nor training."""
    # Scorers report rewards under their own names, and an environment under FUNCTION: these are reserved.
    reserved = list(dict.fromkeys([FUNCTION, *config.reward.scorers]))
    for name, model in config.reward.models.items():
        path = f"reward.models.{name}"
        yield from name_errors(path, name, reserved, identifier=True)
        if model.path is None and model.training is None:
            yield UserError(
                f"`{path}` has neither `path` nor `training`",
                where=f"{path}.path",
                expected="a *ForSequenceClassification checkpoint, or a training section",
                got="neither",
                fix=f"set {path}.path, or {path}.training to train one from the starting model",
            )


def _no_reward_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the error of reinforcement learning without any reward."""
    # An environment can return rewards without any scorer.
    has_reward = bool(config.reward.scorers or config.reward.models or config.rollout.environment)
    if config.job == TRAIN and not has_reward:
        yield UserError(
            "no reward is configured",
            where="reward.function",
            expected="reward.function, reward.code, reward.http, reward.judge, reward.models, or an "
            "environment that returns rewards",
            got="none",
            fix="for example reward.function=megatron_rl.rewards.arithmetic:exact_match",
        )


def _learning_rate_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors of schedules whose last learning rate is above the first."""
    for path, optimizer in sections_of(config, OptimizerConfig):
        minimum = optimizer.minimum_learning_rate
        if minimum is not None and minimum > optimizer.learning_rate:
            yield UserError(
                f"`{path}.minimum_learning_rate` is above the learning rate",
                where=f"{path}.minimum_learning_rate",
                expected=f"at most learning_rate ({optimizer.learning_rate:g})",
                got=f"{minimum:g}",
                fix="lower minimum_learning_rate, or raise learning_rate",
            )


def _pair_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors of values that contradict each other."""
    warn = config.mismatch.warn
    stop = config.mismatch.stop
    if warn is not None and stop is not None and stop < warn:
        yield UserError(
            "`mismatch.stop` is below `mismatch.warn`",
            where="mismatch.stop",
            expected=f"at least mismatch.warn ({warn:g})",
            got=f"{stop:g}",
            fix="exchange the two values",
        )

    # A mini-batch needs at least one prompt.
    prompts = config.batch.prompts_per_step
    optimizer_steps = config.batch.optimizer_steps
    if 0 < prompts < optimizer_steps:
        yield UserError(
            "`batch.optimizer_steps` exceeds the number of prompts per step",
            where="batch.optimizer_steps",
            expected=f"at most prompts_per_step ({prompts}): samples of one prompt stay in one mini-batch",
            got=str(optimizer_steps),
            fix=f"lower batch.optimizer_steps to {prompts} or less, "
            f"or raise batch.prompts_per_step to {optimizer_steps}",
        )


def _field_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors of data sets that read prompt and ground truth from one field."""
    sections = [config.data]
    for name, evaluation_set in config.evaluation.sets.items():
        # A set without explicit fields inherits those of `data`, whose error is reported once.
        if evaluation_set.prompt_field or evaluation_set.ground_truth_field:
            sections.append(fields_of(config.data, evaluation_set, f"evaluation.sets.{name}"))

    for data in sections:
        if data.prompt_field == data.ground_truth_field:
            yield UserError(
                "prompt and ground truth are read from the same field",
                where=data.setting_of("ground_truth_field"),
                expected="two different fields",
                got=f"`{data.prompt_field}` for both",
                fix="name the field that holds the answer",
            )
