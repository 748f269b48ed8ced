"""Selection of the stored samples that a report shows.

The one idea: a page cannot have every sample of a long run, so it has some of every step, and says of how
many: the worst, the best, the longest and the invalid ones, then the other samples of their groups, then
others.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config.run_folder import RunFolder
from megatron_rl.durable import require_file
from megatron_rl.errors import first_line

if TYPE_CHECKING:
    from pyarrow import Table

SAMPLES = 2000
"""Samples of a page, as long as every file has `MIN_SAMPLES_OF_A_STEP`."""
SAMPLES_OF_A_STEP = 32
"""Samples of one file at most."""
MIN_SAMPLES_OF_A_STEP = 4
"""Samples of one file at least: one for each of `MARKS`."""
MARKS = ("worst", "best", "longest", "invalid")
"""Kinds of samples that every step has on the page, if it has them at all."""
MAX_TEXT_CHARACTERS = 4000
"""Length to which a text of a sample is cut."""
_MIN_TEXT_CHARACTERS = 200
"""The same on the page of a run with many steps."""
_PAGE_CHARACTERS = 24_000_000
"""Length of all texts of a page, from which their cut follows."""
_COMPONENT = "component/"
"""Prefix of the columns with the components of a reward."""
TRAINING = "training"
"""Set of the samples of steps, beside the names of evaluation sets."""

FINISH_REASONS = ("stop", "length", "failed")
"""Names of `FINISH_STOP`, `FINISH_LENGTH` and `FINISH_FAILED` of `megatron_rl.types`."""


@dataclass(frozen=True)
class StoredSamples:
    """Samples of a report.

    Example: a run with one step of 512 samples has 32 ``rows`` and the ``counts``
    ``[{"set": "training", "step": 1, "stored": 512, "shown": 32}]``.
    """

    rows: list[dict[str, Any]]
    """Samples in the format of `page.sample_browser`, by set and step."""
    counts: list[dict[str, Any]]
    """Numbers of stored and shown samples of each set and step."""
    unreadable: list[str]
    """A line for each file that cannot be read, such as one that a crash of the machine has torn."""


def stored_samples(folder: RunFolder) -> StoredSamples:
    """Return samples of every step and evaluation of a run, with long texts cut."""
    files: list[tuple[str, int, Path]] = []
    for path in folder.rollouts.glob("*.parquet"):
        kind, _, step = path.stem.rpartition("_")
        if step.isdecimal():
            files.append((kind, int(step), path))
    files.sort()

    # Each file has `MIN_SAMPLES_OF_A_STEP` at least: of more files than the page has room for, take every
    # stride-th of a kind. Select backwards, so that the last one of each kind is always included.
    stride = max(1, -(-len(files) * MIN_SAMPLES_OF_A_STEP // SAMPLES))
    selected: list[tuple[str, int, Path]] = []
    for kind in dict.fromkeys(kind for kind, _, _ in files):
        files_of_kind = [file for file in files if file[0] == kind]
        selected += files_of_kind[::-stride][::-1]
    files = selected

    # The more files, the fewer samples of each, and the shorter their texts.
    limit = min(SAMPLES_OF_A_STEP, max(MIN_SAMPLES_OF_A_STEP, SAMPLES // max(1, len(files))))
    characters = _PAGE_CHARACTERS // max(1, 2 * limit * len(files))
    characters = min(MAX_TEXT_CHARACTERS, max(_MIN_TEXT_CHARACTERS, characters))

    samples = StoredSamples([], [], [])
    for kind, step, path in files:
        try:
            rows, stored = read_samples(kind, step, path, limit, characters)
        except Exception as error:  # anything that pyarrow, or a row with an unexpected structure, raises
            reason = first_line(error)
            samples.unreadable.append(f"{path.name} is omitted, since it cannot be read: {reason}")
            continue
        samples.rows.extend(rows)
        count = {"set": _set_name(kind), "step": step, "stored": stored, "shown": len(rows)}
        samples.counts.append(count)
    return samples


def read_samples(
    kind: str, step: int, path: Path, limit: int, characters: int = MAX_TEXT_CHARACTERS
) -> tuple[list[dict[str, Any]], int]:
    """Return at most ``limit`` samples of a file, and the number of samples in the file.

    ``characters``: length to which texts are cut.
    """
    import pyarrow.parquet

    require_file(path)
    table = pyarrow.parquet.read_table(path)
    rewards = [
        _trained_reward(reward, is_valid)
        for reward, is_valid in zip(_column(table, "reward"), _column(table, "valid"), strict=True)
    ]
    lengths = _numbers(table, "length")
    groups = _column(table, "group")
    marks = select_rows(rewards, lengths, groups, limit, spread=kind == "step")
    if "reward" not in table.column_names:
        marks = {row: [] for row in marks}

    # Count the complete groups, since only a part of a group may be selected.
    sizes = Counter(groups)

    # Only the selected rows are converted to Python: texts are long.
    rows = table.take(list(marks)).to_pylist()
    samples = [
        _sample(row, _set_name(kind), step, row_marks, characters)
        for row, row_marks in zip(rows, marks.values(), strict=True)
    ]
    for sample in samples:
        sample["group_size"] = sizes[sample["group"]]
    return samples, table.num_rows


def select_rows(
    rewards: Sequence[float | None],
    lengths: Sequence[float | None],
    groups: Sequence[Any],
    limit: int,
    *,
    spread: bool,
) -> dict[int, list[str]]:
    """Return at most ``limit`` rows in ascending order, each with its marks.

    Marked rows come first, then the other rows of their groups. The remaining ones are ``spread`` over the
    file, or else its first ones, which in an evaluation set have the same prompts in every step.

    Example:
        >>> select_rows([0.0, 1.0, None, 1.0], [3, 9, 5, 4], [0, 0, 1, 1], 3, spread=True)
        {0: ['worst'], 1: ['best', 'longest'], 2: ['invalid']}
    """
    count = len(rewards)
    valid = [row for row in range(count) if rewards[row] is not None]
    with_length = [row for row in range(count) if lengths[row] is not None]
    # Sorting is stable: of equal rows the first ones are selected.
    ranked = {
        "worst": sorted(valid, key=lambda row: rewards[row] or 0.0),
        "best": sorted(valid, key=lambda row: -(rewards[row] or 0.0)),
        "longest": sorted(with_length, key=lambda row: -(lengths[row] or 0.0)),
        "invalid": [row for row in range(count) if rewards[row] is None],
    }

    # Two rows of each kind, as far as there is room for the complete groups of some of them.
    of_each = 1
    if min(limit, count) >= 4 * len(MARKS):
        of_each = 2
    marks: dict[int, list[str]] = {}
    for index in range(of_each):
        for mark in MARKS:
            for row in ranked[mark][index : index + 1]:
                marks.setdefault(row, []).append(mark)

    # All candidates in order of importance; a dict drops repeated rows and keeps the order.
    marked_groups = list(dict.fromkeys(groups[row] for row in marks if groups[row] is not None))
    siblings = [row for group in marked_groups for row in range(count) if groups[row] == group]
    stride = 1
    if spread:
        stride = max(1, -(-count // limit))
    candidates = [*marks, *siblings, *range(0, count, stride), *range(count)]
    selected = sorted(list(dict.fromkeys(candidates))[:limit])
    return {row: marks.get(row, []) for row in selected}


def _column(table: Table, name: str) -> list[Any]:
    """Return the values of a column, None for each row without it."""
    if name not in table.column_names:
        return [None] * table.num_rows
    return table.column(name).to_pylist()


def _numbers(table: Table, name: str) -> list[float | None]:
    """Return the finite numbers of a column: NaN is a failed reward."""
    return [_finite(value) for value in _column(table, name)]


def _trained_reward(reward: float | None, is_valid: bool | None) -> float | None:
    """Return the finite reward of a row, or None if the row was not trained on.

    Such a row can have a reward: for example one without log-probs of a teacher's server. ``is_valid`` is
    None in files without the column.
    """
    if is_valid is False:
        return None
    return _finite(reward)


def _finite(value: float | None) -> float | None:
    """Return a number with six decimals, or None for NaN and infinity, which JSON does not have."""
    if value is None or not math.isfinite(value):
        return None
    return round(value, 6)


def _set_name(kind: str) -> str:
    """Return the set of a file's samples: `TRAINING`, or the name of an evaluation set."""
    if kind == "step":
        return TRAINING
    return kind.removeprefix("eval_")


