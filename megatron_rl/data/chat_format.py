"""Render conversations with a chat template, turn by turn, as text and as tokens.

A chat template renders only complete conversations, and may render an old turn differently from the sampled
text. The text between two turns is therefore taken from an artificial conversation. The template renders
``[…, assistant(SENTINEL), *new_messages]``. Everything after the sentinel is the text between two turns: the
end of the first turn, the new messages, and the opening of the second turn. A trained turn is the text that
the template writes after the opening of the turn, up to the first end token. So sampled turns are never
tokenised again.

The module also defines which tokens of a response are in the text for rewards and logs (`VisibleText`). It
imports neither torch nor transformers, so that `check` renders the same texts as a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from megatron_rl.data.template_renderer import RenderError, Rendering, TemplateRenderer, get_renderer
from megatron_rl.errors import UserError
from megatron_rl.shapes.pretrained import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Made = TypeVar("_Made")
Message = Mapping[str, Any]
SENTINEL = "⸢turn⸣"
"""Content of an artificial turn: rare brackets, so that no template and no message contains the same text."""
_QUESTION = ({"role": "user", "content": "a"},)
_FOLLOW_UP = ({"role": "user", "content": "Go on."},)
_SENTINEL_TURN = {"role": "assistant", "content": SENTINEL}
_CONVERSATION = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
)
CACHED_KWARGS = 1024
"""Maximum number of results in each cache of `cache_by_kwargs`: every record of a data set may have different
template arguments."""
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Attributes of tokenizers that name a special token by its purpose."""


# Messages and the ends of turns, as text


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates expect.

    Fields with the value null are removed: tables have null for a field that a message lacks. The arguments
    of tool calls, which are JSON text in OpenAI's format, become objects.
    """
    # Templates test whether a field is defined: a null field would count as present.
    cleaned_messages = []
    for message in messages:
        fields = {name: value for name, value in message.items() if value is not None}
        if "content" in message:
            fields.setdefault("content", "")
        if "tool_calls" in fields:
            fields["tool_calls"] = [_parse_arguments(call) for call in fields["tool_calls"]]
        cleaned_messages.append(fields)
    return cleaned_messages


def _parse_arguments(call: Any) -> Any:
    """Return a tool call with its arguments parsed from JSON text, or unchanged if they are not JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call

    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call  # keep text that is not JSON: the template may print it
    return {**call, "function": {**function, "arguments": arguments}}


def _has_reasoning(message: Message) -> bool:
    """Return whether a message contains reasoning, in a separate field or in its content."""
    return bool(message.get("reasoning_content")) or "</think>" in str(message.get("content") or "")


def cut_at_end(text: str, end_texts: Sequence[str]) -> str | None:
    """Remove repeated end tokens from the end of ``text``; return None if it does not end with an end token.

    ``end_texts`` are the texts of the tokens that end responses. Whitespace after and between these tokens is
    also removed.

    Example:
        >>> cut_at_end("4<end>\\n<eos>", ["<end>", "<eos>"])
        '4<end>'
    """
    # Remove end tokens one by one from the back. `length` is the end of the last removed token, so
    # text[:length] keeps the first of several end tokens.
    remainder = text.rstrip()
    length = None
    end_text = _find_trailing_end(remainder, end_texts)
    while end_text:
        length = len(remainder)
        remainder = remainder[: -len(end_text)].rstrip()
        end_text = _find_trailing_end(remainder, end_texts)

    if length is None:
        return None
    return text[:length]


def _find_trailing_end(text: str, end_texts: Sequence[str]) -> str:
    """Return the end token at the end of ``text``, or "" for a text that does not end with an end token."""
    for end_text in end_texts:
        if text.endswith(end_text):
            return end_text
    return ""


def leading_end(text: str, end_texts: Sequence[str]) -> str:
    """Return the whitespace and the end token at the start of ``text``, or "" without an end token.

    ``end_texts`` are the texts of the tokens that end responses.
    """
    num_whitespace = len(text) - len(text.lstrip())
    for end_text in end_texts:
        if text.startswith(end_text, num_whitespace):
            return text[: num_whitespace + len(end_text)]
    return ""


