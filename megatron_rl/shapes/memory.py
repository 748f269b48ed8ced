"""What a rank holds of a model that trains, scores or generates: equations on a shape, one home for all.

Parameters, gradients and optimizer states follow Megatron's distributed optimizer (float32 main
gradients; float32 master weights and two moments beside bfloat16 weights; Rajbhandari et al. 2020).
Activations are counted tensor by tensor, as autograd keeps them (the accounting of Korthikanti et al. 2022):
for this package's own layers they are compared with what a real forward pass saves; for Transformer
Engine's fused layers they are Korthikanti's, with flash attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import LayerKind, ModelShape
from megatron_rl.shapes.pipeline_stages import dealt_out

RUNTIME_BYTES = 5 * 2**30
"""What CUDA, NCCL and allocator fragmentation take on a GPU."""
LOGITS_ELEMENTS = 2**25
"""Logits of a vocabulary shard in one chunk: 128 MiB in float32, whatever the vocabulary."""

ROUTED_COPIES = 5
"""How often our own layers hold routed tokens at once: on their way to experts, in them, and back."""


def stage_parameters(
    shape: ModelShape, layout: ParallelLayout, layers: Sequence[int], first: bool, last: bool
) -> tuple[int, int]:
    """Return the dense and the expert parameters of one rank of a pipeline stage that has these layers.

    A tied embedding has a copy on the last stage of a pipeline. Latent attention's down projections count
    whole, as Transformer Engine keeps them; Megatron's own layers cut them.
    """
    dense = experts = 0
    for kind, count in shape.kinds_of(layers).items():
        cut, whole, expert = shape.kind_parameters(kind)
        dense += count * (cut // layout.tensor + whole)
        experts += count * expert // (layout.expert * layout.expert_tensor)
    vocabulary = shape.padded_vocab(layout.tensor) * shape.hidden // layout.tensor
    dense += vocabulary + shape.learned_positions * shape.hidden if first else 0
    if last and not (shape.tied and first):
        dense += shape.hidden if shape.scalar_head else vocabulary
    return dense + (shape.final_norm_parameters if last else 0), experts


def rollout_parameters(shape: ModelShape, tensor: int, expert: int = 1, pipeline: int = 1) -> int:
    """Return the parameters of one rank of an engine; ``expert`` spreads routed experts over more ranks."""
    copies = max(1, tensor // shape.kv_heads)
    whole = shape.replicated_parameters
    cut = shape.layer_dense_total - whole + shape.key_value_parameters * (copies - 1)
    layers = cut // tensor + whole + shape.routed_expert_parameters // max(tensor, expert)
    vocabulary = shape.padded_vocab(tensor) * shape.hidden // tensor * (1 if shape.tied else 2)
    return (layers + vocabulary + shape.final_norm_parameters) // pipeline


@lru_cache(maxsize=4096)
def kept_bytes(
    shape: ModelShape,
    kind: LayerKind,
    tensor: int,
    expert_tensor: int,
    token_shards: int,
    recompute: str,
    dtype_bytes: int = 2,
    fused: bool = True,
) -> float:
    """Return the bytes that one layer keeps for the backward pass, per token of a micro-batch on a rank.

    ``fused`` takes Transformer Engine's layers, otherwise this
    package's own. ``full`` recomputation keeps a layer's input, ``selective`` does not keep what attention's
    core makes; flash attention makes nothing beside its output, so there it holds what ``none`` holds.
    Routed tokens are taken to spread evenly over experts.
    """
    if recompute == "full":
        return shape.hidden / token_shards * dtype_bytes
    if fused:
        layer = _FusedLayer(shape, tensor, token_shards)
    else:
        layer = _OwnLayer(shape, tensor, token_shards, dtype_bytes)
    elements = layer.norms() + layer.attention(recompute)
    if kind.experts:
        # Experts see the tokens of all their tensor ranks, cut or not.
        experts = shape.experts_per_token / token_shards
        elements += layer.mlp(shape.shared_width / tensor) + layer.routed(shape.expert_width) * experts
        elements += experts * expert_tensor * shape.hidden + layer.router() / token_shards
    else:
        elements += layer.mlp(shape.mlp_width / tensor)
    return elements * dtype_bytes


@dataclass(frozen=True)
class _FusedLayer:
    """Count the elements that Transformer Engine's layers keep per token."""

    shape: ModelShape
    tensor: int
    split: int

    def norms(self) -> float:
        """Count each norm's input and output; the output is the input of the projection behind it."""
        return (6 if self.shape.sandwich_norms else 4) * self.shape.hidden / self.split

    def attention(self, recompute: str) -> float:
        shape, heads = self.shape, self.shape.heads / self.tensor
        if shape.mla:
            core = heads * (2 * shape.qk_dim + shape.qk_nope + 2 * shape.v_head_dim)
            return core + 2 * (shape.q_lora + shape.kv_lora) / self.split
        groups = shape.kv_heads / self.tensor
        queries = (3 if shape.output_gate else 2) + shape.qk_norm
        return shape.head_dim * (queries * heads + (2 + shape.qk_norm) * groups)

    def mlp(self, width: float) -> float:
        return (3 if self.shape.gated else 2) * width

    def routed(self, width: float) -> float:
        return self.mlp(width)

    def router(self) -> float:
        return 2.0 * self.shape.experts


