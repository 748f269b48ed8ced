"""Tokenise prompts and responses: the model's tokenizer, stop tokens, sampling parameters, length limits.

Every text is tokenised once, in large batches. A text far over the length limit will be dropped, so only its
beginning is tokenised. The result is rows of int32 token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.response_limits import AutoLimitConfig, largest_limit
from megatron_rl.config.sections.rollout import (
    RolloutConfig,
    explicit_token_id,
    profile_errors,
    profile_fields,
    rule_token_error,
    stop_text_error,
    unknown_token_id_error,
)
from megatron_rl.config.sections.schedules import ScheduledValue, token_schedule
from megatron_rl.data.chat_format import (
    ConversationRenderer,
    TurnEnd,
    added_tokens,
    find_turn_end,
    named_end_ids,
    template_tokens,
    text_prefix,
    undefined_turn_end_warning,
    with_prefix,
)
from megatron_rl.data.messages import no_tokens_error, require_prompt, uses_chat_template
from megatron_rl.data.records import Record
from megatron_rl.data.rendered_text import render_prompts
from megatron_rl.data.template_renderer import (
    TIME_ATTRIBUTE,
    TemplateRenderer,
    get_renderer,
)
from megatron_rl.errors import UserError, UserErrors, first_line, missing_file_error
from megatron_rl.progress import count_progress
from megatron_rl.types import BANNED, SamplingParameters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SEGMENT_CHARACTERS = 1 << 16
"""Number of characters of a long text that are tokenised at a time, to count its tokens."""


# The tokenizer and its special tokens


def load_tokenizer(path: str | Path, now: datetime | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the HF checkpoint at ``path``; raises UserError if that fails.

    ``now`` is the time that its chat template uses as the current time; None means the actual time.
    """
    from transformers import AutoTokenizer

    # transformers would interpret an absent path as a name on the Hub.
    if not Path(path).is_dir():
        raise missing_file_error(
            Path(path),
            where="model.path",
            expected="a directory with config.json, safetensors and tokenizer files",
            fix="set model.path to a downloaded or exported checkpoint",
        )
    try:
        # Without this argument, transformers prompts at a terminal whether to run code of the checkpoint.
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"the tokenizer of {path} cannot be loaded",
            where="model.path",
            expected="tokenizer files that transformers' AutoTokenizer reads",
            got=first_line(error),
            fix="copy tokenizer.json and tokenizer_config.json of the model into the directory; code that "
            "auto_map names is not run",
        ) from None

    setattr(tokenizer, TIME_ATTRIBUTE, now)
    return tokenizer


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase,
    model_path: str | Path | None = None,
    *,
    templated: bool = False,
) -> tuple[int, ...]:
    """Return the ids that end a response: the tokenizer's EOS, then further ids from the model's files.

    Responses to prompts that the chat template rendered (``templated``) also end at the template's
    end-of-turn token. Raises UserError for a model without any of these tokens.
    """
    ids = named_end_ids(tokenizer, model_path)
    turn_end = template_turn_end(tokenizer) if templated else None
    if turn_end is not None and turn_end.token is not None:
        ids = tuple(dict.fromkeys((*ids, turn_end.token)))

    if not ids:
        raise UserError(
            "the model's files define no token that ends a response",
            where="model.path",
            expected="eos_token in the tokenizer's files, or eos_token_id in generation_config.json or "
            "config.json",
            got="neither",
            fix="set eos_token in tokenizer_config.json",
        )
    return ids


def make_conversation_renderer(tokenizer: Any, end_ids: Sequence[int] = ()) -> ConversationRenderer | None:
    """Return a renderer of conversations for the tokenizer's chat template, or None without a template.

    ``end_ids`` are the ids of the tokens that end responses.
    """
    renderer = get_renderer(tokenizer)
    if renderer is None:
        return None
    return ConversationRenderer(renderer, [tokenizer.convert_ids_to_tokens(token) for token in end_ids])


def template_turn_end(tokenizer: Any) -> TurnEnd | None:
    """Return the text that ends a turn under the tokenizer's chat template, or None without a template."""
    chat = make_conversation_renderer(tokenizer)
    if chat is None:
        return None
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return find_turn_end(chat, encode, added_tokens(tokenizer), tokenizer.bos_token)


