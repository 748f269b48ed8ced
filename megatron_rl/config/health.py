"""Table of the health rules: the measure and band of each, and what to inspect and change when it fires.

A rule is one row of data. The run, the report, `check` and docs/health.md read the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.health import WARN

# Measures that a rule can compare with its band.
VALUE = "the value"
FRESH = "the value, in steps without tokens of older weights"
SUM = "the sum of the values"
SHARE_OF_STEP = "the largest of the times as a share of the step's"
TO_START = "the value divided by the median of the first 10 measurements"
TO_MEDIAN = "the value divided by the median of the last 100 measurements before it"
FALL = "the accuracy lost since its best, if the mean reward has risen since"

MIN_MEASUREMENTS = 10
"""Number of earlier measurements that `TO_START` and `TO_MEDIAN` need to compute their median."""
MEDIAN_WINDOW = 100
"""Number of latest measurements in the median of `TO_MEDIAN`."""

# Samples of a step that show the problem of a rule.
HIGHEST_REWARD = "those with the highest reward"
LOWEST_EVALUATION = "answers of the evaluation set with the lowest reward"
LONGEST = "the longest"
TRUNCATED = "those with `finish` length"
EQUAL_GROUPS = "those of prompts with equal rewards"
FAILED = "those with a failed reward"
FILTERED = "those that a filter removed"
NO_SAMPLES = "none: compare the times"


@dataclass(frozen=True)
class HealthRule:
    """Health rule: it fires while a measure of a run's metrics is outside a band.

    The band is the range of healthy values: at least ``below`` and at most ``above``.

    Example: the rule ``truncation`` compares ``response/truncated_fraction`` with 0.5, and fires when five
    consecutive steps are above.
    """

    name: str
    """Name below `health.rules`, and of the metric ``health/NAME``."""
    meaning: str
    """Meaning of the firing rule, as a clause of a warning."""
    metrics: tuple[str, ...]
    """Metrics that the rule reads; ``*`` matches any part of a name."""
    usual: str = ""
    """Values of healthy runs, as text."""
    above: float | None = None
    """Value above which a measurement is outside the band, or None for no limit."""
    below: float | None = None
    """Value below which a measurement is outside the band, or None for no limit."""
    steps: int = 5
    """Number of consecutive measurements outside the band until the rule fires, and inside until it ends."""
    measure: str = VALUE
    """Measure that is compared with the band, a constant such as `VALUE`."""
    causes: str = ""
    """Likely causes, as text."""
    samples: str = HIGHEST_REWARD
    """Samples that show the problem, a constant such as `HIGHEST_REWARD`."""
    change: str = ""
    """Settings to change, as text."""
    act: str = WARN
    """Action when the rule begins to fire: ``warn`` or ``stop``."""

    def is_outside(self, value: float) -> bool:
        """Return whether a measurement is outside the band; NaN is always outside."""
        # Test for inside: every comparison with NaN is false, so NaN counts as outside.
        is_low_enough = self.above is None or value <= self.above
        is_high_enough = self.below is None or value >= self.below
        return not (is_low_enough and is_high_enough)

    def band_text(self) -> str:
        """Return the band of healthy values as text, such as ``0.5 or more and 2 or less``.

        The rule fires if a value is below ``self.below`` or above ``self.above``. So ``below`` is the lower
        limit of the band, and ``above`` is the upper limit.
        """
        limits = []
        if self.below is not None:
            limits.append(f"{self.below:g} or more")
        if self.above is not None:
            limits.append(f"{self.above:g} or less")
        return " and ".join(limits)


RULES: tuple[HealthRule, ...] = (
    # The training signal: divergence, entropy, rewards.
    HealthRule(
        "kl",
        "the policy moves far away from the reference",
        ("kl/ref",),
        usual="0.01 to 0.1",
        above=0.1,
        steps=3,
        causes="a learning rate that is too high, no penalty, or a reward that the policy exploits",
        change="`actor.optimizer.learning_rate`, `algorithm.kl.coef`",
    ),
    HealthRule(
        "entropy",
        "the policy has nearly stopped exploring",
        ("policy/entropy",),
        usual="0.3 to 1.5",
        below=0.1,
        measure=TO_START,
        causes="rewards for one kind of response, clipping of rare tokens, or a task that is solved",
        samples=EQUAL_GROUPS,
        change="`algorithm.policy_loss.clip_high`, `actor.optimizer.learning_rate`",
    ),
    HealthRule(
        "clipping",
        "the loss clips a large share of the tokens",
        ("policy/clip_fraction",),
        usual="0 to 0.2",
        above=0.3,
        steps=3,
        causes="too many optimizer steps on one batch, or too large ones",
        change="`batch.optimizer_steps`, `batch.epochs`, `actor.optimizer.learning_rate`",
    ),
    HealthRule(
        "equal_groups",
        "nearly no group has a gradient",
        ("group/zero_std_fraction",),
        usual="0 to 0.8",
        above=0.95,
        causes="a task that is too hard or too easy, or a reward that does not distinguish responses",
        samples=EQUAL_GROUPS,
        change="`algorithm.dynamic_sampling`, `data.train`, `batch.samples_per_prompt`",
    ),
    HealthRule(
        "reward_spread",
        "rewards hardly differ in the whole step",
        ("reward/std",),
        usual="0.1 or more",
        below=0.01,
        causes="a reward function that returns one value, or rewards of a scale that the band does not fit",
        change="`reward.function`, `reward.weight`",
    ),
    HealthRule(
        "overfitting",
        "the training reward rises while held-out accuracy falls",
        ("reward/mean", "eval/*/accuracy"),
        usual="0 to 0.05",
        above=0.1,
        steps=2,
        measure=FALL,
        causes="a reward that the policy exploits, too many passes over few prompts, or other data held out",
        samples=LOWEST_EVALUATION,
        change="`reward.function`, `data.train`, `algorithm.kl`, `evaluation.patience`",
    ),
    # The responses.
    HealthRule(
        "truncation",
        "many responses are cut off",
        ("response/truncated_fraction",),
        usual="0 to 0.2",
        above=0.5,
        causes="a limit that is too low, or responses that never end",
        samples=TRUNCATED,
        change="`rollout.max_response_tokens`, `algorithm.overlong`",
    ),
    HealthRule(
        "length",
        "responses become much longer or shorter",
        ("response/length",),
        usual="0.8 to 1.3",
        above=2.0,
        below=0.5,
        measure=TO_MEDIAN,
        causes="a reward that length earns, a loss that favours long or short responses, or repetition",
        samples=LONGEST,
        change="`algorithm.aggregation`, `algorithm.overlong`, `rollout.filters.max_repetition`",
    ),
    HealthRule(
        "filtered",
        "filters remove a large share of the responses",
        ("filtered/*",),
        usual="0 to 0.2",
        above=0.5,
        steps=3,
        measure=SUM,
        causes="a filter that is too strict, or a policy that repeats itself",
        samples=FILTERED,
        change="`rollout.filters`",
    ),
    HealthRule(
        "invalid",
        "rewards fail",
        ("reward/invalid",),
        usual="0 to 0.01",
        above=0.05,
        steps=3,
        causes="exceptions or time-outs of the reward function, or a server that does not respond",
        samples=FAILED,
        change="`reward.function`, `reward.timeout`; above `reward.max_invalid_fraction` the run ends",
    ),
    # Trainer and rollout engine.
    HealthRule(
        "mismatch",
        "trainer and rollout engine compute other log-probs of the same tokens",
        ("mismatch/abs_diff", "staleness/max"),
        usual="a tenth of the threshold",
        steps=1,
        measure=FRESH,
        causes="weights that did not arrive, another dtype or attention kernel in the engine, or "
        "experts with other routing",
        change="`mismatch.warn`, `hybrid_engine.verify`, `algorithm.correction`",
    ),
    HealthRule(
        "staleness",
        "tokens are old when they are trained on",
        ("staleness/mean",),
        usual="0 to 2",
        above=8.0,
        causes="sampling that is slower than training, or responses that are carried over many steps",
        samples=LONGEST,
        change="`asynchrony.steps_ahead`, `asynchrony.max_staleness`, `algorithm.correction`",
    ),
    # The machine.
    HealthRule(
        "idle",
        "training or sampling waits for the other for much of a step",
        ("time/idle_learn", "time/idle_rollout", "time/step"),
        usual="0 to 0.3",
        above=0.5,
        measure=SHARE_OF_STEP,
        causes="more ranks on one side than its work needs, or a few very long responses",
        samples=NO_SAMPLES,
        change="`rollout.ranks`, `actor.layout.ranks`, `rollout.oversample`",
    ),
    HealthRule(
        "throughput",
        "the run is much slower than it was",
        ("throughput/tokens_per_second",),
        usual="0.8 to 1.2",
        below=0.5,
        steps=3,
        measure=TO_MEDIAN,
        causes="a slow node, disk or server, another job on the machine, or shorter responses",
        samples=NO_SAMPLES,
        change="nothing at first: compare the times of phases, and run `megatron-rl doctor`",
    ),
)
"""Health rules of every run, in the order of docs/health.md."""

RULE_OF: Mapping[str, HealthRule] = {rule.name: rule for rule in RULES}
"""Name of a rule in `RULES` -> the rule."""


def health_rules(config: RunConfig) -> tuple[HealthRule, ...]:
    """Return the health rules of a run: `RULES` as changed by the configuration, then the user's rules.

    A rule fires while a metric is outside the rule's band, the range of healthy values.
    """
    settings_by_name = config.health.rules
    rules: list[HealthRule] = []
    unique_names = dict.fromkeys([*RULE_OF, *settings_by_name])
    for name in unique_names:
        rule = RULE_OF.get(name)
        if name == "mismatch" and rule is not None:
            # The upper limit of this rule is the setting `mismatch.warn`. Its default depends on the dtype.
            rule = replace(rule, above=config.mismatch.warn)

        settings = settings_by_name.get(name)
        if settings is not None and not settings.on:
            continue
        if rule is None:
            assert settings is not None and settings.metric is not None, "the configuration is checked"
            rule = HealthRule(name, f"{settings.metric} is outside its band", (settings.metric,))

        # A rule's own settings have precedence over `health.act`.
        rule = replace(rule, act=config.health.act)
        if settings is not None:
            values = {field: getattr(settings, field) for field in ("above", "below", "steps", "act")}
            explicit_values = {field: value for field, value in values.items() if value is not None}
            rule = replace(rule, **explicit_values)
        rules.append(rule)
    return tuple(rules)
