"""Predictions for systems of the published points that this project does not have.

They are other weight syncs, serving, and fully sharded training.

Sync volumes: HybridFlow (arXiv 2409.19256) table 2. Seconds: a fixed part per sync plus bytes over the
slowest link of the method; the constants' sources are in constants.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.errors import UserError, nearest
from megatron_rl.planning.predict.batch import ResponseLengths
from megatron_rl.planning.predict.generate import (
    POINTS,
    RolloutLayout,
    cache_capacity_tokens,
    decode_cost,
    prefill_seconds,
    rollout_weight_bytes,
)
from megatron_rl.planning.predict.learn import ReplicaWork, TrainChoice, gather_seconds
from megatron_rl.planning.predict.placement import SyncSeconds
from megatron_rl.planning.predict.step import weight_transfer_seconds
from megatron_rl.shapes.hardware import GB, Machine
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.memory import max_stage_parameters
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.traffic import gathered_bytes, received_by_other_projects

Method = Callable[[ModelShape, ParallelLayout | None, RolloutLayout, Machine], float]
"""Function that returns the seconds of one weight sync."""
_GATHER_OVERLAP = 0.8
"""Share of computation behind which the gathering of fully sharded weights is hidden."""
_GATHER_EXPOSED = 0.1
"""Share of the gathering that is never hidden."""


@dataclass(frozen=True)
class SyncVolume:
    """Bytes per GPU of one sync."""

    received: float
    """Bytes that the GPU receives."""
    peak: float
    """Most bytes of parameters at once."""
    redundant: float
    """Bytes of parameters that are in memory twice."""


def volume(
    model: ModelShape,
    layout: ParallelLayout,
    rollout: RolloutLayout,
    method: str,
    machine: Machine,
) -> SyncVolume:
    """Return bytes per GPU of one sync in place (HybridFlow table 2).

    strided: (tp - t_g p_g) / (t_g p_g t p) M received, peak M / (t_g p_g), nothing twice; every other
    method gathers the model: (tp - 1) / tp M received, peak M, M / tp twice.
    """
    # M of the paper.
    total = float(machine.bytes_per_weight * model.parameters)
    # Ranks that share one copy of the model, in training and in generation.
    train = layout.tensor * layout.pipeline

    shard = rollout.tensor * rollout.pipeline
    if method == "strided_reshard":
        received = received_by_other_projects(total, layout, shard).get("HybridFlow", 0.0)
        return SyncVolume(received, total / shard, 0.0)

    if method == "planned_peer_to_peer":
        return SyncVolume(total / shard, total / shard, 0.0)
    return SyncVolume(gathered_bytes(total, layout), total, total / train)


def strided_seconds(
    model: ModelShape,
    layout: ParallelLayout | None,
    rollout: RolloutLayout,
    machine: Machine,
) -> float:
    """Return seconds of HybridFlow's sync in place: each rank gathers the slices its shard lacks."""
    if layout is None:
        raise UserError("strided_reshard needs the training layout", where="layout", fix="state layout")

    cluster = machine.cluster
    constants = machine.constants
    train = layout.tensor * layout.pipeline
    received = volume(model, layout, rollout, "strided_reshard", machine).received

    # A stage's tensor slices are in one node (consecutive ranks); other stages are on other nodes unless
    # the complete job fits one.
    slices = max(1.0, layout.tensor / rollout.tensor)

    stages = 1
    if layout.size <= cluster.domain:
        stages = layout.pipeline

    node_bytes = min(received, (slices * stages - 1) / train * machine.bytes_per_weight * model.parameters)
    seconds = node_bytes / (cluster.gpu.nvlink * constants.efficiency.nvlink)
    seconds += (received - node_bytes) / (cluster.network * constants.weight_sync.strided_network)
    return constants.weight_sync.strided_fixed_seconds + seconds


