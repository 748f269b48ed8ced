"""Gemma 3, the language model (arXiv 2503.19786)."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.shapes.family import ConfigReader, Family, Fields, attention_bias


def _structure(reader: ConfigReader) -> Fields:
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        # PyTorch's fused attention and Megatron's output layer know none of these.
        reader.allow(name, None, False)
    return {**attention_bias(reader), "qk_norm": True, "sandwich_norms": True}


def _megatron(config: Mapping[str, Any]) -> Fields:
    return {
        "layernorm_zero_centered_gamma": True,
        "softmax_scale": config["query_pre_attn_scalar"] ** -0.5,
        "bias_activation_fusion": False,  # Megatron fuses other activations
    }


FAMILY = Family(
    "Gemma 3",
    "gemma3_text",
    "Gemma3ForCausalLM",
    "Gemma3TextForSequenceClassification",
    _structure,
    _megatron,
    defaults={
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    aliases={"_sliding_window_pattern": "sliding_window_pattern"},
)
