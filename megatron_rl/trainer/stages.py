"""Stages before reinforcement learning: supervised training, preferences and reward models.

The same loop runs the steps of every stage. A `Stage` contains everything that differs between stages: the
role, its data, the objective and the options of an update.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.algorithms import (
    PreferenceSettings,
    dpo_objective,
    reward_model_objective,
    sft_objective,
)
from megatron_rl.algorithms.lookup import load_preference_loss
from megatron_rl.checkpoint import roles as checkpoint
from megatron_rl.checkpoint.folders import (
    compute_on_first_rank,
    find_damaged_model_files,
    find_newest_intact_checkpoint,
    require_intact_models,
    summarize_damages,
)
from megatron_rl.config.roles import ACTOR, explicit_model_paths, spec_at
from megatron_rl.config.run_folder import set_aside
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.data import fields_of
from megatron_rl.config.sections.stages import PreferenceConfig, SftConfig
from megatron_rl.config.stage_plan import (
    StagePlan,
    existing_models,
    pending_stages,
    stage_plans,
    starting_model,
)
from megatron_rl.data.records import DataPath
from megatron_rl.data.sources import ResponseSource, load_responses
from megatron_rl.data.tokenizing import load_tokenizer
from megatron_rl.distributed.exchange import (
    ReplicaGroup,
    barrier,
    gather_metrics,
    gather_objects,
)
from megatron_rl.errors import UserError
from megatron_rl.hf.export import export_model
from megatron_rl.hf.peft import record_base_checksum
from megatron_rl.hf.weights import load_weights
from megatron_rl.megatron.lora import merge_adapters
from megatron_rl.megatron.optimizer import Optimizer, wrap_in_ddp
from megatron_rl.megatron.residency import ResidencyLevel
from megatron_rl.metrics import Metrics
from megatron_rl.roles.build import Roles, build_learner
from megatron_rl.roles.model_role import ModelRole, Objective
from megatron_rl.trainer.job import Job
from megatron_rl.trainer.logging import MetricsLog, Progress
from megatron_rl.trainer.microbatches import announce_split_passes
from megatron_rl.trainer.state import Checkpoints, save_for_megatron
from megatron_rl.types import TrainBatch

ROWS_PER_PAIR = 2
"""Number of rows of a preference pair, the chosen and the rejected response: both are in one micro-batch."""


@dataclass(frozen=True)
class StageData:
    """Training and held-out records of a stage, with the number of records per step.

    Example: 20 records with 8 per step are 3 steps, the last with 4 records.
    """

    train: ResponseSource
    """Training records."""
    held_out: ResponseSource | None
    """Records on which the loss is only evaluated, or None."""
    records_per_step: int
    """Number of records per step."""
    total_records: int
    """Number of records of the whole stage: several epochs of ``train``, or a part of one."""

    @property
    def steps(self) -> int:
        """Return the number of steps of the stage; its last step may have fewer records."""
        return math.ceil(self.total_records / self.records_per_step)

    def count_records(self, step: int) -> int:
        """Return the number of records in a step; steps are counted from 1."""
        earlier_records = (step - 1) * self.records_per_step
        return min(self.records_per_step, self.total_records - earlier_records)


@dataclass(frozen=True)
class Stage:
    """One stage: the role that is trained, its data and objective, and the action at its end.

    Example: a supervised warm-up has the actor as ``role``, `sft_objective` and no ``options``.
    """

    plan: StagePlan
    """Settings and model folder of the stage, derived from the configuration."""
    title: str
    """Name of the stage in messages and in the progress bar."""
    role: ModelRole
    """The role that is trained."""
    data: StageData
    """Records for training and evaluation."""
    objective: Objective
    """Loss and metrics of a micro-batch."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `ModelRole.update` that the stage needs."""
    needs_reference: bool = False
    """Whether the objective needs log-probs of the policy with which the stage starts."""
    at_end: Callable[[], None] = lambda: None
    """Function that is called after the stage's model has been written. Collective over the world."""


