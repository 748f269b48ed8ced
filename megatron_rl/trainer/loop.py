"""One step of reinforcement learning, as every rank runs it. Read this file first.

All ranks run the same lines, and a batch has the same value on every learner (rank that trains). A call of a
role shards the batch's rows over the role's ranks and returns immediately on other ranks, so roles on
disjoint ranks run in parallel. `ReplicaGroup.gather_rows` then gathers their outputs onto every learner.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.algorithms import (
    Algorithm,
    AlgorithmState,
    build_train_batch,
    minibatches,
    next_state,
    old_policy_metrics,
    policy_objective,
    valid_rows,
    value_objective,
)
from megatron_rl.algorithms.ragged import masked_row_means
from megatron_rl.config.roles import TEACHER, teacher_of_task
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import MismatchConfig
from megatron_rl.data.mixture import TrainingPrompts
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import (
    GatherStats,
    ReplicaGroup,
    RowShard,
    gather_metrics,
)
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics
from megatron_rl.roles.build import Roles
from megatron_rl.roles.served_teacher import NO_LOG_PROBS, VALID, TeacherResults
from megatron_rl.trainer.rewards import (
    ScoredBatch,
    combine_rounds,
    compute_rewards,
    count_prompts_to_add,
    record_groups,
)
from megatron_rl.trainer.sample import RolloutSource, refill_filtered_rows
from megatron_rl.types import (
    Rollouts,
    Scores,
    TrainBatch,
    row_index,
    token_index,
)

_SCORE_FIELDS = frozenset(item.name for item in fields(Scores))


@dataclass(frozen=True)
class StepResult:
    """Result of one step on a rank that trained.

    Example: ``metrics`` has ``reward/mean`` and ``kl/ref`` of the batch, and ``local_metrics`` has
    ``policy/loss`` of this rank's micro-batches.
    """

    metrics: Metrics
    """Metrics of the whole batch, equal on every rank that trained."""
    local_metrics: Metrics
    """Metrics of this rank only, which `gather_step_metrics` sums over the ranks."""
    batch: ScoredBatch | None
    """The rows of the step with their rewards; None if the step computed no rewards. Its ``failures`` and
    ``metrics`` are local to this rank."""
    algorithm_state: AlgorithmState
    """State of the algorithm for the next step, the same value on every rank."""
    advantages: Tensor | None
    """[B] float32, mean advantage of each row's response tokens; None if a script computed its own."""


class BatchSource(Protocol):
    """Source of a run's batches: `SameStepBatches`, or `AheadBatches`, which samples in earlier steps.

    ``learners``: ranks that train, or None for all ranks.
    """

    learners: tuple[int, ...] | None

    def produce_batch(
        self,
        step: int,
        phases: Phases,
        learners: ReplicaGroup,
    ) -> AbstractContextManager[tuple[ScoredBatch | None, Metrics]]:
        """Sample responses and compute rewards; yield the batch of ``step`` and this rank's sampling metrics.

        ``learners``: the ranks that train. All learners get the same batch; ranks that only sample get None.
        ``phases``: timer of the step's phases. Responses that are sampled during the block are gathered when
        the block ends. Collective over the world.
        """
        ...


class SameStepBatches:
    """Batch source of a synchronous run: every step samples on all ranks, then trains on its own batch.

    Dynamic sampling repeats generation and rewards until enough groups have rewards that are not all equal.
    """

    learners: tuple[int, ...] | None = None

    def __init__(
        self,
        config: RunConfig,
        roles: Roles,
        algorithm: Algorithm,
        source: RolloutSource,
        prompts: TrainingPrompts,
    ) -> None:
        self.config = config
        self.roles = roles
        self.algorithm = algorithm
        self.source = source
        self.prompts = prompts

    @contextmanager
    def produce_batch(
        self,
        step: int,
        phases: Phases,
        learners: ReplicaGroup,
    ) -> Iterator[tuple[ScoredBatch | None, Metrics]]:
        """Sample the batch in this step and compute its rewards, in as many rounds as dynamic sampling needs.

        See `BatchSource.produce_batch`.
        """
        rounds: list[ScoredBatch] = []
        sync_metrics = Metrics()
        while prompt_count := count_prompts_to_add(rounds, self.algorithm, self.config):
            # Every round of a step has a different seed, see `step_seed`.
            seed = step_seed(self.config, step) + len(rounds)
            with (
                phases("generate"),
                self.roles.hybrid_engine.generation_mode() as round_metrics,
            ):
                pending = self.source.start_round(prompt_count, seed)
                sampled = self.source.finish_round(pending, learners)
                sampled = refill_filtered_rows(self.source, sampled, seed, learners)

            with phases("reward"):
                rounds.append(compute_rewards(self.roles, sampled, learners))
                record_groups(rounds[-1], self.prompts)
            sync_metrics += round_metrics

        batch = combine_rounds(rounds, self.algorithm, self.config)
        yield batch, sync_metrics


