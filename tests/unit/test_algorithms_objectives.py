"""The whole path estimate -> minibatches -> objectives, for every named algorithm: exact under any split."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import Batch, batches, close, flat

from megatron_rl.algorithms import (
    ALGORITHMS,
    estimate,
    get_algorithm,
    minibatches,
    policy_objective,
    sft_objective,
    value_objective,
    weighted,
)
from megatron_rl.algorithms.aggregation import loss_weights
from megatron_rl.algorithms.names import AGGREGATIONS, CORRECTIONS
from megatron_rl.algorithms.state import AlgorithmState, initial_state, next_state
from megatron_rl.algorithms.value_loss import value_loss
from megatron_rl.config.errors import UserError
from megatron_rl.metrics import Metrics, merge
from megatron_rl.types import FINISH_FAILED, FINISH_LENGTH, FINISH_STOP, Rollouts, Scores, take_rows

quick = settings(max_examples=25, deadline=None)
few = settings(max_examples=6, deadline=None)


def step(batch: Batch) -> tuple[Rollouts, Scores]:
    """Return a whole step's rollouts and scores, everything any algorithm asks for."""
    rows, count = len(batch.masks), batch.tokens
    rewards, group, valid = batch.tensors
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
    )
    return rollouts, scores


def algorithm_of(name: str, **settings_):
    return get_algorithm(name, {"max_response_tokens": 6, **settings_})


