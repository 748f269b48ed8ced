"""Rules that need only the configuration: on single values, pairs of values, and the algorithm.

No model, file or world size is read here, so these rules also run on every suggestion for an unknown name
(see `check.unknown_names`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from megatron_rl.algorithms.algorithm import ALGORITHMS, Algorithm
from megatron_rl.algorithms.lookup import algorithm_of
from megatron_rl.check.stages import check_stages
from megatron_rl.config.health import RULE_OF
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.data import SourceConfig, fields_of, reserved_kwargs_error
from megatron_rl.config.sections.evaluation import EvaluationSetConfig
from megatron_rl.config.sections.health import HealthRuleConfig
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.config.sections.response_limits import smallest_limit
from megatron_rl.config.sections.rewards import FUNCTION
from megatron_rl.config.sections.rollout import RolloutConfig, limit_errors, profile_errors, rule_errors
from megatron_rl.config.setting import sections_of, value_errors
from megatron_rl.errors import UserError, exclusive_error, nearest, requirement_error, single_errors

_CHANGES_DISTRIBUTION = (
    "temperature", "top_p", "top_k", "min_p", "logit_bias", "banned_tokens", "min_response_tokens",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size",
)  # fmt: skip
"""Settings of the rollout that change the distribution of a token."""


def check_values(config: RunConfig) -> list[UserError]:
    """Return the errors of all rules on single values and on pairs of values."""
    # `rule_errors` reads the values of sampling profiles, so their types must be valid.
    sampling_errors = profile_errors(config.rollout) or list(rule_errors(config.rollout))
    return [
        *value_errors(config),
        *sampling_errors,
        *limit_errors(config.rollout, config.data.max_prompt_tokens),
        *_reward_model_errors(config),
        *check_stages(config),
        *_learning_rate_errors(config),
        *_contradiction_errors(config),
        *_equal_field_errors(config),
        *_source_errors(config),
        *_health_errors(config),
    ]


def check_algorithm(config: RunConfig) -> tuple[Algorithm | None, list[UserError]]:
    """Construct the run's algorithm; return it with every error in its name, pieces and settings.

    The pieces of an algorithm are its loss and other components. If the algorithm cannot be constructed, the
    named algorithm with its default pieces is returned, or None for an unknown name.
    """
    try:
        algorithm = algorithm_of(config)
    except UserError as error:
        return ALGORITHMS.get(config.algorithm.name), list(single_errors(error))
    errors = [
        *_overlong_errors(config, algorithm),
        *_no_reward_errors(config, algorithm),
        *_teacher_errors(config, algorithm),
    ]
    return algorithm, errors


def _teacher_errors(config: RunConfig, algorithm: Algorithm) -> Iterator[UserError]:
    """Yield the errors for a distillation without a teacher, or with invalid teachers."""
    if config.job != TRAIN or not algorithm.needs_teacher:
        return
    yield from _task_teacher_errors(config)
    if config.teacher_server is not None:
        yield from _teacher_server_errors(config)
        return
    if config.teacher is None and config.teachers:
        return
    if config.teacher is None or config.teacher.path is None:
        # Without a path, the teacher would be the actor's own model.
        yield requirement_error(
            "algorithm.distillation",
            type(algorithm.distillation).__name__,
            "teacher.path, a checkpoint with the actor's tokenizer",
            got="no teacher",
            fix="set teacher.path or teacher_server.url, or algorithm.distillation=none",
        )


def _teacher_server_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors for settings that cannot be combined with ``teacher_server``.

    A teacher's server cannot be combined with a teacher in the job (``teacher``), or with sampling settings
    that change the actor's distribution.
    """
    if config.teacher is not None:
        yield exclusive_error(
            "teacher", "teacher_server", "both would teach the tasks that have no teacher of their own"
        )

    # A server returns log-probs of its model's unchanged distribution. The actor must then sample from its
    # unchanged distribution too: in all tasks, these settings must have their defaults.
    default_config = RolloutConfig()
    for name in _CHANGES_DISTRIBUTION:
        default = getattr(default_config, name)
        value_by_path = {f"rollout.{name}": getattr(config.rollout, name)}
        for task, profile in config.rollout.sampling_profiles.items():
            if name in profile:
                value_by_path[f"rollout.sampling_profiles.{task}.{name}"] = profile[name]
        for path, value in value_by_path.items():
            if value != default:
                yield UserError(
                    "a teacher server returns log-probs of the unchanged distribution only",
                    where=path,
                    expected=f"{default!r}, its default, with teacher_server",
                    got=repr(value),
                    fix=f"remove {path}, or load the teacher into the job with teacher.path",
                )


