"""Write the task of the ablation: a model, and two kinds of problems with texts of mixed lengths.

    python benchmarks/ablation_task.py DIRECTORY

``addition`` has the quickstart's sums of two numbers, with answers of two digits. ``sorting`` has lists of 3
to 9 digits to sort, such as ``7,3,9=`` with the answer ``3,7,9``. The demonstrations have three mistakes that
reinforcement learning can correct: most sums forget to carry, most long lists lack their last digit, and a
tenth of all lists never stop. Every call writes the same bytes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_rl.data import quickstart

SEED = 1
"""Seed of the model's weights and of all problems."""
SHORTEST = 3
"""Number of digits of the shortest list."""
LONGEST = 9
"""Number of digits of the longest list."""
LONG = 6
"""Number of digits from which a list is long: its demonstrations may lack the last digit."""
CARELESS = 0.65
"""Fraction of the demonstrations of long lists that lack the last digit.

In the quickstart, the same fraction of the sums with a carry forget to carry.
"""
LOOPING = 0.1
"""Fraction of the demonstrations of lists that repeat the last digit instead of ending."""
REPETITIONS = (25, 30)
"""Minimum and maximum number of repetitions in a demonstration that repeats the last digit.

A repetition has two tokens, so such a response is longer than `max_response_tokens`.
"""
HELD_OUT = 250
"""Number of held-out problems of each task."""


def make(folder: Path) -> None:
    """Write ``model/`` and the data sets ``train``, ``eval`` and ``sft``.

    Each data set has equally many records of both tasks.
    """
    quickstart.write_inputs(folder, seed=SEED)
    sums = {name: _read(folder / f"{name}.jsonl") for name in ("train", "eval", "sft")}
    # The first half of the quickstart's held-out sums have a carry, and the others have none.
    sums["eval"] = sums["eval"][:: len(sums["eval"]) // HELD_OUT]

    generator = random.Random(SEED)
    held_out = _distinct_lists(generator, len(sums["eval"]), excluded=set())
    train = _distinct_lists(generator, len(sums["train"]), excluded=set(held_out))
    demonstrated = [_draw_digits(generator, excluded=set(held_out)) for _ in sums["sft"]]

    lists = {
        "train": [_problem(digits) for digits in train],
        "eval": [_problem(digits) for digits in held_out],
        "sft": [_demonstration(digits, generator) for digits in demonstrated],
    }
    for name, records in lists.items():
        _write(folder / f"{name}.jsonl", [*sums[name], *records])


def _draw_digits(generator: random.Random, excluded: set[tuple[int, ...]]) -> tuple[int, ...]:
    """Draw a list of distinct digits that is not in ``excluded``; every length is equally likely."""
    while True:
        digits = tuple(generator.sample(range(10), generator.randint(SHORTEST, LONGEST)))
        if digits not in excluded:
            return digits


def _distinct_lists(
    generator: random.Random, count: int, excluded: set[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Draw ``count`` different lists of digits that are not in ``excluded``."""
    # A dictionary keeps the order, unlike a set.
    lists: dict[tuple[int, ...], None] = {}
    while len(lists) < count:
        lists[_draw_digits(generator, excluded)] = None
    return list(lists)


def _prompt(digits: Sequence[int]) -> str:
    return ",".join(map(str, digits)) + "="


def _problem(digits: Sequence[int]) -> dict[str, str]:
    return {
        "prompt": _prompt(digits),
        "ground_truth": ",".join(map(str, sorted(digits))),
        "task": "sorting",
    }


def _demonstration(digits: Sequence[int], generator: random.Random) -> dict[str, str]:
    """Return a prompt with a response, which may lack the last digit and may never stop."""
    # The two mistakes are independent: a response may have both.
    answer = sorted(digits)
    if len(answer) >= LONG and generator.random() < CARELESS:
        answer.pop()

    response = ",".join(map(str, answer))
    if generator.random() < LOOPING:
        response += f",{answer[-1]}" * generator.randint(*REPETITIONS)
    return {"prompt": _prompt(digits), "response": response}


def _read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _write(path: Path, records: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
