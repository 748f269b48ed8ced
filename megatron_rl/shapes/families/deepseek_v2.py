"""DeepSeek V2 (arXiv 2405.04434)."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.shapes.family import (
    ConfigReader,
    Family,
    Fields,
    deepseek_megatron_settings,
    deepseek_structure,
)


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of DeepSeek V2 models: fields of `ModelShape`."""
    reader.allow("topk_method", "greedy")
    reader.allow("norm_topk_prob", False)
    return deepseek_structure(reader)


def _megatron_settings(config: Mapping[str, Any]) -> Fields:
    """Return the fields of Megatron's TransformerConfig for DeepSeek V2 models."""
    # Scores are a softmax over all experts and are not renormalised over the selected experts. By default,
    # Megatron-Core 0.19 computes the softmax over only the selected experts.
    return {**deepseek_megatron_settings(config), "moe_router_pre_softmax": True}


def _engine_keys(config: Mapping[str, Any]) -> Fields:
    """Return the keys of config.json that vLLM needs for DeepSeek V2 models."""
    # Greedy routing has no groups of experts, but vLLM reads both keys.
    return {"n_group": 1, "topk_group": 1}


FAMILY = Family(
    "DeepSeek V2",
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    "DeepseekV2ForSequenceClassification",
    _read_structure,
    _megatron_settings,
    defaults={
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "q_lora_rank": 1536,
        "n_shared_experts": 2,
    },
    engine_keys=_engine_keys,
)
