"""Seconds and bytes of a role's two phases: the forward pass over a step's rows, and training on them.

The time of a layer is a sum of a few terms, and each term is work divided by an achieved rate. The times of
stages and steps are computed from the time of an average layer.

Layer: matrix products at the GPU's achieved rate, attention at a separate rate, memory-bound tensors (norms,
activations, permutations) at HBM rate, and communication without overlap. The lower bound is the time to
launch the layer's kernels. A routed layer also waits for the host. FLOPs: Narayanan et al. 2021 (arXiv
2104.04473) section 5.1; tensor-parallel traffic: Korthikanti et al. 2022 (two all-gathers and two
reduce-scatters per layer and direction).

Collectives: all-gather and reduce-scatter of V bytes over n ranks move V (n-1)/n per rank (Thakur et al.
2005). A ring across nodes uses the network cards of all its ranks in a node, so a group with g ranks per node
has a bandwidth of min(NVLink, g x card).

Pipeline: t_mb (m + (p - 1) / v) with the slowest stage's t_mb (Narayanan et al. 2021, section 2.2). Data
parallelism: reduce-scatter of gradients and all-gather of 2-byte parameters, partly overlapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, log, sqrt

from megatron_rl.planning.predict.batch import StepBatch
from megatron_rl.shapes.hardware import Cluster, Constants, Machine
from megatron_rl.shapes.layout import ParallelLayout, default_stage_layers, end_settings
from megatron_rl.shapes.lora import Lora, adapted_parameter_count, adapter_parameter_count
from megatron_rl.shapes.memory import (
    RUNTIME_BYTES,
    LayerImplementation,
    OptimizerChoice,
    TrainingMemory,
    find_representative_stages,
    forward_only_memory,
    max_stage_parameters,
    training_memory,
)
from megatron_rl.shapes.model import ModelShape

_BACKWARD_LAUNCHES = 1.5
"""Assumed ratio of backward to forward pass, in kernel launches and in waits for the host."""
_ATTENTION_BACKWARD_FLOPS = 2.5
"""Ratio of FLOPs in flash attention's backward pass to its forward pass.

The forward pass has two matrix products, QK and PV. The backward pass has five: it computes QK again, then
the gradients of P, V, Q and K (Dao 2023, arXiv 2307.08691, algorithm 2)."""
_LOGITS_BYTES = 20.0
"""Bytes that the output layer moves through HBM per logit."""
_PARAMETER_BYTES = 2.0
"""Bytes per parameter of the data-parallel all-gather, in bfloat16."""


# ---------------------------------------------------------------- collectives


def local_members(cluster: Cluster, size: int, stride: int) -> int:
    """Return the number of a group's ranks inside one NVLink domain, at least 1.

    The group has ``size`` ranks, and ``stride`` is the distance between two neighbours.
    """
    return max(1, min(size, cluster.domain // max(1, stride)))


def group_bandwidth(machine: Machine, size: int, stride: int) -> float:
    """Return the achieved bytes/s per rank of a ring over ``size`` ranks that are ``stride`` apart."""
    cluster = machine.cluster
    efficiency = machine.constants.efficiency
    local_ranks = local_members(cluster, size, stride)
    # A ring is as fast as its slowest hop: NVLink within a node, the ranks' network cards between nodes.
    nvlink_rate = cluster.gpu.nvlink * efficiency.nvlink
    if local_ranks >= size:
        return nvlink_rate
    return min(nvlink_rate, local_ranks * cluster.network * efficiency.network)


def gather_seconds(machine: Machine, size: int, stride: int, total_bytes: float) -> float:
    """Return the seconds to all-gather (or reduce-scatter) ``total_bytes`` over a group.

    The group has ``size`` ranks, and ``stride`` is the distance between two neighbours in it.
    """
    # A group of one rank sends no messages.
    if size <= 1:
        return 0.0
    rank_bytes = total_bytes * (size - 1) / size
    return rank_bytes / group_bandwidth(machine, size, stride)


def all_to_all_seconds(machine: Machine, size: int, sent_bytes: float, experts_per_token: int) -> float:
    """Return the seconds of the all-to-all of expert parallelism in one direction, dispatch or combine.

    The expert-parallel group has ``size`` consecutive ranks. Each token is sent to ``experts_per_token``
    experts, and ``sent_bytes`` counts the token once per expert. Between nodes a token is sent only once to
    each remote node that has at least one of its experts (DeepEP, arXiv 2412.19437 section 3.2.2). The
    experts of a token are assumed to be independent and uniform over nodes.
    """
    if size <= 1:
        return 0.0

    cluster = machine.cluster
    efficiency = machine.constants.efficiency
    local_ranks = local_members(cluster, size, 1)
    nvlink_rate = cluster.gpu.nvlink * efficiency.nvlink
    nvlink_seconds = sent_bytes * (size - 1) / size / nvlink_rate
    if local_ranks >= size:
        return nvlink_seconds

    # Expected number of distinct remote nodes among ``experts_per_token`` uniform choices of a node.
    num_nodes = size / local_ranks
    distinct_nodes = num_nodes * (1.0 - (1.0 - 1.0 / num_nodes) ** experts_per_token)
    remote_nodes = distinct_nodes * (num_nodes - 1) / num_nodes

    # The slower link determines the time: tokens are forwarded over NVLink while other tokens arrive.
    network_bytes = sent_bytes / max(1, experts_per_token) * remote_nodes
    network_seconds = network_bytes / (cluster.network * efficiency.network)
    return max(nvlink_seconds, network_seconds)


# ---------------------------------------------------------------- one layer


@dataclass(frozen=True)
class LayerSeconds:
    """Predicted seconds of one average layer, and of the output layer, for one micro-batch.

    Example: ``LayerSeconds(2e-3, 4e-3, attention=5e-4, head_forward=1e-3, head_backward=2e-3)``.
    """

    forward: float
    """Seconds of the layer's forward pass."""
    backward: float
    """Seconds of the layer's backward pass."""
    attention: float
    """Seconds of ``forward`` that selective recompute repeats."""
    head_forward: float
    """Seconds of the output layer's forward pass."""
    head_backward: float
    """Seconds of the output layer's backward pass."""


