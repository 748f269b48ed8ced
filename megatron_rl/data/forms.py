"""Records as OpenAI, TRL, verl, ShareGPT, OpenRLHF and axolotl write them, read into one form.

Every record passes `RecordReader.read` once, in `check` as in training, so that both accept the same records
and nothing behind it meets another form: a prompt is text or a list of messages, a message has a role and a
text, calls are objects, tools are a list of objects. Whatever cannot be read into that form is an error that
names the record and the message; whatever is left over is named once per data set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data.messages import require_prompt, require_template_for
from megatron_rl.data.records import (
    Record,
    read_responses,
    require_characters,
    require_fields,
    require_last_answer,
    require_responses,
    with_inner,
)
from megatron_rl.errors import UserError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "observation")
"""Roles of chat templates; a template may name more."""
_ROLE_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
"""Roles of ShareGPT and of OpenAI's former functions, by the role that templates have."""
_SHAREGPT_CALL = ("function_call", "tool_call")
"""Roles of ShareGPT whose text is the JSON of calls."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that hold text, in OpenAI's two interfaces."""
_LEARNED_IF = ("weight", "training", "train", "loss", "step_loss_mask")
"""Keys of a message that is learned where they are true: of OpenAI, axolotl (two), ms-swift and slime."""
_LEARNED_UNLESS = ("masked",)
"""Keys of a message that is learned where they are false: of torchtune."""
_PARTLY_LEARNED = ("training_detail", "train_detail")
"""Keys of axolotl that mark spans of a message."""
_SCHEMA_VALUES = ("default", "const", "example")
"""Keywords of JSON Schema whose value may be null."""
_OF_THE_PROMPT = (
    "system", "tools", "functions", "documents", "chat_template_kwargs", "enable_thinking",
)  # fmt: skip
"""Fields that other projects put into the prompt."""
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_BEGINS_AS_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|from)["']\s*:""")
"""Beginning of messages as text: of JSON, or what Python's ``str`` makes of a list of messages."""
_LINKS = ("tool_call_id", "id", "index")
"""Keys of a message that link messages, and that most templates leave out."""


@dataclass(frozen=True)
class Consumers:
    """Settings whose code or model reads fields of a record behind the prompt.

    ``ground_truth`` names the setting that reads it, None where nothing does; ``metadata`` the one that gets
    all further fields. ``Consumers("reward.function", "reward.function")`` is a run with a reward function.
    """

    ground_truth: str | None
    metadata: str | None


REWARDED = Consumers("reward", "reward")
"""A reward that may read the ground truth and every further field."""


