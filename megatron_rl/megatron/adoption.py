"""Models that a user's own Megatron script has set up: its chunks and its optimizer, taken as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.module import Float16Module

from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.megatron.model import ParallelModel, finish_chunk, has_fused_layers
from megatron_rl.megatron.model_spec import model_spec
from megatron_rl.megatron.provider import GROUPS, check_chunk, fit_packed_rows
from megatron_rl.megatron.transformer_settings import role_settings
from megatron_rl.shapes.layout import ParallelLayout

SCRIPT = "the training script's model"


def adopt_model(wrapped: Sequence[Any], hf_config: Any) -> ParallelModel:
    """Return the model whose chunks, in Megatron's DDP, a training script holds.

    The layout is that of Megatron's process-global groups, which must span the world. From now on the chunks
    take packed rows and return hidden states: the script's own loss is not for them any more. Raises
    UserError for what config.json does not describe, and for settings that RL cannot train with.
    Collective over the world.
    """
    chunks = [_bare(chunk) for chunk in wrapped]
    config: Any = chunks[0].config
    layout = ParallelLayout(tuple(range(dist.get_world_size())), **layout_of(wrapped))
    groups = ParallelGroups(layout)
    _check_groups(groups)
    for chunk in wrapped:
        _check_gradients(chunk)
        # Megatron's own check is for its own loop; `Optimizer.step` refuses a norm that is not finite.
        chunk.ddp_config.check_for_nan_in_grad = chunk.ddp_config.check_for_large_grads = False
    fused = has_fused_layers(chunks[0])
    spec = model_spec(hf_config, layout, config.params_dtype, role_settings(layout), fused)
    for stage, chunk in enumerate(chunks):
        first, last = stage == 0, stage == layout.virtual_pipeline - 1
        check_chunk(chunk, SCRIPT, groups.is_first_stage and first, groups.is_last_stage and last, spec)
        fit_packed_rows(chunk, spec)
        finish_chunk(chunk, spec, seed=1)
    if layout.virtual_pipeline > 1:
        config.deallocate_pipeline_outputs = False  # see role_settings
    spec = replace(spec, transformer_config=config)
    if wrapped[0].ddp_config.overlap_grad_reduce:
        waits = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = waits if len(waits) > 1 else waits[0]
    return ParallelModel(chunks, list(wrapped), groups, spec, fused)


def require_set_up(model: Any, optimizer: Any, scheduler: Any) -> None:
    """Raise UserErrors unless these are what Megatron-LM's setup_model_and_optimizer returns."""
    chunks = model if isinstance(model, Sequence) else [model]
    wrapped = isinstance(model, Sequence) and all(
        isinstance(chunk, DistributedDataParallel) for chunk in chunks
    )
    wanted = {
        "model": (wrapped and len(chunks) > 0, "a list of chunks, each in Megatron-Core's DDP", chunks),
        "optimizer": (
            isinstance(optimizer, MegatronOptimizer),
            "what get_megatron_optimizer made",
            [optimizer],
        ),
        "scheduler": (hasattr(scheduler, "step"), "an OptimizerParamScheduler", [scheduler]),
    }
    errors = [
        UserError(
            f"the training script's {name} is not one of Megatron's",
            where=name,
            expected=expected,
            got=", ".join(type(value).__name__ for value in values)
            + (" outside of a list" if values is chunks and chunks is not model else ""),
            fix="give EmbeddedTrainer what setup_model_and_optimizer returns",
        )
        for name, (fits, expected, values) in wanted.items()
        if not fits
    ]
    if errors:
        raise UserErrors(errors)


def layout_of(wrapped: Sequence[Any]) -> dict[str, Any]:
    """Return the layout of a training script's chunks, by the names of a configuration."""
    config: Any = wrapped[0].config
    return {
        "tensor": config.tensor_model_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
        "virtual_pipeline": len(wrapped),
        "context": config.context_parallel_size,
        "expert": config.expert_model_parallel_size,
        "expert_tensor": config.expert_tensor_parallel_size,
        "sequence_parallel": config.sequence_parallel,
    }


def _bare(chunk: Any) -> Any:
    """Return the GPTModel inside Megatron's wrappers; what it says is not converted on the way out."""
    while not hasattr(chunk, "decoder"):
        inner: Any = chunk.module
        if isinstance(chunk, Float16Module):
            chunk.forward = partial(inner)
        chunk = inner
    return chunk


def _check_groups(groups: ParallelGroups) -> None:
    for name, attribute in GROUPS.items():
        global_group, role_group = getattr(parallel_state, name), getattr(groups, attribute)
        if attribute == "all" or global_group is None or role_group is None:
            continue
        ranks, expected = dist.get_process_group_ranks(global_group), dist.get_process_group_ranks(role_group)
        if ranks != expected:
            raise UserError(
                f"the training script's {attribute} group has other ranks",
                where=SCRIPT,
                expected=f"{expected}: ranks in Megatron's default order, in all of the world",
                got=str(ranks),
                fix="initialize Megatron with its default order, tp-cp-ep-dp-pp",
            )


def _check_gradients(chunk: Any) -> None:
    factors = {buffer.gradient_scaling_factor for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)}
    if factors - {1.0}:
        raise UserError(
            "the training script's gradients are averages",
            where=SCRIPT,
            expected="sums over micro-batches and data-parallel ranks, since losses have global denominators",
            got=f"gradients that are multiplied by {', '.join(map(str, sorted(factors)))}",
            fix="start the script with --calculate-per-token-loss",
        )
