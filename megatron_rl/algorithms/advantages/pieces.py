"""Every advantage estimator in one form: ``(AdvantageInputs, Algorithm) -> Advantages``.

Whitening and clipping of advantages are settings of the algorithm and come afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.advantages import group, returns
from megatron_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages, outcome
from megatron_rl.algorithms.ragged import row_sums
from megatron_rl.algorithms.settings import Algorithm


def grpo(inputs: AdvantageInputs, algorithm: Algorithm) -> Advantages:
    """Apply `group.grpo`."""
    return outcome(
        inputs, group.grpo(inputs.rewards, inputs.group, inputs.valid, epsilon=algorithm.std_epsilon)
    )


def dr_grpo(inputs: AdvantageInputs, algorithm: Algorithm) -> Advantages:
    """Apply `group.grpo` without division by the standard deviation (also REINFORCE++'s baseline form)."""
    return outcome(inputs, group.grpo(inputs.rewards, inputs.group, inputs.valid, scale_by_std=False))


def grpo_leave_one_out(inputs: AdvantageInputs, algorithm: Algorithm) -> Advantages:
    """Apply `group.grpo_leave_one_out`."""
    return outcome(
        inputs,
        group.grpo_leave_one_out(inputs.rewards, inputs.group, inputs.valid, epsilon=algorithm.std_epsilon),
    )


def grpo_pass_at_k(inputs: AdvantageInputs, algorithm: Algorithm) -> Advantages:
    """Apply `group.grpo_pass_at_k`."""
    return outcome(
        inputs,
        group.grpo_pass_at_k(inputs.rewards, inputs.group, inputs.valid, epsilon=algorithm.std_epsilon),
    )


def rloo(inputs: AdvantageInputs, algorithm: Algorithm) -> Advantages:
    """Apply `group.rloo`."""
    return outcome(inputs, group.rloo(inputs.rewards, inputs.group, inputs.valid))


def opo(inputs: AdvantageInputs, algorithm: Algorithm) -> Advantages:
    """Apply `group.opo`."""
    return outcome(inputs, group.opo(inputs.rewards, inputs.group, inputs.valid, response_lengths(inputs)))


def gpg(inputs: AdvantageInputs, algorithm: Algorithm) -> Advantages:
    """Apply `group.gpg`."""
    return outcome(inputs, group.gpg(inputs.rewards, inputs.group, inputs.valid))


def gdpo(inputs: AdvantageInputs, algorithm: Algorithm) -> Advantages:
    """Apply `group.gdpo` to the reward's components; ``reward`` itself is no component of its own."""
    components = {name: value for name, value in inputs.components.items() if name != "reward"}
    advantages = group.gdpo(
        components or {"reward": inputs.rewards},
        inputs.group,
        inputs.valid,
        weights=algorithm.component_weights,
        epsilon=algorithm.std_epsilon,
    )
    return outcome(inputs, advantages)


def reinforce(inputs: AdvantageInputs, algorithm: Algorithm) -> Advantages:
    """Apply `returns.discounted_returns`: the returns are the advantages."""
    found = returns.discounted_returns(
        inputs.token_rewards, inputs.mask, inputs.lengths, gamma=algorithm.gamma
    )
    return Advantages(found, found)


def remax(inputs: AdvantageInputs, algorithm: Algorithm) -> Advantages:
    """Apply `returns.remax`."""
    if inputs.baseline_rewards is None:
        raise ValueError("remax needs the rewards of greedy responses: Scores.baseline_rewards is missing")
    return returns.remax(
        inputs.token_rewards,
        inputs.mask,
        inputs.lengths,
        inputs.baseline_rewards,
        gamma=algorithm.gamma,
    )


def gae(inputs: AdvantageInputs, algorithm: Algorithm) -> Advantages:
    """Apply `returns.gae`."""
    return _gae(inputs, algorithm, algorithm.gae_lambda)


def vapo(inputs: AdvantageInputs, algorithm: Algorithm) -> Advantages:
    """Apply `returns.gae` twice: the policy's lambda by response length, the critic's own for its targets."""
    lam = returns.length_adaptive_lambda(response_lengths(inputs), alpha=algorithm.length_adaptive_alpha)
    policy = _gae(inputs, algorithm, lam)
    critic = _gae(inputs, algorithm, algorithm.critic_lambda)
    return Advantages(policy.advantages, critic.returns)


def response_lengths(inputs: AdvantageInputs) -> Tensor:
    """Count the response tokens of each row: [B] float64."""
    return row_sums(inputs.mask.to(torch.float64), inputs.lengths)


def _gae(inputs: AdvantageInputs, algorithm: Algorithm, lam: Tensor | float) -> Advantages:
    if inputs.values is None:
        raise ValueError("GAE needs the critic's values: Scores.values is missing")
    return returns.gae(
        inputs.token_rewards, inputs.values, inputs.mask, inputs.lengths, gamma=algorithm.gamma, lam=lam
    )
