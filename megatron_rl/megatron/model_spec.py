"""Translation of a transformers config and a parallel layout to the arguments of Megatron's GPTModel."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer import transformer_config as config_classes
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.check.model.megatron_settings import DERIVED_FIELDS
from megatron_rl.distributed import device
from megatron_rl.errors import UserError, nearest
from megatron_rl.megatron.blocks import finish_blocks, prepare_blocks
from megatron_rl.megatron.features import FEATURES
from megatron_rl.megatron.layers import join_frequencies, set_rotary_factor
from megatron_rl.megatron.norms import prepare_post_norms
from megatron_rl.megatron.transformer_settings import transformer_settings
from megatron_rl.shapes.family import rope_parameters, rotary_fraction
from megatron_rl.shapes.layout import ParallelLayout, trainer_problems
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import (
    PretrainedModel,
    engine_config,
    parse_pretrained,
    read_json,
    transformers_config,
)
from megatron_rl.shapes.quantized import quantization_keys


def describe_model(hf_config: Any) -> PretrainedModel:
    """Describe the model of a transformers config by the table of model families."""
    return parse_pretrained(hf_config.to_dict())


def read_hf_config(path: str | Path, *, for_engine: bool = False) -> Any:
    """Return the transformers config of a checkpoint, without the quantisation of its files.

    For a multimodal checkpoint, returns the config of the language model. If transformers has no class for
    the ``model_type``, returns a config of the class that the model family uses. With ``for_engine``, returns
    the config from which a generation engine builds the model, see `engine_config`.

    The quantisation is removed because weights are dequantised when they are loaded: models are built and
    exported in the dtype of the dequantised weights. Raises UserError if transformers rejects the config.
    """
    values = read_json(Path(path) / "config.json")

    # For a plain language model, transformers reads the directory itself.
    language_values = transformers_config(values)
    if for_engine:
        language_values = engine_config(values)
    try:
        if language_values is values:
            config = AutoConfig.from_pretrained(path)
        else:
            config = CONFIG_MAPPING[language_values["model_type"]].from_dict(dict(language_values))
    except Exception as error:  # transformers' validation may raise anything
        raise UserError(
            "transformers refuses the model's config.json",
            where=str(Path(path) / "config.json"),
            expected="a config.json that AutoConfig.from_pretrained reads",
            got=f"{type(error).__name__}: {error}".strip(),
            fix="correct the field that it names, or copy config.json again from the checkpoint",
        ) from error

    # Weights are dequantised when they are loaded.
    for key in quantization_keys(vars(config)):
        delattr(config, key)
    return config


def with_scalar_head(hf_config: Any) -> Any:
    """Return a copy of a transformers config, changed to the same model with a scalar head.

    The new architecture is the model family's ``*ForSequenceClassification`` class of transformers.
    """
    config = copy.deepcopy(hf_config)
    config.architectures = [describe_model(hf_config).family.scalar_architecture]
    config.num_labels = 1
    config.tie_word_embeddings = False
    return config


@dataclass(frozen=True)
class ModelSpec:
    """Arguments of GPTModel, except for the layer spec and the pipeline stage."""

    transformer_config: TransformerConfig
    """Megatron's configuration of the model."""
    set_fields: frozenset[str]
    """Fields of ``transformer_config`` that the model, the layout and the role set."""
    gpt_kwargs: Mapping[str, Any]
    """Further keyword arguments of GPTModel."""
    model: PretrainedModel
    """Description of the model from the table of model families."""
    hf_config: Any
    """The model's transformers config."""
    inverse_frequencies: Tensor
    """Inverse frequencies of RoPE, [rotary_dim / 2] float32. If local and full attention have different
    frequencies, the tensor has both, joined by `join_frequencies`."""
    local_frequencies: int
    """Number of frequencies of local attention, which come first; 0 if all layers have equal frequencies."""
    local_rotary_factor: float
    """Factor of cos and sin in layers with a sliding window, if these layers have separate rotary angles."""

    @property
    def shares_heads(self) -> bool:
        """Return whether tensor-parallel ranks share key-value heads: there are fewer heads than ranks."""
        config: Any = self.transformer_config
        return config.num_query_groups < config.tensor_model_parallel_size

    def finish(self, chunk: Any) -> None:
        """Add to a new GPTModel chunk the features that Megatron's settings do not express."""
        shape = self.model.shape
        finish_blocks(chunk, self)
        if shape.post_norms:
            prepare_post_norms(chunk, shape.pre_norms)
        for name in self.model.family.features:
            FEATURES[name](chunk, self)

        # Set the checkpoint's exact frequencies, since Megatron implements only one type of RoPE scaling.
        # Latent attention has a rotary embedding in each layer, and none in the chunk.
        rotary = getattr(chunk, "rotary_pos_emb", None)
        if rotary is not None:
            rotary.inv_freq = self.inverse_frequencies.to(rotary.inv_freq.device)


