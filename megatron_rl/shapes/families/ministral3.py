"""Ministral 3 (Mistral AI, December 2025): YaRN, and queries that grow with their position."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.shapes.family import ConfigReader, Family, Fields, rope_parameters

_SCALES = ("llama_4_scaling_beta", "original_max_position_embeddings")


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of Ministral 3 models: fields of `ModelShape`."""
    parameters = rope_parameters(reader.config)
    absent_keys = [name for name in _SCALES if not parameters.get(name)]

    # Both are needed for the factor of the queries, see `Family.features`.
    if absent_keys:
        reader.refuse(
            "the factor of the queries is not given",
            "rope_parameters",
            f"a value of {' and '.join(absent_keys)}",
        )
    return {}


def _engine_keys(config: Mapping[str, Any]) -> Fields:
    """Return the keys of config.json that vLLM needs for Ministral 3 models."""
    # Without it vLLM leaves the factor out: it reads the names of Mistral's own checkpoints.
    beta, positions = (rope_parameters(config)[name] for name in _SCALES)
    return {"llama_4_scaling": {"beta": beta, "original_max_position_embeddings": positions}}


FAMILY = Family(
    "Ministral 3",
    "ministral3",
    "Ministral3ForCausalLM",
    "Ministral3ForSequenceClassification",
    _read_structure,
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
    features=("scaled_queries",),
    engine_keys=_engine_keys,
)
