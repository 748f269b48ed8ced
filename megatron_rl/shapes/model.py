"""Sizes of a model, and the quantities that follow from them: parameters, FLOPs and KV cache.

All counts are sums over the layers' blocks and their parameters, so that they cannot drift from the real
model. FLOPs: Korthikanti et al. 2022 (arXiv 2205.05198) and Narayanan et al. 2021 (arXiv 2104.04473).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_rl.shapes.blocks.attention import Attention
from megatron_rl.shapes.blocks.block import Block, FeedForward, Mixer
from megatron_rl.shapes.blocks.experts import Experts
from megatron_rl.shapes.blocks.gated_delta_net import GatedDeltaNet
from megatron_rl.shapes.blocks.latent_attention import LatentAttention
from megatron_rl.shapes.blocks.mlp import Mlp
from megatron_rl.shapes.layer_weights import EngineSharding, Weight, layer_weights

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
"""dtype of a configuration -> bytes of an element."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. Widths and lengths are in elements; layers are counted from 0.

    >>> sizes = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp_width": 128}
    >>> shape = ModelShape("tiny", **sizes, vocab=100)
    >>> shape.parameters, shape.kv_elements
    (86848, 128)
    """

    name: str
    """Name of the model in messages: its preset, or its architecture."""
    hidden: int
    """Width of the residual stream."""
    layers: int
    """Number of decoder layers."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key-value heads, in layers whose block has no separate number (`Mixer.key_value_heads`)."""
    head_dim: int
    """Size of a head's query, key and value in layers whose block has no separate size (`Mixer.key_size`);
    not used by latent attention."""
    mlp_width: int
    """Width of a dense MLP."""
    vocab: int
    """Tokens of the vocabulary, not padded."""
    max_positions: int = 1 << 40
    """Longest sequence, in tokens."""
    tied: bool = False
    """Whether the output layer is the embedding."""
    scalar_head: bool = False
    """Whether the head returns one number per token instead of logits: a critic or a reward model."""
    gated: bool = True
    """Whether the MLP has three matrices (gate, up, down), not two."""
    layer_norm: bool = False
    """Whether norms are LayerNorm with a bias, not RMSNorm."""
    pre_norms: bool = True
    """Whether norms precede attention and MLP."""
    post_norms: bool = False
    """Whether norms follow attention and MLP, before their outputs are added to the residual stream."""
    centered_norms: bool = False
    """Whether the weights of norms are stored as their difference from 1, and multiply in float32."""
    qkv_bias: bool = False
    """Whether the projections of queries, keys and values have biases."""
    output_bias: bool = False
    """Whether attention's output projection has a bias."""
    mlp_bias: bool = False
    """Whether the matrices of a dense MLP have biases."""
    qk_norm: bool = False
    """Whether queries and keys are normalised, in each head or over all heads."""
    whole_qk_norm: bool = False
    """Whether the norms of queries and keys are over all heads together."""
    layer_scalars: bool = False
    """Whether the output of each layer is multiplied by a scalar, which is not trained."""
    learned_positions: int = 0
    """Rows of the learned position embedding; 0 for rotary positions."""
    experts: int = 0
    """Routed experts of a layer; 0 in a dense model."""
    experts_per_token: int = 0
    """Routed experts that the router selects for a token."""
    expert_width: int = 0
    """Width of a routed expert."""
    shared_width: int = 0
    """Width of a layer's shared experts together."""
    shared_gate: bool = False
    """Whether the output of the shared experts is gated."""
    router_bias: bool = False
    """Whether the router has biases that balance the load of the experts."""
    expert_bias: bool = False
    """Whether the matrices of routed experts and the projection of the router have biases."""
    dense_layers: tuple[int, ...] = ()
    """Layers of a mixture of experts that have a dense MLP."""
    q_lora: int = 0
    """Size of latent attention's query latent; 0 if queries are projected from the hidden state."""
    kv_lora: int = 0
    """Size of the key-value latent; above 0 attention is multi-head latent attention."""
    qk_nope: int = 0
    """Size of a latent head's query and key without rotary positions."""
    qk_rope: int = 0
    """Size of a latent head's query and key with rotary positions."""
    v_head_dim: int = 0
    """Size of a latent head's value."""
    sinks: bool = False
    """Whether each query head has an attention sink: a learned logit in the denominator of the softmax."""
    output_gate: bool = False
    """Whether attention's output is gated by a second query-sized projection."""
    linear_layers: tuple[int, ...] = ()
    """Layers with a gated delta net instead of attention."""
    linear_interleaved: bool = False
    """Whether the checkpoint interleaves the projections of a delta net by key head."""
    linear_k_heads: int = 0
    """Key heads of a delta net."""
    linear_qk: int = 0
    """Width of a delta net's keys: the number of key heads times their size."""
    linear_v: int = 0
    """Width of a delta net's values: the number of value heads times their size."""
    linear_v_heads: int = 0
    """Value heads of a delta net."""
    linear_v_head_dim: int = 0
    """Size of a delta net's value head."""
    linear_conv: int = 0
    """Kernel size of a delta net's convolution, in tokens."""
    sliding_window: int = 0
    """Tokens that a layer of ``sliding_layers`` attends to."""
    sliding_layers: tuple[int, ...] = ()
    """Layers that attend to a sliding window."""
    blocks: tuple[Block, ...] = ()
    """Block of each layer, if the fields above do not describe the blocks; otherwise empty."""

    @property
    def has_latent_attention(self) -> bool:
        """Return whether attention is multi-head latent attention."""
        return self.kv_lora > 0

    @property
    def needs_plain_layers(self) -> bool:
        """Return whether the model needs Megatron's own layers: Transformer Engine's have no post-norms."""
        return self.post_norms

    @property
    def config_class(self) -> str:
        """Return the name of Megatron's configuration class that the model's mixers need."""
        for mixer in self.mixers:
            if mixer.config_class != Mixer.config_class:
                return mixer.config_class
        return Mixer.config_class

    @property
    def linear_k_head_dim(self) -> int:
        """Return the size of a delta net's key head, 0 without delta nets."""
        return self.linear_qk // max(1, self.linear_k_heads)

    @property
    def moe_layers(self) -> int:
        """Return the number of layers with routed experts."""
        return sum(count for block, count in self._block_counts.items() if block.feed_forward.routed)

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has routed experts."""
        return self.block(layer).feed_forward.routed

    def with_scalar_head(self) -> ModelShape:
        """Return the shape of the same model with a scalar head."""
        return replace(self, scalar_head=True, tied=False)

    def padded_vocab(self, tensor: int) -> int:
        """Return the vocabulary size rounded up to a multiple of ``tensor`` ranks."""
        return -(-self.vocab // tensor) * tensor

    def largest_tensor_parallel_size(self, limit: int) -> int:
        """Return the largest tensor-parallel size up to ``limit`` that divides heads and the MLP width."""
        mixer_heads: list[int] = []
        for mixer in self.mixers:
            mixer_heads += mixer.other_sharded_heads(self).values()
            mixer_heads.append(mixer.key_value_heads(self))
        common_divisor = math.gcd(self.heads, self.mlp_width, *mixer_heads)
        sizes = range(1, min(limit, common_divisor) + 1)
        return max(size for size in sizes if common_divisor % size == 0)

    # Blocks of the layers; the remaining methods of this class sum over them.

    def block(self, layer: int) -> Block:
        """Return the mixer and the feed-forward of a layer."""
        return self._blocks[layer]

    @cached_property
    def mixers(self) -> Counter[Mixer]:
        """Return the number of layers with each mixer, in the order of the layers."""
        return Counter(block.mixer for block in self._blocks)

    @cached_property
    def feed_forwards(self) -> Counter[FeedForward]:
        """Return the number of layers with each feed-forward, in the order of the layers."""
        return Counter(block.feed_forward for block in self._blocks)

    def weights(self, layer: int) -> tuple[Weight, ...]:
        """Return the parameters of a layer, in the order in which checkpoints list their tensors."""
        return self._weights[self._blocks[layer]]

    def count_blocks(self, layers: Iterable[int]) -> Counter[Block]:
        """Count how many of ``layers`` have each block; the result is cached and must not be changed."""
        # The planner counts the same few stages in thousands of layouts.
        key = tuple(layers)
        if key not in self._count_blocks_cache:
            self._count_blocks_cache[key] = Counter(self._blocks[layer] for layer in key)
        return self._count_blocks_cache[key]

    def block_parameters(self, block: Block) -> tuple[int, int, int]:
        """Return a layer's parameter counts: (tensor-sharded, replicated, in all its routed experts)."""
        return self._block_parameters[block]

    @cached_property
    def _blocks(self) -> tuple[Block, ...]:
        """Return the block of each layer."""
        if self.blocks:
            assert len(self.blocks) == self.layers, "a block for each layer"
            return self.blocks

        # Layers of the same type share one object.
        attention: Mixer = Attention()
        if self.has_latent_attention:
            attention = LatentAttention()
        delta_net = GatedDeltaNet()
        mlp = Mlp()
        experts = Experts()
        linear_layers = set(self.linear_layers)
        dense_layers = set(self.dense_layers)

        blocks = []
        for layer in range(self.layers):
            mixer = attention
            if layer in linear_layers:
                mixer = delta_net
            feed_forward: FeedForward = mlp
            if self.experts and layer not in dense_layers:
                feed_forward = experts
            blocks.append(Block(mixer, feed_forward))
        return tuple(blocks)

    # Layers with equal blocks are counted once: the planner evaluates many layouts of one model.

    @cached_property
    def _count_blocks_cache(self) -> dict[tuple[int, ...], Counter[Block]]:
        """Return the cache of `count_blocks`: its results by the tuple of layers."""
        return {}

    @cached_property
    def _block_counts(self) -> Counter[Block]:
        """Return the number of layers with each block."""
        return Counter(self._blocks)

    @cached_property
    def _weights(self) -> dict[Block, tuple[Weight, ...]]:
        """Return the parameters of a layer, by the block of the layer."""
        return {block: layer_weights(self, block) for block in self._block_counts}

    @cached_property
    def _block_parameters(self) -> dict[Block, tuple[int, int, int]]:
        """Compute the result of `block_parameters` for each block of the model."""

        def count_parameters(weights: tuple[Weight, ...]) -> tuple[int, int, int]:
            """Count the parameters of one layer: (tensor-sharded, replicated, in all routed experts)."""
            expert_parameters = sum(weight.elements for weight in weights if weight.expert) * self.experts
            dense_weights = [weight for weight in weights if not weight.expert]

            # Transformer Engine replicates latent attention's down projections.
            replicated_parameters = sum(
                weight.elements for weight in dense_weights if weight.sharding in ("whole", "latent")
            )
            sharded_parameters = sum(weight.elements for weight in dense_weights) - replicated_parameters
            return sharded_parameters, replicated_parameters, expert_parameters

        return {block: count_parameters(weights) for block, weights in self._weights.items()}

    def _count_elements(self, expert: bool, *engine_shardings: EngineSharding) -> int:
        """Count the elements of the weights of all layers.

        If ``expert``, count one routed expert per layer, otherwise all weights outside of routed experts.
        ``engine_shardings`` restricts the count to tensors that the engine shards in one of the given ways.
        """
        elements = 0
        for block, layer_count in self._block_counts.items():
            for weight in self._weights[block]:
                if weight.expert != expert:
                    continue
                for source in weight.sources:
                    if not engine_shardings or source.engine_sharding in engine_shardings:
                        elements += layer_count * source.elements
        return elements

    @cached_property
    def embedding_parameters(self) -> int:
        """Count the parameters of one vocabulary embedding."""
        return self.vocab * self.hidden

    @cached_property
    def head_parameters(self) -> int:
        """Count the parameters of the output layer: 0 if it is tied, one row for a scalar head."""
        if self.tied:
            return 0
        if self.scalar_head:
            return self.hidden
        return self.embedding_parameters

    @property
    def _tensors_per_norm(self) -> int:
        """Return the number of parameter tensors of one norm.

        An RMSNorm has a weight. A LayerNorm has a weight and a bias.
        """
        if self.layer_norm:
            return 2
        return 1

    @cached_property
    def final_norm_parameters(self) -> int:
        """Count the parameters of the norm after the last layer."""
        return self.hidden * self._tensors_per_norm

    @cached_property
    def expert_parameters(self) -> int:
        """Count the parameters of one routed expert, 0 without experts."""
        for weights in self._weights.values():
            parameters = sum(weight.elements for weight in weights if weight.expert)
            # All layers with experts have experts of the same size.
            if parameters:
                return parameters
        return 0

    @cached_property
    def routed_expert_parameters(self) -> int:
        """Count the parameters of all routed experts of all layers."""
        return self.experts * self._count_elements(True)

    @cached_property
    def nonexpert_layer_parameters(self) -> int:
        """Count the parameters of all layers outside routed experts."""
        return self._count_elements(False)

    @cached_property
    def key_value_parameters(self) -> Counter[tuple[int, int]]:
        """Count the parameters of projections to keys and values.

        They are counted separately because an engine with more ranks than key-value heads replicates them.
        The result maps (number of key-value heads in a layer, `Source.engine_copies`) to the count.
        """
        parameters: Counter[tuple[int, int]] = Counter()
        for block, count in self._block_counts.items():
            for weight in self._weights[block]:
                for source in weight.sources:
                    if source.engine_sharding == "heads":
                        parameters[source.heads, source.engine_copies] += count * source.elements
        return parameters

    @cached_property
    def query_width(self) -> float:
        """Return the width of the queries of all heads, averaged over the layers."""
        widths = sum(count * mixer.query_width(self) for mixer, count in self.mixers.items())
        return widths / self.layers

    @cached_property
    def replicated_parameters(self) -> int:
        """Count the parameters of all layers that an engine replicates, such as norms and routers."""
        return self._count_elements(False, "whole")

    @cached_property
    def parameters(self) -> int:
        """Count all parameters of the model: embeddings, layers, final norm and output layer."""
        outer_parameters = self.embedding_parameters + self.head_parameters
        outer_parameters += self.learned_positions * self.hidden
        return (
            outer_parameters
            + self.final_norm_parameters
            + self.nonexpert_layer_parameters
            + self.routed_expert_parameters
        )

    @cached_property
    def active_expert_parameters(self) -> int:
        """Count the parameters of the routed experts that the router selects for a token, in all layers."""
        return self.moe_layers * self.experts_per_token * self.expert_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Count the parameters that a token uses: all except the routed experts that are not selected."""
        return self.parameters - self.routed_expert_parameters + self.active_expert_parameters

    @cached_property
    def tensor_count(self) -> int:
        """Count the tensors of the checkpoint; a fused tensor counts once per source."""
        layer_tensors = 0
        for block, count in self._block_counts.items():
            for weight in self._weights[block]:
                copies = 1
                if weight.expert:
                    copies = self.experts
                layer_tensors += count * copies * len(weight.sources)

        # Outside the layers: embedding, final norm, output layer, learned positions.
        return layer_tensors + 1 + self._tensors_per_norm + (not self.tied) + (self.learned_positions > 0)

    def attention_flops(self, context: float) -> float:
        """Return the forward FLOPs of one token's mixers in all layers at a mean context length.

        ``context`` is the number of keys that the token attends to: the sequence length without a mask, half
        of it with a causal mask. Projections are not counted.
        """
        total_flops = 0.0
        for layer_count, sliding_count, flops_per_key, flops_per_token in self._mixer_flops:
            # A layer with a sliding window attends to at most the keys inside the window.
            window_keys: float = 0
            if sliding_count:
                window_keys = min(context, self.sliding_window)

            keys = (layer_count - sliding_count) * context + sliding_count * window_keys
            total_flops += flops_per_key * keys + layer_count * flops_per_token
        return total_flops

    @cached_property
    def _mixer_flops(self) -> list[tuple[int, int, int, float]]:
        """Return the terms of `attention_flops`, one tuple per mixer of the model.

        A tuple has four numbers: layers with the mixer, layers with the mixer and a sliding window, FLOPs of
        one layer per attended key, and FLOPs of one layer per token.
        """
        sliding_counts = Counter(
            self._blocks[layer].mixer for layer in self.sliding_layers if layer < self.layers
        )
        return [
            (layer_count, sliding_counts[mixer], mixer.flops_per_key(self), mixer.flops_per_token(self))
            for mixer, layer_count in self.mixers.items()
        ]

    @cached_property
    def layer_flops(self) -> float:
        """Return the FLOPs per token of the layers in a forward pass, two per active parameter."""
        return 2.0 * (self.nonexpert_layer_parameters + self.active_expert_parameters)

    @cached_property
    def head_flops(self) -> float:
        """Return the FLOPs per token of the output projection in a forward pass."""
        return 2.0 * self.embedding_parameters

    def forward_flops(self, context: float) -> float:
        """Return the forward FLOPs per token: layers, attention at ``context`` keys, output projection."""
        return self.layer_flops + self.head_flops + self.attention_flops(context)

    @cached_property
    def kv_elements(self) -> int:
        """Count the elements of the KV cache for one token of a sequence, in all layers."""
        return sum(count * mixer.cache_elements(self) for mixer, count in self.mixers.items())

    def kv_bytes_per_gpu(self, tensor: int, bytes_per_element: float = 2.0) -> float:
        """Return the bytes of the KV cache for one token of a sequence, on one GPU of the engine.

        ``tensor``: tensor-parallel size of the engine.
        """
        return sum(
            count * mixer.cache_elements(self) * bytes_per_element / mixer.cache_shards(self, tensor)
            for mixer, count in self.mixers.items()
        )

    def state_bytes_per_row(self, tensor: int, bytes_per_element: float = 2.0) -> float:
        """Return the bytes of the fixed-size states of one row (sequence), on one GPU of the engine.

        Layers without a KV cache, such as gated delta nets, have such states. ``tensor``: tensor-parallel
        size of the engine.
        """
        return sum(
            count * mixer.state_bytes(self, bytes_per_element) / tensor
            for mixer, count in self.mixers.items()
        )
