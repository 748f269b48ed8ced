"""Complete steps for the tests of algorithms: rollouts, scores, a policy, and splits into micro-batches."""

from __future__ import annotations

import random

import torch
from ragged_batches import Batch, flat

from megatron_rl.algorithms import (
    get_algorithm,
    policy_objective,
)
from megatron_rl.metrics import Metrics
from megatron_rl.types import FINISH_LENGTH, FINISH_STOP, Rollouts, Scores


def step(batch: Batch) -> tuple[Rollouts, Scores]:
    """Return the rollouts and scores of a step, with every input that any algorithm needs."""
    rows = len(batch.masks)
    count = batch.tokens
    rewards, group, valid = batch.tensors
    # Log-probs are zero on tokens that were not sampled, as in a real batch.
    rollout = flat(batch.noise("rollout", -3, -0.1)).float() * batch.mask
    source = random.Random(batch.seed)
    finish = torch.tensor([source.choice([FINISH_STOP, FINISH_STOP, FINISH_LENGTH]) for _ in range(rows)])
    rollouts = Rollouts(
        tokens=torch.arange(count),
        lengths=batch.lengths,
        response_mask=batch.mask,
        rollout_log_probs=rollout,
        group=group,
        finish_reason=finish,
        policy_version=torch.zeros(rows, dtype=torch.long),
        temperature=torch.ones(rows),
    )

    scores = Scores(
        rewards=rewards.float(),
        valid=valid,
        components={"answer": rewards.float(), "format": rewards.float().flip(0)},
        old_log_probs=rollout + 0.05 * flat(batch.noise("old")).float() * batch.mask,
        ref_log_probs=rollout + 0.3 * flat(batch.noise("ref")).float() * batch.mask,
        values=flat(batch.noise("values")).float(),
        baseline_rewards=torch.full((rows,), 0.25),
        baseline_lengths=torch.full((rows,), 3),
        squared_probs=flat(batch.noise("squared", 0.1, 1.0)).float(),
        teacher_log_probs=rollout + 0.5 * flat(batch.noise("teacher")).float() * batch.mask,
    )
    return rollouts, scores


def algorithm_of(name: str, **pieces):
    """Return an algorithm with changed components."""
    return get_algorithm(name, pieces, max_response_tokens=6)


def policy(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the policy's log-probs and entropies [N] of all tokens, float64, indexed by token id."""
    base = flat(batch.noise("rollout", -3, -0.1)) + flat(batch.noise("new", -0.4, 0.4))

    return base.requires_grad_(), flat(batch.noise("entropy", 0, 2)).requires_grad_()


def run(batch: Batch, algorithm, micro_batches) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]:
    """Sum loss, gradients with respect to log-probs and entropy, and metrics over micro-batches."""
    log_probs, entropy = policy(batch)
    total = torch.zeros((), dtype=torch.float64)
    metrics = Metrics()

    for micro_batch in micro_batches:
        loss, new_metrics = policy_objective(
            algorithm, micro_batch, log_probs[micro_batch.tokens], entropy[micro_batch.tokens]
        )
        total = total + loss
        metrics += new_metrics

    if micro_batches:
        total.backward()

    # No gradient and a zero gradient are equal here.
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in (log_probs, entropy)]
    return total.detach(), *gradients, metrics.values()


def split(minibatch, seed: int):
    """Split a mini-batch into micro-batches of whole rows, with random order and sizes."""
    source = random.Random(seed)
    # Losses and gradients must not depend on how a mini-batch is split.
    rows = list(range(len(minibatch)))
    source.shuffle(rows)

    micro_batches = []
    while rows:
        size = source.randint(1, 3)
        micro_batches.append(minibatch.rows(rows[:size]))
        rows = rows[size:]
    return micro_batches
