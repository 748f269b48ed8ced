"""Bradley-Terry and DPO losses against the equations, and their objectives under any split into pairs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import close

from megatron_rl.algorithms import (
    PreferenceSettings,
    dpo_objective,
    get_algorithm,
    reward_model_objective,
    with_loss_weights,
)
from megatron_rl.algorithms.lookup import load_preference_loss
from megatron_rl.algorithms.preference import bradley_terry_loss, dpo_loss, simpo_loss
from megatron_rl.errors import UserError
from megatron_rl.types import TrainBatch

quick = settings(max_examples=40, deadline=None)
number = st.floats(-5, 5).map(lambda x: round(x, 6))
KINDS = ("sigmoid", "robust", "hinge", "ipo", "simpo")


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def dpo_reference(kind, h, beta, e):
    return {
        "sigmoid": -(1 - e) * log_sigmoid(beta * h) - e * log_sigmoid(-beta * h),
        "robust": (-(1 - e) * log_sigmoid(beta * h) + e * log_sigmoid(-beta * h)) / (1 - 2 * e),
        "hinge": max(0.0, 1 - beta * h),
        "ipo": (h - 1 / (2 * beta)) ** 2,
    }[kind]


@pytest.mark.parametrize("kind", KINDS[:4])
@quick
@given(number, number, number, number)
def test_dpo(kind, a, b, c, d):
    x = [torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in (a, b, c, d)]
    got = dpo_loss(*x, beta=0.3, kind=kind, label_smoothing=0.1)
    close(got, [dpo_reference(kind, (a - c) - (b - d), 0.3, 0.1)])
    slopes = torch.autograd.grad(got.sum(), x)
    close(slopes[0] + slopes[1], [0.0])
    close(slopes[0] + slopes[2], [0.0])


@pytest.mark.parametrize("kind", KINDS[:4])
def test_dpo_gradient(kind):
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dpo_loss(*x, beta=0.3, kind=kind, label_smoothing=0.1), (x,))


@quick
@given(number, number)
def test_bradley_terry_and_simpo(a, b):
    x, y = torch.tensor([a]).double(), torch.tensor([b]).double()
    close(bradley_terry_loss(x, y, 0.2), [-log_sigmoid(x.item() - y.item() - 0.2)])
    close(simpo_loss(x, y, beta=2.0, margin=0.5), [-log_sigmoid(2 * (x.item() - y.item()) - 0.5)])


def test_large_differences_stay_finite():
    a, b = torch.tensor([1e4, -1e4]), torch.zeros(2)
    assert bradley_terry_loss(a, b).tolist() == [0.0, 1e4]
    assert dpo_loss(a, b, b, b, beta=1.0).isfinite().all()


def test_errors():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="unknown DPO loss 'kto'"):
        dpo_loss(one, one, one, one, kind="kto")
    with pytest.raises(ValueError, match=r"below 0\.5"):
        dpo_loss(one, one, one, one, kind="robust", label_smoothing=0.5)
    with pytest.raises(ValueError, match="come in pairs, got 1 rows"):
        reward_model_objective(pairs([2]), torch.zeros(2))
    with pytest.raises(ValueError, match="no response token"):
        reward_model_objective(pairs([2, 1]), torch.zeros(3))


def pairs(lengths: list[int]) -> TrainBatch:
    """Return rows whose first token is the prompt; a row of one token has no response."""
    mask = [t > 0 for length in lengths for t in range(length)]
    batch = TrainBatch(
        tokens=torch.arange(len(mask)),
        lengths=torch.tensor(lengths),
        response_mask=torch.tensor(mask),
        loss_weights=torch.zeros(len(mask)),
        temperature=torch.ones(len(lengths)),
        ref_log_probs=-torch.linspace(0.1, 2.0, len(mask)),
    )
    return with_loss_weights(batch, get_algorithm("grpo", {"aggregation": "seq-mean-token-sum"}))


@pytest.mark.parametrize("kind", [*KINDS, "reward_model"])
def test_objective_is_the_mean_over_pairs_under_any_split(kind):
    torch.manual_seed(0)
    batch = pairs([4, 3, 2, 5, 6, 2])
    values = -torch.rand(22, dtype=torch.float64)
    options = PreferenceSettings(
        kind, beta=0.4, label_smoothing=0.1 if kind == "robust" else 0.0, sft_coef=0.3
    )

    def objective(micro, x):
        if kind == "reward_model":
            return reward_model_objective(micro, x, margin=0.1)
        return dpo_objective(options, micro, x)

    x = values.clone().requires_grad_()
    loss, metrics = objective(batch, x)
    loss.backward()
    rows = list(
        zip(
            values.split([4, 3, 2, 5, 6, 2]),
            batch.ref_log_probs.double().split([4, 3, 2, 5, 6, 2]),
            strict=True,
        )
    )
    wanted, wins = 0.0, 0
    for (a, ra), (b, rb) in zip(rows[0::2], rows[1::2], strict=True):
        if kind == "reward_model":
            one, two = a[-1].item(), b[-1].item()
            wanted += -log_sigmoid(one - two - 0.1) / 3
        else:
            mean = a[1:].mean().item()
            if kind == "simpo":
                one, two = mean, b[1:].mean().item()
                pair = -log_sigmoid(0.4 * (one - two) - 0.5)
            else:
                add = torch.mean if kind == "ipo" else torch.sum  # as TRL's DPOTrainer does
                one, two = add(a[1:] - ra[1:]).item(), add(b[1:] - rb[1:]).item()
                pair = dpo_reference(kind, one - two, 0.4, options.label_smoothing)
            wanted += (pair - 0.3 * mean) / 3
        wins += one > two
    close(loss, wanted, 1e-6)
    name = "reward_model" if kind == "reward_model" else "dpo"
    assert metrics.values()[f"{name}/loss"] == pytest.approx(wanted, rel=1e-5)
    assert metrics.values()[f"{name}/accuracy"] == pytest.approx(wins / 3)
    total, gradient = 0.0, torch.zeros(22, dtype=torch.float64)
    for part in (batch.rows([2, 3]), batch.rows([4, 5, 0, 1])):
        y = values[part.tokens].clone().requires_grad_()
        piece, _ = objective(part, y)
        piece.backward()
        total += float(piece.detach())
        gradient[part.tokens] += y.grad
    close(loss, total, 1e-6)
    close(gradient, x.grad, 1e-6)


OWN = """
import torch

