"""Translate a transformers config and a layout to the arguments of Megatron's GPTModel."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.check.model.megatron_settings import DERIVED
from megatron_rl.distributed import device
from megatron_rl.errors import UserError, nearest
from megatron_rl.megatron import tensor_scope
from megatron_rl.megatron.experts import prepare_experts
from megatron_rl.megatron.gemma import both_frequencies, prepare_sandwich_layers
from megatron_rl.megatron.latent import allow_without_transformer_engine, prepare_latent_attention
from megatron_rl.megatron.transformer_settings import transformer_settings
from megatron_rl.shapes.family import rope_parameters, rotary_fraction
from megatron_rl.shapes.fit import trainer_problems
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.pretrained import PretrainedModel, describe


def pretrained(hf_config: Any) -> PretrainedModel:
    """Describe the model of a transformers config by the table of model families."""
    return describe(hf_config.to_dict())


def read_hf_config(path: str | Path) -> Any:
    """Return the transformers config of a checkpoint; raises UserError for what transformers refuses."""
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:  # transformers' validation raises whatever a value leads to
        raise UserError(
            "transformers refuses the model's config.json",
            where=str(Path(path) / "config.json"),
            expected="a config.json that AutoConfig.from_pretrained reads",
            got=f"{type(error).__name__}: {error}".strip(),
            fix="correct what it names, or copy config.json again from the checkpoint",
        ) from error


def with_scalar_head(hf_config: Any) -> Any:
    """Return the config of the same model with a head of one number, as transformers names it."""
    config = copy.deepcopy(hf_config)
    config.architectures = [pretrained(hf_config).family.scalar_architecture]
    config.num_labels, config.tie_word_embeddings = 1, False
    return config


@dataclass(frozen=True)
class ModelSpec:
    """Arguments of GPTModel, apart from the layer spec and the pipeline stage.

    ``stated`` names the fields of the TransformerConfig that the model, the layout and the role set.
    ``gpt_kwargs`` are keyword arguments of GPTModel.
    ``inverse_frequencies`` [rotary_dim / 2] float32.
    """

    transformer_config: TransformerConfig
    stated: frozenset[str]
    gpt_kwargs: Mapping[str, Any]
    model: PretrainedModel
    hf_config: Any
    inverse_frequencies: Tensor

    @property
    def shares_heads(self) -> bool:
        """Whether tensor-parallel ranks share key-value heads because there are fewer heads than ranks."""
        config: Any = self.transformer_config
        return config.num_query_groups < config.tensor_model_parallel_size

    def finish(self, chunk: Any) -> None:
        """Add to a new GPTModel chunk the features that Megatron's settings do not express.

        These are the checkpoint's exact rotary frequencies, since Megatron knows one fixed kind of RoPE
        scaling, the role's own groups where it would ask for global ones, and Gemma's additions to a layer.
        """
        shape = self.model.shape
        if shape.mla:
            prepare_latent_attention(chunk, self.inverse_frequencies)
            return
        if self.shares_heads:
            for layer in chunk.decoder.layers:
                tensor_scope.bind(layer.self_attention)
        if shape.sandwich_norms:
            two = "full_attention" in self.hf_config.rope_parameters
            cap = self.model.config.get("attn_logit_softcapping")
            prepare_sandwich_layers(chunk, shape.sliding_layers if two else None, cap)
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
    """Translate a transformers config for a layout.

    ``overrides`` are TransformerConfig fields that win over the derived ones; ``fused`` says that the layers
    are Transformer Engine's, where the family allows it. Raises UserError for an
    unsupported architecture or setting, and where the layout does not divide the model.
    """
    model = pretrained(hf_config)
    shape = model.shape
    for error in trainer_problems(shape, layout, overrides):
        raise error
    if shape.experts:
        prepare_experts()
    if shape.mla:
        allow_without_transformer_engine()
    elif shape.kv_heads < layout.tensor:
        tensor_scope.allow_shared_heads()
    settings = transformer_settings(model, layout, dtype, fused and not shape.plain_layers)
    settings.update(_checked_overrides(overrides or {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about defaults that are set on purpose here
        try:
            kind = MLATransformerConfig if shape.mla else TransformerConfig
            transformer_config = kind(**settings)
        except (ValueError, AssertionError) as error:
            raise UserError(
                "Megatron refuses the model's settings with this layout.",
                where="layout and megatron overrides",
                got=str(error),
            ) from error
    frequencies, magnitude = rotation(hf_config)
    if magnitude != 1.0:
        # Megatron's attention multiplies cos and sin by 0.1 ln(s) + 1 of this attribute, which is no field.
        setattr(transformer_config, "yarn_rotary_scaling_factor", math.exp(10.0 * (magnitude - 1.0)))
    gpt_kwargs = {
        "vocab_size": shape.padded_vocab(layout.tensor),
        "max_sequence_length": shape.max_positions,
        "share_embeddings_and_output_weights": shape.tied,
        "position_embedding_type": "rope",
        "rotary_percent": rotary_fraction(model.config),
        "rotary_base": rope_parameters(model.config)["rope_theta"],
    }
    return ModelSpec(transformer_config, frozenset(settings), gpt_kwargs, model, hf_config, frequencies)


def rotation(hf_config: Any) -> tuple[Tensor, float]:
    """Return RoPE's inverse frequencies [head_dim / 2] float32, and what it multiplies cos and sin by.

    Where local attention has its own frequencies they come first, [head_dim]. Raises UserError where one kind
    of attention multiplies and the other does not.
    """
    model = pretrained(hf_config)
    if "full_attention" not in hf_config.rope_parameters:
        return _frequencies(hf_config, model, None)
    (local, first), (whole, second) = (
        _frequencies(hf_config, model, kind) for kind in ("sliding_attention", "full_attention")
    )
    if first == second:
        return both_frequencies(local, whole), first
    raise UserError(
        "The two kinds of attention rescale cos and sin of their rotary angles by different factors.",
        where="config.json: rope_parameters",
        expected="one attention factor",
        got=f"{first:g} in local attention, {second:g} in the other",
    )


def _frequencies(hf_config: Any, model: PretrainedModel, layer_type: str | None) -> tuple[Tensor, float]:
    parameters = rope_parameters(model.config, layer_type or "full_attention")
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        size = model.shape.qk_rope or int(model.shape.head_dim * rotary_fraction(model.config))
        exponents = torch.arange(0, size, 2, dtype=torch.float) / size
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    layer = {} if layer_type is None else {"layer_type": layer_type}
    return ROPE_INIT_FUNCTIONS[kind](hf_config, device.host(), **layer)


def _checked_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(MLATransformerConfig)}
    for name in overrides:
        if name in DERIVED:
            raise UserError(
                f"{name!r} is derived from the checkpoint and the layout and cannot be overridden.",
                where=f"megatron.{name}",
                fix="remove it, or set it in the role's layout",
            )
        if name not in known:
            close = nearest(name, known)
            raise UserError(
                f"Megatron's TransformerConfig has no field {name!r}.",
                where=f"megatron.{name}",
                fix=f"did you mean {close!r}?" if close else None,
            )
    return dict(overrides)
