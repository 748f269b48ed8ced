"""Advantages from groups, against loops written from the equations."""

from __future__ import annotations

import math
from statistics import mean, stdev

import pytest
import torch
from hypothesis import given, settings
from piece_inputs import advantage_inputs
from ragged_batches import Batch, batches, close

from megatron_rl.algorithms.advantages import Gdpo, Gpg, Grpo, GrpoLeaveOneOut, GrpoPassAtK, Opo, Rloo
from megatron_rl.algorithms.ragged import (
    group_statistics,
    group_top2,
    leave_one_out_statistics,
    mark_first_best,
)
from megatron_rl.algorithms.rewards import count_groups, informative_groups, prompts_to_sample, take_groups
from megatron_rl.errors import UserError

EPSILON = 1e-6
quick = settings(max_examples=30, deadline=None)


def per_row(batch: Batch, function) -> list[float]:
    """Apply ``function(row, rewards of its group's valid rows)`` to valid rows; the others get 0."""
    return [
        function(row, [batch.rewards[other] for other in batch.members(row)]) if batch.valid[row] else 0.0
        for row in range(len(batch.group))
    ]


def rows_of(estimator, rewards, groups, valid, **fields) -> torch.Tensor:
    """Return an estimator's advantage of every row [B]."""
    plain = {name: value.tolist() for name, value in (("group", groups), ("valid", valid))}
    return estimator.row_advantages(advantage_inputs(rewards.tolist(), **plain, **fields))


def spread(values: list[float]) -> float:
    """Return the unbiased standard deviation; 0 if it is undefined or all values are equal."""
    return 0.0 if len(values) < 2 or len(set(values)) == 1 else stdev(values)


@quick
@given(batches())
def test_group_statistics(batch):
    found = group_statistics(*batch.tensors)
    members = [[batch.rewards[i] for i in batch.members(row)] for row in range(len(batch.group))]
    assert found.size.tolist() == [len(m) for m in members]
    close(found.mean, [mean(m) if m else 0.0 for m in members])
    close(found.std, [spread(m) for m in members])


@quick
@given(batches(all_valid=True))
def test_leave_one_out_statistics(batch):
    found = leave_one_out_statistics(*batch.tensors)
    others = [[batch.rewards[i] for i in batch.members(row) if i != row] for row in range(len(batch.group))]
    assert found.size.tolist() == [len(o) for o in others]
    close(found.mean, [mean(o) if o else 0.0 for o in others])
    # The difference of sums loses half the digits where the others lie far closer together than the group.
    close(found.std, [spread(o) for o in others], 1e-6)
    assert [s == 0 for s in found.std.tolist()] == [spread(o) == 0 for o in others]


@quick
@given(batches())
def test_largest_rewards(batch):
    largest, second = group_top2(*batch.tensors)
    best = mark_first_best(*batch.tensors)
    for row in range(len(batch.group)):
        members = batch.members(row)
        ranked = sorted((batch.rewards[i] for i in members), reverse=True)
        assert largest[row] == (ranked[0] if ranked else 0.0)
        assert second[row] == (ranked[1] if len(ranked) > 1 else -math.inf)
        first = next((i for i in members if batch.rewards[i] == ranked[0]), None)
        assert bool(best[row]) == (row == first)


@quick
@given(batches())
def test_grpo(batch):
    def scaled(row, rewards):
        if len(rewards) == 1:
            return batch.rewards[row] / (1 + EPSILON)
        return (batch.rewards[row] - mean(rewards)) / (spread(rewards) + EPSILON)

    def centred(row, rewards):
        return batch.rewards[row] - (mean(rewards) if len(rewards) > 1 else 0.0)

    # Dividing rounding errors of the mean by epsilon leaves 1e-9.
    close(rows_of(Grpo(), *batch.tensors), per_row(batch, scaled), 1e-8)
    close(rows_of(Grpo(scale_by_std=False), *batch.tensors), per_row(batch, centred))


