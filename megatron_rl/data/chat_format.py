"""What a chat template writes of conversations: prompts, the turns that are learned, and what stands between.

A chat template renders whole conversations, and may render an old turn otherwise than the policy wrote it.
What stands between a turn and the next one is therefore taken from a conversation made up for the purpose:
``[…, assistant(SENTINEL), *new]`` is rendered, and what follows the sentinel is the *tail*: the close of the
turn, the new messages, and the opening of the next turn. A turn that is learned is what the template writes
behind the opening of the turn, up to the first token that ends a response.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.data.template_renderer import Rendering, RenderRefused, TemplateRenderer, renderer_of
from megatron_rl.data.visible_text import VisibleText
from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
SENTINEL = "⸢turn⸣"
_WHERE = "the chat template of model.path"
_ASKED = ({"role": "user", "content": "a"},)
_NEXT = ({"role": "user", "content": "Go on."},)
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


def _has_thoughts(message: Message) -> bool:
    return bool(message.get("reasoning_content")) or "</think>" in str(message.get("content") or "")


def cut_at_end(text: str, ends: Sequence[str]) -> str | None:
    """Return ``text`` up to the first of the end tokens that it ends with; None where it ends with none.

    Whitespace behind and between these tokens is no part of a response: ``4<end>\\n<eos>`` is ``4<end>``.
    """
    rest, length = text.rstrip(), None
    while end := next((end for end in ends if rest.endswith(end)), None):
        length = len(rest)
        rest = rest[: -len(end)].rstrip()
    return None if length is None else text[:length]


def leading_end(text: str, ends: Sequence[str]) -> str:
    """Return the end token that ``text`` begins with, and the whitespace before it; empty without one."""
    stripped = text.lstrip()
    end = next((end for end in ends if stripped.startswith(end)), None)
    return "" if end is None else text[: len(text) - len(stripped) + len(end)]


@dataclass(frozen=True)
class Learned:
    """A conversation from its first learned turn on: ``prompt``, then what is said, read, said …, as text.

    ``as_written`` is false where the template writes the whole conversation otherwise: the thoughts of
    earlier turns left out, tools moved to a later message.
    """

    prompt: str
    pieces: list[str]
    as_written: bool


class ConversationText:
    """A chat template and the texts of the tokens that end responses.

    Methods raise UserError where the template refuses messages, or leaves out what they say.
    """

    def __init__(self, renderer: TemplateRenderer, ends: Sequence[str] = ()) -> None:
        self._renderer = renderer
        self._has_steady_tails = False
        self.ends = sorted(ends, key=len, reverse=True)

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> str:
        """Return messages with the opening of the assistant's turn behind them."""
        (text,) = self._render(Rendering(messages, tools))
        return text

    def require_steady_tails(self) -> None:
        """Raise UserError where what follows a turn depends on what was said before it."""
        if self._has_steady_tails:
            return
        histories = (
            [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}],
            [
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d"},
                {"role": "user", "content": "e"},
            ],
        )
        tails = {self.tail(_NEXT)}
        for history in histories:
            with suppress(UserError):  # a template may refuse some roles
                tails.add(self.tail(_NEXT, history))
        if len(tails) > 1:
            raise _refused("what follows a turn depends on what was said before", sorted(tails))
        self._has_steady_tails = True

    def tail(self, new: Sequence[Message], history: Sequence[Message] = _ASKED) -> str:
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

    @cached_property
    def behind_turn(self) -> str | None:
        """Return what the template writes behind a turn; None where it makes no conversation of two.

        Some write nothing there, and end a turn by opening the next: then it is what a message of the user
        makes of it.
        """
        with suppress(UserError):
            close = self._behind([*_ASKED, _TURN], opens=False)
            return close if close.strip() else self._behind([*_ASKED, _TURN, *_NEXT])
        return None

    @cached_property
    def lead(self) -> str:
        """Return the whitespace that the template writes between the opening of a turn and its text."""
        with suppress(UserError):
            opening, turn = self._render(Rendering(_ASKED), Rendering([*_ASKED, _TURN], None, False))
            before = turn.partition(SENTINEL)[0]
            lead = before[len(opening) :] if before.startswith(opening) else ""
            return "" if lead.strip() else lead
        return ""

    @cached_property
    def opening(self) -> str:
        """Return the text that opens the assistant's turn; empty where the template writes none."""
        with suppress(UserError):
            closed, opened = self._render(Rendering(_ASKED, None, False), Rendering(_ASKED))
            return opened[len(closed) :] if opened.startswith(closed) else ""
        return ""

    def response(self, text: str) -> str:
        """Return a response that is given as text, as it stands behind a prompt of the template.

        What opens a turn is left out where it is repeated, whitespace is written as the template writes it,
        and a response has one end.
        """
        opening = self.opening.strip()
        if opening and text.lstrip().startswith(opening):
            text = text.lstrip()[len(opening) :].lstrip("\n")
        bos = self._renderer.special.get("bos_token")
        if bos:  # the prompt has it
            text = text.removeprefix(bos)

        if text and not text[0].isspace():
            text = self.lead + text
        return cut_at_end(text, self.ends) or text + self._turn_end

    def learned(self, asked: Sequence[Message], answered: Sequence[Message], tools: Any) -> Learned:
        """Return the conversation in which the assistant's messages of ``answered`` are learned.

        ``answered`` begins and ends with one of them.
        """
        said = [at for at, message in enumerate(answered) if message["role"] == "assistant"]
        if len(said) > 1:
            self.require_steady_tails()

        prompt, pieces, whole = "", list[str](), ""
        for number, at in enumerate(said):
            history = [*asked, *answered[:at]]
            opening, whole = self._render(
                Rendering(history, tools), Rendering([*history, answered[at]], tools, False)
            )
            prompt = prompt or opening
            turn = self._turn(answered[at], history, tools, opening, whole)

            following = said[number + 1] if number + 1 < len(said) else None
            if following is None:
                turn = turn if cut_at_end(turn, self.ends) else turn + self._turn_end
                pieces.append(turn)
                continue

            # A turn without thoughts is written as it is read later: some templates write empty thoughts in
            # the last turn alone. Thoughts that are said are learned, though later turns do not show them.
            tail = self.tail(answered[at + 1 : following], history)
            (later,) = self._render(Rendering([*asked, *answered[:following]], tools))
            steady = later.startswith(opening) and later.endswith(tail)
            if steady and not _has_thoughts(answered[at]):
                turn = later[len(opening) : len(later) - len(tail)]

            # An end that is the first token of the next message belongs to the turn: the policy samples it.
            end = leading_end(tail, self.ends)
            pieces += [turn if cut_at_end(turn, self.ends) else turn + end, tail[len(end) :]]

        row, written = "".join([prompt, *pieces]).rstrip(), whole.rstrip()
        as_written = row.startswith(written) or written.startswith(row) or len(said) == 1
        return Learned(prompt, pieces, as_written)

    @cached_property
    def _turn_end(self) -> str:
        return leading_end(self.behind_turn or "", self.ends)

    def _turn(
        self, message: Message, history: Sequence[Message], tools: Any, opening: str, whole: str
    ) -> str:
        """Return what the template writes of a message, with the end of the turn where that is a token."""
        content = str(message.get("content") or "")
        unsaid = [name for name in ("tool_calls", "reasoning_content") if message.get(name)]
        if unsaid:
            plain = {"role": "assistant", "content": content}
            (without,) = self._render(Rendering([*history, plain], tools, False))
            if without == whole:
                raise _refused(f"it leaves out the {unsaid[0]} of a message", [whole])

        if whole.startswith(opening):
            written = whole[len(opening) :]
            if cut := cut_at_end(written, self.ends):
                return cut
            close = self._behind([*history, _TURN], tools, opens=False)
            if written.endswith(close):
                return written[: len(written) - len(close)]

        # A template that opens thoughts which it writes of no message: the text follows the opening.
        elif not unsaid:
            return cut_at_end(content, self.ends) or content
        raise _refused("a turn does not stand between what opens and what ends one", [whole])

    def _behind(self, messages: Sequence[Message], tools: Any = None, opens: bool = True) -> str:
        """Return what is rendered behind the sentinel of ``messages``."""
        (text,) = self._render(Rendering(messages, tools, opens))
        before, sentinel, tail = text.rpartition(SENTINEL)
        if not sentinel or SENTINEL in before:
            raise _refused("it does not show a turn exactly once", [text])
        return tail

    def _render(self, *renderings: Rendering) -> list[str]:
        cleaned = [one._replace(messages=template_messages(one.messages)) for one in renderings]
        texts = []
        for text in self._renderer.render_all(cleaned):
            if isinstance(text, RenderRefused):
                raise _refused("it refuses the messages", [str(text)])
            texts.append(text)
        return texts