@dataclass
class RecordReader:
    """Reader of the records of one data set, named by ``setting``.

    ``responses`` are the fields of responses with the settings that name them, empty for prompts that are
    sampled from; `read_responses` describes ``every_turn``. ``template`` is the source of the chat template:
    roles and keys that it names are read by it; None where it is not available.
    """

    data: DataConfig
    setting: str
    responses: Mapping[str, str] = field(default_factory=dict[str, str])
    every_turn: bool = False
    consumers: Consumers = REWARDED
    template: str | None = None
    _first_prompt: tuple[bool, str] | None = field(default=None, init=False)
    """Whether the first prompt is text, and its record."""
    _unread_fields: dict[str, str] = field(default_factory=dict[str, str], init=False)
    _unread_keys: dict[str, str] = field(default_factory=dict[str, str], init=False)
    """Names that nothing reads, by the first record that has them."""
    _null_arguments: dict[str, str] = field(default_factory=dict[str, str], init=False)

    def read(self, found: Record) -> Record:
        """Return a record in the one form; raises UserError for one that cannot be read into it."""
        data, responses = self.data, self.responses
        record = with_inner(found, (*data.of_prompts, *responses))

        values = dict(record.values)
        self._note_fields(values, record.where)
        for name in (data.prompt_field, *responses):
            if values.get(name) is not None:
                values[name] = self._text_or_messages(values[name], name, record)
        if data.tools_field is not None and values.get(data.tools_field) is not None:
            values[data.tools_field] = self._tools(values[data.tools_field], record)
        record = replace(record, values=values)

        if responses:
            record = read_responses(record, data.prompt_field, responses, self.every_turn, self.setting)
        self._require_fields(record)
        require_responses(record, responses, self.setting)
        self._require_one_kind(record)
        require_prompt(record, data, self.setting)
        require_template_for(record, responses, data, self.setting)
        self._require_question(record)
        if not isinstance(record.values[data.prompt_field], str):
            # JSON text inside a record may hold escapes that reading the record has not seen.
            require_characters(record.values, f"{record.where} ({self.setting})")
        return record

    def remarks(self) -> Iterator[UserError]:
        """Yield the warnings of what the records read so far hold and nothing reads."""
        if self._unread_fields:
            yield self._fields_warning()
        if self._unread_keys:
            names = ", ".join(f"`{name}`" for name in self._unread_keys)
            yield UserError(
                f"keys of messages that nothing reads: {names}",
                where=self.setting,
                expected="role and content, and keys that the chat template names",
                got=", ".join(f"`{name}` first in {where}" for name, where in self._unread_keys.items()),
                fix="remove the keys if they are not needed, or give the model a chat template that has them",
            )

        if self._null_arguments:
            names = ", ".join(f"`{name}`" for name in self._null_arguments)
            yield UserError(
                f"arguments of calls that are null, which the model reads and learns: {names}",
                where=self.setting,
                expected="arguments that the call has",
                got=", ".join(f"`{name}` first in {where}" for name, where in self._null_arguments.items()),
                fix="leave them out, if a table was exported to JSON and filled them in",
            )

    def remark_lines(self) -> tuple[str, ...]:
        """Return the warnings of `remarks`, a sentence each, for the console."""
        return tuple(f"warning: {remark.message} ({remark.got}); {remark.fix}" for remark in self.remarks())

    def _require_fields(self, record: Record) -> None:
        """Raise UserError where a record lacks its prompt, a response, or a ground truth that is read."""
        data = self.data
        others = (data.tools_field, data.task_field, None if self.responses else data.ground_truth_field)
        require_last_answer(record, data.prompt_field, self.responses, self.setting)
        require_fields(record, data.asked | dict(self.responses), self.setting, others)
        reader = self.consumers.ground_truth
        if self.responses or reader is None:
            return
        try:
            require_fields(record, self.data.judged, self.setting)
        except UserError as error:
            otherwise = f"where there is none, let {reader} not read `ground_truth`"
            raise replace(error, fix=f"{error.fix}; {otherwise}") from None

    def _require_one_kind(self, record: Record) -> None:
        """Raise UserError for messages in a data set whose first prompt is text, and so goes in as it is."""
        prompt = record.values[self.data.prompt_field]
        if self._first_prompt is None:
            self._first_prompt = (isinstance(prompt, str), record.where)
        first_is_text, first = self._first_prompt
        if not first_is_text or not isinstance(prompt, list) or self.data.chat_template is True:
            return
        raise UserError(
            "a data set has prompts of two kinds: text, and messages for the chat template",
            where=f"{record.where} ({self.setting})",
            expected=f"text, as in {first}",
            got=f"{len(prompt)} messages in `{self.data.prompt_field}`",
            fix=f"set {self.data.setting_of('chat_template')}=true, by which text is a message of the user, "
            "or convert the records",
        )

    def _require_question(self, record: Record) -> None:
        """Raise UserError where a prompt's last message is the assistant's: another turn would follow it."""
        prompt = record.values[self.data.prompt_field]
        if isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
            return
        raise UserError(
            "a prompt ends with a message of the assistant, behind which another one would begin",
            where=f"{record.where} ({self.setting})",
            expected="messages whose last is not the assistant's",
            got=f"the assistant's {prompt[-1]['content'][:80]!r} as the last of {len(prompt)} messages",
            fix=f"remove the answer from `{self.data.prompt_field}`"
            + ("" if self.responses else ", or train on it: sft.data, preference.data"),
        )

    def _text_or_messages(self, value: Any, name: str, record: Record) -> Any:
        """Return a prompt or a response as text or messages; a value that is neither is left as it is."""
        if isinstance(value, str) and self.data.chat_template is not False:
            messages = _messages_in(value)
            if messages is None and name == self.data.prompt_field:
                self._require_no_broken_messages(value, record)
            value = messages or value
        if isinstance(value, Mapping):
            value = _of_columns(value) or ([value] if _is_message(value) else value)
        if not isinstance(value, list) or not value or not any(map(_is_message, value)):
            return value

        messages = []
        for number, message in enumerate(value, start=1):
            try:
                messages.append(self._message(message, record))
            except _Unreadable as problem:
                raise UserError(
                    f"a message {problem.what}",
                    where=f"{record.where} ({self.setting}): message {number} of `{name}`",
                    expected=problem.expected,
                    got=problem.got,
                    fix=problem.fix,
                ) from None
        return messages

    def _require_no_broken_messages(self, text: str, record: Record) -> None:
        """Raise UserError for a prompt that begins as messages do, and is not the JSON of messages."""
        if _BEGINS_AS_MESSAGES.match(text):
            raise UserError(
                "a prompt begins as a list of messages does, and is not JSON",
                where=f"{record.where} ({self.setting})",
                expected="a list of messages, JSON text of one, or a text that is the prompt itself",
                got=repr(text[:80]),
                fix="write the messages as a list, or with json.dumps; where this text is the prompt itself, "
                f"set {self.data.setting_of('chat_template')}=false",
            )

    def _message(self, found: Any, record: Record) -> dict[str, Any]:
        """Return a message with role and text; raises _Unreadable."""
        if not isinstance(found, Mapping):
            raise _Unreadable("is no object", "an object with role and content", _shown(found))
        message = {name: value for name, value in found.items() if value is not None}
        if record.from_table:
            message = without_nulls(message)

        role = message.pop("role", None)
        sender = message.pop("from", None)
        content = message.pop("content", None)
        content = message.pop("value", None) if content is None else content
        result = self._role_and_calls(role or sender, content, message, record.where, role is None)

        _require_content(found, result)
        if self.responses and result["role"] == "assistant":
            _mark_learned(result)
        else:
            _require_not_learned(result, bool(self.responses))
        self._note_keys(result, record.where)
        return result

    def _role_and_calls(
        self, role: Any, content: Any, message: dict[str, Any], where: str, of_sharegpt: bool
    ) -> dict[str, Any]:
        """Return a message whose role is one of templates', and whose calls are a list of objects."""
        if not isinstance(role, str):
            raise _Unreadable("has no role", "a role, such as user or assistant", _shown(role))
        if role in _SHAREGPT_CALL and role not in self._template_words:
            message["tool_calls"] = [
                {"type": "function", "function": call} for call in _calls_in(content, role)
            ]
            role, content = "assistant", ""
        elif of_sharegpt and role == "observation":
            role = "tool"
        if role not in self._template_words:
            role = _ROLE_ALIASES.get(role, role)
        if self.template is not None and role not in (*ROLES, *self._template_words):
            close = nearest(role, (*ROLES, *_ROLE_ALIASES)) or nearest(role.lower(), ROLES)
            raise _Unreadable(
                f"has the role {role!r}, which the chat template does not name",
                f"one of {', '.join(ROLES)}",
                repr(role),
                f"write {_ROLE_ALIASES.get(close, close)!r}" if close else "correct the role",
            )

        call = message.pop("function_call", None)
        if call is not None and not message.get("tool_calls"):
            message["tool_calls"] = [{"type": "function", "function": call}]
        calls = message.pop("tool_calls", None)
        result = {"role": role, "content": joined_text("" if content is None else content), **message}
        if calls:  # an empty list is no call, and templates that count calls refuse it
            result["tool_calls"] = _read_calls(calls)
            self._note_null_arguments(result["tool_calls"], where)
        return result

    def _note_null_arguments(self, calls: list[dict[str, Any]], where: str) -> None:
        """Note arguments that are null: written so, or left by a table that was exported to JSON."""
        for call in calls:
            arguments = call.get("function", call)["arguments"]
            if isinstance(arguments, Mapping):
                nulls = [name for name, value in arguments.items() if value is None]
                self._null_arguments |= {name: where for name in nulls if name not in self._null_arguments}

    @cached_property
    def _template_words(self) -> frozenset[str]:
        """Return the texts in quotes in the template: the roles that it compares with are among them."""
        return frozenset(re.findall(r"""['"](\w+)['"]""", self.template or ""))

    def _tools(self, tools: Any, record: Record) -> list[Any] | None:
        """Return the tools of a record as a list of objects, None for an empty list; raises UserError."""
        parsed = _parsed(tools) if isinstance(tools, str) else tools
        items = [_parsed(item) for item in parsed] if isinstance(parsed, list) else [None]
        if not all(isinstance(item, Mapping) for item in items):
            raise UserError(
                "the tools of a record are no list of objects",
                where=f"{record.where} ({self.setting})",
                expected="a list of descriptions of functions, as transformers' apply_chat_template takes "
                "it, or JSON text of one",
                got=_shown(tools),
                fix=f"correct the record, or {self.data.setting_of('tools_field')}",
            )
        # What was text has the nulls that its writer gave it; those of a table are Arrow's.
        of_arrow = record.from_table and not isinstance(tools, str)
        return [
            schema_without_nulls(item, of_arrow and not isinstance(whole, str))
            for item, whole in zip(items, parsed, strict=True)
        ] or None

    def _note_fields(self, values: Mapping[str, Any], where: str) -> None:
        """Note the fields of a record that nothing reads."""
        data = self.data
        read = {data.prompt_field, *self.responses, data.tools_field}
        if not self.responses:
            read |= {data.ground_truth_field, data.task_field}
        read |= {name.partition(".")[0] for name in (*data.of_prompts, *self.responses) if name}

        for name, value in values.items():
            if name in read or name in self._unread_fields or value is None or value == [] or value == "":
                continue
            # User code gets every further field; those of the prompt must be in the prompt to have an effect.
            passed_on = not self.responses and self.consumers.metadata is not None
            if not passed_on or name in (*_OF_THE_PROMPT, *_MEDIA):
                self._unread_fields[name] = where

    def _fields_warning(self) -> UserError:
        """Return the warning of fields that nothing reads, with what could read them."""
        names = list(self._unread_fields)
        hints = []
        if "tools" in names and self.data.tools_field is None:
            hints.append(f"set {self.data.setting_of('tools_field')}=tools")
        if "system" in names:
            hints.append("put `system` in front of the messages, as one of the role system")
        if not set(names).isdisjoint(_MEDIA):
            hints.append("leave out records with images or sounds: prompts are text alone")
        if not self.responses and self.consumers.metadata is None:
            hints.append("a reward function or an environment gets all fields as `metadata`")
        return UserError(
            f"fields of records that nothing reads: {', '.join(f'`{name}`' for name in names)}",
            where=self.setting,
            expected=f"fields that a setting names: {', '.join(filter(None, self._read_names()))}",
            got=", ".join(f"`{name}` first in {where}" for name, where in self._unread_fields.items()),
            fix="; ".join(hints) or "nothing, if they are not needed",
        )

    def _read_names(self) -> list[str | None]:
        """Return the names of the fields that are read."""
        data = self.data
        names = [data.prompt_field, *self.responses, data.tools_field]
        return names if self.responses else [*names, data.ground_truth_field, data.task_field]

    def _note_keys(self, message: Mapping[str, Any], where: str) -> None:
        """Note the keys of a message that the chat template does not name."""
        if self.template is None:
            return
        for name in message:
            if name in ("role", "content", "weight", *_LINKS, *self._unread_keys):
                continue
            if not re.search(rf"\b{re.escape(name)}\b", self.template):
                self._unread_keys[name] = where


