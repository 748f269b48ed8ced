"""Objectives, for every named algorithm: exact under any split, and equal to their equations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import Batch, batches, close, flat
from whole_steps import algorithm_of, policy, run, split, step

from megatron_rl.algorithms import (
    ALGORITHMS,
    build_train_batch,
    minibatches,
    policy_objective,
    sft_objective,
    value_objective,
    with_loss_weights,
)
from megatron_rl.algorithms.algorithm import AGGREGATIONS, CORRECTIONS
from megatron_rl.algorithms.losses import ClippedValueLoss
from megatron_rl.algorithms.rewards import Imitation
from megatron_rl.errors import UserError
from megatron_rl.metrics import merge_metrics

quick = settings(max_examples=25, deadline=None)
few = settings(max_examples=6, deadline=None)


EVERYTHING = {
    "policy_loss": {"entropy_coef": 0.01, "opsm_delta": 0.01, "top_entropy": 0.5},
    "kl": {"name": "loss", "coef": 0.1},
    "correction": "mis",
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("extra", [{}, EVERYTHING], ids=["plain", "everything"])
@few
@given(batches())
def test_any_split_gives_the_same_loss_gradient_and_metrics(name, extra, batch):
    if name in ("topr", "vespo") and extra:
        extra = extra | {"correction": "geometric"}  # the loss holds the ratio that weights would count again
    algorithm = algorithm_of(name, **extra)
    rollouts, scores = step(batch)
    scores = replace(scores, entropy=-scores.old_log_probs)
    made, _ = build_train_batch(rollouts, scores, algorithm)
    for minibatch in minibatches(made, algorithm, 2, 1, seed=3):
        whole = run(batch, algorithm, [minibatch])
        assert all(part.isfinite().all() for part in whole[:3])
        for seed in range(2):
            parts = run(batch, algorithm, split(minibatch, seed))
            for one, other in zip(whole[:3], parts[:3], strict=True):
                close(other, one, 1e-9)
            assert parts[3] == pytest.approx(whole[3], rel=1e-6, abs=1e-6)


@quick
@given(batches(), st.sampled_from(["grpo", "ppo", "gspo", "vapo"]))
def test_tokens_that_take_no_part_are_never_read(batch, name):
    """NaN on prompts, failed rows and everything masked out changes neither loss nor gradient."""
    algorithm = algorithm_of(name, kl="loss", policy_loss={"entropy_coef": 0.1})
    rollouts, scores = step(batch)
    made, _ = build_train_batch(rollouts, scores, algorithm)
    for minibatch in minibatches(made, algorithm, 1, 1, seed=0):
        outside = ~minibatch.response_mask
        log_probs, entropy = (x.detach()[minibatch.tokens] for x in policy(batch))
        broken = replace(
            minibatch,
            **{
                field: torch.where(outside, torch.nan, getattr(minibatch, field))
                for field in ("old_log_probs", "ref_log_probs", "old_values", "returns")
                if getattr(minibatch, field) is not None
            },
        )
        results = []
        for micro, fill in ((minibatch, 0.0), (broken, torch.nan)):
            x = torch.where(outside, fill, log_probs).requires_grad_()
            h = torch.where(outside, fill, entropy).requires_grad_()
            loss, _ = policy_objective(algorithm, micro, x, h)
            loss.backward()
            value, _ = value_objective(algorithm, micro, x)
            results.append((loss.detach(), x.grad, h.grad, value.detach()))
        for one, other in zip(*results, strict=True):
            close(other, one)
            assert one.isfinite().all()
        assert results[1][1][outside].abs().sum() == 0


def weight_reference(counts: list[int], denominators: list[int], mode: str) -> list[list[float]]:
    rows, tokens = max(sum(n > 0 for n in denominators), 1), max(sum(denominators), 1)
    return [
        [{
            "token-mean": 1 / tokens, "token-sum": 1.0, "seq-mean-token-sum": 1 / rows,
            "seq-mean-token-sum-norm": 1 / rows / 50, "seq-mean-token-mean": 1 / rows / max(all_, 1),
        }[mode]] * n
        for n, all_ in zip(counts, denominators, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("mode", AGGREGATIONS)
@quick
@given(batches())
def test_aggregation(mode, batch):
    counts = [sum(mask) for mask in batch.masks]
    aggregation = AGGREGATIONS[mode].with_response_limit(50)
    got = aggregation.loss_weights(batch.mask, batch.lengths)
    assert got.dtype == torch.float32 and (got[~batch.mask] == 0).all()
    close(got[batch.mask], [w for row in weight_reference(counts, counts, mode) for w in row], 1e-6)
    more = [n + (row % 3) for row, n in enumerate(counts)]
    aggregation = replace(aggregation, denominator="all")
    kept = aggregation.loss_weights(batch.mask, batch.lengths, torch.tensor(more))
    close(kept[batch.mask], [w for row in weight_reference(counts, more, mode) for w in row], 1e-6)


def test_aggregation_errors():
    with pytest.raises(UserError, match="token-median"):
        algorithm_of("grpo", aggregation="token-median")
    with pytest.raises(UserError, match="scale_factor"):
        AGGREGATIONS["seq-mean-token-sum-norm"].loss_weights(torch.ones(1) > 0, torch.tensor([1]))


@quick
@given(batches(), st.sampled_from([None, 0.2]))
def test_value_loss_and_its_split(batch, clip):
    algorithm = algorithm_of("ppo", value_loss={"clip": clip})
    made, _ = build_train_batch(*step(batch), algorithm)
    for minibatch in minibatches(made, algorithm, 1, 1, seed=0):
        values = flat(batch.noise("new values"))[minibatch.tokens].requires_grad_()
        loss, metrics = value_objective(algorithm, minibatch, values)
        wanted, slopes = 0.0, []
        for v, old, g, w in zip(*(x.tolist() for x in (values, minibatch.old_values, minibatch.returns,
                                                       minibatch.value_weights)), strict=True):  # fmt: skip
            bounded = v if clip is None else min(max(v, old - clip), old + clip)
            wanted += w * 0.5 * max((v - g) ** 2, (bounded - g) ** 2)
            counts = (v - g) ** 2 >= (bounded - g) ** 2
            slopes.append(w * (v - g) if counts else 0.0)
        close(loss, wanted, 1e-6)
        (gradient,) = torch.autograd.grad(loss, values)
        close(gradient, slopes, 1e-6)
        places = minibatch.tokens.tolist()
        total = sum(
            float(
                value_objective(algorithm, part, values[[places.index(t) for t in part.tokens.tolist()]])[
                    0
                ].detach()
            )
            for part in split(minibatch, 1)
        )
        assert total == pytest.approx(float(loss.detach()), rel=1e-6, abs=1e-9)
        stopped = [slope == 0 for slope, w in zip(slopes, minibatch.value_weights.tolist(), strict=True) if w]
        assert metrics.values()["critic/clip_fraction"] == pytest.approx(sum(stopped) / len(stopped))
        assert metrics.values()["critic/loss"] == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-6)


def test_value_loss_gradient_is_exact():
    values = torch.randn(6, dtype=torch.float64, requires_grad=True)
    old, returns = torch.randn(2, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda v: ClippedValueLoss(clip=0.3).token_loss(v, old, returns).loss, (values,)
    )


@quick
@given(batches(all_valid=True))
def test_sft(batch):
    made, _ = build_train_batch(*step(batch), algorithm_of("grpo"))
    minibatch = with_loss_weights(made, algorithm_of("grpo"))
    log_probs = flat(batch.noise("sft", -3, 0), requires_grad=True)
    loss, metrics = sft_objective(minibatch, log_probs)
    kept = log_probs.detach()[batch.mask]
    if not len(kept):
        assert float(loss.detach()) == 0 and metrics.values() == {}
        return
    close(loss, -kept.mean(), 1e-6)
    assert metrics.values()["sft/loss"] == pytest.approx(float(-kept.mean()), rel=1e-5)


@quick
@given(batches())
def test_imitation_of_good_responses(batch):
    """VAPO: coefficient times the mean negative log-likelihood of correct responses' tokens."""
    rollouts, scores = step(batch)
    with_nll = algorithm_of("vapo")
    without = replace(with_nll, imitation=Imitation())
    made, _ = build_train_batch(rollouts, scores, with_nll)
    plain, _ = build_train_batch(rollouts, scores, without)
    for mini, other in zip(
        minibatches(made, with_nll, 1, 1, 0), minibatches(plain, without, 1, 1, 0), strict=True
    ):
        extra = run(batch, with_nll, [mini])[0] - run(batch, without, [other])[0]
        log_probs = policy(batch)[0].detach().tolist()
        position, good = 0, []
        for row, mask in enumerate(batch.masks):
            if batch.valid[row] and batch.rewards[row] > 0:
                good += [log_probs[position + t] for t, m in enumerate(mask) if m]
            position += len(mask)
        close(extra, -0.1 * sum(good) / len(good) if good else 0.0, 1e-5)