def gemm_rate(machine: Machine, precision: str, width: float) -> float:
    """Return the achieved FLOP/s of dense matrix products whose sharded dimension is ``width``."""
    gpu = machine.gpu
    efficiency_constants = machine.constants.efficiency
    # Narrow products do not fill the GPU; gemm_width is the width at which the efficiency is halved.
    efficiency = gpu.gemm_efficiency * width / (width + efficiency_constants.gemm_width)
    if precision == "fp8":
        efficiency *= efficiency_constants.fp8_gemm
    return gpu.peak_flops(precision) * efficiency


def expert_rate(machine: Machine, model: ModelShape, layout: ParallelLayout, tokens: float) -> float:
    """Return the achieved FLOP/s of grouped expert products for a micro-batch of ``tokens`` tokens.

    The efficiency is lower for few rows per expert and for narrow experts.
    """
    gpu = machine.gpu
    efficiency_constants = machine.constants.efficiency
    precision = machine.precision

    # Shape of one expert's product on this rank.
    width = model.expert_width / layout.expert_tensor
    local_experts = max(1.0, model.experts / layout.expert)
    rows = tokens / layout.tensor * model.experts_per_token / local_experts

    # At expert_gemm_rows rows, and at a width of expert_gemm_width, the efficiency is halved.
    row_fill = rows / (rows + efficiency_constants.expert_gemm_rows)
    width_fill = width / (width + efficiency_constants.expert_gemm_width)
    efficiency = gpu.gemm_efficiency * row_fill * width_fill
    if precision == "fp8":
        efficiency *= efficiency_constants.fp8_gemm
    return gpu.peak_flops(precision) * efficiency


def elementwise_bytes(model: ModelShape, tensor: int, token_shards: int) -> float:
    """Return the bytes that one token moves through HBM in an average layer's forward pass, on one GPU.

    The kernels are norms, residual additions, rotary embeddings, contiguous copies of attention heads, the
    activation, and permutations of routed tokens. ``tensor`` is the tensor-parallel size, and
    ``token_shards`` the number of ranks over which the tokens of norms are sharded (sequence parallelism).
    """
    # An average layer is the mean of all layers.
    moe_fraction = model.moe_layers / model.layers
    inner_widths = sum(
        count * feed_forward.inner_width(model) for feed_forward, count in model.feed_forwards.items()
    )
    inner_width = inner_widths / model.layers
    # The activation reads its input and writes its output, 2 bytes each; a gated one has two inputs.
    bytes_per_inner = 4.0
    if model.gated:
        bytes_per_inner = 6.0

    # Tensor parallelism shards heads, inner widths and permutations; sequence parallelism shards norms.
    # Rotary embeddings and contiguous copies of heads move four tensors of the queries' size.
    sharded_bytes = 8.0 * model.query_width
    sharded_bytes += bytes_per_inner * inner_width
    # Routed tokens are permuted before and after each of the two all-to-alls, dispatch and combine. All
    # permutations together move six hidden states for each expert of a token.
    sharded_bytes += 12.0 * model.experts_per_token * model.hidden * moe_fraction

    # Norms and residual additions: twelve hidden states.
    return 24.0 * model.hidden / token_shards + sharded_bytes / tensor


