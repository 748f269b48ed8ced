"""Stop texts of several tokens: the search for them in the tokens that an engine samples.

A stop text ends a response at the token whose text completes it. The token is retained whole, with its
log-prob, also where its text continues after the stop text: the policy sampled the token, not a part of it.
So the row ends with the first token t for which the text of the turn's tokens up to t contains a stop text.

Every engine applies this one rule, with the tokenizer of the model, and without the text of the prompt, of
observations and of earlier turns.
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
"""Characters in front of the longest stop text that stay in a search: the text of the first remaining tokens
may differ from their text in the response: a character can span tokens, and decoders drop a first space."""


class StopSearch:
    """Search for stop texts in the text of one turn, token by token.

    ``decode`` returns the text of tokens. ``before`` has the token in front of the turn, or none; ``turn``
    has its tokens so far.

    Example:
        >>> search = StopSearch(lambda tokens: "".join(map(chr, tokens)), ("ab",), before=b"a", turn=b"ba")
        >>> search.is_found(), search.append(ord("c")), search.append(ord("a")), search.append(ord("b"))
        (False, False, False, True)
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        texts: Sequence[str],
        before: Sequence[int],
        turn: Sequence[int],
    ) -> None:
        self._decode = decode
        self._texts = texts
        self._longest = max(len(text) for text in texts) + _MARGIN

        # The last tokens of the turn, and the number of characters in front of it.
        self._tokens = [*before, *turn]
        self._start = len(decode(list(before)))

    def append(self, token: int) -> bool:
        """Append a sampled token; return whether it completes a stop text."""
        self._tokens.append(token)
        return self.is_found()

    def is_found(self) -> bool:
        """Return whether the tokens so far contain a stop text."""
        text = self._decode(self._tokens)
        if any(text.find(stop, self._start) >= 0 for stop in self._texts):
            return True

        # Drop the first half of the tokens once the second half is long enough for every stop text to come.
        if len(text) > 2 * self._longest:
            second_half = self._tokens[len(self._tokens) // 2 :]
            if len(self._decode(second_half)) >= self._longest:
                self._tokens = second_half
                self._start = 0
        return False


class StopTexts:
    """Searches for the stop texts of requests, by the tokenizer that ``load`` returns.

    The tokenizer is loaded for the first request with stop texts: most runs have none.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    @classmethod
    def of_model(cls, path: str | Path) -> StopTexts:
        """Return the searches with the tokenizer of the HF checkpoint at ``path``."""
        return cls(lambda: load_tokenizer(path))

    @cached_property
    def _decode(self) -> Callable[[list[int]], str]:
        # The library's own decoder, since it is called for each token; special tokens have their text.
        backend = self._load().backend_tokenizer
        return lambda tokens: backend.decode(tokens, skip_special_tokens=False)

    def search(
        self,
        sampling: SamplingParameters,
        tokens: Sequence[int],
        turn_tokens: int,
    ) -> StopSearch | None:
        """Search a turn, the last ``turn_tokens`` of ``tokens``; return None if it has no stop texts."""
        if not sampling.stop_texts:
            return None
        start = len(tokens) - turn_tokens
        before = tokens[max(0, start - 1) : start]
        return StopSearch(self._decode, sampling.stop_texts, before, tokens[start:])

    def is_stopped(
        self,
        sampling: SamplingParameters,
        tokens: Sequence[int],
        turn_tokens: int,
    ) -> bool:
        """Return whether a turn, the last ``turn_tokens`` of ``tokens``, ends with a stop token or text."""
        if not turn_tokens:
            return False
        if tokens[-1] in sampling.stop_token_ids:
            return True
        search = self.search(sampling, tokens, turn_tokens)
        return search is not None and search.is_found()

    def trim(
        self,
        request: GenerationRequest,
        completion: Completion,
    ) -> Completion:
        """Return a completion up to the token that completes a stop text, or all of it."""
        search = self.search(request.sampling, request.tokens, request.turn_tokens)
        if search is None:
            return completion

        for count, token in enumerate(completion.tokens, start=1):
            if search.append(token):
                return stopped_completion(request, completion, count)
        return completion


def stopped_completion(
    request: GenerationRequest,
    completion: Completion,
    count: int,
) -> Completion:
    """Return the first ``count`` tokens of a completion, whose last token ended the response."""
    experts = completion.experts
    if experts is not None:
        # The model recorded no experts for the last token, which was never an input.
        experts = experts[: len(request.tokens) + count - 1]

    return replace(
        completion,
        tokens=completion.tokens[:count],
        log_probs=completion.log_probs[:count],
        support=completion.support[:count],
        experts=experts,
        finish_reason=FINISH_STOP,
    )
