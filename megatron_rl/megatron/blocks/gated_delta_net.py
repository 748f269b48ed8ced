"""Gated delta nets in the place of attention."""

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

    def layer_spec(self, layer: Any, kind: GatedDeltaNet, options: LayerOptions) -> Any:
        """Return a new layer spec with a gated delta net instead of attention."""
        in_proj: Any = ColumnParallelLinear
        out_proj: Any = RowParallelLinear
        if options.fused:
            from megatron.core.extensions import transformer_engine

            # The norm before a layer's attention is a part of its projection.
            in_proj = transformer_engine.TELayerNormColumnParallelLinear
            out_proj = transformer_engine.TERowParallelLinear
        submodules = GatedDeltaNetSubmodules(in_proj=in_proj, out_proj=out_proj)
        delta_net = ModuleSpec(module=PackedDeltaNet, submodules=submodules)
        return replace(layer, submodules=replace(layer.submodules, self_attention=delta_net))


BUILDER = GatedDeltaNetBuilder()
