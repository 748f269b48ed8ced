"""Convert records in the formats of OpenAI, TRL, verl, ShareGPT, OpenRLHF and axolotl to one normal form.

`RecordReader.read` converts every record once, both in `check` and in a run, so both accept the same records.
All other modules handle only the normal form: a prompt is text or a list of messages, a message has a role
and a text, the arguments of a tool call are an object, and tools are a list of objects. A value that cannot
be converted raises an error that names the record and the message. A field or key that no setting reads
causes one warning per data set.
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
from megatron_rl.config.sections.data import DataConfig, reserved_kwargs_error
from megatron_rl.config.sections.rewards import JudgeConfig
from megatron_rl.data.messages import (
    require_fields,
    require_last_answer,
    require_prompt,
    require_responses,
    require_template_for_messages,
    split_responses,
    with_nested_fields,
)
from megatron_rl.data.records import Record, require_encodable_text
from megatron_rl.errors import UserError, nearest
from megatron_rl.user_code import find_module

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "observation")
"""Roles that chat templates use; a template may define more."""
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
"""Role of ShareGPT or of OpenAI's former functions -> role in chat templates."""
_SHAREGPT_CALL = ("function_call", "tool_call")
"""Roles of the ShareGPT messages that contain tool calls as JSON text."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that contain text, in OpenAI's two interfaces."""
_TRAINED_IF_TRUE = ("weight", "training", "train", "loss", "step_loss_mask")
"""Keys that include a message in the loss if true, from OpenAI, axolotl (two keys), ms-swift and slime."""
_TRAINED_IF_FALSE = ("masked",)
"""Key that includes a message in the loss if false, from torchtune."""
_SPAN_WEIGHTS = ("training_detail", "train_detail")
"""Keys with which axolotl marks spans of a message as trained or not."""
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
"""Fields of records that other projects read when they render the prompt."""
_MEDIA_FIELDS = ("image", "images", "video", "videos", "audio", "audios")
_BEGINS_AS_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|from)["']\s*:""")
"""Beginning of a text that contains a list of messages, as JSON or as Python prints it."""
_CALL_ID_KEYS = ("tool_call_id", "id", "index")
"""Keys that link a message to a tool call. No warning lists them, although most templates do not use them."""
_GROUND_TRUTH = "ground_truth"
_METADATA = "metadata"
_DEFAULT_PARSER = JudgeConfig.__dataclass_fields__["parser"].default
"""Default parser of a judge's response, which reads no field of the record."""


# Settings whose functions read the fields other than the prompt


@dataclass(frozen=True)
class Consumers:
    """Settings whose functions read the ground truth or the metadata of records.

    A function is configured by a setting, for example a reward function by ``reward.function``.

    Example:
        >>> Consumers("reward.function", "reward.function").ground_truth
        'reward.function'
    """

    ground_truth: str | None
    """Setting of the function that reads the ground truth, or None if nothing reads it."""
    metadata: str | None
    """Setting of the function that gets the metadata, or None if nothing gets them.

    The metadata of a record are its fields other than the prompt and the ground truth.
    """


REWARDED = Consumers("reward", "reward")
"""`Consumers` of a run whose reward may read the ground truth and the metadata."""


def prompt_consumers(
    config: RunConfig, evaluation_set: str | None = None, source: str | None = None
) -> Consumers:
    """Find the user's functions that read the ground truth or the metadata of records.

    Returns the settings that name these functions. The metadata of a record are its fields other than the
    prompt and the ground truth. The records are from ``evaluation_set`` or from ``source`` in `data.sources`.
    If both are None, the records are from `data.train`.

    The code of a function is searched as text and not imported. A function is assumed to read the ground
    truth if its file contains the text ``ground_truth``, or does not contain the function's definition. Every
    function is assumed to read the metadata.
    """
    # If functions of several settings read a field, the last setting is returned; errors name this setting.
    setting_by_field = dict(_find_field_readers(config, evaluation_set, source))
    return Consumers(setting_by_field.get(_GROUND_TRUTH), setting_by_field.get(_METADATA))


