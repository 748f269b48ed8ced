"""Rules between layouts, the world size and the model."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.derive import longest_row, smallest_world
from megatron_rl.config.engines import engines_with
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.bounds import MAX_WORLD
from megatron_rl.errors import UserError
from megatron_rl.shapes.layout import ParallelLayout, problems
from megatron_rl.shapes.model import ModelShape


def check_world(config: RunConfig, launched: int | None) -> Iterator[UserError]:
    """Yield the error of a launch that differs from the stated world size."""
    if launched is None or config.world_size is None or launched == config.world_size:
        return
    yield UserError(
        "the number of processes is not the stated world size",
        where="world_size",
        expected=f"{config.world_size} processes, as world_size says",
        got=f"{launched} process{'es' if launched > 1 else ''}",
        fix=f"torchrun --nproc-per-node {config.world_size} -m megatron_rl train ..., set "
        f"world_size={launched}, or remove world_size",
    )


def check_layout(
    role: str, layout: ParallelLayout, world_size: int, config: RunConfig
) -> Iterator[UserError]:
    """Yield what is wrong between a role's layout, the world size and the run's settings."""
    fitting = smallest_world(config)
    yield from problems(layout, world_size, fitting if fitting <= MAX_WORLD else None)
    engine = config.rollout.engine
    capabilities = config.rollout.capabilities
    if role == "rollout" and not capabilities.tensor_parallel and layout.tensor > 1:
        why = f"the {engine} engine does not cut the model"
        if not capabilities.in_process:
            why = "ranks only ask the servers, each of which cuts the model as its own command says"
        yield UserError(
            why,
            where="rollout.tensor",
            expected=f"1 with rollout.engine={engine}",
            got=str(layout.tensor),
            fix=f"set rollout.tensor=1, or {engines_with(tensor_parallel=True)}",
        )


def check_lengths(config: RunConfig, shape: ModelShape) -> Iterator[UserError]:
    """Yield the error of rows longer than the model's positions or than the micro-batch budget."""
    longest, prompt = longest_row(config), config.data.max_prompt_tokens
    if config.job == TRAIN and longest > shape.max_positions:
        yield UserError(
            "prompt and response together are longer than the model's positions",
            where="rollout.max_response_tokens",
            expected=f"data.max_prompt_tokens + max_response_tokens <= {shape.max_positions} "
            "(max_position_embeddings of the model)",
            got=f"{prompt} + {longest - prompt} = {longest}",
            fix=f"lower them by {longest - shape.max_positions} tokens together",
        )


def check_budget(config: RunConfig) -> Iterator[UserError]:
    """Yield the error of a micro-batch budget below the longest row."""
    budget, longest = config.batch.tokens_per_microbatch, longest_row(config)
    if budget is None or budget >= longest or config.job != TRAIN:
        return
    yield UserError(
        "a micro-batch could not hold the longest row",
        where="batch.tokens_per_microbatch",
        expected=f"at least data.max_prompt_tokens + rollout.max_response_tokens = {longest}",
        got=str(budget),
        fix=f"raise it to {longest} or more, or remove it to have it derived",
    )
