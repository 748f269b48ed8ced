"""Boxes of a model in any layout, computed from its config alone, without ranks or memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.megatron.model_spec import model_spec
from megatron_rl.megatron.parameter_mapping import Shard, trace_import
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import Lora, adapted
from megatron_rl.shapes.pipeline_stages import stage_layers
from megatron_rl.shapes.pretrained import PretrainedModel
from megatron_rl.weights.boxes import BoxGroup

Shapes = dict[str, tuple[int, ...]]


def megatron_layout(
    hf_config: Any,
    layout: ParallelLayout,
    dtype: torch.dtype,
    overrides: Mapping[str, Any] | None = None,
    lora: Lora | None = None,
) -> list[BoxGroup]:
    """Return the boxes of a model, or with ``lora`` of its adapters alone, on every rank of a layout.

    If the model has experts, which are sharded differently, a rank is in two groups. Storages are parameter
    names with layers numbered over the whole model.
    """
    model = model_spec(hf_config, layout, dtype, overrides).model
    if lora is not None:
        model = adapted(model, lora.rank, None, lora.targets)
    hf_shapes = model.tensor_shapes()

    def trace_group(shapes: Shapes, shard: Shard, ranks: list[int]) -> BoxGroup:
        parameters = {name: torch.empty(size, dtype=dtype, device="meta") for name, size in shapes.items()}
        boxes = trace_import(parameters, model, shard, -1, shapes=hf_shapes)
        return BoxGroup(tuple(ranks), tuple(boxes), dict.fromkeys(shapes, dtype))

    # Each pipeline stage has its own layers; its ranks differ by their shards.
    groups = []
    stages = stage_layers(model.shape.layers, layout, overrides)
    for stage, stage_ranks in enumerate(layout.groups("tensor", "context", "data")):
        # Ranks of a stage by tensor-parallel rank, and by expert-parallel and expert-tensor-parallel rank.
        dense_ranks: dict[int, list[int]] = {}
        expert_ranks: dict[tuple[int, int], list[int]] = {}
        for position, rank in enumerate(stage_ranks):
            dense_ranks.setdefault(position % layout.tensor, []).append(rank)
            outer_position, expert_tensor = divmod(position, layout.expert_tensor)
            expert_ranks.setdefault((outer_position % layout.expert, expert_tensor), []).append(rank)

        layers = stages[stage]
        is_first = stage == 0
        is_last = stage == layout.pipeline - 1
        for tensor, ranks in dense_ranks.items():
            parameters = dense_shapes(model, layout, layers, is_first, is_last)
            groups.append(trace_group(parameters, Shard(tensor, layout.tensor), ranks))

        if model.shape.experts:
            for (expert, expert_tensor), ranks in expert_ranks.items():
                parameters = expert_shapes(model, layout, layers)
                shard = Shard(0, layout.tensor, expert, layout.expert, expert_tensor, layout.expert_tensor)
                groups.append(trace_group(parameters, shard, ranks))

    return [group for group in groups if group.boxes]


def dense_shapes(
    model: PretrainedModel,
    layout: ParallelLayout,
    layers: list[int],
    first: bool,
    last: bool,
) -> Shapes:
    """Return the shapes of a rank's parameters outside the experts, by Megatron's parameter names."""
    weights = {weight.name: weight for weight in model.outer(first, last)}
    for layer in layers:
        for weight in model.weights(layer):
            if not weight.expert:
                weights[f"decoder.layers.{layer}.{weight.name}"] = weight

    return {name: weight.local_shape(layout.tensor) for name, weight in weights.items()}


def expert_shapes(
    model: PretrainedModel,
    layout: ParallelLayout,
    layers: list[int],
) -> Shapes:
    """Return the shapes of the parameters of a rank's experts, where each expert is a separate module."""
    shapes: Shapes = {}
    for layer in layers:
        weights = [weight for weight in model.weights(layer) if weight.expert]
        # Some layers of a mixture-of-experts model are dense.
        if not weights:
            continue

        local_experts = model.shape.experts // layout.expert
        for expert in range(local_experts):
            for weight in weights:
                name = f"decoder.layers.{layer}.{weight.name.format(expert=expert)}"
                shapes[name] = weight.local_shape(layout.expert_tensor)
    return shapes
