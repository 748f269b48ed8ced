"""Policy losses: values and gradients against the papers' equations, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from piece_inputs import micro_batch
from ragged_batches import Batch, batches, close, flat

from megatron_rl.algorithms.losses import (
    Cispo,
    ClipCov,
    Dppo,
    Gmpo,
    Gspo,
    KlCov,
    PolicyGradient,
    PpoClip,
    Sapo,
    Topr,
    Vespo,
    off_policy_sequence_mask,
    top_entropy_tokens,
)

quick = settings(max_examples=25, deadline=None)
LOW, HIGH, DUAL = 0.2, 0.28, 1.5


@dataclass
class Case:
    """Inputs of a policy loss, as tensors [N] and as lists by row."""

    batch: Batch
    new_rows: list[list[float]]
    old_rows: list[list[float]]
    advantage_rows: list[list[float]]

    def __post_init__(self) -> None:
        self.new = flat(self.new_rows, requires_grad=True)
        self.old, self.advantages = flat(self.old_rows), flat(self.advantage_rows)
        self.mask, self.lengths = self.batch.mask, self.batch.lengths

    def micro(self, selected=None):
        """Return the case as a micro-batch."""
        rows = {"mask": self.mask, "lengths": self.lengths}
        old = {"old_log_probs": self.old, "rollout_log_probs": self.old}
        return micro_batch(self.advantages, **old, selected=selected, **rows)

    def rows(self):
        """Yield (new, old, advantage, mask) of every row."""
        yield from zip(self.new_rows, self.old_rows, self.advantage_rows, self.batch.masks, strict=True)


def case(batch: Batch) -> Case:
    old = batch.noise("old", -3.0, -0.1)
    drift = batch.noise("drift", -0.6, 0.6)
    new = [[min(o + d, -0.01) for o, d in zip(*pair, strict=True)] for pair in zip(old, drift, strict=True)]
    return Case(batch, new, old, batch.noise("advantage", -2.0, 2.0))


def by_token(function, given_case: Case) -> torch.Tensor:
    """Apply ``function(new, old, advantage)`` to every token."""
    return flat([
        [function(n, o, a) for n, o, a in zip(new, old, advantage, strict=True)]
        for new, old, advantage, _ in given_case.rows()
    ])  # fmt: skip


def check(found, loss: torch.Tensor, gradient: torch.Tensor, given_case: Case) -> None:
    """Compare loss and d(sum of loss)/d(log_probs) on the mask, as sums with the mask as weights."""
    close(found.loss[given_case.mask], loss[given_case.mask])
    (found.loss * given_case.mask).sum().backward()
    close(given_case.new.grad, gradient * given_case.mask)


@quick
@given(batches())
def test_policy_gradient(batch):
    it = case(batch)
    check(
        PolicyGradient().token_loss(it.micro(), it.new),
        by_token(lambda n, o, a: -a * n, it),
        -it.advantages,
        it,
    )


def ppo(n, o, a):
    ratio = math.exp(n - o)
    bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
    loss = max(-a * ratio, -a * bounded)
    return min(loss, -a * DUAL) if a < 0 else loss


def ppo_gradient(n, o, a):
    """-A r, and nothing where the clip or the dual clip is what counts."""
    ratio = math.exp(n - o)
    if (a > 0 and ratio > 1 + HIGH) or (a < 0 and (ratio < 1 - LOW or ratio > DUAL)):
        return 0.0
    return -a * ratio


@quick
@given(batches())
def test_ppo_clip(batch):
    it = case(batch)
    found = PpoClip(clip_low=LOW, clip_high=HIGH, dual_clip=DUAL).token_loss(it.micro(), it.new)
    check(found, by_token(ppo, it), by_token(ppo_gradient, it), it)
    stopped = by_token(lambda *x: float(ppo_gradient(*x) == 0), it) > 0
    assert (found.indicators["clip_fraction"] | found.indicators["dual_clip_fraction"])[it.mask].equal(
        stopped[it.mask]
    )


def test_ppo_clip_table():
    """Every branch by hand: (ratio, A) -> loss, slope with respect to log r."""
    table = [
        (1.0, 1.0, -1.0, -1.0), (1.1, 1.0, -1.1, -1.1), (1.3, 1.0, -1.28, 0.0), (0.5, 1.0, -0.5, -0.5),
        (1.0, -1.0, 1.0, 1.0), (0.7, -1.0, 0.8, 0.0), (1.4, -1.0, 1.4, 1.4), (2.0, -1.0, 1.5, 0.0),
        (5.0, 0.0, 0.0, 0.0),
    ]  # fmt: skip
    ratio, advantages, loss, slope = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*table, strict=True)
    )
    new = ratio.log().requires_grad_()
    micro = micro_batch(advantages, old_log_probs=torch.zeros_like(new))
    found = PpoClip(clip_low=LOW, clip_high=HIGH, dual_clip=DUAL).token_loss(micro, new)
    close(found.loss, loss)
    found.loss.sum().backward()
    close(new.grad, slope)


def test_dual_clip_must_exceed_one():
    (error,) = PpoClip(dual_clip=1.0).problems("algorithm.policy_loss")
    assert (error.where, error.expected) == ("algorithm.policy_loss.dual_clip", "more than 1")


@quick
@given(batches())
def test_cispo(batch):
    it = case(batch)
    found = Cispo(clip_low=0.3, clip_high=0.1).token_loss(it.micro(), it.new)
    weight = by_token(lambda n, o, a: min(max(math.exp(n - o), 0.7), 1.1), it)
    check(found, -weight * it.advantages * it.new.detach(), -weight * it.advantages, it)


@quick
@given(batches())
def test_sapo(batch):
    it = case(batch)

    def gate(n, o, a):
        tau = 1.0 if a > 0 else 1.05
        return tau, 1 / (1 + math.exp(-tau * (math.exp(n - o) - 1)))

    def loss(n, o, a):
        tau, p = gate(n, o, a)
        return -a * p * 4 / tau

    def gradient(n, o, a):
        _, p = gate(n, o, a)
        return -a * 4 * p * (1 - p) * math.exp(n - o)

    found = Sapo().token_loss(it.micro(), it.new)
    check(found, by_token(loss, it), by_token(gradient, it), it)


@pytest.mark.parametrize(
    ("divergence", "low", "high"),
    [("tv", 0.1, 0.05), ("kl", 0.02, 0.01), ("tv", None, None), ("kl", None, None)],
)
@quick
@given(batches())
def test_dppo(divergence, low, high, batch):
    it = case(batch)
    loss = Dppo(divergence=divergence, clip_low=low, clip_high=high, ratio_cap=1.2)
    if low is None:  # the paper's
        low = high = 0.2 if divergence == "tv" else 0.05

    def weight(n, o, a):
        p, q = math.exp(n), math.exp(o)
        distance = (
            abs(p - q) if divergence == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        )
        outside = (a > 0 and p > q and distance > high) or (a <= 0 and p < q and distance > low)
        return 0.0 if outside else min(p / q, 1.2)

    found = loss.token_loss(it.micro(), it.new)
    weights = by_token(weight, it)
    check(found, -weights * it.advantages * it.new.detach(), -weights * it.advantages, it)


def test_dppo_stays_finite_at_certainty():
    new = torch.tensor([0.0, -1e-9, -30.0], requires_grad=True)
    micro = micro_batch([1.0, 1.0, -1.0], old_log_probs=[0.0, -1.0, 0.0])
    found = Dppo(divergence="kl").token_loss(micro, new)
    assert found.loss.isfinite().all()


def sequence_ratio(new, old, mask):
    kept = [n - o for n, o, m in zip(new, old, mask, strict=True) if m]
    return math.exp(sum(kept) / len(kept)) if kept else 1.0


@quick
@given(batches())
def test_gspo_is_the_sequence_objective(batch):
    """With seq-mean-token-mean, value and gradient equal sum_i max(-A_i s_i, -A_i clip(s_i))."""
    it = case(batch)
    it.advantage_rows = [[row[0] if row else 0.0] * len(row) for row in it.advantage_rows]
    it.advantages = flat(it.advantage_rows)
    low, high = 0.05, 0.07
    found = Gspo(clip_low=low, clip_high=high).token_loss(it.micro(), it.new)
    total, gradient = 0.0, []
    for new, old, advantage, mask in it.rows():
        s, count = sequence_ratio(new, old, mask), sum(mask)
        a = advantage[0] if advantage else 0.0
        outside = (a > 0 and s > 1 + high) or (a < 0 and s < 1 - low)
        total += max(-a * s, -a * min(max(s, 1 - low), 1 + high)) if count else 0.0
        gradient.append([0.0 if outside or not m else -a * s / count for m in mask])
    counts = torch.repeat_interleave(torch.tensor([max(sum(m), 1) for m in it.batch.masks]), it.lengths)
    loss = (found.loss * it.mask / counts).sum()
    close(loss, total)
    loss.backward()
    close(it.new.grad, flat(gradient))


@quick
@given(batches())
def test_gmpo(batch):
    it = case(batch)
    limit = 0.3

    def row_loss(new, old, advantage, mask):
        kept = [(n, o, a) for n, o, a, m in zip(new, old, advantage, mask, strict=True) if m]
        if not kept:
            return 0.0
        bounded = []
        for n, o, a in kept:
            sign = (a > 0) - (a < 0)
            bounded.append(sign * min(sign * (n - o), sign * min(max(n - o, -limit), limit)))
        ratio = math.exp(sum(bounded) / len(kept))
        mean = sum(a for *_, a in kept) / len(kept)
        return -mean * ratio

    wanted, gradient = [], []
    for new, old, advantage, mask in it.rows():
        loss = row_loss(new, old, advantage, mask)
        wanted.append([loss] * len(mask))

        def free(n, o, a):
            return not ((a > 0 and n - o > limit) or (a < 0 and n - o < -limit))

        # The row's loss stands on each of its n tokens, each with 1/n of the geometric mean's derivative.
        gradient.append(
            [loss * m * free(n, o, a) for n, o, a, m in zip(new, old, advantage, mask, strict=True)]
        )
    found = Gmpo(clip_low=limit, clip_high=limit).token_loss(it.micro(), it.new)
    check(found, flat(wanted), flat(gradient), it)


@quick
@given(batches())
def test_topr(batch):
    it = case(batch)
    found = Topr().token_loss(it.micro(), it.new)
    weights = []
    for new, old, advantage, mask in it.rows():
        ratio = math.exp(sum(n - o for n, o, m in zip(new, old, mask, strict=True) if m))
        weights.append([1.0 if a > 0 else min(ratio, 1.0) for a in advantage])
    check(found, -flat(weights) * it.advantages * it.new.detach(), -flat(weights) * it.advantages, it)


@quick
@given(batches())
def test_vespo(batch):
    it = case(batch)
    loss = Vespo(power_positive=2.0, decay_positive=3.0, power_negative=2.5, decay_negative=1.5)
    found = loss.token_loss(it.micro(), it.new)
    weights = []
    for new, old, advantage, mask in it.rows():
        ratio = math.exp(sum(n - o for n, o, m in zip(new, old, mask, strict=True) if m))
        positive = ratio**2.0 * math.exp(3.0 * (1 - ratio))
        negative = ratio**2.5 * math.exp(1.5 * (1 - ratio))
        weights.append([positive if a >= 0 else negative for a in advantage])
    check(found, -flat(weights) * it.advantages * it.new.detach(), -flat(weights) * it.advantages, it)


def test_vespo_is_largest_at_power_over_decay_and_finite_everywhere():
    micro = Case(Batch([0], [1.0], [True], [[True]], 1), [[0.0]], [[0.0]], [[1.0]]).micro()
    ratios = [1e-8, 0.5, 2 / 3, 0.8, 1.0, 1e8]
    weights = [
        float(Vespo().token_loss(micro, torch.tensor([math.log(ratio)])).indicators["weight"])
        for ratio in ratios
    ]
    assert max(weights) == weights[2]
    assert weights[4] == 1.0
    assert weights[0] < 1e-12 and weights[-1] == 0.0


@quick
@given(batches(), st.floats(0.01, 1.0))
def test_top_entropy_tokens(batch, share):
    it = case(batch)
    entropy = it.new.detach().abs()
    found = top_entropy_tokens(entropy, it.mask, share)
    places = [place for place, inside in enumerate(it.mask.tolist()) if inside]
    count = max(int(share * len(places)), 1)
    wanted = sorted(places, key=lambda place: (-float(entropy[place]), place))[:count]
    assert [place for place, chosen in enumerate(found.tolist()) if chosen] == sorted(wanted)


@quick
@given(batches())
def test_off_policy_sequence_mask(batch):
    it = case(batch)
    found = off_policy_sequence_mask(it.new, it.old, it.advantages, it.mask, it.lengths, delta=0.05)
    wanted = []
    for new, old, advantage, mask in it.rows():
        drift = -math.log(sequence_ratio(new, old, mask))
        wanted += [not (a < 0 and drift > 0.05) for a in advantage]
    assert found.tolist() == wanted


def covariances(it: Case) -> dict[int, float]:
    """Return each masked-in token's covariance, by position in [N]."""
    places = [t for t, m in enumerate(it.mask.tolist()) if m]
    lp, a = it.old.tolist(), it.advantages.tolist()
    if not places:
        return {}
    mean_lp, mean_a = (sum(values[t] for t in places) / len(places) for values in (lp, a))
    return {t: (lp[t] - mean_lp) * (a[t] - mean_a) for t in places}


