"""The memory of a run, role by role."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from config_workspace import CONFIG, write_workspace

from megatron_rl.config.budget import memory_plan, optimizer_bytes_per_parameter, optimizer_checkpoint_bytes
from megatron_rl.config.derive import batch_plan, resolve
from megatron_rl.config.load import load_text
from megatron_rl.config.placement import role_layouts, sleeping_ranks
from megatron_rl.config.sections.models import CriticConfig, LoraConfig, OptimizerConfig, ReferenceConfig
from megatron_rl.distributed import device
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import TARGETS
from megatron_rl.shapes.model import DTYPE_BYTES, ModelShape
from megatron_rl.trainer.memory_report import out_of_memory_error

SHAPE = ModelShape("Qwen2ForCausalLM", 128, 8, 8, 4, 32, 384, 21, 1 << 20, qkv_bias=True)


def gradients(role: str, shapes: dict[str, ModelShape], layout: ParallelLayout, **megatron: int) -> list[int]:
    """Return the bytes of gradients of a role on every kind of rank."""
    config = load_text(CONFIG).valid()
    config = replace(config, critic=CriticConfig(), actor=replace(config.actor, megatron=megatron))
    layouts = dict.fromkeys(("actor", "critic"), layout) | {"rollout": ParallelLayout((0,))}
    name = "gradients" if role == "actor" else f"{role} gradients"
    ranks = memory_plan(config, layouts, shapes, batch_plan(config, layouts))
    return [item.bytes for rank in ranks for item in rank.items if item.name == name]


def test_every_role_is_counted_by_its_own_shape() -> None:
    small = replace(SHAPE, layers=4)
    (whole,) = gradients("critic", {"actor": SHAPE}, ParallelLayout((0,)))
    (half,) = gradients("critic", {"actor": SHAPE, "critic": small}, ParallelLayout((0,)))
    assert whole - half == 4 * (SHAPE.nonexpert_layer_parameters - small.nonexpert_layer_parameters)
    assert half == 4 * (small.parameters - small.head_parameters + small.hidden)


def test_roles_on_one_rank_work_in_turn() -> None:
    config = load_text(CONFIG).valid()
    config = replace(config, critic=CriticConfig(), reference=ReferenceConfig())
    layout = ParallelLayout((0,))
    layouts: dict[str, ParallelLayout] = dict.fromkeys(("actor", "critic", "reference", "rollout"), layout)
    (rank,) = memory_plan(config, layouts, {"actor": SHAPE}, batch_plan(config, layouts))
    size = {item.name: item.bytes for item in rank.items}
    stays = sum(item.bytes for item in rank.items if item.active_role is None and "learn" in item.phases)
    # The critic has updated, and let its activations go, before the actor begins.
    assert size["critic activations"] == size["activations"] > 0
    assert rank.phase_peak("learn") == stays + size["activations"] + size["logits chunk"]
    # The reference makes a forward pass of its own: alone on a rank it needs the same as the actor.
    assert size["reference forward activations"] == size["forward activations"] > 0
    assert size["reference logits chunk"] == size["logits chunk"] > 0
    assert rank.phase_peak("score") == stays + size["forward activations"] + size["logits chunk"]


def test_a_role_that_offloads_is_on_the_device_in_its_turn_alone() -> None:
    config = load_text(CONFIG).valid()
    config = replace(
        config,
        actor=replace(config.actor, offload=True),
        critic=CriticConfig(offload=True),
        reference=ReferenceConfig(offload=True),
    )
    layout = ParallelLayout((0,))
    layouts: dict[str, ParallelLayout] = dict.fromkeys(("actor", "critic", "reference", "rollout"), layout)
    (rank,) = memory_plan(config, layouts, {"actor": SHAPE}, batch_plan(config, layouts))
    size = {item.name: item.bytes for item in rank.items}
    held = ("weights", "gradients", "optimizer", "activations", "logits chunk")
    learning = [size[f"actor {held[0]}"] + sum(size[name] for name in held[1:])]
    learning.append(sum(size.get(f"critic {name}", 0) for name in held))
    assert rank.phase_peak("learn") == max(learning)
    scoring = size["actor weights"] + size["forward activations"] + size["logits chunk"]
    assert rank.phase_peak("score") == scoring
    # Adapters' reference computes with the actor's weights: they are there in its turn, too.
    adapted = replace(config, actor=replace(config.actor, lora=LoraConfig()), critic=None)
    adapted = resolve(adapted, 4, shape=SHAPE).config
    layouts = role_layouts(adapted, 4)
    rank, *_ = memory_plan(adapted, layouts, {"actor": SHAPE}, batch_plan(adapted, layouts))
    active_roles = {item.name: item.active_role for item in rank.items}
    assert active_roles["actor weights"] is None and active_roles["gradients"] == "actor"


def test_uneven_stages_are_counted_as_they_are() -> None:
    layout = ParallelLayout((0, 1), pipeline=2)
    even = gradients("actor", {"actor": SHAPE}, layout)
    uneven = gradients("actor", {"actor": SHAPE}, layout, num_layers_in_first_pipeline_stage=2)
    assert sum(even) == sum(uneven)
    layer = 4 * SHAPE.nonexpert_layer_parameters // SHAPE.layers
    assert max(uneven) - max(even) == 2 * layer


@pytest.mark.parametrize(
    ("optimizer", "weight_bytes", "expected"),
    [
        (OptimizerConfig(), 4, 8),
        (OptimizerConfig(), 2, 12),
        (OptimizerConfig(name="sgd"), 2, 8),
        (OptimizerConfig(offload=True), 2, 16),
        (OptimizerConfig(megatron={"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}), 2, 8),
    ],
)
def test_optimizer_state_is_counted_as_it_is_kept(
    optimizer: OptimizerConfig, weight_bytes: int, expected: int
) -> None:
    assert optimizer_bytes_per_parameter(optimizer, weight_bytes) == expected


def test_an_optimizer_on_the_host_takes_nothing_on_the_device() -> None:
    config = load_text(CONFIG).valid()
    offloaded = replace(config.actor, optimizer=OptimizerConfig(offload=True))
    ranks = []
    for actor in (config.actor, offloaded):
        resolved = resolve(replace(config, actor=actor), 4, shape=SHAPE).config
        layouts = role_layouts(resolved, 4)
        ranks.append(memory_plan(resolved, layouts, {"actor": SHAPE}, batch_plan(resolved, layouts))[0])
    on_device, on_host = ranks
    states, copies = ({item.name: item for item in rank.items}["optimizer"] for rank in ranks)
    assert copies.bytes == 2 * states.bytes and on_device.peak - on_host.peak == states.bytes
    assert optimizer_checkpoint_bytes(copies.bytes, OptimizerConfig(offload=True), 4) == copies.bytes * 3 // 4
    assert optimizer_checkpoint_bytes(states.bytes, OptimizerConfig(), 4) == copies.bytes * 3 // 4


def test_adapters_alone_have_gradients_and_the_reference_is_their_base() -> None:
    config = load_text(CONFIG).valid()
    actor = replace(config.actor, lora=LoraConfig(rank=4))
    config = resolve(replace(config, actor=actor, reference=ReferenceConfig()), 4, shape=SHAPE).config
    assert config.actor.lora is not None and config.actor.lora.targets == TARGETS
    layouts = role_layouts(config, 4)
    ranks = memory_plan(config, layouts, {"actor": SHAPE}, batch_plan(config, layouts))
    size = {item.name: item.bytes for item in ranks[0].items}
    # Of each tensor A has rank x inputs, B outputs x rank; one of them is cut over two tensor ranks.
    attention = 3 * 128 + (256 + 2 * 128) // 2 + 256 // 2 + 128
    mlp = 2 * (128 + 384 // 2) + 384 // 2 + 128
    assert size["gradients"] == 4 * 4 * (SHAPE.layers // 2) * (attention + mlp)
    assert size["optimizer"] == 2 * size["gradients"]
    assert size["reference weights"] == 0 < size["merged weights"] < size["actor weights"]


def test_the_base_of_two_roles_adapters_counts_once() -> None:
    config = load_text(CONFIG).valid()
    lora = LoraConfig(rank=4)
    weights = []
    for layout in (None, replace(config.actor.layout, tensor=1)):
        critic = CriticConfig(lora=lora, layout=layout)
        config = replace(config, actor=replace(config.actor, lora=lora), critic=critic)
        resolved = resolve(config, 4, shape=SHAPE).config
        layouts = role_layouts(resolved, 4)
        ranks = memory_plan(resolved, layouts, {"actor": SHAPE}, batch_plan(resolved, layouts))
        items = {item.name: item for rank in ranks for item in rank.items}
        weights.append(items["critic weights"])
        alone = items["critic gradients"].bytes // 4 * DTYPE_BYTES[resolved.model.dtype]
        assert (weights[-1].bytes == alone) == (layout is None)
    assert weights[0].bytes < weights[1].bytes
    assert "over the actor's base" in weights[0].how
    assert "a separate base: critic.layout is not the actor's" in weights[1].how


def test_an_engine_sleeps_only_where_another_role_shares_its_ranks() -> None:
    rollout = ParallelLayout((1, 2, 3, 4, 5, 6), tensor=2)
    layouts = {"actor": ParallelLayout((0, 1)), "reference": ParallelLayout((6,)), "rollout": rollout}
    # Whole replicas: of ranks 1 and 2 rank 1 is shared.
    assert sleeping_ranks(layouts) == {1, 2, 5, 6}
    assert not sleeping_ranks({"actor": ParallelLayout((0,)), "rollout": rollout})
    config = load_text(CONFIG).valid()
    held = {}
    for ranks in ((0,), (1,)):
        layouts = {"actor": ParallelLayout((0,)), "rollout": ParallelLayout(ranks)}
        plan = memory_plan(config, layouts, {"actor": SHAPE}, batch_plan(config, layouts))
        held |= {ranks: {i.name: i.phases for rank in plan for i in rank.items if "cache" in i.name}}
    assert held == {
        (0,): {"key-value cache": ("generate",)},
        (1,): {"key-value cache": ("generate", "score", "learn")},
    }


@pytest.mark.slow
def test_the_report_of_a_full_device_has_the_estimate_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_workspace(Path())
    monkeypatch.setattr(device, "world_size", lambda: 4)
    # The second of two pipeline stages has most of the memory, and each stage has two equal ranks.
    overrides = ["actor.megatron.num_layers_in_first_pipeline_stage=1"]
    config = load_text(CONFIG, overrides).valid()
    estimates = []
    for rank in range(4):
        monkeypatch.setattr(device, "rank", lambda rank=rank: rank)
        report = out_of_memory_error(config, torch.OutOfMemoryError("full"), f"rank {rank}", "learn", 1)
        assert report is not None
        estimates.append(report.expected)
    assert all("GiB in the phase learn, as `check` estimates" in str(text) for text in estimates), estimates
    assert estimates[0] == estimates[1] != estimates[2] == estimates[3]
