"""Every piece hands the algorithm's own settings to its function, and the objective is the sum it says."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from piece_inputs import advantage_inputs
from ragged_batches import Batch, close, flat
from whole_steps import algorithm_of, policy, step

from megatron_rl.algorithms import (
    FunctionLoss,
    TokenLoss,
    advantages,
    build_train_batch,
    initial_state,
    losses,
    minibatches,
    next_state,
    policy_objective,
)
from megatron_rl.algorithms.advantages import FunctionAdvantage, whiten
from megatron_rl.algorithms.algorithm import ADVANTAGES, POLICY_LOSSES
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.algorithms.losses import validate_token_loss
from megatron_rl.errors import UserError

BATCH = Batch(
    group=[0, 0, 0, 1, 1, 2],
    rewards=[1.0, 0.0, 0.5, 0.3, -1.0, 0.7],
    valid=[True, True, True, True, True, True],
    masks=[[True] * 4, [False, True, True], [True, False, True, True], [True], [True] * 5, [False, True]],
    seed=11,
)
NUMBERS = {
    "epsilon": 0.1, "gamma": 0.9, "lam": 0.8, "critic_lambda": 0.7, "alpha": 2.0, "normalizer": 2.0,
    "weights": {"answer": 0.5, "format": 2.0},
}  # fmt: skip
LOSS_NUMBERS = {
    "clip_low": 0.11, "clip_high": 0.07, "dual_clip": 1.05, "temperature_positive": 2.0,
    "temperature_negative": 3.0, "divergence": "kl", "ratio_cap": 1.02, "fraction": 0.3,
    "covariance_low": 0.01, "covariance_high": 0.4, "coef": 0.6,
}  # fmt: skip


def chosen(name: str, table: dict, numbers: dict) -> dict:
    """Return a component as in a configuration: its name and its own settings."""
    known = {item.name for item in fields(table[name])}
    return {"name": name, **{key: value for key, value in numbers.items() if key in known}}


def expected_rows(name: str, rewards: torch.Tensor) -> torch.Tensor:
    """Return an outcome estimator's advantage per row."""
    estimator = {
        "grpo": advantages.Grpo(epsilon=0.1),
        "dr_grpo": advantages.Grpo(scale_by_std=False),
        "grpo_leave_one_out": advantages.GrpoLeaveOneOut(epsilon=0.1),
        "grpo_pass_at_k": advantages.GrpoPassAtK(epsilon=0.1),
        "rloo": advantages.Rloo(),
        "opo": advantages.Opo(),
        "gpg": advantages.Gpg(normalizer=2.0),
        "gdpo": advantages.Gdpo(weights={"answer": 0.5, "format": 2.0}, epsilon=0.1),
    }[name]
    components = {"answer": rewards.tolist(), "format": rewards.flip(0).tolist()}
    lengths = [sum(mask) for mask in BATCH.masks]
    inputs = advantage_inputs(rewards.tolist(), BATCH.group, lengths=lengths, components=components)
    return estimator.row_advantages(inputs)


def optimal_token_baseline(scores, rewards, lone_tail: str = "zero") -> tuple[list[float], list[float]]:
    """Return the optimal token baseline's advantages and returns of the batch, token by token."""
    rewards = rewards.tolist()
    starts = (torch.cumsum(BATCH.lengths, 0) - BATCH.lengths).tolist()
    energies = []
    for start, mask in zip(starts, BATCH.masks, strict=True):
        energy, row = 0.0, []
        for token in (start + place for place, marked in enumerate(mask) if marked):
            p = math.exp(float(scores.old_log_probs[token]))
            energy += max(0.0, 1 - 2 * p + float(scores.squared_probs[token]))
            row.append(energy)
        energies.append(row)

    wanted, returns = [0.0] * BATCH.tokens, [0.0] * BATCH.tokens
    for row, (start, mask) in enumerate(zip(starts, BATCH.masks, strict=True)):
        prompt = [other for other in range(len(rewards)) if BATCH.group[other] == BATCH.group[row]]
        for index, token in enumerate(start + place for place, marked in enumerate(mask) if marked):
            present = [other for other in prompt if len(energies[other]) > index]
            weight = sum(energies[other][index] for other in present)
            baseline = sum(energies[other][index] * rewards[other] for other in present) / weight
            if len(prompt) == 1 or (len(present) == 1 and lone_tail == "returns"):
                baseline = 0.0
            wanted[token] = rewards[row] - baseline
            returns[token] = rewards[row]
    return wanted, returns


