"""Plan a weight transfer offline, for the shapes of a real model and any number of ranks, in one process.

A plan depends only on boxes (slices of tensors in all dimensions, with their location on a rank), and boxes
depend only on a model's config and a layout. So one process can compute the boxes of all ranks, and build the
plan that the ranks of a job would build.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from megatron_rl.config.sections.bounds import MAX_WORLD
from megatron_rl.errors import UserError, first_line, range_error
from megatron_rl.megatron.model_spec import describe_model, model_spec
from megatron_rl.megatron.parameter_mapping import Shard, trace_import
from megatron_rl.planning.predict.step import weight_transfer_seconds
from megatron_rl.shapes.hardware import Constants, Machine
from megatron_rl.shapes.layer_weights import Source
from megatron_rl.shapes.layout import SHORT_NAMES, ParallelLayout, end_settings, stage_layers
from megatron_rl.shapes.lora import Lora, make_adapted_model
from megatron_rl.shapes.pretrained import PretrainedModel, engine_config
from megatron_rl.shapes.published import find_named_config
from megatron_rl.shapes.traffic import Slice, best_rank_order, engine_experts, engine_slice, shared_bytes
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import BoxGroup
from megatron_rl.weights.plan import ReshardPlan, Schedule, build_plan, schedule_phases

_SIZES = {short: name for name, short in SHORT_NAMES.items()}
"""Short name of a layout's size -> its name, such as tp -> tensor."""


@dataclass(frozen=True)
class TransferSummary:
    """Cost of a planned weight transfer, which `plan-reshard` prints.

    Bytes are per rank, except in fields that contain totals.
    """

    model_bytes: int
    """Bytes of one complete copy of the model."""
    received_least: int
    """Smallest number of bytes that a rank of the engine receives."""
    received_mean: float
    """Mean bytes that a rank of the engine receives."""
    received_most: int
    """Largest number of bytes that a rank of the engine receives."""
    sent_most: int
    """Largest number of bytes that a rank sends."""
    local_mean: float
    """Mean bytes that a rank of the engine copies from its own actor weights."""
    inside_nodes: int
    """Total bytes that ranks send to ranks on the same node."""
    across_nodes: int
    """Total bytes that ranks send to ranks on other nodes."""
    messages: int
    """Total number of messages."""
    messages_most: int
    """Largest number of messages that a rank sends or receives."""
    peers_most: int
    """Largest number of ranks with which a rank exchanges messages. Each needs a separate connection."""
    peers_mean: float
    """Mean number of ranks with which a rank exchanges messages."""
    staging_most: int
    """Largest number of bytes of staging buffers on a rank."""
    redundant_most: int
    """Largest number of bytes that a rank receives although it already has them."""
    seconds: Mapping[str, float]
    """Cluster -> predicted seconds of a transfer, without the time to connect."""
    connect_seconds: float
    """Additional seconds of the first transfer, in which each rank connects to its peers."""


def parse_layout(text: str, option: str = "--from") -> dict[str, int]:
    """Parse a layout such as ``tp8pp8dp2`` into sizes by name; raises UserError for other text.

    ``option`` is the command-line option of the layout, for the error.
    """
    sizes = re.findall(r"([a-z]+)(\d{1,6})", text)
    names = [name for name, _ in sizes]

    # The matches must cover the whole text, since findall skips text that does not match.
    matched_text = "".join(name + count for name, count in sizes)
    is_complete = bool(sizes) and matched_text == text
    has_unknown_names = not set(names) <= set(_SIZES)
    has_duplicates = len(set(names)) < len(names)
    if not is_complete or has_unknown_names or has_duplicates:
        raise UserError(
            f"{text!r} is not a layout",
            where=option,
            expected="sizes like tp8pp8dp2, each at most once, of " + ", ".join(_SIZES),
            got=text,
            fix="write letters and a number of at most six digits for each size",
        )

    return {_SIZES[name]: int(count) for name, count in sizes}


