"""Which rows of a step count: a failed sample is left out everywhere, never scored 0."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.types import FINISH_FAILED, Rollouts, Scores


def valid_rows(rollouts: Rollouts, scores: Scores, algorithm: Algorithm) -> Tensor:
    """Mark the rows that were generated and have a finite reward: [B] bool.

    Where the algorithm compares with a greedy response, that one's reward must be finite too.
    """
    valid = scores.valid & (rollouts.finish_reason != FINISH_FAILED) & scores.rewards.isfinite()
    if algorithm.needs_greedy_baseline:
        if scores.baseline_rewards is None:
            raise ValueError("the algorithm needs Scores.baseline_rewards, rewards of greedy responses")
        valid = valid & scores.baseline_rewards.isfinite()
    return valid
