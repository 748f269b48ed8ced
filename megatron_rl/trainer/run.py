"""A whole run: build, resume or run the stages, take the steps, evaluate, save, export and report."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.algorithms import Algorithm, algorithm_of, initial_state
from megatron_rl.checkpoint import roles as checkpoint
from megatron_rl.checkpoint.folders import (
    first,
    newest_intact,
    require_intact,
    require_intact_models,
)
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.stage_plan import StagePlan, models_read, pending_stages, stage_plans
from megatron_rl.data.prompts import PromptSource, load_prompts
from megatron_rl.data.records import DataPath
from megatron_rl.data.tokenizing import as_warning, load_tokenizer
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import barrier, gather_metrics, gather_objects
from megatron_rl.errors import first_line
from megatron_rl.hf.export import export
from megatron_rl.megatron.residency import Use
from megatron_rl.metrics import Metrics
from megatron_rl.roles.build import Roles, build_roles
from megatron_rl.trainer.asynchrony import AheadBatches
from megatron_rl.trainer.checkpoints import Checkpoints, complete_for_megatron, save_for_megatron
from megatron_rl.trainer.evaluation import EvaluationSet, evaluate, evaluation_sets, graded
from megatron_rl.trainer.job import Job, job
from megatron_rl.trainer.kept_code import keep_code
from megatron_rl.trainer.logging import MetricsLog, Progress
from megatron_rl.trainer.loop import BatchSource, SameStepBatches, StepResult, gather_step, train_step
from megatron_rl.trainer.report import write as write_report
from megatron_rl.trainer.reward_failures import FailureWatch
from megatron_rl.trainer.sample import RolloutSource
from megatron_rl.trainer.samples import Samples
from megatron_rl.trainer.stages import (
    drop_checkpoints,
    end_of,
    load_stage_data,
    require_stages,
    run_alone,
    run_stage,
    set_damaged_models_aside,
    stage_of,
)
from megatron_rl.trainer.state import Held, TrainerState
from megatron_rl.trainer.stop import Stopped
from megatron_rl.types import Rollouts


def run(config: RunConfig) -> None:
    """Do the job of a resolved and checked configuration; results lie in ``config.run_dir``.

    Collective over the world.
    """
    with job(config) as current:
        if config.job == TRAIN:
            parts = Run(current)
            try:
                parts.run()
            except Stopped:
                parts.roles.close()  # who goes on need not wait until servers have forgotten this process
                raise
        else:
            run_alone(current)


class Run:
    """Hold the parts of one run on this rank."""

    def __init__(self, job: Job) -> None:
        self.job, self.config, self.folder, self.phases = job, job.config, job.folder, job.phases
        config = self.config
        self.algorithm: Algorithm = algorithm_of(config)
        self.tokenizer: Any = load_tokenizer(config.model.path, job.first_start)
        with self.phases("data"):
            self.prompts = self._prompts("data.train", config.data.train or "")
            held_out = {
                name: self._prompts(f"evaluation.sets.{name}.data", described.data)
                for name, described in config.evaluation.sets.items()
            }
        job.join()
        keep_code(job)
        self.checkpoint, self.stages = self._left_to_do()
        with self.phases("data"):
            self.stage_data = [load_stage_data(plan, self.tokenizer, job) for plan in self.stages]
        with self.phases("build"), self._progress("build models and engine"):
            self.sets = evaluation_sets(config, held_out, self.tokenizer)
            templated = self.prompts.templated
            self.roles: Roles = build_roles(
                config, self.algorithm, self.tokenizer, templated=templated, say=job.say
            )
        for words in self.roles.reward.not_enforced:
            self.job.say(f"warning: reward workers are not contained here: {words}")
        for words in self.roles.rollout.not_enforced:
            self.job.say(f"warning: environments are not contained here: {words}")
        self.samples = Samples(job, self.roles)
        self.source = RolloutSource(config, self.roles, self.algorithm, self.prompts.next)
        parts = config, self.roles, self.algorithm, self.source
        self.ahead = AheadBatches(*parts) if config.asynchrony.steps_ahead else None
        self.batches: BatchSource = SameStepBatches(*parts) if self.ahead is None else self.ahead
        queue = [] if self.ahead is None else self.ahead.queue
        state = initial_state(self.algorithm)
        self.failures = FailureWatch(config.reward)
        self.checkpoints = Checkpoints(self.folder.checkpoints, config.checkpoint, self._write)
        self.state = TrainerState(self.prompts, state, config.seed, self.source, queue)

    def run(self) -> None:
        """Resume or train the stages before, take the remaining steps, and leave the results behind."""
        config = self.config
        if self.checkpoint is not None:
            self._resume(self.checkpoint)
        else:
            self._run_stages()
        log = None
        if self.job.main:
            held = self.state.held  # its line is written again
            seen = self.state.step if held is None else held.step - 1
            log = MetricsLog(
                self.folder,
                config.steps,
                resumed_step=None if self.checkpoint is None else seen,
                console=self.job.console,
                trackers=self.job.trackers,
            )
        self.phases.metrics()  # what came before belongs to no step
        if self.checkpoint is None and self.sets and config.evaluation.at_start:
            self._record(log, 0, self._evaluate(0, self.sets))
        self._record_held(log)
        try:
            with self.job.stop.saves():
                while self.state.step < config.steps and not self._waited_enough():
                    self._step(log)
                    self.job.stop_if_asked(self.checkpoints.save_for_good)
                self._record_held(log)
                self.checkpoints.complete()
        except BaseException:
            if self.state.held is not None:  # its evaluation follows where the run goes on
                self._record(log, self.state.held.step, self.state.held.metrics)
            raise
        if log is not None:
            log.close()
        self._finish()

    def _left_to_do(self) -> tuple[Path | None, tuple[StagePlan, ...]]:
        """Return the checkpoint to resume from, or the stages still to run. Collective over the world."""
        newest = self._resumed_checkpoint()
        if newest is None:
            set_damaged_models_aside(self.job)
        require_intact_models(first(lambda: models_read(self.config)))
        stages = () if newest is not None else pending_stages(self.config)
        # What the first rank sees: a shared file system may tell the ranks different things for a while.
        stages = gather_objects(stages)[0]
        if newest is not None:
            require_stages(self.config)
        return newest, stages

    def _resumed_checkpoint(self) -> Path | None:
        resume = self.config.checkpoint.resume
        if resume == "auto":
            return newest_intact(self.folder.checkpoints, self.job.say)
        if resume == "never":
            return None
        require_intact(Path(resume))
        return Path(resume)

    def _prompts(self, setting: str, path: DataPath) -> PromptSource:
        source = load_prompts(self.config, setting, path, self.tokenizer, self.job.token_files)
        self.job.say(f"{setting}: {source.length_report.line()}")
        for remark in source.remarks:
            self.job.say(f"{setting}: {remark}")
        for problem in source.odd:
            self.job.say(f"{setting}: {as_warning(problem)}")
        return source

    def _progress(self, title: str) -> Progress:
        return Progress(title, shown=self.job.main, console=self.job.console)

    def _resume(self, path: Path) -> None:
        with self.phases("resume"):
            warning = self.state.restore(path, self.roles, trusted=self.config.checkpoint.trust)
        self.job.say(f"resumed from {path} at step {self.state.step}")
        if warning is not None:
            self.job.say(f"data.train: {warning}")
        self.checkpoints.write_anew(path, self.state.step, self.job)
        complete_for_megatron(self.config, self.roles.actor, self.state.step)

    def _run_stages(self) -> None:
        """Run the stages that have not ended; the engine counts the weights of each as a version."""
        plans = stage_plans(self.config)
        data = {plan.where: data for plan, data in zip(self.stages, self.stage_data, strict=True)}
        roles = {role.name: role for role in self.roles.models}
        for plan in plans:
            if plan.where in data:
                at_end = end_of(plan, self.roles, self.config)
                run_stage(stage_of(plan, roles[plan.role], data[plan.where], at_end), self.job)
            else:
                self.job.say(f"{plan.where}: has ended before, and left {plan.model}")
                drop_checkpoints(plan, self.job)
            if plan.role == "actor":
                self.roles.hybrid_engine.mark_updated(base=True)
        if plans:
            # As after a restart that finds every stage ended.
            checkpoint.seed_generators(self.config.seed, 0, self.roles.actor.model)

    def _step(self, log: MetricsLog | None) -> None:
        config, step = self.config, self.state.step + 1
        self.phases.step = step
        begun = time.perf_counter()
        held = self.state.held
        sets = self._sets_of(held)
        result, answered = self._take(step, sets)
        self.state.step = step
        seconds = time.perf_counter() - begun
        if held is not None:
            with self.phases("evaluate"):
                results = graded(self.roles, sets, answered)
            self._record(log, held.step, held.metrics + self.samples.keep_evaluation(held.step, results))
            self.state.held = None
        measured = Metrics({}, {"time/step": seconds}) + self.phases.metrics()
        measured += self.checkpoints.complete_what_is_written()
        for role in self.roles.models:
            measured += role.residency.metrics()
        metrics = gather_step(result, measured)
        if result is not None:
            self.state.algorithm = result.algorithm_state
            metrics += _throughput(result, metrics.values()["time/step"])
            metrics += Metrics.of({"policy/version": self.roles.hybrid_engine.version})
            if result.warning:
                self.job.say(f"step {step}: warning: {result.warning}")
        reasons, examples = self.samples.keep_step(step, result)
        last, evaluation = step == config.steps, config.evaluation
        due = [one for one in self.sets if step % evaluation.interval(one.name) == 0 or last]
        if due and not last and self.ahead is not None and not any(map(self._decides, due)):
            self.state.held = Held(step, tuple(one.name for one in due), metrics)
        else:
            metrics += self._evaluate(step, due) if due else Metrics()
            self._record(log, step, metrics)
        improved = self._is_among_best(step, metrics.values())
        if result is not None and self.job.main:
            invalid = 1.0 - float(result.batch.scores.valid.float().mean())
            self.failures.look(step, invalid, reasons, examples)
        if last or self._waited_enough():
            with self.phases("checkpoint"):
                self.checkpoints.save_for_good(step)
        elif step % config.checkpoint.every == 0 or improved:
            with self.phases("checkpoint"):
                self.checkpoints.save_now_and_then(step)

    def _is_among_best(self, step: int, values: Mapping[str, float]) -> bool:
        """Say whether a step measured one of the best values. Collective over the world."""
        settings = self.config.checkpoint
        if settings.best is None:
            return False
        value = gather_objects(values.get(settings.best))[0]
        if value is None:
            return False
        improved = self.state.best.measured(step, value, settings)
        if improved:
            self.job.say(
                f"step {step}: {settings.best} {value:.4f} is among the best, and its checkpoint stays"
            )
        elif self._waited_enough():
            kept, best = self.state.best.kept[0]
            self.job.say(
                f"step {step}: the run ends: {self.state.best.waited} measurements of {settings.best} "
                f"running were no better than {best:.4f} at step {kept} (evaluation.patience)"
            )
        return improved

    def _waited_enough(self) -> bool:
        patience = self.config.evaluation.patience
        return patience is not None and self.state.best.waited >= patience

    def _write(self, path: Path, layout: str, beside: bool) -> checkpoint.Saving:
        """Write a checkpoint of the present step, or begin to. Collective over the world."""
        saving = self.state.save(path, self.roles, self.config.checkpoint, layout=layout, beside=beside)
        begun = self.checkpoints.saved
        if begun is None or begun[0] != self.state.step:
            save_for_megatron(self.config, self.roles.actor, self.state.step)
        return saving

    def _take(self, step: int, sets: Sequence[EvaluationSet]) -> tuple[StepResult | None, list[Rollouts]]:
        """Take one step, beside which an asynchronous run answers ``sets``; return the answers, too."""
        if self.ahead is not None:
            self.ahead.sets = sets
        state = self.state.algorithm
        result = train_step(self.batches, self.roles, self.algorithm, state, self.config, step, self.phases)
        return result, [] if self.ahead is None else self.ahead.answers

    def _decides(self, one: EvaluationSet) -> bool:
        """Say whether what a set measures may keep a checkpoint or end the run: training waits for it."""
        return (self.config.checkpoint.best or "").startswith(f"eval/{one.name}/")

    def _sets_of(self, held: Held | None) -> list[EvaluationSet]:
        return [one for one in self.sets if held is not None and one.name in held.sets]

    def _record_held(self, log: MetricsLog | None) -> None:
        """Evaluate at once what was to be answered beside a step that this process takes not or not yet."""
        held, self.state.held = self.state.held, None
        if held is not None:
            self._record(log, held.step, held.metrics + self._evaluate(held.step, self._sets_of(held)))

    def _evaluate(self, step: int, sets: Sequence[EvaluationSet]) -> Metrics:
        with self.phases("evaluate"):
            results, synced = evaluate(self.roles, sets, self.config.seed)
        metrics = self.samples.keep_evaluation(step, results)
        return metrics + gather_metrics(self.phases.metrics() + synced)

    def _record(self, log: MetricsLog | None, step: int, metrics: Metrics) -> None:
        if log is not None:
            log.write(step, metrics.values())

    def _finish(self) -> None:
        config, model = self.config, self.roles.actor.model
        if config.checkpoint.export:
            if self.job.main:
                shutil.rmtree(self.folder.model, ignore_errors=True)  # of this run, before it went on
            barrier()
            if model is not None:
                with self.phases("export"), self.roles.actor.resident(Use.READ):
                    export(model, self.folder.model, config.model.path)
        barrier()
        for one in self.sets:
            one.close()
        self.roles.close()
        if self.job.main:
            self._report()

    def _report(self) -> None:
        """Write the report. The run is complete: whatever fails here is said, and fails nothing else."""
        try:
            write_report(self.folder.path, console=self.job.console)
        except Exception as error:
            self.job.say(
                f"warning: the run is complete, and its report cannot be written: {first_line(error)}; "
                f"fix: mend that, and call python -m megatron_rl report {self.folder.path}"
            )


def _throughput(result: StepResult, seconds: float) -> Metrics:
    tokens = float(result.batch.rollouts.lengths.sum())
    return Metrics.of({
        "throughput/tokens_per_second": tokens / seconds,
        "throughput/tokens_per_second_per_gpu": tokens / seconds / device.world_size(),
    })  # fmt: skip
