"""How a conversation goes on as tokens: what follows a turn of the policy, without tokenising it again.

A chat template renders whole conversations, and may render an old turn otherwise than the policy wrote it.
What stands between a turn and the next one is therefore taken from a conversation made up for the purpose:
``[user, assistant(SENTINEL), *new]`` is rendered, and what follows the sentinel is the *tail*: the close of
the turn, the new messages, and the opening of the next turn.
"""

from __future__ import annotations

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
        tails = {self._tail(new)}
        for history in histories:
            with suppress(UserError):  # a template may refuse some roles
                tails.add(self._tail(new, history))
        if len(tails) > 1:
            raise _refused("what follows a turn depends on what was said before", sorted(tails))

    def start(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
        """See `ChatFormat.start`."""
        text = self._render(messages, tools)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def extend(self, last: int | None, messages: Sequence[Message]) -> list[int]:
        """See `ChatFormat.extend`."""
        tokens = self._tokenizer.encode(self._tail(messages), add_special_tokens=False)
        return tokens[1:] if tokens and tokens[0] == last else tokens

    def _tail(
        self, new: Sequence[Message], history: Sequence[Message] = ({"role": "user", "content": "a"},)
    ) -> str:
        messages = [*map(dict, history), {"role": "assistant", "content": SENTINEL}, *map(dict, new)]
        text = self._render(messages)
        before, sentinel, tail = text.rpartition(SENTINEL)
        if not sentinel or SENTINEL in before:
            raise _refused("it does not show a turn exactly once", [text])
        return tail

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
        conversation = [dict(message) for message in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    conversation, tools=tools, tokenize=False, add_generation_prompt=True
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