def orpo(pairs):
    # Odds ratio of the mean log-probs (arXiv 2403.07691), without the reference.
    chosen = pairs.chosen / pairs.chosen_tokens
    rejected = pairs.rejected / pairs.rejected_tokens
    odds = (chosen - torch.log(-torch.expm1(chosen))) - (rejected - torch.log(-torch.expm1(rejected)))
    return -pairs.beta * torch.nn.functional.logsigmoid(odds)

def dpo(pairs):
    chosen, rejected = pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected
    return -torch.nn.functional.logsigmoid(pairs.beta * (chosen - rejected))

def mean(pairs):
    return (pairs.chosen - pairs.rejected).mean()

def two(pairs, other):
    return pairs.chosen

value = 3
"""


def test_a_users_own_loss_by_path(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    batch = pairs([4, 3, 2, 5, 6, 2])
    values = -torch.rand(22, dtype=torch.float64)

    def result(kind, name=None):
        function = None if name is None else load_preference_loss(f"{file}:{name}", "preference.loss")
        x = values.clone().requires_grad_()
        loss, metrics = dpo_objective(PreferenceSettings(kind, beta=0.4, function=function), batch, x)
        return loss.detach(), torch.autograd.grad(loss, x)[0], metrics.values()

    for own, named in zip(result("own", "dpo"), result("sigmoid"), strict=True):
        assert own == pytest.approx(named) if isinstance(own, dict) else bool((own == named).all())

    wanted = 0.0
    rows = values.split([4, 3, 2, 5, 6, 2])
    for a, b in zip(rows[0::2], rows[1::2], strict=True):
        one, two = (float(row[1:].mean()) for row in (a, b))
        odds = one - math.log(1 - math.exp(one)) - two + math.log(1 - math.exp(two))
        wanted -= 0.4 * log_sigmoid(odds) / 3
    close(result("own", "orpo")[0], wanted, 1e-6)

    with pytest.raises(UserError, match="wrong type or shape"):
        result("own", "mean")
    for name, message in (("two", "does not accept"), ("value", "is not a function"), ("none", "none")):
        with pytest.raises(UserError, match=message) as raised:
            load_preference_loss(f"{file}:{name}", "preference.loss")
        assert raised.value.where is not None and "preference.loss" in str(raised.value)
    assert load_preference_loss("sigmoid", "preference.loss") is None


@pytest.mark.parametrize("kind", [*KINDS, "reward_model"])
def test_a_micro_batch_without_pairs_keeps_the_graph(kind):
    """Ranks with fewer pairs than others run their backward passes too."""
    x = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    empty = pairs([4, 3]).rows([])
    loss = (
        reward_model_objective(empty, x)[0]
        if kind == "reward_model"
        else (dpo_objective(PreferenceSettings(kind, sft_coef=0.1), empty, x)[0])
    )
    loss.backward()
    assert float(loss.detach()) == 0 and x.grad.shape == (0,)
