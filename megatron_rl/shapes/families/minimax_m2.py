"""MiniMax-M2 (MiniMax, October 2025)."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.shapes.family import (
    ConfigReader,
    Family,
    Fields,
    biased_router_settings,
    expert_fields,
    rotary_fraction,
)


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of MiniMax-M2 models: fields of `ModelShape`."""
    # transformers ignores these switches of config.json: accept only the implemented values.
    reader.allow("use_qk_norm", True, None)
    reader.allow("qk_norm_type", "per_layer", None)
    reader.allow("use_routing_bias", True, None)
    reader.allow("scoring_func", "sigmoid", None)
    reader.allow("shared_intermediate_size", 0, None)

    # MiniMax-M1 and Text-01 mix linear attention (0) with softmax attention (1); M2 has only the latter.
    if set(reader.get("attn_type_list", [])) - {1}:
        reader.refuse(
            "linear attention is not supported for this model", "attn_type_list", "1 for each layer"
        )

    if reader.size("num_experts_per_tok") == 1:
        reader.refuse(
            "Megatron does not normalise the score of a single expert", "num_experts_per_tok", "2 or more"
        )

    return {
        **expert_fields(reader, "num_local_experts", "intermediate_size"),
        "router_bias": True,
        "qk_norm": True,
        "whole_qk_norm": True,
    }


def _megatron_settings(config: Mapping[str, Any]) -> Fields:
    """Return the fields of Megatron's TransformerConfig for MiniMax-M2 models."""
    return biased_router_settings()


def _engine_keys(config: Mapping[str, Any]) -> Fields:
    """Return the keys of config.json that vLLM needs for MiniMax-M2 models."""
    # Without these keys vLLM does not build the model, or omits the router's bias.
    rotary_dim = round(config["head_dim"] * rotary_fraction(config))
    return {"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": rotary_dim}


FAMILY = Family(
    "MiniMax-M2",
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    "MiniMaxM2ForSequenceClassification",
    _read_structure,
    _megatron_settings,
    defaults={"head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8},
    aliases={"num_experts": "num_local_experts", "num_mtp_modules": "num_nextn_predict_layers"},
    # The router's bias is stored outside the router's module.
    renamed=(
        ("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"),
        ("mlp.", "block_sparse_moe."),
        ("gate_proj", "w1"),
        ("up_proj", "w3"),
        ("down_proj", "w2"),
    ),
    partial_rotary=True,
    engine_keys=_engine_keys,
)