def joined_text(content: Any) -> str:
    """Return the text of a message's content: text, or parts that are all text, a line each.

    vLLM joins parts in the same way for models of text. Raises _Unreadable for anything else.

    Example:
        >>> joined_text([{"type": "text", "text": "Add:"}, {"type": "text", "text": "2+2"}])
        'Add:\\n2+2'
    """
    if isinstance(content, str):
        return content
    parts = [content] if isinstance(content, Mapping) and "type" in content else content
    if not isinstance(parts, list) or not parts:
        if parts == []:
            return ""
        raise _Unreadable(
            "has content that is no text",
            "text, or a list of parts of text",
            _shown(content),
            "write it as text, such as JSON",
        )

    texts = []
    for part in parts:
        text = part if isinstance(part, str) else None
        if isinstance(part, Mapping):
            fields = {name: value for name, value in part.items() if value is not None}
            if fields.get("type", "text") in _TEXT_PARTS:
                text = fields.get("text", fields.get("content"))
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else None
            raise _Unreadable(
                f"has a part of type {kind!r}, and models are trained on text alone"
                if isinstance(kind, str)
                else "has a part that is no text",
                'text, or parts such as {"type": "text", "text": "..."}',
                _shown(part),
                "remove the record, or its parts that are no text",
            )
        texts.append(text)
    return "\n".join(texts)


