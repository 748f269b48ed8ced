"""From rollouts and scores to mini-batches: who takes part, what rewards become, how rows are dealt."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ragged_batches import Batch, batches, close
from whole_steps import algorithm_of, policy, step

from megatron_rl.algorithms import (
    ALGORITHMS,
    Algorithm,
    build_train_batch,
    get_algorithm,
    minibatches,
    old_policy_metrics,
    policy_objective,
)
from megatron_rl.algorithms.advantages import (
    Advantage,
    AdvantageInputs,
    Advantages,
    broadcast_row_advantages,
)
from megatron_rl.algorithms.aggregation import TokenSum
from megatron_rl.algorithms.estimation import AlgorithmState, initial_state, next_state
from megatron_rl.algorithms.losses import FunctionLoss, TokenLoss
from megatron_rl.algorithms.rewards import RunningMoments
from megatron_rl.errors import UserErrors
from megatron_rl.types import (
    FINISH_FAILED,
    FINISH_LENGTH,
    FINISH_STOP,
    Outcome,
    Scores,
    TrainBatch,
    token_index,
)

quick = settings(max_examples=25, deadline=None)
few = settings(max_examples=6, deadline=None)
NO_PROMPTS = Batch(
    [0] * 3,
    [0.0, math.nan, 0.0],
    [True, False, True],
    [[True], [False] * 4, [True, False, True, True, False]],
    seed=0,
)
"""Without its second row, the third one's first response token follows the first one's last."""


@pytest.mark.parametrize("name", ALGORITHMS)
@few
@given(batches())
@example(NO_PROMPTS)
def test_failed_rows_take_no_part(name, batch):
    """A failed row's reward, finish reason and numbers have no effect on any other row."""
    algorithm = algorithm_of(name)
    rollouts, scores = step(batch)
    kept = [row for row, ok in enumerate(batch.valid) if ok]
    made, _ = build_train_batch(rollouts, scores, algorithm)
    assert made.response_mask.equal(
        rollouts.response_mask & torch.repeat_interleave(scores.valid, rollouts.lengths)
    )
    if name == "gdpo" or not kept:
        return  # its test components carry one row's reward over to another row
    fields = ("rewards", "valid", "baseline_rewards", "baseline_lengths")
    per_row = {f: getattr(scores, f)[kept] for f in fields}
    per_token = {
        f: getattr(scores, f)[token_index(rollouts.lengths, torch.as_tensor(kept))]
        for f in ("old_log_probs", "ref_log_probs", "teacher_log_probs", "squared_probs", "values")
    }
    alone, _ = build_train_batch(
        rollouts.rows(kept), Scores(components={}, **per_row, **per_token), algorithm
    )
    close(made.rows(kept).advantages, alone.advantages, 1e-6)
    close(made.rows(kept).returns, alone.returns, 1e-6)


def test_all_rows_failed():
    batch = Batch([0, 0], [float("nan")] * 2, [False, False], [[True, True], [True]], 1)
    for name in ALGORITHMS:
        algorithm = algorithm_of(name)
        made, metrics = build_train_batch(*step(batch), algorithm)
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
    assert build_train_batch(rollouts, scores, algorithm_of("grpo"))[0].response_mask.tolist() == [
        True,
        False,
        False,
        True,
    ]
    assert build_train_batch(rollouts, scores, algorithm_of("remax"))[0].response_mask.tolist() == [
        True,
        False,
        False,
        False,
    ]


def test_overlong_rows_count_for_the_group_and_not_for_the_loss():
    rollouts, scores = step(Batch([0, 0], [1.0, 0.0], [True, True], [[True] * 2, [True] * 2], 5))
    rollouts = replace(rollouts, finish_reason=torch.tensor([FINISH_STOP, FINISH_LENGTH]))
    made, metrics = build_train_batch(rollouts, scores, algorithm_of("dr_grpo", overlong={"filter": True}))
    assert made.response_mask.tolist() == [True, True, False, False]
    close(made.advantages[:2], [0.5, 0.5])
    assert metrics.values()["response/trained_fraction"] == 0.5


