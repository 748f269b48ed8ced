"""Seconds of an optimizer step and of a log-prob pass under a pipeline schedule.

Schedule: t_mb (m + (p - 1) / v) with the slowest stage's t_mb (Narayanan et al. 2021, section 2.2).
Data parallelism: reduce-scatter of gradients and all-gather of 2-byte parameters, partly overlapped.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megatron_rl.planner.communication import gather_seconds
from megatron_rl.planner.compute import LayerSeconds, layer_seconds
from megatron_rl.planner.constants import Cluster, Constants
from megatron_rl.planner.layout import Layout
from megatron_rl.planner.memory import OptimizerChoice, parameters_per_gpu
from megatron_rl.shapes.model import ModelShape


@dataclass(frozen=True)
class Work:
    """Say what one pass over rows holds, for one data-parallel replica.

    ``tokens`` per micro-batch, ``micro_batches`` per replica, ``context`` mean attended keys.
    """

    tokens: float
    micro_batches: float
    context: float


def replica_work(
    rows: float, mean: float, longest: float, context: float, data: int, micro_batch: int, packing: bool
) -> Work:
    """Split ``rows`` sequences of ``mean`` tokens over ``data`` replicas into micro-batches.

    With packing a micro-batch holds up to ``micro_batch * longest`` tokens, never less than a row;
    without, ``micro_batch`` rows padded to the longest of them. A replica gets at least one row.
    """
    mine = max(1.0, rows / data)
    if packing:
        per = max(1.0, micro_batch * longest / mean - 0.5)
        per = min(per, mine)
        tokens = per * mean
    else:
        per = min(float(micro_batch), mine)
        padded = mean if per <= 1 else mean + (longest - mean) * (1 - 1 / per)
        tokens = per * padded
    return Work(tokens, max(1.0, mine / per), context)


def _stage(model: ModelShape, layout: Layout, per_layer: float, head: float) -> tuple[float, float]:
    """Return (slowest, mean) stage seconds; the head rides on the last stage."""
    pipeline = layout.pipeline
    mean = (model.layers * per_layer + head) / pipeline
    if pipeline == 1:
        return mean, mean
    if model.layers % pipeline == 0 and layout.virtual_pipeline == 1:
        slowest = model.layers // pipeline * per_layer + head
        # An uneven split that gives the head's stage fewer layers bounds the loss.
        return min(slowest, max(mean, ceil(mean / per_layer) * per_layer)), mean
    chunk = per_layer if layout.virtual_pipeline == 1 else head * 0.5
    return min(max(mean, ceil(mean / per_layer) * per_layer), mean + chunk), mean


def _pipeline_seconds(
    model: ModelShape,
    layout: Layout,
    cluster: Cluster,
    constants: Constants,
    work: Work,
    slow: float,
    mean: float,
) -> float:
    virtual = layout.virtual_pipeline
    total = slow * work.micro_batches + mean * (layout.pipeline - 1) / virtual
    if layout.pipeline > 1:
        share = layout.tensor if layout.sequence_parallel else 1
        sent = 2.0 * model.hidden * work.tokens / layout.context / share
        stride = layout.tensor * layout.context * layout.data
        inside = stride * 2 <= cluster.domain
        rate = (cluster.gpu.nvlink if inside else cluster.network) * constants.efficiency.network
        hops = work.micro_batches * virtual + layout.pipeline - 1
        total += constants.efficiency.pipeline_exposed * 2.0 * hops * sent / rate
    return total


def _data_parallel_seconds(
    model: ModelShape, layout: Layout, cluster: Cluster, constants: Constants, optimizer: OptimizerChoice
) -> float:
    dense, expert = parameters_per_gpu(model, layout)
    bytes_each = optimizer.gradient_bytes + 2.0
    shards = layout.data * layout.context
    stride = layout.tensor
    total = gather_seconds(cluster, constants, shards, stride, dense * bytes_each)
    if expert:
        expert_stride = layout.expert * layout.expert_tensor
        total += gather_seconds(cluster, constants, layout.expert_data, expert_stride, expert * bytes_each)
    return total


def _optimizer_seconds(
    model: ModelShape, layout: Layout, cluster: Cluster, constants: Constants, optimizer: OptimizerChoice
) -> float:
    dense, expert = parameters_per_gpu(model, layout)
    shards = layout.data * layout.context
    mine = dense / shards + expert / layout.expert_data
    if not (optimizer.distributed or layout.fully_sharded):
        mine = dense + expert
    seconds = (
        mine
        * constants.efficiency.optimizer_bytes_per_parameter
        / (cluster.gpu.hbm * constants.efficiency.hbm)
    )
    if optimizer.offload:
        # Gradients go to the host and parameters come back; the update itself runs at host memory rate.
        moved = mine * (optimizer.gradient_bytes + 2.0 + 2.0 * optimizer.state_bytes)
        seconds += moved / (cluster.gpu.host * constants.efficiency.host)
    return seconds


def _sharded_overhead(
    model: ModelShape,
    layout: Layout,
    cluster: Cluster,
    constants: Constants,
    work: Work,
    compute: float,
    passes: int,
) -> float:
    """Seconds that gathering fully sharded weights adds to ``compute`` (FSDP: gather per micro-batch)."""
    dense, expert = parameters_per_gpu(model, layout)
    once = gather_seconds(
        cluster, constants, layout.data * layout.context, layout.tensor, 2.0 * (dense + expert)
    )
    traffic = passes * once * work.micro_batches
    return max(0.0, traffic - 0.8 * compute) + 0.1 * min(traffic, compute)


def train_seconds(
    model: ModelShape,
    layout: Layout,
    cluster: Cluster,
    constants: Constants,
    precision: str,
    work: Work,
    recompute: str,
    optimizer: OptimizerChoice,
    share: float = 1.0,
) -> float:
    """Return seconds of one optimizer step (forward, backward, gradient exchange, update).

    ``share`` is the part of the kernels' pace that the surrounding loop keeps; it slows computation,
    not the gradient exchange.
    """
    layer = layer_seconds(model, layout, cluster, constants, precision, work.tokens, work.context)
    backward = layer.backward
    if recompute == "full":
        backward += layer.forward
    elif recompute == "selective":
        backward += layer.attention
    slow, mean = _stage(model, layout, layer.forward + backward, layer.head_forward + layer.head_backward)
    total = _pipeline_seconds(model, layout, cluster, constants, work, slow, mean) / share
    update = _optimizer_seconds(model, layout, cluster, constants, optimizer)
    if layout.fully_sharded:
        reduce = _data_parallel_seconds(model, layout, cluster, constants, optimizer)
        gathered = _sharded_overhead(model, layout, cluster, constants, work, total, 2)
        return total + gathered + constants.efficiency.data_exposed * reduce + update
    exchange = _data_parallel_seconds(model, layout, cluster, constants, optimizer)
    return total + constants.efficiency.data_exposed * exchange + update


def forward_seconds(
    model: ModelShape,
    layout: Layout,
    cluster: Cluster,
    constants: Constants,
    precision: str,
    work: Work,
) -> float:
    """Return seconds of one forward pass (log-probs, values, rewards) over the same rows."""
    layer: LayerSeconds = layer_seconds(
        model, layout, cluster, constants, precision, work.tokens, work.context
    )
    slow, mean = _stage(model, layout, layer.forward, layer.head_forward)
    total = _pipeline_seconds(model, layout, cluster, constants, work, slow, mean)
    if layout.fully_sharded:
        total += _sharded_overhead(model, layout, cluster, constants, work, total, 1)
    return total


def model_flops_per_token(
    model: ModelShape, sequence: float, attention: str, recompute_counted: bool
) -> float:
    """Return training FLOPs per token by a paper's convention.

    3 x forward; ``attention`` full counts s keys per token, causal s / 2. With recompute counted the
    layers' forward is counted once more, the output projection is not (Narayanan et al. 2021, eq. 3:
    96 B s l h^2 (1 + s/6h + V/16lh)).
    """
    context = sequence if attention == "full" else sequence / 2
    layers = model.layer_flops + model.attention_flops(context)
    return layers * (4.0 if recompute_counted else 3.0) + 3.0 * model.head_flops
