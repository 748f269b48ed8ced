"""Distillation: what the actor learns from a teacher's log-probs of the tokens that it sampled itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.algorithms.piece import Piece, wrong_result
from megatron_rl.config.setting import setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Distillation(Piece):
    """Term of a teacher in the advantage of each token, after baselines, whitening and clips of rewards."""

    @property
    def needs_teacher(self) -> bool:
        """Whether the algorithm reads the teacher's log-probs."""
        return True

    @property
    def needs_scoring_pass(self) -> bool:
        """Whether the advantages, which precede the loss, depend on the actor's log-probs."""
        return self.needs_teacher

    def estimate(self, log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
        """Return the term of each token [N]; both arguments are log-probs [N] of the sampled tokens."""
        raise NotImplementedError

    def __call__(self, log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
        """Run `estimate` and check its result."""
        result = self.estimate(log_probs, teacher_log_probs)
        if getattr(result, "shape", None) != log_probs.shape:
            raise wrong_result(self, "estimate", "a tensor of one value per token", result)
        return result


@dataclass(frozen=True)
class NoDistillation(Distillation):
    """No teacher."""

    @property
    def needs_teacher(self) -> bool:
        """Whether the algorithm reads the teacher's log-probs."""
        return False


@dataclass(frozen=True)
class ReverseKl(Distillation):
    """Reverse KL to the teacher on the actor's own samples, as an advantage of each token.

    ``coef (log p_teacher - log p_actor)`` of the sampled token, which is minus the k1 estimate of
    KL(actor || teacher). As an advantage of a policy gradient without discount, its expected gradient is that
    of the KL of the next token, at the states that the actor visits.

    Source: On-policy distillation, thinkingmachines.ai/blog/on-policy-distillation (2025); per-token reverse
    KL on own samples: MiniLLM, arXiv:2306.08543, and GKD, arXiv:2306.13649.

    Example:
        >>> import torch
        >>> ReverseKl(coef=2.0).estimate(torch.tensor([-0.5]), torch.tensor([-0.25])).tolist()
        [0.5]
    """

    coef: float = setting(1.0, "Weight of a nat of difference to the teacher.", at_least=0)
    clip: float | None = setting(
        None,
        "Largest absolute value of a token's term: a token that the teacher excludes cannot dominate then.",
        unset="no bound",
        more_than=0,
    )

    def estimate(self, log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
        """Return the term of each token [N]; both arguments are log-probs [N] of the sampled tokens."""
        term = self.coef * (teacher_log_probs - log_probs)
        if self.clip is None:
            return term
        return term.clamp(-self.clip, self.clip)
