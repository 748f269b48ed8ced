"""Bytes per GPU of training and generation.

Weights, gradients and optimizer: Megatron distributed optimizer (Korthikanti et al. 2022 for the
activation terms; arXiv 2603.07685 section on memory for MoE). With 2-byte weights w and g-byte
gradients: (2 + g)(P_d + P_e) + o (P_d / (dp cp) + P_e / edp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.planner.constants import GB, PRECISION_BYTES, Constants
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape

if TYPE_CHECKING:
    from megatron_rl.planner.generate import RolloutLayout


@dataclass(frozen=True)
class OptimizerChoice:
    """Say how the optimizer keeps its state; bytes are per parameter."""

    distributed: bool = True
    offload: bool = False
    gradient_bytes: float = 4
    state_bytes: float = 12


@dataclass(frozen=True)
class TrainingMemory:
    """Hold bytes on the fullest GPU of a training phase."""

    weights_and_gradients: float
    optimizer: float
    activations: float
    logits: float
    overhead: float

    @property
    def states(self) -> float:
        """Return what stays between steps: weights, gradients and optimizer."""
        return self.weights_and_gradients + self.optimizer

    @property
    def total(self) -> float:
        """Return the peak."""
        return self.states + self.activations + self.logits + self.overhead


def parameters_per_gpu(model: ModelShape, layout: ParallelLayout) -> tuple[float, float]:
    """Return (dense, routed expert) parameters on the fullest GPU, before any sharding over data.

    dense = layers / (tp pp) plus one embedding V h / tp on the first or last stage (both when pp = 1).
    Where the layers do not divide by the stages, the stages with an embedding are taken to hold fewer
    layers, so that everything spreads evenly.
    """
    share = 1 / layout.pipeline
    embeddings = model.embedding_parameters * (1 if model.tied else 2)
    if layout.pipeline > 1:
        embeddings = embeddings * share if model.layers % layout.pipeline else model.embedding_parameters
    dense = (model.layer_dense_total * share + embeddings) / layout.tensor
    expert = model.routed_expert_parameters * share / (layout.expert * layout.expert_tensor)
    return dense, expert


def activation_bytes_per_token_layer(model: ModelShape, layout: ParallelLayout, recompute: str) -> float:
    """Return bytes that one token keeps in an average layer on one GPU for the backward pass.

    Full-width tensors: two norm inputs, two norm outputs (8h); sharded: q, k, v, attention output, and
    the feed-forward's inner tensors. A plain GPT layer gives 32-34 h, as Korthikanti et al. table 2
    without attention scores (flash attention). Full-width tensors divide by tp only with sequence
    parallelism. ``selective`` recomputes core attention, which keeps nothing beside its output under
    flash attention, so it holds what ``none`` holds; ``full`` keeps the layer input.
    """
    wide_share = layout.tensor if layout.sequence_parallel or layout.tensor == 1 else 1
    if recompute == "full":
        return 2.0 * model.hidden / wide_share
    wide = 8.0 * model.hidden
    if model.mla:
        qk = model.heads * (model.qk_nope + model.qk_rope)
        attention = 2.0 * (2 * qk + model.heads * (model.qk_nope + 2 * model.v_head_dim))
        attention += 4.0 * (model.q_lora + model.kv_lora)
    else:
        query = model.heads * model.head_dim * (3 if model.output_gate else 2)
        attention = 2.0 * (query + 2 * model.kv_heads * model.head_dim)
    inner = 6.0 if model.gated else 4.0
    dense = inner * model.mlp_width
    moe = 0.0
    if model.experts:
        moe = inner * (
            model.experts_per_token * model.expert_width / layout.expert_tensor + model.shared_width
        )
        moe += 2.0 * model.experts_per_token * model.hidden
    moe_share = model.moe_layers / model.layers
    return wide / wide_share + (attention + dense * (1 - moe_share) + moe * moe_share) / layout.tensor


def layers_in_flight(model: ModelShape, layout: ParallelLayout, micro_batches: int) -> float:
    """Return layers x micro-batches whose activations the first stage holds at once.

    1F1B: L/pp x min(m, pp); interleaved: L (1 + (pp-1)/(pp v)) (Narayanan et al. 2021, section 2.2).
    """
    pipeline, virtual = layout.pipeline, layout.virtual_pipeline
    stage = model.layers / pipeline
    if virtual > 1:
        return stage * min(micro_batches, pipeline * (1 + (pipeline - 1) / (pipeline * virtual)))
    return stage * min(micro_batches, pipeline)


def activation_bytes(
    model: ModelShape, layout: ParallelLayout, tokens: float, micro_batches: int, recompute: str
) -> float:
    """Return activation bytes on the first stage for micro-batches of ``tokens`` tokens."""
    tokens = tokens / layout.context
    kept = activation_bytes_per_token_layer(model, layout, recompute) * layers_in_flight(
        model, layout, micro_batches
    )
    live = activation_bytes_per_token_layer(model, layout, "none") if recompute == "full" else 0.0
    return tokens * (kept + live)


def training_memory(
    model: ModelShape,
    layout: ParallelLayout,
    optimizer: OptimizerChoice,
    constants: Constants,
    tokens: float,
    micro_batches: int,
    recompute: str,
) -> TrainingMemory:
    """Return bytes on the fullest GPU while it trains."""
    dense, expert = parameters_per_gpu(model, layout)
    shards = layout.data * layout.context
    parameters = dense + expert
    state = dense / shards + expert / layout.expert_data if optimizer.distributed else parameters
    state = 0.0 if optimizer.offload else optimizer.state_bytes * state
    logits = tokens / layout.context * model.vocab / layout.tensor * constants.memory.logits_bytes_per_element
    activations = activation_bytes(model, layout, tokens, micro_batches, recompute)
    return TrainingMemory(
        weights_and_gradients=(2.0 + optimizer.gradient_bytes) * parameters,
        optimizer=state,
        activations=activations,
        logits=logits if layout.pipeline == 1 else max(0.0, logits - activations * (1 - 1 / layout.pipeline)),
        overhead=constants.memory.context_gigabytes * GB,
    )


def rollout_weight_bytes(model: ModelShape, rollout: RolloutLayout, precision: str) -> float:
    """Return weight bytes on one rollout GPU: 2N / (t p), experts over max(t, ep)."""
    size = PRECISION_BYTES.get(precision, 2)
    dense = model.parameters - model.routed_expert_parameters
    spread = max(rollout.tensor, rollout.expert)
    return size * (dense / rollout.tensor + model.routed_expert_parameters / spread) / rollout.pipeline


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
