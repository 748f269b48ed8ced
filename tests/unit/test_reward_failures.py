"""A run stops when rewards keep failing, and says why."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.errors import UserError
from megatron_rl.rewards.function import Failure, last_lines
from megatron_rl.trainer.rewards import FailureWatch, distinct_failures, unused_scorers_warning
from megatron_rl.types import Outcome

EXAMPLES = [Failure(0, "timeout", "ran longer than 10 s"), Failure(1, "exception", "KeyError: 'answer'")]


def test_steps_running_with_too_many_failures_stop_a_run_with_the_commonest_reason() -> None:
    watch = FailureWatch(RewardConfig("m:f", max_invalid_fraction=0.5, invalid_steps=3))
    reasons = Counter({"exception": 5, "timeout": 1})
    for step, fraction in enumerate((0.9, 0.9, 0.5, 1.0, 0.6), start=1):  # the third breaks the row
        watch.check(step, fraction, reasons, EXAMPLES)
    with pytest.raises(UserError) as stopped:
        watch.check(6, 0.75, reasons, EXAMPLES)
    text = str(stopped.value)
    assert "rewards fail in 75% of the samples, in 3 consecutive steps" in text
    assert "most often: exception" in text and "KeyError: 'answer'" in text


def test_a_run_may_be_told_to_go_on_whatever_fails() -> None:
    watch = FailureWatch(RewardConfig("m:f", max_invalid_fraction=1.0))
    for step in range(10):
        watch.check(step, 1.0, Counter(), [])


def test_what_is_shown_of_a_long_message_begins_with_a_line() -> None:
    message = "Traceback\n  File 'reward.py', line 6\n    raise ValueError(text)\nValueError: no digits\n"
    assert last_lines(message, 500) == message.strip()
    assert last_lines(message, 40) == "ValueError: no digits" and last_lines(message, 8) == "o digits"


def test_a_reward_beside_an_environment_that_rewards_is_warned_of() -> None:
    said = [Outcome(1.0), Outcome(0.0)]
    assert "reward.function is never called" in (unused_scorers_warning(RewardConfig("m:f"), said) or "")
    assert unused_scorers_warning(RewardConfig(), said) is None, "nobody is to judge"
    assert unused_scorers_warning(RewardConfig("m:f"), [*said, Outcome(failure="timeout")]) is None
    assert unused_scorers_warning(RewardConfig("m:f"), [*said, Outcome()]) is None, "one is left to it"
    assert unused_scorers_warning(RewardConfig("m:f"), None) is None


def test_one_failure_of_each_kind_is_shown() -> None:
    words = [
        "Traceback\nKeyError: 'a'",
        "Traceback\nKeyError: 'b'",
        "Traceback\nValueError: no",
        "ran longer",
    ]
    failures = [Failure(row, "exception", text) for row, text in enumerate(words[:3])]
    failures += [Failure(row, "timeout", words[3]) for row in range(3, 6)]
    assert [failure.row for failure in distinct_failures(failures)] == [0, 2, 3]
