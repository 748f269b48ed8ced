"""Where a model would lie in any layout, computed from its config alone: no rank and no memory needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_rl.parallel.boxes import BoxGroup
from megatron_rl.parallel.hf.config import ModelSpec, model_spec
from megatron_rl.parallel.hf.importer import Shard
from megatron_rl.parallel.hf.names import checkpoint_shapes
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
    names = checkpoint_shapes(hf_config)

    def group(shapes: Shapes, shard: Shard, ranks: list[int]) -> BoxGroup:
        parameters = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        boxes = trace_import(parameters, hf_config, shard, -1, shapes=names)
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
        if spec.family.moe is not None:
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
    """Return the shapes of a rank's parameters outside the experts, as the local layer spec names them."""
    config: Any = spec.transformer_config
    hidden, tensor = config.hidden_size, layout.tensor
    vocabulary = (spec.padded_vocab_size // tensor, hidden)
    shapes: Shapes = {"embedding.word_embeddings.weight": vocabulary} if first else {}
    for layer in layers:
        own: Shapes = {"input_layernorm.weight": (hidden,), "pre_mlp_layernorm.weight": (hidden,)}
        if spec.family.sandwich:
            behind = ("self_attention.linear_proj", "mlp.linear_fc2")
            own |= {f"{name}.post_layernorm.weight": (hidden,) for name in behind}
        own |= _latent_attention(config, tensor) if spec.family.mla else _attention(config, tensor)
        if not spec.family.is_moe_layer(spec.hf_config, layer):
            own |= _mlp("mlp.", config, config.ffn_hidden_size // tensor)
        else:
            own["mlp.router.weight"] = (config.num_moe_experts, hidden)
            if config.moe_router_enable_expert_bias:
                own["mlp.router.expert_bias"] = (config.num_moe_experts,)
            if config.moe_shared_expert_intermediate_size:
                width = config.moe_shared_expert_intermediate_size // tensor
                own |= _mlp("mlp.shared_experts.", config, width)
        shapes |= {f"decoder.layers.{layer}.{name}": shape for name, shape in own.items()}
    if last:
        shapes["decoder.final_layernorm.weight"] = (hidden,)
        if not (spec.tied and first):
            shapes["output_layer.weight"] = vocabulary
    return shapes


def _attention(config: Any, tensor: int) -> Shapes:
    hidden, dim = config.hidden_size, config.kv_channels
    queries = config.num_attention_heads * dim // tensor
    fused = queries + 2 * config.num_query_groups * dim // tensor
    shapes: Shapes = {
        "self_attention.linear_qkv.weight": (fused, hidden),
        "self_attention.linear_proj.weight": (hidden, queries),
    }
    if config.add_qkv_bias:
        shapes["self_attention.linear_qkv.bias"] = (fused,)
    if config.add_bias_linear:
        shapes["self_attention.linear_proj.bias"] = (hidden,)
    if config.qk_layernorm:
        shapes |= {f"self_attention.{kind}_layernorm.weight": (dim,) for kind in "qk"}
    return shapes


def _latent_attention(config: Any, tensor: int) -> Shapes:
    """Return multi-latent attention's shapes; the local spec cuts its down projections by rows too."""
    hidden, heads, latent = config.hidden_size, config.num_attention_heads // tensor, config.kv_lora_rank
    queries = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    shapes: Shapes = {
        "self_attention.linear_kv_down_proj.weight": (
            (latent + config.qk_pos_emb_head_dim) // tensor,
            hidden,
        ),
        "self_attention.kv_layernorm.weight": (latent,),
        "self_attention.linear_kv_up_proj.weight": (heads * (config.qk_head_dim + config.v_head_dim), latent),
        "self_attention.linear_proj.weight": (hidden, heads * config.v_head_dim),
    }
    if config.q_lora_rank is None:
        return shapes | {"self_attention.linear_q_proj.weight": (queries, hidden)}
    return shapes | {
        "self_attention.linear_q_down_proj.weight": (config.q_lora_rank // tensor, hidden),
        "self_attention.q_layernorm.weight": (config.q_lora_rank,),
        "self_attention.linear_q_up_proj.weight": (queries, config.q_lora_rank),
    }


def _mlp(prefix: str, config: Any, width: int) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {
        f"{prefix}linear_fc1.weight": (2 * width, hidden),
        f"{prefix}linear_fc2.weight": (hidden, width),
    }
    if config.add_bias_linear:
        shapes |= {f"{prefix}linear_fc1.bias": (2 * width,), f"{prefix}linear_fc2.bias": (hidden,)}
    return shapes


def expert_shapes(spec: ModelSpec, layout: ParallelLayout, layers: list[int]) -> Shapes:
    """Return the shapes of a rank's experts, one module each."""
    config: Any = spec.transformer_config
    width = config.moe_ffn_hidden_size // layout.expert_tensor
    shapes: Shapes = {}
    for layer in layers:
        if not spec.family.is_moe_layer(spec.hf_config, layer):
            continue
        for expert in range(config.num_moe_experts // layout.expert):
            prefix = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}."
            shapes[prefix + "linear_fc1.weight"] = (2 * width, config.hidden_size)
            shapes[prefix + "linear_fc2.weight"] = (config.hidden_size, width)
    return shapes
