"""One step of reinforcement learning, as every rank runs it. The file to read first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from megatron_rl.algorithms import (
    Algorithm,
    AlgorithmState,
    estimate,
    minibatches,
    next_state,
    policy_objective,
    value_objective,
)
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import MismatchConfig
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics
from megatron_rl.parallel import device
from megatron_rl.parallel.exchange import Members, RowTraffic
from megatron_rl.roles.build import Roles
from megatron_rl.trainer.sample import RolloutSource, ScoredBatch, choose_groups, grade, prompts_wanted
from megatron_rl.types import Rollouts, Scores, TrainBatch, row_index


@dataclass(frozen=True)
class StepResult:
    """Hold what one step produced, the same value on every rank that learned but for ``batch.failures``."""

    metrics: Metrics
    batch: ScoredBatch
    algorithm_state: AlgorithmState
    warning: str | None


def train_step(
    source: RolloutSource,
    roles: Roles,
    algorithm: Algorithm,
    state: AlgorithmState,
    config: RunConfig,
    step: int,
    phase: Phases,
) -> StepResult:
    """Generate, reward, score, estimate and learn once. A batch is the same value on every rank.

    ``source`` gives the responses to the next prompts; ``state`` is what the algorithm carries from step to
    step. Collective over the world.
    """
    everyone, metrics = Members(traffic=phase.rows), Metrics()
    rounds: list[ScoredBatch] = []  # one, or more where dynamic sampling replaces groups
    while wanted := prompts_wanted(rounds, algorithm, config):
        with phase("generate"), roles.hybrid_engine.generation_mode() as synced:
            pending = source.start(wanted, step_seed(config, step) + len(rounds))
            sampled = source.finish(pending, everyone)
        with phase("reward"):
            rounds.append(grade(roles, sampled, everyone))
        metrics += synced
    batch = choose_groups(rounds, algorithm, config)
    with phase("score"):
        scores = score(roles, batch.rollouts, batch.scores, everyone)
    with phase("estimate"):
        train_batch, estimated = estimate(batch.rollouts, scores, algorithm, state)
        difference = fresh_difference(batch.rollouts, scores, roles.hybrid_engine.version)
        warning = check_mismatch(difference, config.mismatch)
        require_tokens(train_batch, estimated)
    with phase("learn"):
        learned = learn(train_batch, roles, algorithm, state, config, step)
    if actor_learns(config, roles, step):
        roles.hybrid_engine.mark_updated()
    metrics = estimated + everyone.gather_metrics(learned) + everyone.gather_metrics(metrics + batch.metrics)
    require_tokens(train_batch, metrics)
    return StepResult(metrics, batch, next_state(algorithm, state, batch.rollouts, scores), warning)


def score(roles: Roles, rollouts: Rollouts, scores: Scores, members: Members) -> Scores:
    """Return ``scores`` with what actor, critic and reference say of each token. Collective over the members.

    All are asked before any answer is gathered: roles on ranks of their own work at the same time.
    """
    answers = [role.infer(rollouts) for role in (roles.actor, roles.critic, roles.reference) if role]
    tokens = {
        name: values for answer in answers for name, values in members.gather_rows(answer).tokens.items()
    }
    return replace(
        scores,
        old_log_probs=tokens["old_log_probs"],
        entropy=tokens["entropy"],
        ref_log_probs=tokens.get("ref_log_probs"),
        values=tokens.get("values"),
    )


def learn(
    batch: TrainBatch, roles: Roles, algorithm: Algorithm, state: AlgorithmState, config: RunConfig, step: int
) -> Metrics:
    """Update critic and actor from a step's batch; return this rank's metrics. Collective over both roles."""
    metrics = Metrics()
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
                metrics += roles.actor.update(minibatch, partial(policy_objective, algorithm, state=state))
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

    ``metrics`` are the step's: with `Correction.bypass` they say what was rejected only after learning.
    """
    counts = batch.response_counts
    if counts is None or not bool(counts.any()):
        return  # no reward was valid, which `reward.max_invalid_fraction` bounds
    values = metrics.values()
    rejected = values.get("mismatch/rejected_fraction", 0.0)
    if bool(batch.response_mask.any()) and rejected < 1:
        return
    difference, cut_off = values.get("mismatch/kl", 0.0), values.get("response/truncated_fraction", 0.0)
    raise UserError(
        "no token of this step's responses is left to learn from",
        where="algorithm.correction.rejection" if rejected else "algorithm.overlong.filter",
        expected="responses that take part in the loss",
        got=f"{rejected:.0%} of the tokens rejected, with a mean log ratio of trainer to rollout of "
        f"{-difference:.1e}; {cut_off:.0%} of the responses cut off",
        fix="widen the bands of rejection, lower asynchrony.steps_ahead or batch.optimizer_steps"
        if rejected
        else "raise rollout.max_response_tokens, or set algorithm.overlong.filter=false",
    )


def fresh_difference(rollouts: Rollouts, scores: Scores, version: int) -> float | None:
    """Return how far trainer and engine are apart on tokens that weights of ``version`` sampled.

    The mean absolute difference of log-probs per response token of valid rows; None without such a token.
    Older tokens are another policy's: there the two differ by what was learned since.
    """
    if scores.old_log_probs is None:
        return None
    rows = row_index(rollouts.lengths)
    versions = rollouts.token_versions
    if versions is None:
        versions = rollouts.policy_version[rows]
    fresh = rollouts.response_mask & (versions == version) & scores.valid[rows]
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

    ``rows`` counts what gathering rows moves, for those who gather with it.
    """

    def __init__(self) -> None:
        self.current = "start"
        self.step = 0
        self.rows = RowTraffic()
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, int] = {}

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
        if self.rows.seconds:
            largest |= {"rows/bytes_received_max": float(self.rows.bytes), "time/rows": self.rows.seconds}
        self._seconds.clear()
        self._peaks.clear()
        self.rows = RowTraffic()
        return Metrics({}, largest)
