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
    # Megatron has one switch for the biases of all linear layers, and the experts always have biases.
    reader.allow("attention_bias", True)
    reader.allow("hidden_act", "silu", None)

    # Megatron's quick_gelu has a fixed alpha, and vLLM reads none of these constants from config.json.
    reader.allow("swiglu_alpha", 1.702)
    reader.allow("swiglu_limit", 7.0)
    reader.allow("rms_norm_eps", 1e-5)

    rope = rope_parameters(reader.config)
    if rope.get("rope_type") != "yarn":
        reader.refuse("vLLM computes this model only with YaRN", "rope_parameters", '"rope_type": "yarn"')

    # In vLLM every other layer has a sliding window, beginning with the first layer.
    layers = reader.size("num_hidden_layers")
    reader_with_pattern = ConfigReader(
        {"sliding_window_pattern": 2, **reader.config}, reader.file, reader.errors
    )
    windows = sliding_window_fields(reader_with_pattern, layers)
    if windows.get("sliding_layers") != tuple(range(0, layers, 2)):
        reader.refuse(
            "this pattern of layers with a sliding window is not supported",
            "layer_types",
            "sliding_attention and full_attention alternating, and a sliding_window",
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
        # Megatron's fused kernels do not support the biases of experts.
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
