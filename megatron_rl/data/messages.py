"""Validate the prompt, tools and responses of a record, and split conversations into prompt and response.

The values have been normalised by `megatron_rl.data.forms`. A conversation is split once, into the messages
of the prompt and the messages of the response. Nothing here needs torch or a tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.records import Record
from megatron_rl.errors import UserError, nearest

_USUAL_FIELDS = {
    "prompt_field": (
        "messages",
        "conversations",
        "conversation",
        "question",
        "problem",
        "instruction",
        "query",
    ),
    "ground_truth_field": ("answer", "label", "solution", "target", "reference_answer"),
    "response_field": ("completion", "output", "answer"),
}
"""Last part of a field's setting -> names that public data sets use for the field."""
_OPENED_REASONING = re.compile(r"<(think|thinking|thought|thoughts|reasoning)>\s*\Z")


# Fields


def with_nested_fields(record: Record, names: Iterable[str | None]) -> Record:
    """Copy nested fields to the top level of a record, for each of ``names`` that contains a dot.

    The name ``reward_model.ground_truth`` means ``ground_truth`` in the mapping ``reward_model``, unless the
    record has a field with the complete name.
    """
    nested_values = {}
    for name in names:
        if name is None or name in record.values or "." not in name:
            continue

        # Follow the keys through the mappings. A value other than a mapping has no nested field.
        value: Any = record.values
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            nested_values[name] = value

    if not nested_values:
        return record
    return replace(record, values={**record.values, **nested_values})


def require_fields(
    record: Record,
    fields: Mapping[str, str],
    setting: str,
    used_fields: Collection[str | None] = (),
) -> None:
    """Raise UserError for the first of ``fields`` that is absent or null in a record.

    ``fields`` maps the name of a field to the setting that contains the name. The error for an absent field
    suggests another field of the record, but none of ``used_fields``, which other settings name.
    """
    for name, name_setting in fields.items():
        if record.values.get(name) is not None:
            continue

        # Nested fields are candidates, too: verl has `reward_model.ground_truth`.
        nested_fields: list[str] = []
        for field, value in record.values.items():
            if isinstance(value, Mapping):
                nested_fields.extend(f"{field}.{key}" for key in value)

        if name in record.values:
            message = f"`{name}` is null in a record"
            fix = "fill it in, or remove the record"
        else:
            message = f"a record has no `{name}`"
            all_used_fields = {*fields, *used_fields}
            fix = _absent_field_fix(record, name, name_setting, nested_fields, all_used_fields)
        raise UserError(
            message,
            where=f"{record.where} ({setting})",
            expected=f"a value in the field `{name}`",
            got=f"fields {', '.join([*record.values, *nested_fields]) or '(none)'}",
            fix=fix,
        )


def _absent_field_fix(
    record: Record,
    name: str,
    name_setting: str,
    nested_fields: Sequence[str],
    used_fields: Collection[str | None],
) -> str:
    """Return the fix for an absent field ``name``: another field for its setting, if a field is similar.

    ``name_setting`` is the setting that contains the name. ``used_fields`` are the fields that settings name;
    they are not suggested.
    """
    filled_fields = [field for field, value in record.values.items() if value is not None]
    free_fields = [field for field in filled_fields if field not in used_fields]

    # Prefer a nested field with this name, then a field with a similar name, then a field with a name that
    # public data sets use, and last the only field without a use.
    candidate = next((path for path in nested_fields if path.endswith(f".{name}")), None)
    if candidate is None:
        free_paths = [path for path in (*filled_fields, *nested_fields) if path not in used_fields]
        candidate = nearest(name, free_paths)
    if candidate is None:
        usual_names = _USUAL_FIELDS.get(name_setting.rpartition(".")[2], ())
        candidate = next((field for field in usual_names if field in free_fields), None)
    if candidate is None and len(free_fields) == 1:
        candidate = free_fields[0]

    if candidate is not None:
        return f"set {name_setting}={candidate}"
    if free_fields:
        return f"set {name_setting} to the field that contains it"
    return f"give every record a field `{name}`, or set {name_setting} to one that every record has"


