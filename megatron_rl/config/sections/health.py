"""Health rules of a run: what happens when one fires, and the bands that differ from the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_rl.config.sections.bounds import STEPS
from megatron_rl.config.setting import setting
from megatron_rl.metrics import LARGEST

WARN = "warn"
STOP = "stop"


@dataclass(frozen=True)
class HealthRuleConfig:
    """Changes of one health rule, or a rule of the user's own; ``NAME: off`` is short for ``on: false``.

    A rule fires after ``steps`` consecutive measurements outside its band. It ends after ``steps``
    consecutive measurements inside the band. The rules and their bands are in docs/health.md.
    """

    VALUE_KEY: ClassVar[str] = "on"

    on: bool = setting(True, "Apply the rule.")
    above: float | None = setting(
        None,
        "Value above which the rule counts a measurement.",
        at_least=-LARGEST,
        at_most=LARGEST,
        unset="the rule's own",
    )
    below: float | None = setting(
        None,
        "Value below which the rule counts a measurement.",
        at_least=-LARGEST,
        at_most=LARGEST,
        unset="the rule's own",
    )
    steps: int | None = setting(
        None,
        "Number of consecutive measurements outside the band after which the rule fires, and of those inside "
        "after which it ends.",
        **STEPS,
        unset="the rule's own",
    )
    act: str | None = setting(
        None,
        "What happens when the rule begins to fire, as `health.act`.",
        choices=(WARN, STOP),
        unset="health.act",
    )
    metric: str | None = setting(
        None, "Metric of a rule of your own, under a name that no rule has.", unset="that of the rule"
    )


@dataclass(frozen=True)
class HealthConfig:
    """Health rules: bands of metrics, with likely causes and settings to change if a metric leaves its band.

    Each applied rule has a metric `health/NAME`, which is 1 while the rule fires and else 0.
    """

    VALUE_KEY: ClassVar[str] = "act"

    act: str = setting(
        WARN,
        "What happens when a rule begins to fire: the console and the report name it (warn), or the run also "
        "saves a checkpoint and ends (stop).",
        choices=(WARN, STOP),
    )
    rules: dict[str, HealthRuleConfig] = setting(
        {}, "Changes of rules, or rules of your own, by name. Rules that are not named have their defaults."
    )
