"""Health rules during a run: each step's metrics against the bands of `config.health`.

The one idea: the rules read metrics that are on the main rank already, and their state is plain values in the
checkpoint, so that a resumed run gives the same warnings as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

from megatron_rl.config import health
from megatron_rl.config.health import HealthRule
from megatron_rl.config.sections.health import STOP
from megatron_rl.errors import UserError, nearest
from megatron_rl.trainer.logging import spans

PREFIX = "health/"
"""Group of the rules' metrics."""
PAGE = "docs/health.md"
"""Page that describes the rules."""


@dataclass
class RuleState:
    """State of one rule between steps: plain values, which checkpoints contain.

    Example: a rule that fires after 3 measurements has, after two of 0.2 and 0.3 outside of its band at steps
    7 and 8, ``firing=False`` and ``changed=[(7, 0.2), (8, 0.3)]``.
    """

    firing: bool = False
    """Whether the rule fires."""
    measured: bool = False
    """Whether the run has had the rule's metrics."""
    begun: int = 0
    """Step after which it began to fire."""
    changed: list[tuple[int, float]] = field(default_factory=list)
    """Step and value of the last consecutive measurements that contradict ``firing``."""
    memory: dict[str, list[float]] = field(default_factory=dict)
    """Earlier values that measures compare with."""


class HealthMonitor:
    """The health rules of a run on the main rank, which has the metrics of all ranks.

    ``say`` prints a line on the console. ``error`` is set when a rule with ``act: stop`` begins to fire.
    """

    def __init__(self, rules: Sequence[HealthRule], say: Callable[[str], None]) -> None:
        self.error: UserError | None = None
        self._rules = rules
        self._say = say
        self._has_looked = False

    def update(
        self,
        step: int,
        values: Mapping[str, float],
        states: MutableMapping[str, RuleState],
    ) -> dict[str, float]:
        """Update ``states`` with a step's metrics, and print the rules that begin or end.

        Returns the metrics ``health/NAME`` of the rules that have measured anything up to this step.
        """
        metrics: dict[str, float] = {}
        for rule in self._rules:
            state = states.setdefault(rule.name, RuleState())
            value = MEASURES[rule.measure](rule, values, state.memory)
            if value is not None:
                state.measured = True
                self._update_rule(step, rule, value, state)
            if state.measured:
                metrics[f"{PREFIX}{rule.name}"] = float(state.firing)

            # Not firing in the checkpoint: a run that resumes after a stop has the rule's steps to recover.
            if rule.act == STOP:
                state.firing = False

        if step > 0 and not self._has_looked:
            self._has_looked = True
            self._warn_of_missing_metrics(step, values, states)
        return metrics

    def _warn_of_missing_metrics(
        self,
        step: int,
        values: Mapping[str, float],
        states: Mapping[str, RuleState],
    ) -> None:
        """Warn of rules of the user's own whose metric the first step of a job does not have."""
        for rule in self._rules:
            # Metrics of evaluation sets come with the first evaluation.
            metric = rule.metrics[0]
            if rule.name in health.RULE_OF or states[rule.name].measured or metric.startswith("eval/"):
                continue
            close = nearest(metric, values)
            hint = f"; did you mean {close}?" if close else ""
            self._say(f"step {step}: warning: health rule {rule.name}: no metric {metric} so far{hint}")

    def _update_rule(
        self,
        step: int,
        rule: HealthRule,
        value: float,
        state: RuleState,
    ) -> None:
        """Count a measurement of a rule; begin or end it after `HealthRule.steps` of them."""
        if rule.is_outside(value) == state.firing:
            state.changed.clear()
            return
        state.changed.append((step, value))
        if len(state.changed) < rule.steps:
            return

        # Only the last ones: in an earlier job the rule may have required more steps.
        measurements = state.changed[-rule.steps :]
        state.changed = []
        state.firing = not state.firing
        if not state.firing:
            steps = step - state.begun
            self._say(f"step {step}: health rule {rule.name} ended after {steps} steps: {_text(value)}")
            return

        state.begun = step
        self._say(f"step {step}: warning: {warning(rule, measurements)}")
        if rule.act == STOP and self.error is None:
            self.error = stop_error(rule, measurements)


