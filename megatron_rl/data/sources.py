"""Data sources of a run: prompts, and rows with given responses.

The order of an epoch is a function of (seed, epoch), so the state of a source is its epoch and position. A
fingerprint of the items ensures that a restored state belongs to the same items.

A row with a given response has the tokens that the policy would have sampled. A token of the response that is
not trained on, such as a token of the user's message, is stored as its complement (``~token``, a negative
number), so that a row and its loss mask are one array.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy
import torch

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.data import DataConfig, PromptTemplate, fields_of
from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.data.chat_format import ConversationText
from megatron_rl.data.forms import REWARDED, Consumers, RecordReader, prompt_consumers, template_source
from megatron_rl.data.messages import (
    closing_thought_tag,
    get_template_kwargs,
    is_trained_turn,
    is_uninformative,
    unclosed_thoughts_warning,
    uninformative_warning,
    uses_chat_template,
)
from megatron_rl.data.records import DataPath, Record
from megatron_rl.data.rendered_text import (
    EXAMINED_RECORDS,
    prompt_warnings,
    require_later_turns,
    response_pieces,
    response_warnings,
)
from megatron_rl.data.template_renderer import get_renderer
from megatron_rl.data.token_files import EncodedData, TokenFiles
from megatron_rl.data.tokenizing import (
    PromptEncoder,
    apply_schedules,
    conversation_text,
    drop_over_long,
    encode_pieces,
    encode_texts,
    end_token_ids,
    format_warning,
    sampling_by_task,
    template_marks,
    template_turn_end,
    turn_end_warning,
)
from megatron_rl.errors import UserError
from megatron_rl.types import PromptBatch, SamplingParameters, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ShuffledOrder:
    """Order of the item numbers 0 … count-1 over epochs, with one permutation per epoch.

    ``fingerprint`` identifies the items: `load_state_dict` rejects a state with another fingerprint.
    An epoch skips each item in the set `uniform` with probability 1 - ``uniform_share``, by a random number
    that depends on (seed, epoch, item), but never all items.

    Example:
        >>> order = ShuffledOrder(3, seed=1, shuffle=False, fingerprint="a")
        >>> order.next_items(4), order.epoch
        ([0, 1, 2, 0], 1)
    """

    def __init__(
        self,
        count: int,
        seed: int,
        shuffle: bool,
        fingerprint: str,
        uniform_share: float = 1.0,
    ) -> None:
        if count < 1:
            raise ValueError("an order needs at least one item")
        self.count = count
        self.seed = seed
        self.shuffle = shuffle
        self.fingerprint = fingerprint
        self.uniform_share = uniform_share
        self.epoch = 0
        self.position = 0
        self.uniform: set[int] = set()
        """Items whose last group of responses had equal rewards."""
        self.skipped: set[int] = set()
        """Items that this epoch skips."""
        self._order = self._permute_items()

    def _permute_items(self) -> list[int]:
        """Return the item numbers in the order of the current epoch."""
        items = list(range(self.count))
        if self.shuffle:
            generator = numpy.random.default_rng([self.seed, self.epoch])
            items = generator.permutation(self.count).tolist()
        return [item for item in items if item not in self.skipped]

    def _draw_skipped_items(self) -> set[int]:
        """Draw the items that the current epoch skips, out of those with equal rewards."""
        if self.uniform_share == 1 or not self.uniform:
            return set()

        # A random stream other than that of the permutation, which is seeded with (seed, epoch).
        generator = numpy.random.default_rng([self.seed, self.epoch, 1])
        draws = generator.random(self.count)
        skipped = {item for item in self.uniform if draws[item] >= self.uniform_share}

        # An epoch without any prompt would not end.
        if len(skipped) == self.count:
            return set()
        return skipped

    def set_uniform(self, item: int, *, is_uniform: bool) -> None:
        """Set whether the item's last group of responses had equal rewards, so that epochs may skip it."""
        if is_uniform:
            self.uniform.add(item)
        else:
            self.uniform.discard(item)

    def next_items(self, count: int) -> list[int]:
        """Return the next ``count`` item numbers, crossing into further epochs as needed."""
        items: list[int] = []
        while len(items) < count:
            # Start the next epoch only when its first item is drawn: a source at the end of its data is still
            # in the epoch that it has finished.
            if self.position == len(self._order):
                self.epoch += 1
                self.position = 0
                self.skipped = self._draw_skipped_items()
                self._order = self._permute_items()

            remaining_count = count - len(items)
            epoch_items = self._order[self.position : self.position + remaining_count]
            items.extend(epoch_items)
            self.position += len(epoch_items)
        return items

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the position, and what identifies the items, for `load_state_dict`."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
            "uniform": sorted(self.uniform),
            "skipped": sorted(self.skipped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``; raises UserError for a state with different data, seed or shuffling."""
        # Compare the fingerprint first: with other data, seed and shuffling do not matter.
        current = self.state_dict()
        for name in ("fingerprint", "seed", "shuffle"):
            if state[name] == current[name]:
                continue
            noun = "data set" if name == "fingerprint" else name
            raise UserError(
                f"the checkpoint was made with another {noun}",
                where="data",
                expected=f"{name} {state[name]}",
                got=f"{name} {current[name]}",
                fix="resume with the data, seed and shuffling of the checkpoint, or start a new run",
            )

        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
        # Checkpoints of older versions lack both keys. The skipped items are restored and not drawn again, so
        # that an epoch keeps its order even if `data.uniform_share` has changed.
        self.uniform = set(state.get("uniform", ()))
        self.skipped = set(state.get("skipped", ()))
        self._order = self._permute_items()


def concatenate_rows(rows: Sequence[numpy.ndarray]) -> torch.Tensor:
    """Concatenate rows of token ids into one [N] int64 tensor."""
    return torch.from_numpy(numpy.concatenate(rows).astype(numpy.int64))


def compute_fingerprint(lengths: Sequence[int], rows: Iterable[numpy.ndarray]) -> str:
    """Return a digest of 16 hexadecimal digits of the number, order, lengths and token ids of rows."""
    digest = hashlib.sha256(numpy.asarray(lengths, numpy.int64).tobytes())
    for ids in rows:
        digest.update(ids.tobytes())
    return digest.hexdigest()[:16]


DEFAULT_TASK = "default"
"""Task that a record without a task belongs to."""


class PromptSource:
    """Source of prompts in batches, in an order that the seed determines, over epochs.

    ``encoded`` is the result of `encode_prompts`. Prompts over ``data.max_prompt_tokens`` are dropped and
    counted in ``length_report``, or raise a UserError under ``data.over_long: error``. A record's task
    (``data.task_field``, else ``source``) selects its sampling profile. All fields other than prompt and
    ground truth become metadata. ``prompt_ids`` are indices of records.

    ``source`` is the name of the source in `data.sources`, or None. ``profile`` is the sampling profile of
    records without a task of their own that has one; None for the profile of their task.
    """

    def __init__(
        self,
        encoded: EncodedData,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        rollout: RolloutConfig,
        *,
        seed: int,
        model_path: str | None = None,
        setting: str = "data.train",
        source: str | None = None,
        profile: str | None = None,
    ) -> None:
        self._source = source
        self._profile = profile
        self._has_template_kwargs = bool(data.prompt_template.kwargs)
        self._encoded = encoded
        self._records = encoded.records
        self._texts = encoded.texts
        (self._tokens,) = encoded.tokens
        self._data = data
        self.remarks = encoded.remarks
        """Warnings about the records, for the console."""

        # `RecordReader` rejects data sets with both text and messages, so the first prompt decides for all.
        templated = data.chat_template
        if templated is None:
            templated = not isinstance(self._records[0].values[data.prompt_field], str)
        self.templated = templated
        """Whether the prompts were rendered by the tokenizer's chat template."""

        ends = end_token_ids(tokenizer, model_path, templated=self.templated)
        self._rollout = rollout
        self._default_sampling, self._sampling_by_task = sampling_by_task(rollout, tokenizer, ends)
        self._step = 1
        self.text_warnings = list(self._text_warnings(tokenizer, ends, model_path, setting))
        """Warnings about the texts of the first records, and about the template that renders them."""

        # A template that writes the date renders different prompts tomorrow, so checkpoints store the time.
        self._clock = None
        renderer = get_renderer(tokenizer) if self.templated else None
        if renderer is not None and renderer.has_clock:
            self._clock = renderer.now.isoformat()

        # Indices of the records within the limit, which are the items of the order.
        lengths = [len(ids) for ids in self._tokens]
        self._ids, self.length_report = drop_over_long(
            lengths,
            self._records,
            data.max_prompt_tokens,
            data.over_long,
            setting,
            "data.max_prompt_tokens",
        )

        # The fingerprint covers the prompts within the limit: if they change, a run cannot resume.
        row_lengths = [lengths[row] for row in self._ids]
        row_tokens = (self._tokens[row] for row in self._ids)
        self._order = ShuffledOrder(
            len(self._ids),
            seed,
            data.shuffle,
            compute_fingerprint(row_lengths, row_tokens),
            data.uniform_share,
        )

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

        # A rendering mistake is in every record, so examining the first records is enough.
        records = self._records[:EXAMINED_RECORDS]
        texts = self._texts[:EXAMINED_RECORDS]
        end_texts = [tokenizer.convert_ids_to_tokens(token) for token in ends]
        yield from prompt_warnings(records, texts, self._data, setting, end_texts, template_marks(tokenizer))

    @property
    def record_count(self) -> int:
        """Return the number of records of the data set, including those over the token limit."""
        return len(self._records)

    def has_prompt(self, record: int, tokens: torch.Tensor) -> bool:
        """Return whether the prompt of a record, given by its index, has these tokens."""
        return self._tokens[record].tolist() == tokens.tolist()

    def begin_step(self, step: int) -> None:
        """Apply the schedules of ``step``, which counts from 1, to the prompts from now on."""
        self._step = step

    @property
    def epoch(self) -> int:
        """Return the number of complete passes over the prompts so far."""
        return self._order.epoch

    def next_batch(self, count: int) -> PromptBatch:
        """Return the next ``count`` prompts, crossing into further epochs as needed."""
        batch = self._make_batch(self._order.next_items(count))
        if not self._rollout.changes_over_steps:
            return batch

        sampling = []
        for profile, parameters in zip(batch.profile_names, batch.sampling, strict=True):
            temperature = self._rollout.task_setting(profile, "temperature")
            top_p = self._rollout.task_setting(profile, "top_p")
            sampling.append(apply_schedules(parameters, temperature, top_p, self._step))
        return replace(batch, sampling=tuple(sampling))

    def record_group(self, prompt_id: int, *, is_uniform: bool) -> None:
        """Record whether all responses to a prompt had equal rewards, for `data.uniform_share`."""
        # `_ids` is sorted: find the prompt's index among the items of the order.
        self._order.set_uniform(bisect_left(self._ids, prompt_id), is_uniform=is_uniform)

    def uniform_fractions(self) -> dict[str, tuple[float, float]]:
        """Return metric suffix -> (fraction of prompts with equal rewards, fraction that this epoch skips).

        The suffix is empty here, and names the source in `MixedPrompts`. The mapping is empty if
        `data.uniform_share` is 1.
        """
        order = self._order
        if order.uniform_share == 1:
            return {}
        uniform_fraction = len(order.uniform) / order.count
        skipped_fraction = len(order.skipped) / order.count
        return {"": (uniform_fraction, skipped_fraction)}

    def batch_in_file_order(
        self,
        limit: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> PromptBatch:
        """Return the first ``limit`` prompts in file order, without moving the source's position.

        ``limit`` None means all prompts. ``temperature`` and ``top_p`` override the sampling profiles;
        temperature 0 is greedy and disables their filters.
        """
        count = len(self)
        if limit is not None:
            count = min(limit, count)
        batch = self._make_batch(range(count))
        if temperature is None:
            return batch

        if temperature == 0:
            sampling = [parameters.with_greedy_decoding() for parameters in batch.sampling]
        else:
            changes: dict[str, Any] = {"temperature": temperature, "temperature_tokens": 0}
            if top_p is not None:
                changes |= {"top_p": top_p, "top_p_tokens": 0}
            sampling = [parameters._replace(**changes) for parameters in batch.sampling]
        return replace(batch, sampling=tuple(sampling))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, a digest of the records, and the template's time."""
        return self._order.state_dict() | {"records": self._digest, "clock": self._clock or ""}

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Restore ``state``, so that exactly the prompts that followed it come next.

        Raises UserError for other data. Returns a warning if the prompts are equal but other fields of the
        records differ, else None.
        """
        if "sources" in state:
            raise UserError(
                "the checkpoint was made with several sources of prompts",
                where="data.train",
                expected="data.sources, as in the checkpoint",
                got="data.train",
                fix="resume with the data of the checkpoint, or start a new run",
            )

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
        return "warning: the records' fields other than the prompt have changed since the checkpoint was made"

    @cached_property
    def _digest(self) -> str:
        """Digest of all fields of the data set's records, which identifies them in checkpoints."""
        return self._encoded.digest()

    def _make_batch(self, positions: Sequence[int]) -> PromptBatch:
        """Return a batch of the prompts at ``positions`` in the source, which has no over-long prompts."""
        ids = [self._ids[position] for position in positions]
        records = [self._records[row] for row in ids]
        tokens = [self._tokens[row] for row in ids]

        # A record without a task has its source as its task.
        data = self._data
        tasks: list[str] = []
        profiles: list[str] = []
        for record in records:
            task = record.values.get(data.task_field)
            tasks.append(str(task or self._source or DEFAULT_TASK))
            # A profile of the record's own task is more specific than that of its source.
            has_own_profile = bool(task) and str(task) in self._rollout.sampling_profiles
            if self._profile is None or has_own_profile:
                profiles.append(tasks[-1])
            else:
                profiles.append(self._profile)

        sampling: list[SamplingParameters] = []
        for profile, row in zip(profiles, tokens, strict=True):
            sampling.append(self._sampling_parameters(profile, len(row)))
        sources = None
        if self._source is not None:
            sources = (self._source,) * len(ids)

        # Most data sets have no arguments of the template.
        template_kwargs = None
        kwargs_field = data.chat_template_kwargs_field
        has_own_kwargs = kwargs_field is not None and any(
            record.values.get(kwargs_field) for record in records
        )
        if self._has_template_kwargs or has_own_kwargs:
            template_kwargs = tuple(get_template_kwargs(record, data) for record in records)

        return PromptBatch(
            tokens=concatenate_rows(tokens),
            lengths=torch.tensor([len(row) for row in tokens], dtype=torch.long),
            prompt_ids=torch.tensor(ids, dtype=torch.long),
            tasks=tuple(tasks),
            prompts=tuple(self._texts[row] for row in ids),
            ground_truths=tuple(record.values.get(data.ground_truth_field) for record in records),
            metadata=tuple(self._metadata(record) for record in records),
            sampling=tuple(sampling),
            profiles=tuple(profiles),
            sources=sources,
            template_kwargs=template_kwargs,
        )

    def _sampling_parameters(self, profile: str, prompt_tokens: int) -> SamplingParameters:
        """Return the sampling parameters of a prompt, with the length limit of its responses."""
        sampling = self._sampling_by_task.get(profile, self._default_sampling)
        limit = self._rollout.limit_of(profile, prompt_tokens)
        # Most prompts have the largest limit, so they share one object.
        if limit == sampling.max_response_tokens:
            return sampling
        return sampling._replace(max_response_tokens=limit)

    def _metadata(self, record: Record) -> Mapping[str, Any]:
        """Return the fields of a record other than its prompt and ground truth."""
        reserved = {self._data.prompt_field, self._data.ground_truth_field}
        return {name: value for name, value in record.values.items() if name not in reserved}


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    setting: str,
    records: Sequence[Record],
    consumers: Consumers = REWARDED,
) -> EncodedData:
    """Tokenise the prompts of records; raises UserError as `RecordReader` does.

    ``setting`` is the key of the data set, for errors; ``consumers`` name the settings whose code reads it.
    """
    template = template_source(getattr(tokenizer, "chat_template", None))
    reader = RecordReader(data, setting, consumers=consumers, template=template)
    records = [reader.read(record) for record in records]
    texts, tokens = PromptEncoder(tokenizer, data, setting).encode(records, data.max_prompt_tokens)
    return EncodedData(records, texts, (tokens,), remarks=reader.remark_lines())


def load_prompts(
    config: RunConfig,
    setting: str,
    path: DataPath,
    tokenizer: PreTrainedTokenizerBase,
    files: TokenFiles,
) -> PromptSource:
    """Load the prompts of the data set at ``path``.

    ``setting`` is its configuration key: ``data.train``, ``data.sources.NAME.path`` or
    ``evaluation.sets.NAME.data``. The section of the key may override the names of fields.
    """
    data = config.data
    evaluation_set = None
    source = None
    profile = None
    section = setting.rpartition(".")[0]
    if section.startswith("data.sources."):
        source = section.removeprefix("data.sources.")
        source_config = config.data.sources[source]
        profile = source_config.profile
        data = fields_of(data, source_config, section)
    elif section != "data":
        evaluation_set = section.removeprefix("evaluation.sets.")
        data = fields_of(data, config.evaluation.sets[evaluation_set], section)

    # Every setting that changes the encoded records must be in `inputs`: they identify the file of tokens.
    consumers = prompt_consumers(config, evaluation_set, source)
    encode = partial(encode_prompts, tokenizer, data, setting, consumers=consumers)
    inputs = ("prompts", *data.record_fields, data.chat_template, data.max_prompt_tokens, consumers)
    if data.prompt_template != PromptTemplate():
        inputs = (*inputs, data.prompt_template)
    prompts = PromptSource(
        files.load_or_encode(path, setting, tokenizer, inputs, encode),
        tokenizer,
        data,
        config.rollout,
        seed=config.seed,
        model_path=config.model.path,
        setting=setting,
        source=source,
        profile=profile,
    )

    # An environment continues conversations, which not every template with every argument can.
    chat = conversation_text(tokenizer)
    if config.rollout.environment is not None and prompts.templated and chat is not None:
        require_later_turns(chat, data)
    return prompts


class ResponseSource:
    """Source of rows with given responses in batches, in an order that the seed determines, over epochs.

    ``encoded`` is the result of `encode_responses`; a record has one row per field of responses, in the order
    of the fields. A record with a row over ``max_tokens`` is dropped and counted in ``length_report``, or
    raises a UserError under ``data.over_long: error``. ``setting`` is the configuration key of the data.
    """

    def __init__(
        self,
        encoded: EncodedData,
        data: DataConfig,
        *,
        seed: int,
        max_tokens: int,
        setting: str,
    ) -> None:
        self._prompts, *self._responses = encoded.tokens
        self.rows_per_record = len(self._responses)
        """Number of rows per record."""
        self._record_warnings = encoded.remarks
        self.text_warnings: Sequence[UserError] = ()
        """Warnings about the texts of the first records."""

        # A record is over the limit if its longest row is.
        lengths = [
            [len(prompt) + len(response) for response in responses]
            for prompt, *responses in zip(self._prompts, *self._responses, strict=True)
        ]
        self._indices, self.length_report = drop_over_long(
            [max(row_lengths) for row_lengths in lengths],
            encoded.records,
            max_tokens,
            data.over_long,
            setting,
            f"{setting.rpartition('.')[0]}.max_row_tokens",
        )

        # Compare without the last token, because an empty response has an end token, too.
        self._uninformative = [
            encoded.records[index].where
            for index in self._indices
            if is_uninformative(*(responses[index][:-1].tobytes() for responses in self._responses))
        ]

        row_lengths: list[int] = []
        for index in self._indices:
            row_lengths.extend(lengths[index])
        rows = (row for index in self._indices for row in self._join_rows(index))
        self._order = ShuffledOrder(len(self), seed, data.shuffle, compute_fingerprint(row_lengths, rows))

    def __len__(self) -> int:
        """Return the number of records in an epoch, without those that were too long."""
        return len(self._indices)

    def remarks(self) -> Iterator[str]:
        """Yield lines for the console about long records, unread fields and uninformative responses."""
        yield self.length_report.describe("records")
        yield from self._record_warnings
        if self._uninformative:
            are_pairs = self.rows_per_record > 1
            yield f"warning: {uninformative_warning(self._uninformative, len(self), are_pairs)}"
        for problem in self.text_warnings:
            yield format_warning(problem)

    def next_batch(self, count: int) -> TrainBatch:
        """Return the rows of the next ``count`` records, record after record.

        For records with one row, each trained token has the same loss weight, and the weights sum to 1. For
        records with more rows, each trained token has weight 1 / rows, so that the loss is a mean over rows.
        """
        return self._make_batch(self._order.next_items(count))

    def batch_in_file_order(self) -> TrainBatch:
        """Return all rows in file order, with loss weights as in `next_batch`."""
        return self._make_batch(range(len(self)))

    def _make_batch(self, items: Sequence[int]) -> TrainBatch:
        """Return the rows of the records at positions ``items`` of the source as a train batch."""
        indices = [self._indices[item] for item in items]
        rows: list[numpy.ndarray] = []
        response_starts: list[int] = []
        for index in indices:
            rows.extend(self._join_rows(index))
            response_starts.extend([len(self._prompts[index])] * self.rows_per_record)

        # Neither tokens of the prompt are trained on, nor those that a row has as their complement (~token).
        tokens = concatenate_rows(rows)
        mask = torch.cat(
            [torch.arange(len(row)) >= start for row, start in zip(rows, response_starts, strict=True)]
        )
        mask &= tokens >= 0

        # Single responses have a mean over tokens; pairs have one loss per row.
        total_weight = mask.sum() if self.rows_per_record == 1 else len(rows)
        return TrainBatch(
            tokens=torch.where(tokens < 0, ~tokens, tokens),
            lengths=torch.tensor([len(row) for row in rows], dtype=torch.long),
            response_mask=mask,
            loss_weights=mask.float() / total_weight,
            temperature=torch.ones(len(rows)),
        )

    def _join_rows(self, index: int) -> list[numpy.ndarray]:
        """Return the rows (prompt and response) of the record with this index in the data."""
        prompt = self._prompts[index]
        return [numpy.concatenate((prompt, responses[index])) for responses in self._responses]

    def state_dict(self) -> dict[str, int | str | bool]:
        """Return the epoch and position in the data, and what identifies the data, for a checkpoint."""
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, int | str | bool]) -> None:
        """Restore ``state``, so that exactly the rows that followed it come next.

        Raises UserError for other data.
        """
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
) -> EncodedData:
    """Tokenise the prompts and the responses of records.

    ``fields`` maps the fields of responses to the settings that name them. Raises UserError for a record that
    lacks one of the fields, and for a value that is not a response. See `RecordReader` for the form of the
    values and `_ResponseEncoder` for the tokens.
    """
    # Convert records to the normal form, with conversations split into prompt and response.
    template = template_source(getattr(tokenizer, "chat_template", None))
    reader = RecordReader(data, setting, fields, every_turn, template=template)
    records = [reader.read(record) for record in records]

    # Prompts first: a response is tokenised together with the text of its prompt.
    prompts = PromptEncoder(tokenizer, data, setting)
    texts, tokens = prompts.encode(records, max_tokens)
    alternative = "set sft.turns=last" if every_turn else None
    responses = _ResponseEncoder(prompts, ends, alternative)
    columns = [responses.encode(records, texts, tokens, field, max_tokens) for field in fields]
    return EncodedData(records, texts, (tokens, *columns), remarks=reader.remark_lines())


