"""Advantage estimators: their interface, group-relative estimators, discounted returns and GAE.

GRPO and its variants, RLOO, OPO, GPG and GDPO compute one advantage per row [B]. An invalid row enters no
statistic and gets advantage 0. Rewards of invalid rows are not read and may be NaN.

Discounted returns (REINFORCE++, ReMax) and GAE (PPO, VAPO) compute one advantage per token, ragged [N] with
``lengths`` [B]; ``mask`` [N] marks response tokens. Tokens outside the mask (prompts, tool output between
turns) are skipped: the recursion continues at the next response token. Skipped tokens get advantage 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from megatron_rl.algorithms.piece import Piece, ragged, torch, wrong_result_error
from megatron_rl.config.setting import NO_SETTING, setting
from megatron_rl.errors import UserError, requirement_error

if TYPE_CHECKING:
    from torch import Tensor

_EXPECTED = "Advantages(advantages, returns) of tensors with one value per token [N]"
"""Result that an estimator must return, for error texts. `outcome` constructs it from one value per row."""


@dataclass(frozen=True)
class AdvantageInputs:
    """Rewards and values of one step: the input of an advantage estimator.

    B rows, N tokens; real numbers are float64. Optional fields are None if no role computed them.

    Example: two samples of one prompt, each one prompt token and two response tokens::

        rewards=[1, 0]  lengths=[3, 3]  group=[0, 0]  valid=[True, True]
        token_rewards=[0, 0, 1,  0, 0, 0]  mask=[F, T, T,  F, T, T]
    """

    rewards: Tensor
    """[B], shaped, minus the KL penalty if it is in the reward; 0 for invalid rows."""
    token_rewards: Tensor
    """[N], ``rewards`` per token: the reward on a row's last response token, the KL penalty on each token."""
    mask: Tensor
    """[N] bool, response tokens of valid rows."""
    lengths: Tensor
    """[B] int64, tokens of each row."""
    group: Tensor
    """[B] int64, equal for the samples of one prompt."""
    valid: Tensor
    """[B] bool, rows with a usable reward."""
    values: Tensor | None
    """[N], the critic's values."""
    baseline_rewards: Tensor | None
    """[B], reward of a greedy response to the row's prompt, with the same shaping as ``rewards``."""
    components: Mapping[str, Tensor]
    """Name -> [B], the reward's components, without shaping."""
    log_probs: Tensor | None = None
    """[N], the actor's log-probs before its first update."""
    squared_probs: Tensor | None = None
    """[N], sum of the squared probabilities of the actor's distribution of each token."""

    @property
    def response_lengths(self) -> Tensor:
        """Number of response tokens of each row: [B] float64."""
        return ragged.row_sums(self.mask.to(torch.float64), self.lengths)


class Advantages(NamedTuple):
    """Advantages and returns per token; 0 outside the mask.

    Example: ``Advantages(returns - values, returns)``.
    """

    advantages: Tensor
    """[N], weights of the policy gradient."""
    returns: Tensor
    """[N], targets of the critic."""


