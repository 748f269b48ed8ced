"""Global denominators: whatever ranks, micro-batches and packed rows a mini-batch is cut into."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import batches, close
from whole_steps import algorithm_of, policy, step

from megatron_rl.algorithms import build_train_batch, minibatches, policy_objective
from megatron_rl.algorithms.algorithm import AGGREGATIONS
from megatron_rl.megatron.packing import partition_rows

LONGEST = 6


def definition(mode: str, rows: list[list[float]], counted: list[int]) -> float:
    """Aggregate per-token losses by the words of the definition, row by row, in float64.

    ``counted`` is the number of tokens of each row that counts, 0 where the row does not.
    """
    tokens, sequences = sum(counted), sum(n > 0 for n in counted)
    if not tokens:
        return 0.0
    sums = [sum(row) for row in rows]
    if mode == "token-mean":
        return sum(sums) / tokens
    if mode == "token-sum":
        return sum(sums)
    if mode == "seq-mean-token-sum":
        return sum(sums) / sequences
    if mode == "seq-mean-token-sum-norm":
        return sum(sums) / LONGEST / sequences
    return sum(total / n for total, n in zip(sums, counted, strict=True) if n) / sequences


@pytest.mark.parametrize("denominator", ["participating", "all"])
@pytest.mark.parametrize("mode", AGGREGATIONS)
@settings(max_examples=25, deadline=None)
@given(batch=batches(), ranks=st.integers(1, 4), budget=st.integers(1, 20), seed=st.integers(0, 9))
def test_loss_and_gradient_are_the_definition_on_any_ranks(mode, denominator, batch, ranks, budget, seed):
    """Rows are rejected before, so that the two denominators differ; some lose every token."""
    algorithm = algorithm_of(
        "dr_grpo",
        policy_loss="policy_gradient",
        aggregation={"name": mode, "denominator": denominator},
    )
    rollouts, scores = step(batch)
    made, _ = build_train_batch(rollouts, scores, algorithm)
    source = random.Random(seed)
    lengths = made.lengths.tolist()
    lost = torch.tensor(
        [token for n in lengths for token in [source.random() < 0.3] * n], dtype=torch.bool
    ) | (torch.rand(len(made.tokens), generator=torch.Generator().manual_seed(seed)) < 0.3)
    made.response_mask[lost] = False
    log_probs, entropy = policy(batch)
    gradient = torch.zeros_like(log_probs)
    total = 0.0
    for minibatch in minibatches(made, algorithm, 1, 1, seed=0):
        for share in partition_rows(minibatch.lengths.tolist(), ranks, budget):
            x = log_probs.detach().clone().requires_grad_()
            for rows in share:
                micro = minibatch.rows(rows)
                loss, _ = policy_objective(algorithm, micro, x[micro.tokens], entropy[micro.tokens])
                loss.backward()
                total += float(loss.detach())
            gradient += 0 if x.grad is None else x.grad

    reference = log_probs.detach().clone().requires_grad_()
    per_token = (-made.advantages.double() * reference).split(lengths)
    kept = made.response_mask.split(lengths)
    rows = [
        [loss[t] for t in range(len(loss)) if mask[t]] for loss, mask in zip(per_token, kept, strict=True)
    ]
    before = made.response_counts.tolist()
    counted = before if denominator == "all" else [len(row) for row in rows]
    wanted = definition(mode, rows, counted)  # pyright: ignore[reportArgumentType]
    close(torch.tensor(total), float(torch.as_tensor(wanted).detach()), 1e-6)
    if isinstance(wanted, torch.Tensor):
        wanted.backward()
        close(gradient, reference.grad, 1e-6)
