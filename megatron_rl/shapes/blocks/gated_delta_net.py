"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464), as in transformers' qwen3_next and qwen3_5.

A delta net caches no keys and values per token. For each row, a value head has one state matrix [key size,
value size]. So the size of the cache depends on the number of rows, and not on their lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_rl.errors import UserError
from megatron_rl.shapes.blocks.block import LocalLayer, Mixer
from megatron_rl.shapes.layer_weights import Sharding, Source, Weight

if TYPE_CHECKING:
    from megatron_rl.shapes.layout import ParallelLayout
    from megatron_rl.shapes.model import ModelShape

_STATE_BYTES = 4
"""Bytes of an element of the state, which engines and kernels store in float32."""

_CHUNK_TOKENS = 64
"""Tokens per chunk in PyTorch's delta rule, which saves the state at the start of each chunk."""


@dataclass(frozen=True)
class GatedDeltaNet(Mixer):
    """Gated delta net: a mixer with a recurrent state instead of a key and a value per token.

    Its sizes are the ``linear_`` fields of `ModelShape`.
    """

    name: ClassVar[str] = "gated_delta_net"
    noun: ClassVar[str] = "gated delta nets"
    layer_types: ClassVar[tuple[str, ...]] = ("linear_attention",)
    size_keys: ClassVar[tuple[str, ...]] = ("linear_num_value_heads",)
    first_projection: ClassVar[str] = "in_proj"
    takes_adapters: ClassVar[bool] = False

    def weights(self, shape: ModelShape) -> Iterator[Weight]:
        """Yield the parameters of the input projections, convolution, decay, norm and output projection."""
        key_rows = shape.linear_qk
        value_rows = shape.linear_v
        value_heads = shape.linear_v_heads

        # (suffix of the tensor's name in the checkpoint, number of rows) of each projection: queries, keys,
        # values, output gate, step size of each value head, and decay of each value head.
        projections = [
            ("qkv", key_rows),
            ("qkv", key_rows),
            ("qkv", value_rows),
            ("z", value_rows),
            ("b", value_heads),
            ("a", value_heads),
        ]
        if shape.linear_interleaved:
            # Qwen3-Next stores the projections in two tensors, Qwen3.5 stores them in four.
            fused_names = {"qkv": "qkvz", "z": "qkvz", "b": "ba", "a": "ba"}
            projections = [(fused_names[name], rows) for name, rows in projections]

        sources = [
            Source(f"in_proj_{name}.weight", (rows, shape.hidden), "rows") for name, rows in projections
        ]
        if shape.linear_interleaved:
            # Each tensor has the rows of all its projections for the first key head, then for the next head.
            key_heads = shape.linear_k_heads
            rows_per_key_head = {
                "qkvz": 2 * (key_rows + value_rows) // key_heads,
                "ba": 2 * value_heads // key_heads,
            }
            sources = [
                replace(source, num_ranges=key_heads, range_stride=rows_per_key_head[name])
                for source, (name, _) in zip(sources, projections, strict=True)
            ]
        yield _make_weight("in_proj.weight", "sections", *sources)

        # One filter per channel of queries, keys and values, sharded like the channels.
        filters = [
            Source("conv1d.weight", (rows, 1, shape.linear_conv), "rows")
            for rows in (key_rows, key_rows, value_rows)
        ]
        yield _make_weight("conv1d.weight", "sections", *filters)

        yield _make_weight("dt_bias", "rows", Source("dt_bias", (value_heads,), "rows"))
        yield _make_weight("A_log", "rows", Source("A_log", (value_heads,), "rows"))
        yield _make_weight("out_norm.weight", "whole", Source("norm.weight", (shape.linear_v_head_dim,)))
        output = Source("out_proj.weight", (shape.hidden, value_rows), "columns")
        yield _make_weight("out_proj.weight", "columns", output)

    def saved_elements(self, layer: LocalLayer) -> float:
        """Count the saved elements per token: projections, convolution, repeated heads and outputs.

        Selective recomputation has no effect: a delta net has no core attention. In fused layers the
        kernels of flash-linear-attention recompute the states of chunks in the backward pass.
        """
        shape = layer.shape
        # Queries, keys, values, output gate, and per head the decay and the step size.
        projection_elements = 2 * shape.linear_qk + 2 * shape.linear_v + 2 * shape.linear_v_heads
        conv_elements = 2 * shape.linear_qk + shape.linear_v
        # Queries and keys are repeated for the value heads that share them.
        repeated_elements = 2 * shape.linear_v_heads * shape.linear_k_head_dim * layer.float32_elements
        # The delta rule's output, and the input of the output projection: the normalised and gated output.
        output_elements = 2 * shape.linear_v

        elements = projection_elements + conv_elements + repeated_elements + output_elements
        if not layer.fused:
            # The state at the start of each chunk, in float32.
            elements += _count_state_elements(shape) * layer.float32_elements / _CHUNK_TOKENS
        return elements / layer.tensor

    def live_elements(self, layer: LocalLayer) -> float:
        """Return the peak number of activation elements per token in a forward pass without gradients.

        The number equals the elements that a layer without Transformer Engine saves for the backward pass.
        """
        return self.saved_elements(replace(layer, fused=False))

    def flops_per_token(self, shape: ModelShape) -> float:
        """Return the FLOPs per token of three products with the state: read, update and read again."""
        return 6.0 * shape.linear_qk * shape.linear_v_head_dim

    def state_bytes(self, shape: ModelShape, dtype_bytes: float) -> float:
        """Return the bytes of a sequence's float32 state matrices and of its last convolution inputs."""
        matrix_bytes = _count_state_elements(shape) * _STATE_BYTES
        conv_input_bytes = (shape.linear_conv - 1) * (2 * shape.linear_qk + shape.linear_v) * dtype_bytes
        return matrix_bytes + conv_input_bytes

    def other_sharded_heads(self, shape: ModelShape) -> dict[str, int]:
        """Return the number of key heads, which the tensor-parallel size must divide."""
        return {"key heads of gated delta nets": shape.linear_k_heads}

    def settings(self, shape: ModelShape) -> dict[str, Any]:
        """Return Megatron's settings for the sizes of delta nets, and for the layers that have one."""
        # Do not set ``experimental_attention_variant``: with this setting Megatron would build its own layers
        # instead of the layers of this package.
        return {
            "linear_attention_freq": [int(layer in shape.linear_layers) for layer in range(shape.layers)],
            "linear_conv_kernel_dim": shape.linear_conv,
            "linear_key_head_dim": shape.linear_qk // shape.linear_k_heads,
            "linear_value_head_dim": shape.linear_v_head_dim,
            "linear_num_key_heads": shape.linear_k_heads,
            "linear_num_value_heads": shape.linear_v_heads,
        }

    def problems(
        self, shape: ModelShape, layout: ParallelLayout, settings: Mapping[str, Any]
    ) -> Iterator[UserError]:
        """Yield an error for context parallelism: a row's state needs all tokens of the row in order."""
        if layout.context == 1:
            return

        yield UserError(
            f"context parallelism is not supported for {self.noun}",
            where=f"{layout.path}.context",
            expected=f"1: {shape.name} has {shape.mixers[self]} {self.noun}",
            got=str(layout.context),
            fix=f"remove {layout.path}.context, and lower batch.tokens_per_microbatch if memory is short",
        )


def _make_weight(name: str, sharding: Sharding, *sources: Source) -> Weight:
    """Create a `Weight` of a delta net.

    The names of ``sources`` are relative to the module ``linear_attn`` of a checkpoint.
    """
    named_sources = tuple(replace(source, name=f"linear_attn.{source.name}") for source in sources)
    return Weight(f"self_attention.{name}", sharding, named_sources)


def _count_state_elements(shape: ModelShape) -> int:
    """Count the elements of the state matrices of one layer: value heads x key size x value size."""
    return shape.linear_v_heads * shape.linear_k_head_dim * shape.linear_v_head_dim


KIND = GatedDeltaNet
