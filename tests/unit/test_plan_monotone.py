"""What must only grow or only shrink, over random models, layouts and batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.planner.constants import Cluster, load_constants
from megatron_rl.planner.generation import decode_milliseconds, generate_seconds
from megatron_rl.planner.layout import Layout, RolloutLayout
from megatron_rl.planner.lengths import response_lengths
from megatron_rl.planner.memory import OptimizerChoice, kv_capacity_bytes, training_memory
from megatron_rl.planner.rl_step import RlBatch, TrainChoice, step_forward_seconds, step_train_seconds
from megatron_rl.planner.weight_sync import METHODS, sync_seconds
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.published import load_shape

CONSTANTS = load_constants()
MODELS = ("llama-3.1-8b", "llama-3-70b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "mixtral-8x7b")
SLIGHTLY = 1.0 + 1e-9
few = settings(max_examples=60, deadline=None)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ModelShape, Layout]:
    model = load_shape(draw(st.sampled_from(MODELS)))
    tensor = draw(st.sampled_from((1, 2, 4)))
    pipeline = draw(st.sampled_from((1, 2, 4, 8)))
    data = draw(st.sampled_from((4, 8, 16)))
    expert = draw(st.sampled_from((1, 2, 4, 8))) if model.experts else 1
    return model, Layout(
        tensor=tensor, pipeline=pipeline, data=max(data, expert), expert=expert, sequence_parallel=tensor > 1
    )


def batch(rows: int = 512, mean: float = 1000.0, longest: float = 4096.0) -> RlBatch:
    lengths = response_lengths(mean, longest, "variable")
    return RlBatch(rows // 8, 8, 1, 500.0, lengths, longest + 500.0)


def cluster(gpus: int, **slower: float) -> Cluster:
    gpu = CONSTANTS.gpu("h100")
    gpu = replace(gpu, **{name: getattr(gpu, name) * factor for name, factor in slower.items()})
    network = CONSTANTS.gpu("h100").network * slower.get("network", 1.0)
    return Cluster(gpu, gpus, 8, network)


@few
@given(layouts(), st.sampled_from(("none", "full")))
def test_more_work_takes_longer(cut: tuple[ModelShape, Layout], recompute: str) -> None:
    model, layout = cut
    choice, machine = TrainChoice(model, layout, recompute), cluster(layout.size)
    for less, more in (
        (batch(256), batch(1024)),
        (batch(mean=500.0), batch(mean=2000.0)),
    ):
        for seconds in (step_train_seconds, step_forward_seconds):
            assert seconds(choice, less, machine, CONSTANTS, "bf16") < seconds(
                choice, more, machine, CONSTANTS, "bf16"
            )
    forward = step_forward_seconds(choice, batch(), machine, CONSTANTS, "bf16")
    assert step_train_seconds(choice, batch(), machine, CONSTANTS, "bf16") > 2 * forward * 0.9


@few
@given(layouts(), st.sampled_from(("bf16_flops", "hbm", "nvlink", "network", "host")), st.floats(0.1, 0.95))
def test_a_slower_machine_is_never_faster(cut: tuple[ModelShape, Layout], part: str, factor: float) -> None:
    model, layout = cut
    choice = TrainChoice(model, layout, optimizer=OptimizerChoice(offload=True))
    fast, slow = cluster(layout.size), cluster(layout.size, **{part: factor})
    for seconds in (step_train_seconds, step_forward_seconds):
        arguments = (batch(), fast, CONSTANTS, "bf16"), (batch(), slow, CONSTANTS, "bf16")
        assert seconds(choice, *arguments[0]) <= seconds(choice, *arguments[1]) * SLIGHTLY
    rollout = RolloutLayout(tensor=8, replicas=1, memory_fraction=0.9, engine="static_batch")
    lengths = response_lengths(500.0, 1000.0, "variable")
    times = [
        decode_milliseconds(model, rollout, machine, CONSTANTS, "bf16", 32, 500.0, lengths)
        for machine in (fast, slow)
    ]
    assert times[0] <= times[1] * SLIGHTLY
    for method in METHODS:
        moved = [
            sync_seconds(model, layout, rollout, machine, CONSTANTS, method, "bf16", 8, layout.size)
            for machine in (fast, slow)
        ]
        assert 0 < moved[0] <= moved[1] * SLIGHTLY


@few
@given(layouts(), st.sampled_from(("none", "full")), st.integers(512, 16384))
def test_memory_shrinks_with_every_cut_and_grows_with_tokens(
    cut: tuple[ModelShape, Layout], recompute: str, tokens: int
) -> None:
    model, layout = cut

    def total(layout: Layout, tokens: int, optimizer: OptimizerChoice | None = None) -> float:
        optimizer = optimizer or OptimizerChoice()
        return training_memory(model, layout, optimizer, CONSTANTS, tokens, 64, recompute).total

    base = total(layout, tokens)
    assert total(layout, 2 * tokens) >= base
    assert total(replace(layout, data=2 * layout.data), tokens) <= base
    assert total(replace(layout, tensor=2 * layout.tensor, sequence_parallel=True), tokens) < base
    if model.experts:
        # More ranks share the experts; their optimizer states were cut over data before.
        assert total(replace(layout, expert=2 * layout.expert, data=2 * layout.data), tokens) <= base
    assert total(layout, tokens, OptimizerChoice(offload=True)) < base
    assert total(layout, tokens, OptimizerChoice(distributed=False)) >= base


@few
@given(
    st.sampled_from(MODELS[:3]),
    st.sampled_from((64, 200, 1000)),
    st.floats(100.0, 3000.0),
    st.sampled_from(("variable", "fixed")),
)
def test_generation_grows_with_rows_lengths_and_less_cache(
    name: str, rows: int, mean: float, kind: str
) -> None:
    model, machine = load_shape(name), cluster(8)
    rollout = RolloutLayout(tensor=8, replicas=1, memory_fraction=0.9)

    def seconds(rows: float, mean: float, longest: float = 4096.0, fraction: float = 0.9) -> float:
        lengths = response_lengths(mean, longest, kind)
        where = replace(rollout, memory_fraction=fraction)
        return generate_seconds(model, where, machine, CONSTANTS, "bf16", rows, 500.0, lengths)

    base = seconds(rows, mean)
    assert seconds(2 * rows, mean) > base
    assert seconds(rows, 1.1 * mean) >= base
    assert seconds(rows, mean, fraction=0.5) >= base
    if kind == "variable":
        assert seconds(rows, mean, 8192.0) >= 0.9 * base  # same tokens, a longer tail


@pytest.mark.parametrize("name", MODELS)
def test_more_tensor_parallelism_holds_more_cache(name: str) -> None:
    model, memory = load_shape(name), 2000e9
    room = [
        kv_capacity_bytes(model, RolloutLayout(tensor=size), memory, "bf16", CONSTANTS)
        for size in (1, 2, 4, 8)
    ]
    assert room == sorted(room)
