"""Correcting for the difference between the policy that sampled and the policy that is trained.

``rho_t = exp(clamp(log_probs - rollout_log_probs, +-20))`` per token, with the trainer's log-probs of the
policy that sampled (or, in bypass mode, of the policy being trained). Two means, which combine: importance
weights scale a token's loss, rejection drops tokens or responses. Neither carries a gradient. All per-token
tensors are ragged [N] with ``lengths`` [B] and ``mask`` [N]; rows must be whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_rl.algorithms.names import IS_LEVELS, REJECTION_MEASURES
from megatron_rl.algorithms.ragged import broadcast_rows, masked_row_means, row_maxima, row_sums
from megatron_rl.algorithms.settings import RolloutCorrection
from megatron_rl.metrics import Metrics

MAX_LOG_RATIO = 20.0


def importance_weights(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    level: str = "token",
    threshold: float | None = 2.0,
    band: tuple[float, float] | None = None,
) -> Tensor:
    """Return truncated importance weights per token: [N], 1 outside the mask.

    ``level`` says which ratio a token gets: ``token`` its own rho; ``sequence`` the product over its
    response, ``exp(clamp(sum log rho, +-20))``; ``geometric`` the response's geometric mean. ``threshold``
    C gives min(ratio, C), truncated importance sampling. ``band`` (lo, hi) instead zeroes ratios outside
    it, IcePop; with a band the threshold is not used.

    Source: TIS, Yao et al. (2025) "Your efficient RL framework secretly brings you off-policy RL training";
    IcePop, arXiv:2510.18855; verl rollout_corr_helper.py.

    Example:
        >>> new, old = torch.tensor([1.5, 4.0]).log(), torch.zeros(2)
        >>> mask, lengths = torch.ones(2) > 0, torch.tensor([2])
        >>> [round(w, 3) for w in importance_weights(new, old, mask, lengths).tolist()]
        [1.5, 2.0]
        >>> icepop = importance_weights(new, old, mask, lengths, band=(0.5, 2.0))
        >>> [round(w, 3) for w in icepop.tolist()]
        [1.5, 0.0]
    """
    difference = torch.where(mask, log_probs.detach() - rollout_log_probs, 0)
    if level == "token":
        log_weight = difference
    elif level == "sequence":
        log_weight = broadcast_rows(row_sums(difference, lengths), lengths)
    elif level == "geometric":
        log_weight = broadcast_rows(masked_row_means(difference, mask, lengths), lengths)
    else:
        raise ValueError(f"unknown level {level!r}; known: {', '.join(IS_LEVELS)}")
    weights = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if band is not None:
        low, high = band
        weights = torch.where((weights >= low) & (weights <= high), weights, 0)
    elif threshold is not None:
        weights = weights.clamp(max=threshold)
    return torch.where(mask, weights, 1)


def rejection_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    lengths: Tensor,
    measures: Mapping[str, float | Sequence[float]],
) -> Tensor:
    """Mark the tokens that every measure accepts: [N] bool, a subset of ``mask``.

    A measure is ``token_`` (drops tokens), ``seq_sum_``, ``seq_mean_`` or ``seq_max_`` (drop responses)
    followed by the divergence it sums, averages or takes the largest of:

    - ``k1`` = -log rho, kept within [log lo, log hi] for ``[lo, hi]``; a single x means [1/x, x]. Note the
      sign: ``1/hi <= rho <= 1/lo``. Not with ``seq_max_``.
    - ``k2`` = (log rho)^2 / 2 and ``k3`` = rho - 1 - log rho, kept up to the threshold.

    ``seq_sum_k1`` is masked importance sampling (MIS), ``seq_mean_k1`` the geometric mean.

    Source: Liu et al. (2025) "When speed kills stability"; verl rollout_corr_helper.py.

    Example:
        >>> new, old = torch.tensor([0.1, 0.1, 0.9]), torch.zeros(3)
        >>> mask, lengths = torch.ones(3) > 0, torch.tensor([2, 1])
        >>> rejection_mask(new, old, mask, lengths, {"seq_sum_k1": [0.5, 2.0]}).tolist()
        [True, True, False]
    """
    log_rho = torch.where(mask, (log_probs.detach() - rollout_log_probs).double(), 0)
    log_rho = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    divergences = {"k1": -log_rho, "k2": 0.5 * log_rho**2, "k3": torch.expm1(log_rho) - log_rho}
    keep = mask.clone()
    for measure, limit in measures.items():
        if measure not in REJECTION_MEASURES:
            raise ValueError(f"unknown measure {measure!r}; known: {', '.join(REJECTION_MEASURES)}")
        span, kind = measure.rsplit("_", 1)
        value = _measured(divergences[kind], mask, lengths, span)
        low, high = rejection_limits(kind, limit)
        keep &= (value >= low) & (value <= high)
    return keep


def rejection_limits(kind: str, limit: float | Sequence[float]) -> tuple[float, float]:
    """Return the range a divergence must lie in: logarithms of the band for k1, (-inf, limit] for others.

    Example:
        >>> [round(x, 4) for x in rejection_limits("k1", 2.0)]
        [-0.6931, 0.6931]
    """
    if kind == "k1":
        low, high = (1 / limit, limit) if isinstance(limit, int | float) else limit
        return math.log(low), math.log(high)
    if not isinstance(limit, int | float):
        raise ValueError(f"{kind} takes one upper threshold, got {limit!r}")
    return -math.inf, float(limit)


def batch_normalized(weights: Tensor, mask: Tensor, lengths: Tensor, *, level: str = "token") -> Tensor:
    """Divide the weights by their mean over the whole step: [N].

    The mean is over masked-in tokens, or, where the ``level`` of the weights is a response, over the
    responses that have such tokens, each counted once. An empty mask, or weights that are all 0, change
    nothing.

    Example:
        >>> weights, mask = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])
        >>> batch_normalized(weights, mask, torch.tensor([3])).tolist()
        [0.5, 1.5, 9.0]
    """
    if not bool(mask.any()):
        return weights
    values = weights[mask].double()
    if level != "token":
        answered = row_sums(mask.double(), lengths) > 0
        values = masked_row_means(weights.double(), mask, lengths)[answered]
    mean = values.mean()
    return torch.where(mask, (weights / mean).to(weights.dtype), weights) if float(mean) else weights


def correct(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    lengths: Tensor,
    correction: RolloutCorrection,
) -> tuple[Tensor | None, Tensor, Metrics]:
    """Return weights [N] (None where the correction has none), the tokens kept [N] bool, and metrics."""
    count = int(mask.sum())
    weights, metrics = None, Metrics()
    if correction.level != "none":
        weights = importance_weights(
            log_probs,
            rollout_log_probs,
            mask,
            lengths,
            level=correction.level,
            threshold=correction.threshold,
            band=correction.band,
        )
        chosen = weights[mask].double()
        at_limit = (
            chosen == 0 if correction.band is not None else chosen >= (correction.threshold or math.inf)
        )
        metrics += Metrics.mean("mismatch/is_weight", float(chosen.sum()), count)
        metrics += Metrics.mean("mismatch/is_limited_fraction", int(at_limit.sum()), count)
        if correction.batch_normalize:
            weights = batch_normalized(weights, mask, lengths, level=correction.level)
    keep = mask
    if correction.rejection:
        keep = rejection_mask(log_probs, rollout_log_probs, mask, lengths, correction.rejection)
        metrics += Metrics.mean("mismatch/rejected_fraction", count - int(keep.sum()), count)
    return weights, keep, metrics


def _measured(divergence: Tensor, mask: Tensor, lengths: Tensor, span: str) -> Tensor:
    if span == "token":
        return divergence
    if span == "seq_sum":
        rows = row_sums(divergence, lengths)
    elif span == "seq_mean":
        rows = masked_row_means(divergence, mask, lengths)
    else:
        rows = row_maxima(torch.where(mask, divergence, 0), lengths)
    return broadcast_rows(rows, lengths)
