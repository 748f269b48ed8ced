"""The form of a policy loss, what it returns, and the ratio that many share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from megatron_rl.algorithms.piece import Piece, wrong_result
from megatron_rl.config.setting import NO_SETTING, setting

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_rl.types import TrainBatch

MAX_LOG_RATIO = 20.0
_EXPECTED = "TokenLoss(loss, indicators) of tensors with one value per token [N], neither summed nor averaged"


class TokenLoss(NamedTuple):
    """Hold a loss per token [N] (with gradient) and named indicators [N] that become mean metrics."""

    loss: Tensor
    indicators: Mapping[str, Tensor]


@dataclass(frozen=True)
class PolicyLoss(Piece, ABC):
    """Say what each token of a response costs the policy.

    A subclass defines `token_loss`. A micro-batch holds whole rows, so sums over a row are exact there;
    statistics over more than a row must not be taken, because a micro-batch's make-up is no part of the
    mathematics. A loss that needs such statistics takes them in `select`, of a whole mini-batch.
    """

    entropy_coef: float = setting(0.0, "Weight of the entropy bonus that is taken off the loss.")
    opsm_delta: float | None = setting(
        None,
        "Off-policy sequence masking: responses with A < 0 that the policy has drifted from by more nats per "
        "token since they were sampled do not count.",
        unset="off",
    )

    weighs_by_ratio: ClassVar[bool] = True
    """Whether the loss holds the ratio of new to old policy. One without is weighted in bypass mode."""
    follows_rollout: ClassVar[bool] = False
    """Whether that ratio is to the policy that sampled, which weights of a correction would count again."""

    @abstractmethod
    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Return the loss of every token [N] of a micro-batch; ``log_probs`` [N] carry the gradient."""

    def select(self, minibatch: TrainBatch, generator: torch.Generator) -> Tensor | None:
        """Return the tokens [N] bool of a mini-batch that the loss treats apart, where there are any."""
        return minibatch.selected


@dataclass(frozen=True)
class FunctionLoss(PolicyLoss):
    """Be a function ``(micro-batch, log_probs) -> TokenLoss`` of the user's own, without settings."""

    function: Callable[..., TokenLoss] | None = field(default=None, metadata=NO_SETTING)

    def token_loss(self, micro: TrainBatch, log_probs: Tensor) -> TokenLoss:
        """Return what the function does."""
        assert self.function is not None
        return self.function(micro, log_probs)


def checked_loss(piece: Piece, loss: Any, tokens: Tensor) -> TokenLoss:
    """Return what a piece's loss function has returned; raises UserError unless it is a `TokenLoss` [N].

    ``tokens`` [N] is any tensor with a value per token.
    """
    if isinstance(loss, tuple) and len(loss) == 2:
        loss = TokenLoss(*loss)
    if not isinstance(loss, TokenLoss) or not isinstance(loss.indicators, Mapping):
        raise wrong_result(piece, "token_loss", _EXPECTED, loss)
    for value in (loss.loss, *loss.indicators.values()):
        if getattr(value, "shape", None) != tokens.shape:
            raise wrong_result(piece, "token_loss", _EXPECTED, value)
    return loss


def fields_of(batch: TrainBatch, *names: str) -> list[Tensor]:
    """Return fields of a batch; raises ValueError for one that it does not have."""
    missing = [name for name in names if getattr(batch, name) is None]
    if missing:
        raise ValueError(f"the batch has no {' and no '.join(missing)}")
    return [getattr(batch, name) for name in names]


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return log(new / old) per token [N], clamped to +-20 so that its exponential stays finite."""
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
