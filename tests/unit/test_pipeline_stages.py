"""Layers are dealt out to pipeline stages as Megatron-Core deals them out."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_rl.errors import UserError
from megatron_rl.shapes.layout import (
    EMBEDDING,
    FIRST,
    LAST,
    LOSS,
    ParallelLayout,
    end_stage_sizes,
    stage_layers,
)


def of_megatron(layers: int, stages: int, virtual: int, more: dict) -> list[list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            pipeline_dtype=torch.float32,
            overlap_p2p_comm=True,
            batch_p2p_comm=False,
            **more,
        )
    result = []
    for stage in range(stages):
        held: list[int] = []
        for chunk in range(virtual):
            number = chunk if virtual > 1 else None
            offset = get_transformer_layer_offset(config, number, stage)
            held += range(offset, offset + get_num_layers_to_build(config, number, stage))
        result.append(held)
    return result


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_stages_hold_the_layers_that_megatron_gives_them(data) -> None:
    stages = data.draw(st.integers(1, 5))
    virtual = data.draw(st.integers(1, 3 if stages > 1 else 1))
    kind = data.draw(st.sampled_from(["even", "ends", "first", "last", "accounted"]))
    assume(stages > 1 or kind != "ends")  # two ends of one stage, which Megatron takes where both are all
    middle = virtual * data.draw(st.integers(1, 4))
    ends = {name: virtual * data.draw(st.integers(1, 4)) for name in (FIRST, LAST)}
    if kind == "even":
        more: dict = {}
    elif kind == "accounted":
        more = {EMBEDDING: data.draw(st.booleans()), LOSS: data.draw(st.booleans())}
    else:
        more = {name: count for name, count in ends.items() if kind == "ends" or kind in name}
    stated = [count for name, count in more.items() if name in ends]
    layers = middle * (stages - len(stated)) + sum(stated)
    layers -= sum(bool(more.get(name)) for name in (EMBEDDING, LOSS))
    layers += data.draw(st.sampled_from([0, 0, 0, 1, virtual]))
    assume(layers > 0)
    layout = ParallelLayout(tuple(range(stages)), pipeline=stages, virtual_pipeline=virtual)
    try:
        expected = of_megatron(layers, stages, virtual, more)
    except (AssertionError, ValueError, ZeroDivisionError):
        with pytest.raises(UserError):
            stage_layers(layers, layout, more)
        return
    assert stage_layers(layers, layout, more) == expected


@pytest.mark.parametrize(
    ("layers", "stages", "virtual", "more"),
    [
        (7, 2, 1, {}),
        (8, 2, 3, {}),
        (8, 4, 1, {FIRST: 1}),
        (4, 2, 1, {FIRST: 5, LAST: 1}),
        (8, 2, 1, {LOSS: True}),
        (4, 1, 1, {FIRST: 1}),
        (4, 1, 1, {FIRST: 2, LAST: 2}),
    ],
)
def test_layers_that_do_not_fit_are_refused_with_what_would(layers, stages, virtual, more) -> None:
    layout = ParallelLayout(
        tuple(range(stages)), pipeline=stages, virtual_pipeline=virtual, path="actor.layout"
    )
    with pytest.raises(UserError, match="cannot be distributed over") as caught:
        stage_layers(layers, layout, more)
    error = caught.value
    assert error.where.startswith("actor.layout.") and error.expected and error.got and error.fix


@given(st.integers(1, 130), st.integers(2, 16), st.integers(1, 4))
def test_chosen_ends_make_stages_that_megatron_accepts(layers, stages, virtual) -> None:
    ends = end_stage_sizes(layers, stages, virtual)
    layout = ParallelLayout(tuple(range(stages)), pipeline=stages, virtual_pipeline=virtual)
    if ends is None:
        return
    even = layers % (stages * virtual) == 0  # nothing need be stated then
    held = stage_layers(layers, layout, {} if even else dict(zip((FIRST, LAST), ends, strict=True)))
    assert sorted(layer for stage in held for layer in stage) == list(range(layers))
    assert (len(held[0]), len(held[-1])) == ends and all(held)
    assert len({len(stage) for stage in held[1:-1]}) <= 1


@pytest.mark.parametrize(
    ("layers", "stages", "ends"),
    [(61, 16, (3, 2)), (94, 8, (11, 11)), (63, 2, (32, 31)), (80, 4, (20, 20)), (5, 5, (1, 1))],
)
def test_ends_hold_fewer_layers(layers, stages, ends) -> None:
    assert end_stage_sizes(layers, stages) == ends