def test_correction_weights_scale_the_policy_loss_alone():
    batch = Batch([0, 0], [1.0, 0.0], [True, True], [[True] * 3, [True] * 2], 5)
    rollouts, scores = step(batch)
    losses = {}
    for name in ("none", "token_tis"):
        algorithm = algorithm_of(
            "dr_grpo", correction=name, aggregation="token-sum", policy_loss="policy_gradient"
        )
        made, _ = build_train_batch(rollouts, scores, algorithm)
        (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
        losses[name] = run(batch, algorithm, [mini])[1]
    weight = (scores.old_log_probs - rollouts.rollout_log_probs).exp().clamp(max=2)
    close(losses["token_tis"], losses["none"] * weight, 1e-6)


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "none"])
def test_bypass_corrects_with_the_policy_being_trained(name):
    """Only the plain policy gradient is weighted; losses with a ratio to the rollout already are."""
    batch = Batch([0, 0], [1.0, 0.0], [True, True], [[True] * 3, [True] * 2], 5)
    rollouts, scores = step(batch)
    for loss in ("policy_gradient", "ppo_clip"):
        algorithm = algorithm_of("grpo", correction={"name": name, "bypass": True}, policy_loss=loss)
        made, _ = build_train_batch(rollouts, replace(scores, old_log_probs=None), algorithm)
        assert made.old_log_probs.equal(rollouts.rollout_log_probs) and made.correction is None
        (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
        metrics = run(batch, algorithm, [mini])[3]
        assert "mismatch/abs_diff" in metrics
        assert ("mismatch/is_weight" in metrics) == (
            loss == "policy_gradient" and CORRECTIONS[name].level != "none"
        )
        assert ("mismatch/rejected_fraction" in metrics) == bool(CORRECTIONS[name].rejection)


def test_bypass_with_policy_gradient_is_importance_weighted_reinforce():
    batch = Batch([0, 0], [1.0, 0.0], [True, True], [[True] * 3, [True] * 2], 5)
    rollouts, scores = step(batch)
    algorithm = algorithm_of(
        "dr_grpo", correction={"name": "token_tis", "bypass": True}, policy_loss="policy_gradient"
    )
    made, _ = build_train_batch(rollouts, scores, algorithm)
    (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
    gradient = run(batch, algorithm, [mini])[1]
    new = policy(batch)[0].detach()
    ratio = (new - rollouts.rollout_log_probs).exp().clamp(max=2)
    close(gradient, -mini.loss_weights * made.advantages * ratio, 1e-6)


def test_metrics_of_micro_batches_and_ranks_merge_to_those_of_the_whole():
    batch = Batch([0, 0, 1], [1.0, 0.0, 0.5], [True] * 3, [[True] * 4, [False, True], [True]], 9)
    algorithm = algorithm_of("grpo", aggregation="token-mean")
    made, _ = build_train_batch(*step(batch), algorithm)
    (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
    loss, _, _, whole = run(batch, algorithm, [mini])
    assert whole["policy/loss"] == pytest.approx(float(loss), rel=1e-5)
    log_probs, entropy = (x.detach() for x in policy(batch))
    ranks = [
        merge_metrics(policy_objective(algorithm, p, log_probs[p.tokens], entropy[p.tokens])[1] for p in part)
        for part in ([mini.rows([0])], [mini.rows([1]), mini.rows([2])], [])
    ]
    assert merge_metrics(ranks).values() == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_bfloat16_log_probs_are_computed_in_float32(name):
    batch = Batch([0, 0], [1.0, 0.0], [True, True], [[True] * 3, [True] * 2], 5)
    algorithm = algorithm_of(name)
    made, _ = build_train_batch(*step(batch), algorithm)
    (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
    log_probs = policy(batch)[0].detach().bfloat16().requires_grad_()
    loss, _ = policy_objective(algorithm, mini, log_probs, torch.zeros_like(log_probs))
    wide, _ = policy_objective(algorithm, mini, log_probs.detach().float(), torch.zeros(5))
    assert loss.dtype == torch.float32 and loss.detach().equal(wide)
    loss.backward()
    assert log_probs.grad.dtype == torch.bfloat16