def require_last_answer(
    record: Record, prompt_field: str, responses: Mapping[str, str], setting: str
) -> None:
    """Raise UserError if a conversation is to be trained on and its last message is not the assistant's.

    ``responses`` maps fields of responses to the settings that name them. If another field of the record may
    contain the response, `require_fields` raises the error instead and suggests that field.
    """
    messages = record.values.get(prompt_field)
    absent_fields = [name for name in responses if record.values.get(name) is None]
    if len(responses) != 1 or not absent_fields or not isinstance(messages, list) or not messages:
        return

    # Leave the error to `require_fields` if a field with another name may contain the response.
    name = absent_fields[0]
    other_fields = [key for key, value in record.values.items() if value is not None and key != prompt_field]
    usual_names = _USUAL_FIELDS.get(responses[name].rpartition(".")[2], ())
    if nearest(name, other_fields) or any(field in other_fields for field in usual_names):
        return

    last_message = messages[-1]
    role = last_message.get("role") if isinstance(last_message, Mapping) else None
    raise UserError(
        "the messages of a record do not end with an answer of the assistant",
        where=f"{record.where} ({setting})",
        expected=f"the assistant's message, which is trained on, as the last in `{prompt_field}`",
        got=f"{role or 'no role'} in the last of {len(messages)} messages",
        fix="remove the messages after the last answer, or the record if it has none",
    )


# Prompts


def uses_chat_template(record: Record, data: DataConfig) -> bool:
    """Return whether the chat template renders a record's prompt."""
    return bool(data.chat_template) or not isinstance(record.values[data.prompt_field], str)


def get_tools(record: Record, data: DataConfig) -> list[Any] | None:
    """Return the tools of a normalised record, or None for a record without tools."""
    if data.tools_field is None:
        return None
    return record.values.get(data.tools_field)


def get_template_kwargs(record: Record, data: DataConfig) -> dict[str, Any]:
    """Return the chat template's arguments for a normalised record.

    They are the arguments of the data set, updated with the record's own arguments.
    """
    kwargs = dict(data.prompt_template.kwargs)
    if data.chat_template_kwargs_field is not None:
        kwargs.update(record.values.get(data.chat_template_kwargs_field) or {})
    return kwargs


def prompt_messages(record: Record, data: DataConfig) -> Sequence[Mapping[str, Any]]:
    """Return a prompt as messages for the chat template, including the data set's system prompt, if any."""
    prompt = record.values[data.prompt_field]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]

    system_prompt = data.prompt_template.system_prompt
    if system_prompt is not None:
        return [{"role": "system", "content": system_prompt}, *prompt]
    return prompt


def message_texts(value: Any) -> list[str]:
    """Return the texts of a prompt or response, without the markup of a chat template."""
    if isinstance(value, str):
        return [value]
    return [str(message.get("content") or "") for message in value]


