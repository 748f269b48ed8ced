"""Reward functions that come with the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.data import reasoning_gym
from megatron_rl.data.records import load_records
from megatron_rl.errors import UserError
from megatron_rl.rewards.arithmetic import exact_match, match_and_length
from megatron_rl.rewards.math_answer import are_equal, find_last_box, find_marked_answer, marked_number
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
    assert find_marked_answer("3 and 4\n#### 7") == "7"
    assert find_marked_answer("#### 6\nno, #### 7 \nafter") == "7"
    assert find_marked_answer("so \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert find_last_box("\\boxed{1} then \\boxed{2}") == "2"
    assert find_last_box("\\boxed{never closed") is None
    assert find_last_box("\\boxed{1}, not \\boxed{} or \\boxed{2") == "1"
    assert find_marked_answer("the answer is 7") is None
    assert find_marked_answer("####") is None


def test_expressions_are_compared_by_their_meaning() -> None:
    for same in (
        ("1,200", "1200.0"),
        ("$1200", "1200"),
        ("-7/2", "-3.5"),
        ("\\frac{1}{2}", "0.5"),
        ("x+1", "1+x"),
    ):
        assert are_equal(*same) and are_equal(*reversed(same)), same
    for other in (("1/0", "1"), ("seven", "8"), ("", "0"), ("72", "-72"), ("x+1", "x-1"), ("\\frac{1", "1")):
        assert not are_equal(*other), other


RIGHT = {
    "under a heading": ("### Work\nadd\n#### Final answer\nIt is $\\boxed{7}$.", "7"),
    "under a heading with a colon": ("#### Solution:\n3 + 4 = 7, so \\boxed{7}", "7"),
    "before a heading": ("\\boxed{7}\n#### Note\nAll fine.", "7"),
    "before a numbered heading": ("\\boxed{7}\n#### 2. Check\n3 + 4 = 7", "7"),
    "before another heading": ("#### 7\n\n#### Explanation\n3 + 4", "7"),
    "on the line below": ("#### Final answer\n**7**", "7"),
    "in bold": ("#### **7**", "7"),
    "within bold": ("**#### 7**", "7"),
    "as code": ("#### `7`", "7"),
    "with a full stop": ("#### 7.", "7"),
    "with a unit": ("#### 7 dollars", "7"),
    "with a short unit": ("#### 7 km", "7"),
    "a fraction with a unit": ("#### 1/2 cup", "0.5"),
    "in dollars": ("#### $7.00", "7"),
    "in dollars of LaTeX": ("#### \\$7", "7"),
    "in euros": ("#### €7", "7"),
    "as LaTeX": ("#### $7$", "7"),
    "in a sentence": ("#### The answer is 7.", "7"),
    "of a variable": ("#### x = 7", "7"),
    "of an equation": ("#### 3 + 4 = 7", "7"),
    "of two marks": ("#### 6\nNo:\n#### 7", "7"),
    "a box behind a mark": ("#### \\boxed{7}", "7"),
    "a box before one not closed": ("\\boxed{7} is right. \\boxed{", "7"),
    "a box before an empty one": ("\\boxed{7} \\boxed{}", "7"),
    "a box without braces": ("so \\boxed 7", "7"),
    "a box behind a space": ("\\boxed {7}", "7"),
    "a framed box": ("\\fbox{7}", "7"),
    "a box in a box": ("\\boxed{\\boxed{7}}", "7"),
    "a box with a unit": ("\\boxed{7\\text{ km}}", "7"),
    "a box with degrees": ("\\boxed{90^\\circ}", "90"),
    "a box with a set": ("\\boxed{\\left\\{1, 2\\right\\}}", "\\{2, 1\\}"),
    "percent": ("\\boxed{7\\%}", "7\\%"),
    "a comma of thousands": ("#### 1,200,000", "1200000"),
    "a space of thousands": ("#### 1 200", "1200"),
    "a LaTeX space of thousands": ("\\boxed{1\\,200}", "1200"),
    "a LaTeX comma of thousands": ("\\boxed{1{,}200}", "1200"),
    "in powers of ten": ("#### 7e3", "7000"),
    "a minus of Unicode": ("#### \u22127", "-7"),
    "a short fraction": ("\\boxed{\\dfrac12}", "\\frac{1}{2}"),
    "a letter": ("\\boxed{\\text{B}}", "B"),
    "a word": ("#### Monday", "Monday"),
}
WRONG = {
    "another number": ("#### 8 dollars", "7"),
    "the number of a heading": ("#### 7. Add them\n\\boxed{8}", "7"),
    "the number within a heading": ("#### Step 7\nadd", "7"),
    "a longer number": ("#### 70", "7"),
    "a product": ("\\boxed{7xy}", "7"),
    "a multiple of pi": ("\\boxed{7 pi}", "7"),
    "two things": ("#### 7 apples and 3 pears", "7"),
    "an immense power": ("#### 7e999999999", "7"),
    "a first try": ("\\boxed{7}, no: \\boxed{8}", "7"),
}


@pytest.mark.parametrize(("response", "truth"), RIGHT.values(), ids=RIGHT.keys())
def test_a_right_answer_is_found_however_it_is_marked(response: str, truth: str) -> None:
    assert marked_number(prompt="", response=response, ground_truth=truth, metadata={})["reward"] == 1


@pytest.mark.parametrize(("response", "truth"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_answer_earns_nothing(response: str, truth: str) -> None:
    assert marked_number(prompt="", response=response, ground_truth=truth, metadata={})["reward"] == 0


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


@pytest.mark.slow
def test_problems_of_reasoning_gym_are_made_and_judged(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        reasoning_gym.write_data_sets(tmp_path / folder, ["leg_counting", "basic_arithmetic"], 6, 4, seed=3)
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
        reasoning_gym.write_data_sets(tmp_path, ["leg_countin"], 1, 1, 1)
    assert error.value.fix == "did you mean leg_counting?"
