"""Per-token estimators of KL(policy || reference) and the coefficient's controller."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
ESTIMATORS = ("k1", "abs", "k2", "k3")


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate the KL divergence per token [N] from samples of the policy.

    With ``x = log_probs - ref_log_probs``:

    - ``k1``: x (unbiased, high variance); ``abs``: ``|x|``; ``k2``: ``x^2 / 2``
    - ``k3`` (also ``low_var``, ``low_var_kl``): ``exp(-x) - 1 + x``, with -x clamped to +-20, the result
      to +-10
    - a trailing ``+`` (``k3+``) keeps the value and takes the gradient of k2, whose expectation is that
      of the true KL (the gradients of k1 and k3 as losses are not).

    Source: Schulman, "Approximating KL divergence" (2020); the gradients: arXiv:2506.09477.

    Example:
        >>> kl_estimate(torch.tensor([0.0, 0.5]), torch.tensor([0.0, 0.0]), "k3").tolist()[1] > 0.1
        True
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
        raise ValueError(f"unknown KL estimator {estimator!r}; known: {', '.join(ESTIMATORS)}, each with +")
    if straight_through:
        surrogate = 0.5 * difference**2
        value = surrogate + (value - surrogate).detach()
    return value
