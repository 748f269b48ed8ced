"""Reward shaping [B], overlong penalty, imitation of good responses, and DAPO's dynamic sampling.

``valid`` [B] marks rows with a usable reward; the rewards of other rows are not read, enter no statistic and
are returned as 0. For dynamic sampling this module only computes which groups are informative, and how many
more prompts to sample. The trainer generates their responses.
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

# Keeps the division by a standard deviation of 0 finite.
EPSILON = 1e-6


class RunningMoments(NamedTuple):
    """Exponentially weighted sums of rewards; divide by ``weight`` for the moments.

    Example: after one step of rewards 1 and 3 with decay 0.9,
    ``RunningMoments(weight=0.1, first=0.2, second=0.5)`` has mean 2 and standard deviation 1.
    """

    weight: float = 0.0
    """Sum of the weights, which approaches 1."""
    first: float = 0.0
    """Weighted sum of the steps' mean rewards."""
    second: float = 0.0
    """Weighted sum of the steps' mean squared rewards."""

    @property
    def mean(self) -> float:
        """Running mean of the rewards, 0 before the first update."""
        # `first` is a weighted sum of rewards, and `weight` the sum of these weights.
        if not self.weight:
            return 0.0
        return self.first / self.weight

    @property
    def std(self) -> float:
        """Running standard deviation (population) of the rewards, 1 before the first update."""
        if not self.weight:
            return 1.0
        # Rounding can make the variance of equal rewards slightly negative.
        variance = self.second / self.weight - self.mean**2
        return max(variance, 0.0) ** 0.5


@dataclass(frozen=True)
class RewardShaping(Piece):
    """Scaling, shift, clipping, normalisation and smoothing of rewards, in this order.

    Normalisation uses the moments of this batch, or running moments that already include it. Smoothing moves
    rewards towards the running mean of the clipped rewards, or towards 0 after normalisation.
    """

    scale: float = setting(1.0, "Factor of the reward.")
    shift: float = setting(0.0, "Constant added to the scaled reward.")
    clip_low: float | None = setting(None, "Smallest reward.", unset="no bound")
    clip_high: float | None = setting(None, "Largest reward.", unset="no bound")
    normalize: str = setting(
        "none",
        "Mean and standard deviation that rewards are normalised by.",
        choices=("none", "batch", "running"),
    )
    ema_decay: float = setting(0.99, "Decay of the running mean and variance.", at_least=0, at_most=1)
    smoothing: float = setting(
        0.0,
        "Share of the running mean mixed into every reward.",
        at_least=0,
        at_most=1,
    )

    def contradictions(self, path: str) -> Iterator[UserError]:
        """Yield the error for a ``clip_low`` above ``clip_high``."""
        low = self.clip_low
        high = self.clip_high
        if low is not None and high is not None and low > high:
            yield UserError(
                "clip_low is above clip_high",
                where=f"{path}.clip_low",
                expected=f"at most {high:g}",
                got=f"{low:g}",
                fix="swap clip_low and clip_high",
            )

    @property
    def changes_rewards(self) -> bool:
        """Whether shaping can change a reward: any setting but ``ema_decay`` differs from its default."""
        return replace(self, ema_decay=0.99) != RewardShaping()

    def scale_and_clip(self, rewards: Tensor, valid: Tensor) -> Tensor:
        """Scale, shift and clip the rewards: [B] float64, 0 on invalid rows."""
        values = rewards.double() * self.scale + self.shift
        if self.clip_low is not None or self.clip_high is not None:
            values = values.clamp(self.clip_low, self.clip_high)
        return torch.where(valid, values, 0)

    def moments_after(
        self,
        moments: RunningMoments,
        rewards: Tensor,
        valid: Tensor,
    ) -> RunningMoments:
        """Return the running moments after a step with these raw rewards [B]."""
        clipped_rewards = self.scale_and_clip(rewards, valid)
        return update_moments(moments, clipped_rewards, valid, decay=self.ema_decay)

    def shape(
        self,
        rewards: Tensor,
        sample_rewards: Tensor,
        valid: Tensor,
        moments: RunningMoments,
    ) -> Tensor:
        """Shape the rewards of sampled or greedy responses: [B] float64, 0 on invalid rows.

        ``rewards`` [B]: rewards to shape, either ``sample_rewards`` or the rewards of the greedy responses to
        the same prompts. ``sample_rewards`` [B]: rewards of the sampled responses, from which the statistics
        of the batch are computed. ``moments``: running moments, which include this step's rewards.
        """
        shaped = self.scale_and_clip(rewards, valid)
        samples = self.scale_and_clip(sample_rewards, valid)[valid]

        # Mean towards which smoothing moves the rewards: the running mean, or 0 after normalisation.
        mean = moments.mean
        if self.normalize == "batch" and len(samples):
            shaped = normalize(shaped, valid, float(samples.mean()), float(samples.std(correction=0)))
            mean = 0.0
        elif self.normalize == "running":
            shaped = normalize(shaped, valid, moments.mean, moments.std)
            mean = 0.0

        if not self.smoothing:
            return shaped
        return smooth(shaped, valid, mean, self.smoothing)


