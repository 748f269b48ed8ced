"""How a conversation goes on as tokens: what follows a turn of the policy, without tokenising it again.

A chat template renders whole conversations, and may render an old turn otherwise than the policy wrote it.
What stands between a turn and the next one is therefore taken from a conversation made up for the purpose:
``[user, assistant(SENTINEL), *new]`` is rendered, and what follows the sentinel is the *tail*: the close of
the turn, the new messages, and the opening of the next turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
SENTINEL = "⸢turn⸣"
_WHERE = "the chat template of model.path"
_ASKED = ({"role": "user", "content": "a"},)
_TURN = {"role": "assistant", "content": SENTINEL}


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them, without what is null, and with arguments as objects.

    Tables hold null where a message lacks a field, and OpenAI's format has the arguments of a call as JSON.
    """
    result = []
    for message in messages:
        fields = {name: value for name, value in message.items() if value is not None}
        if "content" in message:
            fields.setdefault("content", "")
        if "tool_calls" in fields:
            fields["tool_calls"] = [_with_arguments(call) for call in fields["tool_calls"]]
        result.append(fields)
    return result


def _with_arguments(call: Any) -> Any:
    """Return a call of a tool with its arguments as an object, where they are one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    with suppress(ValueError):
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    return call


class ChatFormat(Protocol):
    """Say which tokens follow a turn of the policy."""

    def start(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
        """Return the tokens of a prompt of ``messages``, with ``tools``; raises UserError."""
        ...

    def extend(self, last: int | None, messages: Sequence[Message]) -> list[int]:
        """Return the tokens between a turn and the next, in which ``messages`` are observed.

        ``last`` is the stop token that ended the turn, which the tail does not repeat; None where a limit
        ended it.
        """
        ...

    def text(self, tokens: Sequence[int], special: bool = False) -> str:
        """Return what the policy wrote, with special tokens or without."""
        ...


class PlainText:
    """Put what is observed behind the turn, as it is: for prompts without a chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer

    def start(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
        """See `ChatFormat.start`."""
        if tools:
            raise _refused("it has no place for tools", ["prompts without a chat template"])
        return self._tokenizer.encode("".join(message["content"] for message in messages))

    def extend(self, last: int | None, messages: Sequence[Message]) -> list[int]:
        """See `ChatFormat.extend`."""
        text = "".join(message["content"] for message in messages)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def text(self, tokens: Sequence[int], special: bool = False) -> str:
        """See `ChatFormat.text`."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=not special)


class ChatTemplate(PlainText):
    """Put the tail that the tokenizer's chat template makes behind the turn.

    The constructor raises UserError for a template whose tail depends on what was said before, or that has
    none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        new = [{"role": "user", "content": "Go on."}]
        histories = (
            [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}],
            [
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d"},
                {"role": "user", "content": "e"},
            ],
        )
        tails = {self.tail(new)}
        for history in histories:
            with suppress(UserError):  # a template may refuse some roles
                tails.add(self.tail(new, history))
        if len(tails) > 1:
            raise _refused("what follows a turn depends on what was said before", sorted(tails))

    def start(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
        """See `ChatFormat.start`."""
        text = self._render(messages, tools)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def extend(self, last: int | None, messages: Sequence[Message]) -> list[int]:
        """See `ChatFormat.extend`."""
        tokens = self._tokenizer.encode(self.tail(messages), add_special_tokens=False)
        return tokens[1:] if tokens and tokens[0] == last else tokens

    def tail(self, new: Sequence[Mapping[str, Any]], history: Sequence[Message] = _ASKED) -> str:
        """Return the text between a turn that follows ``history`` and the next, ``new`` in between.

        Raises UserError where the template leaves out what a message says.
        """
        tail = self._behind([*history, _TURN, *new])
        for at, message in enumerate(new):
            if str(message.get("content") or "").strip() not in tail:  # it may be written otherwise, or not
                changed = [*new[:at], {**message, "content": "?"}, *new[at + 1 :]]
                if self._behind([*history, _TURN, *changed]) == tail:
                    raise _refused(f"it leaves out what a message of {message.get('role')} says", [tail])
        return tail

    def said(self, message: Mapping[str, Any]) -> str:
        """Return what the assistant writes in a message: text, calls and thoughts as the template has them.

        The end of the turn is not part of it. Raises UserError where the template leaves some of it out, or
        shows it otherwise than it opens and ends a turn.
        """
        plain = {"role": "assistant", "content": message.get("content") or ""}
        whole = self._render([*_ASKED, message], opens=False)
        if whole == self._render([*_ASKED, plain], opens=False):
            unsaid = [name for name in ("tool_calls", "reasoning_content") if message.get(name)]
            if unsaid:
                raise _refused(f"it leaves out the {unsaid[0]} of a message", [whole])
            return plain["content"]
        opening, close = self._render(_ASKED), self._behind([*_ASKED, _TURN], opens=False)
        if not (whole.startswith(opening) and whole.endswith(close)):
            raise _refused("a turn does not stand between what opens and what ends one", [whole])
        return whole[len(opening) : len(whole) - len(close)]

    def _behind(self, messages: Sequence[Mapping[str, Any]], opens: bool = True) -> str:
        """Return what is rendered behind the sentinel of ``messages``."""
        text = self._render(messages, opens=opens)
        before, sentinel, tail = text.rpartition(SENTINEL)
        if not sentinel or SENTINEL in before:
            raise _refused("it does not show a turn exactly once", [text])
        return tail

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, opens: bool = True) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    template_messages(messages), tools=tools, tokenize=False, add_generation_prompt=opens
                )
            )
        except Exception as error:  # templates raise jinja errors of many kinds
            raise _refused("it refuses the messages", [str(error)]) from None


def _refused(why: str, got: Sequence[str]) -> UserError:
    return UserError(
        f"conversations cannot be made with this chat template: {why}",
        where=_WHERE,
        expected="a template that renders each message behind those before",
        got=" and ".join(repr(text[:80]) for text in got[:2]),
        fix="give the tokenizer another chat_template, or use strings as prompts (data.chat_template=false)",
    )


class ChatFormats:
    """Hold the format of the data's ``prompts``, and of conversations that an environment ``opened``.

    ``templated`` says whether the prompts went through the tokenizer's chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, templated: bool = False) -> None:
        self.prompts: ChatFormat = ChatTemplate(tokenizer) if templated else PlainText(tokenizer)
        self._tokenizer = tokenizer

    @cached_property
    def opened(self) -> ChatFormat:
        """Put messages through the template where there is one, also beside prompts that are text."""
        has = getattr(self._tokenizer, "chat_template", None)
        return ChatTemplate(self._tokenizer) if has else PlainText(self._tokenizer)
