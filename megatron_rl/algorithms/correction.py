"""The difference between the policy that sampled and the policy that is trained: measured, and corrected for.

``rho_t = exp(clamp(log_probs - rollout_log_probs, +-20))`` per token, with the trainer's log-probs of the
policy that sampled (or, in bypass mode, of the policy being trained). Two means, which combine: importance
weights scale a token's loss, rejection drops tokens or responses. Neither carries a gradient. All per-token
tensors are ragged [N] with ``lengths`` [B] and ``mask`` [N]; rows must be whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_rl.algorithms.piece import MAX_LOG_RATIO, Piece, ragged, torch
from megatron_rl.config.setting import setting
from megatron_rl.errors import UserError, nearest
from megatron_rl.metrics import Metrics

if TYPE_CHECKING:
    from torch import Tensor

IS_LEVELS = ("none", "token", "sequence", "geometric")
REJECTION_MEASURES = (
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
)  # fmt: skip


@dataclass(frozen=True)
class Correction(Piece):
    """Correct for the mismatch by importance weights, by rejection, or both.

    Source: TIS, Yao et al. (2025) "Your efficient RL framework secretly brings you off-policy RL training";
    IcePop, arXiv:2510.18855; Liu et al. (2025) "When speed kills stability".
    """

    level: str = setting("none", "Which ratio a token's importance weight is of.", choices=IS_LEVELS)
    threshold: float | None = setting(
        2.0, "Largest importance weight.", unset="weights are not cut off", more_than=0
    )
    band: tuple[float, ...] | None = setting(
        None, "[low, high]: weights outside become 0, and `threshold` is not used.", unset="no band"
    )
    batch_normalize: bool = setting(False, "Whether weights are divided by their mean over the step.")
    rejection: dict[str, Any] = setting(
        {}, "Measures that a token or a response must pass, with a threshold or [low, high] each."
    )
    bypass: bool = setting(
        False,
        "Whether the rollout's own log-probs are those of the old policy; what is corrected is then the "
        "policy being trained.",
    )

    @property
    def active(self) -> bool:
        """Say whether weights or rejection change anything."""
        return self.level != "none" or bool(self.rejection)

    @property
    def needs_scoring_pass(self) -> bool:
        """Say whether weights and rejection are of the whole step, which the loss is divided by."""
        return self.active and not self.bypass

    def contradictions(self, path: str) -> Iterator[UserError]:
        """Yield mistakes in the band, in the measures, and settings that exclude each other."""
        band = self.band
        if band is not None and not (len(band) == 2 and 0 <= band[0] < band[1]):
            yield UserError(
                "bad band of importance weights",
                where=f"{path}.band",
                expected="[low, high] with 0 <= low < high",
                got=str(list(band)),
                fix="write band: [0.5, 5.0]",
            )
        for measure, limit in self.rejection.items():
            yield from _measure_errors(measure, limit, f"{path}.rejection.{measure}")
        if self.bypass and self.batch_normalize:
            yield UserError(
                "batch-normalised importance weights need the whole step, which bypass mode does not see",
                where=f"{path}.batch_normalize",
                expected="false with bypass: true",
                got="true",
                fix="switch one of the two off",
            )

    def without_weights(self) -> Correction:
        """Return the correction's rejection alone."""
        return replace(self, level="none")

    def correct(
        self, log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, lengths: Tensor
    ) -> tuple[Tensor | None, Tensor, Metrics]:
        """Return weights [N] (None where there are none), the tokens kept [N] bool, and metrics."""
        count = int(mask.sum())
        weights, metrics = None, Metrics()
        if self.level != "none":
            weights = self.importance_weights(log_probs, rollout_log_probs, mask, lengths)
            chosen = weights[mask].double()
            limited = chosen == 0 if self.band is not None else chosen >= (self.threshold or math.inf)
            metrics += Metrics.mean("mismatch/is_weight", float(chosen.sum()), count)
            metrics += Metrics.mean("mismatch/is_limited_fraction", int(limited.sum()), count)
            if self.batch_normalize:
                weights = batch_normalized(weights, mask, lengths, level=self.level)
        keep = mask
        if self.rejection:
            keep = rejection_mask(log_probs, rollout_log_probs, mask, lengths, self.rejection)
            metrics += Metrics.mean("mismatch/rejected_fraction", count - int(keep.sum()), count)
        return weights, keep, metrics

    def importance_weights(
        self, log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, lengths: Tensor
    ) -> Tensor:
        """Return truncated importance weights per token: [N], 1 outside the mask.

        ``level`` says which ratio a token gets: ``token`` its own rho; ``sequence`` the product over its
        response, ``exp(clamp(sum log rho, +-20))``; ``geometric`` the response's geometric mean.
        ``threshold`` C gives min(ratio, C), truncated importance sampling. ``band`` (lo, hi) instead zeroes
        ratios outside it, IcePop.

        Example:
            >>> new, old = torch.tensor([1.5, 4.0]).log(), torch.zeros(2)
            >>> mask, lengths = torch.ones(2) > 0, torch.tensor([2])
            >>> tis = Correction(level="token").importance_weights(new, old, mask, lengths)
            >>> [round(w, 3) for w in tis.tolist()]
            [1.5, 2.0]
            >>> icepop = Correction(level="token", band=(0.5, 2.0))
            >>> [round(w, 3) for w in icepop.importance_weights(new, old, mask, lengths).tolist()]
            [1.5, 0.0]
        """
        difference = torch.where(mask, log_probs.detach() - rollout_log_probs, 0)
        if self.level == "sequence":
            rows = ragged.row_sums(difference, lengths)
            difference = ragged.broadcast_rows(rows, lengths)
        elif self.level == "geometric":
            rows = ragged.masked_row_means(difference, mask, lengths)
            difference = ragged.broadcast_rows(rows, lengths)
        weights = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        if self.band is not None:
            low, high = self.band
            weights = torch.where((weights >= low) & (weights <= high), weights, 0)
        elif self.threshold is not None:
            weights = weights.clamp(max=self.threshold)
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
        answered = ragged.row_sums(mask.double(), lengths) > 0
        values = ragged.masked_row_means(weights.double(), mask, lengths)[answered]
    mean = values.mean()
    return torch.where(mask, (weights / mean).to(weights.dtype), weights) if float(mean) else weights


