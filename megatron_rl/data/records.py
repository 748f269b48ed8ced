"""Find the files of a data set, and read their records.

A setting names one file, a directory saved by HF ``datasets``, a folder of shards, a pattern, or a list of
these. Every such setting resolves to one sequence of files (`data_files`), whose records are concatenated. A
run, the digest of token files and the rules of `check` all use this sequence, so they read the same records
in the same order.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError, describe_missing_path, join_names, unreadable_file_error

DataPath = str | Path | Sequence[str]
"""Type of a setting that names a data set: a path, a pattern, or a list of both."""
SUFFIXES = (".jsonl", ".parquet")
KINDS = (
    "a .jsonl or .parquet file, a directory saved by HF datasets, a folder of shards, "
    "a pattern such as data/train-*.parquet, or a list of these"
)
_SHARD = re.compile(r"(?P<split>.+)-(?P<index>\d+)-of-(?P<count>\d+)(?:-[0-9a-f]+)?\.(?P<suffix>\w+)")
"""Pattern of a shard's file name on the Hub: train-00000-of-00002.parquet. Older names have a digest before
the suffix."""
_HUB_NAME = re.compile(r"[\w-]+/[\w.-]+(?<!\.jsonl)(?<!\.parquet)")
_DOWNLOAD = "; a data set of the Hub is downloaded first: hf download --repo-type dataset {0} --local-dir {0}"
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval", "held_out")
_TABLE_BATCH = 1000
"""Rows of a table that are converted from Arrow to Python values at a time."""

_ENCODINGS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
    (b"{\x00\x00\x00", "UTF-32LE"),
    (b"\x00\x00\x00{", "UTF-32BE"),
    (b"{\x00", "UTF-16LE"),
    (b"\x00{", "UTF-16BE"),
)
"""First bytes of a JSONL file that is not UTF-8 (a byte order mark, or the first brace), and its encoding.

