"""Stop a run in which too many rewards fail: it would learn from the rest alone, or from nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.errors import UserError
from megatron_rl.rewards.function import Failure, ending
from megatron_rl.types import Outcome

NO_RESPONSE = "the engine gave no response"
SHOWN_FAILURES = 4
"""So many of a step's failed rewards are shown on the console; all are counted."""


def of_each_kind(failures: Iterable[Failure]) -> list[Failure]:
    """Return the first failure of each reason and kind of exception, `SHOWN_FAILURES` at most."""
    first: dict[tuple[str, str], Failure] = {}
    for failure in failures:
        last_line = failure.message.strip().rpartition("\n")[2]
        first.setdefault((failure.reason, last_line.partition(":")[0]), failure)
    return list(first.values())[:SHOWN_FAILURES]


def never_asked(reward: RewardConfig, outcomes: Sequence[Outcome | None] | None) -> str | None:
    """Return a warning where environments reward every episode themselves, and others are to judge."""
    rewarded = [said is not None and said.reward is not None for said in outcomes or ()]
    if not rewarded or not all(rewarded) or not reward.scorers:
        return None
    names = ", ".join(f"reward.{name}" for name in reward.scorers)
    return f"warning: the environment rewards every episode of this step, and nothing asks {names}"


class FailureWatch:
    """Count the steps running in which more rewards failed than `reward.max_invalid_fraction` allows."""

    def __init__(self, config: RewardConfig) -> None:
        self._most, self._patience = config.max_invalid_fraction, config.invalid_steps
        self._running = 0

    def look(
        self, step: int, invalid_fraction: float, reasons: Counter[str], examples: Sequence[Failure]
    ) -> None:
        """Take note of a step in which rewards failed for ``reasons``; raise UserError for too many."""
        if invalid_fraction <= self._most:
            self._running = 0
            return
        self._running += 1
        if self._running < self._patience:
            return
        commonest = reasons.most_common(1)[0][0] if reasons else NO_RESPONSE
        example = next((failure.message for failure in examples if failure.reason == commonest), "")
        raise UserError(
            f"rewards fail in {invalid_fraction:.0%} of the samples, in {self._running} steps running",
            where=f"reward (step {step})",
            expected=f"at most {self._most:.0%} (reward.max_invalid_fraction)",
            got=f"most often: {commonest}" + (f"\n{ending(example, 600)}" if example else ""),
            fix="mend what fails: the reward function, the environment and its agent, or the server that "
            "judges; reward.max_invalid_fraction=1 goes on whatever fails",
        )
