"""Write a prompt for every record of a verifiers environment: ``train.jsonl`` and ``eval.jsonl``.

python launch/examples/verifiers_environment/make.py DIRECTORY CLASS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import env

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    environment = getattr(env, sys.argv[2]).environment
    data_sets = {
        "train": environment.get_dataset(),
        "eval": environment.get_eval_dataset(),
    }
    for name, data in data_sets.items():
        # The environment opens the conversation itself: it finds its record by the row.
        records = [
            {
                "prompt": str(record["prompt"][-1]["content"]),
                "ground_truth": str(record["answer"]),
                "row": row,
                "held_out": name == "eval",
            }
            for row, record in enumerate(data)
        ]
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / f"{name}.jsonl").write_text("".join(lines))
