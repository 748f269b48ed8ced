"""A checkpoint's chat template and tokens of ends, without the seconds of importing transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.data.chat_format import listed_end_ids
from megatron_rl.data.template_renderer import DEFAULT, TemplateRenderer, can_render

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def has_chat_template(path: Path) -> bool:
    """Return whether a checkpoint directory comes with a chat template."""
    return bool(chat_templates(path))


def folder_renderer(path: Path) -> TemplateRenderer | None:
    """Return the renderer of a checkpoint's chat templates, None where none can be read here."""
    templates = chat_templates(path)
    if not templates or not can_render():
        return None
    return TemplateRenderer(templates, special_texts(path))


def chat_templates(path: Path) -> dict[str, str]:
    """Return a checkpoint's chat templates by name, from the files that transformers takes them from."""
    named: dict[str, str] = {}
    for file in sorted(path.glob("additional_chat_templates/*.jinja")):
        named[file.stem] = _text(file)

    if (path / "chat_template.jinja").is_file():
        named[DEFAULT] = _text(path / "chat_template.jinja")
    if named:
        return {name: text for name, text in named.items() if text}

    stated = _read(path / "tokenizer_config.json").get("chat_template")
    if isinstance(stated, list):
        items = [item for item in stated if isinstance(item, Mapping)]
        stated = {item.get("name"): item.get("template") for item in items}
    if isinstance(stated, str):
        stated = {DEFAULT: stated}
    if not isinstance(stated, Mapping):
        return {}
    return {str(name): text for name, text in stated.items() if isinstance(text, str) and text}


def special_texts(path: Path) -> dict[str, str]:
    """Return the texts of the special tokens that a tokenizer names."""
    settings = {**_read(path / "special_tokens_map.json"), **_read(path / "tokenizer_config.json")}
    stated = {name: settings.get(name) for name in _SPECIAL}
    texts = {
        name: item.get("content") if isinstance(item, Mapping) else item for name, item in stated.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def added_token_ids(tokenizer: Any) -> dict[int, str]:
    """Return the texts of the added tokens of ``tokenizer``, of the library `tokenizers`, by their ids."""
    return {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}


def folder_ends(path: Path, tokenizer: Any) -> dict[int, str]:
    """Return the texts of the tokens that a checkpoint's files name as ends of responses, by their ids."""
    added = added_token_ids(tokenizer)
    eos = special_texts(path).get("eos_token")
    first = tokenizer.token_to_id(eos) if eos is not None else None

    ids = [] if first is None else [first]
    ids += listed_end_ids(path, added)
    texts = {number: tokenizer.id_to_token(number) for number in ids}
    return {number: text for number, text in texts.items() if text is not None}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _read(file: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
