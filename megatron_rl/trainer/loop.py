"""One step of reinforcement learning, as every rank runs it. The file to read first."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms import Algorithm, AlgorithmState, estimate, next_state
from megatron_rl.config.schema import RunConfig
from megatron_rl.metrics import Metrics
from megatron_rl.parallel.exchange import Members
from megatron_rl.roles.build import Roles
from megatron_rl.trainer.learn import actor_learns, check_mismatch, fresh_difference, learn, score, step_seed
from megatron_rl.trainer.phases import Phases
from megatron_rl.trainer.sample import RolloutSource, ScoredBatch, choose_groups, grade, prompts_wanted


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
    with phase("learn"):
        learned = learn(train_batch, roles, algorithm, state, config, step)
    if actor_learns(config, roles, step):
        roles.hybrid_engine.mark_updated()
    metrics = estimated + everyone.gather_metrics(learned) + everyone.gather_metrics(metrics + batch.metrics)
    return StepResult(metrics, batch, next_state(algorithm, state, batch.rollouts, scores), warning)
