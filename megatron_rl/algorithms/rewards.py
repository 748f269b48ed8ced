"""Shaping of sequence rewards [B], punishment of overlong responses, imitation of good ones, DAPO's sampling.

``valid`` [B] marks rows with a usable reward; the others are not read, enter no statistic and come back
as 0. Dynamic sampling is decisions alone, which groups teach something and how many more to sample; the loop
that generates is the trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from megatron_rl.algorithms.piece import Piece, ragged, torch
from megatron_rl.config.setting import setting
from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

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


@dataclass(frozen=True)
class RewardShaping(Piece):
    """Scale and shift rewards, clip them, normalise, and smooth, in this order.

    Normalising is by this batch, or by running moments that already include it; smoothing is towards the
    running mean of what arrives there, which is 0 after normalising.
    """

    scale: float = setting(1.0, "What a reward is multiplied by.")
    shift: float = setting(0.0, "What is added to it then.")
    clip_low: float | None = setting(None, "Smallest reward.", unset="no bound")
    clip_high: float | None = setting(None, "Largest reward.", unset="no bound")
    normalize: str = setting(
        "none",
        "Whose mean and standard deviation rewards are normalised by.",
        choices=("none", "batch", "running"),
    )
    ema_decay: float = setting(0.99, "Decay of the running mean and variance.", at_least=0, at_most=1)
    smoothing: float = setting(
        0.0, "Share of the running mean mixed into every reward.", at_least=0, at_most=1
    )

    def contradictions(self, path: str) -> Iterator[UserError]:
        """Yield the error of bounds in the wrong order."""
        low, high = self.clip_low, self.clip_high
        if low is not None and high is not None and low > high:
            yield UserError(
                "clip_low is above clip_high",
                where=f"{path}.clip_low",
                expected=f"at most {high:g}",
                got=f"{low:g}",
                fix="exchange the two",
            )

    @property
    def changes(self) -> bool:
        """Say whether a reward comes out other than it came in."""
        return replace(self, ema_decay=0.99) != RewardShaping()

    def scaled(self, rewards: Tensor, valid: Tensor) -> Tensor:
        """Apply scale, shift and clip: [B] float64, 0 on invalid rows."""
        values = rewards.double() * self.scale + self.shift
        if self.clip_low is not None or self.clip_high is not None:
            values = values.clamp(self.clip_low, self.clip_high)
        return torch.where(valid, values, 0)

    def moments_after(self, moments: RunningMoments, rewards: Tensor, valid: Tensor) -> RunningMoments:
        """Return the running moments after a step's raw rewards."""
        return update_moments(moments, self.scaled(rewards, valid), valid, decay=self.ema_decay)

    def shape(self, values: Tensor, rewards: Tensor, valid: Tensor, moments: RunningMoments) -> Tensor:
        """Return ``values`` [B] shaped: float64, 0 on invalid rows; ``moments`` include this step's.

        ``values`` are the samples' ``rewards`` [B] themselves, or of responses that are compared with them;
        statistics of the batch are those of ``rewards``.
        """
        shaped = self.scaled(values, valid)
        kept = self.scaled(rewards, valid)[valid]
        mean = moments.mean
        if self.normalize == "batch" and len(kept):
            shaped = normalize(shaped, valid, float(kept.mean()), float(kept.std(correction=0)))
            mean = 0.0
        elif self.normalize == "running":
            shaped = normalize(shaped, valid, moments.mean, moments.std)
            mean = 0.0
        return smooth(shaped, valid, mean, self.smoothing) if self.smoothing else shaped


@dataclass(frozen=True)
class Overlong(Piece):
    """Punish responses that come near the length limit, or leave out of the loss those that it cut off.

    Source: DAPO, arXiv:2503.14476, section 3.4.
    """

    buffer: float | None = setting(
        None,
        "Tokens before the limit where the penalty starts; below 1 a share of each response's own limit.",
        unit="tokens",
        unset="no penalty",
        more_than=0,
    )
    penalty: float = setting(1.0, "What a response at the limit, or beyond it, loses.", at_least=0)
    filter: bool = setting(False, "Whether rows cut off by the limit take no part in the loss.")
    limit: int | None = setting(
        None,
        "Length at which the penalty is full.",
        unit="tokens",
        unset="rollout.max_response_tokens, or that of the task's sampling profile",
        at_least=1,
    )

    @property
    def needs_scoring_pass(self) -> bool:
        """Say whether rows are measured that are not learned from."""
        return self.filter

    def contradictions(self, path: str) -> Iterator[UserError]:
        """Yield the error of a buffer that is longer than the limit that the piece itself states."""
        if self.limit is not None:
            yield from self.buffer_errors(path, {f"{path}.limit": self.limit})

    def buffer_errors(self, path: str, limits: Mapping[str, int]) -> Iterator[UserError]:
        """Yield an error for each of the ``limits``, by its key, that is shorter than the buffer."""
        for key, limit in limits.items():
            if self.buffer is not None and self.buffer > limit:
                yield UserError(
                    "the overlong buffer is longer than a response may be",
                    where=f"{path}.buffer",
                    expected=f"at most {limit} tokens, {key}",
                    got=f"{self.buffer:g}",
                    fix="lower it; below 1 it is a share of the limit, such as 0.2",
                )

    def punish(self, rewards: Tensor, valid: Tensor, response_lengths: Tensor, limits: Tensor) -> Tensor:
        """Return the rewards with the penalty added: [B], 0 on invalid rows.

        ``response_lengths`` [B] are compared with ``limits`` [B], the longest that each response may get,
        or with the piece's own ``limit`` where it states one. Both count the same tokens.
        """
        if self.buffer is None:
            return rewards

        if self.limit is not None:
            limits = torch.full_like(limits, self.limit)
        limits = limits.double()
        buffer = torch.full_like(limits, self.buffer) if self.buffer >= 1 else self.buffer * limits

        penalty = overlong_penalty(response_lengths, limit=limits, buffer=buffer, penalty=self.penalty)
        return torch.where(valid, rewards + penalty, 0)