def train_step(
    batches: BatchSource,
    roles: Roles,
    algorithm: Algorithm,
    state: AlgorithmState,
    config: RunConfig,
    step: int,
    phases: Phases,
) -> StepResult | None:
    """Run one step: sample and reward a batch, compute log-probs and advantages, update critic and actor.

    ``state`` is the algorithm's state between steps, such as an adaptive KL coefficient. ``phases`` is the
    timer of the step's phases. Returns None on ranks that only sample. Collective over the world.
    """
    # The ranks that have the batch: all ranks, unless some only sample for later steps.
    learners = ReplicaGroup(batches.learners, phases.gather_stats)
    result = None

    with batches.produce_batch(step, phases, learners) as (batch, sampling_metrics):
        if batch is not None:
            # Run the forward passes of actor, critic and reference, each on its role's ranks.
            with phases("score"):
                batch = compute_log_probs(batch, roles, config, step, learners)

            # Every learner computes the same advantages: they are pure functions of the replicated batch.
            with phases("estimate"):
                train_batch, batch_metrics = build_train_batch(batch.rollouts, batch.scores, algorithm, state)
                require_loss_tokens(train_batch, batch_metrics)

            # Run the optimizer steps of critic and actor, with loss denominators over all ranks.
            with phases("learn"):
                update = update_weights(
                    train_batch,
                    batch,
                    roles,
                    algorithm,
                    state,
                    config,
                    step,
                    learners,
                )

            result = _make_step_result(
                batch,
                train_batch,
                batch_metrics,
                sampling_metrics,
                update,
                algorithm,
                state,
            )

    # Increment the version on every rank: the next weight sync, which is collective, depends on it.
    if actor_learns(config, roles, step):
        roles.hybrid_engine.mark_updated()
    return result


def compute_log_probs(
    batch: ScoredBatch,
    roles: Roles,
    config: RunConfig,
    step: int,
    learners: ReplicaGroup,
    *,
    force_actor: bool = False,
) -> ScoredBatch:
    """Run the actor, critic and reference forward passes and attach their log-probs and values.

    The actor's pass is skipped if the first pass of `update_weights` computes the same log-probs;
    ``force_actor`` forces it. Outputs without a field in `Scores`, such as a teacher's, are stored in
    `Scores.columns`. Collective over the learners.
    """
    roles_to_run = list(roles.forward_roles.values())
    if force_actor or roles.scoring_pass or not actor_learns(config, roles, step):
        roles_to_run.insert(0, roles.actor)

    # Requests to a teacher's server run in a thread while the roles compute.
    pending_results: Future[TeacherResults] | None = None
    served_teacher = roles.served_teacher
    rows_by_teacher = _rows_by_teacher(batch, roles, config)
    if served_teacher is not None:
        served_rows = rows_by_teacher.get(served_teacher.name)
        rollouts = batch.rollouts if served_rows is None else batch.rollouts.rows(served_rows)
        is_sender = learners.rank == learners.ranks[0]
        pending_results = served_teacher.start_requests(rollouts, is_sender)

    # Start all roles before any output is gathered, so that roles on disjoint ranks run in parallel. Each
    # shard is stored with the indices of its rows, or None for all rows. Only a teacher that is restricted to
    # some tasks has indices.
    shards: list[tuple[list[int] | None, RowShard]] = []
    for role in roles_to_run:
        rows = rows_by_teacher.get(role.name)
        if rows is None:
            shards.append((None, role.infer(batch.rollouts)))
        elif rows:
            shards.append((rows, role.infer(batch.rollouts.rows(rows))))

    columns: dict[str, Tensor] = {}
    for rows, shard in shards:
        outputs = learners.gather_rows(shard).tokens
        if rows is None:
            columns |= outputs
        else:
            _scatter_columns(columns, outputs, batch.rollouts.lengths, rows)
    if pending_results is not None:
        assert served_teacher is not None
        served_rows = rows_by_teacher.get(served_teacher.name)
        batch = _add_served_columns(batch, columns, pending_results.result(), served_rows, learners)

    # Store the outputs in the fields of `Scores`; the remaining outputs are extra columns.
    score_fields = {name: columns.pop(name) for name in _SCORE_FIELDS if name in columns}
    return replace(batch, scores=replace(batch.scores, **score_fields, columns=columns))


