"""KL divergence of the policy from a reference policy, with its adaptive coefficient, and from a teacher.

The reference is the policy before training; a KL penalty keeps the trained policy close to it. A teacher is
another model that the policy learns from. The teacher's log-probs of the sampled tokens become a term of the
advantages, or the log-probs of its most likely tokens become a loss.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_rl.algorithms.piece import MAX_LOG_RATIO, Piece, torch, wrong_result_error
from megatron_rl.config.setting import setting
from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

# Bound of the k3 estimate per token, as in verl: k3 grows as exp(-x), so one token could dominate a batch.
MAX_K3 = 10.0

# Least log-prob in a divergence: above it, the gradient is exact.
MIN_LOG_PROB = -1e4

# Largest relative change of the adaptive coefficient over `horizon` rows (Ziegler et al.).
MAX_ADAPTATION = 0.2

# Estimators and their aliases in other frameworks; "+" keeps the value and takes the gradient of k2.
_BASE_ESTIMATORS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var", "low_var_kl")
KL_ESTIMATORS = (*_BASE_ESTIMATORS, *(f"{name}+" for name in _BASE_ESTIMATORS))
ESTIMATOR_MEANING = "Estimator of the KL divergence per token, see `kl_estimate`."


@dataclass(frozen=True)
class Kl(Piece):
    """KL penalty towards the reference policy: its term (loss or reward), estimator and coefficient."""

    in_loss: ClassVar[bool] = False
    in_reward: ClassVar[bool] = False

    @property
    def needs_reference(self) -> bool:
        """Whether the algorithm reads the reference policy's log-probs."""
        return self.in_loss or self.in_reward

    @property
    def needs_scoring_pass(self) -> bool:
        """Whether the reward contains the penalty: it needs the actor's log-probs before the loss."""
        return self.in_reward

    @property
    def initial_coef(self) -> float:
        """Coefficient of the penalty at the first step; 0 for an algorithm without penalty."""
        return 0.0

    @property
    def weighs_by_ratio(self) -> bool:
        """Whether the estimate in the loss is multiplied by the ratio of new to old policy."""
        return False

    def estimate(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        """Estimate the KL divergence to the reference policy per token [N] by k3; see `kl_estimate`."""
        return kl_estimate(log_probs, ref_log_probs, "k3")

    @property
    def adapts(self) -> bool:
        """Whether `next_coef` changes the coefficient from step to step."""
        return False

    def next_coef(self, coef: float, mean_kl: float, rows: int) -> float:
        """Return the next step's coefficient; ``mean_kl`` is this step's mean KL over ``rows`` sequences."""
        return coef


@dataclass(frozen=True)
class NoKl(Kl):
    """No KL penalty. The KL (k3) is still logged if a reference policy computed log-probs."""


@dataclass(frozen=True)
class KlPenalty(Kl):
    """KL penalty whose coefficient is fixed or adapts to the measured divergence."""

    estimator: str = setting("k3", ESTIMATOR_MEANING, choices=KL_ESTIMATORS)
    coef: float = setting(0.001, "Coefficient of the penalty; the first value if it is adaptive.", at_least=0)
    controller: str = setting(
        "fixed",
        "Whether the coefficient is constant or adapts to the measured divergence.",
        choices=("fixed", "adaptive"),
    )
    target: float = setting(0.1, "Divergence that an adaptive coefficient aims at.", unit="nats", more_than=0)
    horizon: float = setting(
        10000.0,
        "Rows over which an adaptive coefficient may change by a fifth.",
        unit="rows",
        more_than=0,
    )
    coef_max: float | None = setting(
        None,
        "Largest value of an adaptive coefficient.",
        unset="no bound",
        at_least=0,
    )

    @property
    def initial_coef(self) -> float:
        """Coefficient of the penalty at the first step, which an adaptive controller then changes."""
        return self.coef

    def estimate(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        """Estimate the KL divergence per token [N] with the configured estimator."""
        return kl_estimate(log_probs, ref_log_probs, self.estimator)

    @property
    def adapts(self) -> bool:
        """Whether `next_coef` changes the coefficient from step to step."""
        return self.controller == "adaptive"

    def contradictions(self, path: str) -> Iterator[UserError]:
        """Yield the errors for ``coef_max``: set for a fixed coefficient, or below the first coefficient."""
        if self.coef_max is None:
            return

        if not self.adapts:
            yield UserError(
                "coef_max bounds an adaptive KL coefficient, and this one is fixed",
                where=f"{path}.coef_max",
                expected="null with a fixed coefficient",
                got=f"{self.coef_max:g}",
                fix="set controller: adaptive, or leave coef_max out",
            )

        if self.coef_max < self.coef:
            yield UserError(
                "the KL coefficient starts above its ceiling",
                where=f"{path}.coef_max",
                expected=f"at least coef = {self.coef:g}",
                got=f"{self.coef_max:g}",
                fix="raise coef_max, or lower coef",
            )

    def next_coef(self, coef: float, mean_kl: float, rows: int) -> float:
        """Return the next step's coefficient by `adapt_kl_coef`, from the mean KL over ``rows`` sequences."""
        return adapt_kl_coef(
            coef,
            mean_kl,
            rows,
            target=self.target,
            horizon=self.horizon,
            ceiling=self.coef_max,
        )


@dataclass(frozen=True)
class KlInLoss(KlPenalty):
    """KL penalty added to the policy loss.

    Source: DeepSeekMath (GRPO), arXiv:2402.03300, equation 4.
    """

    ratio_weight: bool = setting(
        False,
        "Whether each token's estimate is multiplied by the ratio of new to old policy, with its gradient: "
        "unbiased if the sampling policy is older (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).",
    )

    in_loss: ClassVar[bool] = True

    @property
    def weighs_by_ratio(self) -> bool:
        """Whether the estimate in the loss is multiplied by the ratio of new to old policy."""
        return self.ratio_weight


@dataclass(frozen=True)
class KlInReward(KlPenalty):
    """KL penalty subtracted from the reward, token by token.

    The default estimator is k1. In the reward, its policy gradient equals the gradient of the true KL; in a
    loss, its expected gradient is 0.

    Source: Ziegler et al., arXiv:1909.08593, section 2.
    """

    estimator: str = setting("k1", ESTIMATOR_MEANING, choices=KL_ESTIMATORS)

    in_reward: ClassVar[bool] = True


@dataclass(frozen=True)
class Distillation(Piece, ABC):
    """Distillation from a teacher: a term added to each token's advantage, or a loss of each token.

    The term is added after whitening and clipping of the advantages. The loss compares the distributions over
    the teacher's most likely tokens.
    """

    @property
    def needs_teacher(self) -> bool:
        """Whether the algorithm reads the teacher's log-probs."""
        return True

    @property
    def top_tokens(self) -> int:
        """Number of the teacher's most likely tokens that a loss reads; 0 for a term in the advantages."""
        return 0

    @property
    def needs_scoring_pass(self) -> bool:
        """Whether the advantages have a teacher term: it needs the actor's log-probs before the loss."""
        return self.needs_teacher and not self.top_tokens

    @abstractmethod
    def estimate(self, log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
        """Compute the term that is added to each token's advantage: [N].

        The arguments are the log-probs [N] of the sampled tokens under the actor and under the teacher.
        """

    def __call__(self, log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
        """Run `estimate` and check that its result has one value per token: [N]."""
        result = self.estimate(log_probs, teacher_log_probs)
        if getattr(result, "shape", None) != log_probs.shape:
            raise wrong_result_error(self, "estimate", "a tensor of one value per token", result)
        return result


@dataclass(frozen=True)
class NoDistillation(Distillation):
    """No teacher: the algorithm does not distil."""

    @property
    def needs_teacher(self) -> bool:
        """Whether the algorithm reads the teacher's log-probs."""
        return False

    def estimate(self, log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
        """Return zeros [N]: without a teacher, the advantages get no teacher term."""
        return torch.zeros_like(log_probs)


@dataclass(frozen=True)
class ReverseKl(Distillation):
    """Reverse KL to the teacher on the actor's own samples, as an advantage of each token.

    ``coef (log p_teacher - log p_actor)`` of the sampled token, which is minus the k1 estimate of
    KL(actor || teacher). With this advantage and without discount, the expected policy gradient is the
    gradient of the next token's KL, averaged over the prefixes that the actor samples.

    Source: On-policy distillation, thinkingmachines.ai/blog/on-policy-distillation (2025); per-token reverse
    KL on own samples: MiniLLM, arXiv:2306.08543, and GKD, arXiv:2306.13649.

    Example:
        >>> import torch
        >>> ReverseKl(coef=2.0).estimate(torch.tensor([-0.5]), torch.tensor([-0.25])).tolist()
        [0.5]
    """

    coef: float = setting(1.0, "Advantage per nat of difference to the teacher's log-prob.", at_least=0)
    clip: float | None = setting(
        None,
        "Largest absolute value of a token's term; a token that the teacher excludes then cannot dominate.",
        unset="no bound",
        more_than=0,
    )

    def estimate(self, log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
        """Compute the term that is added to each token's advantage: [N].

        The arguments are the log-probs [N] of the sampled tokens under the actor and under the teacher.
        """
        term = self.coef * (teacher_log_probs - log_probs)
        if self.clip is None:
            return term
        return term.clamp(-self.clip, self.clip)


@dataclass(frozen=True)
class TopKDivergence(Distillation):
    """Divergence of teacher and actor over the teacher's k most likely tokens, as a loss of each token.

    P (teacher) and Q (actor) are the distributions of the next token, each reduced to k + 1 probabilities:
    of the teacher's k most likely tokens, and of all other tokens together. With
    ``M = beta P + (1 - beta) Q`` the loss is ``coef`` times

    - ``forward_kl``: ``sum P log(P / Q)``
    - ``reverse_kl``: ``sum Q log(Q / P)``
    - ``jsd``: ``beta sum P log(P / M) + (1 - beta) sum Q log(Q / M)``

    at each response token, with the token weights of the policy loss. Its gradient is exact: it does not
    depend on which token was sampled. The reduction to k + 1 probabilities can only make a divergence smaller
    (data processing inequality).

    Source: GKD, arXiv:2306.13649, equation 1 and section 2; reverse KL of the next token: MiniLLM,
    arXiv:2306.08543.

    Example:
        >>> import torch
        >>> teacher, actor = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
        >>> round(TopKDivergence(k=2).token_loss(actor, teacher).item(), 4)
        0.218
    """

    divergence: str = setting(
        "forward_kl",
        "Divergence of teacher and actor.",
        choices=("forward_kl", "reverse_kl", "jsd"),
    )
    k: int = setting(
        64,
        "Most likely tokens of the teacher that are distinguished.",
        unit="tokens",
        at_least=1,
        at_most=4096,
    )
    coef: float = setting(1.0, "Weight of the divergence in the loss.", at_least=0)
    beta: float = setting(0.5, "Weight of the teacher in the mixture of jsd.", more_than=0, less_than=1)

    @property
    def top_tokens(self) -> int:
        """Number of the teacher's most likely tokens that the loss reads."""
        return self.k

    def estimate(self, log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
        """Return zeros [N]: this divergence is a loss, and the advantages get no teacher term."""
        return torch.zeros_like(log_probs)

    def token_loss(self, log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
        """Compute the divergence of teacher and actor at each token: [N].

        Both arguments are log-probs [N, k + 1]: of the teacher's k most likely tokens, and of all other
        tokens together. ``log_probs`` are the actor's and carry the gradient.
        """
        # An impossible token has a log-prob of -1e30 and would dominate the sum without the clamp.
        log_q = log_probs.clamp(min=MIN_LOG_PROB)
        log_p = teacher_log_probs.clamp(min=MIN_LOG_PROB)
        p = log_p.exp()
        q = log_q.exp()
        if self.divergence == "forward_kl":
            return (p * (log_p - log_q)).sum(dim=-1)
        if self.divergence == "reverse_kl":
            return (q * (log_q - log_p)).sum(dim=-1)

        log_m = torch.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))
        divergence = self.beta * p * (log_p - log_m) + (1 - self.beta) * q * (log_q - log_m)
        return divergence.sum(dim=-1)

    def compute_checked_loss(self, log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
        """Run `token_loss`, which a user may have overridden, and check that its result has shape [N]."""
        result = self.token_loss(log_probs, teacher_log_probs)
        if getattr(result, "shape", None) != log_probs.shape[:1]:
            raise wrong_result_error(self, "token_loss", "a tensor of one value per token", result)
        return result


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) per token [N] from tokens sampled from the policy.

    With ``x = log_probs - ref_log_probs``:

    - ``k1`` (``kl``): x; ``abs``: ``|x|``; ``k2`` (``mse``): ``x^2 / 2``
    - ``k3`` (``low_var``, ``low_var_kl``): ``exp(-x) - 1 + x`` with -x clamped to +-20, the result to +-10
    - a trailing ``+`` (``k3+``) combines the value of the estimator with the gradient of k2. In expectation,
      the gradient of k2 is the gradient of the true KL, the gradient of k1 is 0, and the gradient of k3 is
      biased.

    k1 and k3 are unbiased (k3 up to its clamp); k3 has the smaller variance and is never negative.

    Source: Schulman, "Approximating KL divergence" (2020); gradients: arXiv:2506.09477; clamps of verl.

    Example:
        >>> new, ref = torch.tensor([0.0]), torch.tensor([-0.5])
        >>> [round(kl_estimate(new, ref, name).item(), 4) for name in ("k1", "k2", "k3")]
        [0.5, 0.125, 0.1065]
    """
    straight_through = estimator.endswith("+")
    name = estimator.removesuffix("+")
    difference = log_probs - ref_log_probs

    if name in ("k1", "kl"):
        estimate = difference
    elif name == "abs":
        estimate = difference.abs()
    elif name in ("k2", "mse"):
        estimate = 0.5 * difference**2
    elif name in ("k3", "low_var", "low_var_kl"):
        ref_log_ratio = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # expm1 keeps the digits of exp(y) - 1 for a policy close to its reference.
        estimate = (torch.expm1(ref_log_ratio) - ref_log_ratio).clamp(-MAX_K3, MAX_K3)
    else:
        raise ValueError(f"unknown KL estimator {estimator!r}")

    # Straight-through: the value of the estimator, the gradient of k2.
    if straight_through:
        surrogate = 0.5 * difference**2
        estimate = surrogate + (estimate - surrogate).detach()

    return estimate


def adapt_kl_coef(
    coef: float,
    mean_kl: float,
    rows: int,
    *,
    target: float,
    horizon: float,
    ceiling: float | None = None,
) -> float:
    """Return the next step's KL coefficient; ``mean_kl`` is this step's mean KL over ``rows`` sequences.

    ``coef (1 + clip(mean_kl / target - 1, +-0.2) rows / horizon)``, at most ``ceiling``. Raises UserError if
    ``rows`` is so large relative to ``horizon`` that the coefficient could become 0 or negative.

    Source: Ziegler et al., arXiv:1909.08593, section 2.2.

    Example:
        >>> round(adapt_kl_coef(0.1, 0.5, 100, target=0.1, horizon=1000.0), 6)
        0.102
        >>> adapt_kl_coef(0.1, 0.5, 100, target=0.1, horizon=1000.0, ceiling=0.1)
        0.1
    """
    # The factor below is at least 1 - 0.2 rows / horizon, which must stay positive.
    if MAX_ADAPTATION * rows >= horizon:
        raise UserError(
            "the adaptive KL coefficient could turn negative in one step",
            where="algorithm.kl.horizon",
            expected=f"more than {MAX_ADAPTATION * rows:g}, a fifth of the rows of a step",
            got=f"{horizon:g}",
            fix="raise horizon, the number of rows over which the coefficient may change by a fifth",
        )

    # Clipped, so that the noise of one step's KL cannot move the coefficient far.
    relative_error = mean_kl / target - 1
    clipped_error = min(max(relative_error, -MAX_ADAPTATION), MAX_ADAPTATION)
    coef = coef * (1 + clipped_error * rows / horizon)

    if ceiling is None:
        return coef
    return min(coef, ceiling)
