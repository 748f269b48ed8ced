"""The sizes of a model, and what follows from them: parameters, FLOPs and cache.

FLOPs: Korthikanti et al. 2022 (arXiv 2205.05198) and Narayanan et al. 2021 (arXiv 2104.04473).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron_rl.shapes.layer_weights import EngineCut, Weight, layer_weights

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


class LayerKind(NamedTuple):
    """Say what a layer has in the place of softmax attention and of an MLP."""

    linear: bool
    experts: bool


@dataclass(frozen=True)
class ModelShape:
    """Hold the sizes of a decoder; widths and lengths are in elements, layers are counted from 0.

    ``experts`` is 0 in a dense model; the layers without experts of a mixture are ``dense_layers``.
    ``kv_lora`` above 0 means multi-head latent attention, which does not use ``head_dim``.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab: int
    max_positions: int = 1 << 40
    tied: bool = False
    scalar_head: bool = False
    """One number per token in the place of the vocabulary: a critic or a reward model."""
    gated: bool = True
    """The MLP has three matrices (gate, up, down), not two."""
    layer_norm: bool = False
    """Norms are LayerNorm with a bias, not RMSNorm."""
    sandwich_norms: bool = False
    """A norm follows attention and MLP too."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    learned_positions: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0
    """The width of a layer's shared experts together."""
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    dense_layers: tuple[int, ...] = ()
    q_lora: int = 0
    """0 with latent attention: the query comes straight from the hidden state."""
    kv_lora: int = 0
    qk_nope: int = 0
    qk_rope: int = 0
    v_head_dim: int = 0
    output_gate: bool = False
    """Attention's output is gated by a second query-sized projection."""
    linear_layers: tuple[int, ...] = ()
    """Layers with a gated delta net instead of attention."""
    linear_qk: int = 0
    """Key heads times their size."""
    linear_v: int = 0
    linear_v_heads: int = 0
    linear_v_head_dim: int = 0
    linear_conv: int = 0
    sliding_window: int = 0
    sliding_layers: tuple[int, ...] = ()

    @property
    def mla(self) -> bool:
        """Say whether attention is multi-head latent attention."""
        return self.kv_lora > 0

    @property
    def plain_layers(self) -> bool:
        """Say whether Transformer Engine has no layers for the model: norms follow attention and MLP."""
        return self.sandwich_norms

    @property
    def qk_dim(self) -> int:
        """Return the size of one head's query and key."""
        return self.qk_nope + self.qk_rope if self.mla else self.head_dim

    @property
    def value_dim(self) -> int:
        """Return the size of one head's value."""
        return self.v_head_dim if self.mla else self.head_dim

    @property
    def attention_layers(self) -> int:
        """Count the layers with softmax attention."""
        return self.layers - len(self.linear_layers)

    @property
    def moe_layers(self) -> int:
        """Count the layers with routed experts."""
        return self.layers - len(self.dense_layers) if self.experts else 0

    def has_experts(self, layer: int) -> bool:
        """Say whether a layer has routed experts."""
        return self.experts > 0 and layer not in self.dense_layers

    def with_scalar_head(self) -> ModelShape:
        """Return the shape of the same model with a head of one number."""
        return replace(self, scalar_head=True, tied=False)

    def padded_vocab(self, tensor: int) -> int:
        """Return the vocabulary size rounded up so that ``tensor`` ranks hold equal parts."""
        return -(-self.vocab // tensor) * tensor

    def weights(self, layer: int) -> tuple[Weight, ...]:
        """Return the parameters of a layer, in the order in which checkpoints list their tensors."""
        return self._weights[self._kinds[layer]]

    def kinds_of(self, layers: Iterable[int]) -> Counter[LayerKind]:
        """Count the kinds of some layers."""
        return Counter(self._kinds[layer] for layer in layers)

    def kind_parameters(self, kind: LayerKind) -> tuple[int, int, int]:
        """Return one layer's parameters that tensor ranks cut, that they all hold, and of all its experts."""
        return self._kind_parameters[kind]

    @cached_property
    def _kinds(self) -> list[LayerKind]:
        linear = [layer in self.linear_layers for layer in range(self.layers)]
        return [LayerKind(linear[layer], self.has_experts(layer)) for layer in range(self.layers)]

    @cached_property
    def _layer_kinds(self) -> Counter[LayerKind]:
        return Counter(self._kinds)

    @cached_property
    def _weights(self) -> dict[LayerKind, tuple[Weight, ...]]:
        kinds = [LayerKind(linear, experts) for linear in (False, True) for experts in (False, True)]
        return {kind: layer_weights(self, *kind) for kind in kinds}

    @cached_property
    def _kind_parameters(self) -> dict[LayerKind, tuple[int, int, int]]:
        def count(weights: tuple[Weight, ...]) -> tuple[int, int, int]:
            experts = sum(weight.elements for weight in weights if weight.expert) * self.experts
            dense = [weight for weight in weights if not weight.expert]
            whole = sum(weight.elements for weight in dense if weight.cut in ("whole", "latent"))
            return sum(weight.elements for weight in dense) - whole, whole, experts

        return {kind: count(weights) for kind, weights in self._weights.items()}

    def _total(self, expert: bool, *cuts: EngineCut) -> int:
        """Count the elements of all layers in or outside experts, of all of the engine's cuts or of some."""
        return sum(
            count * source.elements
            for kind, count in self._layer_kinds.items()
            for weight in self._weights[kind]
            if weight.expert == expert
            for source in weight.sources
            if not cuts or source.engine in cuts
        )

    @cached_property
    def embedding_parameters(self) -> int:
        """Count one vocabulary embedding."""
        return self.vocab * self.hidden

    @cached_property
    def head_parameters(self) -> int:
        """Count the output layer's own weights: 0 where it is tied, one row where it gives one number."""
        return 0 if self.tied else self.hidden if self.scalar_head else self.embedding_parameters

    @cached_property
    def final_norm_parameters(self) -> int:
        """Count the norm behind the last layer."""
        return self.hidden * (2 if self.layer_norm else 1)

    @cached_property
    def expert_parameters(self) -> int:
        """Count one routed expert."""
        return sum(weight.elements for weight in self._weights[LayerKind(False, True)] if weight.expert)

    @cached_property
    def routed_expert_parameters(self) -> int:
        """Count all routed experts of all layers."""
        return self.experts * self._total(True)

    @cached_property
    def layer_dense_total(self) -> int:
        """Count everything in the layers except routed experts."""
        return self._total(False)

    @cached_property
    def key_value_parameters(self) -> int:
        """Count, in all layers, what an engine with more ranks than key-value heads holds several times."""
        return self._total(False, "heads")

    @cached_property
    def replicated_parameters(self) -> int:
        """Count, in all layers, what every tensor rank of an engine holds: norms, routers and the like."""
        return self._total(False, "whole")

    @cached_property
    def parameters(self) -> int:
        """Count all parameters of the checkpoint."""
        ends = self.embedding_parameters + self.head_parameters + self.learned_positions * self.hidden
        return ends + self.final_norm_parameters + self.layer_dense_total + self.routed_expert_parameters

    @cached_property
    def active_expert_parameters(self) -> int:
        """Count, in all layers, the routed experts that a token goes to."""
        return self.moe_layers * self.experts_per_token * self.expert_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Count the parameters a token meets: all but the experts it skips."""
        return self.parameters - self.routed_expert_parameters + self.active_expert_parameters

    @cached_property
    def tensors(self) -> int:
        """Count the named tensors of the checkpoint, those that it fuses one by one."""
        layers = sum(
            count * len(weight.sources) * (self.experts if weight.expert else 1)
            for kind, count in self._layer_kinds.items()
            for weight in self._weights[kind]
        )
        ends = 1 + (2 if self.layer_norm else 1) + (not self.tied) + (self.learned_positions > 0)
        return layers + ends

    def attention_flops(self, context: float) -> float:
        """Return the forward FLOPs of one token's attention in all layers at a mean context length.

        ``context`` is how many keys the token attends to: s for the full convention, s/2 causal. Score and
        value products: 2 (d_qk + d_v) a key; gated delta nets do a constant amount.
        """
        per_key = 2 * self.heads * (self.qk_dim + self.value_dim)
        sliding = len(self.sliding_layers)
        window = min(context, self.sliding_window) if sliding else 0
        linear = len(self.linear_layers) * 6.0 * self.linear_qk * self.linear_v_head_dim
        return per_key * ((self.attention_layers - sliding) * context + sliding * window) + linear

    @cached_property
    def layer_flops(self) -> float:
        """Return the forward FLOPs per token of the layers, two per active parameter."""
        return 2.0 * (self.layer_dense_total + self.active_expert_parameters)

    @cached_property
    def head_flops(self) -> float:
        """Return the forward FLOPs per token of the output projection."""
        return 2.0 * self.embedding_parameters

    def forward_flops(self, context: float) -> float:
        """Return the forward FLOPs per token: layers, attention at ``context`` keys, output projection."""
        return self.layer_flops + self.head_flops + self.attention_flops(context)

    @cached_property
    def kv_elements(self) -> int:
        """Count the cache's elements per token: 2 L kv d, or (c_kv + rope) L for latent attention."""
        if self.mla:
            return self.attention_layers * (self.kv_lora + self.qk_rope)
        return self.attention_layers * 2 * self.kv_heads * self.head_dim

    def kv_bytes_per_gpu(self, tensor: int, bytes_per_element: float = 2.0) -> float:
        """Return the cache's bytes per token on one of ``tensor`` ranks.

        Key-value heads divide over ranks until each has one; a latent cache has no heads to divide by.
        """
        share = 1 if self.mla else min(tensor, self.kv_heads)
        return self.kv_elements * bytes_per_element / share
