"""Hold the trainer's log-probs against the rollout engine's: silent disagreement ruins runs."""

from __future__ import annotations

from megatron_rl.config.sections.rollout import MismatchConfig
from megatron_rl.types import Rollouts, Scores, row_index


class MismatchError(RuntimeError):
    """Trainer and rollout engine disagree too much to go on."""


def fresh_difference(rollouts: Rollouts, scores: Scores, version: int) -> float | None:
    """Return how far trainer and engine are apart on tokens that weights of ``version`` sampled.

    The mean absolute difference of log-probs per response token of valid rows; None without such a token.
    Older tokens are another policy's: there the two differ by what was learned since.
    """
    if scores.old_log_probs is None:
        return None
    rows = row_index(rollouts.lengths)
    versions = rollouts.token_versions
    if versions is None:
        versions = rollouts.policy_version[rows]
    fresh = rollouts.response_mask & (versions == version) & scores.valid[rows]
    difference = (scores.old_log_probs - rollouts.rollout_log_probs)[fresh].abs().double()
    return float(difference.mean()) if len(difference) else None


def check_mismatch(difference: float | None, config: MismatchConfig) -> str | None:
    """Return a warning where `fresh_difference` is above one threshold; raise above another."""
    assert config.warn is not None and config.stop is not None
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
