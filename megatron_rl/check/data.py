"""Rules on data sets: files that can be read, records that are valid, and rows that fit their token limits.

`check` should take seconds, so it samples: it reads small data sets to the end, and the first records of
larger ones. It tokenises a sample of these records, without torch and transformers: the longest, the
shortest, and others spread evenly. Counts exclude the special tokens that a tokenizer adds around a text, so
a record that is reported as too long is also too long in the run.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rl.check.files import FileFindings
from megatron_rl.check.model.tokenizer import (
    added_token_texts,
    build_template_renderer,
    end_token_texts,
    read_tokenizer,
)
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.chat_format import (
    ConversationRenderer,
    TurnEnd,
    find_turn_end,
    template_tokens,
    undefined_turn_end_warning,
)
from megatron_rl.data.forms import RecordReader
from megatron_rl.data.messages import (
    closing_reasoning_tag,
    is_uninformative,
    message_texts,
    no_tokens_error,
    prompt_messages,
    unclosed_reasoning_warning,
    uninformative_warning,
    uses_chat_template,
)
from megatron_rl.data.records import (
    KINDS,
    DataPath,
    Record,
    data_files,
    empty_data_error,
    missing_data_error,
    parse_line,
    partial_shards_warning,
    read_table,
    unreadable_data_error,
)
from megatron_rl.data.rendered_text import (
    EXAMINED_RECORDS,
    prompt_warnings,
    render_prompts,
    response_pieces,
    response_warnings,
)
from megatron_rl.data.template_renderer import TemplateRenderer
from megatron_rl.errors import UserError

MIN_RECORDS = 200
"""Minimum number of records that are read at the start of each data set, however large it is."""

FULLY_READ_BYTES = 16 << 20
"""Bytes of JSON lines, over all data sets, that `check` reads completely: about a second's work."""

FULLY_READ_TABLE_BYTES = 4 << 20
"""Bytes of Parquet and Arrow tables, which may be compressed, that take as long to read as
`FULLY_READ_BYTES`."""

MAX_LINE_BYTES = 64 << 20
"""Longest line that is read, in bytes: without a bound, a device such as /dev/zero would fill the memory."""

COUNTED_BYTES = 256 << 20
"""Largest file whose lines are counted, in bytes: `check` should take less than five seconds."""

MAX_RECORD_ERRORS = 5
"""Number of different record errors after which reading of a data set stops."""

TOKENISED_RECORDS = 256
"""Largest number of records of a data set that are tokenised."""

EXTREME_RECORDS = 32
"""Number of the longest records, and of the shortest ones, in the tokenised sample."""

CHARACTERS = 1 << 20
"""Budget of characters to tokenise, over all data sets; two records of each data set are always tokenised."""

_MIN_TOKENISED_CHARACTERS = 1 << 16
"""Characters to which a text is truncated before it is tokenised; more if the token limit is high."""

_EMPTY_PROMPT_CHARACTERS = 256
"""Longest prompt, in characters, that is tested for having no tokens: a tokenizer may drop short texts."""


@dataclass(frozen=True)
class DataSet:
    """Data set to check, with the reader of its records and its token limit.

    Attributes:
        source: File, folder, pattern or list of these, as in the configuration.
        reader: Reader of its records, with the key of the data set and the names of the record fields.
        limit: Maximum tokens of a prompt and response together, or of a prompt for data without responses.
            None if not available.
        limited_by: The key that sets ``limit``.
    """

    source: DataPath
    reader: RecordReader
    limit: int | None = None
    limited_by: str = "data.max_prompt_tokens"

    @property
    def key(self) -> str:
        """Return the configuration key that names the data set, such as ``data.train``."""
        return self.reader.setting

    @property
    def data_config(self) -> DataConfig:
        """Return the settings that name the fields of the data set's records."""
        return self.reader.data

    @property
    def response_fields(self) -> Mapping[str, str]:
        """Return the fields that contain responses: field -> setting that names it."""
        return self.reader.responses