def turn_end_warning(tokenizer: Any, model_path: str | Path) -> UserError | None:
    """Return the warning about a chat template whose end-of-turn token the model's files do not define.

    Returns None for other templates; see `undefined_turn_end_warning`.
    """
    end_ids = named_end_ids(tokenizer, model_path)
    end_names = ", ".join(tokenizer.convert_ids_to_tokens(list(end_ids)))
    return undefined_turn_end_warning(template_turn_end(tokenizer), end_ids, end_names, str(model_path))


def template_delimiters(tokenizer: Any) -> set[str]:
    """Return the added tokens that the chat template writes around messages."""
    return template_tokens(get_renderer(tokenizer), added_tokens(tokenizer).values())


def format_warning(warning: UserError) -> str:
    """Format a warning, which has the fields of an error, as a line for the console."""
    details = ""
    if warning.got is not None:
        details = f" ({warning.got})"
    return f"warning: {warning.message}{details}; {warning.fix}"


# Sampling parameters


def split_stop_texts(
    tokenizer: PreTrainedTokenizerBase,
    stop: Sequence[str],
    setting: str,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Split stop texts by their number of tokens; return (token ids, texts).

    A stop text of one token is returned as its token id. A stop text of several tokens is returned as text.

    ``setting`` is the configuration key of ``stop``, for errors. Raises UserError for a text that no response
    can contain, and for a text of several tokens unless the tokenizer is a fast tokenizer.
    """
    unknown_token: Any = tokenizer.unk_token
    ids: list[int] = []
    texts: list[str] = []
    for text in stop:
        # Reject a text with unknown tokens, and a text that differs from its decoded tokens.
        tokens = tokenizer.encode(text, add_special_tokens=False)
        names = [str(tokenizer.convert_ids_to_tokens(token)) for token in tokens]
        decoded = str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        error = stop_text_error(setting, text, names, unknown_token, decoded)
        if error is not None:
            raise error

        # A text of several tokens is found in the decoded response, which needs a fast tokenizer.
        if len(tokens) == 1:
            ids.append(tokens[0])
        elif tokenizer.is_fast:
            texts.append(text)
        else:
            raise UserError(
                f"the stop text {text!r} has several tokens, and the tokenizer has no tokenizer.json",
                where=setting,
                expected="stop texts of one token each, or a tokenizer of the library `tokenizers`",
                got=type(tokenizer).__name__,
                fix="convert the tokenizer to tokenizer.json, or choose a text of one token",
            )
    return tuple(ids), tuple(texts)


def rule_token_id(tokenizer: PreTrainedTokenizerBase, text: str, setting: str) -> int:
    """Return the token id of a logit rule, such as a bias; raises UserError unless ``text`` is one token.

    ``text`` is the text of the token or an explicit id. ``setting`` is the configuration key of the rule.
    """
    token_id = explicit_token_id(text)
    if token_id is not None:
        if token_id >= len(tokenizer):
            raise unknown_token_id_error(setting, text, len(tokenizer))
        return token_id

    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) != 1 or tokens[0] == tokenizer.unk_token_id:
        names = tokenizer.convert_ids_to_tokens(tokens)
        raise rule_token_error(setting, text, [names] if isinstance(names, str) else names)
    return tokens[0]


def logit_biases(
    tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any], setting: str
) -> tuple[tuple[int, float], ...]:
    """Convert ``logit_bias`` and ``banned_tokens`` of the sampling settings to pairs (token id, bias).

    ``values`` are the settings by name, in the section ``setting``. Raises UserError for an unknown token.
    """
    biases: dict[int, float] = {}
    for text, bias in values["logit_bias"].items():
        biases[rule_token_id(tokenizer, text, f"{setting}.logit_bias")] = float(bias)
    for text in values["banned_tokens"]:
        biases[rule_token_id(tokenizer, text, f"{setting}.banned_tokens")] = BANNED
    # A bias of 0 has no effect.
    return tuple((token, bias) for token, bias in biases.items() if bias)


def sampling_by_task(
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
) -> tuple[SamplingParameters, Mapping[str, SamplingParameters]]:
    """Return the default sampling parameters, and the parameters of each task with a profile.

    A profile overrides fields of the rollout settings, including ``stop``. The tokens ``end_ids`` always end
    a response. If the length limit depends on the prompt, the parameters contain the largest limit; see
    `RolloutConfig.limit_of`. If the temperature or top-p changes over steps, they contain its last value.
    Raises UserError for a field that does not exist or is out of range.
    """
    errors = profile_errors(rollout)
    if errors:
        raise UserErrors(errors)

    # The rollout settings have every field of a profile: they are the defaults.
    defaults = {name: getattr(rollout, name) for name in profile_fields()}
    default_parameters = _sampling_parameters(defaults, tokenizer, end_ids, "rollout", rollout.auto_limit)

    parameters_by_task: dict[str, SamplingParameters] = {}
    for task, profile in rollout.sampling_profiles.items():
        setting = f"rollout.sampling_profiles.{task}"
        values = {**defaults, **profile}
        parameters_by_task[task] = _sampling_parameters(
            values, tokenizer, end_ids, setting, rollout.auto_limit
        )
    return default_parameters, parameters_by_task


def apply_schedules(
    sampling: SamplingParameters,
    temperature: ScheduledValue,
    top_p: ScheduledValue,
    step: int | None = None,
) -> SamplingParameters:
    """Set the temperature and top-p of sampling parameters to their scheduled values at ``step``.

    ``temperature`` and ``top_p`` are values of the configuration. Steps count from 1; None means any step
    after the last change.
    """
    temperatures = token_schedule(temperature, step)
    probabilities = token_schedule(top_p, step)
    sampling = sampling._replace(temperature=temperatures.start, top_p=probabilities.start)

    # Set the fields for a change over response tokens only if there is such a change: parameters that sample
    # equally must compare equal.
    if temperatures.length:
        sampling = sampling._replace(
            last_temperature=temperatures.end, temperature_tokens=temperatures.length
        )
    if probabilities.length:
        sampling = sampling._replace(last_top_p=probabilities.end, top_p_tokens=probabilities.length)
    return sampling


def _sampling_parameters(
    values: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    setting: str,
    auto_limit: AutoLimitConfig,
) -> SamplingParameters:
    """Convert the settings ``values`` to sampling parameters.

    If the temperature or top-p changes over steps, the result has its value after the last change.
    ``end_ids`` are the ids of the tokens that always end a response. ``setting`` is the configuration section
    of the values, for errors.
    """
    # A stop text may also be an end token: dict.fromkeys removes the duplicate and keeps the order.
    stop_ids, stop_texts = split_stop_texts(tokenizer, values["stop"], f"{setting}.stop")
    stop_token_ids = tuple(dict.fromkeys((*end_ids, *stop_ids)))
    parameters = SamplingParameters(
        top_k=int(values["top_k"]),
        max_response_tokens=largest_limit(values["max_response_tokens"], auto_limit),
        stop_token_ids=stop_token_ids,
        min_p=float(values["min_p"]),
        logit_bias=logit_biases(tokenizer, values, setting),
        min_response_tokens=int(values["min_response_tokens"]),
        repetition_penalty=float(values["repetition_penalty"]),
        presence_penalty=float(values["presence_penalty"]),
        frequency_penalty=float(values["frequency_penalty"]),
        stop_texts=stop_texts,
        no_repeat_ngram_size=int(values["no_repeat_ngram_size"]),
    )
    return apply_schedules(parameters, values["temperature"], values["top_p"])


# Prompts and texts as tokens


class PromptEncoder:
    """Encoder that renders the prompts of one data set with the chat template and tokenises them.

    The template renders lists of messages and, with ``data.chat_template: true``, also strings, each as one
    user message. Other strings bypass it. ``data.chat_template: false`` forbids lists of messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, setting: str) -> None:
        self.tokenizer = tokenizer
        self.data = data
        self.setting = setting

    @cached_property
    def renderer(self) -> TemplateRenderer | None:
        """Renderer of the tokenizer's chat template, or None for a tokenizer without a template."""
        return get_renderer(self.tokenizer)

    def render_texts(self, records: Sequence[Record]) -> list[str]:
        """Return the prompt of each record as text; raises UserError as `render_prompts` does."""
        for record in records:
            require_prompt(record, self.data, self.setting)
        return render_prompts(records, self.data, self.setting, self.renderer)

    def encode(self, records: Sequence[Record], limit: int) -> tuple[list[str], list[numpy.ndarray]]:
        """Return the text and the tokens (int32) of each record's prompt, in order.

        ``limit`` is the length limit in tokens; `encode_texts` truncates prompts far over the limit.
        """
        texts = self.render_texts(records)
        tokens = encode_texts(self.tokenizer, texts, limit)
        prefix = text_prefix(self.tokenizer)
        for row, record in enumerate(records):
            # Add the BOS to plain text; the chat template writes it itself.
            if not uses_chat_template(record, self.data):
                prompt_tokens = with_prefix(prefix, tokens[row].tolist())
                tokens[row] = numpy.asarray(prompt_tokens, numpy.int32)

            if not len(tokens[row]):
                raise no_tokens_error(texts[row], f"{record.where} ({self.setting})")
        return texts, tokens


