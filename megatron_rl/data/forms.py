"""Records as OpenAI, TRL, verl, ShareGPT, OpenRLHF and axolotl write them, read into one form.

The one idea: every record passes `RecordReader.read` once, in `check` as in a run, so that both accept the
same records and no other module meets another form. In that form a prompt is text or a list of messages, a
message has a role and a text, the arguments of a call are an object, and tools are a list of objects. A value
that cannot be read into it is an error that names the record and the message. A field or key that nothing
reads is a warning, once per data set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.rewards import JudgeConfig
from megatron_rl.data.messages import (
    read_responses,
    require_fields,
    require_last_answer,
    require_prompt,
    require_responses,
    require_template_for,
    with_inner,
)
from megatron_rl.data.records import Record, require_characters
from megatron_rl.errors import UserError, nearest
from megatron_rl.user_code import find_module

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
"""Roles of ShareGPT and of OpenAI's former functions, with the role that templates have for them."""
_SHAREGPT_CALL = ("function_call", "tool_call")
"""Roles of ShareGPT whose text is the JSON of calls."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that hold text, in OpenAI's two interfaces."""
_LEARNED_IF = ("weight", "training", "train", "loss", "step_loss_mask")
"""Keys that are true in a message that is trained on: of OpenAI, axolotl (two), ms-swift and slime."""
_LEARNED_UNLESS = ("masked",)
"""Keys that are false in a message that is trained on: of torchtune."""
_PARTLY_LEARNED = ("training_detail", "train_detail")
"""Keys of axolotl that mark spans of a message."""
_SCHEMA_VALUES = ("default", "const", "example")
"""Keywords of JSON Schema whose value may be null."""
_PROMPT_FIELDS = (
    "system",
    "tools",
    "functions",
    "documents",
    "chat_template_kwargs",
    "enable_thinking",
)
"""Fields that other projects put into the prompt."""
_MEDIA_FIELDS = ("image", "images", "video", "videos", "audio", "audios")
_BEGINS_AS_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|from)["']\s*:""")
"""Beginning of messages as text: JSON, or the text that Python's ``str`` makes of a list of messages."""
_LINKS = ("tool_call_id", "id", "index")
"""Keys that link messages, and that most templates leave out."""
_GROUND_TRUTH = "ground_truth"
_METADATA = "metadata"
_DEFAULT_PARSER = JudgeConfig.__dataclass_fields__["parser"].default
"""The package's own parser of verdicts, which reads the judge's answer alone."""


# Settings that read the fields other than the prompt


@dataclass(frozen=True)
class Consumers:
    """Settings whose code or model reads fields of a record other than the prompt.

    Example:
        >>> Consumers("reward.function", "reward.function").ground_truth
        'reward.function'
    """

    ground_truth: str | None
    """Setting that reads the ground truth, None for a run that needs none."""
    metadata: str | None
    """Setting that gets all further fields, None for a run in which nothing does."""


REWARDED = Consumers("reward", "reward")
"""A reward that may read the ground truth and every further field."""


def prompt_consumers(config: RunConfig, evaluation_set: str | None = None) -> Consumers:
    """Return the consumers of the records of ``data.train``, or of the named evaluation set.

    A ground truth is required if anything may read it. No code is imported to decide that: a file that does
    not contain the text ``ground_truth`` does not read one.
    """
    readers = dict(_readers(config, evaluation_set))
    return Consumers(readers.get(_GROUND_TRUTH), readers.get(_METADATA))


def _readers(config: RunConfig, evaluation_set: str | None) -> Iterator[tuple[str, str]]:
    """Yield each field, ground truth or metadata, with a setting that reads it."""
    set_config = config.evaluation.sets.get(evaluation_set or "")
    if set_config is not None:
        for name, function in set_config.functions().items():
            yield from _read_by_code(function, f"evaluation.sets.{evaluation_set}.{name}")

    # An evaluation set without a reward of its own takes the run's.
    if set_config is None or set_config.reward is None:
        yield from _read_by_rewards(config)
    if config.rollout.environment is not None:
        yield from _read_by_code(config.rollout.environment.name, "rollout.environment.name")


