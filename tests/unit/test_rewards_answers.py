"""Reward functions that come with the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.data import reasoning_gym
from megatron_rl.data.records import load_records
from megatron_rl.errors import UserError
from megatron_rl.rewards.arithmetic import exact_match, match_and_length
from megatron_rl.rewards.math_answer import equal, last_boxed, marked_answer, marked_number
from megatron_rl.rewards.reasoning_gym import score


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


def test_expressions_are_compared_by_their_meaning() -> None:
    for same in (
        ("1,200", "1200.0"),
        ("$1200", "1200"),
        ("-7/2", "-3.5"),
        ("\\frac{1}{2}", "0.5"),
        ("x+1", "1+x"),
    ):
        assert equal(*same) and equal(*reversed(same)), same
    for other in (("1/0", "1"), ("seven", "8"), ("", "0"), ("72", "-72"), ("x+1", "x-1"), ("\\frac{1", "1")):
        assert not equal(*other), other


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


def test_problems_of_reasoning_gym_are_made_and_judged(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        reasoning_gym.make(tmp_path / folder, ["leg_counting", "basic_arithmetic"], 6, 4, seed=3)
    parts = {name: load_records(tmp_path / f"a/{name}.jsonl") for name in ("train", "eval")}
    assert (tmp_path / "a/train.jsonl").read_bytes() == (tmp_path / "b/train.jsonl").read_bytes()
    assert [len(records) for records in parts.values()] == [6, 4]
    prompts = [record.values["prompt"] for records in parts.values() for record in records]
    assert len(set(prompts)) == 10, "what is held out is not learned from"
    assert {record.values["task"] for record in parts["eval"]} == {"leg_counting", "basic_arithmetic"}
    for record in parts["train"]:
        asked = {"prompt": record.values["prompt"], "metadata": {"entry": record.values["entry"]}}
        truth = record.values["ground_truth"]
        for response, reward in ((truth, 1.0), (f"hm\n<answer>{truth}</answer>", 1.0), ("no idea", 0.0)):
            given = score(response=response, ground_truth=truth, **asked)
            assert given == reward if reward else given < 0.1
    with pytest.raises(UserError, match="no task 'leg_countin'") as error:
        reasoning_gym.make(tmp_path, ["leg_countin"], 1, 1, 1)
    assert error.value.fix == "did you mean leg_counting?"
