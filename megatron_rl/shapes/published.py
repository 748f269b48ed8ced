"""Shapes of models by preset name or config.json, including models that can be planned but not trained.

A family in the table reads its own config.json. For any other decoder the keys that most models have in
common are read, which is enough to count its parameters, FLOPs and memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError, nearest, raise_errors, single_errors
from megatron_rl.shapes.blocks import MIXERS
from megatron_rl.shapes.families import BY_MODEL_TYPE
from megatron_rl.shapes.family import (
    ConfigReader,
    Fields,
    common_sizes,
    delta_net_fields,
    latent_sizes,
    sliding_window_fields,
)
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.multimodal import language_config
from megatron_rl.shapes.pretrained import PretrainedModel, read_json, read_pretrained

# Properties of model types that their config.json does not contain.
_UNGATED_MODEL_TYPES = ("gpt", "gpt2", "gpt_neox", "opt", "falcon", "phi", "starcoder2", "bloom")
"""``model_type`` of models whose MLP is not gated."""
_WITHOUT_OUTPUT_BIAS = ("qwen2_moe", "glm4")
"""``model_type`` of models whose ``attention_bias`` does not apply to the output projection."""
_UNTRAINABLE_FEATURES = (
    ("gated", False, "an MLP of two matrices"),
    ("layer_norm", True, "LayerNorm"),
    ("learned_positions", None, "learned positions"),
)
"""Values of `ModelShape` that no layer of this package implements: (field, value or None for any true value,
name of the feature in error messages)."""
_UNREPORTED_KEYS = frozenset(
    (
        "_name_or_path", "architectures", "auto_map", "attention_dropout", "bos_token_id", "dtype",
        "embd_pdrop", "eos_token_id", "hidden_dropout", "id2label", "initializer_range", "label2id",
        "layer_norm_eps", "layer_types", "max_position_embeddings", "max_window_layers", "num_labels",
        "output_attentions", "output_hidden_states", "pad_token_id", "return_dict", "rms_norm_eps",
        "rope_parameters", "rope_scaling", "rope_theta", "sliding_window_pattern", "torch_dtype",
        "transformers_version", "use_cache", "use_sliding_window",
    )
)  # fmt: skip
"""Keys of config.json that are not reported as unread: they do not affect the sizes of a model, or are read
together with another key."""
_PRESET_SOURCE = re.compile(r"Hugging Face config\.json of ([\w.-]+/[\w-]+(?:\.[\w-]+)*)")
"""Beginning of a preset's `source` that names its repository on the Hub."""
_LISTED_KEYS = 12
"""Maximum number of keys that an error lists."""


@lru_cache(maxsize=1)
def load_presets() -> Mapping[str, Mapping[str, Any]]:
    """Return the packaged configurations of published models by name."""
    return json.loads(resources.files("megatron_rl.shapes").joinpath("published.json").read_text())


def load_shape(reference: str | Mapping[str, Any]) -> ModelShape:
    """Load the shape of a model.

    ``reference`` is one of:

    - the name or path of a model, see `find_named_config`;
    - the parsed config.json of a model;
    - a mapping ``{"name": ..., "config": ...}`` of a name and a parsed config.json.
    """
    if isinstance(reference, Mapping):
        config = reference.get("config", reference)
        return shape_of(config, str(reference.get("name", config.get("_name_or_path") or "inline model")))

    name, config = find_named_config(reference)
    return shape_of(config, name)


def find_named_config(reference: str) -> tuple[str, Mapping[str, Any]]:
    """Find a model's config.json; return the model's name and the config.json.

    ``reference``: a checkpoint directory, a config.json file or the name of a preset. Raises UserError with
    the nearest preset for any other text.
    """
    path = Path(reference)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return reference, read_json(path)

    # Names match without the organisation, in upper or lower case: Qwen/Qwen3-8B is qwen3-8b.
    names = {name.lower(): name for name in load_presets()}
    short_name = reference.lower().rsplit("/", 1)[-1]
    if short_name in names:
        name = names[short_name]
        return name, load_presets()[name]["config"]

    similar_name = nearest(short_name, sorted(load_presets()))
    suggestion = ""
    if similar_name:
        suggestion = f"did you mean {similar_name}? "
    raise UserError(
        f"unknown model {reference!r}",
        where="MODEL",
        expected="a preset name, a Hugging Face directory, or a config.json",
        got=reference,
        fix=f"{suggestion}presets: {', '.join(sorted(load_presets()))}",
    )


