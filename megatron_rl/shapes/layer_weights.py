"""The parameters of a decoder layer, with their names in Megatron and in Hugging Face checkpoints.

One `Weight` per Megatron parameter lists the checkpoint tensors that fill it, and how Megatron and vLLM shard
them. Import, export, weight sync and parameter counts all use this list.
Sources: the reference implementation of each ``model_type`` in transformers, and Megatron-Core's layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from megatron_rl.shapes.blocks.block import Block
    from megatron_rl.shapes.model import ModelShape

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
SCALAR = "score.weight"
"""Checkpoint name of the scalar head, which returns one number per token instead of a distribution."""

BUFFERS = frozenset(("expert_bias", "e_score_correction_bias", "layer_scalar"))
"""Names of weights that are buffers of their modules, in Megatron or transformers, without the module's path.

No optimizer updates them. They are loaded, synced, saved and exported like parameters."""

Sharding = Literal[
    "whole", "rows", "columns", "sections", "query_key_value", "latent", "vocabulary", "stacked"
]
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
EngineSharding = Literal["whole", "rows", "columns", "heads", "vocabulary"]
"""How vLLM shards a checkpoint tensor over tensor-parallel ranks.

``heads``: by key-value heads. If there are more ranks than heads, heads are replicated. ``vocabulary``: by
rows, padded. ``whole``, ``rows`` and ``columns`` have the same meaning as in `Sharding`.
"""


@dataclass(frozen=True)
class Source:
    """Checkpoint tensor, or some of its rows, that fills a Megatron parameter or a part of the parameter.

    >>> Source("self_attn.o_proj.weight", (4096, 4096), "columns").elements
    16777216
    """

    name: str
    """Name relative to ``model.layers.N``. The name of a routed expert's tensor contains ``{expert}``."""
    shape: tuple[int, ...]
    """Complete shape, before any sharding."""
    engine_sharding: EngineSharding = "whole"
    """How vLLM shards the tensor."""
    float32: bool = False
    """Whether the values are float32 in a model of any dtype."""
    first_row: int = 0
    """First row in the checkpoint tensor, for a family that fuses several sources into one tensor."""
    num_ranges: int = 1
    """Number of contiguous, equally long ranges of rows that form the source. It is above 1 in a tensor that
    interleaves sources by head."""
    range_stride: int = 0
    """Number of rows from the start of one range to the start of the next range."""
    heads: int = 0
    """Key-value heads of the layer, for a projection to queries, keys or values; 0 for any other tensor."""
    engine_copies: int = 1
    """Number of times that vLLM stores the tensor: 2 for keys that are also the values."""

    @property
    def elements(self) -> int:
        """Return the number of elements of the source, before any sharding."""
        return math.prod(self.shape)

    @property
    def rows_per_range(self) -> int:
        """Return the number of rows in each contiguous range of the source."""
        return self.shape[0] // self.num_ranges

    @property
    def end(self) -> int:
        """Return the index in the checkpoint tensor of the row after the source's last row."""
        return self.first_row + (self.num_ranges - 1) * self.range_stride + self.rows_per_range

    def row_ranges(self, begin: int, count: int) -> Iterator[tuple[int, int]]:
        """Locate the source's rows ``begin`` to ``begin + count`` in the checkpoint tensor.

        Yields (first row, number of rows) of each contiguous range in the checkpoint tensor.

        >>> gate = Source("self_attn.q_proj.weight", (8, 64), first_row=2, num_ranges=4, range_stride=4)
        >>> list(gate.row_ranges(1, 3)), gate.end
        ([(3, 1), (6, 2)], 16)
        """
        # The requested rows may begin or end inside a range of the source.
        end = begin + count
        while begin < end:
            range_index, row_in_range = divmod(begin, self.rows_per_range)
            row_count = min(self.rows_per_range - row_in_range, end - begin)
            yield self.first_row + range_index * self.range_stride + row_in_range, row_count
            begin += row_count


