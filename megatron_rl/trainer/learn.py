"""The second half of a step: what the models say of its rows, and their updates from it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron_rl.algorithms import Algorithm, AlgorithmState, minibatches, policy_objective, value_objective
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import MismatchConfig
from megatron_rl.metrics import Metrics
from megatron_rl.parallel.exchange import Members
from megatron_rl.roles.build import Roles
from megatron_rl.types import Rollouts, Scores, TrainBatch, row_index


class MismatchError(RuntimeError):
    """Trainer and rollout engine disagree too much to go on."""


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
        "arrive (see hybrid_engine.verify), another dtype or attention kernel in the engine, or sampling "
        "filters (top_p, top_k) without correction. mismatch.stop sets the limit."
    )
