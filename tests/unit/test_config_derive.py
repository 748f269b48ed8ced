"""Derived values and batch arithmetic: fixed cases, and properties of random configurations."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from config_workspace import write_workspace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.check.configuration import CheckReport, check_config
from megatron_rl.cli.check import report_json
from megatron_rl.cli.check_text import report_text
from megatron_rl.config.budget import PHASES
from megatron_rl.config.field_types import field_hints, section_class, value_paths
from megatron_rl.config.load import flatten, load, load_text
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.quickstart import SIZES
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.shapes.layout import ParallelLayout, default_stage_layers
from megatron_rl.shapes.memory import stage_parameters
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.published import read_trainable

pytestmark = pytest.mark.usefixtures("functions_load_once")

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ModelShape("Qwen2ForCausalLM", 128, 8, 8, 4, 32, 384, 21, 1 << 20, qkv_bias=True)


@pytest.fixture(scope="module", autouse=True)
def inside() -> Iterator[None]:
    """Run in a workspace; a context manager, since hypothesis runs many examples per test."""
    patch = pytest.MonkeyPatch()
    with tempfile.TemporaryDirectory() as root:
        write_workspace(Path(root))
        patch.chdir(root)
        yield
        patch.undo()


def check(*overrides: str, world: int | None = None) -> CheckReport:
    return check_config(load("config.yaml", overrides), world)


def batch_holds(report: CheckReport) -> None:
    """Assert that the numbers of a batch plan multiply out."""
    batch, config, layouts = report.batch, report.config, report.layouts
    assert batch is not None and layouts is not None
    actor, rollout = layouts["actor"], layouts["rollout"]
    assert batch.rows == batch.prompts * batch.samples
    low, high = batch.prompts_per_minibatch
    assert low * batch.optimizer_steps <= batch.prompts <= high * batch.optimizer_steps and high - low <= 1
    assert batch.rows_per_minibatch == (low * batch.samples, high * batch.samples)
    assert batch.actor_data * actor.tensor * actor.pipeline * actor.context == len(actor.ranks)
    assert batch.rows_per_actor_rank[0] * batch.actor_data <= batch.rows_per_minibatch[0]
    assert batch.rows_per_actor_rank[1] * batch.actor_data >= batch.rows_per_minibatch[1]
    assert batch.replicas * rollout.tensor == len(rollout.ranks)
    flight = batch.prompts_in_flight * batch.samples
    assert batch.rows_per_replica[0] * batch.replicas <= flight <= batch.rows_per_replica[1] * batch.replicas
    assert batch.longest_row >= config.data.max_prompt_tokens + config.rollout.max_response_tokens
    assert batch.tokens_per_microbatch >= batch.rows_per_microbatch * batch.longest_row
    assert batch.microbatches * batch.rows_per_microbatch >= batch.rows_per_actor_rank[1]
    assert config.batch.tokens_per_microbatch == batch.tokens_per_microbatch


def test_the_batch_in_numbers() -> None:
    batch = check("batch.optimizer_steps=4", "batch.epochs=2").batch
    assert batch is not None
    assert (batch.rows, batch.rows_per_minibatch, batch.updates) == (64, (16, 16), 8)
    assert (batch.actor_data, batch.replicas, batch.rows_per_replica) == (1, 2, (32, 32))
    assert (batch.longest_row, batch.tokens_per_microbatch, batch.microbatches) == (16, 32, 8)
    more = check("rollout.oversample=0.5").batch
    assert more is not None
    assert (more.rows, more.prompts_in_flight, more.rows_per_replica) == (64, 24, (48, 48))


def test_only_the_closed_order_has_rounds() -> None:
    ahead = ("placement=standalone", "actor.layout={tensor: 2}", "asynchrony.steps_ahead=1")
    carried = ("rollout.partial=true", "rollout.oversample=1", "rollout.round_tokens=100000")
    (error,) = check(*ahead, *carried).errors
    assert "rollout.round_tokens" in str(error.where)
    assert not check(*ahead, *carried, "rollout.order=open").errors


def test_every_value_has_an_origin_and_derived_ones_a_reason() -> None:
    report = check("sft={data: sft.jsonl, steps: 2}", "algorithm.kl=loss")
    values = flatten(report.config)
    assert report.origins.keys() == values.keys()
    derived = {path: origin.detail for path, origin in report.origins.items() if origin.kind == "derived"}
    assert all(derived.values())
    expected = {
        "actor.layout.ranks", "actor.layout.sequence_parallel", "rollout.ranks", "mismatch.warn",
        "mismatch.stop", "batch.tokens_per_microbatch", "model.attention",
        "sft.optimizer.minimum_learning_rate",
        "actor.optimizer.minimum_learning_rate", "reference.path", "reference.layout.tensor",
        "data.chat_template", "actor.layout.expert_tensor",
    }  # fmt: skip
    assert expected <= derived.keys()
    assert values["reference.path"] == f"{values['run_dir']}/stages/sft/hf", "what the learning starts from"
    assert check("algorithm.kl=loss").config.reference.path == "model"
    assert values["actor.layout.ranks"] == (0, 1, 2, 3)


@pytest.mark.parametrize(("dtype", "warn", "stop"), [("float32", 1e-4, 1e-2), ("bfloat16", 0.1, 0.5)])
def test_mismatch_thresholds_follow_the_dtype(dtype: str, warn: float, stop: float) -> None:
    mismatch = check(f"model.dtype={dtype}").config.mismatch
    assert (mismatch.warn, mismatch.stop) == (warn, stop)


def test_a_checked_configuration_checks_again_to_itself() -> None:
    report = check()
    assert check_config(report.config, 4).config == report.config


PUBLISHED = [
    ("configs/models/Qwen2.5-7B-Instruct", 7_615_616_512),
    ("configs/models/Llama-3.1-70B-Instruct", 70_553_706_496),
]


@pytest.mark.parametrize(("path", "parameters"), PUBLISHED)
def test_parameters_equal_published_totals(path: str, parameters: int) -> None:
    model = read_trainable(ROOT / path / "config.json", [])
    assert model is not None and model.shape.parameters == parameters


def test_the_shipped_shape_is_that_of_the_quickstarts_model() -> None:
    model = read_trainable(ROOT / "configs/models/quickstart-data/model/config.json", [])
    made = SIZES["small"]
    assert model is not None
    shape = model.shape
    assert (shape.hidden, shape.layers, shape.heads) == (made.hidden, made.layers, made.heads)
    assert (shape.kv_heads, shape.mlp_width, shape.vocab) == (made.kv_heads, made.intermediate, 21)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_stages_hold_the_whole_model(tensor: int, pipeline: int, tied: bool) -> None:
    shape = ModelShape("LlamaForCausalLM", 128, 8, 8, 4, 16, 384, 64, 512, tied=tied)
    layout = ParallelLayout(tuple(range(tensor * pipeline)), tensor, pipeline)
    stages = default_stage_layers(shape.layers, pipeline)
    held = [stage_parameters(shape, layout, stages[s], s == 0, s == pipeline - 1) for s in range(pipeline)]
    total = sum(map(sum, held))
    replicated = shape.replicated_parameters + shape.hidden
    copy = shape.vocab * shape.hidden if tied and pipeline > 1 else 0
    assert total * tensor - (tensor - 1) * replicated == shape.parameters + copy


def test_memory_names_every_contributor() -> None:
    report = check("algorithm.kl=loss", "gpu_memory_gib=8")
    worst = report.memory[0]
    names = {item.name for item in worst.items}
    assert {
        "actor weights", "gradients", "optimizer", "activations", "logits chunk", "reference weights",
        "rollout weights", "key-value cache", "sync staging", "sync connections", "runtime",
    } <= names  # fmt: skip
    assert worst.peak == max(worst.phase_peak(phase) for phase in PHASES) > 0


sizes = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 8])
VALID_PARTS = st.fixed_dictionaries(
    {
        "batch.prompts_per_step": st.integers(1, 300),
        "batch.samples_per_prompt": st.integers(1, 16),
        "batch.optimizer_steps": st.integers(1, 8),
        "batch.epochs": st.integers(1, 3),
        "data.max_prompt_tokens": st.integers(1, 200),
        "rollout.max_response_tokens": st.integers(1, 200),
        "actor.layout.tensor": sizes,
        "actor.layout.pipeline": sizes,
        "actor.layout.context": st.sampled_from([1, 1, 1, 2]),
        "actor.layout.virtual_pipeline": st.sampled_from([1, 1, 1, 2]),
        "rollout.tensor": sizes,
        "actor.recompute": st.sampled_from(["none", "selective", "full"]),
        "model.dtype": st.sampled_from(["float32", "bfloat16"]),
        "world_size": st.one_of(st.none(), st.integers(1, 64)),
        "batch.tokens_per_microbatch": st.one_of(st.none(), st.integers(1, 2000)),
    }
)


def as_overrides(values: dict[str, Any]) -> list[str]:
    return [f"{path}={json.dumps(value)}" for path, value in values.items()]


def never_raises(report: CheckReport) -> None:
    """Assert that findings are the user's kind and that both forms of output can be made."""
    for error in (*report.errors, *report.warnings):
        assert isinstance(error, UserError) and error.message and str(error)
    json.dumps(report_json(report))
    assert report_text(report, "config.yaml") and report_text(report, "config.yaml", verbose=True)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(VALID_PARTS)