def _exposed_communication_seconds(
    model: ModelShape,
    layout: ParallelLayout,
    machine: Machine,
    tokens: float,
    fused: bool,
    exchanges_heads: bool,
) -> float:
    """Return the seconds of communication in a layer's forward pass that do not overlap with computation.

    The communication of tensor, expert and context parallelism is included.

    ``tokens``: number of tokens of a rank. ``fused``: whether the layer is Transformer Engine's.
    ``exchanges_heads``: whether context-parallel ranks exchange heads before and after attention
    (all-to-all), as this package does. Otherwise they gather keys and values, which overlaps with attention.
    """
    efficiency = machine.constants.efficiency
    moe_fraction = model.moe_layers / model.layers

    # Hidden states in bfloat16.
    hidden_bytes = 2.0 * model.hidden * tokens

    # Tensor parallelism. Overlap with matrix products needs sequence parallelism (Transformer Engine's user
    # buffers). Experts without expert-tensor parallelism need no tensor-parallel communication.
    exposed_fraction = efficiency.tensor_exposed
    if layout.sequence_parallel and fused:
        exposed_fraction = efficiency.tensor_exposed_overlapped
    # A layer has two all-gathers and two reduce-scatters. With routed experts it has one of each.
    num_collectives = 4.0
    if layout.expert_tensor == 1 and model.experts:
        num_collectives = 4.0 - 2.0 * moe_fraction
    total_seconds = (
        exposed_fraction * num_collectives * gather_seconds(machine, layout.tensor, 1, hidden_bytes)
    )

    # Expert parallelism: tokens are dispatched to their experts and combined.
    if layout.expert > 1:
        experts_per_token = model.experts_per_token
        dispatched_bytes = experts_per_token * hidden_bytes / layout.tensor
        exchange_seconds = all_to_all_seconds(machine, layout.expert, dispatched_bytes, experts_per_token)
        total_seconds += 2.0 * moe_fraction * exchange_seconds

    # Context parallelism, by heads or by keys and values.
    if layout.context > 1 and exchanges_heads:
        elements_per_token = sum(
            count * mixer.exchanged_elements(model, layout.tensor, layout.context)
            for mixer, count in model.mixers.items()
        )
        exchanged_bytes = 2.0 * tokens * elements_per_token / model.layers
        total_seconds += gather_seconds(machine, layout.context, layout.tensor, exchanged_bytes)
    elif layout.context > 1:
        elements_per_token = sum(
            count * mixer.gathered_elements(model, layout.tensor) for mixer, count in model.mixers.items()
        )
        gathered_bytes = 2.0 * elements_per_token / model.layers * tokens * layout.context
        seconds_to_gather = gather_seconds(machine, layout.context, layout.tensor, gathered_bytes)
        total_seconds += efficiency.context_exposed * seconds_to_gather
    return total_seconds


