"""Mismatch metrics, importance weights and rejection, against loops written from the equations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from ragged_batches import Batch, batches, close, flat

from megatron_rl.algorithms.algorithm import CORRECTIONS
from megatron_rl.algorithms.correction import (
    REJECTION_MEASURES,
    Correction,
    mismatch_metrics,
    normalize_over_batch,
    rejection_mask,
)

quick = settings(max_examples=25, deadline=None)


def pair(batch: Batch, size: float = 0.8):
    """Return trainer and rollout log-probs and, by row, the differences on masked-in tokens."""
    old = batch.noise("rollout", -3, 0)
    drift = batch.noise("difference", -size, size)
    new = [[o + d for o, d in zip(*rows, strict=True)] for rows in zip(old, drift, strict=True)]
    kept = [
        [n - o for n, o, m in zip(*rows, strict=True) if m]
        for rows in zip(new, old, batch.masks, strict=True)
    ]
    return flat(new), flat(old), kept


@quick
@given(batches())
def test_metrics(batch):
    new, old, rows = pair(batch)
    got = mismatch_metrics(new, old, batch.mask, batch.lengths).values()
    d = [x for row in rows for x in row]
    if not d:
        assert got == {}
        return

    def average(values):
        return sum(values) / len(values)

    rho = [math.exp(x) for x in d]
    weight = [r / average(rho) for r in rho]
    wanted = {
        "mismatch/abs_diff": average([abs(x) for x in d]),
        "mismatch/max_diff": max(abs(x) for x in d),
        "mismatch/kl": average([-x for x in d]),
        "mismatch/k3": average([math.exp(x) - 1 - x for x in d]),
        "mismatch/chi2": average([r * r for r in rho]) - 1,
        "mismatch/ess": 1 / average([w * w for w in weight]),
        "mismatch/ppl_ratio": average([math.exp(-average(row)) for row in rows if row]),
        "mismatch/token_mult_prob_error": average([math.exp(abs(x)) for x in d]),
    }
    assert got == pytest.approx(wanted, rel=1e-9)


def test_metrics_of_agreement():
    values = torch.tensor([-1.0, -2.0])
    got = mismatch_metrics(values, values, torch.ones(2) > 0, torch.tensor([2])).values()
    assert got == pytest.approx({
        "mismatch/abs_diff": 0, "mismatch/max_diff": 0, "mismatch/kl": 0, "mismatch/k3": 0,
        "mismatch/chi2": 0, "mismatch/ess": 1, "mismatch/ppl_ratio": 1, "mismatch/token_mult_prob_error": 1,
    })  # fmt: skip


def test_metrics_see_a_broken_log_prob():
    """NaN or infinite log-probs must not average out: the threshold that stops the run has to see them."""
    bad = mismatch_metrics(
        torch.tensor([-1.0, float("nan")]), torch.tensor([-1.0, -1.0]), torch.ones(2) > 0, torch.tensor([2])
    ).values()
    assert math.isnan(bad["mismatch/abs_diff"])


def ratio_of(level, row, x):
    if level == "token":
        return math.exp(x)
    return math.exp(sum(row)) if level == "sequence" else math.exp(sum(row) / len(row))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@quick
@given(batches())
def test_importance_weights(level, batch):
    new, old, rows = pair(batch)
    for options in ({"threshold": 1.3}, {"band": (0.7, 1.5)}, {"threshold": None}):
        got = Correction(level=level, **options).importance_weights(new, old, batch.mask, batch.lengths)
        wanted = []
        for row in rows:
            for x in row:
                ratio = ratio_of(level, row, x)
                if "band" in options:
                    ratio = ratio if 0.7 <= ratio <= 1.5 else 0.0
                wanted.append(ratio if options.get("threshold") is None else min(ratio, 1.3))
        close(got[batch.mask], wanted)
        assert (got[~batch.mask] == 1).all()


@pytest.mark.parametrize("measure", REJECTION_MEASURES)
@quick
@given(batches())
def test_rejection(measure, batch):
    new, old, rows = pair(batch)
    limit = [0.8, 1.4] if measure.endswith("k1") else 0.05
    got = rejection_mask(new, old, batch.mask, batch.lengths, {measure: limit})
    span, kind = measure.rsplit("_", 1)
    divergence = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[kind]
    wanted = []
    for row in rows:
        values = [divergence(x) for x in row]
        for value in values:
            if span == "seq_sum":
                value = sum(values)
            elif span == "seq_mean":
                value = sum(values) / len(values)
            elif span == "seq_max":
                value = max(values)
            wanted.append(math.log(0.8) <= value <= math.log(1.4) if kind == "k1" else value <= 0.05)
    assert got[batch.mask].tolist() == wanted
    assert not got[~batch.mask].any()


@quick
@given(batches())
def test_rejection_measures_are_combined_with_and(batch):
    new, old, _ = pair(batch)
    arguments = (new, old, batch.mask, batch.lengths)
    a, b = {"token_k1": 1.3}, {"seq_mean_k3": 0.05}
    assert rejection_mask(*arguments, {**a, **b}).equal(
        rejection_mask(*arguments, a) & rejection_mask(*arguments, b)
    )
    assert rejection_mask(*arguments, {}).equal(batch.mask)


def test_a_single_k1_threshold_is_a_symmetric_band():
    new, old = torch.tensor([0.29, -0.29, 0.31, -0.31]) * math.log(2) / 0.3, torch.zeros(4)
    kept = rejection_mask(new, old, torch.ones(4) > 0, torch.tensor([4]), {"token_k1": 2.0})
    assert kept.tolist() == [True, True, False, False]


@quick
@given(batches())
def test_batch_normalised_weights_have_mean_one(batch):
    """Over tokens for weights of tokens, over responses for weights of responses, whatever their lengths."""
    new, old, rows = pair(batch)
    raw = Correction(level="token").importance_weights(new, old, batch.mask, batch.lengths)
    weights = normalize_over_batch(raw, batch.mask, batch.lengths)
    if batch.mask.any():
        close(weights[batch.mask].mean(), 1.0)
    correction = Correction(level="sequence", threshold=1.3)
    raw = correction.importance_weights(new, old, batch.mask, batch.lengths)
    weights = normalize_over_batch(raw, batch.mask, batch.lengths, level="sequence")
    each = [min(math.exp(sum(row)), 1.3) for row in rows]
    mean = sum(w for w, row in zip(each, rows, strict=True) if row) / max(sum(map(bool, rows)), 1)
    close(weights[batch.mask], [w / mean for w, row in zip(each, rows, strict=True) for _ in row])


def test_batch_normalisation_of_nothing_changes_nothing():
    zeros, mask = torch.zeros(2), torch.tensor([True, False])
    lengths = torch.tensor([2])
    for level in ("token", "sequence"):
        assert normalize_over_batch(zeros, mask, lengths, level=level).equal(zeros)
        assert normalize_over_batch(zeros, torch.zeros(2) > 0, lengths, level=level).equal(zeros)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_presets_leave_agreement_alone(name):
    """Without mismatch every weight is 1 and nothing is rejected."""
    values, mask, lengths = -torch.rand(6).double(), torch.ones(6) > 0, torch.tensor([4, 2])
    weights, keep, metrics = CORRECTIONS[name].correct(values, values, mask, lengths)
    assert weights is None or (weights == 1).all()
    assert keep.all()
    assert metrics.values().get("mismatch/rejected_fraction", 0) == 0


def test_correction_reports_what_it_did():
    new, old = torch.tensor([3.0, 1.0, 0.0]).log1p(), torch.zeros(3)
    mask, lengths = torch.ones(3) > 0, torch.tensor([1, 2])
    correction = Correction(level="token", threshold=2.0, rejection={"token_k1": 3.0})
    weights, keep, metrics = correction.correct(new, old, mask, lengths)
    close(weights, [2.0, 2.0, 1.0], 1e-6)
    assert keep.tolist() == [False, True, True]
    assert metrics.values() == pytest.approx({
        "mismatch/is_weight": 5 / 3, "mismatch/is_limited_fraction": 2 / 3,
        "mismatch/rejected_fraction": 1 / 3,
    })  # fmt: skip


def test_extreme_mismatch_stays_finite():
    new, old = torch.tensor([-1e-3, -1000.0]), torch.tensor([-1000.0, -1e-3])
    mask, lengths = torch.ones(2) > 0, torch.tensor([1, 1])
    weights = Correction(level="token", threshold=None).importance_weights(new, old, mask, lengths)
    assert weights.isfinite().all()
    assert all(math.isfinite(v) for v in mismatch_metrics(new, old, mask, lengths).values().values())
