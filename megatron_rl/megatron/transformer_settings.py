"""Fields of Megatron's TransformerConfig for a pretrained model, a layout and a role.

This module must not import Megatron at the top level: `megatron.trial`, which must start quickly, imports
this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.distributed import device
from megatron_rl.shapes.family import ACTIVATIONS
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import PretrainedModel

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = dict(
    zip(
        ACTIVATIONS,
        (functional.silu, functional.gelu, partial(functional.gelu, approximate="tanh")),
        strict=True,
    )
)
"""Activation functions by their names in config.json."""


def transformer_settings(
    model: PretrainedModel,
    layout: ParallelLayout,
    dtype: torch.dtype,
    fused: bool = False,
) -> dict[str, Any]:
    """Return the TransformerConfig fields of a pretrained model on a layout.

    ``fused``: whether the layers are Transformer Engine's.
    """
    shape = model.shape
    config = model.config

    # Gemma's configs call the activation hidden_activation.
    activation = config.get("hidden_act") or config.get("hidden_activation") or "silu"

    settings: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.mlp_width,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.v_head_dim or shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["rms_norm_eps"],
        "gated_linear_unit": shape.gated,
        "activation_func": _ACTIVATIONS[activation],
        "add_bias_linear": shape.mlp_bias or shape.expert_bias,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": config["initializer_range"],
        "params_dtype": dtype,
        # Megatron raises unless Transformer Engine's environment variable agrees with this field.
        "deterministic_mode": device.is_deterministic(),
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "moe_grouped_gemm": fused and shape.experts > 0,
    }

    # Settings of blocks and layout replace the general settings above. Settings of the family come last, and
    # replace any of them.
    settings.update(_window_settings(shape))
    for block in (*shape.mixers, *shape.feed_forwards):
        settings.update(block.settings(shape))
    settings.update(_layout_settings(layout, dtype))
    settings.update(model.family.megatron(model.config))
    if settings["activation_func"] == "quick_gelu":
        settings["activation_func"] = _quick_gelu
    return settings


def _quick_gelu(hidden: Tensor) -> Tensor:
    """Compute the sigmoid approximation of GELU (Hendrycks & Gimpel 2016, arXiv 1606.08415, section 2).

    Megatron's function computes the same, but it is compiled: torch recompiles it for each number of tokens,
    which takes a minute on CPU, and the compiled code rounds differently.
    """
    return hidden * torch.sigmoid(1.702 * hidden)


def _window_settings(shape: ModelShape) -> dict[str, Any]:
    """Return the TransformerConfig fields of sliding-window attention, or {} for a model without it."""
    if not shape.sliding_layers:
        return {}

    # ``sliding_window`` counts the token itself; Megatron counts only the tokens before it.
    settings: dict[str, Any] = {"window_size": (shape.sliding_window - 1, 0)}
    if len(shape.sliding_layers) < shape.layers:
        settings["window_attn_skip_freq"] = [
            int(layer in shape.sliding_layers) for layer in range(shape.layers)
        ]
    return settings


def _layout_settings(layout: ParallelLayout, dtype: torch.dtype) -> dict[str, Any]:
    """Return the TransformerConfig fields of a role's parallel layout."""
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
        # With Megatron's default communication, results for PP2 x VPP2 are silently wrong.
        settings["overlap_p2p_comm"] = True
        settings["batch_p2p_comm"] = False
    return settings


def role_settings(
    layout: ParallelLayout,
    recompute: str = "none",
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the TransformerConfig fields of a role: recompute, the user's overrides and the schedule.

    ``recompute`` is ``none``, ``selective`` or ``full``.
    """
    settings: dict[str, Any] = {}
    if recompute == "full":
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if recompute == "selective":
        settings["recompute_granularity"] = "selective"

    settings |= overrides or {}
    backend = settings.get("attention_backend")
    if isinstance(backend, str):
        # Megatron compares the value with members of its enum, which never equal a string.
        from megatron.core.transformer.enums import AttnBackend

        settings["attention_backend"] = AttnBackend[backend]

    if layout.pipeline > 1:
        # Packed micro-batches differ in length.
        settings["variable_seq_lengths"] = True
        # A stage releases an activation after sending it. Interleaved schedules would release it before the
        # send is complete, and the send would read memory that other tensors overwrite.
        settings["deallocate_pipeline_outputs"] = layout.virtual_pipeline == 1
        # With variable lengths Megatron checks the dispatcher of dense models too.
        settings.setdefault("moe_token_dispatcher_type", "alltoall")

    # Gradients are sums: the loss weights already have global denominators.
    settings["calculate_per_token_loss"] = True
    return settings


def optimizer_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return the fields of Megatron's OptimizerConfig: the selected optimizer and the user's overrides."""
    settings: dict[str, Any] = {
        "optimizer": config.name,
        "use_distributed_optimizer": config.distributed,
        "optimizer_cpu_offload": config.offload,
    }

    # In the configuration, dtypes are written by their names in torch.
    for name, value in config.megatron.items():
        if name.endswith("_dtype") and isinstance(value, str):
            value = getattr(torch, value)
        settings[name] = value
    return settings
