"""Supervised training, preferences and reward models: one loop, with what differs passed in."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.algorithms import PreferenceSettings, dpo_objective, reward_model_objective, sft_objective
from megatron_rl.checkpoint import roles as checkpoint
from megatron_rl.checkpoint.folders import (
    first,
    in_short,
    model_damages,
    newest_intact,
    require_intact_models,
)
from megatron_rl.config.roles import ACTOR, spec_at, stated_models
from megatron_rl.config.run_folder import set_aside
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.data import fields_of
from megatron_rl.config.sections.stages import PreferenceConfig, SftConfig
from megatron_rl.config.stage_plan import (
    StagePlan,
    models_read,
    pending_stages,
    stage_plans,
    starting_model,
)
from megatron_rl.data.records import DataPath
from megatron_rl.data.responses import ResponseSource, load_responses
from megatron_rl.data.tokenizing import load_tokenizer
from megatron_rl.distributed.exchange import ReplicaGroup, barrier, gather_metrics, gather_objects
from megatron_rl.errors import UserError
from megatron_rl.hf.export import export
from megatron_rl.hf.peft import note_base
from megatron_rl.hf.weights import load_weights
from megatron_rl.megatron.lora import merge_adapters
from megatron_rl.megatron.optimizer import Optimizer, wrap
from megatron_rl.megatron.residency import Use
from megatron_rl.metrics import Metrics
from megatron_rl.roles.build import Roles, build_learner
from megatron_rl.roles.model_role import ModelRole, Objective
from megatron_rl.trainer.checkpoints import Checkpoints, save_for_megatron
from megatron_rl.trainer.job import Job
from megatron_rl.trainer.logging import MetricsLog, Progress
from megatron_rl.types import TrainBatch


@dataclass(frozen=True)
class StageData:
    """Hold the records that a stage learns from and those that its loss is only measured on.

    ``per_step`` records make a step; ``records`` is how many the whole stage takes, so that the last step of
    a whole number of epochs may have fewer.
    """

    train: ResponseSource
    held_out: ResponseSource | None
    per_step: int
    records: int

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return -(-self.records // self.per_step)

    def size(self, step: int) -> int:
        """Return the number of records of a step, counted from 1."""
        return min(self.per_step, self.records - (step - 1) * self.per_step)


@dataclass(frozen=True)
class Stage:
    """Hold what one stage is: who learns, from what, down which objective, and what happens at its end.

    ``how`` are the arguments of `ModelRole.update` beside the objective. With ``needs_reference`` the batches
    hold the log-probs of the policy that the stage starts from. ``at_end`` is called when the model of the
    stage is written. Collective over the world.
    """

    plan: StagePlan
    title: str
    role: ModelRole
    data: StageData
    objective: Objective
    how: Mapping[str, Any] = field(default_factory=dict)
    needs_reference: bool = False
    at_end: Callable[[], None] = lambda: None


def load_stage_data(plan: StagePlan, tokenizer: Any, job: Job) -> StageData:
    """Read and tokenise what a stage learns from; raises UserError for records that do not fit."""
    settings, where, longest = plan.settings, plan.where, plan.settings.max_row_tokens
    data = fields_of(job.config.data, settings, where)
    assert longest is not None

    def source(path: DataPath, name: str) -> ResponseSource:
        fields = {getattr(settings, field): f"{where}.{field}" for field in settings.RESPONSES}
        every_turn = settings.every_turn
        rows = load_responses(
            job.config, f"{where}.{name}", path, tokenizer, job.token_files, fields, longest, every_turn, data
        )
        for remark in rows.remarks():
            job.say(f"{where}.{name}: {remark}")
        return rows

    train = source(settings.data, "data")
    held_out = None if settings.held_out is None else source(settings.held_out, "held_out")
    records = (settings.steps or 0) * settings.per_step
    if settings.epochs is not None:
        records = max(1, round(settings.epochs * len(train)))
    return StageData(train, held_out, settings.per_step, records)


def stage_of(plan: StagePlan, role: ModelRole, data: StageData, at_end: Callable[[], None]) -> Stage:
    """Return the stage that a plan describes."""
    settings = plan.settings
    if isinstance(settings, SftConfig):
        return Stage(plan, "supervised warm-up", role, data, _supervised, at_end=at_end)
    if isinstance(settings, PreferenceConfig):
        assert settings.beta is not None
        loss = PreferenceSettings(
            settings.loss, settings.beta, settings.label_smoothing, settings.margin, settings.sft_coef
        )
        return Stage(
            plan, "training on preferences", role, data, partial(_preferred, loss),
            how={"unit": 2}, needs_reference=settings.loss != "simpo", at_end=at_end,
        )  # fmt: skip
    title = f"reward model {plan.name.removeprefix('reward_')}"
    how = {"unit": 2, "before": False}
    return Stage(plan, title, role, data, reward_model_objective, how=how, at_end=at_end)


def _supervised(rows: TrainBatch, log_probs: Any, entropy: Any) -> Any:
    return sft_objective(rows, log_probs)


def _preferred(settings: PreferenceSettings, rows: TrainBatch, log_probs: Any, entropy: Any) -> Any:
    return dpo_objective(settings, rows, log_probs)


def end_of(plan: StagePlan, roles: Roles, config: RunConfig) -> Callable[[], None]:
    """Return what the end of a stage means to the roles of a run.

    Roles that start from the actor's model get its weights; a trained reward model learns no more.
    """
    if plan.role == "actor":
        return partial(_hand_on, plan, roles, config)
    return next(model.role.freeze for model in roles.reward_models if model.role.name == plan.role)


def _hand_on(plan: StagePlan, roles: Roles, config: RunConfig) -> None:
    """Load the model of the actor's stage into the roles that start from it. Collective over the world."""
    starts = stated_models(config)
    trained = {other.role for other in stage_plans(config) if other.ended and other.role != "actor"}
    for role in roles.models:
        if starts.get(role.name) != str(plan.model) or role.name in trained:
            continue
        if role.base_of is not None:
            continue  # the actor has added what it learned to its weights
        with role.resident(Use.STATE):
            if role.model is not None:
                load_weights(role.model, str(plan.model))
                if role.model.adapters is not None:
                    note_base(role.model, str(plan.model))
            if role.optimizer is not None:
                role.optimizer.reload_parameters()


