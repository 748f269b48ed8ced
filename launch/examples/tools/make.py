"""Write products to ask for, and demonstrations of a policy that calls the tool and may misread its answer.

python launch/examples/tools/make.py DIRECTORY
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

HELD_OUT = 64


def demonstrations(a: int, b: int, generator: random.Random) -> list[dict[str, str]]:
    """Return the two turns of a conversation: the call of the tool, and the answer after its result."""
    prompt = f"{a}*{b}="
    call = prompt
    product = str(a * b)

    # One answer in three misreads the tool, so that there is something to learn.
    answer = product
    if generator.random() < 1 / 3:
        answer = str(a * b + 1)

    # The row of a conversation has the tokens as they were sampled: <eos> ends the policy's first turn.
    second_prompt = f"{prompt}{call}<eos>{product},"
    return [
        {"prompt": prompt, "response": call},
        {"prompt": second_prompt, "response": answer},
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    pairs = [(a, b) for a in range(10, 50) for b in range(2, 10)]
    generator.shuffle(pairs)
    problems = [
        {
            "prompt": f"{a}*{b}=",
            "ground_truth": str(a * b),
            "task": "product",
        }
        for a, b in pairs
    ]

    # No held-out problem is demonstrated.
    turns = []
    for _ in range(8):
        for a, b in pairs[HELD_OUT:]:
            turns += demonstrations(a, b, generator)
    files = {
        "eval": problems[:HELD_OUT],
        "train": problems[HELD_OUT:],
        "sft": turns,
    }
    for name, rows in files.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