@quick
@given(batches())
def test_clip_cov(batch):
    it = case(batch)
    cov = covariances(it)
    draw = torch.Generator().manual_seed(batch.seed)
    loss = ClipCov(clip_low=LOW, clip_high=HIGH, fraction=0.3, covariance_low=0.1, covariance_high=1.0)
    chosen = loss.select(it.micro(), draw)
    candidates = {t for t, value in cov.items() if 0.1 < value < 1.0}
    count = min(len(candidates), max(int(0.3 * len(cov)), 1))
    assert int(chosen.sum()) == count
    assert set(chosen.nonzero().squeeze(-1).tolist()) <= candidates
    found = loss.token_loss(it.micro(chosen), it.new)
    plain = PpoClip(clip_low=LOW, clip_high=HIGH, dual_clip=None).token_loss(it.micro(), it.new.detach())
    gradient = by_token(lambda n, o, a: 0.0 if _clipped(n, o, a) else -a * math.exp(n - o), it)
    check(found, torch.where(chosen, 0, plain.loss), torch.where(chosen, 0, gradient), it)


def _clipped(n, o, a):
    ratio = math.exp(n - o)
    return (a > 0 and ratio > 1 + HIGH) or (a < 0 and ratio < 1 - LOW)


@quick
@given(batches())
def test_kl_cov(batch):
    it = case(batch)
    cov = covariances(it)
    loss = KlCov(fraction=0.3, coef=0.7)
    chosen = loss.select(it.micro(), torch.Generator())
    count = max(int(0.3 * len(cov)), 1) if cov else 0
    wanted = sorted(cov, key=lambda t: (-cov[t], t))[:count]
    threshold = min((cov[t] for t in wanted), default=0.0)
    picked = chosen.nonzero().squeeze(-1).tolist()
    assert len(picked) == count
    # Equal covariances may come in another order after rounding.
    assert all(cov[t] >= threshold - 1e-12 for t in picked)
    found = loss.token_loss(it.micro(chosen), it.new)
    extra = 0.7 * (it.new.detach() - it.old)
    loss = by_token(lambda n, o, a: -a * math.exp(n - o), it)
    check(found, loss + extra.abs() * chosen, loss + 0.7 * extra.sign() * chosen, it)


