"""Ministral 3 (Mistral AI, December 2025): YaRN, and queries with a position-dependent scale."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.shapes.family import ConfigReader, Family, Fields, rope_parameters

_QUERY_SCALE_KEYS = ("llama_4_scaling_beta", "original_max_position_embeddings")
"""Keys of ``rope_parameters`` that determine the position-dependent scale of the queries."""


def _read_structure(reader: ConfigReader) -> Fields:
    """Read the structure of Ministral 3 models: fields of `ModelShape`."""
    parameters = rope_parameters(reader.config)
    absent_keys = [name for name in _QUERY_SCALE_KEYS if not parameters.get(name)]

    # The scale of the queries (the feature ``scaled_queries``) is computed from both values.
    if absent_keys:
        reader.refuse(
            "rope_parameters lacks the parameters of the position-dependent scale of the queries",
            "rope_parameters",
            f"a value of {' and '.join(absent_keys)}",
        )
    return {}


def _engine_keys(config: Mapping[str, Any]) -> Fields:
    """Return the keys of config.json that vLLM needs for Ministral 3 models."""
    # vLLM expects the key of Mistral's native format. Without this key vLLM does not scale the queries.
    parameters = rope_parameters(config)
    scaling = {
        "beta": parameters["llama_4_scaling_beta"],
        "original_max_position_embeddings": parameters["original_max_position_embeddings"],
    }
    return {"llama_4_scaling": scaling}


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
