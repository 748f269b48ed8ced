"""Source of prompts for reinforcement learning and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.data import DataConfig, fields_of
from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.data.forms import REWARDED, Consumers, RecordReader, prompt_consumers, template_source
from megatron_rl.data.order import ShuffledOrder, fingerprint, ragged
from megatron_rl.data.records import DataPath, Record
from megatron_rl.data.rendered_text import EXAMINED_RECORDS, prompt_warnings
from megatron_rl.data.template_renderer import renderer_of
from megatron_rl.data.token_files import Encoded, TokenFiles
from megatron_rl.data.tokenizing import (
    PromptEncoder,
    drop_over_long,
    end_token_ids,
    sampling_by_task,
    template_marks,
    turn_end_warning,
)
from megatron_rl.errors import UserError
from megatron_rl.types import PromptBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_TASK = "default"
"""Task of a record without one."""


class PromptSource:
    """Batches of prompts in an order that the seed determines, epoch after epoch.

    ``encoded`` is the result of `encode_prompts`. Prompts over ``data.max_prompt_tokens`` are dropped and
    counted in ``length_report``, or raise a UserError under ``data.over_long: error``. A record's task
    (``data.task_field``, else "default") selects its sampling profile. All fields other than prompt, ground
    truth and task become metadata. ``prompt_ids`` are indices of records.
    """

    def __init__(
        self,
        encoded: Encoded,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        rollout: RolloutConfig,
        *,
        seed: int,
        model_path: str | None = None,
        setting: str = "data.train",
    ) -> None:
        self._encoded = encoded
        self._records = encoded.records
        self._texts = encoded.texts
        (self._tokens,) = encoded.tokens
        self._data = data
        self.remarks = encoded.remarks
        """Warnings about the records, for the console."""

        # `RecordReader` refuses data sets of two kinds, so the first prompt decides for all.
        templated = data.chat_template
        if templated is None:
            templated = not isinstance(self._records[0].values[data.prompt_field], str)
        self.templated = templated
        """Whether the prompts went through the tokenizer's chat template."""

        ends = end_token_ids(tokenizer, model_path, templated=self.templated)
        self._default_sampling, self._sampling_by_task = sampling_by_task(rollout, tokenizer, ends)
        self.text_warnings = list(self._text_warnings(tokenizer, ends, model_path, setting))
        """Warnings about the texts of the first records, and about the template that renders them."""

        # A template that writes the date would render other prompts tomorrow, so checkpoints store the time.
        self._clock = None
        renderer = renderer_of(tokenizer) if self.templated else None
        if renderer is not None and renderer.has_clock:
            self._clock = renderer.now.isoformat()

        # Indices of the records within the limit: they are the items that the order permutes.
        lengths = [len(ids) for ids in self._tokens]
        self._ids, self.length_report = drop_over_long(
            lengths,
            self._records,
            data.max_prompt_tokens,
            data.over_long,
            setting,
            "data.max_prompt_tokens",
        )
        prompts = fingerprint([lengths[row] for row in self._ids], (self._tokens[row] for row in self._ids))
        self._order = ShuffledOrder(len(self._ids), seed, data.shuffle, prompts)

    def __len__(self) -> int:
        return len(self._ids)

    def _text_warnings(
        self,
        tokenizer: Any,
        ends: Sequence[int],
        model_path: str | None,
        setting: str,
    ) -> Iterator[UserError]:
        """Yield the warnings about the chat template and about the texts of the first records."""
        if self.templated and model_path:
            problem = turn_end_warning(tokenizer, model_path)
            if problem is not None:
                yield problem

        # Mistakes of rendering are in every record: the first ones are enough.
        records = self._records[:EXAMINED_RECORDS]
        texts = self._texts[:EXAMINED_RECORDS]
        end_texts = [tokenizer.convert_ids_to_tokens(token) for token in ends]
        yield from prompt_warnings(records, texts, self._data, setting, end_texts, template_marks(tokenizer))

    @property
    def epoch(self) -> int:
        """Return the number of complete passes over the prompts so far."""
        return self._order.epoch

    def next(self, count: int) -> PromptBatch:
        """Return the next ``count`` prompts, crossing into further epochs as needed."""
        return self._batch(self._order.next(count))

    def everything(
        self,
        limit: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> PromptBatch:
        """Return the first ``limit`` prompts in file order, without moving the source's position.

        ``temperature`` and ``top_p`` override the sampling profiles; temperature 0 is greedy and switches
        their filters off.
        """
        # Does not use the order, so that an evaluation during a run does not move its position.
        count = len(self)
        if limit is not None:
            count = min(limit, count)
        batch = self._batch(range(count))
        if temperature is None:
            return batch

        if temperature == 0:
            sampling = [parameters.greedy() for parameters in batch.sampling]
        else:
            changes = {"temperature": temperature}
            if top_p is not None:
                changes["top_p"] = top_p
            sampling = [parameters._replace(**changes) for parameters in batch.sampling]
        return replace(batch, sampling=tuple(sampling))

    def state_dict(self) -> dict[str, int | str | bool]:
        """Return the position in the data, the seed, and fingerprints of prompts and records."""
        return self._order.state_dict() | {"records": self._digest, "clock": self._clock or ""}

    def load_state_dict(self, state: dict[str, int | str | bool]) -> str | None:
        """Continue from ``state`` with exactly the prompts that followed it; raises UserError for other data.

        Return a warning if the prompts are the same and other fields of the records differ.
        """
        # Older checkpoints have neither `clock` nor `records`.
        clock = state.get("clock") or None
        has_other_prompts = state["fingerprint"] != self._order.fingerprint
        if has_other_prompts and clock is not None and clock != self._clock:
            raise UserError(
                "the chat template writes the date, and the checkpoint's prompts have another one",
                where="data",
                expected=f"the time at which the run started first: {clock}",
                got=str(self._clock),
                fix="resume in the run's own folder, whose file `first_start` has that time, or write it "
                "into the file `first_start` of run_dir",
            )

        self._order.load_state_dict(state)
        if state.get("records", self._digest) == self._digest:
            return None
        return "warning: records hold something else beside their prompts than when the checkpoint was made"

    @cached_property
    def _digest(self) -> str:
        return self._encoded.digest()

    def _batch(self, rows: Sequence[int]) -> PromptBatch:
        """Return the prompts at positions ``rows`` of the source."""
        ids = [self._ids[row] for row in rows]
        records = [self._records[row] for row in ids]
        tokens = [self._tokens[row] for row in ids]

        # A record without a task has the default one, and with it the default sampling.
        data = self._data
        tasks = tuple(str(record.values.get(data.task_field) or DEFAULT_TASK) for record in records)
        return PromptBatch(
            tokens=ragged(tokens),
            lengths=torch.tensor([len(row) for row in tokens], dtype=torch.long),
            prompt_ids=torch.tensor(ids, dtype=torch.long),
            tasks=tasks,
            prompts=tuple(self._texts[row] for row in ids),
            ground_truths=tuple(record.values.get(data.ground_truth_field) for record in records),
            metadata=tuple(self._metadata(record) for record in records),
            sampling=tuple(self._sampling_by_task.get(task, self._default_sampling) for task in tasks),
        )

    def _metadata(self, record: Record) -> Mapping[str, Any]:
        reserved = {self._data.prompt_field, self._data.ground_truth_field}
        return {name: value for name, value in record.values.items() if name not in reserved}


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    setting: str,
    records: Sequence[Record],
    consumers: Consumers = REWARDED,
) -> Encoded:
    """Return records with the tokens of their prompts; raises UserError as `RecordReader` does."""
    template = template_source(getattr(tokenizer, "chat_template", None))
    reader = RecordReader(data, setting, consumers=consumers, template=template)
    records = [reader.read(record) for record in records]
    texts, tokens = PromptEncoder(tokenizer, data, setting).encode(records, data.max_prompt_tokens)
    return Encoded(records, texts, (tokens,), remarks=reader.remark_lines())


def load_prompts(
    config: RunConfig,
    setting: str,
    path: DataPath,
    tokenizer: PreTrainedTokenizerBase,
    files: TokenFiles,
) -> PromptSource:
    """Return the prompts of the data set at ``path``.

    ``setting`` is the key that names it: ``data.train``, or ``evaluation.sets.NAME.data``, whose section may
    override the names of fields.
    """
    data = config.data
    evaluation_set = None
    section = setting.rpartition(".")[0]
    if section != "data":
        evaluation_set = section.removeprefix("evaluation.sets.")
        data = fields_of(data, config.evaluation.sets[evaluation_set], section)

    # Everything that changes the encoded records must be in `inputs`, which names the file of tokens.
    consumers = prompt_consumers(config, evaluation_set)
    encode = partial(encode_prompts, tokenizer, data, setting, consumers=consumers)
    inputs = ("prompts", *data.record_fields, data.chat_template, data.max_prompt_tokens, consumers)
    return PromptSource(
        files.encoded(path, setting, tokenizer, inputs, encode),
        tokenizer,
        data,
        config.rollout,
        seed=config.seed,
        model_path=config.model.path,
        setting=setting,
    )