def _find_field_readers(
    config: RunConfig, evaluation_set: str | None, source: str | None
) -> Iterator[tuple[str, str]]:
    """Yield (field, setting) for each setting whose function reads ``ground_truth`` or ``metadata``.

    ``evaluation_set`` is the evaluation set of the records, or None for training data. ``source`` is their
    source in ``data.sources``, or None.
    """
    set_config = config.evaluation.sets.get(evaluation_set or "")
    if set_config is not None:
        for name, function in set_config.user_functions().items():
            yield from _fields_read_by_code(function, f"evaluation.sets.{evaluation_set}.{name}")

    # An evaluation set without a separate reward uses the reward of the run.
    if set_config is None or set_config.reward is None:
        yield from _fields_read_by_rewards(config, source)
    if config.rollout.environment is not None:
        yield from _fields_read_by_code(config.rollout.environment.name, "rollout.environment.name")


def _fields_read_by_rewards(config: RunConfig, source: str | None) -> Iterator[tuple[str, str]]:
    """Yield (field, setting) for each reward of the run that reads a field of a record.

    ``source`` is the source of the record in ``data.sources``, or None.
    """
    # A source with its own reward function does not use the function of the run.
    reward = config.reward
    source_function = config.data.source_rewards.get(source or "")
    if source_function is not None:
        yield from _fields_read_by_code(source_function, f"data.sources.{source}.reward")
    elif reward.function is not None:
        yield from _fields_read_by_code(reward.function, "reward.function")

    # The tests of a program are its ground truth. A server and a judge read only the configured fields.
    if reward.code is not None:
        yield _GROUND_TRUTH, "reward.code"
    if reward.http is not None:
        for name in {_GROUND_TRUTH, _METADATA}.intersection(reward.http.sends):
            yield name, "reward.http.sends"
    if reward.judge is not None:
        yield from _fields_read_by_judge(reward.judge)


def _fields_read_by_judge(judge: JudgeConfig) -> Iterator[tuple[str, str]]:
    """Yield (field, setting) for each field of a record that a judge's template or parser reads."""
    # A template is text with fields in braces, or the path of a function.
    template_setting = "reward.judge.template"
    if "{" not in judge.template:
        yield from _fields_read_by_code(judge.template, template_setting)
    elif "{ground_truth}" in judge.template:
        yield _GROUND_TRUTH, template_setting
    if judge.parser != _DEFAULT_PARSER:
        yield from _fields_read_by_code(judge.parser, "reward.judge.parser")


def _fields_read_by_code(code_path: str, setting: str) -> Iterator[tuple[str, str]]:
    """Yield (field, ``setting``) for each field of a record that a user's function or class may read.

    ``code_path`` is the value of the setting: ``file.py:name`` or ``module:name``. The file is searched for
    the name of the field, and not imported.
    """
    yield _METADATA, setting

    module, _, name = code_path.rpartition(":")
    try:
        file = Path(module) if module.endswith(".py") else find_module(module)[0]
        source_code = "" if file is None else file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        source_code = ""

    # Code that is defined elsewhere and only imported here may read the ground truth.
    definition = re.search(rf"\b(def|class)\s+{re.escape(name)}\b", source_code)
    if definition is None or _GROUND_TRUTH in source_code:
        yield _GROUND_TRUTH, setting


# The reader