@pytest.mark.parametrize("normalize", ["none", "batch", "running"])
def test_the_greedy_baseline_is_shaped_as_the_rewards_are(normalize):
    """ReMax: a sample that equals the greedy response, in reward and length, has no advantage."""
    masks = [[True] * n for n in (2, 5, 6, 4)]
    rollouts, scores = step(
        Batch([0, 1, 2, 3], [1.0, 0.2, 3.0, float("nan")], [True] * 3 + [False], masks, 5)
    )
    shaping = {"scale": 2.0, "shift": -0.5, "clip_high": 4.0, "normalize": normalize, "smoothing": 0.25}
    changes = {"reward_shaping": shaping, "overlong": {"buffer": 3, "penalty": 0.7}}
    algorithm = get_algorithm("remax", changes, max_response_tokens=6)
    state = AlgorithmState(0.0, RunningMoments(0.5, 0.3, 0.9))
    greedy = replace(
        scores,
        baseline_rewards=torch.tensor([0.5, 0.2, 3.0, 0.0]),
        baseline_lengths=torch.tensor([6, 5, 6, 1]),
    )
    made, _ = build_train_batch(rollouts, greedy, algorithm, state)
    rewards = [min(2 * r - 0.5, 4.0) for r in (1.0, 0.2, 3.0)]
    moments = (1, sum(rewards) / 3, sum(r * r for r in rewards) / 3)
    if normalize == "running":
        moments = tuple(0.99 * old + 0.01 * new for old, new in zip((0.5, 0.3, 0.9), moments, strict=True))
    mean = moments[1] / moments[0]
    deviation = math.sqrt(moments[2] / moments[0] - mean**2)
    if normalize == "none":  # smoothing is towards the running mean, which holds this step's rewards
        mean, deviation = 0.0, 1 - 1e-6

    def shaped(reward: float, length: int) -> float:
        value = 0.75 * (min(2 * reward - 0.5, 4.0) - mean) / (deviation + 1e-6)
        return value - 0.7 * max(length - 3, 0) / 3

    wanted = [shaped(1.0, 2) - shaped(0.5, 6), 0.0, 0.0, 0.0]
    close(made.advantages, [value for value, mask in zip(wanted, masks, strict=True) for _ in mask], 1e-6)


def test_the_overlong_penalty_counts_what_its_limit_counts():
    """Tokens of tools, an observation that found no room, and the limit of the row's own profile."""
    rollouts, scores = step(Batch([0] * 4, [0.0] * 4, [True] * 4, [[False] + [True] * 3] * 4, 7))
    turns = [[False, *turn] for turn in ([True] * 3, [True, False, False, True], [True] * 3, [True] * 3)]
    mask = [marked for turn in turns for marked in turn]
    rollouts = replace(
        rollouts,
        tokens=torch.arange(len(mask)),
        lengths=torch.tensor([len(turn) for turn in turns]),
        response_mask=torch.tensor(mask),
        rollout_log_probs=torch.zeros(len(mask)),
        finish_reason=torch.tensor([FINISH_STOP, FINISH_LENGTH, FINISH_LENGTH, FINISH_LENGTH]),
        max_response_tokens=torch.tensor([4, 4, 4, 3]),
        outcomes=(None, Outcome(), Outcome(dropped_tokens=50), None),
    )
    zeros = torch.zeros(len(mask))
    scores = replace(scores, old_log_probs=zeros, ref_log_probs=zeros, values=zeros)

    algorithm = get_algorithm("reinforce", {"overlong": {"buffer": 2, "penalty": 0.5}}, max_response_tokens=9)
    _, metrics = build_train_batch(rollouts, scores, algorithm)
    assert metrics.values()["reward/shaped_mean"] == pytest.approx((-0.25 - 0.5 - 0.5 - 0.5) / 4)

    # Rows that state no limit have the one of the algorithm, under which none of these is long.
    _, metrics = build_train_batch(
        replace(rollouts, max_response_tokens=None, outcomes=None), scores, algorithm
    )
    assert metrics.values()["reward/shaped_mean"] == 0.0
    with pytest.raises(ValueError, match="limit"):
        without = get_algorithm("reinforce", {"overlong": {"buffer": 2}})
        build_train_batch(replace(rollouts, max_response_tokens=None), scores, without)


