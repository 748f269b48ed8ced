"""Records of a data set, read from JSONL, Parquet or a directory saved by HF ``datasets``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError, nearest

SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Record:
    """Hold one record's fields and the place it came from, such as ``train.jsonl:12``."""

    values: Mapping[str, Any]
    where: str


def load_records(
    path: str | Path, fields: Sequence[str] = (), setting: str = "data.train"
) -> tuple[Record, ...]:
    """Read every record of ``path`` and check that each holds ``fields``.

    ``path`` is a ``.jsonl`` or ``.parquet`` file or a directory saved by HF ``datasets``; ``setting`` is
    the config path named in errors. A missing path, an unknown kind of file, a line that is not a JSON
    object, an empty data set and a missing field each raise a UserError.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(
            f"the data set {path} does not exist",
            where=setting,
            expected="a .jsonl or .parquet file, or a directory saved by HF datasets",
            got=_neighbours(path),
            fix=f"set {setting} to an existing path",
        )
    if path.is_dir():
        records = tuple(_read_dataset(path, setting))
    elif path.suffix == ".jsonl":
        records = tuple(_read_jsonl(path))
    elif path.suffix == ".parquet":
        records = tuple(_read_parquet(path))
    else:
        raise UserError(
            f"{path} is of no kind that can be read",
            where=setting,
            expected=" or ".join(SUFFIXES) + ", or a directory saved by HF datasets",
            got=path.suffix or "a file without a suffix",
            fix="convert the file, or correct its suffix",
        )
    if not records:
        raise UserError(
            f"the data set {path} is empty", where=setting, expected="at least one record", got="0 records"
        )
    for record in records:
        require_fields(record, fields, setting)
    return records


def require_fields(record: Record, fields: Sequence[str], setting: str) -> None:
    """Raise a UserError that names the first of ``fields`` that ``record`` lacks or holds as null."""
    for name in fields:
        if record.values.get(name) is not None:
            continue
        present = [key for key, value in record.values.items() if value is not None]
        guess = nearest(name, present)
        raise UserError(
            f"a record has no field {name!r}" if name not in record.values else f"the field {name!r} is null",
            where=f"{record.where} ({setting})",
            expected=f"a value in the field {name!r}",
            got="the fields " + (", ".join(present) or "(none)"),
            fix=f"name the field in the data settings{f'; did you mean {guess!r}?' if guess else ''}",
        )


def _neighbours(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"no such directory: {parent}"
    close = nearest(path.name, [item.name for item in parent.iterdir()])
    return f"no {path.name} in {parent}" + (f"; there is {close}" if close else "")


def _read_jsonl(path: Path) -> Iterator[Record]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one too
                raise UserError(
                    f"line {number} of {path} is not JSON: {error}",
                    where=where,
                    expected="one JSON object per line",
                    got=repr(line[:80].decode("utf-8", "replace")),
                    fix="correct or remove the line",
                ) from None
            if not isinstance(values, dict):
                raise UserError(
                    f"line {number} of {path} is not a JSON object",
                    where=where,
                    expected='an object such as {"prompt": "…", "ground_truth": "…"}',
                    got=f"{type(values).__name__}: {line[:80].decode('utf-8', 'replace').strip()}",
                    fix="correct or remove the line",
                )
            if b"\\u" in line:
                require_characters(values, where)
            yield Record(values, where)


def require_characters(values: Mapping[str, Any], where: str) -> None:
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


def _read_dataset(path: Path, setting: str) -> Iterator[Record]:
    if (path / "dataset_dict.json").exists():
        splits = sorted(item.name for item in path.iterdir() if item.is_dir())
        raise UserError(
            f"{path} holds several splits",
            where=setting,
            expected="the directory of one split",
            got="the splits " + ", ".join(splits),
            fix=f"set {setting} to {path / splits[0] if splits else path}",
        )
    if not (path / "state.json").exists():
        raise UserError(
            f"the directory {path} was not saved by HF datasets",
            where=setting,
            expected="a directory written by Dataset.save_to_disk (it holds state.json)",
            got="the files " + (", ".join(sorted(item.name for item in path.iterdir())[:8]) or "(none)"),
            fix="name one .jsonl or .parquet file in it, or save the data set with save_to_disk",
        )
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
