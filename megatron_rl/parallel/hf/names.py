"""Names and shapes of every tensor a Hugging Face checkpoint of a supported family holds."""

from __future__ import annotations

import re
from typing import Any

from megatron_rl.parallel.hf.config import head_dim
from megatron_rl.parallel.hf.families import Family, family_of, has_scalar_head

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"
SCALAR = "score.weight"
"""The head of a model that gives one number per token instead of a distribution."""
Shapes = dict[str, tuple[int, ...]]


def checkpoint_shapes(hf_config: Any) -> Shapes:
    """Return the shape of every tensor of the whole model by name, in the order a checkpoint lists them.

    A tied output layer is not listed: its values are the embedding's.
    """
    family = family_of(hf_config)
    hidden, vocabulary = hf_config.hidden_size, hf_config.vocab_size
    shapes: Shapes = {EMBEDDING: (vocabulary, hidden)}
    for layer in range(hf_config.num_hidden_layers):
        names: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        if family.sandwich:
            names |= {f"{when}_feedforward_layernorm.weight": (hidden,) for when in ("pre", "post")}
        names |= _latent_attention(hf_config) if family.mla else _attention(hf_config, family)
        if family.is_moe_layer(hf_config, layer):
            names |= _experts(hf_config, family)
        else:
            names |= _gated("mlp.", hidden, hf_config.intermediate_size)
            if family.all_bias(hf_config):
                names |= {"mlp.gate_proj.bias": (hf_config.intermediate_size,)}
                names |= {"mlp.up_proj.bias": (hf_config.intermediate_size,), "mlp.down_proj.bias": (hidden,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in names.items()}
    shapes[FINAL_NORM] = (hidden,)
    if has_scalar_head(hf_config):
        shapes[SCALAR] = (1, hidden)
    elif not hf_config.tie_word_embeddings:
        shapes[OUTPUT] = (vocabulary, hidden)
    return shapes


def _attention(hf_config: Any, family: Family) -> Shapes:
    dim, hidden = head_dim(hf_config), hf_config.hidden_size
    queries, groups = hf_config.num_attention_heads * dim, hf_config.num_key_value_heads * dim
    shapes: Shapes = {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (groups, hidden),
        "self_attn.v_proj.weight": (groups, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    all_bias = family.all_bias(hf_config)
    if all_bias or family.qkv_bias(hf_config):
        shapes |= {"self_attn.q_proj.bias": (queries,)}
        shapes |= {"self_attn.k_proj.bias": (groups,), "self_attn.v_proj.bias": (groups,)}
    if all_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if family.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return shapes


def _latent_attention(hf_config: Any) -> Shapes:
    hidden, heads = hf_config.hidden_size, hf_config.num_attention_heads
    nope, rope = hf_config.qk_nope_head_dim, hf_config.qk_rope_head_dim
    queries, latent = heads * (nope + rope), hf_config.kv_lora_rank
    if hf_config.q_lora_rank is None:
        shapes: Shapes = {"self_attn.q_proj.weight": (queries, hidden)}
    else:
        shapes = {
            "self_attn.q_a_proj.weight": (hf_config.q_lora_rank, hidden),
            "self_attn.q_a_layernorm.weight": (hf_config.q_lora_rank,),
            "self_attn.q_b_proj.weight": (queries, hf_config.q_lora_rank),
        }
    return shapes | {
        "self_attn.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (heads * (nope + hf_config.v_head_dim), latent),
        "self_attn.o_proj.weight": (hidden, heads * hf_config.v_head_dim),
    }


def _gated(prefix: str, hidden: int, width: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }


def _experts(hf_config: Any, family: Family) -> Shapes:
    moe, hidden = family.moe, hf_config.hidden_size
    assert moe is not None
    settings = family.settings(hf_config)
    count, width = settings["num_moe_experts"], settings["moe_ffn_hidden_size"]
    shapes: Shapes = {moe.router: (count, hidden)}
    if moe.router_bias is not None:
        shapes[moe.router_bias] = (count,)
    if moe.shared is not None:
        shapes |= _gated(f"{moe.shared}.", hidden, settings["moe_shared_expert_intermediate_size"])
    for expert in range(count):
        prefix = moe.expert.format(expert=expert)
        shapes[f"{prefix}.{moe.gate}"] = (width, hidden)
        shapes[f"{prefix}.{moe.up}"] = (width, hidden)
        shapes[f"{prefix}.{moe.down}"] = (hidden, width)
    return shapes


def is_ignorable(name: str, hf_config: Any) -> bool:
    """Say whether a checkpoint tensor that the model does not use may be skipped without a word.

    These are rotary frequencies of old checkpoints, an output layer that is tied or replaced by a head of
    one number, and layers that predict further tokens, which follow the model's own.
    """
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer and int(layer.group(1)) >= hf_config.num_hidden_layers:
        extra = getattr(hf_config, "num_nextn_predict_layers", None) or 0
        return int(layer.group(1)) < hf_config.num_hidden_layers + extra
    unused = bool(hf_config.tie_word_embeddings) or has_scalar_head(hf_config)
    return name.endswith("rotary_emb.inv_freq") or (name == OUTPUT and unused)
