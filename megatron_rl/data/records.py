"""Records of a data set, read from JSONL, Parquet or a directory saved by HF ``datasets``."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError, nearest, neighbours

SUFFIXES = (".jsonl", ".parquet")
_ROWS = 1000
"""Rows of a Parquet file that are in memory as Python's values beside the records."""
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
    jsonl = path.is_file() and path.suffix == ".jsonl"
    records = tuple(_read_jsonl(path, setting) if jsonl else read_table(path))
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
        learns = not (setting.startswith("evaluation.") or setting.endswith(".held_out"))
        likely = next((name for name in splits if name.startswith("train") is learns), splits[0])
        return UserError(
            f"{path} holds several splits",
            where=setting,
            expected="the directory of one split",
            got=f"the splits {', '.join(splits)}",
            fix=f"set {setting}={path / likely}",
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


def with_inner(record: Record, names: Iterable[str | None]) -> Record:
    """Return a record that also holds, by each of ``names``, what lies within another field.

    ``reward_model.ground_truth`` is ``ground_truth`` in the mapping ``reward_model``, where the record has no
    field of the whole name.
    """
    inner = {}
    for name in names:
        if name is None or name in record.values or "." not in name:
            continue
        value: Any = record.values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            inner[name] = value
    return Record({**record.values, **inner}, record.where) if inner else record


def require_fields(record: Record, fields: Mapping[str, str], setting: str) -> None:
    """Raise a UserError that names the first of ``fields`` that ``record`` lacks or holds as null.

    ``fields`` are names with the settings that name them.
    """
    for name, named_by in fields.items():
        if record.values.get(name) is not None:
            continue
        present = [key for key, value in record.values.items() if value is not None]
        outer = [(key, value) for key, value in record.values.items() if isinstance(value, Mapping)]
        inner = [f"{key}.{part}" for key, value in outer for part in value]
        close = next((path for path in inner if path.endswith(f".{name}")), None) or nearest(
            name, [*present, *inner]
        )
        free = [key for key in present if key not in fields]
        close = close or (free[0] if len(free) == 1 else None)
        raise UserError(
            f"`{name}` is null in a record" if name in record.values else f"a record has no `{name}`",
            where=f"{record.where} ({setting})",
            expected=f"a value in the field `{name}`",
            got=f"fields {', '.join([*record.values, *inner]) or '(none)'}",
            fix=f"set {named_by}={close}" if close else f"set {named_by} to the field that holds it",
        )


def require_responses(record: Record, fields: Mapping[str, str], setting: str) -> None:
    """Raise a UserError that names the first of ``fields`` in which ``record`` holds no response.

    A response is text, or messages that begin and end with the assistant's. ``fields`` are names with the
    settings that name them.
    """
    for name, named_by in fields.items():
        value = record.values[name]
        if not isinstance(value, str) and not _are_turns(value):
            raise UserError(
                f"the field `{name}` is not a response",
                where=f"{record.where} ({setting})",
                expected="text, or messages, all with text, that begin and end with the assistant's",
                got=f"{type(value).__name__}: {str(value)[:80]}",
                fix=f"correct the record, or {named_by}",
            )


def read_responses(
    record: Record, prompt_field: str, fields: Collection[str], every_turn: bool = False
) -> Record:
    """Return a record with the responses in its ``fields``, where they may stand as messages.

    A single response may be the end of the prompt's messages, where the record has no field of its own for
    it: the last message, or with ``every_turn`` all from the first that the assistant answers with. Several
    may be whole conversations: the messages that they share are the prompt. Behind a prompt of text a message
    that has text alone is read as text; the chat template writes it behind others.
    """
    values = dict(record.values)
    (field, *others), messages = fields, values.get(prompt_field)
    if others and all(_is_asked(values.get(field)) for field in fields):
        shared = _shared([values[field] for field in fields])
        values[prompt_field] = values[field][:shared]
        values |= {field: values[field][shared:] for field in fields}
    if not others and field not in values and isinstance(messages, list) and _is_said(messages[-1:]):
        answers = [at for at, message in enumerate(messages) if at and _is_said([message])]
        start = answers[0 if every_turn else -1] if answers else 0
        values[prompt_field], values[field] = messages[:start], messages[start:]
    for field in fields:
        messages = values.get(field)
        of_text = isinstance(values.get(prompt_field), str)
        if of_text and isinstance(messages, list) and len(messages) == 1 and _is_said(messages):
            (message,) = messages
            if not any(message[name] is not None for name in message.keys() - {"role", "content"}):
                values[field] = message["content"]
    return Record(values, record.where)


def _is_asked(messages: Any) -> bool:
    """Say whether these are messages whose first is not the assistant's."""
    return isinstance(messages, list) and bool(messages) and not _is_said(messages[:1])


def _shared(conversations: Sequence[Sequence[Any]]) -> int:
    """Return with how many equal messages conversations begin, the last of the shortest left out."""
    most = min(map(len, conversations)) - 1
    equal = (
        all(message == first for message in others) for first, *others in zip(*conversations, strict=False)
    )
    return next((at for at, same in enumerate(equal) if not same or at == most), most)


def _is_said(messages: Sequence[Any]) -> bool:
    """Say whether the last of ``messages`` is the assistant's."""
    return bool(messages) and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"


def _are_turns(messages: Any) -> bool:
    """Say whether these are messages that begin and end with the assistant's."""
    if not isinstance(messages, list) or not _is_said(messages[:1]) or not _is_said(messages):
        return False
    return all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and (isinstance(message.get("content"), str) or bool(message.get("tool_calls")))
        for message in messages
    )


def teaches_nothing(response: object, *others: object) -> bool:
    """Say whether a record's response is empty, or those of a pair are equal, as they stand or as tokens."""
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
        values = json.loads(line, object_pairs_hook=_once)
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


def read_table(path: Path) -> Iterator[Record]:
    """Yield the records of a Parquet file or of a directory saved by HF ``datasets``, as they are read."""
    return _read_dataset(path) if path.is_dir() else _read_parquet(path)


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        _require_different(file.schema_arrow, path)
        row = 0
        for batch in file.iter_batches(_ROWS):
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


def _require_different(fields: Any, path: Path, within: str = "") -> None:
    """Raise UserError where two columns of a schema, or two fields of a column, have one name."""
    names = [field.name for field in fields]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(
            f"{path} has two columns of one name",
            where=str(path),
            expected="each name once: only one of the columns could be read",
            got=f"{names.count(twice)} of the name {within}{twice}",
            fix="rename or drop all but one of them",
        )
    for field in fields:
        kind = field.type
        while hasattr(kind, "value_type") and not hasattr(kind, "key_type"):  # lists, of any depth
            kind = kind.value_type
        if kind.num_fields and hasattr(kind, "fields"):  # a struct
            _require_different(kind.fields, path, f"{within}{field.name}.")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object; raise ValueError where two have one name."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return values


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
