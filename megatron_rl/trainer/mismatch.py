"""Hold the trainer's log-probs against the rollout engine's: silent disagreement ruins runs."""

from __future__ import annotations

from megatron_rl.config.schema import MismatchConfig
from megatron_rl.metrics import Metrics


class MismatchError(RuntimeError):
    """Trainer and rollout engine disagree too much to go on."""


def check_mismatch(metrics: Metrics, config: MismatchConfig) -> str | None:
    """Return a warning where ``mismatch/abs_diff`` is above one threshold; raise above another."""
    assert config.warn is not None and config.stop is not None
    difference = metrics.values().get("mismatch/abs_diff")
    if difference is None or difference <= config.warn:
        return None
    words = (
        f"log-probs of trainer and rollout engine differ by {difference:.2e} per response token on average "
        f"(warn above {config.warn:.0e}, stop above {config.stop:.0e})"
    )
    if difference <= config.stop:
        return words
    raise MismatchError(
        f"{words}. Training would follow gradients of another policy. Likely causes: weights that did not "
        "arrive (see hybrid_engine.verify), another dtype or attention kernel in the engine, or sampling "
        "filters (top_p, top_k) without correction. mismatch.stop sets the limit."
    )
