"""Dense MLPs, which are Megatron's own."""

from __future__ import annotations

from megatron_rl.megatron.blocks.builder import BlockBuilder
from megatron_rl.shapes.blocks.mlp import Mlp


class MlpBuilder(BlockBuilder[Mlp]):
    """Builder of MLPs: Megatron's settings express all of them."""


BUILDER = MlpBuilder()
