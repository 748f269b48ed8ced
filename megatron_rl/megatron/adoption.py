"""Adoption of a model and an optimizer that a user's own Megatron script has set up."""

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
from megatron_rl.megatron.provider import GROUPS, check_chunk, use_packed_attention
from megatron_rl.megatron.transformer_settings import role_settings
from megatron_rl.shapes.layout import ParallelLayout

SCRIPT = "the training script's model"
"""Subject of errors about the script's model."""


def adopt_model(wrapped_chunks: Sequence[Any], hf_config: Any) -> ParallelModel:
    """Return a `ParallelModel` of a training script's chunks, which are wrapped in Megatron's DDP.

    The layout is derived from Megatron's process-global groups, which must span the world. After the call the
    chunks accept packed rows and return hidden states, which the script's own loss cannot use. Raises
    UserError if the model differs from config.json, or has settings that RL cannot train with. Collective
    over the world.
    """
    chunks = [_unwrap_chunk(chunk) for chunk in wrapped_chunks]
    config: Any = chunks[0].config
    layout = ParallelLayout(tuple(range(dist.get_world_size())), **parallel_sizes(wrapped_chunks))
    groups = ParallelGroups(layout)
    _require_equal_groups(groups)

    for chunk in wrapped_chunks:
        _require_unscaled_gradients(chunk)
        # Disable the checks of Megatron's own training loop: `Optimizer.step` raises for a norm that is not
        # finite.
        chunk.ddp_config.check_for_nan_in_grad = False
        chunk.ddp_config.check_for_large_grads = False

    # The script's model must equal the spec that is derived here from the same config.json.
    fused = has_fused_layers(chunks[0])
    spec = model_spec(hf_config, layout, config.params_dtype, role_settings(layout), fused)
    for virtual_stage, chunk in enumerate(chunks):
        pre_process = groups.is_first_stage and virtual_stage == 0
        post_process = groups.is_last_stage and virtual_stage == layout.virtual_pipeline - 1
        check_chunk(chunk, SCRIPT, pre_process, post_process, spec)
        use_packed_attention(chunk, spec)
        # The seed has no effect: it initialises a scalar head, and a script's language model has none.
        finish_chunk(chunk, spec, seed=1)

    if layout.virtual_pipeline > 1:
        # Interleaved schedules release an activation before its send is complete, see `role_settings`.
        config.deallocate_pipeline_outputs = False

    # From here on the spec has the script's own config, since Megatron's layers and wrappers refer to it.
    spec = replace(spec, transformer_config=config)
    if wrapped_chunks[0].ddp_config.overlap_grad_reduce:
        # Megatron's schedules expect a list of functions for interleaved chunks, or a single function.
        no_sync_functions: list[Any] = [chunk.no_sync for chunk in wrapped_chunks]
        config.no_sync_func = no_sync_functions[0]
        if len(wrapped_chunks) > 1:
            config.no_sync_func = no_sync_functions
    return ParallelModel(chunks, list(wrapped_chunks), groups, spec, fused)


def require_megatron_setup(
    model: Any,
    optimizer: Any,
    scheduler: Any,
) -> None:
    """Raise UserErrors unless the arguments have the types that setup_model_and_optimizer returns."""
    errors: list[UserError] = []

    # Megatron-LM returns a list of chunks, even for a model with one chunk.
    chunks: Sequence[Any] = [model]
    if isinstance(model, Sequence):
        chunks = model
    are_wrapped = all(isinstance(chunk, DistributedDataParallel) for chunk in chunks)
    if not isinstance(model, Sequence) or not chunks or not are_wrapped:
        got = ", ".join(type(chunk).__name__ for chunk in chunks)
        if not isinstance(model, Sequence):
            got += " outside of a list"
        errors.append(_wrong_type_error("model", "a list of chunks, each in Megatron-Core's DDP", got))

    if not isinstance(optimizer, MegatronOptimizer):
        got = type(optimizer).__name__
        errors.append(
            _wrong_type_error("optimizer", "an optimizer that get_megatron_optimizer returned", got)
        )

    if not hasattr(scheduler, "step"):
        got = type(scheduler).__name__
        errors.append(_wrong_type_error("scheduler", "an OptimizerParamScheduler", got))

    if errors:
        raise UserErrors(errors)


def _wrong_type_error(
    name: str,
    expected: str,
    got: str,
) -> UserError:
    """Return the error for an object of the training script that is not of Megatron's type."""
    return UserError(
        f"the training script's {name} is not one of Megatron's",
        where=name,
        expected=expected,
        got=got,
        fix="pass EmbeddedTrainer the objects that setup_model_and_optimizer returns",
    )


def parallel_sizes(wrapped_chunks: Sequence[Any]) -> dict[str, Any]:
    """Return the parallel sizes of a training script's chunks, keyed by the fields of `ParallelLayout`."""
    config: Any = wrapped_chunks[0].config
    return {
        "tensor": config.tensor_model_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
        "virtual_pipeline": len(wrapped_chunks),
        "context": config.context_parallel_size,
        "expert": config.expert_model_parallel_size,
        "expert_tensor": config.expert_tensor_parallel_size,
        "sequence_parallel": config.sequence_parallel,
    }


def _unwrap_chunk(chunk: Any) -> Any:
    """Return the GPTModel inside Megatron's wrappers, and stop Float16Module from converting its outputs."""
    while not hasattr(chunk, "decoder"):
        inner: Any = chunk.module
        if isinstance(chunk, Float16Module):
            # Float16Module would convert the hidden states of the last stage to float32.
            chunk.forward = partial(inner)
        chunk = inner
    return chunk


def _require_equal_groups(groups: ParallelGroups) -> None:
    """Raise UserError if the ranks of a process-global group of Megatron differ from the role's group."""
    for name, attribute in GROUPS.items():
        global_group = getattr(parallel_state, name)
        role_group = getattr(groups, attribute)
        # "all" stands for Megatron's group of one optimizer instance, which the trainer does not use.
        if attribute == "all" or global_group is None or role_group is None:
            continue

        ranks = dist.get_process_group_ranks(global_group)
        expected = dist.get_process_group_ranks(role_group)
        if ranks != expected:
            raise UserError(
                f"the training script's {attribute} group has unexpected ranks",
                where=SCRIPT,
                expected=f"{expected}: ranks in Megatron's default order, over the complete world",
                got=str(ranks),
                fix="initialize Megatron with its default order, tp-cp-ep-dp-pp",
            )


def _require_unscaled_gradients(chunk: Any) -> None:
    """Raise UserError if Megatron's DDP scales gradients, since losses already have global denominators."""
    buffers = (*chunk.buffers, *chunk.expert_parallel_buffers)
    factors = {buffer.gradient_scaling_factor for buffer in buffers}
    if any(factor != 1.0 for factor in factors):
        raise UserError(
            "the training script's gradients are averages",
            where=SCRIPT,
            expected="sums over micro-batches and data-parallel ranks, since losses have global denominators",
            got=f"gradients multiplied by {', '.join(map(str, sorted(factors)))}",
            fix="start the script with --calculate-per-token-loss",
        )
