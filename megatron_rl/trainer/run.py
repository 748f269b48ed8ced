"""A complete run: build or resume, run stages and steps, evaluate, save, export and report."""

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
from megatron_rl.checkpoint import roles as checkpoint
from megatron_rl.checkpoint.folders import (
    from_first_rank,
    newest_intact,
    require_intact,
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
from megatron_rl.data.tokenizing import as_warning, load_tokenizer
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import (
    barrier,
    gather_metrics,
    gather_objects,
)
from megatron_rl.errors import UserError, first_line
from megatron_rl.hf.export import export
from megatron_rl.megatron.residency import Use
from megatron_rl.metrics import Metrics
from megatron_rl.rewards.function import Failure
from megatron_rl.roles.build import Roles, build_roles
from megatron_rl.trainer.asynchrony import AheadBatches
from megatron_rl.trainer.callbacks import Callbacks
from megatron_rl.trainer.engine_check import check_engine
from megatron_rl.trainer.evaluation import (
    EvaluationSet,
    evaluate,
    evaluation_sets,
    reward_answers,
)
from megatron_rl.trainer.health import HealthMonitor
from megatron_rl.trainer.job import Job, Stopped, job, keep_code
from megatron_rl.trainer.logging import MetricsLog, Progress
from megatron_rl.trainer.loop import (
    BatchSource,
    SameStepBatches,
    StepResult,
    gather_step,
    train_step,
)
from megatron_rl.trainer.microbatches import MicroBatchControl
from megatron_rl.trainer.report import write as write_report
from megatron_rl.trainer.rewards import FailureWatch, ScoredBatch, source_metrics
from megatron_rl.trainer.sample import RolloutSource, SampledBatch
from megatron_rl.trainer.sample_log import Samples
from megatron_rl.trainer.stages import (
    delete_checkpoints,
    load_stage_data,
    make_stage,
    require_stage_models,
    run_alone,
    run_stage,
    set_damaged_models_aside,
    stage_end,
)
from megatron_rl.trainer.state import (
    Checkpoints,
    DeferredEvaluation,
    TrainerState,
    complete_for_megatron,
    save_for_megatron,
)
from megatron_rl.types import Rollouts


def run(config: RunConfig, explicit: Sequence[str] = ()) -> None:
    """Run the job of a resolved and checked configuration; its results are in ``config.run_dir``.

    ``explicit``: keys that the user has set, for the record of the start. Collective over the world.
    """
    with job(config, explicit) as current_job:
        if config.job != TRAIN:
            run_alone(current_job)
            return

        training = Training(current_job)
        try:
            training.run()
        except Stopped:
            # Release the servers: a resumed run would otherwise wait until this run's claim expires.
            training.roles.close()
            raise


@dataclass
class RunStep:
    """Step of a run, which the caller of `Training.steps` carries out."""

    number: int
    """Number of the step, from 1."""
    sets: Sequence[EvaluationSet]
    """Evaluation sets whose responses are sampled during the step: those of the previous step's weights."""
    result: StepResult | None = None
    """Outcome, set by who carries the step out; None on ranks that only sample."""
    answers: list[Rollouts] = field(default_factory=list)
    """Responses to the evaluation ``sets``."""


class Training:
    """A run of reinforcement learning on this rank, with the stages before it.

    `run` is `train`; the `Run` of `trainer.dataflow` carries out the same `steps` with a user's own lines.
    """

    def __init__(self, job: Job) -> None:
        config = job.config
        self.job = job
        self.config = config
        self.folder = job.folder
        self.phases = job.phases
        self.algorithm: Algorithm = algorithm_of(config)
        self.tokenizer: Any = load_tokenizer(config.model.path, job.first_start)

        # Data first: its errors are found before the ranks wait for each other, and without any model.
        with self.phases("data"):
            self.prompts, prompts_by_key = load_training_prompts(config, self.tokenizer, job.token_files)
            for key, prompts in prompts_by_key.items():
                self._describe_prompts(key, prompts)
            held_out = {
                name: self._load_prompts(f"evaluation.sets.{name}.data", settings.data)
                for name, settings in config.evaluation.sets.items()
            }
        with self._progress(f"connect {device.world_size()} ranks"):
            job.join()
        keep_code(job)

        # Before the models: a damaged checkpoint or model is found in seconds, not after they are built.
        self.checkpoint, self.pending_stages = self._find_start()
        with self.phases("data"):
            self.stage_data = [load_stage_data(plan, self.tokenizer, job) for plan in self.pending_stages]
        with (
            self.phases("build"),
            self._progress("build models and engine") as progress,
        ):
            self.sets = evaluation_sets(config, held_out, self.tokenizer)
            templated = self.prompts.templated
            self.roles: Roles = build_roles(
                config,
                self.algorithm,
                self.tokenizer,
                templated=templated,
                say=job.say,
                begin=progress.begin,
            )
        self._warn_of_missing_containment()

        # Metrics of the sync before the engine check, reported with the first line of metrics.
        self._first_sync = Metrics()

        # Sources of a step's batches, and observers of its results.
        self.callbacks = Callbacks(config.callbacks if job.main else (), job.say)
        self.samples = Samples(job, self.roles, self.prompts, self.callbacks)
        self.failures = FailureWatch(config.reward)
        self.health = HealthMonitor(health_rules(config), job.say)
        self.source = RolloutSource(config, self.roles, self.algorithm, self.prompts.next)
        self.ahead: AheadBatches | None = None
        self.batches: BatchSource
        if config.asynchrony.steps_ahead:
            self.ahead = AheadBatches(config, self.roles, self.algorithm, self.source)
            self.batches = self.ahead
        else:
            self.batches = SameStepBatches(
                config,
                self.roles,
                self.algorithm,
                self.source,
                self.prompts,
            )

        # State and checkpoints, which share the queue with the source of batches.
        queue: list[SampledBatch] = []
        if self.ahead is not None:
            queue = self.ahead.queue
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

    def _warn_of_missing_containment(self) -> None:
        """Print the limits of contained processes that this machine does not enforce."""
        for limit in self.roles.reward.not_enforced:
            self.job.say(f"warning: reward workers are not contained here: {limit}")
        for limit in self.roles.rollout.not_enforced:
            self.job.say(f"warning: environments are not contained here: {limit}")

    def run(self) -> None:
        """Run the stages and steps that remain, and write the model and the report."""
        with closing(self.steps()) as steps:
            for step in steps:
                self._learn(step)

    def steps(self) -> Generator[RunStep]:
        """Resume or run the stages, yield the remaining steps, and write the model and the report.

        After each step: metrics, samples, evaluation and checkpoints. Collective over the world.
        """
        # Checkpoints of the run are only saved after its stages.
        if self.checkpoint is not None:
            self._resume(self.checkpoint)
        else:
            self._run_stages()

        # After the stages, whose weights the first step samples from; a run that is complete samples nothing.
        if self.state.step < self.config.steps:
            with self.phases("check engine"), self._progress("sync weights, compare trainer and engine"):
                self._first_sync = check_engine(self.config, self.roles)

        log = self._open_log() if self.job.main else None
        # Discard the times of building and of stages, which belong to no step.
        self.phases.metrics()
        if self.checkpoint is None and self.sets and self.config.evaluation.at_start:
            self._record(log, 0, self._evaluate(0, self.sets))

        # A deferred evaluation that was restored has no answers yet: checkpoints do not store them.
        self._run_deferred_evaluation(log)
        try:
            with self.job.stop.saves():
                while self.state.step < self.config.steps and not self._patience_exhausted():
                    step = RunStep(self.state.step + 1, self._sets_of(self.state.deferred))
                    self.phases.step = step.number
                    self.prompts.begin_step(step.number)
                    self.callbacks.call("on_step_begin", step.number)
                    start = time.perf_counter()
                    yield step
                    self._end_step(step, time.perf_counter() - start, log)
                    self.job.stop_if_asked(self.checkpoints.save_final, self._health_error())
                self._run_deferred_evaluation(log)
                self.checkpoints.complete()
        except BaseException:
            # Write the line of the last step without its evaluation; a resumed run writes both.
            if self.state.deferred is not None:
                self._record(
                    log,
                    self.state.deferred.step,
                    self.state.deferred.metrics,
                )
            raise

        if log is not None:
            log.close()
        self._finish()

    def _open_log(self) -> MetricsLog:
        """Open the metrics log after the last step whose line is complete."""
        resumed_step = None
        if self.checkpoint is not None:
            # The line of a step whose evaluation is deferred is written again.
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
        """Return the checkpoint to resume from, or the stages still to run. Collective over the world."""
        newest = self._resumed_checkpoint()
        if newest is None:
            set_damaged_models_aside(self.job)
        require_intact_models(from_first_rank(lambda: existing_models(self.config)))

        # The first rank decides: a shared file system can show the ranks different files for a while.
        # A run with a checkpoint has no stage left to run, and needs the models that they left.
        stages: tuple[StagePlan, ...] = ()
        if newest is None:
            stages = pending_stages(self.config)
        stages = gather_objects(stages)[0]
        if newest is not None:
            require_stage_models(self.config)
        return newest, stages

    def _resumed_checkpoint(self) -> Path | None:
        """Return the checkpoint that `checkpoint.resume` selects, None to start from the beginning."""
        # "auto" selects the newest checkpoint in the run folder; a path may be in another folder.
        resume = self.config.checkpoint.resume
        if resume == "auto":
            return newest_intact(self.folder.checkpoints, self.job.say)
        if resume == "never":
            return None
        require_intact(Path(resume))
        return Path(resume)

    def _load_prompts(self, key: str, path: DataPath) -> PromptSource:
        """Load the prompts of a configuration key, and print their lengths and anomalies."""
        source = load_prompts(self.config, key, path, self.tokenizer, self.job.token_files)
        self._describe_prompts(key, source)
        return source

    def _describe_prompts(self, key: str, source: PromptSource) -> None:
        """Print the lengths and anomalies of the prompts of a configuration key."""
        self.job.say(f"{key}: {source.length_report.line()}")
        for remark in source.remarks:
            self.job.say(f"{key}: {remark}")
        for problem in source.text_warnings:
            self.job.say(f"{key}: {as_warning(problem)}")

    def _progress(self, title: str) -> Progress:
        return Progress(title, enabled=self.job.main, console=self.job.console)

    def _resume(self, path: Path) -> None:
        """Restore a checkpoint, and complete the files that a kill prevented. Collective over the world."""
        with self.phases("resume"):
            warning = self.state.restore(path, self.roles, trusted=self.config.checkpoint.trust)
        self.job.say(f"resumed from {path} at step {self.state.step}")
        self.microbatches.resume()
        if warning is not None:
            self.job.say(f"data: {warning}")
        self.checkpoints.rewrite_for_any_layout(path, self.state.step, self.job)
        complete_for_megatron(self.config, self.roles.actor, self.state.step)

    def _run_stages(self) -> None:
        """Run the pending stages. Collective over the world."""
        # All plans in order: an ended stage still counts as a version, and its checkpoints can be deleted.
        plans = stage_plans(self.config)
        data_of = {plan.where: data for plan, data in zip(self.pending_stages, self.stage_data, strict=True)}
        roles = {role.name: role for role in self.roles.models}
        for plan in plans:
            if plan.where in data_of:
                at_end = stage_end(plan, self.roles, self.config)
                run_stage(
                    make_stage(plan, roles[plan.role], data_of[plan.where], at_end),
                    self.job,
                )
            else:
                self.job.say(f"{plan.where}: complete since an earlier job, its model is {plan.model}")
                delete_checkpoints(plan, self.job)
            # Each stage of the actor counts as one version, whether it ran now or before a restart.
            if plan.role == "actor":
                self.roles.hybrid_engine.mark_updated(base=True)

        # The same random numbers as after a restart that finds every stage ended.
        if plans:
            checkpoint.seed_generators(self.config.seed, 0, self.roles.actor.model)

    def _learn(self, step: RunStep) -> None:
        """Carry out a step of the configured algorithm.

        Only an asynchronous run samples the responses to evaluation sets here, while it trains. Collective
        over the world.
        """
        if self.ahead is not None:
            self.ahead.sets = step.sets

        step.result = train_step(
            self.batches,
            self.roles,
            self.algorithm,
            self.state.algorithm,
            self.config,
            step.number,
            self.phases,
        )
        if self.ahead is not None:
            step.answers = self.ahead.answers

    def _end_step(
        self,
        step: RunStep,
        seconds: float,
        log: MetricsLog | None,
    ) -> None:
        """Write the metrics and samples of a step, evaluate and save. Collective over the world."""
        # Ranks that only sample have no result, and keep the state that they do not use.
        result = step.result
        if result is not None:
            self.state.algorithm = result.algorithm_state
        self.state.step = step.number

        # The responses to the previous step's evaluation sets were sampled during this step.
        deferred = self.state.deferred
        if deferred is not None:
            with self.phases("evaluate"):
                results = reward_answers(self.roles, step.sets, step.answers)
            evaluation_metrics = self.samples.keep_evaluation(deferred.step, results)
            self._record(log, deferred.step, deferred.metrics + evaluation_metrics)
            self.state.deferred = None

        # From here on metrics cover all ranks.
        metrics = self._step_metrics(result, seconds)
        reasons, examples = self.samples.keep_step(step.number, result)
        metrics = self._evaluate_or_defer(log, step.number, metrics)
        is_best = self._update_best(step.number, metrics.values())
        self._check_failures(step.number, result, reasons, examples)
        self._save_if_due(step.number, is_best)

    def _step_metrics(self, result: StepResult | None, seconds: float) -> Metrics:
        """Return the metrics of a step, reduced over all ranks. Collective over the world."""
        # Times, bytes and memory of this rank; their maxima over the ranks are reported.
        local_metrics = Metrics({}, {"time/step": seconds}) + self.phases.metrics()
        local_metrics += self._take_first_sync()
        local_metrics += self.checkpoints.complete_if_written()
        for role in self.roles.models:
            local_metrics += role.residency.metrics() + role.pass_metrics()

        metrics = gather_step(result, local_metrics)
        metrics += self.microbatches.after_step(metrics.values())
        if result is not None:
            if result.batch is not None:
                metrics += _throughput(result.batch, metrics.values()["time/step"])
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
        """Run the evaluation that is due after a step, or defer it to run during the next step.

        Returns the step's metrics, including the evaluation's if it has run. Collective over the world.
        """
        is_last = step == self.config.steps
        evaluation = self.config.evaluation
        due_sets = [item for item in self.sets if is_last or step % evaluation.interval(item.name) == 0]

        # Only a run that samples ahead has idle ranks, and training must wait for decisive sets.
        # It also samples them beside its batch, which with `hybrid_engine.every` is of older weights.
        can_defer = self.ahead is not None and not is_last and self.config.hybrid_engine.every == 1
        if due_sets and can_defer and not any(self._is_decisive(item) for item in due_sets):
            names = tuple(item.name for item in due_sets)
            self.state.deferred = DeferredEvaluation(step, names, metrics)
            return metrics

        if due_sets:
            metrics += self._evaluate(step, due_sets)
        self._record(log, step, metrics)
        return metrics

    def _check_failures(
        self,
        step: int,
        result: StepResult | None,
        reasons: Counter[str],
        examples: Sequence[Failure],
    ) -> None:
        """Raise UserError on the main rank if too many rewards have failed, or filters kept nothing."""
        if result is not None and result.batch is not None and self.job.main:
            result.batch.require_kept_rows(step)
            self.failures.check(step, result.batch.failed_fraction, reasons, examples)

    def _save_if_due(self, step: int, is_best: bool) -> None:
        """Save a checkpoint of the current step if one is due. Collective over the world."""
        # The last checkpoint can be restored by any layout, and is complete before the run ends.
        if step == self.config.steps or self._patience_exhausted():
            with self.phases("checkpoint"):
                self.checkpoints.save_final(step)
        elif step % self.config.checkpoint.every == 0 or is_best:
            with self.phases("checkpoint"):
                self.checkpoints.save_periodic(step)

    def _update_best(self, step: int, values: Mapping[str, float]) -> bool:
        """Return whether a step's value of `checkpoint.best` is among the best. Collective over the world."""
        settings = self.config.checkpoint
        if settings.best is None:
            return False
        # Only ranks that learn have the batch's metrics: all take the first rank's value.
        value = gather_objects(values.get(settings.best))[0]
        if value is None:
            return False

        is_best = self.state.best.record(step, value, settings)
        # Every rank has the same measurements, so all ranks save or end together.
        if is_best:
            self.job.say(
                f"step {step}: {settings.best} {value:.4f} is among the best, and its checkpoint is retained"
            )
        elif self._patience_exhausted():
            best_step, best_value = self.state.best.kept[0]
            self.job.say(
                f"step {step}: the run ends: the last {self.state.best.waited} measurements of "
                f"{settings.best} were no better than {best_value:.4f} at step {best_step} "
                "(evaluation.patience)"
            )
        return is_best

    def _patience_exhausted(self) -> bool:
        """Return whether none of the last `evaluation.patience` measurements was a new best one."""
        patience = self.config.evaluation.patience
        return patience is not None and self.state.best.waited >= patience

    def _health_error(self) -> UserError | None:
        """Return the error of a health rule that ends the run, on the main rank; None after the last step."""
        if self.state.step == self.config.steps or self._patience_exhausted():
            return None
        return self.health.error

    def _write_checkpoint(
        self,
        path: Path,
        layout: str,
        in_background: bool,
    ) -> checkpoint.PendingCheckpoint:
        """Write a checkpoint of the current step, in the background if ``in_background``.

        Collective over the world.
        """
        saving = self.state.save(
            path,
            self.roles,
            self.config.checkpoint,
            layout=layout,
            in_background=in_background,
        )

        # A step that is saved in two layouts needs only one checkpoint for Megatron-LM.
        saved = self.checkpoints.saved
        if saved is None or saved[0] != self.state.step:
            save_for_megatron(self.config, self.roles.actor, self.state.step)
        return saving

    def _is_decisive(self, evaluation_set: EvaluationSet) -> bool:
        """Return whether a metric of the set decides which checkpoints stay or when the run ends."""
        return (self.config.checkpoint.best or "").startswith(f"eval/{evaluation_set.name}/")

    def _sets_of(self, deferred: DeferredEvaluation | None) -> list[EvaluationSet]:
        """Return the evaluation sets of a deferred evaluation."""
        if deferred is None:
            return []
        return [item for item in self.sets if item.name in deferred.sets]

    def _run_deferred_evaluation(self, log: MetricsLog | None) -> None:
        """Run the deferred evaluation now: no later step will overlap with it."""
        deferred = self.state.deferred
        self.state.deferred = None
        if deferred is not None:
            evaluation_metrics = self._evaluate(deferred.step, self._sets_of(deferred))
            self._record(log, deferred.step, deferred.metrics + evaluation_metrics)

    def _evaluate(self, step: int, sets: Sequence[EvaluationSet]) -> Metrics:
        """Evaluate the current weights and store the answers. Collective over the world."""
        with self.phases("evaluate"):
            results, sync_metrics = evaluate(self.roles, sets, self.config.seed)
        metrics = self.samples.keep_evaluation(step, results)
        return metrics + gather_metrics(self.phases.metrics() + sync_metrics + self._take_first_sync())

    def _take_first_sync(self) -> Metrics:
        """Return the metrics of the sync before the engine's check, once."""
        metrics = self._first_sync
        self._first_sync = Metrics()
        return metrics

    def _record(self, log: MetricsLog | None, step: int, metrics: Metrics) -> None:
        """Write the metrics of a step and of the health rules, on the main rank."""
        if log is None:
            return
        values = metrics.values()
        health = self.health.update(step, values, self.state.health)
        if step > 0:
            values |= health
        log.write(step, values)
        if step > 0:
            self.callbacks.call("on_step_end", step, values)

    def _finish(self) -> None:
        """Export the model, release roles and servers, and write the report. Collective over the world."""
        if self.config.checkpoint.export:
            self._export()
        # The export reads the weights on all of the actor's ranks: no rank may release roles before it ends.
        barrier()
        for evaluation_set in self.sets:
            evaluation_set.close()
        self.roles.close()
        if self.job.main:
            self._write_report()

    def _export(self) -> None:
        """Write the actor as a Hugging Face model. Collective over the world."""
        # Remove a model that this run wrote before it was resumed.
        if self.job.main:
            shutil.rmtree(self.folder.model, ignore_errors=True)
        barrier()

        model = self.roles.actor.model
        if model is not None:
            with self.phases("export"), self.roles.actor.resident(Use.READ):
                export(model, self.folder.model, self.config.model.path)

    def _write_report(self) -> None:
        """Write the report; an error here is only a warning, because the run is complete."""
        try:
            write_report(self.folder.path, console=self.job.console)
        except Exception as error:
            self.job.say(
                f"warning: the run is complete, and its report cannot be written: {first_line(error)}; "
                f"fix: correct that, and run python -m megatron_rl report {self.folder.path}"
            )


def _throughput(batch: ScoredBatch, seconds: float) -> Metrics:
    """Return the tokens per second of a step, of prompts and responses together."""
    tokens = float(batch.rollouts.lengths.sum())
    return Metrics.of({
        "throughput/tokens_per_second": tokens / seconds,
        "throughput/tokens_per_second_per_gpu": tokens / seconds / device.world_size(),
    })  # fmt: skip
