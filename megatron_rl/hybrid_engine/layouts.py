"""What an engine's ranks will need, before there is an engine, and the best order of its ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_rl.hybrid_engine.assignment import assign
from megatron_rl.parallel.boxes import BoxGroup, regions
from megatron_rl.parallel.hf.layout_boxes import megatron_layout
from megatron_rl.parallel.hf.model_spec import pretrained
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import TensorBox

VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this before it cuts it."""
LARGEST_ISLAND = 64
"""Ranks whose order is optimised together; larger islands keep the order they were given."""


def engine_layout(
    hf_config: Any, ranks: Sequence[int], tensor: int, dtype: torch.dtype, expert_parallel: bool = False
) -> list[BoxGroup]:
    """Return the boxes that vLLM's ranks need under tensor parallelism, replicas of consecutive ranks.

    With ``expert_parallel`` whole experts are dealt out over each replica's ranks. This predicts vLLM's own
    cut for planning; a running `HybridEngine` uses the traced one.
    """
    groups = []
    for position in range(tensor):
        boxes = tuple(
            TensorBox(name, start, size, -1, name, 0, (0,) * len(size))
            for name, start, size in _engine_boxes(hf_config, position, tensor, expert_parallel)
        )
        dtypes = {box.storage: dtype for box in boxes}
        groups.append(BoxGroup(tuple(ranks[position::tensor]), boxes, dtypes))
    return groups


def _engine_boxes(
    hf_config: Any, position: int, tensor: int, expert_parallel: bool
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    model = pretrained(hf_config)
    share, heads = math.ceil(model.shape.experts / tensor), model.shape.kv_heads
    for named in model.tensors():
        name, shape = named.name, named.shape
        dim, low, high = 0, 0, shape[0]
        if expert_parallel and named.expert is not None:
            if named.expert // share != position:
                continue
        elif named.engine == "vocabulary":
            rows = math.ceil(shape[0] / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // tensor
            low, high = min(position * rows, shape[0]), min((position + 1) * rows, shape[0])
        elif named.engine == "heads" and heads < tensor:
            rows, head = shape[0] // heads, position * heads // tensor
            low, high = head * rows, (head + 1) * rows
        elif named.engine in ("rows", "heads"):
            low, high = _part(shape[0], position, tensor)
        elif named.engine == "columns":
            dim = 1
            low, high = _part(shape[1], position, tensor)
        if low < high:
            start, size = [0] * len(shape), list(shape)
            start[dim], size[dim] = low, high - low
            yield name, tuple(start), tuple(size)


def _part(size: int, position: int, count: int) -> tuple[int, int]:
    return size * position // count, size * (position + 1) // count


def best_rank_order(
    hf_config: Any,
    actor: ParallelLayout,
    ranks: Sequence[int],
    tensor: int,
    *,
    ranks_per_node: int,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Return ``ranks`` in the order whose consecutive groups of ``tensor`` ranks lack the least weights.

    The largest receive of any rank is minimised first, then the sum. Groups stay inside a node where their
    size allows it. Global rank r is on node r // ranks_per_node. Pure: every rank computes the same.
    """
    ordered = tuple(sorted(ranks))
    if tensor == 1 or not set(ranks) & set(actor.ranks):
        return ordered
    overlap, needed = _overlaps(hf_config, actor, tensor, overrides)
    result: list[int] = []
    for island in _islands(ordered, tensor, ranks_per_node):
        if len(island) > LARGEST_ISLAND:
            result += island
            continue
        lacking = [
            [needed[place] - overlap.get((rank, place), 0) for place in range(tensor)] for rank in island
        ]
        places = assign(lacking, len(island) // tensor)
        by_place = [
            [rank for rank, found in zip(island, places, strict=True) if found == p] for p in range(tensor)
        ]
        result += [rank for replica in zip(*by_place, strict=True) for rank in replica]
    return tuple(result)


def _overlaps(
    hf_config: Any, actor: ParallelLayout, tensor: int, overrides: Mapping[str, Any] | None
) -> tuple[dict[tuple[int, int], int], list[int]]:
    """Return by (rank, place in the engine) the bytes it already has, and by place the bytes needed."""
    sources = megatron_layout(hf_config, actor, torch.bfloat16, overrides)
    # Places stand in for ranks: -1 is place 0, -2 is place 1, ...
    places = engine_layout(hf_config, [-1 - place for place in range(tensor)], tensor, torch.bfloat16)
    overlap: dict[tuple[int, int], int] = {}
    needed = [0] * tensor
    for region in regions(sources, places):
        for stand_in in region.receivers:
            place = -1 - stand_in
            needed[place] += region.bytes
            for rank in region.holders:
                overlap[rank, place] = overlap.get((rank, place), 0) + region.bytes
    return overlap, needed


def _islands(ranks: Sequence[int], tensor: int, ranks_per_node: int) -> list[list[int]]:
    """Divide ranks into the smallest sets of whole nodes whose sizes are multiples of ``tensor``."""
    islands: list[list[int]] = [[]]
    for index, rank in enumerate(ranks):
        new_node = index and rank // ranks_per_node != ranks[index - 1] // ranks_per_node
        if new_node and len(islands[-1]) % tensor == 0:
            islands.append([])
        islands[-1].append(rank)
    return islands
