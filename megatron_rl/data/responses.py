"""The source of rows with given responses: one to a prompt for supervised training, pairs for preferences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy
import torch

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.order import ShuffledOrder
from megatron_rl.data.prompts import fingerprint, ragged
from megatron_rl.data.records import (
    Record,
    nothing_taught,
    require_fields,
    require_text,
    responses_as_text,
    teaches_nothing,
)
from megatron_rl.data.token_files import Encoded, TokenFiles
from megatron_rl.data.tokenizing import PromptEncoder, drop_over_long, encode_texts, end_token_ids
from megatron_rl.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ResponseSource:
    """Give the rows of records in an order known from the seed, epoch after epoch.

    ``encoded`` is what `encode_responses` gives; a record has a row for each field of responses, in that
    order. Prompt and response are tokenised apart, as they are when the response is sampled, and a response
    that does not end with a token that ends responses gets the eos token. A record with a row over
    ``max_tokens`` is dropped and counted in ``length_report``, or raises a UserError under
    ``data.over_long: error``. ``setting`` is the configuration path of the data.
    """

    def __init__(
        self,
        encoded: Encoded,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        *,
        seed: int,
        max_tokens: int,
        setting: str,
        model_path: str | None = None,
    ) -> None:
        ends = end_token_ids(tokenizer, model_path)
        self._ends, self._end = frozenset(ends), numpy.asarray(ends[:1], numpy.int32)
        prompts, *responses = encoded.tokens
        self._prompts, self._responses = prompts, responses
        lengths = [
            [len(prompts[index]) + len(rows[index]) + len(self._end_after(rows[index])) for rows in responses]
            for index in range(len(prompts))
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
        self._uninstructive = [
            encoded.records[index].where
            for index in self._kept
            if teaches_nothing(*(rows[index].tobytes() for rows in responses))
        ]
        sizes = [size for index in self._kept for size in lengths[index]]
        rows = (row for index in self._kept for row in self._rows(index))
        self._order = ShuffledOrder(len(self), seed, data.shuffle, fingerprint(sizes, rows))

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._kept)

    def remarks(self) -> Iterator[str]:
        """Yield sentences for the console: on records that are too long, and on those that teach nothing."""
        yield self.length_report.line("records")
        if self._uninstructive:
            yield f"warning: {nothing_taught(self._uninstructive, len(self), self.unit > 1)}"

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
        mask = torch.cat([torch.arange(len(row)) >= start for row, start in zip(rows, starts, strict=True)])
        return TrainBatch(
            tokens=ragged(rows),
            lengths=torch.tensor([len(row) for row in rows], dtype=torch.long),
            response_mask=mask,
            loss_weights=mask.float() / (mask.sum() if self.unit == 1 else len(rows)),
            temperature=torch.ones(len(rows)),
        )

    def _rows(self, index: int) -> list[numpy.ndarray]:
        """Return the rows of a record by its place in the data."""
        given = (responses[index] for responses in self._responses)
        return [
            numpy.concatenate((self._prompts[index], response, self._end_after(response)))
            for response in given
        ]

    def _end_after(self, response: numpy.ndarray) -> numpy.ndarray:
        """Return the tokens that end a response: none where a model or a chat template wrote its end."""
        return self._end[:0] if len(response) and int(response[-1]) in self._ends else self._end

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
    records: Sequence[Record],
) -> Encoded:
    """Return records with the tokens of their prompts and of each field that holds a response.

    ``fields`` maps those fields to the settings that name them. A record that lacks one, or holds no text
    there, raises a UserError; `responses_as_text` says what else is read as text.
    """
    records = [responses_as_text(record, data.prompt_field, fields) for record in records]
    for record in records:
        require_fields(record, data.asked | fields, setting)
        require_text(record, fields, setting)
    texts, prompts = PromptEncoder(tokenizer, data, setting).encode(records, max_tokens)
    columns = [prompts]
    for field in fields:
        responses = [str(record.values[field]) for record in records]
        columns.append(encode_texts(tokenizer, responses, special=False, limit=max_tokens))
    return Encoded(records, texts, tuple(columns))


def load_responses(
    config: RunConfig,
    setting: str,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    files: TokenFiles,
    fields: dict[str, str],
    max_tokens: int,
) -> ResponseSource:
    """Return the rows of the data set at ``path``, which ``setting`` names."""
    encode = partial(encode_responses, tokenizer, config.data, fields, max_tokens, setting)
    how = ("responses", *config.data.asked, *fields, *config.data.rendering, max_tokens)
    return ResponseSource(
        files.encoded(path, setting, tokenizer, how, encode),
        tokenizer,
        config.data,
        seed=config.seed,
        max_tokens=max_tokens,
        setting=setting,
        model_path=config.model.path,
    )
