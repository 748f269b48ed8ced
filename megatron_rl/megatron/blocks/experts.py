"""Builder of mixtures of experts: Megatron's own, which also run on CPU and with biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_rl.megatron.blocks.builder import BlockBuilder
from megatron_rl.megatron.experts import prepare_biased_experts, prepare_experts
from megatron_rl.shapes.blocks.experts import Experts
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape

if TYPE_CHECKING:
    from megatron_rl.megatron.model_spec import ModelSpec


class ExpertsBuilder(BlockBuilder[Experts]):
    """Builder of mixtures of experts, from Megatron's own MoE layer."""

    def prepare(self, shape: ModelShape, layout: ParallelLayout) -> None:
        """Replace functions of Megatron's router and dispatcher that fail on this platform."""
        prepare_experts()

    def finish(self, layers: Sequence[Any], spec: ModelSpec) -> None:
        """Change the experts of built ``layers`` so that autograd accepts how they add their biases."""
        # Megatron adds an expert's bias in place. If an expert is on a single rank, the bias is added to the
        # output of a collective over one rank, and autograd refuses the operation.
        if spec.model.shape.expert_bias:
            prepare_biased_experts(layers)


BUILDER = ExpertsBuilder()
