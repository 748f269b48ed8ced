"""The maths of LLM reinforcement learning: pure functions of ragged tensors, with no distribution, no I/O.

`names` and `lookup` are importable without torch; everything else is loaded when first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.algorithms.estimation import estimate as estimate
    from megatron_rl.algorithms.lookup import get_algorithm as get_algorithm
    from megatron_rl.algorithms.minibatch import minibatches as minibatches
    from megatron_rl.algorithms.minibatch import weighted as weighted
    from megatron_rl.algorithms.mismatch import mismatch_metrics as mismatch_metrics
    from megatron_rl.algorithms.names import ALGORITHMS as ALGORITHMS
    from megatron_rl.algorithms.objectives import policy_objective as policy_objective
    from megatron_rl.algorithms.objectives import sft_objective as sft_objective
    from megatron_rl.algorithms.objectives import value_objective as value_objective
    from megatron_rl.algorithms.settings import Algorithm as Algorithm

_HOME = {
    "ALGORITHMS": "names",
    "Algorithm": "settings",
    "estimate": "estimation",
    "get_algorithm": "lookup",
    "minibatches": "minibatch",
    "mismatch_metrics": "mismatch",
    "policy_objective": "objectives",
    "sft_objective": "objectives",
    "value_objective": "objectives",
    "weighted": "minibatch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
