"""Checking an algorithm's settings against each other; importable without torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.algorithms.names import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    IS_LEVELS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    REJECTION_MEASURES,
    resolved_correction,
)
from megatron_rl.algorithms.pieces import target
from megatron_rl.algorithms.settings import Algorithm
from megatron_rl.errors import UserError, nearest

_CHOICES: dict[str, tuple[str, ...]] = {
    "aggregation": AGGREGATIONS,
    "value_aggregation": AGGREGATIONS,
    "reward_normalize": ("none", "batch", "running"),
    "dppo_divergence": ("tv", "kl"),
    "denominator": ("participating", "all"),
    "kl_in": ("none", "loss", "reward"),
    "kl_estimator": KL_ESTIMATORS,
    "kl_controller": ("fixed", "adaptive"),
    "correction": tuple(CORRECTIONS),
    "rollout_is": IS_LEVELS,
}
# (smallest, largest, whether the smallest itself is allowed)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "reward_ema_decay": (0, 1, True),
    "reward_smoothing": (0, 1, True),
    "max_response_tokens": (0, float("inf"), False),
    "overlong_buffer": (0, float("inf"), False),
    "overlong_penalty": (0, float("inf"), True),
    "dynamic_sampling_max_rounds": (0, float("inf"), False),
    "std_epsilon": (0, float("inf"), True),
    "gamma": (0, 1, True),
    "gae_lambda": (0, 1, True),
    "critic_lambda": (0, 1, True),
    "length_adaptive_alpha": (0, float("inf"), False),
    "advantage_clip": (0, float("inf"), False),
    "clip_ratio_low": (0, float("inf"), True),
    "clip_ratio_high": (0, float("inf"), True),
    "dual_clip": (1, float("inf"), False),
    "sapo_temperature_positive": (0, float("inf"), False),
    "sapo_temperature_negative": (0, float("inf"), False),
    "dppo_ratio_cap": (0, float("inf"), False),
    "cov_fraction": (0, 1, False),
    "kl_cov_coef": (0, float("inf"), True),
    "positive_nll_coef": (0, float("inf"), True),
    "loss_scale_factor": (0, float("inf"), False),
    "kl_coef": (0, float("inf"), True),
    "kl_target": (0, float("inf"), False),
    "kl_horizon": (0, float("inf"), False),
    "kl_coef_max": (0, float("inf"), True),
    "rollout_is_threshold": (0, float("inf"), False),
    "value_clip": (0, float("inf"), False),
    "value_loss_coef": (0, float("inf"), False),
}


def problems(algorithm: Algorithm) -> list[UserError]:
    """Return every mistake in an algorithm's settings; an empty list means it can be used."""
    return [*_choices(algorithm), *_ranges(algorithm), *_pieces(algorithm), *_rejection(algorithm),
            *_together(algorithm)]  # fmt: skip


def _where(name: str) -> str:
    return f"algorithm.settings.{name}"


def _choices(algorithm: Algorithm) -> Iterator[UserError]:
    for name, allowed in _CHOICES.items():
        value = getattr(algorithm, name)
        if value is None and name in ("kl_estimator", "rollout_is"):
            continue
        if value not in allowed:
            close = nearest(str(value), allowed)
            yield UserError(
                f"unknown {name} {value!r}",
                where=_where(name),
                expected=f"one of {', '.join(allowed)}",
                fix=f"did you mean {close!r}?" if close else None,
            )


def _ranges(algorithm: Algorithm) -> Iterator[UserError]:
    for name, (low, high, closed) in _RANGES.items():
        value = getattr(algorithm, name)
        if value is None:
            continue
        if not ((low <= value if closed else low < value) and value <= high):
            sign = ">=" if closed else ">"
            bound = "" if high == float("inf") else f" and <= {high:g}"
            yield UserError(
                f"{name} is out of range",
                where=_where(name),
                expected=f"{sign} {low:g}{bound}",
                got=f"{value!r}",
            )


