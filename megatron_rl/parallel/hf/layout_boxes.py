"""Where a model would lie in any layout, computed from its config alone: no rank and no memory needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_rl.parallel.boxes import BoxGroup
from megatron_rl.parallel.hf.importer import Shard
from megatron_rl.parallel.hf.model_spec import ModelSpec, model_spec
from megatron_rl.parallel.hf.weights import trace_import
from megatron_rl.shapes.layout import ParallelLayout

Shapes = dict[str, tuple[int, ...]]


def megatron_layout(
    hf_config: Any,
    layout: ParallelLayout,
    dtype: torch.dtype,
    overrides: Mapping[str, Any] | None = None,
) -> list[BoxGroup]:
    """Return the boxes that every rank of a layout would hold of a model.

    A rank is in two groups where the model has experts, which are cut in their own way. Storages are
    parameter names with layers counted over the whole model.
    """
    spec = model_spec(hf_config, layout, dtype, overrides)
    names = spec.model.tensor_shapes()

    def group(shapes: Shapes, shard: Shard, ranks: list[int]) -> BoxGroup:
        parameters = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        boxes = trace_import(parameters, spec.model, shard, -1, shapes=names)
        return BoxGroup(tuple(ranks), tuple(boxes), dict.fromkeys(shapes, dtype))

    groups = []
    for stage, ranks in enumerate(stage_ranks(layout)):
        dense: dict[int, list[int]] = {}
        sparse: dict[tuple[int, int], list[int]] = {}
        for position, rank in enumerate(ranks):
            dense.setdefault(position % layout.tensor, []).append(rank)
            rest, expert_tensor = divmod(position, layout.expert_tensor)
            sparse.setdefault((rest % layout.expert, expert_tensor), []).append(rank)
        layers = stage_layers(spec, layout, stage)
        first, last = stage == 0, stage == layout.pipeline - 1
        for tensor, members in dense.items():
            shapes = dense_shapes(spec, layout, layers, first, last)
            groups.append(group(shapes, Shard(tensor, layout.tensor), members))
        if spec.model.shape.experts:
            for (expert, expert_tensor), members in sparse.items():
                shapes = expert_shapes(spec, layout, layers)
                shard = Shard(0, layout.tensor, expert, layout.expert, expert_tensor, layout.expert_tensor)
                groups.append(group(shapes, shard, members))
    return [found for found in groups if found.boxes]


def stage_ranks(layout: ParallelLayout) -> list[tuple[int, ...]]:
    """Return the ranks of each pipeline stage, in layout order."""
    size = layout.size // layout.pipeline
    return [layout.ranks[stage * size : (stage + 1) * size] for stage in range(layout.pipeline)]


def stage_layers(spec: ModelSpec, layout: ParallelLayout, stage: int) -> list[int]:
    """Return the layers, counted over the whole model, that a pipeline stage holds."""
    config = spec.transformer_config
    layers: list[int] = []
    for chunk in range(layout.virtual_pipeline):
        virtual = chunk if layout.virtual_pipeline > 1 else None
        offset = get_transformer_layer_offset(config, virtual, stage)
        count = get_num_layers_to_build(config, virtual, stage)
        layers += range(offset, offset + count)
    return layers


def dense_shapes(
    spec: ModelSpec, layout: ParallelLayout, layers: list[int], first: bool, last: bool
) -> Shapes:
    """Return the shapes of a rank's parameters outside the experts, as Megatron's own layers name them."""
    shape = spec.model.shape
    vocabulary = (spec.padded_vocab_size // layout.tensor, shape.hidden)
    shapes: Shapes = {"embedding.word_embeddings.weight": vocabulary} if first else {}
    for layer in layers:
        for weight in shape.weights(layer):
            if not weight.expert:
                shapes[f"decoder.layers.{layer}.{weight.name}"] = weight.local_shape(layout.tensor)
    if last:
        shapes["decoder.final_layernorm.weight"] = (shape.hidden,)
        if shape.scalar_head:
            shapes["output_layer.weight"] = (1, shape.hidden)
        elif not (shape.tied and first):
            shapes["output_layer.weight"] = vocabulary
    return shapes


def expert_shapes(spec: ModelSpec, layout: ParallelLayout, layers: list[int]) -> Shapes:
    """Return the shapes of a rank's experts, one module each."""
    shape = spec.model.shape
    shapes: Shapes = {}
    for layer in layers:
        weights = [weight for weight in shape.weights(layer) if weight.expert]
        for expert in range(shape.experts // layout.expert if weights else 0):
            for weight in weights:
                name = f"decoder.layers.{layer}.{weight.name.format(expert=expert)}"
                shapes[name] = weight.local_shape(layout.expert_tensor)
    return shapes
