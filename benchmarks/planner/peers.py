"""Predictions for features of other systems in the published points: weight syncs, serving, sharded training.

The volumes of weight syncs follow table 2 of HybridFlow (arXiv 2409.19256). The seconds of a weight sync are
a fixed part plus the bytes over the slowest link of the method. The sources of the constants are in
constants.json.
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
"""Fraction of the computation time that can overlap with the gathering of fully sharded weights."""
_GATHER_EXPOSED = 0.1
"""Fraction of the gathering that never overlaps."""


@dataclass(frozen=True)
class SyncVolume:
    """Bytes per GPU of one weight sync."""

    received: float
    """Bytes that the GPU receives."""
    peak: float
    """Peak size of the parameters in memory."""
    redundant: float
    """Bytes of parameters that are in memory twice."""


def predict_sync_volume(
    model: ModelShape,
    layout: ParallelLayout,
    rollout: RolloutLayout,
    method: str,
    machine: Machine,
) -> SyncVolume:
    """Return the bytes per GPU of a weight sync between trainer and engine on the same GPUs.

    The formulas are in table 2 of HybridFlow. M are the bytes of the model. t and p are the tensor and
    pipeline sizes of training, t_g and p_g are the tensor and pipeline sizes of generation.

    - strided_reshard: (tp - t_g p_g) / (t_g p_g t p) M received, peak M / (t_g p_g), nothing twice
    - methods that gather the model: (tp - 1) / tp M received, peak M, M / tp twice
    """
    model_bytes = float(machine.bytes_per_weight * model.parameters)
    # Ranks that share one copy of the model, in training and in generation.
    train_ranks = layout.tensor * layout.pipeline
    rollout_ranks = rollout.tensor * rollout.pipeline

    if method == "strided_reshard":
        received = received_by_other_projects(model_bytes, layout, rollout_ranks).get("HybridFlow", 0.0)
        return SyncVolume(received, model_bytes / rollout_ranks, 0.0)

    # Each rank of the engine receives its own shard, and needs no other memory.
    if method == "planned_peer_to_peer":
        return SyncVolume(model_bytes / rollout_ranks, model_bytes / rollout_ranks, 0.0)
    return SyncVolume(gathered_bytes(model_bytes, layout), model_bytes, model_bytes / train_ranks)


def strided_seconds(
    model: ModelShape,
    layout: ParallelLayout | None,
    rollout: RolloutLayout,
    machine: Machine,
) -> float:
    """Return the seconds of HybridFlow's sync on the same GPUs, where each rank gathers missing slices."""
    if layout is None:
        raise UserError("strided_reshard needs the training layout", where="layout", fix="state layout")

    cluster = machine.cluster
    constants = machine.constants
    model_ranks = layout.tensor * layout.pipeline
    received = predict_sync_volume(model, layout, rollout, "strided_reshard", machine).received

    # The tensor slices of a stage are on one node, since their ranks are consecutive. Other stages are on
    # other nodes, unless the complete job fits into one node.
    slices = max(1.0, layout.tensor / rollout.tensor)

    stages = 1
    if layout.size <= cluster.domain:
        stages = layout.pipeline

    node_share = (slices * stages - 1) / model_ranks
    node_bytes = min(received, node_share * machine.bytes_per_weight * model.parameters)
    # Bytes within a node travel over NVLink, all other bytes over the network, one after the other.
    seconds = node_bytes / (cluster.gpu.nvlink * constants.efficiency.nvlink)
    seconds += (received - node_bytes) / (cluster.network * constants.weight_sync.strided_network)
    return constants.weight_sync.strided_fixed_seconds + seconds


