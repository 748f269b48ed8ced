"""The table of model families: those that can be trained, and those that are recognised and refused.

A `Family` names how its config.json is read, how its tensors are named and how Megatron is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.shapes.family import (
    ConfigReader,
    Family,
    Fields,
    attention_bias,
    biased_router,
    deepseek_megatron,
    deepseek_structure,
    expert_fields,
    gemma_megatron,
    gemma_structure,
    shared_experts,
    sliding_window_fields,
)


# Llama (arXiv 2302.13971, 2307.09288, 2407.21783).
def _llama_structure(reader: ConfigReader) -> Fields:
    return {**attention_bias(reader), "mlp_bias": reader.flag("mlp_bias")}


_LLAMA = Family("Llama", "llama", "LlamaForCausalLM", "LlamaForSequenceClassification", _llama_structure)


# Mistral (arXiv 2310.06825).
_MISTRAL = Family(
    "Mistral",
    "mistral",
    "MistralForCausalLM",
    "MistralForSequenceClassification",
    defaults={"sliding_window": 4096},
)


# Mixtral (arXiv 2401.04088).
def _mixtral_structure(reader: ConfigReader) -> Fields:
    return expert_fields(reader, "num_local_experts", "intermediate_size")


_MIXTRAL = Family(
    "Mixtral",
    "mixtral",
    "MixtralForCausalLM",
    "MixtralForSequenceClassification",
    _mixtral_structure,
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    renamed=(("mlp.", "block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
)


# Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115).
def _qwen2_structure(reader: ConfigReader) -> Fields:
    return {"qkv_bias": True}


_QWEN2 = Family(
    "Qwen2/2.5",
    "qwen2",
    "Qwen2ForCausalLM",
    "Qwen2ForSequenceClassification",
    _qwen2_structure,
    defaults={"use_sliding_window": False, "max_window_layers": 28},
)


# Qwen3, dense (arXiv 2505.09388).
def _qwen3_structure(reader: ConfigReader) -> Fields:
    return {**attention_bias(reader), "qk_norm": True}


_QWEN3 = Family(
    "Qwen3",
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen3ForSequenceClassification",
    _qwen3_structure,
    defaults={"head_dim": 128, "use_sliding_window": False, "max_window_layers": 28},
)


# Qwen3 with a mixture of experts (arXiv 2505.09388).
def _qwen3_moe_structure(reader: ConfigReader) -> Fields:
    # Every step-th layer has experts, except for the layers that config.json lists.
    step = reader.get("decoder_sparse_step", 1)
    mlp_only = reader.get("mlp_only_layers", [])
    dense_layers = tuple(
        layer
        for layer in range(reader.size("num_hidden_layers"))
        if layer in mlp_only or step <= 0 or (layer + 1) % step
    )

    return {
        **attention_bias(reader),
        **expert_fields(reader, "num_experts", "moe_intermediate_size", dense_layers),
        "qk_norm": True,
    }


def _qwen3_moe_megatron(config: Mapping[str, Any]) -> Fields:
    # A softmax over the chosen logits equals a softmax over all of them, renormalised over the chosen.
    return {"moe_router_pre_softmax": not config["norm_topk_prob"]}


_QWEN3_MOE = Family(
    "Qwen3-MoE",
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "Qwen3MoeForSequenceClassification",
    _qwen3_moe_structure,
    _qwen3_moe_megatron,
    defaults={
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    },
    aliases={"num_local_experts": "num_experts"},  # transformers 5 writes the former
)


# Gemma 2 (arXiv 2408.00118).
def _gemma2_structure(reader: ConfigReader) -> Fields:
    # Every other layer has a sliding window unless config.json has a pattern of its own.
    every_other = ConfigReader({"sliding_window_pattern": 2, **reader.config}, reader.file, reader.errors)
    return {**gemma_structure(reader), **sliding_window_fields(every_other, reader.size("num_hidden_layers"))}


_GEMMA2 = Family(
    "Gemma 2",
    "gemma2",
    "Gemma2ForCausalLM",
    "Gemma2ForSequenceClassification",
    _gemma2_structure,
    gemma_megatron,
    defaults={
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
)


# Gemma 3, the language model (arXiv 2503.19786).
def _gemma3_structure(reader: ConfigReader) -> Fields:
    return {**gemma_structure(reader), "qk_norm": True}


_GEMMA3 = Family(
    "Gemma 3",
    "gemma3_text",
    "Gemma3ForCausalLM",
    "Gemma3TextForSequenceClassification",
    _gemma3_structure,
    gemma_megatron,
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


# Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905).
_PHI3 = Family(
    "Phi-3/4",
    "phi3",
    "Phi3ForCausalLM",
    "Phi3ForSequenceClassification",
    defaults={"rms_norm_eps": 1e-5},
    renamed=(
        (".q_proj", ".qkv_proj"),
        (".k_proj", ".qkv_proj"),
        (".v_proj", ".qkv_proj"),
        (".gate_proj", ".gate_up_proj"),
        (".up_proj", ".gate_up_proj"),
    ),
    partial_rotary=True,
)


# DeepSeek V2 (arXiv 2405.04434).
def _deepseek_v2_structure(reader: ConfigReader) -> Fields:
    reader.allow("topk_method", "greedy")
    reader.allow("norm_topk_prob", False)
    return deepseek_structure(reader)


def _deepseek_v2_megatron(config: Mapping[str, Any]) -> Fields:
    return {**deepseek_megatron(config), "moe_router_pre_softmax": True}


_DEEPSEEK_V2 = Family(
    "DeepSeek V2",
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    "DeepseekV2ForSequenceClassification",
    _deepseek_v2_structure,
    _deepseek_v2_megatron,
    defaults={
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "q_lora_rank": 1536,
        "n_shared_experts": 2,
    },
    # Greedy routing has one group of experts; vLLM reads the keys all the same.
    engine_keys={"n_group": 1, "topk_group": 1},
)


# DeepSeek V3 and R1 (arXiv 2412.19437).
def _deepseek_v3_structure(reader: ConfigReader) -> Fields:
    reader.allow("topk_method", "noaux_tc", None)
    reader.allow("norm_topk_prob", True)

    # A group's score is the sum of its best experts: of topk / group_topk in Megatron, of 2 in the model.
    experts_per_token = reader.size("num_experts_per_tok")
    if reader.get("n_group", 1) > 1 and experts_per_token // reader.size("topk_group") != 2:
        reader.refuse(
            "Megatron ranks groups of experts by the sum of their best num_experts_per_tok / topk_group, "
            "where the model takes the best 2",
            "topk_group",
            f"half of num_experts_per_tok, {experts_per_token}",
        )
    return {**deepseek_structure(reader), "router_bias": True}


def _deepseek_v3_megatron(config: Mapping[str, Any]) -> Fields:
    settings = {**deepseek_megatron(config), **biased_router()}
    if (config["n_group"] or 1) > 1:
        settings["moe_router_num_groups"] = config["n_group"]
        settings["moe_router_group_topk"] = config["topk_group"]
    return settings


_DEEPSEEK_V3 = Family(
    "DeepSeek V3",
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    "DeepseekV3ForSequenceClassification",
    _deepseek_v3_structure,
    _deepseek_v3_megatron,
    defaults={
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
    },
    # Without these vLLM routes by softmax and leaves the router's bias out.
    engine_keys={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
)


# GLM-4.5 (arXiv 2508.06471).
def _glm4_moe_structure(reader: ConfigReader) -> Fields:
    reader.allow("norm_topk_prob", True)
    reader.allow("n_group", 1)
    return {
        **shared_experts(reader),
        "qkv_bias": reader.flag("attention_bias"),
        "qk_norm": reader.flag("use_qk_norm"),
        "router_bias": True,
    }


def _glm4_moe_megatron(config: Mapping[str, Any]) -> Fields:
    return {**biased_router(), "moe_router_topk_scaling_factor": config["routed_scaling_factor"]}


_GLM4_MOE = Family(
    "GLM-4.5",
    "glm4_moe",
    "Glm4MoeForCausalLM",
    "Glm4MoeForSequenceClassification",
    _glm4_moe_structure,
    _glm4_moe_megatron,
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


_ENTRIES = (
    _DEEPSEEK_V2,
    _DEEPSEEK_V3,
    _GEMMA2,
    _GEMMA3,
    _GLM4_MOE,
    _LLAMA,
    _MISTRAL,
    _MIXTRAL,
    _PHI3,
    _QWEN2,
    _QWEN3,
    _QWEN3_MOE,
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ENTRIES}
"""Every family that can be trained, by ``model_type``."""


@dataclass(frozen=True)
class RefusedFamily:
    """Model family that cannot be trained."""

    title: str
    """Display name of the family."""
    model_type: str
    """``model_type`` of its config.json."""
    architecture: str
    """The transformers class of the language model."""
    missing: str
    """Feature that Megatron-Core or this project lacks for it."""


REFUSED = (
    RefusedFamily(
        "gpt-oss",
        "gpt_oss",
        "GptOssForCausalLM",
        "attention sinks outside Transformer Engine's attention, and an importer of fused experts with "
        "biases",
    ),
    RefusedFamily(
        "Qwen3-Next",
        "qwen3_next",
        "Qwen3NextForCausalLM",
        "gated delta nets on packed rows (megatron.core.ssm.gated_delta_net refuses them and asks for "
        "flash-linear-attention)",
    ),
)
