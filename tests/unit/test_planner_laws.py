"""Laws of the phase model and of the search."""

from dataclasses import replace
from typing import Any

import pytest
from peers import model_flops_per_token, predict_sync_volume

from megatron_rl.planning.predict.batch import StepBatch, attended_context, response_lengths
from megatron_rl.planning.predict.generate import (
    RolloutLayout,
    fraction_of_experts_read,
    generate_seconds,
    replica_seconds,
)
from megatron_rl.planning.predict.learn import TrainChoice, peak_training_memory
from megatron_rl.planning.predict.placement import (
    MIN_GAIN,
    ROLES,
    SAMPLING_SCHEDULES,
    PlacementProblem,
    compositions,
    search_placements,
    search_simplest_placements,
)
from megatron_rl.planning.predict.search import training_layouts
from megatron_rl.shapes.hardware import Cluster, Machine, load_constants
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.memory import (
    LayerImplementation,
    activation_bytes,
    count_microbatches_in_flight,
    saved_activation_bytes,
)
from megatron_rl.shapes.published import load_shape

CONSTANTS = load_constants()
BATCH = StepBatch(128, 8, 2, 512.0, response_lengths(1024.0, 4096.0, "variable"), 4608.0)


def problem(model: str, gpus: int, gpu: str = "h100", algorithm: str = "grpo") -> PlacementProblem:
    shape = load_shape(model)
    models = {role: shape for role in ROLES[algorithm]}
    machine = Machine(CONSTANTS.cluster(gpu, gpus), CONSTANTS)
    return PlacementProblem(
        models, algorithm, BATCH, machine, context_parallel=True, shared_stage_split=False
    )


def cut(data: int = 1, **sizes: int) -> ParallelLayout:
    """Return a layout of ``data`` copies of a model cut by ``sizes``."""
    ranks = data * sizes.get("tensor", 1) * sizes.get("pipeline", 1)
    layout = ParallelLayout(tuple(range(ranks)), sequence_parallel=sizes.get("tensor", 1) > 1)
    return replace(layout, **sizes)


def in_campaign(*values: object) -> Any:
    """Return a parameter of another size of a search that the suite has."""
    return pytest.param(*values, marks=pytest.mark.campaign)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-3.1-8b", in_campaign("qwen3-30b-a3b"), in_campaign("qwen3-32b")])
def test_more_gpus_are_never_slower_at_the_optimum(model: str) -> None:
    totals = [search_placements(problem(model, gpus)).plans[0].step.total for gpus in (16, 64, 256)]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", in_campaign("ppo")])
def test_more_memory_is_never_worse(algorithm: str) -> None:
    base = problem("qwen3-32b", 32, algorithm=algorithm)
    totals = []
    for factor in (1.0, 1.1, 1.25, 1.5, 2.0, 4.0):
        gpu = replace(base.machine.gpu, memory=base.machine.gpu.memory * factor)
        cluster = Cluster(gpu, 32, 8, base.machine.cluster.network)
        larger = replace(base, machine=replace(base.machine, cluster=cluster))
        totals.append(search_placements(larger).plans[0].step.total)
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", ["llama-3-70b", "deepseek-v3"])
def test_activation_memory_is_linear_in_tokens(model: str, recompute: str) -> None:
    layout = cut(tensor=2, pipeline=4, data=2, expert=2 if model == "deepseek-v3" else 1)
    shape = load_shape(model)
    one, two, four = (
        activation_bytes(shape, layout, range(15), tokens, 4, LayerImplementation(recompute=recompute))
        for tokens in (1000, 2000, 4000)
    )
    assert two == pytest.approx(2 * one) and four == pytest.approx(4 * one)


def test_plain_gpt_activations_equal_the_published_formula() -> None:
    shape = load_shape("gpt-177b-megatron")
    plain = shape.block(0)
    unsharded = saved_activation_bytes(shape, plain, 1, 1, 1, "none")
    # Korthikanti et al. 2022: 34 h without scores, of which 2 h are dropout masks that are not kept here.
    assert unsharded == pytest.approx(32 * shape.hidden)
    assert saved_activation_bytes(shape, plain, 8, 1, 8, "none") == pytest.approx(unsharded / 8)
    assert saved_activation_bytes(shape, plain, 8, 1, 1, "none") == pytest.approx((8 + 24 / 8) * shape.hidden)
    assert saved_activation_bytes(shape, plain, 1, 1, 1, "full") == 2 * shape.hidden


def test_micro_batches_in_flight() -> None:
    assert [count_microbatches_in_flight(cut(pipeline=4), stage, 100) for stage in range(4)] == [4, 3, 2, 1]
    assert count_microbatches_in_flight(cut(pipeline=4), 0, 1) == 1
    interleaved = cut(pipeline=4, virtual_pipeline=4)
    # Narayanan et al. 2021: interleaving holds 1 + (p - 1) / (p v) times as much on the first stage.
    assert count_microbatches_in_flight(interleaved, 0, 100) == pytest.approx(4 * (1 + 3 / 16))


