"""The language model inside a multimodal checkpoint: its config.json, and the names of its tensors.

A multimodal checkpoint nests the config.json of its language model and adds a prefix to its tensor names.
Trainer and engine read the language model as if it were a separate checkpoint. Other tensors, such as the
vision tower, are copied unchanged into exports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.shapes.families import FAMILIES
from megatron_rl.shapes.fused_experts import FusedExperts

_INHERITED = (
    "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config", "compression_config",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""Keys outside ``text_config`` in a multimodal config.json that also apply to the language model."""
_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}
"""Prefix of the language model's tensors in a multimodal checkpoint -> prefix in a separate checkpoint."""
_OTHER_PREFIXES = (
    "visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "audio_tower.", "embed_audio.",
    "embed_vision.", "vision_embedder.", "mtp.",
)  # fmt: skip
"""Prefixes of the names of tensors outside the language model; ``model.`` may precede them.

They include Qwen3.5's layers for multi-token prediction (``mtp.``)."""


@dataclass(frozen=True)
class Multimodal:
    """Type of multimodal model whose language model can be trained.

    Example: ``Multimodal("Qwen3-VL", "qwen3_vl", "Qwen3VLForConditionalGeneration", {"qwen3_vl_text":
    "qwen3"})``.
    """

    title: str
    """Display name in the list of models."""
    model_type: str
    """``model_type`` of its config.json."""
    architecture: str
    """The transformers class of the complete model."""
    language_models: Mapping[str, str]
    """``model_type`` of its ``text_config`` -> ``model_type`` of the family in the table."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the language model's config.json that override the family's defaults."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values that override the language model's config.json, as in the transformers class."""
    fused_experts: FusedExperts | None = None
    """Storage format of exports with fused experts; None for one tensor per expert."""


_MULTIMODAL_TYPES = (
    Multimodal("Gemma 3", "gemma3", "Gemma3ForConditionalGeneration", {"gemma3_text": "gemma3_text"}),
    Multimodal("Gemma 4", "gemma4", "Gemma4ForConditionalGeneration", {"gemma4_text": "gemma4_text"}),
    Multimodal(
        "Gemma 4 without encoders",
        "gemma4_unified",
        "Gemma4UnifiedForConditionalGeneration",
        {"gemma4_unified_text": "gemma4_text"},
        # Its language model has neither per-layer embeddings nor experts, and no keys for either.
        defaults={
            "hidden_size_per_layer_input": 0,
            "max_position_embeddings": 262144,
            "sliding_window": 1024,
        },
    ),
    Multimodal(
        "Mistral Small 3.1 and 3.2, Ministral 3",
        "mistral3",
        "Mistral3ForConditionalGeneration",
        {"mistral": "mistral", "ministral": "ministral", "ministral3": "ministral3"},
    ),
    Multimodal(
        "Qwen2-VL",
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        {"qwen2_vl_text": "qwen2", "qwen2_vl": "qwen2"},
    ),
    Multimodal(
        "Qwen2.5-VL",
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        {"qwen2_5_vl_text": "qwen2", "qwen2_5_vl": "qwen2"},
    ),
    Multimodal("Qwen3-VL", "qwen3_vl", "Qwen3VLForConditionalGeneration", {"qwen3_vl_text": "qwen3"}),
    Multimodal(
        "Qwen3-VL-MoE",
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        {"qwen3_vl_moe_text": "qwen3_moe"},
        fixed={"norm_topk_prob": True},
        fused_experts=FusedExperts(transposed=True),
    ),
    Multimodal(
        "Qwen3.5 and 3.6", "qwen3_5", "Qwen3_5ForConditionalGeneration", {"qwen3_5_text": "qwen3_5_text"}
    ),
    Multimodal(
        "Qwen3.5-MoE and 3.6-MoE",
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        {"qwen3_5_moe_text": "qwen3_5_moe_text"},
    ),
)
MULTIMODAL: dict[str, Multimodal] = {multimodal.architecture: multimodal for multimodal in _MULTIMODAL_TYPES}
"""Every multimodal model whose language model can be trained, by architecture."""


