"""The distribution of a model's layers over pipeline stages, as Megatron-Core computes it.

All stages get the same number of layers, except for the first and the last: their sizes can be set, or the
embedding and the loss can count as a layer each.
"""

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
"""Megatron's settings for uneven pipeline stages."""
LISTED_DIVISORS = 12
"""Divisors of the number of layers that an error lists."""


def stage_layers(
    layers: int, layout: ParallelLayout, settings: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Return the layers of each pipeline stage, counted over the whole model from 0.

    Takes the arguments of `stage_chunks` and raises the same errors.
    """
    stages = stage_chunks(layers, layout, settings)
    return [[layer for chunk in chunks for layer in chunk] for chunks in stages]


def stage_chunks(
    layers: int, layout: ParallelLayout, settings: Mapping[str, Any] | None = None
) -> list[list[list[int]]]:
    """Return the layers of each model chunk, [stages][virtual stages][layers of the chunk].

    ``settings`` are Megatron's; only `STAGE_SETTINGS` are read. Raises UserError for layers that Megatron
    cannot distribute. Source: `get_num_layers_to_build` and `get_transformer_layer_offset`.
    """
    stages = layout.pipeline
    virtual = layout.virtual_pipeline
    settings = settings or {}
    first = settings.get(FIRST)
    last = settings.get(LAST)

    # One stage has all layers; settings for its ends may only repeat that.
    if stages == 1:
        explicit = [count for count in (first, last) if count is not None]
        if explicit and explicit != [layers]:
            raise _uneven_error(layers, layout, settings)
        return [[list(range(layers))]]

    embedding = int(bool(settings.get(EMBEDDING)))
    loss = int(bool(settings.get(LOSS)))
    counts = _stage_sizes(layers + embedding + loss, stages, first, last)
    # With both ends set and an interleaved schedule Megatron divides by the number of stages between them.
    divides_by_zero = stages == 2 and virtual > 1 and first is not None and last is not None
    if counts is None or divides_by_zero or any(count % virtual for count in counts):
        raise _uneven_error(layers, layout, settings)

    # Chunks are numbered over the virtual stages first: stage s has chunks s, s + stages, ...
    result: list[list[list[int]]] = [[] for _ in counts]
    position = -embedding  # an embedding that counts as a layer comes before layer 0
    for _ in range(virtual):
        for stage, count in enumerate(counts):
            end = position + count // virtual
            result[stage].append(list(range(max(position, 0), min(end, layers))))
            position = end
    return result


def _stage_sizes(total: int, stages: int, first: int | None, last: int | None) -> list[int] | None:
    """Return the number of layers of each stage; None if the middle stages cannot be equal.

    ``total`` includes the embedding and the loss if they count as layers. ``first`` and ``last`` are the
    explicit sizes of the ends, None for an end that is like the middle stages.
    """
    middle_stages = stages - (first is not None) - (last is not None)
    middle_layers = total - (first or 0) - (last or 0)
    if middle_layers < 0:
        return None
    if middle_stages == 0 and middle_layers:
        return None
    if middle_stages and middle_layers % middle_stages:
        return None

    # Without middle stages both ends are explicit and replace the zeros.
    middle_size = 0
    if middle_stages:
        middle_size = middle_layers // middle_stages
    counts = [middle_size] * stages
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return counts


def _uneven_error(layers: int, layout: ParallelLayout, settings: Mapping[str, Any]) -> UserError:
    """Return the error of layers that cannot be distributed over the stages of a layout."""
    stages = layout.pipeline
    virtual = layout.virtual_pipeline
    explicit = {name: settings[name] for name in STAGE_SETTINGS if settings.get(name)}

    sizes = f"pipeline {stages}"
    key = f"{layout.path}.pipeline"
    if virtual > 1:
        sizes += f" x virtual_pipeline {virtual}"
        key = f"{layout.path}.virtual_pipeline"

    # Without settings for uneven stages the sizes of the layout are wrong, with them the settings are.
    if not explicit:
        divisors = [number for number in range(1, layers + 1) if layers % number == 0]
        expected = f"a divisor of {layers}: {', '.join(map(str, divisors[:LISTED_DIVISORS]))}"
        got = str(stages * virtual)
        fix = "choose one of these"
    else:
        expected = f"no other stage, or one of {layers} layers"
        if stages > 1:
            expected = "equal stages between the first and the last, each divisible by virtual_pipeline"
        got = ", ".join(f"{name}: {value}" for name, value in explicit.items())
        fix = "change or remove " + ", ".join(explicit)

    # Offer shorter ends, except where Megatron divides by zero stages between them.
    ends = stage_ends(layers, stages, virtual)
    if ends is not None and stages > 1 and (stages > 2 or virtual == 1):
        role = layout.path.rpartition(".")[0] or "actor"
        fix += f", or set {FIRST}: {ends[0]} and {LAST}: {ends[1]} in {role}.megatron"

    return UserError(
        f"the model's {layers} layers cannot be distributed over {sizes}",
        where=key,
        expected=expected,
        got=got,
        fix=fix,
    )


def stage_ends(layers: int, stages: int, virtual: int = 1) -> tuple[int, int] | None:
    """Return the sizes in layers of the first and the last stage that make the middle stages equal.

    Even splits give equal values. For uneven ones the ends, which hold the embedding and the output layer,
    get fewer layers if possible. Returns None if no sizes fit.
    """
    if layers % (stages * virtual) == 0:
        return layers // stages, layers // stages
    if stages == 1 or layers % virtual or (stages == 2 and virtual > 1):
        return None

    # Count in units of ``virtual`` layers, since every chunk of a stage has equally many layers. Middle
    # stages are tried rounded up first: that leaves the shorter ends.
    units = layers // virtual
    for middle in (-(-units // stages), units // stages):
        end_units = units - middle * (stages - 2)
        if 2 <= end_units <= 2 * middle + 2 and (middle or stages == 2):
            return -(-end_units // 2) * virtual, end_units // 2 * virtual
    return None


def end_settings(layers: int, stages: int, virtual: int = 1) -> dict[str, int] | None:
    """Return Megatron's settings for the first and the last stage, with the sizes from `stage_ends`.

    The settings are empty for an even pipeline, and None if no sizes make the middle stages equal.
    """
    ends = stage_ends(layers, stages, virtual)
    if ends is None:
        return None
    if layers % (stages * virtual) == 0:
        return {}
    return {FIRST: ends[0], LAST: ends[1]}


@lru_cache(maxsize=4096)
def default_stage_layers(layers: int, stages: int, virtual: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each stage without settings: an even split, or one with shorter ends.

    If neither exists, the split is as even as possible; Megatron needs an explicit pipeline layout for it.
    """
    settings = end_settings(layers, stages, virtual)
    if settings is None:
        bounds = [layers * stage // stages for stage in range(stages + 1)]
        return tuple(tuple(range(low, high)) for low, high in pairwise(bounds))

    layout = ParallelLayout((), pipeline=stages, virtual_pipeline=virtual)
    return tuple(tuple(stage) for stage in stage_layers(layers, layout, settings))
