"""Qwen3-Next (Qwen team, September 2025); checkpoints interleave the projections of a delta net."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.shapes.family import (
    DELTA_DEFAULTS,
    ConfigReader,
    Family,
    Fields,
    delta_net_megatron_settings,
    delta_net_structure,
    gated_shared_expert_fields,
    sparse_step_dense_layers,
)


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of Qwen3-Next models: fields of `ModelShape`."""
    return {
        **delta_net_structure(reader),
        **gated_shared_expert_fields(reader, sparse_step_dense_layers(reader)),
        # in_proj_qkvz and in_proj_ba store the projections of each key head together.
        "linear_interleaved": True,
    }


def _megatron_settings(config: Mapping[str, Any]) -> Fields:
    """Return the fields of Megatron's TransformerConfig for Qwen3-Next models."""
    # A softmax over the selected logits equals a softmax over all logits, renormalised over the selected.
    return {**delta_net_megatron_settings(config), "moe_router_pre_softmax": not config["norm_topk_prob"]}


FAMILY = Family(
    "Qwen3-Next",
    "qwen3_next",
    "Qwen3NextForCausalLM",
    "Qwen3NextForSequenceClassification",
    _read_structure,
    _megatron_settings,
    defaults={
        **DELTA_DEFAULTS,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    aliases={"num_local_experts": "num_experts"},
    renamed=(("mlp.shared_experts.", "mlp.shared_expert."),),
    partial_rotary=True,
)