def _task_teacher_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors for the teachers of tasks: an invalid name, no model, or two teachers for one task."""
    teachers_by_task: dict[str, list[str]] = {}
    for name, teacher in config.teachers.items():
        path = f"teachers.{name}"
        yield from name_errors(path, name, identifier=True)
        if teacher.path is None:
            expected = "a checkpoint with the actor's tokenizer"
            yield _no_model_error(path, expected, fix=f"set {path}.path")
        for task in teacher.tasks or (name,):
            teachers_by_task.setdefault(task, []).append(name)

    for task, teacher_names in teachers_by_task.items():
        if len(teacher_names) > 1:
            yield UserError(
                f"the task {task!r} has several teachers",
                where=f"teachers.{teacher_names[1]}.tasks",
                expected="one teacher for each task",
                got=f"teachers {', '.join(teacher_names)}",
                fix="remove the task from all but one of them",
            )


def _overlong_errors(config: RunConfig, algorithm: Algorithm) -> list[UserError]:
    """Return the errors for a penalty buffer (``algorithm.overlong``) longer than a response limit."""
    if algorithm.overlong.limit is not None:
        return []

    # Without an explicit limit, the penalty buffer ends at each response limit, and must be shorter than it.
    limits: dict[str, int] = {}
    for path, limit_setting in config.rollout.limit_settings.items():
        if isinstance(limit_setting, int | str | dict):
            limits[path] = smallest_limit(limit_setting, config.rollout.auto_limit)
    return list(algorithm.overlong.buffer_errors("algorithm.overlong", limits))


def name_errors(
    path: str, name: str, reserved_names: Sequence[str] = (), *, identifier: bool = False
) -> Iterator[UserError]:
    """Yield the error for a name that the user has chosen, if it has one.

    The name must be valid in metric keys and file names, and must not be in ``reserved_names``.
    ``path`` is the key of the named section. With ``identifier`` the name must start with a letter, and have
    no dots or hyphens.
    """
    pattern = r"[\w.-]{1,64}"
    expected = "1 to 64 letters, digits, underscores, dots and hyphens"
    if identifier:
        pattern = r"[^\W\d]\w{0,63}"
        expected = "a letter, then up to 63 letters, digits and underscores"
    if re.fullmatch(pattern, name, re.ASCII) and name not in reserved_names:
        return

    if reserved_names:
        expected += f"; none of {', '.join(reserved_names)}"
    message = f"`{path}` has a name that cannot be part of a metric's name, or that is reserved"
    yield UserError(message, where=path, expected=expected, got=repr(name[:80]), fix="give it another name")


def _reward_model_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors for reward models with an invalid name, or with neither weights nor training."""
    # Other rewards have the name of their scorer, or FUNCTION for an environment: these names are reserved.
    reserved_names = list(dict.fromkeys([FUNCTION, *config.reward.scorer_weights]))
    for name, model in config.reward.models.items():
        path = f"reward.models.{name}"
        yield from name_errors(path, name, reserved_names, identifier=True)
        if model.path is None and model.training is None:
            expected = "a *ForSequenceClassification checkpoint, or a training section"
            fix = f"set {path}.path, or {path}.training to train one from the starting model"
            yield _no_model_error(path, expected, fix)


def _no_model_error(path: str, expected: str, fix: str) -> UserError:
    """Return the error for the section of a teacher or reward model without a path to a model."""
    message = f"`{path}` has no model"
    return UserError(message, where=f"{path}.path", expected=expected, got="nothing", fix=fix)


