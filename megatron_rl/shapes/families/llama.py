"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783)."""

from megatron_rl.shapes.family import ConfigReader, Family, Fields, attention_bias


def _structure(reader: ConfigReader) -> Fields:
    return {**attention_bias(reader), "mlp_bias": reader.flag("mlp_bias")}


FAMILY = Family("Llama", "llama", "LlamaForCausalLM", "LlamaForSequenceClassification", _structure)
