"""Memory of a rank that trains, computes log-probs or generates, as equations of the model's shape.

Parameters, gradients and optimizer states follow Megatron's distributed optimizer (float32 main
gradients; float32 master weights and two moments in addition to bfloat16 weights; Rajbhandari et al. 2020).
Activations are counted tensor by tensor, as autograd saves them (the accounting of Korthikanti et al. 2022).
Tests compare the counts of this package's own layers with the tensors that a real forward pass saves. The
counts of Transformer Engine's fused layers are Korthikanti's, with flash attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_rl.shapes.blocks.block import Block, LocalLayer
from megatron_rl.shapes.layout import ParallelLayout, default_stage_layers
from megatron_rl.shapes.model import ModelShape

RUNTIME_BYTES = 5 * 2**30
"""Bytes of a GPU that CUDA, NCCL and allocator fragmentation occupy."""
NVLINK_PEER_BYTES = 450 * 2**20
"""Bytes of NCCL's buffers for messages with one peer on the same node.

On 8 H100s an all-to-all took 3.3 GB for 7 peers: 32 channels with 10 and 2 MiB each (NVIDIA/nccl issue 1685).
"""
NETWORK_PEERS_BYTES = 128 * 2**20
"""Bytes of NCCL's buffers for messages with all ranks of other nodes together.

These peers share a pool for each direction: 32 channels of 16 steps of 128 KiB (NCCL, src/transport/net.cc).
"""
LOGITS_ELEMENTS = 2**25
"""Number of logits in one chunk of a vocabulary shard: 128 MiB in float32, for a vocabulary of any size."""
TILE_TOKENS = 4096
"""Maximum number of tokens in a tile of logits, which the backward pass of a half-precision model computes
at once."""


def stage_parameters(
    shape: ModelShape, layout: ParallelLayout, layers: Sequence[int], first: bool, last: bool
) -> tuple[int, int]:
    """Count the parameters outside and inside routed experts on one rank of a pipeline stage.

    ``layers``: layers of the stage. ``first``, ``last``: whether the stage is the first or the last of the
    pipeline. A tied embedding has a copy on the last stage. The down projections of latent attention
    are assumed to be replicated, as in layers of Transformer Engine. Megatron's layers without Transformer
    Engine shard these projections.
    """
    # Layers with equal blocks have equally many parameters.
    dense_parameters = 0
    expert_parameters = 0
    for block, count in shape.count_blocks(layers).items():
        sharded_parameters, replicated_parameters, routed_parameters = shape.block_parameters(block)
        dense_parameters += count * (sharded_parameters // layout.tensor + replicated_parameters)
        expert_parameters += count * routed_parameters // (layout.expert * layout.expert_tensor)

    # Embedding, final norm and output layer are on the ends of the pipeline.
    vocabulary_parameters = shape.padded_vocab(layout.tensor) * shape.hidden // layout.tensor
    if first:
        dense_parameters += vocabulary_parameters + shape.learned_positions * shape.hidden
    output_parameters = vocabulary_parameters
    if shape.scalar_head:
        output_parameters = shape.hidden
    if last and not (shape.tied and first):
        dense_parameters += output_parameters
    if last:
        dense_parameters += shape.final_norm_parameters
    return dense_parameters, expert_parameters


def rollout_parameters(shape: ModelShape, tensor: int, expert: int = 1, pipeline: int = 1) -> int:
    """Return the number of parameters on one rank of a rollout engine.

    ``expert`` is the number of ranks over which routed experts are distributed, if larger than ``tensor``.
    """
    # With fewer key-value heads than ranks, each head is copied to the same number of ranks.
    replicated_parameters = shape.replicated_parameters
    sharded_parameters = shape.nonexpert_layer_parameters - replicated_parameters
    for (heads, engine_copies), parameters in shape.key_value_parameters.items():
        copies = engine_copies * max(1, tensor // heads)
        sharded_parameters += parameters * (copies - 1)
    layer_parameters = (
        sharded_parameters // tensor
        + replicated_parameters
        + shape.routed_expert_parameters // max(tensor, expert)
    )

    # Embedding and output layer, unless they share their parameters.
    vocabulary_parameters = shape.padded_vocab(tensor) * shape.hidden // tensor
    if not shape.tied:
        vocabulary_parameters *= 2

    # Approximation: the stages of the engine's pipeline have equally many parameters.
    return (layer_parameters + vocabulary_parameters + shape.final_norm_parameters) // pipeline


@lru_cache(maxsize=4096)
def saved_activation_bytes(
    shape: ModelShape,
    block: Block,
    tensor: int,
    expert_tensor: int,
    token_shards: int,
    recompute: str,
    dtype_bytes: int = 2,
    fused: bool = True,
) -> float:
    """Return the bytes that one layer saves for the backward pass, per token of a micro-batch on a rank.

    ``fused``: whether the layer is Transformer Engine's; otherwise it is Megatron's layer without Transformer
    Engine. ``recompute``: "full" saves only the layer's input, and "selective" recomputes core attention.
    Flash attention saves only the output of core attention, so with flash attention "selective" saves as much
    as "none". Routed tokens are assumed to spread evenly over experts.
    """
    # Full recomputation repeats the forward pass from the layer's input.
    if recompute == "full":
        return shape.hidden / token_shards * dtype_bytes

    layer = LocalLayer(shape, tensor, expert_tensor, token_shards, dtype_bytes, fused, recompute)
    elements = _count_norm_elements(layer)
    elements += block.mixer.saved_elements(layer)
    elements += block.feed_forward.saved_elements(layer)
    return elements * dtype_bytes


def _count_norm_elements(layer: LocalLayer) -> float:
    """Count the elements per token that a layer's norms save on a rank, including their inputs."""
    shape = layer.shape
    if layer.fused:
        # Input and output of each of two norms: the output is the next projection's input.
        tensor_count = 4
        if shape.pre_norms and shape.post_norms:
            # Two more norms, which save only their inputs.
            tensor_count = 6
        return tensor_count * shape.hidden / layer.token_shards

    # Without a norm before them, the first projections of mixer and feed-forward each save their input.
    elements = 2.0 * shape.hidden
    if shape.pre_norms:
        elements = 2 * layer.unfused_norm_elements(shape.hidden)
    if shape.post_norms:
        elements += 2 * layer.unfused_norm_elements(shape.hidden, output=False)
    return elements / layer.token_shards


