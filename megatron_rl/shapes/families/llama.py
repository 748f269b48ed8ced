"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783)."""

from megatron_rl.shapes.family import ConfigReader, Family, Fields, attention_bias_fields


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of Llama models: fields of `ModelShape`."""
    return {**attention_bias_fields(reader), "mlp_bias": reader.flag("mlp_bias")}


FAMILY = Family("Llama", "llama", "LlamaForCausalLM", "LlamaForSequenceClassification", _read_structure)
