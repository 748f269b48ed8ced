"""How much better a response is than expected: the form of an estimator, and those that compare samples.

GRPO and its variants, RLOO, OPO, GPG and GDPO give one advantage per row [B]. An invalid row neither counts
in a statistic nor gets an advantage (0). Rewards of invalid rows are not read and may be NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from megatron_rl.algorithms.piece import Piece, ragged, torch, wrong_result
from megatron_rl.config.setting import NO_SETTING, setting
from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

_EXPECTED = "Advantages(advantages, returns) of tensors with one value per token [N]"
"""``outcome`` makes one of a value per row."""


@dataclass(frozen=True)
class AdvantageInputs:
    """Hold one step's rewards and values as advantage estimators see them (float64).

    ``rewards`` [B] are shaped, with the KL penalty taken off where it is in the reward; ``token_rewards``
    [N] are the same spread over tokens: the score on a row's last response token, the penalty where it
    arises. ``mask`` [N] marks response tokens of valid rows; ``lengths``, ``group`` and ``valid`` are [B];
    rewards of invalid rows are 0. ``values`` [N] of the critic, ``baseline_rewards`` [B] of greedy
    responses, shaped as ``rewards`` are, and ``components`` name -> [B] as the judges gave them are there
    where something computed them.
    """

    rewards: Tensor
    token_rewards: Tensor
    mask: Tensor
    lengths: Tensor
    group: Tensor
    valid: Tensor
    values: Tensor | None
    baseline_rewards: Tensor | None
    components: Mapping[str, Tensor]

    @property
    def response_lengths(self) -> Tensor:
        """Return the number of response tokens of each row: [B] float64."""
        return ragged.row_sums(self.mask.to(torch.float64), self.lengths)


class Advantages(NamedTuple):
    """Hold per-token ``advantages`` [N] and ``returns`` [N], the critic's targets; 0 outside the mask."""

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class Advantage(Piece, ABC):
    """Estimate how much better a response, or a token, is than expected.

    A subclass defines `estimate` and says by class attributes what it needs: a critic's values, a greedy
    response to each prompt, several samples of a prompt to compare. ``reads_rewards`` is false for an
    estimator that reads the reward's components instead, which nothing shapes and no penalty is taken off.
    """

    whiten: bool = setting(False, "Whether advantages are brought to mean 0 and variance 1 over the batch.")
    clip: float | None = setting(
        None, "Largest size of an advantage, after whitening.", unset="no bound", more_than=0
    )

    needs_critic: ClassVar[bool] = False
    needs_greedy_baseline: ClassVar[bool] = False
    compares_samples: ClassVar[bool] = False
    reads_rewards: ClassVar[bool] = True

    @abstractmethod
    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Return advantages and returns of every token."""

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        """Return what `estimate` does, whitened and clipped as set, and 0 outside the mask."""
        estimated = self.estimate(inputs)
        if not isinstance(estimated, tuple) or len(estimated) != 2:
            raise wrong_result(self, "estimate", _EXPECTED, estimated)
        for values in estimated:
            if getattr(values, "shape", None) != inputs.mask.shape:
                raise wrong_result(self, "estimate", _EXPECTED, values)
        advantages, returns = estimated
        if self.whiten:
            advantages = whiten(advantages, inputs.mask)
        if self.clip is not None:
            advantages = advantages.clamp(-self.clip, self.clip)
        return Advantages(torch.where(inputs.mask, advantages, 0), torch.where(inputs.mask, returns, 0))


@dataclass(frozen=True)
class FunctionAdvantage(Advantage):
    """Be a function ``(AdvantageInputs) -> Advantages`` of the user's own, without settings."""

    function: Callable[[AdvantageInputs], Advantages] | None = field(default=None, metadata=NO_SETTING)

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Return what the function does."""
        assert self.function is not None
        return self.function(inputs)


def outcome(inputs: AdvantageInputs, advantages: Tensor) -> Advantages:
    """Give every response token its row's advantage [B]; such estimators train no critic."""
    tokens = ragged.broadcast_rows(advantages, inputs.lengths) * inputs.mask
    return Advantages(tokens, tokens)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale masked-in values to mean 0 and variance 1 over the whole batch: [N].

    ``(x - mean) / sqrt(var + 1e-8)`` with the unbiased variance; 0 outside the mask. Fewer than two
    values cannot be whitened and are returned as they are.

    Source: verl torch_functional.masked_whiten.

    Example:
        >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])).tolist()[2]
        0.0
    """
    kept = values[mask]
    if len(kept) < 2:
        return torch.where(mask, values, 0)
    whitened = (values - kept.mean()) * torch.rsqrt(kept.var(correction=1) + 1e-8)
    return torch.where(mask, whitened, 0)


EPSILON = 1e-6
EPSILON_MEANING = "What is added to the standard deviation before dividing by it."
SCALE_MEANING = "Whether advantages are divided by the standard deviation."


@dataclass(frozen=True)
class GroupAdvantage(Advantage):
    """Give every token of a response the same advantage, found by comparing the prompt's samples."""

    compares_samples: ClassVar[bool] = True

    @abstractmethod
    def rows(self, inputs: AdvantageInputs) -> Tensor:
        """Return one advantage per row: [B]."""

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Return the rows' advantages on their response tokens."""
        return outcome(inputs, self.rows(inputs))


