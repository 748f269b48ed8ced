"""GLM-4.5 (arXiv 2508.06471)."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.shapes.family import (
    ConfigReader,
    Family,
    Fields,
    biased_router_settings,
    shared_expert_fields,
)


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of GLM-4.5 models: fields of `ModelShape`."""
    reader.allow("norm_topk_prob", True)
    reader.allow("n_group", 1)
    return {
        **shared_expert_fields(reader),
        "qkv_bias": reader.flag("attention_bias"),
        "qk_norm": reader.flag("use_qk_norm"),
        "router_bias": True,
    }


def _megatron_settings(config: Mapping[str, Any]) -> Fields:
    """Return the fields of Megatron's TransformerConfig for GLM-4.5 models."""
    return {**biased_router_settings(), "moe_router_topk_scaling_factor": config["routed_scaling_factor"]}


FAMILY = Family(
    "GLM-4.5",
    "glm4_moe",
    "Glm4MoeForCausalLM",
    "Glm4MoeForSequenceClassification",
    _read_structure,
    _megatron_settings,
    defaults={
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
    },
    aliases={"num_mtp_layers": "num_nextn_predict_layers"},
    partial_rotary=True,
)