def find_config(model: str) -> Any:
    """Return the transformers config of a model by name or path; raises UserError for an unknown model."""
    _, model_config = find_named_config(model)
    values = dict(engine_config(model_config))
    # The model type selects the configuration class of transformers.
    model_type = values.pop("model_type", "")
    try:
        return AutoConfig.for_model(model_type, **values)
    except ValueError as error:
        message = f"{model!r} is not an architecture of transformers"
        raise UserError(message, where="MODEL", got=first_line(error)) from error


def actor_layout(sizes: Mapping[str, int]) -> ParallelLayout:
    """Return the layout with these sizes on the ranks 0, 1, …; the size ``data`` defaults to 1.

    Raises UserError for more than `MAX_WORLD` ranks.
    """
    # Count the ranks before their tuple is created, which would be huge for a typo.
    num_ranks = sizes.get("data", 1)
    for name in ("tensor", "context", "pipeline"):
        num_ranks *= sizes.get(name, 1)

    if num_ranks > MAX_WORLD:
        raise range_error(
            "--from",
            num_ranks,
            f"at most {MAX_WORLD:,} ranks",
            fix="plan fewer data-parallel copies: each has the same traffic",
        )
    # Omit `data`: a layout computes the number of data-parallel copies from its ranks.
    model_sizes: dict[str, Any] = {name: size for name, size in sizes.items() if name != "data"}
    return ParallelLayout(tuple(range(num_ranks)), path="--from", **model_sizes).checked()


