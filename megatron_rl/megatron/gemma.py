"""Gemma's additions to Megatron's layers: post-norms, scaled embeddings, local rotary angles, score caps."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.megatron.layers import RmsNorm


def prepare_sandwich_layers(
    chunk: Any,
    local: tuple[int, ...] | None,
    cap: float | None,
) -> None:
    """Add Gemma's features to a GPTModel chunk of Megatron's plain layers.

    A norm follows each output projection, as its ``post_layernorm``; embeddings are multiplied by the root of
    their size; attention scores are bounded by ``cap``. ``local`` are the layers, counted over the model,
    with the first kind of rotary angles of `both_frequencies`; None if there is one kind. Sources: Gemma
    Team, arXiv 2408.00118 and 2503.19786.
    """
    config = chunk.config
    if chunk.pre_process:
        chunk.embedding.register_forward_hook(partial(_scale, config.hidden_size**0.5))
    for layer in chunk.decoder.layers:
        for projection in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
            projection.post_layernorm = RmsNorm(config, config.hidden_size, config.layernorm_epsilon)
            projection.register_forward_hook(_norm_output)
        layer.self_attention.core_attention.cap = cap
        if local is not None:
            kind = 0 if layer.layer_number - 1 in local else 1
            hook = partial(_select_angles, kind)
            layer.self_attention.register_forward_pre_hook(hook, with_kwargs=True)


def both_frequencies(local: Tensor, full: Tensor) -> Tensor:
    """Concatenate the inverse frequencies of local and of full attention."""
    return torch.cat((local, full))


def _scale(
    factor: float,
    module: Any,
    inputs: Any,
    output: Tensor,
) -> Tensor:
    # The factor is rounded to the weights' precision, as the models were trained.
    return output * torch.tensor(factor, dtype=output.dtype, device=output.device)


def _norm_output(
    module: Any,
    inputs: Any,
    output: tuple[Tensor, Any],
) -> tuple[Tensor, Any]:
    return module.post_layernorm(output[0]), output[1]


def _select_angles(
    kind: int,
    module: Any,
    args: Any,
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Replace the rotary angles of both kinds of attention by the angles of one ``kind``, 0 or 1."""
    # The angles come twice, [local, full, local, full], since rotation pairs both halves of a head.
    angles = kwargs["rotary_pos_emb"]
    if isinstance(angles, tuple):
        angles = angles[0]
    quarter = angles.shape[-1] // 4
    selected = angles[..., kind * quarter : (kind + 1) * quarter]
    return args, {**kwargs, "rotary_pos_emb": torch.cat((selected, selected), dim=-1)}