@pytest.mark.parametrize("bypass", [False, True])
def test_the_adaptive_coefficient_follows_the_divergence_that_is_penalised(bypass):
    """With bypass penalty and metric are of the engine's log-probs, and so is what steers the coefficient."""
    rollouts, scores = step(Batch([0, 0], [1.0, 0.0], [True, True], [[True, True]] * 2, 3))
    engine, trainer = torch.full((4,), -1.0), torch.full((4,), -3.0)
    rollouts = replace(rollouts, rollout_log_probs=engine)
    scores = replace(scores, old_log_probs=trainer, ref_log_probs=torch.full((4,), -1.5))
    kl = {"name": "reward", "controller": "adaptive", "horizon": 10.0, "target": 0.1, "coef": 0.2}
    algorithm = algorithm_of("grpo", kl=kl, correction={"bypass": bypass})

    _, metrics = build_train_batch(rollouts, scores, algorithm)
    assert metrics.values()["kl/ref"] == pytest.approx(0.5 if bypass else -1.5)
    error = 0.2 if bypass else -0.2
    state = next_state(algorithm, initial_state(algorithm), rollouts, scores)
    assert state.kl_coef == pytest.approx(0.2 * (1 + error * 2 / 10))


@pytest.mark.parametrize(
    ("pieces", "where"),
    [
        ({"kl": "reward"}, "algorithm.kl"),
        ({"overlong": {"buffer": 0.2}}, "algorithm.overlong.buffer"),
        ({"reward_shaping": {"scale": 2.0}}, "algorithm.reward_shaping"),
        ({"reward_shaping": {"clip_high": 1.0}}, "algorithm.reward_shaping"),
        ({"reward_shaping": {"normalize": "batch"}}, "algorithm.reward_shaping"),
        ({"reward_shaping": {"smoothing": 0.1}}, "algorithm.reward_shaping"),
    ],
)
def test_what_gdpo_would_not_see_is_refused(pieces, where):
    with pytest.raises(UserErrors) as raised:
        get_algorithm("gdpo", pieces, max_response_tokens=8)
    assert [error.where for error in raised.value.errors] == [where]
    get_algorithm("gdpo", {"overlong": {"filter": True}, "reward_shaping": {"ema_decay": 0.5}})


def test_a_loss_that_holds_the_whole_ratio_is_not_weighted_again():
    with pytest.raises(UserErrors, match="apply it twice"):
        get_algorithm("topr", {"correction": "token_tis"})
    get_algorithm("topr", {"correction": "geometric"})
    get_algorithm("topr", {"correction": {"name": "token_tis", "bypass": True}})


@quick
@given(batches())
def test_kl_in_the_reward(batch):
    """r_t = score - beta KL_t: sums over the row for outcome advantages, token by token for returns."""
    rollouts, scores = step(batch)
    algorithm = algorithm_of("reinforce_pp", advantage={"whiten": False}, kl={"coef": 0.5})
    made, _ = build_train_batch(rollouts, scores, algorithm)
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
    rloo = build_train_batch(rollouts, scores, algorithm_of("rloo", kl={"name": "reward", "coef": 0.5}))[0]
    for row, mask in enumerate(batch.masks):
        alone = [other for other in batch.members(row)] == [row]
        if alone and any(mask):
            start = sum(len(m) for m in batch.masks[:row])
            first = start + mask.index(True)
            assert float(rloo.advantages[first]) == pytest.approx(wanted[first], abs=1e-5)