def _read_by_rewards(config: RunConfig) -> Iterator[tuple[str, str]]:
    reward = config.reward
    if reward.function is not None:
        yield from _read_by_code(reward.function, "reward.function")
    if reward.code is not None:
        yield _GROUND_TRUTH, "reward.code"
    if reward.http is not None:
        for name in {_GROUND_TRUTH, _METADATA}.intersection(reward.http.sends):
            yield name, "reward.http.sends"
    if reward.judge is not None:
        yield from _read_by_judge(reward.judge)


def _read_by_judge(judge: JudgeConfig) -> Iterator[tuple[str, str]]:
    key = "reward.judge.template"
    if "{" not in judge.template:
        yield from _read_by_code(judge.template, key)
    elif "{ground_truth}" in judge.template:
        yield _GROUND_TRUTH, key
    if judge.parser != _DEFAULT_PARSER:
        yield from _read_by_code(judge.parser, "reward.judge.parser")


def _read_by_code(spec: str, key: str) -> Iterator[tuple[str, str]]:
    """Yield the fields that the user's function or class may read; its file is searched, not imported."""
    yield _METADATA, key

    module, _, name = spec.rpartition(":")
    try:
        file = Path(module) if module.endswith(".py") else find_module(module)[0]
        source = "" if file is None else file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        source = ""

    # A name that the file only imports is defined in a file that is not read here.
    definition = re.search(rf"\b(def|class)\s+{re.escape(name)}\b", source)
    if definition is None or _GROUND_TRUTH in source:
        yield _GROUND_TRUTH, key


# The reader


