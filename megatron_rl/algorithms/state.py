"""What an algorithm carries from step to step: the KL coefficient and the running reward moments."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.algorithms.ragged import broadcast_rows, masked_row_means, row_sums
from megatron_rl.algorithms.rewards import RunningMoments
from megatron_rl.algorithms.validity import valid_rows
from megatron_rl.types import Rollouts, Scores


@dataclass(frozen=True)
class AlgorithmState:
    """Hold the current KL coefficient and the moments of all rewards so far."""

    kl_coef: float
    moments: RunningMoments = field(default_factory=RunningMoments)

    def state_dict(self) -> dict[str, float | list[float]]:
        """Return the state as plain numbers."""
        return {"kl_coef": self.kl_coef, "moments": list(self.moments)}

    @classmethod
    def from_state_dict(cls, saved: dict) -> AlgorithmState:
        """Restore what `state_dict` returned."""
        return cls(float(saved["kl_coef"]), RunningMoments(*saved["moments"]))


def initial_state(algorithm: Algorithm) -> AlgorithmState:
    """Return the state before the first step."""
    return AlgorithmState(algorithm.kl.first_coef)


def next_state(
    algorithm: Algorithm, state: AlgorithmState, rollouts: Rollouts, scores: Scores
) -> AlgorithmState:
    """Return the state after a step, from what the step sampled and how it was scored.

    Call it once per step, after `estimate` with the old state. The adaptive coefficient follows the KL of
    the sampling policy to the reference by the algorithm's estimator, averaged per response and then over
    responses.
    """
    valid = valid_rows(rollouts, scores, algorithm)
    moments = algorithm.reward_shaping.moments_after(state.moments, scores.rewards, valid)
    coef = state.kl_coef
    if algorithm.kl.adapts:
        log_probs = rollouts.rollout_log_probs if scores.old_log_probs is None else scores.old_log_probs
        if scores.ref_log_probs is None:
            raise ValueError("the adaptive KL coefficient needs ref_log_probs")
        mask = rollouts.response_mask & broadcast_rows(valid, rollouts.lengths)
        kl = algorithm.kl.estimate(log_probs.double(), scores.ref_log_probs.double())
        answered = row_sums(mask.double(), rollouts.lengths) > 0
        rows = int(answered.sum())
        if rows:
            mean = float(masked_row_means(kl, mask, rollouts.lengths)[answered].mean())
            coef = algorithm.kl.next_coef(coef, mean, rows)
    return AlgorithmState(coef, moments)
