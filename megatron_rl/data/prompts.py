"""The source of prompts for reinforcement learning and evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy
import torch

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.data import DataConfig, fields_of
from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.data.consumers import prompt_consumers
from megatron_rl.data.forms import REWARDED, Consumers, RecordReader, template_source
from megatron_rl.data.order import ShuffledOrder
from megatron_rl.data.records import Record
from megatron_rl.data.rendered_text import LOOKED_AT, odd_prompts
from megatron_rl.data.shards import DataPath
from megatron_rl.data.template_renderer import renderer_of
from megatron_rl.data.token_files import Encoded, TokenFiles
from megatron_rl.data.tokenizing import (
    PromptEncoder,
    drop_over_long,
    end_problem,
    end_token_ids,
    sampling_by_task,
    template_marks,
)
from megatron_rl.errors import UserError
from megatron_rl.types import PromptBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_TASK = "default"


class PromptSource:
    """Give batches of prompts in an order known from the seed, epoch after epoch.

    ``encoded`` is what `encode_prompts` gives. Prompts over ``data.max_prompt_tokens`` are dropped and
    counted in ``length_report``, or raise a UserError under ``data.over_long: error``. A record's task
    (``data.task_field``, else "default") chooses its sampling profile. All fields other than prompt, ground
    truth and task become metadata. ``prompt_ids`` are positions in ``records``.
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
        records, self._texts, (self._tokens,) = encoded.records, encoded.texts, encoded.tokens
        lists = not isinstance(records[0].values[data.prompt_field], str)
        self.templated = lists if data.chat_template is None else data.chat_template
        """Whether prompts went through the tokenizer's chat template; the first of them says it for all."""

        ends = end_token_ids(tokenizer, model_path, templated=self.templated)
        self._default, self._by_task = sampling_by_task(rollout, tokenizer, ends)
        self.odd = list(self._odd_texts(tokenizer, records, data, ends, model_path, setting))
        """Warnings of the texts of the first records, and of the template that makes them."""

        renderer = renderer_of(tokenizer) if self.templated else None
        self._clock = renderer.now.isoformat() if renderer is not None and renderer.has_clock else None
        lengths = [len(ids) for ids in self._tokens]
        self._ids, self.length_report = drop_over_long(
            lengths, records, data.max_prompt_tokens, data.over_long, setting, "data.max_prompt_tokens"
        )
        self._records, self._data, self._encoded = records, data, encoded
        self.remarks = encoded.remarks
        """Warnings about the records, for the console."""
        kept = fingerprint([lengths[row] for row in self._ids], (self._tokens[row] for row in self._ids))
        self._order = ShuffledOrder(len(self._ids), seed, data.shuffle, kept)

    def __len__(self) -> int:
        return len(self._ids)

    def _odd_texts(
        self,
        tokenizer: Any,
        records: Sequence[Record],
        data: DataConfig,
        ends: Sequence[int],
        model_path: str | None,
        setting: str,
    ) -> Iterator[UserError]:
        problem = end_problem(tokenizer, model_path) if self.templated and model_path else None
        if problem is not None:
            yield problem
        texts = [tokenizer.convert_ids_to_tokens(token) for token in ends]
        first, prompts = records[:LOOKED_AT], self._texts[:LOOKED_AT]
        yield from odd_prompts(first, prompts, data, setting, texts, template_marks(tokenizer))

    @property
    def epoch(self) -> int:
        """Return the number of whole passes over the prompts so far."""
        return self._order.epoch

    def next(self, count: int) -> PromptBatch:
        """Return the next ``count`` prompts, crossing into further epochs as needed."""
        return self._batch(self._order.next(count))

    def everything(
        self, limit: int | None = None, temperature: float | None = None, top_p: float | None = None
    ) -> PromptBatch:
        """Return the first ``limit`` prompts in file order, without moving the source's position.

        ``temperature`` and ``top_p`` replace the profiles' own; temperature 0 is greedy and switches their
        filters off.
        """
        batch = self._batch(range(len(self) if limit is None else min(limit, len(self))))
        if temperature is None:
            return batch
        if temperature == 0:
            sampling = [parameters.greedy() for parameters in batch.sampling]
        else:
            profile = {"temperature": temperature} | ({} if top_p is None else {"top_p": top_p})
            sampling = [parameters._replace(**profile) for parameters in batch.sampling]
        return replace(batch, sampling=tuple(sampling))

    def state_dict(self) -> dict[str, int | str | bool]:
        """Return the position in the data, the seed, and what tells prompts and records apart."""
        return self._order.state_dict() | {"records": self._digest, "clock": self._clock or ""}

    def load_state_dict(self, state: dict[str, int | str | bool]) -> str | None:
        """Continue from ``state`` with exactly the prompts that followed it; UserError for other data.

        Return a warning where the records hold something else beside the same prompts.
        """
        before = state.get("clock") or None  # checkpoints of before have none
        other = state["fingerprint"] != self._order.fingerprint
        if other and before is not None and before != self._clock:
            raise UserError(
                "the chat template writes the date, and the checkpoint's prompts have another one",
                where="data",
                expected=f"the time at which the run started first: {before}",
                got=str(self._clock),
                fix="resume in the run's own folder, whose file `first_start` has that time, or write it "
                "into the file `first_start` of run_dir",
            )
        self._order.load_state_dict(state)
        if state.get("records", self._digest) == self._digest:  # checkpoints of before have none
            return None
        return "warning: records hold something else beside their prompts than when the checkpoint was made"

    @cached_property
    def _digest(self) -> str:
        return self._encoded.digest()

    def _batch(self, rows: Sequence[int]) -> PromptBatch:
        ids = [self._ids[row] for row in rows]
        records, tokens = [self._records[row] for row in ids], [self._tokens[row] for row in ids]
        tasks = tuple(str(record.values.get(self._data.task_field) or DEFAULT_TASK) for record in records)
        return PromptBatch(
            tokens=ragged(tokens),
            lengths=torch.tensor([len(row) for row in tokens], dtype=torch.long),
            prompt_ids=torch.tensor(ids, dtype=torch.long),
            tasks=tasks,
            prompts=tuple(self._texts[row] for row in ids),
            ground_truths=tuple(record.values.get(self._data.ground_truth_field) for record in records),
            metadata=tuple(self._metadata(record) for record in records),
            sampling=tuple(self._by_task.get(task, self._default) for task in tasks),
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
    """Return records with their prompts' tokens; UserError for one that `RecordReader` cannot read."""
    template = template_source(getattr(tokenizer, "chat_template", None))
    reader = RecordReader(data, setting, consumers=consumers, template=template)
    records = [reader.read(record) for record in records]
    texts, tokens = PromptEncoder(tokenizer, data, setting).encode(records, data.max_prompt_tokens)
    return Encoded(records, texts, (tokens,), remarks=reader.remark_lines())


def load_prompts(
    config: RunConfig, setting: str, path: DataPath, tokenizer: PreTrainedTokenizerBase, files: TokenFiles
) -> PromptSource:
    """Return the prompts of the data set at ``path``, which ``setting`` names: data.train, or of a set."""
    data, where = config.data, setting.rpartition(".")[0]
    evaluation_set = None
    if where != "data":
        evaluation_set = where.removeprefix("evaluation.sets.")
        data = fields_of(data, config.evaluation.sets[evaluation_set], where)

    consumers = prompt_consumers(config, evaluation_set)
    encode = partial(encode_prompts, tokenizer, data, setting, consumers=consumers)
    how = ("prompts", *data.of_prompts, data.chat_template, data.max_prompt_tokens, consumers)
    return PromptSource(
        files.encoded(path, setting, tokenizer, how, encode),
        tokenizer,
        data,
        config.rollout,
        seed=config.seed,
        model_path=config.model.path,
        setting=setting,
    )


def ragged(parts: Sequence[numpy.ndarray]) -> torch.Tensor:
    """Concatenate rows of token ids into one [N] int64 tensor."""
    return torch.from_numpy(numpy.concatenate(parts).astype(numpy.int64))


def fingerprint(lengths: Sequence[int], rows: Iterable[numpy.ndarray]) -> str:
    """Return 16 hexadecimal digits that differ where number, order, lengths or ids of the rows differ."""
    digest = hashlib.sha256(numpy.asarray(lengths, numpy.int64).tobytes())
    for ids in rows:
        digest.update(ids.tobytes())
    return digest.hexdigest()[:16]