@dataclass
class RecordReader:
    """Reader of the records of one data set, with the warnings about fields that nothing reads."""

    data: DataConfig
    """Names of fields, and whether prompts go through the chat template."""
    setting: str
    """Configuration key that names the data set, such as ``data.train``."""
    responses: Mapping[str, str] = field(default_factory=dict[str, str])
    """Fields of responses, with the settings that name them; empty for prompts that are sampled from."""
    every_turn: bool = False
    """Whether all turns of a conversation are trained on, or the last alone; see `read_responses`."""
    consumers: Consumers = REWARDED
    """Settings that read the fields other than prompt and responses."""
    template: str | None = None
    """Source of the chat template, which names further roles and keys; None if it is not available."""

    _first_prompt: tuple[bool, str] | None = field(default=None, init=False)
    """Whether the first prompt is text, and its record."""
    _unread_fields: dict[str, str] = field(default_factory=dict[str, str], init=False)
    """Fields that nothing reads, with the first record of each."""
    _unread_keys: dict[str, str] = field(default_factory=dict[str, str], init=False)
    """Keys of messages that the template does not name, with the first record of each."""
    _null_arguments: dict[str, str] = field(default_factory=dict[str, str], init=False)
    """Arguments of calls that are null, with the first record of each."""

    def read(self, original: Record) -> Record:
        """Return a record in the one form; raises UserError for one that cannot be read into it."""
        data = self.data
        responses = self.responses
        record = with_inner(original, (*data.record_fields, *responses))

        # Each value into the one form.
        values = dict(record.values)
        self._note_unread_fields(values, record.where)
        for name in (data.prompt_field, *responses):
            if values.get(name) is not None:
                values[name] = self._text_or_messages(values[name], name, record)
        if data.tools_field is not None and values.get(data.tools_field) is not None:
            values[data.tools_field] = self._tools(values[data.tools_field], record)
        record = replace(record, values=values)

        # Splitting comes before the rules: it may make the field of a response out of the prompt's messages.
        if responses:
            record = read_responses(record, data.prompt_field, responses, self.every_turn, self.setting)

        # Fields that exist come before rules on their values.
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
        """Yield the warnings about the records that have been read so far."""
        if self._unread_fields:
            yield self._unread_fields_warning()
        if self._unread_keys:
            yield self._warning_of(
                "keys of messages that nothing reads",
                self._unread_keys,
                expected="role and content, and keys that the chat template names",
                fix="remove the keys if they are not needed, or give the model a chat template that has them",
            )
        if self._null_arguments:
            yield self._warning_of(
                "arguments of calls that are null, which the model reads and learns",
                self._null_arguments,
                expected="arguments that the call has",
                fix="leave them out, if a table was exported to JSON and filled them in",
            )

    def remark_lines(self) -> tuple[str, ...]:
        """Return the warnings about `remarks`, a sentence each, for the console."""
        return tuple(f"warning: {remark.message} ({remark.got}); {remark.fix}" for remark in self.remarks())

    def _warning_of(
        self,
        message: str,
        first_records: Mapping[str, str],
        *,
        expected: str,
        fix: str,
    ) -> UserError:
        """Return a warning that lists names, each with the first record that has it."""
        return UserError(
            f"{message}: {', '.join(f'`{name}`' for name in first_records)}",
            where=self.setting,
            expected=expected,
            got=", ".join(f"`{name}` first in {location}" for name, location in first_records.items()),
            fix=fix,
        )

    # Rules on a complete record

    def _require_fields(self, record: Record) -> None:
        """Raise UserError for a record without its prompt, a response, or a ground truth that is read."""
        data = self.data
        other_fields = [data.tools_field, data.task_field]
        if not self.responses:
            other_fields.append(data.ground_truth_field)
        require_last_answer(record, data.prompt_field, self.responses, self.setting)
        require_fields(record, data.prompt_fields | dict(self.responses), self.setting, other_fields)

        # The ground truth, unless nothing can read it.
        reader = self.consumers.ground_truth
        if self.responses or reader is None:
            return
        try:
            require_fields(record, data.reward_fields, self.setting)
        except UserError as error:
            alternative = f"without one, make {reader} not read `ground_truth`"
            raise replace(error, fix=f"{error.fix}; {alternative}") from None

    def _require_one_kind(self, record: Record) -> None:
        """Raise UserError for messages in a data set whose first prompt is text and bypasses the template."""
        prompt = record.values[self.data.prompt_field]
        if self._first_prompt is None:
            self._first_prompt = (isinstance(prompt, str), record.where)

        first_is_text, first_where = self._first_prompt
        if not first_is_text or not isinstance(prompt, list) or self.data.chat_template is True:
            return
        raise UserError(
            "a data set has prompts of two kinds: text, and messages for the chat template",
            where=f"{record.where} ({self.setting})",
            expected=f"text, as in {first_where}",
            got=f"{len(prompt)} messages in `{self.data.prompt_field}`",
            fix=f"set {self.data.setting_of('chat_template')}=true, by which text is a message of the user, "
            "or convert the records",
        )

    def _require_question(self, record: Record) -> None:
        """Raise UserError for a prompt that ends with a turn of the assistant: another would follow it."""
        prompt = record.values[self.data.prompt_field]
        if isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
            return

        fix = f"remove the answer from `{self.data.prompt_field}`"
        if not self.responses:
            fix += ", or train on it: sft.data, preference.data"
        raise UserError(
            "a prompt ends with a message of the assistant, after which another one would begin",
            where=f"{record.where} ({self.setting})",
            expected="messages whose last is not the assistant's",
            got=f"the assistant's {prompt[-1]['content'][:80]!r} as the last of {len(prompt)} messages",
            fix=fix,
        )

    # Prompts and responses

    def _text_or_messages(self, value: Any, name: str, record: Record) -> Any:
        """Return a prompt or response as text or normalised messages; any other value unchanged."""
        # JSON text of messages. Without the template, any text is the prompt itself.
        if isinstance(value, str) and self.data.chat_template is not False:
            messages = _messages_in(value)
            if messages is None and name == self.data.prompt_field:
                self._reject_broken_messages(value, record)
            value = messages or value
        # A single message, or columns of messages.
        if isinstance(value, Mapping):
            messages = _messages_of_columns(value)
            if not messages and _is_message(value):
                messages = [value]
            value = messages or value
        if not isinstance(value, list) or not any(map(_is_message, value)):
            return value

        # The number of a message is the user's only way to find it in a long conversation.
        messages = []
        for number, message in enumerate(value, start=1):
            try:
                messages.append(self._message(message, record))
            except _MessageError as error:
                raise UserError(
                    f"a message {error.problem}",
                    where=f"{record.where} ({self.setting}): message {number} of `{name}`",
                    expected=error.expected,
                    got=error.got,
                    fix=error.fix,
                ) from None
        return messages

    def _reject_broken_messages(self, text: str, record: Record) -> None:
        """Raise UserError for a prompt that begins like a list of messages but is not JSON."""
        if _BEGINS_AS_MESSAGES.match(text):
            raise UserError(
                "a prompt begins as a list of messages does, and is not JSON",
                where=f"{record.where} ({self.setting})",
                expected="a list of messages, JSON text of one, or a text that is the prompt itself",
                got=repr(text[:80]),
                fix="write the messages as a list, or with json.dumps; where this text is the prompt itself, "
                f"set {self.data.setting_of('chat_template')}=false",
            )

    def _message(self, original: Any, record: Record) -> dict[str, Any]:
        """Return a message with role, content and further keys; raises _MessageError."""
        if not isinstance(original, Mapping):
            raise _MessageError("is not an object", "an object with role and content", _excerpt(original))
        message = {name: value for name, value in original.items() if value is not None}
        if record.from_table:
            message = without_nulls(message)

        # ShareGPT has `from` and `value`; a message with both forms is read as OpenAI's.
        role = message.pop("role", None)
        sharegpt_role = message.pop("from", None)
        content = message.pop("content", None)
        if content is None:
            content = message.pop("value", None)
        is_sharegpt = role is None
        result = self._role_and_calls(role or sharegpt_role, content, message, record.where, is_sharegpt)

        # Weights only have a meaning in the assistant's turns of given responses.
        _require_content(original, result)
        if self.responses and result["role"] == "assistant":
            _normalise_weight(result)
        else:
            _remove_weight(result, bool(self.responses))
        self._note_unread_keys(result, record.where)
        return result

    def _role_and_calls(
        self,
        role: Any,
        content: Any,
        message: dict[str, Any],
        location: str,
        is_sharegpt: bool,
    ) -> dict[str, Any]:
        """Return a message whose role is one of a template and whose calls are a list of objects.

        ``message`` are the further keys of the message, from which the calls are taken.
        """
        if not isinstance(role, str):
            raise _MessageError("has no role", "a role, such as user or assistant", _excerpt(role))

        # A role that the template itself names is never an alias.
        if role in _SHAREGPT_CALL and role not in self._template_words:
            calls = _sharegpt_calls(content, role)
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
            role = "assistant"
            content = ""
        elif is_sharegpt and role == "observation":
            role = "tool"
        elif role not in self._template_words:
            role = _ROLE_ALIASES.get(role, role)
        self._require_role(role)

        # OpenAI's former interface had a single `function_call`.
        call = message.pop("function_call", None)
        if call is not None and not message.get("tool_calls"):
            message["tool_calls"] = [{"type": "function", "function": call}]
        calls = message.pop("tool_calls", None)

        text = joined_text("" if content is None else content)
        result = {"role": role, "content": text, **message}
        if calls:  # templates that count calls refuse an empty list
            result["tool_calls"] = _tool_calls(calls)
            self._note_null_arguments(result["tool_calls"], location)
        return result

    def _require_role(self, role: str) -> None:
        """Raise _MessageError for a role that neither templates in general nor this template name."""
        if self.template is None or role in (*ROLES, *self._template_words):
            return

        # Suggest the role that templates have, also for a misspelt alias of it.
        suggestion = nearest(role, (*ROLES, *_ROLE_ALIASES)) or nearest(role.lower(), ROLES)
        fix = "correct the role"
        if suggestion is not None:
            fix = f"write {_ROLE_ALIASES.get(suggestion, suggestion)!r}"
        raise _MessageError(
            f"has the role {role!r}, which the chat template does not name",
            f"one of {', '.join(ROLES)}",
            repr(role),
            fix,
        )

    @cached_property
    def _template_words(self) -> frozenset[str]:
        """Quoted words of the template; the roles that it compares with are among them."""
        return frozenset(re.findall(r"""['"](\w+)['"]""", self.template or ""))

    def _tools(self, tools: Any, record: Record) -> list[Any] | None:
        """Return the tools of a record as a list of objects, None for no tools; raises UserError.

        A column of JSON text has an empty text, or ``null``, in rows without tools.
        """
        if isinstance(tools, str) and tools.strip() in ("", "null"):
            return None

        parsed = _parsed(tools)
        items = [_parsed(item) for item in parsed] if isinstance(parsed, list) else [None]
        if not all(isinstance(item, Mapping) for item in items):
            raise UserError(
                "the tools of a record are not a list of objects",
                where=f"{record.where} ({self.setting})",
                expected="a list of descriptions of functions, as transformers' apply_chat_template takes "
                "it, or JSON text of one",
                got=_excerpt(tools),
                fix=f"correct the record, or {self.data.setting_of('tools_field')}",
            )

        # Nulls in text were written by its author; nulls in a table are Arrow's.
        is_table = record.from_table and not isinstance(tools, str)
        schemas = []
        for item, value in zip(items, parsed, strict=True):
            schemas.append(schema_without_nulls(item, of_arrow=is_table and not isinstance(value, str)))
        return schemas or None

    # Fields and keys that nothing reads

    def _note_unread_fields(self, values: Mapping[str, Any], location: str) -> None:
        """Note the fields of a record that nothing reads."""
        data = self.data
        read_fields = {data.prompt_field, *self.responses, data.tools_field}
        if not self.responses:
            read_fields |= {data.ground_truth_field, data.task_field}
        # The outer field of a dotted name is read, too.
        read_fields |= {name.partition(".")[0] for name in (*data.record_fields, *self.responses) if name}

        # User code gets every further field. A field that belongs in the prompt has no effect there.
        has_metadata = not self.responses and self.consumers.metadata is not None
        for name, value in values.items():
            if name in read_fields or name in self._unread_fields or value is None or value in ([], ""):
                continue
            if not has_metadata or name in (*_PROMPT_FIELDS, *_MEDIA_FIELDS):
                self._unread_fields[name] = location

    def _unread_fields_warning(self) -> UserError:
        """Return the warning about fields that nothing reads, with the settings that could read them."""
        # Fields for which a setting, or another form of the record, exists.
        names = set(self._unread_fields)
        hints = []
        if "tools" in names and self.data.tools_field is None:
            hints.append(f"set {self.data.setting_of('tools_field')}=tools")
        if "system" in names:
            hints.append("put `system` in front of the messages, as one of the role system")
        if not names.isdisjoint(_MEDIA_FIELDS):
            hints.append("leave out records with images or sounds: prompts are text alone")
        if not self.responses and self.consumers.metadata is None:
            hints.append("a reward function or an environment gets all fields as `metadata`")

        # List the names that are read, so that a typo is easy to see.
        data = self.data
        read_names = [data.prompt_field, *self.responses, data.tools_field]
        if not self.responses:
            read_names += [data.ground_truth_field, data.task_field]
        return self._warning_of(
            "fields of records that nothing reads",
            self._unread_fields,
            expected=f"fields that a setting names: {', '.join(filter(None, read_names))}",
            fix="; ".join(hints) or "nothing, if they are not needed",
        )

    def _note_unread_keys(self, message: Mapping[str, Any], location: str) -> None:
        """Note the keys of a message that the chat template does not name."""
        if self.template is None:
            return

        for name in message:
            if name in ("role", "content", "weight", *_LINKS, *self._unread_keys):
                continue
            if not re.search(rf"\b{re.escape(name)}\b", self.template):
                self._unread_keys[name] = location

    def _note_null_arguments(self, calls: list[dict[str, Any]], location: str) -> None:
        """Note null arguments: the user wrote them, or a table was exported to JSON with them."""
        for call in calls:
            arguments = call.get("function", call)["arguments"]
            if not isinstance(arguments, Mapping):
                continue
            for name, value in arguments.items():
                if value is None:
                    self._null_arguments.setdefault(name, location)