def without_nulls(value: Any) -> Any:
    """Return a value without the keys, at any depth, whose value is null.

    Example:
        >>> without_nulls({"city": "Oslo", "n": None, "days": [{"n": None}, None]})
        {'city': 'Oslo', 'days': [{}, None]}
    """
    if isinstance(value, Mapping):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def schema_without_nulls(value: Any, of_arrow: bool) -> Any:
    """Return a description of a function without keys that are null.

    A null that JSON Schema allows stays unless Arrow made it, as does a property that Arrow gave every
    function of a column: one of nothing but nulls.

    Example:
        >>> schema_without_nulls({"properties": {"n": {"type": None}, "m": {"default": None}}}, False)
        {'properties': {'m': {'default': None}}}
    """
    if isinstance(value, list):
        return [schema_without_nulls(inner, of_arrow) for inner in value]
    if not isinstance(value, Mapping):
        return value

    result = {}
    for name, inner in value.items():
        if inner is None and (of_arrow or name not in _SCHEMA_VALUES):
            continue
        result[name] = schema_without_nulls(inner, of_arrow)
        if name == "properties" and isinstance(inner, Mapping):
            # A schema {} that its writer left empty had no keys before, either.
            empty = {key for key, schema in result[name].items() if schema == {} and inner[key] != {}}
            result[name] = {key: schema for key, schema in result[name].items() if key not in empty}
    return result


