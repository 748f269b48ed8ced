"""Rules on data sets: present, of a kind that can be read, not empty, and whole where they begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.check.files import Files
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.records import (
    KINDS,
    Record,
    empty_error,
    missing_error,
    nothing_taught,
    read_responses,
    require_fields,
    require_responses,
    source_error,
    teaches_nothing,
    unreadable_error,
    values_of,
)
from megatron_rl.errors import UserError

LINES = 200
"""Lines at the start of a JSONL file that are read as records; training reads every one."""
LONGEST_LINE = 64 << 20
"""Bytes of a line that no record has."""
COUNTED_BYTES = 256 << 20
"""Larger files are not counted: `check` is to stay below five seconds."""
MAX_BROKEN = 5


@dataclass(frozen=True)
class DataPreview:
    """Hold what the start of a data set says: its first record, and its length where it is known."""

    first: Mapping[str, Any] | None
    count: int | None


def check_data(
    path: Path,
    where: str,
    data: DataConfig,
    files: Files,
    responses: Mapping[str, str] | None = None,
    every_turn: bool = False,
) -> DataPreview | None:
    """Check a data set whose records hold a prompt and what it is judged by, or instead ``responses``.

    These are the fields of responses with the settings that name them; `read_responses` says what
    ``every_turn`` is.
    """
    if not path.exists():
        files.miss(path, missing_error(path, where).message, where, KINDS)
        return None
    error = source_error(path, where)
    if error is not None:
        files.errors.append(error)
        return None
    if path.is_dir():
        return DataPreview(None, None)
    if path.suffix == ".jsonl":
        return _check_jsonl(path, where, data, responses or {}, every_turn, files)
    return _check_parquet(path, where, files)


def _check_jsonl(
    path: Path,
    where: str,
    data: DataConfig,
    responses: Mapping[str, str],
    every_turn: bool,
    files: Files,
) -> DataPreview | None:
    required = {**data.asked, **responses} if responses else data.judged
    first, total = None, 0
    broken: dict[tuple[str, str | None], UserError] = {}
    uninstructive: list[str] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE), b""), start=1):
                if number > LINES or len(broken) >= MAX_BROKEN:
                    break
                if len(line) == LONGEST_LINE:
                    problem = f"line {number} has {LONGEST_LINE >> 20} MiB or more"
                    files.errors.append(unreadable_error(path, where, problem, "name a file of records"))
                    return None
                if not line.strip():
                    continue
                place = f"{path}:{number}"
                try:
                    record = Record(values_of(line, f"{place} ({where})"), place)
                    if responses:
                        record = read_responses(record, data.prompt_field, responses, every_turn)
                    first, total = first or record.values, total + 1
                    require_fields(record, required, where)
                    require_responses(record, responses, where)
                    if responses and teaches_nothing(*(record.values[field] for field in responses)):
                        uninstructive.append(place)
                except UserError as error:
                    broken.setdefault((error.message, error.got), error)  # records of one kind: once
    except OSError as error:
        fix = "check the rights of the file and of its folders"
        files.errors.append(unreadable_error(path, where, str(error), fix))
        return None
    files.errors.extend(broken.values())
    if uninstructive:
        files.warnings.append(
            UserError(
                nothing_taught(uninstructive, total, len(responses) > 1),
                where=where,
                got=f"{', '.join(responses)} of {total} records at the start of the file",
                fix="correct or remove the records",
            )
        )
    if first is None and not broken:
        files.errors.append(empty_error(path, where))
        return None
    return DataPreview(first, _count_lines(path))


def _check_parquet(path: Path, where: str, files: Files) -> DataPreview | None:
    try:
        with path.open("rb") as stream:
            head = stream.read(4)
            size = path.stat().st_size
            stream.seek(max(0, size - 4))
            tail = stream.read(4)
    except OSError as error:
        head, tail, size = b"", b"", -1
        fix = "check the rights of the file and of its folders"
        files.errors.append(unreadable_error(path, where, str(error), fix))
    if size == 0:
        files.errors.append(empty_error(path, where))
        return None
    if size > 0 and (head, tail) != (b"PAR1", b"PAR1"):
        files.errors.append(
            UserError(
                f"{path} is not a whole Parquet file",
                where=where,
                expected="a file that begins and ends with PAR1",
                got=f"{head!r} ... {tail!r}, {size} bytes",
                fix="write or download the file again",
            )
        )
        return None
    return DataPreview(None, None)


def _count_lines(path: Path) -> int | None:
    if path.stat().st_size > COUNTED_BYTES:
        return None
    count, tail = 0, b"\n"
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            count += block.count(b"\n")
            tail = block[-1:]
    return count + (tail != b"\n")
