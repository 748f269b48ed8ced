"""The memory of a rank that trains, computes log-probs or generates with a model: equations on its shape.

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

from megatron_rl.shapes import delta_net_sizes
from megatron_rl.shapes.layout import ParallelLayout, default_stage_layers
from megatron_rl.shapes.model import LayerKind, ModelShape

RUNTIME_BYTES = 5 * 2**30
"""Bytes of a GPU that CUDA, NCCL and allocator fragmentation occupy."""
NVLINK_PEER_BYTES = 450 * 2**20
"""Bytes of NCCL's buffers for messages with one more rank of a node.

On 8 H100s an all-to-all took 3.3 GB for 7 peers: 32 channels with 10 and 2 MiB each (NVIDIA/nccl issue 1685).
"""
NETWORK_PEERS_BYTES = 128 * 2**20
"""Bytes of NCCL's buffers for messages with all ranks of other nodes together.

These peers share a pool for each direction: 32 channels of 16 steps of 128 KiB (NCCL, src/transport/net.cc).
"""
LOGITS_ELEMENTS = 2**25
"""Logits of a vocabulary shard in one chunk: 128 MiB in float32, whatever the vocabulary."""
TILE_TOKENS = 4096
"""Largest number of tokens whose logits the backward pass of a half-precision model has at once."""
ROUTED_COPIES = 5
"""Copies of routed tokens that our own layers hold at once: before, in and after the experts."""


def stage_parameters(
    shape: ModelShape, layout: ParallelLayout, layers: Sequence[int], first: bool, last: bool
) -> tuple[int, int]:
    """Return the dense and the expert parameters on one rank of a pipeline stage with these layers.

    A tied embedding has a copy on the last stage of a pipeline. Latent attention's down projections count as
    replicated, as in Transformer Engine; Megatron's own layers shard them.
    """
    # Layers of one kind have equally many parameters.
    dense = 0
    experts = 0
    for kind, count in shape.kinds_of(layers).items():
        sharded, replicated, routed = shape.kind_parameters(kind)
        dense += count * (sharded // layout.tensor + replicated)
        experts += count * routed // (layout.expert * layout.expert_tensor)

    # Embedding, final norm and output layer are on the ends of the pipeline.
    vocabulary = shape.padded_vocab(layout.tensor) * shape.hidden // layout.tensor
    if first:
        dense += vocabulary + shape.learned_positions * shape.hidden
    output_layer = vocabulary
    if shape.scalar_head:
        output_layer = shape.hidden
    if last and not (shape.tied and first):
        dense += output_layer
    if last:
        dense += shape.final_norm_parameters
    return dense, experts


def rollout_parameters(shape: ModelShape, tensor: int, expert: int = 1, pipeline: int = 1) -> int:
    """Return the parameters on one rank of a rollout engine.

    ``expert`` is the number of ranks over which routed experts are distributed, if larger than ``tensor``.
    """
    # With fewer key-value heads than ranks, each head has equally many copies.
    copies = max(1, tensor // shape.kv_heads)
    replicated = shape.replicated_parameters
    sharded = shape.layer_dense_total - replicated + shape.key_value_parameters * (copies - 1)
    layers = sharded // tensor + replicated + shape.routed_expert_parameters // max(tensor, expert)

    # Embedding and output layer, unless they share their parameters.
    vocabulary = shape.padded_vocab(tensor) * shape.hidden // tensor
    if not shape.tied:
        vocabulary *= 2

    # The stages of the engine's pipeline count as equal.
    return (layers + vocabulary + shape.final_norm_parameters) // pipeline


@lru_cache(maxsize=4096)
def saved_activation_bytes(
    shape: ModelShape,
    kind: LayerKind,
    tensor: int,
    expert_tensor: int,
    token_shards: int,
    recompute: str,
    dtype_bytes: int = 2,
    fused: bool = True,
) -> float:
    """Return the bytes that one layer saves for the backward pass, per token of a micro-batch on a rank.

    ``fused`` selects Transformer Engine's layers, otherwise this package's own. ``full`` recomputation saves
    the layer's input only. ``selective`` recomputes attention's core; flash attention saves only its output,
    so with it ``selective`` saves as much as ``none``. Routed tokens are assumed to spread evenly over
    experts.
    """
    # The forward pass is repeated from the layer's input.
    if recompute == "full":
        return shape.hidden / token_shards * dtype_bytes

    if fused:
        layer = _FusedLayer(shape, tensor, token_shards)
    else:
        layer = _OwnLayer(shape, tensor, token_shards, dtype_bytes)

    elements = layer.norms()
    if kind.linear:
        # `selective` recomputes the core of attention, which a delta net does not have.
        elements += delta_net_sizes.saved_elements(shape, tensor, dtype_bytes, fused=fused)
    else:
        elements += layer.attention(recompute)
    if kind.experts:
        # Routed experts compute the tokens of all tensor ranks, sharded by sequence parallelism or not.
        experts = shape.experts_per_token / token_shards
        elements += layer.mlp(shape.shared_width / tensor) + layer.routed(shape.expert_width) * experts
        elements += experts * expert_tensor * shape.hidden + layer.router() / token_shards
    else:
        elements += layer.mlp(shape.mlp_width / tensor)
    return elements * dtype_bytes


@dataclass(frozen=True)
class _FusedLayer:
    """Elements per token that a layer of Transformer Engine saves for the backward pass."""

    shape: ModelShape
    tensor: int
    """Tensor-parallel size."""
    token_shards: int
    """`ParallelLayout.token_shards`."""

    def norms(self) -> float:
        """Count the elements of each norm's input and output, which is the next projection's input."""
        tensors = 4
        if self.shape.pre_norms and self.shape.post_norms:
            tensors = 6
        return tensors * self.shape.hidden / self.token_shards

    def attention(self, recompute: str) -> float:
        """Count the elements of queries, keys, values and the output, for any ``recompute`` but full."""
        shape = self.shape
        heads = shape.heads / self.tensor
        if shape.mla:
            core = heads * (2 * shape.qk_dim + shape.qk_nope + 2 * shape.v_head_dim)
            return core + 2 * (shape.q_lora + shape.kv_lora) / self.token_shards

        if shape.sinks:
            # PyTorch's attention instead: it repeats keys, has one more dimension in each of four tensors,
            # and its kernels take multiples of 8.
            return heads * (4 * (shape.head_dim + 8) + shape.head_dim)

        groups = shape.kv_heads / self.tensor
        # Tensors of the queries' size: queries and output, the gate, and queries before their norm.
        queries = 2 + shape.qk_norm
        if shape.output_gate:
            queries += 1
        return shape.head_dim * (queries * heads + (2 + shape.qk_norm) * groups)

    def mlp(self, width: float) -> float:
        """Count the elements of gate, up and their product."""
        if not self.shape.gated:
            # Without a gate: the activation's input and output.
            return 2 * width
        return 3 * width

    def routed(self, width: float) -> float:
        """Count the saved elements of one routed expert, as many as those of a dense MLP.

        Experts with biases have no fused activation, as in `_OwnLayer`.
        """
        if self.shape.expert_bias:
            return 8 * width
        return self.mlp(width)

    def router(self) -> float:
        """Count the elements of the logits and probabilities of all experts."""
        return 2.0 * self.shape.experts


@dataclass(frozen=True)
class _OwnLayer:
    """Elements per token that Megatron's plain layers save, with this package's norm and attention.

    Nothing is fused but the core of attention, which sees complete heads: keys and values are repeated.
    An element has ``dtype_bytes`` bytes; float32 tensors count as 4 / ``dtype_bytes`` elements.
    """

    shape: ModelShape
    tensor: int
    """Tensor-parallel size."""
    token_shards: int
    """`ParallelLayout.token_shards`."""
    dtype_bytes: int
    """Bytes of an element of the model's dtype."""

    def _norm(self, width: float, output: bool = True) -> float:
        """Count a norm's elements: float32 input, normalised values, output if a later layer saves it."""
        float32 = 4 / self.dtype_bytes
        # Sandwich norms store their weight minus 1, and multiply by it in float32.
        normalised = 1.0
        if self.shape.pre_norms and self.shape.post_norms:
            normalised = float32
        return width * (float32 + normalised + output)

    def norms(self) -> float:
        """Count the elements of the norms before and after attention and MLP, and of their inputs."""
        # Without a norm before it, a projection saves the residual stream.
        elements = 2.0 * self.shape.hidden
        if self.shape.pre_norms:
            elements = 2 * self._norm(self.shape.hidden)
        if self.shape.post_norms:
            elements += 2 * self._norm(self.shape.hidden, output=False)
        return elements / self.token_shards

    def attention(self, recompute: str) -> float:
        """Count the elements of projections, core and output; ``selective`` recomputes the core.

        The core is everything between the projections: softmax(Q K^T) V.
        """
        shape = self.shape
        heads = shape.heads / self.tensor
        groups = shape.kv_heads / self.tensor
        output = heads * shape.value_dim

        # Counted per query head, since keys and values are repeated. The last term is one float32 number.
        core = 2 * heads * (shape.qk_dim + shape.value_dim) + heads * 4 / self.dtype_bytes
        if shape.sinks:
            # One more dimension of queries, keys, values and output.
            core += 4 * heads

        if shape.mla:
            if recompute == "selective":
                # The core's inputs alone: queries, keys and values.
                core = heads * (2 * shape.qk_dim + shape.v_head_dim)
            latent_norms = self._norm(shape.q_lora + shape.kv_lora) / self.token_shards
            return core + output + 4 * shape.qk_rope + latent_norms

        projection = shape.head_dim * (heads + 2 * groups)
        norms = 0.0
        if shape.qk_norm:
            norms = self._norm((heads + groups) * shape.head_dim, output=False)
        if shape.whole_qk_norm:
            # Inputs and normalised values in float32.
            norms = 2 * (heads + groups) * shape.head_dim * 4 / self.dtype_bytes

        # In float32, keys are saved as a view of the complete projection, and queries too if they are
        # contiguous.
        saves_views = shape.qk_norm and self.dtype_bytes == 4
        if saves_views:
            viewed_heads = groups
            if groups > 1:
                viewed_heads += heads
            norms += shape.head_dim * viewed_heads
        if recompute == "selective":
            core = shape.head_dim * (heads + groups)
            if not saves_views:
                core += projection
        return core + output + 4 * shape.head_dim + norms

    def mlp(self, width: float) -> float:
        """Count the elements of gate and up together, the activation, up once more, and their product."""
        return 5 * width

    def routed(self, width: float) -> float:
        """Count the elements of one routed expert: an MLP, and its product times the router's weight.

        The activation of experts with biases saves its bounded input and its sigmoid, too.
        """
        if self.shape.expert_bias:
            return 8 * width
        return 6 * width

    def router(self) -> float:
        """Count the elements of all experts' logits and probabilities, and the selected ones' in float32."""
        selected = 5 * self.shape.experts_per_token * 4 / self.dtype_bytes
        return self.shape.experts * (1 + 1 / self.dtype_bytes) + selected

    def forward(self, kind: LayerKind) -> float:
        """Count the elements of the largest set of tensors alive at once in a forward pass without gradients.

        Attention holds its projections, and copies of them with the tokens of a sequence together. An MLP
        holds gate and up, the activation, up plus its offset, and their product. Experts hold the routed
        tokens: sorted, exchanged, sorted by expert, multiplied, and combined.
        """
        shape = self.shape
        heads = shape.heads / self.tensor
        groups = shape.kv_heads / self.tensor

        if kind.linear:
            attention = delta_net_sizes.saved_elements(shape, self.tensor, self.dtype_bytes, fused=False)
        elif shape.mla:
            attention = heads * (4 * shape.qk_dim + 3 * shape.v_head_dim)
        else:
            attention = shape.head_dim * (7 * heads + 3 * groups)

        mlp = 5 * shape.mlp_width / self.tensor
        if kind.experts:
            mlp = ROUTED_COPIES * shape.experts_per_token * shape.hidden / self.token_shards

        # Hidden states exist in addition to either; sequence parallelism gathers them before a projection.
        hidden = 4 * shape.hidden / self.token_shards
        if kind.experts and shape.shared_width:
            hidden += shape.hidden / self.token_shards
        gathered = 0
        if self.token_shards > 1:
            gathered = shape.hidden
        return hidden + gathered + max(attention, mlp)


