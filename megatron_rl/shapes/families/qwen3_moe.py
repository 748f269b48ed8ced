"""Qwen3 with a mixture of experts (arXiv 2505.09388)."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.shapes.family import (
    ConfigReader,
    Family,
    Fields,
    attention_bias_fields,
    expert_fields,
    sparse_step_dense_layers,
)


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of Qwen3-MoE models: fields of `ModelShape`."""
    dense_layers = sparse_step_dense_layers(reader)
    return {
        **attention_bias_fields(reader),
        **expert_fields(reader, "num_experts", "moe_intermediate_size", dense_layers),
        "qk_norm": True,
    }


def _megatron_settings(config: Mapping[str, Any]) -> Fields:
    """Return the fields of Megatron's TransformerConfig for Qwen3-MoE models."""
    # A softmax over the selected logits equals a softmax over all logits, renormalised over the selected.
    return {"moe_router_pre_softmax": not config["norm_topk_prob"]}


FAMILY = Family(
    "Qwen3-MoE",
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "Qwen3MoeForSequenceClassification",
    _read_structure,
    _megatron_settings,
    defaults={
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    },
    aliases={"num_local_experts": "num_experts"},  # transformers 5 writes num_local_experts
)
