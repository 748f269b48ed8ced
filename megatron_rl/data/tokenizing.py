"""Prompts and responses as tokens: the model's tokenizer, chat templates, stop tokens, length limits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from megatron_rl.config.sampling_profiles import profile_errors, profile_fields, stop_error
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.data.chat_format import template_messages
from megatron_rl.data.messages import asked_messages, no_tokens_error, require_prompt, templated, tools_of
from megatron_rl.data.records import Record
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


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the HF checkpoint at ``path``; raise a UserError when there is none."""
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
        return AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"the tokenizer of {path} cannot be loaded",
            where="model.path",
            expected="tokenizer files that transformers' AutoTokenizer reads",
            got=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            fix="copy tokenizer.json and tokenizer_config.json of the model into the directory",
        ) from None


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_path: str | Path | None = None
) -> tuple[int, ...]:
    """Return the ids that end a response: the tokenizer's eos first, then the generation config's."""
    tokens: list[int] = []
    if tokenizer.eos_token_id is not None:
        tokens.append(int(tokenizer.eos_token_id))  # pyright: ignore[reportArgumentType]
    file = Path(model_path) / "generation_config.json" if model_path is not None else None
    if file is not None and file.is_file():
        listed = json.loads(file.read_text()).get("eos_token_id")
        tokens.extend(listed if isinstance(listed, list) else [] if listed is None else [listed])
    if not tokens:
        raise UserError(
            "the model names no token that ends a response",
            where="model.path",
            expected="eos_token in the tokenizer's files or eos_token_id in generation_config.json",
            got="neither",
            fix="set eos_token in tokenizer_config.json",
        )
    return tuple(dict.fromkeys(tokens))


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

    def text(self, record: Record) -> tuple[str, bool]:
        """Return the prompt as text, and whether it is a rendered template (which has special tokens)."""
        require_prompt(record, self.data, self.setting)
        if not templated(record, self.data):
            return record.values[self.data.prompt_field], False
        return self._render(asked_messages(record, self.data), record), True

    def _render(self, messages: Sequence[Mapping[str, str]], record: Record) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError(
                "the prompt needs a chat template and the model's tokenizer has none",
                where=f"{record.where} ({self.setting})",
                expected="a tokenizer with a chat template",
                got="a tokenizer without one",
                fix="use an instruction-tuned model, or strings as prompts with "
                f"{self.data.setting_of('chat_template')}=false",
            )
        try:
            rendered = self.tokenizer.apply_chat_template(
                template_messages(messages),
                tools=tools_of(record, self.data),
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # templates raise jinja errors of many kinds
            raise UserError(
                "the chat template refuses the messages",
                where=f"{record.where} ({self.setting})",
                got=f"{type(error).__name__}: {error}",
                fix="correct the record's messages",
            ) from None
        return str(rendered)

    def encode(self, records: Sequence[Record], limit: int) -> tuple[list[str], list[numpy.ndarray]]:
        """Return every record's prompt text and its tokens (int32), in order; see `encode_texts`."""
        rendered = [self.text(record) for record in records]
        texts = [text for text, _ in rendered]
        tokens: list[numpy.ndarray] = [numpy.empty(0, numpy.int32)] * len(texts)
        for special in (False, True):
            rows = [row for row, (_, is_template) in enumerate(rendered) if is_template != special]
            for row, ids in zip(
                rows, encode_texts(self.tokenizer, [texts[r] for r in rows], special, limit), strict=True
            ):
                if not len(ids):
                    raise no_tokens_error(texts[row], f"{records[row].where} ({self.setting})")
                tokens[row] = ids
        return texts, tokens


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], special: bool, limit: int, chunk: int = 1024
) -> list[numpy.ndarray]:
    """Return the tokens (int32) of each text; ``special`` adds what the tokenizer puts around a text.

    A text that is far longer than ``limit`` tokens, and so of no use, is not tokenised to its end: it has the
    tokens of a beginning that has more than `counted`.
    """
    result: list[numpy.ndarray] = []
    for start in range(0, len(texts), chunk):
        part = [_cut(tokenizer, text, limit) for text in texts[start : start + chunk]]
        encoded = tokenizer(part, add_special_tokens=special, return_attention_mask=False)
        result.extend(numpy.asarray(ids, numpy.int32) for ids in encoded["input_ids"])  # pyright: ignore
        advance("pieces of data")
    return result


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
