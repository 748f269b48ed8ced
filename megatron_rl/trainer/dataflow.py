"""User-defined dataflow: a user's script that executes the steps of a run.

`Run.steps` does the work around a step in the same way as the command ``train``: evaluation, checkpoints,
metrics and stop rules. The script executes the step itself. Every rank runs the same lines on the same
values, and each method here is collective over the world.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from megatron_rl.algorithms import (
    Algorithm,
    build_train_batch,
    minibatches,
    policy_objective,
    valid_rows,
    value_objective,
)
from megatron_rl.algorithms.aggregation import SeqMeanTokenSum
from megatron_rl.algorithms.estimation import make_train_rows
from megatron_rl.algorithms.preference import PreferenceSettings
from megatron_rl.algorithms.ragged import broadcast_rows
from megatron_rl.check.configuration import check_file
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.response_limits import AUTO
from megatron_rl.distributed.exchange import ReplicaGroup
from megatron_rl.errors import UserError, UserErrors, numbered_lines
from megatron_rl.launcher import current_launch, process_rank, watch_launcher
from megatron_rl.metrics import Metrics
from megatron_rl.roles.model_role import ModelRole, Objective
from megatron_rl.rollout.limits import compute_length_metrics
from megatron_rl.trainer.job import Job, Stopped, open_job
from megatron_rl.trainer.loop import (
    StepResult,
    check_mismatch,
    compute_log_probs,
    fresh_log_prob_difference,
    require_loss_tokens,
    step_seed,
)
from megatron_rl.trainer.rewards import ScoredBatch, compute_rewards, concatenate_batches
from megatron_rl.trainer.run import RunStep, Training
from megatron_rl.trainer.sample import (
    SampledBatch,
    gather_complete_round,
    start_complete_round,
    with_greedy_sampling,
)
from megatron_rl.trainer.stages import ROWS_PER_PAIR, preference_objective
from megatron_rl.types import PromptBatch, Rollouts, Scores, TrainBatch, row_counts


class Run:
    """A run whose steps a script executes, with the roles, engine and checkpoints of ``train``.

    ``config``: YAML file, as for ``train``. ``overrides``: settings such as ``steps=20``, which replace
    settings of the file. The configured algorithm determines which roles the run has, and provides default
    losses and advantages. If the script is started again, the run resumes from its newest checkpoint, as with
    ``train``.

    An exception inside the ``with`` block ends this process and thereby the job, so that no other rank waits
    forever. Raises UserErrors for an invalid configuration. Collective over the world.

    Example:
        ``with Run("run.yaml") as run:``
        ``    for step in run.steps():``
        ``        rollouts = run.generate(step.prompts)``
        ``        scores = run.score(rollouts, run.rewards(step.prompts, rollouts))``
        ``        run.actor.update(run.estimate(rollouts, scores))``
    """

    def __init__(self, config: str | Path, overrides: Iterable[str] = ()) -> None:
        watch_launcher()
        world_size = current_launch(joins_group=True).world_size
        report = check_file(config, list(overrides), world_size, training=True)
        if report.warnings and process_rank() == 0:
            print("\n".join(numbered_lines(report.warnings, "warning")), file=sys.stderr, flush=True)
        self.config: RunConfig = report.valid()
        self._explicit_keys = report.explicit_keys()
        _reject_unsupported(self.config)

        self._stack = ExitStack()
        self._entered_training: Training | None = None
        self._steps: Generator[RunStep] | None = None
        self._step: RunStep | None = None
        self._is_complete = False

        # Number of generate calls, batches and metrics of the current step.
        self._generate_calls = 0
        self._batches: list[ScoredBatch] = []
        self._metrics = Metrics()
        self._local_metrics = Metrics()

    def __enter__(self) -> Self:
        """Build the roles, and restore the newest checkpoint if there is one."""
        self._job: Job = self._stack.enter_context(open_job(self.config, self._explicit_keys))
        try:
            self._entered_training = Training(self._job)
            self._world = ReplicaGroup(None, self._job.phases.gather_stats)
        except BaseException:
            # Report the error and end this process, and thereby the job, as for an error in the block.
            self._stack.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the job. After an exception, report it and end this process."""
        if self._steps is not None:
            self._steps.close()
        if not self._is_complete and (error is None or isinstance(error, Stopped)):
            # Release the servers: a resumed run would otherwise wait until this run's lease expires.
            self._training.roles.close()
        self._stack.__exit__(error_type, error, traceback)

    @property
    def _training(self) -> Training:
        """Return the training state; raise RuntimeError outside the ``with`` block."""
        if self._entered_training is None:
            raise RuntimeError("a Run is used inside its `with` block")
        return self._entered_training

    @property
    def algorithm(self) -> Algorithm:
        """Return the configured algorithm: advantage estimator, losses and other components."""
        return self._training.algorithm

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer that was loaded from `model.path`."""
        return self._training.tokenizer

    @property
    def actor(self) -> LearningRole:
        """Return the actor; its updates are synced to the rollout engine before the next generation."""
        return LearningRole(self, self._training.roles.actor, partial(policy_objective, self.algorithm))

    @property
    def critic(self) -> LearningRole:
        """Return the critic; raise UserError if the algorithm has no critic."""
        critic = self._training.roles.critic
        if critic is None:
            raise UserError(
                "this run has no critic",
                where="algorithm.name",
                expected="an algorithm with a critic, such as ppo",
                got=self.algorithm.name,
                fix="set algorithm.name: ppo, or do not use run.critic",
            )
        return LearningRole(self, critic, partial(value_objective, self.algorithm))

    def steps(self) -> Iterator[Step]:
        """Yield the remaining steps.

        A new run first runs its stages (`sft`, `preference`, reward models). After the script has executed a
        step, this writes the step's metrics and samples, and evaluates and saves as scheduled. After the last
        step it writes the model and the report. If the script leaves the loop early, the run can be resumed.
        """
        training = self._training
        self._steps = training.steps()
        for step in self._steps:
            self._step = step
            self._generate_calls = 0
            self._batches = []
            self._metrics = Metrics()
            self._local_metrics = Metrics()
            yield Step(self, step.number)

            batch = None
            local_metrics = self._local_metrics
            if self._batches:
                batch = concatenate_batches(self._batches)
                local_metrics += batch.metrics
            step.result = StepResult(
                self._metrics, local_metrics, batch, training.state.algorithm, advantages=None
            )
            self._step = None
        self._is_complete = True

    def generate(
        self,
        prompts: PromptBatch,
        samples: int | None = None,
        *,
        greedy: bool = False,
    ) -> Rollouts:
        """Sample responses to P prompts with the actor's weights: P * ``samples`` rows.

        With `hybrid_engine.every` above 1, the weights may be up to that number of updates old. The rows of a
        prompt are consecutive and have the same ``group``. The seed depends on the step and on the number of
        earlier calls in the step.

        ``samples``: responses per prompt, or None for `batch.samples_per_prompt`.
        ``greedy``: always select the most likely token, without filters.
        """
        training = self._training
        roles = training.roles
        seed = step_seed(self.config, self._current_step.number) + self._generate_calls
        self._generate_calls += 1
        if greedy:
            prompts = with_greedy_sampling(prompts)

        samples_per_prompt = samples or self.config.batch.samples_per_prompt
        with training.phases("generate"), roles.hybrid_engine.generation_mode() as sync_metrics:
            version = roles.hybrid_engine.rollout_version
            pending = start_complete_round(roles.rollout, prompts, samples_per_prompt, seed, version)
            rollouts = gather_complete_round(roles.rollout, pending, self._world)
        self._local_metrics += sync_metrics
        self._metrics += compute_length_metrics(prompts, rollouts, self.config.rollout)
        return rollouts

    def rewards(self, prompts: PromptBatch, rollouts: Rollouts) -> Scores:
        """Compute the rewards of the rows that `generate` returned for ``prompts``.

        In the returned scores, ``valid`` [B] is false for rows whose reward failed, and their ``rewards`` [B]
        are NaN. The rows are added to the step's sample table and metrics.
        """
        training = self._training
        sampled = SampledBatch(prompts, rollouts, None, Metrics())
        with training.phases("reward"):
            batch = compute_rewards(training.roles, sampled, self._world)
        self._batches.append(batch)
        return batch.scores

    def score(self, rollouts: Rollouts, scores: Scores) -> Scores:
        """Compute the log-probs and values of the run's models; return ``scores`` with them filled in.

        The actor computes ``old_log_probs`` and ``entropy`` [N]. If the algorithm needs them, a reference
        computes ``ref_log_probs`` [N] and a critic computes ``values`` [N]. Raises MismatchError if the
        actor's log-probs differ from the engine's by more than `mismatch.stop`.
        """
        training = self._training
        had_valid_rows = bool(scores.valid.any())
        batch = ScoredBatch(_make_empty_prompts(), rollouts, scores, ())
        with training.phases("score"):
            batch = compute_log_probs(
                batch,
                training.roles,
                self.config,
                self._current_step.number,
                self._world,
                force_actor=True,
            )
        scores = batch.scores
        self._local_metrics += batch.metrics

        # Only a teacher's server makes rows invalid here.
        if had_valid_rows and not bool(scores.valid.any()):
            failure_message = "failures on the rank that sends the requests"
            if batch.failures:
                failure_message = batch.failures[0].message
            raise UserError(
                "the teacher's server returned no log-probs",
                where="teacher_server.url",
                expected="log-probs of the step's rows",
                got=failure_message,
                fix="start the server again, and resume the run",
            )

        version = training.roles.hybrid_engine.version
        valid = valid_rows(rollouts, scores, self.algorithm)
        check_mismatch(fresh_log_prob_difference(rollouts, scores, valid, version), self.config.mismatch)
        return scores

    def estimate(self, rollouts: Rollouts, scores: Scores) -> TrainBatch:
        """Compute the training batch of the configured algorithm: advantages, returns and corrections.

        Raises UserError if no token has a loss because filters have removed all tokens.
        """
        training = self._training
        with training.phases("estimate"):
            batch, metrics = build_train_batch(rollouts, scores, self.algorithm, training.state.algorithm)
            require_loss_tokens(batch, metrics)
        self._metrics += metrics
        return batch

    def batch(
        self,
        rollouts: Rollouts,
        advantages: Tensor,
        scores: Scores | None = None,
    ) -> TrainBatch:
        """Return a training batch with advantages that the script has computed, [B] or [N].

        Tokens whose advantage is NaN are not trained on. ``scores``: result of `score`, whose log-probs are
        added to the batch; None for a loss that does not need log-probs.
        """
        if len(advantages) == len(rollouts):
            advantages = broadcast_rows(advantages, rollouts.lengths)
        mask = rollouts.response_mask & ~advantages.isnan()
        batch = replace(
            make_train_rows(rollouts, mask), advantages=torch.where(mask, advantages.float(), 0.0)
        )
        if scores is not None:
            batch = replace(
                batch,
                old_log_probs=scores.old_log_probs,
                ref_log_probs=scores.ref_log_probs,
                teacher_top_ids=scores.teacher_top_ids,
                teacher_top_log_probs=scores.teacher_top_log_probs,
            )
        return batch

    def pairs(
        self,
        rollouts: Rollouts,
        chosen: Sequence[int],
        rejected: Sequence[int],
        scores: Scores | None = None,
    ) -> Pairs:
        """Return pairs of rows for a preference loss: row ``chosen[i]`` is preferred to ``rejected[i]``.

        Pairs with an empty response are omitted. ``scores``: result of `score`, whose log-probs are added to
        the pairs; losses with a reference need these log-probs.
        """
        response_lengths = row_counts(rollouts.response_mask, rollouts.lengths)
        pair_rows: list[int] = []
        for pair in zip(chosen, rejected, strict=True):
            if all(int(response_lengths[row]) for row in pair):
                pair_rows.extend(pair)

        # The two rows of a pair form a group, and groups are never split over mini-batches.
        batch = self.batch(rollouts, torch.zeros(len(rollouts)), scores).rows(pair_rows)
        return Pairs(
            replace(
                batch,
                group=torch.arange(len(pair_rows) // ROWS_PER_PAIR).repeat_interleave(ROWS_PER_PAIR),
                position=torch.arange(len(pair_rows)),
            )
        )

    @property
    def _current_step(self) -> RunStep:
        """Return the current step; raise RuntimeError outside the loop over `steps`."""
        if self._step is None:
            raise RuntimeError("generate, score and update are called inside the loop over run.steps()")
        return self._step

    def _draw_prompts(self) -> PromptBatch:
        """Return the next `batch.prompts_per_step` prompts of the training data."""
        return self._training.prompts.next_batch(self.config.batch.prompts_per_step)

    def _log(self, values: Metrics | Mapping[str, float]) -> None:
        """Add metrics to the current step."""
        if not isinstance(values, Metrics):
            values = Metrics.of(values)
        self._metrics += values

    def _update(
        self,
        role: ModelRole,
        batch: TrainBatch | Pairs,
        objective: Objective,
        optimizer_steps: int | None,
        epochs: int | None,
    ) -> None:
        """Update a role's weights with one optimizer step per mini-batch; add the metrics to the step."""
        algorithm = self.algorithm
        update_options: dict[str, Any] = {}
        if isinstance(batch, Pairs):
            # The loss is a mean over pairs; the two rows of a pair must be in the same micro-batch.
            algorithm = replace(algorithm, aggregation=SeqMeanTokenSum())
            update_options["rows_per_unit"] = ROWS_PER_PAIR
            batch = batch.rows

        with self._training.phases("learn"), role.resident():
            for minibatch in minibatches(
                batch,
                algorithm,
                optimizer_steps or self.config.batch.optimizer_steps,
                epochs or self.config.batch.epochs,
                step_seed(self.config, self._current_step.number),
            ):
                self._local_metrics += role.update(minibatch, objective, **update_options)
        if role is self._training.roles.actor:
            # The next generation syncs the weights to the engine.
            self._training.roles.hybrid_engine.mark_updated()