@dataclass(frozen=True)
class TrainedConversation:
    """Text of a conversation, split into prompt, trained turns and the text between the turns.

    Example:
        >>> TrainedConversation("Q: 1+1 A:", ["2<end>", " Q: and 1? A:", "3<end>"], True).pieces[::2]
        ['2<end>', '3<end>']
    """

    prompt: str
    """Rendered messages before the first trained turn, with the opening of that turn."""
    pieces: list[str]
    """Turns of the assistant (even indices) and the texts between them (odd indices)."""
    matches_template: bool
    """Whether the template renders the complete conversation to the same text.

    False for a template that omits the reasoning of earlier turns, or moves tools to a later message.
    """


class ConversationRenderer:
    """Renderer of conversations with a chat template, which can split a conversation into turns.

    ``end_texts`` are the texts of the tokens that end responses. ``kwargs`` are passed to the template in
    every rendering. Methods raise UserError if the template rejects messages or omits their content.
    """

    def __init__(
        self,
        renderer: TemplateRenderer,
        end_texts: Sequence[str] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._renderer = renderer
        self._kwargs = kwargs
        self._is_history_independent = False
        # Longest first, since one end token may be a prefix of another.
        self.end_texts = sorted(end_texts, key=len, reverse=True)
        self._make_with_kwargs = cache_by_kwargs(partial(ConversationRenderer, renderer, self.end_texts))

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> ConversationRenderer:
        """Return a renderer of this template with the arguments ``kwargs``; renderers are cached."""
        if kwargs == self._kwargs:
            return self
        return self._make_with_kwargs(kwargs)

    def render_prompt(self, messages: Sequence[Message], tools: Any = None) -> str:
        """Render messages as text that ends with the opening of the assistant's turn."""
        (text,) = self._render(Rendering(messages, tools))
        return text

    def require_history_independence(self) -> None:
        """Raise UserError if the text after a turn depends on the messages before the turn."""
        if self._is_history_independent:
            return

        # Compare with two further histories: one with a system message, one with an earlier exchange.
        histories = (
            [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}],
            [
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d"},
                {"role": "user", "content": "e"},
            ],
        )
        rendered_texts = {self.render_between_turns(_FOLLOW_UP)}
        for history in histories:
            with suppress(UserError):  # a template may reject some roles
                rendered_texts.add(self.render_between_turns(_FOLLOW_UP, history))
        if len(rendered_texts) > 1:
            raise _template_error(
                "the text after a turn depends on the earlier messages", sorted(rendered_texts)
            )
        self._is_history_independent = True

    def render_between_turns(
        self, new_messages: Sequence[Message], history: Sequence[Message] = _QUESTION
    ) -> str:
        """Render the text between two assistant turns.

        This is the end of the first turn, ``new_messages``, and the opening of the second turn.
        ``history`` are the messages before the first of the two turns. Raises UserError if the template omits
        the content of a new message.
        """
        rendered_text = self._after_sentinel([*history, _SENTINEL_TURN, *new_messages])
        for index, message in enumerate(new_messages):
            if str(message.get("content") or "").strip() in rendered_text:
                continue

            # The template may escape the content. It omits the content only if changing the content does not
            # change the rendered text.
            changed_messages = list(new_messages)
            changed_messages[index] = {**message, "content": "?"}
            if self._after_sentinel([*history, _SENTINEL_TURN, *changed_messages]) == rendered_text:
                raise _template_error(
                    f"it omits the content of a message of the role {message.get('role')}", [rendered_text]
                )
        return rendered_text

    @cached_property
    def after_turn(self) -> str | None:
        """Text that the template writes after a turn, or None if it cannot render an example conversation.

        Some templates write nothing after the last turn: they end a turn only before the next message. For
        such a template, the result also contains an artificial next message, a question.
        """
        with suppress(UserError):
            text = self._after_sentinel([*_QUESTION, _SENTINEL_TURN], add_generation_prompt=False)
            if text.strip():
                return text
            return self._after_sentinel([*_QUESTION, _SENTINEL_TURN, *_FOLLOW_UP])
        return None

    @cached_property
    def leading_whitespace(self) -> str:
        """Whitespace that the template writes between the opening of a turn and the text of the turn."""
        with suppress(UserError):
            opening, conversation = self._render(
                Rendering(_QUESTION),
                Rendering([*_QUESTION, _SENTINEL_TURN], None, False),
            )
            before_turn = conversation.partition(SENTINEL)[0]
            if not before_turn.startswith(opening):
                return ""

            whitespace = before_turn[len(opening) :]
            return "" if whitespace.strip() else whitespace
        return ""

    @cached_property
    def opening(self) -> str:
        """Text that opens the assistant's turn, or "" for a template that writes none."""
        with suppress(UserError):
            without_opening, with_opening = self._render(
                Rendering(_QUESTION, None, add_generation_prompt=False),
                Rendering(_QUESTION),
            )
            if with_opening.startswith(without_opening):
                return with_opening[len(without_opening) :]
        return ""

    def format_response(self, text: str) -> str:
        """Convert the text of a response to the text that the template would write for the turn.

        Remove a repeated opening of the turn and a repeated BOS, add missing leading whitespace, and end the
        response with exactly one end token.
        """
        # In data sets that are already rendered, responses often repeat the opening and the BOS.
        opening = self.opening.strip()
        if opening and text.lstrip().startswith(opening):
            text = text.lstrip()[len(opening) :].lstrip("\n")
        bos = self._renderer.special_tokens.get("bos_token")
        if bos:
            text = text.removeprefix(bos)  # the prompt begins with it

        if text and not text[0].isspace():
            text = self.leading_whitespace + text
        return cut_at_end(text, self.end_texts) or text + self._turn_end

    def split_turns(
        self,
        prompt_messages: Sequence[Message],
        response_messages: Sequence[Message],
        tools: Any,
    ) -> TrainedConversation:
        """Render a conversation, and split it into the assistant's turns and the texts between them.

        The assistant's messages of ``response_messages`` are trained on. ``response_messages`` begins and
        ends with a turn of the assistant.
        """
        turn_indices = [
            index for index, message in enumerate(response_messages) if message["role"] == "assistant"
        ]
        if len(turn_indices) > 1:
            self.require_history_independence()

        prompt = ""
        conversation = ""
        pieces: list[str] = []
        for turn_number, index in enumerate(turn_indices):
            message = response_messages[index]
            history = [*prompt_messages, *response_messages[:index]]
            opening, conversation = self._render(
                Rendering(history, tools),
                Rendering([*history, message], tools, False),
            )
            prompt = prompt or opening
            turn = self._extract_turn(message, history, tools, opening, conversation)

            if turn_number + 1 == len(turn_indices):
                has_end = cut_at_end(turn, self.end_texts) is not None
                pieces.append(turn if has_end else turn + self._turn_end)
                continue

            # A template may render a turn differently once another turn follows. For example, some templates
            # write an empty reasoning block only into the last turn. Train on the later rendering, except for
            # a turn with reasoning: many templates omit the reasoning of earlier turns.
            next_index = turn_indices[turn_number + 1]
            text_between = self.render_between_turns(response_messages[index + 1 : next_index], history)
            later_history = [*prompt_messages, *response_messages[:next_index]]
            (later_text,) = self._render(Rendering(later_history, tools))
            can_extract_turn = later_text.startswith(opening) and later_text.endswith(text_between)
            if can_extract_turn and not _has_reasoning(message):
                turn = later_text[len(opening) : len(later_text) - len(text_between)]

            # An end token before the next message is part of the turn: the policy samples it.
            end = leading_end(text_between, self.end_texts)
            has_end = cut_at_end(turn, self.end_texts) is not None
            pieces.append(turn if has_end else turn + end)
            pieces.append(text_between[len(end) :])

        text = "".join([prompt, *pieces]).rstrip()
        rendered_text = conversation.rstrip()
        is_equal = text.startswith(rendered_text) or rendered_text.startswith(text)
        return TrainedConversation(prompt, pieces, matches_template=is_equal or len(turn_indices) == 1)

    @cached_property
    def _turn_end(self) -> str:
        """Whitespace and end token that the template writes after a turn, or "" without an end token."""
        return leading_end(self.after_turn or "", self.end_texts)

    def _extract_turn(
        self,
        message: Message,
        history: Sequence[Message],
        tools: Any,
        opening: str,
        conversation: str,
    ) -> str:
        """Return the text of the last turn in a rendered ``conversation``, with the end token that closes it.

        ``opening`` is the rendered ``history`` with the opening of the turn. Raises UserError for a template
        that omits tool calls or reasoning, or that does not write the turn after its opening.
        """
        content = str(message.get("content") or "")
        # Tool calls and reasoning that a template omits would silently be missing from the training data.
        further_fields = [name for name in ("tool_calls", "reasoning_content") if message.get(name)]
        if further_fields:
            content_alone = {"role": "assistant", "content": content}
            (without_fields,) = self._render(Rendering([*history, content_alone], tools, False))
            if without_fields == conversation:
                raise _template_error(f"it leaves out the {further_fields[0]} of a message", [conversation])

        # The usual case: the turn is the text after its opening, up to an end token or to the closing text.
        if conversation.startswith(opening):
            turn = conversation[len(opening) :]
            turn_with_end = cut_at_end(turn, self.end_texts)
            if turn_with_end:
                return turn_with_end
            closing_text = self._after_sentinel(
                [*history, _SENTINEL_TURN], tools, add_generation_prompt=False
            )
            if turn.endswith(closing_text):
                return turn[: len(turn) - len(closing_text)]

        # The opening may end with a tag such as <think>, which a rendered turn does not contain. The turn is
        # then the content of the message.
        elif not further_fields:
            return cut_at_end(content, self.end_texts) or content
        raise _template_error("it does not write a turn directly after its opening", [conversation])

    def _after_sentinel(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render ``messages``, and return the text after the artificial content `SENTINEL`.

        ``add_generation_prompt``: whether the template opens the next turn at the end of the text. Raises
        UserError unless the sentinel occurs exactly once.
        """
        (text,) = self._render(Rendering(messages, tools, add_generation_prompt))
        before, sentinel, after = text.rpartition(SENTINEL)
        if not sentinel or SENTINEL in before:
            raise _template_error("it does not render a turn exactly once", [text])
        return after

    def _render(self, *renderings: Rendering) -> list[str]:
        """Return the text of each rendering; raises UserError for messages that the template rejects."""
        cleaned_renderings = [
            rendering._replace(messages=template_messages(rendering.messages), kwargs=self._kwargs)
            for rendering in renderings
        ]
        texts = []
        for text in self._renderer.render_all(cleaned_renderings):
            if isinstance(text, RenderError):
                raise _template_error("it refuses the messages", [str(text)])
            texts.append(text)
        return texts


def cache_by_kwargs(make: Callable[[Mapping[str, Any]], _Made]) -> Callable[[Mapping[str, Any]], _Made]:
    """Return ``make``, a function of template arguments, with a cache of its last results.

    The arguments are converted to JSON and back before the call, since templates also get them as JSON.
    """
    # The keys of the cache are JSON texts, since lists and mappings cannot be hashed.
    cached_make = lru_cache(CACHED_KWARGS)(lambda text: make(json.loads(text)))
    return lambda kwargs: cached_make(json.dumps(dict(kwargs), default=str))


def _template_error(reason: str, excerpts: Sequence[str]) -> UserError:
    """Return the error for a template that cannot render conversations turn by turn.

    The error quotes the beginning of the first two texts in ``excerpts``.
    """
    return UserError(
        f"this chat template cannot render conversations turn by turn: {reason}",
        where="the chat template of model.path",
        expected="a template that renders each message after the previous ones",
        got=" and ".join(repr(text[:80]) for text in excerpts[:2]),
        fix="give the tokenizer another chat_template, or use strings as prompts (data.chat_template=false)",
    )


@dataclass(frozen=True)
class TurnEnd:
    """Text with which a chat template ends turns, and its first token.

    Example:
        >>> TurnEnd("<|im_end|>\\n", 151645).token
        151645
    """

    text: str
    token: int | None
    """Id of the added token at the start of the text, or None if it starts with ordinary text."""


def find_turn_end(
    chat: ConversationRenderer,
    encode: Callable[[str], Sequence[int]],
    added_texts: Mapping[int, str],
    bos: str | None,
) -> TurnEnd | None:
    """Return the text with which a template ends turns, or None if it cannot render an example conversation.

    ``added_texts`` are the texts of added tokens by id, special or not: some models add ``<|im_end|>`` as an
    ordinary token. A BOS after a turn belongs to the next turn.
    """
    if chat.after_turn is None:
        return None

    # 200 characters contain the longest end token, and encoding them is cheap.
    closing_text = chat.after_turn.lstrip()
    ids = list(encode(closing_text[:200]))
    if not ids or ids[0] not in added_texts or added_texts[ids[0]] == bos:
        return TurnEnd(closing_text, None)
    return TurnEnd(closing_text, int(ids[0]))


def undefined_turn_end_warning(
    turn_end: TurnEnd | None,
    end_ids: Sequence[int],
    end_names: str,
    model_path: str,
) -> UserError | None:
    """Return the warning about a template that ends turns with a token that the model's files do not define.

    ``turn_end`` is the text that the template writes at the end of a turn. ``end_ids`` are the end tokens
    that the model's files define, and ``end_names`` lists their texts for the warning. Returns None if the
    template's token is in ``end_ids``, or for a template without a ``turn_end``.
    """
    if turn_end is None or turn_end.token in end_ids:
        return None

    if turn_end.token is None:
        return UserError(
            "the chat template ends turns without an end token",
            where="model.path",
            expected=f"an end token of the model ({end_names}) after each turn of the assistant",
            got=repr(turn_end.text[:40]) if turn_end.text else "nothing",
            fix=f"change nothing if the model was trained to end its turns with {end_names}; otherwise give "
            "the tokenizer a chat_template that ends each turn with such a token",
        )

    token = turn_end.text.split("\n")[0].strip()[:40]
    return UserError(
        f"the chat template ends turns with {token}, which the model's files do not name as an end",
        where="model.path",
        expected=f"one of the end tokens in the model's files: {end_names}",
        got=f"{token} (id {turn_end.token}); this run also ends a response at this token if the template "
        "renders the prompt",
        fix=f"add {turn_end.token} to eos_token_id in {model_path}/generation_config.json, so that other "
        "programs also end responses at this token",
    )


# Special tokens, and the text of a response without them


def added_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the texts of the special tokens and the added tokens of a tokenizer, by token id."""
    special_tokens = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    text_by_id = dict(special_tokens)
    for token_id, token in tokenizer.added_tokens_decoder.items():
        text_by_id[token_id] = token.content
    return text_by_id


def named_end_ids(tokenizer: Any, model_path: str | Path | None) -> tuple[int, ...]:
    """Return the ids of the end tokens that a model's files define, the tokenizer's EOS first.

    As in transformers, config.json is read only if generation_config.json defines no end tokens. The value
    in config.json is often a library default, so only ids of added tokens are read from it.
    """
    ids: list[int] = []
    if tokenizer.eos_token_id is not None:
        ids.append(int(tokenizer.eos_token_id))

    if model_path:
        ids.extend(listed_end_ids(Path(model_path), added_tokens(tokenizer)))
    return tuple(dict.fromkeys(ids))


def listed_end_ids(model_folder: Path, added_ids: Collection[int]) -> list[int]:
    """Return the ids of end tokens in the ``eos_token_id`` of a model's files.

    ``added_ids`` are the ids of the tokenizer's added tokens. Other ids in config.json are ignored, since its
    value is often a library default.
    """
    ids = _eos_token_ids(model_folder / "generation_config.json")
    if ids:
        return ids
    return [token_id for token_id in _eos_token_ids(model_folder / "config.json") if token_id in added_ids]


def _eos_token_ids(file: Path) -> list[int]:
    """Return the ids in a JSON file's ``eos_token_id``, or no ids for an absent or malformed file."""
    try:
        eos_token_id = read_json_object(file).get("eos_token_id")
    except (OSError, ValueError):
        return []

    token_ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    return [token_id for token_id in token_ids if type(token_id) is int]


def template_tokens(renderer: TemplateRenderer | None, added_texts: Iterable[str]) -> set[str]:
    """Return the added tokens that a chat template writes around messages; empty without a template."""
    if renderer is None:
        return set()

    try:
        text = renderer.render(_CONVERSATION, add_generation_prompt=False)
    except RenderError:
        return set()
    return {token for token in added_texts if token and token in text}


class VisibleText:
    """Decoder of responses for rewards, environments and stored samples.

    The text contains special tokens that a user added for responses, such as ``<answer>``. It omits tokens
    that only delimit a turn: end tokens, the tokenizer's BOS, EOS, padding and similar tokens, and the tokens
    that the chat template writes around messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer

    @cached_property
    def hidden_tokens(self) -> frozenset[int]:
        """Ids of the tokens that only delimit a turn, which are omitted from the text."""
        # Tokens that end responses, and tokens with a named purpose such as BOS.
        tokenizer = self._tokenizer
        ids = set(named_end_ids(tokenizer, tokenizer.name_or_path))
        for name in NAMED_TOKENS:
            token_id = getattr(tokenizer, f"{name}_id", None)
            if token_id is not None:
                ids.add(token_id)

        # Tokens that the template writes around messages.
        added_texts = added_tokens(tokenizer)
        delimiters = template_tokens(get_renderer(tokenizer), added_texts.values())
        for token_id, text in added_texts.items():
            if text in delimiters:
                ids.add(token_id)
        return frozenset(ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode the visible tokens of one response to text."""
        return self._tokenizer.decode([token for token in tokens if token not in self.hidden_tokens])

    def decode_all(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Decode the visible tokens of each response (``rows`` of token ids) to text."""
        if not rows:
            return []
        hidden_tokens = self.hidden_tokens
        visible_rows: list[list[int]] = []
        for row in rows:
            visible_rows.append([token for token in row if token not in hidden_tokens])
        return self._tokenizer.batch_decode(visible_rows)


# Tokens


def text_prefix(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer prepends to a text, such as a BOS.

    Some tokenizers also append an EOS to a text. It is not part of the result, since the response must follow
    the prompt directly.
    """
    # Choose a text that has tokens: a tokenizer with a small vocabulary may have none for some texts.
    sample_text = ""
    for text in ("a", "1", " "):
        if tokenizer.encode(text, add_special_tokens=False):
            sample_text = text
            break

    # The prefix is before the tokens of the text itself.
    tokens = tokenizer.encode(sample_text, add_special_tokens=False)
    tokens_with_special = tokenizer.encode(sample_text)
    for start in range(len(tokens_with_special)):
        if tokens_with_special[start : start + len(tokens)] == tokens:
            return tokens_with_special[:start]
    return []


def with_prefix(prefix: list[int], tokens: list[int]) -> list[int]:
    """Prepend ``prefix`` to ``tokens``, without repeating tokens that are already present.

    If ``tokens`` start with a suffix of ``prefix``, only the missing tokens of the prefix are prepended. For
    example, prompts that are stored as rendered text already start with the BOS.
    """
    for num_missing in range(len(prefix)):
        suffix = prefix[num_missing:]
        if tokens[: len(suffix)] == suffix:
            return prefix[:num_missing] + tokens
    return prefix + tokens


class ChatFormat(Protocol):
    """Interface that tokenises prompts and the text between two turns, and decodes responses."""

    def encode_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
        """Return the tokens of a prompt; raises UserError for invalid ``messages`` or ``tools``."""
        ...

    def encode_between_turns(self, stop_token: int | None, messages: Sequence[Message]) -> list[int]:
        """Return the tokens between two turns of the policy, which contain the environment's ``messages``.

        ``stop_token`` is the last sampled token of the previous turn, which the result does not repeat, or
        None if a length limit ended the turn.
        """
        ...

    def decode(self, tokens: Sequence[int], with_special_tokens: bool = False) -> str:
        """Decode a response as `VisibleText` does, or all its tokens if ``with_special_tokens``."""
        ...


class PlainText:
    """Chat format of a model without a template: the contents of messages are concatenated."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._visible = VisibleText(tokenizer)

    def encode_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
        """Return the tokens of the concatenated contents of ``messages``; raises UserError for tools."""
        if tools:
            raise _template_error("it cannot render tools", ["prompts without a chat template"])
        text = "".join(message["content"] for message in messages)
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        return with_prefix(text_prefix(self._tokenizer), tokens)

    def encode_between_turns(self, stop_token: int | None, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of the contents of ``messages``; ``stop_token`` is ignored without a template."""
        text = "".join(message["content"] for message in messages)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int], with_special_tokens: bool = False) -> str:
        """Decode a response to its visible text, or to all its text if ``with_special_tokens``."""
        if with_special_tokens:
            return self._tokenizer.decode(list(tokens))
        return self._visible.decode(tokens)


