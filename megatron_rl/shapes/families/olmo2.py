"""OLMo 2 (arXiv 2501.00656)."""

from megatron_rl.shapes.family import Family, olmo_structure

FAMILY = Family(
    "OLMo 2",
    "olmo2",
    "Olmo2ForCausalLM",
    "Olmo2ForSequenceClassification",
    olmo_structure,
    defaults={"rms_norm_eps": 1e-5},
)
