"""Qwen3, dense (arXiv 2505.09388)."""

from megatron_rl.shapes.family import ConfigReader, Family, Fields, attention_bias_fields


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of Qwen3 models: fields of `ModelShape`."""
    return {**attention_bias_fields(reader), "qk_norm": True}


FAMILY = Family(
    "Qwen3",
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen3ForSequenceClassification",
    _read_structure,
    defaults={"head_dim": 128, "use_sliding_window": False, "max_window_layers": 28},
)
