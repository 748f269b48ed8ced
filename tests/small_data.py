"""The quickstart's model and data with few records: `check` and each rank of a run read all of them."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.data import quickstart

RECORDS = 400
"""Records of each data set; the quickstart's own demonstrations are 21,920."""


def make(folder: Path, size: str = "small") -> Path:
    """Write model and data into a folder and return it."""
    quickstart.write_inputs(folder, size)
    for file in folder.glob("*.jsonl"):
        shorten(file, file)
    return folder


def shorten(source: Path, target: Path) -> None:
    """Write the first records of a data set to ``target``."""
    with source.open() as lines:
        # `zip` ends after `RECORDS` lines, or with a shorter file.
        first = [line for line, _ in zip(lines, range(RECORDS), strict=False)]
    target.write_text("".join(first))
