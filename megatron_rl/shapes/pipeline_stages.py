"""Deal a model's layers out to pipeline stages, as Megatron-Core does: pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.shapes.layout import ParallelLayout

FIRST = "num_layers_in_first_pipeline_stage"
LAST = "num_layers_in_last_pipeline_stage"
EMBEDDING = "account_for_embedding_in_pipeline_split"
LOSS = "account_for_loss_in_pipeline_split"
STAGE_SETTINGS = (FIRST, LAST, EMBEDDING, LOSS)
"""Megatron's settings that deal layers out unevenly."""


def stage_layers(
    layers: int, layout: ParallelLayout, settings: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Return for each pipeline stage the layers that it holds, counted over the whole model from 0.

    Arguments and errors are those of `stage_chunks`.
    """
    stages = stage_chunks(layers, layout, settings)
    return [[layer for chunk in chunks for layer in chunk] for chunks in stages]


def stage_chunks(
    layers: int, layout: ParallelLayout, settings: Mapping[str, Any] | None = None
) -> list[list[list[int]]]:
    """Return for each pipeline stage the layers of each of its chunks, one for each virtual stage.

    ``settings`` are Megatron's, of which those for uneven stages count. Raises UserError where the layers
    cannot be dealt out. Source: `get_num_layers_to_build` and `get_transformer_layer_offset`.
    """
    stages, virtual = layout.pipeline, layout.virtual_pipeline
    chosen = settings or {}
    if stages == 1:
        stated = [chosen[name] for name in (FIRST, LAST) if chosen.get(name) is not None]
        if stated and stated != [layers]:
            raise _uneven(layers, layout, chosen)
        return [[list(range(layers))]]
    embedding, loss = (int(bool(chosen.get(name))) for name in (EMBEDDING, LOSS))
    counts = _counts(layers + embedding + loss, stages, chosen.get(FIRST), chosen.get(LAST))
    # With both ends stated and chunks interleaved Megatron divides by the number of stages between.
    divided_by_zero = stages == 2 and virtual > 1 and None not in (chosen.get(FIRST), chosen.get(LAST))
    if counts is None or divided_by_zero or any(count % virtual for count in counts):
        raise _uneven(layers, layout, chosen)
    result: list[list[list[int]]] = [[] for _ in counts]
    position = -embedding  # an embedding that is accounted for takes the place of the first layer
    for _ in range(virtual):
        for stage, count in enumerate(counts):
            end = position + count // virtual
            result[stage].append(list(range(max(position, 0), min(end, layers))))
            position = end
    return result


def _counts(places: int, stages: int, first: int | None, last: int | None) -> list[int] | None:
    """Return the places for layers in each stage, the ends as stated; None where that is impossible."""
    between = stages - (first is not None) - (last is not None)
    rest = places - (first or 0) - (last or 0)
    if rest < 0 or (rest % between if between else rest):
        return None
    counts = [rest // between if between else 0] * stages
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return counts


def _uneven(layers: int, layout: ParallelLayout, settings: Mapping[str, Any]) -> UserError:
    stages, virtual, path = layout.pipeline, layout.virtual_pipeline, layout.path
    words = f"pipeline {stages}" + (f" x virtual_pipeline {virtual}" if virtual > 1 else "")
    stated = {name: settings[name] for name in STAGE_SETTINGS if settings.get(name)}
    ends = stage_ends(layers, stages, virtual)
    divisors = [number for number in range(1, layers + 1) if layers % number == 0]
    fix = "choose one of these" if not stated else "change or remove " + ", ".join(stated)
    if ends is not None and stages > 1 and (stages > 2 or virtual == 1):
        role = path.rpartition(".")[0] or "actor"
        fix += f", or set {FIRST}: {ends[0]} and {LAST}: {ends[1]} in {role}.megatron"
    return UserError(
        f"the model's {layers} layers cannot be dealt out to {words}",
        where=f"{path}.{'virtual_pipeline' if virtual > 1 else 'pipeline'}",
        expected=f"a divisor of {layers}: {', '.join(map(str, divisors[:12]))}"
        if not stated
        else "equal stages between the first and the last, each divisible by virtual_pipeline"
        if stages > 1
        else f"no other stage, or one of {layers} layers",
        got=str(stages * virtual) if not stated else ", ".join(f"{k}: {v}" for k, v in stated.items()),
        fix=fix,
    )


def stage_ends(layers: int, stages: int, virtual: int = 1) -> tuple[int, int] | None:
    """Return the layers of the first and of the last stage that make the stages between equal.

    Even splits give equal values. Elsewhere the ends, which hold the embedding and the output layer, get
    fewer layers where that is possible. None where no ends fit.
    """
    if layers % (stages * virtual) == 0:
        return layers // stages, layers // stages
    if stages == 1 or layers % virtual or (stages == 2 and virtual > 1):
        return None
    chunks = layers // virtual  # a stage holds a whole number of chunks of ``virtual`` layers
    for middle in (-(-chunks // stages), chunks // stages):
        rest = chunks - middle * (stages - 2)
        if 2 <= rest <= 2 * middle + 2 and (middle or stages == 2):
            return -(-rest // 2) * virtual, rest // 2 * virtual
    return None


def end_settings(layers: int, stages: int, virtual: int = 1) -> dict[str, int] | None:
    """Return Megatron's settings for the ends of `stage_ends`, empty for an even pipeline.

    None where no ends fit.
    """
    ends = stage_ends(layers, stages, virtual)
    if ends is None:
        return None
    return {} if layers % (stages * virtual) == 0 else {FIRST: ends[0], LAST: ends[1]}


@lru_cache(maxsize=4096)
def dealt_out(layers: int, stages: int, virtual: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each stage where none is stated: even, else with shorter ends.

    Where that cannot be either, as evenly as it goes; Megatron takes a stated pipeline layout there.
    """
    settings = end_settings(layers, stages, virtual)
    if settings is None:
        bounds = [layers * stage // stages for stage in range(stages + 1)]
        return tuple(tuple(range(low, high)) for low, high in pairwise(bounds))
    layout = ParallelLayout((), pipeline=stages, virtual_pipeline=virtual)
    return tuple(tuple(held) for held in stage_layers(layers, layout, settings))
