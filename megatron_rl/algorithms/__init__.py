"""The maths of LLM reinforcement learning: pure functions of ragged tensors, with no distribution, no I/O.

`table` holds the named algorithms and pieces; it and `lookup` are importable without torch, and the names
below are loaded when first asked for. One step uses, in this order: `get_algorithm` once, then `estimate`,
`minibatches`, `policy_objective` and `value_objective` per micro-batch, and `next_state`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.algorithms.advantages.advantage import Advantage as Advantage
    from megatron_rl.algorithms.advantages.advantage import AdvantageInputs as AdvantageInputs
    from megatron_rl.algorithms.advantages.advantage import Advantages as Advantages
    from megatron_rl.algorithms.advantages.advantage import FunctionAdvantage as FunctionAdvantage
    from megatron_rl.algorithms.advantages.advantage import outcome as outcome
    from megatron_rl.algorithms.aggregation import Aggregation as Aggregation
    from megatron_rl.algorithms.algorithm import Algorithm as Algorithm
    from megatron_rl.algorithms.correction import Correction as Correction
    from megatron_rl.algorithms.estimation import estimate as estimate
    from megatron_rl.algorithms.filters import DynamicSampling as DynamicSampling
    from megatron_rl.algorithms.filters import informative_groups as informative_groups
    from megatron_rl.algorithms.filters import prompts_to_sample as prompts_to_sample
    from megatron_rl.algorithms.filters import take_groups as take_groups
    from megatron_rl.algorithms.kl import Kl as Kl
    from megatron_rl.algorithms.lookup import algorithm_of as algorithm_of
    from megatron_rl.algorithms.lookup import get_algorithm as get_algorithm
    from megatron_rl.algorithms.minibatch import minibatches as minibatches
    from megatron_rl.algorithms.minibatch import weighted as weighted
    from megatron_rl.algorithms.mismatch import mismatch_metrics as mismatch_metrics
    from megatron_rl.algorithms.objectives import policy_objective as policy_objective
    from megatron_rl.algorithms.objectives import sft_objective as sft_objective
    from megatron_rl.algorithms.objectives import value_objective as value_objective
    from megatron_rl.algorithms.policy_losses.policy_loss import FunctionLoss as FunctionLoss
    from megatron_rl.algorithms.policy_losses.policy_loss import PolicyLoss as PolicyLoss
    from megatron_rl.algorithms.policy_losses.policy_loss import TokenLoss as TokenLoss
    from megatron_rl.algorithms.preference import PreferenceSettings as PreferenceSettings
    from megatron_rl.algorithms.preference import dpo_objective as dpo_objective
    from megatron_rl.algorithms.preference import reward_model_objective as reward_model_objective
    from megatron_rl.algorithms.rewards import Imitation as Imitation
    from megatron_rl.algorithms.rewards import Overlong as Overlong
    from megatron_rl.algorithms.rewards import RewardShaping as RewardShaping
    from megatron_rl.algorithms.state import AlgorithmState as AlgorithmState
    from megatron_rl.algorithms.state import initial_state as initial_state
    from megatron_rl.algorithms.state import next_state as next_state
    from megatron_rl.algorithms.table import ALGORITHMS as ALGORITHMS
    from megatron_rl.algorithms.validity import valid_rows as valid_rows
    from megatron_rl.algorithms.value_loss import ValueLoss as ValueLoss

_HOME = {
    "ALGORITHMS": "table",
    "Advantage": "advantages.advantage",
    "AdvantageInputs": "advantages.advantage",
    "Advantages": "advantages.advantage",
    "Aggregation": "aggregation",
    "Algorithm": "algorithm",
    "AlgorithmState": "state",
    "Correction": "correction",
    "DynamicSampling": "filters",
    "FunctionAdvantage": "advantages.advantage",
    "FunctionLoss": "policy_losses.policy_loss",
    "Imitation": "rewards",
    "Kl": "kl",
    "Overlong": "rewards",
    "PolicyLoss": "policy_losses.policy_loss",
    "PreferenceSettings": "preference",
    "RewardShaping": "rewards",
    "TokenLoss": "policy_losses.policy_loss",
    "ValueLoss": "value_loss",
    "algorithm_of": "lookup",
    "dpo_objective": "preference",
    "estimate": "estimation",
    "get_algorithm": "lookup",
    "informative_groups": "filters",
    "initial_state": "state",
    "minibatches": "minibatch",
    "mismatch_metrics": "mismatch",
    "next_state": "state",
    "outcome": "advantages.advantage",
    "policy_objective": "objectives",
    "prompts_to_sample": "filters",
    "reward_model_objective": "preference",
    "sft_objective": "objectives",
    "take_groups": "filters",
    "valid_rows": "validity",
    "value_objective": "objectives",
    "weighted": "minibatch",
}
__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
