"""Let Megatron's multi-latent attention (DeepSeek-AI 2024) run on packed rows without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer import multi_latent_attention
from torch import Tensor, nn

from megatron_rl.parallel import tensor_scope
from megatron_rl.parallel.layers import PackedAttention, PackedRotaryEmbedding, has_transformer_engine


def allow_without_transformer_engine() -> None:
    """Correct what Megatron's latent attention takes for granted here. May be repeated.

    It believes that Transformer Engine is installed, and it gathers its cut down projections over the
    process-global tensor-parallel group.
    """
    if not has_transformer_engine():
        module: Any = multi_latent_attention
        module.HAVE_TE = False
        module.gather_from_tensor_model_parallel_region = lambda value: (
            mappings.gather_from_tensor_model_parallel_region(value, group=tensor_scope.group())
        )
        module.scatter_to_sequence_parallel_region = lambda value: (
            mappings.scatter_to_sequence_parallel_region(value, group=tensor_scope.group())
        )


def prepare_latent_attention(chunk: Any, inverse_frequencies: Tensor) -> None:
    """Give every layer of a GPTModel chunk the rotary angles and attention of packed rows.

    Layers whose attention is Transformer Engine's are left as they are.
    """
    for layer in chunk.decoder.layers:
        attention = layer.self_attention
        if isinstance(attention.core_attention, PackedAttention):
            device = next(layer.parameters()).device
            scaled = attention.config.rope_type == "yarn"
            attention.rotary_pos_emb = _LatentRotaryEmbedding(inverse_frequencies.to(device), scaled)
            attention.core_attention = _LatentAttention(attention.core_attention)
            tensor_scope.bind(attention)


class _LatentRotaryEmbedding(PackedRotaryEmbedding):
    """Return angles [T, 1, rotary size]: Megatron drops the batch dimension of packed latent attention."""

    def __init__(self, inverse_frequencies: Tensor, scaled: bool) -> None:
        super().__init__(inverse_frequencies)
        self._scaled = scaled

    def forward(self, length: int, **more: Any) -> Any:
        angles = super().forward(length, **more).squeeze(1)
        # A scaled embedding also returns the factor of cos and sin, which is 1 here.
        return (angles, 1.0) if self._scaled else angles


class _LatentAttention(nn.Module):
    """Restore the batch dimension that Megatron drops for packed rows."""

    def __init__(self, attention: PackedAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any) -> Tensor:
        """Return [T, 1, heads * value size] for [T, heads, size] inputs."""
        return self.attention(*(torch.unsqueeze(part, 1) for part in (query, key, value)), *args, **more)
