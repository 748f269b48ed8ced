"""Offline plan of a weight transfer: the real model's shapes and any number of ranks, in one process."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from megatron_rl.config.sections.bounds import MAX_WORLD
from megatron_rl.error_forms import out_of_range
from megatron_rl.errors import UserError, first_line
from megatron_rl.megatron.model_spec import model_spec, pretrained
from megatron_rl.megatron.parameter_mapping import Shard, trace_import
from megatron_rl.planning.predict.step import copy_seconds
from megatron_rl.shapes.hardware import Constants, Machine
from megatron_rl.shapes.layout import SHORT_NAMES, ParallelLayout, end_settings, stage_layers
from megatron_rl.shapes.lora import Lora, adapted
from megatron_rl.shapes.pretrained import PretrainedModel, transformers_config
from megatron_rl.shapes.published import named_config
from megatron_rl.shapes.traffic import Slice, best_rank_order, engine_experts, engine_slice, shared_bytes
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import BoxGroup
from megatron_rl.weights.plan import ReshardPlan, Schedule, build_plan, schedule

_SIZES = {short: name for name, short in SHORT_NAMES.items()}
"""Short name -> size of a layout, such as tp -> tensor."""


@dataclass(frozen=True)
class Summary:
    """Cost of a plan; bytes are per rank unless a field is over all ranks together."""

    model_bytes: int
    """Bytes of one complete copy of the model."""
    received_least: int
    """Fewest bytes that a rank of the engine receives."""
    received_mean: float
    """Mean bytes that a rank of the engine receives."""
    received_most: int
    """Most bytes that a rank of the engine receives."""
    sent_most: int
    """Most bytes that a rank sends."""
    local_mean: float
    """Mean bytes that a rank of the engine copies from its own actor weights."""
    inside_nodes: int
    """Bytes of all ranks together that stay inside a node."""
    across_nodes: int
    """Bytes of all ranks together that leave a node."""
    messages: int
    """Messages of all ranks together."""
    messages_most: int
    """Most messages that a rank sends, or receives."""
    peers_most: int
    """Most ranks that a rank exchanges messages with: its connections."""
    peers_mean: float
    """Mean number of ranks that a rank exchanges messages with."""
    staging_most: int
    """Most bytes of staging buffers."""
    redundant_most: int
    """Most bytes that a rank receives although it already has them."""
    seconds: Mapping[str, float]
    """Predicted seconds by cluster, without those of the connections."""
    connect_seconds: float
    """Seconds that the first transfer takes more, to connect a rank with its peers."""


def read_layout(text: str, option: str = "--from") -> dict[str, int]:
    """Parse ``tp8pp8dp2`` into sizes by name; raises UserError for anything else."""
    sizes = re.findall(r"([a-z]+)(\d{1,6})", text)
    names = [name for name, _ in sizes]
    # The matches must cover the text, since findall skips text that does not match.
    complete = bool(sizes) and "".join(name + count for name, count in sizes) == text
    if not complete or not set(names) <= set(_SIZES) or len(set(names)) < len(names):
        raise UserError(
            f"{text!r} is not a layout",
            where=option,
            expected="sizes like tp8pp8dp2, each at most once, of " + ", ".join(_SIZES),
            got=text,
            fix="write letters and a number of at most six digits for each size",
        )

    return {_SIZES[name]: int(count) for name, count in sizes}


def find_config(model: str) -> Any:
    """Return the transformers config of a model by name or path; raises UserError for an unknown one."""
    values = dict(transformers_config(named_config(model)[1]))
    # transformers has one configuration class for each model type.
    try:
        return AutoConfig.for_model(values.pop("model_type", ""), **values)
    except ValueError as error:
        message = f"{model!r} is not an architecture of transformers"
        raise UserError(message, where="MODEL", got=first_line(error)) from error


def actor_layout(sizes: Mapping[str, int]) -> ParallelLayout:
    """Return the layout of ranks 0, 1, … with these sizes; ``data`` defaults to 1.

    Raises UserError for more than `MAX_WORLD` ranks, before it makes a tuple of them.
    """
    count = sizes.get("data", 1)
    for name in ("tensor", "context", "pipeline"):
        count *= sizes.get(name, 1)

    if count > MAX_WORLD:
        raise out_of_range(
            "--from",
            count,
            f"at most {MAX_WORLD:,} ranks",
            fix="plan fewer data-parallel copies: each has the same traffic",
        )
    # The number of data-parallel copies follows from the ranks.
    model_sizes: dict[str, Any] = {name: size for name, size in sizes.items() if name != "data"}
    return ParallelLayout(tuple(range(count)), path="--from", **model_sizes).checked()


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
    """Build the plan that the ranks themselves would build, in the rank order that a run would choose.

    ``settings`` are Megatron's for uneven stages; None derives them from the number of layers. With
    ``whole_experts`` the engine distributes complete experts over the ranks of a replica; with ``lora``
    adapters alone are transferred.
    """
    model = pretrained(hf_config)
    if settings is None:
        settings = end_settings(model.shape.layers, actor.pipeline, actor.virtual_pipeline) or {}
    # Megatron validates its settings in constructors, partly by assertions.
    try:
        sources = megatron_layout(hf_config, actor, dtype, settings, lora)
    except (AssertionError, ValueError) as error:
        message = "Megatron refuses this layout of the model"
        raise UserError(message, where="--from", got=str(error)) from error

    # Assign ranks to replicas as a run would, by the bytes that they share with the actor.
    overlap = shared_bytes(
        model.shape,
        actor,
        tensor,
        dtype.itemsize,
        settings=settings,
        whole_experts=whole_experts,
        lora=lora,
    )
    order = best_rank_order(overlap, rollout_ranks, ranks_per_node)
    if lora is not None:
        model = adapted(model, lora.rank, None, lora.targets)
    destinations = engine_layout(model, order, tensor, dtype, whole_experts)
    nodes = {rank: rank // ranks_per_node for rank in {*actor.ranks, *rollout_ranks}}
    return build_plan(sources, destinations, nodes)


def engine_layout(
    model: PretrainedModel,
    ranks: Sequence[int],
    tensor: int,
    dtype: torch.dtype,
    whole_experts: bool = False,
) -> list[BoxGroup]:
    """Return the boxes that vLLM's ranks need, for replicas of ``tensor`` consecutive ranks.

    This predicts the slices of vLLM's weight loaders; a running `HybridEngine` traces them.
    """
    groups = []
    for tensor_rank in range(tensor):
        boxes = []
        dtypes = {}
        experts = engine_experts(model.shape.experts, tensor_rank, tensor)
        for tensor_spec in model.tensors():
            name = tensor_spec.name
            source = tensor_spec.source
            cut = engine_slice(source, tensor_rank, tensor, model.shape.kv_heads)
            if whole_experts and tensor_spec.expert is not None:
                # All rows of an expert on one rank of the replica, none on the others.
                cut = Slice(0, 0, 0)
                if tensor_spec.expert in experts:
                    cut = Slice(0, 0, source.shape[0])
            if cut.start >= cut.stop:
                continue

            # The slice as a box of the checkpoint's tensor.
            start = [0] * len(source.shape)
            size = list(source.shape)
            start[cut.dim] = cut.start
            size[cut.dim] = cut.stop - cut.start
            for row, rows in source.pieces(start[0], size[0]):
                piece_start = (row, *start[1:])
                piece_size = (rows, *size[1:])
                boxes.append(TensorBox(name, piece_start, piece_size, -1, name, 0, (0,) * len(size)))
            dtypes[name] = torch.float32 if source.float32 else dtype
        # Ranks with the same tensor-parallel index in their replicas need the same boxes.
        groups.append(BoxGroup(tuple(ranks[tensor_rank::tensor]), tuple(boxes), dtypes))
    return groups


def summarise(
    plan: ReshardPlan,
    ranks_per_node: int,
    staging: int,
    constants: Constants,
    clusters: Sequence[str],
) -> Summary:
    """Summarise a plan for ``staging`` bytes of buffers per rank, with its seconds on each cluster.

    Raises UserError for a cluster that is not in the constants, and where the staging is too small.
    """
    # The schedule cuts transfers into rounds that fit the staging buffers.
    try:
        transfers = schedule(plan, staging)
    except ValueError as error:
        raise UserError(
            "the staging memory is too small",
            where="--staging-bytes",
            expected="room for a row of the largest tensor in every stream",
            got=str(error),
            fix="give more",
        ) from error

    receivers = sorted(plan.needed)
    received = [plan.received.get(rank, 0) for rank in receivers]
    inside_nodes, across_nodes = plan.bytes_between({rank: rank // ranks_per_node for rank in plan.ranks})
    # A region of several bundles counts once.
    region_bytes = {
        (region.name, region.start): region.bytes for bundle in plan.bundles for region in bundle.regions
    }
    seconds = {}
    for name in clusters:
        cluster = constants.cluster(name, len(plan.ranks), gpus_per_node=ranks_per_node)
        seconds[name] = predict_seconds(plan, transfers, Machine(cluster, constants))

    return Summary(
        model_bytes=sum(region_bytes.values()),
        received_least=min(received),
        received_mean=sum(received) / len(received),
        received_most=max(received),
        sent_most=max(plan.sent.values(), default=0),
        local_mean=sum(plan.local.values()) / len(receivers),
        inside_nodes=inside_nodes,
        across_nodes=across_nodes,
        messages=sum(transfers.messages.values()),
        messages_most=transfers.messages_per_rank,
        peers_most=max(plan.peers.values(), default=0),
        peers_mean=sum(plan.peers.values()) / len(plan.ranks),
        staging_most=transfers.staging,
        redundant_most=max(_redundant_bytes(plan).values(), default=0),
        seconds=seconds,
        connect_seconds=max(plan.peers.values(), default=0) * constants.weight_sync.connection_seconds,
    )


def _redundant_bytes(plan: ReshardPlan) -> dict[int, int]:
    """Return the bytes that each rank receives although it already has them."""
    redundant: dict[int, int] = {}
    for bundle in plan.bundles:
        # All regions of a bundle have the same holders.
        holders = set(bundle.regions[0].holders)
        for receiver, sender in bundle.senders.items():
            if sender != receiver and receiver in holders:
                redundant[receiver] = redundant.get(receiver, 0) + bundle.bytes
    return redundant


def predict_seconds(plan: ReshardPlan, transfers: Schedule, machine: Machine) -> float:
    """Return predicted seconds on a machine, until the slowest rank has exchanged its messages.

    The connections are those of earlier transfers.
    """
    domain = machine.cluster.domain

    # (rank, direction) -> bytes across and within domains. Directions are separate: links are full duplex.
    traffic: dict[tuple[int, str], list[float]] = {}
    messages: Counter[tuple[int, str]] = Counter()
    for (sender, receiver), count in plan.pairs.items():
        same_domain = sender // domain == receiver // domain
        for end in ((sender, "out"), (receiver, "in")):
            traffic.setdefault(end, [0.0, 0.0])[same_domain] += count
            messages[end] += transfers.messages[sender, receiver]

    message_seconds = machine.constants.weight_sync.message_seconds
    seconds = (
        copy_seconds(machine, *directions) + messages[end] * message_seconds
        for end, directions in traffic.items()
    )
    return max(seconds, default=copy_seconds(machine, 0.0))


Shapes = dict[str, tuple[int, ...]]


def megatron_layout(
    hf_config: Any,
    layout: ParallelLayout,
    dtype: torch.dtype,
    overrides: Mapping[str, Any] | None = None,
    lora: Lora | None = None,
) -> list[BoxGroup]:
    """Return the boxes of a model, or with ``lora`` of its adapters alone, on every rank of a layout.

    If the model has experts, which are sharded differently, a rank is in two groups. Storages are parameter
    names with layers numbered over the whole model.
    """
    model = model_spec(hf_config, layout, dtype, overrides).model
    if lora is not None:
        model = adapted(model, lora.rank, None, lora.targets)
    hf_shapes = model.tensor_shapes()

    def trace_group(shapes: Shapes, shard: Shard, ranks: list[int]) -> BoxGroup:
        parameters = {name: torch.empty(size, dtype=dtype, device="meta") for name, size in shapes.items()}
        boxes = trace_import(parameters, model, shard, -1, shapes=hf_shapes)
        return BoxGroup(tuple(ranks), tuple(boxes), dict.fromkeys(shapes, dtype))

    # Each pipeline stage has its own layers; its ranks differ by their shards.
    groups = []
    stages = stage_layers(model.shape.layers, layout, overrides)
    for stage, stage_ranks in enumerate(layout.groups("tensor", "context", "data")):
        # Ranks of a stage by tensor-parallel rank, and by expert-parallel and expert-tensor-parallel rank.
        dense_ranks: dict[int, list[int]] = {}
        expert_ranks: dict[tuple[int, int], list[int]] = {}
        for position, rank in enumerate(stage_ranks):
            dense_ranks.setdefault(position % layout.tensor, []).append(rank)
            outer_position, expert_tensor = divmod(position, layout.expert_tensor)
            expert_ranks.setdefault((outer_position % layout.expert, expert_tensor), []).append(rank)

        layers = stages[stage]
        is_first = stage == 0
        is_last = stage == layout.pipeline - 1
        for tensor, ranks in dense_ranks.items():
            parameters = dense_shapes(model, layout, layers, is_first, is_last)
            groups.append(trace_group(parameters, Shard(tensor, layout.tensor), ranks))

        if model.shape.experts:
            for (expert, expert_tensor), ranks in expert_ranks.items():
                parameters = expert_shapes(model, layout, layers)
                shard = Shard(0, layout.tensor, expert, layout.expert, expert_tensor, layout.expert_tensor)
                groups.append(trace_group(parameters, shard, ranks))

    return [group for group in groups if group.boxes]


def dense_shapes(
    model: PretrainedModel,
    layout: ParallelLayout,
    layers: list[int],
    first: bool,
    last: bool,
) -> Shapes:
    """Return the shapes of a rank's parameters outside the experts, by Megatron's parameter names."""
    weights = {weight.name: weight for weight in model.outer(first, last)}
    for layer in layers:
        for weight in model.weights(layer):
            if not weight.expert:
                weights[f"decoder.layers.{layer}.{weight.name}"] = weight

    return {name: weight.local_shape(layout.tensor) for name, weight in weights.items()}


def expert_shapes(
    model: PretrainedModel,
    layout: ParallelLayout,
    layers: list[int],
) -> Shapes:
    """Return the shapes of the parameters of a rank's experts, where each expert is a separate module."""
    shapes: Shapes = {}
    for layer in layers:
        weights = [weight for weight in model.weights(layer) if weight.expert]
        # Some layers of a mixture-of-experts model are dense.
        if not weights:
            continue

        local_experts = model.shape.experts // layout.expert
        for expert in range(local_experts):
            for weight in weights:
                name = f"decoder.layers.{layer}.{weight.name.format(expert=expert)}"
                shapes[name] = weight.local_shape(layout.expert_tensor)
    return shapes
