"""Builder of softmax attention: Megatron's own, with features that Megatron's settings cannot express."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_rl.megatron.blocks.builder import BlockBuilder, LayerOptions
from megatron_rl.megatron.layers import allow_shared_heads, bind_tensor_group, prepare_local_rotation
from megatron_rl.megatron.norms import replace_query_key_norms
from megatron_rl.megatron.separate_attention import per_layer_attention_spec
from megatron_rl.shapes.blocks.attention import Attention
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape

if TYPE_CHECKING:
    from megatron_rl.megatron.model_spec import ModelSpec


class AttentionBuilder(BlockBuilder[Attention]):
    """Builder of softmax attention layers. It configures Megatron's own attention module."""

    def prepare(self, shape: ModelShape, layout: ParallelLayout) -> None:
        """Patch Megatron if the model has fewer key-value heads than there are tensor-parallel ranks."""
        # Several ranks then share a head.
        if shape.kv_heads < layout.tensor:
            allow_shared_heads()

    def layer_spec(self, layer: Any, sublayer: Attention, options: LayerOptions) -> Any:
        """Return a layer's spec, with an attention module for the layer's own head size if it has one."""
        # Megatron's configuration has a single head size for all layers.
        if not sublayer.head_dim:
            return layer

        return per_layer_attention_spec(layer, sublayer)

    def finish(self, layers: Sequence[Any], spec: ModelSpec) -> None:
        """Add the features of built attention layers that no layer spec can express.

        These are norms of queries and keys over all heads together, and separate rotary angles in layers with
        a sliding window. If tensor-parallel ranks share key-value heads, the projections get the model's
        tensor-parallel group.
        """
        shape = spec.model.shape

        # Without this group, some versions of Megatron would use the process-global group, which does not
        # exist.
        if spec.shares_heads:
            for layer in layers:
                bind_tensor_group(layer.self_attention)

        # Megatron's norms of queries and keys normalise each head separately.
        if shape.whole_qk_norm:
            replace_query_key_norms(layers)

        # Gemma 3 has separate frequencies for local and full attention. Gemma 2 has the same for both.
        if "full_attention" in spec.hf_config.rope_parameters:
            prepare_local_rotation(
                layers, shape.sliding_layers, spec.local_frequencies, spec.local_rotary_factor
            )


BUILDER = AttentionBuilder()