@dataclass(frozen=True)
class Advantage(Piece, ABC):
    """Estimator of the advantage of a response, or of each of its tokens.

    A subclass defines `estimate` and declares its requirements as class attributes: a critic, a greedy
    response per prompt, several samples per prompt.

    ``reads_rewards``: whether the estimator reads the total reward. Reward shaping and penalties change only
        the total reward, so they have no effect on an estimator that reads only the reward's components.
    ``learns_from_rewards``: whether the advantages depend on the total reward or on its components.
    """

    whiten: bool = setting(
        False, "Whether advantages are shifted and scaled to mean 0 and variance 1 over the batch."
    )
    clip: float | None = setting(
        None,
        "Largest absolute value of an advantage, after whitening.",
        unset="no bound",
        more_than=0,
    )

    needs_critic: ClassVar[bool] = False
    needs_greedy_baseline: ClassVar[bool] = False
    needs_squared_probs: ClassVar[bool] = False
    compares_samples: ClassVar[bool] = False
    reads_rewards: ClassVar[bool] = True
    learns_from_rewards: ClassVar[bool] = True

    @property
    def needs_scoring_pass(self) -> bool:
        """Whether the estimator reads squared probabilities: they need a forward pass before the loss."""
        return self.needs_squared_probs

    @abstractmethod
    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Compute advantages and returns of every token, [N] each; a subclass defines the estimator."""

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        """Run `estimate`, check its result, whiten and clip as configured, and set 0 outside the mask."""
        # A user's estimator may return any value: check it before it is used.
        result = self.estimate(inputs)
        if not isinstance(result, tuple) or len(result) != 2:
            raise wrong_result_error(self, "estimate", _EXPECTED, result)
        for values in result:
            if getattr(values, "shape", None) != inputs.mask.shape:
                raise wrong_result_error(self, "estimate", _EXPECTED, values)

        # Clip after whitening, so that the bound is in standard deviations of the batch.
        advantages, returns = result
        if self.whiten:
            advantages = whiten(advantages, inputs.mask)
        if self.clip is not None:
            advantages = advantages.clamp(-self.clip, self.clip)

        return Advantages(
            advantages=torch.where(inputs.mask, advantages, 0),
            returns=torch.where(inputs.mask, returns, 0),
        )


@dataclass(frozen=True)
class FunctionAdvantage(Advantage):
    """Estimator made from a user's function ``(AdvantageInputs) -> Advantages``, without settings."""

    function: Callable[[AdvantageInputs], Advantages] | None = field(default=None, metadata=NO_SETTING)

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Compute the advantages with the user's function."""
        assert self.function is not None
        return self.function(inputs)


@dataclass(frozen=True)
class NoRewards(Advantage):
    """Advantage 0 for every token: rewards are neither needed nor used.

    Algorithms that use no rewards, such as distillation from a teacher, need this estimator.

    Source: none; a constant reward minus an equal baseline gives this advantage.

    Example:
        >>> NoRewards()(advantage_inputs([1.0, 0.0], group=[0, 0])).advantages.abs().sum().item()
        0.0
    """

    reads_rewards: ClassVar[bool] = False
    learns_from_rewards: ClassVar[bool] = False

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Return zeros as advantages and as returns: [N] each."""
        zeros = torch.zeros(inputs.mask.shape, dtype=torch.float64)
        return Advantages(zeros, zeros)


def broadcast_row_advantages(inputs: AdvantageInputs, advantages: Tensor) -> Advantages:
    """Assign each row's advantage [B] to all its response tokens.

    The returns, which only a critic reads, are set to the same values.
    """
    token_advantages = ragged.broadcast_rows(advantages, inputs.lengths) * inputs.mask
    return Advantages(token_advantages, token_advantages)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale the masked-in values to mean 0 and variance 1 over the batch: [N].

    ``(x - mean) / sqrt(var + 1e-8)`` with the unbiased variance; 0 outside the mask. Fewer than two masked-in
    values have no variance and are returned unchanged.

    Source: verl torch_functional.masked_whiten.

    Example:
        >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])).tolist()[2]
        0.0
    """
    samples = values[mask]
    if len(samples) < 2:
        return torch.where(mask, values, 0)

    inverse_std = torch.rsqrt(samples.var(correction=1) + 1e-8)
    whitened = (values - samples.mean()) * inverse_std
    return torch.where(mask, whitened, 0)


EPSILON = 1e-6
EPSILON_MEANING = "Constant added to the standard deviation before dividing by it."
SCALE_MEANING = "Whether advantages are divided by the standard deviation."


@dataclass(frozen=True)
class GroupAdvantage(Advantage):
    """Estimator of one advantage per response, which compares the samples of a prompt."""

    compares_samples: ClassVar[bool] = True

    @abstractmethod
    def row_advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Compute one advantage per row: [B]. A subclass defines how the samples of a prompt are compared."""

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Compute one advantage per row, and assign it to all response tokens of the row."""
        return broadcast_row_advantages(inputs, self.row_advantages(inputs))


