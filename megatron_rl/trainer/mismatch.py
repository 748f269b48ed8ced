"""Hold the trainer's log-probs against the rollout engine's: silent disagreement ruins runs."""

from __future__ import annotations

import warnings

from megatron_rl.config.schema import MismatchConfig
from megatron_rl.metrics import Metrics


class MismatchError(RuntimeError):
    """Trainer and rollout engine disagree too much to go on."""


def check_mismatch(metrics: Metrics, config: MismatchConfig) -> Metrics:
    """Warn above one threshold of ``mismatch/abs_diff`` and stop above the other.

    Returns ``mismatch/warned``, 1 where it warned. Raises MismatchError.
    """
    assert config.warn is not None and config.stop is not None
    difference = metrics.values().get("mismatch/abs_diff")
    if difference is None:
        return Metrics()
    words = (
        f"log-probs of trainer and rollout engine differ by {difference:.2e} per response token on average "
        f"(warn above {config.warn:.0e}, stop above {config.stop:.0e})"
    )
    if not difference <= config.stop:
        raise MismatchError(
            f"{words}. Training would follow gradients of another policy. Likely causes: weights that did "
            "not arrive (see hybrid_engine.verify), another dtype or attention kernel in the engine, or sampling "
            "filters (top_p, top_k) without correction. mismatch.stop sets the limit."
        )
    if difference > config.warn:
        warnings.warn(words, stacklevel=2)
    return Metrics.of({"mismatch/warned": float(difference > config.warn)})
