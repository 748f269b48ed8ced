"""Lower bound of the bytes that one movement of weights into the rollout engine must send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.config.schema import RunConfig
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.memory import DTYPE_BYTES, rollout_parameters
from megatron_rl.shapes.model import ModelShape


@dataclass(frozen=True)
class SyncPlan:
    """Hold bytes per sync: what a rank needs, what the busiest and all ranks receive, and what is assumed."""

    model_bytes: int
    needed_per_rank: int
    received_most: int
    received_total: int
    gathered_per_rank: int
    assumptions: tuple[str, ...]


def sync_plan(config: RunConfig, layouts: Mapping[str, ParallelLayout], shape: ModelShape) -> SyncPlan:
    """Return the lower bound: each rollout rank receives what it needs and does not hold as an actor rank."""
    actor, rollout = layouts["actor"], layouts["rollout"]
    size = DTYPE_BYTES[config.model.dtype]
    received = []
    for index, rank in enumerate(rollout.ranks):
        part = index % rollout.tensor
        needed, held = 0.0, 0.0
        for elements, parts, kind in _tensors(shape, rollout.tensor):
            # An engine with more ranks than key-value heads gives one head to several ranks.
            start = (part * parts // rollout.tensor) / parts
            needed += elements / parts
            if rank in actor.ranks:
                held += elements * _held(actor, rank, start, 1 / parts, kind)
        received.append(max(0.0, needed - held))
    model = shape.parameters * size
    # What gathering whole tensors on every rank, tensor by tensor, would receive instead.
    gathered = int(model * (1 - 1 / (actor.tensor * actor.pipeline)))
    return SyncPlan(
        model_bytes=model,
        needed_per_rank=rollout_parameters(shape, rollout.tensor) * size,
        received_most=int(max(received)) * size,
        received_total=int(sum(received)) * size,
        gathered_per_rank=gathered,
        assumptions=(
            "replicas are consecutive ranks in the order of rollout.ranks",
            "layers are cut evenly over pipeline stages; vocabulary padding is not counted",
            "each rank receives only what it lacks; pieces it holds as an actor rank are local copies",
        ),
    )


def _tensors(shape: ModelShape, tensor: int) -> list[tuple[int, int, str]]:
    """Return (elements, ways the engine cuts them, kind) for each class of weights."""
    kv, whole = shape.key_value_parameters, shape.replicated_parameters
    result = [
        (shape.layer_dense_total - whole - kv, tensor, "layers"),
        (kv, min(tensor, shape.kv_heads), "layers"),
        (shape.routed_expert_parameters, tensor, "experts"),
        (shape.replicated_parameters, 1, "whole"),
        (shape.hidden, 1, "final"),
        (shape.vocab * shape.hidden, tensor, "ends" if shape.tied else "first"),
    ]
    if not shape.tied:
        result.append((shape.vocab * shape.hidden, tensor, "last"))
    return result


def _held(actor: ParallelLayout, rank: int, start: float, width: float, kind: str) -> float:
    """Return which share of a class's elements an actor rank both holds and needs for itself."""
    tensor, _, _, stage = actor.coordinates(rank)
    first, last = stage == 0, stage == actor.pipeline - 1
    if kind == "whole":
        return 1 / actor.pipeline
    if kind == "final":
        return float(last)
    if kind == "experts":
        begin = (actor.ranks.index(rank) % actor.expert_tensor) / actor.expert_tensor
        common = _overlap(begin, 1 / actor.expert_tensor, start, width)
        return common / (actor.expert * actor.pipeline)
    common = _overlap(tensor / actor.tensor, 1 / actor.tensor, start, width)
    if kind == "layers":
        return common / actor.pipeline
    present = {"first": first, "last": last, "ends": first or last}[kind]
    return common if present else 0.0


def _overlap(start: float, width: float, other: float, other_width: float) -> float:
    return max(0.0, min(start + width, other + other_width) - max(start, other))
