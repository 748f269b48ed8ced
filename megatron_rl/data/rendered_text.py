"""Prompts and responses as text, as `check` and the run both read them, and what is odd about them.

Needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.chat_format import ConversationText, cut_at_end, template_messages
from megatron_rl.data.messages import asked_messages, said_texts, templated, tools_of
from megatron_rl.data.records import Record
from megatron_rl.data.template_renderer import Rendering, RenderRefused, TemplateRenderer
from megatron_rl.errors import UserError

LOOKED_AT = 200
"""Records at the start of a data set whose texts are looked at for what is odd."""


def rendered_prompts(
    records: Sequence[Record], data: DataConfig, setting: str, renderer: TemplateRenderer | None
) -> list[str]:
    """Return the prompts as text, rendered by the chat template where they go through it.

    Raises UserError for messages that the template does not render, and where there is no template.
    """
    texts = [record.values[data.prompt_field] for record in records]
    rows = [row for row, record in enumerate(records) if templated(record, data)]
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

    renderings = [
        Rendering(template_messages(asked_messages(records[row], data)), tools_of(records[row], data))
        for row in rows
    ]
    for row, text in zip(rows, renderer.render_all(renderings), strict=True):
        if isinstance(text, RenderRefused):
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
                expected="messages of which the chat template writes something",
                got=f"no text from {str(records[row].values[data.prompt_field])[:80]}",
                fix="correct the record's messages, or the chat template of model.path",
            )
        texts[row] = text
    return texts


def response_pieces(
    record: Record,
    field: str,
    data: DataConfig,
    setting: str,
    chat: ConversationText | None,
    ends: Sequence[str],
    otherwise: str | None = None,
) -> list[str]:
    """Return what is said, read, said … in a response, as text: it begins and ends with what is said.

    ``ends`` are the texts of the tokens that end responses to prompts of plain text, and ``otherwise`` is a
    way out where the template makes no conversations. Raises UserError there.
    """
    response: Any = record.values[field]
    if chat is None or not templated(record, data):
        text = str(response)
        return [cut_at_end(text, ends) or text]

    try:
        if isinstance(response, str):
            return [chat.response(response)]
        return chat.learned(asked_messages(record, data), response, tools_of(record, data)).pieces
    except UserError as error:
        raise UserError(
            error.message,
            where=f"{record.where} ({setting})",
            expected=error.expected,
            got=error.got,
            fix=" or ".join(filter(None, (error.fix, otherwise))),
        ) from None


def odd_prompts(
    records: Sequence[Record],
    texts: Sequence[str],
    data: DataConfig,
    setting: str,
    ends: Sequence[str],
    marks: Collection[str],
) -> Iterator[UserError]:
    """Yield warnings of prompts that leave nothing to say, and of prompts that are rendered twice.

    ``texts`` are the rendered prompts, ``ends`` the texts of the tokens that end responses, and ``marks`` the
    special tokens that the chat template writes around messages.
    """
    rows = list(zip(records, texts, strict=False))[:LOOKED_AT]

    found = [record for record, text in rows if text and cut_at_end(text, ends) is not None]
    if found:
        yield _remark(
            "prompts end with a token that ends responses: nothing opens the turn of the assistant",
            found,
            len(rows),
            setting,
            expected="prompts that end where the response begins",
            fix="render them with add_generation_prompt=True, or give messages; a chat template that opens "
            "no turn needs an add_generation_prompt part",
        )

    twice = [
        record
        for record, _ in rows
        if templated(record, data)
        and any(mark in text for text in said_texts(asked_messages(record, data)) for mark in marks)
    ]
    if twice:
        template = data.setting_of("chat_template")
        text_alone = isinstance(twice[0].values[data.prompt_field], str)
        yield _remark(
            "messages hold marks of the chat template: they seem to be rendered already, and are again",
            twice,
            len(rows),
            setting,
            expected="what the user says, without the marks that the template writes around it",
            fix=f"set {template}=false for prompts that are rendered already"
            if text_alone
            else "give the messages as they were before they were rendered",
        )


def odd_responses(
    records: Sequence[Record],
    fields: Collection[str],
    data: DataConfig,
    setting: str,
    chat: ConversationText | None,
    ends: Sequence[str],
) -> Iterator[UserError]:
    """Yield warnings of responses that hold more than a turn, and of turns that are written otherwise."""
    looked = records[:LOOKED_AT]

    def goes_on(record: Record, field: str) -> bool:
        text = record.values[field]
        if not isinstance(text, str):
            return False
        said = cut_at_end(text, ends) or text
        return any(end in said[: -len(end)] for end in ends)

    found = [record for record in looked if any(goes_on(record, field) for field in fields)]
    if found:
        yield _remark(
            "responses go on behind a token that ends responses: what follows is learned, and never sampled",
            found,
            len(looked),
            setting,
            expected="one turn of the assistant as text, or its turns as messages",
            fix="give conversations as messages, or cut the text behind its first end",
        )

    if chat is None:
        return
    rewritten = [record for record in looked if _is_rewritten(record, fields, data, setting, chat)]
    if rewritten:
        yield _remark(
            "the chat template writes earlier turns otherwise once others follow, such as without their "
            "thoughts; they are learned, and read in later turns, as they were said",
            rewritten,
            len(looked),
            setting,
            expected="turns that stay as they were, or one turn to learn in a record",
            fix=f"set {setting.rpartition('.')[0]}.turns=last to learn the last turn alone, behind what the "
            "template makes of the others",
        )


def _is_rewritten(
    record: Record, fields: Collection[str], data: DataConfig, setting: str, chat: ConversationText
) -> bool:
    answered: list[Sequence[Mapping[str, Any]]] = [
        record.values[field] for field in fields if not isinstance(record.values[field], str)
    ]
    if not templated(record, data):
        return False
    try:
        tools = tools_of(record, data)
        asked = asked_messages(record, data)
        return not all(chat.learned(asked, one, tools).as_written for one in answered)
    except UserError:
        return False  # an error of its own


def _remark(
    message: str, found: Sequence[Record], total: int, setting: str, *, expected: str, fix: str
) -> UserError:
    first = ", ".join(record.where for record in found[:3])
    return UserError(
        message,
        where=setting,
        expected=expected,
        got=f"{len(found)} of the first {total} records; first: {first}",
        fix=fix,
    )
