"""Rules on data sets: present, of a kind that can be read, not empty, and whole as far as they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rl.check.files import Files
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.messages import require_prompt, require_template_for
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

FEWEST = 200
"""Records at the start of a data set that are read, however large it is."""
WHOLE_BYTES, WHOLE_TABLE = 16 << 20, 4 << 20
"""Bytes of all data sets together, of text and of tables, that are read to the end: for seconds' work."""
LONGEST_LINE = 64 << 20
"""Bytes of a line that no record has."""
COUNTED_BYTES = 256 << 20
"""Larger files are not counted: `check` is to stay below five seconds."""
MAX_BROKEN = 5


@dataclass(frozen=True)
class DataSet:
    """Name a data set: its path, the setting ``where`` that says it, its fields, and what a record may have.

    Its records hold a prompt and what it is judged by, or instead ``responses``: the fields of responses with
    the settings that name them; `read_responses` says what ``every_turn`` is. A prompt, with its response
    where there is one, has at most ``limit`` tokens by the setting ``limited_by``, None where that is not
    known.
    """

    path: Path
    where: str
    data: DataConfig
    limit: int | None = None
    limited_by: str = "data.max_prompt_tokens"
    responses: Mapping[str, str] = field(default_factory=dict[str, str])
    every_turn: bool = False

    def read(self, found: Record) -> Record:
        """Return a record with its fields in place; raises UserError for one that is none of this data."""
        data, responses = self.data, self.responses
        record = with_inner(found, (*data.of_prompts, *responses))
        if responses:
            record = read_responses(record, data.prompt_field, responses, self.every_turn)
        required = {**data.asked, **responses} if responses else data.judged
        require_fields(record, required, self.where)
        require_prompt(record, data, self.where)
        require_responses(record, responses, self.where)
        require_template_for(record, responses, data, self.where)
        return record


@dataclass(frozen=True)
class DataPreview:
    """Hold what was read of a data set: its first record as it stands, those that are whole, and its length.

    ``count`` is None where they were not counted.
    """

    first: Mapping[str, Any] | None
    count: int | None
    records: Sequence[Record] = ()


@dataclass
class Reading:
    """Hold how many bytes of data sets are still read to their ends; 0 reads the first records alone."""

    left: int = field(default_factory=lambda: WHOLE_BYTES)

    def takes(self, path: Path) -> int | None:
        """Return how many bytes of a data set are read, None for all; they are taken from the rest."""
        files = path.rglob("*") if path.is_dir() else (path,)
        size = sum(file.stat().st_size for file in files if file.is_file())
        if path.suffix != ".jsonl":
            size *= WHOLE_BYTES // WHOLE_TABLE
        whole, taken = size <= self.left, min(size, self.left)
        self.left -= taken
        return None if whole else taken


def check_data(described: DataSet, files: Files, reading: Reading) -> DataPreview | None:
    """Check a data set; return what was read, None where it cannot be."""
    path, where = described.path, described.where
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
            return _check_records(described, files, reading.takes(path))
        files.errors.append(problem)
    except OSError as problem:
        fix = "check the rights of the file and of its folders"
        files.errors.append(unreadable_error(path, where, str(problem), fix))
    except ImportError:  # a machine that only checks may lack what reads tables
        return DataPreview(None, None)
    except UserError as problem:
        files.errors.append(problem)
    return None


def _check_records(described: DataSet, files: Files, most: int | None) -> DataPreview | None:
    path, where = described.path, described.where
    first, total, records = None, 0, list[Record]()
    broken: dict[tuple[str, str | None], UserError] = {}
    jsonl = path.is_file() and path.suffix == ".jsonl"
    found, whole = _lines(path, where, most) if jsonl else read_table(path), most is None or jsonl
    for item in found if whole else islice(found, FEWEST):
        if len(broken) >= MAX_BROKEN:
            break
        try:
            total += 1
            if isinstance(item, UserError):
                raise item
            first = first or item.values
            records.append(described.read(item))
        except UserError as problem:
            broken.setdefault((problem.message, problem.got), problem)  # records of one kind: once
    files.errors.extend(broken.values())
    files.warnings.extend(_uninstructive(described, records))
    if first is None and not broken:
        files.errors.append(empty_error(path, where))
        return None
    counted = _count_lines(path) if jsonl and most is not None else None
    first = records[0].values if records else first
    return DataPreview(first, total if most is None and not broken else counted, records)


def _uninstructive(described: DataSet, records: Sequence[Record]) -> Iterator[UserError]:
    """Yield the warning of responses that teach nothing."""
    fields = described.responses
    empty = [
        record.where
        for record in records
        if fields and teaches_nothing(*(record.values[field] for field in fields))
    ]
    if empty:
        yield UserError(
            nothing_taught(empty, len(records), len(fields) > 1),
            where=described.where,
            got=f"{', '.join(fields)} of {len(records)} records that were read",
            fix="correct or remove the records",
        )


def _lines(path: Path, where: str, most: int | None) -> Iterator[Record | UserError]:
    """Yield each line's record, or what is wrong with the line; raises UserError where there is no end.

    The lines end after ``most`` bytes, and after `FEWEST` lines at the earliest.
    """
    read = 0
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE), b""), start=1):
            read += len(line)
            if most is not None and read > most and number > FEWEST:
                return
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