@dataclass(frozen=True)
class _OwnLayer:
    """Count the elements that Megatron's plain layers with this package's norm and attention keep per token.

    Nothing is fused but the core of attention, which sees whole heads: keys and values are repeated.
    """

    shape: ModelShape
    tensor: int
    split: int
    dtype_bytes: int

    def _norm(self, width: float, output: bool = True) -> float:
        """Count a norm's float32 input, the normalised values, and the output where something keeps it."""
        wide = 4 / self.dtype_bytes
        # Norms whose weight is counted from zero multiply in float32.
        return width * (wide + (wide if self.shape.sandwich_norms else 1) + output)

    def norms(self) -> float:
        behind = 2 * self._norm(self.shape.hidden, output=False) if self.shape.sandwich_norms else 0
        return (2 * self._norm(self.shape.hidden) + behind) / self.split

    def attention(self, recompute: str) -> float:
        shape, heads, groups = self.shape, self.shape.heads / self.tensor, self.shape.kv_heads / self.tensor
        output = heads * shape.value_dim
        core = 2 * heads * (shape.qk_dim + shape.value_dim) + heads * 4 / self.dtype_bytes
        if shape.mla:
            if recompute == "selective":
                core = heads * (2 * shape.qk_dim + shape.v_head_dim)
            return core + output + 4 * shape.qk_rope + self._norm(shape.q_lora + shape.kv_lora) / self.split
        fused = shape.head_dim * (heads + 2 * groups)
        norms = self._norm((heads + groups) * shape.head_dim, output=False) if shape.qk_norm else 0
        shared = shape.qk_norm and self.dtype_bytes == 4
        if shared:
            # Keys are kept as a part of the whole projection, and queries too where they lie in one piece.
            norms += shape.head_dim * (groups + (heads if groups > 1 else 0))
        if recompute == "selective":
            core = shape.head_dim * (heads + groups) + (0 if shared else fused)
        return core + output + 4 * shape.head_dim + norms

    def mlp(self, width: float) -> float:
        """Count gate and up together, the activation, up once more, and their product."""
        return 5 * width

    def routed(self, width: float) -> float:
        return 6 * width  # and the product once more, times the router's weight

    def router(self) -> float:
        chosen = 5 * self.shape.experts_per_token * 4 / self.dtype_bytes
        return self.shape.experts * (1 + 1 / self.dtype_bytes) + chosen

    def forward(self, kind: LayerKind) -> float:
        """Count what exists at once in a forward pass without gradients, in attention or behind it.

        Attention holds its projections, and their copies with the tokens of a row together; an MLP gate and
        up, the activation, up plus its offset, and their product; experts the routed tokens: sorted,
        exchanged, sorted by expert, multiplied, and put together again.
        """
        shape, heads, groups = self.shape, self.shape.heads / self.tensor, self.shape.kv_heads / self.tensor
        if shape.mla:
            attention = heads * (4 * shape.qk_dim + 3 * shape.v_head_dim)
        else:
            attention = shape.head_dim * (7 * heads + 3 * groups)
        behind = 5 * shape.mlp_width / self.tensor
        around = 4 * shape.hidden / self.split
        if kind.experts:
            behind = ROUTED_COPIES * shape.experts_per_token * shape.hidden / self.split
        if kind.experts and shape.shared_width:
            around += shape.hidden / self.split
        gathered = shape.hidden if self.split > 1 else 0
        return around + gathered + max(attention, behind)


def in_flight(layout: ParallelLayout, stage: int, microbatches: int) -> float:
    """Return how many micro-batches' activations a stage holds at once, in stages' worth of layers.

    1F1B: min(m, p - s). Interleaved: 2 (p - s - 1) + (v - 1) p + 1 chunks of 1 / v of a stage (Narayanan et
    al. 2021, section 2.2).
    """
    stages, virtual = layout.pipeline, layout.virtual_pipeline
    if virtual == 1:
        return max(1, min(microbatches, stages - stage))
    chunks = min(microbatches * virtual, 2 * (stages - stage - 1) + (virtual - 1) * stages + 1)
    return chunks / virtual


@dataclass(frozen=True)
class Layers:
    """Say how layers are built: the dtype's bytes, Transformer Engine's or own, and what is recomputed."""

    dtype_bytes: int = 2
    fused: bool = True
    recompute: str = "none"

    def kept(self, shape: ModelShape, layout: ParallelLayout, kind: LayerKind, recompute: str) -> float:
        """Return `kept_bytes` in a layout."""
        return kept_bytes(
            shape, kind, layout.tensor, layout.expert_tensor, layout.token_shards, recompute,
            self.dtype_bytes, self.fused,
        )  # fmt: skip


