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
"""Fraction of the limit above which lengths are assumed equal: no truncated exponential has such a mean."""
_BISECTIONS = 80
"""Number of bisection steps for the scale, enough for the precision of a float."""


@dataclass(frozen=True)
class Lengths:
    """Distribution of response lengths in tokens.

    Example: ``Lengths(mean=1000.0, longest=4096.0, scale=1074.3)``.
    """

    mean: float
    """Mean length of the sequences, in tokens."""
    longest: float
    """Limit of a response, tokens."""
    scale: float | None
    """Scale of the exponential before truncation, tokens, or None if every response has the same length."""

    def fraction_longer(self, length: float) -> float:
        """Return the fraction of responses that are longer than ``length`` tokens."""
        # Responses are truncated at the limit.
        if length >= self.longest:
            return 0.0
        if self.scale is None:
            return 1.0
        return exp(-length / self.scale)

    def mean_square(self) -> float:
        """Return the mean of the squared response length, in tokens squared."""
        if self.scale is None:
            return self.longest**2
        # Second moment of the exponential distribution with its tail at the limit.
        ratio = self.longest / self.scale
        return 2.0 * self.scale**2 * (1.0 - (1.0 + ratio) * exp(-ratio))


@lru_cache(maxsize=256)
def response_lengths(mean: float, limit: float, kind: str) -> Lengths:
    """Return the distribution of response lengths with mean ``mean`` and maximum ``limit``, in tokens.

    ``kind``: "fixed" for equal lengths, or "variable" for lengths from an exponential distribution that is
    truncated at ``limit``. Its scale is the solution of scale (1 - e^(-limit / scale)) = mean.
    """
    if kind == "fixed":
        length = min(mean, limit)
        return Lengths(length, length, None)

    # No truncated exponential has a mean this close to the limit: assume that every response reaches it.
    if mean >= _FIXED_ABOVE * limit:
        return Lengths(min(mean, limit), limit, None)

    # The mean grows with the scale, so bisect; geometrically, since the interval spans orders of magnitude.
    low = mean * 0.5
    high = limit * 1000.0
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        if -middle * expm1(-limit / middle) < mean:
            low = middle
        else:
            high = middle
    return Lengths(mean, limit, (low * high) ** 0.5)


def attended_context(prompt: float, lengths: Lengths) -> float:
    """Return the mean number of keys that a token of a complete sequence attends to: E[l^2] / (2 E[l])."""
    square = prompt**2 + 2.0 * prompt * lengths.mean + lengths.mean_square()
    return square / (2.0 * (prompt + lengths.mean))


@dataclass(frozen=True)
class StepBatch:
    """Rows of one step: prompts times samples, divided into ``optimizer_steps`` mini-batches per epoch.

    Example: ``StepBatch(128, 8, optimizer_steps=2, prompt=512.0, lengths=lengths, longest=4608.0)``.
    """

    prompts: int
    """Number of prompts of a step."""
    samples: int
    """Number of responses per prompt."""
    optimizer_steps: int
    """Number of mini-batches of an epoch."""
    prompt: float
    """Length of a prompt, tokens."""
    lengths: Lengths
    """Distribution of the response lengths."""
    longest: float
    """Limit of prompt plus response, tokens."""
    packing: bool = True
    """Whether micro-batches are filled by tokens; otherwise by rows, padded to the longest row."""
    epochs: int = 1
    """Number of passes over the rows of a step."""
    oversample: float | None = None
    """Extra rows in flight in the open order, in which rows are trained on as they finish, as a fraction of a
    step's rows. None for the closed order, in which a step ends its sampling before it trains."""

    @property
    def rows(self) -> int:
        """Return the number of responses of a step."""
        return self.prompts * self.samples

    @property
    def mean_row(self) -> float:
        """Return the mean length of a row in tokens, prompt included."""
        return self.prompt + self.lengths.mean

    @property
    def tokens(self) -> float:
        """Return the number of tokens of all rows, prompts included."""
        return self.rows * self.mean_row

    @cached_property
    def context(self) -> float:
        """Return the mean number of keys that a token of the step attends to."""
        return attended_context(self.prompt, self.lengths)