UTF-32 comes first, since its little-endian mark begins with that of UTF-16.
"""
_COMPRESSIONS = (
    (b"\x1f\x8b", ".gz", "gzip", "gzip -dc"),
    (b"\x28\xb5\x2f\xfd", ".zst", "Zstandard", "zstd -dc"),
    (b"\xfd7zXZ\x00", ".xz", "xz", "xz -dc"),
    (b"BZh", ".bz2", "bzip2", "bzip2 -dc"),
    (b"PK\x03\x04", ".zip", "zip", "unzip -p"),
)
"""First bytes, suffix, name and decompression command of each compression in use for files of records."""


@dataclass(frozen=True)
class Record:
    """One record of a data set, with its origin.

    Example:
        >>> Record({"prompt": "1+1=", "ground_truth": "2"}, "train.jsonl:12").values["prompt"]
        '1+1='
    """

    values: Mapping[str, Any]
    """Field name -> value, as read from JSON or Arrow."""
    where: str
    """File and line (``train.jsonl:12``) or row (``train.parquet, row 11``), for messages."""
    from_table: bool = False
    """Whether the values come from Arrow: all mappings of a column then have the same keys, some null."""


# Paths to files


def data_files(source: DataPath, setting: str) -> tuple[Path, ...]:
    """Return the files and saved directories of a data set, in the order in which they are read.

    The files of a folder or of a pattern are sorted by name; a list keeps its order. ``setting`` is the
    configuration key that errors name. Raises UserError for a path that does not exist or whose format is
    unknown, for several splits, for a missing shard and for a file that is listed twice.
    """
    if isinstance(source, str | Path):
        return _expand_path(Path(source), setting)

    files: list[Path] = []
    for item in source:
        # Reject an empty path, which pathlib would turn into the current folder.
        if not str(item).strip():
            raise missing_data_error(Path(item), setting)
        files.extend(_expand_path(Path(item), setting))

    if not files:
        raise UserError(
            "the list of data files is empty",
            where=setting,
            expected=KINDS,
            got="an empty list",
            fix=f"name at least one file in {setting}",
        )

    # A file that two patterns match would be trained on twice, which no metric would reveal.
    repeated = sorted({str(file) for file in files if files.count(file) > 1})
    if repeated:
        raise UserError(
            f"{setting} names a file twice",
            where=setting,
            expected="each file once",
            got=", ".join(repeated[:3]),
            fix="remove the repetition, or copy the file if its records should count twice",
        )
    return tuple(files)


def source_text(source: DataPath) -> str:
    """Return the paths of a data set as one comma-separated text, for messages."""
    if isinstance(source, str | Path):
        return str(source)
    return ", ".join(map(str, source))


def missing_shards(files: Iterable[Path]) -> list[str]:
    """Return the names of the shards that are missing from the shard sets of ``files``.

    Example:
        >>> missing_shards([Path("a/train-00000-of-00002.parquet")])
        ['train-00001-of-00002.parquet']
    """
    # Group the shards by set: folder, split, count and suffix.
    indices_by_set: dict[tuple[Path, str, str, str], set[int]] = {}
    for file in files:
        match = _SHARD.fullmatch(file.name)
        if match is not None:
            shard_set = (file.parent, match["split"], match["count"], match["suffix"])
            indices_by_set.setdefault(shard_set, set()).add(int(match["index"]))

    # List the shards that are missing from each set.
    missing_names = []
    for (_, split, count, suffix), indices in indices_by_set.items():
        # Shards are numbered from 0 or from 1. From 1, the last index equals the count and no index is 0.
        first_index = 0
        if int(count) in indices and 0 not in indices:
            first_index = 1

        # Bound the count: a file name may contain any number, and messages quote only a few names.
        for index in range(first_index, first_index + min(int(count), 100_000)):
            if index not in indices:
                missing_names.append(f"{split}-{index:0{len(count)}d}-of-{count}.{suffix}")
    return missing_names


def partial_shards_warning(source: DataPath, files: Sequence[Path], setting: str) -> UserError | None:
    """Return the warning about a setting that omits shards of a data set, or None if no shard is missing."""
    names = missing_shards(files)
    if not names:
        return None

    return UserError(
        f"{setting} names only some of the shards of a data set",
        where=setting,
        expected="every shard of the set, or a single file that is not a shard",
        got=f"{source_text(source)}; not read: {join_names(names, 3)}",
        fix=f"set {setting} to the folder of the shards, if all of them are to be read",
    )


def data_path_error(path: Path, setting: str) -> UserError | None:
    """Return the error for a path that cannot be read as records; None for a valid path.

    The path's type, suffix and first bytes are checked. Raises OSError if the file cannot be opened.
    """
    # A directory written by `save_to_disk` is a data set; a pipe or a device is not.
    if path.is_dir():
        is_saved_data_set = (path / "state.json").is_file()
        if is_saved_data_set:
            return None
        return _splits_error(path, setting)
    if not path.is_file():
        return unreadable_data_error(path, setting, "a pipe, a socket or a device", "name a file of records")
    if path.suffix == ".jsonl":
        return _first_bytes_error(path, setting)
    if path.suffix == ".parquet":
        return None

    # Any other suffix is an error: a compressed file, a format that must be converted, or a typo.
    fix = "convert the file, or correct its suffix"
    for _, suffix, _, command in _COMPRESSIONS:
        if path.suffix == suffix:
            fix = f"decompress it: {command} {path} > {path.with_suffix('')}"
    if path.suffix in (".json", ".csv", ".txt", ""):
        fix = "one JSON object per line in a file that ends in .jsonl"
    return UserError(
        f"{path} is not in a format that can be read",
        where=setting,
        expected=KINDS,
        got=path.suffix or "a file without a suffix",
        fix=fix,
    )


def _first_bytes_error(path: Path, setting: str) -> UserError | None:
    """Return the error for a ``.jsonl`` file that is compressed, a table, or not encoded in UTF-8.

    Returns None for other files. Without this check, the first line would raise a JSON error that does not
    mention the cause.
    """
    with path.open("rb") as stream:
        first_bytes = stream.read(8)

    # A file in another encoding than UTF-8.
    converted_file = path.with_name(f"{path.stem}.utf8.jsonl")
    for prefix, encoding in _ENCODINGS:
        if first_bytes.startswith(prefix):
            return UserError(
                f"{path} is encoded in {encoding}",
                where=setting,
                expected="one JSON object per line, encoded in UTF-8",
                got=f"{encoding}: the file begins with the bytes {first_bytes[:4].hex(' ')}",
                fix=f"convert it: iconv -f {encoding} -t UTF-8 {path} > {converted_file}, "
                f"and set {setting}={converted_file}",
            )

    # A compressed file whose name lacks the suffix of the compression.
    decompressed_file = path.with_name(f"{path.stem}.plain.jsonl")
    for prefix, _, compression, command in _COMPRESSIONS:
        if first_bytes.startswith(prefix):
            return UserError(
                f"{path} is compressed with {compression}",
                where=setting,
                expected="one JSON object per line, not compressed",
                got=f"{compression}: the file begins with the bytes {first_bytes[:4].hex(' ')}",
                fix=f"decompress it: {command} {path} > {decompressed_file}, "
                f"and set {setting}={decompressed_file}",
            )

    # A table with the wrong suffix.
    if first_bytes.startswith(b"PAR1"):
        return UserError(
            f"{path} is a Parquet file",
            where=setting,
            expected="one JSON object per line in a file that ends in .jsonl",
            got="the first bytes of a Parquet file, PAR1",
            fix=f"rename it: mv {path} {path.with_suffix('.parquet')}",
        )
    return None


def missing_data_error(path: Path, setting: str) -> UserError:
    """Return the error for a data set that does not exist."""
    if glob.has_magic(str(path)):
        return UserError(
            f"no file matches the pattern {path}",
            where=setting,
            expected=KINDS,
            got="no match",
            fix="correct the pattern; * stands for any part of a name, ** for any folders",
        )

    fix = "correct the path"
    if _HUB_NAME.fullmatch(str(path)):
        fix += _DOWNLOAD.format(path)
    return UserError(
        f"the data set {path} does not exist",
        where=setting,
        expected=KINDS,
        got=describe_missing_path(path),
        fix=fix,
    )


def unreadable_data_error(path: Path, setting: str, problem: str, fix: str) -> UserError:
    """Return the error for a data set whose bytes cannot be read."""
    return UserError(
        f"{path} cannot be read",
        where=setting,
        expected="a regular file with one record per line",
        got=problem,
        fix=fix,
    )


def empty_data_error(source: DataPath, setting: str) -> UserError:
    """Return the error for a data set without records."""
    return UserError(
        f"the data set {source_text(source)} is empty",
        where=setting,
        expected="at least one record",
        got="0 records",
        fix="write at least one record, or name another file",
    )


def _expand_path(path: Path, setting: str) -> tuple[Path, ...]:
    """Return the files of one path or pattern; raises UserError for a file that cannot contain records.

    A path is a file, a saved directory, or a folder of shards.
    """
    if not path.exists():
        # Only an absent path is a pattern: the name of an existing file may contain [ or *.
        matches = []
        if glob.has_magic(str(path)):
            matches = sorted(glob.glob(str(path), recursive=True))
        if not matches:
            raise missing_data_error(path, setting)
        files = [Path(name) for name in matches]
    elif path.is_dir() and not (path / "state.json").is_file():
        files = _list_shards(path, setting)
    else:
        files = [path]

    # Validate every file that the pattern or the folder matched.
    for file in files:
        error = data_path_error(file, setting)
        if error is not None:
            raise error
    return tuple(files)


def _list_shards(folder: Path, setting: str) -> list[Path]:
    """Return the shards of a folder, sorted by name; raises UserError unless they are one complete set."""
    error = _splits_error(folder, setting)
    if error is not None:
        raise error

    names = sorted(item.name for item in folder.iterdir())
    shards = [folder / name for name in names if _is_record_file(name)]
    if not shards:
        raise UserError(
            f"the directory {folder} contains no data set",
            where=setting,
            expected=KINDS,
            got=f"the files {', '.join(names[:8]) or '(none)'}",
            fix=_empty_folder_fix(folder, names, setting),
        )

    # A folder with the same data in two formats would be read twice.
    suffixes = {shard.suffix for shard in shards}
    if len(suffixes) > 1:
        raise UserError(
            f"the folder {folder} contains files of two kinds",
            where=setting,
            expected="shards of one kind",
            got=", ".join(shard.name for shard in shards[:8]),
            fix=f"set {setting}={folder}/*.parquet or {setting}={folder}/*.jsonl, if one of them is a copy; "
            "else name the files in a list",
        )

    # Many repositories on the Hub have training and test data in one folder.
    splits = sorted({_parse_split(shard.name) for shard in shards} - {""})
    if len(splits) > 1:
        raise UserError(
            f"the folder {folder} contains several splits",
            where=setting,
            expected="the shards of one split",
            got=f"the splits {', '.join(splits)}",
            fix=f"set {setting}={_split_pattern(folder, shards, _likely_split(splits, setting))}",
        )

    # A download may have been interrupted.
    absent_names = missing_shards(shards)
    if absent_names:
        raise UserError(
            f"the folder {folder} lacks shards of its data set",
            where=setting,
            expected="every shard, up to the count in the names",
            got=f"{len(shards)} files, without {', '.join(absent_names[:3])}",
            fix="download the missing shards, or list the files that are to be read",
        )
    return shards


def _split_pattern(folder: Path, shards: Sequence[Path], split: str) -> str:
    """Return the path of one split's shards: the path of a single shard, or a pattern for several."""
    files = [shard for shard in shards if _parse_split(shard.name) == split]
    if len(files) == 1:
        return str(files[0])
    return f"{folder}/{split}-*{files[0].suffix}"


