"""Gemma 4 (Google, 2026), the dense language model without per-layer embeddings."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.shapes.blocks.attention import Attention
from megatron_rl.shapes.blocks.block import Block
from megatron_rl.shapes.blocks.mlp import Mlp
from megatron_rl.shapes.family import ConfigReader, Family, Fields

_LAYER_KEYS = {"head_dim", "num_key_value_heads"}
"""Keys that ``per_layer_config`` may set for a layer."""


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of Gemma 4 models: fields of `ModelShape`."""
    # vLLM builds experts if num_experts is set at all, transformers if enable_moe_block is true.
    for key in ("enable_moe_block", "num_experts"):
        if reader.get(key, False) is not False:
            reader.refuse("layers with both an MLP and experts (26B-A4B) are not supported", key, "null")

    if reader.flag("hidden_size_per_layer_input"):
        reader.refuse(
            "per-layer embeddings (E2B and E4B) are not supported",
            "hidden_size_per_layer_input",
            "0",
        )
    if reader.flag("num_kv_shared_layers"):
        reader.refuse(
            "layers with the keys and values of an earlier layer (E2B and E4B) are not supported",
            "num_kv_shared_layers",
            "0",
        )
    reader.allow("attention_bias", False, None)
    # With "vision" only the tokens of images attend to later tokens.
    reader.allow("use_bidirectional_attention", None, "vision", False)
    # vLLM caps attention scores with this value; transformers does not read it.
    reader.allow("attn_logit_softcapping", None)

    layer_types = _layer_types(reader)
    layer_sizes = _layer_sizes(reader, layer_types)
    kv_head_counts = sorted({kv_heads for _, kv_heads in layer_sizes})
    if any(reader.size("num_attention_heads") % kv_heads for kv_heads in kv_head_counts):
        reader.refuse(
            "the key-value heads of a layer do not divide its query heads",
            "num_attention_heads",
            f"a multiple of {' and '.join(map(str, kv_head_counts))}, the key-value heads",
        )

    # Layers with full attention may use their keys as values.
    blocks = []
    for layer_type, (head_dim, kv_heads) in zip(layer_types, layer_sizes, strict=True):
        shares_keys = reader.flag("attention_k_eq_v") and layer_type == "full_attention"
        attention = Attention(head_dim, kv_heads, keys_are_values=shares_keys, value_norm=True)
        blocks.append(Block(attention, Mlp()))

    sliding_layers = tuple(layer for layer, name in enumerate(layer_types) if name == "sliding_attention")
    return {
        "blocks": tuple(blocks),
        "sliding_window": reader.size("sliding_window"),
        "sliding_layers": sliding_layers,
        "qk_norm": True,
        "post_norms": True,
        "layer_scalars": True,
    }


def _layer_types(reader: ConfigReader) -> list[str]:
    """Return the attention type of each layer, by default full attention in every sixth layer."""
    layers = reader.size("num_hidden_layers")
    layer_types = reader.get("layer_types")
    if layer_types is None:
        layer_types = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers)]
    if len(layer_types) != layers:
        reader.refuse("layer_types does not have one type for each layer", "layer_types", f"{layers} entries")
        layer_types = ["full_attention"] * layers
    # transformers and vLLM change the last layer to full attention.
    return [*layer_types[: layers - 1], "full_attention"]


def _layer_sizes(reader: ConfigReader, layer_types: list[str]) -> list[tuple[int, int]]:
    """Return the head size and the number of key-value heads of each layer.

    transformers 5.19 writes ``per_layer_config`` for layers whose sizes differ from the default. Published
    checkpoints have ``global_head_dim`` and ``num_global_key_value_heads`` for layers with full attention.
    """
    head_dim = reader.size("head_dim")
    kv_heads = reader.size("num_key_value_heads")
    layer_configs = reader.get("per_layer_config")
    if layer_configs is None:
        full_kv_heads = kv_heads
        if reader.flag("attention_k_eq_v"):
            full_kv_heads = reader.size("num_global_key_value_heads", kv_heads)
        full_sizes = (reader.size("global_head_dim"), full_kv_heads)
        sizes_by_type = {"full_attention": full_sizes, "sliding_attention": (head_dim, kv_heads)}
        return [sizes_by_type.get(layer_type, full_sizes) for layer_type in layer_types]

    unknown_keys = set[str]().union(*layer_configs.values()) - _LAYER_KEYS
    if unknown_keys:
        reader.refuse(
            f"layers that differ in {', '.join(sorted(unknown_keys))} are not supported",
            "per_layer_config",
            f"only {' and '.join(sorted(_LAYER_KEYS))}",
        )

    # The keys of a JSON object are text: convert them to layer numbers.
    overrides_by_layer = {int(layer): overrides for layer, overrides in layer_configs.items()}
    sizes_by_layer = []
    for layer in range(len(layer_types)):
        layer_config = {"head_dim": head_dim, "num_key_value_heads": kv_heads}
        layer_config |= overrides_by_layer.get(layer, {})
        layer_reader = ConfigReader(layer_config, f"{reader.file}: per_layer_config.{layer}", reader.errors)
        sizes_by_layer.append((layer_reader.size("head_dim"), layer_reader.size("num_key_value_heads")))

    # One set of rotary angles is computed for each attention type.
    head_dims = [layer_head_dim for layer_head_dim, _ in sizes_by_layer]
    types_with_head_dims = set(zip(layer_types, head_dims, strict=True))
    if len(types_with_head_dims) > len(set(layer_types)):
        reader.refuse(
            "layers of one type with heads of different sizes are not supported",
            "per_layer_config",
            "one head_dim for each of layer_types",
        )
    return sizes_by_layer


def _megatron_settings(config: Mapping[str, Any]) -> Fields:
    """Return the fields of Megatron's TransformerConfig for Gemma 4 models."""
    return {
        # The norms of queries and keys set the scale of the scores.
        "softmax_scale": 1.0,
        "bias_activation_fusion": False,  # Megatron's fused kernels are for other activations
    }


FAMILY = Family(
    "Gemma 4",
    "gemma4_text",
    "Gemma4ForCausalLM",
    "Gemma4TextForSequenceClassification",
    _read_structure,
    _megatron_settings,
    defaults={
        "vocab_size": 262144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    },
    features=("scaled_embedding", "scaled_layers"),
    rope_types=("proportional",),
)