@dataclass(frozen=True)
class DataPreview:
    """Records read from the start of a data set.

    Attributes:
        first: Values of the first valid record, as `RecordReader` converts it. Without a valid record, values
            of the first record in the file. None for tables that cannot be read on this machine.
        count: Number of records of the complete data set, or None if they were not counted.
        records: The valid records that were read, as `RecordReader` converts them.
    """

    first: Mapping[str, Any] | None
    count: int | None
    records: Sequence[Record] = ()


@dataclass(frozen=True)
class DatasetStats:
    """Numbers of records and tokens of one data set, for the report of `check`.

    Attributes:
        where: Configuration key of the data set.
        records: Number of records that were read.
        total: Number of records of the complete data set, or None if they were not counted.
        tokenised: Number of records that were tokenised.
        longest: Tokens of the longest tokenised record.
        over: Number of tokenised records with more tokens than ``limit``.
        limit: Largest valid number of tokens of a record, or None if the limit is not available.

    Example:
        The longest of 64 tokenised records has 512 tokens. The limit is 256, and one record exceeds it.

        >>> DatasetStats("data.train", 200, None, 64, 512, 1, 256).describe()
        'read the first 200 of many records, counted the tokens of 64: longest 512 of 256; 1 are longer'
    """

    where: str
    records: int
    total: int | None
    tokenised: int
    longest: int
    over: int
    limit: int | None

    def describe(self) -> str:
        """Describe the numbers of records and tokens as one sentence of the report."""
        records_text = f"the first {self.records:,} of many"
        if self.records == self.total:
            records_text = f"all {self.total:,}"
        elif self.total is not None:
            records_text = f"the first {self.records:,} of {self.total:,}"
        if not self.tokenised:
            return f"read {records_text} records, counted the tokens of none"

        tokenised_text = f"{self.tokenised:,}"
        if self.tokenised == self.records:
            tokenised_text = "all"
        sentence = f"read {records_text} records, counted the tokens of {tokenised_text}"
        sentence += f": longest {self.longest:,}"

        if self.limit is not None:
            sentence += f" of {self.limit:,}"
            if self.over:
                sentence += f"; {self.over:,} are longer"
        return sentence


def _count_bytes_on_disk(path: Path) -> int:
    """Return the size in bytes of a file, or of all files in a folder, such as a table's Arrow files."""
    files = [path]
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


@dataclass
class ReadBudget:
    """Budget of bytes for reading data sets completely; at 0, only the first records of a set are read.

    Attributes:
        remaining: Remaining bytes, for the data sets that have not been read yet.
    """

    remaining: int = field(default_factory=lambda: FULLY_READ_BYTES)

    def reserve(self, files: Sequence[Path]) -> int | None:
        """Subtract the size of a data set's files from the budget.

        Returns the number of bytes to read, or None if the budget suffices to read the files completely.
        """
        # The budget counts bytes of JSON lines. Reading FULLY_READ_TABLE_BYTES of a table, which may be
        # compressed, takes as long as reading FULLY_READ_BYTES of JSON lines, so scale the size of a table.
        weighted_bytes = 0
        for file in files:
            file_bytes = _count_bytes_on_disk(file)
            if file.suffix != ".jsonl":
                file_bytes *= FULLY_READ_BYTES // FULLY_READ_TABLE_BYTES
            weighted_bytes += file_bytes

        reserved_bytes = min(weighted_bytes, self.remaining)
        self.remaining -= reserved_bytes
        if reserved_bytes == weighted_bytes:
            return None
        return reserved_bytes


