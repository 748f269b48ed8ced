"""One step of reinforcement learning, as every rank runs it. The file to read first.

The one idea: all ranks run the same lines, and a batch is the same value on every rank that learns. Calling a
role shards the batch's rows over the role's own ranks and returns at once on ranks without the role, so roles
on different ranks work at the same time; `ReplicaGroup.gather_rows` then makes their outputs the same value
on every rank again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
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
from megatron_rl.trainer.refill import refill
from megatron_rl.trainer.rewards import (
    ScoredBatch,
    combine_rounds,
    compute_rewards,
    prompts_to_add,
    record_groups,
)
from megatron_rl.trainer.sample import RolloutSource
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
    """Outcome of one step on a rank that learned.

    Example: step 3 of a run without sampling ahead has ``metrics`` with ``reward/mean`` and ``kl/rollout``,
    ``local_metrics`` with ``policy/loss`` of this rank's micro-batches.
    """

    metrics: Metrics
    """Metrics of the whole batch, the same value on every rank that learned."""
    local_metrics: Metrics
    """Metrics of this rank alone, which `gather_step` sums over the ranks."""
    batch: ScoredBatch | None
    """The rows of the step with their rewards, None if it computed none; its ``failures`` and ``metrics`` are
    of this rank alone."""
    algorithm_state: AlgorithmState
    """State of the algorithm for the next step, the same value on every rank."""
    advantages: Tensor | None
    """[B] float32, mean advantage of each row's response tokens; None if a script computed its own."""


class BatchSource(Protocol):
    """Source of the batches of a run: `SameStepBatches`, or `AheadBatches` sampled in earlier steps.

    ``learners``: ranks that learn, None if all do.
    """

    learners: tuple[int, ...] | None

    def next(
        self,
        step: int,
        phase: Phases,
        learners: ReplicaGroup,
    ) -> AbstractContextManager[tuple[ScoredBatch | None, Metrics]]:
        """Yield the rewarded rows of ``step``, equal on all ``learners``, and this rank's sampling metrics.

        The rows are None on ranks that only sample. What these ranks sample during the block is gathered when
        the block ends. Collective over the world.
        """
        ...


