"""Qwen3.5 and Qwen3.6, the dense language model (Qwen team, 2026)."""

from megatron_rl.shapes.family import DELTA_DEFAULTS, Family, delta_net_megatron_settings, delta_net_structure

FAMILY = Family(
    "Qwen3.5",
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    "Qwen3_5TextForSequenceClassification",
    delta_net_structure,
    delta_net_megatron_settings,
    defaults=DELTA_DEFAULTS,
    partial_rotary=True,
)