class _ResponseEncoder:
    """Encoder of responses, with the tokens that they would have in a sampled conversation.

    The complete text of a row is tokenised at once, so that it has the tokens of the template's own text. If
    a token would span two pieces (prompt, turns, text between turns), the pieces are tokenised separately,
    since the policy samples after the tokens of the prompt alone. A turn that does not end with one of
    ``ends`` gets the token with which the chat template ends turns, or else the first of ``ends``.
    ``alternative`` is a further fix in the error for a template that cannot render conversations.
    """

    def __init__(self, prompts: PromptEncoder, ends: Sequence[int], alternative: str | None) -> None:
        self._prompts = prompts
        self._alternative = alternative
        self._plain_end = ends[0]
        self._template_end = ends[0]
        self._ends = frozenset(ends)
        tokenizer = prompts.tokenizer
        self._end_texts: list[Any] = [tokenizer.convert_ids_to_tokens(token) for token in ends]
        self._chat: ConversationText | None = None

        # A template may end turns with a token that the model's files do not name.
        if prompts.renderer is not None:
            end = template_turn_end(tokenizer)
            if end is not None and end.token is not None:
                self._template_end = end.token
                self._ends |= {end.token}
                self._end_texts.append(tokenizer.convert_ids_to_tokens(end.token))
            self._chat = ConversationText(prompts.renderer, self._end_texts)

    def encode(
        self,
        records: Sequence[Record],
        prompts: Sequence[str],
        prompt_tokens: Sequence[numpy.ndarray],
        field: str,
        limit: int,
    ) -> list[numpy.ndarray]:
        """Tokenise each record's response: int32, with ~token for tokens that are not trained on.

        ``prompts`` and ``prompt_tokens`` are the text and the tokens of each record's prompt, ``field`` is
        the field of the response, and ``limit`` the length limit of a row in tokens.
        """
        data = self._prompts.data
        setting = self._prompts.setting
        tokenizer = self._prompts.tokenizer
        pieces = [
            response_pieces(record, field, data, setting, self._chat, self._end_texts, self._alternative)
            for record in records
        ]

        # Tokenise the complete text of each row: prompt and pieces.
        row_texts = [[prompt, *row] for prompt, row in zip(prompts, pieces, strict=True)]
        rows = encode_pieces(tokenizer, row_texts, limit)

        # Tokenise the pieces separately if a token spans two of them, or if a following response changes the
        # prompt's tokens: the policy samples after the tokens of the prompt alone.
        separate_rows: list[int] = []
        separate_texts: list[str] = []
        for index, (row, prompt) in enumerate(zip(rows, prompt_tokens, strict=True)):
            if row is None or not _ends_with(prompt, row[0]):
                separate_rows.append(index)
                separate_texts.extend(pieces[index])
        separate_tokens = iter(encode_texts(tokenizer, separate_texts, limit))
        no_prompt = numpy.empty(0, numpy.int32)
        for index in separate_rows:
            rows[index] = [no_prompt, *(next(separate_tokens) for _ in pieces[index])]

        responses = []
        for record, row in zip(records, rows, strict=True):
            end_token = self._template_end if uses_chat_template(record, data) else self._plain_end
            trained_turns = _trained_turns(record.values[field])
            # The first piece of a row is the prompt.
            responses.append(self._join_pieces((row or [])[1:], end_token, trained_turns))
        return responses

    def _join_pieces(
        self,
        pieces: Sequence[numpy.ndarray],
        end_token: int,
        trained_turns: Sequence[bool],
    ) -> numpy.ndarray:
        """Join the pieces of one response: turns at even indices, and the text between turns at odd indices.

        ``end_token`` is appended to a turn that does not end with an end token. ``trained_turns`` tells for
        each turn whether it is trained on; all other tokens are returned as their complements.
        """
        response: list[numpy.ndarray] = []
        last_token = None
        for index, tokens in enumerate(pieces):
            # The text between turns may start with the end token of the previous turn.
            if index % 2:
                if len(tokens) > 0 and tokens[0] == last_token:
                    tokens = tokens[1:]
                response.append(~tokens)
                continue

            if not len(tokens) or int(tokens[-1]) not in self._ends:
                tokens = numpy.append(tokens, numpy.int32(end_token))
            last_token = tokens[-1]
            response.append(tokens if trained_turns[index // 2] else ~tokens)
        return numpy.concatenate(response)


def _ends_with(tokens: numpy.ndarray, end: numpy.ndarray) -> bool:
    """Return whether tokens end with ``end``; a prompt's tokens may start with the tokenizer's prefix."""
    start = len(tokens) - len(end)
    return start >= 0 and numpy.array_equal(tokens[start:], end)


def _trained_turns(response: str | Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return, for each turn of the assistant in a response, whether it is trained on."""
    if isinstance(response, str):
        return [True]
    return [is_trained_turn(message) for message in response if message["role"] == "assistant"]


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
    """Load the rows of the data set at ``path``; ``setting`` is its configuration key.

    ``fields`` maps fields of responses to the settings that name them. ``data`` names the fields other than
    the responses; None means the configuration's section ``data``.
    """
    data = data or config.data
    ends = end_token_ids(tokenizer, config.model.path)
    encode = partial(
        encode_responses,
        tokenizer,
        data,
        fields,
        max_tokens,
        setting,
        ends,
        every_turn=every_turn,
    )
    inputs = ("responses", *data.record_fields, *fields, data.chat_template, max_tokens, ends, every_turn)
    encoded = files.load_or_encode(path, setting, tokenizer, inputs, encode)

    source = ResponseSource(encoded, data, seed=config.seed, max_tokens=max_tokens, setting=setting)
    # Held-out data have the same form as the training data, whose warnings are enough.
    if not setting.endswith(".held_out"):
        source.text_warnings = list(_text_warnings(config, tokenizer, encoded, fields, data, setting))
    return source


def _text_warnings(
    config: RunConfig,
    tokenizer: Any,
    encoded: EncodedData,
    fields: Collection[str],
    data: DataConfig,
    setting: str,
) -> Iterator[UserError]:
    """Yield the warnings about the texts of the first records, and about the template that renders them."""
    records = encoded.records[:EXAMINED_RECORDS]
    uses_template = any(uses_chat_template(record, data) for record in records)
    ends = end_token_ids(tokenizer, config.model.path, templated=uses_template)
    end_texts = [tokenizer.convert_ids_to_tokens(token) for token in ends]
    chat = conversation_text(tokenizer, ends)

    # Warn of a template that ends turns with an unknown token, or that opens thoughts in the prompt.
    if uses_template:
        warning = turn_end_warning(tokenizer, config.model.path)
        if warning is not None:
            yield warning
        warning = _thoughts_warning(chat, records, fields, data, setting)
        if warning is not None:
            yield warning

    # Warn of marks of a template, or of ends, inside the texts.
    yield from prompt_warnings(records, encoded.texts, data, setting, end_texts, template_marks(tokenizer))
    yield from response_warnings(records, fields, data, setting, chat, end_texts)


def _thoughts_warning(
    chat: ConversationText | None,
    records: Sequence[Record],
    fields: Collection[str],
    data: DataConfig,
    setting: str,
) -> UserError | None:
    """Return a warning if the chat template opens thoughts in the prompt that some responses do not close.

    ``fields`` are the fields of responses. Returns None for a template that opens no thoughts, and without a
    template.
    """
    if chat is None:
        return None

    with suppress(UserError):  # a template may reject this conversation
        closing_tag = closing_thought_tag(chat.opening)
        if closing_tag is not None:
            return unclosed_thoughts_warning(records, fields, data, closing_tag, setting)
    return None