def _count_live_elements(block: Block, layer: LocalLayer) -> float:
    """Return the peak number of a layer's activation elements per token in a forward pass without gradients.

    The layer is one without Transformer Engine; ``block`` is its mixer (such as attention) and feed-forward.
    """
    # Hidden states, such as the residual stream, are sharded by sequence parallelism.
    hidden = layer.shape.hidden
    hidden_elements = block.feed_forward.live_hidden_states(layer.shape) * hidden / layer.token_shards

    # Sequence parallelism also gathers the complete input of a projection.
    gathered_elements = 0
    if layer.token_shards > 1:
        gathered_elements = hidden

    # The mixer and the feed-forward run one after the other, so count the tensors of the larger one.
    inner_elements = max(block.mixer.live_elements(layer), block.feed_forward.live_elements(layer))
    return hidden_elements + gathered_elements + inner_elements


def count_microbatches_in_flight(layout: ParallelLayout, stage: int, microbatches: int) -> float:
    """Return the number of micro-batches whose activations a pipeline stage stores at once.

    The result is a fraction if only some chunks of the stage are stored. With m micro-batches, stage s of p
    stages stores min(m, p - s) in the 1F1B schedule. With v chunks per stage, the interleaved schedule stores
    2 (p - s - 1) + (v - 1) p + 1 chunks of 1 / v of a stage (Narayanan et al. 2021, section 2.2).
    """
    stages = layout.pipeline
    virtual = layout.virtual_pipeline
    if virtual == 1:
        return max(1, min(microbatches, stages - stage))
    chunks = min(microbatches * virtual, 2 * (stages - stage - 1) + (virtual - 1) * stages + 1)
    return chunks / virtual


@dataclass(frozen=True)
class LayerImplementation:
    """Properties of a model's layers on which their memory depends: element size, kernels, recomputation."""

    dtype_bytes: int = 2
    """Bytes of an element of the model's dtype."""
    fused: bool = True
    """Whether the layers are Transformer Engine's. Otherwise they are Megatron's layers without it."""
    recompute: str = "none"
    """Activation recomputation: ``none``, ``selective`` or ``full``."""

    def saved_bytes(self, shape: ModelShape, layout: ParallelLayout, block: Block, recompute: str) -> float:
        """Return the bytes per token that a layer saves for the backward pass on a rank.

        ``block``: mixer (such as attention) and feed-forward of the layer. ``recompute`` overrides the field
        of the same name. See `saved_activation_bytes`.
        """
        return saved_activation_bytes(
            shape,
            block,
            layout.tensor,
            layout.expert_tensor,
            layout.token_shards,
            recompute,
            self.dtype_bytes,
            self.fused,
        )

    def local_layer(self, shape: ModelShape, layout: ParallelLayout) -> LocalLayer:
        """Return the properties of a layer of this implementation on one rank of ``layout``."""
        return LocalLayer(
            shape,
            layout.tensor,
            layout.expert_tensor,
            layout.token_shards,
            self.dtype_bytes,
            self.fused,
        )