def _splits_error(folder: Path, setting: str) -> UserError | None:
    """Return the error for a folder written by ``DatasetDict.save_to_disk``, which has a folder per split.

    Returns None for other folders.
    """
    splits = sorted(item.name for item in folder.iterdir() if (item / "state.json").is_file())
    if not splits:
        return None

    return UserError(
        f"{folder} contains several splits",
        where=setting,
        expected="the directory of one split",
        got=f"the splits {', '.join(splits)}",
        fix=f"set {setting}={folder / _likely_split(splits, setting)}",
    )


def _empty_folder_fix(folder: Path, names: Sequence[str], setting: str) -> str:
    """Return the fix for a folder without shards: name a subfolder with shards, or decompress files.

    ``names`` are the names of the files in the folder.
    """
    # Suggest subfolders with files of records: repositories on the Hub usually have one.
    files = sorted(item for item in folder.rglob("*") if _is_record_file(item.name) and item.is_file())
    folders = sorted({item.parent for item in files})
    if len(folders) == 1:
        return f"set {setting}={folders[0]}"
    if folders:
        return f"set {setting} to one of the folders {', '.join(map(str, folders[:5]))}"

    for _, suffix, _, command in _COMPRESSIONS:
        compressed_names = [name for name in names if name.endswith(f".jsonl{suffix}")]
        if compressed_names:
            file = folder / compressed_names[0]
            return f"decompress the files, each as in: {command} {file} > {file.with_suffix('')}"
    return "write the data set with save_to_disk, or name a file"