@dataclass(frozen=True)
class TurnEnd:
    """What a chat template ends turns with: ``text``, and the added ``token`` that it begins with.

    ``token`` is None where the text does not begin with an added token.
    """

    text: str
    token: int | None


def find_turn_end(
    text: ConversationText,
    encode: Callable[[str], Sequence[int]],
    added: Mapping[int, str],
    bos: str | None,
) -> TurnEnd | None:
    """Return what the template ends turns with; None where it makes no conversation of two.

    ``added`` are the texts of added tokens, special or not: `<|im_end|>` is in some models no special one. A
    BOS behind a turn begins the next one and ends none.
    """
    if text.behind_turn is None:
        return None
    behind = text.behind_turn.lstrip()
    ids = list(encode(behind[:200]))

    if not ids or ids[0] not in added or added[ids[0]] == bos:
        return TurnEnd(behind, None)
    return TurnEnd(behind, int(ids[0]))


def turn_end_problem(end: TurnEnd | None, ends: Sequence[int], shown: str, path: str) -> UserError | None:
    """Return the warning of a template that ends turns with a token that the model's files do not name.

    ``ends`` are the tokens that the files name, and ``shown`` their texts.
    """
    if end is None or end.token in ends:
        return None
    if end.token is None:
        return UserError(
            "the chat template ends turns with no token of its own",
            where="model.path",
            expected=f"one of the tokens that end responses ({shown}) behind each turn of the assistant",
            got=repr(end.text[:40]) if end.text else "nothing",
            fix=f"none is needed for a model that learned to write {shown} there; for another one give the "
            "tokenizer a chat_template whose turns end with such a token",
        )
    token = end.text.split("\n")[0].strip()[:40]
    return UserError(
        f"the end of a turn in the chat template, {token}, is no end of responses in the model's files",
        where="model.path",
        expected=f"one of the tokens that end responses there: {shown}",
        got=f"{token} (id {end.token}); responses to prompts of the template end there, too",
        fix=f"add {end.token} to eos_token_id in {path}/generation_config.json, for whoever uses the model "
        "after the run",
    )