def activation_bytes(
    shape: ModelShape,
    layout: ParallelLayout,
    layers: Sequence[int],
    tokens: float,
    microbatches_in_flight: float,
    implementation: LayerImplementation,
) -> float:
    """Return the bytes of activations on a rank of a pipeline stage with these layers.

    ``tokens`` is the size of a micro-batch, ``microbatches_in_flight`` the result of
    `count_microbatches_in_flight`. With ``full`` recomputation, the recomputed activations of one layer exist
    in addition to the saved inputs.
    """
    counts = shape.count_blocks(layers)
    local_tokens = tokens / layout.context
    recompute = implementation.recompute

    # Saved activations per token and micro-batch in flight.
    saved_bytes = sum(
        count * implementation.saved_bytes(shape, layout, block, recompute) for block, count in counts.items()
    )

    # The backward pass recomputes one layer at a time: count the largest.
    recomputed_bytes = 0.0
    if recompute == "full":
        recomputed_bytes = max(
            (implementation.saved_bytes(shape, layout, block, "none") for block in counts), default=0.0
        )

    # Tensors of the layer that is being computed.
    layer = implementation.local_layer(shape, layout)
    temporary_bytes = max((block.feed_forward.temporary_elements(layer) for block in counts), default=0.0)
    temporary_bytes *= implementation.dtype_bytes

    return local_tokens * (saved_bytes * microbatches_in_flight + recomputed_bytes + temporary_bytes)


def forward_bytes(
    shape: ModelShape,
    layout: ParallelLayout,
    layers: Sequence[int],
    tokens: float,
    implementation: LayerImplementation,
) -> float:
    """Return the peak bytes of activations in a forward pass without gradients.

    In Megatron's layers without Transformer Engine, the tensors at the peak are counted exactly. For
    Transformer Engine's layers the result is an upper bound: twice the activations that one layer would save
    for a backward pass.
    """
    counts = shape.count_blocks(layers)

    # Without gradients nothing is saved. A tensor exists only until the next layer has read it, so at most
    # two layers have tensors at the same time.
    if implementation.fused:
        live_bytes = 2 * max(
            (implementation.saved_bytes(shape, layout, block, "none") for block in counts), default=0.0
        )
    else:
        layer = implementation.local_layer(shape, layout)
        live_bytes = implementation.dtype_bytes * max(
            (_count_live_elements(block, layer) for block in counts), default=0.0
        )
    return live_bytes * tokens / layout.context