def test_the_estimator_of_the_kl_follows_its_use():
    """By default k1 in the reward and k3 in the loss; the adaptive controller follows the same numbers."""
    batch = Batch([0], [1.0], [True], [[True, True]], 5)
    rollouts, scores = step(batch)
    scores = replace(scores, ref_log_probs=scores.old_log_probs - torch.tensor([0.3, -0.1]))
    values = {"k1": 0.2 / 2, "k2": (0.09 + 0.01) / 4, "k3": (math.exp(-0.3) + math.exp(0.1) - 2 + 0.2) / 2}
    controller = {"controller": "adaptive", "horizon": 10.0, "target": 0.05, "coef": 0.2}
    for place, estimator, used in (
        ("reward", {}, "k1"), ("loss", {}, "k3"), ("reward", {"estimator": "mse"}, "k2"),
        ("loss", {"estimator": "k2+"}, "k2"), ("loss", {"estimator": "kl"}, "k1"),
        ("loss", {"estimator": "low_var"}, "k3"),
    ):  # fmt: skip
        algorithm = algorithm_of("grpo", kl={"name": place, **estimator, **controller})
        _, metrics = build_train_batch(rollouts, scores, algorithm)
        assert metrics.values()["kl/ref"] == pytest.approx(values[used], rel=1e-5)
        error = min(max(values[used] / 0.05 - 1, -0.2), 0.2)
        state = next_state(algorithm, initial_state(algorithm), rollouts, scores)
        assert state.kl_coef == pytest.approx(0.2 * (1 + error / 10), rel=1e-5)


def test_missing_inputs_are_named():
    rollouts, scores = step(Batch([0], [1.0], [True], [[True]], 0))
    cases = {
        "grpo": (
            {"old_log_probs": None},
            {"correction": "token_tis"},
            "which algorithm.correction",
        ),
        "ppo": ({"values": None}, {}, "values"),
        "remax": ({"baseline_rewards": None}, {}, "baseline_rewards"),
        "reinforce_pp": ({"ref_log_probs": None}, {}, "ref_log_probs"),
    }
    for name, (changes, settings_, word) in cases.items():
        with pytest.raises(ValueError, match=word):
            build_train_batch(rollouts, replace(scores, **changes), algorithm_of(name, **settings_))