def _pieces(algorithm: Algorithm) -> Iterator[UserError]:
    for name, table in (("advantage", ADVANTAGES), ("policy_loss", POLICY_LOSSES)):
        piece = getattr(algorithm, name)
        if isinstance(piece, str):
            try:
                target(piece, table, name)
            except UserError as error:
                yield error


def _rejection(algorithm: Algorithm) -> Iterator[UserError]:
    for measure, limit in (algorithm.rollout_rs or {}).items():
        where = _where(f"rollout_rs.{measure}")
        if measure not in REJECTION_MEASURES:
            close = nearest(measure, REJECTION_MEASURES)
            yield UserError(
                f"unknown rejection measure {measure!r}",
                where=where,
                expected=f"one of {', '.join(REJECTION_MEASURES)}",
                fix=f"did you mean {close!r}?" if close else None,
            )
            continue
        if not _is_limit(limit, measure.endswith("k1")):
            expected = "a number > 0" + (", or [low, high]" if measure.endswith("k1") else "")
            yield UserError(f"bad threshold of {measure}", where=where, expected=expected, got=repr(limit))


def _is_limit(limit: object, band_allowed: bool) -> bool:
    def positive(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and value > 0

    if isinstance(limit, list | tuple):
        return band_allowed and len(limit) == 2 and all(map(positive, limit)) and limit[0] < limit[1]
    return positive(limit)


def _together(algorithm: Algorithm) -> Iterator[UserError]:
    limit, buffer = algorithm.max_response_tokens, algorithm.overlong_buffer
    if buffer is not None and limit is not None and buffer > limit:
        yield UserError(
            "the overlong buffer is longer than a response may be",
            where=_where("overlong_buffer"),
            expected=f"at most max_response_tokens = {limit}",
            got=f"{buffer:g}",
        )
    if algorithm.advantage == "gdpo" and algorithm.kl_in == "reward":
        yield UserError(
            "gdpo normalises reward components by themselves, so a KL penalty cannot be part of the reward",
            where=_where("kl_in"),
            fix="use kl_in: loss",
        )
    if algorithm.kl_controller == "adaptive" and algorithm.kl_in == "none":
        yield UserError(
            "an adaptive KL coefficient without a KL term does nothing",
            where=_where("kl_in"),
            expected="loss or reward",
            got="none",
        )
    ceiling = algorithm.kl_coef_max
    if ceiling is not None and algorithm.kl_controller != "adaptive":
        yield UserError(
            "kl_coef_max bounds an adaptive KL coefficient, and this one is fixed",
            where=_where("kl_coef_max"),
            fix="set kl_controller: adaptive, or leave kl_coef_max out",
        )
    if ceiling is not None and ceiling < algorithm.kl_coef:
        yield UserError(
            "the KL coefficient starts above its ceiling",
            where=_where("kl_coef_max"),
            expected=f"at least kl_coef = {algorithm.kl_coef:g}",
            got=f"{ceiling:g}",
        )
    band = algorithm.rollout_is_band
    if band is not None and not 0 <= band[0] < band[1]:
        yield UserError("bad band", where=_where("rollout_is_band"), expected="[low, high]", got=str(band))
    low, high = algorithm.reward_clip_low, algorithm.reward_clip_high
    if low is not None and high is not None and low > high:
        yield UserError(
            "reward_clip_low is above reward_clip_high",
            where=_where("reward_clip_low"),
            expected=f"at most {high:g}",
            got=f"{low:g}",
        )
    if (
        algorithm.correction in CORRECTIONS
        and algorithm.bypass
        and resolved_correction(algorithm).batch_normalize
    ):
        yield UserError(
            "batch-normalised importance weights need the whole step, which bypass mode does not see",
            where=_where("rollout_is_batch_normalize"),
            fix="switch one of the two off",
        )