def layer_seconds(
    model: ModelShape,
    layout: ParallelLayout,
    machine: Machine,
    tokens: float,
    context: float,
    fused: bool = True,
    frozen: bool = False,
    exchanges_heads: bool = True,
) -> LayerSeconds:
    """Return the seconds of one average layer for a micro-batch of ``tokens`` tokens.

    ``tokens`` is the number before context parallelism divides them; ``context`` is the mean number of keys
    that a token attends to. ``fused`` selects Transformer Engine's layers. Megatron's layers without
    Transformer Engine save more activations for the backward pass and move more bytes. ``frozen`` weights
    have no gradients; the FLOPs of their adapters are not counted. ``exchanges_heads``: see
    `_exposed_communication_seconds`.
    """
    efficiency = machine.constants.efficiency
    gpu = machine.gpu
    rank_tokens = tokens / layout.context

    # Dense matrix products.
    expert_flops = 2.0 * model.active_expert_parameters
    dense_flops = model.layer_flops - expert_flops
    # Without dense feed-forwards, assume an inner width of twice the hidden size.
    inner_width = model.hidden * 2
    if model.moe_layers < model.layers:
        inner_width = model.mlp_width

    # Assume the rate of the narrowest product for all products of the layer.
    narrowest_width = min(model.query_width, inner_width)
    dense_rate = gemm_rate(machine, machine.precision, narrowest_width / layout.tensor)
    dense_seconds = rank_tokens * dense_flops / model.layers / layout.tensor / dense_rate

    # Products of routed experts.
    expert_seconds = 0.0
    if expert_flops:
        flop_rate = expert_rate(machine, model, layout, rank_tokens)
        expert_seconds = rank_tokens * expert_flops / model.layers / layout.tensor / flop_rate

    # Attention.
    attention_rate = gpu.bf16_flops * efficiency.attention * min(1.0, gpu.relative_efficiency)
    attention_flops = rank_tokens * model.attention_flops(context)
    attention_seconds = attention_flops / model.layers / layout.tensor / attention_rate

    # Memory-bound kernels. Plain layers save more activations than fused layers, and are assumed to move more
    # bytes in the same ratio.
    hbm_rate = gpu.hbm * efficiency.hbm
    bytes_per_token = elementwise_bytes(model, layout.tensor, layout.token_shards)
    memory_bound_seconds = rank_tokens * bytes_per_token / hbm_rate
    if not fused:
        # Use a layer with attention, and with routed experts if the model has them.
        block = max(
            model.count_blocks(range(model.layers)),
            key=lambda block: (block.feed_forward.routed, block.mixer.flops_per_key(model)),
        )
        plain_bytes = LayerImplementation(fused=False).saved_bytes(model, layout, block, "none")
        fused_bytes = LayerImplementation(fused=True).saved_bytes(model, layout, block, "none")
        memory_bound_seconds *= plain_bytes / fused_bytes

    exposed_seconds = _exposed_communication_seconds(
        model, layout, machine, rank_tokens, fused, exchanges_heads
    )
    launch_seconds = efficiency.launch_seconds_layer
    # Without padding, the host must read the token count of each expert before it can launch the products.
    routing_wait_seconds = efficiency.routing_seconds_layer * model.moe_layers / model.layers

    # Kernels run one after another; a layer with little work is bound by launch overhead.
    forward_work = dense_seconds + expert_seconds + attention_seconds + memory_bound_seconds + exposed_seconds
    forward_seconds = max(forward_work, launch_seconds) + routing_wait_seconds

    # The backward pass has one product for the gradient of the inputs, and one for the weights' gradient.
    num_products = 2
    if frozen:
        num_products = 1
    backward_attention = attention_seconds * _ATTENTION_BACKWARD_FLOPS / efficiency.attention_backward

    # Memory-bound kernels are assumed to move twice the bytes: activations and their gradients.
    backward_work = (
        num_products * (dense_seconds + expert_seconds)
        + backward_attention
        + 2 * memory_bound_seconds
        + exposed_seconds
    )
    backward_seconds = max(backward_work, _BACKWARD_LAUNCHES * launch_seconds)
    backward_seconds += _BACKWARD_LAUNCHES * routing_wait_seconds

    # The output layer is computed in bfloat16 even if the layers are in FP8.
    head_rate = gemm_rate(machine, "bf16", model.vocab / layout.tensor)
    head_seconds = rank_tokens * model.head_flops / layout.tensor / head_rate
    head_memory_seconds = rank_tokens * _LOGITS_BYTES * model.vocab / layout.tensor / hbm_rate
    return LayerSeconds(
        forward=forward_seconds,
        backward=backward_seconds,
        attention=attention_seconds,
        head_forward=head_seconds + head_memory_seconds,
        head_backward=num_products * head_seconds + head_memory_seconds,
    )


# ---------------------------------------------------------------- one role


@dataclass(frozen=True)
class TrainChoice:
    """Model, layout and settings with which a trained or frozen role runs on its GPUs.

    Example: ``TrainChoice(shape, ParallelLayout(tuple(range(8)), tensor=4), recompute="full")``.
    """

    model: ModelShape
    """Sizes of the model."""
    layout: ParallelLayout
    """Parallel layout on the role's ranks."""
    recompute: str = "none"
    """Activations that the backward pass recomputes: none, selective or full."""
    optimizer: OptimizerChoice = field(default_factory=OptimizerChoice)
    """Sharding, offload and precision of the optimizer."""
    micro_batch: int = 1
    """Rows of a micro-batch; with packing, its token budget in units of the longest row."""
    transformer_engine: bool = True
    """Whether the layers are Transformer Engine's."""
    lora: Lora | None = None
    """Adapters that are trained instead of the weights, or None if the weights are trained."""
    exchanges_heads: bool = True
    """Whether context-parallel ranks exchange heads around attention instead of gathering keys and values."""

    @property
    def layers(self) -> LayerImplementation:
        """Return the implementation of the model's layers, with the recompute setting.

        Layers are Transformer Engine's (``fused``) or Megatron's layers without Transformer Engine.
        """
        fused = self.transformer_engine and not self.model.needs_plain_layers
        return LayerImplementation(fused=fused, recompute=self.recompute)


@dataclass(frozen=True)
class RoleMemory:
    """Memory of a role on the GPUs with the highest memory use, in bytes.

    The two fields may describe different GPUs: an early pipeline stage has more activations, the first and
    last stages have more parameters.

    Example: ``RoleMemory(fullest=memory, states=18e9)``, with 18 GB of states while the role is idle.
    """

    fullest: TrainingMemory
    """Memory of the GPU with the highest peak, while the role works."""
    states: float
    """Largest bytes of weights, gradients and optimizer states of any GPU, also while the role is idle."""

    @property
    def total(self) -> float:
        """Return the peak bytes on the GPU with the highest peak, while the role works."""
        return self.fullest.total