@dataclass(frozen=True)
class Imitation(Piece):
    """Add the negative log-likelihood of good responses to the policy loss.

    Source: VAPO, arXiv:2504.05118, positive-example language-model loss.
    """

    coef: float = setting(0.0, "Weight of the mean over the good responses' tokens.", at_least=0)
    threshold: float = setting(0.0, "Responses with a larger raw reward are good.")

    def marks(self, rewards: Tensor, valid: Tensor, mask: Tensor, lengths: Tensor) -> Tensor | None:
        """Mark the tokens to imitate with 1: [N]; `weights` turns the marks into weights."""
        if not self.coef:
            return None
        good = valid & (rewards > self.threshold)
        return (mask & ragged.broadcast_rows(good, lengths)).float()

    def weights(self, marks: Tensor, mask: Tensor) -> Tensor:
        """Return the weight of every token [N] of a mini-batch."""
        good = (marks > 0) & mask
        return good.float() * self.coef / good.sum().clamp(min=1)


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


def overlong_penalty(
    response_lengths: Tensor, *, limit: float | Tensor, buffer: float | Tensor, penalty: float
) -> Tensor:
    """Return what a response loses for coming near the limit, or running into it: [B], at most 0.

    Nothing up to ``limit - buffer`` tokens, then ``(limit - buffer - length) / buffer * penalty``, a straight
    line down to ``-penalty`` at ``limit``, and ``-penalty`` beyond. ``limit`` and ``buffer`` are numbers, or
    one number of each response [B].

    Source: DAPO, arXiv:2503.14476, equation 13 (soft overlong punishment).

    Example:
        >>> overlong_penalty(torch.tensor([50, 90, 100]), limit=100, buffer=20, penalty=1.0).tolist()
        [0.0, -0.5, -1.0]
        >>> overlong_penalty(torch.tensor([200, 400]), limit=100, buffer=20, penalty=1.0).tolist()
        [-1.0, -1.0]
    """
    excess = (response_lengths - (limit - buffer)).to(torch.float64) / buffer
    return torch.where(excess > 0, -penalty * excess.clamp(max=1.0), 0)


@dataclass(frozen=True)
class DynamicSampling(Piece):
    """Say whether groups of responses that teach nothing are replaced, and for how long that is tried."""

    @property
    def further_rounds(self) -> int:
        """Return how often a step may sample again; 0 takes every group as it comes."""
        return 0


@dataclass(frozen=True)
class KeepEveryGroup(DynamicSampling):
    """Learn from every group as it was sampled."""


@dataclass(frozen=True)
class RefillGroups(DynamicSampling):
    """Replace groups whose raw rewards are all equal by newly sampled ones.

    Source: DAPO, arXiv:2503.14476, equation 11.
    """

    max_rounds: int = setting(10, "How often a step samples again at most.", unit="rounds", at_least=1)

    @property
    def further_rounds(self) -> int:
        """Return how often a step may sample again."""
        return self.max_rounds


def informative_groups(rewards: Tensor, group: Tensor, valid: Tensor, *, tolerance: float = 1e-6) -> Tensor:
    """Mark the rows of groups whose raw rewards differ: [B] bool.

    A group is kept when the standard deviation of its valid rewards is above ``tolerance``. Groups with
    fewer than two valid rewards are not kept. Give it raw rewards: a length penalty would make every group
    differ.

    Source: DAPO, arXiv:2503.14476, equation 11 (dynamic sampling).

    Example:
        >>> rewards, group = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
        >>> informative_groups(rewards, group, torch.ones(4) > 0).tolist()
        [True, True, False, False]
    """
    statistics = ragged.group_statistics(rewards.double(), group, valid)
    return (statistics.size > 1) & (statistics.std > tolerance)


def count_groups(rows: Tensor, group: Tensor) -> int:
    """Count the groups that have at least one of the marked ``rows`` [B] bool."""
    return len(torch.unique(group[rows]))


def take_groups(keep: Tensor, group: Tensor, wanted: int) -> list[int]:
    """Return the rows of the first ``wanted`` kept groups, in order of first appearance.

    Fewer come back where fewer groups are kept. ``keep`` [B] bool is constant over a group.

    Example:
        >>> take_groups(torch.tensor([True, False, True, True]), torch.tensor([5, 6, 7, 5]), 1)
        [0, 3]
    """
    dense, _ = ragged.dense_groups(group)
    rows_of_group: dict[int, list[int]] = {}
    for row, (kept, number) in enumerate(zip(keep.tolist(), dense.tolist(), strict=True)):
        if kept:
            rows_of_group.setdefault(number, []).append(row)
    return sorted(row for rows in list(rows_of_group.values())[:wanted] for row in rows)


def prompts_to_sample(wanted: int, kept: int, sampled: int, *, ceiling: int) -> int:
    """Return how many more prompts to sample so that ``wanted`` groups are likely kept: 0 when done.

    The missing groups are divided by the share kept so far (as if half a group more had been kept, so that
    none kept so far is no division by zero) and rounded up; ``ceiling`` bounds one round.

    Example:
        >>> prompts_to_sample(64, 64, 100, ceiling=256)
        0
        >>> prompts_to_sample(64, 32, 64, ceiling=256)
        64
    """
    missing = wanted - kept
    if missing <= 0:
        return 0
    if not sampled:
        return min(missing, ceiling)
    share = min((kept + 0.5) / (sampled + 0.5), 1.0)
    return min(math.ceil(missing / share), ceiling)