def in_flight(layout: ParallelLayout, stage: int, microbatches: int) -> float:
    """Return how many micro-batches' activations a stage holds at once, in stages' worth of layers.

    1F1B: min(m, p - s). Interleaved: 2 (p - s - 1) + (v - 1) p + 1 chunks of 1 / v of a stage (Narayanan et
    al. 2021, section 2.2).
    """
    stages = layout.pipeline
    virtual = layout.virtual_pipeline
    if virtual == 1:
        return max(1, min(microbatches, stages - stage))
    chunks = min(microbatches * virtual, 2 * (stages - stage - 1) + (virtual - 1) * stages + 1)
    return chunks / virtual


@dataclass(frozen=True)
class Layers:
    """Implementation of a model's layers, as far as their memory depends on it."""

    dtype_bytes: int = 2
    """Bytes of an element of the model's dtype."""
    fused: bool = True
    """Transformer Engine's layers, otherwise this package's own."""
    recompute: str = "none"
    """Activation recomputation: ``none``, ``selective`` or ``full``."""

    def saved_bytes(
        self, shape: ModelShape, layout: ParallelLayout, kind: LayerKind, recompute: str
    ) -> float:
        """Return `saved_activation_bytes` of these layers in a layout."""
        return saved_activation_bytes(
            shape, kind, layout.tensor, layout.expert_tensor, layout.token_shards, recompute,
            self.dtype_bytes, self.fused,
        )  # fmt: skip


