"""Random ragged batches for the tests of the algorithms, with every awkward case in reach.

Groups of one sample, equal rewards, failed samples (NaN reward), empty rows, rows without a response
token, and responses interrupted by other tokens all occur.
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
    """Hold per-row and per-token values as lists (for references) and, through methods, as tensors."""

    group: list[int]
    rewards: list[float]
    valid: list[bool]
    masks: list[list[bool]]  # one per row, one entry per token
    seed: int

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(mask) for mask in self.masks], dtype=torch.long)

    @property
    def mask(self) -> Tensor:
        return torch.tensor([m for mask in self.masks for m in mask], dtype=torch.bool)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return rewards (NaN where invalid), group and valid."""
        return (
            torch.tensor(self.rewards, dtype=torch.float64),
            torch.tensor(self.group, dtype=torch.long),
            torch.tensor(self.valid, dtype=torch.bool),
        )

    @property
    def tokens(self) -> int:
        return sum(len(mask) for mask in self.masks)

    def members(self, row: int) -> list[int]:
        """Return the valid rows of the row's group."""
        return [
            other
            for other in range(len(self.group))
            if self.valid[other] and self.group[other] == self.group[row]
        ]

    def noise(self, name: str, low: float = -1.0, high: float = 1.0) -> list[list[float]]:
        """Return one number per token, by row; the same for the same name."""
        source = random.Random(f"{self.seed}/{name}")
        return [[source.uniform(low, high) for _ in mask] for mask in self.masks]


def flat(rows: list[list[float]], **options) -> Tensor:
    """Join rows into a ragged float64 tensor [N]."""
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64, **options)


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    minimum_rows: int = 1,
    maximum_rows: int = 8,
    all_valid: bool = False,
) -> Batch:
    """Draw a batch; each row is one number that is taken apart, because many small draws are slow."""
    choices = (3, len(REWARDS) + 2, 4, 7, 2**6)
    codes = draw(
        st.lists(st.integers(0, math.prod(choices) - 1), min_size=minimum_rows, max_size=maximum_rows)
    )
    seed = draw(st.integers(0, 10**6))
    source = random.Random(seed)

    equal = seed % 4 == 1
    group = []
    rewards = []
    valid = []

    masks = []
    for code in codes:
        digits = []
        for base in choices:
            code, digit = divmod(code, base)
            digits.append(digit)

        prompt, reward, failed, length, bits = digits
        group.append(prompt)
        valid.append(all_valid or failed != 3)
        value = REWARDS[reward] if reward < len(REWARDS) else round(source.uniform(-3, 3), 6)
        rewards.append((0.1 if equal else value) if valid[-1] else math.nan)
        masks.append([bool(bits >> token & 1) for token in range(length)])
    return Batch(group, rewards, valid, masks, seed)


def close(got: Tensor, wanted: float | list[float] | Tensor, tolerance: float = 1e-9) -> None:
    """Assert equality element by element, in float64."""
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(got.detach().double(), wanted, rtol=tolerance, atol=tolerance)
