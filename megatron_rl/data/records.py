"""Records of a data set, read from JSONL, Parquet or a directory saved by HF ``datasets``."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError, nearest, neighbours

SUFFIXES = (".jsonl", ".parquet")
KINDS = "a .jsonl or .parquet file, or a directory saved by HF datasets"


@dataclass(frozen=True)
class Record:
    """Hold one record's fields and the place it came from, such as ``train.jsonl:12``."""

    values: Mapping[str, Any]
    where: str


def load_records(path: str | Path, setting: str = "data.train") -> tuple[Record, ...]:
    """Read every record of ``path``, a file or a directory saved by HF ``datasets``.

    ``setting`` is the configuration path that errors name. A missing path, an unknown kind of file, a line
    that is not a JSON object and an empty data set each raise a UserError.
    """
    path = Path(path)
    error = source_error(path, setting) if path.exists() else missing_error(path, setting)
    if error is not None:
        raise error
    if path.is_dir():
        records = tuple(_read_dataset(path))
    elif path.suffix == ".jsonl":
        records = tuple(_read_jsonl(path, setting))
    else:
        records = tuple(_read_parquet(path))
    if not records:
        raise empty_error(path, setting)
    return records


def missing_error(path: Path, setting: str) -> UserError:
    """Return the error of a data set that is not there."""
    return UserError(
        f"the data set {path} does not exist",
        where=setting,
        expected=KINDS,
        got=neighbours(path),
        fix="correct the path",
    )


def source_error(path: Path, setting: str) -> UserError | None:
    """Return why records cannot be read from what is at a path, by its kind alone; None where they can."""
    if path.is_dir():
        return _directory_error(path, setting)
    if not path.is_file():
        return unreadable_error(path, setting, "a pipe, a socket or a device", "name a file of records")
    if path.suffix in SUFFIXES:
        return None
    return UserError(
        f"{path} is of no kind that can be read",
        where=setting,
        expected=KINDS,
        got=path.suffix or "a file without a suffix",
        fix="one JSON object per line in a file that ends in .jsonl"
        if path.suffix in (".json", ".csv", ".txt", "")
        else "convert the file, or correct its suffix",
    )


def _directory_error(path: Path, setting: str) -> UserError | None:
    if (path / "state.json").is_file():
        return None
    inside = sorted(item.name for item in path.iterdir())
    splits = [name for name in inside if (path / name / "state.json").is_file()]
    if splits:
        return UserError(
            f"{path} holds several splits",
            where=setting,
            expected="the directory of one split",
            got=f"the splits {', '.join(splits)}",
            fix=f"set {setting}={path / splits[0]}",
        )
    data = [name for name in inside if name.endswith(SUFFIXES)]
    return UserError(
        f"the directory {path} was not saved by HF datasets",
        where=setting,
        expected="a directory written by Dataset.save_to_disk (it holds state.json), or a file",
        got=f"the files {', '.join(inside[:8]) or '(none)'}",
        fix=f"set {setting}={path / data[0]}"
        if data
        else "write the data set with save_to_disk, or name a file",
    )


def unreadable_error(path: Path, setting: str, problem: str, fix: str) -> UserError:
    """Return the error of a data set whose bytes cannot be read."""
    return UserError(
        f"{path} cannot be read",
        where=setting,
        expected="a file that can be read again and again, with a record a line",
        got=problem,
        fix=fix,
    )


def empty_error(path: Path, setting: str) -> UserError:
    """Return the error of a data set without records."""
    return UserError(
        f"the data set {path} is empty",
        where=setting,
        expected="at least one record",
        got="0 records",
        fix="write one JSON object per line, or name another file",
    )


def require_fields(record: Record, fields: Mapping[str, str], setting: str) -> None:
    """Raise a UserError that names the first of ``fields`` that ``record`` lacks or holds as null.

    ``fields`` are names with the settings that name them.
    """
    for name, named_by in fields.items():
        if record.values.get(name) is not None:
            continue
        present = [key for key, value in record.values.items() if value is not None]
        close = nearest(name, present) or (present[0] if len(present) == 1 else None)
        null = name in record.values
        raise UserError(
            f"`{name}` is null in a record" if null else f"a record has no `{name}`",
            where=f"{record.where} ({setting})",
            expected=f"a value in the field `{name}`",
            got=f"fields {', '.join(record.values) or '(none)'}",
            fix=f"set {named_by}={close}" if close else f"set {named_by} to the field that holds it",
        )


