"""The parameters of a decoder layer, in Megatron's names and in those of Hugging Face checkpoints.

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
"""The head of a model that gives one number per token instead of a distribution."""

Cut = Literal["whole", "rows", "columns", "gate_up", "query_key_value", "latent", "vocabulary", "stacked"]
"""How Megatron cuts a parameter over tensor ranks.

``gate_up`` cuts each half's rows, ``query_key_value`` interleaves by key-value group. ``latent`` is cut by
rows in Megatron's own layers and whole in Transformer Engine's; ``vocabulary`` by rows, the last ones padded.
``stacked`` is whole on every rank, one source below the other.
"""
EngineCut = Literal["whole", "rows", "columns", "heads", "vocabulary"]
"""How vLLM cuts a checkpoint tensor.

``heads`` are the rows of key-value heads, copied where ranks outnumber them; ``vocabulary`` is rows, padded.
"""


@dataclass(frozen=True)
class Source:
    """Name a checkpoint tensor below ``model.layers.N``, with its whole shape and the engine's cut."""

    name: str
    shape: tuple[int, ...]
    engine: EngineCut = "whole"
    float32: bool = False
    """The values are kept in float32 whatever the model's dtype is."""
    first: int = 0
    """The row of the checkpoint tensor at which this begins, where the tensor holds several."""

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Weight:
    """Describe one parameter of a Megatron layer and the checkpoint tensors it is filled from.

    ``name`` is the parameter's below ``decoder.layers.N`` in Megatron's own layers, ``fused`` its name where
    Transformer Engine fuses modules. An expert's names hold ``{expert}``.
    """

    name: str
    cut: Cut
    sources: tuple[Source, ...]
    fused: str = ""
    expert: bool = False

    @property
    def elements(self) -> int:
        """Return the number of elements before any cut."""
        return sum(source.elements for source in self.sources)

    def local_shape(self, parts: int) -> tuple[int, ...]:
        """Return the shape of one of ``parts`` equal parts, in Megatron's own layers."""
        rows, rest = sum(source.shape[0] for source in self.sources), self.sources[0].shape[1:]
        if self.cut in ("whole", "stacked"):
            return (rows, *rest)
        if self.cut == "vocabulary":
            return (-(-rows // parts), *rest)
        return (rows, rest[0] // parts) if self.cut == "columns" else (rows // parts, *rest)


def layer_weights(shape: ModelShape, linear: bool, experts: bool) -> tuple[Weight, ...]:
    """Return the parameters of a layer, in the order in which checkpoints list their tensors.

    ``linear`` says that a gated delta net takes the place of attention, ``experts`` that of the MLP is taken
    by routed experts.
    """
    attention = _delta_net if linear else _latent if shape.mla else _attention
    return (*_norms(shape), *attention(shape), *(_mixture(shape) if experts else _mlp(shape)))


def outer_weights(shape: ModelShape, first: bool, last: bool) -> tuple[Weight, ...]:
    """Return what the first and the last pipeline stage hold beside their layers.

    Names are whole, not below a layer. Tied to the embedding, the output layer of a last stage that is not
    the first is a copy of it.
    """
    vocabulary = shape.vocab, shape.hidden
    embedding = Source(EMBEDDING, vocabulary, "vocabulary")
    weights: list[Weight] = []
    if first:
        weights.append(Weight("embedding.word_embeddings.weight", "vocabulary", (embedding,)))
        if shape.learned_positions:
            positions = Source("model.embed_positions.weight", (shape.learned_positions, shape.hidden))
            weights.append(Weight("embedding.position_embeddings.weight", "whole", (positions,)))
    if last:
        weights += _norm(shape, "decoder.final_layernorm", "model.norm")
        output = "output_layer.weight"
        if shape.scalar_head:
            weights.append(Weight(output, "whole", (Source(SCALAR, (1, shape.hidden)),)))
        elif not shape.tied:
            weights.append(Weight(output, "vocabulary", (Source(OUTPUT, vocabulary, "vocabulary"),)))
        elif not first:
            weights.append(Weight(output, "vocabulary", (embedding,)))
    return tuple(weights)


def _norm(shape: ModelShape, name: str, source: str, fused: str = "") -> Iterator[Weight]:
    yield Weight(f"{name}.weight", "whole", (Source(f"{source}.weight", (shape.hidden,)),), fused)
    if shape.layer_norm:
        yield Weight(f"{name}.bias", "whole", (Source(f"{source}.bias", (shape.hidden,)),))


def _norms(shape: ModelShape) -> Iterator[Weight]:
    before_mlp = ("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm_weight")
    yield from _norm(
        shape, "input_layernorm", "input_layernorm", "self_attention.linear_qkv.layer_norm_weight"
    )
    if not shape.sandwich_norms:
        yield from _norm(shape, before_mlp[0], "post_attention_layernorm", before_mlp[1])
        return
    yield from _norm(shape, "self_attention.linear_proj.post_layernorm", "post_attention_layernorm")
    yield from _norm(shape, before_mlp[0], "pre_feedforward_layernorm", before_mlp[1])
    yield from _norm(shape, "mlp.linear_fc2.post_layernorm", "post_feedforward_layernorm")


def _attention(shape: ModelShape) -> Iterator[Weight]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projected = queries * (2 if shape.output_gate else 1)
    sizes: tuple[tuple[str, int, EngineCut], ...] = (
        ("q", projected, "rows"), ("k", keys, "heads"), ("v", keys, "heads"),
    )  # fmt: skip
    yield Weight(
        "self_attention.linear_qkv.weight",
        "query_key_value",
        tuple(
            Source(f"self_attn.{kind}_proj.weight", (rows, shape.hidden), cut) for kind, rows, cut in sizes
        ),
    )
    output = Source("self_attn.o_proj.weight", (shape.hidden, queries), "columns")
    yield Weight("self_attention.linear_proj.weight", "columns", (output,))
    if shape.qkv_bias:
        biases = tuple(Source(f"self_attn.{kind}_proj.bias", (rows,), cut) for kind, rows, cut in sizes)
        yield Weight("self_attention.linear_qkv.bias", "query_key_value", biases)
    if shape.output_bias:
        bias = Source("self_attn.o_proj.bias", (shape.hidden,))
        yield Weight("self_attention.linear_proj.bias", "whole", (bias,))
    for kind in "qk" if shape.qk_norm else "":
        norm = Source(f"self_attn.{kind}_norm.weight", (shape.head_dim,))
        yield Weight(f"self_attention.{kind}_layernorm.weight", "whole", (norm,))


def _latent(shape: ModelShape) -> Iterator[Weight]:
    """Yield multi-head latent attention: DeepSeek-V2 (arXiv 2405.04434), section 2.1."""
    queries, latent = shape.heads * shape.qk_dim, shape.kv_lora

    def weight(name: str, cut: Cut, source: Source, fused: str = "") -> Weight:
        prefix = "self_attention."
        return Weight(
            f"{prefix}{name}.weight",
            cut,
            (replace(source, name=f"self_attn.{source.name}.weight"),),
            prefix + fused if fused else "",
        )

    if not shape.q_lora:
        yield weight("linear_q_proj", "rows", Source("q_proj", (queries, shape.hidden), "rows"))
    else:
        yield weight("linear_q_down_proj", "latent", Source("q_a_proj", (shape.q_lora, shape.hidden)))
        yield weight(
            "q_layernorm",
            "whole",
            Source("q_a_layernorm", (shape.q_lora,)),
            "linear_q_up_proj.layer_norm_weight",
        )
        yield weight("linear_q_up_proj", "rows", Source("q_b_proj", (queries, shape.q_lora), "rows"))
    down = Source("kv_a_proj_with_mqa", (latent + shape.qk_rope, shape.hidden))
    yield weight("linear_kv_down_proj", "latent", down)
    yield weight(
        "kv_layernorm",
        "whole",
        Source("kv_a_layernorm", (latent,)),
        "linear_kv_up_proj.layer_norm_weight",
    )
    up = shape.heads * (shape.qk_nope + shape.v_head_dim)
    yield weight("linear_kv_up_proj", "rows", Source("kv_b_proj", (up, latent), "rows"))
    output = Source("o_proj", (shape.hidden, shape.heads * shape.v_head_dim), "columns")
    yield weight("linear_proj", "columns", output)


def _delta_net(shape: ModelShape) -> Iterator[Weight]:
    """Yield a gated delta net (arXiv 2412.06464; transformers qwen3_next); Megatron has none of it."""
    tensors: tuple[tuple[str, tuple[int, ...], Cut], ...] = (
        ("in_proj_qkvz.weight", (2 * shape.linear_qk + 2 * shape.linear_v, shape.hidden), "rows"),
        ("in_proj_ba.weight", (2 * shape.linear_v_heads, shape.hidden), "rows"),
        ("conv1d.weight", (2 * shape.linear_qk + shape.linear_v, 1, shape.linear_conv), "rows"),
        ("dt_bias", (shape.linear_v_heads,), "rows"),
        ("A_log", (shape.linear_v_heads,), "rows"),
        ("norm.weight", (shape.linear_v_head_dim,), "whole"),
        ("out_proj.weight", (shape.hidden, shape.linear_v), "columns"),
    )
    for name, size, cut in tensors:
        engine: EngineCut = "rows" if cut == "rows" else "columns" if cut == "columns" else "whole"
        yield Weight(f"linear_attention.{name}", cut, (Source(f"linear_attn.{name}", size, engine),))


def _mlp(shape: ModelShape) -> Iterator[Weight]:
    yield from _gated(shape, "mlp.", "mlp.", shape.mlp_width)
    if not shape.mlp_bias:
        return
    yield from _mlp_bias(shape, "mlp.", "mlp.", shape.mlp_width)


def _gated(
    shape: ModelShape, name: str, source: str, width: int, fused: str = "", expert: bool = False
) -> Iterator[Weight]:
    halves = ("gate_proj", "up_proj") if shape.gated else ("up_proj",)
    inner = tuple(Source(f"{source}{half}.weight", (width, shape.hidden), "rows") for half in halves)
    outer = (Source(f"{source}down_proj.weight", (shape.hidden, width), "columns"),)
    first = fused.format(linear="linear_fc1", expert="{expert}")
    second = fused.format(linear="linear_fc2", expert="{expert}")
    cut: Cut = "gate_up" if shape.gated else "rows"
    yield Weight(f"{name}linear_fc1.weight", cut, inner, first, expert)
    yield Weight(f"{name}linear_fc2.weight", "columns", outer, second, expert)


def _mlp_bias(
    shape: ModelShape, name: str, source: str, width: int, expert: bool = False
) -> Iterator[Weight]:
    halves = ("gate_proj", "up_proj") if shape.gated else ("up_proj",)
    inner = tuple(Source(f"{source}{half}.bias", (width,), "rows") for half in halves)
    yield Weight(f"{name}linear_fc1.bias", "gate_up" if shape.gated else "rows", inner, expert=expert)
    outer = (Source(f"{source}down_proj.bias", (shape.hidden,)),)
    yield Weight(f"{name}linear_fc2.bias", "whole", outer, expert=expert)


def _mixture(shape: ModelShape) -> Iterator[Weight]:
    router = Source("mlp.gate.weight", (shape.experts, shape.hidden))
    yield Weight("mlp.router.weight", "whole", (router,))
    if shape.router_bias:
        bias = Source("mlp.gate.e_score_correction_bias", (shape.experts,), float32=True)
        yield Weight("mlp.router.expert_bias", "whole", (bias,))
    if shape.shared_width:
        yield from _gated(shape, "mlp.shared_experts.", "mlp.shared_experts.", shape.shared_width)
    if shape.shared_gate:
        gate = Source("mlp.shared_expert_gate.weight", (1, shape.hidden))
        yield Weight("mlp.shared_experts.gate_weight", "whole", (gate,))
    expert, source = "mlp.experts.local_experts.{expert}.", "mlp.experts.{expert}."
    fused = "mlp.experts.{linear}.weight{expert}"
    yield from _gated(shape, expert, source, shape.expert_width, fused, expert=True)
    if shape.expert_bias:
        yield from _mlp_bias(shape, expert, source, shape.expert_width, expert=True)
