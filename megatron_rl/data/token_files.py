"""Files of tokenised data sets: one process per node writes a file, and all processes map it into memory.

A token file is stored in the run folder. Its name is a digest of everything that determines its content, so a
file with the expected name has the expected tokens. Processes that share a file system synchronise on the
file's lock: the first writes the file, the others wait and map it. If the file cannot be written, each
process tokenises the data. A digest of the content is stored next to the file. The first process of a node
verifies it and replaces a damaged file.

Why not the cached ``map`` of HF ``datasets``? Version 5.2.0 has these problems:

- Concurrent processes: ``map`` uses no lock, so every rank of a node would tokenise every record.
- Damage: a cached file has no digest. 32 changed bytes were read as tokens without an error. A truncated file
  raised a pyarrow error at every start until it was deleted by hand.
- ``kill -9``: a file is renamed to its final name when it is complete, but without fsync. The temporary file
  of a killed process is never removed.
- Identity: the cache key has a pickle of the function, but not the versions of transformers and tokenizers,
  which also determine the tokens.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import psutil

from megatron_rl import durable
from megatron_rl.data.records import DataPath, Record, data_files, load_records
from megatron_rl.data.template_renderer import get_renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT = 4
"""Version of the format of token files. Increment it whenever the same settings result in different records,
tokens or columns."""
_REMARKS = b"remarks"
"""Key of the warnings about the records, in the metadata of a token file."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of a file system that does not support locks."""


@dataclass(frozen=True)
class EncodedData:
    """Data set of N records with the tokens of its prompts and responses.

    Example:
        >>> row = numpy.array([5, 6], numpy.int32)
        >>> EncodedData([Record({"prompt": "1+1="}, "a.jsonl:1")], ["1+1="], ([row],)).digest()
        '90b0b6267a070b41'
    """

    records: Sequence[Record]
    """N records in the normal form of `RecordReader`."""
    texts: Sequence[str]
    """N prompts as rendered text."""
    tokens: tuple[Sequence[numpy.ndarray], ...]
    """Columns of N int32 rows: the prompts, then one column per field of responses.

    A negative number ~token in a response is a token that is not trained on, such as a token between turns.
    """
    lines: Sequence[str] | None = None
    """N records as JSON, or None for a data set that was not read from a token file."""
    remarks: Sequence[str] = ()
    """Warnings about the records, for the console."""

    def digest(self) -> str:
        """Return a digest (16 hexadecimal digits) of the records' fields and order."""
        lines = self.lines
        if lines is None:
            lines = [_record_json(record) for record in self.records]

        digest = hashlib.sha256()
        for line in lines:
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()[:16]


def _record_json(record: Record) -> str:
    """Return a record's fields as JSON; a value that JSON cannot encode becomes the name of its type."""
    return json.dumps(record.values, ensure_ascii=False, default=lambda value: type(value).__name__)


class _LazyRows(Sequence[Any]):
    """Sequence of ``num_rows`` rows that calls ``read_row`` on each access to a row."""

    def __init__(self, num_rows: int, read_row: Callable[[int], Any]) -> None:
        self._num_rows = num_rows
        self._read_row = read_row

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self._read_row(index) for index in range(*row.indices(self._num_rows))]
        if not -self._num_rows <= row < self._num_rows:
            raise IndexError(row)
        return self._read_row(row % self._num_rows)


class _UnstorableError(Exception):
    """Error for a data set that cannot be stored in a file; the text is the reason."""