def test_the_optimal_token_baseline_may_leave_a_lone_tail_without_one():
    rollouts, scores = step(BATCH)
    algorithm = algorithm_of("otb", advantage={"lone_tail": "returns"})
    made, _ = build_train_batch(rollouts, scores, algorithm)
    wanted, _ = optimal_token_baseline(scores, scores.rewards.double(), "returns")
    close(made.advantages, wanted, 1e-6)
    assert wanted != optimal_token_baseline(scores, scores.rewards.double())[0]
    with pytest.raises(ValueError, match="squared_probs"):
        build_train_batch(rollouts, replace(scores, squared_probs=None), algorithm)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantage_pieces(name):
    rollouts, scores = step(BATCH)
    algorithm = algorithm_of("grpo", advantage=chosen(name, ADVANTAGES, NUMBERS))
    made, _ = build_train_batch(rollouts, scores, algorithm)
    mask, lengths, values = BATCH.mask, BATCH.lengths, scores.values.double()
    rewards = scores.rewards.double()
    token_rewards = torch.zeros(BATCH.tokens, dtype=torch.float64)
    ends = torch.cumsum(lengths, 0) - 1
    token_rewards[ends] = rewards
    if name in ("gae", "vapo"):
        counts = torch.tensor([sum(m) for m in BATCH.masks])
        lam = 0.8 if name == "gae" else advantages.length_adaptive_lambda(counts, alpha=2.0)
        wanted = advantages.gae(token_rewards, values, mask, lengths, gamma=0.9, lam=lam)
        critic = advantages.gae(
            token_rewards, values, mask, lengths, gamma=0.9, lam=0.8 if name == "gae" else 0.7
        )
        close(made.advantages, wanted.advantages, 1e-6)
        close(made.returns, critic.returns, 1e-6)
    elif name == "otb":
        wanted, returns = optimal_token_baseline(scores, rewards)
        close(made.advantages, wanted, 1e-6)
        close(made.returns, returns, 1e-6)
    elif name == "none":
        close(made.advantages, torch.zeros(BATCH.tokens), 0)
    elif name in ("reinforce", "remax"):
        found = advantages.discounted_returns(token_rewards, mask, lengths, gamma=0.9)
        close(made.returns, found, 1e-6)
        close(made.advantages, found - (0.25 if name == "remax" else 0.0) * mask, 1e-6)
    else:
        wanted = torch.repeat_interleave(expected_rows(name, rewards), lengths) * mask
        close(made.advantages, wanted, 1e-6)


