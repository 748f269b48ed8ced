"""One step of reinforcement learning, as every rank runs it. The file to read first."""

from __future__ import annotations

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
from megatron_rl.metrics import Metrics
from megatron_rl.parallel.exchange import gather_metrics, gather_rows
from megatron_rl.roles.build import Roles
from megatron_rl.trainer.mismatch import check_mismatch, fresh_difference
from megatron_rl.trainer.phases import Phases
from megatron_rl.trainer.sampler import Sampler
from megatron_rl.trainer.sampling import Graded, sample_step
from megatron_rl.types import Scores


@dataclass(frozen=True)
class StepResult:
    """Hold what one step produced, the same value on every rank that learned."""

    metrics: Metrics
    graded: Graded
    algorithm_state: AlgorithmState
    warning: str | None
    actor_learned: bool  # false while the critic warms up alone


def train_step(
    sampler: Sampler,
    roles: Roles,
    algorithm: Algorithm,
    state: AlgorithmState,
    config: RunConfig,
    step: int,
    phase: Phases,
) -> StepResult:
    """Sample, judge, estimate and learn once. A batch is the same value on every rank.

    ``sampler`` gives the responses to the next prompts; ``state`` is what the algorithm carries from step to
    step. Collective over the world.
    """
    graded, sampled = sample_step(sampler, roles, algorithm, config, step_seed(config, step), phase)
    result = learn_from(graded, roles, algorithm, state, config, step, phase)
    if result.actor_learned:
        roles.hybrid_engine.mark_updated()
    return replace(result, metrics=result.metrics + gather_metrics(sampled))


def learn_from(
    graded: Graded,
    roles: Roles,
    algorithm: Algorithm,
    state: AlgorithmState,
    config: RunConfig,
    step: int,
    phase: Phases,
) -> StepResult:
    """Judge graded rows, estimate advantages and learn. Collective over `members`."""
    version = roles.hybrid_engine.version
    with phase("score"):
        scores = judge(roles, graded)
    with phase("estimate"):
        batch, metrics = estimate(graded.rollouts, scores, algorithm, state)
        warning = check_mismatch(fresh_difference(graded.rollouts, scores, version), config.mismatch)
    objective = partial(policy_objective, algorithm, state=state)
    learned = Metrics()
    with phase("learn"):
        warming = critic_warm_up(config, roles)
        steps, epochs = config.batch.optimizer_steps, config.batch.epochs
        parts = list(minibatches(batch, algorithm, steps, epochs, step_seed(config, step)))
        # One role after the other, so that on shared ranks only one need be resident; on ranks of their own
        # they learn at the same time.
        if roles.critic is not None:
            with roles.critic.resident():
                for minibatch in parts:
                    learned += roles.critic.update(minibatch, partial(value_objective, algorithm))
        if step > warming:
            with roles.actor.resident():
                for minibatch in parts:
                    learned += roles.actor.update(minibatch, objective)
    state = next_state(algorithm, state, graded.rollouts, scores)
    return StepResult(metrics + gather_metrics(learned), graded, state, warning, step > warming)


def judge(roles: Roles, graded: Graded) -> Scores:
    """Collect what the roles with a model say of graded rows. Collective over `members`.

    All are asked before any answer is gathered: roles on ranks of their own work at the same time.
    """
    answers = [role.infer(graded.rollouts) for role in roles.judges]
    tokens = {name: values for answer in answers for name, values in gather_rows(answer).tokens.items()}
    return Scores(
        rewards=graded.rewards,
        valid=graded.valid,
        components=graded.components,
        old_log_probs=tokens["old_log_probs"],
        entropy=tokens["entropy"],
        ref_log_probs=tokens.get("ref_log_probs"),
        values=tokens.get("values"),
        baseline_rewards=graded.baseline_rewards,
    )


def critic_warm_up(config: RunConfig, roles: Roles) -> int:
    """Return in how many first steps the critic learns alone."""
    return config.critic.warmup_steps if roles.critic is not None and config.critic is not None else 0


def step_seed(config: RunConfig, step: int) -> int:
    """Return the seed of everything random in a step, so that a resumed run draws the same.

    The seeds after it up to the next step's are for further rounds of sampling.
    """
    return (config.seed * 1_000_003 + step) * 1_000