def load_stage_data(plan: StagePlan, tokenizer: Any, job: Job) -> StageData:
    """Load and tokenise the records of a stage; raise UserError for invalid records."""
    settings = plan.settings
    max_row_tokens = settings.max_row_tokens
    data_fields = fields_of(job.config.data, settings, plan.where)
    assert max_row_tokens is not None

    def load_source(path: DataPath, setting: str) -> ResponseSource:
        """Load the records at ``path``, and print remarks about them.

        ``setting``: name of the stage's setting that contains ``path``.
        """
        key = f"{plan.where}.{setting}"
        # Errors about a record contain the configuration key that selects its field.
        key_by_field = {getattr(settings, field): f"{plan.where}.{field}" for field in settings.RESPONSES}
        source = load_responses(
            job.config,
            key,
            path,
            tokenizer,
            job.token_files,
            key_by_field,
            max_row_tokens,
            settings.every_turn,
            data_fields,
        )

        for remark in source.remarks():
            job.print(f"{key}: {remark}")
        return source

    train = load_source(settings.data, "data")
    held_out = None
    if settings.held_out is not None:
        held_out = load_source(settings.held_out, "held_out")

    # The length of a stage is configured in steps or in epochs.
    total_records = (settings.steps or 0) * settings.records_per_step
    if settings.epochs is not None:
        total_records = max(1, round(settings.epochs * len(train)))
    return StageData(train, held_out, settings.records_per_step, total_records)


def make_stage(
    plan: StagePlan,
    role: ModelRole,
    data: StageData,
    at_end: Callable[[], None],
) -> Stage:
    """Create the stage of a plan, with its title, objective and options."""
    # Supervised training needs no options, since the loss of a row does not depend on other rows.
    settings = plan.settings
    if isinstance(settings, SftConfig):
        return Stage(
            plan,
            "supervised warm-up",
            role,
            data,
            _sft_objective,
            at_end=at_end,
        )

    # Preference losses compare the two rows of a pair. SimPO needs no reference (arXiv 2405.14734).
    if isinstance(settings, PreferenceConfig):
        assert settings.beta is not None
        loss_settings = PreferenceSettings(
            settings.loss,
            settings.beta,
            settings.label_smoothing,
            settings.margin,
            settings.sft_coef,
            load_preference_loss(settings.loss, f"{plan.where}.loss"),
        )
        return Stage(
            plan,
            "training on preferences",
            role,
            data,
            partial(preference_objective, loss_settings),
            options={"rows_per_unit": ROWS_PER_PAIR},
            needs_reference=settings.loss != "simpo",
            at_end=at_end,
        )

    # A reward model's output at a token is the reward of the text up to this token, not a prediction of the
    # next token.
    title = f"reward model {plan.name.removeprefix('reward_')}"
    options = {"rows_per_unit": ROWS_PER_PAIR, "from_previous_token": False}
    return Stage(
        plan,
        title,
        role,
        data,
        reward_model_objective,
        options=options,
        at_end=at_end,
    )


def _sft_objective(rows: TrainBatch, log_probs: Any, entropy: Any) -> Any:
    """Compute the supervised loss of ``rows`` from the model's log-probs; ignore the entropy."""
    return sft_objective(rows, log_probs)


def preference_objective(
    settings: PreferenceSettings,
    rows: TrainBatch,
    log_probs: Any,
    entropy: Any,
) -> Any:
    """Compute the preference loss of ``rows``, which are pairs, from the log-probs; ignore the entropy."""
    return dpo_objective(settings, rows, log_probs)


def make_stage_end_action(plan: StagePlan, roles: Roles, config: RunConfig) -> Callable[[], None]:
    """Return the function to call when a stage has ended.

    After the actor's stage, it loads the trained weights into the roles that start from the actor's model.
    After a reward model's stage, it freezes the reward model.
    """
    # Roles with separate models still have the actor's weights from before the stage.
    if plan.role == "actor":
        return partial(_load_into_dependent_roles, plan, roles, config)
    reward_roles = {model.role.name: model.role for model in roles.reward_models}
    return reward_roles[plan.role].freeze


