"""The maths of LLM reinforcement learning: pure functions of ragged tensors, with no distribution, no I/O.

`names`, `lookup`, `settings` and `problems` are importable without torch; the names below are loaded when
first asked for. One step uses, in this order: `get_algorithm` once, then `estimate`, `minibatches`,
`policy_objective` and `value_objective` per micro-batch, and `next_state`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.algorithms.estimation import estimate as estimate
    from megatron_rl.algorithms.filters import informative_groups as informative_groups
    from megatron_rl.algorithms.filters import prompts_to_sample as prompts_to_sample
    from megatron_rl.algorithms.filters import take_groups as take_groups
    from megatron_rl.algorithms.lookup import get_algorithm as get_algorithm
    from megatron_rl.algorithms.minibatch import minibatches as minibatches
    from megatron_rl.algorithms.minibatch import weighted as weighted
    from megatron_rl.algorithms.mismatch import mismatch_metrics as mismatch_metrics
    from megatron_rl.algorithms.names import ALGORITHMS as ALGORITHMS
    from megatron_rl.algorithms.objectives import policy_objective as policy_objective
    from megatron_rl.algorithms.objectives import sft_objective as sft_objective
    from megatron_rl.algorithms.objectives import value_objective as value_objective
    from megatron_rl.algorithms.preference import PreferenceSettings as PreferenceSettings
    from megatron_rl.algorithms.preference import dpo_objective as dpo_objective
    from megatron_rl.algorithms.preference import reward_model_objective as reward_model_objective
    from megatron_rl.algorithms.settings import Algorithm as Algorithm
    from megatron_rl.algorithms.state import AlgorithmState as AlgorithmState
    from megatron_rl.algorithms.state import initial_state as initial_state
    from megatron_rl.algorithms.state import next_state as next_state
    from megatron_rl.algorithms.validity import valid_rows as valid_rows

_HOME = {
    "ALGORITHMS": "names",
    "Algorithm": "settings",
    "AlgorithmState": "state",
    "PreferenceSettings": "preference",
    "dpo_objective": "preference",
    "estimate": "estimation",
    "get_algorithm": "lookup",
    "informative_groups": "filters",
    "initial_state": "state",
    "minibatches": "minibatch",
    "mismatch_metrics": "mismatch",
    "next_state": "state",
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
