"""Terms beside the policy loss, and scales, against sums over tokens in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from piece_inputs import advantage_inputs
from ragged_batches import batches, close
from whole_steps import algorithm_of, policy, step

from megatron_rl.algorithms import build_train_batch, minibatches, policy_objective
from megatron_rl.algorithms.advantages import Grpo
from megatron_rl.algorithms.correction import Correction
from megatron_rl.algorithms.lookup import get_algorithm
from megatron_rl.errors import UserErrors

quick = settings(max_examples=20, deadline=None)


def loss_of(algorithm, minibatch, log_probs, entropy):
    """Return the loss of a mini-batch and its gradient."""
    values = log_probs.detach().double().requires_grad_()
    loss, metrics = policy_objective(algorithm, minibatch, values, entropy.detach().double())
    loss.backward()
    return loss.detach(), values.grad, metrics


def one_minibatch(algorithm, batch):
    rollouts, scores = step(batch)
    made, _ = build_train_batch(rollouts, scores, algorithm)
    found = list(minibatches(made, algorithm, 1, 1, seed=0))
    log_probs, entropy = policy(batch)
    return [(item, log_probs[item.tokens], entropy[item.tokens]) for item in found]


@pytest.mark.parametrize("level", ["response", "token"])
@quick
@given(batches())
def test_the_squared_log_ratio_is_added_with_the_losss_weights(level, batch):
    pieces = {"policy_loss": {"log_ratio_coef": 0.3, "log_ratio_of": level}}
    with_penalty = algorithm_of("grpo", aggregation="seq-mean-token-sum", **pieces)
    without = algorithm_of("grpo", aggregation="seq-mean-token-sum")
    for minibatch, log_probs, entropy in one_minibatch(without, batch):
        found, gradient, metrics = loss_of(with_penalty, minibatch, log_probs, entropy)
        base, base_gradient, _ = loss_of(without, minibatch, log_probs, entropy)

        expected, slopes, start = 0.0, torch.zeros(len(log_probs), dtype=torch.float64), 0
        rows = sum(bool(mask.any()) for mask in minibatch.response_mask.split(minibatch.lengths.tolist()))
        for length in minibatch.lengths.tolist():
            span = slice(start, start + length)
            start += length
            mask = minibatch.response_mask[span]
            ratio = (log_probs[span].double() - minibatch.old_log_probs[span].double())[mask]
            if level == "response":
                expected += float(ratio.sum() ** 2) / rows
                slopes[span] = mask * 2 * ratio.sum() / rows
            else:
                expected += float((ratio**2).sum()) / rows
                slopes[span][mask] = 2 * ratio / rows
        close(found - base, 0.3 * expected, 1e-6)
        close(gradient - base_gradient, 0.3 * slopes, 1e-6)
        assert "policy/squared_log_ratio" in metrics.sums


@quick
@given(batches())
def test_the_kl_of_an_older_policy_is_weighted_by_the_ratio(batch):
    weighted = algorithm_of("grpo", kl={"name": "loss", "coef": 1.0, "ratio_weight": True})
    without = algorithm_of("grpo")
    for minibatch, log_probs, entropy in one_minibatch(weighted, batch):
        found, gradient, _ = loss_of(weighted, minibatch, log_probs, entropy)
        base, base_gradient, _ = loss_of(without, minibatch, log_probs, entropy)
        mask = minibatch.response_mask
        x = log_probs.detach().double().requires_grad_()
        ratio = (x - minibatch.old_log_probs.double()).exp()
        y = minibatch.ref_log_probs.double() - x
        expected = (minibatch.loss_weights.double() * ratio * (y.exp() - 1 - y))[mask].sum()
        expected.backward()
        close(found - base, float(expected), 1e-6)
        close(gradient - base_gradient, x.grad, 1e-6)


@quick
@given(st.lists(st.floats(-4, 4), min_size=1, max_size=8))
def test_weights_have_a_floor_and_a_threshold(differences):
    new = torch.tensor(differences)
    rows = (torch.ones(len(new), dtype=torch.bool), torch.tensor([len(new)]))
    correction = Correction(level="token", floor=0.5, threshold=2.0)
    weights = correction.importance_weights(new, torch.zeros(len(new)), *rows)
    close(weights, [min(max(math.exp(value), 0.5), 2.0) for value in new.tolist()], 1e-6)


@pytest.mark.parametrize(
    ("pieces", "where"),
    [
        ({"correction": {"level": "token", "floor": 3.0}}, "algorithm.correction.floor"),
        ({"correction": {"level": "token", "floor": 0.1, "band": [0.5, 2.0]}}, "algorithm.correction.floor"),
        ({"policy_loss": {"log_ratio_coef": -1.0}}, "algorithm.policy_loss.log_ratio_coef"),
        ({"advantage": {"scale_over": "prompt"}}, "algorithm.advantage.scale_over"),
        (
            {"advantage": {"scale_over": "batch", "scale_by_std": False}},
            "algorithm.advantage.scale_over",
        ),
    ],
)
def test_values_that_cannot_be_are_named(pieces, where):
    with pytest.raises(UserErrors) as raised:
        algorithm = get_algorithm("grpo", pieces, max_response_tokens=8)
        problems = list(algorithm.problems())
        if problems:
            raise UserErrors(problems)
    assert [error.where for error in raised.value.errors] == [where]


def test_the_scale_of_the_batch_is_one_for_all_groups():
    rewards = [1.0, 0.0, 0.51, 0.49, 9.0]
    inputs = advantage_inputs(rewards, group=[0, 0, 1, 1, 1])
    inputs = replace(inputs, valid=torch.tensor([True, True, True, True, False]))
    scale = torch.tensor(rewards[:4], dtype=torch.float64).std() + 1e-6
    found = Grpo(scale_over="batch", epsilon=1e-6).row_advantages(inputs)
    close(found, [0.5 / scale, -0.5 / scale, 0.01 / scale, -0.01 / scale, 0.0], 1e-9)
