"""Write problems of reasoning-gym as data sets: ``train.jsonl`` and ``eval.jsonl`` with other problems.

``python -m megatron_rl.data.reasoning_gym DIRECTORY --tasks leg_counting,basic_arithmetic`` needs
``pip install megatron_rl[reasoning-gym]``; `megatron_rl.rewards.reasoning_gym:score` judges the answers. The
same arguments write the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import EXIT_BAD_INPUT, UserError, nearest
from megatron_rl.launcher import report_errors

ASK = "\n\nEnd with the answer between <answer> and </answer>."


def make(directory: str | Path, tasks: Sequence[str], problems: int, held_out: int, seed: int) -> None:
    """Write ``problems`` problems to learn from and ``held_out`` others, of every task in turn.

    Raises UserError where the package is missing or does not have a task.
    """
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            "the package reasoning-gym is not installed",
            where="--tasks",
            expected="the package reasoning-gym",
            got=str(error),
            fix="pip install megatron_rl[reasoning-gym]",
        ) from None
    for task in tasks:
        if task not in DATASETS:
            close = nearest(task, DATASETS)
            raise UserError(
                f"reasoning-gym has no task {task!r}",
                where="--tasks",
                expected=f"some of its {len(DATASETS)} tasks, separated by commas",
                got=task,
                fix=f"did you mean {close}?" if close else f"for example {', '.join(sorted(DATASETS)[:5])}",
            )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    each = -(-(problems + held_out) // len(tasks))
    made = [create_dataset(task, size=each, seed=seed) for task in tasks]
    records = [
        _record(data[row], task) for row in range(each) for task, data in zip(tasks, made, strict=True)
    ]
    for name, part in (("eval", records[:held_out]), ("train", records[held_out : held_out + problems])):
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in part)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


def _record(entry: dict[str, Any], task: str) -> dict[str, Any]:
    return {
        "prompt": entry["question"].rstrip() + ASK,
        "ground_truth": str(entry["answer"]),
        "task": task,
        "entry": json.dumps(entry, default=str),
    }


def main() -> int:
    """Read the command line, write the files and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--tasks", required=True, help="names of reasoning-gym's tasks, separated by commas")
    parser.add_argument("--problems", type=int, default=2000, help="problems to learn from (2000)")
    parser.add_argument("--held-out", type=int, default=200, help="problems of eval.jsonl (200)")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    try:
        make(given.directory, given.tasks.split(","), given.problems, given.held_out, given.seed)
    except UserError as error:
        report_errors(error)
        return EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
