"""Health rules during a run: each rule compares a metric of each step with a band from `config.health`.

The rules only use metrics that the main rank already has. Checkpoints contain the state of the rules, so a
resumed run prints the same warnings as an uninterrupted run.
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
from megatron_rl.trainer.logging import format_step_ranges

PREFIX = "health/"
"""Prefix of the names of the rules' metrics."""
PAGE = "docs/health.md"
"""Documentation page about the rules."""


@dataclass
class RuleState:
    """State of one health rule between steps, stored in checkpoints as plain values.

    Example: a rule fires after 3 consecutive measurements outside its band. After two such measurements, 0.2
    at step 7 and 0.3 at step 8, ``firing`` is False and ``changed`` is ``[(7, 0.2), (8, 0.3)]``.
    """

    firing: bool = False
    """Whether the rule fires: the metric has been outside its band for `HealthRule.steps` measurements."""
    measured: bool = False
    """Whether any step of the run had the rule's metrics."""
    begun: int = 0
    """Step after which the rule started to fire."""
    changed: list[tuple[int, float]] = field(default_factory=list)
    """(step, value) of the last consecutive measurements that contradict ``firing``."""
    memory: dict[str, list[float]] = field(default_factory=dict)
    """Values of earlier steps that the rule's measure needs."""


class HealthMonitor:
    """The health rules of a run on the main rank, which has the metrics of all ranks.

    ``print_line`` prints a line on the console. ``error`` is set when a rule with ``act: stop`` starts to
    fire.
    """

    def __init__(self, rules: Sequence[HealthRule], print_line: Callable[[str], None]) -> None:
        self.error: UserError | None = None
        self._rules = rules
        self._print_line = print_line
        self._has_checked_metrics = False

    def update(
        self,
        step: int,
        values: Mapping[str, float],
        states: MutableMapping[str, RuleState],
    ) -> dict[str, float]:
        """Update ``states`` with a step's metrics; print the rules that start or stop firing.

        ``states``: name of a rule -> its state, changed in place. Returns the metrics ``health/NAME`` (1 if
        the rule fires, else 0) of the rules that have been measured in this or an earlier step.
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

            # Save the rule as not firing: a run that resumes after a stop then has `rule.steps` steps to
            # recover.
            if rule.act == STOP:
                state.firing = False

        if step > 0 and not self._has_checked_metrics:
            self._has_checked_metrics = True
            self._warn_of_missing_metrics(step, values, states)
        return metrics

    def _warn_of_missing_metrics(
        self,
        step: int,
        values: Mapping[str, float],
        states: Mapping[str, RuleState],
    ) -> None:
        """Print a warning for each user-defined rule whose metric is missing in the first step of a job."""
        for rule in self._rules:
            # Metrics of evaluation sets may only exist from the first evaluation on.
            metric = rule.metrics[0]
            if rule.name in health.RULE_OF or states[rule.name].measured or metric.startswith("eval/"):
                continue
            similar_name = nearest(metric, values)
            hint = f"; did you mean {similar_name}?" if similar_name else ""
            self._print_line(
                f"step {step}: warning: health rule {rule.name}: no metric {metric} so far{hint}"
            )

    def _update_rule(
        self,
        step: int,
        rule: HealthRule,
        value: float,
        state: RuleState,
    ) -> None:
        """Update a rule with a measurement; print a message if the rule starts or stops firing.

        A rule starts (or stops) firing after `HealthRule.steps` consecutive measurements outside (or inside)
        its band.
        """
        if rule.is_outside(value) == state.firing:
            state.changed.clear()
            return
        state.changed.append((step, value))
        if len(state.changed) < rule.steps:
            return

        # After a resume, ``changed`` can be longer: the rule may have required more steps in the earlier job.
        measurements = state.changed[-rule.steps :]
        state.changed = []
        state.firing = not state.firing
        if not state.firing:
            num_steps = step - state.begun
            value_text = _format_value(value)
            self._print_line(
                f"step {step}: health rule {rule.name} ended after {num_steps} steps: {value_text}"
            )
            return

        state.begun = step
        self._print_line(f"step {step}: warning: {warning_text(rule, measurements)}")
        if rule.act == STOP and self.error is None:
            self.error = stop_error(rule, measurements)


def warning_text(rule: HealthRule, measurements: Sequence[tuple[int, float]]) -> str:
    """Return the warning text of a rule that starts to fire; ``measurements`` are (step, value) pairs."""
    text = f"health rule {rule.name}: {rule.meaning}: {_describe_measurements(rule, measurements)}"
    if rule.causes:
        text += f"; likely causes: {rule.causes}; change {rule.change} ({PAGE})"
    return text.replace("`", "")


def stop_error(rule: HealthRule, measurements: Sequence[tuple[int, float]]) -> UserError:
    """Return the error with which a rule with ``act: stop`` ends the run."""
    key = f"health.rules.{rule.name}"
    fix = f"to resume anyway, set {key}=off or {key}.act=warn"
    if rule.change:
        fix = f"look at the samples ({rule.samples}), change {rule.change.replace('`', '')} and resume; {fix}"
    return UserError(
        f"a health rule has ended the run: {rule.meaning}",
        where=f"{key} (step {measurements[-1][0]})",
        expected=f"{rule.band_text()} ({_describe_measure(rule)})",
        got=_describe_measurements(rule, measurements),
        fix=fix,
    )


def _describe_measurements(rule: HealthRule, measurements: Sequence[tuple[int, float]]) -> str:
    """Describe the measurements of a rule: the last three values, all steps, and the rule's healthy band.

    ``measurements``: (step, value) pairs.
    """
    # Show only the last values, since a rule can require hundreds of steps.
    last_values = ", ".join(_format_value(value) for _, value in measurements[-3:])
    steps = format_step_ranges([step for step, _ in measurements])
    return f"{_describe_measure(rule)} {last_values} at steps {steps}, where {rule.band_text()} is healthy"


def _describe_measure(rule: HealthRule) -> str:
    """Format the names of a rule's metrics, followed by the rule's measure in parentheses.

    If the rule compares the metric itself with the band, the text is only the metric's name.
    """
    if rule.measure in (health.VALUE, health.FRESH):
        return rule.metrics[0]
    names = ", ".join(rule.metrics)
    return f"{names} ({rule.measure})"


def _format_value(value: float) -> str:
    """Format a measured value with three significant digits."""
    return f"{value:.3g}"


# Measures: functions of a step's metrics whose result a rule compares with its band. Each returns None if the
# step lacks the metrics, and stores values for later steps in ``history``, which is `RuleState.memory`.

History = dict[str, list[float]]


def _measure_value(rule: HealthRule, values: Mapping[str, float], history: History) -> float | None:
    """Return the value of the rule's first metric, or None if the step does not have it."""
    return values.get(rule.metrics[0])