def warning(rule: HealthRule, measurements: Sequence[tuple[int, float]]) -> str:
    """Return the warning of a rule that begins to fire after ``measurements`` of (step, value)."""
    text = f"health rule {rule.name}: {rule.meaning}: {_facts(rule, measurements)}"
    if rule.causes:
        text += f"; likely causes: {rule.causes}; change {rule.change} ({PAGE})"
    return text.replace("`", "")


def stop_error(rule: HealthRule, measurements: Sequence[tuple[int, float]]) -> UserError:
    """Return the error of a run that a rule with ``act: stop`` ends."""
    path = f"health.rules.{rule.name}"
    fix = f"{path}=off, or {path}.act=warn, resumes without this rule's stop"
    if rule.change:
        fix = f"look at the samples ({rule.samples}), change {rule.change.replace('`', '')} and resume; {fix}"
    return UserError(
        f"a health rule has ended the run: {rule.meaning}",
        where=f"{path} (step {measurements[-1][0]})",
        expected=f"{rule.band()} ({_measure_text(rule)})",
        got=_facts(rule, measurements),
        fix=fix,
    )


def _facts(rule: HealthRule, measurements: Sequence[tuple[int, float]]) -> str:
    """Return the measurements of a rule as text, with its healthy band."""
    # The last values are enough: a rule can have hundreds of steps.
    last = ", ".join(_text(value) for _, value in measurements[-3:])
    steps = spans([step for step, _ in measurements])
    return f"{_measure_text(rule)} {last} at steps {steps}, where {rule.band()} is healthy"


def _measure_text(rule: HealthRule) -> str:
    """Return the names of a rule's metrics, with its measure unless that is the value itself."""
    names = ", ".join(rule.metrics)
    if rule.measure in (health.VALUE, health.FRESH):
        return rule.metrics[0]
    return f"{names} ({rule.measure})"


def _text(value: float) -> str:
    return f"{value:.3g}"


# Measures: what a rule compares with its band. Each returns None in a step that does not measure it, and
# keeps earlier values in ``memory``.

Memory = dict[str, list[float]]


def _value(rule: HealthRule, values: Mapping[str, float], memory: Memory) -> float | None:
    """Return the first metric of a rule."""
    return values.get(rule.metrics[0])


def _fresh_value(rule: HealthRule, values: Mapping[str, float], memory: Memory) -> float | None:
    """Return the first metric in a step whose second one, the largest age of its tokens, is 0."""
    metric, age = rule.metrics
    # Old tokens also differ by the updates since they were sampled. Without old tokens a run has no age
    # metric.
    if values.get(age, 0.0) > 0:
        return None
    return values.get(metric)


def _sum(rule: HealthRule, values: Mapping[str, float], memory: Memory) -> float | None:
    """Return the sum of all metrics whose name matches the first one of a rule."""
    matching = [value for name, value in values.items() if fnmatchcase(name, rule.metrics[0])]
    return math.fsum(matching) if matching else None


def _share_of_step(rule: HealthRule, values: Mapping[str, float], memory: Memory) -> float | None:
    """Return the largest of the times of a rule as a share of the last one, the time of the step."""
    *names, step_name = rule.metrics
    times = [values[name] for name in names if name in values]
    step_time = values.get(step_name, 0.0)
    if not times or step_time <= 0:
        return None
    return max(times) / step_time


def _ratio_to_start(rule: HealthRule, values: Mapping[str, float], memory: Memory) -> float | None:
    """Return the metric divided by the median of its first values, which must be more than 0."""
    value = values.get(rule.metrics[0])
    if value is None:
        return None

    start = memory.setdefault("start", [])
    if len(start) < health.REFERENCE:
        start.extend(filter(math.isfinite, [value]))
        return None
    return _ratio(value, start)


def _ratio_to_median(rule: HealthRule, values: Mapping[str, float], memory: Memory) -> float | None:
    """Return the metric divided by the median of its values before, which must be more than 0."""
    value = values.get(rule.metrics[0])
    if value is None:
        return None

    before = memory.get("before", [])
    memory["before"] = [*before, *filter(math.isfinite, [value])][-health.MEDIAN_WINDOW :]
    if len(before) < health.REFERENCE:
        return None
    return _ratio(value, before)


