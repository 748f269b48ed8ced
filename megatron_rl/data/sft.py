"""The source of prompt-response rows for supervised warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy
import torch

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.stages import SftConfig
from megatron_rl.data.order import ShuffledOrder
from megatron_rl.data.prompts import fingerprint, ragged
from megatron_rl.data.records import Record, require_fields
from megatron_rl.data.tokenizing import PromptEncoder, drop_over_long, encode_texts, end_token_ids
from megatron_rl.errors import UserError
from megatron_rl.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SftSource:
    """Give batches of prompt-response rows in an order known from the seed, epoch after epoch.

    Prompt and response are tokenised apart, as they are when the response is sampled, and the response ends
    with the eos token. Rows over ``max_tokens`` in all are dropped and counted in ``length_report``, or raise
    a UserError under ``data.over_long: error``.
    """

    def __init__(
        self,
        records: Sequence[Record],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        sft: SftConfig,
        *,
        seed: int,
        max_tokens: int,
        model_path: str | None = None,
        setting: str = "sft.data",
    ) -> None:
        for record in records:
            require_fields(record, (data.prompt_field, sft.response_field), setting)
            response = record.values[sft.response_field]
            if not isinstance(response, str):
                raise UserError(
                    f"the field {sft.response_field!r} is not text",
                    where=f"{record.where} ({setting})",
                    expected="a string",
                    got=f"{type(response).__name__}: {str(response)[:80]}",
                    fix="correct the record, or sft.response_field",
                )
        end = numpy.asarray(end_token_ids(tokenizer, model_path)[:1], numpy.int32)
        _, prompts = PromptEncoder(tokenizer, data, setting).encode(records)
        texts = [str(record.values[sft.response_field]) for record in records]
        responses = [numpy.concatenate((ids, end)) for ids in encode_texts(tokenizer, texts, special=False)]
        lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
        keep, self.length_report = drop_over_long(lengths, records, max_tokens, data.over_long, setting)
        self._rows = [numpy.concatenate((prompts[row], responses[row])) for row in keep]
        self._prompt_lengths = [len(prompts[row]) for row in keep]
        self._order = ShuffledOrder(len(keep), seed, data.shuffle, fingerprint(self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def next(self, count: int) -> TrainBatch:
        """Return the next ``count`` rows; a response token weighs 1 / (response tokens in the batch)."""
        rows = self._order.next(count)
        lengths = torch.tensor([len(self._rows[row]) for row in rows], dtype=torch.long)
        mask = torch.cat([torch.arange(len(self._rows[row])) >= self._prompt_lengths[row] for row in rows])
        return TrainBatch(
            tokens=ragged([self._rows[row] for row in rows]),
            lengths=lengths,
            response_mask=mask,
            loss_weights=mask.float() / mask.sum(),
            temperature=torch.ones(count),
        )

    def state_dict(self) -> dict[str, int | str | bool]:
        """Return the position in the data."""
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, int | str | bool]) -> None:
        """Continue from ``state`` with exactly the rows that followed it; UserError for other data."""
        self._order.load_state_dict(state)
