"""What a prompt may be beside what a response may be: text, or messages for the chat template."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.records import Record
from megatron_rl.errors import UserError


def templated(record: Record, data: DataConfig) -> bool:
    """Say whether a record's prompt goes through the chat template."""
    return bool(data.chat_template) or not isinstance(record.values[data.prompt_field], str)


def require_prompt(record: Record, data: DataConfig, setting: str) -> None:
    """Raise UserError where a record's prompt or its tools are none; ``setting`` names the data set."""
    prompt, where = record.values[data.prompt_field], f"{record.where} ({setting})"
    template = data.setting_of("chat_template")
    if data.chat_template is False and _is_messages(prompt):
        raise UserError(
            "prompts are lists of messages, and the chat template is switched off",
            where=f"{where}: {template}",
            expected="true, or prompts that are text",
            got=f"false, and a list in `{data.prompt_field}`",
            fix=f"remove {template}=false, or set {template}=true for this data",
        )
    if not isinstance(prompt, str) and not _is_messages(prompt):
        raise UserError(
            f"the field {data.prompt_field!r} is not a prompt",
            where=where,
            expected="a string"
            + ("" if data.chat_template is False else " or a list of messages with role and content"),
            got=f"{type(prompt).__name__}: {str(prompt)[:80]}",
            fix=f"correct the record, or {data.setting_of('prompt_field')}",
        )
    if tools_of(record, data) and not templated(record, data):
        raise UserError(
            "a record has tools, and its prompt does not go through the chat template",
            where=where,
            expected=f"a list of messages, or {template}=true",
            got=f"text, and tools in {data.tools_field!r}",
            fix=f"set {template}=true, or remove {data.setting_of('tools_field')}",
        )


def tools_of(record: Record, data: DataConfig) -> list[Any] | None:
    """Return the tools of a record that `RecordReader` read, None where it has none."""
    return None if data.tools_field is None else record.values.get(data.tools_field)


def require_template_for(record: Record, responses: Collection[str], data: DataConfig, setting: str) -> None:
    """Raise UserError where a response of messages stands behind a prompt without the chat template."""
    messages = [value for field in responses if not isinstance(value := record.values[field], str)]
    if messages and not templated(record, data):
        template = data.setting_of("chat_template")
        raise UserError(
            "a response of messages follows a prompt that does not go through the chat template",
            where=f"{record.where} ({setting})",
            expected=f"a prompt of messages, or {template}=true",
            got=f"text, and {len(messages[0])} messages behind it",
            fix=f"set {template}=true, or give responses as text",
        )


def asked_messages(record: Record, data: DataConfig) -> Sequence[Mapping[str, Any]]:
    """Return the messages of a prompt that goes through the chat template."""
    prompt = record.values[data.prompt_field]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _is_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and len(prompt) > 0
        and all(
            isinstance(item, Mapping) and "role" in item and {"content", "tool_calls"} & item.keys()
            for item in prompt
        )
    )


def no_tokens_error(prompt: str, where: str) -> UserError:
    """Return the error of a prompt that the tokenizer makes no tokens of."""
    return UserError(
        "a prompt has no tokens",
        where=where,
        expected="at least one token",
        got=repr(prompt),
        fix="correct or remove the record",
    )


def said_texts(value: Any) -> list[str]:
    """Return the texts of a prompt or a response without what a chat template puts around them."""
    return [value] if isinstance(value, str) else [str(message.get("content") or "") for message in value]


_OPENED = re.compile(r"<(think|thinking|thought|thoughts|reasoning)>\s*\Z")


def end_of_thoughts(opening: str) -> str | None:
    """Return the mark that ends the thoughts which a rendered prompt opens; None where it opens none."""
    found = _OPENED.search(opening)
    return found and f"</{found[1]}>"


def unended_thoughts(
    records: Sequence[Record], responses: Collection[str], data: DataConfig, end: str, setting: str
) -> UserError | None:
    """Return the warning of responses without the ``end`` of the thoughts that their prompts open."""
    asked = [record for record in records if templated(record, data)]
    found = [
        record.where
        for record in asked
        if not all(_ends_thoughts(record.values[field], end) for field in responses)
    ]
    if not found:
        return None
    return UserError(
        f"the chat template opens thoughts, and responses that do not say {end} are learned as thoughts",
        where=setting,
        expected=f"thoughts, {end} and then the answer in each response",
        got=f"none in {len(found)} of {len(asked)} records; first: {', '.join(found[:3])}",
        fix=f"write {end} before an answer without thoughts, or give the model a template that opens none",
    )


def _ends_thoughts(response: Any, end: str) -> bool:
    if isinstance(response, str):
        return end in response
    said = [message for message in response if message["role"] == "assistant"]
    return all(message.get("reasoning_content") or end in (message.get("content") or "") for message in said)
