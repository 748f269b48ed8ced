"""Rules of a model's sizes in a parallel layout; `check` and model building share them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pipeline_stages import stage_layers


def trainer_problems(
    shape: ModelShape, layout: ParallelLayout, settings: Mapping[str, Any] | None = None
) -> list[UserError]:
    """Return the errors of a model in the Megatron layout of a role.

    ``settings`` are Megatron's; those for uneven stages and for fused rotary embeddings are read.
    """
    path = layout.path

    # Tensor parallelism shards heads and widths. Widths are reported only if the heads fit, since the fix
    # for the heads changes the tensor-parallel size.
    errors = _head_problems(shape, layout, " and use pipeline or data parallelism for the other ranks")
    if not errors:
        errors = _width_problems(shape, layout)

    # Pipeline parallelism distributes whole layers.
    try:
        stage_layers(shape.layers, layout, settings)
    except UserError as error:
        errors.append(error)

    if layout.expert > 1 and not shape.experts:
        errors.append(
            UserError(
                "expert parallelism is set for a model without experts",
                where=f"{path}.expert",
                expected=f"1: {shape.name} is dense",
                got=str(layout.expert),
                fix=f"remove {path}.expert",
            )
        )

    if shape.mla and (settings or {}).get("apply_rope_fusion"):
        key = f"{path.rpartition('.')[0]}.megatron.apply_rope_fusion"
        errors.append(
            UserError(
                "the fused rotary embedding of latent attention finds positions by the boundaries of rows",
                where=key,
                expected="no value for a model with latent attention, whose tokens bring their own angles",
                got="true",
                fix=f"remove {key}",
            )
        )

    if shape.experts % layout.expert:
        fix = f"set {path}.expert to {math.gcd(shape.experts, layout.expert)}"
        errors.append(_indivisible(shape.experts, "experts", layout.expert, f"{path}.expert", fix))
    return errors


def plain_experts_error(name: str) -> UserError:
    """Return the error of a mixture of experts in Megatron's plain layers on an accelerator."""
    return UserError(
        "without Transformer Engine's layers each expert is a product of its own, one after the other",
        where="model.attention",
        expected="Transformer Engine, whose grouped products compute all experts at once",
        got=f"Megatron's plain layers for {name}",
        fix="install it as launch/setup.sh --gpu does, and remove model.attention=torch",
    )


def learning_problems(shape: ModelShape, layout: ParallelLayout) -> list[UserError]:
    """Return the errors that Megatron raises only for a model that is trained."""
    if not shape.experts or layout.tensor == 1 or layout.sequence_parallel:
        return []

    key = f"{layout.path}.sequence_parallel"
    return [
        UserError(
            "Megatron trains experts on tensor-parallel ranks with sequence parallelism alone",
            where=key,
            expected="true, or unset",
            got="false",
            fix=f"remove {key}",
        )
    ]


def engine_problems(shape: ModelShape, layout: ParallelLayout) -> list[UserError]:
    """Return the errors of a model in the layout of the rollout engine."""
    return _head_problems(shape, layout)


def _head_problems(shape: ModelShape, layout: ParallelLayout, advice: str = "") -> list[UserError]:
    """Return the error of attention heads that tensor and context parallelism cannot divide.

    ``advice`` is appended to the fix of a tensor-parallel size.
    """
    tensor = layout.tensor
    context = layout.context
    tensor_key = f"{layout.path}.tensor"
    tensor_fix = f"set {tensor_key} to {_best_tensor(shape, tensor)}{advice}"

    if shape.heads % tensor:
        return [_indivisible(shape.heads, "attention heads", tensor, tensor_key, tensor_fix)]

    if shape.heads % (tensor * context):
        return [
            UserError(
                f"tensor {tensor} x context {context} = {tensor * context} does not divide the model's "
                f"{shape.heads} attention heads",
                where=f"{layout.path}.context",
                expected=f"a divisor of {shape.heads // tensor}, the heads of a tensor-parallel rank",
                got=str(context),
                fix=f"set {layout.path}.context to {math.gcd(context, shape.heads // tensor)}",
            )
        ]

    # With fewer key-value heads than ranks, equally many ranks must share each head.
    if shape.kv_heads % tensor and tensor % shape.kv_heads:
        return [_indivisible(shape.kv_heads, "key-value heads", tensor, tensor_key, tensor_fix)]
    return []


def _width_problems(shape: ModelShape, layout: ParallelLayout) -> list[UserError]:
    """Return an error for each MLP width that its tensor-parallel size does not divide."""
    # A width of 0 is divisible by every size.
    dense_width = 0
    if shape.moe_layers < shape.layers:
        dense_width = shape.mlp_width
    expert_width = 0
    if shape.experts:
        expert_width = shape.expert_width
    widths = [
        ("MLP width", dense_width, "tensor"),
        ("shared experts' width", shape.shared_width, "tensor"),
        ("experts' width", expert_width, "expert_tensor"),
    ]
    return [
        _indivisible(
            width, noun, getattr(layout, size), f"{layout.path}.{size}", f"lower {layout.path}.{size}"
        )
        for noun, width, size in widths
        if width % getattr(layout, size)
    ]


def _indivisible(value: int, noun: str, size: int, key: str, fix: str) -> UserError:
    """Return the error of a ``size`` at ``key`` that does not divide a model's ``value``, named ``noun``."""
    return UserError(
        f"{size} does not divide the model's {value} {noun}",
        where=key,
        expected=f"a divisor of {value}",
        got=str(size),
        fix=fix,
    )


def _best_tensor(shape: ModelShape, tensor: int) -> int:
    """Return the largest tensor-parallel size up to ``tensor`` that divides heads and the MLP width."""
    common = math.gcd(math.gcd(shape.heads, shape.kv_heads), shape.mlp_width)
    return max(size for size in range(1, min(tensor, common) + 1) if common % size == 0)