class SameStepBatches:
    """Batches that every rank samples in the step that learns from them.

    Dynamic sampling repeats generation and rewards until enough groups have rewards that differ.
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
    def next(
        self,
        step: int,
        phase: Phases,
        learners: ReplicaGroup,
    ) -> Iterator[tuple[ScoredBatch | None, Metrics]]:
        """See `BatchSource.next`."""
        rounds: list[ScoredBatch] = []
        sync_metrics = Metrics()
        while prompt_count := prompts_to_add(rounds, self.algorithm, self.config):
            # Every round of a step has a seed of its own, see `step_seed`.
            seed = step_seed(self.config, step) + len(rounds)
            with (
                phase("generate"),
                self.roles.hybrid_engine.generation_mode() as round_metrics,
            ):
                pending = self.source.start(prompt_count, seed)
                sampled = self.source.finish(pending, learners)
                sampled = refill(self.source, sampled, seed, learners)

            with phase("reward"):
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
    phase: Phases,
) -> StepResult | None:
    """Run one step: sample and reward a batch, compute log-probs and advantages, update critic and actor.

    The batch is the same value on every rank that learns. ``state`` is the algorithm's state between steps,
    such as an adaptive KL coefficient. Returns None on ranks that only sample. Collective over the world.
    """
    # The ranks that hold the batch: all ranks, unless some only sample for later steps.
    learners = ReplicaGroup(batches.learners, phase.gather_stats)
    result = None

    with batches.next(step, phase, learners) as (batch, sampling_metrics):
        if batch is not None:
            # Forward passes of actor, critic and reference, each on its own ranks.
            with phase("score"):
                batch = compute_log_probs(batch, roles, config, step, learners)

            # Pure functions of the replicated batch: every learner computes the same advantages.
            with phase("estimate"):
                train_batch, batch_metrics = build_train_batch(batch.rollouts, batch.scores, algorithm, state)
                require_tokens(train_batch, batch_metrics)

            # Optimizer steps of critic and actor, with global loss denominators.
            with phase("learn"):
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

            result = _step_result(
                batch,
                train_batch,
                batch_metrics,
                sampling_metrics,
                update,
                algorithm,
                state,
            )

    # On every rank: the version decides whether the next generation syncs weights, which is collective.
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
    actor_scores: bool = False,
) -> ScoredBatch:
    """Run the actor, critic and reference forward passes and attach their log-probs and values.

    Runs `Roles.scorers` and the actor, whose pass is skipped if the first pass of `update_weights` gives the
    same log-probs, unless ``actor_scores``. An output without a field in `Scores` goes to its ``columns``.
    Collective over the learners.
    """
    roles_to_run = list(roles.scorers.values())
    if actor_scores or roles.scoring_pass or not actor_learns(config, roles, step):
        roles_to_run.insert(0, roles.actor)

    # All roles start before any output is gathered: those on ranks of their own work at the same time.
    shards = [role.infer(batch.rollouts) for role in roles_to_run]
    columns: dict[str, Tensor] = {}
    for shard in shards:
        columns |= learners.gather_rows(shard).tokens

    # The remaining columns are outputs without a field in `Scores`.
    score_fields = {name: columns.pop(name) for name in _SCORE_FIELDS if name in columns}
    return replace(batch, scores=replace(batch.scores, **score_fields, columns=columns))


@dataclass(frozen=True)
class WeightUpdate:
    """Outcome of a step's updates of critic and actor on this rank."""

    scores: Scores
    """The batch's scores, with the actor's log-probs before its first update."""
    metrics: Metrics
    """Losses and optimizer statistics of this rank alone."""


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

    Before the actor's weights change, its log-probs are compared with the rollout engine's. They come from
    `compute_log_probs`, or else from the first pass here, which runs on the same weights. Raises
    MismatchError. Collective over the learners.
    """

    def compare_with_engine(scores: Scores) -> None:
        valid = valid_rows(batch.rollouts, scores, algorithm)
        difference = fresh_difference(batch.rollouts, scores, valid, roles.hybrid_engine.version)
        check_mismatch(difference, config.mismatch)

    # With a scoring pass, a mismatch is found before any role's weights change.
    scores = batch.scores
    metrics = Metrics()
    if scores.old_log_probs is not None:
        compare_with_engine(scores)

    # The same mini-batches for critic and actor, in an order that depends on the step alone.
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

    # One role after the other, so that only one needs to be in device memory on ranks that they share. On
    # ranks of their own they still learn at the same time.
    if roles.critic is not None:
        with roles.critic.resident():
            for minibatch in batches:
                metrics += roles.critic.update(minibatch, partial(value_objective, algorithm))

    if actor_learns(config, roles, step):
        objective = partial(policy_objective, algorithm, state=state)
        with roles.actor.resident():
            for minibatch in batches:
                # Without a scoring pass, the first pass has the log-probs of the weights before the step.
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

    ``lengths``: [B] int64, tokens of each row of the full batch. Tokens outside the mini-batch get 0.
    """
    assert minibatch.position is not None
    index = token_index(lengths, minibatch.position)
    zeros = torch.zeros(int(lengths.sum()))
    columns = {name: zeros.index_put((index,), values) for name, values in outputs.tokens.items()}
    return replace(scores, **columns)


def _step_result(
    batch: ScoredBatch,
    train_batch: TrainBatch,
    batch_metrics: Metrics,
    sampling_metrics: Metrics,
    update: WeightUpdate,
    algorithm: Algorithm,
    state: AlgorithmState,
) -> StepResult:
    """Return a step's metrics and the algorithm's next state."""
    # Without a scoring pass, the update has found the log-probs that these metrics and the state need.
    if batch.scores.old_log_probs is None:
        batch_metrics += old_policy_metrics(batch.rollouts, update.scores, algorithm, state)
    state = next_state(algorithm, state, batch.rollouts, update.scores)
    local_metrics = sampling_metrics + batch.metrics + update.metrics

    advantages = train_batch.advantages
    if advantages is not None:
        advantages = masked_row_means(advantages, batch.rollouts.response_mask, batch.rollouts.lengths)
    return StepResult(batch_metrics, local_metrics, batch, state, advantages)


def gather_step(result: StepResult | None, local_metrics: Metrics) -> Metrics:
    """Return a step's metrics, the ranks' local ones summed. Collective over the world.

    Metrics cross the ranks here, once per step. A rank that did not learn has no ``result``, and gets the
    summed metrics without the batch's. Raises UserError if every token was rejected.
    """
    if result is None:
        return gather_metrics(local_metrics)

    metrics = result.metrics + gather_metrics(local_metrics + result.local_metrics)
    require_unrejected(metrics)
    return metrics


def actor_learns(config: RunConfig, roles: Roles, step: int) -> bool:
    """Return whether the actor learns in ``step``: not while the critic warms up."""
    return roles.critic is None or config.critic is None or step > config.critic.warmup_steps


