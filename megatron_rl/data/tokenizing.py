"""Tokens of prompts and responses: the model's tokenizer, stop tokens, sampling parameters, length limits.

The one idea: a text is tokenised once, in large batches, and a text far over the limit only as far as its
length matters. Everything after this module handles rows of int32 token ids.
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
    rule_id_error,
    rule_token_error,
    stop_text_error,
    temperature_schedule,
)
from megatron_rl.data.chat_format import (
    ConversationText,
    TurnEnd,
    added_tokens,
    find_turn_end,
    named_end_ids,
    template_tokens,
    text_prefix,
    turn_end_mismatch,
    with_prefix,
)
from megatron_rl.data.messages import no_tokens_error, require_prompt, uses_chat_template
from megatron_rl.data.records import Record
from megatron_rl.data.rendered_text import rendered_prompts
from megatron_rl.data.template_renderer import (
    TIME_ATTRIBUTE,
    TemplateRenderer,
    renderer_of,
)
from megatron_rl.error_forms import missing_file
from megatron_rl.errors import UserError, UserErrors, first_line
from megatron_rl.progress import count_progress
from megatron_rl.types import BANNED, SamplingParameters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PIECE = 1 << 16
"""Characters after which the tokens of a long text are counted: most rows are shorter."""


# The tokenizer and its special tokens


def load_tokenizer(path: str | Path, now: datetime | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the HF checkpoint at ``path``; raises UserError without one.

    ``now`` is the time that its chat template may write, by default the current one.
    """
    from transformers import AutoTokenizer

    # transformers would take the path for a name on the Hub.
    if not Path(path).is_dir():
        raise missing_file(
            Path(path),
            where="model.path",
            expected="a directory with config.json, safetensors and tokenizer files",
            fix="set model.path to a downloaded or exported checkpoint",
        )
    try:
        # Without a decision, transformers asks at a terminal whether it may run code of the checkpoint.
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
    """Return the ids that end a response: the tokenizer's EOS, then further ids of the model's files.

    Responses to prompts that went through the chat template (``templated``) also end with the token by
    which the template ends turns. Raises UserError for a model without such a token.
    """
    ids = named_end_ids(tokenizer, model_path)
    end = template_turn_end(tokenizer) if templated else None
    if end is not None and end.token is not None:
        ids = tuple(dict.fromkeys((*ids, end.token)))

    if not ids:
        raise UserError(
            "the model names no token that ends a response",
            where="model.path",
            expected="eos_token in the tokenizer's files, or eos_token_id in generation_config.json or "
            "config.json",
            got="neither",
            fix="set eos_token in tokenizer_config.json",
        )
    return ids


def conversation_text(tokenizer: Any, ends: Sequence[int] = ()) -> ConversationText | None:
    """Return the texts of conversations under the tokenizer's chat template, None if it has no template."""
    renderer = renderer_of(tokenizer)
    if renderer is None:
        return None
    return ConversationText(renderer, [tokenizer.convert_ids_to_tokens(token) for token in ends])


def template_turn_end(tokenizer: Any) -> TurnEnd | None:
    """Return the text that ends a turn under the chat template, None if it has no template."""
    text = conversation_text(tokenizer)
    if text is None:
        return None
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return find_turn_end(text, encode, added_tokens(tokenizer), tokenizer.bos_token)


def turn_end_warning(tokenizer: Any, model_path: str | Path) -> UserError | None:
    """Return the warning about a chat template that ends turns with a token unnamed in the model's files."""
    ends = named_end_ids(tokenizer, model_path)
    texts = ", ".join(tokenizer.convert_ids_to_tokens(list(ends)))
    return turn_end_mismatch(template_turn_end(tokenizer), ends, texts, str(model_path))


def template_marks(tokenizer: Any) -> set[str]:
    """Return the added tokens that the chat template writes around messages."""
    return template_tokens(renderer_of(tokenizer), added_tokens(tokenizer).values())


def as_warning(problem: UserError) -> str:
    """Return a warning as a line for the console."""
    details = ""
    if problem.got is not None:
        details = f" ({problem.got})"
    return f"warning: {problem.message}{details}; {problem.fix}"


# Sampling parameters


