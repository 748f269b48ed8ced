"""An environment as users of verifiers write it: a sum, and a second try where the first was wrong."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import verifiers as vf
from datasets import Dataset

HELD_OUT = 32


def last_number(messages: list[Any]) -> str:
    """Return the last number of the last message, or nothing."""
    numbers = re.findall(r"\d+", str(messages[-1]["content"]))
    return numbers[-1] if numbers else ""


async def right(completion: list[Any], answer: str) -> float:
    """Return 1 for a right first answer, 0.5 for a right second one."""
    said = [message for message in completion if message["role"] == "assistant"]
    return float(last_number(said) == answer) / len(said)


class SecondTry(vf.MultiTurnEnv):
    """Says once that an answer is wrong."""

    @vf.stop
    async def solved(self, state: Any) -> bool:
        """Say whether the last answer is right."""
        turns = state["trajectory"]
        return bool(turns) and last_number(turns[-1]["completion"]) == state["answer"]

    async def env_response(self, messages: list[Any], state: Any, **more: Any) -> list[Any]:
        """Return what the policy is told of a wrong answer."""
        return [{"role": "user", "content": "No. Answer with the number alone."}]


def load_environment(seed: int = 1) -> vf.Environment:
    """Return the environment, as verifiers expects of a module."""
    pairs = list(itertools.product(range(1, 21), repeat=2))
    random.Random(seed).shuffle(pairs)
    rows = [{"question": f"What is {left} + {right}?", "answer": str(left + right)} for left, right in pairs]
    return SecondTry(
        dataset=Dataset.from_list(rows[HELD_OUT:]),
        eval_dataset=Dataset.from_list(rows[:HELD_OUT]),
        system_prompt="You add numbers.",
        rubric=vf.Rubric(funcs=[right]),
        max_turns=2,
    )
