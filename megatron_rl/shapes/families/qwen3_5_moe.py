"""Qwen3.5 and Qwen3.6 with a mixture of experts, the language model (Qwen team, 2026)."""

from megatron_rl.shapes.family import (
    DELTA_DEFAULTS,
    ConfigReader,
    Family,
    Fields,
    delta_net_megatron_settings,
    delta_net_structure,
    gated_shared_expert_fields,
)


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of Qwen3.5-MoE models: fields of `ModelShape`."""
    return {**delta_net_structure(reader), **gated_shared_expert_fields(reader)}


FAMILY = Family(
    "Qwen3.5-MoE",
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForSequenceClassification",
    _read_structure,
    delta_net_megatron_settings,
    defaults={
        **DELTA_DEFAULTS,
        "intermediate_size": 512,  # unused: every layer has experts
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    aliases={"num_local_experts": "num_experts"},
    renamed=(("mlp.shared_experts.", "mlp.shared_expert."),),
    partial_rotary=True,
)
