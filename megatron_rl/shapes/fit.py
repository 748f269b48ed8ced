"""What is wrong between a model's sizes and a layout: the rules that check and model building share."""

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
    """Return what is wrong between a model and the Megatron layout of a role.

    ``settings`` are Megatron's, of which those for uneven stages and fused rotary embeddings count.
    """
    path = layout.path
    errors = _head_problems(shape, layout, " and use pipeline or data parallelism for the other ranks")
    if not errors:
        errors = _width_problems(shape, layout)
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
        where = f"{path.rpartition('.')[0]}.megatron.apply_rope_fusion"
        errors.append(
            UserError(
                "the fused rotary embedding of latent attention finds positions by the boundaries of rows",
                where=where,
                expected="no value for a model with latent attention, whose tokens bring their own angles",
                got="true",
                fix=f"remove {where}",
            )
        )
    if shape.experts % layout.expert:
        fix = f"set {path}.expert to {math.gcd(shape.experts, layout.expert)}"
        errors.append(_divides(shape.experts, "experts", layout.expert, f"{path}.expert", fix))
    return errors


def learning_problems(shape: ModelShape, layout: ParallelLayout) -> list[UserError]:
    """Return what Megatron refuses only in a model that learns."""
    if not shape.experts or layout.tensor == 1 or layout.sequence_parallel:
        return []
    where = f"{layout.path}.sequence_parallel"
    return [
        UserError(
            "Megatron trains experts on tensor-parallel ranks with sequence parallelism alone",
            where=where,
            expected="true, or unset",
            got="false",
            fix=f"remove {where}",
        )
    ]


def engine_problems(shape: ModelShape, layout: ParallelLayout) -> list[UserError]:
    """Return what is wrong between a model and the layout of the rollout engine."""
    return _head_problems(shape, layout)


def _head_problems(shape: ModelShape, layout: ParallelLayout, more: str = "") -> list[UserError]:
    tensor, context, where = layout.tensor, layout.context, f"{layout.path}.tensor"
    fix = f"set {where} to {_best_tensor(shape, tensor)}{more}"
    if shape.heads % tensor:
        return [_divides(shape.heads, "attention heads", tensor, where, fix)]
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
    # Where there are fewer key-value heads than ranks, equally many ranks share each.
    if shape.kv_heads % tensor and tensor % shape.kv_heads:
        return [_divides(shape.kv_heads, "key-value heads", tensor, where, fix)]
    return []


def _width_problems(shape: ModelShape, layout: ParallelLayout) -> list[UserError]:
    widths = [("MLP width", shape.mlp_width if shape.moe_layers < shape.layers else 0, "tensor")]
    widths.append(("shared experts' width", shape.shared_width, "tensor"))
    widths.append(("experts' width", shape.expert_width if shape.experts else 0, "expert_tensor"))
    return [
        _divides(width, what, getattr(layout, name), f"{layout.path}.{name}", f"lower {layout.path}.{name}")
        for what, width, name in widths
        if width % getattr(layout, name)
    ]


def _divides(value: int, what: str, parts: int, where: str, fix: str) -> UserError:
    return UserError(
        f"{parts} does not divide the model's {value} {what}",
        where=where,
        expected=f"a divisor of {value}",
        got=str(parts),
        fix=fix,
    )


def _best_tensor(shape: ModelShape, tensor: int) -> int:
    both = math.gcd(math.gcd(shape.heads, shape.kv_heads), shape.mlp_width)
    return max(size for size in range(1, min(tensor, both) + 1) if both % size == 0)
