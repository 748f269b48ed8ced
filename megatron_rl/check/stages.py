"""Rules of the stages before reinforcement learning, and of jobs that are one of them alone."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.derive import longest_row
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.stages import PreferenceConfig
from megatron_rl.config.stage_plan import SECTIONS, StagePlan, stage_plans
from megatron_rl.data.records import source_text
from megatron_rl.errors import UserError
from megatron_rl.shapes.model import ModelShape

SMOOTHED = ("sigmoid", "robust")
"""Losses of pairs that ``label_smoothing`` changes."""


def check_stages(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors of how long stages take, of their optimizers, and of a job without a stage."""
    if config.job in SECTIONS:
        yield from _check_job(config)
    elif config.data.train is None:
        yield from _check_alone(config)
    for plan in stage_plans(config):
        fields = [getattr(plan.settings, name) for name in plan.settings.RESPONSES]
        if len(set(fields)) < len(fields):
            yield UserError(
                "preferred and rejected responses are read from the same field",
                where=f"{plan.where}.{plan.settings.RESPONSES[-1]}",
                expected="two different fields",
                got=f"`{fields[-1]}` for both",
                fix="name the field that holds the other response",
            )
        steps, epochs = plan.settings.steps, plan.settings.epochs
        if (steps is None) == (epochs is None):
            yield UserError(
                "a stage takes a number of steps or a number of epochs",
                where=f"{plan.where}.steps",
                expected=f"one of {plan.where}.steps and {plan.where}.epochs",
                got="neither" if steps is None else f"steps {steps} and epochs {epochs:g}",
                fix=f"set {plan.where}.steps=200" if steps is None else "remove one of them",
            )
        if plan.settings.until_loss is not None and plan.settings.held_out is None:
            yield UserError(
                "a stage is good enough by its loss on held-out data, and there is none",
                where=f"{plan.where}.held_out",
                expected=f"records to measure {plan.where}.until_loss on",
                got="nothing",
                fix=f"set {plan.where}.held_out=data/held_out.jsonl, and {plan.where}.evaluate_every=50",
            )
        actor = config.actor.optimizer.distributed
        if config.job == TRAIN and plan.role == "actor" and plan.settings.optimizer.distributed != actor:
            yield UserError(
                "the actor's optimizers share its gradient buffers, which are laid out for one kind",
                where=f"{plan.where}.optimizer.distributed",
                expected=f"{actor}, as actor.optimizer.distributed",
                got=str(not actor),
                fix="set both to the same value",
            )


def _check_job(config: RunConfig) -> Iterator[UserError]:
    if not stage_plans(config):
        section = SECTIONS[config.job]
        data = "responses" if config.job == "sft" else "pairs"
        yield UserError(
            f"there is nothing to do for {config.job}",
            where=section,
            expected=f"the section {section}",
            got="nothing",
            fix=f"for example {section.replace('NAME', 'judge')}.data=data/{data}.jsonl, "
            f"{section.replace('NAME', 'judge')}.epochs=1",
        )
    if config.checkpoint.resume not in ("auto", "never"):
        yield UserError(
            "a stage goes on from its own checkpoints in the run folder",
            where="checkpoint.resume",
            expected="auto or never",
            got=config.checkpoint.resume,
            fix="remove checkpoint.resume; to start from a model, export it and set model.path",
        )


def _check_alone(config: RunConfig) -> Iterator[UserError]:
    """Yield the error of a run of stages alone, which was meant for their own commands."""
    jobs = [
        job
        for job, section in SECTIONS.items()
        if any(plan.where.startswith(section.partition(".NAME")[0]) for plan in stage_plans(config))
    ]
    if jobs:
        yield UserError(
            "there is training before reinforcement learning, and no reinforcement learning",
            where=stage_plans(config)[0].where,
            expected="data.train, reward and steps beside it",
            got=", ".join(plan.where for plan in stage_plans(config)),
            fix=f"for the stage alone: python -m megatron_rl {jobs[0]} CONFIG; check CONFIG --for {jobs[0]}",
        )


def repeated_records(plan: StagePlan, records: int) -> Iterator[UserError]:
    """Yield the warning of a step that takes more than all ``records`` of a stage's data."""
    settings = plan.settings
    size = settings.per_step
    if settings.epochs is not None:
        size = min(size, round(settings.epochs * records))
    if size > records:
        where = f"{plan.where}.{settings.UNIT}s_per_step"
        yield UserError(
            f"a step takes more {settings.UNIT}s than the data has",
            where=where,
            got=f"{size} {settings.UNIT}s per step, {records} in {source_text(settings.data)}",
            fix=f"lower {where}, or add data: records would repeat within a step",
        )


def unused_settings(config: RunConfig) -> Iterator[UserError]:
    """Yield the warnings of settings of stages that have no effect."""
    for plan in stage_plans(config):
        settings, unused = plan.settings, []
        if settings.evaluate_every is not None and settings.held_out is None:
            unused.append(("evaluate_every", "no held_out", f"set {plan.where}.held_out"))
        if isinstance(settings, PreferenceConfig):
            loss = f"loss {settings.loss}"
            if settings.label_smoothing and settings.loss not in SMOOTHED:
                unused.append(("label_smoothing", loss, f"choose {' or '.join(SMOOTHED)}"))
            if settings.margin != PreferenceConfig.margin and settings.loss != "simpo":
                unused.append(("margin", loss, "choose simpo"))
        for name, why, other in unused:
            yield UserError(
                "a setting of a stage has no effect",
                where=f"{plan.where}.{name}",
                got=f"{getattr(settings, name):g}, with {why}",
                fix=f"remove it, or {other}",
            )


def check_row_lengths(config: RunConfig, shape: ModelShape | None) -> Iterator[UserError]:
    """Yield the errors of rows of stages that are longer than the model's positions or a micro-batch."""
    budget = config.batch.tokens_per_microbatch
    for plan in stage_plans(config):
        longest = plan.settings.max_row_tokens
        if longest is None and config.job != TRAIN:
            longest = longest_row(config)
        limits = {
            "the model's positions": None if shape is None else shape.max_positions,
            "batch.tokens_per_microbatch": budget,
        }
        for name, limit in limits.items():
            if longest is not None and limit is not None and longest > limit:
                yield UserError(
                    f"rows may be longer than {name}",
                    where=f"{plan.where}.max_row_tokens",
                    expected=f"at most {limit}",
                    got=str(longest),
                    fix=f"set {plan.where}.max_row_tokens={limit}",
                )
