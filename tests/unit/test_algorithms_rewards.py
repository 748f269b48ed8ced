"""Reward shaping and its state between steps, compared with loops from the equations."""

from __future__ import annotations

import math
from statistics import mean, pstdev

import pytest
import torch
from hypothesis import given, settings
from ragged_batches import batches, close

from megatron_rl.algorithms.rewards import (
    Overlong,
    RewardShaping,
    RunningMoments,
    overlong_penalty,
    update_moments,
)

quick = settings(max_examples=30, deadline=None)


def shaped(batch, shaping, moments=None):
    rewards, _, valid = batch.tensors
    return shaping.shape(rewards, rewards, valid, moments or RunningMoments())


def reference(batch, function):
    return [function(r) if ok else 0.0 for r, ok in zip(batch.rewards, batch.valid, strict=True)]


@quick
@given(batches())
def test_scale_shift_clip(batch):
    shaping = RewardShaping(scale=2.0, shift=-0.5, clip_low=-1.0, clip_high=1.2)
    close(shaped(batch, shaping), reference(batch, lambda r: min(max(2 * r - 0.5, -1.0), 1.2)))


@quick
@given(batches())
def test_one_sided_clip(batch):
    close(shaped(batch, RewardShaping(clip_high=0.2)), reference(batch, lambda r: min(r, 0.2)))


@quick
@given(batches())
def test_batch_normalisation_leaves_failed_rows_out(batch):
    kept = [r for r, ok in zip(batch.rewards, batch.valid, strict=True) if ok]
    got = shaped(batch, RewardShaping(normalize="batch"))
    if not kept:
        assert got.abs().sum() == 0
        return
    # Rounding errors of the mean over the 1e-6 that keeps the division defined.
    close(got, reference(batch, lambda r: (r - mean(kept)) / (pstdev(kept) + 1e-6)), 1e-8)


def test_running_moments_are_exponentially_weighted():
    """Against weights written out: step k of n counts decay^(n - k), normalised."""
    steps, decay = [[1.0, 3.0], [2.0, math.nan], [5.0, 7.0]], 0.8
    moments = RunningMoments()
    for rewards in steps:
        values = torch.tensor(rewards)
        moments = update_moments(moments, values, values.isfinite(), decay=decay)
    weights = [decay**2, decay, 1.0]
    first = sum(w * m for w, m in zip(weights, [2.0, 2.0, 6.0], strict=True)) / sum(weights)
    second = sum(w * m for w, m in zip(weights, [5.0, 4.0, 37.0], strict=True)) / sum(weights)
    assert moments.mean == pytest.approx(first)
    assert moments.std == pytest.approx(math.sqrt(second - first**2))
    assert update_moments(moments, torch.zeros(2), torch.zeros(2) > 0, decay=decay) == moments


@quick
@given(batches())
def test_running_normalisation_and_smoothing(batch):
    moments = RunningMoments(weight=0.5, first=0.25, second=0.625)  # mean 0.5, variance 1
    normal = shaped(batch, RewardShaping(normalize="running"), moments)
    close(normal, reference(batch, lambda r: (r - 0.5) / (1 + 1e-6)))
    smooth = shaped(batch, RewardShaping(smoothing=0.25), moments)
    close(smooth, reference(batch, lambda r: 0.75 * r + 0.25 * 0.5))
    both = shaped(batch, RewardShaping(normalize="running", smoothing=0.25), moments)
    close(both, 0.75 * normal)


def test_published_numbers_of_dapo():
    """arXiv:2503.14476, section 4.1: 16384 tokens free of penalty, 4096 of buffer, 20480 at most."""
    lengths = torch.tensor([1, 16384, 17408, 18432, 20480])
    close(overlong_penalty(lengths, limit=20480, buffer=4096, penalty=1.0), [0.0, 0.0, -0.25, -0.5, -1.0])


@pytest.mark.parametrize(("buffer", "tokens"), [(4.0, 4.0), (0.4, 4.0)])
@quick
@given(batches())
def test_overlong_penalty(buffer, tokens, batch):
    overlong = Overlong(buffer=buffer if buffer >= 1 else 4 / 6)
    rewards, _, valid = batch.tensors
    counts = torch.tensor([sum(mask) for mask in batch.masks])
    scaled = RewardShaping().scale_and_clip(rewards, valid)
    wanted = [
        r + min(-(sum(mask) - (6 - tokens)) / tokens, 0.0) if ok else 0.0
        for r, ok, mask in zip(batch.rewards, batch.valid, batch.masks, strict=True)
    ]
    close(overlong.punish(scaled, valid, counts, torch.full_like(counts, 6)), wanted)


def test_a_response_beyond_the_limit_loses_no_more_than_one_at_it():
    """DAPO's equation 13 is -1 for every length above the limit, times the factor of the penalty."""
    lengths = torch.tensor([79, 100, 101, 200, 400])
    wanted = [-0.0, -3.0, -3.0, -3.0, -3.0]
    close(overlong_penalty(lengths, limit=100, buffer=20, penalty=3.0), wanted)


@pytest.mark.parametrize(("buffer", "wanted"), [(10.0, [-1.0, -0.5, 0.0]), (0.5, [-1.0, -0.9, -0.2])])
def test_each_response_is_measured_by_its_own_limit(buffer, wanted):
    lengths, limits = torch.tensor([20, 95, 60]), torch.tensor([20, 100, 100])
    zeros, valid = torch.zeros(3, dtype=torch.float64), torch.ones(3) > 0
    close(Overlong(buffer=buffer).punish(zeros, valid, lengths, limits), wanted)
    stated = Overlong(buffer=buffer, limit=100).punish(zeros, valid, lengths, limits)
    close(stated, overlong_penalty(lengths, limit=100, buffer=10 if buffer > 1 else 50, penalty=1.0))