def stop_tokens_and_texts(
    tokenizer: PreTrainedTokenizerBase,
    stop: Sequence[str],
    setting: str,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Split stop texts into token ids, for texts of one token, and texts of several tokens.

    Raises UserError for a text that no response can contain, and for one of several tokens with a tokenizer
    that has no decoder of the library `tokenizers`.
    """
    unknown_token: Any = tokenizer.unk_token
    ids: list[int] = []
    texts: list[str] = []
    for text in stop:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        names = [str(tokenizer.convert_ids_to_tokens(token)) for token in tokens]
        decoded = str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        error = stop_text_error(setting, text, names, unknown_token, decoded)
        if error is not None:
            raise error

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
    """Return the id of a token that a rule on logits names; raises UserError if there is no such token."""
    token = explicit_token_id(text)
    if token is not None:
        if token >= len(tokenizer):
            raise rule_id_error(setting, text, len(tokenizer))
        return token

    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) != 1 or tokens[0] == tokenizer.unk_token_id:
        names = tokenizer.convert_ids_to_tokens(tokens)
        raise rule_token_error(setting, text, [names] if isinstance(names, str) else names)
    return tokens[0]


def logit_biases(
    tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any], setting: str
) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) of the sampling settings ``values``; raises UserError for an unknown token."""
    biases: dict[int, float] = {}
    for text, bias in values["logit_bias"].items():
        biases[rule_token_id(tokenizer, text, f"{setting}.logit_bias")] = float(bias)
    for text in values["banned_tokens"]:
        biases[rule_token_id(tokenizer, text, f"{setting}.banned_tokens")] = BANNED
    # A bias of 0 is no rule.
    return tuple((token, bias) for token, bias in biases.items() if bias)


def sampling_by_task(
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
) -> tuple[SamplingParameters, Mapping[str, SamplingParameters]]:
    """Return the default sampling parameters, and the parameters of each task with a profile.

    A profile overrides fields of the rollout settings; its ``stop`` replaces theirs. The tokens ``ends``
    always end a response. Limits are the largest ones, see `RolloutConfig.limit_of`; a temperature that
    changes over steps is that of the last one. Raises UserError for a field that does not exist or is out of
    range.
    """
    errors = profile_errors(rollout)
    if errors:
        raise UserErrors(errors)

    # Every field of a profile is a field of the rollout settings, too.
    defaults = {name: getattr(rollout, name) for name in profile_fields()}
    default_parameters = _sampling_parameters(defaults, tokenizer, ends, "rollout", rollout.auto_limit)

    parameters_by_task: dict[str, SamplingParameters] = {}
    for task, profile in rollout.sampling_profiles.items():
        setting = f"rollout.sampling_profiles.{task}"
        values = {**defaults, **profile}
        parameters_by_task[task] = _sampling_parameters(values, tokenizer, ends, setting, rollout.auto_limit)
    return default_parameters, parameters_by_task


def _sampling_parameters(
    values: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
    setting: str,
    auto: AutoLimitConfig,
) -> SamplingParameters:
    """Return the sampling parameters of the settings ``values``, which ``setting`` names in errors."""
    stop_ids, stop_texts = stop_tokens_and_texts(tokenizer, values["stop"], f"{setting}.stop")

    # An end token may be a stop text too: dict.fromkeys drops the repetition and keeps the order.
    stop_token_ids = tuple(dict.fromkeys((*ends, *stop_ids)))
    return SamplingParameters(
        temperature=temperature_schedule(values["temperature"]).end,
        top_p=float(values["top_p"]),
        top_k=int(values["top_k"]),
        max_response_tokens=largest_limit(values["max_response_tokens"], auto),
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


# Prompts and texts as tokens


class PromptEncoder:
    """Encoder of the prompts of one data set, through the chat template unless they bypass it.

    A list of messages goes through the template; a string does with ``data.chat_template: true``, as one user
    message. ``data.chat_template: false`` forbids lists of messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, setting: str) -> None:
        self.tokenizer = tokenizer
        self.data = data
        self.setting = setting

    @cached_property
    def renderer(self) -> TemplateRenderer | None:
        """Renderer of the tokenizer's chat template, None for a tokenizer without one."""
        return renderer_of(self.tokenizer)

    def texts(self, records: Sequence[Record]) -> list[str]:
        """Return the prompts as text; raises UserError as `rendered_prompts` does."""
        for record in records:
            require_prompt(record, self.data, self.setting)

        return rendered_prompts(records, self.data, self.setting, self.renderer)

    def encode(self, records: Sequence[Record], limit: int) -> tuple[list[str], list[numpy.ndarray]]:
        """Return the text and the tokens (int32) of each record's prompt, in order; see `encode_texts`."""
        texts = self.texts(records)
        tokens = encode_texts(self.tokenizer, texts, limit)
        prefix = text_prefix(self.tokenizer)
        for row, record in enumerate(records):
            # A template writes its own BOS.
            if not uses_chat_template(record, self.data):
                prefixed = with_prefix(prefix, tokens[row].tolist())
                tokens[row] = numpy.asarray(prefixed, numpy.int32)

            if not len(tokens[row]):
                raise no_tokens_error(texts[row], f"{record.where} ({self.setting})")
        return texts, tokens


def encode_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    limit: int,
    chunk: int = 1024,
) -> list[numpy.ndarray]:
    """Return the tokens (int32) of each text, without the special tokens that the tokenizer adds to a text.

    A text far over ``limit`` tokens will be dropped, so only a beginning of it is tokenised, which has more
    than `counting_limit` tokens.
    """
    rows: list[numpy.ndarray] = []
    for start in range(0, len(texts), chunk):
        batch = [_cut(tokenizer, text, limit) for text in texts[start : start + chunk]]
        encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False)
        rows.extend(numpy.asarray(ids, numpy.int32) for ids in encoded["input_ids"])  # pyright: ignore
        count_progress("pieces of data")
    return rows