@dataclass
class _Unreadable(Exception):
    """What is wrong with a message: the rest of a sentence, what is expected, what there is, and a fix."""

    what: str
    expected: str
    got: str
    fix: str = "correct or remove the record"


def _shown(value: Any) -> str:
    return f"{type(value).__name__}: {str(value)[:80]}"


def _is_message(value: Any) -> bool:
    """Return whether a value looks like a message of any form: it has a role, or one who speaks."""
    if not isinstance(value, Mapping):
        return False
    has_role = value.get("role") is not None or value.get("from") is not None
    return has_role and not {"content", "value", "tool_calls", "function_call"}.isdisjoint(value)


def _of_columns(value: Mapping[str, Any]) -> list[Any] | None:
    """Return the messages of a mapping of lists, as ``datasets`` has a ``Sequence`` of structs; else None."""
    columns = {name: column for name, column in value.items() if column is not None}
    roles = columns.get("role", columns.get("from"))
    if not isinstance(roles, list) or not all(isinstance(column, list) for column in columns.values()):
        return None
    if any(len(column) != len(roles) for column in columns.values()):
        return None
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _messages_in(text: str) -> list[Any] | None:
    """Return the messages that a text is the JSON of, None for any other text."""
    parsed = _parsed(text)
    if isinstance(parsed, list) and parsed and all(map(_is_message, parsed)):
        return parsed
    return None


