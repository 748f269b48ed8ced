"""Prompts and responses as tokens: the model's tokenizer, chat templates, stop tokens, length limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.rollout import RolloutConfig, profile_errors, profile_fields, stop_error
from megatron_rl.data.chat_format import (
    ConversationText,
    TurnEnd,
    find_turn_end,
    text_prefix,
    turn_end_problem,
    with_prefix,
)
from megatron_rl.data.messages import no_tokens_error, require_prompt, templated
from megatron_rl.data.records import Record
from megatron_rl.data.rendered_text import rendered_prompts
from megatron_rl.data.template_renderer import (
    TIME_ATTRIBUTE,
    TemplateRenderer,
    renderer_of,
)
from megatron_rl.data.visible_text import added_tokens, framing_marks, named_end_ids
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.progress import advance
from megatron_rl.types import SamplingParameters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PIECE = 1 << 16
"""Characters after which a long text's tokens are counted."""


@dataclass(frozen=True)
class LengthReport:
    """Say how many of ``total`` items were longer than ``limit`` tokens, and which were the first.

    ``longest`` is the length in tokens of the longest item, dropped or not, as far as it was counted.
    """

    total: int
    over_long: int
    limit: int
    longest: int
    examples: tuple[str, ...]

    def line(self, kind: str = "prompts") -> str:
        """Return one sentence for the console and the log."""
        longest = _shown_length(self.longest, self.limit)
        if not self.over_long:
            return f"{self.total} {kind}, none over the limit of {self.limit} tokens (longest {longest})"
        first = ", ".join(self.examples)
        return (
            f"dropped {self.over_long} of {self.total} {kind}: longer than {self.limit} tokens "
            f"(longest {longest}); first: {first}"
        )


def load_tokenizer(path: str | Path, now: datetime | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the HF checkpoint at ``path``; raise a UserError when there is none.

    ``now`` is the time that its chat template may write, the present one if None.
    """
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise UserError(
            f"the model directory {path} does not exist",
            where="model.path",
            expected="a directory with config.json, safetensors and tokenizer files",
            got="no such directory",
            fix="set model.path to a downloaded or exported checkpoint",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"the tokenizer of {path} cannot be loaded",
            where="model.path",
            expected="tokenizer files that transformers' AutoTokenizer reads",
            got=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            fix="copy tokenizer.json and tokenizer_config.json of the model into the directory",
        ) from None
    setattr(tokenizer, TIME_ATTRIBUTE, now)
    return tokenizer


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_path: str | Path | None = None, *, templated: bool = False
) -> tuple[int, ...]:
    """Return the ids that end a response: the tokenizer's eos first, then those that the model's files name.

    Responses to prompts that went through the chat template, ``templated``, also end with the token by which
    the template ends turns.
    """
    tokens = named_end_ids(tokenizer, model_path)
    end = template_turn_end(tokenizer) if templated else None
    if end is not None and end.token is not None:
        tokens = tuple(dict.fromkeys((*tokens, end.token)))

    if not tokens:
        raise UserError(
            "the model names no token that ends a response",
            where="model.path",
            expected="eos_token in the tokenizer's files, or eos_token_id in generation_config.json or "
            "config.json",
            got="neither",
            fix="set eos_token in tokenizer_config.json",
        )
    return tokens


def conversation_text(tokenizer: Any, ends: Sequence[int] = ()) -> ConversationText | None:
    """Return what the tokenizer's chat template writes of conversations, None where it has no template."""
    renderer = renderer_of(tokenizer)
    if renderer is None:
        return None
    return ConversationText(renderer, [tokenizer.convert_ids_to_tokens(token) for token in ends])


def template_turn_end(tokenizer: Any) -> TurnEnd | None:
    """Return what the chat template ends turns with; None without a template."""
    text = conversation_text(tokenizer)
    if text is None:
        return None
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return find_turn_end(text, encode, added_tokens(tokenizer), tokenizer.bos_token)


def end_problem(tokenizer: Any, model_path: str | Path) -> UserError | None:
    """Return the warning of a chat template whose end of a turn the model's files do not name."""
    ends = named_end_ids(tokenizer, model_path)
    shown = ", ".join(tokenizer.convert_ids_to_tokens(list(ends)))
    return turn_end_problem(template_turn_end(tokenizer), ends, shown, str(model_path))


def template_marks(tokenizer: Any) -> set[str]:
    """Return the added tokens that the chat template writes around messages."""
    return framing_marks(renderer_of(tokenizer), added_tokens(tokenizer).values())


def as_warning(problem: UserError) -> str:
    """Return a warning as a line for the console."""
    details = "" if problem.got is None else f" ({problem.got})"
    return f"warning: {problem.message}{details}; {problem.fix}"


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], setting: str) -> tuple[int, ...]:
    """Return the id of each stop string; raise a UserError for one that is not exactly one token."""
    ids: list[int] = []
    for text in stop:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) != 1 or tokens[0] == tokenizer.unk_token_id:
            names = tokenizer.convert_ids_to_tokens(tokens)
            raise stop_error(setting, text, [names] if isinstance(names, str) else names)
        ids.append(tokens[0])
    return tuple(ids)