def _measure_fresh_value(rule: HealthRule, values: Mapping[str, float], history: History) -> float | None:
    """Return the rule's first metric in steps whose tokens were all sampled with the newest weights.

    The rule's second metric is the largest age of the step's tokens, in weight updates. If the age is above
    0, the function returns None: the first metric then also contains the effect of these updates.
    """
    metric, age_metric = rule.metrics
    # A run without old tokens has no age metric.
    if values.get(age_metric, 0.0) > 0:
        return None
    return values.get(metric)


def _measure_sum(rule: HealthRule, values: Mapping[str, float], history: History) -> float | None:
    """Return the sum of all metrics whose names match the pattern in the rule's first metric."""
    matching_values = [value for name, value in values.items() if fnmatchcase(name, rule.metrics[0])]
    return math.fsum(matching_values) if matching_values else None


def _measure_share_of_step(rule: HealthRule, values: Mapping[str, float], history: History) -> float | None:
    """Return the longest of the rule's times as a fraction of the step's time (the rule's last metric)."""
    *time_metrics, step_time_metric = rule.metrics
    times = [values[name] for name in time_metrics if name in values]
    step_time = values.get(step_time_metric, 0.0)
    if not times or step_time <= 0:
        return None
    return max(times) / step_time


def _measure_ratio_to_start(rule: HealthRule, values: Mapping[str, float], history: History) -> float | None:
    """Return the metric divided by the median of its first `health.MIN_MEASUREMENTS` values in the run.

    Returns None if the step does not have the metric, if there are fewer earlier values, or if their median
    is not positive.
    """
    value = values.get(rule.metrics[0])
    if value is None:
        return None

    first_values = history.setdefault("start", [])
    if len(first_values) < health.MIN_MEASUREMENTS:
        if math.isfinite(value):
            first_values.append(value)
        return None
    return _divide_by_median(value, first_values)


def _measure_ratio_to_median(rule: HealthRule, values: Mapping[str, float], history: History) -> float | None:
    """Return the metric divided by the median of its last `health.MEDIAN_WINDOW` earlier values.

    Returns None if the step does not have the metric, if there are fewer than `health.MIN_MEASUREMENTS`
    earlier values, or if their median is not positive.
    """
    value = values.get(rule.metrics[0])
    if value is None:
        return None

    previous_values = history.setdefault("before", [])
    if math.isfinite(value):
        history["before"] = [*previous_values, value][-health.MEDIAN_WINDOW :]
    if len(previous_values) < health.MIN_MEASUREMENTS:
        return None
    return _divide_by_median(value, previous_values)


def _divide_by_median(value: float, earlier_values: Sequence[float]) -> float | None:
    """Return a value divided by the median of earlier values, or None if the median is not positive."""
    reference = median(earlier_values)
    return value / reference if reference > 0 else None


