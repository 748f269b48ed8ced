"""Write records as another project has them: other field names, and two kinds of problems.

python launch/examples/own_data/make.py DIRECTORY
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

HELD_OUT = 100
"""Records of the evaluation set."""
DEMONSTRATIONS = 400
"""Records of the supervised warm-up."""


def records() -> list[dict[str, object]]:
    """Return sums of two-digit and of one-digit numbers, in an order that is always the same."""
    problems = [(a, b, "long") for a in range(10, 50) for b in range(10, 50)]
    problems += [(a, b, "short") for a in range(1, 10) for b in range(1, 10)]
    # A generator of its own: the records do not depend on other code that draws numbers.
    random.Random(0).shuffle(problems)

    rows: list[dict[str, object]] = []
    for a, b, kind in problems:
        answer = str(a + b)
        row = {
            "question": f"{a}+{b}=",
            "reward_model": {"ground_truth": answer},
            "answer": answer,
            "data_source": kind,
        }
        rows.append(row)
    return rows


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    rows = records()

    # The warm-up is on the last records of the training set; the evaluation set is held out of both.
    warm_up = [{"question": row["question"], "response": row["answer"]} for row in rows[-DEMONSTRATIONS:]]
    files = {
        "eval": rows[:HELD_OUT],
        "train": rows[HELD_OUT:],
        "sft": warm_up,
    }
    for name, file_rows in files.items():
        lines = [json.dumps(row) + "\n" for row in file_rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
