"""Rules on data sets: present, of a kind that can be read, not empty, and whole where they begin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
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
    read_table,
    require_fields,
    require_responses,
    source_error,
    teaches_nothing,
    unreadable_error,
    values_of,
    with_inner,
)
from megatron_rl.errors import UserError

ROWS = 200
"""Records at the start of a data set that are read; training reads every one."""
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
    try:
        problem = _parquet_error(path, where) if path.is_file() and path.suffix == ".parquet" else None
        if problem is None:
            return _check_records(path, where, data, responses or {}, every_turn, files)
        files.errors.append(problem)
    except OSError as problem:
        fix = "check the rights of the file and of its folders"
        files.errors.append(unreadable_error(path, where, str(problem), fix))
    except ImportError:  # a machine that only checks may lack what reads tables
        return DataPreview(None, None)
    except UserError as problem:
        files.errors.append(problem)
    return None


def _check_records(
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
    jsonl = path.is_file() and path.suffix == ".jsonl"
    for found in islice(_lines(path, where) if jsonl else read_table(path), ROWS):
        if len(broken) >= MAX_BROKEN:
            break
        error = found if isinstance(found, UserError) else None
        if isinstance(found, Record):
            try:
                record = with_inner(found, (*data.of_prompts, *responses))
                if responses:
                    record = read_responses(record, data.prompt_field, responses, every_turn)
                first, total = first or record.values, total + 1
                require_fields(record, required, where)
                require_responses(record, responses, where)
                if responses and teaches_nothing(*(record.values[field] for field in responses)):
                    uninstructive.append(record.where)
            except UserError as problem:
                error = problem
        if error is not None:
            broken.setdefault((error.message, error.got), error)  # records of one kind: once
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
    return DataPreview(first, _count_lines(path) if jsonl else None)


def _lines(path: Path, where: str) -> Iterator[Record | UserError]:
    """Yield each line's record, or what is wrong with the line; raises UserError where there is no end."""
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE), b""), start=1):
            if len(line) == LONGEST_LINE:
                problem = f"line {number} has {LONGEST_LINE >> 20} MiB or more"
                raise unreadable_error(path, where, problem, "name a file of records")
            if line.strip():
                place = f"{path}:{number}"
                try:
                    yield Record(values_of(line, f"{place} ({where})"), place)
                except UserError as error:
                    yield error


def _parquet_error(path: Path, where: str) -> UserError | None:
    """Return what is wrong with a Parquet file by its ends; raises OSError where it cannot be read."""
    with path.open("rb") as stream:
        head = stream.read(4)
        size = path.stat().st_size
        stream.seek(max(0, size - 4))
        tail = stream.read(4)
    if size == 0:
        return empty_error(path, where)
    if (head, tail) == (b"PAR1", b"PAR1"):
        return None
    return UserError(
        f"{path} is not a whole Parquet file",
        where=where,
        expected="a file that begins and ends with PAR1",
        got=f"{head!r} ... {tail!r}, {size} bytes",
        fix="write or download the file again",
    )


def _count_lines(path: Path) -> int | None:
    if path.stat().st_size > COUNTED_BYTES:
        return None
    count, tail = 0, b"\n"
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            count += block.count(b"\n")
            tail = block[-1:]
    return count + (tail != b"\n")