@dataclass(frozen=True)
class Pairs:
    """Pairs of a preferred (chosen) and a rejected response for a preference loss, made by `Run.pairs`."""

    rows: TrainBatch
    """2 P rows: chosen and rejected row of each of P pairs."""

    def __len__(self) -> int:
        return len(self.rows) // ROWS_PER_PAIR


class Step:
    """One step of a run.

    ``number``: number of the step, from 1; a resumed run continues the numbering.
    """

    def __init__(self, run: Run, number: int) -> None:
        self.number = number
        self._run = run
        self._prompts: PromptBatch | None = None

    @property
    def prompts(self) -> PromptBatch:
        """Return the step's prompts: the next `batch.prompts_per_step` of `data.train`."""
        if self._prompts is None:
            self._prompts = self._run._draw_prompts()
        return self._prompts

    def log(self, values: Metrics | Mapping[str, float]) -> None:
        """Add metrics, named ``group/name``, to the step; they must be equal on every rank."""
        self._run._log(values)


class LearningRole:
    """Actor or critic of a `Run`, whose weights a script updates."""

    def __init__(self, run: Run, role: ModelRole, objective: Objective) -> None:
        self._run = run
        self._role = role
        self._objective = objective

    def update(
        self,
        batch: TrainBatch | Pairs,
        loss: Objective | None = None,
        *,
        optimizer_steps: int | None = None,
        epochs: int | None = None,
    ) -> None:
        """Train on a batch, and add the metrics of the updates to the current step.

        ``loss``: function ``loss(rows, log_probs, entropy)`` of a micro-batch, or ``loss(rows, values)`` for
            a critic. It returns ``sum(rows.loss_weights * l)`` with losses ``l`` per token, and `Metrics`.
            The weights contain the denominator of the whole mini-batch, so that sums over micro-batches and
            ranks are exact. None uses the configured algorithm's loss; for pairs, None uses the DPO loss.
        ``optimizer_steps``: number of mini-batches, or None for `batch.optimizer_steps`.
        ``epochs``: number of epochs over the batch, or None for `batch.epochs`.
        """
        objective = loss or self._objective
        if loss is not None and isinstance(batch, TrainBatch):
            # Only the configured loss reads the log-probs of a teacher's tokens.
            batch = replace(batch, teacher_top_ids=None, teacher_top_log_probs=None)
        if loss is None and isinstance(batch, Pairs):
            objective = partial(preference_objective, PreferenceSettings())
        self._run._update(self._role, batch, objective, optimizer_steps, epochs)