def gathered_seconds(
    model: ModelShape,
    layout: ParallelLayout | None,
    rollout: RolloutLayout,
    machine: Machine,
) -> float:
    """Return seconds of gathering every complete tensor, which the engine then loads."""
    cluster = machine.cluster
    sync = machine.constants.weight_sync
    total = machine.bytes_per_weight * model.parameters
    # Every tensor costs a collective, and a copy at the rate of the engine's loader.
    seconds = sync.gather_fixed_seconds + model.tensor_count * sync.gather_seconds_per_tensor

    seconds += total / (sync.gather_copy_gigabytes_per_second * GB)

    # Ranks that have a copy of the model together.
    model_ranks = 1
    if layout:
        model_ranks = layout.tensor * layout.pipeline * max(1, layout.expert // layout.tensor)
    if model_ranks > cluster.domain:
        remote_bytes = total * (1 - cluster.domain / model_ranks)
        # Every node receives the missing bytes over all of its cards, then spreads them inside.
        seconds += remote_bytes / (cluster.network * min(cluster.gpus_per_node, 8) * sync.gather_network)
    return seconds


def broadcast_seconds(
    model: ModelShape,
    layout: ParallelLayout | None,
    rollout: RolloutLayout,
    machine: Machine,
) -> float:
    """Return seconds of a sync that starts in host memory: pipelined copy and broadcast.

    The rate depends on whether one node or several receive, hardly on their number.
    """
    sync = machine.constants.weight_sync
    one_node = rollout.replicas * rollout.gpus <= machine.cluster.gpus_per_node
    rate = sync.host_network_gigabytes_per_second
    if one_node:
        rate = sync.host_node_gigabytes_per_second
    return sync.host_fixed_seconds + machine.bytes_per_weight * model.parameters / (rate * GB)


def planned_sync_seconds(
    model: ModelShape,
    layout: ParallelLayout | None,
    rollout: RolloutLayout,
    machine: Machine,
) -> float:
    """Return seconds of planned copies between disjoint ranks: every rank receives its complete shard.

    Without a ``layout`` the senders are not the bottleneck.
    """
    received_bytes = rollout_weight_bytes(model, rollout, machine)
    sent_bytes = 0.0
    if layout:
        sent_bytes = machine.bytes_per_weight * model.parameters / layout.size
    return weight_transfer_seconds(machine, max(received_bytes, sent_bytes))


METHODS: dict[str, Method] = {
    "strided_reshard": strided_seconds,
    "gather_and_load": gathered_seconds,
    "host_broadcast": broadcast_seconds,
    "planned_peer_to_peer": planned_sync_seconds,
}


def method_of(method: str) -> Method:
    """Return a method's seconds as a function; raises UserError on an unknown one."""
    if method in METHODS:
        return METHODS[method]

    guess = nearest(method, METHODS)
    raise UserError(
        f"unknown weight sync method {method!r}",
        where="weight_sync.method",
        expected="one of " + ", ".join(METHODS),
        got=method,
        fix=f"did you mean {guess}?" if guess else None,
    )


def sync_of(method: str) -> SyncSeconds:
    """Return a method as the search calls it: its seconds do not depend on the engine's ranks."""
    seconds = method_of(method)

    def sync_seconds(
        model: ModelShape,
        layout: ParallelLayout,
        rollout: RolloutLayout,
        ranks: Sequence[int],
        machine: Machine,
    ) -> float:
        return seconds(model, layout, rollout, machine)

    return sync_seconds


def decode_milliseconds(
    model: ModelShape,
    rollout: RolloutLayout,
    machine: Machine,
    rows: float,
    prompt: float,
    lengths: ResponseLengths,
) -> float:
    """Return the mean milliseconds between tokens when ``rows`` sequences decode together."""
    # Integrate over the response length, weighted by the sequences that are alive.
    cost = decode_cost(model, rollout, machine)
    width = lengths.limit / POINTS
    total = 0.0
    weight = 0.0

    for point in range(POINTS):
        length = (point + 0.5) * width
        alive = rows * lengths.fraction_longer(length)
        total += alive * cost.seconds(max(1.0, alive), prompt + length)
        weight += alive
    return 1e3 * total / weight


def serving_tokens_per_second(
    model: ModelShape,
    rollout: RolloutLayout,
    machine: Machine,
    concurrent: float,
    prompt: float,
    lengths: ResponseLengths,
) -> float:
    """Return response tokens per second of one replica that is kept full by a queue.

    Running sequences are mid-response on average, and decoding waits for each response's prefill.
    """
    # As many run as the queue, the engine and its cache allow.
    engine = machine.constants.engines[rollout.engine]
    generated = lengths.mean_square() / (2.0 * lengths.mean)
    capacity = cache_capacity_tokens(model, rollout, machine)

    running = min(concurrent, rollout.max_sequences or engine.max_sequences, capacity / (prompt + generated))
    if running < 1.0:
        return 0.0

    cost = decode_cost(model, rollout, machine)
    prefill = prefill_seconds(model, rollout, machine, prompt, prompt)
    seconds_per_token = cost.seconds(running, prompt + generated) + running * prefill / lengths.mean
    return running / seconds_per_token


def gathering_seconds(
    choice: TrainChoice,
    machine: Machine,
    work: ReplicaWork,
    compute: float,
) -> float:
    """Return the seconds that gathering fully sharded weights adds to ``compute`` of an optimizer step.

    Weights are gathered for the forward and the backward of every micro-batch; most of it overlaps.
    """
    # In bfloat16, over the data-parallel ranks.
    layout = choice.layout
    weights = 2.0 * sum(max_stage_parameters(choice.model, layout))
    gather = gather_seconds(machine, layout.data * layout.context, layout.tensor, weights)
    traffic = 2 * gather * work.micro_batches
    return max(0.0, traffic - _GATHER_OVERLAP * compute) + _GATHER_EXPOSED * min(traffic, compute)


def model_flops_per_token(
    model: ModelShape,
    sequence: float,
    attention: str,
    recompute_counted: bool,
) -> float:
    """Return training FLOPs per token by a paper's convention.

    3 x forward; ``attention`` full counts s keys per token, causal s / 2. With recompute counted the
    layers' forward is counted once more, the output projection is not (Narayanan et al. 2021, eq. 3:
    96 B s l h^2 (1 + s/6h + V/16lh)).
    """
    context = sequence / 2
    if attention == "full":
        context = sequence
    layers = model.layer_flops + model.attention_flops(context)
    passes = 3.0
    if recompute_counted:
        passes = 4.0
    return layers * passes + 3.0 * model.head_flops
