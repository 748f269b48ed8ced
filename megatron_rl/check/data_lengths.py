"""Rules on the tokens of data sets: how long records are, and what the chat template makes of them.

Some of the records that were read become tokens, without torch and transformers: the longest and the
shortest, and others that are spread evenly. Counts leave out what a tokenizer puts around a text, so that a
record that is found too long is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_rl.check.data_sets import DataPreview, DataSet
from megatron_rl.check.files import Files
from megatron_rl.check.model_template import Refused, Render, template_of
from megatron_rl.check.model_tokens import tokenizer_of
from megatron_rl.data.messages import (
    asked_messages,
    end_of_thoughts,
    no_tokens_error,
    said_texts,
    templated,
    tools_of,
    unended_thoughts,
)
from megatron_rl.data.records import Record
from megatron_rl.errors import UserError

TOKENISED, ENDS = 256, 32
"""Records of a data set that become tokens, and how many of them are its longest, and its shortest."""
CHARACTERS = 1 << 20
"""Characters of all data sets together that become tokens; two records of each do in any case."""
_PIECE = 1 << 16
_SHORT = 256
"""Characters of a prompt that may become no token, where a tokenizer has no token for any of them."""


@dataclass(frozen=True)
class Looked:
    """Say what was looked at of the data set that ``where`` names.

    ``records`` were read of ``total``, None where that is not known. ``tokenised`` of them have at most
    ``longest`` tokens, and ``over`` of these more than the ``limit``, None where that is not known.
    """

    where: str
    records: int
    total: int | None
    tokenised: int
    longest: int
    over: int
    limit: int | None

    def line(self) -> str:
        """Return one sentence."""
        of = "more" if self.total is None else f"{self.total:,}"
        read = f"all {of}" if self.records == self.total else f"the first {self.records:,} of {of}"
        if not self.tokenised:
            return f"read {read} records, counted the tokens of none"
        counted = "all" if self.tokenised == self.records else f"{self.tokenised:,}"
        words = f"read {read} records, counted the tokens of {counted}: longest {self.longest:,}"
        if self.limit is None:
            return words
        return f"{words} of {self.limit:,}" + (f"; {self.over:,} are longer" if self.over else "")


@dataclass
class Tokens:
    """Count the tokens of records with the tokenizer and the chat template of the model at ``path``."""

    path: Path
    left: int = field(default_factory=lambda: CHARACTERS)
    looked: list[Looked] = field(default_factory=list[Looked])

    @cached_property
    def tokenizer(self) -> Any:
        """Return the tokenizer, None where there is none that can be read."""
        return tokenizer_of(self.path) if self.path.is_dir() else None

    @cached_property
    def template(self) -> Render | None:
        """Return what renders the chat template, None where there is none that can be read."""
        return template_of(self.path) if self.path.is_dir() else None

    @cached_property
    def thoughts(self) -> str | None:
        """Return the mark that ends the thoughts which the template opens a response with, if it does."""
        with suppress(Refused):
            opening = self.template and self.template([{"role": "user", "content": "a"}], None)
            return end_of_thoughts(opening or "")
        return None

    def look(self, described: DataSet, preview: DataPreview, over_long: str, files: Files) -> None:
        """Look at the lengths and the responses of a data set that was read, and add what is wrong."""
        records, limit = preview.records, described.limit
        counts = {} if self.tokenizer is None else self._counts(described, records, files)
        over = sorted(row for row, count in counts.items() if limit is not None and count > limit)
        longest = max(counts.values(), default=0)
        whole = len(counts) == len(records) == preview.count
        looked = Looked(described.where, len(records), preview.count, len(counts), longest, len(over), limit)
        self.looked.append(looked)
        if over:
            where = f"{records[over[0]].where} ({described.where})"
            error = _too_long(described, looked, where, counts[over[0]], over_long)
            if over_long == "error" or (whole and len(over) == len(records)):
                files.errors.append(error)
            elif 2 * len(over) > len(counts):
                files.warnings.append(error)
        if described.responses and self.thoughts is not None and not described.where.endswith(".held_out"):
            found = unended_thoughts(
                records, described.responses, described.data, self.thoughts, described.where
            )
            files.warnings.extend([found] if found else [])

    def _counts(self, described: DataSet, records: Sequence[Record], files: Files) -> dict[int, int]:
        """Return the tokens of some records by their row."""
        sizes = [_characters(record, described) for record in records]
        parts: dict[int, list[list[str]]] = {}
        for row in _chosen(sizes):
            if len(parts) > 1 and self.left < sizes[row]:
                continue
            self.left -= sizes[row]
            try:
                parts[row] = self._parts(records[row], described)
                # A tokenizer that is wrong itself has no tokens for a text that is none the worse for it.
                if not records[row].values[described.data.prompt_field] or not files.errors:
                    self._require_tokens(parts[row][0][0], records[row], described)
            except UserError as error:
                files.errors.append(error)
                break
            except Refused as error:
                files.errors.append(
                    UserError(
                        "the chat template refuses the messages",
                        where=f"{records[row].where} ({described.where})",
                        got=str(error),
                        fix="correct the record's messages",
                    )
                )
                break
        most = max(_PIECE, 16 * (described.limit or 0))
        flat = [text[:most] for rows in parts.values() for texts in rows for text in texts]
        encoded = iter(self.tokenizer.encode_batch(flat, add_special_tokens=False))
        return {
            row: max([sum(len(next(encoded).ids) for _ in texts) for texts in rows])
            for row, rows in parts.items()
        }

    def _require_tokens(self, prompt: str, record: Record, described: DataSet) -> None:
        """Raise UserError where a prompt becomes no tokens, which are nothing to sample from."""
        if len(prompt) > _SHORT and prompt.strip():
            return
        special = not templated(record, described.data)  # as in training: a template has its own
        if not self.tokenizer.encode(prompt, add_special_tokens=special).ids:
            raise no_tokens_error(prompt, f"{record.where} ({described.where})")

    def _parts(self, record: Record, described: DataSet) -> list[list[str]]:
        """Return the texts of a record's rows; raises Refused where the template refuses the prompt."""
        data = described.data
        prompt = [record.values[data.prompt_field]]
        if templated(record, data):
            messages = asked_messages(record, data)
            rendered = self.template and self.template(messages, tools_of(record, data))
            prompt = said_texts(messages) if rendered is None else [rendered]
        responses = [said_texts(record.values[name]) for name in described.responses]
        return [prompt + said for said in responses] or [prompt]


def _characters(record: Record, described: DataSet) -> int:
    names = (described.data.prompt_field, *described.responses)
    return sum(len(text) for name in names for text in said_texts(record.values[name]))


def _chosen(sizes: Sequence[int]) -> Iterator[int]:
    """Yield the rows whose tokens are counted, each once: longest, shortest, then spread evenly."""
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    if len(sizes) <= TOKENISED:
        yield from reversed(order)
        return
    spread = TOKENISED - 2 * ENDS
    ends = [row for pair in zip(reversed(order[-ENDS:]), order[:ENDS], strict=True) for row in pair]
    yield from dict.fromkeys([*ends, *(at * len(sizes) // spread for at in range(spread))])


def _too_long(described: DataSet, looked: Looked, where: str, tokens: int, over_long: str) -> UserError:
    return UserError(
        f"{looked.over} of {looked.tokenised} records that were looked at are longer than the limit",
        where=where,
        expected=f"at most {looked.limit} tokens",
        got=f"{tokens} tokens there; the longest has {looked.longest}",
        fix=f"raise {described.limited_by}"
        + (", or set data.over_long=drop" if over_long == "error" else ""),
    )