def activation_bytes(
    shape: ModelShape,
    layout: ParallelLayout,
    layers: Sequence[int],
    tokens: float,
    microbatches_in_flight: float,
    implementation: Layers,
) -> float:
    """Return the bytes of activations on a rank of a stage with these layers.

    ``tokens`` is the size of a micro-batch, ``microbatches_in_flight`` comes from `in_flight`. With ``full``
    recomputation the activations of one layer at a time exist in addition to the saved inputs.
    """
    counts = shape.kinds_of(layers)
    local_tokens = tokens / layout.context
    recompute = implementation.recompute

    # Saved once for every micro-batch in flight.
    saved = sum(
        count * implementation.saved_bytes(shape, layout, kind, recompute) for kind, count in counts.items()
    )

    # The backward pass recomputes one layer at a time: count the largest.
    recomputed = 0.0
    if recompute == "full":
        recomputed = max(
            (implementation.saved_bytes(shape, layout, kind, "none") for kind in counts), default=0.0
        )

    routed = 0.0
    if any(kind.experts for kind in counts):
        # Temporary copies of routed tokens, besides the saved one; in fused layers, the gradients of two.
        copies = ROUTED_COPIES - 1
        if implementation.fused:
            copies = 2
        routed = (
            copies * shape.experts_per_token * shape.hidden / layout.token_shards * implementation.dtype_bytes
        )

    return local_tokens * (saved * microbatches_in_flight + recomputed + routed)