def _no_reward_errors(config: RunConfig, algorithm: Algorithm) -> Iterator[UserError]:
    """Yield the error for an algorithm that learns from rewards, in a run without any reward."""
    # An environment can return rewards without any scorer.
    has_scorer = bool(config.reward.scorer_weights or config.data.source_rewards)
    has_reward = bool(has_scorer or config.reward.models or config.rollout.environment)
    if config.job == TRAIN and algorithm.needs_rewards and not has_reward:
        yield UserError(
            "no reward is configured",
            where="reward.function",
            expected="reward.function, reward.code, reward.http, reward.judge, reward.models, or an "
            "environment that returns rewards",
            got="none",
            fix="for example reward.function=megatron_rl.rewards.arithmetic:exact_match",
        )


def _learning_rate_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors for learning-rate schedules with a minimum above the learning rate."""
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


def _contradiction_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors for values of two settings that contradict each other."""
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


def _equal_field_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors for data sets that read prompt and ground truth from one field."""
    # A section without explicit fields inherits the fields of `data`, whose error is reported once.
    data_configs = [config.data]
    for name, evaluation_set in config.evaluation.sets.items():
        if evaluation_set.prompt_field or evaluation_set.ground_truth_field:
            data_configs.append(fields_of(config.data, evaluation_set, f"evaluation.sets.{name}"))

    for name, source in config.data.sources.items():
        if source.prompt_field or source.ground_truth_field:
            data_configs.append(fields_of(config.data, source, f"data.sources.{name}"))

    for data in data_configs:
        if data.prompt_field == data.ground_truth_field:
            yield UserError(
                "prompt and ground truth are read from the same field",
                where=data.setting_of("ground_truth_field"),
                expected="two different fields",
                got=f"`{data.prompt_field}` for both",
                fix="name the field with the answer",
            )


def _health_errors(config: RunConfig) -> Iterator[UserError]:
    """Validate ``health.rules``, both changes of built-in rules and user-defined rules; yield the errors."""
    for name, rule in config.health.rules.items():
        path = f"health.rules.{name}"
        if name in RULE_OF:
            if rule.metric is not None:
                yield UserError(
                    f"`{path}` is a built-in rule, whose metrics are fixed",
                    where=f"{path}.metric",
                    expected="no metric, or another name for the rule",
                    got=rule.metric,
                    fix=f"remove metric, or write health.rules.my_{name}.metric={rule.metric}",
                )
        else:
            yield from _user_rule_errors(path, name, rule)

        # Compare the effective band: an unset limit has the value of the built-in rule.
        above = rule.above
        below = rule.below
        default_rule = RULE_OF.get(name)
        if default_rule is not None and above is None:
            above = default_rule.above
        if default_rule is not None and below is None:
            below = default_rule.below
        if above is not None and below is not None and above <= below:
            yield UserError(
                f"the band of `{path}` is empty",
                where=path,
                expected="`below` less than `above`: values between the two limits are healthy",
                got=f"below {below:g}, above {above:g}",
                fix="exchange the two values, or change the other limit as well",
            )


def _user_rule_errors(path: str, name: str, rule: HealthRuleConfig) -> Iterator[UserError]:
    """Yield the errors for a health rule that the user defines: its name, its metric and its band."""
    if rule.metric is None:
        suggestion = nearest(name, tuple(RULE_OF))
        message = f"`{path}` is not a health rule"
        fix = f"set {path}.metric for a rule of your own"
        if suggestion is not None:
            message += f"; did you mean `{suggestion}`?"
            fix = f"write health.rules.{suggestion}"
        yield UserError(
            message,
            where=path,
            expected=f"one of {', '.join(RULE_OF)}, or a rule of your own with `metric`",
            got=name,
            fix=fix,
        )
        return

    yield from name_errors(path, name)
    if rule.above is None and rule.below is None:
        yield UserError(
            f"`{path}` has no band",
            where=path,
            expected="above, below or both",
            got="neither",
            fix=f"for example {path}.above=1",
        )


def _source_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors for ``data.sources``, and for template arguments of sources and evaluation sets.

    It is an error if ``data.train`` is also set, or if a source has an invalid weight or reward.
    """
    data = config.data
    if data.sources and data.train is not None:
        yield UserError(
            "the training prompts are named twice",
            where="data.sources",
            expected="data.train or data.sources",
            got="both",
            fix="make data.train one of the sources, or remove data.train or data.sources",
        )
    if data.weights and not data.sources:
        yield requirement_error(
            "data.weights", "weights", "data.sources", got="none", fix="remove data.weights"
        )

    for steps, weights in data.weights.items():
        yield from _source_weight_errors(steps, weights, list(data.sources))

    # Sources and evaluation sets can add a system prompt and template arguments to their prompts.
    sections: dict[str, SourceConfig | EvaluationSetConfig] = {}
    sections |= {f"data.sources.{name}": source for name, source in data.sources.items()}
    for name, evaluation_set in config.evaluation.sets.items():
        sections[f"evaluation.sets.{name}"] = evaluation_set
    for path, section in sections.items():
        yield from _template_argument_errors(config, path, section)
    yield from _source_reward_errors(config)