def encode_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    limit: int,
    batch_size: int = 1024,
) -> list[numpy.ndarray]:
    """Tokenise texts in batches, without a BOS or EOS; return an int32 array per text.

    A text far over ``limit`` tokens will be dropped, so `_truncate_text` shortens it first.
    """
    rows: list[numpy.ndarray] = []
    for start in range(0, len(texts), batch_size):
        batch = [_truncate_text(tokenizer, text, limit) for text in texts[start : start + batch_size]]
        encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False)
        rows.extend(numpy.asarray(ids, numpy.int32) for ids in encoded["input_ids"])  # pyright: ignore
        count_progress("pieces of data")
    return rows


def encode_pieces(
    tokenizer: Any,
    rows: Sequence[Sequence[str]],
    limit: int,
    batch_size: int = 256,
) -> list[list[numpy.ndarray] | None]:
    """Tokenise the complete text of each row, and split its tokens (int32) at the pieces of the text.

    A row has the consecutive pieces of one text, such as a prompt and the turns after it. The result has None
    for a row in which a token spans two pieces, and for a text so far over ``limit`` tokens that
    `encode_texts` would truncate it. It has None for every row if the tokenizer reports no offsets.
    """
    if not tokenizer.is_fast:
        return [None] * len(rows)

    results: list[list[numpy.ndarray] | None] = []
    for start in range(0, len(rows), batch_size):
        # Skip texts that `encode_texts` would truncate: their offsets would not fit the pieces.
        batch = rows[start : start + batch_size]
        texts = ["".join(pieces) for pieces in batch]
        max_characters = max(_SEGMENT_CHARACTERS, largest_exact_length(limit))
        indices = [index for index, text in enumerate(texts) if len(text) <= max_characters]

        tokens_of_rows: list[list[numpy.ndarray] | None] = [None] * len(batch)
        if indices:
            encoded = tokenizer(
                [texts[index] for index in indices],
                add_special_tokens=False,
                return_attention_mask=False,
                return_offsets_mapping=True,
            )
            encoded_rows = zip(indices, encoded["input_ids"], encoded["offset_mapping"], strict=True)
            for index, ids, offsets in encoded_rows:
                tokens_of_rows[index] = _split_tokens(ids, offsets, batch[index])

        results += tokens_of_rows
        count_progress("pieces of data")
    return results


