"""Search for the fastest training layout and the fastest rollout layout that fit in memory.

The search is HybridFlow's auto-mapping (arXiv 2409.19256, algorithms 1 and 2): it tries every placement, and
selects the parallel sizes of each model by the predicted seconds of its phases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, inf, isfinite

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
from megatron_rl.shapes.hardware import Machine
from megatron_rl.shapes.layout import ParallelLayout, end_settings, trainer_problems
from megatron_rl.shapes.lora import Lora
from megatron_rl.shapes.memory import OptimizerChoice, max_stage_parameters
from megatron_rl.shapes.model import ModelShape

RECOMPUTE = ("none", "full")
"""Recomputation settings to try; with flash attention, "selective" saves no memory."""
_MICRO_BATCHES = (1, 2, 4)
"""Micro-batch sizes to try, see `TrainChoice.micro_batch`."""
_POWERS = (1, 2, 4, 8, 16, 32)
"""Sizes to try for tensor and context parallelism."""
_MAX_TENSOR = 8
"""Largest tensor-parallel size to try in training."""
MAX_PIPELINE = 64
"""Largest pipeline size to try."""
_MAX_EXPERT = 256
"""Largest expert-parallel size to try."""
_MIN_CONTEXT_TOKENS = 4096
"""Smallest number of tokens of the longest row per context-parallel rank."""


@dataclass(frozen=True)
class TrainPlan:
    """Layout and settings of a role on its GPUs, with the predicted seconds and memory.

    Example: ``TrainPlan(choice, learn=65.1, forward=20.8, memory=memory)``.
    """

    choice: TrainChoice
    """Parallel layout and settings of the role."""
    learn: float
    """Seconds of a step's optimizer steps; 0 for a frozen model."""
    forward: float
    """Seconds of a forward pass over a step's rows."""
    memory: RoleMemory
    """Memory of the role on the GPUs with the highest memory use."""


@dataclass(frozen=True)
class RolloutPlan:
    """Layout of the engine for generation, with the predicted seconds.

    Example: ``RolloutPlan(RolloutLayout(tensor=2, replicas=8), seconds=160.3)``.
    """

    layout: RolloutLayout
    """Layout of the engine."""
    seconds: float
    """Seconds of a step's generation."""


@dataclass
class SearchCount:
    """Counters of the layouts and settings that a search has tried, for its report."""

    layouts: int = 0
    """Number of layouts that were tried."""
    evaluated: int = 0
    """Number of combinations of a layout and settings whose seconds were predicted."""


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order."""
    return [value for value in range(1, number + 1) if number % value == 0]


def _tensor_choices(model: ModelShape, gpus: int, limit: int) -> list[int]:
    """Return the tensor-parallel sizes up to ``limit`` that divide the GPUs and the model's heads."""
    # Every mixer's heads must be divisible. Mixers without heads have 0, which every size divides.
    heads = gcd(*(mixer.tensor_parallel_heads(model) for mixer in model.mixers))

    sizes = [size for size in _POWERS if size <= limit]
    return [size for size in sizes if gpus % size == 0 and heads % size == 0]


def _pipeline_choices(model: ModelShape, gpus: int, limit: int) -> list[int]:
    """Return the pipeline sizes up to ``limit`` over which Megatron can split the model's layers."""
    limit = min(model.layers, limit)
    sizes = [size for size in divisors(gpus) if size <= limit]
    return [size for size in sizes if end_settings(model.layers, size) is not None]


def interleaving_choices(model: ModelShape, pipeline: int) -> list[int]:
    """Return the virtual pipeline sizes to try: numbers of equal model chunks per stage."""
    if pipeline == 1 or model.layers % pipeline:
        return [1]
    layers_per_stage = model.layers // pipeline
    return [size for size in (1, 2, 4, 8) if layers_per_stage % size == 0]


def context_sizes(row_limit: float) -> list[int]:
    """Return the context-parallel sizes to try, with at least 4,096 tokens of the longest row per rank."""
    return [size for size in _POWERS if size == 1 or row_limit / size >= _MIN_CONTEXT_TOKENS]


