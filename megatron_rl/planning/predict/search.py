"""Choose layouts: the fastest training cut and the fastest rollout cut that fit in memory.

The search is HybridFlow's auto-mapping (arXiv 2409.19256, algorithm 1 and 2): every placement, and for
each the best parallel sizes per model, scored by the phase model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf, isfinite

from megatron_rl.planning.predict.batch import StepBatch
from megatron_rl.planning.predict.generate import RolloutLayout, generate_seconds
from megatron_rl.planning.predict.learn import (
    RoleMemory,
    TrainChoice,
    learn_memory,
    learn_seconds,
    score_memory,
    score_seconds,
)
from megatron_rl.shapes.fit import trainer_problems
from megatron_rl.shapes.hardware import Machine
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import Lora
from megatron_rl.shapes.memory import OptimizerChoice, fullest_parameters
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pipeline_stages import end_settings

RECOMPUTE = ("none", "full")  # with flash attention, selective saves nothing
_MICRO_BATCHES = (1, 2, 4)


@dataclass(frozen=True)
class TrainPlan:
    """Hold one way to train (or only score) a model on its GPUs, with seconds a step and its memory."""

    choice: TrainChoice
    learn: float
    forward: float
    memory: RoleMemory


@dataclass(frozen=True)
class RolloutPlan:
    """Hold one way to generate, with seconds a step."""

    layout: RolloutLayout
    seconds: float


@dataclass
class SearchCount:
    """Count what a search looked at."""

    layouts: int = 0
    evaluated: int = 0


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in rising order."""
    return [value for value in range(1, number + 1) if number % value == 0]


def _tensor_choices(model: ModelShape, gpus: int, most: int) -> list[int]:
    heads = model.heads if model.mla else model.kv_heads
    return [t for t in (1, 2, 4, 8, 16, 32) if t <= most and gpus % t == 0 and heads % t == 0]


def _pipeline_choices(model: ModelShape, gpus: int) -> list[int]:
    most = min(model.layers, 64)
    return [p for p in divisors(gpus) if p <= most and end_settings(model.layers, p) is not None]


def virtual_choices(model: ModelShape, pipeline: int) -> list[int]:
    """Return the interleaving degrees to try: those that split every stage into equal chunks."""
    if pipeline == 1 or model.layers % pipeline:
        return [1]
    per_stage = model.layers // pipeline
    return [v for v in (1, 2, 4, 8) if per_stage % v == 0]


def contexts(longest: float) -> list[int]:
    """Return the context-parallel sizes to try: those that leave a rank 4,096 tokens of the longest row."""
    return [size for size in (1, 2, 4, 8, 16, 32) if size == 1 or longest / size >= 4096]