def _load_into_dependent_roles(plan: StagePlan, roles: Roles, config: RunConfig) -> None:
    """Load the actor's newly trained weights into all roles that are initialised from them.

    ``plan``: the completed training stage of the actor, such as SFT, whose model is in the folder
    ``plan.model``. Collective over the world.
    """
    model_path_by_role = explicit_model_paths(config)
    completed_plans = [stage_plan for stage_plan in stage_plans(config) if stage_plan.has_ended]
    trained_roles = {stage_plan.role for stage_plan in completed_plans if stage_plan.role != "actor"}
    for role in roles.models:
        # Skip roles that start from another model, and roles that another stage has trained since.
        if model_path_by_role.get(role.name) != str(plan.model) or role.name in trained_roles:
            continue
        # A role that shares the actor's model in memory already has the trained weights.
        if role.shares_model_with is not None:
            continue

        with role.resident(ResidencyLevel.WEIGHTS_AND_OPTIMIZER):
            if role.model is not None:
                load_weights(role.model, str(plan.model))
                if role.model.adapters is not None:
                    record_base_checksum(role.model, str(plan.model))
            # Update the optimizer's float32 copies of the weights.
            if role.optimizer is not None:
                role.optimizer.reload_parameters()


def require_stage_models(config: RunConfig) -> None:
    """Raise UserError if a resumed run needs a stage's model and its folder does not exist.

    A stage is a training before RL, such as SFT. A checkpoint of the run contains only the weights of actor
    and critic. The reference, trained reward models and the base weights of the actor's adapters are loaded
    from the models that the stages wrote into the run folder.
    """
    for plan in stage_plans(config):
        # Frozen roles that start from the stage's model load it again, and adapters need it as their base.
        frozen_roles: list[str] = []
        for section, model in explicit_model_paths(config).items():
            role_spec = spec_at(section)
            if role_spec.phase == ACTOR.phase and not role_spec.trains and model == str(plan.model):
                frozen_roles.append(section)
        is_base = config.actor.lora is not None and starting_model(config) == str(plan.model)
        is_needed = plan.role != "actor" or bool(frozen_roles) or is_base
        # `has_ended` is true if the folder of the stage's model exists.
        if plan.has_ended or not is_needed:
            continue

        # Never advise to remove the actor's stage: the checkpoint was trained from its model.
        if plan.role == "actor":
            frozen_role = frozen_roles[0] if frozen_roles else "reference"
            key = f"{frozen_role}.path"
            alternative_fix = f"set {key} to it"
        else:
            key = f"{plan.role}.path"
            alternative_fix = f"set {key} to it and remove {plan.where}"
        raise UserError(
            f"the model of {plan.where} in the resumed run is not in the run folder",
            where=key,
            expected=f"a Hugging Face checkpoint in {plan.model}",
            got="no such directory",
            fix=f"copy it there from the folder of the resumed run, or {alternative_fix}",
        )


def set_damaged_models_aside(job: Job) -> None:
    """Rename damaged models of completed stages, so that these stages run again.

    Call it only for a run without a checkpoint: a checkpoint needs exactly the models with which it was
    trained. Collective over the world.
    """
    completed_plans = compute_on_first_rank(
        lambda: [plan for plan in stage_plans(job.config) if plan.has_ended]
    )
    for plan in completed_plans:
        damages = find_damaged_model_files(plan.model)
        if not damages:
            continue

        new_path = compute_on_first_rank(lambda plan=plan: set_aside(plan.model))
        job.print(
            f"warning: {plan.where}: its model is damaged: {summarize_damages(damages)}; "
            f"it is renamed to {new_path}, and the stage runs again"
        )