def step_seed(config: RunConfig, step: int) -> int:
    """Return the seed of all random draws of a step, which a resumed run repeats.

    The next 999 seeds are for further rounds of sampling in the same step.
    """
    return (config.seed * 1_000_003 + step) * 1_000


def require_tokens(batch: TrainBatch, metrics: Metrics) -> None:
    """Raise UserError if a batch has responses with rewards, but no token with a loss.

    Batches without any valid reward pass: `reward.max_invalid_fraction` bounds these.
    """
    counts = batch.response_counts
    has_rewards = counts is not None and bool(counts.any())
    if has_rewards and not bool(batch.response_mask.any()):
        raise _no_tokens_error(metrics.values())
    require_unrejected(metrics)


def require_unrejected(metrics: Metrics) -> None:
    """Raise UserError if every token was rejected, which the update measures with `Correction.bypass`."""
    values = metrics.values()
    # `>=` instead of `==`: the fraction is a quotient of floating-point sums.
    if values.get("mismatch/rejected_fraction", 0.0) >= 1:
        raise _no_tokens_error(values)


def _no_tokens_error(values: Mapping[str, float]) -> UserError:
    """Return the error of a step whose loss has no token."""
    rejected = values.get("mismatch/rejected_fraction", 0.0)
    log_ratio = -values.get("mismatch/kl", 0.0)
    truncated = values.get("response/truncated_fraction", 0.0)

    # Two filters can remove every token: rejection by importance ratio, and that of truncated responses.
    if rejected:
        path = "algorithm.correction.rejection"
        fix = "widen the bands of rejection, lower asynchrony.steps_ahead or batch.optimizer_steps"
    else:
        path = "algorithm.overlong.filter"
        fix = "raise rollout.max_response_tokens, or set algorithm.overlong.filter=false"

    return UserError(
        "no token of this step's responses is left to learn from",
        where=path,
        expected="responses that take part in the loss",
        got=f"{rejected:.0%} of the tokens rejected, with a mean log ratio of trainer to rollout of "
        f"{log_ratio:.1e}; {truncated:.0%} of the responses cut off",
        fix=fix,
    )


def fresh_difference(
    rollouts: Rollouts,
    scores: Scores,
    valid: Tensor,
    version: int,
) -> float | None:
    """Return the mean absolute difference of trainer and engine log-probs per response token, in nats.

    Only tokens of ``valid`` rows ([B] bool) that the weights of ``version`` sampled count: on older tokens
    the two also differ by the updates since. None without such a token.
    """
    if scores.old_log_probs is None:
        return None

    # The policy version of each token: [N].
    rows = row_index(rollouts.lengths)
    versions = rollouts.token_versions
    if versions is None:
        versions = rollouts.policy_version[rows]

    # In float64: the sum over a large batch has more digits than float32 holds.
    fresh = rollouts.response_mask & (versions == version) & valid[rows]
    difference = (scores.old_log_probs - rollouts.rollout_log_probs)[fresh].abs().double()
    if not len(difference):
        return None
    return float(difference.mean())


class MismatchError(RuntimeError):
    """Trainer and rollout engine whose log-probs differ by more than `mismatch.stop`."""


def check_mismatch(difference: float | None, config: MismatchConfig) -> None:
    """Raise MismatchError if `fresh_difference` is above ``stop``; the health rule ``mismatch`` warns below.

    A silent difference of trainer and rollout engine ruins runs: gradients are those of a different policy.
    """
    assert config.stop is not None, "the configuration is resolved"
    # A NaN is above no threshold, and must stop the run.
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

    ``current``: name of the innermost open phase.
    ``step``: number of the step, from 1; 0 before the first.
    ``gather_stats``: cost of gathering rows since the last call of `metrics`.
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
        """Measure the block as ``time/<name>`` in seconds and its ``memory/<name>_peak_bytes``.

        After an exception ``current`` is still this phase, so that the report of a failure can name it.
        """
        outer = self.current
        self.current = name
        # Kernels are asynchronous: without a synchronization the time of earlier kernels would be included.
        device.synchronize()
        start = time.perf_counter()

        yield

        device.synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
        self._peak_bytes[name] = max(self._peak_bytes.get(name, 0), device.peak_memory(reset=True))
        self.current = outer

    def metrics(self) -> Metrics:
        """Return the measurements since the last call as maxima over ranks, and reset them."""
        # Maxima, since the slowest rank and the fullest device limit the job.
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
