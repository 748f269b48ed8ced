"""Health rules: each fires on its own fault and on no other, and a resumed run gives the same warnings."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_rl.config.health import RULE_OF, RULES, VALUE, health_rules
from megatron_rl.config.load import load
from megatron_rl.metrics import read_metrics
from megatron_rl.trainer.health import HealthMonitor, RuleState, select_samples, warning_text

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parent / "quickstart_metrics.jsonl"
"""Metrics of the rules, as configs/quickstart.yaml wrote them in its 60 steps on two cores."""
FAULT = 30
"""First step of a planted fault."""
ABSENT = {
    "kl/ref": 0.02,
    "filtered/empty": 0.01,
    "filtered/function": 0.02,
    "time/idle_learn": 0.2,
    "time/idle_rollout": 0.1,
    "staleness/mean": 1.0,
}
"""Healthy values of the metrics that the recorded run does not have."""

Line = dict[str, float]
Fault = Callable[[Line], Line]


def rules(*overrides: str):
    loaded = load(ROOT / "configs/minimal.yaml", ["mismatch.warn=1e-4", *overrides])
    assert not loaded.errors
    return health_rules(loaded.config)


def lines() -> list[Line]:
    return [ABSENT | line for line in read_metrics(RECORDED)]


def fired(measured: list[Line], *overrides: str) -> dict[str, list[int]]:
    """Return the steps in which each rule fires."""
    monitor = HealthMonitor(rules(*overrides), lambda _: None)
    states: dict[str, RuleState] = {}
    steps: dict[str, list[int]] = {}
    for line in measured:
        for name, value in monitor.update(int(line["step"]), line, states).items():
            assert value in (0.0, 1.0)
            if value:
                steps.setdefault(name.removeprefix("health/"), []).append(int(line["step"]))
    return steps


def test_the_recorded_quickstart_fires_no_rule_and_measures_most() -> None:
    assert fired(list(read_metrics(RECORDED))) == {}
    states: dict[str, RuleState] = {}
    monitor = HealthMonitor(rules(), lambda line: pytest.fail(line))
    for line in read_metrics(RECORDED):
        metrics = monitor.update(int(line["step"]), line, states)
    absent = {"kl", "filtered", "staleness", "idle"}
    assert {*metrics} == {f"health/{name}" for name in RULE_OF if name not in absent}


FAULTS: dict[str, Fault] = {
    "kl": lambda line: {"kl/ref": 0.15},
    "entropy": lambda line: {"policy/entropy": 0.001},
    "clipping": lambda line: {"policy/clip_fraction": 0.4},
    "equal_groups": lambda line: {"group/zero_std_fraction": 1.0},
    "reward_spread": lambda line: {"reward/std": 1e-4},
    "overfitting": lambda line: {
        name: 0.7 * value if name.startswith("eval/") else 1.0
        for name, value in line.items()
        if name.startswith("eval/") or name == "reward/mean"
    },
    "truncation": lambda line: {"response/truncated_fraction": 0.6},
    "length": lambda line: {"response/length": 7.0},
    "filtered": lambda line: {"filtered/empty": 0.3, "filtered/function": 0.3},
    "invalid": lambda line: {"reward/invalid": 0.1},
    "mismatch": lambda line: {"mismatch/abs_diff": 1e-3},
    "staleness": lambda line: {"staleness/mean": 12.0},
    "idle": lambda line: {"time/idle_rollout": 0.7 * line["time/step"]},
    "throughput": lambda line: {"throughput/tokens_per_second": 500.0},
}


@pytest.mark.parametrize("name", RULE_OF)
def test_a_fault_fires_its_rule_and_no_other(name: str) -> None:
    faulty = [
        line | FAULTS[name](line) if line["step"] >= FAULT else line
        for line in lines()
    ]  # fmt: skip
    steps = fired(faulty)
    assert {*steps} == {name}

    # The overfitting is seen at evaluations, of which every tenth step has one.
    first = FAULT + RULE_OF[name].steps - 1
    if name == "overfitting":
        first = FAULT + 10 * (RULE_OF[name].steps - 1)
    assert steps[name][0] == first
    assert fired(faulty, f"health.rules.{name}=off") == {}


@pytest.mark.parametrize("name", RULE_OF)
def test_a_short_fault_fires_nothing_and_a_rule_ends_after_as_many_steps(name: str) -> None:
    rule = RULE_OF[name]
    # In steps with an evaluation, which every rule measures.
    evaluated = [line for line in lines() if "eval/held_out/accuracy" in line]
    measured = [line | {"step": step} for step, line in enumerate([*evaluated[1:]] * 12, start=1)]
    bad = {step for step in range(40, 40 + rule.steps)}

    def with_fault(steps: set[int]) -> list[Line]:
        return [line | FAULTS[name](line) if line["step"] in steps else line for line in measured]

    begins = 40 + rule.steps - 1
    assert fired(with_fault(bad))[name] == list(range(begins, begins + rule.steps))
    assert name not in fired(with_fault(bad - {40}))


def test_warnings_name_the_rule_its_values_and_what_to_change_once() -> None:
    said: list[str] = []
    monitor = HealthMonitor(rules("health.rules.kl.steps=2"), said.append)
    states: dict[str, RuleState] = {}
    for step, value in enumerate([0.05, 0.2, 0.3, 0.4, 0.06, 0.05], start=1):
        monitor.update(step, {"kl/ref": value}, states)
    begin, end = said
    assert begin.startswith("step 3: warning: health rule kl: the policy moves far away from the reference: ")
    assert "kl/ref 0.2, 0.3 at steps 2-3, where 0.1 or less is healthy" in begin
    assert "change actor.optimizer.learning_rate, algorithm.kl.coef (docs/health.md)" in begin
    assert end == "step 6: health rule kl ended after 3 steps: 0.05"
    assert monitor.error is None


def test_a_rule_that_stops_has_an_error_of_four_parts_and_counts_anew_afterwards() -> None:
    monitor = HealthMonitor(rules("health.act=stop", "health.rules.invalid.act=warn"), lambda _: None)
    states: dict[str, RuleState] = {}
    bad = {"reward/invalid": 1.0, "policy/clip_fraction": 0.5}
    fires = [monitor.update(step, bad, states) for step in range(1, 4)]
    assert [line["health/clipping"] for line in fires] == [0, 0, 1]
    assert fires[-1]["health/invalid"] == 1, "it warns alone"
    error = monitor.error
    assert error is not None and error.where == "health.rules.clipping (step 3)"
    assert "0.5, 0.5, 0.5 at steps 1-3" in str(error.got) and "0.3 or less" in str(error.expected)
    assert "batch.optimizer_steps" in str(error.fix) and "health.rules.clipping=off" in str(error.fix)

    resumed = HealthMonitor(rules("health.act=stop"), lambda _: None)
    assert [resumed.update(step, bad, states)["health/clipping"] for step in range(4, 7)] == [0, 0, 1]


@pytest.mark.parametrize("cut", [1, 9, 29, 31, 33, 45])
def test_a_resumed_run_says_what_an_uninterrupted_one_says(cut: int) -> None:
    measured = lines()
    for fault in FAULTS.values():
        measured = [line | fault(line) if FAULT <= line["step"] < 45 else line for line in measured]
    whole: list[str] = []
    parted: list[str] = []
    states: dict[str, RuleState] = {}
    monitor = HealthMonitor(rules(), whole.append)
    for line in measured:
        monitor.update(int(line["step"]), line, states)
    assert len(whole) >= len(RULES)

    states = {}
    monitor = HealthMonitor(rules(), parted.append)
    for line in measured:
        monitor.update(int(line["step"]), line, states)
        if line["step"] == cut:
            # What a checkpoint contains.
            states = {name: RuleState(**asdict(state)) for name, state in states.items()}
            monitor = HealthMonitor(rules(), parted.append)
    assert parted == whole


def test_a_rule_of_the_users_own_and_changed_bands() -> None:
    own = ("health.rules.low={metric: reward/mean, below: 0.7, steps: 1}", "health.rules.length.above=5")
    steps = fired(lines(), *own)
    assert steps == {"low": [1]}
    (low,) = [rule for rule in rules(*own) if rule.name == "low"]
    assert low.metrics == ("reward/mean",) and low.band_text() == "0.7 or more"
    changed = {rule.name: rule for rule in rules(*own)}["length"]
    assert (changed.above, changed.below) == (5.0, RULE_OF["length"].below)


def test_a_metric_that_no_step_has_is_named_once() -> None:
    said: list[str] = []
    own = "health.rules.low={metric: reward/meen, below: 0.7}"
    later = "health.rules.late={metric: eval/held_out/reward, below: 0.7}"
    monitor = HealthMonitor(rules(own, later), said.append)
    states: dict[str, RuleState] = {}
    for step in (0, 1, 2):
        monitor.update(step, {"reward/mean": 0.5, "reward/std": 0.5}, states)
    assert said == [
        "step 1: warning: health rule low: no metric reward/meen so far; did you mean reward/mean?"
    ]


def test_the_mismatch_has_the_threshold_of_its_setting_and_skips_old_tokens() -> None:
    assert {rule.name: rule for rule in rules("mismatch.warn=0.2")}["mismatch"].above == 0.2
    different = [{"step": step, "mismatch/abs_diff": 1.0, "staleness/max": 1.0} for step in range(1, 9)]
    assert fired(different) == {}
    fresh = [line | {"staleness/max": 0.0} for line in different]
    assert fired(fresh) == {"mismatch": list(range(1, 9))}


def test_values_that_are_no_numbers_are_outside_and_no_reference() -> None:
    measured = [{"step": step, "response/length": 4.0, "kl/ref": 0.0} for step in range(1, 40)]
    for line in measured[5:12]:
        line |= {"response/length": math.nan, "kl/ref": math.nan}
    assert fired(measured)["kl"][0] == 8
    assert "length" not in fired(measured), "seven values are missing of the reference"
    # The median of nothing but zeros is no reference.
    assert fired([{"step": step, "response/length": 0.0} for step in range(1, 40)]) == {}


def test_every_rule_names_settings_and_what_shows_it() -> None:
    for rule in RULES:
        assert rule.metrics and rule.usual and rule.causes and rule.change and rule.meaning
        assert rule.name == "mismatch" or rule.above is not None or rule.below is not None
        assert replace(rule, above=rule.above or 1.0).band_text()


def test_the_samples_of_a_rule_show_its_fault() -> None:
    fields = ("prompt", "response", "reward", "length", "finish", "failure")
    values = [
        ("a", "1", 1.0, 3, "stop", None),
        ("a", "2", 1.0, 9, "length", None),
        ("b", "3", 0.0, 4, "stop", None),
        ("b", "4", 0.5, 5, "stop", "filtered: empty"),
        ("c", "5", None, 6, "stop", "timeout"),
    ]
    samples = [dict(zip(fields, row, strict=True)) for row in values]
    shown = {
        rule.name: "".join(sample["response"] for sample in select_samples(rule, samples, 3))
        for rule in RULES
    }  # fmt: skip
    assert shown["kl"] == "214" and shown["overfitting"] == "341" and shown["length"] == "254"
    assert shown["truncation"] == "2" and shown["equal_groups"] == shown["entropy"] == "12"
    assert shown["invalid"] == "5" and shown["filtered"] == "4"
    assert shown["throughput"] == shown["idle"] == ""


def tables() -> list[str]:
    """Return the rows of the two tables in docs/health.md: what each rule measures, and what to do."""
    measured = []
    advice = []
    for rule in RULES:
        metrics = ", ".join(f"`{metric}`" for metric in rule.metrics)
        if rule.measure != VALUE:
            metrics += f": {rule.measure}"
        limits = []
        if rule.above is not None:
            limits.append(f"above `{rule.above:g}`")
        if rule.below is not None:
            limits.append(f"below `{rule.below:g}`")
        fires = " or ".join(limits) or "above `mismatch.warn`"
        usual = f"`{rule.usual}`" if rule.usual[0].isdigit() else rule.usual
        measured.append(f"| `{rule.name}` | {rule.meaning} | {metrics} | {usual} | {fires} | {rule.steps} |")
        advice.append(f"| `{rule.name}` | {rule.causes} | {rule.samples} | {rule.change} |")
    return [*measured, *advice]


def test_the_page_shows_a_warning_as_a_run_prints_it() -> None:
    measurements = [(1, 0.8), (2, 0.8), (3, 0.828), (4, 0.832), (5, 0.863)]
    line = f"step 5: warning: {warning_text(RULE_OF['truncation'], measurements)}"
    assert line in " ".join((ROOT / "docs/health.md").read_text(encoding="utf-8").split())


def test_the_page_has_the_rules_as_they_are() -> None:
    _, section = (ROOT / "docs/health.md").read_text(encoding="utf-8").split("\n## Rules\n")
    assert [line for line in section.splitlines() if line.startswith("| `")] == tables()


def test_the_settings_of_the_rules_exist() -> None:
    keys = {key for rule in RULES for key in re.findall(r"`([a-z_]+\.[\w.]+)`", rule.change)}
    assert len(keys) > 20
    for key in keys:
        errors = load(ROOT / "configs/minimal.yaml", [f"{key}=1"]).errors
        assert not any("known" in error.message for error in errors), key