def check_data(data_set: DataSet, files: FileFindings, budget: ReadBudget) -> DataPreview | None:
    """Check the files and records of a data set; return a preview of the records.

    Errors and warnings are added to ``files``, and ``budget`` limits how much is read. Returns None if the
    data set cannot be read.
    """
    missing_path = _find_missing_path(data_set.source)
    if missing_path is not None:
        error = missing_data_error(missing_path, data_set.key)
        files.record_missing(missing_path, error.message, data_set.key, KINDS, error.fix or "")
        return None

    try:
        # Detect truncated Parquet files here, since pyarrow's error names neither the file nor a fix.
        paths = data_files(data_set.source, data_set.key)
        for path in paths:
            if path.is_file() and path.suffix == ".parquet":
                _require_parquet(path, data_set.key)

        warning = partial_shards_warning(data_set.source, paths, data_set.key)
        if warning is not None:
            files.warnings.append(warning)

        return _check_records(data_set, paths, files, budget.reserve(paths))
    except OSError as error:
        first_path = _source_paths(data_set.source)[0]
        fix = "check the permissions of the file and of its folders"
        files.errors.append(unreadable_data_error(first_path, data_set.key, str(error), fix))
    except ImportError:  # a machine that only checks may lack the packages that read tables
        return DataPreview(None, None)
    except UserError as error:
        files.errors.append(error)
    return None


def _source_paths(source: DataPath) -> list[Path]:
    """Return the paths and glob patterns of a data set as a list."""
    if isinstance(source, str | Path):
        return [Path(source)]
    return [Path(path) for path in source]


def _find_missing_path(source: DataPath) -> Path | None:
    """Return the first path of a data set that does not exist, or None if all exist."""
    for path in _source_paths(source):
        # A pattern exists if it matches any path.
        is_pattern = glob.has_magic(str(path))
        if is_pattern and glob.glob(str(path), recursive=True):
            continue
        if not path.exists():
            return path
    return None


def _check_records(
    data_set: DataSet, paths: Sequence[Path], files: FileFindings, max_bytes: int | None
) -> DataPreview | None:
    """Read the records of a data set; return the preview, or None for an empty data set.

    Errors and warnings are added to ``files``. ``max_bytes`` is the maximum number of bytes of JSON lines to
    read; None reads all records.
    """
    first_values: Mapping[str, Any] | None = None
    read_count = 0
    records: list[Record] = []

    # Many records may have the same mistake: report it for the first of them. The key is (message, got).
    error_by_message: dict[tuple[str, str | None], UserError] = {}
    for record_or_error in _read_records(paths, data_set.key, max_bytes):
        if len(error_by_message) >= MAX_RECORD_ERRORS:
            break
        try:
            read_count += 1
            if isinstance(record_or_error, UserError):
                raise record_or_error
            first_values = first_values or record_or_error.values
            records.append(data_set.reader.read(record_or_error))
        except UserError as error:
            error_by_message.setdefault((error.message, error.got), error)

    # With a wrong field name, the reader's warnings about unread fields would mislead.
    files.errors.extend(error_by_message.values())
    if not error_by_message:
        files.warnings.extend(data_set.reader.warnings())
    files.warnings.extend(_uninformative_warnings(data_set, records))
    if first_values is None and not error_by_message:
        files.errors.append(empty_data_error(data_set.source, data_set.key))
        return None

    # Prefer the first converted record to the first record in the file, which may be invalid.
    if records:
        first_values = records[0].values

    # Without a byte limit every record was read. Otherwise count the lines, which is faster than parsing.
    count: int | None = None
    if max_bytes is not None:
        count = _count_records(paths)
    elif not error_by_message:
        count = read_count
    return DataPreview(first_values, count, records)


