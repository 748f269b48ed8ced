"""SmolLM3 (Hugging Face, July 2025): some of its layers have no rotary angles (arXiv 2501.18795)."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.shapes.family import ConfigReader, Family, Fields, attention_bias_fields


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of SmolLM3 models: fields of `ModelShape`."""
    layers = reader.size("num_hidden_layers")
    # Despite its name, the list has a 1 for each layer with rotary angles.
    rope_flags = reader.get("no_rope_layers")
    if rope_flags is None:
        reader.size("no_rope_layer_interval")
    elif len(rope_flags) != layers:
        reader.refuse(
            "no_rope_layers does not have one flag for each layer",
            "no_rope_layers",
            f"{layers} entries",
        )
    return {**attention_bias_fields(reader), "mlp_bias": reader.flag("mlp_bias")}


def _megatron_settings(config: Mapping[str, Any]) -> Fields:
    """Return the fields of Megatron's TransformerConfig for SmolLM3 models."""
    # config.json marks the layers with rotary angles; Megatron's list marks the layers without.
    rope_flags = config.get("no_rope_layers")
    if rope_flags is None:
        interval = config["no_rope_layer_interval"]
        rope_flags = [int((layer + 1) % interval != 0) for layer in range(config["num_hidden_layers"])]

    return {"no_rope_freq": [1 - flag for flag in rope_flags]}


FAMILY = Family(
    "SmolLM3",
    "smollm3",
    "SmolLM3ForCausalLM",
    "SmolLM3ForSequenceClassification",
    _read_structure,
    _megatron_settings,
    defaults={"tie_word_embeddings": True, "no_rope_layer_interval": 4, "use_sliding_window": False},
)