def _rows_by_teacher(
    batch: ScoredBatch,
    roles: Roles,
    config: RunConfig,
) -> dict[str, list[int]]:
    """Return the rows for which each teacher computes log-probs: name of the teacher's role -> row indices.

    The result is empty if no teacher is restricted to tasks. Raises UserError for a row whose task has no
    teacher.
    """
    if not config.teachers:
        return {}
    teacher_by_task = teacher_of_task(config)
    task_teachers = (TEACHER.name, *teacher_by_task.values())
    teacher_names = [name for name in roles.forward_roles if name in task_teachers]
    default_teacher = TEACHER.name
    if roles.served_teacher is not None:
        default_teacher = roles.served_teacher.name
        teacher_names.append(default_teacher)
    # The configuration can have teachers that the algorithm does not use.
    if not teacher_names:
        return {}

    # A script with its own step may score rows without their prompts.
    if len(batch.prompts) != len(batch.rollouts):
        raise UserError(
            "teachers with tasks need the prompt of each row",
            where="teachers",
            expected=f"{len(batch.rollouts)} prompts",
            got=f"{len(batch.prompts)}",
            fix="use one `teacher` for all tasks",
        )

    rows_by_teacher: dict[str, list[int]] = {name: [] for name in teacher_names}
    for row, task in enumerate(batch.prompts.tasks):
        teacher = teacher_by_task.get(task, default_teacher)
        if teacher not in rows_by_teacher:
            raise UserError(
                f"the task {task!r} has no teacher",
                where="teachers",
                expected=f"a task that has a teacher: {', '.join(sorted(teacher_by_task))}",
                got=f"a response to a prompt of the task {task!r}",
                fix="name the task in teachers.NAME.tasks, or set teacher.path for all other tasks",
            )
        rows_by_teacher[teacher].append(row)
    return rows_by_teacher


def _scatter_columns(
    columns: dict[str, Tensor],
    outputs: Mapping[str, Tensor],
    lengths: Tensor,
    rows: list[int],
) -> None:
    """Write a role's outputs for some of the rows into ``columns``, which cover all tokens of the batch.

    ``outputs``: name of an output -> its values at the tokens of ``rows``. ``lengths``: number of tokens of
    each row of the batch. ``rows``: indices of the rows with outputs. A column that does not exist yet is
    created, and is 0 at the tokens of all other rows.
    """
    token_indices = token_index(lengths, torch.tensor(rows, dtype=torch.long))
    for name, values in outputs.items():
        if name not in columns:
            columns[name] = values.new_zeros((int(lengths.sum()), *values.shape[1:]))
        columns[name][token_indices] = values


def _add_served_columns(
    batch: ScoredBatch,
    columns: dict[str, Tensor],
    results: TeacherResults,
    rows: list[int] | None,
    learners: ReplicaGroup,
) -> ScoredBatch:
    """Write a served teacher's outputs into ``columns``; return the batch with failed rows marked invalid.

    ``rows``: indices of the rows of ``results``, or None for all rows. Collective over the learners.
    """
    if rows is None:
        rows = list(range(len(batch.rollouts)))
    teacher_outputs = learners.gather_rows(results.shard)
    _scatter_columns(columns, teacher_outputs.tokens, batch.rollouts.lengths, rows)

    # A row without the teacher's log-probs is invalid, like a row without a reward.
    has_log_probs = teacher_outputs.values[VALID].tolist()
    failed_rows = {row for row, is_valid in zip(rows, has_log_probs, strict=True) if not is_valid}
    valid = batch.scores.valid.clone()
    valid[sorted(failed_rows)] = False
    reasons = tuple(
        NO_LOG_PROBS if row in failed_rows and reason is None else reason
        for row, reason in enumerate(batch.reasons)
    )
    # The teacher counts rows within its own requests: convert to row indices of the batch.
    teacher_failures = [failure._replace(row=rows[failure.row]) for failure in results.failures]
    return replace(
        batch,
        scores=replace(batch.scores, valid=valid),
        reasons=reasons,
        metrics=batch.metrics + results.metrics,
        failures=(*batch.failures, *teacher_failures),
    )


