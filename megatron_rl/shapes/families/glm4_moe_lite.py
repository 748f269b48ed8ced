"""GLM-4.7-Flash: the latent attention of DeepSeek V3 and the experts of GLM-4.5."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.shapes.family import (
    ConfigReader,
    Family,
    Fields,
    biased_router,
    deepseek_megatron,
    deepseek_structure,
)


def _dense_layers(config: Mapping[str, Any]) -> int:
    """Return the number of dense layers before the first one with experts."""
    types = config.get("mlp_layer_types")

    # Without the list transformers makes the first layer dense.
    if types is None:
        return 1
    return types.index("sparse") if "sparse" in types else len(types)


def _structure(reader: ConfigReader) -> Fields:
    reader.allow("norm_topk_prob", True)
    reader.allow("n_group", 1)

    # vLLM reads the number of dense layers, which must come first; transformers writes a type per layer.
    dense = _dense_layers(reader.config)
    if "dense" in (reader.get("mlp_layer_types") or [])[dense:]:
        reader.refuse(
            "dense layers after one with experts are not supported",
            "mlp_layer_types",
            "every dense layer before the first sparse one",
        )

    # From here on the model has the structure of DeepSeek V3, which counts its dense layers by this key.
    config = {**reader.config, "first_k_dense_replace": dense}
    fields = deepseek_structure(ConfigReader(config, reader.file, reader.errors))
    return {**fields, "router_bias": True}


def _megatron(config: Mapping[str, Any]) -> Fields:
    return {**deepseek_megatron(config), **biased_router()}


def _engine_keys(config: Mapping[str, Any]) -> Fields:
    # Without the last two vLLM routes by softmax and leaves the router's bias out.
    return {
        "first_k_dense_replace": _dense_layers(config),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


FAMILY = Family(
    "GLM-4.7-Flash",
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    "Glm4MoeLiteForSequenceClassification",
    _structure,
    _megatron,
    defaults={
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "n_shared_experts": 1,
        "n_group": 1,
        "rms_norm_eps": 1e-5,
    },
    aliases={"num_mtp_layers": "num_nextn_predict_layers"},
    engine_keys=_engine_keys,
)