def _parsed(value: Any) -> Any:
    """Return what a text is the JSON of, where that is an object or a list; else the value itself."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _calls_in(content: Any, role: str) -> list[Any]:
    """Return the calls that a ShareGPT message holds as JSON text; raises _Unreadable."""
    parsed = _parsed(content)
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise _Unreadable(
            f"of the role {role} is no call of a function",
            'JSON such as {"name": "weather", "arguments": {"city": "Oslo"}}',
            _shown(content),
        )
    return calls


def _read_calls(calls: Any) -> list[dict[str, Any]]:
    """Return calls of tools as objects that have a name and arguments; raises _Unreadable."""
    parsed = _parsed(calls)
    result = []
    for item in parsed if isinstance(parsed, list) else [parsed]:
        call = _parsed(item)
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _Unreadable(
                "has a call of a tool without a name",
                'calls such as {"type": "function", "function": {"name": "...", "arguments": {...}}}',
                _shown(item),
            )
        # Templates print the arguments of every call, and fail where there are none.
        complete = {name: value for name, value in function.items() if value is not None}
        complete["arguments"] = _parsed(complete.get("arguments", {}))
        outer = {name: value for name, value in call.items() if value is not None}
        result.append({**outer, "function": complete} if "function" in call else complete)
    return result


def _require_content(found: Mapping[str, Any], message: Mapping[str, Any]) -> None:
    """Raise _Unreadable where a message says nothing because it has no content, rather than an empty one."""
    given = [found.get(name) for name in ("content", "value")]
    says_otherwise = set(message) & {"tool_calls", "reasoning_content", "thinking", "reasoning"}
    if any(value is not None for value in given) or says_otherwise or message["role"] == "tool":
        return
    raise _Unreadable(
        "has no content",
        "text in `content`, or calls of tools in `tool_calls`",
        f"keys {', '.join(name for name, value in found.items() if value is not None)}",
    )


def _mark_learned(message: dict[str, Any]) -> None:
    """Replace all names for the weight of a turn by OpenAI's, which stays where it is 0: see `is_learned`.

    Raises _Unreadable for a weight that is neither 0 nor 1, or one of a part of the message.
    """
    learned = True
    for name in (*_LEARNED_IF, *_LEARNED_UNLESS):
        if name not in message:
            continue
        value = message.pop(name)
        if value not in (0, 1):
            raise _Unreadable(
                f"has `{name}` {value!r}, and a turn is learned or not",
                "0 or 1, true or false",
                repr(value),
                f"set `{name}` to 0 or 1",
            )
        learned = learned and bool(value) is (name in _LEARNED_IF)
    partly = next((name for name in _PARTLY_LEARNED if message.get(name)), None)
    if partly is not None:
        raise _Unreadable(
            f"has `{partly}`, and a turn is learned as a whole or not at all",
            "`weight` of the message",
            _shown(message[partly]),
            f"remove `{partly}`, or split the turn",
        )
    if not learned:
        message["weight"] = 0


def _require_not_learned(message: dict[str, Any], has_responses: bool) -> None:
    """Remove the weight of a message that nobody learns; raises _Unreadable where it says otherwise.

    A prompt that is sampled from teaches nothing, so that its weights have no effect.
    """
    for name in (*_LEARNED_IF, *_LEARNED_UNLESS):
        value = message.pop(name, None)
        asks = name in _LEARNED_IF and value not in (None, 0)
        if asks and has_responses:
            raise _Unreadable(
                f"of the role {message['role']} has `{name}` {value!r}, and only the assistant's are learned",
                "a weight of 0, or none",
                repr(value),
                f"remove `{name}`",
            )


def template_source(template: Any) -> str | None:
    """Return the text of a tokenizer's chat template, of all where it has several by name."""
    if isinstance(template, Mapping):
        return "\n".join(text for text in template.values() if isinstance(text, str))
    if isinstance(template, Collection) and not isinstance(template, str):
        return "\n".join(str(item.get("template")) for item in template if isinstance(item, Mapping))
    return template or None