class ChatTemplate(PlainText):
    """Chat format of the tokenizer's chat template, with the arguments ``kwargs`` of the template.

    The constructor raises UserError for a tokenizer without a template, and for a template in which the text
    after a turn depends on earlier messages.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        super().__init__(tokenizer)
        renderer = get_renderer(tokenizer)
        if renderer is None:
            raise _template_error(
                "the tokenizer has no chat template", ["a tokenizer without a chat template"]
            )
        self._conversation_renderer = ConversationRenderer(renderer, kwargs=kwargs)
        self._conversation_renderer.require_history_independence()

    def encode_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
        """Return the tokens of the rendered prompt, which ends with the opening of the assistant's turn."""
        text = self._conversation_renderer.render_prompt(messages, tools)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_between_turns(self, stop_token: int | None, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of the text that the chat template writes between two turns.

        See `ChatFormat.encode_between_turns`.
        """
        text = self._conversation_renderer.render_between_turns(messages)
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        if stop_token not in tokens:
            return tokens

        # The token closes the policy's turn only if nothing but whitespace precedes it. After other text it
        # closes a later message, and the policy ended its turn with a different token.
        end = tokens.index(stop_token)
        if self._tokenizer.decode(tokens[:end]).strip():
            return tokens
        return tokens[end + 1 :]


class ChatFormats:
    """Chat formats of a run, for prompts of the data set and for conversations of environments.

    ``templated``: whether the tokenizer's chat template renders the prompts of the data set.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, templated: bool = False) -> None:
        self.tokenizer = tokenizer
        self._templated = templated
        self.plain_text = PlainText(tokenizer)
        """Format without a template, which also decodes responses."""
        self._template_format = cache_by_kwargs(partial(ChatTemplate, tokenizer))

    def prompt_format(self, kwargs: Mapping[str, Any]) -> ChatFormat:
        """Return the chat format of conversations that start with a prompt of the data set.

        ``kwargs`` are the template arguments of the prompt. Raises UserError as `ChatTemplate` does.
        """
        if self._templated:
            return self._template_format(kwargs)
        return self.plain_text

    def environment_format(self, kwargs: Mapping[str, Any]) -> ChatFormat:
        """Return the chat format of conversations that an environment starts.

        This is the chat template, if the tokenizer has one, even for a data set whose prompts are text: an
        environment supplies messages. ``kwargs`` are the template arguments of the record. Raises UserError
        as `ChatTemplate` does.
        """
        if getattr(self.tokenizer, "chat_template", None):
            return self._template_format(kwargs)
        return self.plain_text