@dataclass(frozen=True)
class Grpo(GroupAdvantage):
    """Reward minus the group's mean, divided by the group's standard deviation.

    ``A_i = (R_i - mean_g) / (std_g + epsilon)`` with the unbiased (n-1) standard deviation. A group with one
    valid sample has mean 0 and standard deviation 1 by convention: ``A = R / (1 + epsilon)``. Equal rewards
    give exactly 0.

    ``scale_by_std=False`` omits the division (Dr.GRPO, arXiv:2503.20783, section 3.2). ``scale_over="batch"``
    divides by the standard deviation of all valid rewards of the step: a group of nearly equal rewards then
    gets small advantages (arXiv:2508.08221, section 4.2).

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2; singleton rule from verl.

    Example:
        >>> inputs = advantage_inputs([1.0, 0.0, 0.0, 0.5], group=[0, 0, 0, 1])
        >>> [round(a, 3) for a in Grpo().row_advantages(inputs).tolist()]
        [1.155, -0.577, -0.577, 0.5]
        >>> [round(a, 3) for a in Grpo(scale_by_std=False).row_advantages(inputs).tolist()]
        [0.667, -0.333, -0.333, 0.5]
    """

    epsilon: float = setting(EPSILON, EPSILON_MEANING, at_least=0)
    scale_by_std: bool = setting(True, SCALE_MEANING)
    scale_over: str = setting(
        "group",
        "Rewards whose standard deviation is the scale: of the prompt's samples, or of the step.",
        choices=("group", "batch"),
    )

    def contradictions(self, path: str) -> Iterator[UserError]:
        """Yield an error if ``scale_over`` is not "group" although ``scale_by_std`` is False.

        ``scale_over`` selects the standard deviation by which advantages are divided. With ``scale_by_std``
        False there is no division, so ``scale_over`` would have no effect.
        """
        if self.scale_over != "group" and not self.scale_by_std:
            yield requirement_error(
                f"{path}.scale_over",
                self.scale_over,
                "scale_by_std: true",
                got="scale_by_std: false, without a division",
                fix="leave scale_over out, or choose an algorithm that divides, such as grpo",
            )

    def row_advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Compute each row's reward minus its group's mean: [B].

        With ``scale_by_std`` the difference is divided by the standard deviation of the group or of the step.
        """
        size, mean, std = ragged.group_statistics(inputs.rewards, inputs.group, inputs.valid)

        # A single response is its own mean: subtracting it would give advantage 0 for any reward.
        advantages = inputs.rewards - torch.where(size > 1, mean, 0)
        if self.scale_by_std:
            if self.scale_over == "batch":
                # With all rows in one group, the group's standard deviation is the step's.
                one_group = torch.zeros_like(inputs.group)
                size, _, std = ragged.group_statistics(inputs.rewards, one_group, inputs.valid)
            scale = torch.where(size > 1, std, 1) + self.epsilon
            advantages = advantages / scale

        return torch.where(inputs.valid, advantages, 0)


@dataclass(frozen=True)
class GrpoLeaveOneOut(GroupAdvantage):
    """Reward minus the mean of the group's *other* samples, divided by their standard deviation.

    ``A_i = (R_i - mean_others) / (std_others + epsilon)`` with the unbiased standard deviation. The division
    is omitted if the standard deviation is 0: for equal rewards, or a single other sample. A row without
    other valid samples gets 0. The baseline does not depend on the row's own reward, so the policy gradient
    stays unbiased (before scaling).

    Source: Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!" (2019); the scaling is
    NeMo-RL's default GRPO.

    Example:
        >>> inputs = advantage_inputs([1.0, 0.0, 0.0], group=[0, 0, 0])
        >>> [round(a, 3) for a in GrpoLeaveOneOut().row_advantages(inputs).tolist()]
        [1.0, -0.707, -0.707]
    """

    epsilon: float = setting(EPSILON, EPSILON_MEANING, at_least=0)
    scale_by_std: bool = setting(True, SCALE_MEANING)

    def row_advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Compute each row's reward minus the mean of its group's other samples: [B]."""
        other_count, other_mean, other_std = ragged.leave_one_out_statistics(
            inputs.rewards, inputs.group, inputs.valid
        )

        advantages = inputs.rewards - other_mean
        if self.scale_by_std:
            scaled = advantages / (other_std + self.epsilon)
            advantages = torch.where(other_std > 0, scaled, advantages)

        return torch.where(inputs.valid & (other_count > 0), advantages, 0)


