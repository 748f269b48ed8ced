"""Rules that hold for single values and pairs of values, without a model, files or a world size."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.check.stages import check_stages
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.bounds import LONGEST_NAME
from megatron_rl.config.sections.data import fields_of
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.config.sections.rewards import FUNCTION
from megatron_rl.config.sections.rollout import profile_errors
from megatron_rl.config.setting import sections_of, value_errors
from megatron_rl.errors import UserError


def check_values(config: RunConfig) -> list[UserError]:
    """Return what is wrong with single values and with pairs of values."""
    return [
        *value_errors(config),
        *profile_errors(config.rollout),
        *_reward_models(config),
        *check_stages(config),
        *_optimizers(config),
        *_pairs(config),
    ]


def _reward_models(config: RunConfig) -> Iterator[UserError]:
    # An environment's rewards have the function's name, too.
    taken = list(dict.fromkeys([FUNCTION, *config.reward.scorers]))
    for name, model in config.reward.models.items():
        where = f"reward.models.{name}"
        if not name.isidentifier() or name in taken or len(name) > LONGEST_NAME:
            yield UserError(
                "the name of a reward model cannot name its metric",
                where=where,
                expected=f"letters, digits and _, {LONGEST_NAME} at most, "
                f"but not {', '.join(taken)}, which judges beside it",
                got=repr(name[: LONGEST_NAME + 1]),
                fix="give it another name",
            )
        if model.path is None and model.training is None:
            yield UserError(
                "a reward model is neither given nor trained",
                where=f"{where}.path",
                expected="a *ForSequenceClassification checkpoint, or a training section",
                got="neither",
                fix=f"set {where}.path, or {where}.training to train one from the starting model",
            )
    judges = config.reward.scorers, config.reward.models, config.rollout.environment
    if config.job == TRAIN and not any(judges):
        yield UserError(
            "nothing judges the responses",
            where="reward.function",
            expected="reward.function, reward.code, reward.http, reward.judge, reward.models, or an "
            "environment that returns rewards",
            got="none",
            fix="for example reward.function=megatron_rl.rewards.arithmetic:exact_match",
        )


def _optimizers(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors of learning-rate schedules that do not fit in what they are for."""
    for path, optimizer in sections_of(config, OptimizerConfig):
        minimum, rate = optimizer.minimum_learning_rate, optimizer.learning_rate
        if minimum is not None and minimum > rate:
            yield UserError(
                "the learning rate would end above where it starts",
                where=f"{path}.minimum_learning_rate",
                expected=f"at most learning_rate ({rate:g})",
                got=f"{minimum:g}",
                fix="lower minimum_learning_rate, or raise learning_rate",
            )


def _pairs(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors of values that contradict one another."""
    warn, stop = config.mismatch.warn, config.mismatch.stop
    if warn is not None and stop is not None and stop < warn:
        yield UserError(
            "the run would stop before it warns",
            where="mismatch.stop",
            expected=f"at least mismatch.warn ({warn:g})",
            got=f"{stop:g}",
            fix="exchange the two values",
        )
    prompts, steps = config.batch.prompts_per_step, config.batch.optimizer_steps
    if 0 < prompts < steps:
        yield UserError(
            "there are more optimizer steps than prompts to share among them",
            where="batch.optimizer_steps",
            expected=f"at most prompts_per_step ({prompts}): samples of one prompt stay together",
            got=str(steps),
            fix=f"lower batch.optimizer_steps to {prompts} or less, "
            f"or raise batch.prompts_per_step to {steps}",
        )
    sets = (
        fields_of(config.data, described, f"evaluation.sets.{name}")
        for name, described in config.evaluation.sets.items()
        if described.prompt_field or described.ground_truth_field
    )
    for data in (config.data, *sets):
        if data.prompt_field == data.ground_truth_field:
            yield UserError(
                "prompt and ground truth are read from the same field",
                where=data.setting_of("ground_truth_field"),
                expected="two different fields",
                got=f"`{data.prompt_field}` for both",
                fix="name the field that holds the answer",
            )
