"""Mixtures of experts: a router, routed experts, and shared experts that compute every token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_rl.errors import UserError
from megatron_rl.shapes.blocks.block import FeedForward, LocalLayer
from megatron_rl.shapes.blocks.mlp import count_mlp_elements, mlp_biases, mlp_matrices
from megatron_rl.shapes.layer_weights import Source, Weight

if TYPE_CHECKING:
    from megatron_rl.shapes.layout import ParallelLayout
    from megatron_rl.shapes.model import ModelShape

_ROUTED_BUFFERS = 5
"""Number of buffers of routed tokens that exist at once in a layer without Transformer Engine, see
`Experts.live_elements`."""


@dataclass(frozen=True)
class Experts(FeedForward):
    """Mixture of experts: a router, routed experts and shared experts, with the sizes of `ModelShape`."""

    name: ClassVar[str] = "experts"
    routed: ClassVar[bool] = True

    def weights(self, shape: ModelShape) -> Iterator[Weight]:
        """Yield the parameters of router and shared experts, and one `Weight` for all routed experts."""
        # Every rank routes its own tokens, so the router is replicated.
        router = Source("mlp.gate.weight", (shape.experts, shape.hidden))
        yield Weight("mlp.router.weight", "whole", (router,))

        if shape.router_bias:
            bias = Source("mlp.gate.e_score_correction_bias", (shape.experts,), float32=True)
            yield Weight("mlp.router.expert_bias", "whole", (bias,))
        if shape.expert_bias:
            projection_bias = Source("mlp.gate.bias", (shape.experts,))
            yield Weight("mlp.router.bias", "whole", (projection_bias,))

        # All shared experts of a layer are one MLP of their total width.
        if shape.shared_width:
            yield from mlp_matrices(shape, "mlp.shared_experts.", "mlp.shared_experts.", shape.shared_width)
        if shape.shared_gate:
            gate = Source("mlp.shared_expert_gate.weight", (1, shape.hidden))
            yield Weight("mlp.shared_experts.gate_weight", "whole", (gate,))

        # Megatron's own layers have one module per expert. Transformer Engine's layers have one module for
        # all experts, and the names of its weights end with the number of the expert.
        name_prefix = "mlp.experts.local_experts.{expert}."
        source_prefix = "mlp.experts.{expert}."
        fused_name = "mlp.experts.{linear}.weight{expert}"
        yield from mlp_matrices(
            shape, name_prefix, source_prefix, shape.expert_width, fused_name, expert=True
        )
        if shape.expert_bias:
            fused_name = "mlp.experts.{linear}.bias{expert}"
            yield from mlp_biases(
                shape, name_prefix, source_prefix, shape.expert_width, fused_name, expert=True
            )

    def inner_width(self, shape: ModelShape) -> int:
        """Return the summed widths of a token's routed experts and of the shared experts."""
        return shape.experts_per_token * shape.expert_width + shape.shared_width

    def saved_elements(self, layer: LocalLayer) -> float:
        """Count the saved elements per token of all experts, of routed experts' inputs, and of the router."""
        shape = layer.shape
        # With sequence parallelism a rank routes only its shard of the tokens.
        experts_per_token = shape.experts_per_token / layer.token_shards
        shared_elements = count_mlp_elements(layer, shape.shared_width / layer.tensor)
        routed_elements = _count_expert_elements(layer) * experts_per_token

        # The input of each routed expert: a copy of the token's hidden state, gathered over expert-tensor
        # ranks.
        input_elements = experts_per_token * layer.expert_tensor * shape.hidden
        router_elements = _count_router_elements(layer) / layer.token_shards
        return shared_elements + routed_elements + (input_elements + router_elements)

    def live_elements(self, layer: LocalLayer) -> float:
        """Return the peak number of activation elements per token: five buffers of routed tokens.

        A buffer has one hidden state for each routed expert of each token. At the peak all five buffers
        exist: the tokens sorted for the all-to-all, the tokens after the all-to-all, the tokens sorted by
        expert, the outputs of the experts, and the combined outputs.
        """
        shape = layer.shape
        return _ROUTED_BUFFERS * shape.experts_per_token * shape.hidden / layer.token_shards

    def live_hidden_states(self, shape: ModelShape) -> int:
        """Return the number of live hidden states at the peak, including the output of shared experts."""
        return super().live_hidden_states(shape) + (shape.shared_width > 0)

    def temporary_elements(self, layer: LocalLayer) -> float:
        """Count the elements per token of temporary tensors, which exist only while the layer is computed.

        Each temporary tensor has one hidden state for each routed expert of each token.
        """
        shape = layer.shape
        # Without Transformer Engine: the buffers of `live_elements`, except for the input of the experts,
        # which `saved_elements` counts.
        num_tensors = _ROUTED_BUFFERS - 1
        # Transformer Engine: two gradients in the backward pass.
        if layer.fused:
            num_tensors = 2

        return num_tensors * shape.experts_per_token * shape.hidden / layer.token_shards

    def tensor_widths(self, shape: ModelShape) -> list[tuple[str, int, str]]:
        """Return the total width of the shared experts, and the width of one routed expert.

        Each width is a tuple (noun, width, name of the parallel size that must divide the width).
        """
        return [
            ("shared experts' width", shape.shared_width, "tensor"),
            ("experts' width", shape.expert_width, "expert_tensor"),
        ]

    def settings(self, shape: ModelShape) -> dict[str, Any]:
        """Return Megatron's settings of the experts; balancing losses are off unless the user sets them."""
        settings: dict[str, Any] = {
            "num_moe_experts": shape.experts,
            "moe_ffn_hidden_size": shape.expert_width,
            "moe_router_topk": shape.experts_per_token,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "alltoall",
        }

        if shape.dense_layers:
            # Only if layers differ: with a list, Megatron stores layers one by one instead of stacked.
            settings["moe_layer_freq"] = [int(shape.has_experts(layer)) for layer in range(shape.layers)]
        if shape.shared_width:
            settings["moe_shared_expert_intermediate_size"] = shape.shared_width
            settings["moe_shared_expert_gate"] = shape.shared_gate
        return settings

    def problems(
        self, shape: ModelShape, layout: ParallelLayout, settings: Mapping[str, Any]
    ) -> Iterator[UserError]:
        """Yield an error if experts have biases and ``expert_tensor`` is above 1.

        ``expert_tensor`` is the number of tensor-parallel ranks that share the matrices of an expert.
        """
        if not shape.expert_bias or layout.expert_tensor == 1:
            return

        yield UserError(
            "Megatron does not shard experts with biases over tensor-parallel ranks",
            where=f"{layout.path}.expert_tensor",
            expected=f"1: the experts of {shape.name} have biases",
            got=str(layout.expert_tensor),
            fix=f"remove {layout.path}.expert_tensor, and increase {layout.path}.expert instead",
        )


def _count_expert_elements(layer: LocalLayer) -> float:
    """Count the elements that one routed expert saves for each token that is routed to it."""
    width = layer.shape.expert_width
    # With biases the activation is not fused: it also saves its clamped input and its sigmoid.
    if layer.shape.expert_bias:
        return 8 * width

    if layer.fused:
        return count_mlp_elements(layer, width)

    # Five tensors as in a plain MLP, and the product of gate and up times the router's weight.
    return 6 * width


def _count_router_elements(layer: LocalLayer) -> float:
    """Count the elements per token that the router saves for all experts and for the selected experts."""
    shape = layer.shape
    if layer.fused:
        # Logits and probabilities of all experts.
        return 2.0 * shape.experts

    # Logits of all experts in the model's dtype, and a mask of the selected experts, a byte each.
    all_expert_elements = shape.experts * (1 + 1 / layer.dtype_bytes)
    # Probabilities and indices of the selected experts: five numbers of 4 bytes per expert.
    selected_expert_elements = 5 * shape.experts_per_token * 4 / layer.dtype_bytes
    return all_expert_elements + selected_expert_elements


KIND = Experts