def _is_record_file(name: str) -> bool:
    """Return whether a file name has a suffix of `SUFFIXES` and does not start with . or _."""
    return name.endswith(SUFFIXES) and not name.startswith((".", "_"))


def _parse_split(name: str) -> str:
    """Return the split in a file's name, or "" for a name without a split.

    Example:
        >>> _parse_split("train-00000-of-00002.parquet"), _parse_split("part-0.jsonl")
        ('train', '')
    """
    shard = _SHARD.fullmatch(name)
    if shard is not None:
        return shard["split"]

    # A name such as `train_1` begins with the split, but `training` does not.
    stem = name.rpartition(".")[0]
    for split in _SPLITS:
        if re.match(rf"{split}(?![a-z])", stem):
            return split
    return ""


def _likely_split(splits: Sequence[str], setting: str) -> str:
    """Return the split that a setting most likely means: a training or an evaluation split."""
    is_training_data = not (setting.startswith("evaluation.") or setting.endswith(".held_out"))
    for split in splits:
        if split.startswith("train") == is_training_data:
            return split
    return splits[0]


# Files to records


def load_records(source: DataPath, setting: str = "data.train") -> tuple[Record, ...]:
    """Read every record of a data set.

    ``setting`` is the configuration key that errors name. Raises UserError as `data_files` does, for a line
    that is not a JSON object, and for a data set without records.
    """
    records: list[Record] = []
    for path in data_files(source, setting):
        if path.is_file() and path.suffix == ".jsonl":
            records.extend(_read_jsonl(path, setting))
        else:
            records.extend(read_table(path))

    if not records:
        raise empty_data_error(source, setting)
    return tuple(records)