def encode_pieces(
    tokenizer: Any,
    rows: Sequence[Sequence[str]],
    limit: int,
    chunk: int = 256,
) -> list[list[numpy.ndarray] | None]:
    """Tokenise the text of each row as one, and return the tokens (int32) of its pieces.

    The tokens are None for a row in which a token spans two pieces, for a text that is cut (see
    `encode_texts`), and for every row of a tokenizer without offsets.
    """
    if not tokenizer.is_fast:
        return [None] * len(rows)

    results: list[list[numpy.ndarray] | None] = []
    for start in range(0, len(rows), chunk):
        # Texts that `encode_texts` would cut are left to it: offsets of a cut text do not fit the pieces.
        batch = rows[start : start + chunk]
        texts = ["".join(pieces) for pieces in batch]
        indices = [
            index for index, text in enumerate(texts) if len(text) <= max(_PIECE, counting_limit(limit))
        ]
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
    """Return the tokens of each piece by their first character; None if a token spans two pieces."""
    tokens = numpy.asarray(ids, numpy.int32)
    if not len(tokens):
        return None

    # A token that begins before an edge and ends after it spans two pieces.
    token_starts, token_ends = numpy.asarray(offsets, numpy.int64).T
    edges = numpy.cumsum([len(piece) for piece in pieces])[:-1]
    splits = numpy.searchsorted(token_starts, edges)
    for edge, split in zip(edges, splits, strict=True):
        if split and token_ends[split - 1] > edge:
            return None
    return numpy.split(tokens, splits)


# Limits of length


@dataclass(frozen=True)
class LengthReport:
    """Numbers of items over a limit of length.

    Example:
        >>> LengthReport(100, 0, 512, 300, ()).line()
        '100 prompts, none over the limit of 512 tokens (longest 300)'
    """

    total: int
    """Number of items."""
    over_long: int
    """Number of items with more than ``limit`` tokens."""
    limit: int
    """Largest number of tokens of an item."""
    longest: int
    """Tokens of the longest item, dropped or not, as far as they were counted."""
    examples: tuple[str, ...]
    """Origin and length of the first items over the limit."""

    def line(self, kind: str = "prompts") -> str:
        """Return one sentence for the console and the log."""
        maximum = _shown_length(self.longest, self.limit)
        if not self.over_long:
            return f"{self.total} {kind}, none over the limit of {self.limit} tokens (longest {maximum})"

        first = ", ".join(self.examples)
        return (
            f"dropped {self.over_long} of {self.total} {kind}: longer than {self.limit} tokens "
            f"(longest {maximum}); first: {first}"
        )


def counting_limit(limit: int) -> int:
    """Return the number of tokens at which counting stops for a text with a limit of ``limit``.

    Shorter texts have their exact length in messages, so that a user sees how far to raise the limit.
    """
    return 2 * limit + 1024


def _cut(tokenizer: PreTrainedTokenizerBase, text: str, limit: int) -> str:
    """Return the text, or the beginning of a text far over ``limit`` tokens that is over it as well.

    Tokens of its pieces are counted, not characters: a token may stand for any number of characters.
    """
    if len(text) <= _PIECE:
        return text

    tokens = 0
    for start in range(0, len(text), _PIECE):
        end = start + _PIECE
        tokens += len(tokenizer.encode(text[start:end], add_special_tokens=False))
        # A token that spans two pieces is counted in parts, as two or more: leave room for them.
        if tokens > 2 * counting_limit(limit):
            return text[:end]
    return text


def _shown_length(length: int, limit: int) -> str:
    if length > counting_limit(limit):
        return f"{counting_limit(limit)} or more"
    return str(length)


def drop_over_long(
    lengths: Sequence[int],
    records: Sequence[Record],
    limit: int,
    policy: str,
    setting: str,
    limited_by: str,
) -> tuple[list[int], LengthReport]:
    """Return the indices of the items within ``limit`` tokens, and a report.

    Raises UserError for an item over the limit under the policy ``error``, and if no item is within the limit
    under either policy. ``setting`` names the data and ``limited_by`` the limit.
    """
    # An error by policy, or because nothing would remain to train on.
    over_long = [index for index, length in enumerate(lengths) if length > limit]
    maximum = max(lengths)
    if over_long and (policy == "error" or len(over_long) == len(lengths)):
        first = over_long[0]
        fix = f"raise {limited_by}"
        if policy == "error":
            fix += ", or set data.over_long=drop"
        raise UserError(
            f"{len(over_long)} of {len(lengths)} items of {setting} are longer than the limit",
            where=f"{records[first].where} ({setting})",
            expected=f"at most {limit} tokens",
            got=f"{_shown_length(lengths[first], limit)} tokens there; "
            f"the longest has {_shown_length(maximum, limit)}",
            fix=fix,
        )

    # Under the policy `drop` the remaining items keep their order.
    dropped = set(over_long)
    remaining = [index for index in range(len(lengths)) if index not in dropped]
    examples = tuple(
        f"{records[index].where} ({_shown_length(lengths[index], limit)} tokens)" for index in over_long[:3]
    )
    return remaining, LengthReport(len(lengths), len(over_long), limit, maximum, examples)