@dataclass(frozen=True)
class WeightUpdate:
    """Result of a step's updates of critic and actor on this rank."""

    scores: Scores
    """The batch's scores, including the actor's log-probs before its first update."""
    metrics: Metrics
    """Losses and optimizer statistics of this rank only."""


def update_weights(
    train_batch: TrainBatch,
    batch: ScoredBatch,
    roles: Roles,
    algorithm: Algorithm,
    state: AlgorithmState,
    config: RunConfig,
    step: int,
    learners: ReplicaGroup,
) -> WeightUpdate:
    """Update the critic's and the actor's weights, one optimizer step per mini-batch.

    Raises MismatchError, before the actor's first update, if the log-probs of actor and rollout engine differ
    too much. If `compute_log_probs` has skipped the actor, this function computes the actor's log-probs in
    the first forward pass, before any update. Collective over the learners.
    """

    def compare_with_engine(scores: Scores) -> None:
        """Raise MismatchError if the actor's log-probs differ too much from the engine's."""
        valid = valid_rows(batch.rollouts, scores, algorithm)
        difference = fresh_log_prob_difference(batch.rollouts, scores, valid, roles.hybrid_engine.version)
        check_mismatch(difference, config.mismatch)

    # If `compute_log_probs` ran the actor, raise a mismatch before any role's weights change.
    scores = batch.scores
    metrics = Metrics()
    if scores.old_log_probs is not None:
        compare_with_engine(scores)

    # Critic and actor use the same mini-batches, whose order depends only on the step's seed.
    seed = step_seed(config, step)
    batches = list(
        minibatches(
            train_batch,
            algorithm,
            config.batch.optimizer_steps,
            config.batch.epochs,
            seed,
        )
    )

    # Update one role after the other, so that on shared ranks only one role must be in device memory. On
    # disjoint ranks their updates still run in parallel.
    if roles.critic is not None:
        with roles.critic.resident():
            for minibatch in batches:
                metrics += roles.critic.update(minibatch, partial(value_objective, algorithm))

    if actor_learns(config, roles, step):
        objective = partial(policy_objective, algorithm, state=state)
        with roles.actor.resident():
            for minibatch in batches:
                # The first pass runs before any optimizer step, so its log-probs are the old policy's.
                is_first_pass = scores.old_log_probs is None
                shard, pass_metrics = roles.actor.accumulate(
                    minibatch, objective, reads_outputs=is_first_pass
                )
                if is_first_pass:
                    outputs = learners.gather_rows(shard)
                    scores = scatter_log_probs(scores, minibatch, train_batch.lengths, outputs)
                    compare_with_engine(scores)

                metrics += pass_metrics + roles.actor.step(has_next=minibatch is not batches[-1])

    return WeightUpdate(scores, metrics)


def scatter_log_probs(
    scores: Scores,
    minibatch: TrainBatch,
    lengths: Tensor,
    outputs: RowShard,
) -> Scores:
    """Scatter the actor's outputs for a mini-batch back into the scores of the full batch.

    ``lengths``: [B] int64, number of tokens of each row of the full batch. Tokens outside the mini-batch are
    0 in the result.
    """
    assert minibatch.position is not None
    token_indices = token_index(lengths, minibatch.position)
    zeros = torch.zeros(int(lengths.sum()))
    columns = {name: zeros.index_put((token_indices,), values) for name, values in outputs.tokens.items()}
    return replace(scores, **columns)