# Messages


@dataclass
class _MessageError(Exception):
    """Mistake in a message; `RecordReader` adds the record and the number of the message."""

    problem: str
    """Rest of the sentence that begins with "a message"."""
    expected: str
    got: str
    fix: str = "correct or remove the record"


def _excerpt(value: Any) -> str:
    return f"{type(value).__name__}: {str(value)[:80]}"


def joined_text(content: Any) -> str:
    """Return the text of a message's content: text, or parts that are all text, one per line.

    vLLM joins parts in the same way for text-only models. Raises _MessageError for anything else.

    Example:
        >>> joined_text([{"type": "text", "text": "Add:"}, {"type": "text", "text": "2+2"}])
        'Add:\\n2+2'
    """
    if isinstance(content, str):
        return content

    items = content
    if isinstance(content, Mapping) and "type" in content:
        items = [content]
    if items == []:
        return ""
    if not isinstance(items, list):
        raise _MessageError(
            "has content other than text",
            "text, or a list of parts of text",
            _excerpt(content),
            "write it as text, such as JSON",
        )
    return "\n".join(map(_part_text, items))


def _part_text(item: Any) -> str:
    """Return the text of one part of a message's content; raises _MessageError for other media."""
    # A part of text may be bare, or an object whose type is left out.
    text = None
    kind = None
    if isinstance(item, str):
        text = item
    elif isinstance(item, Mapping):
        kind = item.get("type")
        fields = {name: value for name, value in item.items() if value is not None}
        if fields.get("type", "text") in _TEXT_PARTS:
            text = fields.get("text", fields.get("content"))
    if isinstance(text, str):
        return text

    problem = "has a part other than text"
    if isinstance(kind, str):
        problem = f"has a part of type {kind!r}, and models are trained on text alone"
    raise _MessageError(
        problem,
        'text, or parts such as {"type": "text", "text": "..."}',
        _excerpt(item),
        "remove the record, or its parts other than text",
    )


