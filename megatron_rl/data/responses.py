"""The source of rows with given responses: one to a prompt for supervised training, pairs for preferences."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy
import torch

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.chat_format import ConversationText
from megatron_rl.data.forms import RecordReader, template_source
from megatron_rl.data.messages import (
    end_of_thoughts,
    templated,
    unended_thoughts,
)
from megatron_rl.data.order import ShuffledOrder
from megatron_rl.data.prompts import fingerprint, ragged
from megatron_rl.data.records import Record, is_learned, nothing_taught, teaches_nothing
from megatron_rl.data.rendered_text import LOOKED_AT, odd_prompts, odd_responses, response_pieces
from megatron_rl.data.shards import DataPath
from megatron_rl.data.token_files import Encoded, TokenFiles
from megatron_rl.data.tokenizing import (
    PromptEncoder,
    as_warning,
    conversation_text,
    drop_over_long,
    encode_pieces,
    encode_texts,
    end_problem,
    end_token_ids,
    template_marks,
    template_turn_end,
)
from megatron_rl.errors import UserError
from megatron_rl.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ResponseSource:
    """Give the rows of records in an order known from the seed, epoch after epoch.

    ``encoded`` is what `encode_responses` gives; a record has a row for each field of responses, in that
    order. A record with a row over ``max_tokens`` is dropped and counted in ``length_report``, or raises a
    UserError under ``data.over_long: error``. ``setting`` is the configuration path of the data.
    """

    def __init__(
        self, encoded: Encoded, data: DataConfig, *, seed: int, max_tokens: int, setting: str
    ) -> None:
        prompts, *responses = encoded.tokens
        self._prompts, self._responses = prompts, responses
        lengths = [
            [len(prompt) + len(response) for response in given]
            for prompt, *given in zip(prompts, *responses, strict=True)
        ]
        limited_by = f"{setting.rpartition('.')[0]}.max_row_tokens"
        self._kept, self.length_report = drop_over_long(
            [max(sizes) for sizes in lengths],
            encoded.records,
            max_tokens,
            data.over_long,
            setting,
            limited_by,
        )
        self.unit = len(responses)
        self._remarks = encoded.remarks
        self._uninstructive = [
            encoded.records[index].where
            for index in self._kept
            if teaches_nothing(*(rows[index][:-1].tobytes() for rows in responses))  # without their ends
        ]
        sizes = [size for index in self._kept for size in lengths[index]]
        rows = (row for index in self._kept for row in self._rows(index))
        self._order = ShuffledOrder(len(self), seed, data.shuffle, fingerprint(sizes, rows))
        self.odd: Sequence[UserError] = ()
        """Warnings of the texts of the first records."""

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._kept)

    def remarks(self) -> Iterator[str]:
        """Yield sentences for the console: on long records, what nothing reads, and what teaches nothing."""
        yield self.length_report.line("records")
        yield from self._remarks
        if self._uninstructive:
            yield f"warning: {nothing_taught(self._uninstructive, len(self), self.unit > 1)}"
        for problem in self.odd:
            yield as_warning(problem)

    def next(self, count: int) -> TrainBatch:
        """Return the rows of the next ``count`` records, those of one record after one another.

        Where a record has one row, every response token weighs the same; where it has more, every row does.
        The weights of the tokens, or of the rows' tokens at one position, add up to 1.
        """
        return self._batch(self._order.next(count))

    def everything(self) -> TrainBatch:
        """Return all rows in the order of the data, weighed as `next` does."""
        return self._batch(range(len(self)))

    def _batch(self, chosen: Sequence[int]) -> TrainBatch:
        rows = [row for item in chosen for row in self._rows(self._kept[item])]
        starts = [len(self._prompts[self._kept[item]]) for item in chosen for _ in range(self.unit)]
        tokens = ragged(rows)
        mask = torch.cat([torch.arange(len(row)) >= start for row, start in zip(rows, starts, strict=True)])
        mask &= tokens >= 0
        return TrainBatch(
            tokens=torch.where(tokens < 0, ~tokens, tokens),
            lengths=torch.tensor([len(row) for row in rows], dtype=torch.long),
            response_mask=mask,
            loss_weights=mask.float() / (mask.sum() if self.unit == 1 else len(rows)),
            temperature=torch.ones(len(rows)),
        )

    def _rows(self, index: int) -> list[numpy.ndarray]:
        """Return the rows of a record by its place in the data."""
        given = (responses[index] for responses in self._responses)
        return [numpy.concatenate((self._prompts[index], response)) for response in given]

    def state_dict(self) -> dict[str, int | str | bool]:
        """Return the position in the data."""
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, int | str | bool]) -> None:
        """Continue from ``state`` with exactly the rows that followed it; UserError for other data."""
        self._order.load_state_dict(state)


def encode_responses(
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    fields: dict[str, str],
    max_tokens: int,
    setting: str,
    ends: Sequence[int],
    records: Sequence[Record],
    every_turn: bool = False,
) -> Encoded:
    """Return records with the tokens of their prompts and of each field that holds a response.

    ``fields`` maps those fields to the settings that name them. A record that lacks one, or holds no response
    there, raises a UserError; `RecordReader` says what is one, and `_Turns` what its tokens are.
    """
    template = template_source(getattr(tokenizer, "chat_template", None))
    reader = RecordReader(data, setting, fields, every_turn, template=template)
    records = [reader.read(record) for record in records]

    prompts = PromptEncoder(tokenizer, data, setting)
    texts, tokens = prompts.encode(records, max_tokens)
    turns = _Turns(prompts, ends, "set sft.turns=last" if every_turn else None)
    columns = [turns.encode(records, texts, tokens, field, max_tokens) for field in fields]
    return Encoded(records, texts, (tokens, *columns), remarks=reader.remark_lines())


class _Turns:
    """Responses as tokens, as they would stand in a conversation that was sampled.

    The text of a row is tokenised as a whole, so that it has the tokens of what the chat template writes, and
    in pieces where a token would reach from one piece into the next: the policy samples behind the tokens of
    the prompt alone. A turn that does not end with one of ``ends``, the tokens that end responses, gets one:
    that by which the chat template ends a turn, or else the first. ``otherwise`` is a way out where the
    template makes no conversations.
    """

    def __init__(self, prompts: PromptEncoder, ends: Sequence[int], otherwise: str | None) -> None:
        self._prompts = prompts
        self._otherwise = otherwise
        self._end = {False: ends[0], True: ends[0]}
        self._ends = frozenset(ends)
        self._texts: list[Any] = [prompts.tokenizer.convert_ids_to_tokens(token) for token in ends]
        self._chat: ConversationText | None = None

        if prompts.renderer is not None:
            end = template_turn_end(prompts.tokenizer)
            if end is not None and end.token is not None:
                self._end[True] = end.token
                self._ends |= {end.token}
                self._texts.append(prompts.tokenizer.convert_ids_to_tokens(end.token))
            self._chat = ConversationText(prompts.renderer, self._texts)

    def encode(
        self,
        records: Sequence[Record],
        prompts: Sequence[str],
        prompt_tokens: Sequence[numpy.ndarray],
        field: str,
        limit: int,
    ) -> list[numpy.ndarray]:
        """Return the tokens (int32) of each record's response; ~token is one that is read, not learned."""
        data, setting = self._prompts.data, self._prompts.setting
        pieces = [
            response_pieces(record, field, data, setting, self._chat, self._texts, self._otherwise)
            for record in records
        ]
        rows = encode_pieces(
            self._prompts.tokenizer, [[p, *rest] for p, rest in zip(prompts, pieces, strict=True)], limit
        )
        apart = [
            row
            for row, (tokens, alone) in enumerate(zip(rows, prompt_tokens, strict=True))
            if tokens is None or not _ends_with(alone, tokens[0])
        ]
        texts = [text for row in apart for text in pieces[row]]
        alone = iter(encode_texts(self._prompts.tokenizer, texts, limit))
        for row in apart:
            rows[row] = [numpy.empty(0, numpy.int32), *(next(alone) for _ in pieces[row])]

        return [
            self._row(
                (tokens or [])[1:],
                self._end[templated(record, self._prompts.data)],
                _learned(record.values[field]),
            )
            for record, tokens in zip(records, rows, strict=True)
        ]

    def _row(self, pieces: Sequence[numpy.ndarray], end: int, learned: Sequence[bool]) -> numpy.ndarray:
        """Return one row of the pieces; ``learned`` holds for each turn whether its tokens are learned."""
        row: list[numpy.ndarray] = []
        last = None
        for number, tokens in enumerate(pieces):
            if number % 2:
                repeats_end = len(tokens) > 0 and tokens[0] == last
                row.append(~tokens[1 if repeats_end else 0 :])
                continue

            if not len(tokens) or int(tokens[-1]) not in self._ends:
                tokens = numpy.append(tokens, numpy.int32(end))
            last = tokens[-1]
            row.append(tokens if learned[number // 2] else ~tokens)
        return numpy.concatenate(row)


def _ends_with(tokens: numpy.ndarray, end: numpy.ndarray) -> bool:
    """Return whether the tokens of a prompt are these, what the tokenizer puts before them aside."""
    return len(tokens) >= len(end) and numpy.array_equal(tokens[len(tokens) - len(end) :], end)


def _learned(response: str | Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return for each turn of the assistant in a response whether it is learned."""
    if isinstance(response, str):
        return [True]
    return [is_learned(message) for message in response if message["role"] == "assistant"]


def load_responses(
    config: RunConfig,
    setting: str,
    path: DataPath,
    tokenizer: PreTrainedTokenizerBase,
    files: TokenFiles,
    fields: dict[str, str],
    max_tokens: int,
    every_turn: bool = False,
    data: DataConfig | None = None,
) -> ResponseSource:
    """Return the rows of the data set at ``path``, which ``setting`` names; ``data`` are its own fields."""
    data, ends = data or config.data, end_token_ids(tokenizer, config.model.path)
    encode = partial(
        encode_responses, tokenizer, data, fields, max_tokens, setting, ends, every_turn=every_turn
    )
    how = ("responses", *data.of_prompts, *fields, data.chat_template, max_tokens, ends, every_turn)
    encoded = files.encoded(path, setting, tokenizer, how, encode)
    source = ResponseSource(encoded, data, seed=config.seed, max_tokens=max_tokens, setting=setting)
    if not setting.endswith(".held_out"):
        source.odd = list(_odd_texts(config, tokenizer, encoded, fields, data, setting))
    return source


def _odd_texts(
    config: RunConfig,
    tokenizer: Any,
    encoded: Encoded,
    fields: Collection[str],
    data: DataConfig,
    setting: str,
) -> Iterator[UserError]:
    """Yield the warnings of the first records' texts, and of the template that makes them."""
    records = encoded.records[:LOOKED_AT]
    through_template = any(templated(record, data) for record in records)
    ends = end_token_ids(tokenizer, config.model.path, templated=through_template)
    texts = [tokenizer.convert_ids_to_tokens(token) for token in ends]
    chat = conversation_text(tokenizer, ends)

    if through_template:
        problem = end_problem(tokenizer, config.model.path)
        if problem is not None:
            yield problem
        unended = _unended(chat, records, fields, data, setting)
        if unended is not None:
            yield unended
    yield from odd_prompts(records, encoded.texts, data, setting, texts, template_marks(tokenizer))
    yield from odd_responses(records, fields, data, setting, chat, texts)


def _unended(
    chat: ConversationText | None,
    records: Sequence[Record],
    fields: Collection[str],
    data: DataConfig,
    setting: str,
) -> UserError | None:
    """Return the warning of `unended_thoughts` where the chat template opens thoughts."""
    with suppress(UserError):  # a template may refuse this conversation
        end = end_of_thoughts(chat.opening if chat is not None else "")
        return unended_thoughts(records, fields, data, end, setting) if end else None
    return None