@pytest.mark.parametrize(
    "pieces",
    [*ALGORITHMS, {"correction": {"bypass": True, "level": "token"}}, {"policy_loss": {"opsm_delta": 1e-4}}],
    ids=str,
)
def test_old_log_probs_may_come_with_the_learn_pass(pieces):
    """Of one update from a batch, unless a piece says that it needs them before: the same numbers."""
    name, changes = (pieces, {}) if isinstance(pieces, str) else ("grpo", pieces)
    algorithm = algorithm_of(name, **changes)
    rollouts, scores = step(
        Batch([0, 0, 1, 1], [1, 0, 1, 0], [True, True, True, False], [[False, True]] * 4, 4)
    )
    later = replace(scores, old_log_probs=None)
    state, asked = initial_state(algorithm), algorithm.needs_scoring_pass
    needs = {
        "reinforce_pp": ("kl",),
        "clip_cov": ("policy_loss",),
        "kl_cov": ("policy_loss",),
        "distillation": ("distillation",),
        "otb": ("advantage",),
    }
    assert asked == needs.get(name, ())
    if asked:
        with pytest.raises(ValueError, match=f"algorithm.{asked[0]}"):
            build_train_batch(rollouts, later, algorithm)
        return
    results = []
    for known in (scores, later):
        made, metrics = build_train_batch(rollouts, known, algorithm)
        if known is later:
            metrics += old_policy_metrics(rollouts, scores, algorithm, state)
        (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
        log_probs = scores.old_log_probs[token_index(rollouts.lengths, mini.position)].requires_grad_()
        loss, learned = policy_objective(algorithm, mini, log_probs, torch.ones_like(log_probs), state)
        loss.backward()
        results.append((loss, log_probs.grad, (metrics + learned).values()))
    (loss, gradient, metrics), (loss_later, gradient_later, metrics_later) = results
    assert loss == loss_later and gradient.equal(gradient_later) and metrics == metrics_later


def test_user_functions_as_pieces():
    """A function in place of a name, and module:function, are pieces like any other."""
    rollouts, scores = step(Batch([0, 0], [1.0, 0.0], [True] * 2, [[True]] * 2, 0))
    named = algorithm_of("grpo", advantage="megatron_rl.algorithms.advantages:Rloo")
    close(build_train_batch(rollouts, scores, named)[0].advantages, [1.0, -1.0])
    own = algorithm_of("grpo", advantage=lambda inputs: (inputs.mask * 3.0, inputs.mask * 3.0))
    close(build_train_batch(rollouts, scores, own)[0].advantages, [3.0, 3.0])


@dataclass(frozen=True)
class AboveMedian(Advantage):
    """A user's advantage: rewards above the group's median."""

    scale: float = 1.0

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        medians = [inputs.rewards[inputs.group == group].median() for group in inputs.group]
        return broadcast_row_advantages(
            inputs, self.scale * (inputs.rewards - torch.stack(medians)).clamp(min=0)
        )


def raised(micro: TrainBatch, log_probs: torch.Tensor) -> TokenLoss:
    """A user's policy loss: -A exp(log_prob)."""
    assert micro.advantages is not None
    return TokenLoss(-micro.advantages * log_probs.exp(), {"raised_fraction": micro.advantages > 0})


OWN = Algorithm(
    "own",
    advantage=AboveMedian(),
    policy_loss=FunctionLoss(function=raised),
    aggregation=TokenSum(),
)


def test_an_algorithm_of_the_user_from_rollouts_to_gradient():
    """`algorithm.name: module:object` with functions of the user's own; settings override it too."""
    changes = {"reward_shaping": {"scale": 2.0}, "advantage": {"scale": 2.0}}
    algorithm = get_algorithm("test_algorithms_estimation:OWN", changes)
    batch = Batch([0, 0, 0, 1], [1.0, 0.5, 0.0, 1.0], [True] * 4, [[True] * n for n in (1, 2, 1, 2)], 3)
    made, _ = build_train_batch(*step(batch), algorithm)
    # Twice the scaled lead over the median: rewards 2, 1, 0 have median 1.
    close(made.advantages, [2.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
    log_probs, entropy = policy(batch)
    loss, metrics = policy_objective(algorithm, mini, log_probs, entropy)
    loss.backward()
    probability = float(log_probs.detach()[0].exp())
    close(loss, -2 * probability)
    close(log_probs.grad, [-2 * probability, 0, 0, 0, 0, 0])
    assert metrics.values()["policy/raised_fraction"] == pytest.approx(1 / 6)


def test_adaptive_kl_state():
    """The controller follows the mean over responses of the mean KL over tokens, and reaches the loss."""
    batch = Batch([0, 0], [1.0, 0.0], [True, True], [[False, True, True], [True, False]], 5)
    rollouts, scores = step(batch)
    controller = {"controller": "adaptive", "horizon": 10.0, "target": 0.05, "coef_max": 0.3}
    algorithm = algorithm_of("grpo", kl={"name": "loss", "coef": 0.2, "estimator": "k1", **controller})
    scores = replace(scores, ref_log_probs=scores.old_log_probs - torch.tensor([9.0, 0.1, 0.3, 0.6, 9.0]))
    state = next_state(algorithm, initial_state(algorithm), rollouts, scores)
    assert state.kl_coef == pytest.approx(0.2 * (1 + 0.2 * 2 / 10))
    for _ in range(50):
        state = next_state(algorithm, state, rollouts, scores)
    assert state.kl_coef == 0.3
    assert AlgorithmState.from_state_dict(state.state_dict()) == state
    made, metrics = build_train_batch(rollouts, scores, algorithm, state)
    assert metrics.values()["kl/coef"] == 0.3
    (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
    log_probs, entropy = policy(batch)
    low, _ = policy_objective(algorithm, mini, log_probs, entropy)
    high, found = policy_objective(algorithm, mini, log_probs, entropy, state)
    close(high - low, 0.1 * found.values()["policy/kl_loss"], 1e-6)


def test_running_reward_moments_reach_the_advantages():
    batch = Batch([0, 1], [4.0, 2.0], [True, True], [[True], [True]], 5)
    rollouts, scores = step(batch)
    algorithm = algorithm_of("dr_grpo", reward_shaping={"normalize": "running", "ema_decay": 0.5})
    made, _ = build_train_batch(rollouts, scores, algorithm)
    close(made.advantages, [1.0, -1.0], 1e-5)  # a first step is normalised by itself
    state = next_state(algorithm, initial_state(algorithm), rollouts, scores)
    made, _ = build_train_batch(rollouts, replace(scores, rewards=torch.tensor([3.0, 3.0])), algorithm, state)
    # Means 3 and 3, squares 10 and 9 with weights 1/4 and 1/2: variance (10 + 2 * 9) / 3 - 9 = 1/3.
    close(made.advantages, [0.0, 0.0], 1e-5)


@quick
@given(batches(), st.integers(1, 5), st.integers(1, 3), st.integers(0, 5))
def test_minibatches_deal_every_row_once_per_epoch(batch, steps, epochs, seed):
    algorithm = algorithm_of("grpo")
    rollouts, scores = step(batch)
    made, _ = build_train_batch(rollouts, scores, algorithm)
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
        algorithm = algorithm_of(
            "grpo",
            correction={"rejection": {"token_k1": 2.0}},
            aggregation={"denominator": denominator},
        )
        made, metrics = build_train_batch(rollouts, scores, algorithm)
        assert made.response_mask.tolist() == [True, False, True, True, True, True]
        assert metrics.values()["mismatch/rejected_fraction"] == pytest.approx(1 / 6)
        (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
        assert mini.loss_weights[0] == pytest.approx(weight)


def test_a_teacher_adds_its_term_to_the_advantages_of_valid_tokens():
    """Beside GRPO and alone: the reverse KL of the sampled token, by a loop in float64."""
    batch = Batch(
        [0, 0, 0], [1.0, 0.0, math.nan], [True, True, False], [[True, False, True], [True], [True] * 2], 3
    )
    rollouts, scores = step(batch)
    teacher = scores.teacher_log_probs.double().tolist()
    old = scores.old_log_probs.double().tolist()
    plain, _ = build_train_batch(rollouts, scores, algorithm_of("grpo"))
    for clip in (None, 0.1):
        term = {"name": "reverse_kl", "coef": 0.7, "clip": clip}
        made, metrics = build_train_batch(rollouts, scores, algorithm_of("grpo", distillation=term))
        alone, _ = build_train_batch(rollouts, scores, algorithm_of("distillation", distillation=term))
        token, kls = 0, []
        for row, mask in enumerate(batch.masks):
            for is_response in mask:
                expected = 0.0
                if is_response and batch.valid[row]:
                    expected = 0.7 * (teacher[token] - old[token])
                    if clip is not None:
                        expected = max(-clip, min(clip, expected))
                    kls.append(old[token] - teacher[token])
                close(alone.advantages[token], expected, 1e-6)
                close(made.advantages[token], float(plain.advantages[token]) + expected, 1e-6)
                token += 1
        assert metrics.values()["kl/teacher"] == pytest.approx(sum(kls) / len(kls))