@dataclass
class RecordReader:
    """Reader that converts one data set's records to the normal form, and collects warnings about them."""

    data: DataConfig
    """Names of fields, and whether the chat template renders the prompts."""
    setting: str
    """Configuration key that names the data set, such as ``data.train``."""
    responses: Mapping[str, str] = field(default_factory=dict[str, str])
    """Field of responses -> setting that names the field; empty for data whose responses are sampled."""
    every_turn: bool = False
    """Whether all turns of a conversation are trained on, or only the last; see `split_responses`."""
    consumers: Consumers = REWARDED
    """Settings that read the fields other than prompt and responses."""
    template: str | None = None
    """Source text of the chat template, which may contain further roles and keys; None if not available."""

    _first_prompt: tuple[bool, str] | None = field(default=None, init=False)
    """Whether the first prompt is text, and the location of its record."""
    _unread_fields: dict[str, str] = field(default_factory=dict[str, str], init=False)
    """Field that nothing reads -> location of the first record with it."""
    _unread_keys: dict[str, str] = field(default_factory=dict[str, str], init=False)
    """Key of messages that the template does not contain -> location of the first record with it."""
    _null_arguments: dict[str, str] = field(default_factory=dict[str, str], init=False)
    """Argument of a call that is null -> location of the first record with it."""
    _unused_kwargs: dict[str, str] = field(default_factory=dict[str, str], init=False)
    """Argument of the template that the template does not contain -> location where it is first set."""

    def __post_init__(self) -> None:
        self._note_unused_kwargs(
            self.data.prompt_template.kwargs, self.data.setting_of("chat_template_kwargs")
        )

    def read(self, original: Record) -> Record:
        """Convert a record to the normal form; raises UserError for a record that cannot be converted."""
        data = self.data
        responses = self.responses
        record = with_nested_fields(original, (*data.record_fields, *responses))

        # Convert each value to the normal form.
        values = dict(record.values)
        self._note_unread_fields(values, record.where)
        for name in (data.prompt_field, *responses):
            if values.get(name) is not None:
                values[name] = self._read_text_or_messages(values[name], name, record)
        if data.tools_field is not None and values.get(data.tools_field) is not None:
            values[data.tools_field] = self._read_tools(values[data.tools_field], record)
        kwargs_field = data.chat_template_kwargs_field
        if kwargs_field is not None and values.get(kwargs_field) is not None:
            values[kwargs_field] = self._read_template_kwargs(values[kwargs_field], record)
        record = replace(record, values=values)

        # Split before validation: splitting may create the field of a response from the prompt's messages.
        if responses:
            record = split_responses(record, data.prompt_field, responses, self.every_turn, self.setting)

        # Check that the fields exist, then validate their values.
        self._require_fields(record)
        require_responses(record, responses, self.setting)
        self._reject_messages_after_text(record)
        require_prompt(record, data, self.setting)
        require_template_for_messages(record, responses, data, self.setting)
        self._reject_final_answer(record)
        if not isinstance(record.values[data.prompt_field], str):
            # Messages parsed from JSON text in a field may contain invalid escapes that the record's parser
            # could not detect.
            require_encodable_text(record.values, f"{record.where} ({self.setting})")
        return record

    def warnings(self) -> Iterator[UserError]:
        """Yield the warnings about the records that have been read so far."""
        if self._unread_fields:
            yield self._unread_fields_warning()

        # Keys of messages that neither this class nor the chat template reads.
        if self._unread_keys:
            yield self._names_warning(
                "keys of messages that nothing reads",
                self._unread_keys,
                expected="role and content, and keys that the chat template names",
                fix="remove the keys if they are not needed, or give the model a chat template that has them",
            )

        # The chat template renders a null argument of a tool call as text, and the model learns to write it.
        if self._null_arguments:
            yield self._names_warning(
                "arguments of calls that are null, and the model is trained to write them",
                self._null_arguments,
                expected="only the arguments that a call sets",
                fix="remove them, if they were added when a table was exported to JSON",
            )

        # The user may have misspelt an argument: suggest similar names that the template contains.
        if self._unused_kwargs:
            template_names = re.findall(r"\b[a-z_]\w+\b", self.template or "")
            suggestions = [nearest(name, template_names) for name in self._unused_kwargs]
            fix = "correct their names, or remove them"
            if any(suggestions):
                fix = f"did you mean {', '.join(filter(None, suggestions))}? Otherwise remove them"
            yield self._names_warning(
                "arguments of the chat template that it does not use",
                self._unused_kwargs,
                expected="arguments that the template of model.path names",
                fix=fix,
            )

    def warning_lines(self) -> tuple[str, ...]:
        """Return the warnings for the console, one line each."""
        return tuple(f"warning: {error.message} ({error.got}); {error.fix}" for error in self.warnings())

    def _names_warning(
        self,
        message: str,
        first_records: Mapping[str, str],
        *,
        expected: str,
        fix: str,
    ) -> UserError:
        """Return a warning that lists names; ``first_records`` maps each name to the first record with it."""
        return UserError(
            f"{message}: {', '.join(f'`{name}`' for name in first_records)}",
            where=self.setting,
            expected=expected,
            got=", ".join(f"`{name}` first in {location}" for name, location in first_records.items()),
            fix=fix,
        )

    # Rules on a complete record

    def _require_fields(self, record: Record) -> None:
        """Raise UserError for a record without a prompt, a response, or a required ground truth."""
        data = self.data
        other_fields = [data.tools_field, data.task_field, data.chat_template_kwargs_field]
        if not self.responses:
            other_fields.append(data.ground_truth_field)
        require_last_answer(record, data.prompt_field, self.responses, self.setting)
        require_fields(record, data.prompt_fields | dict(self.responses), self.setting, other_fields)

        # The ground truth is required only if some code may read it.
        reader = self.consumers.ground_truth
        if self.responses or reader is None:
            return
        try:
            require_fields(record, data.reward_fields, self.setting)
        except UserError as error:
            alternative = f"if the data have no ground truth, make {reader} not read `ground_truth`"
            raise replace(error, fix=f"{error.fix}; {alternative}") from None

    def _reject_messages_after_text(self, record: Record) -> None:
        """Raise UserError for a prompt of messages in a data set whose first prompt is plain text.

        The opposite order is valid: if the first prompt is messages, the chat template renders all prompts,
        and a prompt of plain text becomes a message of the user.
        """
        prompt = record.values[self.data.prompt_field]
        if self._first_prompt is None:
            self._first_prompt = (isinstance(prompt, str), record.where)

        first_is_text, first_location = self._first_prompt
        if not first_is_text or not isinstance(prompt, list) or self.data.chat_template is True:
            return
        raise UserError(
            "a data set has prompts of two kinds: text, and messages for the chat template",
            where=f"{record.where} ({self.setting})",
            expected=f"text, as in {first_location}",
            got=f"{len(prompt)} messages in `{self.data.prompt_field}`",
            fix=f"set {self.data.setting_of('chat_template')}=true, so that a text becomes a message of "
            "the user; or convert the records",
        )

    def _reject_final_answer(self, record: Record) -> None:
        """Raise UserError for a prompt whose last message is the assistant's."""
        prompt = record.values[self.data.prompt_field]
        if isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
            return

        fix = f"remove the answer from `{self.data.prompt_field}`"
        if not self.responses:
            fix += ", or train on it: sft.data, preference.data"
        raise UserError(
            "a prompt ends with a message of the assistant, after which another one would begin",
            where=f"{record.where} ({self.setting})",
            expected="messages that end with a message of another role",
            got=f"the assistant's {prompt[-1]['content'][:80]!r} as the last of {len(prompt)} messages",
            fix=fix,
        )

    # Prompts and responses

    def _read_text_or_messages(self, value: Any, name: str, record: Record) -> Any:
        """Convert a prompt or response to text or normalised messages; return any other value unchanged."""
        # The value may be JSON text of messages. Without the template, any text is the prompt itself.
        if isinstance(value, str) and self.data.chat_template is not False:
            messages = _parse_messages(value)
            if messages is None and name == self.data.prompt_field:
                self._reject_broken_messages(value, record)
            if messages:
                value = messages

        # The value may also be a single message, or a mapping of columns.
        if isinstance(value, Mapping):
            messages = _messages_of_columns(value)
            if not messages and _is_message(value):
                messages = [value]
            if messages:
                value = messages
        if not isinstance(value, list) or not any(map(_is_message, value)):
            return value

        # Add the message's number to errors: without it the user cannot find it in a long conversation.
        messages = []
        for number, message in enumerate(value, start=1):
            try:
                messages.append(self._read_message(message, record))
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
        """Raise UserError for prompt text that begins like a list of messages but is not JSON."""
        if _BEGINS_AS_MESSAGES.match(text):
            raise UserError(
                "a prompt begins like a list of messages, but is not JSON",
                where=f"{record.where} ({self.setting})",
                expected="a list of messages, JSON text of such a list, or a plain-text prompt",
                got=repr(text[:80]),
                fix="write the messages as a list, or with json.dumps; if this text is the prompt itself, "
                f"set {self.data.setting_of('chat_template')}=false",
            )

    def _read_message(self, original: Any, record: Record) -> dict[str, Any]:
        """Convert a message to the normal form: a mapping with role, content and the message's other keys.

        Raises _MessageError for a value that is not a message.
        """
        if not isinstance(original, Mapping):
            raise _MessageError("is not an object", "an object with role and content", _excerpt(original))
        message = {name: value for name, value in original.items() if value is not None}
        if record.from_table:
            message = remove_nulls(message)

        # ShareGPT has `from` and `value`; a message with both forms is read as OpenAI's.
        role = message.pop("role", None)
        sharegpt_role = message.pop("from", None)
        content = message.pop("content", None)
        if content is None:
            content = message.pop("value", None)
        is_sharegpt = role is None
        result = self._read_role_and_calls(role or sharegpt_role, content, message, record.where, is_sharegpt)

        # A loss weight has an effect only in an assistant turn of a response that the data set contains.
        _require_content(original, result)
        if self.responses and result["role"] == "assistant":
            _normalise_weight(result)
        else:
            _remove_weight(result, bool(self.responses))
        self._note_unread_keys(result, record.where)
        return result

    def _read_role_and_calls(
        self,
        role: Any,
        content: Any,
        message: dict[str, Any],
        location: str,
        is_sharegpt: bool,
    ) -> dict[str, Any]:
        """Build a message from its role, content and other keys, with tool calls in OpenAI's format.

        ``message`` contains the other keys; keys of calls are removed from it. Raises _MessageError for an
        invalid role, content or call.
        """
        if not isinstance(role, str):
            raise _MessageError("has no role", "a role, such as user or assistant", _excerpt(role))

        # A role that the template itself contains is never replaced.
        if role in _SHAREGPT_CALL and role not in self._template_words:
            calls = _parse_sharegpt_calls(content, role)
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

        text = join_text_parts("" if content is None else content)
        result = {"role": role, "content": text, **message}
        if calls:  # templates that count calls refuse an empty list
            result["tool_calls"] = _parse_tool_calls(calls)
            self._note_null_arguments(result["tool_calls"], location)
        return result

    def _require_role(self, role: str) -> None:
        """Raise _MessageError for a role that is neither in `ROLES` nor in this template."""
        if self.template is None or role in (*ROLES, *self._template_words):
            return

        # Suggest the most similar role; for a misspelt alias, the role that it stands for.
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
        """Quoted strings in the template's source, which include the roles that the template supports."""
        return frozenset(re.findall(r"""['"](\w+)['"]""", self.template or ""))

    def _read_tools(self, tools: Any, record: Record) -> list[Any] | None:
        """Convert the tools of a record to a list of objects; return None for a record without tools.

        A column of JSON text has an empty text or ``null`` in rows without tools. Raises UserError for a
        value that is not a list of objects.
        """
        if isinstance(tools, str) and tools.strip() in ("", "null"):
            return None

        values = _parse_json(tools)
        schemas = [_parse_json(value) for value in values] if isinstance(values, list) else [None]
        if not all(isinstance(schema, Mapping) for schema in schemas):
            raise UserError(
                "the tools of a record are not a list of objects",
                where=f"{record.where} ({self.setting})",
                expected="a list of tool schemas for apply_chat_template of transformers, or JSON text of "
                "such a list",
                got=_excerpt(tools),
                fix=f"correct the record, or {self.data.setting_of('tools_field')}",
            )

        # Nulls in JSON text were written by its author; nulls in a table come from Arrow.
        is_table = record.from_table and not isinstance(tools, str)
        cleaned_schemas = []
        for schema, value in zip(schemas, values, strict=True):
            from_arrow = is_table and not isinstance(value, str)
            cleaned_schemas.append(remove_schema_nulls(schema, from_arrow=from_arrow))
        return cleaned_schemas or None

    def _read_template_kwargs(self, value: Any, record: Record) -> dict[str, Any] | None:
        """Convert the chat template's arguments of a record to a mapping; return None without arguments.

        Raises UserError for a value that is neither a mapping nor its JSON text, and for an argument that
        the renderer passes itself.
        """
        if isinstance(value, str) and value.strip() in ("", "null"):
            return None

        kwargs = _parse_json(value)
        key = self.data.setting_of("chat_template_kwargs_field")
        if not isinstance(kwargs, Mapping):
            raise UserError(
                "the chat template's arguments of a record are not a mapping",
                where=f"{record.where} ({self.setting})",
                expected="names and values, such as {enable_thinking: false}, or JSON text of them",
                got=_excerpt(value),
                fix=f"correct `{self.data.chat_template_kwargs_field}` of the record, or set {key}",
            )
        error = reserved_kwargs_error(
            kwargs,
            where=f"{record.where} ({self.setting})",
            container=f"`{self.data.chat_template_kwargs_field}` of the record",
        )
        if error is not None:
            raise error

        # In a row of a table, null means that the row lacks the argument, so remove it. In JSON text the user
        # has written the null, so keep it.
        if record.from_table and not isinstance(value, str):
            kwargs = remove_nulls(kwargs)
        self._note_unused_kwargs(kwargs, record.where)
        if not kwargs:
            return None
        return dict(kwargs)

    # Fields and keys that nothing reads

    def _note_unused_kwargs(self, kwargs: Mapping[str, Any], location: str) -> None:
        """Record template arguments that the chat template does not contain, for a warning."""
        if self.template is None:
            return
        for name in kwargs:
            if not re.search(rf"\b{re.escape(name)}\b", self.template):
                self._unused_kwargs.setdefault(name, location)

    def _note_unread_fields(self, values: Mapping[str, Any], location: str) -> None:
        """Collect the fields of a data record that nothing reads, for a warning.

        ``values`` are the fields of the record by name, ``location`` is the record's file and line.
        """
        data = self.data
        read_fields = {data.prompt_field, *self.responses, data.tools_field}
        if not self.responses:
            read_fields |= {data.ground_truth_field, data.task_field}
        # The outer field of a dotted name is read, too.
        read_fields |= {name.partition(".")[0] for name in (*data.record_fields, *self.responses) if name}

        # A reward function or an environment gets all other fields as metadata, so do not warn about them.
        # However, fields such as `system` and `images` are meant for the prompt and have no effect on it, so
        # always warn about them.
        has_metadata = not self.responses and self.consumers.metadata is not None
        for name, value in values.items():
            if name in read_fields or name in self._unread_fields or value is None or value in ([], ""):
                continue
            if not has_metadata or name in (*_PROMPT_FIELDS, *_MEDIA_FIELDS):
                self._unread_fields[name] = location

    def _unread_fields_warning(self) -> UserError:
        """Return the warning about fields that nothing reads, with hints for well-known fields."""
        # Give a hint for each field that has an effect under another setting or in another format.
        names = set(self._unread_fields)
        hints = []
        if "tools" in names and self.data.tools_field is None:
            hints.append(f"set {self.data.setting_of('tools_field')}=tools")
        if "system" in names:
            hints.append("put `system` before the messages, as a message of the role system")
        if "enable_thinking" in names:
            hints.append("put `enable_thinking` into a mapping in the field `chat_template_kwargs`")
        if not names.isdisjoint(_MEDIA_FIELDS):
            hints.append("leave out records with images or sounds: prompts are only text")
        if not self.responses and self.consumers.metadata is None:
            hints.append("a reward function or an environment gets all fields as `metadata`")

        # List the names of the fields that are read, so that the user can spot a typo.
        data = self.data
        read_names = [data.prompt_field, *self.responses, data.tools_field, data.chat_template_kwargs_field]
        if not self.responses:
            read_names += [data.ground_truth_field, data.task_field]
        return self._names_warning(
            "fields of records that nothing reads",
            self._unread_fields,
            expected=f"fields that a setting names: {', '.join(filter(None, read_names))}",
            fix="; ".join(hints) or "nothing, if they are not needed",
        )

    def _note_unread_keys(self, message: Mapping[str, Any], location: str) -> None:
        """Record keys of a message that the chat template does not contain, for a warning."""
        if self.template is None:
            return

        for name in message:
            if name in ("role", "content", "weight", *_CALL_ID_KEYS, *self._unread_keys):
                continue
            if not re.search(rf"\b{re.escape(name)}\b", self.template):
                self._unread_keys[name] = location

    def _note_null_arguments(self, calls: list[dict[str, Any]], location: str) -> None:
        """Record the null arguments of tool calls, for a warning."""
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
    """Error in a message; `RecordReader` adds the record and the number of the message."""

    problem: str
    """Rest of a sentence that begins with "a message"."""
    expected: str
    got: str
    fix: str = "correct or remove the record"


