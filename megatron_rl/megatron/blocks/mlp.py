"""Dense MLPs, which are Megatron's own."""

from __future__ import annotations

from megatron_rl.megatron.blocks.builder import BlockBuilder
from megatron_rl.shapes.blocks.mlp import Mlp


class MlpBuilder(BlockBuilder[Mlp]):
    """Builder of dense MLPs: always Megatron's own, whose settings cover every MLP of this package."""


BUILDER = MlpBuilder()
