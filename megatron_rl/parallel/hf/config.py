"""From a transformers config and a layout to what Megatron's GPTModel is built from."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.errors import UserError, nearest
from megatron_rl.parallel import device, tensor_scope
from megatron_rl.parallel.experts import prepare_experts
from megatron_rl.parallel.gemma import both_frequencies, prepare_sandwich_layers
from megatron_rl.parallel.hf.families import (
    ACTIVATIONS,
    Family,
    check_attention,
    check_routing,
    expert_count,
    family_of,
    has_scalar_head,
)
from megatron_rl.parallel.latent import allow_without_transformer_engine, prepare_latent_attention
from megatron_rl.shapes.layout import ParallelLayout

_OWN_FIELDS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
    "sequence_parallel", "num_layers", "hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "ffn_hidden_size", "num_moe_experts", "moe_ffn_hidden_size", "params_dtype",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSpec:
    """Hold what GPTModel is built from, apart from the layer spec and the pipeline stage.

    ``gpt_kwargs`` are keyword arguments of GPTModel. ``vocab_size`` is the checkpoint's,
    ``padded_vocab_size`` what the model allocates. ``inverse_frequencies`` [rotary_dim / 2] float32.
    """

    transformer_config: TransformerConfig
    gpt_kwargs: Mapping[str, Any]
    family: Family
    hf_config: Any
    vocab_size: int
    padded_vocab_size: int
    tied: bool
    inverse_frequencies: Tensor
    scalar_head: bool = False

    @property
    def vocabulary_parameters(self) -> tuple[str, ...]:
        """Return the names of the parameters whose rows are the padded vocabulary's."""
        names = ("embedding.word_embeddings.weight", "output_layer.weight")
        return names[:1] if self.scalar_head else names

    @property
    def shares_heads(self) -> bool:
        """Say whether tensor-parallel ranks share key-value heads, which are fewer than the ranks."""
        config: Any = self.transformer_config
        return config.num_query_groups < config.tensor_model_parallel_size

    @property
    def local_layers(self) -> bool:
        """Say whether the model takes Megatron's plain layers even where Transformer Engine is installed."""
        return self.family.sandwich

    def finish(self, chunk: Any) -> None:
        """Give a freshly built GPTModel chunk what Megatron's settings do not express.

        These are the checkpoint's exact rotary frequencies, since Megatron knows one fixed kind of RoPE
        scaling, the role's own groups where it would ask for global ones, and Gemma's additions to a layer.
        """
        if self.family.mla:
            prepare_latent_attention(chunk, self.inverse_frequencies)
            return
        if self.shares_heads:
            for layer in chunk.decoder.layers:
                tensor_scope.bind(layer.self_attention)
        if self.family.sandwich:
            local = tuple(kind == "sliding_attention" for kind in self.hf_config.layer_types)
            prepare_sandwich_layers(chunk, local)
        rotary = getattr(chunk, "rotary_pos_emb", None)
        if rotary is not None:
            rotary.inv_freq = self.inverse_frequencies.to(rotary.inv_freq.device)


