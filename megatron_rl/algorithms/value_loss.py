"""The critic's loss, clipped around the values it had when the advantages were computed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    """Hold the loss per token [N] and where the clipped value made it larger, [N] bool."""

    loss: Tensor
    clipped: Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.5, coef: float = 0.5
) -> ValueLoss:
    """Return ``coef max((v - G)^2, (clip(v, v_old - clip, v_old + clip) - G)^2)`` per token [N].

    ``clip`` None leaves only the first term. ``coef`` 0.5 makes it half the squared error.

    Source: OpenAI baselines' PPO2; defaults of verl.

    Example:
        >>> v, old, g = torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([2.0])
        >>> value_loss(v, old, g).loss.tolist()
        [1.125]
    """
    squared = (values - returns) ** 2
    if clip is None:
        return ValueLoss(coef * squared, torch.zeros_like(values, dtype=torch.bool))
    bounded = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    other = (bounded - returns) ** 2
    return ValueLoss(coef * torch.maximum(squared, other), other > squared)
