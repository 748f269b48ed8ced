"""Records of a data set, read from JSONL, Parquet or a directory saved by HF ``datasets``."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.data.shards import DataPath, data_files, source_text
from megatron_rl.errors import UserError, nearest

_ROWS = 1000
"""Rows of a Parquet file that are in memory as Python's values beside the records."""


@dataclass(frozen=True)
class Record:
    """One record's fields and the line or row they came from, such as ``train.jsonl:12``.

    ``from_table`` marks values that Arrow made: every mapping of a column has the same keys there, and null
    stands for a key that the record never had.
    """

    values: Mapping[str, Any]
    where: str
    from_table: bool = False


def load_records(source: DataPath, setting: str = "data.train") -> tuple[Record, ...]:
    """Read every record of a data set: a file, a saved directory, or shards that follow one another.

    ``setting`` is the configuration path that errors name. A missing path, an unknown kind of file, a line
    that is not a JSON object and an empty data set each raise a UserError.
    """
    records: list[Record] = []
    for path in data_files(source, setting):
        jsonl = path.is_file() and path.suffix == ".jsonl"
        records.extend(_read_jsonl(path, setting) if jsonl else read_table(path))
    if not records:
        raise empty_error(source, setting)
    return tuple(records)


def empty_error(source: DataPath, setting: str) -> UserError:
    """Return the error of a data set without records."""
    return UserError(
        f"the data set {source_text(source)} is empty",
        where=setting,
        expected="at least one record",
        got="0 records",
        fix="write at least one record, or name another file",
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
    return replace(record, values={**record.values, **inner}) if inner else record


def require_fields(
    record: Record, fields: Mapping[str, str], setting: str, others: Collection[str | None] = ()
) -> None:
    """Raise a UserError that names the first of ``fields`` that ``record`` lacks or holds as null.

    ``fields`` are names with the settings that name them; ``others`` are names that are read as something
    else.
    """
    for name, named_by in fields.items():
        if record.values.get(name) is not None:
            continue
        present = [key for key, value in record.values.items() if value is not None]
        outer = [(key, value) for key, value in record.values.items() if isinstance(value, Mapping)]
        inner = [f"{key}.{part}" for key, value in outer for part in value]
        close = next((path for path in inner if path.endswith(f".{name}")), None)
        close = close or nearest(name, [key for key in (*present, *inner) if key not in others])
        free = [key for key in present if key not in fields and key not in others]
        close = close or _usual_field(named_by, free) or (free[0] if len(free) == 1 else None)
        fix = f"set {named_by}={close}" if close else f"set {named_by} to the field that holds it"
        if not free and not close:
            fix = f"give every record a field `{name}`, or set {named_by} to one that every record has"
        if name in record.values:
            fix = "fill it in, or remove the record"
        raise UserError(
            f"`{name}` is null in a record" if name in record.values else f"a record has no `{name}`",
            where=f"{record.where} ({setting})",
            expected=f"a value in the field `{name}`",
            got=f"fields {', '.join([*record.values, *inner]) or '(none)'}",
            fix=fix,
        )


def require_last_answer(
    record: Record, prompt_field: str, responses: Mapping[str, str], setting: str
) -> None:
    """Raise a UserError for messages that end with another turn than the answer that would be learned.

    ``responses`` are the fields of responses with the settings that name them. A record in which another
    field may hold the response is left to `require_fields`, which names that field.
    """
    messages = record.values.get(prompt_field)
    absent = [name for name in responses if record.values.get(name) is None]
    if len(responses) != 1 or not absent or not isinstance(messages, list) or not messages:
        return

    (name,) = absent
    others = [key for key, value in record.values.items() if value is not None and key != prompt_field]
    if nearest(name, others) or _usual_field(responses[name], others):
        return

    last = messages[-1]
    role = last.get("role") if isinstance(last, Mapping) else None
    raise UserError(
        "the messages of a record do not end with an answer of the assistant",
        where=f"{record.where} ({setting})",
        expected=f"the assistant's message, which is learned, as the last in `{prompt_field}`",
        got=f"{role or 'no role'} in the last of {len(messages)} messages",
        fix="remove the messages behind the last answer, or the record where it has none",
    )


_USUAL_FIELDS = {
    "prompt_field": (
        "messages",
        "conversations",
        "conversation",
        "question",
        "problem",
        "instruction",
        "query",
    ),
    "ground_truth_field": ("answer", "label", "solution", "target", "reference_answer"),
    "response_field": ("completion", "output", "answer"),
}
"""Names that public data sets have for a field, by the last name of its setting."""


def _usual_field(named_by: str, present: Sequence[str]) -> str | None:
    """Return the field that public data sets use for what a setting names, None where it is not present."""
    usual = _USUAL_FIELDS.get(named_by.rpartition(".")[2], ())
    return next((name for name in usual if name in present), None)


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
    record: Record,
    prompt_field: str,
    fields: Collection[str],
    every_turn: bool = False,
    setting: str = "sft.data",
) -> Record:
    """Return a record with the responses in its ``fields``, where they may stand as messages.

    A single response may be the end of the prompt's messages, where the record has no field of its own for
    it: the last message that is learned, or with ``every_turn`` all from the first. Messages behind the last
    that is learned are left out. Several may be whole conversations: the messages that they share are the
    prompt. Behind a prompt of text a message that has text alone is read as text; the chat template writes it
    behind others. Raises UserError where no message is learned.
    """
    values = dict(record.values)
    (field, *others), messages = fields, values.get(prompt_field)
    if others and all(_is_asked(values.get(field)) for field in fields):
        shared = _shared([values[field] for field in fields])
        values[prompt_field] = values[field][:shared]
        values |= {field: values[field][shared:] for field in fields}
    if not others and values.get(field) is None and isinstance(messages, list) and _is_said(messages[-1:]):
        answers = [at for at, message in enumerate(messages) if at and _is_said([message])]
        learned = [at for at in answers if is_learned(messages[at])]
        start = (learned or answers or [0])[0 if every_turn else -1]
        values[prompt_field], values[field] = messages[:start], messages[start:]
    for field in fields:
        messages = values.get(field)
        if isinstance(messages, list) and _are_turns(messages):
            values[field] = messages = _until_learned(messages, field, record, setting)
        of_text = isinstance(values.get(prompt_field), str)
        if of_text and isinstance(messages, list) and len(messages) == 1 and _is_said(messages):
            (message,) = messages
            if not any(message[name] is not None for name in message.keys() - {"role", "content"}):
                values[field] = message["content"]
    return replace(record, values=values)


