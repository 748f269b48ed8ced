"""The parameters of a decoder layer, with their names in Megatron and in Hugging Face checkpoints.

One `Weight` per Megatron parameter lists the checkpoint tensors that fill it, and how both sides shard them:
import, export, weight sync and the counts of parameters all read this list.
Sources: the reference implementation of each ``model_type`` in transformers, and Megatron-Core's layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from megatron_rl.shapes.model import ModelShape

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
SCALAR = "score.weight"
"""Scalar head, which returns one number per token instead of a distribution."""

Cut = Literal["whole", "rows", "columns", "sections", "query_key_value", "latent", "vocabulary", "stacked"]
"""How Megatron shards a parameter over tensor-parallel ranks.

- ``whole``: replicated.
- ``rows``, ``columns``: dimension 0 or 1 in equal parts.
- ``sections``: the rows of each source in equal parts, such as gate and up.
- ``query_key_value``: the rows of queries, their gates if they have any, keys and values, interleaved by
  key-value group.
- ``latent``: by rows in Megatron's own layers, replicated in Transformer Engine's.
- ``vocabulary``: by rows, padded at the end.
- ``stacked``: replicated, one source below the other.
"""
EngineCut = Literal["whole", "rows", "columns", "heads", "vocabulary"]
"""How vLLM shards a checkpoint tensor over tensor-parallel ranks.

