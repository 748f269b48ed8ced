"""Search for stop texts, which may span several tokens, in the tokens that an engine samples.

A stop text ends a response with the token that completes it. The token and its log-prob are retained even if
its text continues after the stop text, since the policy samples whole tokens. So the response ends with the
first token t such that the text of the turn's tokens up to t contains a stop text.

Every engine applies this rule, with the tokenizer of the model. The search excludes the text of the prompt,
of observations and of earlier turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_rl.data.tokenizing import load_tokenizer
from megatron_rl.rollout.types import Completion, GenerationRequest
from megatron_rl.types import FINISH_STOP, SamplingParameters

_MARGIN = 8
"""Number of characters that a search retains in addition to the length of the longest stop text. If earlier
tokens are dropped, the text of the first retained tokens can change: a character can span several tokens, and
decoders drop a leading space."""


class StopSearch:
    """Search for stop texts in the text of one turn, token by token.

    ``decode`` converts token ids to text. ``preceding_tokens`` has the token before the turn, or no token at
    the start of a text. ``turn_tokens`` are the turn's tokens so far.

    Example:
        >>> def decode(tokens):
        ...     return "".join(map(chr, tokens))
        >>> search = StopSearch(decode, ("ab",), preceding_tokens=b"a", turn_tokens=b"ba")
        >>> search.has_stop_text(), [search.append_token(ord(letter)) for letter in "cab"]
        (False, [False, False, True])
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop_texts: Sequence[str],
        preceding_tokens: Sequence[int],
        turn_tokens: Sequence[int],
    ) -> None:
        self._decode = decode
        self._stop_texts = stop_texts
        self._retained_characters = max(len(text) for text in stop_texts) + _MARGIN

        # Tokens to search. The token before the turn is decoded together with the turn, because a decoder may
        # drop the first space of a text.
        self._tokens = [*preceding_tokens, *turn_tokens]
        # Index of the turn's first character in the text of `_tokens`. The search starts there.
        self._turn_start = len(decode(list(preceding_tokens)))

    def append_token(self, token: int) -> bool:
        """Append a sampled token; return whether it completes a stop text."""
        self._tokens.append(token)
        return self.has_stop_text()

    def has_stop_text(self) -> bool:
        """Return whether the tokens so far contain a stop text."""
        text = self._decode(self._tokens)
        if any(text.find(stop_text, self._turn_start) >= 0 for stop_text in self._stop_texts):
            return True

        # Drop the first half of the tokens if the second half is longer than every stop text: further tokens
        # can then only complete a stop text that starts in the second half.
        if len(text) > 2 * self._retained_characters:
            second_half = self._tokens[len(self._tokens) // 2 :]
            if len(self._decode(second_half)) >= self._retained_characters:
                self._tokens = second_half
                self._turn_start = 0
        return False


class StopTextFinder:
    """Finder of stop texts in the policy's turns.

    ``load_tokenizer`` is a function that loads the tokenizer. It is called at the first request with stop
    texts, since most runs have no stop texts.
    """

    def __init__(self, load_tokenizer: Callable[[], Any]) -> None:
        self._load_tokenizer = load_tokenizer

    @classmethod
    def from_model(cls, path: str | Path) -> StopTextFinder:
        """Return a finder with the tokenizer of the Hugging Face model at ``path``."""
        return cls(lambda: load_tokenizer(path))

    @cached_property
    def _decode(self) -> Callable[[list[int]], str]:
        """Return the function that decodes token ids to text, including special tokens."""
        # Use the backend of the tokenizers library: transformers' decode is slow, and this runs per token.
        backend = self._load_tokenizer().backend_tokenizer

        def decode(tokens: list[int]) -> str:
            """Decode token ids to text, including special tokens."""
            return backend.decode(tokens, skip_special_tokens=False)

        return decode

    def make_search(
        self,
        sampling: SamplingParameters,
        tokens: Sequence[int],
        turn_tokens: int,
    ) -> StopSearch | None:
        """Make a search for the stop texts of ``sampling`` in one turn; return None without stop texts.

        The turn is the last ``turn_tokens`` of ``tokens``.
        """
        if not sampling.stop_texts:
            return None

        # Tokenizers may drop the first space of a text when they decode it. Decode the turn together with the
        # token before it, so that the turn's own first space remains.
        turn_start = len(tokens) - turn_tokens
        preceding_tokens = tokens[max(0, turn_start - 1) : turn_start]
        return StopSearch(self._decode, sampling.stop_texts, preceding_tokens, tokens[turn_start:])

    def is_turn_ended(
        self,
        sampling: SamplingParameters,
        tokens: Sequence[int],
        turn_tokens: int,
    ) -> bool:
        """Return whether a turn has ended: with a stop token, or because it contains a stop text.

        The turn is the last ``turn_tokens`` of ``tokens``.
        """
        if not turn_tokens:
            return False
        if tokens[-1] in sampling.stop_token_ids:
            return True
        search = self.make_search(sampling, tokens, turn_tokens)
        return search is not None and search.has_stop_text()

    def trim_completion(
        self,
        request: GenerationRequest,
        completion: Completion,
    ) -> Completion:
        """If a completion contains a stop text, cut it after the token that completes the stop text."""
        search = self.make_search(request.sampling, request.tokens, request.turn_tokens)
        if search is None:
            return completion

        for num_tokens, token in enumerate(completion.tokens, start=1):
            if search.append_token(token):
                return cut_stopped_completion(request, completion, num_tokens)
        return completion


def cut_stopped_completion(
    request: GenerationRequest,
    completion: Completion,
    num_tokens: int,
) -> Completion:
    """Keep the first ``num_tokens`` tokens of a completion, and set its finish reason to `FINISH_STOP`."""
    experts = completion.experts
    if experts is not None:
        # The last token has no recorded experts, because it was never an input of the model.
        experts = experts[: len(request.tokens) + num_tokens - 1]

    return replace(
        completion,
        tokens=completion.tokens[:num_tokens],
        log_probs=completion.log_probs[:num_tokens],
        support=completion.support[:num_tokens],
        experts=experts,
        finish_reason=FINISH_STOP,
    )