def text_prefix(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer puts before a text, such as a BOS.

    Some put an EOS behind it, too: a prompt ends where the response begins, so that is left out.
    """
    texts = ("a", "1", " ")  # a tokenizer may have no token for some of them
    text = next((text for text in texts if tokenizer.encode(text, add_special_tokens=False)), "")
    plain = tokenizer.encode(text, add_special_tokens=False)
    around = tokenizer.encode(text)
    starts = (at for at in range(len(around)) if around[at : at + len(plain)] == plain)
    return around[: next(starts, 0)]


def with_prefix(prefix: list[int], tokens: list[int]) -> list[int]:
    """Return tokens behind a prefix, which is not repeated where a text begins with it.

    Prompts that were rendered before and stored as text begin with the text of the BOS.
    """
    starts = (at for at in range(len(prefix)) if tokens[: len(prefix) - at] == prefix[at:])
    return prefix[: next(starts, len(prefix))] + tokens


class ChatFormat(Protocol):
    """The tokens of prompts, and those that follow a turn of the policy."""

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
        """Return what the policy wrote, see `VisibleText`; with ``special`` every token of it."""
        ...


class PlainText:
    """Put what is observed behind the turn, as it is: for prompts without a chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._visible = VisibleText(tokenizer)

    def start(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
        """See `ChatFormat.start`."""
        if tools:
            raise _refused("it has no place for tools", ["prompts without a chat template"])
        text = "".join(message["content"] for message in messages)
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        return with_prefix(text_prefix(self._tokenizer), tokens)

    def extend(self, last: int | None, messages: Sequence[Message]) -> list[int]:
        """See `ChatFormat.extend`."""
        text = "".join(message["content"] for message in messages)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def text(self, tokens: Sequence[int], special: bool = False) -> str:
        """See `ChatFormat.text`."""
        return self._tokenizer.decode(list(tokens)) if special else self._visible.text(tokens)


class ChatTemplate(PlainText):
    """Put the tail that the tokenizer's chat template makes behind the turn.

    The constructor raises UserError for a template whose tail depends on what was said before, or that has
    none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        renderer = renderer_of(tokenizer)
        if renderer is None:
            raise _refused("there is none", ["a tokenizer without a chat template"])
        self._written = ConversationText(renderer)
        self._written.require_steady_tails()

    def start(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
        """See `ChatFormat.start`."""
        return self._tokenizer.encode(self._written.prompt(messages, tools), add_special_tokens=False)

    def extend(self, last: int | None, messages: Sequence[Message]) -> list[int]:
        """See `ChatFormat.extend`."""
        tail = self._written.tail(messages)
        tokens = self._tokenizer.encode(tail, add_special_tokens=False)

        # The end of the turn may stand behind whitespace, which the policy has not written.
        end = tokens.index(last) if last in tokens else -1
        if self._tokenizer.decode(tokens[: max(end, 0)]).strip():
            end = -1
        return tokens[end + 1 :]


def _refused(why: str, got: Sequence[str]) -> UserError:
    return UserError(
        f"conversations cannot be made with this chat template: {why}",
        where=_WHERE,
        expected="a template that renders each message behind those before",
        got=" and ".join(repr(text[:80]) for text in got[:2]),
        fix="give the tokenizer another chat_template, or use strings as prompts (data.chat_template=false)",
    )


class ChatFormats:
    """The format of the data's ``prompts``, and of conversations that an environment ``opened``.

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