def gathered_seconds(
    model: ModelShape,
    layout: ParallelLayout | None,
    rollout: RolloutLayout,
    machine: Machine,
) -> float:
    """Return the seconds in which complete tensors are gathered and then loaded by the engine."""
    cluster = machine.cluster
    sync = machine.constants.weight_sync
    total = machine.bytes_per_weight * model.parameters
    # Every tensor needs a collective, and a copy by the engine's loader.
    seconds = sync.gather_fixed_seconds + model.tensor_count * sync.gather_seconds_per_tensor

    # The loader then copies the complete model into the engine's parameters.
    seconds += total / (sync.gather_copy_gigabytes_per_second * GB)

    # Ranks that share one copy of the model.
    model_ranks = 1
    if layout:
        model_ranks = layout.tensor * layout.pipeline * max(1, layout.expert // layout.tensor)
    if model_ranks > cluster.domain:
        remote_bytes = total * (1 - cluster.domain / model_ranks)
        # A node receives the missing bytes over all its network cards.
        seconds += remote_bytes / (cluster.network * min(cluster.gpus_per_node, 8) * sync.gather_network)
    return seconds


def broadcast_seconds(
    model: ModelShape,
    layout: ParallelLayout | None,
    rollout: RolloutLayout,
    machine: Machine,
) -> float:
    """Return the seconds of a sync from host memory, by pipelined copies and broadcasts.

    The rate depends on whether the receivers are on one node or on several nodes. The number of nodes hardly
    matters.
    """
    sync = machine.constants.weight_sync
    one_node = rollout.replicas * rollout.gpus <= machine.cluster.gpus_per_node
    # Between nodes, the broadcast is slower than the copies from host memory.
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
    """Return the seconds of planned copies between separate GPUs, where each rank receives its shard.

    Without a ``layout`` of the senders, only the receivers limit the speed.
    """
    received_bytes = rollout_weight_bytes(model, rollout, machine)
    # Senders and receivers work at the same time, so the larger number of bytes per rank determines the time.
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


def find_method(method: str) -> Method:
    """Return the function for the seconds of a sync method; raises UserError for an unknown method."""
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


def make_sync_seconds(method: str) -> SyncSeconds:
    """Return the function of `find_method` with the signature for the placement search.

    The seconds do not depend on the engine's ranks.
    """
    seconds = find_method(method)

    # The placement search passes the engine's ranks too.
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
    """Return the mean milliseconds between tokens if ``rows`` sequences start to decode together."""
    # Integrate over the response length, weighted by the number of sequences that are this long.
    cost = decode_cost(model, rollout, machine)
    width = lengths.limit / POINTS
    total = 0.0
    weight = 0.0

    for point in range(POINTS):
        length = (point + 0.5) * width
        num_running = rows * lengths.fraction_longer(length)
        total += num_running * cost.seconds(max(1.0, num_running), prompt + length)
        weight += num_running
    return 1e3 * total / weight


def serving_tokens_per_second(
    model: ModelShape,
    rollout: RolloutLayout,
    machine: Machine,
    concurrent: float,
    prompt: float,
    lengths: ResponseLengths,
) -> float:
    """Return the response tokens per second of one replica with a queue of requests.

    ``concurrent`` is the number of requests at a time. On average, a running sequence is in the middle of its
    response. Decoding waits while the prompt of a new sequence is prefilled.
    """
    # The number of running sequences is limited by the queue, the engine and its cache.
    engine = machine.constants.engines[rollout.engine]
    context = prompt + lengths.mean_square() / (2.0 * lengths.mean)
    capacity = cache_capacity_tokens(model, rollout, machine)

    num_running = min(concurrent, rollout.max_sequences or engine.max_sequences, capacity / context)
    if num_running < 1.0:
        return 0.0

    cost = decode_cost(model, rollout, machine)
    prefill = prefill_seconds(model, rollout, machine, prompt, prompt)
    seconds_per_token = cost.seconds(num_running, context) + num_running * prefill / lengths.mean
    return num_running / seconds_per_token


def gathering_seconds(
    choice: TrainChoice,
    machine: Machine,
    work: ReplicaWork,
    compute: float,
) -> float:
    """Return the seconds that gathering fully sharded weights adds to an optimizer step.

    ``compute`` are the seconds of computation in the step. The weights are gathered for the forward and the
    backward pass of every micro-batch. Most of the gathering overlaps with computation.
    """
    # The weights are gathered in bfloat16 over the data-parallel ranks.
    layout = choice.layout
    weight_bytes = 2.0 * sum(max_stage_parameters(choice.model, layout))
    gather = gather_seconds(machine, layout.data * layout.context, layout.tensor, weight_bytes)
    total_gather = 2 * gather * work.micro_batches
    exposed = max(0.0, total_gather - _GATHER_OVERLAP * compute)
    return exposed + _GATHER_EXPOSED * min(total_gather, compute)


def model_flops_per_token(
    model: ModelShape,
    sequence: float,
    attention: str,
    recompute_counted: bool,
) -> float:
    """Return the training FLOPs per token, counted as in a paper.

    Training counts as three forward passes. With ``attention`` "full", a token attends to all s keys of the
    sequence, otherwise to s / 2. With ``recompute_counted``, the layers count as four forward passes and the
    output layer as three (Narayanan et al. 2021, eq. 3: 96 B s l h^2 (1 + s/6h + V/16lh)).
    """
    context = sequence / 2
    if attention == "full":
        context = sequence
    layers = model.layer_flops + model.attention_flops(context)
    passes = 3.0
    if recompute_counted:
        passes = 4.0
    return layers * passes + 3.0 * model.head_flops