def _make_step_result(
    batch: ScoredBatch,
    train_batch: TrainBatch,
    batch_metrics: Metrics,
    sampling_metrics: Metrics,
    update: WeightUpdate,
    algorithm: Algorithm,
    state: AlgorithmState,
) -> StepResult:
    """Combine a step's metrics, and compute the algorithm's next state."""
    # `old_policy_metrics` needs the old policy's log-probs. If the batch has none, the update's first forward
    # pass has computed them, so the metrics can be computed only now.
    if batch.scores.old_log_probs is None:
        batch_metrics += old_policy_metrics(batch.rollouts, update.scores, algorithm, state)
    state = next_state(algorithm, state, batch.rollouts, update.scores)
    local_metrics = sampling_metrics + batch.metrics + update.metrics

    advantages = train_batch.advantages
    if advantages is not None:
        advantages = masked_row_means(advantages, batch.rollouts.response_mask, batch.rollouts.lengths)
    return StepResult(batch_metrics, local_metrics, batch, state, advantages)


def gather_step_metrics(result: StepResult | None, local_metrics: Metrics) -> Metrics:
    """Sum a step's local metrics over all ranks, and add the metrics of the batch. Collective over the world.

    This is the only gather of metrics in a step. Ranks that only sampled pass None as ``result``, and get the
    sums without the metrics of the batch. Raises UserError if every token was rejected.
    """
    if result is None:
        return gather_metrics(local_metrics)

    metrics = result.metrics + gather_metrics(local_metrics + result.local_metrics)
    require_accepted_tokens(metrics)
    return metrics


def actor_learns(config: RunConfig, roles: Roles, step: int) -> bool:
    """Return whether ``step`` updates the actor: the first `critic.warmup_steps` update only the critic."""
    return roles.critic is None or config.critic is None or step > config.critic.warmup_steps


def step_seed(config: RunConfig, step: int) -> int:
    """Return the seed of a step's random draws, which depends only on the run's seed and the step.

    Seeds of consecutive steps are 1000 apart: round ``n`` of a step's sampling uses this seed plus ``n``.
    """
    # Runs with different seeds have no step seeds in common, up to 1,000,002 steps.
    return (config.seed * 1_000_003 + step) * 1_000


def require_loss_tokens(batch: TrainBatch, metrics: Metrics) -> None:
    """Raise UserError if a batch has responses with rewards, but no token with a loss.

    A batch without any valid reward is accepted here: `reward.max_invalid_fraction` limits failed rewards.
    """
    response_counts = batch.response_counts
    has_rewards = response_counts is not None and bool(response_counts.any())
    if has_rewards and not bool(batch.response_mask.any()):
        raise _no_tokens_error(metrics.values())
    require_accepted_tokens(metrics)


def require_accepted_tokens(metrics: Metrics) -> None:
    """Raise UserError if importance-ratio rejection removed every token of the step.

    This check follows the update. With `Correction.bypass`, the update itself computes the fraction of
    rejected tokens, so that `require_loss_tokens` cannot check it earlier.
    """
    values = metrics.values()
    # `>=` instead of `==`: the fraction is a quotient of floating-point sums.
    if values.get("mismatch/rejected_fraction", 0.0) >= 1:
        raise _no_tokens_error(values)


def _no_tokens_error(values: Mapping[str, float]) -> UserError:
    """Return the error of a step in which no token has a loss."""
    rejected_fraction = values.get("mismatch/rejected_fraction", 0.0)
    log_ratio = -values.get("mismatch/kl", 0.0)
    truncated_fraction = values.get("response/truncated_fraction", 0.0)

    # Two filters can remove every token: rejection by importance ratio, and the filter of truncated
    # responses.
    if rejected_fraction:
        setting = "algorithm.correction.rejection"
        fix = "widen the bands of rejection, lower asynchrony.steps_ahead or batch.optimizer_steps"
    else:
        setting = "algorithm.overlong.filter"
        fix = "raise rollout.max_response_tokens, or set algorithm.overlong.filter=false"

    return UserError(
        "no token of this step's responses is left to train on",
        where=setting,
        expected="responses that take part in the loss",
        got=f"{rejected_fraction:.0%} of the tokens rejected, with a mean log ratio of trainer to rollout of "
        f"{log_ratio:.1e}; {truncated_fraction:.0%} of the responses cut off",
        fix=fix,
    )