@dataclass(frozen=True)
class Weight:
    """Parameter of a Megatron layer, with the checkpoint tensors that fill it.

    >>> source = Source("mlp.down_proj.weight", (4096, 12288), "columns")
    >>> Weight("mlp.linear_fc2.weight", "columns", (source,)).local_shape(4)
    (4096, 3072)
    """

    name: str
    """Name relative to ``decoder.layers.N`` in Megatron's own layers. The name of a routed expert's parameter
    contains ``{expert}``."""
    sharding: Sharding
    """How Megatron shards the parameter."""
    sources: tuple[Source, ...]
    """Checkpoint tensors, concatenated along the rows."""
    fused: str = ""
    """Name in layers in which Transformer Engine fuses modules; empty if it is ``name``."""
    expert: bool = False
    """Whether the parameter exists once per routed expert."""

    @property
    def is_buffer(self) -> bool:
        """Return whether the weight is a buffer of its module, which no optimizer updates."""
        return is_buffer(self.name)

    @property
    def elements(self) -> int:
        """Return the number of elements of the parameter, before any sharding."""
        return sum(source.elements for source in self.sources)

    @property
    def groups(self) -> int:
        """Return the number of key-value groups that a ``query_key_value`` parameter interleaves."""
        return self.sources[0].heads

    def local_shape(self, shards: int) -> tuple[int, ...]:
        """Return the shape of the parameter on one of ``shards`` tensor-parallel ranks.

        The shape is that in Megatron's layers without Transformer Engine. Transformer Engine's layers
        replicate parameters with the sharding ``latent``, which are sharded here.
        """
        rows = sum(source.shape[0] for source in self.sources)
        other_sizes = self.sources[0].shape[1:]

        if self.sharding in ("whole", "stacked"):
            return (rows, *other_sizes)
        # The vocabulary is padded until all ranks have equally many rows.
        if self.sharding == "vocabulary":
            return (-(-rows // shards), *other_sizes)
        if self.sharding == "columns":
            return (rows, other_sizes[0] // shards)
        # Every other sharding divides the rows.
        return (rows // shards, *other_sizes)


def is_buffer(name: str) -> bool:
    """Return whether a weight, by its name in Megatron or transformers, is one of `BUFFERS`.

    >>> is_buffer("decoder.layers.0.layer_scalar"), is_buffer("decoder.layers.0.mlp.linear_fc1.weight")
    (True, False)
    """
    return name.rpartition(".")[2] in BUFFERS


def layer_weights(shape: ModelShape, block: Block) -> tuple[Weight, ...]:
    """Return the parameters of a layer, in the order in which checkpoints list their tensors."""
    norms = _layer_norm_weights(shape, block.mixer.first_projection)
    scalars: tuple[Weight, ...] = ()
    if shape.layer_scalars:
        scalars = (Weight("layer_scalar", "whole", (Source("layer_scalar", (1,)),)),)
    return (*norms, *block.mixer.weights(shape), *block.feed_forward.weights(shape), *scalars)


def outer_weights(shape: ModelShape, first: bool, last: bool) -> tuple[Weight, ...]:
    """Return the parameters outside the layers: of the first pipeline stage, of the last one, or of both.

    ``first``, ``last``: whether to include the parameters of the first and of the last stage. Names are
    complete, not relative to a layer.

    If the output layer is tied to the embedding, a separate last stage has a copy of the embedding. If the
    last stage is also the first stage, the tied output layer has no parameter.
    """
    # Checkpoint tensor that fills the embedding, and also a tied output layer.
    vocabulary_shape = (shape.vocab, shape.hidden)
    embedding = Source(EMBEDDING, vocabulary_shape, "vocabulary")
    weights: list[Weight] = []

    if first:
        weights.append(Weight("embedding.word_embeddings.weight", "vocabulary", (embedding,)))
        if shape.learned_positions:
            positions = Source("model.embed_positions.weight", (shape.learned_positions, shape.hidden))
            weights.append(Weight("embedding.position_embeddings.weight", "whole", (positions,)))

    if last:
        weights += _norm_weights(shape, "decoder.final_layernorm", "model.norm")

        output = "output_layer.weight"
        if shape.scalar_head:
            weights.append(Weight(output, "whole", (Source(SCALAR, (1, shape.hidden)),)))
        elif not shape.tied:
            weights.append(Weight(output, "vocabulary", (Source(OUTPUT, vocabulary_shape, "vocabulary"),)))
        elif not first:
            weights.append(Weight(output, "vocabulary", (embedding,)))
    return tuple(weights)


def _norm_weights(
    shape: ModelShape, module: str, source_module: str, fused_name: str = ""
) -> Iterator[Weight]:
    """Yield the parameters of a norm: ``module`` in Megatron, ``source_module`` in the checkpoint.

    ``fused_name`` is the name of the norm's weight in layers in which Transformer Engine fuses the norm with
    a linear layer. It is empty if the name is the same in all layers.
    """
    yield Weight(
        f"{module}.weight", "whole", (Source(f"{source_module}.weight", (shape.hidden,)),), fused_name
    )
    if shape.layer_norm:
        yield Weight(f"{module}.bias", "whole", (Source(f"{source_module}.bias", (shape.hidden,)),))


def _layer_norm_weights(shape: ModelShape, first_projection: str) -> Iterator[Weight]:
    """Yield the norms of a layer: before mixer and feed-forward, after them, or both (sandwich norms).

    ``first_projection`` is the mixer's linear layer into which Transformer Engine fuses the norm.
    """
    # Transformer Engine fuses a norm into the linear layer that follows.
    fused_mixer = f"self_attention.{first_projection}.layer_norm_weight"
    fused_mlp = "mlp.linear_fc1.layer_norm_weight"

    if shape.pre_norms:
        yield from _norm_weights(shape, "input_layernorm", "input_layernorm", fused_mixer)
    if not shape.post_norms:
        yield from _norm_weights(shape, "pre_mlp_layernorm", "post_attention_layernorm", fused_mlp)
        return

    # With post-norms ``post_attention_layernorm`` follows attention; otherwise it is the norm before the
    # MLP.
    yield from _norm_weights(shape, "self_attention.linear_proj.post_layernorm", "post_attention_layernorm")
    if shape.pre_norms:
        yield from _norm_weights(shape, "pre_mlp_layernorm", "pre_feedforward_layernorm", fused_mlp)
    yield from _norm_weights(shape, "mlp.linear_fc2.post_layernorm", "post_feedforward_layernorm")
