"""A complete run: build or restore the roles, run stages and steps, evaluate, save, export and report."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.algorithms import Algorithm, algorithm_of, initial_state
from megatron_rl.callbacks import Callbacks
from megatron_rl.checkpoint import roles as checkpoint
from megatron_rl.checkpoint.folders import (
    compute_on_first_rank,
    find_newest_intact_checkpoint,
    require_intact_checkpoint,
    require_intact_models,
)
from megatron_rl.config.health import health_rules
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.stage_plan import (
    StagePlan,
    existing_models,
    pending_stages,
    stage_plans,
)
from megatron_rl.config.token_budget import initial_budget
from megatron_rl.data.mixture import load_training_prompts
from megatron_rl.data.records import DataPath
from megatron_rl.data.sources import PromptSource, load_prompts
from megatron_rl.data.tokenizing import format_warning, load_tokenizer
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import (
    barrier,
    gather_metrics,
    gather_objects,
)
from megatron_rl.errors import UserError, first_line
from megatron_rl.hf.export import export_model
from megatron_rl.megatron.residency import ResidencyLevel
from megatron_rl.metrics import Metrics
from megatron_rl.rewards.function import Failure
from megatron_rl.roles.build import Roles, build_roles
from megatron_rl.trainer.asynchrony import AheadBatches
from megatron_rl.trainer.engine_check import check_engine
from megatron_rl.trainer.evaluation import (
    EvaluationSet,
    evaluate,
    make_evaluation_sets,
    reward_responses,
)
from megatron_rl.trainer.health import HealthMonitor
from megatron_rl.trainer.job import Job, Stopped, copy_code, open_job
from megatron_rl.trainer.logging import MetricsLog, Progress
from megatron_rl.trainer.loop import (
    BatchSource,
    SameStepBatches,
    StepResult,
    gather_step_metrics,
    train_step,
)
from megatron_rl.trainer.microbatches import MicroBatchControl
from megatron_rl.trainer.report import write_report
from megatron_rl.trainer.rewards import FailureWatch, ScoredBatch, source_metrics
from megatron_rl.trainer.sample import RolloutSource, SampledBatch
from megatron_rl.trainer.sample_log import SampleWriter
from megatron_rl.trainer.stages import (
    delete_checkpoints,
    load_stage_data,
    make_stage,
    make_stage_end_action,
    require_stage_models,
    run_only_stages,
    run_stage,
    set_damaged_models_aside,
)
from megatron_rl.trainer.state import (
    Checkpoints,
    DeferredEvaluation,
    TrainerState,
    save_for_megatron,
    save_missing_for_megatron,
)
from megatron_rl.types import Rollouts


def run(config: RunConfig, explicit_keys: Sequence[str] = ()) -> None:
    """Run the job of a resolved and checked configuration; write its results to ``config.run_dir``.

    ``explicit_keys``: configuration keys that the user has set. The record of this launch in ``starts.json``
    contains them. Collective over the world.
    """
    with open_job(config, explicit_keys) as current_job:
        if config.job != TRAIN:
            run_only_stages(current_job)
            return

        training = Training(current_job)
        try:
            training.run()
        except Stopped:
            # Release the servers: a resumed run would otherwise wait until this run's lease expires.
            training.roles.close()
            raise


@dataclass
class RunStep:
    """Step of a run: `Training.steps` yields it, and the caller of `steps` executes it."""

    number: int
    """Number of the step, from 1."""
    sets: Sequence[EvaluationSet]
    """Sets of a deferred evaluation of the previous step: responses to them are sampled in this step."""
    result: StepResult | None = None
    """Result of the step, set by the caller; None on ranks that only sample."""
    responses: list[Rollouts] = field(default_factory=list)
    """Responses to ``sets``, set by the caller."""


class Training:
    """A run of reinforcement learning on this rank, with the stages before it.

    The command ``train`` calls `run`. With `trainer.dataflow.Run`, a user's script iterates over `steps` and
    executes each step itself.
    """

    def __init__(self, job: Job) -> None:
        config = job.config
        self.job = job
        self.config = config
        self.folder = job.folder
        self.phases = job.phases
        self.algorithm: Algorithm = algorithm_of(config)
        self.tokenizer: Any = load_tokenizer(config.model.path, job.first_start)

        # Load the data first, so that its errors are raised before the ranks communicate or models are built.
        with self.phases("data"):
            self.prompts, prompts_by_key = load_training_prompts(config, self.tokenizer, job.token_files)
            for key, prompts in prompts_by_key.items():
                self._print_prompt_report(key, prompts)
            held_out = {
                name: self._load_prompts(f"evaluation.sets.{name}.data", settings.data)
                for name, settings in config.evaluation.sets.items()
            }
        with self._make_progress(f"connect {device.world_size()} ranks"):
            job.join_ranks()
        copy_code(job)

        # Check checkpoints and models for damage before models are built, which takes long.
        self.checkpoint, self.pending_stages = self._find_start()
        with self.phases("data"):
            self.stage_data = [load_stage_data(plan, self.tokenizer, job) for plan in self.pending_stages]
        with (
            self.phases("build"),
            self._make_progress("build models and engine") as progress,
        ):
            self.sets = make_evaluation_sets(config, held_out, self.tokenizer)
            is_templated = self.prompts.templated
            self.roles: Roles = build_roles(
                config,
                self.algorithm,
                self.tokenizer,
                templated=is_templated,
                log=job.print,
                show_part=progress.show_part,
            )
        self._warn_of_unenforced_limits()

        # Metrics of the weight sync for the engine check, which are reported with the first line of metrics.
        self._first_sync_metrics = Metrics()

        # Sources of a step's batches, and components that process its results.
        self.callbacks = Callbacks(config.callbacks if job.is_main else (), job.print)
        self.samples = SampleWriter(job, self.roles, self.callbacks)
        self.failures = FailureWatch(config.reward)
        self.health = HealthMonitor(health_rules(config), job.print)
        self.source = RolloutSource(config, self.roles, self.algorithm, self.prompts.next_batch)
        self.ahead_batches: AheadBatches | None = None
        self.batches: BatchSource
        if config.asynchrony.steps_ahead:
            self.ahead_batches = AheadBatches(config, self.roles, self.algorithm, self.source)
            self.batches = self.ahead_batches
        else:
            self.batches = SameStepBatches(
                config,
                self.roles,
                self.algorithm,
                self.source,
                self.prompts,
            )

        # The state has a reference to the queue of the batch source, so that checkpoints contain it.
        queue: list[SampledBatch] = []
        if self.ahead_batches is not None:
            queue = self.ahead_batches.queue
        algorithm_state = initial_state(self.algorithm)
        self.state = TrainerState(
            self.prompts,
            algorithm_state,
            config.seed,
            self.source,
            queue,
            budget=initial_budget(config),
        )
        self.microbatches = MicroBatchControl(job, self.roles, self.state)
        self.checkpoints = Checkpoints(
            self.folder.checkpoints,
            config.checkpoint,
            self._write_checkpoint,
        )

    def _warn_of_unenforced_limits(self) -> None:
        """Print the limits of reward and environment processes that this machine cannot enforce."""
        for limit in self.roles.reward.unenforced_limits:
            self.job.print(f"warning: reward workers are not contained here: {limit}")
        for limit in self.roles.rollout.unenforced_limits:
            self.job.print(f"warning: environments are not contained here: {limit}")

    def run(self) -> None:
        """Run the remaining stages and steps, and write the model and the report."""
        with closing(self.steps()) as steps:
            for step in steps:
                self._run_step(step)

    def steps(self) -> Generator[RunStep]:
        """Restore a checkpoint or run the stages, yield the remaining steps, and write model and report.

        After the caller has executed a step, the generator writes the step's metrics and samples, evaluates
        and saves. Collective over the world.
        """
        # Checkpoints of the run are only saved after its stages, so a resumed run has completed them.
        if self.checkpoint is not None:
            self._resume(self.checkpoint)
        else:
            self._run_stages()

        # Check the engine after the stages, since the first step samples from their weights. A complete run
        # needs no engine.
        if self.state.step < self.config.steps:
            with self.phases("check engine"), self._make_progress("sync weights, compare trainer and engine"):
                self._first_sync_metrics = check_engine(self.config, self.roles)

        log = self._open_log() if self.job.is_main else None
        # Discard the times of building and of stages, which are not part of a step.
        self.phases.metrics()
        if self.checkpoint is None and self.sets and self.config.evaluation.at_start:
            self._record_metrics(log, 0, self._evaluate(0, self.sets))

        # Checkpoints do not contain the responses of a deferred evaluation: run a restored evaluation again.
        self._run_deferred_evaluation(log)
        try:
            with self.job.stop.defer_stops():
                while self.state.step < self.config.steps and not self._patience_exhausted():
                    step = RunStep(self.state.step + 1, self._deferred_sets(self.state.deferred))
                    self.phases.step = step.number
                    self.prompts.begin_step(step.number)
                    self.callbacks.call_method("on_step_begin", step.number)
                    start = time.perf_counter()
                    yield step
                    self._end_step(step, time.perf_counter() - start, log)
                    self.job.stop_if_requested(self.checkpoints.save_final, self._health_error())
                self._run_deferred_evaluation(log)
                self.checkpoints.wait_for_pending()
        except BaseException:
            # Write the metrics of the last step without its deferred evaluation, which a resumed run repeats.
            if self.state.deferred is not None:
                self._record_metrics(
                    log,
                    self.state.deferred.step,
                    self.state.deferred.metrics,
                )
            raise

        if log is not None:
            log.close()
        self._finish_run()

    def _open_log(self) -> MetricsLog:
        """Open the metrics log; a resumed run continues it after the last step with complete metrics."""
        resumed_step = None
        if self.checkpoint is not None:
            # If the evaluation of the last step is deferred, the line of that step is written again.
            deferred = self.state.deferred
            resumed_step = self.state.step if deferred is None else deferred.step - 1
        return MetricsLog(
            self.folder,
            self.config.steps,
            resumed_step=resumed_step,
            console=self.job.console,
            trackers=self.job.trackers,
        )

    def _find_start(self) -> tuple[Path | None, tuple[StagePlan, ...]]:
        """Return the checkpoint to resume from (or None), and the stages to run.

        Raises UserError for damaged or missing models. Collective over the world.
        """
        resumed_checkpoint = self._resumed_checkpoint()
        if resumed_checkpoint is None:
            set_damaged_models_aside(self.job)
        require_intact_models(compute_on_first_rank(lambda: existing_models(self.config)))

        # Use the first rank's result: for a short time, ranks can read different states of a shared file
        # system. A run with a checkpoint has completed its stages, whose models must exist.
        stages: tuple[StagePlan, ...] = ()
        if resumed_checkpoint is None:
            stages = pending_stages(self.config)
        stages = gather_objects(stages)[0]
        if resumed_checkpoint is not None:
            require_stage_models(self.config)
        return resumed_checkpoint, stages

    def _resumed_checkpoint(self) -> Path | None:
        """Return the checkpoint that `checkpoint.resume` selects, or None to start from the beginning.

        Collective over the world.
        """
        # "auto" selects the newest checkpoint in the run folder; a path may be in another run's folder.
        resume = self.config.checkpoint.resume
        if resume == "auto":
            return find_newest_intact_checkpoint(self.folder.checkpoints, self.job.print)
        if resume == "never":
            return None
        require_intact_checkpoint(Path(resume))
        return Path(resume)

    def _load_prompts(self, key: str, path: DataPath) -> PromptSource:
        """Load the prompts of a configuration key, and print their lengths and anomalies."""
        source = load_prompts(self.config, key, path, self.tokenizer, self.job.token_files)
        self._print_prompt_report(key, source)
        return source

    def _print_prompt_report(self, key: str, source: PromptSource) -> None:
        """Print the lengths and anomalies of the prompts of a configuration key."""
        self.job.print(f"{key}: {source.length_report.describe()}")
        for remark in source.remarks:
            self.job.print(f"{key}: {remark}")
        for problem in source.text_warnings:
            self.job.print(f"{key}: {format_warning(problem)}")

    def _make_progress(self, title: str) -> Progress:
        """Return a progress display named ``title``, which prints on the main rank only."""
        return Progress(title, enabled=self.job.is_main, console=self.job.console)

    def _resume(self, path: Path) -> None:
        """Restore the checkpoint ``path``, and write further checkpoints of its step that are missing.

        If `checkpoint.optimizer_layout` is `ANY` (complete optimizer states, for any parallel layout) and the
        checkpoint contains optimizer shards, the step is saved again with complete states. If
        `checkpoint.megatron` is set, but the interrupted job ended before it wrote the step's Megatron-LM
        checkpoint, that checkpoint is written. Collective over the world.
        """
        with self.phases("resume"):
            warning = self.state.restore(path, self.roles, trusted=self.config.checkpoint.trust)
        self.job.print(f"resumed from {path} at step {self.state.step}")
        self.microbatches.resume()
        if warning is not None:
            self.job.print(f"data: {warning}")
        self.checkpoints.rewrite_for_any_layout(path, self.state.step, self.job)
        save_missing_for_megatron(self.config, self.roles.actor, self.state.step)

    def _run_stages(self) -> None:
        """Run the uncompleted stages of training that precede RL: SFT, preferences and reward models.

        Collective over the world.
        """
        # Iterate over completed stages, too: they increment the weight version, and an earlier job may have
        # ended before it deleted their checkpoints.
        plans = stage_plans(self.config)
        pending_keys = [plan.where for plan in self.pending_stages]
        data_by_key = dict(zip(pending_keys, self.stage_data, strict=True))
        roles = {role.name: role for role in self.roles.models}
        for plan in plans:
            if plan.where in data_by_key:
                at_end = make_stage_end_action(plan, self.roles, self.config)
                run_stage(
                    make_stage(plan, roles[plan.role], data_by_key[plan.where], at_end),
                    self.job,
                )
            else:
                self.job.print(f"{plan.where}: complete since an earlier job, its model is {plan.model}")
                delete_checkpoints(plan, self.job)
            # Each stage of the actor increments the version, whether it ran in this job or an earlier one.
            if plan.role == "actor":
                self.roles.hybrid_engine.mark_updated(base=True)

        # Seed again, so that a restart after completed stages gets the same random numbers.
        if plans:
            checkpoint.seed_all_generators(self.config.seed, 0, self.roles.actor.model)

    def _run_step(self, step: RunStep) -> None:
        """Execute a step of the configured algorithm.

        An asynchronous run also samples responses to the evaluation sets ``step.sets``. In a synchronous run
        ``step.sets`` is empty. Collective over the world.
        """
        if self.ahead_batches is not None:
            self.ahead_batches.sets = step.sets

        step.result = train_step(
            self.batches,
            self.roles,
            self.algorithm,
            self.state.algorithm,
            self.config,
            step.number,
            self.phases,
        )
        if self.ahead_batches is not None:
            step.responses = self.ahead_batches.responses

    def _end_step(
        self,
        step: RunStep,
        seconds: float,
        log: MetricsLog | None,
    ) -> None:
        """Write the metrics and samples of a step, evaluate and save. Collective over the world."""
        # Ranks that only sample have no result, and do not use the algorithm's state.
        result = step.result
        if result is not None:
            self.state.algorithm = result.algorithm_state
        self.state.step = step.number

        # The responses for the evaluation of the previous step were sampled during this step.
        deferred = self.state.deferred
        if deferred is not None:
            with self.phases("evaluate"):
                results = reward_responses(self.roles, step.sets, step.responses)
            evaluation_metrics = self.samples.store_evaluation(deferred.step, results)
            self._record_metrics(log, deferred.step, deferred.metrics + evaluation_metrics)
            self.state.deferred = None

        # From here on, metrics are gathered over all ranks.
        metrics = self._step_metrics(result, seconds)
        reasons, examples = self.samples.store_step(step.number, result)
        metrics = self._evaluate_or_defer(log, step.number, metrics)
        is_best = self._update_best(step.number, metrics.values())
        self._check_failures(step.number, result, reasons, examples)
        self._save_if_scheduled(step.number, is_best)

    def _step_metrics(self, result: StepResult | None, seconds: float) -> Metrics:
        """Return the metrics of a step, reduced over all ranks. Collective over the world."""
        # Collect times, bytes and memory of this rank; their maxima over all ranks are reported.
        local_metrics = Metrics.maximum("time/step", seconds) + self.phases.metrics()
        local_metrics += self._pop_first_sync_metrics()
        local_metrics += self.checkpoints.finish_if_written()
        for role in self.roles.models:
            local_metrics += role.residency.metrics() + role.pass_metrics()

        metrics = gather_step_metrics(result, local_metrics)
        metrics += self.microbatches.adapt_to_step(metrics.values())
        if result is not None:
            if result.batch is not None:
                metrics += _throughput_metrics(result.batch, metrics.values()["time/step"])
            metrics += source_metrics(result.batch, self.prompts)
            metrics += Metrics.of({"policy/version": self.roles.hybrid_engine.version})
            if self.config.hybrid_engine.every != 1:
                version = self.roles.hybrid_engine.rollout_policy.version
                assert version is not None, "a step samples before it learns"
                metrics += Metrics.of({"rollout/version": version})
        return metrics

    def _evaluate_or_defer(
        self,
        log: MetricsLog | None,
        step: int,
        metrics: Metrics,
    ) -> Metrics:
        """Run the evaluation that is scheduled after a step, or defer it to the next step.

        Returns the step's metrics, including the evaluation's metrics if it has run. Collective over the
        world.
        """
        is_last = step == self.config.steps
        evaluation = self.config.evaluation
        scheduled_sets = [
            evaluation_set
            for evaluation_set in self.sets
            if is_last or step % evaluation.steps_between(evaluation_set.name) == 0
        ]

        # A deferred evaluation runs on the rollout's ranks while the other ranks train. This needs a run that
        # samples ahead, and a weight sync before every step (`hybrid_engine.every` = 1): the next batch must
        # be sampled with the weights to evaluate. Sets whose metrics decide about checkpoints or the run's
        # end must be evaluated before training continues.
        can_defer = self.ahead_batches is not None and not is_last and self.config.hybrid_engine.every == 1
        has_best_metric = any(self._has_best_metric(evaluation_set) for evaluation_set in scheduled_sets)
        if scheduled_sets and can_defer and not has_best_metric:
            set_names = tuple(evaluation_set.name for evaluation_set in scheduled_sets)
            self.state.deferred = DeferredEvaluation(step, set_names, metrics)
            return metrics

        if scheduled_sets:
            metrics += self._evaluate(step, scheduled_sets)
        self._record_metrics(log, step, metrics)
        return metrics

    def _check_failures(
        self,
        step: int,
        result: StepResult | None,
        reasons: Counter[str],
        examples: Sequence[Failure],
    ) -> None:
        """Raise UserError on the main rank if too many rewards failed, or filters removed all rows.

        ``reasons``, ``examples``: failed rewards of all ranks, from `SampleWriter.store_step`.
        """
        if result is not None and result.batch is not None and self.job.is_main:
            result.batch.require_unfiltered_rows(step)
            self.failures.check(step, result.batch.failed_fraction, reasons, examples)

    def _save_if_scheduled(self, step: int, is_best: bool) -> None:
        """Save a checkpoint of the current step if one is scheduled. Collective over the world."""
        # The final checkpoint can be restored on any layout, and is complete before the run ends.
        if step == self.config.steps or self._patience_exhausted():
            with self.phases("checkpoint"):
                self.checkpoints.save_final(step)
        elif step % self.config.checkpoint.every == 0 or is_best:
            with self.phases("checkpoint"):
                self.checkpoints.save_periodic(step)

    def _update_best(self, step: int, values: Mapping[str, float]) -> bool:
        """Record a step's value of the metric `checkpoint.best`; return whether it is among the best values.

        Collective over the world.
        """
        settings = self.config.checkpoint
        if settings.best is None:
            return False
        # Ranks that only sample lack the batch's metrics, so all ranks use the first rank's value.
        value = gather_objects(values.get(settings.best))[0]
        if value is None:
            return False

        is_best = self.state.best.record(step, value, settings)
        # Every rank has the same measurements, so all ranks save or end together.
        if is_best:
            self.job.print(
                f"step {step}: {settings.best} {value:.4f} is among the best, and its checkpoint is retained"
            )
        elif self._patience_exhausted():
            best_step, best_value = self.state.best.kept[0]
            self.job.print(
                f"step {step}: the run ends: the last {self.state.best.waited} measurements of "
                f"{settings.best} were no better than {best_value:.4f} at step {best_step} "
                "(evaluation.patience)"
            )
        return is_best

    def _patience_exhausted(self) -> bool:
        """Return whether none of the last `evaluation.patience` measurements improved on the best value."""
        patience = self.config.evaluation.patience
        return patience is not None and self.state.best.waited >= patience

    def _health_error(self) -> UserError | None:
        """Return the error of the health rule that stops the run, or None if no rule stops it.

        Always returns None on ranks other than the main rank, and after the last step, when the run ends
        anyway.
        """
        if self.state.step == self.config.steps or self._patience_exhausted():
            return None
        return self.health.error

    def _write_checkpoint(
        self,
        path: Path,
        optimizer_format: str,
        in_background: bool,
    ) -> checkpoint.PendingCheckpoint:
        """Write a checkpoint of the current step, and one for Megatron-LM if it is configured.

        See `checkpoint.save_checkpoint` for ``optimizer_format`` and ``in_background``. Collective over the
        world.
        """
        pending_checkpoint = self.state.save(
            path,
            self.roles,
            self.config.checkpoint,
            optimizer_format=optimizer_format,
            in_background=in_background,
        )

        # `Checkpoints` may save a step twice, with different optimizer formats. Write the checkpoint for
        # Megatron-LM only the first time.
        last_saved = self.checkpoints.last_saved
        if last_saved is None or last_saved[0] != self.state.step:
            save_for_megatron(self.config, self.roles.actor, self.state.step)
        return pending_checkpoint

    def _has_best_metric(self, evaluation_set: EvaluationSet) -> bool:
        """Return whether `checkpoint.best` is a metric of the evaluation set.

        The set's evaluation then decides which checkpoints are retained, and may end the run.
        """
        return (self.config.checkpoint.best or "").startswith(f"eval/{evaluation_set.name}/")

    def _deferred_sets(self, deferred: DeferredEvaluation | None) -> list[EvaluationSet]:
        """Return the evaluation sets of a deferred evaluation."""
        if deferred is None:
            return []
        return [evaluation_set for evaluation_set in self.sets if evaluation_set.name in deferred.sets]

    def _run_deferred_evaluation(self, log: MetricsLog | None) -> None:
        """Run the deferred evaluation immediately, if there is one.

        A deferred evaluation runs concurrently with the next step. Call this method if no step follows, or if
        a resumed run has restored a deferred evaluation. Collective over the world.
        """
        deferred = self.state.deferred
        self.state.deferred = None
        if deferred is not None:
            evaluation_metrics = self._evaluate(deferred.step, self._deferred_sets(deferred))
            self._record_metrics(log, deferred.step, deferred.metrics + evaluation_metrics)

    def _evaluate(self, step: int, sets: Sequence[EvaluationSet]) -> Metrics:
        """Evaluate the current weights and store the responses. Collective over the world."""
        with self.phases("evaluate"):
            results, sync_metrics = evaluate(self.roles, sets, self.config.seed)
        metrics = self.samples.store_evaluation(step, results)
        return metrics + gather_metrics(self.phases.metrics() + sync_metrics + self._pop_first_sync_metrics())

    def _pop_first_sync_metrics(self) -> Metrics:
        """Return the metrics of the first weight sync in the first call, and empty metrics in later calls.

        `check_engine` makes this sync before the first step.
        """
        metrics = self._first_sync_metrics
        self._first_sync_metrics = Metrics()
        return metrics

    def _record_metrics(self, log: MetricsLog | None, step: int, metrics: Metrics) -> None:
        """Update the health rules and write a step's metrics; do nothing on ranks without a ``log``."""
        if log is None:
            return
        values = metrics.values()
        health_metrics = self.health.update(step, values, self.state.health)
        if step > 0:
            values |= health_metrics
        log.write(step, values)
        if step > 0:
            self.callbacks.call_method("on_step_end", step, values)

    def _finish_run(self) -> None:
        """Export the model, release roles and servers, and write the report. Collective over the world."""
        if self.config.checkpoint.export:
            self._export_model()
        # The export reads weights from all of the actor's ranks, so no rank may release roles before it ends.
        barrier()
        for evaluation_set in self.sets:
            evaluation_set.close()
        self.roles.close()
        if self.job.is_main:
            self._write_report()

    def _export_model(self) -> None:
        """Write the actor as a Hugging Face model into the run folder; replace an earlier model.

        Collective over the world.
        """
        # Remove a model that an earlier job of this run wrote.
        if self.job.is_main:
            shutil.rmtree(self.folder.model, ignore_errors=True)
        barrier()

        model = self.roles.actor.model
        if model is not None:
            with self.phases("export"), self.roles.actor.resident(ResidencyLevel.READ_WEIGHTS):
                export_model(model, self.folder.model, self.config.model.path)

    def _write_report(self) -> None:
        """Write the report; print an error as a warning, because the run is complete."""
        try:
            write_report(self.folder.path, console=self.job.console)
        except Exception as error:
            self.job.print(
                f"warning: the run is complete, and its report cannot be written: {first_line(error)}; "
                f"fix: correct that, and run megatron-rl report {self.folder.path}"
            )


def _throughput_metrics(batch: ScoredBatch, seconds: float) -> Metrics:
    """Return a step's prompt and response tokens per second, in total and per GPU, as metrics."""
    num_tokens = float(batch.rollouts.lengths.sum())
    return Metrics.of({
        "throughput/tokens_per_second": num_tokens / seconds,
        "throughput/tokens_per_second_per_gpu": num_tokens / seconds / device.world_size(),
    })  # fmt: skip