def fresh_log_prob_difference(
    rollouts: Rollouts,
    scores: Scores,
    valid: Tensor,
    version: int,
) -> float | None:
    """Return the mean absolute difference of trainer and engine log-probs per response token, in nats.

    The mean covers the tokens of ``valid`` rows ([B] bool) that were sampled by weights of ``version``. Older
    tokens are excluded, since their difference includes the effect of weight updates. Returns None if there
    are no tokens to compare.
    """
    if scores.old_log_probs is None:
        return None

    # The policy version of each token: [N].
    rows = row_index(rollouts.lengths)
    versions = rollouts.token_versions
    if versions is None:
        versions = rollouts.policy_version[rows]

    # Sum in float64: float32 has too few digits for a large batch.
    is_fresh = rollouts.response_mask & (versions == version) & valid[rows]
    difference = (scores.old_log_probs - rollouts.rollout_log_probs)[is_fresh].abs().double()
    if not len(difference):
        return None
    return float(difference.mean())


class MismatchError(RuntimeError):
    """Error that is raised if log-probs of trainer and rollout engine differ by more than `mismatch.stop`."""


def check_mismatch(difference: float | None, config: MismatchConfig) -> None:
    """Raise MismatchError if the log-probs of trainer and engine differ by more than `mismatch.stop`.

    ``difference``: mean absolute difference in nats per token, from `fresh_log_prob_difference`; None is
    accepted. Above the limit, the sampling policy is not the policy that is trained. The health rule
    ``mismatch`` warns of smaller differences.
    """
    assert config.stop is not None, "the configuration is resolved"
    # Not `difference > stop`: a NaN must stop the run, too.
    if difference is None or difference <= config.stop:
        return

    raise MismatchError(
        f"log-probs of trainer and rollout engine differ by {difference:.2e} per response token on average "
        f"(stop above {config.stop:.0e}). Training would follow gradients of another policy. Likely causes: "
        "weights that did not arrive (see hybrid_engine.verify), or another dtype or attention kernel in the "
        "engine. mismatch.stop sets the limit."
    )


class Phases:
    """Timer of the phases of a step on this rank, and the process's current phase.

    ``current``: name of the innermost current phase.
    ``step``: number of the step, from 1; 0 before the first.
    ``gather_stats``: bytes and seconds of `ReplicaGroup.gather_rows` on this rank since the last call of
        `metrics`.
    """

    def __init__(self) -> None:
        self.current = "start"
        self.step = 0
        self.gather_stats = GatherStats()
        self._seconds: dict[str, float] = {}
        self._peak_bytes: dict[str, int] = {}

    @property
    def location(self) -> str:
        """Return the current phase and step as text, for messages about this process."""
        return f"in phase '{self.current}' of step {self.step}"

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the block's seconds (``time/NAME``) and peak device memory (``memory/NAME_peak_bytes``).

        After an exception, ``current`` is still the name of the failed phase, for the report of the failure.
        """
        outer_phase = self.current
        self.current = name
        # Kernels are asynchronous: without this synchronization, the time of earlier kernels would be
        # included.
        device.synchronize()
        start_time = time.perf_counter()

        yield

        device.synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start_time
        self._peak_bytes[name] = max(self._peak_bytes.get(name, 0), device.peak_memory(reset=True))
        self.current = outer_phase

    def metrics(self) -> Metrics:
        """Return the time and memory since the last call as metrics, and reset them.

        The metrics are reduced over all ranks by maximum.
        """
        # Report maxima: the slowest rank and the fullest device limit the job.
        maxima = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        maxima |= {f"memory/{name}_peak_bytes": float(peak) for name, peak in self._peak_bytes.items()}
        if self._peak_bytes:
            maxima["memory/peak_bytes"] = float(max(self._peak_bytes.values()))
        if self.gather_stats.seconds:
            maxima["rows/bytes_received_max"] = float(self.gather_stats.bytes)
            maxima["time/rows"] = self.gather_stats.seconds

        self._seconds.clear()
        self._peak_bytes.clear()
        self.gather_stats = GatherStats()
        return Metrics({}, maxima)
