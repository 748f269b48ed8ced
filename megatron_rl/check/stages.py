"""Rules on the stages before reinforcement learning (sft, preference, reward-model training).

A stage runs as part of a training job, or alone as a separate job (``check CONFIG --for sft``).
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.algorithms.lookup import load_preference_loss
from megatron_rl.config.derive import longest_row
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.stages import PreferenceConfig
from megatron_rl.config.stage_plan import SECTIONS, StagePlan, stage_plans
from megatron_rl.data.records import source_text
from megatron_rl.errors import UserError, requirement_error, single_errors
from megatron_rl.shapes.model import ModelShape

SMOOTHED_LOSSES = ("sigmoid", "robust")
"""Preference losses that ``label_smoothing`` changes."""


def check_stages(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors for the settings of stages, and for a job without the stage or the data it needs.

    A stage is a training phase before reinforcement learning, such as supervised fine-tuning.
    """
    # The job `sft`, `prefer` or `reward-model` runs one stage alone, whose section must be configured. The
    # job `train` runs all stages and then reinforcement learning, which needs data.
    if config.job in SECTIONS:
        yield from _stage_job_errors(config)
    elif not config.data.has_prompts:
        yield from _missing_rl_data_errors(config)
    for plan in stage_plans(config):
        yield from _stage_errors(config, plan)


def _stage_errors(config: RunConfig, plan: StagePlan) -> Iterator[UserError]:
    """Yield the errors for combinations of one stage's settings, such as two fields of the same name."""
    settings = plan.settings

    response_fields = [getattr(settings, name) for name in settings.RESPONSES]
    if len(set(response_fields)) < len(response_fields):
        yield UserError(
            "preferred and rejected responses are read from the same field",
            where=f"{plan.where}.{settings.RESPONSES[-1]}",
            expected="two different fields",
            got=f"`{response_fields[-1]}` for both",
            fix="name the field with the other response",
        )

    # Exactly one of steps and epochs sets the length.
    if settings.steps is None and settings.epochs is None:
        yield _length_error(plan, "neither", f"set {plan.where}.steps=200")
    elif settings.steps is not None and settings.epochs is not None:
        got = f"steps {settings.steps} and epochs {settings.epochs:g}"
        yield _length_error(plan, got, "remove one of them")

    if settings.until_loss is not None and settings.held_out is None:
        fix = f"set {plan.where}.held_out=data/held_out.jsonl, and {plan.where}.evaluate_every=50"
        path = f"{plan.where}.until_loss"
        yield requirement_error(path, settings.until_loss, "held-out data", got="none", fix=fix)

    # A stage of the actor uses the actor's gradient buffers, whose layout depends on `distributed`.
    is_distributed = config.actor.optimizer.distributed
    if config.job == TRAIN and plan.role == "actor" and settings.optimizer.distributed != is_distributed:
        yield UserError(
            "the actor's optimizers share its gradient buffers, which are laid out for one kind of optimizer",
            where=f"{plan.where}.optimizer.distributed",
            expected=f"{is_distributed}, as actor.optimizer.distributed",
            got=str(not is_distributed),
            fix="set both to the same value",
        )


def _length_error(plan: StagePlan, got: str, fix: str) -> UserError:
    """Return the error for a stage with both or neither of ``steps`` and ``epochs``."""
    return UserError(
        "a stage takes a number of steps or a number of epochs",
        where=f"{plan.where}.steps",
        expected=f"one of {plan.where}.steps and {plan.where}.epochs",
        got=got,
        fix=fix,
    )


