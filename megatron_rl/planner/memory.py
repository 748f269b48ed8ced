"""Bytes on the fullest GPU, as `shapes.memory` counts them, beside what a cluster's constants add."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_rl.planner.constants import GB, PRECISION_BYTES, Constants
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.memory import (
    Layers,
    OptimizerChoice,
    TrainingMemory,
    dealt_out,
    rollout_parameters,
    scoring_memory,
    telling_stages,
    training_memory,
)
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pipeline_stages import stage_ends

if TYPE_CHECKING:
    from megatron_rl.planner.generate import RolloutLayout


def fullest_training(
    model: ModelShape,
    layout: ParallelLayout,
    optimizer: OptimizerChoice,
    constants: Constants,
    tokens: float,
    micro_batches: int,
    recompute: str,
    logits_bytes_per_element: float | None = None,
) -> TrainingMemory:
    """Return bytes on the fullest GPU while it trains micro-batches of ``tokens`` tokens.

    ``logits_bytes_per_element`` is of a framework that has the logits of a whole micro-batch at once; None
    takes them chunk by chunk.
    """
    stages = dealt_out(model.layers, layout.pipeline, layout.virtual_pipeline)
    balanced = stage_ends(model.layers, layout.pipeline, layout.virtual_pipeline) is None
    built, held = Layers(recompute=recompute), []
    for stage in range(len(stages)) if balanced else telling_stages(len(stages)):
        memory = training_memory(model, layout, stages, stage, optimizer, built, tokens, micro_batches)
        if logits_bytes_per_element is not None and memory.logits:
            shard = tokens / layout.context * model.vocab / layout.tensor
            memory = replace(memory, logits=shard * logits_bytes_per_element)
        held.append(memory)
    if balanced:
        # Such layers need a pipeline layout of one's own, which evens out what stages hold between steps.
        held = [replace(memory, **_mean_states(held)) for memory in held]
    return _with_context(held, constants)


def _mean_states(held: list[TrainingMemory]) -> dict[str, float]:
    names = ("weights", "gradients", "optimizer")
    return {name: sum(getattr(memory, name) for memory in held) / len(held) for name in names}


def fullest_scoring(
    model: ModelShape, layout: ParallelLayout, constants: Constants, tokens: float
) -> TrainingMemory:
    """Return bytes on the fullest GPU of a model that only scores."""
    stages = dealt_out(model.layers, layout.pipeline, layout.virtual_pipeline)
    telling = telling_stages(len(stages))
    held = [scoring_memory(model, layout, stages, stage, Layers(), tokens) for stage in telling]
    return _with_context(held, constants)


def _with_context(held: list[TrainingMemory], constants: Constants) -> TrainingMemory:
    """Return the largest, with what the driver takes."""
    fullest = max(held, key=lambda memory: memory.total)
    return replace(fullest, overhead=constants.memory.context_gigabytes * GB)


def rollout_weight_bytes(model: ModelShape, rollout: RolloutLayout, precision: str) -> float:
    """Return weight bytes on one rollout GPU."""
    size = PRECISION_BYTES.get(precision, 2)
    return size * rollout_parameters(model, rollout.tensor, rollout.expert, rollout.pipeline)


def prefill_workspace_bytes(model: ModelShape, rollout: RolloutLayout, tokens: float) -> float:
    """Return live activation bytes of a prefill over ``tokens`` tokens: 6h + 6f/t each."""
    inner = (
        model.experts_per_token * model.expert_width + model.shared_width
        if model.experts
        else model.mlp_width
    )
    return tokens * (6.0 * model.hidden + 6.0 * inner / rollout.tensor)


def kv_capacity_bytes(
    model: ModelShape,
    rollout: RolloutLayout,
    gpu_memory: float,
    precision: str,
    constants: Constants,
) -> float:
    """Return bytes that remain for the cache on one rollout GPU (may be negative: it does not fit)."""
    share = min(rollout.memory_fraction, constants.memory.usable_share) * gpu_memory
    engine = 0.25 * constants.memory.engine_gigabytes * GB + prefill_workspace_bytes(model, rollout, 8192)
    return share - rollout_weight_bytes(model, rollout, precision) - engine
