"""Returns, GAE, VAPO's lambda and whitening, against loops written from the equations."""

from __future__ import annotations

from statistics import mean, variance

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import batches, close, flat

from megatron_rl.algorithms.advantages import (
    AdvantageInputs,
    Remax,
    discounted_returns,
    gae,
    length_adaptive_lambda,
    whiten,
)
from megatron_rl.algorithms.ragged import (
    discounted_sums,
    last_token_in_mask,
    masked_row_means,
    row_maxima,
    row_sums,
)

quick = settings(max_examples=30, deadline=None)
factors = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def gae_reference(rewards, values, masks, gamma, lams):
    """Walk each row backwards; tokens outside the mask carry value and advantage on unchanged."""
    advantages, returns = [], []
    for r, v, mask, lam in zip(rewards, values, masks, lams, strict=True):
        row_a, row_g = [0.0] * len(mask), [0.0] * len(mask)
        next_value = next_advantage = 0.0
        for t in reversed(range(len(mask))):
            if mask[t]:
                delta = r[t] + gamma * next_value - v[t]
                next_advantage = delta + gamma * lam * next_advantage
                next_value = v[t]
                row_a[t], row_g[t] = next_advantage, next_advantage + v[t]
        advantages.append(row_a)
        returns.append(row_g)
    return flat(advantages), flat(returns)


@quick
@given(batches())
def test_row_reductions(batch):
    values, lengths, mask = batch.noise("v"), batch.lengths, batch.mask
    kept = [[x for x, m in zip(v, ms, strict=True) if m] for v, ms in zip(values, batch.masks, strict=True)]
    close(row_sums(flat(values), lengths), [sum(v) for v in values])
    close(row_maxima(flat(values), lengths), [max(v, default=0.0) for v in values])
    close(masked_row_means(flat(values), mask, lengths), [mean(k) if k else 0.0 for k in kept])
    start, last = 0, []
    for ms in batch.masks:
        last.append(max((start + t for t, m in enumerate(ms) if m), default=-1))
        start += len(ms)
    assert last_token_in_mask(mask, lengths).tolist() == last


@quick
@given(batches(), factors)
def test_discounted_sums(batch, discount):
    values = batch.noise("v")
    wanted = [
        [sum(discount ** (s - t) * v[s] for s in range(t, len(v))) for t in range(len(v))] for v in values
    ]
    close(discounted_sums(flat(values), batch.lengths, discount), flat(wanted))


def test_discounted_sums_of_a_long_row():
    """Three thousand tokens at once: as exact as the loop, at any discount."""
    torch.manual_seed(0)
    values, lengths = torch.randn(3007, dtype=torch.float64), torch.tensor([3000, 7])
    got = discounted_sums(values, lengths, torch.tensor([0.999, 1.0], dtype=torch.float64))
    wanted = values.clone()
    for t in reversed(range(2999)):
        wanted[t] += 0.999 * wanted[t + 1]
    for t in reversed(range(3000, 3006)):
        wanted[t] += wanted[t + 1]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


@quick
@given(batches(), factors)
def test_discounted_returns_skip_other_tokens(batch, gamma):
    rewards, masks = batch.noise("r"), batch.masks
    got = discounted_returns(flat(rewards), batch.mask, batch.lengths, gamma=gamma)
    zeros = [[0.0] * len(mask) for mask in masks]
    _, wanted = gae_reference(rewards, zeros, masks, gamma, [1.0] * len(masks))
    close(got, wanted)


@quick
@given(batches(), factors)
def test_remax(batch, gamma):
    rewards, baseline = batch.noise("r"), torch.arange(len(batch.masks)) / 7
    _, group, valid = batch.tensors
    inputs = AdvantageInputs(
        rewards=baseline,
        token_rewards=flat(rewards),
        mask=batch.mask,
        lengths=batch.lengths,
        group=group,
        valid=valid,
        values=None,
        baseline_rewards=baseline,
        components={},
    )
    got = Remax(gamma=gamma).estimate(inputs)
    returns = discounted_returns(flat(rewards), batch.mask, batch.lengths, gamma=gamma)
    shift = torch.repeat_interleave(baseline.double(), batch.lengths)
    close(got.returns, returns)
    close(got.advantages, (returns - shift) * batch.mask, 1e-6)


@quick
@given(batches(), factors, factors)
def test_gae(batch, gamma, lam):
    rewards, values, masks = batch.noise("r"), batch.noise("v"), batch.masks
    got = gae(flat(rewards), flat(values), batch.mask, batch.lengths, gamma=gamma, lam=lam)
    wanted = gae_reference(rewards, values, masks, gamma, [lam] * len(masks))
    close(got.advantages, wanted[0])
    close(got.returns, wanted[1])


@quick
@given(batches())
def test_gae_with_a_lambda_per_row(batch):
    rewards, values, masks = batch.noise("r"), batch.noise("v"), batch.masks
    lams = [row / 8 for row in range(len(masks))]
    got = gae(
        flat(rewards), flat(values), batch.mask, batch.lengths, gamma=1.0, lam=torch.tensor(lams).double()
    )
    close(got.advantages, gae_reference(rewards, values, masks, 1.0, lams)[0])


def test_gae_limits():
    """lambda = 1 is return minus value, lambda = 0 is one-step temporal difference."""
    r, v = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.2, 0.5, 0.9])
    mask, lengths = torch.ones(3) > 0, torch.tensor([3])
    close(gae(r, v, mask, lengths, gamma=1.0, lam=1.0).advantages, 1 - v.double(), 1e-6)
    close(gae(r, v, mask, lengths, gamma=1.0, lam=0.0).advantages, [0.3, 0.4, 0.1], 1e-6)


def test_published_numbers_of_vapo():
    """arXiv:2504.05118: with alpha = 0.05 the weights' sum 1 / (1 - lambda) is 0.05 times the length."""
    lengths = torch.tensor([0, 1, 19, 20, 100, 1000, 10_000])
    lam = length_adaptive_lambda(lengths, alpha=0.05)
    close(lam, [0.0, 0.0, 0.0, 0.0, 0.8, 0.98, 0.998])
    close(1 / (1 - lam[3:]), 0.05 * lengths[3:].double())


@quick
@given(batches())
def test_whitening(batch):
    values, mask = flat(batch.noise("v")), batch.mask
    kept = values[mask].tolist()
    got = whiten(values, mask)
    if len(kept) < 2:
        close(got, values * mask)
        return
    shift, scale = mean(kept), (variance(kept) + 1e-8) ** -0.5
    close(got, (values - shift) * scale * mask)


def test_whitening_equal_values_gives_zero():
    close(whiten(torch.full((4,), 0.3), torch.ones(4) > 0), torch.zeros(4), 1e-3)
    assert whiten(torch.zeros(0), torch.zeros(0) > 0).shape == (0,)


@pytest.mark.parametrize("function", [row_sums, row_maxima])
def test_no_rows_at_all(function):
    assert function(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)
    assert discounted_sums(torch.zeros(0), torch.zeros(0, dtype=torch.long), 0.5).shape == (0,)


def test_row_sums_have_exact_gradients():
    values = torch.randn(6, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([2, 0, 4])
    assert torch.autograd.gradcheck(lambda v: row_sums(v, lengths), (values,))
    mask = torch.tensor([True, False, True, True, False, True])
    assert torch.autograd.gradcheck(lambda v: masked_row_means(v, mask, lengths), (values,))
