"""Data sources of a run: prompts to sample responses for, and prompts with responses to train on.

The order of an epoch is a function of (seed, epoch), so the state of a source is its epoch and position. A
fingerprint of the items ensures that a restored state belongs to the same items.

A response of the data set is encoded to the tokens that the policy would have sampled. A token of the
response that is not trained on, such as a token of the user's message, is stored as its complement
(``~token``, a negative number), so that a row and its loss mask are one array.
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
from megatron_rl.data.chat_format import ConversationRenderer
from megatron_rl.data.forms import REWARDED, Consumers, RecordReader, prompt_consumers, template_source
from megatron_rl.data.messages import (
    closing_reasoning_tag,
    get_template_kwargs,
    is_trained_turn,
    is_uninformative,
    unclosed_reasoning_warning,
    uninformative_warning,
    uses_chat_template,
)
from megatron_rl.data.records import DataPath, Record
from megatron_rl.data.rendered_text import (
    EXAMINED_RECORDS,
    prompt_warnings,
    require_multi_turn_template,
    response_pieces,
    response_warnings,
)
from megatron_rl.data.template_renderer import get_renderer
from megatron_rl.data.token_files import EncodedData, TokenFiles
from megatron_rl.data.tokenizing import (
    PromptEncoder,
    apply_schedules,
    drop_over_long,
    encode_pieces,
    encode_texts,
    end_token_ids,
    format_warning,
    make_conversation_renderer,
    sampling_by_task,
    template_delimiters,
    template_turn_end,
    turn_end_warning,
)
from megatron_rl.errors import UserError
from megatron_rl.types import PromptBatch, SamplingParameters, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ShuffledOrder:
    """Order of a data set's items over epochs, with one permutation per epoch.

    The items are prompts or records, with the numbers 0 … count-1. ``fingerprint`` identifies their content:
    `load_state_dict` rejects a state with another fingerprint.

    A prompt is *uniform* if all responses that were last sampled for it had the same reward. An epoch keeps
    each uniform prompt with probability ``uniform_share``, and otherwise skips it. The random choice depends
    only on (seed, epoch, item). An epoch never skips all items.

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

        # State of the order, which checkpoints store.
        self.epoch = 0
        self.position = 0
        self.uniform: set[int] = set()
        """Items (prompts) that are uniform: their last sampled responses all had the same reward."""
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

    def _choose_skipped_items(self) -> set[int]:
        """Choose the items that the current epoch skips, at random from the uniform items.

        A prompt is uniform if all responses that were last sampled for it had the same reward. The choice
        depends only on (seed, epoch, item).
        """
        if self.uniform_share == 1 or not self.uniform:
            return set()

        # Add 1 to the seed sequence: the stream must be independent of the permutation's stream.
        generator = numpy.random.default_rng([self.seed, self.epoch, 1])
        draws = generator.random(self.count)
        skipped = {item for item in self.uniform if draws[item] >= self.uniform_share}

        # An epoch without any prompt would not end.
        if len(skipped) == self.count:
            return set()
        return skipped

    def set_uniform(self, item: int, *, is_uniform: bool) -> None:
        """Set whether an item is uniform: the responses of its last group all had the same reward.

        Later epochs may skip uniform items.
        """
        if is_uniform:
            self.uniform.add(item)
        else:
            self.uniform.discard(item)

    def next_items(self, count: int) -> list[int]:
        """Return the next ``count`` item numbers; start further epochs as needed."""
        items: list[int] = []
        while len(items) < count:
            # Start the next epoch only when its first item is drawn: until then, `epoch` is the number of the
            # epoch that has just ended.
            if self.position == len(self._order):
                self.epoch += 1
                self.position = 0
                self.skipped = self._choose_skipped_items()
                self._order = self._permute_items()

            num_remaining = count - len(items)
            epoch_items = self._order[self.position : self.position + num_remaining]
            items.extend(epoch_items)
            self.position += len(epoch_items)
        return items

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, position, skipped items and identity of the data, for `load_state_dict`."""
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
        """Restore ``state``; raises UserError if its data, seed or shuffling differ."""
        # Compare the fingerprint first, so that the error for different data names the data and not the seed.
        current_state = self.state_dict()
        for name in ("fingerprint", "seed", "shuffle"):
            if state[name] == current_state[name]:
                continue
            noun = "data set" if name == "fingerprint" else name
            raise UserError(
                f"the checkpoint was made with another {noun}",
                where="data",
                expected=f"{name} {state[name]}",
                got=f"{name} {current_state[name]}",
                fix="resume with the data, seed and shuffling of the checkpoint, or start a new run",
            )

        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
        # Checkpoints of older versions lack the keys "uniform" and "skipped". The skipped items are restored
        # and not chosen again, so that the epoch keeps its order even if `data.uniform_share` has changed.
        self.uniform = set(state.get("uniform", ()))
        self.skipped = set(state.get("skipped", ()))
        self._order = self._permute_items()


def concatenate_rows(rows: Sequence[numpy.ndarray]) -> torch.Tensor:
    """Concatenate rows of token ids into one [N] int64 tensor."""
    return torch.from_numpy(numpy.concatenate(rows).astype(numpy.int64))


def compute_fingerprint(lengths: Sequence[int], rows: Iterable[numpy.ndarray]) -> str:
    """Compute a digest (16 hexadecimal digits) of rows of token ids, including their order and lengths."""
    digest = hashlib.sha256(numpy.asarray(lengths, numpy.int64).tobytes())
    for ids in rows:
        digest.update(ids.tobytes())
    return digest.hexdigest()[:16]


DEFAULT_TASK = "default"
"""Task of the records that name no task."""


class PromptSource:
    """Source of prompt batches over epochs, in an order that depends on the seed.

    ``encoded`` is the result of `encode_prompts`. Prompts over ``data.max_prompt_tokens`` are dropped and
    counted in ``length_report``, or raise a UserError under ``data.over_long: error``. A record's task
    (``data.task_field``, else ``source``) selects its sampling profile. All fields other than prompt and
    ground truth become metadata. ``prompt_ids`` are indices of records.

    ``source`` is the name of the source in `data.sources`, or None. ``profile`` is the sampling profile of
    records whose task has no profile. None means the profile with the name of the task.
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
        # The only column of tokens is the column of the prompts: `encode_prompts` encodes no responses.
        (self._tokens,) = encoded.tokens
        self._data = data
        self.remarks = encoded.remarks
        """Warnings about fields and messages of the records, as lines for the console."""

        # `RecordReader` rejects data sets with both text and messages, so all prompts have the form of the
        # first one.
        templated = data.chat_template
        if templated is None:
            templated = not isinstance(self._records[0].values[data.prompt_field], str)
        self.templated = templated
        """Whether the prompts were rendered by the tokenizer's chat template."""

        end_ids = end_token_ids(tokenizer, model_path, templated=self.templated)
        self._rollout = rollout
        self._default_sampling, self._sampling_by_profile = sampling_by_task(rollout, tokenizer, end_ids)
        self._step = 1
        self.text_warnings = list(self._text_warnings(tokenizer, end_ids, model_path, setting))
        """Warnings about the texts of the first records, and about the template that renders them."""

        # A template that writes the date renders different prompts tomorrow, so checkpoints store the time.
        self._clock = None
        renderer = get_renderer(tokenizer) if self.templated else None
        if renderer is not None and renderer.uses_current_time:
            self._clock = renderer.now.isoformat()

        # Drop the records over the token limit. `_indices` are the indices of the remaining records, and
        # `_order` shuffles the positions in `_indices`.
        lengths = [len(ids) for ids in self._tokens]
        self._indices, self.length_report = drop_over_long(
            lengths,
            self._records,
            data.max_prompt_tokens,
            data.over_long,
            setting,
            "data.max_prompt_tokens",
        )

        # The fingerprint covers only prompts within the limit: a run cannot resume if these prompts change.
        row_lengths = [lengths[index] for index in self._indices]
        row_tokens = (self._tokens[index] for index in self._indices)
        self._order = ShuffledOrder(
            len(self._indices),
            seed,
            data.shuffle,
            compute_fingerprint(row_lengths, row_tokens),
            data.uniform_share,
        )

    def __len__(self) -> int:
        return len(self._indices)

    def _text_warnings(
        self,
        tokenizer: Any,
        end_ids: Sequence[int],
        model_path: str | None,
        setting: str,
    ) -> Iterator[UserError]:
        """Yield the warnings about the chat template and about the texts of the first records.

        ``end_ids`` are the ids of the tokens that end responses.
        """
        if self.templated and model_path:
            warning = turn_end_warning(tokenizer, model_path)
            if warning is not None:
                yield warning

        # A rendering mistake usually affects every record, so examining the first records is enough.
        records = self._records[:EXAMINED_RECORDS]
        texts = self._texts[:EXAMINED_RECORDS]
        end_texts = [tokenizer.convert_ids_to_tokens(token) for token in end_ids]
        delimiters = template_delimiters(tokenizer)
        yield from prompt_warnings(records, texts, self._data, setting, end_texts, delimiters)

    @property
    def record_count(self) -> int:
        """Return the number of records of the data set, including records over the token limit."""
        return len(self._records)

    def has_prompt(self, record: int, tokens: torch.Tensor) -> bool:
        """Return whether the prompt of a record, given by its index, has these tokens."""
        return self._tokens[record].tolist() == tokens.tolist()

    def begin_step(self, step: int) -> None:
        """Apply the sampling schedules of ``step``, which counts from 1, to all further prompts."""
        self._step = step

    @property
    def epoch(self) -> int:
        """Return the number of complete passes over the prompts so far."""
        return self._order.epoch

    def next_batch(self, count: int) -> PromptBatch:
        """Return the next ``count`` prompts; start further epochs as needed."""
        batch = self._make_batch(self._order.next_items(count))
        if not self._rollout.changes_over_steps:
            return batch

        sampling = []
        for profile, parameters in zip(batch.profile_names, batch.sampling, strict=True):
            temperature = self._rollout.task_setting(profile, "temperature")
            top_p = self._rollout.task_setting(profile, "top_p")
            sampling.append(apply_schedules(parameters, temperature, top_p, self._step))
        return replace(batch, sampling=tuple(sampling))

    def record_uniform_rewards(self, prompt_id: int, *, is_uniform: bool) -> None:
        """Record whether all responses to a prompt had equal rewards.

        Later epochs may skip such a prompt (`data.uniform_share`). ``prompt_id`` is the index of its record.
        """
        # The order has only the prompts within the token limit; `_indices` has their record indices, sorted.
        position = bisect_left(self._indices, prompt_id)
        self._order.set_uniform(position, is_uniform=is_uniform)

    def uniform_fractions(self) -> dict[str, tuple[float, float]]:
        """Return (uniform fraction, skipped fraction) under the key "", or {} if no prompts are skipped.

        The uniform fraction is the fraction of prompts whose last responses all had the same reward. The
        skipped fraction is the fraction of prompts that the current epoch skips. An epoch skips prompts only
        if `data.uniform_share` is less than 1.

        The key is a suffix for the names of the metrics. `MixedPrompts` has one suffix for each source.
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
        """Return the first ``limit`` prompts in file order; the position of the source does not change.

        ``limit`` None means all prompts. ``temperature`` and ``top_p`` override the sampling profiles.
        Temperature 0 is greedy decoding without the filters of the profiles.
        """
        num_prompts = len(self)
        if limit is not None:
            num_prompts = min(limit, num_prompts)
        batch = self._make_batch(range(num_prompts))
        if temperature is None:
            return batch

        # Also disable changes over the tokens of a response, which would override the constant values.
        if temperature == 0:
            sampling = [parameters.with_greedy_decoding() for parameters in batch.sampling]
        else:
            changes: dict[str, Any] = {"temperature": temperature, "temperature_tokens": 0}
            if top_p is not None:
                changes |= {"top_p": top_p, "top_p_tokens": 0}
            sampling = [parameters._replace(**changes) for parameters in batch.sampling]
        return replace(batch, sampling=tuple(sampling))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, a digest of the records, and the time that the template uses."""
        return self._order.state_dict() | {"records": self._digest, "clock": self._clock or ""}

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Restore the position from a checkpoint; raises UserError if the prompts differ.

        Returns a warning if the prompts are equal but other fields of the records differ, else None.
        """
        if "sources" in state:
            raise UserError(
                "the checkpoint was made with several sources of prompts",
                where="data.train",
                expected="data.sources, as in the checkpoint",
                got="data.train",
                fix="resume with the data of the checkpoint, or start a new run",
            )

        # Raise a more specific error if the prompts differ because the template writes the date. Older
        # checkpoints have neither `clock` nor `records`.
        clock = state.get("clock") or None
        prompts_differ = state["fingerprint"] != self._order.fingerprint
        if prompts_differ and clock is not None and clock != self._clock:
            raise UserError(
                "the chat template writes the date, and the checkpoint's prompts have another date",
                where="data",
                expected=f"the start time of the original run: {clock}",
                got=str(self._clock),
                fix=f"resume in the run_dir of the original run, or write {clock} into the file "
                "`first_start` of the new run_dir",
            )

        self._order.load_state_dict(state)
        if state.get("records", self._digest) == self._digest:
            return None
        return "warning: the records' fields other than the prompt have changed since the checkpoint was made"

    @cached_property
    def _digest(self) -> str:
        """Digest of all fields of all records, which checkpoints store to detect changed records."""
        return self._encoded.digest()

    def _make_batch(self, positions: Sequence[int]) -> PromptBatch:
        """Return the prompts at ``positions`` as a batch.

        A position is an index into the prompts within the length limit.
        """
        indices = [self._indices[position] for position in positions]
        records = [self._records[index] for index in indices]
        tokens = [self._tokens[index] for index in indices]

        # The task of a record without a task is the name of its source. A profile of the record's own task
        # takes precedence over the profile of the source.
        data = self._data
        tasks: list[str] = []
        profiles: list[str] = []
        for record in records:
            own_task = record.values.get(data.task_field)
            task = str(own_task or self._source or DEFAULT_TASK)
            tasks.append(task)
            has_own_profile = bool(own_task) and task in self._rollout.sampling_profiles
            if self._profile is None or has_own_profile:
                profiles.append(task)
            else:
                profiles.append(self._profile)

        sampling: list[SamplingParameters] = []
        for profile, row in zip(profiles, tokens, strict=True):
            sampling.append(self._sampling_parameters(profile, len(row)))
        sources = None
        if self._source is not None:
            sources = (self._source,) * len(indices)

        # Omit the template's arguments if neither the data set nor a record of the batch has any.
        template_kwargs = None
        kwargs_field = data.chat_template_kwargs_field
        records_have_kwargs = kwargs_field is not None and any(
            record.values.get(kwargs_field) for record in records
        )
        if self._has_template_kwargs or records_have_kwargs:
            template_kwargs = tuple(get_template_kwargs(record, data) for record in records)

        return PromptBatch(
            tokens=concatenate_rows(tokens),
            lengths=torch.tensor([len(row) for row in tokens], dtype=torch.long),
            prompt_ids=torch.tensor(indices, dtype=torch.long),
            tasks=tuple(tasks),
            prompts=tuple(self._texts[index] for index in indices),
            ground_truths=tuple(record.values.get(data.ground_truth_field) for record in records),
            metadata=tuple(self._metadata(record) for record in records),
            sampling=tuple(sampling),
            profiles=tuple(profiles),
            sources=sources,
            template_kwargs=template_kwargs,
        )

    def _sampling_parameters(self, profile: str, prompt_tokens: int) -> SamplingParameters:
        """Return the sampling parameters for a prompt of ``prompt_tokens`` tokens.

        ``profile`` is the name of the prompt's sampling profile. Profiles have the names of tasks; a name
        without a profile gets the default parameters. The limit of response tokens may depend on the length
        of the prompt.
        """
        sampling = self._sampling_by_profile.get(profile, self._default_sampling)
        limit = self._rollout.limit_of(profile, prompt_tokens)
        # Share one object between the prompts with the largest limit, which are most prompts.
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
    """Normalise records and tokenise their prompts; raises UserError as `RecordReader` does.

    ``setting`` is the configuration key of the data set, for errors. ``consumers`` has the settings of the
    user's functions that get the records' fields, such as ``reward.function``. If a field is missing, the
    error names the setting in ``consumers`` whose function reads the field. By default, the reward of the run
    is assumed to read every field.
    """
    template = template_source(getattr(tokenizer, "chat_template", None))
    reader = RecordReader(data, setting, consumers=consumers, template=template)
    records = [reader.read(record) for record in records]
    texts, tokens = PromptEncoder(tokenizer, data, setting).encode(records, data.max_prompt_tokens)
    return EncodedData(records, texts, (tokens,), remarks=reader.warning_lines())


def load_prompts(
    config: RunConfig,
    setting: str,
    path: DataPath,
    tokenizer: PreTrainedTokenizerBase,
    files: TokenFiles,
) -> PromptSource:
    """Load the prompts of the data set at ``path``.

    ``setting`` is the configuration key of the data set: ``data.train``, ``data.sources.NAME.path`` or
    ``evaluation.sets.NAME.data``. The section of the key may override the names of fields.
    """
    # Find the section of the data set, whose settings override the section `data`.
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

    # `inputs` identifies the token file, so it must contain every setting that changes the encoded records.
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

    # An environment adds turns to a conversation. Some templates, or some arguments, do not support this.
    chat = make_conversation_renderer(tokenizer)
    if config.rollout.environment is not None and prompts.templated and chat is not None:
        require_multi_turn_template(chat, data)
    return prompts


class ResponseSource:
    """Source of batches of prompts with responses over epochs, in an order that depends on the seed.

    ``encoded`` is the result of `encode_responses`. A record has one row (prompt and response) per response
    field, in the order of the fields. A record with a row over ``max_tokens`` is dropped and counted in
    ``length_report``, or raises a UserError under ``data.over_long: error``. ``setting`` is the configuration
    key of the data.
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

        # The length of a record is the length of its longest row.
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

        # Compare responses without their last token, because even an empty response has an end token.
        self._uninformative: list[str] = []
        for index in self._indices:
            contents = [responses[index][:-1].tobytes() for responses in self._responses]
            if is_uninformative(*contents):
                self._uninformative.append(encoded.records[index].where)

        row_lengths: list[int] = []
        for index in self._indices:
            row_lengths.extend(lengths[index])
        rows = (row for index in self._indices for row in self._join_rows(index))
        self._order = ShuffledOrder(len(self), seed, data.shuffle, compute_fingerprint(row_lengths, rows))

    def __len__(self) -> int:
        """Return the number of records in an epoch, without the dropped records."""
        return len(self._indices)

    def remarks(self) -> Iterator[str]:
        """Yield lines for the console about long records, unread fields and uninformative responses."""
        yield self.length_report.describe("records")
        yield from self._record_warnings
        if self._uninformative:
            are_pairs = self.rows_per_record > 1
            yield f"warning: {uninformative_warning(self._uninformative, len(self), are_pairs)}"
        for warning in self.text_warnings:
            yield format_warning(warning)

    def next_batch(self, count: int) -> TrainBatch:
        """Return the rows of the next ``count`` records, record after record.

        Every trained token of the batch has the same loss weight. If records have one response, the weights
        add up to 1, so that the loss is a mean over tokens. If records have several responses, the weight is
        1 / (number of rows in the batch), so that the loss is a mean over rows.
        """
        return self._make_batch(self._order.next_items(count))

    def batch_in_file_order(self) -> TrainBatch:
        """Return all rows in file order, with loss weights as in `next_batch`."""
        return self._make_batch(range(len(self)))

    def _make_batch(self, positions: Sequence[int]) -> TrainBatch:
        """Return the rows of the records at ``positions`` as a train batch.

        A position is an index into the records within the length limit.
        """
        indices = [self._indices[position] for position in positions]
        rows: list[numpy.ndarray] = []
        response_starts: list[int] = []
        for index in indices:
            rows.extend(self._join_rows(index))
            response_starts.extend([len(self._prompts[index])] * self.rows_per_record)

        # Mask the prompts and the response tokens that are not trained on. Such a response token is stored as
        # its complement (~token), which is negative.
        tokens = concatenate_rows(rows)
        row_masks = [
            torch.arange(len(row)) >= start for row, start in zip(rows, response_starts, strict=True)
        ]
        mask = torch.cat(row_masks)
        mask &= tokens >= 0

        # With single responses, the loss is a mean over tokens. With pairs, it is a mean over rows.
        total_weight = mask.sum() if self.rows_per_record == 1 else len(rows)
        return TrainBatch(
            tokens=torch.where(tokens < 0, ~tokens, tokens),
            lengths=torch.tensor([len(row) for row in rows], dtype=torch.long),
            response_mask=mask,
            loss_weights=mask.float() / total_weight,
            temperature=torch.ones(len(rows)),
        )

    def _join_rows(self, index: int) -> list[numpy.ndarray]:
        """Return the rows (prompt and response) of the record at ``index`` in the data set."""
        prompt = self._prompts[index]
        return [numpy.concatenate((prompt, responses[index])) for responses in self._responses]

    def state_dict(self) -> dict[str, int | str | bool]:
        """Return the epoch, position and identity of the data, for a checkpoint."""
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, int | str | bool]) -> None:
        """Restore the position from a checkpoint; raises UserError if the data differ."""
        self._order.load_state_dict(state)