@dataclass(frozen=True)
class TokenFiles:
    """Store of tokenised data sets in a folder, with one token file per data set."""

    folder: Path | None
    """Folder of the token files, or None to store no files."""
    warn: Callable[[str], None]
    """Function that prints a warning about a file that could not be stored or was damaged."""

    def load_or_encode(
        self,
        path: DataPath,
        setting: str,
        tokenizer: PreTrainedTokenizerBase,
        inputs: Sequence[Any],
        encode: Callable[[Sequence[Record]], EncodedData],
    ) -> EncodedData:
        """Read the tokenised data set at ``path`` from its token file, or encode it and write the file.

        ``inputs`` are all inputs of ``encode`` except records and tokenizer; they are part of the file's
        identity. ``setting`` is the configuration key of ``path``, for errors. Waits while another process
        writes the file. Raises the errors of ``encode``.
        """
        # Only a fast tokenizer can be identified completely, by its JSON.
        fast_tokenizer = getattr(tokenizer, "backend_tokenizer", None)
        if self.folder is None or fast_tokenizer is None:
            return encode(load_records(path, setting=setting))

        # The process that locks the file first writes it; the others wait for the lock and read it.
        file = self.folder / f"{_content_digest(path, setting, tokenizer, inputs)[:32]}.arrow"
        encoded = None
        reason = f"the process that locked {file} first has not written it"
        try:
            self.folder.mkdir(exist_ok=True)
            with _exclusive_lock(file.with_suffix(".lock")) as was_locked:
                stored_data = self._read_if_intact(file, setting, was_locked)
                if stored_data is None and not was_locked:
                    encoded = encode(load_records(path, setting=setting))
                    _write_token_file(file, encoded)
                    stored_data = _read_token_file(file)
            if stored_data is not None:
                return stored_data
        except (OSError, _UnstorableError) as error:
            reason = str(error)

        # The file could not be written. Encode outside the lock, so that all processes encode concurrently.
        if encoded is None:
            encoded = encode(load_records(path, setting=setting))
        self.warn(f"warning: {setting}: every process tokenises the data for itself: {reason}")
        return encoded

    def _read_if_intact(self, file: Path, setting: str, was_locked: bool) -> EncodedData | None:
        """Read a token file; return None if it is absent or damaged, and remove a damaged file.

        ``was_locked``: whether another process held the lock before. That process has written the file or
        verified its digest, so the digest is not verified again.
        """
        # List the folder instead of testing for the file: after a failed test, a network file system may
        # report the file as absent for some time.
        if file.name not in os.listdir(file.parent):
            return None

        damage = None if was_locked else _find_damage(file)
        if damage is None:
            stored_data = _read_token_file(file)
            if stored_data is not None:
                return stored_data
            damage = "cannot be read"

        self.warn(f"warning: {setting}: {file} {damage}; the data set is tokenised again")
        file.unlink()  # otherwise the waiting processes would read it
        return None


