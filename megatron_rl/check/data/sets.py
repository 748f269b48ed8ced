"""Rules on data sets: present, of a kind that can be read, not empty, and whole as far as they are read."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rl.check.files import Files
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.forms import RecordReader
from megatron_rl.data.messages import nothing_taught, teaches_nothing
from megatron_rl.data.records import (
    KINDS,
    DataPath,
    Record,
    data_files,
    empty_error,
    missing_error,
    partial_warning,
    read_table,
    unreadable_error,
    values_of,
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
    """A data set to check: what its setting names, and the reader of its records.

    A prompt, with its response where there is one, has at most ``limit`` tokens by the setting
    ``limited_by``, None where that is not available.
    """

    source: DataPath
    reader: RecordReader
    limit: int | None = None
    limited_by: str = "data.max_prompt_tokens"

    @property
    def where(self) -> str:
        """Return the setting that names the data set."""
        return self.reader.setting

    @property
    def data(self) -> DataConfig:
        """Return the settings of its fields."""
        return self.reader.data

    @property
    def responses(self) -> Mapping[str, str]:
        """Return the fields of responses with the settings that name them."""
        return self.reader.responses


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

    def takes(self, files: Sequence[Path]) -> int | None:
        """Return how many bytes of a data set are read, None for all; they are taken from the rest."""
        size = 0
        for path in files:
            inside = path.rglob("*") if path.is_dir() else (path,)
            bytes_of_path = sum(file.stat().st_size for file in inside if file.is_file())
            size += bytes_of_path if path.suffix == ".jsonl" else bytes_of_path * (WHOLE_BYTES // WHOLE_TABLE)

        complete = size <= self.left
        taken = min(size, self.left)
        self.left -= taken
        return None if complete else taken


def check_data(described: DataSet, files: Files, reading: Reading) -> DataPreview | None:
    """Check a data set; return what was read, None where it cannot be."""
    where = described.where
    missing = _missing(described.source)
    if missing is not None:
        error = missing_error(missing, where)
        files.miss(missing, error.message, where, KINDS, error.fix or "")
        return None
    try:
        paths = data_files(described.source, where)
        for path in paths:
            problem = _parquet_error(path, where) if path.is_file() and path.suffix == ".parquet" else None
            if problem is not None:
                raise problem
        partial = partial_warning(described.source, paths, where)
        files.warnings.extend([partial] if partial else [])
        return _check_records(described, paths, files, reading.takes(paths))
    except OSError as problem:
        fix = "check the rights of the file and of its folders"
        first = described.source if isinstance(described.source, str | Path) else described.source[0]
        files.errors.append(unreadable_error(Path(first), where, str(problem), fix))
    except ImportError:  # a machine that only checks may lack what reads tables
        return DataPreview(None, None)
    except UserError as problem:
        files.errors.append(problem)
    return None


def _missing(source: DataPath) -> Path | None:
    """Return the first path that a setting names and that does not exist, None where all do."""
    for item in [source] if isinstance(source, str | Path) else source:
        path = Path(item)
        if not path.exists() and not (glob.has_magic(str(path)) and glob.glob(str(path), recursive=True)):
            return path
    return None


def _check_records(
    described: DataSet, paths: Sequence[Path], files: Files, most: int | None
) -> DataPreview | None:
    where = described.where
    first, total, records = None, 0, list[Record]()
    broken: dict[tuple[str, str | None], UserError] = {}
    for item in _found(paths, where, most):
        if len(broken) >= MAX_BROKEN:
            break
        try:
            total += 1
            if isinstance(item, UserError):
                raise item
            first = first or item.values
            records.append(described.reader.read(item))
        except UserError as problem:
            broken.setdefault((problem.message, problem.got), problem)  # records of one kind: once

    files.errors.extend(broken.values())
    if not broken:  # records that are not read as they are meant have other fields left over
        files.warnings.extend(described.reader.remarks())
    files.warnings.extend(_uninstructive(described, records))
    if first is None and not broken:
        files.errors.append(empty_error(described.source, where))
        return None

    first = records[0].values if records else first
    count = total if most is None and not broken else _count_records(paths) if most is not None else None
    return DataPreview(first, count, records)


def _found(paths: Sequence[Path], where: str, most: int | None) -> Iterator[Record | UserError]:
    """Yield the records of files, or what is wrong with a line: all, or the first of every file.

    ``most`` is the number of bytes of text that are read, None for all.
    """
    each = None if most is None else most // len(paths)
    fewest = max(1, FEWEST // len(paths))
    for path in paths:
        if path.is_file() and path.suffix == ".jsonl":
            yield from _lines(path, where, each, fewest)
        else:
            yield from islice(read_table(path), None if most is None else fewest)


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


def _lines(path: Path, where: str, most: int | None, fewest: int) -> Iterator[Record | UserError]:
    """Yield each line's record, or what is wrong with the line; raises UserError where there is no end.

    The lines end after ``most`` bytes, and after ``fewest`` lines at the earliest.
    """
    read = 0
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE), b""), start=1):
            read += len(line)
            if most is not None and read > most and number > fewest:
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


def _count_records(paths: Sequence[Path]) -> int | None:
    """Return the number of lines of all files, None where one of them is a table or too large to count."""
    counts = [_count_lines(path) if path.suffix == ".jsonl" else None for path in paths]
    return None if None in counts else sum(filter(None, counts))


def _count_lines(path: Path) -> int | None:
    if path.stat().st_size > COUNTED_BYTES:
        return None
    count, tail = 0, b"\n"
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            count += block.count(b"\n")
            tail = block[-1:]
    return count + (tail != b"\n")
