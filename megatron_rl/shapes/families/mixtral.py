"""Mixtral (arXiv 2401.04088)."""

from megatron_rl.shapes.family import ConfigReader, Family, Fields, expert_fields


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of Mixtral models: fields of `ModelShape`."""
    return expert_fields(reader, "num_local_experts", "intermediate_size")


FAMILY = Family(
    "Mixtral",
    "mixtral",
    "MixtralForCausalLM",
    "MixtralForSequenceClassification",
    _read_structure,
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    # The names of Mistral's own implementation: w1 is the gate, w3 up and w2 down.
    renamed=(("mlp.", "block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
)
