"""The source of rows with given responses: one to a prompt for supervised training, pairs for preferences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy
import torch

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.order import ShuffledOrder
from megatron_rl.data.prompts import fingerprint, ragged
from megatron_rl.data.records import Record, require_fields
from megatron_rl.data.tokenizing import PromptEncoder, drop_over_long, encode_texts, end_token_ids
from megatron_rl.errors import UserError
from megatron_rl.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ResponseSource:
    """Give the rows of records in an order known from the seed, epoch after epoch.

    ``fields`` maps the fields of a record that hold a response to the settings that name them; a record has a
    row for each, in that order. Prompt and response are tokenised apart, as they are when the response is
    sampled, and a response ends with the eos token. A record with a row over ``max_tokens`` is dropped and
    counted in ``length_report``, or raises a UserError under ``data.over_long: error``. ``setting`` is the
    configuration path of the data.
    """

    def __init__(
        self,
        records: Sequence[Record],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        fields: dict[str, str],
        *,
        seed: int,
        max_tokens: int,
        setting: str,
        model_path: str | None = None,
    ) -> None:
        for record in records:
            require_fields(record, (data.prompt_field, *fields), setting)
            _require_text(record, fields, setting)
        end = numpy.asarray(end_token_ids(tokenizer, model_path)[:1], numpy.int32)
        _, prompts = PromptEncoder(tokenizer, data, setting).encode(records, max_tokens)
        columns = []
        for field in fields:
            texts = [str(record.values[field]) for record in records]
            responses = encode_texts(tokenizer, texts, special=False, limit=max_tokens)
            columns.append([numpy.concatenate((prompts[i], ids, end)) for i, ids in enumerate(responses)])
        items = list(zip(*columns, strict=True))
        lengths = [max(len(row) for row in item) for item in items]
        keep, self.length_report = drop_over_long(lengths, records, max_tokens, data.over_long, setting)
        self.unit = len(fields)
        self._items = [items[index] for index in keep]
        self._prompt_lengths = [len(prompts[index]) for index in keep]
        rows = [row for item in self._items for row in item]
        self._order = ShuffledOrder(len(keep), seed, data.shuffle, fingerprint(rows))

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._items)

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
        rows = [row for item in chosen for row in self._items[item]]
        starts = [self._prompt_lengths[item] for item in chosen for _ in range(self.unit)]
        mask = torch.cat([torch.arange(len(row)) >= start for row, start in zip(rows, starts, strict=True)])
        return TrainBatch(
            tokens=ragged(rows),
            lengths=torch.tensor([len(row) for row in rows], dtype=torch.long),
            response_mask=mask,
            loss_weights=mask.float() / (mask.sum() if self.unit == 1 else len(rows)),
            temperature=torch.ones(len(rows)),
        )

    def state_dict(self) -> dict[str, int | str | bool]:
        """Return the position in the data."""
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, int | str | bool]) -> None:
        """Continue from ``state`` with exactly the rows that followed it; UserError for other data."""
        self._order.load_state_dict(state)


def _require_text(record: Record, fields: dict[str, str], setting: str) -> None:
    for field, named_by in fields.items():
        response = record.values[field]
        if not isinstance(response, str):
            raise UserError(
                f"the field {field!r} is not text",
                where=f"{record.where} ({setting})",
                expected="a string",
                got=f"{type(response).__name__}: {str(response)[:80]}",
                fix=f"correct the record, or {named_by}",
            )