def test_random_sizes_multiply_out_or_are_refused(values: dict[str, Any]) -> None:
    report = check(*as_overrides(values))
    never_raises(report)
    if not report.errors:
        batch_holds(report)
        sizes = (
            values["actor.layout.tensor"] * values["actor.layout.pipeline"] * values["actor.layout.context"]
        )
        assert report.world_size % sizes == 0
        assert report.batch is not None
        assert report.batch.rows == values["batch.prompts_per_step"] * values["batch.samples_per_prompt"]


numbers = st.one_of(st.integers(-(2**70), 2**70), st.integers(-2, 9), st.floats())
leaves = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=6))
keys = st.text("abc._-", min_size=1, max_size=4)
plain = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=4,
)
SECTIONS = [item for item in field_hints(RunConfig) if section_class(field_hints(RunConfig)[item])]
paths = st.one_of(
    st.sampled_from(value_paths(RunConfig)),
    st.sampled_from(SECTIONS),
    st.text("abcdefgh._", min_size=1, max_size=8),
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(paths, plain), min_size=1, max_size=4), st.one_of(st.none(), st.integers(-3, 70)))
def test_any_value_anywhere_is_accepted_or_refused(changes: list[tuple[str, Any]], world: int | None) -> None:
    overrides = [f"{path}={json.dumps(value)}" for path, value in changes]
    report = check(*overrides, world=world)
    never_raises(report)
    if not report.errors:
        batch_holds(report)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text("abcdef:-{}[],&*!|>'\"%@#\n\t 0123456789.~", max_size=60))
def test_any_text_is_loaded_or_refused(text: str) -> None:
    try:
        report = check_config(load_text(text), 4)
    except UserErrors as errors:
        assert errors.errors
    else:
        never_raises(report)
        assert report.errors
