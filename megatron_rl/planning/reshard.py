"""Plan a weight transfer for machines that are not here: real shapes, any number of ranks, one process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from megatron_rl.config.sections.bounds import MAX_WORLD
from megatron_rl.errors import UserError
from megatron_rl.hf.layout_boxes import megatron_layout
from megatron_rl.megatron.model_spec import pretrained
from megatron_rl.planning.predict.step import copy_seconds
from megatron_rl.shapes.hardware import Constants, Machine
from megatron_rl.shapes.layout import SHORT_NAMES, ParallelLayout
from megatron_rl.shapes.lora import Lora, adapted
from megatron_rl.shapes.pipeline_stages import end_settings
from megatron_rl.shapes.pretrained import PretrainedModel
from megatron_rl.shapes.published import named_config
from megatron_rl.shapes.rank_order import best_rank_order
from megatron_rl.shapes.traffic import Slice, engine_experts, engine_slice, shared_bytes
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import BoxGroup
from megatron_rl.weights.plan import ReshardPlan, build_plan, schedule

_SIZES = {short: name for name, short in SHORT_NAMES.items()}


@dataclass(frozen=True)
class Summary:
    """Hold what a plan costs; bytes by rank unless said otherwise.

    ``model_bytes`` are those of one whole copy, ``redundant_max`` the bytes a rank receives and already had.
    ``seconds`` are predictions by cluster name.
    """

    model_bytes: int
    received_least: int
    received_mean: float
    received_most: int
    sent_most: int
    local_mean: float
    inside_nodes: int
    across_nodes: int
    messages: int
    staging_most: int
    redundant_most: int
    seconds: Mapping[str, float]


def read_layout(words: str, where: str = "--from") -> dict[str, int]:
    """Read ``tp8pp8dp2`` as sizes by name; raises UserError for anything else."""
    parts = re.findall(r"([a-z]+)(\d{1,6})", words)
    names = [name for name, _ in parts]
    whole = "".join(name + count for name, count in parts) == words and parts
    if not whole or not set(names) <= set(_SIZES) or len(set(names)) < len(names):
        raise UserError(
            f"{words!r} is not a layout",
            where=where,
            expected="sizes like tp8pp8dp2, each at most once, of " + ", ".join(_SIZES),
            got=words,
            fix="write letters and a number of at most six digits for each size",
        )
    return {_SIZES[name]: int(count) for name, count in parts}


def find_config(model: str) -> Any:
    """Return the transformers config of a model by name or path; raises UserError for an unknown one."""
    settings = dict(named_config(model)[1])
    try:
        return AutoConfig.for_model(settings.pop("model_type", ""), **settings)
    except ValueError as error:
        raise UserError(
            f"{model!r} is not an architecture of transformers", where="MODEL", got=str(error).split("\n")[0]
        ) from error


def actor_layout(sizes: Mapping[str, int]) -> ParallelLayout:
    """Return the layout of ranks 0, 1, … with these sizes; ``data`` defaults to 1."""
    rest: dict[str, Any] = {name: size for name, size in sizes.items() if name != "data"}
    count = sizes.get("data", 1)
    for name in ("tensor", "context", "pipeline"):
        count *= sizes.get(name, 1)
    require_ranks(count, "--from")
    return ParallelLayout(tuple(range(count)), path="--from", **rest).checked()


def require_ranks(count: int, where: str) -> None:
    """Raise a UserError for more ranks than a plan is made for."""
    if count > MAX_WORLD:
        raise UserError(
            "there are too many ranks to plan for",
            where=where,
            expected=f"at most {MAX_WORLD:,} ranks",
            got=f"{count:,}",
            fix="plan fewer data-parallel copies: each has the same traffic",
        )


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
) -> ReshardPlan:
    """Build the plan that the ranks themselves would build, in the order of ranks that a run would choose.

    With ``whole_experts`` the engine deals whole experts out to the ranks of a replica, with ``lora``
    adapters move alone.
    """
    model = pretrained(hf_config)
    settings = end_settings(model.shape.layers, actor.pipeline, actor.virtual_pipeline) or {}
    try:
        sources = megatron_layout(hf_config, actor, dtype, settings, lora)
    except (AssertionError, ValueError) as error:
        raise UserError(
            "Megatron refuses this layout of the model", where="--from", got=str(error)
        ) from error
    shared = shared_bytes(
        model.shape, actor, tensor, dtype.itemsize, settings=settings, whole_experts=whole_experts, lora=lora
    )
    if lora is not None:
        model = adapted(model, lora.rank, None, lora.targets)
    order = best_rank_order(shared, rollout_ranks, ranks_per_node)
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
    """Return the boxes that vLLM's ranks need, replicas of ``tensor`` consecutive ranks.

    This predicts vLLM's own cut; a running `HybridEngine` uses the traced one.
    """
    groups = []
    for place in range(tensor):
        boxes, dtypes = [], {}
        experts = engine_experts(model.shape.experts, place, tensor)
        for named in model.tensors():
            name, source = named.name, named.source
            cut = engine_slice(source, place, tensor, model.shape.kv_heads)
            if whole_experts and named.expert is not None:
                cut = Slice(0, 0, source.shape[0] if named.expert in experts else 0)
            if cut.start < cut.stop:
                start, size = [0] * len(source.shape), list(source.shape)
                start[cut.dim], size[cut.dim] = cut.start, cut.stop - cut.start
                start[0] += source.first
                boxes.append(TensorBox(name, tuple(start), tuple(size), -1, name, 0, (0,) * len(size)))
                dtypes[name] = torch.float32 if source.float32 else dtype
        groups.append(BoxGroup(tuple(ranks[place::tensor]), tuple(boxes), dtypes))
    return groups


def summarise(
    plan: ReshardPlan, ranks_per_node: int, staging: int, constants: Constants, clusters: Sequence[str]
) -> Summary:
    """Add a plan up for ``staging`` bytes of buffers per rank and predict its seconds on each cluster.

    Raises UserError for a cluster that is not in the constants, and where the staging is too small.
    """
    receivers = sorted(plan.needed)
    received = [plan.received.get(rank, 0) for rank in receivers]
    inside, across = plan.bytes_between({rank: rank // ranks_per_node for rank in plan.ranks})
    try:
        when = schedule(plan, staging)
    except ValueError as error:
        raise UserError(
            "the staging memory is too small",
            where="--staging-bytes",
            expected="room for a row of the largest tensor in every stream",
            got=str(error),
            fix="give more",
        ) from error
    parts = {(part.name, part.start): part.bytes for bundle in plan.bundles for part in bundle.regions}
    machines = {
        name: Machine(constants.cluster(name, len(plan.ranks), gpus_per_node=ranks_per_node), constants)
        for name in clusters
    }
    return Summary(
        model_bytes=sum(parts.values()),
        received_least=min(received),
        received_mean=sum(received) / len(received),
        received_most=max(received),
        sent_most=max(plan.sent.values(), default=0),
        local_mean=sum(plan.local.values()) / len(receivers),
        inside_nodes=inside,
        across_nodes=across,
        messages=sum(-(-count // when.slot) for count in plan.pairs.values()),
        staging_most=when.staging,
        redundant_most=max(_redundant(plan).values(), default=0),
        seconds={name: predict(plan, machine) for name, machine in machines.items()},
    )


def _redundant(plan: ReshardPlan) -> dict[int, int]:
    """Return by rank the bytes it receives although it holds them."""
    twice: dict[int, int] = {}
    for bundle in plan.bundles:
        holders = set(bundle.regions[0].holders)
        for receiver, sender in bundle.senders.items():
            if sender != receiver and receiver in holders:
                twice[receiver] = twice.get(receiver, 0) + bundle.bytes
    return twice


def predict(plan: ReshardPlan, machine: Machine) -> float:
    """Return predicted seconds on a machine: those of the rank and direction that take longest."""
    busy: dict[tuple[int, str], list[float]] = {}
    domain = machine.cluster.domain
    for (sender, receiver), count in plan.pairs.items():
        near = sender // domain == receiver // domain
        for end in ((sender, "out"), (receiver, "in")):
            busy.setdefault(end, [0.0, 0.0])[near] += count
    return max((copy_seconds(machine, *moved) for moved in busy.values()), default=copy_seconds(machine, 0.0))