def _read_records(
    paths: Sequence[Path], data_key: str, max_bytes: int | None
) -> Iterator[Record | UserError]:
    """Yield the records of files, and an error for each invalid line.

    ``max_bytes`` is the number of bytes of JSON lines to read, split evenly between the files. With
    ``max_bytes``, only the first records of a table are read; with None, every file is read to its end.
    """
    bytes_per_file = None
    if max_bytes is not None:
        bytes_per_file = max_bytes // len(paths)
    min_records = max(1, MIN_RECORDS // len(paths))
    for path in paths:
        if path.is_file() and path.suffix == ".jsonl":
            yield from _read_lines(path, data_key, bytes_per_file, min_records)
        elif max_bytes is None:
            yield from read_table(path)
        else:
            yield from islice(read_table(path), min_records)


def _read_lines(
    path: Path, data_key: str, max_bytes: int | None, min_lines: int
) -> Iterator[Record | UserError]:
    """Yield the record of each line of a file, or an error for an invalid line.

    Stops after ``max_bytes``, but not before ``min_lines``. Raises UserError for a line of `MAX_LINE_BYTES`,
    which is too long for a record: the file may be endless.
    """
    bytes_read = 0
    with path.open("rb") as stream:
        # Lines up to the end of the file, each cut at the maximum.
        lines = iter(lambda: stream.readline(MAX_LINE_BYTES), b"")
        for number, line in enumerate(lines, start=1):
            bytes_read += len(line)
            if max_bytes is not None and bytes_read > max_bytes and number > min_lines:
                return

            if len(line) == MAX_LINE_BYTES:
                problem = f"line {number} has {MAX_LINE_BYTES >> 20} MiB or more"
                raise unreadable_data_error(path, data_key, problem, "name a file of records")

            if not line.strip():
                continue
            location = f"{path}:{number}"
            try:
                yield Record(parse_line(line, f"{location} ({data_key})"), location)
            except UserError as error:
                yield error


def _uninformative_warnings(data_set: DataSet, records: Sequence[Record]) -> Iterator[UserError]:
    """Yield a warning about records whose responses give no training signal."""
    response_fields = data_set.response_fields
    if not response_fields:
        return

    # Empty responses, or pairs of equal responses: their loss is 0 or cancels.
    locations: list[str] = []
    for record in records:
        responses = [record.values[name] for name in response_fields]
        if is_uninformative(*responses):
            locations.append(record.where)
    if locations:
        yield UserError(
            uninformative_warning(locations, len(records), len(response_fields) > 1),
            where=data_set.key,
            got=f"{', '.join(response_fields)} of {len(records)} records that were read",
            fix="correct or remove the records",
        )


def _require_parquet(path: Path, data_key: str) -> None:
    """Raise UserError unless a file begins and ends with the magic bytes of Parquet."""
    with path.open("rb") as stream:
        first_bytes = stream.read(4)
        size = path.stat().st_size
        stream.seek(max(0, size - 4))
        last_bytes = stream.read(4)

    if size == 0:
        raise empty_data_error(path, data_key)
    if first_bytes != b"PAR1" or last_bytes != b"PAR1":
        raise UserError(
            f"{path} is not a whole Parquet file",
            where=data_key,
            expected="a file that begins and ends with PAR1",
            got=f"{first_bytes!r} ... {last_bytes!r}, {size} bytes",
            fix="write or download the file again",
        )


def _count_records(paths: Sequence[Path]) -> int | None:
    """Return the number of records of all files, which is the number of their lines.

    Returns None if a file is a table, or too large to count its lines in time.
    """
    line_count = 0
    for path in paths:
        if path.suffix != ".jsonl" or path.stat().st_size > COUNTED_BYTES:
            return None
        line_count += _count_lines(path)
    return line_count


def _count_lines(path: Path) -> int:
    """Return the number of lines of a file; the last one need not end with a newline."""
    newline_count = 0
    last_byte = b"\n"
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            newline_count += block.count(b"\n")
            last_byte = block[-1:]
    if last_byte != b"\n":
        return newline_count + 1
    return newline_count


@dataclass
class TokenCounter:
    """Token counts and rendered texts of data sets, with the tokenizer and chat template of one model.

    Attributes:
        model: Folder of the model.
        remaining: Remaining budget of characters to tokenise, over all data sets.
        stats: Statistics of the data sets that were counted, in their order.
    """

    model: Path
    remaining: int = field(default_factory=lambda: CHARACTERS)
    stats: list[DatasetStats] = field(default_factory=list[DatasetStats])
    _turn_end_reported: bool = False

    @cached_property
    def tokenizer(self) -> Any:
        """Return the tokenizer in the model's folder, or None if it cannot be read."""
        return read_tokenizer(self.model) if self.model.is_dir() else None

    @cached_property
    def renderer(self) -> TemplateRenderer | None:
        """Return the renderer of the model's chat template, or None if it has no template."""
        return build_template_renderer(self.model) if self.model.is_dir() else None

    @cached_property
    def end_tokens(self) -> dict[int, str]:
        """Return the tokens that end a response according to the model's files: id -> text."""
        return {} if self.tokenizer is None else end_token_texts(self.model, self.tokenizer)

    @cached_property
    def turn_end(self) -> TurnEnd | None:
        """Return the tokens with which the chat template ends turns, or None if it cannot be rendered."""
        if self.renderer is None or self.tokenizer is None:
            return None

        def encode(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=False).ids

        added_tokens = added_token_texts(self.tokenizer)
        bos = self.renderer.special_tokens.get("bos_token")
        return find_turn_end(ConversationRenderer(self.renderer), encode, added_tokens, bos)

    @cached_property
    def conversation_renderer(self) -> ConversationRenderer | None:
        """Return the renderer of conversations as text, or None if the template cannot be rendered."""
        if self.renderer is None or self.tokenizer is None:
            return None
        end_texts = [*self.end_tokens.values()]

        # A turn may end with another token than a response, such as <|im_end|> instead of <|endoftext|>.
        if self.turn_end is not None and self.turn_end.token is not None:
            end_texts.append(self.tokenizer.id_to_token(self.turn_end.token))
        return ConversationRenderer(self.renderer, end_texts)

    @cached_property
    def chat_template_tokens(self) -> set[str]:
        """Return the texts of the special tokens that the chat template writes around messages."""
        if self.tokenizer is None:
            return set()
        return template_tokens(self.renderer, added_token_texts(self.tokenizer).values())

    @cached_property
    def reasoning_end_tag(self) -> str | None:
        """Return the tag that closes a reasoning block, such as ``</think>``, if rendered prompts open one.

        Returns None for prompts without an opening tag.
        """
        if self.conversation_renderer is None:
            return None
        with suppress(UserError):
            return closing_reasoning_tag(self.conversation_renderer.opening)
        return None

    def close(self) -> None:
        """End the process that renders the chat template, if there is one."""
        if self.renderer is not None:
            self.renderer.close()

    def check_records(
        self, data_set: DataSet, preview: DataPreview, over_long: str, files: FileFindings
    ) -> None:
        """Count the tokens of a data set's records, and check their lengths and rendered texts.

        Errors and warnings are added to ``files``. ``over_long`` is ``data.over_long``: with ``error``, a
        single record above the limit is an error.
        """
        # Count the tokens of a sample of the records.
        records = preview.records
        token_counts: dict[int, int] = {}
        if self.tokenizer is not None:
            token_counts = self._count_tokens(data_set, records, files)

        too_long_indices: list[int] = []
        if data_set.limit is not None:
            too_long_indices = sorted(
                index for index, count in token_counts.items() if count > data_set.limit
            )
        stats = DatasetStats(
            where=data_set.key,
            records=len(records),
            total=preview.count,
            tokenised=len(token_counts),
            longest=max(token_counts.values(), default=0),
            over=len(too_long_indices),
            limit=data_set.limit,
        )
        self.stats.append(stats)

        # Without `over_long: error`, only a data set in which every record is too long is an error.
        if too_long_indices:
            first_index = too_long_indices[0]
            location = f"{records[first_index].where} ({data_set.key})"
            error = _too_long_error(data_set, stats, location, token_counts[first_index], over_long)
            all_are_counted = len(token_counts) == len(records) == preview.count
            if over_long == "error" or (all_are_counted and len(too_long_indices) == len(records)):
                files.errors.append(error)
            elif 2 * len(too_long_indices) > len(token_counts):
                # A run drops records that are too long. Warn if it would drop more than half of them.
                files.warnings.append(error)

        # Held-out data of a stage would repeat the warnings about the stage's training data.
        if not data_set.key.endswith(".held_out"):
            files.warnings.extend(self._text_warnings(data_set, records[:EXAMINED_RECORDS]))

    def _text_warnings(self, data_set: DataSet, records: Sequence[Record]) -> Iterator[UserError]:
        """Yield warnings about the chat template, and about the rendered texts of ``records``."""
        if self.tokenizer is None or not records:
            return

        data = data_set.data_config
        uses_template = any(uses_chat_template(record, data) for record in records)
        end_texts = [*self.end_tokens.values()]

        # Warn about the template itself only once for all data sets.
        if uses_template:
            if self.conversation_renderer is None:
                return
            end_tokens_text = ", ".join(end_texts)
            mismatch = undefined_turn_end_warning(
                self.turn_end, [*self.end_tokens], end_tokens_text, str(self.model)
            )
            if mismatch is not None and not self._turn_end_reported:
                self._turn_end_reported = True
                yield mismatch
            end_texts = self.conversation_renderer.end_texts

        # Reasoning models: if the prompt opens a reasoning block, each response must close the block.
        if data_set.response_fields and uses_template and self.reasoning_end_tag is not None:
            warning = unclosed_reasoning_warning(
                records, data_set.response_fields, data, self.reasoning_end_tag, data_set.key
            )
            if warning is not None:
                yield warning

        with suppress(UserError):  # `_count_tokens` reports a record that the template refuses
            texts = render_prompts(records, data, data_set.key, self.renderer)
            yield from prompt_warnings(
                records, texts, data, data_set.key, end_texts, self.chat_template_tokens
            )
            if data_set.response_fields:
                yield from response_warnings(
                    records,
                    data_set.response_fields,
                    data,
                    data_set.key,
                    self.conversation_renderer,
                    end_texts,
                )

    def _count_tokens(
        self, data_set: DataSet, records: Sequence[Record], files: FileFindings
    ) -> dict[int, int]:
        """Return the number of tokens of a sample of records: index in ``records`` -> tokens.

        A record with several responses counts with its longest response. The first record that cannot be
        rendered, or whose prompt has no tokens, is an error in ``files`` and ends the counting.
        """
        # Index of a record -> its rows. A row has the texts of the prompt, then the texts of one response.
        rows_by_index: dict[int, list[list[str]]] = {}

        character_counts = [_count_characters(record, data_set) for record in records]
        for index in _sampled_indices(character_counts):
            # Two records of each data set are rendered even if the budget is exhausted.
            if len(rows_by_index) > 1 and self.remaining < character_counts[index]:
                continue
            self.remaining -= character_counts[index]

            record = records[index]
            try:
                rows = self._render_rows(record, data_set)
                rows_by_index[index] = rows

                # A broken tokenizer returns no tokens for any prompt. If `files` has an error, the tokenizer
                # may be the cause, so a prompt without tokens is an error of the record only if its text is
                # empty.
                if not record.values[data_set.data_config.prompt_field] or not files.errors:
                    first_row = rows[0]
                    self._require_tokens(first_row[0], record, data_set)
            except UserError as error:
                files.errors.append(error)
                break

        # Encode all texts in one batch, which `tokenizers` does in parallel. Truncate longer texts, which are
        # too long in any case: a token has far fewer than 16 characters on average.
        max_characters = max(_MIN_TOKENISED_CHARACTERS, 16 * (data_set.limit or 0))
        texts: list[str] = []
        for rows in rows_by_index.values():
            for row in rows:
                texts.extend(text[:max_characters] for text in row)
        encodings = iter(self.tokenizer.encode_batch(texts, add_special_tokens=False))

        # The encodings have the order of the texts: first all texts of the first row, then of the second.
        token_counts: dict[int, int] = {}
        for index, rows in rows_by_index.items():
            longest_row_tokens = 0
            for row in rows:
                row_tokens = 0
                for _ in row:
                    row_tokens += len(next(encodings).ids)
                longest_row_tokens = max(longest_row_tokens, row_tokens)
            token_counts[index] = longest_row_tokens
        return token_counts

    def _require_tokens(self, prompt: str, record: Record, data_set: DataSet) -> None:
        """Raise UserError for a prompt without tokens, from which no response can be sampled."""
        # A long prompt has tokens in any case, and is not tokenised here.
        if len(prompt) > _EMPTY_PROMPT_CHARACTERS and prompt.strip():
            return

        # As in training, add no special tokens to a rendered prompt: the template has written them.
        add_special_tokens = not uses_chat_template(record, data_set.data_config)
        if not self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens).ids:
            raise no_tokens_error(prompt, f"{record.where} ({data_set.key})")

    def _render_rows(self, record: Record, data_set: DataSet) -> list[list[str]]:
        """Return the texts of a record's rows; raise UserError if the template cannot render the record.

        Each response is one row: the texts of the prompt, followed by the texts of the response. A record
        without responses has one row, the prompt.
        """
        data = data_set.data_config
        if self.renderer is None and uses_chat_template(record, data):
            # The record needs a chat template, but the model has none. The check of the tokenizer reports
            # this, so count only the contents of the messages here.
            prompt = message_texts(prompt_messages(record, data))
            responses = [message_texts(record.values[name]) for name in data_set.response_fields]
        else:
            prompt = render_prompts([record], data, data_set.key, self.renderer)
            suggested_setting = None
            if data_set.reader.every_turn:
                suggested_setting = "set sft.turns=last"
            end_texts = [*self.end_tokens.values()]
            responses = [
                response_pieces(
                    record,
                    name,
                    data,
                    data_set.key,
                    self.conversation_renderer,
                    end_texts,
                    suggested_setting,
                )
                for name in data_set.response_fields
            ]

        if not responses:
            return [prompt]
        return [prompt + response for response in responses]