def sampling_by_task(
    rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
) -> tuple[SamplingParameters, Mapping[str, SamplingParameters]]:
    """Return the default sampling parameters and those of each task that has a profile of its own.

    A profile overrides fields of the rollout settings; its ``stop`` replaces theirs. ``ends`` always end
    a response. A field that does not exist or is out of range raises a UserError.
    """
    errors = profile_errors(rollout)
    if errors:
        raise UserErrors(errors)
    base = {name: getattr(rollout, name) for name in profile_fields()}
    default = _parameters(base, tokenizer, ends, "rollout")
    tasks: dict[str, SamplingParameters] = {}
    for task, profile in rollout.sampling_profiles.items():
        setting = f"rollout.sampling_profiles.{task}"
        tasks[task] = _parameters({**base, **profile}, tokenizer, ends, setting)
    return default, tasks


def _parameters(
    values: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], setting: str
) -> SamplingParameters:
    ids = dict.fromkeys((*ends, *stop_token_ids(tokenizer, values["stop"], f"{setting}.stop")))
    return SamplingParameters(
        float(values["temperature"]),
        float(values["top_p"]),
        int(values["top_k"]),
        int(values["max_response_tokens"]),
        tuple(ids),
        float(values["min_p"]),
    )


class PromptEncoder:
    """Turn the prompt field of a record into tokens, through the chat template where one applies.

    A list of messages goes through the template; a string does when ``data.chat_template`` is true, as one
    user message. ``data.chat_template`` false forbids lists of messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, setting: str) -> None:
        self.tokenizer, self.data, self.setting = tokenizer, data, setting

    @cached_property
    def renderer(self) -> TemplateRenderer | None:
        """Return the renderer of the tokenizer's chat template, None without one."""
        return renderer_of(self.tokenizer)

    def texts(self, records: Sequence[Record]) -> list[str]:
        """Return the prompts as text, rendered by the chat template where they go through it."""
        for record in records:
            require_prompt(record, self.data, self.setting)

        return rendered_prompts(records, self.data, self.setting, self.renderer)

    def encode(self, records: Sequence[Record], limit: int) -> tuple[list[str], list[numpy.ndarray]]:
        """Return every record's prompt text and its tokens (int32), in order; see `encode_texts`."""
        texts = self.texts(records)
        tokens = encode_texts(self.tokenizer, texts, limit)
        prefix = text_prefix(self.tokenizer)
        for row, record in enumerate(records):
            if not templated(record, self.data):
                tokens[row] = numpy.asarray(with_prefix(prefix, tokens[row].tolist()), numpy.int32)

            if not len(tokens[row]):
                raise no_tokens_error(texts[row], f"{record.where} ({self.setting})")
        return texts, tokens


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], limit: int, chunk: int = 1024
) -> list[numpy.ndarray]:
    """Return the tokens (int32) of each text, without what the tokenizer puts around a text.

    A text that is far longer than ``limit`` tokens, and so of no use, is not tokenised to its end: it has the
    tokens of a beginning that has more than `counted`.
    """
    result: list[numpy.ndarray] = []
    for start in range(0, len(texts), chunk):
        part = [_cut(tokenizer, text, limit) for text in texts[start : start + chunk]]
        encoded = tokenizer(part, add_special_tokens=False, return_attention_mask=False)
        result.extend(numpy.asarray(ids, numpy.int32) for ids in encoded["input_ids"])  # pyright: ignore
        advance("pieces of data")
    return result


