"""Builder of multi-head latent attention on packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_rl.megatron.blocks.builder import BlockBuilder, LayerOptions
from megatron_rl.megatron.layers import (
    clear_transformer_engine_flag,
    prepare_latent_attention,
    use_latent_attention,
)
from megatron_rl.shapes.blocks.latent_attention import LatentAttention
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape

if TYPE_CHECKING:
    from megatron_rl.megatron.model_spec import ModelSpec


class LatentAttentionBuilder(BlockBuilder[LatentAttention]):
    """Builder of latent attention, from Megatron's MLA layer."""

    def prepare(self, shape: ModelShape, layout: ParallelLayout) -> None:
        """Make Megatron's latent attention usable in installations without Transformer Engine."""
        clear_transformer_engine_flag()

    def layer_spec(self, layer: Any, sublayer: LatentAttention, options: LayerOptions) -> Any:
        """Set the attention module of a layer's spec to `LatentSelfAttention`; return the same spec."""
        # Layers may share this spec. It can be modified in place, since a model with latent attention has it
        # in every layer.
        use_latent_attention(layer, options.tensor_group)
        return layer

    def finish(self, layers: Sequence[Any], spec: ModelSpec) -> None:
        """Adapt the projections and the rotary angles of the built layers to packed rows."""
        prepare_latent_attention(layers, spec.inverse_frequencies)


BUILDER = LatentAttentionBuilder()