def require_stages(config: RunConfig) -> None:
    """Raise UserError where a run that resumes lacks a model that one of its stages leaves.

    A checkpoint holds the actor and the critic; the reference, trained reward models and the base of an
    actor's adapters lie beside it.
    """
    for plan in stage_plans(config):
        frozen = [
            path
            for path, model in stated_models(config).items()
            if spec_at(path).phase == ACTOR.phase and not spec_at(path).trains and model == str(plan.model)
        ]
        where = f"{frozen[0] if frozen else 'reference'}.path"
        if plan.role != "actor":
            where = f"{plan.role}.path"
        base = config.actor.lora is not None and starting_model(config) == str(plan.model)
        if plan.ended or (plan.role == "actor" and not (frozen or base)):
            continue
        raise UserError(
            f"the model that {plan.where} has left in the run that is resumed is not in the run folder",
            where=where,
            expected=f"a Hugging Face checkpoint in {plan.model}",
            got="no such directory",
            fix=f"copy it there from the folder of the run that is resumed, or set {where} to it"
            + ("" if plan.role == "actor" else f" and remove {plan.where}"),
        )


def set_damaged_models_aside(job: Job) -> None:
    """Rename the damaged models of stages that have ended: these stages run again from their beginning.

    For a run without a checkpoint to resume from; one with a checkpoint needs the very model that it was
    saved beside. Collective over the world.
    """
    ended = first(lambda: [plan for plan in stage_plans(job.config) if plan.ended])
    for plan in ended:
        problems = model_damages(plan.model)
        if not problems:
            continue
        aside = first(lambda plan=plan: set_aside(plan.model))
        job.say(
            f"warning: {plan.where}: its model is damaged: {in_short(problems)}; it is kept as {aside}, "
            "and the stage runs again"
        )


