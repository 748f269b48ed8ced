"""Construction of a training batch from rollouts and their scores: rewards, advantages, corrections, metrics.

A failed sample is excluded from every statistic and from the loss; its reward never counts as 0. The module
also defines an algorithm's state between steps: the KL coefficient and the running reward moments.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_rl.algorithms.advantages import AdvantageInputs
from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.algorithms.correction import mismatch_metrics
from megatron_rl.algorithms.losses import top_entropy_tokens
from megatron_rl.algorithms.ragged import (
    broadcast_rows,
    group_statistics,
    last_token_in_mask,
    masked_row_means,
    renumber_groups,
    row_sums,
)
from megatron_rl.algorithms.rewards import RunningMoments
from megatron_rl.metrics import Metrics
from megatron_rl.types import (
    FINISH_FAILED,
    FINISH_LENGTH,
    Rollouts,
    Scores,
    TrainBatch,
    row_counts,
    tokens_toward_limit,
)


def build_train_batch(
    rollouts: Rollouts,
    scores: Scores,
    algorithm: Algorithm,
    state: AlgorithmState | None = None,
) -> tuple[TrainBatch, Metrics]:
    """Compute one step's training batch and metrics from its rollouts and scores.

    Row order is preserved. Failed rows (engine failure, invalid or non-finite reward) have an empty
    ``response_mask`` and enter no statistic. Rejected tokens and, with ``overlong.filter``, rows cut off by
    the length limit are removed from the mask after the advantages were computed. ``loss_weights`` are zero
    until `minibatches` sets them. ``state`` None means the state before the first step. The function is
    pure: every rank computes the same result from the same input.

    `Scores.old_log_probs` may be None if `Algorithm.needs_scoring_pass` is empty: no component of the
    algorithm then reads the old log-probs before the loss, and the train step computes them. The returned
    metrics do not include `old_policy_metrics` in this case. Raises ValueError if scores that the algorithm
    needs are missing.
    """
    if state is None:
        state = initial_state(algorithm)
    valid = valid_rows(rollouts, scores, algorithm)
    valid_mask = rollouts.response_mask & broadcast_rows(valid, rollouts.lengths)

    old_log_probs = old_policy_log_probs(rollouts, scores, algorithm)
    if old_log_probs is None and algorithm.needs_scoring_pass:
        keys = ", ".join(f"algorithm.{name}" for name in algorithm.needs_scoring_pass)
        raise ValueError(f"Scores.old_log_probs is missing, which {keys} needs before the loss")

    # Advantages come before rejection and the overlong filter, so that these do not change the baselines.
    inputs = _make_advantage_inputs(rollouts, scores, algorithm, state, valid_mask, valid, old_log_probs)
    advantages, returns = algorithm.advantage(inputs)
    correction, train_mask, metrics = _compute_correction(rollouts, scores, algorithm, valid_mask)
    if algorithm.needs_teacher and not algorithm.distillation.top_tokens:
        advantages = advantages + _teacher_advantages(scores, algorithm, valid_mask, old_log_probs)
    if algorithm.overlong.filter:
        is_complete = rollouts.finish_reason != FINISH_LENGTH
        train_mask = train_mask & broadcast_rows(is_complete, rollouts.lengths)

    policy_mask, entropy_metrics = _select_top_entropy(scores, algorithm, train_mask)
    metrics += entropy_metrics

    # The engine's expert choices produced the sampled tokens, so they take precedence over the actor's.
    experts = rollouts.experts
    if experts is None:
        experts = scores.experts

    batch = replace(
        make_train_rows(rollouts, train_mask),
        advantages=advantages.float(),
        returns=returns.float(),
        old_log_probs=old_log_probs,
        correction=correction,
        ref_log_probs=scores.ref_log_probs,
        teacher_top_ids=scores.teacher_top_ids,
        teacher_top_log_probs=scores.teacher_top_log_probs,
        old_values=scores.values,
        policy_mask=policy_mask,
        nll_weights=algorithm.imitation.imitated_tokens(scores.rewards, valid, train_mask, rollouts.lengths),
        response_counts=row_counts(valid_mask, rollouts.lengths),
        experts=experts,
    )

    if scores.old_log_probs is not None:
        metrics += old_policy_metrics(rollouts, scores, algorithm, state)
    return batch, metrics + step_metrics(rollouts, scores, inputs, batch)


def make_train_rows(rollouts: Rollouts, mask: Tensor) -> TrainBatch:
    """Convert rollouts to a train batch whose loss covers the tokens of ``mask`` [N] bool.

    Advantages, returns and the trainer's log-probs are not set; ``loss_weights`` are zero until `minibatches`
    sets them.
    """
    return TrainBatch(
        tokens=rollouts.tokens,
        lengths=rollouts.lengths,
        response_mask=mask,
        loss_weights=torch.zeros(len(rollouts.tokens)),
        temperature=rollouts.temperature,
        rollout_log_probs=rollouts.rollout_log_probs,
        group=rollouts.group,
        response_counts=row_counts(mask, rollouts.lengths),
        support_sizes=rollouts.support_sizes,
        support=rollouts.support,
        experts=rollouts.experts,
        rules=rollouts.rules,
        # Row in the step's batch, so that results of the shuffled mini-batches can be put back in order.
        position=torch.arange(len(rollouts)),
    )


def old_policy_log_probs(
    rollouts: Rollouts,
    scores: Scores,
    algorithm: Algorithm,
) -> Tensor | None:
    """Return the log-probs [N] of the old policy, for importance ratios and the KL to the reference.

    With `Correction.bypass` these are the engine's log-probs, otherwise the trainer's. Returns None if the
    trainer has not computed them yet.
    """
    if algorithm.correction.bypass:
        return rollouts.rollout_log_probs
    return scores.old_log_probs


def old_policy_metrics(
    rollouts: Rollouts,
    scores: Scores,
    algorithm: Algorithm,
    state: AlgorithmState,
) -> Metrics:
    """Compute the metrics of the old policy's distance from the engine, the reference and the teacher.

    ``mismatch/*`` compare `Scores.old_log_probs` with the rollout's log-probs. ``kl/ref`` and ``kl/teacher``
    compare the log-probs of `old_policy_log_probs` with the reference's and the teacher's, if these are in
    ``scores``.
    """
    valid = valid_rows(rollouts, scores, algorithm)
    mask = rollouts.response_mask & broadcast_rows(valid, rollouts.lengths)
    token_count = int(mask.sum())
    if scores.old_log_probs is None or not token_count:
        return Metrics()

    metrics = mismatch_metrics(scores.old_log_probs, rollouts.rollout_log_probs, mask, rollouts.lengths)

    log_probs = old_policy_log_probs(rollouts, scores, algorithm)
    assert log_probs is not None
    if scores.ref_log_probs is not None:
        kl = algorithm.kl.estimate(log_probs, scores.ref_log_probs)
        # Sum in float64: a float32 sum over a long batch loses terms near 0.
        metrics += Metrics.mean("kl/ref", float(kl[mask].double().sum()), token_count)
        metrics += Metrics.of({"kl/coef": state.kl_coef})

    # k1 estimate of KL(actor || teacher), without the coefficient of the distillation.
    if algorithm.needs_teacher and scores.teacher_log_probs is not None:
        difference = (log_probs.double() - scores.teacher_log_probs.double())[mask]
        metrics += Metrics.mean("kl/teacher", float(difference.sum()), token_count)
    return metrics


def _make_advantage_inputs(
    rollouts: Rollouts,
    scores: Scores,
    algorithm: Algorithm,
    state: AlgorithmState,
    mask: Tensor,
    valid: Tensor,
    old_log_probs: Tensor | None,
) -> AdvantageInputs:
    """Construct the inputs of the advantage estimator from a step's rollouts and scores.

    Shapes the rewards, applies the penalties, and distributes the result over tokens. ``mask`` [N] marks the
    response tokens of the ``valid`` rows [B].
    """
    lengths = rollouts.lengths
    shaping = algorithm.reward_shaping
    moments = shaping.moments_after(state.moments, scores.rewards, valid)
    limits = _response_limits(rollouts, algorithm)

    def shape_and_penalize(values: Tensor, response_lengths: Tensor) -> Tensor:
        shaped = shaping.shape(values, scores.rewards, valid, moments)
        return algorithm.overlong.punish(shaped, valid, response_lengths, limits)

    # The overlong penalty counts the same tokens as the length limit, tool output included.
    rewards = shape_and_penalize(scores.rewards, tokens_toward_limit(rollouts))
    token_rewards = torch.zeros(len(mask), dtype=torch.float64)
    last_positions = last_token_in_mask(mask, lengths)
    has_tokens = last_positions >= 0
    token_rewards[last_positions[has_tokens]] = rewards[has_tokens]

    # Subtract the KL penalty after shaping: scale, bounds and normalisation apply to the reward alone.
    if algorithm.kl.in_reward:
        if scores.ref_log_probs is None:
            raise ValueError("the KL penalty in the reward needs Scores.ref_log_probs, which is missing")
        assert old_log_probs is not None
        kl = algorithm.kl.estimate(old_log_probs.double(), scores.ref_log_probs.double())
        penalty = torch.where(mask, state.kl_coef * kl, 0)
        token_rewards = token_rewards - penalty
        rewards = rewards - row_sums(penalty, lengths)

    # Greedy rewards are compared with the samples' rewards, so they are shaped with the same statistics.
    baseline_rewards = scores.baseline_rewards
    if baseline_rewards is not None:
        if scores.baseline_lengths is None:
            raise ValueError("Scores.baseline_rewards without their baseline_lengths")
        baseline_rewards = shape_and_penalize(baseline_rewards, scores.baseline_lengths)

    values = scores.values
    if values is not None:
        values = values.double()

    # Also in bypass mode use the actor's log-probs: the squared probabilities are of the same forward pass.
    log_probs = None
    squared_probs = None
    if algorithm.needs_squared_probs and scores.old_log_probs is not None:
        if scores.squared_probs is None:
            raise ValueError("Scores.squared_probs is missing, which algorithm.advantage needs")
        log_probs = scores.old_log_probs.double()
        squared_probs = scores.squared_probs.double()
    return AdvantageInputs(
        rewards=rewards,
        token_rewards=token_rewards,
        mask=mask,
        lengths=lengths,
        group=rollouts.group,
        valid=valid,
        values=values,
        baseline_rewards=baseline_rewards,
        components={name: value.double() for name, value in scores.components.items()},
        log_probs=log_probs,
        squared_probs=squared_probs,
    )


def _select_top_entropy(
    scores: Scores,
    algorithm: Algorithm,
    mask: Tensor,
) -> tuple[Tensor | None, Metrics]:
    """Return the tokens [N] bool that `PolicyLoss.top_entropy` selects, and their lowest entropy as a metric.

    Returns None in place of the tokens if the policy loss covers all tokens of ``mask`` [N] bool.
    """
    top_fraction = algorithm.policy_loss.top_entropy
    if top_fraction is None or not mask.any():
        return None, Metrics()
    if scores.entropy is None:
        raise ValueError("Scores.entropy is missing, which algorithm.policy_loss.top_entropy needs")

    # Select over the complete step: a quantile of each mini-batch would depend on the split.
    selected = top_entropy_tokens(scores.entropy, mask, top_fraction)
    threshold = float(scores.entropy[selected].min())
    return selected, Metrics.of({"policy/entropy_threshold": threshold})


def _response_limits(rollouts: Rollouts, algorithm: Algorithm) -> Tensor:
    """Return the length limit of each row in tokens: [B] int64.

    Generated rollouts have a limit per row, since a sampling profile may set one per task. For rollouts
    without limits, the algorithm's limit applies to every row.
    """
    if rollouts.max_response_tokens is not None:
        return rollouts.max_response_tokens

    limit = algorithm.overlong.limit or algorithm.max_response_tokens
    if limit is not None:
        return torch.full((len(rollouts),), limit)
    if algorithm.overlong.buffer is not None:
        raise ValueError("the overlong penalty needs a limit: Rollouts.max_response_tokens")

    # Without a penalty the limits are not used, so any large number will do.
    return torch.full((len(rollouts),), torch.iinfo(torch.long).max)


def _compute_correction(
    rollouts: Rollouts,
    scores: Scores,
    algorithm: Algorithm,
    mask: Tensor,
) -> tuple[Tensor | None, Tensor, Metrics]:
    """Compute correction weights [N], the mask without rejected tokens, and metrics.

    In bypass mode `policy_objective` applies the correction: the weights are None, and no token is rejected.
    """
    log_probs = scores.old_log_probs
    if log_probs is None or algorithm.correction.bypass or not algorithm.correction.is_active:
        return None, mask, Metrics()
    return algorithm.correction.correct(log_probs, rollouts.rollout_log_probs, mask, rollouts.lengths)


def _teacher_advantages(
    scores: Scores,
    algorithm: Algorithm,
    mask: Tensor,
    old_log_probs: Tensor | None,
) -> Tensor:
    """Compute the distillation term of each token's advantage: [N], 0 outside the mask."""
    if scores.teacher_log_probs is None or old_log_probs is None:
        raise ValueError("the algorithm needs the teacher's and the actor's log-probs of the batch")

    advantages = algorithm.distillation(old_log_probs.double(), scores.teacher_log_probs.double())
    return torch.where(mask, advantages, 0)


@dataclass(frozen=True)
class AlgorithmState:
    """State of an algorithm between steps, saved with a checkpoint.

    Example: ``AlgorithmState(kl_coef=0.001).state_dict()`` is
    ``{"kl_coef": 0.001, "moments": [0.0, 0.0, 0.0]}``.
    """

    kl_coef: float
    """Coefficient of the KL penalty, in reward per nat or loss per nat."""
    moments: RunningMoments = field(default_factory=RunningMoments)
    """Running moments of the scaled and clipped rewards of all steps."""

    def state_dict(self) -> dict[str, float | list[float]]:
        """Return the coefficient and the reward moments as plain numbers, for a checkpoint."""
        return {"kl_coef": self.kl_coef, "moments": list(self.moments)}

    @classmethod
    def from_state_dict(cls, state_dict: dict) -> AlgorithmState:
        """Construct an algorithm's state from the result of `state_dict`."""
        return cls(float(state_dict["kl_coef"]), RunningMoments(*state_dict["moments"]))


def initial_state(algorithm: Algorithm) -> AlgorithmState:
    """Return the algorithm's state before the first step."""
    return AlgorithmState(algorithm.kl.initial_coef)


def next_state(
    algorithm: Algorithm,
    state: AlgorithmState,
    rollouts: Rollouts,
    scores: Scores,
) -> AlgorithmState:
    """Compute the algorithm's state after a step from the step's rollouts and scores.

    Call it once per step, after `build_train_batch` with the old state. An adaptive KL coefficient is updated
    from the mean KL of the old policy to the reference. The algorithm's estimator gives the KL per token,
    which is averaged over each response and then over responses.
    """
    valid = valid_rows(rollouts, scores, algorithm)
    moments = algorithm.reward_shaping.moments_after(state.moments, scores.rewards, valid)
    if not algorithm.kl.adapts:
        return AlgorithmState(state.kl_coef, moments)

    if scores.ref_log_probs is None:
        raise ValueError("the adaptive KL coefficient needs ref_log_probs")

    # Without a scoring pass, only the rollout has log-probs of the old policy.
    log_probs = old_policy_log_probs(rollouts, scores, algorithm)
    if log_probs is None:
        log_probs = rollouts.rollout_log_probs

    # Mean per response, then over the responses with a token.
    mask = rollouts.response_mask & broadcast_rows(valid, rollouts.lengths)
    kl = algorithm.kl.estimate(log_probs.double(), scores.ref_log_probs.double())
    has_tokens = row_sums(mask.double(), rollouts.lengths) > 0
    row_count = int(has_tokens.sum())
    kl_coef = state.kl_coef
    if row_count:
        row_kl = masked_row_means(kl, mask, rollouts.lengths)
        mean_kl = float(row_kl[has_tokens].mean())
        kl_coef = algorithm.kl.next_coef(kl_coef, mean_kl, row_count)

    return AlgorithmState(kl_coef, moments)


def valid_rows(rollouts: Rollouts, scores: Scores, algorithm: Algorithm) -> Tensor:
    """Mark the rows that were generated and have a finite reward: [B] bool.

    For an algorithm with a greedy baseline, the greedy response's reward must be finite too.
    """
    # Only the failed row is invalid: the other samples of its prompt can still be compared.
    valid = scores.valid & (rollouts.finish_reason != FINISH_FAILED) & scores.rewards.isfinite()

    if algorithm.needs_greedy_baseline:
        if scores.baseline_rewards is None:
            raise ValueError("the algorithm needs Scores.baseline_rewards, rewards of greedy responses")
        valid = valid & scores.baseline_rewards.isfinite()
    return valid


def step_metrics(
    rollouts: Rollouts,
    scores: Scores,
    inputs: AdvantageInputs,
    batch: TrainBatch,
) -> Metrics:
    """Compute a step's ``reward/*``, ``response/*``, ``group/*``, ``advantage/*`` and ``critic/*`` metrics.

    ``reward/mean`` is the mean of raw rewards, before shaping and penalties. ``reward/shaped_mean`` is the
    mean after them.
    ``group/*`` are the fraction of prompts whose samples have equal raw rewards, the mean standard deviation
    of a prompt's rewards, and the fraction of prompts with a failed sample. The result is the same on every
    rank.
    """
    valid = inputs.valid
    valid_count = int(valid.sum())
    metrics = Metrics.mean("reward/valid_fraction", valid_count, len(rollouts))

    # Without a valid row all other metrics would divide by zero.
    if not valid_count:
        return metrics

    metrics += _reward_metrics(scores, inputs, valid_count)
    metrics += _group_metrics(scores, inputs)
    metrics += _response_metrics(rollouts, batch, valid, valid_count)

    mask = inputs.mask
    if bool(mask.any()) and batch.advantages is not None and batch.returns is not None:
        metrics += _advantage_metrics(batch.advantages[mask].double())
        if inputs.values is not None:
            metrics += _critic_metrics(batch.returns[mask].double(), inputs.values[mask])
    return metrics


def _reward_metrics(scores: Scores, inputs: AdvantageInputs, valid_count: int) -> Metrics:
    """Compute the metrics ``reward/*`` over the valid rows, such as the mean of raw and of shaped rewards."""
    valid = inputs.valid
    raw_rewards = scores.rewards[valid].double()
    metrics = Metrics.mean("reward/mean", float(raw_rewards.sum()), valid_count)
    metrics += Metrics.of({"reward/std": float(raw_rewards.std(correction=0))})
    metrics += Metrics.of({"reward/min": float(raw_rewards.min())})
    metrics += Metrics.maximum("reward/max", float(raw_rewards.max()))
    metrics += Metrics.mean("reward/shaped_mean", float(inputs.rewards[valid].sum()), valid_count)

    # A component can fail (NaN) in a row whose reward is valid.
    for name, component in inputs.components.items():
        finite_values = component[valid & component.isfinite()]
        metrics += Metrics.mean(f"reward/component/{name}", float(finite_values.sum()), len(finite_values))
    return metrics


def _group_metrics(scores: Scores, inputs: AdvantageInputs) -> Metrics:
    """Compute the metrics ``group/*``; a group is all samples of one prompt.

    They are the fraction of groups with equal rewards, the mean standard deviation of a group's rewards, and
    the fraction of groups with a failed sample.
    """
    group_index, group_count = renumber_groups(inputs.group)

    # First row of each group: every row of a group has the same statistics.
    first_rows = torch.zeros(group_count, dtype=torch.long)
    first_rows[group_index.flip(0)] = torch.arange(len(group_index)).flip(0)

    statistics = group_statistics(scores.rewards.double(), inputs.group, inputs.valid)
    valid_counts = statistics.size[first_rows]
    std = statistics.std[first_rows]

    # Rewards can differ only in groups with two or more valid samples.
    is_comparable = valid_counts > 1
    comparable_count = int(is_comparable.sum())
    is_equal = is_comparable & (std == 0)
    has_failure = valid_counts < torch.bincount(group_index, minlength=group_count)

    metrics = Metrics.mean("group/zero_std_fraction", int(is_equal.sum()), comparable_count)
    metrics += Metrics.mean("group/reward_std", float(std[is_comparable].sum()), comparable_count)
    metrics += Metrics.mean("group/failed_sample_fraction", int(has_failure.sum()), group_count)
    return metrics


def _response_metrics(
    rollouts: Rollouts,
    batch: TrainBatch,
    valid: Tensor,
    valid_count: int,
) -> Metrics:
    """Compute the metrics ``response/*`` over the valid rows; lengths are in tokens, before rejection."""
    if batch.response_counts is None:
        return Metrics()

    lengths = batch.response_counts[valid].double()
    is_truncated = (rollouts.finish_reason == FINISH_LENGTH)[valid]

    # Response tokens before and after rejection and the overlong filter.
    token_count = int(batch.response_counts.sum())
    train_count = int(batch.response_mask.sum())

    metrics = Metrics.mean("response/length", float(lengths.sum()), valid_count)
    metrics += Metrics.maximum("response/length_max", float(lengths.max()))
    metrics += Metrics.mean("response/truncated_fraction", int(is_truncated.sum()), valid_count)
    metrics += Metrics.mean("response/trained_fraction", train_count, token_count)
    return metrics


def _advantage_metrics(advantages: Tensor) -> Metrics:
    """Compute the metrics ``advantage/*`` from the advantages of all response tokens."""
    metrics = Metrics.mean("advantage/mean", float(advantages.sum()), len(advantages))
    metrics += Metrics.of({"advantage/std": float(advantages.std(correction=0))})
    metrics += Metrics.maximum("advantage/abs_max", float(advantages.abs().max()))
    return metrics


def _critic_metrics(returns: Tensor, values: Tensor) -> Metrics:
    """Compute the mean return and the critic's explained variance.

    Explained variance is 1 for a perfect critic and 0 for one that predicts a constant.
    """
    variance = float(returns.var(correction=0))
    metrics = Metrics.mean("critic/return", float(returns.sum()), len(returns))

    # Equal returns have no variance to explain.
    if variance > 0:
        explained = 1 - float((returns - values).var(correction=0)) / variance
        metrics += Metrics.of({"critic/explained_variance": explained})
    return metrics
