"""Where a model would lie in any layout, computed from its config alone: no rank and no memory needed."""

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
    """Return the boxes that every rank of a layout would hold of a model, or of its adapters alone.

    A rank is in two groups where the model has experts, which are cut in their own way. Storages are
    parameter names with layers counted over the whole model.
    """
    model = model_spec(hf_config, layout, dtype, overrides).model
    if lora is not None:
        model = adapted(model, lora.rank, None, lora.targets)
    shape, names = model.shape, model.tensor_shapes()

    def group(shapes: Shapes, shard: Shard, ranks: list[int]) -> BoxGroup:
        parameters = {name: torch.empty(size, dtype=dtype, device="meta") for name, size in shapes.items()}
        boxes = trace_import(parameters, model, shard, -1, shapes=names)
        return BoxGroup(tuple(ranks), tuple(boxes), dict.fromkeys(shapes, dtype))

    groups = []
    stages = stage_layers(shape.layers, layout, overrides)
    for stage, ranks in enumerate(layout.groups("tensor", "context", "data")):
        dense: dict[int, list[int]] = {}
        sparse: dict[tuple[int, int], list[int]] = {}
        for position, rank in enumerate(ranks):
            dense.setdefault(position % layout.tensor, []).append(rank)
            rest, expert_tensor = divmod(position, layout.expert_tensor)
            sparse.setdefault((rest % layout.expert, expert_tensor), []).append(rank)
        layers, first, last = stages[stage], stage == 0, stage == layout.pipeline - 1
        for tensor, members in dense.items():
            parameters = dense_shapes(model, layout, layers, first, last)
            groups.append(group(parameters, Shard(tensor, layout.tensor), members))
        if shape.experts:
            for (expert, expert_tensor), members in sparse.items():
                parameters = expert_shapes(model, layout, layers)
                shard = Shard(0, layout.tensor, expert, layout.expert, expert_tensor, layout.expert_tensor)
                groups.append(group(parameters, shard, members))
    return [holders for holders in groups if holders.boxes]


def dense_shapes(
    model: PretrainedModel, layout: ParallelLayout, layers: list[int], first: bool, last: bool
) -> Shapes:
    """Return the shapes of a rank's parameters outside the experts, as Megatron's own layers name them."""
    shapes = {weight.name: weight for weight in model.outer(first, last)}
    for layer in layers:
        for weight in model.weights(layer):
            if not weight.expert:
                shapes[f"decoder.layers.{layer}.{weight.name}"] = weight
    return {name: weight.local_shape(layout.tensor) for name, weight in shapes.items()}


def expert_shapes(model: PretrainedModel, layout: ParallelLayout, layers: list[int]) -> Shapes:
    """Return the shapes of a rank's experts, one module each."""
    shapes: Shapes = {}
    for layer in layers:
        weights = [weight for weight in model.weights(layer) if weight.expert]
        for expert in range(model.shape.experts // layout.expert if weights else 0):
            for weight in weights:
                name = f"decoder.layers.{layer}.{weight.name.format(expert=expert)}"
                shapes[name] = weight.local_shape(layout.expert_tensor)
    return shapes
