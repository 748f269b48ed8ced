"""The text of a response as rewards, environments and stored samples see it.

Special tokens that a user added to write with, such as ``<answer>``, are part of what the policy says. Those
that only frame a turn are not: the tokens that end responses, the tokenizer's own BOS, EOS, padding and the
like, and the marks that the chat template writes around messages.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.data.template_renderer import RenderRefused, TemplateRenderer, renderer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONVERSATION = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
)


def added_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the texts of a tokenizer's special and other added tokens by their ids."""
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    added = tokenizer.added_tokens_decoder.items()
    return {**dict(named), **{number: token.content for number, token in added}}


def named_end_ids(tokenizer: Any, model_path: str | Path | None) -> tuple[int, ...]:
    """Return the ids of the tokens that a model's files name as ends of responses, the tokenizer's first.

    As in transformers, config.json counts where generation_config.json names none. It often has a default
    that nobody chose: there a token of text ends no response.
    """
    tokens: list[int] = []
    if tokenizer.eos_token_id is not None:
        tokens.append(int(tokenizer.eos_token_id))

    if model_path:
        tokens.extend(listed_end_ids(Path(model_path), added_tokens(tokenizer)))
    return tuple(dict.fromkeys(tokens))


def listed_end_ids(model: Path, added: Collection[int]) -> list[int]:
    """Return the ids of ``eos_token_id`` in a model's folder; ``added`` are the ids of added tokens."""
    listed = _listed_ends(model / "generation_config.json")
    return listed or [number for number in _listed_ends(model / "config.json") if number in added]


def _listed_ends(file: Path) -> list[int]:
    values: Any = None
    with suppress(OSError, ValueError, RecursionError):
        values = json.loads(file.read_text(encoding="utf-8"))
    stated = values.get("eos_token_id") if isinstance(values, Mapping) else None
    listed = stated if isinstance(stated, list) else [stated]
    return [number for number in listed if type(number) is int]


def framing_marks(renderer: TemplateRenderer | None, added: Iterable[str]) -> set[str]:
    """Return the added tokens that a chat template writes around messages."""
    if renderer is None:
        return set()
    try:
        text = renderer.render(_CONVERSATION, opens=False)
    except RenderRefused:
        return set()
    return {token for token in added if token and token in text}


class VisibleText:
    """Decode responses without the tokens that only frame a turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer

    @cached_property
    def hidden(self) -> frozenset[int]:
        """Return the ids of the tokens that only frame a turn."""
        tokenizer = self._tokenizer
        added = added_tokens(tokenizer)
        ids = set(named_end_ids(tokenizer, tokenizer.name_or_path))
        ids |= {number for name in _NAMED if (number := getattr(tokenizer, f"{name}_id", None)) is not None}

        marks = framing_marks(renderer_of(tokenizer), added.values())
        return frozenset(ids | {number for number, text in added.items() if text in marks})

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of one response."""
        return self._tokenizer.decode([token for token in tokens if token not in self.hidden])

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of responses."""
        hidden = self.hidden
        shown = [[token for token in row if token not in hidden] for row in rows]
        return self._tokenizer.batch_decode(shown) if shown else []
