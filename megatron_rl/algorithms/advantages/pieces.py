"""Every advantage estimator in one form: ``(AdvantageInputs, Algorithm) -> Advantages``."""

from __future__ import annotations

from megatron_rl.algorithms.advantages import group
from megatron_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages, outcome
from megatron_rl.algorithms.settings import Algorithm


def grpo(inputs: AdvantageInputs, algorithm: Algorithm) -> Advantages:
    """Apply `group.grpo`."""
    return outcome(
        inputs, group.grpo(inputs.rewards, inputs.group, inputs.valid, epsilon=algorithm.std_epsilon)
    )


def dr_grpo(inputs: AdvantageInputs, algorithm: Algorithm) -> Advantages:
    """Apply `group.grpo` without division by the standard deviation."""
    return outcome(inputs, group.grpo(inputs.rewards, inputs.group, inputs.valid, scale_by_std=False))
