"""One step of reinforcement learning, as every rank runs it. The file to read first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import NamedTuple, Protocol

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
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import MismatchConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import GatherStats, ReplicaGroup, RowShard, gather_metrics
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics
from megatron_rl.roles.build import Roles
from megatron_rl.trainer.dynamic_sampling import choose_groups, prompts_wanted
from megatron_rl.trainer.sample import RolloutSource, ScoredBatch, grade
from megatron_rl.types import Rollouts, Scores, TrainBatch, row_index, token_index

_SCORE_FIELDS = frozenset(item.name for item in fields(Scores))


@dataclass(frozen=True)
class StepResult:
    """Hold what one step produced.

    It is the same value on every rank that learned but for ``measured`` and ``batch.failures``, which are of
    this rank alone; `gather_step` adds up what all have measured.
    """

    metrics: Metrics
    measured: Metrics
    batch: ScoredBatch
    algorithm_state: AlgorithmState
    warning: str | None


class BatchSource(Protocol):
    """Source of the batches that steps learn from: `SameStepBatches`, or `AheadBatches` of other steps.

    ``learners`` are the ranks that learn, None where every rank does.
    """

    learners: tuple[int, ...] | None

    def next(
        self, step: int, phase: Phases, learners: ReplicaGroup
    ) -> AbstractContextManager[tuple[ScoredBatch | None, Metrics]]:
        """Give the rewarded rows of ``step``, the same on all ``learners``, and what sampling measured.

        The rows are None on ranks that only sample. What these sample while the others learn is gathered when
        the context ends. Collective over the world.
        """
        ...


class SameStepBatches:
    """Batches that are sampled in the step that learns from them, on every rank.

    Dynamic sampling takes several rounds of generating and rewarding until enough groups teach something.
    """

    learners: tuple[int, ...] | None = None

    def __init__(self, config: RunConfig, roles: Roles, algorithm: Algorithm, source: RolloutSource) -> None:
        self.config = config
        self.roles = roles
        self.algorithm = algorithm
        self.source = source

    @contextmanager
    def next(
        self, step: int, phase: Phases, learners: ReplicaGroup
    ) -> Iterator[tuple[ScoredBatch | None, Metrics]]:
        """See `BatchSource.next`."""
        rounds: list[ScoredBatch] = []
        measured = Metrics()
        while wanted := prompts_wanted(rounds, self.algorithm, self.config):
            with phase("generate"), self.roles.hybrid_engine.generation_mode() as synced:
                pending = self.source.start(wanted, step_seed(self.config, step) + len(rounds))
                sampled = self.source.finish(pending, learners)
            with phase("reward"):
                rounds.append(grade(self.roles, sampled, learners))
            measured += synced
        yield choose_groups(rounds, self.algorithm, self.config), measured


def train_step(
    batches: BatchSource,
    roles: Roles,
    algorithm: Algorithm,
    state: AlgorithmState,
    config: RunConfig,
    step: int,
    phase: Phases,
) -> StepResult | None:
    """Take one step: get a batch of rewarded responses, score it, compute advantages and learn from it.

    A batch is the same value on every rank that learns. ``state`` is what the algorithm carries from step to
    step. Returns None on ranks that only sample. Collective over the world.
    """
    learners = ReplicaGroup(batches.learners, phase.gather_stats)
    result = None
    with batches.next(step, phase, learners) as (batch, measured):
        if batch is not None:  # None on ranks that sample for later steps while the learners work
            with phase("score"):
                batch = score(batch, roles, config, step, learners)
            with phase("estimate"):
                train_batch, estimated = build_train_batch(batch.rollouts, batch.scores, algorithm, state)
                require_tokens(train_batch, estimated)
            with phase("learn"):
                learned = learn(train_batch, batch, roles, algorithm, state, config, step, learners)
            result = step_result(batch, estimated, measured, learned, algorithm, state)
    if actor_learns(config, roles, step):
        roles.hybrid_engine.mark_updated()
    return result


def score(
    batch: ScoredBatch, roles: Roles, config: RunConfig, step: int, members: ReplicaGroup
) -> ScoredBatch:
    """Run the forward passes of the actor and of `Roles.scorers`, and attach their outputs to the scores.

    An output without a field in `Scores` goes to its ``columns``. The actor makes no pass where its learn
    pass gives the same. Collective over the members.
    """
    scorers = list(roles.scorers.values())
    if roles.scoring_pass or not actor_learns(config, roles, step):
        scorers.insert(0, roles.actor)

    # All infer before any output is gathered: roles on ranks of their own work at the same time.
    shards = [role.infer(batch.rollouts) for role in scorers]
    outputs = {name: values for shard in shards for name, values in members.gather_rows(shard).tokens.items()}

    named = {name: outputs.pop(name) for name in _SCORE_FIELDS if name in outputs}
    return replace(batch, scores=replace(batch.scores, **named, columns=outputs))


class Learned(NamedTuple):
    """Hold the scores with the old policy's log-probs, this rank's metrics, and a warning of a mismatch."""

    scores: Scores
    metrics: Metrics
    warning: str | None


def learn(
    batch: TrainBatch,
    scored: ScoredBatch,
    roles: Roles,
    algorithm: Algorithm,
    state: AlgorithmState,
    config: RunConfig,
    step: int,
    members: ReplicaGroup,
) -> Learned:
    """Update critic and actor from a step's batch.

    Before the actor's weights move, its log-probs are compared with the rollout's: those of `score`, or else
    those of the first pass here, whose weights are the same. Raises MismatchError.
    Collective over the members.
    """

    def compare(scores: Scores) -> str | None:
        valid = valid_rows(scored.rollouts, scores, algorithm)
        difference = fresh_difference(scored.rollouts, scores, valid, roles.hybrid_engine.version)
        return check_mismatch(difference, config.mismatch)

    scores, metrics = scored.scores, Metrics()
    warning = None if scores.old_log_probs is None else compare(scores)
    steps, epochs = config.batch.optimizer_steps, config.batch.epochs
    batches = list(minibatches(batch, algorithm, steps, epochs, step_seed(config, step)))
    # One role after the other, so that on shared ranks only one need be resident; on ranks of their own they
    # learn at the same time.
    if roles.critic is not None:
        with roles.critic.resident():
            for minibatch in batches:
                metrics += roles.critic.update(minibatch, partial(value_objective, algorithm))
    if actor_learns(config, roles, step):
        with roles.actor.resident():
            for minibatch in batches:
                answer, pass_metrics = roles.actor.accumulate(
                    minibatch, partial(policy_objective, algorithm, state=state)
                )
                if scores.old_log_probs is None:
                    scores = with_answer(scores, minibatch, batch.lengths, members.gather_rows(answer))
                    warning = compare(scores)
                metrics += pass_metrics + roles.actor.step(more=minibatch is not batches[-1])
    return Learned(scores, metrics, warning)


def with_answer(scores: Scores, learned: TrainBatch, lengths: Tensor, answer: RowShard) -> Scores:
    """Return the scores of rows of ``lengths`` with what the actor said of those that it learned from."""
    assert learned.position is not None
    index = token_index(lengths, learned.position)
    zeros = torch.zeros(int(lengths.sum()))
    named = {name: zeros.index_put((index,), values) for name, values in answer.tokens.items()}
    return replace(scores, **named)


def step_result(
    batch: ScoredBatch,
    estimated: Metrics,
    measured: Metrics,
    learned: Learned,
    algorithm: Algorithm,
    state: AlgorithmState,
) -> StepResult:
    """Add up what all ranks know of a step, and what this one ``measured`` before it learned."""
    if batch.scores.old_log_probs is None:
        estimated += old_policy_metrics(batch.rollouts, learned.scores, algorithm, state)
    state = next_state(algorithm, state, batch.rollouts, learned.scores)
    return StepResult(estimated, measured + batch.metrics + learned.metrics, batch, state, learned.warning)


def gather_step(result: StepResult | None, measured: Metrics) -> Metrics:
    """Return a step's metrics, with what each rank ``measured`` besides. Collective over the world.

    They travel once a step, here. ``result`` is None on a rank that did not learn, whose answer has only what
    is measured, not what those that learned all know. Raises UserError where every token was rejected.
    """
    if result is None:
        return gather_metrics(measured)
    metrics = result.metrics + gather_metrics(measured + result.measured)
    require_unrejected(metrics)
    return metrics


def actor_learns(config: RunConfig, roles: Roles, step: int) -> bool:
    """Say whether the actor learns in ``step``, or the critic warms up alone."""
    return roles.critic is None or config.critic is None or step > config.critic.warmup_steps


def step_seed(config: RunConfig, step: int) -> int:
    """Return the seed of everything random in a step, so that a resumed run draws the same.

    The seeds after it up to the next step's are for further rounds of sampling.
    """
    return (config.seed * 1_000_003 + step) * 1_000


def require_tokens(batch: TrainBatch, metrics: Metrics) -> None:
    """Raise UserError where there are judged responses, and no token of them is learned from.

    That no reward was valid is bounded by `reward.max_invalid_fraction`.
    """
    counts = batch.response_counts
    if counts is not None and bool(counts.any()) and not bool(batch.response_mask.any()):
        raise _nothing_left(metrics.values())
    require_unrejected(metrics)


def require_unrejected(metrics: Metrics) -> None:
    """Raise UserError where every token was rejected; with `Correction.bypass`, learning says that."""
    values = metrics.values()
    if values.get("mismatch/rejected_fraction", 0.0) >= 1:
        raise _nothing_left(values)


def _nothing_left(values: Mapping[str, float]) -> UserError:
    rejected = values.get("mismatch/rejected_fraction", 0.0)
    difference, cut_off = values.get("mismatch/kl", 0.0), values.get("response/truncated_fraction", 0.0)
    return UserError(
        "no token of this step's responses is left to learn from",
        where="algorithm.correction.rejection" if rejected else "algorithm.overlong.filter",
        expected="responses that take part in the loss",
        got=f"{rejected:.0%} of the tokens rejected, with a mean log ratio of trainer to rollout of "
        f"{-difference:.1e}; {cut_off:.0%} of the responses cut off",
        fix="widen the bands of rejection, lower asynchrony.steps_ahead or batch.optimizer_steps"
        if rejected
        else "raise rollout.max_response_tokens, or set algorithm.overlong.filter=false",
    )


def fresh_difference(rollouts: Rollouts, scores: Scores, valid: Tensor, version: int) -> float | None:
    """Return how far trainer and engine are apart on tokens that weights of ``version`` sampled.

    The mean absolute difference of log-probs per response token of ``valid`` rows; None without such a token.
    Older tokens are another policy's: there the two differ by what was learned since.
    """
    if scores.old_log_probs is None:
        return None
    rows = row_index(rollouts.lengths)
    versions = rollouts.token_versions
    if versions is None:
        versions = rollouts.policy_version[rows]
    fresh = rollouts.response_mask & (versions == version) & valid[rows]
    difference = (scores.old_log_probs - rollouts.rollout_log_probs)[fresh].abs().double()
    return float(difference.mean()) if len(difference) else None


class MismatchError(RuntimeError):
    """Trainer and rollout engine disagree too much to go on."""


def check_mismatch(difference: float | None, config: MismatchConfig) -> str | None:
    """Return a warning where `fresh_difference` is above one threshold; raise above another.

    Silent disagreement of trainer and rollout engine ruins runs.
    """
    assert config.warn is not None and config.stop is not None
    if difference is None or difference <= config.warn:
        return None
    words = (
        f"log-probs of trainer and rollout engine differ by {difference:.2e} per response token on average "
        f"(warn above {config.warn:.0e}, stop above {config.stop:.0e})"
    )
    if difference <= config.stop:
        return words
    raise MismatchError(
        f"{words}. Training would follow gradients of another policy. Likely causes: weights that did not "
        "arrive (see hybrid_engine.verify), or another dtype or attention kernel in the engine. "
        "mismatch.stop sets the limit."
    )


class Phases:
    """Collect seconds per phase on this rank; ``current`` names where the process is.

    ``gather_stats`` counts what gathering rows moves, for those who gather with it.
    """

    def __init__(self) -> None:
        self.current = "start"
        self.step = 0
        self.gather_stats = GatherStats()
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, int] = {}

    @property
    def place(self) -> str:
        """Return where the process is, in words."""
        return f"in phase '{self.current}' of step {self.step}"

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as ``time/<name>`` and take its ``memory/<name>_peak_bytes``.

        After an exception ``current`` still names it.
        """
        outer, self.current = self.current, name
        device.synchronize()
        begun = time.perf_counter()
        yield
        device.synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begun
        self._peaks[name] = max(self._peaks.get(name, 0), device.peak_memory(reset=True))
        self.current = outer

    def metrics(self) -> Metrics:
        """Return what was measured since the last call, the busiest rank's when gathered, and start anew."""
        largest = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        largest |= {f"memory/{name}_peak_bytes": float(peak) for name, peak in self._peaks.items()}
        if self._peaks:
            largest["memory/peak_bytes"] = float(max(self._peaks.values()))
        if self.gather_stats.seconds:
            largest |= {
                "rows/bytes_received_max": float(self.gather_stats.bytes),
                "time/rows": self.gather_stats.seconds,
            }
        self._seconds.clear()
        self._peaks.clear()
        self.gather_stats = GatherStats()
        return Metrics({}, largest)
