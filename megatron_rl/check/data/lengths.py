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

from megatron_rl.check.data.sets import DataPreview, DataSet
from megatron_rl.check.files import Files
from megatron_rl.check.model.template import added_token_ids, folder_ends, folder_renderer
from megatron_rl.check.model.tokenizer import tokenizer_of
from megatron_rl.data.chat_format import (
    ConversationText,
    TurnEnd,
    find_turn_end,
    framing_marks,
    turn_end_problem,
)
from megatron_rl.data.messages import (
    asked_messages,
    end_of_thoughts,
    no_tokens_error,
    said_texts,
    templated,
    unended_thoughts,
)
from megatron_rl.data.records import Record
from megatron_rl.data.rendered_text import (
    LOOKED_AT,
    odd_prompts,
    odd_responses,
    rendered_prompts,
    response_pieces,
)
from megatron_rl.data.template_renderer import TemplateRenderer
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
    _said_end: bool = False

    @cached_property
    def tokenizer(self) -> Any:
        """Return the tokenizer, None where there is none that can be read."""
        return tokenizer_of(self.path) if self.path.is_dir() else None

    @cached_property
    def renderer(self) -> TemplateRenderer | None:
        """Return the renderer of the chat template, None where there is none that can be read."""
        return folder_renderer(self.path) if self.path.is_dir() else None

    @cached_property
    def ends(self) -> dict[int, str]:
        """Return the texts of the tokens that the model's files name as ends of responses, by their ids."""
        return {} if self.tokenizer is None else folder_ends(self.path, self.tokenizer)

    @cached_property
    def turn_end(self) -> TurnEnd | None:
        """Return what the template ends turns with, None where it cannot be read."""
        if self.renderer is None or self.tokenizer is None:
            return None

        def encode(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=False).ids

        added = added_token_ids(self.tokenizer)
        bos = self.renderer.special.get("bos_token")
        return find_turn_end(ConversationText(self.renderer), encode, added, bos)

    @cached_property
    def chat(self) -> ConversationText | None:
        """Return what the template writes of conversations, None where it cannot be read."""
        if self.renderer is None or self.tokenizer is None:
            return None
        ends = [*self.ends.values()]
        if self.turn_end is not None and self.turn_end.token is not None:
            ends.append(self.tokenizer.id_to_token(self.turn_end.token))
        return ConversationText(self.renderer, ends)

    @cached_property
    def marks(self) -> set[str]:
        """Return the added tokens that the template writes around messages."""
        if self.tokenizer is None:
            return set()
        return framing_marks(self.renderer, added_token_ids(self.tokenizer).values())

    @cached_property
    def thoughts(self) -> str | None:
        """Return the mark that ends the thoughts which the template opens a response with, if it does."""
        with suppress(UserError):
            return end_of_thoughts(self.chat.opening) if self.chat is not None else None
        return None

    def close(self) -> None:
        """End the process that renders the template."""
        if self.renderer is not None:
            self.renderer.close()

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
        if not described.where.endswith(".held_out"):
            files.warnings.extend(self._odd_texts(described, records[:LOOKED_AT]))

    def _odd_texts(self, described: DataSet, records: Sequence[Record]) -> Iterator[UserError]:
        """Yield the warnings of the first records' texts, and of the template that makes them."""
        data, where = described.data, described.where
        if self.tokenizer is None or not records:
            return

        through_template = any(templated(record, data) for record in records)
        ends = [*self.ends.values()]
        if through_template:
            if self.chat is None:
                return
            ends = self.chat.ends
            shown = ", ".join(self.ends.values())
            problem = turn_end_problem(self.turn_end, [*self.ends], shown, str(self.path))
            if problem is not None and not self._said_end:
                self._said_end = True
                yield problem

        if described.responses and through_template and self.thoughts is not None:
            unended = unended_thoughts(records, described.responses, data, self.thoughts, where)
            if unended is not None:
                yield unended

        with suppress(UserError):  # what the template refuses is an error of its own
            texts = rendered_prompts(records, data, where, self.renderer)
            yield from odd_prompts(records, texts, data, where, ends, self.marks)
            if described.responses:
                yield from odd_responses(records, described.responses, data, where, self.chat, ends)

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
        """Return the texts of a record's rows; raises UserError for what the template does not render."""
        data, where = described.data, described.where
        if self.renderer is None and templated(record, data):
            prompt = said_texts(asked_messages(record, data))
            responses = [said_texts(record.values[name]) for name in described.responses]
        else:
            prompt = rendered_prompts([record], data, where, self.renderer)
            otherwise = "set sft.turns=last" if described.reader.every_turn else None
            ends = [*self.ends.values()]
            responses = [
                response_pieces(record, name, data, where, self.chat, ends, otherwise)
                for name in described.responses
            ]
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