def _count_characters(record: Record, data_set: DataSet) -> int:
    """Return the number of characters of a record's prompt and responses together."""
    character_count = 0
    for field_name in (data_set.data_config.prompt_field, *data_set.response_fields):
        character_count += sum(len(text) for text in message_texts(record.values[field_name]))
    return character_count


def _sampled_indices(character_counts: Sequence[int]) -> Iterator[int]:
    """Yield the indices of the records to tokenise: alternately long and short records, then a spread sample.

    ``character_counts`` has the number of characters of each record. The spread sample consists of records at
    equal distances. The order matters if the budget of characters runs out.
    """
    # Tokenise a small data set completely, longest record first.
    indices_by_size = sorted(range(len(character_counts)), key=character_counts.__getitem__)
    if len(character_counts) <= TOKENISED_RECORDS:
        yield from reversed(indices_by_size)
        return

    # A dict keeps the order and drops repeated indices.
    selected: dict[int, None] = {}
    for long_index, short_index in zip(
        reversed(indices_by_size[-EXTREME_RECORDS:]), indices_by_size[:EXTREME_RECORDS], strict=True
    ):
        selected[long_index] = None
        selected[short_index] = None

    # The other records are at equal distances in the data set.
    spread_count = TOKENISED_RECORDS - 2 * EXTREME_RECORDS
    for number in range(spread_count):
        index = number * len(character_counts) // spread_count
        selected[index] = None
    yield from selected


def _too_long_error(
    data_set: DataSet, stats: DatasetStats, location: str, token_count: int, over_long: str
) -> UserError:
    """Return the error for a data set with records above its token limit.

    ``location`` and ``token_count`` describe the first record above the limit; ``over_long`` is
    ``data.over_long``.
    """
    fix = f"raise {data_set.limited_by}"
    if over_long == "error":
        fix += ", or set data.over_long=drop"
    return UserError(
        f"{stats.over} of {stats.tokenised} tokenised records are longer than the limit",
        where=location,
        expected=f"at most {stats.limit} tokens",
        got=f"{token_count} tokens there; the longest has {stats.longest}",
        fix=fix,
    )
