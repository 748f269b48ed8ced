"""Qwen3, dense (arXiv 2505.09388)."""

from megatron_rl.shapes.family import ConfigReader, Family, Fields, attention_bias


def _structure(reader: ConfigReader) -> Fields:
    return {**attention_bias(reader), "qk_norm": True}


FAMILY = Family(
    "Qwen3",
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen3ForSequenceClassification",
    _structure,
    defaults={"head_dim": 128, "use_sliding_window": False, "max_window_layers": 28},
)