def run_stage(stage: Stage, job: Job) -> None:
    """Train the stage's role, and write the trained model as a Hugging Face checkpoint.

    The training resumes from the stage's newest checkpoint, if there is one. The model is written atomically:
    a stage is complete if its model folder exists. If the role already has the optimizer of the run, the
    float32 weights of this optimizer are set to the trained weights. Collective over the world.
    """
    role = stage.role
    plan = stage.plan
    run_optimizer = role.optimizer
    with role.resident():
        # Seed again, so that a stage gets the same random numbers after another stage and after a restart.
        checkpoint.seed_all_generators(job.config.seed, 0, role.model)
        if role.model is not None:
            # A role with an optimizer has already been wrapped in DDP.
            if run_optimizer is None:
                ddp = job.config.actor.ddp if plan.role == "actor" else None
                wrap_in_ddp(role.model, plan.settings.optimizer.distributed, ddp)
            role.optimizer = Optimizer(role.model, plan.settings.optimizer, stage.data.steps)

        steps = _run_steps(stage, job)

        role.optimizer = run_optimizer
        if run_optimizer is not None:
            run_optimizer.reload_parameters()
        with job.phases("export"):
            if job.config.job != TRAIN and plan.role == "actor":
                save_for_megatron(job.config, role, steps)
            _export_stage_model(stage, job)
            barrier()
        stage.at_end()
    delete_checkpoints(plan, job)


def _export_stage_model(stage: Stage, job: Job) -> None:
    """Write the stage's model, without separate adapters, and merge its adapters in memory.

    `export_model` writes merged weights without changing the model in memory. `merge_adapters` then makes the
    weights in memory equal to the written weights. Collective over the role's ranks.
    """
    model = stage.role.model
    if model is None:
        return
    export_model(model, stage.plan.model, job.config.model.path)
    if model.adapters is not None:
        merge_adapters(model, job.config.seed)
        record_base_checksum(model, stage.plan.model)
        if stage.role.optimizer is not None:
            stage.role.optimizer.reload_parameters()


def delete_checkpoints(plan: StagePlan, job: Job) -> None:
    """Delete the checkpoints of a completed stage, on the main rank; its model remains."""
    if job.is_main:
        shutil.rmtree(job.folder.stage_checkpoints(plan.name), ignore_errors=True)


def run_only_stages(job: Job) -> None:
    """Run the stages of a job that has no reinforcement learning.

    The model of the actor's last stage becomes the job's model, in ``model/`` of the run folder. Collective
    over the world.
    """
    config = job.config
    tokenizer = load_tokenizer(config.model.path, job.first_start)
    job.join_ranks()
    set_damaged_models_aside(job)
    require_intact_models(compute_on_first_rank(lambda: existing_models(config)))

    # Use the first rank's result: for a short time, ranks can read different states of a shared file system.
    stages_to_run = gather_objects(pending_stages(config))[0]
    with job.phases("data"):
        data_by_key = {plan.where: load_stage_data(plan, tokenizer, job) for plan in stages_to_run}

    # Build a new role for every stage, from the model of the previous stage.
    for plan in stage_plans(config):
        if plan.where in data_by_key:
            with job.phases("build"):
                role = build_learner(config, plan)
            run_stage(
                make_stage(plan, role, data_by_key[plan.where], role.freeze),
                job,
            )
        else:
            job.print(f"{plan.where}: complete since an earlier job")
            delete_checkpoints(plan, job)

        path = plan.model
        if plan.role == "actor":
            path = job.folder.model
            if job.is_main:
                job.folder.publish_model(plan.model)
        barrier()
        job.print(f"{plan.where}: the model is in {path}")


