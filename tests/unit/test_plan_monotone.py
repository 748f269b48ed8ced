"""What must only grow or only shrink, over random models, layouts and batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from peers import METHODS, decode_milliseconds

from megatron_rl.planning.predict.batch import StepBatch, response_lengths
from megatron_rl.planning.predict.generate import RolloutLayout, cache_capacity_tokens, replica_seconds
from megatron_rl.planning.predict.learn import TrainChoice, learn_seconds, peak_training_memory, score_seconds
from megatron_rl.shapes.hardware import Cluster, Machine, load_constants
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.memory import OptimizerChoice
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.published import load_shape

CONSTANTS = load_constants()
MODELS = ("llama-3.1-8b", "llama-3-70b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "mixtral-8x7b")
SLIGHTLY = 1.0 + 1e-9
few = settings(max_examples=60, deadline=None)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ModelShape, ParallelLayout]:
    model = load_shape(draw(st.sampled_from(MODELS)))
    tensor = draw(st.sampled_from((1, 2, 4)))
    pipeline = draw(st.sampled_from((1, 2, 4, 8)))
    data = draw(st.sampled_from((4, 8, 16)))
    expert = draw(st.sampled_from((1, 2, 4, 8))) if model.experts else 1
    return model, laid_out(max(data, expert), tensor, pipeline, expert)


def laid_out(data: int, tensor: int, pipeline: int, expert: int = 1) -> ParallelLayout:
    ranks = tuple(range(data * tensor * pipeline))
    return ParallelLayout(ranks, tensor, pipeline, expert=expert, sequence_parallel=tensor > 1)


def batch(rows: int = 512, mean: float = 1000.0, longest: float = 4096.0) -> StepBatch:
    lengths = response_lengths(mean, longest, "variable")
    return StepBatch(rows // 8, 8, 1, 500.0, lengths, longest + 500.0)


def machine_of(gpus: int, **slower: float) -> Machine:
    gpu = CONSTANTS.gpu("h100")
    gpu = replace(gpu, **{name: getattr(gpu, name) * factor for name, factor in slower.items()})
    network = CONSTANTS.gpu("h100").network * slower.get("network", 1.0)
    return Machine(Cluster(gpu, gpus, 8, network), CONSTANTS)


@few
@given(layouts(), st.sampled_from(("none", "full")))
def test_more_work_takes_longer(cut: tuple[ModelShape, ParallelLayout], recompute: str) -> None:
    model, layout = cut
    choice, machine = TrainChoice(model, layout, recompute), machine_of(layout.size)
    for less, more in (
        (batch(256), batch(1024)),
        (batch(mean=500.0), batch(mean=2000.0)),
    ):
        for seconds in (learn_seconds, score_seconds):
            assert seconds(choice, less, machine) < seconds(choice, more, machine)
    forward = score_seconds(choice, batch(), machine)
    assert learn_seconds(choice, batch(), machine) > 2 * forward * 0.9


@few
@given(layouts(), st.sampled_from(("bf16_flops", "hbm", "nvlink", "network", "host")), st.floats(0.1, 0.95))
@example((load_shape("deepseek-v3"), laid_out(4, 1, 2, 2)), "nvlink", 0.75)  # 61 layers on two stages
def test_a_slower_machine_is_never_faster(
    cut: tuple[ModelShape, ParallelLayout], part: str, factor: float
) -> None:
    model, layout = cut
    choice = TrainChoice(model, layout, optimizer=OptimizerChoice(offload=True))
    fast, slow = machine_of(layout.size), machine_of(layout.size, **{part: factor})
    for seconds in (learn_seconds, score_seconds):
        assert seconds(choice, batch(), fast) <= seconds(choice, batch(), slow) * SLIGHTLY
    rollout = RolloutLayout(tensor=8, replicas=1, memory_fraction=0.9, engine="static_batch")
    lengths = response_lengths(500.0, 1000.0, "variable")
    times = [decode_milliseconds(model, rollout, machine, 32, 500.0, lengths) for machine in (fast, slow)]
    assert times[0] <= times[1] * SLIGHTLY
    for sync_seconds in METHODS.values():
        moved = [sync_seconds(model, layout, rollout, machine) for machine in (fast, slow)]
        assert 0 < moved[0] <= moved[1] * SLIGHTLY


@few
@given(layouts(), st.sampled_from(("none", "full")), st.integers(512, 16384))
def test_memory_shrinks_with_every_cut_and_grows_with_tokens(
    cut: tuple[ModelShape, ParallelLayout], recompute: str, tokens: int
) -> None:
    model, layout = cut

    def total(layout: ParallelLayout, tokens: int, optimizer: OptimizerChoice | None = None) -> float:
        choice = TrainChoice(model, layout, recompute, optimizer or OptimizerChoice())
        return peak_training_memory(choice, tokens, 64).total

    def larger(**factors: int) -> ParallelLayout:
        """Return the layout with these of its sizes multiplied."""
        sizes = {"data": layout.data, "tensor": layout.tensor, "expert": layout.expert}
        sizes = {name: size * factors.get(name, 1) for name, size in sizes.items()}
        return laid_out(sizes["data"], sizes["tensor"], layout.pipeline, sizes["expert"])

    base = total(layout, tokens)
    assert total(layout, 2 * tokens) >= base
    assert total(larger(data=2), tokens) <= base
    assert total(larger(tensor=2), tokens) < base
    if model.experts:
        # More ranks share the experts; their optimizer states were cut over data before.
        assert total(larger(expert=2, data=2), tokens) <= base
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
    model, machine = load_shape(name), machine_of(8)
    rollout = RolloutLayout(tensor=8, replicas=1, memory_fraction=0.9)

    def seconds(rows: float, mean: float, longest: float = 4096.0, fraction: float = 0.9) -> float:
        lengths = response_lengths(mean, longest, kind)
        engine = replace(rollout, memory_fraction=fraction)
        return replica_seconds(model, engine, machine, rows, 500.0, lengths)

    base = seconds(rows, mean)
    assert seconds(2 * rows, mean) > base
    assert seconds(rows, 1.1 * mean) >= base
    assert seconds(rows, mean, fraction=0.5) >= base
    if kind == "variable":
        assert seconds(rows, mean, 8192.0) >= 0.9 * base  # same tokens, a longer tail


@pytest.mark.parametrize("name", MODELS)
def test_more_tensor_parallelism_holds_more_cache(name: str) -> None:
    model, machine = load_shape(name), machine_of(8, memory=25)
    room = [cache_capacity_tokens(model, RolloutLayout(tensor=size), machine) for size in (1, 2, 4, 8)]
    assert room == sorted(room)
