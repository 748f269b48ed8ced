"""GLM-4.7-Flash: the latent attention of DeepSeek V3 and the experts of GLM-4.5."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.shapes.family import (
    ConfigReader,
    Family,
    Fields,
    biased_router_settings,
    count_dense_layers,
    deepseek_megatron_settings,
    deepseek_structure,
    with_dense_layer_count,
)


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of GLM-4.7-Flash models: fields of `ModelShape`."""
    reader.allow("norm_topk_prob", True)
    reader.allow("n_group", 1)
    fields = deepseek_structure(with_dense_layer_count(reader, 1))
    return {**fields, "router_bias": True}


def _megatron_settings(config: Mapping[str, Any]) -> Fields:
    """Return the fields of Megatron's TransformerConfig for GLM-4.7-Flash models."""
    return {**deepseek_megatron_settings(config), **biased_router_settings()}


def _engine_keys(config: Mapping[str, Any]) -> Fields:
    """Return the keys of config.json that vLLM needs for GLM-4.7-Flash models."""
    # Without the last two keys vLLM routes by softmax and omits the router's bias.
    return {
        "first_k_dense_replace": count_dense_layers(config, 1),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


FAMILY = Family(
    "GLM-4.7-Flash",
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    "Glm4MoeLiteForSequenceClassification",
    _read_structure,
    _megatron_settings,
    defaults={
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "n_shared_experts": 1,
        "n_group": 1,
        "rms_norm_eps": 1e-5,
    },
    aliases={"num_mtp_layers": "num_nextn_predict_layers"},
    engine_keys=_engine_keys,
)