def policy(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return new log-probs and entropies of every token of the whole step (by token id), float64."""
    base = flat(batch.noise("rollout", -3, -0.1)) + flat(batch.noise("new", -0.4, 0.4))
    return base.requires_grad_(), flat(batch.noise("entropy", 0, 2)).requires_grad_()


def run(batch: Batch, algorithm, parts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]:
    """Sum loss, gradients (with respect to log-probs and entropy) and metrics over micro-batches."""
    log_probs, entropy = policy(batch)
    total, metrics = torch.zeros((), dtype=torch.float64), Metrics()
    for micro in parts:
        loss, found = policy_objective(algorithm, micro, log_probs[micro.tokens], entropy[micro.tokens])
        total = total + loss
        metrics += found
    if parts:
        total.backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in (log_probs, entropy)]
    return total.detach(), *gradients, metrics.values()


def split(minibatch, seed: int):
    """Cut a mini-batch into micro-batches of whole rows, in random order and sizes."""
    source = random.Random(seed)
    rows = list(range(len(minibatch)))
    source.shuffle(rows)
    parts = []
    while rows:
        size = source.randint(1, 3)
        parts.append(minibatch.rows(rows[:size]))
        rows = rows[size:]
    return parts


EVERYTHING = {"entropy_coef": 0.01, "kl_in": "loss", "kl_coef": 0.1, "opsm_delta": 0.01, "correction": "mis"}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("extra", [{}, EVERYTHING], ids=["plain", "everything"])
@few
@given(batches())
def test_any_split_gives_the_same_loss_gradient_and_metrics(name, extra, batch):
    algorithm = algorithm_of(name, **extra)
    rollouts, scores = step(batch)
    made, _ = estimate(rollouts, scores, algorithm)
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
    algorithm = algorithm_of(name, kl_in="loss", entropy_coef=0.1)
    rollouts, scores = step(batch)
    made, _ = estimate(rollouts, scores, algorithm)
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
    got = loss_weights(batch.mask, batch.lengths, mode, scale_factor=50)
    assert got.dtype == torch.float32 and (got[~batch.mask] == 0).all()
    close(got[batch.mask], [w for row in weight_reference(counts, counts, mode) for w in row], 1e-6)
    more = [n + (row % 3) for row, n in enumerate(counts)]
    kept = loss_weights(batch.mask, batch.lengths, mode, counts=torch.tensor(more), scale_factor=50)
    close(kept[batch.mask], [w for row in weight_reference(counts, more, mode) for w in row], 1e-6)


def test_aggregation_errors():
    arguments = (torch.ones(1) > 0, torch.tensor([1]))
    with pytest.raises(UserError, match="token-median"):
        loss_weights(*arguments, "token-median")
    with pytest.raises(UserError, match="loss_scale_factor"):
        loss_weights(*arguments, "seq-mean-token-sum-norm")


@quick
@given(batches(), st.integers(1, 5), st.integers(1, 3), st.integers(0, 5))
def test_minibatches_deal_every_row_once_per_epoch(batch, steps, epochs, seed):
    algorithm = algorithm_of("grpo")
    rollouts, scores = step(batch)
    made, _ = estimate(rollouts, scores, algorithm)
    present = [row for row, mask in enumerate(batch.masks) if batch.valid[row] and any(mask)]
    first_tokens = torch.cumsum(batch.lengths, 0) - batch.lengths
    found = list(minibatches(made, algorithm, steps, epochs, seed))
    dealt = sorted(int(part[0]) for mini in found for part in torch.split(mini.tokens, mini.lengths.tolist()))
    assert dealt == sorted(epochs * [int(first_tokens[row]) for row in present])
    prompts = len({batch.group[row] for row in present})
    assert len(found) == epochs * min(steps, prompts)
    per_epoch = len(found) // epochs if found else 0
    for epoch in range(epochs):
        groups = [set(mini.group.tolist()) for mini in found[epoch * per_epoch : (epoch + 1) * per_epoch]]
        assert sum(map(len, groups)) == prompts and len(set().union(*groups)) == prompts
        assert max(map(len, groups), default=0) - min(map(len, groups), default=0) <= 1
    for mini in found:
        assert float(mini.loss_weights.sum()) == pytest.approx(1.0, abs=1e-5)
        assert mini.response_mask.equal(mini.loss_weights > 0)
    again = list(minibatches(made, algorithm, steps, epochs, seed))
    assert all(a.tokens.equal(b.tokens) for a, b in zip(found, again, strict=True))


def test_denominator_all_counts_what_was_rejected():
    """Rejected tokens either leave the denominator with the numerator, or the numerator alone."""
    rollouts, scores = step(Batch([0, 0], [1.0, 0.0], [True, True], [[True] * 4, [True] * 2], 5))
    scores = replace(scores, old_log_probs=rollouts.rollout_log_probs.clone())
    scores.old_log_probs[1] += 5.0
    for denominator, weight in (("participating", 1 / 5), ("all", 1 / 6)):
        algorithm = algorithm_of("grpo", rollout_rs={"token_k1": 2.0}, denominator=denominator)
        made, metrics = estimate(rollouts, scores, algorithm)
        assert made.response_mask.tolist() == [True, False, True, True, True, True]
        assert metrics.values()["mismatch/rejected_fraction"] == pytest.approx(1 / 6)
        (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
        assert mini.loss_weights[0] == pytest.approx(weight)


@pytest.mark.parametrize("name", ALGORITHMS)
@few
@given(batches())
def test_failed_rows_take_no_part(name, batch):
    """A failed row's reward, finish reason and numbers have no effect on any other row."""
    algorithm = algorithm_of(name)
    rollouts, scores = step(batch)
    kept = [row for row, ok in enumerate(batch.valid) if ok]
    made, _ = estimate(rollouts, scores, algorithm)
    assert made.response_mask.equal(
        rollouts.response_mask & torch.repeat_interleave(scores.valid, rollouts.lengths)
    )
    if name == "gdpo" or not kept:
        return  # its test components carry one row's reward over to another row
    per_row = {f: getattr(scores, f)[kept] for f in ("rewards", "valid", "baseline_rewards")}
    per_token = {
        f: take_rows(getattr(scores, f), rollouts.lengths, kept)
        for f in ("old_log_probs", "ref_log_probs", "values")
    }
    alone, _ = estimate(rollouts.rows(kept), Scores(components={}, **per_row, **per_token), algorithm)
    close(made.rows(kept).advantages, alone.advantages, 1e-6)
    close(made.rows(kept).returns, alone.returns, 1e-6)


def test_all_rows_failed():
    batch = Batch([0, 0], [float("nan")] * 2, [False, False], [[True, True], [True]], 1)
    for name in ALGORITHMS:
        algorithm = algorithm_of(name)
        made, metrics = estimate(*step(batch), algorithm)
        assert not made.response_mask.any() and made.advantages.abs().sum() == 0
        assert list(minibatches(made, algorithm, 2, 2, seed=0)) == []
        assert metrics.values()["reward/valid_fraction"] == 0


def test_reasons_a_row_is_invalid():
    """Not valid, engine failure, NaN reward, and for ReMax a failed greedy response."""
    rollouts, scores = step(Batch([0] * 4, [1.0, 0.0, 1.0, 0.5], [True] * 4, [[True]] * 4, 5))
    rollouts = replace(
        rollouts, finish_reason=torch.tensor([FINISH_STOP, FINISH_FAILED, FINISH_STOP, FINISH_STOP])
    )
    scores = replace(
        scores,
        rewards=torch.tensor([1.0, 0.0, torch.nan, 0.5]),
        baseline_rewards=torch.tensor([0.1, 0.1, 0.1, torch.nan]),
    )
    assert estimate(rollouts, scores, algorithm_of("grpo"))[0].response_mask.tolist() == [
        True,
        False,
        False,
        True,
    ]
    assert estimate(rollouts, scores, algorithm_of("remax"))[0].response_mask.tolist() == [
        True,
        False,
        False,
        False,
    ]


def test_overlong_rows_count_for_the_group_and_not_for_the_loss():
    rollouts, scores = step(Batch([0, 0], [1.0, 0.0], [True, True], [[True] * 2, [True] * 2], 5))
    rollouts = replace(rollouts, finish_reason=torch.tensor([FINISH_STOP, FINISH_LENGTH]))
    made, metrics = estimate(rollouts, scores, algorithm_of("dr_grpo", overlong_filter=True))
    assert made.response_mask.tolist() == [True, True, False, False]
    close(made.advantages[:2], [0.5, 0.5])
    assert metrics.values()["response/trained_fraction"] == 0.5


@quick
@given(batches())
def test_kl_in_the_reward(batch):
    """r_t = score - beta KL_t: sums over the row for outcome advantages, token by token for returns."""
    rollouts, scores = step(batch)
    algorithm = algorithm_of("reinforce_pp", whiten=False, kl_coef=0.5)
    made, _ = estimate(rollouts, scores, algorithm)
    kl = (scores.old_log_probs - scores.ref_log_probs).double().tolist()
    position, wanted = 0, []
    for row, mask in enumerate(batch.masks):
        places = [position + t for t, m in enumerate(mask) if m] if batch.valid[row] else []
        row_values = dict.fromkeys(range(position, position + len(mask)), 0.0)
        for t in places:
            row_values[t] = batch.rewards[row] - 0.5 * sum(kl[s] for s in places if s >= t)
        wanted += row_values.values()
        position += len(mask)
    close(made.advantages, wanted, 1e-5)
    rloo = estimate(rollouts, scores, algorithm_of("rloo", kl_in="reward", kl_coef=0.5, kl_estimator="k1"))[0]
    for row, mask in enumerate(batch.masks):
        alone = [other for other in batch.members(row)] == [row]
        if alone and any(mask):
            start = sum(len(m) for m in batch.masks[:row])
            first = start + mask.index(True)
            assert float(rloo.advantages[first]) == pytest.approx(wanted[first], abs=1e-5)


@quick
@given(batches(), st.sampled_from([None, 0.2]))
def test_value_loss_and_its_split(batch, clip):
    algorithm = algorithm_of("ppo", value_clip=clip)
    made, _ = estimate(*step(batch), algorithm)
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
        assert metrics.values()["critic/loss"] == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-6)


