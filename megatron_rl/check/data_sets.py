"""Rules on data sets: present, of a kind that can be read, not empty, and whole where they begin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.check.files import Files
from megatron_rl.data.records import require_characters
from megatron_rl.errors import UserError, nearest

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


def check_data(path: Path, where: str, required: Mapping[str, str], files: Files) -> DataPreview | None:
    """Check a data set; ``required`` maps a field that records must hold to the setting that names it."""
    if not path.exists():
        files.miss(
            path,
            f"the data set {path} does not exist",
            where,
            "a .jsonl or .parquet file, or a directory saved by HF datasets",
        )
        return None
    if path.is_dir():
        return _check_directory(path, where, files)
    if not path.is_file():
        files.errors.append(_unreadable(path, where, "a pipe, a socket or a device"))
        return None
    if path.suffix == ".jsonl":
        return _check_jsonl(path, where, required, files)
    if path.suffix == ".parquet":
        return _check_parquet(path, where, files)
    files.errors.append(
        UserError(
            f"{path} is of no kind that can be read",
            where=where,
            expected=".jsonl, .parquet, or a directory saved by HF datasets",
            got=path.suffix or "a file without a suffix",
            fix="one JSON object per line in a file that ends in .jsonl"
            if path.suffix in (".json", ".csv", ".txt", "")
            else "convert the file, or correct its suffix",
        )
    )
    return None


def _check_jsonl(path: Path, where: str, required: Mapping[str, str], files: Files) -> DataPreview | None:
    first, records, broken = None, 0, 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE), b""), start=1):
                if number > LINES or broken >= MAX_BROKEN:
                    break
                if len(line) == LONGEST_LINE:
                    message = f"line {number} has {LONGEST_LINE >> 20} MiB or more"
                    files.errors.append(_unreadable(path, where, message))
                    return None
                if not line.strip():
                    continue
                record, problem = _record(line)
                if problem is None and record is not None:
                    problem = _field_problem(record, required)
                    try:
                        require_characters(record, f"{path}:{number} ({where})")
                    except UserError as error:
                        broken += 1
                        files.errors.append(error)
                    first = first or record
                    records += 1
                if problem is not None:
                    broken += 1
                    message, expected, got, fix = problem
                    files.errors.append(
                        UserError(
                            message, where=f"{path}:{number} ({where})", expected=expected, got=got, fix=fix
                        )
                    )
    except OSError as error:
        files.errors.append(_unreadable(path, where, error))
        return None
    if not records and not broken:
        files.errors.append(_empty(path, where))
        return None
    return DataPreview(first, _count_lines(path))


Problem = tuple[str, str, str, str]


def _record(line: bytes) -> tuple[dict[str, Any] | None, Problem | None]:
    shown = line[:80].decode("utf-8", "replace").strip()
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        return None, (
            "a line is not JSON",
            "one JSON object per line",
            f"{shown!r}: {error}",
            "correct or remove it",
        )
    if isinstance(values, dict):
        return values, None
    example = 'an object such as {"prompt": "...", "ground_truth": "..."}'
    return None, (
        "a line is not a JSON object",
        example,
        f"{type(values).__name__}: {shown}",
        "correct or remove it",
    )


def _field_problem(record: Mapping[str, Any], required: Mapping[str, str]) -> Problem | None:
    for name, setting in required.items():
        if record.get(name) is not None:
            continue
        close = nearest(name, record) or (next(iter(record)) if len(record) == 1 else None)
        message = f"a record has no `{name}`" if name not in record else f"`{name}` is null in a record"
        fix = (
            f"set {setting}={close}"
            if close and close != name
            else f"set {setting} to the field that holds it"
        )
        return message, f"a value in the field `{name}`", f"fields {', '.join(record) or '(none)'}", fix
    return None


def _check_parquet(path: Path, where: str, files: Files) -> DataPreview | None:
    try:
        with path.open("rb") as stream:
            head = stream.read(4)
            size = path.stat().st_size
            stream.seek(max(0, size - 4))
            tail = stream.read(4)
    except OSError as error:
        head, tail, size = b"", b"", -1
        files.errors.append(_unreadable(path, where, error))
    if size == 0:
        files.errors.append(_empty(path, where))
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


def _check_directory(path: Path, where: str, files: Files) -> DataPreview | None:
    splits = sorted(item.name for item in path.iterdir() if (item / "state.json").is_file())
    if (path / "state.json").is_file():
        return DataPreview(None, None)
    if splits:
        files.errors.append(
            UserError(
                f"{path} holds several splits",
                where=where,
                expected="the directory of one split",
                got=f"the splits {', '.join(splits)}",
                fix=f"set {where}={path / splits[0]}",
            )
        )
        return None
    inside = sorted(item.name for item in path.iterdir())
    data = [name for name in inside if name.endswith((".jsonl", ".parquet"))]
    files.errors.append(
        UserError(
            f"the directory {path} was not saved by HF datasets",
            where=where,
            expected="a directory written by Dataset.save_to_disk (it holds state.json), or a file",
            got=f"the files {', '.join(inside[:8]) or '(none)'}",
            fix=f"set {where}={path / data[0]}"
            if data
            else "write the data set with save_to_disk, or name a file",
        )
    )
    return None


def _unreadable(path: Path, where: str, problem: OSError | str) -> UserError:
    return UserError(
        f"{path} cannot be read",
        where=where,
        expected="a file that can be read again and again, with a record a line",
        got=str(problem),
        fix="name a file of records"
        if isinstance(problem, str)
        else "check the rights of the file and of its folders",
    )


def _empty(path: Path, where: str) -> UserError:
    return UserError(
        f"the data set {path} is empty",
        where=where,
        expected="at least one record",
        got="0 records",
        fix="write one JSON object per line, or name another file",
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