LOSSES = {
    "policy_gradient": PolicyGradient(), "ppo_clip": PpoClip(), "cispo": Cispo(), "sapo": Sapo(),
    "dppo": Dppo(), "gspo": Gspo(), "gmpo": Gmpo(), "topr": Topr(), "vespo": Vespo(),
    "kl_cov": KlCov(coef=1.0), "clip_cov": ClipCov(),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_gradient_is_reinforce(name):
    """Where new and old policy agree and A is one number per row, every loss has REINFORCE's gradient."""
    it = case(Batch([0, 0, 1], [0.0] * 3, [True] * 3, [[True] * 3, [False, True, True], [True]], 7))
    it.advantages = torch.repeat_interleave(torch.tensor([1.5, -0.5, 0.25]).double(), it.lengths)
    new = it.old.clone().requires_grad_()
    (LOSSES[name].token_loss(it.micro(~it.mask), new).loss * it.mask).sum().backward()
    close(new.grad, -it.advantages * it.mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_log_probs_stay_finite(name, dtype):
    """A ratio of e^1000 either way is clamped, in value and gradient."""
    one_row = Batch([0], [0.0], [True], [[True] * 4], 0)
    new, old = [-1000.0, -1e-3, -20.0, -0.5], [-1e-3, -1000.0, -0.5, -20.0]
    it = Case(one_row, [new], [old], [[1.0, -1.0, -1.0, 1.0]])
    it.old, it.advantages = it.old.to(dtype), it.advantages.to(dtype)
    new = it.new.detach().to(dtype).requires_grad_()
    loss = LOSSES[name].token_loss(it.micro(~it.mask), new).loss
    loss.sum().backward()
    assert loss.isfinite().all() and new.grad.isfinite().all()
