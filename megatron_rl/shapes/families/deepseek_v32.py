"""DeepSeek V3.2 (arXiv 2512.02556): DeepSeek V3 with sparse attention, on rows that attend to all keys.

An indexer chooses ``index_topk`` keys for each token. On rows of at most as many tokens it chooses all of
them, and the model computes what DeepSeek V3 does. The indexer is not trained.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.shapes.families import deepseek_v3
from megatron_rl.shapes.family import (
    ConfigReader,
    Fields,
    count_dense_layers,
    dense_layers_first,
    sparse_attention,
)


def _structure(reader: ConfigReader) -> Fields:
    dense_first = dense_layers_first(reader, 3)
    return {**deepseek_v3.FAMILY.structure(dense_first), **sparse_attention(reader)}


def _engine_keys(config: Mapping[str, Any]) -> Fields:
    dense = {"first_k_dense_replace": count_dense_layers(config, 3)}
    return {**deepseek_v3.FAMILY.engine_keys(config), **dense}


FAMILY = replace(
    deepseek_v3.FAMILY,
    title="DeepSeek V3.2",
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    scalar_architecture="DeepseekV32ForSequenceClassification",
    structure=_structure,
    defaults={**deepseek_v3.FAMILY.defaults, "index_topk": 2048},
    engine_keys=_engine_keys,
    copied=(".self_attn.indexer.",),
    engine_family="deepseek_v3",
    further_model_types=(),
)