def is_learned(message: Mapping[str, Any]) -> bool:
    """Say whether a turn of the assistant is learned: ``weight: 0`` marks one that is only read."""
    return message.get("weight") != 0


def _until_learned(messages: list[Any], field: str, record: Record, setting: str) -> list[Any]:
    """Return the messages of a response up to the last that is learned; raises UserError without one."""
    learned = [at for at, message in enumerate(messages) if _is_said([message]) and is_learned(message)]
    if not learned:
        raise UserError(
            "a record has no turn that is learned: each has the weight 0",
            where=f"{record.where} ({setting})",
            expected="at least one message of the assistant with a weight other than 0",
            got=f"{len(messages)} messages in `{field}`",
            fix="remove the record, or correct its weights",
        )
    return messages[: learned[-1] + 1]


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
        values = json.loads(line, object_pairs_hook=_without_repeated_keys)
    except _RepeatedKey as error:
        raise UserError(
            f"a JSON object has the key `{error}` twice",
            where=where,
            expected="each key once: of two values, one would be lost",
            got=shown,
            fix="remove or rename one of them",
        ) from None
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
            fix="write each object of the list on a line of its own"
            if isinstance(values, list)
            else "correct or remove it",
        )
    if b"\\u" in line:
        require_characters(values, where)
    return values


class _RepeatedKey(Exception):
    """The key that a JSON object has twice."""


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the mapping of a JSON object; raises _RepeatedKey."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKey(next(name for name in names if names.count(name) > 1))
    return values


def _read_jsonl(path: Path, setting: str) -> Iterator[Record]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield Record(values_of(line, f"{where} ({setting})"), where)


