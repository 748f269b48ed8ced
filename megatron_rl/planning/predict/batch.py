"""Rows of one step: their number, and the distribution of their lengths.

Every cost of a step depends on the lengths through three numbers: the mean, the mean square, and the fraction
of responses that are longer than a given length. Response lengths are modelled as an exponential distribution
of the given mean, truncated at the token limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import exp, expm1

_FIXED_ABOVE = 0.995
"""Ratio of mean to limit from which all lengths are assumed equal: no truncated exponential has this mean."""
_BISECTIONS = 80
"""Number of bisection steps for the scale, enough for the precision of a float."""


@dataclass(frozen=True)
class ResponseLengths:
    """Distribution of response lengths in tokens.

    Example: ``ResponseLengths(mean=1000.0, limit=4096.0, scale=1074.3)``.
    """

    mean: float
    """Mean length of a response, in tokens."""
    limit: float
    """Largest length of a response, in tokens."""
    scale: float | None
    """Scale of the exponential before truncation, in tokens; None if all responses have the same length."""

    def fraction_longer(self, length: float) -> float:
        """Return the fraction of responses that are longer than ``length`` tokens."""
        # Responses are truncated at the limit.
        if length >= self.limit:
            return 0.0
        if self.scale is None:
            return 1.0
        return exp(-length / self.scale)

    def mean_square(self) -> float:
        """Return the mean of the squared response length, in tokens squared."""
        if self.scale is None:
            return self.limit**2
        # Second moment of min(X, limit), where X is exponential with this scale.
        ratio = self.limit / self.scale
        return 2.0 * self.scale**2 * (1.0 - (1.0 + ratio) * exp(-ratio))


@lru_cache(maxsize=256)
def response_lengths(mean: float, limit: float, kind: str) -> ResponseLengths:
    """Return the distribution of response lengths with mean ``mean`` and maximum ``limit``, in tokens.

    ``kind``: "fixed" for equal lengths, or "variable" for lengths from an exponential distribution that is
    truncated at ``limit``. Its scale is the solution of scale (1 - e^(-limit / scale)) = mean.
    """
    if kind == "fixed":
        length = min(mean, limit)
        return ResponseLengths(length, length, None)

    # No truncated exponential has a mean this close to the limit: assume that every response reaches the
    # limit.
    if mean >= _FIXED_ABOVE * limit:
        return ResponseLengths(min(mean, limit), limit, None)

    # The mean grows with the scale, so bisect; geometrically, since the interval spans orders of magnitude.
    low = mean * 0.5
    high = limit * 1000.0
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        if -middle * expm1(-limit / middle) < mean:
            low = middle
        else:
            high = middle
    return ResponseLengths(mean, limit, (low * high) ** 0.5)


def attended_context(prompt_length: float, lengths: ResponseLengths) -> float:
    """Return the mean number of keys that a token of a complete sequence attends to.

    A token attends to all tokens before it. For sequences of random length l the mean is E[l^2] / (2 E[l]).
    """
    mean_square = prompt_length**2 + 2.0 * prompt_length * lengths.mean + lengths.mean_square()
    return mean_square / (2.0 * (prompt_length + lengths.mean))


@dataclass(frozen=True)
class StepBatch:
    """Rows of one step: prompts times samples, divided into ``optimizer_steps`` mini-batches per epoch.

    Example: ``StepBatch(128, 8, optimizer_steps=2, prompt_length=512.0, lengths=lengths, row_limit=4608.0)``.
    """

    prompts: int
    """Number of prompts of a step."""
    samples: int
    """Number of responses per prompt."""
    optimizer_steps: int
    """Number of mini-batches of an epoch."""
    prompt_length: float
    """Mean length of a prompt, in tokens."""
    lengths: ResponseLengths
    """Distribution of the response lengths."""
    row_limit: float
    """Largest length of a row (prompt and response), in tokens."""
    packing: bool = True
    """Whether micro-batches are filled by tokens; otherwise by rows, padded to the longest row."""
    epochs: int = 1
    """Number of passes over the rows of a step."""
    oversample: float | None = None
    """Extra rows in flight in the open order, as a fraction of a step's rows. In the open order each row is
    trained on as soon as it is complete. None for the closed order, in which a step completes its sampling
    before training."""

    @property
    def rows(self) -> int:
        """Return the number of responses of a step."""
        return self.prompts * self.samples

    @property
    def mean_row(self) -> float:
        """Return the mean length of a row in tokens, prompt included."""
        return self.prompt_length + self.lengths.mean

    @property
    def tokens(self) -> float:
        """Return the number of tokens of all rows, prompts included."""
        return self.rows * self.mean_row

    @cached_property
    def context(self) -> float:
        """Return the mean number of keys that a token of the step attends to."""
        return attended_context(self.prompt_length, self.lengths)