@dataclass(frozen=True)
class ReplicaWork:
    """Work of one data-parallel replica that processes each of its rows once.

    Example: ``ReplicaWork(tokens=8192.0, micro_batches=16.0, context=900.0)``.
    """

    tokens: float
    """Number of tokens of a micro-batch."""
    micro_batches: float
    """Number of micro-batches of the replica."""
    context: float
    """Mean number of keys that a token attends to."""


@dataclass(frozen=True)
class OptimizerStep:
    """Predicted seconds of one optimizer step, by its three parts.

    Example: ``OptimizerStep(compute=5.2, exchange=0.3, update=0.1)`` takes 5.6 s.
    """

    compute: float
    """Seconds of the forward and backward passes."""
    exchange: float
    """Seconds of the gradient exchange without overlap."""
    update: float
    """Seconds of the parameter update."""

    @property
    def total(self) -> float:
        """Return the seconds of the optimizer step: passes, exposed gradient exchange and update."""
        return self.compute + self.exchange + self.update


def replica_work(choice: TrainChoice, batch: StepBatch, rows: float) -> ReplicaWork:
    """Split ``rows`` sequences over the data-parallel replicas into micro-batches.

    With packing, a micro-batch has up to ``micro_batch * row_limit`` tokens, and at least one row. Without
    packing, a micro-batch has ``micro_batch`` rows, each padded to the length of the longest. A replica gets
    at least one row.
    """
    mean_length = batch.mean_row
    max_length = batch.row_limit
    replica_rows = max(1.0, rows / choice.layout.data)

    if batch.packing:
        # Assume that half a row of each micro-batch remains empty. The trainer's `partition_rows` packs
        # tighter: with 128 or 512 rows of exponential lengths, less than 0.2 rows remain empty in most cases.
        # The assumption changes the number of micro-batches but not their total tokens. It stays as it is,
        # because the efficiencies of constants.json were fitted under it.
        rows_that_fit = choice.micro_batch * max_length / mean_length - 0.5
        microbatch_rows = min(max(1.0, rows_that_fit), replica_rows)
        tokens = microbatch_rows * mean_length
    else:
        microbatch_rows = min(float(choice.micro_batch), replica_rows)
        # The more rows a micro-batch has, the closer is its longest row to the maximum length.
        padded_length = mean_length
        if microbatch_rows > 1:
            padded_length = mean_length + (max_length - mean_length) * (1 - 1 / microbatch_rows)
        tokens = microbatch_rows * padded_length
    return ReplicaWork(tokens, max(1.0, replica_rows / microbatch_rows), batch.context)


