"""Random ragged batches for the tests of algorithms, including every edge case.

Groups of one sample, equal rewards, failed samples (NaN reward), empty rows, rows without a response token,
and responses interrupted by other tokens all occur.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

REWARDS = (0.0, 1.0, 0.5, -1.0, 0.1, 0.3)


@dataclass(frozen=True)
class Batch:
    """Batch whose values are lists, for references, and through methods tensors."""

    group: list[int]
    """Prompt of each row."""
    rewards: list[float]
    """Reward of each row, NaN if it is invalid."""
    valid: list[bool]
    masks: list[list[bool]]
    """Response mask of each row, one entry per token."""
    seed: int

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(mask) for mask in self.masks], dtype=torch.long)

    @property
    def mask(self) -> Tensor:
        return torch.tensor([m for mask in self.masks for m in mask], dtype=torch.bool)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return rewards (NaN if invalid), group and valid."""
        return (
            torch.tensor(self.rewards, dtype=torch.float64),
            torch.tensor(self.group, dtype=torch.long),
            torch.tensor(self.valid, dtype=torch.bool),
        )

    @property
    def tokens(self) -> int:
        return sum(len(mask) for mask in self.masks)

    def members(self, row: int) -> list[int]:
        """Return the indices of the valid rows in the row's group."""
        return [
            index
            for index in range(len(self.group))
            if self.valid[index] and self.group[index] == self.group[row]
        ]

    def noise(self, name: str, low: float = -1.0, high: float = 1.0) -> list[list[float]]:
        """Return one random number per token, by row, determined by ``name``."""
        # The name selects the stream, so that two quantities of a batch are independent.
        source = random.Random(f"{self.seed}/{name}")
        return [[source.uniform(low, high) for _ in mask] for mask in self.masks]


def flat(rows: list[list[float]], **options) -> Tensor:
    """Concatenate rows into a ragged float64 tensor [N]."""
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64, **options)


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    minimum_rows: int = 1,
    maximum_rows: int = 8,
    all_valid: bool = False,
) -> Batch:
    """Draw a batch. Each row is decoded from one number, because many small draws are slow."""
    # Numbers of values per digit: few prompts, so that groups occur; up to six tokens, 64 masks.
    choices = (3, len(REWARDS) + 2, 4, 7, 2**6)
    codes = draw(
        st.lists(st.integers(0, math.prod(choices) - 1), min_size=minimum_rows, max_size=maximum_rows)
    )
    seed = draw(st.integers(0, 10**6))
    source = random.Random(seed)

    # A quarter of the batches has equal rewards, whose deviation is 0.
    equal = seed % 4 == 1
    group = []
    rewards = []
    valid = []
    masks = []
    for code in codes:
        digits = []
        # The digits of a mixed-radix number: prompt, reward, failure, length, mask bits.
        for base in choices:
            code, digit = divmod(code, base)
            digits.append(digit)

        prompt, reward, failed, length, bits = digits
        group.append(prompt)
        valid.append(all_valid or failed != 3)
        # Two of the digits stand for an arbitrary reward.
        value = REWARDS[reward] if reward < len(REWARDS) else round(source.uniform(-3, 3), 6)
        if equal:
            value = 0.1
        rewards.append(value if valid[-1] else math.nan)
        masks.append([bool(bits >> token & 1) for token in range(length)])
    return Batch(group, rewards, valid, masks, seed)


def close(actual: Tensor, expected: float | list[float] | Tensor, tolerance: float = 1e-9) -> None:
    """Assert that tensors are equal up to ``tolerance``, in float64."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.detach().double(), expected, rtol=tolerance, atol=tolerance)
