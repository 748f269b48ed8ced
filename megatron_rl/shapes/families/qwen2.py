"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115)."""

from megatron_rl.shapes.family import ConfigReader, Family, Fields


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of Qwen2/2.5 models: fields of `ModelShape`."""
    # Qwen2's config.json has no key for this bias: every model has it.
    return {"qkv_bias": True}


FAMILY = Family(
    "Qwen2/2.5",
    "qwen2",
    "Qwen2ForCausalLM",
    "Qwen2ForSequenceClassification",
    _read_structure,
    defaults={"use_sliding_window": False, "max_window_layers": 28},
)
