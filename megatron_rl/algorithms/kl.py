"""Per-token estimators of KL(policy || reference) and the controller of its coefficient."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.errors import UserError

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
MAX_ADAPTATION = 0.2


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate the KL divergence per token [N] from samples of the policy.

    With ``x = log_probs - ref_log_probs``:

    - ``k1`` (``kl``): x; ``abs``: ``|x|``; ``k2`` (``mse``): ``x^2 / 2``
    - ``k3`` (``low_var``, ``low_var_kl``): ``exp(-x) - 1 + x`` with -x clamped to +-20, the result to +-10
    - a trailing ``+`` (``k3+``) keeps the value and takes the gradient of k2, whose expectation is the
      gradient of the true KL; those of k1 (0) and k3 as losses are not.

    k1 and k3 are unbiased (k3 up to its clamp), k3 has the smaller variance and is never negative.

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
        value = difference
    elif name == "abs":
        value = difference.abs()
    elif name in ("k2", "mse"):
        value = 0.5 * difference**2
    elif name in ("k3", "low_var", "low_var_kl"):
        backward = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        value = (torch.expm1(backward) - backward).clamp(-MAX_K3, MAX_K3)
    else:
        raise ValueError(f"unknown KL estimator {estimator!r}")
    if straight_through:
        surrogate = 0.5 * difference**2
        value = surrogate + (value - surrogate).detach()
    return value


def adapt_kl_coef(
    coef: float, kl: float, rows: int, *, target: float, horizon: float, ceiling: float | None = None
) -> float:
    """Return the coefficient after a step whose mean KL was ``kl`` over ``rows`` sequences.

    ``coef (1 + clip(kl / target - 1, +-0.2) rows / horizon)``, at most ``ceiling``. Raises UserError where
    ``rows`` is so large beside ``horizon`` that the coefficient could become 0 or negative.

    Source: Ziegler et al., arXiv:1909.08593, section 2.2.

    Example:
        >>> round(adapt_kl_coef(0.1, 0.5, 100, target=0.1, horizon=1000.0), 6)
        0.102
        >>> adapt_kl_coef(0.1, 0.5, 100, target=0.1, horizon=1000.0, ceiling=0.1)
        0.1
    """
    if MAX_ADAPTATION * rows >= horizon:
        raise UserError(
            "the adaptive KL coefficient could turn negative in one step",
            where="algorithm.settings.kl_horizon",
            expected=f"more than {MAX_ADAPTATION * rows:g}, a fifth of the rows of a step",
            got=f"{horizon:g}",
            fix="raise kl_horizon, the number of rows over which the coefficient may change by a fifth",
        )
    error = min(max(kl / target - 1, -MAX_ADAPTATION), MAX_ADAPTATION)
    coef = coef * (1 + error * rows / horizon)
    return coef if ceiling is None else min(coef, ceiling)