def logits_bytes(shape: ModelShape, layout: ParallelLayout, tokens: float) -> float:
    """Return the bytes of logits on a rank, for micro-batches of ``tokens`` tokens.

    Logits are computed chunk by chunk, and two float32 copies of one chunk exist at once.
    """
    if shape.scalar_head:
        return 0.0
    vocabulary_shard = shape.padded_vocab(layout.tensor) // layout.tensor
    # At least 64 tokens, for a vocabulary of any size, and at most the micro-batch.
    chunk_tokens = min(max(64, LOGITS_ELEMENTS // vocabulary_shard), tokens / layout.context)
    chunk_logits = chunk_tokens * vocabulary_shard
    # Two copies of 4 bytes per logit.
    return chunk_logits * 4 * 2


def head_gradient_bytes(shape: ModelShape, layout: ParallelLayout, tokens: float, dtype_bytes: int) -> float:
    """Return the bytes of the float32 buffers that sum an output layer's gradients (`megatron.log_probs`).

    A half-precision model has two buffers: for the gradients of all hidden states, and for the gradients of
    the weight rows in one tile. A float32 model needs no buffer.
    """
    if shape.scalar_head or dtype_bytes >= 4:
        return 0.0
    vocabulary_shard = shape.padded_vocab(layout.tensor) // layout.tensor
    local_tokens = tokens / layout.context
    tile_tokens = min(local_tokens, TILE_TOKENS)
    tile_elements = max(64, LOGITS_ELEMENTS // vocabulary_shard) * vocabulary_shard
    tile_rows = min(vocabulary_shard, tile_elements / tile_tokens)

    # Gradients of hidden states are summed if the weight has several tiles of rows. Gradients of rows are
    # summed if the micro-batch has several tiles of tokens.
    summed_rows = 0.0
    if tile_rows < vocabulary_shard:
        summed_rows += local_tokens
    if tile_tokens < local_tokens:
        summed_rows += tile_rows
    return 4 * shape.hidden * summed_rows


@dataclass(frozen=True)
class OptimizerChoice:
    """Sharding, location and size of a role's gradients and optimizer states."""

    distributed: bool = True
    """Whether optimizer states are sharded over data-parallel ranks."""
    offload: bool = False
    """Whether optimizer states are in host memory."""
    gradient_bytes: float = 4
    """Bytes of the gradient of a parameter."""
    state_bytes: float = 12
    """Bytes of a parameter's float32 master weight and Adam's two moments."""


@dataclass(frozen=True)
class TrainingMemory:
    """Peak memory on one rank of a model that trains or computes log-probs, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    overhead: float = 0.0
    """Memory outside of tensors: CUDA, NCCL's buffers and fragmentation, such as `RUNTIME_BYTES`."""

    @property
    def states(self) -> float:
        """Return the bytes that are resident between steps: weights, gradients and optimizer states."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Return the peak memory of the rank in bytes: resident states, activations, logits and overhead."""
        return self.states + self.activations + self.logits + self.overhead


def training_memory(
    shape: ModelShape,
    layout: ParallelLayout,
    stages: Sequence[Sequence[int]],
    stage: int,
    optimizer: OptimizerChoice,
    implementation: LayerImplementation,
    tokens: float,
    microbatches: int,
    adapters: tuple[int, int] | None = None,
) -> TrainingMemory:
    """Return the memory of one rank of a pipeline stage that trains on micro-batches of ``tokens`` tokens.

    ``stages`` are the layers of each stage, from `stage_layers`. ``adapters`` are the rank's adapter
    parameters (outside, inside routed experts), which are trained instead of the weights; None trains the
    weights.
    """
    is_last = stage == len(stages) - 1
    dense_parameters, expert_parameters = stage_parameters(shape, layout, stages[stage], stage == 0, is_last)

    # Trainable parameters have gradients and optimizer states. The distributed optimizer shards the states
    # over data-parallel ranks; experts have a separate data-parallel group.
    trainable_parameters = (dense_parameters, expert_parameters)
    if adapters is not None:
        trainable_parameters = adapters
    state_parameters: tuple[float, float] = trainable_parameters
    if optimizer.distributed:
        state_parameters = (
            trainable_parameters[0] / (layout.data * layout.context),
            trainable_parameters[1] / layout.expert_data,
        )

    optimizer_bytes = optimizer.state_bytes * sum(state_parameters)
    if optimizer.offload:
        optimizer_bytes = 0.0

    microbatches_in_flight = count_microbatches_in_flight(layout, stage, microbatches)
    activations = activation_bytes(
        shape, layout, stages[stage], tokens, microbatches_in_flight, implementation
    )

    # Only the last stage has the output layer.
    logits = 0.0
    if is_last:
        logits = logits_bytes(shape, layout, tokens)
        if adapters is None:
            logits += head_gradient_bytes(shape, layout, tokens, implementation.dtype_bytes)
    return TrainingMemory(
        weights=implementation.dtype_bytes * (dense_parameters + expert_parameters + sum(adapters or ())),
        gradients=optimizer.gradient_bytes * sum(trainable_parameters),
        optimizer=optimizer_bytes,
        activations=activations,
        logits=logits,
    )


def forward_only_memory(
    shape: ModelShape,
    layout: ParallelLayout,
    stages: Sequence[Sequence[int]],
    stage: int,
    implementation: LayerImplementation,
    tokens: float,
) -> TrainingMemory:
    """Return the memory of one rank of a pipeline stage, for a model that runs only forward passes."""
    is_last = stage == len(stages) - 1
    parameters = stage_parameters(shape, layout, stages[stage], stage == 0, is_last)
    logits = 0.0
    if is_last:
        logits = logits_bytes(shape, layout, tokens)

    return TrainingMemory(
        weights=implementation.dtype_bytes * sum(parameters),
        gradients=0.0,
        optimizer=0.0,
        activations=forward_bytes(shape, layout, stages[stage], tokens, implementation),
        logits=logits,
    )


def find_representative_stages(shape: ModelShape, stages: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of the stages that can have the largest memory.

    Among stages with equal layers, the earliest stage has the most micro-batches in flight, and it may have
    the embedding. The last stage has the output layer. ``stages``: layers of each stage.
    """
    earliest_by_blocks: dict[frozenset[tuple[Block, int]], int] = {}
    for stage, layers in enumerate(stages):
        block_counts = frozenset(shape.count_blocks(layers).items())
        earliest_by_blocks.setdefault(block_counts, stage)
    last = len(stages) - 1
    return sorted({*earliest_by_blocks.values(), last})


def max_stage_parameters(shape: ModelShape, layout: ParallelLayout) -> tuple[int, int]:
    """Count the parameters of a rank of the largest pipeline stage: (outside, inside routed experts)."""
    stages = default_stage_layers(shape.layers, layout.pipeline, layout.virtual_pipeline)
    last = len(stages) - 1
    parameters = [
        stage_parameters(shape, layout, stages[stage], stage == 0, stage == last)
        for stage in find_representative_stages(shape, stages)
    ]
    return max(parameters, key=sum)