def encode_pieces(
    tokenizer: Any, rows: Sequence[Sequence[str]], limit: int, chunk: int = 256
) -> list[list[numpy.ndarray] | None]:
    """Return the tokens (int32) of the pieces of each row, whose text is tokenised as a whole.

    None for a row in which a token reaches from one piece into the next, and for texts that are cut, see
    `encode_texts`.
    """
    if not tokenizer.is_fast:
        return [None] * len(rows)

    results: list[list[numpy.ndarray] | None] = []
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        texts = ["".join(pieces) for pieces in part]
        short = [row for row, text in enumerate(texts) if len(text) <= max(_PIECE, counted(limit))]
        found: list[list[numpy.ndarray] | None] = [None] * len(part)
        if short:
            encoded = tokenizer(
                [texts[row] for row in short],
                add_special_tokens=False,
                return_attention_mask=False,
                return_offsets_mapping=True,
            )
            for row, ids, offsets in zip(short, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                found[row] = _split_tokens(ids, offsets, part[row])
        results += found
        advance("pieces of data")
    return results


def _split_tokens(
    ids: Sequence[int], offsets: Sequence[tuple[int, int]], pieces: Sequence[str]
) -> list[numpy.ndarray] | None:
    """Return the tokens of each piece by where they start; None where one reaches over an edge."""
    tokens = numpy.asarray(ids, numpy.int32)
    if not len(tokens):
        return None

    starts, ends = numpy.asarray(offsets, numpy.int64).T
    edges = numpy.cumsum([len(piece) for piece in pieces])[:-1]
    places = numpy.searchsorted(starts, edges)
    for edge, place in zip(edges, places, strict=True):
        if place and ends[place - 1] > edge:
            return None
    return numpy.split(tokens, places)


def counted(limit: int) -> int:
    """Return how many tokens are counted of a text that may have ``limit``."""
    return 2 * limit + 1024


def _cut(tokenizer: PreTrainedTokenizerBase, text: str, limit: int) -> str:
    """Return the text, or of one that is far longer than ``limit`` tokens a beginning that is so, too.

    Its pieces are counted, not its characters: a tokenizer may take any number of them for one token.
    """
    tokens = 0
    for start in range(0, len(text) if len(text) > _PIECE else 0, _PIECE):
        end = start + _PIECE
        tokens += len(tokenizer.encode(text[start:end], add_special_tokens=False))
        if tokens > 2 * counted(limit):
            return text[:end]
    return text


def _shown_length(length: int, limit: int) -> str:
    return f"{length}" if length <= counted(limit) else f"{counted(limit)} or more"


def drop_over_long(
    lengths: Sequence[int], records: Sequence[Record], limit: int, policy: str, setting: str, limited_by: str
) -> tuple[list[int], LengthReport]:
    """Return the rows within ``limit`` tokens and a report; with policy ``error`` the first longer raises.

    No row within the limit raises a UserError under either policy. ``setting`` names the data and
    ``limited_by`` the limit.
    """
    long = [row for row, length in enumerate(lengths) if length > limit]
    longest = max(lengths)
    if long and (policy == "error" or len(long) == len(lengths)):
        row = long[0]
        count = f"{len(long)} of {len(lengths)}"
        raise UserError(
            f"{count} items of {setting} are longer than the limit",
            where=f"{records[row].where} ({setting})",
            expected=f"at most {limit} tokens",
            got=f"{_shown_length(lengths[row], limit)} tokens there; "
            f"the longest has {_shown_length(longest, limit)}",
            fix=f"raise {limited_by}" + (", or set data.over_long=drop" if policy == "error" else ""),
        )
    dropped = set(long)
    keep = [row for row in range(len(lengths)) if row not in dropped]
    examples = tuple(
        f"{records[row].where} ({_shown_length(lengths[row], limit)} tokens)" for row in long[:3]
    )
    return keep, LengthReport(len(lengths), len(long), limit, longest, examples)