def test_expert_optimizer_is_not_sharded_when_experts_have_one_copy() -> None:
    shape = load_shape("qwen3-30b-a3b")
    sizes = []
    for expert in (8, 16, 32):
        layout = cut(data=32, expert=expert)
        memory = peak_training_memory(TrainChoice(shape, layout), 4096, 1)
        sizes.append(memory.fullest.optimizer)
    assert sizes[0] == pytest.approx(sizes[1]) == pytest.approx(sizes[2])


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [*map(in_campaign, ("a100", "h100", "h20")), "gb200"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_plans_fit_their_own_memory_check(gpu: str, algorithm: str) -> None:
    asked = problem("qwen3-32b", 64, gpu, algorithm)
    for plan in search_placements(asked).plans:
        limit, gpu = asked.machine.usable_memory, asked.machine.gpu
        for group in plan.groups:
            memory = [entry.memory for entry in group.plans.values()]
            working = max(held.total - held.states for held in memory)
            assert working + sum(held.states for held in memory) <= limit, plan.name
            if group.rollout is not None:
                engine = group.rollout.layout.memory_fraction * gpu.memory
                assert engine + group.resident_bytes <= limit, plan.name
        assert plan.gpus <= asked.gpus
        for group in plan.groups:
            for entry in group.plans.values():
                assert entry.choice.layout.size == group.gpus


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize(
    ("model", "gpus"), [in_campaign("qwen2.5-7b", 8), ("qwen2.5-7b", 16), in_campaign("qwen3-32b", 32)]
)
def test_of_nearly_equal_plans_the_simplest_is_taken(model: str, gpus: int, algorithm: str) -> None:
    searched = replace(problem(model, gpus, algorithm=algorithm), shared_stage_split=True)
    fastest = {plan.name: plan for plan in search_placements(searched).plans}
    simple = search_simplest_placements(searched).plans
    assert {plan.name for plan in simple} == set(fastest)
    assert [plan.step.total for plan in simple] == sorted(plan.step.total for plan in simple)

    for plan in simple:
        assert plan.step.total <= (1.0 + MIN_GAIN) * fastest[plan.name].step.total
        assert plan.largest_pipeline <= fastest[plan.name].largest_pipeline or plan.reasons
        # Deep pipelines and groups that share nodes give their reasons, and nothing else does.
        reasons = " ".join(plan.reasons)
        assert (f"{plan.largest_pipeline} pipeline stages: " in reasons) == (plan.largest_pipeline > 1)
        sizes = [*plan.gpus_per_group, *([plan.rollout_gpus] if plan.rollout_gpus else [])]
        shares_nodes = gpus > 8 and any(size % 8 and 8 % size for size in sizes)
        assert not shares_nodes or "share nodes" in reasons


@pytest.mark.slow
def test_a_small_model_on_two_nodes_has_no_deep_pipeline_and_no_group_across_a_node() -> None:
    batch = StepBatch(256, 8, 1, 1024.0, response_lengths(2731.0, 8192.0, "variable"), 9216.0)
    for algorithm in ROLES:
        asked = replace(problem("qwen2.5-7b", 16, algorithm=algorithm), batch=batch, shared_stage_split=True)
        first, *_ = search_simplest_placements(asked).plans
        assert first.largest_pipeline <= 2 and not any(size % 8 for size in first.gpus_per_group)
        split = next(plan for plan in search_simplest_placements(asked).plans if plan.rollout_gpus)
        is_aligned = (split.gpus_per_group, split.rollout_gpus) == ([8], 8)
        assert is_aligned or any("whole nodes" in reason for reason in split.reasons)
        assert is_aligned or algorithm == "ppo", "training four models needs more than a node"


@pytest.mark.slow
def test_every_placement_is_searched() -> None:
    names = {plan.name for plan in search_placements(problem("llama-3.1-8b", 32, algorithm="ppo")).plans}
    assert {
        "colocated",
        "split",
        "mixed: critic and reward on other GPUs",
        "mixed: every role on its own GPUs",
    } <= names
    ahead, always = (
        next(plan for plan in search_placements(problem("llama-3.1-8b", 32), way).plans if plan.name == way)
        for way in SAMPLING_SCHEDULES[1:]
    )
    assert ahead.step.total < sum(ahead.step.seconds.values())
    assert always.step.total < ahead.step.total, "nobody waits for the longest response"


def test_an_open_order_saves_the_wait_for_the_longest_and_computes_caches_anew() -> None:
    asked = problem("llama-3.1-8b", 32)
    rollout = RolloutLayout(tensor=1, expert=1, replicas=16)
    for kind, least, most in (("fixed", 1.0, 1.2), ("variable", 0.4, 0.6)):
        batch = replace(asked.batch, lengths=response_lengths(2000.0, 8192.0, kind))
        closed = generate_seconds(asked.models["actor"], rollout, batch, asked.machine)
        batch = replace(batch, oversample=0.0)
        assert least < generate_seconds(asked.models["actor"], rollout, batch, asked.machine) / closed < most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpus", "algorithm", "most"),
    [
        in_campaign("llama-3-70b", 512, "grpo", 40_000),
        in_campaign("llama-3-70b", 512, "ppo", 40_000),
        in_campaign("deepseek-v3", 1024, "grpo", 40_000),
        ("deepseek-v3", 1024, "ppo", 40_000),
    ],
)
def test_search_evaluates_a_bounded_number_of_candidates(
    model: str, gpus: int, algorithm: str, most: int
) -> None:
    result = search_placements(problem(model, gpus, algorithm=algorithm))
    assert result.plans
    assert 100 < result.evaluated < most