@quick
@given(batches())
def test_grpo_leave_one_out(batch):
    def reference(row, rewards, scale):
        others = [batch.rewards[i] for i in batch.members(row) if i != row]
        if not others:
            return 0.0
        difference, std = batch.rewards[row] - mean(others), spread(others)
        return difference / (std + EPSILON) if scale and std > 0 else difference

    got = rows_of(GrpoLeaveOneOut(), *batch.tensors)
    close(got, per_row(batch, lambda *a: reference(*a, True)), 1e-6)
    plain = rows_of(GrpoLeaveOneOut(scale_by_std=False), *batch.tensors)
    close(plain, per_row(batch, lambda *a: reference(*a, False)))


def test_leave_one_out_does_not_divide_by_rounding_errors():
    """One outlier among equal rewards: the others' spread is exactly 0, so nothing is divided."""
    rewards = torch.tensor([1e6 + 0.1, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64)
    advantages = rows_of(GrpoLeaveOneOut(), rewards, torch.zeros(5), torch.ones(5) > 0)
    close(advantages[0], 1e6)


@quick
@given(batches())
def test_grpo_pass_at_k(batch):
    def reference(row, rewards):
        ranked = sorted(rewards, reverse=True)
        first = next(i for i in batch.members(row) if batch.rewards[i] == ranked[0])
        if len(rewards) < 2 or row != first:
            return 0.0
        return (ranked[0] - ranked[1]) / (spread(rewards) + EPSILON)

    close(rows_of(GrpoPassAtK(), *batch.tensors), per_row(batch, reference), 1e-8)


@quick
@given(batches())
def test_rloo(batch):
    def reference(row, rewards):
        n = len(rewards)
        if n == 1:
            return batch.rewards[row]
        return n / (n - 1) * (batch.rewards[row] - mean(rewards))

    close(rows_of(Rloo(), *batch.tensors), per_row(batch, reference))


@quick
@given(batches())
def test_opo(batch):
    counts = [sum(mask) for mask in batch.masks]

    def reference(row, rewards):
        members = batch.members(row)
        total = sum(counts[i] for i in members)
        if len(members) == 1 or not total:
            return batch.rewards[row]
        return batch.rewards[row] - sum(counts[i] * batch.rewards[i] for i in members) / total

    close(rows_of(Opo(), *batch.tensors, lengths=counts), per_row(batch, reference))


@quick
@given(batches())
def test_gpg(batch):
    rewards = [r for r, ok in zip(batch.rewards, batch.valid, strict=True) if ok]
    alpha = len(rewards) / max(sum(r != 0 for r in rewards), 1)

    def reference(row, members):
        return alpha * (batch.rewards[row] - (mean(members) if len(members) > 1 else 0.0)) / 2

    close(rows_of(Gpg(normalizer=2.0), *batch.tensors), per_row(batch, reference))


@quick
@given(batches())
def test_gdpo_adds_up_components_each_with_its_own_failures(batch):
    rewards, groups, valid = batch.tensors
    other = torch.flip(rewards, [0])
    components = {"a": rewards.tolist(), "b": other.tolist(), "c": rewards.tolist()}
    estimator = Gdpo(weights={"a": 2.0, "b": -1.0})
    got = rows_of(estimator, rewards, groups, valid, components=components)
    b = rows_of(Grpo(), other, groups, valid & other.isfinite())
    close(got, 2 * rows_of(Grpo(), rewards, groups, valid) - b)


def test_gdpo_names_missing_components():
    with pytest.raises(UserError, match=r"component format(?s:.*)advantage.weights(?s:.*)components answer"):
        inputs = advantage_inputs([0.0], group=[0], components={"answer": [0.0]})
        Gdpo(weights={"format": 1.0}).row_advantages(inputs)


def test_gdpo_takes_the_reward_of_rows_without_components():
    """Sources may have rewards of their own, of which one returns components and another a number."""
    groups, valid = torch.tensor([0.0, 0, 1, 1]), torch.tensor([True, True, True, True])
    rewards = torch.tensor([0.0, 3.0, 0.0, 1.0]).double()
    components = {"a": [0.0, 1.0, math.nan, math.nan], "b": [0.0, 2.0, math.nan, math.nan]}
    got = rows_of(Gdpo(), rewards, groups, valid, components=components)
    half = math.sqrt(0.5)
    close(got, [-2 * half, 2 * half, -half, half], 1e-5)


def test_published_example_of_gdpo():
    """arXiv:2601.05242, section 2: GRPO cannot tell rewards (0, 1) from (0, 2), GDPO can."""
    groups, valid, half = torch.zeros(2), torch.ones(2) > 0, math.sqrt(0.5)
    one, two = torch.tensor([0.0, 1.0]).double(), torch.tensor([0.0, 2.0]).double()
    close(rows_of(Grpo(), one, groups, valid), [-half, half], 1e-5)
    close(rows_of(Grpo(), two, groups, valid), [-half, half], 1e-5)
    components = {"first": one.tolist(), "second": one.tolist()}
    both = rows_of(Gdpo(), two, groups, valid, components=components)
    close(both, [-2 * half, 2 * half], 1e-5)


@quick
@given(batches())
def test_failed_samples_change_nothing_for_the_others(batch):
    """Every estimator returns the same for valid rows with the failed rows removed."""
    rewards, groups, valid = batch.tensors
    lengths = torch.tensor([sum(mask) for mask in batch.masks], dtype=torch.long)
    kept = valid.nonzero().squeeze(-1)
    for estimator in (Grpo(), GrpoLeaveOneOut(), GrpoPassAtK(), Rloo(), Gpg(), Opo()):
        everything = rows_of(estimator, rewards, groups, valid, lengths=lengths.tolist())
        rows = (rewards[kept], groups[kept], valid[kept])
        alone = rows_of(estimator, *rows, lengths=lengths[kept].tolist())
        torch.testing.assert_close(everything[kept], alone, rtol=0, atol=1e-12)
        assert everything[~valid].abs().sum() == 0


@quick
@given(batches())
def test_equal_rewards_give_exactly_zero(batch):
    _, groups, valid = batch.tensors
    equal = torch.where(valid, 0.1, torch.nan).double()
    more = group_statistics(equal, groups, valid).size > 1
    for estimator in (Grpo(), GrpoLeaveOneOut(), GrpoPassAtK(), Rloo()):
        assert (rows_of(estimator, equal, groups, valid)[more] == 0).all()


@quick
@given(batches())
def test_informative_groups(batch):
    got = informative_groups(*batch.tensors)
    for row in range(len(batch.group)):
        rewards = [batch.rewards[i] for i in batch.members(row)]
        assert bool(got[row]) == (len(rewards) > 1 and spread(rewards) > EPSILON)


@quick
@given(batches())
def test_taking_groups_keeps_whole_groups_in_order(batch):
    rewards, groups, valid = batch.tensors
    keep = informative_groups(rewards, groups, valid)
    available = count_groups(keep, groups)
    order = list(dict.fromkeys(g for g, k in zip(batch.group, keep.tolist(), strict=True) if k))
    for wanted in range(available + 2):
        rows = take_groups(keep, groups, wanted)
        assert rows == [row for row, g in enumerate(batch.group) if g in order[:wanted]]


@pytest.mark.parametrize(
    ("wanted", "kept", "sampled", "more"),
    [(8, 8, 8, 0), (8, 9, 9, 0), (8, 0, 0, 8), (8, 4, 8, 8), (8, 0, 8, 64), (64, 0, 64, 64), (8, 2, 2, 6)],
)
def test_prompts_to_sample(wanted, kept, sampled, more):
    assert prompts_to_sample(wanted, kept, sampled, ceiling=64) == more
