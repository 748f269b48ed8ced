"""Mistral (arXiv 2310.06825)."""

from megatron_rl.shapes.family import Family

FAMILY = Family(
    "Mistral",
    "mistral",
    "MistralForCausalLM",
    "MistralForSequenceClassification",
    defaults={"sliding_window": 4096},
)
