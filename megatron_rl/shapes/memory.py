"""Estimate of what each rank holds in each phase of a step: pure equations on a model's shape.

Parameters, gradients and optimizer states follow Megatron's distributed optimizer (float32 main
gradients; float32 master weights and two moments beside bfloat16 weights; Rajbhandari et al. 2020).
Activations are counted tensor by tensor for a gated MLP with fused attention (the accounting of
Korthikanti et al. 2022 applied to these shapes); logits exist one chunk of tokens at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.config.derive import BatchPlan
from megatron_rl.config.schema import RunConfig
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import DTYPE_BYTES, ModelShape

PHASES = ("generate", "score", "learn")
LOGITS_ELEMENTS = 2**25
"""Logits of a vocabulary shard in one chunk: 128 MiB in float32, whatever the vocabulary."""
RUNTIME_BYTES = 5 * 2**30
"""What CUDA, NCCL and allocator fragmentation take on a GPU."""


@dataclass(frozen=True)
class MemoryItem:
    """Name one contributor, its bytes, the phases in which it is held, and how it was counted."""

    name: str
    bytes: int
    phases: tuple[str, ...]
    how: str


@dataclass(frozen=True)
class RankMemory:
    """Hold the contributors of one rank."""

    rank: int
    items: tuple[MemoryItem, ...]

    def total(self, phase: str) -> int:
        """Return the bytes held in a phase."""
        return sum(item.bytes for item in self.items if phase in item.phases)

    @property
    def peak(self) -> int:
        """Return the bytes held in the fullest phase."""
        return max(self.total(phase) for phase in PHASES)


def stage_parameters(shape: ModelShape, layout: ParallelLayout, stage: int) -> tuple[int, int]:
    """Return the dense and the expert parameters of one rank of a pipeline stage.

    Layers are cut evenly; a tied embedding has a copy on the last stage of a pipeline.
    """
    count = -(-shape.layers // layout.pipeline)
    dense, experts = 0, 0
    for layer in range(stage * count, min((stage + 1) * count, shape.layers)):
        for weight in shape.weights(layer):
            if weight.expert:
                experts += weight.elements * shape.experts // (layout.expert * layout.expert_tensor)
            else:
                dense += weight.elements // (1 if weight.cut in ("whole", "latent") else layout.tensor)
    vocabulary = shape.padded_vocab(layout.tensor) * shape.hidden // layout.tensor
    first, last = stage == 0, stage == layout.pipeline - 1
    dense += vocabulary if first else 0
    if last and not (shape.tied and first):
        dense += shape.hidden if shape.scalar_head else vocabulary
    return dense + (shape.final_norm_parameters if last else 0), experts


def rollout_parameters(shape: ModelShape, tensor: int) -> int:
    """Return the parameters of one rank of an engine that cuts the model ``tensor`` ways."""
    kv_copies = max(1, tensor // shape.kv_heads)
    whole = shape.replicated_parameters
    layers = shape.layer_dense_total - whole + shape.routed_expert_parameters
    copied = shape.key_value_parameters * (kv_copies - 1)
    vocabulary = shape.padded_vocab(tensor) * shape.hidden // tensor * (1 if shape.tied else 2)
    return (layers + copied) // tensor + whole + vocabulary + shape.final_norm_parameters


def activation_elements(shape: ModelShape, layout: ParallelLayout, recompute: str) -> float:
    """Return the elements that one layer keeps per token for the backward pass.

    Kept are the inputs of norms, projections and the activation, query, key, value and the attention's
    output. ``selective`` recomputes attention's core, ``full`` keeps a layer's input alone.
    """
    tensor = layout.tensor
    whole = tensor if layout.sequence_parallel else 1
    if recompute == "full":
        return shape.hidden / whole
    if shape.kv_lora:
        qk = shape.qk_nope + shape.qk_rope
        attention = 2 * shape.heads * (qk + shape.v_head_dim) / tensor + shape.q_lora + shape.kv_lora
    else:
        attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim / tensor
    moe = shape.moe_layers / shape.layers
    width = (1 - moe) * shape.mlp_width / tensor + moe * shape.shared_width / tensor
    # Sequence parallelism cuts the tokens before they go to their experts.
    width += moe * shape.experts_per_token * shape.expert_width / whole
    moved = 2 * moe * shape.experts_per_token * shape.hidden / whole
    return 4 * shape.hidden / whole + attention + 4 * width + moved


def in_flight(layout: ParallelLayout, stage: int, microbatches: int) -> float:
    """Return how many micro-batches' activations a stage holds at once (1F1B, interleaved if virtual)."""
    stages = layout.pipeline
    waiting = min(microbatches, stages - stage)
    if layout.virtual_pipeline > 1:
        waiting *= 1 + (stages - 1) / (stages * layout.virtual_pipeline)
    return max(1.0, waiting)


def kv_bytes_per_token(shape: ModelShape, tensor: int, dtype_bytes: int) -> int:
    """Return the key-value cache bytes of one token on one rank of the engine.

    A latent cache has no heads to divide by.
    """
    if shape.kv_lora:
        return shape.layers * (shape.kv_lora + shape.qk_rope) * dtype_bytes
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype_bytes // min(tensor, shape.kv_heads)


