"""Equations of reinforcement learning for LLMs, as pure functions of ragged tensors: no ranks, no I/O.

A run calls `get_algorithm` once. A step then calls, in this order: `build_train_batch`, `minibatches`,
`policy_objective` and `value_objective` per micro-batch, and `next_state`.

`algorithm` (the named algorithms and pieces) and `lookup` can be imported without torch. So can this module,
since the names below are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.algorithms.advantages import Advantage as Advantage
    from megatron_rl.algorithms.advantages import AdvantageInputs as AdvantageInputs
    from megatron_rl.algorithms.advantages import Advantages as Advantages
    from megatron_rl.algorithms.advantages import FunctionAdvantage as FunctionAdvantage
    from megatron_rl.algorithms.advantages import (
        broadcast_row_advantages as broadcast_row_advantages,
    )
    from megatron_rl.algorithms.aggregation import Aggregation as Aggregation
    from megatron_rl.algorithms.aggregation import minibatches as minibatches
    from megatron_rl.algorithms.aggregation import with_loss_weights as with_loss_weights
    from megatron_rl.algorithms.algorithm import ALGORITHMS as ALGORITHMS
    from megatron_rl.algorithms.algorithm import Algorithm as Algorithm
    from megatron_rl.algorithms.correction import Correction as Correction
    from megatron_rl.algorithms.correction import mismatch_metrics as mismatch_metrics
    from megatron_rl.algorithms.estimation import AlgorithmState as AlgorithmState
    from megatron_rl.algorithms.estimation import build_train_batch as build_train_batch
    from megatron_rl.algorithms.estimation import initial_state as initial_state
    from megatron_rl.algorithms.estimation import next_state as next_state
    from megatron_rl.algorithms.estimation import old_policy_metrics as old_policy_metrics
    from megatron_rl.algorithms.estimation import valid_rows as valid_rows
    from megatron_rl.algorithms.kl import Distillation as Distillation
    from megatron_rl.algorithms.kl import Kl as Kl
    from megatron_rl.algorithms.lookup import algorithm_of as algorithm_of
    from megatron_rl.algorithms.lookup import get_algorithm as get_algorithm
    from megatron_rl.algorithms.losses import FunctionLoss as FunctionLoss
    from megatron_rl.algorithms.losses import PolicyLoss as PolicyLoss
    from megatron_rl.algorithms.losses import TokenLoss as TokenLoss
    from megatron_rl.algorithms.losses import ValueLoss as ValueLoss
    from megatron_rl.algorithms.objectives import policy_objective as policy_objective
    from megatron_rl.algorithms.objectives import sft_objective as sft_objective
    from megatron_rl.algorithms.objectives import value_objective as value_objective
    from megatron_rl.algorithms.preference import PreferencePairs as PreferencePairs
    from megatron_rl.algorithms.preference import PreferenceSettings as PreferenceSettings
    from megatron_rl.algorithms.preference import dpo_objective as dpo_objective
    from megatron_rl.algorithms.preference import reward_model_objective as reward_model_objective
    from megatron_rl.algorithms.rewards import DynamicSampling as DynamicSampling
    from megatron_rl.algorithms.rewards import Imitation as Imitation
    from megatron_rl.algorithms.rewards import Overlong as Overlong
    from megatron_rl.algorithms.rewards import RewardShaping as RewardShaping
    from megatron_rl.algorithms.rewards import informative_groups as informative_groups
    from megatron_rl.algorithms.rewards import prompts_to_sample as prompts_to_sample
    from megatron_rl.algorithms.rewards import take_groups as take_groups

# Exported names by the module that defines them. The imports above are for type checkers.
_NAMES = {
    "advantages": "Advantage AdvantageInputs Advantages FunctionAdvantage broadcast_row_advantages",
    "aggregation": "Aggregation minibatches with_loss_weights",
    "algorithm": "ALGORITHMS Algorithm",
    "correction": "Correction mismatch_metrics",
    "estimation": "AlgorithmState build_train_batch initial_state next_state old_policy_metrics valid_rows",
    "kl": "Distillation Kl",
    "lookup": "algorithm_of get_algorithm",
    "losses": "FunctionLoss PolicyLoss TokenLoss ValueLoss",
    "objectives": "policy_objective sft_objective value_objective",
    "preference": "PreferencePairs PreferenceSettings dpo_objective reward_model_objective",
    "rewards": "DynamicSampling Imitation Overlong RewardShaping informative_groups prompts_to_sample "
    "take_groups",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    # Called for names that the module does not have yet: import their module now.
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