def test_generation_runs_to_the_longest_response() -> None:
    shape, rollout = load_shape("llama-3.1-8b"), RolloutLayout(memory_fraction=0.8)
    arguments = (shape, rollout, Machine(CONSTANTS.cluster("h100", 1), CONSTANTS), 64, 256.0)
    at_mean = replica_seconds(*arguments, response_lengths(800.0, 800.0, "fixed"))
    to_end = replica_seconds(*arguments, response_lengths(800.0, 4000.0, "variable"))
    assert to_end > 2.5 * at_mean


def test_uneven_loads_leave_experts_unread() -> None:
    for hits in (0.1, 1.0, 8.0, 100.0):
        read = [fraction_of_experts_read(hits, spread) for spread in (0.0, 0.3, 1.0, 2.0)]
        assert read == sorted(read, reverse=True) and 0 < read[-1] < read[0] <= 1.0
    assert fraction_of_experts_read(1e-6, 1.0) == pytest.approx(1e-6, rel=1e-3)
    assert fraction_of_experts_read(1e9, 1.0) == pytest.approx(1.0)
    assert fraction_of_experts_read(8.0, 1e-4) == pytest.approx(fraction_of_experts_read(8.0, 0.0), rel=1e-3)


@pytest.mark.slow
def test_compute_poor_gpu_trains_slower_and_decodes_as_fast() -> None:
    plans = {
        gpu: search_placements(problem("qwen3-32b", 64, gpu)).plans[0].step.seconds for gpu in ("h100", "h20")
    }
    assert plans["h20"]["learn"] > 3 * plans["h100"]["learn"]
    assert plans["h20"]["generate"] < 1.3 * plans["h100"]["generate"]


@pytest.mark.parametrize(("mean", "longest"), [(795.0, 3876.0), (3283.0, 3876.0), (20.0, 40.0)])
def test_length_distribution_has_its_mean(mean: float, longest: float) -> None:
    lengths = response_lengths(mean, longest, "variable")
    steps = 40_000
    integral = (
        sum(lengths.fraction_longer((i + 0.5) * longest / steps) for i in range(steps)) * longest / steps
    )
    assert integral == pytest.approx(mean, rel=1e-3)
    assert lengths.fraction_longer(longest) == 0.0
    assert attended_context(100.0, lengths) > (100.0 + mean) / 2


def test_sync_volume_equals_hybridflow_table_2() -> None:
    shape = load_shape("llama-2-7b")
    layout, rollout = cut(tensor=8, data=16), RolloutLayout(tensor=2, replicas=64)
    machine = Machine(CONSTANTS.cluster("a100", 128), CONSTANTS)
    size = 2.0 * shape.parameters
    strided = predict_sync_volume(shape, layout, rollout, "strided_reshard", machine)
    assert (strided.received, strided.peak, strided.redundant) == (6 / 16 * size, size / 2, 0.0)
    gathered = predict_sync_volume(shape, layout, rollout, "gather_and_load", machine)
    assert (gathered.received, gathered.peak, gathered.redundant) == (7 / 8 * size, size, size / 8)


def test_flops_convention_equals_narayanan_equation_3() -> None:
    shape, s, h, layers, v = load_shape("gpt-76b-narayanan"), 2048, 10240, 60, 51200
    published = 96 * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h)) / s
    assert model_flops_per_token(shape, s, "full", True) == pytest.approx(published, rel=2e-3)


def test_layouts_multiply_out() -> None:
    layouts = list(training_layouts(load_shape("qwen3-235b-a22b"), 96, 8, 16384, 512))
    assert layouts
    for layout in layouts:
        assert layout.size == 96
        assert (layout.tensor * layout.context * layout.data) % layout.expert == 0
        assert load_shape("qwen3-235b-a22b").kv_heads % layout.tensor == 0
    assert {sum(sizes) for sizes in compositions(6, 3)} == {6}
    assert len(list(compositions(6, 3))) == 10
