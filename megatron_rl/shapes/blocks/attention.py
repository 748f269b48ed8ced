"""Softmax attention with grouped queries (Ainslie et al. 2023, arXiv 2305.13245)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_rl.errors import UserError
from megatron_rl.shapes.blocks.block import LocalLayer, Mixer
from megatron_rl.shapes.layer_weights import Source, Weight

if TYPE_CHECKING:
    from megatron_rl.shapes.layout import ParallelLayout
    from megatron_rl.shapes.model import ModelShape


@dataclass(frozen=True)
class Attention(Mixer):
    """Attention to all earlier tokens or to a sliding window.

    Head size and number of key-value heads default to the fields of `ModelShape`.
    Example: ``Attention(head_dim=512, kv_heads=4)`` for a layer with larger heads than the other layers.
    """

    head_dim: int = 0
    """Size of a head of queries, keys and values; 0 for the size of `ModelShape`."""
    kv_heads: int = 0
    """Key-value heads; 0 for the number of `ModelShape`."""
    keys_are_values: bool = False
    """Whether the layer has no projection to values: a value is its head's key before norm and rotary
    angles."""
    value_norm: bool = False
    """Whether each value is divided by its root mean square (an RMSNorm without a weight)."""

    name: ClassVar[str] = "attention"
    noun: ClassVar[str] = "layers of attention"
    layer_types: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")

    def key_value_heads(self, shape: ModelShape) -> int:
        """Return the number of key-value heads; each serves a group of query heads."""
        return self.kv_heads or shape.kv_heads

    def key_size(self, shape: ModelShape) -> int:
        """Return the size of one head's query and key."""
        return self.head_dim or shape.head_dim

    def value_size(self, shape: ModelShape) -> int:
        """Return the size of one head's value, which equals the size of its key."""
        return self.key_size(shape)

    def query_width(self, shape: ModelShape) -> int:
        """Return the width of the queries: the number of query heads times the head size."""
        return shape.heads * self.key_size(shape)

    def weights(self, shape: ModelShape) -> Iterator[Weight]:
        """Yield the parameters of projections, biases, sinks, and norms of queries and keys."""
        head_dim = self.key_size(shape)
        kv_heads = self.key_value_heads(shape)
        query_rows = shape.heads * head_dim
        key_rows = kv_heads * head_dim

        # Checkpoint tensors of the projections, first with their number of rows only. The matrix and the bias
        # of a projection have the same number of rows; the columns of the matrix are added below.
        projections = [
            Source("self_attn.q_proj", (query_rows,), "rows", heads=kv_heads),
            Source("self_attn.k_proj", (key_rows,), "heads", heads=kv_heads),
            Source("self_attn.v_proj", (key_rows,), "heads", heads=kv_heads),
        ]
        if self.keys_are_values:
            # The model has no projection to values. vLLM stores the projection to keys twice instead.
            projections[1:] = [replace(projections[1], engine_copies=2)]
        if shape.output_gate:
            # One checkpoint tensor contains queries and gates, interleaved by head: head_dim query rows of
            # head 0, head_dim gate rows of head 0, head_dim query rows of head 1, and so on. The query rows
            # of two successive heads are therefore 2 * head_dim rows apart, and so are the gate rows.
            # `PretrainedModel.weights` later sets the first row of queries (0) and of gates (head_dim).
            queries = replace(projections[0], num_ranges=shape.heads, range_stride=2 * head_dim)
            gates = queries
            projections[:1] = [queries, gates]

        matrices = tuple(
            replace(source, name=f"{source.name}.weight", shape=(*source.shape, shape.hidden))
            for source in projections
        )
        yield Weight("self_attention.linear_qkv.weight", "query_key_value", matrices)

        output = Source("self_attn.o_proj.weight", (shape.hidden, query_rows), "columns")
        yield Weight("self_attention.linear_proj.weight", "columns", (output,))

        if shape.qkv_bias:
            biases = tuple(replace(source, name=f"{source.name}.bias") for source in projections)
            yield Weight("self_attention.linear_qkv.bias", "query_key_value", biases)
        if shape.output_bias:
            bias = Source("self_attn.o_proj.bias", (shape.hidden,))
            yield Weight("self_attention.linear_proj.bias", "whole", (bias,))
        if shape.sinks:
            sinks = Source("self_attn.sinks", (shape.heads,), "rows")
            yield Weight("self_attention.core_attention.softmax_offset", "rows", (sinks,))

        # Norms of queries and keys are replicated over tensor-parallel ranks. A norm over single heads has
        # one weight of head_dim elements, which all heads use. A norm over all heads together
        # (`whole_qk_norm`) has an element for each row, and each rank uses the elements of its heads.
        if shape.qk_norm:
            for letter, rows in (("q", query_rows), ("k", key_rows)):
                if not shape.whole_qk_norm:
                    rows = head_dim
                norm = Source(f"self_attn.{letter}_norm.weight", (rows,))
                yield Weight(f"self_attention.{letter}_layernorm.weight", "whole", (norm,))

    def saved_elements(self, layer: LocalLayer) -> float:
        """Count the elements per token that attention saves for the backward pass on one rank."""
        if layer.fused:
            return self._count_fused_elements(layer)
        return self._count_unfused_elements(layer)

    def live_elements(self, layer: LocalLayer) -> float:
        """Return the peak number of activation elements per token in a forward pass without gradients.

        At the peak, seven tensors with all query heads and three tensors with all key-value heads exist. They
        are outputs of the projections, and contiguous copies of these outputs.
        """
        shape = layer.shape
        heads = shape.heads / layer.tensor
        kv_heads = self.key_value_heads(shape) / layer.tensor
        return self.key_size(shape) * (7 * heads + 3 * kv_heads)

    def flops_per_key(self, shape: ModelShape) -> int:
        """Return the forward FLOPs of one token per attended key: 2 h (d_qk + d_v) for h heads.

        The FLOPs are the products of the query with the key, and of the probability with the value.
        """
        return 4 * self.query_width(shape)

    def cache_elements(self, shape: ModelShape) -> int:
        """Count the elements of a token's key and value, of every key-value head."""
        return 2 * self.key_value_heads(shape) * self.key_size(shape)

    def kernel_size(self, shape: ModelShape) -> int:
        """Return the head size of queries, keys and values."""
        return self.key_size(shape)

    def cache_shards(self, shape: ModelShape, tensor: int) -> int:
        """Return the number of distinct shards of the key-value cache on ``tensor`` ranks of an engine.

        Each rank caches different heads, unless there are fewer key-value heads than ranks: then several
        ranks cache copies of the same head.
        """
        return min(tensor, self.key_value_heads(shape))

    def tensor_parallel_heads(self, shape: ModelShape) -> int:
        """Return the number of key-value heads, which a trainer's tensor-parallel size must divide."""
        return self.key_value_heads(shape)

    def exchanged_elements(self, shape: ModelShape, tensor: int, context: int) -> float:
        """Count the elements per token of the all-to-all before and after context-parallel attention.

        The all-to-all before attention sends queries, keys and values; the all-to-all after attention sends
        outputs. ``tensor``, ``context``: tensor- and context-parallel sizes.
        """
        heads = shape.heads / tensor
        kv_heads = self.key_value_heads(shape) / tensor
        # If the context-parallel size does not divide the key-value heads of a rank, keys and values are
        # repeated for every query head.
        if kv_heads % context:
            kv_heads = heads
        return (heads + kv_heads) * 2 * self.key_size(shape)

    def gathered_elements(self, shape: ModelShape, tensor: int) -> float:
        """Count the elements per token of the keys and values of a rank's key-value heads."""
        return 2 * max(1, self.key_value_heads(shape) // tensor) * self.key_size(shape)

    def settings(self, shape: ModelShape) -> dict[str, Any]:
        """Return the TransformerConfig fields for an output gate and for layers with different head sizes."""
        settings: dict[str, Any] = {}
        if shape.output_gate:
            settings["attention_output_gate"] = True

        if self.head_dim or self.kv_heads:
            # Megatron's checkpoints stack equal layers into one tensor; layers of different shapes are stored
            # one by one.
            settings["hetereogenous_dist_checkpoint"] = True
        return settings

    def problems(
        self, shape: ModelShape, layout: ParallelLayout, settings: Mapping[str, Any]
    ) -> Iterator[UserError]:
        """Yield an error for an output gate with more tensor-parallel ranks than key-value heads."""
        if not shape.output_gate or layout.tensor <= self.key_value_heads(shape):
            return

        # If several ranks share a key-value head, each rank computes some of the queries that use this head.
        # Megatron (0.16.1) selects these queries on each rank, but it does not select their gates.
        yield UserError(
            "attention with a gate on its output needs a key-value head on every tensor-parallel rank",
            where=f"{layout.path}.tensor",
            expected=f"at most {self.key_value_heads(shape)}, the key-value heads of {shape.name}",
            got=str(layout.tensor),
            fix=f"set {layout.path}.tensor to {shape.largest_tensor_parallel_size(layout.tensor)} and use "
            "pipeline or data parallelism for the other ranks",
        )

    def _count_fused_elements(self, layer: LocalLayer) -> float:
        """Count the elements per token that Transformer Engine's attention saves.

        Selective recomputation has no effect: flash attention saves only its inputs and its output.
        """
        shape = layer.shape
        head_dim = self.key_size(shape)
        heads = shape.heads / layer.tensor
        if shape.sinks:
            # Models with sinks use PyTorch's attention, which repeats keys and values for every query head.
            # Four tensors have one more dimension for the sink, padded to a multiple of 8.
            return heads * (4 * (head_dim + 8) + head_dim)

        # Tensors with all query heads: queries and output, the gate, and queries before their norm. Tensors
        # with all key-value heads: keys and values, and keys before their norm.
        kv_heads = self.key_value_heads(shape) / layer.tensor
        query_tensors = 2
        key_value_tensors = 2
        if shape.output_gate:
            query_tensors += 1
        if shape.qk_norm:
            query_tensors += 1
            key_value_tensors += 1
        return head_dim * (query_tensors * heads + key_value_tensors * kv_heads)

    def _count_unfused_elements(self, layer: LocalLayer) -> float:
        """Count the elements per token that attention without Transformer Engine saves for the backward pass.

        Core attention (products of queries, keys and values) saves a key and a value for every query head.
        """
        shape = layer.shape
        head_dim = self.key_size(shape)
        heads = shape.heads / layer.tensor
        kv_heads = self.key_value_heads(shape) / layer.tensor
        projected_heads = heads + 2 * kv_heads
        if self.keys_are_values:
            projected_heads = heads + kv_heads
        projection_elements = head_dim * projected_heads

        # The core repeats keys and values for every query head. For each query head it saves the query, the
        # key, the value, the output, and the float32 log-sum-exp of the softmax.
        core_elements = 4 * heads * head_dim + heads * layer.float32_elements
        if shape.sinks:
            # Queries, keys, values and output have one more dimension for the sink.
            core_elements += 4 * heads

        norm_elements = 0.0
        if shape.qk_norm:
            norm_elements = layer.unfused_norm_elements((heads + kv_heads) * head_dim, output=False)
        if self.value_norm:
            # The norm of values saves its input in float32, and one number per head.
            norm_elements += kv_heads * (head_dim + 1) * layer.float32_elements
        if shape.whole_qk_norm:
            # Norms over all heads save their inputs and the normalised values in float32.
            norm_elements = 2 * (heads + kv_heads) * head_dim * layer.float32_elements

        # In a float32 model the norms save their inputs without a copy. The input of the keys' norm is a view
        # of the projection's output, which keeps the complete output in memory: add the values. With several
        # key-value heads, the input of the queries' norm is a contiguous copy: add the queries, which exist
        # in the copy and in the projection's output.
        saves_projection = shape.qk_norm and layer.dtype_bytes == 4
        if saves_projection:
            additional_heads = kv_heads
            if kv_heads > 1:
                additional_heads += heads
            norm_elements += head_dim * additional_heads

        # With selective recomputation the core saves only its inputs: queries, keys, and the projection's
        # output, which contains the values. The output counts only once if the norms save it as well.
        if layer.recompute == "selective":
            core_elements = head_dim * (heads + kv_heads)
            if not saves_projection:
                core_elements += projection_elements
        output_elements = heads * head_dim
        # cos and sin of the rotary angles, for queries and for keys.
        rotary_elements = 4 * head_dim
        return core_elements + output_elements + rotary_elements + norm_elements


KIND = Attention
