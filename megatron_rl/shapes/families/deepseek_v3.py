"""DeepSeek V3 and R1 (arXiv 2412.19437), Moonlight, and Kimi-K2."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.shapes.family import (
    ConfigReader,
    Family,
    Fields,
    biased_router_settings,
    deepseek_megatron_settings,
    deepseek_structure,
)


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of DeepSeek V3 models: fields of `ModelShape`."""
    reader.allow("topk_method", "noaux_tc", None)
    reader.allow("norm_topk_prob", True)

    # The score of a group is the sum of the highest scores of its experts. The model sums the highest two
    # scores; Megatron sums num_experts_per_tok / topk_group scores.
    experts_per_token = reader.size("num_experts_per_tok")
    if reader.get("n_group", 1) > 1 and experts_per_token // reader.size("topk_group") != 2:
        reader.refuse(
            "Megatron scores a group of experts by its best num_experts_per_tok / topk_group experts, the "
            "model by its best 2",
            "topk_group",
            f"half of num_experts_per_tok, {experts_per_token}",
        )

    return {**deepseek_structure(reader), "router_bias": True}


def _megatron_settings(config: Mapping[str, Any]) -> Fields:
    """Return the fields of Megatron's TransformerConfig for DeepSeek V3 models."""
    settings = {**deepseek_megatron_settings(config), **biased_router_settings()}

    # With one group, as in Moonlight and Kimi-K2, routing is not restricted to groups.
    if (config["n_group"] or 1) > 1:
        settings["moe_router_num_groups"] = config["n_group"]
        settings["moe_router_group_topk"] = config["topk_group"]
    return settings


def _engine_keys(config: Mapping[str, Any]) -> Fields:
    """Return the keys of config.json that vLLM needs for DeepSeek V3 models."""
    # Without these keys vLLM routes by softmax and omits the router's bias.
    return {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


FAMILY = Family(
    "DeepSeek V3",
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    "DeepseekV3ForSequenceClassification",
    _read_structure,
    _megatron_settings,
    defaults={
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
    },
    engine_keys=_engine_keys,
    further_model_types=("kimi_k2",),
)