def require_prompt(record: Record, data: DataConfig, setting: str) -> None:
    """Raise UserError unless a record's prompt and tools fit the data set's settings ``data``.

    ``setting`` is the configuration key that names the data set, for errors.
    """
    prompt = record.values[data.prompt_field]
    location = f"{record.where} ({setting})"
    template = data.setting_of("chat_template")

    # Templates expect one system message: with two they raise, or write a text that no model was trained on.
    system_prompt = data.prompt_template.system_prompt
    if system_prompt is not None and _are_messages(prompt) and prompt[0]["role"] in ("system", "developer"):
        raise UserError(
            "a prompt already has a system message",
            where=location,
            expected=f"prompts without one, since {data.setting_of('system_prompt')} is set",
            got=str(prompt[0]["content"])[:80],
            fix=f"remove {data.setting_of('system_prompt')}, or the message from the record",
        )

    # Messages need the template.
    if data.chat_template is False and _are_messages(prompt):
        raise UserError(
            "prompts are lists of messages, and the chat template is switched off",
            where=f"{location}: {template}",
            expected="true, or prompts that are text",
            got=f"false, and a list in `{data.prompt_field}`",
            fix=f"remove {template}=false, or set {template}=true for this data",
        )

    # A prompt is text or messages. Any other value usually means that the setting names the wrong field.
    if not isinstance(prompt, str) and not _are_messages(prompt):
        expected = "a string"
        if data.chat_template is not False:
            expected += " or a list of messages with role and content"
        raise UserError(
            f"the field {data.prompt_field!r} is not a prompt",
            where=location,
            expected=expected,
            got=f"{type(prompt).__name__}: {str(prompt)[:80]}",
            fix=f"correct the record, or {data.setting_of('prompt_field')}",
        )

    # Tools and arguments of the chat template have no effect on a prompt without the chat template.
    if uses_chat_template(record, data):
        return
    if get_tools(record, data):
        raise UserError(
            "a record has tools, and its prompt does not go through the chat template",
            where=location,
            expected=f"a list of messages, or {template}=true",
            got=f"text, and tools in {data.tools_field!r}",
            fix=f"set {template}=true, or remove {data.setting_of('tools_field')}",
        )
    kwargs = get_template_kwargs(record, data)
    if kwargs:
        raise UserError(
            "a record has arguments of the chat template, and its prompt does not go through it",
            where=location,
            expected=f"a list of messages, or {template}=true",
            got=f"text, and {', '.join(kwargs)} in {data.chat_template_kwargs_field!r}",
            fix=f"set {template}=true, or data.chat_template_kwargs_field=null to leave the field unread",
        )


def require_template_for_messages(
    record: Record,
    response_fields: Collection[str],
    data: DataConfig,
    setting: str,
) -> None:
    """Raise UserError if a response is a list of messages and the prompt does not use the chat template."""
    responses = [record.values[field] for field in response_fields]
    conversations = [response for response in responses if not isinstance(response, str)]
    if not conversations or uses_chat_template(record, data):
        return

    template = data.setting_of("chat_template")
    raise UserError(
        "a response of messages follows a prompt that does not go through the chat template",
        where=f"{record.where} ({setting})",
        expected=f"a prompt of messages, or {template}=true",
        got=f"text, and {len(conversations[0])} messages after it",
        fix=f"set {template}=true, or give responses as text",
    )


def no_tokens_error(prompt: str, location: str) -> UserError:
    """Return the error for a prompt that the tokenizer encodes to no tokens."""
    return UserError(
        "a prompt has no tokens",
        where=location,
        expected="at least one token",
        got=repr(prompt),
        fix="correct or remove the record",
    )


