"""The rows of a step: how many, and the distribution of their lengths.

Response lengths are an exponential of the stated mean, cut at the token limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import exp, expm1


@dataclass(frozen=True)
class Lengths:
    """Describe response lengths in tokens: ``scale`` is the exponential's, None when they are fixed."""

    mean: float
    longest: float
    scale: float | None

    def alive(self, length: float) -> float:
        """Return the share of responses that are longer than ``length``."""
        if length >= self.longest:
            return 0.0
        return 1.0 if self.scale is None else exp(-length / self.scale)

    def mean_square(self) -> float:
        """Return the mean of the squared length."""
        if self.scale is None:
            return self.longest**2
        ratio = self.longest / self.scale
        return 2.0 * self.scale**2 * (1.0 - (1.0 + ratio) * exp(-ratio))


@lru_cache(maxsize=256)
def response_lengths(mean: float, longest: float, kind: str) -> Lengths:
    """Build the distribution of ``kind`` fixed or variable.

    Variable lengths are exponential and stop at ``longest`` (responses that reach the limit end
    there), with the scale that gives the stated mean: scale (1 - e^(-longest / scale)) = mean.
    """
    if kind == "fixed" or mean >= 0.995 * longest:
        return Lengths(min(mean, longest), min(mean, longest) if kind == "fixed" else longest, None)
    low, high = mean * 0.5, longest * 1000.0
    for _ in range(80):
        middle = (low * high) ** 0.5
        if -middle * expm1(-longest / middle) < mean:
            low = middle
        else:
            high = middle
    return Lengths(mean, longest, (low * high) ** 0.5)


def attended_context(prompt: float, lengths: Lengths) -> float:
    """Return the mean number of keys a token of a whole sequence attends to: E[l^2] / (2 E[l])."""
    square = prompt**2 + 2.0 * prompt * lengths.mean + lengths.mean_square()
    return square / (2.0 * (prompt + lengths.mean))


@dataclass(frozen=True)
class StepBatch:
    """Hold one step's rows: prompts x samples, in ``optimizer_steps`` mini-batches, ``epochs`` times over.

    Lengths are in tokens. With ``packing``, micro-batches are counted in tokens. ``oversample`` is None in
    the closed order; in the open one, the rows in flight beyond those of a step, as a share of them.
    """

    prompts: int
    samples: int
    optimizer_steps: int
    prompt: float
    lengths: Lengths
    longest: float  # cap on prompt plus response
    packing: bool = True
    epochs: int = 1
    oversample: float | None = None

    @property
    def rows(self) -> int:
        """Count responses of a step."""
        return self.prompts * self.samples

    @property
    def mean_row(self) -> float:
        """Return mean tokens of a row, prompt included."""
        return self.prompt + self.lengths.mean

    @property
    def tokens(self) -> float:
        """Return tokens of all rows, prompt included."""
        return self.rows * self.mean_row

    @cached_property
    def context(self) -> float:
        """Return the mean keys a token attends to."""
        return attended_context(self.prompt, self.lengths)
