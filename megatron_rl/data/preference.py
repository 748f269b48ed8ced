"""The source of preference pairs for training reward models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy
import torch

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.stages import RewardTrainingConfig
from megatron_rl.data.order import ShuffledOrder
from megatron_rl.data.prompts import fingerprint, ragged
from megatron_rl.data.records import Record, require_fields
from megatron_rl.data.tokenizing import PromptEncoder, drop_over_long, encode_texts, end_token_ids
from megatron_rl.errors import UserError
from megatron_rl.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PreferenceSource:
    """Give pairs of rows, the chosen response then the rejected one, in an order known from the seed.

    Rows are tokenised as `SftSource` does. A pair with a row over ``max_tokens`` is dropped and counted in
    ``length_report``, or raises a UserError under ``data.over_long: error``. ``setting`` is the
    configuration path of ``training``.
    """

    def __init__(
        self,
        records: Sequence[Record],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        training: RewardTrainingConfig,
        *,
        seed: int,
        max_tokens: int,
        setting: str,
        model_path: str | None = None,
    ) -> None:
        fields = (training.chosen_field, training.rejected_field)
        for record in records:
            require_fields(record, (data.prompt_field, *fields), f"{setting}.data")
            _check(record, fields, setting)
        end = numpy.asarray(end_token_ids(tokenizer, model_path)[:1], numpy.int32)
        _, prompts = PromptEncoder(tokenizer, data, f"{setting}.data").encode(records)
        sides = []
        for field in fields:
            texts = [str(record.values[field]) for record in records]
            encoded = encode_texts(tokenizer, texts, special=False)
            sides.append([numpy.concatenate((prompts[i], ids, end)) for i, ids in enumerate(encoded)])
        pairs = list(zip(*sides, strict=True))
        lengths = [max(len(chosen), len(rejected)) for chosen, rejected in pairs]
        keep, self.length_report = drop_over_long(lengths, records, max_tokens, data.over_long, setting)
        self._pairs = [pairs[row] for row in keep]
        self._prompt_lengths = [len(prompts[row]) for row in keep]
        order = [side for pair in self._pairs for side in pair]
        self._order = ShuffledOrder(len(keep), seed, data.shuffle, fingerprint(order))

    def __len__(self) -> int:
        return len(self._pairs)

    def next(self, count: int) -> TrainBatch:
        """Return the rows of the next ``count`` pairs; every pair weighs 1 / ``count``."""
        pairs = self._order.next(count)
        rows = [side for pair in pairs for side in self._pairs[pair]]
        starts = [self._prompt_lengths[pair] for pair in pairs for _ in range(2)]
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
        mask = torch.cat([torch.arange(len(row)) >= start for row, start in zip(rows, starts, strict=True)])
        return TrainBatch(
            tokens=ragged(rows),
            lengths=lengths,
            response_mask=mask,
            loss_weights=mask.float() / (2 * count),
            temperature=torch.ones(len(rows)),
        )


def _check(record: Record, fields: Sequence[str], setting: str) -> None:
    for field in fields:
        response = record.values[field]
        if not isinstance(response, str):
            raise UserError(
                f"the field {field!r} is not text",
                where=f"{record.where} ({setting}.data)",
                expected="a string",
                got=f"{type(response).__name__}: {str(response)[:80]}",
                fix=f"correct the record, or {setting}.chosen_field and {setting}.rejected_field",
            )
