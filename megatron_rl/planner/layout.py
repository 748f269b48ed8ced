"""How a role is cut over GPUs: pure arithmetic, in Megatron's rank order tp-cp-ep-dp-pp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from megatron_rl.shapes.model import ModelShape


@dataclass(frozen=True)
class Layout:
    """Cut a model for training or for forward passes; ``data`` counts the replicas."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    sequence_parallel: bool = False
    fully_sharded: bool = False

    @property
    def size(self) -> int:
        """Count the GPUs."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def expert_data(self) -> int:
        """Count the replicas of each routed expert."""
        return max(1, self.tensor * self.context * self.data // (self.expert * self.expert_tensor))


@dataclass(frozen=True)
class RolloutLayout:
    """Cut a model for generation; ``expert`` spreads routed experts over that many GPUs."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    replicas: int = 1
    max_sequences: int | None = None
    memory_fraction: float = 0.6
    engine: str = "current"

    @property
    def gpus(self) -> int:
        """Count the GPUs of one replica."""
        return self.tensor * self.pipeline


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in rising order."""
    return [value for value in range(1, number + 1) if number % value == 0]


def _tensor_choices(model: ModelShape, gpus: int, most: int) -> list[int]:
    heads = model.heads if model.mla else model.kv_heads
    return [t for t in (1, 2, 4, 8, 16, 32) if t <= most and gpus % t == 0 and heads % t == 0]


def uneven_split(layers: int, pipeline: int) -> tuple[int, int] | None:
    """Return (first, last) stage layers so that the stages between are equal; None when impossible.

    Even splits return equal values. The first and last stage, which hold an embedding, get fewer
    layers (Megatron's num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage).
    """
    if layers % pipeline == 0:
        return layers // pipeline, layers // pipeline
    if pipeline == 2:
        return ceil(layers / 2), layers // 2
    for middle in (ceil(layers / pipeline), layers // pipeline):
        rest = layers - middle * (pipeline - 2)
        if 2 <= rest <= 2 * middle + 2:
            return ceil(rest / 2), rest // 2
    return None


def _pipeline_choices(model: ModelShape, gpus: int) -> list[int]:
    most = min(model.layers, 64)
    return [p for p in divisors(gpus) if p <= most and uneven_split(model.layers, p) is not None]


def virtual_choices(model: ModelShape, pipeline: int) -> list[int]:
    """Return the interleaving degrees to try: those that split every stage into equal chunks."""
    if pipeline == 1 or model.layers % pipeline:
        return [1]
    per_stage = model.layers // pipeline
    return [v for v in (1, 2, 4, 8) if per_stage % v == 0]


def training_layouts(
    model: ModelShape, gpus: int, node: int, longest: int, rows: int | None = None
) -> Iterator[Layout]:
    """Yield the layouts worth trying on ``gpus`` GPUs; tensor ranks stay inside ``node`` GPUs.

    Context parallelism starts when a sequence is longer than 8,192 tokens. ``rows`` (sequences per
    optimizer step) bounds data parallelism: a replica without a row would idle.
    """
    contexts = [c for c in (1, 2, 4, 8, 16, 32) if c == 1 or longest / c >= 4096]
    experts = [e for e in divisors(model.experts) if e <= 256] if model.experts else [1]
    for tensor in _tensor_choices(model, gpus, min(node, 8)):
        for pipeline in _pipeline_choices(model, gpus // tensor):
            rest = gpus // tensor // pipeline
            for context in contexts:
                if rest % context:
                    continue
                data = rest // context
                if rows is not None and data > rows:
                    continue
                for expert in experts:
                    if (tensor * context * data) % expert:
                        continue
                    yield Layout(
                        tensor=tensor,
                        pipeline=pipeline,
                        context=context,
                        expert=expert,
                        data=data,
                        sequence_parallel=tensor > 1,
                    )


def with_virtual(layout: Layout, virtual: int) -> Layout:
    """Return the layout with another interleaving degree."""
    return replace(layout, virtual_pipeline=virtual)


def rollout_layouts(
    model: ModelShape,
    gpus: int,
    memory_fraction: float,
    engine: str,
    most: int = 32,
    max_sequences: int | None = None,
) -> Iterator[RolloutLayout]:
    """Yield rollout cuts that use every GPU, by tensor size; key-value heads may be replicated."""
    for tensor in (1, 2, 4, 8, 16, 32):
        if tensor > most or tensor > gpus or gpus % tensor or model.heads % tensor:
            continue
        yield RolloutLayout(
            tensor=tensor,
            replicas=gpus // tensor,
            memory_fraction=memory_fraction,
            engine=engine,
            max_sequences=max_sequences,
        )