def _content_digest(
    path: DataPath,
    setting: str,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Sequence[Any],
) -> str:
    """Compute the digest of everything that determines a data set's tokens: files, tokenizer and settings.

    ``inputs`` are the settings that the encoding depends on. The digest is the name of the token file.
    """
    fast_tokenizer: Any = tokenizer.backend_tokenizer
    # A template that writes the date renders different prompts at another time.
    renderer = get_renderer(tokenizer)
    clock = None
    if renderer is not None and renderer.uses_current_time:
        clock = renderer.now.isoformat()

    content = (
        _FORMAT,
        [version(name) for name in ("transformers", "tokenizers")],
        _file_states(data_files(path, setting)),
        fast_tokenizer.to_str(),
        repr(tokenizer),
        getattr(tokenizer, "chat_template", None),
        clock,
    )
    text = json.dumps([*content, *inputs], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _file_states(paths: Sequence[Path]) -> list[Any]:
    """Return name, size and modification time of each file, to detect changes of a data set."""
    files: list[Path] = []
    for path in paths:
        files.extend(sorted(path.rglob("*")) if path.is_dir() else [path])

    states: list[Any] = []
    for file in files:
        if file.is_file():
            status = file.stat()
            states.append((str(file), status.st_size, status.st_mtime_ns))
    return states


@contextlib.contextmanager
def _exclusive_lock(path: Path) -> Iterator[bool]:
    """Lock a file exclusively during the block; without effect on a file system without locks.

    Yields whether another process held the lock before. The kernel releases the lock of a killed process.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # Try without waiting first, to find out whether another process holds the lock.
        was_locked = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            was_locked = error.errno not in _NO_LOCKS
            if was_locked:
                fcntl.flock(descriptor, fcntl.LOCK_EX)

        yield was_locked
    finally:
        os.close(descriptor)  # also releases the lock


# Files


def _write_token_file(file: Path, encoded: EncodedData) -> None:
    """Write a data set to a token file, and its digest to a file next to it.

    Raises OSError, or _UnstorableError for values that JSON cannot encode.
    """
    import pyarrow

    # Write a single record batch: rows can then be views of the mapped file, without a copy.
    columns: dict[str, Any] = {
        "record": pyarrow.array(
            [_restorable_json(record) for record in encoded.records], pyarrow.large_string()
        ),
        "where": pyarrow.array([record.where for record in encoded.records], pyarrow.large_string()),
        "text": pyarrow.array(encoded.texts, pyarrow.large_string()),
    }
    # Store ragged rows as offsets and values, with offsets of 64 bits for more than 2**31 tokens.
    for column_index, rows in enumerate(encoded.tokens):
        offsets = numpy.cumsum([0, *(len(row) for row in rows)], dtype=numpy.int64)
        values = pyarrow.array(numpy.concatenate([*rows]), pyarrow.int32())
        token_lists = pyarrow.LargeListArray.from_arrays(pyarrow.array(offsets), values)
        columns[f"tokens {column_index}"] = token_lists
    batch = pyarrow.RecordBatch.from_pydict(columns)
    batch = batch.replace_schema_metadata({_REMARKS: json.dumps([*encoded.remarks])})

    def write_batch(path: Path) -> None:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)

    # Several processes may write the same file, if locks are absent or work only within a host. So each
    # writes a temporary file whose name has its host and process id.
    _remove_abandoned_files(file)
    temporary_file = file.with_name(f"{_host_prefix(file)}{os.getpid()}")
    try:
        durable.replace_file(temporary_file, write_batch)
        digest = durable.compute_digests(temporary_file.parent, [temporary_file.name])[temporary_file.name]

        # Rename the digest first. If the process is killed between the two renames, an older file may remain,
        # which does not match the new digest, and the next run writes the file again.
        digest_file = temporary_file.with_name(f"{temporary_file.name}.digest")
        durable.write_text(digest_file, f"{file.name} {digest}\n")
        os.replace(digest_file, _digest_file(file))
        os.replace(temporary_file, file)
    except OSError:
        temporary_file.with_name(temporary_file.name + ".part").unlink(missing_ok=True)
        raise


def _host_prefix(file: Path) -> str:
    """Return the name prefix of the temporary files that this host writes for a token file."""
    return f"{file.name}.{socket.gethostname()}."


def _remove_abandoned_files(file: Path) -> None:
    """Remove temporary files that processes of this host left behind when they wrote a token file.

    A token file contains the tokens of a data set. The files of running processes are not removed.
    """
    prefix = _host_prefix(file)
    for temporary_file in file.parent.glob(f"{prefix}[0-9]*"):
        process_id = temporary_file.name.removeprefix(prefix).partition(".")[0]
        is_alive = process_id.isdigit() and psutil.pid_exists(int(process_id))
        if not is_alive:
            temporary_file.unlink(missing_ok=True)


def _digest_file(file: Path) -> Path:
    """Return the path of the file that contains the digest of a token file."""
    return file.with_suffix(".digest")


def _find_damage(file: Path) -> str | None:
    """Describe how a token file differs from its stored digest; return None for an intact file."""
    # The digest file also contains the name of the token file, so that a renamed copy is rejected.
    try:
        name, digest = _digest_file(file).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return f"has no digest in {_digest_file(file).name}"
    if name != file.name:
        return f"has the digest of {name}"

    damages = durable.describe_damaged_files(file.parent, {file.name: digest}, [file.name])
    if not damages:
        return None
    return damages[0].removeprefix(f"{file.name} ")


def _restorable_json(record: Record) -> str:
    """Return a record's fields as JSON; raises _UnstorableError unless parsing restores the same values."""
    try:
        text = _record_json(record)
        if json.loads(text) == record.values:
            return text
    except ValueError:
        pass
    raise _UnstorableError(f"{record.where} has values that JSON cannot encode")


def _read_token_file(file: Path) -> EncodedData | None:
    """Map a token file into memory and return its data set; return None for a file in another format."""
    import pyarrow

    try:
        mapped_file = pyarrow.memory_map(str(file))
        batch = pyarrow.ipc.open_file(mapped_file).get_batch(0)
        lines, locations, texts, *columns = batch.columns
        tokens = tuple(_token_rows(column) for column in columns)
    except (pyarrow.ArrowException, ValueError):
        return None

    # Parse a record only on access: a run needs the records of one batch at a time.
    def read_record(row: int) -> Record:
        values = json.loads(lines[row].as_py())
        return Record(values, locations[row].as_py())

    metadata = batch.schema.metadata or {}
    return EncodedData(
        records=_LazyRows(batch.num_rows, read_record),
        texts=_LazyRows(batch.num_rows, lambda row: texts[row].as_py()),
        tokens=tokens,
        lines=_LazyRows(batch.num_rows, lambda row: lines[row].as_py()),
        remarks=json.loads(metadata.get(_REMARKS, b"[]")),
    )


def _token_rows(column: Any) -> _LazyRows:
    """Return the rows of a column of tokens; each row is a view of the mapped file."""
    values = column.values.to_numpy(zero_copy_only=True)
    offsets = column.offsets.to_numpy(zero_copy_only=True)
    return _LazyRows(len(column), lambda row: values[offsets[row] : offsets[row + 1]])
