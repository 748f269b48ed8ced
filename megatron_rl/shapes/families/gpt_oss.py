"""gpt-oss (OpenAI, August 2025; arXiv 2508.10925)."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.shapes.family import (
    ConfigReader,
    Family,
    Fields,
    expert_fields,
    rope_parameters,
    sliding_window_fields,
)
from megatron_rl.shapes.fused_experts import FusedExperts


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of gpt-oss models: fields of `ModelShape`."""
    # Megatron's biases are those of all linear layers, and the experts always have them.
    reader.allow("attention_bias", True)
    reader.allow("hidden_act", "silu", None)

    # quick_gelu has this factor, and vLLM reads none of these three constants from config.json.
    reader.allow("swiglu_alpha", 1.702)
    reader.allow("swiglu_limit", 7.0)
    reader.allow("rms_norm_eps", 1e-5)

    rope = rope_parameters(reader.config)
    if rope.get("rope_type") != "yarn":
        reader.refuse("vLLM computes this model only with YaRN", "rope_parameters", '"rope_type": "yarn"')

    # vLLM has the window in every other layer, the first one among them.
    layers = reader.size("num_hidden_layers")
    reader_with_pattern = ConfigReader(
        {"sliding_window_pattern": 2, **reader.config}, reader.file, reader.errors
    )
    windows = sliding_window_fields(reader_with_pattern, layers)
    if windows.get("sliding_layers") != tuple(range(0, layers, 2)):
        reader.refuse(
            "the window of another pattern of layers is not supported",
            "layer_types",
            "sliding_attention and full_attention in turn, and a sliding_window",
        )

    return {
        **windows,
        **expert_fields(reader, "num_local_experts", "intermediate_size"),
        "qkv_bias": True,
        "output_bias": True,
        "expert_bias": True,
        "sinks": True,
    }


def _megatron_settings(config: Mapping[str, Any]) -> Fields:
    """Return the fields of Megatron's TransformerConfig for gpt-oss models."""
    return {
        # Attention sinks: a learned logit per head in the denominator of the softmax.
        "softmax_type": "learnable",
        # Experts compute quick_gelu(gate) * (up + 1), with gate and up clamped at swiglu_limit.
        "activation_func": "quick_gelu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": config["swiglu_limit"],
        # Megatron's fusions do not take biases of experts.
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
    }


FAMILY = Family(
    "gpt-oss",
    "gpt_oss",
    "GptOssForCausalLM",
    "GptOssForSequenceClassification",
    _read_structure,
    _megatron_settings,
    defaults={
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
    },
    renamed=(("mlp.gate.", "mlp.router."),),
    fused_experts=FusedExperts(transposed=True, interleaved=True),
)
