"""How far the trainer's log-probs are from those the rollout engine sampled with."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.ragged import masked_row_means
from megatron_rl.metrics import Metrics

MAX_LOG_RATIO = 20.0


def mismatch_metrics(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, lengths: Tensor) -> Metrics:
    """Measure trainer log-probs against the rollout's, both [N], on masked-in tokens.

    With ``d = log_probs - rollout_log_probs`` and ``rho = exp(clamp(d, +-20))``, means over tokens:

    - ``mismatch/abs_diff`` mean of ``|d|``; ``mismatch/max_diff`` its maximum
    - ``mismatch/kl`` mean of -d, an estimate of KL(rollout || trainer); ``mismatch/k3`` mean of rho - 1 - d
    - ``mismatch/chi2`` mean of rho^2, minus 1; ``mismatch/ess`` = mean(rho)^2 / mean(rho^2), the effective
      sample size as a share, 1 where they agree
    - ``mismatch/ppl_ratio`` mean over rows of exp(-mean d): trainer perplexity over rollout perplexity
    - ``mismatch/token_mult_prob_error`` mean of ``exp(|d|)``; 1 is perfect, above 1.05 look into it

    An empty mask gives no metrics.

    Source: verl rollout_corr_helper.py; NeMo-RL docs for token_mult_prob_error.

    Example:
        >>> d = torch.tensor([0.0, 0.1])
        >>> m = mismatch_metrics(d, torch.zeros(2), torch.tensor([True, True]), torch.tensor([2])).values()
        >>> round(m["mismatch/abs_diff"], 4), round(m["mismatch/max_diff"], 4)
        (0.05, 0.1)
    """
    count = int(mask.sum())
    if not count:
        return Metrics()
    difference = torch.where(mask, log_probs.double() - rollout_log_probs.double(), 0)
    rows = masked_row_means(torch.ones_like(difference), mask, lengths) > 0
    row_mean = masked_row_means(difference, mask, lengths)[rows].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    d = difference[mask]
    rho = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    ess = rho.mean() ** 2 / (rho**2).mean()
    return (
        Metrics.mean("mismatch/abs_diff", float(d.abs().sum()), count)
        + Metrics.maximum("mismatch/max_diff", float(d.abs().max()))
        + Metrics.mean("mismatch/kl", float(-d.sum()), count)
        + Metrics.mean("mismatch/k3", float((rho - 1 - rho.log()).sum()), count)
        + Metrics.mean("mismatch/chi2", float((rho**2 - 1).sum()), count)
        + Metrics.mean("mismatch/ess", float(ess) * count, count)
        + Metrics.mean("mismatch/ppl_ratio", float((-row_mean).exp().sum()), len(row_mean))
        + Metrics.mean(
            "mismatch/token_mult_prob_error",
            float(d.abs().clamp(max=MAX_LOG_RATIO).exp().sum()),
            count,
        )
    )
