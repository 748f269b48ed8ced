"""Advantages along one response: discounted returns (REINFORCE++, ReMax), GAE, VAPO's lambda.

Per-token tensors are ragged [N] with ``lengths`` [B]; ``mask`` [N] marks response tokens. Tokens outside
the mask (prompts, tool output between turns) are skipped: the recursion goes from one response token to
the next across them, and their result is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_rl.algorithms.advantages import Advantage, AdvantageInputs, Advantages
from megatron_rl.algorithms.piece import ragged, torch
from megatron_rl.config.setting import setting

if TYPE_CHECKING:
    from torch import Tensor

GAMMA_MEANING = "Discount of the reward of a later token."


@dataclass(frozen=True)
class Reinforce(Advantage):
    """Take the discounted returns themselves as advantages.

    Source: Williams (1992); with whitening REINFORCE++, arXiv:2501.03262.

    Example:
        >>> inputs = advantage_inputs([1.0], group=[0], lengths=[2])
        >>> Reinforce(gamma=0.5).estimate(inputs).advantages.tolist()
        [0.5, 1.0]
    """

    gamma: float = setting(1.0, GAMMA_MEANING, at_least=0, at_most=1)

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Return the returns as advantages and as returns."""
        returns = discounted_returns(inputs.token_rewards, inputs.mask, inputs.lengths, gamma=self.gamma)
        return Advantages(returns, returns)


@dataclass(frozen=True)
class Remax(Advantage):
    """Subtract the reward of the greedy response to the same prompt from the returns.

    ``A_t = G_t - b`` with the greedy response's reward b, shaped as the samples' rewards are, by their
    statistics; a KL penalty in the reward is the samples' alone. The returns are G.

    Source: ReMax, arXiv:2310.10505.

    Example:
        >>> inputs = advantage_inputs([1.0], group=[0], lengths=[2], baseline_rewards=[0.25])
        >>> Remax().estimate(inputs).advantages.tolist()
        [0.75, 0.75]
    """

    gamma: float = setting(1.0, GAMMA_MEANING, at_least=0, at_most=1)

    needs_greedy_baseline: ClassVar[bool] = True

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Return the returns less the baseline, and the returns."""
        if inputs.baseline_rewards is None:
            raise ValueError("ReMax needs rewards of greedy responses: Scores.baseline_rewards is missing")
        mask, lengths = inputs.mask, inputs.lengths
        returns = discounted_returns(inputs.token_rewards, mask, lengths, gamma=self.gamma)
        baseline = ragged.broadcast_rows(inputs.baseline_rewards.to(returns.dtype), lengths)
        return Advantages(torch.where(mask, returns - baseline, 0), returns)


@dataclass(frozen=True)
class Gae(Advantage):
    """Estimate advantages from rewards and the critic's values, see `gae`.

    Source: GAE, arXiv:1506.02438; with PPO, arXiv:1707.06347.
    """

    gamma: float = setting(1.0, GAMMA_MEANING, at_least=0, at_most=1)
    lam: float = setting(
        1.0, "Lambda: 1 trusts the rewards alone, 0 the critic's next value.", at_least=0, at_most=1
    )

    needs_critic: ClassVar[bool] = True

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Return advantages and the critic's targets."""
        values = _values(inputs)
        return gae(inputs.token_rewards, values, inputs.mask, inputs.lengths, gamma=self.gamma, lam=self.lam)


