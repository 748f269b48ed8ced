"""Ministral 8B (Mistral AI, October 2024): Mistral with a sliding window in some of its layers."""

from megatron_rl.shapes.family import Family

FAMILY = Family(
    "Ministral",
    "ministral",
    "MinistralForCausalLM",
    "MinistralForSequenceClassification",
    defaults={"sliding_window": 4096},
)
