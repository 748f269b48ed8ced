"""Data sets as tokens, made by one process of a node and mapped into the memory of all.

The file lies in the run folder and is named by a digest of all that decides its content. Processes that see
one file system meet in its lock: the first makes the file, the others wait and find it there. Where it cannot
be written, each process keeps tokens of its own. Beside the file lies its digest: whoever opens it first
compares the two, and makes a damaged file anew.
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
from megatron_rl.data.records import Record, load_records
from megatron_rl.data.shards import DataPath, data_files
from megatron_rl.data.template_renderer import renderer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT = 4
"""Changes whenever equal settings give files of other content."""
_REMARKS = b"remarks"
"""Key of the file's metadata that holds warnings about the records."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Encoded:
    """Hold a data set: its records, their prompts as rendered text, and their tokens.

    ``tokens`` are columns of int32 rows: the prompts, then each field of responses, where ~token is one that
    is read between turns and not said. All are as long as the records, as are ``lines``, the records as JSON
    where a file has them. ``remarks`` are warnings about the records.
    """

    records: Sequence[Record]
    texts: Sequence[str]
    tokens: tuple[Sequence[numpy.ndarray], ...]
    lines: Sequence[str] | None = None
    remarks: Sequence[str] = ()

    def digest(self) -> str:
        """Return 16 hexadecimal digits that differ where the fields of records or their order do."""
        digest = hashlib.sha256()
        for line in map(_line, self.records) if self.lines is None else self.lines:
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()[:16]


def _line(record: Record) -> str:
    """Return a record's fields as JSON, where a value that JSON has not is the name of its type."""
    return json.dumps(record.values, ensure_ascii=False, default=lambda value: type(value).__name__)


class _Rows(Sequence[Any]):
    """Rows that are read when they are asked for."""

    def __init__(self, count: int, read: Callable[[int], Any]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self._read(index) for index in range(*row.indices(self._count))]
        if not -self._count <= row < self._count:
            raise IndexError(row)
        return self._read(row % self._count)


@dataclass(frozen=True)
class TokenFiles:
    """Keep data sets as tokens in ``folder``; None keeps none. ``say`` takes why one could not be kept."""

    folder: Path | None
    say: Callable[[str], None]

    def encoded(
        self,
        path: DataPath,
        setting: str,
        tokenizer: PreTrainedTokenizerBase,
        how: Sequence[Any],
        encode: Callable[[Sequence[Record]], Encoded],
    ) -> Encoded:
        """Return the data set at ``path`` as ``encode`` gives it, from the file where there is one.

        ``how`` is what decides the answer beside the records and the tokenizer; ``setting`` names the path in
        errors. Waits for a process of this node that makes the file. Raises what ``encode`` does.
        """

        def own() -> Encoded:
            return encode(load_records(path, setting=setting))

        fast = getattr(tokenizer, "backend_tokenizer", None)
        if self.folder is None or fast is None:
            return own()
        template = getattr(tokenizer, "chat_template", None)
        versions = [version(name) for name in ("transformers", "tokenizers")]
        renderer = renderer_of(tokenizer)
        clock = renderer.now.isoformat() if renderer is not None and renderer.has_clock else None
        parts = (
            _FORMAT,
            versions,
            _state(data_files(path, setting)),
            fast.to_str(),
            repr(tokenizer),
            template,
            clock,
        )
        digest = hashlib.sha256(json.dumps([*parts, *how], default=str).encode()).hexdigest()
        file = self.folder / f"{digest[:32]}.arrow"
        made, why = None, f"the first that came to {file} has not written it"
        try:
            self.folder.mkdir(exist_ok=True)
            with _alone(file.with_suffix(".lock")) as waited:
                # A list of the folder is fresh where a network file system remembers that a name was absent.
                kept = None
                if file.name in os.listdir(self.folder):
                    # Whoever held the lock a moment ago has compared the digest: one pass for a node.
                    damage = None if waited else _damage(file)
                    kept = _read(file) if damage is None else None
                    if kept is None:
                        reason = damage or "cannot be read"
                        self.say(f"warning: {setting}: {file} {reason}; its tokens are made anew")
                        file.unlink()  # whoever waits reads what is there without another look
                if kept is None and not waited:
                    made = own()
                    _write(file, made)
                    kept = _read(file)
            if kept is not None:
                return kept
        except (OSError, _Unfit) as error:
            why = str(error)
        made = own() if made is None else made  # all at once: whoever waits does not try in turn
        self.say(f"warning: {setting}: every process keeps tokens of its own: {why}")
        return made