def _ratio(value: float, before: Sequence[float]) -> float | None:
    """Return a value divided by the median of earlier ones, None if the median is not positive."""
    reference = median(before)
    return value / reference if reference > 0 else None


def _fall_of_accuracy(rule: HealthRule, values: Mapping[str, float], memory: Memory) -> float | None:
    """Return the largest fall of an accuracy since its best while the mean reward has risen, 0 without one.

    Measured in steps with an evaluation. The mean reward is over the steps since the evaluation before.
    """
    reward_name, accuracy_pattern = rule.metrics
    total, count = memory.pop("rewards", [0.0, 0.0])
    if reward_name in values:
        total += values[reward_name]
        count += 1
    accuracies = {name: value for name, value in values.items() if fnmatchcase(name, accuracy_pattern)}
    if not accuracies:
        memory["rewards"] = [total, count]
        return None

    falls = [0.0]
    for name, accuracy in accuracies.items():
        # An evaluation before the first step has no mean reward: the next one records its own.
        if not count:
            memory.setdefault(name, [accuracy])
            continue
        reward = total / count
        best_accuracy, best_reward, *_ = [*memory.get(name, [accuracy]), reward]
        if accuracy >= best_accuracy:
            memory[name] = [accuracy, reward]
            continue
        memory[name] = [best_accuracy, best_reward]
        if reward > best_reward:
            falls.append(best_accuracy - accuracy)
    return max(falls)


Measure = Callable[[HealthRule, Mapping[str, float], Memory], float | None]

MEASURES: Mapping[str, Measure] = {
    health.VALUE: _value,
    health.FRESH: _fresh_value,
    health.SUM: _sum,
    health.SHARE_OF_STEP: _share_of_step,
    health.TO_START: _ratio_to_start,
    health.TO_MEDIAN: _ratio_to_median,
    health.FALL: _fall_of_accuracy,
}
"""Measure of a rule -> its function."""


# Rules in a report.


def firing_steps(lines: Sequence[Mapping[str, float]]) -> dict[str, list[int]]:
    """Return the steps in which each rule has fired, from the lines of a metrics file."""
    steps: dict[str, list[int]] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith(PREFIX) and value:
                steps.setdefault(name.removeprefix(PREFIX), []).append(int(line["step"]))
    return steps


def rule_named(name: str) -> HealthRule:
    """Return a rule by its name; a rule of the user's own gets a generic description."""
    return health.RULE_OF.get(name) or HealthRule(name, "a rule of your own", ())


Sample = Mapping[str, Any]
"""Sample in the form of `page.sample_browser`."""


def select_samples(rule: HealthRule, samples: Sequence[Sample], limit: int) -> list[Sample]:
    """Return at most ``limit`` of a step's samples that illustrate a rule; see `HealthRule.samples`."""
    return SELECTIONS[rule.samples](samples)[:limit]


def _rewards_below(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples by their rewards, the lowest first, without failed rewards."""
    return sorted((item for item in samples if item["reward"] is not None), key=lambda item: item["reward"])


def _equal_groups(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of prompts whose rewards are all equal, without prompts with one sample."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample["prompt"], []).append(sample)
    equal = [group for group in groups.values() if len(group) > 1 and len({s["reward"] for s in group}) == 1]
    return [sample for group in equal for sample in group]


def _is_filtered(sample: Sample) -> bool:
    return (sample["failure"] or "").startswith("filtered: ")


SELECTIONS: Mapping[str, Callable[[Sequence[Sample]], list[Sample]]] = {
    health.HIGHEST_REWARD: lambda samples: _rewards_below(samples)[::-1],
    health.LOWEST_EVALUATION: _rewards_below,
    health.LONGEST: lambda samples: sorted(samples, key=lambda item: -(item["length"] or 0)),
    health.TRUNCATED: lambda samples: [item for item in samples if item["finish"] == "length"],
    health.EQUAL_GROUPS: _equal_groups,
    health.FAILED: lambda samples: [item for item in samples if item["failure"] and not _is_filtered(item)],
    health.FILTERED: lambda samples: [item for item in samples if _is_filtered(item)],
    health.NO_SAMPLES: lambda samples: [],
}
"""Samples that show a problem -> their selection from the samples of a step."""
