"""The bytes that moving the actor's weights into the rollout engine sends: exact, from sizes alone.

A rank receives what it needs and does not hold. Layers that lie alike are worked out once, so that a model
of any size on any number of ranks takes milliseconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_rl.shapes.layer_weights import Source, Weight, outer_weights
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import Lora, adapter_weights
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pipeline_stages import stage_layers

VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this before it cuts it."""


class Slice(NamedTuple):
    """Say which part of a tensor is meant: ``start`` to ``stop`` of dimension ``dim``, all of the others."""

    dim: int
    start: int
    stop: int


def trainer_slices(weight: Weight, part: int, parts: int, kv_heads: int) -> tuple[Slice, ...]:
    """Return what one of ``parts`` tensor-parallel ranks holds of each source of a Megatron parameter.

    ``latent`` parameters are cut, as Megatron's own layers cut them.
    """
    if weight.cut == "query_key_value":
        return _interleaved([source.shape[0] // kv_heads for source in weight.sources], kv_heads, part, parts)
    if weight.cut in ("whole", "stacked"):
        part, parts = 0, 1
    dim = 1 if weight.cut == "columns" else 0
    share = _padded_share if weight.cut == "vocabulary" else _share
    return tuple(Slice(dim, *share(source.shape[dim], part, parts)) for source in weight.sources)


def _interleaved(sizes: Sequence[int], groups: int, part: int, parts: int) -> tuple[Slice, ...]:
    """Return the rows of queries, keys and values that lie in one of the equal parts of their interleaving.

    ``sizes`` are the rows of each in a group: a group's queries come first, then its key, its value, and the
    next group. A part may begin and end inside a group.
    """
    group = sum(sizes)

    def rows(end: int, before: int, size: int) -> int:
        whole, rest = divmod(end, group)
        return whole * size + min(max(rest - before, 0), size)

    low, high = _share(groups * group, part, parts)
    slices, before = [], 0
    for size in sizes:
        slices.append(Slice(0, rows(low, before, size), rows(high, before, size)))
        before += size
    return tuple(slices)


def engine_slice(source: Source, place: int, places: int, kv_heads: int) -> Slice:
    """Return what vLLM's rank ``place`` of a replica of ``places`` ranks holds of a checkpoint tensor."""
    size = source.shape[0]
    if source.engine == "whole":
        return Slice(0, 0, size)
    if source.engine == "columns":
        return Slice(1, *_share(source.shape[1], place, places))
    if source.engine == "vocabulary":
        return Slice(0, *_padded_share(size, place, places, VOCABULARY_MULTIPLE))
    if source.engine == "heads" and kv_heads < places:
        place, places = place * kv_heads // places, kv_heads
    return Slice(0, *_share(size, place, places))


def engine_experts(experts: int, place: int, places: int) -> range:
    """Return the experts of a rank where whole experts are dealt out over a replica, as vLLM deals them."""
    each, more = divmod(experts, places)
    start = place * each + min(place, more)
    return range(start, start + each + (place < more))


def _share(size: int, part: int, parts: int) -> tuple[int, int]:
    return size * part // parts, size * (part + 1) // parts


def _padded_share(size: int, part: int, parts: int, multiple: int = 1) -> tuple[int, int]:
    """Return the share of a size that is padded to a multiple, and to equal parts, before it is cut."""
    rows = -(-size // multiple) * multiple
    rows = -(-rows // parts)
    return min(part * rows, size), min((part + 1) * rows, size)


def _common_elements(source: Source, first: Slice, second: Slice) -> int:
    """Count the elements of a tensor that lie in both slices."""
    if first.dim != second.dim:
        lengths = math.prod(part.stop - part.start for part in (first, second))
        return lengths * source.elements // (source.shape[first.dim] * source.shape[second.dim])
    length = min(first.stop, second.stop) - max(first.start, second.start)
    return max(0, length) * source.elements // source.shape[first.dim]


@dataclass(frozen=True)
class SharedBytes:
    """Hold the bytes that each place in an engine replica needs, and those of them that actor ranks hold.

    ``held`` is by actor rank, then by place; ``model_bytes`` are those of one whole copy.
    """

    needed: tuple[int, ...]
    held: Mapping[int, Sequence[int]]
    model_bytes: int

    def lacking(self, rank: int, place: int) -> int:
        """Return the bytes that a rank receives when it takes a place."""
        held = self.held.get(rank)
        return self.needed[place] - (0 if held is None else held[place])

    def traffic(self, ranks: Sequence[int]) -> WeightTraffic:
        """Return the bytes of a movement into an engine whose replicas are consecutive ``ranks``."""
        places = len(self.needed)
        place_of = {rank: index % places for index, rank in enumerate(ranks)}
        return WeightTraffic(
            self.model_bytes,
            {rank: self.needed[place] for rank, place in place_of.items()},
            {rank: self.lacking(rank, place) for rank, place in place_of.items()},
        )


@dataclass(frozen=True)
class WeightTraffic:
    """Hold the bytes of one movement of weights, needed and received by rollout rank."""

    model_bytes: int
    needed: Mapping[int, int]
    received: Mapping[int, int]

    @property
    def received_most(self) -> int:
        """Return the bytes that the busiest rank receives."""
        return max(self.received.values())


def byte_words(count: float) -> str:
    """Return bytes as ``1.90 GB``, in powers of ten, as the rates of networks are given."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def shared_bytes(
    shape: ModelShape,
    actor: ParallelLayout,
    places: int,
    itemsize: int,
    *,
    settings: Mapping[str, Any] | None = None,
    whole_experts: bool = False,
    lora: Lora | None = None,
) -> SharedBytes:
    """Return what the ranks of an engine replica need of a model, and what the actor's ranks hold of that.

    ``itemsize`` is the bytes of an element in the engine, ``settings`` are Megatron's for uneven stages.
    With ``whole_experts`` the engine deals whole experts out to its ranks (vLLM's expert parallelism). With
    ``lora`` only adapters move; tensors that a family stores as one are counted with an A each.
    """
    engine, alone = _Engine(shape, places, itemsize, whole_experts, lora), ParallelLayout((0,))
    return SharedBytes(
        needed=tuple(engine.in_common(alone)[0]),
        held=engine.in_common(actor, settings),
        model_bytes=_Engine(shape, 1, itemsize, lora=lora).in_common(alone)[0][0],
    )


Weights = tuple[Weight, ...]


class _Common(NamedTuple):
    """Bytes of one layer that trainer and engine both have, by place in the engine.

    ``dense`` is by the trainer's tensor-parallel rank, ``experts`` by its expert- and expert-tensor-parallel
    rank.
    """

    dense: list[list[int]]
    experts: dict[tuple[int, int], list[int]]


@dataclass(frozen=True)
class _Engine:
    """An engine replica of one model on ``places`` ranks."""

    shape: ModelShape
    places: int
    itemsize: int
    whole_experts: bool = False
    lora: Lora | None = None

    def in_common(
        self, trainer: ParallelLayout, settings: Mapping[str, Any] | None = None
    ) -> dict[int, list[int]]:
        """Return by rank of a trainer, then by place in the engine, the bytes that both have."""
        shape, result = self.shape, {}
        known: dict[Weights, _Common] = {}
        stages = stage_layers(shape.layers, trainer, settings)
        for stage, ranks in enumerate(trainer.groups("tensor", "context", "data")):
            counts = Counter(self._layer(layer) for layer in stages[stage])
            if self.lora is None:
                counts[outer_weights(shape, stage == 0, stage == trainer.pipeline - 1)] += 1
            for weights in counts.keys() - known.keys():
                known[weights] = self._common(weights, trainer)
            kinds = [(count, known[weights]) for weights, count in counts.items()]
            by_shard: dict[tuple[int, tuple[int, int]], list[int]] = {}
            for position, rank in enumerate(ranks):
                rest, expert_tensor = divmod(position, trainer.expert_tensor)
                tensor, expert = position % trainer.tensor, (rest % trainer.expert, expert_tensor)
                if (tensor, expert) not in by_shard:
                    by_shard[tensor, expert] = [
                        sum(
                            count * (common.dense[tensor][place] + common.experts[expert][place])
                            for count, common in kinds
                        )
                        for place in range(self.places)
                    ]
                result[rank] = by_shard[tensor, expert]
        return result

    def _layer(self, layer: int) -> Weights:
        weights = self.shape.weights(layer)
        return weights if self.lora is None else adapter_weights(weights, self.lora)

    def _common(self, weights: Weights, trainer: ParallelLayout) -> _Common:
        dense = [weight for weight in weights if not weight.expert]
        routed = [weight for weight in weights if weight.expert]
        count, parts = self.shape.experts // trainer.expert, trainer.expert_tensor
        one_expert = self._bytes(routed, parts, 1 if self.whole_experts else self.places)
        experts = {}
        for expert in range(trainer.expert):
            held = range(expert * count, (expert + 1) * count)
            for part in range(parts):
                experts[expert, part] = [
                    _length(held, engine_experts(self.shape.experts, place, self.places))
                    * one_expert[part][0]
                    if self.whole_experts
                    else count * one_expert[part][place]
                    for place in range(self.places)
                ]
        return _Common(self._bytes(dense, trainer.tensor, self.places), experts)

    def _bytes(self, weights: Iterable[Weight], parts: int, places: int) -> list[list[int]]:
        result, kv_heads = [[0] * places for _ in range(parts)], self.shape.kv_heads
        for weight in weights:
            held = [trainer_slices(weight, part, parts, kv_heads) for part in range(parts)]
            for index, source in enumerate(weight.sources):
                size = 4 if source.float32 else self.itemsize
                for place in range(places):
                    needed = engine_slice(source, place, places, kv_heads)
                    for part in range(parts):
                        result[part][place] += size * _common_elements(source, held[part][index], needed)
        return result


def _length(first: range, second: range) -> int:
    return max(0, min(first.stop, second.stop) - max(first.start, second.start))


def gathered_bytes(model_bytes: float, actor: ParallelLayout, colocated: bool = True) -> float:
    """Return the bytes each generating rank receives where peers gather whole tensors, or broadcast them.

    Colocated, a rank gathers what it lacks of the actor's tensor- and pipeline-parallel shards; apart from
    the actor it receives the whole model.
    """
    shards = actor.tensor * actor.pipeline
    return model_bytes * (shards - 1) / shards if colocated else model_bytes


def received_by_peers(
    model_bytes: float, actor: ParallelLayout, tensor: int, colocated: bool = True
) -> dict[str, float]:
    """Return the bytes each generating rank receives by the peers' formulas.

    Colocated: HybridFlow (arXiv 2409.19256) table 2, its own where ``tensor`` divides the actor's model
    parallelism; gathering peers (verl, mbridge, Megatron-Bridge, slime) receive what HybridFlow-V does.
    Elsewhere only the broadcast of the whole model applies.
    """
    gathered = gathered_bytes(model_bytes, actor, colocated)
    if not colocated:
        return {"broadcast of the whole model": gathered}
    train = actor.tensor * actor.pipeline
    whole = train * actor.data * actor.context
    volumes = {
        "DS-Chat": (whole - 1) / whole * model_bytes,
        "HybridFlow-V": gathered,
        "gather-all (verl, mbridge, slime)": gathered,
    }
    if train % tensor == 0:
        volumes["HybridFlow"] = (train - tensor) / (tensor * train) * model_bytes
    return volumes