def _measure_accuracy_drop(rule: HealthRule, values: Mapping[str, float], history: History) -> float | None:
    """Return the largest drop of an accuracy below its best value, or 0 without a drop.

    A drop only counts if the mean reward has risen since the best value: the policy then gains reward without
    becoming more accurate. The mean reward is over the steps since the previous evaluation. Returns None in
    steps without an evaluation.
    """
    # Accumulate the rewards of the steps since the previous evaluation.
    reward_name, accuracy_pattern = rule.metrics
    reward_sum, reward_count = history.pop("rewards", [0.0, 0.0])
    if reward_name in values:
        reward_sum += values[reward_name]
        reward_count += 1
    accuracies = {name: value for name, value in values.items() if fnmatchcase(name, accuracy_pattern)}
    if not accuracies:
        history["rewards"] = [reward_sum, reward_count]
        return None

    # Compare each accuracy with its best value so far, and the mean reward of this evaluation with the mean
    # reward of the evaluation that had the best value.
    drops = [0.0]
    for name, accuracy in accuracies.items():
        # Before the first step there is no mean reward: store the accuracy alone.
        if not reward_count:
            history.setdefault(name, [accuracy])
            continue
        mean_reward = reward_sum / reward_count

        # A best value from before the first step is stored without a mean reward: use this evaluation's.
        best = history.get(name, [accuracy])
        best_accuracy = best[0]
        reward_at_best = mean_reward
        if len(best) > 1:
            reward_at_best = best[1]

        if accuracy >= best_accuracy:
            history[name] = [accuracy, mean_reward]
            continue
        history[name] = [best_accuracy, reward_at_best]
        if mean_reward > reward_at_best:
            drops.append(best_accuracy - accuracy)
    return max(drops)


Measure = Callable[[HealthRule, Mapping[str, float], History], float | None]

MEASURES: Mapping[str, Measure] = {
    health.VALUE: _measure_value,
    health.FRESH: _measure_fresh_value,
    health.SUM: _measure_sum,
    health.SHARE_OF_STEP: _measure_share_of_step,
    health.TO_START: _measure_ratio_to_start,
    health.TO_MEDIAN: _measure_ratio_to_median,
    health.FALL: _measure_accuracy_drop,
}
"""Name of a measure (`HealthRule.measure`) -> function that computes it."""


# Rules in the report of a run.


def firing_steps(lines: Sequence[Mapping[str, float]]) -> dict[str, list[int]]:
    """Return the steps in which each health rule fired: rule name -> steps.

    ``lines``: lines of a metrics file.
    """
    steps: dict[str, list[int]] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith(PREFIX) and value:
                steps.setdefault(name.removeprefix(PREFIX), []).append(int(line["step"]))
    return steps


def find_rule(name: str) -> HealthRule:
    """Return the built-in health rule ``name``; for a user-defined name, return a rule without metrics."""
    return health.RULE_OF.get(name) or HealthRule(name, "a rule of your own", ())


Sample = Mapping[str, Any]
"""Sample with the keys of `page.sample_browser`."""


def select_samples(rule: HealthRule, samples: Sequence[Sample], limit: int) -> list[Sample]:
    """Return at most ``limit`` of a step's samples that show the problem which a rule detects.

    `HealthRule.samples` determines which samples are selected.
    """
    return SELECTIONS[rule.samples](samples)[:limit]


def _sort_by_reward(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with a reward, sorted by ascending reward."""
    samples_with_reward = [sample for sample in samples if sample["reward"] is not None]
    return sorted(samples_with_reward, key=lambda sample: sample["reward"])


def _select_equal_groups(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of all prompts that have two or more samples with equal rewards."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample["prompt"], []).append(sample)

    selected: list[Sample] = []
    for group in groups.values():
        distinct_rewards = {sample["reward"] for sample in group}
        if len(group) > 1 and len(distinct_rewards) == 1:
            selected += group
    return selected


def _is_filtered(sample: Sample) -> bool:
    """Return whether a response filter removed the sample."""
    return (sample["failure"] or "").startswith("filtered: ")


def _select_failed(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples whose reward failed, without samples that a response filter removed."""
    return [sample for sample in samples if sample["failure"] and not _is_filtered(sample)]


SELECTIONS: Mapping[str, Callable[[Sequence[Sample]], list[Sample]]] = {
    health.HIGHEST_REWARD: lambda samples: _sort_by_reward(samples)[::-1],
    health.LOWEST_EVALUATION: _sort_by_reward,
    health.LONGEST: lambda samples: sorted(samples, key=lambda sample: -(sample["length"] or 0)),
    health.TRUNCATED: lambda samples: [sample for sample in samples if sample["finish"] == "length"],
    health.EQUAL_GROUPS: _select_equal_groups,
    health.FAILED: _select_failed,
    health.FILTERED: lambda samples: [sample for sample in samples if _is_filtered(sample)],
    health.NO_SAMPLES: lambda samples: [],
}
"""Value of `HealthRule.samples` -> function that selects such samples from a step's samples."""