def _read_jsonl(path: Path, setting: str) -> Iterator[Record]:
    """Yield the records of a JSONL file; blank lines are skipped, but count in line numbers."""
    with path.open("rb") as lines:
        for line_number, line in enumerate(lines, start=1):
            if line.strip():
                location = f"{path}:{line_number}"
                yield Record(parse_line(line, f"{location} ({setting})"), location)


def parse_line(line: bytes, location: str) -> dict[str, Any]:
    """Return the fields of a line of JSONL; raises UserError for a line that is not a JSON object."""
    excerpt = line[:80].decode("utf-8", "replace").strip()
    try:
        values = json.loads(line, object_pairs_hook=_make_mapping)
    except _RepeatedKey as error:
        raise UserError(
            f"a JSON object has the key `{error}` twice",
            where=location,
            expected="each key once: of two values, one would be lost",
            got=excerpt,
            fix="remove or rename one of them",
        ) from None
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise UserError(
            "a line is not JSON",
            where=location,
            expected="one JSON object per line",
            got=f"{excerpt!r}: {error}",
            fix="correct or remove it",
        ) from None

    if not isinstance(values, dict):
        fix = "correct or remove it"
        if isinstance(values, list):
            fix = "write each object of the list on a line of its own"
        raise UserError(
            "a line is not a JSON object",
            where=location,
            expected='an object such as {"prompt": "...", "ground_truth": "..."}',
            got=f"{type(values).__name__}: {excerpt}",
            fix=fix,
        )

    # Only an escape can be half of a surrogate pair: decoding UTF-8 above rejects such bytes.
    if b"\\u" in line:
        require_encodable_text(values, location)
    return values


class _RepeatedKey(Exception):
    """Error for a JSON object in which a key occurs twice; the argument is the key."""


def _make_mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert the (key, value) pairs of a JSON object to a mapping; raises _RepeatedKey if a key repeats."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _RepeatedKey(_find_repeated([key for key, _ in pairs]))
    return values


def _find_repeated(names: Sequence[str]) -> str | None:
    """Return the first name that occurs more than once, or None if all names are different."""
    if len(set(names)) == len(names):
        return None
    for name in names:
        if names.count(name) > 1:
            return name
    return None


def require_encodable_text(values: Mapping[str, Any], location: str) -> None:
    """Raise UserError for text with half of a surrogate pair, which UTF-8 and tokenizers cannot encode."""
    try:
        json.dumps(values, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            "a record contains half of a character",
            where=location,
            expected="text that UTF-8 can encode: \\ud800 to \\udbff are followed by \\udc00 to \\udfff",
            got=repr(error.object[max(0, error.start - 20) : error.end + 20]),
            fix="correct or remove the record",
        ) from None


# Tables


def read_table(path: Path) -> Iterator[Record]:
    """Yield the records of a Parquet file or of a directory saved by HF ``datasets``."""
    if path.is_dir():
        return _read_dataset(path)
    return _read_parquet(path)


