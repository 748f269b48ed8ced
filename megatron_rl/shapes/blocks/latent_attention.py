"""Multi-head latent attention: one latent for all keys and values (DeepSeek-V2, arXiv 2405.04434)."""

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


@dataclass(frozen=True)
class LatentAttention(Mixer):
    """Attention whose keys and values are expanded from one latent, with the sizes of `ModelShape`."""

    name: ClassVar[str] = "latent_attention"
    noun: ClassVar[str] = "layers of latent attention"
    config_class: ClassVar[str] = "MLATransformerConfig"
    kernel_size_name: ClassVar[str] = "kv_lora_rank + qk_rope_head_dim"
    fuses_rotary: ClassVar[bool] = False

    def key_value_heads(self, shape: ModelShape) -> int:
        """Return the number of attention heads.

        The up projection expands the latent of a token into a separate key and value for each head.
        """
        return shape.heads

    def key_size(self, shape: ModelShape) -> int:
        """Return the size of one head's query and key, including the dimensions with rotary positions."""
        return shape.qk_nope + shape.qk_rope

    def value_size(self, shape: ModelShape) -> int:
        """Return the size of one head's value after the latent is expanded."""
        return shape.v_head_dim

    def weights(self, shape: ModelShape) -> Iterator[Weight]:
        """Yield the projections down to latents and up to heads, their norms, and the output projection."""
        query_rows = shape.heads * self.key_size(shape)
        latent = shape.kv_lora

        # Queries: one projection, or down to a latent and up again.
        if not shape.q_lora:
            yield _make_weight("linear_q_proj", "rows", Source("q_proj", (query_rows, shape.hidden), "rows"))
        else:
            query_down = Source("q_a_proj", (shape.q_lora, shape.hidden))
            yield _make_weight("linear_q_down_proj", "latent", query_down)
            yield _make_weight(
                "q_layernorm",
                "whole",
                Source("q_a_layernorm", (shape.q_lora,)),
                "linear_q_up_proj.layer_norm_weight",
            )
            query_up = Source("q_b_proj", (query_rows, shape.q_lora), "rows")
            yield _make_weight("linear_q_up_proj", "rows", query_up)

        # Keys and values: down to one latent and the rotary part, then up to all heads.
        kv_down = Source("kv_a_proj_with_mqa", (latent + shape.qk_rope, shape.hidden))
        yield _make_weight("linear_kv_down_proj", "latent", kv_down)
        yield _make_weight(
            "kv_layernorm",
            "whole",
            Source("kv_a_layernorm", (latent,)),
            "linear_kv_up_proj.layer_norm_weight",
        )
        up_rows = shape.heads * (shape.qk_nope + shape.v_head_dim)
        yield _make_weight("linear_kv_up_proj", "rows", Source("kv_b_proj", (up_rows, latent), "rows"))

        output = Source("o_proj", (shape.hidden, shape.heads * shape.v_head_dim), "columns")
        yield _make_weight("linear_proj", "columns", output)

    def saved_elements(self, layer: LocalLayer) -> float:
        """Count the elements per token that latent attention saves for the backward pass on one rank."""
        shape = layer.shape
        heads = shape.heads / layer.tensor
        if layer.fused:
            # Queries and keys, a copy of the keys without rotary positions, values and output.
            core_elements = heads * (2 * self.key_size(shape) + shape.qk_nope + 2 * shape.v_head_dim)
            # Latents before and after their norms.
            return core_elements + 2 * (shape.q_lora + shape.kv_lora) / layer.token_shards

        # The core saves queries, keys, values and output of every head, and the float32 log-sum-exp of each
        # head's softmax. With selective recomputation it saves only its inputs: queries, keys and values.
        core_elements = 2 * heads * (self.key_size(shape) + shape.v_head_dim) + heads * layer.float32_elements
        if layer.recompute == "selective":
            core_elements = heads * (2 * self.key_size(shape) + shape.v_head_dim)
        output_elements = heads * shape.v_head_dim
        latent_norms = layer.unfused_norm_elements(shape.q_lora + shape.kv_lora) / layer.token_shards
        # cos and sin of the rotary angles, for queries and for the shared key.
        rotary_elements = 4 * shape.qk_rope
        return core_elements + output_elements + rotary_elements + latent_norms

    def live_elements(self, layer: LocalLayer) -> float:
        """Return the peak number of activation elements per token in a forward pass without gradients.

        At the peak, these tensors of all heads exist: queries, keys and values, contiguous copies of the
        queries, keys and values, and the output of attention.
        """
        shape = layer.shape
        # Keys have the size of queries, and the output has the size of values.
        return shape.heads / layer.tensor * (4 * self.key_size(shape) + 3 * shape.v_head_dim)

    def flops_per_key(self, shape: ModelShape) -> int:
        """Return the forward FLOPs of one token per attended key: 2 h (d_qk + d_v) for h heads.

        The FLOPs are the products of the query with the key, and of the probability with the value.
        """
        return 2 * shape.heads * (self.key_size(shape) + shape.v_head_dim)

    def cache_elements(self, shape: ModelShape) -> int:
        """Count the elements of a token's latent, and of its rotary key, which all heads share."""
        return shape.kv_lora + shape.qk_rope

    def kernel_size(self, shape: ModelShape) -> int:
        """Return the size of a token's cache, since all heads attend to the same latent."""
        return self.cache_elements(shape)

    def tensor_parallel_heads(self, shape: ModelShape) -> int:
        """Return the number of attention heads, which the tensor-parallel size must divide."""
        return shape.heads

    def exchanged_elements(self, shape: ModelShape, tensor: int, context: int) -> float:
        """Count the elements per token of the all-to-all before and after context-parallel attention.

        The all-to-all sends the queries, keys, values and outputs of a rank. Every head has a separate key
        and value.
        """
        return 2 * shape.heads / tensor * (self.key_size(shape) + shape.v_head_dim)

    def gathered_elements(self, shape: ModelShape, tensor: int) -> float:
        """Count the elements of a token's latent and rotary key."""
        return shape.kv_lora + shape.qk_rope

    def settings(self, shape: ModelShape) -> dict[str, Any]:
        """Return Megatron's settings for the sizes of latent attention, with a key-value head per query head.

        After the latent is expanded, every query head has a separate key and value.
        """
        return {**latent_settings(shape), "num_query_groups": shape.heads, "qk_layernorm": True}

    def problems(
        self, shape: ModelShape, layout: ParallelLayout, settings: Mapping[str, Any]
    ) -> Iterator[UserError]:
        """Yield an error for Megatron's fused rotary embedding, which does not support packed rows."""
        if not settings.get("apply_rope_fusion"):
            return

        key = f"{layout.path.rpartition('.')[0]}.megatron.apply_rope_fusion"
        yield UserError(
            "the fused rotary embedding of latent attention does not support rotary angles per token",
            where=key,
            expected="no value for a model with latent attention: packed rows have rotary angles per token",
            got="true",
            fix=f"remove {key}",
        )

    def adapter_refusal(self, target: str) -> str | None:
        """Return the reason why Megatron's linear layer ``target`` cannot have an adapter; None if it can.

        Only ``linear_qkv`` cannot, because latent attention has no such layer.
        """
        if target == "linear_qkv":
            return "latent attention has no such layer: it projects through latents"
        return None


def latent_settings(shape: ModelShape) -> dict[str, Any]:
    """Return the sizes of latent attention under the names of Megatron's settings and arguments."""
    return {
        "q_lora_rank": shape.q_lora or None,
        "kv_lora_rank": shape.kv_lora,
        "qk_head_dim": shape.qk_nope,
        "qk_pos_emb_head_dim": shape.qk_rope,
        "v_head_dim": shape.v_head_dim,
    }


def _make_weight(name: str, sharding: Sharding, source: Source, fused_suffix: str = "") -> Weight:
    """Create a `Weight` of latent attention.

    The name of ``source`` is relative to the module ``self_attn`` of a checkpoint. ``fused_suffix`` is the
    end of the name in layers in which Transformer Engine fuses modules. It is empty if the name is the same
    in all layers.
    """
    prefix = "self_attention."
    fused_name = ""
    if fused_suffix:
        fused_name = prefix + fused_suffix
    named_source = replace(source, name=f"self_attn.{source.name}.weight")
    return Weight(f"{prefix}{name}.weight", sharding, (named_source,), fused_name)


KIND = LatentAttention