def forward_bytes(
    shape: ModelShape, layout: ParallelLayout, layers: Sequence[int], tokens: float, implementation: Layers
) -> float:
    """Return the peak bytes of activations in a forward pass without gradients.

    For fused layers the activations of two layers are an upper bound; this package's own are counted exactly.
    """
    counts = shape.kinds_of(layers)

    # Without gradients nothing is saved: tensors exist only until the next layer has read them.
    if implementation.fused:
        live = 2 * max(
            (implementation.saved_bytes(shape, layout, kind, "none") for kind in counts), default=0.0
        )
    else:
        layer = _OwnLayer(shape, layout.tensor, layout.token_shards, implementation.dtype_bytes)
        live = implementation.dtype_bytes * max(map(layer.forward, counts), default=0.0)
    return live * tokens / layout.context


def logits_bytes(shape: ModelShape, layout: ParallelLayout, tokens: float) -> float:
    """Return the bytes of logits: two float32 copies of one chunk, since they are computed chunk by chunk."""
    if shape.scalar_head:
        return 0.0
    shard = shape.padded_vocab(layout.tensor) // layout.tensor
    # At least 64 tokens, however large the vocabulary, and at most the micro-batch.
    chunk = min(max(64, LOGITS_ELEMENTS // shard), tokens / layout.context)
    return chunk * shard * 4 * 2


def head_gradient_bytes(shape: ModelShape, layout: ParallelLayout, tokens: float, dtype_bytes: int) -> float:
    """Return the bytes of the float32 sums of an output layer's gradients, see `megatron.log_probs`.

    A half-precision model sums the gradient of all hidden states, and the gradient of the weight's rows in
    one tile.
    """
    if shape.scalar_head or dtype_bytes >= 4:
        return 0.0
    shard = shape.padded_vocab(layout.tensor) // layout.tensor
    local_tokens = tokens / layout.context
    tile_tokens = min(local_tokens, TILE_TOKENS)
    rows = min(shard, max(64, LOGITS_ELEMENTS // shard) * shard / tile_tokens)

    sums = 0.0
    if rows < shard:
        sums += local_tokens
    if tile_tokens < local_tokens:
        sums += rows
    return 4 * shape.hidden * sums


@dataclass(frozen=True)
class OptimizerChoice:
    """Storage of gradients and optimizer states."""

    distributed: bool = True
    """States are sharded over data-parallel ranks."""
    offload: bool = False
    """States are in host memory."""
    gradient_bytes: float = 4
    """Bytes of a gradient per parameter."""
    state_bytes: float = 12
    """Bytes of master weight and moments per parameter."""


@dataclass(frozen=True)
class TrainingMemory:
    """Peak memory on one rank of a model that trains or computes log-probs, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    overhead: float = 0.0
    """Anything else, as `RUNTIME_BYTES`."""

    @property
    def states(self) -> float:
        """Return the bytes that stay resident between steps: weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Return the peak in bytes."""
        return self.states + self.activations + self.logits + self.overhead


def training_memory(
    shape: ModelShape,
    layout: ParallelLayout,
    stages: Sequence[Sequence[int]],
    stage: int,
    optimizer: OptimizerChoice,
    implementation: Layers,
    tokens: float,
    microbatches: int,
    adapters: tuple[int, int] | None = None,
) -> TrainingMemory:
    """Return the memory on a rank of one pipeline stage that trains micro-batches of ``tokens`` tokens.

    ``stages`` are the layers of each stage, from `stage_layers`. ``adapters`` are the adapter
    parameters on the rank, outside and in routed experts, that are trained instead of its weights; None
    trains the weights.
    """
    last = stage == len(stages) - 1
    dense, experts = stage_parameters(shape, layout, stages[stage], stage == 0, last)

    # Trainable parameters have gradients; the distributed optimizer shards their states over data-parallel
    # ranks, which are other ranks for experts.
    trainable = (dense, experts)
    if adapters is not None:
        trainable = adapters
    states: tuple[float, float] = trainable
    if optimizer.distributed:
        states = (trainable[0] / (layout.data * layout.context), trainable[1] / layout.expert_data)

    optimizer_bytes = optimizer.state_bytes * sum(states)
    if optimizer.offload:
        optimizer_bytes = 0.0

    microbatches_in_flight = in_flight(layout, stage, microbatches)
    activations = activation_bytes(
        shape, layout, stages[stage], tokens, microbatches_in_flight, implementation
    )

    # Only the last stage has the output layer.
    logits = 0.0
    if last:
        logits = logits_bytes(shape, layout, tokens)
        if adapters is None:
            logits += head_gradient_bytes(shape, layout, tokens, implementation.dtype_bytes)
    return TrainingMemory(
        weights=implementation.dtype_bytes * (dense + experts + sum(adapters or ())),
        gradients=optimizer.gradient_bytes * sum(trainable),
        optimizer=optimizer_bytes,
        activations=activations,
        logits=logits,
    )


def scoring_memory(
    shape: ModelShape,
    layout: ParallelLayout,
    stages: Sequence[Sequence[int]],
    stage: int,
    implementation: Layers,
    tokens: float,
) -> TrainingMemory:
    """Return the memory on a rank of one pipeline stage of a model that runs forward passes only."""
    last = stage == len(stages) - 1
    parameters = stage_parameters(shape, layout, stages[stage], stage == 0, last)
    logits = 0.0
    if last:
        logits = logits_bytes(shape, layout, tokens)

    return TrainingMemory(
        weights=implementation.dtype_bytes * sum(parameters),
        gradients=0.0,
        optimizer=0.0,
        activations=forward_bytes(shape, layout, stages[stage], tokens, implementation),
        logits=logits,
    )


def representative_stages(count: int) -> list[int]:
    """Return the stages that can have the largest memory: the first, one middle stage, and the last."""
    return sorted({0, min(1, count - 1), count - 1})


def fullest_parameters(shape: ModelShape, layout: ParallelLayout) -> tuple[int, int]:
    """Return the dense and the expert parameters on a rank of the stage that has the most."""
    stages = default_stage_layers(shape.layers, layout.pipeline, layout.virtual_pipeline)
    last = len(stages) - 1
    parameters = [
        stage_parameters(shape, layout, stages[stage], stage == 0, stage == last)
        for stage in representative_stages(len(stages))
    ]
    return max(parameters, key=sum)