def _excerpt(value: Any) -> str:
    """Return the type and the first characters of a value, for errors."""
    return f"{type(value).__name__}: {str(value)[:80]}"


def join_text_parts(content: Any) -> str:
    """Return the text of a message's content; text parts are joined by line breaks, as in vLLM.

    Raises _MessageError for any other content.

    Example:
        >>> join_text_parts([{"type": "text", "text": "Add:"}, {"type": "text", "text": "2+2"}])
        'Add:\\n2+2'
    """
    if isinstance(content, str):
        return content

    content_parts = content
    if isinstance(content, Mapping) and "type" in content:
        content_parts = [content]
    if content_parts == []:
        return ""
    if not isinstance(content_parts, list):
        raise _MessageError(
            "has content other than text",
            "text, or a list of parts of text",
            _excerpt(content),
            "write it as text, such as JSON",
        )
    return "\n".join(map(_part_text, content_parts))


def _part_text(content_part: Any) -> str:
    """Return the text of one part of a message's content; raises _MessageError for images and audio."""
    # A part may be bare text, or an object with or without a type.
    text = None
    part_type = None
    if isinstance(content_part, str):
        text = content_part
    elif isinstance(content_part, Mapping):
        part_type = content_part.get("type")
        fields = {name: value for name, value in content_part.items() if value is not None}
        if fields.get("type", "text") in _TEXT_PARTS:
            text = fields.get("text", fields.get("content"))
    if isinstance(text, str):
        return text

    problem = "has a part other than text"
    if isinstance(part_type, str):
        problem = f"has a part of type {part_type!r}, and models are trained only on text"
    raise _MessageError(
        problem,
        'text, or parts such as {"type": "text", "text": "..."}',
        _excerpt(content_part),
        "remove the record, or its parts other than text",
    )