@dataclass(frozen=True)
class GrpoPassAtK(GroupAdvantage):
    """Lead of the group's best sample over the second best: the gradient of pass@k with k = n.

    The first sample with the largest reward gets ``(R_max - R_second) / (std_g + epsilon)``, all others 0.
    Every sample gets 0 if two samples share the largest reward, or if fewer than two samples are valid.

    Source: arXiv:2503.19595, in verl's form.

    Example:
        >>> inputs = advantage_inputs([2.0, 1.0, 0.0], group=[0, 0, 0])
        >>> [round(a, 3) for a in GrpoPassAtK().row_advantages(inputs).tolist()]
        [1.0, 0.0, 0.0]
    """

    epsilon: float = setting(EPSILON, EPSILON_MEANING, at_least=0)

    def row_advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Compute the advantage of each row: [B], 0 for all rows except the best of each group.

        The best row gets its lead over the second largest reward, divided by the standard deviation.
        """
        rewards = inputs.rewards
        group = inputs.group
        valid = inputs.valid
        group_size, _, group_std = ragged.group_statistics(rewards, group, valid)
        best_reward, second_reward = ragged.group_top2(rewards, group, valid)

        # In a group with one valid row, the second reward is -inf: define the lead as 0.
        lead = torch.where(group_size > 1, best_reward - second_reward, 0) / (group_std + self.epsilon)
        is_best = ragged.mark_first_best(rewards, group, valid)
        return torch.where(is_best, lead, 0)


@dataclass(frozen=True)
class Rloo(GroupAdvantage):
    """Reward minus the mean of the group's other samples.

    ``A_i = R_i - mean_(j != i) R_j = n / (n - 1) (R_i - mean_g)``. A group with one valid sample has no
    baseline: ``A = R``.

    Source: Back to Basics, arXiv:2402.14740, section 3; singleton rule from verl.

    Example:
        >>> Rloo().row_advantages(advantage_inputs([1.0, 0.0, 0.5], group=[0, 0, 0])).tolist()
        [0.75, -0.75, 0.0]
    """

    def row_advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Compute each row's reward minus the mean reward of its group's other samples: [B]."""
        # The mean of no other samples is 0, so a singleton keeps its reward.
        statistics = ragged.leave_one_out_statistics(inputs.rewards, inputs.group, inputs.valid)
        return torch.where(inputs.valid, inputs.rewards - statistics.mean, 0)


