"""Shaping of sequence rewards [B]: scale, clip, normalise, smooth, penalise overlong responses.

``valid`` [B] marks rows with a usable reward; the others are not read, enter no statistic and come back
as 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.algorithms.settings import Algorithm

EPSILON = 1e-6


class RunningMoments(NamedTuple):
    """Hold exponentially weighted sums of rewards and their squares; divide by ``weight`` to read them."""

    weight: float = 0.0
    first: float = 0.0
    second: float = 0.0

    @property
    def mean(self) -> float:
        """Return the running mean, 0 before the first update."""
        return self.first / self.weight if self.weight else 0.0

    @property
    def std(self) -> float:
        """Return the running standard deviation (population), 1 before the first update."""
        if not self.weight:
            return 1.0
        return max(self.second / self.weight - self.mean**2, 0.0) ** 0.5


def update_moments(
    moments: RunningMoments, rewards: Tensor, valid: Tensor, *, decay: float
) -> RunningMoments:
    """Return the moments after a step's rewards; a step without a valid reward changes nothing.

    ``m <- decay m + (1 - decay) mean(x)`` for x = 1, R and R^2. Dividing by the weight removes the bias of
    the start, as Adam does, so the first step's mean is its own.

    Example:
        >>> m = update_moments(RunningMoments(), torch.tensor([1.0, 3.0]), torch.ones(2) > 0, decay=0.9)
        >>> round(m.mean, 6), round(m.std, 6)
        (2.0, 1.0)
    """
    kept = rewards[valid].double()
    if not len(kept):
        return moments
    sample = (1.0, float(kept.mean()), float((kept**2).mean()))
    return RunningMoments(
        *(decay * old + (1 - decay) * new for old, new in zip(moments, sample, strict=True))
    )


def normalize(rewards: Tensor, valid: Tensor, mean: float, std: float) -> Tensor:
    """Return ``(R - mean) / (std + 1e-6)`` on valid rows: [B].

    Example:
        >>> rewards, valid = torch.tensor([3.0, 1.0]), torch.tensor([True, False])
        >>> [round(r, 3) for r in normalize(rewards, valid, 1.0, 2.0).tolist()]
        [1.0, 0.0]
    """
    return torch.where(valid, (rewards - mean) / (std + EPSILON), 0)


def smooth(rewards: Tensor, valid: Tensor, mean: float, share: float) -> Tensor:
    """Mix the running mean into every reward: ``(1 - share) R + share mean``, [B].

    Example:
        >>> smooth(torch.tensor([1.0]), torch.tensor([True]), 0.0, 0.25).tolist()
        [0.75]
    """
    return torch.where(valid, (1 - share) * rewards + share * mean, 0)


def overlong_penalty(response_lengths: Tensor, *, limit: int, buffer: float, penalty: float = 1.0) -> Tensor:
    """Return what a response loses for coming near the limit, or running into it: [B], at most 0.

    ``min(-(length - (limit - buffer)) / buffer * penalty, 0)``: nothing up to ``limit - buffer`` tokens, then
    down in a straight line to ``-penalty`` at ``limit``.

    Source: DAPO, arXiv:2503.14476, equation 13 (soft overlong punishment).

    Example:
        >>> overlong_penalty(torch.tensor([50, 90, 100]), limit=100, buffer=20).tolist()
        [0.0, -0.5, -1.0]
    """
    excess = (response_lengths - (limit - buffer)).to(torch.float64) / buffer
    return torch.where(excess > 0, -penalty * excess, 0)


def shape_rewards(
    rewards: Tensor,
    valid: Tensor,
    response_lengths: Tensor,
    algorithm: Algorithm,
    moments: RunningMoments,
) -> Tensor:
    """Apply the algorithm's reward settings in their fixed order: [B] float64, 0 on invalid rows.

    Scale and shift, clip, normalise (by this batch, or by running moments that already include it), smooth
    towards the running mean of what arrives there, and last the overlong penalty. With normalisation by
    ``running`` the mean smoothed towards is 0, the normalised mean.
    """
    shaped = scaled(rewards, valid, algorithm)
    kept = shaped[valid]
    mean = moments.mean
    if algorithm.reward_normalize == "batch" and len(kept):
        shaped = normalize(shaped, valid, float(kept.mean()), float(kept.std(correction=0)))
        mean = 0.0
    elif algorithm.reward_normalize == "running":
        shaped = normalize(shaped, valid, moments.mean, moments.std)
        mean = 0.0
    if algorithm.reward_smoothing:
        shaped = smooth(shaped, valid, mean, algorithm.reward_smoothing)
    if algorithm.overlong_buffer is not None:
        if algorithm.max_response_tokens is None:
            raise ValueError("overlong_buffer needs max_response_tokens")
        limit, buffer = algorithm.max_response_tokens, algorithm.overlong_buffer
        penalty = overlong_penalty(
            response_lengths,
            limit=limit,
            buffer=buffer if buffer >= 1 else buffer * limit,
            penalty=algorithm.overlong_penalty,
        )
        shaped = torch.where(valid, shaped + penalty, 0)
    return shaped


def scaled(rewards: Tensor, valid: Tensor, algorithm: Algorithm) -> Tensor:
    """Apply scale, shift and clip: [B] float64, 0 on invalid rows."""
    values = rewards.double() * algorithm.reward_scale + algorithm.reward_shift
    if algorithm.reward_clip_low is not None or algorithm.reward_clip_high is not None:
        values = values.clamp(algorithm.reward_clip_low, algorithm.reward_clip_high)
    return torch.where(valid, values, 0)
