"""Builder of dense MLPs, which are Megatron's own."""

from __future__ import annotations

from megatron_rl.megatron.blocks.builder import BlockBuilder
from megatron_rl.shapes.blocks.mlp import Mlp


class MlpBuilder(BlockBuilder[Mlp]):
    """Builder of dense MLPs: Megatron's settings express every MLP, so nothing is overridden."""


BUILDER = MlpBuilder()