@dataclass(frozen=True)
class Overlong(Piece):
    """Penalty for responses near the length limit, and a filter for truncated responses.

    Source: DAPO, arXiv:2503.14476, section 3.4.
    """

    buffer: float | None = setting(
        None,
        "Tokens before the limit at which the penalty starts; below 1 a share of each response's own limit.",
        unit="tokens",
        unset="no penalty",
        more_than=0,
    )
    penalty: float = setting(1.0, "Penalty of a response at the limit, or beyond it.", at_least=0)
    filter: bool = setting(False, "Whether rows cut off by the limit are excluded from the loss.")
    limit: int | None = setting(
        None,
        "Length at which the penalty is full.",
        unit="tokens",
        unset="rollout.max_response_tokens, or that of the task's sampling profile",
        at_least=1,
    )

    @property
    def needs_scoring_pass(self) -> bool:
        """Whether the filter is on: metrics of filtered rows need the actor's log-probs before the loss."""
        return self.filter

    def contradictions(self, path: str) -> Iterator[UserError]:
        """Yield the error for a ``buffer`` that is longer than ``limit``."""
        if self.limit is not None:
            yield from self.buffer_errors(path, {f"{path}.limit": self.limit})

    def buffer_errors(self, path: str, limits: Mapping[str, int]) -> Iterator[UserError]:
        """Yield an error for each length limit that is shorter than the setting ``buffer``.

        The buffer is the number of tokens before a limit at which the penalty starts. ``limits``:
        configuration key of a limit -> maximum length of a response in tokens.
        """
        for key, limit in limits.items():
            if self.buffer is not None and self.buffer > limit:
                yield UserError(
                    "the overlong buffer is longer than a response may be",
                    where=f"{path}.buffer",
                    expected=f"at most {limit} tokens, {key}",
                    got=f"{self.buffer:g}",
                    fix="lower the buffer; a value below 1, such as 0.2, is a share of the limit",
                )

    def punish(
        self,
        rewards: Tensor,
        valid: Tensor,
        response_lengths: Tensor,
        limits: Tensor,
    ) -> Tensor:
        """Return the rewards with the penalty added: [B], 0 on invalid rows.

        ``limits`` [B] is the length limit of each response; if the setting ``limit`` is given, it replaces
        them. ``response_lengths`` [B] must count the same tokens as the limits.
        """
        if self.buffer is None:
            return rewards

        if self.limit is not None:
            limits = torch.full_like(limits, self.limit)
        limits = limits.double()

        # A buffer below 1 is a share of each row's limit, since sampling profiles have different limits.
        buffer = self.buffer * limits
        if self.buffer >= 1:
            buffer = torch.full_like(limits, self.buffer)

        penalty = overlong_penalty(
            response_lengths,
            limit=limits,
            buffer=buffer,
            penalty=self.penalty,
        )
        return torch.where(valid, rewards + penalty, 0)


