"""A checkpoint's chat template, rendered as transformers does, without the seconds of importing it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_rl.data.chat_format import template_messages

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Any] | None], str | None]
"""Turn messages and tools into the text of a prompt, None where only transformers can; raises Refused."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


_UNDEFINED_NAME = re.compile(r"'\w+' is undefined")
"""jinja's message where a template names a variable that it is not given."""


class Refused(Exception):
    """Say why a template refuses messages, in its own words."""


def has_chat_template(path: Path) -> bool:
    """Return whether a checkpoint directory comes with a chat template."""
    return bool(stated_template(path))


def template_of(path: Path) -> Render | None:
    """Return what renders a checkpoint's chat template, None where there is none that can be read here."""
    stated = stated_template(path)
    if isinstance(stated, list):  # several by name
        named = {item.get("name"): item.get("template") for item in stated if isinstance(item, Mapping)}
        stated = named.get("default") if "tool_use" not in named else None
    if not isinstance(stated, str) or not stated:
        return None
    try:
        environment = _environment()
    except ImportError:
        return None
    special = _special_tokens(path)

    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> str | None:
        said = template_messages(messages)
        values = {"messages": said, "tools": tools, "documents": None, "add_generation_prompt": True}
        try:
            return environment.from_string(stated).render(**special, **values)
        except Refused:
            raise
        except Exception as error:  # templates fail in ways of many kinds
            if _UNDEFINED_NAME.fullmatch(str(error)):
                return None  # transformers hands templates further names, such as an image's token
            raise Refused(f"{type(error).__name__}: {error}") from None

    return render


def _environment() -> Any:
    """Return the language of chat templates, as transformers' ``apply_chat_template`` has it."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise Refused(message)

    def to_json(value: Any, **how: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **how})

    class Generation(Extension):
        """The tag {% generation %} around what the assistant writes, as transformers has it: its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def stated_template(path: Path) -> Any:
    """Return what a checkpoint directory has as chat template: text, or several by name."""
    if (path / "chat_template.jinja").is_file():
        try:
            return (path / "chat_template.jinja").read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
    return _read(path / "chat_template.json").get("chat_template") or _read(
        path / "tokenizer_config.json"
    ).get("chat_template")


def _special_tokens(path: Path) -> dict[str, str]:
    """Return the texts of the special tokens that a template may name."""
    settings = {**_read(path / "special_tokens_map.json"), **_read(path / "tokenizer_config.json")}
    stated = {name: settings.get(name) for name in _SPECIAL}
    texts = {
        name: item.get("content") if isinstance(item, Mapping) else item for name, item in stated.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read(file: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
