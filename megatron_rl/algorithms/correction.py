"""Rollout-to-trainer mismatch: its metrics, importance weights and rejection.

``rho_t = exp(clamp(log_probs - rollout_log_probs, +-20))`` per token, with the trainer's log-probs of the
sampling policy (or, in bypass mode, of the policy in training). Two corrections can be combined: importance
weights scale a token's loss, and rejection drops tokens or responses. Neither carries a gradient. All
per-token tensors are ragged [N] with ``lengths`` [B] and ``mask`` [N]; rows must be complete.
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
# There is no seq_max_k1: k1 is signed, so its maximum would bound only one side.
REJECTION_MEASURES = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)


@dataclass(frozen=True)
class Correction(Piece):
    """Correction of the rollout-to-trainer mismatch by importance weights, by rejection, or both.

    Source: TIS, Yao et al. (2025) "Your efficient RL framework secretly brings you off-policy RL training";
    IcePop, arXiv:2510.18855; Liu et al. (2025) "When speed kills stability".
    """

    level: str = setting("none", "Ratio that is a token's importance weight.", choices=IS_LEVELS)
    threshold: float | None = setting(
        2.0,
        "Largest importance weight.",
        unset="weights are not cut off",
        more_than=0,
    )
    floor: float = setting(
        0.0, "Smallest importance weight: smaller ones are raised to it. Not with a band.", at_least=0
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
        "Whether the rollout's log-probs are used as the old policy's; the correction is then for the policy "
        "in training.",
    )

    @property
    def is_active(self) -> bool:
        """Whether the correction changes the loss: by importance weights or by rejection."""
        return self.level != "none" or bool(self.rejection)

    @property
    def needs_scoring_pass(self) -> bool:
        """Whether weights and rejection are computed before the loss, from the actor's log-probs."""
        return self.is_active and not self.bypass

    def contradictions(self, path: str) -> Iterator[UserError]:
        """Validate the band, each rejection measure and the combination of settings; yield every error."""
        band = self.band
        if band is not None and not (len(band) == 2 and 0 <= band[0] < band[1]):
            yield UserError(
                "bad band of importance weights",
                where=f"{path}.band",
                expected="[low, high] with 0 <= low < high",
                got=str(list(band)),
                fix="write band: [0.5, 5.0]",
            )

        threshold = self.threshold
        if self.floor and band is not None:
            yield UserError(
                "a band sets small importance weights to 0, and the floor raises them",
                where=f"{path}.floor",
                expected="0 with a band",
                got=f"{self.floor:g}",
                fix="remove the floor or the band",
            )
        elif threshold is not None and self.floor > threshold:
            yield UserError(
                "the floor of importance weights is above their threshold",
                where=f"{path}.floor",
                expected=f"at most threshold = {threshold:g}",
                got=f"{self.floor:g}",
                fix="lower the floor, or raise the threshold",
            )

        for measure, limit in self.rejection.items():
            yield from _rejection_measure_errors(measure, limit, f"{path}.rejection.{measure}")

        # In bypass mode the weights are computed in the loss, one micro-batch at a time.
        if self.bypass and self.batch_normalize:
            yield UserError(
                "batch-normalised importance weights need the whole step, which bypass mode does not see",
                where=f"{path}.batch_normalize",
                expected="false with bypass: true",
                got="true",
                fix="set bypass or batch_normalize to false",
            )

    def without_weights(self) -> Correction:
        """Return a correction with the same rejection and no importance weights."""
        return replace(self, level="none")

    def correct(
        self,
        log_probs: Tensor,
        rollout_log_probs: Tensor,
        mask: Tensor,
        lengths: Tensor,
    ) -> tuple[Tensor | None, Tensor, Metrics]:
        """Compute importance weights [N], the mask without rejected tokens [N] bool, and metrics.

        The weights are None for ``level: none``.
        """
        token_count = mask.sum()
        sums: dict[str, tuple[Tensor, Tensor]] = {}

        weights = None
        if self.level != "none":
            weights = self.importance_weights(log_probs, rollout_log_probs, mask, lengths)
            # Log the weights before normalisation, which would hide their size.
            token_weights, is_counted = _select_counted_values(weights.double(), mask)
            # A weight is limited if it was cut to the threshold, or set to 0 outside the band.
            is_limited = token_weights >= (self.threshold or math.inf)
            if self.band is not None:
                is_limited = token_weights == 0
            sums["is_weight"] = (torch.where(is_counted, token_weights, 0).sum(), token_count)
            sums["is_limited_fraction"] = ((is_limited & is_counted).sum(), token_count)
            if self.batch_normalize:
                weights = normalize_over_batch(weights, mask, lengths, level=self.level)

        # Rejection reads only log-probs: it is independent of the weights and can be combined with any level.
        accepted = mask
        if self.rejection:
            accepted = rejection_mask(log_probs, rollout_log_probs, mask, lengths, self.rejection)
            sums["rejected_fraction"] = (token_count - accepted.sum(), token_count)

        named_sums = {f"mismatch/{name}": sum_and_count for name, sum_and_count in sums.items()}
        return weights, accepted, Metrics.of_tensors(named_sums)

    def importance_weights(
        self,
        log_probs: Tensor,
        rollout_log_probs: Tensor,
        mask: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """Compute truncated importance weights per token: [N], 1 outside the mask.

        ``level`` selects the ratio of a token:

        - ``token``: the token's rho
        - ``sequence``: the product of rho over the response, ``exp(clamp(sum log rho, +-20))``
        - ``geometric``: the geometric mean of rho over the response

        In truncated importance sampling the weight is the ratio, clamped to [``floor``, ``threshold``]. In
        IcePop, with ``band`` (lo, hi), the weight is the ratio inside the band and 0 outside.

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
        # Log ratio of each token, or of its response.
        log_ratios = torch.where(mask, log_probs.detach() - rollout_log_probs, 0)
        if self.level == "sequence":
            row_log_ratios = ragged.row_sums(log_ratios, lengths)
            log_ratios = ragged.broadcast_rows(row_log_ratios, lengths, len(mask))
        elif self.level == "geometric":
            row_log_ratios = ragged.masked_row_means(log_ratios, mask, lengths)
            log_ratios = ragged.broadcast_rows(row_log_ratios, lengths, len(mask))

        weights = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

        # With a band, threshold and floor are not used.
        if self.band is not None:
            low, high = self.band
            weights = torch.where((weights >= low) & (weights <= high), weights, 0)
        else:
            weights = weights.clamp(min=self.floor, max=self.threshold)

        return torch.where(mask, weights, 1)


def rejection_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    lengths: Tensor,
    measures: Mapping[str, float | Sequence[float]],
) -> Tensor:
    """Mark the tokens that every measure accepts: [N] bool, a subset of ``mask``.

    The name of a measure consists of a prefix and a divergence. ``token_`` compares the divergence of each
    token and drops tokens. ``seq_sum_``, ``seq_mean_`` and ``seq_max_`` compare its sum, mean or maximum over
    a response and drop whole responses. The divergences are:

    - ``k1`` = -log rho. The band ``[lo, hi]`` accepts ``log lo <= k1 <= log hi``; because of the sign, this
      is ``1/hi <= rho <= 1/lo``. A single number x is the band [1/x, x]. There is no ``seq_max_k1``.
    - ``k2`` = (log rho)^2 / 2 and ``k3`` = rho - 1 - log rho. A threshold x accepts values up to x.

    ``seq_sum_k1`` is masked importance sampling (MIS). ``seq_mean_k1`` bounds the geometric mean of rho.

    Source: Liu et al. (2025) "When speed kills stability"; verl rollout_corr_helper.py.

    Example:
        >>> new, old = torch.tensor([0.1, 0.1, 0.9]), torch.zeros(3)
        >>> mask, lengths = torch.ones(3) > 0, torch.tensor([2, 1])
        >>> rejection_mask(new, old, mask, lengths, {"seq_sum_k1": [0.5, 2.0]}).tolist()
        [True, True, False]
    """
    # float64: sums over long responses are compared with thresholds as close to 1 as 0.999.
    log_rho = torch.where(mask, (log_probs.detach() - rollout_log_probs).double(), 0)
    log_rho = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    divergences = {
        "k1": -log_rho,
        "k2": 0.5 * log_rho**2,
        "k3": torch.expm1(log_rho) - log_rho,
    }

    # Each measure is computed over all masked-in tokens, so the order of the measures does not matter.
    accepted = mask.clone()
    for measure, limit in measures.items():
        if measure not in REJECTION_MEASURES:
            raise ValueError(f"unknown measure {measure!r}; known: {', '.join(REJECTION_MEASURES)}")
        reduction, divergence = measure.rsplit("_", 1)
        reduced_divergence = _reduce_divergence(divergences[divergence], mask, lengths, reduction)
        low, high = rejection_limits(divergence, limit)
        accepted &= (reduced_divergence >= low) & (reduced_divergence <= high)

    return accepted


def rejection_limits(divergence: str, limit: float | Sequence[float]) -> tuple[float, float]:
    """Return the range (low, high) in which values of a divergence are accepted.

    ``limit`` is the configured threshold, or the band [low, high] of k1. The range of k1 is the logarithm of
    its band. The range of k2 and k3 is (-inf, limit).

    Example:
        >>> [round(x, 4) for x in rejection_limits("k1", 2.0)]
        [-0.6931, 0.6931]
    """
    if divergence == "k1":
        # A single number is the band that is symmetric in log space.
        if isinstance(limit, int | float):
            limit = (1 / limit, limit)
        low, high = limit
        return math.log(low), math.log(high)

    # k2 and k3 are at least 0, so they have no lower bound.
    if not isinstance(limit, int | float):
        raise ValueError(f"{divergence} takes one upper threshold, got {limit!r}")
    return -math.inf, float(limit)


def normalize_over_batch(
    weights: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    level: str = "token",
) -> Tensor:
    """Divide the weights by their mean over the step: [N].

    For ``level`` "token" the mean is over masked-in tokens. For the other levels it is over responses: a
    response with masked-in tokens counts once. With an empty mask, or weights that are all 0, the weights are
    returned unchanged.

    Example:
        >>> weights, mask = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])
        >>> normalize_over_batch(weights, mask, torch.tensor([3])).tolist()
        [0.5, 1.5, 9.0]
    """
    if not bool(mask.any()):
        return weights

    # A response's tokens share one weight, so count it once: a mean over tokens would favour long responses.
    values = weights[mask].double()
    if level != "token":
        has_tokens = ragged.row_sums(mask.double(), lengths) > 0
        values = ragged.masked_row_means(weights.double(), mask, lengths)[has_tokens]

    # All weights are 0 if every importance ratio is outside `Correction.band`: avoid a division by 0.
    mean = values.mean()
    if not float(mean):
        return weights
    return torch.where(mask, (weights / mean).to(weights.dtype), weights)


def _reduce_divergence(
    divergence: Tensor,
    mask: Tensor,
    lengths: Tensor,
    reduction: str,
) -> Tensor:
    """Reduce a divergence [N] over each row and repeat the result on the row's tokens: [N].

    ``reduction`` is ``seq_sum``, ``seq_mean`` or ``seq_max``; ``token`` returns the divergence unchanged.
    """
    if reduction == "token":
        return divergence

    if reduction == "seq_sum":
        row_values = ragged.row_sums(divergence, lengths)
    elif reduction == "seq_mean":
        row_values = ragged.masked_row_means(divergence, mask, lengths)
    else:
        # `REJECTION_MEASURES` has `seq_max` only for the estimators k2 and k3, which are at least 0. So
        # a value of 0 at tokens outside the mask does not change the maximum.
        row_values = ragged.row_maxima(torch.where(mask, divergence, 0), lengths)
    return ragged.broadcast_rows(row_values, lengths, len(mask))


def _rejection_measure_errors(measure: str, limit: object, path: str) -> Iterator[UserError]:
    """Yield the error for an unknown rejection measure or an invalid threshold.

    ``limit`` is the threshold or the pair [low, high]; ``path`` is the measure's key in the configuration.
    """
    if measure not in REJECTION_MEASURES:
        suggestion = nearest(measure, REJECTION_MEASURES)
        fix = "name one of them"
        if suggestion:
            fix = f"did you mean {suggestion!r}?"
        yield UserError(
            f"unknown rejection measure {measure!r}",
            where=path,
            expected=f"one of {', '.join(REJECTION_MEASURES)}",
            got=measure,
            fix=fix,
        )
        return

    # Only k1 is signed, so only k1 has a lower limit.
    is_two_sided = measure.endswith("k1")
    if not _is_valid_limit(limit, is_two_sided):
        expected = "a number > 0"
        if is_two_sided:
            expected += ", or [low, high]"
        yield UserError(
            f"bad threshold of {measure}",
            where=path,
            expected=expected,
            got=repr(limit),
            fix=f"give {expected}",
        )


def _is_valid_limit(limit: object, is_two_sided: bool) -> bool:
    """Return whether a limit is a positive number or, for a two-sided measure, an increasing pair."""
    if isinstance(limit, list | tuple):
        if not is_two_sided or len(limit) != 2:
            return False
        return all(_is_positive(bound) for bound in limit) and limit[0] < limit[1]
    return _is_positive(limit)


def _is_positive(value: object) -> bool:
    """Return whether a value is a number > 0; bool is an int in Python, so it is excluded."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def mismatch_metrics(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    lengths: Tensor,
) -> Metrics:
    """Compare the trainer's log-probs with the rollout's, both [N], on masked-in tokens.

    With ``d = log_probs - rollout_log_probs`` and ``rho = exp(clamp(d, +-20))``, means over tokens:

    - ``mismatch/abs_diff`` mean of ``|d|``; ``mismatch/max_diff`` its maximum
    - ``mismatch/kl`` mean of -d, an estimate of KL(rollout || trainer); ``mismatch/k3`` mean of rho - 1 - d
    - ``mismatch/chi2`` mean of rho^2, minus 1; ``mismatch/ess`` = mean(rho)^2 / mean(rho^2), the effective
      sample size as a fraction, 1 for equal log-probs
    - ``mismatch/ppl_ratio`` mean over rows of exp(-mean d): trainer perplexity over rollout perplexity
    - ``mismatch/token_mult_prob_error`` mean of ``exp(|d|)``; 1 is perfect, above 1.05 is suspicious

    An empty mask gives no metrics.

    Source: verl rollout_corr_helper.py; NeMo-RL docs for token_mult_prob_error.

    Example:
        >>> d = torch.tensor([0.0, 0.1])
        >>> m = mismatch_metrics(d, torch.zeros(2), torch.tensor([True, True]), torch.tensor([2])).values()
        >>> round(m["mismatch/abs_diff"], 4), round(m["mismatch/max_diff"], 4)
        (0.05, 0.1)
    """
    # Without tokens there are no metrics. On a GPU check only the size of the mask: to read its values, the
    # CPU would wait for the GPU.
    if not len(mask) or (mask.is_cpu and not mask.any()):
        return Metrics()

    # Subtract in float64: the differences of a healthy run are far smaller than the log-probs.
    difference = torch.where(mask, log_probs.double() - rollout_log_probs.double(), 0)

    # Mean difference of each row with a response token, for the perplexity ratio.
    has_tokens = ragged.masked_row_means(torch.ones_like(difference), mask, lengths) > 0
    row_means = ragged.masked_row_means(difference, mask, lengths)
    row_means, is_row_counted = _select_counted_values(row_means, has_tokens)
    ppl_ratio = (-row_means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()

    # Outside the mask d is 0 and adds nothing to a sum. rho is 1 there, so the sums of rho need the mask.
    d, is_counted = _select_counted_values(difference, mask)
    rho = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    prob_error = d.abs().clamp(max=MAX_LOG_RATIO).exp()

    token_count = mask.sum()
    rho_sum = torch.where(is_counted, rho, 0).sum()
    square_sum = torch.where(is_counted, rho**2, 0).sum()
    ess = (rho_sum / token_count) ** 2 / (square_sum / token_count)
    sums = {
        "abs_diff": (d.abs().sum(), token_count),
        "kl": (-d.sum(), token_count),
        "k3": ((rho - 1 - rho.log()).sum(), token_count),
        "chi2": ((rho**2 - 1).sum(), token_count),
        # ess is not a sum over tokens. Multiply it by the number of tokens, so that merged metrics average
        # over the batches.
        "ess": (ess * token_count, token_count),
        "ppl_ratio": (torch.where(is_row_counted, ppl_ratio, 0).sum(), is_row_counted.sum()),
        "token_mult_prob_error": (torch.where(is_counted, prob_error, 0).sum(), token_count),
    }
    named_sums = {f"mismatch/{name}": sum_and_count for name, sum_and_count in sums.items()}
    return Metrics.of_tensors(named_sums, {"mismatch/max_diff": d.abs().max()})


def _select_counted_values(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return values for a statistic, and a bool mask of the values that count in it.

    On the CPU, only the values inside ``mask`` are returned, and all of them count. On a GPU, ``values`` and
    ``mask`` are returned unchanged: the CPU would have to wait for the GPU to learn the size of a selection.
    """
    if mask.is_cpu:
        return values[mask], torch.ones_like(mask[mask])
    return values, mask