@dataclass(frozen=True)
class Grpo(GroupAdvantage):
    """Compare each reward with its group's mean, in units of the group's standard deviation.

    ``A_i = (R_i - mean_g) / (std_g + epsilon)`` with the unbiased (n-1) standard deviation. A group with
    one valid sample has mean 0 and standard deviation 1 by convention: ``A = R / (1 + epsilon)``. Equal
    rewards give exactly 0. ``scale_by_std=False`` leaves the division out (Dr.GRPO, arXiv:2503.20783,
    section 3.2).

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2; singleton rule from verl.

    Example:
        >>> inputs = advantage_inputs([1.0, 0.0, 0.0, 0.5], group=[0, 0, 0, 1])
        >>> [round(a, 3) for a in Grpo().rows(inputs).tolist()]
        [1.155, -0.577, -0.577, 0.5]
        >>> [round(a, 3) for a in Grpo(scale_by_std=False).rows(inputs).tolist()]
        [0.667, -0.333, -0.333, 0.5]
    """

    epsilon: float = setting(EPSILON, EPSILON_MEANING, at_least=0)
    scale_by_std: bool = setting(True, SCALE_MEANING)

    def rows(self, inputs: AdvantageInputs) -> Tensor:
        """Return one advantage per row: [B]."""
        count, mean, std = ragged.group_statistics(inputs.rewards, inputs.group, inputs.valid)
        advantages = inputs.rewards - torch.where(count > 1, mean, 0)
        if self.scale_by_std:
            advantages = advantages / (torch.where(count > 1, std, 1) + self.epsilon)
        return torch.where(inputs.valid, advantages, 0)


@dataclass(frozen=True)
class GrpoLeaveOneOut(GroupAdvantage):
    """Compare each reward with mean and standard deviation of its group's *other* samples.

    ``A_i = (R_i - mean_others) / (std_others + epsilon)``, divided only where the others differ (their
    unbiased standard deviation is > 0, which takes three samples). A row without valid others gets 0. The
    baseline does not depend on the row's own reward, so the policy gradient stays unbiased (before scaling).

    Source: Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!" (2019); the scaling is
    NeMo-RL's default GRPO.

    Example:
        >>> inputs = advantage_inputs([1.0, 0.0, 0.0], group=[0, 0, 0])
        >>> [round(a, 3) for a in GrpoLeaveOneOut().rows(inputs).tolist()]
        [1.0, -0.707, -0.707]
    """

    epsilon: float = setting(EPSILON, EPSILON_MEANING, at_least=0)
    scale_by_std: bool = setting(True, SCALE_MEANING)

    def rows(self, inputs: AdvantageInputs) -> Tensor:
        """Return one advantage per row: [B]."""
        others, mean, std = ragged.leave_one_out_statistics(inputs.rewards, inputs.group, inputs.valid)
        advantages = inputs.rewards - mean
        if self.scale_by_std:
            advantages = torch.where(std > 0, advantages / (std + self.epsilon), advantages)
        return torch.where(inputs.valid & (others > 0), advantages, 0)


