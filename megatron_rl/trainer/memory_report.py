"""Error report of a rank that ran out of device memory: phase, largest tensors, estimate and fix."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_rl.config.budget import memory_plan
from megatron_rl.config.derive import batch_plan
from megatron_rl.config.placement import role_layouts
from megatron_rl.config.roles import explicit_model_paths, role_of
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.distributed import device
from megatron_rl.errors import UserError, first_line
from megatron_rl.megatron.passes import OutOfMemory, Shortage, describe_largest_tensors
from megatron_rl.shapes.pretrained import read_pretrained

_GIB = 2**30
_LISTED_ITEMS = 4
"""Maximum number of items of the estimate in a report, the largest first."""


def out_of_memory_error(
    config: RunConfig, error: BaseException, rank_text: str, phase: str, step: int
) -> UserError | None:
    """Return the report of a rank that ran out of device memory, or None for any other exception.

    ``rank_text``: description of this rank. ``phase``, ``step``: phase and step in which the error occurred.
    """
    if isinstance(error, OutOfMemory):
        shortage = error.shortage
    elif isinstance(error, torch.OutOfMemoryError):
        # Not in a forward or backward pass, but in generation, a weight sync or an optimizer step.
        shortage = Shortage(
            role="",
            rank=device.rank(),
            tokens=0,
            message=first_line(error),
            tensors=describe_largest_tensors(None),
        )
    else:
        return None

    subject = rank_text
    if shortage.role:
        subject = f"{shortage.role} on rank {shortage.rank}"
    details = shortage.message
    if shortage.tokens:
        details += f"; micro-batches of up to {shortage.tokens:,} tokens"
    if shortage.reason:
        details += f"; the pass was not repeated: {shortage.reason}"
    tensors = "; ".join(shortage.tensors) or "none that Python reaches"
    details += f"; largest tensors, without those saved for the backward pass: {tensors}"
    return UserError(
        f"{subject} ran out of memory in the phase {phase} of step {step}",
        where=shortage.role or "the device",
        expected=_format_estimate(config, shortage.rank, phase),
        got=details,
        fix=_advise_less_memory(config, bool(shortage.role), phase),
    )


def _format_estimate(config: RunConfig, rank: int, phase: str) -> str:
    """Format the memory that `check` estimates for a rank in a phase, with the estimate's largest items."""
    # The estimate has only phases of an RL step. Training before RL, such as SFT, uses as much memory as the
    # phase "learn".
    estimated_phase = phase if phase in ("generate", "score") else "learn"
    try:
        layouts = role_layouts(config, device.world_size())
        shape_by_role = {"actor": read_pretrained(Path(config.model.path) / "config.json").shape}
        for key, model_path in explicit_model_paths(config).items():
            if model_path is not None:
                shape_by_role[role_of(key)] = read_pretrained(Path(model_path) / "config.json").shape
        batch = None
        if config.job == TRAIN:
            batch = batch_plan(config, layouts)
        (plan,) = memory_plan(config, layouts, shape_by_role, batch, [rank])
    except Exception as error:
        # Report the out-of-memory error even if the estimate fails.
        return f"a peak below the device's memory; `check` could not estimate it: {first_line(error)}"

    items = [item for item in plan.items if estimated_phase in item.phases]
    items.sort(key=lambda item: -item.bytes)
    item_texts = [f"{item.name} {item.bytes / _GIB:.2f}" for item in items[:_LISTED_ITEMS]]
    peak_gib = plan.phase_peak(estimated_phase) / _GIB
    return f"{peak_gib:.2f} GiB in the phase {estimated_phase}, as `check` estimates: {', '.join(item_texts)}"


def _advise_less_memory(config: RunConfig, in_forward_backward: bool, phase: str) -> str:
    """Return advice that names the settings with which the phase needs less memory.

    ``in_forward_backward``: whether memory ran out inside a forward or backward pass. If False, it ran out
    elsewhere in ``phase``.
    """
    if phase == "generate":
        return "lower rollout.memory_fraction, or rollout.max_in_flight"
    if not in_forward_backward:
        return "set actor.offload=true or actor.optimizer.offload=true, or use more GPUs"
    advice = "lower batch.tokens_per_microbatch"
    if config.batch.memory_target is not None:
        advice = "lower batch.memory_target"
    elif config.batch.tokens_per_microbatch is not None:
        advice += f" (now {config.batch.tokens_per_microbatch})"
    if config.actor.recompute != "full":
        advice += ", set actor.recompute=full"
    return f"{advice}, or raise tensor or pipeline"
