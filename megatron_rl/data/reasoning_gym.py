"""Write problems of reasoning-gym as data sets: ``train.jsonl``, and ``eval.jsonl`` with other problems.

``python -m megatron_rl.data.reasoning_gym DIRECTORY --tasks leg_counting,basic_arithmetic`` needs
``pip install megatron_rl[reasoning-gym]``. The reward function for these data sets is
`megatron_rl.rewards.reasoning_gym:score`. The same arguments write the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import EXIT_BAD_INPUT, UserError, nearest, not_installed_error
from megatron_rl.launcher import report_errors

_INSTRUCTION = "\n\nEnd with the answer between <answer> and </answer>."


def write_data_sets(
    directory: str | Path, tasks: Sequence[str], problems: int, held_out: int, seed: int
) -> None:
    """Write ``train.jsonl`` and ``eval.jsonl`` with problems of reasoning-gym, alternating between ``tasks``.

    ``problems`` is the number of problems in ``train.jsonl``, and ``held_out`` the number in ``eval.jsonl``.
    Raises UserError if the package reasoning-gym is not installed or lacks a task.
    """
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    except ImportError:
        fix = "pip install megatron_rl[reasoning-gym]"
        raise not_installed_error("reasoning-gym", "--tasks", purpose="its problems", fix=fix) from None
    for task in tasks:
        if task not in DATASETS:
            raise _unknown_task_error(task, sorted(DATASETS))

    # Alternate between the tasks, so that both files have problems of every task.
    problems_per_task = math.ceil((problems + held_out) / len(tasks))
    data_sets = [create_dataset(task, size=problems_per_task, seed=seed) for task in tasks]
    records = []
    for index in range(problems_per_task):
        for task, data_set in zip(tasks, data_sets, strict=True):
            records.append(_make_record(data_set[index], task))

    # The first problems are held out.
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _write_jsonl(directory / "eval.jsonl", records[:held_out])
    _write_jsonl(directory / "train.jsonl", records[held_out : held_out + problems])


def _unknown_task_error(task: str, tasks: Sequence[str]) -> UserError:
    """Return the error for a task that is not among reasoning-gym's ``tasks``."""
    suggestion = nearest(task, tasks)
    fix = f"for example {', '.join(tasks[:5])}"
    if suggestion is not None:
        fix = f"did you mean {suggestion}?"
    return UserError(
        f"reasoning-gym has no task {task!r}",
        where="--tasks",
        expected=f"some of its {len(tasks)} tasks, separated by commas",
        got=task,
        fix=fix,
    )


def _write_jsonl(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write records to a file, one JSON object per line."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")


def _make_record(problem: dict[str, Any], task: str) -> dict[str, Any]:
    """Convert a problem of reasoning-gym to a record; the reward reads the complete problem in ``entry``."""
    return {
        "prompt": problem["question"].rstrip() + _INSTRUCTION,
        "ground_truth": str(problem["answer"]),
        "task": task,
        "entry": json.dumps(problem, default=str),
    }


def main() -> int:
    """Parse the command line, write the files of problems, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--tasks", required=True, help="names of reasoning-gym's tasks, separated by commas")
    parser.add_argument("--problems", type=int, default=2000, help="problems to train on (2000)")
    parser.add_argument("--held-out", type=int, default=200, help="problems of eval.jsonl (200)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    # Report errors of the user as messages, without a traceback.
    try:
        tasks = options.tasks.split(",")
        write_data_sets(options.directory, tasks, options.problems, options.held_out, options.seed)
    except UserError as error:
        report_errors(error)
        return EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