def _source_reward_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors for sources and evaluation sets without a reward function.

    The rule applies only if at least one source has a reward function; `_no_reward_errors` reports a run
    without any.
    """
    rewards = config.data.source_rewards
    if config.job != TRAIN or not rewards or config.reward.function is not None:
        return

    lacking_sources = [name for name in config.data.sources if name not in rewards]
    if lacking_sources:
        yield UserError(
            f"sources without a reward function: {', '.join(lacking_sources)}",
            where=f"data.sources.{lacking_sources[0]}.reward",
            expected="a reward of every source, or reward.function for the sources without one",
            got=f"only {', '.join(f'data.sources.{name}.reward' for name in rewards)}",
            fix=f"set data.sources.{lacking_sources[0]}.reward, or reward.function",
        )

    # The reward of a source is only for its own records, and not for an evaluation set.
    lacking_sets = [name for name, settings in config.evaluation.sets.items() if settings.reward is None]
    if lacking_sets:
        yield UserError(
            f"evaluation sets without a reward function: {', '.join(lacking_sets)}",
            where=f"evaluation.sets.{lacking_sets[0]}.reward",
            expected="a reward of every set, or reward.function: a source's reward is only for its own rows",
            got="neither",
            fix=f"set evaluation.sets.{lacking_sets[0]}.reward, or reward.function",
        )


def _source_weight_errors(
    steps: str, weights: Mapping[str, float], sources: Sequence[str]
) -> Iterator[UserError]:
    """Yield the errors for one entry of ``data.weights``: the weights of sources from a step on.

    ``steps`` is the key of the entry, a number of steps as text. ``weights`` maps the name of a source to its
    weight, and ``sources`` are the names of all sources.
    """
    path = f"data.weights.{steps}"
    if not steps.isdecimal():
        yield UserError(
            "weights of sources apply after a number of steps",
            where=path,
            expected="a number of steps, 0 or more",
            got=steps,
            fix="for example data.weights: {0: {easy: 1}, 200: {easy: 1, hard: 1}}",
        )

    for name, weight in weights.items():
        if sources and name not in sources:
            yield UserError(
                f"there is no source `{name}`",
                where=f"{path}.{name}",
                expected=", ".join(sources),
                got=name,
                fix="name a source of data.sources",
            )
        if weight < 0:
            yield UserError(
                "a weight is negative",
                where=f"{path}.{name}",
                expected="0 or more",
                got=f"{weight:g}",
                fix="set it to 0, or leave the source out, for no prompts of it",
            )

    if not any(weight > 0 for weight in weights.values()):
        yield UserError(
            "no source has a weight",
            where=path,
            expected="a weight above 0 for one source at least",
            got=", ".join(f"{name}: {weight:g}" for name, weight in weights.items()) or "nothing",
            fix="give a source a weight above 0",
        )


def _template_argument_errors(
    config: RunConfig, path: str, section: SourceConfig | EvaluationSetConfig
) -> Iterator[UserError]:
    """Yield the errors for a system prompt or template arguments of a data set without the chat template."""
    for name in ("system_prompt", "chat_template_kwargs"):
        value = getattr(section, name)
        if value in (None, {}):
            continue
        if fields_of(config.data, section, path).chat_template is False:
            fix = f"set {path}.chat_template=true, or remove {path}.{name}"
            got = "chat_template=false"
            yield requirement_error(f"{path}.{name}", value, "the chat template", got=got, fix=fix)

    key = f"{path}.chat_template_kwargs"
    error = reserved_kwargs_error(section.chat_template_kwargs, where=key, container=key)
    if error is not None:
        yield error