def _stage_job_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors for a job that runs one stage alone, such as `sft`.

    The section of the stage must be configured, and the job cannot resume from an explicit checkpoint.
    """
    if not stage_plans(config):
        section = SECTIONS[config.job]
        file_name = "pairs"
        if config.job == "sft":
            file_name = "responses"
        example_section = section.replace("NAME", "judge")
        yield UserError(
            f"there is nothing to do for {config.job}",
            where=section,
            expected=f"the section {section}",
            got="nothing",
            fix=f"for example {example_section}.data=data/{file_name}.jsonl, {example_section}.epochs=1",
        )

    # A stage resumes only from its own checkpoints in the run folder. If `checkpoint.resume` is a path, it is
    # the path of a checkpoint of reinforcement learning.
    if config.checkpoint.resume not in ("auto", "never"):
        yield UserError(
            "a stage resumes from its own checkpoints in the run folder",
            where="checkpoint.resume",
            expected="auto or never",
            got=config.checkpoint.resume,
            fix="remove checkpoint.resume; to start from a model, export it and set model.path",
        )


def _missing_rl_data_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the error for the job `train` if it has stages, but no data for reinforcement learning.

    A stage is a training phase before reinforcement learning, such as supervised fine-tuning.
    """
    plans = stage_plans(config)
    for job, section in SECTIONS.items():
        prefix = section.partition(".NAME")[0]
        if any(plan.where.startswith(prefix) for plan in plans):
            yield UserError(
                "the configuration has stages, and no reinforcement learning after them",
                where=plans[0].where,
                expected="data.train, reward and steps, for reinforcement learning",
                got=", ".join(plan.where for plan in plans),
                fix=f"set data.train, reward and steps; or run only the stage: megatron-rl {job} CONFIG "
                f"(to check it first: megatron-rl check CONFIG --for {job})",
            )
            return  # one error, with the command of the first stage


def repeated_record_warnings(plan: StagePlan, record_count: int) -> Iterator[UserError]:
    """Yield the warning about a stage whose step needs more records than its data has."""
    settings = plan.settings

    # A stage of less than one epoch uses only a fraction of the records.
    records_per_step = settings.records_per_step
    if settings.epochs is not None:
        records_per_step = min(records_per_step, round(settings.epochs * record_count))
    if records_per_step > record_count:
        key = f"{plan.where}.{settings.UNIT}s_per_step"
        yield UserError(
            f"a step takes more {settings.UNIT}s than the data has",
            where=key,
            got=f"{records_per_step} {settings.UNIT}s per step, {record_count} in "
            f"{source_text(settings.data)}",
            fix=f"lower {key}, or add data: records would repeat within a step",
        )


def check_preference_loss(loss: str) -> Iterator[UserError]:
    """Yield the error for a user's preference loss that cannot be loaded or called."""
    try:
        load_preference_loss(loss, "preference.loss")
    except UserError as error:
        yield from single_errors(error)


def unused_setting_warnings(config: RunConfig) -> Iterator[UserError]:
    """Yield the warnings about stage settings that have no effect."""
    for plan in stage_plans(config):
        settings = plan.settings
        unused_settings: list[tuple[str, str, str]] = []  # setting, reason, alternative

        if settings.evaluate_every is not None and settings.held_out is None:
            unused_settings.append(("evaluate_every", "no held_out", f"set {plan.where}.held_out"))

        if isinstance(settings, PreferenceConfig):
            loss = f"loss {settings.loss}"
            if settings.label_smoothing and settings.loss not in SMOOTHED_LOSSES:
                alternative = f"choose {' or '.join(SMOOTHED_LOSSES)}"
                unused_settings.append(("label_smoothing", loss, alternative))
            if settings.margin != PreferenceConfig.margin and settings.loss != "simpo":
                unused_settings.append(("margin", loss, "choose simpo"))

        for name, reason, alternative in unused_settings:
            yield UserError(
                f"`{plan.where}.{name}` has no effect",
                where=f"{plan.where}.{name}",
                got=f"{getattr(settings, name):g}, with {reason}",
                fix=f"remove it, or {alternative}",
            )


def check_row_lengths(config: RunConfig, shape: ModelShape | None) -> Iterator[UserError]:
    """Yield the errors for stages whose rows may be longer than the model's positions or a micro-batch.

    A stage is a training phase before reinforcement learning, such as supervised fine-tuning.
    """
    limits: dict[str, int | None] = {}
    if shape is not None:
        limits["the model's positions"] = shape.max_positions
    limits["batch.tokens_per_microbatch"] = config.batch.tokens_per_microbatch

    for plan in stage_plans(config):
        # If a stage has no limit of its own, its rows may be as long as the rows of reinforcement learning.
        # For the job `train`, `check_lengths` and `check_microbatch_budget` test that length. A job that runs
        # one stage alone has only the test here.
        row_tokens = plan.settings.max_row_tokens
        if row_tokens is None and config.job != TRAIN:
            row_tokens = longest_row(config)
        if row_tokens is None:
            continue
        for limit_name, limit in limits.items():
            if limit is not None and row_tokens > limit:
                yield UserError(
                    f"rows may be longer than {limit_name}",
                    where=f"{plan.where}.max_row_tokens",
                    expected=f"at most {limit}",
                    got=str(row_tokens),
                    fix=f"set {plan.where}.max_row_tokens={limit}",
                )