def encode_responses(
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    fields: dict[str, str],
    max_tokens: int,
    setting: str,
    end_ids: Sequence[int],
    records: Sequence[Record],
    every_turn: bool = False,
) -> EncodedData:
    """Normalise records and tokenise their prompts and responses.

    ``fields`` maps the fields of responses to the settings that name them. ``end_ids`` are the ids of the
    tokens that end responses. With ``every_turn`` all turns of a conversation are trained on, else the last.

    Raises UserError for a record that lacks one of the fields, and for a value that is not a response. See
    `RecordReader` for the values and `_ResponseEncoder` for the tokens.
    """
    # Convert records to the normal form, with conversations split into prompt and response.
    template = template_source(getattr(tokenizer, "chat_template", None))
    reader = RecordReader(data, setting, fields, every_turn, template=template)
    records = [reader.read(record) for record in records]

    # Encode the prompts first: a response is tokenised together with the text of its prompt.
    prompt_encoder = PromptEncoder(tokenizer, data, setting)
    prompt_texts, prompt_tokens = prompt_encoder.encode(records, max_tokens)
    template_error_fix = "set sft.turns=last" if every_turn else None
    response_encoder = _ResponseEncoder(prompt_encoder, end_ids, template_error_fix)
    response_columns = [
        response_encoder.encode(records, prompt_texts, prompt_tokens, field, max_tokens) for field in fields
    ]
    return EncodedData(
        records, prompt_texts, (prompt_tokens, *response_columns), remarks=reader.warning_lines()
    )