def require_characters(values: Mapping[str, Any], where: str) -> None:
    """Raise UserError where an escape is half of a character, which no tokenizer and no file takes."""
    try:
        json.dumps(values, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            "a record holds half of a character",
            where=where,
            expected="text that UTF-8 can hold: \\ud800 to \\udbff are followed by \\udc00 to \\udfff",
            got=repr(error.object[max(0, error.start - 20) : error.end + 20]),
            fix="correct or remove the record",
        ) from None


def read_table(path: Path) -> Iterator[Record]:
    """Yield the records of a Parquet file or of a directory saved by HF ``datasets``, as they are read."""
    return _read_dataset(path) if path.is_dir() else _read_parquet(path)


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        _require_single_names(file.schema_arrow, path)

        yield from _table_records(file.iter_batches(_ROWS), path)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read as Parquet",
            where=str(path),
            expected="a complete Parquet file",
            got=str(error).splitlines()[0],
            fix="write the file again",
        ) from None


def _table_records(batches: Iterable[Any], path: Path) -> Iterator[Record]:
    """Yield the records of Arrow batches or tables that follow one another."""
    row = 0
    for batch in batches:
        names = batch.schema.names
        try:
            columns = {name: _python_values(batch.column(index)) for index, name in enumerate(names)}
        except KeyError as error:
            raise UserError(
                f"a map of {path} has a key twice",
                where=f"{path}, rows {row} to {row + batch.num_rows - 1}",
                expected="each key once: of two values, one would be lost",
                got=str(error.args[0]),
                fix="remove one of the two, and write the data again",
            ) from None
        for index in range(batch.num_rows):
            values = {name: column[index] for name, column in columns.items()}
            yield Record(values, f"{path}, row {row}", from_table=True)
            row += 1


def _require_single_names(schema: Any, path: Path) -> None:
    """Raise UserError where two columns, or two fields of a struct, have one name: one would be lost."""
    pending = [("", list(schema))]
    while pending:
        outer, children = pending.pop()
        names = [child.name for child in children]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise UserError(
                f"a Parquet file has two columns named `{outer}{repeated}`",
                where=str(path),
                expected="one column of each name",
                got=f"the columns {', '.join(f'{outer}{name}' for name in names)}",
                fix="rename or drop one of them, and write the file again",
            )
        for child in children:
            # Maps repeat no names, and their keys are data.
            below = [child.type.field(index) for index in range(child.type.num_fields)]
            pending.append((f"{outer}{child.name}.", below))


def _python_values(column: Any) -> list[Any]:
    """Return an Arrow column as Python's values: maps as dictionaries, and JSON text of Arrow's JSON type.

    ``datasets`` writes columns of mixed types as ``arrow.json``, whose own ``to_pylist`` leaves text.
    """
    values = column.to_pylist(maps_as_pydicts="strict")
    return [_from_json(value, column.type) for value in values] if _holds_json(column.type) else values


def _holds_json(kind: Any) -> bool:
    """Return whether an Arrow type is, or holds, Arrow's JSON type."""
    if _is_json(kind):
        return True
    return any(_holds_json(kind.field(index).type) for index in range(kind.num_fields))


def _is_json(kind: Any) -> bool:
    return getattr(kind, "extension_name", None) == "arrow.json"


def _from_json(value: Any, kind: Any) -> Any:
    """Return a value whose parts of Arrow's JSON type are parsed."""
    if value is None:
        return None
    if _is_json(kind):
        try:
            return json.loads(value)
        except ValueError:
            return value
    if isinstance(value, dict) and kind.num_fields == len(value):
        fields = {kind.field(index).name: kind.field(index).type for index in range(kind.num_fields)}
        return {name: _from_json(inner, fields[name]) for name, inner in value.items()}
    if isinstance(value, list) and kind.num_fields == 1:
        return [_from_json(inner, kind.field(0).type) for inner in value]
    return value


def _read_dataset(path: Path) -> Iterator[Record]:
    from datasets import Dataset

    try:
        # As Arrow's values, whatever format a data set was saved with: images and sounds stay bytes, whose
        # decoding takes packages and time, and which no prompt holds.
        dataset: Any = Dataset.load_from_disk(str(path)).with_format("arrow")
        yield from _table_records(dataset.iter(_ROWS), path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read as a saved data set",
            where=str(path),
            expected="a directory written by Dataset.save_to_disk",
            got=f"{type(error).__name__}: {error}",
            fix="save the data set again",
        ) from None
