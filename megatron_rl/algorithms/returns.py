"""Advantage estimators along one response: discounted returns (REINFORCE++, ReMax), GAE, VAPO's lambda.

Per-token tensors are ragged [N] with ``lengths`` [B]; ``mask`` [N] marks response tokens. Tokens outside
the mask (prompts, tool output between turns) are skipped: the recursion steps from one response token to
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
        """Compute the returns, which are also the advantages."""
        returns = discounted_returns(inputs.token_rewards, inputs.mask, inputs.lengths, gamma=self.gamma)
        return Advantages(returns, returns)


@dataclass(frozen=True)
class Remax(Advantage):
    """Discounted returns minus the reward of the greedy response to the same prompt.

    ``A_t = G_t - b`` with the greedy response's reward b, shaped with the statistics of the samples' rewards;
    a KL penalty in the reward applies to the samples only. The returns are G.

    Source: ReMax, arXiv:2310.10505.

    Example:
        >>> inputs = advantage_inputs([1.0], group=[0], lengths=[2], baseline_rewards=[0.25])
        >>> Remax().estimate(inputs).advantages.tolist()
        [0.75, 0.75]
    """

    gamma: float = setting(1.0, GAMMA_MEANING, at_least=0, at_most=1)

    needs_greedy_baseline: ClassVar[bool] = True

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Compute returns minus baseline, and returns; raise ValueError without greedy rewards."""
        if inputs.baseline_rewards is None:
            raise ValueError("ReMax needs rewards of greedy responses: Scores.baseline_rewards is missing")

        returns = discounted_returns(inputs.token_rewards, inputs.mask, inputs.lengths, gamma=self.gamma)
        baseline = ragged.broadcast_rows(inputs.baseline_rewards.to(returns.dtype), inputs.lengths)
        return Advantages(
            advantages=torch.where(inputs.mask, returns - baseline, 0),
            returns=returns,
        )


@dataclass(frozen=True)
class Gae(Advantage):
    """Generalised advantage estimation from rewards and the critic's values; see `gae`.

    Source: GAE, arXiv:1506.02438; with PPO, arXiv:1707.06347.
    """

    gamma: float = setting(1.0, GAMMA_MEANING, at_least=0, at_most=1)
    lam: float = setting(
        1.0,
        "Lambda: 1 uses the rewards alone, 0 the critic's next value.",
        at_least=0,
        at_most=1,
    )

    needs_critic: ClassVar[bool] = True

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Compute advantages and the critic's targets."""
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
    """GAE with one lambda for the policy, by response length, and another for the critic's targets.

    Source: VAPO, arXiv:2504.05118, decoupled and length-adaptive GAE.
    """

    gamma: float = setting(1.0, GAMMA_MEANING, at_least=0, at_most=1)
    critic_lambda: float = setting(1.0, "Lambda of the critic's targets.", at_least=0, at_most=1)
    alpha: float = setting(0.05, "The policy's lambda is 1 - 1 / (alpha * response length).", more_than=0)

    needs_critic: ClassVar[bool] = True

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        """Compute the policy's advantages and the critic's targets."""
        samples = (inputs.token_rewards, _critic_values(inputs), inputs.mask, inputs.lengths)
        policy_lambda = length_adaptive_lambda(inputs.response_lengths, alpha=self.alpha)

        # Two passes over the same rewards and values: only lambda differs.
        policy = gae(*samples, gamma=self.gamma, lam=policy_lambda)
        critic = gae(*samples, gamma=self.gamma, lam=self.critic_lambda)
        return Advantages(policy.advantages, critic.returns)


def discounted_returns(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    gamma: float,
) -> Tensor:
    """Sum the discounted rewards from each response token on: ``G_t = r_t + gamma G_(t+1)``, [N].

    With gamma = 1 and the reward on the last token this is REINFORCE++'s return before whitening.

    Source: REINFORCE++, arXiv:2501.03262.

    Example:
        The middle token is a tool's: it is skipped, not discounted.

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
    response token of the row and both are 0 after the last: an episode ends with its row. The critic's
    targets are ``A + V``. ``values[t]`` is the critic's estimate before token t is produced.

    Source: GAE, arXiv:1506.02438, equation 16; skipping of other tokens as in verl.

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
    last = torch.cumsum(response_lengths, 0)[response_lengths > 0] - 1
    next_values[last] = 0

    # GAE is the discounted sum of the TD errors, with decay gamma lambda.
    deltas = response_rewards + gamma * next_values - response_values
    decay = gamma * torch.as_tensor(lam, dtype=values.dtype, device=values.device)
    advantages = torch.zeros_like(values)
    advantages[mask] = ragged.discounted_sums(deltas, response_lengths, decay)
    return Advantages(advantages, torch.where(mask, advantages + values, 0))


def length_adaptive_lambda(response_lengths: Tensor, *, alpha: float) -> Tensor:
    """Compute VAPO's lambda for each row [B]: ``1 - 1 / (alpha l)``, clamped to [0, 1].

    It makes the sum of GAE's weights proportional to the length l: ``1 / (1 - lambda) = alpha l``.
    Responses shorter than 1 / alpha tokens get 0, and so do empty ones.

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
