"""Choose layouts: the fastest training cut and the fastest rollout cut that fit in memory.

The search is HybridFlow's auto-mapping (arXiv 2409.19256, algorithm 1 and 2): every placement, and for
each the best parallel sizes per model, scored by the phase model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf, isfinite

from megatron_rl.planner.constants import Cluster, Constants
from megatron_rl.planner.layout import (
    Layout,
    RolloutLayout,
    rollout_layouts,
    training_layouts,
    virtual_choices,
)
from megatron_rl.planner.memory import (
    OptimizerChoice,
    TrainingMemory,
    parameters_per_gpu,
    rollout_weight_bytes,
    training_memory,
)
from megatron_rl.planner.rl_step import (
    RlBatch,
    TrainChoice,
    step_forward_seconds,
    step_generate_seconds,
    step_train_seconds,
)
from megatron_rl.planner.training import replica_work
from megatron_rl.shapes.model import ModelShape

RECOMPUTE = ("none", "full")  # with flash attention, selective saves nothing
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
        rows,
        batch.mean_row,
        batch.longest,
        batch.context,
        choice.layout.data,
        choice.micro_batch,
        batch.packing,
    )
    # The fullest micro-batch holds a whole longest row, whatever the mean fill.
    tokens = max(work.tokens, choice.micro_batch * batch.longest if batch.packing else batch.longest)
    micro = max(1, round(work.micro_batches))
    return training_memory(
        choice.model, choice.layout, choice.optimizer, constants, tokens, micro, choice.recompute
    )


def forward_memory(choice: TrainChoice, batch: RlBatch, constants: Constants) -> TrainingMemory:
    """Return the memory of a model that only scores: 2-byte weights and one layer's activations."""
    frozen = OptimizerChoice(gradient_bytes=0, state_bytes=0)
    one = training_memory(
        choice.model, choice.layout, frozen, constants, choice.micro_batch * batch.longest, 1, "full"
    )
    return replace(one, logits=one.logits * 0.6)


def _choices(
    model: ModelShape,
    layout: Layout,
    optimizer: OptimizerChoice,
    recomputes: Iterable[str],
    micro_batches: Iterable[int],
    offload_allowed: bool,
) -> Iterator[TrainChoice]:
    """Yield every way to run a layout: interleaving, micro-batch, offload and recompute."""
    variants = [optimizer]
    if offload_allowed and not optimizer.offload:
        variants.append(replace(optimizer, offload=True))
    for virtual in virtual_choices(model, layout.pipeline):
        cut = replace(layout, virtual_pipeline=virtual)
        for micro, variant, recompute in product(micro_batches, variants, recomputes):
            yield TrainChoice(model, cut, recompute, variant, micro)


def training_front(
    model: ModelShape,
    gpus: int,
    cluster: Cluster,
    constants: Constants,
    batch: RlBatch,
    precision: str,
    optimizer: OptimizerChoice,
    *,
    trained: bool = True,
    recomputes: Iterable[str] = RECOMPUTE,
    micro_batches: Iterable[int] = _MICRO_BATCHES,
    offload_allowed: bool = True,
    context_allowed: bool = True,
    even_stages: bool = False,
    counted: SearchCount | None = None,
) -> list[TrainPlan]:
    """Return the ways to run a model on ``gpus`` GPUs that no other way beats in time and memory.

    Fastest first. The score is a step's training plus a forward pass; an untrained model is
    scored by its forward alone. A way stays when it needs less peak memory, or keeps less
    state between steps, than every faster one. Empty when nothing fits.
    """
    counted = counted or SearchCount()
    limit = memory_limit(cluster, constants)
    rows = batch.rows // batch.optimizer_steps if trained else batch.rows
    found: list[tuple[float, TrainPlan]] = []
    for layout in training_layouts(model, gpus, cluster.gpus_per_node, int(batch.longest), max(1, rows)):
        uneven = model.layers % layout.pipeline > 0
        if (layout.context > 1 and not context_allowed) or (uneven and even_stages):
            continue
        counted.layouts += 1
        if 2.0 * sum(parameters_per_gpu(model, layout)) > limit:
            continue
        if trained:
            choices = _choices(model, layout, optimizer, recomputes, micro_batches, offload_allowed)
        else:
            choices = iter((TrainChoice(model, layout),))
        forwards: dict[tuple[int, int], float] = {}
        for choice in choices:
            shape = (choice.layout.virtual_pipeline, choice.micro_batch)
            memory = (memory_of if trained else forward_memory)(choice, batch, constants)
            if memory.total > limit:
                continue
            counted.evaluated += 1
            if shape not in forwards:
                forwards[shape] = step_forward_seconds(choice, batch, cluster, constants, precision)
            forward = forwards[shape]
            train = step_train_seconds(choice, batch, cluster, constants, precision) if trained else 0.0
            found.append((train + forward, TrainPlan(choice, train, forward, memory)))
    found.sort(key=lambda entry: entry[0])
    front: list[TrainPlan] = []
    least_total = least_states = inf
    for _, plan in found:
        if plan.memory.total < least_total or plan.memory.states < least_states:
            front.append(plan)
            least_total = min(least_total, plan.memory.total)
            least_states = min(least_states, plan.memory.states)
    return front


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