def _measured(divergence: Tensor, mask: Tensor, lengths: Tensor, span: str) -> Tensor:
    if span == "token":
        return divergence
    if span == "seq_sum":
        rows = ragged.row_sums(divergence, lengths)
    elif span == "seq_mean":
        rows = ragged.masked_row_means(divergence, mask, lengths)
    else:
        rows = ragged.row_maxima(torch.where(mask, divergence, 0), lengths)
    return ragged.broadcast_rows(rows, lengths)


def _measure_errors(measure: str, limit: object, path: str) -> Iterator[UserError]:
    """Yield what is wrong about one rejection measure and its threshold."""
    if measure not in REJECTION_MEASURES:
        close = nearest(measure, REJECTION_MEASURES)
        yield UserError(
            f"unknown rejection measure {measure!r}",
            where=path,
            expected=f"one of {', '.join(REJECTION_MEASURES)}",
            got=measure,
            fix=f"did you mean {close!r}?" if close else "name one of them",
        )
        return
    two_sided = measure.endswith("k1")
    if not _is_limit(limit, two_sided):
        expected = "a number > 0" + (", or [low, high]" if two_sided else "")
        yield UserError(
            f"bad threshold of {measure}",
            where=path,
            expected=expected,
            got=repr(limit),
            fix=f"give {expected}",
        )


def _is_limit(limit: object, two_sided: bool) -> bool:
    def positive(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and value > 0

    if isinstance(limit, list | tuple):
        return two_sided and len(limit) == 2 and all(map(positive, limit)) and limit[0] < limit[1]
    return positive(limit)


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
    rows = ragged.masked_row_means(torch.ones_like(difference), mask, lengths) > 0
    row_mean = ragged.masked_row_means(difference, mask, lengths)[rows].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
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