def published_repo(reference: str) -> str | None:
    """Return the Hugging Face Hub repository of a preset, as ORG/NAME, or None if it has no weights there.

    For a preset of a base model this is the repository of the instruction-tuned model, which has a chat
    template. ``reference`` is the name of a preset. A name with a slash is already a repository and is
    returned unchanged.
    """
    if "/" in reference:
        return reference
    name, _ = find_named_config(reference)
    preset = load_presets()[name]
    return preset.get("instruct") or _source_repo(preset)


def is_base_model(repo: str) -> bool:
    """Return whether a Hub repository has the name of a preset's base model, which has no chat template."""
    name = repo.rpartition("/")[2].partition("@")[0].lower()
    for preset in load_presets().values():
        base_repo = _source_repo(preset)
        if "instruct" in preset and base_repo is not None and name == base_repo.rpartition("/")[2].lower():
            return True
    return False


def _source_repo(preset: Mapping[str, Any]) -> str | None:
    """Return the Hub repository of a preset's config.json, or None if the preset has no repository."""
    match = _PRESET_SOURCE.match(str(preset["source"]))
    if match is None:
        return None
    return match[1]


def shape_of(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """Read the shape of any decoder from its config.json, including families that the package cannot train.

    Raises UserErrors that name the missing keys.
    """
    config = _text_config(config)
    family = BY_MODEL_TYPE.get(str(config.get("model_type", "")))
    if family is None:
        reader = ConfigReader(config, name)
        shape = _read_common_shape(reader, name)
    else:
        reader = ConfigReader(family.normalise_config(config), name)
        shape = replace(family.shape(reader), name=name)

    raise_errors(reader.errors)
    return shape


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the language model in a multimodal model's config.json.

    The config.json of a text-only model is returned unchanged.
    """
    # Return the language model of a multimodal model that can be trained.
    config = language_config(config)
    # In any other multimodal model the language model is ``text_config``. It cannot be trained, but `plan`
    # can predict its memory and step time.
    return config.get("text_config") or config


def read_trainable(path: Path, errors: list[UserError]) -> PretrainedModel | None:
    """Return the model of a config.json that can be trained; otherwise add to ``errors`` and return None."""
    try:
        return read_pretrained(path)
    except UserError as error:
        description = _describe_untrainable(path)
        for single_error in single_errors(error):
            errors.append(replace(single_error, got=f"{single_error.got}{description}"))
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        # Values of an unexpected type may raise any error, anywhere in the code of a family.
        errors.append(
            UserError(
                "the model's config.json has an invalid value",
                where=str(path),
                expected="values as transformers writes them",
                got=f"{type(error).__name__}: {error}",
                fix="copy the file again from the checkpoint",
            )
        )
    return None


def _describe_untrainable(path: Path) -> str:
    """Describe the unsupported features of a config.json, as a text to append to an error.

    If this package does not know the ``model_type``, the text also lists the keys of config.json that the
    package does not read. If the config.json is malformed, the text is empty.
    """
    try:
        config = _text_config(read_json(path))
        features = [*list_untrainable_features(shape_of(config)), *_unknown_layer_types(config)]
        description = ""
        if features:
            description = f", which needs {', '.join(features)}"
        if str(config.get("model_type", "")) not in BY_MODEL_TYPE:
            description += f"; {_describe_keys(config)}"
        return description
    except (UserError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        return ""


def _unknown_layer_types(config: Mapping[str, Any]) -> list[str]:
    """Return a description, such as "layers of type mamba", of each unsupported type in ``layer_types``.

    ``layer_types`` is the list of config.json with the type of every layer. A type is supported if `MIXERS`
    has a mixer (such as attention) for it.
    """
    supported_types: set[str] = set()
    for mixer in MIXERS.values():
        supported_types.update(mixer.layer_types)
    unknown_types = {str(layer_type) for layer_type in config.get("layer_types") or []} - supported_types
    return [f"layers of type {layer_type}" for layer_type in sorted(unknown_types)]


def _describe_keys(config: Mapping[str, Any]) -> str:
    """Describe which keys of an unknown family's config.json are read: their number, and all unread keys."""
    recorder = _KeyRecorder(config)
    _read_common_shape(ConfigReader(recorder), "model")

    unread_keys = sorted(config.keys() - recorder.read_keys - _UNREPORTED_KEYS)
    read_count = len(config) - len(unread_keys)
    if not unread_keys:
        return f"all {read_count} keys of its config.json are read"

    unread_text = ", ".join(unread_keys[:_LISTED_KEYS])
    if len(unread_keys) > _LISTED_KEYS:
        unread_text += f" and {len(unread_keys) - _LISTED_KEYS} more"
    return f"{read_count} keys of its config.json are read, and this package does not read {unread_text}"


class _KeyRecorder(dict[str, Any]):
    """Mapping of a config.json that records which keys `get` has read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.read_keys: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value at a key, or ``default``, and record that the key was read."""
        self.read_keys.add(key)
        return super().get(key, default)


def list_untrainable_features(shape: ModelShape) -> list[str]:
    """Return the names, for error messages, of the model's features that this package does not implement."""
    features = []
    for field, untrainable_value, feature in _UNTRAINABLE_FEATURES:
        value = getattr(shape, field)
        has_feature = value == untrainable_value
        # None matches any true value.
        if untrainable_value is None:
            has_feature = bool(value)
        if has_feature:
            features.append(feature)
    return features


def _read_common_shape(reader: ConfigReader, name: str) -> ModelShape:
    """Read the shape of a decoder from the keys that most config.json files have.

    This function is for models whose family is not supported for training. ``name``: name of the shape.

    The number of key-value heads defaults to the number of attention heads, and the width of the MLP defaults
    to four times the hidden size. Experts, latent attention and delta nets are read if config.json has their
    keys.
    """
    config = reader.config
    model_type = str(config.get("model_type", ""))
    sizes = common_sizes(reader)
    layers = sizes["layers"]

    # Structure that follows from the model type unless config.json has a key for it.
    is_gemma = model_type.startswith("gemma")
    activation = str(config.get("hidden_act") or config.get("hidden_activation") or "silu")
    is_gated = is_gemma or not (activation.startswith(("gelu", "relu")) or model_type in _UNGATED_MODEL_TYPES)
    has_bias = bool(config.get("attention_bias", model_type == "qwen2_moe"))
    learned_positions = 0
    if config.get("position_embedding_type") == "learned":
        learned_positions = reader.count("max_position_embeddings")

    width = reader.size("intermediate_size", 4 * sizes["hidden"])
    fields: Fields = {
        "name": name,
        **sizes,
        "mlp_width": reader.size("intermediate_size_mlp", width),
        "tied": bool(config.get("tie_word_embeddings", is_gemma)),
        "gated": is_gated,
        "layer_norm": config.get("norm") == "layernorm" or (not is_gated and config.get("norm") is None),
        "qkv_bias": has_bias,
        "output_bias": has_bias and model_type not in _WITHOUT_OUTPUT_BIAS,
        "mlp_bias": reader.flag("mlp_bias"),
        "qk_norm": bool(config.get("qk_norm", reader.flag("use_qk_norm"))),
        "learned_positions": learned_positions,
    }

    # Structures that only some models have.
    fields |= sliding_window_fields(reader, layers)
    fields |= _read_mixture_fields(reader, layers)
    if reader.flag("kv_lora_rank"):
        fields |= latent_sizes(reader)
    if reader.flag("linear_num_value_heads"):
        fields |= delta_net_fields(reader, layers)
    if fields.get("linear_layers"):
        fields["output_gate"] = bool(reader.get("attn_output_gate", True))
    return ModelShape(**fields)


def _read_mixture_fields(reader: ConfigReader, layers: int) -> Fields:
    """Read the fields of a mixture of experts from the keys of any family; return {} without experts."""
    count_keys = [key for key in ("num_experts", "n_routed_experts", "num_local_experts") if reader.flag(key)]
    if not count_keys:
        return {}

    model_type = str(reader.get("model_type", ""))
    width = reader.size("moe_intermediate_size", reader.size("intermediate_size"))

    # Shared experts: Qwen writes their width and gates them, DeepSeek writes their number, Llama 4 has one.
    shared_width = reader.count("shared_expert_intermediate_size")
    is_gated = True
    if reader.flag("n_shared_experts"):
        shared_width = reader.count("n_shared_experts") * width
        is_gated = False
    if model_type.startswith("llama4"):
        shared_width = width
        is_gated = False

    # Dense layers: a list of layers, the first layers, or all except every step-th layer.
    step = reader.size("decoder_sparse_step", reader.size("interleave_moe_layer_step", 1))
    first_dense = reader.count("first_k_dense_replace")
    listed_layers = reader.get("mlp_only_layers") or range(first_dense)
    dense_layers = tuple(layer for layer in range(layers) if layer in listed_layers or (layer + 1) % step)
    return {
        "experts": reader.size(count_keys[0]),
        "experts_per_token": reader.size("num_experts_per_tok", reader.size("experts_per_token", 2)),
        "expert_width": width,
        "shared_width": shared_width,
        "shared_gate": is_gated and shared_width > 0,
        "router_bias": reader.flag("router_bias"),
        "dense_layers": dense_layers,
    }