def plan_offline(
    hf_config: Any,
    actor: ParallelLayout,
    rollout_ranks: Sequence[int],
    tensor: int,
    dtype: torch.dtype,
    *,
    ranks_per_node: int,
    whole_experts: bool = False,
    lora: Lora | None = None,
    settings: Mapping[str, Any] | None = None,
) -> ReshardPlan:
    """Build the reshard plan that a run with these layouts uses for its weight syncs.

    ``tensor`` is the tensor-parallel size of the engine, whose replicas are on ``rollout_ranks``.
    ``settings`` are Megatron's settings for uneven pipeline stages; None derives them from the number of
    layers. With ``whole_experts`` the engine distributes complete experts over the ranks of a replica. With
    ``lora`` only adapters are transferred.
    """
    model = describe_model(hf_config)
    if settings is None:
        settings = end_settings(model.shape.layers, actor.pipeline, actor.virtual_pipeline) or {}

    # Megatron validates its settings in constructors, partly by assertions.
    try:
        sources = megatron_boxes(hf_config, actor, dtype, settings, lora)
    except (AssertionError, ValueError) as error:
        message = "Megatron refuses this layout of the model"
        raise UserError(message, where="--from", got=str(error)) from error

    # Like a run, order the ranks of the replicas by the bytes that they share with the actor.
    bytes_shared_with_actor = shared_bytes(
        model.shape,
        actor,
        tensor,
        dtype.itemsize,
        settings=settings,
        whole_experts=whole_experts,
        lora=lora,
    )
    ordered_ranks = best_rank_order(bytes_shared_with_actor, rollout_ranks, ranks_per_node)

    # With LoRA the engine already has the base weights, so only the tensors of adapters are sent.
    if lora is not None:
        model = make_adapted_model(model, lora.rank, None, lora.targets)
    destinations = engine_boxes(model, ordered_ranks, tensor, dtype, whole_experts)

    node_by_rank = {rank: rank // ranks_per_node for rank in {*actor.ranks, *rollout_ranks}}
    return build_plan(sources, destinations, node_by_rank)


def engine_boxes(
    model: PretrainedModel,
    ranks: Sequence[int],
    tensor: int,
    dtype: torch.dtype,
    whole_experts: bool = False,
) -> list[BoxGroup]:
    """Predict the slices of tensors (boxes) that the ranks of vLLM need.

    ``ranks`` are the ranks of all replicas, one replica after another, and ``tensor`` is the number of ranks
    of a replica. With ``whole_experts`` each expert is complete on one rank of a replica. A running
    `HybridEngine` traces the boxes in vLLM's weight loaders instead.
    """
    groups = []
    for tensor_rank in range(tensor):
        boxes: list[TensorBox] = []
        dtypes: dict[str, torch.dtype] = {}
        experts = engine_experts(model.shape.experts, tensor_rank, tensor)

        for tensor_spec in model.tensors():
            name = tensor_spec.name
            source = tensor_spec.source
            tensor_slice = engine_slice(source, tensor_rank, tensor)
            if whole_experts and tensor_spec.expert is not None:
                # One rank of the replica has the complete expert, and the other ranks have no part of it.
                tensor_slice = Slice(0, 0, 0)
                if tensor_spec.expert in experts:
                    tensor_slice = Slice(0, 0, source.shape[0])
            if tensor_slice.start >= tensor_slice.stop:
                continue

            boxes += _slice_boxes(name, source, tensor_slice)
            dtypes[name] = dtype
            if source.float32:
                dtypes[name] = torch.float32

        # Ranks with the same tensor-parallel index in their replicas need the same boxes.
        group_ranks = tuple(ranks[tensor_rank::tensor])
        groups.append(BoxGroup(group_ranks, tuple(boxes), dtypes))
    return groups


def _slice_boxes(name: str, source: Source, tensor_slice: Slice) -> list[TensorBox]:
    """Convert a slice of a weight to boxes of the checkpoint's tensor ``name``.

    The boxes have no rank, offsets and strides, which a plan does not need.
    """
    start = [0] * len(source.shape)
    size = list(source.shape)
    start[tensor_slice.dim] = tensor_slice.start
    size[tensor_slice.dim] = tensor_slice.stop - tensor_slice.start

    boxes = []
    for first_row, num_rows in source.row_ranges(start[0], size[0]):
        box = TensorBox(
            name,
            start=(first_row, *start[1:]),
            size=(num_rows, *size[1:]),
            rank=-1,
            storage=name,
            offset=0,
            stride=(0,) * len(size),
        )
        boxes.append(box)
    return boxes


def summarise_transfer(
    plan: ReshardPlan,
    ranks_per_node: int,
    staging_bytes: int,
    constants: Constants,
    clusters: Sequence[str],
) -> TransferSummary:
    """Compute bytes, messages and predicted seconds of a planned weight transfer.

    ``ranks_per_node`` is the number of consecutive ranks on a node, ``staging_bytes`` the size of a rank's
    staging buffers, and ``clusters`` are names of clusters in ``constants``. Raises UserError for an unknown
    cluster, and for staging buffers that are too small.
    """
    # Divide the transfer into phases that fit into the staging buffers.
    try:
        transfers = schedule_phases(plan, staging_bytes)
    except ValueError as error:
        raise UserError(
            "the staging memory is too small",
            where="--staging-bytes",
            expected="room for a row of the largest tensor in every stream",
            got=str(error),
            fix="increase --staging-bytes",
        ) from error

    received_bytes = [plan.received.get(rank, 0) for rank in sorted(plan.needed)]
    node_by_rank = {rank: rank // ranks_per_node for rank in plan.ranks}
    inside_nodes, across_nodes = plan.bytes_inside_and_across_nodes(node_by_rank)

    # Add the bytes of the model's regions; several bundles may contain the same region.
    region_bytes: dict[tuple[str, tuple[int, ...]], int] = {}
    for bundle in plan.bundles:
        for region in bundle.regions:
            region_bytes[region.name, region.start] = region.bytes

    seconds = {}
    for name in clusters:
        cluster = constants.cluster(name, len(plan.ranks), gpus_per_node=ranks_per_node)
        seconds[name] = predict_transfer_seconds(plan, transfers, Machine(cluster, constants))

    # Assume that a rank connects to its peers one after another.
    max_peers = max(plan.peer_counts.values(), default=0)
    connect_seconds = max_peers * constants.weight_sync.connection_seconds
    return TransferSummary(
        model_bytes=sum(region_bytes.values()),
        received_least=min(received_bytes),
        received_mean=sum(received_bytes) / len(received_bytes),
        received_most=max(received_bytes),
        sent_most=max(plan.sent.values(), default=0),
        local_mean=sum(plan.local.values()) / len(received_bytes),
        inside_nodes=inside_nodes,
        across_nodes=across_nodes,
        messages=sum(transfers.message_counts.values()),
        messages_most=transfers.max_messages_per_rank,
        peers_most=max_peers,
        peers_mean=sum(plan.peer_counts.values()) / len(plan.ranks),
        staging_most=transfers.staging_bytes,
        redundant_most=max(_redundant_bytes(plan).values(), default=0),
        seconds=seconds,
        connect_seconds=connect_seconds,
    )


def _redundant_bytes(plan: ReshardPlan) -> dict[int, int]:
    """Return rank -> bytes that the rank receives although it already has them."""
    redundant_bytes: Counter[int] = Counter()
    for bundle in plan.bundles:
        # All regions of a bundle are on the same ranks.
        holders = set(bundle.regions[0].holders)
        for receiver, sender in bundle.senders.items():
            if sender != receiver and receiver in holders:
                redundant_bytes[receiver] += bundle.bytes
    return dict(redundant_bytes)


def predict_transfer_seconds(plan: ReshardPlan, transfers: Schedule, machine: Machine) -> float:
    """Predict the seconds of a transfer until the slowest rank has sent and received all messages.

    The ranks are assumed to be connected by an earlier transfer.
    """
    ranks_per_nvlink_domain = machine.cluster.domain

    # Count bytes and messages by (rank, direction), since links are full duplex.
    network_bytes: Counter[tuple[int, str]] = Counter()
    nvlink_bytes: Counter[tuple[int, str]] = Counter()
    messages: Counter[tuple[int, str]] = Counter()
    for (sender, receiver), num_bytes in plan.pair_bytes.items():
        num_messages = transfers.message_counts[sender, receiver]
        for rank_and_direction in ((sender, "out"), (receiver, "in")):
            messages[rank_and_direction] += num_messages
            if sender // ranks_per_nvlink_domain == receiver // ranks_per_nvlink_domain:
                nvlink_bytes[rank_and_direction] += num_bytes
            else:
                network_bytes[rank_and_direction] += num_bytes

    # A transfer without messages between ranks still takes the fixed time.
    slowest_seconds = weight_transfer_seconds(machine, 0.0)
    message_seconds = machine.constants.weight_sync.message_seconds
    for rank_and_direction, num_messages in messages.items():
        seconds = weight_transfer_seconds(
            machine, network_bytes[rank_and_direction], nvlink_bytes[rank_and_direction]
        )
        slowest_seconds = max(slowest_seconds, seconds + num_messages * message_seconds)
    return slowest_seconds


ParameterShapes = dict[str, tuple[int, ...]]
"""Name of a parameter -> its shape on one rank."""


def megatron_boxes(
    hf_config: Any,
    layout: ParallelLayout,
    dtype: torch.dtype,
    settings: Mapping[str, Any] | None = None,
    lora: Lora | None = None,
) -> list[BoxGroup]:
    """Compute the slices of a model's tensors (boxes) that the ranks of a layout have.

    ``settings`` are Megatron's settings for uneven pipeline stages. With ``lora`` only the tensors of
    adapters are included.

    Experts are sharded differently from other parameters, so a rank of a model with experts is in two groups.
    `TensorBox.storage` is the name of a Megatron parameter, with the index of the layer in the complete model
    instead of the index in its pipeline stage.
    """
    model = model_spec(hf_config, layout, dtype, settings).model
    if lora is not None:
        model = make_adapted_model(model, lora.rank, None, lora.targets)
    hf_shapes = model.tensor_shapes()

    # Trace how a checkpoint is imported into parameters, which are on the meta device and need no memory.
    def trace_group(shapes: ParameterShapes, shard: Shard, ranks: Sequence[int]) -> BoxGroup:
        parameters: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            parameters[name] = torch.empty(shape, dtype=dtype, device="meta")
        boxes = trace_import(parameters, model, shard, -1, shapes=hf_shapes)
        return BoxGroup(tuple(ranks), tuple(boxes), dict.fromkeys(shapes, dtype))

    # Each pipeline stage has separate layers, and its ranks have different shards of them.
    groups: list[BoxGroup] = []
    stages = stage_layers(model.shape.layers, layout, settings)
    for stage, stage_ranks in enumerate(layout.groups("tensor", "context", "data")):
        layers = stages[stage]
        is_first_stage = stage == 0
        is_last_stage = stage == layout.pipeline - 1

        # Parameters outside of experts are sharded over tensor-parallel ranks, which vary fastest.
        shapes = dense_shapes(model, layout, layers, is_first_stage, is_last_stage)
        for tensor_rank in range(layout.tensor):
            shard = Shard(tensor_rank, layout.tensor)
            groups.append(trace_group(shapes, shard, stage_ranks[tensor_rank :: layout.tensor]))

        if not model.shape.experts:
            continue

        # Experts are sharded over the same ranks in a different order: expert-tensor-parallel ranks vary
        # fastest, then expert-parallel ranks.
        ranks_by_shard: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, rank in enumerate(stage_ranks):
            outer_index, expert_tensor_rank = divmod(index, layout.expert_tensor)
            expert_rank = outer_index % layout.expert
            ranks_by_shard[expert_rank, expert_tensor_rank].append(rank)

        shapes = expert_shapes(model, layout, layers)
        for (expert_rank, expert_tensor_rank), ranks in ranks_by_shard.items():
            shard = Shard(
                0,
                layout.tensor,
                expert_rank,
                layout.expert,
                expert_tensor_rank,
                layout.expert_tensor,
            )
            groups.append(trace_group(shapes, shard, ranks))

    return [group for group in groups if group.boxes]


def dense_shapes(
    model: PretrainedModel,
    layout: ParallelLayout,
    layers: list[int],
    is_first_stage: bool,
    is_last_stage: bool,
) -> ParameterShapes:
    """Return the shapes of a rank's parameters outside of experts, by Megatron's parameter names.

    ``layers`` are the layers of the rank's pipeline stage. The first and the last stage also have embeddings,
    the final norm and the output layer.
    """
    weight_by_name = {weight.name: weight for weight in model.outer_weights(is_first_stage, is_last_stage)}
    for layer in layers:
        for weight in model.weights(layer):
            if not weight.expert:
                weight_by_name[f"decoder.layers.{layer}.{weight.name}"] = weight

    return {name: weight.local_shape(layout.tensor) for name, weight in weight_by_name.items()}


def expert_shapes(
    model: PretrainedModel,
    layout: ParallelLayout,
    layers: list[int],
) -> ParameterShapes:
    """Return the shapes of a rank's expert parameters, with a separate module for each expert.

    ``layers`` are the layers of the rank's pipeline stage.
    """
    shapes: ParameterShapes = {}
    for layer in layers:
        weights = [weight for weight in model.weights(layer) if weight.expert]
        # Skip dense layers, which a mixture-of-experts model may also have.
        if not weights:
            continue

        local_experts = model.shape.experts // layout.expert
        for expert in range(local_experts):
            for weight in weights:
                name = f"decoder.layers.{layer}.{weight.name.format(expert=expert)}"
                shapes[name] = weight.local_shape(layout.expert_tensor)
    return shapes
