"""One step of reinforcement learning, as every rank runs it. The file to read first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron_rl.algorithms import (
    Algorithm,
    AlgorithmState,
    estimate,
    minibatches,
    next_state,
    policy_objective,
)
from megatron_rl.config.schema import RunConfig
from megatron_rl.metrics import Metrics
from megatron_rl.parallel.exchange import gather_metrics, gather_rows
from megatron_rl.roles.build import Roles
from megatron_rl.roles.rollout import join
from megatron_rl.trainer.mismatch import check_mismatch
from megatron_rl.trainer.phases import Phases
from megatron_rl.types import PromptBatch, Rollouts, Scores


@dataclass(frozen=True)
class StepResult:
    """Hold what one step produced, the same value on every rank; ``prompts`` has one entry per row."""

    metrics: Metrics
    prompts: PromptBatch
    rollouts: Rollouts
    scores: Scores
    algorithm_state: AlgorithmState
    warning: str | None


def train_step(
    prompts: PromptBatch,
    roles: Roles,
    algorithm: Algorithm,
    state: AlgorithmState,
    config: RunConfig,
    step: int,
    phase: Phases,
) -> StepResult:
    """Sample, judge, estimate and learn once. A batch is the same value on every rank.

    ``state`` is what the algorithm carries from step to step. Collective over the world.
    """
    samples = config.batch.samples_per_prompt
    with phase("generate"), roles.hybrid_engine.generation_mode():
        rollouts = join(
            gather_rows(roles.rollout.infer(prompts, samples, seed=step_seed(config, step))), samples
        )
    prompts = prompts.repeat(samples)
    with phase("score"):
        scores = judge(roles, prompts, rollouts)
    with phase("estimate"):
        batch, metrics = estimate(rollouts, scores, algorithm, state)
        warning = check_mismatch(metrics, config.mismatch)
    objective = partial(policy_objective, algorithm, state=state)
    learned = roles.reward.metrics + roles.hybrid_engine.sync_metrics
    with phase("learn"):
        steps, epochs = config.batch.optimizer_steps, config.batch.epochs
        for minibatch in minibatches(batch, algorithm, steps, epochs, step_seed(config, step)):
            learned += roles.actor.update(minibatch, objective)
        roles.hybrid_engine.mark_updated()
    state = next_state(algorithm, state, rollouts, scores)
    return StepResult(metrics + gather_metrics(learned), prompts, rollouts, scores, state, warning)


def judge(roles: Roles, prompts: PromptBatch, rollouts: Rollouts) -> Scores:
    """Collect what every judging role says of the rows. Collective over the world."""
    answers = [roles.reward.infer(prompts, rollouts), roles.actor.infer(rollouts)]
    if roles.reference is not None:
        answers.append(roles.reference.infer(rollouts))
    reward, *scored = [gather_rows(answer) for answer in answers]
    tokens = {name: values for answer in scored for name, values in answer.tokens.items()}
    components = {name: reward.values[name] for name in reward.values if name not in ("rewards", "valid")}
    return Scores(
        rewards=reward.values["rewards"],
        valid=reward.values["valid"],
        components=components,
        old_log_probs=tokens["old_log_probs"],
        entropy=tokens["entropy"],
        ref_log_probs=tokens.get("ref_log_probs"),
    )


def step_seed(config: RunConfig, step: int) -> int:
    """Return the seed of everything random in a step, so that a resumed run draws the same."""
    return config.seed * 1_000_003 + step
