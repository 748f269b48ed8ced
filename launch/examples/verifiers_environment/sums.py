"""An environment as users of verifiers write it: a sum, and a second try after a wrong answer."""

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
    if not numbers:
        return ""
    return numbers[-1]


async def correct(completion: list[Any], answer: str) -> float:
    """Return 1 for a correct first answer, 0.5 for a correct second one."""
    answers = [message for message in completion if message["role"] == "assistant"]
    # The reward is shared by the tries.
    return float(last_number(answers) == answer) / len(answers)


class SecondTry(vf.MultiTurnEnv):
    """Environment that corrects a wrong answer once."""

    @vf.stop
    async def solved(self, state: Any) -> bool:
        """Return whether the last answer is correct."""
        turns = state["trajectory"]
        return bool(turns) and last_number(turns[-1]["completion"]) == state["answer"]

    async def env_response(self, messages: list[Any], state: Any, **_: Any) -> list[Any]:
        """Return the message to the policy after a wrong answer."""
        return [{"role": "user", "content": "No. Answer with the number alone."}]


def load_environment(seed: int = 1) -> vf.Environment:
    """Return the environment, as verifiers expects of a module."""
    pairs = list(itertools.product(range(1, 21), repeat=2))
    random.Random(seed).shuffle(pairs)
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]

    # Records that are held out evaluate; no other record does.
    return SecondTry(
        dataset=Dataset.from_list(rows[HELD_OUT:]),
        eval_dataset=Dataset.from_list(rows[:HELD_OUT]),
        system_prompt="You add numbers.",
        rubric=vf.Rubric(funcs=[correct]),
        max_turns=2,
    )