def memory_plan(
    config: RunConfig, layouts: Mapping[str, ParallelLayout], shape: ModelShape, batch: BatchPlan
) -> list[RankMemory]:
    """Return for each distinct rank what it holds; ranks that hold the same are listed once."""
    found: dict[tuple[MemoryItem, ...], int] = {}
    for rank in sorted({rank for layout in layouts.values() for rank in layout.ranks}):
        items: list[MemoryItem] = []
        if rank in layouts["actor"].ranks:
            items.extend(_trained(config, "actor", layouts["actor"], rank, shape, batch))
        if "critic" in layouts and rank in layouts["critic"].ranks:
            items.extend(_trained(config, "critic", layouts["critic"], rank, shape, batch))
        for role, layout in layouts.items():
            if role.split(".")[0] in ("reference", "reward") and rank in layout.ranks:
                items.extend(_frozen(config, role, layout, rank, shape))
        if rank in layouts["rollout"].ranks:
            items.extend(_rollout(config, layouts["rollout"], shape, batch))
        if config.gpu_memory_gib is not None:
            items.append(MemoryItem("runtime", RUNTIME_BYTES, PHASES, "CUDA, NCCL, fragmentation"))
        found.setdefault(tuple(items), rank)
    ranks = [RankMemory(rank, items) for items, rank in found.items()]
    return sorted(ranks, key=lambda memory: -memory.peak)


def _trained(
    config: RunConfig, role: str, layout: ParallelLayout, rank: int, shape: ModelShape, batch: BatchPlan
) -> list[MemoryItem]:
    """Count a role that learns; a critic is taken to have the actor's shape."""
    section = config.actor if role == "actor" else config.critic
    assert section is not None

    def named(item: str) -> str:
        return item if role == "actor" else f"{role} {item}"

    stage = layout.coordinates(rank)[3]
    dense, experts = stage_parameters(shape, layout, stage)
    size = DTYPE_BYTES[config.model.dtype]
    states = 8 if config.model.dtype == "float32" else 12
    optimizer = states * (dense + experts)
    shared = "not shared"
    if section.optimizer.distributed:
        copies = layout.data * layout.context
        optimizer = states * (dense // copies + experts // layout.expert_data)
        shared = f"shared by {copies}"
    training = ("score", "learn") if section.offload else PHASES
    count = f"{(dense + experts) / 1e6:,.1f}M parameters"
    items = [
        MemoryItem(f"{role} weights", size * (dense + experts), training, f"{count} x {size} B"),
        MemoryItem(named("gradients"), 4 * (dense + experts), training, f"{count} x 4 B (float32)"),
    ]
    if not section.optimizer.offload:
        how = f"{states} B per parameter, {shared}"
        items.append(MemoryItem(named("optimizer"), optimizer, training, how))
    tokens = batch.tokens_per_microbatch // layout.context
    elements = activation_elements(shape, layout, section.recompute)
    layers = -(-shape.layers // layout.pipeline)
    held = in_flight(layout, stage, batch.microbatches)
    activations = size * tokens * elements * layers * held
    if section.recompute == "full":
        activations += size * tokens * activation_elements(shape, layout, "none")
    how = f"{tokens} tokens x {layers} layers x {held:.3g} in flight, recompute {section.recompute}"
    items.append(MemoryItem(named("activations"), int(activations), ("learn",), how))
    forward = 2 * activation_elements(shape, layout, "none") * size * tokens
    items.append(
        MemoryItem(named("forward activations"), int(forward), ("score",), f"{tokens} tokens, 2 layers")
    )
    if stage == layout.pipeline - 1 and role == "actor":
        shard = shape.padded_vocab(layout.tensor) // layout.tensor
        chunk = min(max(64, LOGITS_ELEMENTS // shard), tokens)
        logits = chunk * shard * 4 * 2
        how = f"{chunk} tokens x vocabulary / {layout.tensor} x 2 float32 copies"
        items.append(MemoryItem(named("logits chunk"), logits, ("score", "learn"), how))
    return items


def _frozen(
    config: RunConfig, role: str, layout: ParallelLayout, rank: int, shape: ModelShape
) -> list[MemoryItem]:
    dense, experts = stage_parameters(shape, layout, layout.coordinates(rank)[3])
    size = DTYPE_BYTES[config.model.dtype]
    how = f"{(dense + experts) / 1e6:,.1f}M parameters x {size} B"
    if role == "reference":
        offload = config.reference is not None and config.reference.offload
    else:
        offload = config.reward.models[role.removeprefix("reward.")].offload
    return [MemoryItem(f"{role} weights", size * (dense + experts), ("score",) if offload else PHASES, how)]


def _rollout(
    config: RunConfig, layout: ParallelLayout, shape: ModelShape, batch: BatchPlan
) -> list[MemoryItem]:
    size = DTYPE_BYTES[config.model.dtype]
    parameters = rollout_parameters(shape, layout.tensor)
    weights = size * parameters
    staging = min(config.hybrid_engine.staging_bytes, 2 * weights)
    per_token = kv_bytes_per_token(shape, layout.tensor, size)
    cache = per_token * batch.rows_per_replica[1] * batch.longest_row
    how = f"{batch.rows_per_replica[1]} rows x {batch.longest_row} tokens x {per_token} B: all at full length"
    if config.gpu_memory_gib is not None:
        room = max(0, int(config.rollout.memory_fraction * config.gpu_memory_gib * 2**30) - weights)
        if room < cache:
            cache, how = (
                room,
                f"what memory_fraction leaves; holds {room // max(1, per_token):,} tokens at once",
            )
    return [
        MemoryItem(
            "rollout weights", weights, ("generate",), f"{parameters / 1e6:,.1f}M parameters x {size} B"
        ),
        MemoryItem("key-value cache", cache, ("generate",), how),
        MemoryItem("sync staging", staging, ("generate",), "at most, while weights move"),
    ]