def training_layouts(
    model: ModelShape, gpus: int, node: int, longest: int, rows: int | None = None
) -> Iterator[ParallelLayout]:
    """Yield the layouts worth trying on ``gpus`` GPUs; tensor ranks stay inside ``node`` GPUs.

    ``rows`` (sequences per optimizer step) bounds data parallelism: a replica without a row would idle.
    """
    ranks = tuple(range(gpus))
    experts = [e for e in divisors(model.experts) if e <= 256] if model.experts else [1]
    for tensor in _tensor_choices(model, gpus, min(node, 8)):
        for pipeline in _pipeline_choices(model, gpus // tensor):
            rest = gpus // tensor // pipeline
            for context in contexts(longest):
                if rest % context:
                    continue
                data = rest // context
                if rows is not None and data > rows:
                    continue
                for expert in experts:
                    if (tensor * context * data) % expert:
                        continue
                    yield ParallelLayout(
                        ranks, tensor, pipeline, context=context, expert=expert, sequence_parallel=tensor > 1
                    )


def rollout_layouts(
    model: ModelShape, gpus: int, memory_fraction: float, engine: str, max_sequences: int | None = None
) -> Iterator[RolloutLayout]:
    """Yield rollout cuts that use every GPU, by tensor size; key-value heads may be replicated."""
    for tensor in (1, 2, 4, 8, 16, 32):
        if tensor > gpus or gpus % tensor or model.heads % tensor:
            continue
        yield RolloutLayout(
            tensor=tensor,
            replicas=gpus // tensor,
            memory_fraction=memory_fraction,
            engine=engine,
            max_sequences=max_sequences,
        )


def _choices(
    model: ModelShape,
    layout: ParallelLayout,
    optimizer: OptimizerChoice,
    recomputes: Iterable[str],
    micro_batches: Iterable[int],
    offload_allowed: bool,
    exchanges_heads: bool,
    lora: Lora | None,
) -> Iterator[TrainChoice]:
    """Yield every way to run a layout: interleaving, micro-batch, offload and recompute."""
    variants = [optimizer]
    if offload_allowed and not optimizer.offload:
        variants.append(replace(optimizer, offload=True))
    for virtual in virtual_choices(model, layout.pipeline):
        cut = replace(layout, virtual_pipeline=virtual)
        for micro, variant, recompute in product(micro_batches, variants, recomputes):
            yield TrainChoice(
                model, cut, recompute, variant, micro, lora=lora, exchanges_heads=exchanges_heads
            )


def training_front(
    model: ModelShape,
    gpus: int,
    machine: Machine,
    batch: StepBatch,
    optimizer: OptimizerChoice,
    *,
    trained: bool = True,
    recomputes: Iterable[str] = RECOMPUTE,
    micro_batches: Iterable[int] = _MICRO_BATCHES,
    offload_allowed: bool = True,
    context_allowed: bool = True,
    exchanges_heads: bool = True,
    even_stages: bool = False,
    lora: Lora | None = None,
    counted: SearchCount | None = None,
) -> list[TrainPlan]:
    """Return the ways to run a model on ``gpus`` GPUs that no other way beats in time and memory.

    Fastest first. The score is a step's training plus a forward pass; an untrained model is
    scored by its forward alone. A way stays when it needs less peak memory, or keeps less
    state between steps, than every faster one. Empty when nothing fits.
    """
    counted = counted or SearchCount()
    limit = machine.usable_memory
    rows = batch.rows // batch.optimizer_steps if trained else batch.rows
    node, longest = machine.cluster.gpus_per_node, int(batch.longest)
    fitting: list[TrainPlan] = []
    for layout in training_layouts(model, gpus, node, longest, max(1, rows)):
        uneven = model.layers % layout.pipeline > 0
        if (layout.context > 1 and not context_allowed) or (uneven and even_stages):
            continue
        stages = end_settings(model.layers, layout.pipeline)
        if layout.context > 1 and exchanges_heads and trainer_problems(model, layout, stages):
            continue
        counted.layouts += 1
        if 2.0 * sum(fullest_parameters(model, layout)) > limit:
            continue
        if trained:
            choices = _choices(
                model, layout, optimizer, recomputes, micro_batches, offload_allowed, exchanges_heads, lora
            )
        else:
            choices = iter((TrainChoice(model, layout, exchanges_heads=exchanges_heads),))
        forwards: dict[tuple[int, int], float] = {}
        for choice in choices:
            memory = (learn_memory if trained else score_memory)(choice, batch)
            if memory.total > limit:
                continue
            counted.evaluated += 1
            # Recompute and optimizer offload leave the forward pass as it is.
            key = (choice.layout.virtual_pipeline, choice.micro_batch)
            if key not in forwards:
                forwards[key] = score_seconds(choice, batch, machine)
            learn = learn_seconds(choice, batch, machine) if trained else 0.0
            fitting.append(TrainPlan(choice, learn, forwards[key], memory))
    return _undominated(sorted(fitting, key=lambda plan: plan.learn + plan.forward))


def _undominated(plans: Iterable[TrainPlan]) -> list[TrainPlan]:
    """Return those of the plans, fastest first, that need or keep less memory than every faster one."""
    front: list[TrainPlan] = []
    least_total = least_states = inf
    for plan in plans:
        if plan.memory.total < least_total or plan.memory.resting < least_states:
            front.append(plan)
            least_total = min(least_total, plan.memory.total)
            least_states = min(least_states, plan.memory.resting)
    return front


def rollout_plans(
    model: ModelShape,
    gpus: int,
    machine: Machine,
    batch: StepBatch,
    memory_fraction: float,
    engine: str,
    *,
    max_sequences: int | None = None,
    counted: SearchCount | None = None,
) -> list[RolloutPlan]:
    """Return the rollout cuts of ``gpus`` GPUs that hold the model and a row, fastest first."""
    plans = []
    for layout in rollout_layouts(model, gpus, memory_fraction, engine, max_sequences):
        if layout.replicas > batch.rows:
            continue
        if counted:
            counted.layouts += 1
            counted.evaluated += 1
        seconds = generate_seconds(model, layout, batch, machine)
        if isfinite(seconds):
            plans.append(RolloutPlan(layout, seconds))
    return sorted(plans, key=lambda plan: plan.seconds)