def remove_nulls(value: Any) -> Any:
    """Remove the keys with value null from a value, at any depth.

    Example:
        >>> remove_nulls({"city": "Oslo", "n": None, "days": [{"n": None}, None]})
        {'city': 'Oslo', 'days': [{}, None]}
    """
    if isinstance(value, Mapping):
        return {name: remove_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [remove_nulls(inner) for inner in value]
    return value


def remove_schema_nulls(value: Any, from_arrow: bool) -> Any:
    """Remove the keys with value null from the JSON Schema of a function.

    ``from_arrow``: whether the schema was read from an Arrow column. Arrow gives every function of a column
    the properties of all functions, filled with nulls; these properties are removed. Other schemas retain a
    null where JSON Schema allows it, such as for ``default``.

    Example:
        >>> remove_schema_nulls({"properties": {"n": {"type": None}, "m": {"default": None}}}, False)
        {'properties': {'m': {'default': None}}}
    """
    if isinstance(value, list):
        return [remove_schema_nulls(inner, from_arrow) for inner in value]
    if not isinstance(value, Mapping):
        return value

    result = {}
    for name, inner in value.items():
        if inner is None and (from_arrow or name not in _SCHEMA_VALUES):
            continue
        result[name] = remove_schema_nulls(inner, from_arrow)
        if name == "properties" and isinstance(inner, Mapping):
            # Remove properties that consisted of nulls. Keep a schema that is empty ({}) in the original.
            properties = {}
            for key, schema in result[name].items():
                if schema != {} or inner[key] == {}:
                    properties[key] = schema
            result[name] = properties
    return result


def _is_message(value: Any) -> bool:
    """Return whether a value is a message of OpenAI or ShareGPT: it has a role, and content or tool calls."""
    if not isinstance(value, Mapping):
        return False
    has_role = value.get("role") is not None or value.get("from") is not None
    return has_role and not {"content", "value", "tool_calls", "function_call"}.isdisjoint(value)


def _messages_of_columns(value: Mapping[str, Any]) -> list[Any] | None:
    """Convert a mapping of columns to messages; return None for any other mapping.

    HF ``datasets`` stores a ``Sequence`` of structs as a mapping of each key to the list of its values.
    """
    # Every column must have one value per role.
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


def _parse_messages(text: str) -> list[Any] | None:
    """Parse a text that is a JSON list of messages; return None for any other text."""
    parsed = _parse_json(text)
    if isinstance(parsed, list) and parsed and all(map(_is_message, parsed)):
        return parsed
    return None


def _parse_json(value: Any) -> Any:
    """Decode a string that contains a JSON object or list; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _parse_sharegpt_calls(content: Any, role: str) -> list[Any]:
    """Parse the tool calls in the JSON text of a ShareGPT message; raises _MessageError for other text."""
    parsed = _parse_json(content)
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise _MessageError(
            f"of the role {role} does not call a function",
            'JSON such as {"name": "weather", "arguments": {"city": "Oslo"}}',
            _excerpt(content),
        )
    return calls


def _parse_tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Convert tool calls to objects with a name and arguments; raises _MessageError for other values."""
    parsed = _parse_json(calls)
    original_calls = parsed if isinstance(parsed, list) else [parsed]

    converted_calls = []
    for original_call in original_calls:
        call = _parse_json(original_call)
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _MessageError(
                "has a tool call without a name",
                'calls such as {"type": "function", "function": {"name": "...", "arguments": {...}}}',
                _excerpt(original_call),
            )

        # Give every call arguments: templates print them, and fail for a call without arguments.
        converted_call = {name: value for name, value in function.items() if value is not None}
        converted_call["arguments"] = _parse_json(converted_call.get("arguments", {}))
        if "function" in call:
            outer_fields = {name: value for name, value in call.items() if value is not None}
            converted_call = {**outer_fields, "function": converted_call}
        converted_calls.append(converted_call)
    return converted_calls


def _require_content(original: Mapping[str, Any], message: Mapping[str, Any]) -> None:
    """Raise _MessageError for a message without content, unless it has tool calls or reasoning.

    ``original`` is the message before its conversion to ``message``. Empty content is valid.
    """
    if original.get("content") is not None or original.get("value") is not None:
        return
    has_calls_or_reasoning = set(message) & {"tool_calls", "reasoning_content", "thinking", "reasoning"}
    if has_calls_or_reasoning or message["role"] == "tool":
        return
    raise _MessageError(
        "has no content",
        "text in `content`, or tool calls in `tool_calls`",
        f"keys {', '.join(name for name, value in original.items() if value is not None)}",
    )


def _normalise_weight(message: dict[str, Any]) -> None:
    """Remove the loss-weight keys of a turn; add OpenAI's ``weight: 0`` unless the turn is trained on.

    Raises _MessageError for a weight other than 0 and 1, and for a key that weights parts of a message
    separately.
    """
    # A turn is trained on unless one of the keys excludes it.
    is_trained = True
    for name in (*_TRAINED_IF_TRUE, *_TRAINED_IF_FALSE):
        if name not in message:
            continue
        value = message.pop(name)
        if value not in (0, 1):
            raise _MessageError(
                f"has `{name}` {value!r}, and a turn is trained on completely or not at all",
                "0 or 1, true or false",
                repr(value),
                f"set `{name}` to 0 or 1",
            )
        if bool(value) != (name in _TRAINED_IF_TRUE):
            is_trained = False

    # A loss mask within a turn is not supported.
    span_key = next((name for name in _SPAN_WEIGHTS if message.get(name)), None)
    if span_key is not None:
        raise _MessageError(
            f"has `{span_key}`, and a turn is trained on completely or not at all",
            "`weight` of the message",
            _excerpt(message[span_key]),
            f"remove `{span_key}`, or split the turn",
        )
    if not is_trained:
        message["weight"] = 0


def _remove_weight(message: dict[str, Any], has_responses: bool) -> None:
    """Remove the loss weight of a message that is never trained on.

    In data with responses (``has_responses``), only messages of the assistant are trained on. If any other
    message has a weight of 1, raises _MessageError. In data without responses every weight is valid, because
    weights have no effect.
    """
    for name in (*_TRAINED_IF_TRUE, *_TRAINED_IF_FALSE):
        value = message.pop(name, None)
        is_trained = name in _TRAINED_IF_TRUE and value not in (None, 0)
        if is_trained and has_responses:
            raise _MessageError(
                f"of the role {message['role']} has `{name}` {value!r}, "
                "and only the assistant's are trained on",
                "a weight of 0, or none",
                repr(value),
                f"remove `{name}`",
            )


def template_source(template: Any) -> str | None:
    """Return the source text of a tokenizer's chat template, or None without a template.

    A tokenizer may have several templates, in a mapping or in a list. Their texts are joined by line breaks.
    """
    if isinstance(template, Mapping):
        return "\n".join(text for text in template.values() if isinstance(text, str))
    if isinstance(template, Collection) and not isinstance(template, str):
        return "\n".join(str(item.get("template")) for item in template if isinstance(item, Mapping))
    return template or None
