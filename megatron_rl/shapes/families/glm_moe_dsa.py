"""GLM-5 (Zhipu AI, 2026): GLM-4.7-Flash's layers with sparse attention, on rows that attend to all keys.

See `deepseek_v32` for the indexer. Some layers use the choice of an earlier one and have no indexer.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.shapes.families import deepseek_v32, glm4_moe_lite
from megatron_rl.shapes.family import (
    ConfigReader,
    Fields,
    count_dense_layers,
    dense_layers_first,
    sparse_attention,
)


def _structure(reader: ConfigReader) -> Fields:
    dense_first = dense_layers_first(reader, 3)
    return {**glm4_moe_lite.FAMILY.structure(dense_first), **sparse_attention(reader)}


def _engine_keys(config: Mapping[str, Any]) -> Fields:
    dense = {"first_k_dense_replace": count_dense_layers(config, 3)}
    return {**glm4_moe_lite.FAMILY.engine_keys(config), **dense}


FAMILY = replace(
    glm4_moe_lite.FAMILY,
    title="GLM-5",
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    scalar_architecture="GlmMoeDsaForSequenceClassification",
    structure=_structure,
    defaults={
        **glm4_moe_lite.FAMILY.defaults,
        "index_topk": 2048,
        "q_lora_rank": 2048,
        "routed_scaling_factor": 2.5,
    },
    engine_keys=_engine_keys,
    copied=deepseek_v32.FAMILY.copied,
    engine_family="deepseek_v3",
)
