"""Scenarios: the published points inside tolerance, and predictions that cannot see their answers."""

import copy
import json
from math import log
from pathlib import Path
from statistics import median

import pytest
from grade import evaluate, main, read_scenarios
from predict import PREDICTORS, predict
from scenario import KINDS, Scenario, without_measurements
from tolerance import compare_scenario_values, is_inside, ratio

from megatron_rl.errors import UserError
from megatron_rl.planning.predict.learn import routing_imbalance
from megatron_rl.shapes.hardware import load_constants
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.published import load_shape

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks/planner"
NUMBERS = " ".join((FOLDER.parent / "README.md").read_text().split())
POINTS = json.loads((FOLDER / "points.json").read_text())


@pytest.fixture(scope="module")
def outcomes():
    return {outcome.id: outcome for outcome in evaluate(POINTS, load_constants())}


@pytest.mark.parametrize("name", [point["id"] for point in POINTS])
def test_published_point_is_inside_its_tolerance(outcomes, name: str) -> None:
    outcome = outcomes[name]
    assert outcome.error is None
    assert outcome.inside_tolerance, (outcome.predicted, outcome.measured)
    assert set(outcome.measured) <= set(outcome.predicted)


@pytest.mark.slow
def test_prediction_does_not_depend_on_what_was_measured(outcomes) -> None:
    changed = copy.deepcopy(POINTS)
    for point in changed:
        point["measured"] = {key: 12345.0 for key in point["measured"]}
        point["tolerance"] = {}
        point["notes"] = point["source"] = "other"
        point["id"] = "other " + point["id"]
    for outcome in evaluate(changed, load_constants()):
        assert outcome.predicted == outcomes[outcome.id.removeprefix("other ")].predicted


def test_a_scenario_holds_no_answers() -> None:
    raw = without_measurements(POINTS[0])
    assert not {"measured", "tolerance", "compare"} & set(raw)
    raw["layout"]["tensor"] = 99
    assert POINTS[0]["layout"]["tensor"] == 8  # a copy: nothing leads back to the file's entry


@pytest.mark.slow
def test_scenarios_without_measurements_are_predicted() -> None:
    bare = [without_measurements(point) for point in POINTS]
    for outcome in evaluate(bare, load_constants()):
        assert outcome.error is None and outcome.predicted and outcome.inside_tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_works_from_the_least_fields(kind: str) -> None:
    raw = {
        "id": "least",
        "kind": kind,
        "model": "llama-3.1-8b",
        "cluster": {"gpu": "H100-80GB", "num_gpus": 16},
    }
    if kind == "placement_choice":
        raw["candidates"] = {"together": [["actor", "reference"]], "apart": [["actor"], ["reference"]]}
    outcome = evaluate([raw], load_constants())[0]
    assert outcome.error is None
    assert all(value is not None for value in outcome.predicted.values()), outcome.predicted
    json.dumps(outcome.record())


def test_errors_are_recorded_and_name_the_scenario() -> None:
    good = {
        "id": "good",
        "kind": "weight_sync",
        "model": "llama-3.1-8b",
        "cluster": {"gpu": "h100", "num_gpus": 8},
    }
    cases = [
        good | {"id": "gpu", "cluster": {"gpu": "H1000", "num_gpus": 8}},
        good | {"id": "kind", "kind": "weight_synk"},
        good | {"id": "model", "model": "llama-9"},
        good | {"id": "size", "model": "deepseek-v3", "kind": "rl_step"},
        good,
    ]
    outcomes = {outcome.id: outcome for outcome in evaluate(cases, load_constants())}
    assert "`gpu` is" in outcomes["gpu"].error and "H100-80GB" in outcomes["gpu"].error
    assert "did you mean weight_sync" in outcomes["kind"].error
    assert "unknown model" in outcomes["model"].error
    assert "does not fit" in outcomes["size"].error
    assert outcomes["good"].error is None and not outcomes["size"].inside_tolerance


def test_inline_model_and_absent_layout() -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    raw = {
        "id": "inline",
        "kind": "rl_step",
        "model": config,
        "cluster": {"gpu": "H200-141GB", "num_gpus": 16},
        "batch": {"prompts": 64, "samples_per_prompt": 8, "response_tokens_max": 4096},
        "algorithm": "ppo",
    }
    predicted = predict(Scenario(raw, load_constants()))
    phases = ("seconds_train", "seconds_generate", "seconds_log_probs", "seconds_weight_sync")
    assert all(predicted[name] > 0 for name in phases)
    assert predicted["seconds_total"] >= max(predicted[name] for name in phases)