def _are_messages(prompt: Any) -> bool:
    """Return whether a value is a non-empty sequence of messages with a role, and content or tool calls."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes) or not prompt:
        return False
    return all(
        isinstance(item, Mapping) and "role" in item and {"content", "tool_calls"} & item.keys()
        for item in prompt
    )


# Responses


def split_responses(
    record: Record,
    prompt_field: str,
    fields: Collection[str],
    every_turn: bool = False,
    setting: str = "sft.data",
) -> Record:
    """Split a record's conversations into the prompt and the responses in ``fields``.

    A trained turn is a message of the assistant whose loss weight is not 0.

    - If the prompt's field has the complete conversation, the response is the last trained turn or, with
      ``every_turn``, all messages from the first trained turn on. The messages before it are the prompt.
    - If several responses are complete conversations, their longest common prefix becomes the prompt.
    - Messages after the last trained turn are dropped.
    - If the prompt is text, a response that consists of one text message is replaced by the message's text.

    Raises UserError for a response without a trained turn.
    """
    values = dict(record.values)
    field, *further_fields = fields

    # Complete conversations: split them after the messages that they share, which are the prompt.
    if further_fields and all(_begins_with_prompt(values.get(name)) for name in fields):
        conversations = [values[name] for name in fields]
        num_shared = _count_shared_messages(conversations)
        values[prompt_field] = conversations[0][:num_shared]
        for name, conversation in zip(fields, conversations, strict=True):
            values[name] = conversation[num_shared:]

    # One conversation in the prompt's field: its end is the response.
    messages = values.get(prompt_field)
    has_response = bool(further_fields) or values.get(field) is not None
    if not has_response and isinstance(messages, list) and _ends_with_turn(messages):
        start = _response_start(messages, every_turn)
        values[prompt_field] = messages[:start]
        values[field] = messages[start:]

    # Cut responses after their last trained turn, and convert them to text if the prompt is text.
    prompt_is_text = isinstance(values.get(prompt_field), str)
    for name in fields:
        response = values.get(name)
        if isinstance(response, list) and _is_response_of_messages(response):
            response = _cut_after_last_trained(response, name, record, setting)
        if prompt_is_text and isinstance(response, list) and _is_text_turn(response):
            response = response[0]["content"]
        if response is not None:
            values[name] = response
    return replace(record, values=values)


def require_responses(record: Record, fields: Mapping[str, str], setting: str) -> None:
    """Raise UserError for the first of ``fields`` whose value is not a response.

    A response is text, or messages that begin and end with a turn of the assistant. ``fields`` maps the
    fields of responses to the settings that name them.
    """
    for name, key in fields.items():
        value = record.values[name]
        if isinstance(value, str) or _is_response_of_messages(value):
            continue
        raise UserError(
            f"the field `{name}` is not a response",
            where=f"{record.where} ({setting})",
            expected="text, or messages with text that begin and end with a turn of the assistant",
            got=f"{type(value).__name__}: {str(value)[:80]}",
            fix=f"correct the record, or {key}",
        )


def is_trained_turn(message: Mapping[str, Any]) -> bool:
    """Return whether a turn of the assistant is trained on; a turn with ``weight: 0`` is only context."""
    return message.get("weight") != 0


def _response_start(messages: Sequence[Mapping[str, Any]], every_turn: bool) -> int:
    """Return the index of the response's first message in a complete conversation.

    With ``every_turn`` it is the first trained turn, otherwise the last trained turn. A conversation without
    a trained turn is not an error here: `_cut_after_last_trained` raises the error later.
    """
    # The first message cannot be the response, because it would have no prompt.
    turns = [index for index in range(1, len(messages)) if _ends_with_turn(messages[index : index + 1])]
    trained_turns = [index for index in turns if is_trained_turn(messages[index])]
    candidates = trained_turns or turns
    if not candidates:
        return 0
    if every_turn:
        return candidates[0]
    return candidates[-1]


def _cut_after_last_trained(messages: list[Any], field: str, record: Record, setting: str) -> list[Any]:
    """Drop the messages of a response after its last trained turn; raises UserError if no turn is trained.

    ``field`` is the field of the response, for the error.
    """
    trained_turns = [
        index
        for index, message in enumerate(messages)
        if _ends_with_turn([message]) and is_trained_turn(message)
    ]
    if not trained_turns:
        raise UserError(
            "a record has no turn to train on: each has the weight 0",
            where=f"{record.where} ({setting})",
            expected="at least one message of the assistant with a weight other than 0",
            got=f"{len(messages)} messages in `{field}`",
            fix="remove the record, or correct its weights",
        )
    return messages[: trained_turns[-1] + 1]


def _begins_with_prompt(messages: Any) -> bool:
    """Return whether a value is a conversation whose first message is not the assistant's."""
    return isinstance(messages, list) and bool(messages) and not _ends_with_turn(messages[:1])


def _count_shared_messages(conversations: Sequence[Sequence[Any]]) -> int:
    """Return the length of the longest common prefix of conversations, in messages.

    The prefix is shorter than every conversation, so that every response has at least one message.
    """
    max_count = min(map(len, conversations)) - 1
    first_conversation = conversations[0]
    for index in range(max_count):
        if any(conversation[index] != first_conversation[index] for conversation in conversations):
            return index
    return max_count


def _ends_with_turn(messages: Sequence[Any]) -> bool:
    """Return whether the last message is a turn of the assistant."""
    if not messages:
        return False
    last_message = messages[-1]
    return isinstance(last_message, dict) and last_message.get("role") == "assistant"


def _is_text_turn(messages: Sequence[Any]) -> bool:
    """Return whether messages are a single turn of the assistant with only text."""
    if len(messages) != 1 or not _ends_with_turn(messages):
        return False
    message = messages[0]
    return all(message[name] is None for name in message.keys() - {"role", "content"})