@dataclass(frozen=True)
class Imitation(Piece):
    """Negative log-likelihood of good responses, added to the policy loss.

    Source: VAPO, arXiv:2504.05118, positive-example language-model loss.
    """

    coef: float = setting(0.0, "Weight of the mean over the good responses' tokens.", at_least=0)
    threshold: float = setting(0.0, "Responses with a larger raw reward are good.")

    def imitated_tokens(
        self,
        rewards: Tensor,
        valid: Tensor,
        mask: Tensor,
        lengths: Tensor,
    ) -> Tensor | None:
        """Mark the tokens that the policy imitates: [N] float32, 1 in good responses and 0 elsewhere.

        A response is good if its raw reward exceeds ``threshold``. `token_weights` computes the loss weights
        of these tokens. Returns None if ``coef`` is 0, which turns imitation off.
        """
        if not self.coef:
            return None
        is_good = valid & (rewards > self.threshold)
        return (mask & ragged.broadcast_rows(is_good, lengths)).float()

    def token_weights(self, imitated: Tensor, mask: Tensor) -> Tensor:
        """Compute the weight of every token [N] in the negative log-likelihood loss of a mini-batch.

        The weight of a token of a good response (a response that the policy imitates) is ``coef`` divided by
        the number of these tokens. All other tokens have weight 0. ``imitated`` [N]: result of
        `imitated_tokens` for the mini-batch. ``mask`` [N] bool: response tokens that have a loss.
        """
        # The clamp avoids 0 / 0 in a mini-batch without a good response.
        is_imitated = (imitated > 0) & mask
        return is_imitated.float() * self.coef / is_imitated.sum().clamp(min=1)


def update_moments(
    moments: RunningMoments,
    rewards: Tensor,
    valid: Tensor,
    *,
    decay: float,
) -> RunningMoments:
    """Return the running moments after a step's rewards; a step without a valid reward changes nothing.

    Each moment m is updated as ``m <- decay m + (1 - decay) mean(x)``, with x = 1 for ``weight``, x = R for
    ``first`` and x = R^2 for ``second``. `RunningMoments.mean` and ``std`` divide by ``weight``. This removes
    the bias towards the initial 0, as in Adam.

    Example:
        >>> m = update_moments(RunningMoments(), torch.tensor([1.0, 3.0]), torch.ones(2) > 0, decay=0.9)
        >>> round(m.mean, 6), round(m.std, 6)
        (2.0, 1.0)
    """
    samples = rewards[valid].double()
    if not len(samples):
        return moments

    step_moments = (1.0, float(samples.mean()), float((samples**2).mean()))
    new_moments = [
        decay * old_moment + (1 - decay) * step_moment
        for old_moment, step_moment in zip(moments, step_moments, strict=True)
    ]
    return RunningMoments(*new_moments)


def normalize(rewards: Tensor, valid: Tensor, mean: float, std: float) -> Tensor:
    """Compute ``(R - mean) / (std + 1e-6)`` on valid rows: [B].

    Example:
        >>> rewards, valid = torch.tensor([3.0, 1.0]), torch.tensor([True, False])
        >>> [round(r, 3) for r in normalize(rewards, valid, 1.0, 2.0).tolist()]
        [1.0, 0.0]
    """
    return torch.where(valid, (rewards - mean) / (std + EPSILON), 0)


def smooth(rewards: Tensor, valid: Tensor, mean: float, share: float) -> Tensor:
    """Mix a mean into the reward of every valid row: ``(1 - share) R + share mean``, [B].

    Example:
        >>> smooth(torch.tensor([1.0]), torch.tensor([True]), 0.0, 0.25).tolist()
        [0.75]
    """
    return torch.where(valid, (1 - share) * rewards + share * mean, 0)


def overlong_penalty(
    response_lengths: Tensor,
    *,
    limit: float | Tensor,
    buffer: float | Tensor,
    penalty: float,
) -> Tensor:
    """Compute the penalty of responses near or beyond the length limit: [B], at most 0.

    The penalty is 0 up to ``limit - buffer`` tokens. It then falls linearly to ``-penalty`` at ``limit``:
    ``(limit - buffer - length) / buffer * penalty``. Beyond the limit it is ``-penalty``. ``limit`` and
    ``buffer`` are numbers, or one number per response [B].

    Source: DAPO, arXiv:2503.14476, equation 13 (soft overlong punishment).

    Example:
        >>> overlong_penalty(torch.tensor([50, 90, 100]), limit=100, buffer=20, penalty=1.0).tolist()
        [0.0, -0.5, -1.0]
        >>> overlong_penalty(torch.tensor([200, 400]), limit=100, buffer=20, penalty=1.0).tolist()
        [-1.0, -1.0]
    """
    # Fraction of the buffer that a response uses: 0 at its start, 1 at the limit.
    used_fraction = (response_lengths - (limit - buffer)).to(torch.float64) / buffer
    return torch.where(used_fraction > 0, -penalty * used_fraction.clamp(max=1.0), 0)