``heads`` are the rows of key-value heads, replicated if there are more ranks than heads; ``vocabulary`` is by
rows, padded. The others are as in `Cut`.
"""


@dataclass(frozen=True)
class Source:
    """Checkpoint tensor of a layer, or rows of one.

    >>> Source("self_attn.o_proj.weight", (4096, 4096), "columns").elements
    16777216
    """

    name: str
    """Name below ``model.layers.N``; a routed expert's contains ``{expert}``."""
    shape: tuple[int, ...]
    """Complete shape, before any sharding."""
    engine: EngineCut = "whole"
    """How vLLM shards the tensor."""
    float32: bool = False
    """The values stay float32, whatever the model's dtype is."""
    first: int = 0
    """First row in the checkpoint tensor, for a family that fuses several sources into one tensor."""
    runs: int = 1
    """Equal runs of rows that the source consists of, where a tensor interleaves sources by head."""
    pitch: int = 0
    """Rows from the beginning of one run to that of the next."""

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def run_rows(self) -> int:
        """Return the rows of one run."""
        return self.shape[0] // self.runs

    @property
    def end(self) -> int:
        """Return the number of rows of the checkpoint tensor up to the end of the source."""
        return self.first + (self.runs - 1) * self.pitch + self.run_rows

    def pieces(self, begin: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield the contiguous pieces of ``count`` rows of the source from row ``begin``.

        Each is its first row in the checkpoint tensor, and its number of rows.

        >>> gate = Source("self_attn.q_proj.weight", (8, 64), first=2, runs=4, pitch=4)
        >>> list(gate.pieces(1, 3)), gate.end
        ([(3, 1), (6, 2)], 16)
        """
        # Only the first and the last piece may be a part of a run.
        end = begin + count
        while begin < end:
            run, row = divmod(begin, self.run_rows)
            size = min(self.run_rows - row, end - begin)
            yield self.first + run * self.pitch + row, size
            begin += size


@dataclass(frozen=True)
class Weight:
    """Parameter of a Megatron layer, with the checkpoint tensors that fill it.

    >>> source = Source("mlp.down_proj.weight", (4096, 12288), "columns")
    >>> Weight("mlp.linear_fc2.weight", "columns", (source,)).local_shape(4)
    (4096, 3072)
    """

    name: str
    """Name below ``decoder.layers.N`` in Megatron's own layers; a routed expert's contains ``{expert}``."""
    cut: Cut
    """How Megatron shards the parameter."""
    sources: tuple[Source, ...]
    """Checkpoint tensors, concatenated along the rows."""
    fused: str = ""
    """Name where Transformer Engine fuses modules; empty for the same name as ``name``."""
    expert: bool = False
    """The parameter exists once per routed expert."""

    @property
    def elements(self) -> int:
        """Return the number of elements before any sharding."""
        return sum(source.elements for source in self.sources)

    def local_shape(self, shards: int) -> tuple[int, ...]:
        """Return the shape on one of ``shards`` tensor-parallel ranks, in Megatron's own layers."""
        rows = sum(source.shape[0] for source in self.sources)
        trailing = self.sources[0].shape[1:]

        if self.cut in ("whole", "stacked"):
            return (rows, *trailing)
        # The vocabulary is padded until all ranks have equally many rows.
        if self.cut == "vocabulary":
            return (-(-rows // shards), *trailing)
        if self.cut == "columns":
            return (rows, trailing[0] // shards)
        # All other cuts divide the rows.
        return (rows // shards, *trailing)


def layer_weights(shape: ModelShape, linear: bool, experts: bool) -> tuple[Weight, ...]:
    """Return the parameters of a layer, in the order in which checkpoints list their tensors.

    ``linear`` selects a gated delta net instead of attention, ``experts`` routed experts instead of the MLP.
    """
    if linear:
        attention = _delta_net(shape)
    elif shape.mla:
        attention = _latent(shape)
    else:
        attention = _attention(shape)

    mlp = _mlp(shape)
    if experts:
        mlp = _mixture(shape)
    return (*_norms(shape, linear), *attention, *mlp)


def outer_weights(shape: ModelShape, first: bool, last: bool) -> tuple[Weight, ...]:
    """Return the parameters outside the layers on the ``first`` and on the ``last`` pipeline stage.

    Names are complete, not relative to a layer. A tied output layer has a parameter only on a last stage that
    is not the first: a copy of the embedding.
    """
    # A tied output layer reads the same tensor.
    vocabulary_shape = (shape.vocab, shape.hidden)
    embedding = Source(EMBEDDING, vocabulary_shape, "vocabulary")
    weights: list[Weight] = []

    if first:
        weights.append(Weight("embedding.word_embeddings.weight", "vocabulary", (embedding,)))
        if shape.learned_positions:
            positions = Source("model.embed_positions.weight", (shape.learned_positions, shape.hidden))
            weights.append(Weight("embedding.position_embeddings.weight", "whole", (positions,)))

    if last:
        weights += _norm(shape, "decoder.final_layernorm", "model.norm")

        # A tied output layer on a separate last stage is a copy: the embedding is on the first stage's ranks.
        output = "output_layer.weight"
        if shape.scalar_head:
            weights.append(Weight(output, "whole", (Source(SCALAR, (1, shape.hidden)),)))
        elif not shape.tied:
            weights.append(Weight(output, "vocabulary", (Source(OUTPUT, vocabulary_shape, "vocabulary"),)))
        elif not first:
            weights.append(Weight(output, "vocabulary", (embedding,)))
    return tuple(weights)


def _norm(shape: ModelShape, name: str, source: str, fused: str = "") -> Iterator[Weight]:
    """Yield the parameters of a norm: module ``name`` in Megatron, ``source`` in the checkpoint."""
    yield Weight(f"{name}.weight", "whole", (Source(f"{source}.weight", (shape.hidden,)),), fused)
    if shape.layer_norm:
        yield Weight(f"{name}.bias", "whole", (Source(f"{source}.bias", (shape.hidden,)),))


def _norms(shape: ModelShape, linear: bool) -> Iterator[Weight]:
    """Yield the norms of a layer: before attention and MLP, after them, or both (sandwich norms)."""
    # Transformer Engine fuses a norm into the linear layer that follows.
    projection = "linear_qkv"
    if linear:
        projection = "in_proj"
    fused_attention = f"self_attention.{projection}.layer_norm_weight"
    fused_mlp = "mlp.linear_fc1.layer_norm_weight"

    if shape.pre_norms:
        yield from _norm(shape, "input_layernorm", "input_layernorm", fused_attention)
    if not shape.post_norms:
        yield from _norm(shape, "pre_mlp_layernorm", "post_attention_layernorm", fused_mlp)
        return

    # With post-norms ``post_attention_layernorm`` follows attention; otherwise it is the norm before the
    # MLP.
    yield from _norm(shape, "self_attention.linear_proj.post_layernorm", "post_attention_layernorm")
    if shape.pre_norms:
        yield from _norm(shape, "pre_mlp_layernorm", "pre_feedforward_layernorm", fused_mlp)
    yield from _norm(shape, "mlp.linear_fc2.post_layernorm", "post_feedforward_layernorm")


def _attention(shape: ModelShape) -> Iterator[Weight]:
    """Yield the parameters of grouped-query attention: projections, biases, norms of queries and keys."""
    # The rows of the three projections, without the columns: biases have the same.
    query_rows = shape.heads * shape.head_dim
    key_rows = shape.kv_heads * shape.head_dim
    projections = [
        Source("self_attn.q_proj", (query_rows,), "rows"),
        Source("self_attn.k_proj", (key_rows,), "heads"),
        Source("self_attn.v_proj", (key_rows,), "heads"),
    ]
    if shape.output_gate:
        # The checkpoint's tensor has for each head the rows of its query, and then the rows of its gate.
        queries = replace(projections[0], runs=shape.heads, pitch=2 * shape.head_dim)
        projections[:1] = [queries, queries]

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

    # Every tensor-parallel rank has the weights of all heads: heads that are normalised one by one share
    # them, and in a norm over all heads a rank uses the slice of its own heads.
    if shape.qk_norm:
        for letter, rows in (("q", query_rows), ("k", key_rows)):
            if not shape.whole_qk_norm:
                rows = shape.head_dim
            norm = Source(f"self_attn.{letter}_norm.weight", (rows,))
            yield Weight(f"self_attention.{letter}_layernorm.weight", "whole", (norm,))


def _latent(shape: ModelShape) -> Iterator[Weight]:
    """Yield the parameters of multi-head latent attention: DeepSeek-V2 (arXiv 2405.04434), section 2.1."""
    query_rows = shape.heads * shape.qk_dim
    latent = shape.kv_lora

    def weight(name: str, cut: Cut, source: Source, fused: str = "") -> Weight:
        """Return a parameter of the attention module; ``source`` is named below ``self_attn``."""
        prefix = "self_attention."
        fused_name = ""
        if fused:
            fused_name = prefix + fused
        named_source = replace(source, name=f"self_attn.{source.name}.weight")
        return Weight(f"{prefix}{name}.weight", cut, (named_source,), fused_name)

    # Queries: one projection, or down to a latent and up again.
    if not shape.q_lora:
        yield weight("linear_q_proj", "rows", Source("q_proj", (query_rows, shape.hidden), "rows"))
    else:
        yield weight("linear_q_down_proj", "latent", Source("q_a_proj", (shape.q_lora, shape.hidden)))
        yield weight(
            "q_layernorm",
            "whole",
            Source("q_a_layernorm", (shape.q_lora,)),
            "linear_q_up_proj.layer_norm_weight",
        )
        yield weight("linear_q_up_proj", "rows", Source("q_b_proj", (query_rows, shape.q_lora), "rows"))

    # Keys and values: down to one latent and the rotary part, then up to all heads.
    down = Source("kv_a_proj_with_mqa", (latent + shape.qk_rope, shape.hidden))
    yield weight("linear_kv_down_proj", "latent", down)
    yield weight(
        "kv_layernorm",
        "whole",
        Source("kv_a_layernorm", (latent,)),
        "linear_kv_up_proj.layer_norm_weight",
    )
    up_rows = shape.heads * (shape.qk_nope + shape.v_head_dim)
    yield weight("linear_kv_up_proj", "rows", Source("kv_b_proj", (up_rows, latent), "rows"))

    output = Source("o_proj", (shape.hidden, shape.heads * shape.v_head_dim), "columns")
    yield weight("linear_proj", "columns", output)


def _delta_net(shape: ModelShape) -> Iterator[Weight]:
    """Yield the parameters of a gated delta net (arXiv 2412.06464; transformers qwen3_next and qwen3_5)."""
    keys = shape.linear_qk
    values = shape.linear_v
    numbers = shape.linear_v_heads

    def weight(name: str, cut: Cut, *sources: Source) -> Weight:
        """Return a parameter of the module; the sources are named below ``linear_attn``."""
        renamed = tuple(replace(source, name=f"linear_attn.{source.name}") for source in sources)
        return Weight(f"self_attention.{name}", cut, renamed)

    # Queries, keys, values and the gate of the output; learning rate and decay of each value head.
    projections = [
        ("qkv", keys),
        ("qkv", keys),
        ("qkv", values),
        ("z", values),
        ("b", numbers),
        ("a", numbers),
    ]
    if shape.linear_interleaved:
        # Qwen3-Next stores them as two tensors, Qwen3.5 as four.
        fused_names = {"qkv": "qkvz", "z": "qkvz", "b": "ba", "a": "ba"}
        projections = [(fused_names[name], rows) for name, rows in projections]
    sources = [Source(f"in_proj_{name}.weight", (rows, shape.hidden), "rows") for name, rows in projections]
    if shape.linear_interleaved:
        # The rows of one key head, of all projections, are together.
        heads = shape.linear_k_heads
        pitches = {"qkvz": 2 * (keys + values) // heads, "ba": 2 * numbers // heads}
        sources = [
            replace(source, runs=heads, pitch=pitches[name])
            for source, (name, _) in zip(sources, projections, strict=True)
        ]
    yield weight("in_proj.weight", "sections", *sources)

    # One filter per channel of queries, keys and values, sharded as the channels are.
    convolved = [
        Source("conv1d.weight", (rows, 1, shape.linear_conv), "rows") for rows in (keys, keys, values)
    ]
    yield weight("conv1d.weight", "sections", *convolved)
    yield weight("dt_bias", "rows", Source("dt_bias", (numbers,), "rows"))
    yield weight("A_log", "rows", Source("A_log", (numbers,), "rows"))
    yield weight("out_norm.weight", "whole", Source("norm.weight", (shape.linear_v_head_dim,)))
    yield weight("out_proj.weight", "columns", Source("out_proj.weight", (shape.hidden, values), "columns"))


def _mlp(shape: ModelShape) -> Iterator[Weight]:
    """Yield the parameters of a dense MLP with its biases."""
    yield from _mlp_matrices(shape, "mlp.", "mlp.", shape.mlp_width)
    if shape.mlp_bias:
        yield from _mlp_biases(shape, "mlp.", "mlp.", shape.mlp_width)


def _inner_projections(shape: ModelShape) -> tuple[tuple[str, ...], Cut]:
    """Return the checkpoint's projections in Megatron's linear_fc1, and how Megatron shards them."""
    if shape.gated:
        return ("gate_proj", "up_proj"), "sections"
    return ("up_proj",), "rows"


def _mlp_matrices(
    shape: ModelShape, name: str, source: str, width: int, fused: str = "", expert: bool = False
) -> Iterator[Weight]:
    """Yield the two matrices of an MLP of ``width`` elements; a gated one has gate and up in the first.

    ``name`` and ``source`` are the prefixes of Megatron's and of the checkpoint's names, ``fused`` is
    Transformer Engine's name with ``{linear}`` for the layer.
    """
    # The inner matrix is sharded by rows, the outer by columns, so that one sum per MLP suffices.
    projections, inner_cut = _inner_projections(shape)
    inner = tuple(
        Source(f"{source}{projection}.weight", (width, shape.hidden), "rows") for projection in projections
    )
    outer = (Source(f"{source}down_proj.weight", (shape.hidden, width), "columns"),)

    # Fill in ``{linear}`` only: ``{expert}`` is filled in later, once per expert.
    fused_inner = fused.format(linear="linear_fc1", expert="{expert}")
    fused_outer = fused.format(linear="linear_fc2", expert="{expert}")
    yield Weight(f"{name}linear_fc1.weight", inner_cut, inner, fused_inner, expert)
    yield Weight(f"{name}linear_fc2.weight", "columns", outer, fused_outer, expert)


def _mlp_biases(
    shape: ModelShape, name: str, source: str, width: int, fused: str = "", expert: bool = False
) -> Iterator[Weight]:
    """Yield the biases of `_mlp_matrices`."""
    projections, inner_cut = _inner_projections(shape)
    inner = tuple(Source(f"{source}{projection}.bias", (width,), "rows") for projection in projections)
    fused_inner = fused.format(linear="linear_fc1", expert="{expert}")
    yield Weight(f"{name}linear_fc1.bias", inner_cut, inner, fused_inner, expert)

    # Added after the sum over tensor-parallel ranks, so every rank has all of it.
    outer = (Source(f"{source}down_proj.bias", (shape.hidden,)),)
    fused_outer = fused.format(linear="linear_fc2", expert="{expert}")
    yield Weight(f"{name}linear_fc2.bias", "whole", outer, fused_outer, expert)


def _mixture(shape: ModelShape) -> Iterator[Weight]:
    """Yield the parameters of a mixture of experts; one entry represents all routed experts of a layer."""
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
        yield from _mlp_matrices(shape, "mlp.shared_experts.", "mlp.shared_experts.", shape.shared_width)
    if shape.shared_gate:
        gate = Source("mlp.shared_expert_gate.weight", (1, shape.hidden))
        yield Weight("mlp.shared_experts.gate_weight", "whole", (gate,))

    # Megatron's own layers have a module per expert, Transformer Engine's one module with numbered weights.
    name = "mlp.experts.local_experts.{expert}."
    source = "mlp.experts.{expert}."
    fused = "mlp.experts.{linear}.weight{expert}"
    yield from _mlp_matrices(shape, name, source, shape.expert_width, fused, expert=True)
    if shape.expert_bias:
        fused = "mlp.experts.{linear}.bias{expert}"
        yield from _mlp_biases(shape, name, source, shape.expert_width, fused, expert=True)
