"""Write records as another project has them: other field names, and two kinds of problems.

python launch/examples/own_data/make.py DIRECTORY
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

HELD_OUT, SHOWN = 100, 400


def records() -> list[dict[str, object]]:
    """Return sums of two-digit and of one-digit numbers, in an order that is always the same."""
    problems = [(left, right, "long") for left in range(10, 50) for right in range(10, 50)]
    problems += [(left, right, "short") for left in range(1, 10) for right in range(1, 10)]
    random.Random(0).shuffle(problems)
    return [
        {
            "question": f"{left}+{right}=",
            "reward_model": {"ground_truth": str(left + right)},
            "answer": str(left + right),
            "data_source": kind,
        }
        for left, right, kind in problems
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    made = records()
    shown = [{"question": row["question"], "response": row["answer"]} for row in made[-SHOWN:]]
    for name, rows in (("eval", made[:HELD_OUT]), ("train", made[HELD_OUT:]), ("sft", shown)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