def expected_loss(name: str, x: torch.Tensor, mini) -> torch.Tensor:
    """Return a policy loss per token."""
    clip = {"clip_low": 0.11, "clip_high": 0.07}
    loss = {
        "policy_gradient": losses.PolicyGradient(),
        "ppo_clip": losses.PpoClip(dual_clip=1.05, **clip),
        "cispo": losses.Cispo(**clip),
        "sapo": losses.Sapo(temperature_positive=2.0, temperature_negative=3.0),
        "dppo": losses.Dppo(divergence="kl", ratio_cap=1.02, **clip),
        "gspo": losses.Gspo(**clip),
        "gmpo": losses.Gmpo(**clip),
        "topr": losses.Topr(),
        "vespo": losses.Vespo(),
        "clip_cov": losses.ClipCov(**clip),
        "kl_cov": losses.KlCov(coef=0.6),
    }[name]
    return loss.token_loss(mini, x).loss


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_objective_is_the_sum_it_says(name):
    """sum_t w_t (l_t + kl_coef k3_t - entropy_coef H_t), each term with its sign, weight and coefficient."""
    loss = chosen(name, POLICY_LOSSES, LOSS_NUMBERS) | {"entropy_coef": 0.2}
    algorithm = algorithm_of("dr_grpo", policy_loss=loss, kl={"name": "loss", "coef": 0.3})
    made, _ = build_train_batch(*step(BATCH), algorithm)
    (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
    log_probs, entropy = policy(BATCH)
    loss, metrics = policy_objective(algorithm, mini, log_probs, entropy)
    loss.backward()
    x, h = (v.detach().clone().requires_grad_() for v in (log_probs, entropy))
    terms = expected_loss(name, x, mini) + 0.3 * kl_estimate(x, mini.ref_log_probs, "k3") - 0.2 * h
    wanted = (mini.loss_weights * terms).sum()
    wanted.backward()
    close(loss, wanted.detach(), 1e-6)
    close(log_probs.grad, x.grad, 1e-6)
    close(entropy.grad, h.grad, 1e-6)
    mask = mini.response_mask
    assert metrics.values()["policy/entropy"] == pytest.approx(float(h.detach()[mask].mean()), rel=1e-6)
    moved = (mini.old_log_probs - x.detach())[mask]
    assert metrics.values()["policy/kl"] == pytest.approx(float(moved.mean()), rel=1e-5)
    assert metrics.values()["policy/ratio_max"] == pytest.approx(float((-moved).exp().max()), rel=1e-5)


def test_covariance_selection_uses_the_settings():
    """A third of the tokens for kl-cov; for clip-cov as many of those between the bounds."""
    for name in ("clip_cov", "kl_cov"):
        algorithm = algorithm_of(name, policy_loss=chosen(name, POLICY_LOSSES, LOSS_NUMBERS))
        made, _ = build_train_batch(*step(BATCH), algorithm)
        (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
        tokens = int(mini.response_mask.sum())
        cov = losses.token_covariance(
            mini.old_log_probs.double(), mini.advantages.double(), mini.response_mask
        )
        between = int(((cov > 0.01) & (cov < 0.4) & mini.response_mask).sum())
        limit = tokens if name == "kl_cov" else between
        assert int(mini.selected.sum()) == min(int(0.3 * tokens), limit)


def test_whitening_then_clipping_of_advantages():
    rollouts, scores = step(BATCH)
    plain = algorithm_of("grpo", advantage="reinforce")
    raw = build_train_batch(rollouts, scores, plain)[0].advantages.double()
    wanted = whiten(raw, BATCH.mask)
    assert wanted.abs().max() > 0.9
    whitened = replace(plain, advantage=advantages.Reinforce(whiten=True))
    close(build_train_batch(rollouts, scores, whitened)[0].advantages, wanted, 1e-5)
    both = replace(plain, advantage=advantages.Reinforce(whiten=True, clip=0.9))
    close(build_train_batch(rollouts, scores, both)[0].advantages, wanted.clamp(-0.9, 0.9), 1e-5)


def test_fixed_coefficient_stays_where_it_is():
    algorithm = algorithm_of("grpo", kl={"name": "loss", "coef": 0.3, "target": 1e-6})
    assert next_state(algorithm, initial_state(algorithm), *step(BATCH)).kl_coef == 0.3


def test_sequence_masking_takes_drifted_bad_responses_out():
    algorithm = algorithm_of("dr_grpo", policy_loss={"name": "policy_gradient", "opsm_delta": 0.0})
    made, _ = build_train_batch(*step(BATCH), algorithm)
    (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
    log_probs, entropy = policy(BATCH)
    loss, metrics = policy_objective(algorithm, mini, log_probs, entropy)
    loss.backward()
    keep = losses.off_policy_sequence_mask(
        log_probs, mini.rollout_log_probs, mini.advantages, mini.response_mask, mini.lengths, delta=0.0
    )
    assert 0 < metrics.values()["policy/opsm_fraction"] < 1
    close(log_probs.grad, -mini.loss_weights * mini.advantages * keep, 1e-6)


def test_stale_samples_are_seen_where_old_log_probs_are_recomputed():
    """The policy has moved since it sampled, and not since its log-probs were taken: OPSM and TOPR act."""
    batch = Batch([0, 0], [0.0, 1.0], [True, True], [[True] * 3, [True] * 3], 3)
    rollouts, scores = step(batch)
    stale = replace(rollouts, rollout_log_probs=scores.old_log_probs + 0.2)
    log_probs = scores.old_log_probs.double()
    for name, loss in (("topr", {}), ("dr_grpo", {"opsm_delta": 0.1})):
        algorithm = algorithm_of(name, policy_loss=loss)
        values = []
        for sampled in (rollouts, stale):
            made, _ = build_train_batch(sampled, scores, algorithm)
            (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
            values.append(policy_objective(algorithm, mini, log_probs, torch.zeros(6))[1].values())
        fresh, aged = values
        if name == "topr":
            ratio = (log_probs - stale.rollout_log_probs)[:3].sum().exp()
            assert aged["policy/taper"] == pytest.approx((3 + 3 * float(ratio)) / 6, rel=1e-5)
            assert aged["policy/taper"] < fresh["policy/taper"]
        else:
            assert (fresh["policy/opsm_fraction"], aged["policy/opsm_fraction"]) == (0.0, 0.5)


def test_tokens_of_low_entropy_have_no_policy_loss_and_count_in_its_mean():
    batch = Batch([0, 0], [0.0, 1.0], [True, True], [[True] * 3, [True] * 3], 3)
    rollouts, scores = step(batch)
    entropy = torch.tensor([0.1, 2.0, 0.3, 0.2, 3.0, 0.4])
    log_probs = scores.old_log_probs.double()
    plain = algorithm_of("grpo", kl={"name": "loss", "coef": 0.3})
    algorithm = algorithm_of("grpo", kl={"name": "loss", "coef": 0.3}, policy_loss={"top_entropy": 0.4})
    assert algorithm.needs_scoring_pass == ("policy_loss",)
    made, metrics = build_train_batch(rollouts, replace(scores, entropy=entropy), algorithm)
    assert metrics.values()["policy/entropy_threshold"] == 2.0

    (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
    whole = build_train_batch(rollouts, scores, plain)[0]
    (everything,) = minibatches(whole, plain, 1, 1, seed=0)
    found, _ = policy_objective(algorithm, mini, log_probs, torch.zeros(6))
    full, full_metrics = policy_objective(plain, everything, log_probs, torch.zeros(6))
    kept = torch.tensor([False, True, False, False, True, False])
    token_loss = plain.policy_loss.token_loss(everything, log_probs).loss
    wanted = torch.where(kept, token_loss, 0).sum() / 6 + 0.3 * full_metrics.values()["policy/kl_loss"]
    close(found, wanted, 1e-6)
    close(full, token_loss.sum() / 6 + 0.3 * full_metrics.values()["policy/kl_loss"], 1e-6)


def test_step_metrics_by_hand():
    """Rewards, groups and responses of a step with a failed sample and a cut-off response."""
    batch = Batch(
        [0, 0, 1, 1],
        [1.0, 0.0, 0.5, float("nan")],
        [True, True, True, False],
        [[True] * n for n in (1, 2, 3, 4)],
        3,
    )
    rollouts, scores = step(batch)
    rollouts = replace(rollouts, finish_reason=torch.tensor([0, 1, 0, 0]))
    values = build_train_batch(rollouts, scores, algorithm_of("ppo"))[1].values()
    wanted = {
        "reward/valid_fraction": 0.75, "reward/mean": 0.5, "reward/std": (1 / 6) ** 0.5, "reward/min": 0.0,
        "reward/max": 1.0, "reward/shaped_mean": 0.5, "reward/component/answer": 0.5,
        "group/zero_std_fraction": 0.0, "group/reward_std": 0.5**0.5, "group/failed_sample_fraction": 0.5,
        "response/length": 2.0, "response/length_max": 3.0, "response/truncated_fraction": 1 / 3,
        "response/trained_fraction": 1.0,
    }  # fmt: skip
    assert {key: values[key] for key in wanted} == pytest.approx(wanted)
    kept = batch.mask.clone()
    kept[6:] = False
    kl = kl_estimate(scores.old_log_probs, scores.ref_log_probs, "k3")[kept].mean()
    assert values["kl/ref"] == pytest.approx(float(kl), rel=1e-5)
    returned = flat([[1.0], [0.0] * 2, [0.5] * 3])
    error = (returned - scores.values.double()[kept]).var(correction=0)
    assert values["critic/explained_variance"] == pytest.approx(
        float(1 - error / returned.var(correction=0)), rel=1e-5
    )


def summed(*_):
    return torch.tensor(1.0)


@pytest.mark.parametrize(
    ("returned", "got"),
    [(torch.zeros(3), "a tensor [3]"), (None, "NoneType"), (TokenLoss(torch.zeros(2), {}), "a tensor [2]")],
)
def test_a_loss_of_the_users_own_that_returns_something_else_is_named(returned, got):
    with pytest.raises(UserError) as caught:
        validate_token_loss(FunctionLoss(function=summed), returned, torch.zeros(3))
    error = caught.value
    assert "summed" in error.message and f"{__file__}:{summed.__code__.co_firstlineno}" == error.where
    assert got in (error.got or "") and "TokenLoss" in (error.expected or "")


def test_an_advantage_of_the_users_own_that_returns_something_else_is_named():
    with pytest.raises(UserError, match=r"(?s)summed.*Advantages\(advantages, returns\).*a tensor \[\]"):
        FunctionAdvantage(function=summed)(advantage_inputs([1.0], [0]))