def model_spec(
    hf_config: Any,
    layout: ParallelLayout,
    dtype: torch.dtype,
    overrides: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """Translate a transformers config for a layout.

    ``overrides`` are TransformerConfig fields that win over the derived ones. Raises UserError for an
    unsupported architecture or setting, and where the layout does not divide the model.
    """
    family = family_of(hf_config)
    check_attention(hf_config)
    check_routing(hf_config)
    _check_layout(hf_config, layout, overrides or {})
    if family.moe is not None:
        prepare_experts()
    if family.mla:
        allow_without_transformer_engine()
    elif hf_config.num_key_value_heads < layout.tensor:
        tensor_scope.allow_shared_heads()
    settings = _transformer_settings(hf_config, family, layout, dtype)
    settings.update(_checked_overrides(overrides or {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about defaults that are set on purpose here
        try:
            kind = MLATransformerConfig if family.mla else TransformerConfig
            transformer_config = kind(**settings)
        except (ValueError, AssertionError) as error:
            raise UserError(
                "Megatron refuses the model's settings with this layout.",
                where="layout and megatron overrides",
                got=str(error),
            ) from error
    vocab_size = hf_config.vocab_size
    padded = math.ceil(vocab_size / layout.tensor) * layout.tensor
    inverse_frequencies = rotary_frequencies(hf_config)
    gpt_kwargs = {
        "vocab_size": padded,
        "max_sequence_length": hf_config.max_position_embeddings,
        "share_embeddings_and_output_weights": bool(hf_config.tie_word_embeddings),
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_base": rope_parameters(hf_config)["rope_theta"],
    }
    return ModelSpec(
        transformer_config=transformer_config,
        gpt_kwargs=gpt_kwargs,
        family=family,
        hf_config=hf_config,
        vocab_size=vocab_size,
        padded_vocab_size=padded,
        tied=bool(hf_config.tie_word_embeddings),
        inverse_frequencies=inverse_frequencies,
        scalar_head=has_scalar_head(hf_config),
    )


def head_dim(hf_config: Any) -> int:
    """Return the size of one attention head."""
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def rope_parameters(hf_config: Any, layer_type: str | None = None) -> Mapping[str, Any]:
    """Return RoPE's parameters, of one kind of layer where kinds differ (None: of whole attention)."""
    found = hf_config.rope_parameters
    return found[layer_type or "full_attention"] if "full_attention" in found else found


def rotary_frequencies(hf_config: Any) -> Tensor:
    """Return RoPE's inverse frequencies [head_dim / 2] float32, scaled as the config says.

    Where local attention has its own they come first, [head_dim]. Raises UserError for scalings that depend
    on the sequence length or rescale cos and sin.
    """
    if "full_attention" in hf_config.rope_parameters:
        local, whole = (_frequencies(hf_config, kind) for kind in ("sliding_attention", "full_attention"))
        return both_frequencies(local, whole)
    return _frequencies(hf_config, None)


def _frequencies(hf_config: Any, layer_type: str | None) -> Tensor:
    parameters = rope_parameters(hf_config, layer_type)
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        size = head_dim(hf_config)
        exponents = torch.arange(0, size, 2, dtype=torch.float) / size
        return 1.0 / (parameters["rope_theta"] ** exponents)
    factor = math.nan
    if kind in ("linear", "llama3", "yarn"):
        layer = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, device.host(), **layer)
        if factor == 1.0:
            return frequencies
    raise UserError(
        f"RoPE scaling of type {kind!r} is not supported for this model.",
        where="config.json: rope_parameters",
        expected="rope_type default, linear or llama3",
        got=f"rope_type={kind}, attention factor {factor}",
    )


def _transformer_settings(
    hf_config: Any, family: Family, layout: ParallelLayout, dtype: torch.dtype
) -> dict[str, Any]:
    fused = importlib.util.find_spec("transformer_engine") is not None
    all_bias = family.all_bias(hf_config)
    settings: dict[str, Any] = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": head_dim(hf_config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": _activation(hf_config),
        "add_bias_linear": all_bias,
        "add_qkv_bias": all_bias or family.qkv_bias(hf_config),
        "qk_layernorm": family.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": hf_config.initializer_range,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "moe_grouped_gemm": fused and family.moe is not None,
    }
    settings.update(_window(hf_config))
    settings.update(_layout_settings(layout, dtype))
    settings.update(family.settings(hf_config))
    return settings


def _layout_settings(layout: ParallelLayout, dtype: torch.dtype) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_dtype": dtype,
    }
    if layout.virtual_pipeline > 1:
        settings["virtual_pipeline_model_parallel_size"] = layout.virtual_pipeline
        # Megatron's default communication gives silently wrong results for PP2 x VPP2.
        settings["overlap_p2p_comm"] = True
        settings["batch_p2p_comm"] = False
    return settings


def _activation(hf_config: Any) -> Any:
    name = getattr(hf_config, "hidden_act", None) or getattr(hf_config, "hidden_activation", None)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UserError(
            f"The activation {name!r} is not supported.",
            where="config.json: hidden_act",
            expected="one of " + ", ".join(ACTIVATIONS),
            got=str(name),
        )
    return ACTIVATIONS[name]


def _window(hf_config: Any) -> dict[str, Any]:
    """Return the sliding-window fields: a token sees ``sliding_window`` tokens, itself among them."""
    window = getattr(hf_config, "sliding_window", None)
    layer_types = getattr(hf_config, "layer_types", None)
    if window is None or (layer_types is not None and "sliding_attention" not in layer_types):
        return {}
    settings: dict[str, Any] = {"window_size": (window - 1, 0)}
    if layer_types is not None:
        settings["window_attn_skip_freq"] = [int(kind == "sliding_attention") for kind in layer_types]
    return settings


def _checked_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(MLATransformerConfig)}
    for name in overrides:
        if name in _OWN_FIELDS:
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


def _check_layout(hf_config: Any, layout: ParallelLayout, overrides: Mapping[str, Any]) -> None:
    def divides(what: str, value: int, name: str, parts: int, fix: str) -> None:
        if value % parts:
            raise UserError(
                f"{name} = {parts} does not divide the model's {what} ({value}).",
                where=f"layout.{name}",
                expected=f"a divisor of {value}",
                got=str(parts),
                fix=fix,
            )

    divides(
        "attention heads",
        hf_config.num_attention_heads,
        "tensor",
        layout.tensor,
        "lower layout.tensor",
    )
    groups = hf_config.num_key_value_heads
    if layout.tensor % groups or layout.tensor < groups:  # else ranks share a head
        divides("key-value heads", groups, "tensor", layout.tensor, "lower layout.tensor")
    divides(
        "MLP width",
        hf_config.intermediate_size,
        "tensor",
        layout.tensor,
        "lower layout.tensor",
    )
    _check_stages(hf_config, layout, overrides)
    experts = expert_count(hf_config)
    if layout.expert > 1 and not experts:
        raise UserError(
            "layout.expert is set for a model without experts.",
            where="layout.expert",
            expected="1",
            got=str(layout.expert),
        )
    if experts:
        divides("experts", experts, "expert", layout.expert, "lower layout.expert")


def _check_stages(hf_config: Any, layout: ParallelLayout, overrides: Mapping[str, Any]) -> None:
    """Check that the layers can be cut over the pipeline stages."""
    uneven = {
        "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    }  # fmt: skip
    ends = [overrides.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")]
    if sum(count or 0 for count in ends) > hf_config.num_hidden_layers:
        raise UserError(
            "The first and last pipeline stage would hold more layers than the model has.",
            where="megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage",
            expected=f"at most {hf_config.num_hidden_layers} together",
            got=" + ".join(str(count) for count in ends if count),
        )
    chunks = layout.pipeline * layout.virtual_pipeline
    if not uneven & set(overrides) and hf_config.num_hidden_layers % chunks:
        raise UserError(
            f"pipeline * virtual_pipeline = {chunks} does not divide the model's layers "
            f"({hf_config.num_hidden_layers}).",
            where="layout.pipeline * virtual_pipeline",
            expected=f"a divisor of {hf_config.num_hidden_layers}",
            got=str(chunks),
            fix="choose other sizes, or give megatron.num_layers_in_first_pipeline_stage "
            "and megatron.num_layers_in_last_pipeline_stage",
        )