class _ResponseEncoder:
    """Encoder that gives responses the tokens that they would have in a sampled conversation.

    A row consists of pieces: the prompt, turns, and the text between turns. The complete text of a row is
    tokenised at once. If a token would span two pieces, the pieces are tokenised separately instead, since
    the policy samples after the tokens of the prompt alone.

    ``end_ids`` are the ids of the tokens that end responses. A turn without such a token gets the chat
    template's end token, or else the first of ``end_ids``.

    ``prompt_encoder`` is the encoder of the data set's prompts. If the chat template cannot render
    conversations, `encode` raises UserError. ``template_error_fix`` is a further fix for this error, or None.
    """

    def __init__(
        self, prompt_encoder: PromptEncoder, end_ids: Sequence[int], template_error_fix: str | None
    ) -> None:
        self._prompt_encoder = prompt_encoder
        self._template_error_fix = template_error_fix
        self._plain_end_id = end_ids[0]
        self._template_end_id = end_ids[0]
        self._end_ids = frozenset(end_ids)
        tokenizer = prompt_encoder.tokenizer
        self._end_texts: list[Any] = [tokenizer.convert_ids_to_tokens(token) for token in end_ids]
        self._chat: ConversationRenderer | None = None

        # A template may end turns with a token that the model's files do not define as an end token.
        if prompt_encoder.renderer is not None:
            turn_end = template_turn_end(tokenizer)
            if turn_end is not None and turn_end.token is not None:
                self._template_end_id = turn_end.token
                self._end_ids |= {turn_end.token}
                self._end_texts.append(tokenizer.convert_ids_to_tokens(turn_end.token))
            self._chat = ConversationRenderer(prompt_encoder.renderer, self._end_texts)

    def encode(
        self,
        records: Sequence[Record],
        prompts: Sequence[str],
        prompt_tokens: Sequence[numpy.ndarray],
        field: str,
        limit: int,
    ) -> list[numpy.ndarray]:
        """Return the tokens of each record's response: int32, with ~token for tokens that are not trained on.

        ``prompts`` and ``prompt_tokens`` are the text and the tokens of each record's prompt. ``field`` is
        the field of the response, and ``limit`` the length limit of a row in tokens.
        """
        data = self._prompt_encoder.data
        setting = self._prompt_encoder.setting
        tokenizer = self._prompt_encoder.tokenizer
        pieces = [
            response_pieces(
                record, field, data, setting, self._chat, self._end_texts, self._template_error_fix
            )
            for record in records
        ]

        # Tokenise the complete text of each row: prompt and pieces of the response.
        row_texts = [[prompt, *row_pieces] for prompt, row_pieces in zip(prompts, pieces, strict=True)]
        tokens_of_rows = encode_pieces(tokenizer, row_texts, limit)

        # Find the rows in which a token spans two pieces, or whose response changes the tokens of the prompt.
        # Tokenise their pieces separately: the policy samples after the tokens of the prompt alone.
        separate_rows: list[int] = []
        separate_texts: list[str] = []
        for index, (row_tokens, prompt) in enumerate(zip(tokens_of_rows, prompt_tokens, strict=True)):
            if row_tokens is None or not _ends_with(prompt, row_tokens[0]):
                separate_rows.append(index)
                separate_texts.extend(pieces[index])
        separate_tokens = encode_texts(tokenizer, separate_texts, limit)
        no_prompt = numpy.empty(0, numpy.int32)
        start = 0
        for index in separate_rows:
            stop = start + len(pieces[index])
            tokens_of_rows[index] = [no_prompt, *separate_tokens[start:stop]]
            start = stop

        # Join the pieces of each response. The first piece of a row is the prompt.
        responses = []
        for record, row_tokens in zip(records, tokens_of_rows, strict=True):
            assert row_tokens is not None
            end_token = self._plain_end_id
            if uses_chat_template(record, data):
                end_token = self._template_end_id
            trained_turns = _trained_turns(record.values[field])
            responses.append(self._join_pieces(row_tokens[1:], end_token, trained_turns))
        return responses

    def _join_pieces(
        self,
        pieces: Sequence[numpy.ndarray],
        end_token: int,
        trained_turns: Sequence[bool],
    ) -> numpy.ndarray:
        """Concatenate the tokens of one response's pieces; untrained tokens become complements (~token).

        ``pieces`` are turns (even indices) and the text between turns (odd indices). ``end_token`` is added
        to a turn without an end token. ``trained_turns`` has one boolean per turn: whether it is trained on.
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

            if not len(tokens) or int(tokens[-1]) not in self._end_ids:
                tokens = numpy.append(tokens, numpy.int32(end_token))
            last_token = tokens[-1]
            response.append(tokens if trained_turns[index // 2] else ~tokens)
        return numpy.concatenate(response)


def _ends_with(tokens: numpy.ndarray, end: numpy.ndarray) -> bool:
    """Return whether ``tokens`` end with the tokens ``end``."""
    start = len(tokens) - len(end)
    return start >= 0 and numpy.array_equal(tokens[start:], end)


def _trained_turns(response: str | Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return for each assistant turn of a response whether it is trained on."""
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
    """Load the data set of prompts with responses at ``path``; ``setting`` is its configuration key.

    ``fields`` maps the fields of responses to the settings that name them. A row (prompt and response) has at
    most ``max_tokens`` tokens. With ``every_turn`` all turns of a conversation are trained on, else the last.
    ``data`` names the other fields; None means the section ``data`` of the configuration.
    """
    data = data or config.data
    end_ids = end_token_ids(tokenizer, config.model.path)
    encode = partial(
        encode_responses,
        tokenizer,
        data,
        fields,
        max_tokens,
        setting,
        end_ids,
        every_turn=every_turn,
    )
    inputs = (
        "responses",
        *data.record_fields,
        *fields,
        data.chat_template,
        max_tokens,
        end_ids,
        every_turn,
    )
    encoded = files.load_or_encode(path, setting, tokenizer, inputs, encode)

    source = ResponseSource(encoded, data, seed=config.seed, max_tokens=max_tokens, setting=setting)
    # Warn only about the training data: mistakes in held-out data are usually the same.
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
    """Yield the warnings about the texts of the first records, and about the template that renders them.

    ``fields`` are the names of the record fields that contain responses.
    """
    records = encoded.records[:EXAMINED_RECORDS]
    uses_template = any(uses_chat_template(record, data) for record in records)
    end_ids = end_token_ids(tokenizer, config.model.path, templated=uses_template)
    end_texts = [tokenizer.convert_ids_to_tokens(token) for token in end_ids]
    chat = make_conversation_renderer(tokenizer, end_ids)

    # Warn about a template that ends turns with an undefined end token, or opens reasoning in the prompt.
    if uses_template:
        warning = turn_end_warning(tokenizer, config.model.path)
        if warning is not None:
            yield warning
        warning = _reasoning_warning(chat, records, fields, data, setting)
        if warning is not None:
            yield warning

    # Warn about texts that contain end tokens, or tokens that the template writes around messages.
    delimiters = template_delimiters(tokenizer)
    yield from prompt_warnings(records, encoded.texts, data, setting, end_texts, delimiters)
    yield from response_warnings(records, fields, data, setting, chat, end_texts)


def _reasoning_warning(
    chat: ConversationRenderer | None,
    records: Sequence[Record],
    fields: Collection[str],
    data: DataConfig,
    setting: str,
) -> UserError | None:
    """Return the warning about responses that do not close the reasoning block of the template.

    The template ends the prompt with the opening tag of the block. ``fields`` are the names of the record
    fields that contain responses. Returns None without a template, or for a template without this tag.
    """
    if chat is None:
        return None

    with suppress(UserError):  # a template may reject this conversation
        closing_tag = closing_reasoning_tag(chat.opening)
        if closing_tag is not None:
            return unclosed_reasoning_warning(records, fields, data, closing_tag, setting)
    return None