class _Unfit(Exception):
    """Say why a data set cannot be kept in a file."""


def _state(paths: Sequence[Path]) -> list[Any]:
    """Return what changes when a data set does: names, sizes and times of its files, in reading order."""
    files: list[Path] = []
    for path in paths:
        files.extend(sorted(path.rglob("*")) if path.is_dir() else [path])
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Keep other processes that see the file out of the block, where the file system has locks.

    Gives whether it waited for one.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        waited = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            waited = error.errno not in _NO_LOCKS
            if waited:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield waited
    finally:
        os.close(descriptor)


def _write(file: Path, encoded: Encoded) -> None:
    import pyarrow

    columns: dict[str, Any] = {
        "record": pyarrow.array([_as_json(record) for record in encoded.records], pyarrow.large_string()),
        "where": pyarrow.array([record.where for record in encoded.records], pyarrow.large_string()),
        "text": pyarrow.array(encoded.texts, pyarrow.large_string()),
    }
    for number, rows in enumerate(encoded.tokens):
        ends = numpy.cumsum([0, *(len(row) for row in rows)], dtype=numpy.int64)
        values = pyarrow.array(numpy.concatenate([*rows]), pyarrow.int32())
        columns[f"tokens {number}"] = pyarrow.LargeListArray.from_arrays(pyarrow.array(ends), values)
    batch = pyarrow.RecordBatch.from_pydict(columns)
    batch = batch.replace_schema_metadata({_REMARKS: json.dumps([*encoded.remarks])})

    def write(aside: Path) -> None:
        with pyarrow.OSFile(str(aside), "wb") as sink, pyarrow.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)

    # Where there are no locks, or they do not reach from host to host, several may write the same at once.
    of_host = f"{file.name}.{socket.gethostname()}."
    for unfinished in file.parent.glob(f"{of_host}[0-9]*"):
        process = unfinished.name.removeprefix(of_host).partition(".")[0]
        if not (process.isdigit() and psutil.pid_exists(int(process))):
            unfinished.unlink(missing_ok=True)  # of a job that was killed
    temporary = file.with_name(f"{of_host}{os.getpid()}")
    try:
        durable.replace_file(temporary, write)
        digest = durable.digests(temporary.parent, [temporary.name])[temporary.name]
        # First the digest: a kill before the second rename leaves a file that is made anew.
        named = temporary.with_name(f"{temporary.name}.digest")
        durable.write_text(named, f"{file.name} {digest}\n")
        os.replace(named, _digest_file(file))
        os.replace(temporary, file)
    except OSError:
        temporary.with_name(temporary.name + ".part").unlink(missing_ok=True)
        raise


def _digest_file(file: Path) -> Path:
    return file.with_suffix(".digest")


def _damage(file: Path) -> str | None:
    """Return how a file differs from what was written under its name, None where it does not."""
    try:
        name, digest = _digest_file(file).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return f"has no digest in {_digest_file(file).name}"
    if name != file.name:
        return f"has the digest of {name}"
    lines = durable.damages(file.parent, {file.name: digest}, [file.name])
    return lines[0].removeprefix(f"{file.name} ") if lines else None


def _as_json(record: Record) -> str:
    """Return a record's fields as text that gives them back; raises _Unfit where there is none."""
    try:
        text = _line(record)
        if json.loads(text) == record.values:
            return text
    except ValueError:
        pass
    raise _Unfit(f"{record.where} holds values that JSON has not")


def _read(file: Path) -> Encoded | None:
    """Return what a file holds, None where it is no such file."""
    import pyarrow

    try:
        batch = pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).get_batch(0)
        count = batch.num_rows
        record, where, text, *lists = batch.columns
        tokens = [_rows_of(column) for column in lists]
    except (pyarrow.ArrowException, ValueError):
        return None
    remarks = json.loads((batch.schema.metadata or {}).get(_REMARKS, b"[]"))
    return Encoded(
        _Rows(count, lambda row: Record(json.loads(record[row].as_py()), where[row].as_py())),
        _Rows(count, lambda row: text[row].as_py()),
        tuple(tokens),
        _Rows(count, lambda row: record[row].as_py()),
        remarks,
    )


def _rows_of(column: Any) -> _Rows:
    values = column.values.to_numpy(zero_copy_only=True)
    ends = column.offsets.to_numpy(zero_copy_only=True)
    return _Rows(len(column), lambda row: values[ends[row] : ends[row + 1]])