@dataclass(frozen=True)
class GrpoPassAtK(GroupAdvantage):
    """Reward only a group's best sample, by its lead over the second: the gradient of pass@k, k = n.

    The first sample with the largest reward gets ``(R_max - R_second) / (std_g + epsilon)``, all others 0.
    A tie at the top gives 0 everywhere, and so does a group with fewer than two valid samples.

    Source: arXiv:2503.19595; form of verl.

    Example:
        >>> inputs = advantage_inputs([2.0, 1.0, 0.0], group=[0, 0, 0])
        >>> [round(a, 3) for a in GrpoPassAtK().rows(inputs).tolist()]
        [1.0, 0.0, 0.0]
    """

    epsilon: float = setting(EPSILON, EPSILON_MEANING, at_least=0)

    def rows(self, inputs: AdvantageInputs) -> Tensor:
        """Return one advantage per row: [B]."""
        samples = (inputs.rewards, inputs.group, inputs.valid)
        count, _, std = ragged.group_statistics(*samples)
        largest, second = ragged.group_top2(*samples)
        lead = torch.where(count > 1, largest - second, 0) / (std + self.epsilon)
        return torch.where(ragged.first_best(*samples), lead, 0)


@dataclass(frozen=True)
class Rloo(GroupAdvantage):
    """Subtract the mean of the group's other samples.

    ``A_i = R_i - mean_(j != i) R_j = n / (n - 1) (R_i - mean_g)``. A group with one valid sample has no
    baseline: ``A = R``.

    Source: Back to Basics, arXiv:2402.14740, section 3; singleton rule from verl.

    Example:
        >>> Rloo().rows(advantage_inputs([1.0, 0.0, 0.5], group=[0, 0, 0])).tolist()
        [0.75, -0.75, 0.0]
    """

    def rows(self, inputs: AdvantageInputs) -> Tensor:
        """Return one advantage per row: [B]."""
        mean = ragged.leave_one_out_statistics(inputs.rewards, inputs.group, inputs.valid).mean
        return torch.where(inputs.valid, inputs.rewards - mean, 0)


@dataclass(frozen=True)
class Opo(GroupAdvantage):
    """Subtract the group's length-weighted mean, the baseline of least gradient variance.

    ``A_i = R_i - sum_j l_j R_j / sum_j l_j`` with response lengths l [B] in tokens, under the assumption
    that a gradient's squared norm grows with its length. A singleton has no baseline: ``A = R``; so does a
    group whose valid responses are all empty.

    Source: OPO, arXiv:2505.23585; singleton rule from verl.

    Example:
        >>> Opo().rows(advantage_inputs([1.0, 0.0], group=[0, 0], lengths=[1, 3])).tolist()
        [0.75, -0.25]
    """

    def rows(self, inputs: AdvantageInputs) -> Tensor:
        """Return one advantage per row: [B]."""
        rewards, group, valid = inputs.rewards, inputs.group, inputs.valid
        count, mean, std = ragged.group_statistics(rewards, group, valid)
        weights = torch.where(valid, inputs.response_lengths.to(rewards.dtype), 0)
        total = ragged.group_sums(weights, group)
        weighted = ragged.group_sums(weights * torch.where(valid, rewards, 0), group) / total.clamp(min=1)
        baseline = torch.where(std == 0, mean, weighted)
        baseline = torch.where((count > 1) & (total > 0), baseline, 0)
        return torch.where(valid, rewards - baseline, 0)


