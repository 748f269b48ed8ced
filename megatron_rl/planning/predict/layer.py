"""Seconds of one layer on one GPU, forward and backward, and of the collectives between GPUs.

A layer costs its matrix products at the GPU's achieved rate, attention at its own rate, memory-bound
tensors (norms, activations, permutations) at HBM rate, and the communication that stays exposed; never
less than what launching its kernels takes. A routed layer also waits for the host. FLOPs: Narayanan et al.
2021 (arXiv 2104.04473) section 5.1; tensor-parallel traffic: Korthikanti et al. 2022 (two all-gathers and
two reduce-scatters a layer and direction).

Ring costs: all-gather and reduce-scatter of V bytes over n ranks move V (n-1)/n per rank (Thakur et
al. 2005). A ring that crosses nodes uses the network cards of all its members in a node, so a group
with g members per node gets min(NVLink, g x card).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.shapes.hardware import Cluster, Machine
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.memory import Layers
from megatron_rl.shapes.model import LayerKind, ModelShape


def local_members(cluster: Cluster, size: int, stride: int) -> int:
    """Count the members of a rank group that share one NVLink domain (at least one)."""
    return max(1, min(size, cluster.domain // max(1, stride)))


def group_bandwidth(machine: Machine, size: int, stride: int) -> float:
    """Return achieved bytes/s per rank of a ring over ``size`` ranks that are ``stride`` apart."""
    cluster, efficiency = machine.cluster, machine.constants.efficiency
    local = local_members(cluster, size, stride)
    inside = cluster.gpu.nvlink * efficiency.nvlink
    if local >= size:
        return inside
    return min(inside, local * cluster.network * efficiency.network)


def gather_seconds(machine: Machine, size: int, stride: int, total_bytes: float) -> float:
    """Return seconds to all-gather (or reduce-scatter) ``total_bytes`` over a group."""
    if size <= 1:
        return 0.0
    return total_bytes * (size - 1) / size / group_bandwidth(machine, size, stride)


def all_to_all_seconds(machine: Machine, size: int, sent_bytes: float, copies: int) -> float:
    """Return seconds of a token exchange over consecutive ranks, one direction.

    ``sent_bytes`` is what a rank sends in all (each token to each of its ``copies`` experts). Across
    nodes a token is sent once per node that needs it: min(copies, nodes) of its copies (DeepEP,
    arXiv 2412.19437 section 3.2.2).
    """
    if size <= 1:
        return 0.0
    cluster, efficiency = machine.cluster, machine.constants.efficiency
    local = local_members(cluster, size, 1)
    inside = sent_bytes * (size - 1) / size / (cluster.gpu.nvlink * efficiency.nvlink)
    if local >= size:
        return inside
    nodes = size / local
    per_copy = sent_bytes / max(1, copies)
    # Distinct remote nodes that k uniform choices among the nodes hit.
    reached = nodes * (1.0 - (1.0 - 1.0 / nodes) ** copies) * (nodes - 1) / nodes
    return max(inside, per_copy * reached / (cluster.network * efficiency.network))


@dataclass(frozen=True)
class LayerSeconds:
    """Hold seconds of one average layer for one micro-batch, and of the output projection.

    ``attention`` is the part of ``forward`` that selective recompute repeats.
    """

    forward: float
    backward: float
    attention: float
    head_forward: float
    head_backward: float


def gemm_rate(machine: Machine, precision: str, width: float) -> float:
    """Return achieved FLOP/s of dense products whose sharded dimension is ``width``."""
    gpu, constants = machine.gpu, machine.constants.efficiency
    efficiency = gpu.gemm_efficiency * width / (width + constants.gemm_width)
    if precision == "fp8":
        efficiency *= constants.fp8_gemm
    return gpu.peak(precision) * efficiency


def expert_rate(machine: Machine, model: ModelShape, layout: ParallelLayout, tokens: float) -> float:
    """Return achieved FLOP/s of grouped expert products; few rows or narrow experts cost efficiency."""
    gpu, constants, precision = machine.gpu, machine.constants.efficiency, machine.precision
    width = model.expert_width / layout.expert_tensor
    local = max(1.0, model.experts / layout.expert)
    rows = tokens / layout.tensor * model.experts_per_token / local
    fill = rows / (rows + constants.expert_gemm_rows) * width / (width + constants.expert_gemm_width)
    base = gpu.gemm_efficiency * (constants.fp8_gemm if precision == "fp8" else 1.0)
    return gpu.peak(precision) * base * fill


def elementwise_bytes(model: ModelShape, tensor: int, token_shards: int) -> float:
    """Return bytes that one token moves through HBM in an average layer's forward, on one GPU.

    Norms, residuals: 24 h; rotary and head tensors: 8 a d; activation: 6 f gated, 4 f plain; MoE
    permutations, before and after the exchange, both ways: 12 k h.
    """
    moe_share = model.moe_layers / model.layers
    inner = (
        model.mlp_width * (1 - moe_share)
        + (model.experts_per_token * model.expert_width + model.shared_width) * moe_share
    )
    per_inner = 6.0 if model.gated else 4.0
    sharded = 8.0 * model.heads * model.head_dim + per_inner * inner
    sharded += 12.0 * model.experts_per_token * model.hidden * moe_share
    return 24.0 * model.hidden / token_shards + sharded / tensor


def _exposed_communication(
    model: ModelShape, layout: ParallelLayout, machine: Machine, tokens: float, fused: bool, exchanges: bool
) -> float:
    """Return forward seconds of a layer's exposed tensor, expert and context traffic.

    Under context parallelism this package ``exchanges`` heads for whole rows before and after attention;
    other systems gather keys and values, overlapped with it.
    """
    efficiency = machine.constants.efficiency
    moe_share = model.moe_layers / model.layers
    wide = 2.0 * model.hidden * tokens
    # Overlap with the products needs sequence parallelism (Transformer Engine user buffers).
    overlapped = layout.sequence_parallel and fused
    share = efficiency.tensor_exposed_overlapped if overlapped else efficiency.tensor_exposed
    passes = 4.0 - 2.0 * moe_share if layout.expert_tensor == 1 and model.experts else 4.0
    total = share * passes * gather_seconds(machine, layout.tensor, 1, wide)
    if layout.expert > 1:
        copies = model.experts_per_token
        sent = copies * wide / layout.tensor
        total += 2.0 * moe_share * all_to_all_seconds(machine, layout.expert, sent, copies)
    if layout.context > 1 and exchanges:
        heads, groups = model.heads / layout.tensor, model.kv_heads / layout.tensor
        groups = heads if model.mla or groups % layout.context else groups
        sent = 2.0 * tokens * (heads + groups) * (model.qk_dim + model.value_dim)
        total += gather_seconds(machine, layout.context, layout.tensor, sent)
    elif layout.context > 1:
        heads = 1 if model.mla else max(1, model.kv_heads // layout.tensor)
        width = model.kv_lora + model.qk_rope if model.mla else 2 * heads * model.head_dim
        gathered = 2.0 * width * tokens * layout.context
        total += efficiency.context_exposed * gather_seconds(machine, layout.context, layout.tensor, gathered)
    return total


def layer_seconds(
    model: ModelShape,
    layout: ParallelLayout,
    machine: Machine,
    tokens: float,
    context: float,
    fused: bool = True,
    frozen: bool = False,
    exchanges: bool = True,
) -> LayerSeconds:
    """Return one average layer's seconds for a micro-batch of ``tokens`` tokens (before context split).

    ``context`` is the mean number of keys a token attends to. ``fused`` takes Transformer Engine's layers,
    otherwise this package's own, which move more bytes through memory as they keep more. Weights that are
    ``frozen`` have no gradients of their own; the products of adapters beside them are not counted. Where
    sequences are cut, heads are exchanged around attention, else keys and values gathered (``exchanges``).
    """
    efficiency, gpu = machine.constants.efficiency, machine.gpu
    tokens = tokens / layout.context
    active_experts = model.active_expert_parameters
    dense_flops = (model.layer_flops - 2.0 * active_experts) / model.layers
    width = min(
        model.heads * model.head_dim, model.mlp_width if model.moe_layers < model.layers else model.hidden * 2
    )
    dense_rate = gemm_rate(machine, machine.precision, width / layout.tensor)
    dense = tokens * dense_flops / layout.tensor / dense_rate
    experts = 0.0
    if active_experts:
        rate = expert_rate(machine, model, layout, tokens)
        experts = tokens * 2.0 * active_experts / model.layers / layout.tensor / rate
    attention_rate = gpu.bf16_flops * efficiency.attention * min(1.0, gpu.pace)
    attention = tokens * model.attention_flops(context) / model.layers / layout.tensor / attention_rate
    moved = tokens * elementwise_bytes(model, layout.tensor, layout.token_shards)
    moved /= gpu.hbm * efficiency.hbm
    if not fused:
        kind = LayerKind(linear=False, experts=model.moe_layers > 0)
        backend = Layers(fused=False).saved_bytes(model, layout, kind, "none")
        engine = Layers(fused=True).saved_bytes(model, layout, kind, "none")
        moved *= backend / engine
    exposed = _exposed_communication(model, layout, machine, tokens, fused, exchanges)
    launch = efficiency.launch_seconds_layer
    # Without padding the host must read how many tokens each expert got before it launches the products.
    waits = efficiency.routing_seconds_layer * model.moe_layers / model.layers
    forward = max(dense + experts + attention + moved + exposed, launch) + waits
    backward_attention = attention * 2.5 / efficiency.attention_backward
    products = 1 if frozen else 2
    backward = max(products * (dense + experts) + backward_attention + 2 * moved + exposed, 1.5 * launch)
    backward += 1.5 * waits
    head_rate = gemm_rate(machine, "bf16", model.vocab / layout.tensor)
    head = tokens * model.head_flops / layout.tensor / head_rate
    head_moved = tokens * 20.0 * model.vocab / layout.tensor / (gpu.hbm * efficiency.hbm)
    return LayerSeconds(forward, backward, attention, head + head_moved, products * head + head_moved)