def multimodal_of(config: Mapping[str, Any]) -> Multimodal | None:
    """Return the multimodal type of a config.json, by its ``architectures`` or its ``model_type``.

    Returns None for a text-only model, and for a multimodal model whose language model is not in the table of
    families.
    """
    architectures = config.get("architectures")
    for multimodal in _MULTIMODAL_TYPES:
        # The model type is compared only for a config.json without architectures.
        is_match = config.get("model_type") == multimodal.model_type
        if isinstance(architectures, list) and architectures:
            is_match = architectures[0] == multimodal.architecture
        if is_match and _language_type(config, multimodal) in multimodal.language_models:
            return multimodal
    return None


def _language_type(config: Mapping[str, Any], multimodal: Multimodal) -> str:
    """Return the ``model_type`` of the language model in a config.json of the type ``multimodal``."""
    text_config = config.get("text_config")
    if text_config is None:
        # Qwen2-VL and Qwen2.5-VL are published without a nested config.
        return str(config.get("model_type"))
    if not isinstance(text_config, Mapping):
        return ""
    return str(text_config.get("model_type", next(iter(multimodal.language_models))))


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the language model in a multimodal model's config.json.

    Without a supported multimodal model (`multimodal_of`) the config.json is returned unchanged.

    >>> config = {
    ...     "architectures": ["Gemma3ForConditionalGeneration"],
    ...     "tie_word_embeddings": True,
    ...     "text_config": {"model_type": "gemma3_text", "hidden_size": 2560},
    ... }
    >>> language_config(config)["architectures"], language_config(config)["tie_word_embeddings"]
    (['Gemma3ForCausalLM'], True)
    """
    multimodal = multimodal_of(config)
    if multimodal is None:
        return config

    text_config = config.get("text_config")
    if text_config is None:
        text_config = {key: value for key, value in config.items() if key != "vision_config"}

    # A value of the language model takes precedence over an inherited value, unless it is null.
    inherited_values = {key: config[key] for key in _INHERITED if config.get(key) is not None}
    own_values: dict[str, Any] = {}
    for key, value in text_config.items():
        if value is not None or key not in inherited_values:
            own_values[key] = value

    family = FAMILIES[multimodal.language_models[_language_type(config, multimodal)]]
    # In ascending order of precedence.
    values = {
        **multimodal.defaults,
        **inherited_values,
        **own_values,
        **multimodal.fixed,
        "model_type": family.model_type,
        "architectures": [family.architecture],
    }
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(key), Mapping):
            values[key] = _remove_image_sections(values[key])
    return values


def _remove_image_sections(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters without the sections for positions in images (``mrope``).

    The three positions of a text token are equal, so its rotary angles do not depend on the sections.
    """
    text_rope = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    for key in ("type", "rope_type"):
        if text_rope.get(key) == "mrope":
            text_rope[key] = "default"
    return text_rope


def language_model_names(stored_names: Iterable[str]) -> dict[str, str]:
    """Map tensor names of a text-only checkpoint to the tensors' names in a multimodal checkpoint.

    ``stored_names``: tensor names of the multimodal checkpoint. Tensors outside of the language model, such
    as the vision encoder, are omitted.

    >>> language_model_names(["model.language_model.norm.weight", "model.visual.norm.weight"])
    {'model.norm.weight': 'model.language_model.norm.weight'}
    """
    return {
        language_model_tensor_name(name): name for name in stored_names if not is_outside_language_model(name)
    }


def language_model_tensor_name(stored_name: str) -> str:
    """Convert a tensor name of a multimodal checkpoint to the tensor's name in a text-only checkpoint.

    >>> language_model_tensor_name("model.language_model.norm.weight")
    'model.norm.weight'
    >>> language_model_tensor_name("language_model.lm_head.weight")
    'lm_head.weight'
    """
    for prefix, language_prefix in _PREFIXES.items():
        if stored_name.startswith(prefix):
            return language_prefix + stored_name.removeprefix(prefix)
    return stored_name


def is_outside_language_model(stored_name: str) -> bool:
    """Return whether a tensor of a multimodal checkpoint is outside the language model."""
    return stored_name.removeprefix("model.").startswith(_OTHER_PREFIXES)
