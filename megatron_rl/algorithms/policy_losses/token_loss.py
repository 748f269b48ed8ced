"""What a policy loss returns, and the ratio they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

MAX_LOG_RATIO = 20.0


class TokenLoss(NamedTuple):
    """Hold a loss per token [N] (with gradient) and named indicators [N] that become mean metrics."""

    loss: Tensor
    indicators: Mapping[str, Tensor]


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return log(new / old) per token [N], clamped to +-20 so that its exponential stays finite."""
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
