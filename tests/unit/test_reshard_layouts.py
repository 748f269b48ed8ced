"""Layouts predicted from configs alone, and the bytes between them counted from sizes alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from megatron_rl.config.sections.rollout import HybridEngineConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.megatron.model import build_model, live_parameters
from megatron_rl.megatron.model_spec import describe_model
from megatron_rl.megatron.parameter_mapping import global_name
from megatron_rl.planning.reshard import (
    dense_shapes,
    engine_boxes,
    expert_shapes,
    megatron_boxes,
    plan_offline,
)
from megatron_rl.shapes.layout import FIRST, ParallelLayout, end_settings, stage_layers
from megatron_rl.shapes.lora import Lora, default_targets, make_adapted_model
from megatron_rl.shapes.traffic import best_rank_order, max_peers_on_node, shared_bytes
from megatron_rl.weights.plan import build_plan, schedule_phases
from tests.hf_models import FAMILIES, config_of
from tests.representatives import represented


@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_parameters_are_those_of_the_built_model(family):
    device.initialize()
    layout = ParallelLayout((0,))
    model = build_model(config_of(family), ParallelGroups(layout), dtype=torch.float32)
    built = {global_name(model, name): tuple(value.shape) for name, value in live_parameters(model).items()}
    layers = stage_layers(model.spec.model.shape.layers, layout)[0]
    predicted = dense_shapes(model.spec.model, layout, layers, True, True)
    if model.spec.model.shape.experts:
        predicted |= expert_shapes(model.spec.model, layout, layers)
    assert built == predicted


MODELS = Path(__file__).parents[2] / "configs/models"
SIZES = st.fixed_dictionaries(
    {
        "tensor": st.sampled_from([1, 2, 4]),
        "pipeline": st.sampled_from([1, 2]),
        "virtual_pipeline": st.sampled_from([1, 2]),
        "expert": st.sampled_from([1, 2]),
        "expert_tensor": st.sampled_from([1, 2]),
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("family", represented())
@settings(max_examples=20, deadline=None)
@given(sizes=SIZES, places=st.sampled_from([1, 2, 4]), vocabulary=st.integers(65, 200), data=st.data())
def test_traffic_from_sizes_is_that_of_the_plan(family, sizes, places, vocabulary, data):
    """What `check` counts without torch equals the plan of traced boxes, rank by rank."""
    config = config_of(family, vocab_size=vocabulary)
    model = describe_model(config)
    if not model.shape.experts:
        sizes |= {"expert": 1, "expert_tensor": 1}
    if model.shape.expert_bias:
        sizes |= {"expert_tensor": 1}
    if sizes["pipeline"] == 1:
        sizes |= {"virtual_pipeline": 1}
    if model.shape.output_gate:
        # Gates are not cut below the queries of a key-value head.
        sizes |= {"tensor": min(sizes["tensor"], model.shape.kv_heads)}
    actor = ParallelLayout(tuple(range(8)), **sizes, sequence_parallel=sizes["tensor"] > 1).checked()
    uneven = sizes["pipeline"] > 1 and sizes["virtual_pipeline"] == 1 and data.draw(st.booleans())
    overrides = {FIRST: 1} if uneven else {}
    ranks = tuple(data.draw(st.permutations(range(8))))[: data.draw(st.sampled_from([4, 8]))]
    whole = bool(model.shape.experts) and data.draw(st.booleans())
    lora = None
    # Phi-3 stores as one tensor what this counts as three or two; delta nets exclude adapters.
    adaptable = not model.shape.experts and family != "phi3" and not model.shape.linear_layers
    if adaptable and data.draw(st.booleans()):
        lora = Lora(data.draw(st.integers(1, 9)), default_targets(model.shape))
        model = make_adapted_model(model, lora.rank, None, lora.targets)
    shared = shared_bytes(model.shape, actor, places, 2, settings=overrides, whole_experts=whole, lora=lora)
    sources = megatron_boxes(config, actor, torch.bfloat16, overrides, lora)
    per_node = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    nodes = {rank: rank // per_node for rank in range(8)}
    plan = build_plan(sources, engine_boxes(model, ranks, places, torch.bfloat16, whole), nodes)
    traffic = shared.traffic(ranks, per_node)
    across_nodes = Counter(dict.fromkeys(ranks, 0))
    for (sender, receiver), count in plan.pair_bytes.items():
        across_nodes[receiver] += count * (nodes[sender] != nodes[receiver])
    assert across_nodes == traffic.received_across_nodes
    assert plan.bytes_inside_and_across_nodes(nodes) == (traffic.inside_nodes, traffic.across_nodes)
    assert {rank: plan.received.get(rank, 0) for rank in ranks} == traffic.received
    assert plan.needed == traffic.needed
    whole_model = build_plan(sources, engine_boxes(model, (0,), 1, torch.bfloat16))
    assert traffic.model_bytes == whole_model.needed[0]


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_expert_layouts_plan_onto_tensor_parallel_engines(family):
    config = config_of(family)
    actor = ParallelLayout(tuple(range(8)), tensor=2, pipeline=2, expert=2, sequence_parallel=True)
    sources = megatron_boxes(config, actor, torch.bfloat16)
    model = describe_model(config)
    for tensor, whole_experts in ((2, False), (4, False), (2, True)):
        plan = build_plan(sources, engine_boxes(model, range(8), tensor, torch.bfloat16, whole_experts))
        assert sum(plan.received.values()) == sum(plan.sent.values()) > 0


LARGE = {
    "70b": ("Llama-3.1-70B-Instruct", {"tensor": 4, "pipeline": 4, "virtual_pipeline": 4}, 128, 8, False, 80),
    "405b": ("Llama-3.1-405B-Instruct", {"tensor": 8, "pipeline": 16}, 512, 16, False, 126),
    "235b": ("Qwen3-235B-A22B", {"tensor": 4, "pipeline": 8, "expert": 16}, 256, 8, True, 94),
    "v3": ("DeepSeek-V3", {"pipeline": 16, "expert": 64}, 1024, 32, True, 61),
}
"""Model, actor, ranks, ranks of a replica, whether experts are whole there, and layers."""


def least_sent(plan):
    """Return a lower bound of what the busiest rank sends: a set of ranks sends what no other rank holds."""
    totals = Counter()
    for bundle in plan.bundles:
        holders = frozenset(bundle.regions[0].holders)
        totals[holders] += bundle.bytes * len(bundle.senders.keys() - holders)
    return max(
        sum(total for inner, total in totals.items() if inner <= outer) / len(outer) for outer in totals
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["70b", "235b", *(pytest.param(name, marks=pytest.mark.campaign) for name in ("405b", "v3"))]
)
def test_ranks_of_large_jobs_have_few_peers_and_messages(name, monkeypatch):
    """Models with experts have 16 layers here: the peers of all layers, and a share of their messages."""
    folder, sizes, ranks, tensor, whole_experts, layers = LARGE[name]
    config = AutoConfig.from_pretrained(MODELS / folder)
    most_messages = 1000
    if whole_experts:
        config.num_hidden_layers = 16
        # Each peer may have one message that is not full.
        most_messages = 1000 * 16 // layers + 64
    actor = ParallelLayout(tuple(range(ranks)), **sizes)
    plan = plan_offline(
        config, actor, actor.ranks, tensor, torch.bfloat16, ranks_per_node=8, whole_experts=whole_experts
    )
    assert max(plan.peer_counts.values()) <= 64
    assert max(plan.sent.values()) <= 1.05 * least_sent(plan)
    monkeypatch.setattr("megatron_rl.weights.plan.MAX_MESSAGES", most_messages)
    assert schedule_phases(plan, HybridEngineConfig.staging_bytes).max_messages_per_rank <= most_messages

    shape = describe_model(config).shape
    stages = end_settings(shape.layers, actor.pipeline, actor.virtual_pipeline)
    shared = shared_bytes(shape, actor, tensor, 2, settings=stages, whole_experts=whole_experts)
    order = best_rank_order(shared, actor.ranks, 8)
    near = Counter(rank for pair in plan.pair_bytes for rank in pair if pair[0] // 8 == pair[1] // 8)
    assert max(near.values(), default=0) <= 2 * max_peers_on_node(shared, actor, order, 8)
