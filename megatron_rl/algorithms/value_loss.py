"""The critic's loss, clipped around the values it had when the advantages were computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.algorithms.lazy import torch
from megatron_rl.algorithms.piece import Piece
from megatron_rl.algorithms.policy_losses.policy_loss import TokenLoss
from megatron_rl.config.setting import setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ValueLoss(Piece, ABC):
    """Say what each token costs the critic; a subclass defines `token_loss`."""

    @abstractmethod
    def token_loss(self, values: Tensor, old_values: Tensor, returns: Tensor) -> TokenLoss:
        """Return the loss of every token [N]; ``values`` [N] carry the gradient."""


@dataclass(frozen=True)
class ClippedValueLoss(ValueLoss):
    """Take ``coef max((v - G)^2, (clip(v, v_old - clip, v_old + clip) - G)^2)`` per token.

    ``clip`` None leaves only the first term. ``coef`` 0.5 makes it half the squared error.

    Source: OpenAI baselines' PPO2; defaults of verl.

    Example:
        >>> v, old, g = torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([2.0])
        >>> ClippedValueLoss().token_loss(v, old, g).loss.tolist()
        [1.125]
    """

    clip: float | None = setting(
        0.5, "How far a value may move from the old one.", unset="any distance", more_than=0
    )
    coef: float = setting(0.5, "Weight of the squared error.", more_than=0)

    def token_loss(self, values: Tensor, old_values: Tensor, returns: Tensor) -> TokenLoss:
        """Return the loss of every token [N], and where the clipped value made it larger."""
        squared = (values - returns) ** 2
        if self.clip is None:
            clipped = torch.zeros_like(values, dtype=torch.bool)
            return TokenLoss(self.coef * squared, {"clip_fraction": clipped})
        bounded = torch.maximum(torch.minimum(values, old_values + self.clip), old_values - self.clip)
        other = (bounded - returns) ** 2
        return TokenLoss(self.coef * torch.maximum(squared, other), {"clip_fraction": other > squared})