def _split_tokens(
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    pieces: Sequence[str],
) -> list[numpy.ndarray] | None:
    """Split the tokens of a text at the boundaries of its pieces; return None if a token spans two pieces.

    ``offsets`` are the start and end (exclusive) of each token in characters of the text.
    """
    tokens = numpy.asarray(ids, numpy.int32)
    if not len(tokens):
        return None

    # A token that starts before a boundary and ends after it spans two pieces.
    token_starts, token_ends = numpy.asarray(offsets, numpy.int64).T
    boundaries = numpy.cumsum([len(piece) for piece in pieces])[:-1]
    split_indices = numpy.searchsorted(token_starts, boundaries)
    for boundary, split_index in zip(boundaries, split_indices, strict=True):
        if split_index and token_ends[split_index - 1] > boundary:
            return None
    return numpy.split(tokens, split_indices)


# Limits of length


@dataclass(frozen=True)
class LengthReport:
    """Numbers of items within and over a length limit.

    Example:
        >>> LengthReport(100, 0, 512, 300, ()).describe()
        '100 prompts, none over the limit of 512 tokens (longest 300)'
    """

    total: int
    """Number of items."""
    over_long: int
    """Number of items with more than ``limit`` tokens."""
    limit: int
    """Largest number of tokens of an item."""
    longest: int
    """Number of tokens of the longest item, dropped or not; not exact beyond `largest_exact_length`."""
    examples: tuple[str, ...]
    """Location and length of the first items over the limit."""

    def describe(self, item_name: str = "prompts") -> str:
        """Describe the report as one sentence for the console and the log."""
        maximum = _format_length(self.longest, self.limit)
        if not self.over_long:
            return f"{self.total} {item_name}, none over the limit of {self.limit} tokens (longest {maximum})"

        first = ", ".join(self.examples)
        return (
            f"dropped {self.over_long} of {self.total} {item_name}: longer than {self.limit} tokens "
            f"(longest {maximum}); first: {first}"
        )