def _read_parquet(path: Path) -> Iterator[Record]:
    """Yield the records of a Parquet file, read in batches; raises UserError for a damaged file."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        _require_unique_names(file.schema_arrow, path)
        yield from _table_records(file.iter_batches(_TABLE_BATCH), path)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise unreadable_file_error(
            "a Parquet file", path, error, expected="a complete Parquet file", fix="write the file again"
        ) from None


def _read_dataset(path: Path) -> Iterator[Record]:
    """Yield the records of a directory written by ``Dataset.save_to_disk``; raises UserError if damaged."""
    from datasets import Dataset

    try:
        # Read Arrow's values and ignore the format of the data set, so that images and sounds stay bytes:
        # decoding them needs packages and time, and no prompt contains them.
        dataset: Any = Dataset.load_from_disk(str(path)).with_format("arrow")
        yield from _table_records(dataset.iter(_TABLE_BATCH), path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = "a directory written by Dataset.save_to_disk"
        raise unreadable_file_error(
            "a saved data set", path, error, expected=expected, fix="save the data set again"
        ) from None


def _table_records(batches: Iterable[Any], path: Path) -> Iterator[Record]:
    """Yield the records of consecutive Arrow batches or tables."""
    row = 0
    for batch in batches:
        # Access columns by position: Arrow cannot look up a name that two columns share.
        try:
            columns = {
                name: _to_python_values(batch.column(index)) for index, name in enumerate(batch.schema.names)
            }
        except KeyError as error:
            raise UserError(
                f"a map in a column of {path} contains a repeated key",
                where=f"{path}, rows {row} to {row + batch.num_rows - 1}",
                expected="different keys in each map, since a record has one value for each key",
                got=str(error.args[0]),
                fix="remove or rename the repeated key, and write the data again",
            ) from None

        for index in range(batch.num_rows):
            values = {name: column[index] for name, column in columns.items()}
            yield Record(values, f"{path}, row {row}", from_table=True)
            row += 1


def _require_unique_names(schema: Any, path: Path) -> None:
    """Raise UserError for two columns, or two fields of a struct, with the same name: one would be lost."""
    # Visit the columns and, by their dotted prefix, the fields of nested structs.
    pending = [("", list(schema))]
    while pending:
        prefix, fields = pending.pop()
        names = [field.name for field in fields]
        repeated_name = _find_repeated(names)
        if repeated_name is not None:
            raise UserError(
                f"a Parquet file has two columns named `{prefix}{repeated_name}`",
                where=str(path),
                expected="one column of each name",
                got=f"the columns {', '.join(f'{prefix}{name}' for name in names)}",
                fix="rename or drop one of them, and write the file again",
            )

        # The fields of a map are always key and value. Repeated keys in the data are detected when the values
        # are converted to Python.
        for field in fields:
            children = [field.type.field(index) for index in range(field.type.num_fields)]
            pending.append((f"{prefix}{field.name}.", children))


def _to_python_values(column: Any) -> list[Any]:
    """Convert an Arrow column to Python values, with maps as dictionaries and JSON values parsed.

    ``datasets`` writes columns of mixed types as ``arrow.json``, whose ``to_pylist`` returns text. Raises
    KeyError for a map with a repeated key.
    """
    values = column.to_pylist(maps_as_pydicts="strict")
    if not _contains_json(column.type):
        return values
    return [_parse_json_values(value, column.type) for value in values]


def _contains_json(arrow_type: Any) -> bool:
    """Return whether an Arrow type contains Arrow's JSON type at any depth."""
    if _is_json(arrow_type):
        return True
    return any(_contains_json(arrow_type.field(index).type) for index in range(arrow_type.num_fields))


def _is_json(arrow_type: Any) -> bool:
    """Return whether an Arrow type is Arrow's JSON type."""
    return getattr(arrow_type, "extension_name", None) == "arrow.json"


def _parse_json_values(value: Any, arrow_type: Any) -> Any:
    """Parse the JSON texts in a value of an Arrow type, at any depth."""
    if value is None:
        return None

    if _is_json(arrow_type):
        try:
            return json.loads(value)
        # Text nested too deeply for the parser raises RecursionError.
        except (ValueError, RecursionError):
            return value

    # The values of a map share one type, whatever their keys are. Only Arrow's map type has `item_type`.
    item_type = getattr(arrow_type, "item_type", None)
    if item_type is not None:
        return {key: _parse_json_values(inner, item_type) for key, inner in value.items()}

    # The type of a struct has one field per key of the value.
    if isinstance(value, dict) and arrow_type.num_fields == len(value):
        field_types: dict[str, Any] = {}
        for index in range(arrow_type.num_fields):
            field = arrow_type.field(index)
            field_types[field.name] = field.type
        return {name: _parse_json_values(inner, field_types[name]) for name, inner in value.items()}
    if isinstance(value, list) and arrow_type.num_fields == 1:
        return [_parse_json_values(inner, arrow_type.field(0).type) for inner in value]
    return value