def activation_bytes(
    shape: ModelShape,
    layout: ParallelLayout,
    layers: Sequence[int],
    tokens: float,
    flight: float,
    built: Layers,
) -> float:
    """Return the bytes of activations of a stage with these layers, for micro-batches of ``tokens`` tokens.

    Under ``full`` recomputation one layer at a time exists whole.
    """
    kinds = shape.kinds_of(layers)
    tokens = tokens / layout.context
    kept = sum(count * built.kept(shape, layout, kind, built.recompute) for kind, count in kinds.items())
    live = max((built.kept(shape, layout, kind, "none") for kind in kinds), default=0.0)
    routed = 0.0
    if any(kind.experts for kind in kinds):
        # Routed tokens on their way to experts and back, where one copy is kept; fused, the gradients of two.
        copies = 2 if built.fused else ROUTED_COPIES - 1
        routed = copies * shape.experts_per_token * shape.hidden / layout.token_shards * built.dtype_bytes
    return tokens * (kept * flight + (live if built.recompute == "full" else 0.0) + routed)


def forward_bytes(
    shape: ModelShape, layout: ParallelLayout, layers: Sequence[int], tokens: float, built: Layers
) -> float:
    """Return the bytes of activations of a forward pass without gradients: of two fused layers at most."""
    kinds = shape.kinds_of(layers)
    if built.fused:
        live = 2 * max((built.kept(shape, layout, kind, "none") for kind in kinds), default=0.0)
    else:
        layer = _OwnLayer(shape, layout.tensor, layout.token_shards, built.dtype_bytes)
        live = built.dtype_bytes * max(map(layer.forward, kinds), default=0.0)
    return live * tokens / layout.context


def logits_bytes(shape: ModelShape, layout: ParallelLayout, tokens: float) -> float:
    """Return the bytes of a chunk of logits, two copies in float32: they exist chunk by chunk."""
    shard = shape.padded_vocab(layout.tensor) // layout.tensor
    chunk = min(max(64, LOGITS_ELEMENTS // shard), tokens / layout.context)
    return 0.0 if shape.scalar_head else chunk * shard * 4 * 2


@dataclass(frozen=True)
class OptimizerChoice:
    """Say how the optimizer keeps its state; bytes are per parameter."""

    distributed: bool = True
    offload: bool = False
    gradient_bytes: float = 4
    state_bytes: float = 12


@dataclass(frozen=True)
class TrainingMemory:
    """Hold the bytes on one rank of a model that trains, or that scores."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    overhead: float = 0.0

    @property
    def states(self) -> float:
        """Return what stays between steps: weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Return the peak."""
        return self.states + self.activations + self.logits + self.overhead


def training_memory(
    shape: ModelShape,
    layout: ParallelLayout,
    stages: Sequence[Sequence[int]],
    stage: int,
    optimizer: OptimizerChoice,
    built: Layers,
    tokens: float,
    microbatches: int,
    adapters: tuple[int, int] | None = None,
) -> TrainingMemory:
    """Return the bytes on a rank of one pipeline stage while it trains micro-batches of ``tokens`` tokens.

    ``stages`` are the layers of each, as `stages.stage_layers` deals them out. ``adapters`` are the
    parameters on the rank that learn in the place of its weights, outside experts and in them, None where
    these learn.
    """
    last = stage == len(stages) - 1
    dense, experts = stage_parameters(shape, layout, stages[stage], stage == 0, last)
    learning = state = (dense, experts) if adapters is None else adapters
    if optimizer.distributed:
        state = learning[0] / (layout.data * layout.context), learning[1] / layout.expert_data
    flight = in_flight(layout, stage, microbatches)
    kept = activation_bytes(shape, layout, stages[stage], tokens, flight, built)
    return TrainingMemory(
        weights=built.dtype_bytes * (dense + experts + sum(adapters or ())),
        gradients=optimizer.gradient_bytes * sum(learning),
        optimizer=0.0 if optimizer.offload else optimizer.state_bytes * sum(state),
        activations=kept,
        logits=logits_bytes(shape, layout, tokens) if last else 0.0,
    )


def scoring_memory(
    shape: ModelShape,
    layout: ParallelLayout,
    stages: Sequence[Sequence[int]],
    stage: int,
    built: Layers,
    tokens: float,
) -> TrainingMemory:
    """Return the bytes on a rank of one pipeline stage of a model that only scores."""
    last = stage == len(stages) - 1
    return TrainingMemory(
        weights=built.dtype_bytes * sum(stage_parameters(shape, layout, stages[stage], stage == 0, last)),
        gradients=0.0,
        optimizer=0.0,
        activations=forward_bytes(shape, layout, stages[stage], tokens, built),
        logits=logits_bytes(shape, layout, tokens) if last else 0.0,
    )


def telling_stages(count: int) -> list[int]:
    """Return the stages of which one is the fullest: the first, one between, and the last."""
    return sorted({0, min(1, count - 1), count - 1})


def fullest_parameters(shape: ModelShape, layout: ParallelLayout) -> tuple[int, int]:
    """Return the dense and the expert parameters on a rank of the stage that has most."""
    stages = dealt_out(shape.layers, layout.pipeline, layout.virtual_pipeline)
    last = len(stages) - 1
    held = (
        stage_parameters(shape, layout, stages[stage], stage == 0, stage == last)
        for stage in telling_stages(len(stages))
    )
    return max(held, key=sum)
