"""Choose layouts: the fastest training cut and the fastest rollout cut that fit in memory.

The search is HybridFlow's auto-mapping (arXiv 2409.19256, algorithm 1 and 2): every placement, and for
each the best parallel sizes per model, scored by the phase model.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from math import isfinite

from megatron_rl.planner.constants import GB, Cluster, Constants
from megatron_rl.planner.layout import Layout, RolloutLayout, rollout_layouts, training_layouts, virtual_choices
from megatron_rl.planner.memory import (
    OptimizerChoice,
    TrainingMemory,
    parameters_per_gpu,
    rollout_weight_bytes,
    training_memory,
)
from megatron_rl.planner.model_shape import ModelShape
from megatron_rl.planner.rl_step import (
    RlBatch,
    TrainChoice,
    step_forward_seconds,
    step_generate_seconds,
    step_train_seconds,
)
from megatron_rl.planner.training import replica_work

RECOMPUTE = ("none", "selective", "full")
_MICRO_BATCHES = (1, 2, 4)


@dataclass(frozen=True)
class TrainPlan:
    """Hold one way to train (or only score) a model on its GPUs, with seconds a step and its memory."""

    choice: TrainChoice
    train: float
    forward: float
    memory: TrainingMemory


@dataclass(frozen=True)
class RolloutPlan:
    """Hold one way to generate, with seconds a step and bytes on a GPU."""

    layout: RolloutLayout
    seconds: float
    weight_bytes: float


@dataclass
class SearchCount:
    """Count what a search looked at."""

    layouts: int = 0
    evaluated: int = 0


def memory_limit(cluster: Cluster, constants: Constants) -> float:
    """Return the bytes of a GPU that a plan may use."""
    return cluster.gpu.memory * constants.memory.usable_share


def memory_of(choice: TrainChoice, batch: RlBatch, constants: Constants) -> TrainingMemory:
    """Return the training memory of a choice at a batch."""
    rows = batch.rows / batch.optimizer_steps
    work = replica_work(
        rows, batch.mean_row, batch.longest, batch.context, choice.layout.data, choice.micro_batch, batch.packing
    )
    # The fullest micro-batch holds a whole longest row, whatever the mean fill.
    tokens = max(work.tokens, choice.micro_batch * batch.longest if batch.packing else batch.longest)
    micro = max(1, round(work.micro_batches))
    return training_memory(
        choice.model, choice.layout, choice.optimizer, constants, tokens, micro, choice.recompute
    )


def _forward_memory(choice: TrainChoice, batch: RlBatch, constants: Constants) -> TrainingMemory:
    """Return the memory of a model that only scores: 2-byte weights and one layer's activations."""
    frozen = OptimizerChoice(gradient_bytes=0, state_bytes=0)
    one = training_memory(
        choice.model, choice.layout, frozen, constants, choice.micro_batch * batch.longest, 1, "full"
    )
    return replace(one, logits=one.logits * 0.6)


def _fitting(
    model: ModelShape,
    layout: Layout,
    optimizer: OptimizerChoice,
    batch: RlBatch,
    constants: Constants,
    limit: float,
    recomputes: Iterable[str],
    micro_batches: Iterable[int],
    offload_allowed: bool,
) -> Iterable[tuple[TrainChoice, TrainingMemory]]:
    """Yield, per interleaving and micro-batch, the lightest recompute (then offload) that fits."""
    dense, expert = parameters_per_gpu(model, replace(layout, virtual_pipeline=1))
    if 2.0 * (dense + expert) > limit and not layout.fully_sharded:
        return
    variants = [optimizer]
    if offload_allowed and not optimizer.offload:
        variants.append(replace(optimizer, offload=True))
    for virtual in virtual_choices(model, layout.pipeline):
        cut = replace(layout, virtual_pipeline=virtual)
        for micro in micro_batches:
            done = False
            for variant in variants:
                for recompute in recomputes:
                    choice = TrainChoice(model, cut, recompute, variant, micro)
                    memory = memory_of(choice, batch, constants)
                    if memory.total <= limit:
                        yield choice, memory
                        done = True
                        break
                if done:
                    break


def training_plans(
    model: ModelShape,
    gpus: int,
    cluster: Cluster,
    constants: Constants,
    batch: RlBatch,
    precision: str,
    optimizer: OptimizerChoice,
    limit: float,
    *,
    forward_passes: int = 0,
    trained: bool = True,
    recomputes: Iterable[str] = RECOMPUTE,
    micro_batches: Iterable[int] = _MICRO_BATCHES,
    layouts: Iterable[Layout] | None = None,
    offload_allowed: bool = True,
    best: int = 4,
    counted: SearchCount | None = None,
) -> list[TrainPlan]:
    """Return the ``best`` fastest ways to run a model on ``gpus`` GPUs within ``limit`` bytes each.

    The score is a step's training plus ``forward_passes`` forward passes; an untrained model is scored
    by its forward alone. Empty when nothing fits.
    """
    counted = counted or SearchCount()
    rows = batch.rows // batch.optimizer_steps if trained else batch.rows
    space = layouts or training_layouts(model, gpus, cluster.gpus_per_node, int(batch.longest), max(1, rows))
    heap: list[tuple[float, int, TrainPlan]] = []
    order = count()
    for layout in space:
        counted.layouts += 1
        if trained:
            fitting = _fitting(
                model, layout, optimizer, batch, constants, limit, recomputes, micro_batches, offload_allowed
            )
        else:
            choice = TrainChoice(model, layout)
            memory = _forward_memory(choice, batch, constants)
            fitting = [(choice, memory)] if memory.total <= limit else []
        for choice, memory in fitting:
            counted.evaluated += 1
            train = step_train_seconds(choice, batch, cluster, constants, precision) if trained else 0.0
            if len(heap) == best and train > -heap[0][0]:
                continue
            forward = step_forward_seconds(choice, batch, cluster, constants, precision)
            score = train + (forward_passes if trained else 1) * forward
            entry = (-score, next(order), TrainPlan(choice, train, forward, memory))
            if len(heap) < best:
                heapq.heappush(heap, entry)
            elif entry[0] > heap[0][0]:
                heapq.heapreplace(heap, entry)
    return [entry[2] for entry in sorted(heap, reverse=True)]


def rollout_plans(
    model: ModelShape,
    gpus: int,
    cluster: Cluster,
    constants: Constants,
    batch: RlBatch,
    precision: str,
    memory_fraction: float,
    engine: str,
    *,
    resident: float = 0.0,
    max_sequences: int | None = None,
    most: int = 32,
    counted: SearchCount | None = None,
) -> list[RolloutPlan]:
    """Return the rollout cuts of ``gpus`` GPUs that fit beside ``resident`` bytes, fastest first."""
    plans = []
    for layout in rollout_layouts(model, gpus, memory_fraction, engine, most, max_sequences):
        if layout.replicas > batch.rows:
            continue
        if counted:
            counted.layouts += 1
            counted.evaluated += 1
        seconds = step_generate_seconds(model, layout, batch, cluster, constants, precision, resident)
        if isfinite(seconds):
            plans.append(RolloutPlan(layout, seconds, rollout_weight_bytes(model, layout, precision)))
    return sorted(plans, key=lambda plan: plan.seconds)


def describe_limit(limit: float) -> str:
    """Return a byte limit in words."""
    return f"{limit / GB:.0f} GB per GPU"
