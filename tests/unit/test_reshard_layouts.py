"""Layouts predicted from configs alone, and the rank order that leaves the least to receive."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.hybrid_engine.assignment import assign
from megatron_rl.hybrid_engine.layouts import best_rank_order, engine_layout
from megatron_rl.hybrid_engine.plan import build_plan
from megatron_rl.parallel import device
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.parallel.hf.layout_boxes import dense_shapes, expert_shapes, megatron_layout, stage_layers
from megatron_rl.parallel.hf.weights import _global_name, live_parameters
from megatron_rl.parallel.model import build_model
from megatron_rl.shapes.layout import ParallelLayout
from tests.hf_models import FAMILIES, config_of


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_assignment_is_the_best_there_is(data):
    places = data.draw(st.integers(1, 3))
    capacity = data.draw(st.integers(1, 6 // places))
    rows = places * capacity
    costs = data.draw(
        st.lists(st.lists(st.integers(0, 9), min_size=places, max_size=places), min_size=rows, max_size=rows)
    )
    found = assign(costs, capacity)
    assert sorted(found) == sorted(list(range(places)) * capacity)

    def price(assignment):
        values = [costs[row][place] for row, place in enumerate(assignment)]
        return max(values), sum(values)

    every = set(itertools.permutations(list(range(places)) * capacity))
    assert price(found) == min(price(candidate) for candidate in every)


def test_equal_costs_keep_the_order():
    assert assign([[5, 5]] * 4, 2) == [0, 1, 0, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_parameters_are_those_of_the_built_model(family):
    device.initialize()
    layout = ParallelLayout((0,))
    model = build_model(config_of(family), ParallelGroups(layout), dtype=torch.float32)
    built = {_global_name(model, name): tuple(value.shape) for name, value in live_parameters(model).items()}
    layers = stage_layers(model.spec, layout, 0)
    predicted = dense_shapes(model.spec, layout, layers, True, True)
    if model.spec.model.shape.experts:
        predicted |= expert_shapes(model.spec, layout, layers)
    assert built == predicted


def received(config, sources, order, tensor):
    plan = build_plan(sources, engine_layout(config, order, tensor, torch.float32))
    return [plan.received.get(rank, 0) for rank in sorted(order)], sum(plan.needed.values())


@pytest.mark.parametrize(
    ("sizes", "tensor", "share"),
    [
        ({"tensor": 4}, 2, 1 / 4),  # each rank lacks one of the two quarters it needs
        ({"tensor": 2, "pipeline": 2}, 2, 1 / 4),
        ({"pipeline": 4}, 2, 3 / 8),
        ({"tensor": 2, "pipeline": 2}, 4, 1 / 8),
    ],
)
def test_order_minimises_the_largest_receive(sizes, tensor, share):
    config = config_of("qwen3", num_key_value_heads=4, vocab_size=128, num_hidden_layers=8)
    actor = ParallelLayout((0, 1, 2, 3), **sizes)
    order = best_rank_order(config, actor, (0, 1, 2, 3), tensor, ranks_per_node=4)
    assert sorted(order) == [0, 1, 2, 3]
    sources = megatron_layout(config, actor, torch.float32)
    every = itertools.permutations(range(4))
    best = min(max(received(config, sources, candidate, tensor)[0]) for candidate in every)
    got, total = received(config, sources, order, tensor)
    assert max(got) == best
    whole = total * tensor / 4
    assert max(got) == pytest.approx(share * whole, rel=0.25)


def test_groups_stay_inside_their_node():
    config = config_of("qwen2", num_key_value_heads=4)
    actor = ParallelLayout(tuple(range(8)), tensor=4, pipeline=2)
    order = best_rank_order(config, actor, tuple(range(8)), 2, ranks_per_node=4)
    for first, second in zip(order[::2], order[1::2], strict=True):
        assert first // 4 == second // 4


def test_disjoint_ranks_keep_their_order():
    config = config_of("qwen2")
    actor = ParallelLayout((0, 1), tensor=2)
    assert best_rank_order(config, actor, (2, 3), 2, ranks_per_node=4) == (2, 3)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_expert_layouts_plan_onto_tensor_parallel_engines(family):
    config = config_of(family)
    actor = ParallelLayout(tuple(range(8)), tensor=2, pipeline=2, expert=2, sequence_parallel=True)
    sources = megatron_layout(config, actor, torch.bfloat16)
    for tensor, expert_parallel in ((2, False), (4, False), (2, True)):
        plan = build_plan(sources, engine_layout(config, range(8), tensor, torch.bfloat16, expert_parallel))
        assert sum(plan.received.values()) == sum(plan.sent.values()) > 0
