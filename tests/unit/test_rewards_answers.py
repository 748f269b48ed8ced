"""Reward functions that come with the package."""

from __future__ import annotations

import pytest

from megatron_rl.rewards.arithmetic import exact_match, match_and_length
from megatron_rl.rewards.math_answer import as_number, last_boxed, marked_answer, marked_number


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        ("95", "95", 1.0),
        (" 95\n", "95", 1.0),
        ("95", 95, 1.0),
        ("095", "95", 0.0),
        ("", "95", 0.0),
        ("95.", "95", 0.0),
    ],
)
def test_exact_match(response: str, truth: object, reward: float) -> None:
    assert exact_match(prompt="37+58=", response=response, ground_truth=truth, metadata={}) == reward


def test_match_and_length_gives_two_components() -> None:
    def score(response: str) -> dict[str, float]:
        return match_and_length(prompt="37+58=", response=response, ground_truth=95, metadata={})

    assert score(" 95") == {"reward": 1.0, "match": 1.0, "length": 1.0}
    assert score("85") == {"reward": 0.0, "match": 0.0, "length": 1.0}
    assert score("") == {"reward": 0.0, "match": 0.0, "length": 0.0}


def test_marked_answers_are_found() -> None:
    assert marked_answer("3 and 4\n#### 7") == "7"
    assert marked_answer("#### 6\nno, #### 7 \nafter") == "7"
    assert marked_answer("so \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert last_boxed("\\boxed{1} then \\boxed{2}") == "2"
    assert last_boxed("\\boxed{never closed") is None
    assert marked_answer("the answer is 7") is None
    assert marked_answer("####") is None


def test_numbers_are_compared_exactly() -> None:
    assert as_number("1,200") == as_number("1200.0") == as_number("$1200")
    assert as_number("-7/2") == as_number("-3.5")
    assert as_number("12%") == 12
    assert as_number("1/0") is None and as_number("seven") is None and as_number("") is None


@pytest.mark.parametrize(
    ("response", "truth", "correct"),
    [
        ("#### 1,200", "so 1000+200\n#### 1200", 1.0),
        ("\\boxed{18}", "18", 1.0),
        ("#### 18.0", "18", 1.0),
        ("#### 19", "18", 0.0),
        ("\\boxed{x+1}", "x+1", 1.0),
        ("18", "18", 0.0),
    ],
)
def test_marked_number(response: str, truth: str, correct: float) -> None:
    result = marked_number(prompt="", response=response, ground_truth=truth, metadata={})
    assert result["reward"] == result["correct"] == correct
    assert result["formatted"] == float("##" in response or "box" in response)


def test_format_reward() -> None:
    result = marked_number(prompt="", response="#### 1", ground_truth="2", metadata={}, format_reward=0.1)
    assert result["reward"] == 0.1 and result["correct"] == 0.0