def run_stage(stage: Stage, job: Job) -> None:
    """Train a role as its stage says, from the stage's newest checkpoint where it has one.

    Leaves the stage's model as a Hugging Face checkpoint, complete or not at all; from then on the stage has
    ended. The role's own optimizer, where it has one, goes on from the trained weights. Collective over the
    world.
    """
    role, plan = stage.role, stage.plan
    own_optimizer = role.optimizer
    with role.resident():
        # A stage that a restart begins with draws what it would have drawn after the stage before.
        checkpoint.seed_generators(job.config.seed, 0, role.model)
        if role.model is not None:
            if own_optimizer is None:
                ddp = job.config.actor.ddp if plan.role == "actor" else None
                wrap(role.model, plan.settings.optimizer.distributed, ddp)
            role.optimizer = Optimizer(role.model, plan.settings.optimizer, stage.data.steps)
        taken = _take_steps(stage, job)
        role.optimizer = own_optimizer
        if own_optimizer is not None:
            own_optimizer.reload_parameters()
        with job.phases("export"):
            if job.config.job != TRAIN and plan.role == "actor":
                save_for_megatron(job.config, role, taken)
            if role.model is not None:
                export(role.model, plan.model, job.config.model.path)
                if role.model.adapters is not None:  # the next stage starts from what this one leaves
                    merge_adapters(role.model, job.config.seed)
                    note_base(role.model, plan.model)
                    if own_optimizer is not None:
                        own_optimizer.reload_parameters()
            barrier()
        stage.at_end()
    drop_checkpoints(plan, job)


def drop_checkpoints(plan: StagePlan, job: Job) -> None:
    """Delete the checkpoints of a stage that has ended, on the main rank."""
    if job.main:
        shutil.rmtree(job.folder.stage_checkpoints(plan.name), ignore_errors=True)


def run_alone(job: Job) -> None:
    """Run the stages of a job that has nothing else; the actor's model is the job's model too.

    Collective over the world.
    """
    config = job.config
    tokenizer = load_tokenizer(config.model.path, job.first_start)
    job.join()
    set_damaged_models_aside(job)
    require_intact_models(first(lambda: models_read(config)))
    pending = gather_objects(pending_stages(config))[0]
    with job.phases("data"):
        data = {plan.where: load_stage_data(plan, tokenizer, job) for plan in pending}
    for plan in stage_plans(config):
        if plan.where in data:
            with job.phases("build"):
                role = build_learner(config, plan)
            at_end = role.freeze
            run_stage(stage_of(plan, role, data[plan.where], at_end), job)
        else:
            job.say(f"{plan.where}: has ended before")
            drop_checkpoints(plan, job)
        if job.main and plan.role == "actor":
            job.folder.publish(plan.model)
        barrier()
        job.say(f"{plan.where}: the model is in {job.folder.model if plan.role == 'actor' else plan.model}")


def _take_steps(stage: Stage, job: Job) -> int:
    """Take the steps that are left, with metrics and checkpoints; return how many there are in all."""
    role, plan, data = stage.role, stage.plan, stage.data
    parts = {role.name: checkpoint.Part(role.model, role.optimizer)}
    folder = job.folder.stage_checkpoints(plan.name)
    newest = newest_intact(folder, job.say)
    done, loss = 0, None
    state: Mapping[str, Any] = {}
    if newest is not None:
        state = checkpoint.read_state(newest)
        done, loss = int(state["step"]), state["held_out_loss"]
        data.train.load_state_dict(state["data"])
    # The reference is the policy before the stage: it scores before the checkpoint is read.
    batches, held_out = _batches(stage, job, done)
    if newest is not None:
        checkpoint.load(newest, parts)
        job.say(f"{stage.title}: resumed from {newest} at step {done}")
    save_every, enough = plan.settings.checkpoint_every, plan.settings.until_loss
    assert save_every is not None

    def write(path: Path, layout: str, beside: bool) -> checkpoint.Saving:
        return checkpoint.save(path, parts, state, keep=1, layout=layout, beside=beside)

    checkpoints = Checkpoints(folder, job.config.checkpoint, write)
    checkpoints.write_anew(newest, done, job)
    with (
        _Record(stage, job, None if newest is None else done) as record,
        Progress(stage.title, data.steps, shown=job.main, console=job.console) as progress,
        job.stop.saves(),
    ):
        progress.advance(done)
        if held_out is not None and newest is None:
            values = record.write(0, _held_out_metrics(stage, held_out, job))
            loss = values[f"{plan.name}/held_out_loss"]
        while done < data.steps and not _reaches(enough, loss):
            batch, position = next(batches)
            job.phases.step = step = done + 1
            with job.phases(plan.name):
                metrics = role.update(batch, stage.objective, **stage.how)
            if held_out is not None and _is_due(step, plan.settings.evaluate_every, data.steps):
                metrics += _held_out_metrics(stage, held_out, job)
            values = record.write(step, metrics)
            loss = values.get(f"{plan.name}/held_out_loss", loss)
            progress.advance(note=f"loss {values[f'{plan.name}/loss']:.3f}")
            state = {"step": step, "seed": job.config.seed, "data": position, "held_out_loss": loss}
            checkpoints.complete_what_is_written()
            # A stage that falls short in its last step can be given more.
            if step == data.steps and enough is not None and not _reaches(enough, loss):
                with job.phases("checkpoint"):
                    checkpoints.save_for_good(step)
            elif step % save_every == 0 and step < data.steps:
                with job.phases("checkpoint"):
                    checkpoints.save_now_and_then(step)
            job.stop_if_asked(checkpoints.save_for_good)
            done = step
        checkpoints.complete()
    if enough is not None:
        _require_good_enough(stage, loss)
        job.say(f"{stage.title}: held-out loss {loss:.3f}, good enough after {done} of {data.steps} steps")
    return done


