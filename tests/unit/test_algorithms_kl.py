"""KL estimators and controllers, against the equations and against exact expectations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import close

from megatron_rl.algorithms.kl import KL_ESTIMATORS, adapt_kl_coef, kl_estimate
from megatron_rl.errors import UserError

quick = settings(max_examples=50, deadline=None)
log_prob = st.floats(-12, 0)

VALUES = {
    "k1": lambda x: x,
    "abs": abs,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: min(math.exp(-x) - 1 + x, 10.0),
}
SYNONYMS = {"kl": "k1", "mse": "k2", "low_var": "k3", "low_var_kl": "k3"}
SLOPES = {
    "k1": lambda x: 1.0,
    "abs": lambda x: math.copysign(1.0, x) if x else 0.0,
    "k2": lambda x: x,
    "k3": lambda x: 1 - math.exp(-x) if math.exp(-x) - 1 + x < 10 else 0.0,
}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@quick
@given(log_prob, log_prob)
def test_value_and_gradient(name, new, ref):
    x = torch.tensor([new], dtype=torch.float64, requires_grad=True)
    found = kl_estimate(x, torch.tensor([ref], dtype=torch.float64), name)
    plain = SYNONYMS.get(name.removesuffix("+"), name.removesuffix("+"))
    close(found, [VALUES[plain](new - ref)], 1e-9)
    found.sum().backward()
    slope = SLOPES["k2" if name.endswith("+") else plain](new - ref)
    close(x.grad, [slope], 1e-9)


def test_k3_is_never_negative_in_float32():
    x = torch.linspace(-1e-3, 1e-3, 2001)
    assert (kl_estimate(x, torch.zeros_like(x), "k3") >= 0).all()


def test_unknown_estimator():
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize(
    ("name", "bias", "spread"), [("k1", 0.0, 20.0), ("k2", 0.002, 1.42), ("k3", 0.0, 1.42)]
)
def test_published_table_of_schulman(name, bias, spread):
    """The blog's first table: q = N(0, 1), p = N(0.1, 1), true KL 0.005; integrated, not sampled."""
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    weight = torch.exp(-0.5 * x**2)
    weight = weight / weight.sum()
    found = kl_estimate(-0.5 * x**2, -0.5 * (x - 0.1) ** 2, name)
    mean = (weight * found).sum()
    std = (weight * (found - mean) ** 2).sum().sqrt()
    assert float(mean / 0.005 - 1) == pytest.approx(bias, abs=1e-3)
    assert float(std / 0.005) == pytest.approx(spread, abs=5e-3)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_expectation_over_a_small_vocabulary(name):
    """k1 and k3 have the exact KL as expectation, and straight-through gradients are the exact gradient's."""
    torch.manual_seed(0)
    # Close enough that no ratio reaches k3's clamp.
    logits, other = 0.5 * torch.randn(2, 5, dtype=torch.float64)
    logits = logits.clone().requires_grad_()
    new, ref = logits.log_softmax(0), other.log_softmax(0)
    exact = (new.exp() * (new - ref)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    found = kl_estimate(new, ref, name)
    plain = SYNONYMS.get(name.removesuffix("+"), name.removesuffix("+"))
    if plain in ("k1", "k3"):
        close((new.exp() * found).sum(), exact.detach())
    (gradient,) = torch.autograd.grad((new.exp().detach() * found).sum(), logits)
    if name.endswith("+") or plain == "k2":
        close(gradient, wanted)
    elif plain == "k1":
        close(gradient, torch.zeros(5))


def test_adaptive_coefficient():
    """Doubling KL raises the coefficient by at most a fifth of rows over horizon; the ceiling holds."""
    assert adapt_kl_coef(0.2, 0.11, 100, target=0.1, horizon=1000) == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    assert adapt_kl_coef(0.2, 9.0, 100, target=0.1, horizon=1000) == pytest.approx(0.2 * 1.02)
    assert adapt_kl_coef(0.2, 0.0, 100, target=0.1, horizon=1000) == pytest.approx(0.2 * 0.98)
    assert adapt_kl_coef(0.2, 9.0, 100, target=0.1, horizon=1000, ceiling=0.201) == 0.201
    assert adapt_kl_coef(0.5, 0.1, 100, target=0.1, horizon=1000, ceiling=0.3) == 0.3
    with pytest.raises(UserError, match="horizon"):
        adapt_kl_coef(0.5, 0.0, 5000, target=0.1, horizon=1000)


@quick
@given(
    st.floats(1e-4, 1.0),
    st.lists(st.floats(0, 5), min_size=1, max_size=60),
    st.integers(1, 400),
    st.floats(1.0, 3.0),
)
def test_the_ceiling_holds_whatever_the_kl_does(coef, divergences, rows, room):
    """The coefficient stays positive and below its ceiling, and comes down again from it."""
    found, free = [coef], coef
    for kl in divergences:
        found.append(adapt_kl_coef(found[-1], kl, rows, target=0.1, horizon=2001.0, ceiling=coef * room))
        error = max(-0.2, min(0.2, kl / 0.1 - 1))
        assert found[-1] == pytest.approx(min(found[-2] * (1 + error * rows / 2001), coef * room), rel=1e-12)
        free = adapt_kl_coef(free, kl, rows, target=0.1, horizon=2001.0)
        assert 0 < found[-1] <= coef * room and found[-1] <= free * (1 + 1e-9)
    assert (
        adapt_kl_coef(coef * room, 0.0, rows, target=0.1, horizon=2001.0, ceiling=coef * room) < coef * room
    )
