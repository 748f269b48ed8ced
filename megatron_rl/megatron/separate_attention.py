"""Attention with a separate head size and number of key-value heads in each layer (Gemma 4).

Megatron has one head size and one number of key-value heads for all layers. The attention of this module
uses a copy of the configuration, with the sizes of its layer.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron_rl.shapes.blocks.attention import Attention


class PerLayerSelfAttention(SelfAttention):
    """Self-attention whose head size and number of key-value heads differ from the TransformerConfig.

    With ``keys_are_values`` there is no projection to values: a head's value is its key before norm and
    rotary embedding. With ``value_norm`` each value is divided by its root mean square.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        *args: Any,
        head_dim: int,
        kv_heads: int,
        keys_are_values: bool,
        value_norm: bool,
        **kwargs: Any,
    ) -> None:
        layer_config = copy(config)
        layer_config.kv_channels = head_dim
        layer_config.num_query_groups = kv_heads
        if keys_are_values:
            linear_class = _narrow_projection(submodules.linear_qkv, kv_heads * head_dim)
            submodules = replace(submodules, linear_qkv=linear_class)
        super().__init__(layer_config, submodules, *args, **kwargs)
        self.kv_heads = kv_heads
        self.keys_are_values = keys_are_values
        self.value_norm = value_norm

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute this rank's queries [T, 1, heads, size], and keys and values [T, 1, groups, size].

        The outputs of the projection are ordered by key-value group: the group's queries, its key and its
        value. With ``keys_are_values`` there are no values. Collective over the tensor-parallel group if
        ranks share key-value heads.
        """
        projected, _ = self.linear_qkv(hidden_states)
        head_dim = self.hidden_size_per_attention_head
        ranks_per_group = max(1, self.world_size // self.kv_heads)
        rank = self.pg_collection.tp.rank()
        if ranks_per_group > 1:
            # A rank's outputs may begin and end inside a group: gather them, and select the rank's group.
            projected = mappings.all_gather_last_dim_from_tensor_parallel_region(
                projected, group=self.pg_collection.tp
            )
            projected = projected.chunk(self.kv_heads, dim=-1)[rank // ranks_per_group]

        local_groups = self.num_query_groups_per_partition
        heads = projected.unflatten(-1, (local_groups, -1, head_dim))
        queries_per_group = self.num_attention_heads_per_partition // local_groups
        query = heads[..., :queries_per_group, :].flatten(-3, -2)
        key = heads[..., queries_per_group, :]
        value = key
        if not self.keys_are_values:
            value = heads[..., queries_per_group + 1, :]
        if ranks_per_group > 1:
            # The ranks that share a group have different queries of the group.
            query = query.chunk(ranks_per_group, dim=-2)[rank % ranks_per_group]

        # Megatron annotates the norms with a type that is not callable.
        modules: Any = self
        if modules.q_layernorm is not None:
            query = modules.q_layernorm(query)
        if modules.k_layernorm is not None:
            key = modules.k_layernorm(key)
        if self.value_norm:
            normalised = functional.rms_norm(
                value.to(torch.promote_types(value.dtype, torch.float32)),
                (head_dim,),
                eps=self.config.layernorm_epsilon,
            )
            value = normalised.to(value.dtype)
        return query, key, value


def per_layer_attention_spec(layer: Any, mixer: Attention) -> Any:
    """Return a copy of a layer's spec with a `PerLayerSelfAttention` for the attention of this layer.

    ``mixer`` has the layer's head size and number of key-value heads, which differ from the
    TransformerConfig. It also determines whether keys are values and whether values are normalised.
    """
    attention = layer.submodules.self_attention
    params = dict(attention.params or {})
    params["head_dim"] = mixer.head_dim
    params["kv_heads"] = mixer.kv_heads
    params["keys_are_values"] = mixer.keys_are_values
    params["value_norm"] = mixer.value_norm
    attention = replace(attention, module=PerLayerSelfAttention, params=params)

    layer_modules = replace(layer.submodules, self_attention=attention)
    return replace(layer, submodules=layer_modules)


def _narrow_projection(linear: Any, num_removed: int) -> type:
    """Return a subclass of the projection ``linear`` that is built with ``num_removed`` fewer outputs."""

    def __init__(self: Any, input_size: int, output_size: int, *args: Any, **kwargs: Any) -> None:
        linear.__init__(self, input_size, output_size - num_removed, *args, **kwargs)

    return type(linear.__name__, (linear,), {"__init__": __init__})
