"""The order of the rollout's ranks leaves the least to receive, and is the same for check, plan and run."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.shapes.layout import FIRST, LAST, ParallelLayout
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.published import load_shape
from megatron_rl.shapes.traffic import (
    assign_columns,
    best_rank_order,
    gathered_bytes,
    received_by_other_projects,
    shared_bytes,
)

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ModelShape("small", 1024, 8, 8, 8, 128, 4096, 1024)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_assignment_is_the_best_there_is(data):
    places = data.draw(st.integers(1, 3))
    capacity = data.draw(st.integers(1, 6 // places))
    rows = places * capacity
    costs = data.draw(
        st.lists(st.lists(st.integers(0, 9), min_size=places, max_size=places), min_size=rows, max_size=rows)
    )
    found = assign_columns(costs, capacity)
    assert sorted(found) == sorted(list(range(places)) * capacity)

    def price(assignment):
        values = [costs[row][place] for row, place in enumerate(assignment)]
        return max(values), sum(values)

    every = set(itertools.permutations(list(range(places)) * capacity))
    assert price(found) == min(price(candidate) for candidate in every)


def test_equal_costs_keep_the_order():
    assert assign_columns([[5, 5]] * 4, 2) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("sizes", "places", "share"),
    [
        ({"tensor": 4}, 2, 1 / 4),  # each rank lacks one of the two quarters it needs
        ({"tensor": 2, "pipeline": 2}, 2, 1 / 4),
        ({"pipeline": 4}, 2, 3 / 8),
        ({"tensor": 2, "pipeline": 2}, 4, 1 / 8),
    ],
)
def test_order_minimises_the_largest_receive(sizes, places, share):
    shared = shared_bytes(SHAPE, ParallelLayout((0, 1, 2, 3), **sizes), places, 4)
    order = best_rank_order(shared, (0, 1, 2, 3), 4)
    assert sorted(order) == [0, 1, 2, 3]
    best = min(shared.traffic(every).received_most for every in itertools.permutations(range(4)))
    assert shared.traffic(order).received_most == best
    assert best == pytest.approx(share * shared.model_bytes, rel=0.25)


@pytest.mark.parametrize(
    ("pipeline", "size", "plain", "best"), [(2, 4, 3.808e9, 1.904e9), (1, 8, 3.808e9, 0)]
)
def test_published_numbers_of_a_7b_model(pipeline, size, plain, best):
    shape = load_shape(str(ROOT / "configs/models/Qwen2.5-7B-Instruct"))
    actor = ParallelLayout(tuple(range(size)), tensor=2, pipeline=pipeline)
    shared = shared_bytes(shape, actor, 4, 2)
    order = best_rank_order(shared, actor.ranks, 8)
    assert shared.traffic(actor.ranks).received_most == pytest.approx(plain, rel=1e-3)
    assert shared.traffic(order).received_most == pytest.approx(best, rel=1e-3)


def test_replicas_stay_inside_their_node():
    shared = shared_bytes(SHAPE, ParallelLayout(tuple(range(8)), tensor=4, pipeline=2), 2, 4)
    order = best_rank_order(shared, tuple(range(8)), 4)
    for first, second in zip(order[::2], order[1::2], strict=True):
        assert first // 4 == second // 4


def test_disjoint_ranks_keep_their_order_and_receive_all_they_need():
    shared = shared_bytes(SHAPE, ParallelLayout((0, 1), tensor=2), 2, 4)
    assert best_rank_order(shared, (2, 3), 4) == (2, 3)
    traffic = shared.traffic((2, 3))
    assert traffic.received == traffic.needed


@pytest.mark.parametrize(("tensor", "places"), [(2, 2), (2, 4), (1, 2)])
def test_shards_that_hold_what_the_engine_needs_receive_nothing(tensor, places):
    actor = ParallelLayout(tuple(range(8)), tensor=tensor)
    shared = shared_bytes(SHAPE, actor, places, 4)
    assert set(shared.traffic(best_rank_order(shared, actor.ranks, 8)).received.values()) == {0}


def test_pairwise_published_reshard_volume():
    """TP2 x PP2 to TP2: a quarter of the model per rank (HybridFlow's formula, arXiv 2409.19256)."""
    actor = ParallelLayout((0, 1, 2, 3), tensor=2, pipeline=2)
    shared = shared_bytes(SHAPE, actor, 2, 2)
    received = shared.traffic(actor.ranks).received_most
    assert received == pytest.approx(shared.model_bytes / 4, rel=1e-3)
    assert received_by_other_projects(shared.model_bytes, actor, 2)["HybridFlow"] == shared.model_bytes / 4
    assert gathered_bytes(shared.model_bytes, actor) == shared.model_bytes * 3 / 4
    assert gathered_bytes(shared.model_bytes, actor, colocated=False) == shared.model_bytes


@pytest.mark.parametrize(("sizes", "whole"), [({"expert": 64}, True), ({"tensor": 8, "expert": 8}, False)])
def test_the_largest_model_on_a_thousand_ranks_takes_no_time(sizes, whole):
    begun = time.process_time()
    actor = ParallelLayout(tuple(range(1024)), pipeline=16, **sizes)
    shape, ends = load_shape("deepseek-v3"), {FIRST: 3, LAST: 2}
    shared = shared_bytes(shape, actor, 32, 2, settings=ends, whole_experts=whole)
    order = best_rank_order(shared, actor.ranks, 8)
    assert time.process_time() - begun < 2, "check answers within five seconds in all"
    assert sorted(order) == list(actor.ranks)
    plain = shared.traffic(actor.ranks)
    assert shared.traffic(order).received_most <= plain.received_most < max(plain.needed.values())
