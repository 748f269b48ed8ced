"""Builder of gated delta nets, which replace the attention of a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_rl.megatron.blocks.builder import BlockBuilder, LayerOptions
from megatron_rl.megatron.delta_net import PackedDeltaNet
from megatron_rl.shapes.blocks.gated_delta_net import GatedDeltaNet


class GatedDeltaNetBuilder(BlockBuilder[GatedDeltaNet]):
    """Builder of gated delta nets, which replace attention in Megatron's layers."""

    def layer_spec(self, layer: Any, sublayer: GatedDeltaNet, options: LayerOptions) -> Any:
        """Return a new layer spec with a gated delta net instead of attention."""
        # Linear layers of Megatron or of Transformer Engine, as in the rest of the model.
        in_proj: Any = ColumnParallelLinear
        out_proj: Any = RowParallelLinear
        if options.fused:
            from megatron.core.extensions import transformer_engine

            # Transformer Engine fuses the layer's input norm into this projection.
            in_proj = transformer_engine.TELayerNormColumnParallelLinear
            out_proj = transformer_engine.TERowParallelLinear

        delta_net = ModuleSpec(
            module=PackedDeltaNet,
            submodules=GatedDeltaNetSubmodules(in_proj=in_proj, out_proj=out_proj),
        )

        # Copy the spec, since layers with attention may share it.
        layer_modules = replace(layer.submodules, self_attention=delta_net)
        return replace(layer, submodules=layer_modules)


BUILDER = GatedDeltaNetBuilder()
