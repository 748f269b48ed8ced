"""Seed-OSS (ByteDance, August 2025)."""

from megatron_rl.shapes.family import ConfigReader, Family, Fields


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of Seed-OSS models: fields of `ModelShape`."""
    # Unlike in Llama, the bias of the output projection has a separate key.
    return {
        "qkv_bias": reader.flag("attention_bias"),
        "output_bias": reader.flag("attention_out_bias"),
        "mlp_bias": reader.flag("mlp_bias"),
    }


FAMILY = Family(
    "Seed-OSS",
    "seed_oss",
    "SeedOssForCausalLM",
    "SeedOssForSequenceClassification",
    _read_structure,
    defaults={"head_dim": 128, "attention_bias": True},
)