@pytest.mark.parametrize(
    ("predicted", "measured", "tolerance", "expected"),
    [
        (1.2, 1.0, 0.25, True),
        (1.3, 1.0, 0.25, False),
        (0.7, [1.0, 2.0], 0.25, False),
        (2.4, [1.0, 2.0], 0.25, True),
        (2.0, 1.0, {"factor": 2}, True),
        (0.49, 1.0, {"factor": 2}, False),
        (1.0005, 1.0, {"exact": True}, True),
        (1.002, 1.0, {"exact": True}, False),
        (True, True, {"exact": True}, True),
        (False, True, {"exact": True}, False),
        (3.0, 0.0, {"at_least": 2}, True),
        (1.0, 0.0, {"at_least": 2}, False),
        (1.0, 9.0, {"at_most": 2}, True),
        (99, 1, {"report": True}, True),
        (None, 1, 0.5, False),
        ({"1": 2.0, "2": 1.0}, {"1": 2.1, "2": 1.0}, 0.1, True),
        ({"1": 2.0}, {"1": 3.0}, 0.1, False),
    ],
)
def test_tolerance_forms(predicted, measured, tolerance, expected: bool) -> None:
    assert is_inside(predicted, measured, tolerance) is expected


def test_ordering_and_relations() -> None:
    order = {"ordering": {"within_steps": 1}}
    assert is_inside("b", "a", order, ["a", "b", "c"])
    assert not is_inside("c", "a", order, ["a", "b", "c"])
    assert is_inside("a", "a", {"ordering": {"within_steps": 0}}, ["a"])
    assert compare_scenario_values(3.0, 2.0, {"ratio": [1.4, 1.6]}) == (1.5, True)
    assert compare_scenario_values(3.0, 2.0, {"difference": [2, 3]}) == (1.0, False)
    assert ratio(3.0, [1.0, 2.0]) == 1.5 and ratio(1.5, [1.0, 2.0]) == 1.0 and ratio("a", "b") is None


def test_scenarios_are_compared_with_one_another() -> None:
    first, second = copy.deepcopy(POINTS[3]), copy.deepcopy(POINTS[4])
    first["compare"] = [{"key": "milliseconds_per_token", "other": second["id"], "ratio": [1.2, 2.0]}]
    second["compare"] = {"key": "milliseconds_per_token", "other": first["id"], "difference": [0, 1]}
    graded = evaluate([first, second], load_constants())
    assert graded[0].inside_tolerance and not graded[1].inside_tolerance


def test_reading_a_scenario_file(tmp_path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(POINTS[0]))
    assert read_scenarios(str(path))[0]["id"] == POINTS[0]["id"]
    with pytest.raises(UserError, match="no scenario file"):
        read_scenarios("nowhere.json")


def test_every_kind_has_a_prediction_and_its_line_in_the_readme() -> None:
    assert set(PREDICTORS) == set(KINDS)
    lines = (FOLDER / "README.md").read_text().splitlines()
    assert all(any(line.startswith(f"| `{kind}` |") for line in lines) for kind in KINDS)


@pytest.mark.slow
def test_the_command_grades_the_published_points(tmp_path, capsys) -> None:
    out = tmp_path / "out.json"
    assert main(["--json", str(out)]) == 0
    records = json.loads(out.read_text())
    assert len(records) == 21
    assert {"id", "kind", "predicted", "measured", "ratio", "inside_tolerance"} <= set(records[0])
    assert all(record["inside_tolerance"] is True for record in records)
    assert "21 of 21 scenarios inside tolerance" in capsys.readouterr().out


def test_a_scenario_outside_its_tolerance_gives_exit_code_1(tmp_path, capsys) -> None:
    point = {**POINTS[0], "measured": {"tflops_per_gpu": 900.0}}
    path = tmp_path / "bad.json"
    path.write_text(json.dumps([point]))
    assert main([str(path)]) == 1
    assert main(["nowhere.json"]) == 2
    assert "no scenario file" in capsys.readouterr().err


def test_published_points_outside_the_calibration_file() -> None:
    """Other models, GPUs, layouts and frameworks: most predictions hold, none has a constant of its own."""
    more = read_scenarios(str(FOLDER / "more_points.json"))
    graded = evaluate(more, load_constants())
    assert all(outcome.error is None for outcome in graded)
    ratios = [abs(log(value)) for outcome in graded for value in outcome.ratio.values() if value]
    assert median(ratios) < log(1.15)
    inside_tolerance = sum(outcome.inside_tolerance for outcome in graded)
    assert f"within 25 % of {inside_tolerance} of {len(graded)} further ones" in NUMBERS


def test_uneven_routing_slows_wide_expert_parallelism_only() -> None:
    dense, moe = load_shape("llama-3.1-8b"), load_shape("qwen3-30b-a3b")

    def spread_over(ranks: int) -> ParallelLayout:
        return ParallelLayout(tuple(range(ranks)), expert=ranks)

    assert routing_imbalance(dense, spread_over(1), 1.0) == routing_imbalance(moe, spread_over(1), 1.0) == 1.0
    loads = [routing_imbalance(moe, spread_over(size), 1.0) for size in (2, 8, 32, 128)]
    assert loads == sorted(loads) and loads[0] > 1.0
    assert routing_imbalance(moe, spread_over(8), 0.0) == 1.0