def _make_empty_prompts() -> PromptBatch:
    """Return a batch without prompts, for computations on rows that do not use their prompts."""
    empty = torch.zeros(0, dtype=torch.long)
    return PromptBatch(
        tokens=empty,
        lengths=empty,
        prompt_ids=empty,
        tasks=(),
        prompts=(),
        ground_truths=(),
        metadata=(),
        sampling=(),
    )


def _reject_unsupported(config: RunConfig) -> None:
    """Raise UserErrors for settings that a user's script with its own training loop cannot use.

    Only the training loop of the command ``train`` implements these settings.
    """
    # Key -> whether the setting differs from its default.
    unsupported_settings = {
        "job": config.job != TRAIN,
        "asynchrony.steps_ahead": config.asynchrony.steps_ahead,
        "rollout.oversample": config.rollout.oversample,
        "rollout.filters.refill": config.rollout.filters.refill,
        # A script computes log-probs of rows without their prompts, so the tasks of the rows are unknown.
        "teachers": config.teachers,
        # Automatic limits need response lengths, which only `RolloutSource` of ``train`` records.
        "rollout.max_response_tokens": AUTO in config.rollout.limit_settings.values(),
    }

    errors = [
        UserError(
            f"a script that runs the steps cannot use {key}",
            where=key,
            expected="its default",
            got="another value",
            fix=f"remove {key}, or train with `megatron-rl train`",
        )
        for key, is_set in unsupported_settings.items()
        if is_set
    ]

    if errors:
        raise UserErrors(errors)