@dataclass(frozen=True)
class Gpg(GroupAdvantage):
    """Centre on the group's mean and make up for the rows whose reward is zero.

    ``A_i = alpha (R_i - mean_g) / normalizer`` with ``alpha = B / max(#{R != 0}, 1)`` over the valid rows of
    the whole batch. A singleton has mean 0: ``A = alpha R``.

    Source: GPG, arXiv:2504.02546, with verl's reading of alpha.

    Example:
        >>> Gpg().rows(advantage_inputs([1.0, 0.0], group=[0, 0])).tolist()
        [1.0, -1.0]
    """

    normalizer: float = setting(1.0, "What the advantages are divided by.", more_than=0)

    def rows(self, inputs: AdvantageInputs) -> Tensor:
        """Return one advantage per row: [B]."""
        rewards, valid = inputs.rewards, inputs.valid
        count, mean, _ = ragged.group_statistics(rewards, inputs.group, valid)
        alpha = valid.sum().to(rewards.dtype) / (valid & (rewards != 0)).sum().clamp(min=1)
        centred = rewards - torch.where(count > 1, mean, 0)
        return torch.where(valid, alpha * centred / self.normalizer, 0)


@dataclass(frozen=True)
class Gdpo(GroupAdvantage):
    """Normalise each reward component within the group, then add the components up.

    ``A_i = sum_k w_k GRPO(r_k)_i``; GDPO then whitens over the batch (``whiten``). Normalising the sum
    instead lets different mixes of components collapse into equal advantages. ``reward`` itself is a
    component only where there is no other. A row whose component is NaN counts as failed in that component.
    Shaping and penalties of the whole reward do not reach components, so they are refused beside it: a
    penalty is a component of its own.

    Source: GDPO, arXiv:2601.05242; the example is the paper's.

    Example:
        Rewards (0, 1) in one component and (0, 2) in two are the same to GRPO, not to GDPO.

        >>> one, two = {"a": [0.0, 1.0], "b": [0.0, 0.0]}, {"a": [0.0, 1.0], "b": [0.0, 1.0]}
        >>> inputs = advantage_inputs([0.0, 1.0], group=[0, 0], components=one)
        >>> [round(a, 3) for a in Gdpo().rows(inputs).tolist()]
        [-0.707, 0.707]
        >>> inputs = advantage_inputs([0.0, 2.0], group=[0, 0], components=two)
        >>> [round(a, 3) for a in Gdpo().rows(inputs).tolist()]
        [-1.414, 1.414]
    """

    epsilon: float = setting(EPSILON, EPSILON_MEANING, at_least=0)
    weights: dict[str, float] = setting(
        {}, "Weight of each reward component that takes part.", unset="empty: all with weight 1"
    )

    reads_rewards: ClassVar[bool] = False

    def rows(self, inputs: AdvantageInputs) -> Tensor:
        """Return one advantage per row: [B]."""
        components = {name: value for name, value in inputs.components.items() if name != "reward"}
        components = components or {"reward": inputs.rewards}
        weights = self.weights or dict.fromkeys(components, 1.0)
        missing = sorted(set(weights) - set(components))
        if missing:
            raise UserError(
                f"no response of a step has the reward component {', '.join(missing)}",
                where="algorithm.advantage.weights",
                expected="components that the reward returns, of every response that it judges",
                got=f"components {', '.join(sorted(components))}",
                fix="correct the name, or have the reward return it always (0 where there is nothing to say)",
            )
        normalized = Grpo(epsilon=self.epsilon)
        total = torch.zeros_like(inputs.rewards)
        for name, weight in weights.items():
            component = components[name]
            valid = inputs.valid & component.isfinite()
            total = total + weight * normalized.rows(replace(inputs, rewards=component, valid=valid))
        return total