def _run_steps(stage: Stage, job: Job) -> int:
    """Run the remaining steps of a stage, with metrics and checkpoints; return the number of its last step.

    Collective over the world.
    """
    role = stage.role
    plan = stage.plan
    data = stage.data
    loss_target = plan.settings.until_loss
    save_every = plan.settings.checkpoint_every
    assert save_every is not None

    # Read the state of the stage's newest checkpoint, if there is one.
    trained_roles = {role.name: checkpoint.TrainedRole(role.model, role.optimizer)}
    folder = job.folder.stage_checkpoints(plan.name)
    newest_checkpoint = find_newest_intact_checkpoint(folder, job.print)
    step = 0
    loss: float | None = None
    state: Mapping[str, Any] = {}
    if newest_checkpoint is not None:
        state = checkpoint.read_state(newest_checkpoint)
        step = int(state["step"])
        loss = state["held_out_loss"]
        data.train.load_state_dict(state["data"])

    # Prepare the batches before the checkpoint's weights are loaded: the reference is the policy from before
    # the stage, and computes the log-probs of all batches here.
    batches, held_out = _prepare_batches(stage, job, step)
    if newest_checkpoint is not None:
        checkpoint.load_checkpoint(newest_checkpoint, trained_roles)
        job.print(f"{stage.title}: resumed from {newest_checkpoint} at step {step}")

    def write_checkpoint(
        path: Path,
        optimizer_format: str,
        in_background: bool,
    ) -> checkpoint.PendingCheckpoint:
        """Write a checkpoint of the current step.

        See `checkpoint.save_checkpoint` for ``optimizer_format`` and ``in_background``.
        """
        # Retain a single checkpoint; it is deleted when the stage's model has been written.
        return checkpoint.save_checkpoint(
            path,
            trained_roles,
            state,
            keep=1,
            optimizer_format=optimizer_format,
            in_background=in_background,
        )

    checkpoints = Checkpoints(folder, job.config.checkpoint, write_checkpoint)
    checkpoints.rewrite_for_any_layout(newest_checkpoint, step, job)
    with (
        _StageLog(stage, job, None if newest_checkpoint is None else step) as log,
        Progress(stage.title, data.steps, enabled=job.is_main, console=job.console) as progress,
        job.stop.defer_stops(),
    ):
        progress.advance(step)
        # Evaluate the loss before the first step, since it may already have reached the target.
        if held_out is not None and newest_checkpoint is None:
            values = log.write(0, _held_out_metrics(stage, held_out, job))
            loss = values[f"{plan.name}/held_out_loss"]

        while step < data.steps and not _has_reached_target(loss_target, loss):
            batch, data_state = next(batches)
            step += 1
            job.phases.step = step
            with job.phases(plan.name):
                metrics = role.update(batch, stage.objective, **stage.options) + role.pass_metrics()
            if held_out is not None and _is_scheduled(step, plan.settings.evaluate_every, data.steps):
                metrics += _held_out_metrics(stage, held_out, job)

            # All ranks get the same gathered loss, so that they make the same decisions.
            values = log.write(step, metrics)
            announce_split_passes(job, values)
            loss = values.get(f"{plan.name}/held_out_loss", loss)
            progress.advance(note=f"loss {values[f'{plan.name}/loss']:.3f}")
            state = {
                "step": step,
                "seed": job.config.seed,
                "data": data_state,
                "held_out_loss": loss,
            }

            checkpoints.finish_if_written()
            is_last = step == data.steps
            if is_last and loss_target is not None and not _has_reached_target(loss_target, loss):
                # The stage will fail, but a user can resume it from here with more steps.
                with job.phases("checkpoint"):
                    checkpoints.save_final(step)
            elif step % save_every == 0 and not is_last:
                with job.phases("checkpoint"):
                    checkpoints.save_periodic(step)
            job.stop_if_requested(checkpoints.save_final)
        checkpoints.wait_for_pending()

    if loss_target is not None:
        _require_target_loss(stage, loss)
        job.print(
            f"{stage.title}: held-out loss {loss:.3f}, target reached after {step} of {data.steps} steps"
        )
    return step


def _has_reached_target(target: float | None, loss: float | None) -> bool:
    """Return whether a held-out loss has reached its stage's target; False without a target or a loss."""
    return target is not None and loss is not None and loss <= target


