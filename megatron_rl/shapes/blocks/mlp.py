"""Dense MLPs: three matrices with a gate, or two matrices without a gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_rl.shapes.blocks.block import FeedForward, LocalLayer
from megatron_rl.shapes.layer_weights import Sharding, Source, Weight

if TYPE_CHECKING:
    from megatron_rl.shapes.model import ModelShape


@dataclass(frozen=True)
class Mlp(FeedForward):
    """Dense MLP, with the ``mlp_width`` of `ModelShape` between its projections."""

    name: ClassVar[str] = "mlp"

    def weights(self, shape: ModelShape) -> Iterator[Weight]:
        """Yield the two weight parameters of the MLP, and their biases if it has any."""
        yield from mlp_matrices(shape, "mlp.", "mlp.", shape.mlp_width)
        if shape.mlp_bias:
            yield from mlp_biases(shape, "mlp.", "mlp.", shape.mlp_width)

    def inner_width(self, shape: ModelShape) -> int:
        """Return the width between the MLP's projections."""
        return shape.mlp_width

    def saved_elements(self, layer: LocalLayer) -> float:
        """Count the saved elements per token of a rank's shard of the MLP's width."""
        return count_mlp_elements(layer, layer.shape.mlp_width / layer.tensor)

    def live_elements(self, layer: LocalLayer) -> float:
        """Return the peak number of activation elements per token: five tensors with the MLP's width.

        The tensors are gate, up, act(gate), up + offset, and act(gate) * (up + offset).
        """
        return 5 * layer.shape.mlp_width / layer.tensor

    def tensor_widths(self, shape: ModelShape) -> list[tuple[str, int, str]]:
        """Return the width of the MLP, which the tensor-parallel size divides."""
        return [("MLP width", shape.mlp_width, "tensor")]


def count_mlp_elements(layer: LocalLayer, width: float) -> float:
    """Count the elements per token that an MLP of inner width ``width`` saves for the backward pass."""
    if not layer.fused:
        # Gate and up together, the activation, up once more, and their product.
        return 5 * width

    if not layer.shape.gated:
        # The activation's input and output.
        return 2 * width

    # Gate, up and their product.
    return 3 * width


def mlp_matrices(
    shape: ModelShape,
    name_prefix: str,
    source_prefix: str,
    width: int,
    fused_name: str = "",
    expert: bool = False,
) -> Iterator[Weight]:
    """Yield the two Megatron parameters of an MLP; in a gated MLP the first contains gate and up projections.

    ``width`` is the intermediate size. ``name_prefix`` and ``source_prefix`` are the prefixes of Megatron's
    names and of the checkpoint's names. ``fused_name`` is Transformer Engine's name, with the placeholder
    ``{linear}`` for linear_fc1 or linear_fc2. ``expert``: whether the parameters exist once per routed
    expert.
    """
    # The inner matrix is sharded by rows and the outer matrix by columns, so that one all-reduce per MLP is
    # enough.
    projections, inner_sharding = _inner_projections(shape)
    inner = tuple(
        Source(f"{source_prefix}{projection}.weight", (width, shape.hidden), "rows")
        for projection in projections
    )
    outer = (Source(f"{source_prefix}down_proj.weight", (shape.hidden, width), "columns"),)

    # Fill in ``{linear}`` only: ``{expert}`` is filled in later, once per expert.
    fused_inner = fused_name.format(linear="linear_fc1", expert="{expert}")
    fused_outer = fused_name.format(linear="linear_fc2", expert="{expert}")
    yield Weight(f"{name_prefix}linear_fc1.weight", inner_sharding, inner, fused_inner, expert)
    yield Weight(f"{name_prefix}linear_fc2.weight", "columns", outer, fused_outer, expert)


def mlp_biases(
    shape: ModelShape,
    name_prefix: str,
    source_prefix: str,
    width: int,
    fused_name: str = "",
    expert: bool = False,
) -> Iterator[Weight]:
    """Yield the biases of the matrices that `mlp_matrices` yields for the same arguments."""
    projections, inner_sharding = _inner_projections(shape)
    inner = tuple(Source(f"{source_prefix}{projection}.bias", (width,), "rows") for projection in projections)
    fused_inner = fused_name.format(linear="linear_fc1", expert="{expert}")
    yield Weight(f"{name_prefix}linear_fc1.bias", inner_sharding, inner, fused_inner, expert)

    # The outer bias is added after the all-reduce over tensor-parallel ranks, so it is replicated.
    outer = (Source(f"{source_prefix}down_proj.bias", (shape.hidden,)),)
    fused_outer = fused_name.format(linear="linear_fc2", expert="{expert}")
    yield Weight(f"{name_prefix}linear_fc2.bias", "whole", outer, fused_outer, expert)


def _inner_projections(shape: ModelShape) -> tuple[tuple[str, ...], Sharding]:
    """Return the checkpoint's projections in Megatron's linear_fc1, and how Megatron shards them."""
    if shape.gated:
        return ("gate_proj", "up_proj"), "sections"
    return ("up_proj",), "rows"


KIND = Mlp
