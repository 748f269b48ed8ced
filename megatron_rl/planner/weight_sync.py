"""Bytes and seconds of moving weights from training to generation.

Volumes: HybridFlow (arXiv 2409.19256) table 2. Seconds: a fixed part per synchronisation plus bytes
over the slowest link of the method; the constants' sources are in constants.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.errors import UserError, nearest
from megatron_rl.planner.constants import GB, Cluster, Constants
from megatron_rl.planner.layout import Layout, RolloutLayout
from megatron_rl.planner.memory import PRECISION_BYTES, rollout_weight_bytes
from megatron_rl.shapes.model import ModelShape

METHODS = ("strided_reshard", "gather_and_load", "host_broadcast", "planned_peer_to_peer")


@dataclass(frozen=True)
class SyncVolume:
    """Hold bytes per GPU: received, parameter peak, and kept twice."""

    received: float
    peak: float
    redundant: float


def model_bytes(model: ModelShape, precision: str) -> float:
    """Return the bytes of the weights that move."""
    return float(PRECISION_BYTES.get(precision, 2) * model.parameters)


def volume(
    model: ModelShape, layout: Layout, rollout: RolloutLayout, method: str, precision: str
) -> SyncVolume:
    """Return bytes per GPU of one synchronisation in place (HybridFlow table 2).

    strided: (tp - t_g p_g) / (t_g p_g t p) M received, peak M / (t_g p_g), nothing twice; every other
    method gathers the model: (tp - 1) / tp M received, peak M, M / tp twice.
    """
    total = model_bytes(model, precision)
    train = layout.tensor * layout.pipeline
    shard = rollout.tensor * rollout.pipeline
    if method == "strided_reshard":
        return SyncVolume(max(0.0, (train - shard) / (shard * train)) * total, total / shard, 0.0)
    if method == "planned_peer_to_peer":
        return SyncVolume(total / shard, total / shard, 0.0)
    return SyncVolume((train - 1) / train * total, total, total / train)


def _strided(
    model: ModelShape,
    layout: Layout,
    rollout: RolloutLayout,
    cluster: Cluster,
    constants: Constants,
    precision: str,
) -> float:
    sync = constants.weight_sync
    train = layout.tensor * layout.pipeline
    moved = volume(model, layout, rollout, "strided_reshard", precision).received
    # A stage's tensor slices sit in one node (consecutive ranks); other stages sit on other nodes
    # unless the whole job fits one.
    slices = max(1.0, layout.tensor / rollout.tensor)
    stages = layout.pipeline if layout.size <= cluster.domain else 1
    inside = min(moved, (slices * stages - 1) / train * model_bytes(model, precision))
    seconds = inside / (cluster.gpu.nvlink * constants.efficiency.nvlink)
    return sync.strided_fixed_seconds + seconds + (moved - inside) / (cluster.network * sync.strided_network)


def _gathered(
    model: ModelShape, layout: Layout | None, cluster: Cluster, constants: Constants, precision: str
) -> float:
    sync = constants.weight_sync
    total = model_bytes(model, precision)
    seconds = sync.gather_fixed_seconds + model.tensors * sync.gather_seconds_per_tensor
    seconds += total / (sync.gather_copy_gigabytes_per_second * GB)
    span = layout.tensor * layout.pipeline * max(1, layout.expert // layout.tensor) if layout else 1
    if span > cluster.domain:
        outside = total * (1 - cluster.domain / span)
        # Every node receives what it lacks over all of its cards, then spreads it inside.
        seconds += outside / (cluster.network * min(cluster.gpus_per_node, 8) * sync.gather_network)
    return seconds


def sync_seconds(
    model: ModelShape,
    layout: Layout | None,
    rollout: RolloutLayout,
    cluster: Cluster,
    constants: Constants,
    method: str,
    precision: str,
    rollout_gpus: int,
    train_gpus: int | None = None,
) -> float:
    """Return seconds of one weight synchronisation by ``method``; raises UserError on an unknown one.

    host_broadcast starts in host memory: pipelined copy and broadcast at a rate that depends on
    whether one node or several receive, hardly on their number. planned_peer_to_peer: every rollout
    GPU receives its shard over its own card; the senders share the replicas' demand.
    """
    sync = constants.weight_sync
    total = model_bytes(model, precision)
    if method == "strided_reshard":
        if layout is None:
            raise UserError("strided_reshard needs the training layout", where="layout", fix="state layout")
        return _strided(model, layout, rollout, cluster, constants, precision)
    if method == "gather_and_load":
        return _gathered(model, layout, cluster, constants, precision)
    if method == "host_broadcast":
        one_node = rollout_gpus <= cluster.gpus_per_node
        rate = sync.host_node_gigabytes_per_second if one_node else sync.host_network_gigabytes_per_second
        return sync.host_fixed_seconds + total / (rate * GB)
    if method == "planned_peer_to_peer":
        received = rollout_weight_bytes(model, rollout, precision)
        if train_gpus:
            # Each byte leaves the trainer at least once; replicas relay to one another.
            received = max(received, total / train_gpus)
        return sync.planned_fixed_seconds + received / (cluster.network * sync.planned_network)
    guess = nearest(method, METHODS)
    raise UserError(
        f"unknown weight sync method {method!r}",
        where="weight_sync.method",
        expected="one of " + ", ".join(METHODS),
        got=method,
        fix=f"did you mean {guess}?" if guess else None,
    )