def largest_exact_length(limit: int) -> int:
    """Return the number of tokens up to which the tokens of a text over ``limit`` are counted exactly.

    To save time, a longer text is truncated before it is tokenised, and messages report "N or more" tokens.
    The result is larger than ``limit``, so that messages show how far the limit must be raised.
    """
    return 2 * limit + 1024


def _truncate_text(tokenizer: PreTrainedTokenizerBase, text: str, limit: int) -> str:
    """Truncate a text that is far over ``limit`` tokens; return any other text unchanged.

    The truncated text has more than `largest_exact_length` tokens, so it is still recognised as over the
    limit. The text is tokenised in segments, until the count suffices.
    """
    if len(text) <= _SEGMENT_CHARACTERS:
        return text

    num_tokens = 0
    for start in range(0, len(text), _SEGMENT_CHARACTERS):
        end = start + _SEGMENT_CHARACTERS
        num_tokens += len(tokenizer.encode(text[start:end], add_special_tokens=False))
        # A token that spans two segments is counted as two or more, so stop only at twice the limit.
        if num_tokens > 2 * largest_exact_length(limit):
            return text[:end]
    return text


def _format_length(length: int, limit: int) -> str:
    """Format the number of tokens of a text for messages; a truncated text has "N or more" tokens."""
    if length > largest_exact_length(limit):
        return f"{largest_exact_length(limit)} or more"
    return str(length)


def drop_over_long(
    lengths: Sequence[int],
    records: Sequence[Record],
    limit: int,
    policy: str,
    setting: str,
    limit_setting: str,
) -> tuple[list[int], LengthReport]:
    """Return the indices of the items within ``limit`` tokens, and a report.

    ``policy`` is ``drop`` or ``error``. Raises UserError if the policy is ``error`` and an item is over the
    limit, or if no item is within the limit. ``setting`` and ``limit_setting`` are the configuration keys of
    the data set and of the limit.
    """
    # Raise if the policy is `error`, or if no item would remain.
    over_long_indices = [index for index, length in enumerate(lengths) if length > limit]
    max_length = max(lengths)
    if over_long_indices and (policy == "error" or len(over_long_indices) == len(lengths)):
        first_index = over_long_indices[0]
        fix = f"raise {limit_setting}"
        if policy == "error":
            fix += ", or set data.over_long=drop"
        raise UserError(
            f"{len(over_long_indices)} of {len(lengths)} items of {setting} are longer than the limit",
            where=f"{records[first_index].where} ({setting})",
            expected=f"at most {limit} tokens",
            got=f"{_format_length(lengths[first_index], limit)} tokens there; "
            f"the longest has {_format_length(max_length, limit)}",
            fix=fix,
        )

    # Under the policy `drop` the remaining items keep their order.
    remaining_indices = [index for index, length in enumerate(lengths) if length <= limit]
    examples = tuple(
        f"{records[index].where} ({_format_length(lengths[index], limit)} tokens)"
        for index in over_long_indices[:3]
    )
    report = LengthReport(len(lengths), len(over_long_indices), limit, max_length, examples)
    return remaining_indices, report