@dataclass(frozen=True)
class Vapo(Advantage):
    """Take `gae` twice: the policy's lambda by response length, the critic's own for its targets.

    Source: VAPO, arXiv:2504.05118, decoupled and length-adaptive GAE.
    """

    gamma: float = setting(1.0, GAMMA_MEANING, at_least=0, at_most=1)
    critic_lambda: float = setting(1.0, "Lambda of the critic's targets.", at_least=0, at_most=1)
    alpha: float = setting(0.05, "The policy's lambda is 1 - 1 / (alpha * response length).", more_than=0)

    needs_critic: ClassVar[bool] = True

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Return the policy's advantages and the critic's targets."""
        rewards, values, rows = inputs.token_rewards, _values(inputs), (inputs.mask, inputs.lengths)
        lam = length_adaptive_lambda(inputs.response_lengths, alpha=self.alpha)
        policy = gae(rewards, values, *rows, gamma=self.gamma, lam=lam)
        critic = gae(rewards, values, *rows, gamma=self.gamma, lam=self.critic_lambda)
        return Advantages(policy.advantages, critic.returns)


def discounted_returns(rewards: Tensor, mask: Tensor, lengths: Tensor, *, gamma: float) -> Tensor:
    """Sum the rewards from each response token on: ``G_t = r_t + gamma G_(t+1)``, [N].

    With gamma = 1 and the reward on the last token this is REINFORCE++'s return before whitening.

    Source: REINFORCE++, arXiv:2501.03262.

    Example:
        The middle token is a tool's: it is skipped, not discounted.

        >>> r, mask = torch.tensor([0.0, 9.0, 1.0]), torch.tensor([True, False, True])
        >>> discounted_returns(r, mask, torch.tensor([3]), gamma=0.5).tolist()
        [0.5, 0.0, 1.0]
    """
    kept = ragged.row_sums(mask.to(torch.float64), lengths).long()
    result = torch.zeros_like(rewards)
    result[mask] = ragged.discounted_sums(rewards[mask], kept, gamma)
    return result


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, lengths: Tensor, *, gamma: float, lam: Tensor | float
) -> Advantages:
    """Estimate advantages from rewards and values [N] with the trade-off lambda (a number or [B]).

    ``delta_t = r_t + gamma V_next - V_t`` and ``A_t = delta_t + gamma lam A_next``, where *next* is the next
    response token of the row and both are 0 after the last: an episode ends with its row. The critic's
    targets are ``A + V``. ``values[t]`` is the critic's estimate before token t is produced.

    Source: GAE, arXiv:1506.02438, equation 16; skipping of other tokens as in verl.

    Example:
        >>> r, v = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25])
        >>> a, g = gae(r, v, torch.tensor([True, True]), torch.tensor([2]), gamma=1.0, lam=0.5)
        >>> a.tolist(), g.tolist()
        ([0.125, 0.75], [0.625, 1.0])
    """
    kept = ragged.row_sums(mask.to(torch.float64), lengths).long()
    r, v = rewards[mask], values[mask]
    following = torch.cat([v[1:], v.new_zeros(1)]) if len(v) else v
    last = torch.cumsum(kept, 0)[kept > 0] - 1
    following[last] = 0
    decay = gamma * torch.as_tensor(lam, dtype=v.dtype, device=v.device)
    advantages = torch.zeros_like(values)
    advantages[mask] = ragged.discounted_sums(r + gamma * following - v, kept, decay)
    return Advantages(advantages, torch.where(mask, advantages + values, 0))


def length_adaptive_lambda(response_lengths: Tensor, *, alpha: float) -> Tensor:
    """Return VAPO's lambda for each row [B]: ``1 - 1 / (alpha l)``, kept within [0, 1].

    It makes the sum of GAE's weights proportional to the length l: ``1 / (1 - lambda) = alpha l``.
    Responses shorter than 1 / alpha tokens get 0, and so do empty ones.

    Source: VAPO, arXiv:2504.05118, length-adaptive GAE, with alpha = 0.05.

    Example:
        >>> length_adaptive_lambda(torch.tensor([10, 100, 1000]), alpha=0.05).tolist()
        [0.0, 0.8, 0.98]
    """
    lengths = response_lengths.to(torch.float64).clamp(min=1)
    return (1 - 1 / (alpha * lengths)).clamp(0, 1)


def _values(inputs: AdvantageInputs) -> Tensor:
    if inputs.values is None:
        raise ValueError("GAE needs the critic's values: Scores.values is missing")
    return inputs.values
