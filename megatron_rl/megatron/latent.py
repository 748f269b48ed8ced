"""Run Megatron's multi-latent attention (DeepSeek-AI 2024) on packed rows, without Transformer Engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer import multi_latent_attention
from torch import Tensor

from megatron_rl.config.derive import has_transformer_engine
from megatron_rl.megatron.layers import PackedRotaryEmbedding, RowAttention


def allow_without_transformer_engine() -> None:
    """Clear Megatron's flag of Transformer Engine for latent attention if it is absent. Idempotent."""
    if not has_transformer_engine():
        module: Any = multi_latent_attention
        module.HAVE_TE = False


class LatentSelfAttention(multi_latent_attention.MLASelfAttention):
    """Latent attention with the projections and norms of the layer's spec, in any version of Megatron-Core.

    Megatron-Core 0.19 selects some modules itself: it builds a norm of the query even if the query is not
    compressed, which DeepSeek's models do not have, and refuses to build a norm without Transformer Engine.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def fit_latent_spec(layer: Any, group: Any) -> None:
    """Make a layer's spec build `LatentSelfAttention` in the tensor-parallel ``group``."""
    attention = layer.submodules.self_attention
    attention.module = LatentSelfAttention
    attention.submodules.linear_q_proj = _in_group(attention.submodules.linear_q_proj, group)


def _in_group(linear: type, group: Any) -> type:
    """Return a subclass of a projection whose default tensor-parallel group is ``group``.

    Megatron passes no group for a query that is not compressed, and would use the process-global one.
    """

    def __init__(self: Any, *args: Any, tp_group: Any = None, **kwargs: Any) -> None:
        linear.__init__(self, *args, tp_group=tp_group or group, **kwargs)

    return type(linear.__name__, (linear,), {"__init__": __init__})


def prepare_latent_attention(chunk: Any, inverse_frequencies: Tensor) -> None:
    """Adapt every layer of a GPTModel chunk to packed rows.

    A user's own attention and its rotary angles are not replaced. In all layers the projections to latents
    return complete latents; their gradients are summed over tensor-parallel ranks and counted once in the
    norm.
    """
    for layer in chunk.decoder.layers:
        attention = layer.self_attention
        config = attention.config
        if isinstance(attention.core_attention, RowAttention):
            # Megatron's fused kernel would derive positions from row boundaries.
            config.apply_rope_fusion = False
            device = next(layer.parameters()).device
            scaled = config.rope_type == "yarn"
            attention.rotary_pos_emb = _LatentRotaryEmbedding(inverse_frequencies.to(device), scaled)
        if attention.pg_collection.tp.size() == 1:
            continue

        # Projections with the sizes of their latent and of a key that all heads share.
        projections = [(attention.linear_kv_down_proj, config.kv_lora_rank, config.qk_pos_emb_head_dim)]
        if config.q_lora_rank is not None:
            projections.append((attention.linear_q_down_proj, config.q_lora_rank, 0))
        for linear, latent_size, key_size in projections:
            gather = partial(_gather_latent, attention.pg_collection.tp, config.sequence_parallel)
            linear.register_forward_hook(partial(gather, latent_size, key_size))
            if len(linear.weight) == latent_size + key_size:
                # Transformer Engine marks every weight as sharded, and the norm would count each rank's copy.
                setattr(linear.weight, "tensor_model_parallel", False)


def _gather_latent(
    group: Any,
    sequence_parallel: bool,
    latent_size: int,
    key_size: int,
    module: Any,
    inputs: Any,
    output: tuple[Tensor, Any],
) -> tuple[Tensor, Any]:
    """Gather a projection [.., latent + key] completely, so that Megatron does not gather it.

    The heads of all ranks use the key, but Megatron's gather, over the process-global group, would return to
    it only the gradient of each rank's own heads.
    """
    projected, bias = output
    if projected.shape[-1] != latent_size + key_size:
        # The weight is sharded by columns.
        projected = mappings.gather_from_tensor_model_parallel_region(projected, group)
        if sequence_parallel:
            return mappings.scatter_to_sequence_parallel_region(projected, group), bias
    if key_size and not sequence_parallel:
        compressed, key = projected.split((latent_size, key_size), dim=-1)
        key = mappings.copy_to_tensor_model_parallel_region(key, group)
        projected = torch.cat((compressed, key), dim=-1)
    return projected, bias


class _LatentRotaryEmbedding(PackedRotaryEmbedding):
    """Return angles [T, 1, rotary size]: Megatron drops the batch dimension of packed latent attention."""

    def __init__(self, inverse_frequencies: Tensor, scaled: bool) -> None:
        super().__init__(inverse_frequencies)
        self._scaled = scaled

    def forward(self, length: int, **kwargs: Any) -> Any:
        angles = super().forward(length, **kwargs).squeeze(1)
        # A scaled embedding also returns the factor of cos and sin, which is 1 here.
        return (angles, 1.0) if self._scaled else angles