def test_value_loss_gradient_is_exact():
    values = torch.randn(6, dtype=torch.float64, requires_grad=True)
    old, returns = torch.randn(2, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, clip=0.3).loss, (values,))


@quick
@given(batches(all_valid=True))
def test_sft(batch):
    made, _ = estimate(*step(batch), algorithm_of("grpo"))
    minibatch = weighted(made, algorithm_of("grpo"))
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
    without = replace(with_nll, positive_nll_coef=0.0)
    made, _ = estimate(rollouts, scores, with_nll)
    plain, _ = estimate(rollouts, scores, without)
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
        made, _ = estimate(rollouts, scores, algorithm)
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
        algorithm = algorithm_of("grpo", bypass=True, correction=name, policy_loss=loss)
        made, _ = estimate(rollouts, replace(scores, old_log_probs=None), algorithm)
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
    algorithm = algorithm_of("dr_grpo", bypass=True, correction="token_tis", policy_loss="policy_gradient")
    made, _ = estimate(rollouts, scores, algorithm)
    (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
    gradient = run(batch, algorithm, [mini])[1]
    new = policy(batch)[0].detach()
    ratio = (new - rollouts.rollout_log_probs).exp().clamp(max=2)
    close(gradient, -mini.loss_weights * made.advantages * ratio, 1e-6)


def test_missing_inputs_are_named():
    rollouts, scores = step(Batch([0], [1.0], [True], [[True]], 0))
    cases = {
        "grpo": ({"old_log_probs": None}, {}, "old_log_probs"),
        "ppo": ({"values": None}, {}, "values"),
        "remax": ({"baseline_rewards": None}, {}, "baseline_rewards"),
        "reinforce_pp": ({"ref_log_probs": None}, {}, "ref_log_probs"),
    }
    for name, (changes, settings_, word) in cases.items():
        with pytest.raises(ValueError, match=word):
            estimate(rollouts, replace(scores, **changes), algorithm_of(name, **settings_))


def test_user_functions_as_pieces():
    """A function in place of a name, and module:function, are pieces like any other."""
    rollouts, scores = step(Batch([0, 0], [1.0, 0.0], [True] * 2, [[True]] * 2, 0))
    named = algorithm_of("grpo", advantage="megatron_rl.algorithms.advantages.pieces:rloo")
    close(estimate(rollouts, scores, named)[0].advantages, [1.0, -1.0])
    own = algorithm_of("grpo", advantage=lambda inputs, algorithm: (inputs.mask * 3.0, inputs.mask * 3.0))
    close(estimate(rollouts, scores, own)[0].advantages, [3.0, 3.0])


def test_adaptive_kl_state():
    """The controller follows the mean over responses of the mean k1 over tokens, and reaches the loss."""
    batch = Batch([0, 0], [1.0, 0.0], [True, True], [[False, True, True], [True, False]], 5)
    rollouts, scores = step(batch)
    controller = {"kl_controller": "adaptive", "kl_horizon": 10.0, "kl_target": 0.05, "kl_coef_max": 0.3}
    algorithm = algorithm_of("grpo", kl_in="loss", kl_coef=0.2, **controller)
    scores = replace(scores, ref_log_probs=scores.old_log_probs - torch.tensor([9.0, 0.1, 0.3, 0.6, 9.0]))
    state = next_state(algorithm, initial_state(algorithm), rollouts, scores)
    assert state.kl_coef == pytest.approx(0.2 * (1 + 0.2 * 2 / 10))
    for _ in range(50):
        state = next_state(algorithm, state, rollouts, scores)
    assert state.kl_coef == 0.3
    assert AlgorithmState.from_state_dict(state.state_dict()) == state
    made, metrics = estimate(rollouts, scores, algorithm, state)
    assert metrics.values()["kl/coef"] == 0.3
    (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
    log_probs, entropy = policy(batch)
    low, _ = policy_objective(algorithm, mini, log_probs, entropy)
    high, found = policy_objective(algorithm, mini, log_probs, entropy, state)
    close(high - low, 0.1 * found.values()["policy/kl_loss"], 1e-6)


def test_running_reward_moments_reach_the_advantages():
    batch = Batch([0, 1], [4.0, 2.0], [True, True], [[True], [True]], 5)
    rollouts, scores = step(batch)
    algorithm = algorithm_of("dr_grpo", reward_normalize="running", reward_ema_decay=0.5)
    made, _ = estimate(rollouts, scores, algorithm)
    close(made.advantages, [1.0, -1.0], 1e-5)  # a first step is normalised by itself
    state = next_state(algorithm, initial_state(algorithm), rollouts, scores)
    made, _ = estimate(rollouts, replace(scores, rewards=torch.tensor([3.0, 3.0])), algorithm, state)
    # Means 3 and 3, squares 10 and 9 with weights 1/4 and 1/2: variance (10 + 2 * 9) / 3 - 9 = 1/3.
    close(made.advantages, [0.0, 0.0], 1e-5)


def test_metrics_of_micro_batches_and_ranks_merge_to_those_of_the_whole():
    batch = Batch([0, 0, 1], [1.0, 0.0, 0.5], [True] * 3, [[True] * 4, [False, True], [True]], 9)
    algorithm = algorithm_of("grpo", aggregation="token-mean")
    made, _ = estimate(*step(batch), algorithm)
    (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
    loss, _, _, whole = run(batch, algorithm, [mini])
    assert whole["policy/loss"] == pytest.approx(float(loss), rel=1e-5)
    log_probs, entropy = (x.detach() for x in policy(batch))
    ranks = [
        merge(policy_objective(algorithm, p, log_probs[p.tokens], entropy[p.tokens])[1] for p in part)
        for part in ([mini.rows([0])], [mini.rows([1]), mini.rows([2])], [])
    ]
    assert merge(ranks).values() == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_bfloat16_log_probs_are_computed_in_float32(name):
    batch = Batch([0, 0], [1.0, 0.0], [True, True], [[True] * 3, [True] * 2], 5)
    algorithm = algorithm_of(name)
    made, _ = estimate(*step(batch), algorithm)
    (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
    log_probs = policy(batch)[0].detach().bfloat16().requires_grad_()
    loss, _ = policy_objective(algorithm, mini, log_probs, torch.zeros_like(log_probs))
    wide, _ = policy_objective(algorithm, mini, log_probs.detach().float(), torch.zeros(5))
    assert loss.dtype == torch.float32 and loss.detach().equal(wide)
    loss.backward()
    assert log_probs.grad.dtype == torch.bfloat16