def without_nulls(value: Any) -> Any:
    """Return a value without the keys, at any depth, whose value is null.

    Example:
        >>> without_nulls({"city": "Oslo", "n": None, "days": [{"n": None}, None]})
        {'city': 'Oslo', 'days': [{}, None]}
    """
    if isinstance(value, Mapping):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


def schema_without_nulls(value: Any, of_arrow: bool) -> Any:
    """Return a description of a function without keys that are null.

    A null that JSON Schema allows is retained unless Arrow made it. Arrow gives every function of a column
    the properties of all others; such a property has only nulls, and is removed.

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
            # Drop properties that consisted of nulls. A schema that its author left empty ({}) stays.
            properties = {}
            for key, schema in result[name].items():
                if schema != {} or inner[key] == {}:
                    properties[key] = schema
            result[name] = properties
    return result


def _is_message(value: Any) -> bool:
    """Return whether a value looks like a message of any form: a role or sender, and content or calls."""
    if not isinstance(value, Mapping):
        return False
    has_role = value.get("role") is not None or value.get("from") is not None
    return has_role and not {"content", "value", "tool_calls", "function_call"}.isdisjoint(value)


def _messages_of_columns(value: Mapping[str, Any]) -> list[Any] | None:
    """Return the messages of a mapping of lists, the form of a ``Sequence`` of structs in ``datasets``.

    None for any other mapping.
    """
    # Columns of one length, among them the roles.
    columns = {name: column for name, column in value.items() if column is not None}
    roles = columns.get("role", columns.get("from"))
    if not isinstance(roles, list):
        return None
    for column in columns.values():
        if not isinstance(column, list) or len(column) != len(roles):
            return None

    messages: list[Any] = []
    for row in zip(*columns.values(), strict=True):
        messages.append(dict(zip(columns, row, strict=True)))
    return messages


def _messages_in(text: str) -> list[Any] | None:
    """Return the messages that a text contains as a JSON list, None for any other text."""
    parsed = _parsed(text)
    if isinstance(parsed, list) and parsed and all(map(_is_message, parsed)):
        return parsed
    return None


def _parsed(value: Any) -> Any:
    """Decode a string that contains a JSON object or list; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _sharegpt_calls(content: Any, role: str) -> list[Any]:
    """Return the tool calls that a ShareGPT message contains as JSON text; raises _MessageError."""
    parsed = _parsed(content)
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise _MessageError(
            f"of the role {role} does not call a function",
            'JSON such as {"name": "weather", "arguments": {"city": "Oslo"}}',
            _excerpt(content),
        )
    return calls


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Return calls of tools as objects that have a name and arguments; raises _MessageError."""
    parsed = _parsed(calls)
    items = parsed if isinstance(parsed, list) else [parsed]

    result = []
    for item in items:
        call = _parsed(item)
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _MessageError(
                "has a call of a tool without a name",
                'calls such as {"type": "function", "function": {"name": "...", "arguments": {...}}}',
                _excerpt(item),
            )

        # Templates print the arguments of every call, and fail for a call without arguments.
        complete = {name: value for name, value in function.items() if value is not None}
        complete["arguments"] = _parsed(complete.get("arguments", {}))
        if "function" in call:
            outer = {name: value for name, value in call.items() if value is not None}
            complete = {**outer, "function": complete}
        result.append(complete)
    return result


def _require_content(original: Mapping[str, Any], message: Mapping[str, Any]) -> None:
    """Raise _MessageError for a message without content; an empty content is valid."""
    if original.get("content") is not None or original.get("value") is not None:
        return
    has_substitute = set(message) & {"tool_calls", "reasoning_content", "thinking", "reasoning"}
    if has_substitute or message["role"] == "tool":
        return
    raise _MessageError(
        "has no content",
        "text in `content`, or calls of tools in `tool_calls`",
        f"keys {', '.join(name for name, value in original.items() if value is not None)}",
    )


def _normalise_weight(message: dict[str, Any]) -> None:
    """Replace the keys that exclude a turn from training by ``weight: 0``; remove them from a trained turn.

    `is_trained_turn` reads OpenAI's ``weight`` alone. Raises _MessageError for a weight other than 0 and 1,
    and for weights of spans of the message.
    """
    # A turn is trained on unless one of the keys excludes it.
    is_trained = True
    for name in (*_LEARNED_IF, *_LEARNED_UNLESS):
        if name not in message:
            continue
        value = message.pop(name)
        if value not in (0, 1):
            raise _MessageError(
                f"has `{name}` {value!r}, and a turn is learned or not",
                "0 or 1, true or false",
                repr(value),
                f"set `{name}` to 0 or 1",
            )
        is_trained = is_trained and bool(value) is (name in _LEARNED_IF)

    # A loss mask within a turn has no counterpart here.
    span_key = next((name for name in _PARTLY_LEARNED if message.get(name)), None)
    if span_key is not None:
        raise _MessageError(
            f"has `{span_key}`, and a turn is learned as a whole or not at all",
            "`weight` of the message",
            _excerpt(message[span_key]),
            f"remove `{span_key}`, or split the turn",
        )
    if not is_trained:
        message["weight"] = 0


def _remove_weight(message: dict[str, Any], has_responses: bool) -> None:
    """Remove the weight of a message that is never trained on; raises _MessageError for a weight of 1.

    The weights of a prompt that is sampled from have no effect, so any value is valid there.
    """
    for name in (*_LEARNED_IF, *_LEARNED_UNLESS):
        value = message.pop(name, None)
        asks_for_training = name in _LEARNED_IF and value not in (None, 0)
        if asks_for_training and has_responses:
            raise _MessageError(
                f"of the role {message['role']} has `{name}` {value!r}, and only the assistant's are learned",
                "a weight of 0, or none",
                repr(value),
                f"remove `{name}`",
            )


def template_source(template: Any) -> str | None:
    """Return the text of a tokenizer's chat template, joined for several templates by name."""
    if isinstance(template, Mapping):
        return "\n".join(text for text in template.values() if isinstance(text, str))
    if isinstance(template, Collection) and not isinstance(template, str):
        return "\n".join(str(item.get("template")) for item in template if isinstance(item, Mapping))
    return template or None