def _require_target_loss(stage: Stage, loss: float | None) -> None:
    """Raise UserError if a stage has ended with a held-out loss above its `until_loss`."""
    plan = stage.plan
    target = plan.settings.until_loss
    if _has_reached_target(target, loss):
        return
    raise UserError(
        f"the {stage.title} did not reach its target loss",
        where=f"{plan.where}.until_loss",
        expected=f"a held-out loss of {target:g} or less within {stage.data.steps} steps",
        got="no measurement" if loss is None else f"{loss:.4g}",
        fix=f"inspect {plan.name}.jsonl in the run folder; set more steps (the stage resumes from here), "
        f"another learning rate, or a higher {plan.where}.until_loss",
    )


def _is_scheduled(step: int, interval: int | None, last_step: int) -> bool:
    """Return whether an action runs after ``step``: every ``interval`` steps, and after the last step.

    ``interval``: None for an action only after the last step.
    """
    return step == last_step or (interval is not None and step % interval == 0)


def _prepare_batches(
    stage: Stage, job: Job, completed_steps: int
) -> tuple[Iterator[tuple[TrainBatch, Mapping[str, Any]]], TrainBatch | None]:
    """Return an iterator over the remaining batches, and the batch of held-out rows or None.

    The iterator yields each batch with the state of the data source after this batch, which a checkpoint
    stores. If the stage needs a reference, this computes the log-probs of all batches with the current
    weights. Collective over the world.
    """
    data = stage.data

    def draw_batches() -> Iterator[tuple[TrainBatch, Mapping[str, Any]]]:
        """Yield the batch of each remaining step, with the state of the data source after this batch."""
        for step in range(completed_steps + 1, data.steps + 1):
            batch = data.train.next_batch(data.count_records(step))
            yield batch, data.train.state_dict()

    def add_reference_log_probs(batch: TrainBatch) -> TrainBatch:
        """Compute a batch's log-probs with the current weights, and store them as the reference's."""
        log_probs = ReplicaGroup().gather_rows(stage.role.infer(batch)).tokens["old_log_probs"]
        return replace(batch, ref_log_probs=log_probs)

    # Held-out rows form a single batch, so that their loss is a mean over all of them.
    held_out: TrainBatch | None = None
    if data.held_out is not None:
        held_out = data.held_out.batch_in_file_order()
    if not stage.needs_reference:
        return draw_batches(), held_out

    # Compute the log-probs now: the current weights are the reference, and the first update changes them.
    with job.phases("score"):
        batches = [(add_reference_log_probs(batch), data_state) for batch, data_state in draw_batches()]
        if held_out is not None:
            held_out = add_reference_log_probs(held_out)
        return iter(batches), held_out


def _held_out_metrics(stage: Stage, held_out: TrainBatch, job: Job) -> Metrics:
    """Return the objective's metrics on held-out rows, named ``GROUP/held_out_NAME``.

    Collective over the role's ranks.
    """
    with job.phases("evaluate"):
        metrics = stage.role.eval_step(held_out, stage.objective, **stage.options)
    return Metrics({name.replace("/", "/held_out_", 1): value for name, value in metrics.sums.items()})


class _StageLog:
    """Metrics log of a stage with a line per step; a context manager, which all ranks construct."""

    def __init__(self, stage: Stage, job: Job, resumed_step: int | None) -> None:
        self._name = stage.plan.name
        self._prefix = f"{stage.role.metric_prefix}/"
        self._phases = job.phases
        self._log: MetricsLog | None = None
        if job.is_main:
            self._log = MetricsLog(
                job.folder,
                stage.data.steps,
                resumed_step=resumed_step,
                phase=self._name,
                console=job.console,
                trackers=job.trackers,
            )

    def write(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Gather a step's metrics, write them under the stage's name, and return them on every rank.

        Collective over the world.
        """
        values = gather_metrics(metrics + self._phases.metrics()).values()
        values = {name.replace(self._prefix, f"{self._name}/"): value for name, value in values.items()}
        if self._log is not None:
            self._log.write(step, values, to_console=False)
        return values

    def __enter__(self) -> _StageLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()
