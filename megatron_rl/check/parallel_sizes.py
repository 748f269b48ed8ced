"""Rules between layouts, the world size and the model."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_rl.config.derive import longest_row, smallest_world
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.bounds import MAX_WORLD
from megatron_rl.errors import UserError
from megatron_rl.shapes.layout import ParallelLayout, problems
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.stages import stage_layers


def check_world(config: RunConfig, launched: int | None) -> list[UserError]:
    """Return the error of a launch that differs from the stated world size."""
    if launched is None or config.world_size is None or launched == config.world_size:
        return []
    return [
        UserError(
            "the number of processes is not the stated world size",
            where="world_size",
            expected=f"{config.world_size} processes, as world_size says",
            got=f"{launched} process{'es' if launched > 1 else ''}",
            fix=f"torchrun --nproc-per-node {config.world_size} -m megatron_rl train ..., set "
            f"world_size={launched}, or remove world_size",
        )
    ]


def check_layout(role: str, layout: ParallelLayout, world_size: int, config: RunConfig) -> list[UserError]:
    """Return what is wrong between a role's layout, the world size and the run's settings."""
    fitting = smallest_world(config)
    errors = problems(layout, world_size, fitting if fitting <= MAX_WORLD else None)
    if layout.context > 1 and config.model.attention == "transformer_engine":
        errors.append(
            UserError(
                "Transformer Engine's attention is used with whole rows, which context parallelism cuts",
                where=f"{layout.path}.context",
                expected="1, or model.attention: torch",
                got=str(layout.context),
                fix="remove model.attention, or set it to torch",
            )
        )
    if role == "rollout" and config.rollout.engine == "torch" and layout.tensor > 1:
        errors.append(
            UserError(
                "the torch engine does not cut the model",
                where="rollout.tensor",
                expected="1 with rollout.engine=torch",
                got=str(layout.tensor),
                fix="set rollout.tensor=1, or rollout.engine=vllm",
            )
        )
    return errors


def check_model(
    role: str, layout: ParallelLayout, shape: ModelShape, overrides: Mapping[str, object] | None = None
) -> list[UserError]:
    """Return what is wrong between a role's layout and the model's sizes."""
    where, errors = layout.path, []
    tensor = layout.tensor
    fix = f"set {where}.tensor to {_best_tensor(shape, tensor)}"
    if role != "rollout":
        fix += " and use pipeline or data parallelism for the other ranks"
    if shape.heads % tensor:
        errors.append(_divides(shape.heads, "attention heads", tensor, f"{where}.tensor", fix))
    if shape.heads % (tensor * layout.context) and not errors:
        together = f"tensor {tensor} x context {layout.context} = {tensor * layout.context}"
        errors.append(
            UserError(
                f"{together} does not divide the model's {shape.heads} attention heads",
                where=f"{where}.context",
                expected=f"a divisor of {shape.heads // tensor}, the heads of a tensor-parallel rank",
                got=str(layout.context),
                fix=f"set {where}.context to {math.gcd(layout.context, shape.heads // tensor)}",
            )
        )
    # Where there are fewer key-value heads than ranks, equally many ranks share each.
    if shape.kv_heads % tensor and tensor % shape.kv_heads and not errors:
        errors.append(_divides(shape.kv_heads, "key-value heads", tensor, f"{where}.tensor", fix))
    if role == "rollout":
        return errors
    width = shape.expert_width if shape.experts else shape.mlp_width
    cut = layout.expert_tensor if shape.experts else tensor
    if width % cut and not errors:
        name = "expert_tensor" if shape.experts else "tensor"
        errors.append(_divides(width, "MLP width", cut, f"{where}.{name}", f"lower {where}.{name}"))
    try:
        stage_layers(shape.layers, layout, overrides)
    except UserError as error:
        errors.append(error)
    errors.extend(_check_experts(layout, shape, where))
    return errors


def _check_experts(layout: ParallelLayout, shape: ModelShape, where: str) -> list[UserError]:
    if layout.expert > 1 and not shape.experts:
        return [
            UserError(
                "expert parallelism is set for a model without experts",
                where=f"{where}.expert",
                expected=f"1: {shape.name} is dense",
                got=str(layout.expert),
                fix=f"remove {where}.expert",
            )
        ]
    if shape.experts and shape.experts % layout.expert:
        fix = f"set {where}.expert to {math.gcd(shape.experts, layout.expert)}"
        return [_divides(shape.experts, "experts", layout.expert, f"{where}.expert", fix)]
    return []


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


def check_lengths(config: RunConfig, shape: ModelShape) -> list[UserError]:
    """Return the error of rows longer than the model's positions or than the micro-batch budget."""
    longest, prompt, errors = longest_row(config), config.data.max_prompt_tokens, []
    if longest > shape.max_positions:
        errors.append(
            UserError(
                "prompt and response together are longer than the model's positions",
                where="rollout.max_response_tokens",
                expected=f"data.max_prompt_tokens + max_response_tokens <= {shape.max_positions} "
                "(max_position_embeddings of the model)",
                got=f"{prompt} + {longest - prompt} = {longest}",
                fix=f"lower them by {longest - shape.max_positions} tokens together",
            )
        )
    return errors


def check_budget(config: RunConfig) -> list[UserError]:
    """Return the error of a micro-batch budget below the longest row."""
    budget, longest = config.batch.tokens_per_microbatch, longest_row(config)
    if budget is None or budget >= longest:
        return []
    return [
        UserError(
            "a micro-batch could not hold the longest row",
            where="batch.tokens_per_microbatch",
            expected=f"at least data.max_prompt_tokens + rollout.max_response_tokens = {longest}",
            got=str(budget),
            fix=f"raise it to {longest} or more, or remove it to have it derived",
        )
    ]