def _stage_seconds(
    model: ModelShape, layout: ParallelLayout, seconds_per_layer: float, head_seconds: float
) -> tuple[float, float]:
    """Return (seconds of the slowest pipeline stage, mean seconds of all stages) for one micro-batch.

    Layers are split so that the slowest stage is as fast as possible: the last stage, which has the output
    layer, may have fewer layers. ``seconds_per_layer`` and ``head_seconds`` are for one micro-batch; the head
    is the output layer.
    """
    layers = model.layers
    pipeline = layout.pipeline
    mean_seconds = (layers * seconds_per_layer + head_seconds) / pipeline
    if pipeline == 1:
        return mean_seconds, mean_seconds

    if layout.virtual_pipeline == 1:
        slowest_seconds = inf
        for last_layers in range(layers // pipeline + 1):
            other_layers = ceil((layers - last_layers) / (pipeline - 1))
            last_stage_seconds = last_layers * seconds_per_layer + head_seconds
            split_seconds = max(other_layers * seconds_per_layer, last_stage_seconds)
            slowest_seconds = min(slowest_seconds, split_seconds)
        return slowest_seconds, mean_seconds

    # For interleaved stages assume the mean, rounded up to complete layers, but at most the mean plus half
    # an output layer.
    rounded_seconds = max(mean_seconds, ceil(mean_seconds / seconds_per_layer) * seconds_per_layer)
    return min(rounded_seconds, mean_seconds + head_seconds * 0.5), mean_seconds


def _pipeline_seconds(
    choice: TrainChoice,
    machine: Machine,
    work: ReplicaWork,
    seconds_per_layer: float,
    head_seconds: float,
) -> float:
    """Return the seconds in which all micro-batches run through the pipeline.

    ``seconds_per_layer`` and ``head_seconds`` are for one micro-batch; the head is the output layer.
    """
    model = choice.model
    layout = choice.layout
    slowest_stage_seconds, mean_stage_seconds = _stage_seconds(model, layout, seconds_per_layer, head_seconds)

    # Every micro-batch passes the slowest stage; filling and draining the pipeline take mean stage times.
    total_seconds = slowest_stage_seconds * work.micro_batches
    total_seconds += mean_stage_seconds * (layout.pipeline - 1) / layout.virtual_pipeline
    if layout.pipeline == 1:
        return total_seconds

    # Stages send activations to the next stage, and gradients back.
    cluster = machine.cluster
    efficiency = machine.constants.efficiency

    # With sequence parallelism each rank of a tensor group sends a shard, otherwise all activations.
    boundary_bytes = 2.0 * model.hidden * work.tokens / layout.context / layout.token_shards

    # Neighbouring stages are one stride of ranks apart; NVLink connects them if both fit into one domain.
    stride = layout.tensor * layout.context * layout.data
    link_rate = cluster.network
    if stride * 2 <= cluster.domain:
        link_rate = cluster.gpu.nvlink
    achieved_rate = link_rate * efficiency.network
    hops = work.micro_batches * layout.virtual_pipeline + layout.pipeline - 1
    return total_seconds + efficiency.pipeline_exposed * 2.0 * hops * boundary_bytes / achieved_rate


def _trainable_parameters(choice: TrainChoice) -> tuple[int, int]:
    """Return the numbers of trainable dense and expert parameters on a rank of the fullest stage."""
    model = choice.model
    layout = choice.layout
    lora = choice.lora
    if lora is None:
        return max_stage_parameters(model, layout)

    stages = default_stage_layers(model.layers, layout.pipeline, layout.virtual_pipeline)
    return max((adapter_parameter_count(model, layout, layers, lora) for layers in stages), key=sum)


def _gradient_exchange_seconds(choice: TrainChoice, machine: Machine) -> float:
    """Return the seconds to reduce-scatter gradients and all-gather parameters over data-parallel ranks."""
    layout = choice.layout
    dense_parameters, expert_parameters = _trainable_parameters(choice)
    bytes_per_parameter = choice.optimizer.gradient_bytes + _PARAMETER_BYTES

    # Experts have separate data-parallel groups.
    dense_bytes = dense_parameters * bytes_per_parameter
    total_seconds = gather_seconds(machine, layout.data * layout.context, layout.tensor, dense_bytes)
    if expert_parameters:
        stride = layout.expert * layout.expert_tensor
        expert_bytes = expert_parameters * bytes_per_parameter
        total_seconds += gather_seconds(machine, layout.expert_data, stride, expert_bytes)
    return total_seconds


def network_bytes(choice: TrainChoice, batch: StepBatch, cluster: Cluster) -> dict[str, float]:
    """Return the bytes per step that a rank of a trained role sends out of its NVLink domain, by cause.

    Causes are gradients (with the gathered parameters), pipeline activations, and tokens that are exchanged
    between expert-parallel ranks. Communication inside one domain is omitted. Groups of tensor and
    context parallelism stay inside a node.
    """
    layout = choice.layout
    bytes_per_parameter = choice.optimizer.gradient_bytes + _PARAMETER_BYTES
    num_steps = batch.optimizer_steps * batch.epochs
    replica_tokens = batch.tokens * batch.epochs / layout.data / layout.context
    bytes_by_cause: dict[str, float] = {}

    # A ring over data-parallel ranks crosses nodes unless all its ranks are in one domain.
    dense_parameters, expert_parameters = _trainable_parameters(choice)
    group_size = layout.data * layout.context
    if local_members(cluster, group_size, layout.tensor) < group_size:
        exchanged_bytes = num_steps * dense_parameters * bytes_per_parameter
        bytes_by_cause["gradients"] = exchanged_bytes * (group_size - 1) / group_size

    # Experts have a separate data-parallel group, whose bytes are added.
    stride = layout.expert * layout.expert_tensor
    if expert_parameters and local_members(cluster, layout.expert_data, stride) < layout.expert_data:
        sent_fraction = (layout.expert_data - 1) / layout.expert_data
        expert_gradients = num_steps * expert_parameters * bytes_per_parameter * sent_fraction
        bytes_by_cause["gradients"] = bytes_by_cause.get("gradients", 0.0) + expert_gradients

    # Neighbouring stages are one stride of ranks apart; activations go forward, gradients back.
    hidden_bytes = 2.0 * choice.model.hidden * replica_tokens / layout.token_shards
    stage_ranks = layout.tensor * layout.context * layout.data
    if layout.pipeline > 1 and stage_ranks * 2 > cluster.domain:
        bytes_by_cause["activations"] = 2.0 * layout.virtual_pipeline * hidden_bytes

    # Tokens are sent to their experts and back, in the forward pass and in the backward pass.
    local_ranks = local_members(cluster, layout.expert, 1)
    if layout.expert > 1 and local_ranks < layout.expert:
        remote_fraction = 1.0 - local_ranks / layout.expert
        stage_moe_layers = choice.model.moe_layers / layout.pipeline
        dispatched_bytes = stage_moe_layers * choice.model.experts_per_token * hidden_bytes
        bytes_by_cause["tokens of experts"] = 4.0 * dispatched_bytes * remote_fraction
    return bytes_by_cause


def _update_seconds(choice: TrainChoice, machine: Machine) -> float:
    """Return the seconds of the optimizer's update of a rank's parameters."""
    layout = choice.layout
    optimizer = choice.optimizer
    efficiency = machine.constants.efficiency
    dense_parameters, expert_parameters = _trainable_parameters(choice)

    # A distributed optimizer updates a shard of the parameters on each data-parallel rank.
    updated_parameters = dense_parameters + expert_parameters
    if optimizer.distributed:
        dense_ranks = layout.data * layout.context
        updated_parameters = dense_parameters / dense_ranks + expert_parameters / layout.expert_data
    hbm_bytes = updated_parameters * efficiency.optimizer_bytes_per_parameter
    seconds = hbm_bytes / (machine.gpu.hbm * efficiency.hbm)

    if optimizer.offload:
        # Gradients are copied to the host and parameters back. The update runs at the host's memory rate, and
        # reads and writes every state.
        bytes_per_parameter = optimizer.gradient_bytes + _PARAMETER_BYTES + 2.0 * optimizer.state_bytes
        seconds += updated_parameters * bytes_per_parameter / machine.host_rate
    return seconds


def _average_layer_seconds(choice: TrainChoice, machine: Machine, work: ReplicaWork) -> LayerSeconds:
    """Return the seconds of an average layer of a role's model for one micro-batch."""
    return layer_seconds(
        choice.model,
        choice.layout,
        machine,
        work.tokens,
        work.context,
        choice.layers.fused,
        frozen=choice.lora is not None,
        exchanges_heads=choice.exchanges_heads,
    )


def predict_optimizer_step(
    choice: TrainChoice, machine: Machine, work: ReplicaWork, loop_efficiency: float = 1.0
) -> OptimizerStep:
    """Predict the seconds of one optimizer step: forward, backward, gradient exchange, update.

    ``loop_efficiency`` is the fraction of pretraining speed that a reinforcement-learning loop reaches. It
    applies to computation, not to the gradient exchange.
    """
    layer = _average_layer_seconds(choice, machine, work)
    seconds_per_layer = layer.forward + layer.backward
    head_seconds = layer.head_forward + layer.head_backward

    # With recomputation the backward pass repeats the forward pass, or only its attention.
    if choice.recompute == "full":
        seconds_per_layer += layer.forward
    elif choice.recompute == "selective":
        seconds_per_layer += layer.attention

    return OptimizerStep(
        compute=_pipeline_seconds(choice, machine, work, seconds_per_layer, head_seconds) / loop_efficiency,
        exchange=machine.constants.efficiency.data_exposed * _gradient_exchange_seconds(choice, machine),
        update=_update_seconds(choice, machine),
    )


def routing_imbalance(model: ModelShape, layout: ParallelLayout, spread: float) -> float:
    """Return the slowdown of every layer by uneven routing: the largest load of a rank / the mean load.

    Pretraining benchmarks force an even load; reinforcement learning does not. ``spread`` is the standard
    deviation of an expert's load, relative to the mean. For an expert-parallel rank with E / ep experts the
    deviation is spread / sqrt(E / ep), and the largest of ep such loads is sqrt(2 ln ep) deviations above the
    mean (expected maximum of normal variables).
    """
    if not model.experts or layout.expert == 1:
        return 1.0
    deviation = spread * sqrt(layout.expert / model.experts)
    return 1.0 + deviation * sqrt(2.0 * log(layout.expert))


def _loop_efficiency(choice: TrainChoice, batch: StepBatch, constants: Constants) -> float:
    """Return the fraction of pretraining speed that a reinforcement-learning loop reaches.

    Uneven rows unbalance replicas and leave packed micro-batches partly empty, and routing is uneven. The
    remaining loss of speed is attributed to float32 logits, loading and offloading.
    """
    loop_efficiency = constants.efficiency.rl_loop
    # Unpacked rows of equal length do not unbalance replicas.
    if batch.lengths.scale is not None or batch.packing:
        loop_efficiency *= constants.efficiency.rl_uneven_rows
    imbalance = routing_imbalance(choice.model, choice.layout, constants.efficiency.routing_spread)
    return loop_efficiency / imbalance


def learn_seconds(choice: TrainChoice, batch: StepBatch, machine: Machine) -> float:
    """Return the seconds of all optimizer steps of one role, in every epoch."""
    work = replica_work(choice, batch, batch.rows / batch.optimizer_steps)
    efficiency = machine.constants.efficiency.rl_train * _loop_efficiency(choice, batch, machine.constants)
    step = predict_optimizer_step(choice, machine, work, efficiency)
    return batch.epochs * batch.optimizer_steps * step.total


def score_seconds(choice: TrainChoice, batch: StepBatch, machine: Machine) -> float:
    """Return the seconds of a role's forward pass over the rows of a step."""
    work = replica_work(choice, batch, batch.rows)
    layer = _average_layer_seconds(choice, machine, work)
    seconds = _pipeline_seconds(choice, machine, work, layer.forward, layer.head_forward)
    loop_efficiency = _loop_efficiency(choice, batch, machine.constants)
    return seconds / (machine.constants.efficiency.rl_log_probs * loop_efficiency)


# ---------------------------------------------------------------- memory of one role


def peak_training_memory(
    choice: TrainChoice,
    tokens: float,
    micro_batches: int,
    logits_bytes_per_element: float | None = None,
) -> RoleMemory:
    """Return the peak memory of training on ``micro_batches`` micro-batches of ``tokens`` tokens.

    The result describes the GPU with the highest memory use.

    ``logits_bytes_per_element`` is for a framework that materialises the logits of a complete micro-batch.
    With None, logits are computed in chunks.
    """
    model = choice.model
    layout = choice.layout
    stages = default_stage_layers(model.layers, layout.pipeline, layout.virtual_pipeline)
    # If Megatron's settings for the first and the last stage can express the split, all middle stages have
    # the same number of layers. Evaluate only one of several equal stages.
    has_end_settings = end_settings(model.layers, layout.pipeline, layout.virtual_pipeline) is not None
    stage_indices: Sequence[int] = range(len(stages))
    if has_end_settings:
        stage_indices = find_representative_stages(model, stages)

    memories = []
    for stage in stage_indices:
        adapters = None
        if choice.lora is not None:
            adapters = adapter_parameter_count(model, layout, stages[stage], choice.lora)
        memory = training_memory(
            model, layout, stages, stage, choice.optimizer, choice.layers, tokens, micro_batches, adapters
        )
        if logits_bytes_per_element is not None and memory.logits:
            num_logits = tokens / layout.context * model.vocab / layout.tensor
            memory = replace(memory, logits=num_logits * logits_bytes_per_element)
        memories.append(memory)

    # If Megatron's settings cannot express the split, a custom pipeline layout is needed. Assume that this
    # layout balances weights, gradients and optimizer states over the stages.
    if not has_end_settings:
        mean_states = {}
        for name in ("weights", "gradients", "optimizer"):
            total_bytes = sum(getattr(memory, name) for memory in memories)
            mean_states[name] = total_bytes / len(memories)
        memories = [replace(memory, **mean_states) for memory in memories]
    return _role_memory(memories)


def _role_memory(memories: Sequence[TrainingMemory]) -> RoleMemory:
    """Combine the memories of a role's pipeline stages: the highest peak, and the largest states."""
    fullest_memory = max(memories, key=lambda memory: memory.total)
    max_state_bytes = max(memory.states for memory in memories)
    return RoleMemory(replace(fullest_memory, overhead=RUNTIME_BYTES), max_state_bytes)


def learn_memory(choice: TrainChoice, batch: StepBatch) -> RoleMemory:
    """Return the peak memory of training one role on a batch, on the GPUs with the highest memory use."""
    work = replica_work(choice, batch, batch.rows / batch.optimizer_steps)

    # The largest micro-batch contains a row of the largest length, even if the mean micro-batch is smaller.
    row_tokens = batch.row_limit
    if batch.packing:
        row_tokens = choice.micro_batch * batch.row_limit
    return peak_training_memory(choice, max(work.tokens, row_tokens), max(1, round(work.micro_batches)))


def merged_bytes(choice: TrainChoice) -> float:
    """Return the bytes of merged weights (base plus adapters) on the fullest GPU during a weight sync."""
    model = choice.model
    layout = choice.layout
    lora = choice.lora
    # Without adapters nothing is merged.
    if lora is None:
        return 0.0

    stages = default_stage_layers(model.layers, layout.pipeline, layout.virtual_pipeline)
    parameters = max(adapted_parameter_count(model, layout, layers, lora.targets) for layers in stages)
    return float(choice.layers.dtype_bytes * parameters)


def score_memory(choice: TrainChoice, batch: StepBatch) -> RoleMemory:
    """Return the peak memory of a role in the score phase, where the role only runs forward passes.

    The peak is that of the pipeline stage with the most memory.
    """
    model = choice.model
    layout = choice.layout
    tokens = choice.micro_batch * batch.row_limit

    stages = default_stage_layers(model.layers, layout.pipeline, layout.virtual_pipeline)
    memories = [
        forward_only_memory(model, layout, stages, stage, choice.layers, tokens)
        for stage in find_representative_stages(model, stages)
    ]
    return _role_memory(memories)