@dataclass(frozen=True)
class DynamicSampling(Piece):
    """Handling of groups with equal rewards, which have no gradient: keep them, or sample other prompts."""

    @property
    def further_rounds(self) -> int:
        """Largest number of additional sampling rounds of a step; 0 keeps every group."""
        return 0


@dataclass(frozen=True)
class KeepEveryGroup(DynamicSampling):
    """No dynamic sampling: every sampled group is in the train batch."""


@dataclass(frozen=True)
class RefillGroups(DynamicSampling):
    """Dynamic sampling: groups whose raw rewards are all equal are replaced by newly sampled groups.

    Source: DAPO, arXiv:2503.14476, equation 11.
    """

    max_rounds: int = setting(
        10,
        "Largest number of additional sampling rounds of a step.",
        unit="rounds",
        at_least=1,
    )

    @property
    def further_rounds(self) -> int:
        """Largest number of additional sampling rounds of a step."""
        return self.max_rounds


def informative_groups(
    rewards: Tensor,
    group: Tensor,
    valid: Tensor,
    *,
    tolerance: float = 1e-6,
) -> Tensor:
    """Mark the rows of groups whose raw rewards differ: [B] bool.

    A group is informative if the standard deviation of its valid rewards is above ``tolerance``; a group with
    fewer than two valid rewards is not. Pass raw rewards: a length penalty would make every group differ.

    Source: DAPO, arXiv:2503.14476, equation 11 (dynamic sampling).

    Example:
        >>> rewards, group = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
        >>> informative_groups(rewards, group, torch.ones(4) > 0).tolist()
        [True, True, False, False]
    """
    statistics = ragged.group_statistics(rewards.double(), group, valid)
    return (statistics.size > 1) & (statistics.std > tolerance)


def count_groups(is_marked: Tensor, group: Tensor) -> int:
    """Count the groups that have at least one marked row; ``is_marked`` is [B] bool."""
    return len(torch.unique(group[is_marked]))


def take_groups(informative: Tensor, group: Tensor, group_count: int) -> list[int]:
    """Return the row numbers of the first ``group_count`` informative groups, in ascending order.

    Groups are counted in order of first appearance. If fewer groups are informative, all of their rows are
    returned. ``informative`` [B] bool is constant over a group.

    Example:
        >>> take_groups(torch.tensor([True, False, True, True]), torch.tensor([5, 6, 7, 5]), 1)
        [0, 3]
    """
    group_index = ragged.renumber_groups(group)[0].tolist()
    rows_by_group: dict[int, list[int]] = {}
    for row, is_informative in enumerate(informative.tolist()):
        if is_informative:
            rows_by_group.setdefault(group_index[row], []).append(row)

    # A dict keeps insertion order, which is the order of first appearance.
    selected_rows: list[int] = []
    for rows in list(rows_by_group.values())[:group_count]:
        selected_rows.extend(rows)
    return sorted(selected_rows)


def prompts_to_sample(
    required: int,
    informative: int,
    sampled: int,
    *,
    ceiling: int,
) -> int:
    """Return the number of prompts to sample for ``required`` informative groups, 0 if there are enough.

    So far ``sampled`` groups were generated, and ``informative`` of them were informative. The number of
    missing groups is divided by the rate of informative groups and rounded up. ``ceiling`` is the maximum for
    one round. Half a group is added to both counts, so that the rate is positive before the first informative
    group.

    Example:
        >>> prompts_to_sample(64, 64, 100, ceiling=256)
        0
        >>> prompts_to_sample(64, 32, 64, ceiling=256)
        64
    """
    missing_groups = required - informative
    if missing_groups <= 0:
        return 0

    # The first round has no rate to extrapolate from.
    if not sampled:
        return min(missing_groups, ceiling)

    rate = min((informative + 0.5) / (sampled + 0.5), 1.0)
    return min(math.ceil(missing_groups / rate), ceiling)