def model_spec(
    hf_config: Any,
    layout: ParallelLayout,
    dtype: torch.dtype,
    overrides: Mapping[str, Any] | None = None,
    fused: bool = False,
) -> ModelSpec:
    """Translate a transformers config and a layout to the arguments of GPTModel.

    ``overrides`` are TransformerConfig fields that replace derived fields. With ``fused`` the layers are
    Transformer Engine's if the family supports them. Raises UserError for an unsupported architecture or
    setting, and for a layout that does not divide the model.
    """
    model = describe_model(hf_config)
    shape = model.shape
    for error in trainer_problems(shape, layout, overrides):
        raise error

    prepare_blocks(shape, layout)
    settings = transformer_settings(model, layout, dtype, fused and not shape.needs_plain_layers)
    settings.update(_check_overrides(overrides or {}))
    config_class: type[TransformerConfig] = getattr(config_classes, shape.config_class)
    with warnings.catch_warnings():
        # Megatron warns about defaults that are set on purpose.
        warnings.simplefilter("ignore")
        try:
            transformer_config = config_class(**settings)
        except (ValueError, AssertionError) as error:
            raise UserError(
                "Megatron refuses the model's settings with this layout.",
                where="layout and megatron overrides",
                got=str(error),
            ) from error

    # Rotary embedding. Gemma 3 has separate frequencies in layers with a sliding window.
    inverse_frequencies, rotary_factor = rotary_frequencies(hf_config)
    if rotary_factor != 1.0:
        set_rotary_factor(transformer_config, rotary_factor)
    local_count = 0
    local_rotary_factor = rotary_factor
    if "full_attention" in hf_config.rope_parameters:
        local_frequencies, local_rotary_factor = _rope_frequencies(hf_config, model, "sliding_attention")
        local_count = len(local_frequencies)

    gpt_kwargs = {
        "vocab_size": shape.padded_vocab(layout.tensor),
        "max_sequence_length": shape.max_positions,
        "share_embeddings_and_output_weights": shape.tied,
        "position_embedding_type": "rope",
        "rotary_percent": rotary_fraction(model.config),
        "rotary_base": rope_parameters(model.config)["rope_theta"],
    }
    return ModelSpec(
        transformer_config,
        frozenset(settings),
        gpt_kwargs,
        model,
        hf_config,
        inverse_frequencies,
        local_count,
        local_rotary_factor,
    )


def rotary_frequencies(hf_config: Any) -> tuple[Tensor, float]:
    """Compute RoPE's inverse frequencies, [head_dim / 2] float32, and the factor of cos and sin.

    If local attention has separate frequencies, they precede the frequencies of full attention, and the
    factor belongs to full attention.
    """
    model = describe_model(hf_config)
    if "full_attention" not in hf_config.rope_parameters:
        return _rope_frequencies(hf_config, model, None)

    local_frequencies, _ = _rope_frequencies(hf_config, model, "sliding_attention")
    full_frequencies, factor = _rope_frequencies(hf_config, model, "full_attention")
    return join_frequencies(local_frequencies, full_frequencies), factor


def _rope_frequencies(
    hf_config: Any,
    model: PretrainedModel,
    layer_type: str | None,
) -> tuple[Tensor, float]:
    """Compute RoPE's inverse frequencies in layers of one type, and the factor of cos and sin.

    ``layer_type`` is transformers' name of the type, "full_attention" or "sliding_attention", or None if the
    config has the same RoPE for all layers.
    """
    config_key = layer_type or "full_attention"
    parameters = rope_parameters(model.config, config_key)
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "default":
        head_dim = _head_size(model.shape, layer_type)
        size = model.shape.qk_rope or int(head_dim * rotary_fraction(model.config, config_key))
        exponents = torch.arange(0, size, 2, dtype=torch.float) / size
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0

    # transformers computes scaled frequencies. It expects the layer type only if the config has several.
    layer_argument = {}
    if layer_type is not None:
        layer_argument = {"layer_type": layer_type}
    return ROPE_INIT_FUNCTIONS[rope_type](hf_config, device.host(), **layer_argument)


def _head_size(shape: ModelShape, layer_type: str | None) -> int:
    """Return the head size of the layers of one type, or for None the model's general head size.

    ``layer_type`` is transformers' name of the type, such as "sliding_attention". All layers of a type have
    the same head size.
    """
    if layer_type is not None:
        for layer in range(shape.layers):
            is_local = layer in shape.sliding_layers
            if is_local != (layer_type == "sliding_attention"):
                continue

            # Mixers without attention heads have the key size 0.
            key_size = shape.block(layer).mixer.key_size(shape)
            if key_size:
                return key_size
    return shape.head_dim


def _check_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's TransformerConfig fields; raise UserError for an unknown or a derived field."""
    available_names = {field.name for field in fields(MLATransformerConfig)}
    for name in overrides:
        if name in DERIVED_FIELDS:
            raise UserError(
                f"{name!r} is derived from the checkpoint and the layout and cannot be overridden.",
                where=f"megatron.{name}",
                fix="remove it, or set it in the role's layout",
            )

        if name not in available_names:
            suggestion = nearest(name, available_names)
            fix = None
            if suggestion:
                fix = f"did you mean {suggestion!r}?"
            raise UserError(
                f"Megatron's TransformerConfig has no field {name!r}.",
                where=f"megatron.{name}",
                fix=fix,
            )
    return dict(overrides)
