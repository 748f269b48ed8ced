"""Render prompts and responses as text, and warn about unusual texts.

`check` and a run render with the same functions, so that they accept the same records. Nothing here needs
torch or transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.chat_format import ConversationRenderer, cut_at_end, template_messages
from megatron_rl.data.messages import (
    get_template_kwargs,
    get_tools,
    message_texts,
    prompt_messages,
    uses_chat_template,
)
from megatron_rl.data.records import Record
from megatron_rl.data.template_renderer import RenderError, Rendering, TemplateRenderer
from megatron_rl.errors import UserError

EXAMINED_RECORDS = 200
"""Number of records to examine, from the start of a data set: most rendering mistakes affect every record."""


def render_prompts(
    records: Sequence[Record],
    data: DataConfig,
    setting: str,
    renderer: TemplateRenderer | None,
) -> list[str]:
    """Return the prompt of each record as text; render prompts of messages with the chat template.

    ``renderer`` may be None for a tokenizer without a template. Raises UserError for messages that the
    template rejects, and for a prompt of messages without a template.
    """
    # Prompts of text bypass the template.
    texts = [record.values[data.prompt_field] for record in records]
    rows = [row for row, record in enumerate(records) if uses_chat_template(record, data)]
    if not rows:
        return texts

    if renderer is None:
        raise UserError(
            "the prompt needs a chat template and the model's tokenizer has none",
            where=f"{records[rows[0]].where} ({setting})",
            expected="a tokenizer with a chat template",
            got="a tokenizer without one",
            fix="use an instruction-tuned model, or strings as prompts with "
            f"{data.setting_of('chat_template')}=false",
        )

    # Render all prompts in one call, which sends them to the template's process in batches.
    renderings = [
        Rendering(
            template_messages(prompt_messages(records[row], data)),
            get_tools(records[row], data),
            kwargs=get_template_kwargs(records[row], data),
        )
        for row in rows
    ]
    for row, text in zip(rows, renderer.render_all(renderings), strict=True):
        if isinstance(text, RenderError):
            raise UserError(
                "the chat template refuses the messages",
                where=f"{records[row].where} ({setting})",
                expected="messages that the template renders within its limits of time and memory",
                got=str(text),
                fix="correct the record's messages, or the chat template of model.path",
            )
        if not text:
            raise UserError(
                "a prompt has no tokens",
                where=f"{records[row].where} ({setting})",
                expected="messages that the chat template renders to at least one character",
                got=f"an empty text for {str(records[row].values[data.prompt_field])[:80]}",
                fix="correct the record's messages, or the chat template of model.path",
            )
        texts[row] = text
    return texts


def require_multi_turn_template(chat: ConversationRenderer, data: DataConfig) -> None:
    """Raise UserError unless the chat template can add turns to the conversations of a data set.

    The template is rendered with the data set's arguments. The arguments of single records are not checked
    here: an invalid argument fails only the episodes of its record.
    """
    kwargs = data.prompt_template.kwargs
    try:
        chat.with_kwargs(kwargs).require_history_independence()
    except UserError as error:
        if not kwargs:
            raise
        key = data.setting_of("chat_template_kwargs")
        raise UserError(
            error.message,
            where=key,
            expected=error.expected,
            got=f"with {kwargs}: {error.got}",
            fix=f"correct {key}, or give the tokenizer another chat_template",
        ) from None


def response_pieces(
    record: Record,
    field: str,
    data: DataConfig,
    setting: str,
    chat: ConversationRenderer | None,
    end_texts: Sequence[str],
    template_error_fix: str | None = None,
) -> list[str]:
    """Render a response as a list of texts: turns at even indices, the text between turns at odd indices.

    ``chat`` renders with the chat template; None for a model without a template. ``end_texts`` are the texts
    of the tokens that end responses to prompts of plain text. If the template cannot render conversations
    turn by turn, raises UserError; ``template_error_fix`` is a further fix for this error.
    """
    response: Any = record.values[field]
    if chat is None or not uses_chat_template(record, data):
        text = str(response)
        return [cut_at_end(text, end_texts) or text]

    chat = chat.with_kwargs(get_template_kwargs(record, data))
    try:
        if isinstance(response, str):
            return [chat.format_response(response)]
        tools = get_tools(record, data)
        return chat.split_turns(prompt_messages(record, data), response, tools).pieces
    except UserError as error:
        # Add the record to the template's error.
        raise UserError(
            error.message,
            where=f"{record.where} ({setting})",
            expected=error.expected,
            got=error.got,
            fix=" or ".join(filter(None, (error.fix, template_error_fix))),
        ) from None


def prompt_warnings(
    records: Sequence[Record],
    texts: Sequence[str],
    data: DataConfig,
    setting: str,
    end_texts: Sequence[str],
    delimiters: Collection[str],
) -> Iterator[UserError]:
    """Yield warnings about prompts that end with an end token, and about messages that are already rendered.

    ``texts`` are the rendered prompts, ``end_texts`` the texts of the tokens that end responses, and
    ``delimiters`` the added tokens that the chat template writes around messages.
    """
    examined_prompts = list(zip(records, texts, strict=False))[:EXAMINED_RECORDS]

    # The policy would continue after the end of a turn, which no model was trained for.
    closed_records: list[Record] = []
    for record, text in examined_prompts:
        if text and cut_at_end(text, end_texts) is not None:
            closed_records.append(record)

    if closed_records:
        yield _records_warning(
            "prompts end with a token that ends responses: nothing opens the turn of the assistant",
            closed_records,
            len(examined_prompts),
            setting,
            expected="prompts that end where the response begins",
            fix="render them with add_generation_prompt=True, or give messages; a chat template that opens "
            "no turn needs an add_generation_prompt part",
        )

    # A message that contains delimiters such as `<|im_start|>` would be rendered inside a second pair.
    rendered_records: list[Record] = []
    for record, _ in examined_prompts:
        if uses_chat_template(record, data) and _contains_delimiter(record, data, delimiters):
            rendered_records.append(record)

    if rendered_records:
        fix = "give the original messages, from before they were rendered"
        if isinstance(rendered_records[0].values[data.prompt_field], str):
            fix = f"set {data.setting_of('chat_template')}=false for prompts that are rendered already"
        yield _records_warning(
            "messages contain marks of the chat template: they seem to be rendered already",
            rendered_records,
            len(examined_prompts),
            setting,
            expected="the text of the user, without the marks that the template writes around it",
            fix=fix,
        )


def _contains_delimiter(record: Record, data: DataConfig, delimiters: Collection[str]) -> bool:
    """Return whether a message of the prompt contains a token that the chat template writes around messages.

    ``delimiters`` are the texts of these tokens.
    """
    texts = message_texts(prompt_messages(record, data))
    return any(delimiter in text for text in texts for delimiter in delimiters)


def response_warnings(
    records: Sequence[Record],
    fields: Collection[str],
    data: DataConfig,
    setting: str,
    chat: ConversationRenderer | None,
    end_texts: Sequence[str],
) -> Iterator[UserError]:
    """Yield warnings about responses with text after an end token, and about templates that change old turns.

    ``fields`` are the names of the record fields that contain responses. ``end_texts`` are the texts of the
    tokens that end responses. ``chat`` renders conversations with the chat template; None means that there is
    no template.
    """
    # A response may have text after its end, such as a rendered conversation of several turns.
    first_records = records[:EXAMINED_RECORDS]
    continued_records = [
        record
        for record in first_records
        if any(_continues_after_end(record.values[field], end_texts) for field in fields)
    ]
    if continued_records:
        yield _records_warning(
            "responses continue after an end token: that text is trained on, but never sampled",
            continued_records,
            len(first_records),
            setting,
            expected="a single turn of the assistant as text, or a conversation as messages",
            fix="write conversations as messages, or cut the text after its first end token",
        )

    # A template may omit the reasoning of earlier turns.
    if chat is None:
        return
    changed_records = [
        record for record in first_records if _template_changes_turns(record, fields, data, chat)
    ]
    if changed_records:
        yield _records_warning(
            "the chat template renders earlier turns differently when later turns follow, for example "
            "without their reasoning; the model is trained on each turn as it is in the data",
            changed_records,
            len(first_records),
            setting,
            expected="a template that renders a turn in the same way in every position, or one trained turn "
            "per record",
            fix=f"set {setting.rpartition('.')[0]}.turns=last to train only on the last turn; the template "
            "then renders the earlier turns",
        )


def _continues_after_end(response: Any, end_texts: Sequence[str]) -> bool:
    """Return whether the text of a response contains an end token before its last token.

    ``end_texts`` are the texts of the tokens that end responses. The result is False for a response of
    messages.
    """
    if not isinstance(response, str):
        return False
    text = cut_at_end(response, end_texts) or response
    return any(end_text in text[: -len(end_text)] for end_text in end_texts)


def _template_changes_turns(
    record: Record, fields: Collection[str], data: DataConfig, chat: ConversationRenderer
) -> bool:
    """Return whether the chat template changes earlier turns of a record when later turns follow.

    A template may omit the reasoning of earlier turns, for example. ``fields`` are the names of the record
    fields that contain responses. The result is False if the template cannot render the record.
    """
    if not uses_chat_template(record, data):
        return False

    # A response is a text, or the messages of several turns.
    responses = [record.values[field] for field in fields]
    conversations = [response for response in responses if not isinstance(response, str)]
    tools = get_tools(record, data)
    prompt = prompt_messages(record, data)
    chat = chat.with_kwargs(get_template_kwargs(record, data))
    try:
        return not all(
            chat.split_turns(prompt, messages, tools).matches_template for messages in conversations
        )
    except UserError:
        return False  # `response_pieces` raises this error for the record


def _records_warning(
    message: str,
    records: Sequence[Record],
    num_examined: int,
    setting: str,
    *,
    expected: str,
    fix: str,
) -> UserError:
    """Return a warning about some ``records`` out of the first ``num_examined`` records of the data set."""
    first_locations = ", ".join(record.where for record in records[:3])
    return UserError(
        message,
        where=setting,
        expected=expected,
        got=f"{len(records)} of the first {num_examined} records; first: {first_locations}",
        fix=fix,
    )