def training_layouts(
    model: ModelShape,
    gpus: int,
    gpus_per_node: int,
    row_limit: int,
    rows: int | None = None,
    max_pipeline: int = MAX_PIPELINE,
) -> Iterator[ParallelLayout]:
    """Yield the training layouts to try on ``gpus`` GPUs; tensor-parallel groups stay inside a node.

    ``row_limit`` is the largest length of a row in tokens, which bounds context parallelism. ``rows``, the
    number of sequences of an optimizer step, bounds data parallelism: a replica without a row would idle.
    """
    ranks = tuple(range(gpus))
    # Megatron needs the same number of experts on each expert-parallel rank.
    expert_sizes = [1]
    if model.experts:
        expert_sizes = [size for size in divisors(model.experts) if size <= _MAX_EXPERT]

    for tensor in _tensor_choices(model, gpus, min(gpus_per_node, _MAX_TENSOR)):
        for pipeline in _pipeline_choices(model, gpus // tensor, max_pipeline):
            stage_gpus = gpus // tensor // pipeline
            for context in context_sizes(row_limit):
                if stage_gpus % context:
                    continue
                data_parallel = stage_gpus // context
                if rows is not None and data_parallel > rows:
                    continue

                # Expert parallelism divides the ranks of a stage independently of the other sizes.
                for expert in expert_sizes:
                    if (tensor * context * data_parallel) % expert:
                        continue
                    yield ParallelLayout(
                        ranks, tensor, pipeline, context=context, expert=expert, sequence_parallel=tensor > 1
                    )


def rollout_layouts(
    model: ModelShape,
    gpus: int,
    memory_fraction: float,
    engine: str,
    max_sequences: int | None = None,
) -> Iterator[RolloutLayout]:
    """Yield the rollout layouts on all GPUs, in ascending order of tensor-parallel sizes.

    Key-value heads may be replicated. ``memory_fraction``, ``engine`` and ``max_sequences`` are fields of
    `RolloutLayout`.
    """
    for tensor in _POWERS:
        if tensor > gpus or gpus % tensor or model.heads % tensor:
            continue

        yield RolloutLayout(
            tensor=tensor,
            replicas=gpus // tensor,
            memory_fraction=memory_fraction,
            engine=engine,
            max_sequences=max_sequences,
        )


def _train_choices(
    model: ModelShape,
    layout: ParallelLayout,
    optimizer: OptimizerChoice,
    recomputes: Iterable[str],
    micro_batches: Iterable[int],
    offload_allowed: bool,
    exchanges_heads: bool,
    lora: Lora | None,
) -> Iterator[TrainChoice]:
    """Yield all training settings of a layout: interleaving, micro-batch, optimizer offload and recompute.

    ``exchanges_heads``: whether context-parallel ranks exchange heads around attention (all-to-all) instead
    of gathering keys and values.
    """
    optimizers = [optimizer]
    # Optimizer offload is slower but needs less memory, so plans with and without offload can be
    # Pareto-optimal in time and memory.
    if offload_allowed and not optimizer.offload:
        optimizers.append(replace(optimizer, offload=True))

    for virtual_pipeline in interleaving_choices(model, layout.pipeline):
        interleaved_layout = replace(layout, virtual_pipeline=virtual_pipeline)
        for micro_batch, optimizer_choice, recompute in product(micro_batches, optimizers, recomputes):
            yield TrainChoice(
                model,
                interleaved_layout,
                recompute,
                optimizer_choice,
                micro_batch,
                lora=lora,
                exchanges_heads=exchanges_heads,
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
    counter: SearchCount | None = None,
    max_pipeline: int = MAX_PIPELINE,
) -> list[TrainPlan]:
    """Return the Pareto front, by time and memory, of the plans for a model on ``gpus`` GPUs.

    Plans are sorted by the seconds of a step's training plus a forward pass; a frozen model has only the
    forward pass. A plan is on the front if it has less peak memory, or smaller states between steps, than
    every faster plan. The list is empty if no plan fits.

    ``trained``: whether the model is trained; otherwise it only runs forward passes. ``recomputes``,
    ``micro_batches``: settings to try. ``offload_allowed``: whether plans may offload the optimizer.
    ``context_allowed``: whether plans may shard rows over context-parallel ranks. ``exchanges_heads``: see
    `TrainChoice`. ``even_stages``: whether every pipeline stage must have the same number of layers.
    ``counter``: counts the layouts that are tried.
    """
    counter = counter or SearchCount()
    memory_limit = machine.usable_memory
    gpus_per_node = machine.cluster.gpus_per_node
    predict_memory = score_memory
    rows = batch.rows
    if trained:
        predict_memory = learn_memory
        rows = batch.rows // batch.optimizer_steps

    plans: list[TrainPlan] = []
    for layout in training_layouts(
        model, gpus, gpus_per_node, int(batch.row_limit), max(1, rows), max_pipeline
    ):
        # Skip layouts that the trainer does not support, or that other roles cannot share.
        has_uneven_stages = model.layers % layout.pipeline > 0
        if has_uneven_stages and even_stages:
            continue
        if layout.context > 1 and not context_allowed:
            continue
        stages = end_settings(model.layers, layout.pipeline)
        if layout.context > 1 and exchanges_heads and trainer_problems(model, layout, stages):
            continue
        counter.layouts += 1

        # The weights in bfloat16 are a cheap lower bound of the memory.
        if 2.0 * sum(max_stage_parameters(model, layout)) > memory_limit:
            continue

        choices: Iterable[TrainChoice] = [TrainChoice(model, layout, exchanges_heads=exchanges_heads)]
        if trained:
            choices = _train_choices(
                model,
                layout,
                optimizer,
                recomputes,
                micro_batches,
                offload_allowed,
                exchanges_heads,
                lora,
            )

        forward_seconds: dict[tuple[int, int], float] = {}
        for choice in choices:
            memory = predict_memory(choice, batch)
            if memory.total > memory_limit:
                continue
            counter.evaluated += 1

            # Cache the forward pass, which does not depend on recompute and optimizer offload.
            forward_key = (choice.layout.virtual_pipeline, choice.micro_batch)
            if forward_key not in forward_seconds:
                forward_seconds[forward_key] = score_seconds(choice, batch, machine)
            learn = 0.0
            if trained:
                learn = learn_seconds(choice, batch, machine)
            plans.append(TrainPlan(choice, learn, forward_seconds[forward_key], memory))

    return _pareto_front(sorted(plans, key=lambda plan: plan.learn + plan.forward))


def _pareto_front(plans: Iterable[TrainPlan]) -> list[TrainPlan]:
    """Return the plans with a lower peak, or with smaller states, than every faster plan.

    ``plans`` are sorted, fastest first.
    """
    front: list[TrainPlan] = []
    lowest_peak = inf
    lowest_states = inf
    for plan in plans:
        if plan.memory.total < lowest_peak or plan.memory.states < lowest_states:
            front.append(plan)
            lowest_peak = min(lowest_peak, plan.memory.total)
            lowest_states = min(lowest_states, plan.memory.states)
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
    counter: SearchCount | None = None,
) -> list[RolloutPlan]:
    """Return the rollout layouts of ``gpus`` GPUs in which the model and a row fit, fastest first.

    ``memory_fraction``, ``engine`` and ``max_sequences`` are fields of `RolloutLayout`.
    """
    plans = []
    for layout in rollout_layouts(model, gpus, memory_fraction, engine, max_sequences):
        # A replica without a row would idle.
        if layout.replicas > batch.rows:
            continue

        if counter:
            counter.layouts += 1
            counter.evaluated += 1
        # The seconds are infinite if the cache has no room for one sequence.
        seconds = generate_seconds(model, layout, batch, machine)
        if isfinite(seconds):
            plans.append(RolloutPlan(layout, seconds))
    return sorted(plans, key=lambda plan: plan.seconds)
