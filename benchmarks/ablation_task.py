"""Write the task of the ablation: a model, and two kinds of problems with texts of mixed lengths.

    python benchmarks/ablation_task.py DIRECTORY

``addition`` has the quickstart's sums of two numbers, with answers of two digits. ``sorting`` has lists of 3
to 9 digits to sort, such as ``7,3,9=`` with the answer ``3,7,9``. The demonstrations have three habits that
reinforcement learning can unlearn: most sums forget to carry, most long lists lack their last digit, and a
tenth of all lists never stop. The same directory gets the same bytes each time.
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
"""Digits of the shortest list."""
LONGEST = 9
"""Digits of the longest list."""
LONG = 6
"""Digits of the shortest list whose demonstrations may lack the last digit."""
CARELESS = 0.65
"""Share of the demonstrations of long lists that lack the last digit, as of those that drop a carry."""
LOOPING = 0.1
"""Share of the demonstrations of lists that repeat their last digit instead of ending."""
REPETITIONS = (25, 30)
"""Fewest and most repetitions of such a demonstration, two tokens each: longer than `max_response_tokens`."""
HELD_OUT = 250
"""Held-out problems of each task."""


def make(folder: Path) -> None:
    """Write ``model/`` and ``train``, ``eval`` and ``sft``, each with equally many records of both tasks."""
    quickstart.write_inputs(folder, seed=SEED)
    sums = {name: _read(folder / f"{name}.jsonl") for name in ("train", "eval", "sft")}
    # The first half of the quickstart's held-out sums have a carry, and the others have none.
    sums["eval"] = sums["eval"][:: len(sums["eval"]) // HELD_OUT]

    generator = random.Random(SEED)
    held_out = _distinct_lists(generator, len(sums["eval"]), excluded=set())
    train = _distinct_lists(generator, len(sums["train"]), excluded=set(held_out))
    demonstrated = [_digits(generator, excluded=set(held_out)) for _ in sums["sft"]]

    lists = {
        "train": [_problem(digits) for digits in train],
        "eval": [_problem(digits) for digits in held_out],
        "sft": [_demonstration(digits, generator) for digits in demonstrated],
    }
    for name, records in lists.items():
        _write(folder / f"{name}.jsonl", [*sums[name], *records])


def _digits(generator: random.Random, excluded: set[tuple[int, ...]]) -> tuple[int, ...]:
    """Return distinct digits in a random order that is not ``excluded``; every length is equally likely."""
    while True:
        digits = tuple(generator.sample(range(10), generator.randint(SHORTEST, LONGEST)))
        if digits not in excluded:
            return digits


def _distinct_lists(
    generator: random.Random, count: int, excluded: set[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Return ``count`` different lists of digits."""
    # A dictionary keeps the order, unlike a set.
    lists: dict[tuple[int, ...], None] = {}
    while len(lists) < count:
        lists[_digits(generator, excluded)] = None
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
    """Return a prompt with a response, which may lack the last digit and may repeat its own last digit."""
    # Both habits are independent: a list may lack its last digit and never stop.
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