def _is_response_of_messages(messages: Any) -> bool:
    """Return whether a value is a list of messages that begins and ends with a turn of the assistant.

    Every message must have a role, and text or tool calls.
    """
    if not isinstance(messages, list) or not _ends_with_turn(messages[:1]) or not _ends_with_turn(messages):
        return False

    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return False
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            return False
    return True


# Warnings about responses


def is_uninformative(response: object, *alternatives: object) -> bool:
    """Return whether a model can learn nothing from a response, given as text or tokens.

    ``alternatives`` are the other responses of a preference pair. A response of a pair is uninformative if it
    equals another response. A single response is uninformative if it is empty.
    """
    if alternatives:
        return response in alternatives
    return not response


def uninformative_warning(locations: Sequence[str], total: int, are_pairs: bool) -> str:
    """Return the warning about records from which a model cannot learn.

    ``locations`` are the locations of these records, out of ``total`` records. ``are_pairs``: whether the
    records are preference pairs, not single responses.
    """
    count = f"{len(locations)} of {total}"
    first = f"first: {', '.join(locations[:3])}"
    if are_pairs:
        return f"{count} pairs prefer a response to itself and teach nothing; {first}"
    return f"{count} responses are empty, and training on them teaches empty answers; {first}"


def closing_reasoning_tag(prompt_text: str) -> str | None:
    """Return the closing tag of the reasoning block that a rendered prompt opens; None if it opens no block.

    Example:
        >>> closing_reasoning_tag("<|assistant|><think>")
        '</think>'
    """
    match = _OPENED_REASONING.search(prompt_text)
    if match is None:
        return None
    return f"</{match[1]}>"


def unclosed_reasoning_warning(
    records: Sequence[Record],
    response_fields: Collection[str],
    data: DataConfig,
    closing_tag: str,
    setting: str,
) -> UserError | None:
    """Return a warning about responses without the closing tag of the reasoning block that the prompt opens.

    The model would be trained on such a response as reasoning ("thoughts" in the warning). Returns None if
    all responses to prompts of the chat template have the tag.
    """
    # Skip records with template arguments: for example, enable_thinking=false closes the block in the prompt.
    candidates: list[Record] = []
    for record in records:
        if uses_chat_template(record, data) and not get_template_kwargs(record, data):
            candidates.append(record)
    unclosed_locations: list[str] = []
    for record in candidates:
        if not all(_closes_reasoning(record.values[field], closing_tag) for field in response_fields):
            unclosed_locations.append(record.where)

    if not unclosed_locations:
        return None

    return UserError(
        f"the chat template opens thoughts, and responses without {closing_tag} are trained on as thoughts",
        where=setting,
        expected=f"responses that contain the thoughts, then {closing_tag}, then the answer",
        got=f"none in {len(unclosed_locations)} of {len(candidates)} records; "
        f"first: {', '.join(unclosed_locations[:3])}",
        fix=f"write {closing_tag} before an answer without thoughts, or give the model a chat template that "
        "does not open thoughts",
    )


def _closes_reasoning(response: Any, closing_tag: str) -> bool:
    """Return whether each assistant turn contains the tag, or has its reasoning in ``reasoning_content``."""
    if isinstance(response, str):
        return closing_tag in response
    for message in response:
        if message["role"] != "assistant" or message.get("reasoning_content"):
            continue
        if closing_tag not in (message.get("content") or ""):
            return False
    return True


def mixed_templates_error(first: str, first_uses_template: bool, second: str) -> UserError:
    """Return the error for two sources of prompts, if the chat template renders only one of them.

    ``first`` and ``second`` are the names of the sources. ``first_uses_template``: whether the template
    renders the first source, and not the second.
    """
    forms = {True: "prompts that go through the chat template", False: "prompts of plain text"}
    return UserError(
        "the sources of prompts have different forms, so their responses would end differently",
        where=f"data.sources.{second}",
        expected=f"{forms[first_uses_template]}, as data.sources.{first}",
        got=forms[not first_uses_template],
        fix=f"set data.sources.{second}.chat_template={str(first_uses_template).lower()}, or convert the "
        "source",
    )