def require_text(record: Record, fields: Mapping[str, str], setting: str) -> None:
    """Raise a UserError that names the first of ``fields`` in which ``record`` holds something but text.

    ``fields`` are names with the settings that name them.
    """
    for name, named_by in fields.items():
        value = record.values[name]
        if not isinstance(value, str):
            raise UserError(
                f"the field `{name}` is not text",
                where=f"{record.where} ({setting})",
                expected="a string",
                got=f"{type(value).__name__}: {str(value)[:80]}",
                fix=f"correct the record, or {named_by}",
            )


def responses_as_text(record: Record, prompt_field: str, fields: Collection[str]) -> Record:
    """Return a record with what the assistant says in its ``fields`` of responses as text.

    A response may stand as a list of one message of the assistant. A single one may be the last message of
    the prompt, where the record has no field of its own for it.
    """
    values = dict(record.values)
    (field, *others), messages = fields, values.get(prompt_field)
    if not others and field not in values and isinstance(messages, list) and _is_said(messages[-1:]):
        values[prompt_field], values[field] = messages[:-1], messages[-1:]
    for field in fields:
        if _is_said(values.get(field)):
            values[field] = values[field][0]["content"]
    return Record(values, record.where)


def _is_said(messages: Any) -> bool:
    """Say whether these are one message of the assistant."""
    if not isinstance(messages, list) or len(messages) != 1 or not isinstance(messages[0], dict):
        return False
    return messages[0].get("role") == "assistant" and "content" in messages[0]


def teaches_nothing(response: str | bytes, *others: str | bytes) -> bool:
    """Say whether a record's response is empty, or those of a pair are equal, as text or as tokens."""
    return response in others if others else not response


def nothing_taught(wheres: Sequence[str], total: int, pairs: bool) -> str:
    """Return a sentence on the records, of ``total``, for which `teaches_nothing` is true."""
    many = f"{len(wheres)} of {total}"
    first = f"first: {', '.join(wheres[:3])}"
    if pairs:
        return f"{many} pairs prefer a response to itself and teach nothing; {first}"
    return f"{many} responses are empty and teach to say nothing; {first}"


def values_of(line: bytes, where: str) -> dict[str, Any]:
    """Return the fields of a line of JSONL; raises UserError for a line that is no record."""
    shown = line[:80].decode("utf-8", "replace").strip()
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one too
        raise UserError(
            "a line is not JSON",
            where=where,
            expected="one JSON object per line",
            got=f"{shown!r}: {error}",
            fix="correct or remove it",
        ) from None
    if not isinstance(values, dict):
        raise UserError(
            "a line is not a JSON object",
            where=where,
            expected='an object such as {"prompt": "...", "ground_truth": "..."}',
            got=f"{type(values).__name__}: {shown}",
            fix="correct or remove it",
        )
    if b"\\u" in line:
        _require_characters(values, where)
    return values


def _read_jsonl(path: Path, setting: str) -> Iterator[Record]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield Record(values_of(line, f"{where} ({setting})"), where)


def _require_characters(values: Mapping[str, Any], where: str) -> None:
    """Raise UserError where an escape is half of a character, which no tokenizer and no file takes."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            "a record holds half of a character",
            where=where,
            expected="text that UTF-8 can hold: \\ud800 to \\udbff are followed by \\udc00 to \\udfff",
            got=repr(error.object[max(0, error.start - 20) : error.end + 20]),
            fix="correct or remove the line",
        ) from None


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        row = 0
        for batch in file.iter_batches():
            for values in batch.to_pylist():
                yield Record(values, f"{path}, row {row}")
                row += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path} cannot be read as Parquet",
            where=str(path),
            expected="a complete Parquet file",
            got=str(error).splitlines()[0],
            fix="write the file again",
        ) from None


def _read_dataset(path: Path) -> Iterator[Record]:
    from datasets import Dataset

    try:
        dataset = Dataset.load_from_disk(str(path))
        for row, values in enumerate(dataset):
            yield Record(values, f"{path}, row {row}")  # pyright: ignore[reportArgumentType]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read as a saved data set",
            where=str(path),
            expected="a directory written by Dataset.save_to_disk",
            got=f"{type(error).__name__}: {error}",
            fix="save the data set again",
        ) from None