@dataclass(frozen=True)
class Opo(GroupAdvantage):
    """Reward minus the group's length-weighted mean, the baseline with the least gradient variance.

    ``A_i = R_i - sum_j l_j R_j / sum_j l_j`` with response lengths l [B] in tokens, under the assumption that
    the squared norm of a response's gradient grows with its length. A group with one valid response, or with
    only empty responses, has no baseline: ``A = R``.

    Source: OPO, arXiv:2505.23585; singleton rule from verl.

    Example:
        >>> Opo().row_advantages(advantage_inputs([1.0, 0.0], group=[0, 0], lengths=[1, 3])).tolist()
        [0.75, -0.25]
    """

    def row_advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Compute each row's reward minus its group's length-weighted mean: [B]."""
        rewards = inputs.rewards
        group = inputs.group
        valid = inputs.valid
        group_size, group_mean, group_std = ragged.group_statistics(rewards, group, valid)

        # Length-weighted mean of the valid rewards of each group.
        weights = torch.where(valid, inputs.response_lengths.to(rewards.dtype), 0)
        total_weight = ragged.group_sums(weights, group)
        weighted_sum = ragged.group_sums(weights * torch.where(valid, rewards, 0), group)
        weighted_mean = weighted_sum / total_weight.clamp(min=1)

        # For equal rewards use the unweighted mean, which is exact: rounding must not give an advantage.
        baseline = torch.where(group_std == 0, group_mean, weighted_mean)
        baseline = torch.where((group_size > 1) & (total_weight > 0), baseline, 0)
        return torch.where(valid, rewards - baseline, 0)


@dataclass(frozen=True)
class Gpg(GroupAdvantage):
    """Reward minus the group's mean, scaled up to compensate for rows with reward 0.

    ``A_i = alpha (R_i - mean_g) / normalizer`` with ``alpha = B / max(#{R != 0}, 1)`` over the valid rows of
    the whole batch. The mean of a group with one valid sample counts as 0: ``A = alpha R``.

    Source: GPG, arXiv:2504.02546, with alpha as in verl.

    Example:
        >>> Gpg().row_advantages(advantage_inputs([1.0, 0.0], group=[0, 0])).tolist()
        [1.0, -1.0]
    """

    normalizer: float = setting(1.0, "Divisor of the advantages.", more_than=0)

    def row_advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Compute each row's centred reward, divided by the fraction of nonzero rewards: [B]."""
        rewards = inputs.rewards
        valid = inputs.valid
        group_size, group_mean, _ = ragged.group_statistics(rewards, inputs.group, valid)

        # Inverse of the fraction of valid rows with a nonzero reward (alpha).
        valid_count = valid.sum().to(rewards.dtype)
        nonzero_count = (valid & (rewards != 0)).sum()
        sparsity_scale = valid_count / nonzero_count.clamp(min=1)

        centred_rewards = rewards - torch.where(group_size > 1, group_mean, 0)
        return torch.where(valid, sparsity_scale * centred_rewards / self.normalizer, 0)


@dataclass(frozen=True)
class Gdpo(GroupAdvantage):
    """Weighted sum of the GRPO advantages of the reward's components.

    ``A_i = sum_k w_k GRPO(r_k)_i``; GDPO then whitens over the batch (``whiten``). Normalising the sum
    instead maps different mixes of components to equal advantages. The total reward is used only for rows
    without components. A row with a NaN component is invalid for that component. Shaping and penalties change
    the total reward and not its components, so a configuration with this estimator must not have them: a
    penalty must be a component.

    Source: GDPO, arXiv:2601.05242; the example is the paper's.

    Example:
        The samples of a prompt differ first in one component, then in two. GDPO gives larger advantages in
        the second case. GRPO, which reads the total rewards (0, 1) and (0, 2), gives equal advantages.

        >>> one, two = {"a": [0.0, 1.0], "b": [0.0, 0.0]}, {"a": [0.0, 1.0], "b": [0.0, 1.0]}
        >>> inputs = advantage_inputs([0.0, 1.0], group=[0, 0], components=one)
        >>> [round(a, 3) for a in Gdpo().row_advantages(inputs).tolist()]
        [-0.707, 0.707]
        >>> inputs = advantage_inputs([0.0, 2.0], group=[0, 0], components=two)
        >>> [round(a, 3) for a in Gdpo().row_advantages(inputs).tolist()]
        [-1.414, 1.414]
    """

    epsilon: float = setting(EPSILON, EPSILON_MEANING, at_least=0)
    weights: dict[str, float] = setting(
        {}, "Weight of each reward component in the sum.", unset="empty: all with weight 1"
    )

    reads_rewards: ClassVar[bool] = False

    def row_advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Compute the weighted sum of the GRPO advantages of all reward components for each row: [B]."""
        # `reward` is the total of the components: including it would count them twice.
        components = dict(inputs.components)
        components.pop("reward", None)
        if not components:
            components = {"reward": inputs.rewards}

        weights = self.weights or dict.fromkeys(components, 1.0)
        unknown_names = sorted(set(weights) - set(components))
        if unknown_names:
            raise UserError(
                f"no response of a step has the reward component {', '.join(unknown_names)}",
                where="algorithm.advantage.weights",
                expected="components that the reward returns for every response",
                got=f"components {', '.join(sorted(components))}",
                fix="correct the name, or have the reward always return it (0 if it does not apply)",
            )

        # Normalise each component within its group, then add.
        component_grpo = Grpo(epsilon=self.epsilon)
        advantages = torch.zeros_like(inputs.rewards)
        has_component = torch.zeros_like(inputs.valid)
        for component in components.values():
            has_component |= component.isfinite()
        for name, weight in weights.items():
            component = components[name]
            component_valid = inputs.valid & component.isfinite()
            component_inputs = replace(inputs, rewards=component, valid=component_valid)
            advantages = advantages + weight * component_grpo.row_advantages(component_inputs)

        # A reward function may return a plain number without components: use the total reward of its rows.
        without_component = inputs.valid & ~has_component
        if without_component.any():
            total_reward_inputs = replace(inputs, valid=without_component)
            advantages = advantages + component_grpo.row_advantages(total_reward_inputs)
        return advantages


GAMMA_MEANING = "Discount of a later token's reward."


@dataclass(frozen=True)
class Reinforce(Advantage):
    """Discounted returns as advantages.

    Source: Williams (1992); with whitening REINFORCE++, arXiv:2501.03262.

    Example:
        >>> inputs = advantage_inputs([1.0], group=[0], lengths=[2])
        >>> Reinforce(gamma=0.5).estimate(inputs).advantages.tolist()
        [0.5, 1.0]
    """

    gamma: float = setting(1.0, GAMMA_MEANING, at_least=0, at_most=1)

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Compute the discounted return of every token, which is also its advantage: [N] each."""
        returns = discounted_returns(inputs.token_rewards, inputs.mask, inputs.lengths, gamma=self.gamma)
        return Advantages(returns, returns)


@dataclass(frozen=True)
class Remax(Advantage):
    """Discounted returns minus the reward of the greedy response to the same prompt.

    ``A_t = G_t - b``, where b is the greedy response's reward, shaped with the statistics of the samples'
    rewards. A KL penalty in the reward applies to the samples only. The returns are G.

    Source: ReMax, arXiv:2310.10505.

    Example:
        >>> inputs = advantage_inputs([1.0], group=[0], lengths=[2], baseline_rewards=[0.25])
        >>> Remax().estimate(inputs).advantages.tolist()
        [0.75, 0.75]
    """

    gamma: float = setting(1.0, GAMMA_MEANING, at_least=0, at_most=1)

    needs_greedy_baseline: ClassVar[bool] = True

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Compute each token's return minus the greedy reward, and its return: [N] each.

        Raises ValueError without the rewards of greedy responses.
        """
        if inputs.baseline_rewards is None:
            raise ValueError("ReMax needs rewards of greedy responses: Scores.baseline_rewards is missing")

        returns = discounted_returns(inputs.token_rewards, inputs.mask, inputs.lengths, gamma=self.gamma)
        baseline = ragged.broadcast_rows(inputs.baseline_rewards.to(returns.dtype), inputs.lengths)
        return Advantages(
            advantages=torch.where(inputs.mask, returns - baseline, 0),
            returns=returns,
        )


@dataclass(frozen=True)
class OptimalTokenBaseline(Advantage):
    """Reward-to-go of each token minus a baseline per prompt and position that minimises gradient variance.

    ``A_t = G_t - B_t`` with ``B_t = sum_i W_t^i G_t^i / sum_i W_t^i`` over the valid samples of the prompt
    that have a t-th response token. The energy ``W_t = sum_(j <= t) (1 - 2 p_j + sum_v p_j(v)^2)``
    approximates the squared gradient norm of the response up to token t: each term is the squared norm of a
    token's gradient with respect to its logits, where p_j is the token's probability. The only sample of a
    prompt has no baseline: ``A = G``. The returns are G.

    Source: The Optimal Token Baseline, arXiv:2602.07078; singleton rule and ``lone_tail`` from verl.

    Example:
        The uncertain second sample moves the baseline towards its own reward.

        >>> probs, squared_probs = torch.tensor([[0.8, 0.2], [0.68, 0.52]]).double()
        >>> inputs = advantage_inputs([1.0, 0.0], group=[0, 0])
        >>> inputs = replace(inputs, log_probs=probs.log(), squared_probs=squared_probs)
        >>> [round(a, 3) for a in OptimalTokenBaseline().estimate(inputs).advantages.tolist()]
        [0.933, -0.067]
    """

    lone_tail: str = setting(
        "zero",
        "Advantage of the tokens of a prompt's longest response that are beyond all others: zero, as their "
        "own baseline, or the rewards to go.",
        choices=("zero", "returns"),
    )

    needs_squared_probs: ClassVar[bool] = True
    compares_samples: ClassVar[bool] = True

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Compute advantages ``A_t = G_t - B_t`` and returns G_t of every token, [N] each.

        Raises ValueError if the actor's log-probs or squared probabilities are missing.
        """
        if inputs.log_probs is None or inputs.squared_probs is None:
            raise ValueError("the optimal token baseline needs Scores.squared_probs and old_log_probs")
        mask = inputs.mask
        returns = discounted_returns(inputs.token_rewards, mask, inputs.lengths, gamma=1.0)

        # The tensors below have only response tokens. `token_index` is t: a token's index in its response.
        lengths = inputs.response_lengths.long()
        response_starts = lengths.cumsum(0) - lengths
        token_starts = ragged.broadcast_rows(response_starts, lengths)
        token_index = torch.arange(len(token_starts)) - token_starts

        # The energy W_t is a sum over the tokens up to t of one response. Compute it as the difference of two
        # prefix sums over the tokens of all responses.
        token_energy = (1 - 2 * inputs.log_probs.exp() + inputs.squared_probs)[mask].clamp(min=0)
        prefix_sums = torch.cat([token_energy.new_zeros(1), token_energy.cumsum(0)])
        energy = prefix_sums[1:] - prefix_sums[token_starts]

        # The baseline B_t is the mean of G_t over the samples of a prompt, weighted by W_t. Each pair of a
        # prompt and an index t has one slot, which sums over the samples.
        row_group, group_count = ragged.renumber_groups(inputs.group)
        token_group = ragged.broadcast_rows(row_group, lengths)
        max_length = int(lengths.max()) if len(lengths) else 0
        slot = token_group * max_length + token_index
        zeros = energy.new_zeros(group_count * max_length)
        weights = zeros.index_add(0, slot, energy)
        weighted_returns = zeros.index_add(0, slot, energy * returns[mask])
        # The clamp only matters where the energy is 0: without a gradient, any baseline will do.
        baseline = (weighted_returns / weights.clamp(min=1e-8))[slot]

        # The only sample of a prompt has no baseline: its advantage is its return.
        has_tokens = (lengths > 0).to(energy.dtype)
        sample_count = energy.new_zeros(group_count).index_add(0, row_group, has_tokens)
        has_baseline = sample_count[token_group] > 1

        # `lone_tail`: "returns" removes the baseline of tokens at an index that only one sample reaches.
        if self.lone_tail == "returns":
            tokens_in_slot = zeros.index_add(0, slot, torch.ones_like(energy))
            has_baseline = has_baseline & (tokens_in_slot[slot] > 1)

        advantages = torch.zeros_like(returns)
        advantages[mask] = returns[mask] - torch.where(has_baseline, baseline, 0)
        return Advantages(advantages, returns)


@dataclass(frozen=True)
class Gae(Advantage):
    """Generalised advantage estimation from rewards and the critic's values; see `gae`.

    Source: GAE, arXiv:1506.02438; with PPO, arXiv:1707.06347.
    """

    gamma: float = setting(1.0, GAMMA_MEANING, at_least=0, at_most=1)
    lam: float = setting(
        1.0,
        "Lambda: 1 uses only the rewards, 0 only the critic's next value.",
        at_least=0,
        at_most=1,
    )

    needs_critic: ClassVar[bool] = True

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Compute advantages and the critic's targets by GAE with one lambda for both: [N] each."""
        return gae(
            inputs.token_rewards,
            _critic_values(inputs),
            inputs.mask,
            inputs.lengths,
            gamma=self.gamma,
            lam=self.lam,
        )


@dataclass(frozen=True)
class Vapo(Advantage):
    """GAE with a length-dependent lambda for the policy, and a fixed lambda for the critic's targets.

    Source: VAPO, arXiv:2504.05118, decoupled and length-adaptive GAE.
    """

    gamma: float = setting(1.0, GAMMA_MEANING, at_least=0, at_most=1)
    critic_lambda: float = setting(1.0, "Lambda of the critic's targets.", at_least=0, at_most=1)
    alpha: float = setting(0.05, "The policy's lambda is 1 - 1 / (alpha * response length).", more_than=0)

    needs_critic: ClassVar[bool] = True

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Compute advantages with a length-adaptive lambda, and the critic's targets: [N] each."""
        gae_inputs = (inputs.token_rewards, _critic_values(inputs), inputs.mask, inputs.lengths)
        policy_lambda = length_adaptive_lambda(inputs.response_lengths, alpha=self.alpha)

        # Two passes over the same rewards and values: only lambda differs.
        policy_estimate = gae(*gae_inputs, gamma=self.gamma, lam=policy_lambda)
        critic_estimate = gae(*gae_inputs, gamma=self.gamma, lam=self.critic_lambda)
        return Advantages(policy_estimate.advantages, critic_estimate.returns)


def discounted_returns(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    gamma: float,
) -> Tensor:
    """Compute the discounted return of each response token: ``G_t = r_t + gamma G_(t+1)``, [N].

    With gamma = 1 and the reward on the last token this is REINFORCE++'s return before whitening.

    Source: REINFORCE++, arXiv:2501.03262.

    Example:
        The middle token comes from a tool: it is skipped and adds no discount.

        >>> r, mask = torch.tensor([0.0, 9.0, 1.0]), torch.tensor([True, False, True])
        >>> discounted_returns(r, mask, torch.tensor([3]), gamma=0.5).tolist()
        [0.5, 0.0, 1.0]
    """
    # Compact the response tokens, so that the next token in the scan is the next response token.
    response_lengths = ragged.row_sums(mask.to(torch.float64), lengths).long()
    returns = torch.zeros_like(rewards)
    returns[mask] = ragged.discounted_sums(rewards[mask], response_lengths, gamma)
    return returns


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    gamma: float,
    lam: Tensor | float,
) -> Advantages:
    """Estimate advantages from rewards and values [N] with the trade-off lambda (a number or [B]).

    ``delta_t = r_t + gamma V_next - V_t`` and ``A_t = delta_t + gamma lam A_next``, where *next* is the next
    response token of the row. V_next and A_next are 0 at the last token: an episode ends with its row. The
    critic's targets are ``A + V``. ``values[t]`` is the critic's estimate before token t is produced.

    Source: GAE, arXiv:1506.02438, equation 16; tokens outside the mask are skipped as in verl.

    Example:
        >>> r, v = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25])
        >>> a, g = gae(r, v, torch.tensor([True, True]), torch.tensor([2]), gamma=1.0, lam=0.5)
        >>> a.tolist(), g.tolist()
        ([0.125, 0.75], [0.625, 1.0])
    """
    # Compact the response tokens, so that the next token in the scan is the next response token.
    response_lengths = ragged.row_sums(mask.to(torch.float64), lengths).long()
    response_rewards = rewards[mask]
    response_values = values[mask]

    # V_next: values shifted by one, with 0 after the last response token of each row.
    next_values = torch.zeros_like(response_values)
    next_values[:-1] = response_values[1:]
    last_positions = torch.cumsum(response_lengths, 0)[response_lengths > 0] - 1
    next_values[last_positions] = 0

    # GAE is the discounted sum of the TD errors, with decay gamma lambda.
    deltas = response_rewards + gamma * next_values - response_values
    decay = gamma * torch.as_tensor(lam, dtype=values.dtype, device=values.device)
    advantages = torch.zeros_like(values)
    advantages[mask] = ragged.discounted_sums(deltas, response_lengths, decay)
    return Advantages(advantages, torch.where(mask, advantages + values, 0))


def length_adaptive_lambda(response_lengths: Tensor, *, alpha: float) -> Tensor:
    """Compute VAPO's lambda for each row [B]: ``1 - 1 / (alpha l)``, clamped to [0, 1].

    With this lambda the sum of GAE's weights is proportional to the response length l:
    ``1 / (1 - lambda) = alpha l``. Lambda is 0 for responses shorter than 1 / alpha tokens, empty responses
    included.

    Source: VAPO, arXiv:2504.05118, length-adaptive GAE, with alpha = 0.05.

    Example:
        >>> length_adaptive_lambda(torch.tensor([10, 100, 1000]), alpha=0.05).tolist()
        [0.0, 0.8, 0.98]
    """
    lengths = response_lengths.to(torch.float64).clamp(min=1)
    return (1 - 1 / (alpha * lengths)).clamp(0, 1)


def _critic_values(inputs: AdvantageInputs) -> Tensor:
    """Return the critic's values [N]; raise ValueError if no critic computed them."""
    if inputs.values is None:
        raise ValueError("GAE needs the critic's values: Scores.values is missing")
    return inputs.values