def _reaches(enough: float | None, loss: float | None) -> bool:
    return enough is not None and loss is not None and loss <= enough


def _require_good_enough(stage: Stage, loss: float | None) -> None:
    """Raise UserError where a stage that trains until a held-out loss has ended above it."""
    plan, enough = stage.plan, stage.plan.settings.until_loss
    if _reaches(enough, loss):
        return
    raise UserError(
        f"the {stage.title} did not get good enough to go on from",
        where=f"{plan.where}.until_loss",
        expected=f"a held-out loss of {enough:g} or less within {stage.data.steps} steps",
        got="no measurement" if loss is None else f"{loss:.4g}",
        fix=f"look at {plan.name}.jsonl in the run folder; give more steps (it goes on from here), another "
        f"learning rate, or a higher {plan.where}.until_loss",
    )


def _is_due(step: int, every: int | None, last: int) -> bool:
    return step == last or (every is not None and step % every == 0)


def _batches(
    stage: Stage, job: Job, done: int
) -> tuple[Iterator[tuple[TrainBatch, Mapping[str, Any]]], TrainBatch | None]:
    """Return the batches after ``done`` steps, each with the data's position after it, and held-out rows.

    Where the stage needs a reference all are scored now, before the policy learns from the first.
    """
    data = stage.data

    def drawn() -> Iterator[tuple[TrainBatch, Mapping[str, Any]]]:
        for step in range(done + 1, data.steps + 1):
            batch = data.train.next(data.size(step))
            yield batch, data.train.state_dict()

    def scored(batch: TrainBatch) -> TrainBatch:
        log_probs = ReplicaGroup().gather_rows(stage.role.infer(batch)).tokens["old_log_probs"]
        return replace(batch, ref_log_probs=log_probs)

    held_out = None if data.held_out is None else data.held_out.everything()
    if not stage.needs_reference:
        return drawn(), held_out
    with job.phases("score"):
        batches = [(scored(batch), position) for batch, position in drawn()]
        return iter(batches), held_out and scored(held_out)


def _held_out_metrics(stage: Stage, held_out: TrainBatch, job: Job) -> Metrics:
    """Return the objective's metrics on held-out rows, named ``held_out_`` in their group."""
    with job.phases("evaluate"):
        metrics = stage.role.measure(held_out, stage.objective, **stage.how)
    return Metrics({name.replace("/", "/held_out_", 1): value for name, value in metrics.sums.items()})


class _Record:
    """Write a line per step of a stage, the same values on every rank; a context manager."""

    def __init__(self, stage: Stage, job: Job, resumed_step: int | None) -> None:
        self._name, self._prefix = stage.plan.name, f"{stage.role.prefix}/"
        self._phases = job.phases
        self._log = None
        if job.main:
            self._log = MetricsLog(
                job.folder,
                stage.data.steps,
                resumed_step=resumed_step,
                phase=self._name,
                console=job.console,
                trackers=job.trackers,
            )

    def write(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Return the values of all ranks under the stage's name. Collective over the world."""
        values = gather_metrics(metrics + self._phases.metrics()).values()
        values = {name.replace(self._prefix, f"{self._name}/"): value for name, value in values.items()}
        if self._log is not None:
            self._log.write(step, values, shown=False)
        return values

    def __enter__(self) -> _Record:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()
