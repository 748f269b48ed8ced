"""A whole run: warm-up, reinforcement learning, evaluation, checkpoints, export and report."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from megatron_rl.algorithms import Algorithm, get_algorithm, initial_state
from megatron_rl.config.derive import warm_up_path
from megatron_rl.config.load import dump
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompts import PromptSource
from megatron_rl.data.records import load_records
from megatron_rl.data.tokenizing import load_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics
from megatron_rl.parallel import checkpoint, device
from megatron_rl.parallel.exchange import barrier, gather_metrics, gather_objects, leave, traffic_metrics
from megatron_rl.parallel.hf.export import export
from megatron_rl.roles.build import Roles, build_roles
from megatron_rl.trainer.asynchrony import AheadTrainer
from megatron_rl.trainer.evaluation import EvaluationResult, evaluate
from megatron_rl.trainer.failure import describe_rank, report_failure
from megatron_rl.trainer.logging import MetricsLog, Progress, RunFolder, output_to
from megatron_rl.trainer.loop import StepResult, train_step
from megatron_rl.trainer.phases import Phases
from megatron_rl.trainer.report import write as write_report
from megatron_rl.trainer.run_lock import only_job_in
from megatron_rl.trainer.sampler import Sampler
from megatron_rl.trainer.state import TrainerState
from megatron_rl.trainer.stop import leave_with_launcher, report_stop
from megatron_rl.trainer.warm_up import train_actor, train_on_preferences, train_reward_models


def run(config: RunConfig) -> None:
    """Train as a resolved and checked configuration says; results lie in ``config.run_dir``.

    A failure of any rank is reported with its rank, role and phase and ends the process, and with it the
    job. Collective over the world.
    """
    leave_with_launcher()
    phases = Phases()
    folder = RunFolder(config.run_dir).create()
    main = device.rank() == 0
    with (
        # Outermost: a rank may be stopped while it reports the failure that a lost peer caused it.
        report_stop(describe_rank(config, device.rank()), phases),
        report_failure(config, phases),
        only_job_in(folder.path, sys.stdout) if main else nullcontext(),
        output_to(folder.rank_log(device.rank()), main) as console,
    ):
        Run(config, folder, console, phases).run()
        leave()


class Run:
    """Hold the parts of one run on this rank."""

    def __init__(self, config: RunConfig, folder: RunFolder, console: Any, phases: Phases) -> None:
        self.config, self.folder, self.console, self.phases = config, folder, console, phases
        self.main = device.rank() == 0
        settings = {"max_response_tokens": config.rollout.max_response_tokens, **config.algorithm.settings}
        self.algorithm: Algorithm = get_algorithm(config.algorithm.name, settings)
        self.tokenizer: Any = load_tokenizer(config.model.path)
        with phases("data"):
            self.prompts = self._prompts(config.data.train, "data.train")
            self.held_out = self._held_out()
        device.initialize(config.rank_timeout)
        if self.main:
            folder.write_config(dump(config))
            if config.checkpoint.resume == "never":
                folder.start_over()
        barrier()
        with phases("build"), Progress("build models and engine", shown=self.main, console=console):
            self.roles: Roles = build_roles(config, self.algorithm, self.tokenizer)
        self.sampler = Sampler(config, self.roles, self.algorithm, self.prompts.next)
        self.ahead = None
        if config.asynchrony.steps_ahead:
            self.ahead = AheadTrainer(config, self.roles, self.algorithm, self.sampler)
        queue = [] if self.ahead is None else self.ahead.queue
        state = initial_state(self.algorithm)
        self.state = TrainerState(self.prompts, state, config.seed, self.sampler, queue)

    def run(self) -> None:
        """Resume or warm up, take the remaining steps, and leave the results behind."""
        config = self.config
        resumed = self._resume()
        if resumed is None:
            self._warm_up()
        log = None
        if self.main:
            step = None if resumed is None else self.state.step
            log = MetricsLog(self.folder, config.steps, resumed_step=step, console=self.console)
        self.phases.metrics()  # what came before belongs to no step
        if resumed is None and self.held_out is not None and config.evaluation.at_start:
            self._record(log, 0, self._evaluate(0))
        while self.state.step < config.steps:
            self._step(log)
        if log is not None:
            log.close()
        self._finish()

    def _prompts(self, path: str, setting: str) -> PromptSource:
        config = self.config
        source = PromptSource(
            load_records(path, setting=setting),
            self.tokenizer,
            config.data,
            config.rollout,
            seed=config.seed,
            model_path=config.model.path,
            setting=setting,
        )
        if self.main:
            self._say(f"{setting}: {source.length_report.line()}")
        return source

    def _held_out(self) -> Any:
        if self.config.data.eval is None:
            return None
        source = self._prompts(self.config.data.eval, "data.eval")
        evaluation = self.config.evaluation
        return source.everything(evaluation.max_prompts, evaluation.temperature)

    def _resume(self) -> Path | None:
        resume = self.config.checkpoint.resume
        path = None
        if resume == "auto":
            path = checkpoint.latest(self.config.run_dir)
        elif resume != "never":
            path = Path(resume)
        if path is None:
            return None
        reference = self.config.reference
        warm = warm_up_path(self.config)
        if reference is not None and reference.path == warm and not Path(warm).is_dir():
            raise UserError(
                "the model after the supervised warm-up, which the reference is, is not in the run folder",
                where="reference.path",
                expected="a Hugging Face checkpoint, which the run left when its warm-up ended",
                got=f"no directory {reference.path}",
                fix="set reference.path to warm_up in the folder of the run that is resumed",
            )
        with self.phases("resume"):
            self.state.restore(path, self.roles)
        if self.main:
            self._say(f"resumed from {path} at step {self.state.step}")
        return path

    def _warm_up(self) -> None:
        """Train what is to be trained before any reinforcement learning."""
        parts = (self.config, self.roles, self.tokenizer, self.folder, self.phases, self.console)
        if self.config.sft is not None:
            train_actor(*parts)
        if self.config.preference is not None:
            train_on_preferences(*parts)
        train_reward_models(*parts)

    def _step(self, log: MetricsLog | None) -> None:
        config, step = self.config, self.state.step + 1
        self.phases.step = step
        traffic_metrics()  # what an evaluation moved belongs to no step
        begun = time.perf_counter()
        result = self._take(step)
        self.state.step = step
        seconds = time.perf_counter() - begun
        own = Metrics({}, {"time/step": seconds}) + self.phases.metrics() + traffic_metrics()
        for role in self.roles.models:
            own += role.residency.metrics()
        metrics = gather_metrics(own)
        if result is not None:
            self.state.algorithm = result.algorithm_state
            metrics += result.metrics + _throughput(result, metrics.values()["time/step"])
            metrics += Metrics.of({"policy/version": self.roles.hybrid_engine.version})
            if result.warning and self.main:
                self._say(f"step {step}: warning: {result.warning}")
        self._keep_rollouts(step, result)
        if self.held_out is not None and (step % config.evaluation.every == 0 or step == config.steps):
            metrics += self._evaluate(step)
        self._record(log, step, metrics)
        if step % config.checkpoint.every == 0 or step == config.steps:
            with self.phases("checkpoint"):
                self.state.save(config.run_dir, self.roles, config.checkpoint.keep)

    def _take(self, step: int) -> StepResult | None:
        """Take one step; None on a rank that only samples, ahead of the others."""
        state = self.state.algorithm
        if self.ahead is not None:
            return self.ahead.step(state, step, self.phases)
        return train_step(self.sampler, self.roles, self.algorithm, state, self.config, step, self.phases)

    def _evaluate(self, step: int) -> Metrics:
        with self.phases("evaluate"):
            result: EvaluationResult = evaluate(self.roles, self.held_out, self.config)
        if self.main:
            columns = self._columns(result.prompts, result.rollouts)
            columns["reward"] = result.rewards.tolist()
            self.folder.write_rollouts(step, columns, kind="eval")
        return result.metrics + gather_metrics(self.phases.metrics())

    def _record(self, log: MetricsLog | None, step: int, metrics: Metrics) -> None:
        if log is not None:
            log.write(step, metrics.values())

    def _keep_rollouts(self, step: int, result: StepResult | None) -> None:
        """Store the step's samples with their judgement, and say why rewards failed."""
        failures = [failure for part in gather_objects(self.roles.reward.failures[:4]) for failure in part]
        if not self.main or result is None:
            return
        for failure in failures[:4]:
            self._say(f"step {step}: a reward failed ({failure.reason}): {failure.message.strip()[-300:]}")
        graded, rollouts = result.graded, result.graded.rollouts
        columns = self._columns(graded.prompts, rollouts)
        columns["group"] = rollouts.group.tolist()
        columns["reward"] = graded.rewards.tolist()
        columns["valid"] = graded.valid.tolist()
        columns["policy_version"] = rollouts.policy_version.tolist()
        columns["finish_reason"] = rollouts.finish_reason.tolist()
        self.folder.write_rollouts(step, columns)

    def _columns(self, prompts: Any, rollouts: Any) -> dict[str, Any]:
        return {
            "prompt": list(prompts.prompts),
            "response": self.roles.reward.responses(rollouts),
            "ground_truth": [str(truth) for truth in prompts.ground_truths],
        }

    def _finish(self) -> None:
        config, model = self.config, self.roles.actor.model
        if config.checkpoint.export:
            target = self.folder.path / "hf"
            if self.main:
                shutil.rmtree(target, ignore_errors=True)  # of this run, before it went on
            barrier()
            if model is not None:
                with self.phases("export"), self.roles.actor.resident():
                    export(model, target, config.model.path)
        barrier()
        self.roles.close()
        if self.main:
            write_report(self.folder.path, console=self.console)

    def _say(self, text: str) -> None:
        self.console.write(text + "\n")
        self.console.flush()


def _throughput(result: StepResult, seconds: float) -> Metrics:
    tokens = float(result.graded.rollouts.lengths.sum())
    return Metrics.of({
        "throughput/tokens_per_second": tokens / seconds,
        "throughput/tokens_per_second_per_gpu": tokens / seconds / device.world_size(),
    })  # fmt: skip
