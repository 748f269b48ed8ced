"""Softmax attention on packed rows: Megatron's own, with the features that its settings cannot express."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_rl.megatron.blocks.builder import BlockBuilder, LayerOptions
from megatron_rl.megatron.layers import allow_shared_heads, bind_tensor_group, prepare_local_rotation
from megatron_rl.megatron.norms import replace_query_key_norms
from megatron_rl.megatron.separate_attention import separate_attention_spec
from megatron_rl.shapes.blocks.attention import Attention
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape

if TYPE_CHECKING:
    from megatron_rl.megatron.model_spec import ModelSpec


class AttentionBuilder(BlockBuilder[Attention]):
    """Builder of softmax attention, from Megatron's own attention."""

    def prepare(self, shape: ModelShape, layout: ParallelLayout) -> None:
        """Prepare Megatron for fewer key-value heads than tensor-parallel ranks, if the model has fewer."""
        if shape.kv_heads < layout.tensor:
            allow_shared_heads()

    def layer_spec(self, layer: Any, kind: Attention, options: LayerOptions) -> Any:
        """Return the spec of Megatron's own attention, or of one with the head size of this layer."""
        if not kind.head_dim:
            return layer
        return separate_attention_spec(layer, kind)

    def finish(self, layers: Sequence[Any], spec: ModelSpec) -> None:
        """Add to built layers what their spec cannot express: norms over all heads, local rotary angles.

        Key-value heads that several tensor-parallel ranks share are bound to the role's own process group.
        """
        shape = spec.model.shape
        if spec.shares_heads:
            for layer in layers:
                bind_tensor_group(layer.self_attention)

        if shape.whole_qk_norm:
            replace_query_key_norms(layers)
        # Gemma 3 has frequencies for each kind of attention, Gemma 2 one for both.
        if "full_attention" in spec.hf_config.rope_parameters:
            prepare_local_rotation(
                layers, shape.sliding_layers, spec.local_frequencies, spec.local_rotary_factor
            )


BUILDER = AttentionBuilder()