def _sample(
    row: dict[str, Any], set_name: str, step: int, marks: Sequence[str], characters: int
) -> dict[str, Any]:
    """Convert a row of a samples file to the format of `page.sample_browser`."""
    finish = row.get("finish_reason")
    if finish is not None:
        finish = FINISH_REASONS[finish]
    components = {
        name.removeprefix(_COMPONENT): _finite(value)
        for name, value in row.items()
        if name.startswith(_COMPONENT)
    }

    return {
        "set": set_name,
        "step": step,
        "prompt": _cut(row.get("prompt"), characters),
        "response": _cut(row.get("response"), characters),
        "truth": _cut_optional(row.get("ground_truth"), characters),
        "reward": _trained_reward(row.get("reward"), row.get("valid")),
        "components": components,
        "advantage": _finite(row.get("advantage")),
        "length": row.get("length"),
        "finish": finish,
        "turns": _turns(row.get("conversation"), characters),
        "failure": _cut_optional(row.get("failure"), characters),
        "group": row.get("group"),
        "marks": list(marks),
    }


def _turns(conversation: Any, characters: int) -> list[dict[str, Any]] | None:
    """Return the turns of a stored conversation, or None for a single response."""
    if conversation is None:
        return None

    # A column whose values have no common Parquet type is stored as JSON.
    turns = conversation
    if isinstance(conversation, str):
        turns = json.loads(conversation)
    return [
        {
            "role": turn["role"],
            "content": _cut(turn["content"], characters),
            "tokens": turn["tokens"],
            "calls": [
                _cut(f"{call['function']['name']} {call['function']['arguments']}", characters)
                for call in turn.get("tool_calls") or ()
            ],
        }
        for turn in turns
    ]


def _cut(value: Any, characters: int) -> str:
    """Return a value as text of at most ``characters``, with the number of characters cut off."""
    text = str(value)
    surplus = len(text) - characters
    if surplus <= 0:
        return text
    return f"{text[:characters]} … ({surplus} more characters)"


def _cut_optional(value: Any, characters: int) -> str | None:
    return None if value is None else _cut(value, characters)
